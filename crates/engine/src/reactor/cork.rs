//! Corking: whether a posted request is sent at once, or waits so that several are sent in one system call.
//!
//! A request may wait only while a thread polls, because that thread sends it at the second consecutive poll that
//! finds nothing. (The first such poll may come between two posts of a program that alternates between posting and
//! polling.) If the thread stops polling, the worker sends the corked requests when the lease ends, the time for which
//! sockets are left to polling threads (`lease.rs`). Every decision uses the number of polls that have found their
//! completion queue empty, *idle polls*.
//!
//! - Streams: [`Cork::on_post`] detects a burst: four posts with at most one idle poll between each and the next. A request
//!   that is posted after two idle polls is sent at once, since the program waits for its result. [`Cork::is_busy`] excludes programs
//!   that compute between their posts.
//! - Datagrams: the decision of each queue pair (`dgram::cork`) also depends on the time since any of these queue pairs last sent
//!   posted datagrams, because no acknowledgement of the peer triggers sending.
//!
//! The sizes that end the wait are in `anywarp_core::bounds` (`COALESCE_TCP`, `COALESCE_SHM`, `DATAGRAM_BATCH`).

use std::sync::atomic::AtomicBool;

use crate::sync::{AtomicU64, Ordering, fence};

/// The value of [`Cork::corked_at`] when nothing is corked. It is larger than any number of polls.
const NOTHING_CORKED: u64 = u64::MAX;
/// A post is corked if this many posts came before it, with at most one idle poll between each and the next.
const BURST_MIN_POSTS: u64 = 4;

/// The longest average time between posts, in nanoseconds, at which a post is corked. If a program computes for longer between two
/// posts, its next poll comes so late that the first request loses more time than corking saves, which is about 2 µs for each request.
const POST_EACH_MAX: u64 = 20_000;
/// The shortest time, in nanoseconds, over which the average is taken to decide whether requests may wait for the acknowledgement of
/// earlier ones ([`Cork::is_busy_for_long`]). A program that computes may post a few requests in a row before it computes again. It must
/// not be taken for a busy one, because the acknowledgement of a peer that computes as well comes late.
const POST_WINDOW: u64 = 1_000_000;

/// Whether `posts` within `elapsed` nanoseconds are those of a program that is busy sending.
#[inline]
fn posts_often(posts: u64, elapsed: u64) -> bool {
    elapsed <= posts.saturating_mul(POST_EACH_MAX)
}

/// What an idle poll has to do about corked requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdlePoll {
    /// Requests were corked since the last idle poll: return at once. The next poll shows whether more were posted.
    Wait,
    /// Send the corked requests, if any, and handle the sockets.
    Proceed {
        /// Whether requests are corked.
        flush: bool,
    },
}

/// The state of all queue pairs together.
#[derive(Debug)]
pub(super) struct Cork {
    /// Number of polls that found nothing.
    idle_polls: AtomicU64,
    /// The number of idle polls when the last request was corked.
    corked_at: AtomicU64,
    /// Number of posts since the program last waited (made two idle polls in a row). A wait during a burst does not
    /// reset this number to 0, so that the burst continues.
    burst_posts: AtomicU64,
    /// The number of idle polls at the last post.
    burst_polls: AtomicU64,
    /// The number of idle polls when a completion queue was armed.
    armed_at: AtomicU64,
    /// Number of posts to streams. A list counts as one, because it is sent together. Only an estimate, since several threads may post.
    posts: AtomicU64,
    /// The last decision of [`Self::is_busy`].
    lately: Decided,
    /// The last decision of [`Self::is_busy_for_long`].
    for_long: Decided,
}

impl Cork {
    pub(super) fn new() -> Self {
        Self {
            idle_polls: AtomicU64::new(0),
            corked_at: AtomicU64::new(NOTHING_CORKED),
            burst_posts: AtomicU64::new(0),
            burst_polls: AtomicU64::new(0),
            // An arbitrary number that is far from the current one.
            armed_at: AtomicU64::new(1 << 63),
            posts: AtomicU64::new(0),
            lately: Decided::default(),
            for_long: Decided::default(),
        }
    }

    #[inline]
    pub(super) fn idle_polls(&self) -> u64 {
        self.idle_polls.load(Ordering::Relaxed)
    }

    /// Counts an idle poll. Also returns the number of idle polls before it.
    #[inline]
    pub(super) fn on_idle_poll(&self) -> (u64, IdlePoll) {
        let before = self.idle_polls.fetch_add(1, Ordering::Relaxed);
        let corked_at = self.corked_at.load(Ordering::Acquire);
        let then = if before == corked_at {
            IdlePoll::Wait
        } else {
            IdlePoll::Proceed {
                flush: before > corked_at,
            }
        };
        (before, then)
    }

