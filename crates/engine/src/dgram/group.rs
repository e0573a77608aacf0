//! Multicast groups. All member queue pairs of the process share one socket for each group.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::datagram::Arrival;
use rustix::net::SocketType;
use smallvec::SmallVec;

use crate::engine::Engine;
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::mem::TolerateUnmapped;
use crate::net::route::{GROUP_PORT, MulticastHome};
use crate::net::socket;
use crate::net::udp::{self, Batch, DatagramSink};
use crate::process::PerProcess;
use crate::reactor::{Source, Token};
use crate::sys::socket::{multicast, set_option};

/// A multicast group that queue pairs of this process are members of, or a broadcast address at which they receive.
pub(super) struct Group<S> {
    engine: &'static Engine,
    pub(super) ip: IpAddr,
    fd: EngineFd,
    members: Mutex<Vec<Weak<S>>>,
    receiving: Mutex<()>,
    token: Mutex<Token>,
}

impl<S> std::fmt::Debug for Group<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Group").field(&self.ip).finish()
    }
}

/// The groups of a process whose members are of type `S`.
pub(super) type Registry<S> = PerProcess<Mutex<Vec<Weak<Group<S>>>>>;

impl<S: DatagramSink> Group<S> {
    /// Returns the group `ip` from the registry, or joins it on the interface `home` for its first member.
    pub(super) fn of(
        registry: &Registry<S>,
        engine: &'static Engine,
        ip: IpAddr,
        home: MulticastHome,
    ) -> io::Result<Arc<Self>> {
        let mut all = registry.get().lock();
        all.retain(|group| group.strong_count() > 0);
        if let Some(group) = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|group| group.ip == ip)
        {
            return Ok(group);
        }
        let fd = socket::open(ip, SocketType::DGRAM)?;
        // Each process of the host that joins has a socket on this port and receives a copy of each datagram.
        set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        socket::tune_datagram(&fd, ip.is_ipv6());
        let at = match ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, GROUP_PORT)),
            // A group of link-local scope exists on one interface.
            IpAddr::V6(ip) => SocketAddrV6::new(ip, GROUP_PORT, 0, home.interface).into(),
        };
        rustix::net::bind(fd.get(), &at)?;
        // A host receives broadcasts without joining.
        if ip.is_multicast() && !multicast(fd.get(), ip, home.ip, home.interface, true) {
            return Err(io::Error::last_os_error());
        }
        let group = Arc::new(Self {
            engine,
            ip,
            fd,
            members: Mutex::new(Rank::UdpMembers, Vec::new()),
            receiving: Mutex::new(Rank::UdpReceive, ()),
            token: Mutex::new(Rank::UdpToken, Token::NONE),
        });
        let listener = Arc::new(Listener(Arc::downgrade(&group)));
        let token = engine.add(listener, group.fd.get(), false)?;
        *group.token.lock() = token;
        log!(Info, "receiving datagrams to group {ip} at {}", home.ip);
        all.push(Arc::downgrade(&group));
        Ok(group)
    }

    /// Adds a member: `sink` receives datagrams to the group.
    pub(super) fn enter(&self, sink: Weak<S>) {
        self.members.lock().push(sink);
    }

    /// Removes a member. The group is left when its last member drops it.
    pub(super) fn leave(&self, sink: &Weak<S>) {
        self.members.lock().retain(|m| !m.ptr_eq(sink));
    }

    fn members(&self) -> SmallVec<[Arc<S>; 4]> {
        let members = self.members.lock();
        members.iter().filter_map(Weak::upgrade).collect()
    }

    fn readable(&self, now: Instant) {
        let Some(_receiving) = self.receiving.try_lock() else {
            return;
        };
        let _tolerant = TolerateUnmapped::in_worker();
        udp::receive(
            self.engine,
            &self.fd,
            Batch::Full,
            |arrival, bytes, size| {
                let arrival = Arrival {
                    to: Some(self.ip),
                    ..*arrival
                };
                for sink in self.members() {
                    sink.incoming(&arrival, bytes.chunks(size), now);
                }
            },
        );
        for sink in self.members() {
            sink.received();
        }
    }
}

impl<S> Drop for Group<S> {
    fn drop(&mut self) {
        let token = *self.token.lock();
        self.engine.remove(token, Some(self.fd.get()));
    }
}

/// Refers to the group weakly: the group is dropped with its last member.
struct Listener<S>(Weak<Group<S>>);

impl<S: DatagramSink> Source for Listener<S> {
    fn ready(self: Arc<Self>, readable: bool, _writable: bool, now: Instant) {
        if readable && let Some(group) = self.0.upgrade() {
            group.readable(now);
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}
