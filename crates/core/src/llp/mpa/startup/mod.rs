//! MPA start-up: Request and Reply, and what both ends agree on (RFC 5044 §7.1, RFC 6581).
//!
//! There is one machine for each end. Bytes go in, frames come out; the socket, the timer and the ULP belong to the
//! caller. A machine does not read bytes behind its frame: after the Reply these are FPDUs.
//!
//! The ready-to-receive (RTR) message that follows is an FPDU and is not sent here: the outcome of a machine has
//! its form, if there is one.
//!
//! # How two anywarp ends recognize each other
//!
//! Neither the private data (it belongs to the user) nor the reserved bits (some stacks echo them) can carry a mark.
//! But our initiator offers all three forms of RTR, and our responder, if it is offered all three, confirms all three;
//! every other known stack confirms one or two. So the initiator is certain. The responder is not
//! ([`Request::peer_may_be_anywarp`]) before a Control Hello arrives in place of the RTR.

mod initiator;
mod params;
mod responder;

pub use initiator::{Initiator, InitiatorConfig, Progress};
pub use params::{Depths, Rtr, RtrForms, StreamParams};
pub use responder::{Accepted, Incoming, Request, Responder, ResponderLimits};

#[cfg(test)]
mod tests;
