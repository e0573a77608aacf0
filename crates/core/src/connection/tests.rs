//! Sequences of several messages: numbers that wrap, acknowledgements, the end of the stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::{Connection, First, OfferAfter, Peer, StreamConfig};
use crate::bounds;
use crate::ddp::tx::{Address, Message, segment};
use crate::llp::mpa::deframe::{Extent, LENGTH};
use crate::llp::mpa::frame::{TxBatch, frame_bytes};
use crate::verbs::cq::Cq;
use crate::verbs::event::AsyncEvent;
use crate::verbs::mr::{Memory, Pinned, Regions};
use crate::verbs::qp::{Capacity, State};
use crate::verbs::qp_base::Parts;
use crate::verbs::rnic::Rnic;
use crate::verbs::rq::RecvQueue;
use crate::verbs::source::Source;
use crate::verbs::wc::{Completion, Status};
use crate::verbs::wr::{Op, RecvRequest, Remote, WorkRequest};
use crate::wire::ddp::Header;
use crate::wire::rdmap::{Opcode, ReadRequest};
use crate::wire::{Msn, Stag, To};

struct NoMemory;

impl Memory for NoMemory {
    fn place(&self, _: &Pinned<'_>, _: u64, _: &[u8]) {
        panic!("nothing is placed");
    }
    fn gather(&self, _: &Pinned<'_>, _: u64, _: u64, _: &mut Vec<u8>) {
        panic!("nothing is gathered");
    }
    fn update(&self, _: &Pinned<'_>, _: &mut dyn FnMut(u64) -> u64) -> u64 {
        panic!("nothing is changed");
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs an instant to start from"
)]
fn now() -> Instant {
    Instant::now()
}

/// A stream to a standard peer, which this end opened.
const STANDARD: StreamConfig = StreamConfig {
    crc: true,
    mulpdu: 1442,
    mulpdu_anywarp: 1442,
    peer: Peer::Standard,
    ird: 4,
    ord: 4,
    initiator: true,
    first: First::Nothing,
    managed: true,
    stays: false,
    markers: false,
    offer_after: OfferAfter::NEVER,
};

/// An end that opened a stream to a standard peer; the next message of each queue has the last number before the wrap.
fn near_the_end() -> (Connection, Arc<Cq>) {
    let cq = Arc::new(Cq::new(100, None));
    let mut conn = Connection::new(Parts {
        rnic: Arc::new(Rnic {
            regions: Regions::new(),
            memory: Box::new(NoMemory),
            observer: None,
        }),
        qpn: 1,
        pd: 1,
        send_cq: Arc::clone(&cq),
        recv_cq: Arc::clone(&cq),
        rq: RecvQueue::Own {
            requests: VecDeque::new(),
            max_wr: 10,
            max_sge: 1,
        },
        capacity: Capacity {
            max_send_wr: 10,
            max_recv_wr: 10,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 16,
        },
        sig_all: true,
    });
    conn.set_state(State::Rts);
    conn.attach(STANDARD, now());
    conn.number_from(u32::MAX - 1);
    (conn, cq)
}

fn post(conn: &mut Connection, id: u64, op: Op) {
    conn.post_send(WorkRequest {
        id,
        op,
        signaled: true,
        ..WorkRequest::blank()
    })
    .unwrap();
}

fn receive_segment(conn: &mut Connection, opcode: Opcode, msn: u32, body: &[u8]) {
    let mut message = Message {
        opcode,
        address: Address::Untagged {
            qn: opcode.queue().unwrap(),
            msn: Msn(msn),
            inv_stag: Stag(0),
            mo: 0,
        },
        source: Source::Bytes(SmallVec::from_slice(body)),
        len: body.len() as u64,
        sent: 0,
    };
    let segment = segment(&mut message, 1442);
    let bytes = frame_bytes(&segment, &message.source, true);
    assert_eq!(conn.handle_rx(now(), &bytes), bytes.len());
}

/// Opcode and number of each message that the end sends now.
fn sent_messages(conn: &mut Connection) -> Vec<(Opcode, Option<u32>)> {
    let mut batch = TxBatch::default();
    conn.poll_tx(now(), true, &mut batch);
    let mut bytes = batch.as_bytes().unwrap();
    let mut messages = Vec::new();
    while let Some(extent) = Extent::of(bytes) {
        let (header, _) = Header::parse(&bytes[LENGTH..]).unwrap();
        messages.push(match header {
            Header::Untagged(h) => (h.opcode, Some(h.msn.0)),
            Header::Tagged(h) => (h.opcode, None),
        });
        bytes = &bytes[extent.total()..];
    }
    conn.handle_written();
    messages
}

