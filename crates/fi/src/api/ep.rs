//! Endpoints: opening, binding, options.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_void};

use super::object::{AvObject, CntrObject, CqObject, DefaultFlags};
use super::object::{
    DomainObject, EpObject, NONE, Table, ended, ended_int, give, head, known, ops, take,
    with_endpoint,
};
use super::{atomic, av, message, rma};
use crate::abi::*;
use crate::address;
use crate::endpoint::{Binding, Counts, Endpoint};
use crate::info::OP_FLAGS;
use crate::limits;
use crate::verbs::{Device, Job};

static OPS: Table<fi_ops> = ops(close as *const (), bind as *const (), control as *const ());
static EP_OPS: Table<fi_ops_ep> = Table(fi_ops_ep {
    size: size_of::<fi_ops_ep>(),
    cancel: cancel as *const (),
    getopt: getopt as *const (),
    setopt: setopt as *const (),
    tx_ctx: NONE,
    rx_ctx: NONE,
    rx_size_left: NONE,
    tx_size_left: NONE,
});
static CM_OPS: Table<fi_ops_cm> = Table(fi_ops_cm {
    size: size_of::<fi_ops_cm>(),
    setname: setname as *const (),
    getname: getname as *const (),
    getpeer: NONE,
    connect: NONE,
    listen: NONE,
    accept: NONE,
    reject: NONE,
    shutdown: NONE,
    join: NONE,
});
static NO_COLLECTIVES: Table<fi_ops_collective> = Table(fi_ops_collective {
    size: size_of::<fi_ops_collective>(),
    barrier: NONE,
    broadcast: NONE,
    alltoall: NONE,
    allreduce: NONE,
    allgather: NONE,
    reduce_scatter: NONE,
    reduce: NONE,
    scatter: NONE,
    gather: NONE,
    msg: NONE,
    barrier2: NONE,
});

/// Returns the number in an environment variable, decimal or hexadecimal with the prefix 0x. Returns `usual` if the variable
/// is not set or contains no number.
fn number(name: &str, usual: u32) -> u32 {
    let Some(text) = crate::log::variable(name) else {
        return usual;
    };
    let text = text.trim();
    let number = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    number.unwrap_or_else(|_| {
        crate::log::warn(&format!(
            "{name}={text}: not a number of 32 bits; {usual:#x} is used"
        ));
        usual
    })
}

/// Returns whether announced messages are read by their receivers, instead of written by their senders.
fn rendezvous_by_read() -> bool {
    let Some(text) = crate::log::variable("FI_ANYWARP_RENDEZVOUS") else {
        return false;
    };
    match text.trim() {
        "read" => true,
        "write" => false,
        other => {
            crate::log::warn(&format!(
                "FI_ANYWARP_RENDEZVOUS={other}: neither write nor read; write is used"
            ));
            false
        }
    }
}

fn job() -> Job {
    const USUAL_KEY: u32 = 0x0f1a_0b01;
    let readable = rendezvous_by_read();
    Job {
        qkey: number("FI_ANYWARP_QKEY", USUAL_KEY),
        timeout_ms: number("FI_ANYWARP_PEER_TIMEOUT_MS", limits::PEER_TIMEOUT_MS).max(1),
        // Links (reliable connections) do not support announced messages that the receiver reads, so
        // `readable` turns links off.
        links: !readable && number("FI_ANYWARP_LINKS", 1) != 0,
        readable,
    }
}

/// Returns an address of the device with its index in the GID table.
fn local(device: &Device, ip: IpAddr) -> Result<(IpAddr, u8), c_int> {
    Ok((ip, device.gid_index_of(ip).ok_or(FI_EADDRNOTAVAIL)?))
}

pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    info: *mut fi_info,
    ep: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    ended_int(|| {
        // SAFETY: the caller guarantees that the structures and everything that they point to are valid.
        let (domain, info, source) = unsafe {
            let info = info.as_ref().ok_or(FI_EINVAL)?;
            let kind = info.ep_attr.as_ref().map_or(FI_EP_RDM, |ep| ep.r#type);
            if !matches!(kind, FI_EP_RDM | FI_EP_UNSPEC) {
                return Err(FI_EINVAL);
            }
            let source = (!info.src_addr.is_null() && info.src_addrlen >= address::LEN_V4)
                .then(|| std::slice::from_raw_parts(info.src_addr.cast::<u8>(), info.src_addrlen));
            (&known::<DomainObject, _>(domain)?.domain, info, source)
        };
        let device = domain.device;
        let wanted = source.and_then(address::parts_of);
        let port = wanted.map_or(0, |(_, port, _)| port);
        let wanted = wanted.map(|(ip, ..)| ip);
        let from = match wanted {
            Some(ip) if !ip.is_unspecified() => local(device, ip)?,
            _ => device.address(None).ok_or(FI_EADDRNOTAVAIL)?,
        };
        // SAFETY: the caller passes null or a valid pointer.
        let (send_flags, receive_flags) = unsafe {
            (
                info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags),
                info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags),
            )
        };
        let binding = Binding {
            caps: info.caps,
            multi_min: limits::MULTI_RECV_MIN,
            ..Binding::default()
        };
        let mut state = domain.lock();
        let made = Endpoint::new(
            &state.shared,
            device,
            &domain.channel,
            from,
            port,
            job(),
            binding,
        )?;
        let name = state.endpoints.insert(made).map_err(|_full| FI_ENOMEM)?;
        let object = EpObject {
            fid: fid_ep {
                fid: head(FI_CLASS_EP, context, &OPS),
                ops: &raw const EP_OPS.0,
                cm: &raw const CM_OPS.0,
                msg: &raw const message::MSG_OPS.0,
                rma: &raw const rma::RMA_OPS.0,
                tagged: &raw const message::TAGGED_OPS.0,
                atomic: &raw const atomic::ATOMIC_OPS.0,
                collective: &raw const NO_COLLECTIVES.0,
            },
            domain: Arc::clone(domain),
            name,
            rest: DefaultFlags {
                send: send_flags.into(),
                receive: receive_flags.into(),
            },
        };
        // SAFETY: the caller passes null or a writable location.
        unsafe { give(object, ep) }
    })
}

unsafe extern "C" fn close(at: *mut fid) -> c_int {
    ended_int(|| {
        // SAFETY: this process opened the object, and the program does not use it any more.
        let object = unsafe { take::<EpObject, _>(at) }?;
        super::eq::unbind(at);
        let mut guard = object.domain.lock();
        let state = &mut *guard;
        let endpoint = state.endpoints.get_mut(object.name).ok_or(FI_EINVAL)?;
        endpoint.objects -= 1;
        if endpoint.objects == 0
            && let Some(mut endpoint) = state.endpoints.remove(object.name)
        {
            endpoint.close(&mut state.shared);
        }
        Ok(0)
    })
}

unsafe extern "C" fn bind(at: *mut fid, other: *mut fid, flags: u64) -> c_int {
    ended_int(|| {
        // SAFETY: the pointer is null or an object (guaranteed by the caller).
        let class = unsafe { other.as_ref() }.ok_or(FI_EINVAL)?.fclass;
        // SAFETY: the class tells the type of the object, and the endpoint was opened by this library (guaranteed by the caller).
        let (name, domain, own) = unsafe {
            let own = &known::<EpObject, _>(at)?.domain;
            let (name, domain) = match u32::try_from(class).unwrap_or(0) {
                FI_CLASS_CQ => known::<CqObject, _>(other).map(|o| (o.name, &o.domain))?,
                FI_CLASS_AV => known::<AvObject, _>(other).map(|o| (o.name, &o.domain))?,
                FI_CLASS_CNTR => known::<CntrObject, _>(other).map(|o| (o.name, &o.domain))?,
                FI_CLASS_EQ => (0, own),
                _ => return Err(FI_EINVAL),
            };
            (name, domain, own)
        };
        if !Arc::ptr_eq(domain, own) {
            return Err(FI_EDOMAIN);
        }
        // SAFETY: this process opened the object.
        unsafe {
            with_endpoint(at, |endpoint, _| {
                // A counter may be bound to an enabled endpoint, and counts from then on, as with other providers. Sandia OpenSHMEM binds
                // the counters of contexts that it creates later to one endpoint.
                if endpoint.enabled && class as u32 != FI_CLASS_CNTR {
                    return Err(FI_EOPBADSTATE);
                }
                attach(&mut endpoint.binding, class as u32, name, flags)?;
                if class as u32 == FI_CLASS_EQ {
                    super::eq::bind(at, other);
                }
                Ok(0)
            })
        }
    })
}

