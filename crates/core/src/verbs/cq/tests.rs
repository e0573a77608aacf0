//! Events, overflow and removal of entries.

use super::*;
use crate::verbs::wc::WcOp;

#[derive(Default)]
struct Count(AtomicUsize, AtomicUsize);
impl Notify for Count {
    fn completion(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn overflow(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

fn entry(id: u64, status: Status, solicited: bool) -> Completion {
    let mut e = Completion::new(id, status, WcOp::Recv, 7);
    e.solicited = solicited;
    e
}

#[test]
fn one_event_per_arming_and_only_for_the_requested_kind() {
    let count = Arc::new(Count::default());
    let cq = Cq::new(8, Some(count.clone()));
    cq.complete(entry(1, Status::Success, false)).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    cq.arm(true);
    cq.complete(entry(2, Status::Success, false)).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    cq.complete(entry(3, Status::Success, true)).unwrap();
    cq.complete(entry(4, Status::Success, true)).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    cq.arm(true);
    cq.complete(entry(5, Status::Flushed, false)).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 2);
}

#[test]
fn an_unpolled_entry_raises_an_event_when_the_queue_is_armed() {
    let count = Arc::new(Count::default());
    let cq = Cq::new(8, Some(count.clone()));
    let events = || count.0.load(Ordering::Relaxed);
    cq.complete(entry(1, Status::Success, false)).unwrap();
    cq.arm(true);
    assert_eq!(events(), 0, "the entry is not solicited");
    cq.arm(false);
    assert_eq!(events(), 1);
    cq.arm(false);
    assert_eq!(events(), 1, "one event until the queue is polled");
    assert_eq!(cq.poll(8, |_, _| ()), 1);
    cq.complete(entry(2, Status::Success, false)).unwrap();
    assert_eq!(events(), 2);
    cq.complete(entry(3, Status::Success, true)).unwrap();
    cq.poll(8, |_, _| ());
    cq.arm(true);
    assert_eq!(events(), 2, "polled entries raise no event");
    cq.complete(entry(4, Status::Success, true)).unwrap();
    assert_eq!(events(), 3);
    // No second event while one is pending: one poll returns both entries.
    cq.complete(entry(5, Status::Success, true)).unwrap();
    cq.arm(false);
    assert_eq!(events(), 3);
    assert_eq!(cq.poll(8, |_, _| ()), 2);
    cq.complete(entry(6, Status::Success, false)).unwrap();
    assert_eq!(events(), 4, "armed before the entry arrived");
}

#[test]
fn an_overflow_drops_the_new_entry_and_is_reported_once() {
    let count = Arc::new(Count::default());
    let cq = Cq::new(2, Some(count.clone()));
    cq.complete(entry(1, Status::Success, false)).unwrap();
    cq.complete(entry(2, Status::Success, false)).unwrap();
    assert_eq!(cq.complete(entry(3, Status::Success, false)), Err(Overflow));
    assert_eq!(cq.complete(entry(4, Status::Success, false)), Err(Overflow));
    assert_eq!(count.1.load(Ordering::Relaxed), 1);
    let mut ids = Vec::new();
    assert_eq!(cq.poll(10, |_, e| ids.push(e.wr_id)), 2);
    assert_eq!(ids, [1, 2]);
}

#[test]
fn purge_removes_only_the_entries_of_one_queue_pair() {
    let cq = Cq::new(8, None);
    cq.complete(entry(1, Status::Success, false)).unwrap();
    cq.complete(Completion::new(2, Status::Success, WcOp::Send, 9))
        .unwrap();
    cq.purge(7);
    let mut ids = Vec::new();
    cq.poll(10, |_, e| ids.push(e.wr_id));
    assert_eq!(ids, [2]);
}

#[test]
fn entries_that_are_added_together_have_the_effects_of_single_ones() {
    let mut seed = 1_u32;
    let mut random = move |most: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) % most
    };
    let queue = |count: &Arc<Count>| Cq::new(8, Some(count.clone()));
    let counts = [Arc::<Count>::default(), Arc::default()];
    let [mut together, mut single] = [queue(&counts[0]), queue(&counts[1])];
    let (mut raised, mut lost) = (0, 0);
    for round in 0..3_000_u64 {
        let entries: Vec<Completion> = (0..random(6))
            .map(|n| entry(round * 8 + u64::from(n), Status::Success, random(4) == 0))
            .collect();
        let mut next = entries.iter().cloned();
        let all = together.complete_all(|| next.next());
        let each: Vec<_> = entries
            .iter()
            .cloned()
            .map(|e| single.complete(e))
            .collect();
        assert_eq!(all.is_err(), each.iter().any(Result::is_err));
        if random(3) == 0 {
            let solicited_only = random(2) == 0;
            together.arm(solicited_only);
            single.arm(solicited_only);
        }
        let most = random(7) as usize;
        let polled = [&together, &single].map(|cq| {
            let mut polled = Vec::new();
            let waiting = !cq.is_empty();
            cq.poll(most, |_, e| polled.push(e.clone()));
            (waiting, polled, cq.is_broken())
        });
        assert_eq!(polled[0], polled[1], "round {round}");
        let events = [0, 1].map(|i| {
            let Count(events, overflows) = &*counts[i];
            (
                events.load(Ordering::Relaxed),
                overflows.load(Ordering::Relaxed),
            )
        });
        assert_eq!(events[0], events[1], "round {round}");
        raised = raised.max(events[0].0);
        if together.is_broken() {
            lost += 1;
            [together, single] = [queue(&counts[0]), queue(&counts[1])];
        }
    }
    assert!(raised > 300 && lost > 30, "{raised} {lost}");
}

#[test]
fn an_event_of_a_removed_entry_does_not_suppress_the_next() {
    let count = Arc::new(Count::default());
    let cq = Cq::new(8, Some(count.clone()));
    let events = || count.0.load(Ordering::Relaxed);
    cq.arm(false);
    cq.complete(entry(1, Status::Success, false)).unwrap();
    assert_eq!(events(), 1);
    // The queue pair is destroyed before the program polls.
    cq.purge(7);
    assert_eq!(cq.poll(8, |_, _| ()), 0);
    cq.complete(entry(2, Status::Success, false)).unwrap();
    cq.arm(false);
    assert_eq!(events(), 2);
}
