//! `anywarp stat` and a process that does not answer.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

fn start(args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_anywarp"))
        .args(["stat", &std::process::id().to_string()])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Answers a query as the device does.
fn answer(stream: &UnixStream) {
    let memory = rustix::fs::memfd_create("answer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut memory = File::from(memory);
    memory.write_all(b"anywarp-stat 1 pid=7\n").unwrap();
    let files = [memory.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(
        stream,
        &[IoSlice::new(b"!")],
        &mut beside,
        SendFlags::empty(),
    )
    .unwrap();
}

#[test]
fn a_process_that_is_stopped_for_some_time_is_not_taken_for_an_ended_one() {
    let pid = std::process::id();
    let name = SocketAddr::from_abstract_name(format!("anywarp-stat-{pid}")).unwrap();
    let listener = UnixListener::bind_addr(&name).unwrap();
    let once = start(&[]);
    let (_unanswered, _) = listener.accept().unwrap();
    let repeated = start(&["-i", "0.01", "-n", "3"]);
    answer(&listener.accept().unwrap().0);
    let (_also_unanswered, _) = listener.accept().unwrap();
    answer(&listener.accept().unwrap().0);

    let why = format!("anywarp: process {pid} does not answer within 5 s; is it stopped?\n");
    let once = once.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&once.stderr), why);
    assert_eq!(once.status.code(), Some(1));
    let repeated = repeated.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&repeated.stderr), why);
    let text = String::from_utf8_lossy(&repeated.stdout);
    assert_eq!(text.matches("pid=7").count(), 2, "{text}");
    assert_eq!(repeated.status.code(), Some(0));
}
