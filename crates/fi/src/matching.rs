//! Matching of messages and receives: posted receives without a message, and unexpected messages without a receive.

use std::collections::{HashMap, VecDeque};

use crate::abi::{FI_ADDR_UNSPEC, FiAddr};
use crate::address::Remote;
use crate::limits;
use crate::wire::Announcement;

/// The parts of a message that are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// The source, as an index of the address vector.
    pub source: FiAddr,
    /// The tag; 0 for an untagged message.
    pub tag: u64,
}

/// The messages that a receive accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// The source of the message, or `FI_ADDR_UNSPEC` for any.
    pub source: FiAddr,
    /// The tag.
    pub tag: u64,
    /// The bits of the tag that are ignored.
    pub ignore: u64,
}

impl Pattern {
    fn takes(&self, message: &Envelope) -> bool {
        (self.source == FI_ADDR_UNSPEC || self.source == message.source)
            && (self.tag ^ message.tag) & !self.ignore == 0
    }
}

/// Where the content of a message is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// In this process.
    Here(Vec<u8>),
    /// At the sender, which has announced the message.
    Announced(Announcement),
}

/// An unexpected message, which has no receive yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The parts that are matched.
    pub envelope: Envelope,
    /// The sender.
    pub from: Remote,
    /// The length in bytes.
    pub length: u64,
    /// The immediate data of the sender's program (`FI_REMOTE_CQ_DATA`).
    pub data: Option<u64>,
    /// The content.
    pub content: Content,
}

impl Message {
    fn cost(&self) -> usize {
        let bytes = match &self.content {
            Content::Here(bytes) => bytes.len(),
            Content::Announced(_) => 0,
        };
        bytes + limits::UNEXPECTED_EACH
    }

    /// Returns how many announced messages this is: 0 or 1.
    fn announced(&self) -> usize {
        matches!(self.content, Content::Announced(_)).into()
    }
}

/// The stored messages of a sender.
#[derive(Debug, Clone, Copy, Default)]
struct Stored {
    bytes: usize,
    /// The number of announced messages.
    announced: usize,
}

/// The receives and the unexpected messages of one kind (tagged or untagged).
#[derive(Debug)]
pub struct Matching<R> {
    receives: VecDeque<(Pattern, R)>,
    messages: VecDeque<Message>,
    /// Messages that the program has claimed (`FI_CLAIM`) and not received yet, each with the program's context.
    claimed: Vec<(usize, Message)>,
    bytes: usize,
    /// The messages of each sender that has stored some.
    of_senders: HashMap<Remote, Stored>,
}

impl<R> Default for Matching<R> {
    fn default() -> Self {
        Self {
            receives: VecDeque::new(),
            messages: VecDeque::new(),
            claimed: Vec::new(),
            bytes: 0,
            of_senders: HashMap::new(),
        }
    }
}

impl<R> Matching<R> {
    /// Returns the oldest receive that accepts a message, without removing it.
    pub fn receive_for(&mut self, message: &Envelope) -> Option<(usize, &mut R)> {
        let mut all = self.receives.iter_mut().enumerate();
        let (at, (_, receive)) = all.find(|(_, (pattern, _))| pattern.takes(message))?;
        Some((at, receive))
    }

    /// Removes a receive by its position.
    pub fn remove_receive(&mut self, at: usize) -> Option<R> {
        self.receives.remove(at).map(|(_, receive)| receive)
    }

    /// Adds a receive after the others.
    pub fn post(&mut self, pattern: Pattern, receive: R) {
        self.receives.push_back((pattern, receive));
    }

    /// Removes the first receive that fits.
    pub fn cancel(&mut self, fits: impl Fn(&R) -> bool) -> Option<R> {
        let at = self.receives.iter().position(|(_, r)| fits(r))?;
        self.remove_receive(at)
    }

