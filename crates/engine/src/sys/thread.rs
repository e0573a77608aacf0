//! Thread cancellation, signals and functions that run when the process exits.

use std::cell::Cell;

/// Registers `what` to be called when the process ends by `exit` or by returning from `main`.
pub(crate) fn at_exit(what: extern "C" fn()) {
    // SAFETY: `what` is a function of this library, which is never unloaded (`-z nodelete`).
    unsafe { libc::atexit(what) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// A guard: while it exists, the calling thread cannot be cancelled (`pthread_cancel(3)`).
///
/// Cancelling a thread would unwind frames that hold locks, and then reach a `catch_unwind` that cannot handle this kind of
/// unwinding and ends the process. A guard is needed around calls of the C library that are cancellation points.
/// Posting and polling need no guard, since their system calls bypass the C library. A guard would cost them about 10 ns.
#[derive(Debug)]
pub struct Uncancelled(libc::c_int);

impl Uncancelled {
    /// Disables cancellation.
    #[allow(clippy::new_without_default, reason = "`new` changes the thread")]
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
        // SAFETY: the C library returned this state, and `ours` is a local.
        unsafe { pthread_setcancelstate(self.0, &raw mut ours) };
    }
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
    static IS_WAITING: Cell<bool> = const { Cell::new(false) };
}

/// A number that no other running thread has, and that is never 0.
#[inline]
pub(crate) fn number() -> usize {
    // The address of a thread-local variable is the number. A system call would take longer.
    IS_WORKER.with(|variable| std::ptr::from_ref(variable).addr())
}

/// How often the calling thread has slept: its voluntary context switches.
pub(crate) fn sleeps() -> u64 {
    // SAFETY: all-zero is a valid rusage to be overwritten.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a local.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw.cast_unsigned()
}

/// Marks the calling thread as the engine's worker.
pub(crate) fn mark_worker() {
    IS_WORKER.set(true);
}

/// Whether the calling thread is the engine's worker, and not a thread of the program.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Calls `wait`, in which the calling thread of the program waits for an event.
pub(crate) fn waiting<R>(wait: impl FnOnce() -> R) -> R {
    IS_WAITING.set(true);
    let result = wait();
    IS_WAITING.set(false);
    result
}

/// Whether the calling thread is in [`waiting`].
pub(crate) fn is_waiting() -> bool {
    IS_WAITING.get()
}

/// Blocks every signal in the calling thread, so that the application's threads receive them.
pub fn block_signals() {
    // SAFETY: all-zero is a valid sigset_t to fill.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is a local.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: `all` is a filled set; the old set is not requested.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) };
}

/// Whether the process has a signal handler that ends interrupted calls (installed without `SA_RESTART`).
///
/// The `poll` in which this library waits fails with EINTR after every handler. The `read` in which the libraries of
/// rdma-core wait fails only after a handler of this kind. So this function is called after an EINTR, which is rare, and
/// the caller waits again if the result is false.
pub fn handlers_interrupt() -> bool {
    (1..=64).filter(|n| !(32..=33).contains(n)).any(|n| {
        // SAFETY: all-zero is a valid sigaction to be overwritten.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: only queries; `action` is a local.
        let r = unsafe { libc::sigaction(n, std::ptr::null(), &raw mut action) };
        r == 0
            && action.sa_sigaction != libc::SIG_DFL
            && action.sa_sigaction != libc::SIG_IGN
            && action.sa_flags & libc::SA_RESTART == 0
    })
}
