//! Handling of completions of the device, of messages from peers, and of peers that do not respond.
//!
//! An *announced* message stays at its sender until the receiver *grants* memory for it, to which the sender then writes it. A *link*
//! is a reliable connection between two busy endpoints (`link.rs`). A *held* message cannot be handled yet (`held.rs`).

use super::*;

/// How often the device is polled before a request is refused because the send queue is full.
const PROGRESS_TRIES: u32 = 4;

impl Endpoint {
    /// Calls `post`. If the send queue is full, handles completions of the device, which may free entries, and tries again.
    ///
    /// Several polls may be needed: if both ends of a link are in one process, one poll sends the
    /// acknowledgement of the other end, and the next poll receives it.
    pub(super) fn post_or_progress(
        &mut self,
        cx: &mut Shared,
        post: impl Fn(&mut Self, &mut Shared) -> Result<(), i32>,
    ) -> Result<(), i32> {
        let mut posted = post(self, cx);
        for _ in 0..PROGRESS_TRIES {
            if posted != Err(FI_EAGAIN) {
                break;
            }
            self.progress(cx);
            posted = post(self, cx);
        }
        posted
    }

    /// Handles completions of the device.
    /// Returns whether there may be more completions of the device.
    pub fn progress(&mut self, cx: &mut Shared) -> bool {
        if !self.enabled {
            return false;
        }
        self.send_deferred(cx);
        if !self.postponed.is_empty() {
            self.send_postponed(cx);
        }
        self.take_held(cx);
        self.release(cx);
        if self.links.any_broken {
            self.mend_links(cx);
        }
        let mut batch = [Wc::default(); limits::BATCH];
        // If the program does not read its completions, no more messages are received, and their senders have to wait.
        let queue = self.binding.receive_queue.and_then(|q| cx.queues.get(q));
        let mut n = 0;
        if !queue.is_some_and(Queue::is_full) {
            n = self.cq.poll(&mut batch);
            for wc in batch.iter().take(n) {
                self.completed(cx, wc);
            }
        }
        if self.waits_for_peers() {
            self.ask(cx);
        }
        n == batch.len()
    }

    /// Returns whether an operation waits for an answer of a peer, which may have ended.
    pub fn waits_for_peers(&self) -> bool {
        let waits = !self.incoming.is_empty() || !self.ops.is_empty() || self.links.any_broken;
        waits || !self.questions.is_empty()
    }

    pub(super) fn send_deferred(&mut self, cx: &mut Shared) {
        while let Some(first) = self.deferred.pop_front() {
            let done = match &first {
                Deferred::Answer(to, header, content) if content.is_empty() => {
                    self.try_answer(cx, *to, header)
                }
                Deferred::Answer(to, header, content) => self.try_reply(cx, *to, header, content),
                Deferred::Write(op) => self.write_granted(cx, *op),
                Deferred::Access(op) => self.post_access(cx, *op) != Err(FI_EAGAIN),
                Deferred::Fetch(op) => self.post_fetch(cx, *op),
                Deferred::Notice(to, header, done) => self.try_notify(cx, *to, header, *done),
            };
            if !done {
                self.deferred.push_front(first);
                return;
            }
            if let Deferred::Answer(to, header, _) = &first {
                self.answer_sent(*to, header);
            }
        }
    }

