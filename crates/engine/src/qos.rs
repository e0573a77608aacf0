//! Quality of service: `ANYWARP_QOS=SETTINGS` or `@FILE`. The settings are described in [`anywarp_core::qos`] and
//! anywarp-qos(7).
//!
//! The settings describe a simulated link. With settings, each queue pair has a [`Flow`], which represents it on the link, and asks the
//! flow before it sends. A queue pair that has to wait is called when it can send. Without settings, a queue pair has no flow, and only
//! checks whether it has one. The state of the link is in this process, or in a file that several processes lock and change in turn
//! (docs/decisions/034). A process that waits looks at the link after some time by itself. So processes do not have to wake each other,
//! and a process that is killed delays the others only briefly.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds::QOS_SILENCE;
use anywarp_core::qos::{FlowId, Link, Settings, level_of_class};
use rustix::fs::FlockOperation;

use crate::capture::open_private;
use crate::clock;
use crate::config::config;
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::process::{Inherited, PerProcess};
use crate::random::random_u64;
use crate::reactor::{Alarm, Source};
use crate::sys::thread::Uncancelled;

/// Shortest time until a waiting flow is looked at again. A timer for each packet would cost more than the packet.
const TICK: Duration = Duration::from_micros(100);
/// Longest time until a waiting flow is looked at again. The other processes forget a flow whose process has not accessed the link for
/// [`QOS_SILENCE`].
const ALIVE: Duration = Duration::from_nanos(QOS_SILENCE / 2);

// ---------------------------------------------------------------------- settings

/// The settings of the environment, which are read once. `Err`: they cannot be read or parsed, which is logged once.
fn settings() -> Result<Option<&'static Settings>, ()> {
    static SETTINGS: Inherited<Result<Option<Settings>, ()>> = Inherited::new(|| {
        read().map_err(|why| log::write(log::Level::Error, format_args!("ANYWARP_QOS: {why}")))
    });
    match SETTINGS.get() {
        Ok(settings) => Ok(settings.as_ref()),
        Err(()) => Err(()),
    }
}

fn read() -> Result<Option<Settings>, String> {
    let Some(text) = &config().qos else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    let settings = match text.strip_prefix('@') {
        None => Settings::parse(&text).map_err(|e| e.to_string())?,
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|e| format!("{file}: {e}"))?;
            Settings::parse(&text).map_err(|e| format!("{file}: {e}"))?
        }
    };
    if let Some(path) = &settings.link {
        let _inside = Uncancelled::new();
        let wrong = |why: String| format!("link={}: {why}", path.display());
        let file = open(path).map_err(|e| wrong(e.to_string()))?;
        Locked::new(&file)
            .and_then(|locked| locked.link(&settings))
            .map_err(|e| wrong(e.to_string()))?;
    }
    Ok(Some(settings))
}

/// Returns `EINVAL` if the settings of the environment cannot be used. Without this check a program would run without virtual lanes and
/// without the link's rate, and its results would look like those of a run with the settings.
pub(crate) fn check() -> io::Result<()> {
    settings()
        .map(|_| ())
        .map_err(|()| io::Error::from_raw_os_error(libc::EINVAL))
}

/// The service level and the traffic class of a path, from those that the program has set. If `ANYWARP_QOS` is set, a value of
/// 0 is derived from the other value: a level is the upper three bits of a class.
pub fn service(level: u8, class: u8) -> (u8, u8) {
    if !matches!(settings(), Ok(Some(_))) {
        return (level, class);
    }
    match (level & 15, class) {
        (0, class) => (level_of_class(class), class),
        // Levels above 7 have no class, because a class has three bits for them.
        (level @ 1..8, 0) => (level, level << 5),
        (level, class) => (level, class),
    }
}

// ---------------------------------------------------------------------- the link

/// Opens the file by which processes share a link.
fn open(path: &Path) -> io::Result<File> {
    open_private(OpenOptions::new().read(true).write(true), path)
}

/// The file of a link, locked until this is dropped.
struct Locked<'a>(&'a File);

impl<'a> Locked<'a> {
    fn new(file: &'a File) -> io::Result<Self> {
        // The program's signal handlers may interrupt the wait for another process.
        rustix::io::retry_on_intr(|| rustix::fs::flock(file, FlockOperation::LockExclusive))?;
        Ok(Self(file))
    }

