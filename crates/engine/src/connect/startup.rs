//! Connections in MPA start-up: from `connect` or `accept` until a queue pair owns the socket.
//!
//! ```text
//!               connected                Reply
//!  +------------+       +------------+          +------+
//!  | Connecting | ----> | Requesting | -------> | Done |   the owner gets the socket
//!  +------------+       +------------+          +------+
//!    ^  | refused, retry     | closed without a Reply: retry with an older MPA revision
//!    +--+--------------------+
//!    | before it connects: the query for the TCP port of an rdma_cm port (`signpost`)
//!
//!               Request                  accept, reject
//!  +------------+       +------------+          +------+
//!  | Listening  | ----> | Answering  | -------> | Done |
//!  +------------+       +------------+          +------+
//!
//!  any state: time-out, end of the connection, malformed frame -> Done, the owner gets a Failure
//! ```

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
use anywarp_core::llp::mpa::startup::{
    Accepted, Depths, Incoming, Initiator, InitiatorConfig, Progress, Request, Responder,
    ResponderLimits, StreamParams,
};
use anywarp_core::wire::signpost::Port;
use rustix::net::SocketType;

use super::signpost::{self, Location, Query, QueryResult};
use crate::clock;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log;
use crate::net::drain::drain;
use crate::net::socket::{self, local_addr};
use crate::net::tcp;
use crate::reactor::{Source, Token};
use crate::sys::socket::{get_option, set_option};

/// How long a responder waits for a Request. siw uses the same value.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an initiator waits for connection and Reply. siw uses the same value.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before another attempt to connect to a port that refused the connection.
const REFUSED_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// How long a Request may wait for the application's answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// The last words of log lines that peers can cause at any rate. One in a thousand of these lines is written ([`log::Rarely`]).
const LOGGED_ONCE: &str = "(one in 1,000 such events is logged)";

/// A connection whose start-up succeeded.
#[derive(Debug)]
pub struct Opened {
    /// The socket.
    pub fd: EngineFd,
    /// The parameters that both ends agreed on.
    pub params: StreamParams,
    /// Bytes that were received after the Reply.
    pub leftover: Vec<u8>,
    /// Private data of the Reply.
    pub private_data: Vec<u8>,
    /// The depths in the Reply, from the peer's point of view.
    pub peer_depths: Option<Depths>,
    /// Whether the peer may be anywarp. An initiator is certain of it. A responder is certain when the first message has arrived.
    pub may_be_anywarp: bool,
    /// Whether the first message is a ready-to-receive message.
    pub expects_rtr: bool,
}

/// Why a start-up ended without a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The port is closed, or the peer's application rejected the Request.
    Rejected {
        /// Private data of the Reply.
        private_data: Vec<u8>,
        /// The depths in the Reply, from the peer's point of view.
        peer_depths: Option<Depths>,
        /// `ECONNREFUSED`.
        errno: i32,
    },
    /// There is no route, or the peer did not answer in time.
    Unreachable {
        /// The reason.
        errno: i32,
    },
    /// The connection broke, or the peer sent a malformed frame.
    Broken {
        /// The reason.
        errno: i32,
    },
}

/// Receives the outcome of start-ups.
pub trait Owner: Send + Sync {
    /// The initiator's connection is open.
    fn opened(&self, startup: &Arc<Startup>, opened: Opened);
    /// The responder received a Request. The owner answers with [`Startup::accept`] or [`Startup::reject`].
    fn requested(&self, startup: &Arc<Startup>, request: Request);
    /// The start-up ended without a connection.
    fn failed(&self, startup: &Arc<Startup>, failure: Failure);
}

/// The parameters of an initiator's connection.
#[derive(Debug)]
pub struct Dial {
    /// The peer.
    pub peer: SocketAddr,
    /// The local address, if it has to be a certain one.
    pub bind: Option<SocketAddr>,
    /// The MPA Request.
    pub config: InitiatorConfig,
    /// How long connection and Reply may take.
    pub timeout: Duration,
    /// How long attempts to connect to a port that refuses are repeated.
    pub retry_refused: Duration,
    /// The port space of an rdma_cm port, for which the TCP port of the listener is queried. `None`: the port is a TCP port.
    pub port_space: Option<u16>,
}

