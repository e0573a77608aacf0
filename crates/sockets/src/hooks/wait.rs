//! The hooks that wait: `poll`, `select`, `epoll_wait` and their variants.

use super::{fail, is_nowhere};
use crate::conn::early;
use crate::conn::reliable::LIVE as RELIABLE;
use crate::conn::set::Call;
use crate::conn::sock::{self, LIVE, Mode, Sock};
use crate::conn::table::{self, Entry};
use crate::owner;
use crate::real;
use crate::spin;
use crate::sys;
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use std::cell::Cell;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// When a wait ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Until(Option<Instant>);

impl Until {
    fn ms(timeout: c_int) -> Self {
        Self((timeout >= 0).then(|| Instant::now() + Duration::from_millis(timeout as u64)))
    }

    /// # Safety
    /// `t` is null or valid.
    pub(super) unsafe fn spec(t: *const timespec) -> Self {
        if t.is_null() {
            return Self(None);
        }
        // SAFETY: upheld by the caller.
        let t = unsafe { *t };
        let d = Duration::new(
            t.tv_sec.max(0) as u64,
            t.tv_nsec.clamp(0, 999_999_999) as u32,
        );
        Self(Instant::now().checked_add(d))
    }

    /// Returns whether the kernel accepts a time. Calls with other times fail with EINVAL, or with EFAULT if the address is wrong.
    ///
    /// # Safety
    /// `t` is null or valid.
    pub(super) unsafe fn accepts(t: *const timespec) -> bool {
        if !t.is_null() && is_nowhere(t) {
            return false;
        }
        // SAFETY: upheld by the caller.
        unsafe { t.as_ref() }
            .is_none_or(|t| t.tv_sec >= 0 && (0..1_000_000_000).contains(&t.tv_nsec))
    }

    fn left(self) -> Option<timespec> {
        let left = self.0?.saturating_duration_since(Instant::now());
        Some(timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(left.subsec_nanos() as i32),
        })
    }

    /// Stores the time that is left.
    ///
    /// # Safety
    /// `t` is null or valid for writes.
    pub(super) unsafe fn give_left(self, t: *mut timespec) {
        // SAFETY: upheld by the caller.
        if let (Some(left), Some(t)) = (self.left(), unsafe { t.as_mut() }) {
            *t = left;
        }
    }

    pub(super) fn is_over(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }
}

/// The errno of a call with a time that [`Until::accepts`] refuses.
pub(super) fn time_error(t: *const timespec) -> c_int {
    if is_nowhere(t) {
        libc::EFAULT
    } else {
        libc::EINVAL
    }
}

/// Returns whether no descriptor of the list is one of a stream, a set with streams, or a socket with reliable datagrams.
fn is_plain(fds: &[pollfd]) -> bool {
    is_unused()
        || fds.iter().all(|p| match table::get(p.fd) {
            Entry::Sock(_) => false,
            Entry::Set(set) => !set.is_used(),
            Entry::Dgram(dgram) => dgram.pair().is_none(),
            _ => true,
        })
}

/// Returns whether the process has no streams and no sockets with reliable datagrams.
fn is_unused() -> bool {
    LIVE.load(Ordering::Relaxed) == 0 && RELIABLE.load(Ordering::Relaxed) == 0
}

/// A stream in the list of a `poll` call.
struct Member {
    at: usize,
    sock: &'static Sock,
    /// This thread is counted as a sleeper of the stream.
    sleeps: bool,
    /// The eventfd by which another thread wakes this one; see [`Sock::watch`].
    watched: Option<c_int>,
}

impl Member {
    /// Counts this thread as a sleeper that waits for the events `wanted`.
    fn sleep(&mut self, wanted: i16) {
        const READS: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP | libc::POLLPRI;
        self.sock.asleep();
        self.sleeps = true;
        let mut own = None;
        let is_watched = self.sock.watch(wanted & READS != 0, || {
            own = kick();
            own
        });
        self.watched = own.filter(|_| is_watched);
    }

    fn awake(&mut self) {
        if let Some(kick) = self.watched.take() {
            self.sock.unwatch(kick);
        }
        if std::mem::take(&mut self.sleeps) {
            self.sock.awake();
        }
    }
}

