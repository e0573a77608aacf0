//! The objects of libibverbs that the provider uses, as values that destroy them on drop.

use std::ffi::CString;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void};

use crate::address::Remote;
use crate::ffi::{self, Functions};
use crate::limits;

/// Why no device is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The process has not loaded anywarp's libibverbs.
    Library,
    /// Anywarp's libibverbs lacks this function.
    Function(&'static str),
    /// The library lists no device, or the device cannot be opened.
    Device(i32),
    /// The device has no address.
    Address,
    /// The device was opened by the parent of this process.
    Forked,
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Library => f.write_str(
                "no libibverbs of anywarp: run the program with `anywarp run`, or keep lib/anywarp beside this provider",
            ),
            Self::Function(name) => write!(
                f,
                "libibverbs has no {name}: it is of another version than this provider"
            ),
            Self::Device(errno) => write!(f, "the device cannot be opened: error {errno}"),
            Self::Address => f.write_str("the device has no address: set ANYWARP_ADDR"),
            Self::Forked => f.write_str("the device was opened before fork(2)"),
        }
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// The device, open.
#[derive(Debug)]
pub struct Device {
    f: Functions,
    context: *mut ffi::ibv_context,
    process: u32,
    /// The addresses of the device, with their indexes in the GID table.
    addresses: Vec<(IpAddr, u8)>,
    /// Number of regions that peers may access by one-sided operations of their own accord ([`Exposed`]).
    exposed: Mutex<usize>,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Returns the functions of anywarp's libibverbs. If the process has already loaded that library, it is used, so that there
/// is one device. Otherwise the copy that is installed beside this library is loaded.
fn functions() -> Result<Functions, Missing> {
    const MARK: &std::ffi::CStr = c"anywarpdv_is_supported";
    // SAFETY: the call only looks a name up.
    let present = unsafe { libc::dlsym(libc::RTLD_DEFAULT, MARK.as_ptr()) };
    let names: Vec<CString> = if present.is_null() {
        let own = ffi::library_of(functions as *const c_void).ok_or(Missing::Library)?;
        let own = std::path::Path::new(std::ffi::OsStr::from_bytes(own.to_bytes()));
        let dir = own.parent().unwrap_or_else(|| std::path::Path::new("/"));
        ["anywarp/libibverbs.so.1", "libibverbs.so.1"]
            .iter()
            .filter_map(|name| CString::new(dir.join(name).into_os_string().into_vec()).ok())
            .collect()
    } else {
        ffi::library_of(present)
            .map(Into::into)
            .into_iter()
            .collect()
    };
    for name in names {
        // SAFETY: the library is loaded already, or it is installed together with this one.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            continue;
        }
        // SAFETY: the library has the functions of the header under their names.
        return unsafe { Functions::find(|symbol| libc::dlsym(handle, symbol.as_ptr())) }
            .map_err(Missing::Function);
    }
    Err(Missing::Library)
}

fn ip_of(gid: ffi::ibv_gid) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid.bytes())).to_canonical()
}

fn gid_of(ip: IpAddr) -> ffi::ibv_gid {
    let raw = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    ffi::ibv_gid { raw }
}

impl Device {
    fn open() -> Result<Self, Missing> {
        let f = functions()?;
        let mut count = 0;
        // SAFETY: the list is freed after its device was opened, once.
        let context = unsafe {
            let list = (f.get_device_list)(&raw mut count);
            if list.is_null() {
                return Err(Missing::Device(errno()));
            }
            let first = *list;
            let (context, why) = if first.is_null() || !(f.dv_is_supported)(first) {
                (std::ptr::null_mut(), libc::ENODEV)
            } else {
                let context = (f.open_device)(first);
                (context, errno())
            };
            (f.free_device_list)(list);
            if context.is_null() {
                return Err(Missing::Device(why));
            }
            context
        };
        let mut addresses = Vec::new();
        for index in 0..=u8::MAX {
            let mut gid = ffi::ibv_gid::default();
            // SAFETY: `gid` is valid for writes.
            if unsafe { (f.query_gid)(context, 1, index.into(), &raw mut gid) } != 0 {
                break;
            }
            let ip = ip_of(gid);
            if !ip.is_unspecified() {
                addresses.push((ip, index));
            }
        }
        if addresses.is_empty() {
            // SAFETY: the context is open, and nothing refers to it.
            unsafe { (f.close_device)(context) };
            return Err(Missing::Address);
        }
        let device = Self {
            f,
            context,
            process: std::process::id(),
            addresses,
            exposed: Mutex::new(0),
        };
        device.set_progress(false);
        Ok(device)
    }

    /// Sets how soon the device's thread handles what arrives while the program makes no calls. The provider has manual progress: messages
    /// wait for the next call in any case, and the thread would only disturb a program that computes. One-sided operations of peers must
    /// not wait for a call, so `soon` is set while peers have access to memory.
    fn set_progress(&self, soon: bool) {
        let progress = if soon {
            ffi::ANYWARPDV_PROGRESS_AUTO
        } else {
            ffi::ANYWARPDV_PROGRESS_POLLED
        };
        // SAFETY: the context is open. The call cannot fail with these arguments.
        unsafe { (self.f.dv_set_progress)(self.context, progress) };
    }

