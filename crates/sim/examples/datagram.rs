//! Datagrams from one queue pair to another, for callgrind: `cargo lab count`.
//!
//! What is counted is the way of one message from its posting to its datagram (`sent`), from the datagram to the completion of
//! its receive (`came`), and what the receiver says of it to the sender (`told`), with what they call: 32 messages at a time,
//! as a run is sent and received. The arguments say which kind and how long, the output how many messages.
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a tool that stops where something is wrong"
)]

use std::time::Duration;

use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Arrival, DatagramQp, Kind, TxDatagram};
use anywarp_core::verbs::wr::{Payload, RecvRequest, Sges, WorkRequest};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{Request, access, send};

/// Messages of one run.
const RUN: usize = 32;

/// Runs that are counted, and those before.
const TIMES: usize = 20;
const WARMUP: usize = 10;

/// Counted by callgrind, by its name.
#[inline(never)]
fn sent(qp: &mut DatagramQp, requests: &[WorkRequest], out: &mut Vec<TxDatagram>) {
    post_and_send(qp, requests, out);
}

/// Counted by callgrind, by its name.
#[inline(never)]
fn came(qp: &mut DatagramQp, arrival: &Arrival, run: &[TxDatagram]) {
    receive(qp, arrival, run);
}

/// Counted by callgrind, by its name.
#[inline(never)]
fn told(net: &mut Ether, from: Id, to: Id, arrival: &Arrival) {
    answer(net, from, to, arrival);
}

/// Writes each request to its place in the send queue, as `ibv_post_send` does.
fn post_and_send(qp: &mut DatagramQp, requests: &[WorkRequest], out: &mut Vec<TxDatagram>) {
    for request in requests {
        let posted = qp.post_send_with(|into| {
            into.id = request.id;
            into.op = request.op;
            if let Payload::Sges(sges) = &request.payload {
                into.payload = Payload::Sges(Sges::from_slice(sges));
            }
            into.signaled = request.signaled;
            into.destination = request.destination;
            Ok(())
        });
        posted.expect("room for a request");
    }
    qp.poll_tx(out);
    qp.handle_written(out.len());
}

fn receive(qp: &mut DatagramQp, arrival: &Arrival, run: &[TxDatagram]) {
    for d in run {
        qp.handle_rx(arrival, &d.bytes)
            .expect("a datagram that is right");
    }
}

/// Hands over what one of two has to say to the other.
fn answer(net: &mut Ether, from: Id, to: Id, arrival: &Arrival) {
    let mut out = Vec::new();
    net[from].qp.flush();
    net[from].qp.poll_tx(&mut out);
    net[from].qp.handle_written(out.len());
    for d in &out {
        let _advice = net[to].qp.handle_rx(arrival, &d.bytes);
    }
}

fn main() {
    let mut words = std::env::args().skip(1);
    let kind = match words.next().as_deref() {
        Some("ud") => Kind::Ud,
        Some("rd") => Kind::Rd,
        _ => panic!("ud or rd, and the bytes of a message"),
    };
    let len: usize = words
        .next()
        .and_then(|w| w.parse().ok())
        .expect("the bytes of a message");
    let mut net = Ether::new(1, Link::default());
    let a = net.join(kind, Options::default());
    let b = net.join(kind, Options::default());
    let from = net[a].host.register(len, access::ALL);
    let to = net[b].host.register(len + 40, access::ALL);
    // They meet.
    net[b].recv(0, &[to.all()]);
    net.post(a, b, send(0).from(&[from.all()]));
    net.run(Duration::from_secs(1));
    assert_eq!(net[b].received().len(), 1, "they have not met");
    assert_eq!(net[a].completed().len(), 1, "it has no completion");
    let arrival = |net: &Ether, from: Id, to: Id| Arrival {
        from: net[from].addr,
        to: Some(net[to].addr.ip()),
        hop_limit: 64,
        traffic_class: 0,
    };
    let (there, back) = (arrival(&net, a, b), arrival(&net, b, a));

    for time in 0..WARMUP + TIMES {
        let destination = net[b].destination();
        let request = |id| WorkRequest {
            destination: Some(destination),
            ..send(id).from(&[from.all()])
        };
        let requests: Vec<WorkRequest> = (0..RUN as u64).map(request).collect();
        let payload: Vec<u8> = (0..len).map(|i| (i + time) as u8).collect();
        net[a].host.fill(&from, &payload);
        for id in 0..RUN as u64 {
            let sges = [to.all()].into_iter().collect();
            let receive = RecvRequest { id, sges };
            net[b].qp.post_recv(receive).expect("room for a receive");
        }
        // The engine's list keeps its room.
        let mut out = Vec::with_capacity(RUN);
        if time < WARMUP {
            post_and_send(&mut net[a].qp, &requests, &mut out);
            receive(&mut net[b].qp, &there, &out);
            answer(&mut net, b, a, &back);
        } else {
            sent(&mut net[a].qp, &requests, &mut out);
            came(&mut net[b].qp, &there, &out);
            told(&mut net, b, a, &back);
        }
        let run = out.len();
        for d in out {
            net[a].qp.recycle(d);
        }
        assert_eq!(run, RUN, "a datagram for each");
        assert_eq!(net[b].received().len(), RUN, "they do not complete");
        assert_eq!(net[a].completed().len(), RUN, "they are not done");
        assert!(
            net[b].host.bytes(&to).ends_with(&payload),
            "it is not in memory"
        );
    }
    println!("{}", TIMES * RUN);
}
