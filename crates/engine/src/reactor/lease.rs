//! The lease: whether polling threads or the worker handle the sockets.
//!
//! A *lease* is the time for which polling threads handle the sockets alone, before the worker (the device's own
//! thread) handles them again. A thread whose poll finds its completion queue empty (an *idle poll*) handles the
//! sockets itself and renews the lease. While the lease runs, the worker sleeps; a timer wakes it when the lease ends.
//!
//! This file only makes decisions: the method for each event returns the [`Actions`] that its caller has to carry
//! out. It reads no clock and sets no timer, so tests run it in virtual time.
//!
//! All fields are atomics, because each poll and each post uses them and must take no lock. Several threads may poll
//! at the same time, and each of them may renew the lease. A lost update only causes one renewal more or less.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::time::Duration;

use crate::sync::{AtomicU64, Ordering};

/// How long the worker sleeps after a poll: longer than the time between two polls of a busy loop.
pub(super) const LEASE: Duration = Duration::from_micros(150);
/// A poll renews the lease only if the last renewal was at least this long ago, because each renewal sets a timer by a system call.
const RENEW_AFTER: Duration = Duration::from_micros(60);
/// How long a thread must poll without a pause to get [`STEADY_LEASE`].
const STEADY_AFTER: Duration = Duration::from_millis(2);
/// The lease of a thread that has polled for [`STEADY_AFTER`]. In a virtual machine, setting a timer costs 12 µs if
/// it is the next one of its processor to fire, so this timer is set less often.
const STEADY_LEASE: Duration = Duration::from_millis(1);
/// As [`RENEW_AFTER`], for [`STEADY_LEASE`].
const STEADY_RENEW_AFTER: Duration = Duration::from_micros(700);
/// How long posts may go on renewing the lease while there is no idle poll, counted from [`Lease::polled_until`].
const POSTS_EXTEND_FOR: Duration = Duration::from_millis(4);

/// How long a thread that waits for an event sleeps at a time. Its lease is more than twice as long: the timer of so
/// long a lease is seldom the next one of its processor to fire, and costs little to set. The price is that the worker
/// sleeps until the end of that lease even if the thread stops waiting and does not poll.
pub(super) const WAIT_SLICE: Duration = Duration::from_millis(4);

/// If the programs of all contexts make progress only by polls, leases are long, except this number of leases after
/// each arming of a completion queue (`ibv_req_notify_cq(3)`). A program that has armed a queue may sleep after its next
/// poll, and the worker then receives for it.
const SHORT_AFTER_ARM: u32 = 16;

/// A post may start a lease. If neither a poll nor another post renewed that lease, this number of following posts start none.
const POSTS_TO_SKIP: u32 = 1024;

const fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// What the caller has to do after an event, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
pub(super) struct Actions {
    /// Whether to stop waking the worker for sockets, which it handled until now.
    pub(super) take_sockets: bool,
    /// Set the timer that wakes the worker. This must be the last action. If the timer were set first, it could fire
    /// before the sockets are taken, and the worker would then sleep with neither a socket nor a timer to wake it.
    pub(super) set_timer: Option<Duration>,
}

impl Actions {
    /// Carries out the actions in their order.
    #[inline]
    pub(super) fn carry_out(self, take_sockets: impl FnOnce(), set_timer: impl FnOnce(Duration)) {
        if self.take_sockets {
            take_sockets();
        }
        if let Some(after) = self.set_timer {
            set_timer(after);
        }
    }

    const NONE: Self = Self {
        take_sockets: false,
        set_timer: None,
    };
}

