//! The log: `ANYWARP_LOG=error|warn|info|debug|trace`, to standard error. Off by default, and then one load and a branch.

use std::fmt::Arguments;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anywarp_core::observe::{Observer, Step};

use crate::clock;

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    Off,
    /// What makes the device or a queue pair unusable.
    Error,
    /// Misuse, refused connections.
    Warn,
    /// Connections made and lost.
    Info,
    /// Every message.
    Debug,
    /// Every step.
    Trace,
}

/// The level that the environment asks for; read once.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        match std::env::var("ANYWARP_LOG")
            .unwrap_or_default()
            .to_ascii_lowercase()
            .as_str()
        {
            "error" => Level::Error,
            "warn" | "warning" => Level::Warn,
            "info" => Level::Info,
            "debug" => Level::Debug,
            "trace" => Level::Trace,
            _ => Level::Off,
        }
    })
}

/// Whether messages of this level are wanted.
pub fn wants(at: Level) -> bool {
    at <= level()
}

/// Writes one line.
pub fn write(at: Level, text: Arguments<'_>) {
    let name = match at {
        Level::Off => return,
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    };
    let line = format!("anywarp[{}] {name}: {text}\n", std::process::id());
    // One system call and no lock: another thread may have held it when this process was forked. A log that cannot be
    // written is not worth failing for.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

/// Logs at a level: `log!(Info, "qp {}: up", n)`.
#[macro_export]
macro_rules! log {
    ($level:ident, $($text:tt)*) => {
        if $crate::log::wants($crate::log::Level::$level) {
            $crate::log::write($crate::log::Level::$level, format_args!($($text)*));
        }
    };
}

/// Says something the first few times only: what a stranger can cause must not fill the disk.
#[derive(Debug)]
pub struct Rarely(AtomicU32);

impl Rarely {
    /// A fresh counter.
    #[allow(clippy::new_without_default, reason = "used in statics")]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// True for the first event and then for every 1,000th.
    pub fn now(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(1000)
    }
}

/// Lets so many lines of a kind through in a second, and counts the others.
#[derive(Debug)]
pub(crate) struct Throttle(Mutex<(Option<Instant>, u32, u32)>);

/// Lines of one kind in a second, when a peer can cause them as often as it likes.
const LINES: u32 = 20;

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new((None, 0, 0)))
    }

    /// Whether a line may be written now, and how many were not since the last one.
    pub(crate) fn line(&self, now: Instant) -> Option<u32> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, said, left_out) = &mut *state;
        if since.is_none_or(|t| now.saturating_duration_since(t) >= Duration::from_secs(1)) {
            *since = Some(now);
            *said = 0;
        }
        if *said >= LINES {
            *left_out += 1;
            return None;
        }
        *said += 1;
        Some(std::mem::take(left_out))
    }
}

/// What a peer did, with its address.
fn of_a_peer(qpn: u32, text: Arguments<'_>) {
    static THROTTLE: Throttle = Throttle::new();
    if let Some(left_out) = THROTTLE.line(clock::now()) {
        let peer = crate::worker::current().and_then(|e| e.peer_of(qpn));
        let peer = peer.map_or_else(|| "unknown".to_owned(), |p| p.to_string());
        let more = if left_out > 0 {
            format!(" ({left_out} lines like this left out)")
        } else {
            String::new()
        };
        log!(Info, "qp 0x{qpn:06x}, peer {peer}: {text}{more}");
    }
}

/// Writes the steps of the data path.
#[derive(Debug)]
pub(crate) struct StepLog;

impl Observer for StepLog {
    fn step(&self, qpn: u32, step: &Step<'_>) {
        match step {
            Step::Violation(error) => {
                of_a_peer(
                    qpn,
                    format_args!("the peer broke a rule: {error}; terminating the connection"),
                );
            }
            Step::Terminated(t) => {
                of_a_peer(
                    qpn,
                    format_args!("the peer terminated the connection: {}", describe(t)),
                );
            }
            Step::Failed(why) => of_a_peer(qpn, format_args!("error state: {why}")),
            Step::Complete(c) if c.status != anywarp_core::verbs::wc::Status::Success => {
                log!(
                    Debug,
                    "qp 0x{qpn:06x}: wr_id 0x{:x} {:?} completed with {}",
                    c.wr_id,
                    c.op,
                    c.status
                );
            }
            Step::Complete(c) => {
                log!(
                    Debug,
                    "qp 0x{qpn:06x}: wr_id 0x{:x} {:?} done, {} bytes",
                    c.wr_id,
                    c.op,
                    c.byte_len
                );
            }
            Step::Post(wr) => log!(
                Debug,
                "qp 0x{qpn:06x}: post wr_id 0x{:x} {:?}",
                wr.id,
                wr.op
            ),
            other => log!(Trace, "qp 0x{qpn:06x}: {other:?}"),
        }
    }
}

/// A Terminate in words.
fn describe(t: &anywarp_core::wire::rdmap::Terminate) -> String {
    let what = match (t.layer, t.etype, t.code) {
        (0, 0, _) => "local catastrophic error",
        (0, 1, 0) | (1, 1, 0) => "invalid stag",
        (0, 1, 1) | (1, 1, 1) => "base or bounds violation",
        (0, 1, 2) => "access rights violation",
        (0, 1, 3) | (1, 1, 2) => "stag not associated with the stream",
        (0, 1, 4) | (1, 1, 3) => "offset wrap",
        (0, 1, 9) | (0, 2, 9) => "stag cannot be invalidated",
        (0, 2, 5) => "rdmap version",
        (0, 2, 6) => "unexpected opcode",
        (0, 2, _) => "remote operation error",
        (1, 2, 1) => "invalid queue number",
        (1, 2, 2) => "no receive posted",
        (1, 2, 3) => "message number out of range",
        (1, 2, 4) => "message offset",
        (1, 2, 5) => "message too long for the receive",
        (2, 0, 2) => "crc error",
        (2, 0, 3) => "framing error",
        (2, 0, 6) => "insufficient ird",
        (2, 0, 7) => "no common ready-to-receive message",
        _ => "error",
    };
    format!(
        "{what} (layer {} type {} code 0x{:02x})",
        t.layer, t.etype, t.code
    )
}

/// The observer that the level asks for, if any.
pub(crate) fn observer() -> Option<std::sync::Arc<dyn Observer>> {
    wants(Level::Info).then(|| std::sync::Arc::new(StepLog) as std::sync::Arc<dyn Observer>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_cannot_fill_the_log() {
        let throttle = Throttle::new();
        let begin = clock::now();
        let said = (0..1000).filter(|_| throttle.line(begin).is_some()).count();
        assert_eq!(said, LINES as usize);
        // A second later lines pass again, and the first tells how many did not.
        let later = begin + Duration::from_secs(1);
        assert_eq!(throttle.line(later), Some(1000 - LINES));
        assert_eq!(throttle.line(later), Some(0));
    }
}