/// Ends the count and the watch also if the thread is cancelled while it waits.
impl Drop for Member {
    fn drop(&mut self) {
        self.awake();
    }
}

fn members(fds: &[pollfd]) -> Vec<Member> {
    let mut all = Vec::new();
    for (at, p) in fds.iter().enumerate() {
        match table::get(p.fd) {
            Entry::Sock(sock) => {
                sock.decide(p.fd, false);
                all.push(Member {
                    at,
                    sock,
                    sleeps: false,
                    watched: None,
                });
            }
            Entry::Set(set) if set.is_used() => set.nest(),
            _ => {}
        }
    }
    all
}

const WRITES: i16 = libc::POLLOUT | libc::POLLWRNORM;

/// The eventfd of a thread for [`Sock::watch`], or -1, and the process that has opened it.
struct Kick(Cell<(c_int, u32)>);

impl Drop for Kick {
    fn drop(&mut self) {
        let (fd, process) = self.0.get();
        if fd >= 0 && process == owner::me() {
            table::close_own(fd);
        }
    }
}

thread_local! {
    static KICK: Kick = const { Kick(Cell::new((-1, 0))) };
}

/// Returns the eventfd of this thread, and opens it at the first call.
pub(super) fn kick() -> Option<c_int> {
    let me = owner::me();
    let (fd, process) = KICK.try_with(|k| k.0.get()).ok()?;
    if fd >= 0 && process == me && table::is_own(fd) {
        return Some(fd);
    }
    let fd = sys::eventfd()?;
    table::own(fd);
    KICK.try_with(|k| k.0.set((fd, me))).ok()?;
    Some(fd)
}

/// Polls the list and the eventfd of this thread. Another thread that receives from the carrier (the TCP connection) of a stream in the
/// list writes to the eventfd.
fn poll_watched(
    fds: &mut [pollfd],
    kick: c_int,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let mut all = fds.to_vec();
    all.push(pollfd {
        fd: kick,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the list is local, and the caller passes valid pointers.
    let r = unsafe { real::ppoll(all.as_mut_ptr(), all.len() as nfds_t, time, mask) };
    for (p, found) in fds.iter_mut().zip(&all) {
        p.revents = found.revents;
    }
    if all.last().is_some_and(|k| k.revents != 0) {
        sys::hush(kick);
    }
    r
}

/// Handles `poll` for a list that contains streams.
fn wait_streams(fds: &mut [pollfd], until: Until, mask: *const sigset_t) -> c_int {
    sock::wake_this_thread();
    let mut members = members(fds);
    let wanted: Vec<i16> = fds.iter().map(|p| p.events).collect();
    loop {
        // First check what can be reported without waiting.
        let mut ready = 0;
        let mut watched = None;
        for m in &mut members {
            let Some(p) = fds.get_mut(m.at) else { continue };
            let want = wanted.get(m.at).copied().unwrap_or(0);
            p.events = want;
            if m.sock.mode() == Mode::Connecting {
                m.sock.decide(p.fd, false);
            }
            if m.sock.mode() != Mode::Up {
                continue;
            }
            if !m.sock.is_ours(p.fd) {
                ready += 1;
                continue;
            }
            // From here on no other thread receives from the carrier without waking this one, so no event is missed between the check and
            // the wait.
            m.sleep(want);
            watched = watched.or(m.watched);
            let now = m.sock.process(p.fd, 0, want);
            if now & (want | libc::POLLERR | libc::POLLHUP) != 0 {
                ready += 1;
            }
            p.events = m
                .sock
                .with(|s| s.carrier_events(want))
                .map_or(want, |(e, _)| e);
        }
        let zero = timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // As in the kernel, a call that finds something ready returns without handling the signals that only `mask` permits.
        let mask = if ready > 0 { std::ptr::null() } else { mask };
        let left = if ready > 0 { Some(zero) } else { until.left() };
        let time = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // A call that does not wait needs no eventfd.
        let mut enter = |time| match watched.filter(|_| ready == 0) {
            Some(kick) => poll_watched(fds, kick, time, mask),
            // SAFETY: the list is the program's, and the time is a local variable.
            None => unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as nfds_t, time, mask) },
        };
        let r = if ready > 0 {
            enter(time)
        } else {
            spin::wait(|sleeps| {
                if sleeps {
                    Some(enter(time))
                } else {
                    Some(enter(&raw const zero)).filter(|r| *r != 0)
                }
            })
        };
        let e = sys::errno();
        members.iter_mut().for_each(Member::awake);
        if r < 0 {
            restore(fds, &wanted);
            return fail(e);
        }
        for m in &members {
            let Some(p) = fds.get_mut(m.at) else { continue };
            let want = wanted.get(m.at).copied().unwrap_or(0);
            let writes = p.revents & WRITES != 0;
            match m.sock.mode() {
                Mode::Connecting if writes => {
                    m.sock.decide(p.fd, false);
                    continue;
                }
                Mode::Accepted if p.revents & libc::POLLIN != 0 => {
                    m.sock.decide(p.fd, false);
                }
                _ => {}
            }
            if m.sock.mode() != Mode::Up || table::sock(p.fd).is_none() {
                // The descriptor was a stream before the wait, so other events than those of the program were requested.
                p.revents &= want | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
                continue;
            }
            if !m.sock.is_ours(p.fd) {
                p.revents = libc::POLLERR | libc::POLLHUP;
                continue;
            }
            if p.revents & libc::POLLNVAL != 0 {
                continue;
            }
            let now = m.sock.process(p.fd, p.revents, want);
            p.revents = now & (want | libc::POLLERR | libc::POLLHUP);
        }
        restore(fds, &wanted);
        let n = fds.iter().filter(|p| p.revents != 0).count();
        if n > 0 || until.is_over() {
            return n as c_int;
        }
    }
}

