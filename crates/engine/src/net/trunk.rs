//! A trunk: one TCP connection that carries the streams of many queue pairs of two processes.
//!
//! Without a trunk, each queue pair needs its own system calls, segments and acknowledgements of TCP, and the kernel's part of the work grows
//! with the number of queue pairs. On a trunk one system call sends what several queue pairs have added
//! ([`together`]), and one receives it. The format is in [`anywarp_core::wire::trunk`], the hand-over
//! of a stream in `core/src/connection/handover.rs`.
//!
//! A frame never waits for a queue pair: a Send without a receive is answered with a receiver-not-ready. So a queue pair that
//! its program neglects does not block the others.

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use anywarp_core::llp::mpa::frame::{Run, TxBatch};
use anywarp_core::wire::trunk::{HEADER, Header, Kind, MAX};
use smallvec::SmallVec;

use crate::clock;
use crate::engine::{DeviceListener, Engine};
use crate::fd::EngineFd;
use crate::locks::{Mutex, Rank};
use crate::log;
use crate::net::congestion::Congestion;
use crate::net::drain;
use crate::net::outcome::Outcome;
use crate::process::{Inherited, PerProcess};
use crate::random::random_u32;
use crate::reactor::{RX_BUFFER_LEN, SharedSender, Source, Token, added, together};
use crate::sys::socket::{set_option, unacknowledged};
use crate::sys::thread::Uncancelled;
use crate::sys::{Io, stream, thread};

/// When this many bytes wait in the trunk's buffer, they are sent at once, without waiting for other queue pairs.
const SEND_AT: usize = 128 << 10;
/// Unsent bytes at which no more may be added.
const PENDING_MAX: usize = 256 << 10;
/// Unsent bytes at which not even the last messages of a stream that ends may be added.
const PENDING_MAX_ENDING: usize = 2 * PENDING_MAX;
/// Bytes that are received before other sources have their turn.
const RX_TURN_BYTES: usize = 1 << 20;
/// How long received frames are handled, or waiting queue pairs send, before other sources have their turn.
const TURN_TIME: Duration = Duration::from_micros(200);
/// A polling thread that waits for the rest of a message that has arrived in part gives up when no bytes have arrived for this time.
pub(crate) const REST_PAUSE_MAX: Duration = Duration::from_micros(60);
/// A polling thread waits no longer than this for the rest of a message. 1 MiB takes 0.2 to 0.4 ms.
pub(crate) const REST_TIME_MAX: Duration = Duration::from_millis(1);
/// A batch of at least this number of bytes is sent without being copied.
const UNCOPIED: usize = 32 << 10;
/// Largest number of turns for receiving what has already arrived, after sending has failed.
const LAST_TURNS: usize = 256;
/// How long the end that opened a trunk keeps it without queue pairs.
const IDLE: Duration = Duration::from_secs(1);
/// How long the end that accepted a trunk keeps it without queue pairs. The time is longer than [`IDLE`], so that the end that opened the
/// trunk decides.
const IDLE_ACCEPTED: Duration = Duration::from_secs(30);

/// The bit that is set in the name of the end that opened the trunk.
pub(crate) const OPENED: u32 = 1;

/// A queue pair whose stream a trunk carries.
pub(crate) trait Member: Send + Sync {
    /// Bytes of the stream have arrived. Returns whether they have completed the last posted request.
    fn receive_frame(&self, trunk: &Arc<Trunk>, channel: u32, bytes: &[u8], now: Instant) -> bool;
    /// The peer's queue pair has left the trunk.
    fn receive_end(&self, trunk: &Arc<Trunk>, channel: u32, now: Instant);
    /// The trunk has room again.
    fn trunk_has_room(&self, now: Instant);
    /// The trunk has ended. `all_taken`: the peer's host has acknowledged all bytes.
    fn trunk_lost(&self, channel: u32, outcome: Outcome, all_taken: bool, now: Instant);
}

/// The trunks of this process.
static ALL: PerProcess<Mutex<Vec<Weak<Trunk>>>> =
    PerProcess::new(|| Mutex::new(Rank::OpenTrunks, Vec::new()));