    /// The link that the file describes; a new one if it is empty.
    fn link(&self, settings: &Settings) -> io::Result<Link> {
        let len = usize::try_from(self.0.metadata()?.len()).unwrap_or(0);
        if len == 0 {
            return Ok(Link::new(settings));
        }
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, 0)?;
        Link::decode(settings, &bytes, clock::nanos()).map_err(io::Error::other)
    }

    fn store(&self, link: &Link, fingerprint: u64) -> io::Result<()> {
        let bytes = link.encode(fingerprint);
        self.0.write_all_at(&bytes, 0)?;
        // If flows have left, the file is longer than the state. `decode` does not read the rest, so it may stay.
        Ok(())
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

/// The link of this process, and the flows that wait.
struct Sender {
    settings: &'static Settings,
    /// The file with the link, if processes share it.
    shared: Option<Arc<File>>,
    /// The link of this process, if it shares none.
    own: Link,
    waiting: BTreeMap<FlowId, Weak<dyn Paced>>,
    alarm: Alarm,
}

static SENDER: PerProcess<OnceLock<Option<Mutex<Sender>>>> = PerProcess::new(OnceLock::new);

/// The link of this process, if there are settings.
fn sender() -> Option<&'static Mutex<Sender>> {
    let sender = SENDER.get().get_or_init(|| {
        let settings = settings().ok().flatten()?;
        let shared = settings.link.as_ref().and_then(|path| {
            let _inside = Uncancelled::new();
            let file = open(path).map_err(|e| on_its_own(&e)).ok()?;
            Some(Arc::new(file))
        });
        let sender = Sender {
            settings,
            shared,
            own: Link::new(settings),
            waiting: BTreeMap::new(),
            alarm: Alarm::default(),
        };
        Some(Mutex::new(Rank::Link, sender))
    });
    sender.as_ref()
}

/// Reports why the file of the link cannot be used any more.
fn on_its_own(why: &io::Error) {
    log!(
        Error,
        "ANYWARP_QOS: the file of the link: {why}; this process uses a link of its own from now on"
    );
}

impl Sender {
    /// Changes the link.
    fn with<R>(&mut self, f: impl FnOnce(&mut Link, u64) -> R) -> R {
        let Some(file) = self.shared.clone() else {
            return f(&mut self.own, clock::nanos());
        };
        let _inside = Uncancelled::new();
        let read = Locked::new(&file).and_then(|locked| {
            let link = locked.link(self.settings)?;
            Ok((locked, link))
        });
        match read {
            Ok((locked, mut link)) => {
                let now = clock::nanos();
                for id in self.waiting.keys() {
                    link.touch(now, *id);
                }
                link.forget_silent(now);
                let result = f(&mut link, now);
                if let Err(e) = locked.store(&link, self.settings.fingerprint()) {
                    on_its_own(&e);
                    self.shared = None;
                }
                result
            }
            Err(e) => {
                on_its_own(&e);
                self.shared = None;
                f(&mut self.own, clock::nanos())
            }
        }
    }

    /// Takes the flows that may send now. Also returns the time at which the first of the others can be served.
    fn take_ready(&mut self) -> (Vec<Weak<dyn Paced>>, Option<u64>) {
        let waiting: Vec<_> = self.waiting.keys().copied().collect();
        let (ready, next) = self.with(|link, t| {
            link.serve(t);
            // The link may not know a flow: other processes forget the flows of a process that was stopped for a time, and a process that
            // cannot use the file any more continues with an empty link. The queue pair of such a flow asks again.
            let (ready, rest): (Vec<FlowId>, Vec<FlowId>) = waiting
                .iter()
                .copied()
                .partition(|id| !link.knows(*id) || link.allowance(*id) > 0);
            (ready, rest.into_iter().filter_map(|id| link.next(id)).min())
        });
        let ready = ready.iter().filter_map(|id| self.waiting.remove(id));
        (ready.collect(), next)
    }

    /// Sets the deadline for the flow that can be served first.
    fn watch(&mut self, engine: &'static Engine, next: Option<u64>, now: Instant) {
        let Some(next) = next else { return };
        let wait = Duration::from_nanos(next.saturating_sub(clock::nanos()));
        let at = now + wait.clamp(TICK, ALIVE);
        let register = || engine.reserve(Arc::new(Clock(engine)));
        if let Some(source) = self.alarm.set(at, register) {
            engine.deadline(source, at);
        }
    }
}

