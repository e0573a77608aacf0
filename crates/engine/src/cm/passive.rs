//! The passive side of a connection: listening, and accepting or rejecting connect requests.

use std::collections::HashSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::bounds;
use anywarp_core::llp::mpa::startup::{Depths, Request};
use anywarp_core::verbs::qp::State as QpState;
use rustix::io::Errno;

use super::state::{Input, Phase};
use super::{CmId, ConnParam, Event, EventKind, State, event_depths, os};
use crate::connect::half_open;
use crate::connect::startup::{Owner, Startup};
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::Rank;
use crate::log;
use crate::net::socket::local_addr;
use crate::qp::Manager;
use crate::reactor::{Source, Token};

/// Minimum backlog passed to `listen(2)`, if the program passes less to `rdma_listen(3)`.
const KERNEL_BACKLOG: i32 = 512;

impl State {
    /// Listens on the bound TCP port, or on another one if a plain socket has it.
    fn open_listener(&mut self, engine: &'static Engine, id: &Weak<CmId>) -> io::Result<()> {
        let bind_request = self.bind_request.ok_or_else(|| os(libc::EINVAL))?;
        // The program's backlog limits the connect requests that it has not answered. The kernel's queue contains all
        // new connections, and a peer that finds it full retries only after a second.
        let backlog = i32::try_from(self.backlog)
            .unwrap_or(i32::MAX)
            .max(KERNEL_BACKLOG);
        let listen = |fd: &EngineFd| rustix::net::listen(fd.get(), backlog);
        let at_port = match &self.bound {
            Some(fd) => match listen(fd) {
                Ok(()) => true,
                // A plain socket was bound to this port as well, before either listened, and called listen(2) first.
                Err(Errno::ADDRINUSE) => false,
                Err(e) => return Err(e.into()),
            },
            None => false,
        };
        // The identifier stays bound until it listens, so that the program may try again after a failure.
        if !at_port {
            let fd = bind_request
                .stream(0)?
                .ok_or_else(|| os(libc::EADDRINUSE))?;
            listen(&fd)?;
            let token = self.watch_listener(engine, id, &fd)?;
            self.bound = None;
            self.listener = Some((fd, token));
        } else if let Some(fd) = &self.bound {
            let token = self.watch_listener(engine, id, fd)?;
            self.listener = self.bound.take().map(|fd| (fd, token));
        }
        Ok(())
    }

    /// Watches a listening socket, and records its TCP port, which the identifier's signpost reports to peers.
    fn watch_listener(
        &self,
        engine: &'static Engine,
        id: &Weak<CmId>,
        fd: &EngineFd,
    ) -> io::Result<Token> {
        // A connection that arrives from here on is accepted when the identifier is unlocked.
        let source = Arc::new(ListenSource(id.clone()));
        let token = engine.add(source, fd.get(), false)?;
        if let Some(reservation) = &self.reservation {
            let at = local_addr(fd).map_or(0, |a| a.port());
            if let Err(e) = reservation.listen(at, true) {
                engine.remove(token, Some(fd.get()));
                return Err(e);
            }
        }
        Ok(token)
    }

    /// Moves the listener to another TCP port, and returns the new port.
    pub(super) fn move_listener(
        &mut self,
        engine: &'static Engine,
        id: &Weak<CmId>,
    ) -> io::Result<u16> {
        let before = self.listener.take();
        let moved = self.open_listener(engine, id);
        match (&moved, before) {
            (Ok(()), Some((fd, token))) => engine.remove(token, Some(fd.get())),
            (_, before) => self.listener = before,
        }
        moved?;
        let now = self.listener.as_ref().and_then(|(fd, _)| local_addr(fd));
        Ok(now.map_or(0, |a| a.port()))
    }

    /// Removes the connect requests whose peers have closed the connection, and whose events the program has not read. The caller
    /// destroys them.
    ///
    /// The function is called only while another request is handled, which adds an event: a program that has found the channel readable
    /// still gets one.
    fn take_closed(&mut self) -> Vec<Arc<CmId>> {
        // An identifier that the program is accepting at this moment is not one of them.
        let is_closed = |id: &CmId| {
            let state = id.lock();
            let startup = state.startup.as_ref();
            state.phase == Phase::Requested && startup.is_some_and(|s| !s.awaits_answer())
        };
        let pending = self.pending.iter().filter_map(Weak::upgrade);
        let closed: Vec<Arc<CmId>> = pending.filter(|id| is_closed(id)).collect();
        let addresses: HashSet<*const CmId> = closed.iter().map(Arc::as_ptr).collect();
        let mut unread = HashSet::new();
        if !closed.is_empty() {
            self.channel.purge(|e| {
                let address = Arc::as_ptr(&e.id);
                let is_unread = e.kind == EventKind::ConnectRequest && addresses.contains(&address);
                if is_unread {
                    unread.insert(address);
                }
                is_unread
            });
        }
        self.pending.retain(|p| !unread.contains(&p.as_ptr()));
        closed
            .into_iter()
            .filter(|id| unread.contains(&Arc::as_ptr(id)))
            .collect()
    }
}

