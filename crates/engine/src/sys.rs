//! System calls that the safe wrappers do not cover: one of the files where `unsafe` lives.

use std::io;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use anywarp_core::datagram::TxDatagram;
use anywarp_core::llp::mpa::frame::{Piece, TxBatch};
use anywarp_core::verbs::mr::{Pinned, Placement};
use smallvec::SmallVec;

use crate::capture::{self, Way};
use crate::mem;

/// What a vectored send or receive did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// So many bytes moved.
    Done(usize),
    /// Not now.
    WouldBlock,
    /// The peer closed its side.
    Eof,
    /// The connection broke.
    Broken(i32),
    /// Memory of the batch is no longer registered.
    Invalidated,
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn failed() -> Io {
    match errno() {
        libc::EAGAIN | libc::EINTR | libc::ENOBUFS | libc::ENOMEM => Io::WouldBlock,
        e => Io::Broken(e),
    }
}

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

fn empty_msghdr() -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: null pointers with zero lengths.
    unsafe { std::mem::zeroed() }
}

/// A datagram that was received: its bytes, where it came from, where it was sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// Where in the buffer its bytes are.
    pub at: usize,
    /// Bytes.
    pub len: usize,
    /// Source.
    pub from: SocketAddr,
    /// Our address that it was sent to, where the socket tells (`IP_PKTINFO`).
    pub to: Option<IpAddr>,
    /// Hop limit or time to live, where the socket tells; else 64.
    pub hop_limit: u8,
    /// Traffic class or type of service, where the socket tells.
    pub traffic_class: u8,
    /// Bytes of one datagram in a run that the kernel coalesced (GRO); 0: a single one.
    pub segment: usize,
}

/// Datagrams, or runs of them, that one system call receives or sends at most.
pub const DATAGRAMS: usize = 16;
/// Words of control data of one datagram: address, hop limit, traffic class and segment size need 14.
const CONTROL: usize = 16;

/// Receives what waits, each datagram (or run of equal ones, when the socket coalesces) in its own `slot` bytes of
/// `buffer`. What is longer than its slot is cut.
pub fn receive_datagrams(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    slot: usize,
    out: &mut SmallVec<[Datagram; DATAGRAMS]>,
) -> Result<(), Io> {
    // As many as are used: a lone datagram should not pay for sixteen.
    let slots = (buffer.len() / slot.max(1)).min(DATAGRAMS);
    // SAFETY: all-zero is valid for this plain C structure.
    let name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut names: SmallVec<[libc::sockaddr_storage; DATAGRAMS]> = SmallVec::from_elem(name, slots);
    let mut controls: SmallVec<[[u64; CONTROL]; DATAGRAMS]> =
        SmallVec::from_elem([0; CONTROL], slots);
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
    let n = match msgs.as_mut_slice() {
        // The plain call costs less, and most looks are for one alone.
        [one] => {
            // SAFETY: as below.
            let n = unsafe {
                libc::syscall(
                    libc::SYS_recvmsg,
                    fd.as_raw_fd(),
                    &raw mut one.msg_hdr,
                    libc::MSG_DONTWAIT,
                )
            };
            one.msg_len = u32::try_from(n).unwrap_or(0);
            if n < 0 { n } else { 1 }
        }
        // SAFETY: every pointer in `msgs` is to a part of `buffer` or to a local, which outlive the call, with its length.
        several => unsafe {
            libc::syscall(
                libc::SYS_recvmmsg,
                fd.as_raw_fd(),
                several.as_mut_ptr(),
                several.len(),
                libc::MSG_DONTWAIT,
                std::ptr::null_mut::<libc::timespec>(),
            )
        },
    };
    let Ok(n) = usize::try_from(n) else {
        return Err(failed());
    };
    for (i, (msg, name)) in msgs.iter().zip(&names).take(n).enumerate() {
        // A source that is no IP address cannot be: skip it.
        let Some(from) = address(name) else { continue };
        let mut datagram = Datagram {
            at: i * slot,
            len: slot.min(msg.msg_len as usize),
            from,
            to: None,
            hop_limit: 64,
            traffic_class: 0,
            segment: 0,
        };
        read_control(&msg.msg_hdr, &mut datagram);
        if let Some(at) = capture::begin() {
            let bytes = buffer
                .get(datagram.at..datagram.at + datagram.len)
                .unwrap_or(&[]);
            let size = if datagram.segment == 0 {
                slot
            } else {
                datagram.segment
            };
            for one in bytes.chunks(size.max(1)) {
                capture::datagram(fd, at, Way::In, datagram.to, datagram.from, one);
            }
        }
        out.push(datagram);
    }
    Ok(())
}

