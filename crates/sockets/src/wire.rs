//! The protocol of an upgraded connection: private data of the MPA start-up, and the header of each Send.
//!
//! ```text
//!  private data: "aSK2" | version | flags | 0 (2) | window (4) | longest (4) | namespace (8) | 0 (4)
//!  Send:         kind (1) | flags (1) | 0 (2) | limit (4) | payload
//! ```
//!
//! Each Send is one DDP segment in one FPDU, with a payload of at most [`LONGEST`] bytes. The *limit* is the total number of payload
//! bytes, modulo 2^32, up to which the receiver of the limit may send.
//!
//! Flag 1 of a Reply refuses the upgrade: plain TCP follows in both directions. Between the Request and the Reply, the connecting end
//! sends only early messages ([`Tx::early`]), if its program closes the stream or ends before the Reply arrives. Flag 2 of a Request or
//! Reply means that its sender accepts offers of shared memory ([`crate::memory`]).

use crate::limits;
use crate::memory::{Mark, Offer};
use anywarp_core::error::PeerError;
use anywarp_core::llp::mpa::crc::Crc32c;
use anywarp_core::llp::mpa::deframe::{CRC, Extent, LENGTH, verify};
use anywarp_core::wire::ddp::{Header, Untagged};
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Msn, QN_SEND, Stag};

/// The length of the private data in bytes.
pub const PRIVATE: usize = 28;
const MAGIC: &[u8; 4] = b"aSK2";
const VERSION: u8 = 1;

/// The length of the header of a Send in bytes.
const KIND_HEADER: usize = 8;
/// The bytes of an FPDU before its payload.
pub const HEAD: usize = LENGTH + Untagged::LEN + KIND_HEADER;
/// The most bytes of an FPDU after its payload: padding and CRC.
pub const TAIL: usize = 3 + CRC;
/// The longest payload of one Send in bytes. With its headers it fills the longest ULPDU that anywarp sends.
pub const LONGEST: usize = anywarp_core::bounds::MULPDU_ANYWARP - Untagged::LEN - KIND_HEADER;

/// The private data of a Request or Reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Private {
    /// Payload bytes that the peer may send before it gets a higher limit.
    pub window: u32,
    /// The longest payload of one Send that this end accepts, in bytes.
    pub longest: u32,
    /// Reserved for a number that identifies the network namespace: sent as 0, and not used.
    pub namespace: u64,
    /// In a Reply: the upgrade is refused, and plain TCP follows.
    pub plain: bool,
    /// This end accepts offers of shared memory.
    pub memory: bool,
}

/// The flag of [`Private::plain`].
const PLAIN: u8 = 1;
/// The flag of [`Private::memory`].
const MEMORY: u8 = 2;

impl Private {
    /// Returns the bytes on the wire.
    pub fn emit(&self) -> [u8; PRIVATE] {
        let mut b = [0; PRIVATE];
        let flags = (u8::from(self.plain) * PLAIN) | (u8::from(self.memory) * MEMORY);
        let fields: [&[u8]; 6] = [
            MAGIC,
            &[VERSION, flags, 0, 0],
            &self.window.to_be_bytes(),
            &self.longest.to_be_bytes(),
            &self.namespace.to_be_bytes(),
            &[0; 4],
        ];
        for (place, byte) in b.iter_mut().zip(fields.iter().copied().flatten()) {
            *place = *byte;
        }
        b
    }

    /// Parses private data. Returns `None` if it is of another protocol or of an unknown version, or if its window or its longest payload
    /// is 0.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let (window, rest) = rest.split_first_chunk::<4>()?;
        let (longest, rest) = rest.split_first_chunk::<4>()?;
        let (namespace, rest) = rest.split_first_chunk::<8>()?;
        let known = magic == MAGIC && kind.first() == Some(&VERSION) && rest.len() == 4;
        let private = Self {
            window: u32::from_be_bytes(*window),
            longest: u32::from_be_bytes(*longest),
            namespace: u64::from_be_bytes(*namespace),
            plain: kind.get(1).is_some_and(|flags| flags & PLAIN != 0),
            memory: kind.get(1).is_some_and(|flags| flags & MEMORY != 0),
        };
        (known && private.window > 0 && private.longest > 0).then_some(private)
    }
}

/// The kinds of Send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Payload of the stream.
    Data = 0,
    /// Only a new limit.
    Limit = 1,
    /// The end of the data: `shutdown(SHUT_WR)`.
    End = 2,
    /// The stream is broken.
    Reset = 3,
    /// One urgent byte.
    Urgent = 4,
    /// An offer of shared memory, into which the sender of the offer will put payload.
    Offer = 5,
    /// The sender has put payload into the shared memory.
    Memory = 6,
    /// The last message of its sender, which sends plain TCP from then on. The receiver sends its pending data and then answers
    /// with a Plain message of its own.
    Plain = 7,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Data,
            1 => Self::Limit,
            2 => Self::End,
            3 => Self::Reset,
            4 => Self::Urgent,
            5 => Self::Offer,
            6 => Self::Memory,
            7 => Self::Plain,
            _ => return None,
        })
    }
}

