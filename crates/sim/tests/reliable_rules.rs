//! Rules of reliable datagrams, tested with a peer whose packets are made by the test.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anywarp_core::datagram::Kind;
use anywarp_core::datagram::options::Options;
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::dgram;
use anywarp_core::wire::rd::{self, Packet};
use anywarp_sim::ether::{Ether, Id, Link};
use anywarp_sim::{Mr, Request, access, fetch_add, send};

const MS: Duration = Duration::from_millis(1);

fn options() -> Options {
    Options {
        one_sided: true,
        peer_timeout: 60 * 1000 * MS,
        ..Options::default()
    }
}

/// A queue pair that sends to an address without a queue pair, and the packets that arrive there.
struct Far {
    net: Ether,
    near: Id,
    far: Id,
    mr: Mr,
    packets: Rc<RefCell<Vec<(Packet, usize)>>>,
}

/// The token of the test's peer.
const TOKEN: u32 = 99;

impl Far {
    fn new() -> Self {
        let mut net = Ether::new(1, Link::default());
        let near = net.join(Kind::Rd, options());
        let far = net.join(Kind::Rd, options());
        net[far].dead = true;
        let mr = net[near].host.register(64, access::ALL);
        let packets = Rc::new(RefCell::new(Vec::new()));
        let (store, at) = (Rc::clone(&packets), net[far].addr);
        net.filter = Some(Box::new(move |d| {
            if d.to == at {
                let (packet, data) = rd::parse(&d.bytes).unwrap();
                store
                    .borrow_mut()
                    .push((packet, data.map_or(0, <[u8]>::len)));
            }
            true
        }));
        Self {
            net,
            near,
            far,
            mr,
            packets,
        }
    }

    /// As [`Self::new`], but the peer has answered the request for its token.
    fn met() -> Self {
        let mut far = Self::new();
        far.post_sends(0..1);
        let asked = far.received();
        let (asking, len) = &asked[0];
        assert!(asked.len() == 1 && asking.echo == 0 && *len == 0);
        let challenge = Packet {
            challenge: true,
            echo: asking.token,
            time_echo: asking.time,
            ..blank()
        };
        far.sends(&challenge);
        far
    }

    fn post_sends(&mut self, ids: std::ops::Range<u64>) {
        for id in ids {
            let sges = [self.mr.part(0, 8)];
            self.net.post(self.near, self.far, send(id).from(&sges));
        }
    }

    /// The packets that have arrived since the last call.
    fn received(&mut self) -> Vec<(Packet, usize)> {
        self.net.run(MS / 2);
        std::mem::take(&mut self.packets.borrow_mut())
    }

    /// Sends a packet of the test to the queue pair.
    fn sends(&mut self, packet: &Packet) {
        let mut bytes = Vec::new();
        packet.put(false, &mut bytes);
        dgram::seal(&mut bytes);
        let (from, to) = (self.net[self.far].addr, self.net[self.near].addr);
        self.net.deliver(from, to, &bytes);
    }

