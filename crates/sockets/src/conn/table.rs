//! What the library knows about each descriptor number.
//!
//! A number leads to a word: 0 for descriptors that are not looked at (files, plain sockets), a tag, or the address of a
//! socket or a set. Sockets and sets live as long as the process and are used again, so that a thread with an old address
//! still finds a valid one.

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
/// A listener whose connections are looked at.
const LISTENER: usize = 3;
/// A listener whose connections must be upgraded.
const LISTENER_STRICT: usize = 4;
/// A listener whose connections are decided about one by one.
const LISTENER_EACH: usize = 5;
/// A descriptor of the library.
const OWN: usize = 6;
const TAGS: usize = 16;
/// In the address of a set; one of a connection has no such bit.
const SET: usize = 1;
/// In the address of a UDP socket.
const DGRAM: usize = 2;

/// What is done with the connections of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listens {
    /// They are looked at.
    Prefers,
    /// They must be upgraded.
    Requires,
    /// It depends on their addresses.
    Each,
}

/// What is known about a descriptor.
#[derive(Debug, Clone, Copy)]
pub enum Entry {
    /// Nothing: its calls are the kernel's.
    Other,
    /// A TCP socket that is not connected and does not listen.
    Tcp,
    /// A UDP socket whose datagrams may be messages.
    Dgram(&'static Dgram),
    /// A listener.
    Listener(Listens),
    /// A descriptor of the library, which the program does not know of: it cannot close it.
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
            0..TAGS => Self::Other,
            word if word & SET != 0 => {
                let at = std::ptr::with_exposed_provenance::<Set>(word & !SET);
                // SAFETY: only `word` makes such words, from references that live as long as the process.
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

/// The place of a number, if the table has its part.
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
        // Another thread was first.
        // SAFETY: the box was made above, and nothing else has its address.
        drop(unsafe { Box::from_raw(new) });
    }
    place(fd)
}

/// What is known about `fd`.
#[inline]
pub fn get(fd: c_int) -> Entry {
    place(fd).map_or(Entry::Other, |p| Entry::of(p.load(Ordering::Acquire)))
}

/// The connection that `fd` is.
#[inline]
pub fn sock(fd: c_int) -> Option<&'static Sock> {
    match get(fd) {
        Entry::Sock(sock) => Some(sock),
        _ => None,
    }
}

/// The UDP socket that `fd` is.
#[inline]
pub fn dgram(fd: c_int) -> Option<&'static Dgram> {
    match get(fd) {
        Entry::Dgram(dgram) => Some(dgram),
        _ => None,
    }
}

/// The set that `fd` is.
#[inline]
pub fn set(fd: c_int) -> Option<&'static Set> {
    match get(fd) {
        Entry::Set(set) => Some(set),
        _ => None,
    }
}

/// Sets what is known about `fd`, and returns what was. Without memory for it the descriptor stays plain.
pub fn replace(fd: c_int, entry: Entry) -> Entry {
    let word = entry.word();
    let place = if word == 0 { place(fd) } else { make(fd) };
    place.map_or(Entry::Other, |p| Entry::of(p.swap(word, Ordering::AcqRel)))
}

/// The library has made `fd` for itself.
pub fn own(fd: c_int) {
    replace(fd, Entry::Own);
}

/// Closes a descriptor that the library has made for itself.
pub fn close_own(fd: c_int) {
    replace(fd, Entry::Other);
    sys::close(fd);
}

/// Removes what is known about `fd` if it is still that socket; whether it was.
pub fn forget(fd: c_int, sock: &'static Sock) -> bool {
    let word = Entry::Sock(sock).word();
    place(fd).is_some_and(|p| {
        p.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Calls `each` for all numbers of which something is known.
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
