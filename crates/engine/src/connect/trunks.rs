//! The trunks of this process: opens one when enough queue pairs have the same peer, and accepts those of peers.
//!
//! The end that accepted a queue pair's connection offers a trunk, with the port at which its process accepts them. The other end opens
//! the trunk when [`TrunkUse::least`](crate::config::TrunkUse::least) queue pairs have received the same offer. Until then their streams
//! stay on their own connections. Two processes share one trunk, whichever of them has opened it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::llp::mpa::startup::{InitiatorConfig, Request};

use crate::clock;
use crate::config::config;
use crate::connect::qpn_port::{self, TRUNK, TrunkRequest};
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::engine::Engine;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::trunk::{Member, OPENED, Process, Trunk};
use crate::process::PerProcess;
use crate::random::random_u32;

/// How long no trunk is opened to a process after an attempt has failed.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// A queue pair that waits until a trunk is open.
pub(crate) trait Waiting: Member {
    /// The trunk to `process` is open.
    fn trunk_opened(&self, process: &Process, trunk: &Arc<Trunk>);
}

/// The trunk to one process, and the queue pairs that wait for it.
#[derive(Default)]
struct Group {
    trunk: Weak<Trunk>,
    /// Whether this end is opening the trunk.
    is_opening: bool,
    /// When this end may try again.
    retry_at: Option<Instant>,
    waiting: Vec<Weak<dyn Waiting>>,
}

impl Group {
    fn open_trunk(&self) -> Option<Arc<Trunk>> {
        self.trunk.upgrade().filter(|trunk| trunk.is_open())
    }

    fn is_needed(&mut self) -> bool {
        self.waiting.retain(|m| m.strong_count() > 0);
        self.is_opening || !self.waiting.is_empty() || self.trunk.strong_count() > 0
    }
}

/// The trunks of this process.
#[derive(Default)]
struct Trunks {
    groups: HashMap<Process, Group>,
    /// All open trunks.
    all: Vec<Weak<Trunk>>,
}

impl Trunks {
    /// The group of a process. `None` if there are too many groups.
    fn group(&mut self, process: Process) -> Option<&mut Group> {
        if self.groups.len() >= bounds::TRUNKS && !self.groups.contains_key(&process) {
            self.groups.retain(|_, group| group.is_needed());
            if self.groups.len() >= bounds::TRUNKS {
                return None;
            }
        }
        Some(self.groups.entry(process).or_default())
    }

    fn add(&mut self, trunk: &Arc<Trunk>) {
        self.all.retain(|trunk| trunk.strong_count() > 0);
        self.all.push(Arc::downgrade(trunk));
    }

    fn live(&self) -> impl Iterator<Item = Arc<Trunk>> {
        self.all.iter().filter_map(Weak::upgrade)
    }
}

static TRUNKS: PerProcess<Mutex<Trunks>> =
    PerProcess::new(|| Mutex::new(Rank::Trunks, Trunks::default()));

/// The number of this process in its offers.
static TOKEN: PerProcess<OnceLock<u32>> = PerProcess::new(OnceLock::new);

fn own_token() -> u32 {
    *TOKEN.get().get_or_init(random_u32)
}

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

/// Whether every connection moves to a trunk.
pub(crate) fn are_eager() -> bool {
    config().trunk.is_some_and(|trunk| trunk.after == 0)
}

/// The number and the port of this process for an offer; `None` if it has so few connections that no trunk is opened.
pub(crate) fn to_offer() -> Option<(u32, u16)> {
    let least = config().trunk?.least;
    let enough = STREAMS.get().load(Ordering::Relaxed) >= least;
    let port = qpn_port::first_number().filter(|_| enough)?;
    Some((own_token(), port))
}

/// Returns the open trunk to `process`. If there is none, returns `None`, and [`Waiting::trunk_opened`] of `member` is called when the trunk opens.
/// A new trunk is opened from the address `local`.
pub(crate) fn seek(
    engine: &'static Engine,
    local: SocketAddr,
    process: Process,
    member: Weak<dyn Waiting>,
) -> Option<Arc<Trunk>> {
    let least = config().trunk.map_or(usize::MAX, |trunk| trunk.least);
    {
        let mut trunks = TRUNKS.get().lock();
        let group = trunks.group(process)?;
        if let Some(trunk) = group.open_trunk() {
            return Some(trunk);
        }
        if !group.waiting.iter().any(|m| Weak::ptr_eq(m, &member)) {
            group.waiting.retain(|m| m.strong_count() > 0);
            group.waiting.push(member);
        }
        let now = clock::now();
        let must_wait = group.retry_at.is_some_and(|at| now < at);
        if group.is_opening || must_wait || group.waiting.len() < least {
            return None;
        }
        group.is_opening = true;
    }
    let number = random_u32() & !OPENED;
    let own_port = qpn_port::first_number().unwrap_or(0);
    let private_data = [
        &TRUNK[..],
        &number.to_be_bytes(),
        &process.token.to_be_bytes(),
        &own_port.to_be_bytes(),
        &own_token().to_be_bytes(),
    ];
    let dial = Dial {
        peer: process.address,
        bind: Some(local),
        config: InitiatorConfig {
            private_data: private_data.concat(),
            ..InitiatorConfig::default()
        },
        timeout: REPLY_TIMEOUT,
        retry_refused: Duration::ZERO,
        port_space: None,
    };
    let dialer = Arc::new(Dialer {
        engine,
        process,
        number,
    });
    if let Err(e) = Startup::dial(engine, dialer, dial) {
        log!(Info, "cannot open a trunk to {}: {e}", process.address);
        // The queue pairs stay on their connections, and a later offer tries again. They cannot be told now, because the caller holds locks.
        if let Some(group) = TRUNKS.get().lock().groups.get_mut(&process) {
            group.is_opening = false;
            group.retry_at = Some(clock::now() + RETRY_PAUSE);
        }
    }
    None
}

