//! Signposts: the messages by which a peer finds the listener of an rdma_cm port.
//!
//! A port of rdma_cm is not a TCP or UDP port of the kernel. Its listener has a UDP socket, the *signpost*, which answers
//! with the TCP or UDP port on which the program listens. The signpost is bound to one of two UDP ports that are computed
//! from the rdma_cm port (`candidate_ports`). The answer has the length of the query, so a forged query causes no amplification. It
//! repeats the random number of the query, so only a host on the path can forge an answer.
//!
//! ```text
//!  0          4    5      6            8      10      12            20
//! +----------+----+------+------------+------+-------+-------------+
//! |  "aWsp"  |1 kd|status| port space | port | place |    nonce    |
//! +----------+----+------+------------+------+-------+-------------+
//!       kd: 1 query, 2 release, 3 answer; status and place (the port of the listener) are 0 except in an answer
//! ```

/// Bytes of each message.
pub const LEN: usize = 20;
const MAGIC: [u8; 4] = *b"aWsp";
const VERSION: u8 = 1;
/// The first port that needs no privilege. The signposts of privileged ports are bound to privileged ports too.
pub const UNPRIVILEGED: u16 = 1024;
/// The ports for signposts of unprivileged ports, first and count: above the ephemeral ports of Linux, up to the last port.
const HIGH: (u16, u32) = (61_000, 4536);
/// The ports for signposts of privileged ports, first and count. The range lies in that from which `bindresvport(3)` selects
/// ports for privileged programs.
const LOW: (u16, u32) = (600, 400);

/// A port of rdma_cm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Port {
    /// The port space, a value of `enum rdma_port_space`.
    pub space: u16,
    /// The number of the port.
    pub number: u16,
}

impl Port {
    /// The two UDP ports to one of which the signpost is bound. Neighbouring rdma_cm ports have different ones.
    #[must_use]
    pub fn candidate_ports(self) -> [u16; 2] {
        let (first, count) = if self.number < UNPRIVILEGED {
            LOW
        } else {
            HIGH
        };
        let (space, number) = (u32::from(self.space), u32::from(self.number));
        // With the factors 97 and 61, ports of one number in two spaces of `enum rdma_port_space` have different candidates too.
        let one = number + space * 97;
        let two = number * 7 + number / count * 331 + space * 61 + count / 2;
        [one, two].map(|n| first + u16::try_from(n % count).unwrap_or(0))
    }
}

/// The content of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The port's listener has this TCP or UDP port.
    Listening(u16),
    /// The port is bound, and its program does not listen yet.
    Bound,
    /// This is the signpost of another port. In the answer to a [`Message::Release`], it can also mean that no port was released.
    Other,
    /// The process no longer listens on the TCP port with the same number: it has left that port now or before.
    Released,
}

/// A message to or from a signpost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Queries the port of a listener.
    Ask(Port, u64),
    /// Requests that the listener moves away from the TCP port with the same number, because a plain socket on the same host
    /// needs it.
    Release(Port, u64),
    /// The answer to either of them.
    Answer(Port, u64, Status),
}

