//! Tests of carriers between two UDP ports of this process, without a worker thread.

use std::net::{IpAddr, SocketAddr};
use std::slice::Chunks;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anywarp_core::bounds::CARRIER_AFTER as OFFER_AFTER;
use anywarp_core::datagram::{Arrival, TxDatagram};
use anywarp_core::wire::carrier::Message;

use super::carrier::*;
use super::sink::DatagramSink;
use super::socket::local_addr;
use super::udp::{Registry, UdpPort, UdpSocket};
use crate::clock;
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::process::PerProcess;
use crate::sys::Io;

/// Records what it receives.
struct Sink {
    got: Mutex<Vec<(Arrival, Vec<u8>)>>,
    writable: AtomicBool,
}

impl DatagramSink for Sink {
    fn incoming(&self, arrival: &Arrival, run: Chunks<'_, u8>, _: Instant) {
        let mut got = self.got.lock();
        got.extend(run.map(|d| (*arrival, d.to_vec())));
    }
    fn received(&self) {}
    fn writable(&self) {
        self.writable.store(true, Ordering::Relaxed);
    }
}

struct End {
    port: Arc<UdpPort<Sink>>,
    sink: Arc<Sink>,
    at: SocketAddr,
}

fn end(engine: &'static Engine) -> End {
    static PORTS: Registry<Sink> = PerProcess::new(|| Mutex::new(Rank::UdpPorts, Vec::new()));
    let socket = Arc::new(UdpSocket::bind(0).unwrap());
    let port = UdpPort::of(&PORTS, engine, &socket, &[]).unwrap();
    let sink = Arc::new(Sink {
        got: Mutex::new(Rank::DatagramQp, Vec::new()),
        writable: AtomicBool::new(false),
    });
    port.enter(0, Arc::downgrade(&sink));
    let number = local_addr(socket.fd()).unwrap().port();
    End {
        port,
        sink,
        at: ([127, 0, 0, 1], number).into(),
    }
}

/// A datagram for the queue pair 0.
fn datagram(to: SocketAddr, number: u32, len: usize) -> TxDatagram {
    let mut bytes = vec![0; len];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    TxDatagram {
        to,
        from: None,
        hop_limit: 0,
        traffic_class: 8,
        bytes: bytes.into(),
    }
}

impl End {
    fn send(&self, to: &Self, number: u32, len: usize) -> Result<usize, Io> {
        let list = [datagram(to.at, number, len)];
        self.port.send(&list, None, &mut usize::MAX.clone())
    }

    fn carrier(&self, to: &Self) -> Option<Arc<Carrier<Sink>>> {
        self.port.carriers().to(to.at, 0, || None)
    }

    /// The numbers of the datagrams that were received since the last call.
    fn numbers(&self) -> Vec<u32> {
        let got = std::mem::take(&mut *self.sink.got.lock());
        let number = |d: &Vec<u8>| u32::from_be_bytes(*d.first_chunk().unwrap());
        got.iter().map(|(_, d)| number(d)).collect()
    }
}

/// Two ports and an engine that only the test polls.
fn two_ends() -> (&'static Engine, End, End) {
    let engine = Engine::without_worker().unwrap();
    (engine, end(engine), end(engine))
}

fn poll(engine: &Engine) {
    for _ in 0..100 {
        engine.on_idle_poll();
        engine.poll_all(clock::now());
    }
}

/// Two ports with a carrier.
fn connected() -> (&'static Engine, End, End) {
    let (engine, a, b) = two_ends();
    for n in 0..OFFER_AFTER + 1 {
        assert!(a.carrier(&b).is_none(), "after {n} datagrams");
        assert_eq!(a.send(&b, n, 100).unwrap(), 1);
    }
    poll(engine);
    assert!(a.carrier(&b).is_some());
    assert!(b.carrier(&a).is_some());
    assert_eq!(b.numbers(), (0..=OFFER_AFTER).collect::<Vec<_>>());
    (engine, a, b)
}

/// A carrier was made for datagrams from 127.0.0.2. Datagrams without a source address still come from 127.0.0.1.
#[test]
fn a_carrier_keeps_the_source_address() {
    let (engine, a, b) = two_ends();
    let from = Some(IpAddr::from([127, 0, 0, 2]));
    let send = |from, number| {
        let list = [datagram(b.at, number, 100)];
        a.port.send(&list, from, &mut usize::MAX.clone()).unwrap();
    };
    for n in 0..OFFER_AFTER + 1 {
        send(from, n);
    }
    poll(engine);
    assert!(a.carrier(&b).is_some());
    b.sink.got.lock().clear();
    send(from, 0);
    send(None, 0);
    poll(engine);
    let got = b.sink.got.lock();
    let mut sources: Vec<_> = got.iter().map(|(arrival, _)| arrival.from.ip()).collect();
    sources.sort();
    assert_eq!(sources, [[127, 0, 0, 1], [127, 0, 0, 2]].map(IpAddr::from));
}

