//! Cuts messages into datagrams, with parity datagrams if the options say so.

use super::gather::{Unbuildable, gather};
use super::head::header_of;
use crate::datagram::DatagramQp;
use crate::datagram::outgoing::{Current, Trailer, peer_of};
use crate::datagram::parity;
use crate::datagram::types::Part;
use crate::datagram::types::{SendEffect, TxDatagram};
use crate::observe::Step;
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;
use crate::wire::dgram::{self, ATTR_FINAL_COPY, Shim};
use crate::wire::rdmap::Opcode;

/// The reason of a failure if memory was deregistered after the message was built.
const DEREGISTERED: &str = "memory of a posted request was deregistered";
/// The end of a message of at least this many bytes is acknowledged at once. A program at the other end that has received such a
/// message often computes next, and would send a delayed acknowledgement late.
const LONG: u64 = 32 << 10;
/// The largest number of final datagrams that are kept to be repeated.
const TRAILERS: usize = 64;

impl DatagramQp {
    /// Cuts the next datagram of a message, and adds its length to `bytes`. Returns whether the message has more;
    /// otherwise it has ended or failed.
    pub(super) fn cut(
        &mut self,
        current: &mut Current,
        bytes: &mut usize,
        out: &mut Vec<TxDatagram>,
    ) -> bool {
        let message = &mut current.message;
        let from = message.sent;
        let len = current.segment.min(message.len - from);
        let last = from + len == message.len;
        let offset = u32::try_from(from).unwrap_or(u32::MAX);
        let header = header_of(message.opcode, message.address, offset, last);
        let shim = Shim {
            offset,
            ..current.shim
        };
        let payload = usize::try_from(len).unwrap_or(0);
        let mut datagram = self.buffer(payload);
        dgram::put_head(&shim, &header, &mut datagram);
        let head = datagram.len();
        if !gather(
            &message.source,
            from,
            len,
            &*self.base.rnic.memory,
            &mut datagram,
        ) {
            let why = DEREGISTERED;
            match current.request {
                Some(number) => {
                    self.fail_request(number, Unbuildable(Status::LocalProtection, why));
                }
                // The answer cannot be finished. In a reliable service the requester gets an error.
                None => {
                    self.base.observe(|| Step::Failed(why));
                    if self.rd.is_some() {
                        let to = &current.to;
                        self.answer_broken(&peer_of(to), to.source, current.shim.id);
                    }
                }
            }
            return false;
        }
        message.sent += len;
        self.base.observe(|| Step::Segment(payload, last));
        if current.shim.group > 0 {
            let (sum, many, start) = &mut current.group;
            if *many == 0 {
                *start = offset;
            }
            *many += 1;
            parity::add(sum, datagram.get(head..).unwrap_or(&[]));
        }
        *bytes += if self.rd.is_some() {
            self.cut_reliably(current, datagram, last, out)
        } else {
            dgram::seal(&mut datagram);
            self.cut_plainly(current, datagram, last, out)
        };
        // A request that is sent again may have been answered meanwhile.
        if last
            && let Some(posted) = current.request.and_then(|n| self.base.sq.get_mut(n))
            && posted.phase != Phase::Done
        {
            posted.phase = Phase::Sent;
        }
        !last
    }

    pub(super) fn cut_plainly(
        &mut self,
        current: &mut Current,
        bytes: Vec<u8>,
        last: bool,
        out: &mut Vec<TxDatagram>,
    ) -> usize {
        self.unwritten.push(match current.request {
            Some(request) if current.asks => SendEffect::Ask(request),
            Some(request) if last => SendEffect::End(request),
            Some(request) => SendEffect::Part(request),
            None => SendEffect::Nothing,
        });
        let mut size = bytes.len();
        let end = u32::try_from(current.message.sent).unwrap_or(u32::MAX);
        if let Some(peer) = current.peer() {
            self.flow.sent(peer, current.shim.id, end, size, self.now);
        }
        out.push(self.datagram(current, bytes));
        let group = current.shim.group;
        if group > 0 && (last || current.group.1 == group) {
            // If a group consists of one datagram, the parity datagram repeats the payload of that datagram. The repetition
            // is needed too, since the original may be lost.
            size += self.cut_parity(current, out);
        }
        if last {
            self.repeat_end(out);
        }
        if last && current.message.opcode == Opcode::WriteRecord && self.options.repeats > 0 {
            if self.trailers.len() == TRAILERS {
                self.end_repeats(out);
            }
            let datagram = self.end_again(current);
            self.trailers.push_back(Trailer {
                datagram,
                left: self.options.repeats,
            });
        }
        size
    }

    pub(super) fn cut_reliably(
        &mut self,
        current: &mut Current,
        bytes: Vec<u8>,
        last: bool,
        out: &mut Vec<TxDatagram>,
    ) -> usize {
        let peer = peer_of(&current.to);
        let alone = last
            && self
                .peer_queues
                .get(&peer)
                .is_none_or(|l| l.queue.is_empty())
            && self.base.sq.untaken() == 0;
        let posted = current.request.and_then(|n| self.base.sq.get_mut(n));
        let part = Part {
            tag: current.tag,
            last,
            alone,
            ack_later: posted.is_some_and(|p| p.request.ack_later),
            long: current.message.sent >= LONG,
        };
        let now = self.now;
        let pushed = self
            .rd
            .as_mut()
            .and_then(|rd| rd.push(&peer, bytes, part, now));
        let Some((way, packet)) = pushed else {
            return 0;
        };
        let size = packet.len();
        self.hand_out(&peer, way, packet, out);
        size
    }

    pub(super) fn datagram(&self, current: &Current, bytes: Vec<u8>) -> TxDatagram {
        TxDatagram {
            to: current.to.addr,
            from: current.to.source,
            hop_limit: current.to.hop_limit,
            traffic_class: current.to.traffic_class,
            bytes: bytes.into(),
        }
    }

    /// Sends the parity datagram of a complete group. Returns its length.
    pub(super) fn cut_parity(&mut self, current: &mut Current, out: &mut Vec<TxDatagram>) -> usize {
        let (sum, _, start) = std::mem::take(&mut current.group);
        let shim = Shim {
            offset: start,
            parity: true,
            ..current.shim
        };
        let header = header_of(
            current.message.opcode,
            current.message.address,
            start,
            false,
        );
        let mut bytes = dgram::emit_head(&shim, &header);
        bytes.extend_from_slice(&sum);
        dgram::seal(&mut bytes);
        let size = bytes.len();
        if let Some(peer) = current.peer() {
            let end = u32::try_from(current.message.sent).unwrap_or(u32::MAX);
            self.flow.sent(peer, current.shim.id, end, size, self.now);
        }
        self.unwritten.push(SendEffect::Nothing);
        out.push(self.datagram(current, bytes));
        size
    }

    /// A copy of the final datagram of a message, without payload. It tells the receiver where the message ends.
    pub(super) fn end_again(&self, current: &Current) -> TxDatagram {
        let message = &current.message;
        let shim = Shim {
            offset: current.shim.length,
            attributes: current.shim.attributes | ATTR_FINAL_COPY,
            commit: true,
            ..current.shim
        };
        let header = header_of(message.opcode, message.address, current.shim.length, true);
        let mut bytes = dgram::emit_head(&shim, &header);
        dgram::seal(&mut bytes);
        self.datagram(current, bytes)
    }
}
