//! The functions of libibverbs and of `<infiniband/anywarpdv.h>` that the provider calls, and their types. The functions are
//! looked up by name (`verbs.rs`).

pub(crate) use anywarp_verbs_sys::{dv::*, verbs::*};
use libc::{c_char, c_int, c_void, sockaddr, socklen_t};

/// The length in bytes of the route header before a received datagram.
pub(crate) const ROUTE_HEADER: usize = size_of::<ibv_grh>();

/// Declares the functions: their types, and their names for the look-up.
macro_rules! functions {
    ($($name:ident: $symbol:literal = fn($($arg:ty),*) -> $result:ty;)*) => {
        /// Functions of the library that has the device.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Functions {
            /// Looks all functions up by `find`. If one is missing, the error is its name.
            ///
            /// # Safety
            /// `find` returns null, or the address of the function of that name.
            pub(crate) unsafe fn find(find: impl Fn(&std::ffi::CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let symbol = find($symbol);
                        if symbol.is_null() {
                            return Err($symbol.to_str().unwrap_or_default());
                        }
                        // SAFETY: the function has this type in the header (guaranteed by the caller).
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
    get_device_list: c"ibv_get_device_list" = fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list: c"ibv_free_device_list" = fn(*mut *mut ibv_device) -> ();
    open_device: c"ibv_open_device" = fn(*mut ibv_device) -> *mut ibv_context;
    close_device: c"ibv_close_device" = fn(*mut ibv_context) -> c_int;
    query_gid: c"ibv_query_gid" = fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    alloc_pd: c"ibv_alloc_pd" = fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd: c"ibv_dealloc_pd" = fn(*mut ibv_pd) -> c_int;
    reg_mr: c"ibv_reg_mr" = fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr: c"ibv_dereg_mr" = fn(*mut ibv_mr) -> c_int;
    create_channel: c"ibv_create_comp_channel" = fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_channel: c"ibv_destroy_comp_channel" = fn(*mut ibv_comp_channel) -> c_int;
    get_cq_event: c"ibv_get_cq_event" = fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events: c"ibv_ack_cq_events" = fn(*mut ibv_cq, u32) -> ();
    create_cq: c"ibv_create_cq" = fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq: c"ibv_destroy_cq" = fn(*mut ibv_cq) -> c_int;
    create_ah: c"ibv_create_ah" = fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    destroy_ah: c"ibv_destroy_ah" = fn(*mut ibv_ah) -> c_int;
    modify_qp: c"ibv_modify_qp" = fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    create_qp: c"ibv_create_qp" = fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    destroy_qp: c"ibv_destroy_qp" = fn(*mut ibv_qp) -> c_int;
    qp_to_qp_ex: c"ibv_qp_to_qp_ex" = fn(*mut ibv_qp) -> *mut ibv_qp_ex;
    dv_is_supported: c"anywarpdv_is_supported" = fn(*mut ibv_device) -> bool;
    dv_create_qp: c"anywarpdv_create_qp_ex" = fn(*mut ibv_context, *mut ibv_qp_init_attr_ex, *const anywarpdv_qp_init_attr, u32) -> *mut ibv_qp;
    dv_poll_records: c"anywarpdv_poll_records" = fn(*mut ibv_qp, c_int, *mut anywarpdv_record, u32, c_int) -> c_int;
    dv_set_progress: c"anywarpdv_set_progress" = fn(*mut ibv_context, u32) -> c_int;
    dv_restrict_mr: c"anywarpdv_restrict_mr" = fn(*mut ibv_mr, *const sockaddr, socklen_t, u32) -> c_int;
}

/// Returns the file name of the library that contains a function.
pub(crate) fn library_of(address: *const c_void) -> Option<&'static std::ffi::CStr> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is valid for writes. The name is valid as long as the library is loaded, and the library is never
    // unloaded (it is linked with `-z nodelete`, or it is one of the program's own libraries).
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name: *const c_char = info.assume_init().dli_fname;
        (!name.is_null()).then(|| std::ffi::CStr::from_ptr(name))
    }
}
