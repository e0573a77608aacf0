//! Closed TCP connections that are read until the peer closes its direction too.
//!
//! If a kernel receives bytes for a closed socket, it answers with a reset, and a reset discards data that the socket
//! had sent and the peer had not read: the last FPDUs of a stream, or a Terminate. Such a connection is therefore
//! closed for sending only, and read for up to [`DRAIN_TIMEOUT`]. A process that exits waits until its peers have
//! acknowledged the data that it sent.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::clock;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::limits;
use crate::locks::{Mutex, Rank};
use crate::net::socket::{local_addr, peer_addr};
use crate::process::{Inherited, PerProcess};
use crate::reactor::{Source, Token};
use crate::sys::{Io, socket, stream, thread};

/// How long a closed connection is read. A peer that sends more after this time gets a reset.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a process that exits waits until its peers have acknowledged the data that it sent.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between two checks for unacknowledged bytes: the kernel does not report when there are none left.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Largest number of connections that are checked when another one is closed, or a queue pair is destroyed.
const CHECKED_MAX: usize = 16;
/// How long to wait for the end of stream of a peer in this process that has closed too. The kernel may deliver the end
/// of stream a moment after the close.
const PAIR_WAIT: Duration = Duration::from_millis(2);
/// Largest number of reads of a connection in one check: the last bytes, and the end of stream.
const READS_PER_CHECK: usize = 4;

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
    /// Whether the peer has acknowledged all sent data, or the connection has ended.
    pub(super) fn is_drained(&self) -> bool {
        self.0.upgrade().is_none_or(|drain| !drain.has_unacked())
    }

    /// Blocks until the peer has acknowledged all sent data, but not longer than `until`.
    pub(crate) fn wait_drained(&self, until: Option<Instant>) {
        poll_until(until, || self.is_drained());
    }
}

/// Closes a connection for sending and drains it.
///
/// When [`limits::peer_descriptors`] connections are being drained already, the connection is closed at once.
pub(crate) fn drain(engine: &'static Engine, fd: EngineFd) -> Draining {
    // Threads that come here at the same time may register the exit handler twice. This does no harm: the handler then runs twice, and
    // each run has its own time limit.
    static AT_EXIT: Inherited<()> = Inherited::new(|| thread::at_exit(at_exit));
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
    AT_EXIT.get();
    let token = engine.reserve(Arc::clone(&drain) as Arc<dyn Source>);
    let watched = engine.watch(token, fd.get(), false);
    *drain.fd.lock() = Some((fd, token));
    let draining = Draining(Arc::downgrade(&drain));
    if watched.is_err() {
        drain.finish();
        return draining;
    }
    engine.deadline(token, clock::now() + DRAIN_TIMEOUT);
    // The peer may have closed its side before the socket was watched. If the peer is in this process and closed first, its connection
    // is being drained too, and can be closed now, because this side has closed.
    close_finished();
    draining
}

/// Checks the newest [`CHECKED_MAX`] connections, and closes each whose peer has closed too. The engine's own thread would
/// close them a moment later, but a program may count its descriptors after `ibv_destroy_qp(3)`.
pub(crate) fn close_finished() {
    let drains: Vec<Arc<Drain>> = {
        let all = DRAINS.get().lock();
        all.iter().rev().take(CHECKED_MAX).map(Arc::clone).collect()
    };
    let ends: Vec<_> = drains.iter().map(|drain| drain.ends()).collect();
    for (drain, own) in drains.iter().zip(&ends) {
        let is_pair = own.is_some_and(|(local, peer)| ends.contains(&Some((peer, local))));
        if is_pair {
            drain.wait();
        }
        for _ in 0..READS_PER_CHECK {
            if !drain.read() {
                break;
            }
        }
    }
}

/// Exit handler: waits until the peers have acknowledged all sent data, at most [`EXIT_TIMEOUT`].
pub(super) extern "C" fn at_exit() {
    wait_at_exit(|| !any_unacked());
}

/// Waits in an exit handler until `done` returns true, at most [`EXIT_TIMEOUT`].
pub(super) fn wait_at_exit(done: impl Fn() -> bool) {
    poll_until(Some(clock::now() + EXIT_TIMEOUT), done);
}

fn poll_until(until: Option<Instant>, done: impl Fn() -> bool) {
    while !done() && until.is_none_or(|until| clock::now() < until) {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Whether bytes of any connection may be unacknowledged.
///
/// A signal handler may call `exit` while its thread holds one of these locks. So a lock that is held is not waited
/// for, and counts as "yes".
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

    /// The local address and that of the peer.
    fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let connection = self.fd.lock();
        let (fd, _) = connection.as_ref()?;
        Some((local_addr(fd)?, peer_addr(fd)?))
    }

    /// Waits for the end of stream of the peer, which has closed.
    fn wait(&self) {
        if let Some((fd, _)) = &*self.fd.lock() {
            socket::wait_readable(fd.get(), PAIR_WAIT);
        }
    }

    /// Reads once, and closes the socket at the end of the stream. Returns whether there may be more to read.
    fn read(&self) -> bool {
        let mut buffer = self.engine.rx_buffer();
        let read = {
            let connection = self.fd.lock();
            let Some((fd, _)) = &*connection else {
                return false;
            };
            stream::receive(fd.get(), None, &mut buffer)
        };
        self.engine.return_rx_buffer(buffer);
        if matches!(read, Err(Io::Eof | Io::Broken(_))) {
            self.finish();
        }
        read.is_ok()
    }

    /// Closes the socket. The connection stays in the list until its socket is closed, so [`close_finished`] waits for
    /// another thread that closes it.
    fn finish(&self) {
        {
            let mut connection = self.fd.lock();
            let Some((fd, token)) = connection.take() else {
                return;
            };
            self.engine.remove(token, Some(fd.get()));
            drop(fd);
        }
        DRAINS
            .get()
            .lock()
            .retain(|other| !std::ptr::eq(Arc::as_ptr(other), self));
    }
}

impl Source for Drain {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        self.read();
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.finish();
    }
}
