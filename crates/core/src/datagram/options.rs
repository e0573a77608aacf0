//! The options of a datagram queue pair that verbs do not have.

use std::time::Duration;

/// The length of the datagrams of a segmented message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// As long as the MTU of the path allows. The loss of a packet is the loss of one datagram.
    PathMtu,
    /// As long as jumbo frames allow.
    Jumbo,
    /// As long as IP allows. IP fragments them, and the loss of one fragment is the loss of the datagram (Grant's
    /// thesis, section 5.4).
    Max,
    /// This number of payload bytes, a multiple of 8, if a datagram has room for them.
    Bytes(u32),
}

/// When the record of an incoming Write-Record is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordMode {
    /// When its final datagram arrives, with the bytes that have arrived by then. If the final datagram is lost,
    /// there is no record (Grant's thesis, section 6.6.1).
    Thesis,
    /// When the message is complete; or when nothing more of it is expected, with the bytes that have arrived.
    Robust,
    /// For each datagram.
    Chunk,
}

/// Options of a datagram queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether the queue pair executes Writes and Reads, not only Sends.
    pub one_sided: bool,
    /// Length of datagrams. UC ignores it: see [`DatagramQp::set_segment`](super::DatagramQp::set_segment).
    pub segment: Segment,
    /// Longest Send, bytes. A value above 4096 must be the same at the peer.
    pub max_send: u32,
    /// When records are made.
    pub record: RecordMode,
    /// How long further datagrams of an incomplete message are accepted after its final datagram has arrived.
    pub grace: Duration,
    /// How long a message may go without a datagram that has new bytes before it is given up.
    pub deadline: Duration,
    /// The largest number of records that wait for the program, and of maps that it has not released, together.
    pub max_records: u32,
    /// Whether each record also makes a completion in the receive completion queue.
    pub records_complete: bool,
    /// How many times the final datagram of a Write-Record is repeated.
    pub repeats: u8,
    /// A parity datagram is sent after each group of this number of datagrams of a Write-Record. It restores one lost
    /// datagram of its group. 0: no parity datagrams.
    pub parity: u8,
    /// How long the answer to a Read may take on an unreliable queue pair.
    pub read_timeout: Duration,
    /// The largest number of outstanding Reads and atomics, and, on an unreliable queue pair, of queued answers to each peer.
    pub max_reads: u16,
    /// The longest Read of a peer on an unreliable queue pair, bytes.
    pub max_read: u32,
    /// Whether a peer gets an error report when its message is refused.
    pub report_errors: bool,
    /// Reliable services: messages of a peer are delivered in the order in which it sent them.
    pub ordered: bool,
    /// Reliable services: how long a peer may be silent before operations with it fail.
    pub peer_timeout: Duration,
    /// Reliable services: the failure of one peer does not put the queue pair into the error state.
    pub keep_going: bool,
    /// Reliable services: Writes leave no record.
    pub plain_writes: bool,
    /// Datagrams that the queue pair itself has sent to a group are not delivered to it.
    pub blocks_own: bool,
    /// The UDP port, which must not be in use by another queue pair. 0: any port.
    pub port: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            one_sided: false,
            segment: Segment::Max,
            max_send: crate::bounds::UD_MTU,
            record: RecordMode::Robust,
            grace: Duration::from_millis(2),
            deadline: Duration::from_millis(100),
            max_records: 4096,
            records_complete: false,
            repeats: 0,
            parity: 0,
            read_timeout: Duration::from_millis(500),
            max_reads: 16,
            max_read: 1 << 20,
            report_errors: false,
            ordered: true,
            peer_timeout: Duration::from_secs(5),
            keep_going: false,
            plain_writes: false,
            blocks_own: false,
            port: 0,
        }
    }
}

/// The largest number of datagrams in the group of a parity datagram: the field of the shim has four bits.
pub const MAX_PARITY: u8 = 15;
