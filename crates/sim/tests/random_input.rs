//! A peer that sends random bytes causes no panic, no growth of memory, and no placement outside the allowed memory.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::Msn;
use anywarp_core::wire::Stag;
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::Untagged;
use anywarp_core::wire::rdmap::Opcode;
use anywarp_sim::{Request, Rng, Setup, World, access, each_seed, framed, fuzz, send, write};

/// Random bytes as input for one of the fuzzer's targets.
fn random(seed: u64, most: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed ^ 0xf00d);
    rng.next();
    let n = rng.below(most);
    rng.bytes(n)
}

#[test]
fn any_bytes() {
    each_seed(1500, |seed| {
        let mut bytes = random(seed, 3_000);
        if seed % 2 == 0 {
            // Short frames, so that more than one of them is parsed.
            for at in (20..bytes.len()).step_by(40) {
                bytes[at] = 0;
            }
        }
        fuzz::stream(&bytes);
    });
}

#[test]
fn slightly_wrong_messages() {
    let mut alive = 0_u64;
    each_seed(4000, |seed| {
        alive += u64::from(fuzz::converse(&random(seed, 600)));
    });
    // If all conversations ended early, not much was tested.
    assert!(
        std::env::var_os("ANYWARP_SEED").is_some() || alive > 200,
        "{alive}"
    );
}

#[test]
fn any_start_up() {
    each_seed(3000, |seed| fuzz::startup(&random(seed, 700)));
}

#[test]
fn any_datagrams() {
    each_seed(1000, |seed| fuzz::datagrams(&random(seed, 2_000)));
}

#[test]
fn any_calls() {
    each_seed(500, |seed| fuzz::verbs(&random(seed, 2_000)));
}

#[test]
fn a_peer_that_causes_endless_refusals_uses_no_memory() {
    let mut w = World::new(1);
    let (end, peer) = w.raw(&Setup::anywarp(), false);
    w.pipe_from(end).capacity = 0;
    let hello = Control::Hello {
        version: 1,
        features: 0,
    };
    w[peer].sends(&hello.header().emit());
    let send = Untagged {
        last: true,
        opcode: Opcode::Send,
        inv_stag: Stag(0),
        qn: 0,
        msn: Msn(1),
        mo: 0,
    };
    for _ in 0..5_000 {
        w[peer].sends(&send.emit());
        w[peer].sends(&Control::Restart { seq: 1 }.header().emit());
    }
    w.run();
    let state = format!("{:?}", w[end].conn);
    assert!(state.len() < 100_000, "{} bytes of state", state.len());
    assert_eq!(w[end].conn.state(), State::Error);
}

#[test]
fn a_damaged_stream_delivers_no_wrong_data() {
    // With CRCs, the received data is what was sent, or the stream ends.
    each_seed(300, |seed| {
        let mut w = World::new(seed);
        let (end, peer) = w.raw(&Setup::anywarp(), false);
        let (other, ear) = w.raw(&Setup::anywarp(), true);
        let from = w[other].register(70_000, access::LOCAL);
        let to = w[end].register(70_000, access::WRITE);
        let data = w.rng.bytes(70_000);
        w[other].fill(&from, &data);
        w[end].recv(1, &[to.all()]);
        w[other].post(write(1, to.remote(0)).from(&[from.part(0, 30_000)]));
        w[other].post(send(2).from(&[from.all()]));
        w.run();
        let mut stream: Vec<u8> = w[ear]
            .received()
            .iter()
            .flat_map(|f| framed(&f.ulpdu))
            .collect();
        let bit = w.rng.below(stream.len() * 8);
        stream[bit / 8] ^= 1 << (bit % 8);
        stream.extend([0; 66_000]);
        w[peer].sends_bytes(&stream);
        w[peer].closes();
        w.run();
        for c in w[end].received() {
            if c.status == Status::Success {
                assert!(w[end].bytes(&to) == data);
            }
        }
        assert_eq!(w[end].conn.state(), State::Error, "bit {bit}");
    });
}
