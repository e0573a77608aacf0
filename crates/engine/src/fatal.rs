//! What happens when the library finds an error of its own: a panic that was caught.
//!
//! A panic never leaves the library: it ends at the C border (`anywarp-abi`) or in the worker's loop. What it left behind
//! is not trusted any more. The device is *broken* from then on: every queue pair goes to the error state and flushes,
//! each open device gets `IBV_EVENT_DEVICE_FATAL`, identifiers of the connection manager hear of the device's removal,
//! no byte moves, and calls that would make or change something fail with EIO. What exists can be destroyed.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, Weak};

use anywarp_core::error::Misuse;

use crate::log;
use crate::reserve;
use crate::worker::{Engine, current};

/// What hears that the device is broken.
pub(crate) trait Mortal: Send + Sync {
    /// The device broke.
    fn device_broke(&self);
}

/// A panic was caught: `what` says where, `payload` is what it carried.
#[cold]
pub fn caught(what: &str, payload: &(dyn Any + Send)) {
    let why = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no reason given");
    log!(
        Error,
        "internal error in {what}: {why}; the device is unusable from now on"
    );
    if let Some(engine) = current() {
        engine.fail();
    }
}

impl Engine {
    /// Registers who is to be told when the device breaks.
    pub(crate) fn watch_over(&self, who: Weak<dyn Mortal>) {
        let mut all = self.mortals.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == all.capacity() {
            all.retain(|m| m.strong_count() > 0);
        }
        all.push(who);
    }

    /// The device is broken: all that is under way ends, and whoever waits is told.
    fn fail(&self) {
        if self.set_broken() {
            return;
        }
        let qps: Vec<_> = {
            let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
            qps.values().filter_map(Weak::upgrade).collect()
        };
        let mortals: Vec<Arc<dyn Mortal>> = {
            let all = self.mortals.lock().unwrap_or_else(PoisonError::into_inner);
            // The newest first: a device is older than its queue pairs, and whoever reads its event finds them flushed.
            all.iter().rev().filter_map(Weak::upgrade).collect()
        };
        let qps = qps.into_iter().map(|qp| qp as Arc<dyn Mortal>);
        for mortal in qps.chain(mortals) {
            // One of them is what broke, and may break again.
            let _ = catch_unwind(AssertUnwindSafe(|| mortal.device_broke()));
        }
        self.hand_over();
    }

    /// `Err` on a broken device.
    pub(crate) fn works(&self) -> Result<(), Misuse> {
        if self.is_broken() {
            return Err(Misuse::DeviceBroken);
        }
        Ok(())
    }

    /// [`Self::works`], and there is memory to make something.
    pub(crate) fn has_room(&self) -> Result<(), Misuse> {
        self.works()?;
        if reserve::is_scarce() {
            return Err(Misuse::NoMemory);
        }
        Ok(())
    }

    /// [`Self::works`], and there is memory for requests.
    pub(crate) fn takes_requests(&self) -> Result<(), Misuse> {
        self.works()?;
        if reserve::is_low() {
            return Err(Misuse::NoMemory);
        }
        Ok(())
    }

    /// [`Self::has_room`], for calls that answer with an I/O error.
    pub(crate) fn has_room_io(&self) -> io::Result<()> {
        self.has_room()
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }
}

/// Panics on demand: how the tests see that a panic ends where it should.
///
/// In builds with debug assertions only, and there only when `ANYWARP_TEST_PANIC` is set. A request that is posted with
/// the identifier [`IN_CALL`] panics in the call; one with [`IN_WORKER`] makes the worker panic when it next handles
/// the socket or a time-out of a reliable queue pair.
///
/// [`IN_CALL`]: provoke::IN_CALL
/// [`IN_WORKER`]: provoke::IN_WORKER
pub(crate) mod provoke {
    #[cfg(debug_assertions)]
    use std::sync::atomic::{AtomicBool, Ordering};

    /// "panic in call".
    #[cfg(debug_assertions)]
    pub(crate) const IN_CALL: u64 = 0x7061_6e69_6300_0001;
    /// "panic in worker".
    #[cfg(debug_assertions)]
    pub(crate) const IN_WORKER: u64 = 0x7061_6e69_6300_0002;

    #[cfg(debug_assertions)]
    static ARMED: AtomicBool = AtomicBool::new(false);

    /// A request is posted.
    #[cfg(debug_assertions)]
    #[allow(clippy::panic, reason = "a test asks for it")]
    pub(crate) fn posted(id: u64) {
        if !matches!(id, IN_CALL | IN_WORKER) || !crate::config::config().test_panic {
            return;
        }
        if id == IN_CALL {
            panic!("a test asks for it");
        }
        ARMED.store(true, Ordering::Relaxed);
    }

    /// The worker, or a thread in its place, handles a queue pair.
    #[cfg(debug_assertions)]
    #[allow(clippy::panic, reason = "a test asks for it")]
    pub(crate) fn working() {
        if std::thread::current().name() == Some(crate::worker::THREAD)
            && ARMED.swap(false, Ordering::Relaxed)
        {
            panic!("a test asks for it");
        }
    }

    /// A request is posted.
    #[cfg(not(debug_assertions))]
    pub(crate) fn posted(_id: u64) {}

    /// The worker handles a queue pair.
    #[cfg(not(debug_assertions))]
    pub(crate) fn working() {}
}