/// Waits for a list that contains streams or sockets with reliable datagrams. The library passes
/// reliable datagrams to the program through a pair of connected sockets, so in place of such a
/// socket, the program's end of the pair is polled.
fn wait(fds: &mut [pollfd], until: Until, mask: *const sigset_t) -> c_int {
    let mut changed = Vec::new();
    if RELIABLE.load(Ordering::Relaxed) > 0 {
        for (i, p) in fds.iter_mut().enumerate() {
            if let Some(dgram) = table::dgram(p.fd)
                && let Some(pair) = dgram.served(p.fd)
            {
                changed.push((i, p.fd, dgram));
                p.fd = pair;
            }
        }
    }
    let r = wait_streams(fds, until, mask);
    for (i, fd, dgram) in changed {
        let Some(p) = fds.get_mut(i) else { continue };
        p.fd = fd;
        if r >= 0 && p.revents != 0 && dgram.has_error() {
            p.revents |= libc::POLLERR;
        }
    }
    r
}

fn restore(fds: &mut [pollfd], wanted: &[i16]) {
    for (p, events) in fds.iter_mut().zip(wanted) {
        p.events = *events;
    }
}

/// Returns the list of a call as a slice.
///
/// # Safety
/// The requirements of `poll` apply.
unsafe fn list<'a>(fds: *mut pollfd, n: nfds_t) -> &'a mut [pollfd] {
    if is_nowhere(fds) {
        return &mut [];
    }
    // SAFETY: upheld by the caller.
    unsafe { std::slice::from_raw_parts_mut(fds, n as usize) }
}

/// See `poll(2)`.
///
/// # Safety
/// The requirements of `poll` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: upheld by the caller.
    let all = unsafe { list(fds, n) };
    if is_plain(all) {
        // SAFETY: upheld by the caller.
        return unsafe { real::poll(fds, n, timeout) };
    }
    wait(all, Until::ms(timeout), std::ptr::null())
}

/// See `poll(2)`. Called by programs that were compiled with `_FORTIFY_SOURCE`; `room` is the size of the list in bytes.
///
/// # Safety
/// The requirements of `poll` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: c_int,
    room: size_t,
) -> c_int {
    if (n as usize).saturating_mul(size_of::<pollfd>()) > room {
        // SAFETY: upheld by the caller. The C library aborts the program.
        return unsafe { real::__poll_chk(fds, n, timeout, room) };
    }
    // SAFETY: upheld by the caller.
    unsafe { poll(fds, n, timeout) }
}

