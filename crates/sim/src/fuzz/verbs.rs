//! An application that makes arbitrary calls on two connected ends.

use std::time::Duration;

use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::qp::{Attr, State, mask};
use anywarp_core::verbs::wr::{Bind, Op, Payload, RecvRequest, Remote, Sge, WorkRequest};
use anywarp_core::wire::{Stag, To};

use crate::{EndId, Mr, Setup, World, access};

use super::input::Input;

const CALLS: usize = 200;

struct Side {
    end: EndId,
    regions: Vec<Mr>,
    gone: Vec<bool>,
    window: Stag,
    sends: u64,
    signaled: Vec<bool>,
    recvs: u64,
}

impl Side {
    fn new(w: &mut World, end: EndId) -> Self {
        let h = w[end].host.clone();
        let regions: Vec<Mr> = [
            (300, access::ALL),
            (9_000, access::ALL),
            (8, access::LOCAL),
            (64, access::ATOMIC),
            (5_000, access::READ),
        ]
        .into_iter()
        .map(|(len, rights)| h.register(len, Access(rights.0 | 0x10)))
        .collect();
        let window = h
            .rnic
            .regions
            .alloc_window(h.pd, true, &mut || h.random())
            .expect("a window");
        Self {
            end,
            gone: vec![false; regions.len()],
            regions,
            window,
            sends: 0,
            signaled: Vec::new(),
            recvs: 0,
        }
    }

    /// An element that usually lies within its region.
    fn sge(&self, input: &mut Input<'_>) -> Sge {
        let mr = &self.regions[input.below(self.regions.len())];
        match input.byte() {
            0..100 => mr.all(),
            100..230 => {
                let at = usize::from(input.u16()) % (mr.len() + 1);
                mr.part(at, usize::from(input.u16()) % (mr.len() - at + 1))
            }
            230..250 => Sge {
                addr: mr.all().addr.wrapping_add(u64::from(input.u16())),
                len: u32::from(input.u16()),
                lkey: Stag(input.near(mr.stag().0)),
            },
            _ => Sge {
                addr: input.u64(),
                len: input.u32(),
                lkey: Stag(input.u32()),
            },
        }
    }

    fn sges(&self, input: &mut Input<'_>) -> Vec<Sge> {
        (0..input.below(5)).map(|_| self.sge(input)).collect()
    }

    /// Memory of this end, as the other end addresses it.
    fn remote(&self, input: &mut Input<'_>) -> Remote {
        let mr = &self.regions[input.below(self.regions.len())];
        Remote {
            rkey: Stag(input.near(mr.stag().0)),
            to: To(match input.byte() {
                0..200 => mr.all().addr,
                200..240 => mr.all().addr.wrapping_add(u64::from(input.u16())),
                _ => input.u64(),
            }),
        }
    }
}

/// Posts requests, binds, deregisters and changes states as the input selects, with steps of the simulation between the calls.
pub fn verbs(data: &[u8]) {
    let mut input = Input::new(data);
    let mut w = World::new(u64::from(input.u16()));
    let choice = input.byte();
    let setup = if choice & 1 == 0 {
        Setup::anywarp()
    } else {
        Setup::standard()
    };
    let setup = Setup {
        crc: choice & 2 == 0,
        sig_all: choice & 4 != 0,
        rnr_retry: choice >> 3 & 7,
        min_rnr_timer: 12,
        ird: 1 + input.below(4) as u32,
        ord: input.below(4) as u32,
        ..setup
    };
    let (a, b) = w.pair(&setup);
    let mut sides = [Side::new(&mut w, a), Side::new(&mut w, b)];
    for _ in 0..CALLS {
        if input.is_done() {
            break;
        }
        let which = input.below(2);
        call(&mut w, &mut sides, which, &mut input);
    }
    w.run_for(Duration::from_millis(30));
    for side in &sides {
        w[side.end].conn.set_state(State::Error);
    }
    w.run();
    for side in sides {
        let end = &mut w[side.end];
        end.check_guards(&side.regions.iter().collect::<Vec<_>>());
        // Requests complete in order and at most once, and all signaled ones complete.
        let sends: Vec<_> = end.completed().iter().map(|c| c.wr_id).collect();
        assert!(sends.is_sorted_by(|a, b| a < b), "{sends:?}");
        for (id, signaled) in side.signaled.iter().enumerate() {
            let id = id as u64;
            assert!(
                !signaled || sends.contains(&id),
                "{id} is missing: {sends:?}"
            );
        }
        assert!(sends.last().is_none_or(|id| *id < side.sends));
        let recvs: Vec<_> = end.received().iter().map(|c| c.wr_id).collect();
        assert_eq!(recvs, (0..side.recvs).collect::<Vec<_>>());
    }
}

