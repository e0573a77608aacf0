//! Code shared by `cargo xtask` and `cargo lab`: paths, running programs, linking, expectation files.

#![expect(
    missing_docs,
    reason = "all types and functions are documented; their fields have names that explain them, and only this workspace uses them"
)]

pub mod dist;
pub mod expect;
pub mod glibc;
pub mod link;
pub mod portable;
pub mod sh;
pub mod symbols;

/// The result of a task. The error is printed unchanged.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Converts the result of a task to an exit status, and prints its error.
#[must_use]
pub fn finish(done: Result) -> std::process::ExitCode {
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
