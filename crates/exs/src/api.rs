//! The C functions of `<exs.h>`. They check their arguments and start operations of the sockets.

use crate::library::{self, Library};
use crate::memory::{self, Device, FileMap, Keys, Memory, Use, Used};
use crate::op::{Keep, Op};
use crate::queue::{self, Event, Queue, Wait};
use crate::socket::{self, Begin, PollCall, Settings, Socket, Timeout};
use crate::wire::{MAX_LENGTH, MAX_SEGMENTS, Segment, Segments};
use anywarp_verbs_sys::ptr::Ptr;
use libc::{c_int, c_void, sockaddr, socklen_t};
use smallvec::SmallVec;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

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

const F_SETCREDITS: c_int = 1;
const F_GETCREDITS: c_int = 2;
const F_SETSMALLPACKET: c_int = 3;
const F_GETSMALLPACKET: c_int = 4;
const F_SETSTREAMBUFFER: c_int = 5;
const F_GETSTREAMBUFFER: c_int = 6;
const F_SETCONNECTTIMEOUT: c_int = 7;
const F_GETCONNECTTIMEOUT: c_int = 8;
const F_SETLINGER: c_int = 9;
const F_GETLINGER: c_int = 10;
const F_SETRECVADVERT: c_int = 11;
const F_GETRECVADVERT: c_int = 12;
const ASYNC_RECV_ORDERED: c_int = 100;
const ASYNC_SEND_TIMEOUT: c_int = 101;
const ASYNC_RECV_TIMEOUT: c_int = 102;
const TIMEOUT_ONCE: c_int = 1 << 30;

/// `EXS_IOVEC` and `EXS_FDVEC`.
const MEMORY: c_int = 1;
const FILE: c_int = 2;

/// The largest number of sockets in one call of exs_poll.
const MAX_POLLED: usize = 1024;
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

/// `exs_fdvec_t`: memory or a part of a file.
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

