//! Asynchronous events of queue pairs and shared receive queues (`ibv_get_async_event(3)`).

/// An event of a queue pair, or of its shared receive queue. The program gets all but [`Self::Started`] and [`Self::PeerGone`], which
/// are for the connection manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair failed.
    QpFatal,
    /// The peer sent an invalid request.
    QpRequest,
    /// The peer sent a request for memory that it may not access.
    QpAccess,
    /// The send queue is drained (after a change to SQD).
    SqDrained,
    /// No more receives of the shared queue will complete for this queue pair.
    LastWqe,
    /// The shared receive queue fell below its limit.
    SrqLimit,
    /// A message of the peer arrived while the queue pair was in RTR.
    Established,
    /// The first message of the peer arrived: both ends may send.
    Started,
    /// The stream ended: the peer closed it, or the connection broke.
    PeerGone,
}