/// The initiator's part of a start-up.
struct Initiating {
    machine: Initiator,
    /// The configuration, for another attempt to connect.
    config: InitiatorConfig,
    /// The part of the Request that is not sent yet.
    unsent: Vec<u8>,
    /// When to connect again to a port that refused the connection.
    retry_at: Option<Instant>,
}

enum Phase {
    /// Queries the TCP port of the peer's listener.
    Querying(Box<InitiatorConfig>),
    Connecting(Box<Initiating>),
    Requesting(Box<Initiating>),
    Listening(Box<Responder>),
    Answering(Box<Responder>),
    Done,
}

struct State {
    phase: Phase,
    fd: Option<EngineFd>,
    token: Token,
    query: Option<Arc<Query>>,
    /// Whether the query for the TCP port was neither answered nor refused.
    silent: bool,
    received: Vec<u8>,
    deadline: Instant,
    local: Option<SocketAddr>,
    /// Set by [`Startup::cancel`], which can be called while the start-up is between two phases and has no socket.
    canceled: bool,
}

impl State {
    fn new(phase: Phase, deadline: Instant) -> Self {
        Self {
            phase,
            fd: None,
            token: Token::NONE,
            query: None,
            silent: false,
            received: Vec::new(),
            deadline,
            local: None,
            canceled: false,
        }
    }
}

/// A connection in start-up.
pub struct Startup {
    engine: &'static Engine,
    owner: Arc<dyn Owner>,
    /// The peer.
    pub peer: SocketAddr,
    /// An initiator's local address, if it has to be a certain one.
    bind: Option<SocketAddr>,
    /// Until when an initiator repeats attempts to connect to a port that refuses.
    retry_until: Option<Instant>,
    /// The port space of an initiator's peer.
    port_space: Option<u16>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Startup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Startup")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// The effect of a step of the state machine. It is applied after the lock is released, because it calls the owner.
enum Effect {
    None,
    Opened(Opened),
    Requested(Request),
    Failed(Failure),
    /// Connect again, with this Request.
    Redial(Box<InitiatorConfig>),
}

impl Startup {
    /// Connects to a peer and opens an MPA stream.
    pub fn dial(
        engine: &'static Engine,
        owner: Arc<dyn Owner>,
        dial: Dial,
    ) -> io::Result<Arc<Self>> {
        let now = clock::now();
        let startup = Arc::new(Self {
            engine,
            owner,
            peer: dial.peer,
            bind: dial.bind,
            retry_until: Some(now + dial.retry_refused),
            port_space: dial.port_space,
            state: Mutex::new(Rank::Startup, State::new(Phase::Done, now + dial.timeout)),
        });
        startup.connect(dial.config)?;
        Ok(startup)
    }

    /// Connects to the peer, after a query for its TCP port if `port_space` is set.
    fn connect(self: &Arc<Self>, config: InitiatorConfig) -> io::Result<()> {
        let Some(space) = self.port_space else {
            return self.connect_to(config, self.peer.port());
        };
        let port = Port {
            space,
            number: self.peer.port(),
        };
        let me = Arc::downgrade(self);
        let done = move |location| {
            if let Some(me) = me.upgrade() {
                me.handle_answer(location);
            }
        };
        // While the lock is held, an answer from another thread waits until the query is stored.
        let mut state = self.lock();
        if state.canceled {
            return Ok(());
        }
        match signpost::query(self.engine, port, self.peer, Box::new(done))? {
            QueryResult::Known(location) => {
                drop(state);
                self.follow(config, location)
            }
            QueryResult::Waiting(query) => {
                state.query = Some(query);
                state.phase = Phase::Querying(Box::new(config));
                Ok(())
            }
        }
    }

