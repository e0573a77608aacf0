//! The extensions of verbs in `<infiniband/anywarpdv.h>`: RDMA Write-Record and reliable datagrams.
//!
//! `tests/c/dv.c` tests them.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anywarp_core::bounds;
use anywarp_core::datagram::messages::Record;
use anywarp_core::datagram::options::{MAX_PARITY, Options, RecordMode, Segment};
use anywarp_core::datagram::{DatagramQp, ErrorReport, Kind};
use anywarp_core::verbs::wc::WcOp;
use anywarp_engine::objects::QueuePair;
use anywarp_verbs_sys::dv::*;
use anywarp_verbs_sys::verbs::*;
use libc::socklen_t;

use crate::cm::address::{address_of, c_address, sized_address};
use crate::entry;
use crate::ffi::{Errno, arg_mut};
use crate::verbs::address::create as create_ah;
use crate::verbs::convert::c_gid;
use crate::verbs::cq_ex::shown;
use crate::verbs::handle::live;
use crate::verbs::object::{ContextObject, CqObject, MrObject, QpObject};
use crate::verbs::ops::poll_cq;
use crate::verbs::qp::create_datagram_qp;
use crate::verbs::wr_ex;

const FLAGS: u32 = ANYWARPDV_QP_RECORD_COMPLETIONS
    | ANYWARPDV_QP_REPORT_ERRORS
    | ANYWARPDV_QP_UNORDERED
    | ANYWARPDV_QP_KEEP_GOING
    | ANYWARPDV_QP_PLAIN_WRITES;

/// The valid values of `segment_size`.
const SEGMENT_SIZES: RangeInclusive<u32> =
    bounds::DATAGRAM_PAYLOAD_MIN as u32..=(bounds::DATAGRAM_PAYLOAD as u32 & !7);

/// The length of the longest message, which applies to Write-Records and Reads too.
const MAX_MESSAGE: u32 = bounds::MAX_MESSAGE as u32;

