//! Builds control datagrams and answers: reports, errors, responses.

use std::net::IpAddr;

use smallvec::SmallVec;

use crate::datagram::DatagramQp;
use crate::datagram::flow::Report;
use crate::datagram::outgoing::{ANSWER, Current, index};
use crate::datagram::types::{Peer, TxDatagram};
use crate::ddp::tx::{Address, Message};
use crate::verbs::source::Source;
use crate::verbs::wr::Destination;
use crate::wire::ddp::{Header, Untagged};
use crate::wire::dgram::{self, SUB_PLAIN, Shim};
use crate::wire::rdmap::Opcode;
use crate::wire::{Msn, Stag};

impl DatagramQp {
    /// The datagram of a report to a sender. It belongs to no request.
    pub(super) fn report(&self, peer: Peer, from: Option<IpAddr>, report: &Report) -> TxDatagram {
        let (header, payload) = report.emit();
        self.control(&peer, from, report.id, header, &payload)
    }

    /// A control datagram.
    pub(in crate::datagram) fn control(
        &self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        header: Untagged,
        payload: &[u8],
    ) -> TxDatagram {
        self.control_as(SUB_PLAIN, peer, from, id, header, payload)
    }

    /// A control datagram, or an error report.
    pub(in crate::datagram) fn control_as(
        &self,
        sub_op: u8,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        header: Untagged,
        payload: &[u8],
    ) -> TxDatagram {
        let shim = Shim {
            sub_op,
            id,
            length: u32::try_from(payload.len()).unwrap_or(0),
            dst_index: peer.1,
            ..self.shim()
        };
        let mut bytes = dgram::emit_head(&shim, &Header::Untagged(header));
        bytes.extend_from_slice(payload);
        dgram::seal(&mut bytes);
        TxDatagram {
            to: peer.0,
            from,
            hop_limit: 0,
            traffic_class: 0,
            bytes: bytes.into(),
        }
    }

    /// The fields of the shim that all datagrams of this queue pair have.
    pub(super) fn shim(&self) -> Shim {
        Shim {
            epoch: self.epoch,
            qkey: 0,
            id: 0,
            length: 0,
            offset: 0,
            sub_op: SUB_PLAIN,
            attributes: 0,
            dst_index: 0,
            src_index: index(self.base.qpn),
            immediate: None,
            commit: false,
            parity: false,
            group: 0,
            segment: 0,
        }
    }

    /// Queues a short answer, with `payload`, to a peer.
    pub(in crate::datagram) fn answer(
        &mut self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        sub_op: u8,
        opcode: Opcode,
        payload: &[u8],
    ) {
        let address = Address::Untagged {
            qn: opcode.queue().unwrap_or(0),
            msn: Msn(id),
            inv_stag: Stag(0),
            mo: 0,
        };
        let source = Source::Bytes(SmallVec::from_slice(payload));
        self.respond(
            peer,
            from,
            id,
            sub_op,
            opcode,
            address,
            source,
            payload.len() as u64,
        );
    }

    /// Queues a response to a peer: in a reliable service in the peer's queue, otherwise among the answers of the queue
    /// pair.
    #[expect(clippy::too_many_arguments, reason = "the fields of a message")]
    pub(in crate::datagram) fn respond(
        &mut self,
        peer: &Peer,
        from: Option<IpAddr>,
        id: u32,
        sub_op: u8,
        opcode: Opcode,
        address: Address,
        source: Source,
        len: u64,
    ) {
        let to = Destination {
            addr: peer.0,
            source: from,
            qpn: u32::from(peer.0.port()) << 8 | u32::from(peer.1),
            qkey: 0,
            hop_limit: 0,
            traffic_class: 0,
        };
        let shim = Shim {
            id,
            length: u32::try_from(len).unwrap_or(u32::MAX),
            sub_op,
            dst_index: peer.1,
            ..self.shim()
        };
        self.last_tag += 1;
        let current = Current {
            message: Message {
                opcode,
                address,
                source,
                len,
                sent: 0,
            },
            request: None,
            asks: false,
            tag: ANSWER | self.last_tag,
            to,
            shim,
            segment: self.segment_for(&to, false),
            group: (Vec::new(), 0, 0),
            waits: None,
        };
        if self.rd.is_some() {
            self.queue_message(current, false, true);
        } else {
            self.answers.push_back(current);
        }
    }
}
