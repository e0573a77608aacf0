//! Captures the traffic of this process in a pcapng file: `ANYWARP_CAPTURE=FILE`, or `anywarp capture`.
//!
//! Payload is captured where it is passed to and from the sockets, so the program needs no further privilege. The
//! headers of IP, TCP and UDP are synthesized: addresses and ports are right; a stream begins with a handshake, after which
//! it has no gaps, no retransmissions and no acknowledgements without payload. Several processes may append to one file:
//! every block is one write, and all blocks belong to one interface. Capturing is off by default, and then costs one load and
//! a branch.
//!
//! Format: draft-ietf-opsawg-pcapng, link type RAW (101): packets begin with the IP header.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anywarp_core::pcapng;
use anywarp_core::wire::mpa::StartupFrame;
use rustix::fs::FlockOperation;

use crate::config::config;
use crate::locks::{Mutex, MutexGuard, Rank};
use crate::log::{self, Level};
use crate::process::PerProcess;
use crate::sys::thread::Uncancelled;

/// The most bytes of payload in one synthesized packet. With its headers, such a packet is shorter than the longest that
/// IP allows.
const PAYLOAD_MAX: usize = 65_400;
/// The largest number of connections that are captured at a time. It limits the memory for their sequence numbers. A new
/// connection beyond it is not captured.
const STREAMS_MAX: usize = 65_536;
/// How long a process waits for another process that writes the head of the file.
const HEAD_WAIT: Duration = Duration::from_millis(200);

/// The direction of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

/// When a packet was about to be sent, or was received: nanoseconds since 1970.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At(u64);

/// The time now if a capture is on, otherwise `None`. A sender calls this before it sends. After the call that sends, another thread
/// might already have received the answer, which would then have an earlier time than the packet that it answers.
#[inline]
pub(crate) fn begin() -> Option<At> {
    is_on().then(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        At(now.map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(0)))
    })
}

/// Whether a capture is on.
#[inline]
pub(crate) fn is_on() -> bool {
    const UNKNOWN: u8 = 0;
    const OFF: u8 = 1;
    const ON: u8 = 2;
    static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);
    match STATE.load(Ordering::Relaxed) {
        OFF => false,
        ON => true,
        _ => {
            let on = sink().is_some();
            STATE.store(if on { ON } else { OFF }, Ordering::Relaxed);
            on
        }
    }
}

// ---------------------------------------------------------------------- the file

struct Sink {
    file: File,
    /// Bytes of each packet that are kept, at most.
    snap: usize,
    limit: u64,
    written: AtomicU64,
    stopped: AtomicBool,
}

fn sink() -> Option<&'static Sink> {
    let _inside = Uncancelled::new();
    // Per process: if the program forks while another thread opens the file, the child must not wait for that thread.
    static SINK: PerProcess<OnceLock<Option<Sink>>> = PerProcess::new(OnceLock::new);
    SINK.get()
        .get_or_init(|| {
            let wanted = config().capture.as_ref()?;
            match open(&wanted.path) {
                Ok(file) => Some(Sink {
                    file,
                    snap: wanted.snap_len,
                    limit: wanted.limit,
                    written: AtomicU64::new(0),
                    stopped: AtomicBool::new(false),
                }),
                Err(e) => {
                    tell(
                        Level::Error,
                        format_args!("no capture: {}: {e}", wanted.path.display()),
                    );
                    None
                }
            }
        })
        .as_ref()
}

/// Writes a line about the capture, even if the log is off: the user has asked for the capture, and would otherwise take an incomplete
/// file for a complete one.
fn tell(level: Level, text: std::fmt::Arguments<'_>) {
    log::write(level, text);
}

