//! Public symbols without an implementation yet.
//!
//! Every Debian binary is linked with BIND_NOW, so a program that never calls `rsocket` still does
//! not start if `rsocket` is missing. Each function here fails the way its manual page says, with
//! `ENOSYS`; none pretends success. When an entry point is written, its name leaves this file
//! (the linker reports a name that is in both places).

use crate::refuse;
use libc::ENOSYS;

refuse! { ENOSYS;
    // Return a pointer: null and errno.
    null {
        ibv_alloc_pd, ibv_create_ah, ibv_create_ah_from_wc, ibv_create_comp_channel, ibv_create_cq,
        ibv_create_qp, ibv_create_srq, ibv_get_device_list, ibv_get_device_name, ibv_import_device,
        ibv_import_dm, ibv_import_mr, ibv_import_pd, ibv_open_device, ibv_qp_to_qp_ex,
        ibv_reg_dmabuf_mr, ibv_reg_mr, ibv_reg_mr_iova, ibv_reg_mr_iova2,
        rdma_create_event_channel, rdma_get_devices,
    }
    // Return 0 or an errno value.
    code {
        ibv_attach_mcast, ibv_dealloc_pd, ibv_dereg_mr, ibv_destroy_ah, ibv_destroy_comp_channel,
        ibv_destroy_cq, ibv_destroy_qp, ibv_destroy_srq, ibv_detach_mcast, ibv_modify_qp,
        ibv_modify_srq, ibv_query_device, ibv_query_ece, ibv_query_port, ibv_query_qp, ibv_query_srq,
        ibv_resize_cq, ibv_resolve_eth_l2_from_gid, ibv_set_ece, _ibv_query_gid_ex,
    }
    // Return -1 and errno.
    minus_one {
        ibv_close_device, ibv_get_async_event, ibv_get_cq_event, ibv_get_device_index,
        ibv_get_pkey_index, ibv_init_ah_from_wc, ibv_query_gid, ibv_query_pkey, ibv_rereg_mr,
        ibv_query_gid_type,
        rdma_accept, rdma_ack_cm_event, rdma_bind_addr, rdma_connect, rdma_create_ep,
        rdma_create_id, rdma_create_qp, rdma_create_qp_ex, rdma_create_srq, rdma_create_srq_ex,
        rdma_destroy_id, rdma_disconnect, rdma_establish, rdma_get_cm_event, rdma_get_remote_ece,
        rdma_get_request, rdma_getaddrinfo, rdma_init_qp_attr, rdma_join_multicast,
        rdma_join_multicast_ex, rdma_leave_multicast, rdma_listen, rdma_migrate_id, rdma_notify,
        rdma_reject, rdma_reject_ece, rdma_resolve_addr, rdma_resolve_route, rdma_set_local_ece,
        rdma_set_option,
        raccept, rbind, rclose, rconnect, rfcntl, rgetpeername, rgetsockname, rgetsockopt, riomap,
        riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv, rrecvfrom, rrecvmsg, rselect,
        rsend, rsendmsg, rsendto, rsetsockopt, rshutdown, rsocket, rwrite, rwritev,
    }
    // Return a negative errno value.
    minus_code {
        _ibv_query_gid_table,
    }
    // Return a number of which zero says "none": a GUID, a port, "not known to be in order".
    zero {
        ibv_get_device_guid, ibv_query_qp_data_in_order, rdma_get_dst_port, rdma_get_src_port,
    }
    // Return nothing, and are only called with what the functions above did not hand out.
    void {
        ibv_ack_async_event, ibv_ack_cq_events, ibv_free_device_list, ibv_unimport_dm,
        ibv_unimport_mr, ibv_unimport_pd,
        rdma_destroy_ep, rdma_destroy_event_channel, rdma_destroy_qp, rdma_destroy_srq,
        rdma_free_devices, rdma_freeaddrinfo,
    }
}
