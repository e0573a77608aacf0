//! Reliable datagrams of one UDP socket: a queue pair of datagram-iWARP (RD) without input and output.
//!
//! Each datagram of the program is one Send to queue pair 0 of the peer's port, with the Q_Key [`message::KEY`]. The queue pair
//! numbers, acknowledges and repeats packets; the caller moves packets between it and the socket.

use crate::limits;
use crate::message;
use anywarp_core::datagram::options::{Options, Segment};
use anywarp_core::datagram::{
    Arrival, Counters, DatagramQp, Dropped, Kind, PathMtu, TxDatagram, grh,
};
use anywarp_core::lock::Mutex;
use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::mr::{Memory, Pinned, Region, Regions, Registration};
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rnic::Rnic;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::Status;
use anywarp_core::verbs::wr::{
    Destination, InlineData, Payload, RecvRequest, Sge, Sges, WorkRequest,
};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// The first byte of a packet.
const FIRST: u8 = 0xde;
/// The number of the protection domain. There is only one.
const PD: u32 = 1;
/// The longest payload of a datagram, in bytes: that of UDP over IPv4.
pub const LONGEST: usize = 65_507;
/// The size of the address range of a receive. It has room for the route header and the longest payload.
const STRIDE: u64 = 1 << 17;

/// The buffers of the receives. Buffer `n` has the addresses from `n * STRIDE` on. It grows with the bytes that are placed in it.
#[derive(Debug, Clone)]
struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(vec![Vec::new(); limits::RECEIVES])))
    }

    fn take(&self, n: u64) -> Vec<u8> {
        let mut all = self.0.lock();
        usize::try_from(n)
            .ok()
            .and_then(|n| all.get_mut(n))
            .map_or_else(Vec::new, std::mem::take)
    }
}

impl Memory for Buffers {
    fn place(&self, to: &Pinned<'_>, offset: u64, bytes: &[u8]) {
        let at = to.start() + offset;
        let mut all = self.0.lock();
        let (Ok(n), Ok(from)) = (usize::try_from(at / STRIDE), usize::try_from(at % STRIDE)) else {
            return;
        };
        if let Some(buffer) = all.get_mut(n) {
            let end = from + bytes.len();
            if buffer.len() < end {
                buffer.resize(end, 0);
            }
            if let Some(place) = buffer.get_mut(from..end) {
                place.copy_from_slice(bytes);
            }
        }
    }

    // The payload of each Send is in its request, and peers may not name memory.
    fn gather(&self, _: &Pinned<'_>, _: u64, _: u64, _: &mut Vec<u8>) {}

    fn update(&self, _: &Pinned<'_>, _: &mut dyn FnMut(u64) -> u64) -> u64 {
        0
    }
}

/// A datagram for the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivered {
    /// Its source.
    pub from: SocketAddr,
    /// The route header and the payload.
    bytes: Vec<u8>,
}

impl Delivered {
    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        self.bytes.get(grh::LEN..).unwrap_or(&[])
    }
}

/// The numbers of sent datagrams by their outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Datagrams that their peers have delivered.
    pub delivered: usize,
    /// Datagrams that were given up, because the peer did not answer or refused them.
    pub failed: usize,
}

/// A datagram that was sent and whose outcome is not known.
#[derive(Debug)]
struct Pending {
    to: SocketAddr,
    from: Option<IpAddr>,
    payload: InlineData,
    since: Duration,
    /// It was sent before, and failed.
    is_second: bool,
}

/// The queue pair.
#[derive(Debug)]
pub struct Reliable {
    qp: DatagramQp,
    region: Arc<Region>,
    buffers: Buffers,
    sends: Arc<Cq>,
    receives: Arc<Cq>,
    /// The datagrams that were sent and whose outcome is not known, oldest first.
    pending: VecDeque<Pending>,
    /// The sum of the payload lengths of `pending`.
    bytes: usize,
    now: Duration,
    /// Receives that are not posted, because the program has not read enough.
    spare: Vec<u64>,
}

