//! The tour of the data path in ARCHITECTURE.md, compared with a recorded run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::path::Path;

use anywarp_sim::{Log, Request, Setup, World, access, lines, write};

const FROM: &str = "<!-- tour -->";
const TO: &str = "<!-- /tour -->";

/// Returns every step of one RDMA Write of three segments, at both ends.
fn tour() -> String {
    let log = Log::default();
    let mut w = World::new(1);
    let (us, peer) = (
        w.host_with(Some(log.observer())),
        w.host_with(Some(log.observer())),
    );
    let setup = Setup {
        mulpdu: 1500,
        ..Setup::anywarp()
    };
    let (a, b) = w.connect(&us, &setup, &peer, &setup);
    let (from, to) = (
        w[a].register(4000, access::LOCAL),
        w[b].register(4096, access::WRITE),
    );
    // The messages at the start of the stream are not part of the tour.
    w.run();
    log.take();
    w[a].post(write(7, to.remote(0)).from(&[from.all()]));
    w.run();
    let names = BTreeMap::from([(w[a].qpn(), "us"), (w[b].qpn(), "peer")]);
    lines(&log.take(), &names)
}

#[test]
fn the_tour_in_the_architecture_matches_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let section = format!("{FROM}\n```text\n{}```\n{TO}", tour());
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let found = text.find(FROM).zip(text.find(TO));
    let is = found.map(|(from, to)| &text[from..to + TO.len()]);
    if is == Some(section.as_str()) {
        return;
    }
    if std::env::var_os("ANYWARP_BLESS").is_none() {
        panic!("ARCHITECTURE.md has another tour; ANYWARP_BLESS=1 writes this one:\n{section}");
    }
    let new = match found {
        Some((from, to)) => text[..from].to_owned() + &section + &text[to + TO.len()..],
        None => text + "\n## The tour: one RDMA Write\n\n" + &section + "\n",
    };
    std::fs::write(&path, new).unwrap();
}
