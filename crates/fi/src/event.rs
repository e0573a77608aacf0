//! Descriptors that a program can wait for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The descriptors of a completion queue or event queue: an epoll set that the program waits for. The set contains an eventfd that this
/// library makes readable, a timer, and for a completion queue the descriptor of the device's events.
#[derive(Debug)]
pub struct Wait {
    set: i32,
    event: i32,
    timer: i32,
    /// Whether the timer may make the set readable.
    is_timed: AtomicBool,
}

impl Wait {
    /// Returns a set that is readable while its eventfd or `device` is readable. Returns `None` if the kernel refuses a
    /// descriptor.
    pub fn new(device: i32) -> Option<Self> {
        Self::of(Some(device))
    }

    /// Returns a set that is readable while its eventfd is readable. Returns `None` if the kernel refuses a descriptor.
    pub fn alone() -> Option<Self> {
        Self::of(None)
    }

    fn of(device: Option<i32>) -> Option<Self> {
        // SAFETY: only the entries of the set are passed, which are copied; the descriptors are new.
        unsafe {
            let event = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
            let timer = libc::timerfd_create(libc::CLOCK_MONOTONIC, flags);
            let made = Self {
                set,
                event,
                timer,
                is_timed: AtomicBool::new(false),
            };
            if event < 0 || set < 0 || timer < 0 {
                return None;
            }
            for fd in [event, timer].into_iter().chain(device) {
                let mut entry = libc::epoll_event {
                    events: libc::EPOLLIN as u32,
                    u64: 0,
                };
                if libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &raw mut entry) != 0 {
                    return None;
                }
            }
            Some(made)
        }
    }

    /// Returns the descriptor to wait for.
    pub fn fd(&self) -> i32 {
        self.set
    }

    /// Returns the descriptor that [`raise`] makes readable.
    pub fn event(&self) -> i32 {
        self.event
    }

    /// Makes the eventfd and the timer unreadable. The set stays readable while the device's descriptor is.
    pub fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: eight bytes are written to a variable of that size.
        unsafe { libc::read(self.event, (&raw mut count).cast(), 8) };
        if self.is_timed.swap(false, Ordering::Relaxed) {
            self.set_timer(Duration::ZERO);
        }
    }

    /// Makes the set readable after a time, unless [`Self::clear`] is called before.
    pub fn wake_after(&self, time: Duration) {
        self.is_timed.store(true, Ordering::Relaxed);
        self.set_timer(time);
    }

    /// Sets the timer, which is then not readable. Zero switches it off.
    fn set_timer(&self, time: Duration) {
        // SAFETY: all-zero is a valid value; the time is read during the call.
        unsafe {
            let mut after: libc::itimerspec = std::mem::zeroed();
            after.it_value.tv_sec = libc::time_t::try_from(time.as_secs()).unwrap_or(1);
            after.it_value.tv_nsec = time.subsec_nanos().into();
            libc::timerfd_settime(self.timer, 0, &raw const after, std::ptr::null_mut());
        }
    }

    /// Waits until the set is readable, the limit has passed or a signal arrives. `None` waits without a limit.
    pub fn wait(&self, limit: Option<Duration>) {
        let mut fd = libc::pollfd {
            fd: self.set,
            events: libc::POLLIN,
            revents: 0,
        };
        let ms = limit.map_or(-1, |limit| {
            i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        // SAFETY: the list has one entry.
        unsafe { libc::poll(&raw mut fd, 1, ms) };
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        for fd in [self.set, self.event, self.timer] {
            if fd >= 0 {
                // SAFETY: the descriptor belongs to this value.
                unsafe { libc::close(fd) };
            }
        }
    }
}

/// Makes an eventfd readable; see [`Wait::event`].
pub fn raise(event: i32) {
    let one = 1_u64;
    // SAFETY: eight bytes are read from a variable of that size.
    unsafe { libc::write(event, (&raw const one).cast(), 8) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(wait: &Wait) -> bool {
        let mut fd = libc::pollfd {
            fd: wait.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the list has one entry.
        unsafe { libc::poll(&raw mut fd, 1, 0) == 1 }
    }

    #[test]
    fn a_timer_makes_the_set_readable_until_it_is_cleared() {
        let wait = Wait::alone().unwrap();
        wait.wake_after(Duration::from_millis(5));
        assert!(!is_readable(&wait));
        wait.wait(Some(Duration::from_secs(10)));
        assert!(is_readable(&wait));
        wait.clear();
        assert!(!is_readable(&wait));
        wait.wake_after(Duration::from_millis(5));
        wait.clear();
        wait.wait(Some(Duration::from_millis(20)));
        assert!(!is_readable(&wait));
    }

    #[test]
    fn an_event_makes_the_set_readable_until_it_is_cleared() {
        // SAFETY: no memory is passed.
        let device = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) };
        let wait = Wait::new(device).unwrap();
        assert!(!is_readable(&wait));
        raise(wait.event());
        assert!(is_readable(&wait));
        wait.clear();
        assert!(!is_readable(&wait));
        raise(device);
        assert!(is_readable(&wait));
        wait.wait(None);
    }
}
