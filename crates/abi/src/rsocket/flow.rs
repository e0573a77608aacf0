//! Flow control of a stream socket, without I/O: the sending and the receiving half.
//!
//! Each end has a ring that the peer writes into. The peer is granted half of the ring at first, and another half whenever
//! that many bytes are free and not granted. Each message consumes a posted receive, so the peer needs a *credit* for it: a permission
//! to send one message. The receiver ([`Receiver`]) sets both limits, and the sender ([`Sender`]) keeps within them.
//! The connection to a peer that exceeds a limit is closed.

use std::collections::VecDeque;

use super::wire::{AREAS, Area};

/// The number of send queue entries that are kept for control requests: messages with credits, or with the end of the stream, and
/// RDMA Writes that enter granted memory in the peer's list of free memory. At most this many control messages are in flight.
pub(super) const CONTROL: u32 = 4;

/// A violation of flow control by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Violation {
    /// The peer wrote more bytes than it was granted memory for.
    Bytes {
        /// The bytes that the peer's message announces.
        announced: u32,
        /// The bytes that were granted to the peer.
        allowed: usize,
    },
    /// The peer sent more messages than it had credits for.
    Messages,
    /// The peer sent a message of a wrong length, or of an unknown kind.
    Message,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes { announced, allowed } => {
                write!(
                    f,
                    "the peer announced {announced} written bytes, but it was granted memory for {allowed}"
                )
            }
            Self::Messages => f.write_str("the peer sent more messages than it had credits for"),
            Self::Message => {
                f.write_str("the peer sent a message of a wrong length or of an unknown kind")
            }
        }
    }
}

/// A part of a ring, in up to two pieces: offset and length.
pub(super) type Pieces = [(usize, usize); 2];

/// Returns the pieces of `len` bytes from `at` on in a ring of `size` bytes.
fn pieces(size: usize, at: usize, len: usize) -> Pieces {
    let first = len.min(size - at.min(size));
    [(at, first), (0, len - first)]
}

/// The sending half of a stream.
#[derive(Debug)]
pub(super) struct Sender {
    /// The number of messages sent, modulo 2^16.
    sent: u16,
    /// The number of the first message that must not be sent yet.
    limit: u16,
    /// The unused part of the memory that the peer has granted.
    target: Area,
    /// The index of the entry to use next in the list of free memory. The peer writes its grants into this list.
    slot: usize,
    /// The number of free send queue entries for data.
    requests: u32,
    /// The number of free send queue entries for control requests.
    control: u32,
    /// The size of the ring with copies of the bytes in flight.
    size: usize,
    /// The position of the next copy in the ring.
    at: usize,
    /// The number of free bytes of the ring.
    free: usize,
}

impl Sender {
    /// Returns a sender with `requests` send queue entries and a ring of `size` bytes. Nothing may be sent before [`Self::begin`].
    pub(super) fn new(requests: u32, size: usize) -> Self {
        Self {
            sent: 0,
            limit: 0,
            target: Area::default(),
            slot: 0,
            requests,
            control: CONTROL,
            size,
            at: 0,
            free: size,
        }
    }

    /// Sets the first memory, which takes the place of entry 0 of the list, and the first credits that the peer grants.
    pub(super) fn begin(&mut self, credits: u16, data: Area) {
        self.limit = credits;
        self.target = data;
        self.slot = 1;
    }

    /// Sets the number of the first message that must not be sent yet.
    pub(super) fn set_limit(&mut self, limit: u16) {
        self.limit = limit;
    }

    /// Returns whether a message may be sent that uses `requests` send queue entries. [`CONTROL`] credits are kept in
    /// reserve: a control message consumes a receive too, and the peer may have posted only as many receives as it granted
    /// credits.
    fn may_send(&self, requests: u32) -> bool {
        self.requests >= requests && u32::from(self.limit.wrapping_sub(self.sent)) > CONTROL
    }

    /// Returns whether enough bytes of the ring are free to make a send worthwhile.
    fn enough(&self) -> bool {
        self.free >= (self.size / 4).min(2048)
    }

