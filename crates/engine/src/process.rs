//! State for each process: global values ([`PerProcess`], [`Inherited`]), and the handling of the parent's state in a
//! forked child.
//!
//! A forked child has copies of its parent's objects, but not the parent's threads: a lock may be held forever, and
//! a connection still belongs to the parent. So each object records the [`generation`] in which it was created, the
//! child creates its own globals, and [`in_child`] replaces the parent's descriptors in the child.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::thread::Timespec;

/// Words of [`ENGINE_FDS`]. The kernel permits 1,048,576 descriptors in a process, unless `fs.nr_open` is raised.
const FD_WORDS: usize = (1 << FD_BITS) / 64;
/// Descriptors that a child must not keep: bit `n % 64` of word `n / 64` represents descriptor `n`. Words that were never
/// written use no memory.
static ENGINE_FDS: [AtomicU64; FD_WORDS] = [const { AtomicU64::new(0) }; FD_WORDS];
/// Number of words of [`ENGINE_FDS`] up to the last one that was written, so that a child does not read the rest.
static FD_WORDS_USED: AtomicUsize = AtomicUsize::new(0);
/// Bits of a descriptor that [`ENGINE_FDS`] can record.
const FD_BITS: u32 = 20;
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Number of guards [`Changing`].
static CHANGING: AtomicUsize = AtomicUsize::new(0);
/// Number of threads that fork.
static FORKING: AtomicUsize = AtomicUsize::new(0);
/// The largest number of pauses of 0.1 ms in [`wait_until`]: a fork waits until no guard exists, and a new guard until no thread forks.
/// Guards exist only briefly, but a busy host may delay the thread that has one, and the fork of a process with much memory takes long.
const SLEEPS: u32 = 1000;

