//! What `anywarp stat` reads: counters of queue pairs, told to those who ask.
//!
//! Only with `ANYWARP_STAT` set. Then the first queue pair opens a socket with the name `anywarp-stat-PID`; whoever of the
//! same user connects gets a descriptor of memory with a line for each queue pair. The counters themselves are plain
//! numbers under locks that the data path holds anyway, and are always there.

use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use anywarp_core::datagram::Kind;
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, acceptfrom_with, bind, listen, sendmsg, socket_with, sockopt,
};

use crate::config::config;
use crate::dgram::DgramQp;
use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::log;
use crate::net::tcp;
use crate::process::PerProcess;
use crate::reactor::Source;
use crate::sys::socket;

/// Those who ask at once; the others wait in the kernel for the next look.
const TURN: usize = 8;

/// First word of what is told, with the number of its format.
const HEAD: &str = "anywarp-stat 1";

/// Something with counters.
pub(crate) trait Counted: Send + Sync {
    /// Adds ` NAME=VALUE` for each, behind a word for its kind and its number.
    fn tell(&self, line: &mut String);
}

#[derive(Default)]
struct Known {
    all: Mutex<Vec<Weak<dyn Counted>>>,
    server: OnceLock<()>,
}

static KNOWN: PerProcess<Known> = PerProcess::new(Known::default);

/// A queue pair was made.
pub(crate) fn know(engine: &'static Engine, who: impl FnOnce() -> Weak<dyn Counted>) {
    if !config().stat {
        return;
    }
    let known = KNOWN.get();
    {
        let mut all = known.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == all.capacity() {
            all.retain(|one| one.strong_count() > 0);
        }
        all.push(who());
    }
    known.server.get_or_init(|| {
        if let Err(e) = serve(engine) {
            log!(Warn, "nobody can ask for counters: {e}");
        }
    });
}

/// A queue pair of datagrams was made.
pub fn know_datagrams(engine: &'static Engine, qp: &Arc<DgramQp>) {
    know(engine, || {
        let counted: Arc<dyn Counted> = Arc::clone(qp) as _;
        Arc::downgrade(&counted)
    });
}

impl Counted for DgramQp {
    fn tell(&self, line: &mut String) {
        let kind = match self.kind {
            Kind::Ud => "ud",
            Kind::Uc => "uc",
            Kind::Rd => "rd",
            Kind::ReliableUc => "uc/rd",
            Kind::Rc => "rc/rd",
        };
        let _ = write!(line, "{kind} 0x{:06x}", self.number());
        for (name, value) in self.counters().named() {
            let _ = write!(line, " {name}={value}");
        }
        let (sent, found, empty) = self.calls();
        let _ = write!(
            line,
            " tx_calls={sent} port_rx_calls={} port_rx_empty={empty}",
            found + empty
        );
    }
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
        for _ in 0..TURN {
            let Ok(asker) = acceptfrom_with(self.0.get(), SocketFlags::CLOEXEC).map(|(fd, _)| fd)
            else {
                return;
            };
            if let Err(e) = answer(self.1, asker.as_fd()) {
                log!(
                    Debug,
                    "somebody who asked for counters did not get them: {e}"
                );
            }
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

/// Hands over what there is to be told. Waits for nobody.
fn answer(engine: &Engine, asker: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let uid = sockopt::socket_peercred(asker)?.uid;
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
        asker,
        &[std::io::IoSlice::new(b".")],
        &mut beside,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )?;
    Ok(())
}

fn text(engine: &Engine) -> String {
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let mut text = format!(
        "{HEAD} pid={} program={}\n",
        std::process::id(),
        program.trim().replace(' ', "_")
    );
    // Their locks are taken without ours.
    let all: Vec<_> = {
        let all = KNOWN
            .get()
            .all
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let _ = writeln!(text, "worker 0 wakes={}", engine.wakes());
    for one in all {
        one.tell(&mut text);
        text.push('\n');
    }
    text
}

/// Adds what is counted of a stream, and what the kernel knows of its connection.
pub(crate) fn tell_stream(line: &mut String, counts: &tcp::Counters, fd: BorrowedFd<'_>) {
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
