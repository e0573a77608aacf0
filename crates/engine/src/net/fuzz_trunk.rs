//! For cargo-fuzz: a stream whose peer sends any messages about a trunk, and anything on the trunk.
//!
//! A *trunk* is a TCP connection that carries the streams of many queue pairs. A *hand-over* moves a stream there from its own connection.
//! The tested end and its peer are those of [`super::fuzz_handover`]. The peer's frames are passed to the tested end without a socket.

use std::net::TcpStream;
use std::sync::{Arc, Weak};
use std::time::Instant;

use anywarp_core::connection::Carrier;
use anywarp_core::verbs::wr::{Payload, RecvRequest};
use anywarp_core::wire::control::{Control, Handover};

use super::fuzz_handover::{Both, connection, fpdu, send_of};
use super::tcp::Outcome;
use super::trunk::{Member, Trunk};
use crate::clock;
use crate::fd::EngineFd;

/// Takes the place of a queue pair as the trunks' member. It receives nothing: the fuzzer passes frames to the stream directly.
struct Nobody;

impl Member for Nobody {
    fn receive_frame(&self, _: &Arc<Trunk>, _: u32, _: &[u8], _: Instant) -> bool {
        false
    }
    fn receive_end(&self, _: &Arc<Trunk>, _: u32, _: Instant) {}
    fn trunk_has_room(&self, _: Instant) {}
    fn trunk_lost(&self, _: u32, _: Outcome, _: bool, _: Instant) {}
}

/// The stream, the trunk that it may use, and another trunk.
struct Trunks {
    both: Both,
    trunk: Arc<Trunk>,
    other: Arc<Trunk>,
    member: Arc<dyn Member>,
    /// The other ends of the trunks' connections.
    _peers: [TcpStream; 2],
}

impl Drop for Trunks {
    fn drop(&mut self) {
        for trunk in [&self.trunk, &self.other] {
            trunk.end(Outcome::Eof, clock::now());
        }
        self.both.peer = None;
    }
}

impl Trunks {
    fn new(choice: u8) -> std::io::Result<Self> {
        let both = Both::new(choice)?;
        let (one, two) = (connection()?, connection()?);
        let trunk = |number, opened_here, ours: TcpStream| {
            let fd = EngineFd::new(ours.into());
            let host = both.addresses.0.ip();
            Trunk::new(
                both.engine,
                (number, host, opened_here),
                fd,
                Vec::new(),
                |_| {},
            )
        };
        Ok(Self {
            trunk: trunk(2, choice & 1 != 0, one.0)?,
            other: trunk(4, true, two.0)?,
            _peers: [one.1, two.1],
            both,
            member: Arc::new(Nobody),
        })
    }

    fn member(&self) -> Weak<dyn Member> {
        Arc::downgrade(&self.member)
    }

    /// Makes the tested end receive from its own connection, and handle a message about a trunk. Returns false if its stream has ended.
    fn receive(&mut self) -> bool {
        if !self.both.receive(true) {
            return false;
        }
        let name = self.trunk.name_at_peer();
        let Both { tcp, conn, .. } = &mut self.both;
        match tcp.take_trunk_message() {
            Some(Handover::OfferTrunk {
                process,
                port,
                channel,
            }) => {
                tcp.trunk_offered(process, port, channel);
            }
            Some(Handover::TakeTrunk { trunk, channel }) => {
                let found = (trunk == name).then(|| Arc::clone(&self.trunk));
                if !tcp.trunk_taken(conn, found, (trunk, channel), clock::now()) {
                    return false;
                }
            }
            _ => {}
        }
        !tcp.has_ended_on_trunk()
    }

    /// Passes bytes of the peer to the tested end, from one of the two trunks.
    fn frame(&mut self, from_other: bool, bytes: &[u8]) -> bool {
        let trunk = if from_other { &self.other } else { &self.trunk };
        let Both { tcp, conn, .. } = &mut self.both;
        let Some(channel) = tcp.own_channel() else {
            return true;
        };
        let (before, receives) = (conn.received(), tcp.is_on_trunk().1);
        let kept = tcp.receive_frame(conn, (trunk, channel), bytes, clock::now());
        assert!(
            receives && !from_other || conn.received() == before,
            "bytes are handled before the peer's stream has switched, or from another trunk"
        );
        kept
    }
}

/// Runs one stream whose peer executes the commands in `data`.
pub(crate) fn fuzz(data: &[u8]) {
    if let Ok(mut trunks) = Trunks::new(data.first().copied().unwrap_or(0)) {
        run(&mut trunks, data.get(1..).unwrap_or(&[]));
    }
}

