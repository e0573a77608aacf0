//! Which threads of this process sleep until a peer wakes them through a socket.
//!
//! Each memory that a peer shares has a flag, by which this process announces that it sleeps. A thread that is about to sleep sets the
//! flags of all memories. The peer clears the flag of the memory that it writes to, and sends a wake-up, which costs a system call at both
//! ends. Once the worker is awake, further wake-ups are of no use. So it withdraws the announcements that no peer has
//! seen yet, unless another thread sleeps.

use crate::sync::{AtomicU64, Ordering, fence};

#[derive(Debug)]
pub(super) struct Sleepers {
    /// The number of threads, other than the worker, that sleep or are about to.
    threads: AtomicU64,
    /// 1: flags may be set.
    announced: AtomicU64,
}

impl Sleepers {
    pub(super) fn new() -> Self {
        Self {
            threads: AtomicU64::new(0),
            announced: AtomicU64::new(0),
        }
    }

    /// Calls `sleep`, which sets flags and then sleeps until a peer may have seen one.
    pub(super) fn count<R>(&self, sleep: impl FnOnce() -> R) -> R {
        self.threads.fetch_add(1, Ordering::Relaxed);
        // Store-load pair with `withdraw`: this thread adds itself, then sets flags; the worker clears flags, then looks for threads. So
        // the worker finds this thread, or its clearing came before and has no effect on the flags of this thread.
        fence(Ordering::SeqCst);
        let result = sleep();
        self.threads.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Records that flags are about to be set.
    pub(super) fn announce(&self) {
        self.announced.store(1, Ordering::Relaxed);
    }

    /// Called by the worker when it is awake: calls `withdraw` to clear the flags. If another thread has gone to sleep meanwhile, calls
    /// `announce` to set them again. The caller looks at all memories afterwards, because peers may have written while the flags were clear.
    pub(super) fn withdraw(&self, withdraw: impl FnOnce(), announce: impl FnOnce()) {
        if self.announced.load(Ordering::Relaxed) == 0 || self.threads.load(Ordering::Relaxed) != 0
        {
            return;
        }
        self.announced.store(0, Ordering::Relaxed);
        withdraw();
        fence(Ordering::SeqCst);
        if self.threads.load(Ordering::Relaxed) != 0 {
            announce();
        }
    }
}
