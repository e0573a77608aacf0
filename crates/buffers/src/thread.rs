//! The library's threads, and cancellation of the program's threads.

use std::thread::Thread;

use libc::c_int;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Disables cancellation (`pthread_cancel(3)`) of the calling thread while the value exists. A cancelled thread would unwind
/// through frames that hold locks, into a `catch_unwind` that cannot handle this unwinding, which ends the process.
#[derive(Debug)]
pub(crate) struct Uncancelled(c_int);

impl Uncancelled {
    pub(crate) fn new() -> Self {
        const DISABLE: c_int = 1; // PTHREAD_CANCEL_DISABLE
        let mut before = 0;
        // SAFETY: `before` is a local.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: the first argument was returned by the C library, and the second is a local.
        unsafe { pthread_setcancelstate(self.0, &raw mut ours) };
    }
}

/// Starts a thread that blocks all signals, so that threads of the program handle them.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Thread, c_int> {
    // SAFETY: the signal sets are locals; the mask is restored below.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let spawned = std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(256 << 10)
            .spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        spawned
            .map(|handle| handle.thread().clone())
            .map_err(|_| libc::EAGAIN)
    }
}
