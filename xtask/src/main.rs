//! Build and check tasks: `cargo xtask TASK`.

mod check;
mod dist;
mod link;
mod load;
mod matrix;
mod sh;
mod symbols;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  check    formatting, lints and documentation, warnings as errors
  dist     build the libraries and the tool into target/dist
  matrix   compare the built libraries' symbols with the distribution's; write crates/abi/MATRIX.md;
           load them in every way that programs do
";

/// What every task returns; the error is printed as it is.
type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match *arguments {
        ["check"] => check::run(),
        ["dist"] => dist::run(),
        ["matrix"] => matrix::run(),
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
