//! The stream of a queue pair on a trunk ([`crate::net::trunk`]), and its hand-over from the queue pair's own connection.
//!
//! The queue pair's own connection (below: the *own connection*) stays open and carries nothing more. When the peer
//! closes it, the stream still ends only with the frame that the peer sends last on the trunk, because that may arrive later.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::connection::{Connection, End};
use anywarp_core::wire::control::Handover;
use anywarp_core::wire::trunk::Kind;
use rustix::io::Errno;

use super::Tcp;
use super::seat::Seat;
use crate::engine::Engine;
use crate::net::outcome::Outcome;
use crate::net::socket;
use crate::net::trunk::{self, Member, Process, Trunk};
use crate::sys::Io;

/// If a system call sends or receives this number of requests, or bytes, on average, the stream stays on its own connection.
const REQUESTS_PER_CALL: u64 = 4;
const BYTES_PER_CALL: u64 = 16 << 10;

impl Tcp {
    // ------------------------------------------------------------------ hand-over

    /// Whether a trunk would save system calls. It would not if each call on the own connection already sends or receives many requests or
    /// bytes.
    pub(crate) fn would_gain_on_trunk(&self, conn: &Connection) -> bool {
        let calls = self.counts.tx_calls + self.counts.rx_calls;
        let bytes = self.counts.tx_bytes + self.counts.rx_bytes;
        u64::from(conn.requests()) < REQUESTS_PER_CALL * calls && bytes < BYTES_PER_CALL * calls
    }

    /// Offers the peer a trunk, which this process accepts at `port`. `process`: the number of this process.
    pub(crate) fn offer_trunk(
        &mut self,
        conn: &mut Connection,
        (process, port): (u32, u16),
        member: Weak<dyn Member>,
    ) {
        let Some(peer) = self.peer_ip() else {
            return conn.postpone_trunk();
        };
        let channel = trunk::offer(member, peer);
        self.seat = Some(Box::new(Seat::new(Some(channel), None)));
        conn.send_handover(Handover::OfferTrunk {
            process,
            port,
            channel,
        });
    }

    /// Takes the peer's message about a trunk, if one waits to be handled.
    pub(crate) fn take_trunk_message(&mut self) -> Option<Handover> {
        self.trunk_message.take()
    }

    /// Records that the peer's process with the number `token` has offered a trunk. Returns that process, and the local address.
    pub(crate) fn trunk_offered(
        &mut self,
        token: u32,
        port: u16,
        channel: u32,
    ) -> Option<(Process, SocketAddr)> {
        let mut seat = Seat::new(None, Some(channel));
        let (mut local, mut address) =
            (socket::local_addr(&self.fd)?, socket::peer_addr(&self.fd)?);
        local.set_port(0);
        address.set_port(port);
        let process = Process {
            local: local.ip(),
            address,
            token,
        };
        seat.offered_by = Some(process);
        self.seat = Some(Box::new(seat));
        Some((process, local))
    }

    /// The process whose offer waits for an answer.
    pub(crate) fn trunk_offered_by(&self) -> Option<Process> {
        let seat = self.seat.as_ref()?;
        seat.offered_by.filter(|_| seat.own.is_none())
    }

    /// Accepts the peer's offer by joining `trunk`, or refuses it if `trunk` is `None` or has ended.
    pub(crate) fn take_trunk(
        &mut self,
        conn: &mut Connection,
        trunk: Option<&Arc<Trunk>>,
        member: Weak<dyn Member>,
    ) {
        let Some(seat) = self
            .seat
            .as_mut()
            .filter(|s| s.trunk.is_none() && s.own.is_none())
        else {
            return;
        };
        let joined = trunk.and_then(|trunk| Some((trunk, trunk.join(member)?)));
        let Some((trunk, channel)) = joined else {
            self.seat = None;
            conn.send_handover(Handover::Refuse);
            return;
        };
        seat.own = Some(channel);
        seat.trunk = Some(Arc::clone(trunk));
        conn.send_handover(Handover::TakeTrunk {
            trunk: trunk.name(),
            channel,
        });
    }