    /// Handles the answer to the query for the TCP port, or its absence.
    fn handle_answer(self: &Arc<Self>, location: Location) {
        let config = {
            let mut state = self.lock();
            state.query = None;
            match std::mem::replace(&mut state.phase, Phase::Done) {
                Phase::Querying(config) => config,
                other => {
                    // The start-up was canceled after the query was sent.
                    state.phase = other;
                    return;
                }
            }
        };
        if let Err(e) = self.follow(*config, location) {
            self.cannot_connect(&e);
        }
    }

    /// Tells the owner that connecting failed in this process.
    fn cannot_connect(self: &Arc<Self>, error: &io::Error) {
        if !self.lock().canceled {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.owner.failed(self, Failure::Unreachable { errno });
        }
    }

    /// Connects to the location that was found.
    fn follow(self: &Arc<Self>, config: InitiatorConfig, location: Location) -> io::Result<()> {
        match location {
            Location::At(port) => self.connect_to(config, port),
            Location::SamePort => self.connect_to(config, self.peer.port()),
            Location::Unanswered => {
                self.lock().silent = true;
                self.connect_to(config, self.peer.port())
            }
            Location::NotListening => {
                // This is handled like a port that refuses the connection.
                let machine = initiator(&config)?;
                let mut state = self.lock();
                if state.canceled {
                    return Ok(());
                }
                let token = self.engine.reserve(Arc::clone(self) as Arc<dyn Source>);
                state.token = token;
                state.phase = Phase::Connecting(Box::new(Initiating {
                    unsent: Vec::new(),
                    machine,
                    config,
                    retry_at: None,
                }));
                let effect = self.handle_refused(&mut state);
                drop(state);
                self.carry_out(effect);
                Ok(())
            }
        }
    }

    /// Connects to a TCP port of the peer.
    fn connect_to(self: &Arc<Self>, config: InitiatorConfig, port: u16) -> io::Result<()> {
        let machine = initiator(&config)?;
        let mut peer = self.peer;
        peer.set_port(port);
        let fd = socket::open(peer.ip(), SocketType::STREAM)?;
        socket::tune_stream(&fd);
        let mut state = self.lock();
        if state.canceled {
            return Ok(());
        }
        if let Some(bind) = self.bind {
            let mut any = bind;
            any.set_port(0);
            let option = if bind.port() != 0 {
                (libc::SOL_SOCKET, libc::SO_REUSEADDR)
            } else {
                (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT)
            };
            set_option(fd.get(), option.0, option.1, 1);
            match rustix::net::bind(fd.get(), &bind) {
                // An rdma_cm port may be free although a plain socket has the TCP port with the same number.
                Err(rustix::io::Errno::ADDRINUSE) if self.port_space.is_some() => {
                    rustix::net::bind(fd.get(), &any)?;
                }
                other => other?,
            }
        }
        match rustix::net::connect(fd.get(), &peer) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        let token = self.engine.reserve(Arc::clone(self) as Arc<dyn Source>);
        state.token = token;
        state.received.clear();
        state.phase = Phase::Connecting(Box::new(Initiating {
            unsent: machine.request(),
            machine,
            config,
            retry_at: None,
        }));
        self.engine.deadline(token, state.deadline);
        let watched = self.engine.watch(token, fd.get(), true);
        state.fd = Some(fd);
        if watched.is_err() {
            drop(self.finish(&mut state));
        }
        watched
    }