/// Receives one datagram, or a run of equal ones when the socket coalesces.
pub fn receive_datagram(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Datagram, Io> {
    let mut out = SmallVec::new();
    let len = buffer.len();
    receive_datagrams(fd, buffer, len, &mut out)?;
    out.pop().ok_or(Io::WouldBlock)
}

/// Takes what the kernel says of a datagram beside its bytes.
fn read_control(msg: &libc::msghdr, datagram: &mut Datagram) {
    let int = |c: *mut libc::cmsghdr| {
        // SAFETY: called for kinds behind whose header the kernel puts an int.
        unsafe { libc::CMSG_DATA(c).cast::<libc::c_int>().read_unaligned() }
    };
    let byte = |n: libc::c_int| u8::try_from(n & 0xff).unwrap_or(0);
    // SAFETY: `msg` describes a control buffer that the kernel filled; the macros stay inside it.
    let mut c = unsafe { libc::CMSG_FIRSTHDR(msg) };
    while !c.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a header inside the buffer.
        let head = unsafe { c.read_unaligned() };
        match (head.cmsg_level, head.cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                datagram.segment = usize::try_from(int(c)).unwrap_or(0);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: the kernel puts this structure behind such a header.
                let info = unsafe {
                    libc::CMSG_DATA(c)
                        .cast::<libc::in_pktinfo>()
                        .read_unaligned()
                };
                datagram.to = Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: the kernel puts this structure behind such a header.
                let info = unsafe {
                    libc::CMSG_DATA(c)
                        .cast::<libc::in6_pktinfo>()
                        .read_unaligned()
                };
                datagram.to = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                datagram.hop_limit = byte(int(c));
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => datagram.traffic_class = byte(int(c)),
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                // SAFETY: behind this header the kernel puts one byte.
                datagram.traffic_class = unsafe { libc::CMSG_DATA(c).read() };
            }
            _ => {}
        }
        // SAFETY: as above.
        c = unsafe { libc::CMSG_NXTHDR(msg, c) };
    }
}

/// Datagrams to one destination that go to the kernel as one.
#[derive(Debug)]
pub struct Run<'a> {
    /// They have the same destination; all but the last have the same length, and the last is not longer.
    pub datagrams: &'a [TxDatagram],
    /// Our address to send from.
    pub from: Option<IpAddr>,
}

/// Control data to send with.
struct Control {
    words: [u64; CONTROL],
    len: usize,
}

impl Control {
    fn push<T: Copy>(&mut self, level: libc::c_int, kind: libc::c_int, value: T) {
        let size = size_of::<T>() as libc::c_uint;
        // SAFETY: these two only compute.
        let (len, space) = unsafe { (libc::CMSG_LEN(size), libc::CMSG_SPACE(size)) };
        if self.len + space as usize > size_of_val(&self.words) {
            return;
        }
        // SAFETY: `len + space` bytes are inside `words`, checked above.
        let at = unsafe { self.words.as_mut_ptr().cast::<u8>().add(self.len) };
        // SAFETY: all-zero is a valid header.
        let mut head: libc::cmsghdr = unsafe { std::mem::zeroed() };
        head.cmsg_len = len as _;
        head.cmsg_level = level;
        head.cmsg_type = kind;
        // SAFETY: a header and the value behind it take at most `space` bytes.
        unsafe { at.cast::<libc::cmsghdr>().write_unaligned(head) };
        // SAFETY: CMSG_LEN(0) is where the value starts.
        let data = unsafe { at.add(libc::CMSG_LEN(0) as usize) };
        // SAFETY: as above.
        unsafe { data.cast::<T>().write_unaligned(value) };
        self.len += space as usize;
    }

