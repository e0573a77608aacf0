//! `fi_getinfo`: compares the hints of a program with what the provider supports.
//!
//! The core of libfabric copies and frees the structures that are allocated here. Its version may have longer structures, so
//! each one is allocated by `calloc` with additional space.

use std::ffi::{CStr, c_char, c_void};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::abi::*;
use crate::address::{self, Remote};
use crate::limits;
use crate::opened::OPENED;
use crate::verbs::Device;

/// The name of the provider, of its fabric and of its domain.
pub const PROVIDER: &CStr = c"anywarp";
const FABRIC: &CStr = c"anywarp";
const DOMAIN: &CStr = c"anywarp0";

/// The size in bytes of the memory for an address, which is more than any socket address has.
const NAME: usize = 128;

/// The version of the provider.
pub const VERSION: u32 = fi_version(1, 0);

/// The protocol number, from the range for protocols of providers. The version of the protocol is in its messages.
const PROTOCOL: u32 = 1 << 31 | 0x0a11;

const MODIFIERS: u64 = FI_READ | FI_WRITE | FI_RECV | FI_SEND | FI_REMOTE_READ | FI_REMOTE_WRITE;
const MESSAGES: u64 = FI_MSG | FI_TAGGED | FI_RECV | FI_SEND | FI_DIRECTED_RECV;
const MEMORY: u64 = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
/// Capabilities that a program gets without requesting them.
const SECONDARY: u64 = FI_FENCE | FI_MULTI_RECV | FI_SOURCE | FI_LOCAL_COMM | FI_REMOTE_COMM;
const ALL: u64 = MESSAGES | MEMORY | FI_ATOMIC | SECONDARY;
/// Capabilities of the domain. They are not capabilities of its transmit and receive contexts.
const OF_DOMAIN: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM;
const MR_MODE: i32 = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
const ORDER: u64 = FI_ORDER_SAS
    | FI_ORDER_ATOMIC_RAR
    | FI_ORDER_ATOMIC_RAW
    | FI_ORDER_ATOMIC_WAR
    | FI_ORDER_ATOMIC_WAW;
/// Flags of operations that a program may set as defaults.
pub const OP_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_MULTI_RECV;
const TAG_FORMAT: u64 = 0xaaaa_aaaa_aaaa_aaaa;
/// The number of completion queues, and of counters, of a domain.
const QUEUES: usize = 1024;
/// The number of endpoints of a domain.
const ENDPOINTS: usize = 256;
/// The number of memory regions of a domain.
const REGIONS: usize = 1 << 20;

/// The hints of a program. Zero and `None` mean any value.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    given: bool,
    caps: u64,
    addr_format: u32,
    tx: Option<fi_tx_attr>,
    rx: Option<fi_rx_attr>,
    ep: Option<fi_ep_attr>,
    domain: Option<fi_domain_attr>,
    provider: Option<String>,
    fabric: Option<fi_fabric_attr>,
    fabric_name: Option<String>,
    domain_name: Option<String>,
    source: Option<Vec<u8>>,
    destination: Option<Vec<u8>>,
}

/// The part of the result that depends on the hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The open fabric and the open domain that the program has named, or the first ones. Null if none is open.
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    caps: u64,
    mr_mode: i32,
    threading: u32,
    control_progress: u32,
    av_type: u32,
    tag_format: u64,
    send_flags: u64,
    receive_flags: u64,
}

/// # Safety
/// `text` is null or a C string.
unsafe fn string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: upheld by the caller.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// # Safety
/// `at` is null or points to `len` bytes.
unsafe fn bytes(at: *const c_void, len: usize) -> Option<Vec<u8>> {
    if at.is_null() || len == 0 {
        return None;
    }
    // An address of more than `NAME` bytes is refused, and only its length matters for that.
    let len = len.min(NAME + 1);
    // SAFETY: upheld by the caller.
    Some(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec())
}

