//! Queue pairs: the state machine, and the attributes that `ibv_modify_qp(3)` may change in each state.

use std::time::Duration;

use super::access::Access;
use crate::bounds;
use crate::error::Misuse;

/// Type of a queue pair; the numbers are those of `enum ibv_qp_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpType {
    /// Reliable connection: iWARP over TCP, or reliable datagrams over UDP.
    Rc = 2,
    /// Unreliable connection: datagram-iWARP to one fixed peer.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// The sending end of an extended reliable connection.
    XrcSend = 9,
    /// The receiving end of an extended reliable connection.
    XrcRecv = 10,
    /// Reliable datagram. Verbs have no number for it, so it is a driver-specific type.
    Rd = 255,
}

/// State of a queue pair; the numbers are those of `enum ibv_qp_state`.
///
/// ```text
///   +-------+ init +------+ rtr +-----+ rts +-----+ sqd +-----+
///   | Reset | ---> | Init | --> | Rtr | --> | Rts | <-> | Sqd |
///   +-------+      +------+     +-----+     +-----+     +-----+
///       ^             any state -- error --> +-------+
///       +---------- any state, by modify --- | Error |  all requests are flushed
///                                            +-------+
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing can be posted.
    Reset = 0,
    /// Receives can be posted, nothing is processed.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue draining.
    Sqd = 4,
    /// Send queue in error (UD, UC).
    Sqe = 5,
    /// Everything is flushed.
    Error = 6,
}

impl State {
    /// The state with number `n`.
    pub fn from_number(n: u32) -> Option<Self> {
        Some(match n {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::Rtr,
            3 => Self::Rts,
            4 => Self::Sqd,
            5 => Self::Sqe,
            6 => Self::Error,
            _ => return None,
        })
    }
}

/// Bits of `enum ibv_qp_attr_mask`.
pub mod mask {
    #![allow(missing_docs, reason = "the names are those of ibv_modify_qp(3)")]
    pub const STATE: u32 = 1 << 0;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub const ACCESS_FLAGS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR_TIMER: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub const PATH_MIG_STATE: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
    pub const RATE_LIMIT: u32 = 1 << 25;
}

/// Sizes of the queues of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capacity {
    /// Send requests.
    pub max_send_wr: u32,
    /// Receives.
    pub max_recv_wr: u32,
    /// Elements of a send request's list.
    pub max_send_sge: u32,
    /// Elements of a receive's list.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline: u32,
}

impl Capacity {
    /// Checks against the device's limits (`ibv_create_qp(3)`: EINVAL above them).
    pub fn check(&self) -> Result<(), Misuse> {
        if self.max_send_wr > bounds::MAX_WR || self.max_recv_wr > bounds::MAX_WR {
            return Err(Misuse::InvalidArgument(
                "max_send_wr or max_recv_wr above the device's limit",
            ));
        }
        if self.max_send_sge > bounds::MAX_SGE || self.max_recv_sge > bounds::MAX_SGE {
            return Err(Misuse::InvalidArgument(
                "max_send_sge or max_recv_sge above the device's limit",
            ));
        }
        if self.max_inline > bounds::MAX_INLINE {
            return Err(Misuse::InvalidArgument(
                "max_inline_data above the device's limit",
            ));
        }
        Ok(())
    }
}

/// Attributes of a queue pair, as `ibv_modify_qp` sets and `ibv_query_qp` returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// The access rights of the peer.
    pub access: Access,
    /// Index of the partition key: always 0 here.
    pub pkey_index: u16,
    /// Port: always 1.
    pub port: u8,
    /// Key of a datagram queue pair.
    pub qkey: u32,
    /// Path MTU as `enum ibv_mtu`. Stored only: TCP determines its own segment size.
    pub path_mtu: u8,
    /// Local ACK timeout, 4.096 µs × 2^n; 0 means no timeout.
    pub timeout: u8,
    /// Number of retries, 0 to 7.
    pub retry_cnt: u8,
    /// Number of retries when no receive is posted; 7 means without limit.
    pub rnr_retry: u8,
    /// The RNR timer that is sent to the peer when no receive is posted, as the code of IBA table 46.
    pub min_rnr_timer: u8,
    /// First packet number to receive. Stored only.
    pub rq_psn: u32,
    /// First packet number to send. Stored only.
    pub sq_psn: u32,
    /// Reads and atomics that this end may have outstanding (ORD).
    pub max_rd_atomic: u8,
    /// Reads and atomics the peer may have outstanding (IRD).
    pub max_dest_rd_atomic: u8,
    /// The peer's queue pair number.
    pub dest_qpn: u32,
}

