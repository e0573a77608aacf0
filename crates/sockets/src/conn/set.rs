//! An epoll set of the program, as far as upgraded streams are in it.
//!
//! The kernel's set has the carriers, with the program's data. What the kernel reports about a carrier is processed, and
//! the stream's own events are reported in its place. Streams of which something can be reported although the kernel
//! reports nothing (bytes that were taken from the carrier, credit) are in a list that is looked at first.

use crate::conn::sock::{Mode, Sock, UNDECIDED};
use crate::conn::table;
use crate::real;
use crate::sys;
use libc::{c_int, epoll_event};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const PRI: u32 = libc::EPOLLPRI as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// What the kernel reports about a set's bell.
const BELL: u64 = 0x616e_7977_6172_7021;

/// A set.
#[derive(Debug)]
pub struct Set {
    inner: Mutex<Inner>,
    /// Connections in it that are not plain.
    members: AtomicUsize,
    /// Threads that wait in the kernel.
    waiters: AtomicUsize,
}

#[derive(Debug, Default)]
struct Inner {
    epfd: c_int,
    members: HashMap<c_int, Member>,
    by_data: HashMap<u64, Vec<c_int>>,
    ready: VecDeque<c_int>,
    /// An eventfd in the kernel's set, written when a stream becomes ready by another way than the kernel's report.
    bell: Option<c_int>,
    rung: bool,
    /// A set that is itself waited for shows that it is ready by its bell.
    nested: bool,
}

#[derive(Debug)]
struct Member {
    sock: &'static Sock,
    /// What the program asked for.
    events: u32,
    data: u64,
    /// What the kernel was asked for.
    asked: u32,
    /// It is in the list.
    listed: bool,
    /// One-shot, and reported.
    disarmed: bool,
}

static FREE: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());

