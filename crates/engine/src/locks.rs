//! Locks that are acquired in the order of their ranks, which builds with debug assertions check.
//!
//! A thread that holds a lock may acquire only locks of a higher [`Rank`]. This makes deadlocks impossible. Release
//! builds do not check the order. Poisoning is ignored: see [`anywarp_core::lock`].

use std::ops::{Deref, DerefMut};
use std::sync;

use anywarp_core::lock;

/// The order in which locks are acquired: the first variant first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// The creation of the engine.
    EngineCreation,
    /// The objects whose counters `anywarp stat` shows.
    Counted,
    /// Held by the thread that receives from a trunk, while queue pairs process the frames, and tell the connection manager about their end.
    TrunkReceive,
    /// The state of an identifier of the connection manager that the program made.
    CmId,
    /// The state of an identifier that was created for a connect request. It may be locked while the lock of its
    /// listener is held.
    CmRequest,
    /// The ports of identifiers of the connection manager.
    CmPorts,
    /// The list of UDP ports, held while one is opened.
    UdpPorts,
    /// The list of QPN ports (`connect::qpn_port`), held while one is opened.
    Ports,
    /// Which queue pair numbers of one QPN port are in use.
    PortIndexes,
    /// Held by the thread that receives from a UDP socket, while queue pairs process the datagrams.
    UdpReceive,
    /// The receiving end of a carrier: shared memory that passes datagrams between two UDP ports of one host.
    CarrierReceive,
    /// A socket whose readiness events are off. Held while its queue pair changes them.
    DisarmedSocket,
    /// A reliable queue pair.
    Qp,
    /// The trunks to other processes, and the queue pairs that wait for one.
    Trunks,
    /// The list of half-open connections. It is held while the state of each is read.
    HalfOpen,
    /// The state of a connection that starts up.
    Startup,
    /// A query for the TCP or UDP port of an rdma_cm listener.
    Query,
    /// The rdma_cm ports for which no query is sent, because an earlier one was not answered.
    SilentPorts,
    /// The address of a queue pair's peer.
    QpPeer,
    /// The datagram queue pairs that use a shared receive queue.
    SharedReceiveUsers,
    /// A datagram queue pair.
    DatagramQp,
    /// The list of multicast groups, held while one is joined.
    Groups,
    /// The memory region behind a handle, held while it is registered anew.
    Region,
    /// The locked pages of a region.
    RegionPin,
    /// The protection domain of a region.
    RegionPd,
    /// Queue pairs for which a trunk was offered.
    TrunkOffers,
    /// The queue pairs of a trunk.
    TrunkMembers,
    /// The queue pairs of a UDP socket.
    UdpMembers,
    /// The queue pairs that wait until a UDP socket or a carrier has room.
    UdpWriters,
    /// The destinations of a UDP socket and their carriers.
    Carriers,
    /// The sending end of a carrier.
    CarrierSend,
    /// The sending end of a trunk.
    TrunkSend,
    /// The list of trunks, for the exit of the process.
    OpenTrunks,
    /// The number of a UDP socket in the reactor.
    UdpToken,
    /// The connections that are being drained: closed for sending, and read until the peer closes too.
    Drains,
    /// One connection that is being drained.
    Drain,
    /// The GID table.
    Gids,
    /// The objects that are notified when the port changes.
    PortListeners,
    /// One direction of a queue pair's datagrams, if faults are injected.
    FaultDirection,
    /// The decisions about a queue pair's faults.
    FaultDecisions,
    /// Datagrams that an injected fault delays.
    DelayedDatagrams,
    /// The link with virtual lanes that queue pairs send on.
    Link,
    /// The events of a channel.
    Events,
    /// Shared memory that is polled.
    PolledMemory,
    /// The map from numbers to reliable queue pairs.
    QueuePairs,
    /// The objects that are notified when the device fails.
    DeviceListeners,
    /// The free slots of the reactor's table of event sources.
    FreeSlots,
    /// The deadlines of the event sources.
    Deadlines,
    /// The reactor's table of event sources.
    Sources,
    /// Queue pairs with corked requests: posted requests that wait so that several are sent in one system call.
    Corked,
    /// Queue pairs with delayed acknowledgements.
    DelayedAcks,
    /// Spare buffers.
    Buffers,
    /// The descriptors of shared memory that peers were offered.
    ShmOffers,
    /// How often each page is locked.
    PageCounts,
    /// Unused random bytes.
    RandomPool,
    /// The path MTU of each peer.
    PathMtus,
    /// The streams that are captured.
    CapturedStreams,
    /// The local address towards each peer, for captures.
    CaptureSources,
    /// How many faults of each kind were injected.
    FaultCounts,
    /// Lines of the log that were left out. No lock is acquired while a line is written.
    LogThrottle,
}

