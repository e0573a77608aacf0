//! Waiting for an event descriptor. The waiting thread also runs the engine's transport work.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use crate::ffi::or;

/// Waits until a descriptor is readable. Returns false if a signal handler ran that was installed without `SA_RESTART`: the caller
/// fails with EINTR.
///
/// A true result may be spurious, so the caller tries again. The second half waits in `poll(2)` of the C library, which is a
/// cancellation point: no lock is held there, and nothing has to be undone.
pub(crate) fn block_on(fd: c_int) -> bool {
    let Ok(engine) = anywarp_engine::engine::engine() else {
        return poll(fd, 100) >= 0;
    };
    // SAFETY: the descriptor belongs to a channel that the caller keeps alive.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    // The closure makes no system call that is a cancellation point.
    let worked = or("waiting for an event", false, || {
        Ok(engine.work_until_readable(borrowed).is_ok())
    });
    if !worked {
        return false;
    }
    if poll(fd, 0) == 0 {
        engine.hand_over();
        return poll(fd, -1) >= 0 || !anywarp_engine::sys::thread::handlers_interrupt();
    }
    true
}

/// Calls `poll(2)` for one descriptor.
fn poll(fd: c_int, timeout: c_int) -> c_int {
    let mut fds = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the list has one valid element.
    unsafe { libc::poll(&raw mut fds, 1, timeout) }
}
