//! Private control messages between two anywarp ends.
//!
//! Standard iWARP has no messages for acknowledged completion, receiver-not-ready and Send with
//! immediate. Two anywarp ends exchange control messages for them: untagged messages with a queue
//! number and an opcode that no other implementation uses. Each is a single segment. On a stream they
//! have no payload, since the DDP header has room for their fields. In datagrams, [`Control::Cookie`]
//! has one, and so has [`Control::Ack`], which is a flow report there.
//!
//! ```text
//!  0        1        2                 6         10        14        18
//! +--------+--------+-----------------+---------+---------+---------+
//! |0 1 ..DV|RV ..0xF| kind 8 | arg 24 |  QN 4   |   seq   |  extra  |
//! +--------+--------+-----------------+---------+---------+---------+
//!                    Inv. STag                   MSN       MO
//! ```
//!
//! `seq` counts the request messages (Send, Write, Immediate, Read Request, Atomic Request) of one direction from 1,
//! modulo 2^32. Fields that a kind does not use are zero and ignored.

use super::ddp::Untagged;
use super::rdmap::Opcode;
use super::{Msn, QN_CONTROL, Stag};
use crate::error::PeerError;

/// One control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// First message of the end that opened the connection, with its version and features.
    Hello {
        /// Version of these control messages.
        version: u8,
        /// One bit per feature.
        features: u32,
    },
    /// The responder has executed all requests up to and including `seq`.
    Ack {
        /// The last executed request.
        seq: u32,
    },
    /// Request `seq` was a Send or an Immediate for which no receive was posted. This and all later requests were
    /// dropped. They have to be sent again from `seq` on when the timer has expired.
    Rnr {
        /// The request without a receive.
        seq: u32,
        /// The time to wait: an RNR timer code of verbs (5 bits).
        timer: u8,
    },
    /// The sender's next request message is number `seq` again.
    Restart {
        /// Number of the next request message.
        seq: u32,
    },
    /// Request `seq` failed at the responder.
    Nak {
        /// The request that failed.
        seq: u32,
        /// The reason, as the number of a work completion status.
        status: u8,
    },
    /// Immediate data of the next Send on queue 0.
    SendImmediate {
        /// The four bytes, in the order that the application gave.
        value: [u8; 4],
    },
    /// All following requests are for this shared receive queue of the responder's XRC domain.
    SelectSrq {
        /// The number of the shared receive queue.
        number: u32,
    },
    /// Requests a [`Control::Pong`].
    Ping,
    /// Answers a [`Control::Ping`].
    Pong,
    /// Orderly end of the stream.
    Bye,
    /// A message about the switch of a stream to another carrier.
    Handover(Handover),
    /// Sent only in datagrams, with a payload of 8 bytes. The receiver of this message has to send
    /// its request again, together with this payload.
    Cookie,
}

/// The messages by which two ends agree that the stream leaves its TCP connection: for shared memory, or for a trunk, which carries the
/// streams of many queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Handover {
    /// Offers the memory of a descriptor of the sender's process.
    Offer {
        /// The process.
        pid: u32,
        /// The descriptor in that process.
        fd: u32,
    },
    /// The sender has mapped the memory. Its next FPDU is in the memory.
    Take {
        /// A word of the memory, which only a process that has mapped the memory can know.
        proof: u64,
    },
    /// The sender cannot use the carrier: the stream stays on the connection.
    Refuse,
    /// The next FPDU of the end that made the offer is in shared memory, or on the trunk.
    Switch,
    /// Offers a trunk.
    OfferTrunk {
        /// A random number of the sender's process, which it expects from those who open the trunk.
        process: u32,
        /// The TCP port on which the sender's process accepts trunks.
        port: u16,
        /// The number of the sender's queue pair on the trunk.
        channel: u32,
    },
    /// The sender has opened the trunk. Its next FPDU is on the trunk.
    TakeTrunk {
        /// The number of the trunk.
        trunk: u32,
        /// The number of the sender's queue pair on the trunk.
        channel: u32,
    },
}

impl Handover {
    /// Whether this is the last message of its direction on the connection.
    pub const fn is_last(&self) -> bool {
        matches!(
            self,
            Self::Take { .. } | Self::TakeTrunk { .. } | Self::Switch
        )
    }
}

impl Control {
    /// Reads a control message from its header.
    ///
    /// # Errors
    /// The header is not that of a control message, the message has more than one segment, or its kind is unknown.
    pub fn parse(header: &Untagged) -> Result<Self, PeerError> {
        if header.opcode != Opcode::Control || header.qn != QN_CONTROL {
            return Err(PeerError::Control("not a control header"));
        }
        if !header.last {
            return Err(PeerError::Control("more than one segment"));
        }
        let [kind, high, low, arg] = header.inv_stag.0.to_be_bytes();
        let seq = header.msn.0;
        Ok(match kind {
            KIND_HELLO => Self::Hello {
                version: arg,
                features: header.mo,
            },
            KIND_ACK => Self::Ack { seq },
            KIND_RNR => Self::Rnr { seq, timer: arg },
            KIND_RESTART => Self::Restart { seq },
            KIND_NAK => Self::Nak { seq, status: arg },
            KIND_SEND_IMMEDIATE => Self::SendImmediate {
                value: header.mo.to_be_bytes(),
            },
            KIND_SELECT_SRQ => Self::SelectSrq { number: header.mo },
            KIND_PING => Self::Ping,
            KIND_PONG => Self::Pong,
            KIND_BYE => Self::Bye,
            KIND_COOKIE => Self::Cookie,
            KIND_CARRIER => Self::Handover(match arg {
                0 => Handover::Offer {
                    pid: seq,
                    fd: header.mo,
                },
                1 => Handover::Take {
                    proof: u64::from(seq) << 32 | u64::from(header.mo),
                },
                2 => Handover::Refuse,
                3 => Handover::Switch,
                4 => Handover::OfferTrunk {
                    process: u32::from(high) << 24 | u32::from(low) << 16 | seq >> 16,
                    port: seq as u16,
                    channel: header.mo,
                },
                5 => Handover::TakeTrunk {
                    trunk: seq,
                    channel: header.mo,
                },
                _ => return Err(PeerError::Control("unknown hand-over message")),
            }),
            _ => return Err(PeerError::Control("unknown kind")),
        })
    }