impl Message {
    /// Parses a message; `None` for other bytes.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; LEN] = bytes.try_into().ok()?;
        let [
            m0,
            m1,
            m2,
            m3,
            kind,
            status,
            s0,
            s1,
            p0,
            p1,
            at0,
            at1,
            nonce @ ..,
        ] = *bytes;
        if [m0, m1, m2, m3] != MAGIC || kind >> 4 != VERSION {
            return None;
        }
        let port = Port {
            space: u16::from_be_bytes([s0, s1]),
            number: u16::from_be_bytes([p0, p1]),
        };
        let at = u16::from_be_bytes([at0, at1]);
        let nonce = u64::from_be_bytes(nonce);
        match (kind & 0x0f, status, at) {
            (1, 0, 0) => Some(Self::Ask(port, nonce)),
            (2, 0, 0) => Some(Self::Release(port, nonce)),
            // A listener has no port 0. The signpost of an unprivileged port must not direct a peer to a privileged port.
            (3, 0, at) if at != 0 && (at >= UNPRIVILEGED || port.number < UNPRIVILEGED) => {
                Some(Self::Answer(port, nonce, Status::Listening(at)))
            }
            (3, 1, 0) => Some(Self::Answer(port, nonce, Status::Bound)),
            (3, 2, 0) => Some(Self::Answer(port, nonce, Status::Other)),
            (3, 3, 0) => Some(Self::Answer(port, nonce, Status::Released)),
            _ => None,
        }
    }

    /// The message in wire format.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let (kind, port, nonce, status, at) = match *self {
            Self::Ask(port, nonce) => (1, port, nonce, 0, 0),
            Self::Release(port, nonce) => (2, port, nonce, 0, 0),
            Self::Answer(port, nonce, Status::Listening(at)) => (3, port, nonce, 0, at),
            Self::Answer(port, nonce, Status::Bound) => (3, port, nonce, 1, 0),
            Self::Answer(port, nonce, Status::Other) => (3, port, nonce, 2, 0),
            Self::Answer(port, nonce, Status::Released) => (3, port, nonce, 3, 0),
        };
        let [m0, m1, m2, m3] = MAGIC;
        let [s0, s1] = port.space.to_be_bytes();
        let [p0, p1] = port.number.to_be_bytes();
        let [at0, at1] = u16::to_be_bytes(at);
        let [n0, n1, n2, n3, n4, n5, n6, n7] = nonce.to_be_bytes();
        [
            m0,
            m1,
            m2,
            m3,
            VERSION << 4 | kind,
            status,
            s0,
            s1,
            p0,
            p1,
            at0,
            at1,
            n0,
            n1,
            n2,
            n3,
            n4,
            n5,
            n6,
            n7,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Port = Port {
        space: 0x0106,
        number: 7471,
    };

    #[test]
    fn messages_survive_the_wire() {
        for message in [
            Message::Ask(PORT, 1),
            Message::Release(PORT, u64::MAX),
            Message::Answer(PORT, 7, Status::Listening(40_000)),
            Message::Answer(PORT, 7, Status::Bound),
            Message::Answer(PORT, 7, Status::Other),
            Message::Answer(PORT, 7, Status::Released),
        ] {
            assert_eq!(Message::parse(&message.emit()), Some(message));
        }
        let bytes = Message::Ask(PORT, 0x0102_0304_0506_0708).emit();
        assert_eq!(
            bytes,
            [
                b'a', b'W', b's', b'p', 0x11, 0, 1, 6, 0x1d, 0x2f, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8
            ]
        );
    }

    #[test]
    fn other_bytes_are_refused() {
        let good = Message::Answer(PORT, 7, Status::Listening(40_000)).emit();
        assert_eq!(Message::parse(&good[1..]), None);
        assert_eq!(Message::parse(&[&good[..], &[0]].concat()), None);
        for (at, value) in [(0, 0), (4, 0x23), (4, 0x10), (4, 0x14), (5, 4), (5, 1)] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(Message::parse(&bad), None, "byte {at} = {value}");
        }
    }

    /// An unprivileged program cannot direct a peer to a privileged port. The signpost of a privileged port may name any port.
    #[test]
    fn an_unprivileged_listener_cannot_answer_for_a_privileged_port() {
        let answer = |number, at| {
            let port = Port { number, ..PORT };
            Message::parse(&Message::Answer(port, 7, Status::Listening(at)).emit())
        };
        assert_eq!(answer(7471, 25), None);
        assert_eq!(answer(7471, 0), None);
        assert!(answer(25, 26).is_some());
        assert!(answer(25, 40_000).is_some());
    }

    /// The values in docs/ports.md, which other ends compute too.
    #[test]
    fn candidate_ports_are_those_of_the_document() {
        for (space, number, candidates) in [
            (0x0106, 7471, [62_133, 63_838]),
            (0x0111, 7471, [63_200, 64_509]),
            (0x0106, 111, [925, 759]),
        ] {
            assert_eq!(Port { space, number }.candidate_ports(), candidates);
        }
    }

    #[test]
    fn candidate_ports_are_in_their_range_and_differ_for_neighbors() {
        for space in [0x0002, 0x0106, 0x0111, 0x013f] {
            for number in 1..=u16::MAX {
                let [one, two] = Port { space, number }.candidate_ports();
                let low = number < UNPRIVILEGED;
                for candidate in [one, two] {
                    let range = if low { 600..=999 } else { 61_000..=65_535 };
                    assert!(range.contains(&candidate), "{number}: {candidate}");
                }
                let next = number.wrapping_add(1).max(1);
                if (next < UNPRIVILEGED) == low {
                    let [after, _] = Port {
                        space,
                        number: next,
                    }
                    .candidate_ports();
                    assert_ne!(one, after);
                }
            }
        }
    }
}
