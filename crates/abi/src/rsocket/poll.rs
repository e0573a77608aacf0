//! Waiting for many sockets and other descriptors: `rpoll`, `rselect`.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anywarp_engine::engine::Engine;

use super::{Kind, RegisteredWaker, Socket, device, find, wait};
use crate::ffi::os_errno;

/// The events that `poll(2)` reports even if they are not requested.
const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;

impl Socket {
    /// Returns the events for a caller that requests `events`. With `arm`, first requests a notification of the next completion.
    fn readiness(&self, events: i16, arm: bool) -> i16 {
        let ready = match &self.kind {
            Kind::Stream(stream) => {
                let mut stream = stream.lock();
                if arm {
                    stream.arm();
                }
                stream.step(self);
                stream.readiness()
            }
            Kind::Datagrams(state) => {
                let mut state = state.lock();
                if arm {
                    state.arm();
                }
                state.step(self);
                state.readiness()
            }
        };
        ready & (events | ALWAYS)
    }
}

/// The descriptors of a call, with sockets separated from other descriptors.
struct Set<'a> {
    fds: &'a mut [libc::pollfd],
    sockets: Vec<(usize, Arc<Socket>)>,
    /// The indexes in `fds` of the descriptors that are not sockets.
    places: Vec<usize>,
    /// The descriptors that are not sockets, in the order of `places`.
    others: Vec<libc::pollfd>,
}

impl<'a> Set<'a> {
    fn new(fds: &'a mut [libc::pollfd]) -> Self {
        let mut set = Self {
            sockets: Vec::new(),
            places: Vec::new(),
            others: Vec::new(),
            fds,
        };
        for (i, fd) in set.fds.iter_mut().enumerate() {
            fd.revents = 0;
            match find(fd.fd) {
                Ok(socket) => set.sockets.push((i, socket)),
                Err(_) => {
                    set.places.push(i);
                    set.others.push(*fd);
                }
            }
        }
        set
    }

    /// Updates the events of all descriptors. Returns the number of ready descriptors.
    fn look(&mut self, arm: bool) -> Result<usize, c_int> {
        for (i, socket) in &self.sockets {
            if let Some(fd) = self.fds.get_mut(*i) {
                fd.revents = socket.readiness(fd.events, arm);
            }
        }
        if !self.others.is_empty() {
            match wait::poll(&mut self.others, Some(Duration::ZERO)) {
                // The next call polls them again.
                Err(libc::EINTR) => {}
                polled => polled?,
            }
            self.show_others();
        }
        Ok(self.fds.iter().filter(|fd| fd.revents != 0).count())
    }

    fn show_others(&mut self) {
        for (i, other) in self.places.iter().zip(&self.others) {
            if let Some(fd) = self.fds.get_mut(*i) {
                fd.revents = other.revents;
            }
        }
    }
}

/// `rpoll`: waits until a descriptor is ready, at most for `time`. Returns the number of ready descriptors.
pub(super) fn poll(fds: &mut [libc::pollfd], time: Option<Duration>) -> Result<usize, c_int> {
    let mut set = Set::new(fds);
    if set.sockets.is_empty() {
        wait::poll(set.fds, time)?;
        return Ok(set.fds.iter().filter(|fd| fd.revents != 0).count());
    }
    let engine: &Engine = device()?.context.engine;
    for pass in [false, true] {
        if pass {
            engine.on_idle_poll();
        }
        let n = set.look(false)?;
        if n > 0 {
            return Ok(n);
        }
    }
    if time == Some(Duration::ZERO) {
        return Ok(0);
    }
    let until = time.and_then(|t| Instant::now().checked_add(t));
    let waker = wait::waker().map_err(|e| os_errno(&e))?;
    let sockets: Vec<Arc<Socket>> = set.sockets.iter().map(|(_, s)| Arc::clone(s)).collect();
    let _registered: Vec<RegisteredWaker<'_>> = sockets
        .iter()
        .map(|socket| RegisteredWaker::at(&socket.wakers, &waker))
        .collect();
    loop {
        while waker.pop().is_some() {}
        let n = set.look(true)?;
        if n > 0 {
            return Ok(n);
        }
        if until.is_some_and(|t| t <= Instant::now()) {
            return Ok(0);
        }
        wait::wait(engine, &waker, &mut set.others, until)?;
    }
}

/// A descriptor in the three sets of `rselect`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) fd: c_int,
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) except: bool,
}

/// `rselect`: returns the requested descriptors that are ready, with the sets in which to report them.
pub(super) fn select(asked: &[Asked], time: Option<Duration>) -> Result<Vec<Asked>, c_int> {
    let bit = |on: bool, bits: i16| if on { bits } else { 0 };
    let mut fds: Vec<libc::pollfd> = asked
        .iter()
        .map(|a| libc::pollfd {
            fd: a.fd,
            events: bit(a.read, libc::POLLIN)
                | bit(a.write, libc::POLLOUT)
                | bit(a.except, libc::POLLPRI),
            revents: 0,
        })
        .collect();
    poll(&mut fds, time)?;
    if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        return Err(libc::EBADF);
    }
    let has = |fd: &libc::pollfd, bits: i16| fd.revents & bits != 0;
    let ready = asked.iter().zip(&fds).map(|(a, fd)| Asked {
        fd: a.fd,
        read: a.read && has(fd, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
        write: a.write && has(fd, libc::POLLOUT | libc::POLLERR),
        except: a.except && has(fd, libc::POLLPRI),
    });
    Ok(ready.filter(|a| a.read || a.write || a.except).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets the limit of open files, which also limits the number of descriptors in one `poll` call. Returns the old limit.
    fn limit(files: libc::rlim_t) -> libc::rlim_t {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` is a local.
        let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        assert_eq!(got, 0);
        let before = std::mem::replace(&mut limit.rlim_cur, files);
        // SAFETY: `limit` is a local.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(set, 0);
        before
    }

    #[test]
    fn arguments_that_poll_refuses_are_refused() {
        let ignored = libc::pollfd {
            fd: -1,
            events: 0,
            revents: 0,
        };
        let mut fds = vec![ignored; 513];
        // The limit applies to the whole process. The other tests have fewer open files.
        let before = limit(512);
        let refused = poll(&mut fds, None);
        limit(before);
        assert_eq!(refused, Err(libc::EINVAL));
        assert_eq!(poll(&mut fds, Some(Duration::ZERO)), Ok(0));
    }
}
