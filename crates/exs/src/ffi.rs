//! The functions of libibverbs and librdmacm that the library calls, and their types.

pub(crate) use anywarp_verbs_sys::{cm::*, verbs::*};
use libc::{c_int, c_void, sockaddr};

#[link(name = "ibverbs")]
unsafe extern "C" {
    pub(crate) fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub(crate) fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    pub(crate) fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub(crate) fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub(crate) fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub(crate) fn ibv_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub(crate) fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub(crate) fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        cq_context: *mut *mut c_void,
    ) -> c_int;
    pub(crate) fn ibv_ack_cq_events(cq: *mut ibv_cq, n: u32);
}

#[link(name = "rdmacm")]
unsafe extern "C" {
    pub(crate) fn rdma_get_devices(num: *mut c_int) -> *mut *mut ibv_context;
    pub(crate) fn rdma_create_event_channel() -> *mut rdma_event_channel;
    pub(crate) fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
    pub(crate) fn rdma_create_id(
        channel: *mut rdma_event_channel,
        id: *mut *mut rdma_cm_id,
        context: *mut c_void,
        ps: u32,
    ) -> c_int;
    pub(crate) fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
    pub(crate) fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
    pub(crate) fn rdma_resolve_addr(
        id: *mut rdma_cm_id,
        src: *mut sockaddr,
        dst: *mut sockaddr,
        ms: c_int,
    ) -> c_int;
    pub(crate) fn rdma_resolve_route(id: *mut rdma_cm_id, ms: c_int) -> c_int;
    pub(crate) fn rdma_create_qp(
        id: *mut rdma_cm_id,
        pd: *mut ibv_pd,
        attr: *mut ibv_qp_init_attr,
    ) -> c_int;
    pub(crate) fn rdma_destroy_qp(id: *mut rdma_cm_id);
    pub(crate) fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int;
    pub(crate) fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
    pub(crate) fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int;
    pub(crate) fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> c_int;
    pub(crate) fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
    pub(crate) fn rdma_get_cm_event(
        channel: *mut rdma_event_channel,
        event: *mut *mut rdma_cm_event,
    ) -> c_int;
    pub(crate) fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
}
