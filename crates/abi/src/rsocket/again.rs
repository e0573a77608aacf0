//! Receives that are posted again after their messages were read.

use anywarp_core::error::Misuse;

/// Slots (numbers of buffers, each for one received message) whose receives could not be posted, because memory was short or the queue
/// pair is in the error state. Their receives are posted later. Without this, fewer and fewer receives would be posted, until the peer
/// could send nothing.
#[derive(Debug, Default)]
pub(super) struct Refused(Vec<u32>);

impl Refused {
    /// Posts the receives of `slots`, and those that could not be posted before. The error of `post` contains the number of
    /// receives that were posted before the failure.
    pub(super) fn post(
        &mut self,
        slots: impl IntoIterator<Item = u32>,
        post: impl FnOnce(&[u32]) -> Result<(), (usize, Misuse)>,
    ) {
        self.0.extend(slots);
        if self.0.is_empty() {
            return;
        }
        match post(&self.0) {
            Ok(()) => self.0.clear(),
            Err((taken, _)) => drop(self.0.drain(..taken.min(self.0.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_was_refused_is_posted_once_and_later() {
        let mut refused = Refused::default();
        let mut posted = Vec::new();
        let mut room = 2;
        let mut turn = |slots: &[u32], more: usize| {
            room += more;
            refused.post(slots.iter().copied(), |all| {
                let n = room.min(all.len());
                room -= n;
                posted.extend_from_slice(&all[..n]);
                if n < all.len() {
                    Err((n, Misuse::NoMemory))
                } else {
                    Ok(())
                }
            });
        };
        turn(&[1, 2, 3], 0);
        turn(&[4], 0);
        turn(&[], 1);
        turn(&[5], 9);
        turn(&[], 9);
        assert_eq!(posted, [1, 2, 3, 4, 5]);
    }
}