impl Reliable {
    /// Returns a queue pair. `random` returns bits that peers cannot guess.
    pub fn new(paths: PathMtu, random: impl Fn() -> u64) -> Option<Self> {
        let buffers = Buffers::new();
        let rnic = Arc::new(Rnic {
            regions: Regions::new(),
            memory: Box::new(buffers.clone()),
            observer: None,
        });
        let what = Registration {
            start: 0,
            len: STRIDE * limits::RECEIVES as u64,
            base: 0,
            access: Access::LOCAL_WRITE,
            pd: PD,
            present: None,
        };
        let region = rnic.regions.register(&what, &mut || random() as u32).ok()?;
        let sends = Arc::new(Cq::new(limits::SENDS, None));
        let receives = Arc::new(Cq::new(limits::RECEIVES, None));
        let parts = Parts {
            rnic,
            // Queue pair 0: the low eight bits are the index. The port in the other bits is not used here.
            qpn: 1 << 8,
            pd: PD,
            send_cq: Arc::clone(&sends),
            recv_cq: Arc::clone(&receives),
            rq: RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: limits::RECEIVES as u32,
                max_sge: 1,
            },
            capacity: Capacity {
                max_send_wr: limits::SENDS as u32,
                max_recv_wr: limits::RECEIVES as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: LONGEST as u32,
            },
            sig_all: true,
        };
        let options = Options {
            // A lost fragment of IP would lose the whole datagram.
            segment: Segment::PathMtu,
            max_send: LONGEST as u32,
            keep_going: true,
            ..Options::default()
        };
        let mut qp = DatagramQp::new(parts, Kind::Rd, options, [random(), random()]);
        qp.set_paths(paths);
        qp.attr_mut().qkey = message::KEY;
        // A peer that does not read makes the sender wait, and does not lose datagrams.
        qp.attr_mut().rnr_retry = 7;
        qp.set_state(State::Rts);
        let mut it = Self {
            qp,
            region,
            buffers,
            sends,
            receives,
            pending: VecDeque::new(),
            bytes: 0,
            now: Duration::ZERO,
            spare: (0..limits::RECEIVES as u64).collect(),
        };
        it.accept();
        Some(it)
    }

    /// Sets the time since a fixed moment. To be called before other methods.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
        self.qp.set_now(now);
    }

    /// Tells peers how many bytes the socket's receive buffer has, as the kernel counts them.
    pub fn set_room(&mut self, room: u32) {
        self.qp.set_room(room);
    }

    /// Returns whether another datagram may be sent now.
    pub fn has_room(&self) -> bool {
        self.pending.len() < limits::SENDS && self.bytes < limits::SEND_BYTES
    }

    /// Returns whether there are datagrams whose outcome is not known.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Sends a datagram. `from`: the local address to send it from, if the program chose one. Returns false if that is not
    /// possible.
    pub fn send(&mut self, to: SocketAddr, from: Option<IpAddr>, payload: &[u8]) -> bool {
        self.post(Pending {
            to,
            from,
            payload: InlineData::from_slice(payload),
            since: self.now,
            is_second: false,
        })
    }

    fn post(&mut self, datagram: Pending) -> bool {
        let sent = self.qp.post_send(WorkRequest {
            payload: Payload::Inline(datagram.payload.clone()),
            signaled: true,
            destination: Some(Destination {
                addr: datagram.to,
                source: datagram.from,
                qpn: u32::from(datagram.to.port()) << 8,
                qkey: message::KEY,
                hop_limit: 0,
                traffic_class: 0,
            }),
            ..WorkRequest::blank()
        });
        if sent.is_ok() {
            self.bytes += datagram.payload.len();
            self.pending.push_back(datagram);
        }
        sent.is_ok()
    }

    /// Handles a datagram from the socket. Returns false if it is not a packet of reliable datagrams.
    pub fn handle(&mut self, arrival: &Arrival, bytes: &[u8]) -> bool {
        if bytes.first() != Some(&FIRST) {
            return false;
        }
        !matches!(self.qp.handle_rx(arrival, bytes), Err(Dropped::Wire(_)))
    }

    /// Handles the deadlines that have passed.
    pub fn handle_timeout(&mut self) {
        self.qp.handle_timeout();
    }

    /// Returns when [`Self::handle_timeout`] is to be called.
    pub fn timeout(&self) -> Option<Duration> {
        self.qp.poll_timeout()
    }

    /// Sends the acknowledgements that would otherwise wait until another packet carries them.
    pub fn acknowledge(&mut self) {
        if self.qp.ack_due() {
            self.qp.flush();
        }
    }

    /// Appends the packets to send to the list `out`. The caller reports each of them, in this order, by [`Self::written`] or
    /// [`Self::refused`].
    pub fn packets(&mut self, out: &mut Vec<TxDatagram>) {
        if self.qp.wants_tx() {
            self.qp.poll_tx(out);
        }
    }

    /// Reports that the socket accepted these packets.
    pub fn written(&mut self, packets: impl Iterator<Item = TxDatagram>) {
        for packet in packets {
            self.qp.handle_written(1);
            self.qp.recycle(packet);
        }
    }

    /// Reports that the socket refused a packet.
    pub fn refused(&mut self) {
        self.qp.handle_send_error();
    }

    /// Takes the datagrams that have arrived.
    pub fn delivered(&mut self, mut each: impl FnMut(Delivered)) {
        let mut all = Vec::new();
        self.receives
            .poll(limits::RECEIVES, |_, c| all.push(c.clone()));
        for c in all {
            let mut bytes = self.buffers.take(c.wr_id);
            self.spare.push(c.wr_id);
            bytes.truncate(c.byte_len as usize);
            if c.status == Status::Success
                && let Some(ip) = source(&bytes)
            {
                let port = (c.src_qpn >> 8) as u16;
                let from = SocketAddr::new(ip, port);
                each(Delivered { from, bytes });
            }
        }
    }

    /// Accepts further datagrams: posts the receives that are not posted. Packets that have waited for them are
    /// delivered. Returns whether any was posted.
    pub fn accept(&mut self) -> bool {
        let mut any = false;
        while let Some(id) = self.spare.pop() {
            let mut sges = Sges::new();
            sges.push(Sge {
                addr: id * STRIDE,
                len: (grh::LEN + LONGEST) as u32,
                lkey: self.region.stag(),
            });
            if self.qp.post_recv(RecvRequest { id, sges }).is_err() {
                self.spare.push(id);
                break;
            }
            any = true;
        }
        any
    }

    /// Returns how many datagrams were delivered and how many failed since the last call.
    ///
    /// If a datagram fails soon after it was sent, the usual reason is that it was on the way when its peer restarted, or when another
    /// socket took the peer's port. It is sent once more, to the socket that has the port now.
    pub fn done(&mut self) -> Done {
        let mut done = Done::default();
        let mut all = Vec::new();
        self.sends.poll(limits::SENDS, |_, c| all.push(c.status));
        let mut again = Vec::new();
        for status in all {
            let Some(datagram) = self.pending.pop_front() else {
                break;
            };
            self.bytes -= datagram.payload.len();
            let is_early = self.now.saturating_sub(datagram.since) < limits::RESTART;
            if status == Status::Success {
                done.delivered += 1;
            } else if is_early && !datagram.is_second {
                again.push(Pending {
                    is_second: true,
                    ..datagram
                });
            } else {
                done.failed += 1;
            }
        }
        for datagram in again {
            done.failed += usize::from(!self.post(datagram));
        }
        done
    }

    /// Returns the counters of the queue pair.
    pub fn counters(&self) -> Counters {
        self.qp.counters()
    }
}

