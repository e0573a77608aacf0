//! The types and constants of the C interface of verbs: `infiniband/verbs.h`, `infiniband/sa.h`, `rdma/rdma_cma.h`,
//! `rdma/rsocket.h` and `infiniband/anywarpdv.h`.
//!
//! `anywarp-abi` implements the functions of these headers; libexs, the provider for libfabric and anywarp-buffers call them. All four use
//! these types, so that one test, which compiles the headers, holds every size, offset and constant of theirs. Beside them there
//! is one wrapper of pointers; nothing here is seen by a linker.

pub mod cm;
pub mod dv;
pub mod kern;
mod layout;
pub mod ptr;
pub mod verbs;
