//! UDP: the socket that the datagram queue pairs of one port share, and the sockets of multicast groups.
//!
//! Sending: runs of equal datagrams to one destination go to the kernel as one (`UDP_SEGMENT`), several runs in one
//! call. Receiving: several datagrams in one call, each of them possibly a run that the kernel kept together
//! (`UDP_GRO`). Who receives holds the carrier's receive lock, so datagrams reach a queue pair in the order in which the
//! kernel had them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, Weak};
use std::time::{Duration, Instant};

use anywarp_core::datagram::rx::destination_index;
use anywarp_core::datagram::{Arrival, MULTICAST_QPN, TxDatagram};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use smallvec::SmallVec;

use crate::dgram::DgramQp;
use crate::fd::EngineFd;
use crate::log;
use crate::port::Port;
use crate::process::PerProcess;
use crate::sys::datagram::{DATAGRAMS, Datagram, Run};
use crate::sys::{Io, datagram, socket};
use crate::worker::{Engine, Source, Token};

/// Room for datagrams that nobody has received yet, bytes; the kernel may grant less.
const RECEIVE_BUFFER: i32 = 16 << 20;
/// Room for datagrams on their way out.
const SEND_BUFFER: i32 = 4 << 20;
/// Bytes that the largest datagram, or run of datagrams, takes.
const SLOT: usize = 1 << 16;
/// Calls that one turn makes, before other sockets have theirs.
const CALLS: usize = 16;
/// Turns in which a socket that nobody looked at for a while is emptied.
const TURNS: usize = 16;
/// Datagrams in one run, and bytes of it with the headers of IP and UDP: limits of the kernel.
const RUN_MAX: usize = 64;
const RUN_BYTES: usize = 65_000;
/// The port of every multicast group: that of the queue pair number that all members have.
pub const GROUP_PORT: u16 = (MULTICAST_QPN >> 8) as u16;

/// Makes a socket fit for datagram queue pairs.
fn tune(fd: &EngineFd, ipv6: bool) {
    let fd = fd.get();
    let set = |level, name, value| socket::set_option(fd, level, name, value);
    // As the owner of the host, past the limit that others have.
    for (force, plain, bytes) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, RECEIVE_BUFFER),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, SEND_BUFFER),
    ] {
        if !set(libc::SOL_SOCKET, force, bytes) {
            set(libc::SOL_SOCKET, plain, bytes);
        }
    }
    set(libc::SOL_UDP, libc::UDP_GRO, 1);
    // Who sends to a broadcast address means it: it stands in an address handle.
    set(libc::SOL_SOCKET, libc::SO_BROADCAST, 1);
    // What the route header in front of a message tells. IPv4 may arrive on an IPv6 socket.
    set(libc::IPPROTO_IP, libc::IP_RECVTTL, 1);
    set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1);
    if ipv6 {
        set(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1);
        set(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT, 1);
        set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1);
    } else {
        set(libc::IPPROTO_IP, libc::IP_PKTINFO, 1);
    }
    // Large datagrams on small links are cut by IP, whatever the kernel thinks of the path.
    set(
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_DONT,
    );
    if ipv6 {
        set(
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_DONT,
        );
    }
}

/// The address and interface that multicast of a family uses: those of the first GID of the family.
fn multicast_home(ipv4: bool) -> (IpAddr, u32) {
    crate::gids::gids()
        .iter()
        .find(|g| g.ip.is_ipv4() == ipv4)
        .map_or_else(|| (Ipv4Addr::LOCALHOST.into(), 1), |g| (g.ip, g.interface))
}

/// Whether an address is that of many.
pub(crate) fn is_group(ip: IpAddr) -> bool {
    anywarp_core::datagram::tx::is_group(ip)
}

