//! Datagrams of arbitrary peers to a queue pair of each kind: UD, UD with one-sided operations, UC, RD.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anywarp_core::datagram::options::{Options, RecordMode, Segment};
use anywarp_core::datagram::{self, Arrival, DatagramQp, Kind};
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::WcOp;
use anywarp_core::verbs::wr::{Destination, RecvRequest};
use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::dgram::{self, Cm, Shim};
use anywarp_core::wire::rd::{self, Packet};
use anywarp_core::wire::rdmap::{AtomicRequest, Opcode, ReadRequest};
use anywarp_core::wire::{Msn, Stag, To};

use crate::end::{Host, is_all};
use crate::{Mr, World, access, fetch_add, read, send, write};

use smallvec::SmallVec;

use super::input::Input;

const QKEY: u32 = 0x1111_1111;
const QPN: u32 = 4000 << 8 | 5;

struct Receiver {
    qp: DatagramQp,
    host: Host,
    cq: Arc<Cq>,
    inbox: Mr,
    writable: Mr,
    closed: Mr,
    readable: Mr,
    /// The newest cookie that was sent to a reader.
    cookie: u64,
    recvs: u64,
    sends: u64,
    delivered: Vec<u64>,
    now: Duration,
    /// The tokens that peers have to echo.
    tokens: [u32; 3],
    /// The number of the next packet of each peer.
    next: u32,
}

impl Receiver {
    fn new(kind: Kind, options: Options) -> Self {
        let host = World::new(1).host();
        let cq = Arc::new(Cq::new(512, None));
        let mut qp = DatagramQp::new(
            Parts {
                rnic: Arc::clone(&host.rnic),
                qpn: QPN,
                pd: host.pd,
                send_cq: Arc::clone(&cq),
                recv_cq: Arc::clone(&cq),
                rq: RecvQueue::Own {
                    requests: VecDeque::new(),
                    max_wr: 64,
                    max_sge: 4,
                },
                capacity: Capacity {
                    max_send_wr: 64,
                    max_recv_wr: 64,
                    max_send_sge: 4,
                    max_recv_sge: 4,
                    max_inline: 64,
                },
                sig_all: true,
            },
            kind,
            options,
            [77, 78],
        );
        let attr = qp.attr_mut();
        attr.qkey = QKEY;
        attr.access = access::ALL;
        qp.set_state(State::Rts);
        if kind == Kind::Uc {
            qp.set_peer(destination(0));
        }
        Self {
            qp,
            inbox: host.register(20_000, access::LOCAL),
            writable: host.register(70_000, access::WRITE),
            closed: host.register(4096, access::LOCAL),
            readable: host.register(4096, access::ALL),
            cookie: 0,
            host,
            cq,
            recvs: 0,
            sends: 0,
            delivered: Vec::new(),
            now: Duration::from_secs(1),
            tokens: [0; 3],
            next: 1000,
        }
    }

    /// Establishes the peers of a reliable queue pair, with their tokens.
    fn meet(&mut self) {
        self.qp.set_now(self.now);
        for peer in 0..3 {
            let hello = Packet {
                seq: self.next,
                base: self.next,
                ..transport()
            };
            let arrival = Arrival {
                from: source(peer),
                to: Some(IpAddr::from([10, 0, 0, 9])),
                hop_limit: 9,
                traffic_class: 0,
            };
            let _ = self.qp.handle_rx(&arrival, &sealed(&hello, None));
            let mut out = Vec::new();
            self.qp.poll_tx(&mut out);
            self.qp.handle_written(out.len());
            for datagram in out {
                if let Ok((answer, _)) = rd::parse(&datagram.bytes) {
                    assert!(answer.challenge);
                    self.tokens[peer] = answer.token;
                }
            }
        }
    }

