//! The parameters of a connection: CRCs, markers, depths, the ready-to-receive message.

use crate::wire::mpa::Enhanced;

/// The parameters that both ends agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamParams {
    /// Whether CRCs are computed and checked. Otherwise the field is present but ignored.
    pub crc: bool,
    /// Whether this end inserts markers.
    pub send_markers: bool,
    /// Whether the peer inserts markers.
    pub recv_markers: bool,
    /// Inbound Reads and atomics that this end serves at the same time.
    pub ird: u16,
    /// Outbound Reads and atomics that this end may have outstanding.
    pub ord: u16,
    /// MPA revision of both frames.
    pub rev: u8,
    /// Whether the initiator's first message is a ready-to-receive message.
    pub peer_to_peer: bool,
    /// The form of the ready-to-receive message, which the initiator sends and the responder expects.
    pub rtr: Option<Rtr>,
    /// At the initiator: whether this end has offered, and the peer has confirmed, all three ready-to-receive messages, as two anywarp ends
    /// do. False at the responder, see [`Accepted::peer_may_be_anywarp`](super::Accepted::peer_may_be_anywarp).
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
    /// Whether the set contains the zero-length Send.
    pub send: bool,
    /// Whether the set contains the zero-length RDMA Write.
    pub write: bool,
    /// Whether the set contains the zero-length RDMA Read.
    pub read: bool,
}

impl RtrForms {
    /// All three, which anywarp offers and confirms.
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

    /// The form to use from this set. The order of preference is Write, which needs no resource, Read, which uses a
    /// Read slot, and Send, which uses a receive buffer.
    pub const fn preferred(self) -> Option<Rtr> {
        match self {
            Self { write: true, .. } => Some(Rtr::Write),
            Self { read: true, .. } => Some(Rtr::Read),
            Self { send: true, .. } => Some(Rtr::Send),
            Self::NONE => None,
        }
    }
}

/// The number of Reads and atomics that one end serves, and has outstanding, at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Depths {
    /// The inbound depth. With 0x3fff, the ULP negotiates it.
    pub ird: u16,
    /// The outbound depth. With 0x3fff, the ULP negotiates it.
    pub ord: u16,
}