    /// Removes all receives.
    pub fn cancel_all(&mut self) -> impl Iterator<Item = R> + '_ {
        self.receives.drain(..).map(|(_, receive)| receive)
    }

    /// Stores an unexpected message.
    pub fn keep(&mut self, message: Message) {
        self.add(&message);
        self.messages.push_back(message);
    }

    fn add(&mut self, message: &Message) {
        self.bytes += message.cost();
        let of_sender = self.of_senders.entry(message.from).or_default();
        of_sender.bytes += message.cost();
        of_sender.announced += message.announced();
    }

    fn subtract(&mut self, message: &Message) {
        self.bytes -= message.cost();
        if let Some(of_sender) = self.of_senders.get_mut(&message.from) {
            of_sender.bytes = of_sender.bytes.saturating_sub(message.cost());
            of_sender.announced = of_sender.announced.saturating_sub(message.announced());
            if of_sender.bytes == 0 {
                self.of_senders.remove(&message.from);
            }
        }
    }

    /// Returns the memory of the stored messages in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the memory of the stored messages of a sender in bytes.
    pub fn bytes_of(&self, sender: Remote) -> usize {
        self.of_senders.get(&sender).map_or(0, |of| of.bytes)
    }

    /// Returns the first message that a pattern accepts.
    pub fn message_for(&self, pattern: &Pattern) -> Option<&Message> {
        self.messages.iter().find(|m| pattern.takes(&m.envelope))
    }

    /// Removes and returns the first message that a pattern accepts.
    pub fn take_message(&mut self, pattern: &Pattern) -> Option<Message> {
        let at = self
            .messages
            .iter()
            .position(|m| pattern.takes(&m.envelope))?;
        let message = self.messages.remove(at)?;
        self.subtract(&message);
        Some(message)
    }

    /// Reserves a message for the receive with this `context`: the first one that the pattern accepts.
    pub fn claim(&mut self, pattern: &Pattern, context: usize) -> Option<&Message> {
        let message = self.take_message(pattern)?;
        self.add(&message);
        self.claimed.push((context, message));
        self.claimed.last().map(|(_, message)| message)
    }

    /// Removes and returns the message that is reserved for `context`.
    pub fn take_claimed(&mut self, context: usize) -> Option<Message> {
        let at = self.claimed.iter().position(|(c, _)| *c == context)?;
        let (_, message) = self.claimed.remove(at);
        self.subtract(&message);
        Some(message)
    }

    /// Returns the announced messages, including claimed ones: the sender, and its number for the message.
    pub fn announced(&self) -> impl Iterator<Item = (Remote, u32)> + '_ {
        let claimed = self.claimed.iter().map(|(_, message)| message);
        let all = self.messages.iter().chain(claimed);
        all.filter_map(|message| match &message.content {
            Content::Here(_) => None,
            Content::Announced(announcement) => Some((message.from, announcement.id)),
        })
    }

    /// Makes the receives for the source `from` accept the messages of the source `to` instead.
    pub fn move_source(&mut self, from: FiAddr, to: FiAddr) {
        for (pattern, _) in &mut self.receives {
            if pattern.source == from {
                pattern.source = to;
            }
        }
    }

    /// Looks up the sources of all stored messages again, including claimed ones, after a change of the address vector.
    pub fn renew_sources(&mut self, find: impl Fn(Remote) -> FiAddr) {
        let claimed = self.claimed.iter_mut().map(|(_, message)| message);
        for message in self.messages.iter_mut().chain(claimed) {
            message.envelope.source = find(message.from);
        }
    }

    /// Removes the announced messages of a peer that will never write them. A claimed one stays: the program still receives
    /// it and gets the error then.
    pub fn forget_announced(&mut self, from: Remote) {
        // This is called for each failed answer to a lost peer, so it must be fast when there is nothing to remove.
        if self
            .of_senders
            .get(&from)
            .is_none_or(|of| of.announced == 0)
        {
            return;
        }
        let messages = std::mem::take(&mut self.messages);
        let (gone, stay): (VecDeque<_>, VecDeque<_>) = messages
            .into_iter()
            .partition(|m| m.from == from && matches!(m.content, Content::Announced(_)));
        self.messages = stay;
        for message in gone {
            self.subtract(&message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(source: FiAddr, tag: u64, bytes: &[u8]) -> Message {
        Message {
            envelope: Envelope { source, tag },
            from: Remote {
                ip: "10.0.0.1".parse().unwrap(),
                qpn: source as u32,
            },
            length: bytes.len() as u64,
            data: None,
            content: Content::Here(bytes.to_vec()),
        }
    }

    fn takes(source: FiAddr, tag: u64, ignore: u64) -> Pattern {
        Pattern {
            source,
            tag,
            ignore,
        }
    }

    const ANY: FiAddr = FI_ADDR_UNSPEC;

    #[test]
    fn the_first_receive_that_takes_a_message_gets_it() {
        let mut m = Matching::default();
        m.post(takes(ANY, 5, 0), 1);
        m.post(takes(2, 0, u64::MAX), 2);
        m.post(takes(ANY, 0, 0xff), 3);
        let envelope = |source, tag| Envelope { source, tag };
        let mut to = |source, tag| m.receive_for(&envelope(source, tag)).map(|(_, r)| *r);
        assert_eq!(to(1, 5), Some(1));
        assert_eq!(to(2, 6), Some(2));
        assert_eq!(to(1, 6), Some(3));
        assert_eq!(to(1, 0x100), None);
        assert_eq!(m.cancel(|r| *r == 2), Some(2));
        assert_eq!(m.cancel(|r| *r == 2), None);
        assert_eq!(
            m.receive_for(&envelope(2, 6)).map(|(at, r)| (at, *r)),
            Some((1, 3))
        );
        assert_eq!(m.remove_receive(1), Some(3));
        assert_eq!(m.cancel_all().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn messages_are_taken_in_the_order_in_which_they_came() {
        let mut m = Matching::<()>::default();
        for (source, tag) in [(1, 7), (2, 7), (1, 7), (1, 8)] {
            m.keep(message(source, tag, b"abc"));
        }
        assert_eq!(m.bytes(), 4 * (3 + limits::UNEXPECTED_EACH));
        let one = message(1, 7, b"").from;
        assert_eq!(m.bytes_of(one), 3 * (3 + limits::UNEXPECTED_EACH));
        let tag = |m: Option<Message>| m.map(|m| (m.envelope.source, m.envelope.tag));
        assert_eq!(tag(m.take_message(&takes(2, 0, u64::MAX))), Some((2, 7)));
        assert_eq!(tag(m.take_message(&takes(ANY, 8, 0))), Some((1, 8)));
        assert!(m.message_for(&takes(ANY, 9, 0)).is_none());
        assert!(m.message_for(&takes(ANY, 6, 1)).is_some());
        assert_eq!(m.claim(&takes(1, 7, 0), 77).map(|m| m.length), Some(3));
        assert_eq!(m.bytes(), 2 * (3 + limits::UNEXPECTED_EACH));
        assert!(m.take_message(&takes(1, 7, 0)).is_some());
        assert!(m.take_message(&takes(1, 7, 0)).is_none(), "it is claimed");
        assert!(m.take_claimed(78).is_none());
        assert!(m.take_claimed(77).is_some() && m.take_claimed(77).is_none());
        assert_eq!((m.bytes(), m.bytes_of(one)), (0, 0));
        assert!(m.of_senders.is_empty());
    }

    #[test]
    fn announced_messages_of_a_lost_peer_are_removed() {
        let mut m = Matching::<()>::default();
        m.keep(message(1, 7, b"abc"));
        let announced = Message {
            content: Content::Announced(Announcement {
                id: 4,
                source: None,
            }),
            ..message(1, 7, b"")
        };
        m.keep(announced.clone());
        assert_eq!(m.announced().collect::<Vec<_>>(), [(announced.from, 4)]);
        m.forget_announced(announced.from);
        assert!(m.announced().next().is_none());
        assert_eq!(m.bytes(), 3 + limits::UNEXPECTED_EACH);
        assert_eq!(m.bytes_of(announced.from), m.bytes());
        m.renew_sources(|_| 9);
        assert!(m.take_message(&takes(9, 7, 0)).is_some());
        assert!(m.message_for(&takes(ANY, 0, u64::MAX)).is_none());
    }

    #[test]
    fn a_claimed_message_has_its_new_source_and_outlives_its_peer() {
        let mut m = Matching::<()>::default();
        let announced = Message {
            content: Content::Announced(Announcement {
                id: 4,
                source: None,
            }),
            ..message(1, 7, b"")
        };
        m.keep(announced.clone());
        assert!(m.claim(&takes(1, 7, 0), 77).is_some());
        m.renew_sources(|_| 9);
        m.forget_announced(announced.from);
        assert_eq!(m.announced().collect::<Vec<_>>(), [(announced.from, 4)]);
        assert_eq!(m.take_claimed(77).map(|m| m.envelope.source), Some(9));
    }
}
