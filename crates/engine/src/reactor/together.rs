//! Sending together: while a thread handles several queue pairs that share a socket, their bytes are collected, and passed to the kernel when all
//! are handled.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// A socket that queue pairs share.
pub(crate) trait SharedSender: Send + Sync {
    /// Sends what queue pairs have added.
    fn send_added(&self);
}

thread_local! {
    /// How many calls of [`together`] this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The sockets to which bytes were added in the outermost call, which empties the list at its end. The list has no destructor: glibc
    /// allocates memory to register a destructor of a thread-local variable, and ends the process if there is no memory.
    static ADDED: RefCell<ManuallyDrop<Vec<Arc<dyn SharedSender>>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// The end of a call of [`together`].
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        let left = DEPTH.get().saturating_sub(1);
        DEPTH.set(left);
        if left == 0 {
            let added = ADDED.with(|added| std::mem::take(&mut **added.borrow_mut()));
            for sender in added {
                sender.send_added();
            }
        }
    }
}

/// Calls `handle`, which handles several queue pairs, and then sends what they have added.
pub(crate) fn together<R>(handle: impl FnOnce() -> R) -> R {
    DEPTH.set(DEPTH.get() + 1);
    let _ends = Ends;
    handle()
}

/// Registers a socket to which bytes were added, so that they are sent at the end of [`together`]. Returns false outside of [`together`], or
/// if there is no memory. The caller then sends the bytes itself.
pub(crate) fn added(sender: &Arc<dyn SharedSender>) -> bool {
    if DEPTH.get() == 0 {
        return false;
    }
    ADDED.with(|added| {
        let mut added = added.borrow_mut();
        let has_room = added.try_reserve(1).is_ok();
        if has_room {
            added.push(Arc::clone(sender));
        }
        has_room
    })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct Counted(AtomicUsize);

    impl SharedSender for Counted {
        fn send_added(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn bytes_are_sent_at_the_end_of_the_outermost_call() {
        let counted = Arc::new(Counted(AtomicUsize::new(0)));
        let sender: Arc<dyn SharedSender> = Arc::clone(&counted) as _;
        let count = || counted.0.load(Ordering::Relaxed);
        assert!(!added(&sender));
        together(|| {
            together(|| assert!(added(&sender)));
            assert_eq!(count(), 0);
        });
        assert_eq!(count(), 1);
        assert!(!added(&sender));
        // A panic of the caller does not keep the bytes back.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            together(|| {
                added(&sender);
                std::panic::resume_unwind(Box::new(()));
            })
        }));
        assert!(panicked.is_err());
        assert_eq!((count(), added(&sender)), (2, false));
    }

    #[test]
    fn a_destructor_of_a_thread_may_handle_queue_pairs() {
        static WITHIN: AtomicUsize = AtomicUsize::new(usize::MAX);
        struct AtEnd(Arc<dyn SharedSender>);
        impl Drop for AtEnd {
            fn drop(&mut self) {
                let within = together(|| added(&self.0));
                WITHIN.store(usize::from(within), Ordering::Relaxed);
            }
        }
        thread_local!(static END: RefCell<Option<AtEnd>> = const { RefCell::new(None) });
        let sender: Arc<dyn SharedSender> = Arc::new(Counted(AtomicUsize::new(0)));
        std::thread::spawn(move || {
            END.set(Some(AtEnd(Arc::clone(&sender))));
            together(|| added(&sender));
        })
        .join()
        .unwrap();
        assert_eq!(WITHIN.load(Ordering::Relaxed), 1, "the list still exists");
    }
}
