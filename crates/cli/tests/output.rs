//! The output of the command.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

#[test]
fn the_command_ends_quietly_when_the_reader_of_its_output_has_gone() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let run = Command::new(env!("CARGO_BIN_EXE_anywarp"))
        .args(["bench", "--list"])
        .stdout(Stdio::from(writer))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stderr), "");
    assert_eq!(run.status.code(), Some(141));
}

/// Runs `anywarp capture` with empty files in place of the libraries. The loader ignores these files.
fn capture(folder: &Path, file: &Path, program: &str) -> Output {
    std::fs::create_dir_all(folder).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::write(folder.join(name), "").unwrap();
    }
    Command::new(env!("CARGO_BIN_EXE_anywarp"))
        .env("ANYWARP_LIB", folder)
        .args(["capture", "-w"])
        .arg(file)
        .args(["--", program])
        .output()
        .unwrap()
}

#[test]
fn a_capture_is_replaced_only_if_the_program_can_run_and_has_a_head_without_traffic() {
    let folder = std::env::temp_dir().join(format!("anywarp-captures-{}", std::process::id()));
    let file = folder.join("file.pcapng");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(&file, "an earlier capture").unwrap();
    for (program, status) in [
        ("no-such-program-here", 127),
        ("/no/such/program", 127),
        ("/etc/passwd", 126),
    ] {
        let run = capture(&folder, &file, program);
        assert_eq!(run.status.code(), Some(status), "{run:?}");
        assert_eq!(std::fs::read(&file).unwrap(), b"an earlier capture");
    }
    let run = capture(&folder, &file, "true");
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(bytes.get(..4), Some(&[0x0a, 0x0d, 0x0d, 0x0a][..]));
    let run = capture(&folder, Path::new("/dev/null"), "true");
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(String::from_utf8_lossy(&run.stderr).contains("not a regular file"));
    std::fs::remove_dir_all(&folder).unwrap();
}

fn full() -> Stdio {
    Stdio::from(std::fs::File::create("/dev/full").unwrap())
}

#[test]
fn an_output_that_cannot_be_written_is_an_error_without_a_panic() {
    for args in [&["bench", "--list"][..], &["--help"]] {
        let run = Command::new(env!("CARGO_BIN_EXE_anywarp"))
            .args(args)
            .stdout(full())
            .output()
            .unwrap();
        assert_eq!(
            String::from_utf8_lossy(&run.stderr),
            "anywarp: standard output: No space left on device (os error 28)\n"
        );
        assert_eq!(run.status.code(), Some(1));
    }
}

#[test]
fn a_message_that_cannot_be_written_does_not_change_the_status() {
    let status = Command::new(env!("CARGO_BIN_EXE_anywarp"))
        .args(["run", "no-such-program-here"])
        .stderr(full())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(127));
}

#[test]
fn bench_checks_its_arguments_before_it_measures() {
    for (args, status, text) in [
        (
            ["--report", "/tmp/x.pdf"],
            2,
            "--report: /tmp/x.pdf does not end in .svg, .html or .md",
        ),
        (
            ["--report", "/no/such/folder/x.svg"],
            1,
            "/no/such/folder/x.svg: No such file or directory (os error 2)",
        ),
        (["--json", "/dev"], 1, "/dev: is a directory"),
        (
            ["--cpus", "1023,1022"],
            2,
            "--cpus: there is no processor 1023 here, or no program may run on it; `--cpus none` does not pin",
        ),
    ] {
        let run = Command::new(env!("CARGO_BIN_EXE_anywarp"))
            .arg("bench")
            .args(args)
            .output()
            .unwrap();
        assert_eq!(
            String::from_utf8_lossy(&run.stderr),
            format!("anywarp: {text}\n")
        );
        assert_eq!(run.status.code(), Some(status));
    }
}

#[test]
fn a_wrong_value_is_named_in_one_line() {
    let pid = std::process::id().to_string();
    let interval = "anywarp: --interval must be from 0.01 to 1000000 seconds\n";
    let roles = "anywarp: the roles of tcp are connect and listen, those of udp bind and send\n";
    for (arguments, status, line) in [
        (&["stat", "--interval", "inf", &pid][..], 1, interval),
        (&["stat", "--interval", "0.001", &pid], 1, interval),
        (
            &["sockets", "check", "tcp", "bind", "127.0.0.1:1", "true"],
            2,
            roles,
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_anywarp"))
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), line);
        assert_eq!(output.status.code(), Some(status));
    }
}