/// The lease. Times are nanoseconds.
#[derive(Debug)]
pub(super) struct Lease {
    /// The worker handles the sockets from this time on.
    until: AtomicU64,
    /// Events before this time do not renew the lease.
    renew_at: AtomicU64,
    /// Since when threads have polled without a pause.
    steady_since: AtomicU64,
    /// The end of the last lease of a polling thread. Leases of threads that wait for an event, and renewals by posts, do
    /// not count, because these threads do not run deadlines.
    polled_until: AtomicU64,
    /// The time of the last post that was made while no lease ran; 0 after a completion queue was armed.
    posted_at: AtomicU64,
    /// The value of `successful_polls` at that post.
    polls_at_post: AtomicU64,
    /// Whether a post started the lease, and since then no idle poll and no post has renewed it.
    is_by_post: AtomicBool,
    /// The number of further posts that start no lease, because a lease that a post had started ended without a renewal.
    posts_to_skip: AtomicU32,
    /// Number of polls that found completions.
    successful_polls: AtomicU64,
    /// Number of open contexts with completion queues.
    contexts: AtomicUsize,
    /// The number of these contexts whose programs make progress only by polls ([`Self::set_polled`]).
    polled_contexts: AtomicUsize,
    /// The number of further leases that are short because a completion queue was armed.
    short_leases: AtomicU32,
    /// Whether the next idle poll shortens the running lease, because a completion queue was armed.
    shorten: AtomicBool,
    /// Replacements for [`LEASE`] and [`STEADY_LEASE`].
    #[cfg(test)]
    lengths: (Duration, Duration),
}

