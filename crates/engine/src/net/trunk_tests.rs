//! Trunks whose peer is a plain socket, or another trunk of this process.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use anywarp_core::llp::mpa::frame::TxBatch;
use anywarp_core::wire::trunk::{HEADER, Header, Kind, MAX};

use super::tcp::Outcome;
use super::trunk::{self, Member, OPENED, Trunk};
use crate::clock;
use crate::engine::{Engine, engine};
use crate::fd::EngineFd;
use crate::reactor::together;
use crate::sys::Io;

/// Longest wait for something that has to happen.
const WAIT: Duration = Duration::from_secs(20);
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A trunk, the numbers of a queue pair and of its peer, and the number of bytes that it sends.
type Wanted = (Arc<Trunk>, u32, u32, usize);

/// A queue pair that records what it receives.
#[derive(Default)]
struct Recorder {
    bytes: Mutex<Vec<u8>>,
    ends: Mutex<usize>,
    lost: Mutex<Vec<(Outcome, bool)>>,
    /// What is sent when there is room again.
    wants: Mutex<Option<Wanted>>,
    /// The order in which queue pairs had room.
    order: Arc<Mutex<Vec<u32>>>,
}

impl Member for Recorder {
    fn receive_frame(
        &self,
        _trunk: &Arc<Trunk>,
        _channel: u32,
        bytes: &[u8],
        _now: Instant,
    ) -> bool {
        self.bytes.lock().unwrap().extend_from_slice(bytes);
        false
    }

    fn receive_end(&self, _trunk: &Arc<Trunk>, _channel: u32, _now: Instant) {
        *self.ends.lock().unwrap() += 1;
    }

    fn trunk_has_room(&self, _now: Instant) {
        let Some((trunk, own, peer, len)) = self.wants.lock().unwrap().take() else {
            return;
        };
        let sent = send(&trunk, (own, peer), &vec![1; len]);
        assert!(matches!(sent, Io::Done(n) if n == len));
        trunk.flush();
        self.order.lock().unwrap().push(own);
    }

    fn trunk_lost(&self, _channel: u32, outcome: Outcome, all_taken: bool, _now: Instant) {
        self.lost.lock().unwrap().push((outcome, all_taken));
    }
}

fn send(trunk: &Trunk, channels: (u32, u32), bytes: &[u8]) -> Io {
    let mut batch = TxBatch::default();
    batch.push_raw(bytes);
    trunk.send(engine().unwrap(), channels, &batch, 0, false)
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    (one, other)
}

fn trunk_on(socket: TcpStream, opened_here: bool) -> Arc<Trunk> {
    socket.set_nonblocking(true).unwrap();
    let engine: &'static Engine = engine().unwrap();
    let fd = EngineFd::new(OwnedFd::from(socket));
    let trunk = Trunk::new(engine, (4, HOST, opened_here), fd, Vec::new(), |_| {}).unwrap();
    if opened_here {
        trunk.begin();
    }
    trunk
}