    /// The peer's address.
    pub(crate) fn peer_ip(&self) -> Option<IpAddr> {
        socket::peer_addr(&self.fd).map(|peer| peer.ip())
    }

    /// Handles that the peer has accepted the offer: its next bytes arrive on the trunk that the peer calls `name`. `trunk`: that trunk, or `None` if
    /// it has ended. Returns false if the peer has broken a rule.
    pub(crate) fn trunk_taken(
        &mut self,
        conn: &mut Connection,
        trunk: Option<Arc<Trunk>>,
        (name, channel): (u32, u32),
        now: Instant,
    ) -> bool {
        let Some(seat) = &mut self.seat else {
            return false;
        };
        if !self.rest.is_empty() {
            // The peer has sent more after its last message on the own connection.
            return false;
        }
        conn.resume_rx();
        let joined = trunk.filter(|trunk| seat.own.is_some_and(|own| trunk.join_offered(own)));
        let has_ended = joined.is_none();
        // The trunk may have ended because the peer's process has ended after its last messages, which were kept as early bytes.
        let known = seat.early_from.clone();
        let joined = joined.or_else(|| known.filter(|trunk| trunk.name_at_peer() == name));
        let Some(trunk) = joined else {
            self.seat = None;
            self.may_lack_last = true;
            conn.send_handover(Handover::Refuse);
            return true;
        };
        seat.peer = Some(channel);
        seat.rx = true;
        seat.trunk = Some(trunk);
        if !has_ended {
            conn.send_handover(Handover::Switch);
        }
        if !self.handle_early(conn, now) {
            return false;
        }
        if has_ended && let Some(seat) = &mut self.seat {
            seat.ended.get_or_insert(false);
        }
        true
    }

    /// Handles the peer's Switch: both directions use the trunk. Returns false if the peer has broken a rule.
    pub(super) fn trunk_switched(
        &mut self,
        conn: &mut Connection,
        behind: usize,
        now: Instant,
    ) -> bool {
        let Some(seat) = &mut self.seat else {
            return false;
        };
        let (Some(trunk), Some(peer), true) = (&seat.trunk, seat.peer, seat.tx) else {
            return false;
        };
        if behind > 0 || seat.gone {
            return false;
        }
        seat.rx = true;
        seat.confirmed = true;
        conn.resume_rx();
        conn.resume_tx();
        // The first frame tells the peer that it may send.
        trunk.send_frame(peer, Kind::Data);
        trunk.flush();
        self.handle_early(conn, now)
    }

    /// Handles that the peer has refused the trunk.
    pub(super) fn trunk_refused(&mut self, conn: &mut Connection) {
        if self.seat.take().is_some() {
            conn.resume_tx();
            // The stream may have waited for room on the trunk.
            self.blocked = false;
        }
    }

    /// Called when the last message of this end on its own connection is sent.
    pub(super) fn switch_tx_to_trunk(&mut self, conn: &mut Connection) {
        if let Some(seat) = &mut self.seat {
            seat.tx = true;
            conn.switch_tx_to_trunk();
        }
    }

    // ------------------------------------------------------------------ frames

    /// Handles bytes of the stream that have arrived on the trunk. Returns false if the peer has broken a rule.
    pub(crate) fn receive_frame(
        &mut self,
        conn: &mut Connection,
        from: (&Arc<Trunk>, u32),
        bytes: &[u8],
        now: Instant,
    ) -> bool {
        let Some(seat) = self.seat.as_mut().filter(|s| s.own == Some(from.1)) else {
            return true;
        };
        if !seat.rx {
            seat.keep_early(from.0, bytes);
            return true;
        }
        if !seat.is_on(from.0) {
            return true;
        }
        if seat.tx && !seat.confirmed {
            seat.confirmed = true;
            conn.resume_tx();
        }
        self.handle_bytes(conn, bytes, now);
        true
    }

