//! Global values that a forked child inherits.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A global value that is made at first use.
///
/// A thread never waits for another thread that makes the value, as it would with `OnceLock`: in a child that was forked
/// meanwhile, that thread does not exist. So threads may make the value at the same time, and the first one that is complete
/// is used by all. The engine has the same type, which this library cannot use, because it is loaded without the engine.
#[derive(Debug)]
pub struct Inherited<T> {
    made: AtomicPtr<T>,
    fresh: fn() -> T,
}

impl<T: Send + Sync + 'static> Inherited<T> {
    /// A value that `fresh` makes at first use.
    pub const fn new(fresh: fn() -> T) -> Self {
        Self {
            made: AtomicPtr::new(std::ptr::null_mut()),
            fresh,
        }
    }

    /// Returns the value. Makes it if there is none yet.
    #[inline]
    pub fn get(&self) -> &'static T {
        // SAFETY: the pointer is null, or `make` has published it and it is never freed. No `&mut` to the value exists.
        match unsafe { self.made.load(Ordering::Acquire).as_ref() } {
            Some(made) => made,
            None => self.make(),
        }
    }

    #[cold]
    fn make(&self) -> &'static T {
        let new = Box::into_raw(Box::new((self.fresh)()));
        let none = std::ptr::null_mut();
        let published = self
            .made
            .compare_exchange(none, new, Ordering::AcqRel, Ordering::Acquire);
        match published {
            // SAFETY: a published value is never freed.
            Ok(_) => unsafe { &*new },
            Err(first) => {
                // SAFETY: another thread has published its value first, so this one has no other reference.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: a published value is never freed.
                unsafe { &*first }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    #[test]
    fn a_thread_does_not_wait_for_another_one_that_makes_the_value() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        static FIRST: Mutex<()> = Mutex::new(());
        static VALUE: Inherited<usize> = Inherited::new(|| {
            let call = CALLS.fetch_add(1, Ordering::SeqCst);
            if call == 0 {
                // Like a thread that does not exist in a child, this one makes no progress: the test holds the lock until another
                // thread has the value.
                drop(FIRST.lock().unwrap());
            }
            call
        });
        let held = FIRST.lock().unwrap();
        let slow = thread::spawn(|| *VALUE.get());
        while CALLS.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        assert_eq!(*VALUE.get(), 1);
        drop(held);
        // The slow thread's own value is dropped.
        assert_eq!(slow.join().unwrap(), 1);
    }
}
