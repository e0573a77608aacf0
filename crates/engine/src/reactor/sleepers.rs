//! Which threads of this process sleep until a peer wakes them through a socket.
//!
//! A peer on the same host may share memory with this process, and write its messages there. Each such memory has a flag, by which
//! this process announces that it sleeps. A thread that is about to sleep sets the flags of all memories. A peer that finds the flag
//! of its memory set clears it when it writes, and sends a wake-up through a socket, which costs a system call at both ends. Once the
//! worker is awake, further wake-ups are of no use. So the worker clears the flags that no peer has seen yet (it withdraws the
//! announcements), unless another thread sleeps.

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
        // either the worker finds this thread, or the worker has cleared the flags before this thread sets them.
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
