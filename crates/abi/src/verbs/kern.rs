//! `ibv_copy_*_from_kern` and `_to_kern`: conversions between the kernel's structures and those of the library.
//!
//! Only programs that use the kernel's connection manager directly need these functions. This device has no kernel part, but the
//! conversion does not need one.

use anywarp_verbs_sys::kern::{ib_user_path_rec, ib_uverbs_ah_attr, ib_uverbs_qp_attr};
use anywarp_verbs_sys::verbs::{
    ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr, ibv_qp_cap, ibv_sa_path_rec,
};

use crate::entry;

fn ah_attr_of(k: ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: k.grh.dgid },
            flow_label: k.grh.flow_label,
            sgid_index: k.grh.sgid_index,
            hop_limit: k.grh.hop_limit,
            traffic_class: k.grh.traffic_class,
        },
        dlid: k.dlid,
        sl: k.sl,
        src_path_bits: k.src_path_bits,
        static_rate: k.static_rate,
        is_global: k.is_global,
        port_num: k.port_num,
    }
}

fn qp_attr_of(k: ib_uverbs_qp_attr) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: k.qp_state,
        cur_qp_state: k.cur_qp_state,
        path_mtu: k.path_mtu,
        path_mig_state: k.path_mig_state,
        qkey: k.qkey,
        rq_psn: k.rq_psn,
        sq_psn: k.sq_psn,
        dest_qp_num: k.dest_qp_num,
        qp_access_flags: k.qp_access_flags,
        cap: ibv_qp_cap {
            max_send_wr: k.max_send_wr,
            max_recv_wr: k.max_recv_wr,
            max_send_sge: k.max_send_sge,
            max_recv_sge: k.max_recv_sge,
            max_inline_data: k.max_inline_data,
        },
        ah_attr: ah_attr_of(k.ah_attr),
        alt_ah_attr: ah_attr_of(k.alt_ah_attr),
        pkey_index: k.pkey_index,
        alt_pkey_index: k.alt_pkey_index,
        en_sqd_async_notify: k.en_sqd_async_notify,
        sq_draining: k.sq_draining,
        max_rd_atomic: k.max_rd_atomic,
        max_dest_rd_atomic: k.max_dest_rd_atomic,
        min_rnr_timer: k.min_rnr_timer,
        port_num: k.port_num,
        timeout: k.timeout,
        retry_cnt: k.retry_cnt,
        rnr_retry: k.rnr_retry,
        alt_port_num: k.alt_port_num,
        alt_timeout: k.alt_timeout,
        // The kernel's structure has no such field.
        rate_limit: 0,
    }
}

fn path_rec_of(k: ib_user_path_rec) -> ibv_sa_path_rec {
    ibv_sa_path_rec {
        dgid: ibv_gid { raw: k.dgid },
        sgid: ibv_gid { raw: k.sgid },
        dlid: k.dlid,
        slid: k.slid,
        raw_traffic: k.raw_traffic.cast_signed(),
        flow_label: k.flow_label,
        hop_limit: k.hop_limit,
        traffic_class: k.traffic_class,
        reversible: k.reversible.cast_signed(),
        numb_path: k.numb_path,
        pkey: k.pkey,
        sl: k.sl,
        mtu_selector: k.mtu_selector,
        // The value has six bits on the wire. The kernel's field is wider.
        mtu: k.mtu.to_le_bytes()[0],
        rate_selector: k.rate_selector,
        rate: k.rate,
        packet_life_time_selector: k.packet_life_time_selector,
        packet_life_time: k.packet_life_time,
        preference: k.preference,
    }
}

fn kern_path_rec_of(u: ibv_sa_path_rec) -> ib_user_path_rec {
    ib_user_path_rec {
        dgid: u.dgid.bytes(),
        sgid: u.sgid.bytes(),
        dlid: u.dlid,
        slid: u.slid,
        raw_traffic: u.raw_traffic.cast_unsigned(),
        flow_label: u.flow_label,
        reversible: u.reversible.cast_unsigned(),
        mtu: u32::from(u.mtu),
        pkey: u.pkey,
        hop_limit: u.hop_limit,
        traffic_class: u.traffic_class,
        numb_path: u.numb_path,
        sl: u.sl,
        mtu_selector: u.mtu_selector,
        rate_selector: u.rate_selector,
        rate: u.rate,
        packet_life_time_selector: u.packet_life_time_selector,
        packet_life_time: u.packet_life_time,
        preference: u.preference,
    }
}

entry! {
    /// `ibv_copy_ah_attr_from_kern`: converts an address vector of the kernel.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *const ib_uverbs_ah_attr), value(()), {
        // SAFETY: the caller passes readable memory.
        let attr = unsafe { src.read() };
        // SAFETY: the caller passes writable memory.
        unsafe { dst.write(ah_attr_of(attr)) };
    }
}

entry! {
    /// `ibv_copy_qp_attr_from_kern`: converts queue pair attributes of the kernel.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *const ib_uverbs_qp_attr), value(()), {
        // SAFETY: the caller passes readable memory.
        let attr = unsafe { src.read() };
        // SAFETY: the caller passes writable memory.
        unsafe { dst.write(qp_attr_of(attr)) };
    }
}

entry! {
    /// `ibv_copy_path_rec_from_kern`: converts a path record of the kernel.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_path_rec_from_kern(dst: *mut ibv_sa_path_rec, src: *const ib_user_path_rec), value(()), {
        // SAFETY: the caller passes readable memory.
        let path = unsafe { src.read() };
        // SAFETY: the caller passes writable memory.
        unsafe { dst.write(path_rec_of(path)) };
    }
}

entry! {
    /// `ibv_copy_path_rec_to_kern`: converts a path record to the kernel's format.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_path_rec_to_kern(dst: *mut ib_user_path_rec, src: *const ibv_sa_path_rec), value(()), {
        // SAFETY: the caller passes readable memory.
        let path = unsafe { src.read() };
        // SAFETY: the caller passes writable memory.
        unsafe { dst.write(kern_path_rec_of(path)) };
    }
}
