//! Receive side of a connection: deframes, admits and places segments.
//!
//! Each segment is placed on its own: after the checks of RFC 5041 §7.1, its payload is written to the memory that its
//! header selects. `deliver.rs` delivers complete messages to the application.
//!
//! With CRCs, no byte of an FPDU is used before all of it has arrived and its CRC is checked. Without CRCs, the
//! payload of a large FPDU is received directly into user memory while it arrives (docs/decisions/003).

use std::time::Instant;

use smallvec::smallvec;

use super::Connection;
use super::responder::ReceiveUnderWay;
use super::stream::{Direct, End, Peer};
use super::timers::Timer;
use crate::bounds;
use crate::ddp::rx::{Admitted, Violation, tagged_error};
use crate::error::PeerError;
use crate::llp::mpa::deframe::{CRC, Extent, LENGTH, deframe};
use crate::llp::mpa::frame::for_each_part;
use crate::observe::Step;
use crate::rdmap::terminate::TermContext;
use crate::verbs::access::Access;
use crate::verbs::mr::Placement;
use crate::verbs::qp::State;
use crate::verbs::source::Places;
use crate::verbs::wc::Status;
use crate::wire::ddp::{Header, Tagged, Untagged};
use crate::wire::rdmap::Opcode;
use crate::wire::{Stag, To};

impl Connection {
    /// Handles bytes of the stream and returns how many of them were consumed. The caller passes the rest again,
    /// followed by the next bytes.
    pub fn handle_rx(&mut self, now: Instant, bytes: &[u8]) -> usize {
        let mut used = 0;
        self.timers.start(Timer::Probe, now);
        loop {
            let rest = bytes.get(used..).unwrap_or(&[]);
            let Some(s) = &mut self.stream else {
                return bytes.len();
            };
            if self.base.state == State::Error || s.end != End::Open {
                // RFC 5041 §7.1 [ddp-silent]: after an error all further segments are dropped.
                return bytes.len();
            }
            if s.handover.is_rx_sealed() {
                break;
            }
            if s.direct.is_some() {
                match self.continue_direct(now, rest) {
                    Some(n) => {
                        used += n;
                        continue;
                    }
                    None => break,
                }
            }
            let Some(extent) = Extent::of(rest) else {
                break;
            };
            match deframe(rest, extent, s.crc_rx) {
                Ok(Some(ulpdu)) => {
                    used += extent.total();
                    self.handle_ulpdu(now, ulpdu);
                }
                Ok(None) => {
                    if !self.begin_direct(rest, extent) {
                        break;
                    }
                    used += rest.len().min(LENGTH + extent.ulpdu);
                }
                Err(error) => {
                    self.fail_by_peer(Violation::answer(error), &TermContext::local());
                    return bytes.len();
                }
            }
        }
        self.after();
        used
    }

    /// Handles one complete segment.
    pub(super) fn handle_ulpdu(&mut self, now: Instant, ulpdu: &[u8]) {
        if ulpdu.is_empty() && self.take_empty_rtr() {
            return;
        }
        let (header, at) = match Header::parse(ulpdu) {
            Ok(parsed) => parsed,
            Err(error) => {
                let violation = Violation::request(error, Status::RemoteInvalidRequest);
                self.fail_by_peer(violation, &TermContext::segment(ulpdu));
                return;
            }
        };
        let payload = ulpdu.get(at..).unwrap_or(&[]);
        self.base.observe(|| Step::Deframe(&header, payload.len()));
        if self.note_first(&header, payload.len()) {
            return;
        }
        self.base.note_arrival(header.opcode());
        if self.receive_short(&header, payload) {
            return;
        }
        let result = match self.admit(&header, payload.len() as u64) {
            Ok(Admitted::Place(targets)) => {
                self.base.observe(|| Step::Admit(payload.len() as u64));
                self.place(&header, &targets, 0, payload)
                    .and_then(|()| self.deliver(now, &header, payload))
            }
            Ok(Admitted::Inspect) => self.deliver(now, &header, payload),
            Ok(Admitted::Drop) => Ok(()),
            Err(violation) => Err(violation),
        };
        if let Err(violation) = result {
            self.fail_by_peer(violation, &TermContext::segment(ulpdu));
        }
    }

