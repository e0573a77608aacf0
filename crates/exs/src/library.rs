//! The state of the process: tables of sockets, queues, memory and devices, and the thread that waits for the devices.

use crate::ffi;
use crate::lock::lock;
use crate::memory::{Device, Memory};
use crate::queue::{self, Queue};
use crate::socket::{Settings, Socket};
use crate::wire::Hello;
use anywarp_verbs_sys::ptr::Ptr;
use libc::{c_int, c_void};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::LocalKey;
use std::time::{Duration, Instant};

/// The lowest descriptor of a socket. It is far above those of the kernel, so that the two cannot be confused.
const FIRST_FD: c_int = 1 << 28;
/// The interval in milliseconds at which the thread checks the sockets that other threads poll.
const TICK_MS: c_int = 1;
const TICK: Duration = Duration::from_millis(TICK_MS as u64);

static LIBRARY: OnceLock<Library> = OnceLock::new();
/// Whether this process was forked by one in which [`init`] had succeeded or was running.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The number of calls of [`init`] that have succeeded or are running.
static BEGUN: AtomicUsize = AtomicUsize::new(0);

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct Library {
    sources: Sources,
    next: AtomicI32,
    sockets: Table<Socket>,
    queues: Table<Queue>,
    memory: Table<Memory>,
    devices: Mutex<Vec<Arc<Device>>>,
    /// The device list of librdmacm, which keeps its devices open.
    list: OnceLock<Ptr<*mut ffi::ibv_context>>,
    /// Held while an event of the connection manager is taken and while a queue pair is destroyed, because librdmacm accesses
    /// the queue pair of an id when it delivers an event.
    cm: Mutex<()>,
    /// The sockets for whose events threads of the program poll ([`watch_polled`]).
    hot: Mutex<Vec<Arc<Socket>>>,
    /// Sockets that the program cannot close, because it never got the descriptor or has closed it. The library's thread closes them.
    failed: Mutex<Vec<c_int>>,
    /// Listeners with changed connections.
    unsettled: Mutex<Vec<c_int>>,
    alarms: Mutex<Alarms>,
}

/// The next deadlines of sockets: at most one of each socket.
#[derive(Debug, Default)]
struct Alarms {
    by_time: BTreeSet<(Instant, c_int)>,
    by_socket: FxHashMap<c_int, Instant>,
}

impl Alarms {
    fn first(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Sets the deadline of a socket in place of the earlier one.
    fn set(&mut self, fd: c_int, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.by_socket.insert(fd, at),
            None => self.by_socket.remove(&fd),
        };
        if let Some(before) = before {
            self.by_time.remove(&(before, fd));
        }
        self.by_time.extend(at.map(|at| (at, fd)));
    }

    /// Removes the earliest deadline if it has passed. Returns its socket.
    fn take_due(&mut self, now: Instant) -> Option<c_int> {
        let (_, fd) = self.by_time.first().filter(|(at, _)| *at <= now).copied()?;
        self.set(fd, None);
        Some(fd)
    }
}

/// The objects of one kind, by their numbers.
#[derive(Debug)]
struct Table<T> {
    all: Mutex<FxHashMap<c_int, Arc<T>>>,
    /// The number of removals so far. The objects that threads keep in [`Recent`] are valid as long as this number is the same.
    removals: AtomicU64,
}

/// The objects of a table that a thread has used last. Finding an object here takes neither the lock nor a search.
#[derive(Debug)]
struct Recent<T> {
    removals: u64,
    objects: [Option<(c_int, Arc<T>)>; RECENT],
}

/// How many objects [`Recent`] holds. A power of two.
const RECENT: usize = 8;

thread_local! {
    static RECENT_SOCKETS: RefCell<Recent<Socket>> = const { RefCell::new(Recent::new()) };
    static RECENT_QUEUES: RefCell<Recent<Queue>> = const { RefCell::new(Recent::new()) };
    static RECENT_MEMORY: RefCell<Recent<Memory>> = const { RefCell::new(Recent::new()) };
}

impl<T> Recent<T> {
    const fn new() -> Self {
        Self {
            removals: 0,
            objects: [const { None }; RECENT],
        }
    }
}

impl<T> Table<T> {
    fn new() -> Self {
        Self {
            all: Mutex::default(),
            removals: AtomicU64::new(0),
        }
    }

