//! Sends and receives on stream sockets, from and into registered user memory.

use std::os::fd::{AsRawFd, BorrowedFd};

use anywarp_core::llp::mpa::frame::{Piece, TxBatch};
use anywarp_core::verbs::mr::{Pinned, Placement};
use smallvec::SmallVec;

use super::{Io, empty_msghdr, failed};
use crate::capture::{self, Way};
use crate::mem;

/// Sends what is in `batch` from byte `skip` on.
// RFC 5044 §5.1 [mpa-align]: behind an aligned batch a TCP segment ends, whatever is sent next.
pub fn send_batch(fd: BorrowedFd<'_>, batch: &TxBatch, skip: usize) -> Io {
    let record = if batch.is_aligned() { libc::MSG_EOR } else { 0 };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | record;
    let run = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    if let [Piece::Own { from, to }] = batch.pieces() {
        let mut one = [run(batch.own(from + skip, *to))];
        // SAFETY: the vector points into `batch`, which is borrowed.
        return unsafe { send_vectors(fd, &mut one, flags) };
    }
    let mut pins: SmallVec<[Pinned<'_>; 8]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 16]> = SmallVec::new();
    for (piece, gone, left) in batch.rest(skip) {
        match piece {
            Piece::Own { from, to } => iov.push(run(batch.own(from + gone, *to))),
            Piece::User(place) => {
                let Some(pinned) = place.pin() else {
                    return Io::Invalidated;
                };
                iov.push(mem::iovec(&pinned, gone as u64, left as u64));
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

/// Sends runs of bytes.
///
/// # Safety
/// The kernel may read what the vectors name.
unsafe fn send_vectors(fd: BorrowedFd<'_>, iov: &mut [libc::iovec], flags: libc::c_int) -> Io {
    let seen = capture::begin();
    let n = match &mut *iov {
        [] => return Io::Done(0),
        // The usual case, and the kernel's shortest way for it.
        // SAFETY: the caller's promise.
        [one] => unsafe {
            libc::syscall(
                libc::SYS_sendto,
                fd.as_raw_fd(),
                one.iov_base,
                one.iov_len,
                flags,
                std::ptr::null::<libc::sockaddr>(),
                0,
            )
        },
        several => {
            let mut msg = empty_msghdr();
            msg.msg_iov = several.as_mut_ptr();
            msg.msg_iovlen = several.len() as _;
            // SAFETY: the caller's promise.
            unsafe { libc::syscall(libc::SYS_sendmsg, fd.as_raw_fd(), &raw const msg, flags) }
        }
    };
    if let (Some(at), Ok(n)) = (seen, usize::try_from(n)) {
        capture::stream(fd, at, Way::Out, &moved(iov, n));
    }
    usize::try_from(n).map_or_else(|_| failed(), Io::Done)
}

/// A copy of what the kernel took from these vectors, or put there: for the capture. What they name must be as valid as
/// it was for the call.
fn moved(iov: &[libc::iovec], bytes: usize) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::with_capacity(bytes);
    for part in iov {
        let n = part.iov_len.min(bytes - out.len());
        let from = part.iov_base.cast::<u8>();
        // SAFETY: `part` was given to the kernel just before, its regions are pinned still; there is room for `bytes`.
        // The program may write there at the same time, as it may while the kernel reads: no byte is looked at here.
        unsafe {
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(out.len()), n);
            out.set_len(out.len() + n);
        }
    }
    out
}

/// Pins what is to be filled of ranges of user memory (the ranges, how much of them is filled, how many bytes are missing)
/// and adds vectors for it: not more than one system call takes. Returns their bytes.
pub(crate) fn pin_rest<'a>(
    (places, filled, missing): (&'a [Placement], u64, u64),
    pins: &mut SmallVec<[Pinned<'a>; 4]>,
    iov: &mut SmallVec<[libc::iovec; 5]>,
) -> Result<usize, Io> {
    let (mut skip, mut left, mut bytes) = (filled, missing, 0);
    for place in places {
        if skip >= place.len() {
            skip -= place.len();
            continue;
        }
        let n = left.min(place.len() - skip);
        let pinned = place.pin().ok_or(Io::Invalidated)?;
        iov.push(mem::iovec(&pinned, skip, n));
        pins.push(pinned);
        skip = 0;
        left -= n;
        bytes += usize::try_from(n).unwrap_or(0);
        if left == 0 || iov.len() > 500 {
            break;
        }
    }
    Ok(bytes)
}

/// Receives into `stage[filled..]`; with `direct` first into user memory: the ranges, how much of them is filled, and
/// how many bytes are missing. Returns bytes in user memory and bytes in the stage.
pub fn receive(
    fd: BorrowedFd<'_>,
    direct: Option<(&[Placement], u64, u64)>,
    stage: &mut [u8],
) -> Result<(usize, usize), Io> {
    let own = libc::iovec {
        iov_base: stage.as_mut_ptr().cast(),
        iov_len: stage.len(),
    };
    let Some(direct) = direct else {
        // SAFETY: the vector points into `stage`, borrowed mutably.
        return unsafe { receive_vectors(fd, &mut [own]) }.map(|n| (0, n));
    };
    let mut pins: SmallVec<[Pinned<'_>; 4]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 5]> = SmallVec::new();
    let user = pin_rest(direct, &mut pins, &mut iov)?;
    if own.iov_len > 0 {
        iov.push(own);
    }
    // SAFETY: the vectors point into pinned regions whose check allowed writing, and into `stage`, borrowed mutably.
    let n = unsafe { receive_vectors(fd, &mut iov) };
    drop(pins);
    n.map(|n| (n.min(user), n - n.min(user)))
}

/// Receives into runs of bytes; not 0.
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
        capture::stream(fd, at, Way::In, &moved(iov, n));
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
