//! `cargo lab sockets`: programs on the sockets of `libanywarp-sockets.so`, as tests/sockets/check has them.

use std::process::Command;
use xtask::{Result, sh};

/// Seconds after which the run is ended.
const LIMIT: &str = "180";

/// Runs the programs in a network namespace of their own.
pub(crate) fn run() -> Result {
    let library = sh::dist().join("lib/anywarp/libanywarp-sockets.so");
    if !library.exists() {
        return Err(format!("{}: missing; run `cargo xtask dist`", library.display()).into());
    }
    let mut check = Command::new("timeout");
    check
        .arg(LIMIT)
        .args(["unshare", "--map-root-user", "--net", "sh", "-c"])
        .arg("ip link set lo up && exec \"$0\" \"$1\"")
        .arg(sh::root().join("tests/sockets/check"))
        .arg(library);
    sh::run(&mut check)
}