/// The trunk to the host `peer` that the other end calls `name`.
pub(crate) fn find(peer: IpAddr, name: u32) -> Option<Arc<Trunk>> {
    let trunks = TRUNKS.get().lock();
    let mut live = trunks.live();
    live.find(|trunk| trunk.name_at_peer() == name && trunk.peer == peer)
}

/// Accepts a trunk.
fn accept(engine: &'static Engine, startup: &Arc<Startup>, request: &TrunkRequest) -> bool {
    let (number, mut address) = (request.number, startup.peer);
    address.set_port(request.port);
    let Some(local) = startup.local() else {
        return false;
    };
    let is_meant = request.target == own_token() && number & OPENED == 0;
    if config().trunk.is_none() || !is_meant {
        return false;
    }
    let process = Process {
        local: local.ip(),
        address,
        token: request.process,
    };
    let peer = startup.peer.ip();
    let mut trunks = TRUNKS.get().lock();
    let (mut all, mut of_peer, mut is_known) = (0, 0, false);
    for trunk in trunks.live() {
        all += 1;
        of_peer += usize::from(trunk.peer == peer);
        is_known |= trunk.peer == peer && trunk.name_at_peer() == number | OPENED;
    }
    if is_known || of_peer >= bounds::TRUNKS_PEER || all >= bounds::TRUNKS {
        return false;
    }
    let Some(group) = trunks.group(process) else {
        return false;
    };
    // If both ends open a trunk at the same time, that of the smaller address and port is used.
    let own_port = qpn_port::first_number().unwrap_or(0);
    if group.is_opening && (local.ip(), own_port) < (peer, request.port) {
        return false;
    }
    let Ok(Opened { fd, leftover, .. }) = startup.accept(0, 0, &[]) else {
        return true;
    };
    match Trunk::new(engine, (number, peer, false), fd, leftover, first_used) {
        Ok(trunk) => {
            log!(Info, "trunk of {address} accepted");
            if let Some(group) = trunks.group(process)
                && group.open_trunk().is_none()
            {
                group.trunk = Arc::downgrade(&trunk);
            }
            trunks.add(&trunk);
        }
        Err(e) => log!(Info, "cannot use the trunk of {address}: {e}"),
    }
    true
}

/// Called when the first bytes have arrived on a trunk that a peer has opened: the queue pairs that wait for it may use it, because the
/// peer knows that it is open.
fn first_used(trunk: &Arc<Trunk>) {
    let found = {
        let mut trunks = TRUNKS.get().lock();
        let mut groups = trunks.groups.iter_mut();
        let group =
            groups.find(|(_, group)| std::ptr::eq(group.trunk.as_ptr(), &raw const **trunk));
        group.map(|(process, group)| (*process, std::mem::take(&mut group.waiting)))
    };
    if let Some((process, waiting)) = found {
        tell(&process, waiting, trunk);
    }
}

/// Tells queue pairs that the trunk is open.
fn tell(process: &Process, waiting: Vec<Weak<dyn Waiting>>, trunk: &Arc<Trunk>) {
    for member in waiting.iter().filter_map(Weak::upgrade) {
        member.trunk_opened(process, trunk);
    }
}

/// Receives the outcome of a dial.
struct Dialer {
    engine: &'static Engine,
    process: Process,
    number: u32,
}

impl Dialer {
    /// Uses the trunk for the queue pairs that wait. Without one, they stay on their own connections, until the peer opens one, or a later offer
    /// tries again. They send no answer to the offer then: the peer may have ended, and its kernel would answer with a reset.
    fn finish(&self, trunk: Option<&Arc<Trunk>>) {
        let waiting = {
            let mut trunks = TRUNKS.get().lock();
            if let Some(trunk) = trunk {
                trunks.add(trunk);
                trunk.begin();
            }
            let Some(group) = trunks.groups.get_mut(&self.process) else {
                return;
            };
            group.is_opening = false;
            let Some(trunk) = trunk else {
                group.retry_at = Some(clock::now() + RETRY_PAUSE);
                return;
            };
            group.trunk = Arc::downgrade(trunk);
            std::mem::take(&mut group.waiting)
        };
        if let Some(trunk) = trunk {
            tell(&self.process, waiting, trunk);
        }
    }
}

impl Owner for Dialer {
    fn opened(&self, _startup: &Arc<Startup>, opened: Opened) {
        let Opened { fd, leftover, .. } = opened;
        let Process { address, .. } = self.process;
        let end = (self.number, address.ip(), true);
        let trunk = Trunk::new(self.engine, end, fd, leftover, first_used);
        match &trunk {
            Ok(_) => log!(Info, "trunk to {address} opened"),
            Err(e) => log!(Info, "cannot use the trunk to {address}: {e}"),
        }
        self.finish(trunk.ok().as_ref());
    }

    fn requested(&self, _startup: &Arc<Startup>, _request: Request) {}

    fn failed(&self, _startup: &Arc<Startup>, failure: Failure) {
        let address = self.process.address;
        log!(Info, "cannot open a trunk to {address}: {failure:?}");
        self.finish(None);
    }
}