/// The length of the payload of an Offer message: process, descriptor, nonce.
const OFFER: usize = 16;

/// Returns the payload of an Offer message.
pub fn offer_payload(offer: &Offer) -> [u8; OFFER] {
    let mut b = [0; OFFER];
    let (pid, rest) = b.split_at_mut(4);
    let (fd, nonce) = rest.split_at_mut(4);
    pid.copy_from_slice(&offer.pid.to_be_bytes());
    fd.copy_from_slice(&offer.fd.to_be_bytes());
    nonce.copy_from_slice(&offer.nonce.to_be_bytes());
    b
}

fn parse_offer(bytes: &[u8; OFFER]) -> Option<Offer> {
    let (pid, rest) = bytes.split_first_chunk::<4>()?;
    let (fd, rest) = rest.split_first_chunk::<4>()?;
    let nonce = rest.first_chunk::<8>()?;
    Some(Offer {
        pid: u32::from_be_bytes(*pid),
        fd: u32::from_be_bytes(*fd),
        nonce: u64::from_be_bytes(*nonce),
    })
}

/// The sending side: builds FPDUs and keeps sequence numbers and credit.
#[derive(Debug)]
pub struct Tx {
    msn: Msn,
    /// The number of payload bytes sent, modulo 2^32.
    sent: u32,
    has_sent: bool,
    /// The number of payload bytes that may be sent in total, modulo 2^32.
    limit: u32,
    /// The least credit with which the stream is reported as writable.
    low: usize,
    crc: bool,
    longest: usize,
}

impl Tx {
    /// Returns the state for a peer with the private data `peer`.
    pub fn new(peer: &Private, crc: bool) -> Self {
        Self {
            msn: Msn::FIRST,
            sent: 0,
            has_sent: false,
            limit: peer.window,
            low: (peer.window as usize / 2).max(1),
            crc,
            longest: (peer.longest as usize).min(LONGEST),
        }
    }

    /// Returns the state for a peer whose Reply has not arrived. Each message has a CRC, because the peer may require it.
    pub fn early() -> Self {
        let peer = Private {
            window: limits::EARLY_BYTES as u32,
            longest: LONGEST as u32,
            namespace: 0,
            plain: false,
            memory: false,
        };
        Self::new(&peer, true)
    }

    /// Continues after early messages, according to the peer's Reply.
    pub fn after_reply(self, peer: &Private, crc: bool) -> Self {
        Self {
            msn: self.msn,
            sent: self.sent,
            has_sent: self.has_sent,
            ..Self::new(peer, crc)
        }
    }

    /// Returns whether payload was sent. Otherwise the peer has no reason to send a limit.
    pub fn has_sent(&self) -> bool {
        self.has_sent
    }

    /// Returns the number of payload bytes that may be sent now.
    pub fn credit(&self) -> usize {
        self.limit.wrapping_sub(self.sent) as usize
    }

    /// Returns whether there is credit for a write of usual length: half of the peer's initial window. A peer that has read
    /// everything has always granted this much. With less, a blocking write could block after `poll` reported the socket as
    /// writable.
    pub fn has_room(&self) -> bool {
        self.credit() >= self.low
    }

    /// Returns the longest payload of one Send in bytes.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Records a new limit from the peer. A limit that is lower than the last, or allows 2^31 bytes or more, is an error.
    fn raise(&mut self, limit: u32) -> Result<(), Broken> {
        if limit.wrapping_sub(self.sent) > i32::MAX as u32
            || limit.wrapping_sub(self.limit) > i32::MAX as u32
        {
            return Err(Broken::Limit);
        }
        self.limit = limit;
        Ok(())
    }