    fn recv(&mut self, input: &mut Input<'_>) {
        let len = input.one_of(&[20_000, 4_136, 41, 8]);
        let request = RecvRequest {
            id: self.recvs,
            sges: [self.inbox.part(0, len)].into_iter().collect(),
        };
        if self.qp.post_recv(request).is_ok() {
            self.recvs += 1;
        }
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let mut request = send(1_000 + self.sends);
        request.destination = Some(destination(input.below(3)));
        let len = input.one_of(&[0, 8, 4_096, 9_000]);
        request.op = match input.byte() {
            0..160 => request.op,
            160..200 => write(0, self.writable.remote(0)).op,
            200..230 => read(0, self.writable.remote(0)).op,
            _ => fetch_add(0, self.writable.remote(0), 1).op,
        };
        request.payload = anywarp_core::verbs::wr::Payload::Sges(
            [self.writable.part(0, len)].into_iter().collect(),
        );
        if self.qp.post_send(request).is_ok() {
            self.sends += 1;
        }
        let mut out = Vec::new();
        self.qp.poll_tx(&mut out);
        for sent in &out {
            if let Ok(d) = dgram::parse(&sent.bytes)
                && let Header::Untagged(h) = &d.header
                && Control::parse(h) == Ok(Control::Cookie)
                && let Some(cookie) = d.payload.first_chunk()
            {
                self.cookie = u64::from_be_bytes(*cookie);
            }
        }
        if input.byte() < 200 {
            self.qp.handle_written(out.len());
        } else {
            for _ in 0..out.len() {
                self.qp.handle_send_error();
            }
        }
    }

    fn collect(&mut self) {
        let seen = &mut self.delivered;
        self.cq.poll(usize::MAX, |_, entry| {
            // A record belongs to no request.
            if entry.op != WcOp::Record {
                seen.push(entry.wr_id);
            }
        });
        while self.qp.poll_event().is_some() {}
    }

    fn check(mut self) {
        assert!(is_all(&self.host.bytes(&self.closed), 0));
        let all = [&self.inbox, &self.writable, &self.closed, &self.readable];
        self.host.check_guards(&all);
        let state = format!("{:?}", self.qp).len();
        assert!(state < 1 << 18, "{state} bytes of state");
        self.qp.set_state(State::Error);
        // Each request has completed before, or is flushed now.
        self.collect();
        let (mut recvs, mut sends): (Vec<u64>, Vec<u64>) =
            self.delivered.iter().partition(|id| **id < 1_000);
        recvs.sort_unstable();
        sends.sort_unstable();
        assert_eq!(recvs, (0..self.recvs).collect::<Vec<_>>());
        assert_eq!(sends, (1_000..1_000 + self.sends).collect::<Vec<_>>());
    }
}

fn destination(peer: usize) -> Destination {
    Destination {
        addr: source(peer),
        source: None,
        qpn: u32::from(source(peer).port()) << 8 | 3,
        qkey: QKEY,
        hop_limit: 0,
        traffic_class: 0,
    }
}

fn source(peer: usize) -> SocketAddr {
    let (host, port) = [(1, 4_001), (1, 4_002), (2, 4_001)][peer % 3];
    SocketAddr::new(IpAddr::from([10, 0, 0, host]), port)
}

/// Chooses a kind of queue pair and its options.
fn chosen(input: &mut Input<'_>) -> (Kind, Options) {
    let one_sided = Options {
        one_sided: true,
        segment: Segment::PathMtu,
        max_send: 70_000,
        record: input.one_of(&[RecordMode::Robust, RecordMode::Thesis, RecordMode::Chunk]),
        max_records: 20,
        records_complete: input.byte() < 64,
        repeats: input.byte() % 3,
        parity: input.byte() % 5,
        report_errors: input.byte() < 128,
        ordered: input.byte() < 128,
        keep_going: input.byte() < 128,
        plain_writes: input.byte() < 64,
        ..Options::default()
    };
    match input.byte() % 4 {
        0 => (Kind::Ud, Options::default()),
        1 => (Kind::Uc, Options::default()),
        2 => (Kind::Ud, one_sided),
        _ => (Kind::Rd, one_sided),
    }
}

