//! Messages, with and without tags.

use libc::{c_int, c_void, iovec};

use super::object::{Table, ended, receive_flags, send_flags, with_endpoint};
use crate::abi::*;
use crate::endpoint::{Outgoing, Wanted};
use crate::memory::UserMemory;

pub(crate) static MSG_OPS: Table<fi_ops_msg> = Table(fi_ops_msg {
    size: size_of::<fi_ops_msg>(),
    recv: recv as *const (),
    recvv: recvv as *const (),
    recvmsg: recvmsg as *const (),
    send: send as *const (),
    sendv: sendv as *const (),
    sendmsg: sendmsg as *const (),
    inject: inject as *const (),
    senddata: senddata as *const (),
    injectdata: injectdata as *const (),
});
pub(crate) static TAGGED_OPS: Table<fi_ops_tagged> = Table(fi_ops_tagged {
    size: size_of::<fi_ops_tagged>(),
    recv: trecv as *const (),
    recvv: trecvv as *const (),
    recvmsg: trecvmsg as *const (),
    send: tsend as *const (),
    sendv: tsendv as *const (),
    sendmsg: tsendmsg as *const (),
    inject: tinject as *const (),
    senddata: tsenddata as *const (),
    injectdata: tinjectdata as *const (),
});

const SEND_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_REMOTE_CQ_DATA
    | FI_FENCE
    | FI_MORE;
/// The content of a message is in memory when its receive completes, which is what the completion levels require of a receive.
const RECEIVE_LEVELS: u64 = FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE;
const RECEIVE_FLAGS: u64 = FI_COMPLETION | FI_MULTI_RECV | FI_MORE | RECEIVE_LEVELS;
const TAGGED_RECEIVE_FLAGS: u64 =
    FI_COMPLETION | FI_PEEK | FI_CLAIM | FI_DISCARD | FI_MORE | RECEIVE_LEVELS;

/// The properties of a message except its memory.
#[derive(Clone, Copy, Default)]
struct What {
    peer: FiAddr,
    tag: Option<u64>,
    ignore: u64,
    data: Option<u64>,
    silent: bool,
}

fn memory(list: Result<UserMemory, crate::memory::BadList>) -> Result<UserMemory, c_int> {
    list.map_err(|_bad| FI_EINVAL)
}

/// # Safety
/// `ep` is null or was opened by this provider.
unsafe fn sends(
    ep: *mut fid_ep,
    memory: UserMemory,
    what: What,
    context: *mut c_void,
    flags: Option<u64>,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    unsafe {
        let usual = send_flags(ep)?;
        with_endpoint(ep, |endpoint, shared| {
            let message = Outgoing {
                to: what.peer,
                memory,
                tag: what.tag,
                data: what.data,
                context: context.expose_provenance(),
                flags: flags.unwrap_or(usual),
                silent: what.silent,
            };
            endpoint.send(shared, &message).map(|()| 0)
        })
    }
}

/// # Safety
/// `ep` is null or was opened by this provider.
unsafe fn receives(
    ep: *mut fid_ep,
    memory: UserMemory,
    what: What,
    context: *mut c_void,
    flags: Option<u64>,
) -> Result<isize, c_int> {
    // SAFETY: upheld by the caller.
    unsafe {
        // Only a receive without a tag can receive several messages. For a receive with a tag, FI_MULTI_RECV is removed from
        // the default flags of the endpoint.
        let usual = match what.tag {
            Some(_) => receive_flags(ep)? & !FI_MULTI_RECV,
            None => receive_flags(ep)?,
        };
        with_endpoint(ep, |endpoint, shared| {
            let wanted = Wanted {
                source: what.peer,
                memory,
                tag: what.tag.map(|tag| (tag, what.ignore)),
                context: context.expose_provenance(),
                flags: flags.unwrap_or(usual),
            };
            endpoint.receive(shared, &wanted).map(|()| 0)
        })
    }
}

fn to(peer: FiAddr) -> What {
    What {
        peer,
        ..What::default()
    }
}

fn tagged(peer: FiAddr, tag: u64) -> What {
    What {
        peer,
        tag: Some(tag),
        ..What::default()
    }
}

