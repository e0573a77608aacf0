//! The trunks of this process: opens one when enough queue pairs have the same peer, and accepts those of peers.
//!
//! The end that accepted a queue pair's connection offers a trunk, with the port at which its process accepts them. The other end opens
//! the trunk when [`Config::trunk`](crate::config::Config::trunk) queue pairs have received the same offer. Until then their streams stay on
//! their own connections. Two processes share one trunk, whichever of them has opened it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::llp::mpa::startup::{InitiatorConfig, Request};

use crate::config::config;
use crate::connect::qpn_port::{self, TRUNK};
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::trunk::{Member, OPENED, Trunk};
use crate::process::PerProcess;
use crate::random::random_u32;

/// A queue pair that waits until a trunk is open.
pub(crate) trait Waiting: Member {
    /// The trunk is open, or cannot be opened.
    fn trunk_opened(&self, trunk: Option<&Arc<Trunk>>);
}

/// The queue pairs that have received offers of the same process.
#[derive(Default)]
struct Group {
    trunk: Weak<Trunk>,
    /// Whether this end is opening the trunk.
    is_opening: bool,
    waiting: Vec<Weak<dyn Waiting>>,
}

/// The trunks of this process.
#[derive(Default)]
struct Trunks {
    /// By the address and port at which the peer's process accepts trunks.
    groups: HashMap<SocketAddr, Group>,
    /// All open trunks.
    all: Vec<Weak<Trunk>>,
}

impl Trunks {
    /// The group of the process that accepts trunks at `peer`. `None` if there are too many groups.
    fn group(&mut self, peer: SocketAddr) -> Option<&mut Group> {
        let is_new = !self.groups.contains_key(&peer);
        if is_new && self.groups.len() >= bounds::TRUNKS {
            self.groups.retain(|_, group| {
                group.waiting.retain(|m| m.strong_count() > 0);
                !group.waiting.is_empty() || group.trunk.strong_count() > 0
            });
            if self.groups.len() >= bounds::TRUNKS {
                return None;
            }
        }
        Some(self.groups.entry(peer).or_default())
    }

    fn add(&mut self, trunk: &Arc<Trunk>) {
        self.all.retain(|trunk| trunk.strong_count() > 0);
        self.all.push(Arc::downgrade(trunk));
    }

    fn open(&self) -> impl Iterator<Item = Arc<Trunk>> {
        let open = self.all.iter().filter_map(Weak::upgrade);
        open.filter(|trunk| trunk.is_open())
    }
}

static TRUNKS: PerProcess<Mutex<Trunks>> =
    PerProcess::new(|| Mutex::new(Rank::Trunks, Trunks::default()));

/// Connections of reliable queue pairs in this process.
static STREAMS: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));

/// Counts a connection of a reliable queue pair.
#[derive(Debug)]
pub(crate) struct CountedStream;

