//! Positions of FPDUs in the stream: markers, and the start of TCP segments.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests"
)]

use anywarp_core::llp::mpa::frame::{TxBatch, mulpdu};
use anywarp_sim::{Request, Rng, Setup, World, access, each_seed, fetch_add, read, send, write};

/// RFC 5044 §4.3 [mpa-markers-able]: each end may request markers, and gets them, whether or not the other end
/// requests them.
#[test]
fn each_end_gets_the_markers_that_it_asked_for() {
    for (first_wants, second_wants) in [(true, false), (false, true), (true, true)] {
        each_seed(30, |seed| {
            let of = |sends_markers: bool| {
                let emss = *Rng::new(seed).pick(&[536, 1460, 8960]);
                Setup {
                    markers: sends_markers,
                    mulpdu: mulpdu(emss, sends_markers),
                    ..Setup::standard()
                }
            };
            let mut w = World::new(seed);
            let (here, there) = (w.host(), w.host());
            let (a, b) = w.connect(&here, &of(second_wants), &there, &of(first_wants));
            if first_wants {
                w[a].wants_markers();
            }
            if second_wants {
                w[b].wants_markers();
            }
            let data = w.rng.bytes(60_000);
            let regions: Vec<_> = [a, b]
                .iter()
                .map(|end| {
                    let mine = w[*end].register(60_000, access::ALL);
                    let theirs = w[*end].register(60_000, access::ALL);
                    w[*end].fill(&mine, &data);
                    (mine, theirs)
                })
                .collect();
            for end in [a, b] {
                w[end].recv(9, &[regions[usize::from(end == b)].1.part(50_000, 10_000)]);
            }
            for (end, us, them) in [(a, 0, 1), (b, 1, 0)] {
                let (mine, theirs) = (&regions[us].0, &regions[them].1);
                w[end].post(write(1, theirs.remote(0)).from(&[mine.part(0, 30_000)]));
                w[end].post(
                    read(2, regions[them].0.remote(30_000))
                        .from(&[regions[us].1.part(30_000, 20_000)]),
                );
                w[end].post(send(3).from(&[mine.part(50_000, 10_000)]));
            }
            w.run();
            for (end, us) in [(a, 0), (b, 1)] {
                let statuses: Vec<_> = w[end]
                    .completed()
                    .iter()
                    .map(|c| (c.wr_id, c.status as u8))
                    .collect();
                assert_eq!(statuses, [(1, 0), (2, 0), (3, 0)]);
                assert_eq!(w[end].received().len(), 1);
                assert!(w[end].bytes(&regions[us].1) == data);
            }
        });
    }
}

/// Lengths of the FPDUs in a batch.
fn fpdus(batch: &TxBatch) -> Vec<usize> {
    let mut rest = batch.as_bytes().expect("with CRCs everything is copied");
    let mut lengths = Vec::new();
    while let Some(length) = rest.first_chunk::<2>() {
        let whole = (2 + usize::from(u16::from_be_bytes(*length))).next_multiple_of(4) + 4;
        lengths.push(whole);
        rest = &rest[whole..];
    }
    lengths
}

/// RFC 5044 §5.1 [mpa-emss]: segments that are cut after the change have the new size.
#[test]
fn a_segment_size_that_changes_in_the_middle_of_a_message_is_taken() {
    let setup = Setup {
        mulpdu: mulpdu(1448, false),
        ..Setup::standard()
    };
    let mut w = World::new(1);
    let (end, _peer) = w.raw(&setup, true);
    w.run();
    let mr = w[end].register(600_000, access::ALL);
    w[end].post(send(1).from(&[mr.all()]));
    let now = w.now();
    let mut batch = TxBatch::default();
    w[end].conn.poll_tx(now, false, &mut batch);
    assert!(fpdus(&batch).iter().all(|n| *n == 1448) && batch.len() < 600_000);
    for emss in [536, 8948] {
        batch.clear();
        w[end].conn.set_mulpdu(mulpdu(emss, false));
        w[end].conn.poll_tx(now, false, &mut batch);
        let lengths = fpdus(&batch);
        let (last, full) = lengths.split_last().unwrap();
        assert!(full.iter().all(|n| *n == emss), "{emss}: {lengths:?}");
        assert!(*last <= emss);
    }
}

/// RFC 5044 §5.1 [mpa-align]: a batch for a peer that requires FPDUs at the start of TCP segments ends after each
/// message, so that the socket can end the segment there.
#[test]
fn an_aligned_batch_holds_one_message() {
    let mut w = World::new(1);
    let (end, _peer) = w.raw(&Setup::standard(), true);
    w.run();
    let mr = w[end].register(5_000, access::ALL);
    for id in 0..3 {
        w[end].post(send(id).from(&[mr.all()]));
    }
    let now = w.now();
    let mut batch = TxBatch::default();
    batch.align(true);
    for _ in 0..3 {
        batch.clear();
        w[end].conn.poll_tx(now, false, &mut batch);
        assert_eq!(fpdus(&batch), [1448, 1448, 1448, 752]);
    }
    batch.clear();
    w[end].conn.poll_tx(now, false, &mut batch);
    assert!(batch.is_empty());
}

/// RFC 5041 §4.3 [ddp-msn-modulo]: message sequence numbers wrap, and so do the sequence numbers of two anywarp ends.
#[test]
fn numbers_wrap_without_loss_or_repetition() {
    for setup in [Setup::standard(), Setup::anywarp()] {
        each_seed(20, |seed| {
            let mut w = World::new(seed);
            let (a, b) = w.pair(&setup);
            for end in [a, b] {
                w[end].conn.number_from(0xffff_ffe0);
            }
            let data = w.rng.bytes(8_000);
            let from = w[a].register(8_000, access::ALL);
            let into = w[b].register(8_000, access::ALL);
            let back = w[a].register(8_000, access::ALL);
            w[a].fill(&from, &data);
            for round in 0..80_u64 {
                let at = 100 * round as usize;
                w[b].recv(round, &[into.part(at, 100)]);
                w[a].post(send(round).from(&[from.part(at, 100)]));
                w[a].post(read(1_000 + round, into.remote(at)).from(&[back.part(at, 100)]));
                w[a].post(fetch_add(2_000 + round, into.remote(0), 0).from(&[back.part(0, 8)]));
                if round % 7 == 0 {
                    w.run();
                }
            }
            w.run();
            assert_eq!(
                w[a].completed()
                    .iter()
                    .filter(|c| c.status as u8 == 0)
                    .count(),
                240
            );
            let received: Vec<_> = w[b].received().iter().map(|c| c.wr_id).collect();
            assert_eq!(received, (0..80).collect::<Vec<u64>>());
            assert!(w[b].bytes(&into) == data);
            assert!(w[a].bytes(&back)[8..] == data[8..]);
        });
    }
}
