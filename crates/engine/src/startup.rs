//! Connections in MPA start-up: from `connect` or `accept` until a queue pair owns the socket.
//!
//! ```text
//!             connected             Reply
//!  +---------+        +-----------+       +------+
//!  | Dialing | -----> | Asking    | ----> | Gone |   the socket goes to the owner
//!  +---------+        +-----------+       +------+
//!             Request               accept, reject
//!  +---------+        +-----------+       +------+
//!  | Waiting | -----> | Pending   | ----> | Gone |
//!  +---------+        +-----------+       +------+
//!      any state: time-out, close, nonsense -> failed, the socket is closed
//! ```

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::llp::mpa::startup::{
    Accepted, Depths, Incoming, Initiator, InitiatorConfig, Progress, Request, Responder,
    ResponderLimits, StreamParams,
};
use rustix::net::SocketType;

use crate::clock;
use crate::device;
use crate::fd::EngineFd;
use crate::log;
use crate::net::drain::drain;
use crate::net::socket::{self, local_addr};
use crate::sys::socket::{get_option, set_option};
use crate::worker::{Engine, Source, Token};

/// How long a responder waits for a Request: what siw does.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an initiator waits for connection and Reply: what siw does.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a port that refused is tried again.
const REFUSED_AGAIN: Duration = Duration::from_millis(10);
/// How long an accepted connection may wait for the application's answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// Said once of what strangers can do as often as they like.
const COUNTED: &str = "(repeats are counted, not logged)";

/// What start-up gives to the owner of a connection.
#[derive(Debug)]
pub struct Opened {
    /// The socket.
    pub fd: EngineFd,
    /// What was agreed.
    pub params: StreamParams,
    /// Bytes behind the Reply.
    pub leftover: Vec<u8>,
    /// What the peer's application said.
    pub private_data: Vec<u8>,
    /// The depths that the Reply names, from the peer's point of view.
    pub peer_depths: Option<Depths>,
    /// The peer may be an anywarp (a responder learns it from the first message).
    pub may_be_anywarp: bool,
    /// The first message is a ready-to-receive message.
    pub expects_rtr: bool,
}

/// How a connection attempt ended without a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Nobody listens there, or the peer's application said no.
    Rejected {
        /// What it said.
        private_data: Vec<u8>,
        /// The depths that the Reply names, from the peer's point of view.
        peer_depths: Option<Depths>,
        /// `ECONNREFUSED` when nobody listens.
        errno: i32,
    },
    /// No way there, or no answer in time.
    Unreachable {
        /// Why.
        errno: i32,
    },
    /// The connection broke, or the peer spoke nonsense.
    Broken {
        /// Why.
        errno: i32,
    },
}

/// Whoever started or listens.
pub trait Owner: Send + Sync {
    /// The initiator's connection is open.
    fn opened(&self, startup: &Arc<Startup>, opened: Opened);
    /// The responder got a Request: to be answered with [`Startup::accept`] or [`Startup::reject`].
    fn requested(&self, startup: &Arc<Startup>, request: Request);
    /// It ended without a connection.
    fn failed(&self, startup: &Arc<Startup>, failure: Failure);
}

enum Phase {
    Dialing(Box<Initiator>),
    Asking(Box<Initiator>),
    Waiting(Box<Responder>),
    Pending(Box<Responder>),
    Gone,
}

struct State {
    phase: Phase,
    fd: Option<EngineFd>,
    token: Token,
    received: Vec<u8>,
    unsent: Vec<u8>,
    deadline: Instant,
    local: Option<SocketAddr>,
    bind: Option<SocketAddr>,
    /// How an initiator asks, for a second try.
    config: Option<InitiatorConfig>,
    /// Until when a port that nobody listens on is tried again, and when that is next.
    patience: Option<Instant>,
    again: Option<Instant>,
}

/// A connection in start-up.
pub struct Startup {
    engine: &'static Engine,
    owner: Arc<dyn Owner>,
    /// The peer.
    pub peer: SocketAddr,
    state: Mutex<State>,
}

impl std::fmt::Debug for Startup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Startup")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

enum After {
    Nothing,
    Opened(Opened),
    Requested(Request),
    Failed(Failure),
    Again(Box<InitiatorConfig>),
}

