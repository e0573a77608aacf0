//! RMA: reads and writes of a peer's memory.

use libc::{c_int, c_void, iovec};

use super::object::{Table, ended, send_flags, with_endpoint};
use crate::abi::*;
use crate::endpoint::OneSidedRequest;
use crate::memory::UserMemory;

pub(crate) static RMA_OPS: Table<fi_ops_rma> = Table(fi_ops_rma {
    size: size_of::<fi_ops_rma>(),
    read: read as *const (),
    readv: readv as *const (),
    readmsg: readmsg as *const (),
    write: write as *const (),
    writev: writev as *const (),
    writemsg: writemsg as *const (),
    inject: inject as *const (),
    writedata: writedata as *const (),
    injectdata: injectdata as *const (),
});

const FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_REMOTE_CQ_DATA
    | FI_FENCE
    | FI_MORE;

/// The memory of the peer, and the immediate data for its program.
struct There {
    peer: FiAddr,
    addr: u64,
    key: u64,
    data: Option<u64>,
}

/// How an operation is completed.
enum End {
    /// With this context, and the flags of the endpoint.
    Usual(usize),
    /// With this context and these flags.
    Flags(usize, u64),
    /// Without a completion.
    Silent,
}

/// # Safety
/// `ep` is null or was opened by this provider.
unsafe fn access(
    ep: *mut fid_ep,
    memory: UserMemory,
    there: There,
    read: bool,
    end: End,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    unsafe {
        let (context, flags, silent) = match end {
            End::Usual(context) => (context, send_flags(ep)?, false),
            End::Flags(context, flags) => (context, flags, false),
            End::Silent => (0, FI_INJECT, true),
        };
        with_endpoint(ep, |endpoint, shared| {
            let request = OneSidedRequest {
                to: there.peer,
                memory,
                at: (there.addr, there.key),
                read,
                data: there.data,
                context,
                flags,
                silent,
            };
            endpoint.access(shared, &request).map(|()| 0)
        })
    }
}

fn memory(list: Result<UserMemory, crate::memory::BadList>) -> Result<UserMemory, c_int> {
    list.map_err(|_bad| FI_EINVAL)
}

/// # Safety
/// `msg` is null, or it and everything that it points to are valid.
unsafe fn of_message(
    msg: *const fi_msg_rma,
    flags: u64,
) -> Result<(UserMemory, There, End), c_int> {
    if flags & !FLAGS != 0 {
        return Err(FI_EBADFLAGS);
    }
    // SAFETY: upheld by the caller.
    unsafe {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if msg.rma_iov_count != 1 {
            return Err(FI_EINVAL);
        }
        let rma = msg.rma_iov.as_ref().ok_or(FI_EINVAL)?;
        let memory = memory(UserMemory::list(msg.msg_iov, msg.iov_count))?;
        if memory.len() != rma.len {
            return Err(FI_EINVAL);
        }
        let there = There {
            peer: msg.addr,
            addr: rma.addr,
            key: rma.key,
            data: (flags & FI_REMOTE_CQ_DATA != 0).then_some(msg.data),
        };
        let end = End::Flags(msg.context.expose_provenance(), flags);
        Ok((memory, there, end))
    }
}

/// Like the macro of the same name in `message.rs`.
macro_rules! calls {
    ($(fn $name:ident($ep:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {$(
        unsafe extern "C" fn $name($ep: *mut fid_ep $(, $arg: $type)*) -> isize {
            // SAFETY: upheld by the program.
            ended(|| unsafe { $body })
        }
    )*};
}

calls! {
    fn read(
        ep, buf: *mut c_void, len: usize, _desc: *mut c_void, peer: FiAddr, addr: u64, key: u64, context: *mut c_void,
    ) {
        let there = There { peer, addr, key, data: None };
        access(ep, UserMemory::one(buf, len), there, true, End::Usual(context.expose_provenance()))
    }

    fn readv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: FiAddr, addr: u64, key: u64,
        context: *mut c_void,
    ) {
        let there = There { peer, addr, key, data: None };
        let memory = memory(UserMemory::list(iov, count))?;
        access(ep, memory, there, true, End::Usual(context.expose_provenance()))
    }

    fn readmsg(ep, msg: *const fi_msg_rma, flags: u64) {
        let (memory, there, end) = of_message(msg, flags)?;
        access(ep, memory, there, true, end)
    }

    fn write(
        ep, buf: *const c_void, len: usize, _desc: *mut c_void, peer: FiAddr, addr: u64, key: u64,
        context: *mut c_void,
    ) {
        let there = There { peer, addr, key, data: None };
        access(ep, UserMemory::one(buf, len), there, false, End::Usual(context.expose_provenance()))
    }

    fn writev(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: FiAddr, addr: u64, key: u64,
        context: *mut c_void,
    ) {
        let there = There { peer, addr, key, data: None };
        let memory = memory(UserMemory::list(iov, count))?;
        access(ep, memory, there, false, End::Usual(context.expose_provenance()))
    }

    fn writemsg(ep, msg: *const fi_msg_rma, flags: u64) {
        let (memory, there, end) = of_message(msg, flags)?;
        access(ep, memory, there, false, end)
    }

    fn inject(ep, buf: *const c_void, len: usize, peer: FiAddr, addr: u64, key: u64) {
        let there = There { peer, addr, key, data: None };
        access(ep, UserMemory::one(buf, len), there, false, End::Silent)
    }

    fn writedata(
        ep, buf: *const c_void, len: usize, _desc: *mut c_void, data: u64, peer: FiAddr, addr: u64, key: u64,
        context: *mut c_void,
    ) {
        let there = There { peer, addr, key, data: Some(data) };
        access(ep, UserMemory::one(buf, len), there, false, End::Usual(context.expose_provenance()))
    }

    fn injectdata(ep, buf: *const c_void, len: usize, data: u64, peer: FiAddr, addr: u64, key: u64) {
        let there = There { peer, addr, key, data: Some(data) };
        access(ep, UserMemory::one(buf, len), there, false, End::Silent)
    }
}
