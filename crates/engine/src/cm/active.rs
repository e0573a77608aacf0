//! The active side of a connection: `rdma_connect(3)` and the outcome of the MPA start-up.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_core::error::PeerError;
use anywarp_core::llp::mpa::startup::{InitiatorConfig, RtrForms};
use anywarp_core::verbs::qp::State as QpState;

use super::state::{Input, Phase};
use super::{CmId, ConnParam, EventKind, REJECT_CONSUMER, REJECT_NO_LISTENER, event_depths, os};
use crate::config::{Framing, config};
use crate::connect::startup::{Dial, Failure, Opened, Owner, REPLY_TIMEOUT, Startup};
use crate::log;
use crate::net::socket::local_addr;
use crate::net::tcp;
use crate::qp::{Manager, RcQp};

/// For how long a connection to a closed TCP port is attempted again before it fails.
///
/// Programs connect while the other end is between `rdma_bind_addr` and `rdma_listen` (perftest with `-R` does). The
/// connect request of an RDMA adapter is a management datagram and takes milliseconds to arrive; a TCP connection is
/// refused after microseconds. See docs/decisions/004.
pub(super) const RETRY_REFUSED: Duration = Duration::from_millis(400);

impl CmId {
    /// Connects (`rdma_connect(3)`).
    pub fn connect(&self, param: ConnParam) -> io::Result<()> {
        if self.is_datagram {
            return self.request_qp(param);
        }
        if param.private_data.len() > bounds::PRIVATE_DATA_MAX {
            return Err(os(libc::EINVAL));
        }
        let qp = self.find_or_make_qp(param.qp_num)?;
        let (remote, local) = {
            let mut state = self.lock();
            state.allows(Input::Connect)?;
            let remote = state.remote.ok_or_else(|| os(libc::EINVAL))?;
            state.step(Input::Connect)?;
            state.param = param.clone();
            state.connected_qp = qp.as_ref().map(|(qp, _)| Arc::downgrade(qp));
            // Releases the reserved TCP port: the socket of the connection binds to it.
            state.bound = None;
            if let Some(reservation) = &state.reservation {
                reservation.left_tcp();
            }
            (remote, state.local)
        };
        if let Some((qp, _)) = &qp
            && let Some(me) = self.me.upgrade()
        {
            let manager: Weak<dyn Manager> = Arc::downgrade(&(me as Arc<dyn Manager>));
            qp.manage(manager);
            self.apply_tos(qp);
        }
        let me: Arc<dyn Owner> = self.me.upgrade().ok_or_else(|| os(libc::EINVAL))?;
        let config = InitiatorConfig {
            crc: config().crc,
            ird: u16::from(param.responder_resources.min(bounds::MAX_RD_ATOMIC)),
            max_ird: u16::from(bounds::MAX_RD_ATOMIC),
            ord: u16::from(param.initiator_depth.min(bounds::MAX_RD_ATOMIC)),
            private_data: param.private_data,
            // An offer of all three forms of the ready-to-receive message tells the responder that this initiator may be anywarp.
            rtr: match config().framing {
                Framing::Standard => RtrForms {
                    send: false,
                    ..RtrForms::ALL
                },
                Framing::Aligned | Framing::Large => RtrForms::ALL,
            },
            ..InitiatorConfig::default()
        };
        let dial = Dial {
            peer: remote,
            bind: local,
            config,
            timeout: REPLY_TIMEOUT,
            retry_refused: RETRY_REFUSED,
            port_space: Some(self.port_space as u16),
        };
        match Startup::dial(self.engine, me, dial) {
            Ok(startup) => {
                self.lock().startup = Some(startup);
                Ok(())
            }
            Err(e) => {
                self.lock().end();
                self.push(
                    EventKind::Unreachable,
                    -e.raw_os_error().unwrap_or(libc::EHOSTUNREACH),
                );
                Ok(())
            }
        }
    }

