//! The cache of registrations of repeatedly used memory, which end when the memory is unmapped, moved or discarded.
//!
//! Each manager has a number. The *owner* of a registration is the number of the manager that has made it.
//!
//! Two threads serve all managers of a process. One reads the kernel's reports. The kernel stops a thread that changes watched memory
//! until the report is read, so this thread takes no lock, neither allocates nor frees memory, and does nothing else. Whoever locks
//! the table removes the registrations of the reported memory first; the other thread does so if no thread of the program does. It then
//! ends these registrations.

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::Thread;

use libc::c_int;

use crate::changes::{Changes, Taken};
use crate::ffi::ibv_pd;
use crate::fork;
use crate::lock::{lock, wait};
use crate::region::Region;
use crate::table::{Found, Table, Until, Wanted};
use crate::thread::spawn;
use crate::watch::{self, Change, Watch, pages};

static TABLE: Mutex<Table> = Mutex::new(Table::empty());
static CHANGES: Changes = Changes::new();
/// Signalled when a registration has ended.
static ENDED: Condvar = Condvar::new();
static WATCH: OnceLock<Result<Watch, c_int>> = OnceLock::new();
/// How many times a lookup is repeated while the thread that reads reports has not read all of them.
const LOOKUPS_MAX: usize = 64;

/// Locks the table, and removes the registrations of memory that has changed.
fn table() -> MutexGuard<'static, Table> {
    let mut table = lock(&TABLE);
    let Some(Ok(watch)) = WATCH.get() else {
        return table;
    };
    while let Some(change) = CHANGES.take() {
        match change {
            Taken::One(Change::Gone { start, end }) => {
                table.invalidate(&(start..end), None, Some(watch), false);
            }
            Taken::One(Change::Emptied { start, end }) => {
                table.invalidate(&(start..end), None, Some(watch), true);
            }
            Taken::One(Change::Moved { start, end, to }) => {
                table.invalidate(&(start..end), None, Some(watch), false);
                // The kernel goes on watching the memory at its new address until `forget` below ends this. The program may already have used
                // the memory there. The registrations at the new address therefore end too: changes of their memory will not be reported.
                let new = to..to + (end - start);
                table.invalidate(&new, None, Some(watch), true);
                watch.forget(&new);
            }
            Taken::All => {
                table.invalidate(&(0..usize::MAX), None, Some(watch), true);
            }
        }
    }
    table
}

/// Returns the descriptor (of userfaultfd(2)) by which the kernel reports changes of memory. The first call creates it and its threads.
///
/// # Errors
///
/// The errno of the kernel.
pub(crate) fn watch() -> Result<&'static Watch, c_int> {
    let made = WATCH.get_or_init(|| {
        lock(&TABLE).make_room();
        let watch = Watch::open()?;
        let read = |ender: Thread| {
            // `get_or_init` sets the value after its closure has returned.
            while WATCH.get().is_none() {
                std::thread::yield_now();
            }
            if let Some(Ok(watch)) = WATCH.get() {
                read_changes(watch, &ender);
            }
        };
        spawn("awbuf-end", end_the_dead)
            .and_then(|ender| spawn("awbuf-watch", move || read(ender)))
            .inspect_err(|_| watch.close())?;
        Ok(watch)
    });
    made.as_ref().map_err(|errno| *errno)
}

/// Reads the kernel's reports, which lets the threads continue that have changed the memory.
fn read_changes(watch: &'static Watch, ender: &Thread) {
    while watch.wait() {
        CHANGES.add(|| watch.next());
        ender.unpark();
    }
}

fn end_the_dead() {
    loop {
        drop(table());
        end_dead();
        std::thread::park();
    }
}

/// Removes the registrations of memory that has changed, so that the statistics count them.
pub(crate) fn refresh() {
    CHANGES.wait_for_reader();
    drop(table());
}

/// Ends the dead registrations, which no buffer uses any more, except those that other threads are ending.
fn end_dead() {
    loop {
        let Some((number, region)) = table().begin_end() else {
            return;
        };
        drop(region);
        let rest = table().ended(number);
        ENDED.notify_all();
        drop(rest);
    }
}

/// Ends the dead registrations, and waits for other threads that are ending those selected by `until`.
fn end_dead_until(until: Until) {
    end_dead();
    let mut table = table();
    while table.is_ending(until) {
        table = wait(&ENDED, table);
    }
}

/// A cached registration that is in use until this is dropped.
#[derive(Debug)]
pub(crate) struct Kept {
    id: u64,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let over = table().release(self.id);
        if let Some(until) = over {
            end_dead_until(until);
        }
    }
}

/// The result of a lookup.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The memory has a cached registration.
    Kept(Kept),
    /// The memory has no cached registration, but is used repeatedly and should get one.
    Known,
    /// The memory has no cached registration, or a change of memory is in progress so that the state is unknown.
    Unknown,
}

