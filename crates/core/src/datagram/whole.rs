//! Receives a Send of one datagram in one step: *deframe*, *admit*, *place*, *deliver* and *complete*.
//!
//! Most datagrams of a UD queue pair are whole Sends without immediate data, into posted receives of one range each.
//! Everything that the general path ([`rx`](super::rx), [`deliver`](super::deliver)) would check is checked here
//! first. If a check fails, nothing has changed, and the datagram takes the general path.
//! `crates/sim/tests/shortcuts.rs` compares the two paths.
//!
//! The completions of a run (datagrams that were received together) are added to their queue together
//! ([`DatagramQp::complete_received`]).

use super::DatagramQp;
use super::outgoing::{index, is_group};
use super::types::{Arrival, Kind};
use crate::bounds;
use crate::observe::Step;
use crate::verbs::access::Access;
use crate::verbs::wc::{Completion, Status, WcOp};
use crate::wire::To;
use crate::wire::ddp::Header;
use crate::wire::dgram::{self, SendHead};

impl DatagramQp {
    /// Adds the completions of [`Self::receive_whole`] to their queue. Called after a run, and before the general path may
    /// complete something.
    #[inline]
    pub(super) fn complete_received(&mut self) {
        if !self.received.is_empty() {
            self.base.complete_recvs(self.received.drain(..));
        }
    }

    /// Receives the datagram if it is a whole Send to a UD queue pair. Returns false if it has to take the general
    /// path.
    #[inline]
    pub(super) fn receive_whole(&mut self, arrival: &Arrival, bytes: &[u8]) -> bool {
        if self.kind != Kind::Ud || !self.shortcuts || self.receives().is_err() {
            return false;
        }
        // The checksum is verified after the cheap checks, because the general path computes it again for each datagram
        // that fails a check here.
        let Some((head, payload)) = SendHead::parse(bytes) else {
            return false;
        };
        let to_group = |ip| is_group(ip) || self.joined.contains(&ip);
        let known = self.last_arrival.of(arrival, to_group);
        let to_group = known.to_group;
        let is_ours = if to_group {
            !self.options.blocks_own
        } else {
            head.dst_index == index(self.base.qpn)
        };
        let is_ours = is_ours
            && head.qkey == self.base.attr.qkey
            && head.length <= self.options.max_send.max(bounds::UD_MTU);
        let Some(request) = self.base.rq.front_own().filter(|_| is_ours) else {
            return false;
        };
        let ([sge], received) = (request.sges.as_slice(), bounds::GRH_LEN + head.length) else {
            return false;
        };
        if sge.len < received || dgram::checked(bytes).is_err() {
            return false;
        }
        let id = request.id;
        let (pd, qpn) = (self.base.pd, self.base.qpn);
        let (need, at, room) = (Access::LOCAL_WRITE, To(sge.addr), sge.len.into());
        let regions = &self.base.rnic.regions;
        let last = &mut self.last_written;
        let Ok(pinned) = regions.pin(last, sge.lkey, pd, qpn, need, at, room) else {
            return false;
        };
        let header = known.header(bytes.len());
        self.base.rnic.memory.place_both(&pinned, header, payload);
        drop(pinned);
        let port = arrival.from.port();
        let (peer, sl) = ((known.from, head.src_index), known.kind);
        let tell = !to_group && self.flow.count_arrival(peer, bytes.len());
        self.base.rq.drop_own();
        self.counters.rx_messages += 1;
        let plain = self.base.completes_plainly();
        if !plain {
            let header = Header::Untagged(head.untagged());
            self.base.observe(|| Step::Deframe(&header, payload.len()));
            if !payload.is_empty() {
                self.base.observe(|| Step::Place(payload.len() as u64));
            }
            self.base.observe(|| Step::Deliver(head.opcode()));
        }
        let entry = Completion {
            byte_len: received,
            src_qpn: u32::from(port) << 8 | u32::from(head.src_index),
            grh: true,
            sl,
            solicited: head.solicited,
            ..Completion::new(id, Status::Success, WcOp::Recv, qpn)
        };
        if plain {
            self.received.push(entry);
        } else {
            self.base.complete_recv(entry);
        }
        if tell {
            self.flow
                .schedule_report(peer, arrival.to, head.id, head.length);
        }
        true
    }
}
