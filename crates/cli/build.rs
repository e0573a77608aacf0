//! Links the command so that it starts on glibc 2.28: see `crates/abi/link/glibc.c`.

use std::env;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "../abi/link/glibc.c";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let var = |name: &str| env::var(name).unwrap_or_default();
    if var("CARGO_CFG_TARGET_ENV") != "gnu" {
        return;
    }
    // The C compiler: the linker that is configured for the target, or else `CC`, or else `cc`.
    let cc = [var("RUSTC_LINKER"), var("CC"), "cc".to_owned()];
    let cc = cc.iter().find(|cc| !cc.is_empty()).map_or("cc", |cc| cc);
    let object = Path::new(&var("OUT_DIR")).join("glibc.o");
    let done = Command::new(cc)
        .args(["-O2", "-fPIC", "-DPROGRAM", "-DMATH", "-c", SOURCE, "-o"])
        .arg(&object)
        .status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "{cc} does not compile {SOURCE}"
    );
    println!("cargo::rustc-link-arg-bins={}", object.display());
    println!(
        "cargo::rustc-link-arg-bins=-Wl,--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,--pop-state"
    );
}
