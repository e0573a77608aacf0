//! The types and constants of the C interface of verbs: `infiniband/verbs.h`, `infiniband/sa.h`, `rdma/rdma_cma.h`,
//! `rdma/rsocket.h` and `infiniband/anywarpdv.h`.
//!
//! `anywarp-abi` implements the functions of these headers, and libexs, the libfabric provider and anywarp-buffers call them.
//! All four use these types, so one test, which compiles the headers, checks every size, offset and constant. The crate also
//! contains one wrapper of pointers. It defines no symbols for the linker.

pub mod cm;
pub mod dv;
pub mod kern;
mod layout;
pub mod ptr;
pub mod verbs;
