//! The hooks for the life of descriptors: socket, connect, accept, dup, close, exit, and socket options.

use super::reliable as pairs;
use super::{dgram, exec, fail, is_nowhere};
use crate::conn::answers;
use crate::conn::dgram::Dgram;
use crate::conn::early;
use crate::conn::reliable;
use crate::conn::set::Set;
use crate::conn::show;
use crate::conn::sock::{LIVE, Mode as State, Sock};
use crate::conn::table::{self, Entry, Listens};
use crate::conn::worker;
use crate::directory;
use crate::limits;
use crate::owner;
use crate::policy;
use crate::real;
use crate::sys;
use libc::{c_int, c_long, c_uint, c_ulong, c_void, sockaddr, socklen_t};
use sockets_base::rules::{Fallback, Listener, Mode, Role};
use sockets_base::stat::Why;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Sets the table entry of `fd`, and closes the object of the previous entry. If there is one, the program has closed its descriptor by
/// a call that the library does not see.
pub(super) fn set_entry(fd: c_int, entry: Entry) {
    replace_entry(fd, entry, false);
}

/// Removes the table entry of a descriptor that the program closes.
fn close_entry(fd: c_int) {
    replace_entry(fd, Entry::Other, true);
}

fn replace_entry(fd: c_int, entry: Entry, by_program: bool) {
    match table::replace(fd, entry) {
        Entry::Sock(sock) => {
            exec::closing(fd);
            sock.closing(fd, by_program);
        }
        Entry::Set(set) => {
            if set.drop_number(fd) {
                early::forget_set(set);
                set.closing();
            }
        }
        Entry::Dgram(dgram) => dgram.closing(fd),
        Entry::Listener(_) => {
            if let Some(name) = directory::leave(fd) {
                table::close_own(name);
            }
        }
        Entry::Tcp => match entry {
            Entry::Sock(sock) => early::connected(fd, sock),
            _ => early::forget(fd),
        },
        Entry::Other | Entry::Own | Entry::Pinned => {}
    }
    show::forget(fd);
}

fn own_address(fd: c_int) -> Option<SocketAddr> {
    sys::name_of(fd, libc::getsockname)
}

/// See `socket(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    if fd < 0 {
        return fd;
    }
    let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
    let is_udp = kind & 0xf == libc::SOCK_DGRAM && inet;
    let entry = match kind & 0xf {
        libc::SOCK_STREAM if inet && (protocol == 0 || protocol == libc::IPPROTO_TCP) => Entry::Tcp,
        _ if is_udp && (protocol == 0 || protocol == libc::IPPROTO_UDP) && may_have_messages() => {
            Entry::Dgram(new_dgram(fd))
        }
        _ => Entry::Other,
    };
    set_entry(fd, entry);
    fd
}

fn new_dgram(fd: c_int) -> &'static Dgram {
    let dgram = Dgram::new();
    if policy::has_reliable() {
        let errno = sys::errno();
        dgram.make_reliable(fd);
        sys::set_errno(errno);
    }
    dgram
}

/// Returns whether UDP sockets of this process may send and receive messages.
fn may_have_messages() -> bool {
    let errno = sys::errno();
    let may = policy::has_datagrams();
    sys::set_errno(errno);
    may
}

/// See `bind(2)`.
///
/// # Safety
/// The requirements of `bind` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: upheld by the caller.
    let mut r = unsafe { real::bind(fd, addr, len) };
    // A socket that the program has closed may keep the port until its reliable datagrams are acknowledged.
    if r < 0 && sys::errno() == libc::EADDRINUSE && reliable::abandon() {
        // SAFETY: upheld by the caller.
        r = unsafe { real::bind(fd, addr, len) };
    }
    if r == 0
        && let Some(dgram) = table::dgram(fd)
    {
        let errno = sys::errno();
        dgram.bound(fd);
        sys::set_errno(errno);
    }
    r
}

/// Connects a UDP socket, or disconnects it.
///
/// # Safety
/// The requirements of `connect` apply.
unsafe fn connect_dgram(fd: c_int, dgram: &Dgram, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: upheld by the caller.
    let r = unsafe { real::connect(fd, addr, len) };
    if r == 0 {
        let errno = sys::errno();
        // SAFETY: as above. There is no peer if the address is not an IP address: AF_UNSPEC ends the connection.
        dgram.connected(fd, unsafe { sys::address(addr, len) });
        sys::set_errno(errno);
    }
    r
}

