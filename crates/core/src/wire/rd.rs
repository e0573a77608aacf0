//! The packet of reliable datagrams (RD), which delivers a datagram exactly once.
//!
//! A packet contains a datagram of [`super::dgram`] without its CRC, since the packet has one. The header has the
//! fields of a transport protocol and none of DDP: number, acknowledgement, window, and two tokens. An end that returns
//! the token of its peer shows that it receives at its address and has not forgotten the peer.
//!
//! ```text
//!  0    1    2    3    4          8          12         16         20      22   23   24
//! +----+----+----+----+----------+----------+----------+----------+-------+----+----+
//! |0xDE|1 fl| n  |why |  token   |   echo   |   seq    |   base   |fl2| 0 |dst |src |
//! +----+----+----+----+----------+----------+----------+----------+-------+----+----+
//!  24         28         32         36         40
//! +----------+----------+----------+----------+----------------------------+
//! |   ack    |  window  |   time   | time echo|  n runs (start 4, end 4)   |
//! +----------+----------+----------+----------+----------------------------+
//!  then, if D: a datagram without its CRC; then CRC32C (4)
//!       fl:  D 0x1 data   C 0x2 challenge   R 0x4 not ready   A 0x8 acknowledge at once
//!       fl2: K 0x01 the field ack is valid, else it is the instance   S 0x02 acknowledge soon
//! ```

use super::dgram::DgramError;
use super::{put, take32};
use smallvec::SmallVec;

/// A run: consecutive numbers of packets that have arrived although an earlier packet is missing. The end is exclusive.
pub type Run = (u32, u32);

/// The runs of one packet. The inline space has room for only two, because it is copied with each [`Packet`], and most packets have none.
pub type Runs = SmallVec<[Run; 2]>;

/// The header of a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packet {
    /// The token that the receiver has to echo, to prove that it receives at its address.
    pub token: u32,
    /// The receiver's token as the sender knows it; 0: unknown.
    pub echo: u32,
    /// Number of this packet if it has data, otherwise of the next packet with data.
    pub seq: u32,
    /// The first packet that the sender may still retransmit.
    pub base: u32,
    /// Index of the destination queue pair on its port.
    pub dst_index: u8,
    /// Index of the source queue pair on its port.
    pub src_index: u8,
    /// All packets before this number are delivered. `None`: no packet has arrived yet.
    pub ack: Option<u32>,
    /// Random number of the sending queue pair, sent instead of `ack` if that is `None`. It stays the same if the
    /// sender only forgot the receiver; a new queue pair on the port has a different one. 0: unknown.
    pub instance: u32,
    /// Bytes that the sender of this packet accepts beyond `ack`, counted as the kernel counts memory of sockets.
    pub window: u32,
    /// Time of the sender in microseconds, or a random number that the receiver has to return as a proof of its address.
    pub time: u32,
    /// The time of the packet that this one answers, 0 for none.
    pub time_echo: u32,
    /// Packets from `ack` on that have arrived.
    pub arrived: Runs,
    /// C: the sender does not know the receiver yet, which has to echo the token first.
    pub challenge: bool,
    /// R: packets that have arrived wait for a receive, or for another resource.
    pub not_ready: bool,
    /// A: requests an acknowledgement at once.
    pub ack_now: bool,
    /// S: requests an acknowledgement that may wait a little for a packet to travel with.
    pub ack_soon: bool,
    /// The status with which packet `ack` is refused, as a work completion status; 0: it is not refused.
    pub refused: u8,
}

/// Largest number of runs in one packet.
pub const RUNS: usize = 16;

impl Packet {
    /// Length of the header without runs.
    pub const LEN: usize = 40;

    /// Appends the header; `data` is true if a datagram follows.
    pub fn put(&self, data: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head(data));
        for (start, end) in self.arrived.iter().take(RUNS) {
            out.extend_from_slice(&start.to_be_bytes());
            out.extend_from_slice(&end.to_be_bytes());
        }
    }

    /// The header without runs.
    pub fn head(&self, data: bool) -> [u8; Self::LEN] {
        let mut flags = VERSION << 4;
        for (set, flag) in [
            (data, DATA),
            (self.challenge, CHALLENGE),
            (self.not_ready, NOT_READY),
            (self.ack_now, ACK_NOW),
        ] {
            if set {
                flags |= flag;
            }
        }
        let runs = self.arrived.len().min(RUNS);
        let mut head = [0; Self::LEN];
        let first = [MAGIC, flags, runs as u8, self.refused];
        put::<0, { Self::LEN }, 4>(&mut head, first);
        put::<4, { Self::LEN }, 4>(&mut head, self.token.to_be_bytes());
        put::<8, { Self::LEN }, 4>(&mut head, self.echo.to_be_bytes());
        put::<12, { Self::LEN }, 4>(&mut head, self.seq.to_be_bytes());
        put::<16, { Self::LEN }, 4>(&mut head, self.base.to_be_bytes());
        let more = if self.ack.is_some() { ACK_COUNTS } else { 0 }
            | if self.ack_soon { ACK_SOON } else { 0 };
        let small = [more, 0, self.dst_index, self.src_index];
        put::<20, { Self::LEN }, 4>(&mut head, small);
        put::<24, { Self::LEN }, 4>(&mut head, self.ack.unwrap_or(self.instance).to_be_bytes());
        put::<28, { Self::LEN }, 4>(&mut head, self.window.to_be_bytes());
        put::<32, { Self::LEN }, 4>(&mut head, self.time.to_be_bytes());
        put::<36, { Self::LEN }, 4>(&mut head, self.time_echo.to_be_bytes());
        head
    }
}

