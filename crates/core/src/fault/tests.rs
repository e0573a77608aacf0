use std::net::SocketAddr;
use std::time::Duration;

use super::*;
use crate::verbs::wc::Status;
use decide::mix;

/// A plan that is never freed, as in the product. The list keeps it reachable for leak checkers.
fn plan(text: &str) -> &'static Plan {
    static KEPT: std::sync::Mutex<Vec<&'static Plan>> = std::sync::Mutex::new(Vec::new());
    let plan: &'static Plan = Box::leak(Box::new(Plan::parse(text).unwrap()));
    KEPT.lock().unwrap().push(plan);
    plan
}

fn wrong(text: &str) -> (u32, u32, String) {
    let e = Plan::parse(text).unwrap_err();
    (e.line, e.column, e.what)
}

fn peer() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], 4000))
}

#[test]
fn settings_have_units() {
    let plan = plan(
        "loss=0.01,dup=5%, reorder=1 corrupt=0;delay=5ms,jitter=250us,rate=10MB/s,seed=0x7,dir=both,summary=off",
    );
    assert_eq!(plan.seed, 7);
    assert!(!plan.summary);
    let link = &plan.link;
    assert_eq!((link.loss, link.dup), (0.01, 0.05));
    assert_eq!((link.reorder, link.corrupt), (1.0, 0.0));
    assert_eq!(link.delay, Duration::from_millis(5));
    assert_eq!(link.jitter, Duration::from_micros(250));
    assert_eq!((link.rate, link.dir), (Some(10_000_000), None));
    assert_eq!(Plan::parse("").unwrap(), Plan::default());
    assert_eq!(
        Plan::parse("rate=8Mbit/s").unwrap().link.rate,
        Some(1_000_000)
    );
}

#[test]
fn a_file_has_rules_comments_and_settings() {
    let plan = plan(
        "# a comment; loss=2\n\nseed=3\n  qp=#2 peer=10.0.0.2 op=send nth=3 -> error=remote-access\nop=write-record dir=rx every=100 -> drop\npeer=[::1]:5 p=1% times=4 -> delay=1.5s\n-> rnr=7\n",
    );
    assert_eq!(plan.seed, 3);
    let [first, second, third, fourth] = plan.rules.as_slice() else {
        panic!("{:?}", plan.rules)
    };
    assert_eq!(first.line, 4);
    assert_eq!(first.qp, WhichQp::Nth(2));
    assert_eq!(first.peer, Some(([10, 0, 0, 2].into(), None)));
    assert_eq!((first.what, first.nth), (Some(What::Send), Some(3)));
    assert_eq!(first.action, Action::Fail(Status::RemoteAccess));
    assert_eq!((second.dir, second.every), (Some(Direction::Rx), Some(100)));
    assert_eq!(third.peer.unwrap().1, Some(5));
    assert_eq!((third.chance, third.times), (Some(0.01), 4));
    assert_eq!(third.action, Action::Delay(Duration::from_millis(1500)));
    assert_eq!(fourth.action, Action::Rnr(7));
}