/// See `listen(2)`.
///
/// # Safety
/// Any values may be passed.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    let r = unsafe { real::listen(fd, backlog) };
    if r == 0 && matches!(table::get(fd), Entry::Tcp) {
        let copies = copies_of(fd);
        adopt_listener(fd);
        for copy in copies {
            copied(fd, copy);
        }
    }
    r
}

/// The program has duplicated the descriptor of a TCP socket that was not connected and did not listen.
static HAS_COPIES: AtomicBool = AtomicBool::new(false);

/// Returns the other descriptors of a TCP socket that is not connected and does not listen.
fn copies_of(fd: c_int) -> Vec<c_int> {
    let mut copies = Vec::new();
    if HAS_COPIES.load(Ordering::Relaxed) {
        let errno = sys::errno();
        table::for_each(|other, entry| {
            if matches!(entry, Entry::Tcp) && other != fd && sys::is_same(other, fd) {
                copies.push(other);
            }
        });
        sys::set_errno(errno);
    }
    copies
}

/// Called when a TCP socket listens. Registers it in the directory unless a rule makes its connections plain.
pub(crate) fn adopt_listener(fd: c_int) {
    let errno = sys::errno();
    if let Some(addr) = own_address(fd) {
        let listens = match policy::listener(addr) {
            Listener::All(Mode::Prefer) => Listens::Prefers,
            Listener::All(Mode::Require) => Listens::Requires,
            Listener::Each => Listens::Each,
            Listener::All(_) => {
                set_entry(fd, Entry::Pinned);
                sys::set_errno(errno);
                return;
            }
        };
        set_entry(fd, Entry::Listener(listens));
        show::listener(fd);
        if let Some(name) = directory::enter(fd, addr) {
            table::own(name);
        }
        answers::start();
    }
    sys::set_errno(errno);
}

/// The number of accepted connections. After every 512 of them the backlogs of the directory's names are emptied.
static ACCEPTED: AtomicUsize = AtomicUsize::new(0);

fn accepted(listener: c_int, fd: c_int) -> c_int {
    if fd < 0 {
        return fd;
    }
    let entry = match table::get(listener) {
        // The program got the listener from another process, or has called `listen` on another descriptor of it.
        Entry::Tcp | Entry::Other if is_tcp(listener) && !owner::is_visitor() => {
            adopt_listener(listener);
            table::get(listener)
        }
        entry => entry,
    };
    match entry {
        Entry::Listener(listens) => {
            let is_strict = match listens {
                Listens::Prefers => Some(false),
                Listens::Requires => Some(true),
                Listens::Each => by_address(fd),
            };
            let Some(is_strict) = is_strict else {
                set_entry(fd, Entry::Other);
                show::plain(fd, Why::Rule);
                return fd;
            };
            set_entry(fd, Entry::Sock(Sock::new(State::Accepted, is_strict)));
            show::undecided(fd);
            // In the child of a fork the thread that answers queries may not have been started yet.
            answers::start();
            if ACCEPTED.fetch_add(1, Ordering::Relaxed) % 512 == 511 {
                directory::sweep();
            }
        }
        _ => set_entry(fd, Entry::Other),
    }
    fd
}

fn is_tcp(fd: c_int) -> bool {
    let errno = sys::errno();
    let protocol = sys::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL);
    sys::set_errno(errno);
    protocol == Ok(libc::IPPROTO_TCP)
}

/// Checks the rules with the addresses of an accepted connection. Returns whether the connection must be upgraded, or `None` if
/// it stays plain.
fn by_address(fd: c_int) -> Option<bool> {
    let errno = sys::errno();
    let peer = || sys::name_of(fd, libc::getpeername).map(|a| a.ip());
    let mode = own_address(fd).map(|own| policy::decide(Role::Listen, own, peer));
    sys::set_errno(errno);
    match mode? {
        Mode::Prefer => Some(false),
        Mode::Require => Some(true),
        _ => None,
    }
}

/// See `accept(2)`.
///
/// # Safety
/// The requirements of `accept` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: upheld by the caller.
    accepted(fd, unsafe { real::accept(fd, addr, len) })
}

/// See `accept4(2)`.
///
/// # Safety
/// The requirements of `accept4` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: upheld by the caller.
    accepted(fd, unsafe { real::accept4(fd, addr, len, flags) })
}