/// Returns whether the table contains no registrations of changed memory. The caller has locked the table.
fn is_settled() -> bool {
    // The order matters. The kernel counts a change until its report has been read. `CHANGES` counts it from before the report is read until it
    // is taken. So a change that the first check does not find any more is found by the second.
    watch().is_ok_and(Watch::settled) && CHANGES.are_taken()
}

/// Looks up a cached registration. If there is none and `learn` is set, counts the use of the memory.
pub(crate) fn find(wanted: &Wanted<'_>, learn: bool) -> Answer {
    for _ in 0..LOOKUPS_MAX {
        let mut table = table();
        let Some(found) = table.find(wanted) else {
            return if learn && table.is_known(wanted) {
                Answer::Known
            } else {
                Answer::Unknown
            };
        };
        // The memory may have been unmapped and mapped again before the report of the change was read.
        if !found.watched || is_settled() {
            table.hold(&found);
            let Found { id, lkey, rkey, .. } = found;
            return Answer::Kept(Kept { id, lkey, rkey });
        }
        drop(table);
        std::thread::yield_now();
    }
    Answer::Unknown
}

/// Registers memory and caches the registration. Returns `Ok(None)` if the registration cannot be cached.
///
/// # Errors
///
/// The errno of `ibv_reg_mr`.
///
/// # Safety
///
/// The requirements of [`Region::new`] apply. The region ends no later than with [`forget`] for its owner or, if it is in use then,
/// when it is released.
pub(crate) unsafe fn keep(
    pd: *mut ibv_pd,
    wanted: &Wanted<'_>,
    watched: bool,
    limit: usize,
) -> Result<Option<Kept>, c_int> {
    // The first call of `watch` allocates the table. `reserve` needs the result also to stop watching the pages of removed
    // entries.
    let watch = watch().ok();
    if watched && (watch.is_none() || !watch::anonymous(&pages(&wanted.range))) {
        // The memory cannot be watched, because it is not anonymous or the kernel does not permit it. This does not change soon, and it
        // takes long to read the list of mappings, so the next attempt is postponed.
        table().postpone(wanted);
        return Ok(None);
    }
    let reserve = || table().reserve(wanted, watched, watch, limit);
    let mut reserved = reserve();
    if let Err(Some(until)) = reserved {
        end_dead_until(until);
        reserved = reserve();
    }
    end_dead();
    let Ok((id, access)) = reserved else {
        return Ok(None);
    };
    let (start, len) = (wanted.range.start as u64, wanted.range.len());
    // SAFETY: upheld by the caller.
    match unsafe { Region::new(pd, start, len, access) } {
        Ok(region) => {
            let (lkey, rkey) = (region.lkey(), region.rkey());
            let filled = table().fill(id, region);
            debug_assert!(filled.is_ok(), "an entry in use is in one of the lists");
            Ok(filled.is_ok().then_some(Kept { id, lkey, rkey }))
        }
        Err(errno) => {
            table().cancel(id, watch);
            end_dead();
            Err(errno)
        }
    }
}

/// Ends the cached registrations of an owner in a range, and waits for those that are already ending. Returns how
/// many registrations it ended.
pub(crate) fn invalidate(owner: u64, range: &std::ops::Range<usize>) -> usize {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    CHANGES.wait_for_reader();
    let (ended, until) = {
        let mut table = table();
        let ended = if range.is_empty() {
            0
        } else {
            table.invalidate(range, Some(owner), watch, true)
        };
        (ended, table.until(owner))
    };
    end_dead_until(until);
    ended
}

/// Ends all cached registrations of an owner, and waits for those that are already ending. Those in use end when they are
/// released.
pub(crate) fn forget(owner: u64) {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    let until = {
        let mut table = table();
        table.drop_owner(owner, watch);
        table.until(owner)
    };
    end_dead_until(until);
}

/// Ends some cached registrations of an owner, to free resources. Returns whether there were any.
pub(crate) fn shrink(owner: u64) -> bool {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    let (any, until) = {
        let mut table = table();
        let any = table.shrink(owner, watch);
        (any, table.until(owner))
    };
    end_dead_until(until);
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::page;
    use std::sync::mpsc;
    use std::time::Duration;

    /// A signal handler that interrupts a thread with the lock may do this.
    #[test]
    fn a_thread_with_the_lock_may_unmap_watched_memory() {
        let Ok(watch) = watch() else {
            return;
        };
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: this is a new mapping.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), page(), protection, flags, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            watch.add(&(at.addr()..at.addr() + page())).unwrap();
            let locked = lock(&TABLE);
            // SAFETY: the memory was mapped above.
            unsafe { libc::munmap(at, page()) };
            assert!(!is_settled(), "the change is not removed from the table");
            drop(locked);
            done.send(()).unwrap();
        });
        assert_eq!(is_done.recv_timeout(Duration::from_secs(10)), Ok(()));
    }
}
