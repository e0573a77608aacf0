//! Rules that hold for queue pairs of every kind, checked for each of them.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops where something is wrong"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use anywarp_core::connection::{Connection, First, OfferAfter, Peer, StreamConfig};
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

    /// Moves from RESET to `last`, which is INIT, RTR or RTS, with the attributes that the kind requires.
    fn advance(&mut self, last: State) {
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
        let steps = [
            (PKEY_INDEX | PORT | init, State::Init),
            (rtr, State::Rtr),
            (rts, State::Rts),
        ];
        for (attr_mask, state) in steps {
            self.modify(attr_mask, state).unwrap();
            if state == last {
                return;
            }
        }
    }

    /// Moves from RESET to RTS, and sets a peer.
    fn connect(&mut self) {
        self.advance(State::Rts);
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
                    stays: false,
                    markers: false,
                    offer_after: OfferAfter::NEVER,
                },
                now(),
            ),
            Machine::Datagram(qp) => qp.set_peer(peer()),
        }
    }

    /// Posts a receive.
    fn recv(&mut self, id: u64) -> Result<(), Misuse> {
        let request = RecvRequest {
            id,
            sges: Default::default(),
        };
        match &mut self.machine {
            Machine::Stream(conn) => conn.post_recv(request),
            Machine::Datagram(qp) => qp.post_recv(request),
        }
    }

    /// Posts a Send.
    fn send(&mut self, id: u64) -> Result<(), Misuse> {
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
            ack_later: false,
            fence: false,
            destination: (!connected).then(peer),
            srq: None,
        };
        match &mut self.machine {
            Machine::Stream(conn) => conn.post_send(request),
            Machine::Datagram(qp) => qp.post_send(request),
        }
    }

    /// Calls `poll_tx` for the bytes of posted requests. Returns whether there were any.
    fn transmit(&mut self) -> bool {
        match &mut self.machine {
            Machine::Stream(conn) => {
                let mut batch = TxBatch::default();
                conn.poll_tx(now(), true, &mut batch);
                !batch.is_empty()
            }
            Machine::Datagram(qp) => {
                let mut out = Vec::new();
                qp.poll_tx(&mut out);
                self.unwritten += out.len();
                !out.is_empty()
            }
        }
    }

    /// Reports that the socket accepted everything that was sent. Returns whether the requests are complete then:
    /// those of a reliable datagram queue pair wait for an acknowledgement of the peer.
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
            qp.recv(id).unwrap();
        }
        // Three receives are flushed, and the completion queue has room for two entries.
        qp.modify(0, State::Error).unwrap();
        assert!(qp.cq.is_broken(), "{kind:?}");
        qp.modify(0, State::Reset).unwrap();
        qp.events();
        qp.connect();
        qp.send(7).unwrap();
        assert!(qp.transmit(), "{kind:?}");
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
        qp.send(1).unwrap();
        assert!(qp.transmit(), "{kind:?}");
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

/// The states, with whether each accepts receives and whether it accepts send requests (`ibv_post_recv(3)`,
/// `ibv_post_send(3)`). SQE is not among them because no call enters it; the unit tests of `datagram` test it.
const STATES: [(State, bool, bool); 6] = [
    (State::Reset, false, false),
    (State::Init, true, false),
    (State::Rtr, true, false),
    (State::Rts, true, true),
    (State::Sqd, true, true),
    (State::Error, true, true),
];

impl Qp {
    /// A queue pair of `kind` in `state`, which has a peer if the state needs one.
    fn in_state(kind: QpType, state: State) -> Self {
        let mut qp = Self::new(kind);
        match state {
            State::Reset => {}
            State::Init | State::Rtr => qp.advance(state),
            State::Rts => qp.connect(),
            _ => {
                qp.connect();
                qp.modify(0, state).unwrap();
            }
        }
        assert_eq!(qp.state(), state, "{kind:?}");
        qp
    }
}

#[test]
fn each_state_accepts_and_refuses_the_requests_that_verbs_specify() {
    for kind in KINDS {
        for (state, takes_receives, takes_sends) in STATES {
            let mut qp = Qp::in_state(kind, state);
            for (result, accepts) in [(qp.recv(1), takes_receives), (qp.send(2), takes_sends)] {
                match result {
                    Ok(()) => assert!(accepts, "{kind:?} {state:?}"),
                    Err(Misuse::WrongState(_)) => assert!(!accepts, "{kind:?} {state:?}"),
                    Err(other) => panic!("{kind:?} {state:?}: {other}"),
                }
            }
            // A queue pair sends only in the state RTS.
            assert_eq!(qp.transmit(), state == State::Rts, "{kind:?} {state:?}");
            // An accepted request is flushed in the error state, and otherwise stays posted.
            let mut done = qp.completions();
            done.sort_unstable_by_key(|(id, _)| *id);
            let expected: &[_] = match state {
                State::Error => &[(1, Status::Flushed), (2, Status::Flushed)],
                _ => &[],
            };
            assert_eq!(done, expected, "{kind:?} {state:?}");
        }
    }
}

#[test]
fn requests_posted_in_sqd_are_sent_after_the_return_to_rts() {
    for kind in KINDS {
        let mut qp = Qp::in_state(kind, State::Sqd);
        qp.send(1).unwrap();
        assert!(!qp.transmit(), "{kind:?}");
        qp.modify(0, State::Rts).unwrap();
        assert!(qp.transmit(), "{kind:?}");
        if qp.written() {
            assert_eq!(qp.completions(), [(1, Status::Success)], "{kind:?}");
        }
    }
}