/// See `ppoll(2)`.
///
/// # Safety
/// The requirements of `ppoll` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: upheld by the caller.
    let (all, is_accepted) = unsafe { (list(fds, n), Until::accepts(timeout)) };
    if !is_accepted || is_plain(all) {
        // SAFETY: upheld by the caller.
        return unsafe { real::ppoll(fds, n, timeout, mask) };
    }
    // SAFETY: upheld by the caller.
    wait(all, unsafe { Until::spec(timeout) }, mask)
}

/// See `ppoll(2)`. Called by programs that were compiled with `_FORTIFY_SOURCE`; `room` is the size of the list in bytes.
///
/// # Safety
/// The requirements of `ppoll` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    if (n as usize).saturating_mul(size_of::<pollfd>()) > room {
        // SAFETY: upheld by the caller. The C library aborts the program.
        return unsafe { real::__ppoll_chk(fds, n, timeout, mask, room) };
    }
    // SAFETY: upheld by the caller.
    unsafe { ppoll(fds, n, timeout, mask) }
}

/// Returns whether `fd` is in a set of `select`.
fn has(set: *const fd_set, fd: c_int) -> bool {
    // SAFETY: the caller passed null or a set with at least `fd` + 1 bits. As with the C library's macro, these may be more than
    // FD_SETSIZE.
    !set.is_null() && unsafe { *set.cast::<u8>().add(fd as usize / 8) } & (1 << (fd % 8)) != 0
}

fn put(set: *mut fd_set, fd: c_int, on: bool) {
    if !set.is_null() {
        // SAFETY: as above.
        unsafe {
            let byte = set.cast::<u8>().add(fd as usize / 8);
            if on {
                *byte |= 1 << (fd % 8);
            } else {
                *byte &= !(1 << (fd % 8));
            }
        }
    }
}

/// Handles `select` by polling. Returns `None` if no descriptor is a stream or a socket with reliable datagrams.
fn select_with(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    until: impl FnOnce() -> Until,
    mask: *const sigset_t,
) -> Option<c_int> {
    let is_wrong = |set: *mut fd_set| !set.is_null() && is_nowhere(set);
    if is_unused() || n < 0 || [r, w, e].into_iter().any(is_wrong) {
        return None;
    }
    let mut fds = Vec::new();
    for fd in 0..n {
        let mut events = 0;
        for (set, bits) in [(r, libc::POLLIN), (w, libc::POLLOUT), (e, libc::POLLPRI)] {
            if has(set, fd) {
                events |= bits;
            }
        }
        if events != 0 {
            fds.push(pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    if is_plain(&fds) {
        return None;
    }
    let ready = wait(&mut fds, until(), mask);
    if ready < 0 {
        return Some(ready);
    }
    if fds.iter().any(|p| p.revents & libc::POLLNVAL != 0) {
        return Some(fail(libc::EBADF));
    }
    let mut count = 0;
    for p in &fds {
        let reads = p.revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR) != 0;
        let writes = p.revents & (libc::POLLOUT | libc::POLLERR) != 0;
        let urgent = p.revents & libc::POLLPRI != 0;
        for (set, bit, on) in [
            (r, libc::POLLIN, reads),
            (w, libc::POLLOUT, writes),
            (e, libc::POLLPRI, urgent),
        ] {
            if p.events & bit != 0 {
                put(set, p.fd, on);
                count += c_int::from(on);
            }
        }
    }
    Some(count)
}

/// See `select(2)`.
///
/// # Safety
/// The requirements of `select` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let until = || {
        if timeout.is_null() {
            return Until(None);
        }
        // SAFETY: upheld by the caller.
        let t = unsafe { *timeout };
        let d = Duration::from_secs(t.tv_sec.max(0) as u64)
            + Duration::from_micros(t.tv_usec.max(0) as u64);
        Until(Instant::now().checked_add(d))
    };
    // The C library and the kernel refuse only negative times. They accept a `tv_usec` of a million and more.
    let is_accepted = timeout.is_null()
        || !is_nowhere(timeout)
            // SAFETY: upheld by the caller.
            && unsafe { (*timeout).tv_sec >= 0 && (*timeout).tv_usec >= 0 };
    if !is_accepted {
        // SAFETY: as above.
        return unsafe { real::select(n, r, w, e, timeout) };
    }
    let started = Instant::now();
    match select_with(n, r, w, e, until, std::ptr::null()) {
        Some(result) => {
            let is_over =
                result >= 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EINTR);
            if !timeout.is_null() && is_over {
                // Linux writes the remaining time back, also when a signal ends the call.
                // SAFETY: upheld by the caller.
                unsafe {
                    let t = *timeout;
                    let d = Duration::from_secs(t.tv_sec.max(0) as u64)
                        + Duration::from_micros(t.tv_usec.max(0) as u64);
                    let left = d.saturating_sub(started.elapsed());
                    (*timeout).tv_sec = left.as_secs() as libc::time_t;
                    (*timeout).tv_usec = libc::suseconds_t::from(left.subsec_micros() as i32);
                }
            }
            result
        }
        // SAFETY: upheld by the caller.
        None => unsafe { real::select(n, r, w, e, timeout) },
    }
}