/// Exit handler: waits until the peers have acknowledged everything sent by queue pairs that have left, as is done for a queue pair's own
/// connection ([`drain`]).
extern "C" fn at_exit() {
    drain::wait_at_exit(|| {
        // A signal handler may call `exit` while its thread holds the lock.
        let Some(all) = ALL.get().try_lock() else {
            return false;
        };
        { all.iter() }.filter_map(Weak::upgrade).all(|trunk| {
            let is_left = trunk.is_left.load(Ordering::Relaxed);
            let all_sent = trunk.sending.try_lock().is_some_and(|s| s.pending() == 0);
            !is_left || all_sent && unacknowledged(trunk.fd.get()) == 0
        })
    });
}

/// A queue pair for which a trunk was offered, and the peer's host.
type Offered = (Weak<dyn Member>, IpAddr);

/// Queue pairs of this process for which a trunk was offered, by their number on it. Frames may arrive before the peer's last
/// message on their TCP connection.
static OFFERED: PerProcess<Mutex<HashMap<u32, Offered>>> =
    PerProcess::new(|| Mutex::new(Rank::TrunkOffers, HashMap::new()));

/// A process that accepts trunks, as seen from a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    /// The local address of the queue pair's connection. The peer accepts the queue pair only on a trunk from the same address.
    pub(crate) local: IpAddr,
    /// The address and port at which the process accepts trunks.
    pub(crate) address: SocketAddr,
    /// The number that the process expects from those who open a trunk. The port may belong to another process meanwhile.
    pub(crate) token: u32,
}

/// The channel of a frame for no queue pair. The end that opened a trunk sends such a frame first.
const NO_CHANNEL: u32 = 0;

/// A number for a queue pair of this process on a trunk. Other peers must not be able to guess it.
fn new_channel(is_free: impl Fn(u32) -> bool) -> u32 {
    loop {
        let channel = random_u32();
        if channel != NO_CHANNEL && is_free(channel) {
            return channel;
        }
    }
}

/// Allocates the number under which a queue pair is offered to a peer of host `peer`.
pub(crate) fn offer(member: Weak<dyn Member>, peer: IpAddr) -> u32 {
    let mut offered = OFFERED.get().lock();
    let channel = new_channel(|channel| !offered.contains_key(&channel));
    offered.insert(channel, (member, peer));
    channel
}

/// Withdraws an offer.
pub(crate) fn withdraw(channel: u32) -> Option<Weak<dyn Member>> {
    let offered = OFFERED.get().lock().remove(&channel);
    offered.map(|(member, _)| member)
}

/// Bytes to send.
#[derive(Debug)]
struct Sending {
    bytes: Vec<u8>,
    /// Bytes of `bytes` that are sent.
    sent: usize,
    /// Whether the socket is full.
    blocked: bool,
    /// Whether readiness events for writing are on.
    watched: bool,
    /// Whether a thread will send the bytes at the end of its call of [`together`].
    is_added: bool,
    /// Queue pairs that wait for room, in the order in which they may send.
    waiting: VecDeque<u32>,
    /// The queue pairs that have waited and may send now, one for each thread in [`Trunk::handle_writable`].
    turns: SmallVec<[u32; 2]>,
    /// The error with which sending has failed.
    failed: Option<i32>,
    total: u64,
    congestion: Congestion,
}

impl Sending {
    fn pending(&self) -> usize {
        self.bytes.len() - self.sent
    }
}

/// Received bytes.
#[derive(Debug, Default)]
struct Receiving {
    /// A frame that has arrived in part.
    rest: Vec<u8>,
    ended: bool,
}

/// The queue pairs of this end.
struct Members {
    by_channel: HashMap<u32, Seated>,
    /// Since when there is none.
    idle_since: Instant,
    /// Whether none may join any more.
    closed: bool,
}

struct Seated {
    member: Weak<dyn Member>,
    /// How long the peer's host may be silent, in milliseconds.
    silence: i32,
}

impl Seated {
    fn new(member: Weak<dyn Member>) -> Self {
        Self { member, silence: 0 }
    }
}

