//! The device: its addresses and limits.
//!
//! Listing devices starts nothing: no thread, no socket. One device, `anywarp0`, one port; its GIDs are the host's
//! addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use anywarp_core::bounds;

use crate::capture;
use crate::channel::Channel;
use crate::config::{Transport, config};
use crate::engine::DeviceListener;
use crate::engine::{Engine, engine};
use crate::fd;
use crate::gids::{self, News};
use crate::process::PerProcess;
use crate::sys::host;
use crate::sys::host::HostAddress;

/// What carries streams between processes of one host. A capture shows what sockets carry, so with one it is always TCP.
pub fn transport() -> Transport {
    if capture::is_on() {
        Transport::Tcp
    } else {
        config().transport
    }
}

/// The device's name.
pub const NAME: &str = "anywarp0";

/// One entry of the GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// 16 bytes; IPv4 is mapped (`::ffff:a.b.c.d`).
    pub raw: [u8; 16],
    /// The address.
    pub ip: IpAddr,
    /// Interface index.
    pub interface: u32,
    /// Interface name.
    pub name: String,
}

/// The 16 bytes of a GID for an address.
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address that a GID means.
pub fn ip_of(gid: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(gid);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The addresses of a new GID table: `ANYWARP_ADDR` first if set, then the host's IPv4 addresses, IPv6 addresses, loopback
/// last. `None` if the host cannot be asked.
pub(crate) fn listing() -> Option<Vec<Gid>> {
    let chosen = config().address;
    let rank = |a: &HostAddress| match a.ip {
        ip if Some(ip) == chosen => 0,
        IpAddr::V4(_) if !a.loopback => 1,
        IpAddr::V6(_) if !a.loopback => 2,
        IpAddr::V4(_) => 3,
        IpAddr::V6(_) => 4,
    };
    let mut all: Vec<HostAddress> = host::host_addresses()?
        .into_iter()
        .filter(|a| a.up && !is_link_local(a.ip))
        .collect();
    all.sort_by_key(rank);
    let mut table: Vec<Gid> = Vec::new();
    for a in all {
        let raw = gid_of(a.ip);
        if table.iter().all(|g| g.raw != raw) {
            table.push(Gid {
                raw,
                ip: a.ip,
                interface: a.index,
                name: a.interface,
            });
        }
    }
    if table.is_empty() {
        table.push(loopback());
    }
    Some(table)
}

/// What there is on a host without addresses.
pub(crate) fn loopback() -> Gid {
    Gid {
        raw: gid_of(Ipv4Addr::LOCALHOST.into()),
        ip: Ipv4Addr::LOCALHOST.into(),
        interface: 1,
        name: "lo".into(),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments().first().is_some_and(|s| s & 0xffc0 == 0xfe80),
    }
}

/// The LID: the low 16 bits of the first IPv4 address, made non-zero and below the multicast range.
pub fn lid_of(ip: IpAddr) -> u16 {
    let low = match ip {
        IpAddr::V4(v4) => {
            let [_, _, c, d] = v4.octets();
            u16::from_be_bytes([c, d])
        }
        IpAddr::V6(v6) => v6.segments().last().copied().unwrap_or(1),
    };
    match low & 0xbfff {
        0 => 1,
        lid => lid,
    }
}

/// The address that a LID means: the first one of this host if it has that LID, or the host of the same network whose
/// address has those low 16 bits. (The other addresses of this host have no LID: that of 127.0.0.1 would hide x.y.0.1.)
pub fn ip_of_lid(lid: u16) -> Option<IpAddr> {
    let first = gids::gids().first()?.ip;
    if lid_of(first) == lid {
        return Some(first);
    }
    match first {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            let [hi, lo] = lid.to_be_bytes();
            // Bit 14 is not in the LID: take it from our own address.
            Some(IpAddr::V4(Ipv4Addr::new(a, b, hi | (c & 0x40), lo)))
        }
        IpAddr::V6(_) => None,
    }
}

/// An opened device (`ibv_open_device`).
pub struct Context {
    /// The engine behind it.
    pub engine: &'static Engine,
    /// Asynchronous events.
    pub events: Arc<Channel<AsyncItem>>,
    /// Address of the C object, for the ABI layer.
    pub c_object: AtomicUsize,
    /// Stands for the device in this process where a program passes a descriptor on (`ibv_import_device(3)`). It is an
    /// empty file in memory; what tells it from others is its inode.
    pub command: OwnedFd,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

/// What an asynchronous event is about: the numbers are those of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncItem {
    /// Event type.
    pub event: u32,
    /// Cookie of the queue pair, completion queue or shared receive queue; port number for port events.
    pub c_object: usize,
}

