//! An epoll set of the program that contains upgraded streams.
//!
//! The kernel's set contains the carriers (the TCP sockets) of the streams, with the program's data. When the kernel reports an
//! event of a carrier, the library handles it and returns the events of the stream to the program instead. A stream can be
//! ready without an event of the kernel: it is readable if bytes were received from the carrier earlier, and it becomes writable
//! when the peer permits more bytes (*credit*). Such streams are in a list, which is checked first.
//!
//! Programs change the events that they wait for several times for each request: redis-benchmark calls `epoll_ctl` five
//! times. The library makes a system call for such a call only if the kernel has to report more events than before. So the kernel's set
//! may contain events that the program does not wait for any more. They are removed from it when the kernel reports one of them. In the
//! same way, a stream that the program has removed stays in the kernel's set until the kernel reports an event of the stream, the program
//! closes it, or the process forks.
//!
//! After a fork, both processes share the kernel's set, but not the list. The entries of the kernel's set are the parent's: the child
//! changes one without a call of the program only if the child has used the stream, because then the parent cannot use it any more.

use crate::conn::early;
use crate::conn::sock::{Carrier, Mode, Sock, UNDECIDED};
use crate::conn::table::{self, Entry};
use crate::limits;
use crate::owner;
use crate::real;
use crate::sys;
use anywarp_core::lock::Mutex;
use libc::{c_int, epoll_event};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// With one of these flags the kernel's set contains exactly the events that are needed, and a stream that the program removes is removed
/// from it at once, because the time of a change determines which events the kernel reports.
const EXACT: u32 = ET | ONESHOT | libc::EPOLLEXCLUSIVE as u32;
/// The epoll data of a set's bell (see `bell`).
const BELL: u64 = 0x616e_7977_6172_7021;

/// A set.
#[derive(Debug)]
pub struct Set {
    inner: Mutex<Inner>,
    /// The number of descriptors.
    numbers: AtomicUsize,
    /// The number of connections in the set that are not plain.
    members: AtomicUsize,
    /// The number of threads that wait in the kernel.
    waiters: AtomicUsize,
    /// The last call had no room for events of the kernel, so the next one reports those first.
    filled: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    /// A descriptor of the set.
    epfd: c_int,
    /// The process that has created the set.
    maker: u32,
    members: FxHashMap<c_int, Member>,
    /// Maps the epoll data of events to the member with this data. Further members with the same data are in `shared`.
    by_data: FxHashMap<u64, c_int>,
    shared: Vec<(u64, c_int)>,
    ready: VecDeque<c_int>,
    /// An eventfd in the kernel's set. It is written when a stream becomes ready without an event of the kernel.
    bell: Option<c_int>,
    rung: bool,
    /// The program has added the set to another set, or polls it. The bell must then be readable while streams are in the list, so
    /// that the kernel reports this set as readable.
    nested: bool,
    /// Connections in which this set has found changes that concern other sets.
    news: Vec<&'static Sock>,
}

#[derive(Debug)]
struct Member {
    sock: &'static Sock,
    /// The events that the program waits for.
    events: u32,
    data: u64,
    /// The events of the carrier in the kernel's set.
    asked: u32,
    /// The member is in the list of ready streams.
    listed: bool,
    /// The member is one-shot, and an event of it was reported.
    disarmed: bool,
    /// The program has removed the member, and the kernel's set still contains it.
    gone: bool,
    /// The process has got the member by a fork.
    inherited: bool,
    /// The last call that reported the member from the list, and the index of that event. The kernel may report the carrier
    /// in the same call; both are reported as one event.
    reported: (Call, usize),
}

/// The number of a call that waits for events, such as `epoll_wait`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call(u64);

impl Call {
    /// Returns the number of the next call.
    pub fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

static FREE: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());

/// The locks that are held while the process forks, so that the child can use the sets.
#[derive(Debug)]
pub struct Held {
    _free: MutexGuard<'static, Vec<&'static Set>>,
    sets: Vec<MutexGuard<'static, Inner>>,
    /// The sets that another thread has kept locked.
    lost: Vec<&'static Set>,
}

