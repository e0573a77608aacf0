//! A peer that says anything at all: nothing panics, nothing grows, nothing is placed where it may not be.
#![allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests"
)]

use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Tagged, Untagged};
use anywarp_core::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest, Terminate};
use anywarp_core::wire::{Msn, Stag, To};
use anywarp_sim::{
    EndId, Mr, RawId, Request, Rng, Setup, World, access, each_seed, fetch_add, framed, read, send,
    write,
};

/// An end with work of every kind under way, and all kinds of memory.
struct Target {
    w: World,
    end: EndId,
    peer: RawId,
    writable: Mr,
    readable: Mr,
    atomic: Mr,
    closed: Mr,
    source: Mr,
    sink: Mr,
    inbox: Mr,
    sends: u64,
    recvs: u64,
}

fn target(seed: u64) -> Target {
    let mut w = World::new(seed);
    let setup = if w.rng.chance(70) {
        Setup {
            rnr_retry: w.rng.below(8) as u8,
            min_rnr_timer: 1,
            ..Setup::anywarp()
        }
    } else {
        Setup::standard()
    };
    let setup = Setup {
        crc: w.rng.chance(80),
        ird: w.rng.below(5) as u32,
        ord: w.rng.below(5) as u32,
        ..setup
    };
    let initiator = w.rng.chance(50);
    let (end, peer) = w.raw(&setup, initiator);
    let h = w[end].host.clone();
    let secret = h.register(4096, Default::default());
    h.fill(&secret, &[0x5a; 4096]);
    let mut t = Target {
        writable: h.register(20_000, access::WRITE),
        readable: h.register(20_000, access::READ),
        atomic: h.register(64, access::ATOMIC),
        closed: secret,
        source: h.register(20_000, access::LOCAL),
        sink: h.register(20_000, access::LOCAL),
        inbox: h.register(40_000, access::LOCAL),
        sends: 0,
        recvs: 0,
        w,
        end,
        peer,
    };
    for _ in 0..t.w.rng.below(8) {
        t.work();
    }
    t
}

impl Target {
    fn work(&mut self) {
        let remote = anywarp_core::verbs::wr::Remote {
            rkey: Stag(0x700),
            to: To(0x1000),
        };
        let size = *self.w.rng.pick(&[0, 8, 100, 20_000]);
        let end = &mut self.w[self.end];
        let id = self.sends;
        let sge = self.sink.part(0, size);
        let from = self.source.part(0, size);
        let made = match id % 5 {
            0 => end.try_post(read(id, remote).from(&[sge])),
            1 => end.try_post(fetch_add(id, remote, 1).from(&[self.sink.part(0, 8)])),
            2 => end.try_post(write(id, remote).from(&[from])),
            3 => end.try_post(send(id).from(&[from])),
            _ => {
                end.recv(self.recvs, &[self.inbox.all()]);
                self.recvs += 1;
                return;
            }
        };
        if made.is_ok() {
            self.sends += 1;
        }
    }

    /// Afterwards: memory that nobody may write is as it was, and every request completes once.
    fn check(mut self) {
        self.w.run_for(std::time::Duration::from_millis(50));
        let end = self.end;
        assert_eq!(self.w[end].bytes(&self.closed), [0x5a; 4096]);
        assert_eq!(self.w[end].bytes(&self.readable), vec![0; 20_000]);
        assert_eq!(self.w[end].bytes(&self.source), vec![0; 20_000]);
        let all = [
            &self.writable,
            &self.readable,
            &self.atomic,
            &self.closed,
            &self.source,
            &self.sink,
            &self.inbox,
        ];
        self.w[end].check_guards(&all);
        let state = format!("{:?}", self.w[end].conn);
        assert!(state.len() < 1 << 20, "{} bytes of state", state.len());
        self.w[end].conn.set_state(State::Error);
        self.w.run();
        let sends: Vec<_> = self.w[end].completed().iter().map(|c| c.wr_id).collect();
        let recvs: Vec<_> = self.w[end].received().iter().map(|c| c.wr_id).collect();
        assert_eq!(sends, (0..self.sends).collect::<Vec<_>>());
        assert_eq!(recvs, (0..self.recvs).collect::<Vec<_>>());
    }
}

#[test]
fn any_bytes_at_all() {
    each_seed(1500, |seed| {
        let mut t = target(seed);
        let n = t.w.rng.below(3_000);
        let mut bytes = t.w.rng.bytes(n);
        if t.w.rng.chance(50) {
            // Short frames, so that more than one is looked at.
            for at in (0..bytes.len()).step_by(40) {
                bytes[at] = 0;
            }
        }
        let peer = t.peer;
        t.w[peer].sends_bytes(&bytes);
        t.check();
    });
}

/// What a peer keeps count of.
struct Says {
    send_msn: u32,
    read_msn: u32,
    atomic_msn: u32,
    seq: u32,
}

impl Says {
    fn untagged(&self, opcode: Opcode, msn: u32, body: &[u8]) -> Vec<u8> {
        let header = Untagged {
            last: true,
            opcode,
            inv_stag: Stag(0),
            qn: opcode.queue().unwrap_or(0),
            msn: Msn(msn),
            mo: 0,
        };
        [&header.emit()[..], body].concat()
    }

