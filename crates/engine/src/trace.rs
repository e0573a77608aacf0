//! Log lines for the observed steps of queue pairs.

use std::fmt::Arguments;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use anywarp_core::observe::{Observer, Step};
use anywarp_core::verbs::wc::Status;
use anywarp_core::wire::rdmap::Terminate;

use crate::clock;
use crate::log;
use crate::log::{Level, Throttle};

/// An observer that logs, or `None` when the log level is too low for any of its lines.
pub(crate) fn observer() -> Option<Arc<dyn Observer>> {
    log::wants(Level::Info).then(|| Arc::new(StepLog) as Arc<dyn Observer>)
}

/// Logs each step: the end of a connection at `info`, requests at `debug`, frames at `trace`.
#[derive(Debug)]
struct StepLog;

impl Observer for StepLog {
    fn step(&self, qpn: u32, step: &Step<'_>) {
        match step {
            Step::Violation(error) => log_end(
                qpn,
                format_args!("the peer broke a rule: {error}; terminating the connection"),
            ),
            Step::Terminated(t) => log_end(
                qpn,
                format_args!("the peer terminated the connection: {}", describe(t)),
            ),
            Step::Failed(why) => log_end(qpn, format_args!("error state: {why}")),
            Step::Complete(c) if c.status != Status::Success => log!(
                Debug,
                "qp 0x{qpn:06x}: wr_id 0x{:x} {:?} completed with {}",
                c.wr_id,
                c.op,
                c.status
            ),
            Step::Complete(c) => log!(
                Debug,
                "qp 0x{qpn:06x}: wr_id 0x{:x} {:?} done, {} bytes",
                c.wr_id,
                c.op,
                c.byte_len
            ),
            Step::Post(wr) => log!(
                Debug,
                "qp 0x{qpn:06x}: post wr_id 0x{:x} {:?}",
                wr.id,
                wr.op
            ),
            other => log!(Trace, "qp 0x{qpn:06x}: {other:?}"),
        }
    }
}

/// Finds the address of a queue pair's peer.
static PEER_OF: OnceLock<fn(u32) -> Option<SocketAddr>> = OnceLock::new();

/// Sets the function that finds the address of a queue pair's peer, which log lines contain.
pub(crate) fn set_peer_lookup(peer_of: fn(u32) -> Option<SocketAddr>) {
    let _ = PEER_OF.set(peer_of);
}

/// Logs how a connection ends, with the peer's address. Peers can cause such lines without limit, so their rate is
/// limited.
fn log_end(qpn: u32, text: Arguments<'_>) {
    static THROTTLE: Throttle = Throttle::new();
    if let Some(left_out) = THROTTLE.line(clock::now()) {
        let peer = PEER_OF.get().and_then(|peer_of| peer_of(qpn));
        let peer = peer.map_or_else(|| "unknown".to_owned(), |p| p.to_string());
        let more = if left_out > 0 {
            format!(" ({left_out} lines like this left out)")
        } else {
            String::new()
        };
        log!(Info, "qp 0x{qpn:06x}, peer {peer}: {text}{more}");
    }
}

/// The name and the code of a Terminate's error (RFC 5040 section 4.8).
fn describe(t: &Terminate) -> String {
    let code = t.term_code();
    let (kind, meaning) = code.name();
    format!("{kind} error: {} ({code})", meaning.unwrap_or("unknown"))
}