fn as_member(recorder: &Arc<Recorder>) -> Weak<dyn Member> {
    let member: Arc<dyn Member> = Arc::clone(recorder) as _;
    Arc::downgrade(&member)
}

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let begin = clock::now();
    while !done() {
        assert!(begin.elapsed() < WAIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn frame(channel: u32, kind: Kind, body: &[u8]) -> Vec<u8> {
    let header = Header {
        channel,
        kind,
        len: body.len(),
    };
    let mut bytes = header.emit().to_vec();
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn frames_arrive_at_their_queue_pairs_however_the_bytes_are_divided() {
    let (ours, mut peer) = sockets();
    peer.set_nodelay(true).unwrap();
    let trunk = trunk_on(ours, true);
    assert_eq!(trunk.name_at_peer(), trunk.name() ^ OPENED);
    let recorders = [(); 3].map(|()| Arc::new(Recorder::default()));
    let [a, b, offered] = &recorders;
    let channels = [a, b].map(|r| trunk.join(as_member(r)).unwrap());
    // A queue pair that has offered the trunk is known before it joins.
    let late = trunk::offer(as_member(offered), HOST);
    let of_others = trunk::offer(as_member(offered), IpAddr::from([127, 0, 0, 9]));
    let mut sent = Vec::new();
    for n in 0..40_u8 {
        sent.extend(frame(channels[usize::from(n % 2)], Kind::Data, &[n; 33]));
        sent.extend(frame(late, Kind::Data, &[n]));
        // The trunk was offered to another host.
        sent.extend(frame(of_others, Kind::Data, b"wrong"));
        // There is no such queue pair.
        sent.extend(frame(late ^ channels[0], Kind::Data, &[n; 7]));
    }
    sent.extend(frame(channels[0], Kind::Data, &vec![9; MAX]));
    sent.extend(frame(channels[1], Kind::End, &[]));
    for (n, piece) in sent.chunks(251).enumerate() {
        peer.write_all(piece).unwrap();
        if n % 3 == 0 {
            trunk.receive(clock::now());
        }
    }
    let expected = |which: u8| -> Vec<u8> {
        let mine = (0..40).filter(|n| n % 2 == which);
        mine.flat_map(|n| [n; 33]).collect()
    };
    wait_for("the end", || *b.ends.lock().unwrap() == 1);
    assert_eq!(*b.bytes.lock().unwrap(), expected(1));
    let mut longest = expected(0);
    longest.extend(vec![9; MAX]);
    assert_eq!(*a.bytes.lock().unwrap(), longest);
    assert_eq!(*offered.bytes.lock().unwrap(), (0..40).collect::<Vec<u8>>());
    assert!(trunk.join_offered(late));
    assert!(!trunk.join_offered(late), "it has joined already");
    // The end of the connection is the end of all queue pairs. All bytes are read first, so that closing the socket sends no reset.
    peer.read_exact(&mut [0; HEADER]).unwrap();
    drop(peer);
    for recorder in &recorders {
        wait_for("the end of the trunk", || {
            !recorder.lost.lock().unwrap().is_empty()
        });
        assert_eq!(*recorder.lost.lock().unwrap(), [(Outcome::Eof, true)]);
    }
    assert!(!trunk.is_open());
    assert!(trunk.join(as_member(a)).is_none());
    assert!(matches!(send(&trunk, (1, 2), &[0]), Io::WouldBlock));
}

#[test]
fn a_damaged_frame_ends_the_trunk() {
    let (ours, mut peer) = sockets();
    let trunk = trunk_on(ours, false);
    let recorder = Arc::new(Recorder::default());
    let channel = trunk.join(as_member(&recorder)).unwrap();
    let mut bytes = frame(channel, Kind::Data, b"right");
    let mut damaged = frame(channel, Kind::Data, b"wrong");
    damaged[HEADER - 1] ^= 1;
    bytes.extend(damaged);
    peer.write_all(&bytes).unwrap();
    wait_for("the end", || !recorder.lost.lock().unwrap().is_empty());
    let lost = recorder.lost.lock().unwrap().clone();
    assert_eq!(lost, [(Outcome::Broken(libc::EPROTO), false)]);
    assert_eq!(*recorder.bytes.lock().unwrap(), b"right");
    // The peer must not take what it has sent behind the frame as received.
    let error = peer.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// After a reset, the peers of the trunk's queue pairs do not believe that their data was received.
#[test]
fn a_trunk_that_ends_with_an_error_is_reset() {
    let (one, other) = sockets();
    let mut damage = one.try_clone().unwrap();
    let (sender, receiver) = (trunk_on(one, true), trunk_on(other, false));
    let recorder = Arc::new(Recorder::default());
    let _own = sender.join(as_member(&recorder)).unwrap();
    let mut damaged = frame(1, Kind::Data, b"wrong");
    damaged[HEADER - 1] ^= 1;
    damage.write_all(&damaged).unwrap();
    wait_for("the end", || !recorder.lost.lock().unwrap().is_empty());
    let lost = recorder.lost.lock().unwrap().clone();
    assert!(
        matches!(lost[..], [(Outcome::Broken(_), false)]),
        "{lost:?}"
    );
    assert!(receiver.join(as_member(&recorder)).is_none());
}

/// A trunk without queue pairs ends when it has been idle for long enough, not at a deadline that an earlier idle time has set.
#[test]
fn a_trunk_ends_a_while_after_its_last_queue_pair_has_left() {
    let (ours, _peer) = sockets();
    let trunk = trunk_on(ours, true);
    let recorder = Arc::new(Recorder::default());
    let timeout = |now| crate::reactor::Source::timeout(Arc::clone(&trunk), now);
    let second = Duration::from_secs(1);
    let channel = trunk.join(as_member(&recorder)).unwrap();
    timeout(clock::now() + 10 * second);
    assert!(trunk.is_open(), "it has a queue pair");
    let left = clock::now();
    trunk.leave(channel);
    timeout(left + second / 2);
    assert!(trunk.is_open(), "it is idle for half a second");
    timeout(clock::now() + second);
    assert!(!trunk.is_open());
}

#[test]
fn what_several_queue_pairs_add_is_sent_together() {
    let (ours, mut peer) = sockets();
    let trunk = trunk_on(ours, true);
    // The end that opened the trunk begins with an empty frame.
    let mut first = [0; HEADER];
    (&peer).read_exact(&mut first).unwrap();
    assert_eq!(first.as_slice(), frame(0, Kind::Data, &[]));
    peer.set_nonblocking(true).unwrap();
    let mut bytes = [0; 256];
    together(|| {
        for own in [10, 11] {
            assert!(matches!(send(&trunk, (own, own), b"abc"), Io::Done(3)));
            trunk.flush();
        }
        assert!(peer.read(&mut bytes).is_err(), "nothing is sent yet");
    });
    peer.set_nonblocking(false).unwrap();
    let mut both = [0; 2 * (HEADER + 3)];
    peer.read_exact(&mut both).unwrap();
    let mut expected = frame(10, Kind::Data, b"abc");
    expected.extend(frame(11, Kind::Data, b"abc"));
    assert_eq!(both.as_slice(), expected);
    assert!(matches!(send(&trunk, (10, 10), b"d"), Io::Done(1)));
    trunk.flush();
    peer.read_exact(&mut both[..HEADER + 1]).unwrap();
}

/// Queue pairs that found no room send in the order in which they asked, and no other queue pair overtakes them.
#[test]
fn queue_pairs_wait_for_room_in_order() {
    let (ours, mut peer) = sockets();
    let trunk = trunk_on(ours, true);
    let order = Arc::new(Mutex::new(Vec::new()));
    let recorders: Vec<_> = (0..3)
        .map(|_| {
            Arc::new(Recorder {
                order: Arc::clone(&order),
                ..Recorder::default()
            })
        })
        .collect();
    let own: Vec<u32> = { recorders.iter() }
        .map(|r| trunk.join(as_member(r)).unwrap())
        .collect();
    let mut sent = 0;
    while let Io::Done(n) = send(&trunk, (7, 7), &[0; 50_000]) {
        trunk.flush();
        sent += n;
        assert!(sent < 1 << 30, "the peer does not read");
    }
    for (recorder, own) in recorders.iter().zip(&own) {
        *recorder.wants.lock().unwrap() = Some((Arc::clone(&trunk), *own, 70, 40_000));
        assert!(matches!(send(&trunk, (*own, 70), &[1]), Io::WouldBlock));
    }
    let mut received = 0;
    let mut bytes = vec![0; 1 << 20];
    peer.set_read_timeout(Some(WAIT)).unwrap();
    while order.lock().unwrap().len() < 3 {
        received += peer.read(&mut bytes).unwrap();
    }
    let waited = order.lock().unwrap().clone();
    assert_eq!(waited, own);
    let total = sent + 3 * 40_000;
    while received < total {
        received += peer.read(&mut bytes).unwrap();
    }
}
