//! The `anywarp` command: runs unmodified RDMA programs on any machine, and checks and measures the machine.
//!
//! Modules: [`cli`] defines the options, [`library`] finds the drop-in libraries, and [`cmd`] runs the subcommands, of which
//! [`mod@bench`], [`perf`], [`sockets`] and [`study`] contain the larger ones.
//! All `unsafe` code is in [`sys`] and `bench/raw_sys.rs`.
#![deny(unsafe_code)]

/// Like the macro of std, but does not panic if standard error cannot be written: no message may change the exit status, or keep a
/// program from starting.
macro_rules! eprint {
    ($($text:tt)*) => {
        $crate::messages::to_stderr(format_args!($($text)*))
    };
}

/// Like [`eprint`], with a newline.
macro_rules! eprintln {
    () => {
        eprint!("\n")
    };
    ($($text:tt)*) => {
        eprint!("{}\n", format_args!($($text)*))
    };
}

mod bench;
mod cli;
mod cmd;
mod elf;
mod library;
mod lines;
mod messages;
mod pages;
mod perf;
mod sockets;
mod study;
mod sys;

use std::process::ExitCode;

use clap::Parser;

/// If the output cannot be written, each `println!` panics. This makes such a panic end the program: quietly if the reader of the
/// output has gone, as in `anywarp study list | head`, and otherwise with a message. SIGPIPE stays ignored, because it would also end
/// a measurement when one of the measured programs ends.
fn end_without_output() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>();
        let why = text.and_then(|text| text.strip_prefix("failed printing to stdout: "));
        match why {
            // The status of a program that SIGPIPE has ended.
            Some(why) if why.contains("Broken pipe") => std::process::exit(128 + 13),
            Some(why) => {
                eprintln!("anywarp: standard output: {why}");
                std::process::exit(1);
            }
            None => usual(panic),
        }
    }));
}

/// Prints why the arguments were not accepted, or the help or the version that they ask for. Returns the exit status.
fn not_parsed(answer: &clap::Error) -> ExitCode {
    match answer.print() {
        Err(e) if !answer.use_stderr() && e.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("anywarp: standard output: {e}");
            ExitCode::FAILURE
        }
        _ => ExitCode::from(u8::try_from(answer.exit_code()).unwrap_or(1)),
    }
}

fn main() -> ExitCode {
    end_without_output();
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => return not_parsed(&answer),
    };
    match cmd::dispatch(cli) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("anywarp: {failure}");
            failure.exit_code()
        }
    }
}
