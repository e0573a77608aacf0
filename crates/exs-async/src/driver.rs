//! The event queue of the process, the thread that dequeues events, and the operations that wait for their events.

use crate::accept::{Accept, Kept};
use crate::ffi;
use crate::{Buffer, Fd};
use libc::c_int;
use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The length of the event queue, which limits the number of operations in progress in the process.
const DEPTH: c_int = 1 << 20;
/// The number of events that one call dequeues.
const BATCH: usize = 64;

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) queue: c_int,
    /// No waker is cloned, woken or dropped while this is locked, because that executes code of the program: dropping a waker may
    /// drop a task with another [`Operation`], which locks this.
    operations: Mutex<Operations>,
}

#[derive(Debug, Default)]
struct Operations {
    next: isize,
    all: HashMap<isize, Entry>,
}

/// An operation, from its call until its event has arrived and its future has returned the result.
#[derive(Debug, Default)]
struct Entry {
    waker: Option<Waker>,
    event: Option<ffi::Event>,
    /// The buffer of the operation, which the library uses until the event.
    buffer: Option<Buffer>,
    /// For an accept: where its connection goes if the future was dropped.
    kept: Option<Arc<Kept>>,
    /// Whether the future was dropped.
    abandoned: bool,
}

impl Entry {
    /// Handles the event of an operation whose future was dropped.
    fn discard(self, event: &ffi::Event) {
        if let Some(kept) = self.kept {
            if event.kind == ffi::EVT_ACCEPT && event.errno == 0 {
                kept.put(Fd(accepted(event)));
            }
            Kept::leave(kept);
        }
    }
}

/// Acquires a lock. Poisoning is ignored, because a panic of another thread must not end the futures of this one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the driver. The first call starts it.
pub(crate) fn get() -> io::Result<&'static Driver> {
    static DRIVER: Mutex<Option<&'static Driver>> = Mutex::new(None);
    let mut started = lock(&DRIVER);
    if let Some(driver) = *started {
        return Ok(driver);
    }
    // SAFETY: no memory is passed.
    let queue = unsafe {
        crate::check(ffi::exs_init(ffi::VERSION))?;
        crate::check(ffi::exs_qcreate(DEPTH))?
    };
    // The thread and the futures use the driver until the process exits.
    let driver: &Driver = Box::leak(Box::new(Driver {
        queue,
        operations: Mutex::default(),
    }));
    std::thread::Builder::new()
        .name("exs-events".to_owned())
        .spawn(|| driver.run())?;
    *started = Some(driver);
    Ok(driver)
}

