//! Asynchronous events of queue pairs and shared receive queues (`ibv_get_async_event(3)`).

/// Something that the application hears of asynchronously.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair failed.
    QpFatal,
    /// The peer's request made no sense.
    QpRequest,
    /// The peer's request was not allowed.
    QpAccess,
    /// The send queue is drained (after a change to SQD).
    SqDrained,
    /// No more receives of the shared queue will complete for this queue pair.
    LastWqe,
    /// The shared receive queue fell below its limit.
    SrqLimit,
    /// First message of the peer arrived: the stream is up for both ends.
    Started,
    /// The peer ended the stream, in order or not.
    PeerGone,
}
