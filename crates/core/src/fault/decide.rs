//! Decides what happens to each request and datagram of a queue pair.

use std::net::SocketAddr;
use std::time::Duration;

use smallvec::SmallVec;

use super::plan::{Action, Direction, Plan, Rule, What, WhichQp};
use crate::verbs::wc::Status;

/// What caused a fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cause {
    /// The action.
    pub action: Action,
    /// The line of the rule, or `None` if the settings of the link caused the fault.
    pub line: Option<u32>,
}

/// The faults of one datagram or request. If there are no causes, there is no fault.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// Number of the request or datagram, from 1.
    pub item: u64,
    /// The actions, and the rules that caused them.
    pub causes: SmallVec<[Cause; 2]>,
    /// The time by which the request or datagram is delayed.
    pub delay: Duration,
    /// The lowest rate of all causes, in bytes per second.
    pub rate: Option<u64>,
    /// Random number that selects the bit to corrupt.
    pub random: u64,
}

impl Decision {
    /// Whether there is no fault.
    pub fn is_nothing(&self) -> bool {
        self.causes.is_empty()
    }

    /// Whether the decision has `action`.
    pub fn does(&self, action: Action) -> bool {
        self.causes.iter().any(|c| c.action == action)
    }

    /// The status with which the request completes instead of being sent. `None`: the request is sent.
    pub fn failure(&self) -> Option<Status> {
        self.causes.iter().find_map(|c| match c.action {
            Action::Fail(status) => Some(status),
            _ => None,
        })
    }

    /// How many times the peer is not ready to receive.
    pub fn not_ready(&self) -> u32 {
        let times = self.causes.iter().filter_map(|c| match c.action {
            Action::Rnr(times) => Some(times),
            _ => None,
        });
        times.max().unwrap_or(0)
    }

    fn add(&mut self, action: Action, line: Option<u32>) {
        match action {
            Action::Delay(by) => self.delay += by,
            Action::Slow(rate) => self.rate = Some(self.rate.map_or(rate, |r| r.min(rate))),
            _ => {}
        }
        self.causes.push(Cause { action, line });
    }

    /// Inverts one bit of `bytes`.
    pub fn corrupt(&self, bytes: &mut [u8]) {
        let bits = (bytes.len() as u64).saturating_mul(8).max(1);
        let bit = self.random % bits;
        let at = usize::try_from(bit / 8).unwrap_or(0);
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << (bit % 8);
        }
    }
}

/// How often a rule has matched, and how often its fault was injected.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    matched: u64,
    done: u64,
}

/// The decisions for one queue pair.
#[derive(Debug)]
pub struct Decisions {
    plan: &'static Plan,
    /// Position of the queue pair among those of the process, from 1.
    nth: u32,
    number: u32,
    requests: u64,
    sent: u64,
    received: u64,
    counts: Vec<Count>,
}

/// The transport of the requests of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// A stream: requests are delayed, because there are no datagrams to delay.
    Stream,
    /// Reliable datagrams.
    Reliable,
    /// Unreliable datagrams: there is no connection to reset, and no receiver-not-ready.
    Unreliable,
}

/// The request or datagram of a decision.
#[derive(Debug, Clone, Copy)]
struct Item {
    peer: Option<SocketAddr>,
    what: What,
    dir: Direction,
    /// The transport of a request; `None` for a datagram.
    request: Option<Service>,
    n: u64,
}

impl Item {
    /// Whether `action` applies to this kind of item.
    fn takes(&self, action: Action) -> bool {
        match (action, self.request) {
            (Action::Kill | Action::Rnr(_), Some(service)) => service != Service::Unreliable,
            (Action::Fail(_), Some(_)) => true,
            (Action::Delay(_) | Action::Slow(_), Some(service)) => service == Service::Stream,
            (Action::Kill | Action::Rnr(_) | Action::Fail(_), None) => false,
            (Action::Drop | Action::Corrupt | Action::Dup | Action::Reorder, Some(_)) => false,
            (_, None) => true,
        }
    }
}

impl Decisions {
    /// The decisions for the `nth` queue pair of the process, whose number is `number`.
    pub fn new(plan: &'static Plan, nth: u32, number: u32) -> Self {
        Self {
            plan,
            nth,
            number,
            requests: 0,
            sent: 0,
            received: 0,
            counts: vec![Count::default(); plan.rules.len()],
        }
    }

    /// Position of the queue pair among those of the process, from 1.
    pub fn nth(&self) -> u32 {
        self.nth
    }

    /// Decides about a request that is posted.
    pub fn request(&mut self, what: What, peer: Option<SocketAddr>, service: Service) -> Decision {
        self.requests += 1;
        let item = Item {
            peer,
            what,
            dir: Direction::Tx,
            request: Some(service),
            n: self.requests,
        };
        let mut decision = self.start(item);
        let link = &self.plan.link;
        if item.takes(Action::Kill) && self.draw(link.kill, Draw::Kill, item) {
            decision.add(Action::Kill, None);
        }
        if service == Service::Stream && link.dir != Some(Direction::Rx) {
            self.hold_up(item, &mut decision);
        }
        self.follow_rules(item, &mut decision);
        decision
    }