/// Parses a packet: its header, and the datagram in it (which has no CRC).
///
/// # Errors
/// The first rule that the packet breaks. The caller drops the packet.
pub fn parse(bytes: &[u8]) -> Result<(Packet, Option<&[u8]>), DgramError> {
    let bytes = super::dgram::checked(bytes)?;
    let Some((head, mut rest)) = bytes.split_first_chunk::<{ Packet::LEN }>() else {
        return Err(DgramError::TooShort);
    };
    let [magic, flags, runs, refused, ..] = *head;
    if magic != MAGIC {
        return Err(DgramError::Magic);
    }
    if flags >> 4 != VERSION {
        return Err(DgramError::Version);
    }
    if usize::from(runs) > RUNS {
        return Err(DgramError::Length);
    }
    let mut arrived = Runs::new();
    for _ in 0..runs {
        let Some((run, behind)) = rest.split_first_chunk::<8>() else {
            return Err(DgramError::TooShort);
        };
        arrived.push((take32::<0, 8>(run), take32::<4, 8>(run)));
        rest = behind;
    }
    let [more, _, dst_index, src_index] = super::take::<20, { Packet::LEN }, 4>(head);
    let data = flags & DATA != 0;
    if !data && !rest.is_empty() {
        return Err(DgramError::Length);
    }
    let packet = Packet {
        token: take32::<4, { Packet::LEN }>(head),
        echo: take32::<8, { Packet::LEN }>(head),
        seq: take32::<12, { Packet::LEN }>(head),
        base: take32::<16, { Packet::LEN }>(head),
        dst_index,
        src_index,
        ack: (more & ACK_COUNTS != 0).then(|| take32::<24, { Packet::LEN }>(head)),
        instance: if more & ACK_COUNTS == 0 {
            take32::<24, { Packet::LEN }>(head)
        } else {
            0
        },
        window: take32::<28, { Packet::LEN }>(head),
        time: take32::<32, { Packet::LEN }>(head),
        time_echo: take32::<36, { Packet::LEN }>(head),
        arrived,
        challenge: flags & CHALLENGE != 0,
        not_ready: flags & NOT_READY != 0,
        ack_now: flags & ACK_NOW != 0,
        ack_soon: more & ACK_SOON != 0,
        refused,
    };
    // 0 means "none", and is not a valid token.
    if packet.token == 0 {
        return Err(DgramError::Epoch);
    }
    Ok((packet, data.then_some(rest)))
}

/// Whether the bytes are a packet, and not a datagram outside a packet. Only the first byte is checked.
pub fn is_packet(bytes: &[u8]) -> bool {
    bytes.first() == Some(&MAGIC)
}

const MAGIC: u8 = 0xde;
const VERSION: u8 = 1;
const DATA: u8 = 0x1;
const CHALLENGE: u8 = 0x2;
const NOT_READY: u8 = 0x4;
const ACK_NOW: u8 = 0x8;
const ACK_COUNTS: u8 = 0x1;
const ACK_SOON: u8 = 0x2;

#[cfg(test)]
mod tests {
    use super::super::dgram::seal;
    use super::*;

    fn packet() -> Packet {
        Packet {
            token: 0x0102_0304,
            echo: 0x0506_0708,
            seq: 9,
            base: 7,
            dst_index: 3,
            src_index: 7,
            ack: Some(11),
            instance: 0,
            window: 0x0010_0000,
            time: 0x1000,
            time_echo: 0x0fff,
            arrived: SmallVec::from_slice(&[(13, 15)]),
            challenge: false,
            not_ready: false,
            ack_now: true,
            ack_soon: false,
            refused: 0,
        }
    }

    fn whole(packet: &Packet, data: Option<&[u8]>) -> Vec<u8> {
        let mut bytes = Vec::new();
        packet.put(data.is_some(), &mut bytes);
        bytes.extend(data.unwrap_or(&[]));
        seal(&mut bytes);
        bytes
    }

    #[test]
    fn a_packet_survives_the_wire() {
        let cases = [
            packet(),
            Packet {
                challenge: true,
                not_ready: true,
                ack_now: false,
                ack_soon: true,
                refused: 10,
                ack: None,
                instance: 0x1122_3344,
                arrived: SmallVec::new(),
                ..packet()
            },
        ];
        for p in cases {
            let with = whole(&p, Some(b"data"));
            assert_eq!(parse(&with), Ok((p.clone(), Some(&b"data"[..]))));
            assert!(is_packet(&with));
            let without = whole(&p, None);
            assert_eq!(parse(&without), Ok((p, None)));
            for bit in 0..with.len() * 8 {
                let mut bad = with.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(parse(&bad), Err(DgramError::Crc));
            }
        }
    }

    #[test]
    fn a_packet_shorter_than_its_headers_is_dropped_even_with_a_correct_crc() {
        let good = whole(&packet(), None);
        for len in 0..good.len() - 4 {
            let mut bytes = good[..len].to_vec();
            seal(&mut bytes);
            assert_eq!(parse(&bytes), Err(DgramError::TooShort), "{len} bytes");
        }
        let refuse = |change: fn(&mut Vec<u8>)| {
            let mut bytes = good[..good.len() - 4].to_vec();
            change(&mut bytes);
            seal(&mut bytes);
            parse(&bytes).err()
        };
        assert_eq!(refuse(|b| b[0] = 0xdc), Some(DgramError::Magic));
        assert_eq!(refuse(|b| b[1] = 0x28), Some(DgramError::Version));
        assert_eq!(refuse(|b| b[2] = 17), Some(DgramError::Length));
        assert_eq!(refuse(|b| b.push(0)), Some(DgramError::Length));
        assert_eq!(refuse(|b| b[4..8].fill(0)), Some(DgramError::Epoch));
    }
}
