//! Peers, challenges, acknowledgements and bounds.

use super::ack::{ACK_MOST, MANY, PIPELINE};
use super::shares::{Prefix, Share};
use super::*;
use crate::datagram::messages::Messages;
use crate::datagram::types::{Arrival, Part};
use crate::wire::ddp::{Header, Untagged};
use crate::wire::dgram::Shim;
use crate::wire::rdmap::Opcode;

fn peer() -> Peer {
    (([10, 0, 0, 1], 4000).into(), 3)
}

/// A message of one datagram, whose acknowledgement is needed soon.
fn whole(tag: Tag) -> Part {
    Part {
        tag,
        last: true,
        alone: true,
        ack_later: false,
        long: false,
    }
}

fn arrival(peer: &Peer) -> Arrival {
    Arrival {
        from: peer.0,
        to: None,
        hop_limit: 0,
        traffic_class: 0,
    }
}

/// A packet of a peer that knows the token of this end. In a first packet this is a token that was issued at second 5.
fn packet(rd: &Reliable, peer: &Peer, token: u32, seq: u32) -> Packet {
    let early = Duration::from_secs(5);
    let echo = match rd.peers.get(peer) {
        Some(known) if known.echo == token || known.echo == 0 => known.token,
        Some(_) => rd.secret.token(peer, token, early),
        None => rd.secret.token(peer, 0, early),
    };
    Packet {
        token,
        echo,
        seq,
        dst_index: 5,
        src_index: 3,
        window: bounds::DATAGRAM_WINDOW,
        time: 1,
        ..Packet::default()
    }
}

/// A datagram of a Send with `len` bytes of payload, as packets carry it.
fn datagram(len: usize) -> Vec<u8> {
    datagram_at(0, len)
}

/// The same, with payload that begins at `offset` in the message.
fn datagram_at(offset: u32, len: usize) -> Vec<u8> {
    let header = Untagged {
        last: true,
        opcode: Opcode::Send,
        inv_stag: crate::wire::Stag(0),
        qn: 0,
        msn: crate::wire::Msn(1),
        mo: offset,
    };
    let shim = Shim {
        epoch: 1,
        qkey: 0,
        id: 1,
        length: offset + len as u32,
        offset,
        sub_op: 0,
        attributes: 0,
        dst_index: 5,
        src_index: 3,
        immediate: None,
        commit: false,
        parity: false,
        group: 0,
        segment: 0,
    };
    let mut bytes = dgram::emit_head(&shim, &Header::Untagged(header));
    bytes.resize(bytes.len() + len, 0);
    bytes
}

/// Checks that packet `seq` is the next one and delivers it.
fn takes(rd: &mut Reliable, seq: u32, ack_soon: bool, now: Duration) {
    let packet = Packet {
        ack_soon,
        ..packet(rd, &peer(), 77, seq)
    };
    let outcome = rd.handle(&peer(), &arrival(&peer()), &packet, Some(b"data"), now);
    let RxOutcome::Deliver(n) = outcome else {
        panic!("packet {seq} is not the next: {outcome:?}")
    };
    rd.delivered(&peer(), n);
}

/// A duplicate of a challenge is not a packet with data: its numbers are ignored.
#[test]
fn a_challenge_that_was_answered_changes_nothing() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(1);
    takes(&mut rd, 0, false, now);
    let known = &rd.peers[&peer()];
    let next = known.rx.as_ref().unwrap().next();
    let challenge = Packet {
        challenge: true,
        base: next as u32 + 100,
        ..packet(&rd, &peer(), known.echo, next as u32)
    };
    let outcome = rd.handle(&peer(), &arrival(&peer()), &challenge, None, now);
    assert_eq!(outcome, RxOutcome::Nothing);
    assert_eq!(rd.peers[&peer()].rx.as_ref().unwrap().next(), next);
}

/// Each packet shows that its sender is alive, and contains the size of its socket buffer.
#[test]
fn a_peer_that_sends_is_not_forgotten_and_its_window_is_updated() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let at = Duration::from_secs;
    takes(&mut rd, 0, false, at(1));
    takes(&mut rd, 1, false, at(50));
    assert_eq!(rd.peers[&peer()].used, at(50));
    let told = Packet {
        window: 2 * bounds::DATAGRAM_WINDOW,
        ..packet(&rd, &peer(), rd.peers[&peer()].echo, 2)
    };
    rd.handle(&peer(), &arrival(&peer()), &told, None, at(51));
    assert_eq!(rd.peers[&peer()].room, 2 * bounds::DATAGRAM_WINDOW);
}

/// A peer that was forgotten remembers the numbers of old packets, so new numbers are larger.
#[test]
fn numbers_continue_after_a_peer_was_forgotten() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let at = Duration::from_secs;
    assert!(!rd.may_send(&peer(), IpFields::default(), 50, false, at(1)));
    let first = rd.peers[&peer()].next;
    let token = rd.peers[&peer()].token;
    let (hello, _) = crate::wire::rd::parse(&rd.poll(at(1)).unwrap().2).unwrap();
    let packet = Packet {
        token: 77,
        echo: token,
        challenge: true,
        ..hello
    };
    rd.handle(&peer(), &arrival(&peer()), &packet, None, at(1));
    for n in 0..5 {
        assert!(rd.may_send(&peer(), IpFields::default(), 50, false, at(1)));
        let packet = vec![0; Packet::LEN + 50];
        assert!(rd.push(&peer(), packet, whole(n), at(1)).is_some());
    }
    // A peer with packets under way is not forgotten.
    rd.forget_idle(at(100));
    assert_eq!(rd.peers(), 1);
    rd.abandon(std::iter::empty(), at(1));
    rd.forget_idle(at(30));
    assert_eq!(rd.peers(), 1);
    rd.forget_idle(at(100));
    assert_eq!(rd.peers(), 0);
    rd.may_send(&peer(), IpFields::default(), 50, false, at(100));
    assert_eq!(rd.peers[&peer()].next, first + 5);
}

