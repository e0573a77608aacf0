//! An open device (`ibv_open_device(3)`) and its asynchronous events.
//!
//! There is one device, `anywarp0`, with one port. Its GIDs are the addresses of the host. Listing devices starts no
//! thread and opens no socket; opening the device for the first time starts the engine.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use anywarp_core::bounds;

use crate::channel::Channel;
use crate::engine::{DeviceListener, Engine, engine};
use crate::events::{AsyncItem, event};
use crate::fd;
use crate::gids::{self, PortChanges};
use crate::process::PerProcess;

/// The device's name.
pub const NAME: &str = "anywarp0";

/// An open device.
pub struct Context {
    /// The engine of the device.
    pub engine: &'static Engine,
    /// Asynchronous events.
    pub events: Arc<Channel<AsyncItem>>,
    /// Address of the C object, for the ABI layer.
    pub c_object: AtomicUsize,
    /// The descriptor that represents the device when a program passes it on (`ibv_import_device(3)`). It is an empty
    /// file in memory, and is recognized by its inode.
    pub command: OwnedFd,
    /// The number of completion queues times [`QUEUE`], plus [`POLLED`] if the program makes progress only by polls.
    state: AtomicUsize,
}

/// The program makes progress only by polls.
const POLLED: usize = 1;
/// One completion queue.
const QUEUE: usize = 2;

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

/// The file that represents the device in this process.
fn command() -> io::Result<&'static OwnedFd> {
    static FILE: PerProcess<OnceLock<OwnedFd>> = PerProcess::new(OnceLock::new);
    let file = FILE.get();
    if file.get().is_none() {
        // An error is not stored: the next call may find a free descriptor.
        let made = rustix::fs::memfd_create("anywarp", rustix::fs::MemfdFlags::CLOEXEC)?;
        let _another_thread_was_faster = file.set(made);
    }
    file.get()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))
}

impl Context {
    /// Opens the device: starts the engine if this is the first time.
    pub fn open() -> io::Result<Arc<Self>> {
        crate::fault::check()?;
        crate::qos::check()?;
        Self::of(engine()?)
    }

    /// Opens the device of an engine.
    pub(crate) fn of(engine: &'static Engine) -> io::Result<Arc<Self>> {
        let me = Self {
            engine,
            events: Arc::new(Channel::new()?),
            c_object: AtomicUsize::new(0),
            command: command()?.try_clone()?,
            state: AtomicUsize::new(0),
        };
        Ok(Arc::new(me))
    }

    /// Whether the program makes progress only by polls.
    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.state.load(Ordering::Relaxed) & POLLED != 0
    }

    /// Sets whether the program makes progress only by polls. While this holds for all contexts that have completion queues, the worker
    /// waits for longer after the last poll before it handles the sockets.
    pub fn set_polled(&self, polled: bool) {
        let before = if polled {
            self.state.fetch_or(POLLED, Ordering::Relaxed)
        } else {
            self.state.fetch_and(!POLLED, Ordering::Relaxed)
        };
        let after = if polled {
            before | POLLED
        } else {
            before & !POLLED
        };
        self.count(before, after);
    }

    /// Called when a completion queue is created. A context without completion queues counts neither as used nor as polled:
    /// librdmacm opens a context for its identifiers, which stays open even if the program never uses it.
    pub(crate) fn add_queue(&self) {
        let before = self.state.fetch_add(QUEUE, Ordering::Relaxed);
        self.count(before, before + QUEUE);
    }

    /// Called when a completion queue is destroyed.
    pub(crate) fn remove_queue(&self) {
        let before = self.state.fetch_sub(QUEUE, Ordering::Relaxed);
        self.count(before, before - QUEUE);
    }

    /// Reports a change of the state to the engine.
    fn count(&self, before: usize, after: usize) {
        let counts = |state: usize| (state >= QUEUE, state > QUEUE && state & POLLED != 0);
        let (before, after) = (counts(before), counts(after));
        if before.0 != after.0 {
            self.engine.set_context_used(after.0);
        }
        if before.1 != after.1 {
            self.engine.set_context_polled(after.1);
        }
    }

    /// Whether a descriptor is a copy of a context's [`Self::command`].
    pub fn is_own_descriptor(fd: RawFd) -> bool {
        let Ok(own) = command() else { return false };
        // The copy is examined, because the program may close its own descriptor at any time.
        let Some(copy) = fd::duplicate(fd) else {
            return false;
        };
        fd::identity(own).is_some_and(|file| fd::identity(&copy) == Some(file))
    }

    /// Subscribes this context to the events of the device and its port.
    pub fn watch(self: &Arc<Self>) {
        let me: Arc<dyn DeviceListener> = Arc::clone(self) as _;
        self.engine.subscribe(Arc::downgrade(&me));
        let me: Arc<dyn gids::Listener> = Arc::clone(self) as _;
        gids::listen(self.engine, Arc::downgrade(&me));
    }

    /// Largest UD message as `enum ibv_mtu`: 5 is 4096 bytes.
    pub fn mtu() -> u32 {
        debug_assert_eq!(bounds::UD_MTU, 4096);
        5
    }
}

impl DeviceListener for Context {
    fn device_fatal(&self) {
        self.events.push(AsyncItem {
            event: event::DEVICE_FATAL,
            c_object: 0,
        });
    }
}

impl gids::Listener for Context {
    fn port_changed(&self, changes: &PortChanges) {
        for event in &changes.events {
            self.events.push(AsyncItem {
                event: *event,
                c_object: 0,
            });
        }
    }
}