    /// Starts with a connection that was accepted, and waits for its Request.
    pub fn answer(
        engine: &'static Engine,
        owner: Arc<dyn Owner>,
        fd: EngineFd,
        peer: SocketAddr,
        limits: ResponderLimits,
    ) -> io::Result<Arc<Self>> {
        socket::tune_stream(&fd);
        let listening = Phase::Listening(Box::new(Responder::new(limits)));
        let startup = Arc::new(Self {
            engine,
            owner,
            peer,
            bind: None,
            retry_until: None,
            port_space: None,
            state: Mutex::new(
                Rank::Startup,
                State::new(listening, clock::now() + REQUEST_TIMEOUT),
            ),
        });
        let token = engine.reserve(Arc::clone(&startup) as Arc<dyn Source>);
        let mut state = startup.lock();
        state.token = token;
        state.local = local_addr(&fd);
        engine.deadline(token, state.deadline);
        let watched = engine.watch(token, fd.get(), false);
        state.fd = Some(fd);
        if watched.is_err() {
            drop(startup.finish(&mut state));
        }
        drop(state);
        watched?;
        Ok(startup)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The local address of the connection.
    pub fn local(&self) -> Option<SocketAddr> {
        let state = self.lock();
        state
            .local
            .or_else(|| state.fd.as_ref().and_then(local_addr))
    }

    /// Accepts the Request: sends the Reply and returns the connection.
    pub fn accept(&self, ird: u16, ord: u16, private_data: &[u8]) -> io::Result<Opened> {
        let (fd, accepted): (_, Accepted) =
            self.finish_answering(|responder| responder.accept(ird, ord, private_data))?;
        send_all(&fd, &accepted.reply)?;
        Ok(Opened {
            fd,
            params: accepted.params,
            leftover: Vec::new(),
            private_data: Vec::new(),
            peer_depths: None,
            may_be_anywarp: accepted.peer_may_be_anywarp,
            expects_rtr: accepted.expects_rtr,
        })
    }

    /// Rejects the Request, and closes the connection without a reset, which could overtake the Reply.
    pub fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let (fd, reply) = self.finish_answering(|responder| responder.reject(private_data))?;
        send_all(&fd, &reply)?;
        let _draining = drain(self.engine, fd);
        Ok(())
    }

    /// Makes a Reply and removes the socket from the start-up. The caller sends the Reply.
    fn finish_answering<T>(
        &self,
        reply: impl FnOnce(&mut Responder) -> Result<T, Misuse>,
    ) -> io::Result<(EngineFd, T)> {
        let mut state = self.lock();
        let Phase::Answering(responder) = &mut state.phase else {
            return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
        };
        let reply = reply(responder).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let fd = self.finish(&mut state);
        let fd = fd.ok_or_else(|| io::Error::from_raw_os_error(libc::ECONNRESET))?;
        Ok((fd, reply))
    }

    /// Whether an initiator's TCP connection was never established.
    pub fn never_connected(&self) -> bool {
        self.lock().local.is_none()
    }

    /// Whether this is a responder that still waits for the Request.
    pub(crate) fn awaits_request(&self) -> bool {
        matches!(self.lock().phase, Phase::Listening(_))
    }

    /// Whether this is a responder whose Request waits for the answer, and whose connection is open.
    pub(crate) fn awaits_answer(&self) -> bool {
        matches!(self.lock().phase, Phase::Answering(_))
    }

    /// Closes the connection if its Request has not arrived. Returns whether the connection was closed.
    pub(crate) fn close_if_silent(&self) -> bool {
        let mut state = self.lock();
        let silent = matches!(state.phase, Phase::Listening(_));
        if silent {
            drop(self.finish(&mut state));
        }
        silent
    }

    /// Closes the connection without a call of the owner.
    pub fn cancel(&self) {
        let mut state = self.lock();
        state.canceled = true;
        drop(self.finish(&mut state));
    }

    /// Ends the start-up, and stops watching the socket.
    fn finish(&self, state: &mut State) -> Option<EngineFd> {
        state.phase = Phase::Done;
        if let Some(query) = state.query.take() {
            query.cancel();
        }
        let fd = state.fd.take();
        let token = std::mem::replace(&mut state.token, Token::NONE);
        self.engine.remove(token, fd.as_ref().map(EngineFd::get));
        fd
    }

    fn fail(&self, state: &mut State, failure: Failure) -> Effect {
        drop(self.finish(state));
        Effect::Failed(failure)
    }

    fn broken(&self, state: &mut State, errno: i32) -> Effect {
        self.fail(state, Failure::Broken { errno })
    }

    // ------------------------------------------------------------------ the state machine

