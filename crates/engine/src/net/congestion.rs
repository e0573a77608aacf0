//! Replaces the TCP congestion control bbr on paths with a short round trip.
//!
//! On a loopback interface, and on a veth pair, bbr has a third to two thirds of the bandwidth of cubic or reno: it sends at the
//! rate that it has measured, and the measurement adapts too slowly to a path of a few microseconds. On a path that loses more than 2 %
//! of the segments bbr is the fastest. So bbr is replaced on paths with a short round trip, and restored if a connection loses that many
//! segments.
//!
//! bbr is replaced before the connection is established, when the path is not known, and restored afterwards if the path is long. The
//! replacement cannot be later: a connection that has begun with bbr continues to pace its segments with every other congestion control.
//! Between network namespaces this limits the connection to 1.3 GB/s instead of 4.3.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{set_tcp_congestion, tcp_congestion};
use rustix::net::{AddressFamily, SocketType};

use crate::config::config;
use crate::log;
use crate::process::Inherited;
use crate::sys::socket::tcp_path;

/// The smallest round trip of a long path. The handshake on a loopback interface or a veth pair takes 10 to 60 µs.
const LONG: Duration = Duration::from_micros(100);
/// The replacements, the best first. Most hosts allow unprivileged programs to use reno.
const REPLACEMENTS: [&str; 2] = ["cubic", "reno"];
/// The shortest time between two counts of the lost segments of a connection.
const CHECK_EACH: Duration = Duration::from_millis(100);
/// bbr is restored if more than one segment in this number was retransmitted. Between namespaces cubic has twice the bandwidth of bbr
/// at a loss of 1 %, the same at 2 %, and a twentieth at 5 %.
const LOST_ONE_IN: u32 = 50;
/// The number of retransmitted segments that are not counted as lost, because there may be another reason, such as a late
/// acknowledgement.
const SPURIOUS: u32 = 8;

/// The host's default congestion control, if it is bbr and this process may replace it and set it again.
static REPLACED: Inherited<Option<String>> = Inherited::new(find_replaced);

/// Chooses the congestion control of a TCP socket that is not connected. The connections that a listening socket accepts have that
/// of the listening socket.
pub(super) fn choose(fd: BorrowedFd<'_>) {
    if let Some(name) = &config().congestion_control {
        // A name that the host does not allow was reported when the engine was created, and the host's default is used.
        let _ = set_tcp_congestion(fd, name);
    } else if REPLACED.get().is_some() {
        replace(fd);
    }
}

/// Tries on a separate socket whether bbr can be replaced, and set again: the host's default is not always among the names that the
/// host allows unprivileged programs to set.
fn find_replaced() -> Option<String> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    let fd = socket.as_fd();
    let name = tcp_congestion(fd).ok()?;
    let can_return =
        || name.starts_with("bbr") && replace(fd) && set_tcp_congestion(fd, &name).is_ok();
    can_return().then_some(name)
}

/// Sets the best replacement that this process may use.
fn replace(fd: BorrowedFd<'_>) -> bool {
    let mut names = REPLACEMENTS.into_iter();
    names.any(|name| set_tcp_congestion(fd, name).is_ok())
}

/// Whether the congestion control of a connection is a replacement that was chosen here.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    chosen: Option<Chosen>,
}

#[derive(Debug)]
struct Chosen {
    /// The host's default.
    before: &'static str,
    checked: Option<Instant>,
    /// The numbers of segments that had been sent, and sent again, at the last check.
    sent: u32,
    resent: u32,
}

impl Congestion {
    /// Called when a TCP connection is established. On a long path the connection gets the host's default again.
    pub(super) fn settle(fd: BorrowedFd<'_>) -> Self {
        let Some(Some(before)) = REPLACED.get_if_made() else {
            return Self::default();
        };
        // A route can have a congestion control of its own.
        let is_replaced =
            tcp_congestion(fd).is_ok_and(|name| REPLACEMENTS.contains(&name.as_str()));
        if !is_replaced {
            return Self::default();
        }
        if tcp_path(fd).is_some_and(|path| path.least_round_trip < LONG) {
            return Self {
                chosen: Some(Chosen {
                    before,
                    checked: None,
                    sent: 0,
                    resent: 0,
                }),
            };
        }
        let _ = set_tcp_congestion(fd, before);
        Self::default()
    }

    /// Called when the socket is full: lost segments matter only then. Restores the host's default if many segments were lost.
    #[cold]
    pub(super) fn check(&mut self, fd: BorrowedFd<'_>, now: Instant) {
        let Some(chosen) = &mut self.chosen else {
            return;
        };
        if chosen.checked.is_some_and(|at| now < at + CHECK_EACH) {
            return;
        }
        chosen.checked = Some(now);
        let Some(path) = tcp_path(fd) else { return };
        let sent = path.sent.wrapping_sub(chosen.sent);
        let resent = path.resent.wrapping_sub(chosen.resent);
        (chosen.sent, chosen.resent) = (path.sent, path.resent);
        if loses(sent, resent) {
            if set_tcp_congestion(fd, chosen.before).is_ok() {
                log!(
                    Info,
                    "{resent} of {sent} segments were lost: the congestion control is {} again",
                    chosen.before
                );
            }
            self.chosen = None;
        }
    }
}

/// Whether a path loses segments.
fn loses(sent: u32, resent: u32) -> bool {
    resent > SPURIOUS + sent / LOST_ONE_IN
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_loss_of_one_in_twenty_is_too_much() {
        assert!(!loses(0, 0));
        assert!(!loses(100_000, 1000));
        assert!(loses(100_000, 5000));
        assert!(!loses(1, 1));
        assert!(loses(u32::MAX, u32::MAX));
    }

    #[test]
    fn bbr_is_replaced_on_a_loopback_interface_until_segments_are_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket =
            crate::net::socket::open(std::net::Ipv4Addr::LOCALHOST.into(), SocketType::STREAM)
                .unwrap();
        let fd = socket.get();
        let is_bbr = REPLACED.get().is_some();
        let name = tcp_congestion(fd).unwrap();
        assert!(!is_bbr || REPLACEMENTS.contains(&name.as_str()), "{name}");
        rustix::io::ioctl_fionbio(fd, false).unwrap();
        rustix::net::connect(fd, &listener.local_addr().unwrap()).unwrap();
        // A loaded machine may delay the handshake.
        let is_short = tcp_path(fd).unwrap().least_round_trip < LONG;
        let mut congestion = Congestion::settle(fd);
        let is_replaced = is_bbr && is_short;
        assert_eq!(congestion.chosen.is_some(), is_replaced);
        assert_eq!(tcp_congestion(fd).unwrap() == name, is_replaced || !is_bbr);
        let now = Instant::now();
        congestion.check(fd, now);
        assert_eq!(congestion.chosen.is_some(), is_replaced);
        if let Some(chosen) = &mut congestion.chosen {
            // The next check then counts so many retransmitted segments that the path is found to lose segments.
            chosen.resent = chosen.resent.wrapping_sub(2 * SPURIOUS);
            congestion.check(fd, now);
            assert!(congestion.chosen.is_some(), "it was checked just now");
            congestion.check(fd, now + CHECK_EACH);
            assert!(tcp_congestion(fd).unwrap().starts_with("bbr"));
        }
    }
}