/// Returns the answer of a C function. All of them end with this call, after they have released their locks.
fn result(answer: Answer<c_int>) -> c_int {
    queue::raise_signals();
    answer.unwrap_or_else(|errno| {
        // SAFETY: the C library returns the errno location of this thread.
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

/// Writes an address to memory of the program. Returns its length.
///
/// # Safety
///
/// `wanted` is 0 or the address of an `exs_acceptaddr_t` whose memory the library may write.
pub(crate) unsafe fn give_address(wanted: u64, from: *const libc::sockaddr_storage) -> u32 {
    let wanted: *mut AcceptAddr = std::ptr::with_exposed_provenance_mut(wanted as usize);
    // SAFETY: upheld by the caller.
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

/// Returns the length of an IPv4 or IPv6 address, by its family.
unsafe fn address_length(from: *const libc::sockaddr_storage) -> u32 {
    // SAFETY: upheld by the caller.
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
    // SAFETY: the length that the program passes covers the family.
    let family = c_int::from(unsafe { (*addr).sa_family });
    let need = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return Err(libc::EAFNOSUPPORT),
    };
    require(len as usize >= need, libc::EINVAL)
}

/// Checks that an address, which [`check_address`] has accepted, has the family of the socket.
unsafe fn check_family(socket: &Socket, addr: *const sockaddr) -> Answer {
    // SAFETY: upheld by the caller.
    let family = c_int::from(unsafe { (*addr).sa_family });
    require(family == socket.domain, libc::EAFNOSUPPORT)
}

/// Finds the socket and the queue of a call, and reserves entries in the queue for its events.
fn begin(fd: c_int, q: c_int, places: usize) -> Answer<(Arc<Socket>, Arc<Queue>)> {
    let library = library::get()?;
    let socket = library.socket(fd)?;
    let queue = library.queue(q)?;
    reserve(&socket, &queue, places)?;
    Ok((socket, queue))
}

/// Reserves entries in the queue for the events of a call on the socket.
fn reserve(socket: &Arc<Socket>, queue: &Queue, places: usize) -> Answer {
    queue.reserve(socket, places)?;
    if socket.is_gone() {
        // Another thread closed the socket after it was found.
        queue.forget(socket.fd);
        queue.release(places);
        return Err(libc::EBADF);
    }
    Ok(())
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
        segments: Segments::new(),
        keep: SmallVec::new(),
        bounce: None,
        deadline: None,
        late: false,
        mr: None,
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
        Ok(library.add_queue(Queue::new(depth.ok_or(libc::EINVAL)?)))
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
    let take = |queue: &Arc<Queue>| {
        require(!vec.is_null(), libc::EFAULT)?;
        let room = usize::try_from(n.unsigned_abs()).map_err(|_| libc::EINVAL)?;
        require((1..=EVTVEC_MAX).contains(&room), libc::EINVAL)?;
        let least = if n < 0 { room } else { 1 };
        let limit = if timeout.is_null() {
            None
        } else {
            // SAFETY: the program passes a time or null.
            let time = unsafe { *timeout };
            require(
                time.tv_sec >= 0 && (0..1_000_000).contains(&time.tv_usec),
                libc::EINVAL,
            )?;
            let seconds = Duration::from_secs(time.tv_sec.min(1 << 30).unsigned_abs());
            Some(seconds + Duration::from_micros(time.tv_usec.unsigned_abs()))
        };
        // SAFETY: the program's array has room for this many events.
        let events = unsafe { std::slice::from_raw_parts_mut(vec.cast::<Event>(), room) };
        let count = match limit {
            Some(Duration::ZERO) => queue.look(events, least),
            limit => queue.dequeue(events, least, limit)?,
        };
        for event in events
            .iter_mut()
            .take(count)
            .filter(|e| e.kind == socket::EVT_POLL)
        {
            finish_poll(event);
        }
        c_int::try_from(count).map_err(|_| libc::EINVAL)
    };
    result(library::get().and_then(|library| library.with_queue(q, take)))
}

/// Writes the ready events to the program's array, whose address and length are in the event.
fn finish_poll(event: &mut Event) {
    let [fds, count, index, ready, ..] = event.body;
    let polled: *mut PollFd = std::ptr::with_exposed_provenance_mut(fds as usize);
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the program does not access the array until it has this event.
    let polled = unsafe { std::slice::from_raw_parts_mut(polled, count) };
    for (at, polled) in polled.iter_mut().enumerate() {
        let found = library::get().and_then(|library| library.socket(polled.fd));
        // A closed socket counts as ready, because the next call on it returns at once.
        let now = found.map_or(-1, |socket| socket.ready());
        let first = if at as u64 == index { ready } else { 0 };
        polled.revents = polled.events & (now | i16::try_from(first).unwrap_or(0));
    }
    event.body = [fds, event.body[1], 0, 0, 0, 0];
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
                queue.set_depth(depth.ok_or(libc::EINVAL)?);
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
            QATTR_DEPTH => number(queue.depth()),
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
            QATTR_FD => queue.fd()?.to_ne_bytes().to_vec(),
            QATTR_COUNTERS => {
                let counters = [socket::COPIED.load(Relaxed), socket::DIRECT.load(Relaxed)];
                counters.iter().flat_map(|c| c.to_ne_bytes()).collect()
            }
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: the program's buffer has `*len` bytes.
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

/// A part of a file that is used as memory in a transfer.
#[derive(Debug, Clone, Copy)]
struct FilePart {
    fd: c_int,
    offset: i64,
}

/// Finds the keys of the memory of a transfer. Memory without a key is registered, or copied if that is faster. Adds the memory with local keys
/// to the operation, and returns it with the keys for the peer.
fn resolve(
    library: &Library,
    socket: &Socket,
    vec: &[(IoVec, Option<FilePart>)],
    what: Use,
    persistent: bool,
    op: &mut Op,
) -> Answer<Segments> {
    let (device, immediate) = socket.device()?;
    let mut remote = Segments::new();
    if let [(v, None)] = vec
        && v.handle != UNREGISTERED
    {
        // Most transfers are of this kind.
        require(v.len as u64 <= MAX_LENGTH, libc::EMSGSIZE)?;
        let keys = registered(library, device, v, what, op)?;
        let addr = v.base.expose_provenance() as u64;
        add_segment(op, &mut remote, addr, v.len, (keys.lkey, keys.rkey));
        return Ok(remote);
    }
    require(vec.len() <= MAX_SEGMENTS, libc::EMSGSIZE)?;
    let total = vec
        .iter()
        .try_fold(0u64, |sum, (v, _)| sum.checked_add(v.len as u64));
    let total = total.filter(|t| *t <= MAX_LENGTH).ok_or(libc::EMSGSIZE)?;
    let several = vec.iter().filter(|(v, _)| v.len > 0).count() > 1;
    // Parts without bytes are left out, because the data begins with the first segment.
    for (v, file) in vec.iter().filter(|(v, _)| v.len > 0 || total == 0) {
        let (mut addr, len) = (v.base.expose_provenance() as u64, v.len as u64);
        let (mut lkey, mut rkey) = (0, 0);
        let pooled = || {
            let apart = len > 0 && !persistent && (what == Use::Source || !several);
            apart.then(|| socket.buffer(device, len, what)).flatten()
        };
        if let Some(file) = file {
            require(file.fd >= 0, libc::EBADF)?;
            if let Some(piece) = pooled() {
                memory::read_file(file.fd, file.offset, piece.addr(), len)?;
                socket::COPIED.fetch_add(len, Relaxed);
                addr = piece.addr();
                (lkey, rkey) = piece.keys();
                op.keep.push(Keep::Pooled(piece));
            } else if v.len <= socket::SHORT && !persistent {
                // The library may copy these bytes to a message later. If they were mapped, and the file was truncated by then, the
                // access would end the process.
                let mut bytes = vec![0u8; v.len].into_boxed_slice();
                addr = bytes.as_mut_ptr().expose_provenance() as u64;
                memory::read_file(file.fd, file.offset, addr, len)?;
                socket::COPIED.fetch_add(len, Relaxed);
                let region = memory::register(device, addr, len, what)?;
                (lkey, rkey) = (region.lkey(), region.rkey());
                op.keep.push(Keep::Own { _region: region });
                op.keep.push(Keep::Copy { _bytes: bytes });
            } else {
                let map = FileMap::new(file.fd, file.offset, len)?;
                let region = memory::register(device, map.addr, len, what)?;
                addr = map.addr;
                (lkey, rkey) = (region.lkey(), region.rkey());
                op.keep.push(Keep::Own { _region: region });
                op.keep.push(Keep::Map { _map: map });
            }
        } else if v.handle != UNREGISTERED {
            let keys = registered(library, device, v, what, op)?;
            (lkey, rkey) = (keys.lkey, keys.rkey);
        } else if len > 0 {
            require(!v.base.is_null(), libc::EFAULT)?;
            let copied = what == Use::Source && !several && !persistent && total <= immediate;
            if copied {
                // The data of a short send is copied into the message.
            } else if let Some(piece) = pooled() {
                if what == Use::Source {
                    // SAFETY: the program passes this memory, and the buffer has at least the same length.
                    unsafe {
                        let from = v.base.cast::<u8>().cast_const();
                        let to = std::ptr::with_exposed_provenance_mut(piece.addr() as usize);
                        std::ptr::copy_nonoverlapping(from, to, v.len);
                    }
                    socket::COPIED.fetch_add(len, Relaxed);
                } else {
                    op.bounce = Some(addr);
                }
                addr = piece.addr();
                (lkey, rkey) = piece.keys();
                op.keep.push(Keep::Pooled(piece));
            } else {
                let region = memory::register(device, addr, len, what)?;
                (lkey, rkey) = (region.lkey(), region.rkey());
                op.mr = Some(Ptr(region.mr()));
                op.keep.push(Keep::Own { _region: region });
            }
        }
        add_segment(op, &mut remote, addr, v.len, (lkey, rkey));
    }
    Ok(remote)
}

/// Returns the keys of memory that the program has registered, and keeps it registered until the operation ends.
fn registered(
    library: &Library,
    device: &Device,
    v: &IoVec,
    what: Use,
    op: &mut Op,
) -> Answer<Keys> {
    let (addr, len) = (v.base.expose_provenance() as u64, v.len as u64);
    require(!v.base.is_null() || len == 0, libc::EFAULT)?;
    library.with_memory(v.handle, |memory| {
        // SAFETY: the memory is from the table.
        let used = unsafe { Used::new(memory) }?;
        require(len == 0 || memory.contains(addr, len), libc::EACCES)?;
        let keys = memory.keys(device, what)?;
        op.mr = Some(keys.mr);
        op.keep.push(Keep::Memory(used));
        Ok(keys)
    })
}

/// Adds memory to an operation. The caller has checked that the length is at most [`MAX_LENGTH`].
fn add_segment(
    op: &mut Op,
    remote: &mut Segments,
    addr: u64,
    len: usize,
    (lkey, rkey): (u32, u32),
) {
    let segment = |stag| Segment {
        addr,
        stag,
        len: u32::try_from(len).unwrap_or(0),
    };
    op.segments.push(segment(lkey));
    remote.push(segment(rkey));
}

/// The kind of a transfer.
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
    vec: &[(IoVec, Option<FilePart>)],
    transfer: &Transfer,
    q: c_int,
    ahandle: isize,
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
    let library = library::get()?;
    library.with_socket(fd, |socket| {
        library.with_queue(q, |queue| {
            begin_transfer(library, socket, queue, vec, transfer, ahandle)
        })
    })
}

fn begin_transfer(
    library: &Library,
    socket: &Arc<Socket>,
    queue: &Arc<Queue>,
    vec: &[(IoVec, Option<FilePart>)],
    transfer: &Transfer,
    ahandle: isize,
) -> Answer {
    let persistent = transfer.flags & PERSISTENT != 0;
    let places = if transfer.flags & NOTIFY != 0 { 2 } else { 1 };
    reserve(socket, queue, places)?;
    let mut op = plain(transfer.kind, queue, ahandle, transfer.user);
    op.places = places;
    op.flags = u64::from(transfer.flags.unsigned_abs());
    op.offset = transfer.offset;
    let what = match (sends(transfer.kind), persistent) {
        (true, _) => Use::Source,
        (false, true) => Use::Target,
        (false, false) => Use::Sink,
    };
    let remote = match resolve(library, socket, vec, what, persistent, &mut op) {
        Ok(remote) => remote,
        Err(errno) => {
            queue.release(places);
            return Err(errno);
        }
    };
    let begin = if sends(transfer.kind) {
        Begin::Send(remote)
    } else {
        Begin::Recv(remote, transfer.has_offset.then_some(transfer.offset))
    };
    refused(queue, places, socket.start(op, begin))
}

fn one(buf: *const c_void, len: usize, handle: c_int) -> [(IoVec, Option<FilePart>); 1] {
    let vec = IoVec {
        base: buf.cast_mut(),
        len,
        handle,
    };
    [(vec, None)]
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
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle))
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
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle))
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
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle))
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
    done(transfer(fd, &one(buf, len, handle), &t, q, ahandle))
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
    // SAFETY: the program passes the number of elements.
    let vec = unsafe { std::slice::from_raw_parts(iov, count) };
    let vec: Vec<_> = vec.iter().map(|v| (*v, None)).collect();
    let user = msg.expose_provenance() as u64;
    let t = Transfer {
        kind,
        flags,
        user,
        offset: 0,
        has_offset: false,
    };
    transfer(fd, &vec, &t, q, ahandle)
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
        // SAFETY: the program passes this structure, with the number of its vectors.
        let (vec, count) = unsafe { ((*xf).vec, (*xf).len) };
        require(!vec.is_null(), libc::EFAULT)?;
        let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
        require((1..=MAX_SEGMENTS).contains(&count), libc::EMSGSIZE)?;
        // SAFETY: as above.
        let parts = unsafe { std::slice::from_raw_parts(vec, count) };
        let user = xf.expose_provenance() as u64;
        let t = Transfer {
            kind: socket::EVT_SENDFILE,
            flags,
            user,
            offset: 0,
            has_offset: false,
        };
        let part = |xv: &XferVec| match xv.kind {
            MEMORY => Ok((xv.vec, None)),
            FILE if xv.vec.len > 0 => Ok((
                xv.vec,
                Some(FilePart {
                    fd: xv.fd,
                    offset: xv.offset,
                }),
            )),
            _ => Err(libc::EINVAL),
        };
        let parts = parts.iter().map(part).collect::<Answer<Vec<_>>>()?;
        transfer(fd, &parts, &t, q, ahandle)
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
        // SAFETY: the program passes the length of its address.
        unsafe { check_address(addr, len) }?;
        let (socket, queue) = begin(fd, q, 1)?;
        // SAFETY: as above.
        let fits = unsafe { check_family(&socket, addr) };
        refused(&queue, 1, fits)?;
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
        let count = usize::try_from(nfds).map_err(|_| libc::EINVAL)?;
        require(
            flags == 0 && (1..=MAX_POLLED).contains(&count),
            libc::EINVAL,
        )?;
        // SAFETY: the program passes an array with this many elements.
        let polled = unsafe { std::slice::from_raw_parts(fds, count) };
        let polled: Vec<_> = polled.iter().map(|p| (p.fd, p.events)).collect();
        for (_, events) in &polled {
            require(events & 5 != 0 && events & !5 == 0, libc::EINVAL)?;
        }
        let mut sockets = Vec::with_capacity(count);
        let mut first = None;
        for (fd, _) in &polled {
            // The entry in the queue for the event is reserved with the first socket.
            match begin(*fd, q, usize::from(first.is_none())) {
                Ok((socket, queue)) => {
                    first.get_or_insert(queue);
                    sockets.push(socket);
                }
                Err(errno) => {
                    if let Some(queue) = first {
                        queue.release(1);
                    }
                    return Err(errno);
                }
            }
        }
        let queue = first.ok_or(libc::EINVAL)?;
        let mut op = plain(
            socket::EVT_POLL,
            &queue,
            ahandle,
            fds.expose_provenance() as u64,
        );
        op.offset = count as u64;
        let call = Arc::new(PollCall {
            op: Mutex::new(Some(op)),
            ahandle,
        });
        for (index, (socket, (_, events))) in sockets.iter().zip(&polled).enumerate() {
            socket.poll(&call, index, *events);
            if call.is_over() {
                break;
            }
        }
        Ok(())
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
        refused(&queue, 1, socket.start(op, Begin::Shutdown))
    };
    done(start())
}

