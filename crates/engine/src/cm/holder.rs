//! What an identifier does for the rdma_cm port that it holds: it answers queries for the port, and releases kernel ports.
//!
//! Queries arrive at the *signpost* of the port, a UDP socket that answers with the TCP or UDP port of the listener
//! (`wire::signpost`). A kernel port is released if a program binds an ordinary socket to it.

use std::net::SocketAddr;

use anywarp_core::wire::signpost::{LEN, Message, Status};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketType};

use super::CmId;
use super::ports::{Holder, answer, release_to_process};
use crate::fd::EngineFd;
use crate::log;
use crate::net::owner;
use crate::net::socket::{local_addr, unmapped};

/// Largest number of queries that are answered at a time, so that a busy signpost does not delay other sockets.
const QUERIES_PER_TURN: usize = 64;

/// Whether the sender of a datagram may request that a listener of this process moves to another port: only processes
/// of this user and of root may. The kernel drops datagrams from other hosts with a loopback source address, so
/// `from` is genuine.
fn may_release(from: SocketAddr) -> bool {
    from.ip().is_loopback() && owner::is_udp_of_this_user_or_root(from)
}

impl CmId {
    /// Returns the answer to the datagram `query`, or `None` if it is not a query. Both have the same length: see
    /// `wire::signpost`.
    fn answer_to(&self, query: &[u8], from: SocketAddr) -> Option<Message> {
        let me: std::sync::Weak<dyn Holder> = self.me.clone();
        match Message::parse(query)? {
            Message::Ask(port, nonce) => Some(Message::Answer(port, nonce, answer(&me, port))),
            Message::Release(port, nonce) => {
                let is_here = answer(&me, port) != Status::Other && may_release(unmapped(from));
                let status = match is_here && release_to_process(port.number) {
                    true => Status::Released,
                    false => Status::Other,
                };
                Some(Message::Answer(port, nonce, status))
            }
            Message::Answer(..) => None,
        }
    }
}

impl Holder for CmId {
    fn answer_queries(&self) {
        for _ in 0..QUERIES_PER_TURN {
            let mut buffer = [0_u8; LEN + 1];
            let received = {
                let state = self.lock();
                let Some(fd) = state.reservation.as_ref().and_then(|p| p.signpost()) else {
                    return;
                };
                rustix::net::recvfrom(fd, &mut buffer[..], RecvFlags::DONTWAIT)
            };
            let (n, from) = match received {
                Ok((_, n, from)) => (n, from.and_then(|f| SocketAddr::try_from(f).ok())),
                Err(Errno::AGAIN) => return,
                // An ICMP error for an earlier answer, which this call has cleared.
                Err(_) => continue,
            };
            let Some(from) = from else { continue };
            let Some(reply) = self.answer_to(buffer.get(..n).unwrap_or(&[]), from) else {
                continue;
            };
            let state = self.lock();
            if let Some(fd) = state.reservation.as_ref().and_then(|p| p.signpost()) {
                // If the send buffer is full, the answer is dropped and the peer repeats its query.
                let _ = rustix::net::sendto(fd, &reply.emit(), SendFlags::NOSIGNAL, &from);
            }
        }
    }

    fn leave(&self, kind: SocketType, number: u16) -> bool {
        let mut state = self.lock();
        let Some(bind_request) = state.bind_request else {
            return false;
        };
        if kind == SocketType::DGRAM {
            let own = state.local.map_or(0, |l| l.port());
            let reservation = state.reservation.as_mut();
            return reservation
                .is_some_and(|reservation| reservation.move_signpost(bind_request, own));
        }
        // Without a signpost, peers find the listener only at the TCP port with the number of its rdma_cm port, so it must
        // not move.
        let Some(reservation) = state
            .reservation
            .as_ref()
            .filter(|p| p.signpost().is_some())
        else {
            return false;
        };
        let at = |fd: &EngineFd| local_addr(fd).map(|a| a.port()) == Some(number);
        if state.bound.as_ref().is_some_and(at) {
            reservation.left_tcp();
            state.bound = None;
            return true;
        }
        if !state.listener.as_ref().is_some_and(|(fd, _)| at(fd)) {
            return false;
        }
        drop(state);
        // Connections in the kernel's queue are accepted first, because closing the socket resets them.
        self.accept_sockets();
        let moved = self.lock().move_listener(self.engine, &self.me);
        match &moved {
            Ok(to) => log!(
                Info,
                "cm: a plain socket needs TCP port {number}; the listener moves to {to}"
            ),
            Err(e) => log!(
                Warn,
                "cm: a plain socket needs TCP port {number}, and the listener cannot move: {e}"
            ),
        }
        moved.is_ok()
    }
}
