//! Names of enum values: `rdma_event_str(3)`.

use crate::entry;
use crate::verbs::text::text;
use anywarp_verbs_sys::cm::rdma_cm_event_type;
use std::ffi::{CStr, c_char};

/// The names, in the order of `enum rdma_cm_event_type`.
const EVENT: [&CStr; 18] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
    c"RDMA_CM_EVENT_ADDRINFO_ERROR",
];

entry! {
    /// `rdma_event_str(3)`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char, value(std::ptr::null()), {
        text(&EVENT, event, c"UNKNOWN EVENT")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::{self, RDMACM};

    /// The texts are equal to those of the distribution's library, so log lines are equal too.
    #[test]
    fn names_are_those_of_the_distribution() {
        let Some(address) = distribution::symbol(RDMACM, c"rdma_event_str") else {
            return;
        };
        // SAFETY: the function takes an enum and returns a string.
        let theirs: unsafe extern "C" fn(u32) -> *const c_char =
            unsafe { std::mem::transmute(address) };
        for n in 0..20 {
            // SAFETY: any number may be passed, and the string is static.
            let ours = unsafe { CStr::from_ptr(rdma_event_str(n)) };
            // SAFETY: as above.
            let theirs = unsafe { CStr::from_ptr(theirs(n)) };
            // These two events were added after rdma-core 44.
            let is_newer = matches!(n, 16 | 17) && theirs == c"UNKNOWN EVENT";
            if !is_newer {
                assert_eq!(ours, theirs);
            }
        }
    }

    #[test]
    fn the_newest_events_with_a_name_are_those_of_addresses() {
        // SAFETY: any number may be passed, and the string is static.
        let name = |n| unsafe { CStr::from_ptr(rdma_event_str(n)) };
        assert_eq!(name(16), c"RDMA_CM_EVENT_ADDRINFO_RESOLVED");
        assert_eq!(name(17), c"RDMA_CM_EVENT_ADDRINFO_ERROR");
        assert_eq!(name(18), c"UNKNOWN EVENT");
    }
}
