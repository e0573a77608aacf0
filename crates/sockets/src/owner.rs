//! The process that owns each stream, and the number of processes that have it: words in memory that forked processes share.

use crate::inherited::Inherited;
use crate::limits;
use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering};

static WORDS: Inherited<Option<&'static [AtomicU32]>> = Inherited::new(map);
static ME: AtomicU32 = AtomicU32::new(0);

fn map() -> Option<&'static [AtomicU32]> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: this is a new mapping, which is never unmapped.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), limits::OWNERS, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    let words = limits::OWNERS / size_of::<AtomicU32>();
    // SAFETY: the mapping has this length, zeros are valid words, and only atomics access it.
    Some(unsafe { std::slice::from_raw_parts(at.cast(), words) })
}

/// Returns a word for a new stream, or `None` if there is no memory for the words. If there are more streams than words,
/// streams share one. After a fork such a stream may be assigned to the wrong process, and the other process gets EIO.
pub fn word() -> Option<&'static AtomicU32> {
    // The number of the next word is in the same memory, because the child of a fork must not take the words of its parent's streams.
    let [next, words @ ..] = (*WORDS.get())? else {
        return None;
    };
    words.get(next.fetch_add(1, Ordering::Relaxed) as usize % words.len())
}

static COUNTS: Inherited<Option<&'static [AtomicU32]>> = Inherited::new(map);

/// The place of the number of processes that have a stream. There is none before the stream is inherited, nor after [`limits::OWNERS`] bytes
/// were used for such numbers: they are not used for other streams, because a number that is too low would end a stream in use.
#[derive(Debug, Default)]
pub struct Holders(AtomicU32);

impl Holders {
    fn count(&self) -> Option<&'static AtomicU32> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            place => (*COUNTS.get())?.get(place as usize),
        }
    }

    /// Counts the child of a fork, before the fork.
    pub fn add(&self) {
        if let Some(count) = self.count() {
            count.fetch_add(1, Ordering::AcqRel);
        } else if self.0.load(Ordering::Relaxed) == 0
            && let Some([next, rest @ ..]) = *COUNTS.get()
            && (next.load(Ordering::Relaxed) as usize) < rest.len()
        {
            self.0
                .store(next.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Release);
            if let Some(count) = self.count() {
                count.store(2, Ordering::Release);
            }
        }
    }

    /// Returns whether it is known that no other process has the stream. A process that was killed, or has executed another program, stays
    /// counted.
    pub fn is_one(&self) -> bool {
        self.count().is_some_and(|n| n.load(Ordering::Acquire) == 1)
    }

    /// Called when this process closes the stream or ends.
    pub fn leave(&self) {
        if let Some(count) = self.count() {
            count.fetch_sub(1, Ordering::AcqRel);
            self.0.store(0, Ordering::Release);
        }
    }
}

/// Returns the id of this process.
pub fn me() -> u32 {
    match ME.load(Ordering::Relaxed) {
        0 => {
            let me = std::process::id();
            ME.store(me, Ordering::Relaxed);
            me
        }
        me => me,
    }
}

/// Returns whether this process runs in the memory of another one until it calls exec, as a child of vfork
/// does. Such a child has its own descriptors, so its calls must not change the library's table of
/// descriptors.
pub fn is_visitor() -> bool {
    me() != std::process::id()
}

/// Returns whether a process exists.
pub fn exists(process: u32) -> bool {
    let errno = sys::errno();
    // SAFETY: no pointer is passed, and signal 0 is not sent.
    let r = unsafe { libc::kill(process as libc::pid_t, 0) };
    let exists = r == 0 || sys::errno() != libc::ESRCH;
    sys::set_errno(errno);
    exists
}

/// Forgets the parent's id. Called in the child of a fork.
pub fn forked() {
    ME.store(0, Ordering::Relaxed);
}
