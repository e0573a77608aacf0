//! References that a thread holds while it waits in the C library, where the thread may be cancelled.
//!
//! When a thread is cancelled, the wait does not return, and the stack is unwound through Rust frames, which must not contain a value
//! with a destructor. So the waiting function has only a pointer, and the reference is in thread-local storage: the C library drops
//! it when the thread ends for any reason.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

type Anything = Arc<dyn Any + Send + Sync>;

thread_local! {
    /// Contains at most one reference, unless a signal handler interrupts a wait of the thread and waits itself.
    static HELD: RefCell<Vec<Anything>> = const { RefCell::new(Vec::new()) };
}

/// A reference that the calling thread holds. The value has no destructor.
#[derive(Debug)]
pub(crate) struct Held<T> {
    what: *const T,
}

impl<T: Send + Sync + 'static> Held<T> {
    /// Makes the calling thread hold a reference to `what` until [`Self::release`] or the end of the thread.
    pub(crate) fn new(what: &Arc<T>) -> Self {
        let held = Self {
            what: Arc::as_ptr(what),
        };
        let mut one: Option<Anything> = Some(Arc::<T>::clone(what));
        let _late = HELD.try_with(|all| {
            if let Ok(mut all) = all.try_borrow_mut() {
                all.extend(one.take());
            }
        });
        // If the reference was not stored, either the thread is ending, or a signal handler has interrupted this function. The
        // reference is leaked then, because `held` must not point to a value that was dropped.
        let _for_ever = std::mem::ManuallyDrop::new(one);
        held
    }

    pub(crate) fn get(&self) -> &T {
        // SAFETY: the thread holds a reference until `release`, which takes `self`.
        unsafe { &*self.what }
    }

    /// Releases the reference.
    pub(crate) fn release(self) {
        let mut one = None;
        let _late = HELD.try_with(|all| {
            if let Ok(mut all) = all.try_borrow_mut() {
                let is_it = |held: &Anything| std::ptr::addr_eq(Arc::as_ptr(held), self.what);
                one = all.iter().position(is_it).map(|i| all.swap_remove(i));
            }
        });
        // `HELD` is not borrowed here: dropping the last reference runs code that may hold references itself.
        drop(one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_objects_live_until_released_or_the_thread_ends() {
        let what = Arc::new(7);
        let held = Held::new(&what);
        assert_eq!((*held.get(), Arc::strong_count(&what)), (7, 2));
        held.release();
        assert_eq!(Arc::strong_count(&what), 1);

        let moved = Arc::clone(&what);
        let thread = std::thread::spawn(move || {
            let held = Held::new(&moved);
            assert_eq!(Arc::strong_count(&moved), 3);
            // `release` is not called, as in a thread that is cancelled.
            held.what.is_null()
        });
        assert!(!thread.join().unwrap());
        assert_eq!(Arc::strong_count(&what), 1);
    }

    #[test]
    fn an_object_can_be_held_twice() {
        let what = Arc::new(7);
        let (outer, inner) = (Held::new(&what), Held::new(&what));
        assert_eq!(Arc::strong_count(&what), 3);
        inner.release();
        assert_eq!((*outer.get(), Arc::strong_count(&what)), (7, 2));
        outer.release();
        assert_eq!(Arc::strong_count(&what), 1);
    }
}
