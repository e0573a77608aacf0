//! The output of the command.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::process::{Command, Stdio};

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