/// Creates a queue pair of some kind, then passes datagrams and calls of the application to it.
pub fn datagrams(data: &[u8]) {
    let mut input = Input::new(data);
    let (kind, options) = chosen(&mut input);
    let mut receiver = Receiver::new(kind, options);
    receiver.meet();
    let mut steps = 0;
    while !input.is_done() && steps < 300 {
        steps += 1;
        receiver.now += Duration::from_micros(u64::from(input.byte()) * 37);
        receiver.qp.set_now(receiver.now);
        match input.byte() {
            0..40 => receiver.recv(&mut input),
            40..60 => receiver.send(&mut input),
            60..70 => {
                let len = usize::from(input.u16() % 200);
                let mut bytes = input.take(len).to_vec();
                if input.byte() & 1 == 0 {
                    dgram::seal(&mut bytes);
                }
                let _ = Cm::parse(&bytes);
                let _ = datagram::rx::destination_index(&bytes);
                receive(&mut receiver, &mut input, &bytes);
            }
            70..72 => receiver.qp.handle_stall(),
            72..75 => receiver.qp.flush(),
            75..80 => {
                receiver.now += Duration::from_millis(u64::from(input.byte()) * 10);
                receiver.qp.set_now(receiver.now);
                receiver.qp.handle_timeout();
            }
            80..85 => {
                while let Some(record) = receiver.qp.poll_record() {
                    assert!(record.valid <= record.length);
                    assert_eq!(record.map == 0, record.complete || record.chunk);
                    if input.byte() < 200 {
                        assert_eq!(receiver.qp.release_map(record.map), record.map != 0);
                    }
                }
                while receiver.qp.poll_error().is_some() {}
            }
            _ if kind == Kind::Rd => {
                let bytes = packet(&receiver, &mut input);
                receive(&mut receiver, &mut input, &bytes);
            }
            _ => {
                let bytes = datagram(&receiver, &mut input);
                receive(&mut receiver, &mut input, &bytes);
            }
        }
        receiver.collect();
        receiver.qp.check_accounts();
    }
    receiver.check();
}

fn receive(receiver: &mut Receiver, input: &mut Input<'_>, bytes: &[u8]) {
    let to = match input.byte() {
        0..30 => Some(IpAddr::from([239, 0, 0, 1])),
        30..40 => None,
        _ => Some(IpAddr::from([10, 0, 0, 9])),
    };
    let arrival = Arrival {
        from: source(input.below(3)),
        to,
        hop_limit: 9,
        traffic_class: 0,
    };
    let before = receiver.qp.counters();
    let kept = receiver.qp.handle_rx(&arrival, bytes);
    let after = receiver.qp.counters();
    assert_eq!(after.rx_dgrams, before.rx_dgrams + 1);
    // Packets that waited for this one may be delivered even if this one is not.
    if kept.is_err() && receiver.qp.kind() != Kind::Rd {
        assert_eq!(after.rx_messages, before.rx_messages);
    }
}

/// A packet of an arbitrary peer.
fn transport() -> Packet {
    Packet {
        token: 7,
        echo: 0,
        seq: 0,
        base: 0,
        dst_index: 5,
        src_index: 3,
        window: 1 << 20,
        time: 1,
        ..Packet::default()
    }
}

fn sealed(packet: &Packet, data: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    packet.put(data.is_some(), &mut bytes);
    bytes.extend(data.unwrap_or(&[]));
    dgram::seal(&mut bytes);
    bytes
}

/// A packet with valid or nearly valid fields that contains the result of [`datagram()`].
fn packet(receiver: &Receiver, input: &mut Input<'_>) -> Vec<u8> {
    let ahead = u32::from(input.byte() % 8);
    let mut arrived = SmallVec::new();
    for _ in 0..input.byte() % 3 {
        let start = input.u32();
        arrived.push((start, start.wrapping_add(u32::from(input.byte()))));
    }
    let token = input_token(receiver, input.byte());
    let packet = Packet {
        token: 7 + u32::from(input.byte() > 250),
        echo: input.near(token),
        seq: input.near(receiver.next.wrapping_add(ahead)),
        base: input.near(receiver.next),
        ack: (input.byte() < 128).then(|| input.u32()),
        window: input.u32(),
        time: input.u32(),
        time_echo: if input.byte() < 128 { 0 } else { input.u32() },
        challenge: input.byte() > 250,
        not_ready: input.byte() > 200,
        ack_now: input.byte() > 128,
        ack_soon: input.byte() > 128,
        refused: if input.byte() > 240 { input.byte() } else { 0 },
        arrived,
        ..transport()
    };
    let inner = datagram(receiver, input);
    let data = (input.byte() < 230).then(|| &inner[..inner.len() - 4]);
    sealed(&packet, data)
}

fn input_token(receiver: &Receiver, which: u8) -> u32 {
    receiver.tokens[usize::from(which % 3)]
}

