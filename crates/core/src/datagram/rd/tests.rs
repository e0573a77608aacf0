//! Peers, challenges, acknowledgements and bounds.

use super::ack::ACK_MOST;
use super::*;

fn peer() -> Peer {
    (([10, 0, 0, 1], 4000).into(), 3)
}

fn arrival(peer: &Peer) -> Arrival {
    Arrival {
        from: peer.0,
        to: None,
        hop_limit: 0,
        traffic_class: 0,
    }
}

/// A packet of a peer that knows our token.
fn packet(rd: &Reliable, peer: &Peer, token: u32, seq: u32) -> Packet {
    Packet {
        token,
        echo: rd.secret.token(peer),
        seq,
        dst_index: 5,
        src_index: 3,
        time: 1,
        ..Packet::default()
    }
}

/// A packet with data, the next one, is delivered.
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

/// A peer that was forgotten remembers the numbers that it was sent: those to come are beyond them.
/// A challenge that comes once more is no packet: it tells no numbers.
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

/// Each packet says that its sender is there, and how much it takes.
#[test]
fn who_is_heard_is_not_forgotten_and_is_sent_as_much_as_it_takes() {
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

#[test]
fn numbers_go_on_when_a_peer_was_forgotten() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let at = Duration::from_secs;
    assert!(!rd.may_send(&peer(), Way::default(), at(1)));
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
        assert!(rd.may_send(&peer(), Way::default(), at(1)));
        let packet = vec![0; Packet::LEN + 50];
        assert!(rd.push(&peer(), packet, (n, true, true), at(1)).is_some());
    }
    // What is under way is not forgotten.
    rd.forget_idle(at(100));
    assert_eq!(rd.peers(), 1);
    rd.abandon();
    rd.forget_idle(at(30));
    assert_eq!(rd.peers(), 1);
    rd.forget_idle(at(100));
    assert_eq!(rd.peers(), 0);
    rd.may_send(&peer(), Way::default(), at(100));
    assert_eq!(rd.peers[&peer()].next, first + 5);
}

/// One host can have half of all places, the next a third of all; a newcomer finds one. Our own choice is not limited.
#[test]
fn no_host_takes_all_places() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(5);
    let of = |host: u8, n: usize| -> Peer {
        let ip = if host.is_multiple_of(2) {
            IpAddr::from([10, 0, 0, host])
        } else {
            // Another address each time.
            IpAddr::from([0xfd00, 0, 0, host.into(), 0, 0, 0, n as u16 + 1])
        };
        ((ip, (n % 60_000) as u16 + 1).into(), (n / 60_000) as u8)
    };
    let fill = |rd: &mut Reliable, host| {
        (0..bounds::RD_PEERS)
            .take_while(|n| rd.enter(&of(host, *n), Way::default(), true, now))
            .count()
    };
    assert_eq!(fill(&mut rd, 0), bounds::RD_PEERS / 2);
    assert_eq!(fill(&mut rd, 1), bounds::RD_PEERS / 4);
    for host in 2..10 {
        assert!(fill(&mut rd, host) > 0, "host {host}");
    }
    let one_more = of(0, 65_000);
    assert!(!rd.enter(&one_more, Way::default(), true, now));
    assert!(rd.enter(&one_more, Way::default(), false, now));
    // Who is known stays known, and what is forgotten is counted no more.
    assert!(rd.enter(&of(0, 7), Way::default(), true, now));
    rd.forget_idle(now + 2 * IDLE);
    assert_eq!((rd.peers(), rd.hosts.len()), (0, 0));
    assert_eq!(fill(&mut rd, 0), bounds::RD_PEERS / 2);
}

