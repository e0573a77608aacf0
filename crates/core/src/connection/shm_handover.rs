//! Hand-over of a stream from TCP to memory that both ends share, when they are on one host.
//!
//! Each direction switches separately, between two FPDUs. The responder of the connection makes the offer:
//!
//! ```text
//!  responder                          initiator
//!     | <---------- Hello (SHM feature) -- |
//!     | -- Offer ------------------------> |   maps the memory
//!     | <------------------------- Take -- |   its last FPDU on the connection
//!     | -- Switch -----------------------> |   the responder's last FPDU on the connection
//! ```
//!
//! The TCP connection stays open. When the connection closes, the stream ends. A byte that is sent on the connection
//! wakes a peer that sleeps. FPDUs in shared memory have no CRC, since memory does not damage them. The engine creates
//! and maps the memory.

use crate::ddp::rx::Violation;
use crate::error::PeerError;
use crate::wire::control::Handover;

/// The feature bit of a Hello whose sender can use shared memory. Bit 0 was an earlier version of this feature.
const FEATURE: u32 = 2;

/// The progress of a hand-over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// No message was exchanged.
    #[default]
    Before,
    /// We made an offer.
    Offered,
    /// The peer made an offer.
    Asked,
    /// We accepted the peer's offer.
    Taken,
    /// Completed or declined.
    Over,
}

/// The hand-over of one stream.
#[derive(Debug, Default)]
pub(super) struct ShmHandover {
    phase: Phase,
    /// Number of requests after which memory is offered. `None`: this end does not use shared memory.
    offer_after: Option<u32>,
    /// Whether this end accepts offers of the peer.
    accepts_offer: bool,
    /// Whether the peer's Hello had the feature bit.
    peer_can: bool,
    /// The peer's last message, for the engine.
    received: Option<Handover>,
    /// Whether the last FPDU of this end on the connection is framed. The next one waits until the engine has switched.
    tx_sealed: bool,
    /// Whether the peer's last FPDU on the connection arrived.
    rx_sealed: bool,
}

impl ShmHandover {
    pub(super) fn new(offer_after: Option<u32>, accepts_offer: bool) -> Self {
        Self {
            offer_after,
            accepts_offer,
            ..Self::default()
        }
    }

    /// The feature bits of our Hello.
    pub(super) fn features(&self) -> u32 {
        if self.offer_after.is_some() {
            FEATURE
        } else {
            0
        }
    }

    /// Stores the feature bits of the peer's Hello.
    pub(super) fn set_peer_features(&mut self, features: u32) {
        self.peer_can = features & FEATURE != 0;
    }

    /// Whether to offer memory when both ends together have made `requests` requests.
    #[inline]
    pub(super) fn may_offer(&self, requests: u32) -> bool {
        self.peer_can
            && self.phase == Phase::Before
            && self.offer_after.is_some_and(|after| requests >= after)
    }

    /// Handles a hand-over message of the peer.
    pub(super) fn receive(&mut self, message: Handover) -> Result<(), Violation> {
        let next = match (message, self.phase) {
            (Handover::Offer { .. }, Phase::Before)
                if self.offer_after.is_some() && self.accepts_offer =>
            {
                Phase::Asked
            }
            (Handover::Take { .. } | Handover::Refuse, Phase::Offered)
            | (Handover::Switch, Phase::Taken) => Phase::Over,
            _ => {
                return Err(Violation::answer(PeerError::Control(
                    "a hand-over message out of order",
                )));
            }
        };
        self.phase = next;
        self.rx_sealed = message.is_last();
        self.received = Some(message);
        Ok(())
    }

    /// Notes that `message` is queued for the peer.
    pub(super) fn sent(&mut self, message: Handover) {
        self.phase = match message {
            Handover::Offer { .. } => Phase::Offered,
            Handover::Take { .. } => Phase::Taken,
            Handover::Refuse | Handover::Switch => Phase::Over,
        };
    }

    /// Makes no offer on this stream.
    pub(super) fn decline(&mut self) {
        self.phase = Phase::Over;
    }

    /// Whether a message of the peer waits for the engine.
    pub(super) fn has_message(&self) -> bool {
        self.received.is_some()
    }

    /// The message of the peer that waits for the engine.
    pub(super) fn poll(&mut self) -> Option<Handover> {
        self.received.take()
    }

    /// Notes that `message` is framed: it may be the last FPDU on the connection.
    pub(super) fn framed(&mut self, message: Handover) {
        self.tx_sealed = message.is_last();
    }

    /// Whether nothing is framed until the engine has switched.
    #[inline]
    pub(super) fn is_tx_sealed(&self) -> bool {
        self.tx_sealed
    }

    /// Whether nothing is received until the engine has switched.
    #[inline]
    pub(super) fn is_rx_sealed(&self) -> bool {
        self.rx_sealed
    }

    /// Called when the engine has switched: framing continues.
    pub(super) fn resume_tx(&mut self) {
        self.tx_sealed = false;
    }

    /// Called when the engine has switched: receiving continues.
    pub(super) fn resume_rx(&mut self) {
        self.rx_sealed = false;
    }
}
