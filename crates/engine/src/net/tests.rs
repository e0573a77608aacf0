//! Tests of connections from this process to peers that are plain sockets.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use anywarp_core::llp::mpa::deframe::{Extent, deframe};
use anywarp_core::llp::mpa::frame;
use anywarp_core::llp::mpa::marker::Stripper;
use anywarp_core::llp::mpa::startup::{Depths, InitiatorConfig, Request, RtrForms};
use anywarp_core::wire::ddp::Untagged;
use anywarp_core::wire::rdmap::Terminate;

use super::{drain, tcp};
use crate::connect::startup::{Dial, Failure, Opened, Owner, Startup};
use crate::engine::engine;
use crate::fd;
use crate::sys::socket;

/// Calls `fuzz` with each stored input of the fuzzer for a target, and with each variant of it in which one byte is changed.
pub(super) fn replay(target: &str, fuzz: fn(&[u8])) {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let mut count = 0;
    for entry in std::fs::read_dir(corpus.join(target)).unwrap() {
        let mut data = std::fs::read(entry.unwrap().path()).unwrap();
        fuzz(&data);
        for at in 0..data.len() {
            data[at] = data[at].wrapping_add(1);
            fuzz(&data);
            data[at] = data[at].wrapping_sub(1);
        }
        count += 1;
    }
    assert!(count >= 20, "{count} inputs");
}

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Flags of a start-up frame.
const M: u8 = 0x80;
const C: u8 = 0x40;
const R: u8 = 0x20;
const S: u8 = 0x10;

#[derive(Debug)]
enum End {
    Opened(Opened),
    Failed(Failure),
}

struct OwnerOfTest(Mutex<mpsc::Sender<End>>);

impl Owner for OwnerOfTest {
    fn opened(&self, _: &Arc<Startup>, opened: Opened) {
        let _ = self.0.lock().unwrap().send(End::Opened(opened));
    }

    fn requested(&self, _: &Arc<Startup>, request: Request) {
        panic!("an initiator got {request:?}");
    }

    fn failed(&self, _: &Arc<Startup>, failure: Failure) {
        let _ = self.0.lock().unwrap().send(End::Failed(failure));
    }
}

fn to_peer(peer: SocketAddr, config: InitiatorConfig) -> Dial {
    Dial {
        peer,
        bind: None,
        config,
        timeout: TEST_TIMEOUT,
        retry_refused: Duration::ZERO,
        port_space: None,
    }
}

/// Connects to a peer whose Reply has these flags. `block`: its IRD and ORD with their flags (RFC 6581 §9). `segment`: its
/// `TCP_MAXSEG`. Returns the outcome of the start-up and the peer's socket.
fn dial(
    config: InitiatorConfig,
    flags: u8,
    block: [u8; 4],
    segment: Option<i32>,
) -> (End, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    if let Some(bytes) = segment {
        socket::set_option(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_MAXSEG, bytes);
    }
    let to = listener.local_addr().unwrap();
    let peer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let mut request = [0; 24];
        stream.read_exact(&mut request).unwrap();
        let mut reply = b"MPA ID Rep Frame".to_vec();
        reply.extend([flags | S, 2, 0, 4]);
        reply.extend(block);
        stream.write_all(&reply).unwrap();
        stream
    });
    let (told, tells) = mpsc::channel();
    let owner = Arc::new(OwnerOfTest(Mutex::new(told)));
    let engine = engine().unwrap();
    let startup = Startup::dial(engine, owner, to_peer(to, config)).unwrap();
    let end = tells.recv_timeout(TEST_TIMEOUT).unwrap();
    drop(startup);
    (end, peer.join().unwrap())
}

/// Returns the only Terminate that the peer receives before the end of the stream.
fn terminate(mut peer: TcpStream, flags: u8) -> (u8, u8, u8) {
    let mut received = Vec::new();
    peer.read_to_end(&mut received).unwrap();
    if flags & M != 0 {
        let mut plain = Vec::new();
        Stripper::new()
            .strip(&received, flags & C != 0, &mut plain)
            .unwrap();
        received = plain;
    }
    let extent = Extent::of(&received).unwrap();
    assert_eq!(extent.total(), received.len(), "one FPDU");
    // With markers, `strip` has checked the CRC.
    let ulpdu = deframe(&received, extent, flags & (M | C) == C)
        .unwrap()
        .unwrap();
    let terminate = Terminate::parse(&ulpdu[Untagged::LEN..]);
    (terminate.layer, terminate.etype, terminate.code)
}

