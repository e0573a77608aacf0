//! `cargo xtask check`: the static checks, to run before the tests.

use crate::layers;
use xtask::{Result, sh};

/// Checks formatting, layers, lints and documentation of the whole workspace. Warnings are errors.
pub(crate) fn run() -> Result {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    layers::run(true)?;
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