    fn has(&self, number: c_int) -> bool {
        self.lock().contains_key(&number)
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<c_int, Arc<T>>> {
        lock(&self.all)
    }

    fn insert(&self, number: c_int, object: Arc<T>) {
        self.lock().insert(number, object);
    }

    /// Removes an object if `may` permits it. `missing` is the error if there is no such object.
    fn remove(
        &self,
        number: c_int,
        missing: c_int,
        may: impl FnOnce(&T) -> Result<(), c_int>,
    ) -> Result<Arc<T>, c_int> {
        let mut all = self.lock();
        may(all.get(&number).ok_or(missing)?)?;
        let removed = all.remove(&number).ok_or(missing)?;
        self.removals.fetch_add(1, SeqCst);
        Ok(removed)
    }

    /// Returns an object. `recent`: the objects that this thread has used last.
    fn get(&self, number: c_int, recent: &'static LocalKey<RefCell<Recent<T>>>) -> Option<Arc<T>> {
        // While the thread ends, its thread-local variable may be destroyed already. The variable is borrowed if this is called in a
        // signal handler that has interrupted a call of the library.
        let found = recent.try_with(|recent| {
            let mut recent = recent.try_borrow_mut().ok()?;
            Some(self.get_recent(number, &mut recent))
        });
        match found {
            Ok(Some(found)) => found,
            _ => self.lock().get(&number).cloned(),
        }
    }

    /// Calls `f` with an object. If `recent` holds the object, `recent` stays borrowed during the call and so keeps the object
    /// alive, and the reference count is not changed.
    fn with<R>(
        &self,
        number: c_int,
        recent: &'static LocalKey<RefCell<Recent<T>>>,
        f: impl FnOnce(&Arc<T>) -> R,
    ) -> Option<R> {
        let mut f = Some(f);
        let called = recent.try_with(|recent| {
            let recent = recent.try_borrow().ok()?;
            if recent.removals != self.removals.load(SeqCst) {
                return None;
            }
            match recent.objects.get(place_of(number)) {
                Some(Some((of, object))) if *of == number => f.take().map(|f| f(object)),
                _ => None,
            }
        });
        if let Ok(Some(result)) = called {
            return Some(result);
        }
        let object = self.get(number, recent)?;
        f.map(|f| f(&object))
    }

    fn get_recent(&self, number: c_int, recent: &mut Recent<T>) -> Option<Arc<T>> {
        // The number is read before the table, so that the next call detects a removal that happens in between.
        let removals = self.removals.load(SeqCst);
        if recent.removals != removals {
            recent.objects = [const { None }; RECENT];
            recent.removals = removals;
        }
        let place = recent.objects.get_mut(place_of(number))?;
        if let Some((of, object)) = place
            && *of == number
        {
            return Some(Arc::clone(object));
        }
        let found = self.lock().get(&number).cloned()?;
        *place = Some((number, Arc::clone(&found)));
        Some(found)
    }
}

/// Returns where [`Recent`] holds an object.
fn place_of(number: c_int) -> usize {
    number.cast_unsigned() as usize % RECENT
}

/// A copy of an event of the connection manager, which is acknowledged before it is handled.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: u32,
    pub(crate) status: c_int,
    pub(crate) id: *mut ffi::rdma_cm_id,
    fd: c_int,
    pub(crate) data: Vec<u8>,
}

extern "C" fn in_child() {
    if BEGUN.load(SeqCst) > 0 {
        FORKED.store(true, SeqCst);
    }
}