#[test]
fn datagrams_of_a_busy_port_go_through_memory_in_order() {
    let (engine, a, b) = connected();
    let calls = |end: &End| end.port.calls().found;
    // The first datagram of each end wakes the other, which has not polled the memory yet.
    a.send(&b, 0, 100).unwrap();
    b.send(&a, 0, 100).unwrap();
    poll(engine);
    assert_eq!((a.numbers(), b.numbers()), (vec![0], vec![0]));
    let before = (calls(&a), calls(&b));
    for round in 0..50 {
        for n in 0..40 {
            a.send(&b, n, 100 + 20 * n as usize).unwrap();
            b.send(&a, n, 4000).unwrap();
        }
        for _ in 0..10 {
            engine.on_idle_poll();
        }
        assert_eq!(b.numbers(), (0..40).collect::<Vec<_>>(), "{round}");
        assert_eq!(a.numbers(), (0..40).collect::<Vec<_>>(), "{round}");
    }
    assert_eq!((calls(&a), calls(&b)), before, "nothing came over UDP");
    // The arrival has the same fields as that of a datagram from a socket.
    a.send(&b, 7, 500).unwrap();
    poll(engine);
    let (arrival, bytes) = b.sink.got.lock().pop().unwrap();
    assert_eq!(bytes, &*datagram(b.at, 7, 500).bytes);
    assert_eq!(arrival.from, a.at);
    assert_eq!(arrival.to, Some(b.at.ip()));
    assert_eq!((arrival.hop_limit, arrival.traffic_class), (HOP_LIMIT, 8));
}

#[test]
fn a_sender_waits_while_the_ring_is_full() {
    let (engine, a, b) = connected();
    let mut sent = 0;
    let blocked = loop {
        match a.send(&b, sent, 60_000) {
            Ok(n) => sent += u32::try_from(n).unwrap(),
            Err(e) => break e,
        }
    };
    assert!(matches!(blocked, Io::WouldBlock));
    assert!((2..10).contains(&sent), "{sent}");
    a.port.wait_writable(Arc::downgrade(&a.sink), Some(b.at));
    assert!(!a.sink.writable.load(Ordering::Relaxed));
    poll(engine);
    assert!(a.sink.writable.load(Ordering::Relaxed));
    assert_eq!(b.numbers(), (0..sent).collect::<Vec<_>>());
    assert_eq!(a.send(&b, sent, 60_000).unwrap(), 1);
}

#[test]
fn a_waiting_queue_pair_is_called_although_another_one_has_used_the_room() {
    let (engine, a, b) = connected();
    while a.send(&b, 1, 60_000).is_ok() {}
    a.port.wait_writable(Arc::downgrade(&a.sink), Some(b.at));
    // The peer reads while this end is not polled, and another queue pair sends.
    let carrier = b.carrier(&a).unwrap();
    while carrier
        .receive_run(1, 1, |_, _, _| ())
        .is_ok_and(|(n, _)| n > 0)
    {}
    assert_eq!(a.send(&b, 2, 100).unwrap(), 1);
    assert!(!a.sink.writable.load(Ordering::Relaxed));
    poll(engine);
    assert!(a.sink.writable.load(Ordering::Relaxed));
}

/// The peer reports room in the ring only once, and not at all if another queue pair has written before the peer looks.
#[test]
fn room_for_a_waiting_queue_pair_is_reported_although_another_one_has_sent() {
    let (engine, a, b) = connected();
    while a.send(&b, 1, 60_000).is_ok() {}
    a.port.wait_writable(Arc::downgrade(&a.sink), Some(b.at));
    let carrier = b.carrier(&a).unwrap();
    let mut more = true;
    while more {
        more = carrier
            .receive_run(1, 1, |_, _, _| ())
            .is_ok_and(|(n, _)| n > 0);
    }
    assert!(!engine.is_woken());
    a.send(&b, 2, 100).unwrap();
    assert!(carrier.must_wake_for_room() || engine.is_woken());
}

#[test]
fn when_an_end_closes_the_rest_is_received_and_the_other_end_uses_udp() {
    let (engine, a, b) = connected();
    let at_b = b.carrier(&a).unwrap();
    a.send(&b, 1, 100).unwrap();
    a.carrier(&b).unwrap().close();
    assert!(a.carrier(&b).is_none());
    assert!(b.carrier(&a).is_none(), "no more is sent to a closed end");
    a.send(&b, 2, 100).unwrap();
    b.send(&a, 3, 100).unwrap();
    poll(engine);
    let mut numbers = b.numbers();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(a.numbers(), [3]);
    assert!(at_b.has_closed());
}