/// Returns the source address in a route header.
fn source(bytes: &[u8]) -> Option<IpAddr> {
    let header = bytes.first_chunk::<{ grh::LEN }>()?;
    if header.first()? >> 4 == 6 {
        let ip: [u8; 16] = header.get(8..24)?.try_into().ok()?;
        return Some(Ipv6Addr::from(ip).into());
    }
    let ip: [u8; 4] = header.get(32..36)?.try_into().ok()?;
    Some(Ipv4Addr::from(ip).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct End {
        rd: Reliable,
        addr: SocketAddr,
        got: Vec<Delivered>,
    }

    fn end(host: u8) -> End {
        let state = Cell::new(u64::from(host));
        let random = move || {
            state.set(
                state
                    .get()
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1),
            );
            state.get() >> 7
        };
        let addr = SocketAddr::from(([10, 0, 0, host], 700 + u16::from(host)));
        End {
            rd: Reliable::new(|_| 1472, random).unwrap(),
            addr,
            got: Vec::new(),
        }
    }

    /// Carries packets for a second of virtual time. One in `lost` packets is lost; 0: none.
    fn carry(ends: &mut [End; 2], now: &mut Duration, lost: u32, reads: bool) {
        let mut n = 0u32;
        for _ in 0..10_000 {
            *now += Duration::from_micros(100);
            let mut wire = Vec::new();
            for (i, end) in ends.iter_mut().enumerate() {
                end.rd.set_now(*now);
                if end.rd.timeout().is_some_and(|at| at <= *now) {
                    end.rd.handle_timeout();
                }
                end.rd.acknowledge();
                let mut out = Vec::new();
                end.rd.packets(&mut out);
                wire.extend(out.iter().map(|p| (i, p.to, p.bytes.to_vec())));
                end.rd.written(out.into_iter());
            }
            for (i, to, bytes) in wire {
                n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if lost > 0 && (n >> 16).is_multiple_of(lost) {
                    continue;
                }
                let from = ends[i].addr;
                let other = &mut ends[1 - i];
                assert_eq!(to, other.addr);
                let arrival = Arrival {
                    from,
                    to: Some(to.ip()),
                    hop_limit: 64,
                    traffic_class: 0,
                };
                assert!(other.rd.handle(&arrival, &bytes));
                let got = &mut other.got;
                other.rd.delivered(|d| got.push(d));
                // Accepting may deliver packets that have waited.
                while reads && other.rd.accept() {
                    other.rd.delivered(|d| got.push(d));
                }
            }
        }
    }

    fn numbered(n: usize) -> Vec<u8> {
        (0..[0, 1, 700, 5000][n % 4])
            .map(|i| (i + n) as u8)
            .collect()
    }

    #[test]
    fn every_datagram_arrives_once_in_order_whatever_is_lost() {
        let mut ends = [end(1), end(2)];
        let (a, b) = (ends[0].addr, ends[1].addr);
        let mut now = Duration::from_secs(1);
        for n in 0..200 {
            assert!(ends[0].rd.send(b, None, &numbered(n)));
            assert!(ends[1].rd.send(a, None, &numbered(n + 1)));
        }
        for _ in 0..5 {
            carry(&mut ends, &mut now, 5, true);
        }
        for (i, end) in ends.iter_mut().enumerate() {
            assert_eq!(
                end.rd.done(),
                Done {
                    delivered: 200,
                    failed: 0
                }
            );
            assert!(!end.rd.is_busy() && end.rd.bytes == 0);
            assert_eq!(end.got.len(), 200);
            for (n, d) in end.got.iter().enumerate() {
                assert_eq!(d.payload(), numbered(n + 1 - i), "datagram {n}");
                assert_eq!(d.from, [b, a][i]);
            }
        }
    }

    #[test]
    fn a_receiver_that_does_not_read_makes_the_sender_wait() {
        let mut ends = [end(1), end(2)];
        let to = ends[1].addr;
        let mut now = Duration::from_secs(1);
        while ends[0].rd.has_room() {
            assert!(ends[0].rd.send(to, None, b"hello"));
        }
        assert!(!ends[0].rd.send(to, None, b"one too many"));
        carry(&mut ends, &mut now, 0, false);
        assert_eq!(ends[1].got.len(), limits::RECEIVES);
        assert!(ends[0].rd.is_busy());
        carry(&mut ends, &mut now, 0, true);
        assert_eq!(ends[0].rd.done().delivered, limits::SENDS);
        assert_eq!(ends[1].got.len(), limits::SENDS);
    }

    #[test]
    fn a_peer_that_does_not_answer_is_given_up() {
        let mut ends = [end(1), end(2)];
        let to = ends[1].addr;
        let mut now = Duration::from_secs(1);
        assert!(ends[0].rd.send(to, None, b"hello"));
        for _ in 0..8 {
            carry(&mut ends, &mut now, 1, true);
        }
        assert_eq!(
            ends[0].rd.done(),
            Done {
                delivered: 0,
                failed: 1
            }
        );
        assert!(!ends[0].rd.is_busy());
    }

    #[test]
    fn a_restarted_peer_gets_what_was_under_way() {
        let mut ends = [end(1), end(2)];
        let to = ends[1].addr;
        let mut now = Duration::from_secs(1);
        assert!(ends[0].rd.send(to, None, b"hello"));
        carry(&mut ends, &mut now, 0, true);
        assert_eq!(ends[1].got.len(), 1);
        ends[1] = end(3);
        ends[1].addr = to;
        assert!(ends[0].rd.send(to, None, b"once more"));
        for _ in 0..3 {
            carry(&mut ends, &mut now, 0, true);
            ends[0].rd.done();
        }
        assert_eq!(ends[1].got.len(), 1);
        assert_eq!(ends[1].got[0].payload(), b"once more");
        assert!(!ends[0].rd.is_busy());
    }

    #[test]
    fn other_datagrams_are_not_taken() {
        let mut rd = end(1).rd;
        let arrival = Arrival {
            from: end(2).addr,
            to: None,
            hop_limit: 1,
            traffic_class: 0,
        };
        for bytes in [&b""[..], b"hello", &[FIRST], &[FIRST; 100], &[0xdc; 100]] {
            assert!(!rd.handle(&arrival, bytes));
        }
        let mut out = Vec::new();
        rd.packets(&mut out);
        assert!(out.is_empty());
    }
}