fn run(trunks: &mut Trunks, data: &[u8]) {
    let mut rest = data.iter().copied();
    while let Some(op) = rest.next() {
        let small = rest.next().unwrap_or(0);
        let both = &mut trunks.both;
        let open = match op % 16 {
            0 => {
                both.control(Control::Hello {
                    version: 1,
                    features: u32::from(small),
                });
                true
            }
            1 => {
                both.control(Control::Handover(Handover::OfferTrunk {
                    process: 7,
                    port: u16::from(small),
                    channel: u32::from(small),
                }));
                true
            }
            // The trunk is open, or cannot be opened.
            2 => {
                let trunk = (small & 1 == 0).then(|| Arc::clone(&trunks.trunk));
                let member = trunks.member();
                let Both { tcp, conn, .. } = &mut trunks.both;
                tcp.take_trunk(conn, trunk.as_ref(), member);
                true
            }
            3 => {
                let name = trunks.trunk.name_at_peer() ^ u32::from(small >> 4);
                both.control(Control::Handover(Handover::TakeTrunk {
                    trunk: name,
                    channel: u32::from(small),
                }));
                true
            }
            4 => {
                both.control(Control::Handover(Handover::Refuse));
                true
            }
            5 => {
                both.control(Control::Handover(Handover::Switch));
                true
            }
            // Bytes on the stream's own connection, whether or not the stream still uses it.
            6 => {
                both.send(&vec![small; usize::from(small) + 1]);
                true
            }
            7 => {
                let member = trunks.member();
                let both = &mut trunks.both;
                if both.conn.next_offer() == Some(Carrier::Trunk) {
                    if small & 1 == 0 {
                        both.tcp.offer_trunk(&mut both.conn, (7, 7), member);
                    } else {
                        both.conn.postpone_trunk();
                    }
                }
                both.transmit()
            }
            8 => trunks.receive(),
            // A Send on the trunk, whole or in part. The posted receives have room for an empty Send only.
            9 => {
                let ulpdu = [
                    &[
                        0x41,
                        0x43,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        0,
                        small & 15,
                        0,
                        0,
                        0,
                        0,
                    ][..],
                    &vec![small; usize::from(small & 32) / 4],
                ]
                .concat();
                let bytes = fpdu(&ulpdu, both.crc);
                let len = bytes.len() - usize::from(small >> 6);
                trunks.frame(small & 16 != 0, bytes.get(..len).unwrap_or(&[]))
            }
            10 => trunks.frame(false, &vec![small; usize::from(small) * 32]),
            11 => {
                let from = if small & 1 == 0 {
                    Arc::clone(&trunks.trunk)
                } else {
                    Arc::clone(&trunks.other)
                };
                if let Some(channel) = both.tcp.own_channel() {
                    both.tcp.receive_end((&from, channel));
                }
                !both.tcp.has_ended_on_trunk()
            }
            12 => {
                let _ = both.conn.post_send(send_of(1, Payload::empty()));
                both.transmit()
            }
            13 => {
                let _ = both.conn.post_recv(RecvRequest {
                    id: 2,
                    sges: Default::default(),
                });
                true
            }
            14 => {
                both.conn.leave("the program destroys the queue pair");
                both.transmit()
            }
            _ => {
                if small & 1 == 0 {
                    both.peer = None;
                    return;
                }
                trunks.trunk.end(Outcome::Eof, clock::now());
                let channel = both.tcp.own_channel();
                let Both { tcp, conn, .. } = both;
                channel.is_none_or(|own| !tcp.trunk_lost(conn, own, Outcome::Eof, false))
            }
        };
        if !open {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_messages_of_a_peer_about_trunks_are_handled() {
        crate::net::tests::replay("trunk", fuzz);
    }

    /// Inputs of the fuzzer complete a hand-over in both roles.
    #[test]
    fn a_stream_moves_to_the_trunk_in_both_roles() {
        // The peer offers a trunk. It switches its direction of the stream after it has received the TakeTrunk.
        let mut trunks = Trunks::new(1 | 2 | 4).unwrap();
        run(&mut trunks, &[7, 0, 1, 9, 8, 0, 2, 0, 7, 0, 13, 0, 13, 0]);
        assert_eq!(trunks.both.tcp.is_on_trunk(), (true, false));
        // A Send that arrives before the Switch is handled after it.
        run(&mut trunks, &[9, 1]);
        assert_eq!(trunks.both.conn.received(), 0);
        run(&mut trunks, &[5, 0, 8, 0]);
        assert_eq!(trunks.both.tcp.is_on_trunk(), (true, true));
        assert_eq!(trunks.both.conn.received(), 1);
        run(&mut trunks, &[9, 2]);
        assert_eq!(trunks.both.conn.received(), 2);
        // The tested end offers a trunk after two requests.
        let mut trunks = Trunks::new(2 | 4).unwrap();
        run(
            &mut trunks,
            &[0, 4, 8, 0, 12, 0, 12, 0, 7, 0, 7, 0, 3, 9, 8, 0],
        );
        assert_eq!(trunks.both.tcp.is_on_trunk(), (false, true));
        run(&mut trunks, &[7, 0]);
        assert_eq!(trunks.both.tcp.is_on_trunk(), (true, true));
    }
}
