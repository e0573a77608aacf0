//! The verbs objects of the application: work requests, completions, protection domains, memory regions, queues.

pub mod access;
pub mod counter;
pub mod cq;
pub mod event;
pub mod mr;
pub mod pd;
pub mod qp;
pub mod qp_base;
pub mod rnic;
pub mod rq;
pub mod source;
pub mod sq;
pub mod srq;
pub mod wc;
pub mod wr;
pub mod xrc;
