//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::{c_char, c_int, c_void};

use super::object::{
    CqObject, DomainObject, NONE, Table, Waiting, ended, ended_int, give, head, known, ops, take,
};
use super::text::of_error;
use crate::abi::*;
use crate::event::{Wait, raise};
use crate::limits;
use crate::queue::{Entry, Queue};

static OPS: Table<fi_ops> = ops(close as *const (), NONE, control as *const ());
static CQ_OPS: Table<fi_ops_cq> = Table(fi_ops_cq {
    size: size_of::<fi_ops_cq>(),
    read: read as *const (),
    readfrom: readfrom as *const (),
    readerr: readerr as *const (),
    sread: sread as *const (),
    sreadfrom: sreadfrom as *const (),
    signal: signal as *const (),
    strerror: strerror as *const (),
});

pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_cq_attr,
    cq: *mut *mut fid_cq,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: upheld by the caller.
        let (domain, attr) = unsafe {
            let attr = attr.as_mut().ok_or(FI_EINVAL)?;
            (&known::<DomainObject, _>(domain)?.domain, attr)
        };
        if attr.format == FI_CQ_FORMAT_UNSPEC {
            attr.format = FI_CQ_FORMAT_CONTEXT;
        }
        // FI_AFFINITY names a processor for interrupts, of which the device has none.
        if attr.format > FI_CQ_FORMAT_TAGGED || attr.flags & !FI_AFFINITY != 0 {
            return Err(FI_EINVAL);
        }
        let (object, wait) = match attr.wait_obj {
            FI_WAIT_NONE | FI_WAIT_YIELD => (attr.wait_obj, None),
            FI_WAIT_UNSPEC | FI_WAIT_FD => {
                let wait = Wait::new(domain.channel.fd()).ok_or(FI_ENOMEM)?;
                (FI_WAIT_FD, Some(wait))
            }
            _ => return Err(FI_ENOSYS),
        };
        let mut queue = Queue::new(attr.format);
        queue.event = wait.as_ref().map(Wait::event);
        let name = domain.lock().shared.queues.insert(queue);
        let object = CqObject {
            fid: fid_cq {
                fid: head(FI_CLASS_CQ, context, &OPS),
                ops: &raw const CQ_OPS.0,
            },
            domain: Arc::clone(domain),
            name: name.map_err(|_full| FI_ENOMEM)?,
            rest: Waiting {
                wait,
                object,
                signaled: AtomicBool::new(false),
            },
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(object, cq) }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<CqObject, _>(at) }?;
        let mut state = object.domain.lock();
        let used = state.endpoints.iter().any(|(_, ep)| {
            [ep.binding.send_queue, ep.binding.receive_queue].contains(&Some(object.name))
        });
        if used {
            return Err(FI_EBUSY);
        }
        state.shared.queues.remove(object.name);
        drop(state);
        // SAFETY: the program does not use the object any more.
        unsafe { take::<CqObject, _>(at) }?;
        Ok(0)
    })
}

unsafe extern "C" fn control(at: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    ended_int(|| {
        // SAFETY: the object was opened by this library; the argument is valid for writing a descriptor or the kind of a wait object
        // (guaranteed by the caller).
        unsafe {
            let waiting = &known::<CqObject, _>(at)?.rest;
            let answer = match (command, &waiting.wait) {
                (FI_GETWAIT, Some(wait)) => wait.fd(),
                (FI_GETWAITOBJ, _) => waiting.object as c_int,
                _ => return Err(FI_ENOSYS),
            };
            *arg.cast::<c_int>().as_mut().ok_or(FI_EINVAL)? = answer;
        }
        Ok(0)
    })
}