impl Lease {
    pub(super) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
            renew_at: AtomicU64::new(0),
            steady_since: AtomicU64::new(0),
            polled_until: AtomicU64::new(0),
            posted_at: AtomicU64::new(0),
            polls_at_post: AtomicU64::new(0),
            is_by_post: AtomicBool::new(false),
            posts_to_skip: AtomicU32::new(0),
            successful_polls: AtomicU64::new(0),
            contexts: AtomicUsize::new(0),
            polled_contexts: AtomicUsize::new(0),
            short_leases: AtomicU32::new(0),
            shorten: AtomicBool::new(false),
            #[cfg(test)]
            lengths: (LEASE, STEADY_LEASE),
        }
    }

    /// The lease of a whole reactor in a test. It is longer than in production, because a sanitizer or a loaded
    /// machine needs more time to send a few datagrams. Tests of this file use [`Self::new`] and virtual time.
    #[cfg(test)]
    pub(super) fn for_slow_machines() -> Self {
        Self {
            lengths: (Duration::from_millis(20), Duration::from_millis(25)),
            ..Self::new()
        }
    }

    /// The lease after a poll.
    #[inline]
    pub(super) fn short(&self) -> Duration {
        #[cfg(test)]
        return self.lengths.0;
        #[cfg(not(test))]
        return LEASE;
    }

    /// The lease of a thread that polls without a pause.
    #[inline]
    fn steady(&self) -> Duration {
        #[cfg(test)]
        return self.lengths.1;
        #[cfg(not(test))]
        return STEADY_LEASE;
    }

    /// Counts a poll that found completions.
    #[inline]
    pub(super) fn count_successful_poll(&self) {
        self.successful_polls.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of polls that found completions.
    pub(super) fn successful_polls(&self) -> u64 {
        self.successful_polls.load(Ordering::Relaxed)
    }

    /// Called at a poll that found nothing, whose thread handles the sockets.
    #[inline]
    pub(super) fn on_poll(&self, t: u64) -> Actions {
        if self.is_by_post.load(Ordering::Relaxed) {
            self.is_by_post.store(false, Ordering::Relaxed);
        }
        if t < self.renew_at.load(Ordering::Relaxed) {
            return Actions::NONE;
        }
        let shorten =
            self.shorten.load(Ordering::Relaxed) && self.shorten.swap(false, Ordering::Relaxed);
        self.grant(t, shorten)
    }

    /// Called when a request is corked (kept back to be sent together with the next ones). The request must not wait
    /// longer than the lease of a polling thread, so the longer lease of a thread that waits for an event is shortened.
    #[inline]
    pub(super) fn on_cork(&self, t: u64) -> Actions {
        if t < self.renew_at.load(Ordering::Relaxed) {
            return Actions::NONE;
        }
        self.grant(t, true)
    }

    /// Starts or renews the lease.
    pub(super) fn grant(&self, t: u64, shorten: bool) -> Actions {
        let lease = self.duration(t);
        let until = t + nanos(lease);
        self.polled_until.store(until, Ordering::Relaxed);
        if !shorten && self.until.load(Ordering::Acquire) >= until {
            // The running lease ends later, for example because a thread that waited for an event has started it.
            self.renew_at
                .store(t + nanos(RENEW_AFTER), Ordering::Relaxed);
            return Actions::NONE;
        }
        let before = self.until.swap(until, Ordering::AcqRel);
        let ended = before < t;
        if ended {
            self.steady_since.store(t, Ordering::Relaxed);
        }
        self.renewed(t, lease, ended)
    }

    /// Called when a context gets its first completion queue, or with `false` when its last one is destroyed.
    pub(super) fn set_used(&self, used: bool) {
        change(&self.contexts, used);
    }

    /// Called when the program of a context with completion queues has declared that it makes progress only by polls, or with
    /// `false` when this no longer holds.
    pub(super) fn set_polled(&self, polled: bool) {
        change(&self.polled_contexts, polled);
    }

    /// Whether all leases are long: the programs of all contexts with completion queues make progress only by polls. The worker would
    /// only disturb them when they compute between their polls.
    fn is_patient(&self) -> bool {
        let polled = self.polled_contexts.load(Ordering::Relaxed);
        polled > 0 && polled == self.contexts.load(Ordering::Relaxed)
    }

    /// The length of a lease that is granted at `t`.
    fn duration(&self, t: u64) -> Duration {
        if self.is_patient() {
            // Only an estimate: two threads may count the same lease.
            match self.short_leases.load(Ordering::Relaxed) {
                0 => return self.steady(),
                left => self.short_leases.store(left - 1, Ordering::Relaxed),
            }
        }
        let runs = t <= self.until.load(Ordering::Acquire);
        let since = self.steady_since.load(Ordering::Relaxed);
        if runs && t.saturating_sub(since) >= nanos(STEADY_AFTER) {
            self.steady()
        } else {
            self.short()
        }
    }

    fn renewed(&self, t: u64, lease: Duration, take_sockets: bool) -> Actions {
        let after = if lease > self.short() {
            STEADY_RENEW_AFTER
        } else {
            RENEW_AFTER
        };
        self.renew_at.store(t + nanos(after), Ordering::Relaxed);
        Actions {
            take_sockets,
            set_timer: Some(lease),
        }
    }

    /// Called when a request was posted and sent. A thread that polls will poll again, but a list of posts with a
    /// system call for each may take longer than a lease. So posts renew a running lease, but no longer than
    /// [`POSTS_EXTEND_FOR`] after `polled_until`, because posts do not handle sockets and deadlines.
    #[inline]
    pub(super) fn on_post(&self, t: u64) -> Actions {
        if t < self.renew_at.load(Ordering::Relaxed) {
            return Actions::NONE;
        }
        let until = self.until.load(Ordering::Acquire);
        let polled = self.polled_until.load(Ordering::Relaxed);
        if posts_extend(t, until, polled, self.steady()) {
            // The program goes on posting, so it does not wait for data that only the worker would receive.
            self.is_by_post.store(false, Ordering::Relaxed);
            let lease = self.duration(t);
            self.until.store(t + nanos(lease), Ordering::Release);
            return self.renewed(t, lease, false);
        }
        if until > t {
            return Actions::NONE;
        }
        // No lease runs. If the worker receives everything that completes, the polls of this thread always find
        // something and never start a lease. The thread and the worker would then contend for the sockets forever.
        let polls = self.successful_polls();
        let before = self.posted_at.swap(t, Ordering::Relaxed);
        let polled = self.polls_at_post.swap(polls, Ordering::Relaxed) != polls;
        let skips = self.skips_post();
        if polled && t <= before + nanos(POSTS_EXTEND_FOR) && !skips {
            let actions = self.grant(t, false);
            // The flag is set after the grant. If it were set before, an awake worker could find the flag and no running lease,
            // and would conclude that a lease by a post has ended without a poll.
            self.is_by_post.store(true, Ordering::Release);
            return actions;
        }
        Actions::NONE
    }

    /// Whether a post starts no lease. Only an estimate: two threads may skip the same post.
    fn skips_post(&self) -> bool {
        let left = self.posts_to_skip.load(Ordering::Relaxed);
        let skips = left > 0;
        if skips {
            self.posts_to_skip.store(left - 1, Ordering::Relaxed);
        }
        skips
    }

    /// Called when a completion queue is armed: the thread is about to sleep, so the next post starts no lease.
    pub(super) fn on_arm(&self) {
        self.posted_at.store(0, Ordering::Relaxed);
        if self.is_patient() {
            self.short_leases.store(SHORT_AFTER_ARM, Ordering::Relaxed);
            self.shorten.store(true, Ordering::Relaxed);
            self.renew_at.store(0, Ordering::Relaxed);
        }
    }

    /// Called when a completion queue was armed by a thread that will probably poll again at once. In case the thread
    /// sleeps after all, its next leases are short: its polling counts as steady only from `t` on.
    pub(super) fn on_sleepless_arm(&self, t: u64) {
        self.steady_since.store(t, Ordering::Relaxed);
    }

    /// Called when a thread that waits for an event handles the sockets for `slice`. The lease covers the next waits
    /// too, since there is a wait for each message.
    pub(super) fn on_wait(&self, t: u64, slice: Duration) -> Actions {
        self.is_by_post.store(false, Ordering::Relaxed);
        let needed = t + nanos(slice + self.short());
        if self.until.load(Ordering::Acquire) >= needed {
            return Actions::NONE;
        }
        let lease = 2 * WAIT_SLICE + self.short();
        self.until.store(t + nanos(lease), Ordering::Release);
        self.renew_at.store(t, Ordering::Relaxed);
        self.steady_since.store(t, Ordering::Relaxed);
        Actions {
            take_sockets: false,
            set_timer: Some(lease),
        }
    }

    /// Called when the worker is awake. `Some`: the remaining time of a running lease, during which the worker does
    /// not handle the sockets.
    pub(super) fn on_wake(&self, t: u64) -> Option<Duration> {
        let until = self.until.load(Ordering::Acquire);
        if t < until {
            return Some(Duration::from_nanos(until - t));
        }
        if self.is_by_post.swap(false, Ordering::AcqRel) {
            // The program has made no idle poll during the lease, and has posted nothing after its beginning. This happens if the
            // requests of the program complete without an acknowledgement of the peer (UC, or a standard peer), and the program
            // then waits for the data of the peer by reading its own memory in a loop.
            self.posts_to_skip.store(POSTS_TO_SKIP, Ordering::Relaxed);
        }
        None
    }

    /// The end of the last lease.
    #[cfg(test)]
    pub(super) fn ends_at(&self) -> u64 {
        self.until.load(Ordering::Acquire)
    }

    /// Whether a lease runs.
    pub(super) fn runs(&self, t: u64) -> bool {
        t < self.until.load(Ordering::Acquire)
    }

    /// Ends the lease now: the worker may handle the sockets until a poll or a post starts another lease.
    pub(super) fn end(&self) {
        self.is_by_post.store(false, Ordering::Relaxed);
        self.until.store(0, Ordering::Release);
        self.renew_at.store(0, Ordering::Relaxed);
    }

    /// Whether the lease of a polling thread runs. That thread sends corked requests, or the worker does when the
    /// lease ends. The longer lease of a thread that waits for an event does not count.
    #[inline]
    pub(super) fn is_polled(&self, t: u64) -> bool {
        let until = self.until.load(Ordering::Acquire);
        t < until && until <= t + nanos(self.steady())
    }

    /// Whether polling threads run deadlines at `t`.
    pub(super) fn runs_deadlines(&self, t: u64) -> bool {
        t < self.polled_until.load(Ordering::Relaxed)
    }
}

