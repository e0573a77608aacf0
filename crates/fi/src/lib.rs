//! A libfabric provider on reliable datagrams: `libanywarp-fi.so`.
//!
//! ```text
//! api       the functions that libfabric calls, by object
//! info      fi_getinfo
//! opened    the fabrics and domains that the program has open
//! domain    the device, and the objects opened on it, whose state one lock protects
//! endpoint  messages, rendezvous, one-sided operations
//! matching  receives and messages
//! queue     completions
//! address   names of peers
//! verbs     the device, through the public libibverbs and <infiniband/anywarpdv.h>
//! ```
//!
//! The library imports no symbols from libfabric. The core of libfabric finds it by `FI_PROVIDER_PATH` and calls [`fi_prov_ini`].
//! `docs/mpi.md` describes the protocol and how MPI programs use the provider.

#![allow(
    private_interfaces,
    reason = "the modules are public for their documentation; nothing links this as a Rust library"
)]

pub mod abi;
pub mod address;
mod api;
pub mod atomics;
pub mod domain;
pub mod endpoint;
pub mod event;
mod ffi;
pub mod fuzz;
pub mod info;
pub mod limits;
mod log;
pub mod matching;
pub mod memory;
pub mod opened;
pub mod queue;
pub mod slab;
pub mod verbs;
pub mod wire;

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};

use abi::{FI_EINVAL, FI_ENODATA, fi_info, fi_provider, fi_version};

/// The structure of the provider. The core stores its address and writes to it.
struct Provider(UnsafeCell<fi_provider>);

// SAFETY: only the core of libfabric accesses it, under its own lock.
unsafe impl Sync for Provider {}

static PROVIDER: Provider = Provider(UnsafeCell::new(fi_provider {
    version: info::VERSION,
    // Higher than any version, because the core skips a provider if a program requests a later version.
    fi_version: fi_version(2, 99),
    context: abi::fi_context {
        internal: [std::ptr::null_mut(); 4],
    },
    name: info::PROVIDER.as_ptr(),
    getinfo: getinfo as *const (),
    fabric: api::fabric::open as *const (),
    cleanup: cleanup as *const (),
}));

/// The entry point that the core of libfabric looks up in libraries of `FI_PROVIDER_PATH`.
///
/// # Safety
/// The core calls this once for each libfabric in the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fi_prov_ini() -> *mut fi_provider {
    log::init(PROVIDER.0.get().cast());
    PROVIDER.0.get()
}

extern "C" fn cleanup() {}

unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
    info: *mut *mut fi_info,
) -> c_int {
    api::object::ended_int(|| {
        // SAFETY: the core passes null or a valid pointer.
        let to = unsafe { info.as_mut() }.ok_or(FI_EINVAL)?;
        // SAFETY: the core passes null or valid pointers.
        match unsafe { info::answer(version, node, service, flags, hints) } {
            Ok(made) => {
                *to = made;
                Ok(0)
            }
            Err(why) => {
                log::info(&format!("fi_getinfo: no answer: {why}"));
                Err(FI_ENODATA)
            }
        }
    })
}