impl Hints {
    /// Converts the hints.
    ///
    /// # Safety
    /// `info` is null, or it and everything that it points to are valid.
    pub unsafe fn read(info: *const fi_info) -> Self {
        // SAFETY: upheld by the caller, for this and everything that it points to.
        unsafe {
            let Some(info) = info.as_ref() else {
                return Self::default();
            };
            let fabric = info.fabric_attr.as_ref();
            let domain = info.domain_attr.as_ref();
            Self {
                given: true,
                caps: info.caps,
                addr_format: info.addr_format,
                tx: info.tx_attr.as_ref().copied(),
                rx: info.rx_attr.as_ref().copied(),
                ep: info.ep_attr.as_ref().copied(),
                domain: domain.copied(),
                provider: fabric.and_then(|f| string(f.prov_name)),
                fabric: fabric.copied(),
                fabric_name: fabric.and_then(|f| string(f.name)),
                domain_name: domain.and_then(|d| string(d.name)),
                source: bytes(info.src_addr, info.src_addrlen),
                destination: bytes(info.dest_addr, info.dest_addrlen),
            }
        }
    }

    /// Returns the answer to the hints, or the reason why there is none.
    fn answer(&self, api: u32) -> Result<Answer, &'static str> {
        let same = |wanted: &Option<String>, ours: &CStr| {
            wanted
                .as_ref()
                .is_none_or(|w| w.as_bytes().eq_ignore_ascii_case(ours.to_bytes()))
        };
        if !same(&self.provider, PROVIDER) {
            return Err("another provider is requested");
        }
        if !same(&self.fabric_name, FABRIC) || !same(&self.domain_name, DOMAIN) {
            return Err("another fabric or domain is requested");
        }
        let (no_fabric, no_domain) = (std::ptr::null_mut(), std::ptr::null_mut());
        let fabric = self.fabric.map_or(no_fabric, |f| f.fabric);
        let domain = self.domain.map_or(no_domain, |d| d.domain);
        let named = OPENED.named(fabric, domain);
        // The hints may be an earlier answer, whose fabric and domain were closed since. An answer names this provider.
        let named = named.or_else(|| {
            self.provider.as_ref()?;
            let is_open = OPENED.named(no_fabric, domain).is_some();
            let without_domain = OPENED.named(fabric, no_domain);
            match (domain.is_null(), is_open) {
                // Both are open, and do not belong together.
                (false, true) if !fabric.is_null() && without_domain.is_some() => None,
                _ => without_domain.or_else(|| OPENED.named(no_fabric, no_domain)),
            }
        });
        let Some((fabric, domain)) = named else {
            return Err("a fabric or domain of another provider is requested");
        };
        if !matches!(
            self.addr_format,
            FI_FORMAT_UNSPEC | FI_SOCKADDR | FI_SOCKADDR_IN | FI_SOCKADDR_IN6
        ) {
            return Err("the address format is not one of socket addresses");
        }
        let ends = [&self.source, &self.destination];
        if ends.into_iter().flatten().any(|end| end.len() > NAME) {
            return Err("an address is too long");
        }
        if let Some(ep) = &self.ep {
            if !matches!(ep.r#type, FI_EP_UNSPEC | FI_EP_RDM) {
                return Err("the endpoint type is not FI_EP_RDM");
            }
            if !matches!(ep.protocol, FI_PROTO_UNSPEC | PROTOCOL)
                || ep.protocol_version > crate::wire::VERSION.into()
            {
                return Err("another protocol is requested");
            }
            if ep.max_msg_size > limits::MESSAGE {
                return Err("max_msg_size is too large");
            }
            if ep.max_order_raw_size > 0 || ep.max_order_war_size > 0 || ep.max_order_waw_size > 0 {
                return Err("orders of reads and writes are not guaranteed");
            }
            if ep.tx_ctx_cnt > 1 || ep.rx_ctx_cnt > 1 {
                return Err("several contexts are not supported");
            }
            if ep.auth_key_size > 0 {
                return Err("authorization keys are not supported");
            }
        }
        let mut wanted = self.caps;
        if let Some(tx) = &self.tx {
            if tx.inject_size > limits::INJECT
                || tx.size > limits::REQUESTS
                || tx.iov_limit > limits::IOV
                || tx.rma_iov_limit > 1
            {
                return Err("sizes of the transmit context are too large");
            }
            if tx.op_flags & !OP_FLAGS != 0 {
                return Err("some operation flags are not supported");
            }
            if tx.msg_order & !ORDER != 0 || tx.comp_order != 0 {
                return Err("a requested message or completion order is not guaranteed");
            }
            wanted |= tx.caps;
        }
        if let Some(rx) = &self.rx {
            if rx.iov_limit > limits::IOV
                || rx.size > limits::ENTRIES
                || rx.total_buffered_recv > limits::UNEXPECTED
            {
                return Err("sizes of the receive context are too large");
            }
            if rx.op_flags & !OP_FLAGS != 0 {
                return Err("some operation flags are not supported");
            }
            if rx.msg_order & !ORDER != 0 || rx.comp_order != 0 {
                return Err("a requested message or completion order is not guaranteed");
            }
            wanted |= rx.caps;
        }
        if wanted & !ALL != 0 {
            return Err("the provider does not have all requested capabilities");
        }
        let memory_wanted = wanted & (FI_RMA | FI_ATOMIC) != 0;
        let mode = self.domain.as_ref().map_or(0, |d| d.mr_mode);
        // Before version 1.5 a memory registration mode was a number. Since then it is a set of
        // bits. A program of a later version that passes no hints gets the bits that this provider
        // needs.
        let old = api < fi_version(1, 5);
        let mr_mode = if mode == FI_MR_BASIC || (old && mode == FI_MR_UNSPEC) {
            Some(FI_MR_BASIC)
        } else if !self.given || mode & MR_MODE == MR_MODE {
            Some(MR_MODE)
        } else {
            None
        };
        if memory_wanted && mr_mode.is_none() {
            return Err(
                "memory registration requires FI_MR_VIRT_ADDR, FI_MR_ALLOCATED and FI_MR_PROV_KEY",
            );
        }
        let kinds = FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC;
        let named = wanted & MODIFIERS;
        let mut caps = wanted & (kinds | FI_DIRECTED_RECV) | SECONDARY;
        if wanted & kinds == 0 {
            caps |= FI_MSG | FI_TAGGED | FI_DIRECTED_RECV;
            if mr_mode.is_some() {
                caps |= FI_RMA | FI_ATOMIC;
            } else if named & MEMORY != 0 {
                return Err("accesses to memory are requested without a mode of registration");
            }
        }
        // Hints that name a kind of operation but none of its directions request all of them.
        caps |= named;
        for (kinds, directions) in [
            (FI_MSG | FI_TAGGED, MESSAGES & MODIFIERS),
            (FI_RMA | FI_ATOMIC, MEMORY & MODIFIERS),
        ] {
            if caps & kinds != 0 && named & directions == 0 {
                caps |= directions;
            }
        }
        let mr_mode = if caps & (FI_RMA | FI_ATOMIC) == 0 {
            0
        } else {
            mr_mode.unwrap_or(0)
        };
        let mut answer = Answer {
            fabric,
            domain,
            caps,
            mr_mode,
            threading: FI_THREAD_SAFE,
            control_progress: FI_PROGRESS_MANUAL,
            // Address vectors of both types behave the same in this provider. A type is returned
            // only if the program requested it: a program that gets FI_AV_TABLE without requesting
            // it may use index 0 for each new peer, which is right for the first peer only.
            av_type: FI_AV_UNSPEC,
            tag_format: TAG_FORMAT,
            send_flags: self.tx.as_ref().map_or(0, |tx| tx.op_flags),
            receive_flags: self.rx.as_ref().map_or(0, |rx| rx.op_flags),
        };
        if let Some(domain) = &self.domain {
            if domain.data_progress == FI_PROGRESS_AUTO {
                return Err(
                    "FI_PROGRESS_AUTO is not supported: only calls of the program transfer data",
                );
            }
            if domain.caps & !OF_DOMAIN != 0 {
                return Err("the domain does not have all requested capabilities");
            }
            if domain.cq_data_size > 8
                || domain.mr_key_size > 8
                || domain.mr_iov_limit > 1
                || domain.max_err_data > 0
            {
                return Err("sizes of the domain are too large");
            }
            // Like libfabric's own checks, this does not refuse larger numbers of completion queues, endpoints and contexts.
            if domain.cntr_cnt > QUEUES || domain.mr_cnt > REGIONS {
                return Err("more objects are requested than a domain has");
            }
            if domain.max_ep_stx_ctx > 0 || domain.max_ep_srx_ctx > 0 {
                return Err("shared contexts are not supported");
            }
            if domain.auth_key_size > 0 {
                return Err("authorization keys are not supported");
            }
            if domain.threading != FI_THREAD_UNSPEC {
                answer.threading = domain.threading;
            }
            if domain.control_progress != FI_PROGRESS_UNSPEC {
                answer.control_progress = domain.control_progress;
            }
            if domain.av_type != FI_AV_UNSPEC {
                answer.av_type = domain.av_type;
            }
        }
        if let Some(format) = self.ep.as_ref().map(|ep| ep.mem_tag_format)
            && format != 0
        {
            answer.tag_format = format;
        }
        Ok(answer)
    }
}

