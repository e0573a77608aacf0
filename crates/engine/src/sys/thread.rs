//! Thread cancellation, signals and functions that run when the process exits.

/// Has `what` called when the process ends by `exit` or by returning from `main`.
pub(crate) fn at_exit(what: extern "C" fn()) {
    // SAFETY: a function of this library, which is never unloaded (`-z nodelete`).
    unsafe { libc::atexit(what) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// While it lives the calling thread is not cancelled (`pthread_cancel(3)`): a cancelled thread would unwind through
/// frames that hold locks, into a `catch_unwind` that knows nothing of it, which ends the process.
///
/// Calls of the C library that a thread can be cancelled in need one. Posting and polling make none: their system calls do
/// not go through the C library, so they are spared the price (some 10 ns).
#[derive(Debug)]
pub struct Uncancelled(libc::c_int);

impl Uncancelled {
    /// From now on.
    #[allow(clippy::new_without_default, reason = "what it does is not a default")]
    pub fn new() -> Self {
        const DISABLE: libc::c_int = 1; // PTHREAD_CANCEL_DISABLE
        let mut before = 0;
        // SAFETY: `before` is a local.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a state that the C library gave, and a local.
        unsafe { pthread_setcancelstate(self.0, &raw mut ours) };
    }
}

/// Blocks every signal in the calling thread: signals are for the application's threads.
pub(crate) fn block_signals() {
    // SAFETY: all-zero is a valid sigset_t to fill.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is a local.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: `all` is a filled set; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) };
}

/// Whether the process has a signal handler that wants interrupted calls to end (installed without `SA_RESTART`).
///
/// `poll` ends with EINTR for every handler, `read` (what the distribution's library waits in) only for these. Asked
/// after an EINTR, which is rare.
pub fn handlers_interrupt() -> bool {
    (1..=64).filter(|n| !(32..=33).contains(n)).any(|n| {
        // SAFETY: all-zero is a valid sigaction to be overwritten.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: only asks; `action` is a local.
        let r = unsafe { libc::sigaction(n, std::ptr::null(), &raw mut action) };
        r == 0
            && action.sa_sigaction != libc::SIG_DFL
            && action.sa_sigaction != libc::SIG_IGN
            && action.sa_flags & libc::SA_RESTART == 0
    })
}