#[test]
fn a_peer_that_needs_more_reads_than_served_is_notified_before_the_end() {
    // RFC 6581 §9.1 [mpa-ird-insufficient] [mpa-startup-terminated], RFC 5044 §4.3 [mpa-markers-able]
    for flags in [C, C | M] {
        let (end, peer) = dial(
            InitiatorConfig::default(),
            flags,
            [0x80, 16, 0x80, 129],
            None,
        );
        assert!(
            matches!(end, End::Failed(Failure::Broken { .. })),
            "{end:?}"
        );
        assert_eq!(terminate(peer, flags), (2, 0, 6));
    }
}

#[test]
fn a_peer_without_a_common_ready_to_receive_message_is_notified_before_the_end() {
    // RFC 6581 §9.2 [mpa-rtr-none] [mpa-startup-terminated]
    let config = InitiatorConfig {
        rtr: RtrForms {
            write: true,
            ..RtrForms::NONE
        },
        ..InitiatorConfig::default()
    };
    let (end, peer) = dial(config, C, [0x80, 16, 0x40, 16], None);
    assert!(
        matches!(end, End::Failed(Failure::Broken { .. })),
        "{end:?}"
    );
    assert_eq!(terminate(peer, C), (2, 0, 7));
}

#[test]
fn the_owner_gets_the_depths_of_the_peer_in_any_case() {
    // RFC 6581 §9.1 [mpa-depths-reported]
    let named = Some(Depths { ird: 5, ord: 7 });
    let (end, _peer) = dial(InitiatorConfig::default(), C, [0x80, 5, 0x80, 7], None);
    let End::Opened(opened) = end else {
        panic!("{end:?}");
    };
    assert_eq!(opened.peer_depths, named);
    assert_eq!((opened.params.ird, opened.params.ord), (16, 5));
    let (end, _peer) = dial(InitiatorConfig::default(), C | R, [0x80, 5, 0x80, 7], None);
    let End::Failed(Failure::Rejected { peer_depths, .. }) = end else {
        panic!("{end:?}");
    };
    assert_eq!(peer_depths, named);
}

#[test]
fn a_frame_fills_the_segments_that_tcp_uses() {
    // RFC 5044 §5.1 [mpa-emss]
    for segment in [Some(600), Some(1400), None] {
        let (end, _peer) = dial(InitiatorConfig::default(), C, [0x80, 5, 0x80, 7], segment);
        let End::Opened(opened) = end else {
            panic!("{end:?}");
        };
        let fd = opened.fd.get();
        let emss = socket::get_option(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG).unwrap();
        if let Some(segment) = segment {
            // TCP options shorten the segment: timestamps take twelve bytes.
            assert!((segment - 40..=segment).contains(&emss), "{emss}");
        }
        for markers in [false, true] {
            let want = frame::mulpdu(emss as usize, markers);
            assert_eq!(tcp::mulpdu(&opened.fd, markers), want);
        }
    }
}

#[test]
fn a_frame_is_not_held_back() {
    // RFC 5044 §5.1 [mpa-align]: if TCP delayed a frame and sent it together with the next ones, a frame would end in
    // the middle of a segment.
    let (end, _peer) = dial(InitiatorConfig::default(), C, [0x80, 5, 0x80, 7], None);
    let End::Opened(opened) = end else {
        panic!("{end:?}");
    };
    let fd = opened.fd.get();
    let no_delay = socket::get_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY);
    assert_eq!(no_delay, Some(1));
}

