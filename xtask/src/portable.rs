//! Reproducible builds: the same sources give the same bytes in every folder.
//!
//! Compilers embed the paths of sources in their output, for backtraces and assertions. Here each folder of the machine is
//! replaced by a fixed name, and [`check`] searches the result for remaining paths.

use crate::{Result, sh};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the folders of this machine that compilers see, and their replacements. If several match, the last one is used.
fn folders() -> Vec<(PathBuf, &'static str)> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let cargo = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(home?.join(".cargo")));
    let mut folders: Vec<_> = cargo.map(|dir| (dir, "/cargo")).into_iter().collect();
    folders.push((sh::root(), "/anywarp"));
    let target = sh::target();
    if !target.starts_with(sh::root()) {
        folders.push((target, "/anywarp/target"));
    }
    folders
}

/// If the component rust-src is installed, returns the folder with the sources of the standard library, and the path that rustc writes
/// when the component is not installed. With this replacement, a build has the same bytes in both cases.
fn standard_library() -> Result<Option<(PathBuf, String)>> {
    let rustc = || Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let root = sh::output(rustc().args(["--print", "sysroot"]))?;
    let sources = Path::new(root.trim()).join("lib/rustlib/src/rust");
    if !sources.exists() {
        return Ok(None);
    }
    let version = sh::output(rustc().arg("-vV"))?;
    let commit = version
        .lines()
        .find_map(|line| line.strip_prefix("commit-hash: "));
    Ok(commit.map(|commit| (sources, format!("/rustc/{commit}"))))
}

/// Returns a cargo command for a build whose result is installed. The caller's flags for rustc are kept.
pub fn cargo() -> Result<Command> {
    let mut flags: Vec<OsString> = Vec::new();
    if let Some(encoded) = std::env::var_os("CARGO_ENCODED_RUSTFLAGS") {
        flags.extend((!encoded.is_empty()).then_some(encoded));
    } else if let Ok(plain) = std::env::var("RUSTFLAGS") {
        flags.extend(plain.split_whitespace().map(OsString::from));
    }
    let mut remap = |from: &Path, to: &str| {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(from);
        flag.push("=");
        flag.push(to);
        flags.push(flag);
    };
    for (from, to) in folders() {
        remap(&from, to);
    }
    if let Some((from, to)) = standard_library()? {
        remap(&from, &to);
    }
    let mut command = sh::cargo();
    // RUSTFLAGS would be split at the spaces of a path. This variable is split at 0x1f, which a path hardly contains.
    command.env(
        "CARGO_ENCODED_RUSTFLAGS",
        flags.join(std::ffi::OsStr::new("\x1f")),
    );
    Ok(command)
}

/// Returns a C compiler command with the same replacements.
pub fn cc() -> Command {
    let mut cc = sh::cc();
    for (from, to) in folders() {
        let mut flag = OsString::from("-ffile-prefix-map=");
        flag.push(from);
        flag.push("=");
        flag.push(to);
        cc.arg(flag);
    }
    cc
}

/// Fails if a file in `dir` contains the path of cargo's folder, of the repository, or of the folder for build results.
pub fn check(dir: &Path) -> Result {
    let mut found = Vec::new();
    let folders = folders();
    each_file(dir, &mut |path| {
        let bytes = fs::read(path)?;
        for (folder, _) in &folders {
            if names(&bytes, folder) {
                found.push(format!("{}: {}", path.display(), folder.display()));
            }
        }
        Ok(())
    })?;
    if found.is_empty() {
        return Ok(());
    }
    Err(format!(
        "paths of this machine in what is installed:\n{}",
        found.join("\n")
    )
    .into())
}

fn each_file(dir: &Path, then: &mut impl FnMut(&Path) -> Result) -> Result {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            each_file(&entry.path(), then)?;
        } else if kind.is_file() {
            then(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether `bytes` contain `folder` or a path inside it. A match of a folder such as `/src` does not count if it is
/// the end of another path.
fn names(bytes: &[u8], folder: &Path) -> bool {
    let name = folder.as_os_str().as_bytes();
    let is_short = folder.components().count() <= 2;
    let goes_on =
        |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || b"._-".contains(b));
    memchr::memmem::find_iter(bytes, name).any(|at| {
        let is_longer = goes_on(bytes.get(at + name.len()));
        let is_tail = is_short && goes_on(at.checked_sub(1).and_then(|at| bytes.get(at)));
        !is_longer && !is_tail
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_folder_is_found_and_the_end_of_another_is_not() {
        let build = Path::new("/home/me/build");
        assert!(names(b"\0panicked/home/me/build/crates/a.rs\0", build));
        assert!(!names(b"/home/me/builds/crates/a.rs", build));
        assert!(!names(b"/anywarp/crates/a.rs", build));
        let short = Path::new("/src");
        assert!(names(b"\0/src/crates/a.rs", short));
        assert!(!names(b"crates/core/src/lib.rs", short));
    }

    #[test]
    fn files_in_subfolders_are_examined() {
        let dir = sh::target().join(format!("tmp/portable-{}", std::process::id()));
        fs::create_dir_all(dir.join("lib")).unwrap();
        fs::write(dir.join("lib/clean"), "/anywarp/crates").unwrap();
        let clean = check(&dir);
        let source = sh::root().join("crates/core/src/lib.rs");
        fs::write(dir.join("lib/bad"), source.as_os_str().as_bytes()).unwrap();
        let bad = check(&dir);
        fs::remove_dir_all(&dir).unwrap();
        clean.unwrap();
        assert!(bad.unwrap_err().to_string().contains("lib/bad"));
    }
}