fn attach(binding: &mut Binding, class: u32, name: u32, flags: u64) -> Result<(), c_int> {
    match class {
        FI_CLASS_CQ => {
            if flags & (FI_SEND | FI_RECV) == 0
                || flags & !(FI_SEND | FI_RECV | FI_SELECTIVE_COMPLETION) != 0
            {
                return Err(FI_EBADFLAGS);
            }
            let selective = flags & FI_SELECTIVE_COMPLETION != 0;
            if flags & FI_SEND != 0 {
                binding.send_queue = Some(name);
                binding.send_selective = selective;
            }
            if flags & FI_RECV != 0 {
                binding.receive_queue = Some(name);
                binding.receive_selective = selective;
            }
        }
        FI_CLASS_AV => binding.vector = Some(name),
        FI_CLASS_CNTR => {
            let known = Counts::ALL.iter().fold(0, |all, (_, flag)| all | flag);
            if flags & known == 0 || flags & !known != 0 {
                return Err(FI_EBADFLAGS);
            }
            for ((_, flag), counter) in Counts::ALL.iter().zip(&mut binding.counters) {
                if flags & flag != 0 {
                    *counter = Some(name);
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// Returns the default flags of the direction that `flags` names by `FI_TRANSMIT` or `FI_RECV`.
fn of_direction(usual: &DefaultFlags, flags: u64) -> Result<&AtomicU64, c_int> {
    match flags & (FI_TRANSMIT | FI_RECV) {
        FI_TRANSMIT => Ok(&usual.send),
        FI_RECV => Ok(&usual.receive),
        _ => Err(FI_EINVAL),
    }
}

/// Changes the default flags of the direction that is in `flags`.
fn set_flags(usual: &DefaultFlags, flags: u64) -> Result<(), c_int> {
    let of_direction = of_direction(usual, flags)?;
    let wanted = flags & !(FI_TRANSMIT | FI_RECV);
    let other_direction = if flags & FI_RECV != 0 {
        FI_INJECT | FI_INJECT_COMPLETE
    } else {
        FI_MULTI_RECV
    };
    if wanted & !(OP_FLAGS & !other_direction) != 0 {
        return Err(FI_EBADFLAGS);
    }
    of_direction.store(wanted, Ordering::Relaxed);
    Ok(())
}

/// Gives the program another object for an endpoint, with other default flags.
///
/// # Safety
/// `to` is null or writable.
unsafe fn give_alias(object: &EpObject, to: *mut *mut fid, flags: u64) -> Result<isize, c_int> {
    let usual = |flags: &AtomicU64| AtomicU64::new(flags.load(Ordering::Relaxed));
    let alias = EpObject {
        fid: object.fid,
        domain: Arc::clone(&object.domain),
        name: object.name,
        rest: DefaultFlags {
            send: usual(&object.rest.send),
            receive: usual(&object.rest.receive),
        },
    };
    set_flags(&alias.rest, flags)?;
    let mut state = object.domain.lock();
    let endpoint = state.endpoints.get_mut(object.name).ok_or(FI_EINVAL)?;
    // SAFETY: upheld by the caller.
    let given = unsafe { give(alias, to) }?;
    endpoint.objects += 1;
    Ok(given)
}

unsafe extern "C" fn control(at: *mut fid, command: c_int, arg: *mut c_void) -> c_int {
    ended_int(|| {
        // SAFETY: the object was opened by this library; the argument is null or valid for the command (guaranteed by the caller).
        unsafe {
            let object = known::<EpObject, _>(at)?;
            match command {
                FI_ENABLE => {}
                FI_GETOPSFLAG => {
                    let flags = arg.cast::<u64>().as_mut().ok_or(FI_EINVAL)?;
                    *flags = of_direction(&object.rest, *flags)?.load(Ordering::Relaxed);
                    return Ok(0);
                }
                FI_SETOPSFLAG => {
                    let flags = *arg.cast::<u64>().as_ref().ok_or(FI_EINVAL)?;
                    return set_flags(&object.rest, flags).map(|()| 0);
                }
                FI_ALIAS => {
                    let alias = arg.cast::<fi_alias>().as_ref().ok_or(FI_EINVAL)?;
                    return give_alias(object, alias.fid, alias.flags);
                }
                _ => return Err(FI_ENOSYS),
            }
            with_endpoint(at, |endpoint, _| {
                if endpoint.binding.vector.is_none() {
                    return Err(FI_ENOAV);
                }
                if !endpoint.binding.is_complete() {
                    return Err(FI_ENOCQ);
                }
                endpoint.enable()?;
                Ok(0)
            })
        }
    })
}

unsafe extern "C" fn cancel(at: *mut fid, context: *mut c_void) -> isize {
    ended(|| {
        let context = context.expose_provenance();
        // SAFETY: this process opened the object.
        unsafe {
            with_endpoint(at, |endpoint, shared| {
                if endpoint.cancel(shared, context) {
                    Ok(0)
                } else {
                    Err(libc::ENOENT)
                }
            })
        }
    })
}

unsafe extern "C" fn getopt(
    at: *mut fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    ended_int(|| {
        if level != FI_OPT_ENDPOINT || name != FI_OPT_MIN_MULTI_RECV {
            return Err(FI_ENOPROTOOPT);
        }
        // SAFETY: the object was opened by this library; the value has the passed length (guaranteed by the caller).
        unsafe {
            let len = len.as_mut().ok_or(FI_EINVAL)?;
            if value.is_null() || *len < size_of::<usize>() {
                return Err(FI_ETOOSMALL);
            }
            *len = size_of::<usize>();
            with_endpoint(at, |endpoint, _| {
                value.cast::<usize>().write(endpoint.binding.multi_min);
                Ok(0)
            })
        }
    })
}

unsafe extern "C" fn setopt(
    at: *mut fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    ended_int(|| {
        if level != FI_OPT_ENDPOINT || name != FI_OPT_MIN_MULTI_RECV {
            return Err(FI_ENOPROTOOPT);
        }
        if value.is_null() || len != size_of::<usize>() {
            return Err(FI_EINVAL);
        }
        // SAFETY: the object was opened by this library; the value has the passed length (guaranteed by the caller).
        unsafe {
            let bytes = value.cast::<usize>().read();
            with_endpoint(at, |endpoint, _| {
                endpoint.binding.multi_min = bytes;
                Ok(0)
            })
        }
    })
}

unsafe extern "C" fn getname(at: *mut fid, addr: *mut c_void, len: *mut usize) -> c_int {
    ended_int(|| {
        // SAFETY: the object was opened by this library; the buffer has the passed length (guaranteed by the caller).
        unsafe {
            with_endpoint(at, |endpoint, _| {
                if av::copy_name(endpoint.name(), addr, len)? {
                    Ok(0)
                } else {
                    Err(FI_ETOOSMALL)
                }
            })
        }
    })
}

/// Changes the address of an endpoint that is not enabled. An address or a port of 0 in the name stands for the present one.
unsafe extern "C" fn setname(at: *mut fid, addr: *mut c_void, len: usize) -> c_int {
    ended_int(|| {
        if addr.is_null() {
            return Err(FI_EINVAL);
        }
        // SAFETY: the object was opened by this library; the name has the passed length (guaranteed by the caller).
        unsafe {
            let device = known::<EpObject, _>(at)?.domain.device;
            let name = std::slice::from_raw_parts(addr.cast::<u8>(), len);
            let (ip, port, _) = address::parts_of(name).ok_or(FI_EINVAL)?;
            with_endpoint(at, |endpoint, shared| {
                if endpoint.enabled {
                    return Err(FI_EOPBADSTATE);
                }
                let present = endpoint.name().ip;
                if ip.is_ipv4() != present.is_ipv4() {
                    return Err(FI_EINVAL);
                }
                let ip = if ip.is_unspecified() { present } else { ip };
                endpoint.rename(shared, local(device, ip)?, port)?;
                Ok(0)
            })
        }
    })
}
