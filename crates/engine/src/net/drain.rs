//! Closed TCP connections that are read until the peer closes its direction too.
//!
//! A kernel that receives bytes for a closed socket answers with a reset, and a reset discards what the socket had sent and
//! the peer had not read: the last FPDUs of a stream, or a Terminate. Such a connection is therefore closed for sending only
//! and read for up to [`DRAIN_TIMEOUT`]. A process that exits waits until its peers have acknowledged what it sent.

use std::sync::{Arc, Once, Weak};
use std::time::{Duration, Instant};

use crate::clock;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::limits;
use crate::locks::{Mutex, Rank};
use crate::process::PerProcess;
use crate::reactor::{Source, Token};
use crate::sys::{Io, socket, stream, thread};

/// How long a closed connection is read. A peer that has not closed its side by then gets a reset.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a process that exits waits until its peers have acknowledged what it sent.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between two questions for unacknowledged bytes: the kernel does not report when there are none left.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The connections of this process that are being drained.
static DRAINS: PerProcess<Mutex<Vec<Arc<Drain>>>> =
    PerProcess::new(|| Mutex::new(Rank::Drains, Vec::new()));

/// A connection that is closed for sending. It is dropped when the peer closes too, or after [`DRAIN_TIMEOUT`].
struct Drain {
    engine: &'static Engine,
    fd: Mutex<Option<(EngineFd, Token)>>,
}

/// Refers to a connection that is being drained, or to none.
#[derive(Debug, Default, Clone)]
pub(crate) struct Draining(Weak<Drain>);

impl Draining {
    /// Whether the peer has acknowledged all that was sent, or the connection is gone.
    pub(super) fn is_drained(&self) -> bool {
        self.0.upgrade().is_none_or(|drain| !drain.has_unacked())
    }

    /// Blocks until the peer has acknowledged all that was sent, but not longer than `until`.
    pub(crate) fn wait_drained(&self, until: Option<Instant>) {
        poll_until(until, || self.is_drained());
    }
}

/// Closes a connection for sending and drains it.
///
/// When [`limits::peer_descriptors`] connections are being drained already, the connection is closed at once.
pub(crate) fn drain(engine: &'static Engine, fd: EngineFd) -> Draining {
    static AT_EXIT: Once = Once::new();
    let _ = rustix::net::shutdown(fd.get(), rustix::net::Shutdown::Write);
    let drain = {
        let mut drains = DRAINS.get().lock();
        if drains.len() >= limits::peer_descriptors() {
            return Draining::default();
        }
        let drain = Arc::new(Drain {
            engine,
            fd: Mutex::new(Rank::Drain, None),
        });
        drains.push(Arc::clone(&drain));
        drain
    };
    AT_EXIT.call_once(|| thread::at_exit(at_exit));
    let token = engine.reserve(Arc::clone(&drain) as Arc<dyn Source>);
    let watched = engine.watch(token, fd.get(), false);
    *drain.fd.lock() = Some((fd, token));
    let draining = Draining(Arc::downgrade(&drain));
    if watched.is_err() {
        drain.finish();
        return draining;
    }
    engine.deadline(token, clock::now() + DRAIN_TIMEOUT);
    // The peer may have closed its side before the socket was watched.
    drain.ready(true, false, clock::now());
    draining
}

/// Exit handler: waits until the peers have acknowledged what was sent, at most [`EXIT_TIMEOUT`].
pub(super) extern "C" fn at_exit() {
    poll_until(Some(clock::now() + EXIT_TIMEOUT), || !any_unacked());
}

fn poll_until(until: Option<Instant>, done: impl Fn() -> bool) {
    while !done() && until.is_none_or(|until| clock::now() < until) {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Whether bytes of any connection may be unacknowledged.
///
/// A signal handler may call `exit` while its thread holds one of these locks, so a lock that is held counts as "yes"
/// instead of being waited for.
fn any_unacked() -> bool {
    let Some(drains) = DRAINS.get().try_lock() else {
        return true;
    };
    drains.iter().any(|drain| match drain.fd.try_lock() {
        Some(fd) => is_unacked(fd.as_ref()),
        None => true,
    })
}

fn is_unacked(connection: Option<&(EngineFd, Token)>) -> bool {
    connection.is_some_and(|(fd, _)| socket::unacknowledged(fd.get()) > 0)
}

impl std::fmt::Debug for Drain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drain").finish_non_exhaustive()
    }
}

impl Drain {
    fn has_unacked(&self) -> bool {
        is_unacked(self.fd.lock().as_ref())
    }

    /// Closes the socket.
    fn finish(&self) {
        let connection = self.fd.lock().take();
        if let Some((fd, token)) = connection {
            DRAINS
                .get()
                .lock()
                .retain(|other| !std::ptr::eq(Arc::as_ptr(other), self));
            self.engine.remove(token, Some(fd.get()));
        }
    }
}

impl Source for Drain {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        let mut stage = self.engine.rx_buffer();
        let ended = {
            let connection = self.fd.lock();
            let Some((fd, _)) = &*connection else { return };
            matches!(
                stream::receive(fd.get(), None, &mut stage),
                Err(Io::Eof | Io::Broken(_))
            )
        };
        self.engine.return_rx_buffer(stage);
        if ended {
            self.finish();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.finish();
    }
}