    fn of(run: &Run<'_>, first: &TxDatagram) -> Self {
        let mut control = Self {
            words: [0; CONTROL],
            len: 0,
        };
        let hops = libc::c_int::from(first.hop_limit);
        let class = libc::c_int::from(first.traffic_class);
        match first.to.ip().to_canonical() {
            IpAddr::V4(_) => {
                if let Some(IpAddr::V4(from)) = run.from {
                    let addr = |ip: Ipv4Addr| libc::in_addr {
                        s_addr: u32::from(ip).to_be(),
                    };
                    let info = libc::in_pktinfo {
                        ipi_ifindex: 0,
                        ipi_spec_dst: addr(from),
                        ipi_addr: addr(Ipv4Addr::UNSPECIFIED),
                    };
                    control.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
                }
                if hops != 0 {
                    control.push(libc::IPPROTO_IP, libc::IP_TTL, hops);
                }
                if class != 0 {
                    control.push(libc::IPPROTO_IP, libc::IP_TOS, class);
                }
            }
            IpAddr::V6(_) => {
                if let Some(IpAddr::V6(from)) = run.from {
                    let info = libc::in6_pktinfo {
                        ipi6_addr: libc::in6_addr {
                            s6_addr: from.octets(),
                        },
                        ipi6_ifindex: 0,
                    };
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
                }
                if hops != 0 {
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hops);
                }
                if class != 0 {
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class);
                }
            }
        }
        if run.datagrams.len() > 1 {
            let segment = u16::try_from(first.bytes.len()).unwrap_or(u16::MAX);
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        control
    }
}

