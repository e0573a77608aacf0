//! Rules that hold for queue pairs of every kind, checked for each of them.
#![allow(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use anywarp_core::connection::{Connection, First, Peer, StreamConfig};
use anywarp_core::datagram::options::Options;
use anywarp_core::datagram::{DatagramQp, Kind};
use anywarp_core::error::Misuse;
use anywarp_core::llp::mpa::frame::TxBatch;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::event::AsyncEvent;
use anywarp_core::verbs::mr::Regions;
use anywarp_core::verbs::qp::{Attr, Capacity, QpType, State, mask};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rnic::Rnic;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wc::Status;
use anywarp_core::verbs::wr::{Destination, Op, Payload, RecvRequest, WorkRequest};
use anywarp_sim::Space;

const KINDS: [QpType; 4] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::Rd];

/// The state machine of a queue pair of any kind.
enum Machine {
    Stream(Box<Connection>),
    Datagram(Box<DatagramQp>),
}

/// A queue pair of any kind whose completion queue has room for two entries.
struct Qp {
    machine: Machine,
    kind: QpType,
    cq: Arc<Cq>,
    /// Datagrams that `poll_tx` returned and that were not reported as written.
    unwritten: usize,
}

fn now() -> Instant {
    Instant::now()
}

fn peer() -> Destination {
    Destination {
        addr: SocketAddr::from(([10, 0, 0, 2], 4791)),
        source: None,
        qpn: 2,
        qkey: 7,
        hop_limit: 64,
        traffic_class: 0,
    }
}

impl Qp {
    fn new(kind: QpType) -> Self {
        let cq = Arc::new(Cq::new(2, None));
        let parts = Parts {
            rnic: Arc::new(Rnic {
                regions: Regions::new(),
                memory: Box::new(Space::default()),
                observer: None,
            }),
            qpn: 1,
            pd: 1,
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            rq: RecvQueue::Own {
                requests: Default::default(),
                max_wr: 10,
                max_sge: 1,
            },
            capacity: Capacity {
                max_send_wr: 10,
                max_recv_wr: 10,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 16,
            },
            sig_all: true,
        };
        let datagram = |parts, kind| {
            Machine::Datagram(Box::new(DatagramQp::new(
                parts,
                kind,
                Options::default(),
                [1, 2],
            )))
        };
        let machine = match kind {
            QpType::Ud => datagram(parts, Kind::Ud),
            QpType::Uc => datagram(parts, Kind::Uc),
            QpType::Rd => datagram(parts, Kind::Rd),
            _ => Machine::Stream(Box::new(Connection::new(parts))),
        };
        Self {
            machine,
            kind,
            cq,
            unwritten: 0,
        }
    }

    fn modify(&mut self, attr_mask: u32, to: State) -> Result<State, Misuse> {
        let attr = Attr {
            qkey: 7,
            ..Attr::default()
        };
        let (attr_mask, to) = (attr_mask | mask::STATE, Some(to));
        match &mut self.machine {
            Machine::Stream(conn) => conn.modify(attr_mask, to, None, &attr),
            Machine::Datagram(qp) => qp.modify(attr_mask, to, None, &attr),
        }
    }

    /// Moves from RESET to RTS with the attributes that the kind requires, and a peer.
    fn connect(&mut self) {
        use mask::*;
        let (init, rtr, rts) = match self.kind {
            QpType::Ud | QpType::Rd => (QKEY, 0, SQ_PSN),
            QpType::Uc => (ACCESS_FLAGS, AV | PATH_MTU | DEST_QPN | RQ_PSN, SQ_PSN),
            _ => (
                ACCESS_FLAGS,
                AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
                TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC,
            ),
        };
        self.modify(PKEY_INDEX | PORT | init, State::Init).unwrap();
        self.modify(rtr, State::Rtr).unwrap();
        self.modify(rts, State::Rts).unwrap();
        match &mut self.machine {
            Machine::Stream(conn) => conn.attach(
                StreamConfig {
                    crc: true,
                    mulpdu: 1442,
                    mulpdu_anywarp: 1442,
                    peer: Peer::Standard,
                    ird: 4,
                    ord: 4,
                    initiator: true,
                    first: First::Nothing,
                    managed: true,
                    markers: false,
                    shm_handover: None,
                },
                now(),
            ),
            Machine::Datagram(qp) => qp.set_peer(peer()),
        }
    }

    fn recv(&mut self, id: u64) {
        let request = RecvRequest {
            id,
            sges: Default::default(),
        };
        match &mut self.machine {
            Machine::Stream(conn) => conn.post_recv(request).unwrap(),
            Machine::Datagram(qp) => qp.post_recv(request).unwrap(),
        }
    }

