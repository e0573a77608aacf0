//! The table of descriptors: what the library knows about each one.
//!
//! An entry is one machine word: 0 for a descriptor that the library ignores (a file, a plain socket), a tag, or the address of
//! a socket or set. Sockets and sets are never freed but reused, so a thread with an old address still has a valid reference.

use crate::conn::dgram::Dgram;
use crate::conn::set::Set;
use crate::conn::sock::Sock;
use crate::limits;
use crate::sys;
use libc::c_int;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const SECOND: usize = 1024;
type Level = [AtomicUsize; SECOND];

static FIRST: [AtomicPtr<Level>; limits::DESCRIPTORS / SECOND] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; limits::DESCRIPTORS / SECOND];

/// A TCP socket that is not connected and does not listen.
const TCP: usize = 1;
/// A listener whose connections are upgraded if the peer sends a Request.
const LISTENER: usize = 3;
/// A listener whose connections must be upgraded.
const LISTENER_STRICT: usize = 4;
/// A listener for which the rules are checked with the addresses of each connection.
const LISTENER_EACH: usize = 5;
/// A descriptor that the library has opened for itself.
const OWN: usize = 6;
/// A TCP socket that stays plain.
const PINNED: usize = 7;
const TAGS: usize = 16;
/// Tag bit in the address of a set. The address of a connection has no tag bit.
const SET: usize = 1;
/// Tag bit in the address of a UDP socket.
const DGRAM: usize = 2;

/// How connections of a listener are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listens {
    /// They are upgraded if the peer sends a Request.
    Prefers,
    /// They must be upgraded.
    Requires,
    /// The rules are checked with the addresses of each connection.
    Each,
}

/// An entry of the table.
#[derive(Debug, Clone, Copy)]
pub enum Entry {
    /// The library ignores the descriptor and passes its calls to the kernel.
    Other,
    /// A TCP socket that is not connected and does not listen.
    Tcp,
    /// A TCP socket that stays plain because of a rule, because of an option that the program has set, or because stdio uses it. If such a
    /// socket had the entry [`Entry::Other`], it would be examined when it first accepts, like a listener from another process.
    Pinned,
    /// A UDP socket whose datagrams may be messages.
    Dgram(&'static Dgram),
    /// A listener.
    Listener(Listens),
    /// A descriptor that the library has opened for itself. The program cannot close it.
    Own,
    /// A connection.
    Sock(&'static Sock),
    /// An epoll set.
    Set(&'static Set),
}

impl Entry {
    fn word(self) -> usize {
        match self {
            Self::Other => 0,
            Self::Tcp => TCP,
            Self::Listener(Listens::Prefers) => LISTENER,
            Self::Listener(Listens::Requires) => LISTENER_STRICT,
            Self::Listener(Listens::Each) => LISTENER_EACH,
            Self::Own => OWN,
            Self::Pinned => PINNED,
            Self::Sock(sock) => std::ptr::from_ref(sock).expose_provenance(),
            Self::Set(set) => std::ptr::from_ref(set).expose_provenance() | SET,
            Self::Dgram(dgram) => std::ptr::from_ref(dgram).expose_provenance() | DGRAM,
        }
    }

    #[inline]
    fn of(word: usize) -> Self {
        match word {
            TCP => Self::Tcp,
            LISTENER => Self::Listener(Listens::Prefers),
            LISTENER_STRICT => Self::Listener(Listens::Requires),
            LISTENER_EACH => Self::Listener(Listens::Each),
            OWN => Self::Own,
            PINNED => Self::Pinned,
            0..TAGS => Self::Other,
            word if word & SET != 0 => {
                let at = std::ptr::with_exposed_provenance::<Set>(word & !SET);
                // SAFETY: only `word` makes such words, from `'static` references.
                Self::Set(unsafe { &*at })
            }
            word if word & DGRAM != 0 => {
                let at = std::ptr::with_exposed_provenance::<Dgram>(word & !DGRAM);
                // SAFETY: as above.
                Self::Dgram(unsafe { &*at })
            }
            word => {
                let at = std::ptr::with_exposed_provenance::<Sock>(word);
                // SAFETY: as above.
                Self::Sock(unsafe { &*at })
            }
        }
    }
}

/// Returns the table slot of a descriptor, if the part of the table that contains it exists.
#[inline]
fn place(fd: c_int) -> Option<&'static AtomicUsize> {
    let fd = usize::try_from(fd).ok()?;
    let level = FIRST.get(fd / SECOND)?.load(Ordering::Acquire);
    // SAFETY: parts are made by `make`, and never freed.
    let level = unsafe { level.as_ref() }?;
    level.get(fd % SECOND)
}

fn make(fd: c_int) -> Option<&'static AtomicUsize> {
    if let Some(place) = place(fd) {
        return Some(place);
    }
    let first = FIRST.get(usize::try_from(fd).ok()? / SECOND)?;
    let new = Box::into_raw(Box::new([const { AtomicUsize::new(0) }; SECOND]));
    let old = std::ptr::null_mut();
    if first
        .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        // Another thread has allocated this part first.
        // SAFETY: the box was made above, and nothing else has its address.
        drop(unsafe { Box::from_raw(new) });
    }
    place(fd)
}