/// Installs the handler of forks when the library is loaded. A thread that calls the library for the first time would be too late: the C
/// library reads the list of handlers at the beginning of a fork, and copies the memory later.
extern "C" fn watch_fork() {
    // SAFETY: only a function is passed, which is valid as long as the process.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

// SAFETY: the dynamic linker calls the functions of this section when it has loaded the library and those that it needs.
#[unsafe(link_section = ".init_array")]
#[used]
static WATCH_FORK: extern "C" fn() = watch_fork;

/// The descriptors that the library's thread waits for. They are closed when this is dropped.
#[derive(Debug)]
struct Sources {
    channel: Ptr<ffi::rdma_event_channel>,
    wakeup: OwnedFd,
}

impl Sources {
    fn open() -> Result<Self, c_int> {
        // SAFETY: the descriptor is new.
        let wakeup = unsafe {
            let fd = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            if fd < 0 {
                return Err(crate::errno());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: no pointer is passed.
        let channel = unsafe { ffi::rdma_create_event_channel() };
        if channel.is_null() {
            return Err(crate::errno());
        }
        let sources = Self {
            channel: Ptr(channel),
            wakeup,
        };
        // SAFETY: the channel is open.
        let is_set = unsafe {
            let fd = (*channel).fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
        };
        if !is_set {
            return Err(crate::errno());
        }
        Ok(sources)
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        // SAFETY: the channel is not used afterwards.
        unsafe { ffi::rdma_destroy_event_channel(self.channel.0) };
    }
}

/// Initializes the library at the first call. If this fails, nothing stays open, and the next call tries it again.
pub(crate) fn init() -> Result<(), c_int> {
    static STARTING: Mutex<()> = Mutex::new(());
    // A child whose parent was forked during this call must not wait for the lock: the thread that holds it does not exist there.
    if FORKED.load(SeqCst) {
        return Err(libc::EPERM);
    }
    BEGUN.fetch_add(1, SeqCst);
    let begun = begin(&STARTING);
    if begun.is_err() {
        BEGUN.fetch_sub(1, SeqCst);
    }
    begun
}

/// Initializes the library, if it is not initialized yet. `starting` is held by one thread that does this.
fn begin(starting: &'static Mutex<()>) -> Result<(), c_int> {
    let _one = lock(starting);
    if LIBRARY.get().is_some() {
        return Ok(());
    }
    let sources = Sources::open()?;
    // The thread waits until this call ends, and so until there is a library to run.
    let run = || {
        drop(lock(starting));
        if let Some(library) = LIBRARY.get() {
            library.run();
        }
    };
    let thread = std::thread::Builder::new().name("exs".to_owned());
    thread.spawn(run).map_err(|_| libc::EAGAIN)?;
    LIBRARY.get_or_init(|| Library {
        sources,
        next: AtomicI32::new(1),
        sockets: Table::new(),
        queues: Table::new(),
        memory: Table::new(),
        devices: Mutex::default(),
        list: OnceLock::new(),
        cm: Mutex::default(),
        hot: Mutex::default(),
        failed: Mutex::default(),
        unsettled: Mutex::default(),
        alarms: Mutex::default(),
    });
    Ok(())
}

/// Returns the library, if this process has initialized it.
pub(crate) fn get() -> Result<&'static Library, c_int> {
    match LIBRARY.get() {
        Some(_) if FORKED.load(SeqCst) => Err(libc::EPERM),
        Some(library) => Ok(library),
        None => Err(libc::EINVAL),
    }
}

/// Returns the device of a context. It is opened at the first call.
pub(crate) fn device(context: *mut ffi::ibv_context) -> Result<Arc<Device>, c_int> {
    let library = get()?;
    let mut devices = lock(&library.devices);
    if let Some(device) = devices.iter().find(|d| d.context.0 == context) {
        return Ok(Arc::clone(device));
    }
    let device = Arc::new(Device::open(context)?);
    devices.push(Arc::clone(&device));
    library.wake();
    Ok(device)
}

/// Creates the socket for a connection request and answers the request. Only the library's thread calls this, because it reads the context
/// of the id when it takes an event.
pub(crate) fn admit(
    id: Ptr<ffi::rdma_cm_id>,
    theirs: Hello,
    listener: &Socket,
    settings: Settings,
) -> Option<Arc<Socket>> {
    let library = get().ok()?;
    let fd = library.number() + FIRST_FD;
    // SAFETY: the new socket owns the request; from now on the events of the request refer to this descriptor.
    unsafe { (*id.0).context = number_as_context(fd) };
    let (domain, stream) = (listener.domain, listener.stream);
    let socket = Arc::new(Socket::new(fd, domain, stream, id.0, settings));
    library.sockets.insert(fd, Arc::clone(&socket));
    socket.admit(theirs, listener.fd);
    Some(socket)
}

/// Makes the library's thread call [`Socket::settle`] of a listener.
pub(crate) fn settle(listener: c_int) {
    if let Ok(library) = get() {
        let mut unsettled = lock(&library.unsettled);
        if !unsettled.contains(&listener) {
            unsettled.push(listener);
            library.wake();
        }
    }
}

/// Records that a thread of the program polls for the events of a socket. The library's thread takes over when that polling stops.
pub(crate) fn watch_polled(socket: Arc<Socket>) {
    if let Ok(library) = get() {
        lock(&library.hot).push(socket);
        library.wake();
    }
}

/// Makes the library's thread check the deadlines of a socket at the time `at`, and not at the time of an earlier call.
pub(crate) fn alarm(at: Instant, fd: c_int) {
    if let Ok(library) = get() {
        let mut alarms = lock(&library.alarms);
        let first = alarms.first().is_none_or(|first| at < first);
        alarms.set(fd, Some(at));
        if first {
            library.wake();
        }
    }
}

/// Removes the deadline of a socket, which is closed.
pub(crate) fn no_alarm(fd: c_int) {
    if let Ok(library) = get() {
        lock(&library.alarms).set(fd, None);
    }
}

/// Makes the library's thread close a socket that the program cannot close: it never got the descriptor, or has closed it.
pub(crate) fn discard(fd: c_int) {
    if let Ok(library) = get() {
        lock(&library.failed).push(fd);
        library.wake();
    }
}

/// Destroys the queue pair of an id.
///
/// # Safety
///
/// The id is live and has a queue pair, which is not used any more.
pub(crate) unsafe fn destroy_qp(id: *mut ffi::rdma_cm_id) {
    if let Ok(library) = get() {
        let _alone = lock(&library.cm);
        // SAFETY: upheld by the caller.
        unsafe { ffi::rdma_destroy_qp(id) };
    }
}

/// Returns the error for a descriptor that is not that of a socket: as for sockets of the kernel, it depends on whether the
/// descriptor is open.
fn no_socket(fd: c_int) -> c_int {
    // SAFETY: F_GETFD has no argument, and every number is allowed: it fails if this is no open descriptor.
    if (0..FIRST_FD).contains(&fd) && unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0 {
        libc::ENOTSOCK
    } else {
        libc::EBADF
    }
}

fn number_as_context(fd: c_int) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(fd).unwrap_or(0))
}

