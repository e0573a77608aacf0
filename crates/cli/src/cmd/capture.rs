//! `anywarp capture`: runs a program like `anywarp run`, and writes its traffic to a file.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;

use anywarp_core::pcapng;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::{Failure, run};
use crate::cli::Capture;
use crate::library::Library;

/// Does not return on success, because this process executes the program.
pub(crate) fn run(args: &Capture) -> Result<ExitCode, Failure> {
    let mut command = run::command(&args.run)?;
    // The path is absolute, because the program may change its working directory.
    let file = env::current_dir()
        .map_err(|e| Failure::Write(args.write.clone(), e))?
        .join(&args.write);
    replace(&file, &pcapng::head()).map_err(|e| Failure::Write(file.clone(), e))?;
    command.env("ANYWARP_CAPTURE", &file);
    for (name, value) in [
        ("ANYWARP_CAPTURE_SNAPLEN", args.snaplen),
        ("ANYWARP_CAPTURE_LIMIT", args.limit),
    ] {
        if let Some(value) = value {
            command.env(name, value.to_string());
        }
    }
    eprintln!("anywarp: capturing into {}", file.display());
    if let Some(script) = Library::find().ok().and_then(|l| l.dissector()) {
        eprintln!(
            "anywarp: to read it: tshark -X lua_script:{} -r {}",
            script.display(),
            file.display()
        );
    }
    Err(run::exec(command))
}

/// Replaces or creates a file with these contents. The earlier file remains if that fails. A device, a FIFO, a symbolic link or a folder
/// is never replaced.
///
/// The file is created before the program starts, not at the first packet: errors are reported early, no other user can create it in
/// between, and a program without traffic leaves a capture without packets. It is going to contain the program's payload, so only this
/// user may read it.
fn replace(path: &Path, contents: &[u8]) -> io::Result<()> {
    // Not `fs::symlink_metadata`, which needs a newer glibc than other functions.
    match rustix::fs::lstat(path) {
        Ok(old) if FileType::from_raw_mode(old.st_mode).is_file() => {}
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "not a regular file, so it is not replaced",
            ));
        }
        Err(Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let new = path.with_file_name(format!(".anywarp-capture-{}", std::process::id()));
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    let renamed = file
        .write_all(contents)
        .and_then(|()| fs::rename(&new, path));
    if renamed.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&new);
    }
    renamed
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    #[test]
    fn only_a_regular_file_is_replaced() {
        let folder = env::temp_dir().join(format!("anywarp-replace-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        fs::write(at("old"), "old").unwrap();
        fs::set_permissions(at("old"), fs::Permissions::from_mode(0o644)).unwrap();
        for name in ["old", "new"] {
            replace(&at(name), b"contents").unwrap();
            assert_eq!(fs::read(at(name)).unwrap(), b"contents");
            let mode = fs::metadata(at(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        symlink(at("old"), at("link")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RUSR).unwrap();
        for name in ["link", "dangling", "fifo", ""] {
            assert!(replace(&at(name), b"more").is_err(), "{name}");
        }
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert!(fs::symlink_metadata(at("dangling")).unwrap().is_symlink());
        assert!(
            fs::symlink_metadata(at("fifo"))
                .unwrap()
                .file_type()
                .is_fifo()
        );
        assert_eq!(fs::read(at("old")).unwrap(), b"contents");
        let left = fs::read_dir(&folder).unwrap().count();
        assert_eq!(left, 5, "a temporary file is left");
        fs::remove_dir_all(&folder).unwrap();
    }
}
