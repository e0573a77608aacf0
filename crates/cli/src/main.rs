//! The `anywarp` command: runs unmodified RDMA programs on any machine, and checks and measures the machine.
//!
//! Modules: [`cli`] defines the options, [`library`] finds the drop-in libraries, and [`cmd`] has one file for each subcommand.
//! All `unsafe` code is in [`sys`] and `bench/raw_sys.rs`.
#![deny(unsafe_code)]

mod bench;
mod cli;
mod cmd;
mod elf;
mod library;
mod lines;
mod pages;
mod perf;
mod sockets;
mod study;
mod sys;

use std::process::ExitCode;

use clap::Parser;

/// Ends the program quietly when the reader of its output has gone, as in `anywarp study list | head`. Otherwise each
/// `println!` would panic. SIGPIPE stays ignored, because it would also end a measurement when one of its programs ends.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>();
        if text.is_some_and(|text| {
            text.starts_with("failed printing to std") && text.contains("Broken pipe")
        }) {
            // The status of a program that SIGPIPE has ended.
            std::process::exit(128 + 13);
        }
        usual(panic);
    }));
}

fn main() -> ExitCode {
    end_with_the_reader();
    match cmd::dispatch(cli::Cli::parse()) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("anywarp: {failure}");
            failure.exit_code()
        }
    }
}
