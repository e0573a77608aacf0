//! Every interleaving of a queue pair that completes a request and a thread that arms, polls and sleeps.

use loom::thread;

use super::*;
use crate::verbs::wc::WcOp;

#[derive(Default)]
struct Events(std::sync::atomic::AtomicUsize);

impl Notify for Events {
    fn completion(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn overflow(&self) {
        panic!("an overflow of a queue that has room");
    }
}

fn entry(solicited: bool) -> Completion {
    let mut entry = Completion::new(1, Status::Success, WcOp::Recv, 7);
    entry.solicited = solicited;
    entry
}

/// The contract of `ibv_req_notify_cq(3)`: a thread that finds no entry after arming may sleep until the event.
fn arm_and_poll(solicited_only: bool, poll_first: bool) {
    loom::model(move || {
        let events = Arc::new(Events::default());
        let cq = Arc::new(Cq::new(4, Some(events.clone())));
        let producer = {
            let cq = Arc::clone(&cq);
            thread::spawn(move || cq.complete(entry(solicited_only)).unwrap())
        };
        let mut polled = 0;
        if poll_first {
            polled += cq.poll(4, |_, _| ());
        }
        cq.arm(solicited_only);
        polled += cq.poll(4, |_, _| ());
        producer.join().unwrap();
        let events = events.0.load(Ordering::SeqCst);
        assert!(polled == 1 || events == 1, "the thread would sleep forever");
        assert!(events <= 1);
    });
}

#[test]
fn loom_no_completion_is_lost_between_polling_and_arming() {
    for poll_first in [false, true] {
        arm_and_poll(false, poll_first);
        arm_and_poll(true, poll_first);
    }
}

#[test]
fn loom_a_thread_that_arms_and_sleeps_without_polling_is_woken() {
    loom::model(|| {
        let events = Arc::new(Events::default());
        let cq = Arc::new(Cq::new(4, Some(events.clone())));
        let producer = {
            let cq = Arc::clone(&cq);
            thread::spawn(move || cq.complete(entry(false)).unwrap())
        };
        cq.arm(false);
        producer.join().unwrap();
        assert_eq!(events.0.load(Ordering::SeqCst), 1);
    });
}
