//! The GID table: the IP addresses of the host. Each address keeps its index for as long as the host has it.
//!
//! Address vectors contain the index of their source address, so an index must not change when an address is added or
//! removed: a removed address leaves an empty entry, and a new address uses the first empty entry. A netlink socket
//! reports changes. Every reader of the table checks that socket first, so no reader sees an outdated table. The
//! worker notifies the open devices (`ibv_get_async_event(3)`).
//!
//! The port is the network interface that has the address of the first entry or, while that entry is empty, the interface that had it last.
//! The port is down while that interface is down.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::address::{Gid, lid_of, listing, loopback, unused_address};
use crate::clock;
use crate::engine::Engine;
use crate::events::event;
use crate::fd::EngineFd;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log;
use crate::process::{Inherited, PerProcess};
use crate::reactor::{Source, Token};
use crate::sys::host;
use crate::sys::host::HostLink;
use crate::sys::thread::Uncancelled;

/// Entries of the GID table.
///
/// Almost every host has fewer addresses, so some entries are empty, as on an adapter. There are two
/// reasons against a larger table: programs query each entry, and an address vector has one byte for the index.
pub const GID_ENTRIES: usize = 64;
/// Pause after which the worker reads the addresses again when reading them failed, unless a reader of the table does
/// so first.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Netlink messages that one check for changes receives, at most.
const MESSAGES_PER_TURN: usize = 256;
/// Netlink groups that report changes: `RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// Changes of the port and its addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PortChanges {
    /// Numbers of asynchronous events, in the order in which they happened.
    pub(crate) events: Vec<u32>,
    /// Addresses of interfaces whose hardware address has changed.
    pub(crate) moved: Vec<IpAddr>,
}

impl PortChanges {
    fn is_empty(&self) -> bool {
        self.events.is_empty() && self.moved.is_empty()
    }
}

/// An object that is notified of changes of the port.
pub(crate) trait Listener: Send + Sync {
    /// The port or its addresses changed.
    fn port_changed(&self, changes: &PortChanges);
}

/// The contents of the GID table.
#[derive(Debug, Default)]
struct GidTable {
    entries: Vec<Option<Gid>>,
    links: Vec<HostLink>,
    /// The interface of the port.
    home: Option<u32>,
    up: bool,
    changes: PortChanges,
    /// Whether reading the addresses from the host failed, and has to be repeated.
    stale: bool,
    /// When the worker repeats the reading that failed.
    again: Option<Instant>,
}

impl GidTable {
    /// A table with the present addresses of the host.
    fn of_host() -> Self {
        let mut gid_table = Self::default();
        gid_table.refresh(listing(), host::host_links());
        if gid_table.stale {
            gid_table.update(vec![loopback()], Vec::new());
        }
        gid_table.changes = PortChanges::default();
        gid_table
    }

    /// Updates the table with the addresses and links of the host. If reading failed (`None`), the table keeps its
    /// addresses.
    fn refresh(&mut self, addresses: Option<Vec<Gid>>, links: Option<Vec<HostLink>>) {
        self.stale = addresses.is_none() || links.is_none();
        if let (Some(addresses), Some(links)) = (addresses, links) {
            self.update(addresses, links);
        }
    }

    #[cfg(test)]
    fn new(addresses: Vec<Gid>, links: Vec<HostLink>) -> Self {
        let mut gid_table = Self::default();
        gid_table.update(addresses, links);
        gid_table.changes = PortChanges::default();
        gid_table
    }

    fn lid(&self) -> u16 {
        let first = self.entries.iter().flatten().next();
        first.map_or(1, |g| lid_of(g.ip))
    }

