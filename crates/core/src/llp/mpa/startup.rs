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
        /// The peer's depths, if it named any: its ORD is the IRD that it needs from us.
        depths: Option<(u16, u16)>,
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
        if frame.reject {
            let depths = frame.enhanced.map(|block| (block.ird, block.ord));
            let (private_data, rev) = (frame.private_data, frame.rev);
            return Ok(Progress::Rejected {
                consumed,
                private_data,
                rev,
                depths,
            });
        }
        // RFC 6581 §4 [mpa-rev-mirror]: a Reply has the revision of its Request.
        if frame.rev != c.rev {
            return Err(PeerError::MpaStartup("reply with another revision"));
        }
        // RFC 6581 §9 [mpa-s-mirror]: and the enhanced block exactly if the Request had one.
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
}

impl Default for ResponderLimits {
    fn default() -> Self {
        Self {
            crc: false,
            markers: false,
            max_ird: 128,
            max_ord: 128,
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
        // RFC 6581 §4 [mpa-rev]: 1 and 2 are answered; 0 is an older protocol with the same key.
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
            peer_may_be_anywarp: rtr == RtrForms::ALL,
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
                peer_may_be_anywarp = offered == RtrForms::ALL;
                confirm(offered)
            } else {
                RtrForms::NONE
            };
            params.rtr = forms.preferred();
            // RFC 6581 §9.1 [mpa-ord-responder]: we have no more reads outstanding than the peer serves.
            if asked.ird != DEPTH_NOT_NEGOTIATED {
                params.ord = params.ord.min(asked.ird);
            }
            // RFC 6581 §9.2 [mpa-rtr-read-ird]: a Read as ready-to-receive needs a slot to be served
            // from, even if the ULP wants no reads.
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
fn confirm(offered: RtrForms) -> RtrForms {
    match offered {
        // The mark by which an anywarp initiator knows us; see the head of this file.
        RtrForms::ALL => RtrForms::ALL,
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
