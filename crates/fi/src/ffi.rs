//! The part of the public C interface of libibverbs and of `<infiniband/anywarpdv.h>` that the provider uses.
//!
//! Functions are looked up by name (`verbs.rs`). Only fields that are used are public; structures that the library allocates
//! end behind the last of them.

use libc::{c_char, c_int, c_void, pthread_cond_t, pthread_mutex_t, sockaddr, sockaddr_storage};

pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(crate) const ACCESS_REMOTE_READ: c_int = 4;
pub(crate) const QPT_DRIVER: u32 = 255;
pub(crate) const WR_SEND: u32 = 2;
pub(crate) const SEND_SIGNALED: u32 = 2;
pub(crate) const SEND_INLINE: u32 = 8;
pub(crate) const WC_SUCCESS: u32 = 0;
pub(crate) const WC_FLUSHED: u32 = 5;
pub(crate) const WC_REMOTE_INVALID: u32 = 9;
pub(crate) const WC_REMOTE_ACCESS: u32 = 10;
pub(crate) const WC_NO_ANSWER: u32 = 12;
pub(crate) const WC_REMOTE_ABORTED: u32 = 16;
pub(crate) const WC_OPCODE_RECEIVE: u32 = 128;
pub(crate) const WC_OPCODE_RECORD: u32 = 135;

pub(crate) const INIT_ATTR_PD: u32 = 1;
pub(crate) const INIT_ATTR_SEND_OPS: u32 = 1 << 6;
pub(crate) const OP_RDMA_WRITE: u64 = 1;
pub(crate) const OP_RDMA_WRITE_IMM: u64 = 1 << 1;
pub(crate) const OP_SEND: u64 = 1 << 2;
pub(crate) const OP_RDMA_READ: u64 = 1 << 4;
pub(crate) const QP_STATE: c_int = 1;
pub(crate) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const QP_PORT: c_int = 1 << 5;
pub(crate) const QP_QKEY: c_int = 1 << 6;
pub(crate) const QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const STATE_INIT: u32 = 1;
pub(crate) const STATE_RTR: u32 = 2;
pub(crate) const STATE_RTS: u32 = 3;

pub(crate) const DV_QPT_RD: u32 = 1;
pub(crate) const DV_RECORD_COMPLETIONS: u32 = 1;
pub(crate) const DV_KEEP_GOING: u32 = 1 << 3;
pub(crate) const DV_PLAIN_WRITES: u32 = 1 << 4;
pub(crate) const DV_RECORD_COMPLETE: u32 = 1;

/// Bytes in front of a datagram that is received.
pub(crate) const ROUTE_HEADER: usize = 40;

#[repr(C)]
pub(crate) struct Device {
    _private: [u8; 0],
}

#[repr(C)]
pub(crate) struct Context {
    _device: *mut Device,
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
pub(crate) struct Ah {
    _private: [u8; 0],
}

#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
}

#[repr(C)]
pub(crate) struct Channel {
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
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _cqs: [*mut Cq; 2],
    _srq: *mut c_void,
    _handle: u32,
    pub(crate) qp_num: u32,
    _state: u32,
    _qp_type: u32,
    _mutex: pthread_mutex_t,
    _cond: pthread_cond_t,
    _events_completed: u32,
}

#[repr(C)]
pub(crate) struct QpEx {
    _base: Qp,
    _comp_mask: u64,
    pub(crate) wr_id: u64,
    pub(crate) wr_flags: u32,
    _atomics: [*mut c_void; 2],
    _bind: *mut c_void,
    _local_inv: *mut c_void,
    pub(crate) rdma_read: Option<unsafe extern "C" fn(*mut Self, u32, u64)>,
    pub(crate) rdma_write: Option<unsafe extern "C" fn(*mut Self, u32, u64)>,
    pub(crate) rdma_write_imm: Option<unsafe extern "C" fn(*mut Self, u32, u64, u32)>,
    _sends: [*mut c_void; 4],
    pub(crate) set_ud_addr: Option<unsafe extern "C" fn(*mut Self, *mut Ah, u32, u32)>,
    _set_xrc_srqn: *mut c_void,
    _set_inline: [*mut c_void; 2],
    _set_sge: *mut c_void,
    pub(crate) set_sge_list: Option<unsafe extern "C" fn(*mut Self, usize, *const Sge)>,
    pub(crate) start: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) complete: Option<unsafe extern "C" fn(*mut Self) -> c_int>,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
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
    // The member `ud` of the union.
    pub(crate) ah: *mut Ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
    pub(crate) more: [u64; 9],
}
const _: () = assert!(size_of::<SendWr>() == 128);