/// Returns the entry of `fd`.
#[inline]
pub fn get(fd: c_int) -> Entry {
    place(fd).map_or(Entry::Other, |p| Entry::of(p.load(Ordering::Acquire)))
}

/// Returns the connection of `fd`, if it is one.
#[inline]
pub fn sock(fd: c_int) -> Option<&'static Sock> {
    match get(fd) {
        Entry::Sock(sock) => Some(sock),
        _ => None,
    }
}

/// Returns the UDP socket of `fd`, if it is one.
#[inline]
pub fn dgram(fd: c_int) -> Option<&'static Dgram> {
    match get(fd) {
        Entry::Dgram(dgram) => Some(dgram),
        _ => None,
    }
}

/// Returns the epoll set of `fd`, if it is one.
#[inline]
pub fn set(fd: c_int) -> Option<&'static Set> {
    match get(fd) {
        Entry::Set(set) => Some(set),
        _ => None,
    }
}

/// Sets the entry of `fd` and returns the previous one. Descriptors beyond the end of the table have no entry and are ignored.
pub fn replace(fd: c_int, entry: Entry) -> Entry {
    let word = entry.word();
    let place = if word == 0 { place(fd) } else { make(fd) };
    place.map_or(Entry::Other, |p| Entry::of(p.swap(word, Ordering::AcqRel)))
}

/// Records that the library has opened `fd` for itself.
pub fn own(fd: c_int) {
    replace(fd, Entry::Own);
}

/// Returns whether the library has opened `fd` for itself, and the program has not put a descriptor of its own at the number.
pub fn is_own(fd: c_int) -> bool {
    // Numbers beyond the end of the table have no entry. A descriptor of the library with such a number counts as not replaced.
    place(fd).is_none_or(|p| p.load(Ordering::Acquire) == OWN)
}

/// Closes a descriptor that the library has opened for itself, unless the program has replaced it.
pub fn close_own(fd: c_int) {
    let is_own = place(fd).is_none_or(|p| {
        p.compare_exchange(OWN, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    });
    if is_own {
        sys::close(fd);
    }
}

/// Writes an eventfd of the library, unless the program has replaced it.
pub fn ring_own(fd: c_int) {
    if is_own(fd) {
        sys::ring(fd);
    }
}

/// Removes the entry of `fd` if it is `sock`. Returns whether it was.
pub fn forget(fd: c_int, sock: &'static Sock) -> bool {
    let word = Entry::Sock(sock).word();
    place(fd).is_some_and(|p| {
        p.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Returns a descriptor of the connection or the set.
pub fn find(of: Entry) -> Option<c_int> {
    let mut found = None;
    for_each(|fd, entry| {
        if entry.word() == of.word() {
            found = Some(fd);
        }
    });
    found
}

/// Calls `each` for all descriptors with an entry.
pub fn for_each(mut each: impl FnMut(c_int, Entry)) {
    for (i, first) in FIRST.iter().enumerate() {
        // SAFETY: as in `place`.
        let Some(level) = (unsafe { first.load(Ordering::Acquire).as_ref() }) else {
            continue;
        };
        for (j, place) in level.iter().enumerate() {
            let word = place.load(Ordering::Acquire);
            if word != 0 {
                each((i * SECOND + j) as c_int, Entry::of(word));
            }
        }
    }
}
