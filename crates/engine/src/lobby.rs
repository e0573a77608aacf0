//! The lobby: connections that were accepted and have not said yet what they want.
//!
//! Anybody can connect to a listening port. What strangers can take from the program is bounded here, for all listeners
//! of the process together: a number of connections, each for [`REQUEST_TIMEOUT`]. When the lobby is full the one
//! that has been silent the longest goes, so that strangers who say nothing keep nobody out who does. When the
//! process has no descriptor left the listener rests: an epoll set would report it over and over.
//!
//! [`REQUEST_TIMEOUT`]: crate::connect::startup::REQUEST_TIMEOUT

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anywarp_core::llp::mpa::startup::ResponderLimits;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::clock;
use crate::config::{Framing, config};
use crate::connect::startup::{Owner, Startup};
use crate::fd::EngineFd;
use crate::limits::peer_descriptors;
use crate::log;
use crate::net::socket::unmapped;
use crate::worker::{Engine, Token};

/// Connections that are accepted in one turn, so that a storm of them does not keep others waiting.
const TURN: usize = 16;
/// How long a listener rests when the process has no descriptor left.
const REST: Duration = Duration::from_millis(100);

/// Who is in the lobby, the longest first.
#[derive(Debug, Default)]
pub(crate) struct Lobby(Mutex<VecDeque<Weak<Startup>>>);

impl Lobby {
    /// Makes room for one more; gives who has to go for it.
    fn make_room(&self, most: usize) -> Option<Arc<Startup>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < most {
            return None;
        }
        all.retain(|s| s.upgrade().is_some_and(|s| s.awaits_request()));
        if all.len() < most {
            return None;
        }
        all.pop_front()?.upgrade()
    }

    fn enter(&self, startup: &Arc<Startup>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(Arc::downgrade(startup));
    }
}

/// Accepts what waits at a listener; each connection belongs to `owner`.
pub(crate) fn accept(
    engine: &'static Engine,
    listener: &EngineFd,
    token: Token,
    owner: &Arc<dyn Owner>,
) {
    for _ in 0..TURN {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, peer) = match rustix::net::acceptfrom_with(listener.get(), flags) {
            Ok((fd, peer)) => (EngineFd::new(fd), peer),
            Err(Errno::AGAIN) => return,
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                static SAID: log::Rarely = log::Rarely::new();
                if SAID.now() {
                    log!(Warn, "cannot accept a connection: {e}; trying again later");
                }
                engine.watch_nothing(token, listener.get());
                engine.deadline(token, clock::now() + REST);
                return;
            }
            // The connection was gone before we came to it.
            Err(_) => continue,
        };
        let Some(peer) = peer
            .and_then(|p| SocketAddr::try_from(p).ok())
            .map(unmapped)
        else {
            continue;
        };
        let most = peer_descriptors();
        if let Some(oldest) = engine.lobby.make_room(most)
            && oldest.close_if_silent()
        {
            static SAID: log::Rarely = log::Rarely::new();
            if SAID.now() {
                log!(
                    Warn,
                    "{most} connections that say nothing; closing the oldest, of {}",
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
            engine.lobby.enter(&startup);
        }
    }
}

/// A listener has rested.
pub(crate) fn resume(engine: &Engine, listener: &EngineFd, token: Token) {
    engine.want_write(token, listener.get(), false);
}