#[cfg(debug_assertions)]
mod held {
    use std::cell::RefCell;

    use super::Rank;

    thread_local! {
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    /// The record that this thread holds a lock of this rank.
    #[derive(Debug)]
    pub(super) struct Held(Rank);

    impl Held {
        #[allow(
            clippy::panic,
            reason = "a wrong order of locks is an error of this library"
        )]
        pub(super) fn new(rank: Rank) -> Self {
            let higher = HELD.try_with(|held| held.borrow().iter().copied().find(|h| *h >= rank));
            if let Ok(Some(higher)) = higher
                && !std::thread::panicking()
            {
                panic!("lock {rank:?} is acquired while {higher:?} is held");
            }
            Self::unchecked(rank)
        }

        pub(super) fn unchecked(rank: Rank) -> Self {
            let _ = HELD.try_with(|held| held.borrow_mut().push(rank));
            Self(rank)
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(at) = held.iter().rposition(|h| *h == self.0) {
                    held.remove(at);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod held {
    use super::Rank;

    /// Nothing: release builds do not record which locks are held.
    #[derive(Debug)]
    pub(super) struct Held;

    impl Held {
        #[inline]
        pub(super) fn new(_rank: Rank) -> Self {
            Self
        }

        #[inline]
        pub(super) fn unchecked(_rank: Rank) -> Self {
            Self
        }
    }
}

/// A mutual exclusion lock with a rank.
#[derive(Debug)]
pub struct Mutex<T> {
    rank: Rank,
    lock: lock::Mutex<T>,
}

/// A reader-writer lock with a rank.
#[derive(Debug)]
pub struct RwLock<T> {
    rank: Rank,
    lock: lock::RwLock<T>,
}

/// A held lock, which is released when this value is dropped.
#[derive(Debug)]
pub struct Guard<G> {
    // Dropped in this order: the lock is released first.
    guard: G,
    _held: held::Held,
}

/// A held [`Mutex`].
pub type MutexGuard<'a, T> = Guard<sync::MutexGuard<'a, T>>;

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(rank: Rank, value: T) -> Self {
        Self {
            rank,
            lock: lock::Mutex::new(value),
        }
    }

    /// Acquires the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = held::Held::new(self.rank);
        Guard {
            guard: self.lock.lock(),
            _held: held,
        }
    }

    /// Acquires the lock if no thread holds it. This never waits, so the rank is not checked for this call. It is
    /// checked for locks that are acquired while this one is held.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(Guard {
            guard: self.lock.try_lock()?,
            _held: held::Held::unchecked(self.rank),
        })
    }
}

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub const fn new(rank: Rank, value: T) -> Self {
        Self {
            rank,
            lock: lock::RwLock::new(value),
        }
    }

    /// Acquires the lock for reading.
    #[inline]
    pub fn read(&self) -> Guard<sync::RwLockReadGuard<'_, T>> {
        let held = held::Held::new(self.rank);
        Guard {
            guard: self.lock.read(),
            _held: held,
        }
    }

    /// Acquires the lock for writing.
    #[inline]
    pub fn write(&self) -> Guard<sync::RwLockWriteGuard<'_, T>> {
        let held = held::Held::new(self.rank);
        Guard {
            guard: self.lock.write(),
            _held: held,
        }
    }
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.guard
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_lock_of_a_lower_rank_is_refused_while_a_higher_one_is_held() {
        let low = Mutex::new(Rank::Ports, 1);
        let high = RwLock::new(Rank::Sources, 2);
        // In order, any number of times, and again after both are released.
        for _ in 0..2 {
            let (one, two) = (low.lock(), high.read());
            assert_eq!(*one + *two, 3);
        }
        let held = high.write();
        let wrong = catch_unwind(AssertUnwindSafe(|| drop(low.lock())));
        assert!(wrong.is_err());
        drop(held);
        // The failed attempt has left no state.
        drop(low.lock());
    }

    #[test]
    fn two_locks_of_one_rank_are_refused() {
        let (one, other) = (Mutex::new(Rank::Buffers, ()), Mutex::new(Rank::Buffers, ()));
        let _held = one.lock();
        assert!(catch_unwind(AssertUnwindSafe(|| drop(other.lock()))).is_err());
    }
}