/// Whether it is the broadcast address of a network that this host is on: the kernel lets nobody send there who did not ask
/// for it.
pub(crate) fn is_broadcast(ip: IpAddr) -> bool {
    if !ip.is_ipv4() {
        return false;
    }
    let flags = SocketFlags::CLOEXEC;
    let made = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
    let Ok(fd) = made.map(EngineFd::new) else {
        return false;
    };
    let to = SocketAddr::from((ip, GROUP_PORT));
    rustix::net::connect(fd.get(), &to) == Err(rustix::io::Errno::ACCESS)
}

/// How long what is known of a path is taken for true.
const PATH_MEMORY: Duration = Duration::from_secs(10);
/// Paths that are remembered.
const PATHS: usize = 4096;

/// Bytes of a UDP payload that the path to `ip` carries whole, as far as this host knows.
pub(crate) fn path_mtu(ip: IpAddr) -> u16 {
    type Paths = Mutex<HashMap<IpAddr, (u16, Instant)>>;
    static ALL: PerProcess<Paths> = PerProcess::new(Mutex::default);
    let now = crate::clock::now();
    let mut all = lock(ALL.get());
    if let Some((mtu, since)) = all.get(&ip)
        && now.saturating_duration_since(*since) < PATH_MEMORY
    {
        return *mtu;
    }
    if all.len() >= PATHS {
        all.clear();
    }
    let mtu = ask_path_mtu(ip).unwrap_or(1500);
    let headers = if ip.to_canonical().is_ipv4() { 28 } else { 48 };
    let mtu = u16::try_from(mtu.clamp(576, 65_535) - headers).unwrap_or(u16::MAX);
    all.insert(ip, (mtu, now));
    mtu
}

/// Asks the kernel, by a socket that is connected and never used.
fn ask_path_mtu(ip: IpAddr) -> Option<i32> {
    let ip = ip.to_canonical();
    let (family, level, name) = match ip {
        IpAddr::V4(_) => (AddressFamily::INET, libc::IPPROTO_IP, libc::IP_MTU),
        IpAddr::V6(_) => (AddressFamily::INET6, libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None).ok()?;
    rustix::net::connect(&fd, &SocketAddr::new(ip, 9)).ok()?;
    socket::get_option(fd.as_fd(), level, name)
}

/// How much of what waits on a socket is received in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// One datagram, and the rest only if it turns out that there is more.
    One,
    /// As much as there is room for.
    All,
}

/// What a look at a socket found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// There was something.
    any: bool,
    /// There was more than a lone datagram, and the next look is likely to find more than one as well.
    many: bool,
    /// System calls that found something, and whether the last did not.
    calls: u64,
    empty: bool,
}

/// Receives what waits on a socket and shows it to `each`: what came together, and the length of its datagrams, of which the
/// last may be shorter.
fn receive(
    engine: &Engine,
    fd: &EngineFd,
    look: Look,
    mut each: impl FnMut(&Arrival, &[u8], usize),
) -> Found {
    let mut stage = engine.stage();
    let most = (stage.len() / SLOT).min(DATAGRAMS);
    let mut slots = if look == Look::One { 1 } else { most };
    let mut found = Found {
        any: false,
        many: false,
        calls: 0,
        empty: false,
    };
    for _ in 0..CALLS {
        let mut got: SmallVec<[Datagram; DATAGRAMS]> = SmallVec::new();
        let room = stage.get_mut(..slots * SLOT).unwrap_or(&mut []);
        if datagram::receive_datagrams(fd.get(), room, SLOT, &mut got).is_err() {
            found.empty = true;
            break;
        }
        found.any = true;
        found.calls += 1;
        for d in &got {
            let arrival = Arrival {
                from: crate::startup::plain(d.from),
                to: d.to,
                hop_limit: d.hop_limit,
                traffic_class: d.traffic_class,
            };
            let bytes = stage.get(d.at..d.at + d.len).unwrap_or(&[]);
            let size = if d.segment == 0 { SLOT } else { d.segment };
            found.many |= size < bytes.len();
            each(&arrival, bytes, size);
        }
        found.many |= got.len() > 1;
        if got.len() < slots || (slots == 1 && !found.many) {
            break;
        }
        slots = most;
    }
    engine.return_stage(stage);
    found
}