/// Keeps other threads from creating, closing or using sets while the process forks, until the result is dropped. Also deletes, in the
/// kernel's sets, the members that the program has removed: the child could not know later which of them it still has to delete.
pub fn hold() -> Held {
    let free = FREE.lock();
    let until = Instant::now() + Duration::from_millis(limits::FORK_WAIT);
    let (mut sets, mut lost) = (Vec::new(), Vec::new());
    let mut seen: Vec<&'static Set> = Vec::new();
    table::for_each(|_, entry| {
        let Entry::Set(set) = entry else { return };
        if seen.iter().any(|s| std::ptr::eq(*s, set)) {
            return;
        }
        seen.push(set);
        let inner = loop {
            match set.inner.try_lock() {
                None if Instant::now() < until => std::thread::yield_now(),
                inner => break inner,
            }
        };
        match inner {
            Some(mut inner) => {
                set.remove_gone(&mut inner);
                sets.push(inner);
            }
            None => lost.push(set),
        }
    });
    Held {
        _free: free,
        sets,
        lost,
    }
}

impl Held {
    /// Called in the child of the fork. For sets in `lost`, the child passes all calls to the kernel unchanged.
    pub fn forked(mut self) {
        for inner in &mut self.sets {
            for member in inner.members.values_mut() {
                member.inherited = true;
            }
        }
        let lost = std::mem::take(&mut self.lost);
        drop(self);
        table::for_each(|fd, entry| match entry {
            Entry::Set(set) if lost.iter().any(|l| std::ptr::eq(*l, set)) => {
                table::replace(fd, Entry::Other);
                early::forget_set(set);
            }
            Entry::Set(set) => set.waiters.store(0, Ordering::Relaxed),
            Entry::Sock(sock) => lost.iter().for_each(|set| sock.left(set)),
            _ => {}
        });
    }
}

impl Set {
    /// Returns the state for a new epoll descriptor.
    pub fn new(epfd: c_int) -> &'static Self {
        let free = FREE.lock().pop();
        let set = free.unwrap_or_else(|| {
            Box::leak(Box::new(Self {
                inner: Mutex::new(Inner::default()),
                numbers: AtomicUsize::new(0),
                members: AtomicUsize::new(0),
                waiters: AtomicUsize::new(0),
                filled: AtomicBool::new(false),
            }))
        });
        set.numbers.store(1, Ordering::Relaxed);
        let mut inner = set.lock();
        inner.epfd = epfd;
        inner.maker = owner::me();
        drop(inner);
        set
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Returns whether the set has connections that are not plain.
    pub fn is_used(&self) -> bool {
        self.members.load(Ordering::Acquire) > 0
    }