/// A peer that does not know revision 2 of MPA closes the connection instead of sending a Reply. The initiator then
/// connects once more and sends its Request in revision 1.
// RFC 6581 §6, §10 [mpa-rev-mirror]
#[test]
fn a_peer_that_closes_without_a_reply_is_asked_once_more_in_revision_1() {
    for answers in [true, false] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        let peer = thread::spawn(move || {
            let mut frames = Vec::new();
            for try_ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
                let mut frame = vec![0; if try_ == 0 { 20 + 4 + 5 } else { 20 + 5 }];
                stream.read_exact(&mut frame).unwrap();
                frames.push(frame);
                if try_ == 1 && answers {
                    stream
                        .write_all(b"MPA ID Rep Frame\x40\x01\x00\x02hi")
                        .unwrap();
                }
            }
            listener.set_nonblocking(true).unwrap();
            (frames, listener.accept().is_err())
        });
        let (told, tells) = mpsc::channel();
        let config = InitiatorConfig {
            private_data: b"hello".to_vec(),
            ..InitiatorConfig::default()
        };
        let owner = Arc::new(OwnerOfTest(Mutex::new(told)));
        let engine = engine().unwrap();
        let startup = Startup::dial(engine, owner, to_peer(to, config)).unwrap();
        let end = tells.recv_timeout(TEST_TIMEOUT).unwrap();
        drop(startup);
        let (frames, no_third) = peer.join().unwrap();
        assert!(no_third);
        assert_eq!((frames[0][17], &frames[0][24..]), (2, b"hello".as_slice()));
        assert_eq!((frames[1][16], frames[1][17]), (C, 1));
        assert_eq!(&frames[1][20..], b"hello");
        match end {
            End::Opened(opened) if answers => {
                assert_eq!((opened.params.rev, opened.params.peer_to_peer), (1, false));
                assert_eq!(opened.private_data, b"hi");
            }
            End::Failed(Failure::Broken { .. }) if !answers => {}
            end => panic!("{end:?}"),
        }
    }
}

/// Sends more bytes than the peer's buffer can store, to a peer that does not read, and closes the connection.
/// Returns the closed connection, the peer's socket and the number of bytes sent.
fn closed_behind_much() -> (drain::Draining, TcpStream, usize) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(n) = ours.write(&[7; 4096]) {
        sent += n;
    }
    let draining = drain::drain(engine().unwrap(), fd::EngineFd::new(ours.into()));
    (draining, peer, sent)
}

#[test]
fn the_last_bytes_arrive_although_the_peer_still_sends() {
    let (draining, mut peer, sent) = closed_behind_much();
    assert!(
        !draining.is_drained(),
        "{sent} bytes were acknowledged by a peer that does not read"
    );
    let mut came = 0;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        // If this end had closed its socket, the kernel would answer these bytes with a reset.
        peer.write_all(&[9; 100]).unwrap();
        match peer.read(&mut buffer).unwrap() {
            0 => break,
            n => came += n,
        }
    }
    assert_eq!(came, sent);
    // The kernel may acknowledge the bytes a moment after the peer has read them.
    draining.wait_drained(Some(std::time::Instant::now() + TEST_TIMEOUT));
    assert!(draining.is_drained());
}

#[test]
fn a_process_exits_when_its_last_bytes_have_arrived() {
    let (draining, mut peer, sent) = closed_behind_much();
    let reader = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        all.len()
    });
    drain::at_exit();
    assert!(draining.is_drained());
    assert_eq!(reader.join().unwrap(), sent);
}

#[test]
fn waiting_for_the_last_bytes_ends_at_its_deadline() {
    let (draining, mut peer, _) = closed_behind_much();
    let soon = std::time::Instant::now() + Duration::from_millis(50);
    draining.wait_drained(Some(soon));
    assert!(std::time::Instant::now() >= soon && !draining.is_drained());
    let reader = thread::spawn(move || peer.read_to_end(&mut Vec::new()).unwrap());
    draining.wait_drained(Some(soon + TEST_TIMEOUT));
    assert!(draining.is_drained());
    reader.join().unwrap();
}

#[test]
fn a_process_exits_although_a_peer_does_not_read() {
    let (draining, _peer, _) = closed_behind_much();
    let start = std::time::Instant::now();
    drain::at_exit();
    assert!(start.elapsed() < TEST_TIMEOUT / 4);
    assert!(!draining.is_drained());
}
