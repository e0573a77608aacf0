//! The types and constants of the C interface of verbs: `infiniband/verbs.h`, `infiniband/sa.h`, `rdma/rdma_cma.h`,
//! `rdma/rsocket.h` and `infiniband/anywarpdv.h`.
//!
//! `anywarp-abi` implements the functions of these headers; libexs and the provider for libfabric call them. All three use
//! these types, so that one test, which compiles the headers, holds every size, offset and constant of theirs. There is no
//! code here, and nothing that a linker would see.

pub mod cm;
pub mod dv;
pub mod kern;
mod layout;
pub mod verbs;