/// A network can use half of all entries, the next network half of the rest. One host alone can use a third of all entries. So entries
/// are left for peers of other networks. Peers to which this end sends first are not limited.
#[test]
fn no_network_or_host_can_use_all_entries() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(5);
    // The network, the host in it, and the peer on that host.
    let of = |network: u8, host: u8, n: usize| -> Peer {
        let ip = if network.is_multiple_of(2) {
            IpAddr::from([10, 0, network, host])
        } else {
            // A different address each time.
            IpAddr::from([
                0xfd00,
                0,
                network.into(),
                host.into(),
                0,
                0,
                0,
                n as u16 + 1,
            ])
        };
        ((ip, (n % 60_000) as u16 + 1).into(), (n / 60_000) as u8)
    };
    let fill = |rd: &mut Reliable, network, host| {
        (0..bounds::RD_PEERS)
            .take_while(|n| rd.enter(&of(network, host, *n), IpFields::default(), true, now))
            .count()
    };
    const ALL: usize = bounds::RD_PEERS;
    assert_eq!(fill(&mut rd, 0, 0), ALL.div_ceil(3));
    let others: usize = (1..=50).map(|host| fill(&mut rd, 0, host)).sum();
    assert_eq!(others + ALL.div_ceil(3), ALL / 2);
    let theirs: usize = (0..50).map(|host| fill(&mut rd, 1, host)).sum();
    assert_eq!(theirs, ALL / 4);
    for network in 2..10 {
        assert!(fill(&mut rd, network, 0) > 0, "network {network}");
    }
    let one_more = of(0, 0, 65_000);
    assert!(!rd.enter(&one_more, IpFields::default(), true, now));
    assert!(rd.enter(&one_more, IpFields::default(), false, now));
    // A known peer stays known, and forgotten peers are not counted any more.
    assert!(rd.enter(&of(0, 0, 7), IpFields::default(), true, now));
    rd.forget_idle(now + 2 * IDLE);
    assert_eq!((rd.peers(), rd.shares.is_empty()), (0, true));
    assert!(rd.peers.capacity() < 100, "{}", rd.peers.capacity());
    assert_eq!(fill(&mut rd, 0, 0), ALL.div_ceil(3));
}

/// A silent peer with a gap in its packets is forgotten, and its incomplete messages are given up. If some of its packets
/// wait, this happens even if the table is not full.
#[test]
fn a_peer_that_left_a_gap_is_forgotten() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let at = Duration::from_secs;
    let of = |n: u8| -> Peer { (([10, 0, 0, n], 4000).into(), 3) };
    let comes = |rd: &mut Reliable, who: u8, seq: u32, now: Duration| {
        let packet = Packet {
            base: 100,
            ..packet(rd, &of(who), 77, seq)
        };
        rd.handle(
            &of(who),
            &arrival(&of(who)),
            &packet,
            Some(&datagram(1)),
            now,
        )
    };
    let skipped = |rd: &mut Reliable| std::iter::from_fn(|| rd.poll_event()).count();
    assert_eq!(comes(&mut rd, 1, 101, at(1)), RxOutcome::Nothing);
    assert_eq!(comes(&mut rd, 2, 101, at(30)), RxOutcome::Nothing);
    assert!(matches!(
        comes(&mut rd, 3, 100, at(30)),
        RxOutcome::Deliver(_)
    ));
    rd.refused(&of(3), 1 << 32 | 100, b"", Status::RemoteAccess);
    while rd.poll(at(30)).is_some() {}
    skipped(&mut rd);
    let held = rd.shares.waiting();
    assert!(held > 0);
    assert_eq!(rd.poll_timeout(false), Some(at(61)));
    rd.handle_timeout(at(61), None, &Messages::default());
    assert_eq!((rd.peers(), skipped(&mut rd)), (2, 1));
    assert_eq!(rd.shares.waiting(), held / 2);
    rd.handle_timeout(rd.poll_timeout(false).unwrap(), None, &Messages::default());
    assert_eq!(rd.peers(), 2);
    rd.handle_timeout(at(91), None, &Messages::default());
    assert_eq!((rd.peers(), rd.shares.waiting()), (1, 0));
    assert_eq!(rd.poll_timeout(false), None);
    rd.forget_idle(at(91));
    assert_eq!((rd.peers(), skipped(&mut rd)), (0, 2));
    assert!(rd.shares.is_empty());
}

/// One acknowledgement covers 32 packets if few are under way, and a quarter of them if many are, but never more than 128.
#[test]
fn more_packets_in_flight_share_an_acknowledgement() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    rd.set_room(bounds::DATAGRAM_WINDOW_MAX);
    let now = Duration::from_secs(5);
    let mut told = Vec::new();
    for seq in 0..1000 {
        takes(&mut rd, seq, false, now);
        while rd.poll(now).is_some() {
            told.push(seq + 1);
        }
    }
    assert_eq!(rd.counts.acks, told.len() as u64);
    assert_eq!(told[..4], [32, 64, 96, 128]);
    let between: Vec<u32> = told.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(between.is_sorted(), "{between:?}");
    assert_eq!(between.last(), Some(&ACK_MOST));
}