/// Returns why a connection that the program opens stays plain, or `None` if the library tries to upgrade it.
fn obstacle(fd: c_int, addr: SocketAddr) -> Option<Why> {
    // The local address: bound by the program, or the one that the kernel will choose.
    let own = || {
        let bound = own_address(fd).map(|own| own.ip().to_canonical());
        bound
            .filter(|ip| !ip.is_unspecified())
            .or_else(|| directory::source(addr))
    };
    match policy::decide(Role::Connect, addr, own) {
        Mode::Prefer if !directory::ask(addr) => return Some(Why::NotListed),
        Mode::Prefer | Mode::Require => {}
        _ => return Some(Why::Rule),
    }
    // A socket that connects to itself cannot negotiate.
    let own = own_address(fd).filter(|own| own.port() == addr.port() && own.port() != 0);
    own.map(|_| Why::Itself)
}

/// Records that a TCP socket stays plain.
pub(super) fn pin(fd: c_int) {
    set_entry(fd, Entry::Pinned);
}

/// See `connect(2)`.
///
/// # Safety
/// The requirements of `connect` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    let entry = table::get(fd);
    match entry {
        Entry::Tcp => {}
        // SAFETY: upheld by the caller.
        Entry::Dgram(dgram) => return unsafe { connect_dgram(fd, dgram, addr, len) },
        Entry::Sock(sock) if sock.mode() == State::Connecting || sock.mode() == State::Up => {
            // SAFETY: upheld by the caller. A second `connect` returns the result of the first, or disconnects the socket.
            let r = unsafe { real::connect(fd, addr, len) };
            let errno = sys::errno();
            // SAFETY: the call has read an address, which has a family.
            if r == 0 && c_int::from(unsafe { (*addr).sa_family }) == libc::AF_UNSPEC {
                sock.disconnected(fd);
            } else if r == 0 || errno == libc::EISCONN {
                sock.decide(fd, false);
            }
            sys::set_errno(errno);
            return r;
        }
        // SAFETY: upheld by the caller.
        _ => return unsafe { real::connect(fd, addr, len) },
    }
    // SAFETY: upheld by the caller.
    let Some(to) = (unsafe { sys::address(addr, len) }) else {
        // SAFETY: as above.
        return unsafe { real::connect(fd, addr, len) };
    };
    if let Some(why) = obstacle(fd, to) {
        if why == Why::NotListed && policy::settings().fallback == Fallback::Error {
            return fail(libc::ECONNREFUSED);
        }
        // SAFETY: as above.
        let r = unsafe { real::connect(fd, addr, len) };
        let errno = sys::errno();
        if r == 0 || errno == libc::EINPROGRESS || errno == libc::EINTR {
            show::plain(fd, why);
            if why == Why::NotListed {
                policy::stays_plain(fd, why);
            }
        }
        sys::set_errno(errno);
        return r;
    }
    // With quick acknowledgements off, the last acknowledgement of the TCP handshake is sent with the Request. So the Request has
    // arrived when the peer's `accept` returns.
    let _ = sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 0);
    // SAFETY: as above.
    let r = unsafe { real::connect(fd, addr, len) };
    let errno = sys::errno();
    if r == 0 || errno == libc::EINPROGRESS || errno == libc::EINTR {
        let sock = Sock::new(State::Connecting, false);
        let copies = copies_of(fd);
        set_entry(fd, Entry::Sock(sock));
        show::undecided(fd);
        for copy in copies {
            sock.add_number();
            set_entry(copy, Entry::Sock(sock));
        }
        if r == 0 {
            sock.start(fd);
        } else {
            sock.decide(fd, false);
        }
    } else {
        let _ = sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
    }
    sys::set_errno(errno);
    r
}

/// See `shutdown(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    if let Some(sock) = table::sock(fd)
        && sock.decide(fd, true) == State::Up
    {
        if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
            return fail(libc::EINVAL);
        }
        if !sock.is_ours(fd) {
            return fail(libc::EIO);
        }
        return sock.shut_down(fd, how).map_or_else(fail, |()| 0);
    }
    // SAFETY: no pointer is passed.
    let r = unsafe { real::shutdown(fd, how) };
    if r == 0
        && let Some(dgram) = table::dgram(fd)
    {
        dgram.shut_down(how);
    }
    r
}

