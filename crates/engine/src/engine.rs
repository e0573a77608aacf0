//! The engine of a process: the software RNIC, the reactor that drives it, and the handling of internal errors.
//!
//! A panic does not unwind into the program: it is caught at the C interface (`anywarp-abi`) or in the worker's loop,
//! and reported to [`caught`]. Afterwards the device is *broken*, because its state may be inconsistent. Each queue
//! pair enters the error state and flushes, each open device gets `IBV_EVENT_DEVICE_FATAL`, identifiers of the
//! connection manager get a device removal event, nothing is sent or received, and calls that would create or change
//! an object fail with EIO. Objects can still be destroyed.

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use anywarp_core::error::Misuse;
use anywarp_core::verbs::mr::Regions;
use anywarp_core::verbs::rnic::Rnic;
use rustix::net::sockopt::set_tcp_congestion;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::config::config;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::mem::UserMemory;
use crate::process::{self, PerProcess};
use crate::reactor::{Reactor, worker};
use crate::reserve;
use crate::trace;

/// An object that is notified when the device fails.
pub(crate) trait DeviceListener: Send + Sync {
    /// The device failed. Called without locks.
    fn device_fatal(&self);
}

/// The engine: one in a process. Dereferences to its [`Reactor`].
pub struct Engine {
    /// Lists the connected queue pairs, which are notified before the listeners.
    connected: OnceLock<ListConnected>,
    /// The software RNIC.
    pub rnic: Arc<Rnic>,
    reactor: Reactor,
    listeners: Mutex<Vec<Weak<dyn DeviceListener>>>,
    generation: u32,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("rnic", &self.rnic)
            .finish_non_exhaustive()
    }
}

impl Deref for Engine {
    type Target = Reactor;

    #[inline]
    fn deref(&self) -> &Reactor {
        &self.reactor
    }
}

/// Lists the connected queue pairs of this process.
pub(crate) type ListConnected = fn() -> Vec<Arc<dyn DeviceListener>>;

/// The engine of a process, and the lock for its creation.
struct EngineCell {
    engine: OnceLock<&'static Engine>,
    creation: Mutex<()>,
}

static ENGINE: PerProcess<EngineCell> = PerProcess::new(|| EngineCell {
    engine: OnceLock::new(),
    creation: Mutex::new(Rank::EngineCreation, ()),
});

/// The engine of this process, if it was created.
pub fn current() -> Option<&'static Engine> {
    ENGINE.get().engine.get().copied()
}

/// The engine of this process. The first call creates it and its thread; a forked child creates its own. `EIO` when the
/// device is broken, `ENOMEM` when there is no memory for objects.
pub fn engine() -> io::Result<&'static Engine> {
    let cell = ENGINE.get();
    if let Some(engine) = cell.engine.get() {
        engine.has_room_io()?;
        return Ok(engine);
    }
    let _creation = cell.creation.lock();
    if let Some(engine) = cell.engine.get() {
        return Ok(engine);
    }
    if let Some(warning) = &config().log_warning {
        // This warning is written although the log is off, because the unknown level has switched it off.
        log::write(log::Level::Warn, format_args!("{warning}"));
    }
    for warning in &config().warnings {
        log!(Warn, "{warning}");
    }
    if let Some(name) = &config().congestion_control
        && let Err(e) = try_congestion_control(name)
    {
        log!(
            Warn,
            "ANYWARP_CC: '{name}': {e}, the default is used; net.ipv4.tcp_allowed_congestion_control lists the allowed values"
        );
    }
    let engine = Box::new(Engine::new()?);
    // The thread is created before the engine is leaked and visible, and receives the reactor later. If the thread
    // cannot be created, nothing has to be undone. The channel has no buffer, so that the receiver allocates nothing: a
    // thread that fails to allocate while it starts would abort the process.
    let (give, take) = std::sync::mpsc::sync_channel::<&'static Reactor>(0);
    worker::spawn(take, |payload| caught("the worker", payload))?;
    let engine: &'static Engine = Box::leak(engine);
    let _ = give.send(&engine.reactor);
    let _ = cell.engine.set(engine);
    Ok(engine)
}

