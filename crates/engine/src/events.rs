//! Asynchronous events (`ibv_get_async_event(3)`).

/// An asynchronous event: the numbers are those of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncItem {
    /// Event type.
    pub event: u32,
    /// Address of the C object of the queue pair, completion queue or shared receive queue; 0 for events of the port and the
    /// device.
    pub c_object: usize,
}

/// Numbers of `enum ibv_event_type`.
pub mod event {
    #![allow(missing_docs, reason = "the names are those of ibv_get_async_event(3)")]
    pub const CQ_ERR: u32 = 0;
    pub const QP_FATAL: u32 = 1;
    pub const QP_REQ_ERR: u32 = 2;
    pub const QP_ACCESS_ERR: u32 = 3;
    pub const COMM_EST: u32 = 4;
    pub const SQ_DRAINED: u32 = 5;
    pub const DEVICE_FATAL: u32 = 8;
    pub const PORT_ACTIVE: u32 = 9;
    pub const PORT_ERR: u32 = 10;
    pub const LID_CHANGE: u32 = 11;
    pub const SRQ_ERR: u32 = 14;
    pub const SRQ_LIMIT_REACHED: u32 = 15;
    pub const QP_LAST_WQE_REACHED: u32 = 16;
    pub const GID_CHANGE: u32 = 18;
}
