//! MPA start-up at the end that opened the TCP connection: Request, then the peer's Reply.

use super::params::{Depths, Rtr, RtrForms, StreamParams};
use crate::error::{Misuse, PeerError};
use crate::wire::mpa::{DEPTH_NOT_NEGOTIATED, Enhanced, MAX_DEPTH, StartupFrame};

/// The configuration of an initiator.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// MPA revision: 2, or 1 for a second attempt to connect to an older implementation.
    pub rev: u8,
    /// Whether to ask for CRCs.
    pub crc: bool,
    /// Whether to ask the peer to send markers.
    pub markers: bool,
    /// Whether to offer to send a ready-to-receive message first. Revision 2 only.
    pub peer_to_peer: bool,
    /// The ready-to-receive messages that this end can send.
    pub rtr: RtrForms,
    /// Inbound Reads that this end serves at the same time.
    pub ird: u16,
    /// The limit to which `ird` may grow if the peer needs more.
    pub max_ird: u16,
    /// Outbound Reads that this end wants to have outstanding.
    pub ord: u16,
    /// Private data of the ULP.
    pub private_data: Vec<u8>,
}

impl Default for InitiatorConfig {
    fn default() -> Self {
        Self {
            rev: 2,
            crc: true,
            markers: false,
            peer_to_peer: true,
            rtr: RtrForms::ALL,
            ird: 16,
            max_ird: 128,
            ord: 16,
            private_data: Vec::new(),
        }
    }
}

/// Outcome of the bytes that have arrived at an initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The Reply is not complete.
    NeedMore,
    /// FPDUs may be sent at once, the ready-to-receive message first if there is one.
    Established {
        /// Bytes of the Reply. The bytes after it are FPDUs.
        consumed: usize,
        /// The agreed parameters.
        params: StreamParams,
        /// Private data of the peer's ULP.
        private_data: Vec<u8>,
        /// The depths in the Reply, for the ULP. The depths that both ends agreed on are in `params`.
        peer_depths: Option<Depths>,
        /// The message to send first. To an anywarp peer a Control Hello is sent instead.
        rtr: Option<Rtr>,
        /// Whether this end requested CRCs, and the C bit of the Reply is clear. RFC 5044 requires CRCs in this case.
        /// The caller logs this, because a peer that does not follow the rule sends no CRCs.
        crc_unconfirmed: bool,
    },
    /// The peer's ULP rejected the connection. TCP is still open.
    Rejected {
        /// Bytes of the Reply.
        consumed: usize,
        /// Private data of the peer's ULP.
        private_data: Vec<u8>,
        /// Revision of the Reply. If it is lower, the caller may try again with that revision.
        rev: u8,
        /// The depths in the Reply. The peer's ORD is the IRD that it needs from this end.
        peer_depths: Option<Depths>,
    },
    /// The peer accepts no ready-to-receive message that this end can send: the caller sends a Terminate and closes.
    NoCommonRtr {
        /// Bytes of the Reply.
        consumed: usize,
        /// The parameters with which the Terminate is framed.
        params: StreamParams,
    },
    /// The peer will have more Reads outstanding than this end can serve: the caller sends a Terminate and closes.
    InsufficientIrd {
        /// Bytes of the Reply.
        consumed: usize,
        /// The parameters with which the Terminate is framed.
        params: StreamParams,
        /// Reads that the peer will have outstanding.
        needed: u16,
    },
}

impl Progress {
    /// Returns the error that the caller reports to the peer, if this outcome is an error.
    pub fn error(&self) -> Option<PeerError> {
        match self {
            Self::NeedMore | Self::Established { .. } | Self::Rejected { .. } => None,
            Self::NoCommonRtr { .. } => Some(PeerError::MpaNoCommonRtr),
            Self::InsufficientIrd { params, needed, .. } => Some(PeerError::MpaInsufficientIrd {
                needed: *needed,
                have: params.ird,
            }),
        }
    }
}

/// The end that opened the TCP connection.
///
/// ```text
///            request()            Reply
///   +------+ -------> +---------+ -------> Established   [RTR or Hello, then FPDUs]
///   | TCP  |          | waiting | -------> Rejected      [ULP; close]
///   |  up  |          |   for   | -------> NoCommonRtr, InsufficientIrd  [Terminate; close]
///   +------+          |  Reply  | -------> PeerError     [close, nothing is sent]
///                     +---------+
///                      The caller handles a timeout and a closed TCP connection. A stack without revision 2
///                      closes without a Reply; the caller then tries again with `InitiatorConfig::older`.
/// ```
#[derive(Clone, Debug)]
pub struct Initiator {
    pub(super) config: InitiatorConfig,
}

impl InitiatorConfig {
    /// Returns this configuration with the previous revision, for a second try. `None` if there is none.
    pub fn older(&self) -> Option<Self> {
        (self.rev == 2).then(|| Self {
            rev: 1,
            ..self.clone()
        })
    }
}

