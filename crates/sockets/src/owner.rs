//! The process that owns each stream, and the number of processes that have it: words in memory that forked processes share.

use crate::inherited::Inherited;
use crate::limits;
use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering};

static WORDS: Inherited<Option<&'static [AtomicU32]>> = Inherited::new(map);
static ME: AtomicU32 = AtomicU32::new(0);
static FORKS: AtomicU32 = AtomicU32::new(0);

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

/// The value of a word that no stream has.
const FREE: u32 = 0;
/// The value of the word of a stream without an owner: the first process that uses the stream becomes its owner.
pub const NOBODY: u32 = u32::MAX;

/// Returns a word with the value `owner` for a new stream, or `None` if there is no memory for the words. If no free word is found in
/// [`limits::OWNER_TRIES`] attempts, the stream shares one with another stream. After a fork such a stream may be assigned to the wrong
/// process, and the other process gets EIO.
pub fn word(owner: u32) -> Option<&'static AtomicU32> {
    // The number of the next word is in the same memory, because the child of a fork must not take the words of its parent's streams.
    let [next, words @ ..] = (*WORDS.get())? else {
        return None;
    };
    let mut shared = None;
    // The process that was last found to exist.
    let mut alive = me();
    let mut checks = 0;
    for _ in 0..limits::OWNER_TRIES {
        let word = words.get(next.fetch_add(1, Ordering::Relaxed) as usize % words.len())?;
        let old = word.load(Ordering::Relaxed);
        let mut is_free = old == FREE;
        if !is_free && old != NOBODY && old != alive && checks < limits::OWNER_CHECKS {
            checks += 1;
            // A process that was killed has not given its words back.
            is_free = !exists(old);
            if !is_free {
                alive = old;
            }
        }
        if is_free && swap(word, old, owner) {
            return Some(word);
        }
        shared = Some(word);
    }
    shared.inspect(|word| word.store(owner, Ordering::Release))
}

fn swap(word: &AtomicU32, from: u32, to: u32) -> bool {
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
}

/// Gives back the word of a stream that this process owns and that no other process has.
pub fn give_back(word: &AtomicU32) {
    swap(word, me(), FREE);
}

/// Gives back the word of a stream without an owner.
pub fn give_back_unowned(word: &AtomicU32) {
    swap(word, NOBODY, FREE);
}

/// Returns the owner of a stream, if it has one.
pub fn owner_of(word: &AtomicU32) -> Option<u32> {
    // The word may have been given back by another process that has closed the stream.
    Some(word.load(Ordering::Acquire)).filter(|owner| ![FREE, NOBODY].contains(owner))
}

/// Makes this process the owner of a stream if its owner is still `old`. Returns whether it was.
pub fn replace(word: &AtomicU32, old: Option<u32>) -> bool {
    match old {
        Some(old) => swap(word, old, me()),
        None => swap(word, NOBODY, me()) || swap(word, FREE, me()),
    }
}

/// Makes this process the owner of a stream if it has none. Returns the owner.
pub fn claim(word: &AtomicU32) -> u32 {
    loop {
        match owner_of(word) {
            Some(owner) => return owner,
            None if replace(word, None) => return me(),
            None => {}
        }
    }
}

static COUNTS: Inherited<Option<&'static [AtomicU32]>> = Inherited::new(map);

/// The index of the word that counts the processes that have a stream, or 0 if there is none. A stream gets a word at its first fork. The
/// word is not used for another stream later, because a process would end a stream in use if its count were too low. So no stream gets a
/// word after [`limits::OWNERS`] bytes were used.
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

/// Returns how often this process has forked, or is about to.
pub fn forks() -> u32 {
    FORKS.load(Ordering::Acquire)
}

/// Called before a fork.
pub fn before_fork() {
    FORKS.fetch_add(1, Ordering::AcqRel);
}

/// Forgets the parent's id. Called in the child of a fork.
pub fn forked() {
    ME.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_in_use_is_not_given_to_another_stream() {
        let (mine, unowned) = (word(me()).unwrap(), word(NOBODY).unwrap());
        for _ in 0..limits::OWNERS / size_of::<AtomicU32>() {
            let other = word(me()).unwrap();
            assert!(!std::ptr::eq(other, mine) && !std::ptr::eq(other, unowned));
            give_back(other);
        }
        assert_eq!((owner_of(mine), owner_of(unowned)), (Some(me()), None));
        assert_eq!(claim(unowned), me());
        for word in [mine, unowned] {
            give_back(word);
        }
        let unowned = word(NOBODY).unwrap();
        give_back_unowned(unowned);
        assert_eq!(unowned.load(Ordering::Relaxed), FREE);
    }
}
