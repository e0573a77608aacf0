//! Receives one FPDU after the other, for callgrind: `cargo lab count`.
//!
//! `counted`, with all that it calls, handles one FPDU from the stream to its completion, including the copy into
//! memory. The argument is the kind of FPDU. The output is the number of FPDUs that were counted.
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a tool that stops at the first error"
)]

use anywarp_core::wire::ddp::{Tagged, Untagged};
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Msn, QN_SEND, Stag};
use anywarp_sim::{End, Request, Setup, World, access, framed, write};

/// FPDUs that are counted.
const TIMES: u32 = 200;

/// FPDUs that are received before counting begins.
const WARMUP: u32 = 50;

/// The name is used in the callgrind options.
#[inline(never)]
fn counted(end: &mut End, now: std::time::Instant, fpdu: &[u8]) -> usize {
    end.conn.handle_rx(now, std::hint::black_box(fpdu))
}

/// Receives FPDUs before counting begins. It differs from [`counted`], so that the compiler does not merge the two.
#[inline(never)]
fn warmed_up(end: &mut End, now: std::time::Instant, fpdu: &[u8]) -> usize {
    end.conn.handle_rx(now, std::hint::black_box(fpdu)) + std::hint::black_box(0)
}

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    let mut w = World::new(1);
    let (end, peer) = w.raw(&Setup::standard(), true);
    let target = w[end].register(1024, access::ALL);
    let source = w[end].register(1024, access::ALL);
    // An initiator sends first.
    w[end].post(write(1, target.remote(0)).from(&[source.part(0, 8)]));
    w.run();
    assert!(
        !w[peer].received().is_empty() && w[end].completed().len() == 1,
        "the first message has not been exchanged"
    );

    let (send, len) = match what.as_str() {
        "send/64" => (true, 64),
        "write/64" => (false, 64),
        "write/1024" => (false, 1024),
        other => panic!("{other} is not send/64, write/64 or write/1024"),
    };
    let now = w.now();
    for number in 1..=WARMUP + TIMES {
        let payload: Vec<u8> = (0..len).map(|i| (i as u32 + number) as u8).collect();
        let ulpdu = if send {
            let header = Untagged {
                last: true,
                opcode: Opcode::Send,
                inv_stag: Stag(0),
                qn: QN_SEND,
                msn: Msn(number),
                mo: 0,
            };
            w[end].recv(u64::from(number), &[target.part(0, len)]);
            [&header.emit()[..], &payload].concat()
        } else {
            let header = Tagged {
                last: true,
                opcode: Opcode::Write,
                stag: target.stag(),
                to: target.remote(0).to,
            };
            [&header.emit()[..], &payload].concat()
        };
        let fpdu = framed(&ulpdu);
        let used = if number > WARMUP {
            counted(&mut w[end], now, &fpdu)
        } else {
            warmed_up(&mut w[end], now, &fpdu)
        };
        assert_eq!(used, fpdu.len(), "a part of the FPDU is left");
        assert_eq!(
            w[end].received().len(),
            usize::from(send),
            "the message has not completed"
        );
        assert!(
            w[end].bytes(&target).starts_with(&payload),
            "the payload is not in memory"
        );
    }
    println!("{TIMES}");
}
