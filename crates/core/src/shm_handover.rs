//! Hand-over of a stream from its connection to memory that both ends share, when they are on one host.
//!
//! Each direction changes by itself, at the end of an FPDU. The end that did not begin the connection offers:
//!
//! ```text
//!  responder                          initiator
//!     | <------------------ Hello (can) -- |
//!     | -- Offer ------------------------> |   looks at the memory
//!     | <------------------------- Take -- |   its last word on the connection
//!     | -- Switch -----------------------> |   the other's last word
//! ```
//!
//! The connection stays: its end is the end of the stream, and a byte on it wakes an end that sleeps. In shared memory there
//! are no CRCs: nothing damages the bytes on their way. Which memory it is, is the engine's matter.

use crate::connection::{Connection, End, First, Peer, Response, Stream};
use crate::ddp::rx::Violation;
use crate::error::PeerError;
use crate::verbs::qp::State;
use crate::wire::control::{Control, Handover};

/// The bit of Hello that says that the end can have shared memory.
pub(crate) const FEATURE: u32 = 1;

/// How far the hand-over is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing was said of it.
    #[default]
    Before,
    /// We offered.
    Offered,
    /// The peer offered.
    Asked,
    /// We took what the peer offered.
    Taken,
    /// Nothing more will be said of it.
    Over,
}

/// The hand-over of one stream.
#[derive(Debug, Default)]
pub(crate) struct ShmHandover {
    phase: Phase,
    /// The peer said that it can.
    peer_can: bool,
    /// What the peer said, for the engine.
    received: Option<Handover>,
    /// Our last word on the connection is framed: nothing is until the engine has changed over.
    pub(crate) tx_sealed: bool,
    /// The peer's last word on the connection came.
    pub(crate) rx_sealed: bool,
}

impl Stream {
    /// The bits of our Hello.
    pub(crate) fn features(&self) -> u32 {
        if self.config.shm_handover.is_some() {
            FEATURE
        } else {
            0
        }
    }

    /// The peer's Hello came.
    pub(crate) fn set_peer_features(&mut self, features: u32) {
        self.handover.peer_can = features & FEATURE != 0;
    }

    /// The peer said something of a carrier.
    pub(crate) fn receive_handover(&mut self, what: Handover) -> Result<(), Violation> {
        let h = &mut self.handover;
        let next = match (what, h.phase) {
            (Handover::Offer { .. }, Phase::Before)
                if self.config.shm_handover.is_some() && self.config.first == First::Hello =>
            {
                Phase::Asked
            }
            (Handover::Take | Handover::Refuse, Phase::Offered)
            | (Handover::Switch, Phase::Taken) => Phase::Over,
            _ => {
                return Err(Violation::answer(PeerError::Control(
                    "a word about a carrier that does not fit",
                )));
            }
        };
        h.phase = next;
        h.rx_sealed = what.is_last();
        h.received = Some(what);
        Ok(())
    }
}

impl Connection {
    /// Whether shared memory is to be offered to the peer now: it can have it, and uses the connection.
    pub fn wants_shm_offer(&self) -> bool {
        let Some(s) = &self.stream else { return false };
        s.handover.peer_can
            && s.handover.phase == Phase::Before
            && s.peer == Peer::Anywarp
            && s.started
            && s.end == End::Open
            && matches!(self.base.state, State::Rtr | State::Rts)
            && s.config
                .shm_handover
                .is_some_and(|after| s.seq.wrapping_add(s.done) >= after)
    }

    /// Says something of a carrier to the peer.
    pub fn send_handover(&mut self, what: Handover) {
        let Some(s) = &mut self.stream else { return };
        s.handover.phase = match what {
            Handover::Offer { .. } => Phase::Offered,
            Handover::Take => Phase::Taken,
            Handover::Refuse | Handover::Switch => Phase::Over,
        };
        s.responses
            .push_back(Response::Control(Control::Handover(what)));
    }

    /// None will be offered on this connection.
    pub fn decline_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.phase = Phase::Over;
        }
    }

    /// Whether the peer said something of a carrier.
    pub fn has_handover_message(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(|s| s.handover.received.is_some())
    }

    /// What the peer said of a carrier.
    pub fn poll_handover(&mut self) -> Option<Handover> {
        self.stream.as_mut()?.handover.received.take()
    }

    /// Whether everything that is framed goes to the connection, and what follows not.
    pub fn tx_is_sealed(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.handover.tx_sealed)
    }

    /// What is framed from here on goes to shared memory.
    pub fn switch_tx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.tx_sealed = false;
            s.crc_tx = false;
        }
    }

    /// What is received from here on comes from shared memory.
    pub fn switch_rx_to_shm(&mut self) {
        if let Some(s) = &mut self.stream {
            s.handover.rx_sealed = false;
            s.crc_rx = false;
        }
    }
}