    /// A message that is right, as far as the peer can know.
    fn message(&mut self, t: &Target, rng: &mut Rng) -> Vec<u8> {
        let len = *rng.pick(&[0, 1, 8, 100, 1_000, 19_000]);
        let body = vec![0xee; len];
        let tagged = |opcode, mr: &Mr, at: usize| {
            let header = Tagged {
                last: true,
                opcode,
                stag: mr.stag(),
                to: To(mr.all().addr + at as u64),
            };
            header.emit().to_vec()
        };
        match rng.below(14) {
            0..3 => {
                self.seq += 1;
                [tagged(Opcode::Write, &t.writable, rng.below(2_000)), body].concat()
            }
            3..6 => {
                let opcode = *rng.pick(&[
                    Opcode::Send,
                    Opcode::SendSolicited,
                    Opcode::Send,
                    Opcode::SendInvalidate,
                ]);
                self.send_msn += 1;
                self.seq += 1;
                self.untagged(opcode, self.send_msn - 1, &body)
            }
            6 => {
                self.send_msn += 1;
                self.seq += 1;
                self.untagged(Opcode::Immediate, self.send_msn - 1, &[1; 8])
            }
            7 => {
                let request = ReadRequest {
                    sink_stag: Stag(0x700),
                    sink_to: To(0),
                    size: len as u32,
                    source_stag: t.readable.stag(),
                    source_to: To(t.readable.all().addr),
                };
                self.read_msn += 1;
                self.seq += 1;
                self.untagged(Opcode::ReadRequest, self.read_msn - 1, &request.emit())
            }
            8 => {
                let to = To(t.atomic.all().addr + 8);
                let request = AtomicRequest::fetch_add(1, t.atomic.stag(), to, 5);
                self.read_msn += 1;
                self.seq += 1;
                self.untagged(Opcode::AtomicRequest, self.read_msn - 1, &request.emit())
            }
            9 => [tagged(Opcode::ReadResponse, &t.sink, 0), body].concat(),
            10 => {
                let response = AtomicResponse {
                    id: rng.below(3) as u32,
                    value: 9,
                };
                self.atomic_msn += 1;
                self.untagged(
                    Opcode::AtomicResponse,
                    self.atomic_msn - 1,
                    &response.emit(),
                )
            }
            11 if rng.chance(10) => {
                let terminate = Terminate {
                    layer: 1,
                    etype: 2,
                    code: 2,
                    ddp_len: None,
                    ddp_header: None,
                    read_request: None,
                };
                self.untagged(Opcode::Terminate, 1, &terminate.emit())
            }
            _ => {
                let seq = rng.below(6) as u32;
                let control = match rng.below(9) {
                    0 => Control::Ack { seq },
                    1 => Control::Rnr { seq, timer: 1 },
                    2 => Control::Restart { seq: self.seq },
                    3 => Control::Restart { seq },
                    4 => Control::Nak { seq, status: 10 },
                    5 => Control::SendImmediate { value: [1; 4] },
                    6 => Control::Bye,
                    _ => Control::Ping,
                };
                control.header().emit().to_vec()
            }
        }
    }
}

#[test]
fn messages_that_are_almost_right() {
    let mut alive = 0_u64;
    each_seed(4000, |seed| {
        let mut t = target(seed);
        let mut rng = Rng::new(seed ^ 0xf00d);
        let hello = Control::Hello {
            version: 1,
            features: 0,
        };
        let peer = t.peer;
        if rng.chance(70) {
            t.w[peer].sends(&hello.header().emit());
        }
        let mut says = Says {
            send_msn: 1,
            read_msn: 1,
            atomic_msn: 1,
            seq: 0,
        };
        if rng.chance(10) {
            let end = t.end;
            t.w.pipe_from(end).capacity = 0;
        }
        let wrong = *rng.pick(&[0, 1, 5, 30]);
        for _ in 0..rng.below(40) {
            let mut ulpdu = says.message(&t, &mut rng);
            if rng.chance(wrong) {
                match rng.below(5) {
                    0 => {
                        let at = rng.below(ulpdu.len().min(60));
                        ulpdu[at] ^= 1 << rng.below(8);
                    }
                    1 => {
                        let at = rng.below(ulpdu.len().min(60));
                        ulpdu[at] = rng.next() as u8;
                    }
                    2 => ulpdu.truncate(rng.below(ulpdu.len() + 1)),
                    3 => {
                        let more = rng.below(200);
                        ulpdu.extend(rng.bytes(more));
                    }
                    // A segment that is not the last of its message.
                    _ => ulpdu[0] ^= 0x40,
                }
            }
            let mut frame = framed(&ulpdu);
            if rng.chance(wrong) && rng.chance(20) {
                let at = rng.below(frame.len());
                frame[at] ^= 1 << rng.below(8);
            }
            t.w[peer].sends_bytes(&frame);
            if rng.chance(10) {
                // The same again.
                t.w[peer].sends_bytes(&frame);
            }
            if rng.chance(30) {
                t.work();
            }
            let until = t.w.now() + std::time::Duration::from_millis(1);
            for _ in 0..rng.below(6) {
                t.w.turn(until);
            }
        }
        t.w.run_for(std::time::Duration::from_millis(5));
        alive += u64::from(t.w[t.end].conn.state() == State::Rts);
        if rng.chance(30) {
            t.w[peer].closes();
        }
        t.check();
    });
    // If all of them ended early nothing much was tried.
    assert!(
        std::env::var_os("ANYWARP_SEED").is_some() || alive > 200,
        "{alive}"
    );
}

#[test]
fn a_peer_that_makes_us_say_no_for_ever_gets_no_memory_for_it() {
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
fn two_ends_whose_stream_is_damaged_on_the_way_agree_on_nothing_wrong() {
    // With CRCs on, what arrives is what was sent, or the stream ends.
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
            .heard()
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
