//! Reads and writes of a peer's memory.

use super::*;

impl Endpoint {
    /// Reads or writes memory of a peer.
    pub fn access(&mut self, cx: &mut Shared, what: &OneSidedRequest) -> Result<(), i32> {
        self.ready(cx)?;
        let length = what.memory.len();
        if length > limits::MESSAGE || (what.flags & FI_INJECT != 0 && length > limits::INJECT) {
            return Err(FI_EMSGSIZE);
        }
        self.post_or_progress(cx, |me, cx| me.try_access(cx, what, length))
    }

    pub(super) fn try_access(
        &mut self,
        cx: &mut Shared,
        what: &OneSidedRequest,
        length: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, what.to)?;
        let rkey = u32::try_from(what.at.1).map_err(|_| FI_ENOKEY)?;
        let way = cx.way(to.ip, self.place)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let done = Done {
            context: what.context,
            flags: FI_RMA | if what.read { FI_READ } else { FI_WRITE },
            reported: !what.silent
                && (what.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts: if what.read {
                Counts::Read
            } else {
                Counts::Write
            },
        };
        let inject = what.silent || what.flags & FI_INJECT != 0;
        let slot = if !what.read && (inject || length <= limits::INJECT) {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let (mut regions, mut pieces) = (Vec::new(), Vec::new());
        if let Some(slot) = slot {
            let at = usize::from(slot) * SLOT;
            // SAFETY: the slot is free: no request uses it.
            what.memory
                .read(0, unsafe { self.slots.to_send(at, length) });
            pieces.push(Piece {
                at: self.slots.address(at),
                len: length,
                lkey: self.slot_region.lkey(),
            });
        } else {
            let access = if what.read {
                Access::Sink
            } else {
                Access::Source
            };
            for (at, len) in what.memory.parts().filter(|(_, len)| *len > 0) {
                // SAFETY: the program does not access this memory until the operation has completed.
                let region = unsafe { Region::new(&cx.pd, at, len, access) }?;
                let lkey = region.lkey();
                pieces.push(Piece { at, len, lkey });
                regions.push(region);
            }
        }
        if self.plain.is_none() {
            match QueuePair::new(&cx.pd, &self.cq, self.job, true, 0) {
                Ok(qp) => self.plain = Some(qp),
                Err(why) => {
                    self.free_slots.extend(slot);
                    return Err(why);
                }
            }
        }
        let Some(qp) = &self.plain else {
            return Err(FI_EOTHER);
        };
        let notice = what.data.filter(|_| !what.read).map(|data| {
            let mut header = Header::new(Kind::Written);
            header.flags |= DATA;
            header.data = data;
            header.length = length as u64;
            (to, header)
        });
        let op = Op::OneSided {
            done,
            slot,
            _regions: regions,
            notice,
        };
        let Ok(op) = self.ops.insert(op) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let kind = if what.read {
            OneSided::Read
        } else {
            OneSided::Write
        };
        let id = OP << KIND | u64::from(op);
        // SAFETY: the operation owns the regions and the slot until it has completed.
        let posted = unsafe { qp.one_sided(to_whom, id, kind, (rkey, what.at.0), &pieces) };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
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
        let Ok(op) = self.ops.insert(Op::Notified { done }) else {
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
