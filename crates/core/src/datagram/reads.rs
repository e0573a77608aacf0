//! RDMA Read over datagrams: outstanding requests and their timeouts.
//!
//! A request is not sent again when the answer is late, because the reader cannot know whether the request or the
//! answer was lost. The request fails after a timeout, which is checked when a datagram arrives, when the program polls
//! for records, and by a timer. An answer that arrives later is not placed (Grant's thesis, section 6.4). In a reliable
//! service an answer is missing only if the peer is lost.
//!
//! In an unreliable service, a request with a forged source address could make this end send much data to a host that did
//! not request it. So an answer may be longer than its request only if the request contains a [cookie](super::cookie). A reader without a
//! cookie gets one and sends the request again. A request for little data is padded to the length of its answer
//! instead.
//!
//! ```text
//!  0                    28         36
//! +--------------------+----------+-----------------------+
//! | RDMA Read Request  |  cookie  | padding               |   payload of the request
//! +--------------------+----------+-----------------------+
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::SmallVec;

use super::reassemble::Coverage;
use super::table::Table;
use super::types::Peer;
use crate::bounds;
use crate::verbs::source::Places;
use crate::wire::rdmap::ReadRequest;
use crate::wire::{Stag, To};

/// Bytes of a request's payload before padding.
pub(super) const REQUEST: usize = ReadRequest::LEN + 8;

/// What an outstanding request expects.
#[derive(Debug)]
pub(super) enum Wanted {
    /// The data of a Read.
    Data {
        /// The sink of the request. The answer has to name the same.
        stag: Stag,
        to: To,
        coverage: Coverage,
        /// The request, which may have to be sent again with a cookie.
        request: ReadRequest,
        /// Whether the request was sent again with another cookie.
        repeated: bool,
    },
    /// The old value of an atomic.
    Value,
}

/// How long a reliable peer may leave a request unanswered before it is probed, and the time between probes.
pub(super) const ASK: Duration = Duration::from_secs(1);

/// An outstanding request.
#[derive(Debug)]
pub(super) struct Reading {
    /// Number of the request in the send queue.
    pub(super) number: u64,
    pub(super) peer: Peer,
    pub(super) places: Places,
    pub(super) size: u32,
    /// When the request fails. In a reliable service: when the peer is probed.
    pub(super) until: Duration,
    pub(super) wanted: Wanted,
}

/// The outstanding requests, and the cookies that peers have sent.
#[derive(Debug, Default)]
pub(super) struct Reads {
    waiting: BTreeMap<u32, Reading>,
    cookies: Table<Peer, u64>,
}

impl Reads {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn insert(&mut self, id: u32, reading: Reading) {
        self.waiting.insert(id, reading);
    }

    /// Returns the request `id`, if it was sent to `peer`.
    pub(super) fn get_mut(&mut self, id: u32, peer: &Peer) -> Option<&mut Reading> {
        self.waiting.get_mut(&id).filter(|r| r.peer == *peer)
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Reading> {
        self.waiting.remove(&id)
    }

    /// Removes the request with this number in the send queue.
    pub(super) fn remove_number(&mut self, number: u64) {
        self.waiting.retain(|_, r| r.number != number);
    }

    /// Removes the requests whose timeout has passed, and returns their numbers.
    pub(super) fn expired(&mut self, now: Duration) -> Vec<u64> {
        let over = |r: &Reading| r.until <= now;
        let ids: Vec<u32> = self
            .waiting
            .iter()
            .filter(|(_, r)| over(r))
            .map(|(id, _)| *id)
            .collect();
        ids.iter()
            .filter_map(|id| self.waiting.remove(id))
            .map(|r| r.number)
            .collect()
    }

    /// Returns the peers that are to be probed now. They are probed again at `next`.
    pub(super) fn overdue(&mut self, now: Duration, next: Duration) -> SmallVec<[Peer; 4]> {
        let mut peers = SmallVec::new();
        for reading in self.waiting.values_mut().filter(|r| r.until <= now) {
            reading.until = next;
            if !peers.contains(&reading.peer) {
                peers.push(reading.peer);
            }
        }
        peers
    }

    /// Returns the numbers of the requests to `peer`, also of those that are not sent yet.
    pub(super) fn to<'a>(&'a self, peer: &'a Peer) -> impl Iterator<Item = u64> + 'a {
        let theirs = self.waiting.values().filter(|r| r.peer == *peer);
        theirs.map(|r| r.number)
    }

    /// The time of the next timeout.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.waiting.values().map(|r| r.until).min()
    }

    pub(super) fn cookie(&self, peer: &Peer) -> Option<u64> {
        self.cookies.get(peer).copied()
    }

    pub(super) fn learn(&mut self, peer: Peer, cookie: u64) {
        if self.cookies.len() >= bounds::COOKIES {
            self.cookies.clear();
        }
        self.cookies.insert(peer, cookie);
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

/// Returns the payload of a request: its header, and the cookie or 0. If `pad`, a request for little data that has no
/// cookie is padded to the length of the answer.
pub(super) fn request_payload(request: &ReadRequest, cookie: Option<u64>, pad: bool) -> Vec<u8> {
    let mut payload = request.emit().to_vec();
    payload.extend_from_slice(&cookie.unwrap_or(0).to_be_bytes());
    let size = request.size as usize;
    if pad && cookie.is_none() && size <= bounds::READ_PADDING {
        payload.resize(REQUEST.max(size), 0);
    }
    payload
}
