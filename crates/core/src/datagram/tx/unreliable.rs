//! Sends messages of unreliable services: each datagram once, except the end of a Write-Record, which may be repeated.

use std::time::Duration;

use super::build::qkey_for;
use super::gather::gather_at_once;
use super::head::{HEAD_MAX, header_of};
use crate::bounds;
use crate::datagram::DatagramQp;
use crate::datagram::outgoing::{
    Current, HEAD, Taken, has_no_window, has_room, index, ip_fields_of, peer_of,
};
use crate::datagram::types::{Kind, Part, Peer, SendEffect, TxDatagram};
use crate::observe::Step;
use crate::verbs::qp::State;
use crate::verbs::sq::Phase;
use crate::verbs::wr::{Destination, Op, Payload};
use crate::wire::dgram::{self, SEND_HEAD, Shim};
use crate::wire::rd::Packet;
use crate::wire::rdmap::Opcode;

/// The time after which the answers to peers whose windows were closed are looked at again, unless their peers report.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl DatagramQp {
    /// Adds datagrams of answers and requests to `out`. Returns whether the batch is full, so that there may be more to send.
    pub(super) fn poll_messages(&mut self, out: &mut Vec<TxDatagram>) -> bool {
        let mut bytes = 0;
        let mut answer = false;
        while has_room(bytes, out) {
            answer = !answer;
            if answer && let Some(mut current) = self.next_answer() {
                let goes_on = self.cut(&mut current, &mut bytes, out);
                if goes_on {
                    self.answers.push_front(current);
                }
                continue;
            }
            // `Option::take` copies a whole `Current` even if the option is `None`, so it is called only for `Some`.
            let taken = if self.current.is_some()
                && let Some(current) = self.current.take()
            {
                Taken::Message(current)
            } else if self.send_uds(&mut bytes, out) || self.send_single(&mut bytes, out) {
                Taken::Done
            } else {
                self.take()
            };
            let mut current = match taken {
                Taken::Message(current) => current,
                Taken::Done => continue,
                // There is nothing else to send, so final datagrams of messages may be repeated.
                Taken::Nothing if self.repeat_end(out) || self.has_open_answer() => continue,
                Taken::Nothing => break,
            };
            let peer = current.peer();
            // The message is sent to its end, unless answers wait for their turn.
            let (mut goes_on, mut open) = (true, true);
            while goes_on && has_room(bytes, out) {
                open = peer.is_none_or(|peer| self.flow.may_send(&peer, self.now));
                if !open {
                    break;
                }
                goes_on = self.cut(&mut current, &mut bytes, out);
                if !self.answers.is_empty() {
                    break;
                }
            }
            if goes_on {
                self.current = Some(current);
            }
            if !open && !self.has_open_answer() {
                self.was_stalled = true;
                break;
            }
        }
        !has_room(bytes, out)
    }

    /// Sends requests by [`Self::send_ud`] until one has to take another path, or answers wait for their turn. Returns
    /// whether any request was sent.
    fn send_uds(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        if self.kind != Kind::Ud || !self.shortcuts {
            return false;
        }
        let mut any = false;
        while has_room(*bytes, out) && self.send_ud(bytes, out) {
            any = true;
            if !self.answers.is_empty() {
                break;
            }
        }
        any
    }

    /// As [`Self::send_single`], for the most frequent request of a UD queue pair: a Send without immediate data. Few
    /// fields of its headers change, and the window of its peer is looked up once.
    #[inline]
    fn send_ud(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        if self.base.state != State::Rts {
            return false;
        }
        let Some((number, posted)) = self.base.sq.peek() else {
            return false;
        };
        let request = &posted.request;
        let Some(to) = &request.destination else {
            return false;
        };
        let Op::Send {
            imm: None,
            invalidate: None,
        } = request.op
        else {
            return false;
        };
        let len = request.payload.len();
        let most = bounds::UD_MTU.min(self.options.max_send);
        let waits = request.fence && !self.reads.is_empty();
        if posted.injected.is_some() || waits || len > most.into() {
            return false;
        }
        let now = self.now;
        let window = match self.flow.last_window(to) {
            Some(window) => Some(window),
            None if has_no_window(to) => None,
            None => Some(self.flow.window(peer_of(to))),
        };
        if window.as_ref().is_some_and(|window| window.is_full(now)) {
            return false;
        }
        let id = self.next_id;
        let (size, length) = (len as usize, len as u32);
        let mut datagram = self.spare.take(SEND_HEAD + size + dgram::CRC);
        let head = dgram::SendHead {
            epoch: self.epoch,
            qkey: qkey_for(to, self.base.attr.qkey),
            id,
            length,
            dst_index: index(to.qpn),
            src_index: index(self.base.qpn),
            solicited: request.solicited,
        };
        datagram.extend_from_slice(&head.emit());
        let gathered = match &request.payload {
            Payload::Inline(data) => {
                datagram.extend_from_slice(data);
                Ok(())
            }
            Payload::Sges(sges) => gather_at_once(
                &self.base.rnic,
                &mut self.last_read,
                sges,
                self.base.pd,
                self.base.qpn,
                &mut datagram,
            ),
        };
        let (request_id, solicited) = (request.id, request.solicited);
        posted.phase = Phase::Sent;
        posted.bytes = len;
        posted.message = id;
        if let Err(error) = gathered {
            self.base.sq.advance();
            self.base.observe(|| Step::Take(request_id));
            self.spare.give(datagram);
            self.fail_request(number, error);
            return true;
        }
        dgram::seal(&mut datagram);
        if let Some(window) = window {
            window.sent(id, length, datagram.len(), now);
        }
        *bytes += datagram.len();
        out.push(TxDatagram {
            to: to.addr,
            from: to.source,
            hop_limit: to.hop_limit,
            traffic_class: to.traffic_class,
            bytes: datagram.into(),
        });
        self.base.sq.advance();
        self.next_id = id.wrapping_add(1);
        self.issued.add(id, request_id);
        self.unwritten.push(SendEffect::End(number));
        self.base.observe_all(|| {
            [
                Step::Take(request_id),
                Step::Build(Opcode::send(false, solicited), len),
                Step::Segment(size, true),
            ]
        });
        if !self.trailers.is_empty() {
            self.repeat_end(out);
        }
        true
    }

    /// Takes the next request and builds its datagram in one step, if the request is a Send or a Write that fits in one
    /// datagram, as most do.
    ///
    /// Returns false, and has changed nothing, if the request has to take the general path or has to wait. Both paths
    /// send the same datagrams: `crates/sim/tests/shortcuts.rs` compares them.
    pub(super) fn send_single(&mut self, bytes: &mut usize, out: &mut Vec<TxDatagram>) -> bool {
        if !self.shortcuts || self.base.state != State::Rts {
            return false;
        }
        let reading = !self.reads.is_empty();
        let Some((number, posted)) = self.base.sq.peek() else {
            return false;
        };
        let request = &posted.request;
        let plain = posted.injected.is_none() && !(request.fence && reading);
        let to = if self.kind.is_connected() {
            self.peer
        } else {
            request.destination
        };
        let Some(to) = to.filter(|_| plain) else {
            return false;
        };
        let (request_id, op, solicited) = (request.id, request.op, request.solicited);
        let ack_later = request.ack_later;
        let len = request.payload.len();
        let reliable = self.rd.is_some();
        let peer = peer_of(&to);
        let pace = (!reliable && !has_no_window(&to)).then_some(peer);
        if !self.is_single(&op, len, &to) {
            return false;
        }
        let open = if reliable {
            // The request must not overtake a message that waits for its turn or for a window.
            self.ready.is_empty()
                && !self.peer_queues.contains_key(&peer)
                && self.may_send(
                    &peer,
                    ip_fields_of(&to),
                    HEAD + usize::try_from(len).unwrap_or(0),
                    false,
                )
        } else {
            pace.is_none_or(|peer| self.flow.is_open(&peer, self.now))
        };
        let Some((shim, opcode, address)) = self.head_of(&op, solicited, len).filter(|_| open)
        else {
            return false;
        };
        let shim = Shim {
            qkey: self.qkey_for(&to),
            dst_index: index(to.qpn),
            ..shim
        };
        self.base.observe(|| Step::Take(request_id));
        self.base.sq.advance();
        let payload = usize::try_from(len).unwrap_or(0);
        let mut datagram = self.buffer(payload);
        dgram::put_head(&shim, &header_of(opcode, address, 0, true), &mut datagram);
        let Some(posted) = self.base.sq.get_mut(number) else {
            return true;
        };
        posted.phase = Phase::Sent;
        posted.bytes = len;
        posted.message = shim.id;
        let gathered = match &posted.request.payload {
            Payload::Inline(data) => {
                datagram.extend_from_slice(data);
                Ok(())
            }
            Payload::Sges(sges) => {
                let last = &mut self.last_read;
                gather_at_once(
                    &self.base.rnic,
                    last,
                    sges,
                    self.base.pd,
                    self.base.qpn,
                    &mut datagram,
                )
            }
        };
        if let Err(error) = gathered {
            self.spare.give(datagram);
            self.fail_request(number, error);
            return true;
        }
        self.base.observe(|| Step::Build(opcode, len));
        self.base.observe(|| Step::Segment(payload, true));
        self.next_id = shim.id.wrapping_add(1);
        self.issued.add(shim.id, request_id);
        let now = self.now;
        if let Some(rd) = &mut self.rd {
            let part = Part {
                tag: number,
                last: true,
                alone: self.base.sq.untaken() == 0,
                ack_later,
                long: false,
            };
            if let Some((way, packet)) = rd.push(&peer, datagram, part, now) {
                *bytes += packet.len();
                self.hand_out(&peer, way, packet, out);
            }
            return true;
        }
        dgram::seal(&mut datagram);
        self.unwritten.push(SendEffect::End(number));
        if let Some(peer) = pace {
            self.flow
                .sent(peer, shim.id, shim.length, datagram.len(), now);
        }
        *bytes += datagram.len();
        out.push(TxDatagram {
            to: to.addr,
            from: to.source,
            hop_limit: to.hop_limit,
            traffic_class: to.traffic_class,
            bytes: datagram.into(),
        });
        if !self.trailers.is_empty() {
            self.repeat_end(out);
        }
        true
    }

    /// Whether the request is a Send or a Write of one datagram, which no other datagram follows.
    pub(super) fn is_single(&mut self, op: &Op, len: u64, to: &Destination) -> bool {
        let most = match op {
            Op::Send { .. } if self.kind == Kind::Ud => bounds::UD_MTU.into(),
            Op::Send { imm, .. } => self.segment_for(to, imm.is_some()),
            // The final datagrams of Writes may be repeated, and parity datagrams may follow them.
            Op::Write { .. } if self.options.repeats > 0 || self.options.parity > 0 => {
                return false;
            }
            Op::Write { imm, .. } => self.segment_for(to, imm.is_some()),
            _ => return false,
        };
        let sends = matches!(op, Op::Send { .. });
        len <= most && !(sends && len > u64::from(self.options.max_send))
    }

    /// A buffer for a datagram with `payload` bytes of payload. In reliable services it begins with room for the
    /// header of the packet, which is written when its number is known.
    pub(super) fn buffer(&mut self, payload: usize) -> Vec<u8> {
        let Some(rd) = &mut self.rd else {
            return self.spare.take(HEAD_MAX + payload + dgram::CRC);
        };
        rd.recycle(|buffer| self.spare.give(buffer));
        let mut buffer = self
            .spare
            .take(Packet::LEN + HEAD_MAX + payload + dgram::CRC);
        buffer.extend_from_slice(&[0; Packet::LEN]);
        buffer
    }

    /// The next answer to a peer whose window is open. Answers to peers whose windows are closed are set aside. So a slow peer delays
    /// only its own answers. Many waiting answers take little time, because they are examined only once per [`LOOK_AGAIN`].
    pub(super) fn next_answer(&mut self) -> Option<Current> {
        if self.receives().is_err() {
            return None;
        }
        if self.look_again <= self.now && !self.closed_answers.is_empty() {
            self.look_again = self.now + LOOK_AGAIN;
            self.move_answers(|this, c| this.is_open_answer(c));
        }
        while let Some(mut current) = self.answers.pop_front() {
            if self.is_open_answer(&current) {
                return Some(current);
            }
            current.waits.get_or_insert(self.now);
            self.closed_answers.push_back(current);
        }
        None
    }

    fn is_open_answer(&self, current: &Current) -> bool {
        let peer = current.peer();
        peer.is_none_or(|peer| self.flow.is_open(&peer, self.now))
    }

    /// Moves the answers that `which` selects back to the queue.
    fn move_answers(&mut self, which: impl Fn(&Self, &Current) -> bool) {
        let mut at = 0;
        while let Some(current) = self.closed_answers.get(at) {
            if which(self, current) {
                self.answers.extend(self.closed_answers.remove(at));
            } else {
                at += 1;
            }
        }
    }

    /// Called when a peer has reported: moves the answers to it back to the queue if its window is open.
    pub(in crate::datagram) fn reopen_answers(&mut self, peer: &Peer) {
        if !self.closed_answers.is_empty() && self.flow.is_open(peer, self.now) {
            self.move_answers(|_, c| c.peer().as_ref() == Some(peer));
        }
    }

    pub(in crate::datagram) fn has_open_answer(&self) -> bool {
        let is_open = |c: &Current| self.is_open_answer(c);
        self.receives().is_ok()
            && (self.answers.iter().any(is_open)
                || self.look_again <= self.now && self.closed_answers.iter().any(is_open))
    }

    /// Resumes answers to peers that have not reported for [`bounds::DATAGRAM_STALL`].
    pub(in crate::datagram) fn resume_late_answers(&mut self) {
        let now = self.now;
        let is_over = |c: &Current| {
            c.waits
                .is_none_or(|since| since + bounds::DATAGRAM_STALL <= now)
        };
        let mut at = 0;
        while let Some(current) = self.closed_answers.get(at) {
            if !is_over(current) {
                at += 1;
                continue;
            }
            let Some(mut current) = self.closed_answers.remove(at) else {
                return;
            };
            // Another answer to the same peer may have opened its window.
            if let Some(peer) = current.peer()
                && !self.flow.is_open(&peer, now)
            {
                self.flow.assume_lost(&peer);
            }
            current.waits = None;
            self.answers.push_back(current);
        }
    }

    /// The time at which [`Self::resume_late_answers`] has something to do.
    pub(in crate::datagram) fn answers_until(&self) -> Option<Duration> {
        let waits = self.closed_answers.iter().filter_map(|c| c.waits).min()?;
        Some(waits + bounds::DATAGRAM_STALL)
    }

    /// Sends all repeats that are left of the Write-Record whose end was repeated least recently.
    pub(super) fn end_repeats(&mut self, out: &mut Vec<TxDatagram>) {
        if let Some(trailer) = self.trailers.pop_front() {
            for _ in 0..trailer.left {
                out.push(trailer.datagram.clone());
                self.unwritten.push(SendEffect::Nothing);
            }
        }
    }

    /// Repeats the final datagram of an earlier Write-Record. Returns false if there is none.
    pub(super) fn repeat_end(&mut self, out: &mut Vec<TxDatagram>) -> bool {
        let Some(mut trailer) = self.trailers.pop_front() else {
            return false;
        };
        out.push(trailer.datagram.clone());
        self.unwritten.push(SendEffect::Nothing);
        trailer.left -= 1;
        if trailer.left > 0 {
            self.trailers.push_back(trailer);
        }
        true
    }
}
