//! Atomic operations on a peer's memory.

use libc::{c_int, c_void, iovec};

use super::object::{Table, ended, ended_int, send_flags, with_endpoint};
use crate::abi::*;
use crate::atomics::{Class, Type, is_valid};
use crate::endpoint::AtomicRequest;
use crate::limits;
use crate::memory::UserMemory;

pub(crate) static ATOMIC_OPS: Table<fi_ops_atomic> = Table(fi_ops_atomic {
    size: size_of::<fi_ops_atomic>(),
    write: write as *const (),
    writev: writev as *const (),
    writemsg: writemsg as *const (),
    inject: inject as *const (),
    readwrite: readwrite as *const (),
    readwritev: readwritev as *const (),
    readwritemsg: readwritemsg as *const (),
    compwrite: compwrite as *const (),
    compwritev: compwritev as *const (),
    compwritemsg: compwritemsg as *const (),
    writevalid: writevalid as *const (),
    readwritevalid: readwritevalid as *const (),
    compwritevalid: compwritevalid as *const (),
});

const FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_FENCE
    | FI_MORE;

/// Returns the largest number of elements of an operation, and the size of an element in bytes.
pub(crate) fn room_for(datatype: u32, op: u32, class: Class) -> Result<(usize, usize), c_int> {
    let kind = Type::from_number(datatype)
        .filter(|kind| is_valid(*kind, op, class))
        .ok_or(FI_EOPNOTSUPP)?;
    Ok((limits::ATOMIC / kind.size(), kind.size()))
}

/// # Safety
/// `count` is null or valid for writes.
unsafe fn valid(datatype: u32, op: u32, class: Class, count: *mut usize) -> c_int {
    ended_int(|| {
        let (most, _) = room_for(datatype, op, class)?;
        // SAFETY: upheld by the caller.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = most;
        }
        Ok(0)
    })
}

/// Returns the memory of a list of elements, and the number of elements.
///
/// # Safety
/// `list` is null or has `n` elements. The program does not access their memory until the operation has completed.
unsafe fn elements(
    list: *const fi_ioc,
    n: usize,
    datatype: u32,
) -> Result<(UserMemory, usize), c_int> {
    let size = Type::from_number(datatype).ok_or(FI_EOPNOTSUPP)?.size();
    if n > limits::IOV || (n > 0 && list.is_null()) {
        return Err(FI_EINVAL);
    }
    let mut buffers = Vec::with_capacity(n);
    let mut count = 0_usize;
    for i in 0..n {
        // SAFETY: the caller passes `n` elements, and `i` is less than `n`.
        let part = unsafe { &*list.add(i) };
        buffers.push(iovec {
            iov_base: part.addr,
            iov_len: part.count.saturating_mul(size),
        });
        count = count.saturating_add(part.count);
    }
    // SAFETY: upheld by the caller.
    let memory = unsafe { UserMemory::list(buffers.as_ptr(), n) }.map_err(|_bad| FI_EINVAL)?;
    Ok((memory, count))
}

/// Like [`elements`], for the operands of an operation. A read has none, and the list is ignored.
///
/// # Safety
/// The requirements of [`elements`] apply, unless the operation is a read.
unsafe fn operands(
    list: *const fi_ioc,
    n: usize,
    datatype: u32,
    op: u32,
) -> Result<(UserMemory, usize), c_int> {
    if op == FI_ATOMIC_READ {
        return Ok((UserMemory::default(), 0));
    }
    // SAFETY: upheld by the caller.
    unsafe { elements(list, n, datatype) }
}

/// Returns the memory of one buffer of elements.
///
/// # Safety
/// The requirements of [`elements`] apply.
unsafe fn buffer(at: *const c_void, count: usize, datatype: u32) -> Result<UserMemory, c_int> {
    let size = Type::from_number(datatype).ok_or(FI_EOPNOTSUPP)?.size();
    // SAFETY: upheld by the caller.
    Ok(unsafe { UserMemory::one(at, count.saturating_mul(size)) })
}

/// The parameters of an operation, without the memory of this process.
struct What {
    peer: FiAddr,
    addr: u64,
    key: u64,
    datatype: u32,
    op: u32,
    count: usize,
    class: Class,
}