    /// Returns the bytes before and after the payload of an FPDU. The state changes only in [`Self::went`].
    pub fn frame<'a>(
        &self,
        kind: Kind,
        limit: u32,
        payload: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> Frame {
        let len: usize = payload.clone().map(<[u8]>::len).sum();
        let ulpdu = Untagged::LEN + KIND_HEADER + len;
        let length = u16::try_from(ulpdu).unwrap_or(u16::MAX).to_be_bytes();
        let ddp = Untagged {
            last: true,
            opcode: Opcode::Send,
            inv_stag: Stag(0),
            qn: QN_SEND,
            msn: self.msn,
            mo: 0,
        };
        let mut head = [0; HEAD];
        let (place, rest) = head.split_at_mut(LENGTH);
        place.copy_from_slice(&length);
        let (place, rest) = rest.split_at_mut(Untagged::LEN);
        place.copy_from_slice(&ddp.emit());
        let (place, rest) = rest.split_at_mut(KIND_HEADER / 2);
        place.copy_from_slice(&[kind as u8, 0, 0, 0]);
        rest.copy_from_slice(&limit.to_be_bytes());
        let pad = Extent { ulpdu, pad: 0 }.total().wrapping_neg() % 4;
        let mut tail = [0; TAIL];
        if self.crc {
            let mut crc = Crc32c::new();
            crc.update(&head);
            payload.for_each(|part| crc.update(part));
            crc.update(tail.get(..pad).unwrap_or(&[]));
            let field = crc.finish();
            for (place, byte) in tail.iter_mut().skip(pad).zip(field) {
                *place = byte;
            }
        }
        Frame {
            head,
            tail,
            tail_len: pad + CRC,
            payload: len,
            credit: match kind {
                Kind::Data | Kind::Urgent => len as u32,
                _ => 0,
            },
        }
    }

    /// Records that `n` payload bytes were put into the shared memory.
    pub fn put(&mut self, n: usize) {
        self.has_sent |= n > 0;
        self.sent = self.sent.wrapping_add(n as u32);
    }

    /// Records that the FPDU was written to the TCP connection or queued for it.
    pub fn went(&mut self, frame: &Frame) {
        self.msn = self.msn.next();
        self.has_sent |= frame.credit > 0;
        self.sent = self.sent.wrapping_add(frame.credit);
    }
}

/// Returns the head of a data message without its length and limit.
fn data_head(msn: Msn) -> [u8; HEAD - LENGTH - 4] {
    let ddp = Untagged {
        last: true,
        opcode: Opcode::Send,
        inv_stag: Stag(0),
        qn: QN_SEND,
        msn,
        mo: 0,
    };
    let mut head = [0; HEAD - LENGTH - 4];
    let (place, rest) = head.split_at_mut(Untagged::LEN);
    place.copy_from_slice(&ddp.emit());
    rest.copy_from_slice(&[Kind::Data as u8, 0, 0, 0]);
    head
}

/// An FPDU around a payload.
#[derive(Debug)]
pub struct Frame {
    /// The bytes before the payload.
    pub head: [u8; HEAD],
    tail: [u8; TAIL],
    tail_len: usize,
    payload: usize,
    /// The number of bytes of the stream that the FPDU carries.
    credit: u32,
}

impl Frame {
    /// Returns the bytes after the payload.
    pub fn tail(&self) -> &[u8] {
        self.tail.get(..self.tail_len).unwrap_or(&[])
    }

    /// Returns the length of the FPDU in bytes.
    pub fn total(&self) -> usize {
        HEAD + self.payload + self.tail_len
    }
}

/// Why a stream is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Broken {
    /// The peer violated MPA, DDP or RDMAP.
    Peer(PeerError),
    /// A message that is not the next Send in one segment, or whose length does not suit its kind.
    Message,
    /// A Send of a kind that does not exist.
    Kind,
    /// A limit that is lower than the last, or larger than a window can be.
    Limit,
    /// More payload than the limit allows.
    Credit,
    /// The peer sent a Reset message.
    Reset,
    /// Data after the End message.
    AfterEnd,
    /// Too many messages in succession that change nothing.
    Flood,
    /// The peer announces more bytes than the memory can hold, or sends a Memory message although no memory was accepted.
    Memory,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Peer(e) => write!(f, "{e}"),
            Self::Message => f.write_str("the peer sent a message that is not the next Send"),
            Self::Kind => f.write_str("the peer sent a message of an unknown kind"),
            Self::Limit => {
                f.write_str("the peer sent a limit that is lower than the last, or too large")
            }
            Self::Credit => f.write_str("the peer sent more than its limit allows"),
            Self::Reset => f.write_str("the peer reset the stream"),
            Self::Memory => {
                f.write_str("the peer announced bytes that cannot be in the shared memory")
            }
            Self::Flood => {
                f.write_str("the peer sent too many messages without payload in succession")
            }
            Self::AfterEnd => f.write_str("the peer sent data after the end of its stream"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Head,
    Payload,
    Tail,
    /// After a [`Kind::Plain`] message.
    Plain,
}

/// The receiving side: parses FPDUs that arrive in pieces of any length.
#[derive(Debug)]
pub struct Rx {
    at: At,
    head: [u8; HEAD],
    /// The number of received bytes of the head.
    have: usize,
    /// The length of the payload, and the number of its bytes that are missing.
    payload: usize,
    left: usize,
    /// The length of the last payload, or 0 after a Memory message.
    last: usize,
    tail: [u8; TAIL],
    tail_len: usize,
    /// The payload of an Offer or Memory message.
    short: [u8; OFFER],
    kind: Kind,
    msn: Msn,
    crc: Option<Crc32c>,
    with_crc: bool,
    /// The number of payload bytes received, modulo 2^32.
    received: u32,
    /// The number of payload bytes that the peer may send in total, modulo 2^32.
    granted: u32,
    ended: bool,
    /// The numbers of payload bytes received and sent, modulo 2^32, when the last message arrived.
    moved: (u32, u32),
    /// The number of messages that have arrived since one of these numbers changed.
    idle: u32,
}

