//! The hot socket: the socket that the last successful check for ready sockets found, if it found no other. It is tried first.
//!
//! If only one socket has something to receive, a receive on it saves the epoll call that returns the ready sockets.
//! After many successful receives its readiness events are turned off as well, which is called *disarming* here
//! ([`Source::set_armed`](super::Source::set_armed)):
//! each event costs the sender 0.3 µs, and the sender may be a peer on the same host. They are turned on again before
//! any thread relies on them: when another socket becomes hot, and before a thread sleeps until a socket is ready.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::sources::{Sources, Token};
use crate::locks::{Mutex, Rank};

/// Number of consecutive receives without success after which a socket is no longer hot.
const MISSES_MAX: usize = 256;
/// Receives with success after which the readiness events of a hot socket are turned off.
pub(super) const DISARM_AFTER_HITS: usize = 64;
/// While receives on the hot socket succeed, one poll out of this number checks all sockets.
const POLL_ALL_EACH_HIT: u64 = 16;
/// While receives on the hot socket find nothing, one poll out of this number checks all sockets: the first number until this socket has had
/// [`STEADY_HITS`] receives with success since another one had something, and then the second.
const POLL_ALL_EACH_MISS: [u64; 2] = [4, 16];
pub(super) const STEADY_HITS: usize = 16;

/// The result of a receive on the hot socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tried {
    /// Whether something was received.
    pub(super) found: bool,
    /// Whether all sockets have to be checked.
    pub(super) poll_all: bool,
}

/// The hot socket, if any.
#[derive(Debug)]
pub(super) struct HotSocket {
    token: AtomicU64,
    misses: AtomicUsize,
    hits: AtomicUsize,
    /// The source whose readiness events are off.
    disarmed: Mutex<Token>,
    /// Whether a source is disarmed, or a thread is about to disarm one.
    is_disarmed: AtomicBool,
    /// Threads that sleep until a socket is ready.
    sleepers: AtomicUsize,
}

impl HotSocket {
    pub(super) const fn new() -> Self {
        Self {
            token: AtomicU64::new(Token::NONE.0),
            misses: AtomicUsize::new(0),
            hits: AtomicUsize::new(0),
            disarmed: Mutex::new(Rank::DisarmedSocket, Token::NONE),
            is_disarmed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
        }
    }

    /// Tries to receive from the hot socket. `nth`: the number of this poll.
    pub(super) fn try_recv(&self, sources: &Sources, nth: u64, now: Instant) -> Tried {
        let hot = Token(self.token.load(Ordering::Relaxed));
        if hot == Token::NONE {
            return Tried {
                found: false,
                poll_all: true,
            };
        }
        match sources.get(hot).and_then(|source| source.try_recv_hot(now)) {
            Some(true) => {
                self.misses.store(0, Ordering::Relaxed);
                // Two threads may count their hits as one; an estimate is sufficient.
                let hits = self.hits.load(Ordering::Relaxed) + 1;
                self.hits.store(hits, Ordering::Relaxed);
                if hits.is_multiple_of(DISARM_AFTER_HITS)
                    && !self.is_disarmed.load(Ordering::Relaxed)
                {
                    self.disarm(sources, hot);
                }
                Tried {
                    found: true,
                    poll_all: nth.is_multiple_of(POLL_ALL_EACH_HIT),
                }
            }
            Some(false) => {
                let misses = self.misses.load(Ordering::Relaxed) + 1;
                self.misses.store(misses, Ordering::Relaxed);
                if misses >= MISSES_MAX {
                    self.set(sources, Token::NONE);
                }
                let [each, each_if_steady] = POLL_ALL_EACH_MISS;
                let each = if self.hits.load(Ordering::Relaxed) < STEADY_HITS {
                    each
                } else {
                    each_if_steady
                };
                Tried {
                    found: false,
                    poll_all: misses >= MISSES_MAX || nth.is_multiple_of(each),
                }
            }
            None => {
                self.set(sources, Token::NONE);
                Tried {
                    found: false,
                    poll_all: true,
                }
            }
        }
    }

    /// Sets the hot socket, or none.
    pub(super) fn set(&self, sources: &Sources, token: Token) {
        if self.token.swap(token.0, Ordering::SeqCst) != token.0 {
            self.hits.store(0, Ordering::Relaxed);
            self.rearm(sources);
        }
        self.misses.store(0, Ordering::Relaxed);
    }

    /// Turns readiness events of the hot socket off.
    #[cold]
    fn disarm(&self, sources: &Sources, token: Token) {
        let mut disarmed = self.disarmed.lock();
        if *disarmed != Token::NONE {
            return;
        }
        // Store-load pair with `set` and `begin_sleep`: this thread stores `is_disarmed`, then loads `token` and
        // `sleepers`; they store `token` or `sleepers`, then load `is_disarmed`. All accesses are SeqCst, so at least
        // one side sees the other.
        self.is_disarmed.store(true, Ordering::SeqCst);
        let is_hot = self.token.load(Ordering::SeqCst) == token.0;
        let is_awaited = self.sleepers.load(Ordering::SeqCst) > 0;
        match sources.get(token) {
            Some(source) if is_hot && !is_awaited => {
                *disarmed = token;
                source.set_armed(false);
            }
            _ => self.is_disarmed.store(false, Ordering::SeqCst),
        }
    }

    /// Turns readiness events on again, after a change of `token` or `sleepers`.
    fn rearm(&self, sources: &Sources) {
        if !self.is_disarmed.load(Ordering::SeqCst) {
            return;
        }
        let mut disarmed = self.disarmed.lock();
        let token = std::mem::replace(&mut *disarmed, Token::NONE);
        self.is_disarmed.store(false, Ordering::SeqCst);
        if let Some(source) = sources.get(token) {
            source.set_armed(true);
        }
    }

    /// Called before a thread sleeps until a socket is ready: the readiness events of every socket are on until
    /// [`Self::end_sleep`].
    pub(super) fn begin_sleep(&self, sources: &Sources) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        self.rearm(sources);
    }

    /// The number of threads between [`Self::begin_sleep`] and [`Self::end_sleep`].
    pub(super) fn sleepers(&self) -> usize {
        self.sleepers.load(Ordering::SeqCst)
    }

    pub(super) fn end_sleep(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
