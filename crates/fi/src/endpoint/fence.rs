//! Operations with `FI_FENCE`: they start when all earlier ones to the same peer have completed, and later ones wait behind them.

use super::*;

/// An operation that has not started.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request {
    Send(Outgoing),
    Access(OneSidedRequest),
    /// An atomic operation, and the length of its operands in bytes.
    Atomic(AtomicRequest, usize),
}

impl Request {
    fn flags(&self) -> u64 {
        match self {
            Self::Send(m) => m.flags,
            Self::Access(m) => m.flags,
            Self::Atomic(m, _) => m.flags,
        }
    }

    /// Copies the data of an injected operation, because the program may change the memory as soon as the call has returned. Makes
    /// the operation refer to the copies, and returns them. A read has no data to copy.
    fn copy(&mut self) -> Vec<Vec<u8>> {
        if matches!(self, Self::Access(m) if m.read) {
            return Vec::new();
        }
        let (injected, silent, lists) = match self {
            Self::Send(m) => (m.flags & FI_INJECT, m.silent, vec![&mut m.memory]),
            Self::Access(m) => (m.flags & FI_INJECT, m.silent, vec![&mut m.memory]),
            // An atomic read has no operand, so the program may pass a null pointer.
            Self::Atomic(m, _) if m.op == FI_ATOMIC_READ => {
                (m.flags & FI_INJECT, m.silent, vec![&mut m.compare])
            }
            Self::Atomic(m, _) => (
                m.flags & FI_INJECT,
                m.silent,
                vec![&mut m.operand, &mut m.compare],
            ),
        };
        if injected == 0 && !silent {
            return Vec::new();
        }
        let copied = lists.into_iter().map(|memory| {
            let mut bytes = vec![0; memory.len()];
            memory.read(0, &mut bytes);
            // SAFETY: the copy is kept with the request. Its address does not change when the vector is moved.
            *memory = unsafe { UserMemory::one(bytes.as_ptr().cast(), bytes.len()) };
            bytes
        });
        copied.collect()
    }
}

/// An operation that waits for earlier ones to its peer.
#[derive(Debug)]
pub(super) struct Postponed {
    to: Remote,
    request: Request,
    _copies: Vec<Vec<u8>>,
}

impl Endpoint {
    /// Returns whether an operation to a peer must not start yet.
    pub(super) fn waits_for_fence(&self, cx: &Shared, to: FiAddr, flags: u64) -> Result<bool, i32> {
        if self.postponed.is_empty() && flags & FI_FENCE == 0 {
            return Ok(false);
        }
        let to = self.peer(cx, to)?;
        let behind = self.postponed.iter().any(|p| p.to == to);
        Ok(behind || (flags & FI_FENCE != 0 && self.has_operations_to(to)))
    }

    /// Returns whether an operation of the program to a peer has not completed.
    fn has_operations_to(&self, peer: Remote) -> bool {
        let mut ops = self.ops.iter();
        let mut deferred = self.deferred.iter();
        ops.any(|(_, op)| match op {
            Op::Sent { to, .. }
            | Op::Announced { to, .. }
            | Op::OneSided { to, .. }
            | Op::Notified { to, .. }
            | Op::Atomic { to, .. } => *to == peer,
            Op::Fetch { .. }
            | Op::Probe { .. }
            | Op::CloseNotice { .. }
            | Op::Request { .. }
            | Op::Answer { .. } => false,
        }) || deferred.any(|d| matches!(d, Deferred::Notice(to, ..) if *to == peer))
    }

    /// Stores an operation until it may start.
    pub(super) fn postpone(
        &mut self,
        cx: &mut Shared,
        to: FiAddr,
        mut request: Request,
    ) -> Result<(), i32> {
        if self.postponed.len() >= limits::POSTPONED {
            self.progress(cx);
            if self.postponed.len() >= limits::POSTPONED {
                return Err(FI_EAGAIN);
            }
        }
        let to = self.peer(cx, to)?;
        let copies = request.copy();
        self.postponed.push_back(Postponed {
            to,
            request,
            _copies: copies,
        });
        Ok(())
    }

    /// Starts the operations that need not wait any more.
    pub(super) fn send_postponed(&mut self, cx: &mut Shared) {
        let mut waiting: Vec<Remote> = Vec::new();
        let mut at = 0;
        while let Some(Postponed { to, request, .. }) = self.postponed.get(at) {
            let (to, request) = (*to, *request);
            let fenced = request.flags() & FI_FENCE != 0;
            if waiting.contains(&to) || (fenced && self.has_operations_to(to)) {
                waiting.push(to);
                at += 1;
                continue;
            }
            let (started, done) = match &request {
                Request::Send(m) => (self.try_send(cx, m, m.memory.len()), self.done_of_send(m)),
                Request::Access(m) => (
                    self.try_access(cx, m, m.memory.len()),
                    self.done_of_access(m),
                ),
                Request::Atomic(m, bytes) => {
                    (self.try_atomic(cx, m, *bytes), self.done_of_atomic(m))
                }
            };
            match started {
                Ok(()) => {}
                Err(FI_EAGAIN) if self.ready(cx).is_err() => return,
                Err(FI_EAGAIN) => {
                    // This endpoint's share at the peer is used up, or there is no room for this operation. Operations to other
                    // peers may start.
                    waiting.push(to);
                    at += 1;
                    continue;
                }
                Err(why) => self.finish(cx, &done, why),
            }
            self.postponed.remove(at);
        }
    }
}
