//! `repoll_create`, `repoll_ctl`, `repoll_wait`: a set of sockets and other descriptors that persists between waits. Added in
//! rdma-core 65.
//!
//! Sets are level-triggered, whatever flags a program passes: each wait returns the descriptors that are ready, as many as the
//! program has room for, also if an earlier wait has returned them.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anywarp_core::lock::{Mutex, RwLock};
use anywarp_engine::channel::Channel;
use anywarp_engine::process::PerProcess;
use libc::epoll_event;

use super::poll;
use crate::entry;
use crate::ffi::os_errno;

/// The events that have the same numbers in `epoll_ctl(2)` and in `poll(2)`.
const EVENTS: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLPRI | libc::EPOLLRDHUP) as u32;

/// The most descriptors in one set.
const MEMBERS: usize = 1 << 20;

/// A descriptor of a set: the requested events, and the program's data that is returned with them.
#[derive(Debug, Clone, Copy)]
struct Member {
    fd: c_int,
    events: u32,
    data: u64,
}

#[derive(Debug)]
struct State {
    members: Vec<Member>,
    /// The descriptor at which the next search for events begins. It changes with each wait, so that a busy descriptor does
    /// not starve others.
    next: usize,
    /// Becomes readable when the set changes, which wakes all waiting threads. The set then gets a new channel.
    changed: Arc<Channel<()>>,
    waiting: usize,
}

/// A set.
#[derive(Debug)]
struct Set {
    /// A channel whose descriptor is the number of the set.
    number: Channel<()>,
    state: Mutex<State>,
}

fn table() -> &'static RwLock<HashMap<c_int, Arc<Set>>> {
    static TABLE: PerProcess<RwLock<HashMap<c_int, Arc<Set>>>> =
        PerProcess::new(|| RwLock::new(HashMap::new()));
    TABLE.get()
}

fn find(number: c_int) -> Result<Arc<Set>, c_int> {
    let table = table().read();
    table.get(&number).map(Arc::clone).ok_or(libc::EBADF)
}

/// `rclose` of a set. Wakes the threads that wait for the set; their calls fail.
pub(super) fn close(number: c_int) -> Result<(), c_int> {
    let mut table = table().write();
    let set = table.remove(&number).ok_or(libc::EBADF)?;
    drop(table);
    set.state.lock().changed.push(());
    Ok(())
}

fn create() -> Result<c_int, c_int> {
    let channel = || Channel::new().map_err(|e| os_errno(&e));
    let state = State {
        members: Vec::new(),
        next: 0,
        changed: Arc::new(channel()?),
        waiting: 0,
    };
    let set = Set {
        number: channel()?,
        state: Mutex::new(state),
    };
    let number = set.number.raw_fd();
    let mut table = table().write();
    table.insert(number, Arc::new(set));
    Ok(number)
}

fn control(number: c_int, op: c_int, fd: c_int, event: Option<epoll_event>) -> Result<(), c_int> {
    let set = find(number)?;
    if fd < 0 {
        return Err(libc::EBADF);
    }
    if fd == number {
        return Err(libc::EINVAL);
    }
    let mut state = set.state.lock();
    let at = state.members.iter().position(|m| m.fd == fd);
    match (op, at, event) {
        (libc::EPOLL_CTL_ADD, Some(_), _) => return Err(libc::EEXIST),
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None, _) => return Err(libc::ENOENT),
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _, None) => return Err(libc::EFAULT),
        (libc::EPOLL_CTL_ADD, ..) if state.members.len() >= MEMBERS => return Err(libc::ENOSPC),
        _ => {}
    }
    // This may fail for lack of descriptors, so it precedes the change.
    let fresh = (state.waiting > 0).then(Channel::new).transpose();
    let fresh = fresh.map_err(|e| os_errno(&e))?;
    match (op, at, event) {
        (libc::EPOLL_CTL_ADD, None, Some(event)) => state.members.push(Member {
            fd,
            events: event.events & EVENTS,
            data: event.u64,
        }),
        (libc::EPOLL_CTL_MOD, Some(at), Some(event)) => {
            if let Some(member) = state.members.get_mut(at) {
                (member.events, member.data) = (event.events & EVENTS, event.u64);
            }
        }
        (libc::EPOLL_CTL_DEL, Some(at), _) => {
            state.members.remove(at);
        }
        _ => return Err(libc::EINVAL),
    }
    if let Some(fresh) = fresh {
        let old = std::mem::replace(&mut state.changed, Arc::new(fresh));
        old.push(());
    }
    Ok(())
}

