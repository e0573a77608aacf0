//! The flags of a shared ring: whether an end sleeps and has to be woken, and whether it waits for room.
//!
//! Each flag forms a store-load pair with a position of the ring. The receiver sets `asleep`, then loads the position
//! of the sender; the sender stores its position, then loads `asleep`. The same holds for `blocked` and the position
//! of the receiver. Because of the fences, at least one of the two processes sees the store of the other, so no
//! wake-up is lost.

use std::sync::atomic::AtomicU32;

use crate::sync::{Ordering, fence};

/// A flag that two processes share.
pub(crate) trait Flag {
    fn load(&self) -> u32;
    fn store(&self, value: u32);
    fn swap(&self, value: u32) -> u32;
    /// Replaces `value` by another one. Returns false if the flag does not have it.
    fn replace(&self, value: u32, by: u32) -> bool;
}

/// The value of a flag whose end sleeps and is woken for records and for acknowledgements.
const ASLEEP: u32 = 1;
/// The value of a flag whose end sleeps and is woken for records. The end is not woken for an acknowledgement in page 0 of the shared
/// memory, because the next poll of its program handles the acknowledgement. This value is not used if the program may wait for an effect
/// of the acknowledgement: an event, a counter, or requests that are sent after it.
const ASLEEP_TO_ACKS: u32 = 2;

impl Flag for AtomicU32 {
    #[inline]
    fn load(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }

    #[inline]
    fn store(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }

    #[inline]
    fn swap(&self, value: u32) -> u32 {
        self.swap(value, Ordering::AcqRel)
    }