/// Numbers of `enum ibv_event_type`.
pub mod event {
    #![allow(missing_docs, reason = "the names are those of ibv_get_async_event(3)")]
    pub const CQ_ERR: u32 = 0;
    pub const QP_FATAL: u32 = 1;
    pub const QP_REQ_ERR: u32 = 2;
    pub const QP_ACCESS_ERR: u32 = 3;
    pub const COMM_EST: u32 = 4;
    pub const SQ_DRAINED: u32 = 5;
    pub const DEVICE_FATAL: u32 = 8;
    pub const PORT_ACTIVE: u32 = 9;
    pub const PORT_ERR: u32 = 10;
    pub const LID_CHANGE: u32 = 11;
    pub const SRQ_ERR: u32 = 14;
    pub const SRQ_LIMIT_REACHED: u32 = 15;
    pub const QP_LAST_WQE_REACHED: u32 = 16;
    pub const GID_CHANGE: u32 = 18;
}

/// The file that stands for the device in this process.
fn command() -> io::Result<&'static OwnedFd> {
    static FILE: PerProcess<OnceLock<OwnedFd>> = PerProcess::new(OnceLock::new);
    let file = FILE.get();
    if file.get().is_none() {
        // A failure is not kept: there may be a descriptor the next time.
        let made = rustix::fs::memfd_create("anywarp", rustix::fs::MemfdFlags::CLOEXEC)?;
        let _another_thread_was_faster = file.set(made);
    }
    file.get()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))
}

impl Context {
    /// Opens the device: starts the engine if this is the first time.
    pub fn open() -> io::Result<Arc<Self>> {
        crate::fault::check()?;
        Ok(Arc::new(Self {
            engine: engine()?,
            events: Arc::new(Channel::new()?),
            c_object: AtomicUsize::new(0),
            command: command()?.try_clone()?,
        }))
    }

    /// Whether a descriptor is a copy of a context's [`Self::command`].
    pub fn is_own_descriptor(fd: RawFd) -> bool {
        let Ok(own) = command() else { return false };
        // A copy: the program's own may be closed at any time.
        let Some(copy) = fd::duplicate(fd) else {
            return false;
        };
        fd::identity(own).is_some_and(|file| fd::identity(&copy) == Some(file))
    }

    /// Sees to it that this context gets the events of device and port.
    pub fn watch(self: &Arc<Self>) {
        let me: Arc<dyn DeviceListener> = Arc::clone(self) as _;
        self.engine.subscribe(Arc::downgrade(&me));
        let me: Arc<dyn gids::Listener> = Arc::clone(self) as _;
        gids::listen(self.engine, Arc::downgrade(&me));
    }

    /// Bytes of UD messages, as `enum ibv_mtu` counts: 5 is 4096.
    pub fn mtu() -> u32 {
        debug_assert_eq!(bounds::UD_MTU, 4096);
        5
    }
}

impl DeviceListener for Context {
    fn device_fatal(&self) {
        self.events.push(AsyncItem {
            event: event::DEVICE_FATAL,
            c_object: 0,
        });
    }
}

impl gids::Listener for Context {
    fn port_changed(&self, news: &News) {
        for event in &news.events {
            self.events.push(AsyncItem {
                event: *event,
                c_object: 0,
            });
        }
    }
}

/// A number that tells hosts apart and does not change: from the first hardware address, or the first IP address.
pub fn node_guid() -> u64 {
    static GUID: OnceLock<u64> = OnceLock::new();
    *GUID.get_or_init(|| {
        let first = gids::gids();
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
                // EUI-64 from EUI-48: the middle is ff fe and the local bit is flipped.
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lid_has_the_low_bits_of_the_address_and_is_never_zero_or_multicast() {
        let lid = |a: &str| lid_of(a.parse().unwrap());
        assert_eq!(lid("10.77.0.1"), 0x0001);
        assert_eq!(lid("192.168.3.4"), 0x0304);
        assert_eq!(lid("10.0.0.0"), 1);
        assert!((0..=255).all(|c| lid(&format!("10.0.{c}.9")) < 0xc000));
    }

    #[test]
    fn a_gid_is_the_address_and_back() {
        for a in ["10.77.0.1", "fd00::2", "::1"] {
            let ip: IpAddr = a.parse().unwrap();
            assert_eq!(ip_of(gid_of(ip)), ip);
        }
    }
}
