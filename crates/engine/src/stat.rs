//! The counters that `anywarp stat` reads, and the socket that serves them to other processes of the same user.
//!
//! If `ANYWARP_STAT` is set, the first queue pair opens an abstract socket with the name `anywarp-stat-PID`. A process
//! of the same user or of root that connects gets the descriptor of a memory file with one line for each queue pair. The
//! counters are plain numbers under locks that the data path holds anyway, so they are counted even if `ANYWARP_STAT` is not set.

use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, acceptfrom_with, bind, listen, sendmsg, socket_with, sockopt,
};

use crate::config::config;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::tcp;
use crate::process::PerProcess;
use crate::reactor::Source;
use crate::sys::socket;

/// Largest number of clients that are served at a time. The others wait in the kernel.
const CLIENTS_PER_TURN: usize = 8;

/// The first words of the text: its format and the version of the format.
const HEADER: &str = "anywarp-stat 1";

/// An object with counters.
pub(crate) trait HasCounters: Send + Sync {
    /// Appends the kind of the object, its number and ` NAME=VALUE` for each counter.
    fn write_counters(&self, line: &mut String);
}

struct Registry {
    all: Mutex<Vec<Weak<dyn HasCounters>>>,
    server: OnceLock<()>,
}

static REGISTRY: PerProcess<Registry> = PerProcess::new(|| Registry {
    all: Mutex::new(Rank::Counted, Vec::new()),
    server: OnceLock::new(),
});

/// Registers an object whose counters `anywarp stat` shows. `make` is called only if `ANYWARP_STAT` is set.
pub(crate) fn register(engine: &'static Engine, make: impl FnOnce() -> Weak<dyn HasCounters>) {
    if !config().stat {
        return;
    }
    let registry = REGISTRY.get();
    {
        let mut all = registry.all.lock();
        if all.len() == all.capacity() {
            all.retain(|one| one.strong_count() > 0);
        }
        all.push(make());
    }
    registry.server.get_or_init(|| {
        if let Err(e) = serve(engine) {
            log!(Warn, "cannot serve counters to anywarp stat: {e}");
        }
    });
}

fn serve(engine: &'static Engine) -> rustix::io::Result<()> {
    let name = format!("anywarp-stat-{}", std::process::id());
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    bind(
        &socket,
        &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
    )?;
    listen(&socket, 16)?;
    let server = Arc::new(Server(EngineFd::new(socket), engine));
    let source = Arc::clone(&server) as Arc<dyn Source>;
    engine
        .add(source, server.0.get(), false)
        .map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::NOMEM))?;
    Ok(())
}

struct Server(EngineFd, &'static Engine);

impl Source for Server {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        for _ in 0..CLIENTS_PER_TURN {
            let Ok(client) = acceptfrom_with(self.0.get(), SocketFlags::CLOEXEC).map(|(fd, _)| fd)
            else {
                return;
            };
            if let Err(e) = answer(self.1, client.as_fd()) {
                log!(Debug, "cannot send counters to a client: {e}");
            }
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

/// Sends a client the descriptor of a file with the counters. Does not block.
fn answer(engine: &Engine, client: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let uid = sockopt::socket_peercred(client)?.uid;
    if !uid.is_root() && uid != rustix::process::geteuid() {
        return Err(rustix::io::Errno::PERM);
    }
    let memory = rustix::fs::memfd_create("anywarp-stat", MemfdFlags::CLOEXEC)?;
    let text = text(engine);
    let mut left = text.as_bytes();
    while !left.is_empty() {
        let n = rustix::io::write(&memory, left)?;
        left = left.get(n..).unwrap_or_default();
    }
    let descriptors = [memory.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    beside.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(
        client,
        &[std::io::IoSlice::new(b".")],
        &mut beside,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )?;
    Ok(())
}

fn text(engine: &Engine) -> String {
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let mut text = format!(
        "{HEADER} pid={} program={}\n",
        std::process::id(),
        program.trim().replace(' ', "_")
    );
    // The lock of the registry is released before the objects are locked.
    let all: Vec<_> = {
        let all = REGISTRY.get().all.lock();
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let _ = writeln!(text, "worker 0 wakes={}", engine.wakes());
    for one in all {
        one.write_counters(&mut text);
        text.push('\n');
    }
    text
}

/// Appends the counters of a stream, and the kernel's counters of its connection.
pub(crate) fn write_stream_counters(line: &mut String, counts: &tcp::Counters, fd: BorrowedFd<'_>) {
    for (name, value) in counts.named() {
        let _ = write!(line, " {name}={value}");
    }
    if let Some(n) = socket::tcp_retransmissions(fd) {
        let _ = write!(line, " retransmissions={n}");
    }
    if let Ok(name) = sockopt::tcp_congestion(fd) {
        let _ = write!(line, " congestion={name}");
    }
}
