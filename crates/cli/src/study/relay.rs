//! Connects two network namespaces by two TUN interfaces: threads forward the packets between them, with a delay and with
//! losses.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::sys;

/// The largest number of packets on the way in one direction; further ones are lost, as in a router.
const QUEUE: usize = 1 << 16;

/// The longest packet, bytes.
const LONGEST: usize = 9216;

/// A packet that is due within this time is written at once. If the next packet is due later, the thread sleeps until then.
const SHORTEST: Duration = Duration::from_micros(20);

/// What happens to packets on their way.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Path {
    pub(super) delay: Duration,
    /// The probability that a packet is lost.
    pub(super) loss: f64,
}

/// A packet, and when it arrives.
type Late = (Instant, Vec<u8>);

/// Creates an interface `wire` in each of the two namespaces, and starts to forward packets between them. The calling thread must
/// be in the first one. The interfaces exist until the process exits.
pub(super) fn start(own: &File, other: &File, path: Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("/dev/net/tun: {e}");
    let near = sys::tun("wire").map_err(failed)?;
    let enter = |space: &File| {
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|e| format!("the second namespace: {e}"))
    };
    enter(other)?;
    let far = sys::tun("wire").map_err(failed);
    enter(own)?;
    let far = far?;
    for (n, (from, to)) in [(&near, &far), (&far, &near)].into_iter().enumerate() {
        let (from, to) = (
            from.try_clone().map_err(failed)?,
            to.try_clone().map_err(failed)?,
        );
        let (sender, receiver) = sync_channel(QUEUE);
        thread::spawn(move || take(from, path, n as u64, &sender));
        thread::spawn(move || give(to, &receiver));
    }
    Ok(())
}

/// Reads packets, and decides which of them are lost.
fn take(mut from: File, path: Path, seed: u64, late: &SyncSender<Late>) {
    let mut random = seed;
    let mut packet = vec![0; LONGEST];
    while let Ok(len) = from.read(&mut packet) {
        if chance(&mut random) < path.loss {
            continue;
        }
        let arrives = Instant::now() + path.delay;
        let packet = packet.get(..len).unwrap_or_default().to_vec();
        if let Err(TrySendError::Disconnected(_)) = late.try_send((arrives, packet)) {
            return;
        }
    }
}

/// Writes packets when they are due.
fn give(mut to: File, late: &Receiver<Late>) {
    while let Ok((arrives, packet)) = late.recv() {
        let left = arrives.saturating_duration_since(Instant::now());
        if left > SHORTEST {
            thread::sleep(left);
        }
        // An interface that is not up refuses packets.
        let _lost = to.write(&packet);
    }
}

/// Returns the next number of a pseudorandom sequence (SplitMix64), at least 0 and below 1.
fn chance(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_lost_packets_is_the_probability() {
        let mut state = 1;
        let lost = (0..100_000).filter(|_| chance(&mut state) < 0.01).count();
        assert!((900..1100).contains(&lost), "{lost}");
    }

    #[test]
    fn late_packets_arrive_late_and_in_order() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let (sender, receiver) = sync_channel(QUEUE);
        let began = Instant::now();
        for n in 0..10u8 {
            sender
                .send((began + Duration::from_millis(20), vec![n]))
                .unwrap();
        }
        drop(sender);
        give(File::from(std::os::fd::OwnedFd::from(writer)), &receiver);
        assert!(began.elapsed() >= Duration::from_millis(20));
        let mut seen = Vec::new();
        reader.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, (0..10).collect::<Vec<u8>>());
    }
}
