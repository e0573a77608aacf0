//! Long buffers in pieces: threads prepare the next pieces while earlier ones are being sent.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use libc::c_int;

use crate::fork;
use crate::lock::{lock, wait};
use crate::manager::{Buffer, Inner, Lifetime, Manager, Use};
use crate::thread::spawn;

/// The most pieces of a buffer. Each piece has a [`Slot`] in memory from the beginning on.
const PIECES_MAX: usize = 1 << 20;

/// A buffer whose pieces become ready one after another, in order of their addresses.
#[derive(Debug)]
pub struct Pieces {
    shared: Arc<Shared>,
    /// The next piece to return.
    next: usize,
    /// The next piece to request from a helper thread.
    asked: usize,
}

#[derive(Debug)]
struct Shared {
    inner: Arc<Inner>,
    addr: u64,
    len: usize,
    /// The length of a piece.
    piece: usize,
    of: Use,
    lifetime: Lifetime,
    slots: Mutex<Vec<Slot>>,
    changed: Condvar,
}

#[derive(Debug)]
enum Slot {
    Open,
    /// A thread is preparing the piece.
    Begun,
    Ready(Result<Buffer, c_int>),
    /// The piece was returned to the caller, or is not needed any more.
    Over,
}

impl Shared {
    /// Prepares a piece, unless another thread does or has done so.
    fn make(&self, index: usize) {
        {
            let mut slots = lock(&self.slots);
            match slots.get_mut(index) {
                Some(slot @ Slot::Open) => *slot = Slot::Begun,
                _ => return,
            }
        }
        let piece = self.piece;
        let at = index * piece;
        // SAFETY: the caller of `Pieces::begin` keeps the memory mapped until `Pieces` is dropped, and the drop waits for
        // pieces in preparation.
        let ready = unsafe {
            Inner::get(
                &self.inner,
                self.addr + at as u64,
                piece.min(self.len - at),
                self.of,
                self.lifetime,
            )
        };
        if let Some(slot) = lock(&self.slots).get_mut(index) {
            *slot = Slot::Ready(ready);
        }
        self.changed.notify_all();
    }
}

impl Pieces {
    /// Divides `len` bytes at `addr` into pieces, which are prepared from the first call of [`Self::next`] on. Data to send must be
    /// complete by then: threads may copy later pieces before [`Self::next`] returns them.
    ///
    /// # Errors
    ///
    /// EINVAL if `len` is 0, `addr` is null or there would be more than 2^20 pieces. EFAULT if the memory exceeds the address space.
    /// EPERM in a forked child.
    ///
    /// # Safety
    ///
    /// The requirements of [`Manager::send`] or [`Manager::receive`] apply until all pieces are released and this value is dropped.
    pub unsafe fn begin(
        manager: &Manager,
        addr: *mut u8,
        len: usize,
        of: Use,
        lifetime: Lifetime,
    ) -> Result<Self, c_int> {
        if fork::is_child() {
            return Err(libc::EPERM);
        }
        let inner = Arc::clone(&manager.0);
        if len == 0 || addr.is_null() {
            return Err(libc::EINVAL);
        }
        let first = addr.expose_provenance();
        if first.checked_add(len).is_none() {
            return Err(libc::EFAULT);
        }
        let piece = inner.settings.piece.max(1);
        let count = len.div_ceil(piece);
        if count > PIECES_MAX {
            return Err(libc::EINVAL);
        }
        let shared = Arc::new(Shared {
            inner,
            addr: first as u64,
            len,
            piece,
            of,
            lifetime,
            slots: Mutex::new(std::iter::repeat_with(|| Slot::Open).take(count).collect()),
            changed: Condvar::new(),
        });
        Ok(Self {
            shared,
            next: 0,
            asked: 1,
        })
    }

    /// Returns the number of pieces.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.shared.slots).len()
    }

    /// Returns the next piece, or `None` after the last. After an error, the next call tries the same piece again.
    ///
    /// # Errors
    ///
    /// The errors of [`Manager::send`], for this piece. EPERM in a forked child.
    #[expect(
        clippy::should_implement_trait,
        reason = "the C function has this name, and adaptors of iterators would try the same piece again without end after an error"
    )]
    pub fn next(&mut self) -> Option<Result<Buffer, c_int>> {
        if fork::is_child() {
            return Some(Err(libc::EPERM));
        }
        let count = self.count();
        if self.next >= count {
            return None;
        }
        let index = self.next;
        let helpers = self.shared.inner.settings.threads.saturating_sub(1);
        self.asked = self.asked.max(index + 1);
        while helpers > 0 && self.asked < count.min(index + 1 + helpers) {
            ask(helpers, &self.shared, self.asked);
            self.asked += 1;
        }
        self.shared.make(index);
        let mut slots = lock(&self.shared.slots);
        loop {
            match slots.get_mut(index) {
                Some(slot @ Slot::Ready(Ok(_))) => {
                    self.next += 1;
                    return match std::mem::replace(slot, Slot::Over) {
                        Slot::Ready(ready) => Some(ready),
                        _ => None,
                    };
                }
                Some(slot @ Slot::Ready(Err(_))) => {
                    // The next call tries this piece again.
                    return match std::mem::replace(slot, Slot::Open) {
                        Slot::Ready(ready) => Some(ready),
                        _ => None,
                    };
                }
                Some(Slot::Begun) => slots = wait(&self.shared.changed, slots),
                _ => return None,
            }
        }
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if fork::is_child() {
            // In a forked child the threads that would finish the pieces do not exist.
            return;
        }
        let mut slots = lock(&self.shared.slots);
        for slot in slots.iter_mut() {
            if matches!(slot, Slot::Open) {
                *slot = Slot::Over;
            }
        }
        // Pieces in preparation still use the memory.
        while slots.iter().any(|slot| matches!(slot, Slot::Begun)) {
            slots = wait(&self.shared.changed, slots);
        }
        let unused = std::mem::take(&mut *slots);
        drop(slots);
        drop(unused);
        // Removes queued requests and waits for running ones, so that this thread drops the last reference to the manager.
        if let Some(helpers) = HELPERS.get() {
            let mut work = lock(&helpers.work);
            work.jobs
                .retain(|(shared, _)| !Arc::ptr_eq(shared, &self.shared));
        }
        while Arc::strong_count(&self.shared) > 1 {
            std::thread::yield_now();
        }
    }
}

static HELPERS: OnceLock<Helpers> = OnceLock::new();

/// Threads that prepare pieces for all managers. They wait for work until the process exits.
#[derive(Debug, Default)]
struct Helpers {
    work: Mutex<Work>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    jobs: VecDeque<(Arc<Shared>, usize)>,
    threads: usize,
}

/// Requests a piece from a helper. Without helpers, the caller prepares the piece when it needs it.
fn ask(threads: usize, shared: &Arc<Shared>, index: usize) {
    let helpers = HELPERS.get_or_init(Helpers::default);
    let mut work = lock(&helpers.work);
    while work.threads < threads {
        let run = || {
            let Some(helpers) = HELPERS.get() else { return };
            loop {
                let mut work = lock(&helpers.work);
                let (shared, index) = loop {
                    match work.jobs.pop_front() {
                        Some(job) => break job,
                        None => work = wait(&helpers.more, work),
                    }
                };
                drop(work);
                shared.make(index);
            }
        };
        if spawn("awbuf-pieces", run).is_err() {
            break;
        }
        work.threads += 1;
    }
    if work.threads > 0 {
        work.jobs.push_back((Arc::clone(shared), index));
        drop(work);
        helpers.more.notify_one();
    }
}
