//! What the tasks of `cargo xtask` and `cargo lab` share: where things are, running programs, linking, expectations.

#![expect(
    missing_docs,
    reason = "the items are documented, their fields say what they are; only this workspace uses them"
)]

pub mod dist;
pub mod expect;
pub mod glibc;
pub mod link;
pub mod portable;
pub mod sh;
pub mod symbols;

/// What every task returns; the error is printed as it is.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Ends a task: prints its error, if it has one.
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