    /// Records another descriptor of the set.
    pub fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::AcqRel);
    }

    /// Called when the program closes the descriptor `fd`, which is not in the table any more. Returns whether it was the last one.
    pub fn drop_number(&'static self, fd: c_int) -> bool {
        if self.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
            return true;
        }
        let mut inner = self.lock();
        if inner.epfd == fd
            && let Some(copy) = table::find(Entry::Set(self))
        {
            inner.epfd = copy;
        }
        false
    }

    /// Handles the end of the set: the program closed its last descriptor.
    pub fn closing(&'static self) {
        let mut inner = self.lock();
        if let Some(bell) = inner.bell.take() {
            table::close_own(bell);
        }
        let members = std::mem::take(&mut *inner).members;
        self.members.store(0, Ordering::Release);
        drop(inner);
        for member in members.into_values() {
            member.sock.left(self);
        }
        FREE.lock().push(self);
    }

    /// Records that the program has added the set to another set, or polls it.
    pub fn nest(&self) {
        let mut inner = self.lock();
        inner.nested = true;
        inner.hang_bell();
        inner.ring_if_due(true);
    }

    /// Handles `epoll_ctl` for a connection that is not plain.
    ///
    /// # Errors
    /// The errno of the kernel.
    pub fn control(
        &'static self,
        op: c_int,
        fd: c_int,
        event: Option<epoll_event>,
        sock: &'static Sock,
    ) -> Result<(), c_int> {
        let mut inner = self.lock();
        let (events, data) = event.map_or((0, 0), |e| (e.events, e.u64));
        if let Some(other) = inner.members.get(&fd).map(|m| m.sock)
            && !std::ptr::eq(other, sock)
        {
            // The descriptor of the old member was closed by a call that the library does not intercept.
            self.remove(&mut inner, fd);
        }
        let exclusive = libc::EPOLLEXCLUSIVE as u32;
        // The kernel refuses to change a member to EPOLLEXCLUSIVE.
        if op == libc::EPOLL_CTL_ADD
            && events & exclusive != 0
            && inner.members.get(&fd).is_some_and(|m| m.gone)
        {
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.remove(&mut inner, fd);
        }
        let old = inner.members.get(&fd).map(|m| (m.asked, m.data, m.gone));
        let gone = old.is_some_and(|(.., gone)| gone);
        if gone && op != libc::EPOLL_CTL_ADD {
            return Err(libc::ENOENT);
        }
        if op == libc::EPOLL_CTL_DEL {
            if let Some(member) = inner.members.get_mut(&fd)
                && member.asked & EXACT == 0
                && !member.inherited
                && sock.mode() == Mode::Up
            {
                member.gone = true;
                return Ok(());
            }
            kernel(inner.epfd, op, fd, 0, 0)?;
            self.remove(&mut inner, fd);
            drop(inner);
            sock.left(self);
            return Ok(());
        }
        let asked = match sock.carrier(events) {
            Some(carrier) => {
                let before = old.filter(|_| op == libc::EPOLL_CTL_MOD || gone);
                let before = before.filter(|(_, before, _)| *before == data);
                let asked = carrier.asked(events, before.map(|(asked, ..)| asked));
                if before.is_none_or(|(before, ..)| before != asked || asked & exclusive != 0) {
                    let op = if gone { libc::EPOLL_CTL_MOD } else { op };
                    kernel(inner.epfd, op, fd, asked, data)?;
                }
                asked
            }
            None => {
                let op = if gone { libc::EPOLL_CTL_MOD } else { op };
                kernel(inner.epfd, op, fd, events, data)?;
                events
            }
        };
        match old {
            Some((_, before, _)) if before != data => inner.unindex(before, fd),
            Some(_) => {}
            // The member is new, or was added before the library knew of the set.
            None => {
                self.members.fetch_add(1, Ordering::AcqRel);
            }
        }
        let listed = inner.members.get(&fd).is_some_and(|m| m.listed);
        let inherited = inner.members.get(&fd).is_some_and(|m| m.inherited);
        let member = Member {
            sock,
            events,
            data,
            asked,
            listed,
            disarmed: false,
            gone: false,
            inherited,
            reported: (Call(0), 0),
        };
        self.add_member(&mut inner, fd, member);
        drop(inner);
        if old.is_none() {
            sock.joined(self, fd);
        }
        Ok(())
    }

    /// Puts a member into the map and the list, so that the next wait reports the events that the member has already.
    fn add_member(&self, inner: &mut Inner, fd: c_int, member: Member) {
        let data = member.data;
        let old = inner.members.insert(fd, member);
        if old.is_none_or(|old| old.data != data) {
            inner.index(data, fd);
        }
        inner.hang_bell();
        inner.list(fd);
        inner.ring_if_due(self.waiters.load(Ordering::Acquire) > 0);
    }

    /// Makes `fd` a member. The kernel's set contains it already, with these events and this data.
    pub fn adopt(&'static self, fd: c_int, events: u32, data: u64, sock: &'static Sock) {
        let mut inner = self.lock();
        self.remove(&mut inner, fd);
        self.members.fetch_add(1, Ordering::AcqRel);
        let member = Member {
            sock,
            events,
            data,
            asked: events,
            listed: false,
            disarmed: false,
            gone: false,
            inherited: false,
            reported: (Call(0), 0),
        };
        self.add_member(&mut inner, fd, member);
        drop(inner);
        sock.joined(self, fd);
    }

    fn remove(&self, inner: &mut Inner, fd: c_int) {
        if let Some(member) = inner.members.remove(&fd) {
            inner.unindex(member.data, fd);
            self.members.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Deletes, in the kernel's set, the members that the program has removed.
    fn remove_gone(&self, inner: &mut Inner) {
        let gone = inner.members.iter().filter(|(_, m)| m.gone);
        let gone: Vec<c_int> = gone.map(|(fd, _)| *fd).collect();
        for fd in gone {
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.remove(inner, fd);
        }
    }

    /// Removes the connection `fd`, which is plain now, or closed.
    pub fn forget(&self, fd: c_int) {
        let mut inner = self.lock();
        if inner.members.get(&fd).is_some_and(|m| m.gone) {
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
        } else if let Some(member) = inner.members.get(&fd)
            && member.sock.mode() == Mode::Plain
            && member.asked != member.events
            && member.may_change()
        {
            let (events, data) = (member.events, member.data);
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_MOD, fd, events, data);
        }
        self.remove(&mut inner, fd);
    }

    /// Removes `fd`, which the program closes, from the kernel's set. The kernel itself removes it only when the connection is closed,
    /// and the library keeps the connection open for a while. Meanwhile the kernel would report events of the connection, with data
    /// that the program may already use for another one.
    pub fn withdraw(&self, fd: c_int) {
        let inner = self.lock();
        // The process that created the set may still use the connection in it.
        if inner.is_shared() {
            return;
        }
        // This fails if the set no longer contains the connection.
        let _ = kernel(inner.epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Called when the program closes one of several descriptors of a connection. The kernel's set would otherwise keep a
    /// member that the program has removed.
    pub fn settle(&self, fd: c_int) {
        let mut inner = self.lock();
        if inner.members.get(&fd).is_some_and(|m| m.gone) {
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.remove(&mut inner, fd);
        }
    }

    /// Adds a connection that has changed to the list. `number`: the descriptor by which the connection was added to the set.
    pub fn mark(&self, sock: &Sock, number: c_int) {
        let mut inner = self.lock();
        inner.for_each_of(sock, number, Inner::list);
        inner.ring_if_due(self.waiters.load(Ordering::Acquire) > 0);
    }

    /// Makes the kernel report when the carrier has room again, because the carrier did not accept all bytes of a write.
    pub fn renew(&self, sock: &Sock, number: c_int) {
        let mut inner = self.lock();
        inner.for_each_of(sock, number, |inner, fd| {
            let epfd = inner.epfd;
            let Some(m) = inner
                .members
                .get_mut(&fd)
                .filter(|m| !m.gone && !m.disarmed)
            else {
                return;
            };
            if let Some(carrier) = m.sock.carrier(m.events) {
                let asked = carrier.asked(m.events, Some(m.asked));
                if asked != m.asked && kernel(epfd, libc::EPOLL_CTL_MOD, fd, asked, m.data).is_ok()
                {
                    m.asked = asked;
                }
            }
        });
    }

    /// Reports the events of listed streams. Returns the number of events that were written to `out`.
    pub fn report_listed(&self, call: Call, out: &mut [epoll_event]) -> usize {
        let mut inner = self.lock();
        let mut n = 0;
        for _ in 0..inner.ready.len() {
            if n == out.len() {
                break;
            }
            let Some(fd) = inner.ready.pop_front() else {
                break;
            };
            if let Some(member) = inner.members.get_mut(&fd) {
                member.listed = false;
            }
            if let Some(event) = self.event_of(&mut inner, fd, 0) {
                if let Some(member) = inner.members.get_mut(&fd) {
                    member.reported = (call, n);
                }
                if let Some(place) = out.get_mut(n) {
                    *place = event;
                }
                n += 1;
            }
        }
        inner.quiet();
        self.notify_others(inner);
        n
    }

    /// Unlocks the set, then tells other sets what this one has found.
    fn notify_others(&self, mut inner: MutexGuard<'_, Inner>) {
        let news = std::mem::take(&mut inner.news);
        drop(inner);
        for sock in news {
            sock.notify_others(self);
        }
    }

    /// Decides whether connections with reported events become streams or plain. The set must not be locked, because a
    /// connection that becomes plain removes itself from it.
    fn decide(&self, events: &[epoll_event]) {
        let mut found = Vec::new();
        let inner = self.lock();
        for event in events {
            let data = event.u64;
            let first = inner.by_data.get(&data).copied();
            for fd in first.into_iter().chain(inner.further(data)) {
                if let Some(member) = inner.members.get(&fd)
                    && !member.inherited
                    && matches!(member.sock.mode(), Mode::Accepted | Mode::Connecting)
                {
                    found.push((fd, member.sock));
                }
            }
        }
        drop(inner);
        for (fd, sock) in found {
            sock.decide(fd, false);
        }
    }

    /// Replaces the events of the kernel by those of the streams. `events` contains `listed` events of listed streams, followed by
    /// `found` events of the kernel. Returns the number of events for the program.
    pub fn report(
        &self,
        call: Call,
        events: &mut [epoll_event],
        listed: usize,
        found: usize,
    ) -> usize {
        let end = listed.saturating_add(found).min(events.len());
        if UNDECIDED.load(Ordering::Relaxed) > 0 {
            self.decide(events.get(listed..end).unwrap_or(&[]));
        }
        let mut inner = self.lock();
        let mut n = listed;
        for i in listed..end {
            let Some(event) = events.get(i).copied() else {
                break;
            };
            let data = event.u64;
            if data == BELL && inner.bell.is_some() {
                // The process that created the set has the same bell, and still has to read it.
                if !inner.is_shared() {
                    inner.listen();
                }
                continue;
            }
            let Some(first) = inner.by_data.get(&data).copied() else {
                put(events, &mut n, event);
                continue;
            };
            let mut out = self.event_or_earlier(&mut inner, call, events, first, event.events);
            let further: Vec<c_int> = inner.further(data).collect();
            for fd in further {
                let event = self.event_or_earlier(&mut inner, call, events, fd, event.events);
                out = match (out, event) {
                    (Some(a), Some(b)) => Some(epoll_event {
                        events: a.events | b.events,
                        u64: data,
                    }),
                    (some, None) => some,
                    (None, event) => event,
                };
            }
            if let Some(event) = out {
                put(events, &mut n, event);
            }
        }
        // The bytes of the reported streams have been received, so the kernel no longer reports a nested set as readable because of
        // them. The bell makes it readable.
        inner.ring_if_due(false);
        self.notify_others(inner);
        n
    }

    /// Like [`Self::event_of`]. If this call has reported an event of `fd` already, the new events are added to that one, and
    /// nothing is returned.
    fn event_or_earlier(
        &self,
        inner: &mut Inner,
        call: Call,
        events: &mut [epoll_event],
        fd: c_int,
        found: u32,
    ) -> Option<epoll_event> {
        let event = self.event_of(inner, fd, found)?;
        let (earlier, at) = inner.members.get(&fd)?.reported;
        if earlier != call {
            return Some(event);
        }
        let place = events.get_mut(at)?;
        place.events |= event.events;
        None
    }

    /// Returns the event to report for `fd`, whose carrier has the events `found` (0: none). Also updates the events in the kernel's
    /// set.
    fn event_of(&self, inner: &mut Inner, fd: c_int, found: u32) -> Option<epoll_event> {
        let epfd = inner.epfd;
        let m = inner.members.get(&fd)?;
        let (sock, wanted, data, asked_now) = (m.sock, m.events, m.data, m.asked);
        if m.gone {
            if found != 0 {
                let _ = kernel(epfd, libc::EPOLL_CTL_DEL, fd, 0, 0);
                self.remove(inner, fd);
            }
            return None;
        }
        if m.disarmed {
            return None;
        }
        if sock.mode() != Mode::Up || table::sock(fd).is_none() {
            return (found != 0).then_some(epoll_event {
                events: found,
                u64: data,
            });
        }
        if m.inherited && !sock.is_used_here() && !sock.is_used_elsewhere() {
            let report = m.unused(found);
            if report != 0 {
                inner.list(fd);
                return Some(epoll_event {
                    events: report,
                    u64: data,
                });
            }
            if found == 0 || inner.is_shared() {
                return None;
            }
            // No other process handles these events, and the kernel would report them again at once, so this process handles them.
        }
        if !sock.is_ours(fd) {
            return (found != 0).then_some(epoll_event {
                events: ERR | HUP,
                u64: data,
            });
        }
        let (ready, carrier, concerns_others) = sock.process_for(fd, to_poll(found), wanted);
        if concerns_others {
            inner.news.push(sock);
        }
        let mut report = to_epoll(ready) & (wanted | ERR | HUP);
        let normal = libc::EPOLLRDNORM as u32 | libc::EPOLLWRNORM as u32;
        report &= !(normal & !wanted);
        // An event of the carrier that led to no event of the stream is removed from the kernel's set, since it would be
        // reported again at once.
        let lenient = (report != 0 || found == 0).then_some(asked_now);
        let asked_next = carrier.map_or(wanted, |c| c.asked(wanted, lenient));
        let member = inner.members.get_mut(&fd)?;
        member.asked = asked_next;
        if report == 0 {
            // The kernel disarms a one-shot member when it reports an event of the member, even if the program does not get the
            // event.
            if asked_next != asked_now || (wanted & ONESHOT != 0 && found != 0) {
                let _ = kernel(epfd, libc::EPOLL_CTL_MOD, fd, asked_next, data);
            }
            return None;
        }
        if wanted & ONESHOT != 0 {
            member.disarmed = true;
            member.asked = ONESHOT;
            if found == 0 {
                let _ = kernel(epfd, libc::EPOLL_CTL_MOD, fd, ONESHOT, data);
            }
        } else {
            if asked_next != asked_now {
                let _ = kernel(epfd, libc::EPOLL_CTL_MOD, fd, asked_next, data);
            }
            // A level-triggered member is checked again before the next wait.
            if wanted & ET == 0 && !member.listed {
                member.listed = true;
                inner.ready.push_back(fd);
            }
        }
        Some(epoll_event {
            events: report,
            u64: data,
        })
    }

    /// Returns whether the next wait reports events of the kernel before those of the list. This is the case after a call in which the
    /// list alone filled the program's array: otherwise other members would not be reported while these streams stay ready.
    pub fn is_kernels_turn(&self) -> bool {
        self.filled.load(Ordering::Relaxed) && self.filled.swap(false, Ordering::Relaxed)
    }

    /// Records that the list alone has filled the program's array.
    pub fn was_filled(&self) {
        self.filled.store(true, Ordering::Relaxed);
    }

    /// Called before the program puts a descriptor of its own at the number `fd`. If the bell has this number, it gets another one. The
    /// kernel's set keeps the bell, because it is the same eventfd.
    pub fn move_away(&self, fd: c_int) {
        let mut inner = self.lock();
        if inner.bell == Some(fd) {
            inner.bell = sys::copy_high(fd);
            if let Some(bell) = inner.bell {
                table::own(bell);
            }
        }
    }

    /// Called before a thread waits in the kernel. Returns false if there are events to report already.
    pub fn enter(&self) -> bool {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        if self.lock().ready.is_empty() {
            return true;
        }
        self.waiters.fetch_sub(1, Ordering::AcqRel);
        false
    }

    /// Called after a wait in the kernel.
    pub fn leave(&self) {
        self.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Member {
    /// Returns whether the library may change the member in the kernel's set without a call of the program.
    fn may_change(&self) -> bool {
        !self.inherited || self.sock.is_used_here()
    }

    /// Returns the events to report in the child of a fork for a stream that neither process has used since. A wait is not a use: the
    /// stream stays free for the parent until this process reads or writes. `found`: the events of the carrier.
    fn unused(&self, found: u32) -> u32 {
        let ready = match self.sock.try_stream() {
            // For a member with a flag of `EXACT` only the kernel's events are reported, because the kernel does not know when the
            // library lists the member.
            Some(stream) if self.events & EXACT == 0 => {
                stream.as_ref().map_or(0, |s| to_epoll(s.readiness()))
            }
            _ => 0,
        };
        (ready | found) & (self.events | ERR | HUP)
    }
}

impl Inner {
    /// Returns whether the kernel's set belongs to another process, which still exists.
    fn is_shared(&self) -> bool {
        self.maker != owner::me() && owner::exists(self.maker)
    }

    fn index(&mut self, data: u64, fd: c_int) {
        if *self.by_data.entry(data).or_insert(fd) != fd {
            self.shared.push((data, fd));
        }
    }

    fn unindex(&mut self, data: u64, fd: c_int) {
        if self.by_data.get(&data) != Some(&fd) {
            self.shared.retain(|entry| *entry != (data, fd));
            return;
        }
        match self.shared.iter().position(|(d, _)| *d == data) {
            Some(at) => {
                let (_, next) = self.shared.swap_remove(at);
                self.by_data.insert(data, next);
            }
            None => {
                self.by_data.remove(&data);
            }
        }
    }

    /// Returns the members with this data, except the one in `by_data`.
    fn further(&self, data: u64) -> impl Iterator<Item = c_int> + '_ {
        self.shared
            .iter()
            .filter(move |(d, _)| *d == data)
            .map(|(_, fd)| *fd)
    }

    /// Calls `each` for the descriptors by which the connection is a member. `number`: one of them. It is the only one unless the
    /// program has copied the descriptor.
    fn for_each_of(&mut self, sock: &Sock, number: c_int, mut each: impl FnMut(&mut Self, c_int)) {
        let is_it = |m: &Member| std::ptr::eq(m.sock, sock);
        if !sock.has_copies() {
            if self.members.get(&number).is_some_and(is_it) {
                each(self, number);
            }
            return;
        }
        let all = self.members.iter().filter(|(_, m)| is_it(m));
        let fds: Vec<c_int> = all.map(|(fd, _)| *fd).collect();
        for fd in fds {
            each(self, fd);
        }
    }

    fn list(&mut self, fd: c_int) {
        if let Some(member) = self.members.get_mut(&fd)
            && !member.listed
            && !member.disarmed
        {
            member.listed = true;
            self.ready.push_back(fd);
        }
    }

    fn hang_bell(&mut self) {
        if self.bell.is_some() {
            return;
        }
        let Some(bell) = sys::eventfd() else { return };
        if kernel(self.epfd, libc::EPOLL_CTL_ADD, bell, IN, BELL).is_err() {
            sys::close(bell);
            return;
        }
        table::own(bell);
        self.bell = Some(bell);
    }

    fn ring_if_due(&mut self, waited: bool) {
        if self.nested && !self.rung {
            self.prune();
        }
        if (waited || self.nested)
            && !self.rung
            && !self.ready.is_empty()
            && let Some(bell) = self.bell
        {
            let one = 1u64.to_ne_bytes();
            // SAFETY: the buffer has eight bytes.
            self.rung = unsafe { real::write(bell, one.as_ptr().cast(), one.len()) } == 8;
        }
    }

    /// Removes streams without events from the list. This is needed for a set that another set or poll waits for: with such a
    /// stream in its list, the set would be reported as readable although it has no event.
    fn prune(&mut self) {
        let (members, ready) = (&mut self.members, &mut self.ready);
        ready.retain(|fd| {
            let Some(m) = members.get_mut(fd) else {
                return false;
            };
            let waits = !m.gone && !m.disarmed && m.sock.mode() == Mode::Up;
            if waits && m.inherited && !m.sock.is_used_here() {
                m.listed = m.unused(0) != 0;
                return m.listed;
            }
            m.listed = waits
                && m.sock.is_ours(*fd)
                && to_epoll(m.sock.process_for(*fd, 0, 0).0) & (m.events | ERR | HUP) != 0;
            m.listed
        });
    }

    fn listen(&mut self) {
        if let Some(bell) = self.bell {
            let mut count = [0u8; 8];
            // SAFETY: the buffer has eight bytes.
            let _ = unsafe { real::read(bell, count.as_mut_ptr().cast(), count.len()) };
            self.rung = false;
        }
        // The bell of a nested set stays readable while streams are listed.
        self.ring_if_due(false);
    }

    /// Makes the bell unreadable if the list is empty.
    fn quiet(&mut self) {
        if self.rung && self.ready.is_empty() {
            self.listen();
        }
    }
}

fn put(events: &mut [epoll_event], n: &mut usize, event: epoll_event) {
    if let Some(place) = events.get_mut(*n) {
        *place = event;
    }
    *n += 1;
}

fn to_poll(events: u32) -> i16 {
    (events & 0x3fff) as i16
}

fn to_epoll(events: i16) -> u32 {
    u32::from(events as u16)
}

impl Carrier {
    /// Returns the events for the kernel's set when the program waits for `wanted`. `before` contains the events that the kernel's
    /// set has already, and is `None` if there are none or they must not stay. Its `IN` and `RDHUP` are kept, which saves system
    /// calls.
    fn asked(self, wanted: u32, before: Option<u32>) -> u32 {
        let mut exact = wanted & !(IN | OUT) | to_epoll(self.events) & (IN | OUT);
        if wanted & OUT != 0 {
            // Credit arrives as bytes of the carrier.
            exact |= IN;
        }
        if wanted & EXACT != 0 {
            return exact;
        }
        // A stream becomes writable without an event of the kernel, unless bytes wait for the carrier.
        if !self.has_rest {
            exact &= !OUT;
        }
        match before {
            Some(before) if before & EXACT == 0 => exact | before & (IN | RDHUP),
            _ => exact,
        }
    }
}

/// Returns the events of the carrier that can cause the events `wanted` of the stream.
pub fn for_carrier(wanted: u32) -> i16 {
    to_poll(wanted & (IN | OUT | RDHUP | PRI | 0x3c0))
}

fn kernel(epfd: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> Result<(), c_int> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: `event` outlives the call.
    let r = unsafe { real::epoll_ctl(epfd, op, fd, &raw mut event) };
    if r < 0 { Err(sys::errno()) } else { Ok(()) }
}
