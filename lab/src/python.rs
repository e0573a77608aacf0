//! Environments of Python with packages of PyPI.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::Result;

use crate::process::step;

/// Creates a Python environment with these packages of PyPI, and no others, if it is not up to date. Returns the path of its Python.
pub(crate) fn environment(dir: &Path, packages: &[&str]) -> Result<PathBuf> {
    let python = dir.join("bin/python");
    let stamp = dir.join("installed");
    let wanted = packages.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|has| has == wanted) {
        return Ok(python);
    }
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    step(Command::new("python3").args(["-m", "venv"]).arg(dir))?;
    step(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(["--disable-pip-version-check", "--only-binary=:all:"])
            .args(packages),
    )?;
    fs::write(&stamp, wanted)?;
    Ok(python)
}