/// One end of a trunk.
pub(crate) struct Trunk {
    engine: &'static Engine,
    /// The number that the end that opened the trunk has chosen. It is even.
    number: u32,
    /// The peer's host.
    pub(crate) peer: IpAddr,
    opened_here: bool,
    fd: EngineFd,
    token: OnceLock<Token>,
    me: Weak<Self>,
    members: Mutex<Members>,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
    ended: AtomicBool,
    /// Whether a queue pair has left the trunk.
    is_left: AtomicBool,
    /// Whether the peer knows that the trunk is open.
    is_used: AtomicBool,
    on_first_use: fn(&Arc<Self>),
    /// Bytes that were received.
    received: AtomicU64,
    /// How long TCP waits for acknowledgements, in milliseconds.
    silence: AtomicI32,
}

impl std::fmt::Debug for Trunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Trunk(0x{:08x})", self.number)
    }
}

impl Trunk {
    /// A trunk over a connected socket, from which `received` was read already. `on_first_use` is called at the end that accepted the trunk when
    /// the first bytes arrive. Before, the other end may not know that the trunk is open.
    pub(crate) fn new(
        engine: &'static Engine,
        (number, peer, opened_here): (u32, IpAddr, bool),
        fd: EngineFd,
        received: Vec<u8>,
        on_first_use: fn(&Arc<Self>),
    ) -> std::io::Result<Arc<Self>> {
        // The calls below are cancellation points, at which the program's thread must not be cancelled.
        let _inside = Uncancelled::new();
        let congestion = Congestion::settle(fd.get());
        let trunk = Arc::new_cyclic(|me| Self {
            engine,
            number,
            peer,
            opened_here,
            fd,
            token: OnceLock::new(),
            me: Weak::clone(me),
            members: Mutex::new(
                Rank::TrunkMembers,
                Members {
                    by_channel: HashMap::new(),
                    idle_since: clock::now(),
                    closed: false,
                },
            ),
            sending: Mutex::new(
                Rank::TrunkSend,
                Sending {
                    bytes: Vec::new(),
                    sent: 0,
                    blocked: false,
                    watched: false,
                    is_added: false,
                    waiting: VecDeque::new(),
                    turns: SmallVec::new(),
                    failed: None,
                    total: 0,
                    congestion,
                },
            ),
            receiving: Mutex::new(
                Rank::TrunkReceive,
                Receiving {
                    rest: received,
                    ended: false,
                },
            ),
            ended: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            is_used: AtomicBool::new(opened_here),
            on_first_use,
            received: AtomicU64::new(0),
            silence: AtomicI32::new(0),
        });
        let source: Arc<dyn Source> = Arc::clone(&trunk) as _;
        let token = engine.reserve(source);
        let _ = trunk.token.set(token);
        if let Err(e) = engine.watch(token, trunk.fd.get(), false) {
            engine.remove(token, None);
            return Err(e);
        }
        {
            let mut all = ALL.get().lock();
            all.retain(|trunk| trunk.strong_count() > 0);
            all.push(Weak::clone(&trunk.me));
        }
        static AT_EXIT: Inherited<()> = Inherited::new(|| thread::at_exit(at_exit));
        AT_EXIT.get();
        let listener: Weak<dyn DeviceListener> = trunk.me.clone();
        engine.subscribe(listener);
        engine.deadline(token, clock::now() + trunk.idle());
        Ok(trunk)
    }

    /// Tells the end that accepted the trunk that this end knows it: queue pairs of both ends may use it from now on.
    pub(crate) fn begin(&self) {
        self.send_frame(NO_CHANNEL, Kind::Data);
        self.flush();
    }

    /// The name of this end, which the messages of its queue pairs contain. The two ends have different names, because both may be in one process.
    pub(crate) fn name(&self) -> u32 {
        self.number | if self.opened_here { OPENED } else { 0 }
    }

    /// The name of the other end.
    pub(crate) fn name_at_peer(&self) -> u32 {
        self.name() ^ OPENED
    }

    fn token(&self) -> Token {
        self.token.get().copied().unwrap_or(Token::NONE)
    }

    fn idle(&self) -> Duration {
        if self.opened_here {
            IDLE
        } else {
            IDLE_ACCEPTED
        }
    }