    /// Updates the table, and adds the changes to `changes`.
    fn update(&mut self, addresses: Vec<Gid>, links: Vec<HostLink>) {
        let lid = self.lid();
        let mut changed = false;
        for entry in &mut self.entries {
            let Some(before) = entry else { continue };
            // An address may belong to another interface now, or its interface may have another name. It keeps its index.
            let now = addresses.iter().find(|g| g.raw == before.raw);
            if now != Some(before) {
                *entry = now.cloned();
                changed = true;
            }
        }
        for gid in addresses {
            if self.entries.iter().flatten().any(|g| g.raw == gid.raw) {
                continue;
            }
            let room = self.entries.len() < GID_ENTRIES;
            match self.entries.iter_mut().find(|entry| entry.is_none()) {
                Some(entry) => *entry = Some(gid),
                None if room => self.entries.push(Some(gid)),
                // The table is full: it keeps the addresses that it has.
                None => continue,
            }
            changed = true;
        }
        if let Some(Some(first)) = self.entries.first() {
            self.home = Some(first.interface);
        }
        // If links cannot be listed, the port counts as up.
        let up = links.is_empty() || links.iter().any(|l| Some(l.index) == self.home && l.up);
        if up != self.up {
            self.up = up;
            self.changes.events.push(if up {
                event::PORT_ACTIVE
            } else {
                event::PORT_ERR
            });
        }
        if changed {
            self.changes.events.push(event::GID_CHANGE);
        }
        if self.lid() != lid {
            self.changes.events.push(event::LID_CHANGE);
        }
        for link in &links {
            let before = self.links.iter().find(|l| l.index == link.index);
            if before.is_some_and(|l| l.hardware != link.hardware) {
                let here = self.entries.iter().flatten();
                let here = here.filter(|g| g.interface == link.index);
                self.changes.moved.extend(here.map(|g| g.ip));
            }
        }
        self.links = links;
    }
}

/// The GID table of this process, and the socket that reports its changes.
struct Watch {
    engine: &'static Engine,
    /// The netlink socket that reports changes. Without it, every reader of the table reads the addresses from the
    /// host.
    fd: Option<EngineFd>,
    token: OnceLock<Token>,
    gid_table: Mutex<GidTable>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
}

static WATCH: PerProcess<OnceLock<Arc<Watch>>> = PerProcess::new(OnceLock::new);

fn socket() -> std::io::Result<EngineFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let family = AddressFamily::NETLINK;
    // Protocol 0 is NETLINK_ROUTE.
    let fd = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
    rustix::net::bind(&fd, &SocketAddrNetlink::new(0, GROUPS))?;
    Ok(EngineFd::new(fd))
}

impl Watch {
    /// The watch of this process. It is created when the first device is opened.
    fn of(engine: &'static Engine) -> &'static Arc<Self> {
        WATCH.get().get_or_init(|| {
            // The socket is opened before the addresses are read, so that it reports every change after the reading.
            let fd = socket()
                .inspect_err(|e| log!(Info, "cannot watch the host's addresses: {e}"))
                .ok();
            let gid_table = GidTable::of_host();
            let first = gid_table.entries.iter().flatten().next();
            if !gid_table.stale
                && let Some(warning) = first.and_then(unused_address)
            {
                log!(Warn, "{warning}");
            }
            let watch = Arc::new(Self {
                engine,
                fd,
                token: OnceLock::new(),
                gid_table: Mutex::new(Rank::Gids, gid_table),
                listeners: Mutex::new(Rank::PortListeners, Vec::new()),
            });
            let source = Arc::clone(&watch) as Arc<dyn Source>;
            let token = engine.reserve(source);
            let _ = watch.token.set(token);
            if let Some(fd) = &watch.fd
                && let Err(e) = engine.watch(token, fd.get(), false)
            {
                // The table is still up to date for its readers: each of them checks the socket.
                log!(Info, "cannot wait for changes of the host's addresses: {e}");
            }
            watch
        })
    }

    fn lock(&self) -> MutexGuard<'_, GidTable> {
        self.gid_table.lock()
    }

    /// Whether the addresses may have changed since the last call: the kernel has reported a change, or cannot report any.
    fn changed(&self) -> bool {
        let Some(fd) = &self.fd else { return true };
        let mut changed = false;
        for _ in 0..MESSAGES_PER_TURN {
            // The content of the message is not needed, because all addresses are read from the host again.
            let mut message = [0_u8; 1];
            match rustix::net::recv(fd.get(), &mut message, RecvFlags::TRUNC) {
                Err(rustix::io::Errno::AGAIN) => break,
                // `NOBUFS`: more messages arrived than the socket has room for.
                Ok(_) | Err(rustix::io::Errno::NOBUFS) => changed = true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return true,
            }
        }
        changed
    }

