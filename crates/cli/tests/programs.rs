//! Programs that the command checks or starts. The drop-in libraries are replaced by empty files, which the loader skips.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with empty libraries, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anywarp-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        for library in [
            "libibverbs.so.1",
            "librdmacm.so.1",
            "libanywarp-path.so",
            "libanywarp-sockets.so",
        ] {
            fs::write(path.join(library), "").unwrap();
        }
        Self(path)
    }

    /// Creates an executable file.
    fn script(&self, text: &str) -> PathBuf {
        let path = self.0.join("script");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anywarp"));
        command.env("ANYWARP_LIB", &self.0);
        command
    }

    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command().args(args).output().unwrap();
        let text = [stdout, stderr].concat();
        (status.code(), String::from_utf8(text).unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn doctor_does_not_take_a_library_for_a_static_program() {
    let folder = Folder::new("doctor-library");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("libgcc_s.so"))
        .unwrap();
    let (status, text) = folder.run(&["doctor", library]);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("which loads this library"), "{text}");
}

#[test]
fn doctor_reports_a_missing_interpreter() {
    let folder = Folder::new("doctor-script");
    let script = folder.script("#!/no/such/interpreter\n");
    let (status, found) = folder.run(&["doctor", text(&script)]);
    assert_eq!(status, Some(1), "{found}");
    assert!(
        found.contains("fail  interpreter: /no/such/interpreter is not on this machine"),
        "{found}"
    );
}

#[test]
fn an_address_of_another_machine_is_refused() {
    let folder = Folder::new("address");
    for command in ["run", "capture"] {
        let (status, found) = folder.run(&[command, "--device-ip", "192.0.2.77", "true"]);
        assert_eq!(status, Some(2), "{found}");
        assert_eq!(
            found,
            "anywarp: --device-ip: 192.0.2.77 is not an address of this machine\n"
        );
    }
    let (status, found) = folder.run(&["run", "--device-ip", "127.0.0.1", "true"]);
    assert_eq!(status, Some(0), "{found}");
}

#[test]
fn a_program_inherits_the_disposition_of_sigpipe() {
    let folder = Folder::new("sigpipe");
    let own = env!("CARGO_BIN_EXE_anywarp");
    for start in ["run", "sockets run"] {
        for (before, is_ignored) in [("", false), ("trap '' PIPE;", true)] {
            let line = format!("{before} exec {own} {start} -- cat /proc/self/status");
            let run = Command::new("sh")
                .args(["-c", &line])
                .env("ANYWARP_LIB", &folder.0)
                .output()
                .unwrap();
            let text = String::from_utf8(run.stdout).unwrap();
            let mask = text.lines().find_map(|l| l.strip_prefix("SigIgn:"));
            let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
            // Signal 13 is bit 12.
            assert_eq!(mask & 1 << 12 != 0, is_ignored, "{line}");
        }
    }
}
