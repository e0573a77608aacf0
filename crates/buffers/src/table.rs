//! The table of cached registrations, by owner and address, and of those that must be ended.
//!
//! The *owner* of a registration is the number of the manager that has made the registration.
//!
//! No code here allocates or frees memory while it holds the lock of the table, except [`Table::make_room`], which allocates all lists
//! before any memory is watched. The allocator may take long. It may also unmap watched memory, whose registrations would stay in the
//! table until the lock is acquired again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::region::Region;
use crate::watch::{Watch, pages};

/// The most registrations that a process caches.
pub(crate) const MOST: usize = 1024;
/// The number of slots for memory that was used but has no cached registration.
const MARKS: usize = 256;
/// The number of uses of memory after which its registration is cached.
const USES: u8 = 2;
/// The upper limit of the number of uses after which a registration is cached. The number grows from [`USES`] on for memory
/// whose cached registrations are not used again before the memory changes.
const MOST_USES: u8 = 128;

/// Statistics of one owner.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The number of cached registrations.
    pub(crate) entries: AtomicUsize,
    /// The total length of the cached registrations in bytes.
    pub(crate) bytes: AtomicUsize,
    pub(crate) hits: AtomicU64,
    pub(crate) kept: AtomicU64,
    pub(crate) invalidated: AtomicU64,
    pub(crate) evicted: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    owner: u64,
    start: usize,
    end: usize,
    access: u32,
    /// `None` until the memory is registered.
    region: Option<Region>,
    uses: u32,
    hit: bool,
    watched: bool,
    /// The time of the last use.
    tick: u64,
    counters: Arc<Counters>,
}

/// A registration that must be ended and that no buffer uses any more. It stays in the list until it has ended, so that other threads
/// can wait for that.
#[derive(Debug)]
pub(crate) struct Dead {
    /// A sequence number.
    number: u64,
    owner: u64,
    /// `None` while a thread ends the registration, which is done without the lock.
    region: Option<Region>,
    begun: bool,
    _counters: Arc<Counters>,
}

/// The registrations to wait for: those of one owner that were dead at some moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Until {
    owner: u64,
    number: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    key: u64,
    seen: u8,
    need: u8,
}

/// A cached registration that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) id: u64,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) watched: bool,
}

/// The memory and the rights that a lookup needs.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) owner: u64,
    pub(crate) range: Range<usize>,
    pub(crate) access: u32,
    pub(crate) counters: &'a Arc<Counters>,
}

/// The lists.
#[derive(Debug)]
pub(crate) struct Table {
    /// The cached registrations, ordered by owner and address. Those of one owner do not overlap.
    entries: Vec<Entry>,
    /// Registrations in use that are not available for new uses.
    detached: Vec<Entry>,
    dead: Vec<Dead>,
    deaths: u64,
    marks: [Mark; MARKS],
    clock: u64,
    next: u64,
}