#[test]
fn errors_are_reported_with_their_position() {
    for (text, line, column, part) in [
        ("loss=2", 1, 6, "'2' is not a probability"),
        ("loss", 1, 1, "'loss' has no value"),
        (
            "seed=1,los=0.1",
            1,
            8,
            "'los' is not one of the settings: seed, loss",
        ),
        (
            "seed=1\ndelay=5",
            2,
            7,
            "'5' is not a duration: give a number with one of the units us, ms, s",
        ),
        ("delay=61s", 1, 7, "longer than 60s"),
        ("rate=5", 1, 6, "'5' is not a rate"),
        (
            "op=sent -> drop",
            1,
            4,
            "'sent' is not one of the operations: send, write",
        ),
        (
            "op=send -> dropp",
            1,
            12,
            "'dropp' is not one of the actions",
        ),
        ("op=send ->", 1, 11, "the action after '->' is missing"),
        ("op=send -> drop dup", 1, 17, "a rule has only one action"),
        (
            "op=send -> error=bad",
            1,
            18,
            "'bad' is not one of the statuses: local-length",
        ),
        ("op=send nth=0 -> drop", 1, 13, "1 or more"),
        ("op=send n=0 -> drop", 1, 9, "'n' is not one of the matches"),
        ("op=send nth=3", 1, 1, "'op' is only allowed in a rule"),
        ("peer=host -> drop", 1, 6, "'host' is not an address"),
        ("qp=#0 -> drop", 1, 5, "1 or more"),
        ("op=send dir=rx -> kill", 1, 13, "dir=tx"),
        ("loss=é", 1, 6, "'é' is not a probability"),
        ("é=1; loss=7", 1, 1, "'é' is not one of the settings"),
        ("loss=NaN", 1, 6, "not a probability"),
        ("seed=-1", 1, 6, "not a whole number"),
    ] {
        let (at_line, at_column, what) = wrong(text);
        assert!(what.contains(part), "{text}: {what}");
        assert_eq!((at_line, at_column), (line, column), "{text}: {what}");
    }
}

#[test]
fn same_seed_same_faults_and_another_seed_others() {
    let run = |text: &str, nth: u32| {
        let mut decisions = Decisions::new(plan(text), nth, 0x1200);
        (0..2000)
            .map(|_| decisions.datagram(Direction::Tx, peer(), b"x").0)
            .collect::<Vec<_>>()
    };
    let text = "loss=0.05,dup=0.05,corrupt=0.05,reorder=0.05,delay=2ms,jitter=1ms,seed=";
    let first = run(&format!("{text}7"), 1);
    assert_eq!(first, run(&format!("{text}7"), 1));
    assert_ne!(first, run(&format!("{text}8"), 1));
    // The faults of two queue pairs differ.
    assert_ne!(first, run(&format!("{text}7"), 2));
}

#[test]
fn probabilities_are_met() {
    let mut decisions = Decisions::new(plan("loss=0.01,dup=0.1,seed=5"), 1, 0);
    let (mut lost, mut twice, mut both) = (0, 0, 0);
    for _ in 0..100_000 {
        let (decision, _) = decisions.datagram(Direction::Tx, peer(), b"x");
        lost += u32::from(decision.does(Action::Drop));
        twice += u32::from(decision.does(Action::Dup));
        both += u32::from(decision.does(Action::Drop) && decision.does(Action::Dup));
    }
    // The range is four standard deviations.
    assert!((874..=1126).contains(&lost), "{lost}");
    assert!((9620..=10_380).contains(&twice), "{twice}");
    assert!(
        (60..=150).contains(&both),
        "{both}: losses and duplicates are independent"
    );
}

#[test]
fn link_faults_apply_in_their_direction_only() {
    for (text, tx, rx) in [
        ("loss=1", true, false),
        ("loss=1,dir=rx", false, true),
        ("loss=1,dir=both", true, true),
    ] {
        let mut decisions = Decisions::new(plan(text), 1, 0);
        let (sent, _) = decisions.datagram(Direction::Tx, peer(), b"x");
        let (received, _) = decisions.datagram(Direction::Rx, peer(), b"x");
        assert_eq!(
            (sent.does(Action::Drop), received.does(Action::Drop)),
            (tx, rx),
            "{text}"
        );
    }
}

#[test]
fn rules_count_the_items_that_they_match() {
    let mut decisions = Decisions::new(
        plan("op=send nth=2 -> kill\nop=write every=2 times=2 -> error=general\nqp=#9 -> kill"),
        1,
        0x1200,
    );
    let mut ask = |what| decisions.request(what, None, Service::Stream);
    assert!(ask(What::Send).is_nothing());
    assert!(ask(What::Write).is_nothing());
    let decision = ask(What::Send);
    assert!(decision.does(Action::Kill));
    assert_eq!((decision.item, decision.causes[0].line), (3, Some(1)));
    assert!(ask(What::Send).is_nothing());
    let failures: Vec<_> = (0..6)
        .map(|_| ask(What::Write).failure().is_some())
        .collect();
    assert_eq!(failures, [true, false, true, false, false, false]);
}