/// The acknowledgement of a last packet is sent at once if few packets are under way, delayed a little if there are
/// more, and delayed until the sender's next packets arrive if there are many.
#[test]
fn the_delay_of_an_acknowledgement_depends_on_the_packets_under_way() {
    for (seq, least, most) in [(PIPELINE - 1, 0, 0), (PIPELINE, 1, 10), (MANY, 60, 70)] {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
        let now = Duration::from_secs(5);
        // Earlier packets are acknowledged.
        for before in 0..seq {
            takes(&mut rd, before, false, now);
        }
        let state = rd.peers.get_mut(&peer());
        if let Some(rx) = state.and_then(|s| s.rx.as_mut()) {
            rx.acknowledges();
        }
        while rd.poll(now).is_some() {}
        takes(&mut rd, seq, true, now);
        let goes = |rd: &mut Reliable, micros| {
            rd.flush(now + Duration::from_micros(micros));
            rd.poll(now).is_some()
        };
        assert!(rd.poll(now).is_none() && rd.ack_due());
        assert!(least == 0 || !goes(&mut rd, least - 1), "{seq}: too soon");
        assert!(goes(&mut rd, most), "{seq}: too late");
    }
}

/// On a path with a short round trip an acknowledgement is requested for each half of the packets under way,
/// otherwise for each 32 packets.
#[test]
fn the_number_of_requested_acknowledgements_depends_on_the_path() {
    let asks = |trip: Duration| {
        let now = Duration::from_secs(5);
        let mut path = Congestion::new();
        path.measured(now, trip);
        let mut tx = Sender::new(1, bounds::DATAGRAM_WINDOW_MAX, now);
        let all: Vec<usize> = (1..=1000)
            .filter(|_| tx.push(100, false, now, &mut path))
            .collect();
        all.windows(2).map(|w| w[1] - w[0]).collect::<Vec<_>>()
    };
    assert!(asks(Duration::from_millis(5)).iter().all(|n| *n == 32));
    let short = asks(Duration::from_micros(50));
    assert!(short.iter().all(|n| (32..=128).contains(n)), "{short:?}");
    assert_eq!(short.last(), Some(&128));
}

/// The memory of waiting packets is limited for each peer, for each network and in total, and includes overheads.
/// Packets of a restarted peer are dropped, and its old token belongs to no peer.
#[test]
fn waiting_packets_are_limited_and_counted() {
    for len in [0, 60_000] {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
        let now = Duration::from_secs(5);
        let data = datagram(len);
        let cost = data.len() + receiver::KEPT + receiver::RUN;
        let of = |n: u8| -> Peer { (([10, 0, n / 4, n], 4000).into(), 3) };
        let comes = |rd: &mut Reliable, who: u8, token: u32, seq: u32| {
            let peer = of(who);
            let packet = Packet {
                base: 100,
                ..packet(rd, &peer, token, seq)
            };
            rd.handle(&peer, &arrival(&peer), &packet, Some(&data), now)
        };
        // Each packet is followed by a gap.
        let many = (20 << 20) / cost as u32;
        let mut before = 0;
        for who in 1..=12 {
            let RxOutcome::Deliver(seq) = comes(&mut rd, who, 77, 100) else {
                panic!("not the next")
            };
            rd.mark_blocked(&of(who), seq, &data, Resource::Receive);
            for n in 1..many.min(30_000) {
                assert_eq!(comes(&mut rd, who, 77, 100 + 2 * n), RxOutcome::Nothing);
            }
            let theirs = rd.peers[&of(who)].rx.as_ref().unwrap().held();
            assert!(theirs <= bounds::RD_WAITING_PEER, "{theirs}");
            assert_eq!(rd.shares.waiting(), before + theirs);
            before += theirs;
            assert!(before <= bounds::RD_WAITING);
            // Network 0 has peers 1 to 3.
            assert!(who > 3 || before <= bounds::RD_WAITING / 2, "{before}");
        }
        if len == 0 {
            // The limit of numbers is reached before the limit of bytes.
            continue;
        }
        assert!(before > bounds::RD_WAITING / 8 * 7, "{before}");
        // A packet that is blocked out of order is limited too.
        rd.mark_blocked(&of(2), 1 << 32 | 499, &data, Resource::Receive);
        assert_eq!(rd.shares.waiting(), before);
        for who in 1..=12 {
            comes(&mut rd, who, 78, 100);
        }
        assert_eq!(rd.shares.waiting(), 0);
        // Packets with the old token are dropped.
        assert_eq!(comes(&mut rd, 1, 77, 100), RxOutcome::Nothing);
        assert_eq!(rd.peers[&of(1)].echo, 78);
    }
}