/// Allocates zeroed memory of the C library for a `T`, with additional space.
fn zeroed<T>() -> Option<*mut T> {
    // SAFETY: `calloc` has no requirements.
    let at = unsafe { libc::calloc(1, size_of::<T>() + limits::SLACK) };
    (!at.is_null()).then_some(at.cast())
}

/// Allocates memory of the C library for a value.
fn made<T>(value: T) -> Option<*mut T> {
    let at = zeroed::<T>()?;
    // SAFETY: memory of `calloc` is aligned for any structure, and large enough for this one.
    unsafe { at.write(value) };
    Some(at)
}

fn text(from: &CStr) -> Option<*mut c_char> {
    // SAFETY: the argument is a C string.
    let at = unsafe { libc::strdup(from.as_ptr()) };
    (!at.is_null()).then_some(at)
}

fn name_copy(name: &[u8]) -> Option<*mut c_void> {
    let at = zeroed::<[u8; NAME]>()?;
    // SAFETY: the buffer has `NAME` bytes, and no more are copied.
    unsafe { std::ptr::copy_nonoverlapping(name.as_ptr(), at.cast(), name.len().min(NAME)) };
    Some(at.cast())
}

/// The source and destination addresses of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ends {
    format: u32,
    source: Vec<u8>,
    destination: Option<Vec<u8>>,
}

