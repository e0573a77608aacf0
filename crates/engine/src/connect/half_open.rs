//! Half-open connections: accepted TCP connections whose MPA Request has not arrived.
//!
//! Any host can connect to a listening port. The number of half-open connections is limited for all listeners of the
//! process together, and each may last for [`REQUEST_TIMEOUT`]. At the limit, a new connection closes the oldest one,
//! so that silent connections do not block others. When the process is out of descriptors, the listener pauses,
//! because otherwise epoll would report it as readable again and again.
//!
//! [`REQUEST_TIMEOUT`]: crate::connect::startup::REQUEST_TIMEOUT

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anywarp_core::llp::mpa::startup::ResponderLimits;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::clock;
use crate::config::{Framing, config};
use crate::connect::startup::{Owner, Startup};
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::limits::peer_descriptors;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::socket::unmapped;
use crate::process::{Changing, PerProcess};
use crate::reactor::Token;

/// Connections that a listener accepts at a time, so that a burst does not delay other sockets.
const ACCEPTS_PER_TURN: usize = 16;
/// How long a listener pauses when the process is out of descriptors or memory.
const LISTENER_PAUSE: Duration = Duration::from_millis(100);

/// Half-open connections, the oldest first.
#[derive(Debug)]
struct HalfOpen(Mutex<VecDeque<Weak<Startup>>>);

static HALF_OPEN: PerProcess<HalfOpen> =
    PerProcess::new(|| HalfOpen(Mutex::new(Rank::HalfOpen, VecDeque::new())));

impl HalfOpen {
    /// Makes room for one more connection if there are `max` already. Returns the connection that has to be closed
    /// for it.
    fn make_room(&self, max: usize) -> Option<Arc<Startup>> {
        let mut all = self.0.lock();
        if all.len() < max {
            return None;
        }
        all.retain(|s| s.upgrade().is_some_and(|s| s.awaits_request()));
        if all.len() < max {
            return None;
        }
        all.pop_front()?.upgrade()
    }

    fn insert(&self, startup: &Arc<Startup>) {
        self.0.lock().push_back(Arc::downgrade(startup));
    }
}

/// Accepts the connections that are queued at a listener, for `owner`.
pub(crate) fn accept(
    engine: &'static Engine,
    listener: &EngineFd,
    token: Token,
    owner: &Arc<dyn Owner>,
) {
    for _ in 0..ACCEPTS_PER_TURN {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let changing = Changing::new();
        let accepted = rustix::net::acceptfrom_with(listener.get(), flags)
            .map(|(fd, peer)| (EngineFd::new(fd), peer));
        drop(changing);
        let (fd, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(Errno::AGAIN) => return,
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                static OCCURRED: log::Rarely = log::Rarely::new();
                if OCCURRED.now() {
                    log!(Warn, "cannot accept a connection: {e}; trying again later");
                }
                engine.disarm(token, listener.get());
                engine.deadline(token, clock::now() + LISTENER_PAUSE);
                return;
            }
            // The connection was closed before it was accepted.
            Err(_) => continue,
        };
        let Some(peer) = peer
            .and_then(|p| SocketAddr::try_from(p).ok())
            .map(unmapped)
        else {
            continue;
        };
        let most = peer_descriptors();
        if let Some(oldest) = HALF_OPEN.get().make_room(most)
            && oldest.close_if_silent()
        {
            static OCCURRED: log::Rarely = log::Rarely::new();
            if OCCURRED.now() {
                log!(
                    Warn,
                    "{most} half-open connections wait for their MPA Request; closing the oldest, from {}",
                    oldest.peer
                );
            }
        }
        let limits = ResponderLimits {
            crc: config().crc,
            known: config().framing != Framing::Standard,
            ..ResponderLimits::default()
        };
        if let Ok(startup) = Startup::answer(engine, Arc::clone(owner), fd, peer, limits) {
            HALF_OPEN.get().insert(&startup);
        }
    }
}

/// Resumes a listener after its pause.
pub(crate) fn resume(engine: &Engine, listener: &EngineFd, token: Token) {
    engine.want_write(token, listener.get(), false);
}
