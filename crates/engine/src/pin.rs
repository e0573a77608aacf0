//! Pages that are locked (`ANYWARP_PIN=1`) or faulted in (`ANYWARP_PREFAULT=1`) when they are registered.
//!
//! The kernel does not count how often a page is locked: the first `munlock` unlocks it. So this file counts the
//! regions of each page, and unlocks a page when its last region is deregistered.

use crate::config::{Pages, config};
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::process::PerProcess;
use crate::sys::pages;
use std::collections::BTreeMap;

/// Why pages could not be locked or faulted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The range is not mapped, or not with these rights.
    NotMapped,
    /// The process would have more locked memory than its limit allows (`ulimit -l`).
    Limit,
}

/// Pages that a region keeps locked, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pin {
    start: u64,
    end: u64,
}

impl Pin {
    /// Locks or faults in the pages of a region, as the environment configures.
    pub(crate) fn take(start: u64, len: u64, write: bool) -> Result<Option<Self>, Refused> {
        match config().pages {
            Pages::Leave => return Ok(None),
            Pages::Prefault => {
                return if pages::is_there(start, len, write) {
                    Ok(None)
                } else {
                    Err(Refused::NotMapped)
                };
            }
            Pages::Pin => {}
        }
        let page = pages::page_size();
        let end = start
            .checked_add(len)
            .and_then(|e| e.checked_next_multiple_of(page));
        let end = end.ok_or(Refused::NotMapped)?;
        let start = start & !(page - 1);
        // The counts stay locked during the system call: otherwise another thread might unlock the pages that are
        // locked here.
        let mut counts = counts();
        counts.add(start, end);
        if pages::lock_pages(start, end - start).is_ok() {
            return Ok(Some(Self { start, end }));
        }
        // When `mlock` fails, the pages before the failing one stay locked.
        counts.unlock(start, end);
        // The kernel has one errno for both reasons. Only if pages are not mapped, faulting them in fails too.
        Err(if pages::is_there(start, end - start, false) {
            Refused::Limit
        } else {
            Refused::NotMapped
        })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        counts().unlock(self.start, self.end);
    }
}

fn counts() -> MutexGuard<'static, Counts> {
    // A child of fork does not inherit locked pages.
    static COUNTS: PerProcess<Mutex<Counts>> =
        PerProcess::new(|| Mutex::new(Rank::PageCounts, Counts::default()));
    COUNTS.get().lock()
}

/// How many regions lock each page. The key is the start of a range, the value its end and number of regions. The
/// ranges do not overlap.
#[derive(Debug, Default)]
struct Counts {
    ranges: BTreeMap<u64, (u64, u32)>,
}

impl Counts {
    /// Splits the range that contains `at`, if there is one, so that a range begins at `at`.
    fn split(&mut self, at: u64) {
        let Some((&start, &(end, n))) = self.ranges.range(..at).next_back() else {
            return;
        };
        if end > at {
            self.ranges.insert(start, (at, n));
            self.ranges.insert(at, (end, n));
        }
    }

    fn add(&mut self, start: u64, end: u64) {
        self.split(start);
        self.split(end);
        let mut gaps = Vec::new();
        let mut at = start;
        for (&from, (to, n)) in self.ranges.range_mut(start..end) {
            if from > at {
                gaps.push((at, from));
            }
            *n = n.saturating_add(1);
            at = *to;
        }
        if at < end {
            gaps.push((at, end));
        }
        self.ranges
            .extend(gaps.into_iter().map(|(from, to)| (from, (to, 1))));
    }

    /// Unlocks the pages of a range that no other region has locked.
    fn unlock(&mut self, start: u64, end: u64) {
        for (start, end) in self.remove(start, end) {
            pages::unlock_pages(start, end - start);
        }
    }

    /// Removes a range; returns the parts that no other region has locked.
    fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.split(start);
        self.split(end);
        let mut free = Vec::new();
        for (&from, (to, n)) in self.ranges.range_mut(start..end) {
            *n = n.saturating_sub(1);
            if *n == 0 {
                free.push((from, *to));
            }
        }
        for (from, _) in &free {
            self.ranges.remove(from);
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_free_with_its_last_region() {
        let mut counts = Counts::default();
        counts.add(0, 40);
        counts.add(20, 60);
        counts.add(30, 35);
        assert_eq!(counts.remove(0, 40), [(0, 20)]);
        assert_eq!(counts.remove(20, 60), [(20, 30), (35, 40), (40, 60)]);
        assert_eq!(counts.remove(30, 35), [(30, 35)]);
        assert!(counts.ranges.is_empty());
    }

    #[test]
    fn counts_agree_with_counting_each_page() {
        let mut counts = Counts::default();
        let mut pages = [0_u32; 64];
        let mut have: Vec<(u64, u64)> = Vec::new();
        let mut random = 7_u64;
        for _ in 0..3000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if have.len() > 12 || (random & 1 == 0 && !have.is_empty()) {
                let (start, end) = have.swap_remove((random >> 8) as usize % have.len());
                let mut free = [false; 64];
                for (from, to) in counts.remove(start, end) {
                    free[from as usize..to as usize].fill(true);
                }
                for at in start as usize..end as usize {
                    pages[at] -= 1;
                    assert_eq!(free[at], pages[at] == 0, "page {at}");
                }
                assert_eq!(
                    free.iter().filter(|f| **f).count(),
                    (start as usize..end as usize)
                        .filter(|at| pages[*at] == 0)
                        .count()
                );
            } else {
                let start = (random >> 8) % 60;
                let end = start + 1 + (random >> 20) % (64 - start - 1);
                counts.add(start, end);
                have.push((start, end));
                for page in &mut pages[start as usize..end as usize] {
                    *page += 1;
                }
            }
        }
    }
}