    /// Decides where the payload of a segment goes.
    pub(super) fn admit(&mut self, header: &Header, len: u64) -> Result<Admitted, Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(Admitted::Drop);
        };
        let opcode = header.opcode();
        if s.responder.is_discarding() && is_request(opcode) {
            return Ok(Admitted::Drop);
        }
        match header {
            Header::Tagged(h) if h.opcode == Opcode::ReadResponse => {
                self.admit_read_response(h, len)
            }
            Header::Tagged(h) => self.admit_write(h, len),
            Header::Untagged(h) if h.opcode.is_send() => self.admit_send(h, len),
            Header::Untagged(h) => {
                // RFC 5040 §4.2 [rdmap-headers]: all other untagged messages are a single segment.
                if h.opcode != Opcode::Control && (!h.last || h.mo != 0) {
                    return Err(Violation::request(
                        PeerError::UntaggedOffset {
                            expected: 0,
                            got: h.mo,
                        },
                        Status::RemoteInvalidRequest,
                    ));
                }
                Ok(Admitted::Inspect)
            }
        }
    }

    fn admit_write(&mut self, h: &Tagged, len: u64) -> Result<Admitted, Violation> {
        // RFC 5041 §5.2 [ddp-zero-len]: a segment of length zero is not placed; its STag and TO are not checked.
        if len == 0 {
            return Ok(Admitted::Place(Places::new()));
        }
        if let Some(s) = &mut self.stream {
            s.responder.count_write(len);
        }
        if !self.base.attr.access.has(Access::REMOTE_WRITE) {
            return Err(Violation::request(
                PeerError::TaggedAccess { stag: h.stag.0 },
                Status::RemoteAccess,
            ));
        }
        let place = self
            .base
            .rnic
            .regions
            .check(
                h.stag,
                self.pd_of_peer(),
                self.base.qpn,
                Access::REMOTE_WRITE,
                h.to,
                len,
            )
            .map_err(|e| {
                Violation::request(tagged_error(e, h.stag, h.to, len), Status::RemoteAccess)
            })?;
        Ok(Admitted::Place(smallvec![place]))
    }

    fn admit_read_response(&mut self, h: &Tagged, len: u64) -> Result<Admitted, Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(Admitted::Drop);
        };
        s.requester.admit_read_response(h, len).map(Admitted::Place)
    }

    fn admit_send(&mut self, h: &Untagged, len: u64) -> Result<Admitted, Violation> {
        let Some(s) = &mut self.stream else {
            return Ok(Admitted::Drop);
        };
        if !s.responder.is_receiving_send() {
            s.responder.check_first(h)?;
            if !self.open_receive(h)? {
                return Ok(Admitted::Drop);
            }
        }
        let targets = match &mut self.stream {
            Some(s) => s.responder.admit_send(h, len)?,
            None => None,
        };
        Ok(targets.map_or(Admitted::Drop, Admitted::Place))
    }

    /// Takes a posted receive for a Send that begins. If none is posted, queues a receiver-not-ready for an anywarp peer and returns
    /// false. With another peer a missing receive is a violation.
    fn open_receive(&mut self, h: &Untagged) -> Result<bool, Violation> {
        let Some(taken) = self.base.take_receive() else {
            return self.no_receive(h).map(|()| false);
        };
        let mut places = Places::new();
        let (mut room, mut writable) = (0_u64, 0);
        let pd = self.base.rq.pd().unwrap_or(self.base.pd);
        for sge in taken.sges.iter().filter(|s| s.len > 0) {
            if writable == room {
                let (to, len) = (To(sge.addr), u64::from(sge.len));
                let regions = &self.base.rnic.regions;
                if let Ok(place) = regions.check_receive(sge.lkey, pd, self.base.qpn, to, len) {
                    writable += place.len();
                    places.push(place);
                }
            }
            room += u64::from(sge.len);
        }
        if let Some(s) = &mut self.stream {
            s.responder.begin_receive(ReceiveUnderWay {
                request_id: taken.id,
                places,
                room,
                writable,
                received: 0,
                msn: h.msn,
                opcode: h.opcode,
            });
        }
        Ok(true)
    }

    /// Handles a Send or immediate for which no receive is posted.
    pub(super) fn no_receive(&mut self, h: &Untagged) -> Result<(), Violation> {
        let timer = self.base.attr.min_rnr_timer;
        let Some(s) = &mut self.stream else {
            return Ok(());
        };
        if s.peer == Peer::Anywarp {
            s.responder.reject(timer);
            return Ok(());
        }
        // RFC 5041 §7.1 [ddp-no-buffer]: a message without a buffer ends the stream.
        Err(Violation::request(
            PeerError::UntaggedNoBuffer {
                qn: h.qn,
                msn: h.msn.0,
            },
            Status::RnrRetryExceeded,
        ))
    }

    /// Copies `payload` to the memory that the segment was admitted for.
    fn place(
        &mut self,
        header: &Header,
        targets: &Places,
        from: u64,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let mut at = 0_usize;
        let memory = &self.base.rnic.memory;
        let mut stag = Stag(0);
        let whole = for_each_part(
            targets,
            from,
            payload.len() as u64,
            |place: &Placement, offset, len| {
                let Ok(n) = usize::try_from(len) else {
                    return false;
                };
                let Some(pinned) = place.pin() else {
                    stag = place.stag();
                    return false;
                };
                memory.place(&pinned, offset, payload.get(at..at + n).unwrap_or(&[]));
                at += n;
                true
            },
        );
        if self.base.is_observed() && !payload.is_empty() {
            self.base.observe(|| Step::Place(payload.len() as u64));
        }
        if whole {
            Ok(())
        } else {
            Err(self.gone(header, stag))
        }
    }

    /// The violation when the memory of a segment was deregistered or invalidated after the access check.
    fn gone(&self, header: &Header, stag: Stag) -> Violation {
        let error = PeerError::TaggedStag { stag: stag.0 };
        let read = self.stream.as_ref().and_then(|s| s.requester.oldest_read());
        match (header.opcode(), read) {
            (Opcode::Write, _) => Violation::request(error, Status::RemoteAccess),
            (Opcode::ReadResponse, Some(number)) => {
                Violation::answer_to(number, error, Status::LocalProtection)
            }
            (Opcode::ReadResponse, None) => Violation::answer(error),
            _ => Violation::receive(
                PeerError::RdmapLocal,
                Status::RemoteOperation,
                Status::LocalProtection,
            ),
        }
    }

    // ------------------------------------------------------------------ straight to user memory

    /// Starts to receive the FPDU at the front of `rest` straight into user memory, if it is large enough. Returns whether
    /// it did.
    fn begin_direct(&mut self, rest: &[u8], extent: Extent) -> bool {
        // A CRC is computed over the bytes as they were received. In user memory the program could change them before
        // the check (docs/decisions/003).
        if self.stream.as_ref().is_none_or(|s| s.crc_rx) {
            return false;
        }
        if extent.total() - rest.len() < bounds::DIRECT_MIN {
            return false;
        }
        let have = rest.get(LENGTH..).unwrap_or(&[]);
        let have = have.get(..have.len().min(extent.ulpdu)).unwrap_or(&[]);
        if have.len() < Untagged::LEN {
            return false;
        }
        let Ok((header, at)) = Header::parse(have) else {
            return false;
        };
        let Some(s) = &self.stream else { return false };
        let opcode = header.opcode();
        let data = opcode == Opcode::Write || opcode == Opcode::ReadResponse || opcode.is_send();
        // The first message of the peer, and a Send without a posted receive, are handled when their FPDU is complete.
        let waits = opcode.is_send() && !s.responder.is_receiving_send() && self.base.rq.is_empty();
        if !data || !s.started || s.responder.is_discarding() || waits {
            return false;
        }
        let len = (extent.ulpdu - at) as u64;
        let payload = have.get(at..).unwrap_or(&[]);
        self.base
            .observe(|| Step::Deframe(&header, extent.ulpdu - at));
        let admitted = match self.admit(&header, len) {
            Ok(Admitted::Place(targets)) => {
                self.base.observe(|| Step::Admit(len));
                self.place(&header, &targets, 0, payload).map(|()| targets)
            }
            Ok(_) => return false,
            Err(violation) => Err(violation),
        };
        let (targets, violation) = match admitted {
            Ok(targets) => (targets, None),
            Err(violation) => (Places::new(), Some(violation)),
        };
        let Some(s) = &mut self.stream else {
            return false;
        };
        s.direct = Some(Direct {
            header,
            context: TermContext::partial_segment(have, extent.ulpdu),
            targets,
            placed: payload.len() as u64,
            left: len - payload.len() as u64,
            pad: extent.pad,
            violation,
        });
        true
    }

    /// Continues, with `rest`, an FPDU that is received straight into user memory. Returns how many bytes of `rest` were
    /// used; `None` if more are needed.
    fn continue_direct(&mut self, now: Instant, rest: &[u8]) -> Option<usize> {
        let mut direct = self.stream.as_mut()?.direct.take()?;
        if direct.left > 0 {
            let n = rest
                .len()
                .min(usize::try_from(direct.left).unwrap_or(usize::MAX));
            if n == 0 {
                self.stream.as_mut()?.direct = Some(direct);
                return None;
            }
            let bytes = rest.get(..n).unwrap_or(&[]);
            if direct.violation.is_none() {
                let placed = self.place(&direct.header, &direct.targets, direct.placed, bytes);
                direct.violation = placed.err();
            }
            direct.placed += n as u64;
            direct.left -= n as u64;
            self.stream.as_mut()?.direct = Some(direct);
            return Some(n);
        }
        let tail = direct.pad + CRC;
        if rest.len() < tail {
            self.stream.as_mut()?.direct = Some(direct);
            return None;
        }
        let result = match direct.violation {
            Some(violation) => Err(violation),
            None => {
                self.base.note_arrival(direct.header.opcode());
                self.deliver(now, &direct.header, &[])
            }
        };
        if let Err(violation) = result {
            self.fail_by_peer(violation, &direct.context);
        }
        Some(tail)
    }

    /// Where the next bytes of the stream are received if they are payload that goes directly to user memory: the ranges,
    /// the number of bytes that were already received into them, and the number of bytes still to come.
    pub fn direct(&self) -> Option<(&[Placement], u64, u64)> {
        let d = self.stream.as_ref()?.direct.as_ref()?;
        (d.left > 0 && d.violation.is_none()).then_some((d.targets.as_slice(), d.placed, d.left))
    }

    /// Notes that `n` bytes were received into the memory that [`Self::direct`] returned.
    pub fn handle_direct(&mut self, now: Instant, n: u64) {
        let Some(s) = &mut self.stream else { return };
        self.timers.start(Timer::Probe, now);
        let Some(d) = &mut s.direct else { return };
        let n = n.min(d.left);
        d.placed += n;
        d.left -= n;
        self.base.observe(|| Step::Place(n));
    }

    /// The protection domain that STags of the peer must belong to.
    pub(super) fn pd_of_peer(&self) -> u32 {
        if self.base.rq.is_xrc() {
            // The domain of the shared receive queue that the peer selected; 0, which is no domain, if it selected none.
            self.base.rq.pd().unwrap_or(0)
        } else {
            self.base.pd
        }
    }
}

/// Whether a message is a request. After a receiver-not-ready, requests are dropped until the peer's Restart.
fn is_request(opcode: Opcode) -> bool {
    opcode.is_send()
        || opcode.is_immediate()
        || matches!(
            opcode,
            Opcode::Write | Opcode::ReadRequest | Opcode::AtomicRequest
        )
}