/// Sets a congestion control on a socket that is not used afterwards.
fn try_congestion_control(name: &str) -> io::Result<()> {
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let Ok(socket) = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None) else {
        // The cause is not the name.
        return Ok(());
    };
    Ok(set_tcp_congestion(&socket, name)?)
}

/// Handles a panic that was caught. `place` names the function that caught it, `payload` is the panic's payload.
#[cold]
pub fn caught(place: &str, payload: &(dyn Any + Send)) {
    let why = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given");
    log!(
        Error,
        "internal error in {place}: {why}; the device is unusable from now on"
    );
    if let Some(engine) = current() {
        engine.fail();
    }
}

impl Engine {
    fn new() -> io::Result<Self> {
        Ok(Self {
            rnic: Arc::new(Rnic {
                regions: Regions::new(),
                memory: Box::new(UserMemory),
                observer: trace::observer(),
            }),
            reactor: Reactor::new()?,
            connected: OnceLock::new(),
            listeners: Mutex::new(Rank::DeviceListeners, Vec::new()),
            generation: process::generation(),
        })
    }

    /// An engine without a worker, which only the calling test polls.
    #[cfg(test)]
    pub(crate) fn without_worker() -> io::Result<&'static Self> {
        // The list keeps leak detection from reporting the engines.
        static ALL: std::sync::Mutex<Vec<&Engine>> = std::sync::Mutex::new(Vec::new());
        let engine: &'static Self = Box::leak(Box::new(Self::new()?));
        ALL.lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push(engine);
        Ok(engine)
    }

    /// Whether this process created the engine, and not a process from which this one was forked.
    pub fn is_current(&self) -> bool {
        self.generation == process::generation()
    }

    /// Registers an object that is notified when the device fails.
    pub(crate) fn subscribe(&self, listener: Weak<dyn DeviceListener>) {
        let mut listeners = self.listeners.lock();
        if listeners.len() == listeners.capacity() {
            listeners.retain(|l| l.strong_count() > 0);
        }
        listeners.push(listener);
    }

    /// Registers the function that lists the connected queue pairs. They are not registered as listeners, because a
    /// weak reference would keep the memory of each destroyed queue pair.
    pub(crate) fn set_connected(&self, list: ListConnected) {
        let _same = self.connected.set(list);
    }

    /// Marks the device as broken, and notifies all queue pairs and listeners.
    fn fail(&self) {
        if self.reactor.set_broken() {
            return;
        }
        // Newest first: a device is older than its queue pairs, so a thread that reads the event of the device finds
        // them flushed.
        let listeners: Vec<_> = {
            let listeners = self.listeners.lock();
            listeners.iter().rev().filter_map(Weak::upgrade).collect()
        };
        let connected = self.connected.get().map_or_else(Vec::new, |list| list());
        for listener in connected.into_iter().chain(listeners) {
            // The panic may have come from this listener, and may be repeated.
            let _ = catch_unwind(AssertUnwindSafe(|| listener.device_fatal()));
        }
        self.reactor.hand_over();
    }

    /// Fails if the device is broken.
    pub(crate) fn works(&self) -> Result<(), Misuse> {
        if self.reactor.is_broken() {
            return Err(Misuse::DeviceBroken);
        }
        Ok(())
    }

    /// Fails if the device is broken, or if there is no memory to create an object.
    pub(crate) fn has_room(&self) -> Result<(), Misuse> {
        self.works()?;
        if reserve::is_scarce() {
            return Err(Misuse::NoMemory);
        }
        Ok(())
    }

    /// Fails if the device is broken, or if there is no memory for requests.
    pub(crate) fn takes_requests(&self) -> Result<(), Misuse> {
        self.works()?;
        if reserve::is_low() {
            return Err(Misuse::NoMemory);
        }
        Ok(())
    }

    /// As [`Self::has_room`], with an I/O error.
    pub(crate) fn has_room_io(&self) -> io::Result<()> {
        self.has_room()
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }
}