/// Writes entry `i` of the program's list.
///
/// # Safety
/// `buf` has room for the entry.
unsafe fn write(format: u32, buf: *mut c_void, i: usize, entry: &Entry) {
    let op_context = std::ptr::with_exposed_provenance_mut(entry.context);
    let (flags, len, data, tag) = (entry.flags, entry.len, entry.data, entry.tag);
    let at = std::ptr::with_exposed_provenance_mut(entry.buf);
    // SAFETY: upheld by the caller; each format begins with the fields of the formats before it.
    unsafe {
        match format {
            FI_CQ_FORMAT_MSG => buf.cast::<fi_cq_msg_entry>().add(i).write(fi_cq_msg_entry {
                op_context,
                flags,
                len,
            }),
            FI_CQ_FORMAT_DATA => buf
                .cast::<fi_cq_data_entry>()
                .add(i)
                .write(fi_cq_data_entry {
                    op_context,
                    flags,
                    len,
                    buf: at,
                    data,
                }),
            FI_CQ_FORMAT_TAGGED => {
                buf.cast::<fi_cq_tagged_entry>()
                    .add(i)
                    .write(fi_cq_tagged_entry {
                        op_context,
                        flags,
                        len,
                        buf: at,
                        data,
                        tag,
                    });
            }
            _ => buf
                .cast::<fi_cq_entry>()
                .add(i)
                .write(fi_cq_entry { op_context }),
        }
    }
}

/// Takes up to `count` entries, and returns their number. If it takes none, returns `FI_EAVAIL` if an error is first in the queue, and
/// `FI_EAGAIN` otherwise.
///
/// # Safety
/// `buf` and `sources` have room for `count` entries, or are null.
unsafe fn take_entries(
    object: &CqObject,
    buf: *mut c_void,
    count: usize,
    sources: *mut FiAddr,
) -> Result<isize, c_int> {
    if buf.is_null() && count > 0 {
        return Err(FI_EINVAL);
    }
    let mut state = object.domain.lock();
    // With `count` 0 the program only wants the device's completions to be handled.
    let empty = state
        .shared
        .queues
        .get(object.name)
        .is_none_or(Queue::is_empty);
    if empty || count == 0 {
        state.progress();
    }
    let queue = state.shared.queues.get_mut(object.name).ok_or(FI_EINVAL)?;
    let mut n = 0;
    while n < count
        && let Some(entry) = queue.take()
    {
        // SAFETY: upheld by the caller.
        unsafe {
            write(queue.format, buf, n, &entry);
            if !sources.is_null() {
                *sources.add(n) = entry.source;
            }
        }
        n += 1;
    }
    if n > 0 {
        return isize::try_from(n).map_err(|_| FI_EINVAL);
    }
    Err(if queue.error_is_first() {
        FI_EAVAIL
    } else {
        FI_EAGAIN
    })
}

unsafe extern "C" fn read(cq: *mut fid_cq, buf: *mut c_void, count: usize) -> isize {
    // SAFETY: the object was opened by this library; the list has `count` entries (guaranteed by the caller).
    ended(|| unsafe { take_entries(known(cq)?, buf, count, std::ptr::null_mut()) })
}

unsafe extern "C" fn readfrom(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    sources: *mut FiAddr,
) -> isize {
    // SAFETY: as above.
    ended(|| unsafe { take_entries(known(cq)?, buf, count, sources) })
}

unsafe extern "C" fn readerr(cq: *mut fid_cq, to: *mut fi_cq_err_entry, _flags: u64) -> isize {
    ended(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<CqObject, _>(cq) }?;
        if to.is_null() {
            return Err(FI_EINVAL);
        }
        let mut state = object.domain.lock();
        let queue = state.shared.queues.get_mut(object.name).ok_or(FI_EINVAL)?;
        let entry = queue.take_error().ok_or(FI_EAGAIN)?;
        // SAFETY: the structure has the layout of the program's version of the header. Before 1.5 it has no `err_data_size`.
        unsafe {
            let at = |a: usize| std::ptr::with_exposed_provenance_mut(a);
            (*to).op_context = at(entry.context);
            (*to).flags = entry.flags;
            (*to).len = entry.len;
            (*to).buf = at(entry.buf);
            (*to).data = entry.data;
            (*to).tag = entry.tag;
            (*to).olen = entry.olen;
            (*to).err = entry.err;
            (*to).prov_errno = entry.err;
            if object.domain.api >= fi_version(1, 5) {
                (*to).err_data_size = 0;
            } else {
                (*to).err_data = std::ptr::null_mut();
            }
        }
        Ok(1)
    })
}

/// Prepares a wait on the queue's descriptor. Returns `FI_EAGAIN` if there are entries.
///
/// # Safety
/// `cq` is null or was opened by this library.
pub(crate) unsafe fn trywait(cq: *mut fid_cq) -> Result<(), c_int> {
    // SAFETY: upheld by the caller.
    let object = unsafe { known::<CqObject, _>(cq) }?;
    let wait = object.rest.wait.as_ref().ok_or(FI_EINVAL)?;
    may_wait(object, wait)
}