/// See `pselect(2)`.
///
/// # Safety
/// The requirements of `pselect` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pselect(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: upheld by the caller.
    if unsafe { !Until::accepts(timeout) } {
        // SAFETY: as above.
        return unsafe { real::pselect(n, r, w, e, timeout, mask) };
    }
    // SAFETY: as above.
    let until = || unsafe { Until::spec(timeout) };
    match select_with(n, r, w, e, until, mask) {
        Some(result) => result,
        // SAFETY: upheld by the caller.
        None => unsafe { real::pselect(n, r, w, e, timeout, mask) },
    }
}

/// See `epoll_ctl(2)`.
///
/// # Safety
/// The requirements of `epoll_ctl` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    match (table::get(epfd), table::get(fd)) {
        (Entry::Set(set), Entry::Sock(sock)) => {
            if sock.mode() == Mode::Accepted && op != libc::EPOLL_CTL_DEL {
                sock.decide(fd, false);
            }
            let is_wrong = op != libc::EPOLL_CTL_DEL && is_nowhere(event);
            if is_wrong || sock.mode() == Mode::Plain || table::sock(fd).is_none() {
                // SAFETY: upheld by the caller.
                return unsafe { real::epoll_ctl(epfd, op, fd, event) };
            }
            // SAFETY: upheld by the caller.
            let event = (!is_nowhere(event)).then(|| unsafe { event.read_unaligned() });
            set.control(op, fd, event, sock).map_or_else(fail, |()| 0)
        }
        (Entry::Set(set), Entry::Tcp) => {
            // SAFETY: upheld by the caller.
            let r = unsafe { real::epoll_ctl(epfd, op, fd, event) };
            if r == 0 {
                // SAFETY: as above.
                let event = (!is_nowhere(event)).then(|| unsafe { event.read_unaligned() });
                early::control(set, op, fd, event);
            }
            r
        }
        (_, Entry::Set(inner)) => {
            if op == libc::EPOLL_CTL_ADD {
                inner.nest();
            }
            // SAFETY: upheld by the caller.
            unsafe { real::epoll_ctl(epfd, op, fd, event) }
        }
        (_, Entry::Dgram(dgram)) => {
            let member = dgram.served(fd).unwrap_or(fd);
            // SAFETY: upheld by the caller.
            unsafe { real::epoll_ctl(epfd, op, member, event) }
        }
        // SAFETY: upheld by the caller.
        _ => unsafe { real::epoll_ctl(epfd, op, fd, event) },
    }
}

