//! The types and constants of the C interface of verbs: `infiniband/verbs.h`, `infiniband/sa.h`, `rdma/rdma_cma.h`,
//! `rdma/rsocket.h`, `infiniband/anywarpdv.h`, and parts of `rdma/ib_user_verbs.h` and `rdma/ib_user_sa.h`.
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