    /// Returns the number of bytes of the stream that may be sent now. `next` takes an entry from the list of free memory if
    /// the peer has filled it.
    pub(super) fn room(&mut self, next: impl FnOnce(usize) -> Option<Area>) -> usize {
        if !self.may_send(2) || !self.enough() {
            return 0;
        }
        if self.target.len == 0
            && let Some(area) = next(self.slot)
        {
            self.target = area;
            self.slot = (self.slot + 1) % AREAS as usize;
        }
        self.free.min(self.target.len as usize)
    }

    /// Returns the number of bytes that may be written to a mapping of the peer (`riomap`) now.
    pub(super) fn room_direct(&self) -> usize {
        if self.may_send(2) && self.enough() {
            self.free
        } else {
            0
        }
    }

    /// Consumes `len` bytes of the granted memory, at most as many as [`Self::room`] returned. Returns where to write them.
    pub(super) fn take_target(&mut self, len: usize) -> Area {
        let len = u32::try_from(len).unwrap_or(0).min(self.target.len);
        let area = Area { len, ..self.target };
        // The sum may wrap: the peer chooses the numbers, which are addresses of its process.
        self.target.addr = self.target.addr.wrapping_add(len.into());
        self.target.len -= len;
        self.sent = self.sent.wrapping_add(1);
        self.requests -= 2;
        area
    }

    /// Uses a send queue entry for a write to a mapping.
    pub(super) fn take_direct(&mut self) {
        self.requests -= 1;
    }

    /// Uses the credit and the send queue entries of a message that announces a mapping. Returns false if it must wait.
    pub(super) fn take_mapping(&mut self) -> bool {
        if !self.may_send(2) {
            return false;
        }
        self.sent = self.sent.wrapping_add(1);
        self.requests -= 2;
        true
    }

    /// Allocates `len` bytes of the ring for a copy.
    pub(super) fn take_ring(&mut self, len: usize) -> Pieces {
        let len = len.min(self.free);
        let taken = pieces(self.size, self.at, len);
        self.at = (self.at + len) % self.size.max(1);
        self.free -= len;
        taken
    }

    /// Uses `n` send queue entries for control requests. Returns false if they must wait.
    pub(super) fn take_control(&mut self, n: u32) -> bool {
        if self.control < n {
            return false;
        }
        self.control -= n;
        true
    }

    /// Releases send queue entries for data and for control requests, and bytes of the ring, after their requests have completed.
    pub(super) fn done(&mut self, requests: u32, control: u32, ring: usize) {
        self.requests += requests;
        self.control += control;
        self.free = (self.free + ring).min(self.size);
    }
}

/// A grant to the peer: credits for messages, and memory to write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grant {
    /// The number of the first message that the peer must not send yet.
    pub(super) limit: u16,
    /// The granted part of the ring (offset and length), and the entry of the peer's list to write it to.
    pub(super) memory: Option<(usize, usize, u32)>,
}

/// The receiving half of a stream.
#[derive(Debug)]
pub(super) struct Receiver {
    /// The size of the ring that the peer writes into.
    size: usize,
    /// The position in the ring of the first unread byte.
    at: usize,
    /// The number of unread bytes.
    readable: usize,
    /// The number of unread bytes of each message.
    messages: VecDeque<u32>,
    /// The number of credits of the peer when all its messages have been read: the number of posted receives without those
    /// for control messages.
    credits: u16,
    /// The number of messages read, modulo 2^16.
    read: u16,
    /// The value of `read` at which the peer gets new credits.
    credits_due_at: u16,
    /// The number of messages that the peer may still send.
    allowed: u32,
    /// The number of bytes that the peer may still write.
    granted: usize,
    /// The number of bytes of the ring that are free and not granted.
    free: usize,
    /// The position of the next grant in the ring.
    grant_at: usize,
    /// The number of entries of the peer's list of free memory.
    slots: u32,
    /// The entry of that list to fill next.
    slot: u32,
}

