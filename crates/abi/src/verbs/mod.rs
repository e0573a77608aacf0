//! The functions of libibverbs, one module for each kind of object.

pub mod address;
pub mod async_event;
pub mod attributes;
pub(crate) mod convert;
pub mod counter;
pub mod cq;
pub(crate) mod cq_ex;
pub mod dm;
pub(crate) mod handle;
pub mod host;
pub mod kern;
pub mod memory;
pub mod newer;
pub(crate) mod object;
pub mod open;
pub mod ops;
pub mod pd;
pub mod private;
pub mod qp;
pub mod rate;
pub mod srq;
pub mod text;
pub(crate) mod wait;
pub(crate) mod window;
pub(crate) mod wr_ex;
