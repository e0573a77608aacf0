//! The states of a connection manager identifier.

use crate::reactor::Token;

/// The state of an identifier.
///
/// ```text
///          Bind                ResolveAddr          ResolveRoute         Connect
///  +------+ --> +-------+ -----> +----------+ -----> +--------+ -----> +------------+
///  | Idle |     | Bound |        | Resolved |        | Routed |        | Connecting | --+
///  +------+     +-------+        +----------+        +--------+        +------------+   |
///   |   |          | Listen           ^                                                 |
///   |   +----------|---- ResolveAddr -+                                                 | Established
///   |              v                                                                    v
///   |          +-----------+                                                      +-----------+
///   |          | Listening |                                                +---> | Connected |
///   |          +-----------+                                                |     +-----------+
///   | Request                    Accept                                     |
///   |          +-----------+ ----------------> +-----------+  Established   |
///   +--------> | Requested |                   | Accepting | ---------------+
///              +-----------+ ---- Answer -------------------(datagrams)-----+
///
///  any state: End -> Over
/// ```
///
/// A listening identifier stays `Listening`: each request creates a new identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Bound,
    Resolved,
    Routed,
    Listening,
    Connecting,
    Requested,
    Accepting,
    Connected,
    Over,
}

impl Phase {
    /// Whether there is a connection, or was one, or one is being established.
    pub(super) fn is_of_connection(self) -> bool {
        matches!(
            self,
            Self::Connecting | Self::Requested | Self::Accepting | Self::Connected | Self::Over
        )
    }
}

/// An input that changes the state of an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// `rdma_bind_addr(3)`.
    Bind,
    /// `rdma_resolve_addr(3)` found an address.
    ResolveAddr,
    /// `rdma_resolve_route(3)`.
    ResolveRoute,
    /// `rdma_connect(3)`.
    Connect,
    /// `rdma_listen(3)`.
    Listen,
    /// A connect request arrived, for which this identifier was created.
    Request,
    /// `rdma_accept(3)` of a connection.
    Accept,
    /// `rdma_accept(3)` of a datagram request, which is answered at once.
    Answer,
    /// The connection works in both directions.
    Established,
    /// The connection ended or failed, or the identifier is destroyed.
    End,
}

impl Phase {
    /// The state after an input; `None` if the input is not allowed in this state.
    pub(super) fn step(self, input: Input) -> Option<Self> {
        Some(match (self, input) {
            (Self::Idle, Input::Bind) => Self::Bound,
            (Self::Idle | Self::Bound, Input::ResolveAddr) => Self::Resolved,
            (Self::Resolved, Input::ResolveRoute) => Self::Routed,
            (Self::Routed, Input::Connect) => Self::Connecting,
            (Self::Bound, Input::Listen) => Self::Listening,
            (Self::Idle, Input::Request) => Self::Requested,
            (Self::Requested, Input::Accept) => Self::Accepting,
            (Self::Requested, Input::Answer) => Self::Connected,
            (Self::Connecting | Self::Accepting, Input::Established) => Self::Connected,
            (_, Input::End) => Self::Over,
            _ => return None,
        })
    }
}

/// The state of a connection's last event, `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
#[derive(Debug, Default)]
pub(super) struct Timewait {
    /// The program has called `rdma_disconnect`. As on InfiniBand, the time before the event begins at each end only after its own call.
    pub(super) leaves: bool,
    /// `RDMA_CM_EVENT_DISCONNECTED` was raised.
    pub(super) ended: bool,
    /// The timer after which the event is raised.
    pub(super) timer: Option<Token>,
    /// `RDMA_CM_EVENT_TIMEWAIT_EXIT` was raised.
    pub(super) over: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(inputs: &[Input]) -> Option<Phase> {
        inputs
            .iter()
            .try_fold(Phase::Idle, |phase, input| phase.step(*input))
    }

    #[test]
    fn each_side_reaches_connected_by_its_own_path() {
        use Input::*;
        let active = [ResolveAddr, ResolveRoute, Connect, Established];
        assert_eq!(run(&active), Some(Phase::Connected));
        assert_eq!(run(&[Request, Accept, Established]), Some(Phase::Connected));
        assert_eq!(run(&[Request, Answer]), Some(Phase::Connected));
        assert_eq!(run(&[Bind, Listen]), Some(Phase::Listening));
        assert_eq!(run(&[Bind, ResolveAddr]), Some(Phase::Resolved));
    }

    #[test]
    fn an_input_in_a_wrong_state_is_refused_and_an_end_never() {
        use Input::*;
        for wrong in [
            &[Bind, Bind][..],
            &[Connect],
            &[ResolveAddr, Connect],
            &[Listen],
            &[Bind, Listen, Connect],
            &[Request, Established],
            &[Request, Accept, Accept],
            &[Request, End, Accept],
        ] {
            assert_eq!(run(wrong), None, "{wrong:?}");
        }
        assert_eq!(run(&[End, End]), Some(Phase::Over));
    }
}
