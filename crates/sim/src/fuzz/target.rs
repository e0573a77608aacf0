//! An end with outstanding requests of every kind, all kinds of memory, and a peer that may send anything.

use std::time::Duration;

use anywarp_core::verbs::qp::State;
use anywarp_core::verbs::wr::Remote;
use anywarp_core::wire::{Stag, To};

use crate::end::is_all;
use crate::{EndId, Mr, RawId, Request, Setup, World, access, fetch_add, read, send, write};

use super::input::Input;

/// Largest `Debug` text of an end, in bytes: a limit of the state that a peer can cause.
const STATE_LIMIT: usize = 1 << 20;

pub(super) struct Target {
    pub(super) w: World,
    pub(super) end: EndId,
    pub(super) peer: RawId,
    pub(super) writable: Mr,
    pub(super) readable: Mr,
    pub(super) atomic: Mr,
    /// Memory without remote rights.
    pub(super) closed: Mr,
    pub(super) source: Mr,
    pub(super) sink: Mr,
    pub(super) inbox: Mr,
    pub(super) sends: u64,
    recvs: u64,
    readable_gone: bool,
}

impl Target {
    pub(super) fn new(input: &mut Input<'_>) -> Self {
        let mut w = World::new(u64::from(input.u16()));
        let choice = input.byte();
        let setup = if choice & 3 != 0 {
            Setup {
                rnr_retry: choice >> 2 & 7,
                min_rnr_timer: 12,
                ..Setup::anywarp()
            }
        } else {
            Setup::standard()
        };
        let setup = Setup {
            crc: choice & 0x20 == 0,
            ird: input.below(5) as u32,
            ord: input.below(5) as u32,
            ..setup
        };
        let (end, peer) = w.raw(&setup, choice & 0x40 != 0);
        if choice & 0x80 != 0 && input.byte() < 16 {
            // A peer that never reads.
            w.pipe_from(end).capacity = 0;
        }
        let h = w[end].host.clone();
        let closed = h.register(4096, access::LOCAL);
        h.fill(&closed, &[0x5a; 4096]);
        let mut t = Self {
            writable: h.register(5_000, access::WRITE),
            readable: h.register(5_000, access::READ),
            atomic: h.register(64, access::ATOMIC),
            closed,
            source: h.register(5_000, access::LOCAL),
            sink: h.register(5_000, access::LOCAL),
            inbox: h.register(6_000, access::LOCAL),
            sends: 0,
            recvs: 0,
            readable_gone: false,
            w,
            end,
            peer,
        };
        for _ in 0..input.below(8) {
            t.work(input);
        }
        t
    }

    /// Posts a request of the application.
    pub(super) fn work(&mut self, input: &mut Input<'_>) {
        let remote = Remote {
            rkey: Stag(0x700),
            to: To(0x1000),
        };
        let size = input.one_of(&[0, 8, 100, 5_000]);
        let id = self.sends;
        let sink = self.sink.part(0, size);
        let source = self.source.part(0, size);
        let word = self.sink.part(0, 8);
        let end = &mut self.w[self.end];
        let posted = match input.below(5) {
            0 => end.try_post(read(id, remote).from(&[sink])),
            1 => end.try_post(fetch_add(id, remote, 1).from(&[word])),
            2 => end.try_post(write(id, remote).from(&[source])),
            3 => end.try_post(send(id).from(&[source])),
            _ => {
                if self.recvs < 400 {
                    end.recv(self.recvs, &[self.inbox.all()]);
                    self.recvs += 1;
                }
                return;
            }
        };
        if posted.is_ok() {
            self.sends += 1;
        }
    }

    /// Deregisters memory that the peer may be reading.
    pub(super) fn deregister(&mut self) {
        if !self.readable_gone {
            self.readable_gone = true;
            self.w[self.end].host.deregister(&self.readable);
        }
    }

    pub(super) fn turns(&mut self, n: usize) {
        let until = self.w.now() + Duration::from_millis(1);
        for _ in 0..n {
            if !self.w.turn(until) {
                break;
            }
        }
    }

    /// Whether the connection still works.
    pub(super) fn is_alive(&self) -> bool {
        self.w[self.end].conn.state() == State::Rts
    }

    /// Checks at the end that memory that nothing writes (`closed`, `readable` and `source`) is unchanged, and that every request
    /// completed once.
    pub(super) fn check(mut self) {
        self.w.run_for(Duration::from_millis(20));
        let end = self.end;
        assert_eq!(self.w[end].bytes(&self.closed), [0x5a; 4096]);
        assert!(is_all(&self.w[end].bytes(&self.readable), 0));
        assert!(is_all(&self.w[end].bytes(&self.source), 0));
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
        let state = format!("{:?}", self.w[end].conn).len();
        assert!(state < STATE_LIMIT, "{state} bytes of state");
        self.w[end].conn.set_state(State::Error);
        self.w.run();
        let sends: Vec<_> = self.w[end].completed().iter().map(|c| c.wr_id).collect();
        let recvs: Vec<_> = self.w[end].received().iter().map(|c| c.wr_id).collect();
        assert_eq!(sends, (0..self.sends).collect::<Vec<_>>());
        assert_eq!(recvs, (0..self.recvs).collect::<Vec<_>>());
    }
}
