//! What may be chosen when a datagram queue pair is made, beyond what verbs know.

use std::time::Duration;

/// How long the datagrams of a segmented message are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// As long as the path carries whole: one lost packet costs one datagram.
    PathMtu,
    /// As long as jumbo frames carry whole.
    Jumbo,
    /// As long as IP allows; IP cuts them, and one lost fragment costs the datagram (the thesis, section 5.4).
    Max,
    /// So many bytes of payload, a multiple of 8, if one datagram carries them.
    Bytes(u32),
}

/// When the record of a Write-Record that came in is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordMode {
    /// When its final datagram arrives, whatever else has. Without that one there is no record (the thesis, section 6.6.1).
    Thesis,
    /// When it is complete; or, with what has arrived, when it is clear that nothing more will come.
    Robust,
    /// For each datagram.
    Chunk,
}

/// Options of a datagram queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Writes and Reads are done, not only Sends.
    pub one_sided: bool,
    /// Length of datagrams.
    pub segment: Segment,
    /// Longest Send, bytes. Longer than one datagram only if both ends agree.
    pub max_send: u32,
    /// When records are made.
    pub record: RecordMode,
    /// How long datagrams may come behind the final one, or behind newer messages.
    pub grace: Duration,
    /// How long a message may go without a datagram before it is given up.
    pub deadline: Duration,
    /// Records that wait for the program.
    pub max_records: u32,
    /// A record makes an entry in the receive completion queue as well.
    pub records_complete: bool,
    /// How often the end of a Write-Record is repeated.
    pub repeats: u8,
    /// After so many datagrams of a Write-Record comes one that makes up for the loss of any of them; 0: none.
    pub parity: u8,
    /// How long the answer to a Read may take on an unreliable queue pair.
    pub read_timeout: Duration,
    /// Reads that may be outstanding, and answers that may wait to be sent.
    pub max_reads: u16,
    /// Most bytes that a peer may read at once.
    pub max_read: u32,
    /// The peer gets an error report when its message was refused.
    pub report_errors: bool,
    /// Reliable: messages of a peer are delivered in the order in which it sent them.
    pub ordered: bool,
    /// Reliable: how long a peer may be silent before it is given up.
    pub patience: Duration,
    /// Reliable: what fails towards one peer leaves the queue pair as it is.
    pub keep_going: bool,
    /// Reliable: Writes leave no record.
    pub plain_writes: bool,
    /// The UDP port, which the queue pair is then the first of; 0: any.
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
            patience: Duration::from_secs(5),
            keep_going: false,
            plain_writes: false,
            port: 0,
        }
    }
}

/// Largest number of datagrams that one parity datagram stands for: what the shim has room for.
pub const MAX_PARITY: u8 = 15;