/// The function is variadic in C. On x86-64 and AArch64 its third argument is passed in the register of the parameter `value`.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_fcntl(fd: c_int, cmd: c_int, value: c_int) -> c_int {
    let control = || {
        let socket = library::get()?.socket(fd)?;
        let milliseconds = Duration::from_millis(u64::from((value & !TIMEOUT_ONCE).unsigned_abs()));
        let timeout = Timeout {
            after: (!milliseconds.is_zero()).then_some(milliseconds),
            once: value & TIMEOUT_ONCE != 0,
        };
        let within =
            |range: std::ops::RangeInclusive<c_int>| require(range.contains(&value), libc::EINVAL);
        let shown = |time: Duration| c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX);
        let change: &dyn Fn(&mut Settings) = match cmd {
            F_SETCREDITS => {
                within(1..=1024)?;
                &|s| s.credits = u16::try_from(value).unwrap_or(1)
            }
            F_SETSMALLPACKET => {
                within(0..=1 << 20)?;
                &|s| s.immediate = value.unsigned_abs()
            }
            F_SETSTREAMBUFFER => {
                within(0..=64 << 20)?;
                &|s| s.buffer = value.unsigned_abs()
            }
            F_SETCONNECTTIMEOUT => {
                within(1..=c_int::MAX)?;
                &|s| s.connect_timeout = Duration::from_millis(u64::from(value.unsigned_abs()))
            }
            F_SETRECVADVERT => {
                within(0..=1)?;
                &|s| s.ready = value == 1
            }
            F_SETLINGER => {
                within(0..=c_int::MAX)?;
                &|s| s.linger = Duration::from_millis(u64::from(value.unsigned_abs()))
            }
            ASYNC_SEND_TIMEOUT | ASYNC_RECV_TIMEOUT => {
                within(0..=c_int::MAX)?;
                if cmd == ASYNC_SEND_TIMEOUT {
                    &|s| s.send_timeout = timeout
                } else {
                    &|s| s.recv_timeout = timeout
                }
            }
            ASYNC_RECV_ORDERED => {
                within(0..=1)?;
                &|s| s.ordered = value == 1
            }
            F_GETCREDITS..=F_GETRECVADVERT => &|_| {},
            _ => return Err(libc::EINVAL),
        };
        let settings = socket.settings(change)?;
        Ok(match cmd {
            F_GETCREDITS => c_int::from(settings.credits),
            F_GETSMALLPACKET => c_int::try_from(settings.immediate).unwrap_or(c_int::MAX),
            F_GETSTREAMBUFFER => c_int::try_from(settings.buffer).unwrap_or(c_int::MAX),
            F_GETCONNECTTIMEOUT => shown(settings.connect_timeout),
            F_GETLINGER => shown(settings.linger),
            F_GETRECVADVERT => c_int::from(settings.ready),
            _ => 0,
        })
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
        library.add_socket(domain, kind == libc::SOCK_STREAM, Settings::DEFAULT)
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
        // SAFETY: the program passes the length of its address.
        unsafe {
            check_address(addr, len)?;
            check_family(&socket, addr)?;
        }
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

/// Closes the socket when the peer has answered all messages, and then reports the event.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_close_async(fd: c_int, q: c_int, ahandle: isize) -> c_int {
    let start = || {
        let (socket, queue) = begin(fd, q, 1)?;
        let op = plain(socket::EVT_CLOSE, &queue, ahandle, 0);
        refused(&queue, 1, socket.begin_close(op))
    };
    done(start())
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
    // SAFETY: the program passes valid pointers.
    done(unsafe { name(fd, addr, len, false) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn exs_getpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: the program passes valid pointers.
    done(unsafe { name(fd, addr, len, true) })
}
