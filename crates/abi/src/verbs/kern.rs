//! `ibv_copy_*_from_kern` and `_to_kern`: between the kernel's structures and the library's.
//!
//! Only programs that speak to the kernel's connection manager themselves need them. There is no
//! kernel here to speak to, but the conversion is plain data and therefore works.
#![allow(
    missing_docs,
    reason = "the kernel's structures are documented by rdma/ib_user_verbs.h and rdma/ib_user_sa.h"
)]
#![allow(
    non_camel_case_types,
    reason = "types have the names of the C header that they mirror"
)]

use super::types::{
    be16, be32, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp_attr, ibv_qp_cap, ibv_sa_path_rec,
};
use crate::entry;
use crate::layout::c_types;

c_types! {
    #[derive(Debug)]
    struct ib_uverbs_global_route {
        dgid: [u8; 16],
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
        reserved: u8,
    }

    #[derive(Debug)]
    struct ib_uverbs_ah_attr {
        grh: ib_uverbs_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
        reserved: u8,
    }

    #[derive(Debug)]
    struct ib_uverbs_qp_attr {
        qp_attr_mask: u32,
        qp_state: u32,
        cur_qp_state: u32,
        path_mtu: u32,
        path_mig_state: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: u32,
        ah_attr: ib_uverbs_ah_attr,
        alt_ah_attr: ib_uverbs_ah_attr,
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        reserved: [u8; 5],
    }

    #[derive(Debug)]
    struct ib_user_path_rec {
        dgid: [u8; 16],
        sgid: [u8; 16],
        dlid: be16,
        slid: be16,
        raw_traffic: u32,
        flow_label: be32,
        reversible: u32,
        mtu: u32,
        pkey: be16,
        hop_limit: u8,
        traffic_class: u8,
        numb_path: u8,
        sl: u8,
        mtu_selector: u8,
        rate_selector: u8,
        rate: u8,
        packet_life_time_selector: u8,
        packet_life_time: u8,
        preference: u8,
    }
}

impl From<ib_uverbs_ah_attr> for ibv_ah_attr {
    fn from(k: ib_uverbs_ah_attr) -> Self {
        Self {
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
}

impl From<ib_uverbs_qp_attr> for ibv_qp_attr {
    fn from(k: ib_uverbs_qp_attr) -> Self {
        Self {
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
            ah_attr: k.ah_attr.into(),
            alt_ah_attr: k.alt_ah_attr.into(),
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
}

impl From<ib_user_path_rec> for ibv_sa_path_rec {
    fn from(k: ib_user_path_rec) -> Self {
        Self {
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
            // Six bits on the wire; the kernel's field is only wider.
            mtu: k.mtu.to_le_bytes()[0],
            rate_selector: k.rate_selector,
            rate: k.rate,
            packet_life_time_selector: k.packet_life_time_selector,
            packet_life_time: k.packet_life_time,
            preference: k.preference,
        }
    }
}

impl From<ibv_sa_path_rec> for ib_user_path_rec {
    fn from(u: ibv_sa_path_rec) -> Self {
        Self {
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
}

entry! {
    /// `ibv_copy_ah_attr_from_kern`: what the kernel says of an address, as the library says it.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *const ib_uverbs_ah_attr), value(()), {
        // SAFETY: readable (caller's promise).
        let attr = unsafe { src.read() };
        // SAFETY: writable (caller's promise).
        unsafe { dst.write(attr.into()) };
    }
}

entry! {
    /// `ibv_copy_qp_attr_from_kern`: what the kernel says of a queue pair, as the library says it.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *const ib_uverbs_qp_attr), value(()), {
        // SAFETY: readable (caller's promise).
        let attr = unsafe { src.read() };
        // SAFETY: writable (caller's promise).
        unsafe { dst.write(attr.into()) };
    }
}

entry! {
    /// `ibv_copy_path_rec_from_kern`: a path record of the kernel's, as the library keeps it.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_path_rec_from_kern(dst: *mut ibv_sa_path_rec, src: *const ib_user_path_rec), value(()), {
        // SAFETY: readable (caller's promise).
        let path = unsafe { src.read() };
        // SAFETY: writable (caller's promise).
        unsafe { dst.write(path.into()) };
    }
}

entry! {
    /// `ibv_copy_path_rec_to_kern`: a path record of the library's, as the kernel takes it.
    ///
    /// # Safety
    /// `dst` is writable and `src` readable.
    unsafe fn ibv_copy_path_rec_to_kern(dst: *mut ib_user_path_rec, src: *const ibv_sa_path_rec), value(()), {
        // SAFETY: readable (caller's promise).
        let path = unsafe { src.read() };
        // SAFETY: writable (caller's promise).
        unsafe { dst.write(path.into()) };
    }
}