/// Declares C functions. The program guarantees that the endpoint was opened by this provider, that buffers have the given
/// lengths, and that it does not access them until the operation has completed.
macro_rules! calls {
    ($(fn $name:ident($ep:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {$(
        unsafe extern "C" fn $name($ep: *mut fid_ep $(, $arg: $type)*) -> isize {
            // SAFETY: upheld by the program.
            ended(|| unsafe { $body })
        }
    )*};
}

calls! {
    fn recv(ep, buf: *mut c_void, len: usize, _desc: *mut c_void, from: FiAddr, context: *mut c_void) {
        receives(ep, UserMemory::one(buf, len), to(from), context, None)
    }

    fn recvv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, from: FiAddr, context: *mut c_void,
    ) {
        receives(ep, memory(UserMemory::list(iov, count))?, to(from), context, None)
    }

    fn recvmsg(ep, msg: *const fi_msg, flags: u64) {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if flags & !RECEIVE_FLAGS != 0 {
            return Err(FI_EBADFLAGS);
        }
        let memory = memory(UserMemory::list(msg.msg_iov, msg.iov_count))?;
        receives(ep, memory, to(msg.addr), msg.context, Some(flags))
    }

    fn send(ep, buf: *const c_void, len: usize, _desc: *mut c_void, peer: FiAddr, context: *mut c_void) {
        sends(ep, UserMemory::one(buf, len), to(peer), context, None)
    }

    fn sendv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: FiAddr, context: *mut c_void,
    ) {
        sends(ep, memory(UserMemory::list(iov, count))?, to(peer), context, None)
    }

    fn sendmsg(ep, msg: *const fi_msg, flags: u64) {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if flags & !SEND_FLAGS != 0 {
            return Err(FI_EBADFLAGS);
        }
        let memory = memory(UserMemory::list(msg.msg_iov, msg.iov_count))?;
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        sends(ep, memory, What { data, ..to(msg.addr) }, msg.context, Some(flags))
    }

    fn inject(ep, buf: *const c_void, len: usize, peer: FiAddr) {
        let what = What { silent: true, ..to(peer) };
        sends(ep, UserMemory::one(buf, len), what, std::ptr::null_mut(), Some(FI_INJECT))
    }

    fn senddata(
        ep, buf: *const c_void, len: usize, _desc: *mut c_void, data: u64, peer: FiAddr, context: *mut c_void,
    ) {
        let what = What { data: Some(data), ..to(peer) };
        sends(ep, UserMemory::one(buf, len), what, context, None)
    }

    fn injectdata(ep, buf: *const c_void, len: usize, data: u64, peer: FiAddr) {
        let what = What { data: Some(data), silent: true, ..to(peer) };
        sends(ep, UserMemory::one(buf, len), what, std::ptr::null_mut(), Some(FI_INJECT))
    }

    fn trecv(
        ep, buf: *mut c_void, len: usize, _desc: *mut c_void, from: FiAddr, tag: u64, ignore: u64, context: *mut c_void,
    ) {
        let what = What { ignore, ..tagged(from, tag) };
        receives(ep, UserMemory::one(buf, len), what, context, None)
    }

    fn trecvv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, from: FiAddr, tag: u64, ignore: u64,
        context: *mut c_void,
    ) {
        let what = What { ignore, ..tagged(from, tag) };
        receives(ep, memory(UserMemory::list(iov, count))?, what, context, None)
    }

    fn trecvmsg(ep, msg: *const fi_msg_tagged, flags: u64) {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if flags & !TAGGED_RECEIVE_FLAGS != 0 {
            return Err(FI_EBADFLAGS);
        }
        if flags & FI_DISCARD != 0 && flags & (FI_PEEK | FI_CLAIM) == 0 {
            return Err(FI_EINVAL);
        }
        let what = What { ignore: msg.ignore, ..tagged(msg.addr, msg.tag) };
        // A search, or the end of a claimed message, uses no memory, and the program need not pass any.
        let memory = if flags & (FI_PEEK | FI_DISCARD) != 0 {
            UserMemory::default()
        } else {
            memory(UserMemory::list(msg.msg_iov, msg.iov_count))?
        };
        receives(ep, memory, what, msg.context, Some(flags))
    }

    fn tsend(
        ep, buf: *const c_void, len: usize, _desc: *mut c_void, peer: FiAddr, tag: u64, context: *mut c_void,
    ) {
        sends(ep, UserMemory::one(buf, len), tagged(peer, tag), context, None)
    }

    fn tsendv(
        ep, iov: *const iovec, _desc: *mut *mut c_void, count: usize, peer: FiAddr, tag: u64, context: *mut c_void,
    ) {
        sends(ep, memory(UserMemory::list(iov, count))?, tagged(peer, tag), context, None)
    }

    fn tsendmsg(ep, msg: *const fi_msg_tagged, flags: u64) {
        let msg = msg.as_ref().ok_or(FI_EINVAL)?;
        if flags & !SEND_FLAGS != 0 {
            return Err(FI_EBADFLAGS);
        }
        let data = (flags & FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        let what = What { data, ..tagged(msg.addr, msg.tag) };
        let memory = memory(UserMemory::list(msg.msg_iov, msg.iov_count))?;
        sends(ep, memory, what, msg.context, Some(flags))
    }

    fn tinject(ep, buf: *const c_void, len: usize, peer: FiAddr, tag: u64) {
        let what = What { silent: true, ..tagged(peer, tag) };
        sends(ep, UserMemory::one(buf, len), what, std::ptr::null_mut(), Some(FI_INJECT))
    }

    fn tsenddata(
        ep, buf: *const c_void, len: usize, _desc: *mut c_void, data: u64, peer: FiAddr, tag: u64,
        context: *mut c_void,
    ) {
        let what = What { data: Some(data), ..tagged(peer, tag) };
        sends(ep, UserMemory::one(buf, len), what, context, None)
    }

    fn tinjectdata(ep, buf: *const c_void, len: usize, data: u64, peer: FiAddr, tag: u64) {
        let what = What { data: Some(data), silent: true, ..tagged(peer, tag) };
        sends(ep, UserMemory::one(buf, len), what, std::ptr::null_mut(), Some(FI_INJECT))
    }
}