    /// Whether queue pairs may join.
    pub(crate) fn is_open(&self) -> bool {
        self.is_used.load(Ordering::Acquire) && !self.members.lock().closed
    }

    /// Bytes that were received so far.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    // ------------------------------------------------------------------ members

    /// Adds a queue pair and returns its number. `None` if the trunk has ended.
    pub(crate) fn join(&self, member: Weak<dyn Member>) -> Option<u32> {
        let mut members = self.members.lock();
        let channel = new_channel(|channel| !members.by_channel.contains_key(&channel));
        (!members.closed).then(|| {
            members.by_channel.insert(channel, Seated::new(member));
            channel
        })
    }

    /// Adds the queue pair that was offered as `channel`. Returns false if the trunk has ended.
    pub(crate) fn join_offered(&self, channel: u32) -> bool {
        let Some(member) = withdraw(channel) else {
            return false;
        };
        let mut members = self.members.lock();
        if members.closed || members.by_channel.contains_key(&channel) {
            return false;
        }
        members.by_channel.insert(channel, Seated::new(member));
        true
    }

    /// Removes a queue pair.
    pub(crate) fn leave(&self, channel: u32) {
        let mut members = self.members.lock();
        if members.by_channel.remove(&channel).is_none() || members.closed {
            return;
        }
        self.is_left.store(true, Ordering::Relaxed);
        if members.by_channel.is_empty() {
            members.idle_since = clock::now();
            let at = members.idle_since + self.idle();
            drop(members);
            self.engine.deadline(self.token(), at);
        } else {
            self.set_user_timeout(&members);
        }
    }

    fn member(&self, channel: u32) -> Option<Arc<dyn Member>> {
        let known = {
            let members = self.members.lock();
            let seated = members.by_channel.get(&channel);
            seated.map(|seated| Weak::clone(&seated.member))
        };
        // The peer may already send on the trunk before this end has read the peer's last message on the queue pair's own connection.
        let known = known.or_else(|| {
            let offered = OFFERED.get().lock();
            let (member, peer) = offered.get(&channel)?;
            (*peer == self.peer).then(|| Weak::clone(member))
        });
        known?.upgrade()
    }

    /// Sets how long the peer's host may be silent for a queue pair. `None`: no limit of its own, so the default of TCP applies.
    pub(crate) fn allow_silence(&self, channel: u32, limit: Option<Duration>) {
        let ms = limit.map_or(i32::MAX, |limit| {
            i32::try_from(limit.as_millis()).unwrap_or(i32::MAX)
        });
        let mut members = self.members.lock();
        if let Some(seated) = members.by_channel.get_mut(&channel)
            && seated.silence != ms
        {
            seated.silence = ms;
            self.set_user_timeout(&members);
        }
    }

    /// Sets how long TCP waits for the peer's host to acknowledge data: the longest time that any of the queue pairs permits.
    fn set_user_timeout(&self, members: &Members) {
        let silences = members.by_channel.values().map(|seated| seated.silence);
        let most = silences.max().unwrap_or(0);
        if self.silence.swap(most, Ordering::Relaxed) != most {
            // 0 selects the default of the system.
            let value = if most == i32::MAX { 0 } else { most };
            let level = libc::IPPROTO_TCP;
            set_option(self.fd.get(), level, libc::TCP_USER_TIMEOUT, value);
        }
    }

    // ------------------------------------------------------------------ sending

    /// Whether the queue pair with the number `own` may add bytes now. If it may not, its [`Member::trunk_has_room`] is called when it may.
    pub(crate) fn has_room(&self, own: u32) -> bool {
        self.may_add(&mut self.sending.lock(), own, false)
    }

    fn may_add(&self, sending: &mut Sending, own: u32, ends: bool) -> bool {
        if sending.failed.is_some() {
            // `trunk_lost` is called later, after everything that has arrived has been received.
            return false;
        }
        if sending.pending() >= SEND_AT {
            self.write(sending);
        }
        let most = if ends {
            PENDING_MAX_ENDING
        } else {
            PENDING_MAX
        };
        // A queue pair must not overtake those that wait already.
        let must_wait = !sending.waiting.is_empty() && !sending.turns.contains(&own) && !ends;
        let may = sending.pending() < most && !must_wait;
        if !may && !sending.waiting.contains(&own) {
            sending.waiting.push_back(own);
            self.watch_room(sending);
        }
        may
    }