/// See `close(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn close(fd: c_int) -> c_int {
    match end_entry(fd) {
        // SAFETY: no pointer is passed.
        Ok(()) => unsafe { real::close(fd) },
        Err(errno) => fail(errno),
    }
}

/// Ends the object of a descriptor that the program closes. An error: the descriptor is not the program's.
fn end_entry(fd: c_int) -> Result<(), c_int> {
    match table::get(fd) {
        Entry::Other => {}
        _ if owner::is_visitor() => {}
        Entry::Own => return Err(libc::EBADF),
        _ => close_entry(fd),
    }
    Ok(())
}

/// Removes the table entries of a range of descriptors that the program closes. Calls `call` for the subranges that contain no
/// descriptor of the library.
fn close_parts(
    first: c_uint,
    last: c_uint,
    mut call: impl FnMut(c_uint, c_uint) -> c_int,
) -> c_int {
    let (mut all, mut own) = (Vec::new(), Vec::new());
    table::for_each(|fd, entry| {
        let number = fd as c_uint;
        if (first..=last).contains(&number) {
            match entry {
                Entry::Own => own.push(number),
                _ => all.push(fd),
            }
        }
    });
    for fd in all {
        close_entry(fd);
    }
    let mut from = first;
    for number in own {
        if number > from {
            let r = call(from, number - 1);
            if r != 0 {
                return r;
            }
        }
        from = number + 1;
    }
    if from <= last { call(from, last) } else { 0 }
}

/// See `close_range(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // 4 is CLOSE_RANGE_CLOEXEC, which closes nothing before the next exec.
    if flags & 4 != 0 || first > last || owner::is_visitor() {
        return kernel_close_range(first, last, flags);
    }
    close_parts(first, last, |a, b| kernel_close_range(a, b, flags))
}

/// The system call. Old C libraries have no function for it.
fn kernel_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let number = libc::SYS_close_range;
    // SAFETY: no pointer is passed.
    unsafe {
        real::syscall(
            number,
            first as usize,
            last as usize,
            flags as usize,
            0,
            0,
            0,
        ) as c_int
    }
}

/// See `closefrom(3)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn closefrom(first: c_int) {
    let from = first.max(0) as c_uint;
    let is_done = !owner::is_visitor()
        && close_parts(from, c_uint::MAX, |a, b| kernel_close_range(a, b, 0)) == 0;
    if !is_done {
        // The kernel has no close_range, or this is a child of vfork, which must not change the parent's table.
        // SAFETY: no pointer is passed.
        unsafe { real::closefrom(first) }
    }
}

/// Called when `to` has become a duplicate of `fd`.
fn copied(fd: c_int, to: c_int) -> c_int {
    if to >= 0 && to != fd && is_known(fd, to) {
        match table::get(fd) {
            Entry::Sock(sock) if sock.mode() != State::Plain => {
                sock.add_number();
                set_entry(to, Entry::Sock(sock));
                // The C library's streams do not call this library, and a program that is executed next may not have it. Both would read
                // messages of the protocol.
                if to <= libc::STDERR_FILENO && sock.mode() == State::Accepted {
                    sock.refuse(to, Why::Handed);
                }
            }
            Entry::Dgram(dgram) => {
                dgram.add_number();
                set_entry(to, Entry::Dgram(dgram));
            }
            Entry::Listener(listens) => {
                set_entry(to, Entry::Listener(listens));
                show::listener(to);
                directory::copied(fd, to);
            }
            Entry::Tcp => {
                HAS_COPIES.store(true, Ordering::Relaxed);
                set_entry(to, Entry::Tcp);
            }
            Entry::Set(set) => {
                set.add_number();
                set_entry(to, Entry::Set(set));
            }
            // The library ignores duplicates of sockets that have become plain, and of its own descriptors.
            Entry::Sock(_) | Entry::Own => set_entry(to, Entry::Other),
            entry @ (Entry::Other | Entry::Pinned) => set_entry(to, entry),
        }
    }
    to
}

/// See `dup(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    copied(fd, unsafe { real::dup(fd) })
}

/// Returns whether one of the two descriptors has a table entry that this process may change.
fn is_known(fd: c_int, to: c_int) -> bool {
    let is_known = |fd| !matches!(table::get(fd), Entry::Other);
    (is_known(fd) || is_known(to)) && !owner::is_visitor()
}

