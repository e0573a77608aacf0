//! Transmit side: *take* the next request, *build* its message, *cut* datagrams from it.
//!
//! Requests are taken in order, and only while the queue pair is in RTS. The bytes of a datagram are copied and its
//! checksum is computed when it is cut, so they match even if the application changes its buffer before the datagram
//! is sent.
//!
//! Unreliable services cut messages one after the other, in turn with answers to peers. In reliable services each
//! peer has a queue, so that a peer which does not acknowledge does not delay others.

mod build;
mod control;
mod cut;
mod gather;
mod head;
mod peer_queues;
mod unreliable;

use crate::bounds;
use crate::datagram::DatagramQp;
use crate::datagram::types::{SendEffect, TxDatagram};
use crate::verbs::sq::Phase;
use crate::verbs::wc::Status;

impl DatagramQp {
    /// Adds the datagrams that can be sent now to `out`, up to one batch. Returns whether there may be more of them.
    ///
    /// The caller sends them in this order, and reports each by [`Self::handle_written`] or
    /// [`Self::handle_send_error`]. It keeps datagrams that the socket does not accept yet (EAGAIN, ENOBUFS), and
    /// tries again. When the queue pair goes to RESET or to the error state, the caller drops the datagrams that were
    /// not sent.
    pub fn poll_tx(&mut self, out: &mut Vec<TxDatagram>) -> bool {
        self.was_stalled = false;
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some((peer, from, report)) = self.flow.next_report()
        {
            let datagram = self.report(peer, from, &report);
            self.unwritten.push(SendEffect::Nothing);
            out.push(datagram);
        }
        while out.len() < bounds::DATAGRAM_BATCH
            && let Some(datagram) = self.outbox.pop_front()
        {
            self.unwritten.push(SendEffect::Nothing);
            out.push(datagram);
        }
        let more = if self.rd.is_some() {
            self.poll_lanes(out);
            true
        } else {
            self.poll_messages(out)
        };
        self.after();
        more
    }

    // ------------------------------------------------------------------ without reliability

    /// Ends a stall that has lasted for [`bounds::DATAGRAM_STALL`]: sending continues without a report of the peer.
    pub fn handle_stall(&mut self) {
        if self.flow.stall().is_some() {
            self.counters.tx_stalls += 1;
            self.flow.give_up_waiting();
        }
    }

    // ------------------------------------------------------------------ results of sending

    /// Called when the socket has accepted the next `datagrams` datagrams of [`Self::poll_tx`].
    pub fn handle_written(&mut self, datagrams: usize) {
        let mut left = datagrams;
        while left > 0
            && let Some((effect, count)) = self.unwritten.take(left)
        {
            left -= count as usize;
            self.counters.tx_dgrams += u64::from(count);
            if let SendEffect::End(first) = effect {
                for request in first..first + u64::from(count) {
                    self.sent(request);
                }
            }
        }
        self.retire();
        self.after();
    }

    /// Called when the socket has refused the next datagram of [`Self::poll_tx`], and the caller has dropped it. In
    /// an unreliable service its request fails and the queue pair continues, because an error of one destination does
    /// not concern others. In a reliable service it counts as a lost packet.
    pub fn handle_send_error(&mut self) {
        let Some((effect, _)) = self.unwritten.take(1) else {
            return;
        };
        self.counters.tx_errors += 1;
        match effect {
            SendEffect::Nothing => return,
            SendEffect::Part(request) => self.mark_failed(request, Status::LocalQpOperation),
            SendEffect::End(request) => {
                self.mark_failed(request, Status::LocalQpOperation);
                self.sent(request);
            }
            SendEffect::Ask(request) => {
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
