//! Connections that are closed in order.
//!
//! TCP resets a connection whose closed end still receives, and what that end had sent last is lost with it. So a closed
//! connection is read on for a while. Nobody reads when the process is gone: it ends after its last words have arrived.

use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::clock;
use crate::fd::EngineFd;
use crate::process::PerProcess;
use crate::sys::{Io, socket, stream, thread};
use crate::worker::{Engine, Source, Token};

/// How long a closed connection is read on.
const LINGER: Duration = Duration::from_secs(2);
/// How long a process that ends waits until what was sent over closed connections has arrived.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often it looks.
const LOOK: Duration = Duration::from_micros(200);

/// The closed connections of this process.
static CLOSED: PerProcess<Mutex<Vec<Arc<Linger>>>> = PerProcess::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection that is closed for sending: read until the peer closes too, then dropped.
struct Linger {
    engine: &'static Engine,
    fd: Mutex<Option<(EngineFd, Token)>>,
}

/// What was sent over a connection that is closed.
#[derive(Debug, Default, Clone)]
pub(crate) struct LastWords(Weak<Linger>);

impl LastWords {
    /// Whether the peer has all of it, or never will.
    pub(super) fn are_over(&self) -> bool {
        self.0.upgrade().is_none_or(|linger| !linger.has_more())
    }

    /// Waits until the peer has all of it, if that comes in time.
    pub(crate) fn hear_out(&self, until: Option<Instant>) {
        look_until(until, || self.are_over());
    }
}

/// Closes a connection in order: what was sent gets there, what still comes is dropped.
pub(crate) fn linger(engine: &'static Engine, fd: EngineFd) -> LastWords {
    static AT_EXIT: Once = Once::new();
    let _ = rustix::net::shutdown(fd.get(), rustix::net::Shutdown::Write);
    let linger = {
        let mut closed = lock(CLOSED.get());
        if closed.len() >= crate::lobby::most() {
            // So many at once: descriptors matter more than the last words.
            return LastWords::default();
        }
        let linger = Arc::new(Linger {
            engine,
            fd: Mutex::new(None),
        });
        closed.push(Arc::clone(&linger));
        linger
    };
    AT_EXIT.call_once(|| thread::at_exit(at_exit));
    let token = engine.reserve(Arc::clone(&linger) as Arc<dyn Source>);
    let watched = engine.watch(token, fd.get(), false);
    *lock(&linger.fd) = Some((fd, token));
    let words = LastWords(Arc::downgrade(&linger));
    if watched.is_err() {
        linger.finish();
        return words;
    }
    engine.deadline(token, clock::now() + LINGER);
    // It may be over already.
    linger.ready(true, false, clock::now());
    words
}

/// The process ends: not before the peers have what was sent, unless they take too long.
pub(super) extern "C" fn at_exit() {
    look_until(Some(clock::now() + LAST_WORDS), || !some_have_more());
}

/// The kernel tells nobody that what was sent has arrived: looks for it now and then.
fn look_until(until: Option<Instant>, over: impl Fn() -> bool) {
    while !over() && until.is_none_or(|until| clock::now() < until) {
        std::thread::sleep(LOOK);
    }
}

/// Whether there is more to arrive somewhere, as far as can be seen: a handler of a signal may end the process while its
/// thread holds a lock, so none is waited for.
fn some_have_more() -> bool {
    let Ok(closed) = CLOSED.get().try_lock() else {
        return true;
    };
    closed.iter().any(|linger| match linger.fd.try_lock() {
        Ok(held) => is_on_its_way(held.as_ref()),
        Err(_) => true,
    })
}

fn is_on_its_way(held: Option<&(EngineFd, Token)>) -> bool {
    held.is_some_and(|(fd, _)| socket::unacknowledged(fd.get()) > 0)
}

impl std::fmt::Debug for Linger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linger").finish_non_exhaustive()
    }
}

impl Linger {
    /// Whether the peer does not have all of it.
    fn has_more(&self) -> bool {
        is_on_its_way(lock(&self.fd).as_ref())
    }

    fn finish(&self) {
        let gone = lock(&self.fd).take();
        if let Some((fd, token)) = gone {
            lock(CLOSED.get()).retain(|other| !std::ptr::eq(Arc::as_ptr(other), self));
            self.engine.remove(token, Some(fd.get()));
        }
    }
}

impl Source for Linger {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        let mut stage = self.engine.stage();
        let over = {
            let held = lock(&self.fd);
            let Some((fd, _)) = &*held else { return };
            matches!(
                stream::receive(fd.get(), None, &mut stage),
                Err(Io::Eof | Io::Broken(_))
            )
        };
        self.engine.return_stage(stage);
        if over {
            self.finish();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.finish();
    }
}