/// Ends the object of `to` before the kernel closes the descriptor. Does nothing if the call will fail.
fn overwrites(fd: c_int, to: c_int) {
    if !is_known(fd, to) {
        return;
    }
    // SAFETY: no pointer is passed.
    let open = unsafe { real::fcntl(fd, libc::F_GETFD, 0) } >= 0;
    let fits = usize::try_from(to).is_ok_and(|to| to < sys::descriptors());
    if open && fits && fd != to {
        if let Entry::Own = table::get(to) {
            directory::lost(to);
            show::lost(to);
            reliable::move_away(to);
            answers::lost(to);
            table::for_each(|_, entry| match entry {
                Entry::Dgram(dgram) => dgram.move_away(to),
                Entry::Set(set) => set.move_away(to),
                _ => {}
            });
        }
        close_entry(to);
    }
}

/// See `dup2(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    overwrites(fd, to);
    // SAFETY: no pointer is passed.
    copied(fd, unsafe { real::dup2(fd, to) })
}

/// See `dup3(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    if flags & !libc::O_CLOEXEC == 0 {
        overwrites(fd, to);
    }
    // SAFETY: no pointer is passed.
    copied(fd, unsafe { real::dup3(fd, to, flags) })
}

/// See `fcntl(2)`.
///
/// # Safety
/// The requirements of `fcntl` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int {
    // SAFETY: upheld by the caller.
    let r = unsafe { real::fcntl(fd, cmd, arg) };
    if cmd == libc::F_DUPFD || cmd == libc::F_DUPFD_CLOEXEC {
        copied(fd, r)
    } else {
        r
    }
}

/// See `fcntl(2)`.
///
/// # Safety
/// The requirements of `fcntl` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, cmd: c_int, arg: usize) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { fcntl(fd, cmd, arg) }
}

/// See `ioctl(2)`.
///
/// # Safety
/// The requirements of `ioctl` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    let value = std::ptr::with_exposed_provenance_mut::<c_int>(arg);
    if request == SIOCATMARK
        && !is_nowhere(value)
        && let Some(at_mark) = at_mark(fd)
    {
        // SAFETY: upheld by the caller; the argument points to an int.
        unsafe { *value = at_mark };
        return 0;
    }
    if (request == libc::FIONREAD || request == libc::TIOCOUTQ)
        && let Some(sock) = table::sock(fd)
        && sock.decide(fd, false) == State::Up
        && !is_nowhere(value)
    {
        // SAFETY: upheld by the caller.
        if request == libc::TIOCOUTQ && unsafe { real::ioctl(fd, request, arg) } < 0 {
            return -1;
        }
        let is_ours = sock.is_ours(fd);
        let Some((n, _)) = sock.with(|s| {
            if request == libc::FIONREAD {
                if is_ours && sock.may_pull() {
                    s.fill(fd);
                }
                s.readable_bytes()
            } else {
                s.unsent_bytes()
            }
        }) else {
            return fail(libc::EBADF);
        };
        // SAFETY: upheld by the caller; the argument points to an int.
        unsafe {
            let more = if request == libc::TIOCOUTQ { *value } else { 0 };
            *value = more.saturating_add(n as c_int);
        }
        return 0;
    }
    if request == libc::FIONREAD
        && !is_nowhere(value)
        && let Some(length) = dgram::readable(fd)
    {
        // SAFETY: upheld by the caller; the argument points to an int.
        unsafe { *value = length as c_int };
        return 0;
    }
    // SAFETY: upheld by the caller.
    unsafe { real::ioctl(fd, request, arg) }
}

const SIOCATMARK: c_ulong = 0x8905;

/// Returns whether a stream has no unread byte before the urgent one (1 or 0), or `None` if `fd` is not a stream.
fn at_mark(fd: c_int) -> Option<c_int> {
    let sock = table::sock(fd).filter(|sock| sock.decide(fd, false) == State::Up)?;
    let is_ours = sock.is_ours(fd);
    let (is_at_mark, _) = sock.with(|s| s.is_at_mark(fd, is_ours && sock.may_pull()))?;
    Some(c_int::from(is_at_mark))
}

/// See `sockatmark(3)`. The C library's function makes the system call directly.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn sockatmark(fd: c_int) -> c_int {
    at_mark(fd).unwrap_or_else(|| {
        // SAFETY: no pointer is passed.
        unsafe { real::sockatmark(fd) }
    })
}