impl CmId {
    /// Listens (`rdma_listen(3)`).
    pub fn listen(&self, backlog: i32) -> io::Result<()> {
        if self.lock().phase == Phase::Idle {
            self.bind((Ipv4Addr::UNSPECIFIED, 0).into())?;
        }
        let mut state = self.lock();
        state.allows(Input::Listen)?;
        let backlog = if backlog <= 0 { 1024 } else { backlog };
        if self.is_datagram {
            return self.listen_udp(&mut state, backlog);
        }
        state.backlog = usize::try_from(backlog).unwrap_or(1024).max(16);
        state.open_listener(self.engine, &self.me)?;
        state.step(Input::Listen)
    }

    pub(super) fn accept_sockets(&self) {
        let Some(owner) = self.me.upgrade() else {
            return;
        };
        let owner: Arc<dyn Owner> = owner;
        let state = self.lock();
        if let Some((listener, token)) = &state.listener {
            half_open::accept(self.engine, listener, *token, &owner);
        }
    }

    fn resume_listening(&self) {
        if let Some((listener, token)) = &self.lock().listener {
            half_open::resume(self.engine, listener, *token);
        }
    }

    /// Accepts a connect request (`rdma_accept(3)`).
    pub fn accept(&self, param: ConnParam) -> io::Result<()> {
        // `rdma_accept(3)` ignores the number of retries, so many programs leave it 0. On InfiniBand it is that of the connect
        // request, but an MPA Request contains none. With 0 retries a short outage of the network would end the connection.
        let param = ConnParam {
            retry_count: 7,
            ..param
        };
        if self.is_datagram {
            let private_data = param.private_data.clone();
            self.lock().param = param;
            return self.reply(true, &private_data);
        }
        if param.private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let qp = self.find_or_make_qp(param.qp_num)?;
        // The program has called `rdma_disconnect` for the request. The request remains, so that it can be rejected.
        if let Some((qp, true)) = &qp
            && qp.query().0 == QpState::Error
        {
            return Err(os(libc::EINVAL));
        }
        let (startup, offered) = {
            let mut state = self.lock();
            state.allows(Input::Accept)?;
            let startup = state.startup.take().ok_or_else(|| os(libc::EINVAL))?;
            state.param = param.clone();
            state.connected_qp = qp.as_ref().map(|(qp, _)| Arc::downgrade(qp));
            state.step(Input::Accept)?;
            (startup, state.offered)
        };
        let Some((qp, own)) = qp else {
            self.lock().end();
            let _ = startup.reject(&[]);
            return Err(os(libc::EINVAL));
        };
        let ird = param.responder_resources.min(bounds::MAX_RD_ATOMIC);
        let ord = param
            .initiator_depth
            .min(bounds::MAX_RD_ATOMIC)
            .min(offered.1);
        if let Some(me) = self.me.upgrade() {
            let manager: Weak<dyn Manager> = Arc::downgrade(&(me as Arc<dyn Manager>));
            qp.manage(manager);
        }
        self.apply_tos(&qp);
        let opened = match startup.accept(ird.into(), ord.into(), &param.private_data) {
            Ok(opened) => opened,
            Err(e) => {
                self.lock().end();
                return Err(e);
            }
        };
        let at_once = !opened.expects_rtr;
        let ird = u8::try_from(opened.params.ird).unwrap_or(0);
        let ord = u8::try_from(opened.params.ord).unwrap_or(0);
        {
            let mut state = self.lock();
            (state.param.responder_resources, state.param.initiator_depth) = (ird, ord);
        }
        self.make_ready(&qp, own, ird, ord);
        qp.attach_managed(opened, false, self.stays());
        self.ready_private_qp();
        if at_once {
            self.established();
        }
        Ok(())
    }

