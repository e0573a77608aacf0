//! Transmit side: *take* the next request, *build* its message, *cut* datagrams from it.
//!
//! Requests are taken in order, and only while the queue pair is in RTS. A datagram is copied together and sealed
//! when it is cut, so what is sent always fits its checksum, whatever the application does to its buffer meanwhile.
//!
//! Without reliability messages are cut one after the other, answers to others in turns with them. With it each peer has
//! a lane of its own, so that one which does not answer holds up no other.

mod build;
mod control;
mod cut;
mod gather;
mod head;
mod lanes;
mod unreliable;

use crate::bounds;
use crate::datagram::DatagramQp;
use crate::datagram::types::{Given, TxDatagram};
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;

impl DatagramQp {
    /// Adds to `out` what can be sent now, up to one batch.
    ///
    /// Each is to be sent, in this order, and reported by [`Self::handle_written`] or [`Self::handle_send_error`].
    /// What the socket does not take yet (EAGAIN, ENOBUFS) is kept by the caller and tried again. When the queue pair
    /// goes to RESET or to the error state, what was not sent is to be thrown away.
    pub fn poll_tx(&mut self, out: &mut Vec<TxDatagram>) {
        self.was_stalled = false;
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some((peer, from, report)) = self.flow.next_report()
        {
            let datagram = self.report(peer, from, &report);
            self.given_out.push_back(Given::Nothing);
            out.push(datagram);
        }
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some(datagram) = self.outbox.pop_front()
        {
            self.given_out.push_back(Given::Nothing);
            out.push(datagram);
        }
        if self.rd.is_some() {
            self.poll_lanes(out);
        } else {
            self.poll_messages(out);
        }
        self.after();
    }

    // ------------------------------------------------------------------ without reliability

    /// A stall has lasted long enough: the peer does not report, and is sent to without.
    pub fn handle_stall(&mut self) {
        if self.flow.stall().is_some() {
            self.counters.tx_stalls += 1;
            self.flow.give_up_waiting();
        }
    }

    // ------------------------------------------------------------------ what became of it

    /// The next `datagrams` that were given out have been handed to the socket.
    pub fn handle_written(&mut self, datagrams: usize) {
        for _ in 0..datagrams {
            let Some(given) = self.given_out.pop_front() else {
                break;
            };
            self.counters.tx_dgrams += 1;
            if let Given::End(request) = given {
                self.sent(request);
            }
        }
        self.retire();
        self.after();
    }

    /// The socket refused the next datagram for good, and it was thrown away: its request fails, the queue pair goes
    /// on (with a lossy service an error of one destination is no business of the others). With reliability it is one
    /// more lost packet.
    pub fn handle_send_error(&mut self) {
        let Some(given) = self.given_out.pop_front() else {
            return;
        };
        self.counters.tx_errors += 1;
        match given {
            Given::Nothing => return,
            Given::Part(request) => self.mark_failed(request, Status::LocalQpOperation),
            Given::End(request) => {
                self.mark_failed(request, Status::LocalQpOperation);
                self.sent(request);
            }
            Given::Ask(request) => {
                self.mark_failed(request, Status::LocalQpOperation);
                self.reads.remove_number(request);
                self.sent(request);
            }
        }
        self.retire();
        self.after();
    }

    pub(in crate::datagram) fn sent(&mut self, request: u64) {
        if let Some(posted) = self.base.sq.get_mut(request) {
            posted.phase = Phase::Done;
        }
    }
}
