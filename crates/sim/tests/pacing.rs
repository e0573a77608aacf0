//! Pacing of unreliable datagrams: a lost report delays the sender, but no data is lost.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::wire::dgram;
use anywarp_core::wire::rdmap::Opcode;
use anywarp_sim::ether::{Ether, Link};
use anywarp_sim::{Request, Rng, access, each_seed, write};

/// Datagrams of the lengths that loopback, jumbo frames and Ethernet carry.
const SEGMENTS: [Segment; 6] = [
    Segment::Max,
    Segment::Jumbo,
    Segment::PathMtu,
    Segment::Bytes(61_440),
    Segment::Bytes(8912),
    Segment::Bytes(1432),
];

/// A new pair writes `total` bytes over a path that loses the share `data` of the data, and the share `reports` of the
/// reports. Returns the number of valid bytes in the records, and of bytes that arrived.
fn written(seed: u64, segment: Segment, total: usize, data: f64, reports: f64) -> (usize, usize) {
    let options = Options {
        one_sided: true,
        segment,
        max_send: 1 << 20,
        ..Options::default()
    };
    let mut net = Ether::new(seed, Link::default());
    net.late = Duration::from_millis(50);
    let a = net.join(Kind::Ud, options);
    let b = net.join(Kind::Ud, options);
    let mine = net[a].host.register(total, access::ALL);
    let theirs = net[b].host.register(total, access::ALL);
    let arrived = Rc::new(Cell::new(0));
    let (store, to, mut rng) = (Rc::clone(&arrived), net[b].addr, Rng::new(seed));
    net.filter = Some(Box::new(move |d| {
        let parsed = dgram::parse(&d.bytes).unwrap();
        let is_data = d.to == to && parsed.header.opcode() == Opcode::WriteRecord;
        let share = if is_data { data } else { reports };
        let passes = rng.below(1_000_000) as f64 >= share * 1e6;
        if is_data && passes {
            store.set(store.get() + parsed.payload.len());
        }
        passes
    }));
    net.post(a, b, write(1, theirs.remote(0)).from(&[mine.all()]));
    net.run(Duration::from_secs(20));
    let mut valid = 0;
    while let Some(record) = net[b].qp.poll_record() {
        valid += record.valid as usize;
    }
    (valid, arrived.get())
}

#[test]
fn a_lost_report_loses_no_data() {
    each_seed(40, |seed| {
        for segment in SEGMENTS {
            for loss in [0.001, 0.01, 0.05] {
                for data in [0.0, loss] {
                    let (valid, arrived) = written(seed, segment, 1_000_000, data, loss);
                    assert_eq!(valid, arrived, "seed {seed}, {segment:?}, {loss}, {data}");
                }
            }
        }
    });
}

/// Without any reports, a receiver still gets everything on a path that loses no data.
#[test]
fn a_receiver_without_reports_gets_everything() {
    for segment in SEGMENTS {
        for total in [65_536, 300_000, 1_000_000, 10_000_000] {
            let (valid, arrived) = written(1, segment, total, 0.0, 1.0);
            assert_eq!((valid, arrived), (total, total), "{segment:?}");
        }
    }
}
