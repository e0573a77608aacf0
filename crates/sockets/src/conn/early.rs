//! TCP sockets that the program adds to an epoll set before it connects them, as nginx does. If the
//! library may upgrade the connection of such a socket, or has upgraded it, the connection becomes
//! a member of the sets that contain the socket. A plain TCP connection does not.

use crate::conn::set::Set;
use crate::conn::sock::Sock;
use anywarp_core::lock::Mutex;
use libc::{c_int, epoll_event};
use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The entry of a socket in a set.
#[derive(Debug, Clone, Copy)]
struct Early {
    set: &'static Set,
    events: u32,
    data: u64,
}

type All = BTreeMap<c_int, Vec<Early>>;

static ALL: Mutex<All> = Mutex::new(BTreeMap::new());
/// The number of sockets in the map, so that most calls need not lock it.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn change<R>(f: impl FnOnce(&mut All) -> R) -> R {
    let mut all = ALL.lock();
    let result = f(&mut all);
    COUNT.store(all.len(), Ordering::Release);
    result
}

fn is_empty() -> bool {
    COUNT.load(Ordering::Acquire) == 0
}

/// Records a successful `epoll_ctl` for a TCP socket that is not connected, or whose connection is plain.
pub fn control(set: &'static Set, op: c_int, fd: c_int, event: Option<epoll_event>) {
    let event = event.filter(|_| op != libc::EPOLL_CTL_DEL);
    change(|all| {
        let entries = all.entry(fd).or_default();
        entries.retain(|early| !std::ptr::eq(early.set, set));
        if let Some(epoll_event { events, u64: data }) = event {
            entries.push(Early { set, events, data });
        }
        if entries.is_empty() {
            all.remove(&fd);
        }
    });
}

/// Makes `sock`, the connection that `fd` has become, a member of the sets that contain `fd`.
pub fn connected(fd: c_int, sock: &'static Sock) {
    if is_empty() {
        return;
    }
    for early in change(|all| all.remove(&fd)).into_iter().flatten() {
        early.set.adopt(fd, early.events, early.data, sock);
    }
}

/// Forgets the descriptor `fd`, which the program closes.
pub fn forget(fd: c_int) {
    if !is_empty() {
        change(|all| all.remove(&fd));
    }
}

/// Forgets a set that the program closes.
pub fn forget_set(set: &'static Set) {
    if !is_empty() {
        change(|all| {
            all.retain(|_, entries| {
                entries.retain(|early| !std::ptr::eq(early.set, set));
                !entries.is_empty()
            });
        });
    }
}

/// Locks the map while the process forks, so that the child can use it.
pub fn hold() -> Held {
    Held { _lock: ALL.lock() }
}

/// The lock of [`hold`].
#[derive(Debug)]
pub struct Held {
    _lock: MutexGuard<'static, All>,
}