    /// Handles an open connection: raises its event and attaches the queue pair.
    pub(super) fn handle_opened(&self, startup: &Arc<Startup>, opened: Opened) {
        {
            let mut state = self.lock();
            if state.destroyed
                || !state
                    .startup
                    .as_ref()
                    .is_none_or(|s| Arc::ptr_eq(s, startup))
            {
                return;
            }
            state.startup = None;
            if let Some(mut local) = local_addr(&opened.fd) {
                // The identifier keeps a port that the program has set, even if the TCP connection has another local
                // port.
                let chosen = state.local.filter(|_| state.reservation.is_some());
                local.set_port(chosen.map_or_else(|| local.port(), |l| l.port()));
                state.local = Some(local);
            }
            if state.step(Input::Established).is_err() {
                return;
            }
            state.param.responder_resources = u8::try_from(opened.params.ird).unwrap_or(u8::MAX);
            state.param.initiator_depth = u8::try_from(opened.params.ord).unwrap_or(u8::MAX);
        }
        let (ird, ord, ..) = self.agreed();
        let private_data = opened.private_data.clone();
        // A queue pair that the program has moved to the error state meanwhile cannot be connected.
        let usable = |qp: &RcQp, own: bool| !own || qp.query().0 != QpState::Error;
        let qp = self.connected_qp().filter(|(qp, own)| usable(qp, *own));
        match qp {
            Some((qp, own)) => {
                self.make_ready(&qp, own, ird, ord);
                // This event has to precede those that the first bytes may raise.
                let kind = if own {
                    EventKind::Established
                } else {
                    EventKind::ConnectResponse
                };
                self.push_agreed(&self.lock(), kind, private_data, opened.peer_depths);
                qp.attach_managed(opened, true, self.stays());
            }
            None => {
                self.lock().end();
                // RFC 6581 §9.3 [mpa-local-error]: the connection of the peer is open already, so the peer gets a
                // Terminate.
                let error = PeerError::MpaLocal;
                tcp::refuse(self.engine, opened.fd, &opened.params, &error);
                self.push(EventKind::ConnectError, -libc::EINVAL);
            }
        }
    }

    /// Handles a failed start-up: ends the identifier's connection and raises the event for the cause.
    pub(super) fn handle_failure(&self, startup: &Arc<Startup>, failure: Failure) {
        {
            let mut state = self.lock();
            if state.phase != Phase::Connecting {
                // An incoming connection of a listener has failed. No event reports that: before the MPA Request arrives, the program
                // does not know the connection, and afterwards `rdma_accept` fails.
                return;
            }
            if !state
                .startup
                .as_ref()
                .is_none_or(|s| Arc::ptr_eq(s, startup))
            {
                return;
            }
            state.startup = None;
            state.end();
        }
        log!(
            Info,
            "cm: connecting to {} failed: {failure:?}",
            startup.peer
        );
        // As in librdmacm, a rejected queue pair fails: the program gets the receives back that it has posted.
        if matches!(failure, Failure::Rejected { .. }) {
            self.fail_qp();
        }
        match failure {
            Failure::Rejected {
                private_data,
                peer_depths,
                errno,
            } => {
                let refused_by_tcp = private_data.is_empty()
                    && errno == libc::ECONNREFUSED
                    && startup.never_connected();
                let reason = if refused_by_tcp {
                    REJECT_NO_LISTENER
                } else {
                    REJECT_CONSUMER
                };
                self.push_event(
                    |e| {
                        e.private_data = private_data;
                        (e.responder_resources, e.initiator_depth) =
                            peer_depths.map_or((0, 0), event_depths);
                    },
                    EventKind::Rejected,
                    reason,
                );
            }
            Failure::Unreachable { errno } => self.push(EventKind::Unreachable, -errno),
            Failure::Broken { errno } => self.push(EventKind::ConnectError, -errno),
        }
    }
}