/// Returns the libfabric name for a socket address ([`crate::address`]). The index in it is 0.
fn plain_name(addr: SocketAddr) -> Vec<u8> {
    let remote = Remote {
        ip: addr.ip(),
        qpn: u32::from(addr.port()) << 8,
    };
    let (name, len) = remote.name();
    name.get(..len).unwrap_or_default().to_vec()
}

fn family_of(name: &[u8]) -> Option<i32> {
    let family = name.first_chunk::<2>()?;
    Some(i32::from(u16::from_ne_bytes(*family)))
}

/// Returns the address of a node. If `numeric` is set, the node must be an IP address, and no name
/// is looked up.
fn resolve(
    node: &str,
    service: Option<&str>,
    v4: Option<bool>,
    numeric: bool,
) -> Option<SocketAddr> {
    let port = address::port_of_service(service.unwrap_or("0"))?;
    if numeric {
        let addr = SocketAddr::new(node.parse().ok()?, port);
        return v4.is_none_or(|v4| addr.is_ipv4() == v4).then_some(addr);
    }
    let mut found = (node, port).to_socket_addrs().ok()?;
    found.find(|addr| v4.is_none_or(|v4| addr.is_ipv4() == v4))
}

fn ends(
    device: &Device,
    hints: &Hints,
    node: Option<&str>,
    service: Option<&str>,
    flags: u64,
) -> Result<Ends, &'static str> {
    let is_source = flags & FI_SOURCE != 0;
    let numeric = flags & FI_NUMERICHOST != 0;
    let v4 = match hints.addr_format {
        FI_SOCKADDR_IN => Some(true),
        FI_SOCKADDR_IN6 => Some(false),
        _ => None,
    };
    let mut local: Option<IpAddr> = None;
    let mut port = 0;
    let mut destination = hints.destination.clone();
    // A host or service that is the source is used in place of the hint.
    let is_given = is_source && (node.is_some() || service.is_some());
    let hint = hints.source.as_deref().filter(|_| !is_given);
    if let Some((ip, of_hint, _)) = hint.and_then(address::parts_of) {
        local = Some(ip);
        port = of_hint;
    }
    if let Some(node) = node {
        let addr = resolve(node, service, v4, numeric).ok_or("the node or service is not known")?;
        if is_source {
            local = Some(addr.ip());
            port = addr.port();
        } else {
            destination = Some(plain_name(addr));
        }
    }
    if let (None, Some(service), true) = (node, service, is_source) {
        port = address::port_of_service(service).ok_or("the service is not known")?;
    }
    let v4 = v4.or_else(|| Some(family_of(destination.as_ref()?)? == libc::AF_INET));
    let ip = match local {
        Some(ip) if !ip.is_unspecified() => {
            device
                .gid_index_of(ip)
                .ok_or("the device does not have the source address")?;
            ip
        }
        _ => {
            let found = device.address(v4).or_else(|| device.address(None));
            found.ok_or("the device has no address")?.0
        }
    };
    if v4.is_some_and(|v4| v4 != ip.is_ipv4()) {
        return Err("the device has no address of the requested family");
    }
    Ok(Ends {
        format: address::format_of(ip),
        source: plain_name(SocketAddr::new(ip, port)),
        destination,
    })
}

