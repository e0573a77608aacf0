//! Rendezvous by Read, an option: the receiver reads an announced message from the memory of its sender, and afterwards sends the
//! sender a message of kind *taken*. Without this option the receiver grants memory, and the sender writes by Write-Record (`receive.rs`).

use super::*;

impl Endpoint {
    /// Reads an announced message into the memory of a receive.
    pub(super) fn fetch(
        &mut self,
        cx: &mut Shared,
        target: Target,
        message: Arrived,
        id: u32,
        source: Source,
    ) {
        let length = usize::try_from(message.length).unwrap_or(usize::MAX);
        let length = length.min(target.memory.len());
        let mut regions = Vec::new();
        for (at, len) in target.memory.range(0, length).map(|(_, at, len)| (at, len)) {
            // SAFETY: the program does not access this memory until the receive has completed.
            match unsafe { Region::new(&cx.pd, at, len, Access::Sink) } {
                Ok(region) => regions.push(region),
                Err(why) => {
                    drop(regions);
                    return self.fetched(cx, &target, &message, id, 0, why);
                }
            }
        }
        if length == 0 {
            return self.fetched(cx, &target, &message, id, 0, 0);
        }
        let op = Op::Fetch {
            target,
            message,
            id,
            source,
            regions,
            length,
            posted: 0,
        };
        match self.ops.insert(op) {
            Ok(name) if self.deferred.is_empty() && self.post_fetch(cx, name) => {}
            Ok(name) => self.deferred.push_back(Deferred::Fetch(name)),
            Err(op) => {
                // The memory is deregistered before the completion is reported.
                drop(op);
                self.fetched(cx, &target, &message, id, 0, FI_ENOMEM);
            }
        }
    }

    /// Posts the Read of the next piece. Returns false if the caller has to try again.
    pub(super) fn post_fetch(&mut self, cx: &mut Shared, name: u32) -> bool {
        let Some(Op::Fetch {
            target,
            message,
            source,
            regions,
            length,
            posted,
            ..
        }) = self.ops.get(name)
        else {
            return true;
        };
        let from = *posted;
        let len = (length - from).min(limits::PIECE);
        let there = (source.rkey, source.base.wrapping_add(from as u64));
        let result = cx.way(message.from.ip, self.gid_index).and_then(|way| {
            let to = To {
                way: &way,
                qpn: message.from.qpn,
                qkey: self.job.qkey,
            };
            let pieces = pieces(&target.memory, regions, from, len);
            let id = OP << KIND | u64::from(name);
            // SAFETY: the operation owns the regions until it has completed.
            unsafe { self.qp.one_sided(to, id, OneSided::Read, there, &pieces) }
        });
        match result {
            Ok(()) => {
                self.outstanding += 1;
                if let Some(Op::Fetch { posted, .. }) = self.ops.get_mut(name) {
                    *posted = from + len;
                }
                true
            }
            Err(why) if full(why) == FI_EAGAIN => false,
            Err(why) => {
                self.request_completed(cx, OP, name, why);
                true
            }
        }
    }

    /// Ends a receive whose message was read or could not be read. `length`: the number of bytes that were to be read.
    pub(super) fn fetched(
        &mut self,
        cx: &mut Shared,
        target: &Target,
        message: &Arrived,
        id: u32,
        length: usize,
        err: i32,
    ) {
        if err == FI_EHOSTUNREACH || err == FI_ECONNRESET {
            self.received(cx, target, message, 0, err);
            return self.lost(cx, message.from, err);
        }
        let mut header = Header::new(Kind::Taken);
        header.id = id;
        self.answer(cx, message.from, header);
        let placed = if err == 0 { length } else { 0 };
        self.received(cx, target, message, placed, err);
    }

    /// Handles the notice that a peer has read an announced message, that reading it has failed, or that it has handled a message that it
    /// was to confirm.
    pub(super) fn taken(&mut self, cx: &mut Shared, from: Remote, header: &Header) {
        if let Some(Op::Sent {
            to,
            done,
            confirmation,
            ..
        }) = self.ops.get_mut(header.id)
            && *to == from
        {
            match *confirmation {
                Confirmation::Both => *confirmation = Confirmation::Device,
                Confirmation::Receiver => {
                    let done = *done;
                    self.ops.remove(header.id);
                    self.finish_or_report(cx, done, 0);
                }
                Confirmation::NotNeeded | Confirmation::Device => {}
            }
            return;
        }
        let Some(Op::Announced {
            to,
            known,
            offer: offer @ Offer::Open,
            grant: None,
            ..
        }) = self.ops.get_mut(header.id)
        else {
            return;
        };
        if *to != from {
            return;
        }
        // The number of the operation must not be used again before the completion of its announcement.
        *offer = Offer::Taken;
        if *known {
            self.end_announced(cx, header.id);
        }
    }

    /// Ends the sending of a message that its receiver has read.
    pub(super) fn end_announced(&mut self, cx: &mut Shared, name: u32) {
        if let Some(Op::Announced { done, regions, .. }) = self.ops.remove(name) {
            // The memory is deregistered before the completion is reported.
            drop(regions);
            self.finish_or_report(cx, done, 0);
        }
    }
}
