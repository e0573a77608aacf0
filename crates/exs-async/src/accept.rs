//! Accepting connections. A connection that was established for a future that has been dropped is kept for the next one, because the peer
//! uses it already.

use crate::Fd;
use crate::driver::{Operation, accepted, lock};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// The kept connections of a listener. They are closed when the listener and its operations do not exist any more.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    connections: VecDeque<Fd>,
    /// The tasks that wait for a connection, by the number of their operation. As in the driver, no waker is woken or dropped while
    /// this is locked.
    waiting: HashMap<isize, Waker>,
}

impl Kept {
    /// Keeps a connection. All waiting tasks are woken, because the future of one may be dropped before it takes the connection.
    pub(crate) fn put(&self, connection: Fd) {
        let mut state = lock(&self.0);
        state.connections.push_back(connection);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for waker in waiting.into_values() {
            // A waker that panics must not keep the others from being woken. The destructor of the payload may panic too.
            catch_unwind(AssertUnwindSafe(|| waker.wake())).unwrap_or_else(std::mem::forget);
        }
    }

    /// Returns a kept connection.
    pub(crate) fn take(&self) -> Option<Fd> {
        lock(&self.0).connections.pop_front()
    }

    /// Returns a kept connection. If there is none, the waker is woken when there is one.
    fn wait(&self, id: isize, waker: Waker) -> Option<Fd> {
        let mut state = lock(&self.0);
        let connection = state.connections.pop_front();
        let unused = match connection {
            Some(_) => Some(waker),
            None => state.waiting.insert(id, waker),
        };
        drop(state);
        drop(unused);
        connection
    }

    /// Forgets the waker of an operation.
    fn forget(&self, id: isize) {
        let waker = lock(&self.0).waiting.remove(&id);
        drop(waker);
    }

    /// Closes the connections, if nothing else refers to them. Closing may wait for peers, so a new thread does it: the calling thread
    /// may be the one that handles all events.
    pub(crate) fn leave(this: Arc<Self>) {
        if let Some(kept) = Arc::into_inner(this)
            && !lock(&kept.0).connections.is_empty()
        {
            // If the thread cannot be created, the closure is dropped here, which closes the connections.
            let close = std::thread::Builder::new().name("exs-close".to_owned());
            let _thread = close.spawn(move || drop(kept));
        }
    }
}

/// The future of an operation that accepts a connection.
#[derive(Debug)]
pub(crate) struct Accept {
    pub(crate) operation: Operation,
    pub(crate) kept: Arc<Kept>,
}

impl Future for Accept {
    type Output = io::Result<Fd>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let (id, waker) = (self.operation.id, context.waker().clone());
        if let Some(connection) = self.kept.wait(id, waker) {
            return Poll::Ready(Ok(connection));
        }
        let ended = Pin::new(&mut self.operation).poll(context);
        ended.map(|(event, _)| event.map(|event| Fd(accepted(&event))))
    }
}

impl Drop for Accept {
    fn drop(&mut self) {
        self.kept.forget(self.operation.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::ffi;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn accept(driver: &'static Driver, kept: &Arc<Kept>) -> Accept {
        driver.accept(-1, kept, |_| 0)
    }

    /// Returns the descriptor that the future returns, if it is ready.
    fn poll(accept: &mut Accept, waker: &Waker) -> Option<i32> {
        match Pin::new(accept).poll(&mut Context::from_waker(waker)) {
            Poll::Ready(connection) => Some(connection.unwrap().0),
            Poll::Pending => None,
        }
    }

    /// The event of an operation for which a connection was accepted, with an invalid descriptor.
    fn event(id: isize, fd: u64) -> ffi::Event {
        ffi::Event {
            kind: ffi::EVT_ACCEPT,
            ahandle: id,
            body: [fd, 0, 0, 0, 0, 0],
            ..ffi::Event::default()
        }
    }

    const FIRST: u64 = 1 << 30;

    #[test]
    fn a_connection_whose_future_was_dropped_is_kept_for_the_next_one() {
        let (driver, kept) = (Driver::without_device(), Arc::default());
        let mut early = accept(driver, &kept);
        assert_eq!(poll(&mut early, Waker::noop()), None);
        driver.end_all(&[event(early.operation.id, FIRST)]);
        drop(early);
        let late = accept(driver, &kept);
        let id = late.operation.id;
        drop(late);
        driver.end_all(&[event(id, FIRST + 1)]);
        for n in [FIRST, FIRST + 1] {
            let mut next = accept(driver, &kept);
            let fd = poll(&mut next, Waker::noop());
            assert_eq!(fd.map(i64::from), Some(n.cast_signed()));
        }
    }

    #[test]
    fn a_task_that_waits_already_gets_a_kept_connection() {
        let (driver, kept) = (Driver::without_device(), Arc::default());
        let mut waits = accept(driver, &kept);
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        assert_eq!(poll(&mut waits, &waker), None);
        let dropped = accept(driver, &kept);
        driver.end_all(&[event(dropped.operation.id, FIRST)]);
        drop(dropped);
        assert_eq!(count.0.load(SeqCst), 1);
        let fd = poll(&mut waits, &waker);
        assert_eq!(fd.map(i64::from), Some(FIRST.cast_signed()));
    }
}