impl Library {
    /// Returns a number that no object has. Numbers are used again only after all others.
    fn number(&self) -> c_int {
        loop {
            let number = self.next.fetch_add(1, SeqCst) & (FIRST_FD - 1);
            let used = self.sockets.has(number + FIRST_FD)
                || self.queues.has(number)
                || self.memory.has(number);
            if number > 0 && !used {
                return number;
            }
        }
    }

    fn wake(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from a variable of that size.
        unsafe { libc::write(self.sources.wakeup.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Returns a socket that the program has not closed.
    pub(crate) fn socket(&self, fd: c_int) -> Result<Arc<Socket>, c_int> {
        self.any_socket(fd)
            .and_then(|s| if s.is_gone() { Err(libc::EBADF) } else { Ok(s) })
    }

    fn any_socket(&self, fd: c_int) -> Result<Arc<Socket>, c_int> {
        let found = self.sockets.get(fd, &RECENT_SOCKETS);
        found.ok_or_else(|| no_socket(fd))
    }

    /// Calls `f` with a socket that the program has not closed.
    pub(crate) fn with_socket<R>(
        &self,
        fd: c_int,
        f: impl FnOnce(&Arc<Socket>) -> Result<R, c_int>,
    ) -> Result<R, c_int> {
        let open = |socket: &Arc<Socket>| {
            if socket.is_gone() {
                Err(libc::EBADF)
            } else {
                f(socket)
            }
        };
        let found = self.sockets.with(fd, &RECENT_SOCKETS, open);
        found.unwrap_or_else(|| Err(no_socket(fd)))
    }

    pub(crate) fn add_socket(
        &self,
        domain: c_int,
        stream: bool,
        settings: Settings,
    ) -> Result<c_int, c_int> {
        let fd = self.number() + FIRST_FD;
        let mut id = std::ptr::null_mut();
        // SAFETY: the channel is live as long as the process, and `id` is valid for writes.
        let made = unsafe {
            ffi::rdma_create_id(
                self.sources.channel.0,
                &raw mut id,
                number_as_context(fd),
                ffi::RDMA_PS_TCP,
            )
        };
        if made != 0 {
            return Err(crate::errno());
        }
        let socket = Arc::new(Socket::new(fd, domain, stream, id, settings));
        self.sockets.insert(fd, socket);
        Ok(fd)
    }

    /// Closes a socket of the program.
    pub(crate) fn close(&self, fd: c_int) -> Result<(), c_int> {
        self.socket(fd)?;
        self.remove(fd, true)
    }

    /// Closes a socket. `wait`: whether to wait until its last messages are sent.
    fn remove(&self, fd: c_int, wait: bool) -> Result<(), c_int> {
        let socket = self.sockets.remove(fd, libc::EBADF, |_| Ok(()))?;
        socket.close(wait);
        let queues: Vec<_> = self.queues.lock().values().cloned().collect();
        for queue in queues {
            queue.forget(fd);
        }
        Ok(())
    }

    pub(crate) fn queue(&self, q: c_int) -> Result<Arc<Queue>, c_int> {
        self.queues.get(q, &RECENT_QUEUES).ok_or(libc::EBADF)
    }

    /// Calls `f` with a queue.
    pub(crate) fn with_queue<R>(
        &self,
        q: c_int,
        f: impl FnOnce(&Arc<Queue>) -> Result<R, c_int>,
    ) -> Result<R, c_int> {
        let found = self.queues.with(q, &RECENT_QUEUES, f);
        found.unwrap_or(Err(libc::EBADF))
    }

    pub(crate) fn add_queue(&self, queue: Queue) -> c_int {
        let q = self.number();
        self.queues.insert(q, Arc::new(queue));
        q
    }

    pub(crate) fn remove_queue(&self, q: c_int) -> Result<(), c_int> {
        let busy = |queue: &Queue| {
            if queue.delete() {
                Ok(())
            } else {
                Err(libc::EBUSY)
            }
        };
        let queue = self.queues.remove(q, libc::EBADF, busy)?;
        queue.close();
        Ok(())
    }

    /// Calls `f` with memory that the program has registered.
    pub(crate) fn with_memory<R>(
        &self,
        handle: c_int,
        f: impl FnOnce(&Arc<Memory>) -> Result<R, c_int>,
    ) -> Result<R, c_int> {
        let found = self.memory.with(handle, &RECENT_MEMORY, f);
        found.unwrap_or(Err(libc::EINVAL))
    }

    pub(crate) fn add_memory(&self, memory: Memory) -> Result<c_int, c_int> {
        // Registering with the first device checks the address. Registrations with other devices are made when they are needed.
        if lock(&self.devices).is_empty() {
            let mut count = 0;
            // SAFETY: the list is never freed, so its devices stay open.
            let first = unsafe {
                let get = || Ptr(ffi::rdma_get_devices(&raw mut count));
                let list = self.list.get_or_init(get).0;
                // The list ends with a null pointer.
                if list.is_null() {
                    std::ptr::null_mut()
                } else {
                    *list
                }
            };
            if first.is_null() {
                return Err(libc::ENODEV);
            }
            device(first)?;
        }
        let first = lock(&self.devices).first().cloned().ok_or(libc::ENODEV)?;
        memory.keys(&first, crate::memory::Use::Source)?;
        let handle = self.number();
        self.memory.insert(handle, Arc::new(memory));
        Ok(handle)
    }

    pub(crate) fn remove_memory(&self, handle: c_int) -> Result<(), c_int> {
        self.memory.remove(handle, libc::EINVAL, Memory::close)?;
        Ok(())
    }

    /// Runs the library's thread.
    fn run(&self) {
        // SAFETY: the signal set is initialized before it is used. Blocked signals are delivered to threads of the program.
        unsafe {
            let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
        }
        let mut tick = Instant::now();
        loop {
            let devices = lock(&self.devices).clone();
            // SAFETY: the channels are live as long as the process.
            let fds = unsafe {
                [
                    self.sources.wakeup.as_raw_fd(),
                    (*self.sources.channel.0).fd,
                ]
            };
            let channels = devices.iter().map(|d| {
                // SAFETY: as above.
                unsafe { (*d.channel.0).fd }
            });
            let mut set: Vec<_> = fds
                .into_iter()
                .chain(channels)
                .map(|fd| libc::pollfd {
                    fd,
                    events: libc::POLLIN,
                    revents: 0,
                })
                .collect();
            let timeout = if lock(&self.hot).is_empty() {
                self.until_alarm()
            } else {
                TICK_MS
            };
            // SAFETY: the passed length is that of the set.
            unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, timeout) };
            let mut counter = 0u64;
            // SAFETY: eight bytes are written to a variable of that size.
            unsafe {
                libc::read(
                    self.sources.wakeup.as_raw_fd(),
                    (&raw mut counter).cast(),
                    8,
                )
            };
            self.events_of_cm();
            queue::raise_signals();
            for device in devices {
                self.events_of_device(&device);
                queue::raise_signals();
            }
            self.expire();
            self.settle_listeners();
            queue::raise_signals();
            // This is done before sockets are closed below, because closing may take long.
            if tick.elapsed() >= TICK {
                tick = Instant::now();
                let hot = std::mem::take(&mut *lock(&self.hot));
                let still: Vec<_> = hot.into_iter().filter(|s| s.is_still_polled()).collect();
                lock(&self.hot).extend(still);
                queue::raise_signals();
            }
            let failed = std::mem::take(&mut *lock(&self.failed));
            for fd in failed {
                // This fails only if the socket is closed already: by the program, or by an earlier entry of the list.
                let _ = self.remove(fd, false);
                queue::raise_signals();
            }
        }
    }

    /// Returns the milliseconds until the first alarm, for poll(2).
    fn until_alarm(&self) -> c_int {
        let first = lock(&self.alarms).first();
        first.map_or(-1, |at| {
            let left = at.saturating_duration_since(Instant::now());
            c_int::try_from(left.as_millis().saturating_add(1)).unwrap_or(c_int::MAX)
        })
    }

    fn expire(&self) {
        let now = Instant::now();
        loop {
            let due = lock(&self.alarms).take_due(now);
            let Some(fd) = due else {
                return;
            };
            if let Ok(socket) = self.any_socket(fd) {
                socket.expire();
            }
        }
    }

    fn events_of_cm(&self) {
        let mut event = std::ptr::null_mut();
        // SAFETY: the channel is live as long as the process. The event is copied before it is acknowledged, and this thread
        // owns the id of a request until a socket takes it.
        let next = |event| {
            let _alone = lock(&self.cm);
            // SAFETY: as above.
            unsafe { ffi::rdma_get_cm_event(self.sources.channel.0, event) == 0 }
        };
        while next(&raw mut event) {
            // SAFETY: as above; the kinds in `has_data` have the member `conn`, and its octets are initialized for all kinds.
            let copy = unsafe {
                let e = &*event;
                let conn = e.param.conn;
                let data = conn.private_data.cast::<u8>();
                let has_data = [
                    ffi::RDMA_CM_EVENT_CONNECT_REQUEST,
                    ffi::RDMA_CM_EVENT_ESTABLISHED,
                    ffi::RDMA_CM_EVENT_REJECTED,
                ];
                CmEvent {
                    kind: e.event,
                    status: e.status,
                    id: e.id,
                    fd: c_int::try_from((*e.id).context.addr()).unwrap_or(-1),
                    data: if data.is_null() || !has_data.contains(&e.event) {
                        Vec::new()
                    } else {
                        std::slice::from_raw_parts(data, conn.private_data_len.into()).to_vec()
                    },
                }
            };
            // SAFETY: as above; once.
            unsafe { ffi::rdma_ack_cm_event(event) };
            match self.any_socket(copy.fd) {
                Ok(socket) => socket.event_of_cm(&copy),
                Err(_) if copy.kind == ffi::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    // SAFETY: the socket of the request is closed, so nothing else owns the request.
                    unsafe {
                        ffi::rdma_reject(copy.id, std::ptr::null(), 0);
                        ffi::rdma_destroy_id(copy.id);
                    }
                }
                Err(_) => {}
            }
            // An accept gets the connection before the next event, which may be its end.
            self.settle_listeners();
        }
    }