/// The memory of this process for an operation.
#[derive(Default)]
struct Here {
    operand: UserMemory,
    compare: UserMemory,
    result: UserMemory,
}

/// # Safety
/// `ep` is null or was opened by this library. `end`: the program's context and the flags; `None` for an operation without a
/// completion.
unsafe fn operate(
    ep: *mut fid_ep,
    what: What,
    here: Here,
    end: Option<(*mut c_void, Option<u64>)>,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    unsafe {
        let usual = send_flags(ep)?;
        with_endpoint(ep, |endpoint, shared| {
            let request = AtomicRequest {
                to: what.peer,
                at: (what.addr, what.key),
                datatype: what.datatype,
                count: what.count,
                op: what.op,
                class: what.class,
                operand: here.operand,
                compare: here.compare,
                result: here.result,
                context: end.map_or(0, |(context, _)| context.expose_provenance()),
                flags: end.map_or(FI_INJECT, |(_, flags)| flags.unwrap_or(usual)),
                silent: end.is_none(),
            };
            endpoint.atomic(shared, &request).map(|()| 0)
        })
    }
}

/// # Safety
/// `msg` is null, or it and everything that it points to are valid.
unsafe fn of_message(
    msg: *const fi_msg_atomic,
    flags: u64,
    class: Class,
) -> Result<(What, Here, *mut c_void), c_int> {
    if flags & !FLAGS != 0 {
        return Err(FI_EBADFLAGS);
    }
    // SAFETY: upheld by the caller.
    unsafe {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if msg.rma_iov_count != 1 {
            return Err(FI_EINVAL);
        }
        let there = msg.rma_iov.as_ref().ok_or(FI_EINVAL)?;
        let (operand, count) = operands(msg.msg_iov, msg.iov_count, msg.datatype, msg.op)?;
        if count != there.count && msg.op != FI_ATOMIC_READ {
            return Err(FI_EINVAL);
        }
        let what = What {
            peer: msg.addr,
            addr: there.addr,
            key: there.key,
            datatype: msg.datatype,
            op: msg.op,
            count: there.count,
            class,
        };
        let here = Here {
            operand,
            ..Here::default()
        };
        Ok((what, here, msg.context))
    }
}

