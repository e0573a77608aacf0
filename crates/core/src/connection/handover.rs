//! Hand-over of a stream from its TCP connection to another *carrier*: memory that both ends share, when they are on one
//! host, or a trunk, a TCP connection that carries the streams of many queue pairs of two processes.
//!
//! Each direction switches separately, between two FPDUs. The responder of the connection makes the offer:
//!
//! ```text
//!  responder                                 initiator
//!     | <--------- Hello (features) ------------ |
//!     | -- Offer or OfferTrunk ----------------> |   maps the memory, or opens the trunk
//!     | <--------- Take or TakeTrunk ----------- |   its last FPDU on the connection
//!     | -- Switch -----------------------------> |   the responder's last FPDU on the connection
//! ```
//!
//! In shared memory each end sends its next FPDU at once, because the other end reads the memory only after the last
//! message on the connection. Data on a trunk may overtake data on the connection, so an end sends nothing on the trunk until it knows that the
//! other end has read that last message: the initiator waits for the Switch, and the responder for the first frame of the initiator. If the
//! stream ends in the meantime, its last messages are sent at once, and the other end keeps them until it has read the connection.
//!
//! The TCP connection stays open. When the connection closes, the stream ends. With shared memory, a byte that is sent on the
//! connection wakes a peer that sleeps. FPDUs in shared memory have no CRC, since memory does not damage them. The engine
//! creates and maps the memory, and opens trunks.

use crate::ddp::rx::Violation;
use crate::error::PeerError;
use crate::wire::control::Handover;

/// The feature bit of a Hello whose sender can use shared memory. Bit 0 was an earlier version of this feature.
const FEATURE_SHM: u32 = 2;
/// The feature bit of a Hello whose sender can use trunks.
const FEATURE_TRUNK: u32 = 4;

/// What carries a stream in place of its TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// Memory that both ends share.
    SharedMemory,
    /// A TCP connection that carries the streams of many queue pairs.
    Trunk,
}

/// The progress of a hand-over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// No message was exchanged.
    #[default]
    Before,
    /// We made an offer.
    Offered(Carrier),
    /// The peer made an offer.
    Asked(Carrier),
    /// We accepted the peer's offer.
    Taken(Carrier),
    /// Completed, or a trunk was refused.
    Over,
}

/// Whether this end may frame its next FPDU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Seal {
    /// It may.
    #[default]
    Open,
    /// The last FPDU of this end on the connection is framed. The next one waits until the engine has switched.
    Framed,
    /// The engine sends by the trunk from now on, but the peer is not ready yet: nothing is sent except the last messages of a stream that is ending.
    Switched,
}

/// The numbers of requests, of both ends together, after which each carrier is offered. `None`: this end does not use it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OfferAfter {
    /// Shared memory.
    pub shm: Option<u32>,
    /// A trunk.
    pub trunk: Option<u32>,
}

impl OfferAfter {
    /// No carrier is offered or accepted.
    pub const NEVER: Self = Self {
        shm: None,
        trunk: None,
    };
}

/// The hand-over of one stream.
#[derive(Debug, Default)]
pub(super) struct HandoverState {
    phase: Phase,
    after: OfferAfter,
    /// The number of requests after which a carrier is to be offered next, so that each request costs one comparison.
    offer_at: u32,
    /// Whether this end accepts offers of the peer.
    accepts_offer: bool,
    /// The feature bits of the peer's Hello.
    peer_features: u32,
    /// The peer's last message, for the engine.
    received: Option<Handover>,
    tx_seal: Seal,
    /// Whether the peer's last FPDU on the connection arrived.
    rx_sealed: bool,
}

impl HandoverState {
    pub(super) fn new(after: OfferAfter, accepts_offer: bool) -> Self {
        Self {
            after,
            offer_at: u32::MAX,
            accepts_offer,
            ..Self::default()
        }
    }

    /// The feature bits of our Hello.
    pub(super) fn features(&self) -> u32 {
        let bit = |after: Option<u32>, bit| if after.is_some() { bit } else { 0 };
        bit(self.after.shm, FEATURE_SHM) | bit(self.after.trunk, FEATURE_TRUNK)
    }

    /// Stores the feature bits of the peer's Hello.
    pub(super) fn set_peer_features(&mut self, features: u32) {
        self.peer_features = features;
        self.set_offer_at();
    }

    /// The carrier to offer when both ends together have made `requests` requests. Shared memory comes first.
    #[inline]
    pub(super) fn next_offer(&self, requests: u32) -> Option<Carrier> {
        if requests < self.offer_at {
            return None;
        }
        self.due(requests)
    }

    #[cold]
    fn due(&self, requests: u32) -> Option<Carrier> {
        let offers = self.offers().into_iter().flatten();
        let mut due = offers.filter(|(_, after)| requests >= *after);
        due.next().map(|(carrier, _)| carrier)
    }

