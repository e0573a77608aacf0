//! How a stream over TCP begins: Request, Reply, and what both ends then know of each other
//! (RFC 5044 §7.1, RFC 6581).
//!
//! Two machines, one per end. Bytes go in, frames come out; the socket, the timer and the ULP belong to
//! the caller. A machine never looks at bytes behind its frame: after the Reply these are FPDUs.
//!
//! The ready-to-receive (RTR) message that follows is an FPDU and is not sent here: these machines
//! only say whether there is one, and which.
//!
//! # How two anywarp ends know each other
//!
//! Neither the private data (it belongs to the user) nor the reserved bits (some stacks echo them)
//! may carry a mark. But our initiator offers all three forms of RTR, and our responder, if it was
//! offered all three, confirms all three; every other known stack confirms one or two. So the
//! initiator knows. The responder only suspects ([`Request::peer_may_be_anywarp`]); it knows when a
//! Control Hello comes in place of the RTR.

use crate::error::{Misuse, PeerError};
use crate::wire::mpa::{DEPTH_NOT_NEGOTIATED, Enhanced, MAX_DEPTH, StartupFrame};

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

    fn of(block: &Enhanced) -> Self {
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

/// How to open a stream.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// MPA revision: 2, or 1 for a second try towards an old stack.
    pub rev: u8,
    /// Ask for CRCs.
    pub crc: bool,
    /// Ask the peer to send markers.
    pub markers: bool,
    /// Offer to send a ready-to-receive message first. Revision 2 only.
    pub peer_to_peer: bool,
    /// The ready-to-receive messages that we can send.
    pub rtr: RtrForms,
    /// Inbound reads that we serve at once.
    pub ird: u16,
    /// Inbound reads up to which we go if the peer needs more than `ird`.
    pub max_ird: u16,
    /// Outbound reads that we want at once.
    pub ord: u16,
    /// What the ULP has to say.
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

/// How many reads and atomics one end says it will serve and have at once; from its point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Depths {
    /// Inbound; 0x3fff leaves it to the ULP.
    pub ird: u16,
    /// Outbound; 0x3fff leaves it to the ULP.
    pub ord: u16,
}

/// What the bytes so far mean to an initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The Reply is not complete.
    NeedMore,
    /// FPDUs may be sent at once, the ready-to-receive message first if there is one.
    Established {
        /// Bytes of the Reply; what follows are FPDUs.
        consumed: usize,
        /// What was agreed.
        params: StreamParams,
        /// What the peer's ULP has to say.
        private_data: Vec<u8>,
        /// The depths that the peer named, for the ULP; [`params`](StreamParams) has the outcome.
        peer_depths: Option<Depths>,
        /// The message to send first. To an anywarp peer a Control Hello goes in its place.
        rtr: Option<Rtr>,
        /// We asked for CRCs and the Reply did not say so; they are on, as the RFC wants. Worth a
        /// line in the log, for the peer may think otherwise.
        crc_unconfirmed: bool,
    },
    /// The peer's ULP does not want the connection. TCP is still open.
    Rejected {
        /// Bytes of the Reply.
        consumed: usize,
        /// What the peer's ULP has to say.
        private_data: Vec<u8>,
        /// Revision of the Reply: less than ours asks for a second try with that one.
        rev: u8,
        /// The depths that the peer named: its ORD is the IRD that it needs from us.
        peer_depths: Option<Depths>,
    },
    /// The peer takes no ready-to-receive message that we can send: send that Terminate, close.
    NoCommonRtr {
        /// Bytes of the Reply.
        consumed: usize,
        /// For framing the Terminate.
        params: StreamParams,
    },
    /// The peer will have more reads outstanding than we can serve: send that Terminate, close.
    InsufficientIrd {
        /// Bytes of the Reply.
        consumed: usize,
        /// For framing the Terminate.
        params: StreamParams,
        /// Reads that the peer will have outstanding.
        needed: u16,
    },
}

impl Progress {
    /// The error to send to the peer, if this outcome is one.
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
///                      timeout, TCP closed: the caller's; a close without any Reply is how a stack
///                      without revision 2 says no: try again with `InitiatorConfig::older`
/// ```
#[derive(Clone, Debug)]
pub struct Initiator {
    config: InitiatorConfig,
}

impl InitiatorConfig {
    /// The same connection in the revision before, for a second try; `None` if there is none.
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
    /// A revision that we do not speak, or private data that does not fit the frame.
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

