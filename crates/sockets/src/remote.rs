//! Queries to other hosts: whether the socket at an address accepts RDMA.
//!
//! A query goes to the UDP port of the directory at the other host. One of the processes there that use the library answers (see
//! `conn/answers.rs`). Only hosts in the networks of this machine are asked, and the answer, or its absence, is cached for a minute.

use crate::limits;
use crate::policy;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::c_int;
use rustc_hash::FxHashMap;
use sockets_base::host;
use sockets_base::name::Protocol;
use sockets_base::query;
use std::net::SocketAddr;
use std::time::Duration;

type Known = FxHashMap<(Protocol, SocketAddr), (bool, u64)>;

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

/// Returns whether the socket at `addr` of another host accepts RDMA. Waits for an answer as long as `set ask` permits.
pub fn ask(protocol: Protocol, addr: SocketAddr) -> bool {
    let wait = policy::settings().ask;
    if wait == 0 {
        return false;
    }
    let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
    let now = sys::now_ms();
    // The caller may be a signal handler that has interrupted a call which holds the lock, so this does not wait for the lock.
    let Some(mut guard) = KNOWN.try_lock() else {
        return false;
    };
    let known = guard.get_or_insert_default();
    if let Some((answer, until)) = known.get(&(protocol, addr))
        && now < *until
    {
        return *answer;
    }
    drop(guard);
    let _stays = sys::NotCancelled::begin();
    let answer = host::is_neighbour(addr.ip()) && query(protocol, addr, wait);
    if let Some(mut guard) = KNOWN.try_lock() {
        let known = guard.get_or_insert_default();
        if known.len() >= limits::REMOTES {
            known.clear();
        }
        let until = now + limits::REMOTE * 1000;
        known.insert((protocol, addr), (answer, until));
    }
    answer
}

/// Called when the peer of a connection does not speak the protocol. If the answer for its address is cached, [`ask`] returns false for the
/// address for a minute.
pub fn distrust(fd: c_int) {
    let Some(peer) = sys::name_of(fd, libc::getpeername) else {
        return;
    };
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    if let Some(mut guard) = KNOWN.try_lock()
        && let Some(entry) = guard
            .get_or_insert_default()
            .get_mut(&(Protocol::Tcp, peer))
    {
        *entry = (false, sys::now_ms() + limits::REMOTE * 1000);
    }
}

fn query(protocol: Protocol, addr: SocketAddr, wait: u32) -> bool {
    let asked = query::query(protocol, addr.port(), sys::random());
    let to = SocketAddr::new(addr.ip(), query::PORT);
    let wait = Duration::from_micros(wait.into());
    sys::exchange(to, &asked, wait, |got| query::parse_answer(got, &asked)) == Some(true)
}
