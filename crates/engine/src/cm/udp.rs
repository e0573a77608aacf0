//! Datagram identifiers: one question and one answer instead of a connection, as the SIDR protocol of InfiniBand.
//!
//! The active side sends its request to the UDP port that the passive side listens on, again and again until the answer
//! comes; the answer names queue pair and Q_Key. Groups are joined here too.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anywarp_core::datagram::MULTICAST_QPN;
use anywarp_core::wire::dgram::{CM_PRIVATE_DATA, Cm, CmReply, CmRequest};
use rustix::net::SocketType;

use super::{CmId, ConnParam, Event, EventKind, Peer, Phase, State, os};
use crate::clock;
use crate::fd::EngineFd;
use crate::net::route::{GROUP_PORT, source_for};
use crate::net::socket::{self, unmapped};
use crate::random::random_u32;
use crate::reactor::{Source, Token};

/// Pause before a request is sent again.
const AGAIN: Duration = Duration::from_millis(100);
/// Times it is sent: five seconds in all.
const TRIES: u32 = 50;
/// Answers that a listener remembers, for requests that come again.
const ANSWERS: usize = 256;
/// Bytes of the IPv4 and UDP headers in front of each message.
const HEADERS: usize = 28;
/// Bytes that an asker may be sent for each one that came from it: its address may be somebody else's (compare RFC 9000 §8.1).
const FOR_EACH: usize = 3;
/// Datagrams that one turn looks at.
const TURN: usize = 64;
/// Q_Key of queue pairs that identifiers own, as every rdma_cm uses it.
const UDP_QKEY: u32 = 0x0123_4567;
/// Status of an answer that says no (the reject of SIDR).
pub(super) const SIDR_REJECT: u8 = 2;

/// The socket of a datagram identifier.
pub(super) struct Side {
    fd: EngineFd,
    token: Token,
    /// The active side's question.
    question: Option<Question>,
    /// The passive side's answers.
    answers: VecDeque<Answer>,
}

/// What an asker is told, and again when it asks again.
struct Answer {
    to: SocketAddr,
    /// Which request.
    id: u32,
    bytes: Vec<u8>,
    account: Account,
}

/// Bytes that came from an asker, and that went there.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    came: usize,
    went: usize,
}

impl Account {
    fn came(&mut self, bytes: usize) {
        self.came += HEADERS + bytes;
    }

    /// Whether an answer may be sent now; else when the asker has asked once more.
    fn may_send(&mut self, bytes: usize) -> bool {
        let went = self.went + HEADERS + bytes;
        let may = went <= FOR_EACH * self.came;
        if may {
            self.went = went;
        }
        may
    }
}

impl Answer {
    /// Sends it, if the asker may be sent that much.
    fn send(&mut self, fd: &EngineFd) {
        if self.account.may_send(self.bytes.len()) {
            // A socket without room: the asker asks again.
            let _ = fd.send_to(&self.bytes, self.to);
        }
    }
}

struct Question {
    id: u32,
    bytes: Vec<u8>,
    tries: u32,
}

/// Whom a requested identifier answers, and through which listener.
#[derive(Debug, Clone)]
pub(super) struct Asker {
    from: SocketAddr,
    id: u32,
    account: Account,
    listener: Weak<CmId>,
}

struct UdpSource(Weak<CmId>);

impl Source for UdpSource {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.udp_ready();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.udp_timeout();
        }
    }
}

impl CmId {
    fn watch_udp(&self, fd: EngineFd, question: Option<Question>) -> io::Result<Side> {
        let source = Arc::new(UdpSource(self.me.clone()));
        let token = self.engine.add(source, fd.get(), false)?;
        Ok(Side {
            fd,
            token,
            question,
            answers: VecDeque::new(),
        })
    }

    pub(super) fn drop_udp(&self, side: Option<Side>) {
        if let Some(side) = side {
            self.engine.remove(side.token, Some(side.fd.get()));
        }
    }

    /// Listens for requests.
    pub(super) fn listen_udp(&self, state: &mut State, backlog: i32) -> io::Result<()> {
        let fd = state.bound.take().ok_or_else(|| os(libc::EINVAL))?;
        state.udp = Some(self.watch_udp(fd, None)?);
        state.backlog = usize::try_from(backlog).unwrap_or(0).clamp(16, 1024);
        state.phase = Phase::Listening;
        Ok(())
    }