    /// Posts a Send, and calls `poll_tx` for its bytes.
    fn send(&mut self, id: u64) {
        let connected = matches!(self.kind, QpType::Rc | QpType::Uc);
        let request = WorkRequest {
            id,
            op: Op::Send {
                imm: None,
                invalidate: None,
            },
            payload: Payload::empty(),
            signaled: true,
            solicited: false,
            fence: false,
            destination: (!connected).then(peer),
            srq: None,
        };
        match &mut self.machine {
            Machine::Stream(conn) => {
                conn.post_send(request).unwrap();
                conn.poll_tx(now(), true, &mut TxBatch::default());
            }
            Machine::Datagram(qp) => {
                qp.post_send(request).unwrap();
                let mut out = Vec::new();
                qp.poll_tx(&mut out);
                self.unwritten += out.len();
            }
        }
    }

    /// Reports that the socket accepted everything that was sent. Returns whether that completes the requests: those
    /// of a reliable datagram queue pair wait for the peer.
    fn written(&mut self) -> bool {
        match &mut self.machine {
            Machine::Stream(conn) => conn.handle_written(),
            Machine::Datagram(qp) => qp.handle_written(std::mem::take(&mut self.unwritten)),
        }
        self.kind != QpType::Rd
    }

    fn state(&self) -> State {
        match &self.machine {
            Machine::Stream(conn) => conn.state(),
            Machine::Datagram(qp) => qp.state(),
        }
    }

    fn events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| match &mut self.machine {
            Machine::Stream(conn) => conn.poll_event(),
            Machine::Datagram(qp) => qp.poll_event(),
        })
        .collect()
    }

    fn completions(&self) -> Vec<(u64, Status)> {
        let mut all = Vec::new();
        self.cq.poll(64, |_, c| all.push((c.wr_id, c.status)));
        all
    }
}

#[test]
fn reset_after_a_completion_queue_overflow_makes_the_queue_pair_usable_again() {
    for kind in KINDS {
        let mut qp = Qp::new(kind);
        qp.connect();
        for id in 0..3 {
            qp.recv(id);
        }
        // Three flushed receives for a queue of two entries.
        qp.modify(0, State::Error).unwrap();
        assert!(qp.cq.is_broken(), "{kind:?}");
        qp.modify(0, State::Reset).unwrap();
        qp.events();
        qp.connect();
        qp.send(7);
        assert_eq!(qp.state(), State::Rts, "{kind:?}");
        if qp.written() {
            assert_eq!(qp.completions(), [(7, Status::Success)], "{kind:?}");
        }
        assert_eq!(qp.events(), [], "{kind:?}");
    }
}

#[test]
fn a_change_of_attributes_in_sqd_does_not_cancel_sq_drained() {
    for kind in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let mut qp = Qp::new(kind);
        qp.connect();
        qp.send(1);
        qp.modify(mask::EN_SQD_ASYNC_NOTIFY, State::Sqd).unwrap();
        assert_eq!(qp.events(), [], "{kind:?}: request 1 is outstanding");
        qp.modify(mask::PKEY_INDEX, State::Sqd).unwrap();
        assert_eq!(qp.events(), [], "{kind:?}");
        qp.written();
        assert_eq!(qp.completions(), [(1, Status::Success)], "{kind:?}");
        assert_eq!(qp.events(), [AsyncEvent::SqDrained], "{kind:?}");
        // The event is raised once: a later change of attributes does not raise it again.
        qp.modify(mask::PKEY_INDEX, State::Sqd).unwrap();
        assert_eq!(qp.events(), [], "{kind:?}");
    }
}

#[test]
fn sqd_without_notification_raises_no_event() {
    for kind in KINDS {
        let mut qp = Qp::new(kind);
        qp.connect();
        qp.modify(0, State::Sqd).unwrap();
        assert_eq!(qp.events(), [], "{kind:?}");
        qp.modify(0, State::Rts).unwrap();
        qp.modify(mask::EN_SQD_ASYNC_NOTIFY, State::Sqd).unwrap();
        assert_eq!(qp.events(), [AsyncEvent::SqDrained], "{kind:?}");
    }
}

#[test]
fn requests_are_refused_in_the_reset_state() {
    for kind in KINDS {
        let mut qp = Qp::new(kind);
        let recv = RecvRequest {
            id: 1,
            sges: Default::default(),
        };
        let refused = match &mut qp.machine {
            Machine::Stream(conn) => conn.post_recv(recv),
            Machine::Datagram(qp) => qp.post_recv(recv),
        };
        assert!(matches!(refused, Err(Misuse::WrongState(_))), "{kind:?}");
        let refused = match &mut qp.machine {
            Machine::Stream(conn) => conn.post_send(WorkRequest::blank()),
            Machine::Datagram(qp) => qp.post_send(WorkRequest::blank()),
        };
        assert!(matches!(refused, Err(Misuse::WrongState(_))), "{kind:?}");
    }
}
