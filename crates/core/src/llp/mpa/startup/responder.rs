//! MPA start-up at the end that accepted the TCP connection: the peer's Request, then the Reply.

use super::params::{RtrForms, StreamParams};
use crate::error::{Misuse, PeerError};
use crate::wire::mpa::{DEPTH_NOT_NEGOTIATED, Enhanced, MAX_DEPTH, StartupFrame};

/// Limits of a responder.
#[derive(Clone, Copy, Debug)]
pub struct ResponderLimits {
    /// Whether to ask for CRCs even if the peer does not.
    pub crc: bool,
    /// Whether to ask the peer to send markers.
    pub markers: bool,
    /// Largest number of inbound Reads served at the same time.
    pub max_ird: u16,
    /// Largest number of outbound Reads outstanding.
    pub max_ord: u16,
    /// Whether to confirm all three ready-to-receive messages, so that an anywarp peer recognizes this end.
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
    /// The number of bytes of the Request. No bytes may follow before the Reply is sent.
    pub consumed: usize,
    /// MPA revision.
    pub rev: u8,
    /// Whether the peer requests CRCs.
    pub crc: bool,
    /// Whether the peer requests markers.
    pub markers: bool,
    /// Whether the peer will send a ready-to-receive message first.
    pub peer_to_peer: bool,
    /// The forms of the ready-to-receive message that the peer offers.
    pub rtr: RtrForms,
    /// Reads that the peer serves concurrently. `None` if the Request does not state the number, or leaves it to the ULP.
    pub ird: Option<u16>,
    /// Reads that the peer wants to have outstanding. `None` if the Request does not state the number, or leaves it to the ULP.
    pub ord: Option<u16>,
    /// Private data of the peer's ULP.
    pub private_data: Vec<u8>,
    /// Whether the peer offers all three ready-to-receive messages, as anywarp does, and [`ResponderLimits::known`] is set. Only a
    /// Control Hello in place of the ready-to-receive message makes it certain that the peer is anywarp.
    pub peer_may_be_anywarp: bool,
}

/// Outcome of the bytes that have arrived at a responder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The Request is not complete.
    NeedMore,
    /// The Request is complete; the ULP accepts or rejects it.
    Request(Request),
}

/// The answer that opens the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The Reply, to be sent in one piece.
    pub reply: Vec<u8>,
    /// The agreed parameters.
    pub params: StreamParams,
    /// Whether the first message is a ready-to-receive message (or a Control Hello). It is not delivered to the ULP,
    /// and the ULP is connected when it has arrived. No FPDU may be sent before the first one of the peer.
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
///   +---------+ -----> PeerError [close, nothing is sent] <- bytes after the Request
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

    /// Parses all bytes that have arrived since the connection was opened.
    ///
    /// After [`Incoming::NeedMore`] the caller passes all bytes again, followed by the new ones. Bytes after the
    /// Request are an error; the caller passes them too.
    ///
    /// # Errors
    /// The bytes are not a Request that can be answered. The caller closes the connection.
    pub fn handle_rx(&mut self, bytes: &[u8]) -> Result<Incoming, PeerError> {
        // RFC 5044 §7.1.2 [mpa-quiet-initiator]: after its Request the initiator sends nothing until the Reply.
        const TRAILING_BYTES: PeerError = PeerError::MpaStartup("bytes after the request");
        if !matches!(self.state, State::Waiting) {
            return if bytes.is_empty() {
                Ok(Incoming::NeedMore)
            } else {
                Err(TRAILING_BYTES)
            };
        }
        let Some((frame, consumed)) = StartupFrame::parse(bytes)? else {
            return Ok(Incoming::NeedMore);
        };
        if frame.reply {
            return Err(PeerError::MpaStartup("a reply instead of a request"));
        }
        // RFC 6581 §6 [mpa-rev]: revisions 1 and 2 are answered; 0 is an older protocol with the same key.
        if !matches!(frame.rev, 1 | 2) {
            return Err(PeerError::MpaStartup("unknown revision"));
        }
        if bytes.len() > consumed {
            return Err(TRAILING_BYTES);
        }
        let mut block = frame.enhanced;
        // RFC 6581 §9.2 [mpa-rtr-without-a]: if A is clear, the three bits of the forms are ignored.
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

    /// Accepts the connection for the ULP, which serves `ird` Reads at the same time and has at most `ord` outstanding.
    ///
    /// # Errors
    /// There is no Request to answer, or the private data does not fit the frame. In the second case the caller may
    /// try again.
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
            // RFC 5044 §7.1 [mpa-crc-either]: CRCs are used if one end requests them. The Reply then requests them
            // too, because Linux siw looks only at the Reply.
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
            // RFC 6581 §9.1 [mpa-ord-responder]: this end has no more Reads outstanding than the peer serves.
            if asked.ird != DEPTH_NOT_NEGOTIATED {
                params.ord = params.ord.min(asked.ird);
            }
            // RFC 6581 §9.1: a Read as ready-to-receive message needs a slot, even if the ULP wants no Reads.
            if forms.read {
                params.ird = params.ird.max(1);
            }
            let mirrored = |asked: u16, ours: u16| {
                // RFC 6581 §9.1 [mpa-not-negotiated]: if the peer leaves a depth to the ULP, so does the Reply. Our
                // IRD answers the peer's ORD, and our ORD answers the peer's IRD.
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

    /// Rejects the connection for the ULP. Returns the Reply, after which the connection is closed.
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

/// Returns the ready-to-receive messages that a responder confirms. It can receive all of them.
// RFC 6581 §9.2 recommends to confirm every offered form that the responder can receive (mpa-rtr-confirm in the
// catalogue, `conformance/`). To peers that are not anywarp a single form is confirmed, as other stacks do, so that the
// initiator has no choice to make.
pub(super) fn confirm(offered: RtrForms, known: bool) -> RtrForms {
    match offered {
        // All three forms: an anywarp initiator recognizes this end by them (see the documentation of `startup`).
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
        // RFC 6581 §9.2 [mpa-rtr-propose]: a form that was not offered may be confirmed as well.
        _ => RtrForms {
            write: true,
            ..RtrForms::NONE
        },
    }
}