/// Waits for a set that contains streams. Returns `None` if it contains none, or if the kernel has to refuse the program's array.
fn epoll(
    epfd: c_int,
    events: *mut epoll_event,
    n: c_int,
    until: impl FnOnce() -> Until,
    mask: *const sigset_t,
) -> Option<c_int> {
    let set = table::set(epfd).filter(|s| s.is_used())?;
    let most = usize::try_from(n)
        .ok()
        .filter(|n| *n > 0 && !is_nowhere(events))?;
    // SAFETY: the program's array has this many elements.
    let out = unsafe { std::slice::from_raw_parts_mut(events, most) };
    let mut until_known = None;
    let mut until = Some(until);
    loop {
        let call = Call::next();
        if set.is_kernels_turn() {
            // SAFETY: the array has this many elements.
            let found = unsafe { real::epoll_wait(epfd, out.as_mut_ptr(), n, 0) };
            if let Ok(found @ 1..) = usize::try_from(found) {
                let reported = set.report(call, out, 0, found);
                if reported > 0 {
                    return Some(reported as c_int);
                }
            }
        }
        let listed = set.report_listed(call, out);
        let rest = out.get_mut(listed..).unwrap_or(&mut []);
        if rest.is_empty() {
            set.was_filled();
            return Some(listed as c_int);
        }
        let mut ms = 0;
        let mut sleeps = false;
        if listed == 0 {
            let until =
                *until_known.get_or_insert_with(|| until.take().map_or(Until(None), |f| f()));
            ms = match until.left() {
                None => -1,
                // Rounded up, so that the wait is at least as long as requested.
                Some(t) => {
                    let ms = t.tv_sec.saturating_mul(1000);
                    let ms = ms.saturating_add((t.tv_nsec + 999_999) / 1_000_000);
                    c_int::try_from(ms).unwrap_or(c_int::MAX)
                }
            };
            sleeps = ms != 0 && set.enter();
            if ms != 0 && !sleeps {
                continue;
            }
        }
        // As in `wait_streams`, a call that finds something ready handles no signals that only `mask` permits.
        let mask = if listed > 0 { std::ptr::null() } else { mask };
        let mut enter = |ms| {
            let (place, room) = (rest.as_mut_ptr(), rest.len() as c_int);
            // SAFETY: the array has room for this many events.
            unsafe {
                if mask.is_null() {
                    real::epoll_wait(epfd, place, room, ms)
                } else {
                    real::epoll_pwait(epfd, place, room, ms, mask)
                }
            }
        };
        let r = if sleeps {
            spin::wait(|sleeps| {
                if sleeps {
                    Some(enter(ms))
                } else {
                    Some(enter(0)).filter(|r| *r != 0)
                }
            })
        } else {
            enter(ms)
        };
        let e = sys::errno();
        if sleeps {
            set.leave();
        }
        if r < 0 {
            return Some(if listed > 0 { listed as c_int } else { fail(e) });
        }
        let reported = set.report(call, out, listed, r as usize);
        if reported > 0 {
            return Some(reported as c_int);
        }
        if until_known.is_some_and(Until::is_over) {
            return Some(0);
        }
    }
}

/// See `epoll_wait(2)`.
///
/// # Safety
/// The requirements of `epoll_wait` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    n: c_int,
    timeout: c_int,
) -> c_int {
    match epoll(epfd, events, n, || Until::ms(timeout), std::ptr::null()) {
        Some(r) => r,
        // SAFETY: upheld by the caller.
        None => unsafe { real::epoll_wait(epfd, events, n, timeout) },
    }
}

/// See `epoll_pwait(2)`.
///
/// # Safety
/// The requirements of `epoll_pwait` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    n: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    match epoll(epfd, events, n, || Until::ms(timeout), mask) {
        Some(r) => r,
        // SAFETY: upheld by the caller.
        None => unsafe { real::epoll_pwait(epfd, events, n, timeout, mask) },
    }
}

/// See `epoll_pwait2(2)`.
///
/// # Safety
/// The requirements of `epoll_pwait2` apply.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    n: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: upheld by the caller.
    if unsafe { !Until::accepts(timeout) } {
        // SAFETY: as above.
        return unsafe { real::epoll_pwait2(epfd, events, n, timeout, mask) };
    }
    // SAFETY: as above.
    let until = || unsafe { Until::spec(timeout) };
    match epoll(epfd, events, n, until, mask) {
        Some(r) => r,
        // SAFETY: upheld by the caller.
        None => unsafe { real::epoll_pwait2(epfd, events, n, timeout, mask) },
    }
}