    /// Returns the device. The first call opens it, and it stays open.
    pub fn get() -> Result<&'static Self, Missing> {
        static DEVICE: OnceLock<Result<Device, Missing>> = OnceLock::new();
        let device = DEVICE.get_or_init(Self::open).as_ref().map_err(|e| *e)?;
        if device.process != std::process::id() {
            return Err(Missing::Forked);
        }
        Ok(device)
    }

    /// Returns the first address of the device, and its index in the GID table. `v4` selects IPv4 or IPv6.
    pub fn address(&self, v4: Option<bool>) -> Option<(IpAddr, u8)> {
        let mut all = self.addresses.iter();
        all.find(|(ip, _)| v4.is_none_or(|v4| ip.is_ipv4() == v4))
            .copied()
    }

    /// Returns the index of an address in the GID table of the device.
    pub fn gid_index_of(&self, wanted: IpAddr) -> Option<u8> {
        let found = self.addresses.iter().find(|(ip, _)| *ip == wanted);
        found.map(|(_, index)| *index)
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    device: &'static Device,
    pd: *mut ffi::ibv_pd,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates a protection domain.
    pub fn new(device: &'static Device) -> Result<Arc<Self>, i32> {
        // SAFETY: the context is open.
        let pd = unsafe { (device.f.alloc_pd)(device.context) };
        if pd.is_null() {
            return Err(errno());
        }
        Ok(Arc::new(Self { device, pd }))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: the objects of the domain hold references to this value, so they have been destroyed.
        unsafe { (self.device.f.dealloc_pd)(self.pd) };
    }
}

/// The access rights of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Data is sent from the memory.
    Source,
    /// Data is received into the memory.
    Sink,
    /// One peer writes to the memory.
    RemoteSink,
    /// One peer writes to the memory through a memory window.
    Window,
    /// Peers have these rights.
    Remote {
        /// Whether they may read the memory.
        read: bool,
        /// Whether they may write the memory.
        write: bool,
    },
}