impl Initiator {
    /// Checks `config`.
    ///
    /// # Errors
    /// The revision is not supported, or the private data does not fit the frame.
    pub fn new(mut config: InitiatorConfig) -> Result<Self, Misuse> {
        if !matches!(config.rev, 1 | 2) {
            return Err(Misuse::InvalidArgument("mpa revision"));
        }
        if config.private_data.len() > StartupFrame::room(config.rev == 2) {
            return Err(Misuse::InvalidArgument("private data too long"));
        }
        config.ird = config.ird.min(MAX_DEPTH);
        config.ord = config.ord.min(MAX_DEPTH);
        config.max_ird = config.max_ird.clamp(config.ird, MAX_DEPTH);
        config.peer_to_peer &= config.rev == 2;
        Ok(Self { config })
    }

    /// Returns the Request, the first bytes on the connection. They are sent in one piece, because some hardware does
    /// not reassemble them. No bytes may follow before the Reply has arrived.
    pub fn request(&self) -> Vec<u8> {
        let c = &self.config;
        // RFC 6581 §9.2 [mpa-rtr-offer]: if A is set, all forms that this end can send are set, otherwise none.
        let rtr = if c.peer_to_peer {
            c.rtr
        } else {
            RtrForms::NONE
        };
        StartupFrame {
            reply: false,
            markers: c.markers,
            crc: c.crc,
            reject: false,
            rev: c.rev,
            enhanced: (c.rev == 2).then_some(Enhanced {
                peer_to_peer: c.peer_to_peer,
                rtr_send: rtr.send,
                rtr_write: rtr.write,
                rtr_read: rtr.read,
                ird: c.ird,
                ord: c.ord,
            }),
            private_data: c.private_data.clone(),
        }
        .emit()
    }

    /// Parses all bytes that have arrived since the connection was opened.
    ///
    /// After [`Progress::NeedMore`] the caller passes all bytes again, followed by the new ones; at most
    /// [`StartupFrame::MAX_LEN`] bytes are needed.
    ///
    /// # Errors
    /// The bytes are not a Reply to this Request. The caller closes the connection.
    pub fn handle_rx(&mut self, bytes: &[u8]) -> Result<Progress, PeerError> {
        let c = &self.config;
        let Some((frame, consumed)) = StartupFrame::parse(bytes)? else {
            return Ok(Progress::NeedMore);
        };
        // RFC 5044 §7.1.2 [mpa-both-initiate]: two ends that both send a Request do not connect.
        if !frame.reply {
            return Err(PeerError::MpaStartup("a request instead of a reply"));
        }
        // RFC 6581 §9.1 [mpa-depths-reported]: the ULP gets the peer's depths whether or not the peer accepts.
        let peer_depths = frame.enhanced.map(|block| Depths {
            ird: block.ird,
            ord: block.ord,
        });
        if frame.reject {
            let (private_data, rev) = (frame.private_data, frame.rev);
            return Ok(Progress::Rejected {
                consumed,
                private_data,
                rev,
                peer_depths,
            });
        }
        // RFC 6581 §10 [mpa-rev-mirror]: a Reply has the revision of its Request.
        if frame.rev != c.rev {
            return Err(PeerError::MpaStartup("reply with a different revision"));
        }
        // RFC 6581 §10 [mpa-s-mirror]: the Reply has an enhanced block if and only if the Request had one.
        if frame.enhanced.is_some() != (c.rev == 2) {
            return Err(PeerError::MpaStartup(
                "reply does not mirror the enhanced block",
            ));
        }
        let mut params = StreamParams {
            // RFC 5044 §7.1 [mpa-crc-either]: CRCs are used if one end requests them.
            crc: c.crc || frame.crc,
            // RFC 5044 §7.1 [mpa-markers]: the M bit requests markers from the other end.
            send_markers: frame.markers,
            recv_markers: c.markers,
            ird: c.ird,
            ord: c.ord,
            rev: c.rev,
            peer_to_peer: false,
            rtr: None,
            peer_is_anywarp: false,
        };
        if let Some(block) = &frame.enhanced {
            // RFC 6581 §9.1 [mpa-ord-lower]: this end has no more Reads outstanding than the peer serves.
            if block.ird != DEPTH_NOT_NEGOTIATED {
                params.ord = c.ord.min(block.ird);
            }
            // RFC 6581 §9.1 [mpa-ird-insufficient]: this end serves as many Reads as the peer will have outstanding,
            // or ends the stream.
            if block.ord != DEPTH_NOT_NEGOTIATED && block.ord > c.ird {
                if block.ord > c.max_ird {
                    params.ird = c.max_ird;
                    let needed = block.ord;
                    return Ok(Progress::InsufficientIrd {
                        consumed,
                        params,
                        needed,
                    });
                }
                params.ird = block.ord;
            }
            // RFC 6581 §9.2 [mpa-p2p]: if A is set on both sides, a ready-to-receive message is sent first. If A is 0
            // in the Reply, the ULP of this end has to send first.
            if c.peer_to_peer && block.peer_to_peer {
                params.peer_to_peer = true;
                let forms = RtrForms::of(block);
                params.rtr = c.rtr.and(forms).preferred();
                // RFC 6581 §9.2 [mpa-rtr-none]
                if params.rtr.is_none() {
                    return Ok(Progress::NoCommonRtr { consumed, params });
                }
                params.peer_is_anywarp = c.rtr == RtrForms::ALL && forms == RtrForms::ALL;
            }
        }
        Ok(Progress::Established {
            consumed,
            params,
            private_data: frame.private_data,
            peer_depths,
            rtr: params.rtr,
            crc_unconfirmed: c.crc && !frame.crc,
        })
    }
}