impl Attr {
    /// How long the peer may stay silent while requests are outstanding. The time follows from
    /// `timeout` and `retry_cnt`, and is 0.2 s to 600 s. `None` means that there is no limit.
    pub fn silence_limit(&self) -> Option<Duration> {
        self.silence_limit_ns().map(Duration::from_nanos)
    }

    /// How long the peer's machine may stay silent with requests outstanding before a Ping is sent.
    #[inline]
    pub fn probe_after(&self) -> Option<Duration> {
        self.silence_limit_ns()
            .map(|all| Duration::from_nanos(all / 4))
    }

    /// [`Self::silence_limit`] in nanoseconds: arithmetic of `Duration` is slow, and each posted request needs this.
    #[inline]
    fn silence_limit_ns(&self) -> Option<u64> {
        // IBA 9.7.6.1.3: the limit is 4.096 µs × 2^timeout for the first try and again for each of
        // `retry_cnt` retries. This is far below 2^64 ns, so the product does not overflow.
        let t = u64::from(self.timeout & 31);
        let all = (4096_u64 << t) * (u64::from(self.retry_cnt) + 1);
        (t > 0).then_some(all.clamp(200_000_000, 600_000_000_000))
    }

    /// Copies the attributes that `attr_mask` names from `from`.
    pub(crate) fn merge(&mut self, attr_mask: u32, from: &Self) {
        let has = |bit| attr_mask & bit != 0;
        if has(mask::ACCESS_FLAGS) {
            self.access = from.access;
        }
        if has(mask::PKEY_INDEX) {
            self.pkey_index = from.pkey_index;
        }
        if has(mask::PORT) {
            self.port = from.port;
        }
        if has(mask::QKEY) {
            self.qkey = from.qkey;
        }
        if has(mask::PATH_MTU) {
            self.path_mtu = from.path_mtu;
        }
        if has(mask::TIMEOUT) {
            self.timeout = from.timeout;
        }
        if has(mask::RETRY_CNT) {
            self.retry_cnt = from.retry_cnt;
        }
        if has(mask::RNR_RETRY) {
            self.rnr_retry = from.rnr_retry;
        }
        if has(mask::MIN_RNR_TIMER) {
            // A field of 5 bits (IBA 11.2.5.2). Devices ignore higher bits, and some programs set them.
            self.min_rnr_timer = from.min_rnr_timer & 31;
        }
        if has(mask::RQ_PSN) {
            self.rq_psn = from.rq_psn;
        }
        if has(mask::SQ_PSN) {
            self.sq_psn = from.sq_psn;
        }
        if has(mask::MAX_QP_RD_ATOMIC) {
            self.max_rd_atomic = from.max_rd_atomic;
        }
        if has(mask::MAX_DEST_RD_ATOMIC) {
            self.max_dest_rd_atomic = from.max_dest_rd_atomic;
        }
        if has(mask::DEST_QPN) {
            self.dest_qpn = from.dest_qpn;
        }
    }
}

impl Default for Attr {
    fn default() -> Self {
        Self {
            access: Access::NONE,
            pkey_index: 0,
            port: 1,
            qkey: 0,
            path_mtu: 5,
            timeout: 0,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 0,
            rq_psn: 0,
            sq_psn: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            dest_qpn: 0,
        }
    }
}

/// One row of the table of legal transitions: the attributes that a transition requires, and those that it allows.
struct Rule {
    required: u32,
    optional: u32,
}

