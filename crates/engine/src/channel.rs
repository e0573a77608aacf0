//! Channels: queues of events behind a descriptor that is readable while events wait.
//!
//! Completion channels, asynchronous events and connection manager events all work like this. The descriptor is an
//! eventfd that counts, so `poll`, `select` and `epoll` on it work, and a reader that blocks never sees an end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::fd::EngineFd;
use crate::reserve;

/// A queue of events with a descriptor.
#[derive(Debug)]
pub struct Channel<T> {
    fd: EngineFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T> Channel<T> {
    /// An empty channel.
    pub fn new() -> io::Result<Self> {
        if reserve::is_scarce() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let fd = EngineFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?);
        Ok(Self {
            fd,
            queue: Mutex::new(VecDeque::new()),
        })
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor's number, for the application.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.raw()
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.get()
    }

    /// Adds an event.
    pub fn push(&self, event: T) {
        let mut queue = self.queue();
        queue.push_back(event);
        // The counter follows the queue: both change under the lock. It cannot overflow: it is 64 bits wide.
        let _ = rustix::io::write(self.fd.get(), &1_u64.to_ne_bytes());
    }

    /// Takes the oldest event.
    pub fn pop(&self) -> Option<T> {
        self.pop_with(|_| ()).map(|(event, ())| event)
    }

    /// Takes the oldest event, and calls `count` with it under the lock, so that [`Self::purge`] happens before or after both.
    pub fn pop_with<R>(&self, count: impl FnOnce(&T) -> R) -> Option<(T, R)> {
        let mut queue = self.queue();
        let event = queue.pop_front()?;
        self.count_down();
        let counted = count(&event);
        Some((event, counted))
    }

    /// Drops the events for which `gone` is true: those of an object that is being destroyed.
    pub fn purge(&self, mut gone: impl FnMut(&T) -> bool) {
        let mut queue = self.queue();
        let before = queue.len();
        queue.retain(|e| !gone(e));
        for _ in queue.len()..before {
            self.count_down();
        }
    }

    /// Takes one off the counter, which is above zero because an event was in the queue.
    fn count_down(&self) {
        let mut one = [0_u8; 8];
        let _ = rustix::io::read(self.fd.get(), &mut one);
    }

    /// Whether events wait.
    pub fn is_empty(&self) -> bool {
        self.queue().is_empty()
    }

    /// Whether the application made the descriptor non-blocking.
    pub fn is_nonblocking(&self) -> bool {
        crate::sys::socket::is_nonblocking(self.fd.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(c: &Channel<u32>) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            c.fd.get(),
            rustix::event::PollFlags::IN,
        )];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_descriptor_is_readable_exactly_while_events_wait() {
        let c = Channel::new().unwrap();
        assert!(!readable(&c));
        c.push(1);
        c.push(2);
        c.push(3);
        assert!(readable(&c));
        c.purge(|e| *e == 2);
        assert_eq!(c.pop(), Some(1));
        assert!(readable(&c));
        assert_eq!(c.pop(), Some(3));
        assert!(!readable(&c));
        assert_eq!(c.pop(), None);
    }
}
