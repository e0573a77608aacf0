//! Receives: matching, multi-receive buffers, and the rendezvous of announced messages.
//!
//! A multi-receive buffer is one receive that takes several messages. In the rendezvous the sender of a long message announces it, this
//! end *grants* the memory of a receive, and the sender writes the message there by RDMA Write: as a datagram, or over the *link*, a
//! connection between two busy endpoints (`link.rs`). A *claimed* message is one that the program has reserved for a later receive.

use super::*;

impl Endpoint {
    /// Posts a receive, or searches for a message (`FI_PEEK`).
    pub fn receive(&mut self, cx: &mut Shared, wanted: &Wanted) -> Result<(), i32> {
        // A queue pair that has failed receives nothing, but the program can still get messages that arrived before.
        if !self.enabled || (self.failed && wanted.flags & (FI_PEEK | FI_CLAIM) == 0) {
            return Err(FI_EOPBADSTATE);
        }
        let source = if self.binding.directed() {
            let vector = self.binding.vector.and_then(|v| cx.vectors.get(v));
            vector
                .map_or(Some(wanted.source), |v| v.canonical(wanted.source))
                .ok_or(FI_EINVAL)?
        } else {
            FI_ADDR_UNSPEC
        };
        let (tag, ignore) = wanted.tag.unwrap_or((0, u64::MAX));
        let pattern = Pattern {
            source,
            tag,
            ignore,
        };
        let tagged = wanted.tag.is_some();
        let reported = wanted.flags & FI_COMPLETION != 0 || !self.binding.receive_selective;
        if wanted.flags & FI_PEEK != 0 {
            self.progress(cx);
            self.peek(cx, wanted, &pattern, tagged);
            return Ok(());
        }
        let mut receive = Receive {
            context: wanted.context,
            memory: wanted.memory,
            reported,
            multi: None,
        };
        if wanted.flags & FI_CLAIM != 0 {
            let message = self.matching(tagged).take_claimed(wanted.context);
            let message = message.ok_or(FI_EINVAL)?;
            if wanted.flags & FI_DISCARD != 0 {
                self.discard(cx, wanted, &message, tagged);
                return Ok(());
            }
            let target = self.target(&receive, message.length);
            self.land(cx, target, tagged, message);
            return Ok(());
        }
        if wanted.flags & FI_MULTI_RECV != 0 {
            if tagged || wanted.memory.single().is_none() {
                return Err(FI_EINVAL);
            }
            let multi = Multi {
                used: 0,
                underway: 0,
                over: false,
            };
            receive.multi = Some(self.multis.insert(multi).map_err(|_full| FI_EAGAIN)?);
        }
        while let Some(message) = self.matching(tagged).take_message(&pattern) {
            let target = self.target(&receive, message.length);
            self.land(cx, target, tagged, message);
            if self.is_over(&receive) {
                return Ok(());
            }
        }
        self.matching(tagged).post(pattern, receive);
        Ok(())
    }

