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
