//! The C functions of `<exs.h>`: they check what the program says, and turn it into operations.

use crate::flow::{Action, Flow, OpId};
use crate::library::{self, Library};
use crate::memory::{FileMap, Memory, Region, Use};
use crate::queue::{Event, Queue, Wait};
use crate::socket::{self, Keep, Op, Settings, Socket};
use crate::wire::{MAX_LENGTH, MAX_SEGMENTS, Segment};
use libc::{c_int, c_void, sockaddr, socklen_t};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const UNREGISTERED: c_int = -2;
const PERSISTENT: c_int = 1;
const NOTIFY: c_int = 2;
const WAITALL: c_int = 4;

const QATTR_DEPTH: c_int = 1;
const QATTR_SIGNAL: c_int = 2;
const QATTR_EVENTS: c_int = 3;
const QATTR_WAIT: c_int = 4;
const QATTR_FD: c_int = 100;
const QATTR_COUNTERS: c_int = 101;

const EVTVEC_MAX: usize = 1024;
const MAX_DEPTH: usize = 1 << 20;

type Answer<T = ()> = Result<T, c_int>;

/// `exs_iovec_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoVec {
    base: *mut c_void,
    len: usize,
    handle: c_int,
}

/// `exs_msghdr_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct MsgHdr {
    name: *mut c_void,
    namelen: socklen_t,
    iov: *mut IoVec,
    iovlen: c_int,
    control: *mut c_void,
    controllen: socklen_t,
    flags: c_int,
}

/// `exs_xfervec_t`: memory or a part of a file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct XferVec {
    kind: c_int,
    fd: c_int,
    offset: i64,
    vec: IoVec,
}

/// `exs_xferfile_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct XferFile {
    vec: *mut XferVec,
    len: c_int,
}

/// `exs_acceptaddr_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct AcceptAddr {
    addr: *mut sockaddr,
    len: socklen_t,
}

/// `exs_pollfd_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PollFd {
    fd: c_int,
    events: i16,
    revents: i16,
}

/// `exs_signal_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signal {
    signo: c_int,
    mode: c_int,
}

fn result(answer: Answer<c_int>) -> c_int {
    answer.unwrap_or_else(|errno| {
        // SAFETY: the place of errno is the thread's own.
        unsafe { *libc::__errno_location() = errno };
        -1
    })
}

fn done(answer: Answer) -> c_int {
    result(answer.map(|()| 0))
}

fn require(holds: bool, errno: c_int) -> Answer {
    if holds { Ok(()) } else { Err(errno) }
}

/// Writes an address where the program wants it; its length.
///
/// # Safety
///
/// `wanted` is 0 or an `exs_acceptaddr_t` whose memory is the library's now.
pub(crate) unsafe fn give_address(wanted: u64, from: *const libc::sockaddr_storage) -> u32 {
    let wanted: *mut AcceptAddr = std::ptr::with_exposed_provenance_mut(wanted as usize);
    // SAFETY: the caller says so.
    unsafe {
        if wanted.is_null() {
            return 0;
        }
        let room = (*wanted).len;
        (*wanted).len = address_length(from);
        let count = room.min((*wanted).len) as usize;
        if !(*wanted).addr.is_null() {
            std::ptr::copy_nonoverlapping(from.cast::<u8>(), (*wanted).addr.cast::<u8>(), count);
        }
        (*wanted).len
    }
}

/// The length of an address of a known family.
unsafe fn address_length(from: *const libc::sockaddr_storage) -> u32 {
    // SAFETY: the caller's.
    let family = c_int::from(unsafe { (*from).ss_family });
    let length = if family == libc::AF_INET6 {
        size_of::<libc::sockaddr_in6>()
    } else {
        size_of::<libc::sockaddr_in>()
    };
    u32::try_from(length).unwrap_or(0)
}

unsafe fn check_address(addr: *const sockaddr, len: socklen_t) -> Answer {
    require(!addr.is_null(), libc::EFAULT)?;
    require(len as usize >= size_of::<libc::sa_family_t>(), libc::EINVAL)?;
    // SAFETY: the family is within the length that the program says.
    let family = c_int::from(unsafe { (*addr).sa_family });
    let need = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return Err(libc::EAFNOSUPPORT),
    };
    require(len as usize >= need, libc::EINVAL)
}

