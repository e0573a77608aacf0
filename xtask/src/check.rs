//! `cargo xtask check`: what every change must pass before its tests are worth running.

use crate::floors;
use xtask::{Result, sh};

/// Formatting, floors, lints and documentation of the whole workspace; warnings are errors.
pub(crate) fn run() -> Result {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    floors::run(true)?;
    sh::run(sh::cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny=warnings",
    ]))?;
    sh::run(
        sh::cargo()
            .args([
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ])
            .env("RUSTDOCFLAGS", "--deny=warnings"),
    )
}
