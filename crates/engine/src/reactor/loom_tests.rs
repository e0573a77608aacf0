//! Interleavings of a polling thread and the worker, checked by loom. While a *lease* runs, polling threads handle the sockets, and the
//! worker sleeps.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::thread;

use super::cork::Cork;
use super::lease::Lease;
use super::sleepers::Sleepers;

/// The lease ends while a request is corked (kept back to be sent together with the next ones): either the worker sends
/// the request, or the polling thread grants a new lease, at whose end the worker wakes.
#[test]
fn loom_a_corked_request_is_sent_or_covered_by_a_lease() {
    loom::model(|| {
        let cork = Arc::new(Cork::new());
        let lease = Arc::new(Lease::new());
        let clock = Arc::new(AtomicU64::new(1));
        let _ = lease.grant(1, true);
        let end = 1 + u64::try_from(super::lease::LEASE.as_nanos()).unwrap();
        let worker = thread::spawn({
            let (cork, lease, clock) = (Arc::clone(&cork), Arc::clone(&lease), Arc::clone(&clock));
            move || {
                // The lease ends now.
                clock.store(end, Ordering::Relaxed);
                lease.on_wake(end).is_none() && cork.is_corked()
            }
        });
        cork.corked(cork.idle_polls());
        let lease_runs = || lease.is_polled(clock.load(Ordering::Relaxed));
        let covered = cork.is_covered(lease_runs);
        let sent = worker.join().unwrap();
        assert!(sent || !covered, "corked, and no thread sends it");
    });
}

/// A polling thread takes the sockets from the worker while the worker goes to sleep: a socket or a timer still wakes
/// the worker.
#[test]
fn loom_the_worker_never_sleeps_without_a_socket_or_a_timer_that_wakes_it() {
    loom::model(|| {
        let lease = Arc::new(Lease::new());
        let sockets = Arc::new(AtomicBool::new(true));
        let timer = Arc::new(AtomicBool::new(false));
        let worker = thread::spawn({
            let (lease, sockets, timer) =
                (Arc::clone(&lease), Arc::clone(&sockets), Arc::clone(&timer));
            move || {
                // The timer fires long after any lease, and the worker goes to sleep again.
                if timer.swap(false, Ordering::SeqCst) && lease.on_wake(u64::MAX / 2).is_none() {
                    sockets.swap(true, Ordering::SeqCst);
                }
            }
        });
        lease.on_poll(1).carry_out(
            || {
                sockets.swap(false, Ordering::SeqCst);
            },
            |_| {
                timer.swap(true, Ordering::SeqCst);
            },
        );
        worker.join().unwrap();
        // Swaps read the last value; a load may read an older one.
        let by_socket = sockets.swap(false, Ordering::SeqCst);
        let by_timer = timer.swap(false, Ordering::SeqCst);
        assert!(by_socket || by_timer, "nothing wakes the worker");
    });
}

/// The worker wakes and withdraws its announcement that it sleeps, while another thread goes to sleep and a peer writes. Either the peer
/// wakes this process, or a thread of this process sees what the peer has written.
#[test]
fn loom_a_thread_that_falls_asleep_while_the_worker_wakes_is_woken() {
    loom::model(|| {
        let sleepers = Arc::new(Sleepers::new());
        let (asleep, written) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(0)));
        sleepers.announce();
        fn announce(asleep: &AtomicU64) {
            asleep.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        let peer = thread::spawn({
            let (asleep, written) = (Arc::clone(&asleep), Arc::clone(&written));
            move || {
                written.store(1, Ordering::Release);
                fence(Ordering::SeqCst);
                asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::AcqRel) != 0
            }
        });
        let worker = thread::spawn({
            let (sleepers, asleep, written) = (
                Arc::clone(&sleepers),
                Arc::clone(&asleep),
                Arc::clone(&written),
            );
            move || {
                sleepers.withdraw(
                    || {
                        asleep.swap(0, Ordering::AcqRel);
                    },
                    || announce(&asleep),
                );
                // The lease of the other thread runs, so the worker looks once, and requests no wake-up when it sleeps again.
                written.load(Ordering::Acquire) == 1
            }
        });
        // The thread is woken while it is still counted.
        let (seen, woken, by_worker) = sleepers.count(|| {
            announce(&asleep);
            let seen = written.load(Ordering::Acquire) == 1;
            (seen, peer.join().unwrap(), worker.join().unwrap())
        });
        assert!(seen || woken || by_worker, "the wake-up is lost");
    });
}
