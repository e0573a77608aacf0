//! Sending of messages: either the content itself, or an announcement of it.
//!
//! The receiver of an announcement *grants* memory, and the sender then writes the content there. A *slot* is a registered buffer for
//! a message that is too long to be sent inline. A *link* is a reliable connection between two busy endpoints (`link.rs`).

use super::fence::Request;
use super::*;

impl Endpoint {
    /// Sends a message.
    pub fn send(&mut self, cx: &mut Shared, message: &Outgoing) -> Result<(), i32> {
        self.ready(cx)?;
        let length = message.memory.len();
        if length > limits::MESSAGE || (message.flags & FI_INJECT != 0 && length > limits::INJECT) {
            return Err(FI_EMSGSIZE);
        }
        if self.waits_for_fence(cx, message.to, message.flags)? {
            return self.postpone(cx, message.to, Request::Send(*message));
        }
        self.post_or_progress(cx, |me, cx| me.try_send(cx, message, length))
    }

    pub(super) fn done_of_send(&self, message: &Outgoing) -> Done {
        Done {
            context: message.context,
            flags: FI_SEND | kind_flag(message.tag.is_some()),
            reported: !message.silent
                && (message.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts: Counts::Send,
        }
    }

    pub(super) fn try_send(
        &mut self,
        cx: &mut Shared,
        message: &Outgoing,
        length: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, message.to)?;
        let link = self.link_to(cx, to)?;
        let way = cx.way(to.ip, self.gid_index)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let done = self.done_of_send(message);
        let announced = length > limits::EAGER || self.credit.is_used_up(to);
        let mut header = Header::new(if announced {
            Kind::Announce
        } else {
            Kind::Eager
        });
        header.length = length as u64;
        if let Some(tag) = message.tag {
            header.flags |= TAGGED;
            header.tag = tag;
        }
        if let Some(data) = message.data {
            header.flags |= DATA;
            header.data = data;
        }
        let copied = message.silent || message.flags & FI_INJECT != 0;
        let at_once = message.flags & (FI_INJECT | FI_INJECT_COMPLETE) != 0
            && message.flags & (FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE) == 0
            || message.silent;
        // An announced message is copied only if it is injected. Without a copy the program's memory is still needed, so the
        // operation does not complete at once.
        let at_once = at_once && (copied || !announced);
        let later = (!at_once).then_some(done);
        // The content of an announced message is written to the memory of the receive in any case.
        let confirmed = !at_once && !announced && message.flags & FI_DELIVERY_COMPLETE != 0;
        if announced {
            self.announce(
                cx,
                (to, to_whom, link),
                message.memory,
                header,
                later,
                copied,
            )?;
            if at_once {
                self.finish(cx, &done, 0);
            }
            if link.is_none() {
                self.count_message(cx, to, length as u64);
            }
            return Ok(());
        }
        let total = HEADER + length;
        let slot = if link.is_none() && total > limits::INLINE {
            let Some(slot) = self.free_slots.pop() else {
                self.ask_for_acknowledgements(cx);
                return Err(FI_EAGAIN);
            };
            Some(slot)
        } else {
            None
        };
        let Ok(op) = self.ops.insert(Op::Sent {
            done: later,
            to,
            slot,
            confirmation: if confirmed {
                Confirmation::Both
            } else {
                Confirmation::NotNeeded
            },
        }) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        if confirmed {
            header.flags |= CONFIRMED;
            header.id = op;
        }
        let id = OP << KIND | u64::from(op);
        if self.outstanding == 0 {
            self.later.clear();
        }
        let few_slots = slot.is_some() && self.free_slots.len() < limits::SLOTS / 4;
        let many = few_slots || self.outstanding.max(self.later.len()) >= limits::LATER;
        let soon = !at_once || many;
        let posted = match (slot, link) {
            (None, Some(link)) => self.post_on_link(link, op, &header, &message.memory),
            (None, None) => {
                let mut bytes = [0; limits::INLINE];
                fill(&mut bytes, &header, &message.memory);
                let bytes = bytes.get(..total).unwrap_or_default();
                self.qp.send_copy(to_whom, id, bytes, soon)
            }
            (Some(slot), _) => {
                let at = usize::from(slot) * SLOT;
                // SAFETY: the slot is free: no request uses it.
                let bytes = unsafe { self.slots.to_send(at, total) };
                fill(bytes, &header, &message.memory);
                let piece = Piece {
                    at: self.slots.address(at),
                    len: total,
                    lkey: self.slot_region.lkey(),
                };
                // SAFETY: the slots are registered, and this one is not reused before the completion.
                unsafe { self.qp.send(to_whom, id, piece, soon) }
            }
        };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        if at_once {
            self.finish(cx, &done, 0);
        }
        if link.is_none() {
            self.count_message(cx, to, 0);
        }
        if link.is_none() && !soon && !self.later.contains(&to) {
            self.later.push(to);
        } else if many {
            self.ask_for_acknowledgements(cx);
        }
        Ok(())
    }