/// Receives the parsed contents of a stream.
pub trait Sink {
    /// Called with payload. With CRCs enabled the payload is valid only after [`Self::verified`].
    fn data(&mut self, bytes: &[u8]);
    /// Called when the CRC of all payload so far was correct.
    fn verified(&mut self);
    /// Called with an urgent byte.
    fn urgent(&mut self, byte: u8);
    /// Called with an offer of memory.
    fn offer(&mut self, offer: Offer);
    /// Called when the peer announces that it has filled the memory up to `mark`. Returns the number of new bytes: those that were
    /// neither announced before nor found in the memory ([`Rx::found`]).
    ///
    /// # Errors
    /// The mark is impossible, or there are more than `open` new bytes.
    fn memory(&mut self, mark: Mark, open: u32) -> Result<u32, Broken>;
}

impl Rx {
    /// Returns the state for a peer that may send `window` bytes.
    pub fn new(window: u32, crc: bool) -> Self {
        Self {
            at: At::Head,
            head: [0; HEAD],
            have: 0,
            payload: 0,
            left: 0,
            last: 0,
            tail: [0; TAIL],
            tail_len: 0,
            short: [0; OFFER],
            kind: Kind::Data,
            msn: Msn::FIRST,
            crc: None,
            with_crc: crc,
            received: 0,
            granted: window,
            ended: false,
            moved: (0, 0),
            idle: 0,
        }
    }

    /// Returns the number of payload bytes that may be received directly into the program's memory: the missing bytes of the current
    /// payload, or 0 with CRCs.
    pub fn straight(&self) -> usize {
        if self.at == At::Payload && self.kind == Kind::Data && !self.with_crc {
            self.left
        } else {
            0
        }
    }

    /// Returns the expected length of the next payload: that of the last one. Returns 0 within a message, or with CRCs.
    pub fn expected(&self) -> usize {
        if self.is_between() && !self.with_crc {
            self.last
        } else {
            0
        }
    }

    /// Returns whether the last payload was so long that it is worth being received directly.
    pub fn is_long(&self) -> bool {
        self.last > limits::COPIED && !self.with_crc
    }

    /// Records that `n` payload bytes were received directly into the program's memory; at most [`Self::straight`].
    pub fn went_straight(&mut self, n: usize) {
        self.left = self.left.saturating_sub(n);
        if self.left == 0 {
            self.at = At::Tail;
        }
    }

    /// Returns whether CRCs are enabled.
    pub fn has_crc(&self) -> bool {
        self.with_crc
    }

    /// Returns whether the stream is between two FPDUs, where it may end.
    pub fn is_between(&self) -> bool {
        self.at == At::Head && self.have == 0
    }

    /// Returns the number of bytes that are missing in the current part of a message: its head,
    /// payload or tail. Bytes up to this number belong to the current message.
    pub fn missing(&self) -> usize {
        match self.at {
            At::Head => HEAD - self.have,
            At::Payload => self.left,
            At::Tail => self.tail_len - self.have,
            At::Plain => 0,
        }
    }

    /// Returns whether the peer sends plain TCP from here on.
    pub fn is_plain(&self) -> bool {
        self.at == At::Plain
    }

    /// Returns whether the peer has sent its last byte.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the number of payload bytes that the peer may still send.
    pub fn open(&self) -> u32 {
        self.granted.wrapping_sub(self.received)
    }

    /// Returns the number of payload bytes that the peer may send in total, modulo 2^32.
    pub fn granted(&self) -> u32 {
        self.granted
    }

    /// Grants `n` more bytes. Returns the new limit.
    pub fn grant(&mut self, n: u32) -> u32 {
        self.granted = self.granted.wrapping_add(n);
        self.granted
    }