    /// The Request: the first bytes on the connection, to be sent in one piece because some
    /// hardware does not reassemble them. Nothing may follow it before the Reply is here.
    pub fn request(&self) -> Vec<u8> {
        let c = &self.config;
        // RFC 6581 §9.2 [mpa-rtr-offer]: with A every form that we can send is set, without A none.
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

    /// Looks at everything that has come since the connection was opened.
    ///
    /// Until the answer is something else than [`Progress::NeedMore`] call it again with the same bytes
    /// and those behind them; at most [`StartupFrame::MAX_LEN`] bytes are needed.
    ///
    /// # Errors
    /// What came is not a Reply to our Request: close the connection.
    pub fn handle_rx(&mut self, bytes: &[u8]) -> Result<Progress, PeerError> {
        let c = &self.config;
        let Some((frame, consumed)) = StartupFrame::parse(bytes)? else {
            return Ok(Progress::NeedMore);
        };
        // RFC 5044 §7.1.2 [mpa-both-initiate]: two ends that both send a Request do not connect.
        if !frame.reply {
            return Err(PeerError::MpaStartup("request in place of a reply"));
        }
        // RFC 6581 §9.1 [mpa-depths-told]: the ULP hears what the peer said, whether it accepts or not.
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
            return Err(PeerError::MpaStartup("reply with another revision"));
        }
        // RFC 6581 §10 [mpa-s-mirror]: and the enhanced block exactly if the Request had one.
        if frame.enhanced.is_some() != (c.rev == 2) {
            return Err(PeerError::MpaStartup(
                "reply does not mirror the enhanced block",
            ));
        }
        let mut params = StreamParams {
            // RFC 5044 §7.1 [mpa-crc-either]: one end that wants CRCs is enough.
            crc: c.crc || frame.crc,
            // RFC 5044 §7.1 [mpa-markers]: M speaks about the other end's direction.
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
            // RFC 6581 §9.1 [mpa-ord-lower]: we have no more reads outstanding than the peer serves.
            if block.ird != DEPTH_NOT_NEGOTIATED {
                params.ord = c.ord.min(block.ird);
            }
            // RFC 6581 §9.1 [mpa-ird-insufficient]: we serve what the peer will have outstanding, or
            // end the stream.
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
            // RFC 6581 §9.2 [mpa-p2p]: with A on both sides one ready-to-receive message goes first.
            // A that comes back 0 leaves a plain stream, on which our ULP must speak first.
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

/// What a responder is willing to do.
#[derive(Clone, Copy, Debug)]
pub struct ResponderLimits {
    /// Ask for CRCs even if the peer does not.
    pub crc: bool,
    /// Ask the peer to send markers.
    pub markers: bool,
    /// Most inbound reads served at once.
    pub max_ird: u16,
    /// Most outbound reads at once.
    pub max_ord: u16,
    /// Let an anywarp know that we are one.
    pub known: bool,
}

impl Default for ResponderLimits {
    fn default() -> Self {
        Self {
            crc: false,
            markers: false,
            max_ird: 128,
            max_ord: 128,
            known: true,
        }
    }
}

/// A valid Request, for the ULP to accept or reject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes of the Request. None may follow before our Reply is out.
    pub consumed: usize,
    /// MPA revision.
    pub rev: u8,
    /// The peer wants CRCs.
    pub crc: bool,
    /// The peer wants markers from us.
    pub markers: bool,
    /// The peer will send a ready-to-receive message first.
    pub peer_to_peer: bool,
    /// The forms of that message it offers.
    pub rtr: RtrForms,
    /// Reads that the peer serves at once; `None` if it did not say or leaves it to the ULP.
    pub ird: Option<u16>,
    /// Reads that the peer wants at once; `None` if it did not say or leaves it to the ULP.
    pub ord: Option<u16>,
    /// What the peer's ULP has to say.
    pub private_data: Vec<u8>,
    /// The peer offers all three ready-to-receive messages, as anywarp does. Only a Control Hello in
    /// their place proves it.
    pub peer_may_be_anywarp: bool,
}

/// What the bytes so far mean to a responder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The Request is not complete.
    NeedMore,
    /// The Request is here; the ULP decides.
    Request(Request),
}

/// The answer that opens the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The Reply, to be sent in one piece.
    pub reply: Vec<u8>,
    /// What was agreed.
    pub params: StreamParams,
    /// The first message is a ready-to-receive message (or a Control Hello): not for the ULP, which
    /// hears "connected" when it has come. No FPDU may be sent before the first one of the peer.
    pub expects_rtr: bool,
    /// See [`Request::peer_may_be_anywarp`].
    pub peer_may_be_anywarp: bool,
}

/// The end that listened.
///
/// ```text
///              Request                accept()
///   +---------+ -----> +-----------+ ----------> Accepted   [Reply; wait for the first FPDU]
///   | waiting |        | asking    | ----------> rejected   [Reply with R; close]
///   |  for    |        | the ULP   |  reject()
///   | Request |        +-----------+
///   +---------+ -----> PeerError [close, nothing is sent] <- bytes behind the Request
/// ```
#[derive(Clone, Debug)]
pub struct Responder {
    limits: ResponderLimits,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Waiting,
    Asking {
        rev: u8,
        crc: bool,
        markers: bool,
        enhanced: Option<Enhanced>,
    },
    Answered,
}

impl Responder {
    /// A responder for a connection that was just accepted.
    pub fn new(mut limits: ResponderLimits) -> Self {
        limits.max_ird = limits.max_ird.min(MAX_DEPTH);
        limits.max_ord = limits.max_ord.min(MAX_DEPTH);
        Self {
            limits,
            state: State::Waiting,
        }
    }