/// Adds 1 to a count, or subtracts 1.
fn change(count: &AtomicUsize, up: bool) {
    if up {
        count.fetch_add(1, Ordering::Relaxed);
    } else {
        count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a post at `t` renews a lease that ends at `until`. `polled` is [`Lease::polled_until`], and `steady` the
/// longest lease of a polling thread.
fn posts_extend(t: u64, until: u64, polled: u64, steady: Duration) -> bool {
    // The lease runs, it is not that of a thread that waits for an event, and the last poll is recent.
    t < until && until <= t + nanos(steady) && t <= polled + nanos(POSTS_EXTEND_FOR)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const MICROSECOND: u64 = 1_000;
    const MILLISECOND: u64 = 1_000_000;

    fn set_timer(actions: Actions) -> Option<Duration> {
        actions.set_timer
    }

    #[test]
    fn posts_extend_the_lease_of_polls_for_a_while() {
        let (lease, posting) = (nanos(STEADY_LEASE), nanos(POSTS_EXTEND_FOR));
        let polled = 10 * posting;
        assert!(posts_extend(polled - 1, polled, polled, STEADY_LEASE));
        assert!(posts_extend(
            polled + posting,
            polled + posting + 1,
            polled,
            STEADY_LEASE
        ));
        // Too long after the last poll; a lease that has ended; the lease of a thread that waits for an event.
        assert!(!posts_extend(
            polled + posting + 1,
            polled + posting + 2,
            polled,
            STEADY_LEASE
        ));
        assert!(!posts_extend(polled, polled, polled, STEADY_LEASE));
        assert!(!posts_extend(
            polled,
            polled + lease + 1,
            polled,
            STEADY_LEASE
        ));
    }

    #[test]
    fn a_first_poll_takes_the_sockets_and_sets_the_timer_last() {
        let lease = Lease::new();
        let t = MILLISECOND;
        let actions = lease.on_poll(t);
        assert_eq!(
            actions,
            Actions {
                take_sockets: true,
                set_timer: Some(LEASE)
            }
        );
        // The next renewal finds a running lease: this thread has the sockets already.
        assert_eq!(lease.on_poll(t + nanos(RENEW_AFTER) - 1), Actions::NONE);
        let renewed = lease.on_poll(t + nanos(RENEW_AFTER));
        assert_eq!(renewed.set_timer, Some(LEASE));
        assert!(!renewed.take_sockets);
        // The worker does not handle the sockets until the lease ends, and then takes them.
        let end = t + nanos(RENEW_AFTER) + nanos(LEASE);
        assert_eq!(lease.on_wake(end - 1), Some(Duration::from_nanos(1)));
        assert_eq!(lease.on_wake(end), None);
        assert!(lease.on_poll(end + 1).take_sockets);
    }

    #[test]
    fn leases_are_long_while_all_contexts_are_polled() {
        let lease = Lease::new();
        let mut t = MILLISECOND;
        let mut granted = || {
            t += 10 * MILLISECOND;
            set_timer(lease.on_poll(t))
        };
        lease.set_used(true);
        assert_eq!(granted(), Some(LEASE));
        lease.set_polled(true);
        assert_eq!(granted(), Some(STEADY_LEASE));
        lease.set_used(true);
        assert_eq!(granted(), Some(LEASE), "the second context is not polled");
        lease.set_used(false);
        assert_eq!(granted(), Some(STEADY_LEASE));
        // The program may sleep after it has armed a completion queue, so the lease that runs is shortened.
        lease.on_arm();
        t += 1;
        assert_eq!(set_timer(lease.on_poll(t)), Some(LEASE));
        assert_eq!(lease.ends_at(), t + nanos(LEASE));
        let mut granted = || {
            t += 10 * MILLISECOND;
            set_timer(lease.on_poll(t))
        };
        for _ in 1..SHORT_AFTER_ARM {
            assert_eq!(granted(), Some(LEASE));
        }
        assert_eq!(granted(), Some(STEADY_LEASE));
        lease.set_polled(false);
        assert_eq!(granted(), Some(LEASE));
    }

    #[test]
    fn a_thread_that_polls_without_a_pause_gets_the_longer_lease_until_it_pauses() {
        let lease = Lease::new();
        // The second run begins after a pause that is longer than a lease.
        for start in [MILLISECOND, 1000 * MILLISECOND] {
            let mut t = start;
            while t < start + nanos(STEADY_AFTER) {
                assert_eq!(set_timer(lease.on_poll(t)), Some(LEASE), "at {t}");
                t += nanos(RENEW_AFTER);
            }
            assert_eq!(set_timer(lease.on_poll(t)), Some(STEADY_LEASE));
            assert_eq!(
                lease.on_poll(t + nanos(STEADY_RENEW_AFTER) - 1),
                Actions::NONE
            );
        }
    }

    #[test]
    fn a_thread_that_arms_without_sleeping_never_gets_the_longer_lease() {
        let lease = Lease::new();
        let mut t = MILLISECOND;
        while t < MILLISECOND + 2 * nanos(STEADY_AFTER) {
            assert_eq!(set_timer(lease.on_poll(t)), Some(LEASE), "at {t}");
            lease.on_sleepless_arm(t);
            t += nanos(RENEW_AFTER);
        }
    }

    #[test]
    fn corked_requests_shorten_the_lease_of_a_waiting_thread_and_polls_do_not() {
        let lease = Lease::new();
        let t = MILLISECOND;
        let wait = lease.on_wait(t, WAIT_SLICE);
        assert!(wait.set_timer > Some(STEADY_LEASE));
        assert!(!lease.is_polled(t), "only a waiting thread has the lease");
        assert_eq!(lease.on_poll(t + 1), Actions::NONE);
        let t = t + 1 + nanos(RENEW_AFTER);
        assert_eq!(lease.on_cork(t).set_timer, Some(LEASE));
        assert!(lease.is_polled(t));
        assert_eq!(lease.on_wake(t + nanos(LEASE)), None);
    }

    #[test]
    fn several_waits_share_a_lease() {
        let lease = Lease::new();
        let slice = WAIT_SLICE;
        let mut timers = 0;
        for message in 0..1000 {
            let t = MILLISECOND + message * 10 * MICROSECOND;
            timers += usize::from(set_timer(lease.on_wait(t, slice)).is_some());
        }
        assert_eq!(timers, 3, "10 ms of waits set one timer for each slice");
    }

    /// The worker receives everything that completes: each poll finds something, and none handles sockets.
    #[test]
    fn a_thread_that_posts_and_polls_without_an_idle_poll_gets_the_lease_back() {
        let lease = Lease::new();
        let has_lease = |t: u64| lease.on_wake(t).is_some();
        let later = |n: u64| 1000 * MILLISECOND + n * MILLISECOND;
        let _ = lease.on_post(later(1));
        let _ = lease.on_post(later(2));
        assert!(!has_lease(later(2)), "the thread only posts");
        lease.count_successful_poll();
        lease.on_arm();
        let _ = lease.on_post(later(3));
        assert!(!has_lease(later(3)), "the thread waits for events");
        lease.count_successful_poll();
        let posting = nanos(POSTS_EXTEND_FOR);
        let _ = lease.on_post(later(4) + posting);
        assert!(!has_lease(later(4) + posting), "the post was long ago");
        lease.count_successful_poll();
        let actions = lease.on_post(later(5) + posting);
        assert!(has_lease(later(5) + posting));
        assert!(actions.take_sockets);
    }

    /// The requests of UC complete at once: each poll finds something, and the program then polls its memory.
    #[test]
    fn posts_start_no_lease_if_no_poll_handles_the_sockets_meanwhile() {
        let lease = Lease::new();
        let mut t = 1000 * MILLISECOND;
        let post = |t: u64| {
            lease.count_successful_poll();
            lease.on_post(t).take_sockets
        };
        let _ = post(t);
        for idle_poll in [true, false] {
            t += MILLISECOND;
            assert!(post(t));
            if idle_poll {
                let _ = lease.on_poll(t + 1);
            }
            assert!(lease.on_wake(t + nanos(LEASE) - 1).is_some());
            assert!(lease.on_wake(t + nanos(LEASE)).is_none());
        }
        for skipped in 0..POSTS_TO_SKIP {
            t += MILLISECOND;
            assert!(!post(t), "post {skipped}");
            assert!(lease.on_wake(t).is_none());
        }
        assert!(post(t + MILLISECOND));
    }

    /// Each poll finds the completion of an earlier request for longer than posts renew the lease.
    #[test]
    fn posts_start_leases_as_long_as_the_program_posts_and_polls() {
        let lease = Lease::new();
        let mut t = 1000 * MILLISECOND;
        let mut without = 0;
        for _ in 0..1000 {
            t += 40 * MICROSECOND;
            lease.count_successful_poll();
            let _ = lease.on_post(t);
            without += u32::from(lease.on_wake(t).is_none());
        }
        assert!(without < 20, "no lease after {without} of 1000 posts");
    }

    #[test]
    fn a_lease_that_is_ended_is_granted_by_the_next_poll() {
        let lease = Lease::new();
        let t = MILLISECOND;
        let _ = lease.on_poll(t);
        lease.end();
        assert_eq!(lease.on_wake(t + 1), None);
        assert!(lease.on_poll(t + 1).take_sockets);
    }
}
