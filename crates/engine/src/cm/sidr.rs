//! Requests and replies between identifiers (`rdma_cm_id`) of datagram services, on a UDP socket. The protocol resembles
//! InfiniBand's Service ID Resolution (SIDR), with retries and limits.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anywarp_core::datagram::TxDatagram;
use smallvec::SmallVec;

use crate::fd::EngineFd;
use crate::reactor::Token;
use crate::sys::Io;
use crate::sys::datagram::{Datagram, Run, receive_datagrams, send_runs};

/// Pause before a request is sent again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Number of times that a request is tried before it fails: every 100 ms for five seconds.
const TRIES: u32 = 50;
/// Replies that a listener keeps to answer repeated requests.
const REPLIES_MAX: usize = 256;
/// Bytes of the IPv4 and UDP headers in front of each message.
const HEADER_BYTES: usize = 28;
/// Largest number of bytes sent to a requester for each byte received from it. The requester's address is not
/// verified and may be forged (compare RFC 9000 §8.1).
const AMPLIFICATION_MAX: usize = 3;
/// Status of a request to a port without a listener.
pub(super) const UNSUPPORTED: u8 = 1;
/// Status of a reply that rejects a request.
pub(super) const REJECT: u8 = 2;

/// The socket of a datagram identifier.
pub(super) struct Endpoint {
    pub(super) fd: EngineFd,
    pub(super) token: Token,
    /// UDP address of the passive side's listener, once the query for it is answered (`connect::signpost`).
    pub(super) to: Option<SocketAddr>,
    /// The request of the active side.
    pub(super) request: Option<Outstanding>,
    /// The replies of the passive side, the oldest first.
    replies: VecDeque<Reply>,
}

impl Endpoint {
    /// A socket that the engine watches as `token`.
    pub(super) fn new(fd: EngineFd, token: Token, request: Option<Outstanding>) -> Self {
        Self {
            fd,
            token,
            to: None,
            request,
            replies: VecDeque::new(),
        }
    }

    /// Receives a datagram.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Datagram, Io> {
        let slot = buffer.len();
        let mut got = SmallVec::new();
        receive_datagrams(self.fd.get(), buffer, slot, &mut got)?;
        got.pop().ok_or(Io::WouldBlock)
    }

    /// Sends the stored reply to a repeated request of `bytes` bytes. Returns false if there is no stored reply.
    pub(super) fn reply_again(&mut self, request: RequestId, bytes: usize) -> bool {
        let reply = self.replies.iter_mut().find(|r| r.request == request);
        let Some(reply) = reply else { return false };
        reply.budget.received(bytes);
        reply.send(&self.fd);
        true
    }

    /// Sends a reply, and stores it in case the request is repeated.
    pub(super) fn reply(&mut self, request: RequestId, budget: Budget, bytes: Vec<u8>) {
        let datagram = TxDatagram {
            to: request.from,
            // The requester drops a reply from an address other than the one that it has sent the request to.
            from: request.to,
            hop_limit: 0,
            traffic_class: 0,
            bytes: bytes.into(),
        };
        let mut reply = Reply {
            request,
            datagram,
            budget,
        };
        reply.send(&self.fd);
        self.replies.push_back(reply);
        if self.replies.len() > REPLIES_MAX {
            self.replies.pop_front();
        }
    }

    /// Counts a try of the outstanding request, and sends it if the listener's address is known. Returns the pause before the
    /// next try. `None`: there is no request, or it was tried [`TRIES`] times.
    pub(super) fn send_request(&mut self) -> Option<Duration> {
        let request = self.request.as_mut().filter(|r| r.tries < TRIES)?;
        request.tries += 1;
        self.send_now();
        Some(RETRY_INTERVAL)
    }

    /// For how long the outstanding request has been tried.
    pub(super) fn tried_for(&self) -> Duration {
        let tries = self.request.as_ref().map_or(0, |r| r.tries);
        RETRY_INTERVAL * tries
    }

    /// Sends the outstanding request.
    pub(super) fn send_now(&self) {
        if let (Some(request), Some(to)) = (&self.request, self.to) {
            // Errors (a full send buffer, a peer that does not listen any more) are ignored: the next try may
            // succeed.
            let _ = self.fd.send_to(&request.bytes, to);
        }
    }
}

/// A request that has not been answered.
pub(super) struct Outstanding {
    pub(super) id: u32,
    bytes: Vec<u8>,
    tries: u32,
}

impl Outstanding {
    pub(super) fn new(id: u32, bytes: Vec<u8>) -> Self {
        Self {
            id,
            bytes,
            tries: 0,
        }
    }
}

/// Identifies a request that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestId {
    /// Its sender.
    pub(super) from: SocketAddr,
    /// The local address that it was sent to.
    pub(super) to: Option<IpAddr>,
    /// The number that the sender gave it.
    pub(super) id: u32,
}

struct Reply {
    request: RequestId,
    datagram: TxDatagram,
    budget: Budget,
}

impl Reply {
    /// Sends the reply, if the budget allows.
    fn send(&mut self, fd: &EngineFd) {
        if self.budget.may_send(self.datagram.bytes.len()) {
            let run = Run {
                datagrams: std::slice::from_ref(&self.datagram),
                from: self.datagram.from,
            };
            // If the send buffer is full, the requester's next try gets the reply. IPv4 addresses are not mapped to IPv6 (`false`),
            // because the kernel accepts them in this form on an IPv6 socket too.
            let _ = send_runs(fd.get(), false, &[run]);
        }
    }
}

/// Bytes received from a requester, and sent to it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Budget {
    received: usize,
    sent: usize,
}

impl Budget {
    /// Counts a received request of `bytes` bytes.
    pub(super) fn received(&mut self, bytes: usize) {
        self.received += HEADER_BYTES + bytes;
    }

    /// Whether a reply of `bytes` bytes may be sent now; if so, counts it as sent.
    fn may_send(&mut self, bytes: usize) -> bool {
        let sent = self.sent + HEADER_BYTES + bytes;
        let may = sent <= AMPLIFICATION_MAX * self.received;
        if may {
            self.sent = sent;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anywarp_core::wire::dgram::CM_PRIVATE_DATA;

    /// A reply without private data is sent at once, the longest reply with the third request. The total sent never
    /// exceeds three times the total received.
    #[test]
    fn a_requester_is_sent_at_most_three_times_the_bytes_that_it_sent() {
        let (request, shortest) = (12, 24);
        for (reply, expected) in [(shortest, 1), (shortest + CM_PRIVATE_DATA, 3)] {
            let mut budget = Budget::default();
            let mut first = None;
            let (mut came, mut went) = (0, 0);
            for n in 1..100 {
                budget.received(request);
                came += HEADER_BYTES + request;
                if budget.may_send(reply) {
                    went += HEADER_BYTES + reply;
                    first = first.or(Some(n));
                }
                assert!(went <= AMPLIFICATION_MAX * came, "{went} for {came}");
            }
            assert_eq!(first, Some(expected));
            assert!(went > AMPLIFICATION_MAX * came / 2 || reply == shortest);
        }
    }
}