    /// Looks at everything that has come since the connection was opened.
    ///
    /// While the answer is [`Incoming::NeedMore`] call it again with the same bytes and those behind
    /// them. After the Request call it with what comes behind that: no byte may, and none is right.
    ///
    /// # Errors
    /// What came is not a Request that we can answer: close the connection.
    pub fn handle_rx(&mut self, bytes: &[u8]) -> Result<Incoming, PeerError> {
        // RFC 5044 §7.1.2 [mpa-quiet-initiator]: behind its Request the initiator is quiet until our Reply.
        const BEHIND: PeerError = PeerError::MpaStartup("bytes behind the request");
        if !matches!(self.state, State::Waiting) {
            return if bytes.is_empty() {
                Ok(Incoming::NeedMore)
            } else {
                Err(BEHIND)
            };
        }
        let Some((frame, consumed)) = StartupFrame::parse(bytes)? else {
            return Ok(Incoming::NeedMore);
        };
        if frame.reply {
            return Err(PeerError::MpaStartup("reply in place of a request"));
        }
        // RFC 6581 §6 [mpa-rev]: 1 and 2 are answered; 0 is an older protocol with the same key.
        if !matches!(frame.rev, 1 | 2) {
            return Err(PeerError::MpaStartup("unknown revision"));
        }
        if bytes.len() > consumed {
            return Err(BEHIND);
        }
        let mut block = frame.enhanced;
        // RFC 6581 §9.2 [mpa-rtr-without-a]: without A the three forms mean nothing.
        if let Some(b) = &mut block
            && !b.peer_to_peer
        {
            (b.rtr_send, b.rtr_write, b.rtr_read) = (false, false, false);
        }
        let rtr = block.as_ref().map(RtrForms::of).unwrap_or_default();
        let negotiated = |depth: u16| (depth != DEPTH_NOT_NEGOTIATED).then_some(depth);
        let request = Request {
            consumed,
            rev: frame.rev,
            crc: frame.crc,
            markers: frame.markers,
            peer_to_peer: block.is_some_and(|b| b.peer_to_peer),
            rtr,
            ird: block.and_then(|b| negotiated(b.ird)),
            ord: block.and_then(|b| negotiated(b.ord)),
            private_data: frame.private_data,
            peer_may_be_anywarp: self.limits.known && rtr == RtrForms::ALL,
        };
        let (rev, crc, markers) = (frame.rev, frame.crc, frame.markers);
        self.state = State::Asking {
            rev,
            crc,
            markers,
            enhanced: block,
        };
        Ok(Incoming::Request(request))
    }

    /// The ULP takes the connection; it serves `ird` reads at once and wants `ord` itself.
    ///
    /// # Errors
    /// There is no Request to answer, or the private data does not fit the frame; in the second
    /// case it may be tried again.
    pub fn accept(&mut self, ird: u16, ord: u16, private_data: &[u8]) -> Result<Accepted, Misuse> {
        let State::Asking {
            rev,
            crc,
            markers,
            enhanced,
        } = self.state
        else {
            return Err(Misuse::WrongState("no mpa request to accept"));
        };
        if private_data.len() > StartupFrame::room(enhanced.is_some()) {
            return Err(Misuse::InvalidArgument("private data too long"));
        }
        let mut params = StreamParams {
            // RFC 5044 §7.1 [mpa-crc-either]: one end that wants CRCs is enough. We then say so in the
            // Reply too, because Linux siw believes the Reply alone.
            crc: crc || self.limits.crc,
            send_markers: markers,
            recv_markers: self.limits.markers,
            ird: ird.min(self.limits.max_ird),
            ord: ord.min(self.limits.max_ord),
            rev,
            peer_to_peer: enhanced.is_some_and(|b| b.peer_to_peer),
            rtr: None,
            peer_is_anywarp: false,
        };
        let mut peer_may_be_anywarp = false;
        let block = enhanced.map(|asked| {
            let forms = if params.peer_to_peer {
                let offered = RtrForms::of(&asked);
                peer_may_be_anywarp = self.limits.known && offered == RtrForms::ALL;
                confirm(offered, self.limits.known)
            } else {
                RtrForms::NONE
            };
            params.rtr = forms.preferred();
            // RFC 6581 §9.1 [mpa-ord-responder]: we have no more reads outstanding than the peer serves.
            if asked.ird != DEPTH_NOT_NEGOTIATED {
                params.ord = params.ord.min(asked.ird);
            }
            // RFC 6581 §9.1: a Read as ready-to-receive needs a slot to be served from, even if the ULP wants no reads.
            if forms.read {
                params.ird = params.ird.max(1);
            }
            let mirrored = |asked: u16, ours: u16| {
                // RFC 6581 §9.1 [mpa-not-negotiated]: "leave it to the ULP" is answered with the same,
                // our IRD to the peer's ORD and our ORD to its IRD.
                if asked == DEPTH_NOT_NEGOTIATED {
                    DEPTH_NOT_NEGOTIATED
                } else {
                    ours
                }
            };
            Enhanced {
                peer_to_peer: params.peer_to_peer,
                rtr_send: forms.send,
                rtr_write: forms.write,
                rtr_read: forms.read,
                ird: mirrored(asked.ord, params.ird),
                ord: mirrored(asked.ird, params.ord),
            }
        });
        self.state = State::Answered;
        Ok(Accepted {
            reply: StartupFrame {
                reply: true,
                markers: self.limits.markers,
                crc: params.crc,
                reject: false,
                rev,
                enhanced: block,
                private_data: private_data.to_vec(),
            }
            .emit(),
            params,
            expects_rtr: params.peer_to_peer,
            peer_may_be_anywarp,
        })
    }