impl Receiver {
    /// Returns a receiver with a ring of `size` bytes and `credits` messages. Half of the ring is granted from the start.
    pub(super) fn new(credits: u16, size: usize) -> Self {
        let half = size / 2;
        Self {
            size: half * 2,
            at: 0,
            readable: 0,
            messages: VecDeque::new(),
            credits,
            read: 0,
            credits_due_at: credits / 2,
            allowed: credits.into(),
            granted: half,
            free: half,
            grant_at: half,
            slots: AREAS,
            slot: 1,
        }
    }

    /// Sets the number of entries of the peer's list.
    pub(super) fn begin(&mut self, slots: u32) {
        self.slots = slots.max(1);
        self.slot = 1 % self.slots;
    }

    /// Returns the number of bytes that the peer may write.
    pub(super) fn granted(&self) -> usize {
        self.granted
    }

    /// Returns the number of bytes that can be read.
    pub(super) fn readable(&self) -> usize {
        self.readable
    }

    /// Counts a message of the peer. Fails if the peer has no credit for it.
    fn count(&mut self) -> Result<(), Violation> {
        self.allowed = self.allowed.checked_sub(1).ok_or(Violation::Messages)?;
        Ok(())
    }

    /// Records a message of the peer that announces `len` written bytes.
    // The check of `granted` ensures that the program reads no bytes of the ring that the peer was not allowed to write.
    pub(super) fn data(&mut self, len: u32) -> Result<(), Violation> {
        self.count()?;
        self.granted = self
            .granted
            .checked_sub(len as usize)
            .ok_or(Violation::Bytes {
                announced: len,
                allowed: self.granted,
            })?;
        self.readable += len as usize;
        // An empty message that arrives while no message is unread counts as read at once. Otherwise it would be removed only when bytes
        // that arrive later are read, and perhaps none arrive.
        if len == 0 && self.messages.is_empty() {
            self.read = self.read.wrapping_add(1);
        } else {
            self.messages.push_back(len);
        }
        Ok(())
    }

    /// Records a message that uses a credit and announces no bytes of the stream.
    pub(super) fn mapped(&mut self) -> Result<(), Violation> {
        self.data(0)
    }

    /// Returns the pieces of the first `len` readable bytes.
    pub(super) fn front(&self, len: usize) -> Pieces {
        pieces(self.size, self.at, len.min(self.readable))
    }

    /// Records that `len` bytes were read.
    pub(super) fn consume(&mut self, len: usize) {
        let len = len.min(self.readable);
        self.readable -= len;
        self.free += len;
        self.at = (self.at + len) % self.size.max(1);
        let mut left = u32::try_from(len).unwrap_or(u32::MAX);
        while let Some(first) = self.messages.front_mut() {
            if *first > left {
                *first -= left;
                break;
            }
            left -= *first;
            self.messages.pop_front();
            self.read = self.read.wrapping_add(1);
        }
    }

    /// Returns the number of send queue entries that the next grant needs: 2 with memory (a Write into the peer's list, and the
    /// message with the credits), 1 without, 0 if no grant is due.
    pub(super) fn wants(&self) -> u32 {
        let half = self.size / 2;
        if half > 0 && self.free >= half {
            2
        } else {
            u32::from(self.read.wrapping_sub(self.credits_due_at) < 1 << 15)
        }
    }