/// Declares C functions, with the guarantees of the program that the macro of the same name in `message.rs` lists.
macro_rules! calls {
    ($(fn $name:ident($ep:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {$(
        #[allow(clippy::too_many_arguments, reason = "the signatures are libfabric's")]
        unsafe extern "C" fn $name($ep: *mut fid_ep $(, $arg: $type)*) -> isize {
            // SAFETY: upheld by the program.
            ended(|| unsafe { $body })
        }
    )*};
}

calls! {
    fn write(
        ep, buf: *const c_void, count: usize, _desc: *mut c_void, peer: FiAddr, addr: u64, key: u64, datatype: u32,
        op: u32, context: *mut c_void,
    ) {
        let what = What { peer, addr, key, datatype, op, count, class: Class::Write };
        let here = Here { operand: buffer(buf, count, datatype)?, ..Here::default() };
        operate(ep, what, here, Some((context, None)))
    }

    fn writev(
        ep, iov: *const fi_ioc, _desc: *mut *mut c_void, n: usize, peer: FiAddr, addr: u64, key: u64, datatype: u32,
        op: u32, context: *mut c_void,
    ) {
        let (operand, count) = elements(iov, n, datatype)?;
        let what = What { peer, addr, key, datatype, op, count, class: Class::Write };
        operate(ep, what, Here { operand, ..Here::default() }, Some((context, None)))
    }

    fn writemsg(ep, msg: *const fi_msg_atomic, flags: u64) {
        let (what, here, context) = of_message(msg, flags, Class::Write)?;
        operate(ep, what, here, Some((context, Some(flags))))
    }

    fn inject(
        ep, buf: *const c_void, count: usize, peer: FiAddr, addr: u64, key: u64, datatype: u32, op: u32,
    ) {
        let what = What { peer, addr, key, datatype, op, count, class: Class::Write };
        let here = Here { operand: buffer(buf, count, datatype)?, ..Here::default() };
        operate(ep, what, here, None)
    }

    fn readwrite(
        ep, buf: *const c_void, count: usize, _desc: *mut c_void, result: *mut c_void, _result_desc: *mut c_void,
        peer: FiAddr, addr: u64, key: u64, datatype: u32, op: u32, context: *mut c_void,
    ) {
        let what = What { peer, addr, key, datatype, op, count, class: Class::Fetch };
        let here = Here {
            operand: buffer(buf, count, datatype)?,
            result: buffer(result, count, datatype)?,
            ..Here::default()
        };
        operate(ep, what, here, Some((context, None)))
    }

    fn readwritev(
        ep, iov: *const fi_ioc, _desc: *mut *mut c_void, n: usize, resultv: *mut fi_ioc,
        _result_desc: *mut *mut c_void, results: usize, peer: FiAddr, addr: u64, key: u64, datatype: u32, op: u32,
        context: *mut c_void,
    ) {
        let (operand, _) = operands(iov, n, datatype, op)?;
        let (result, count) = elements(resultv, results, datatype)?;
        let what = What { peer, addr, key, datatype, op, count, class: Class::Fetch };
        operate(ep, what, Here { operand, result, ..Here::default() }, Some((context, None)))
    }

    fn readwritemsg(
        ep, msg: *const fi_msg_atomic, resultv: *mut fi_ioc, _result_desc: *mut *mut c_void, results: usize, flags: u64,
    ) {
        let (what, here, context) = of_message(msg, flags, Class::Fetch)?;
        let (result, _) = elements(resultv, results, what.datatype)?;
        operate(ep, what, Here { result, ..here }, Some((context, Some(flags))))
    }

    fn compwrite(
        ep, buf: *const c_void, count: usize, _desc: *mut c_void, compare: *const c_void, _compare_desc: *mut c_void,
        result: *mut c_void, _result_desc: *mut c_void, peer: FiAddr, addr: u64, key: u64, datatype: u32, op: u32,
        context: *mut c_void,
    ) {
        let what = What { peer, addr, key, datatype, op, count, class: Class::Compare };
        let here = Here {
            operand: buffer(buf, count, datatype)?,
            compare: buffer(compare, count, datatype)?,
            result: buffer(result, count, datatype)?,
        };
        operate(ep, what, here, Some((context, None)))
    }

    fn compwritev(
        ep, iov: *const fi_ioc, _desc: *mut *mut c_void, n: usize, comparev: *const fi_ioc,
        _compare_desc: *mut *mut c_void, compares: usize, resultv: *mut fi_ioc, _result_desc: *mut *mut c_void,
        results: usize, peer: FiAddr, addr: u64, key: u64, datatype: u32, op: u32, context: *mut c_void,
    ) {
        let (operand, count) = elements(iov, n, datatype)?;
        let (compare, _) = elements(comparev, compares, datatype)?;
        let (result, _) = elements(resultv, results, datatype)?;
        let what = What { peer, addr, key, datatype, op, count, class: Class::Compare };
        operate(ep, what, Here { operand, compare, result }, Some((context, None)))
    }

    fn compwritemsg(
        ep, msg: *const fi_msg_atomic, comparev: *const fi_ioc, _compare_desc: *mut *mut c_void, compares: usize,
        resultv: *mut fi_ioc, _result_desc: *mut *mut c_void, results: usize, flags: u64,
    ) {
        let (what, here, context) = of_message(msg, flags, Class::Compare)?;
        let (compare, _) = elements(comparev, compares, what.datatype)?;
        let (result, _) = elements(resultv, results, what.datatype)?;
        operate(ep, what, Here { compare, result, ..here }, Some((context, Some(flags))))
    }
}

unsafe extern "C" fn writevalid(
    _ep: *mut fid_ep,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: the caller passes null or a writable location.
    unsafe { valid(datatype, op, Class::Write, count) }
}

unsafe extern "C" fn readwritevalid(
    _ep: *mut fid_ep,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: as above.
    unsafe { valid(datatype, op, Class::Fetch, count) }
}

unsafe extern "C" fn compwritevalid(
    _ep: *mut fid_ep,
    datatype: u32,
    op: u32,
    count: *mut usize,
) -> c_int {
    // SAFETY: as above.
    unsafe { valid(datatype, op, Class::Compare, count) }
}