    /// Decides about a datagram that is sent or was received.
    pub fn datagram(&mut self, dir: Direction, peer: SocketAddr, bytes: &[u8]) -> (Decision, What) {
        let n = match dir {
            Direction::Tx => &mut self.sent,
            Direction::Rx => &mut self.received,
        };
        *n += 1;
        let item = Item {
            peer: Some(peer),
            what: What::of_datagram(bytes),
            dir,
            request: None,
            n: *n,
        };
        let mut decision = self.start(item);
        let link = &self.plan.link;
        if link.dir.is_none_or(|d| d == dir) {
            for (chance, purpose, action) in [
                (link.loss, Draw::Loss, Action::Drop),
                (link.corrupt, Draw::Corrupt, Action::Corrupt),
                (link.dup, Draw::Dup, Action::Dup),
                (link.reorder, Draw::Reorder, Action::Reorder),
            ] {
                if self.draw(chance, purpose, item) {
                    decision.add(action, None);
                }
            }
            self.hold_up(item, &mut decision);
        }
        self.follow_rules(item, &mut decision);
        (decision, item.what)
    }

    fn start(&self, item: Item) -> Decision {
        Decision {
            item: item.n,
            random: self.roll(Draw::Bit, item),
            ..Decision::default()
        }
    }

    /// Adds the delay and the rate of the link.
    fn hold_up(&self, item: Item, decision: &mut Decision) {
        let link = &self.plan.link;
        if !link.delay.is_zero() || !link.jitter.is_zero() {
            let way = fraction(self.roll(Draw::Jitter, item)) * 2.0 - 1.0;
            let seconds = link.delay.as_secs_f64() + way * link.jitter.as_secs_f64();
            decision.add(
                Action::Delay(Duration::from_secs_f64(seconds.max(0.0))),
                None,
            );
        }
        if let Some(rate) = link.rate {
            decision.add(Action::Slow(rate), None);
        }
    }

    fn follow_rules(&mut self, item: Item, decision: &mut Decision) {
        let plan = self.plan;
        for (at, rule) in plan.rules.iter().enumerate() {
            if !item.takes(rule.action) || !self.matches(rule, item) {
                continue;
            }
            let Some(count) = self.counts.get_mut(at) else {
                continue;
            };
            count.matched += 1;
            let Count { matched, done } = *count;
            let now = rule.nth.is_none_or(|n| matched == n)
                && rule.every.is_none_or(|n| matched.is_multiple_of(n))
                && done < rule.times
                && rule
                    .chance
                    .is_none_or(|p| self.draw(p, Draw::Rule(at), item));
            if now {
                if let Some(count) = self.counts.get_mut(at) {
                    count.done += 1;
                }
                decision.add(rule.action, Some(rule.line));
            }
        }
    }

    fn matches(&self, rule: &Rule, item: Item) -> bool {
        let qp = match rule.qp {
            WhichQp::Any => true,
            WhichQp::Nth(n) => n == self.nth,
            WhichQp::Number(n) => n == self.number,
        };
        let peer = rule.peer.is_none_or(|(ip, port)| {
            item.peer.is_some_and(|at| {
                at.ip().to_canonical() == ip.to_canonical()
                    && port.is_none_or(|port| port == at.port())
            })
        });
        qp && peer
            && rule.what.is_none_or(|what| what == item.what)
            && rule.dir.is_none_or(|dir| dir == item.dir)
    }

    fn draw(&self, chance: f64, purpose: Draw, item: Item) -> bool {
        chance > 0.0 && fraction(self.roll(purpose, item)) < chance
    }

    /// A random number that depends on the seed, the queue pair, the item and the purpose.
    fn roll(&self, purpose: Draw, item: Item) -> u64 {
        let kind = match (item.request, item.dir) {
            (Some(_), _) => 1,
            (None, Direction::Tx) => 2,
            (None, Direction::Rx) => 3,
        };
        [u64::from(self.nth), kind, item.n, purpose.number()]
            .into_iter()
            .fold(mix(self.plan.seed), |state, next| mix(state ^ next))
    }
}

/// The purpose of a random number.
#[derive(Debug, Clone, Copy)]
enum Draw {
    Loss,
    Corrupt,
    Dup,
    Reorder,
    Kill,
    Jitter,
    Bit,
    Rule(usize),
}

impl Draw {
    fn number(self) -> u64 {
        match self {
            Self::Loss => 1,
            Self::Corrupt => 2,
            Self::Dup => 3,
            Self::Reorder => 4,
            Self::Kill => 5,
            Self::Jitter => 6,
            Self::Bit => 7,
            Self::Rule(at) => 16 + at as u64,
        }
    }
}

/// Spreads the bits of a counter (SplitMix64).
pub(super) fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// Maps `n` to a number from 0 to below 1.
fn fraction(n: u64) -> f64 {
    (n >> 11) as f64 / (1_u64 << 53) as f64
}
