//! For cargo-fuzz: a stream on one host whose peer sends any hand-over messages, offers any memory, and writes
//! anything to it.
//!
//! The peer is in this process. Its end of the connection is a plain socket, and the memory that it offers or maps is
//! real, so that hand-overs can succeed and fail.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anywarp_core::connection::{Carrier, Connection, First, OfferAfter, Peer, StreamConfig};
use anywarp_core::llp::mpa::crc::Crc32c;
use anywarp_core::llp::mpa::frame::TxBatch;
use anywarp_core::verbs::cq::Cq;
use anywarp_core::verbs::qp::{Capacity, State};
use anywarp_core::verbs::qp_base::Parts;
use anywarp_core::verbs::rq::RecvQueue;
use anywarp_core::verbs::wr::{Payload, RecvRequest, WorkRequest};
use anywarp_core::wire::control::{Control, Handover};

use super::shm::{self, Shm};
use super::tcp::{Outcome, Tcp};
use crate::clock;
use crate::config::Framing;
use crate::engine::{Engine, engine};
use crate::fd::EngineFd;

/// Number of requests after which the tested end offers memory, or a trunk.
const OFFER_AFTER: u32 = 2;

/// A connection of this process to itself: the tested end and the peer's end. The peer's end sends a reset if it is
/// dropped first, so that the ports are free at once.
pub(super) fn connection() -> io::Result<(TcpStream, TcpStream)> {
    thread_local! {
        static LISTENER: RefCell<Option<TcpListener>> = const { RefCell::new(None) };
    }
    LISTENER.with_borrow_mut(|kept| {
        let listener = match kept {
            Some(listener) => listener,
            None => kept.insert(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?),
        };
        let theirs = TcpStream::connect(listener.local_addr()?)?;
        let (ours, _) = listener.accept()?;
        for end in [&theirs, &ours] {
            end.set_nonblocking(true)?;
        }
        let _ = rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO));
        Ok((ours, theirs))
    })
}

/// The FPDU that contains a ULPDU.
pub(super) fn fpdu(ulpdu: &[u8], crc: bool) -> Vec<u8> {
    let mut out = (ulpdu.len() as u16).to_be_bytes().to_vec();
    out.extend_from_slice(ulpdu);
    out.resize(out.len().next_multiple_of(4), 0);
    let sum = if crc { Crc32c::of(&out) } else { [0; 4] };
    out.extend_from_slice(&sum);
    out
}

/// A signaled Send.
pub(super) fn send_of(id: u64, payload: Payload) -> WorkRequest {
    WorkRequest {
        id,
        payload,
        signaled: true,
        ..WorkRequest::blank()
    }
}

/// The tested end, and its peer.
pub(super) struct Both {
    pub(super) engine: &'static Engine,
    pub(super) conn: Connection,
    pub(super) tcp: Tcp,
    pub(super) peer: Option<TcpStream>,
    /// The addresses of the peer's end and of the tested end.
    pub(super) addresses: (SocketAddr, SocketAddr),
    /// The memory that the peer has offered or accepted.
    memory: Option<Shm>,
    /// Whether the peer's stream goes through that memory.
    shared: bool,
    pub(super) crc: bool,
    /// Whether the peer has sent the proof that it opened the memory of the tested end.
    has_proved: bool,
}

impl Both {
    /// `choice`: bit 0 makes the tested end the initiator, bit 1 tells it that the peer is anywarp, and bit 2 switches CRCs on.
    pub(super) fn new(choice: u8) -> io::Result<Self> {
        Self::with_inline(choice, 64)
    }