/// Calls [`Paced::granted`] of the waiting queue pairs whose flows may send now.
struct Clock(&'static Engine);

impl Source for Clock {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        // The clock has no socket, so this is never called.
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let Some(sender) = sender() else { return };
        let ready: Vec<_> = {
            let mut sender = sender.lock();
            sender.alarm.passed(now);
            let (ready, next) = sender.take_ready();
            sender.watch(self.0, next, now);
            ready
        };
        for flow in ready.iter().filter_map(Weak::upgrade) {
            flow.granted(now);
        }
    }
}

// ---------------------------------------------------------------------- a queue pair

/// A queue pair whose flow waits.
pub(crate) trait Paced: Send + Sync {
    /// The flow may send.
    fn granted(self: Arc<Self>, now: Instant);
}

/// The sending side of a queue pair on the link.
pub(crate) struct Flow {
    engine: &'static Engine,
    id: FlowId,
    level: AtomicU8,
}

impl Flow {
    /// The flow of a new queue pair; `None` without settings.
    pub(crate) fn of(engine: &'static Engine) -> Option<Self> {
        let _configured = sender()?;
        Some(Self {
            engine,
            // A process in another container may have the same process number.
            id: random_u64(),
            level: AtomicU8::new(0),
        })
    }

    /// Sets the service level.
    pub(crate) fn set_level(&self, level: u8) {
        self.level.store(level, Ordering::Relaxed);
    }

    /// How many bytes the queue pair may send now. If the result is 0, `me` is called when it may send.
    pub(crate) fn ask(&self, me: &Weak<impl Paced + 'static>, now: Instant) -> usize {
        let Some(sender) = sender() else {
            return usize::MAX;
        };
        let level = self.level.load(Ordering::Relaxed);
        let mut sender = sender.lock();
        let (allowed, next) =
            sender.with(|link, t| (link.ask(t, self.id, level), link.next(self.id)));
        if allowed == 0 {
            sender.waiting.insert(self.id, me.clone());
            sender.watch(self.engine, next, now);
        }
        usize::try_from(allowed).unwrap_or(usize::MAX)
    }