    /// The ULP does not want the connection: the Reply to send before closing it.
    ///
    /// # Errors
    /// As [`Responder::accept`].
    pub fn reject(&mut self, private_data: &[u8]) -> Result<Vec<u8>, Misuse> {
        let State::Asking {
            rev, crc, enhanced, ..
        } = self.state
        else {
            return Err(Misuse::WrongState("no mpa request to reject"));
        };
        if private_data.len() > StartupFrame::room(enhanced.is_some()) {
            return Err(Misuse::InvalidArgument("private data too long"));
        }
        self.state = State::Answered;
        Ok(StartupFrame {
            reply: true,
            markers: false,
            crc: crc || self.limits.crc,
            reject: true,
            rev,
            enhanced: enhanced.map(|asked| Enhanced {
                peer_to_peer: asked.peer_to_peer,
                ird: self.limits.max_ird,
                ..Enhanced::default()
            }),
            private_data: private_data.to_vec(),
        }
        .emit())
    }
}

/// Which ready-to-receive messages a responder confirms. It can receive all of them.
// RFC 6581 §9.2 would like every offered form that we can receive to be confirmed (mpa-rtr-confirm in the catalogue).
// Outside anywarp we name a single one, as the stacks in the field do, so that no initiator has to choose.
fn confirm(offered: RtrForms, known: bool) -> RtrForms {
    match offered {
        // The mark by which an anywarp initiator knows us; see the head of this file.
        RtrForms::ALL if known => RtrForms::ALL,
        RtrForms {
            write: false,
            read: true,
            ..
        } => RtrForms {
            read: true,
            ..RtrForms::NONE
        },
        RtrForms {
            send: true,
            write: false,
            read: false,
        } => RtrForms {
            send: true,
            ..RtrForms::NONE
        },
        // RFC 6581 §9.2 [mpa-rtr-propose]: a form that was not asked for may be confirmed as well.
        _ => RtrForms {
            write: true,
            ..RtrForms::NONE
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQ: &[u8] = b"MPA ID Req Frame";
    const REP: &[u8] = b"MPA ID Rep Frame";

    fn raw(key: &[u8], tail: &[u8]) -> Vec<u8> {
        [key, tail].concat()
    }

    fn config() -> InitiatorConfig {
        InitiatorConfig::default()
    }

    fn initiator(config: InitiatorConfig) -> Initiator {
        Initiator::new(config).unwrap()
    }

    /// What an initiator of this configuration makes of this Reply.
    fn reply_to(config: InitiatorConfig, tail: &[u8]) -> Result<Progress, PeerError> {
        initiator(config).handle_rx(&raw(REP, tail))
    }

    fn established(config: InitiatorConfig, tail: &[u8]) -> StreamParams {
        match reply_to(config, tail) {
            Ok(Progress::Established { params, .. }) => params,
            other => panic!("{other:?}"),
        }
    }

    fn responder(tail: &[u8]) -> (Responder, Request) {
        let mut r = Responder::new(ResponderLimits::default());
        match r.handle_rx(&raw(REQ, tail)) {
            Ok(Incoming::Request(request)) => (r, request),
            other => panic!("{other:?}"),
        }
    }

    /// The Reply to this Request without its key, and what was agreed.
    fn accept(tail: &[u8], ird: u16, ord: u16) -> (Vec<u8>, Accepted) {
        let accepted = responder(tail).0.accept(ird, ord, b"").unwrap();
        let (key, rest) = accepted.reply.split_at(16);
        assert_eq!(key, REP);
        (rest.to_vec(), accepted)
    }

    /// Enhanced flags byte and block: S and C, then the block.
    fn v2(block: [u8; 4]) -> Vec<u8> {
        [&[0x50, 2, 0, 4][..], &block].concat()
    }

    // ---- vectors of the sheet ----

    #[test]
    fn request_of_revision_1() {
        let c = InitiatorConfig {
            rev: 1,
            private_data: b"hi".to_vec(),
            ..config()
        };
        let i = initiator(c);
        assert_eq!(i.request(), raw(REQ, &[0x40, 1, 0, 2, b'h', b'i']));
    }

    #[test]
    fn request_of_revision_2() {
        let rtr = RtrForms {
            send: false,
            ..RtrForms::ALL
        };
        let i = initiator(InitiatorConfig { rtr, ..config() });
        assert_eq!(i.request(), raw(REQ, &v2([0x80, 0x10, 0xc0, 0x10])));
        // And by default, with the third form, by which anywarp is known.
        assert_eq!(
            initiator(config()).request(),
            raw(REQ, &v2([0xc0, 0x10, 0xc0, 0x10]))
        );
    }

    #[test]
    fn reply_that_chooses_write() {
        let (reply, accepted) = accept(&v2([0x80, 0x10, 0xc0, 0x10]), 16, 16);
        assert_eq!(reply, v2([0x80, 0x10, 0x80, 0x10]));
        assert_eq!(accepted.params.rtr, Some(Rtr::Write));
        assert!(accepted.expects_rtr && !accepted.peer_may_be_anywarp);
        let params = established(config(), &reply);
        assert_eq!(params.rtr, Some(Rtr::Write));
        assert!(params.peer_to_peer && params.crc && !params.peer_is_anywarp);
        assert_eq!((params.ird, params.ord, params.rev), (16, 16, 2));
    }

    // ---- two ends of ours ----

    #[test]
    fn two_anywarp_ends_recognize_each_other() {
        let mut i = initiator(InitiatorConfig {
            private_data: b"ping".to_vec(),
            ..config()
        });
        let mut r = Responder::new(ResponderLimits::default());
        let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
            panic!()
        };
        assert!(request.peer_may_be_anywarp && request.peer_to_peer && request.crc);
        assert_eq!((request.ird, request.ord), (Some(16), Some(16)));
        assert_eq!(request.private_data, b"ping");
        let accepted = r.accept(8, 4, b"pong").unwrap();
        assert!(accepted.expects_rtr && accepted.peer_may_be_anywarp);
        assert!(!accepted.params.peer_is_anywarp, "only a Hello proves it");
        assert_eq!((accepted.params.ird, accepted.params.ord), (8, 4));
        match i.handle_rx(&accepted.reply).unwrap() {
            Progress::Established {
                consumed,
                params,
                private_data,
                peer_depths,
                rtr,
                crc_unconfirmed,
            } => {
                assert_eq!(peer_depths, Some(Depths { ird: 8, ord: 4 }));
                assert_eq!(consumed, accepted.reply.len());
                assert!(params.peer_is_anywarp && params.peer_to_peer && params.crc);
                assert_eq!(
                    (params.ird, params.ord),
                    (16, 8),
                    "ORD lowered to the peer's IRD"
                );
                assert_eq!(private_data, b"pong");
                assert_eq!(rtr, Some(Rtr::Write));
                assert!(!crc_unconfirmed);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn two_ends_of_revision_1() {
        let mut i = initiator(config().older().unwrap());
        assert!(
            initiator(config())
                .config
                .older()
                .unwrap()
                .older()
                .is_none()
        );
        let mut r = Responder::new(ResponderLimits::default());
        let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
            panic!()
        };
        assert_eq!((request.rev, request.ird, request.ord), (1, None, None));
        assert!(!request.peer_may_be_anywarp && !request.peer_to_peer);
        let accepted = r.accept(8, 4, b"").unwrap();
        assert_eq!(accepted.reply, raw(REP, &[0x40, 1, 0, 0]));
        assert!(!accepted.expects_rtr);
        let Ok(Progress::Established {
            params, rtr: None, ..
        }) = i.handle_rx(&accepted.reply)
        else {
            panic!()
        };
        assert_eq!((params.ird, params.ord, params.rev), (16, 16, 1));
    }

    // ---- how the bytes come ----

    #[test]
    fn a_reply_may_come_in_any_pieces_and_with_fpdus_behind_it() {
        let (tail, _) = accept(&v2([0xc0, 0x10, 0xc0, 0x10]), 16, 16);
        let mut bytes = raw(REP, &tail);
        let len = bytes.len();
        bytes.extend([0, 14, 0xc1, 0x40]);
        let mut i = initiator(config());
        for n in 0..=bytes.len() {
            match i.clone().handle_rx(&bytes[..n]).unwrap() {
                Progress::NeedMore => assert!(n < len),
                Progress::Established { consumed, .. } => {
                    assert!(n >= len);
                    assert_eq!(consumed, len);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(
            i.handle_rx(&bytes),
            Ok(Progress::Established { .. })
        ));
    }

    #[test]
    fn a_request_may_come_in_any_pieces_but_with_nothing_behind_it() {
        let bytes = initiator(config()).request();
        let mut r = Responder::new(ResponderLimits::default());
        for n in 0..bytes.len() {
            assert_eq!(r.handle_rx(&bytes[..n]), Ok(Incoming::NeedMore));
        }
        let behind = Err(PeerError::MpaStartup("bytes behind the request"));
        let more = [&bytes[..], &[0]].concat();
        assert_eq!(r.clone().handle_rx(&more), behind);
        assert!(matches!(r.handle_rx(&bytes), Ok(Incoming::Request(_))));
        assert_eq!(r.handle_rx(&[]), Ok(Incoming::NeedMore));
        assert_eq!(r.handle_rx(&[0]), behind);
    }

    #[test]
    fn two_initiators_or_two_responders_do_not_connect() {
        let request = initiator(config()).request();
        let crossed = Err(PeerError::MpaStartup("request in place of a reply"));
        assert_eq!(initiator(config()).handle_rx(&request), crossed);
        let crossed = Err(PeerError::MpaStartup("reply in place of a request"));
        let reply = raw(REP, &[0x40, 1, 0, 0]);
        assert_eq!(
            Responder::new(ResponderLimits::default()).handle_rx(&reply),
            crossed
        );
    }

    // ---- gotcha 12: private data ----

    #[test]
    fn private_data_of_every_size_that_fits() {
        for len in [0, 248, 252, 256, 508, 509, 512, 513] {
            let private_data = vec![7; len];
            for (rev, room) in [(2, 508), (1, 512)] {
                let c = InitiatorConfig {
                    rev,
                    private_data: private_data.clone(),
                    ..config()
                };
                let Ok(i) = Initiator::new(c) else {
                    assert!(len > room);
                    continue;
                };
                assert!(len <= room);
                let mut r = Responder::new(ResponderLimits::default());
                let Ok(Incoming::Request(request)) = r.handle_rx(&i.request()) else {
                    panic!()
                };
                assert_eq!(request.private_data, private_data);
                assert!(r.clone().reject(&private_data).is_ok());
                assert!(r.accept(1, 1, &vec![7; room + 1]).is_err());
                assert!(r.accept(1, 1, &private_data).is_ok(), "may be tried again");
            }
        }
    }

    #[test]
    fn a_frame_that_promises_a_block_and_has_none_is_refused() {
        let absent = Err(PeerError::MpaStartup(
            "enhanced block announced but not there",
        ));
        assert_eq!(reply_to(config(), &[0x50, 2, 0, 3, 0, 0, 0]), absent);
        let mut r = Responder::new(ResponderLimits::default());
        let bytes = raw(REQ, &[0x50, 2, 0, 0]);
        assert_eq!(r.handle_rx(&bytes).map(|_| ()), absent.map(|_| ()));
    }

    // ---- gotcha 13: IRD and ORD ----

    #[test]
    fn a_responder_answers_within_its_limits_and_the_peers() {
        for (theirs, ours, reply) in [
            // (IRD, ORD) of the request, of our ULP, of the reply
            ((16, 16), (16, 16), (16, 16)),
            ((1, 16), (16, 16), (16, 1)),
            ((0, 16), (16, 16), (16, 0)),
            ((16, 16), (4, 0), (4, 0)),
            ((300, 300), (1000, 1000), (128, 128)),
            ((0, 0), (0, 0), (0, 0)),
            // 0x3fff in one field is answered in the other
            ((0x3fff, 16), (8, 8), (8, 0x3fff)),
            ((16, 0x3fff), (8, 8), (0x3fff, 8)),
            ((0x3fff, 0x3fff), (8, 8), (0x3fff, 0x3fff)),
        ] {
            let [ih, il] = u16::to_be_bytes(theirs.0);
            let [oh, ol] = u16::to_be_bytes(theirs.1);
            let (_, accepted) = accept(&v2([ih, il, oh, ol]), ours.0, ours.1);
            let (frame, _) = StartupFrame::parse(&accepted.reply).unwrap().unwrap();
            let block = frame.enhanced.unwrap();
            assert_eq!((block.ird, block.ord), reply, "{theirs:?} {ours:?}");
            let params = accepted.params;
            let unless = |field: u16, ours: u16| if field == 0x3fff { ours } else { field };
            assert_eq!(params.ird, unless(reply.0, ours.0), "{theirs:?} {ours:?}");
            assert_eq!(params.ord, unless(reply.1, ours.1), "{theirs:?} {ours:?}");
        }
    }

    #[test]
    fn an_initiator_lowers_its_ord_and_raises_its_ird() {
        for (reply, agreed) in [
            // (IRD, ORD) of the reply, of the initiator afterwards
            ((16, 16), (16, 16)),
            ((1, 1), (16, 1)),
            ((0, 0), (16, 0)),
            ((100, 100), (100, 16)),
            ((100, 128), (128, 16)),
            ((0x3fff, 0x3fff), (16, 16)),
        ] {
            let [ih, il] = u16::to_be_bytes(reply.0);
            let [oh, ol] = u16::to_be_bytes(reply.1);
            let params = established(config(), &v2([ih | 0x80, il, oh | 0x80, ol]));
            assert_eq!((params.ird, params.ord), agreed, "{reply:?}");
        }
    }

    #[test]
    fn a_peer_that_needs_more_reads_than_we_serve_is_told_so() {
        let progress = reply_to(config(), &v2([0x80, 16, 0x80, 129])).unwrap();
        let Progress::InsufficientIrd {
            consumed: 24,
            params,
            needed: 129,
        } = progress
        else {
            panic!("{progress:?}");
        };
        assert_eq!((params.crc, params.ird), (true, 128));
        let error = PeerError::MpaInsufficientIrd {
            needed: 129,
            have: 128,
        };
        assert_eq!(progress.error(), Some(error));
    }

    #[test]
    fn depths_beyond_14_bits_are_cut() {
        let c = InitiatorConfig {
            ird: u16::MAX,
            ord: u16::MAX,
            ..config()
        };
        let bytes = initiator(c).request();
        assert_eq!(bytes[20..], [0xff, 0xfe, 0xff, 0xfe]);
    }

    // ---- gotcha 5: CRC ----

    #[test]
    fn one_end_that_wants_crcs_is_enough() {
        for (asked, answered) in [(true, true), (true, false), (false, true), (false, false)] {
            let c = InitiatorConfig {
                crc: asked,
                ..config()
            };
            let flags = if answered { 0x50 } else { 0x10 };
            let progress = reply_to(c, &[flags, 2, 0, 4, 0x80, 16, 0x80, 16]).unwrap();
            let Progress::Established {
                params,
                crc_unconfirmed,
                ..
            } = progress
            else {
                panic!("{progress:?}");
            };
            assert_eq!(params.crc, asked || answered);
            assert_eq!(crc_unconfirmed, asked && !answered);
        }
    }

    #[test]
    fn a_responder_confirms_the_crc_in_its_reply() {
        for (asked, wanted) in [(true, true), (true, false), (false, true), (false, false)] {
            let flags = if asked { 0x40 } else { 0 };
            let mut r = Responder::new(ResponderLimits {
                crc: wanted,
                ..Default::default()
            });
            r.handle_rx(&raw(REQ, &[flags, 1, 0, 0])).unwrap();
            let accepted = r.accept(1, 1, b"").unwrap();
            assert_eq!(accepted.params.crc, asked || wanted);
            assert_eq!(accepted.reply[16] & 0x40 != 0, asked || wanted);
        }
    }

    #[test]
    fn markers_are_asked_for_each_direction() {
        let (reply, accepted) = accept(&[0xc0, 1, 0, 0], 1, 1);
        assert_eq!(reply, [0x40, 1, 0, 0]);
        assert!(accepted.params.send_markers && !accepted.params.recv_markers);
        let c = InitiatorConfig {
            rev: 1,
            markers: true,
            ..config()
        };
        let params = established(c, &[0x40, 1, 0, 0]);
        assert!(!params.send_markers && params.recv_markers);
        let c = InitiatorConfig { rev: 1, ..config() };
        let params = established(c, &[0xc0, 1, 0, 0]);
        assert!(params.send_markers && !params.recv_markers);
    }

    // ---- gotchas 8 and 9, and the other ready-to-receive rules ----

    #[test]
    fn a_read_as_ready_to_receive_gets_a_slot_even_with_ird_0() {
        // cxgb4: offers Read alone.
        let (reply, accepted) = accept(&v2([0x80, 0, 0x40, 0]), 0, 0);
        assert_eq!(reply, v2([0x80, 1, 0x40, 0]));
        assert_eq!(
            (accepted.params.ird, accepted.params.rtr),
            (1, Some(Rtr::Read))
        );
    }

    #[test]
    fn a_responder_confirms_forms_that_the_peer_can_send() {
        for (offered, confirmed) in [
            // send, write, read
            ((true, true, true), (true, true, true)),
            ((false, true, true), (false, true, false)),
            ((false, true, false), (false, true, false)),
            ((false, false, true), (false, false, true)),
            ((true, false, true), (false, false, true)),
            ((true, true, false), (false, true, false)),
            ((true, false, false), (true, false, false)),
            ((false, false, false), (false, true, false)),
        ] {
            let forms = |(send, write, read): (bool, bool, bool)| RtrForms { send, write, read };
            let (offered, confirmed) = (forms(offered), forms(confirmed));
            assert_eq!(confirm(offered, true), confirmed, "{offered:?}");
            if offered != RtrForms::ALL {
                assert_eq!(confirm(offered, false), confirmed, "{offered:?}");
            }
        }
        // Who is not to be known confirms one form to an anywarp, too.
        let write = RtrForms {
            write: true,
            ..RtrForms::NONE
        };
        assert_eq!(confirm(RtrForms::ALL, false), write);
    }

    #[test]
    fn an_initiator_sends_a_form_that_was_confirmed() {
        for (block, rtr) in [
            ([0x80, 16, 0x80, 16], Rtr::Write),
            ([0x80, 16, 0x40, 16], Rtr::Read),
            ([0x80, 16, 0xc0, 16], Rtr::Write),
            ([0xc0, 16, 0x40, 16], Rtr::Read),
            ([0xc0, 16, 0x00, 16], Rtr::Send),
        ] {
            let params = established(config(), &v2(block));
            assert_eq!(params.rtr, Some(rtr));
            assert!(!params.peer_is_anywarp);
        }
    }

    #[test]
    fn all_three_confirmed_forms_mean_nothing_if_they_were_not_offered() {
        let rtr = RtrForms {
            send: false,
            ..RtrForms::ALL
        };
        let c = InitiatorConfig { rtr, ..config() };
        assert!(!established(c, &v2([0xc0, 16, 0xc0, 16])).peer_is_anywarp);
    }

    #[test]
    fn no_common_form_ends_the_stream() {
        let rtr = RtrForms {
            write: true,
            ..RtrForms::NONE
        };
        let c = InitiatorConfig { rtr, ..config() };
        for (c, block) in [(c, [0x80, 16, 0x40, 16]), (config(), [0x80, 16, 0, 16])] {
            let progress = reply_to(c, &v2(block)).unwrap();
            assert!(matches!(
                progress,
                Progress::NoCommonRtr { consumed: 24, .. }
            ));
            assert_eq!(progress.error(), Some(PeerError::MpaNoCommonRtr));
        }
    }

    #[test]
    fn a_reply_without_a_leaves_a_plain_stream() {
        let params = established(config(), &v2([0x40, 16, 0xc0, 16]));
        assert!(!params.peer_to_peer && !params.peer_is_anywarp);
        assert_eq!(params.rtr, None);
        // And A that was not asked for is not given.
        let c = InitiatorConfig {
            peer_to_peer: false,
            ..config()
        };
        assert_eq!(initiator(c.clone()).request()[20..], [0, 16, 0, 16]);
        assert!(!established(c, &v2([0x80, 16, 0x80, 16])).peer_to_peer);
    }

    #[test]
    fn a_request_without_a_is_answered_without_a() {
        // Linux siw; with forms set that mean nothing without A.
        for block in [[0, 16, 0, 16], [0x40, 16, 0xc0, 16]] {
            let (_, request) = responder(&v2(block));
            assert!(!request.peer_to_peer && !request.peer_may_be_anywarp);
            assert_eq!(request.rtr, RtrForms::NONE);
            let (reply, accepted) = accept(&v2(block), 16, 16);
            assert_eq!(reply, v2([0, 16, 0, 16]));
            assert!(!accepted.expects_rtr && accepted.params.rtr.is_none());
        }
    }

    // ---- revisions ----

    #[test]
    fn revision_and_block_are_mirrored() {
        // Revision 2 without S is a plain frame; siw's reserved bits do not come back.
        assert_eq!(accept(&[0x4f, 2, 0, 0], 1, 1).0, [0x40, 2, 0, 0]);
        assert_eq!(accept(&[0x48, 1, 0, 0], 1, 1).0, [0x40, 1, 0, 0]);
        let refused = |tail: &[u8], why| {
            assert_eq!(reply_to(config(), tail), Err(PeerError::MpaStartup(why)));
        };
        refused(&[0x40, 2, 0, 0], "reply does not mirror the enhanced block");
        refused(&[0x40, 1, 0, 0], "reply with another revision");
        refused(&[0x50, 3, 0, 4, 0, 0, 0, 0], "reply with another revision");
        for rev in [0, 3, 255] {
            let mut r = Responder::new(ResponderLimits::default());
            let unknown = Err(PeerError::MpaStartup("unknown revision"));
            assert_eq!(
                r.handle_rx(&raw(REQ, &[0x40, rev, 0, 4, 0, 0, 0, 0])),
                unknown
            );
        }
        let c = InitiatorConfig { rev: 0, ..config() };
        assert_eq!(
            Initiator::new(c).err(),
            Some(Misuse::InvalidArgument("mpa revision"))
        );
    }

    // ---- rejection ----

    #[test]
    fn a_rejection_carries_private_data_and_depths() {
        let (mut r, _) = responder(&v2([0xc0, 16, 0xc0, 16]));
        let reply = r.reject(b"no").unwrap();
        assert_eq!(
            reply,
            raw(REP, &[0x70, 2, 0, 6, 0x80, 128, 0, 0, b'n', b'o'])
        );
        assert_eq!(
            initiator(config()).handle_rx(&reply),
            Ok(Progress::Rejected {
                consumed: 26,
                private_data: b"no".to_vec(),
                rev: 2,
                peer_depths: Some(Depths { ird: 128, ord: 0 }),
            })
        );
        // One of an older revision says so.
        let progress = reply_to(config(), &[0x60, 1, 0, 0]).unwrap();
        assert!(matches!(
            progress,
            Progress::Rejected {
                rev: 1,
                peer_depths: None,
                ..
            }
        ));
    }

    #[test]
    fn a_request_is_answered_once() {
        let mut r = Responder::new(ResponderLimits::default());
        assert!(r.accept(1, 1, b"").is_err());
        assert!(r.reject(b"").is_err());
        r.handle_rx(&raw(REQ, &[0x40, 1, 0, 0])).unwrap();
        assert!(r.accept(1, 1, b"").is_ok());
        assert!(r.accept(1, 1, b"").is_err());
        assert!(r.reject(b"").is_err());
    }

    #[test]
    fn no_bytes_make_either_end_panic() {
        let mut x = 1u64;
        for round in 0..20_000 {
            let mut bytes = if round % 2 == 0 {
                REQ.to_vec()
            } else {
                REP.to_vec()
            };
            for _ in 0..round % 40 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                bytes.push(if bytes.len() == 18 {
                    x as u8 & 1
                } else {
                    x as u8
                });
            }
            let _ = initiator(config()).handle_rx(&bytes);
            let mut r = Responder::new(ResponderLimits::default());
            if let Ok(Incoming::Request(_)) = r.handle_rx(&bytes) {
                let accepted = r.accept(5, 5, b"x").unwrap();
                assert!(StartupFrame::parse(&accepted.reply).unwrap().is_some());
            }
        }
    }
}
