//! Decides whether posted datagrams are sent at once, or corked (kept back) to be sent together with those that are posted
//! next. The datagrams that are sent together are a *run*, which takes one system call instead of many.
//!
//! A program that alternates between posts and polls will soon post again, so its datagrams are corked. If two polls since
//! the last post found nothing, the program waits for a completion, so its next post is sent at once. If it then posts
//! many datagrams without a poll, for example because the peer has granted a window, the first ones are sent at once and the others
//! are corked. A program that computes between its posts polls too late to send corked datagrams, so its posts are sent at once.
//!
//! Whether the program waits, computes or is busy sending is a property of the program and not of one queue pair: with many queue
//! pairs, each of them is posted to rarely. So this part of the state belongs to all datagram queue pairs together ([`DatagramPosts`]).

use std::time::Duration;

use anywarp_core::bounds;

use crate::reactor::{DatagramPosts, Polls};

/// A run with this many posted bytes is full, and is sent.
const RUN_BYTES: u64 = 48 << 10;
/// A program that has made this many transmissions since its last poll counts as sending a burst.
const BURST: u32 = 4;
/// While requests are corked, the clock is read once in this many requests. Reading it takes as long as a quarter of all other
/// work for a datagram of 64 bytes.
const CLOCK_EACH: usize = 8;
/// The clock is also read once in this many bytes: compared with the work for long requests, reading it takes little time.
const CLOCK_BYTES: u64 = 4096;
/// Maximum age of the last transmission for a program to count as busy sending, in nanoseconds.
const BUSY_FOR: u64 = Duration::from_micros(50).as_nanos() as u64;

/// The decision about posted datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    SendNow,
    /// The datagrams are corked. `first`: no others were corked before.
    Cork {
        first: bool,
    },
}

/// The state that the decision depends on.
#[derive(Debug)]
pub(super) struct Cork {
    /// Requests and bytes that were posted since the last transmission.
    requests: usize,
    bytes: u64,
    /// `requests` and `bytes` when the clock was last read.
    at_clock: (usize, u64),
    corked: bool,
    /// Number of polls when the first request was corked.
    polls_at_cork: u64,
    /// Number of polls at the last transmission.
    polls_at_send: u64,
    /// How many transmissions, up to the last one, were made without a poll between them.
    sent_since_poll: u32,
    /// The factor by which tests of a whole queue pair lengthen times; 1 otherwise.
    #[cfg(test)]
    slowness: u64,
}

impl Cork {
    pub(super) fn new() -> Self {
        Self {
            requests: 0,
            bytes: 0,
            at_clock: (0, 0),
            corked: false,
            polls_at_cork: 0,
            polls_at_send: 0,
            sent_since_poll: 0,
            #[cfg(test)]
            slowness: 1,
        }
    }

    /// The state for tests of a whole queue pair, which need more time between two transmissions under a sanitizer or
    /// on a loaded machine. Tests of this file use [`Self::new`].
    #[cfg(test)]
    pub(super) fn for_slow_machines() -> Self {
        Self {
            slowness: 400,
            ..Self::new()
        }
    }

    fn slowness(&self) -> u64 {
        #[cfg(test)]
        return self.slowness;
        #[cfg(not(test))]
        return 1;
    }

    /// Counts a posted request.
    #[inline]
    pub(super) fn posted(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }

    /// Whether requests were posted since the last transmission.
    pub(super) fn has_posted(&self) -> bool {
        self.requests > 0
    }

    /// Requests that were posted since the last transmission.
    #[cfg(test)]
    pub(super) fn posted_requests(&self) -> usize {
        self.requests
    }

    /// Resets the counts: all posted requests are being sent.
    #[inline]
    pub(super) fn sending(&mut self) {
        (self.requests, self.bytes) = (0, 0);
        self.at_clock = (0, 0);
    }

    /// A check that needs no clock, for most requests of a run: returns true if the posted requests join those that are corked.
    /// Otherwise the caller has to call [`Self::decide`].
    #[inline]
    pub(super) fn goes_on(&self, polls: Polls, posts: &DatagramPosts) -> bool {
        let waits_for_something = posts.idle_polls_since(polls) > 1;
        let goes_on = self.corked
            && !waits_for_something
            && !self.is_full()
            && self.requests < self.at_clock.0 + CLOCK_EACH
            && self.bytes < self.at_clock.1 + CLOCK_BYTES;
        if goes_on {
            posts.posted(polls);
        }
        goes_on
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.requests >= bounds::DATAGRAM_BATCH || self.bytes >= RUN_BYTES
    }