/// Sends up to [`DATAGRAMS`] runs; returns how many the kernel took.
pub fn send_runs(fd: BorrowedFd<'_>, ipv6: bool, runs: &[Run<'_>]) -> Result<usize, Io> {
    let seen = capture::begin();
    let sent = match runs {
        [run] => send_run(fd, ipv6, run),
        _ => send_some(fd, ipv6, runs),
    };
    if let (Some(at), Ok(n)) = (seen, sent) {
        for run in runs.iter().take(n) {
            for d in run.datagrams {
                capture::datagram(fd, at, Way::Out, run.from, d.to, &d.bytes);
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

/// Datagrams up to this length are copied together when they go as a run: the kernel takes longer for a piece than we for
/// so many bytes. And the room for the usual run of those.
const SMALL: usize = 256;
const FLAT: usize = 64 * SMALL;

/// One run alone, which most are: the plain call costs less than that for several.
fn send_run(fd: BorrowedFd<'_>, ipv6: bool, run: &Run<'_>) -> Result<usize, Io> {
    let Some(first) = run.datagrams.first() else {
        return Ok(0);
    };
    let (mut name, name_len) = storage(first.to, ipv6);
    let mut control = Control::of(run, first);
    // Neither is collected: what is collected is moved, and these are large.
    let mut flat: SmallVec<[u8; FLAT]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 64]> = SmallVec::new();
    if run.datagrams.len() > 1 && first.bytes.len() <= SMALL {
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
    if control.len > 0 {
        msg.msg_control = control.words.as_mut_ptr().cast();
        msg.msg_controllen = control.len as _;
    }
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

fn send_some(fd: BorrowedFd<'_>, ipv6: bool, runs: &[Run<'_>]) -> Result<usize, Io> {
    let mut names: SmallVec<[(libc::sockaddr_storage, libc::socklen_t); DATAGRAMS]> =
        SmallVec::new();
    let mut controls: SmallVec<[Control; DATAGRAMS]> = SmallVec::new();
    let mut iov: SmallVec<[libc::iovec; 64]> = SmallVec::new();
    let mut starts: SmallVec<[(usize, usize); DATAGRAMS]> = SmallVec::new();
    for run in runs.iter().take(DATAGRAMS) {
        let Some(first) = run.datagrams.first() else {
            break;
        };
        names.push(storage(first.to, ipv6));
        controls.push(Control::of(run, first));
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
        if control.len > 0 {
            msg.msg_control = control.words.as_mut_ptr().cast();
            msg.msg_controllen = control.len as _;
        }
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

/// A socket address as the kernel takes it; on an IPv6 socket IPv4 is mapped.
fn storage(addr: SocketAddr, ipv6: bool) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut out: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at: *mut libc::sockaddr_storage = &raw mut out;
    let (v6, scope) = match (addr, ipv6) {
        (SocketAddr::V4(v4), false) => {
            // SAFETY: all-zero is a valid address.
            let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            name.sin_family = libc::AF_INET as _;
            name.sin_port = v4.port().to_be();
            name.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: a sockaddr_storage is large and aligned enough for every address.
            unsafe { at.cast::<libc::sockaddr_in>().write(name) };
            return (out, size_of::<libc::sockaddr_in>() as libc::socklen_t);
        }
        (SocketAddr::V4(v4), true) => (v4.ip().to_ipv6_mapped(), 0),
        (SocketAddr::V6(v6), _) => (*v6.ip(), v6.scope_id()),
    };
    // SAFETY: all-zero is a valid address.
    let mut name: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    name.sin6_family = libc::AF_INET6 as _;
    name.sin6_port = addr.port().to_be();
    name.sin6_addr.s6_addr = v6.octets();
    name.sin6_scope_id = scope;
    // SAFETY: as above.
    unsafe { at.cast::<libc::sockaddr_in6>().write(name) };
    (out, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
}

/// The socket address in a `sockaddr_storage`, for IPv4 and IPv6.
fn address(name: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at: *const libc::sockaddr_storage = name;
    match i32::from(name.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage is large and aligned enough for every address, and the family says which.
            let a = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some((ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddr::V6(std::net::SocketAddrV6::new(
                ip,
                u16::from_be(a.sin6_port),
                0,
                a.sin6_scope_id,
            )))
        }
        _ => None,
    }
}

/// Sets an integer socket option; false if the kernel refused.
pub fn set_option(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> bool {
    // SAFETY: `value` is an int that lives through the call.
    let r = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    r == 0
}

/// Reads an integer socket option.
pub fn get_option(fd: BorrowedFd<'_>, level: i32, name: i32) -> Option<i32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` live through the call and `len` is the size of `value`.
    let r = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    (r == 0).then_some(value)
}

/// Joins or leaves a multicast group on the interface that has `local`.
pub fn multicast(
    fd: BorrowedFd<'_>,
    group: IpAddr,
    local: IpAddr,
    interface: u32,
    join: bool,
) -> bool {
    match (group, local) {
        (IpAddr::V4(group), IpAddr::V4(local)) => {
            let what = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr {
                    s_addr: u32::from(group).to_be(),
                },
                imr_address: libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                imr_ifindex: i32::try_from(interface).unwrap_or(0),
            };
            let name = if join {
                libc::IP_ADD_MEMBERSHIP
            } else {
                libc::IP_DROP_MEMBERSHIP
            };
            // SAFETY: `what` lives through the call and its size is given.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IP,
                    name,
                    (&raw const what).cast(),
                    size_of::<libc::ip_mreqn>() as libc::socklen_t,
                )
            };
            r == 0
        }
        (IpAddr::V6(group), _) => {
            let what = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr {
                    s6_addr: group.octets(),
                },
                ipv6mr_interface: interface,
            };
            let name = if join {
                libc::IPV6_ADD_MEMBERSHIP
            } else {
                libc::IPV6_DROP_MEMBERSHIP
            };
            // SAFETY: as above.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IPV6,
                    name,
                    (&raw const what).cast(),
                    size_of::<libc::ipv6_mreq>() as libc::socklen_t,
                )
            };
            r == 0
        }
        _ => false,
    }
}

/// Where multicast goes out.
pub fn multicast_interface(fd: BorrowedFd<'_>, local: IpAddr, interface: u32) -> bool {
    match local {
        IpAddr::V4(local) => {
            let what = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: 0 },
                imr_address: libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                imr_ifindex: i32::try_from(interface).unwrap_or(0),
            };
            // SAFETY: `what` lives through the call and its size is given.
            let r = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    libc::IPPROTO_IP,
                    libc::IP_MULTICAST_IF,
                    (&raw const what).cast(),
                    size_of::<libc::ip_mreqn>() as libc::socklen_t,
                )
            };
            r == 0
        }
        IpAddr::V6(_) => set_option(
            fd,
            libc::IPPROTO_IPV6,
            libc::IPV6_MULTICAST_IF,
            i32::try_from(interface).unwrap_or(0),
        ),
    }
}

/// An address of an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddress {
    /// Interface name.
    pub interface: String,
    /// Interface index.
    pub index: u32,
    /// The address.
    pub ip: IpAddr,
    /// The interface is up.
    pub up: bool,
    /// It is a loopback interface.
    pub loopback: bool,
}