    /// Adds the bytes of `batch` from `skip` on to what is sent to the peer's queue pair `channel`. `ends`: the stream is ending, and its
    /// last messages may exceed the limit.
    pub(crate) fn send(
        &self,
        engine: &Engine,
        (own, channel): (u32, u32),
        batch: &TxBatch,
        skip: usize,
        ends: bool,
    ) -> Io {
        let mut sending = self.sending.lock();
        if !self.may_add(&mut sending, own, ends) {
            return Io::WouldBlock;
        }
        if let Some(bytes) = batch.as_bytes().and_then(|bytes| bytes.get(skip..))
            && bytes.len() >= UNCOPIED
        {
            self.write(&mut sending);
            self.send_uncopied(&mut sending, channel, bytes);
            return Io::Done(bytes.len());
        }
        let before = sending.bytes.len();
        let added = append(engine, channel, batch, skip, &mut sending.bytes);
        match added {
            Some(n) => Io::Done(n),
            None => {
                sending.bytes.truncate(before);
                Io::Invalidated
            }
        }
    }

    /// Lets a queue pair wait until the others have had their turn.
    pub(crate) fn wait(&self, own: u32) {
        let mut sending = self.sending.lock();
        if !sending.waiting.contains(&own) {
            sending.waiting.push_back(own);
        }
        self.watch_room(&mut sending);
    }

    /// Sends frames with these bytes without copying them first. What the socket does not take is copied.
    fn send_uncopied(&self, sending: &mut Sending, channel: u32, bytes: &[u8]) {
        let frames: SmallVec<[_; 8]> = { bytes.chunks(MAX) }
            .map(|body| {
                let header = Header {
                    channel,
                    kind: Kind::Data,
                    len: body.len(),
                };
                (header.emit(), body)
            })
            .collect();
        let mut sent = 0;
        if sending.failed.is_none() && sending.pending() == 0 {
            let slices: SmallVec<[_; 16]> = { frames.iter() }
                .flat_map(|(header, body)| [IoSlice::new(header), IoSlice::new(body)])
                .collect();
            match stream::send_slices(self.fd.get(), &slices) {
                Io::Done(n) => sent = n,
                Io::WouldBlock => {}
                Io::Broken(e) => return self.failed(sending, e),
                _ => return self.failed(sending, libc::EPIPE),
            }
            sending.total += sent as u64;
        }
        for (header, body) in &frames {
            for part in [header.as_slice(), body] {
                let skip = sent.min(part.len());
                sent -= skip;
                sending
                    .bytes
                    .extend_from_slice(part.get(skip..).unwrap_or(&[]));
            }
        }
        self.write(sending);
    }

    /// Adds a frame without bytes.
    pub(crate) fn send_frame(&self, channel: u32, kind: Kind) {
        let mut sending = self.sending.lock();
        if sending.failed.is_none() {
            let header = Header {
                channel,
                kind,
                len: 0,
            };
            sending.bytes.extend_from_slice(&header.emit());
        }
    }

    /// Sends what was added, now or at the end of [`together`].
    pub(crate) fn flush(&self) {
        let mut sending = self.sending.lock();
        if sending.is_added || sending.blocked || sending.pending() == 0 {
            return;
        }
        if sending.pending() < SEND_AT
            && let Some(me) = self.me.upgrade()
        {
            let me: Arc<dyn SharedSender> = me;
            if added(&me) {
                sending.is_added = true;
                return;
            }
        }
        self.write(&mut sending);
    }

    fn write(&self, sending: &mut Sending) {
        while sending.failed.is_none() && sending.pending() > 0 {
            let unsent = sending.bytes.get(sending.sent..).unwrap_or(&[]);
            match stream::send_bytes(self.fd.get(), unsent) {
                Io::Done(n) => {
                    sending.sent += n;
                    sending.total += n as u64;
                }
                Io::WouldBlock => {
                    sending.congestion.check(self.fd.get(), clock::now());
                    break;
                }
                Io::Broken(e) => self.failed(sending, e),
                _ => self.failed(sending, libc::EPIPE),
            }
        }
        let blocked = sending.pending() > 0;
        if blocked {
            let sent = std::mem::take(&mut sending.sent);
            sending.bytes.drain(..sent);
        } else {
            sending.bytes.clear();
            sending.sent = 0;
        }
        sending.blocked = blocked;
        self.watch_room(sending);
    }

