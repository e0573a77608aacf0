//! Registrations that are kept for memory that is used again, and how they end when the memory changes.
//!
//! Two threads serve all managers of a process. One reads what the kernel reports and takes the registrations concerned out of
//! the list; it must never unmap memory itself, so another ends them.

use std::sync::{Condvar, Mutex, OnceLock};

use libc::c_int;

use crate::ffi::ibv_pd;
use crate::fork;
use crate::lock::{lock, wait};
use crate::region::Region;
use crate::table::{Found, Table, Until, Wanted};
use crate::thread::spawn;
use crate::watch::{self, Change, Watch, pages};

static TABLE: Mutex<Table> = Mutex::new(Table::empty());
/// There is something to end.
static DEAD: Condvar = Condvar::new();
/// Something has ended.
static ENDED: Condvar = Condvar::new();
static WATCH: OnceLock<Result<Watch, c_int>> = OnceLock::new();
/// How often a lookup waits for the reader of changes.
const PATIENCE: usize = 64;

/// The descriptor of changes, with its threads: made when it is first needed.
///
/// # Errors
///
/// The errno of what the kernel refuses.
pub(crate) fn watch() -> Result<&'static Watch, c_int> {
    let made = WATCH.get_or_init(|| {
        lock(&TABLE).make_room();
        let watch = Watch::open()?;
        spawn("awbuf-end", end_the_dead)?;
        spawn("awbuf-watch", || {
            // The value is set when this function's caller is done.
            while WATCH.get().is_none() {
                std::thread::yield_now();
            }
            if let Some(Ok(watch)) = WATCH.get() {
                read_changes(watch);
            }
        })?;
        Ok(watch)
    });
    made.as_ref().map_err(|errno| *errno)
}

/// The table is locked while the kernel's reports are read and the entries of changed memory are removed: another thread finds
/// only entries whose memory is unchanged. This thread allocates nothing and frees nothing.
fn read_changes(watch: &'static Watch) {
    while watch.wait() {
        let mut table = lock(&TABLE);
        while let Some(change) = watch.next() {
            match change {
                Change::Gone { start, end } => {
                    table.invalidate(&(start..end), None, Some(watch), false);
                }
                Change::Emptied { start, end } => {
                    table.invalidate(&(start..end), None, Some(watch), true);
                }
                Change::Moved { start, end, to } => {
                    table.invalidate(&(start..end), None, Some(watch), false);
                    watch.forget(&(to..to + (end - start)));
                }
            }
        }
        let any = table.has_dead();
        drop(table);
        if any {
            DEAD.notify_one();
        }
    }
}

fn end_the_dead() {
    loop {
        let mut table = lock(&TABLE);
        while !table.has_dead() {
            table = wait(&DEAD, table);
        }
        drop(table);
        bury();
    }
}

/// Ends what is over, except what other threads are ending.
fn bury() {
    loop {
        let Some((number, region)) = lock(&TABLE).begin_end() else {
            return;
        };
        drop(region);
        let rest = lock(&TABLE).ended(number);
        ENDED.notify_all();
        drop(rest);
    }
}

/// Ends what is over, and waits for other threads that are ending the registrations concerned.
fn bury_until(until: Until) {
    bury();
    let mut table = lock(&TABLE);
    while table.is_ending(until) {
        table = wait(&ENDED, table);
    }
}

/// A kept registration in use, until it is dropped.
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
        let over = lock(&TABLE).release(self.id);
        if let Some(until) = over {
            bury_until(until);
        }
    }
}

/// What the list says of memory.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Its registration is kept.
    Kept(Kept),
    /// It is not, but it is used again and should be.
    Known,
    /// Its registration is not kept, or a change of memory is under way and the answer is not known yet.
    Unknown,
}

/// Looks for a kept registration. With `learn`, memory that is used again becomes known.
pub(crate) fn find(wanted: &Wanted<'_>, learn: bool) -> Answer {
    for _ in 0..PATIENCE {
        let mut table = lock(&TABLE);
        let Some(found) = table.find(wanted) else {
            return if learn && table.is_known(wanted) {
                Answer::Known
            } else {
                Answer::Unknown
            };
        };
        // A thread may have unmapped the memory, and this one have got it from the kernel anew, before the change was read.
        if !found.watched || watch().is_ok_and(Watch::settled) {
            table.hold(&found);
            let Found { id, lkey, rkey, .. } = found;
            return Answer::Kept(Kept { id, lkey, rkey });
        }
        drop(table);
        std::thread::yield_now();
    }
    Answer::Unknown
}

/// Registers memory and keeps the registration. `Ok(None)` if it cannot be kept.
///
/// # Errors
///
/// The errno of `ibv_reg_mr`.
///
/// # Safety
///
/// As for [`Region::new`]; the region ends at the latest with [`forget`] of its owner.
pub(crate) unsafe fn keep(
    pd: *mut ibv_pd,
    wanted: &Wanted<'_>,
    watched: bool,
    limit: usize,
) -> Result<Option<Kept>, c_int> {
    // Also for the room of the list, and to forget pages that were watched until now.
    let watch = watch().ok();
    if watched && (watch.is_none() || !watch::anonymous(&pages(&wanted.range))) {
        return Ok(None);
    }
    let reserved = lock(&TABLE).reserve(wanted, watched, watch, limit);
    bury();
    let Some((id, access)) = reserved else {
        return Ok(None);
    };
    let (start, len) = (wanted.range.start as u64, wanted.range.len());
    // SAFETY: upheld by the caller.
    match unsafe { Region::new(pd, start, len, access) } {
        Ok(region) => {
            let (lkey, rkey) = (region.lkey(), region.rkey());
            let filled = lock(&TABLE).fill(id, region);
            debug_assert!(filled.is_ok(), "an entry in use is in one of the lists");
            Ok(filled.is_ok().then_some(Kept { id, lkey, rkey }))
        }
        Err(errno) => {
            lock(&TABLE).cancel(id, watch);
            bury();
            Err(errno)
        }
    }
}

/// Ends the kept registrations of an owner in a range, and waits for those that end already. How many.
pub(crate) fn invalidate(owner: u64, range: &std::ops::Range<usize>) -> usize {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    let (ended, until) = {
        let mut table = lock(&TABLE);
        let ended = table.invalidate(range, Some(owner), watch, true);
        (ended, table.until(owner))
    };
    bury_until(until);
    ended
}

/// Ends all kept registrations of an owner that are not in use, and waits for those that end already.
pub(crate) fn forget(owner: u64) {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    let until = {
        let mut table = lock(&TABLE);
        table.drop_owner(owner, watch);
        table.until(owner)
    };
    bury_until(until);
}

/// Ends some of them, to give memory back. Whether there were any.
pub(crate) fn shrink(owner: u64) -> bool {
    let watch = WATCH.get().and_then(|watch| watch.as_ref().ok());
    let (any, until) = {
        let mut table = lock(&TABLE);
        let any = table.shrink(owner, watch);
        (any, table.until(owner))
    };
    bury_until(until);
    any
}