    /// The header that carries this message.
    pub const fn header(&self) -> Untagged {
        let [high, low] = match *self {
            Self::Handover(Handover::OfferTrunk { process, .. }) => {
                ((process >> 16) as u16).to_be_bytes()
            }
            _ => [0, 0],
        };
        let (kind, arg, seq, extra) = match *self {
            Self::Hello { version, features } => (KIND_HELLO, version, 0, features),
            Self::Ack { seq } => (KIND_ACK, 0, seq, 0),
            Self::Rnr { seq, timer } => (KIND_RNR, timer, seq, 0),
            Self::Restart { seq } => (KIND_RESTART, 0, seq, 0),
            Self::Nak { seq, status } => (KIND_NAK, status, seq, 0),
            Self::SendImmediate { value } => (KIND_SEND_IMMEDIATE, 0, 0, u32::from_be_bytes(value)),
            Self::SelectSrq { number } => (KIND_SELECT_SRQ, 0, 0, number),
            Self::Ping => (KIND_PING, 0, 0, 0),
            Self::Pong => (KIND_PONG, 0, 0, 0),
            Self::Bye => (KIND_BYE, 0, 0, 0),
            Self::Cookie => (KIND_COOKIE, 0, 0, 0),
            Self::Handover(Handover::Offer { pid, fd }) => (KIND_CARRIER, 0, pid, fd),
            Self::Handover(Handover::Take { proof }) => {
                (KIND_CARRIER, 1, (proof >> 32) as u32, proof as u32)
            }
            Self::Handover(Handover::Refuse) => (KIND_CARRIER, 2, 0, 0),
            Self::Handover(Handover::Switch) => (KIND_CARRIER, 3, 0, 0),
            Self::Handover(Handover::OfferTrunk {
                process,
                port,
                channel,
            }) => (KIND_CARRIER, 4, process << 16 | port as u32, channel),
            Self::Handover(Handover::TakeTrunk { trunk, channel }) => {
                (KIND_CARRIER, 5, trunk, channel)
            }
        };
        Untagged {
            last: true,
            opcode: Opcode::Control,
            inv_stag: Stag(u32::from_be_bytes([kind, high, low, arg])),
            qn: QN_CONTROL,
            msn: Msn(seq),
            mo: extra,
        }
    }
}

const KIND_HELLO: u8 = 1;
const KIND_ACK: u8 = 2;
const KIND_RNR: u8 = 3;
const KIND_RESTART: u8 = 4;
const KIND_NAK: u8 = 5;
const KIND_SEND_IMMEDIATE: u8 = 6;
const KIND_PING: u8 = 7;
const KIND_PONG: u8 = 8;
const KIND_BYE: u8 = 9;
const KIND_SELECT_SRQ: u8 = 10;
const KIND_COOKIE: u8 = 11;
const KIND_CARRIER: u8 = 12;

#[cfg(test)]
mod tests {
    use super::super::ddp::Header;
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for c in [
            Control::Hello {
                version: 1,
                features: 0xdead_beef,
            },
            Control::Ack { seq: u32::MAX },
            Control::Rnr { seq: 7, timer: 31 },
            Control::Restart { seq: 1 },
            Control::Nak { seq: 9, status: 10 },
            Control::SendImmediate {
                value: [1, 2, 3, 4],
            },
            Control::SelectSrq {
                number: 0x0012_3456,
            },
            Control::Ping,
            Control::Pong,
            Control::Bye,
            Control::Cookie,
            Control::Handover(Handover::Offer {
                pid: 4_000_000,
                fd: 77,
            }),
            Control::Handover(Handover::Take {
                proof: 0x0123_4567_89ab_cdef,
            }),
            Control::Handover(Handover::Refuse),
            Control::Handover(Handover::Switch),
            Control::Handover(Handover::OfferTrunk {
                process: 0x0123_4567,
                port: 65_535,
                channel: 0x89ab_cdef,
            }),
            Control::Handover(Handover::TakeTrunk {
                trunk: 0x0123_4567,
                channel: 0x89ab_cdef,
            }),
        ] {
            let bytes = c.header().emit();
            let (Header::Untagged(h), 18) = Header::parse(&bytes).unwrap() else {
                panic!("{c:?} is not untagged");
            };
            assert_eq!(Control::parse(&h), Ok(c));
        }
    }

    #[test]
    fn an_unknown_kind_or_a_fragment_is_refused() {
        let good = Control::Ping.header();
        let unknown = Untagged {
            inv_stag: Stag(0xee00_0000),
            ..good
        };
        assert_eq!(
            Control::parse(&unknown),
            Err(PeerError::Control("unknown kind"))
        );
        let fragment = Untagged {
            last: false,
            ..good
        };
        assert_eq!(
            Control::parse(&fragment),
            Err(PeerError::Control("more than one segment"))
        );
        let other = Untagged {
            opcode: Opcode::Send,
            qn: 0,
            ..good
        };
        assert_eq!(
            Control::parse(&other),
            Err(PeerError::Control("not a control header"))
        );
    }
}