/// A waiting packet that was taken for delivery, and finds no receive, waits again with all its bytes, even if no
/// more packets may wait.
#[test]
fn a_packet_that_waited_may_always_wait_again() {
    for ordered in [true, false] {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, ordered, IDLE);
        let now = Duration::from_secs(5);
        let data = datagram(60_000);
        let comes = |rd: &mut Reliable, seq: u32| {
            let packet = Packet {
                base: 100,
                ..packet(rd, &peer(), 77, seq)
            };
            match rd.handle(&peer(), &arrival(&peer()), &packet, Some(&data), now) {
                RxOutcome::Deliver(seq) => rd.mark_blocked(&peer(), seq, &data, Resource::Receive),
                RxOutcome::Nothing => {}
            }
        };
        let held = |rd: &Reliable| rd.peers[&peer()].rx.as_ref().unwrap().held();
        let mut before = 0;
        for seq in 100..1000 {
            comes(&mut rd, seq);
            if held(&rd) == before {
                break;
            }
            before = held(&rd);
        }
        assert!(
            before > bounds::RD_WAITING_PEER - 2 * data.len(),
            "{before}"
        );
        // One more packet uses all that remains.
        let overhead = datagram(0).len() + receiver::KEPT + receiver::RUN;
        let rest = datagram(bounds::RD_WAITING_PEER - before - overhead);
        rd.mark_blocked(&peer(), 1 << 32 | 1100, &rest, Resource::Receive);
        let full = held(&rd);
        assert_eq!(full, bounds::RD_WAITING_PEER);
        for _ in 0..3 {
            let (seq, taken) = rd.take_waiting(&peer()).unwrap();
            assert_eq!((seq, taken.len()), (1 << 32 | 100, data.len()));
            rd.mark_blocked(&peer(), seq, &taken, Resource::Receive);
            assert_eq!((held(&rd), rd.shares.waiting()), (full, full));
            rd.check_accounts();
        }
        let (_, taken) = rd.take_waiting(&peer()).unwrap();
        assert_eq!(taken, data);
    }
}

/// Bytes that cannot be a datagram are not stored, in any order.
#[test]
fn invalid_datagrams_are_not_stored() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(5);
    let mut bad = datagram(10);
    bad[0] = 0;
    for data in [&b"x"[..], &[0; 41], &bad, &datagram(10)[..30]] {
        let packet = Packet {
            base: 100,
            ..packet(&rd, &peer(), 77, 110)
        };
        rd.handle(&peer(), &arrival(&peer()), &packet, Some(data), now);
        assert_eq!(rd.shares.waiting(), 0, "{data:?}");
    }
}

#[test]
fn an_idle_peer_costs_less_than_a_kibibyte() {
    // A peer has an entry in the table of peers, with one control byte, and its host and its network have one each. A
    // hash table that has grown is at least 7/16 full.
    let place = size_of::<(Peer, PeerState)>() + 1 + 2 * (size_of::<(Prefix, Share)>() + 1);
    eprintln!("{place} bytes, {} at most", place * 16 / 7);
    assert!(place * 16 / 7 <= 1024, "{place}");
}

/// Two ends and the packets between them, without losses.
struct Two {
    ends: [Reliable; 2],
    now: Duration,
    delivered: usize,
}

impl Two {
    fn new() -> Self {
        let end = |n: u8| Reliable::new(Secret::new([1, n.into()]), n, true, 3 * IDLE);
        Self {
            ends: [end(0), end(1)],
            now: Duration::from_secs(1),
            delivered: 0,
        }
    }

    fn at(n: usize) -> Peer {
        (([10, 0, 0, n as u8], 4000).into(), n as u8)
    }

    /// Exchanges packets until neither end has any to send.
    fn run(&mut self) {
        for _ in 0..20 {
            for from in 0..2 {
                while let Some((_, _, bytes)) = self.ends[from].poll(self.now) {
                    let (packet, data) = crate::wire::rd::parse(&bytes).unwrap();
                    let peer = Self::at(from);
                    let end = &mut self.ends[1 - from];
                    let outcome = end.handle(&peer, &arrival(&peer), &packet, data, self.now);
                    if let RxOutcome::Deliver(seq) = outcome {
                        end.delivered(&peer, seq);
                        self.delivered += 1;
                    }
                }
            }
        }
    }

    /// End `from` sends a datagram.
    fn sends(&mut self, from: usize, tag: Tag) {
        let peer = Self::at(1 - from);
        let end = &mut self.ends[from];
        if !end.may_send(&peer, IpFields::default(), 50, false, self.now) {
            self.run();
        }
        let end = &mut self.ends[from];
        assert!(end.may_send(&peer, IpFields::default(), 50, false, self.now));
        let packet = vec![0; Packet::LEN + 50];
        let (_, bytes) = end.push(&peer, packet, whole(tag), self.now).unwrap();
        let (packet, data) = crate::wire::rd::parse(&bytes).unwrap();
        let peer = Self::at(from);
        let other = &mut self.ends[1 - from];
        let outcome = other.handle(&peer, &arrival(&peer), &packet, data, self.now);
        if let RxOutcome::Deliver(seq) = outcome {
            other.delivered(&peer, seq);
            self.delivered += 1;
        }
        self.ends[1 - from].flush(Duration::MAX);
        self.run();
    }

    fn events(&mut self, of: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.ends[of].poll_event()).collect()
    }
}

/// A message whose completion is not needed soon requests no acknowledgement of its own. A later probe of its sender
/// requests one.
#[test]
fn a_message_may_be_acknowledged_later() {
    let mut two = Two::new();
    two.sends(0, 1);
    let _ = two.events(0);
    for (tag, ack_later) in [(2, true), (3, false)] {
        let (to, from) = (Two::at(1), Two::at(0));
        let packet = vec![0; Packet::LEN + 50];
        let part = Part {
            ack_later,
            ..whole(tag)
        };
        let (_, bytes) = two.ends[0].push(&to, packet, part, two.now).unwrap();
        let (packet, data) = crate::wire::rd::parse(&bytes).unwrap();
        assert_eq!(packet.ack_soon, !ack_later);
        let outcome = two.ends[1].handle(&from, &arrival(&from), &packet, data, two.now);
        assert!(matches!(outcome, RxOutcome::Deliver(_)));
        two.ends[1].delivered(&from, u64::from(packet.seq) | 1 << 32);
        two.ends[1].flush(Duration::MAX);
        two.run();
        if ack_later {
            assert!(
                two.events(0).is_empty(),
                "the acknowledgement is not needed soon"
            );
            two.now += Duration::from_secs(1);
            let now = two.now;
            two.ends[0].handle_timeout(now, None, &Messages::default());
            two.run();
        }
        assert!(two.events(0).contains(&Event::Done(tag, tag)), "{tag}");
    }
}

