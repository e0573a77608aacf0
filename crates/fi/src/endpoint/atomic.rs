//! Atomic operations: requests of this endpoint to its peers, and the execution of the requests that peers send.

use super::fence::Request;
use super::*;

impl Endpoint {
    /// Requests an atomic operation on a peer's memory. The provider in the peer's process executes it.
    pub fn atomic(&mut self, cx: &mut Shared, what: &AtomicRequest) -> Result<(), i32> {
        self.ready(cx)?;
        let kind = Type::from_number(what.datatype)
            .filter(|kind| atomics::is_valid(*kind, what.op, what.class))
            .ok_or(FI_EOPNOTSUPP)?;
        let bytes = what.count.saturating_mul(kind.size());
        if bytes > limits::ATOMIC || bytes == 0 {
            return Err(FI_EINVAL);
        }
        let reads = what.op == FI_ATOMIC_READ;
        if (!reads && what.operand.len() != bytes)
            || (what.class != Class::Write && what.result.len() != bytes)
            || (what.class == Class::Compare && what.compare.len() != bytes)
        {
            return Err(FI_EINVAL);
        }
        if self.waits_for_fence(cx, what.to, what.flags)? {
            return self.postpone(cx, what.to, Request::Atomic(*what, bytes));
        }
        self.post_or_progress(cx, |me, cx| me.try_atomic(cx, what, bytes))
    }

    pub(super) fn done_of_atomic(&self, what: &AtomicRequest) -> Done {
        let (flag, counts) = if what.class == Class::Write {
            (FI_WRITE, Counts::Write)
        } else {
            (FI_READ, Counts::Read)
        };
        Done {
            context: what.context,
            flags: FI_ATOMIC | flag,
            reported: !what.silent
                && (what.flags & FI_COMPLETION != 0 || !self.binding.send_selective),
            counts,
        }
    }

    pub(super) fn try_atomic(
        &mut self,
        cx: &mut Shared,
        what: &AtomicRequest,
        bytes: usize,
    ) -> Result<(), i32> {
        let to = self.peer(cx, what.to)?;
        let rkey = u32::try_from(what.at.1).map_err(|_| FI_ENOKEY)?;
        let mut header = Header::new(Kind::Atomic);
        header.length = what.count as u64;
        header.tag = what.at.0;
        header.data =
            u64::from(rkey) << 32 | u64::from(what.op & 0xffff) << 16 | u64::from(what.datatype);
        let mut content = Vec::with_capacity(2 * bytes);
        if what.op != FI_ATOMIC_READ {
            content.resize(bytes, 0);
            what.operand.read(0, &mut content);
        }
        let fetches = what.class != Class::Write;
        if fetches {
            header.flags |= FETCH;
        }
        if what.class == Class::Compare {
            header.flags |= COMPARE;
            let from = content.len();
            content.resize(from + bytes, 0);
            what.compare
                .read(0, content.get_mut(from..).unwrap_or_default());
        }
        let done = self.done_of_atomic(what);
        let op = Op::Atomic {
            done,
            to,
            result: what.result,
            expects: if fetches { bytes } else { 0 },
            known: false,
        };
        let op = self.ops.insert(op).map_err(|_full| FI_EAGAIN)?;
        header.id = op;
        let sent = self.post_message(cx, to, &header, &content, |slot| Op::Request {
            slot,
            of: op,
        });
        if sent.is_err() {
            self.ops.remove(op);
        }
        sent
    }