    /// Makes the next grant.
    pub(super) fn grant(&mut self) -> Grant {
        let half = self.size / 2;
        let memory = (half > 0 && self.free >= half).then(|| {
            let memory = (self.grant_at, half, self.slot);
            self.free -= half;
            self.granted += half;
            self.grant_at = (self.grant_at + half) % self.size;
            self.slot = (self.slot + 1) % self.slots;
            memory
        });
        self.credits_due_at = self.read.wrapping_add(self.credits / 2);
        let unread = u32::try_from(self.messages.len()).unwrap_or(u32::MAX);
        self.allowed = u32::from(self.credits).saturating_sub(unread);
        Grant {
            limit: self.read.wrapping_add(self.credits),
            memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sender of one end, the receiver of the other, and the messages in flight between them.
    struct Pair {
        tx: Sender,
        rx: Receiver,
        list: [Option<Area>; 2],
        on_the_way: VecDeque<(u32, Vec<u8>)>,
        done: VecDeque<(u32, u32, usize)>,
        ring: Vec<u8>,
        memory: Vec<u8>,
        words: VecDeque<Grant>,
    }

    const KEY: u32 = 77;
    const BASE: u64 = 0x1000;

    impl Pair {
        fn new(credits: u16, requests: u32, tx: usize, rx: usize) -> Self {
            let mut pair = Self {
                tx: Sender::new(requests, tx),
                rx: Receiver::new(credits, rx),
                list: [None; 2],
                on_the_way: VecDeque::new(),
                done: VecDeque::new(),
                ring: vec![0; tx],
                memory: vec![0; rx],
                words: VecDeque::new(),
            };
            assert_eq!(pair.tx.room(|_| None), 0, "the peer is not known");
            let data = Area {
                addr: BASE,
                key: KEY,
                len: (rx / 2) as u32,
            };
            pair.tx.begin(credits, data);
            pair.rx.begin(2);
            pair
        }

        fn send(&mut self, bytes: &[u8]) -> usize {
            let list = &mut self.list;
            let n = self.tx.room(|slot| list[slot].take()).min(bytes.len());
            if n == 0 {
                return 0;
            }
            let area = self.tx.take_target(n);
            assert_eq!((area.key, area.len as usize), (KEY, n));
            let parts = self.tx.take_ring(n);
            let mut left = &bytes[..n];
            let mut copied = Vec::new();
            for (at, len) in parts {
                self.ring[at..at + len].copy_from_slice(&left[..len]);
                copied.extend_from_slice(&self.ring[at..at + len]);
                left = &left[len..];
            }
            let at = (area.addr - BASE) as usize;
            assert!(at + n <= self.memory.len(), "{at} + {n}");
            self.on_the_way.push_back((at as u32, copied));
            self.done.push_back((2, 0, n));
            n
        }

        fn arrive(&mut self) {
            if let Some((at, bytes)) = self.on_the_way.pop_front() {
                let at = at as usize;
                self.memory[at..at + bytes.len()].copy_from_slice(&bytes);
                self.rx.data(bytes.len() as u32).unwrap();
            }
        }

        fn read(&mut self, len: usize, out: &mut Vec<u8>) {
            let len = len.min(self.rx.readable());
            for (at, n) in self.rx.front(len) {
                out.extend_from_slice(&self.memory[at..at + n]);
            }
            self.rx.consume(len);
            while self.rx.wants() > 0 {
                let grant = self.rx.grant();
                self.words.push_back(grant);
            }
        }

        fn deliver_word(&mut self) {
            if let Some(grant) = self.words.pop_front() {
                if let Some((at, len, slot)) = grant.memory {
                    let area = Area {
                        addr: BASE + at as u64,
                        key: KEY,
                        len: len as u32,
                    };
                    let before = self.list[slot as usize].replace(area);
                    assert_eq!(
                        before, None,
                        "an entry that the sender has not used is overwritten"
                    );
                }
                self.tx.set_limit(grant.limit);
            }
        }

        fn complete(&mut self) {
            if let Some((requests, control, ring)) = self.done.pop_front() {
                self.tx.done(requests, control, ring);
            }
        }
    }

    fn random(state: &mut u64) -> usize {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 20) as usize
    }

    /// In any order of events, every byte arrives once and at the right position, and the stream never stalls.
    #[test]
    fn a_stream_arrives_unchanged() {
        for seed in 1..60_u64 {
            let mut r = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let credits = 16 + (random(&mut r) % 50) as u16;
            let requests = 16 + (random(&mut r) % 50) as u32;
            let (tx, rx) = (64 + random(&mut r) % 5000, 2 * (8 + random(&mut r) % 3000));
            let mut pair = Pair::new(credits, requests, tx, rx);
            let total = 200_000;
            let sent: Vec<u8> = (0..total).map(|i| (i * 7 + i / 251) as u8).collect();
            let (mut at, mut got, mut turns) = (0, Vec::new(), 0);
            while got.len() < total {
                turns += 1;
                assert!(
                    turns < 4_000_000,
                    "seed {seed}: stuck at {at}, {}",
                    got.len()
                );
                match random(&mut r) % 5 {
                    0 => {
                        let n = 1 + random(&mut r) % 900;
                        let end = (at + n).min(total);
                        at += pair.send(&sent[at..end]);
                    }
                    1 => pair.arrive(),
                    2 => pair.read(1 + random(&mut r) % 1500, &mut got),
                    3 => pair.deliver_word(),
                    _ => pair.complete(),
                }
            }
            assert_eq!(got, sent, "seed {seed}");
        }
    }

    #[test]
    fn a_peer_that_reports_too_many_written_bytes_is_detected() {
        let mut rx = Receiver::new(16, 1000);
        rx.data(400).unwrap();
        let wrong = rx.data(101).unwrap_err();
        assert_eq!(
            wrong,
            Violation::Bytes {
                announced: 101,
                allowed: 100
            }
        );
        // Reading frees memory. The peer may use it only after the next grant.
        rx.consume(400);
        assert_eq!(rx.wants(), 2);
        assert!(rx.data(101).is_err());
        let grant = rx.grant();
        assert_eq!(grant.memory, Some((500, 500, 1)));
        rx.data(101).unwrap();
        assert!(rx.data(u32::MAX).is_err());
    }

    /// Returns a receiver that has granted its whole ring: the first half at the start, the second half by a grant.
    fn begun() -> Receiver {
        let mut rx = Receiver::new(16, 1000);
        assert_eq!(rx.wants(), 2);
        assert_eq!(rx.grant().memory, Some((500, 500, 1)));
        assert_eq!(rx.wants(), 0);
        rx
    }

    #[test]
    fn a_peer_that_exceeds_its_credits_is_detected() {
        let mut rx = begun();
        for _ in 0..16 {
            rx.data(1).unwrap();
        }
        assert_eq!(rx.data(1), Err(Violation::Messages));
        rx.consume(8);
        assert_eq!(rx.wants(), 1);
        assert_eq!(
            rx.grant(),
            Grant {
                limit: 24,
                memory: None
            }
        );
        for _ in 0..8 {
            rx.data(1).unwrap();
        }
        assert_eq!(rx.data(1), Err(Violation::Messages));
    }

    /// A message without bytes uses a credit and does not end the stream.
    #[test]
    fn empty_messages_are_counted_and_not_read() {
        let mut rx = begun();
        for _ in 0..8 {
            rx.data(0).unwrap();
        }
        assert_eq!((rx.readable(), rx.wants()), (0, 1));
        rx.data(3).unwrap();
        rx.mapped().unwrap();
        rx.data(2).unwrap();
        rx.consume(4);
        assert_eq!(rx.readable(), 1);
        assert_eq!(rx.grant().limit, 10 + 16);
    }

    #[test]
    fn numbers_of_messages_wrap() {
        let mut pair = Pair::new(16, 64, 4096, 4096);
        let mut got = Vec::new();
        for i in 0..70_000_u32 {
            assert_eq!(pair.send(&[i as u8]), 1, "{i}");
            pair.arrive();
            pair.read(1, &mut got);
            while !pair.words.is_empty() {
                pair.deliver_word();
            }
            pair.complete();
        }
        assert_eq!(got.len(), 70_000);
    }

    #[test]
    fn control_messages_are_limited() {
        let mut tx = Sender::new(16, 100);
        assert!(tx.take_control(2));
        assert!(tx.take_control(2));
        assert!(!tx.take_control(1));
        tx.done(0, 2, 0);
        assert!(tx.take_control(1));
    }
}