/// Returns a hash of an owner's memory.
fn key(owner: u64, start: usize, end: usize) -> u64 {
    let mut hash = owner ^ 0x9e37_79b9_7f4a_7c15;
    for word in [start as u64, end as u64] {
        hash = (hash ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 32;
    }
    hash | 1
}

impl Table {
    pub(crate) const fn empty() -> Self {
        Self {
            entries: Vec::new(),
            detached: Vec::new(),
            dead: Vec::new(),
            deaths: 0,
            marks: [Mark {
                key: 0,
                seen: 0,
                need: 0,
            }; MARKS],
            clock: 0,
            next: 1,
        }
    }

    /// Allocates all lists. Called once, before any memory is watched.
    pub(crate) fn make_room(&mut self) {
        self.entries.reserve_exact(MOST);
        self.detached.reserve_exact(MOST);
        self.dead.reserve_exact(MOST);
    }

    fn is_full(&self) -> bool {
        let all = self.entries.len() + self.detached.len() + self.dead.len();
        all >= MOST || self.entries.capacity() < MOST
    }

    /// Returns the index of the first entry that ends after `address`.
    fn place(&self, owner: u64, address: usize) -> usize {
        self.entries
            .partition_point(|e| (e.owner, e.end) <= (owner, address))
    }

    /// Looks up a cached registration of this memory with these rights. The caller then calls [`Self::hold`].
    pub(crate) fn find(&self, wanted: &Wanted<'_>) -> Option<Found> {
        let entry = self
            .entries
            .get(self.place(wanted.owner, wanted.range.start))?;
        let region = entry.region.as_ref()?;
        let fits = entry.owner == wanted.owner
            && entry.start <= wanted.range.start
            && wanted.range.end <= entry.end
            && wanted.access & !entry.access == 0;
        fits.then(|| Found {
            id: entry.id,
            lkey: region.lkey(),
            rkey: region.rkey(),
            watched: entry.watched,
        })
    }

    /// Marks a found entry as in use. The caller has held the lock since [`Self::find`].
    pub(crate) fn hold(&mut self, found: &Found) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(entry) = self.entries.iter_mut().find(|e| e.id == found.id) {
            entry.uses += 1;
            entry.hit = true;
            entry.tick = clock;
            entry.counters.hits.fetch_add(1, Relaxed);
        }
    }

    /// Counts a use of this memory. Returns whether it has been used often enough for its registration to be cached.
    pub(crate) fn is_known(&mut self, wanted: &Wanted<'_>) -> bool {
        let key = key(wanted.owner, wanted.range.start, wanted.range.end);
        let Some(mark) = self.marks.get_mut((key >> 8) as usize % MARKS) else {
            return false;
        };
        if mark.key != key {
            *mark = Mark {
                key,
                seen: 0,
                need: USES,
            };
        }
        mark.seen = mark.seen.saturating_add(1);
        if mark.seen < mark.need {
            return false;
        }
        mark.seen = 0;
        true
    }

    /// Doubles the number of uses after which the memory's registration is cached, because it cannot be cached now.
    pub(crate) fn postpone(&mut self, wanted: &Wanted<'_>) {
        let key = key(wanted.owner, wanted.range.start, wanted.range.end);
        if let Some(mark) = self.marks.get_mut((key >> 8) as usize % MARKS)
            && mark.key == key
        {
            mark.need = mark.need.saturating_mul(2).min(MOST_USES);
        }
    }

    /// Adds an entry for memory that is about to be registered, and starts watching its pages if required. `watch` is set if
    /// any memory is watched. Returns the entry and the rights to register with.
    ///
    /// # Errors
    ///
    /// `Some`: the entry has room once these registrations have ended, so the caller waits for them. `None`: there is no room, the
    /// memory cannot be watched, or another thread is registering some of it.
    pub(crate) fn reserve(
        &mut self,
        wanted: &Wanted<'_>,
        watched: bool,
        watch: Option<&Watch>,
        limit: usize,
    ) -> Result<(u64, u32), Option<Until>> {
        let Range { start, end } = wanted.range;
        let overlap = |e: &Entry| e.owner == wanted.owner && e.start < end && start < e.end;
        if wanted.range.len() > limit
            || self
                .entries
                .iter()
                .any(|e| overlap(e) && e.region.is_none())
        {
            return Err(None);
        }
        let mut access = wanted.access;
        while let Some(at) = self.entries.iter().position(overlap) {
            // Combines the rights with those of the old entry, because memory that is used in two ways would otherwise be
            // registered at each use. The old entry must cover the whole range, so that no byte gets rights that it did not have.
            if let Some(old) = self.entries.get(at)
                && old.start <= start
                && end <= old.end
            {
                access |= old.access;
            }
            self.take_out(at, watch, None);
        }
        loop {
            let full = self.is_full();
            if !full && wanted.counters.bytes.load(Relaxed) + wanted.range.len() <= limit {
                break;
            }
            // All owners share the capacity of the list.
            let idle = |e: &&Entry| (full || e.owner == wanted.owner) && e.uses == 0;
            let oldest = self.entries.iter().filter(idle).min_by_key(|e| e.tick);
            let (oldest, owner) = oldest.map(|e| (e.id, e.owner)).ok_or(None)?;
            let before = self.entries.len() + self.detached.len() + self.dead.len();
            self.evict(oldest, watch);
            // A dead entry uses its slot until its registration has ended.
            if before >= MOST {
                return Err(Some(self.until(owner)));
            }
        }
        if watched {
            let watch = watch.ok_or(None)?;
            watch.add(&pages(&wanted.range)).map_err(|_| None)?;
        }
        let id = self.next;
        self.next += 1;
        self.clock += 1;
        let entry = Entry {
            id,
            owner: wanted.owner,
            start,
            end,
            access,
            region: None,
            uses: 1,
            hit: false,
            watched,
            tick: self.clock,
            counters: Arc::clone(wanted.counters),
        };
        wanted.counters.entries.fetch_add(1, Relaxed);
        wanted.counters.bytes.fetch_add(end - start, Relaxed);
        let at = self.place(wanted.owner, start);
        self.entries.insert(at, entry);
        Ok((id, access))
    }

    /// Sets the registration of a reserved entry. If the memory has changed meanwhile, the entry is detached, and its
    /// registration ends after its use. `Err` returns the registration if there is no such entry.
    pub(crate) fn fill(&mut self, id: u64, region: Region) -> Result<(), Region> {
        match self.entries.iter_mut().find(|e| e.id == id) {
            Some(entry) => {
                entry.region = Some(region);
                entry.counters.kept.fetch_add(1, Relaxed);
                Ok(())
            }
            None => match self.detached.iter_mut().find(|e| e.id == id) {
                Some(entry) => {
                    entry.region = Some(region);
                    Ok(())
                }
                None => Err(region),
            },
        }
    }

    /// Removes an entry whose memory could not be registered.
    pub(crate) fn cancel(&mut self, id: u64, watch: Option<&Watch>) {
        if let Some(at) = self.entries.iter().position(|e| e.id == id) {
            if let Some(entry) = self.entries.get_mut(at) {
                entry.uses = 0;
            }
            self.take_out(at, watch, None);
        } else if let Some(at) = self.detached.iter().position(|e| e.id == id) {
            let entry = self.detached.remove(at);
            self.add_dead(entry);
        }
    }

    /// Ends one use. If it was the last use of a registration that must be ended, returns what to wait for.
    pub(crate) fn release(&mut self, id: u64) -> Option<Until> {
        if let Some(entry) = self.entries.iter_mut().find(|e| e.id == id) {
            entry.uses = entry.uses.saturating_sub(1);
        } else if let Some(at) = self.detached.iter().position(|e| e.id == id) {
            let over = self.detached.get_mut(at).is_some_and(|entry| {
                entry.uses = entry.uses.saturating_sub(1);
                entry.uses == 0
            });
            if over {
                let entry = self.detached.remove(at);
                let owner = entry.owner;
                self.add_dead(entry);
                return Some(self.until(owner));
            }
        }
        None
    }

    fn add_dead(&mut self, entry: Entry) {
        self.deaths += 1;
        self.dead.push(Dead {
            number: self.deaths,
            owner: entry.owner,
            region: entry.region,
            begun: false,
            _counters: entry.counters,
        });
    }

    /// Takes a dead registration. The caller ends it without the lock, and then calls [`Self::ended`].
    pub(crate) fn begin_end(&mut self) -> Option<(u64, Option<Region>)> {
        let dead = self.dead.iter_mut().find(|dead| !dead.begun)?;
        dead.begun = true;
        Some((dead.number, dead.region.take()))
    }

    /// Removes a registration that has ended. The caller drops the returned value without the lock.
    pub(crate) fn ended(&mut self, number: u64) -> Option<Dead> {
        let at = self.dead.iter().position(|dead| dead.number == number)?;
        Some(self.dead.swap_remove(at))
    }

    /// Returns the registrations of an owner that are dead now.
    pub(crate) fn until(&self, owner: u64) -> Until {
        Until {
            owner,
            number: self.deaths,
        }
    }

    /// Returns whether one of the registrations has not ended yet.
    pub(crate) fn is_ending(&self, until: Until) -> bool {
        let of = |dead: &Dead| dead.owner == until.owner && dead.number <= until.number;
        self.dead.iter().any(of)
    }

    /// Removes an entry from the list, so that it is not found any more. Its registration ends when
    /// no buffer uses it. `gone`: pages that are not mapped any more.
    fn take_out(&mut self, at: usize, watch: Option<&Watch>, gone: Option<&Range<usize>>) {
        let entry = self.entries.remove(at);
        entry.counters.entries.fetch_sub(1, Relaxed);
        entry
            .counters
            .bytes
            .fetch_sub(entry.end - entry.start, Relaxed);
        if let (true, Some(watch)) = (entry.watched, watch) {
            let Range { start, end } = pages(&(entry.start..entry.end));
            // The pages that are gone are left out: other memory may be at their addresses, and another descriptor may watch it.
            let gone = gone.map_or(end..end, |gone| {
                gone.start.clamp(start, end)..gone.end.clamp(start, end)
            });
            for part in [start..gone.start, gone.end..end] {
                self.forget_unneeded(part, watch);
            }
        }
        if entry.uses == 0 {
            self.add_dead(entry);
        } else {
            self.detached.push(entry);
        }
    }

    /// Stops watching the pages that no watched entry is on.
    fn forget_unneeded(&self, range: Range<usize>, watch: &Watch) {
        let watched = || {
            let entries = self.entries.iter().filter(|e| e.watched);
            entries.map(|e| pages(&(e.start..e.end)))
        };
        let mut at = range.start;
        while at < range.end {
            let covering = watched().filter(|other| other.contains(&at));
            if let Some(end) = covering.map(|other| other.end).max() {
                at = end;
                continue;
            }
            let later = watched()
                .map(|other| other.start)
                .filter(|start| *start > at);
            let end = later.min().unwrap_or(range.end).min(range.end);
            watch.forget(&(at..end));
            at = end;
        }
    }

    fn evict(&mut self, id: u64, watch: Option<&Watch>) {
        if let Some(at) = self.entries.iter().position(|e| e.id == id) {
            if let Some(entry) = self.entries.get(at) {
                entry.counters.evicted.fetch_add(1, Relaxed);
            }
            self.take_out(at, watch, None);
        }
    }

    /// Removes the entries of changed memory, for one owner or for all. `mapped`: the memory is still mapped. Returns the number of
    /// registrations that end.
    pub(crate) fn invalidate(
        &mut self,
        range: &Range<usize>,
        owner: Option<u64>,
        watch: Option<&Watch>,
        mapped: bool,
    ) -> usize {
        // A change of a page affects all entries on the page.
        let of = |e: &Entry| {
            let own = if owner.is_some() {
                e.start..e.end
            } else {
                pages(&(e.start..e.end))
            };
            owner.is_none_or(|owner| owner == e.owner)
                && (owner.is_some() || e.watched)
                && own.start < range.end
                && range.start < own.end
        };
        let mut ended = 0;
        while let Some(at) = self.entries.iter().position(of) {
            if let Some(entry) = self.entries.get(at) {
                entry.counters.invalidated.fetch_add(1, Relaxed);
                let key = key(entry.owner, entry.start, entry.end);
                let hit = entry.hit;
                if let Some(mark) = self.marks.get_mut((key >> 8) as usize % MARKS)
                    && mark.key == key
                {
                    // Memory that changes before it is used again is not worth caching.
                    mark.need = if hit {
                        USES
                    } else {
                        mark.need.saturating_mul(2).min(MOST_USES)
                    };
                }
            }
            self.take_out(at, watch, (!mapped).then_some(range));
            ended += 1;
        }
        ended
    }

    /// Removes all cached registrations of an owner. Those in use end when they are released.
    pub(crate) fn drop_owner(&mut self, owner: u64, watch: Option<&Watch>) {
        while let Some(at) = self.entries.iter().position(|e| e.owner == owner) {
            self.take_out(at, watch, None);
        }
    }

    /// Removes half of an owner's unused cached registrations, those whose last use is the longest ago. The caller ends them. Returns
    /// whether there were any.
    pub(crate) fn shrink(&mut self, owner: u64, watch: Option<&Watch>) -> bool {
        let idle = |e: &&Entry| e.owner == owner && e.uses == 0;
        let count = self.entries.iter().filter(idle).count();
        for _ in 0..count.div_ceil(2) {
            let oldest = self.entries.iter().filter(idle).min_by_key(|e| e.tick);
            let Some(id) = oldest.map(|e| e.id) else {
                break;
            };
            self.evict(id, watch);
        }
        count > 0
    }
}