#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// A completion.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    _vendor_err: u32,
    pub(crate) byte_len: u32,
    /// In network byte order.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    _more: [u32; 3],
}
const _: () = assert!(size_of::<Wc>() == 48);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
pub(crate) struct QpInitAttrEx {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: u32,
    pub(crate) sq_sig_all: c_int,
    pub(crate) comp_mask: u32,
    pub(crate) pd: *mut Pd,
    pub(crate) xrcd: *mut c_void,
    pub(crate) create_flags: u32,
    pub(crate) max_tso_header: u16,
    pub(crate) rwq_ind_tbl: *mut c_void,
    pub(crate) rx_hash: [u64; 3],
    pub(crate) source_qpn: u32,
    pub(crate) send_ops_flags: u64,
}
const _: () = assert!(size_of::<QpInitAttrEx>() == 136);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Gid {
    pub(crate) raw: [u64; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}
const _: () = assert!(size_of::<AhAttr>() == 32);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: u32,
    pub(crate) cur_qp_state: u32,
    pub(crate) path_mtu: u32,
    pub(crate) path_mig_state: u32,
    pub(crate) qkey: u32,
    pub(crate) psns: [u32; 2],
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: u32,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}
const _: () = assert!(size_of::<QpAttr>() == 144);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct DvQpInitAttr {
    pub(crate) comp_mask: u64,
    pub(crate) driver_qp_type: u32,
    pub(crate) flags: u32,
    pub(crate) segment: u8,
    pub(crate) record_mode: u8,
    pub(crate) repeats: u8,
    pub(crate) parity: u8,
    pub(crate) max_send_size: u32,
    pub(crate) max_records: u32,
    pub(crate) max_reads: u32,
    pub(crate) max_read_size: u32,
    pub(crate) grace_us: u32,
    pub(crate) deadline_us: u32,
    pub(crate) read_timeout_us: u32,
    pub(crate) peer_timeout_ms: u32,
    pub(crate) segment_size: u32,
    pub(crate) port: u32,
    pub(crate) reserved: u32,
}
const _: () = assert!(size_of::<DvQpInitAttr>() == 64);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DvRecord {
    pub(crate) source: sockaddr_storage,
    pub(crate) src_qp: u32,
    pub(crate) message_id: u32,
    pub(crate) rkey: u32,
    pub(crate) flags: u32,
    pub(crate) base: u64,
    pub(crate) length: u32,
    pub(crate) valid: u32,
    pub(crate) offset: u32,
    pub(crate) imm_data: u32,
    pub(crate) map: u64,
}
const _: () = assert!(size_of::<DvRecord>() == 176);

/// Declares the functions: their types, and their names for the look-up.
macro_rules! functions {
    ($($name:ident: $symbol:literal = fn($($arg:ty),*) -> $result:ty;)*) => {
        /// Functions of the library that has the device.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Functions {
            /// Looks all up by `find`; the name of the first that is not there otherwise.
            ///
            /// # Safety
            /// `find` gives null, or the address of the function of that name.
            pub(crate) unsafe fn find(find: impl Fn(&std::ffi::CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let symbol = find($symbol);
                        if symbol.is_null() {
                            return Err($symbol.to_str().unwrap_or_default());
                        }
                        // SAFETY: the function has this type in the header (caller's promise about its address).
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $result>(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    get_device_list: c"ibv_get_device_list" = fn(*mut c_int) -> *mut *mut Device;
    free_device_list: c"ibv_free_device_list" = fn(*mut *mut Device) -> ();
    open_device: c"ibv_open_device" = fn(*mut Device) -> *mut Context;
    query_gid: c"ibv_query_gid" = fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
    alloc_pd: c"ibv_alloc_pd" = fn(*mut Context) -> *mut Pd;
    dealloc_pd: c"ibv_dealloc_pd" = fn(*mut Pd) -> c_int;
    reg_mr: c"ibv_reg_mr" = fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr: c"ibv_dereg_mr" = fn(*mut Mr) -> c_int;
    create_channel: c"ibv_create_comp_channel" = fn(*mut Context) -> *mut Channel;
    destroy_channel: c"ibv_destroy_comp_channel" = fn(*mut Channel) -> c_int;
    get_cq_event: c"ibv_get_cq_event" = fn(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events: c"ibv_ack_cq_events" = fn(*mut Cq, u32) -> ();
    create_cq: c"ibv_create_cq" = fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
    destroy_cq: c"ibv_destroy_cq" = fn(*mut Cq) -> c_int;
    create_ah: c"ibv_create_ah" = fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    destroy_ah: c"ibv_destroy_ah" = fn(*mut Ah) -> c_int;
    modify_qp: c"ibv_modify_qp" = fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp: c"ibv_destroy_qp" = fn(*mut Qp) -> c_int;
    qp_to_qp_ex: c"ibv_qp_to_qp_ex" = fn(*mut Qp) -> *mut QpEx;
    dv_is_supported: c"anywarpdv_is_supported" = fn(*mut Device) -> bool;
    dv_create_qp: c"anywarpdv_create_qp_ex" = fn(*mut Context, *mut QpInitAttrEx, *const DvQpInitAttr, u32) -> *mut Qp;
    dv_poll_records: c"anywarpdv_poll_records" = fn(*mut Qp, c_int, *mut DvRecord, u32, c_int) -> c_int;
    dv_restrict_mr: c"anywarpdv_restrict_mr" = fn(*mut Mr, *const sockaddr, u32) -> c_int;
}

/// The name under which the loader knows the library of a function.
pub(crate) fn library_of(address: *const c_void) -> Option<&'static std::ffi::CStr> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is a place for the result; the name lives as long as the library is loaded, which is never unloaded
    // (`-z nodelete`, and the program's own libraries that have the device).
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name: *const c_char = info.assume_init().dli_fname;
        (!name.is_null()).then(|| std::ffi::CStr::from_ptr(name))
    }
}