#[test]
fn a_rule_selects_by_queue_pair_and_peer() {
    let hits = |text: &str, nth, number, peer: Option<&str>| {
        let mut decisions = Decisions::new(plan(text), nth, number);
        let peer = peer.map(|p| p.parse().unwrap());
        !decisions
            .request(What::Send, peer, Service::Stream)
            .is_nothing()
    };
    assert!(hits("qp=#3 -> kill", 3, 0, None));
    assert!(!hits("qp=3 -> kill", 3, 0, None));
    assert!(hits("qp=0x1203 -> kill", 1, 0x1203, None));
    assert!(hits("peer=10.0.0.2 -> kill", 1, 1, Some("10.0.0.2:7")));
    assert!(hits(
        "peer=10.0.0.2 -> kill",
        1,
        1,
        Some("[::ffff:10.0.0.2]:7")
    ));
    assert!(!hits("peer=10.0.0.2:8 -> kill", 1, 1, Some("10.0.0.2:7")));
    assert!(!hits("peer=10.0.0.2 -> kill", 1, 1, None));
}

#[test]
fn delays_apply_to_requests_of_streams_and_to_datagrams_but_losses_only_to_datagrams() {
    let text = "loss=1,delay=5ms,rate=1MB/s\n-> drop\n-> delay=1ms";
    let mut stream = Decisions::new(plan(text), 1, 0);
    let decision = stream.request(What::Send, None, Service::Stream);
    assert!(!decision.does(Action::Drop));
    assert_eq!(decision.delay, Duration::from_millis(6));
    assert_eq!(decision.rate, Some(1_000_000));
    let mut datagrams = Decisions::new(plan(text), 1, 0);
    assert!(
        datagrams
            .request(What::Send, None, Service::Unreliable)
            .is_nothing()
    );
    let (decision, _) = datagrams.datagram(Direction::Tx, peer(), b"x");
    assert!(decision.does(Action::Drop));
    assert_eq!(decision.delay, Duration::from_millis(6));
}

#[test]
fn kill_and_rnr_need_a_reliable_service() {
    for (service, hit) in [
        (Service::Stream, true),
        (Service::Reliable, true),
        (Service::Unreliable, false),
    ] {
        for text in ["kill=1", "-> kill", "-> rnr=3"] {
            let mut decisions = Decisions::new(plan(text), 1, 0);
            let decision = decisions.request(What::Send, None, service);
            assert_eq!(!decision.is_nothing(), hit, "{text} {service:?}");
        }
        let mut decisions = Decisions::new(plan("-> error=general"), 1, 0);
        let decision = decisions.request(What::Send, None, service);
        assert_eq!(decision.failure(), Some(Status::General));
    }
}

#[test]
fn one_bit_is_wrong() {
    let mut decisions = Decisions::new(plan("corrupt=1"), 1, 0);
    for _ in 0..100 {
        let (decision, _) = decisions.datagram(Direction::Tx, peer(), &[0; 9]);
        let mut bytes = [0; 9];
        decision.corrupt(&mut bytes);
        assert_eq!(bytes.iter().map(|b| b.count_ones()).sum::<u32>(), 1);
    }
    Decision::default().corrupt(&mut []);
}

#[test]
fn any_text_is_parsed_or_refused() {
    // The parser neither panics nor hangs on any text.
    let pieces = [
        "loss=", "->", "=", ";", "\n", "#", "qp=#", "1", "é", " ", "drop", "delay=", "9e9", "s",
        ",",
    ];
    for n in 0..20_000_u64 {
        let mut text = String::new();
        for i in 0..6 {
            let at = mix(n * 8 + i) as usize % pieces.len();
            text.push_str(pieces[at]);
        }
        let _ = Plan::parse(&text);
    }
}