    /// Watches the socket for being writable while bytes or queue pairs wait. A queue pair can wait even when the socket is not full, because it
    /// must not overtake others; the event that the socket is writable gives each its turn.
    fn watch_room(&self, sending: &mut Sending) {
        let watched = sending.blocked || !sending.waiting.is_empty();
        if watched != sending.watched {
            sending.watched = watched;
            self.engine.want_write(self.token(), self.fd.get(), watched);
        }
    }

    /// Records that sending has failed. [`Source::timeout`] tells the queue pairs, because the locks that are held here must not be held then.
    #[cold]
    fn failed(&self, sending: &mut Sending, errno: i32) {
        sending.failed = Some(errno);
        sending.bytes.clear();
        sending.sent = 0;
        self.engine.deadline(self.token(), clock::now());
    }

    /// Bytes that the peer's host has acknowledged.
    pub(crate) fn taken_by_peer(&self) -> u64 {
        let total = self.sending.lock().total;
        total.saturating_sub(unacknowledged(self.fd.get()) as u64)
    }

    /// Continues after the socket was full.
    fn handle_writable(&self, now: Instant) {
        let begin = clock::now();
        together(|| {
            loop {
                let next = {
                    let mut sending = self.sending.lock();
                    if sending.blocked || sending.pending() >= SEND_AT {
                        self.write(&mut sending);
                    }
                    let is_full = sending.blocked && sending.pending() >= PENDING_MAX / 2;
                    let next = if is_full {
                        None
                    } else {
                        sending.waiting.pop_front()
                    };
                    sending.turns.extend(next);
                    self.watch_room(&mut sending);
                    next
                };
                let Some(channel) = next else { return };
                // A queue pair that finds no room waits again, behind the others.
                if let Some(member) = self.member(channel) {
                    member.trunk_has_room(now);
                }
                self.sending.lock().turns.retain(|own| *own != channel);
                if begin.elapsed() > TURN_TIME {
                    // The socket is reported as writable again for those that still wait.
                    return;
                }
            }
        });
    }

    // ------------------------------------------------------------------ receiving

    /// Receives what has arrived, and passes it to the queue pairs. Returns whether there was something.
    pub(crate) fn receive(self: &Arc<Self>, now: Instant) -> bool {
        let mut receiving = self.receiving.lock();
        if receiving.ended {
            return false;
        }
        let mut buffer = self.engine.rx_buffer();
        let (any, outcome) = together(|| self.receive_into(&mut receiving, &mut buffer, now));
        self.engine.return_rx_buffer(buffer);
        if any && !self.is_used.swap(true, Ordering::AcqRel) {
            (self.on_first_use)(self);
        }
        if outcome != Outcome::Open {
            receiving.ended = true;
            drop(receiving);
            self.end(outcome, now);
        }
        any
    }

