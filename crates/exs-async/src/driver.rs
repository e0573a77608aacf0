//! The event queue of the process, the thread that takes events from it, and the operations that wait for their events.

use crate::Buffer;
use crate::ffi;
use libc::c_int;
use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

/// The largest number of operations under way in the process. It is the length of the event queue.
const DEPTH: c_int = 1 << 20;
/// Events that one call takes from the queue.
const BATCH: usize = 64;

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) queue: c_int,
    operations: Mutex<Operations>,
}

#[derive(Debug, Default)]
struct Operations {
    next: isize,
    all: HashMap<isize, Entry>,
}

/// An operation, from its call until its event has arrived and its future has taken it.
#[derive(Debug, Default)]
struct Entry {
    waker: Option<Waker>,
    event: Option<ffi::Event>,
    /// The buffer of the operation, which belongs to the library until the event.
    buffer: Option<Buffer>,
    /// The future was dropped.
    abandoned: bool,
}

/// Acquires a lock. One that is poisoned counts as any other: another thread's panic must not end the futures of this one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The driver, started when it is first used.
pub(crate) fn get() -> io::Result<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    let _one = lock(&STARTING);
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    // SAFETY: no memory is passed.
    let queue = unsafe {
        crate::check(ffi::exs_init(ffi::VERSION))?;
        crate::check(ffi::exs_qcreate(DEPTH))?
    };
    let driver = DRIVER.get_or_init(|| Driver {
        queue,
        operations: Mutex::default(),
    });
    std::thread::Builder::new()
        .name("exs-events".to_owned())
        .spawn(|| driver.run())?;
    Ok(driver)
}

impl Driver {
    fn lock(&self) -> MutexGuard<'_, Operations> {
        lock(&self.operations)
    }

    fn run(&self) {
        let mut events = [ffi::Event::default(); BATCH];
        loop {
            // SAFETY: there is room for as many events.
            let n = unsafe {
                let room = c_int::try_from(BATCH).unwrap_or(1);
                ffi::exs_qdequeue(self.queue, events.as_mut_ptr(), room, std::ptr::null_mut())
            };
            let Ok(n) = usize::try_from(n) else {
                if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                // The library refuses calls in a child of `fork`, which has no such thread.
                return;
            };
            for event in events.iter().take(n) {
                self.end(event);
            }
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
        // Dropping the buffer of an abandoned operation deregisters it, which is not done under the lock.
        drop(entry);
        if event.kind == ffi::EVT_ACCEPT && event.errno == 0 {
            close(accepted(event));
        }
    }

    /// Starts an operation of a socket: `call` passes its number and the memory of the buffer to the library.
    pub(crate) fn start(
        &'static self,
        fd: c_int,
        mut buffer: Option<Buffer>,
        call: impl FnOnce(isize, Option<&mut Buffer>) -> c_int,
    ) -> Operation {
        let mut operations = self.lock();
        operations.next = operations.next.wrapping_add(1);
        let id = operations.next;
        // The lock is held during the call: an event that comes before the call returns waits for the lock, and finds the
        // entry.
        let refused = crate::check(call(id, buffer.as_mut())).err();
        if let Some(error) = refused {
            return Operation {
                driver: self,
                fd,
                id,
                refused: Some((error, buffer)),
                over: true,
            };
        }
        let entry = Entry {
            buffer,
            ..Entry::default()
        };
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

/// The descriptor in the event of an accept.
pub(crate) fn accepted(event: &ffi::Event) -> c_int {
    let [fd, ..] = event.body;
    c_int::try_from(fd).unwrap_or(-1)
}

/// Closes a descriptor.
pub(crate) fn close(fd: c_int) {
    // SAFETY: no memory is passed; memory of operations under way is kept until their events.
    unsafe { ffi::exs_close(fd) };
}

/// The future of an operation. Dropping it cancels the operation; its buffer is kept until the library is done with it.
#[derive(Debug)]
pub(crate) struct Operation {
    driver: &'static Driver,
    fd: c_int,
    id: isize,
    refused: Option<(io::Error, Option<Buffer>)>,
    over: bool,
}

impl Future for Operation {
    type Output = (io::Result<ffi::Event>, Option<Buffer>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some((error, buffer)) = self.refused.take() {
            return Poll::Ready((Err(error), buffer));
        }
        let mut operations = self.driver.lock();
        let Some(entry) = operations.all.get_mut(&self.id) else {
            return Poll::Ready((Err(io::ErrorKind::InvalidInput.into()), None));
        };
        let Some(event) = entry.event else {
            entry.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        let buffer = operations.all.remove(&self.id).and_then(|e| e.buffer);
        drop(operations);
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
        let ended = operations.all.get_mut(&self.id).is_some_and(|entry| {
            entry.abandoned = true;
            entry.event.is_some()
        });
        let entry = ended.then(|| operations.all.remove(&self.id)).flatten();
        drop(operations);
        if let Some(event) = entry.as_ref().and_then(|e| e.event) {
            if event.kind == ffi::EVT_ACCEPT && event.errno == 0 {
                close(accepted(&event));
            }
        } else {
            // SAFETY: no memory is passed. That there is no such operation any more is no error.
            unsafe { ffi::exs_cancel(self.fd, ffi::CANCEL_AHANDLE, self.id) };
        }
    }
}
