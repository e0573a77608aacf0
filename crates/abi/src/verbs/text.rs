//! Names of enum values: `ibv_wc_status_str(3)` and related functions.
//!
//! The texts are those of rdma-core, because users search their logs for them.

use crate::entry;
use anywarp_verbs_sys::verbs::{
    IBV_NODE_CA, ibv_event_type, ibv_node_type, ibv_port_state, ibv_wc_status, ibv_wr_opcode,
};
use std::ffi::{CStr, c_char};

/// In the order of `enum ibv_wc_status`.
const WC_STATUS: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

/// In the order of `enum ibv_node_type`, from `IBV_NODE_CA`.
const NODE_TYPE: [&CStr; 7] = [
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

/// In the order of `enum ibv_port_state`.
const PORT_STATE: [&CStr; 6] = [
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

/// In the order of `enum ibv_event_type`.
const EVENT_TYPE: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

/// In the order of `enum ibv_wr_opcode`.
const WR_OPCODE: [&CStr; 16] = [
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"unknown",
    c"unknown",
    c"flush",
    c"atomic-write",
];

/// Returns the entry at `index`, or `other` if there is none.
pub(crate) fn text(
    table: &'static [&'static CStr],
    index: impl TryInto<usize>,
    other: &'static CStr,
) -> *const c_char {
    index
        .try_into()
        .ok()
        .and_then(|i| table.get(i))
        .unwrap_or(&other)
        .as_ptr()
}

entry! {
    /// `ibv_wc_status_str(3)`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char, value(std::ptr::null()), {
        text(&WC_STATUS, status, c"unknown")
    }
}

entry! {
    /// `ibv_node_type_str(3)`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char, value(std::ptr::null()), {
        text(&NODE_TYPE, node_type.wrapping_sub(IBV_NODE_CA), c"unknown")
    }
}

entry! {
    /// `ibv_port_state_str(3)`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_port_state_str(port_state: ibv_port_state) -> *const c_char, value(std::ptr::null()), {
        text(&PORT_STATE, port_state, c"unknown")
    }
}

entry! {
    /// `ibv_event_type_str(3)`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_event_type_str(event: ibv_event_type) -> *const c_char, value(std::ptr::null()), {
        text(&EVENT_TYPE, event, c"unknown")
    }
}

entry! {
    /// `ibv_wr_opcode_str(3)`: declared in the header since rdma-core 49, and exported under a private version node.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char, value(std::ptr::null()), {
        text(&WR_OPCODE, opcode, c"unknown")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution;

    type Str = unsafe extern "C" fn(std::ffi::c_int) -> *const c_char;

    fn same(name: &CStr, ours: impl Fn(std::ffi::c_int) -> *const c_char) {
        let Some(address) = distribution::symbol(distribution::IBVERBS, name) else {
            return;
        };
        // SAFETY: all four functions take an enum and return a string.
        let theirs: Str = unsafe { std::mem::transmute(address) };
        for n in -2..40 {
            // SAFETY: both return static strings, whatever the number.
            let (ours, theirs) = unsafe { (CStr::from_ptr(ours(n)), CStr::from_ptr(theirs(n))) };
            assert_eq!(ours, theirs, "{name:?}({n})");
        }
    }

    /// The texts are equal to those of the distribution's library, so log lines are equal too.
    #[test]
    fn names_are_those_of_the_distribution() {
        // SAFETY: any number may be passed.
        unsafe {
            same(c"ibv_wc_status_str", |n| {
                ibv_wc_status_str(n.cast_unsigned())
            });
            same(c"ibv_node_type_str", |n| ibv_node_type_str(n));
            same(c"ibv_port_state_str", |n| {
                ibv_port_state_str(n.cast_unsigned())
            });
            same(c"ibv_event_type_str", |n| {
                ibv_event_type_str(n.cast_unsigned())
            });
        }
    }

    /// Tests opcodes that the header names, and numbers between and above them.
    #[test]
    fn operations_have_names() {
        use anywarp_verbs_sys::verbs::*;
        // SAFETY: any number may be passed; the function returns a static string.
        let name = |n| unsafe { CStr::from_ptr(ibv_wr_opcode_str(n)) };
        assert_eq!(name(IBV_WR_SEND), c"send");
        assert_eq!(name(IBV_WR_ATOMIC_FETCH_AND_ADD), c"atomic-fetch-and-add");
        assert_eq!(name(IBV_WR_SEND_WITH_INV), c"send-with-inv");
        assert_eq!(name(15), c"atomic-write");
        for n in [12, 13, 16, u32::MAX] {
            assert_eq!(name(n), c"unknown");
        }
    }
}