    /// Sends a header with content. A message that is too long to be sent inline is copied to a *slot*, a registered buffer of this
    /// endpoint. `kept` gets the index of the slot, and returns the operation that is stored until the message has completed.
    pub(super) fn post_message(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        header: &Header,
        content: &[u8],
        kept: impl FnOnce(Option<u16>) -> Op,
    ) -> Result<(), i32> {
        let total = HEADER + content.len();
        let way = cx.way(to.ip, self.gid_index)?;
        let to_whom = To {
            way: &way,
            qpn: to.qpn,
            qkey: self.job.qkey,
        };
        let slot = if total > limits::INLINE {
            Some(self.free_slots.pop().ok_or(FI_EAGAIN)?)
        } else {
            None
        };
        let Ok(op) = self.ops.insert(kept(slot)) else {
            self.free_slots.extend(slot);
            return Err(FI_EAGAIN);
        };
        let id = OP << KIND | u64::from(op);
        let posted = match slot {
            None => {
                let mut message = Vec::with_capacity(total);
                message.extend_from_slice(&header.encode());
                message.extend_from_slice(content);
                self.qp.send_copy(to_whom, id, &message, true)
            }
            Some(slot) => {
                let at = usize::from(slot) * SLOT;
                // SAFETY: the slot is free: no request uses it.
                let bytes = unsafe { self.slots.to_send(at, total) };
                if let Some((head, rest)) = bytes.split_first_chunk_mut::<HEADER>() {
                    *head = header.encode();
                    rest.copy_from_slice(content);
                }
                let piece = Piece {
                    at: self.slots.address(at),
                    len: total,
                    lkey: self.slot_region.lkey(),
                };
                // SAFETY: the slots are registered, and this one is not reused before the completion.
                unsafe { self.qp.send(to_whom, id, piece, true) }
            }
        };
        if let Err(why) = posted {
            self.ops.remove(op);
            self.free_slots.extend(slot);
            return Err(full(why));
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Sends an answer with content, at once or when the send queue has room.
    pub(super) fn reply(&mut self, cx: &mut Shared, to: Remote, header: Header, content: Vec<u8>) {
        if !self.deferred.is_empty() || !self.try_reply(cx, to, &header, &content) {
            self.deferred
                .push_back(Deferred::Answer(to, header, content));
        }
    }

    /// Sends an answer. Returns false if the caller has to try again.
    pub(super) fn try_reply(
        &mut self,
        cx: &mut Shared,
        to: Remote,
        header: &Header,
        content: &[u8],
    ) -> bool {
        let kept = |slot| Op::Answer { slot, to };
        let posted = self.post_message(cx, to, header, content, kept);
        self.answered(cx, to, posted)
    }

    /// Handles a peer's request for an atomic operation on memory of this process.
    pub(super) fn operate(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        let content = self.content(at, length);
        let mut answer = Header::new(Kind::AtomicDone);
        answer.id = header.id;
        let former = match operation(&cx.registered, header, content) {
            Ok(former) => former,
            Err(why) => {
                answer.tag = u64::try_from(why).unwrap_or(1);
                Vec::new()
            }
        };
        answer.length = former.len() as u64;
        self.reply(cx, from, answer, former);
    }

    /// Handles the answer to an atomic operation.
    pub(super) fn operated(
        &mut self,
        cx: &mut Shared,
        from: Remote,
        header: &Header,
        at: usize,
        length: usize,
    ) {
        let Some(Op::Atomic {
            to,
            expects,
            result,
            done,
            ..
        }) = self.ops.get(header.id)
        else {
            return;
        };
        let content = self.content(at, length);
        let failed = header.tag != 0;
        if *to != from || (!failed && content.len() != *expects) {
            return;
        }
        let done = *done;
        let err = if failed {
            i32::try_from(header.tag)
                .ok()
                .filter(|e| (1..4096).contains(e))
                .unwrap_or(FI_EREMOTEIO)
        } else {
            result.write(0, content);
            0
        };
        self.ops.remove(header.id);
        self.finish(cx, &done, err);
    }
}

/// Executes an atomic operation on registered memory. Returns the former values, if they are requested.
pub(crate) fn operation(
    registered: &HashMap<u32, Registered>,
    header: &Header,
    content: &[u8],
) -> Result<Vec<u8>, i32> {
    let low = |bits: u64| u32::try_from(bits & 0xffff).unwrap_or(0);
    let (rkey, op, datatype) = (header.data >> 32, low(header.data >> 16), low(header.data));
    let kind = Type::from_number(datatype).ok_or(FI_EOPNOTSUPP)?;
    let class = match (header.has(COMPARE), header.has(FETCH)) {
        (true, true) => Class::Compare,
        (true, false) => return Err(FI_EOPNOTSUPP),
        (false, true) => Class::Fetch,
        (false, false) => Class::Write,
    };
    if !atomics::is_valid(kind, op, class) {
        return Err(FI_EOPNOTSUPP);
    }
    let size = kind.size();
    let bytes = usize::try_from(header.length)
        .ok()
        .and_then(|count| count.checked_mul(size))
        .filter(|bytes| *bytes <= limits::ATOMIC)
        .ok_or(FI_EINVAL)?;
    let operands = if op == FI_ATOMIC_READ { 0 } else { bytes };
    let compared = if class == Class::Compare { bytes } else { 0 };
    if content.len() != operands + compared {
        return Err(FI_EINVAL);
    }
    let (with, than) = content.split_at(operands);
    let memory = u32::try_from(rkey)
        .ok()
        .and_then(|key| registered.get(&key))
        .ok_or(FI_EACCES)?;
    let allowed = if op == FI_ATOMIC_READ {
        memory.read
    } else {
        memory.write && (class == Class::Write || memory.read)
    };
    let at = usize::try_from(header.tag).map_err(|_| FI_EACCES)?;
    let offset = at.checked_sub(memory.at).ok_or(FI_EACCES)?;
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= memory.len);
    if !allowed || !inside {
        return Err(FI_EACCES);
    }
    let mut former = Vec::new();
    let (mut with, mut than) = (with.chunks_exact(size), than.chunks_exact(size));
    for i in 0..bytes / size {
        let (w, t) = (
            with.next().map_or(0, atomics::bits_of),
            than.next().map_or(0, atomics::bits_of),
        );
        let f = |old| atomics::compute(kind, op, old, w, t);
        // SAFETY: the element is inside registered memory that peers may change, or may read if `op` only reads (checked above).
        // The memory stays registered while the domain is locked.
        let old = unsafe { memory::change(at + i * size, size, f) };
        if class != Class::Write {
            former.extend(old.to_le_bytes().iter().take(size));
        }
    }
    Ok(former)
}