thread_local! {
    /// Number of guards [`Changing`] of this thread.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

/// Waits until `condition` is true, but not for ever: this thread may hold a lock that the thread it waits for needs. Returns whether the
/// condition is true.
fn wait_until(condition: impl Fn() -> bool) -> bool {
    const YIELDS: u32 = 100;
    for turn in 0..YIELDS + SLEEPS {
        if condition() {
            return true;
        }
        if turn < YIELDS {
            rustix::thread::sched_yield();
        } else {
            let pause = Timespec {
                tv_sec: 0,
                tv_nsec: 100_000,
            };
            // An interruption makes the pause shorter.
            let _ = rustix::thread::nanosleep(&pause);
        }
    }
    false
}

/// A guard while this thread creates and records descriptors of the engine, or closes them. Meanwhile no thread forks.
///
/// `fork` copies the table of descriptors, and later the memory. Without the guard a descriptor that another thread creates or
/// closes in between could be in the child's table but not in its record, and the child would keep a port or a connection of its
/// parent.
#[derive(Debug)]
pub(crate) struct Changing(());

impl Changing {
    pub(crate) fn new() -> Self {
        let mine = MINE.get();
        MINE.set(mine + 1);
        // This thread increments `CHANGING` before it reads `FORKING`, and `before_fork` increments `FORKING` before it reads `CHANGING`,
        // so at least one of the two threads waits.
        let begin = || {
            CHANGING.fetch_add(1, Ordering::SeqCst);
            let begun = mine > 0 || FORKING.load(Ordering::SeqCst) == 0;
            if !begun {
                CHANGING.fetch_sub(1, Ordering::SeqCst);
            }
            begun
        };
        if !wait_until(begin) {
            CHANGING.fetch_add(1, Ordering::SeqCst);
        }
        Self(())
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGING.fetch_sub(1, Ordering::SeqCst);
        MINE.set(MINE.get() - 1);
    }
}

/// The number of forks between the process that loaded the library and this one.
///
/// An object of another generation belongs to an ancestor: its locks may be held by threads that do not exist here,
/// and its sockets are replaced. It must not be used.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Installs the fork handlers when the library is loaded. The handler of the child increments [`generation`] and replaces the engine's
/// descriptors. The first call of the library would be too late to install them. The C library reads the list of handlers at the
/// beginning of a fork and copies the memory later, so a fork by another thread at that time could copy the engine without
/// running the handlers.
extern "C" fn watch_fork() {
    // SAFETY: the handlers are async-signal-safe: atomics and system calls only.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

// SAFETY: the dynamic linker calls the functions of this section when it has loaded the library and those that it needs.
#[unsafe(link_section = ".init_array")]
#[used]
static WATCH_FORK: extern "C" fn() = watch_fork;

/// An unconnected socket, from which nothing is read and to which nothing can be written; -1 if no descriptor is left.
fn dead_socket() -> RawFd {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor, and touches no memory.
    unsafe { libc::socket(libc::AF_UNIX, kind, 0) }
}

extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    // A signal handler that forks may have interrupted this thread while it had a guard.
    wait_until(|| CHANGING.load(Ordering::SeqCst) <= MINE.get());
}

extern "C" fn in_parent() {
    let less = |forks: usize| forks.checked_sub(1);
    let _ = FORKING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

/// Replaces each descriptor of the engine by a dead socket.
///
/// So only the parent has the connections, and the numbers stay in use: otherwise a new file of the child could get a
/// number that is stored in a copy of one of the parent's objects.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    FORKING.store(0, Ordering::SeqCst);
    CHANGING.store(MINE.get(), Ordering::SeqCst);
    let mut dead = -1;
    let mut extra = false;
    let used = FD_WORDS_USED.load(Ordering::Relaxed);
    for (word, bits) in ENGINE_FDS.iter().enumerate().take(used) {
        let mut bits = bits.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = (word * 64 + bits.trailing_zeros() as usize) as RawFd;
            bits &= bits - 1;
            if dead < 0 {
                dead = dead_socket();
                extra = dead >= 0;
            }
            if dead < 0 {
                // No descriptor is free: closing this one frees its number for the dead socket.
                // SAFETY: a descriptor of the parent's engine, which the child does not use.
                unsafe { libc::close(fd) };
                dead = dead_socket();
                extra = dead >= 0 && dead != fd;
            }
            if dead >= 0 && dead != fd {
                // SAFETY: a descriptor of the parent's engine, which the child does not use; `dup3` closes it.
                unsafe { libc::dup3(dead, fd, libc::O_CLOEXEC) };
            }
        }
    }
    if extra {
        // SAFETY: made above; no other copy of the number exists.
        unsafe { libc::close(dead) };
    }
}

/// The word of [`ENGINE_FDS`] for a descriptor, its index, and the bit; `None` if the number is too large to be recorded.
fn fd_bit(fd: RawFd) -> Option<(&'static AtomicU64, usize, u64)> {
    let n = usize::try_from(fd).ok()?;
    let at = n / 64;
    ENGINE_FDS.get(at).map(|word| (word, at, 1 << (n % 64)))
}