/// The last packet of a long message requests an immediate acknowledgement, because the receiving program might compute for
/// a while before it polls again.
#[test]
fn the_end_of_a_long_message_is_acknowledged_at_once() {
    let mut two = Two::new();
    two.sends(0, 1);
    let _ = two.events(0);
    let changes: [fn(&mut Part); 4] = [
        |_| (),
        |part| part.long = true,
        |part| (part.long, part.ack_later) = (true, true),
        |part| (part.long, part.alone) = (true, false),
    ];
    for (tag, change) in (2..).zip(changes) {
        let mut part = whole(tag);
        change(&mut part);
        let packet = vec![0; Packet::LEN + 50];
        let (_, bytes) = two.ends[0]
            .push(&Two::at(1), packet, part, two.now)
            .unwrap();
        let (packet, _) = crate::wire::rd::parse(&bytes).unwrap();
        assert_eq!(packet.ack_now, tag == 3, "{tag}");
    }
}

/// A peer that was forgotten because it was idle is recognized again, and no request fails in either direction.
#[test]
fn a_forgotten_peer_is_recognized_again() {
    for (first, forgets) in [(0, 1), (0, 0), (1, 0)] {
        let mut two = Two::new();
        two.sends(0, 1);
        two.sends(1, 1);
        assert_eq!(two.delivered, 2);
        two.now += 2 * IDLE;
        let now = two.now;
        two.ends[forgets].forget_idle(now);
        assert_eq!(two.ends[forgets].peers(), 0);
        let _ = (two.events(0), two.events(1));
        two.sends(first, 2);
        two.ends[first].handle_timeout(
            two.now + Duration::from_secs(2),
            None,
            &Messages::default(),
        );
        two.now += Duration::from_secs(2);
        two.run();
        assert_eq!(two.delivered, 3, "{first} sends, {forgets} had forgotten");
        let lost = |e: &Event| matches!(e, Event::Lost(..) | Event::Failed(..));
        let events = two.events(first);
        assert!(events.contains(&Event::Done(2, 2)), "{events:?}");
        assert!(!events.iter().any(lost), "{events:?}");
        assert!(!two.events(1 - first).iter().any(lost));
    }
}

/// A sender that pauses for more than a minute in the middle of a message has nothing under way, so the peer may forget it,
/// and the first part of the message with it. The rest alone is useless, so the request fails.
#[test]
fn the_rest_of_a_message_fails_when_the_peer_has_forgotten_the_beginning() {
    for (offset, fails) in [(0, false), (50, true)] {
        let mut two = Two::new();
        two.sends(0, 1);
        two.now += 2 * IDLE;
        let now = two.now;
        two.ends[1].forget_idle(now);
        two.events(0);
        let peer = Two::at(1);
        let mut packet = vec![0; Packet::LEN];
        packet.extend(datagram_at(offset, 50));
        two.ends[0].push(&peer, packet, whole(2), now);
        two.ends[0].handle_timeout(now + Duration::from_secs(2), None, &Messages::default());
        two.now += Duration::from_secs(2);
        two.run();
        let events = two.events(0);
        let lost = events.contains(&Event::Lost(peer, Status::RemoteAborted));
        assert_eq!(lost, fails, "{events:?}");
        assert_eq!(events.contains(&Event::Done(2, 2)), !fails, "{events:?}");
        assert_eq!(two.delivered, if fails { 1 } else { 2 });
    }
}

/// A new session has a new token, even while the old token is still valid. The peer does not take it for the old session of a queue
/// pair that has only been idle. Packets under way to the old session fail, and none of them is delivered in the new one.
#[test]
fn a_new_session_is_noticed_by_the_peer() {
    for under_way in [false, true] {
        for starter in 0..2 {
            let mut two = Two::new();
            two.sends(0, 1);
            two.sends(1, 1);
            let (to, from) = (Two::at(1), Two::at(0));
            let now = two.now;
            if under_way {
                let packet = vec![0; Packet::LEN + 50];
                two.ends[0].push(&to, packet, whole(2), now);
            }
            let _ = (two.events(0), two.events(1));
            two.ends[1].begin_session(&from, now);
            two.ends[1].begin_session(&from, now);
            let skipped = |e: &Event| *e == Event::Skipped(from, u64::MAX);
            assert!(two.events(1).iter().all(skipped));
            if starter == 0 {
                two.ends[0].ask(&to, now);
                two.now += Duration::from_secs(2);
                let now = two.now;
                two.ends[0].handle_timeout(now, None, &Messages::default());
                two.run();
            }
            two.sends(1, 3);
            let events = two.events(0);
            let noticed = if under_way {
                Event::Lost(to, Status::RemoteAborted)
            } else {
                Event::Restarted(to)
            };
            assert!(events.contains(&noticed), "{events:?}");
            assert_eq!(two.delivered, 3);
            two.sends(0, 4);
            assert!(two.events(0).contains(&Event::Done(4, 4)));
            assert!(two.events(1).contains(&Event::Done(3, 3)));
            assert_eq!(two.delivered, 4);
        }
    }
}

