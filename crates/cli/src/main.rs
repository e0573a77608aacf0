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
mod pages;
mod perf;
mod sockets;
mod study;
mod sys;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cmd::dispatch(cli::Cli::parse()) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("anywarp: {failure}");
            failure.exit_code()
        }
    }
}
