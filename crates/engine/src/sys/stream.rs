//! Sends and receives on stream sockets, from and into registered user memory.

use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};

use anywarp_core::llp::mpa::frame::{Run, TxBatch};
use anywarp_core::verbs::mr::Pinned;
use smallvec::SmallVec;

use super::{Io, empty_msghdr, failed};
use crate::capture::{self, Direction};
use crate::mem::{PinnedPart, Unfilled, UserSlice};

/// Sends the bytes of `batch` from `skip` on.
// RFC 5044 §5.1 [mpa-align]: MSG_EOR ends the TCP segment after an aligned batch, so that the next FPDU
// begins a new segment.
pub fn send_batch(fd: BorrowedFd<'_>, batch: &TxBatch, skip: usize) -> Io {
    let record = if batch.is_aligned() { libc::MSG_EOR } else { 0 };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | record;
    if let Some(bytes) = batch.as_bytes() {
        return send_run(fd, bytes.get(skip..).unwrap_or(&[]), flags);
    }
    send_pieces(fd, batch, skip, flags)
}

/// Sends bytes.
pub(crate) fn send_bytes(fd: BorrowedFd<'_>, bytes: &[u8]) -> Io {
    send_run(fd, bytes, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
}

/// Sends the bytes of several slices.
pub(crate) fn send_slices(fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> Io {
    let mut iov: SmallVec<[libc::iovec; 16]> = { slices.iter() }
        .map(|slice| libc::iovec {
            iov_base: slice.as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        })
        .collect();
    // SAFETY: the vectors point into slices that are borrowed for the call.
    unsafe { send_vectors(fd, &mut iov, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
}

/// Sends bytes of a batch that are in one piece. `sendto` costs less than `sendmsg`.
fn send_run(fd: BorrowedFd<'_>, bytes: &[u8], flags: libc::c_int) -> Io {
    let seen = capture::begin();
    // SAFETY: `bytes` is borrowed for the call; no address is named.
    let n = unsafe {
        libc::syscall(
            libc::SYS_sendto,
            fd.as_raw_fd(),
            bytes.as_ptr(),
            bytes.len(),
            flags,
            std::ptr::null::<libc::sockaddr>(),
            0,
        )
    };
    let Ok(n) = usize::try_from(n) else {
        return failed();
    };
    if let Some(at) = seen {
        capture::stream(fd, at, Direction::Out, bytes.get(..n).unwrap_or(bytes));
    }
    Io::Done(n)
}

/// Sends the pieces of a batch, some of which are in user memory.
fn send_pieces(fd: BorrowedFd<'_>, batch: &TxBatch, skip: usize, flags: libc::c_int) -> Io {
    let run = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut pins: SmallVec<[Pinned<'_>; 8]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 16]> = SmallVec::new();
    for part in batch.rest(skip) {
        match part {
            Run::Own(bytes) => iov.push(run(bytes)),
            Run::User { place, from, len } => {
                let Some(pinned) = place.pin() else {
                    return Io::Invalidated;
                };
                iov.push(UserSlice::new(&pinned, from as u64, len as u64).iovec());
                pins.push(pinned);
            }
        }
        if iov.len() >= 512 {
            break;
        }
    }
    // SAFETY: the vectors point into `batch`, which is borrowed, or into pinned regions.
    let sent = unsafe { send_vectors(fd, &mut iov, flags) };
    drop(pins);
    sent
}

/// Sends the bytes of the vectors.
///
/// # Safety
/// The kernel may read the memory of the vectors.
unsafe fn send_vectors(fd: BorrowedFd<'_>, iov: &mut [libc::iovec], flags: libc::c_int) -> Io {
    let seen = capture::begin();
    if iov.is_empty() {
        return Io::Done(0);
    }
    let mut msg = empty_msghdr();
    msg.msg_iov = iov.as_mut_ptr();
    msg.msg_iovlen = iov.len() as _;
    // SAFETY: the caller's promise.
    let n = unsafe { libc::syscall(libc::SYS_sendmsg, fd.as_raw_fd(), &raw const msg, flags) };
    if let (Some(at), Ok(n)) = (seen, usize::try_from(n)) {
        // SAFETY: the caller's promise.
        capture::stream(fd, at, Direction::Out, &unsafe { moved(iov, n) });
    }
    usize::try_from(n).map_or_else(|_| failed(), Io::Done)
}

/// A copy of the first `bytes` bytes of these vectors, for a capture.
///
/// # Safety
/// The vectors are as valid as they were for the system call that sent or received the bytes.
unsafe fn moved(iov: &[libc::iovec], bytes: usize) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::with_capacity(bytes);
    for part in iov {
        let n = part.iov_len.min(bytes - out.len());
        let from = part.iov_base.cast::<u8>();
        // SAFETY: `part` is valid (the caller's promise), and there is room for `bytes`. The program may write there
        // at the same time, as it may while the kernel reads: no byte is interpreted here.
        unsafe {
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(out.len()), n);
            out.set_len(out.len() + n);
        }
    }
    out
}

/// Receives into `buffer`, or with `direct` first into user memory. Returns the number of bytes in user memory and in
/// the buffer.
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    direct: Option<Unfilled<'_>>,
    buffer: &mut [u8],
) -> Result<(usize, usize), Io> {
    let own = UserSlice::buffer(buffer).iovec();
    let Some(direct) = direct else {
        // SAFETY: the vector points into `buffer`, borrowed mutably.
        return unsafe { receive_vectors(fd, &mut [own]) }.map(|n| (0, n));
    };
    let mut parts: SmallVec<[PinnedPart<'_>; 4]> = SmallVec::new();
    let user = direct.pin(&mut parts).ok_or(Io::Invalidated)?;
    let mut iov: SmallVec<[libc::iovec; 5]> = SmallVec::new();
    iov.extend(parts.iter().map(|part| part.slice().iovec()));
    if own.iov_len > 0 {
        iov.push(own);
    }
    // SAFETY: the vectors point into pinned regions whose check allowed writing, and into `buffer`, borrowed mutably.
    let n = unsafe { receive_vectors(fd, &mut iov) };
    drop(parts);
    n.map(|n| (n.min(user), n - n.min(user)))
}

/// Receives into the vectors; returns the number of bytes, which is not 0.
///
/// # Safety
/// The kernel may write where the vectors say.
unsafe fn receive_vectors(fd: BorrowedFd<'_>, iov: &mut [libc::iovec]) -> Result<usize, Io> {
    let n = match &mut *iov {
        // SAFETY: the caller's promise.
        [one] => unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                fd.as_raw_fd(),
                one.iov_base,
                one.iov_len,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut::<libc::sockaddr>(),
                std::ptr::null_mut::<libc::socklen_t>(),
            )
        },
        several => {
            let mut msg = empty_msghdr();
            msg.msg_iov = several.as_mut_ptr();
            msg.msg_iovlen = several.len() as _;
            // SAFETY: the caller's promise.
            unsafe {
                libc::syscall(
                    libc::SYS_recvmsg,
                    fd.as_raw_fd(),
                    &raw mut msg,
                    libc::MSG_DONTWAIT,
                )
            }
        }
    };
    if let (Some(at), Ok(n)) = (capture::begin(), usize::try_from(n)) {
        // SAFETY: the caller's promise.
        capture::stream(fd, at, Direction::In, &unsafe { moved(iov, n) });
    }
    let result = match usize::try_from(n) {
        Ok(0) => Err(Io::Eof),
        Ok(n) => Ok(n),
        Err(_) => Err(failed()),
    };
    if let Err(Io::Eof | Io::Broken(_)) = result {
        capture::stream_ended(fd, result != Err(Io::Eof));
    }
    result
}