impl Driver {
    /// Returns a driver without an event queue. Tests pass events to [`Self::end_all`].
    #[cfg(test)]
    pub(crate) fn without_device() -> &'static Self {
        Box::leak(Box::new(Self {
            queue: -1,
            operations: Mutex::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Operations> {
        lock(&self.operations)
    }

    fn run(&self) {
        let mut events = [ffi::Event::default(); BATCH];
        loop {
            // SAFETY: the array has room for `BATCH` events.
            let n = unsafe {
                let room = c_int::try_from(BATCH).unwrap_or(1);
                ffi::exs_qdequeue(self.queue, events.as_mut_ptr(), room, std::ptr::null_mut())
            };
            let Ok(n) = usize::try_from(n) else {
                if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                // No other error occurs here: the call fails in a child of `fork`, but this thread does not exist there.
                return;
            };
            self.end_all(events.get(..n).unwrap_or_default());
        }
    }

    /// Ends the operations to which events belong. Wakers are code of the program, and may panic. The panic hook reports such a panic. The
    /// panic does not end the thread, because all operations of the process need the thread.
    pub(crate) fn end_all(&self, events: &[ffi::Event]) {
        for event in events {
            let ended = catch_unwind(AssertUnwindSafe(|| self.end(event)));
            // The destructor of the payload may panic too.
            ended.unwrap_or_else(std::mem::forget);
        }
    }

    /// Ends the operation to which an event belongs.
    fn end(&self, event: &ffi::Event) {
        let mut operations = self.lock();
        let Some(entry) = operations.all.get_mut(&event.ahandle) else {
            return;
        };
        if !entry.abandoned {
            entry.event = Some(*event);
            let waker = entry.waker.take();
            drop(operations);
            if let Some(waker) = waker {
                waker.wake();
            }
            return;
        }
        let entry = operations.all.remove(&event.ahandle);
        drop(operations);
        // The buffer of an abandoned operation is dropped without the lock, because that deregisters memory.
        if let Some(entry) = entry {
            entry.discard(event);
        }
    }

    /// Starts an operation of a socket. `call` passes its number and the memory of the buffer to the library.
    pub(crate) fn start(
        &'static self,
        fd: c_int,
        buffer: Option<Buffer>,
        call: impl FnOnce(isize, Option<&mut Buffer>) -> c_int,
    ) -> Operation {
        let entry = Entry {
            buffer,
            ..Entry::default()
        };
        self.add(fd, entry, call)
    }

    /// Starts to accept a connection of a listener. `call` passes the number of the operation to the library.
    pub(crate) fn accept(
        &'static self,
        fd: c_int,
        kept: &Arc<Kept>,
        call: impl FnOnce(isize) -> c_int,
    ) -> Accept {
        let entry = Entry {
            kept: Some(Arc::clone(kept)),
            ..Entry::default()
        };
        Accept {
            operation: self.add(fd, entry, |id, _| call(id)),
            kept: Arc::clone(kept),
        }
    }

    fn add(
        &'static self,
        fd: c_int,
        mut entry: Entry,
        call: impl FnOnce(isize, Option<&mut Buffer>) -> c_int,
    ) -> Operation {
        let mut operations = self.lock();
        operations.next = operations.next.wrapping_add(1);
        let id = operations.next;
        // The lock is held during the call, so an event that arrives before the call returns waits for the lock and finds the entry.
        let refused = crate::check(call(id, entry.buffer.as_mut())).err();
        if let Some(error) = refused {
            return Operation {
                driver: self,
                fd,
                id,
                refused: Some((error, entry.buffer)),
                over: true,
            };
        }
        operations.all.insert(id, entry);
        Operation {
            driver: self,
            fd,
            id,
            refused: None,
            over: false,
        }
    }
}

/// Returns the descriptor in the event of an accept.
pub(crate) fn accepted(event: &ffi::Event) -> c_int {
    let [fd, ..] = event.body;
    c_int::try_from(fd).unwrap_or(-1)
}

/// Closes a descriptor.
pub(crate) fn close(fd: c_int) {
    // SAFETY: no memory is passed; the memory of operations in progress is kept until their events.
    unsafe { ffi::exs_close(fd) };
}

/// The future of an operation. Dropping it cancels the operation. The buffer is kept until the library does not use it any more.
#[derive(Debug)]
pub(crate) struct Operation {
    driver: &'static Driver,
    fd: c_int,
    pub(crate) id: isize,
    refused: Option<(io::Error, Option<Buffer>)>,
    over: bool,
}

impl Operation {
    /// Returns the error with which the library refused to start the operation.
    pub(crate) fn take_refusal(&mut self) -> Option<io::Error> {
        self.refused.take().map(|(error, _)| error)
    }

    /// Requests the end of the operation. The future of the operation still returns its result.
    pub(crate) fn cancel(&self) {
        // SAFETY: no memory is passed. An operation that has ended already is not an error.
        unsafe { ffi::exs_cancel(self.fd, ffi::CANCEL_AHANDLE, self.id) };
    }
}

impl Future for Operation {
    type Output = (io::Result<ffi::Event>, Option<Buffer>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some((error, buffer)) = self.refused.take() {
            return Poll::Ready((Err(error), buffer));
        }
        let waker = context.waker().clone();
        let mut operations = self.driver.lock();
        let Some(entry) = operations.all.get_mut(&self.id) else {
            return Poll::Ready((Err(io::ErrorKind::InvalidInput.into()), None));
        };
        let Some(event) = entry.event else {
            let old = entry.waker.replace(waker);
            drop(operations);
            drop(old);
            return Poll::Pending;
        };
        let entry = operations.all.remove(&self.id);
        drop(operations);
        let buffer = entry.and_then(|e| e.buffer);
        self.over = true;
        let result = match event.errno {
            0 => Ok(event),
            errno => Err(io::Error::from_raw_os_error(errno)),
        };
        Poll::Ready((result, buffer))
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut operations = self.driver.lock();
        let mut waker = None;
        let ended = operations.all.get_mut(&self.id).is_some_and(|entry| {
            entry.abandoned = true;
            waker = entry.waker.take();
            entry.event.is_some()
        });
        let entry = ended.then(|| operations.all.remove(&self.id)).flatten();
        drop(operations);
        drop(waker);
        match entry.and_then(|entry| entry.event.map(|event| (entry, event))) {
            Some((entry, event)) => entry.discard(&event),
            None => self.cancel(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};
    use std::task::Wake;
    use std::time::Duration;

    fn start(driver: &'static Driver) -> Operation {
        driver.start(-1, None, |_, _| 0)
    }

    fn poll(operation: &mut Operation, waker: &Waker) -> bool {
        let mut context = Context::from_waker(waker);
        Pin::new(operation).poll(&mut context).is_ready()
    }

    /// Runs a closure, which may hang if the code is wrong.
    fn within_10_s(run: impl FnOnce() + Send + 'static) {
        let (done, is_done) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            run();
            done.send(()).unwrap();
        });
        let result = is_done.recv_timeout(Duration::from_secs(10));
        assert_ne!(result, Err(mpsc::RecvTimeoutError::Timeout), "it hangs");
        thread.join().unwrap();
    }

    /// A task with an operation, which is dropped with its last waker.
    struct Task(#[expect(dead_code, reason = "it is only dropped")] Mutex<Operation>);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn a_replaced_waker_may_drop_a_task_with_another_operation() {
        within_10_s(|| {
            let driver = Driver::without_device();
            let mut waited_for = start(driver);
            let task: Waker = Arc::new(Task(Mutex::new(start(driver)))).into();
            assert!(!poll(&mut waited_for, &task));
            drop(task);
            assert!(!poll(&mut waited_for, Waker::noop()));
        });
    }

    #[test]
    fn a_dropped_operation_does_not_keep_its_task() {
        within_10_s(|| {
            let driver = Driver::without_device();
            let mut waited_for = start(driver);
            let task = Arc::new(Task(Mutex::new(start(driver))));
            let weak = Arc::downgrade(&task);
            assert!(!poll(&mut waited_for, &task.into()));
            drop(waited_for);
            assert_eq!(weak.strong_count(), 0);
        });
    }

    #[test]
    fn a_waker_that_panics_does_not_stop_other_operations() {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("a waker of the program");
            }
        }
        let driver = Driver::without_device();
        let (mut first, mut second) = (start(driver), start(driver));
        assert!(!poll(&mut first, &Arc::new(Panics).into()));
        assert!(!poll(&mut second, Waker::noop()));
        let event = |operation: &Operation| ffi::Event {
            ahandle: operation.id,
            ..ffi::Event::default()
        };
        driver.end_all(&[event(&first), event(&second)]);
        assert!(poll(&mut first, Waker::noop()));
        assert!(poll(&mut second, Waker::noop()));
    }
}