    pub(super) fn completed(&mut self, cx: &mut Shared, wc: &Wc) {
        let err = error_of(wc);
        let kind = wc.wr_id >> KIND;
        if kind >= LINK_SEND {
            return self.completed_on_link(cx, wc, err);
        }
        if err == 0 {
            match kind_of(wc) {
                Of::Receive => return self.arrived(cx, wc),
                Of::Record => return self.recorded(cx, wc),
                Of::Request => {}
            }
        }
        if kind == RECEIVE {
            if !std::mem::replace(&mut self.failed, true) {
                crate::log::warn(&format!(
                    "the queue pair of endpoint {} has failed with status {}: open another endpoint",
                    self.name, wc.status
                ));
                self.end_all(cx);
            }
            return;
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        if err == FI_EREMOTEIO && !std::mem::replace(&mut self.refused, true) {
            crate::log::warn(
                "a peer refuses messages: FI_ANYWARP_QKEY must be the same for all processes of a job, and so must the \
                 version of libanywarp-fi.so",
            );
        }
        let name = u32::try_from(wc.wr_id & u64::from(u32::MAX)).unwrap_or(u32::MAX);
        self.request_completed(cx, kind, name, err);
    }

    /// Handles the completion of a request that belongs to the operation `name`.
    pub(super) fn request_completed(&mut self, cx: &mut Shared, kind: u64, name: u32, err: i32) {
        if kind == ANNOUNCE && err == 0 {
            if let Some(Op::Announced { known, offer, .. }) = self.ops.get_mut(name) {
                *known = true;
                if *offer == Offer::Taken {
                    self.end_announced(cx, name);
                }
            }
            return;
        }
        if err == 0 && (self.post_next_piece(cx, name) || self.waits_for_confirmation(name)) {
            return;
        }
        let Some(op) = self.ops.remove(name) else {
            return;
        };
        match op {
            Op::Sent {
                done,
                slot,
                confirmation,
                ..
            } => {
                self.free_slots.extend(slot);
                // The receiver has confirmed the message, so it is delivered whatever became of the device's acknowledgement.
                let is_delivered = confirmation == Confirmation::Device;
                self.finish_or_report(cx, done, if is_delivered { 0 } else { err });
            }
            Op::OneSided {
                done, slot, notice, ..
            } => {
                self.free_slots.extend(slot);
                match notice {
                    Some((to, header)) if err == 0 => self.notify(cx, to, header, done),
                    _ => self.finish(cx, &done, err),
                }
            }
            Op::Announced { done, to, .. } => {
                self.finish_or_report(cx, done, err);
                self.lost(cx, to, err);
            }
            Op::Fetch {
                target,
                message,
                id,
                regions,
                length,
                ..
            } => {
                // The memory is deregistered before the completion is reported.
                drop(regions);
                self.fetched(cx, &target, &message, id, length, err);
            }
            Op::Notified { done, .. } => self.finish(cx, &done, err),
            Op::Probe { to } => self.lost(cx, to, err),
            Op::Answer { slot, to } => {
                self.free_slots.extend(slot);
                self.lost(cx, to, err);
            }
            Op::Request { slot, of } => {
                self.free_slots.extend(slot);
                self.requested(cx, of, err);
            }
            Op::Atomic { .. } | Op::CloseNotice { .. } => {}
        }
    }

    /// Called when the device has delivered a message. Returns whether its receiver has not confirmed it.
    fn waits_for_confirmation(&mut self, name: u32) -> bool {
        let Some(Op::Sent {
            slot, confirmation, ..
        }) = self.ops.get_mut(name)
        else {
            return false;
        };
        if *confirmation != Confirmation::Both {
            return false;
        }
        *confirmation = Confirmation::Receiver;
        self.free_slots.extend(slot.take());
        true
    }

    /// When a piece of an operation has completed, posts the next. Returns false if there is none.
    fn post_next_piece(&mut self, cx: &mut Shared, name: u32) -> bool {
        let next = match self.ops.get(name) {
            Some(Op::Announced {
                grant: Some(grant),
                written,
                ..
            }) if *written < grant.length => Deferred::Write(name),
            Some(Op::OneSided { memory, posted, .. }) if *posted < memory.len() => {
                Deferred::Access(name)
            }
            Some(Op::Fetch { length, posted, .. }) if posted < length => Deferred::Fetch(name),
            _ => return false,
        };
        self.deferred.push_back(next);
        self.send_deferred(cx);
        true
    }

    /// Reports the end of an operation. A failure is reported even if a completion was reported before.
    pub(super) fn finish_or_report(&self, cx: &mut Shared, done: Option<Done>, err: i32) {
        match done {
            Some(done) => self.finish(cx, &done, err),
            None if err != 0 => {
                let done = Done {
                    context: 0,
                    flags: FI_SEND,
                    reported: true,
                    counts: Counts::Send,
                };
                self.finish(cx, &done, err);
            }
            None => {}
        }
    }

    /// Records that the request for an atomic operation was delivered, or has failed.
    pub(super) fn requested(&mut self, cx: &mut Shared, name: u32, err: i32) {
        if err == 0 {
            if let Some(Op::Atomic { known, .. }) = self.ops.get_mut(name) {
                *known = true;
            }
        } else if let Some(Op::Atomic { done, to, .. }) = self.ops.remove(name) {
            self.finish(cx, &done, err);
            self.lost(cx, to, err);
        }
    }

    /// Ends the operations that wait for a peer that does not respond.
    pub(super) fn lost(&mut self, cx: &mut Shared, peer: Remote, err: i32) {
        if err != FI_EHOSTUNREACH && err != FI_ECONNRESET {
            return;
        }
        self.credit.forget(peer);
        self.lose_link(cx, |of| of == peer, err);
        self.end_waiting(cx, |of| of == peer, err);
        self.tagged.forget_announced(peer);
        self.untagged.forget_announced(peer);
    }

    /// Called when the queue pair has failed and receives nothing more. Ends the operations that wait for messages. The
    /// device completes its requests, and new operations are refused.
    fn end_all(&mut self, cx: &mut Shared) {
        self.lose_link(cx, |_| true, FI_EIO);
        self.end_waiting(cx, |_| true, FI_EIO);
        for tagged in [true, false] {
            let posted: Vec<Receive> = self.matching(tagged).cancel_all().collect();
            for receive in &posted {
                self.ended(cx, receive, tagged, FI_EIO);
            }
        }
    }

    /// Ends the operations that wait for messages from the selected peers.
    fn end_waiting(&mut self, cx: &mut Shared, which: impl Fn(Remote) -> bool, err: i32) {
        // An operation with a request in the device ends with the completion of that request.
        let waiting = self.ops.iter().filter(|(_, op)| {
            matches!(op, Op::Announced { to, .. } | Op::Atomic { to, .. } | Op::Sent { to, .. } if which(*to))
        });
        let waiting: Vec<u32> = waiting.map(|(name, _)| name).collect();
        for name in waiting {
            self.end_unanswered(cx, name, err);
        }
        let incoming = self.incoming.iter();
        let incoming = incoming.filter(|(_, i)| which(i.message.from));
        let incoming: Vec<u32> = incoming.map(|(name, _)| name).collect();
        for name in incoming {
            self.end_incoming(cx, name, err);
        }
    }

    pub(super) fn arrived(&mut self, cx: &mut Shared, wc: &Wc) {
        let at = usize::try_from(wc.wr_id & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        let length = wc.byte_len as usize;
        // SAFETY: the receive has completed and is posted again below.
        let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
        let (route, message) = datagram.split_at(datagram.len().min(ROUTE_HEADER));
        let Some(ip) = source_of(route) else {
            return self.again(at);
        };
        let from = Remote { ip, qpn: wc.src_qp };
        let Some((header, _)) = Header::decode(message) else {
            if self.bad == 0 {
                let version = message.first().copied().unwrap_or(0);
                crate::log::warn(&format!(
                    "a message from {from} is dropped: its header is invalid (version {version}, ours {VERSION}); both ends \
                     must have the same libanywarp-fi.so"
                ));
            }
            self.bad = self.bad.wrapping_add(1);
            return self.again(at);
        };
        match header.kind {
            Kind::Eager | Kind::Announce | Kind::Atomic => {
                let held = Held {
                    receive: at,
                    link: None,
                    follows_link: self.links.receives_from(from),
                    length,
                    from,
                };
                if header.kind != Kind::Atomic {
                    let announced = header.kind == Kind::Announce;
                    self.count_message(cx, from, if announced { header.length } else { 0 });
                }
                if !self.held.is_empty() || !self.take(cx, &held) {
                    self.held.push_back(held);
                    let _posted = self.post_receives();
                    self.take_held(cx);
                    return;
                }
            }
            Kind::Link => self.link_step(cx, from, &header),
            Kind::Grant => self.granted(cx, from, &header),
            Kind::Taken => self.taken(cx, from, &header),
            // A peer may send this message although the program has not requested remote writes. It is ignored then.
            Kind::Written if self.binding.caps & FI_REMOTE_WRITE == 0 => {}
            Kind::Written => {
                cx.count(self.counter(Counts::RemoteWrite), false);
                let entry = Entry {
                    len: usize::try_from(header.length).unwrap_or(usize::MAX),
                    data: header.data,
                    source: self.source(cx, from),
                    ..Entry::new(0, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)
                };
                cx.push(self.binding.receive_queue, entry);
            }
            Kind::AtomicDone => self.operated(cx, from, &header, at, length),
            Kind::Hold => self.handle_hold(cx, from, &header),
            Kind::Ask => self.asked(cx, from, &header, at, length),
            Kind::Unknown => self.end_unknown(cx, from, &header, at, length),
            Kind::Probe => {}
        }
        self.again(at);
    }

    pub(super) fn again(&mut self, at: usize) {
        self.used_receives.push(at);
        // While messages are kept in receives of the device, few receives are free, so each used
        // one is posted again at once.
        if self.used_receives.len() >= limits::REPOST || !self.held.is_empty() {
            // This fails only if the queue pair has failed, in which case nothing more is received.
            let _posted = self.post_receives();
        }
    }

    /// Returns whether the stored unexpected messages have reached their limit.
    pub(super) fn is_crowded(&self) -> bool {
        self.tagged.bytes() + self.untagged.bytes() > limits::UNEXPECTED
    }

    /// Handles the messages that were kept in receives of the device, in order.
    pub(super) fn take_held(&mut self, cx: &mut Shared) {
        for _ in 0..self.held.len() {
            let Some(held) = self.held.pop_front() else {
                return;
            };
            if self.take(cx, &held) {
                self.release_receive(&held);
            } else {
                self.held.push_back(held);
            }
        }
    }

    /// Handles a message: matches it with a receive, stores it, or executes its request. Returns whether the device's receive can be
    /// posted again.
    pub(super) fn take(&mut self, cx: &mut Shared, held: &Held) -> bool {
        let (at, length, from) = (held.receive, held.length, held.from);
        let source = self.source(cx, from);
        let message = match held.link {
            Some(link) => {
                let first = self.held.has_datagram_before_link(from);
                match self.links.message(link, at, length) {
                    // Earlier messages of the peer that came without the link are handled first.
                    Some(_) if first => return false,
                    Some(Ok(message)) => message,
                    // Earlier messages of the peer have not arrived yet.
                    Some(Err(())) => return false,
                    None => return true,
                }
            }
            None => {
                // SAFETY: the receive has completed and is not posted again yet.
                let datagram = unsafe { self.receives.received(at.saturating_mul(STRIDE), length) };
                datagram.get(ROUTE_HEADER..).unwrap_or_default()
            }
        };
        let Some((header, content)) = Header::decode(message) else {
            return true;
        };
        if header.kind == Kind::Atomic {
            let room = self.deferred.len() < limits::DEFERRED;
            if room {
                self.operate(cx, from, &header, at, length);
            }
            return room;
        }
        // The link has failed, and its last messages wait. The datagram was sent after them.
        if held.follows_link && self.held.has_message_on_link(from) {
            return false;
        }
        let crowded = self.is_crowded();
        let tagged = header.has(TAGGED);
        let envelope = Envelope {
            source,
            tag: if tagged { header.tag } else { 0 },
        };
        let data = header.has(DATA).then_some(header.data);
        let arrived = Arrived {
            from,
            source,
            tagged,
            tag: envelope.tag,
            data,
            length: header.length,
        };
        let announced = header.kind == Kind::Announce;
        let announcement = Announcement::new(&header, content);
        // An announcement needs room for its answer. Later messages wait too, so that none overtakes it.
        if self.deferred.len() >= limits::DEFERRED {
            return false;
        }
        let matching = if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        };
        let Some((index, receive)) = matching.receive_for(&envelope) else {
            // A sender that may store no more messages has ignored the notice that its share is used up (`credit.rs`), and its messages
            // are dropped. There are two exceptions. A message on a link stays in the link's receive, which delays only the messages of
            // this peer: the sender may not have read the notice yet, because the notice is a datagram. And the sender is not at fault
            // while the notice still waits for room in the send queue.
            let excused = held.link.is_some() || self.notice_waits(from);
            if crowded || excused && !self.may_store(from) {
                return false;
            }
            if !self.may_store(from) {
                self.ignored(cx, from);
                return true;
            }
            let content = if announced {
                Content::Announced(announcement)
            } else {
                Content::Here(content.to_vec())
            };
            self.matching(tagged).keep(Message {
                envelope,
                from,
                length: header.length,
                data,
                content,
            });
            self.after_storing(cx, from);
            self.confirm(cx, from, &header);
            if announced {
                self.correct(cx, from, header.length);
            }
            return true;
        };
        let receive = *receive;
        if announced {
            let target = self.target(&receive, header.length);
            if self.is_over(&receive) {
                self.matching(tagged).remove_receive(index);
            }
            self.transfer(cx, target, arrived, announcement);
            self.correct(cx, from, header.length);
            return true;
        }
        // The content is in a receive of the device, which `target` and `received` do not access.
        let mut memory = receive.memory;
        if let Some(multi) = receive.multi.and_then(|m| self.multis.get(m)) {
            memory = memory.behind(multi.used);
        }
        let len = memory.write(0, content);
        let target = self.target(&receive, header.length);
        if self.is_over(&receive) {
            self.matching(tagged).remove_receive(index);
        }
        self.received(cx, &target, &arrived, len, 0);
        self.confirm(cx, from, &header);
        true
    }

    /// Confirms a message that has been received or stored, if its sender requests this.
    fn confirm(&mut self, cx: &mut Shared, from: Remote, header: &Header) {
        if header.kind == Kind::Eager && header.has(CONFIRMED) {
            let mut answer = Header::new(Kind::Taken);
            answer.id = header.id;
            self.answer(cx, from, answer);
        }
    }

    /// Handles a grant: the peer allows writing an announced message.
    pub(super) fn granted(&mut self, cx: &mut Shared, from: Remote, header: &Header) {
        let Some(Op::Announced {
            to,
            memory,
            grant: grant @ None,
            offer: Offer::None | Offer::Open,
            ..
        }) = self.ops.get_mut(header.id)
        else {
            return;
        };
        if *to != from {
            return;
        }
        let [rkey, word] = [header.tag >> 32, header.tag & u64::from(u32::MAX)];
        let most = memory.len();
        *grant = Some(Grant {
            linked: header.has(LINKED),
            rkey: u32::try_from(rkey).unwrap_or(0),
            word: u32::try_from(word).unwrap_or(0),
            base: header.data,
            length: usize::try_from(header.length).unwrap_or(most).min(most),
        });
        if !self.deferred.is_empty() || !self.write_granted(cx, header.id) {
            self.deferred.push_back(Deferred::Write(header.id));
        }
    }

    /// Handles the record of a peer's write.
    pub(super) fn recorded(&mut self, cx: &mut Shared, wc: &Wc) {
        let Some(record) = self.qp.record() else {
            return;
        };
        debug_assert_eq!(
            record.qpn, wc.src_qp,
            "records come in the order of their completions"
        );
        let Some(name) = record.word else {
            return; // A write of a program that does not use this library.
        };
        if self.incoming.get(name).is_some_and(|i| fits(i, &record)) {
            self.placed(cx, name, record.length as usize);
        } else {
            self.bad = self.bad.wrapping_add(1);
        }
    }

    /// Handles the end of a write to granted memory.
    pub(super) fn placed(&mut self, cx: &mut Shared, name: u32, length: usize) {
        let Some(incoming) = self.incoming.get_mut(name) else {
            return;
        };
        incoming.placed += length;
        if incoming.placed < incoming.granted {
            return;
        }
        let Some(mut incoming) = self.incoming.remove(name) else {
            return;
        };
        // The memory is deregistered before the completion is reported.
        incoming.region = None;
        if let Some(aside) = &incoming.aside {
            // SAFETY: the region was deregistered, so the device does not write to the memory any more.
            let bytes = unsafe { aside.received(0, incoming.granted) };
            incoming.target.memory.write(0, bytes);
        }
        self.received(cx, &incoming.target, &incoming.message, incoming.granted, 0);
    }

    /// Ends all operations, because the endpoint is being closed.
    pub fn close(&mut self, cx: &mut Shared) {
        let tagged: Vec<Receive> = self.tagged.cancel_all().collect();
        let untagged: Vec<Receive> = self.untagged.cancel_all().collect();
        drop((tagged, untagged));
        // A full queue must not keep the last messages from being sent.
        self.binding.receive_queue = None;
        self.links.begin_close();
        let last = Instant::now() + limits::LINGER_MOST;
        let mut until = Instant::now() + limits::LINGER;
        self.progress(cx);
        self.ask_for_acknowledgements(cx);
        self.notify_peers_of_close(cx);
        let is_done = |e: &Self| (e.is_idle() || e.is_left_alone()) && !e.owes_content();
        let mut least = self.unfinished();
        while !is_done(self) && Instant::now() < until.min(last) {
            self.progress(cx);
            if self.unfinished() < least {
                least = self.unfinished();
                until = Instant::now() + limits::LINGER;
            }
        }
    }
}

/// Returns whether a record belongs to the next piece of the granted write.
fn fits(incoming: &Incoming, record: &Record) -> bool {
    let base = incoming.base.wrapping_add(incoming.placed as u64);
    let same_memory = incoming
        .region
        .as_ref()
        .is_none_or(|r| r.rkey() == record.rkey && base == record.base);
    let next = (incoming.granted - incoming.placed).min(limits::PIECE);
    incoming.link.is_none()
        && incoming.message.from.qpn == record.qpn
        && next == record.length as usize
        && same_memory
}