    fn step(&self, readable: bool, writable: bool) -> Effect {
        let mut state = self.lock();
        let state = &mut *state;
        if state.fd.is_none() {
            return Effect::None;
        }
        let connecting = matches!(state.phase, Phase::Connecting(_));
        if connecting
            && (writable || readable)
            && let Err(effect) = self.finish_connecting(state)
        {
            return effect;
        }
        if let Err(effect) = self.send_request(state) {
            return effect;
        }
        if !readable {
            return Effect::None;
        }
        if let Err(effect) = self.receive(state) {
            return effect;
        }
        match state.phase {
            Phase::Requesting(_) => self.handle_reply(state),
            Phase::Listening(_) => self.handle_request(state),
            Phase::Answering(_) => {
                static LIMIT: log::Rarely = log::Rarely::new();
                if LIMIT.now() {
                    log!(
                        Warn,
                        "{}: sent more data before its MPA Request was answered; connection closed {LOGGED_ONCE}",
                        self.peer
                    );
                }
                self.broken(state, libc::EPROTO)
            }
            Phase::Querying(_) | Phase::Connecting(_) | Phase::Done => Effect::None,
        }
    }

    /// Handles the end of the socket's connection attempt.
    fn finish_connecting(&self, state: &mut State) -> Result<(), Effect> {
        let Some(fd) = &state.fd else { return Ok(()) };
        match get_option(fd.get(), libc::SOL_SOCKET, libc::SO_ERROR) {
            Some(0) => {
                state.local = local_addr(fd);
                let phase = std::mem::replace(&mut state.phase, Phase::Done);
                if let Phase::Connecting(initiating) = phase {
                    state.phase = Phase::Requesting(initiating);
                }
                Ok(())
            }
            Some(libc::ECONNREFUSED) => Err(self.handle_refused(state)),
            e => {
                let errno = e.unwrap_or(libc::EIO);
                Err(self.fail(state, Failure::Unreachable { errno }))
            }
        }
    }

    /// Handles a port that refused the connection: connects again until `retry_refused` has passed.
    fn handle_refused(&self, state: &mut State) -> Effect {
        let now = clock::now();
        if let Phase::Connecting(initiating) = &mut state.phase
            && self.retry_until.is_some_and(|until| now < until)
        {
            if let Some(fd) = state.fd.take() {
                self.engine.unwatch(fd.get());
            }
            let at = now + REFUSED_RETRY_INTERVAL;
            initiating.retry_at = Some(at);
            self.engine.deadline(state.token, at);
            return Effect::None;
        }
        let failure = Failure::Rejected {
            private_data: Vec::new(),
            peer_depths: None,
            errno: libc::ECONNREFUSED,
        };
        self.fail(state, failure)
    }

    /// Sends the rest of the Request.
    fn send_request(&self, state: &mut State) -> Result<(), Effect> {
        let (Phase::Requesting(initiating), Some(fd)) = (&mut state.phase, &state.fd) else {
            return Ok(());
        };
        let unsent = &mut initiating.unsent;
        if unsent.is_empty() {
            return Ok(());
        }
        match fd.send(unsent) {
            Ok(n) => {
                unsent.drain(..n.min(unsent.len()));
                if unsent.is_empty() {
                    self.engine.want_write(state.token, fd.get(), false);
                }
                Ok(())
            }
            Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(self.broken(state, e.raw_os_error())),
        }
    }

