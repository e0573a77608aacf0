//! Sends and receives several datagrams, and runs of datagrams, in one system call.
//!
//! A *run* is several datagrams of one length (the last may be shorter), to one destination or from one source, in one buffer. The kernel
//! splits it (`UDP_SEGMENT`) or has coalesced it (`UDP_GRO`).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use anywarp_core::datagram::TxDatagram;
use smallvec::SmallVec;

use super::address::{from_sockaddr, to_sockaddr};
use super::cmsg::{self, CONTROL_WORDS, Control};
use super::{Io, empty_msghdr, failed};
use crate::capture::{self, Direction};

/// A datagram, or a run of datagrams, that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// Offset of its bytes in the buffer.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
    /// Source.
    pub from: SocketAddr,
    /// The local address that it was sent to, if the socket reports it (`IP_PKTINFO`).
    pub to: Option<IpAddr>,
    /// Hop limit or time to live, if the socket reports it; else 64.
    pub hop_limit: u8,
    /// Traffic class or type of service, if the socket reports it; else 0.
    pub traffic_class: u8,
    /// Length of the datagrams in a run that the kernel coalesced (GRO); 0 for a single datagram.
    pub segment: usize,
}

/// Largest number of datagrams, or runs, in one system call.
pub const DATAGRAMS: usize = 16;

/// Receives queued datagrams. Each datagram, or run of datagrams if the socket coalesces, gets `slot` bytes of
/// `buffer` and is truncated to them.
pub fn receive_datagrams(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    slot: usize,
    out: &mut SmallVec<[Datagram; DATAGRAMS]>,
) -> Result<(), Io> {
    let slots = (buffer.len() / slot.max(1)).min(DATAGRAMS);
    if slots == 1 {
        out.push(receive_one(fd, buffer.get_mut(..slot).unwrap_or(&mut []))?);
        return Ok(());
    }
    // SAFETY: all-zero is valid for this plain C structure.
    let name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut names: SmallVec<[libc::sockaddr_storage; DATAGRAMS]> = SmallVec::from_elem(name, slots);
    let mut controls: SmallVec<[[u64; CONTROL_WORDS]; DATAGRAMS]> =
        SmallVec::from_elem([0; CONTROL_WORDS], slots);
    let mut iov: SmallVec<[libc::iovec; DATAGRAMS]> = SmallVec::new();
    let mut msgs: SmallVec<[libc::mmsghdr; DATAGRAMS]> = SmallVec::new();
    for room in buffer.chunks_exact_mut(slot.max(1)).take(DATAGRAMS) {
        iov.push(libc::iovec {
            iov_base: room.as_mut_ptr().cast(),
            iov_len: room.len(),
        });
    }
    for ((iov, name), control) in iov.iter_mut().zip(&mut names).zip(&mut controls) {
        let mut msg = empty_msghdr();
        msg.msg_name = (&raw mut *name).cast();
        msg.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
        msg.msg_iov = &raw mut *iov;
        msg.msg_iovlen = 1;
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = size_of_val(control) as _;
        msgs.push(libc::mmsghdr {
            msg_hdr: msg,
            msg_len: 0,
        });
    }
    // SAFETY: every pointer in `msgs` is to a part of `buffer` or to a local, which outlive the call, with its length.
    let n = unsafe {
        libc::syscall(
            libc::SYS_recvmmsg,
            fd.as_raw_fd(),
            msgs.as_mut_ptr(),
            msgs.len(),
            libc::MSG_DONTWAIT,
            std::ptr::null_mut::<libc::timespec>(),
        )
    };
    let Ok(n) = usize::try_from(n) else {
        return Err(failed());
    };
    for (i, (msg, name)) in msgs.iter().zip(&names).take(n).enumerate() {
        let at = i * slot;
        let len = slot.min(msg.msg_len as usize);
        if let Some(datagram) = datagram_of(&msg.msg_hdr, name, at, len) {
            capture_received(fd, &datagram, buffer.get(at..at + len).unwrap_or(&[]));
            out.push(datagram);
        }
    }
    Ok(())
}