/// See `getsockopt(2)`.
///
/// # Safety
/// The requirements of `getsockopt` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: upheld by the caller.
    let r = unsafe { real::getsockopt(fd, level, name, value, len) };
    if r == 0
        && level == libc::SOL_SOCKET
        && name == libc::SO_ERROR
        && let Some(sock) = table::sock(fd)
    {
        // SAFETY: the kernel has written the value and its length.
        let error = unsafe { written(value, *len) };
        if error == 0 && sock.decide(fd, false) == State::Up {
            let own = sock.with(|s| s.take_error()).map_or(0, |(e, _)| e);
            // SAFETY: as above.
            unsafe { rewrite(value, *len, own) };
        }
    }
    if r == 0
        && level == libc::SOL_SOCKET
        && name == libc::SO_ERROR
        && let Some(dgram) = table::dgram(fd)
    {
        let error = pairs::take_error(dgram);
        if error != 0 {
            // SAFETY: as above.
            unsafe { rewrite(value, *len, error) };
        }
    }
    if r == 0
        && let Some(which) = delay(level, name)
        && let Some(sock) = table::sock(fd)
        && let Some((Some(own), _)) = sock.with(|s| s.delays.get(which).copied())
    {
        // SAFETY: as above.
        unsafe { rewrite(value, *len, own) };
    }
    r
}

/// Returns the value of an integer option that the kernel has written. A program may pass a buffer of less than four bytes, and gets
/// the first ones of the value.
///
/// # Safety
/// `value` points to `len` readable bytes.
unsafe fn written(value: *const c_void, len: socklen_t) -> c_int {
    let mut bytes = [0; size_of::<c_int>()];
    let n = (len as usize).min(bytes.len());
    // SAFETY: upheld by the caller.
    unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), n) };
    c_int::from_ne_bytes(bytes)
}

/// Replaces the value of an integer option, of which the kernel has written `len` bytes.
///
/// # Safety
/// `value` points to `len` writable bytes.
unsafe fn rewrite(value: *mut c_void, len: socklen_t, new: c_int) {
    let bytes = new.to_ne_bytes();
    let n = (len as usize).min(bytes.len());
    // SAFETY: upheld by the caller.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), n) };
}

/// Returns the index in `Stream::delays` of an option that delays data. Such options are not set on the TCP connection of an upgraded socket.
fn delay(level: c_int, name: c_int) -> Option<usize> {
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => Some(0),
        (libc::IPPROTO_TCP, libc::TCP_CORK) => Some(1),
        _ => None,
    }
}