#[test]
fn a_peer_that_reads_nothing_is_given_up() {
    let (engine, a, b) = connected();
    let carrier = a.carrier(&b).unwrap();
    // The peer is not polled any more.
    b.carrier(&a).unwrap().stop_receiving();
    a.send(&b, 1, 100).unwrap();
    let start = clock::now();
    while a.carrier(&b).is_some() {
        engine.on_idle_poll();
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    assert!(start.elapsed() >= STALL);
    assert!(carrier.is_closed());
    b.numbers();
    a.send(&b, 2, 100).unwrap();
    poll(engine);
    assert_eq!(b.numbers(), [2]);
}

#[test]
fn an_ended_carrier_is_forgotten() {
    let (engine, a, b) = connected();
    let ends = [&a, &b].map(|end| (end, end.port.carriers().active()));
    a.carrier(&b).unwrap().close();
    let start = clock::now();
    while ends.iter().any(|(end, was)| {
        !end.port.carriers().active().is_empty() || was.iter().any(|c| Arc::strong_count(c) > 1)
    }) {
        engine.on_idle_poll();
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn datagrams_to_others_do_not_take_a_peers_datagrams_with_them() {
    let (engine, a, b) = connected();
    let c = end(engine);
    let mixed: Vec<_> = (0..10)
        .map(|n| datagram(if n % 3 == 0 { c.at } else { b.at }, n, 100))
        .collect();
    let before = b.port.calls().found;
    let mut sent = 0;
    while sent < mixed.len() {
        sent += a
            .port
            .send(&mixed[sent..], None, &mut usize::MAX.clone())
            .unwrap();
    }
    poll(engine);
    assert_eq!(b.numbers(), [1, 2, 4, 5, 7, 8]);
    assert_eq!(c.numbers(), [0, 3, 6, 9]);
    // One message may have woken the peer.
    assert!(b.port.calls().found <= before + 1);
}

#[test]
fn an_acknowledgement_word_of_a_stream_makes_nothing_ready() {
    let (engine, a, b) = connected();
    a.carrier(&b).unwrap().overwrite_done();
    let carrier = b.carrier(&a).unwrap();
    poll(engine);
    assert!(!carrier.is_ready());
}

#[test]
fn an_end_that_is_dropped_leaves_what_it_has_sent() {
    let (engine, a, b) = connected();
    a.send(&b, 1, 100).unwrap();
    drop(a);
    poll(engine);
    assert_eq!(b.numbers(), [1]);
}

#[test]
fn of_two_offers_one_counts() {
    let (engine, a, b) = two_ends();
    for n in 0..OFFER_AFTER + 1 {
        a.send(&b, n, 100).unwrap();
        b.send(&a, n, 100).unwrap();
    }
    poll(engine);
    let (one, other) = (a.carrier(&b).unwrap(), b.carrier(&a).unwrap());
    assert_eq!(one.proof(), other.proof(), "both have the same memory");
    for n in 0..10 {
        a.send(&b, 1000 + n, 100).unwrap();
        b.send(&a, 1000 + n, 100).unwrap();
    }
    poll(engine);
    for end in [a, b] {
        assert!(end.numbers().ends_with(&(1000..1010).collect::<Vec<_>>()));
    }
}

#[test]
fn forged_messages_change_nothing() {
    let (engine, a, b) = two_ends();
    for n in 0..OFFER_AFTER + 1 {
        a.send(&b, n, 100).unwrap();
    }
    // A Take with a wrong proof, from the right address, arrives before the genuine one.
    b.port.tell(a.at, None, Message::Take { proof: 1 });
    let mine = std::process::id();
    for (pid, fd) in [(mine, 0), (mine, 1_000_000), (0, 0), (u32::MAX, u32::MAX)] {
        let offer = Message::Offer { pid, fd };
        end(engine).port.tell(b.at, None, offer);
    }
    poll(engine);
    assert!(a.carrier(&b).is_some());
    assert_eq!(
        b.port.carriers().len(),
        1,
        "only the true offer was accepted"
    );
}

#[test]
fn offers_are_examined_at_a_limited_rate() {
    let carriers: Carriers<Sink> = Carriers::new();
    let (mut examined, now) = (0, clock::now());
    let from = SocketAddr::from(([127, 0, 0, 1], 9));
    let mut offer = |now| {
        carriers.offered(from, false, now, || {
            examined += 1;
            None
        });
    };
    for _ in 0..1000 {
        offer(now);
    }
    offer(now + Duration::from_secs(1));
    assert_eq!(examined, OFFERS_PER_SECOND + 1);
}

#[test]
fn many_destinations_are_not_all_observed() {
    let carriers: Carriers<Sink> = Carriers::new();
    for port in 1..1000 {
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        assert!(carriers.to(to, 1, || None).is_none());
    }
    assert_eq!(carriers.len(), DESTINATIONS_MAX);
}

#[test]
fn peers_that_come_and_go_leave_no_entries() {
    let engine = Engine::without_worker().unwrap();
    let server = end(engine);
    for _ in 0..2 * DESTINATIONS_MAX {
        let client = end(engine);
        for n in 0..=OFFER_AFTER {
            client.send(&server, n, 100).unwrap();
        }
        poll(engine);
        let carrier = server.carrier(&client).unwrap();
        drop(client);
        poll(engine);
        // The carrier is removed at once, and not only after its linger time.
        carrier.remove();
        server.port.carriers().forget(&carrier);
    }
    assert!(server.port.carriers().len() <= DESTINATIONS_MAX);
}