    /// The table, updated if something changed. The worker notifies the listeners, because the caller may hold locks
    /// that they need.
    fn current(&self) -> MutexGuard<'_, GidTable> {
        let mut gid_table = self.lock();
        if self.changed() || gid_table.stale {
            // The caller may be a thread of the program that polls, and reading the addresses has cancellation points.
            let _inside = Uncancelled::new();
            gid_table.refresh(listing(), host::host_links());
            let now = clock::now();
            let waits = gid_table.again.is_some_and(|at| at > now);
            if let Some(token) = self.token.get() {
                if gid_table.stale && !waits {
                    gid_table.again = Some(now + RETRY_INTERVAL);
                    self.engine.deadline(*token, now + RETRY_INTERVAL);
                } else if !gid_table.stale && !gid_table.changes.is_empty() {
                    self.engine.deadline(*token, now);
                }
            }
        }
        gid_table
    }

    fn notify_listeners(&self) {
        let changes = std::mem::take(&mut self.current().changes);
        if changes.is_empty() {
            return;
        }
        log!(
            Info,
            "the port or the addresses of the host have changed: {changes:?}"
        );
        let listeners: Vec<_> = {
            let mut all = self.listeners.lock();
            all.retain(|l| l.strong_count() > 0);
            all.iter().filter_map(Weak::upgrade).collect()
        };
        for listener in listeners {
            listener.port_changed(&changes);
        }
    }
}

impl Source for Watch {
    fn ready(self: Arc<Self>, _readable: bool, _writable: bool, _now: Instant) {
        self.notify_listeners();
    }

    fn timeout(self: Arc<Self>, _now: Instant) {
        self.notify_listeners();
    }
}

/// Notifies the subscriber `who` of changes of the port from now on.
pub(crate) fn listen(engine: &'static Engine, who: Weak<dyn Listener>) {
    let mut all = Watch::of(engine).listeners.lock();
    if all.len() == all.capacity() {
        all.retain(|l| l.strong_count() > 0);
    }
    all.push(who);
}

fn current<R>(at: impl FnOnce(&GidTable) -> R) -> R {
    match WATCH.get().get() {
        Some(watch) => at(&watch.current()),
        // The device has not been opened yet.
        None => at(&GidTable::of_host()),
    }
}

/// The entries of the GID table, up to the last one that was ever in use.
pub fn table() -> Vec<Option<Gid>> {
    current(|gid_table| gid_table.entries.clone())
}

/// The addresses of the GID table, without its empty entries.
pub fn gids() -> Vec<Gid> {
    current(|gid_table| gid_table.entries.iter().flatten().cloned().collect())
}

/// The address at an index of the GID table.
pub fn at(index: usize) -> Option<Gid> {
    current(|gid_table| gid_table.entries.get(index).cloned().flatten())
}

/// Returns whether binding to an address binds the identifier to the device. A loopback address does not, as in the kernel's rdma_cm,
/// unless the first address of the device is a loopback address. libfabric depends on this: it resolves "localhost" to find out
/// whether it may offer the addresses of the device.
pub fn names_device(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let own = || at(0).is_some_and(|first| first.ip.is_loopback());
    !ip.is_unspecified() && (!ip.is_loopback() || own())
}

/// The index of an address in the GID table.
pub fn index_of(ip: IpAddr) -> Option<u8> {
    current(|gid_table| {
        let mut entries = gid_table.entries.iter();
        let index = entries.position(|e| e.as_ref().is_some_and(|g| g.ip == ip))?;
        u8::try_from(index).ok()
    })
}

/// Whether the port's interface is up.
pub fn is_up() -> bool {
    current(|gid_table| gid_table.up)
}

/// The address of a LID. It is the first address of this host if that has the LID. Otherwise it is the address in the same network
/// whose low 16 bits, except bit 14, are the LID, or `None` if the first address is IPv6. The other addresses of this host are not
/// searched, because an address such as 127.0.0.1 would hide the address x.y.0.1, which has the same LID.
pub fn ip_of_lid(lid: u16) -> Option<IpAddr> {
    let first = gids().first()?.ip;
    if lid_of(first) == lid {
        return Some(first);
    }
    match first {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            let [hi, lo] = lid.to_be_bytes();
            // Bit 14 is not part of the LID, so it is copied from the first address of this host.
            Some(IpAddr::V4(Ipv4Addr::new(a, b, hi | (c & 0x40), lo)))
        }
        IpAddr::V6(_) => None,
    }
}