    /// Records that the program posts to a stream. Returns whether the request is part of a burst, and may be corked.
    pub(super) fn on_post(&self) -> bool {
        let posts = self.posts.load(Ordering::Relaxed);
        self.posts.store(posts.wrapping_add(1), Ordering::Relaxed);
        let idle = self.idle_polls.load(Ordering::Relaxed);
        // A program that waits for events polls once without success after each event and then sleeps, so it would
        // not send corked requests.
        if idle.wrapping_sub(self.armed_at.load(Ordering::Relaxed)) <= 1 {
            self.burst_posts.store(0, Ordering::Relaxed);
            return false;
        }
        let before = self.burst_polls.load(Ordering::Relaxed);
        if before != idle {
            self.burst_polls.store(idle, Ordering::Relaxed);
        }
        let waited = idle.wrapping_sub(before) > 1;
        let posts = match self.burst_posts.load(Ordering::Relaxed) {
            posts if !waited => posts,
            // After a wait one request is sent at once, and the burst continues.
            posts if posts > BURST_MIN_POSTS => BURST_MIN_POSTS - 1,
            _ => 0,
        };
        self.burst_posts.store(posts + 1, Ordering::Relaxed);
        posts >= BURST_MIN_POSTS
    }

    /// Whether the posts since the last call came as often as those of a program that is busy sending. Called at the first post that is to
    /// be corked, not at each post, because reading the time takes as long as sending a short message by shared memory.
    /// If there was no post since the last call, the result is the same.
    pub(super) fn is_busy(&self, t: u64) -> bool {
        let posts = self.posts.load(Ordering::Relaxed);
        self.lately.decide(posts, t, |since, _| since > 0)
    }

    /// As [`Self::is_busy`], for the posts of the last [`POST_WINDOW`] or longer.
    pub(super) fn is_busy_for_long(&self, t: u64) -> bool {
        let posts = self.posts.load(Ordering::Relaxed);
        self.for_long
            .decide(posts, t, |_, elapsed| elapsed >= POST_WINDOW)
    }

    /// Records that a completion queue is armed.
    pub(super) fn on_arm(&self) {
        let idle = self.idle_polls.load(Ordering::Relaxed);
        self.armed_at.store(idle, Ordering::Relaxed);
    }

    /// Records that a request was corked after `idle_polls` idle polls.
    #[inline]
    pub(super) fn corked(&self, idle_polls: u64) {
        self.corked_at.store(idle_polls, Ordering::Release);
    }

    /// Whether the lease still runs after a request was corked. If it does not, a new one has to be granted.
    ///
    /// Store-load pair with [`Self::is_corked`]: this thread has stored `corked_at`, then loads the lease; a thread
    /// that found the lease expired then loads `corked_at`. Because of the fences on both sides, at least one of them
    /// sees the other's store.
    #[inline]
    pub(super) fn is_covered(&self, lease_runs: impl FnOnce() -> bool) -> bool {
        fence(Ordering::SeqCst);
        lease_runs()
    }

    /// Whether requests are corked, for a thread that found the lease expired (see [`Self::is_covered`]).
    #[inline]
    pub(super) fn is_corked(&self) -> bool {
        fence(Ordering::SeqCst);
        self.corked_at.load(Ordering::Acquire) != NOTHING_CORKED
    }

    /// Records that the corked requests are about to be sent.
    pub(super) fn uncork(&self) {
        self.corked_at.store(NOTHING_CORKED, Ordering::Release);
    }
}

/// A decision on whether the program is busy sending.
#[derive(Debug, Default)]
struct Decided {
    /// The time in nanoseconds, and the number of posts, when it was made.
    at: AtomicU64,
    posts: AtomicU64,
    busy: AtomicBool,
}

impl Decided {
    /// Makes a new decision if `tells` returns true for the number of posts and the time since the last decision. Otherwise
    /// returns the last decision.
    fn decide(&self, posts: u64, t: u64, tells: impl Fn(u64, u64) -> bool) -> bool {
        let since = posts.wrapping_sub(self.posts.load(Ordering::Relaxed));
        let elapsed = t.saturating_sub(self.at.load(Ordering::Relaxed));
        if !tells(since, elapsed) {
            return self.busy.load(Ordering::Relaxed);
        }
        let busy = posts_often(since, elapsed);
        self.posts.store(posts, Ordering::Relaxed);
        self.at.store(t, Ordering::Relaxed);
        self.busy.store(busy, Ordering::Relaxed);
        busy
    }
}

/// How often completion queues were polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Polls {
    /// All polls.
    pub(crate) all: u64,
    /// Polls that found nothing.
    pub(crate) idle: u64,
}

/// When datagram queue pairs of the process last posted and sent. The decisions about corking depend on it. Several threads may post, so the
/// numbers are estimates.
#[derive(Debug, Default)]
pub(crate) struct DatagramPosts {
    /// How many polls had found nothing when the last request was posted.
    idle_polls: AtomicU64,
    /// The time of the last transmission of posted requests, in nanoseconds.
    sent_at: AtomicU64,
    /// The time of the last call of [`Self::are_frequent`], and the number of posts since.
    checked_at: AtomicU64,
    posts: AtomicU64,
}

impl DatagramPosts {
    /// Counts posted requests.
    #[inline]
    pub(crate) fn count(&self, requests: u64) {
        let posts = self.posts.load(Ordering::Relaxed);
        self.posts
            .store(posts.wrapping_add(requests), Ordering::Relaxed);
    }