/// Of few packets under way 32 are acknowledged together, of many a quarter, and never more than 128.
#[test]
fn the_more_is_under_way_the_more_is_acknowledged_together() {
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

/// The acknowledgement of a last packet goes at once where little is under way, waits a little for the next packet where
/// there is more, and for the next run where there is much.
#[test]
fn a_last_packet_waits_for_company_as_long_as_some_is_likely() {
    for (seq, least, most) in [(PIPELINE - 1, 0, 0), (PIPELINE, 1, 10), (MANY, 60, 70)] {
        let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
        let now = Duration::from_secs(5);
        // What came before it is acknowledged.
        for before in 0..seq {
            takes(&mut rd, before, false, now);
        }
        if let Some(rx) = rd.receiver(&peer()) {
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

/// Where the round trip is short each half of what is under way asks to be acknowledged, else each 32 packets.
#[test]
fn a_sender_asks_for_as_many_acknowledgements_as_its_path_needs() {
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

/// Packets that wait are bounded, of one peer and of all; what a peer that was made anew had waiting is forgotten, and a
/// token that it had before is nobody's.
#[test]
fn what_waits_is_bounded_and_counted() {
    let mut rd = Reliable::new(Secret::new([1, 2]), 5, true, IDLE);
    let now = Duration::from_secs(5);
    let data = vec![0; 60_000];
    let of = |n: u8| -> Peer { (([10, 0, 0, n], 4000).into(), 3) };
    let comes = |rd: &mut Reliable, who: u8, token: u32, seq: u32| {
        let peer = of(who);
        let packet = Packet {
            base: 100,
            ..packet(rd, &peer, token, seq)
        };
        rd.handle(&peer, &arrival(&peer), &packet, Some(&data), now)
    };
    // The next in order has no receive, and those behind it wait for it.
    for who in 1..=8 {
        let RxOutcome::Deliver(seq) = comes(&mut rd, who, 77, 100) else {
            panic!("not the next")
        };
        rd.mark_blocked(&of(who), seq, &data, Resource::Receive);
        for seq in 101..500 {
            assert_eq!(comes(&mut rd, who, 77, seq), RxOutcome::Nothing);
        }
        let theirs = rd.peers[&of(who)].rx.as_ref().unwrap().waiting();
        assert!(theirs <= bounds::RD_WAITING_PEER, "{theirs}");
        assert!(rd.waiting <= bounds::RD_WAITING, "{}", rd.waiting);
        let each: usize = (1..=who)
            .map(|who| rd.peers[&of(who)].rx.as_ref().unwrap().waiting())
            .sum();
        assert_eq!(rd.waiting, each);
    }
    assert!(rd.waiting > bounds::RD_WAITING - data.len());
    // One that is blocked_on out of order is bounded too.
    let before = rd.waiting;
    rd.mark_blocked(&of(8), 1 << 32 | 499, &data, Resource::Receive);
    assert_eq!(rd.waiting, before);
    for who in 1..=8 {
        assert!(matches!(
            comes(&mut rd, who, 78, 100),
            RxOutcome::Deliver(_)
        ));
    }
    assert_eq!(rd.waiting, 0);
    // Packets of before.
    assert_eq!(comes(&mut rd, 1, 77, 100), RxOutcome::Nothing);
    assert_eq!(rd.peers[&of(1)].echo, 78);
    for seq in 100..500 {
        if let RxOutcome::Deliver(seq) = comes(&mut rd, 1, 78, seq) {
            rd.mark_blocked(&of(1), seq, &data, Resource::Receive);
        }
    }
    let before = rd.waiting;
    assert!(before > bounds::RD_WAITING_PEER - data.len() && before <= bounds::RD_WAITING_PEER);
    rd.mark_blocked(&of(1), 1 << 32 | 600, &data, Resource::Receive);
    assert_eq!(rd.waiting, before);
}

#[test]
fn an_idle_peer_costs_less_than_a_kibibyte() {
    // Its place in the table and one byte beside it, and that of its host; the tables are 7/16 full at least.
    let place = size_of::<(Peer, PeerState)>() + 1 + size_of::<(IpAddr, usize)>() + 1;
    eprintln!("{place} bytes, {} at most", place * 16 / 7);
    assert!(place * 16 / 7 <= 1024, "{place}");
}
