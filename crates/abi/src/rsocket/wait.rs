//! Waiting of threads for events of sockets.
//!
//! Each waiting thread has a [`Waker`], an event descriptor, which it registers at the sockets that it waits for. Every event
//! of a socket makes all its registered wakers readable. So several threads may wait for one socket, one thread may wait for
//! many sockets, and no thread consumes the event of another.

use std::cell::RefCell;
use std::ffi::c_int;
use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use anywarp_core::lock::Mutex;
use anywarp_engine::channel::Channel;
use anywarp_engine::engine::Engine;
use anywarp_engine::process;
use anywarp_engine::reactor::{Interrupted, WAIT_WORKING};

use crate::ffi::os_errno;

/// An event descriptor that becomes readable at an event of a socket.
pub(super) type Waker = Channel<()>;

/// Returns the waker of the calling thread.
pub(super) fn waker() -> io::Result<Arc<Waker>> {
    thread_local! {
        /// The waker, with the generation of the process that created it: after `fork` the child creates a new one.
        static WAKER: RefCell<Option<(u32, Arc<Waker>)>> = const { RefCell::new(None) };
    }
    let generation = process::generation();
    let kept = WAKER.try_with(|kept| {
        let kept = kept.try_borrow().ok()?;
        let (made, waker) = kept.as_ref()?;
        (*made == generation).then(|| Arc::clone(waker))
    });
    if let Ok(Some(waker)) = kept {
        return Ok(waker);
    }
    let waker = Arc::new(Waker::new()?);
    // A thread that is ending has no thread-local storage any more, so its waker is used for this call only.
    let _ended = WAKER.try_with(|kept| {
        if let Ok(mut kept) = kept.try_borrow_mut() {
            *kept = Some((generation, Arc::clone(&waker)));
        }
    });
    Ok(waker)
}

/// The wakers that are registered at a socket.
#[derive(Default)]
pub(super) struct Wakers(Mutex<Vec<Arc<Waker>>>);

impl Wakers {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Waker>>> {
        self.0.lock()
    }

    /// Makes all wakers readable.
    pub(super) fn wake_all(&self) {
        for waker in self.all().iter() {
            if waker.is_empty() {
                waker.push(());
            }
        }
    }

    /// Registers a waker until [`Self::unregister`].
    pub(super) fn register(&self, waker: &Arc<Waker>) {
        self.all().push(Arc::clone(waker));
    }

    /// Removes a waker.
    pub(super) fn unregister(&self, waker: &Arc<Waker>) {
        let mut all = self.all();
        if let Some(at) = all.iter().position(|b| Arc::ptr_eq(b, waker)) {
            all.swap_remove(at);
        }
    }
}

/// Waits until the waker or one of `others` is ready, or the time `until` is reached. If `others` is empty, the calling thread first
/// handles the device's sockets for up to [`WAIT_WORKING`]. Then it leaves them to the worker, which is the device's own thread, and
/// sleeps. The function may return early, so the caller checks its condition again. `EINTR`: a signal handler has run.
pub(super) fn wait(
    engine: &Engine,
    waker: &Waker,
    others: &mut [libc::pollfd],
    until: Option<Instant>,
) -> Result<(), c_int> {
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    if others.is_empty() {
        let time = until.map_or(WAIT_WORKING, left);
        engine
            .work_for(time, waker.fd())
            .map_err(|Interrupted| libc::EINTR)?;
        if !waker.is_empty() {
            return Ok(());
        }
    }
    engine.hand_over();
    let mut fds = Vec::with_capacity(others.len() + 1);
    fds.push(libc::pollfd {
        fd: waker.raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    fds.extend_from_slice(others);
    let result = poll(&mut fds, until.map(left));
    for (other, fd) in others.iter_mut().zip(fds.iter().skip(1)) {
        other.revents = fd.revents;
    }
    result
}

/// `poll(2)` as a direct system call. The function of the C library is a cancellation point, and a preloaded library that
/// calls this library may have replaced it.
pub(super) fn poll(fds: &mut [libc::pollfd], time: Option<Duration>) -> Result<(), c_int> {
    let time = time.map(|t| libc::timespec {
        tv_sec: t.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let limit: *const libc::timespec = time.as_ref().map_or(std::ptr::null(), |t| t);
    let no_mask = std::ptr::null::<libc::sigset_t>();
    // SAFETY: `fds` and `limit` are valid for the call; no signal mask is given.
    let n = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            fds.as_mut_ptr(),
            fds.len(),
            limit,
            no_mask,
            8_usize,
        )
    };
    if n < 0 {
        for fd in fds.iter_mut() {
            fd.revents = 0;
        }
        return Err(os_errno(&io::Error::last_os_error()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_waiting_thread_is_woken() {
        let wakers = Wakers::default();
        let (one, two) = (
            Arc::new(Waker::new().unwrap()),
            Arc::new(Waker::new().unwrap()),
        );
        wakers.register(&one);
        wakers.register(&two);
        wakers.wake_all();
        wakers.wake_all();
        assert!(one.pop().is_some() && one.pop().is_none());
        assert!(two.pop().is_some() && two.pop().is_none());
        wakers.unregister(&one);
        wakers.wake_all();
        assert!(one.is_empty() && !two.is_empty());
    }

    #[test]
    fn a_thread_keeps_its_wake_up_descriptor() {
        let mine = waker().unwrap();
        assert!(Arc::ptr_eq(&mine, &waker().unwrap()));
        let other = std::thread::spawn(|| waker().unwrap()).join().unwrap();
        assert!(!Arc::ptr_eq(&mine, &other));
    }

    #[test]
    fn waiting_ends_by_time_out_wake_up_or_descriptor() {
        let engine = anywarp_engine::engine::engine().unwrap();
        let waker = Waker::new().unwrap();
        let soon = || Some(Instant::now() + Duration::from_millis(5));
        wait(engine, &waker, &mut [], soon()).unwrap();
        let other = Waker::new().unwrap();
        other.push(());
        let mut fds = [libc::pollfd {
            fd: other.raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        wait(engine, &waker, &mut fds, None).unwrap();
        assert_eq!(fds[0].revents, libc::POLLIN);
        waker.push(());
        wait(engine, &waker, &mut [], None).unwrap();
    }
}