impl CountedStream {
    pub(crate) fn new() -> Self {
        qpn_port::set_incoming_trunk(accept);
        STREAMS.get().fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for CountedStream {
    fn drop(&mut self) {
        // A connection that was counted before a fork is not part of the child's count.
        let _ = STREAMS
            .get()
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

/// The port to offer; `None` if this process has so few connections that no trunk is opened.
pub(crate) fn port_to_offer() -> Option<u16> {
    let least = config().trunk?.least;
    let enough = STREAMS.get().load(Ordering::Relaxed) >= least;
    qpn_port::first_number().filter(|_| enough)
}

/// Returns the trunk to the process that accepts trunks at `peer`. `None`: `member` is told when it is open.
pub(crate) fn seek(
    engine: &'static Engine,
    local: IpAddr,
    peer: SocketAddr,
    member: Weak<dyn Waiting>,
) -> Option<Arc<Trunk>> {
    let least = config().trunk.map_or(usize::MAX, |trunk| trunk.least);
    let mut trunks = TRUNKS.get().lock();
    let group = trunks.group(peer)?;
    if let Some(trunk) = group.trunk.upgrade().filter(|trunk| trunk.is_open()) {
        return Some(trunk);
    }
    if group.waiting.len() == group.waiting.capacity() {
        group.waiting.retain(|m| m.strong_count() > 0);
    }
    group.waiting.push(member);
    if group.is_opening || group.waiting.len() < least {
        return None;
    }
    group.waiting.retain(|m| m.strong_count() > 0);
    if group.waiting.len() < least {
        return None;
    }
    group.is_opening = true;
    drop(trunks);
    let number = random_u32() & !OPENED;
    let own_port = qpn_port::first_number().unwrap_or(0);
    let mut private_data = TRUNK.to_vec();
    private_data.extend_from_slice(&number.to_be_bytes());
    private_data.extend_from_slice(&own_port.to_be_bytes());
    let dial = Dial {
        peer,
        bind: Some(SocketAddr::new(local, 0)),
        config: InitiatorConfig {
            private_data,
            ..InitiatorConfig::default()
        },
        timeout: REPLY_TIMEOUT,
        retry_refused: Duration::ZERO,
        port_space: None,
    };
    let dialer = Arc::new(Dialer {
        engine,
        peer,
        number,
    });
    if let Err(e) = Startup::dial(engine, dialer, dial) {
        log!(Info, "cannot open a trunk to {peer}: {e}");
        // The queue pairs stay on their connections, and a later offer tries again. The locks that the caller holds do not permit to tell them
        // that now.
        if let Some(group) = TRUNKS.get().lock().groups.get_mut(&peer) {
            group.is_opening = false;
        }
    }
    None
}

/// The trunk to a process of the peer's host that has this name at the other end.
pub(crate) fn find(peer: IpAddr, name: u32) -> Option<Arc<Trunk>> {
    let trunks = TRUNKS.get().lock();
    let mut open = trunks.open();
    open.find(|trunk| trunk.name_at_peer() == name && trunk.peer == peer)
}

/// Accepts a trunk of a process that accepts trunks at `port`.
fn accept(engine: &'static Engine, startup: &Arc<Startup>, number: u32, port: u16) -> bool {
    if config().trunk.is_none() || number & OPENED != 0 {
        return false;
    }
    let peer = startup.peer.ip();
    let from = SocketAddr::new(peer, port);
    let mut trunks = TRUNKS.get().lock();
    let of_peer = trunks.open().filter(|trunk| trunk.peer == peer);
    let (mut count, mut is_known) = (0, false);
    for trunk in of_peer {
        count += 1;
        is_known |= trunk.name_at_peer() == number | OPENED;
    }
    if is_known || count >= bounds::TRUNKS_PEER || trunks.open().count() >= bounds::TRUNKS {
        return false;
    }
    let Some(group) = trunks.group(from) else {
        return false;
    };
    // If both ends open a trunk at the same time, that of the smaller address and port is used.
    if group.is_opening
        && let (Some(local), Some(own_port)) = (startup.local(), qpn_port::first_number())
        && (local.ip(), own_port) < (peer, port)
    {
        return false;
    }
    let Ok(opened) = startup.accept(0, 0, &[]) else {
        return true;
    };
    match Trunk::new(engine, number, peer, false, opened.fd, opened.leftover) {
        Ok(trunk) => {
            log!(Info, "trunk of {from} accepted");
            let waiting = trunks.group(from).map(|group| {
                group.trunk = Arc::downgrade(&trunk);
                std::mem::take(&mut group.waiting)
            });
            trunks.add(&trunk);
            drop(trunks);
            tell(waiting.unwrap_or_default(), Some(&trunk));
        }
        Err(e) => log!(Info, "cannot use the trunk of {from}: {e}"),
    }
    true
}

/// Tells queue pairs that the trunk is open, or cannot be opened.
fn tell(waiting: Vec<Weak<dyn Waiting>>, trunk: Option<&Arc<Trunk>>) {
    for member in waiting.iter().filter_map(Weak::upgrade) {
        member.trunk_opened(trunk);
    }
}

/// Receives the outcome of a dial.
struct Dialer {
    engine: &'static Engine,
    peer: SocketAddr,
    number: u32,
}

impl Dialer {
    /// Uses the trunk for the queue pairs that wait. If the peer has rejected it, the queue pairs stay on their own connections, until the
    /// peer opens one, or a later offer tries again.
    fn finish(&self, trunk: Option<&Arc<Trunk>>, was_rejected: bool) {
        let waiting = {
            let mut trunks = TRUNKS.get().lock();
            if let Some(trunk) = trunk {
                trunks.add(trunk);
            }
            let Some(group) = trunks.groups.get_mut(&self.peer) else {
                return;
            };
            group.is_opening = false;
            if was_rejected {
                return;
            }
            if let Some(trunk) = trunk {
                group.trunk = Arc::downgrade(trunk);
            }
            std::mem::take(&mut group.waiting)
        };
        tell(waiting, trunk);
    }
}

impl Owner for Dialer {
    fn opened(&self, _startup: &Arc<Startup>, opened: Opened) {
        let Opened { fd, leftover, .. } = opened;
        let peer = self.peer.ip();
        let trunk = Trunk::new(self.engine, self.number, peer, true, fd, leftover);
        match &trunk {
            Ok(_) => log!(Info, "trunk to {} opened", self.peer),
            Err(e) => log!(Info, "cannot use the trunk to {}: {e}", self.peer),
        }
        self.finish(trunk.ok().as_ref(), false);
    }

    fn requested(&self, _startup: &Arc<Startup>, _request: Request) {}

    fn failed(&self, _startup: &Arc<Startup>, failure: Failure) {
        log!(Info, "cannot open a trunk to {}: {failure:?}", self.peer);
        self.finish(None, matches!(failure, Failure::Rejected { .. }));
    }
}