    /// Asks the peer for its queue pair.
    pub(super) fn ask(&self, param: ConnParam) -> io::Result<()> {
        if param.private_data.len() > CM_PRIVATE_DATA {
            return Err(os(libc::EINVAL));
        }
        let mut state = self.lock();
        if state.phase != Phase::Routed {
            return Err(os(libc::EINVAL));
        }
        let remote = state.remote.ok_or_else(|| os(libc::EINVAL))?;
        let fd = match state.bound.take() {
            Some(fd) => fd,
            None => {
                let fd = socket::open(remote.ip(), SocketType::DGRAM)?;
                if let Some(local) = state.local {
                    rustix::net::bind(fd.get(), &SocketAddr::new(local.ip(), 0))?;
                }
                fd
            }
        };
        if let Some(local) = socket::local_addr(&fd) {
            let ip = state.local.map_or_else(|| local.ip(), |l| l.ip());
            state.local = Some(SocketAddr::new(ip, local.port()));
        }
        let id = random_u32();
        let request = Cm::Request(CmRequest {
            id,
            private_data: param.private_data.clone(),
        });
        let question = Question {
            id,
            bytes: request.emit(),
            tries: 0,
        };
        state.param = param;
        state.phase = Phase::Connecting;
        state.udp = Some(self.watch_udp(fd, Some(question))?);
        drop(state);
        self.udp_timeout();
        Ok(())
    }

    /// Sends the question, or gives up.
    fn udp_timeout(&self) {
        {
            let mut state = self.lock();
            if state.phase != Phase::Connecting {
                return;
            }
            let remote = state.remote;
            let Some(side) = &mut state.udp else { return };
            let Some(question) = &mut side.question else {
                return;
            };
            if question.tries < TRIES {
                question.tries += 1;
                if let Some(remote) = remote {
                    // A socket without room, or a peer that is not there yet: the next try does it.
                    let _ = side.fd.send_to(&question.bytes, remote);
                }
                self.engine.deadline(side.token, clock::now() + AGAIN);
                return;
            }
            let side = state.udp.take();
            state.phase = Phase::Over;
            drop(state);
            self.drop_udp(side);
        }
        self.push(EventKind::Unreachable, -libc::ETIMEDOUT);
    }

    fn udp_ready(&self) {
        for _ in 0..TURN {
            let mut buffer = [0_u8; 2048];
            let got = {
                let state = self.lock();
                let Some(side) = &state.udp else { return };
                match side.fd.recv_from(&mut buffer) {
                    Ok((n, from)) => from.map(|f| (n, unmapped(f))),
                    Err(rustix::io::Errno::AGAIN) => return,
                    // An ICMP error for something sent earlier: looked at, gone.
                    Err(_) => continue,
                }
            };
            let Some((n, from)) = got else { continue };
            match Cm::parse(buffer.get(..n).unwrap_or(&[])) {
                Ok(Cm::Request(request)) => self.asked(from, request, n),
                Ok(Cm::Reply(reply)) => self.answered(from, reply),
                Err(_) => {}
            }
        }
    }

    /// Somebody asks, in `bytes` bytes.
    fn asked(&self, from: SocketAddr, request: CmRequest, bytes: usize) {
        let channel = {
            let mut state = self.lock();
            if state.phase != Phase::Listening {
                return;
            }
            if let Some(side) = &mut state.udp
                && let Some(answer) = side
                    .answers
                    .iter_mut()
                    .find(|a| a.to == from && a.id == request.id)
            {
                answer.account.came(bytes);
                answer.send(&side.fd);
                return;
            }
            state.pending.retain(|p| {
                p.upgrade()
                    .is_some_and(|id| id.lock().phase == Phase::Requested)
            });
            let known = state.pending.iter().filter_map(Weak::upgrade).any(|id| {
                let asker = &mut id.lock().asker;
                let asker = asker
                    .as_mut()
                    .filter(|a| a.from == from && a.id == request.id);
                asker.map(|a| a.account.came(bytes)).is_some()
            });
            if known || state.pending.len() >= state.backlog {
                // The application has it already, or has too many: the asker tries again.
                return;
            }
            Arc::clone(&state.channel)
        };
        let child = Self::make(self.engine, &channel, self.port_space);
        {
            let local = self.lock().local;
            let mut state = child.lock();
            state.phase = Phase::Requested;
            state.local = match local {
                Some(l) if l.ip().is_unspecified() => source_for(from)
                    .ok()
                    .map(|ip| SocketAddr::new(ip, l.port())),
                other => other,
            };
            state.remote = Some(from);
            let mut account = Account::default();
            account.came(bytes);
            state.asker = Some(Asker {
                from,
                id: request.id,
                account,
                listener: self.me.clone(),
            });
        }
        // A listener that is going away leaves the asker to its time-out.
        let _ = self.offer(&child, |e| e.private_data = request.private_data);
    }

