//! What the two ends of a connection agree on: CRCs, markers, depths, the ready-to-receive message.

use crate::wire::mpa::Enhanced;

/// What both ends agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamParams {
    /// CRCs are made and checked; otherwise the field is there but means nothing.
    pub crc: bool,
    /// We put markers into what we send.
    pub send_markers: bool,
    /// The peer puts markers into what it sends.
    pub recv_markers: bool,
    /// Inbound reads and atomics that we serve at once.
    pub ird: u16,
    /// Outbound reads and atomics that we may have at once.
    pub ord: u16,
    /// MPA revision of both frames.
    pub rev: u8,
    /// The initiator's first message is a ready-to-receive message.
    pub peer_to_peer: bool,
    /// Which one: on the initiator the one to send, on the responder the likely one.
    pub rtr: Option<Rtr>,
    /// The other end is anywarp too. Never set on a responder before it has seen a Hello.
    pub peer_is_anywarp: bool,
}

/// A ready-to-receive message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rtr {
    /// A zero-length Send on queue 0.
    Send,
    /// A zero-length RDMA Write.
    Write,
    /// A zero-length RDMA Read.
    Read,
}

/// A set of ready-to-receive forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RtrForms {
    /// Zero-length Send.
    pub send: bool,
    /// Zero-length RDMA Write.
    pub write: bool,
    /// Zero-length RDMA Read.
    pub read: bool,
}

impl RtrForms {
    /// All three: what anywarp offers and confirms.
    pub const ALL: Self = Self {
        send: true,
        write: true,
        read: true,
    };
    /// None.
    pub const NONE: Self = Self {
        send: false,
        write: false,
        read: false,
    };

    pub(super) fn of(block: &Enhanced) -> Self {
        Self {
            send: block.rtr_send,
            write: block.rtr_write,
            read: block.rtr_read,
        }
    }

    /// The forms in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            send: self.send && other.send,
            write: self.write && other.write,
            read: self.read && other.read,
        }
    }

    /// The form to use out of this set: Write, which costs nothing, before Read, which takes a
    /// read slot, before Send, which takes a receive buffer.
    pub const fn preferred(self) -> Option<Rtr> {
        match self {
            Self { write: true, .. } => Some(Rtr::Write),
            Self { read: true, .. } => Some(Rtr::Read),
            Self { send: true, .. } => Some(Rtr::Send),
            Self::NONE => None,
        }
    }
}

/// The number of Reads and atomics that one end will serve and have outstanding at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Depths {
    /// Inbound; 0x3fff leaves it to the ULP.
    pub ird: u16,
    /// Outbound; 0x3fff leaves it to the ULP.
    pub ord: u16,
}