/// The payload of a Read Request or Atomic Request, mostly for registered memory.
fn request(receiver: &Receiver, input: &mut Input<'_>, opcode: Opcode) -> Option<Vec<u8>> {
    if !matches!(opcode, Opcode::ReadRequest | Opcode::AtomicRequest) || input.byte() < 60 {
        return None;
    }
    let mr = input.one_of(&[
        &receiver.readable,
        &receiver.readable,
        &receiver.readable,
        &receiver.closed,
    ]);
    let (stag, to) = (
        Stag(input.near(mr.stag().0)),
        To(mr.all().addr + u64::from(input.u16() % 4200)),
    );
    if opcode == Opcode::AtomicRequest {
        let asked = AtomicRequest::fetch_add(u32::from(input.byte()), stag, to, 1);
        return Some(asked.emit().to_vec());
    }
    let asked = ReadRequest {
        sink_stag: Stag(input.u32()),
        sink_to: To(u64::from(input.u32())),
        size: input.one_of(&[0, 1, 100, 1000, 4096, 4097]),
        source_stag: stag,
        source_to: to,
    };
    let mut bytes = asked.emit().to_vec();
    // Some cookies are the right one, which was sent before.
    let cookie = input.one_of(&[0, 0, receiver.cookie, 1]);
    bytes.extend_from_slice(&cookie.to_be_bytes());
    Some(bytes)
}

/// A datagram with a correct checksum and valid or nearly valid fields.
fn datagram(receiver: &Receiver, input: &mut Input<'_>) -> Vec<u8> {
    let opcode = input.one_of(&[
        Opcode::Send,
        Opcode::Send,
        Opcode::SendSolicited,
        Opcode::Write,
        Opcode::Write,
        Opcode::WriteRecord,
        Opcode::ReadRequest,
        Opcode::ReadResponse,
        Opcode::AtomicRequest,
        Opcode::AtomicResponse,
        Opcode::SendInvalidate,
        Opcode::Control,
        Opcode::Terminate,
    ]);
    let asked = request(receiver, input, opcode);
    let len = usize::from(input.byte()) * input.one_of(&[1, 16, 250]);
    // Less than 1100 bytes of padding follow the payload that `request` has made.
    let len = asked.as_ref().map_or(len, |r| r.len() + len % 1100);
    let offset = u32::from(input.u16()) % 60_000;
    let offset = if input.byte() < 128 { 0 } else { offset };
    let last = input.byte() < 140;
    let length = if last {
        offset + len as u32
    } else {
        offset + len as u32 + u32::from(input.u16())
    };
    let shim = Shim {
        epoch: input.near(1) as u16,
        qkey: input.near(QKEY),
        id: u32::from(input.byte()),
        length: input.near(length),
        offset: input.near(offset),
        sub_op: if input.byte() < 240 {
            u8::from(opcode == Opcode::WriteRecord) * (1 + input.byte() % 2)
        } else {
            input.byte()
        },
        attributes: input.byte() & 0x0f,
        dst_index: if input.byte() < 250 { 5 } else { input.byte() },
        src_index: 3,
        immediate: (input.byte() < 60).then_some([1, 2, 3, 4]),
        commit: input.byte() > 240,
        parity: input.byte() > 250,
        group: if input.byte() < 200 {
            0
        } else {
            input.byte() & 0x0f
        },
        segment: input.u16() % 64,
    };
    let header = match opcode {
        Opcode::Write | Opcode::WriteRecord | Opcode::ReadResponse => {
            let mr = if input.byte() < 220 {
                &receiver.writable
            } else {
                &receiver.closed
            };
            Header::Tagged(Tagged {
                last,
                opcode,
                stag: Stag(input.near(mr.stag().0)),
                to: To(mr
                    .all()
                    .addr
                    .wrapping_add(u64::from(input.near(shim.offset)))),
            })
        }
        _ => Header::Untagged(Untagged {
            last,
            opcode,
            inv_stag: Stag(0),
            qn: input.near(opcode.queue().unwrap_or(0)),
            msn: Msn(input.near(shim.id)),
            mo: input.near(shim.offset),
        }),
    };
    let mut bytes = dgram::emit_head(&shim, &header);
    let fill = input.byte();
    if let Some(asked) = asked {
        bytes.extend_from_slice(&asked);
        bytes.resize(bytes.len() + len - asked.len(), 0);
    } else if input.byte() < 200 {
        bytes.resize(bytes.len() + len, fill);
    } else {
        bytes.extend_from_slice(input.take(len));
    }
    if input.byte() > 250 {
        let at = input.below(bytes.len());
        bytes[at] ^= input.byte();
    }
    dgram::seal(&mut bytes);
    bytes
}