    /// The carriers that may still be offered, and after how many requests.
    fn offers(&self) -> [Option<(Carrier, u32)>; 2] {
        let may = |feature| self.phase == Phase::Before && self.peer_features & feature != 0;
        let offer =
            |carrier, feature, after: Option<u32>| Some((carrier, after.filter(|_| may(feature))?));
        [
            offer(Carrier::SharedMemory, FEATURE_SHM, self.after.shm),
            offer(Carrier::Trunk, FEATURE_TRUNK, self.after.trunk),
        ]
    }

    fn set_offer_at(&mut self) {
        let first = self.offers().into_iter().flatten().map(|(_, after)| after);
        self.offer_at = first.min().unwrap_or(u32::MAX);
    }

    /// Handles a hand-over message of the peer.
    pub(super) fn receive(&mut self, message: Handover) -> Result<(), Violation> {
        let next = match (message, self.phase) {
            (Handover::Offer { .. }, Phase::Before)
                if self.after.shm.is_some() && self.accepts_offer =>
            {
                Phase::Asked(Carrier::SharedMemory)
            }
            (Handover::OfferTrunk { .. }, Phase::Before)
                if self.after.trunk.is_some() && self.accepts_offer =>
            {
                Phase::Asked(Carrier::Trunk)
            }
            // A trunk may be offered after shared memory was refused.
            (Handover::Refuse, Phase::Offered(Carrier::SharedMemory)) => {
                self.after.shm = None;
                Phase::Before
            }
            (Handover::Take { .. }, Phase::Offered(Carrier::SharedMemory))
            | (Handover::TakeTrunk { .. }, Phase::Offered(Carrier::Trunk))
            | (Handover::Refuse, Phase::Offered(Carrier::Trunk) | Phase::Taken(Carrier::Trunk))
            | (Handover::Switch, Phase::Taken(_)) => Phase::Over,
            _ => {
                return Err(Violation::answer(PeerError::Control(
                    "a hand-over message out of order",
                )));
            }
        };
        self.phase = next;
        self.set_offer_at();
        self.rx_sealed = message.is_last();
        self.received = Some(message);
        Ok(())
    }

    /// Notes that `message` is queued for the peer.
    pub(super) fn sent(&mut self, message: Handover) {
        self.phase = match message {
            Handover::Offer { .. } => Phase::Offered(Carrier::SharedMemory),
            Handover::OfferTrunk { .. } => Phase::Offered(Carrier::Trunk),
            Handover::Take { .. } => Phase::Taken(Carrier::SharedMemory),
            Handover::TakeTrunk { .. } => Phase::Taken(Carrier::Trunk),
            Handover::Refuse if self.phase == Phase::Asked(Carrier::SharedMemory) => {
                self.after.shm = None;
                Phase::Before
            }
            Handover::Refuse | Handover::Switch => Phase::Over,
        };
        self.set_offer_at();
    }

    /// Offers `carrier` no more, or, if `until` is given, only when both ends together have made that many requests.
    pub(super) fn decline(&mut self, carrier: Carrier, until: Option<u32>) {
        match carrier {
            Carrier::SharedMemory => self.after.shm = until,
            Carrier::Trunk => self.after.trunk = until,
        }
        self.set_offer_at();
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
        if message.is_last() {
            self.tx_seal = Seal::Framed;
        }
    }

    /// Whether nothing is framed until the engine has switched. `ends`: whether the stream is ending.
    #[inline]
    pub(super) fn is_tx_sealed(&self, ends: bool) -> bool {
        match self.tx_seal {
            Seal::Open => false,
            Seal::Framed => true,
            Seal::Switched => !ends,
        }
    }

    /// Whether the engine has to switch.
    pub(super) fn must_switch(&self) -> bool {
        self.tx_seal == Seal::Framed
    }

    /// Called when the engine sends by the trunk from now on, and the peer is not ready yet.
    pub(super) fn tx_switched(&mut self) {
        self.tx_seal = Seal::Switched;
    }

    /// Whether nothing is received until the engine has switched.
    #[inline]
    pub(super) fn is_rx_sealed(&self) -> bool {
        self.rx_sealed
    }

    /// Called when the engine has switched: framing continues.
    pub(super) fn resume_tx(&mut self) {
        self.tx_seal = Seal::Open;
    }

