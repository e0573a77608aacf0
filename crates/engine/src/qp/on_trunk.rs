//! Moves the stream of a queue pair to a trunk, a TCP connection that many queue pairs share, and receives from it.

use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::bounds;
use anywarp_core::wire::control::Handover;

use super::progress::CLOSE_TIMEOUT;
use super::timers::Timer;
use super::{Inner, RcQp, Receive};
use crate::clock;
use crate::connect::trunks::{self, Waiting};
use crate::log;
use crate::net::tcp::Outcome;
use crate::net::trunk::{Member, Process, Trunk};
use crate::sys::thread::Uncancelled;

impl RcQp {
    fn as_member(&self) -> Weak<dyn Member> {
        self.me.clone()
    }

    /// Whether this queue pair may share a connection with others. It may not if it has a traffic class, because the packets of a
    /// trunk have none. Queue pairs also gain nothing from sharing if several threads poll: on connections of their own, their system calls run at
    /// the same time.
    fn may_share(&self, inner: &Inner, now: Instant) -> bool {
        let are_apart = !trunks::are_eager() && self.engine.has_several_pollers(now);
        inner.traffic_class == 0 && !are_apart
    }

    /// Offers the peer a trunk, if this process has enough connections, and this one would gain from it.
    pub(super) fn offer_trunk(&self, inner: &mut Inner, now: Instant) {
        let offer = trunks::to_offer().filter(|_| self.may_share(inner, now));
        match (offer, &mut inner.tcp) {
            (Some(offer), Some(tcp))
                if trunks::are_eager() || tcp.would_gain_on_trunk(&inner.conn) =>
            {
                tcp.offer_trunk(&mut inner.conn, offer, self.as_member());
            }
            _ => inner.conn.postpone_trunk(),
        }
    }

    /// Handles what [`Tcp::has_trunk_event`](crate::net::tcp::Tcp::has_trunk_event) reports. Returns whether the stream has ended.
    #[cold]
    pub(super) fn handle_trunk_event(&self, inner: &mut Inner, now: Instant) -> Outcome {
        // Opening a connection has cancellation points, at which the program's thread, which polls, must not be cancelled.
        let _inside = Uncancelled::new();
        if !self.handle_trunk_message(inner, now) {
            return Outcome::Broken(libc::EPROTO);
        }
        self.check_own_connection(inner, now);
        match &inner.tcp {
            Some(tcp) if tcp.has_ended_on_trunk() => Outcome::Eof,
            _ => Outcome::Open,
        }
    }

    /// Handles a message of the peer about a trunk. Returns false if the peer has broken a rule.
    fn handle_trunk_message(&self, inner: &mut Inner, now: Instant) -> bool {
        let Some(tcp) = &mut inner.tcp else {
            return true;
        };
        match tcp.take_trunk_message() {
            Some(Handover::OfferTrunk {
                process,
                port,
                channel,
            }) => {
                let Some((process, local)) = tcp.trunk_offered(process, port, channel) else {
                    return true;
                };
                if !self.may_share(inner, now) {
                    self.take_trunk(inner, None);
                    return true;
                }
                let waiting: Weak<dyn Waiting> = self.me.clone();
                if let Some(trunk) = trunks::seek(self.engine, local, process, waiting) {
                    self.take_trunk(inner, Some(&trunk));
                }
                true
            }
            Some(Handover::TakeTrunk { trunk, channel }) => {
                let found = tcp.peer_ip().and_then(|peer| trunks::find(peer, trunk));
                let kept = tcp.trunk_taken(&mut inner.conn, found, (trunk, channel), now);
                tcp.set_trunk_timeout(inner.conn.silence_limit());
                kept
            }
            _ => true,
        }
    }

    fn take_trunk(&self, inner: &mut Inner, trunk: Option<&Arc<Trunk>>) {
        if trunk.is_some() {
            log!(Info, "qp 0x{:06x}: moves to a trunk", self.common.number);
        }
        if let Some(tcp) = &mut inner.tcp {
            tcp.take_trunk(&mut inner.conn, trunk, self.as_member());
            tcp.set_trunk_timeout(inner.conn.silence_limit());
        }
    }

    /// Called before the stream is closed: receives what has arrived on the trunk. The lock of the queue pair must not be held.
    pub(super) fn receive_from_trunk(&self, now: Instant) {
        let trunk = self.lock().tcp.as_ref().and_then(|tcp| tcp.trunk());
        if let Some(trunk) = trunk {
            trunk.receive(now);
        }
    }

    /// If the peer has closed the queue pair's own TCP connection, starts the timer within which the peer must leave the trunk.
    fn check_own_connection(&self, inner: &mut Inner, now: Instant) {
        let Some(tcp) = inner.tcp.as_ref().filter(|tcp| tcp.awaits_end()) else {
            return;
        };
        if inner.timers.get(Timer::OwnClosed).is_none() {
            self.engine.disarm(inner.token, tcp.fd().get());
            self.start_timer(inner, Timer::OwnClosed, now + CLOSE_TIMEOUT);
        }
    }

    /// Handles the end of a stream on the trunk.
    fn end_on_trunk(&self, inner: &mut Inner, outcome: Outcome) {
        self.note_end(inner, outcome);
        self.deliver_events(inner, outcome);
    }
}

impl Member for RcQp {
    fn receive_frame(&self, trunk: &Arc<Trunk>, channel: u32, bytes: &[u8], now: Instant) -> bool {
        self.with(|inner| {
            let awaited = inner.conn.has_outstanding();
            let Some(tcp) = &mut inner.tcp else {
                return false;
            };
            if !tcp.receive_frame(&mut inner.conn, (trunk, channel), bytes, now) {
                self.end_on_trunk(inner, Outcome::Broken(libc::EPROTO));
                return false;
            }
            let flush = self.common.context.is_polled()
                && inner.conn.owes_ack_of_write(bounds::ACK_AT_ONCE);
            let is_idle = tcp.is_drained() && inner.conn.is_quiet() && !inner.conn.must_ack();
            if is_idle && !flush {
                self.schedule(inner);
            } else {
                self.progress(inner, now, Receive::Nothing, flush);
            }
            awaited && !inner.conn.has_outstanding()
        })
    }

    fn receive_end(&self, trunk: &Arc<Trunk>, channel: u32, now: Instant) {
        self.with(|inner| {
            let Some(tcp) = &mut inner.tcp else { return };
            tcp.receive_end((trunk, channel));
            self.progress(inner, now, Receive::Nothing, false);
        });
    }

    fn trunk_has_room(&self, now: Instant) {
        self.with(|inner| self.progress(inner, now, Receive::Nothing, true));
    }

    fn trunk_lost(&self, channel: u32, outcome: Outcome, all_taken: bool, _now: Instant) {
        self.with(|inner| {
            let Some(tcp) = &mut inner.tcp else { return };
            if tcp.trunk_lost(&inner.conn, channel, outcome, all_taken) {
                self.end_on_trunk(inner, outcome);
            }
        });
    }
}

impl Waiting for RcQp {
    fn trunk_opened(&self, process: &Process, trunk: &Arc<Trunk>) {
        let now = clock::now();
        self.with(|inner| {
            // The queue pair may have been connected to another peer meanwhile.
            let offered_by = inner.tcp.as_ref().and_then(|tcp| tcp.trunk_offered_by());
            if offered_by != Some(*process) {
                return;
            }
            let may_share = self.may_share(inner, now);
            self.take_trunk(inner, may_share.then_some(trunk));
            self.progress(inner, now, Receive::Nothing, false);
        });
    }
}
