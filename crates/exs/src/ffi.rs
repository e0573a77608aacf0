//! The part of the public C interface of libibverbs and librdmacm that the library uses.
//!
//! Only fields that are used are named; structures that the libraries allocate end behind the last of them.

use libc::{c_int, c_void, sockaddr};

pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(crate) const ACCESS_REMOTE_READ: c_int = 4;
pub(crate) const QPT_RC: u32 = 2;
pub(crate) const WR_RDMA_WRITE: u32 = 0;
pub(crate) const WR_SEND: u32 = 2;
pub(crate) const WR_RDMA_READ: u32 = 4;
pub(crate) const SEND_SIGNALED: u32 = 2;
pub(crate) const WC_SUCCESS: u32 = 0;
pub(crate) const WC_LOC_LEN_ERR: u32 = 1;
pub(crate) const WC_REM_INV_REQ_ERR: u32 = 9;
pub(crate) const WC_REM_ACCESS_ERR: u32 = 10;
pub(crate) const TRANSPORT_IWARP: c_int = 1;
pub(crate) const PS_TCP: u32 = 0x0106;

pub(crate) const EVENT_ADDR_RESOLVED: u32 = 0;
pub(crate) const EVENT_ADDR_ERROR: u32 = 1;
pub(crate) const EVENT_ROUTE_RESOLVED: u32 = 2;
pub(crate) const EVENT_ROUTE_ERROR: u32 = 3;
pub(crate) const EVENT_CONNECT_REQUEST: u32 = 4;
pub(crate) const EVENT_CONNECT_ERROR: u32 = 6;
pub(crate) const EVENT_UNREACHABLE: u32 = 7;
pub(crate) const EVENT_REJECTED: u32 = 8;
pub(crate) const EVENT_ESTABLISHED: u32 = 9;
pub(crate) const EVENT_DISCONNECTED: u32 = 10;
pub(crate) const EVENT_DEVICE_REMOVAL: u32 = 11;

#[repr(C)]
pub(crate) struct Device {
    _ops: [*mut c_void; 2],
    _node_type: c_int,
    pub(crate) transport_type: c_int,
}

#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    _ops_before: [*mut c_void; 11],
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _ops_between: [*mut c_void; 12],
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
}

#[repr(C)]
pub(crate) struct Pd {
    _private: [u8; 0],
}

#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
}

#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
}

#[repr(C)]
pub(crate) struct CompChannel {
    _context: *mut Context,
    pub(crate) fd: c_int,
}

#[repr(C)]
pub(crate) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

#[repr(C)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: u32,
    pub(crate) send_flags: u32,
    pub(crate) imm_data: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) _rest_of_wr: [u32; 5],
    pub(crate) _more: [u64; 7],
}
const _: () = assert!(size_of::<SendWr>() == 128);

#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    _more: [u32; 6],
}
const _: () = assert!(size_of::<Wc>() == 48);

#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
    pub(crate) qp_type: u32,
    pub(crate) sq_sig_all: c_int,
}
const _: () = assert!(size_of::<QpInitAttr>() == 64);

#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

#[repr(C)]
pub(crate) struct CmId {
    pub(crate) verbs: *mut Context,
    _channel: *mut EventChannel,
    pub(crate) context: *mut c_void,
    pub(crate) qp: *mut Qp,
    pub(crate) src_addr: libc::sockaddr_storage,
    pub(crate) dst_addr: libc::sockaddr_storage,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

#[repr(C)]
pub(crate) struct CmEvent {
    pub(crate) id: *mut CmId,
    pub(crate) listen_id: *mut CmId,
    pub(crate) event: u32,
    pub(crate) status: c_int,
    pub(crate) conn: ConnParam,
}

#[link(name = "ibverbs")]
unsafe extern "C" {
    pub(crate) fn ibv_alloc_pd(context: *mut Context) -> *mut Pd;
    pub(crate) fn ibv_reg_mr(pd: *mut Pd, addr: *mut c_void, len: usize, access: c_int) -> *mut Mr;
    pub(crate) fn ibv_dereg_mr(mr: *mut Mr) -> c_int;
    pub(crate) fn ibv_create_comp_channel(context: *mut Context) -> *mut CompChannel;
    pub(crate) fn ibv_create_cq(
        context: *mut Context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut CompChannel,
        vector: c_int,
    ) -> *mut Cq;
    pub(crate) fn ibv_destroy_cq(cq: *mut Cq) -> c_int;
    pub(crate) fn ibv_get_cq_event(
        channel: *mut CompChannel,
        cq: *mut *mut Cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn ibv_ack_cq_events(cq: *mut Cq, n: u32);
}

#[link(name = "rdmacm")]
unsafe extern "C" {
    pub(crate) fn rdma_get_devices(num: *mut c_int) -> *mut *mut Context;
    pub(crate) fn rdma_create_event_channel() -> *mut EventChannel;
    pub(crate) fn rdma_create_id(
        channel: *mut EventChannel,
        id: *mut *mut CmId,
        context: *mut c_void,
        ps: u32,
    ) -> c_int;
    pub(crate) fn rdma_destroy_id(id: *mut CmId) -> c_int;
    pub(crate) fn rdma_bind_addr(id: *mut CmId, addr: *mut sockaddr) -> c_int;
    pub(crate) fn rdma_resolve_addr(
        id: *mut CmId,
        src: *mut sockaddr,
        dst: *mut sockaddr,
        ms: c_int,
    ) -> c_int;
    pub(crate) fn rdma_resolve_route(id: *mut CmId, ms: c_int) -> c_int;
    pub(crate) fn rdma_create_qp(id: *mut CmId, pd: *mut Pd, attr: *mut QpInitAttr) -> c_int;
    pub(crate) fn rdma_destroy_qp(id: *mut CmId);
    pub(crate) fn rdma_connect(id: *mut CmId, param: *mut ConnParam) -> c_int;
    pub(crate) fn rdma_listen(id: *mut CmId, backlog: c_int) -> c_int;
    pub(crate) fn rdma_accept(id: *mut CmId, param: *mut ConnParam) -> c_int;
    pub(crate) fn rdma_reject(id: *mut CmId, data: *const c_void, len: u8) -> c_int;
    pub(crate) fn rdma_disconnect(id: *mut CmId) -> c_int;
    pub(crate) fn rdma_get_cm_event(channel: *mut EventChannel, event: *mut *mut CmEvent) -> c_int;
    pub(crate) fn rdma_ack_cm_event(event: *mut CmEvent) -> c_int;
}
