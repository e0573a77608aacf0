//! The requests of recent messages, for error reports that arrive after the request has completed.

use crate::bounds;

/// The `wr_id`s of the requests of recent messages, by message number.
#[derive(Debug)]
pub(super) struct Issued {
    /// The entry of message `id` is at `id % MESSAGES_REMEMBERED`. Empty until the first message, and if `kept` is
    /// false.
    ring: Vec<Option<(u32, u64)>>,
    kept: bool,
}

impl Issued {
    /// Entries are stored only if `kept` is true. The only reader is `anywarpdv_poll_errors(3)`,
    /// which needs them only for some queue pairs.
    pub(super) fn new(kept: bool) -> Self {
        Self {
            ring: Vec::new(),
            kept,
        }
    }

    /// Stores that message `id` belongs to the request `request`.
    #[inline]
    pub(super) fn add(&mut self, id: u32, request: u64) {
        if self.kept {
            self.keep(id, request);
        }
    }

    fn keep(&mut self, id: u32, request: u64) {
        if self.ring.is_empty() {
            self.ring.resize(bounds::MESSAGES_REMEMBERED, None);
        }
        if let Some(place) = self.ring.get_mut(place_of(id)) {
            *place = Some((id, request));
        }
    }

    /// Returns the `wr_id` of the request of message `id`.
    pub(super) fn request(&self, id: u32) -> Option<u64> {
        let (last, request) = (*self.ring.get(place_of(id))?)?;
        (last == id).then_some(request)
    }
}

fn place_of(id: u32) -> usize {
    id as usize % bounds::MESSAGES_REMEMBERED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_messages_have_their_requests() {
        let mut issued = Issued::new(true);
        assert_eq!(issued.request(7), None);
        let most = u32::try_from(bounds::MESSAGES_REMEMBERED).unwrap_or(0);
        // The message numbers wrap around.
        let first = u32::MAX - 2;
        for n in 0..=most {
            issued.add(first.wrapping_add(n), n.into());
        }
        assert_eq!(issued.request(first), None, "the entry was overwritten");
        assert_eq!(issued.request(first.wrapping_add(1)), Some(1));
        assert_eq!(issued.request(first.wrapping_add(most)), Some(most.into()));
        let mut unasked = Issued::new(false);
        unasked.add(1, 1);
        assert_eq!((unasked.request(1), unasked.ring.len()), (None, 0));
    }
}