fn completed(cq: &Cq) -> Vec<(u64, Status)> {
    let mut all: Vec<Completion> = Vec::new();
    cq.poll(100, |_, c| all.push(c.clone()));
    all.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn sent_message_numbers_wrap_to_zero() {
    let (mut conn, cq) = near_the_end();
    let remote = Remote {
        rkey: Stag(0x700),
        to: To(0),
    };
    let send = Op::Send {
        imm: None,
        invalidate: None,
    };
    for id in 0..3 {
        post(&mut conn, id, send);
        post(&mut conn, 10 + id, Op::Read { remote });
    }
    // RFC 5041 §4.3 [ddp-msn-modulo]: each queue has its own numbers.
    let want = [u32::MAX, 0, 1].map(|n| [(Opcode::Send, Some(n)), (Opcode::ReadRequest, Some(n))]);
    assert_eq!(sent_messages(&mut conn), want.concat());
    assert_eq!(completed(&cq), [(0, Status::Success)]);
}

#[test]
fn received_message_numbers_wrap_to_zero() {
    let (mut conn, cq) = near_the_end();
    let request = ReadRequest {
        sink_stag: Stag(1),
        sink_to: To(0),
        size: 0,
        source_stag: Stag(1),
        source_to: To(0),
    };
    for (id, n) in [u32::MAX, 0, 1].into_iter().enumerate() {
        let id = id as u64;
        let sges = smallvec![];
        conn.post_recv(RecvRequest { id, sges }).unwrap();
        receive_segment(&mut conn, Opcode::Send, n, &[]);
        receive_segment(&mut conn, Opcode::ReadRequest, n, &request.emit());
        // RFC 5041 §4.3 [ddp-msn-modulo]
        assert_eq!(completed(&cq), [(id, Status::Success)]);
        assert_eq!(sent_messages(&mut conn), [(Opcode::ReadResponse, None)]);
    }
    // A message sequence number must not be used twice.
    receive_segment(&mut conn, Opcode::Send, 1, &[]);
    assert_eq!(sent_messages(&mut conn), [(Opcode::Terminate, Some(1))]);
    assert_eq!(conn.state(), State::Error);
}

/// An acknowledgement waits for other messages until `ACK_AFTER` requests are done; a standard peer gets none.
#[test]
fn an_acknowledgement_without_data_is_sent_after_ack_after_requests() {
    for (peer, owed, goes) in [
        (Peer::Anywarp, bounds::ACK_AFTER - 1, false),
        (Peer::Anywarp, bounds::ACK_AFTER, true),
        (Peer::Standard, 2 * bounds::ACK_AFTER, false),
    ] {
        let (mut conn, _cq) = near_the_end();
        let s = conn.stream.as_mut().unwrap();
        s.peer = peer;
        for _ in 0..owed {
            s.responder.request_done();
        }
        assert_eq!(conn.must_ack(), goes);
        let mut batch = TxBatch::default();
        conn.poll_tx(now(), false, &mut batch);
        assert_eq!(!batch.is_empty(), goes, "{peer:?}, {owed}");
        assert_eq!(conn.ack_due(), peer == Peer::Anywarp && !goes);
    }
}

/// The acknowledgement of a message comes before the answer of the program to it: the peer's Send completes before the
/// receive of the answer.
#[test]
fn an_acknowledgement_is_sent_before_the_next_message() {
    let (mut conn, _cq) = near_the_end();
    let s = conn.stream.as_mut().unwrap();
    s.peer = Peer::Anywarp;
    s.responder.request_done();
    let send = Op::Send {
        imm: None,
        invalidate: None,
    };
    post(&mut conn, 7, send);
    let opcodes: Vec<Opcode> = sent_messages(&mut conn)
        .into_iter()
        .map(|(o, _)| o)
        .collect();
    assert_eq!(opcodes, [Opcode::Control, Opcode::Send]);
}

/// A peer process that ends right after its receive completes has no time to acknowledge the Send. The Send succeeds
/// if the transport of the peer has acknowledged all its bytes.
#[test]
fn a_send_whose_bytes_were_acknowledged_completes_when_the_stream_ends() {
    for (reset, all_taken, status) in [
        (false, true, Status::Success),
        (true, true, Status::Success),
        (false, false, Status::Flushed),
        (true, false, Status::RetryExceeded),
    ] {
        let (mut conn, cq) = near_the_end();
        conn.stream.as_mut().unwrap().peer = Peer::Anywarp;
        let send = Op::Send {
            imm: None,
            invalidate: None,
        };
        post(&mut conn, 7, send);
        conn.poll_tx(now(), false, &mut TxBatch::default());
        conn.handle_written();
        assert_eq!(completed(&cq), []);
        conn.handle_eof(reset, all_taken);
        assert_eq!(completed(&cq), [(7, status)]);
    }
}

/// As on RoCE, a completion is enough to report that the peer is gone. The event is for a program that has nothing posted.
#[test]
fn an_event_reports_a_lost_connection_only_if_no_completion_does() {
    for (sends, receives, fatal) in [(1, 0, false), (0, 1, false), (1, 1, false), (0, 0, true)] {
        let (mut conn, cq) = near_the_end();
        conn.stream.as_mut().unwrap().peer = Peer::Anywarp;
        conn.stream.as_mut().unwrap().config.managed = false;
        for id in 0..sends {
            let imm = None;
            let invalidate = None;
            post(&mut conn, id, Op::Send { imm, invalidate });
        }
        for id in 0..receives {
            let sges = smallvec![];
            conn.post_recv(RecvRequest { id, sges }).unwrap();
        }
        conn.poll_tx(now(), false, &mut TxBatch::default());
        conn.handle_eof(true, false);
        let events: Vec<_> = std::iter::from_fn(|| conn.poll_event()).collect();
        assert_eq!(events.contains(&AsyncEvent::QpFatal), fatal, "{events:?}");
        assert_eq!(completed(&cq).len(), (sends + receives) as usize);
    }
}

/// A peer that closes the stream with a Bye has acknowledged all requests that it executed. The others were dropped.
#[test]
fn a_send_that_was_not_acknowledged_before_a_bye_fails() {
    let (mut conn, cq) = near_the_end();
    let s = conn.stream.as_mut().unwrap();
    s.peer = Peer::Anywarp;
    s.bye_received = true;
    let send = Op::Send {
        imm: None,
        invalidate: None,
    };
    post(&mut conn, 7, send);
    conn.poll_tx(now(), false, &mut TxBatch::default());
    conn.handle_eof(true, true);
    assert_eq!(completed(&cq), [(7, Status::Flushed)]);
}

/// A stream between two queue pairs that were set up with each other's numbers.
const UNMANAGED: StreamConfig = StreamConfig {
    peer: Peer::Anywarp,
    managed: false,
    stays: false,
    ..STANDARD
};

/// An end whose peer has closed the stream with a Bye, after `ops` were sent to it.
fn left_by_its_peer(ops: &[Op]) -> (Connection, Arc<Cq>) {
    let (mut conn, cq) = near_the_end();
    conn.attach(UNMANAGED, now());
    for (id, op) in ops.iter().enumerate() {
        post(&mut conn, id as u64, *op);
    }
    assert_eq!(sent_messages(&mut conn).len(), ops.len());
    conn.stream.as_mut().unwrap().bye_received = true;
    conn.handle_eof(false, true);
    assert_eq!((conn.state(), conn.is_attached()), (State::Rts, false));
    assert_eq!(completed(&cq), []);
    (conn, cq)
}

/// The peer numbers the requests of a new stream from 1 on, so it cannot acknowledge those of the stream before it.
#[test]
fn requests_that_an_earlier_stream_has_sent_fail_when_the_peer_connects_again() {
    let imm = None;
    let invalidate = None;
    let send = Op::Send { imm, invalidate };
    let remote = Remote {
        rkey: Stag(0x700),
        to: To(0),
    };
    for first in [send, Op::Read { remote }] {
        let (mut conn, cq) = left_by_its_peer(&[first, send]);
        post(&mut conn, 2, send);
        conn.attach(UNMANAGED, now());
        let mut statuses = completed(&cq);
        let sent = sent_messages(&mut conn);
        conn.handle_carrier_ack(1);
        statuses.extend(completed(&cq));
        assert_eq!(
            statuses,
            [
                (0, Status::RetryExceeded),
                (1, Status::Flushed),
                (2, Status::Flushed)
            ]
        );
        // Only the Bye.
        assert!(matches!(sent[..], [(Opcode::Control, _)]), "{sent:?}");
        assert_eq!(conn.state(), State::Error);
    }
}

/// The peer had no receive, and left before the Send was sent again.
#[test]
fn a_request_that_waits_for_a_receive_fails_when_the_peer_connects_again() {
    let (mut conn, cq) = near_the_end();
    conn.attach(UNMANAGED, now());
    let imm = None;
    let invalidate = None;
    post(&mut conn, 0, Op::Send { imm, invalidate });
    assert_eq!(sent_messages(&mut conn).len(), 1);
    conn.attr_mut().rnr_retry = 7;
    conn.handle_rnr(1, 1, now());
    assert!(conn.has_untaken());
    conn.stream.as_mut().unwrap().bye_received = true;
    conn.handle_eof(false, true);
    conn.attach(UNMANAGED, now());
    assert_eq!(completed(&cq), [(0, Status::RetryExceeded)]);
}

#[test]
fn a_request_that_was_not_sent_goes_to_the_peer_that_connects_again() {
    let imm = None;
    let invalidate = None;
    let send = Op::Send { imm, invalidate };
    let (mut conn, cq) = left_by_its_peer(&[]);
    post(&mut conn, 5, send);
    conn.attach(UNMANAGED, now());
    assert_eq!(sent_messages(&mut conn), [(Opcode::Send, Some(1))]);
    assert_eq!(completed(&cq), []);
    conn.handle_carrier_ack(1);
    assert_eq!(completed(&cq), [(5, Status::Success)]);
}

/// In shared memory the carrier transports acknowledgements. No message is sent for them, and an old or repeated acknowledgement is
/// ignored.
#[test]
fn a_carrier_acknowledges_in_place_of_messages() {
    let send = Op::Send {
        imm: None,
        invalidate: None,
    };
    let begun = || {
        let (mut conn, cq) = near_the_end();
        conn.stream.as_mut().unwrap().peer = Peer::Anywarp;
        conn.switch_tx_to_shm();
        for id in 0..3 {
            post(&mut conn, id, send);
        }
        assert_eq!(sent_messages(&mut conn).len(), 3);
        (conn, cq)
    };
    // The numbers of the three requests are around the wrap.
    let first = u32::MAX;
    let (mut conn, cq) = begun();
    for _ in 0..2 * bounds::ACK_AFTER {
        conn.stream.as_mut().unwrap().responder.request_done();
    }
    assert!(conn.must_ack());
    assert_eq!(sent_messages(&mut conn), []);
    let done = first.wrapping_sub(1).wrapping_add(2 * bounds::ACK_AFTER);
    assert_eq!((conn.carrier_ack(), conn.ack_due()), (done, false));
    assert_eq!(
        conn.poll_timeout(),
        None,
        "no Ping is sent to a peer on the same host"
    );

    conn.handle_carrier_ack(first.wrapping_add(1));
    assert_eq!(completed(&cq), [(0, Status::Success), (1, Status::Success)]);
    for old in [first, first.wrapping_add(1), first.wrapping_sub(1_000)] {
        conn.handle_carrier_ack(old);
        assert_eq!((completed(&cq), conn.state()), (vec![], State::Rts));
    }
    conn.handle_carrier_ack(first.wrapping_add(2));
    assert_eq!(completed(&cq), [(2, Status::Success)]);

    let (mut conn, cq) = begun();
    conn.handle_carrier_ack(first.wrapping_add(3));
    assert_eq!(
        conn.state(),
        State::Error,
        "an acknowledgement of a request that was not sent"
    );
    assert_eq!(completed(&cq).len(), 3);
    assert_eq!(sent_messages(&mut conn), [(Opcode::Terminate, Some(1))]);
}

#[test]
fn the_kind_of_a_partial_message_is_known_from_its_header() {
    let fpdu = |opcode: Opcode, address: Address| {
        let mut message = Message {
            opcode,
            address,
            source: Source::Bytes(SmallVec::from_slice(&[7; 100])),
            len: 100,
            sent: 0,
        };
        let segment = segment(&mut message, 1442);
        frame_bytes(&segment, &message.source, true)
    };
    let to_memory = Address::Tagged {
        stag: Stag(1),
        to: To(0),
    };
    let to_queue = Address::Untagged {
        qn: 0,
        msn: Msn(0),
        inv_stag: Stag(0),
        mo: 0,
    };
    let cases = [
        (fpdu(Opcode::Write, to_memory), true),
        (fpdu(Opcode::ReadResponse, to_memory), false),
        (fpdu(Opcode::Send, to_queue), false),
    ];
    for (bytes, is_write) in cases {
        let (mut conn, _) = near_the_end();
        assert!(!conn.is_receiving_write(&[]));
        for len in 1..bytes.len() {
            let front = &bytes[..len];
            assert_eq!(conn.handle_rx(now(), front), 0);
            let is_known = Header::parse(front.get(LENGTH..).unwrap_or(&[])).is_ok();
            assert_eq!(conn.is_receiving_write(front), !is_known || is_write);
        }
    }
}