    /// How many polls have found nothing since the last request was posted.
    #[inline]
    pub(crate) fn idle_polls_since(&self, polls: Polls) -> u64 {
        polls
            .idle
            .saturating_sub(self.idle_polls.load(Ordering::Relaxed))
    }

    /// Records the number of polls at a post.
    #[inline]
    pub(crate) fn posted(&self, polls: Polls) {
        self.idle_polls.store(polls.idle, Ordering::Relaxed);
    }

    /// Records that posted requests are sent at the time `t`.
    pub(crate) fn sent(&self, t: u64) {
        self.sent_at.store(t, Ordering::Relaxed);
    }

    /// The time since posted requests were last sent.
    pub(crate) fn since_sent(&self, t: u64) -> u64 {
        t.saturating_sub(self.sent_at.load(Ordering::Relaxed))
    }

    /// Whether the posts since the last call came as often as those of a program that is busy sending, on a machine that is `slowness`
    /// times slower than others. A program that computes between its posts polls too late to send corked datagrams.
    pub(crate) fn are_frequent(&self, t: u64, slowness: u64) -> bool {
        let elapsed = t.saturating_sub(self.checked_at.swap(t, Ordering::Relaxed));
        posts_often(self.posts.swap(0, Ordering::Relaxed), elapsed / slowness)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_posts_and_polls_in_turns_posts_a_burst() {
        let cork = Cork::new();
        let polls = |n| {
            for _ in 0..n {
                cork.on_idle_poll();
            }
        };
        for _ in 0..BURST_MIN_POSTS {
            assert!(!cork.on_post());
            polls(1);
        }
        assert!(cork.on_post());
        // After a wait one request is sent at once, and the next ones are corked again.
        polls(2);
        assert!(!cork.on_post());
        polls(1);
        assert!(cork.on_post());
        // A program that waits after each post is no longer busy.
        for _ in 0..2 * BURST_MIN_POSTS {
            polls(2);
            assert!(!cork.on_post());
        }
        for _ in 1..BURST_MIN_POSTS {
            assert!(!cork.on_post());
        }
        assert!(cork.on_post());
        // A program that waits for events polls once without success after each event.
        for _ in 0..2 * BURST_MIN_POSTS {
            cork.on_arm();
            assert!(!cork.on_post());
            polls(1);
            assert!(!cork.on_post());
        }
        // If it continues to poll, it is treated like any other program.
        polls(2);
        for _ in 0..BURST_MIN_POSTS {
            assert!(!cork.on_post());
        }
        assert!(cork.on_post());
    }

    /// Posts `count` requests, one each `each` nanoseconds.
    fn post_each(cork: &Cork, count: u64, each: u64, t: &mut u64) {
        for _ in 0..count {
            cork.on_post();
            *t += each;
        }
    }

    #[test]
    fn a_program_that_computes_between_its_posts_is_not_busy() {
        let cork = Cork::new();
        let mut t = 1_000_000_000;
        let mut posts = |count, each| {
            post_each(&cork, count, each, &mut t);
            cork.is_busy(t)
        };
        assert!(!posts(1, 0), "it posted nothing for a second");
        // Some posts are corked, and the time is read at the first of them only.
        for count in [1, 2, 64] {
            assert!(posts(count, POST_EACH_MAX), "{count} posts");
        }
        for count in [1, 2, 64] {
            assert!(!posts(count, 77_000), "{count} posts");
        }
        assert!(posts(1, 1_000), "it is busy again");
        // There was no post since the last call, so the result is the same.
        assert!(cork.is_busy(2_000_000_000));
    }

    #[test]
    fn a_few_posts_in_a_row_do_not_show_that_a_program_is_busy_for_long() {
        let cork = Cork::new();
        let mut t = 1_000_000_000;
        let mut posts = |count, each| {
            post_each(&cork, count, each, &mut t);
            cork.is_busy_for_long(t)
        };
        for _ in 0..10 {
            assert!(!posts(20, 1_000));
            assert!(!posts(1, POST_WINDOW / 2));
        }
        for each in [1_000, POST_EACH_MAX] {
            assert!(posts(2 * POST_WINDOW / each, each), "a post each {each} ns");
        }
        assert!(posts(1, 1_000), "the decision holds for a while");
        assert!(!posts(1, POST_WINDOW));
    }

    #[test]
    fn corked_requests_go_at_the_second_idle_poll() {
        let cork = Cork::new();
        let next = || cork.on_idle_poll().1;
        assert_eq!(next(), IdlePoll::Proceed { flush: false });
        cork.corked(cork.idle_polls());
        assert_eq!(next(), IdlePoll::Wait);
        // More requests were posted in between, so the corked ones wait again.
        cork.corked(cork.idle_polls());
        assert_eq!(next(), IdlePoll::Wait);
        assert_eq!(next(), IdlePoll::Proceed { flush: true });
        cork.uncork();
        assert_eq!(next(), IdlePoll::Proceed { flush: false });
    }
}