    fn receive_into(
        self: &Arc<Self>,
        receiving: &mut Receiving,
        buffer: &mut [u8],
        now: Instant,
    ) -> (bool, Outcome) {
        let mut completed = false;
        let mut filled = receiving.rest.len();
        if let Some(front) = buffer.get_mut(..filled) {
            front.copy_from_slice(&receiving.rest);
        }
        receiving.rest.clear();
        let mut received = 0;
        let mut outcome = Outcome::Open;
        while let Some(room) = buffer.get_mut(filled..) {
            let requested = room.len();
            let n = match stream::receive(self.fd.get(), None, room) {
                Ok((_, n)) => n,
                Err(Io::WouldBlock) => break,
                Err(Io::Eof) => {
                    outcome = Outcome::Eof;
                    break;
                }
                Err(Io::Broken(e)) => {
                    outcome = Outcome::Broken(e);
                    break;
                }
                Err(_) => {
                    outcome = Outcome::Broken(libc::EIO);
                    break;
                }
            };
            received += n;
            filled += n;
            self.received.fetch_add(n as u64, Ordering::Relaxed);
            let front = buffer.get(..filled).unwrap_or(&[]);
            let Some(used) = self.handle_frames(front, &mut completed, now) else {
                outcome = Outcome::Broken(libc::EPROTO);
                break;
            };
            buffer.copy_within(used..filled, 0);
            filled -= used;
            if n < requested || received >= RX_TURN_BYTES {
                break;
            }
            let present = clock::now();
            if present.saturating_duration_since(now) > TURN_TIME {
                break;
            }
            if !thread::is_worker() {
                self.engine.renew_lease(present);
            }
        }
        if completed
            && filled > 0
            && outcome == Outcome::Open
            && !thread::is_worker()
            && !thread::is_waiting()
        {
            (filled, outcome) = self.receive_rest(buffer, filled);
        }
        receiving
            .rest
            .extend_from_slice(buffer.get(..filled).unwrap_or(&[]));
        (received > 0, outcome)
    }

    /// Receives the rest of the frame at the front of `buffer`, of which `filled` bytes have arrived, if it arrives soon. `RcQp::receive_rest`
    /// explains why this waits. Returns how many bytes are left, and whether the trunk has ended.
    #[cold]
    fn receive_rest(self: &Arc<Self>, buffer: &mut [u8], mut filled: usize) -> (usize, Outcome) {
        let begin = clock::now();
        let (mut now, mut last) = (begin, begin);
        while now - last < REST_PAUSE_MAX && now - begin < REST_TIME_MAX {
            self.engine.renew_lease(now);
            let room = buffer.get_mut(filled..).unwrap_or(&mut []);
            match stream::receive(self.fd.get(), None, room) {
                Ok((_, n)) => {
                    filled += n;
                    last = now;
                    let front = buffer.get(..filled).unwrap_or(&[]);
                    let Some(used) = self.handle_frames(front, &mut false, now) else {
                        return (filled, Outcome::Broken(libc::EPROTO));
                    };
                    if used > 0 {
                        buffer.copy_within(used..filled, 0);
                        return (filled - used, Outcome::Open);
                    }
                }
                Err(Io::WouldBlock) => std::hint::spin_loop(),
                Err(Io::Eof) => return (filled, Outcome::Eof),
                Err(Io::Broken(e)) => return (filled, Outcome::Broken(e)),
                Err(_) => return (filled, Outcome::Broken(libc::EIO)),
            }
            now = clock::now();
        }
        self.engine.hand_over();
        (filled, Outcome::Open)
    }

    /// Passes the complete frames at the front of `bytes` to their queue pairs. Sets `completed` if one has completed the last posted request of
    /// its queue pair. Returns how many bytes they have. `None` if a frame breaks a rule.
    fn handle_frames(
        self: &Arc<Self>,
        bytes: &[u8],
        completed: &mut bool,
        now: Instant,
    ) -> Option<usize> {
        const _: () = assert!(HEADER + MAX <= RX_BUFFER_LEN);
        let mut used = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or(&[]);
            let header = match Header::parse(rest) {
                Ok(Some(header)) => header,
                Ok(None) => return Some(used),
                Err(e) => {
                    log!(Warn, "trunk to {}: {e}", self.peer);
                    return None;
                }
            };
            let Some(body) = rest.get(HEADER..HEADER + header.len) else {
                return Some(used);
            };
            used += HEADER + header.len;
            // Frames for a queue pair that has left are dropped.
            let Some(member) = self.member(header.channel) else {
                continue;
            };
            match header.kind {
                Kind::Data => {
                    *completed |= member.receive_frame(self, header.channel, body, now);
                }
                Kind::End => member.receive_end(self, header.channel, now),
            }
        }
    }

    // ------------------------------------------------------------------ the end

    /// Ends the trunk: the streams of all its queue pairs end.
    pub(super) fn end(&self, outcome: Outcome, now: Instant) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let _inside = Uncancelled::new();
        let members = {
            let mut members = self.members.lock();
            members.closed = true;
            std::mem::take(&mut members.by_channel)
        };
        let all_sent = {
            let mut sending = self.sending.lock();
            let all_sent = sending.pending() == 0 && sending.failed.is_none();
            sending.failed.get_or_insert(libc::ECONNRESET);
            all_sent
        };
        let all_taken = all_sent && outcome == Outcome::Eof && unacknowledged(self.fd.get()) == 0;
        self.engine.remove(self.token(), Some(self.fd.get()));
        if outcome == Outcome::Eof {
            let _ = rustix::net::shutdown(self.fd.get(), rustix::net::Shutdown::Both);
        } else {
            // Resets the connection. After an orderly end, the peer would conclude from TCP's acknowledgements that this end has handled all
            // that the peer has sent.
            let _ = rustix::net::connect_unspec(self.fd.get());
        }
        log!(
            Info,
            "trunk to {} with {} queue pairs has ended: {outcome:?}",
            self.peer,
            members.len()
        );
        for (channel, seated) in members {
            if let Some(member) = seated.member.upgrade() {
                member.trunk_lost(channel, outcome, all_taken, now);
            }
        }
    }
}