    fn statuses(&mut self) -> Vec<(u64, Status)> {
        let done = self.net[self.near].completed();
        done.iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

fn blank() -> Packet {
    Packet {
        token: TOKEN,
        dst_index: 5,
        src_index: 5,
        window: 1 << 20,
        time: 1,
        ..Packet::default()
    }
}

/// Of packets that were sent at the same time, packet `n` counts as lost if packet `n + 16` or a
/// later one has arrived. It does not count as lost if only packets up to `n + 15` have arrived.
#[test]
fn a_packet_overtaken_by_sixteen_is_lost() {
    let mut far = Far::met();
    far.post_sends(1..20);
    let sent = far.received();
    assert_eq!(sent.len(), 20);
    let (first, token) = (sent[0].0.seq, sent[0].0.token);
    for (arrived, again) in [
        (15, vec![]),
        (16, vec![first]),
        (18, vec![first + 1, first + 2]),
    ] {
        let ack = Packet {
            echo: token,
            ack: Some(first),
            arrived: [(first + arrived, first + arrived + 1)]
                .into_iter()
                .collect(),
            ..blank()
        };
        far.sends(&ack);
        let packets: Vec<u32> = far.received().iter().map(|(p, _)| p.seq).collect();
        assert_eq!(packets, again, "{arrived} after it");
    }
    let counters = far.net[far.near].qp.counters();
    assert_eq!((counters.rd_again, counters.rd_probes), (3, 0));
    // The peer is silent from now on.
    far.net.run(1000 * MS);
    assert!(far.net[far.near].qp.counters().rd_probes > 0);
}

/// Messages complete up to the first packet that is missing at the peer. Acknowledged packets beyond it complete
/// nothing.
#[test]
fn acknowledged_messages_complete() {
    let mut far = Far::met();
    far.post_sends(1..4);
    let sent = far.received();
    let (first, token) = (sent[0].0.seq, sent[0].0.token);
    let ack_of = |ack, runs: &[(u32, u32)]| Packet {
        echo: token,
        ack: Some(ack),
        arrived: runs.iter().copied().collect(),
        ..blank()
    };
    far.sends(&ack_of(first, &[(first + 1, first + 4)]));
    assert_eq!(far.statuses(), []);
    far.sends(&ack_of(first + 2, &[(first + 3, first + 4)]));
    let done = [(0, Status::Success), (1, Status::Success)];
    assert_eq!(far.statuses(), done);
    // An acknowledgement of more than was sent completes what was sent.
    far.sends(&ack_of(first + 9, &[]));
    let done = [(2, Status::Success), (3, Status::Success)];
    assert_eq!(far.statuses(), done);
}

/// A challenge is accepted only by an end that has requested a token.
#[test]
fn an_unsolicited_challenge_is_not_accepted() {
    let mut far = Far::met();
    let sent = far.received();
    let (packet, _) = &sent[0];
    let ack = Packet {
        echo: packet.token,
        ack: Some(packet.seq + 1),
        ..blank()
    };
    far.sends(&ack);
    assert_eq!(far.statuses(), [(0, Status::Success)]);
    assert_eq!(far.received(), []);
    let other = Packet {
        token: TOKEN + 1,
        challenge: true,
        echo: packet.token,
        ..blank()
    };
    far.sends(&other);
    far.post_sends(1..2);
    let echoes: Vec<u32> = far.received().iter().map(|(p, _)| p.echo).collect();
    assert_eq!(echoes, [TOKEN]);
}

/// A sender sends no more than the window of its peer, except that the last packet may exceed it.
/// It probes a peer with a closed window, and sends the rest when the window opens.
#[test]
fn even_a_small_window_is_respected() {
    for (window, first) in [(0, 0), (1, 1), (3000, 3), (1 << 20, 9)] {
        let mut far = Far::met();
        let asked = far.received();
        let (seq, token) = (asked[0].0.seq, asked[0].0.token);
        let ack_of = |ack, window| Packet {
            echo: token,
            ack: Some(ack),
            window,
            ..blank()
        };
        far.sends(&ack_of(seq + 1, window));
        far.post_sends(1..10);
        let data = |packets: &[(Packet, usize)]| packets.iter().filter(|(_, len)| *len > 0).count();
        assert_eq!(data(&far.received()), first, "{window}");
        if window == 0 {
            far.net.run(400 * MS);
            let packets = std::mem::take(&mut *far.packets.borrow_mut());
            assert_eq!(data(&packets), 0);
            let asks = packets.iter().filter(|(p, _)| p.ack_now).count();
            assert!((1..=8).contains(&asks), "{asks}");
            far.sends(&ack_of(seq + 1, 1 << 20));
            assert_eq!(data(&far.received()), 9);
        }
    }
}

/// A window that becomes smaller limits packets that are sent again, too.
#[test]
fn lost_packets_are_sent_again_within_the_window() {
    for (window, expected) in [(0, 0), (1, 1), (3000, 3), (1 << 20, 40)] {
        let mut far = Far::met();
        let asked = far.received();
        let (seq, token) = (asked[0].0.seq, asked[0].0.token);
        let ack_of = |window, arrived: std::ops::Range<u32>| Packet {
            echo: token,
            ack: Some(seq + 1),
            window,
            arrived: [(arrived.start, arrived.end)].into_iter().collect(),
            ..blank()
        };
        let data = |packets: &[(Packet, usize)]| packets.iter().filter(|(_, len)| *len > 0).count();
        far.sends(&ack_of(1 << 20, seq + 1..seq + 1));
        far.post_sends(1..61);
        assert_eq!(data(&far.received()), 60);
        // The first 40 are lost, and the last 20 have arrived.
        far.sends(&ack_of(window, seq + 41..seq + 61));
        assert_eq!(data(&far.received()), expected, "{window}");
    }
}

/// An atomic on an address that is not a multiple of eight is refused by the responder as well.
#[test]
fn a_misaligned_atomic_is_refused() {
    for (at, status) in [(0, Status::Success), (4, Status::RemoteInvalidRequest)] {
        let mut net = Ether::new(2, Link::default());
        let a = net.join(Kind::Rd, options());
        let b = net.join(Kind::Rd, options());
        let mine = net[a].host.register(8, access::ALL);
        let theirs = net[b].host.register(64, access::ALL);
        net.post(a, b, fetch_add(1, theirs.remote(at), 5).from(&[mine.all()]));
        net.run(1000 * MS);
        assert_eq!(net[a].completed()[0].status, status);
        assert_eq!(net[b].host.bytes(&theirs)[0] == 5, at == 0);
        assert_eq!(net[b].host.bytes(&theirs)[4], 0);
    }
}