impl Set {
    /// The set of a new epoll descriptor.
    pub fn new(epfd: c_int) -> &'static Self {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let set = free.unwrap_or_else(|| {
            Box::leak(Box::new(Self {
                inner: Mutex::new(Inner::default()),
                members: AtomicUsize::new(0),
                waiters: AtomicUsize::new(0),
            }))
        });
        set.lock().epfd = epfd;
        set
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has connections that are not plain.
    pub fn is_used(&self) -> bool {
        self.members.load(Ordering::Acquire) > 0
    }

    /// The program closed the descriptor.
    pub fn closing(&'static self) {
        let mut inner = self.lock();
        if let Some(bell) = inner.bell.take() {
            sys::close(bell);
        }
        let members = std::mem::take(&mut *inner).members;
        self.members.store(0, Ordering::Release);
        drop(inner);
        for member in members.into_values() {
            member.sock.left(self);
        }
        FREE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self);
    }

    /// In the child of a fork: whether it can be used.
    pub fn after_fork(&self) -> bool {
        self.waiters.store(0, Ordering::Relaxed);
        self.inner.try_lock().is_ok()
    }

    /// The set is waited for by another set, or by poll.
    pub fn nest(&self) {
        let mut inner = self.lock();
        inner.nested = true;
        inner.hang_bell();
        inner.ring_if_due(true);
    }

    /// `epoll_ctl` for a connection that is not plain.
    ///
    /// # Errors
    /// errno of the kernel.
    pub fn control(
        &'static self,
        op: c_int,
        fd: c_int,
        event: Option<epoll_event>,
        sock: &'static Sock,
    ) -> Result<(), c_int> {
        let mut inner = self.lock();
        let (events, data) = event.map_or((0, 0), |e| (e.events, e.u64));
        if op == libc::EPOLL_CTL_DEL {
            let result = kernel(inner.epfd, op, fd, 0, 0);
            if result.is_ok() {
                self.remove(&mut inner, fd);
                drop(inner);
                sock.left(self);
            }
            return result;
        }
        let asked = asked(events, sock);
        kernel(inner.epfd, op, fd, asked, data)?;
        if op == libc::EPOLL_CTL_ADD {
            self.remove(&mut inner, fd);
            self.members.fetch_add(1, Ordering::AcqRel);
        } else if let Some(old) = inner.members.get(&fd).map(|m| m.data) {
            inner.unindex(old, fd);
        } else {
            // It was added before the library knew of the set.
            self.members.fetch_add(1, Ordering::AcqRel);
        }
        inner.members.insert(
            fd,
            Member {
                sock,
                events,
                data,
                asked,
                listed: false,
                disarmed: false,
            },
        );
        inner.by_data.entry(data).or_default().push(fd);
        inner.hang_bell();
        inner.list(fd);
        inner.ring_if_due(self.waiters.load(Ordering::Acquire) > 0);
        drop(inner);
        sock.joined(self);
        Ok(())
    }

    fn remove(&self, inner: &mut Inner, fd: c_int) {
        if let Some(member) = inner.members.remove(&fd) {
            inner.unindex(member.data, fd);
            self.members.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The connection `fd` is plain, or closed.
    pub fn forget(&self, fd: c_int) {
        let mut inner = self.lock();
        if let Some(member) = inner.members.get(&fd)
            && member.sock.mode() == Mode::Plain
            && member.asked != member.events
        {
            let (events, data) = (member.events, member.data);
            let _ = kernel(inner.epfd, libc::EPOLL_CTL_MOD, fd, events, data);
        }
        self.remove(&mut inner, fd);
    }

    /// Something about the connection changed.
    pub fn mark(&self, sock: &Sock) {
        let mut inner = self.lock();
        let fds: Vec<c_int> = inner
            .members
            .iter()
            .filter(|(_, m)| std::ptr::eq(m.sock, sock))
            .map(|(fd, _)| *fd)
            .collect();
        for fd in fds {
            inner.list(fd);
        }
        inner.ring_if_due(self.waiters.load(Ordering::Acquire) > 0);
    }

    /// What can be reported without the kernel; how many events were written.
    pub fn report_listed(&self, out: &mut [epoll_event]) -> usize {
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
            if let Some(event) = inner.event_of(fd, 0) {
                if let Some(place) = out.get_mut(n) {
                    *place = event;
                }
                n += 1;
            }
        }
        inner.quiet();
        n
    }

    /// Decides about connections of which something is reported. The set is not locked meanwhile: one that becomes plain
    /// leaves it.
    fn decide(&self, events: &[epoll_event]) {
        let mut found = Vec::new();
        let inner = self.lock();
        for event in events {
            let data = event.u64;
            for fd in inner.by_data.get(&data).into_iter().flatten() {
                if let Some(member) = inner.members.get(fd)
                    && matches!(member.sock.mode(), Mode::Accepted | Mode::Connecting)
                {
                    found.push((*fd, member.sock));
                }
            }
        }
        drop(inner);
        for (fd, sock) in found {
            sock.decide(fd, false);
        }
    }

    /// Replaces what the kernel reported; how many events are left.
    pub fn report(&self, events: &mut [epoll_event]) -> usize {
        if UNDECIDED.load(Ordering::Relaxed) > 0 {
            self.decide(events);
        }
        let mut inner = self.lock();
        let mut n = 0;
        for i in 0..events.len() {
            let Some(event) = events.get(i).copied() else {
                break;
            };
            let data = event.u64;
            let mut out = None;
            if data == BELL && inner.bell.is_some() {
                inner.listen();
            } else if let Some(fds) = inner.by_data.get(&data) {
                for fd in fds.clone() {
                    let event = inner.event_of(fd, event.events);
                    out = match (out, event) {
                        (None, event) => event,
                        (some, None) => some,
                        (Some(a), Some(b)) => Some(epoll_event {
                            events: a.events | b.events,
                            u64: data,
                        }),
                    };
                }
            } else {
                out = Some(event);
            }
            if let Some(event) = out {
                if let Some(place) = events.get_mut(n) {
                    *place = event;
                }
                n += 1;
            }
        }
        n
    }

    /// A thread waits in the kernel. False if something can be reported already.
    pub fn enter(&self) -> bool {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        if self.lock().ready.is_empty() {
            return true;
        }
        self.waiters.fetch_sub(1, Ordering::AcqRel);
        false
    }

    /// It waits no more.
    pub fn leave(&self) {
        self.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Inner {
    fn unindex(&mut self, data: u64, fd: c_int) {
        if let Some(fds) = self.by_data.get_mut(&data) {
            fds.retain(|f| *f != fd);
            if fds.is_empty() {
                self.by_data.remove(&data);
            }
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
        // SAFETY: no pointer.
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return;
        }
        // The number is one that programs do not expect to be free.
        let high = sys::copy_high(bell);
        if high.is_some() {
            sys::close(bell);
        }
        let bell = high.unwrap_or(bell);
        if kernel(self.epfd, libc::EPOLL_CTL_ADD, bell, IN, BELL).is_err() {
            sys::close(bell);
            return;
        }
        self.bell = Some(bell);
    }

    fn ring_if_due(&mut self, waited: bool) {
        if (waited || self.nested)
            && !self.rung
            && !self.ready.is_empty()
            && let Some(bell) = self.bell
        {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes.
            self.rung = unsafe { real::write(bell, one.as_ptr().cast(), one.len()) } == 8;
        }
    }

    fn listen(&mut self) {
        if let Some(bell) = self.bell {
            let mut count = [0u8; 8];
            // SAFETY: eight bytes.
            let _ = unsafe { real::read(bell, count.as_mut_ptr().cast(), count.len()) };
            self.rung = false;
        }
        // A set that is waited for goes on to ring while streams are listed.
        self.ring_if_due(false);
    }

    /// Ends the ringing when nothing is listed.
    fn quiet(&mut self) {
        if self.rung && self.ready.is_empty() {
            self.listen();
        }
    }

    /// The event to report about `fd`, of which the kernel reported `found` (0: nothing); and what is asked of it next.
    fn event_of(&mut self, fd: c_int, found: u32) -> Option<epoll_event> {
        let epfd = self.epfd;
        let (sock, wanted, data, asked_now, disarmed) = {
            let m = self.members.get(&fd)?;
            (m.sock, m.events, m.data, m.asked, m.disarmed)
        };
        if disarmed {
            return None;
        }
        if sock.mode() != Mode::Up || table::sock(fd).is_none() {
            return (found != 0).then_some(epoll_event {
                events: found,
                u64: data,
            });
        }
        if !sock.is_ours(fd) {
            return (found != 0).then_some(epoll_event {
                events: ERR | HUP,
                u64: data,
            });
        }
        let ready = to_epoll(sock.process(fd, to_poll(found)));
        let mut report = ready & (wanted | ERR | HUP);
        let normal = libc::EPOLLRDNORM as u32 | libc::EPOLLWRNORM as u32;
        report &= !(normal & !wanted);
        let asked_next = asked(wanted, sock);
        let member = self.members.get_mut(&fd)?;
        member.asked = asked_next;
        if report == 0 {
            // The kernel disarms a one-shot descriptor with its report, also one that is not passed on.
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
            // Level-triggered: it is looked at again before the next wait.
            if wanted & ET == 0 && !member.listed {
                member.listed = true;
                self.ready.push_back(fd);
            }
        }
        Some(epoll_event {
            events: report,
            u64: data,
        })
    }
}

fn to_poll(events: u32) -> i16 {
    (events & 0x3fff) as i16
}

fn to_epoll(events: i16) -> u32 {
    u32::from(events as u16)
}

/// What the kernel is asked for when the program asks for `events`.
fn asked(events: u32, sock: &Sock) -> u32 {
    if sock.mode() != Mode::Up {
        return events;
    }
    let Some((carrier, _)) =
        sock.with(|s| s.carrier_events(to_poll(events & (IN | OUT | RDHUP | PRI | 0x3c0))))
    else {
        return events;
    };
    events & !(IN | OUT) | to_epoll(carrier) & (IN | OUT)
}

fn kernel(epfd: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> Result<(), c_int> {
    let mut event = epoll_event { events, u64: data };
    // SAFETY: one event.
    let r = unsafe { real::epoll_ctl(epfd, op, fd, &raw mut event) };
    if r < 0 { Err(sys::errno()) } else { Ok(()) }
}
