//! The table of sources, which the reactor calls when a socket is ready or a deadline has passed.

use std::sync::Arc;
use std::time::Instant;

use crate::locks::{Mutex, Rank, RwLock};

/// An object, usually a queue pair, that is driven by a socket, by deadlines, or by memory that it shares with a peer process.
pub trait Source: Send + Sync {
    /// The socket is readable or writable. An error or hang-up counts as both.
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant);

    /// Tries to receive although no readiness event was delivered. `Some(true)` if something was received, `None` if the
    /// source does not support this.
    fn try_recv_hot(self: Arc<Self>, _now: Instant) -> Option<bool> {
        None
    }

    /// Turns readiness events of the socket on or off. The socket stays registered.
    fn set_armed(&self, _armed: bool) {}

    /// Memory that was registered for this source has something to receive, or room to send.
    fn memory_ready(self: Arc<Self>, _now: Instant) {}

    /// Sends the acknowledgement that this source owes the peer with which it shares memory (see [`Self::memory_ready`]).
    fn flush_memory(self: Arc<Self>, _now: Instant) {}

    /// A requested deadline has passed.
    fn timeout(self: Arc<Self>, now: Instant);
}

/// Identifies a registered source. The token of a removed source is not valid.
///
/// The upper half is the generation of the slot, the lower half its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub(super) u64);

impl Token {
    /// No source.
    pub const NONE: Self = Self(u64::MAX);

    fn index(self) -> usize {
        self.0 as u32 as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

struct Slot {
    generation: u32,
    source: Option<Arc<dyn Source>>,
}

/// The registered sources by token.
pub(super) struct Sources {
    slots: RwLock<Vec<Slot>>,
    free: Mutex<Vec<u32>>,
}

impl Sources {
    pub(super) const fn new() -> Self {
        Self {
            slots: RwLock::new(Rank::Sources, Vec::new()),
            free: Mutex::new(Rank::FreeSlots, Vec::new()),
        }
    }

    pub(super) fn insert(&self, source: Arc<dyn Source>) -> Token {
        let free = self.free.lock().pop();
        let mut slots = self.slots.write();
        let index = match free {
            Some(index) => index,
            None => {
                slots.push(Slot {
                    generation: 0,
                    source: None,
                });
                u32::try_from(slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        let Some(slot) = slots.get_mut(index as usize) else {
            return Token::NONE;
        };
        slot.source = Some(source);
        Token(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// Removes a source. It is returned, and not dropped here, since its destructor may call the reactor.
    pub(super) fn remove(&self, token: Token) -> Option<Arc<dyn Source>> {
        let source = {
            let mut slots = self.slots.write();
            let slot = slots.get_mut(token.index())?;
            if slot.generation != token.generation() {
                return None;
            }
            slot.generation = slot.generation.wrapping_add(1);
            slot.source.take()
        };
        self.free.lock().push(token.0 as u32);
        source
    }

    pub(super) fn get(&self, token: Token) -> Option<Arc<dyn Source>> {
        let slots = self.slots.read();
        let slot = slots.get(token.index())?;
        if slot.generation != token.generation() {
            return None;
        }
        slot.source.clone()
    }

    /// Calls `use_it` with a function that returns whether a token names a source.
    pub(super) fn with_live<R>(&self, use_it: impl FnOnce(&dyn Fn(Token) -> bool) -> R) -> R {
        let slots = self.slots.read();
        use_it(&|token| {
            let slot = slots.get(token.index());
            slot.is_some_and(|s| s.generation == token.generation())
        })
    }
}