    /// Records that the queue pair has sent `bytes`. With `more` it has more to send, and `me` is called when it may send.
    pub(crate) fn sent(
        &self,
        me: &Weak<impl Paced + 'static>,
        now: Instant,
        bytes: u64,
        more: bool,
    ) {
        let Some(sender) = sender() else { return };
        let level = self.level.load(Ordering::Relaxed);
        let mut sender = sender.lock();
        let next = sender.with(|link, t| {
            link.sent(t, self.id, level, bytes, more);
            link.next(self.id)
        });
        if more {
            sender.waiting.insert(self.id, me.clone());
            sender.watch(self.engine, next, now);
        } else {
            sender.waiting.remove(&self.id);
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if let Some(sender) = sender() {
            let mut sender = sender.lock();
            sender.waiting.remove(&self.id);
            sender.with(|link, _| link.leave(self.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const TEXT: &str = "rate=1Gbit/s;qos_vlarb_low=0:1,1:4";

    /// A folder that is removed at the end.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("anywarp-qos-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn sender(settings: &'static Settings, file: &Path) -> Sender {
        Sender {
            settings,
            shared: Some(Arc::new(open(file).unwrap())),
            own: Link::new(settings),
            waiting: BTreeMap::new(),
            alarm: Alarm::default(),
        }
    }

    /// Settings that live as long as the process. They stay reachable, so that a leak checker does not report them.
    fn leaked(text: &str) -> &'static Settings {
        static ALL: std::sync::Mutex<Vec<&Settings>> = std::sync::Mutex::new(Vec::new());
        let settings: &Settings = Box::leak(Box::new(Settings::parse(text).unwrap()));
        ALL.lock().unwrap().push(settings);
        settings
    }

    #[test]
    fn two_users_of_a_file_have_one_link() {
        let folder = Folder::new("two");
        let file = folder.0.join("link");
        let settings = leaked(TEXT);
        let (mut one, mut other) = (sender(settings, &file), sender(settings, &file));
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // The first one sends far too much, so that the link is busy for the second one.
        assert!(one.with(|link, t| link.ask(t, 1, 0)) > 0);
        one.with(|link, t| link.sent(t, 1, 0, 1 << 20, true));
        let waits = other.with(|link, t| {
            link.ask(t, 2, 0);
            link.sent(t, 2, 0, 1 << 20, true);
            (link.next(1).is_some(), link.next(2).unwrap() - t)
        });
        assert!(waits.0);
        assert!(waits.1 > 4_000_000, "{waits:?}");
        assert!(one.with(|link, _| link.next(2).is_some()));
    }

    #[test]
    fn a_damaged_file_is_not_used_any_more() {
        let folder = Folder::new("damaged");
        let file = folder.0.join("link");
        let mut one = sender(leaked(TEXT), &file);
        one.with(|link, t| link.ask(t, 1, 0));
        std::fs::write(&file, "something else").unwrap();
        assert!(one.with(|link, t| link.ask(t, 2, 0)) > 0);
        assert!(one.shared.is_none());
        assert_eq!(std::fs::read(&file).unwrap(), b"something else");
    }

    /// A queue pair that waits.
    struct Waiter;

    impl Paced for Waiter {
        fn granted(self: Arc<Self>, _now: Instant) {}
    }

    /// Flow 1 sends far too much and waits.
    fn waits(one: &mut Sender, waiter: &Arc<Waiter>) {
        one.with(|link, t| link.ask(t, 1, 0));
        one.with(|link, t| link.sent(t, 1, 0, 1 << 30, true));
        let waiter: Weak<Waiter> = Arc::downgrade(waiter);
        one.waiting.insert(1, waiter);
        let (ready, next) = one.take_ready();
        assert!(ready.is_empty() && next.is_some());
    }

    #[test]
    fn a_flow_that_the_link_does_not_know_asks_again() {
        let folder = Folder::new("forgotten");
        let file = folder.0.join("link");
        let waiter = Arc::new(Waiter);
        let settings = leaked(TEXT);
        // Another process has forgotten the flow, because this process was stopped.
        let mut one = sender(settings, &file);
        waits(&mut one, &waiter);
        sender(settings, &file).with(|link, _| link.leave(1));
        assert_eq!(one.take_ready().0.len(), 1);
        // The file cannot be used any more.
        let mut one = sender(settings, &file);
        waits(&mut one, &waiter);
        std::fs::write(&file, "something else").unwrap();
        assert_eq!(one.take_ready().0.len(), 1);
        assert!(one.shared.is_none() && one.waiting.is_empty());
    }

    #[test]
    fn a_process_does_not_forget_its_own_waiting_flows() {
        let folder = Folder::new("own");
        let mut one = sender(leaked(TEXT), &folder.0.join("link"));
        let waiter = Arc::new(Waiter);
        waits(&mut one, &waiter);
        std::thread::sleep(Duration::from_nanos(QOS_SILENCE + QOS_SILENCE / 10));
        let (ready, next) = one.take_ready();
        assert!(
            ready.is_empty(),
            "it still has to wait for what it has sent"
        );
        assert!(next.is_some());
    }

    #[test]
    fn a_signal_does_not_end_the_wait_for_the_file() {
        extern "C" fn nothing(_: libc::c_int) {}
        let folder = Folder::new("signal");
        let file = folder.0.join("link");
        let mut one = sender(leaked(TEXT), &file);
        let holder = open(&file).unwrap();
        let locked = Locked::new(&holder).unwrap();
        // SAFETY: the action is initialized, and its handler does nothing. Without SA_RESTART system calls end with EINTR.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut());
        }
        // SAFETY: no preconditions.
        let thread = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    std::thread::sleep(Duration::from_millis(5));
                    // SAFETY: the other thread ends only after this scope.
                    unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
                }
                drop(locked);
            });
            one.with(|link, t| link.ask(t, 1, 0));
        });
        assert!(one.shared.is_some());
    }

    #[test]
    fn processes_with_other_settings_are_refused() {
        let folder = Folder::new("other");
        let path = folder.0.join("link");
        sender(leaked(TEXT), &path).with(|link, t| link.ask(t, 1, 0));
        let file = open(&path).unwrap();
        let of = |text: &str| {
            let settings = Settings::parse(text).unwrap();
            let locked = Locked::new(&file).unwrap();
            locked
                .link(&settings)
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        of(TEXT).unwrap();
        let why = of("rate=2Gbit/s;qos_vlarb_low=0:1,1:4").unwrap_err();
        assert!(why.contains("other settings"), "{why}");
    }

    #[test]
    fn a_level_and_a_class_follow_from_each_other_only_with_lanes() {
        // This process has no settings.
        assert_eq!(service(3, 0), (3, 0));
        assert_eq!(service(0, 0x60), (0, 0x60));
    }
}