    fn handle_bytes(&mut self, conn: &mut Connection, bytes: &[u8], now: Instant) {
        self.counts.rx_bytes += bytes.len() as u64;
        if self.rest.is_empty() {
            let used = conn.handle_rx(now, bytes);
            if let Some(rest) = bytes.get(used..).filter(|rest| !rest.is_empty()) {
                self.rest.extend_from_slice(rest);
            }
        } else {
            self.rest.extend_from_slice(bytes);
            let used = conn.handle_rx(now, &self.rest).min(self.rest.len());
            self.rest.drain(..used);
        }
    }

    /// Handles what has arrived before this end had read the peer's last message on the own connection. Returns false if the peer has broken
    /// a rule.
    fn handle_early(&mut self, conn: &mut Connection, now: Instant) -> bool {
        let Some(seat) = &mut self.seat else {
            return true;
        };
        let (bytes, ended) = (std::mem::take(&mut seat.early), seat.early_end);
        let from = seat.early_from.take();
        if !from.is_some_and(|from| seat.is_on(&from)) {
            return true;
        }
        if seat.early_overflow {
            return false;
        }
        if !bytes.is_empty() {
            self.handle_bytes(conn, &bytes, now);
        }
        if ended && let Some(seat) = &mut self.seat {
            seat.ended.get_or_insert(false);
        }
        true
    }

    /// Handles that the peer has left the trunk. A peer that leaves has acknowledged what it has executed, so requests without an
    /// acknowledgement do not count as received by the peer.
    pub(crate) fn receive_end(&mut self, from: (&Arc<Trunk>, u32)) {
        let Some(seat) = self.seat.as_mut().filter(|s| s.own == Some(from.1)) else {
            return;
        };
        if !seat.rx {
            if seat.may_keep_early(from.0) {
                seat.early_end = true;
            }
        } else if seat.is_on(from.0) {
            seat.ended = Some(false);
        }
    }

    /// Handles that the trunk has ended. Returns whether the stream has ended too. If the peer has not answered yet, the stream is still on the
    /// own connection: the peer will refuse the trunk.
    pub(crate) fn trunk_lost(
        &mut self,
        conn: &Connection,
        channel: u32,
        outcome: Outcome,
        all_taken: bool,
    ) -> bool {
        let Some(seat) = self.seat.as_mut().filter(|s| s.own == Some(channel)) else {
            return false;
        };
        let goes_on = conn.end() == End::Open && outcome != Outcome::Broken(libc::ETIMEDOUT);
        if !seat.rx && goes_on {
            // A peer whose End frame has arrived early has answered before it left, so it will not refuse the trunk.
            seat.gone = !seat.early_end;
            return false;
        }
        seat.ended = Some(seat.confirmed && all_taken);
        true
    }

    /// Whether a peer that has closed the own connection still sends on the trunk, so that its last messages may be under way. `most`: how often
    /// the answer may be yes.
    pub(crate) fn may_end_later(&mut self, most: u32) -> bool {
        let Some(seat) = &mut self.seat else {
            return false;
        };
        let received = seat.trunk.as_ref().map_or(0, |trunk| trunk.received());
        let (before, times) = seat.checked;
        seat.checked = (received, times + 1);
        received != before && times < most
    }

    /// Whether there is a message of the peer about a trunk, or the stream on the trunk is ending.
    #[inline]
    pub(crate) fn has_trunk_event(&self) -> bool {
        self.trunk_message.is_some()
            || self.has_ended_on_trunk()
            || self.seat.as_ref().is_some_and(|seat| seat.closed)
    }