    #[inline]
    fn replace(&self, value: u32, by: u32) -> bool {
        self.compare_exchange(value, by, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

/// Sets `flag`, by which this process announces that it sleeps or waits for room, and then evaluates `condition`:
/// whether the peer has stored a position in the meantime, so that there is no need to sleep.
#[inline]
pub(crate) fn announce<R>(flag: &impl Flag, condition: impl FnOnce() -> R) -> R {
    announce_as(ASLEEP, flag, condition)
}

/// Like [`announce`], for a sleep. `acks`: whether acknowledgements wake this end too.
#[inline]
pub(crate) fn announce_sleep<R>(
    asleep: &impl Flag,
    acks: bool,
    condition: impl FnOnce() -> R,
) -> R {
    let value = if acks { ASLEEP } else { ASLEEP_TO_ACKS };
    announce_as(value, asleep, condition)
}

#[inline]
fn announce_as<R>(value: u32, flag: &impl Flag, condition: impl FnOnce() -> R) -> R {
    flag.store(value);
    fence(Ordering::SeqCst);
    condition()
}

/// Clears the flag of this process, which is awake. Returns false if the peer has seen the flag, and has cleared it.
#[inline]
pub(crate) fn withdraw(asleep: &impl Flag) -> bool {
    asleep.load() != 0 && asleep.swap(0) != 0
}

/// Makes an acknowledgement wake this process if it sleeps and only records would wake it. Then evaluates `condition`: whether no
/// acknowledgement has arrived.
///
/// Before the call, the caller has stored that requests wait. This store and the load of the flag form a store-load pair with a worker
/// that falls asleep, which stores the flag and then loads whether requests wait.
#[inline]
pub(crate) fn await_ack(asleep: &impl Flag, condition: impl FnOnce() -> bool) -> bool {
    fence(Ordering::SeqCst);
    if asleep.load() == ASLEEP_TO_ACKS {
        asleep.replace(ASLEEP_TO_ACKS, ASLEEP);
    }
    fence(Ordering::SeqCst);
    condition()
}

/// Whether the peer sleeps and has to be woken. Called after this process has stored a position. The flag is cleared,
/// so only one call returns true for each sleep of the peer.
#[inline]
pub(crate) fn must_wake(asleep: &impl Flag) -> bool {
    fence(Ordering::SeqCst);
    asleep.load() != 0 && asleep.swap(0) != 0
}

/// Like [`must_wake`], after this process has stored only an acknowledgement.
#[inline]
pub(crate) fn must_wake_for_ack(asleep: &impl Flag) -> bool {
    fence(Ordering::SeqCst);
    asleep.load() == ASLEEP && asleep.replace(ASLEEP, 0)
}

/// Whether the peer waits for room and has to be woken. Called after this process has stored the position up to which
/// it has read.
#[inline]
pub(crate) fn must_wake_for_room(blocked: &impl Flag, asleep: &impl Flag) -> bool {
    // The peer clears `blocked` when the peer has written again. If this process cleared `blocked`, a peer that is not asleep yet could
    // fall asleep after that, and the next call would not wake the peer.
    fence(Ordering::SeqCst);
    blocked.load() != 0 && must_wake(asleep)
}

#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, AtomicU64};
    use loom::thread;

    use super::*;

    impl Flag for AtomicU32 {
        fn load(&self) -> u32 {
            self.load(Ordering::Relaxed)
        }

        fn store(&self, value: u32) {
            self.store(value, Ordering::Relaxed);
        }

        fn swap(&self, value: u32) -> u32 {
            self.swap(value, Ordering::AcqRel)
        }

        fn replace(&self, value: u32, by: u32) -> bool {
            self.compare_exchange(value, by, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        }
    }

    /// A peer that stores an acknowledgement and then a record.
    #[test]
    fn loom_a_record_wakes_a_receiver_that_sleeps_through_acknowledgements() {
        loom::model(|| {
            let asleep = Arc::new(AtomicU32::new(0));
            let (done, written) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
            let sender = thread::spawn({
                let (asleep, done, written) =
                    (Arc::clone(&asleep), Arc::clone(&done), Arc::clone(&written));
                move || {
                    done.store(1, Ordering::Release);
                    let for_ack = must_wake_for_ack(&*asleep);
                    written.store(1, Ordering::Release);
                    (for_ack, must_wake(&*asleep))
                }
            });
            let seen = announce_sleep(&*asleep, false, || written.load(Ordering::Acquire) == 1);
            let (for_ack, woken) = sender.join().unwrap();
            assert!(!for_ack, "the acknowledgement woke it");
            assert!(seen || woken, "the record is lost");
        });
    }

    /// A poster whose requests wait for an acknowledgement, the worker of its process, which falls asleep, and the peer.
    #[test]
    fn loom_requests_that_wait_for_an_acknowledgement_are_sent() {
        loom::model(|| {
            let asleep = Arc::new(AtomicU32::new(0));
            let (done, waiting) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
            let peer = thread::spawn({
                let (asleep, done) = (Arc::clone(&asleep), Arc::clone(&done));
                move || {
                    done.store(1, Ordering::Release);
                    must_wake_for_ack(&*asleep)
                }
            });
            let worker = thread::spawn({
                let (asleep, waiting) = (Arc::clone(&asleep), Arc::clone(&waiting));
                move || announce_sleep(&*asleep, false, || waiting.load(Ordering::Acquire) == 1)
            });
            waiting.store(1, Ordering::Release);
            let waits = await_ack(&*asleep, || done.load(Ordering::Acquire) == 0);
            let (woken, seen) = (peer.join().unwrap(), worker.join().unwrap());
            assert!(!waits || woken || seen, "nobody sends the requests");
        });
    }

    #[test]
    fn loom_a_receiver_that_falls_asleep_sees_the_bytes_or_is_woken() {
        loom::model(|| {
            let asleep = Arc::new(AtomicU32::new(0));
            let written = Arc::new(AtomicU64::new(0));
            let sender = thread::spawn({
                let (asleep, written) = (Arc::clone(&asleep), Arc::clone(&written));
                move || {
                    written.store(1, Ordering::Release);
                    must_wake(&*asleep)
                }
            });
            let seen = announce(&*asleep, || written.load(Ordering::Acquire) == 1);
            let woken = sender.join().unwrap();
            assert!(seen || woken, "the wake-up is lost");
        });
    }

    /// A sender that waits until the position `taken` of the receiver is `wanted`, and falls asleep. `receive` returns whether it wakes the
    /// sender.
    fn waits_for_room(
        wanted: u64,
        receive: fn(taken: &AtomicU64, must_wake: &dyn Fn() -> bool) -> bool,
    ) {
        loom::model(move || {
            let (asleep, blocked) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let taken = Arc::new(AtomicU64::new(0));
            let receiver = thread::spawn({
                let (asleep, blocked, taken) = (
                    Arc::clone(&asleep),
                    Arc::clone(&blocked),
                    Arc::clone(&taken),
                );
                move || receive(&taken, &|| must_wake_for_room(&*blocked, &*asleep))
            });
            let has_room = || taken.load(Ordering::Acquire) == wanted;
            let seen = announce(&*blocked, has_room) || announce(&*asleep, has_room);
            let woken = receiver.join().unwrap();
            assert!(seen || woken, "the wake-up is lost");
        });
    }

    #[test]
    fn loom_a_sender_that_waits_for_room_sees_the_room_or_is_woken() {
        waits_for_room(1, |taken, must_wake| {
            taken.store(1, Ordering::Release);
            must_wake()
        });
    }

    #[test]
    fn loom_a_sender_that_falls_asleep_late_is_woken_by_the_next_read() {
        waits_for_room(2, |taken, must_wake| {
            taken.store(1, Ordering::Release);
            let first = must_wake();
            taken.store(2, Ordering::Release);
            must_wake() || first
        });
    }
}