impl Startup {
    /// Connects to `peer`, from `bind` if given, and opens an MPA stream.
    ///
    /// A port that nobody listens on is tried again for the time of `patience`.
    pub fn dial(
        engine: &'static Engine,
        owner: Arc<dyn Owner>,
        peer: SocketAddr,
        bind: Option<SocketAddr>,
        config: InitiatorConfig,
        timeout: Duration,
        patience: Duration,
    ) -> io::Result<Arc<Self>> {
        let startup = Arc::new(Self {
            engine,
            owner,
            peer,
            state: Mutex::new(State {
                phase: Phase::Gone,
                fd: None,
                token: Token::NONE,
                received: Vec::new(),
                unsent: Vec::new(),
                deadline: clock::now() + timeout,
                local: None,
                bind,
                config: None,
                patience: Some(clock::now() + patience),
                again: None,
            }),
        });
        startup.start_dialing(config)?;
        Ok(startup)
    }

    fn start_dialing(self: &Arc<Self>, config: InitiatorConfig) -> io::Result<()> {
        let machine =
            Initiator::new(config.clone()).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let fd = socket::open(self.peer.ip(), SocketType::STREAM)?;
        socket::tune_stream(&fd, device::congestion_control());
        let mut state = self.lock();
        if let Some(bind) = state.bind {
            if bind.port() != 0 {
                set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
            } else {
                set_option(fd.get(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
            }
            rustix::net::bind(fd.get(), &bind)?;
        }
        match rustix::net::connect(fd.get(), &self.peer) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        let token = self.engine.reserve(Arc::clone(self) as Arc<dyn Source>);
        state.token = token;
        state.config = Some(config);
        state.unsent = machine.request();
        state.received.clear();
        state.phase = Phase::Dialing(Box::new(machine));
        self.engine.deadline(token, state.deadline);
        let watched = self.engine.watch(token, fd.get(), true);
        state.fd = Some(fd);
        watched
    }

    /// Takes a connection that was accepted and waits for its Request.
    pub fn answer(
        engine: &'static Engine,
        owner: Arc<dyn Owner>,
        fd: EngineFd,
        peer: SocketAddr,
        limits: ResponderLimits,
    ) -> io::Result<Arc<Self>> {
        socket::tune_stream(&fd, device::congestion_control());
        let startup = Arc::new(Self {
            engine,
            owner,
            peer,
            state: Mutex::new(State {
                phase: Phase::Waiting(Box::new(Responder::new(limits))),
                fd: None,
                token: Token::NONE,
                received: Vec::new(),
                unsent: Vec::new(),
                deadline: clock::now() + REQUEST_TIMEOUT,
                local: None,
                bind: None,
                config: None,
                patience: None,
                again: None,
            }),
        });
        let token = engine.reserve(Arc::clone(&startup) as Arc<dyn Source>);
        let mut state = startup.lock();
        state.token = token;
        state.local = local_addr(&fd);
        engine.deadline(token, state.deadline);
        let watched = engine.watch(token, fd.get(), false);
        state.fd = Some(fd);
        drop(state);
        watched?;
        Ok(startup)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Our address of the connection.
    pub fn local(&self) -> Option<SocketAddr> {
        let state = self.lock();
        state
            .local
            .or_else(|| state.fd.as_ref().and_then(local_addr))
    }

    /// Accepts the Request: sends the Reply and gives the socket away.
    pub fn accept(&self, ird: u16, ord: u16, private_data: &[u8]) -> Result<Opened, io::Error> {
        let mut state = self.lock();
        let Phase::Pending(responder) = &mut state.phase else {
            return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
        };
        let accepted: Accepted = responder
            .accept(ird, ord, private_data)
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        state.phase = Phase::Gone;
        let Some(fd) = state.fd.take() else {
            return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
        };
        self.engine.remove(state.token, Some(fd.get()));
        state.token = Token::NONE;
        drop(state);
        // The Reply is a few hundred bytes on a fresh connection: it fits the socket's buffer.
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

    /// Rejects the Request and closes the connection in order.
    pub fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        let Phase::Pending(responder) = &mut state.phase else {
            return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
        };
        let reply = responder
            .reject(private_data)
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        state.phase = Phase::Gone;
        let fd = state.fd.take();
        let token = std::mem::replace(&mut state.token, Token::NONE);
        drop(state);
        if let Some(fd) = fd {
            self.engine.remove(token, Some(fd.get()));
            send_all(&fd, &reply)?;
            let _draining = drain(self.engine, fd);
        }
        Ok(())
    }

    /// Whether TCP never got through.
    pub fn never_connected(&self) -> bool {
        self.lock().local.is_none()
    }

    /// Whether it is a responder that still waits for the Request.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self.lock().phase, Phase::Waiting(_))
    }

    /// Closes the connection of a peer that has not said anything yet; whether it was one.
    pub(crate) fn turn_away(&self) -> bool {
        let mut state = self.lock();
        let silent = matches!(state.phase, Phase::Waiting(_));
        if silent {
            let _ = self.end(&mut state, Failure::Broken { errno: 0 });
        }
        silent
    }

    /// Gives up without telling the owner.
    pub fn cancel(&self) {
        let mut state = self.lock();
        state.phase = Phase::Gone;
        let fd = state.fd.take();
        let token = std::mem::replace(&mut state.token, Token::NONE);
        drop(state);
        self.engine.remove(token, fd.as_ref().map(EngineFd::get));
    }

    fn step(self: &Arc<Self>, readable: bool, writable: bool) -> After {
        let mut state = self.lock();
        let state = &mut *state;
        let Some(fd) = &state.fd else {
            return After::Nothing;
        };
        if let Phase::Dialing(_) = state.phase
            && (writable || readable)
        {
            match get_option(fd.get(), libc::SOL_SOCKET, libc::SO_ERROR) {
                Some(0) => {
                    state.local = local_addr(fd);
                    if let Phase::Dialing(machine) =
                        std::mem::replace(&mut state.phase, Phase::Gone)
                    {
                        state.phase = Phase::Asking(machine);
                    }
                }
                Some(libc::ECONNREFUSED) => {
                    let now = clock::now();
                    if state.patience.is_some_and(|t| now < t) {
                        let fd = state.fd.take();
                        if let Some(fd) = &fd {
                            self.engine.unwatch(fd.get());
                        }
                        state.again = Some(now + REFUSED_AGAIN);
                        self.engine.deadline(state.token, now + REFUSED_AGAIN);
                        return After::Nothing;
                    }
                    return self.end(
                        state,
                        Failure::Rejected {
                            private_data: Vec::new(),
                            peer_depths: None,
                            errno: libc::ECONNREFUSED,
                        },
                    );
                }
                e => {
                    return self.end(
                        state,
                        Failure::Unreachable {
                            errno: e.unwrap_or(libc::EIO),
                        },
                    );
                }
            }
        }
        if matches!(state.phase, Phase::Asking(_)) && !state.unsent.is_empty() {
            match fd.send(&state.unsent) {
                Ok(n) => {
                    state.unsent.drain(..n.min(state.unsent.len()));
                    if state.unsent.is_empty() {
                        self.engine.want_write(state.token, fd.get(), false);
                    }
                }
                Err(rustix::io::Errno::AGAIN) => {}
                Err(e) => {
                    return self.end(
                        state,
                        Failure::Broken {
                            errno: e.raw_os_error(),
                        },
                    );
                }
            }
        }
        if !readable {
            return After::Nothing;
        }
        // One frame, and no more than what may be behind it of the first messages.
        let mut buffer = [0_u8; bounds::STARTUP_FRAME_MAX];
        let n = match fd.recv(&mut buffer) {
            Ok(0) => {
                // Closed without a Reply: a stack that does not know revision 2 does that.
                if let Phase::Asking(_) = &state.phase
                    && let Some(older) = state.config.as_ref().and_then(InitiatorConfig::older)
                    && state.received.is_empty()
                {
                    let fd = state.fd.take();
                    self.engine
                        .remove(state.token, fd.as_ref().map(EngineFd::get));
                    state.token = Token::NONE;
                    return After::Again(Box::new(older));
                }
                if let Phase::Waiting(_) = &state.phase {
                    static SAID: log::Rarely = log::Rarely::new();
                    if SAID.now() {
                        log!(
                            Warn,
                            "{}: closed before an MPA Request came; a port scan? {COUNTED}",
                            self.peer
                        );
                    }
                }
                return self.end(
                    state,
                    Failure::Broken {
                        errno: libc::ECONNRESET,
                    },
                );
            }
            Ok(n) => n,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return After::Nothing,
            Err(e) => {
                return self.end(
                    state,
                    Failure::Broken {
                        errno: e.raw_os_error(),
                    },
                );
            }
        };
        state
            .received
            .extend_from_slice(buffer.get(..n).unwrap_or(&[]));
        match &mut state.phase {
            Phase::Asking(machine) => match machine.handle_rx(&state.received) {
                Ok(Progress::NeedMore) => After::Nothing,
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
                            "{}: the peer did not confirm CRCs; they are used all the same",
                            self.peer
                        );
                    }
                    let leftover = state.received.split_off(consumed.min(state.received.len()));
                    state.phase = Phase::Gone;
                    let Some(fd) = state.fd.take() else {
                        return After::Nothing;
                    };
                    self.engine.remove(state.token, Some(fd.get()));
                    state.token = Token::NONE;
                    After::Opened(Opened {
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
                }) => self.end(
                    state,
                    Failure::Rejected {
                        private_data,
                        peer_depths,
                        errno: libc::ECONNREFUSED,
                    },
                ),
                Ok(other) => {
                    if let Some(error) = other.error() {
                        log!(Info, "{}: start-up failed: {error}", self.peer);
                        // RFC 6581 §9.1, §9.2 [mpa-startup-terminated]: the peer is told before the end.
                        if let Progress::NoCommonRtr { params, .. }
                        | Progress::InsufficientIrd { params, .. } = &other
                            && let Some(fd) = state.fd.take()
                        {
                            let token = std::mem::replace(&mut state.token, Token::NONE);
                            self.engine.remove(token, Some(fd.get()));
                            crate::net::tcp::refuse(self.engine, fd, params, &error);
                        }
                    }
                    self.end(
                        state,
                        Failure::Broken {
                            errno: libc::EPROTO,
                        },
                    )
                }
                Err(error) => {
                    log!(Info, "{}: bad MPA Reply: {error}", self.peer);
                    self.end(
                        state,
                        Failure::Broken {
                            errno: libc::EPROTO,
                        },
                    )
                }
            },
            Phase::Waiting(machine) => match machine.handle_rx(&state.received) {
                Ok(Incoming::NeedMore) => After::Nothing,
                Ok(Incoming::Request(request)) => {
                    if let Phase::Waiting(machine) =
                        std::mem::replace(&mut state.phase, Phase::Gone)
                    {
                        state.phase = Phase::Pending(machine);
                    }
                    state.received.clear();
                    state.deadline = clock::now() + ANSWER_TIMEOUT;
                    self.engine.deadline(state.token, state.deadline);
                    After::Requested(request)
                }
                Err(error) => {
                    static SAID: log::Rarely = log::Rarely::new();
                    if SAID.now() {
                        log!(
                            Warn,
                            "{}: not an MPA Request: {error}; closed {COUNTED}",
                            self.peer
                        );
                    }
                    self.end(
                        state,
                        Failure::Broken {
                            errno: libc::EPROTO,
                        },
                    )
                }
            },
            Phase::Pending(_) => {
                static SAID: log::Rarely = log::Rarely::new();
                if SAID.now() {
                    log!(
                        Warn,
                        "{}: sent more before its MPA Request was answered; closed {COUNTED}",
                        self.peer
                    );
                }
                self.end(
                    state,
                    Failure::Broken {
                        errno: libc::EPROTO,
                    },
                )
            }
            Phase::Dialing(_) | Phase::Gone => After::Nothing,
        }
    }