/// Opens a file to append packets, and writes its head if it is empty.
///
/// The file contains payload of the program, so only its user may access it.
fn open(path: &Path) -> io::Result<File> {
    let file = open_private(OpenOptions::new().append(true), path)?;
    // Of several processes that open the file at the same time, one writes the head.
    let begin = Instant::now();
    while let Err(e) = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if e != rustix::io::Errno::WOULDBLOCK || begin.elapsed() > HEAD_WAIT {
            return Err(e.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if file.metadata()?.len() == 0 {
        (&file).write_all(&pcapng::head())?;
    }
    rustix::fs::flock(&file, FlockOperation::Unlock)?;
    Ok(file)
}

/// Opens or creates a file that only its user may access, even if others could read an existing file before. A file
/// that belongs to another user, a symbolic link and a file with several names (hard links) are refused: another user
/// could read its contents, or could have chosen the file.
pub(crate) fn open_private(how: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = how
        .create(true)
        .mode(0o600)
        // A FIFO without a reader does not block, and is refused below.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    let problem = if !about.is_file() {
        Some("not a regular file")
    } else if about.uid() != rustix::process::geteuid().as_raw() {
        Some("the file belongs to another user")
    } else if about.nlink() > 1 {
        Some("the file has more than one name")
    } else {
        None
    };
    if let Some(problem) = problem {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    if about.mode() & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

impl Sink {
    /// Appends one packet.
    fn packet(&self, at: At, way: Direction, packet: &[u8]) {
        let At(at) = at;
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let block = pcapng::packet(at, way == Direction::In, packet, self.snap);
        let len = block.len() as u64;
        if self.written.fetch_add(len, Ordering::Relaxed) + len > self.limit {
            if !self.stopped.swap(true, Ordering::Relaxed) {
                tell(
                    Level::Warn,
                    format_args!(
                        "the capture has reached its limit of {} bytes; further packets are not captured",
                        self.limit
                    ),
                );
            }
            return;
        }
        // The block is written by one system call, because the kernel appends the bytes of one call as a whole.
        let _inside = Uncancelled::new();
        let written = match (&self.file).write(&block) {
            Ok(n) if n == block.len() => return,
            Ok(n) => format!("{n} of {} bytes were written", block.len()),
            Err(e) => e.to_string(),
        };
        if !self.stopped.swap(true, Ordering::Relaxed) {
            tell(Level::Error, format_args!("the capture ends: {written}"));
        }
    }
}

// ---------------------------------------------------------------------- packets

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// The Internet checksum of IP, TCP and UDP (RFC 1071) over `parts`.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u64;
    for part in parts {
        for pair in part.chunks(2) {
            let high = u64::from(pair.first().copied().unwrap_or(0));
            let low = u64::from(pair.get(1).copied().unwrap_or(0));
            sum += high << 8 | low;
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

/// An IP packet with `data` after a TCP or UDP header. The checksum is written into that header at `sum_at`.
fn ip(
    protocol: u8,
    from: IpAddr,
    to: IpAddr,
    header: &mut [u8],
    sum_at: usize,
    data: &[u8],
) -> Vec<u8> {
    let len = header.len() + data.len();
    let mut out = Vec::with_capacity(40 + len);
    let mut pseudo = Vec::with_capacity(40);
    match (from.to_canonical(), to.to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            out.extend([0x45, 0]);
            out.extend(u16::try_from(20 + len).unwrap_or(0).to_be_bytes());
            out.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            out.extend(from.octets());
            out.extend(to.octets());
            let sum = checksum(&[&out]).to_be_bytes();
            if let Some(field) = out.get_mut(10..12) {
                field.copy_from_slice(&sum);
            }
            pseudo.extend(from.octets());
            pseudo.extend(to.octets());
        }
        (from, to) => {
            let v6 = |a: IpAddr| match a {
                IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
                IpAddr::V6(a) => a.octets(),
            };
            out.extend([0x60, 0, 0, 0]);
            out.extend(u16::try_from(len).unwrap_or(0).to_be_bytes());
            out.extend([protocol, 64]);
            out.extend(v6(from));
            out.extend(v6(to));
            pseudo.extend(v6(from));
            pseudo.extend(v6(to));
        }
    }
    pseudo.extend([0, protocol]);
    pseudo.extend(u16::try_from(len).unwrap_or(0).to_be_bytes());
    // Headers have an even length, so the sum over the parts is the sum over the whole.
    let sum = match checksum(&[&pseudo, header, data]) {
        0 if protocol == UDP => 0xffff,
        sum => sum,
    };
    if let Some(field) = header.get_mut(sum_at..sum_at + 2) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    out.extend_from_slice(header);
    out.extend_from_slice(data);
    out
}

fn tcp(from: SocketAddr, to: SocketAddr, seq: u32, ack: u32, flags: u8, data: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(20);
    header.extend(from.port().to_be_bytes());
    header.extend(to.port().to_be_bytes());
    header.extend(seq.to_be_bytes());
    header.extend(ack.to_be_bytes());
    // The kernel's window is not known here: the header has one that is never full.
    let options: &[u8] = match flags & SYN {
        0 => &[],
        _ => &[3, 3, 14, 0],
    };
    let words = u8::try_from((20 + options.len()) / 4).unwrap_or(5);
    header.extend([words << 4, flags]);
    header.extend([0xff, 0xff, 0, 0, 0, 0]);
    header.extend(options);
    ip(TCP, from.ip(), to.ip(), &mut header, 16, data)
}

fn udp(from: SocketAddr, to: SocketAddr, data: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(8);
    header.extend(from.port().to_be_bytes());
    header.extend(to.port().to_be_bytes());
    header.extend(u16::try_from(8 + data.len()).unwrap_or(0).to_be_bytes());
    header.extend([0, 0]);
    ip(UDP, from.ip(), to.ip(), &mut header, 6, data)
}

// ---------------------------------------------------------------------- streams

/// A TCP connection as the capture shows it.
#[derive(Debug)]
struct Stream {
    local: SocketAddr,
    peer: SocketAddr,
    /// The sequence number of the next byte of this end.
    seq: u32,
    /// The sequence number of the next byte of the peer.
    ack: u32,
}

impl Stream {
    /// Begins to capture a connection, with a synthesized handshake. In MPA, the end that sends first has opened the
    /// connection.
    fn open(fd: BorrowedFd<'_>, at: At, way: Direction, sink: &Sink) -> Option<Self> {
        let local = SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
        let peer = SocketAddr::try_from(rustix::net::getpeername(fd).ok()??).ok()?;
        let mut s = Self {
            local,
            peer,
            seq: 0,
            ack: 0,
        };
        match way {
            Direction::Out => {
                s.out(sink, at, SYN, &[]);
                s.seq = 1;
                s.come(sink, at, SYN | ACK, &[]);
                s.ack = 1;
                s.out(sink, at, ACK, &[]);
            }
            Direction::In => {
                s.come(sink, at, SYN, &[]);
                s.ack = 1;
                s.out(sink, at, SYN | ACK, &[]);
                s.seq = 1;
                s.come(sink, at, ACK, &[]);
            }
        }
        Some(s)
    }

    fn out(&self, sink: &Sink, at: At, flags: u8, data: &[u8]) {
        let ack = if flags & ACK == 0 { 0 } else { self.ack };
        let packet = tcp(self.local, self.peer, self.seq, ack, flags, data);
        sink.packet(at, Direction::Out, &packet);
    }

    fn come(&self, sink: &Sink, at: At, flags: u8, data: &[u8]) {
        let ack = if flags & ACK == 0 { 0 } else { self.seq };
        let packet = tcp(self.peer, self.local, self.ack, ack, flags, data);
        sink.packet(at, Direction::In, &packet);
    }

    fn data(&mut self, sink: &Sink, at: At, way: Direction, data: &[u8]) {
        let is_first = match way {
            Direction::In => self.ack == 1,
            Direction::Out => self.seq == 1,
        };
        let (frame, rest) = if is_first {
            split_startup(data)
        } else {
            (&[][..], data)
        };
        let pieces = rest.chunks(PAYLOAD_MAX);
        for piece in std::iter::once(frame).chain(pieces) {
            if piece.is_empty() {
                continue;
            }
            let len = u32::try_from(piece.len()).unwrap_or(0);
            match way {
                Direction::Out => {
                    self.out(sink, at, PSH | ACK, piece);
                    self.seq = self.seq.wrapping_add(len);
                }
                Direction::In => {
                    self.come(sink, at, PSH | ACK, piece);
                    self.ack = self.ack.wrapping_add(len);
                }
            }
        }
    }
}

fn streams() -> MutexGuard<'static, HashMap<RawFd, Stream>> {
    static ALL: PerProcess<Mutex<HashMap<RawFd, Stream>>> =
        PerProcess::new(|| Mutex::new(Rank::CapturedStreams, HashMap::new()));
    ALL.get().lock()
}

/// Captures bytes that a connection sent or received.
pub(crate) fn stream(fd: BorrowedFd<'_>, at: At, way: Direction, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    let Some(sink) = sink() else { return };
    let mut all = streams();
    let full = all.len() >= STREAMS_MAX;
    match all.entry(fd.as_raw_fd()) {
        std::collections::hash_map::Entry::Occupied(mut e) => e.get_mut().data(sink, at, way, data),
        std::collections::hash_map::Entry::Vacant(e) => {
            if !full && let Some(mut stream) = Stream::open(fd, at, way, sink) {
                stream.data(sink, at, way, data);
                e.insert(stream);
            }
        }
    }
}

/// Captures that the peer has closed its side of a connection, or that the connection broke.
pub(crate) fn stream_ended(fd: BorrowedFd<'_>, broken: bool) {
    let Some(at) = begin() else { return };
    if let (Some(sink), Some(s)) = (sink(), streams().get_mut(&fd.as_raw_fd())) {
        s.come(sink, at, if broken { RST | ACK } else { FIN | ACK }, &[]);
        s.ack = s.ack.wrapping_add(1);
    }
}

/// Captures that this process closes the descriptor of a connection.
pub(crate) fn closed(fd: RawFd) {
    let Some(at) = begin() else { return };
    let gone = streams().remove(&fd);
    if let (Some(sink), Some(s)) = (sink(), gone) {
        s.out(sink, at, FIN | ACK, &[]);
    }
}

/// Splits the start-up frame of MPA from the FPDUs after it, which one call may receive together. They become
/// separate packets, because Wireshark ignores bytes after such a frame. The frame is empty if the bytes do not
/// begin with a whole one.
fn split_startup(data: &[u8]) -> (&[u8], &[u8]) {
    let len = match StartupFrame::parse(data) {
        Ok(Some((_, len))) => len,
        Ok(None) | Err(_) => 0,
    };
    data.split_at_checked(len).unwrap_or((&[], data))
}

// ---------------------------------------------------------------------- datagrams

/// Captures a datagram that a socket sent or received.
pub(crate) fn datagram(
    fd: BorrowedFd<'_>,
    at: At,
    way: Direction,
    local: Option<IpAddr>,
    peer: SocketAddr,
    data: &[u8],
) {
    let Some(sink) = sink() else { return };
    let Some(bound) = rustix::net::getsockname(fd)
        .ok()
        .and_then(|a| SocketAddr::try_from(a).ok())
    else {
        return;
    };
    let ip = match local {
        Some(ip) => ip,
        None if bound.ip().to_canonical().is_unspecified() => route(peer.ip()),
        None => bound.ip(),
    };
    let here = SocketAddr::new(ip, bound.port());
    let packet = match way {
        Direction::Out => udp(here, peer, data),
        Direction::In => udp(peer, here, data),
    };
    sink.packet(at, way, &packet);
}

/// The local address that the kernel would choose to send to `peer`.
fn route(peer: IpAddr) -> IpAddr {
    const KNOWN_MAX: usize = 1024;
    static KNOWN: PerProcess<Mutex<HashMap<IpAddr, IpAddr>>> =
        PerProcess::new(|| Mutex::new(Rank::CaptureSources, HashMap::new()));
    let peer = peer.to_canonical();
    let mut known = KNOWN.get().lock();
    if let Some(ip) = known.get(&peer) {
        return *ip;
    }
    let any: SocketAddr = if peer.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let ip = UdpSocket::bind(any)
        .and_then(|s| s.connect((peer, 9)).and_then(|()| s.local_addr()))
        .map_or_else(|_| any.ip(), |a| a.ip());
    if known.len() < KNOWN_MAX {
        known.insert(peer, ip);
    }
    ip
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_1071() {
        // The example of RFC 1071: the sum is 0xddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&[&bytes]), !0xddf2);
        assert_eq!(checksum(&[&bytes[..4], &bytes[4..]]), !0xddf2);
        assert_eq!(checksum(&[&[0xff]]), !0xff00);
    }

    #[test]
    fn the_checksums_of_a_packet_are_correct() {
        let a = SocketAddr::from(([10, 0, 0, 1], 1000));
        let b = SocketAddr::from(([10, 0, 0, 2], 2000));
        let packet = tcp(a, b, 7, 9, PSH | ACK, b"odd");
        assert_eq!(packet.len(), 43);
        assert_eq!(checksum(&[&packet[..20]]), 0);
        let pseudo = [&packet[12..20], &[0, 6, 0, 23]].concat();
        assert_eq!(checksum(&[&pseudo, &packet[20..]]), 0);
        let packet = udp(a, b, b"even");
        let pseudo = [&packet[12..20], &[0, 17, 0, 12]].concat();
        assert_eq!(checksum(&[&pseudo, &packet[20..]]), 0);
        let a = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 1000));
        let packet = udp(a, a, b"even");
        assert_eq!((packet[0], packet[6], packet.len()), (0x60, 17, 52));
    }

    #[test]
    fn bytes_after_a_start_up_frame_are_a_separate_packet() {
        let frame = StartupFrame {
            reply: true,
            markers: false,
            crc: true,
            reject: false,
            rev: 1,
            enhanced: None,
            private_data: vec![7; 80],
        };
        let frame = frame.emit();
        let together = [&frame[..], b"an FPDU"].concat();
        assert_eq!(split_startup(&together), (&frame[..], &b"an FPDU"[..]));
        assert_eq!(split_startup(&frame), (&frame[..], &[][..]));
        // A part of a frame, and bytes that are not a frame.
        assert_eq!(split_startup(&frame[..30]), (&[][..], &frame[..30]));
        assert_eq!(split_startup(b"an FPDU"), (&[][..], &b"an FPDU"[..]));
    }

    #[test]
    fn a_capture_that_fails_is_reported_although_the_log_is_off() {
        const FILE: &str = "/no/such/folder/capture";
        if config()
            .capture
            .as_ref()
            .is_some_and(|c| c.path == Path::new(FILE))
        {
            assert!(!is_on());
            let sink = |limit| Sink {
                file: File::open("/dev/null").unwrap(),
                snap: usize::MAX,
                limit,
                written: AtomicU64::new(0),
                stopped: AtomicBool::new(false),
            };
            for limit in [1, 1000] {
                let sink = sink(limit);
                sink.packet(At(0), Direction::In, b"packet");
                sink.packet(At(0), Direction::In, b"packet");
            }
            return;
        }
        // The test runs itself in another process, because the lines go to standard error and the variable is read once.
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("capture::tests::a_capture_that_fails_is_reported_although_the_log_is_off")
            .env("ANYWARP_CAPTURE", FILE)
            .env_remove("ANYWARP_LOG")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{text}");
        for line in [
            "error: no capture: ",
            "has reached its limit of 1 bytes",
            "error: the capture ends: ",
        ] {
            assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
        }
    }

    #[test]
    fn only_a_file_of_this_user_with_one_name_is_appended_to() {
        let mut folder = std::env::temp_dir();
        folder.push(format!("anywarp-capture-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().mode() & 0o777;
        assert!(open(&at("new")).is_ok());
        assert_eq!(mode("new"), 0o600);
        // An existing file that others can read becomes readable for this user only.
        std::fs::write(at("old"), b"").unwrap();
        std::fs::set_permissions(at("old"), std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(open(&at("old")).is_ok());
        assert_eq!(mode("old"), 0o600);
        let refused = |name: &str| open(&at(name)).is_err();
        std::os::unix::fs::symlink(at("new"), at("link")).unwrap();
        assert!(refused("link"));
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            at("fifo"),
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        )
        .unwrap();
        assert!(refused("fifo"));
        if rustix::process::geteuid().is_root() {
            std::fs::write(at("foreign"), b"").unwrap();
            std::os::unix::fs::chown(at("foreign"), Some(65534), None).unwrap();
            assert!(refused("foreign"));
        }
        std::fs::hard_link(at("new"), at("second name")).unwrap();
        assert!(refused("new"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
