//! Event queues, to which only the program itself writes: address vectors are filled synchronously, and there are no connections.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_char, c_int, c_void};

use super::object::{NONE, Table, ended, ended_int, give, head, known, ops, take};
use super::text::of_error;
use crate::abi::*;
use crate::event::{Wait, raise};
use crate::limits;

/// The number of an event and its content.
type Event = (u32, Vec<u8>);

#[repr(C)]
struct EventQueue {
    c: fid_eq,
    wait: Option<Wait>,
    /// The kind of wait object that the program has requested.
    object: u32,
    /// Whether the program may write events (`FI_WRITE`).
    writable: bool,
    /// The number of events that the queue can hold.
    room: usize,
    events: Mutex<VecDeque<Event>>,
    arrived: Condvar,
}

impl EventQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static OPS: Table<fi_ops> = ops(close as *const (), NONE, control as *const ());
static EQ_OPS: Table<fi_ops_eq> = Table(fi_ops_eq {
    size: size_of::<fi_ops_eq>(),
    read: read as *const (),
    readerr: no_error as *const (),
    write: write as *const (),
    sread: sread as *const (),
    strerror: strerror as *const (),
});

pub(crate) unsafe extern "C" fn open(
    _fabric: *mut fid_fabric,
    attr: *mut fi_eq_attr,
    eq: *mut *mut fid_eq,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: the caller passes null or a valid pointer.
        let attr = unsafe { attr.as_ref() };
        let object = attr.map_or(FI_WAIT_NONE, |a| a.wait_obj);
        let wait = match object {
            FI_WAIT_NONE | FI_WAIT_UNSPEC | FI_WAIT_YIELD => None,
            FI_WAIT_FD => Some(Wait::alone().ok_or(FI_ENOMEM)?),
            _ => return Err(FI_ENOSYS),
        };
        let queue = EventQueue {
            c: fid_eq {
                fid: head(FI_CLASS_EQ, context, &OPS),
                ops: &raw const EQ_OPS.0,
            },
            wait,
            object,
            writable: attr.is_some_and(|a| a.flags & FI_WRITE != 0),
            room: attr.map_or(0, |a| a.size).max(limits::ENTRIES),
            events: Mutex::default(),
            arrived: Condvar::new(),
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(queue, eq) }
    })
}

/// The event queue of each object that is bound to one, by the address of the object.
static BOUND: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Remembers that an object is bound to an event queue, which cannot be closed before [`unbind`].
pub(crate) fn bind<T>(object: *mut T, eq: *mut fid) {
    let mut bound = BOUND.lock().unwrap_or_else(PoisonError::into_inner);
    bound.insert(object.addr(), eq.addr());
}

/// Forgets the event queue of an object that is closed.
pub(crate) fn unbind<T>(object: *mut T) {
    let mut bound = BOUND.lock().unwrap_or_else(PoisonError::into_inner);
    bound.remove(&object.addr());
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        let bound = BOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if bound.values().any(|eq| *eq == at.addr()) {
            return Err(FI_EBUSY);
        }
        drop(bound);
        // SAFETY: this process opened the object, and the program does not use it any more.
        unsafe { take::<EventQueue, _>(at) }?;
        Ok(0)
    })
}

unsafe extern "C" fn control(at: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    ended_int(|| {
        // SAFETY: the object was opened by this library; the argument is valid for writing a descriptor or the kind of a wait object
        // (guaranteed by the caller).
        unsafe {
            let queue = known::<EventQueue, _>(at)?;
            let answer = match (command, &queue.wait) {
                (FI_GETWAIT, Some(wait)) => wait.fd(),
                (FI_GETWAITOBJ, _) => queue.object as c_int,
                _ => return Err(FI_ENOSYS),
            };
            *arg.cast::<c_int>().as_mut().ok_or(FI_EINVAL)? = answer;
        }
        Ok(0)
    })
}