/// A packet that was under way for a minute may have arrived before the peer forgot this end. This end cannot know whether
/// it has, so the request fails.
#[test]
fn old_packets_fail_when_the_peer_has_forgotten_this_end() {
    let mut two = Two::new();
    two.sends(0, 1);
    let peer = Two::at(1);
    let packet = vec![0; Packet::LEN + 50];
    two.ends[0].push(&peer, packet, whole(2), two.now);
    two.now += 2 * IDLE;
    let now = two.now;
    two.ends[1].forget_idle(now);
    two.ends[0].handle_timeout(now, None, &Messages::default());
    two.run();
    let events = two.events(0);
    assert!(
        events.contains(&Event::Lost(peer, Status::RemoteAborted)),
        "{events:?}"
    );
}

/// Another queue pair at the address of a peer has to echo a token that was made for it. Until then packets of the old
/// queue pair are accepted.
#[test]
fn a_restarted_peer_has_to_echo_a_new_token() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(1);
    takes(&mut rd, 0, false, now);
    let token = rd.peers[&peer()].token;
    for echo in [token, rd.secret.token(&peer(), 0, now)] {
        let other = Packet {
            echo,
            ..packet(&rd, &peer(), 78, 100)
        };
        let outcome = rd.handle(&peer(), &arrival(&peer()), &other, Some(b"data"), now);
        assert_eq!(outcome, RxOutcome::Nothing);
        assert_eq!(rd.peers[&peer()].echo, 77);
        assert_eq!(rd.poll_event(), None);
    }
    assert_eq!(rd.counts.bad_echo, 2);
    assert_eq!(rd.guessed, None);
    let (challenge, _) = crate::wire::rd::parse(&rd.poll(now).unwrap().2).unwrap();
    assert!(challenge.challenge && challenge.echo == 78);
    takes(&mut rd, 1, false, now);
    let proves = Packet {
        echo: challenge.token,
        base: 100,
        ..packet(&rd, &peer(), 78, 100)
    };
    let outcome = rd.handle(&peer(), &arrival(&peer()), &proves, Some(b"data"), now);
    assert!(matches!(outcome, RxOutcome::Deliver(_)));
    assert_eq!(rd.peers[&peer()].echo, 78);
    assert!(matches!(rd.poll_event(), Some(Event::Skipped(_, u64::MAX))));
}

/// A challenge with a different token changes nothing before the peer itself confirms it.
#[test]
fn a_forged_challenge_changes_nothing() {
    let mut two = Two::new();
    two.sends(0, 1);
    let peer = Two::at(1);
    let packet = vec![0; Packet::LEN + 50];
    two.ends[0].push(&peer, packet, whole(2), two.now);
    let state = &two.ends[0].peers[&peer];
    let forged = Packet {
        token: state.echo ^ 1,
        echo: state.token,
        challenge: true,
        src_index: 1,
        ..Packet::default()
    };
    two.events(0);
    two.ends[0].handle(&peer, &arrival(&peer), &forged, None, two.now);
    two.run();
    two.now += Duration::from_secs(1);
    let now = two.now;
    two.ends[0].handle_timeout(now, None, &Messages::default());
    two.run();
    assert_eq!(two.events(0), [Event::Done(2, 2)]);
}

/// A token for first contact is valid for a minute at most.
#[test]
fn an_expired_token_is_not_accepted() {
    for (at, good) in [(59, true), (60, false), (150, false)] {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
        let first = packet(&rd, &peer(), 77, 0);
        let at = Duration::from_secs(at);
        let outcome = rd.handle(&peer(), &arrival(&peer()), &first, Some(b"data"), at);
        assert_eq!(outcome != RxOutcome::Nothing, good, "{at:?}");
        assert_eq!(rd.peers(), usize::from(good));
    }
}

/// After too many wrong tokens from one address, even the right token is rejected until the second is over. Other
/// peers are not affected.
#[test]
fn guessed_tokens_are_counted_and_rejected() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(1);
    let right = packet(&rd, &peer(), 77, 0);
    for n in 0..1000 {
        let guess = Packet {
            echo: right.echo.wrapping_add(n + 1),
            ..right.clone()
        };
        rd.handle(&peer(), &arrival(&peer()), &guess, Some(b"data"), now);
        while rd.poll(now).is_some() {}
    }
    assert_eq!(rd.counts.bad_echo, 1000);
    assert_eq!(
        rd.guessed.take(),
        Some(peer().0.ip()),
        "the host is reported"
    );
    rd.handle(&peer(), &arrival(&peer()), &right, Some(b"data"), now);
    assert_eq!(rd.peers(), 0);
    let other: Peer = (([10, 9, 9, 9], 4000).into(), 3);
    let theirs = packet(&rd, &other, 77, 0);
    rd.handle(&other, &arrival(&other), &theirs, Some(b"data"), now);
    assert_eq!(rd.peers(), 1);
    let later = now + Duration::from_secs(1);
    rd.handle(&peer(), &arrival(&peer()), &right, Some(b"data"), later);
    assert_eq!(rd.peers(), 2);
}