/// Creates the structure for an answer. If memory is exhausted, parts that were allocated before are leaked.
fn structure(answer: &Answer, ends: &Ends, api: u32) -> Option<*mut fi_info> {
    let tx = fi_tx_attr {
        caps: answer.caps
            & (FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC | FI_SEND | FI_READ | FI_WRITE | FI_FENCE),
        mode: 0,
        op_flags: answer.send_flags,
        msg_order: ORDER,
        comp_order: 0,
        inject_size: limits::INJECT,
        size: limits::REQUESTS,
        iov_limit: limits::IOV,
        rma_iov_limit: 1,
        tclass: 0,
    };
    let rx = fi_rx_attr {
        caps: answer.caps & !(FI_SEND | FI_READ | FI_WRITE | FI_FENCE | OF_DOMAIN),
        mode: 0,
        op_flags: answer.receive_flags,
        msg_order: ORDER,
        comp_order: 0,
        total_buffered_recv: limits::UNEXPECTED,
        size: limits::ENTRIES,
        iov_limit: limits::IOV,
    };
    let ep = fi_ep_attr {
        r#type: FI_EP_RDM,
        protocol: PROTOCOL,
        protocol_version: crate::wire::VERSION.into(),
        max_msg_size: limits::MESSAGE,
        msg_prefix_size: 0,
        max_order_raw_size: 0,
        max_order_war_size: 0,
        max_order_waw_size: 0,
        mem_tag_format: answer.tag_format,
        tx_ctx_cnt: 1,
        rx_ctx_cnt: 1,
        auth_key_size: 0,
        auth_key: std::ptr::null_mut(),
    };
    let domain = fi_domain_attr {
        domain: answer.domain,
        name: text(DOMAIN)?,
        threading: answer.threading,
        control_progress: answer.control_progress,
        data_progress: FI_PROGRESS_MANUAL,
        resource_mgmt: FI_RM_ENABLED,
        av_type: answer.av_type,
        mr_mode: answer.mr_mode,
        mr_key_size: 8,
        cq_data_size: 8,
        cq_cnt: QUEUES,
        ep_cnt: ENDPOINTS,
        tx_ctx_cnt: ENDPOINTS,
        rx_ctx_cnt: ENDPOINTS,
        max_ep_tx_ctx: 1,
        max_ep_rx_ctx: 1,
        max_ep_stx_ctx: 0,
        max_ep_srx_ctx: 0,
        cntr_cnt: QUEUES,
        mr_iov_limit: 1,
        caps: OF_DOMAIN,
        mode: 0,
        auth_key: std::ptr::null_mut(),
        auth_key_size: 0,
        max_err_data: 0,
        mr_cnt: REGIONS,
        tclass: 0,
    };
    let fabric = fi_fabric_attr {
        fabric: answer.fabric,
        name: text(FABRIC)?,
        // The core sets this field.
        prov_name: std::ptr::null_mut(),
        prov_version: VERSION,
        api_version: api,
    };
    let (dest_addr, dest_addrlen) = match &ends.destination {
        Some(name) => (name_copy(name)?, name.len()),
        None => (std::ptr::null_mut(), 0),
    };
    made(fi_info {
        next: std::ptr::null_mut(),
        caps: answer.caps,
        mode: 0,
        addr_format: ends.format,
        src_addrlen: ends.source.len(),
        dest_addrlen,
        src_addr: name_copy(&ends.source)?,
        dest_addr,
        handle: std::ptr::null_mut(),
        tx_attr: made(tx)?,
        rx_attr: made(rx)?,
        ep_attr: made(ep)?,
        domain_attr: made(domain)?,
        fabric_attr: made(fabric)?,
        nic: std::ptr::null_mut(),
    })
}