    fn settle_listeners(&self) {
        let unsettled = std::mem::take(&mut *lock(&self.unsettled));
        for fd in unsettled {
            if let Ok(listener) = self.any_socket(fd) {
                listener.settle();
            }
        }
    }

    fn events_of_device(&self, device: &Device) {
        let mut cq = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        // SAFETY: the channel is live as long as the process; a queue is not destroyed before its events are acknowledged.
        while unsafe { ffi::ibv_get_cq_event(device.channel.0, &raw mut cq, &raw mut context) } == 0
        {
            // SAFETY: as above; once.
            unsafe { ffi::ibv_ack_cq_events(cq, 1) };
            let fd = c_int::try_from(context.addr()).unwrap_or(-1);
            if let Ok(socket) = self.any_socket(fd) {
                socket.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_one_alarm() {
        let mut alarms = Alarms::default();
        let now = Instant::now();
        let (soon, late) = (
            now + Duration::from_millis(1),
            now + Duration::from_secs(3600),
        );
        alarms.set(1, Some(late));
        for _ in 0..100 {
            alarms.set(1, Some(soon));
            assert_eq!(alarms.first(), Some(soon));
            assert_eq!(alarms.take_due(now), None);
            assert_eq!(alarms.take_due(soon), Some(1));
            alarms.set(1, Some(late));
        }
        assert_eq!(alarms.by_time.len(), 1);
        alarms.set(2, Some(soon));
        alarms.set(1, None);
        assert_eq!(alarms.take_due(late), Some(2));
        assert_eq!((alarms.by_time.len(), alarms.by_socket.len()), (0, 0));
    }
}