/// A queue pair that knows the peers, all of which have sent a packet.
fn knows(peers: &[Peer], peer_timeout: Duration, now: Duration) -> Reliable {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, peer_timeout);
    for peer in peers {
        let packet = packet(&rd, peer, 77, 0);
        let outcome = rd.handle(peer, &arrival(peer), &packet, Some(b"data"), now);
        let RxOutcome::Deliver(n) = outcome else {
            panic!("the peer is not known: {outcome:?}")
        };
        rd.delivered(peer, n);
        while rd.poll(now).is_some() {}
        let state = &rd.peers[peer];
        let proof = Packet {
            time_echo: state.nonce,
            ..acks(&rd, peer, state.next, &[])
        };
        rd.handle(peer, &arrival(peer), &proof, None, now);
        assert!(rd.peers[peer].is_proven);
    }
    rd
}

/// Sends a datagram of `len` bytes if the windows permit it.
fn send(rd: &mut Reliable, peer: &Peer, tag: Tag, len: usize, now: Duration) -> bool {
    let is_answer = tag & crate::datagram::outgoing::ANSWER != 0;
    let may = rd.may_send(peer, IpFields::default(), len, is_answer, now);
    may && rd
        .push(peer, vec![0; Packet::LEN + len], whole(tag), now)
        .is_some()
}

/// A packet of the peer that acknowledges the packets before `ack`, and those in the runs.
fn acks(rd: &Reliable, peer: &Peer, ack: u64, runs: &[(u64, u64)]) -> Packet {
    let state = &rd.peers[peer];
    Packet {
        token: state.echo,
        echo: state.token,
        seq: 1,
        base: 1,
        ack: Some(ack as u32),
        arrived: runs.iter().map(|(a, b)| (*a as u32, *b as u32)).collect(),
        dst_index: 5,
        src_index: 3,
        window: bounds::DATAGRAM_WINDOW_MAX,
        time: 1,
        ..Packet::default()
    }
}

/// A peer that acknowledges all packets but the first gets no more packets than a receiver accepts ahead of the first one.
#[test]
fn a_missing_packet_bounds_the_packets_under_way() {
    let now = Duration::from_secs(6);
    let mut rd = knows(&[peer()], IDLE, now);
    let first = rd.peers[&peer()].next;
    let mut sent = 0;
    loop {
        let before = sent;
        while sent < 1 << 18 && send(&mut rd, &peer(), sent, 50, now) {
            sent += 1;
        }
        if sent == before {
            break;
        }
        let ack = acks(&rd, &peer(), first, &[(first + 1, first + sent)]);
        rd.handle(&peer(), &arrival(&peer()), &ack, None, now);
        // Lost packets are sent again.
        while rd.poll(now).is_some() {}
    }
    assert_eq!(sent, 1 << 16);
    let ack = acks(&rd, &peer(), first + sent, &[]);
    rd.handle(&peer(), &arrival(&peer()), &ack, None, now);
    assert!(send(&mut rd, &peer(), sent, 50, now));
}

/// Answers use a bounded amount of memory, however many peers do not acknowledge them. A peer of another network still gets answers, and the
/// peers without room are asked again.
#[test]
fn answers_without_acknowledgement_use_bounded_memory() {
    const LEN: usize = 60_000;
    let now = Duration::from_secs(6);
    let mut peers: Vec<Peer> = (0..3000)
        .map(|n| (([10, 0, 0, 1], 1000 + n).into(), 3))
        .collect();
    let other = (([10, 9, 0, 1], 4000).into(), 3);
    peers.push(other);
    let mut rd = knows(&peers, IDLE, now);
    let answer = crate::datagram::outgoing::ANSWER;
    let (other, peers) = (other, &peers[..3000]);
    let mut bytes = 0;
    for peer in peers {
        while send(&mut rd, peer, answer, LEN, now) {
            bytes += LEN;
        }
    }
    assert!(
        bytes <= bounds::RD_ANSWER_BYTES / 3,
        "{bytes} bytes are under way"
    );
    assert!(
        bytes > bounds::RD_ANSWER_BYTES / 4,
        "{bytes} bytes are under way"
    );
    rd.check_accounts();
    assert!(send(&mut rd, &other, answer, LEN, now));
    // The peer without room is asked, and gets its answer when others have acknowledged theirs.
    let last = peers[2999];
    assert!(!send(&mut rd, &last, answer, LEN, now));
    let (later, none) = (now + Duration::from_millis(100), Messages::default());
    rd.handle_timeout(later, None, &none);
    let asked = std::iter::from_fn(|| rd.poll(later)).any(|(to, _, _)| to == last);
    assert!(asked);
    // Requests of this end's program are not limited by the answers.
    assert!(send(&mut rd, &last, 7, LEN, later));
    for peer in peers {
        let ack = acks(&rd, peer, rd.peers[peer].next, &[]);
        rd.handle(peer, &arrival(peer), &ack, None, later);
    }
    rd.check_accounts();
    assert_eq!(
        rd.shares.answers(),
        LEN.next_multiple_of(bounds::RD_ANSWER_UNIT)
    );
    assert!(send(&mut rd, &last, answer, LEN, later));
    rd.abandon(std::iter::empty(), later);
    rd.check_accounts();
    assert_eq!(rd.shares.answers(), 0);
}

/// Lets a peer answer everything for `seconds`, while it acknowledges nothing. Returns the second in which it is given up, and why.
fn lost_after(
    seconds: u64,
    not_ready: fn(u64) -> bool,
    blocked: Option<Duration>,
) -> Option<(u64, Status)> {
    let begin = Duration::from_secs(6);
    let mut rd = knows(&[peer()], Duration::from_secs(1), begin);
    let first = rd.peers[&peer()].next;
    assert!(send(&mut rd, &peer(), 1, 50, begin));
    for tick in 0..seconds * 10 {
        let now = begin + Duration::from_millis(100 * tick);
        rd.handle_timeout(now, blocked, &Messages::default());
        while rd.poll(now).is_some() {}
        while let Some(event) = rd.poll_event() {
            if let Event::Lost(_, why) = event {
                return Some((tick / 10, why));
            }
        }
        let ack = Packet {
            not_ready: not_ready(tick),
            ..acks(&rd, &peer(), first, &[])
        };
        rd.handle(&peer(), &arrival(&peer()), &ack, None, now);
    }
    None
}