    /// Decides after a list of requests was posted.
    ///
    /// `t`: the time in nanoseconds.
    pub(super) fn decide(&mut self, polls: Polls, t: u64, posts: &DatagramPosts) -> Decision {
        let waits_for_something = posts.idle_polls_since(polls) > 1;
        posts.posted(polls);
        self.at_clock = (self.requests, self.bytes);
        let full = self.is_full();
        // A program is not expected to post again soon if it has not polled since its last transmission and has made fewer than
        // [`BURST`] transmissions without a poll, or if its last transmission was too long ago.
        let polled = polls.all != self.polls_at_send;
        let busy = (polled || self.sent_since_poll >= BURST)
            && posts.since_sent(t) < BUSY_FOR * self.slowness()
            && (self.corked || posts.are_frequent(t, self.slowness()));
        if waits_for_something || full || !busy {
            // A full run is sent because of its length alone. So its transmission is not counted here, and requests that
            // are posted after it may be corked as a new run.
            if !full {
                let before = if polled { 0 } else { self.sent_since_poll };
                self.sent_since_poll = before.saturating_add(1);
                self.polls_at_send = polls.all;
            }
            posts.sent(t);
            return Decision::SendNow;
        }
        let first = !std::mem::replace(&mut self.corked, true);
        if first {
            self.polls_at_cork = polls.all;
        }
        Decision::Cork { first }
    }

