//! The functions that libfabric's inline functions call, one module for each kind of object.

pub(crate) mod atomic;
pub(crate) mod av;
pub(crate) mod cntr;
pub(crate) mod cq;
pub(crate) mod domain;
pub(crate) mod ep;
pub(crate) mod eq;
pub(crate) mod fabric;
pub(crate) mod message;
pub(crate) mod object;
pub(crate) mod rma;
mod text;
