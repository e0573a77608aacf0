//! Waiting of threads for events of sockets.
//!
//! Each waiting thread has a [`Bell`], an event descriptor, which it registers at the sockets that it waits for. Every event
//! of a socket makes all its registered bells readable. So several threads may wait for one socket, one thread may wait for
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
pub(super) type Bell = Channel<()>;

/// Returns the bell of the calling thread.
pub(super) fn bell() -> io::Result<Arc<Bell>> {
    thread_local! {
        /// The bell, with the generation of the process that created it: after `fork` the child creates a new one.
        static BELL: RefCell<Option<(u32, Arc<Bell>)>> = const { RefCell::new(None) };
    }
    let generation = process::generation();
    let kept = BELL.try_with(|kept| {
        let kept = kept.try_borrow().ok()?;
        let (made, bell) = kept.as_ref()?;
        (*made == generation).then(|| Arc::clone(bell))
    });
    if let Ok(Some(bell)) = kept {
        return Ok(bell);
    }
    let bell = Arc::new(Bell::new()?);
    // A thread that is ending has no thread-local storage any more, so its bell is used for this call only.
    let _ended = BELL.try_with(|kept| {
        if let Ok(mut kept) = kept.try_borrow_mut() {
            *kept = Some((generation, Arc::clone(&bell)));
        }
    });
    Ok(bell)
}

/// The bells that are registered at a socket.
#[derive(Default)]
pub(super) struct Bells(Mutex<Vec<Arc<Bell>>>);

impl Bells {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Bell>>> {
        self.0.lock()
    }

    /// Makes all bells readable.
    pub(super) fn ring(&self) {
        for bell in self.all().iter() {
            if bell.is_empty() {
                bell.push(());
            }
        }
    }

    /// Registers a bell until [`Self::take_down`].
    pub(super) fn hang_up(&self, bell: &Arc<Bell>) {
        self.all().push(Arc::clone(bell));
    }

    /// Removes a bell.
    pub(super) fn take_down(&self, bell: &Arc<Bell>) {
        let mut all = self.all();
        if let Some(at) = all.iter().position(|b| Arc::ptr_eq(b, bell)) {
            all.swap_remove(at);
        }
    }
}

/// Waits until the bell or one of `others` is ready, or the time `until` is reached. While it waits, the calling thread handles the
/// device's sockets. The function may return early, so the caller checks its condition again. `EINTR`: a signal handler has run.
pub(super) fn wait(
    engine: &Engine,
    bell: &Bell,
    others: &mut [libc::pollfd],
    until: Option<Instant>,
) -> Result<(), c_int> {
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    if others.is_empty() {
        let time = until.map_or(WAIT_WORKING, left);
        engine
            .work_for(time, bell.fd())
            .map_err(|Interrupted| libc::EINTR)?;
        if !bell.is_empty() {
            return Ok(());
        }
    }
    engine.hand_over();
    let mut fds = Vec::with_capacity(others.len() + 1);
    fds.push(libc::pollfd {
        fd: bell.raw_fd(),
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
        let bells = Bells::default();
        let (one, two) = (
            Arc::new(Bell::new().unwrap()),
            Arc::new(Bell::new().unwrap()),
        );
        bells.hang_up(&one);
        bells.hang_up(&two);
        bells.ring();
        bells.ring();
        assert!(one.pop().is_some() && one.pop().is_none());
        assert!(two.pop().is_some() && two.pop().is_none());
        bells.take_down(&one);
        bells.ring();
        assert!(one.is_empty() && !two.is_empty());
    }

    #[test]
    fn a_thread_keeps_its_wake_up_descriptor() {
        let mine = bell().unwrap();
        assert!(Arc::ptr_eq(&mine, &bell().unwrap()));
        let other = std::thread::spawn(|| bell().unwrap()).join().unwrap();
        assert!(!Arc::ptr_eq(&mine, &other));
    }

    #[test]
    fn waiting_ends_by_time_out_wake_up_or_descriptor() {
        let engine = anywarp_engine::engine::engine().unwrap();
        let bell = Bell::new().unwrap();
        let soon = || Some(Instant::now() + Duration::from_millis(5));
        wait(engine, &bell, &mut [], soon()).unwrap();
        let other = Bell::new().unwrap();
        other.push(());
        let mut fds = [libc::pollfd {
            fd: other.raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        wait(engine, &bell, &mut fds, None).unwrap();
        assert_eq!(fds[0].revents, libc::POLLIN);
        bell.push(());
        wait(engine, &bell, &mut [], None).unwrap();
    }
}
