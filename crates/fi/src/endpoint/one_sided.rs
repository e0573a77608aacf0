//! Reads and writes of a peer's memory.
//!
//! The data of short and of injected writes is copied to a *slot*, a registered buffer of the endpoint.

use super::fence::Request;
use super::*;

impl Endpoint {
    /// Reads or writes memory of a peer.
    pub fn access(&mut self, cx: &mut Shared, what: &OneSidedRequest) -> Result<(), i32> {
        self.ready(cx)?;
        let length = what.memory.len();
        // `FI_INJECT` may be a default flag of the endpoint. It has no meaning for a read, which has no data to copy when it is posted.
        let injected = what.flags & FI_INJECT != 0 && !what.read;
        if length > limits::MESSAGE || (injected && length > limits::INJECT) {
            return Err(FI_EMSGSIZE);
        }
        if self.waits_for_fence(cx, what.to, what.flags)? {
            return self.postpone(cx, what.to, Request::Access(*what));
        }
        self.post_or_progress(cx, |me, cx| me.try_access(cx, what, length))
    }

    pub(super) fn done_of_access(&self, what: &OneSidedRequest) -> Done {
        let (flag, counts) = if what.read {
            (FI_READ, Counts::Read)
        } else {
            (FI_WRITE, Counts::Write)
        };
        Done {
            context: what.context,
            flags: FI_RMA | flag,
            reported: !what.silent
                && (what.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts,
        }
    }

    pub(super) fn try_access(
        &mut self,
        cx: &mut Shared,
        what: &OneSidedRequest,
        length: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, what.to)?;
        let rkey = u32::try_from(what.at.1).map_err(|_| FI_ENOKEY)?;
        let done = self.done_of_access(what);
        if self.plain.is_none() {
            self.plain = Some(QueuePair::new(&cx.pd, &self.cq, self.job, true, 0)?);
        }
        let inject = what.silent || what.flags & FI_INJECT != 0;
        let slot = if !what.read && (inject || length <= limits::COPIED_WRITE) {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let (mut regions, mut memory) = (Vec::new(), what.memory);
        if let Some(slot) = slot {
            let at = usize::from(slot) * SLOT;
            // SAFETY: the slot is free: no request uses it.
            let copy = unsafe { self.slots.to_send(at, length) };
            what.memory.read(0, copy);
            // SAFETY: the slot is not used elsewhere until the operation has completed.
            memory = unsafe { UserMemory::one(copy.as_ptr().cast(), length) };
        } else {
            let access = if what.read {
                Access::Sink
            } else {
                Access::Source
            };
            for (at, len) in what.memory.parts().filter(|(_, len)| *len > 0) {
                // SAFETY: the program does not access this memory until the operation has completed.
                regions.push(unsafe { Region::new(&cx.pd, at, len, access) }?);
            }
        }
        let notice = what.data.filter(|_| !what.read).map(|data| {
            let mut header = Header::new(Kind::Written);
            header.flags |= DATA;
            header.data = data;
            header.length = length as u64;
            (to, header)
        });
        let op = Op::OneSided {
            done,
            to,
            what: if what.read {
                OneSided::Read
            } else {
                OneSided::Write
            },
            memory,
            at: (rkey, what.at.0),
            slot,
            regions,
            posted: 0,
            notice,
        };
        let Ok(op) = self.ops.insert(op) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let posted = self.post_piece(cx, op);
        if posted.is_err() {
            self.ops.remove(op);
            self.free_slots.extend(slot);
        }
        posted
    }

    /// Posts the request for the next piece of a read or a write.
    fn post_piece(&mut self, cx: &mut Shared, name: u32) -> Result<(), i32> {
        let Some(Op::OneSided {
            to,
            what,
            memory,
            at: (rkey, base),
            slot,
            regions,
            posted,
            ..
        }) = self.ops.get(name)
        else {
            return Ok(());
        };
        let way = cx.way(to.ip, self.gid_index)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let from = *posted;
        let len = memory.len().saturating_sub(from).min(limits::PIECE);
        let mut pieces = pieces(memory, regions, from, len);
        if slot.is_some() {
            for piece in &mut pieces {
                piece.lkey = self.slot_region.lkey();
            }
        }
        let Some(qp) = &self.plain else {
            return Err(FI_EOTHER);
        };
        let id = OP << KIND | u64::from(name);
        let there = (*rkey, base.wrapping_add(from as u64));
        // SAFETY: the operation owns the regions and the slot until it has completed.
        unsafe { qp.one_sided(to_whom, id, *what, there, &pieces) }.map_err(full)?;
        if let Some(Op::OneSided { posted, .. }) = self.ops.get_mut(name) {
            *posted = from + len;
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Like [`Self::post_piece`], for a piece that is not the first. An error other than `FI_EAGAIN` ends the operation.
    pub(super) fn post_access(&mut self, cx: &mut Shared, name: u32) -> Result<(), i32> {
        let posted = self.post_piece(cx, name);
        if let Err(why) = posted
            && why != FI_EAGAIN
            && let Some(Op::OneSided { done, slot, .. }) = self.ops.remove(name)
        {
            self.free_slots.extend(slot);
            self.finish(cx, &done, why);
        }
        posted
    }

    /// Notifies the target's program of a completed write, at once or when the send queue has room.
    pub(super) fn notify(&mut self, cx: &mut Shared, to: Remote, header: Header, done: Done) {
        if !self.deferred.is_empty() || !self.try_notify(cx, to, &header, done) {
            self.deferred.push_back(Deferred::Notice(to, header, done));
        }
    }

    /// Like [`Self::notify`]. Returns false if the caller has to try again.
    pub(super) fn try_notify(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        header: &Header,
        done: Done,
    ) -> bool {
        let Ok(op) = self.ops.insert(Op::Notified { done, to }) else {
            return false;
        };
        let id = OP << KIND | u64::from(op);
        match self.post_header(cx, to, id, header) {
            Ok(()) => true,
            Err(why) => {
                self.ops.remove(op);
                if full(why) == FI_EAGAIN {
                    return false;
                }
                self.finish(cx, &done, why);
                true
            }
        }
    }
}