/// See `setsockopt(2)`.
///
/// # Safety
/// The requirements of `setsockopt` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    const TCP_ULP: c_int = 31;
    const TCP_INQ: c_int = 36;
    let pins = match level {
        libc::IPPROTO_TCP => matches!(
            name,
            TCP_ULP
                | libc::TCP_FASTOPEN
                | libc::TCP_FASTOPEN_CONNECT
                | libc::TCP_REPAIR
                | libc::TCP_MD5SIG
        ),
        libc::SOL_SOCKET => match name {
            libc::SO_ZEROCOPY => true,
            libc::SO_OOBINLINE => table::sock(fd).is_none_or(|sock| sock.mode() != State::Up),
            libc::SO_PEEK_OFF if !is_nowhere(value) && len as usize >= size_of::<c_int>() => {
                // SAFETY: upheld by the caller. A negative offset ends SO_PEEK_OFF.
                unsafe { value.cast::<c_int>().read_unaligned() >= 0 }
            }
            // The kernel would count the bytes of messages, not those of the program.
            libc::SO_RCVLOWAT if !is_nowhere(value) && len as usize >= size_of::<c_int>() => {
                // SAFETY: upheld by the caller.
                unsafe { value.cast::<c_int>().read_unaligned() > 1 }
            }
            _ => false,
        },
        _ => false,
    };
    if pins {
        match table::get(fd) {
            Entry::Tcp => {
                set_entry(fd, Entry::Pinned);
                show::plain(fd, Why::Option);
            }
            Entry::Sock(sock) if !sock.stay_plain(fd) => return fail(libc::ENOPROTOOPT),
            // Accepted connections would inherit the option.
            Entry::Listener(_)
                if level == libc::SOL_SOCKET
                    && [libc::SO_RCVLOWAT, libc::SO_PEEK_OFF].contains(&name) =>
            {
                return fail(libc::ENOPROTOOPT);
            }
            _ => {}
        }
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_OOBINLINE)
        && let Some(sock) = table::sock(fd)
        && sock.mode() == State::Up
        && !is_nowhere(value)
        && len as usize >= size_of::<c_int>()
    {
        // SAFETY: upheld by the caller.
        let on = unsafe { value.cast::<c_int>().read_unaligned() } != 0;
        sock.with(|s| s.set_inline(on));
    }
    // `recvmsg` on a stream returns no control message with the number of unread bytes.
    let may_be_stream = || match table::get(fd) {
        Entry::Tcp | Entry::Listener(_) => true,
        Entry::Sock(sock) => sock.mode() != State::Plain,
        _ => false,
    };
    if level == libc::IPPROTO_TCP && name == TCP_INQ && may_be_stream() {
        return fail(libc::ENOPROTOOPT);
    }
    if let Some(which) = delay(level, name)
        && let Some(sock) = table::sock(fd)
        && sock.mode() == State::Up
        && !is_nowhere(value)
        && len as usize >= size_of::<c_int>()
    {
        // SAFETY: upheld by the caller.
        let on = c_int::from(unsafe { value.cast::<c_int>().read_unaligned() } != 0);
        if sock.is_used_elsewhere() {
            return 0;
        }
        let set = sock.with(|s| {
            s.set_delay(fd, which, on);
        });
        if let Some(((), pending)) = set {
            worker::watch(fd, sock, pending);
            return 0;
        }
    }
    if let Some(dgram) = table::dgram(fd) {
        let has_number = !is_nowhere(value) && len as usize >= size_of::<c_int>();
        let number = if has_number {
            // SAFETY: upheld by the caller.
            unsafe { value.cast::<c_int>().read_unaligned() }
        } else {
            0
        };
        let on = number != 0;
        match (level, name) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) | (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
                if has_number && dgram.want_info(on) =>
            {
                return 0;
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
                if let Some(pair) = dgram.pair() {
                    // SAFETY: upheld by the caller.
                    unsafe { real::setsockopt(pair, level, name, value, len) };
                }
            }
            (libc::IPPROTO_UDP, libc::UDP_CORK) => dgram.cork(on),
            (libc::IPPROTO_UDP, UDP_SEGMENT) => dgram.segment(on),
            (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR) => {
                dgram.report(on);
            }
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
            | (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER) => {
                dgram.keep_whole(is_whole(number));
            }
            // With UDP_GRO the kernel joins datagrams, and joined messages cannot be told apart.
            (libc::IPPROTO_UDP, UDP_GRO) if on && dgram.expects() => {
                return fail(libc::ENOPROTOOPT);
            }
            // Code in the kernel that parses the datagrams would misread messages.
            (libc::IPPROTO_UDP, UDP_GRO | UDP_ENCAP)
            | (
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
                | libc::SO_ATTACH_REUSEPORT_CBPF
                | libc::SO_ATTACH_REUSEPORT_EBPF,
            ) if name != UDP_GRO || on => {
                dgram.pin(fd, Why::Option);
            }
            (libc::SOL_SOCKET, libc::SO_PEEK_OFF) => {
                dgram.pin(fd, Why::Option);
                // A negative offset ends SO_PEEK_OFF.
                let at = if has_number { number } else { -1 };
                dgram.reads_from_the_middle(at >= 0);
            }
            _ => {}
        }
    }
    // SAFETY: upheld by the caller.
    let r = unsafe { real::setsockopt(fd, level, name, value, len) };
    if level == libc::IPPROTO_UDP
        && name == libc::UDP_CORK
        && let Some(dgram) = table::dgram(fd)
    {
        dgram.uncorked();
    }
    r
}

/// Returns whether a value of `IP_MTU_DISCOVER` turns fragmentation off: all values except DONT, WANT and OMIT.
fn is_whole(discover: c_int) -> bool {
    (2..=4).contains(&discover)
}

const UDP_ENCAP: c_int = 100;
const UDP_SEGMENT: c_int = 103;
const UDP_GRO: c_int = 104;

/// See `epoll_create(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    new_set(unsafe { real::epoll_create(size) })
}

/// See `epoll_create1(2)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    new_set(unsafe { real::epoll_create1(flags) })
}

