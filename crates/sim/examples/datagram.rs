//! Datagrams from one queue pair to another, for callgrind: `cargo lab count`.
//!
//! callgrind counts the instructions of three functions and of all functions that they call. `sent` posts messages and builds
//! their datagrams. `received` handles the datagrams until their receives are complete. `acknowledged` transfers the
//! acknowledgement or report from the receiver to the sender. Messages come in runs of 32. The arguments are the kind of queue pair and
//! the length of the messages; the output is the number of messages.
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a tool that stops at the first error"
)]

use std::time::Duration;

use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{Arrival, DatagramQp, Kind, TxDatagram};
use anywarp_core::verbs::wr::{Payload, RecvRequest, Sges, WorkRequest};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{Request, access, send};

/// Messages of one run.
const RUN: usize = 32;

/// Runs that are counted; [`WARMUP`] runs come before.
const TIMES: usize = 20;
const WARMUP: usize = 10;

/// The name is used in the callgrind options.
#[inline(never)]
fn sent(qp: &mut DatagramQp, requests: &[WorkRequest], out: &mut Vec<TxDatagram>) {
    post_and_send(qp, requests, out);
}

/// The name is used in the callgrind options.
#[inline(never)]
fn received(qp: &mut DatagramQp, arrival: &Arrival, run: &[TxDatagram]) {
    receive(qp, arrival, run);
}

/// The name is used in the callgrind options.
#[inline(never)]
fn acknowledged(net: &mut Ether, from: Id, to: Id, arrival: &Arrival) {
    answer(net, from, to, arrival);
}

/// Writes each request to its slot in the send queue, as `ibv_post_send` does.
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
    let bytes = run.iter().map(|d| &*d.bytes);
    qp.handle_rx_run(arrival, bytes, |_, why| panic!("dropped: {why:?}"));
}

/// Delivers all datagrams that `from` sends to `to`.
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
        _ => panic!("the first argument is ud or rd"),
    };
    let len: usize = words
        .next()
        .and_then(|w| w.parse().ok())
        .expect("the second argument is the length of a message in bytes");
    let mut net = Ether::new(1, Link::default());
    let a = net.join(kind, Options::default());
    let b = net.join(kind, Options::default());
    let from = net[a].host.register(len, access::ALL);
    let to = net[b].host.register(len + 40, access::ALL);
    // The first message establishes the state of both ends.
    net[b].recv(0, &[to.all()]);
    net.post(a, b, send(0).from(&[from.all()]));
    net.run(Duration::from_secs(1));
    assert_eq!(
        net[b].received().len(),
        1,
        "the first message has not arrived"
    );
    assert_eq!(
        net[a].completed().len(),
        1,
        "the first message has no completion"
    );
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
        // The list is allocated outside the counted functions, because the engine reuses its list.
        let mut out = Vec::with_capacity(RUN);
        if time < WARMUP {
            post_and_send(&mut net[a].qp, &requests, &mut out);
            receive(&mut net[b].qp, &there, &out);
            answer(&mut net, b, a, &back);
        } else {
            sent(&mut net[a].qp, &requests, &mut out);
            received(&mut net[b].qp, &there, &out);
            acknowledged(&mut net, b, a, &back);
        }
        let run = out.len();
        for d in out {
            net[a].qp.recycle(d);
        }
        assert_eq!(run, RUN, "not every message was sent as one datagram");
        assert_eq!(
            net[b].received().len(),
            RUN,
            "the receives have not completed"
        );
        assert_eq!(
            net[a].completed().len(),
            RUN,
            "the requests have not completed"
        );
        assert!(
            net[b].host.bytes(&to).ends_with(&payload),
            "the payload is not in memory"
        );
    }
    println!("{}", TIMES * RUN);
}