/// Counts a region that peers may access at any time. While there is one, the device's thread handles their operations soon.
#[derive(Debug)]
struct Exposed(&'static Device);

impl Exposed {
    fn new(pd: &Arc<Pd>) -> Self {
        let mut count = pd
            .device
            .exposed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *count == 0 {
            pd.device.set_progress(true);
        }
        *count += 1;
        Self(pd.device)
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let device = self.0;
        let mut count = device
            .exposed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *count -= 1;
        if *count == 0 {
            device.set_progress(false);
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub struct Region {
    /// The memory window of the region, if it has one. The window is deallocated before the region.
    window: Option<Window>,
    pd: Arc<Pd>,
    mr: *mut ffi::ibv_mr,
    _exposed: Option<Exposed>,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Region {}

impl Region {
    /// Registers `len` bytes at `at`.
    ///
    /// # Safety
    /// The memory stays mapped until the region is dropped. If `access` allows writes, no code relies on the memory being unchanged.
    pub unsafe fn new(pd: &Arc<Pd>, at: usize, len: usize, access: Access) -> Result<Self, i32> {
        let is_exposed = matches!(access, Access::Remote { read, write } if read || write);
        let access = match access {
            Access::Source => 0,
            Access::Sink => ffi::IBV_ACCESS_LOCAL_WRITE,
            Access::Window => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_MW_BIND,
            Access::RemoteSink => ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE,
            Access::Remote { read, write } => {
                let read = if read { ffi::IBV_ACCESS_REMOTE_READ } else { 0 };
                // Memory that is only read may be read-only, and is then not registered for writing.
                let write = if write {
                    ffi::IBV_ACCESS_LOCAL_WRITE | ffi::IBV_ACCESS_REMOTE_WRITE
                } else {
                    0
                };
                read | write
            }
        };
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(at);
        // SAFETY: the domain is live; the rest is guaranteed by the caller.
        let mr = unsafe { (pd.device.f.reg_mr)(pd.pd, at, len, access.cast_signed()) };
        if mr.is_null() {
            return Err(errno());
        }
        Ok(Self {
            window: None,
            pd: Arc::clone(pd),
            mr,
            _exposed: is_exposed.then(|| Exposed::new(pd)),
        })
    }

    /// Returns the key for local requests.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { (*self.mr).lkey }
    }

    /// Returns the key for peers.
    pub fn rkey(&self) -> u32 {
        match &self.window {
            Some(window) => window.rkey,
            // SAFETY: as above.
            None => unsafe { (*self.mr).rkey },
        }
    }

    /// Limits the access by peers to one queue pair, `peer`.
    pub fn restrict_to(&self, peer: Remote) -> Result<(), i32> {
        let (mut name, len) = peer.name();
        // The call takes a socket address. In a name, one byte of the socket address contains the index (`address.rs`). This
        // byte must be 0 here.
        if peer.ip.is_ipv4() {
            name[8] = 0;
        } else {
            name[7] = 0;
        }
        // SAFETY: the region is live, and the name is a socket address of its family and of `len` bytes.
        let rc = unsafe {
            (self.pd.device.f.dv_restrict_mr)(self.mr, name.as_ptr().cast(), len as u32, peer.qpn)
        };
        if rc == 0 { Ok(()) } else { Err(errno()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A region with a window cannot be deregistered.
        self.window = None;
        // SAFETY: the region is deregistered once, and its keys are not used any more.
        unsafe { (self.pd.device.f.dereg_mr)(self.mr) };
    }
}

/// A memory window of type 2.
#[derive(Debug)]
struct Window {
    mw: *mut ffi::ibv_mw,
    rkey: u32,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Window {}

impl Window {
    fn new(pd: &Pd) -> Result<Self, i32> {
        // SAFETY: the domain is live.
        let mw = unsafe {
            let ops = &(*(*pd.pd).context).ops;
            ops.alloc_mw.map_or(std::ptr::null_mut(), |alloc| {
                alloc(pd.pd, ffi::IBV_MW_TYPE_2)
            })
        };
        if mw.is_null() {
            return Err(errno());
        }
        // SAFETY: the window was allocated above.
        let first = unsafe { (*mw).rkey };
        // The lowest octet of the key belongs to the user of the window, and changes with each binding.
        let rkey = first & !0xff | (first.wrapping_add(1) & 0xff);
        Ok(Self { mw, rkey })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window is deallocated once. This also ends its binding.
        unsafe {
            let ops = &(*(*self.mw).context).ops;
            if let Some(dealloc) = ops.dealloc_mw {
                dealloc(self.mw);
            }
        }
    }
}

/// The route to a host: an address handle.
#[derive(Debug)]
pub struct Way {
    pd: Arc<Pd>,
    ah: *mut ffi::ibv_ah,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Way {}
// SAFETY: as above.
unsafe impl Sync for Way {}

impl Way {
    /// Creates the route to `to`, from the address with the index `from` in the GID table.
    pub fn new(pd: &Arc<Pd>, to: IpAddr, from: u8) -> Result<Self, i32> {
        let mut attr = ffi::ibv_ah_attr {
            grh: ffi::ibv_global_route {
                dgid: gid_of(to),
                sgid_index: from,
                hop_limit: 64,
                ..Default::default()
            },
            is_global: 1,
            port_num: 1,
            ..Default::default()
        };
        // SAFETY: the domain is live, the attributes are valid.
        let ah = unsafe { (pd.device.f.create_ah)(pd.pd, &raw mut attr) };
        if ah.is_null() {
            return Err(errno());
        }
        Ok(Self {
            pd: Arc::clone(pd),
            ah,
        })
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed once; requests have copied its contents.
        unsafe { (self.pd.device.f.destroy_ah)(self.ah) };
    }
}

/// A completion channel.
#[derive(Debug)]
pub struct Channel {
    device: &'static Device,
    channel: *mut ffi::ibv_comp_channel,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// Creates a channel with a non-blocking descriptor.
    pub fn new(device: &'static Device) -> Result<Arc<Self>, i32> {
        // SAFETY: the context is open; the descriptor belongs to the channel.
        let channel = unsafe {
            let channel = (device.f.create_channel)(device.context);
            if channel.is_null() {
                return Err(errno());
            }
            let fd = (*channel).fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if flags < 0 || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0 {
                let why = errno();
                (device.f.destroy_channel)(channel);
                return Err(why);
            }
            channel
        };
        Ok(Arc::new(Self { device, channel }))
    }

    /// Returns the descriptor, which is readable while there are events.
    pub fn fd(&self) -> c_int {
        // SAFETY: the channel is live.
        unsafe { (*self.channel).fd }
    }

    /// Takes all events.
    pub fn drain(&self) {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the arguments are valid for writes. A queue is destroyed only after its events are acknowledged, because
        // `ibv_destroy_cq` waits for that.
        unsafe {
            while (self.device.f.get_cq_event)(self.channel, &raw mut cq, &raw mut context) == 0 {
                (self.device.f.ack_cq_events)(cq, 1);
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the channel is destroyed once; its queues held references to this value.
        unsafe { (self.device.f.destroy_channel)(self.channel) };
    }
}

/// A completion of the device.
pub(crate) use ffi::ibv_wc as Wc;

/// A completion queue of the device.
#[derive(Debug)]
pub struct Completions {
    device: &'static Device,
    cq: *mut ffi::ibv_cq,
    _channel: Option<Arc<Channel>>,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Completions {}

impl Completions {
    /// Creates a queue for `entries` completions.
    pub fn new(
        device: &'static Device,
        entries: usize,
        channel: Option<Arc<Channel>>,
    ) -> Result<Self, i32> {
        let of_channel = channel.as_ref().map_or(std::ptr::null_mut(), |c| c.channel);
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context is open, the channel is null or points to a live object.
        let cq = unsafe {
            (device.f.create_cq)(device.context, entries, std::ptr::null_mut(), of_channel, 0)
        };
        if cq.is_null() {
            return Err(errno());
        }
        Ok(Self {
            device,
            cq,
            _channel: channel,
        })
    }

    /// Polls completions. Returns their number. The call also lets the device send and receive.
    pub(crate) fn poll(&self, into: &mut [Wc]) -> usize {
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is live, and there is room for `most`.
        let n = unsafe {
            let ops = &(*(*self.cq).context).ops;
            ops.poll_cq
                .map_or(0, |poll| poll(self.cq, most, into.as_mut_ptr()))
        };
        usize::try_from(n).unwrap_or(0)
    }

    /// Requests an event for the next completion.
    pub fn arm(&self) {
        // SAFETY: the queue is live.
        unsafe {
            let ops = &(*(*self.cq).context).ops;
            if let Some(arm) = ops.req_notify_cq {
                arm(self.cq, 0);
            }
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: the queue is destroyed once; its queue pairs have been destroyed (an endpoint drops its fields in that order).
        unsafe { (self.device.f.destroy_cq)(self.cq) };
    }
}

/// The destination of a request.
#[derive(Debug, Clone, Copy)]
pub struct To<'a> {
    /// The route to the host.
    pub way: &'a Way,
    /// The number of the queue pair there.
    pub qpn: u32,
    /// The Q_Key of the queue pair.
    pub qkey: u32,
}

/// The memory of one piece of a request.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Address.
    pub at: usize,
    /// Length in bytes.
    pub len: usize,
    /// Key of the region.
    pub lkey: u32,
}

/// A request to memory of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OneSided {
    /// Reads the peer's memory.
    Read,
    /// Writes the peer's memory.
    Write,
    /// Writes the peer's memory and creates a record with this immediate data (Write-Record with immediate data).
    Record(u32),
}

/// A record of a peer's write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Number of the writer's queue pair.
    pub qpn: u32,
    /// The immediate data, if there is any and the write is complete.
    pub word: Option<u32>,
    /// The key of the written memory.
    pub rkey: u32,
    /// The address of the written memory.
    pub base: u64,
    /// The length of the written memory in bytes.
    pub length: u32,
}

/// The settings that all endpoints of a job share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// The Q_Key of all queue pairs. Datagrams of other programs do not have it and are dropped.
    pub qkey: u32,
    /// The milliseconds without a response after which a peer counts as lost.
    pub timeout_ms: u32,
    /// Whether busy pairs of endpoints connect by links (`endpoint/link.rs`).
    pub links: bool,
    /// Whether receivers may read the messages that an endpoint announces.
    pub readable: bool,
}

/// A queue pair of any type.
#[derive(Debug)]
pub struct Qp {
    pd: Arc<Pd>,
    qp: *mut ffi::ibv_qp,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for Qp {}

impl Qp {
    /// Takes over a queue pair that was created in this domain. A null pointer means that creating
    /// it failed, and that errno has the reason.
    fn new(pd: &Arc<Pd>, qp: *mut ffi::ibv_qp) -> Result<Self, i32> {
        if qp.is_null() {
            return Err(errno());
        }
        Ok(Self {
            pd: Arc::clone(pd),
            qp,
        })
    }

    fn modify(&self, mut attr: ffi::ibv_qp_attr, mask: c_int) -> Result<(), i32> {
        // SAFETY: the queue pair is live, the attributes are valid.
        let rc = unsafe { (self.pd.device.f.modify_qp)(self.qp, &raw mut attr, mask) };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }

    /// Returns the number of the queue pair.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.qp).qp_num }
    }

    fn post(&self, wr: &mut ffi::ibv_send_wr) -> Result<(), i32> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the request and everything that it points to are valid. The callers guarantee this for the memory of its elements.
        let rc = unsafe {
            let ops = &(*(*self.qp).context).ops;
            ops.post_send
                .map_or(libc::ENOSYS, |post| post(self.qp, wr, &raw mut bad))
        };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }

    /// Posts a receive.
    ///
    /// # Safety
    /// The memory is registered, and is not used elsewhere until the completion.
    pub unsafe fn receive(&self, id: u64, piece: Piece) -> Result<(), i32> {
        // SAFETY: upheld by the caller.
        unsafe { self.receives(std::iter::once((id, piece))) }
    }

    /// Posts at most [`limits::REPOST`] receives by one call.
    ///
    /// # Safety
    /// The requirements of [`Self::receive`] apply to each.
    pub unsafe fn receives(&self, all: impl Iterator<Item = (u64, Piece)>) -> Result<(), i32> {
        let mut sges = [ffi::ibv_sge::default(); limits::REPOST];
        let mut list = [ffi::ibv_recv_wr::default(); limits::REPOST];
        let mut n = 0;
        for (((id, piece), sge), wr) in all.zip(&mut sges).zip(&mut list) {
            *sge = sge_of(piece);
            wr.wr_id = id;
            wr.sg_list = sge;
            wr.num_sge = 1;
            n += 1;
        }
        let mut next = std::ptr::null_mut();
        for wr in list.iter_mut().take(n).rev() {
            wr.next = next;
            next = wr;
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post`. The list and its elements are live during the call.
        let rc = unsafe {
            let ops = &(*(*self.qp).context).ops;
            ops.post_recv
                .map_or(libc::ENOSYS, |post| post(self.qp, next, &raw mut bad))
        };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the queue pair is destroyed once.
        unsafe { (self.pd.device.f.destroy_qp)(self.qp) };
    }
}

/// A reliable-datagram queue pair.
#[derive(Debug)]
pub struct QueuePair {
    qp: Qp,
    ex: *mut ffi::ibv_qp_ex,
}

// SAFETY: verbs may be called by any thread.
unsafe impl Send for QueuePair {}

impl Deref for QueuePair {
    type Target = Qp;

    fn deref(&self) -> &Qp {
        &self.qp
    }
}

impl QueuePair {
    /// Creates a queue pair. `plain`: its writes create no records, and it receives no messages. `port`: the UDP port, or 0
    /// to let the device choose one.
    pub fn new(
        pd: &Arc<Pd>,
        cq: &Completions,
        Job {
            qkey, timeout_ms, ..
        }: Job,
        plain: bool,
        port: u16,
    ) -> Result<Self, i32> {
        let f = &pd.device.f;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut attr = ffi::ibv_qp_init_attr_ex {
            send_cq: cq.cq,
            recv_cq: cq.cq,
            cap: ffi::ibv_qp_cap {
                max_send_wr: count(limits::REQUESTS),
                max_recv_wr: if plain { 1 } else { count(limits::RECEIVES) },
                max_send_sge: count(limits::IOV),
                max_recv_sge: 1,
                max_inline_data: count(limits::INLINE),
            },
            qp_type: ffi::IBV_QPT_DRIVER,
            comp_mask: ffi::IBV_QP_INIT_ATTR_PD | ffi::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd: pd.pd,
            send_ops_flags: ffi::IBV_QP_EX_WITH_SEND
                | ffi::IBV_QP_EX_WITH_RDMA_WRITE
                | ffi::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                | ffi::IBV_QP_EX_WITH_RDMA_READ,
            ..Default::default()
        };
        let kind = if plain {
            ffi::ANYWARPDV_QP_PLAIN_WRITES
        } else {
            ffi::ANYWARPDV_QP_RECORD_COMPLETIONS
        };
        let dv = ffi::anywarpdv_qp_init_attr {
            driver_qp_type: ffi::ANYWARPDV_QPT_RD,
            flags: ffi::ANYWARPDV_QP_KEEP_GOING | kind,
            max_send_size: count(limits::EAGER + crate::wire::HEADER),
            max_records: count(limits::RECORDS),
            max_reads: limits::READS,
            peer_timeout_ms: timeout_ms,
            port: port.into(),
            ..Default::default()
        };
        let size = count(size_of::<ffi::anywarpdv_qp_init_attr>());
        // SAFETY: the attributes are valid, and their objects are live.
        let qp = unsafe { (f.dv_create_qp)(pd.device.context, &raw mut attr, &raw const dv, size) };
        let qp = Qp::new(pd, qp)?;
        // SAFETY: the queue pair is live.
        let ex = unsafe { (f.qp_to_qp_ex)(qp.qp) };
        if ex.is_null() {
            return Err(libc::EOPNOTSUPP);
        }
        let mut attr = ffi::ibv_qp_attr {
            qp_state: ffi::IBV_QPS_INIT,
            port_num: 1,
            qkey,
            ..Default::default()
        };
        let steps = [
            (
                ffi::IBV_QPS_INIT,
                ffi::IBV_QP_STATE | ffi::IBV_QP_PKEY_INDEX | ffi::IBV_QP_PORT | ffi::IBV_QP_QKEY,
            ),
            (ffi::IBV_QPS_RTR, ffi::IBV_QP_STATE),
            (ffi::IBV_QPS_RTS, ffi::IBV_QP_STATE | ffi::IBV_QP_SQ_PSN),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            qp.modify(attr, mask)?;
        }
        Ok(Self { qp, ex })
    }

    fn send_to(
        &self,
        to: To<'_>,
        id: u64,
        mut sge: ffi::ibv_sge,
        (flags, soon): (u32, bool),
    ) -> Result<(), i32> {
        let later = if soon {
            0
        } else {
            ffi::ANYWARPDV_SEND_ACK_LATER
        };
        self.post(&mut ffi::ibv_send_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: ffi::IBV_WR_SEND,
            send_flags: flags | ffi::IBV_SEND_SIGNALED | later,
            wr: ffi::ibv_send_wr_wr {
                ud: ffi::ibv_send_wr_ud {
                    ah: to.way.ah,
                    remote_qpn: to.qpn,
                    remote_qkey: to.qkey,
                },
            },
            ..Default::default()
        })
    }

    /// Sends a message of at most [`limits::INLINE`] bytes, which is copied. `soon`: whether something waits for the
    /// completion. If not, the peer may acknowledge later, so that the acknowledgement does not disturb a program that
    /// computes.
    pub fn send_copy(&self, to: To<'_>, id: u64, message: &[u8], soon: bool) -> Result<(), i32> {
        let sge = ffi::ibv_sge {
            addr: message.as_ptr().expose_provenance() as u64,
            length: u32::try_from(message.len()).unwrap_or(u32::MAX),
            lkey: 0,
        };
        self.send_to(to, id, sge, (ffi::IBV_SEND_INLINE, soon))
    }

    /// Sends registered memory, with a completion. `soon`: see [`Self::send_copy`].
    ///
    /// # Safety
    /// The memory is registered with this key until the completion.
    pub unsafe fn send(&self, to: To<'_>, id: u64, piece: Piece, soon: bool) -> Result<(), i32> {
        self.send_to(to, id, sge_of(piece), (0, soon))
    }

    /// Reads or writes memory of a peer, with a completion.
    ///
    /// # Safety
    /// The requirements of [`Self::send`] apply. For a Read the memory is writable.
    pub unsafe fn one_sided(
        &self,
        to: To<'_>,
        id: u64,
        what: OneSided,
        (rkey, base): (u32, u64),
        pieces: &[Piece],
    ) -> Result<(), i32> {
        let mut list = [ffi::ibv_sge::default(); limits::IOV];
        for (to, piece) in list.iter_mut().zip(pieces) {
            *to = sge_of(*piece);
        }
        let ex = self.ex;
        // SAFETY: the queue pair is live. Only the thread that holds the domain's lock is between start and complete. The
        // library provides the functions of the operations that were requested at creation.
        let rc = unsafe {
            let (Some(start), Some(set_to), Some(set_list), Some(complete)) = (
                (*ex).wr_start,
                (*ex).wr_set_ud_addr,
                (*ex).wr_set_sge_list,
                (*ex).wr_complete,
            ) else {
                return Err(libc::ENOSYS);
            };
            start(ex);
            (*ex).wr_id = id;
            (*ex).wr_flags = ffi::IBV_SEND_SIGNALED;
            match what {
                OneSided::Read => (*ex).wr_rdma_read.map(|f| f(ex, rkey, base)),
                OneSided::Write => (*ex).wr_rdma_write.map(|f| f(ex, rkey, base)),
                OneSided::Record(word) => {
                    let word = word.to_be();
                    (*ex).wr_rdma_write_imm.map(|f| f(ex, rkey, base, word))
                }
            };
            set_to(ex, to.way.ah, to.qpn, to.qkey);
            set_list(ex, pieces.len().min(limits::IOV), list.as_ptr());
            complete(ex)
        };
        if rc == 0 { Ok(()) } else { Err(rc) }
    }

    /// Takes the record that belongs to a completion.
    pub fn record(&self) -> Option<Record> {
        let mut record = ffi::anywarpdv_record::default();
        let size = u32::try_from(size_of::<ffi::anywarpdv_record>()).unwrap_or(0);
        let qp = &self.qp;
        // SAFETY: the queue pair is live, and there is room for one record.
        let n = unsafe { (qp.pd.device.f.dv_poll_records)(qp.qp, 1, &raw mut record, size, 0) };
        if n != 1 {
            return None;
        }
        let has = |flag| record.flags & flag != 0;
        let word = (has(ffi::ANYWARPDV_RECORD_WITH_IMM) && has(ffi::ANYWARPDV_RECORD_COMPLETE))
            .then(|| u32::from_be(record.imm_data));
        Some(Record {
            qpn: record.src_qp,
            word,
            rkey: record.rkey,
            base: record.base,
            length: record.length,
        })
    }
}

/// A queue pair of a reliable connection, for messages and for writes to windows.
#[derive(Debug)]
pub struct Stream(Qp);

impl Deref for Stream {
    type Target = Qp;

    fn deref(&self) -> &Qp {
        &self.0
    }
}

impl Stream {
    /// Creates a queue pair, which is not connected.
    pub fn new(pd: &Arc<Pd>, cq: &Completions) -> Result<Self, i32> {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: cq.cq,
            recv_cq: cq.cq,
            cap: ffi::ibv_qp_cap {
                max_send_wr: count(limits::LINK_DEPTH + limits::BINDS),
                max_recv_wr: count(limits::LINK_DEPTH),
                max_send_sge: count(limits::IOV),
                max_recv_sge: 1,
                max_inline_data: count(limits::LINK_INLINE),
            },
            qp_type: ffi::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: the attributes are valid, and their objects are live.
        let qp = unsafe { (pd.device.f.create_qp)(pd.pd, &raw mut attr) };
        let made = Self(Qp::new(pd, qp)?);
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::IBV_QPS_INIT,
            port_num: 1,
            // The peer writes to windows that are bound on this queue pair.
            qp_access_flags: ffi::IBV_ACCESS_REMOTE_WRITE,
            ..Default::default()
        };
        made.modify(
            attr,
            ffi::IBV_QP_STATE
                | ffi::IBV_QP_PKEY_INDEX
                | ffi::IBV_QP_PORT
                | ffi::IBV_QP_ACCESS_FLAGS,
        )?;
        Ok(made)
    }

    /// Connects the queue pair to one of a peer. Both ends have to do this, in any order. The call does not wait for the
    /// connection; posted requests do.
    pub fn connect(&self, peer: Remote, from: u8, timeout_ms: u32) -> Result<(), i32> {
        const RNR_TIMER_640_US: u8 = 12;
        const FOR_EVER: u8 = 7;
        let ready_to_receive = ffi::ibv_qp_attr {
            qp_state: ffi::IBV_QPS_RTR,
            path_mtu: ffi::IBV_MTU_1024,
            dest_qp_num: peer.qpn,
            min_rnr_timer: RNR_TIMER_640_US,
            max_dest_rd_atomic: 1,
            ah_attr: ffi::ibv_ah_attr {
                grh: ffi::ibv_global_route {
                    dgid: gid_of(peer.ip),
                    sgid_index: from,
                    hop_limit: 64,
                    ..Default::default()
                },
                is_global: 1,
                port_num: 1,
                ..Default::default()
            },
            ..Default::default()
        };
        self.modify(
            ready_to_receive,
            ffi::IBV_QP_STATE
                | ffi::IBV_QP_AV
                | ffi::IBV_QP_PATH_MTU
                | ffi::IBV_QP_DEST_QPN
                | ffi::IBV_QP_RQ_PSN
                | ffi::IBV_QP_MAX_DEST_RD_ATOMIC
                | ffi::IBV_QP_MIN_RNR_TIMER,
        )?;
        let ready_to_send = ffi::ibv_qp_attr {
            qp_state: ffi::IBV_QPS_RTS,
            timeout: timeout_exponent(timeout_ms),
            retry_cnt: RETRIES,
            rnr_retry: FOR_EVER,
            max_rd_atomic: 1,
            ..Default::default()
        };
        self.modify(
            ready_to_send,
            ffi::IBV_QP_STATE
                | ffi::IBV_QP_SQ_PSN
                | ffi::IBV_QP_TIMEOUT
                | ffi::IBV_QP_RETRY_CNT
                | ffi::IBV_QP_RNR_RETRY
                | ffi::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// Ends the connection. Posted requests and receives complete with an error.
    pub fn fail(&self) {
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::IBV_QPS_ERR,
            ..Default::default()
        };
        // This fails only if the queue pair has failed already.
        let _done = self.modify(attr, ffi::IBV_QP_STATE);
    }

    /// Sends registered memory, with a completion.
    ///
    /// # Safety
    /// The memory is registered with this key, and does not change until the completion.
    pub unsafe fn send(&self, id: u64, piece: Piece) -> Result<(), i32> {
        let mut sge = sge_of(piece);
        let inline = if piece.len <= limits::LINK_INLINE {
            ffi::IBV_SEND_INLINE
        } else {
            0
        };
        self.post(&mut ffi::ibv_send_wr {
            wr_id: id,
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: ffi::IBV_WR_SEND,
            send_flags: ffi::IBV_SEND_SIGNALED | inline,
            ..Default::default()
        })
    }

    /// Writes to a window of the peer, with a completion here and one with this immediate data there.
    ///
    /// # Safety
    /// The requirements of [`Self::send`] apply.
    pub unsafe fn write(
        &self,
        id: u64,
        word: u32,
        (rkey, remote_addr): (u32, u64),
        pieces: &[Piece],
    ) -> Result<(), i32> {
        let mut list = [ffi::ibv_sge::default(); limits::IOV];
        for (to, piece) in list.iter_mut().zip(pieces) {
            *to = sge_of(*piece);
        }
        self.post(&mut ffi::ibv_send_wr {
            wr_id: id,
            sg_list: list.as_mut_ptr(),
            num_sge: c_int::try_from(pieces.len().min(limits::IOV)).unwrap_or(0),
            opcode: ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
            send_flags: ffi::IBV_SEND_SIGNALED,
            imm_data: word.to_be(),
            wr: ffi::ibv_send_wr_wr {
                rdma: ffi::ibv_send_wr_rdma { remote_addr, rkey },
            },
            ..Default::default()
        })
    }

    /// Creates a window for all of a region, which only the peer of this queue pair can write to, and posts the request that binds it.
    pub fn bind(&self, id: u64, region: &mut Region) -> Result<(), i32> {
        let window = Window::new(&self.pd)?;
        // SAFETY: the region is live.
        let (addr, length) =
            unsafe { ((*region.mr).addr.addr() as u64, (*region.mr).length as u64) };
        let bound = self.post(&mut ffi::ibv_send_wr {
            wr_id: id,
            opcode: ffi::IBV_WR_BIND_MW,
            send_flags: ffi::IBV_SEND_SIGNALED,
            op: ffi::ibv_send_wr_op {
                bind_mw: ffi::ibv_send_wr_bind_mw {
                    mw: window.mw,
                    rkey: window.rkey,
                    bind_info: ffi::ibv_mw_bind_info {
                        mr: region.mr,
                        addr,
                        length,
                        mw_access_flags: ffi::IBV_ACCESS_REMOTE_WRITE,
                    },
                },
            },
            ..Default::default()
        });
        if bound.is_ok() {
            region.window = Some(window);
        }
        bound
    }
}

fn sge_of(piece: Piece) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: piece.at as u64,
        length: u32::try_from(piece.len).unwrap_or(u32::MAX),
        lkey: piece.lkey,
    }
}

/// Returns the host that sent a datagram, from the route header.
pub fn source_of(route: &[u8]) -> Option<IpAddr> {
    if route.first()? >> 4 == 6 {
        let octets: [u8; 16] = route.get(8..24)?.try_into().ok()?;
        return Some(IpAddr::V6(Ipv6Addr::from(octets)).to_canonical());
    }
    let octets: [u8; 4] = route.get(32..36)?.try_into().ok()?;
    Some(IpAddr::from(octets))
}

/// The kind of operation that a completion belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// A receive.
    Receive,
    /// A record.
    Record,
    /// A request.
    Request,
}

/// Returns the kind of operation of a successful completion. A failed completion has no valid opcode, so the caller derives
/// the kind from the `wr_id`.
pub(crate) fn kind_of(wc: &Wc) -> Of {
    match wc.opcode {
        ffi::IBV_WC_RECV => Of::Receive,
        ffi::IBV_WC_DRIVER1 => Of::Record,
        _ => Of::Request,
    }
}

/// Returns the immediate data of a peer's write over a connection, if the completion is of one.
pub(crate) fn written_word(wc: &Wc) -> Option<u32> {
    (wc.opcode == ffi::IBV_WC_RECV_RDMA_WITH_IMM).then_some(u32::from_be(wc.imm_data))
}

/// Returns the error of libfabric for the status of a completion, or 0 for success.
pub(crate) fn error_of(wc: &Wc) -> i32 {
    use crate::abi::{
        FI_EACCES, FI_ECANCELED, FI_ECONNRESET, FI_EHOSTUNREACH, FI_EIO, FI_EREMOTEIO,
    };
    match wc.status {
        ffi::IBV_WC_SUCCESS => 0,
        ffi::IBV_WC_WR_FLUSH_ERR => FI_ECANCELED,
        ffi::IBV_WC_REM_INV_REQ_ERR => FI_EREMOTEIO,
        ffi::IBV_WC_REM_ACCESS_ERR => FI_EACCES,
        ffi::IBV_WC_RETRY_EXC_ERR => FI_EHOSTUNREACH,
        ffi::IBV_WC_REM_ABORT_ERR => FI_ECONNRESET,
        _ => FI_EIO,
    }
}

/// How often a request is repeated until its queue pair fails.
const RETRIES: u8 = 7;

/// Returns the exponent of the acknowledgement timeout, 4.096 µs × 2^exponent, with which a queue pair fails after at least `ms`
/// milliseconds without a response, and before twice that time. The time is never shorter than 0.5 s or longer than 20 hours.
fn timeout_exponent(ms: u32) -> u8 {
    let longest = |exponent: u8| (4_096_u64 << exponent) * (u64::from(RETRIES) + 1) / 1_000_000;
    (14..31)
        .find(|exponent| longest(*exponent) >= ms.into())
        .unwrap_or(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_fails_after_the_timeout_of_peers() {
        let after = |ms| 4.096e-3 * 2_f64.powi(timeout_exponent(ms).into()) * 8.0;
        for ms in [600, 5_000, 30_000, 600_000] {
            assert!(
                (f64::from(ms)..2.0 * f64::from(ms)).contains(&after(ms)),
                "{ms}"
            );
        }
        assert_eq!((timeout_exponent(1), timeout_exponent(u32::MAX)), (14, 31));
    }

    #[test]
    fn an_address_equals_its_gid() {
        for ip in ["10.1.2.3", "fe80::1:2", "127.0.0.1"] {
            let ip: IpAddr = ip.parse().unwrap();
            assert_eq!(ip_of(gid_of(ip)), ip);
        }
    }

    #[test]
    fn the_source_of_a_datagram_is_in_its_route_header() {
        let mut v4 = [0; 40];
        v4[20] = 0x45;
        v4[32..36].copy_from_slice(&[10, 1, 2, 3]);
        assert_eq!(source_of(&v4), Some("10.1.2.3".parse().unwrap()));
        let mut v6 = [0; 40];
        v6[0] = 0x60;
        v6[8..24].copy_from_slice(&"fd00::7".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(source_of(&v6), Some("fd00::7".parse().unwrap()));
        assert_eq!(source_of(&[]), None);
        assert_eq!(source_of(&v4[..30]), None);
    }
}