    /// If `bytes` are exactly one data message without CRCs and with payload, handles it like [`Self::feed`] and returns its
    /// payload. Otherwise returns `None` and changes nothing.
    #[inline]
    pub fn whole<'a>(&mut self, bytes: &'a [u8], tx: &mut Tx) -> Option<&'a [u8]> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let len = bytes.len().checked_sub(HEAD + CRC)?;
        let extent = Extent::of(head)?;
        // Between payload and CRC there may be padding.
        let len = len.checked_sub(extent.pad)?;
        let limit = head.last_chunk().map(|b| u32::from_be_bytes(*b))?;
        let is_next = len > 0
            && self.is_between()
            && !self.with_crc
            && !self.ended
            && extent.ulpdu == Untagged::LEN + KIND_HEADER + len
            && head.get(LENGTH..HEAD - 4) == Some(&data_head(self.msn))
            && len as u32 <= self.open();
        if !is_next || tx.raise(limit).is_err() {
            return None;
        }
        self.received = self.received.wrapping_add(len as u32);
        self.last = len;
        self.msn = self.msn.next();
        self.kind = Kind::Data;
        rest.get(..len)
    }

    /// Parses bytes of the stream.
    ///
    /// # Errors
    /// The peer violated the protocol. The state must not be used afterwards.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        tx: &mut Tx,
        sink: &mut impl Sink,
    ) -> Result<(), Broken> {
        loop {
            match self.at {
                // Most heads arrive complete.
                At::Head if self.have == 0 && bytes.len() >= HEAD => {
                    let (now, rest) = bytes.split_at(HEAD);
                    self.head.copy_from_slice(now);
                    bytes = rest;
                    self.begin(tx)?;
                }
                At::Head => {
                    let take = (HEAD - self.have).min(bytes.len());
                    let (now, rest) = bytes.split_at(take);
                    for (place, byte) in self.head.iter_mut().skip(self.have).zip(now) {
                        *place = *byte;
                    }
                    self.have += take;
                    bytes = rest;
                    // A frame that is too short is detected before the rest of its head has arrived.
                    let extent = self.head.get(..self.have).and_then(Extent::of);
                    if extent.is_some_and(|e| e.ulpdu < Untagged::LEN + KIND_HEADER) {
                        return Err(Broken::Message);
                    }
                    if self.have < HEAD {
                        return Ok(());
                    }
                    self.begin(tx)?;
                }
                At::Payload => {
                    if self.left > 0 && bytes.is_empty() {
                        return Ok(());
                    }
                    let take = self.left.min(bytes.len());
                    let (now, rest) = bytes.split_at(take);
                    if let Some(crc) = &mut self.crc {
                        crc.update(now);
                    }
                    match (self.kind, now.first()) {
                        (Kind::Data, Some(_)) => sink.data(now),
                        (Kind::Urgent, Some(byte)) => sink.urgent(*byte),
                        (Kind::Offer | Kind::Memory, Some(_)) => {
                            let from = self.payload - self.left;
                            for (place, byte) in self.short.iter_mut().skip(from).zip(now) {
                                *place = *byte;
                            }
                        }
                        _ => {}
                    }
                    self.left -= take;
                    bytes = rest;
                    if self.left == 0 {
                        self.at = At::Tail;
                    }
                }
                At::Plain => {
                    if !bytes.is_empty() {
                        sink.data(bytes);
                        sink.verified();
                    }
                    return Ok(());
                }
                At::Tail => {
                    let take = (self.tail_len - self.have).min(bytes.len());
                    let (now, rest) = bytes.split_at(take);
                    // Without CRCs the contents do not matter.
                    if self.crc.is_some() {
                        for (place, byte) in self.tail.iter_mut().skip(self.have).zip(now) {
                            *place = *byte;
                        }
                    }
                    self.have += take;
                    bytes = rest;
                    if self.have < self.tail_len {
                        return Ok(());
                    }
                    if let Some(mut crc) = self.crc.take() {
                        let (pad, field) = self.tail.split_at(self.tail_len - CRC);
                        crc.update(pad);
                        verify(crc, field).map_err(Broken::Peer)?;
                    }
                    sink.verified();
                    self.at = At::Head;
                    self.have = 0;
                    match self.kind {
                        Kind::End => self.ended = true,
                        Kind::Reset => return Err(Broken::Reset),
                        Kind::Plain => self.at = At::Plain,
                        Kind::Offer => {
                            if let Some(offer) = parse_offer(&self.short) {
                                sink.offer(offer);
                            }
                        }
                        Kind::Memory => self.announced(sink)?,
                        Kind::Data | Kind::Limit | Kind::Urgent => {}
                    }
                }
            }
        }
    }

    /// Counts `n` bytes that were found in the shared memory before the peer announced them.
    ///
    /// # Errors
    /// There are more than the peer may send.
    pub fn found(&mut self, n: u32) -> Result<(), Broken> {
        if n > self.open() {
            return Err(Broken::Credit);
        }
        self.received = self.received.wrapping_add(n);
        Ok(())
    }

    /// Handles a complete Memory message.
    fn announced(&mut self, sink: &mut impl Sink) -> Result<(), Broken> {
        let mark = self.short.first_chunk().ok_or(Broken::Message)?;
        let n = sink.memory(Mark::parse(*mark), self.open())?;
        self.received = self.received.wrapping_add(n);
        // The next message is expected to be a Memory message too, which is short.
        self.last = 0;
        Ok(())
    }

    /// Counts the messages that have arrived since payload last moved in either direction. A call of the program handles messages until it
    /// finds payload, and would not return if a peer could send any number of messages without payload.
    fn count_idle(&mut self, tx: &Tx) -> Result<(), Broken> {
        let moved = (self.received, tx.sent);
        if moved != self.moved {
            self.moved = moved;
            self.idle = 0;
        }
        self.idle += 1;
        if self.idle > limits::IDLE_MESSAGES {
            return Err(Broken::Flood);
        }
        Ok(())
    }

    /// Handles a complete head.
    fn begin(&mut self, tx: &mut Tx) -> Result<(), Broken> {
        let extent = Extent::of(&self.head).ok_or(Broken::Message)?;
        let len = extent
            .ulpdu
            .checked_sub(Untagged::LEN + KIND_HEADER)
            .ok_or(Broken::Message)?;
        let (header, _) =
            Header::parse(self.head.get(LENGTH..).unwrap_or(&[])).map_err(Broken::Peer)?;
        let Header::Untagged(ddp) = header else {
            return Err(Broken::Message);
        };
        // RFC 5041 §5.3: the messages of a queue are numbered in the order in which they are sent.
        let next = ddp.opcode == Opcode::Send && ddp.last && ddp.mo == 0 && ddp.msn == self.msn;
        if !next {
            return Err(Broken::Message);
        }
        let (kind, limit) = match self.head.last_chunk::<KIND_HEADER>() {
            Some([kind, _, _, _, limit @ ..]) => (Kind::of(*kind), u32::from_be_bytes(*limit)),
            None => (None, 0),
        };
        let kind = kind.ok_or(Broken::Kind)?;
        match kind {
            Kind::Data | Kind::Urgent | Kind::Memory if self.ended => {
                return Err(Broken::AfterEnd);
            }
            Kind::Data | Kind::Urgent if len as u32 > self.open() => return Err(Broken::Credit),
            Kind::Data => {
                self.received = self.received.wrapping_add(len as u32);
                self.last = len;
            }
            Kind::Urgent if len != 1 => return Err(Broken::Message),
            Kind::Urgent => self.received = self.received.wrapping_add(1),
            Kind::Limit | Kind::End | Kind::Reset | Kind::Plain if len != 0 => {
                return Err(Broken::Message);
            }
            Kind::Limit | Kind::End | Kind::Reset | Kind::Plain => {}
            Kind::Offer if len == OFFER => {}
            Kind::Memory if len == Mark::LEN => {}
            Kind::Offer | Kind::Memory => return Err(Broken::Message),
        }
        tx.raise(limit)?;
        self.count_idle(tx)?;
        self.msn = self.msn.next();
        self.kind = kind;
        self.left = len;
        self.payload = len;
        self.tail_len = extent.pad + CRC;
        self.have = 0;
        self.crc = self.with_crc.then(|| {
            let mut crc = Crc32c::new();
            crc.update(&self.head);
            crc
        });
        self.at = At::Payload;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Got;

    fn peer(window: u32) -> Private {
        Private {
            window,
            longest: LONGEST as u32,
            namespace: 7,
            plain: false,
            memory: false,
        }
    }

    fn bytes(tx: &mut Tx, kind: Kind, limit: u32, payload: &[u8]) -> Vec<u8> {
        let frame = tx.frame(kind, limit, std::iter::once(payload));
        tx.went(&frame);
        let all = [&frame.head[..], payload, frame.tail()].concat();
        assert_eq!(all.len(), frame.total());
        assert_eq!(all.len() % 4, 0, "FPDUs are multiples of four bytes");
        all
    }

    fn rx(bytes: &[u8], crc: bool) -> Result<Got, Broken> {
        let mut got = Got::default();
        let mut tx = Tx::new(&peer(100), crc);
        Rx::new(1000, crc).feed(bytes, &mut tx, &mut got)?;
        Ok(got)
    }

    #[test]
    fn private_data_survives_the_wire_and_other_data_is_refused() {
        let b = peer(65536).emit();
        assert_eq!(Private::parse(&b), Some(peer(65536)));
        assert_eq!(Private::parse(&b[..27]), None);
        for at in 0..5 {
            let mut other = b;
            other[at] ^= 1;
            assert_eq!(Private::parse(&other), None, "byte {at}");
        }
        assert_eq!(Private::parse(&peer(0).emit()), None);
        let refusal = Private {
            plain: true,
            ..peer(1)
        };
        assert_eq!(Private::parse(&refusal.emit()), Some(refusal));
        let with_memory = Private {
            memory: true,
            ..peer(1)
        };
        assert_eq!(Private::parse(&with_memory.emit()), Some(with_memory));
    }

    #[test]
    fn memory_is_offered_and_its_bytes_are_announced() {
        let offer = Offer {
            pid: 1,
            fd: 0x0102_0304,
            nonce: 0x1122_3344_5566_7788,
        };
        let mut tx = Tx::new(&peer(1000), false);
        let mut wire = bytes(&mut tx, Kind::Offer, 100, &offer_payload(&offer));
        // The last message announces bytes that are known already.
        for written in [1, 900, 500] {
            wire.extend(bytes(
                &mut tx,
                Kind::Memory,
                100,
                &Mark::new(0, written).emit(),
            ));
        }
        tx.put(900);
        assert_eq!(tx.credit(), 100);
        for piece in [1, 5, 1000] {
            let mut got = Got::default();
            let mut rx = Rx::new(1000, false);
            for part in wire.chunks(piece) {
                rx.feed(part, &mut Tx::new(&peer(100), false), &mut got)
                    .unwrap();
            }
            assert_eq!((got.in_memory, rx.open()), (900, 100));
            assert_eq!(got.offers, [offer]);
        }
        let mark = Mark::new(0, 1001).emit();
        let wire = bytes(&mut Tx::new(&peer(2000), false), Kind::Memory, 100, &mark);
        assert_eq!(rx(&wire, false).err(), Some(Broken::Credit));
        assert_eq!(Rx::new(10, false).found(11), Err(Broken::Credit));
        for kind in [Kind::Offer, Kind::Memory] {
            let wire = bytes(&mut Tx::new(&peer(10), false), kind, 100, b"12345");
            assert_eq!(rx(&wire, false).err(), Some(Broken::Message));
        }
    }

    #[test]
    fn messages_survive_any_segmentation_with_and_without_crc() {
        for crc in [false, true] {
            let mut tx = Tx::new(&peer(1000), crc);
            let mut wire = Vec::new();
            let mut expected = Vec::new();
            for len in [1, 2, 3, 4, 100, 0, 7] {
                let payload: Vec<u8> = (0..len).collect();
                expected.extend_from_slice(&payload);
                wire.extend(bytes(&mut tx, Kind::Data, 120, &payload));
                wire.extend(bytes(&mut tx, Kind::Limit, 120, &[]));
            }
            wire.extend(bytes(&mut tx, Kind::Urgent, 120, b"!"));
            wire.extend(bytes(&mut tx, Kind::End, 120, &[]));
            assert_eq!(tx.credit(), 1000 - expected.len() - 1);
            for piece in [1, 2, 3, 27, 28, 29, 64, 10_000] {
                let mut got = Got::default();
                let mut back = Tx::new(&peer(100), crc);
                let mut rx = Rx::new(1000, crc);
                for part in wire.chunks(piece) {
                    rx.feed(part, &mut back, &mut got).unwrap();
                }
                assert_eq!(got.data, expected);
                assert_eq!(got.urgent, b"!");
                assert!(rx.ended() && rx.is_between());
                assert_eq!(back.credit(), 120);
                assert_eq!(rx.open() as usize, 1000 - expected.len() - 1);
            }
        }
    }

    #[test]
    fn each_flipped_bit_is_detected_with_crc() {
        let mut tx = Tx::new(&peer(1000), true);
        let wire = bytes(&mut tx, Kind::Data, 100, b"hello");
        for bit in 16..wire.len() * 8 {
            let mut bad = wire.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(rx(&bad, true).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn protocol_violations_are_detected() {
        let new = || Tx::new(&peer(100_000), false);
        let long = bytes(&mut new(), Kind::Data, 100, &[7; 1001]);
        assert_eq!(rx(&long, false).err(), Some(Broken::Credit));
        let lower = bytes(&mut new(), Kind::Data, 99, b"x");
        assert_eq!(rx(&lower, false).err(), Some(Broken::Limit));
        let far = bytes(&mut new(), Kind::Data, 0x9000_0000, b"x");
        assert_eq!(rx(&far, false).err(), Some(Broken::Limit));
        let mut tx = new();
        let first = bytes(&mut tx, Kind::Data, 100, b"x");
        assert_eq!(
            rx(&[&first[..], &first].concat(), false).err(),
            Some(Broken::Message)
        );
        let mut kind = first.clone();
        kind[20] = 9;
        assert_eq!(rx(&kind, false).err(), Some(Broken::Kind));
        let mut tx = new();
        let end = bytes(&mut tx, Kind::End, 100, &[]);
        let behind = bytes(&mut tx, Kind::Data, 100, b"x");
        assert_eq!(
            rx(&[end, behind].concat(), false).err(),
            Some(Broken::AfterEnd)
        );
        let reset = bytes(&mut new(), Kind::Reset, 100, &[]);
        assert_eq!(rx(&reset, false).err(), Some(Broken::Reset));
        assert!(
            rx(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", false)
                .err()
                .is_some()
        );
        assert!(rx(&[0; 28], false).is_err());
    }

    #[test]
    fn a_whole_message_is_handled_as_its_bytes_are() {
        let data =
            |payload: &[u8]| bytes(&mut Tx::new(&peer(1000), false), Kind::Data, 120, payload);
        let new = || (Rx::new(10, false), Tx::new(&peer(100), false));
        for len in 1..=10 {
            let payload: Vec<u8> = (0..len).collect();
            let wire = data(&payload);
            let (mut rx, mut tx) = new();
            assert_eq!(rx.whole(&wire, &mut tx), Some(&payload[..]));
            let (mut other, mut other_tx) = new();
            let mut got = Got::default();
            other.feed(&wire, &mut other_tx, &mut got).unwrap();
            assert_eq!(format!("{tx:?}"), format!("{other_tx:?}"));
            assert_eq!(
                (rx.open(), rx.expected(), rx.msn, rx.is_between()),
                (other.open(), other.expected(), other.msn, true)
            );
            assert_eq!(
                rx.whole(&wire, &mut tx),
                None,
                "its sequence number was used before"
            );
        }
        // What is not exactly one valid data message changes nothing.
        let wire = data(b"0123");
        let mut longer = wire.clone();
        longer.push(0);
        let mut others = vec![
            longer,
            wire[..wire.len() - 1].to_vec(),
            data(&[0; 11]),
            data(b""),
        ];
        for at in 0..HEAD - 4 {
            let mut other = wire.clone();
            other[at] ^= 1;
            others.push(other);
        }
        let mut lower = wire.clone();
        lower[HEAD - 1] = 99;
        others.push(lower);
        for kind in [Kind::Limit, Kind::End, Kind::Plain] {
            let (mut tx, limit) = (Tx::new(&peer(1000), false), 120);
            others.push(bytes(&mut tx, kind, limit, &[]));
        }
        for other in others {
            let (mut rx, mut tx) = new();
            assert_eq!(rx.whole(&other, &mut tx), None, "{other:?}");
            assert_eq!(rx.whole(&wire, &mut tx), Some(&b"0123"[..]));
        }
        let mut with_crc = Rx::new(10, true);
        assert_eq!(with_crc.whole(&wire, &mut new().1), None);
    }

    #[test]
    fn payload_may_be_received_directly_into_the_program() {
        let mut tx = Tx::new(&peer(1000), false);
        let wire = bytes(&mut tx, Kind::Data, 100, &[5; 100]);
        let mut got = Got::default();
        let mut back = Tx::new(&peer(100), false);
        let mut rx = Rx::new(1000, false);
        assert_eq!(rx.straight(), 0);
        rx.feed(&wire[..HEAD + 10], &mut back, &mut got).unwrap();
        assert_eq!(rx.straight(), 90);
        rx.went_straight(40);
        rx.went_straight(50);
        assert_eq!(rx.straight(), 0);
        rx.feed(&wire[HEAD + 100..], &mut back, &mut got).unwrap();
        assert!(rx.is_between());
        assert_eq!(got.data.len(), 10);
    }

    #[test]
    fn a_stream_has_sent_although_the_count_of_its_bytes_is_zero_again() {
        let mut tx = Tx::new(&peer(1 << 20), false);
        tx.put(0);
        assert!(!tx.has_sent());
        for _ in 0..4096 {
            tx.put(1 << 20);
        }
        assert_eq!(tx.sent, 0);
        assert!(tx.has_sent());
    }

    #[test]
    fn messages_that_move_no_payload_are_limited_in_number() {
        let (mut tx, mut of_peer) = (Tx::new(&peer(100), false), Tx::new(&peer(100), false));
        let (mut rx, mut got) = (Rx::new(1000, false), Got::default());
        let flood = |rx: &mut Rx, tx: &mut Tx, of_peer: &mut Tx, got: &mut Got| {
            (0..limits::IDLE_MESSAGES).try_for_each(|n| {
                // Empty payload and higher limits count too.
                let kind = [Kind::Limit, Kind::Data][n as usize % 2];
                rx.feed(&bytes(of_peer, kind, 100 + n, &[]), tx, got)
            })
        };
        assert_eq!(flood(&mut rx, &mut tx, &mut of_peer, &mut got), Ok(()));
        // Payload in any direction permits as many again.
        tx.put(1);
        let last = 100 + limits::IDLE_MESSAGES;
        for payload in [&b"x"[..], b""] {
            let data = bytes(&mut of_peer, Kind::Data, last, payload);
            assert_eq!(rx.feed(&data, &mut tx, &mut got), Ok(()));
        }
        for n in 2..=limits::IDLE_MESSAGES {
            let message = bytes(&mut of_peer, Kind::Limit, last, &[]);
            let result = rx.feed(&message, &mut tx, &mut got);
            let expected = if n < limits::IDLE_MESSAGES {
                Ok(())
            } else {
                Err(Broken::Flood)
            };
            assert_eq!(result, expected, "message {n}");
        }
    }
}