    /// Receives bytes of the frame, and perhaps the first bytes of the messages that follow it.
    fn receive(&self, state: &mut State) -> Result<(), Effect> {
        let Some(fd) = &state.fd else {
            return Err(Effect::None);
        };
        let mut buffer = [0_u8; bounds::STARTUP_FRAME_MAX];
        match fd.recv(&mut buffer) {
            Ok(0) => Err(self.handle_eof(state)),
            Ok(n) => {
                let received = buffer.get(..n).unwrap_or(&[]);
                state.received.extend_from_slice(received);
                Ok(())
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Err(Effect::None),
            Err(e) => Err(self.broken(state, e.raw_os_error())),
        }
    }

    /// Handles that the peer closed the connection.
    fn handle_eof(&self, state: &mut State) -> Effect {
        match &state.phase {
            // A stack that does not know MPA revision 2 closes without a Reply.
            Phase::Requesting(initiating) if state.received.is_empty() => {
                if let Some(older) = initiating.config.older() {
                    log!(
                        Info,
                        "{}: no answer to MPA revision 2, trying revision 1",
                        self.peer
                    );
                    drop(self.finish(state));
                    return Effect::Redial(Box::new(older));
                }
            }
            Phase::Listening(_) => {
                static LIMIT: log::Rarely = log::Rarely::new();
                if LIMIT.now() {
                    log!(
                        Warn,
                        "{}: closed the connection before it sent an MPA Request, like a port scan {LOGGED_ONCE}",
                        self.peer
                    );
                }
            }
            _ => {}
        }
        self.broken(state, libc::ECONNRESET)
    }

    fn handle_reply(&self, state: &mut State) -> Effect {
        let Phase::Requesting(initiating) = &mut state.phase else {
            return Effect::None;
        };
        match initiating.machine.handle_rx(&state.received) {
            Ok(Progress::NeedMore) => Effect::None,
            Ok(Progress::Established {
                consumed,
                params,
                private_data,
                peer_depths,
                crc_unconfirmed,
                ..
            }) => {
                if crc_unconfirmed {
                    log!(
                        Info,
                        "{}: the peer did not confirm CRCs; they are used nevertheless",
                        self.peer
                    );
                }
                let leftover = state.received.split_off(consumed.min(state.received.len()));
                if state.silent {
                    signpost::remember_silent(self.peer);
                }
                let Some(fd) = self.finish(state) else {
                    return Effect::None;
                };
                Effect::Opened(Opened {
                    fd,
                    may_be_anywarp: params.peer_is_anywarp,
                    params,
                    leftover,
                    private_data,
                    peer_depths,
                    expects_rtr: false,
                })
            }
            Ok(Progress::Rejected {
                private_data,
                peer_depths,
                ..
            }) => {
                let failure = Failure::Rejected {
                    private_data,
                    peer_depths,
                    errno: libc::ECONNREFUSED,
                };
                self.fail(state, failure)
            }
            Ok(other) => {
                if let Some(error) = other.error() {
                    log!(Info, "{}: start-up failed: {error}", self.peer);
                    // RFC 6581 §9.1, §9.2 [mpa-startup-terminated]: a Terminate is sent before the connection is closed.
                    if let Progress::NoCommonRtr { params, .. }
                    | Progress::InsufficientIrd { params, .. } = &other
                        && let Some(fd) = self.finish(state)
                    {
                        tcp::refuse(self.engine, fd, params, &error);
                    }
                }
                self.broken(state, libc::EPROTO)
            }
            Err(error) => {
                log!(Info, "{}: invalid MPA Reply: {error}", self.peer);
                self.broken(state, libc::EPROTO)
            }
        }
    }

    fn handle_request(&self, state: &mut State) -> Effect {
        let Phase::Listening(machine) = &mut state.phase else {
            return Effect::None;
        };
        match machine.handle_rx(&state.received) {
            Ok(Incoming::NeedMore) => Effect::None,
            Ok(Incoming::Request(request)) => {
                let phase = std::mem::replace(&mut state.phase, Phase::Done);
                if let Phase::Listening(machine) = phase {
                    state.phase = Phase::Answering(machine);
                }
                state.received.clear();
                state.deadline = clock::now() + ANSWER_TIMEOUT;
                self.engine.deadline(state.token, state.deadline);
                Effect::Requested(request)
            }
            Err(error) => {
                static LIMIT: log::Rarely = log::Rarely::new();
                if LIMIT.now() {
                    log!(
                        Warn,
                        "{}: not an MPA Request: {error}; connection closed {LOGGED_ONCE}",
                        self.peer
                    );
                }
                self.broken(state, libc::EPROTO)
            }
        }
    }

    fn handle_timeout(&self, now: Instant) -> Effect {
        let mut state = self.lock();
        let state = &mut *state;
        match &mut state.phase {
            Phase::Done => return Effect::None,
            Phase::Connecting(initiating) if initiating.retry_at.is_some_and(|at| at <= now) => {
                let config = initiating.config.clone();
                drop(self.finish(state));
                return Effect::Redial(Box::new(config));
            }
            _ if state.deadline > now => return Effect::None,
            Phase::Listening(_) => {
                static LIMIT: log::Rarely = log::Rarely::new();
                if LIMIT.now() {
                    log!(
                        Warn,
                        "{}: no MPA Request within {} s; connection closed {LOGGED_ONCE}",
                        self.peer,
                        REQUEST_TIMEOUT.as_secs()
                    );
                }
            }
            _ => {}
        }
        let errno = libc::ETIMEDOUT;
        self.fail(state, Failure::Unreachable { errno })
    }

    fn carry_out(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Opened(opened) => self.owner.opened(self, opened),
            Effect::Requested(request) => self.owner.requested(self, request),
            Effect::Failed(failure) => self.owner.failed(self, failure),
            Effect::Redial(config) => {
                if let Err(e) = self.connect(*config) {
                    self.cannot_connect(&e);
                }
            }
        }
    }
}

impl Source for Startup {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, _now: Instant) {
        let effect = self.step(readable, writable);
        self.carry_out(effect);
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let effect = self.handle_timeout(now);
        self.carry_out(effect);
    }
}