fn new_set(fd: c_int) -> c_int {
    if fd >= 0 {
        set_entry(fd, Entry::Other);
        set_entry(fd, Entry::Set(Set::new(fd)));
    }
    fd
}

/// Called at start for a connection that the program inherited as standard input, output or error. Unless a rule makes it plain, it
/// is handled like an accepted one: the first bytes that the program reads decide whether it is upgraded.
pub(crate) fn adopt_connection(fd: c_int) {
    if sys::name_of(fd, libc::getpeername).is_none() {
        return;
    }
    let before = (0..fd).find_map(|n| Some((n, table::sock(n)?)).filter(|_| sys::is_same(n, fd)));
    if let Some((_, sock)) = before {
        sock.add_number();
        set_entry(fd, Entry::Sock(sock));
    } else if let Some(is_strict) = by_address(fd) {
        let sock = Sock::new(State::Accepted, is_strict);
        sock.is_inherited();
        set_entry(fd, Entry::Sock(sock));
        show::undecided(fd);
    }
}

/// Called at start for an inherited UDP socket. Its datagrams may be messages if it is bound and a rule permits messages.
pub(crate) fn adopt_dgram(fd: c_int) {
    let bound = own_address(fd).is_some_and(|own| own.port() != 0);
    if bound && may_have_messages() {
        let dgram = new_dgram(fd);
        set_entry(fd, Entry::Dgram(dgram));
        let option = |level, name| sys::option(fd, level, name).unwrap_or(0);
        let udp = |name| option(libc::IPPROTO_UDP, name) != 0;
        dgram.cork(udp(libc::UDP_CORK));
        dgram.segment(udp(UDP_SEGMENT));
        dgram.report(
            option(libc::IPPROTO_IP, libc::IP_RECVERR) != 0
                || option(libc::IPPROTO_IPV6, libc::IPV6_RECVERR) != 0,
        );
        dgram.keep_whole(
            is_whole(option(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER))
                || is_whole(option(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)),
        );
        let middle = sys::option(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF).is_ok_and(|at| at >= 0);
        dgram.reads_from_the_middle(middle);
        if middle || udp(UDP_GRO) || udp(UDP_ENCAP) {
            dgram.pin(fd, Why::Option);
        }
        dgram.bound(fd);
        let peer = sys::name_of(fd, libc::getpeername);
        if peer.is_some() {
            dgram.connected(fd, peer);
        }
    }
}

/// See `_exit(2)`. First sends corked bytes, and waits until the bytes of streams and the reliable datagrams are acknowledged. After the end
/// of the process the kernel sends what is in its buffers, but what is still in the library's buffers would be lost.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _exit(status: c_int) -> ! {
    if !owner::is_visitor() {
        let until = Instant::now() + Duration::from_millis(limits::EXIT_STREAMS);
        if LIVE.load(Ordering::Relaxed) > 0 {
            let patience = until.min(Instant::now() + Duration::from_millis(limits::EXIT_LOCK));
            table::for_each(|fd, entry| {
                if let Entry::Sock(sock) = entry {
                    sock.end(fd, until, patience);
                }
            });
        }
        worker::finish(until);
        reliable::end();
    }
    // SAFETY: no pointer is passed.
    unsafe { real::syscall(libc::SYS_exit_group, status as usize, 0, 0, 0, 0, 0) };
    std::process::abort()
}

/// See `_Exit(3)`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn _Exit(status: c_int) -> ! {
    _exit(status)
}

/// See `syscall(2)`. `io_uring_setup` is refused, because the library cannot intercept reads and writes through a ring. `SYS_close`,
/// by which libuv closes descriptors, is like [`close`] but no cancellation point. `SYS_close_range` is like [`close_range`].
///
/// # Safety
/// The requirements of `syscall` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    if number == libc::SYS_io_uring_setup && policy::settings().hides_io_uring {
        return fail(libc::ENOSYS) as c_long;
    }
    if number == libc::SYS_close
        && let Err(errno) = end_entry(a as c_int)
    {
        return fail(errno) as c_long;
    }
    if number == libc::SYS_close_range {
        return c_long::from(close_range(a as c_uint, b as c_uint, c as c_int));
    }
    // SAFETY: upheld by the caller.
    unsafe { real::syscall(number, a, b, c, d, e, f) }
}
