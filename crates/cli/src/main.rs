//! The `anywarp` command: runs unmodified RDMA programs on any machine, and shows what this machine offers.
//!
//! Order to read in: [`cli`] (what can be asked), [`library`] (where the drop-in libraries are and which
//! variables put them in front), then one file per subcommand in [`cmd`]. All `unsafe` is in [`sys`] and
//! `bench/door.rs`.
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