/// Receives a datagram, or a run. `recvmsg` costs less than `recvmmsg`, and locals cost less than lists. Polling threads call
/// this most of the time, and most calls find nothing.
fn receive_one(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Datagram, Io> {
    // SAFETY: all-zero is valid for this plain C structure.
    let mut name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut control = [0_u64; CONTROL_WORDS];
    let mut iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut msg = empty_msghdr();
    msg.msg_name = (&raw mut name).cast();
    msg.msg_namelen = size_of_val(&name) as _;
    msg.msg_iov = &raw mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = size_of_val(&control) as _;
    // SAFETY: every pointer in `msg` is to `buffer` or to a local, which outlive the call, with its length.
    let n = unsafe {
        libc::syscall(
            libc::SYS_recvmsg,
            fd.as_raw_fd(),
            &raw mut msg,
            libc::MSG_DONTWAIT,
        )
    };
    let Ok(n) = usize::try_from(n) else {
        return Err(failed());
    };
    let len = n.min(buffer.len());
    let datagram = datagram_of(&msg, &name, 0, len).ok_or(Io::WouldBlock)?;
    capture_received(fd, &datagram, buffer.get(..len).unwrap_or(&[]));
    Ok(datagram)
}

/// What the kernel has written for a received datagram, or run. `None`: the source is not an IP address, which does not occur on
/// a UDP socket.
#[inline]
fn datagram_of(
    msg: &libc::msghdr,
    name: &libc::sockaddr_storage,
    at: usize,
    len: usize,
) -> Option<Datagram> {
    let control = cmsg::read(msg);
    Some(Datagram {
        at,
        len,
        from: from_sockaddr(name)?,
        to: control.to,
        hop_limit: control.hop_limit,
        traffic_class: control.traffic_class,
        segment: control.segment,
    })
}

/// Adds a received datagram, or the datagrams of a run, to the capture file, if there is one.
#[inline]
fn capture_received(fd: BorrowedFd<'_>, datagram: &Datagram, bytes: &[u8]) {
    if let Some(at) = capture::begin() {
        let size = match datagram.segment {
            0 => bytes.len(),
            size => size,
        };
        for one in bytes.chunks(size.max(1)) {
            capture::datagram(fd, at, Direction::In, datagram.to, datagram.from, one);
        }
    }
}

/// Datagrams to one destination that are passed to the kernel as one (`UDP_SEGMENT`).
#[derive(Debug)]
pub struct Run<'a> {
    /// They have the same destination; all but the last have the same length, and the last is not longer.
    pub datagrams: &'a [TxDatagram],
    /// The local address to send from.
    pub from: Option<IpAddr>,
}

impl Run<'_> {
    #[inline]
    fn control(&self, first: &TxDatagram) -> Control {
        let segment = (self.datagrams.len() > 1)
            .then(|| u16::try_from(first.bytes.len()).unwrap_or(u16::MAX));
        Control::new(self.from, first, segment)
    }
}

/// Sends up to [`DATAGRAMS`] runs. Returns how many the kernel accepted.
pub fn send_runs(fd: BorrowedFd<'_>, ipv6: bool, runs: &[Run<'_>]) -> Result<usize, Io> {
    let seen = capture::begin();
    let sent = match runs {
        [run] => send_run(fd, ipv6, run),
        _ => send_several(fd, ipv6, runs),
    };
    if let (Some(at), Ok(n)) = (seen, sent) {
        for run in runs.iter().take(n) {
            for d in run.datagrams {
                capture::datagram(fd, at, Direction::Out, run.from, d.to, &d.bytes);
            }
        }
    }
    sent
}

