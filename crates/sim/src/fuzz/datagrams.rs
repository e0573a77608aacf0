//! Datagrams from anybody to a UD queue pair and to a UC one.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anywarp_core::connection::Parts;
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{self, Arrival, DatagramQp, Kind};
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wr::{Destination, RecvRequest};
use anywarp_core::wire::ddp::{Header, Tagged, Untagged};
use anywarp_core::wire::dgram::{self, Cm, Shim};
use anywarp_core::wire::rdmap::Opcode;
use anywarp_core::wire::{Msn, Stag, To};

use crate::end::Host;
use crate::{Mr, World, access, send};

use super::input::Input;

const QKEY: u32 = 0x1111_1111;
const QPN: u32 = 4000 << 8 | 5;

struct Ear {
    qp: DatagramQp,
    host: Host,
    cq: Arc<Cq>,
    inbox: Mr,
    writable: Mr,
    closed: Mr,
    recvs: u64,
    sends: u64,
    delivered: Vec<u64>,
}

impl Ear {
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
            host,
            cq,
            recvs: 0,
            sends: 0,
            delivered: Vec::new(),
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
        let len = input.one_of(&[0, 8, 4_096]);
        request.payload = anywarp_core::verbs::wr::Payload::Sges(
            [self.writable.part(0, len)].into_iter().collect(),
        );
        if self.qp.post_send(request).is_ok() {
            self.sends += 1;
        }
        let mut out = Vec::new();
        self.qp.poll_tx(&mut out);
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
        self.cq.poll(usize::MAX, |_, entry| seen.push(entry.wr_id));
        while self.qp.poll_event().is_some() {}
    }

    fn check(mut self) {
        assert!(self.host.bytes(&self.closed).iter().all(|b| *b == 0));
        let all = [&self.inbox, &self.writable, &self.closed];
        self.host.check_guards(&all);
        let state = format!("{:?}", self.qp).len();
        assert!(state < 1 << 18, "{state} bytes of state");
        self.qp.set_state(State::Error);
        // What was given out and not written does not come back by itself: the engine reports it.
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

/// A kind of queue pair, then datagrams and calls of the application.
pub fn datagrams(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = if input.byte() & 1 == 0 {
        Kind::Ud
    } else {
        Kind::Uc
    };
    let mut ear = Ear::new(kind, Options::default());
    let mut steps = 0;
    while !input.is_done() && steps < 300 {
        steps += 1;
        match input.byte() {
            0..40 => ear.recv(&mut input),
            40..60 => ear.send(&mut input),
            60..70 => {
                let len = usize::from(input.u16() % 200);
                let mut bytes = input.take(len).to_vec();
                if input.byte() & 1 == 0 {
                    dgram::seal(&mut bytes);
                }
                let _ = Cm::parse(&bytes);
                let _ = datagram::rx::destination_index(&bytes);
                hears(&mut ear, &mut input, &bytes);
            }
            70..75 => ear.qp.handle_stall(),
            _ => {
                let bytes = datagram(&ear, &mut input);
                hears(&mut ear, &mut input, &bytes);
            }
        }
        ear.collect();
    }
    ear.check();
}

fn hears(ear: &mut Ear, input: &mut Input<'_>, bytes: &[u8]) {
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
    let before = *ear.qp.counters();
    let kept = ear.qp.handle_rx(&arrival, bytes);
    let after = *ear.qp.counters();
    assert_eq!(after.rx_dgrams, before.rx_dgrams + 1);
    if kept.is_err() {
        assert_eq!(after.rx_messages, before.rx_messages);
    }
}

/// A datagram with a good checksum whose fields are right, or almost.
fn datagram(ear: &Ear, input: &mut Input<'_>) -> Vec<u8> {
    let opcode = input.one_of(&[
        Opcode::Send,
        Opcode::Send,
        Opcode::SendSolicited,
        Opcode::Write,
        Opcode::Write,
        Opcode::WriteRecord,
        Opcode::ReadRequest,
        Opcode::ReadResponse,
        Opcode::Control,
        Opcode::Terminate,
    ]);
    let len = usize::from(input.byte()) * input.one_of(&[1, 16, 250]);
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
                &ear.writable
            } else {
                &ear.closed
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
    if input.byte() < 200 {
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