    /// Rejects a connect request (`rdma_reject(3)`).
    pub fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        if self.is_datagram {
            return self.reply(false, private_data);
        }
        if private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let startup = {
            let mut state = self.lock();
            if state.phase != Phase::Requested {
                return Err(os(libc::EINVAL));
            }
            state.end();
            state.startup.take().ok_or_else(|| os(libc::EINVAL))?
        };
        startup.reject(private_data)
    }

    /// Marks an accepted connection as established, because both ends may send now, and raises the event.
    pub(super) fn established(&self) {
        let mut state = self.lock();
        // On the active side, `handle_opened` establishes the connection when the MPA Reply arrives.
        if state.phase != Phase::Accepting || state.step(Input::Established).is_err() {
            return;
        }
        // Another thread that finds the connection established may add the event of its end, which comes after this one.
        self.push_agreed(&state, EventKind::Established, Vec::new(), None);
    }

    /// Establishes an accepted connection because its first message has arrived (`rdma_notify(3)`). `EISCONN` if it is established
    /// already, and `EINVAL` if there is none.
    pub fn first_message_arrived(&self) -> io::Result<()> {
        let phase = self.lock().phase;
        match phase {
            Phase::Accepting => self.established(),
            Phase::Connected => return Err(os(libc::EISCONN)),
            _ => return Err(os(libc::EINVAL)),
        }
        Ok(())
    }

    /// Adds a connect request with the identifier `child` that was created for it. Returns false if the listener is
    /// being destroyed.
    ///
    /// The listener stays locked until the event is in the channel, so that `destroy` either precedes the event or
    /// removes it.
    pub(super) fn offer(&self, child: &Arc<Self>, fill: impl FnOnce(&mut Event)) -> bool {
        let Some(me) = self.me.upgrade() else {
            return false;
        };
        let mut state = self.lock();
        if state.destroyed || state.phase != Phase::Listening {
            return false;
        }
        child.lock().channel = Arc::clone(&state.channel);
        state.pending.push(Arc::downgrade(child));
        child.push_event(
            |e| {
                e.listener = Some(me);
                fill(e);
            },
            EventKind::ConnectRequest,
            0,
        );
        true
    }

    /// Handles the MPA Request of an incoming connection: creates an identifier for it and raises the connect
    /// request.
    pub(super) fn handle_request(&self, startup: &Arc<Startup>, request: Request) {
        let (channel, is_full, port, closed) = {
            let mut state = self.lock();
            state.pending.retain(|p| {
                p.upgrade()
                    .is_some_and(|id| id.lock().phase == Phase::Requested)
            });
            if state.phase != Phase::Listening {
                drop(state);
                log!(Info, "cm: no longer listening, refusing {}", startup.peer);
                let _ = startup.reject(&[]);
                return;
            }
            let closed = if state.pending.len() >= state.backlog {
                state.take_closed()
            } else {
                Vec::new()
            };
            let is_full = state.pending.len() >= state.backlog;
            let port = state.local.map(|l| l.port());
            (Arc::clone(&state.channel), is_full, port, closed)
        };
        for id in closed {
            id.destroy();
        }
        if is_full {
            log!(Info, "cm: backlog is full, refusing {}", startup.peer);
            let _ = startup.reject(&[]);
            return;
        }
        let kind = (self.port_space, self.is_datagram);
        let child = Self::make(self.engine, &channel, kind, Rank::CmRequest);
        let (responder_resources, initiator_depth) = event_depths(Depths {
            ird: request.ird.unwrap_or(u16::MAX),
            ord: request.ord.unwrap_or(u16::MAX),
        });
        {
            let mut state = child.lock();
            let _always_from_idle = state.step(Input::Request);
            // The port is that of the listener, even if the TCP connection has another local port.
            state.local = startup.local().map(|mut local| {
                local.set_port(port.unwrap_or_else(|| local.port()));
                local
            });
            state.remote = Some(startup.peer);
            state.startup = Some(Arc::clone(startup));
            state.offered = (responder_resources, initiator_depth);
        }
        let offered = self.offer(&child, |e| {
            e.private_data = request.private_data;
            e.responder_resources = responder_resources;
            e.initiator_depth = initiator_depth;
        });
        if !offered {
            let _ = startup.reject(&[]);
        }
    }
}

/// The listening socket of an identifier.
struct ListenSource(Weak<CmId>);

impl Source for ListenSource {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.accept_sockets();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        if let Some(id) = self.0.upgrade() {
            id.resume_listening();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;
    use crate::channel::Channel;
    use crate::cm::PortSpace;

    /// One thread accepts. Another one handles the end of the connection as soon as it is established.
    #[test]
    fn the_end_of_a_connection_is_reported_after_its_start() {
        const ROUNDS: u32 = 10_000;
        let channel = Arc::new(Channel::new().unwrap());
        let id = CmId::new(&channel, PortSpace::Tcp).unwrap();
        let (watching, ended) = (AtomicU32::new(0), AtomicU32::new(0));
        let wait_for = |round, counter: &AtomicU32| {
            while counter.load(Ordering::Acquire) < round {
                thread::yield_now();
            }
        };
        let mut wrong = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    watching.store(round, Ordering::Release);
                    while id.lock().phase != Phase::Connected {
                        thread::yield_now();
                    }
                    id.gone();
                    ended.store(round, Ordering::Release);
                }
            });
            for round in 1..=ROUNDS {
                wait_for(round, &watching);
                id.lock().phase = Phase::Accepting;
                id.established();
                wait_for(round, &ended);
                let events = std::iter::from_fn(|| channel.pop());
                let kinds: Vec<_> = events.map(|event| event.kind).collect();
                if kinds != [EventKind::Established, EventKind::Disconnected] {
                    wrong.push(kinds);
                }
            }
        });
        assert!(
            wrong.is_empty(),
            "{} of {ROUNDS} rounds: {:?}",
            wrong.len(),
            wrong.first()
        );
    }
}
