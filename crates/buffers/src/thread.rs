//! Threads of the library.

use libc::c_int;

/// Starts a thread that no signal of the program interrupts.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), c_int> {
    // SAFETY: sets of signals on the stack; the mask is put back.
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
        spawned.map(drop).map_err(|_| libc::EAGAIN)
    }
}
