//! Limits for unexpected messages, which have no posted receive yet. Each sender may store a limited number of bytes in this
//! endpoint: its *share*. This endpoint has such a share in each of its peers. A sender that was notified that its share is used
//! up announces all its messages: their content stays at the sender until a receive matches.

use std::collections::HashMap;

use super::*;

/// The state of both directions.
#[derive(Debug, Default)]
pub(super) struct Credit {
    /// Peers where the share of this endpoint is used up. Each message that is announced to such a peer holds a clone of the `Arc`,
    /// whose reference count is compared with the limit of such messages.
    used_up: HashMap<Remote, Arc<()>>,
    /// Each copy of an injected message holds a clone of this `Arc`, whose reference count is compared with the limit of copies.
    copies: Arc<()>,
    /// Senders that were notified that their share is used up.
    notified: HashMap<Remote, Notice>,
    /// Whether some sender has ignored its notice. Only the first message that is dropped for this reason is logged.
    ignored: bool,
}

/// The notice to a sender that its share is used up.
#[derive(Debug, Clone, Copy)]
struct Notice {
    /// The bytes that the sender had stored when the notice was sent.
    stored: usize,
    /// The stored bytes at which the notice is sent again: another endpoint may have replaced the sender at its address, or the sender did
    /// not have this endpoint in its address vector.
    repeat_at: usize,
    /// Whether the notice waits for room in the send queue.
    waits: bool,
    /// The number of messages that were dropped because of it.
    dropped: u32,
}

impl Notice {
    fn new(stored: usize, waits: bool) -> Self {
        Self {
            stored,
            repeat_at: stored + limits::LATE / 4,
            waits,
            dropped: 0,
        }
    }
}

impl Credit {
    /// Returns whether messages to a peer must be announced.
    pub(super) fn is_used_up(&self, to: Remote) -> bool {
        !self.used_up.is_empty() && self.used_up.contains_key(&to)
    }

    /// Counts an announced message until the result is dropped. `FI_EAGAIN` if the peer has to receive earlier ones first.
    pub(super) fn announce(&self, to: Remote) -> Result<Option<Arc<()>>, i32> {
        match self.used_up.get(&to) {
            Some(count) if Arc::strong_count(count) > limits::ANNOUNCED => Err(FI_EAGAIN),
            count => Ok(count.map(Arc::clone)),
        }
    }

    /// Copies the content of an injected message, and makes `memory` refer to the copy. `FI_EAGAIN` if there are too many
    /// copies.
    pub(super) fn copy(&self, memory: &mut UserMemory) -> Result<(Vec<u8>, Arc<()>), i32> {
        if Arc::strong_count(&self.copies) > limits::COPIES {
            return Err(FI_EAGAIN);
        }
        let mut bytes = vec![0; memory.len()];
        memory.read(0, &mut bytes);
        // SAFETY: the caller keeps the copy until the operation has completed. Its address does not change when it is moved.
        *memory = unsafe { UserMemory::one(bytes.as_ptr().cast(), bytes.len()) };
        Ok((bytes, Arc::clone(&self.copies)))
    }

    /// Forgets that this endpoint has notified a peer, because the peer is lost. A notice that came from the peer stays valid: the peer
    /// may be alive, and then drops messages that ignore its notice. If another endpoint has replaced the peer at its address, that
    /// endpoint takes the notice back (`correct`).
    pub(super) fn forget(&mut self, peer: Remote) {
        self.notified.remove(&peer);
    }
}

impl Endpoint {
    fn stored_of(&self, sender: Remote) -> usize {
        self.tagged.bytes_of(sender) + self.untagged.bytes_of(sender)
    }

    /// Returns the bytes that each sender may store.
    fn share(&self) -> usize {
        let used = self.tagged.bytes() + self.untagged.bytes();
        (limits::SHARED.saturating_sub(used) / 2).max(limits::SHARE_MIN)
    }

    /// Returns whether one more message of a sender may be stored. If not, the sender has ignored the notice.
    pub(super) fn may_store(&self, from: Remote) -> bool {
        let then = self.credit.notified.get(&from);
        then.is_none_or(|then| self.stored_of(from) <= then.stored + limits::LATE)
    }

