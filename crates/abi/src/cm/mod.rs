//! The functions of librdmacm, one module for each subject.

pub(crate) mod address;
pub mod addrinfo;
pub mod connect;
pub mod device;
pub mod endpoint;
pub mod event;
pub mod id;
pub mod newer;
pub mod option;
pub mod qp;
pub mod text;
