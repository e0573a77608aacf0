//! The types and constants of `infiniband/anywarpdv.h`, which describes them.
#![allow(
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    reason = "names and meaning are those of the header"
)]

use crate::cm::rdma_sockaddr;
use crate::layout::{c_consts, c_types};
use crate::verbs::be32;

c_types! {
    struct anywarpdv_qp_init_attr {
        comp_mask: u64,
        driver_qp_type: u32,
        flags: u32,
        segment: u8,
        record_mode: u8,
        repeats: u8,
        parity: u8,
        max_send_size: u32,
        max_records: u32,
        max_reads: u32,
        max_read_size: u32,
        grace_us: u32,
        deadline_us: u32,
        read_timeout_us: u32,
        peer_timeout_ms: u32,
        segment_size: u32,
        port: u32,
        reserved: u32,
    }
    struct anywarpdv_device_attr {
        comp_mask: u64,
        qp_types: u32,
        qp_flags: u32,
        send_ops_ud: u64,
        send_ops_rd: u64,
        max_message_size: u32,
        min_segment_size: u32,
        max_segment_size: u32,
        max_parity: u32,
    }
    struct anywarpdv_record {
        source: rdma_sockaddr,
        src_qp: u32,
        message_id: u32,
        rkey: u32,
        flags: u32,
        base: u64,
        length: u32,
        valid: u32,
        offset: u32,
        imm_data: be32,
        map: u64,
    }
    struct anywarpdv_range {
        from: u32,
        to: u32,
    }
    struct anywarpdv_error {
        source: rdma_sockaddr,
        src_qp: u32,
        message_id: u32,
        layer: u8,
        kind: u8 => "type",
        code: u8,
        flags: u8,
        status: u32,
        wr_id: u64,
    }
}

c_consts! {
    u32 {
        ANYWARPDV_QPT_UD = 0,
        ANYWARPDV_QPT_RD = 1,
        ANYWARPDV_QP_RECORD_COMPLETIONS = 1 << 0,
        ANYWARPDV_QP_REPORT_ERRORS = 1 << 1,
        ANYWARPDV_QP_UNORDERED = 1 << 2,
        ANYWARPDV_QP_KEEP_GOING = 1 << 3,
        ANYWARPDV_QP_PLAIN_WRITES = 1 << 4,
        ANYWARPDV_SEND_ACK_LATER = 1 << 30,
        ANYWARPDV_PROGRESS_AUTO = 0,
        ANYWARPDV_PROGRESS_POLLED = 1,
        ANYWARPDV_RECORD_COMPLETE = 1 << 0,
        ANYWARPDV_RECORD_IS_CHUNK = 1 << 1,
        ANYWARPDV_RECORD_FINAL_SEEN = 1 << 2,
        ANYWARPDV_RECORD_WITH_IMM = 1 << 3,
    }
    u8 {
        ANYWARPDV_SEGMENT_PATH_MTU = 0,
        ANYWARPDV_SEGMENT_JUMBO = 1,
        ANYWARPDV_SEGMENT_MAX = 2,
        ANYWARPDV_RECORD_ROBUST = 0,
        ANYWARPDV_RECORD_THESIS = 1,
        ANYWARPDV_RECORD_CHUNK = 2,
        ANYWARPDV_ERROR_WITH_WR_ID = 1 << 0,
    }
}

/// `struct anywarpdv_counters`, which has one member for each counter, in the order of the counters.
#[cfg(test)]
pub(crate) fn counters_layout() -> crate::layout::CType {
    let named = anywarp_core::datagram::Counters::default().named();
    let fields = named
        .iter()
        .enumerate()
        .map(|(at, (name, _))| crate::layout::CField {
            name: (*name).to_owned(),
            offset: at * size_of::<u64>(),
            size: size_of::<u64>(),
        });
    crate::layout::CType {
        name: "struct anywarpdv_counters".to_owned(),
        size: named.len() * size_of::<u64>(),
        align: align_of::<u64>(),
        fields: fields.collect(),
    }
}