    /// Sends a probe to each peer with messages that need not be acknowledged soon, so that it acknowledges them now. The device
    /// completes requests in the order of posting, so an unacknowledged message and all later ones stay in the send queue.
    pub(super) fn ask_for_acknowledgements(&mut self, cx: &mut Shared) {
        while let Some(to) = self.later.pop() {
            if self.probe(cx, to).is_err() {
                return;
            }
        }
    }

    pub(super) fn announce(
        &mut self,
        cx: &Shared,
        (to, to_whom, link): (Remote, To<'_>, Option<usize>),
        mut memory: UserMemory,
        mut header: Header,
        done: Option<Done>,
        copied: bool,
    ) -> Result<(), i32> {
        let counted = self.credit.announce(to)?;
        let copy = if copied {
            Some(self.credit.copy(&mut memory)?)
        } else {
            None
        };
        // An announcement names at most one piece of memory that the receiver can read. A message of several pieces is written
        // by the sender.
        let readable = memory
            .single()
            .filter(|(_, len)| self.job.readable && *len > 0);
        let access = if readable.is_some() {
            Access::Remote {
                read: true,
                write: false,
            }
        } else {
            Access::Source
        };
        let mut regions = Vec::new();
        for (at, len) in memory.parts().filter(|(_, len)| *len > 0) {
            // SAFETY: the program does not change this memory until the operation has completed. A copy is kept with it.
            let region = unsafe { Region::new(&cx.pd, at, len, access) }?;
            if readable.is_some() {
                region.restrict_to(to)?;
            }
            regions.push(region);
        }
        let source = readable
            .zip(regions.first())
            .map(|((at, _), region)| Source {
                rkey: region.rkey(),
                base: at as u64,
            });
        let announced = Op::Announced {
            done,
            to,
            memory,
            regions,
            _copy: copy,
            _counted: counted,
            known: false,
            offer: if source.is_some() {
                Offer::Open
            } else {
                Offer::None
            },
            grant: None,
            written: 0,
        };
        let op = self.ops.insert(announced).map_err(|_full| FI_EAGAIN)?;
        header.id = op;
        let id = ANNOUNCE << KIND | u64::from(op);
        let posted = match (link, source) {
            (Some(link), _) => self.post_on_link(link, op, &header, &UserMemory::default()),
            (None, None) => self.qp.send_copy(to_whom, id, &header.encode(), true),
            (None, Some(source)) => {
                header.flags |= READABLE;
                let message = [&header.encode()[..], &source.encode()].concat();
                self.qp.send_copy(to_whom, id, &message, true)
            }
        };
        if let Err(why) = posted {
            self.ops.remove(op);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Reports the end of an operation.
    pub(super) fn finish(&self, cx: &mut Shared, done: &Done, err: i32) {
        let counter = self.counter(done.counts);
        cx.count(counter, err != 0);
        if done.reported || err != 0 {
            let entry = Entry::new(done.context, done.flags).failed(err);
            cx.push(self.binding.send_queue, entry);
        }
    }

    pub(super) fn counter(&self, counts: Counts) -> Option<u32> {
        self.binding
            .counters
            .get(index_of(counts))
            .copied()
            .flatten()
    }

    /// Sends a header to a peer, at once or when the send queue has room.
    pub(super) fn answer(&mut self, cx: &mut Shared, to: Remote, header: Header) {
        if self.deferred.is_empty() && self.try_answer(cx, to, &header) {
            return;
        }
        self.deferred
            .push_back(Deferred::Answer(to, header, Vec::new()));
    }

    /// Sends a header. Returns false if the caller has to try again.
    pub(super) fn try_answer(&mut self, cx: &mut Shared, to: Remote, header: &Header) -> bool {
        let posted = self.post_answer(cx, to, header);
        self.answered(cx, to, posted.map_err(full))
    }

    /// Posts the request that sends a header as an answer.
    pub(super) fn post_answer(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        header: &Header,
    ) -> Result<(), i32> {
        let op = Op::Answer { slot: None, to };
        let op = self.ops.insert(op).map_err(|_full| FI_EAGAIN)?;
        let posted = self.post_header(cx, to, ANSWER << KIND | u64::from(op), header);
        if posted.is_err() {
            self.ops.remove(op);
        }
        posted
    }

    /// Called when an answer was posted, or could not be posted. Returns false if the caller has to try again. A peer that cannot be
    /// answered is lost, because it or this end may wait for what follows the answer.
    pub(super) fn answered(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        posted: Result<(), i32>,
    ) -> bool {
        match posted {
            Ok(()) => true,
            Err(FI_EAGAIN) => false,
            Err(_) => {
                self.lost(cx, to, FI_EHOSTUNREACH);
                true
            }
        }
    }

    pub(super) fn post_header(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        id: u64,
        header: &Header,
    ) -> Result<(), i32> {
        let way = cx.way(to.ip, self.gid_index)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        // Nothing waits for the completion of an answer.
        let soon = id >> KIND != ANSWER;
        self.qp.send_copy(to_whom, id, &header.encode(), soon)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Writes the next piece of an announced message to the granted memory. Returns false if the caller has to try again.
    pub(super) fn write_granted(&mut self, cx: &mut Shared, op: u32) -> bool {
        let Some(Op::Announced {
            to,
            memory,
            regions,
            grant: Some(grant),
            written,
            ..
        }) = self.ops.get(op)
        else {
            return true;
        };
        if grant.linked {
            self.write_on_link(cx, op);
            return true;
        }
        let way = match cx.way(to.ip, self.gid_index) {
            Ok(way) => way,
            Err(why) => {
                if let Some(Op::Announced { done, .. }) = self.ops.remove(op) {
                    self.finish_or_report(cx, done, why);
                }
                return true;
            }
        };
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let from = *written;
        let len = grant.length.saturating_sub(from).min(limits::PIECE);
        let pieces = pieces(memory, regions, from, len);
        let base = grant.base.wrapping_add(from as u64);
        let id = OP << KIND | u64::from(op);
        let what = OneSided::Record(grant.word);
        // SAFETY: the regions are live until the operation has completed.
        let posted = unsafe {
            self.qp
                .one_sided(to_whom, id, what, (grant.rkey, base), &pieces)
        };
        match posted {
            Ok(()) => {
                self.outstanding += 1;
                if let Some(Op::Announced { written, .. }) = self.ops.get_mut(op) {
                    *written = from + len;
                }
                true
            }
            Err(why) if full(why) == FI_EAGAIN => false,
            Err(why) => {
                if let Some(Op::Announced { done, .. }) = self.ops.remove(op) {
                    self.finish_or_report(cx, done, why);
                }
                true
            }
        }
    }
}

/// Copies the header and the content of a message into a buffer.
pub(super) fn fill(to: &mut [u8], header: &Header, content: &UserMemory) {
    if let Some((head, rest)) = to.split_first_chunk_mut::<HEADER>() {
        *head = header.encode();
        content.read(0, rest);
    }
}