fn or_default(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

fn micros(value: u32, default: Duration) -> Duration {
    if value == 0 {
        default
    } else {
        Duration::from_micros(value.into())
    }
}

/// Converts the options of a queue pair.
fn options_of(attr: &anywarpdv_qp_init_attr) -> Result<Options, Errno> {
    if attr.comp_mask != 0 || attr.flags & !FLAGS != 0 || attr.reserved != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let segment = match (attr.segment, attr.segment_size) {
        (ANYWARPDV_SEGMENT_PATH_MTU, 0) => Segment::PathMtu,
        (ANYWARPDV_SEGMENT_JUMBO, 0) => Segment::Jumbo,
        (ANYWARPDV_SEGMENT_MAX, 0) => Segment::Max,
        (0, size) if SEGMENT_SIZES.contains(&size) && size.is_multiple_of(8) => {
            Segment::Bytes(size)
        }
        _ => return Err(libc::EINVAL),
    };
    let record = match attr.record_mode {
        ANYWARPDV_RECORD_ROBUST => RecordMode::Robust,
        ANYWARPDV_RECORD_THESIS => RecordMode::Thesis,
        ANYWARPDV_RECORD_CHUNK => RecordMode::Chunk,
        _ => return Err(libc::EINVAL),
    };
    if attr.parity > MAX_PARITY
        || attr.max_send_size > MAX_MESSAGE
        || attr.max_read_size > MAX_MESSAGE
    {
        return Err(libc::EINVAL);
    }
    let port = u16::try_from(attr.port).map_err(|_| libc::EINVAL)?;
    let has = |flag| attr.flags & flag != 0;
    let usual = Options::default();
    let reads = or_default(attr.max_reads, usual.max_reads.into());
    Ok(Options {
        one_sided: true,
        segment,
        max_send: or_default(attr.max_send_size, usual.max_send),
        record,
        grace: micros(attr.grace_us, usual.grace),
        deadline: micros(attr.deadline_us, usual.deadline),
        max_records: or_default(attr.max_records, usual.max_records),
        records_complete: has(ANYWARPDV_QP_RECORD_COMPLETIONS),
        repeats: attr.repeats,
        parity: attr.parity,
        read_timeout: micros(attr.read_timeout_us, usual.read_timeout),
        max_reads: u16::try_from(reads).map_err(|_| libc::EINVAL)?,
        max_read: or_default(attr.max_read_size, usual.max_read),
        report_errors: has(ANYWARPDV_QP_REPORT_ERRORS),
        ordered: !has(ANYWARPDV_QP_UNORDERED),
        peer_timeout: match attr.peer_timeout_ms {
            0 => usual.peer_timeout,
            ms => Duration::from_millis(ms.into()),
        },
        keep_going: has(ANYWARPDV_QP_KEEP_GOING),
        plain_writes: has(ANYWARPDV_QP_PLAIN_WRITES),
        blocks_own: usual.blocks_own,
        port,
    })
}

entry! {
    /// `anywarpdv_is_supported`: returns true for the device of this library, which is the only one that its programs see.
    ///
    /// # Safety
    /// Any pointer may be passed, since it is only compared.
    unsafe fn anywarpdv_is_supported(device: *mut ibv_device) -> bool, value(false), {
        !device.is_null()
    }
}

/// Copies the attributes of a program that may be older or newer than this library. `EOPNOTSUPP` if the program sets a field that
/// this library does not know.
///
/// # Safety
/// `attr` is null or points to `size` octets.
unsafe fn known_attr(
    attr: *const anywarpdv_qp_init_attr,
    size: usize,
) -> Result<anywarpdv_qp_init_attr, Errno> {
    if attr.is_null() || size > 4096 {
        return Err(libc::EINVAL);
    }
    let mut ours = anywarpdv_qp_init_attr::default();
    let known = size.min(size_of::<anywarpdv_qp_init_attr>());
    // SAFETY: the program's structure has `size` octets (guaranteed by the caller), and that of this library has at least `known`.
    let rest = unsafe {
        std::ptr::copy_nonoverlapping(attr.cast::<u8>(), (&raw mut ours).cast::<u8>(), known);
        std::slice::from_raw_parts(attr.cast::<u8>().add(known), size - known)
    };
    if rest.iter().any(|octet| *octet != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    Ok(ours)
}

entry! {
    /// `anywarpdv_create_qp_ex`: see the header.
    ///
    /// # Safety
    /// `context` is open. The attributes are null or valid, and the objects in them are live.
    unsafe fn anywarpdv_create_qp_ex(
        context: *mut ibv_context,
        attr_ex: *mut ibv_qp_init_attr_ex,
        attr: *const anywarpdv_qp_init_attr,
        inlen: u32,
    ) -> *mut ibv_qp, null, {
        if context.is_null() {
            return Err(libc::EINVAL);
        }
        let size = usize::try_from(inlen).unwrap_or(usize::MAX);
        // SAFETY: upheld by the caller.
        let (ex, ours) = unsafe { (arg_mut(attr_ex)?, known_attr(attr, size)?) };
        let kind = match (ex.qp_type, ours.driver_qp_type) {
            (IBV_QPT_UD, ANYWARPDV_QPT_UD) => Kind::Ud,
            (IBV_QPT_DRIVER, ANYWARPDV_QPT_RD) => Kind::Rd,
            _ => return Err(libc::EOPNOTSUPP),
        };
        let options = options_of(&ours)?;
        if ex.comp_mask & !(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0
            || ex.comp_mask & IBV_QP_INIT_ATTR_PD == 0
        {
            return Err(libc::EINVAL);
        }
        let ops = (ex.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then_some(ex.send_ops_flags);
        if ops.is_some_and(|ops| ops & !wr_ex::known_datagram_ops(kind) != 0) {
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: upheld by the caller.
        unsafe { create_datagram_qp(ex, ops, kind, options) }
    }
}

/// Calls `f` with the datagram queue pair of `qp`. `EOPNOTSUPP` if `qp` is a connected queue pair.
///
/// # Safety
/// `qp` is null or points to a live queue pair.
unsafe fn with<R>(qp: *mut ibv_qp, f: impl FnOnce(&mut DatagramQp) -> R) -> Result<R, Errno> {
    // SAFETY: upheld by the caller.
    match &unsafe { live::<QpObject, _>(qp) }?.engine {
        QueuePair::Dgram(qp) => Ok(qp.with(f)),
        QueuePair::Rc(_) => Err(libc::EOPNOTSUPP),
    }
}

/// The time for which a waiting call polls without pauses.
const SPIN_FOR: Duration = Duration::from_millis(1);
/// The pause between two polls once a call has polled for [`SPIN_FOR`]. The engine's thread does the transport work meanwhile.
const PAUSE: Duration = Duration::from_micros(100);

/// Calls `take` until it returns more than 0 or `timeout_ms` has expired (negative: no limit). Does transport work while it waits.
fn wait_for(
    timeout_ms: c_int,
    mut take: impl FnMut() -> Result<c_int, Errno>,
) -> Result<c_int, Errno> {
    let start = Instant::now();
    let until = u64::try_from(timeout_ms)
        .ok()
        .map(|ms| start + Duration::from_millis(ms));
    loop {
        let n = take()?;
        if n != 0 {
            return Ok(n);
        }
        // The engine exists, because `take` has found its objects.
        let engine = anywarp_engine::engine::current().ok_or(libc::ENODEV)?;
        engine.on_idle_poll();
        let n = take()?;
        if n != 0 {
            return Ok(n);
        }
        let now = Instant::now();
        if until.is_some_and(|until| now >= until) {
            return Ok(0);
        }
        if now.saturating_duration_since(start) < SPIN_FOR {
            std::thread::yield_now();
        } else {
            std::thread::sleep(PAUSE);
        }
    }
}

fn record_of(r: &Record) -> anywarpdv_record {
    let flags = [
        (r.complete, ANYWARPDV_RECORD_COMPLETE),
        (r.chunk, ANYWARPDV_RECORD_IS_CHUNK),
        (r.final_seen, ANYWARPDV_RECORD_FINAL_SEEN),
        (r.imm.is_some(), ANYWARPDV_RECORD_WITH_IMM),
    ];
    let flags = flags.into_iter().filter(|(set, _)| *set);
    anywarpdv_record {
        source: c_address(r.from),
        src_qp: r.src_qpn,
        message_id: r.id,
        rkey: r.stag.0,
        flags: flags.map(|(_, flag)| flag).sum(),
        base: r.base.0,
        length: r.length,
        valid: r.valid,
        offset: r.offset,
        imm_data: r.imm.map_or(0, be32::from_ne_bytes),
        map: r.map,
    }
}

fn error_of(e: &ErrorReport) -> anywarpdv_error {
    anywarpdv_error {
        source: c_address(e.from),
        src_qp: e.src_qpn,
        message_id: e.id,
        layer: e.layer,
        kind: e.etype,
        code: e.code,
        flags: if e.request.is_some() {
            ANYWARPDV_ERROR_WITH_WR_ID
        } else {
            0
        },
        status: e.status as u32,
        wr_id: e.request.unwrap_or(0),
    }
}

/// Writes `value` to a structure of the program that has `size` octets. A shorter structure gets a prefix; the rest of a
/// longer one is set to zero.
///
/// # Safety
/// `out` points to `size` octets.
unsafe fn write_sized<T: Copy>(out: *mut u8, size: usize, value: &T) {
    let known = size.min(size_of::<T>());
    // SAFETY: `out` has `size` octets (guaranteed by the caller), of which the first `known` are copied.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), out, known);
        out.add(known).write_bytes(0, size - known);
    }
}

/// Checks the size of a structure that the program passes: `EINVAL` unless it is 1 to 4096.
fn struct_size(size: u32) -> Result<usize, Errno> {
    match usize::try_from(size) {
        Ok(size @ 1..=4096) => Ok(size),
        _ => Err(libc::EINVAL),
    }
}

/// The output array of a call: `max` structures of `size` octets each.
struct Items<T> {
    out: *mut T,
    max: c_int,
    size: u32,
}

/// Takes up to `max` items out of a queue pair.
///
/// # Safety
/// `qp` is null or points to a live queue pair. `items.out` is null or has room for all items.
unsafe fn poll<T: Copy>(
    qp: *mut ibv_qp,
    items: Items<T>,
    timeout_ms: c_int,
    mut next: impl FnMut(&mut DatagramQp) -> Option<T>,
) -> Result<c_int, Errno> {
    let max = usize::try_from(items.max).map_err(|_negative| libc::EINVAL)?;
    let size = struct_size(items.size)?;
    if items.out.is_null() || max == 0 {
        return Err(libc::EINVAL);
    }
    let out = items.out.cast::<u8>();
    // SAFETY: upheld by the caller.
    wait_for(timeout_ms, || unsafe {
        with(qp, |core| {
            let mut n = 0;
            while n < max
                && let Some(item) = next(core)
            {
                write_sized(out.add(n * size), size, &item);
                n += 1;
            }
            c_int::try_from(n).unwrap_or(c_int::MAX)
        })
    })
}

entry! {
    /// `anywarpdv_poll_records`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `records` is null or has room for `max` structures of `reclen` octets.
    unsafe fn anywarpdv_poll_records(
        qp: *mut ibv_qp,
        max: c_int,
        records: *mut anywarpdv_record,
        reclen: u32,
        timeout_ms: c_int,
    ) -> c_int, minus_one, {
        let items = Items { out: records, max, size: reclen };
        // SAFETY: upheld by the caller.
        unsafe { poll(qp, items, timeout_ms, |core| core.poll_record().map(|r| record_of(&r))) }
    }
}

entry! {
    /// `anywarpdv_create_ah_from_record`: see the header.
    ///
    /// # Safety
    /// `pd` is null or points to a live protection domain. `record` is null or points to `reclen` octets.
    unsafe fn anywarpdv_create_ah_from_record(
        pd: *mut ibv_pd, record: *const anywarpdv_record, reclen: u32,
    ) -> *mut ibv_ah, null, {
        // SAFETY: upheld by the caller.
        let record = unsafe { known_record(record, reclen) }?;
        // SAFETY: `record` is a local copy of a complete structure.
        let source = unsafe { address_of((&raw const record.source).cast()) }.ok_or(libc::EAFNOSUPPORT)?;
        let gid = match source.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let attr = ibv_ah_attr {
            is_global: 1,
            port_num: 1,
            grh: ibv_global_route { dgid: c_gid(gid.octets()), hop_limit: 0xff, ..Default::default() },
            ..ibv_ah_attr::default()
        };
        // SAFETY: upheld by the caller.
        unsafe { create_ah(pd, &attr) }
    }
}

entry! {
    /// `anywarpdv_query_device`: see the header.
    ///
    /// # Safety
    /// `context` is null or open. `attr` is null or points to `inlen` octets.
    unsafe fn anywarpdv_query_device(
        context: *mut ibv_context, attr: *mut anywarpdv_device_attr, inlen: u32,
    ) -> c_int, minus_one, {
        if context.is_null() || attr.is_null() {
            return Err(libc::EINVAL);
        }
        let ours = anywarpdv_device_attr {
            qp_types: 1 << ANYWARPDV_QPT_UD | 1 << ANYWARPDV_QPT_RD,
            qp_flags: FLAGS,
            send_ops_ud: wr_ex::known_datagram_ops(Kind::Ud),
            send_ops_rd: wr_ex::known_datagram_ops(Kind::Rd),
            max_message_size: MAX_MESSAGE,
            min_segment_size: *SEGMENT_SIZES.start(),
            max_segment_size: *SEGMENT_SIZES.end(),
            max_parity: MAX_PARITY.into(),
            ..anywarpdv_device_attr::default()
        };
        // SAFETY: upheld by the caller.
        unsafe { write_sized(attr.cast(), struct_size(inlen)?, &ours) };
        Ok(0)
    }
}

entry! {
    /// `anywarpdv_set_progress`: see the header.
    ///
    /// # Safety
    /// `context` is null or open.
    unsafe fn anywarpdv_set_progress(context: *mut ibv_context, progress: u32) -> c_int, minus_one, {
        let polled = match progress {
            ANYWARPDV_PROGRESS_AUTO => false,
            ANYWARPDV_PROGRESS_POLLED => true,
            _ => return Err(libc::EINVAL),
        };
        if context.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        unsafe { ContextObject::live(context) }?.engine.set_polled(polled);
        Ok(0)
    }
}

entry! {
    /// `anywarpdv_poll_errors`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `errors` is null or has room for `max` structures of `errlen` octets.
    unsafe fn anywarpdv_poll_errors(
        qp: *mut ibv_qp,
        max: c_int,
        errors: *mut anywarpdv_error,
        errlen: u32,
        timeout_ms: c_int,
    ) -> c_int, minus_one, {
        let items = Items { out: errors, max, size: errlen };
        // SAFETY: upheld by the caller.
        unsafe { poll(qp, items, timeout_ms, |core| core.poll_error().map(|e| error_of(&e))) }
    }
}

entry! {
    /// `anywarpdv_poll_cq`: see the header.
    ///
    /// # Safety
    /// `cq` is null or points to a live queue. `wc` is null or has room for `max` structures.
    unsafe fn anywarpdv_poll_cq(
        cq: *mut ibv_cq,
        max: c_int,
        wc: *mut ibv_wc,
        timeout_ms: c_int,
    ) -> c_int, minus_one, {
        if wc.is_null() || max <= 0 {
            return Err(libc::EINVAL);
        }
        wait_for(timeout_ms, || {
            // SAFETY: upheld by the caller.
            let n = unsafe {
                live::<CqObject, _>(cq)?;
                poll_cq(cq, max, wc)
            };
            if n < 0 { Err(libc::EIO) } else { Ok(n) }
        })
    }
}

entry! {
    /// `anywarpdv_wc_read_message_id`: see the header.
    ///
    /// # Safety
    /// `cq` is null or points to a live queue, and only this thread polls it.
    unsafe fn anywarpdv_wc_read_message_id(cq: *mut ibv_cq_ex) -> u32, value(0), {
        // SAFETY: upheld by the caller.
        unsafe { shown(cq) }.map_or(0, |completion| completion.message)
    }
}

entry! {
    /// `anywarpdv_wc_read_record`: see the header.
    ///
    /// # Safety
    /// `cq` is null or points to a live queue, and only this thread polls it. `qp` is null or points to a live queue pair.
    /// `record` is null or points to `reclen` octets.
    unsafe fn anywarpdv_wc_read_record(
        cq: *mut ibv_cq_ex,
        qp: *mut ibv_qp,
        record: *mut anywarpdv_record,
        reclen: u32,
    ) -> c_int, minus_one, {
        let size = struct_size(reclen)?;
        // SAFETY: upheld by the caller.
        let completion = unsafe { shown(cq) }.ok_or(libc::EINVAL)?;
        if record.is_null() || completion.op != WcOp::Record {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        if unsafe { live::<QpObject, _>(qp) }?.engine.number() != completion.qpn {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let found = unsafe { with(qp, |core| core.take_record(completion.src_qpn, completion.message)) }?;
        let found = found.ok_or(libc::ENOENT)?;
        // SAFETY: upheld by the caller.
        unsafe { write_sized(record.cast(), size, &record_of(&found)) };
        Ok(0)
    }
}

/// Copies a record from a program that may have been compiled with a shorter structure.
///
/// # Safety
/// `record` is null or points to `size` octets.
unsafe fn known_record(
    record: *const anywarpdv_record,
    size: u32,
) -> Result<anywarpdv_record, Errno> {
    let size = struct_size(size)?;
    if record.is_null() {
        return Err(libc::EINVAL);
    }
    let mut ours = anywarpdv_record::default();
    let known = size.min(size_of::<anywarpdv_record>());
    // SAFETY: the program's structure has `size` octets (guaranteed by the caller), and that of this library has at least `known`.
    unsafe {
        std::ptr::copy_nonoverlapping(record.cast::<u8>(), (&raw mut ours).cast::<u8>(), known);
    }
    Ok(ours)
}

/// Returns the ranges of a Write-Record that have arrived. `EINVAL` if its validity map was released.
///
/// # Safety
/// `qp` is null or points to a live queue pair.
unsafe fn ranges_of(qp: *mut ibv_qp, record: &anywarpdv_record) -> Result<Vec<(u32, u32)>, Errno> {
    if record.map == 0 {
        // SAFETY: upheld by the caller.
        unsafe { with(qp, |_| ()) }?;
        let whole = (record.offset, record.offset.saturating_add(record.valid));
        return Ok(if record.valid == 0 {
            Vec::new()
        } else {
            vec![whole]
        });
    }
    // SAFETY: upheld by the caller.
    let ranges = unsafe { with(qp, |core| core.records().map(record.map).map(<[_]>::to_vec)) }?;
    ranges.ok_or(libc::EINVAL)
}

entry! {
    /// `anywarpdv_read_map`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `record` is null or points to `reclen` octets. `ranges` is null or has
    /// room for `max` structures of `rangelen` octets.
    unsafe fn anywarpdv_read_map(
        qp: *mut ibv_qp,
        record: *const anywarpdv_record,
        reclen: u32,
        max: c_int,
        ranges: *mut anywarpdv_range,
        rangelen: u32,
    ) -> c_int, minus_one, {
        let max = usize::try_from(max).map_err(|_negative| libc::EINVAL)?;
        let size = struct_size(rangelen)?;
        if ranges.is_null() && max > 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let all = unsafe { ranges_of(qp, &known_record(record, reclen)?) }?;
        for (at, (from, to)) in all.iter().take(max).enumerate() {
            let range = anywarpdv_range { from: *from, to: *to };
            // SAFETY: `at` is below `max`, for which the caller's array has room.
            unsafe { write_sized(ranges.cast::<u8>().add(at * size), size, &range) };
        }
        Ok(c_int::try_from(all.len()).unwrap_or(c_int::MAX))
    }
}

entry! {
    /// `anywarpdv_read_bitmap`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `record` is null or points to `reclen` octets. `bits` is null or points
    /// to `size` octets.
    unsafe fn anywarpdv_read_bitmap(
        qp: *mut ibv_qp,
        record: *const anywarpdv_record,
        reclen: u32,
        granularity: u32,
        bits: *mut u8,
        size: usize,
    ) -> c_int, minus_one, {
        if bits.is_null() || granularity == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let record = unsafe { known_record(record, reclen) }?;
        let length = record.length;
        let blocks = length.div_ceil(granularity);
        let octets = blocks.div_ceil(8) as usize;
        if size < octets {
            return Err(libc::ENOSPC);
        }
        // SAFETY: upheld by the caller.
        let ranges = unsafe { ranges_of(qp, &record) }?;
        let mut bitmap = vec![0_u8; octets];
        for (from, to) in ranges {
            // A block counts only if it is completely inside a range. The last block of the message may be short.
            let first = from.div_ceil(granularity);
            let end = if to >= length { blocks } else { to / granularity };
            for block in first..end {
                if let Some(octet) = bitmap.get_mut((block / 8) as usize) {
                    *octet |= 1 << (block % 8);
                }
            }
        }
        // SAFETY: the buffer has room for `octets` (checked above; guaranteed by the caller).
        unsafe { std::ptr::copy_nonoverlapping(bitmap.as_ptr(), bits, octets) };
        Ok(c_int::try_from(blocks).unwrap_or(c_int::MAX))
    }
}

entry! {
    /// `anywarpdv_release_map`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair.
    unsafe fn anywarpdv_release_map(qp: *mut ibv_qp, map: u64) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let released = unsafe { with(qp, |core| map == 0 || core.release_map(map)) }?;
        if released { Ok(0) } else { Err(libc::EINVAL) }
    }
}

entry! {
    /// `anywarpdv_query_counters`: see the header.
    ///
    /// # Safety
    /// `qp` is null or points to a live queue pair. `counters` is null or points to `inlen` octets.
    unsafe fn anywarpdv_query_counters(
        qp: *mut ibv_qp,
        counters: *mut u64,
        inlen: u32,
    ) -> c_int, minus_one, {
        if counters.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: upheld by the caller.
        let named = unsafe { with(qp, |core| core.counters()) }?.named();
        let room = usize::try_from(inlen).unwrap_or(0) / size_of::<u64>();
        for at in 0..room {
            let value = named.get(at).map_or(0, |(_, n)| *n);
            // SAFETY: the field is inside the program's structure (guaranteed by the caller).
            unsafe { counters.add(at).write(value) };
        }
        Ok(0)
    }
}

entry! {
    /// `anywarpdv_restrict_mr`: see the header.
    ///
    /// # Safety
    /// `mr` is null or points to a live region. `source` is null or points to `source_len` octets.
    unsafe fn anywarpdv_restrict_mr(
        mr: *mut ibv_mr,
        source: *const c_void,
        source_len: socklen_t,
        src_qp: u32,
    ) -> c_int, minus_one, {
        // SAFETY: upheld by the caller.
        let region = unsafe { live::<MrObject, _>(mr) }?;
        let only = if source.is_null() {
            None
        } else {
            // SAFETY: upheld by the caller.
            let address = unsafe { sized_address(source.cast(), source_len) }?;
            Some((address.ip(), (src_qp != 0).then_some(src_qp)))
        };
        region.engine.restrict(only);
        Ok(0)
    }
}