/// Finds the socket and the queue of a call, and keeps room for its events.
fn begin(fd: c_int, q: c_int, places: usize) -> Answer<(Arc<Socket>, Arc<Queue>)> {
    let library = library::get()?;
    let socket = library.socket(fd)?;
    let queue = library.queue(q)?;
    queue.reserve(&socket, places)?;
    Ok((socket, queue))
}

fn plain(kind: c_int, queue: &Arc<Queue>, ahandle: isize, user: u64) -> Op {
    Op {
        kind,
        queue: Arc::clone(queue),
        places: 1,
        ahandle,
        user,
        flags: 0,
        offset: 0,
        segments: Vec::new(),
        remote: Vec::new(),
        keep: Vec::new(),
        events: 0,
    }
}

fn refused(queue: &Queue, places: usize, answer: Result<(), c_int>) -> Answer {
    answer.inspect_err(|_| {
        queue.release(places);
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_init(version: c_int) -> c_int {
    done(require(version == 1, libc::EINVAL).and_then(|()| library::init()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_qcreate(depth: c_int) -> c_int {
    result(library::get().and_then(|library| {
        let depth = usize::try_from(depth)
            .ok()
            .filter(|d| (1..=MAX_DEPTH).contains(d));
        Ok(library.add_queue(Queue::new(depth.ok_or(libc::EINVAL)?)?))
    }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_qdelete(q: c_int) -> c_int {
    done(library::get().and_then(|library| library.remove_queue(q)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_qdequeue(
    q: c_int,
    vec: *mut c_void,
    n: c_int,
    timeout: *const libc::timeval,
) -> c_int {
    let take = || {
        let queue = library::get()?.queue(q)?;
        require(!vec.is_null(), libc::EFAULT)?;
        let room = usize::try_from(n.unsigned_abs()).map_err(|_| libc::EINVAL)?;
        require((1..=EVTVEC_MAX).contains(&room), libc::EINVAL)?;
        let least = if n < 0 { room } else { 1 };
        let until = if timeout.is_null() {
            None
        } else {
            // SAFETY: the program passes a time or null.
            let time = unsafe { *timeout };
            require(
                time.tv_sec >= 0 && (0..1_000_000).contains(&time.tv_usec),
                libc::EINVAL,
            )?;
            let seconds = Duration::from_secs(time.tv_sec.min(1 << 30).unsigned_abs());
            Some(Instant::now() + seconds + Duration::from_micros(time.tv_usec.unsigned_abs()))
        };
        // SAFETY: the program passes room for as many events.
        let events = unsafe { std::slice::from_raw_parts_mut(vec.cast::<Event>(), room) };
        let count = queue.dequeue(events, least, until)?;
        for event in events
            .iter_mut()
            .take(count)
            .filter(|e| e.kind == socket::EVT_POLL)
        {
            finish_poll(event);
        }
        c_int::try_from(count).map_err(|_| libc::EINVAL)
    };
    result(take())
}

/// Writes what is ready into the program's array; the event has its length then.
fn finish_poll(event: &mut Event) {
    let [fds, ready, ..] = &mut event.body;
    let polled: *mut PollFd = std::ptr::with_exposed_provenance_mut(*fds as usize);
    // SAFETY: the array is the library's until the program has this event.
    unsafe { (*polled).revents = i16::try_from(*ready).unwrap_or(0) };
    *ready = 1;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_qmodify(
    q: c_int,
    attr: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    let modify = || {
        let queue = library::get()?.queue(q)?;
        require(!value.is_null(), libc::EFAULT)?;
        let mut state = queue.lock();
        if attr == QATTR_SIGNAL {
            require(len == size_of::<Signal>(), libc::EINVAL)?;
            // SAFETY: the program passes this structure with this attribute.
            let signal = unsafe { value.cast::<Signal>().read_unaligned() };
            state.signal = match signal.mode {
                0 => None,
                1 if (1..=64).contains(&signal.signo) => Some(signal.signo),
                _ => return Err(libc::EINVAL),
            };
            return Ok(());
        }
        require(len == size_of::<c_int>(), libc::EINVAL)?;
        // SAFETY: as above.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        match (attr, value) {
            (QATTR_DEPTH, _) => {
                let depth = usize::try_from(value)
                    .ok()
                    .filter(|d| (1..=MAX_DEPTH).contains(d));
                state.depth = depth.ok_or(libc::EINVAL)?;
            }
            (QATTR_WAIT, 1) => state.wait = Wait::Adaptive,
            (QATTR_WAIT, 2) => state.wait = Wait::Notify,
            (QATTR_WAIT, 3) => state.wait = Wait::BusyPoll,
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    };
    done(modify())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_qstatus(
    q: c_int,
    attr: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    let status = || {
        let queue = library::get()?.queue(q)?;
        require(!value.is_null() && !len.is_null(), libc::EFAULT)?;
        let number = |n: usize| {
            c_int::try_from(n)
                .unwrap_or(c_int::MAX)
                .to_ne_bytes()
                .to_vec()
        };
        let bytes = match attr {
            QATTR_DEPTH => number(queue.lock().depth),
            QATTR_EVENTS => number(queue.waiting()),
            QATTR_WAIT => number(match queue.lock().wait {
                Wait::Adaptive => 1,
                Wait::Notify => 2,
                Wait::BusyPoll => 3,
            }),
            QATTR_SIGNAL => {
                let signal = queue.lock().signal;
                let mode = c_int::from(signal.is_some());
                [signal.unwrap_or(0).to_ne_bytes(), mode.to_ne_bytes()].concat()
            }
            QATTR_FD => queue.eventfd.to_ne_bytes().to_vec(),
            QATTR_COUNTERS => {
                let counters = [socket::COPIED.load(Relaxed), socket::DIRECT.load(Relaxed)];
                counters.iter().flat_map(|c| c.to_ne_bytes()).collect()
            }
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: the program passes `*len` bytes.
        unsafe {
            require(*len >= bytes.len(), libc::EINVAL)?;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), bytes.len());
            *len = bytes.len();
        }
        Ok(())
    };
    done(status())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_mregister(
    addr: *mut c_void,
    len: usize,
    flags: c_int,
) -> c_int {
    let register = || {
        let library = library::get()?;
        require(flags & !1 == 0 && len > 0, libc::EINVAL)?;
        require(!addr.is_null(), libc::EFAULT)?;
        let from = addr.expose_provenance();
        require(from.checked_add(len).is_some(), libc::EFAULT)?;
        library.add_memory(Memory::new(from as u64, len as u64))
    };
    result(register())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_mderegister(handle: c_int, flags: c_int) -> c_int {
    let deregister = || {
        let library = library::get()?;
        require(flags == 0, libc::EINVAL)?;
        library.remove_memory(handle)
    };
    done(deregister())
}

/// Finds the keys of the memory of a transfer.
fn resolve(
    library: &Library,
    socket: &Socket,
    vec: &[IoVec],
    what: Use,
    persistent: bool,
    op: &mut Op,
) -> Answer {
    let (device, immediate) = socket.device()?;
    require(vec.len() <= MAX_SEGMENTS, libc::EMSGSIZE)?;
    let total = vec
        .iter()
        .try_fold(0u64, |sum, v| sum.checked_add(v.len as u64));
    let total = total.filter(|t| *t <= MAX_LENGTH).ok_or(libc::EMSGSIZE)?;
    let several = vec.iter().filter(|v| v.len > 0).count() > 1;
    for v in vec.iter().filter(|v| v.len > 0 || !several) {
        require(!v.base.is_null() || v.len == 0, libc::EFAULT)?;
        let (addr, len) = (v.base.expose_provenance() as u64, v.len as u64);
        let len32 = u32::try_from(len).map_err(|_| libc::EMSGSIZE)?;
        let copied = what == Use::Source && !several && !persistent && total <= immediate;
        let (mut lkey, mut rkey) = (0, 0);
        if v.handle != UNREGISTERED {
            let memory = library.memory(v.handle)?;
            require(len == 0 || memory.contains(addr, len), libc::EACCES)?;
            let region = memory.region(&device, what)?;
            (lkey, rkey) = (region.lkey, region.rkey);
            op.keep.push(Keep::Memory {
                _memory: memory,
                _region: region,
            });
        } else if len > 0 && !copied {
            let region = Region::new(&device, addr, len, what)?;
            (lkey, rkey) = (region.lkey, region.rkey);
            op.keep.push(Keep::Own(region));
        }
        op.segments.push(Segment {
            addr,
            stag: lkey,
            len: len32,
        });
        op.remote.push(Segment {
            addr,
            stag: rkey,
            len: len32,
        });
    }
    Ok(())
}

/// What kind of transfer a call starts.
struct Transfer {
    kind: c_int,
    flags: c_int,
    user: u64,
    offset: u64,
    has_offset: bool,
}

fn sends(kind: c_int) -> bool {
    kind != socket::EVT_RECV && kind != socket::EVT_RECVMSG
}

fn transfer(
    fd: c_int,
    vec: &[IoVec],
    transfer: &Transfer,
    q: c_int,
    ahandle: isize,
    file: Option<FileMap>,
) -> Answer {
    let known = if sends(transfer.kind) {
        PERSISTENT | NOTIFY
    } else {
        PERSISTENT | WAITALL
    };
    require(
        transfer.flags & !known == 0 && transfer.flags & (PERSISTENT | NOTIFY) != NOTIFY,
        libc::EINVAL,
    )?;
    let persistent = transfer.flags & PERSISTENT != 0;
    let places = if transfer.flags & NOTIFY != 0 { 2 } else { 1 };
    let (socket, queue) = begin(fd, q, places)?;
    let mut op = plain(transfer.kind, &queue, ahandle, transfer.user);
    op.places = places;
    op.flags = u64::from(transfer.flags.unsigned_abs());
    op.offset = transfer.offset;
    let what = match (sends(transfer.kind), persistent) {
        (true, _) => Use::Source,
        (false, true) => Use::Target,
        (false, false) => Use::Sink,
    };
    let resolved = library::get()
        .and_then(|library| resolve(library, &socket, vec, what, persistent, &mut op));
    if let Err(errno) = resolved {
        queue.release(places);
        return Err(errno);
    }
    if let (Some(map), Some(Keep::Own(_))) = (file, op.keep.first())
        && let Keep::Own(region) = op.keep.remove(0)
    {
        op.keep.push(Keep::File {
            _region: region,
            _map: map,
        });
    }
    let offset = transfer.has_offset.then_some(transfer.offset);
    let sending = sends(transfer.kind);
    let start = |flow: &mut Flow, id: OpId, op: &Op, out: &mut Vec<Action>| {
        if sending {
            require(!flow.is_shut(), libc::EPIPE)?;
            flow.send(Socket::send(op, id), out);
        } else {
            flow.recv(Socket::recv(op, id, offset), out);
        }
        Ok(())
    };
    refused(&queue, places, socket.start(op, start))
}

fn one(buf: *const c_void, len: usize, handle: c_int) -> [IoVec; 1] {
    [IoVec {
        base: buf.cast_mut(),
        len,
        handle,
    }]
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_send(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flags: c_int,
    q: c_int,
    ahandle: isize,
    handle: c_int,
) -> c_int {
    let user = buf.expose_provenance() as u64;
    let t = Transfer {
        kind: socket::EVT_SEND,
        flags,
        user,
        offset: 0,
        has_offset: false,
    };
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle, None))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_recv(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
    q: c_int,
    ahandle: isize,
    handle: c_int,
) -> c_int {
    let user = buf.expose_provenance() as u64;
    let t = Transfer {
        kind: socket::EVT_RECV,
        flags,
        user,
        offset: 0,
        has_offset: false,
    };
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle, None))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_send_offset(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flags: c_int,
    q: c_int,
    ahandle: isize,
    handle: c_int,
    offset: u64,
) -> c_int {
    let user = buf.expose_provenance() as u64;
    let t = Transfer {
        kind: socket::EVT_SEND,
        flags,
        user,
        offset,
        has_offset: true,
    };
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle, None))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_recv_offset(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
    q: c_int,
    ahandle: isize,
    handle: c_int,
    offset: u64,
) -> c_int {
    let user = buf.expose_provenance() as u64;
    let t = Transfer {
        kind: socket::EVT_RECV,
        flags,
        user,
        offset,
        has_offset: true,
    };
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle, None))
}

fn message(
    fd: c_int,
    msg: *const MsgHdr,
    kind: c_int,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> Answer {
    require(!msg.is_null(), libc::EFAULT)?;
    // SAFETY: the program passes a message.
    let (iov, count) = unsafe { ((*msg).iov, (*msg).iovlen) };
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    require((1..=MAX_SEGMENTS).contains(&count), libc::EMSGSIZE)?;
    require(!iov.is_null(), libc::EFAULT)?;
    // SAFETY: the program says how many there are.
    let vec = unsafe { std::slice::from_raw_parts(iov, count) };
    let user = msg.expose_provenance() as u64;
    let t = Transfer {
        kind,
        flags,
        user,
        offset: 0,
        has_offset: false,
    };
    transfer(fd, vec, &t, q, ahandle, None)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_sendmsg(
    fd: c_int,
    msg: *const MsgHdr,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    done(message(fd, msg, socket::EVT_SENDMSG, flags, q, ahandle))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_recvmsg(
    fd: c_int,
    msg: *mut MsgHdr,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    done(message(fd, msg, socket::EVT_RECVMSG, flags, q, ahandle))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_sendfile(
    fd: c_int,
    xf: *mut XferFile,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    let start = || {
        require(!xf.is_null(), libc::EFAULT)?;
        // SAFETY: the program passes this structure, and says how many vectors it has.
        let (vec, count) = unsafe { ((*xf).vec, (*xf).len) };
        require(!vec.is_null(), libc::EFAULT)?;
        require(count == 1, libc::EMSGSIZE)?;
        // SAFETY: as above.
        let xv = unsafe { *vec };
        let user = xf.expose_provenance() as u64;
        let t = Transfer {
            kind: socket::EVT_SENDFILE,
            flags,
            user,
            offset: 0,
            has_offset: false,
        };
        match xv.kind {
            1 => transfer(fd, &[xv.vec], &t, q, ahandle, None),
            2 => {
                require(xv.vec.len > 0, libc::EINVAL)?;
                let map = FileMap::new(xv.fd, xv.offset, xv.vec.len as u64)?;
                let base = std::ptr::with_exposed_provenance_mut(map.addr as usize);
                let vec = IoVec {
                    base,
                    len: xv.vec.len,
                    handle: UNREGISTERED,
                };
                transfer(fd, &[vec], &t, q, ahandle, Some(map))
            }
            _ => Err(libc::EINVAL),
        }
    };
    done(start())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_accept(
    fd: c_int,
    addr: *mut AcceptAddr,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    let start = || {
        require(flags == 0, libc::EINVAL)?;
        let (socket, queue) = begin(fd, q, 1)?;
        let mut op = plain(
            socket::EVT_ACCEPT,
            &queue,
            ahandle,
            addr.expose_provenance() as u64,
        );
        op.offset = if addr.is_null() {
            0
        } else {
            // SAFETY: the program passes this structure.
            unsafe { (*addr).addr.expose_provenance() as u64 }
        };
        refused(&queue, 1, socket.accept(op))
    };
    done(start())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_connect(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    let start = || {
        require(flags == 0, libc::EINVAL)?;
        // SAFETY: the program says how long its address is.
        unsafe { check_address(addr, len) }?;
        let (socket, queue) = begin(fd, q, 1)?;
        refused(
            &queue,
            1,
            socket.connect(plain(socket::EVT_CONNECT, &queue, ahandle, 0), addr),
        )
    };
    done(start())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_poll(
    fds: *mut PollFd,
    nfds: c_int,
    flags: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    let start = || {
        require(!fds.is_null(), libc::EFAULT)?;
        require(flags == 0 && nfds == 1, libc::EINVAL)?;
        // SAFETY: the program passes an array with one element.
        let (fd, events) = unsafe { ((*fds).fd, (*fds).events) };
        require(events & 5 != 0 && events & !5 == 0, libc::EINVAL)?;
        let (socket, queue) = begin(fd, q, 1)?;
        let mut op = plain(
            socket::EVT_POLL,
            &queue,
            ahandle,
            fds.expose_provenance() as u64,
        );
        op.events = events;
        refused(&queue, 1, socket.poll(op))
    };
    done(start())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_cancel(fd: c_int, flags: c_int, ahandle: isize) -> c_int {
    let cancel = || {
        let socket = library::get()?.socket(fd)?;
        let chosen = match flags {
            1 => None,
            2 => Some(ahandle),
            _ => return Err(libc::EINVAL),
        };
        require(socket.cancel(chosen) > 0, libc::ENOENT)
    };
    done(cancel())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_shutdown(
    fd: c_int,
    how: c_int,
    q: c_int,
    ahandle: isize,
) -> c_int {
    let start = || {
        require(how == 1, libc::EINVAL)?;
        let (socket, queue) = begin(fd, q, 1)?;
        let op = plain(socket::EVT_SHUTDOWN, &queue, ahandle, 0);
        let start = |flow: &mut Flow, id: OpId, _: &Op, out: &mut Vec<Action>| {
            require(!flow.is_shut(), libc::EPIPE)?;
            flow.shutdown(id, out);
            Ok(())
        };
        refused(&queue, 1, socket.start(op, start))
    };
    done(start())
}

/// In C the third argument is variadic, which is passed as a fixed one of this type is on this architecture.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_fcntl(fd: c_int, cmd: c_int, value: c_int) -> c_int {
    let control = || {
        let socket = library::get()?.socket(fd)?;
        let settings = match cmd {
            1 => {
                require((1..=1024).contains(&value), libc::EINVAL)?;
                socket.settings(|s| s.credits = u16::try_from(value).unwrap_or(1))?;
                return Ok(0);
            }
            3 => {
                require((0..=(1 << 20)).contains(&value), libc::EINVAL)?;
                socket.settings(|s| s.immediate = value.unsigned_abs())?;
                return Ok(0);
            }
            _ => socket.settings(|_| {})?,
        };
        match cmd {
            2 => Ok(c_int::from(settings.credits)),
            4 => c_int::try_from(settings.immediate).map_err(|_| libc::EINVAL),
            _ => Err(libc::EINVAL),
        }
    };
    result(control())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let make = || {
        let library = library::get()?;
        require(
            domain == libc::AF_INET || domain == libc::AF_INET6,
            libc::EAFNOSUPPORT,
        )?;
        require(protocol == 0, libc::EPROTONOSUPPORT)?;
        require(
            kind == libc::SOCK_SEQPACKET || kind == libc::SOCK_STREAM,
            libc::EPROTOTYPE,
        )?;
        let settings = Settings {
            credits: 16,
            immediate: 0,
        };
        library.add_socket(kind == libc::SOCK_STREAM, settings)
    };
    result(make())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_bind(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    let bind = || {
        let socket = library::get()?.socket(fd)?;
        // SAFETY: the program says how long its address is.
        unsafe { check_address(addr, len) }?;
        socket.bind(addr)
    };
    done(bind())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_listen(fd: c_int, backlog: c_int) -> c_int {
    done(
        library::get()
            .and_then(|library| library.socket(fd))
            .and_then(|socket| socket.listen(backlog)),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_close(fd: c_int) -> c_int {
    done(library::get().and_then(|library| library.close(fd)))
}

unsafe fn name(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, peer: bool) -> Answer {
    let socket = library::get()?.socket(fd)?;
    require(!addr.is_null() && !len.is_null(), libc::EFAULT)?;
    let from = socket.address(peer)?;
    // SAFETY: the program passes `*len` bytes at `addr`.
    unsafe {
        let length = address_length(&raw const from);
        let count = (*len).min(length) as usize;
        std::ptr::copy_nonoverlapping((&raw const from).cast::<u8>(), addr.cast::<u8>(), count);
        *len = length;
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_getsockname(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's pointers.
    done(unsafe { name(fd, addr, len, false) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_getpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's pointers.
    done(unsafe { name(fd, addr, len, true) })
}
