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
                ibv_import_device,
        ibv_import_dm, ibv_import_mr, ibv_import_pd,         ibv_reg_dmabuf_mr,         rdma_create_event_channel, rdma_get_devices,
    }
    // Return 0 or an errno value.
    code {
                                    }
    // Return -1 and errno.
    minus_one {
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
            }
    // Return a number of which zero says "none": a GUID, a port, "not known to be in order".
    zero {
        rdma_get_dst_port, rdma_get_src_port,
    }
    // Return nothing, and are only called with what the functions above did not hand out.
    void {
        ibv_unimport_dm,
        ibv_unimport_mr, ibv_unimport_pd,
        rdma_destroy_ep, rdma_destroy_event_channel, rdma_destroy_qp, rdma_destroy_srq,
        rdma_free_devices, rdma_freeaddrinfo,
    }
}