/// All addresses of this host; `None` if it cannot be asked, as when there is no descriptor left.
pub fn host_addresses() -> Option<Vec<HostAddress>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: getifaddrs writes the head of a list that it allocates.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut complete = true;
    let mut at = list;
    while !at.is_null() {
        // SAFETY: not null, and an element of the list that getifaddrs made.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: ifa_addr is not null and points to a sockaddr.
        let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
        // SAFETY: all-zero is a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let size = match family {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: an address of this family has `size` bytes, and the storage has room for it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                entry.ifa_addr.cast::<u8>(),
                (&raw mut storage).cast::<u8>(),
                size,
            );
        }
        let Some(ip) = address(&storage).map(|a| a.ip()) else {
            continue;
        };
        // SAFETY: ifa_name is not null and a C string of the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        // SAFETY: a valid C string.
        let index = unsafe { libc::if_nametoindex(entry.ifa_name) };
        // It asks with a descriptor of its own; the interface may also be gone.
        complete &= index != 0;
        found.push(HostAddress {
            interface: name.to_string_lossy().into_owned(),
            index,
            ip,
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
        });
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    complete.then_some(found)
}

/// An interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLink {
    /// Its index.
    pub index: u32,
    /// It is up.
    pub up: bool,
    /// Its hardware address.
    pub hardware: Vec<u8>,
}

/// All interfaces of this host; `None` if it cannot be asked.
pub fn host_links() -> Option<Vec<HostLink>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    let mut found = Vec::new();
    // SAFETY: getifaddrs writes the head of a list that it allocates.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut at = list;
    while !at.is_null() {
        // SAFETY: not null, and an element of the list that getifaddrs made.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null, and every address begins with its family.
        if i32::from(unsafe { (*entry.ifa_addr).sa_family }) != libc::AF_PACKET {
            continue;
        }
        // SAFETY: an address of this family is a sockaddr_ll.
        let link = unsafe { entry.ifa_addr.cast::<libc::sockaddr_ll>().read_unaligned() };
        let len = usize::from(link.sll_halen).min(link.sll_addr.len());
        found.push(HostLink {
            index: u32::try_from(link.sll_ifindex).unwrap_or(0),
            up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
            hardware: link.sll_addr.get(..len).unwrap_or(&[]).to_vec(),
        });
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    Some(found)
}

// ---------------------------------------------------------------------- fork

/// Descriptors that a child must not keep: bit n of word n / 64.
static FDS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// How often this process and its ancestors forked since the device was first opened.
///
/// What was made in another generation belongs to an ancestor: its locks may be held by threads that do not exist
/// here, and its sockets are gone. It must not be touched.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Has `what` called when the process ends by `exit` or by returning from `main`.
pub(crate) fn at_exit(what: extern "C" fn()) {
    // SAFETY: a function of this library, which is never unloaded (`-z nodelete`).
    unsafe { libc::atexit(what) };
}

/// Lets children know that the device is not theirs.
pub(crate) fn watch_fork() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Ordering::AcqRel) {
        // SAFETY: the handler is async-signal-safe: atomics and system calls only.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

/// A socket that is connected to nothing and never will be: -1 if there is none to be had.
fn dead_socket() -> RawFd {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor, and touches no memory.
    unsafe { libc::socket(libc::AF_UNIX, kind, 0) }
}

/// Puts a dead socket in the place of each of the engine's descriptors.
///
/// The connections are the parent's alone, and the numbers stay taken: the child's own files cannot be mistaken for
/// what its copies of the parent's objects name.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut dead = -1;
    let mut extra = false;
    for (word, bits) in FDS.iter().enumerate() {
        let mut bits = bits.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = (word * 64 + bits.trailing_zeros() as usize) as RawFd;
            bits &= bits - 1;
            if dead < 0 {
                dead = dead_socket();
                extra = dead >= 0;
            }
            if dead < 0 {
                // No descriptor is free: this one makes room.
                // SAFETY: a descriptor of the parent's engine, which nobody in the child uses.
                unsafe { libc::close(fd) };
                dead = dead_socket();
                extra = dead >= 0 && dead != fd;
            }
            if dead >= 0 && dead != fd {
                // SAFETY: as above; it is closed by being replaced.
                unsafe { libc::dup3(dead, fd, libc::O_CLOEXEC) };
            }
        }
    }
    if extra {
        // SAFETY: made above and named by nothing.
        unsafe { libc::close(dead) };
    }
}

struct Made<T> {
    generation: u32,
    value: T,
}

/// Something that each process has of its own: a forked child starts with a fresh one.
///
/// The parent's stays where it is, unused: another thread may have held its locks at the moment of the fork.
#[derive(Debug)]
pub struct PerProcess<T> {
    made: AtomicPtr<Made<T>>,
    fresh: fn() -> T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Will be made by `fresh` when it is first used.
    pub const fn new(fresh: fn() -> T) -> Self {
        Self {
            made: AtomicPtr::new(std::ptr::null_mut()),
            fresh,
        }
    }

