//! MPA start-up: Request and Reply, and the parameters that both ends agree on (RFC 5044 §7.1, RFC 6581).
//!
//! There is one state machine for each end. Its input is received bytes, and its output is frames to send. The caller
//! has the socket, the timer and the ULP. A machine does not read the bytes after its frame. After the Reply these bytes
//! are FPDUs.
//!
//! The ready-to-receive (RTR) message that follows is an FPDU and is not sent here. The result of a machine says in
//! which form it is sent, if it is sent at all.
//!
//! # How two anywarp ends recognize each other
//!
//! The private data cannot contain a mark, because it belongs to the user. The reserved bits cannot contain one either,
//! because some stacks echo them. Instead, an anywarp initiator offers all three forms of RTR, and an anywarp responder that
//! is offered all three confirms all three. Every other known stack confirms one or two, so the initiator can be certain.
//! The responder is certain ([`Request::peer_may_be_anywarp`]) when a Control Hello arrives instead of the RTR.

mod initiator;
mod params;
mod responder;

pub use initiator::{Initiator, InitiatorConfig, Progress};
pub use params::{Depths, Rtr, RtrForms, StreamParams};
pub use responder::{Accepted, Incoming, Request, Responder, ResponderLimits};

#[cfg(test)]
mod tests;
