//! Channels: queues of events behind a descriptor that is readable while events wait.
//!
//! Completion channels, asynchronous events and connection manager events all work like this. The descriptor is the
//! reading end of a pipe with a byte for each event, so `poll`, `select` and `epoll` on it work. Like the descriptors of
//! the kernel's drivers, and unlike an eventfd, it is never writable: if it were, a program that waits until it is
//! readable or writable would spin.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::reserve;

/// If this number of consecutive events were in the queue when the program called for them, the program is assumed to
/// wait for the descriptor itself (`poll`, `epoll_wait`). A smaller number may be due to chance.
const UNWAITED: u8 = 3;

/// A queue of events with a descriptor.
#[derive(Debug)]
pub struct Channel<T> {
    fd: EngineFd,
    writer: EngineFd,
    queue: Mutex<Queue<T>>,
    /// How many of the last consecutive events were in the queue when the program called for them, up to
    /// [`UNWAITED`].
    unwaited: AtomicU8,
}

#[derive(Debug)]
struct Queue<T> {
    events: VecDeque<T>,
    /// Bytes in the pipe: one for each event, up to the capacity of the pipe.
    bytes: usize,
}

impl<T> Channel<T> {
    /// An empty channel.
    pub fn new() -> io::Result<Self> {
        if reserve::is_scarce() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let (fd, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        // A full pipe must not block the engine, so the writing end is non-blocking. Only the program changes the flag of
        // the reading end.
        let flags = rustix::fs::fcntl_getfl(&writer)?;
        rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self {
            fd: EngineFd::new(fd),
            writer: EngineFd::new(writer),
            queue: Mutex::new(
                Rank::Events,
                Queue {
                    events: VecDeque::new(),
                    bytes: 0,
                },
            ),
            unwaited: AtomicU8::new(0),
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock()
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
        queue.events.push_back(event);
        // Queue and pipe change together under the lock.
        if rustix::io::write(self.writer.get(), &[0]).is_ok() {
            queue.bytes += 1;
        }
    }

    /// Takes the oldest event.
    pub fn pop(&self) -> Option<T> {
        self.pop_with(|_| ()).map(|(event, ())| event)
    }

    /// Takes the oldest event, and calls `count` with it under the lock, so that [`Self::purge`] happens before or
    /// after both.
    pub fn pop_with<R>(&self, count: impl FnOnce(&T) -> R) -> Option<(T, R)> {
        let mut queue = self.queue();
        let event = queue.events.pop_front()?;
        self.count_down(&mut queue);
        let counted = count(&event);
        Some((event, counted))
    }

    /// Drops the events for which `gone` returns true: those of an object that is being destroyed.
    pub fn purge(&self, mut gone: impl FnMut(&T) -> bool) {
        let mut queue = self.queue();
        queue.events.retain(|e| !gone(e));
        self.count_down(&mut queue);
    }

    /// Reads the bytes of removed events from the pipe. They are in the pipe, so the read does not block.
    fn count_down(&self, queue: &mut Queue<T>) {
        let mut bytes = [0_u8; 64];
        while queue.bytes > queue.events.len() {
            let many = (queue.bytes - queue.events.len()).min(bytes.len());
            let Some(part) = bytes.get_mut(..many) else {
                return;
            };
            match rustix::io::read(self.fd.get(), part) {
                Ok(read) if read > 0 => queue.bytes -= read.min(queue.bytes),
                _ => return,
            }
        }
    }

    /// Notes whether the program had to wait in the call that took the last event.
    pub fn note_wait(&self, waited: bool) {
        let before = self.unwaited.load(Ordering::Relaxed);
        let now = if waited { 0 } else { UNWAITED.min(before + 1) };
        if now != before {
            self.unwaited.store(now, Ordering::Relaxed);
        }
    }

    /// Whether the program is assumed to wait for the descriptor itself, in `poll` or `epoll_wait`, and not in a call of
    /// this library.
    pub fn is_polled_by_program(&self) -> bool {
        self.unwaited.load(Ordering::Relaxed) == UNWAITED
    }

    /// Whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.queue().events.is_empty()
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
    fn more_events_than_a_pipe_holds_are_all_there() {
        let c = Channel::new().unwrap();
        for n in 0..70_000 {
            c.push(n);
        }
        for n in 0..70_000 {
            assert!(readable(&c), "{n}");
            assert_eq!(c.pop(), Some(n));
        }
        assert!(!readable(&c));
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
