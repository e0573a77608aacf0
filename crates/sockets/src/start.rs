//! Code that runs at the start and end of the process, and at forks.

use crate::conn::answers;
use crate::conn::early;
use crate::conn::reliable;
use crate::conn::set;
use crate::conn::show;
use crate::conn::sock::{self, LIVE};
use crate::conn::table::{self, Entry};
use crate::conn::worker;
use crate::directory;
use crate::hooks::{exec, life};
use crate::limits;
use crate::owner;
use crate::sys;
use libc::c_int;
use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The loader calls this before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Called when the program calls `exit` or returns from `main`.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    // SAFETY: the library is never unloaded, so the functions stay valid.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child));
    }
    owner::me();
    inherited();
}

/// Adopts descriptors that were open before exec: listeners, bound UDP sockets, and accepted connections that were not read yet and are
/// standard input, output or error.
fn inherited() {
    for fd in open_descriptors() {
        let listens = sys::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN);
        let protocol = listens.and_then(|_| sys::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL));
        let is_tcp = protocol == Ok(libc::IPPROTO_TCP);
        if is_tcp && listens == Ok(1) {
            life::adopt_listener(fd);
        } else if is_tcp && fd <= libc::STDERR_FILENO {
            life::adopt_connection(fd);
        } else if protocol == Ok(libc::IPPROTO_UDP) {
            life::adopt_dgram(fd);
        }
    }
}

fn open_descriptors() -> Vec<c_int> {
    let listed = std::fs::read_dir("/proc/self/fd").map(|all| {
        all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect()
    });
    // The numbers are sorted, because an adopted connection is compared with those at lower numbers.
    let mut all: Vec<c_int> = listed.unwrap_or_else(|_| (0..limits::INHERITED).collect());
    all.sort_unstable();
    all
}

extern "C" fn end() {
    let until = Instant::now() + Duration::from_millis(limits::EXIT_STREAMS);
    if LIVE.load(Ordering::Relaxed) > 0 {
        table::for_each(|fd, entry| {
            if let Entry::Sock(sock) = entry {
                sock.finish(fd, until);
            }
        });
    }
    reliable::end();
    worker::finish(until);
}

/// The locks that are held while the process forks.
type Held = (
    worker::Held,
    reliable::Held,
    exec::Held,
    early::Held,
    directory::Stop,
    (set::Held, sock::Held),
);

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    owner::before_fork();
    let held = (
        worker::hold(),
        reliable::hold(),
        exec::hold(),
        early::hold(),
        directory::stop(),
        (set::hold(), sock::hold()),
    );
    let _ = HELD.try_with(|place| {
        if let Ok(mut place) = place.try_borrow_mut() {
            *place = Some(held);
        }
    });
    if LIVE.load(Ordering::Relaxed) > 0 {
        table::for_each(|fd, entry| {
            if let Entry::Sock(sock) = entry {
                sock.before_fork(fd);
            }
        });
    }
}

extern "C" fn in_parent() {
    let _ = HELD.try_with(|place| place.try_borrow_mut().map(|mut p| p.take()));
}

extern "C" fn in_child() {
    let held = HELD.try_with(|place| place.try_borrow_mut().ok().and_then(|mut p| p.take()));
    let mut sets = None;
    if let Ok(Some((worker, reliable, exec, early, directory, (set, sock)))) = held {
        sets = Some(set);
        drop(sock);
        directory.forked();
        drop(early);
        exec.forked();
        reliable.forked();
        worker.forked();
    }
    owner::forked();
    show::forked();
    answers::forked();
    table::for_each(|_, entry| {
        if let Entry::Sock(sock) = entry {
            sock.after_fork();
        }
    });
    if let Some(sets) = sets {
        sets.forked();
    }
}
