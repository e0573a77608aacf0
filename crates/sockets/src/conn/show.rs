//! The table of sockets that `anywarp sockets stat` reads: see `sockets_base::stat`.
//!
//! The table is created with the first socket that has something to show. A forked child creates a table of its own.

use crate::conn::table;
use crate::owner;
use crate::stream::Stream;
use crate::sys;
use libc::c_int;
use sockets_base::stat::{MAGIC, RECORD, RECORDS, SIZE, State, Why};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

#[repr(C)]
struct Head {
    magic: [u8; 8],
    process: AtomicU32,
    zero: u32,
    upgraded: AtomicU64,
    stayed: AtomicU64,
}

#[repr(C)]
struct Record {
    state: AtomicU32,
    why: AtomicU32,
    window: AtomicU32,
    memory: AtomicU32,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

#[repr(C)]
struct Table {
    head: Head,
    records: [Record; RECORDS],
}

const _: () = assert!(size_of::<Table>() == SIZE && size_of::<Record>() == RECORD);

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
static FD: AtomicI32 = AtomicI32::new(-1);
/// Held while the table is created, so that there is only one. True: creating it failed, and is not tried again.
static MAKING: Mutex<bool> = Mutex::new(false);

fn table() -> Option<&'static Table> {
    let at = TABLE.load(Ordering::Acquire);
    if at.is_null() {
        return make();
    }
    // SAFETY: the table stays mapped while the pointer is set, and all its fields may be written concurrently.
    unsafe { at.as_ref() }
}

fn make() -> Option<&'static Table> {
    // If another thread is creating the table, this event is not shown. A child that is forked at that moment never has a table,
    // because the lock stays locked in it.
    let mut failed = MAKING.try_lock().ok()?;
    let there = TABLE.load(Ordering::Acquire);
    if there.is_null() && !*failed {
        match sys::shared(c"anywarp-sockets", SIZE, &MAGIC) {
            Some((fd, at)) => {
                table::own(fd);
                FD.store(fd, Ordering::Release);
                let at = at.cast::<Table>();
                // SAFETY: a mapping of this size was made, and zeros are valid in it.
                unsafe { (*at).head.process.store(owner::me(), Ordering::Relaxed) };
                TABLE.store(at, Ordering::Release);
            }
            None => *failed = true,
        }
    }
    // SAFETY: as above; null if it could not be made.
    unsafe { TABLE.load(Ordering::Acquire).as_ref() }
}

/// Called in the child of a fork. The inherited table is the parent's and is no longer used.
pub fn forked() {
    let fd = FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        table::close_own(fd);
    }
    let at = TABLE.swap(std::ptr::null_mut(), Ordering::AcqRel);
    if !at.is_null() {
        sys::unmap(at.cast(), SIZE);
    }
}

/// Called when the program puts a descriptor of its own at the number `fd`. If that is the number of the table's descriptor, the library
/// does not close it later.
pub fn lost(fd: c_int) {
    let _ = FD.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
}

fn record(fd: c_int) -> Option<&'static Record> {
    table()?.records.get(usize::try_from(fd).ok()?)
}

fn set(fd: c_int, state: State, why: Why) {
    if let Some(r) = record(fd) {
        r.why.store(why as u32, Ordering::Relaxed);
        r.window.store(0, Ordering::Relaxed);
        r.memory.store(0, Ordering::Relaxed);
        r.bytes_in.store(0, Ordering::Relaxed);
        r.bytes_out.store(0, Ordering::Relaxed);
        r.state.store(state as u32, Ordering::Release);
    }
}

/// Shows a listener whose connections may be upgraded.
pub fn listener(fd: c_int) {
    set(fd, State::Listener, Why::NotSeen);
}

/// Shows a connection that is not decided yet.
pub fn undecided(fd: c_int) {
    set(fd, State::Undecided, Why::NotSeen);
}

/// Shows a plain connection and why it is plain.
pub fn plain(fd: c_int, why: Why) {
    set(fd, State::Plain, why);
    if let Some(t) = table() {
        t.head.stayed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Shows an upgraded connection.
pub fn upgraded(fd: c_int) {
    set(fd, State::Upgraded, Why::NotSeen);
    if let Some(t) = table() {
        t.head.upgraded.fetch_add(1, Ordering::Relaxed);
    }
}

/// Shows how many bytes the program has read and written, and the window and the memory of the stream.
#[inline]
pub fn moved(fd: c_int, stream: &Stream) {
    if let Some(r) = record(fd) {
        let memory = u32::try_from(stream.memory()).unwrap_or(u32::MAX);
        r.window.store(stream.window(), Ordering::Relaxed);
        r.memory.store(memory, Ordering::Relaxed);
        r.bytes_in.store(stream.bytes_in, Ordering::Relaxed);
        r.bytes_out.store(stream.bytes_out, Ordering::Relaxed);
        // A duplicated descriptor has no state in the table before its first use.
        r.state.store(State::Upgraded as u32, Ordering::Release);
    }
}

/// Shows a UDP socket that accepts messages.
pub fn datagrams(fd: c_int, state: State) {
    set(fd, state, Why::NotSeen);
    if let Some(t) = table() {
        t.head.upgraded.fetch_add(1, Ordering::Relaxed);
    }
}

/// Hides a descriptor of the library.
pub fn own(fd: c_int) {
    set(fd, State::Own, Why::NotSeen);
}

/// Counts payload bytes of messages that the program has read or written.
#[inline]
pub fn message(fd: c_int, state: State, bytes_in: usize, bytes_out: usize) {
    if let Some(r) = record(fd) {
        r.bytes_in.fetch_add(bytes_in as u64, Ordering::Relaxed);
        r.bytes_out.fetch_add(bytes_out as u64, Ordering::Relaxed);
        // A duplicated descriptor, and one in a forked child, have no state in the table before their first use.
        r.state.store(state as u32, Ordering::Release);
    }
}

/// Removes a closed descriptor from the table, if there is a table.
pub fn forget(fd: c_int) {
    if !TABLE.load(Ordering::Acquire).is_null() {
        set(fd, State::Unknown, Why::NotSeen);
    }
}