/// The table of `ibv_modify_qp(3)` (IBA 11.2.5.2): which attributes a transition needs and allows.
fn rule(kind: QpType, from: State, to: State) -> Option<Rule> {
    use State::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
    use mask as m;
    let r = |required, optional| Some(Rule { required, optional });
    match (from, to) {
        (_, Reset) | (_, Error) => r(0, 0),
        (Reset, Init) => match kind {
            QpType::Ud | QpType::Rd => r(m::PKEY_INDEX | m::PORT | m::QKEY, 0),
            _ => r(m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS, 0),
        },
        (Init, Init) => match kind {
            QpType::Ud | QpType::Rd => r(0, m::PKEY_INDEX | m::PORT | m::QKEY),
            _ => r(0, m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS),
        },
        (Init, Rtr) => match kind {
            QpType::Ud | QpType::Rd => r(0, m::PKEY_INDEX | m::QKEY),
            QpType::Uc | QpType::XrcSend => r(
                m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN,
                m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX,
            ),
            QpType::Rc | QpType::XrcRecv => r(
                m::AV
                    | m::PATH_MTU
                    | m::DEST_QPN
                    | m::RQ_PSN
                    | m::MAX_DEST_RD_ATOMIC
                    | m::MIN_RNR_TIMER,
                m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX,
            ),
        },
        (Rtr, Rts) => match kind {
            QpType::Ud => r(m::SQ_PSN, m::CUR_STATE | m::QKEY),
            QpType::Rd => r(m::SQ_PSN, m::CUR_STATE | m::QKEY | m::RNR_RETRY),
            QpType::Uc => r(
                m::SQ_PSN,
                m::CUR_STATE | m::ALT_PATH | m::ACCESS_FLAGS | m::PATH_MIG_STATE,
            ),
            QpType::XrcRecv => r(
                m::TIMEOUT | m::SQ_PSN,
                m::CUR_STATE | m::ALT_PATH | m::ACCESS_FLAGS | m::MIN_RNR_TIMER | m::PATH_MIG_STATE,
            ),
            QpType::Rc | QpType::XrcSend => r(
                m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC,
                m::CUR_STATE | m::ALT_PATH | m::ACCESS_FLAGS | m::MIN_RNR_TIMER | m::PATH_MIG_STATE,
            ),
        },
        // Grant's thesis, section 5.3: an error stops a reliable datagram queue pair until the program restarts it.
        (Error, Rts) if kind == QpType::Rd => r(0, m::CUR_STATE | m::QKEY),
        (Rts | Sqd, Rts) | (Sqe, Rts) => match kind {
            QpType::Ud | QpType::Rd => r(0, m::CUR_STATE | m::QKEY),
            QpType::Uc => r(
                0,
                m::CUR_STATE | m::ACCESS_FLAGS | m::ALT_PATH | m::PATH_MIG_STATE,
            ),
            _ if from == Sqe => None,
            _ => r(
                0,
                m::CUR_STATE | m::ACCESS_FLAGS | m::ALT_PATH | m::PATH_MIG_STATE | m::MIN_RNR_TIMER,
            ),
        },
        (Rts, Sqd) => r(0, m::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => match kind {
            QpType::Ud | QpType::Rd => r(0, m::PKEY_INDEX | m::QKEY),
            QpType::Uc => r(
                0,
                m::AV | m::ALT_PATH | m::ACCESS_FLAGS | m::PKEY_INDEX | m::PATH_MIG_STATE,
            ),
            _ => r(
                0,
                m::PORT
                    | m::AV
                    | m::TIMEOUT
                    | m::RETRY_CNT
                    | m::RNR_RETRY
                    | m::MAX_QP_RD_ATOMIC
                    | m::MAX_DEST_RD_ATOMIC
                    | m::ALT_PATH
                    | m::ACCESS_FLAGS
                    | m::PKEY_INDEX
                    | m::MIN_RNR_TIMER
                    | m::PATH_MIG_STATE,
            ),
        },
        _ => None,
    }
}

/// Removes the attributes from `attr_mask` that only the other end of an XRC connection has.
/// Programs pass the attributes of both ends to each end, because the kernel ignores those that an
/// end does not have.
pub fn of_this_end(kind: QpType, attr_mask: u32) -> u32 {
    let other = match kind {
        QpType::XrcSend => mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER,
        QpType::XrcRecv => mask::MAX_QP_RD_ATOMIC | mask::RETRY_CNT | mask::RNR_RETRY,
        _ => 0,
    };
    attr_mask & !other
}

/// Checks a change of attributes against state machine, masks and ranges. Returns the new state.
pub fn check_modify(
    kind: QpType,
    current: State,
    next: Option<State>,
    attr_mask: u32,
    attr: &Attr,
    expected_state: Option<State>,
) -> Result<State, Misuse> {
    if let Some(expected_state) = expected_state
        && attr_mask & mask::CUR_STATE != 0
        && expected_state != current
        && current != State::Reset
    {
        return Err(Misuse::WrongState(
            "the queue pair is not in the state given as cur_qp_state",
        ));
    }
    let to = next.unwrap_or(current);
    let Some(rule) = rule(kind, current, to) else {
        return Err(Misuse::WrongState(
            "the state machine has no such transition",
        ));
    };
    let free = mask::STATE | mask::CUR_STATE;
    if attr_mask & rule.required != rule.required {
        return Err(Misuse::InvalidArgument(
            "an attribute that this transition needs is missing",
        ));
    }
    if attr_mask & !(rule.required | rule.optional | free) != 0 {
        return Err(Misuse::InvalidArgument(
            "an attribute that this transition does not allow",
        ));
    }
    if attr_mask & mask::PORT != 0 && attr.port != 1 {
        return Err(Misuse::InvalidArgument("port_num is not 1"));
    }
    if attr_mask & mask::PKEY_INDEX != 0 && attr.pkey_index != 0 {
        return Err(Misuse::InvalidArgument("pkey_index is not 0"));
    }
    if attr_mask & mask::PATH_MTU != 0 && !(1..=5).contains(&attr.path_mtu) {
        return Err(Misuse::InvalidArgument("path_mtu out of range"));
    }
    if attr_mask & mask::RETRY_CNT != 0 && attr.retry_cnt > 7
        || attr_mask & mask::RNR_RETRY != 0 && attr.rnr_retry > 7
    {
        return Err(Misuse::InvalidArgument("retry_cnt or rnr_retry above 7"));
    }
    if attr_mask & mask::TIMEOUT != 0 && attr.timeout > 31 {
        return Err(Misuse::InvalidArgument("timeout above 31"));
    }
    if attr_mask & mask::MAX_QP_RD_ATOMIC != 0 && attr.max_rd_atomic > bounds::MAX_RD_ATOMIC
        || attr_mask & mask::MAX_DEST_RD_ATOMIC != 0
            && attr.max_dest_rd_atomic > bounds::MAX_RD_ATOMIC
    {
        return Err(Misuse::InvalidArgument(
            "max_rd_atomic above the device's limit",
        ));
    }
    if attr_mask & mask::DEST_QPN != 0 && attr.dest_qpn > 0x00ff_ffff {
        return Err(Misuse::InvalidArgument("dest_qp_num above 24 bits"));
    }
    Ok(to)
}

/// The duration of an RNR timer code, in microseconds (IBA table 46).
pub fn rnr_timer_us(code: u8) -> u64 {
    const TENS: [u64; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    TENS.get(usize::from(code & 31)).copied().unwrap_or(65_536) * 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rc_to_rtr_needs_every_attribute_of_the_man_page() {
        let all = mask::STATE
            | mask::AV
            | mask::PATH_MTU
            | mask::DEST_QPN
            | mask::RQ_PSN
            | mask::MAX_DEST_RD_ATOMIC
            | mask::MIN_RNR_TIMER;
        let go = |given| {
            check_modify(
                QpType::Rc,
                State::Init,
                Some(State::Rtr),
                given,
                &Attr::default(),
                None,
            )
        };
        assert_eq!(go(all).unwrap(), State::Rtr);
        for bit in [
            mask::AV,
            mask::PATH_MTU,
            mask::DEST_QPN,
            mask::RQ_PSN,
            mask::MAX_DEST_RD_ATOMIC,
            mask::MIN_RNR_TIMER,
        ] {
            assert!(go(all & !bit).is_err());
        }
        assert!(go(all | mask::QKEY).is_err());
    }

    #[test]
    fn states_cannot_be_skipped() {
        let skip = check_modify(
            QpType::Rc,
            State::Reset,
            Some(State::Rts),
            mask::STATE,
            &Attr::default(),
            None,
        );
        assert!(skip.is_err());
        for from in [
            State::Reset,
            State::Init,
            State::Rtr,
            State::Rts,
            State::Sqd,
            State::Error,
        ] {
            let go = |to| {
                check_modify(
                    QpType::Rc,
                    from,
                    Some(to),
                    mask::STATE,
                    &Attr::default(),
                    None,
                )
            };
            assert_eq!(go(State::Reset).unwrap(), State::Reset);
            assert_eq!(go(State::Error).unwrap(), State::Error);
        }
    }

    #[test]
    fn rnr_codes_have_the_times_of_the_iba_table() {
        assert_eq!(rnr_timer_us(0), 655_360);
        assert_eq!(rnr_timer_us(1), 10);
        assert_eq!(rnr_timer_us(12), 640);
        assert_eq!(rnr_timer_us(31), 491_520);
    }
}