/// Keeps the calling thread counted in [`State::waiting`] until it is dropped.
struct Waiting<'a>(&'a Set);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

fn wait(number: c_int, events: &mut [epoll_event], time: Option<Duration>) -> Result<usize, c_int> {
    let until = time.and_then(|t| Instant::now().checked_add(t));
    // While this thread has the set, its descriptor stays open, so no other set gets the number.
    let set = find(number)?;
    loop {
        if !Arc::ptr_eq(&find(number)?, &set) {
            return Err(libc::EBADF);
        }
        let (members, changed, next) = {
            let mut state = set.state.lock();
            state.waiting += 1;
            (
                state.members.clone(),
                Arc::clone(&state.changed),
                state.next,
            )
        };
        let waiting = Waiting(&set);
        let ask = |fd, events: u32| libc::pollfd {
            fd,
            events: i16::try_from(events).unwrap_or(libc::POLLIN),
            revents: 0,
        };
        let mut fds: Vec<libc::pollfd> = members.iter().map(|m| ask(m.fd, m.events)).collect();
        fds.push(ask(changed.raw_fd(), libc::EPOLLIN as u32));
        poll::poll(
            &mut fds,
            until.map(|t| t.saturating_duration_since(Instant::now())),
        )?;
        drop(waiting);
        let is_changed = fds.pop().is_some_and(|fd| fd.revents != 0);
        let count = members.len().max(1);
        let in_turn = (0..members.len()).map(|i| (next + i) % count);
        let ready = in_turn.filter_map(|i| {
            let (member, fd) = (members.get(i)?, fds.get(i)?);
            (fd.revents != 0).then_some((i, member.data, fd.revents))
        });
        let mut found = 0;
        for (place, (i, data, revents)) in events.iter_mut().zip(ready) {
            *place = epoll_event {
                events: u32::from(revents.cast_unsigned()),
                u64: data,
            };
            found += 1;
            set.state.lock().next = i + 1;
        }
        if is_changed {
            // The events may belong to a descriptor that was removed from the set during the wait.
            continue;
        }
        if found > 0 || until.is_some_and(|t| t <= Instant::now()) {
            return Ok(found);
        }
    }
}

entry! {
    /// `repoll_create`: returns a descriptor, which the program closes by `rclose`.
    ///
    /// # Safety
    /// The function has no requirements.
    unsafe fn repoll_create(flags: c_int) -> c_int, minus_one, {
        if flags & !(libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
            return Err(libc::EINVAL);
        }
        create()
    }
}

entry! {
    /// `repoll_ctl`: like `epoll_ctl(2)`.
    ///
    /// # Safety
    /// `event` is null or valid.
    unsafe fn repoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int, minus_one, {
        // SAFETY: the pointer is null or valid (guaranteed by the caller); the structure is packed, so it is copied.
        let event = unsafe { event.as_ref() }.copied();
        control(epfd, op, fd, event).map(|()| 0)
    }
}

entry! {
    /// `repoll_wait`: like `epoll_wait(2)`.
    ///
    /// # Safety
    /// `events` has `max` elements.
    unsafe fn repoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int, minus_one, {
        let max = usize::try_from(max).ok().filter(|max| *max > 0).ok_or(libc::EINVAL)?;
        if events.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: the array has `max` elements that are not used elsewhere during the call (guaranteed by the caller).
        let events = unsafe { std::slice::from_raw_parts_mut(events, max) };
        let time = u64::try_from(timeout).ok().map(Duration::from_millis);
        wait(epfd, events, time).map(|n| c_int::try_from(n).unwrap_or(c_int::MAX))
    }
}