/// Appends frames with the bytes of `batch` from `skip` on. Returns the number of these bytes, without headers; `None` if user memory is no longer
/// registered.
fn append(
    engine: &Engine,
    channel: u32,
    batch: &TxBatch,
    skip: usize,
    out: &mut Vec<u8>,
) -> Option<usize> {
    let total = batch.len() - skip;
    let mut left = total;
    let mut room = 0;
    for run in batch.rest(skip) {
        let (mut at, len) = (0, run.len());
        while at < len {
            if room == 0 {
                room = left.min(MAX);
                let header = Header {
                    channel,
                    kind: Kind::Data,
                    len: room,
                };
                out.extend_from_slice(&header.emit());
            }
            let n = room.min(len - at);
            match run {
                Run::Own(bytes) => out.extend_from_slice(bytes.get(at..at + n).unwrap_or(&[])),
                Run::User { place, from, .. } => {
                    let pinned = place.pin()?;
                    let from = (from + at) as u64;
                    engine.rnic.memory.gather(&pinned, from, n as u64, out);
                }
            }
            at += n;
            room -= n;
            left -= n;
        }
    }
    Some(total)
}

impl SharedSender for Trunk {
    fn send_added(&self) {
        let mut sending = self.sending.lock();
        sending.is_added = false;
        if !sending.blocked {
            self.write(&mut sending);
        }
    }
}

impl Source for Trunk {
    fn ready(self: Arc<Self>, readable: bool, writable: bool, now: Instant) {
        if readable {
            self.receive(now);
        }
        if writable {
            self.handle_writable(now);
        }
    }

    fn try_recv_hot(self: Arc<Self>, now: Instant) -> Option<bool> {
        Some(self.receive(now))
    }

    fn set_armed(&self, armed: bool) {
        let sending = self.sending.lock();
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        if armed {
            self.engine
                .want_write(self.token(), self.fd.get(), sending.watched);
        } else if !sending.watched {
            self.engine.disarm(self.token(), self.fd.get());
        }
    }

    fn timeout(self: Arc<Self>, now: Instant) {
        let (failed, pending) = {
            let sending = self.sending.lock();
            (sending.failed, sending.pending())
        };
        if let Some(errno) = failed {
            // First, what arrived before sending failed is received. The number of turns is limited, because the peer may go on sending.
            for _ in 0..LAST_TURNS {
                if !self.receive(now) {
                    break;
                }
            }
            self.receiving.lock().ended = true;
            self.end(Outcome::Broken(errno), now);
            return;
        }
        let mut members = self.members.lock();
        if !members.by_channel.is_empty() || members.closed {
            return;
        }
        let idle_at = members.idle_since + self.idle();
        if now < idle_at {
            return;
        }
        if pending > 0 || unacknowledged(self.fd.get()) > 0 {
            drop(members);
            self.engine.deadline(self.token(), now + self.idle());
            return;
        }
        members.closed = true;
        drop(members);
        self.end(Outcome::Eof, now);
    }
}

impl DeviceListener for Trunk {
    fn device_fatal(&self) {
        self.end(Outcome::Broken(libc::EIO), clock::now());
    }
}