/// The state machine of an initiator.
fn initiator(config: &InitiatorConfig) -> io::Result<Initiator> {
    Initiator::new(config.clone()).map_err(|e| io::Error::from_raw_os_error(e.errno()))
}

/// Sends a Reply. It has a few hundred bytes and is the first on its connection, so the socket's buffer has room.
fn send_all(fd: &EngineFd, bytes: &[u8]) -> io::Result<()> {
    let n = fd.send(bytes)?;
    if n == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ECONNRESET))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::engine;

    /// The owner of a start-up that is canceled, which is not called.
    struct Uncalled;

    impl Owner for Uncalled {
        fn opened(&self, _startup: &Arc<Startup>, _opened: Opened) {
            panic!("opened");
        }

        fn requested(&self, _startup: &Arc<Startup>, _request: Request) {
            panic!("requested");
        }

        fn failed(&self, _startup: &Arc<Startup>, failure: Failure) {
            panic!("{failure:?}");
        }
    }

    /// While another thread handles the answer to its query, a start-up has neither socket nor query, and may be canceled.
    #[test]
    fn a_canceled_startup_does_not_connect() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let dial = Dial {
            peer: listener.local_addr().unwrap(),
            bind: None,
            config: InitiatorConfig::default(),
            timeout: Duration::from_secs(60),
            retry_refused: Duration::ZERO,
            port_space: None,
        };
        let startup = Startup::dial(engine().unwrap(), Arc::new(Uncalled), dial).unwrap();
        let _first = listener.accept().unwrap();
        startup.cancel();
        listener.set_nonblocking(true).unwrap();
        for location in [Location::SamePort, Location::NotListening] {
            startup
                .follow(InitiatorConfig::default(), location)
                .unwrap();
            assert!(startup.lock().fd.is_none());
        }
        assert!(listener.accept().is_err(), "a second connection");
    }

    /// If the socket cannot be watched, nothing of the start-up remains, and its owner is not called when its time would be over.
    #[test]
    fn a_startup_whose_socket_cannot_be_watched_ends() {
        let owner: Arc<dyn Owner> = Arc::new(Uncalled);
        // The kernel refuses to add a regular file to an epoll set.
        let file =
            rustix::fs::memfd_create("anywarp-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let limits = ResponderLimits {
            crc: true,
            markers: false,
            max_ird: 1,
            max_ord: 1,
            known: true,
        };
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let answer = Startup::answer(
            engine().unwrap(),
            Arc::clone(&owner),
            EngineFd::new(file),
            peer,
            limits,
        );
        assert!(answer.is_err());
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