    /// Whether the stream on the trunk has ended.
    #[inline]
    pub(crate) fn has_ended_on_trunk(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.ended.is_some())
    }

    /// Sets how long TCP waits for the peer's host to acknowledge data on the trunk.
    pub(crate) fn set_trunk_timeout(&self, limit: Option<Duration>) {
        if let Some(seat) = &self.seat
            && let (Some(trunk), Some(own)) = (&seat.trunk, seat.own)
        {
            trunk.allow_silence(own, limit);
        }
    }

    /// Whether the peer has received all bytes, after the stream has ended. `None` if it is not on a trunk.
    pub(super) fn all_taken_on_trunk(&self) -> Option<bool> {
        let seat = self.seat.as_ref().filter(|seat| seat.tx || seat.rx)?;
        Some(seat.ended == Some(true))
    }

    /// Bytes that the peer's host has acknowledged on the trunk. `None` if the stream is not on a trunk.
    pub(super) fn taken_on_trunk(&self) -> Option<u64> {
        let seat = self.seat.as_ref().filter(|seat| seat.tx)?;
        Some(seat.trunk.as_ref()?.taken_by_peer())
    }

    /// Whether this end moves to a trunk and does not send on it yet.
    #[inline]
    pub(super) fn is_moving_to_trunk(&self) -> bool {
        let seat = self.seat.as_ref();
        seat.is_some_and(|seat| seat.trunk.is_some() && !seat.tx)
    }

    /// The number of this queue pair on the trunk, for the fuzzer.
    #[cfg(any(test, fuzzing))]
    pub(in crate::net) fn own_channel(&self) -> Option<u32> {
        self.seat.as_ref()?.own
    }

    /// Whether the stream to the peer, and that from it, are on the trunk.
    #[inline]
    pub(crate) fn is_on_trunk(&self) -> (bool, bool) {
        self.seat
            .as_ref()
            .map_or((false, false), |seat| (seat.tx, seat.rx))
    }

    /// The trunk from which the stream is received.
    pub(crate) fn trunk(&self) -> Option<Arc<Trunk>> {
        self.seat.as_ref().filter(|seat| seat.rx)?.trunk.clone()
    }

    /// Whether the peer has closed the own connection of a stream that has not ended on the trunk.
    pub(crate) fn awaits_end(&self) -> bool {
        self.seat
            .as_ref()
            .is_some_and(|seat| seat.closed && seat.ended.is_none())
    }

    /// Reads the own connection, on which nothing may arrive any more but its end.
    pub(super) fn receive_own_end(&mut self) -> Outcome {
        let mut byte = [0];
        match self.fd.recv(&mut byte) {
            Ok(0) => {
                if let Some(seat) = &mut self.seat {
                    seat.closed = true;
                }
                Outcome::Open
            }
            Ok(_) => Outcome::Broken(libc::EPROTO),
            Err(Errno::AGAIN | Errno::INTR) => Outcome::Open,
            Err(e) => Outcome::Broken(e.raw_os_error()),
        }
    }

    /// Adds the rest of the batch to what is sent on the trunk. `None` if the stream to the peer is not on one.
    #[inline]
    pub(super) fn send_on_trunk(&mut self, engine: &Engine, conn: &Connection) -> Option<Io> {
        let seat = self.seat.as_ref().filter(|seat| seat.tx)?;
        let (Some(trunk), Some(own), Some(peer)) = (&seat.trunk, seat.own, seat.peer) else {
            return None;
        };
        let ends = conn.end() != End::Open;
        Some(trunk.send(engine, (own, peer), &self.batch, self.sent, ends))
    }

    /// Whether the trunk has room for more bytes. If it has none, [`Member::trunk_has_room`] is called later. Returns true if the stream does not use a
    /// trunk.
    #[inline]
    pub(super) fn has_room_on_trunk(&self) -> bool {
        let seat = self.seat.as_ref().filter(|seat| seat.tx);
        let on = seat.and_then(|seat| Some((seat.trunk.as_ref()?, seat.own?)));
        on.is_none_or(|(trunk, own)| trunk.has_room(own))
    }

    /// Lets the other queue pairs of the trunk send before this one goes on. Does nothing if the stream is not on a trunk.
    pub(super) fn wait_on_trunk(&self) {
        if let Some(seat) = self.seat.as_ref().filter(|seat| seat.tx)
            && let (Some(trunk), Some(own)) = (&seat.trunk, seat.own)
        {
            trunk.wait(own);
        }
    }

    /// Sends what was added to the trunk, now or together with what other queue pairs add.
    #[inline]
    pub(super) fn flush_trunk(&self) {
        if let Some(seat) = self.seat.as_ref().filter(|seat| seat.tx)
            && let Some(trunk) = &seat.trunk
        {
            trunk.flush();
        }
    }
}