fn may_wait(object: &CqObject, wait: &Wait) -> Result<(), c_int> {
    let mut guard = object.domain.lock();
    let state = &mut *guard;
    wait.clear();
    object.domain.channel.drain();
    for endpoint in state.endpoints.values_mut() {
        endpoint.arm();
    }
    // Completions that arrived before the completion queue was armed may raise no event, so all of them are handled.
    let mut is_rest = false;
    for _ in 0..limits::BATCHES_BEFORE_WAIT {
        is_rest = state.progress();
        if !is_rest {
            break;
        }
    }
    let queue = state.shared.queues.get_mut(object.name).ok_or(FI_EINVAL)?;
    if is_rest || !queue.is_empty() {
        if !queue.is_empty() {
            // Another thread may be about to wait for the event that was cleared above.
            raise(wait.event());
        }
        return Err(FI_EAGAIN);
    }
    queue.armed = true;
    // If a peer ends while nothing is on the way to it, no event reports this. So while an operation waits for a peer, the program is woken
    // now and then, and its next call asks the peers.
    if state.endpoints.iter().any(|(_, ep)| ep.waits_for_peers()) {
        wait.wake_after(ASK_PEERS_EVERY);
    }
    Ok(())
}

/// The longest time that a waiting thread sleeps. When it wakes, it asks the peers of unanswered operations whether they still respond, if
/// [`limits::ASK_AFTER`] has passed since they were asked last.
const ASK_PEERS_EVERY: Duration = Duration::from_millis(500);

/// # Safety
/// The requirements of [`take_entries`] apply.
unsafe fn wait_for_entries(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    sources: *mut FiAddr,
    timeout: c_int,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    let object = unsafe { known::<CqObject, _>(cq) }?;
    if object.rest.object == FI_WAIT_NONE {
        return Err(FI_ENOSYS);
    }
    let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
    let begin = Instant::now();
    loop {
        // SAFETY: upheld by the caller.
        match unsafe { take_entries(object, buf, count, sources) } {
            Err(FI_EAGAIN) => {}
            other => return other,
        }
        let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
        if object.rest.signaled.swap(false, Ordering::AcqRel) || left == Some(Duration::ZERO) {
            return Err(FI_EAGAIN);
        }
        let Some(wait) = &object.rest.wait else {
            std::thread::yield_now();
            continue;
        };
        if begin.elapsed() < limits::SPIN {
            continue;
        }
        match may_wait(object, wait) {
            // A signal that was raised before `may_wait` cleared the event ends the wait.
            Ok(()) if object.rest.signaled.load(Ordering::Acquire) => {}
            Ok(()) => wait.wait(Some(
                left.map_or(ASK_PEERS_EVERY, |left| left.min(ASK_PEERS_EVERY)),
            )),
            Err(FI_EAGAIN) => {}
            Err(why) => return Err(why),
        }
    }
}

unsafe extern "C" fn sread(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    _cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the list has `count` entries (guaranteed by the caller).
    ended(|| unsafe { wait_for_entries(cq, buf, count, std::ptr::null_mut(), timeout) })
}

unsafe extern "C" fn sreadfrom(
    cq: *mut fid_cq,
    buf: *mut c_void,
    count: usize,
    sources: *mut FiAddr,
    _cond: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: as above.
    ended(|| unsafe { wait_for_entries(cq, buf, count, sources, timeout) })
}

unsafe extern "C" fn signal(cq: *mut fid_cq) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object.
        let object = unsafe { known::<CqObject, _>(cq) }?;
        if object.rest.object == FI_WAIT_NONE {
            return Err(FI_ENOSYS);
        }
        object.rest.signaled.store(true, Ordering::Release);
        if let Some(wait) = &object.rest.wait {
            raise(wait.event());
        }
        Ok(0)
    })
}

unsafe extern "C" fn strerror(
    _cq: *mut fid_cq,
    errno: c_int,
    _data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: the buffer is null or has `len` bytes (guaranteed by the caller).
    unsafe { of_error(errno, buf, len) }
}