    fn end(&self, state: &mut State, failure: Failure) -> After {
        state.phase = Phase::Gone;
        let fd = state.fd.take();
        self.engine
            .remove(state.token, fd.as_ref().map(EngineFd::get));
        state.token = Token::NONE;
        After::Failed(failure)
    }

    fn finish(self: &Arc<Self>, after: After) {
        match after {
            After::Nothing => {}
            After::Opened(opened) => self.owner.opened(self, opened),
            After::Requested(request) => self.owner.requested(self, request),
            After::Failed(failure) => self.owner.failed(self, failure),
            After::Again(config) => {
                if config.rev < 2 {
                    log!(
                        Info,
                        "{}: no answer to MPA revision 2, trying revision 1",
                        self.peer
                    );
                }
                if let Err(e) = self.start_dialing(*config) {
                    let errno = e.raw_os_error().unwrap_or(libc::EIO);
                    self.owner.failed(self, Failure::Unreachable { errno });
                }
            }
        }
    }
}

impl Source for Startup {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, _now: Instant) {
        let after = self.step(readable, writable);
        self.finish(after);
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let after = {
            let mut state = self.lock();
            if state.again.is_some_and(|t| t <= now) && matches!(state.phase, Phase::Dialing(_)) {
                state.again = None;
                let token = std::mem::replace(&mut state.token, Token::NONE);
                self.engine.remove(token, None);
                match state.config.take() {
                    Some(config) => After::Again(Box::new(config)),
                    None => After::Nothing,
                }
            } else if matches!(state.phase, Phase::Gone) || state.deadline > now {
                After::Nothing
            } else {
                if let Phase::Waiting(_) = &state.phase {
                    static SAID: log::Rarely = log::Rarely::new();
                    if SAID.now() {
                        log!(
                            Warn,
                            "{}: no MPA Request within {} s; closed {COUNTED}",
                            self.peer,
                            REQUEST_TIMEOUT.as_secs()
                        );
                    }
                }
                self.end(
                    &mut state,
                    Failure::Unreachable {
                        errno: libc::ETIMEDOUT,
                    },
                )
            }
        };
        self.finish(after);
    }
}

fn send_all(fd: &EngineFd, bytes: &[u8]) -> io::Result<()> {
    let n = fd.send(bytes)?;
    if n == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ECONNRESET))
    }
}