// ---------------------------------------------------------------------- the socket of a port

/// The UDP socket of a port and the queue pairs that share it.
pub(crate) struct Carrier {
    engine: &'static Engine,
    port: Arc<Port>,
    members: RwLock<HashMap<u8, Weak<DgramQp>>>,
    /// Who wait for room in the socket.
    waiting: Mutex<Vec<Weak<DgramQp>>>,
    /// Held by who receives: system calls that found something, and those that did not.
    receiving: Mutex<(u64, u64)>,
    /// The last look found many datagrams.
    many: AtomicBool,
    token: Mutex<Token>,
}

impl std::fmt::Debug for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Carrier")
            .field("port", &self.port.number)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Carrier {
    /// The carrier of a port; made with the first datagram queue pair there.
    pub(crate) fn of(engine: &'static Engine, port: &Arc<Port>) -> io::Result<Arc<Self>> {
        static ALL: PerProcess<Mutex<Vec<Weak<Carrier>>>> = PerProcess::new(Mutex::default);
        let mut all = lock(ALL.get());
        all.retain(|c| c.strong_count() > 0);
        if let Some(carrier) = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|c| Arc::ptr_eq(&c.port, port))
        {
            return Ok(carrier);
        }
        tune(&port.udp, port.ipv6);
        for ipv4 in [true, false] {
            let (ip, interface) = multicast_home(ipv4);
            if ip.is_ipv4() == ipv4 && (ipv4 || port.ipv6) {
                socket::multicast_interface(port.udp.get(), ip, interface);
            }
        }
        let carrier = Arc::new(Self {
            engine,
            port: Arc::clone(port),
            members: RwLock::new(HashMap::new()),
            waiting: Mutex::new(Vec::new()),
            receiving: Mutex::default(),
            many: AtomicBool::new(false),
            token: Mutex::new(Token::NONE),
        });
        let listener = Arc::new(Listener(Arc::downgrade(&carrier)));
        let token = engine.add(listener, port.udp.get(), false)?;
        *lock(&carrier.token) = token;
        all.push(Arc::downgrade(&carrier));
        Ok(carrier)
    }

    /// Bytes that the socket holds for a queue pair, as the kernel counts them: half of all, since they share it.
    pub(crate) fn room(&self) -> u32 {
        let all = socket::get_option(self.port.udp.get(), libc::SOL_SOCKET, libc::SO_RCVBUF);
        u32::try_from(all.unwrap_or(0) / 2).unwrap_or(0)
    }

    /// Datagrams for index `index` go to `qp`.
    pub(crate) fn enter(&self, index: u8, qp: Weak<DgramQp>) {
        self.members
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(index, qp);
    }

    /// Nobody has index `index` any more.
    pub(crate) fn leave(&self, index: u8) {
        self.members
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&index);
    }

    /// Sends datagrams from the front of the list; returns how many the kernel took.
    ///
    /// `run_max` is the longest datagram that may be part of a run; it shrinks when the kernel refuses.
    pub(crate) fn send(
        &self,
        datagrams: &[TxDatagram],
        from: Option<IpAddr>,
        run_max: &mut usize,
    ) -> Result<usize, Io> {
        loop {
            let mut runs: SmallVec<[Run<'_>; DATAGRAMS]> = SmallVec::new();
            let mut rest = datagrams;
            while runs.len() < DATAGRAMS && !rest.is_empty() {
                let (run, behind) = rest.split_at(run_length(rest, *run_max));
                runs.push(Run {
                    datagrams: run,
                    from: run.first().and_then(|d| d.from).or(from),
                });
                rest = behind;
            }
            match datagram::send_runs(self.port.udp.get(), self.port.ipv6, &runs) {
                Ok(n) => return Ok(runs.iter().take(n).map(|r| r.datagrams.len()).sum()),
                Err(Io::Broken(libc::EINVAL | libc::EIO | libc::EMSGSIZE))
                    if runs.first().is_some_and(|r| r.datagrams.len() > 1) =>
                {
                    // The path does not carry datagrams of this length whole, or the kernel knows no runs.
                    let len = datagrams.first().map_or(0, |d| d.bytes.len());
                    *run_max = len.saturating_sub(1);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// System calls that received: with something, without.
    pub(crate) fn calls(&self) -> (u64, u64) {
        *lock(&self.receiving)
    }

    /// Calls `qp` when the socket has room again.
    pub(crate) fn wait_writable(&self, qp: Weak<DgramQp>) {
        let mut waiting = lock(&self.waiting);
        if waiting.is_empty() {
            let token = *lock(&self.token);
            self.engine.want_write(token, self.port.udp.get(), true);
        }
        waiting.push(qp);
    }

    fn writable(&self, now: Instant) {
        let waiting = {
            let mut waiting = lock(&self.waiting);
            let token = *lock(&self.token);
            self.engine.want_write(token, self.port.udp.get(), false);
            std::mem::take(&mut *waiting)
        };
        for qp in waiting.iter().filter_map(Weak::upgrade) {
            qp.writable(now);
        }
    }

    /// Takes what waits in the socket, up to all that it has room for.
    pub(crate) fn catch_up(&self) {
        for _ in 0..TURNS {
            if !self.readable(Look::All) {
                break;
            }
        }
    }

    /// Receives what waits; whether there was something.
    fn readable(&self, look: Look) -> bool {
        // Somebody who receives already takes this as well, and what comes later makes the socket readable again.
        let mut calls = match self.receiving.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let found = receive(self.engine, &self.port.udp, look, |arrival, bytes, size| {
            let mut rest = bytes;
            while !rest.is_empty() {
                let (index, run, behind) = split_by_index(rest, size);
                rest = behind;
                let member = |index| {
                    let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
                    members.get(&index).and_then(Weak::upgrade)
                };
                if let Some(qp) = index.and_then(member) {
                    qp.incoming(arrival, run.chunks(size));
                }
            }
        });
        calls.0 += found.calls;
        calls.1 += u64::from(found.empty);
        if found.any {
            self.many.store(found.many, Ordering::Relaxed);
        }
        found.any
    }

    /// Looks for what may have come, without a word of the kernel's that something has.
    fn glance(&self) -> bool {
        let many = self.many.load(Ordering::Relaxed);
        self.readable(if many { Look::All } else { Look::One })
    }
}

/// The datagrams of `size` bytes at the front that are for one queue pair, whose index that is, and those behind them.
fn split_by_index(bytes: &[u8], size: usize) -> (Option<u8>, &[u8], &[u8]) {
    let mut datagrams = bytes.chunks(size);
    let index = datagrams.next().and_then(destination_index);
    let more = datagrams
        .take_while(|d| destination_index(d) == index)
        .count();
    let (run, behind) = bytes.split_at(bytes.len().min((1 + more) * size));
    (index, run, behind)
}

impl Drop for Carrier {
    fn drop(&mut self) {
        let token = *lock(&self.token);
        self.engine.remove(token, Some(self.port.udp.get()));
    }
}

/// How many datagrams of the front of the list may go as one run; at least 1.
fn run_length(datagrams: &[TxDatagram], run_max: usize) -> usize {
    let Some(first) = datagrams.first() else {
        return 0;
    };
    let len = first.bytes.len();
    if len > run_max || len == 0 {
        return 1;
    }
    let most = RUN_MAX.min(RUN_BYTES / len).max(1);
    let mut n = 1;
    for d in datagrams.iter().skip(1).take(most - 1) {
        let same_way = d.to == first.to
            && d.from == first.from
            && d.hop_limit == first.hop_limit
            && d.traffic_class == first.traffic_class;
        if !same_way || d.bytes.len() > len {
            break;
        }
        n += 1;
        if d.bytes.len() < len {
            // A shorter one ends a run.
            break;
        }
    }
    n
}

/// Holds the carrier weakly: it goes when the last queue pair does.
struct Listener(Weak<Carrier>);

impl Source for Listener {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant) {
        let Some(carrier) = self.0.upgrade() else {
            return;
        };
        if readable {
            carrier.readable(Look::All);
        }
        if writable {
            carrier.writable(now);
        }
    }

    fn glance(self: Arc<Self>, _now: Instant) -> Option<bool> {
        Some(self.0.upgrade()?.glance())
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

// ---------------------------------------------------------------------- multicast

/// A multicast group that queue pairs of this process belong to.
pub(crate) struct Group {
    engine: &'static Engine,
    pub(crate) ip: IpAddr,
    fd: EngineFd,
    members: Mutex<Vec<Weak<DgramQp>>>,
    receiving: Mutex<()>,
    token: Mutex<Token>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Group").field(&self.ip).finish()
    }
}

impl Group {
    /// The group; joined with its first member.
    pub(crate) fn of(engine: &'static Engine, ip: IpAddr) -> io::Result<Arc<Self>> {
        static ALL: PerProcess<Mutex<Vec<Weak<Group>>>> = PerProcess::new(Mutex::default);
        let mut all = lock(ALL.get());
        all.retain(|g| g.strong_count() > 0);
        if let Some(group) = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|group| group.ip == ip)
        {
            return Ok(group);
        }
        let family = if ip.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = EngineFd::new(rustix::net::socket_with(
            family,
            SocketType::DGRAM,
            flags,
            None,
        )?);
        // Every process of the host that joins has its own socket and gets its own copy.
        socket::set_option(fd.get(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
        tune(&fd, ip.is_ipv6());
        let (home, interface) = multicast_home(ip.is_ipv4());
        let at = match ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, GROUP_PORT)),
            // A group of link scope is one of an interface.
            IpAddr::V6(ip) => SocketAddrV6::new(ip, GROUP_PORT, 0, interface).into(),
        };
        rustix::net::bind(fd.get(), &at)?;
        // A broadcast comes to every host without being asked for.
        if ip.is_multicast() && !socket::multicast(fd.get(), ip, home, interface, true) {
            return Err(io::Error::last_os_error());
        }
        let group = Arc::new(Self {
            engine,
            ip,
            fd,
            members: Mutex::new(Vec::new()),
            receiving: Mutex::new(()),
            token: Mutex::new(Token::NONE),
        });
        let listener = Arc::new(GroupListener(Arc::downgrade(&group)));
        let token = engine.add(listener, group.fd.get(), false)?;
        *lock(&group.token) = token;
        log!(Info, "joined multicast group {ip} at {home}");
        all.push(Arc::downgrade(&group));
        Ok(group)
    }

    /// Messages to the group go to `qp` too.
    pub(crate) fn enter(&self, qp: Weak<DgramQp>) {
        lock(&self.members).push(qp);
    }

    /// `qp` leaves. The last one takes the group with it.
    pub(crate) fn leave(&self, qp: &Weak<DgramQp>) {
        lock(&self.members).retain(|m| !m.ptr_eq(qp));
    }

    fn readable(&self) {
        let _receiving = match self.receiving.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        receive(self.engine, &self.fd, Look::All, |arrival, bytes, size| {
            let arrival = Arrival {
                to: Some(self.ip),
                ..*arrival
            };
            let members: SmallVec<[Arc<DgramQp>; 4]> = lock(&self.members)
                .iter()
                .filter_map(Weak::upgrade)
                .collect();
            for qp in members {
                qp.incoming(&arrival, bytes.chunks(size));
            }
        });
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let token = *lock(&self.token);
        self.engine.remove(token, Some(self.fd.get()));
    }
}

struct GroupListener(Weak<Group>);

impl Source for GroupListener {
    fn ready(self: Arc<Self>, readable: bool, _writable: bool, _now: Instant) {
        if readable && let Some(group) = self.0.upgrade() {
            group.readable();
        }
    }

    fn timeout(self: Arc<Self>, _now: Instant) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(port: u16, len: usize) -> TxDatagram {
        TxDatagram {
            to: SocketAddr::from(([127, 0, 0, 1], port)),
            from: None,
            hop_limit: 0,
            traffic_class: 0,
            bytes: vec![0; len].into(),
        }
    }

    #[test]
    fn a_glance_takes_a_lone_datagram_and_all_of_many() {
        let engine = crate::worker::engine().unwrap();
        let socket = || {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let fd = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None);
            let fd = EngineFd::new(fd.unwrap());
            tune(&fd, false);
            rustix::net::bind(fd.get(), &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            fd
        };
        let (from, to) = (socket(), socket());
        let port = rustix::net::getsockname(to.get()).unwrap();
        let port = SocketAddr::try_from(port).unwrap().port();
        let send = |lens: &[usize]| {
            let list: Vec<_> = lens.iter().map(|len| datagram(port, *len)).collect();
            let run = Run {
                datagrams: &list,
                from: None,
            };
            assert_eq!(datagram::send_runs(from.get(), false, &[run]), Ok(1));
        };
        let glance = || {
            let mut lens = Vec::new();
            let found = receive(engine, &to, Look::One, |_, bytes, size| {
                lens.extend(bytes.chunks(size).map(<[u8]>::len));
            });
            (found.any, found.many, lens)
        };
        assert_eq!(glance(), (false, false, vec![]));
        send(&[100]);
        send(&[200]);
        // The second one is for the next look: it may as well not be there yet.
        assert_eq!(glance(), (true, false, vec![100]));
        assert_eq!(glance(), (true, false, vec![200]));
        send(&[100, 100, 60]);
        send(&[300]);
        assert_eq!(glance(), (true, true, vec![100, 100, 60, 300]));
        assert_eq!(glance(), (false, false, vec![]));
    }

    #[test]
    fn what_came_together_goes_to_each_queue_pair_in_runs() {
        let of = |list: &[u8], size: usize, last: usize| {
            let mut bytes: Vec<u8> = list.iter().flat_map(|i| vec![*i; size]).collect();
            bytes.truncate(bytes.len() - size + last);
            let (mut runs, mut rest) = (Vec::new(), &bytes[..]);
            while !rest.is_empty() {
                let (index, run, behind) = split_by_index(rest, size);
                runs.push((index, run.len()));
                rest = behind;
            }
            runs
        };
        assert_eq!(of(&[1], 50, 30), [(Some(1), 30)]);
        assert_eq!(of(&[1, 1, 1], 50, 50), [(Some(1), 150)]);
        assert_eq!(
            of(&[1, 2, 2, 1], 50, 30),
            [(Some(1), 50), (Some(2), 100), (Some(1), 30)]
        );
        // Too short to name a queue pair.
        assert_eq!(of(&[1, 1], 50, 9), [(Some(1), 50), (None, 9)]);
        assert_eq!(of(&[1, 1], 9, 9), [(None, 18)]);
    }

    #[test]
    fn a_run_is_equal_datagrams_of_one_destination_and_a_shorter_last() {
        let of = |list: &[(u16, usize)]| {
            let list: Vec<_> = list.iter().map(|(p, n)| datagram(*p, *n)).collect();
            run_length(&list, usize::MAX)
        };
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&[(1, 100)]), 1);
        assert_eq!(of(&[(1, 100), (1, 100), (1, 100)]), 3);
        assert_eq!(of(&[(1, 100), (2, 100)]), 1);
        assert_eq!(of(&[(1, 100), (1, 101)]), 1);
        assert_eq!(of(&[(1, 100), (1, 99), (1, 99)]), 2);
        assert_eq!(of(&[(1, 100); 100]), RUN_MAX);
        assert_eq!(of(&[(1, 4000); 100]), RUN_BYTES / 4000);
        assert_eq!(of(&[(1, 61_000); 2]), 1);
        assert_eq!(run_length(&[datagram(1, 9), datagram(1, 9)], 8), 1);
    }
}