    /// This process's own.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        loop {
            let old = self.made.load(Ordering::Acquire);
            // SAFETY: null, or made below and never freed; nobody has it mutably.
            if let Some(made) = unsafe { old.as_ref() }
                && made.generation == generation
            {
                return &made.value;
            }
            let new = Box::into_raw(Box::new(Made {
                generation,
                value: (self.fresh)(),
            }));
            match self
                .made
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            {
                // SAFETY: never freed from here on.
                Ok(_) => return unsafe { &(*new).value },
                // SAFETY: another thread was faster, and this one was shown to nobody.
                Err(_) => drop(unsafe { Box::from_raw(new) }),
            }
        }
    }
}

fn fd_bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let n = usize::try_from(fd).ok()?;
    FDS.get(n / 64).map(|w| (w, 1 << (n % 64)))
}

/// Bytes that were given to a TCP socket and that its peer has not acknowledged. 0 for one that is closed.
pub(crate) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an `int`, which is what `bytes` is.
    let r = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if r == 0 {
        usize::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Segments that a TCP connection has sent again.
pub(crate) fn tcp_retransmissions(fd: BorrowedFd<'_>) -> Option<u32> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `len` live through the call and `len` is the size of `info`.
    let r = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // SAFETY: zeros are a value of this type of plain numbers, and the kernel has written none but numbers.
    (r == 0).then(|| unsafe { info.assume_init() }.tcpi_total_retrans)
}

/// A descriptor of the engine's: forked children have a dead socket in its place, so that they keep no connection alive.
#[derive(Debug)]
pub struct EngineFd(ManuallyDrop<OwnedFd>);

impl EngineFd {
    /// Takes a descriptor.
    pub fn new(fd: OwnedFd) -> Self {
        if let Some((word, bit)) = fd_bit(fd.as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Self(ManuallyDrop::new(fd))
    }

    /// Sends a few bytes of start-up.
    pub(crate) fn send(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let seen = capture::begin();
        let n = rustix::net::send(self, bytes, rustix::net::SendFlags::NOSIGNAL)?;
        if let Some(at) = seen {
            capture::stream(self.get(), at, Way::Out, bytes.get(..n).unwrap_or(bytes));
        }
        Ok(n)
    }

    /// Receives a few bytes of start-up; 0 at the end.
    pub(crate) fn recv(&self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let result = rustix::net::recv(self, &mut *buffer, flags).map(|(n, _)| n);
        match result {
            Ok(0) => capture::stream_ended(self.get(), false),
            Ok(n) => {
                if let Some(at) = capture::begin() {
                    capture::stream(self.get(), at, Way::In, buffer.get(..n).unwrap_or(&[]));
                }
            }
            Err(_) => {}
        }
        result
    }

    /// Sends a datagram of the connection manager.
    pub(crate) fn send_to(&self, bytes: &[u8], to: SocketAddr) -> rustix::io::Result<()> {
        let seen = capture::begin();
        rustix::net::sendto(self, bytes, rustix::net::SendFlags::NOSIGNAL, &to)?;
        if let Some(at) = seen {
            capture::datagram(self.get(), at, Way::Out, None, to, bytes);
        }
        Ok(())
    }

    /// Receives a datagram of the connection manager: its length and, if it is an IP address, its source.
    pub(crate) fn recv_from(
        &self,
        buffer: &mut [u8],
    ) -> rustix::io::Result<(usize, Option<SocketAddr>)> {
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let (_, n, from) = rustix::net::recvfrom(self, &mut *buffer, flags)?;
        let from = from.and_then(|f| SocketAddr::try_from(f).ok());
        if let (Some(at), Some(from)) = (capture::begin(), from) {
            let bytes = buffer.get(..n).unwrap_or(&[]);
            capture::datagram(self.get(), at, Way::In, None, from, bytes);
        }
        Ok((n, from))
    }

    /// Borrows it.
    pub fn get(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    /// Its number.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for EngineFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for EngineFd {
    fn drop(&mut self) {
        capture::closed(self.0.as_raw_fd());
        if let Some((word, bit)) = fd_bit(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
        // A thread that posts or polls may find that a connection is over.
        let _inside = Uncancelled::new();
        // SAFETY: dropped once, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// While it lives the calling thread is not cancelled (`pthread_cancel(3)`): a cancelled thread would unwind through
/// frames that hold locks, into a `catch_unwind` that knows nothing of it, which ends the process.
///
/// Calls of the C library that a thread can be cancelled in need one. Posting and polling make none: their system calls do
/// not go through the C library, so they are spared the price (some 10 ns).
#[derive(Debug)]
pub struct Uncancelled(libc::c_int);

impl Uncancelled {
    /// From now on.
    #[allow(clippy::new_without_default, reason = "what it does is not a default")]
    pub fn new() -> Self {
        const DISABLE: libc::c_int = 1; // PTHREAD_CANCEL_DISABLE
        let mut before = 0;
        // SAFETY: `before` is a local.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a state that the C library gave, and a local.
        unsafe { pthread_setcancelstate(self.0, &raw mut ours) };
    }
}

/// Blocks every signal in the calling thread: signals are for the application's threads.
pub(crate) fn block_signals() {
    // SAFETY: all-zero is a valid sigset_t to fill.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is a local.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: `all` is a filled set; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) };
}

/// Whether the process has a signal handler that wants interrupted calls to end (installed without `SA_RESTART`).
///
/// `poll` ends with EINTR for every handler, `read` (what the distribution's library waits in) only for these. Asked
/// after an EINTR, which is rare.
pub fn handlers_interrupt() -> bool {
    (1..=64).filter(|n| !(32..=33).contains(n)).any(|n| {
        // SAFETY: all-zero is a valid sigaction to be overwritten.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: only asks; `action` is a local.
        let r = unsafe { libc::sigaction(n, std::ptr::null(), &raw mut action) };
        r == 0
            && action.sa_sigaction != libc::SIG_DFL
            && action.sa_sigaction != libc::SIG_IGN
            && action.sa_flags & libc::SA_RESTART == 0
    })
}

/// A copy of a descriptor that the program named; `None` if there is none.
pub fn duplicate(fd: RawFd) -> Option<OwnedFd> {
    // SAFETY: takes a number; the kernel says whether it is a descriptor.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    // SAFETY: just made, and nobody else's.
    (copy >= 0).then(|| unsafe { std::os::fd::FromRawFd::from_raw_fd(copy) })
}

/// What tells a file from others: its device and inode.
pub fn identity(file: &OwnedFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Zeroed pages of this process.
#[derive(Debug)]
pub struct Pages {
    start: usize,
    len: usize,
}

impl Pages {
    /// At least `len` bytes.
    pub fn new(len: usize) -> Option<Self> {
        let (read_write, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, read_write, private, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self {
            start: start.expose_provenance(),
            len,
        })
    }

    /// `len` bytes that are zero and cannot be written; they take no memory.
    pub fn zeroes(len: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, where the kernel finds room.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self {
            start: start.expose_provenance(),
            len,
        })
    }

    /// `len` bytes that are the same 2 MiB again and again: written at will, they take no more memory than that.
    pub fn repeated(len: usize) -> Option<Self> {
        const PIECE: usize = 2 << 20;
        let file =
            rustix::fs::memfd_create("anywarp-null", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
        rustix::fs::ftruncate(&file, PIECE as u64).ok()?;
        let area = Self::zeroes(len)?;
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
        );
        for at in (0..len).step_by(PIECE) {
            let place = std::ptr::with_exposed_provenance_mut(area.start + at);
            let n = PIECE.min(len - at);
            // SAFETY: replaces a part of the mapping that was just made, of which nobody knows.
            let r = unsafe { libc::mmap(place, n, access, flags, file.as_raw_fd(), 0) };
            if r == libc::MAP_FAILED {
                return None;
            }
        }
        Some(area)
    }

    /// Address of the first byte.
    pub fn start(&self) -> usize {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody has it any more.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.start), self.len) };
    }
}

/// Bytes of a page of this host.
pub fn page_size() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// Whether the kernel knows `MADV_POPULATE_READ`: tried on memory that can certainly be read.
fn can_populate() -> bool {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let here = (&raw const KNOWN).expose_provenance() as u64;
            let known = advise_populate(here, 1, false).is_ok();
            KNOWN.store(1 + u32::from(known), Ordering::Relaxed);
            known
        }
        n => n == 2,
    }
}

/// `MADV_POPULATE_READ` or `_WRITE` for the pages of a range; the errno says that one cannot be accessed like that.
fn advise_populate(start: u64, len: u64, write: bool) -> Result<(), i32> {
    const READ: libc::c_int = 22;
    const WRITE: libc::c_int = 23;
    let page = page_size();
    let end = start
        .checked_add(len)
        .and_then(|e| e.checked_next_multiple_of(page));
    let from = start & !(page - 1);
    let (Some(end), Ok(at)) = (end, usize::try_from(from)) else {
        return Err(libc::ENOMEM);
    };
    let len = usize::try_from(end - from).map_err(|_| libc::ENOMEM)?;
    let advice = if write { WRITE } else { READ };
    // SAFETY: changes no byte; what is not mapped is an error.
    match unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(at), len, advice) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Whether every page of `[start, start + len)` can be read, or written, now. Brings them in, as paging on demand does.
pub fn is_there(start: u64, len: u64, write: bool) -> bool {
    match advise_populate(start, len, write) {
        Ok(()) => return true,
        // A kernel before 5.14, to which nothing is known but whether pages are mapped.
        Err(libc::EINVAL) if !can_populate() => {}
        Err(_) => return false,
    }
    pages_mapped(start, len)
}

/// Whether each page is mapped: asks for all of them, one by one.
fn pages_mapped(start: u64, len: u64) -> bool {
    const PAGES: usize = 4096;
    let size = page_size();
    let Some(end) = start.checked_add(len) else {
        return false;
    };
    let mut at = start & !(size - 1);
    let mut resident = [0_u8; PAGES];
    while at < end {
        let n = (end - at).min(PAGES as u64 * size);
        let (Ok(page), Ok(bytes)) = (usize::try_from(at), usize::try_from(n)) else {
            return false;
        };
        // SAFETY: mincore reads no user memory but writes a byte a page into `resident`, which has room for them.
        let r = unsafe {
            libc::mincore(
                std::ptr::with_exposed_provenance_mut(page),
                bytes,
                resident.as_mut_ptr(),
            )
        };
        if r != 0 {
            return false;
        }
        at += n;
    }
    true
}

/// Brings pages in and keeps them there, within the limit of the process.
pub fn lock_pages(start: u64, len: u64) -> Result<(), i32> {
    let (Ok(at), Ok(len)) = (usize::try_from(start), usize::try_from(len)) else {
        return Err(libc::ENOMEM);
    };
    // SAFETY: changes no byte; what is not mapped is an error.
    match unsafe { libc::mlock(std::ptr::with_exposed_provenance(at), len) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Lets pages go that were locked. They may be unmapped since.
pub fn unlock_pages(start: u64, len: u64) {
    if let (Ok(at), Ok(len)) = (usize::try_from(start), usize::try_from(len)) {
        // SAFETY: changes no byte; what is not mapped is an error, which says that nothing is locked there.
        unsafe { libc::munlock(std::ptr::with_exposed_provenance(at), len) };
    }
}

/// Whether all of `[start, start + len)` is mapped.
pub fn is_mapped(start: u64, len: u64) -> bool {
    // Valgrind takes the call below for a read of the memory, and whole pages for more than the program has.
    static WATCHED: OnceLock<bool> = OnceLock::new();
    if *WATCHED.get_or_init(|| std::env::var("LD_PRELOAD").is_ok_and(|v| v.contains("vgpreload"))) {
        return len == 0 || pages_mapped(start, len);
    }
    let first = start & !(page_size() - 1);
    let (Ok(at), Ok(bytes)) = (usize::try_from(first), usize::try_from(start - first + len)) else {
        return false;
    };
    // Nothing is written back by this, and no page is looked at: the kernel goes through its list of mappings, and says
    // whether there is a gap. (`mincore` takes two calls to look at the ends alone.)
    // SAFETY: the kernel only inspects the mappings.
    len == 0 || unsafe { libc::syscall(libc::SYS_msync, at, bytes, libc::MS_ASYNC) } == 0
}

/// Waits until a socket is readable, at most for `time`.
pub fn wait_readable(fd: BorrowedFd<'_>, time: std::time::Duration) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
        fd,
        rustix::event::PollFlags::IN,
    )];
    let time = rustix::event::Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    rustix::event::poll(&mut fds, Some(&time)).is_ok_and(|n| n > 0)
}

/// Whether reads of a descriptor that the application can change flags of must not block.
pub fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}