/// A peer that answers but acknowledges nothing is given up, unless it lacks a resource: then the limit for that applies.
#[test]
fn a_peer_without_progress_is_given_up() {
    let exceeded = Status::RetryExceeded;
    let (lost, why) = lost_after(30, |_| false, None).unwrap();
    assert!((10..13).contains(&lost), "{lost} s");
    assert_eq!(why, exceeded);
    assert_eq!(lost_after(30, |_| true, None), None);
    let most = Some(Duration::from_secs(3));
    let (lost, why) = lost_after(30, |_| true, most).unwrap();
    assert!((3..6).contains(&lost), "{lost} s");
    assert_eq!(why, Status::RnrRetryExceeded);
    // A peer that now and then takes the report back gets no additional time by that.
    let (lost, _) = lost_after(30, |tick| tick % 7 != 0, most).unwrap();
    assert!((3..6).contains(&lost), "{lost} s");
}

/// A peer to which packets are under way has to prove its address again too. If it returns the number in the packets in time, sending is
/// not interrupted.
#[test]
fn the_proof_of_an_address_ends_while_packets_are_under_way() {
    for honest in [true, false] {
        let begin = Duration::from_secs(6);
        let mut rd = knows(&[peer()], IDLE * 10, begin);
        let mut first = rd.peers[&peer()].next;
        let (mut given, mut got, mut refused) = (0, 0, 0);
        for second in 0..200 {
            let now = begin + Duration::from_secs(second);
            rd.handle_timeout(now, None, &Messages::default());
            let mut time_echo = 1;
            let is_proven = rd.peers[&peer()].is_proven;
            let mut sends = |bytes: &[u8]| {
                time_echo = crate::wire::rd::parse(bytes).unwrap().0.time;
                given += if is_proven { 0 } else { bytes.len() };
            };
            while let Some((_, _, bytes)) = rd.poll(now) {
                sends(&bytes);
            }
            if rd.may_send(&peer(), IpFields::default(), 1000, false, now) {
                let packet = vec![0; Packet::LEN + 1000];
                let (_, bytes) = rd.push(&peer(), packet, whole(second), now).unwrap();
                sends(&bytes);
            } else {
                refused += 1;
            }
            let next = rd.peers[&peer()].next;
            let ack = Packet {
                ack_now: true,
                time_echo: if honest { time_echo } else { 1 },
                ..acks(&rd, &peer(), if honest { next } else { first }, &[])
            };
            if honest {
                first = next;
            }
            rd.handle(&peer(), &arrival(&peer()), &ack, None, now);
            if !rd.peers[&peer()].is_proven {
                got += Packet::LEN + dgram::CRC;
            }
        }
        if honest {
            assert_eq!(refused, 0, "the peer has proved its address in time");
        } else {
            assert!(got > 0 && given <= 3 * got, "{given} bytes for {got}");
        }
    }
}

/// A message that waited for a receive and is then refused does not make other peers wait.
#[test]
fn a_refused_message_does_not_wait_any_more() {
    let mut rd = knows(&[peer()], IDLE, Duration::from_secs(6));
    let seq = rd.peers[&peer()].rx.as_ref().map_or(0, |rx| rx.next());
    rd.mark_blocked(&peer(), seq, b"data", Resource::Receive);
    assert!(rd.is_blocked(&peer(), Resource::Receive));
    let (seq, data) = rd.take_waiting(&peer()).unwrap();
    assert!(rd.refused(&peer(), seq, &data, Status::LocalLength));
    assert!(!rd.is_blocked(&peer(), Resource::Receive));
}

/// If packets are delivered in any order, a packet that waits for a receive goes on waiting while later ones are delivered.
#[test]
fn a_packet_waits_while_later_ones_are_delivered() {
    let now = Duration::from_secs(6);
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, false, IDLE);
    let takes = |rd: &mut Reliable, seq: u32| {
        let packet = Packet {
            ack_now: true,
            ..packet(rd, &peer(), 77, seq)
        };
        match rd.handle(&peer(), &arrival(&peer()), &packet, Some(b"data"), now) {
            RxOutcome::Deliver(seq) => seq,
            RxOutcome::Nothing => panic!("packet {seq} is not delivered"),
        }
    };
    let not_ready = |rd: &mut Reliable| {
        let sent = std::iter::from_fn(|| rd.poll(now)).last();
        sent.is_some_and(|(.., bytes)| crate::wire::rd::parse(&bytes).unwrap().0.not_ready)
    };
    let first = takes(&mut rd, 0);
    rd.delivered(&peer(), first);
    let waits = takes(&mut rd, 1);
    rd.mark_blocked(&peer(), waits, b"data", Resource::Receive);
    assert!(not_ready(&mut rd));
    let later = takes(&mut rd, 2);
    rd.delivered(&peer(), later);
    assert!(not_ready(&mut rd), "packet 1 still waits");
    let (seq, _) = rd.take_waiting(&peer()).unwrap();
    assert_eq!(seq, waits);
    rd.delivered(&peer(), seq);
    assert!(!not_ready(&mut rd));
}