    /// `inline`: the longest inline data.
    fn with_inline(choice: u8, inline: u32) -> io::Result<Self> {
        let engine = engine()?;
        let (ours, peer) = connection()?;
        let addresses = (peer.local_addr()?, ours.local_addr()?);
        let cq = Arc::new(Cq::new(4096, None));
        let mut conn = Connection::new(Parts {
            rnic: Arc::clone(&engine.rnic),
            qpn: 1,
            pd: 1,
            send_cq: Arc::clone(&cq),
            recv_cq: cq,
            rq: RecvQueue::Own {
                requests: VecDeque::new(),
                max_wr: 64,
                max_sge: 1,
            },
            capacity: Capacity {
                max_send_wr: 256,
                max_recv_wr: 64,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: inline,
            },
            sig_all: true,
        });
        conn.set_state(State::Rts);
        let crc = choice & 4 != 0;
        let config = StreamConfig {
            crc,
            mulpdu: 1442,
            mulpdu_anywarp: 60_000,
            peer: if choice & 2 != 0 {
                Peer::Anywarp
            } else {
                Peer::Unknown
            },
            ird: 4,
            ord: 4,
            initiator: choice & 1 != 0,
            first: if choice & 1 != 0 {
                First::Hello
            } else {
                First::Nothing
            },
            managed: true,
            stays: false,
            markers: false,
            offer_after: OfferAfter {
                shm: Some(OFFER_AFTER),
                trunk: Some(OFFER_AFTER),
            },
        };
        conn.attach(config, clock::now());
        let fd = EngineFd::new(ours.into());
        Ok(Self {
            engine,
            conn,
            tcp: Tcp::new(fd, None, Vec::new(), Framing::Large),
            peer: Some(peer),
            addresses,
            memory: None,
            shared: false,
            crc,
            has_proved: false,
        })
    }

    /// Sends bytes of the peer, through the memory if its stream has switched.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if self.shared
            && let Some(memory) = &mut self.memory
        {
            let mut batch = TxBatch::default();
            batch.push_raw(bytes);
            let _ = memory.send(&batch, 0);
        } else if let Some(peer) = &mut self.peer {
            let _ = peer.write(bytes);
        }
    }

    pub(super) fn control(&mut self, what: Control) {
        let bytes = fpdu(&what.header().emit(), self.crc && !self.shared);
        self.send(&bytes);
    }

    /// Makes the tested end send, and offer memory when an offer is due. Returns false if its stream has ended.
    pub(super) fn transmit(&mut self) -> bool {
        if self.conn.next_offer() == Some(Carrier::SharedMemory) {
            self.tcp.offer_shm(&mut self.conn);
        }
        let now = clock::now();
        self.tcp
            .transmit(self.engine, &mut self.conn, now, true)
            .is_open()
    }

    /// Makes the tested end receive. Returns false if its stream has ended.
    pub(super) fn receive(&mut self, socket: bool) -> bool {
        let now = clock::now();
        let open = self
            .tcp
            .receive(self.engine, &mut self.conn, now, socket)
            .is_open();
        assert!(
            !self.tcp.receives_by_memory() || self.has_proved || self.memory.is_some(),
            "the stream is read from the memory although the peer has not proved that it opened it"
        );
        open
    }
}

impl Outcome {
    fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }
}

/// Runs one stream whose peer executes the commands in `data`.
pub(crate) fn fuzz(data: &[u8]) {
    let before = shm::held();
    if let Ok(mut both) = Both::new(data.first().copied().unwrap_or(0)) {
        run(&mut both, data.get(1..).unwrap_or(&[]));
        // The peer's end is dropped first, so it resets the connection.
        both.peer = None;
    }
    if cfg!(fuzzing) {
        assert_eq!(
            shm::held(),
            before,
            "shared memory or an offer of the stream was not released"
        );
    }
}

