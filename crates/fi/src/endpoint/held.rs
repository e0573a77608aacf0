//! Messages that cannot be handled yet and stay in the receives of the device in which they arrived, in the order of arrival.
//!
//! A message may have to wait for other held messages of its peer. These are counted, because a search of the queue for each message
//! would take time that grows with the square of the number of messages, which a peer could use to delay the program.
//!
//! A *link* is a reliable connection between two busy endpoints (`link.rs`). Messages that are not on a link are datagrams.

use std::collections::{HashMap, VecDeque};

use super::link;
use crate::address::Remote;

/// A message that stays in a receive of the device, because too many unexpected messages are stored or earlier messages are awaited.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) receive: usize,
    /// The link on which it has arrived, if any.
    pub(super) link: Option<link::Name>,
    /// Of a datagram: whether messages that its sender has sent over a link precede it.
    pub(super) follows_link: bool,
    pub(super) length: usize,
    pub(super) from: Remote,
}

/// A group of messages that are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Group {
    /// Datagrams of a peer that precede its messages on a link.
    Datagrams(Remote),
    /// Messages of a peer on links.
    OnLinks(Remote),
    /// Messages on a link.
    Link(link::Name),
}

#[derive(Debug, Default)]
pub(super) struct HeldMessages {
    queue: VecDeque<Held>,
    /// The number of messages of each group that has some.
    counts: HashMap<Group, usize>,
}

impl HeldMessages {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn push_back(&mut self, held: Held) {
        for group in groups(&held) {
            *self.counts.entry(group).or_default() += 1;
        }
        self.queue.push_back(held);
    }

    pub(super) fn pop_front(&mut self) -> Option<Held> {
        let held = self.queue.pop_front()?;
        self.forget(&held);
        Some(held)
    }

    /// Whether a datagram of the peer is held that precedes its messages on a link.
    pub(super) fn has_datagram_before_link(&self, from: Remote) -> bool {
        self.counts.contains_key(&Group::Datagrams(from))
    }

    /// Whether a message of the peer on a link is held.
    pub(super) fn has_message_on_link(&self, from: Remote) -> bool {
        self.counts.contains_key(&Group::OnLinks(from))
    }

    /// Whether a message on this link is held.
    pub(super) fn has_message_of(&self, link: link::Name) -> bool {
        self.counts.contains_key(&Group::Link(link))
    }

    /// Removes the messages on a link.
    pub(super) fn remove_link(&mut self, link: link::Name) {
        let all = std::mem::take(&mut self.queue).into_iter();
        let (removed, kept): (VecDeque<Held>, _) = all.partition(|held| held.link == Some(link));
        self.queue = kept;
        for held in &removed {
            self.forget(held);
        }
    }

    fn forget(&mut self, held: &Held) {
        for group in groups(held) {
            if let Some(count) = self.counts.get_mut(&group) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&group);
                }
            }
        }
    }
}

/// Returns the groups of a message.
fn groups(held: &Held) -> impl Iterator<Item = Group> + use<> {
    let of_peer = match held.link {
        Some(_) => Some(Group::OnLinks(held.from)),
        None => (!held.follows_link).then_some(Group::Datagrams(held.from)),
    };
    of_peer.into_iter().chain(held.link.map(Group::Link))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const fn peer(qpn: u32) -> Remote {
        Remote {
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            qpn,
        }
    }

    const fn message(from: Remote, link: Option<link::Name>, follows_link: bool) -> Held {
        Held {
            receive: 0,
            link,
            follows_link,
            length: 0,
            from,
        }
    }

    #[test]
    fn groups_are_counted_until_their_last_message_is_removed() {
        let (a, b) = (peer(1), peer(2));
        let [first, second] = [1, 2].map(link::Name::for_test);
        let mut held = HeldMessages::default();
        held.push_back(message(a, None, false));
        held.push_back(message(a, None, false));
        held.push_back(message(a, Some(first), false));
        held.push_back(message(b, None, true));
        held.push_back(message(b, Some(second), false));
        held.push_back(message(b, Some(second), false));
        assert!(held.has_datagram_before_link(a) && held.has_message_on_link(a));
        assert!(held.has_message_of(first) && held.has_message_of(second));
        assert!(
            !held.has_datagram_before_link(b),
            "the datagram follows the link's messages"
        );

        held.pop_front();
        assert!(held.has_datagram_before_link(a));
        held.pop_front();
        assert!(!held.has_datagram_before_link(a));

        held.remove_link(second);
        assert!(!held.has_message_of(second) && !held.has_message_on_link(b));
        assert!(held.has_message_of(first) && held.has_message_on_link(a));
        assert_eq!(held.len(), 2);
        held.pop_front();
        held.pop_front();
        assert!(held.pop_front().is_none() && held.counts.is_empty());
    }
}