fn parts<'a>(run: &'a Run<'_>) -> impl Iterator<Item = libc::iovec> + 'a {
    run.datagrams.iter().map(|d| libc::iovec {
        iov_base: d.bytes.as_ptr().cast_mut().cast(),
        iov_len: d.bytes.len(),
    })
}

/// Datagrams of a run up to this length, in bytes, are copied together, because an additional vector costs the kernel more
/// time than the copy takes.
const COPY_MAX: usize = 256;
/// Bytes for a run of 64 datagrams that are copied together.
const COPY_BUFFER: usize = 64 * COPY_MAX;

/// Sends one run. Most calls of [`send_runs`] have only one, and `sendmsg` costs less than `sendmmsg`.
fn send_run(fd: BorrowedFd<'_>, ipv6: bool, run: &Run<'_>) -> Result<usize, Io> {
    let Some(first) = run.datagrams.first() else {
        return Ok(0);
    };
    let (mut name, name_len) = to_sockaddr(first.to, ipv6);
    let mut control = run.control(first);
    // The vectors are filled in place, because they are large and collecting into them would copy them once more.
    let mut flat: SmallVec<[u8; COPY_BUFFER]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 64]> = SmallVec::new();
    if run.datagrams.len() > 1 && first.bytes.len() <= COPY_MAX {
        for d in run.datagrams {
            flat.extend_from_slice(&d.bytes);
        }
        iov.push(libc::iovec {
            iov_base: flat.as_mut_ptr().cast(),
            iov_len: flat.len(),
        });
    } else {
        iov.extend(parts(run));
    }
    let mut msg = empty_msghdr();
    msg.msg_name = (&raw mut name).cast();
    msg.msg_namelen = name_len;
    msg.msg_iov = iov.as_mut_ptr();
    msg.msg_iovlen = iov.len() as _;
    control.attach(&mut msg);
    // SAFETY: every pointer in `msg` is to a local or to bytes that `run` borrows, with its length; the kernel only reads
    // them.
    let n = unsafe {
        libc::syscall(
            libc::SYS_sendmsg,
            fd.as_raw_fd(),
            &raw const msg,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if n < 0 { Err(failed()) } else { Ok(1) }
}

fn send_several(fd: BorrowedFd<'_>, ipv6: bool, runs: &[Run<'_>]) -> Result<usize, Io> {
    let mut names: SmallVec<[(libc::sockaddr_storage, libc::socklen_t); DATAGRAMS]> =
        SmallVec::new();
    let mut controls: SmallVec<[Control; DATAGRAMS]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 64]> = SmallVec::new();
    let mut starts: SmallVec<[(usize, usize); DATAGRAMS]> = SmallVec::new();
    for run in runs.iter().take(DATAGRAMS) {
        let Some(first) = run.datagrams.first() else {
            break;
        };
        names.push(to_sockaddr(first.to, ipv6));
        controls.push(run.control(first));
        starts.push((iov.len(), run.datagrams.len()));
        iov.extend(parts(run));
    }
    let mut msgs: SmallVec<[libc::mmsghdr; DATAGRAMS]> = SmallVec::new();
    for ((name, control), (start, len)) in names.iter_mut().zip(&mut controls).zip(starts) {
        let mut msg = empty_msghdr();
        msg.msg_name = (&raw mut name.0).cast();
        msg.msg_namelen = name.1;
        msg.msg_iov = iov
            .get_mut(start..)
            .map_or(std::ptr::null_mut(), <[_]>::as_mut_ptr);
        msg.msg_iovlen = len as _;
        control.attach(&mut msg);
        msgs.push(libc::mmsghdr {
            msg_hdr: msg,
            msg_len: 0,
        });
    }
    // SAFETY: every pointer in `msgs` is to a local or to bytes that `runs` borrows, with its length; the kernel only
    // reads them.
    let n = unsafe {
        libc::syscall(
            libc::SYS_sendmmsg,
            fd.as_raw_fd(),
            msgs.as_mut_ptr(),
            msgs.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(n).map_err(|_| failed())
}