/// Returns `Ok` if the program may wait for the queue's descriptor, and `FI_EAGAIN` if there are events.
///
/// # Safety
/// `eq` is null or was opened by this library.
pub(crate) unsafe fn trywait(eq: *mut fid_eq) -> Result<(), c_int> {
    // SAFETY: upheld by the caller.
    let queue = unsafe { known::<EventQueue, _>(eq) }?;
    if queue.lock().is_empty() {
        Ok(())
    } else {
        Err(FI_EAGAIN)
    }
}

/// Copies the first event to the program, and removes it unless the program only peeks.
///
/// # Safety
/// `event` is null or writable, and `buf` has `len` bytes.
unsafe fn first(
    queue: &EventQueue,
    events: &mut VecDeque<Event>,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> Result<isize, c_int> {
    let (number, content) = events.front().ok_or(FI_EAGAIN)?;
    if len < content.len() {
        return Err(FI_ETOOSMALL);
    }
    if buf.is_null() {
        return Err(FI_EINVAL);
    }
    // SAFETY: the content fits; the rest is upheld by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(content.as_ptr(), buf.cast(), content.len());
        if let Some(event) = event.as_mut() {
            *event = *number;
        }
    }
    let n = content.len();
    if flags & FI_PEEK == 0 {
        events.pop_front();
        if let (true, Some(wait)) = (events.is_empty(), &queue.wait) {
            wait.clear();
        }
    }
    isize::try_from(n).map_err(|_| FI_EINVAL)
}

unsafe extern "C" fn read(
    eq: *mut fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> isize {
    // SAFETY: the object was opened by this library; the buffer has `len` bytes (guaranteed by the caller).
    ended(|| unsafe {
        let queue = known::<EventQueue, _>(eq)?;
        first(queue, &mut queue.lock(), event, buf, len, flags)
    })
}

extern "C" fn no_error() -> isize {
    -(FI_EAGAIN as isize)
}

unsafe extern "C" fn write(
    eq: *mut fid_eq,
    event: u32,
    buf: *const c_void,
    len: usize,
    flags: u64,
) -> isize {
    ended(|| {
        // SAFETY: the object was opened by this library.
        let queue = unsafe { known::<EventQueue, _>(eq) }?;
        if !queue.writable {
            return Err(FI_ENOSYS);
        }
        if flags != 0 {
            return Err(FI_EBADFLAGS);
        }
        if buf.is_null() {
            return Err(FI_EINVAL);
        }
        // SAFETY: the buffer has `len` bytes (guaranteed by the caller).
        let content = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) };
        let mut events = queue.lock();
        if events.len() >= queue.room {
            return Err(FI_EAGAIN);
        }
        events.push_back((event, content.to_vec()));
        if let Some(wait) = &queue.wait {
            raise(wait.event());
        }
        queue.arrived.notify_all();
        isize::try_from(len).map_err(|_| FI_EINVAL)
    })
}

unsafe extern "C" fn sread(
    eq: *mut fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    ended(|| {
        // SAFETY: the object was opened by this library.
        let queue = unsafe { known::<EventQueue, _>(eq) }?;
        // A negative time-out waits without a limit.
        let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
        let begin = Instant::now();
        let mut events = queue.lock();
        while events.is_empty() {
            let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
            if left == Some(Duration::ZERO) {
                return Err(FI_EAGAIN);
            }
            let woken = queue.arrived.wait_timeout(events, left.unwrap_or(LONG));
            events = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        // SAFETY: the buffer has `len` bytes (guaranteed by the caller).
        unsafe { first(queue, &mut events, event, buf, len, flags) }
    })
}

/// The longest wait until the queue is checked again.
const LONG: Duration = Duration::from_secs(3600);

unsafe extern "C" fn strerror(
    _eq: *mut fid_eq,
    errno: c_int,
    _data: *const c_void,
    buf: *mut c_char,
    len: usize,
) -> *const c_char {
    // SAFETY: the buffer is null or has `len` bytes (guaranteed by the caller).
    unsafe { of_error(errno, buf, len) }
}