    /// Returns whether there is a notice to a sender that is not sent yet.
    pub(super) fn notice_waits(&self, from: Remote) -> bool {
        self.credit.notified.get(&from).is_some_and(|n| n.waits)
    }

    /// Called when a message that has waited for room in the send queue is sent.
    pub(super) fn answer_sent(&mut self, to: Remote, header: &Header) {
        if header.kind == Kind::Hold && header.length == 1 {
            let stored = self.stored_of(to);
            if let Some(notice) = self.credit.notified.get_mut(&to)
                && notice.waits
            {
                *notice = Notice::new(stored, false);
            }
        }
    }

    /// Counts a message of a sender that ignores the notice, which is sent again after 1, 2, 4, … such messages.
    pub(super) fn ignored(&mut self, cx: &mut Shared, from: Remote) {
        if let Some(notice) = self.credit.notified.get_mut(&from) {
            notice.dropped = notice.dropped.saturating_add(1);
            if notice.dropped.is_power_of_two() {
                self.hold(cx, from, true);
            }
        }
        if !std::mem::replace(&mut self.credit.ignored, true) {
            crate::log::warn(&format!(
                "messages of {from} are dropped: it has sent more unexpected messages than it may"
            ));
        }
        self.bad = self.bad.wrapping_add(1);
    }

    /// Called after a message was stored. Notifies its sender if the sender's share is used up.
    pub(super) fn after_storing(&mut self, cx: &mut Shared, from: Remote) {
        let stored = self.stored_of(from);
        if let Some(notice) = self.credit.notified.get_mut(&from) {
            if !notice.waits && stored > notice.repeat_at {
                notice.repeat_at = stored + limits::LATE / 4;
                self.hold(cx, from, true);
            }
            return;
        }
        if stored > self.share() {
            self.hold(cx, from, true);
            let waits = !self.deferred.is_empty();
            let notice = Notice::new(stored, waits);
            self.credit.notified.insert(from, notice);
        }
    }

    /// Tells senders whose messages have been received that they need not announce all messages any more.
    pub(super) fn release(&mut self, cx: &mut Shared) {
        if self.credit.notified.is_empty() {
            return;
        }
        let least = self.share() / 2;
        let notified = self.credit.notified.keys().copied();
        let free: Vec<Remote> = notified
            .filter(|from| self.stored_of(*from) <= least)
            .collect();
        for from in free {
            self.credit.notified.remove(&from);
            self.hold(cx, from, false);
        }
    }

    /// Called for an announced message. A sender announces short messages only after a receiver has notified it that its share is
    /// used up. If this endpoint has not done so, an earlier endpoint with the same address has, and this endpoint tells the sender
    /// to send short messages with their content again.
    pub(super) fn correct(&mut self, cx: &mut Shared, from: Remote, length: u64) {
        let short = length <= limits::EAGER as u64;
        if short && !self.credit.notified.contains_key(&from) && self.deferred.is_empty() {
            self.hold(cx, from, false);
        }
    }

    fn hold(&mut self, cx: &mut Shared, from: Remote, on: bool) {
        let mut header = Header::new(Kind::Hold);
        header.length = u64::from(on);
        self.answer(cx, from, header);
    }

    /// Handles a peer's notice about the share of this endpoint at that peer.
    pub(super) fn handle_hold(&mut self, cx: &Shared, from: Remote, header: &Header) {
        if header.length == 0 {
            self.credit.used_up.remove(&from);
        } else if self.source(cx, from) != FI_ADDR_NOTAVAIL {
            // Messages are sent only to peers in the address vector, so notices of other peers are ignored. Otherwise any number
            // of peers could add entries.
            self.credit.used_up.entry(from).or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_notice_of_a_lost_peer_stays_valid() {
        let peer = Remote {
            ip: std::net::Ipv4Addr::LOCALHOST.into(),
            qpn: 1,
        };
        let mut credit = Credit::default();
        credit.used_up.entry(peer).or_default();
        credit.notified.insert(peer, Notice::new(0, false));
        credit.forget(peer);
        assert!(credit.is_used_up(peer) && !credit.notified.contains_key(&peer));
    }
}