/// Answers hints. Returns the structure, or the reason why there is no answer.
///
/// # Safety
/// `node` and `service` are null or C strings. `hints` is null, or it and everything that it points to are valid.
pub unsafe fn answer(
    api: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
) -> Result<*mut fi_info, String> {
    // SAFETY: upheld by the caller.
    let (hints, node, service) = unsafe { (Hints::read(hints), string(node), string(service)) };
    let answer = hints.answer(api).map_err(str::to_owned)?;
    let device = Device::get().map_err(|why| {
        crate::log::warn(&why.to_string());
        why.to_string()
    })?;
    let ends = ends(device, &hints, node.as_deref(), service.as_deref(), flags)?;
    structure(&answer, &ends, api).ok_or_else(|| "no memory".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u32 = fi_version(1, 17);

    fn domain() -> fi_domain_attr {
        // SAFETY: zeros are valid for all members.
        unsafe { std::mem::zeroed() }
    }

    fn ep() -> fi_ep_attr {
        // SAFETY: as above.
        unsafe { std::mem::zeroed() }
    }

    fn asks(caps: u64, mr_mode: i32) -> Hints {
        Hints {
            given: true,
            caps,
            domain: Some(fi_domain_attr {
                mr_mode,
                ..domain()
            }),
            ..Hints::default()
        }
    }

    #[test]
    fn an_address_that_is_too_long_is_refused() {
        let name = [0u8; NAME + 1];
        for len in [16, NAME, NAME + 1, usize::MAX] {
            // SAFETY: zeros are valid for all members.
            let mut info: fi_info = unsafe { std::mem::zeroed() };
            info.src_addr = name.as_ptr().cast_mut().cast();
            info.src_addrlen = len;
            // SAFETY: at most `NAME` + 1 bytes of an address are read.
            let hints = unsafe { Hints::read(&raw const info) };
            assert_eq!(hints.answer(NOW).is_ok(), len <= NAME, "{len} bytes");
        }
    }

    #[test]
    fn hints_of_open_mpi_and_mpich_are_accepted() {
        let open_mpi = asks(
            FI_TAGGED | FI_LOCAL_COMM | FI_REMOTE_COMM | FI_DIRECTED_RECV,
            0,
        );
        let got = open_mpi.answer(fi_version(1, 5)).unwrap();
        assert_eq!(got.caps & (FI_MSG | FI_RMA), 0);
        assert_eq!(
            got.caps & (FI_TAGGED | FI_SEND | FI_RECV),
            FI_TAGGED | FI_SEND | FI_RECV
        );
        assert_eq!(got.mr_mode, 0);
        let mpich = asks(0, MR_MODE | 1 << 9).answer(fi_version(2, 5)).unwrap();
        assert_eq!((mpich.caps, mpich.mr_mode), (ALL, MR_MODE));
        assert_eq!(Hints::default().answer(NOW).unwrap().mr_mode, MR_MODE);
    }

    #[test]
    fn memory_needs_a_mode_that_is_kept() {
        assert!(asks(FI_RMA, 0).answer(NOW).is_err());
        assert!(asks(FI_RMA, FI_MR_VIRT_ADDR).answer(NOW).is_err());
        assert!(
            asks(FI_RMA, FI_MR_SCALABLE)
                .answer(fi_version(1, 4))
                .is_err()
        );
        assert_eq!(
            asks(FI_RMA, 0).answer(fi_version(1, 4)).unwrap().mr_mode,
            FI_MR_BASIC
        );
        let without = asks(0, 0).answer(NOW).unwrap();
        assert_eq!((without.caps & FI_RMA, without.mr_mode), (0, 0));
        let named = asks(FI_MSG | FI_SEND, 0).answer(NOW).unwrap();
        assert_eq!(named.caps & MODIFIERS, FI_SEND);
    }

    #[test]
    fn directions_are_those_requested_or_all_of_a_kind() {
        let both = FI_MSG | FI_RMA;
        for (wanted, directions) in [
            (FI_MSG, FI_SEND | FI_RECV),
            (FI_RMA, MEMORY & MODIFIERS),
            (both, MODIFIERS),
            (both | FI_WRITE, FI_SEND | FI_RECV | FI_WRITE),
            (both | FI_SEND, FI_SEND | MEMORY & MODIFIERS),
            (both | FI_RECV | FI_READ, FI_RECV | FI_READ),
            (FI_RMA | FI_RECV, FI_RECV | MEMORY & MODIFIERS),
            (FI_SEND, FI_SEND | MEMORY & MODIFIERS),
        ] {
            let answer = asks(wanted, MR_MODE).answer(NOW).unwrap();
            assert_eq!(answer.caps & MODIFIERS, directions, "{wanted:#x}");
            assert_eq!(answer.caps & wanted, wanted);
        }
        assert!(asks(FI_READ, 0).answer(NOW).is_err());
    }

    #[test]
    fn unsupported_hints_are_refused() {
        assert!(asks(1 << 5, 0).answer(NOW).is_err(), "multicast");
        assert!(asks(1 << 47, MR_MODE).answer(NOW).is_err(), "other memory");
        let refuses = |change: &dyn Fn(&mut Hints)| {
            let mut hints = asks(FI_MSG, 0);
            assert!(hints.answer(NOW).is_ok());
            change(&mut hints);
            hints.answer(NOW).is_err()
        };
        assert!(refuses(
            &|h| h.provider = Some("anywarp;^ofi_rxm".to_owned())
        ));
        assert!(refuses(&|h| h.domain_name = Some("mlx5_0".to_owned())));
        assert!(refuses(&|h| h.addr_format = 7));
        for provider in [None, Some("anywarp".to_owned())] {
            let is_unnamed = provider.is_none();
            let refused = refuses(&|h| {
                h.provider.clone_from(&provider);
                h.domain = Some(fi_domain_attr {
                    domain: std::ptr::dangling_mut(),
                    ..domain()
                });
            });
            assert_eq!(refused, is_unnamed, "a domain that is not open");
        }
        // FI_SHARED_AV
        for caps in [1 << 53, 1 << 53 | FI_LOCAL_COMM] {
            assert!(refuses(&|h| {
                h.domain = Some(fi_domain_attr { caps, ..domain() });
            }));
        }
        let counts: [fn(&mut fi_domain_attr); 3] = [
            |d| d.cntr_cnt = QUEUES + 1,
            |d| d.mr_cnt = REGIONS + 1,
            |d| d.max_err_data = 1,
        ];
        for change in counts {
            assert!(refuses(&|h| h.domain.iter_mut().for_each(change)));
        }
        for kind in [1, 2] {
            assert!(refuses(&|h| h.ep = Some(fi_ep_attr {
                r#type: kind,
                ..ep()
            })));
        }
        assert!(refuses(&|h| h.ep = Some(fi_ep_attr {
            max_msg_size: usize::MAX,
            ..ep()
        })));
        assert!(refuses(&|h| {
            let data_progress = FI_PROGRESS_AUTO;
            h.domain = Some(fi_domain_attr {
                data_progress,
                ..domain()
            });
        }));
    }

    #[test]
    fn requested_attributes_are_returned() {
        let mut hints = asks(FI_MSG, 0);
        hints.domain = Some(fi_domain_attr {
            threading: 3,
            av_type: FI_AV_MAP,
            control_progress: FI_PROGRESS_AUTO,
            ..domain()
        });
        hints.ep = Some(fi_ep_attr {
            mem_tag_format: 0xff,
            ..ep()
        });
        let got = hints.answer(NOW).unwrap();
        assert_eq!((got.threading, got.av_type), (3, FI_AV_MAP));
        assert_eq!(
            (got.control_progress, got.tag_format),
            (FI_PROGRESS_AUTO, 0xff)
        );
    }
}
