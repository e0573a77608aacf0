//! RDMA Read without a connection: requests that wait for their answers, and the answers to others.
//!
//! A request is never sent again because its answer is late: the reader cannot know which of the two was lost. It waits
//! for a time, checked when something else happens on the queue pair or its timer runs, and what comes after that is not
//! placed (the thesis, section 6.4). Over reliable datagrams an answer can only be missing if the peer is gone.
//!
//! A request with a forged source could make this end send much to an address that never asked. So an answer is longer than
//! its request only if the request brings a [cookie](super::cookie); without, the reader is sent one and asks again.
//! A request for little is padded to the length of its answer, and needs none.
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

/// What a request waits for.
#[derive(Debug)]
pub(super) enum Wanted {
    /// The bytes of a Read.
    Data {
        /// The sink as the request named it: the answer has to name it again.
        stag: Stag,
        to: To,
        coverage: Coverage,
        /// The request, to be sent again with a cookie.
        request: ReadRequest,
        /// It was sent with a cookie.
        with_cookie: bool,
    },
    /// The old value of an atomic.
    Value,
}

/// How long a reliable peer is waited for before it is asked whether it is still there, and between two such questions.
pub(super) const ASK: Duration = Duration::from_secs(1);

/// A request that waits for its answer.
#[derive(Debug)]
pub(super) struct Reading {
    /// Number in the send queue.
    pub(super) number: u64,
    pub(super) peer: Peer,
    pub(super) places: Places,
    pub(super) size: u32,
    /// When it has failed; a reliable one: when its peer is asked whether it is still there.
    pub(super) until: Duration,
    pub(super) wanted: Wanted,
}

/// Requests that wait for their answers, and cookies of peers.
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

    /// The request `id`, if it was to `peer`.
    pub(super) fn get_mut(&mut self, id: u32, peer: &Peer) -> Option<&mut Reading> {
        self.waiting.get_mut(&id).filter(|r| r.peer == *peer)
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Reading> {
        self.waiting.remove(&id)
    }

    /// The request of a number of the send queue is over.
    pub(super) fn remove_number(&mut self, number: u64) {
        self.waiting.retain(|_, r| r.number != number);
    }

    /// Requests whose time is over.
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

    /// Peers that are to be asked whether they are still there, and again when `next` comes.
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

    /// Whether anything is wanted of a peer.
    pub(super) fn awaits(&self, peer: &Peer) -> bool {
        self.waiting.values().any(|r| r.peer == *peer)
    }

    /// When the next time is over.
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

/// The payload of a request: its header, a cookie if there is one, and what makes it worth its answer.
pub(super) fn request_payload(request: &ReadRequest, cookie: Option<u64>, pad: bool) -> Vec<u8> {
    let mut payload = request.emit().to_vec();
    payload.extend_from_slice(&cookie.unwrap_or(0).to_be_bytes());
    let size = request.size as usize;
    if pad && cookie.is_none() && size <= bounds::READ_PADDING {
        payload.resize(REQUEST.max(size), 0);
    }
    payload
}