fn call(w: &mut World, sides: &mut [Side; 2], which: usize, input: &mut Input<'_>) {
    let end = sides[which].end;
    match input.byte() {
        0..110 => {
            let request = request(sides, which, input);
            let signaled = request.signaled;
            if w[end].try_post(request).is_ok() {
                sides[which].sends += 1;
                sides[which].signaled.push(signaled);
            }
        }
        110..160 => {
            let request = RecvRequest {
                id: sides[which].recvs,
                sges: sides[which].sges(input).into(),
            };
            if w[end].conn.post_recv(request).is_ok() {
                sides[which].recvs += 1;
            }
        }
        160..164 => {
            let at = input.below(sides[which].regions.len());
            if !sides[which].gone[at] {
                let side = &mut sides[which];
                // Deregistration fails if a window is bound to the region.
                let region = &side.regions[at].region;
                side.gone[at] = w[end].host.rnic.regions.deregister(region).is_ok();
            }
        }
        164..168 => {
            let next = input.one_of(&[
                State::Sqd,
                State::Rts,
                State::Rts,
                State::Error,
                State::Init,
            ]);
            let given = mask::STATE | if input.byte() < 200 { 0 } else { input.u32() };
            // If the call is refused, it must not have changed anything.
            let before = w[end].conn.state();
            let refused = w[end]
                .conn
                .modify(given, Some(next), None, &Attr::default())
                .is_err();
            assert!(!refused || w[end].conn.state() == before);
        }
        168..170 if input.byte() < 40 => w.kill(end),
        _ => {
            let until = w.now() + Duration::from_millis(2);
            for _ in 0..input.below(12) {
                w.turn(until);
            }
        }
    }
}

fn request(sides: &[Side; 2], which: usize, input: &mut Input<'_>) -> WorkRequest {
    let (side, peer) = (&sides[which], &sides[1 - which]);
    let remote = peer.remote(input);
    let imm = (input.byte() & 1 == 0).then_some([1, 2, 3, 4]);
    let op = match input.below(12) {
        0 | 1 => Op::Send {
            imm,
            invalidate: None,
        },
        2 => Op::Send {
            imm: None,
            invalidate: Some(if input.byte() < 128 {
                peer.window
            } else {
                remote.rkey
            }),
        },
        3..6 => Op::Write { remote, imm },
        6 | 7 => Op::Read { remote },
        8 => Op::FetchAdd { remote, add: 1 },
        9 => Op::CompareSwap {
            remote,
            compare: input.u64(),
            swap: 7,
        },
        10 => Op::LocalInvalidate {
            stag: if input.byte() < 200 {
                side.window
            } else {
                Stag(input.u32())
            },
        },
        _ => {
            let mr = &side.regions[input.below(side.regions.len())];
            Op::Bind(Bind {
                window: side.window,
                rkey: Stag(side.window.0 & !0xff | u32::from(input.byte())),
                mr: mr.stag(),
                addr: mr.all().addr,
                len: u64::from(input.u16()),
                access: Access(u32::from(input.byte())),
            })
        }
    };
    let payload = if input.byte() < 40 {
        let len = usize::from(input.u16()) % 600;
        Payload::Inline(vec![0x11; len].into())
    } else {
        Payload::Sges(side.sges(input).into())
    };
    let flags = input.byte();
    WorkRequest {
        id: side.sends,
        op,
        payload,
        signaled: flags & 1 == 0,
        solicited: flags & 2 != 0,
        ack_later: false,
        fence: flags & 4 != 0,
        destination: None,
        srq: None,
    }
}