/// The node GUID: a number that differs between hosts and stays the same. It is derived from the hardware address of the interface
/// that has the first address of the GID table, or from the first address if the interface has no hardware address. Without addresses
/// the GUID is a constant.
pub fn node_guid() -> u64 {
    static GUID: Inherited<u64> = Inherited::new(|| {
        let first = gids();
        let Some(gid) = first.first() else {
            return 0x0200_00ff_fe00_0001;
        };
        let mac = std::fs::read_to_string(format!("/sys/class/net/{}/address", gid.name))
            .unwrap_or_default();
        let bytes: Vec<u8> = mac
            .trim()
            .split(':')
            .filter_map(|b| u8::from_str_radix(b, 16).ok())
            .collect();
        match bytes.as_slice() {
            [a, b, c, d, e, f] if bytes.iter().any(|b| *b != 0) => {
                // EUI-64 from EUI-48: the middle bytes are ff fe, and the local bit is inverted.
                u64::from_be_bytes([a ^ 2, *b, *c, 0xff, 0xfe, *d, *e, *f])
            }
            _ => {
                let mut low = [0_u8; 8];
                if let Some(tail) = gid.raw.get(8..) {
                    low.copy_from_slice(tail);
                }
                u64::from_be_bytes(low) | 0x0200_0000_0000_0000
            }
        }
    });
    *GUID.get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::gid_of;

    fn gid(ip: &str, interface: u32) -> Gid {
        let ip: IpAddr = ip.parse().unwrap();
        Gid {
            raw: gid_of(ip),
            ip,
            interface,
            name: format!("eth{interface}"),
        }
    }

    fn link(index: u32, up: bool, last: u8) -> HostLink {
        HostLink {
            index,
            up,
            hardware: vec![2, 0, 0, 0, 0, last],
        }
    }

    fn shown(gid_table: &GidTable) -> Vec<Option<String>> {
        let text = |g: &Gid| g.ip.to_string();
        gid_table
            .entries
            .iter()
            .map(|e| e.as_ref().map(text))
            .collect()
    }

    fn some(ips: &[&str]) -> Vec<Option<String>> {
        let text = |ip: &&str| (!ip.is_empty()).then(|| (*ip).to_owned());
        ips.iter().map(text).collect()
    }

    #[test]
    fn an_address_keeps_its_index_and_a_new_one_gets_the_first_empty_entry() {
        let links = || vec![link(1, true, 1), link(2, true, 2)];
        let (a, b, c, d) = (
            gid("10.0.0.1", 1),
            gid("10.0.0.2", 1),
            gid("10.0.0.3", 2),
            gid("10.0.0.4", 2),
        );
        let mut gid_table = GidTable::new(vec![a.clone(), b.clone(), c.clone()], links());
        assert_eq!(gid_table.changes, PortChanges::default());
        gid_table.update(vec![a.clone(), c.clone()], links());
        assert_eq!(shown(&gid_table), some(&["10.0.0.1", "", "10.0.0.3"]));
        assert_eq!(
            std::mem::take(&mut gid_table.changes).events,
            [event::GID_CHANGE]
        );
        // The order in which the host lists the addresses does not matter.
        gid_table.update(vec![c.clone(), a.clone()], links());
        assert_eq!(shown(&gid_table), some(&["10.0.0.1", "", "10.0.0.3"]));
        assert!(gid_table.changes.is_empty());
        gid_table.update(vec![d, a, b, c], links());
        assert_eq!(
            shown(&gid_table),
            some(&["10.0.0.1", "10.0.0.4", "10.0.0.3", "10.0.0.2"])
        );
    }

    #[test]
    fn an_address_keeps_its_index_when_its_interface_changes() {
        let links = || vec![link(1, true, 1), link(2, true, 2)];
        let (a, b, c) = (gid("10.0.0.1", 1), gid("10.0.0.2", 1), gid("10.0.0.3", 2));
        let mut gid_table = GidTable::new(vec![a, b.clone(), c.clone()], links());
        gid_table.update(vec![b.clone(), c.clone()], links());
        gid_table.changes = PortChanges::default();
        // The interface of the address gets another name.
        let named = Gid {
            name: "lan".into(),
            ..b
        };
        gid_table.update(vec![c.clone(), named.clone()], links());
        assert_eq!(shown(&gid_table), some(&["", "10.0.0.2", "10.0.0.3"]));
        // The address moves to another interface.
        let moved = Gid {
            interface: 2,
            ..named
        };
        gid_table.update(vec![moved.clone(), c], links());
        assert_eq!(shown(&gid_table), some(&["", "10.0.0.2", "10.0.0.3"]));
        assert_eq!(gid_table.entries.get(1), Some(&Some(moved)));
        assert_eq!(
            gid_table.changes.events,
            [event::GID_CHANGE, event::GID_CHANGE]
        );
    }

    /// Reading the addresses fails, for example, when there is no free descriptor. No change is reported then.
    #[test]
    fn a_host_that_does_not_answer_keeps_its_addresses() {
        let (a, b) = (gid("10.0.0.1", 1), gid("10.0.0.2", 1));
        let links = || vec![link(1, true, 1)];
        let mut gid_table = GidTable::new(vec![a.clone(), b.clone()], links());
        gid_table.refresh(None, Some(links()));
        assert!(gid_table.stale && gid_table.changes.is_empty());
        assert_eq!(shown(&gid_table), some(&["10.0.0.1", "10.0.0.2"]));
        gid_table.refresh(Some(vec![a.clone(), b]), None);
        assert!(gid_table.stale);
        gid_table.refresh(Some(vec![a]), Some(links()));
        assert!(!gid_table.stale);
        assert_eq!(shown(&gid_table), some(&["10.0.0.1", ""]));
        assert_eq!(gid_table.changes.events, [event::GID_CHANGE]);
    }

    #[test]
    fn the_table_has_an_end() {
        let many: Vec<_> = (0..200).map(|n| gid(&format!("10.1.0.{n}"), 1)).collect();
        let mut gid_table = GidTable::new(many.clone(), vec![link(1, true, 1)]);
        assert_eq!(gid_table.entries.len(), GID_ENTRIES);
        gid_table.update(many.into_iter().skip(1).collect(), vec![link(1, true, 1)]);
        assert_eq!(shown(&gid_table).first(), some(&["10.1.0.64"]).first());
        assert_eq!(gid_table.entries.len(), GID_ENTRIES);
    }

    #[test]
    fn the_port_is_the_interface_of_the_first_entry() {
        let (a, b) = (gid("10.0.0.1", 1), gid("10.0.0.2", 2));
        let mut gid_table = GidTable::new(
            vec![a.clone(), b.clone()],
            vec![link(1, true, 1), link(2, true, 2)],
        );
        let changes = |gid_table: &mut GidTable, addresses: &[&Gid], links: &[HostLink]| {
            gid_table.update(addresses.iter().copied().cloned().collect(), links.to_vec());
            std::mem::take(&mut gid_table.changes).events
        };
        let two = link(2, true, 2);
        // The interface loses its only address, and stays up.
        let events = changes(&mut gid_table, &[&b], &[link(1, true, 1), two.clone()]);
        assert_eq!(events, [event::GID_CHANGE, event::LID_CHANGE]);
        assert!(gid_table.up);
        let events = changes(&mut gid_table, &[&b], &[link(1, false, 1), two.clone()]);
        assert_eq!(events, [event::PORT_ERR]);
        let events = changes(&mut gid_table, &[&a, &b], &[link(1, true, 1), two.clone()]);
        assert_eq!(
            events,
            [event::PORT_ACTIVE, event::GID_CHANGE, event::LID_CHANGE]
        );
        // The interface is gone. The port is up again when a new address of another interface takes the first entry.
        let events = changes(&mut gid_table, &[&b], std::slice::from_ref(&two));
        assert_eq!(
            events,
            [event::PORT_ERR, event::GID_CHANGE, event::LID_CHANGE]
        );
        let c = gid("10.0.0.3", 2);
        let events = changes(&mut gid_table, &[&b, &c], &[two]);
        assert_eq!(
            events,
            [event::PORT_ACTIVE, event::GID_CHANGE, event::LID_CHANGE]
        );
    }

    #[test]
    fn an_interface_with_another_hardware_address_has_moved() {
        let (a, b) = (gid("10.0.0.1", 1), gid("10.0.0.2", 2));
        let mut gid_table = GidTable::new(
            vec![a.clone(), b.clone()],
            vec![link(1, true, 1), link(2, true, 2)],
        );
        gid_table.update(vec![a, b.clone()], vec![link(1, true, 1), link(2, true, 9)]);
        assert_eq!(gid_table.changes.moved, [b.ip]);
        assert!(gid_table.changes.events.is_empty());
    }
}