    /// Answers the request of this identifier.
    pub(super) fn answer(&self, status: u8, private_data: &[u8]) -> io::Result<()> {
        if private_data.len() > CM_PRIVATE_DATA {
            return Err(os(libc::EINVAL));
        }
        let (asker, qpn, qkey) = {
            let mut state = self.lock();
            if state.phase != Phase::Requested {
                return Err(os(libc::EINVAL));
            }
            let (qpn, qkey) = match &state.datagram {
                Some((qp, qkey)) => (qp.number(), *qkey),
                None => (state.param.qp_num, UDP_QKEY),
            };
            if status == 0 && qpn == 0 {
                return Err(os(libc::EINVAL));
            }
            state.phase = if status == 0 {
                Phase::Connected
            } else {
                Phase::Over
            };
            (
                state.asker.clone().ok_or_else(|| os(libc::EINVAL))?,
                qpn,
                qkey,
            )
        };
        let listener = asker.listener.upgrade().ok_or_else(|| os(libc::ENOTCONN))?;
        let bytes = Cm::Reply(CmReply {
            id: asker.id,
            status,
            qpn,
            qkey,
            private_data: private_data.to_vec(),
        })
        .emit();
        let mut state = listener.lock();
        let side = state.udp.as_mut().ok_or_else(|| os(libc::ENOTCONN))?;
        let mut answer = Answer {
            to: asker.from,
            id: asker.id,
            bytes,
            account: asker.account,
        };
        answer.send(&side.fd);
        side.answers.push_back(answer);
        if side.answers.len() > ANSWERS {
            side.answers.pop_front();
        }
        Ok(())
    }

    /// The answer came.
    fn answered(&self, from: SocketAddr, reply: CmReply) {
        {
            let mut state = self.lock();
            let asked = state
                .udp
                .as_ref()
                .and_then(|s| s.question.as_ref())
                .map(|q| q.id);
            let ip = state.remote.map(|r| r.ip());
            if state.phase != Phase::Connecting || asked != Some(reply.id) || ip != Some(from.ip())
            {
                return;
            }
            state.phase = if reply.status == 0 {
                Phase::Connected
            } else {
                Phase::Over
            };
            let side = state.udp.take();
            drop(state);
            self.drop_udp(side);
        }
        if reply.status != 0 {
            let status = i32::from(reply.status);
            self.push_event(
                |e| e.private_data = reply.private_data,
                EventKind::Unreachable,
                status,
            );
            return;
        }
        let port = u16::try_from(reply.qpn >> 8).unwrap_or(0);
        self.push_event(
            |e| {
                e.private_data = reply.private_data;
                e.peer = Some(Peer {
                    addr: SocketAddr::new(from.ip(), port),
                    qpn: reply.qpn,
                    qkey: reply.qkey,
                });
            },
            EventKind::Established,
            0,
        );
    }

    // ------------------------------------------------------------------ groups

    /// Joins a multicast group (`rdma_join_multicast(3)`); the outcome is an event. `context` comes back in it.
    pub fn join(&self, group: IpAddr, context: usize) -> io::Result<()> {
        let (qp, qkey) = self
            .lock()
            .datagram
            .clone()
            .ok_or_else(|| os(libc::EINVAL))?;
        if !group.to_canonical().is_multicast() {
            return Err(os(libc::EINVAL));
        }
        let joined = qp.multicast(group, true);
        let kind = if joined.is_ok() {
            EventKind::MulticastJoin
        } else {
            EventKind::MulticastError
        };
        let status = joined.err().map_or(0, |e| -e.errno());
        self.push_event(
            |e: &mut Event| {
                e.context = context;
                e.peer = Some(Peer {
                    addr: SocketAddr::new(group.to_canonical(), GROUP_PORT),
                    qpn: MULTICAST_QPN,
                    qkey,
                });
            },
            kind,
            status,
        );
        Ok(())
    }

    /// Leaves a multicast group (`rdma_leave_multicast(3)`).
    pub fn leave(&self, group: IpAddr) -> io::Result<()> {
        let (qp, _) = self
            .lock()
            .datagram
            .clone()
            .ok_or_else(|| os(libc::EINVAL))?;
        qp.multicast(group, false).map_err(|e| os(e.errno()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer without private data goes at once, the longest one when the third request came; in all never more than
    /// three times what came.
    #[test]
    fn an_asker_is_sent_no_more_than_three_times_what_came_from_it() {
        let (request, shortest) = (12, 24);
        for (reply, asked) in [(shortest, 1), (shortest + CM_PRIVATE_DATA, 3)] {
            let mut account = Account::default();
            let mut first = None;
            let (mut came, mut went) = (0, 0);
            for n in 1..100 {
                account.came(request);
                came += HEADERS + request;
                if account.may_send(reply) {
                    went += HEADERS + reply;
                    first = first.or(Some(n));
                }
                assert!(went <= FOR_EACH * came, "{went} for {came}");
            }
            assert_eq!(first, Some(asked));
            assert!(went > FOR_EACH * came / 2 || reply == shortest);
        }
    }
}