    /// Uncorks the datagrams, because polls found nothing or because polling ended.
    pub(super) fn uncork(&mut self, polls: Polls, t: u64, posts: &DatagramPosts) {
        if !std::mem::take(&mut self.corked) {
            return;
        }
        posts.sent(t);
        self.polls_at_send = polls.all;
        if polls.all != self.polls_at_cork {
            // The polls found nothing because the datagrams were corked, so they do not show that the program waits for
            // something else. One of them counts as a poll after this transmission, so that the next posts may be corked.
            posts.posted(polls);
            self.polls_at_send = polls.all.wrapping_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Decision = Decision::Cork { first: true };
    const MORE: Decision = Decision::Cork { first: false };

    fn polls(all: u64, idle: u64) -> Polls {
        Polls { all, idle }
    }

    /// A program with one queue pair.
    struct Program {
        cork: Cork,
        posts: DatagramPosts,
    }

    impl Program {
        fn posted(&mut self, bytes: u64) {
            self.posts.count(1);
            self.cork.posted(bytes);
        }

        fn goes_on(&self, polls: Polls) -> bool {
            self.cork.goes_on(polls, &self.posts)
        }

        fn decide(&mut self, polls: Polls, t: u64) -> Decision {
            self.cork.decide(polls, t, &self.posts)
        }

        fn uncork(&mut self, polls: Polls, t: u64) {
            self.cork.uncork(polls, t, &self.posts);
        }

        fn sending(&mut self) {
            self.cork.sending();
        }
    }

    /// A program that posts often, and the time. Its last datagram was sent at once.
    fn busy() -> (Program, u64) {
        let mut program = Program {
            cork: Cork::new(),
            posts: DatagramPosts::default(),
        };
        let now = 10 * BUSY_FOR;
        program.posted(100);
        assert_eq!(program.decide(polls(5, 0), now), Decision::SendNow);
        program.sending();
        program.posts.are_frequent(now, 1);
        (program, now)
    }

    /// With many queue pairs, each of them is posted to rarely.
    #[test]
    fn the_posts_of_all_queue_pairs_show_that_a_program_is_busy() {
        let (program, mut now) = busy();
        let mut others: Vec<Cork> = std::iter::repeat_with(Cork::new).take(100).collect();
        for (n, cork) in others.iter_mut().enumerate() {
            now += BUSY_FOR / 50;
            program.posts.count(1);
            cork.posted(100);
            let polls = polls(6 + n as u64, n as u64);
            assert_eq!(cork.decide(polls, now, &program.posts), FIRST, "{n}");
            cork.sending();
            cork.uncork(polls, now, &program.posts);
        }
    }

    #[test]
    fn a_program_that_computes_between_a_few_posts_sends_them_at_once() {
        let (mut cork, mut now) = busy();
        let mut polled = 5;
        for _ in 0..3 {
            // After the computation two messages, with a poll between them.
            now += 100 * BUSY_FOR;
            for decision in [Decision::SendNow; 2] {
                polled += 1;
                cork.posted(100);
                assert_eq!(cork.decide(polls(polled, 1), now), decision);
                cork.sending();
            }
        }
        // If it goes on to post, datagrams are corked after a while.
        let corked = (0..2000).find(|_| {
            now += 1000;
            polled += 1;
            cork.posted(100);
            let corked = cork.decide(polls(polled, 1), now) == FIRST;
            cork.sending();
            corked
        });
        assert!(corked.is_some_and(|n| n < 10), "{corked:?}");
    }

    #[test]
    fn a_program_that_posts_and_polls_in_turns_is_corked() {
        let (mut cork, now) = busy();
        cork.posted(100);
        assert_eq!(cork.decide(polls(6, 1), now), FIRST);
        cork.posted(100);
        assert_eq!(cork.decide(polls(7, 2), now), MORE);
        cork.uncork(polls(8, 4), now);
        cork.sending();
        // The two polls that found nothing and uncorked the datagrams do not count as waiting.
        cork.posted(100);
        assert_eq!(cork.decide(polls(8, 4), now), FIRST);
    }

    #[test]
    fn most_corked_posts_are_decided_without_the_time() {
        let (mut cork, now) = busy();
        let mut timeless = 0;
        for n in 0..bounds::DATAGRAM_BATCH {
            cork.posted(100);
            let polls = polls(6 + n as u64, 1);
            // Where `goes_on` returns true, `decide`, which needs the time, would also cork the request.
            let full = n + 1 == bounds::DATAGRAM_BATCH;
            if cork.goes_on(polls) {
                timeless += 1;
            } else if full {
                assert_eq!(cork.decide(polls, now), Decision::SendNow);
            } else {
                assert_eq!(cork.decide(polls, now), if n == 0 { FIRST } else { MORE });
            }
        }
        assert_eq!(
            timeless,
            bounds::DATAGRAM_BATCH - 1 - bounds::DATAGRAM_BATCH / CLOCK_EACH
        );
        // If the posts are slow, the clock shows at its next reading that the first ones have waited for too long.
        let (mut cork, start) = busy();
        cork.posted(100);
        assert_eq!(cork.decide(polls(6, 1), start), FIRST);
        let sent = (1..).find(|n| {
            cork.posted(100);
            let now = start + *n * BUSY_FOR;
            !cork.goes_on(polls(6, 1)) && cork.decide(polls(6, 1), now) == Decision::SendNow
        });
        assert_eq!(sent.map(|n| n as usize), Some(CLOCK_EACH));
    }

    #[test]
    fn corked_posts_after_two_idle_polls_or_in_a_full_run_are_decided_with_the_time() {
        let (mut cork, now) = busy();
        assert!(!cork.goes_on(polls(6, 1)), "nothing is corked");
        cork.posted(100);
        assert_eq!(cork.decide(polls(6, 1), now), FIRST);
        cork.posted(100);
        assert!(cork.goes_on(polls(7, 2)));
        cork.posted(CLOCK_BYTES);
        assert!(!cork.goes_on(polls(7, 2)), "a long request");
        assert_eq!(cork.decide(polls(7, 2), now), MORE);
        cork.posted(100);
        assert!(!cork.goes_on(polls(9, 4)));
        cork.posted(RUN_BYTES);
        assert!(!cork.goes_on(polls(9, 4)));
    }

    #[test]
    fn two_idle_polls_since_the_last_post_send_at_once() {
        let (mut cork, now) = busy();
        cork.posted(100);
        assert_eq!(cork.decide(polls(7, 2), now), Decision::SendNow);
    }

    #[test]
    fn without_a_poll_or_after_a_pause_datagrams_are_sent_at_once() {
        let (mut cork, now) = busy();
        cork.posted(100);
        assert_eq!(cork.decide(polls(5, 0), now), Decision::SendNow);
        cork.posted(100);
        assert_eq!(cork.decide(polls(6, 1), now + BUSY_FOR), Decision::SendNow);
    }

    #[test]
    fn a_burst_without_polls_is_corked_after_its_first_datagrams() {
        let (mut cork, now) = busy();
        let post = |cork: &mut Program, at| {
            cork.posted(100);
            let decision = cork.decide(polls(5, 0), at);
            if decision == Decision::SendNow {
                cork.sending();
            }
            decision
        };
        for _ in 1..BURST {
            assert_eq!(post(&mut cork, now), Decision::SendNow);
        }
        assert_eq!(post(&mut cork, now), FIRST);
        assert_eq!(post(&mut cork, now), MORE);
        // After two polls that found nothing, the first datagrams are sent at once again.
        cork.uncork(polls(7, 2), now);
        cork.sending();
        cork.posted(100);
        assert_eq!(cork.decide(polls(9, 4), now), Decision::SendNow);
        cork.sending();
        cork.posted(100);
        assert_eq!(cork.decide(polls(9, 4), now), Decision::SendNow);
    }

    #[test]
    fn slow_posts_without_polls_are_sent_at_once() {
        let (mut cork, start) = busy();
        for n in 1..u64::from(2 * BURST) {
            cork.posted(100);
            let now = start + n * BUSY_FOR;
            assert_eq!(cork.decide(polls(5, 0), now), Decision::SendNow);
            cork.sending();
        }
    }

    #[test]
    fn a_full_run_is_sent_and_later_datagrams_are_corked() {
        let (mut cork, now) = busy();
        cork.posted(RUN_BYTES);
        assert_eq!(cork.decide(polls(6, 1), now), Decision::SendNow);
        cork.sending();
        cork.posted(100);
        assert_eq!(cork.decide(polls(6, 1), now), FIRST);
    }
}