    /// Called when the engine has switched: receiving continues.
    pub(super) fn resume_rx(&mut self) {
        self.rx_sealed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: OfferAfter = OfferAfter {
        shm: Some(4),
        trunk: Some(8),
    };
    const OFFER: Handover = Handover::Offer { pid: 1, fd: 2 };
    const OFFER_TRUNK: Handover = Handover::OfferTrunk {
        process: 5,
        port: 1,
        channel: 2,
    };
    const TAKE: Handover = Handover::Take { proof: 3 };
    const TAKE_TRUNK: Handover = Handover::TakeTrunk {
        trunk: 3,
        channel: 4,
    };

    fn state(after: OfferAfter, accepts_offer: bool, features: u32) -> HandoverState {
        let mut state = HandoverState::new(after, accepts_offer);
        state.set_peer_features(features);
        state
    }

    #[test]
    fn a_carrier_that_the_peer_does_not_know_is_not_offered() {
        let offers = |features| {
            let state = state(BOTH, false, features);
            [3, 4, 7, 8].map(|requests| state.next_offer(requests))
        };
        let (shm, trunk) = (Some(Carrier::SharedMemory), Some(Carrier::Trunk));
        assert_eq!(offers(0), [None; 4]);
        assert_eq!(offers(FEATURE_SHM), [None, shm, shm, shm]);
        assert_eq!(offers(FEATURE_TRUNK), [None, None, None, trunk]);
        assert_eq!(offers(FEATURE_SHM | FEATURE_TRUNK), [None, shm, shm, shm]);
        assert_eq!(offers(1), [None; 4], "an earlier version");
    }

    #[test]
    fn a_trunk_is_offered_when_shared_memory_is_not_possible() {
        let features = FEATURE_SHM | FEATURE_TRUNK;
        let mut declined = state(BOTH, false, features);
        declined.decline(Carrier::SharedMemory, None);
        assert_eq!(declined.next_offer(8), Some(Carrier::Trunk));
        declined.decline(Carrier::Trunk, Some(20));
        assert_eq!(declined.next_offer(19), None);
        assert_eq!(declined.next_offer(20), Some(Carrier::Trunk));

        let mut refused = state(BOTH, false, features);
        refused.sent(OFFER);
        assert_eq!(refused.next_offer(8), None);
        assert!(refused.receive(Handover::Refuse).is_ok());
        assert_eq!(refused.next_offer(8), Some(Carrier::Trunk));
        refused.sent(OFFER_TRUNK);
        assert!(refused.receive(Handover::Refuse).is_ok());
        assert_eq!(refused.next_offer(8), None);
        // The other end makes the same steps.
        let mut other = state(BOTH, true, 0);
        assert!(other.receive(OFFER).is_ok());
        other.sent(Handover::Refuse);
        assert!(other.receive(OFFER).is_err(), "shared memory was refused");
        assert!(other.receive(OFFER_TRUNK).is_ok());
        other.sent(Handover::Refuse);
        assert!(other.receive(OFFER_TRUNK).is_err(), "all was refused");
    }

    #[test]
    fn messages_out_of_order_are_violations() {
        let all = [
            OFFER,
            OFFER_TRUNK,
            TAKE,
            TAKE_TRUNK,
            Handover::Refuse,
            Handover::Switch,
        ];
        let accepted = |sent: &[Handover], accepts_offer: bool| -> Vec<Handover> {
            let accepts = |message: &Handover| {
                let mut state = state(BOTH, accepts_offer, 0);
                if let [Handover::Take { .. } | Handover::TakeTrunk { .. }] = sent {
                    state
                        .receive(if *sent == [TAKE] { OFFER } else { OFFER_TRUNK })
                        .ok();
                }
                sent.iter().for_each(|message| state.sent(*message));
                state.receive(*message).is_ok()
            };
            all.into_iter().filter(accepts).collect()
        };
        assert_eq!(accepted(&[], true), [OFFER, OFFER_TRUNK]);
        assert_eq!(accepted(&[], false), []);
        assert_eq!(accepted(&[OFFER], false), [TAKE, Handover::Refuse]);
        let trunk = [TAKE_TRUNK, Handover::Refuse];
        assert_eq!(accepted(&[OFFER_TRUNK], false), trunk);
        assert_eq!(accepted(&[TAKE], true), [Handover::Switch]);
        let answers = [Handover::Refuse, Handover::Switch];
        assert_eq!(accepted(&[TAKE_TRUNK], true), answers);
        assert_eq!(accepted(&[OFFER_TRUNK, Handover::Switch], false), []);
        let without = OfferAfter::NEVER;
        assert!(state(without, true, 0).receive(OFFER).is_err());
        assert!(state(without, true, 0).receive(OFFER_TRUNK).is_err());
    }

    #[test]
    fn after_the_last_message_on_the_connection_only_a_stream_that_ends_sends() {
        let mut state = state(BOTH, true, 0);
        state.framed(Handover::Refuse);
        assert!(!state.is_tx_sealed(false));
        state.framed(TAKE_TRUNK);
        assert!(state.must_switch());
        assert_eq!(
            [false, true].map(|ends| state.is_tx_sealed(ends)),
            [true; 2]
        );
        state.tx_switched();
        assert!(!state.must_switch());
        let sealed = [false, true].map(|ends| state.is_tx_sealed(ends));
        assert_eq!(sealed, [true, false]);
        state.resume_tx();
        assert_eq!(
            [false, true].map(|ends| state.is_tx_sealed(ends)),
            [false; 2]
        );
    }
}