/// Records a descriptor that a forked child must not keep.
pub(crate) fn record_fd(fd: RawFd) {
    if let Some((word, at, bit)) = fd_bit(fd) {
        FD_WORDS_USED.fetch_max(at + 1, Ordering::Relaxed);
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Forgets a descriptor, which is about to be closed.
pub(crate) fn forget_fd(fd: RawFd) {
    if let Some((word, _, bit)) = fd_bit(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

struct Made<T> {
    generation: u32,
    value: T,
}

/// A global value that a forked child does not inherit: each process makes its own at first use.
///
/// The parent's value stays allocated and unused in the child, because another thread may have held its locks during
/// the fork.
#[derive(Debug)]
pub struct PerProcess<T> {
    made: AtomicPtr<Made<T>>,
    fresh: fn() -> T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// A value that `fresh` makes at first use in each process.
    pub const fn new(fresh: fn() -> T) -> Self {
        Self {
            made: AtomicPtr::new(std::ptr::null_mut()),
            fresh,
        }
    }

    /// The value of this process.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let old = self.made.load(Ordering::Acquire);
            // SAFETY: null, or made below and never freed; no `&mut` to it exists.
            if let Some(made) = unsafe { old.as_ref() }
                && made.generation == generation
            {
                return &made.value;
            }
            let new = Box::into_raw(Box::new(Made {
                generation,
                value: (self.fresh)(),
            }));
            match self
                .made
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            {
                // SAFETY: never freed once it is published.
                Ok(_) => return unsafe { &(*new).value },
                // SAFETY: another thread published its value first; this one has no other reference.
                Err(_) => drop(unsafe { Box::from_raw(new) }),
            }
        }
    }
}

/// A global value that is made at first use, and that a forked child inherits.
///
/// A thread never waits for another thread that makes the value, as it would with `OnceLock`: in a child that was forked
/// meanwhile, that thread does not exist. So threads may make the value at the same time, and the first one that is
/// complete is used by all.
#[derive(Debug)]
pub struct Inherited<T> {
    made: AtomicPtr<T>,
    fresh: fn() -> T,
}

impl<T: Send + Sync + 'static> Inherited<T> {
    /// A value that `fresh` makes at first use.
    pub const fn new(fresh: fn() -> T) -> Self {
        Self {
            made: AtomicPtr::new(std::ptr::null_mut()),
            fresh,
        }
    }

    /// The value. Makes it if there is none yet.
    #[inline]
    pub fn get(&self) -> &'static T {
        match self.get_if_made() {
            Some(made) => made,
            None => self.make(),
        }
    }

    /// The value, if it was made.
    #[inline]
    pub fn get_if_made(&self) -> Option<&'static T> {
        // SAFETY: null, or published by `make` and never freed; no `&mut` to it exists.
        unsafe { self.made.load(Ordering::Acquire).as_ref() }
    }

    #[cold]
    fn make(&self) -> &'static T {
        let new = Box::into_raw(Box::new((self.fresh)()));
        let none = std::ptr::null_mut();
        match self
            .made
            .compare_exchange(none, new, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: never freed once it is published.
            Ok(_) => unsafe { &*new },
            Err(first) => {
                // SAFETY: another thread published its value first; this one has no other reference.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: published by another thread, and never freed.
                unsafe { &*first }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_descriptor_is_recorded_whatever_its_number() {
        for fd in [0, 63, 64, 65_535, 65_536, (1 << 20) - 1] {
            let (word, at, bit) = fd_bit(fd).unwrap();
            assert_eq!(at * 64 + bit.trailing_zeros() as usize, fd as usize);
            assert!(std::ptr::eq(word, &raw const ENGINE_FDS[at]));
        }
        assert!(fd_bit(-1).is_none() && fd_bit(1 << 20).is_none());
        // No other test has so many descriptors.
        record_fd((1 << 20) - 1);
        assert_eq!(FD_WORDS_USED.load(Ordering::Relaxed), FD_WORDS);
        forget_fd((1 << 20) - 1);
        assert_eq!(ENGINE_FDS[FD_WORDS - 1].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_thread_does_not_wait_for_another_one_that_makes_an_inherited_value() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        static FIRST: std::sync::Mutex<()> = std::sync::Mutex::new(());
        static VALUE: Inherited<usize> = Inherited::new(|| {
            let call = CALLS.fetch_add(1, Ordering::SeqCst);
            if call == 0 {
                // This call stands for a thread that does not exist in a forked child: the test holds the lock until it has the value of
                // another call.
                drop(FIRST.lock().unwrap());
            }
            call
        });
        assert_eq!(VALUE.get_if_made(), None);
        let held = FIRST.lock().unwrap();
        let (send, receive) = sync_channel(1);
        let slow = thread::spawn(move || send.send(*VALUE.get()));
        while CALLS.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        assert_eq!(*VALUE.get(), 1);
        drop(held);
        // The slow thread's own value is dropped.
        assert_eq!(receive.recv(), Ok(1));
        slow.join().unwrap().unwrap();
        assert_eq!((VALUE.get_if_made(), VALUE.get()), (Some(&1), &1));
    }
}