    pub(super) fn matching(&mut self, tagged: bool) -> &mut Matching<Receive> {
        if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        }
    }

    /// Returns whether a receive that has got a message accepts no more.
    pub(super) fn is_over(&self, receive: &Receive) -> bool {
        let multi = receive.multi.and_then(|m| self.multis.get(m));
        multi.is_none_or(|m| m.over)
    }

    pub(super) fn peek(
        &mut self,
        cx: &mut Shared,
        wanted: &Wanted,
        pattern: &Pattern,
        tagged: bool,
    ) {
        let queue = self.binding.receive_queue;
        let claim = wanted.flags & FI_CLAIM != 0;
        let matching = self.matching(tagged);
        let found = if claim {
            matching.claim(pattern, wanted.context)
        } else {
            matching.message_for(pattern)
        };
        let entry = Entry::new(wanted.context, FI_RECV | kind_flag(tagged));
        let Some(message) = found else {
            let (tag, _) = wanted.tag.unwrap_or_default();
            let entry = Entry { tag, ..entry };
            return cx.push(queue, entry.failed(FI_ENOMSG));
        };
        let data = message.data.map_or(0, |_| FI_REMOTE_CQ_DATA);
        let entry = Entry {
            flags: entry.flags | data,
            len: usize::try_from(message.length).unwrap_or(usize::MAX),
            data: message.data.unwrap_or(0),
            tag: message.envelope.tag,
            source: message.envelope.source,
            ..entry
        };
        if wanted.flags & FI_DISCARD != 0
            && !claim
            && let Some(message) = self.matching(tagged).take_message(pattern)
        {
            self.refuse(cx, &message);
        }
        cx.push(queue, entry);
    }

    /// Discards a message that the program has claimed before (`FI_CLAIM`).
    pub(super) fn discard(
        &mut self,
        cx: &mut Shared,
        wanted: &Wanted,
        message: &Message,
        tagged: bool,
    ) {
        self.refuse(cx, message);
        let entry = Entry {
            tag: message.envelope.tag,
            source: message.envelope.source,
            ..Entry::new(wanted.context, FI_RECV | kind_flag(tagged))
        };
        cx.push(self.binding.receive_queue, entry);
    }

    /// Discards a message. If it was announced, its sender completes it without writing it.
    pub(super) fn refuse(&mut self, cx: &mut Shared, message: &Message) {
        if let Content::Announced(announcement) = message.content {
            self.answer(cx, message.from, Header::grant_of_nothing(announcement.id));
        }
    }

    /// Returns the memory for a message of `length` bytes. The rest of a multi-receive buffer remains for other messages.
    pub(super) fn target(&mut self, receive: &Receive, length: u64) -> Target {
        let mut memory = receive.memory;
        if let Some(multi) = receive.multi.and_then(|m| self.multis.get_mut(m)) {
            memory = receive.memory.behind(multi.used);
            let room = memory.len();
            let used = usize::try_from(length).unwrap_or(usize::MAX).min(room);
            multi.used += used;
            multi.underway += 1;
            multi.over = room - used < self.binding.multi_min.max(1);
        }
        Target {
            context: receive.context,
            memory,
            reported: receive.reported,
            multi: receive.multi,
        }
    }

    /// Handles a message that was matched with a receive.
    pub(super) fn land(&mut self, cx: &mut Shared, target: Target, tagged: bool, message: Message) {
        let arrived = Arrived {
            from: message.from,
            source: message.envelope.source,
            tagged,
            tag: message.envelope.tag,
            data: message.data,
            length: message.length,
        };
        match message.content {
            Content::Here(bytes) => {
                let len = target.memory.write(0, &bytes);
                self.received(cx, &target, &arrived, len, 0);
            }
            Content::Announced(announcement) => self.transfer(cx, target, arrived, announcement),
        }
    }

    /// Reports that a message was received, or has failed.
    pub(super) fn received(
        &mut self,
        cx: &mut Shared,
        target: &Target,
        m: &Arrived,
        len: usize,
        err: i32,
    ) {
        let mut flags = FI_RECV | kind_flag(m.tagged);
        if m.data.is_some() {
            flags |= FI_REMOTE_CQ_DATA;
        }
        let mut last = false;
        if let Some(name) = target.multi
            && let Some(multi) = self.multis.get_mut(name)
        {
            multi.underway = multi.underway.saturating_sub(1);
            if multi.over && multi.underway == 0 {
                last = true;
                flags |= FI_MULTI_RECV;
                self.multis.remove(name);
            }
        }
        let olen = usize::try_from(m.length).unwrap_or(usize::MAX) - len;
        let err = if err == 0 && olen > 0 { FI_ETRUNC } else { err };
        cx.count(self.counter(Counts::Receive), err != 0);
        if target.reported || err != 0 || last {
            let entry = Entry {
                context: target.context,
                flags,
                len,
                buf: target.memory.parts().next().map_or(0, |(at, _)| at),
                data: m.data.unwrap_or(0),
                tag: m.tag,
                source: m.source,
                err,
                olen,
            };
            cx.push(self.binding.receive_queue, entry);
        }
    }

    /// Starts the transfer of an announced message that was matched with a receive.
    pub(super) fn transfer(
        &mut self,
        cx: &mut Shared,
        target: Target,
        message: Arrived,
        announcement: Announcement,
    ) {
        match announcement.source {
            Some(source) => self.fetch(cx, target, message, announcement.id, source),
            None => self.grant(cx, target, message, announcement.id),
        }
    }

    /// Grants the memory of a receive to the sender of an announced message. A message that is empty or cannot be received is answered
    /// by a grant without memory, because the sender completes its request only when a grant arrives.
    pub(super) fn grant(&mut self, cx: &mut Shared, target: Target, message: Arrived, id: u32) {
        let wanted = usize::try_from(message.length).unwrap_or(usize::MAX);
        let granted = wanted.min(target.memory.len());
        if wanted == 0 {
            self.answer(cx, message.from, Header::grant_of_nothing(id));
            return self.received(cx, &target, &message, 0, 0);
        }
        let link = self.link_for_writes(message.from).filter(|_| granted > 0);
        let (region, aside, base) = match self.prepare(cx, &target, message.from, granted, link) {
            Ok(prepared) => prepared,
            Err(why) => {
                self.answer(cx, message.from, Header::grant_of_nothing(id));
                self.received(cx, &target, &message, 0, why);
                return;
            }
        };
        let rkey = region.as_ref().map_or(0, Region::rkey);
        let from = message.from;
        let incoming = Incoming {
            target,
            message,
            id,
            granted,
            placed: 0,
            base,
            region,
            link: None,
            aside,
        };
        match self.incoming.insert(incoming) {
            Ok(name) => {
                let mut header = Header::new(Kind::Grant);
                header.id = id;
                if let Some(link_index) = link {
                    header.flags |= LINKED;
                    header.length = granted as u64;
                    header.data = base;
                    return self.bind_window(cx, link_index, name, header);
                }
                header.length = granted as u64;
                header.tag = u64::from(rkey) << 32 | u64::from(name);
                header.data = base;
                self.answer(cx, from, header);
            }
            Err(mut incoming) => {
                // The memory is deregistered before the completion is reported.
                incoming.region = None;
                self.answer(cx, from, Header::grant_of_nothing(id));
                self.received(cx, &incoming.target, &incoming.message, 0, FI_ENOMEM);
            }
        }
    }

    /// Registers the memory for a granted message. Returns the region, a separate buffer if the receive has several
    /// elements, and the base address.
    pub(super) fn prepare(
        &self,
        cx: &Shared,
        target: &Target,
        from: Remote,
        granted: usize,
        link: Option<usize>,
    ) -> Result<(Option<Region>, Option<Area>, u64), i32> {
        if granted == 0 {
            return Ok((None, None, 0));
        }
        let mut parts = target.memory.range(0, granted);
        let (at, aside) = match (parts.next(), parts.next()) {
            (Some((_, at, _)), None) => (at, None),
            _ => {
                let area = Area::new(granted).ok_or(FI_ENOMEM)?;
                (area.address(0), Some(area))
            }
        };
        let access = if link.is_some() {
            Access::Window
        } else {
            Access::RemoteSink
        };
        // SAFETY: the memory belongs to this library, or to the program, which does not access it until the receive has completed.
        let region = unsafe { Region::new(&cx.pd, at, granted, access) }?;
        if link.is_none() {
            region.restrict_to(from)?;
        }
        Ok((Some(region), aside, at as u64))
    }

    /// Cancels a receive. Returns whether there was one.
    pub fn cancel(&mut self, cx: &mut Shared, context: usize) -> bool {
        for tagged in [true, false] {
            let fits = |r: &Receive| r.context == context;
            if let Some(receive) = self.matching(tagged).cancel(fits) {
                self.ended(cx, &receive, tagged, FI_ECANCELED);
                return true;
            }
        }
        false
    }

    /// Ends a posted receive, which gets no more messages, and reports `err` for it.
    pub(super) fn ended(&mut self, cx: &mut Shared, receive: &Receive, tagged: bool, err: i32) {
        if let Some(name) = receive.multi
            && let Some(multi) = self.multis.get_mut(name)
        {
            multi.over = true;
            if multi.underway > 0 {
                // Messages are still being written to the buffer. `err` is not reported: the completion of the last of them has
                // FI_MULTI_RECV, which tells the program that the buffer is free.
                return;
            }
            self.multis.remove(name);
        }
        cx.count(self.counter(Counts::Receive), true);
        let entry = Entry::new(receive.context, FI_RECV | kind_flag(tagged));
        cx.push(self.binding.receive_queue, entry.failed(err));
    }

    /// Changes the sources of posted receives. The first index of each pair was removed from the address vector, and the second one is
    /// another index of the same peer.
    pub fn move_sources(&mut self, moved: &[(FiAddr, FiAddr)]) {
        for (from, to) in moved {
            self.tagged.move_source(*from, *to);
            self.untagged.move_source(*from, *to);
        }
    }

    /// Updates the sources of stored messages, after the address vector has changed.
    pub fn renew_sources(&mut self, cx: &Shared) {
        let Some(vector) = self.binding.vector.and_then(|v| cx.vectors.get(v)) else {
            return;
        };
        self.tagged.renew_sources(|peer| vector.find(peer));
        self.untagged.renew_sources(|peer| vector.find(peer));
    }
}