fn run(both: &mut Both, data: &[u8]) {
    let mut rest = data.iter().copied();
    while let Some(op) = rest.next() {
        let mut byte = || rest.next().unwrap_or(0);
        let small = byte();
        let open = match op % 16 {
            0 => {
                both.control(Control::Hello {
                    version: 1,
                    features: u32::from(small),
                });
                true
            }
            // Offers memory that was created for this connection.
            1 => {
                let (theirs, ours) = both.addresses;
                both.memory = Shm::offer(theirs, ours);
                if let Some((pid, fd)) = both.memory.as_ref().and_then(Shm::name) {
                    both.control(Control::Handover(Handover::Offer { pid, fd }));
                }
                true
            }
            // Offers any descriptor of this process or of others.
            2 => {
                let pid = match small % 5 {
                    0 => 0,
                    1 => 1,
                    2 => u32::MAX,
                    3 => u32::from(byte()),
                    _ => std::process::id(),
                };
                let fd = if small & 0x80 == 0 {
                    u32::from(byte())
                } else {
                    u32::MAX - u32::from(byte())
                };
                both.control(Control::Handover(Handover::Offer { pid, fd }));
                true
            }
            // The peer opens the offered memory, and sends a Take.
            3 => {
                let (theirs, ours) = both.addresses;
                if let Some((pid, fd)) = both.tcp.offered() {
                    both.memory = Shm::take(pid, fd, theirs, ours);
                    if let Some(proof) = both.memory.as_ref().map(Shm::proof) {
                        both.control(Control::Handover(Handover::Take { proof }));
                        both.has_proved = true;
                        both.shared = true;
                    }
                }
                true
            }
            4 => {
                let known = both.memory.as_ref().map_or(0, Shm::proof);
                let proof = known ^ (1 << (small % 64));
                both.control(Control::Handover(Handover::Take { proof }));
                true
            }
            5 => {
                both.control(Control::Handover(Handover::Refuse));
                true
            }
            6 => {
                both.control(Control::Handover(Handover::Switch));
                both.shared = both.memory.is_some();
                true
            }
            // Bytes on the connection, whether or not the stream uses it.
            7 => {
                let bytes = vec![byte(); usize::from(small) * 16];
                if let Some(peer) = &mut both.peer {
                    let _ = peer.write(&bytes);
                }
                true
            }
            8 => both.transmit(),
            9 => both.receive(small & 1 != 0),
            // A Send of a few bytes, or bytes that are not an FPDU, on the carrier of the peer's stream.
            10 => {
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
                        byte(),
                        0,
                        0,
                        0,
                        0,
                    ][..],
                    &[small; 8],
                ]
                .concat();
                let bytes = fpdu(&ulpdu, both.crc && !both.shared);
                both.send(&bytes);
                true
            }
            11 => {
                let bytes = vec![byte(); usize::from(small) + 1];
                both.send(&bytes);
                true
            }
            // Overwrites one of the first 256 words of the memory, which contain the positions and flags.
            12 => {
                let value = u64::from_le_bytes(std::array::from_fn(|_| byte()));
                if let Some(memory) = &both.memory {
                    memory.overwrite(usize::from(small) * 8, value);
                }
                true
            }
            13 => {
                let _ = both.conn.post_send(send_of(1, Payload::empty()));
                both.transmit()
            }
            14 => {
                let _ = both.conn.post_recv(RecvRequest {
                    id: 2,
                    sges: Default::default(),
                });
                true
            }
            _ => {
                if small & 1 == 0 {
                    both.peer = None;
                } else if let Some(peer) = &mut both.peer {
                    let _ = peer.read(&mut [0; 4096]);
                }
                true
            }
        };
        if !open {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use anywarp_core::verbs::access::Access;
    use anywarp_core::verbs::mr::{Region, Registration};
    use anywarp_core::verbs::wr::Sge;

    use super::*;
    use crate::random::random_u32;
    use crate::reactor::PolledMemory as _;
    use crate::sys::socket::set_option;

    /// The first step of sending fills the ring, and the second one finds no room.
    #[test]
    fn a_sleeping_peer_is_woken_for_a_list_that_fills_the_ring() {
        let mut both = Both::with_inline(1 | 2 | 4, 2048).unwrap();
        run(&mut both, &[8, 0, 0, 2, 9, 0, 1, 0, 9, 0, 8, 0, 6, 0, 9, 0]);
        assert!(!both.tcp.sends_by_socket());
        let mut received = [0; 4096];
        let mut peer = both.peer.take().unwrap();
        let _ = peer.read(&mut received);
        let watch = Arc::clone(both.memory.as_ref().unwrap().watch());
        assert!(!watch.prepare_sleep(false));
        for id in 0..200 {
            let request = send_of(id, Payload::Inline(vec![0; 2048].into()));
            both.conn.post_send(request).unwrap();
        }
        let now = clock::now();
        let sent = both.tcp.transmit_posted(both.engine, &mut both.conn, now);
        assert_eq!(sent, None);
        assert!(both.transmit());
        assert!(both.tcp.blocked, "the ring is full");
        peer.set_nonblocking(false).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert_eq!(peer.read(&mut received).unwrap(), 1);
    }

    /// A stream without CRCs, and the region of a Send of `LEN` bytes, of which the socket has taken the first ones. `choice`: see
    /// [`Both::new`].
    fn sending(choice: u8) -> (Both, Arc<Region>, Box<[u8]>) {
        const LEN: usize = 768 << 10;
        let mut both = Both::new(choice).unwrap();
        set_option(
            both.tcp.fd().get(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            16 << 10,
        );
        both.control(Control::Hello {
            version: 1,
            features: 0,
        });
        assert!(both.receive(true));
        let memory = vec![1_u8; LEN].into_boxed_slice();
        let at = memory.as_ptr().expose_provenance() as u64;
        let what = Registration {
            start: at,
            len: LEN as u64,
            base: at,
            access: Access::LOCAL_WRITE,
            pd: 1,
            present: None,
        };
        let regions = &both.engine.rnic.regions;
        let region = regions.register(&what, &mut random_u32).unwrap();
        let sge = Sge {
            addr: at,
            len: LEN as u32,
            lkey: region.stag(),
        };
        let payload = Payload::Sges(smallvec::smallvec![sge]);
        both.conn.post_send(send_of(1, payload)).unwrap();
        assert!(both.transmit());
        assert!(both.tcp.blocked, "the socket is full");
        (both, region, memory)
    }

    /// A batch contains the whole message, and refers to its memory. The completion of the Send permits the program to use this memory for
    /// something else, so the rest of the message is not read from there.
    #[test]
    fn a_send_that_is_acknowledged_before_it_is_sent_ends_the_stream() {
        let (mut both, region, _memory) = sending(1);
        both.control(Control::Ack { seq: 1 });
        assert!(both.receive(true));
        let mut peer = both.peer.take().unwrap();
        let mut room = vec![0; 1 << 20];
        let mut any = false;
        while peer.read(&mut room).is_ok() || !any {
            any = true;
        }
        both.tcp.blocked = false;
        let outcome = both
            .tcp
            .transmit(both.engine, &mut both.conn, clock::now(), true);
        assert_eq!(outcome, Outcome::Broken(libc::EPROTO));
        both.engine.rnic.regions.deregister(&region).unwrap();
    }

    /// The segments are short, so their payload is copied, and the batch contains only the first ones.
    #[test]
    fn a_send_that_is_acknowledged_before_it_is_framed_ends_the_stream() {
        let (mut both, region, _memory) = sending(1 | 2);
        both.control(Control::Ack { seq: 1 });
        both.receive(true);
        assert_eq!(both.conn.state(), State::Error);
        both.engine.rnic.regions.deregister(&region).unwrap();
    }

    #[test]
    fn any_hand_over_messages_of_a_peer_are_handled() {
        crate::net::tests::replay("handover", fuzz);
    }

    /// Inputs of the fuzzer complete a hand-over in both roles.
    #[test]
    fn a_hand_over_succeeds_in_both_roles() {
        // The peer offers memory, and its stream switches when it has received the Take.
        let mut both = Both::new(1 | 2 | 4).unwrap();
        run(&mut both, &[8, 0, 0, 2, 9, 0, 1, 0, 9, 0, 8, 0, 6, 0, 9, 0]);
        assert!(both.tcp.receives_by_memory(), "as the end that takes");
        // The tested end offers memory after two requests.
        let mut both = Both::new(2 | 4).unwrap();
        run(&mut both, &[0, 2, 9, 0, 13, 0, 13, 0, 8, 0, 3, 0, 9, 0]);
        assert!(both.tcp.receives_by_memory(), "as the end that offers");
    }
}
