//! The raw peers: measurements of plain sockets and shared memory on this machine, made in the same way as those of verbs programs.
//!
//! Each raw peer consists of two processes. The server prints `ready WORD` on standard output. The client gets the word as an
//! argument, measures, and prints one line of JSON. A TCP connection between the two signals the end of a measurement. The
//! memory probes have no connection: a flag in the shared memory ends the server of `shm`, and the end of its standard input ends
//! the server of `cma`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rustix::net::{AddressFamily, SocketType};
use serde_json::{Value, json};

use super::raw_sys::{self, Shared};

/// The longest wait for the other end.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The number of polls of a socket between two reads of the clock.
const LOOKS: u32 = 1 << 14;

/// The largest number of polls of a flag in memory. They take one to several minutes, depending on the processor.
const TURNS: u64 = 1 << 34;

/// The sizes in bytes that are requested for the receive and the send buffer of a UDP socket. The device requests the same sizes.
const UDP_ROOM: (i32, i32) = (16 << 20, 4 << 20);

/// The longest UDP payload over IPv4 in bytes.
const DATAGRAM: usize = 65507;

/// The largest number of datagrams that the kernel makes from the payload of one call.
const SEGMENTS: usize = 64;

/// The first byte of each message except the last one, which begins with `LAST`.
const MORE: u8 = 0x5a;
const LAST: u8 = 0xa5;

/// The kinds of measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Probe {
    /// TCP ping-pong, both ends polling
    TcpSpin,
    /// TCP ping-pong, both ends sleeping in read(2)
    TcpSleep,
    /// TCP in one direction: --size bytes in a write(2), or --list times as many in a writev(2)
    TcpStream,
    /// UDP ping-pong, both ends polling
    UdpSpin,
    /// UDP ping-pong, both ends sleeping in recv(2)
    UdpSleep,
    /// UDP in one direction, a call for each datagram
    UdpMessages,
    /// UDP in one direction, with segmentation and coalescing by the kernel
    UdpGso,
    /// A flag and a payload in shared memory
    Shm,
    /// process_vm_writev(2) into the other process
    Cma,
}

/// Arguments of `anywarp bench-raw`.
#[derive(Debug, Args)]
pub(crate) struct Raw {
    /// What to measure
    #[arg(value_enum)]
    probe: Probe,

    /// The server's host and the word that it printed; without them this is the server
    #[arg(long, num_args = 2, value_names = ["HOST", "WORD"])]
    connect: Vec<String>,

    /// Length of a message in bytes
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=(64 << 20)))]
    size: u32,

    /// Messages in one call
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    list: u32,

    /// Duration of the measurement
    #[arg(long, default_value_t = 500)]
    millis: u64,

    /// Address that the server binds to
    #[arg(long, default_value = "0.0.0.0")]
    bind: String,
}

/// Runs either end.
pub(crate) fn run(raw: &Raw) -> ExitCode {
    let done = match raw.connect.as_slice() {
        [host, word] => client(raw, host, word).map(|value| println!("{value}")),
        _ => server(raw),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("anywarp: bench-raw: {e}");
            ExitCode::FAILURE
        }
    }
}

fn server(raw: &Raw) -> io::Result<()> {
    match raw.probe {
        Probe::Shm => return shm_server(raw),
        Probe::Cma => return cma_server(raw),
        _ => {}
    }
    let listener = TcpListener::bind((raw.bind.as_str(), 0))?;
    if let Some(name) = wanted_congestion() {
        raw_sys::choose_congestion(&listener, &name)?;
    }
    ready(&listener.local_addr()?.port().to_string())?;
    let mut control = Control(BufReader::new(accept(&listener)?));
    match raw.probe {
        Probe::TcpSpin => pong(&mut Tcp::new(accept(&listener)?, true)?, raw),
        Probe::TcpSleep => pong(&mut Tcp::new(accept(&listener)?, false)?, raw),
        Probe::TcpStream => drain(accept(&listener)?, &mut control, raw),
        Probe::UdpSpin | Probe::UdpSleep => {
            let socket = meet(raw, &mut control)?;
            pong(&mut Udp::new(socket, raw.probe == Probe::UdpSpin)?, raw)
        }
        Probe::UdpMessages | Probe::UdpGso => {
            let socket = meet(raw, &mut control)?;
            collect(&socket, &mut control, raw)
        }
        Probe::Shm | Probe::Cma => Ok(()),
    }
}

fn client(raw: &Raw, host: &str, word: &str) -> io::Result<Value> {
    match raw.probe {
        Probe::Shm => return shm_client(raw, word),
        Probe::Cma => return cma_client(raw, word),
        _ => {}
    }
    let port: u16 = word
        .parse()
        .map_err(|_| wrong("the word of the server is not a port"))?;
    let mut control = Control(BufReader::new(connect(host, port)?));
    match raw.probe {
        Probe::TcpSpin | Probe::TcpSleep => {
            let stream = connect(host, port)?;
            let congestion = raw_sys::congestion(&stream)?;
            let mut end = Tcp::new(stream, raw.probe == Probe::TcpSpin)?;
            let mut seen = ping(&mut end, raw)?;
            if let Some(members) = seen.as_object_mut() {
                members.insert("congestion".to_owned(), json!(congestion));
            }
            Ok(seen)
        }
        Probe::TcpStream => pour(connect(host, port)?, &mut control, raw),
        Probe::UdpSpin | Probe::UdpSleep => {
            let socket = meet_there(host, &mut control)?;
            ping(&mut Udp::new(socket, raw.probe == Probe::UdpSpin)?, raw)
        }
        Probe::UdpMessages | Probe::UdpGso => {
            let socket = meet_there(host, &mut control)?;
            scatter(&socket, &mut control, raw)
        }
        Probe::Shm | Probe::Cma => Ok(Value::Null),
    }
}

fn wrong(why: &str) -> io::Error {
    io::Error::other(why.to_owned())
}

fn ready(word: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "ready {word}")?;
    out.flush()
}

/// Returns the congestion control that is configured for the device's sockets.
fn wanted_congestion() -> Option<String> {
    std::env::var("ANYWARP_CC")
        .ok()
        .filter(|name| !name.is_empty())
}

fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let end = Instant::now() + TIME_LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TIME_LIMIT))?;
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e),
        }
    }
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = match wanted_congestion() {
        None => TcpStream::connect((host, port))?,
        Some(name) => connect_with(&name, host, port)?,
    };
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Connects with a congestion control. It is chosen before the connection is established, because a connection that starts with bbr
/// continues to pace its segments after a change to another congestion control.
fn connect_with(congestion: &str, host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = wrong("the host has no address");
    for address in (host, port).to_socket_addrs()? {
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
        raw_sys::choose_congestion(&socket, congestion)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(TcpStream::from(socket)),
            Err(e) => last = e.into(),
        }
    }
    Err(last)
}

/// The TCP connection over which the two ends exchange lines of numbers.
struct Control(BufReader<TcpStream>);

impl Control {
    fn send(&mut self, numbers: &[u64]) -> io::Result<()> {
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        self.0
            .get_mut()
            .write_all(format!("{}\n", words.join(" ")).as_bytes())
    }

    fn receive(&mut self) -> io::Result<Vec<u64>> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err(wrong("the other end has disconnected"));
        }
        line.split_whitespace()
            .map(|word| {
                word.parse()
                    .map_err(|_| wrong("the other end sent something that is not a number"))
            })
            .collect()
    }
}

/// Returns the content of a message of `len` bytes, except for its first and last byte.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Returns whether a message has the content of `pattern`, except for its first and last byte.
fn intact(message: &[u8]) -> bool {
    let inner = |i: usize| i > 0 && i + 1 < message.len();
    message
        .iter()
        .enumerate()
        .all(|(i, &b)| !inner(i) || b == (i % 251) as u8)
}

/// A socket that exchanges messages of one size in both directions.
trait Exchange {
    fn put(&mut self, message: &[u8]) -> io::Result<()>;
    fn take(&mut self, message: &mut [u8]) -> io::Result<()>;
}

/// Repeats a non-blocking call until it succeeds or `TIME_LIMIT` has expired.
fn until<T>(mut look: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut began = None;
    let mut looks = 0;
    loop {
        match look() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
        looks += 1;
        if looks % LOOKS == 0 && began.get_or_insert_with(Instant::now).elapsed() > TIME_LIMIT {
            return Err(wrong("the other end did not respond in time"));
        }
        std::hint::spin_loop();
    }
}

struct Tcp(TcpStream);

impl Tcp {
    fn new(stream: TcpStream, spin: bool) -> io::Result<Self> {
        stream.set_nonblocking(spin)?;
        Ok(Self(stream))
    }
}

impl Exchange for Tcp {
    fn put(&mut self, mut message: &[u8]) -> io::Result<()> {
        while !message.is_empty() {
            let n = until(|| self.0.write(message))?;
            message = message.get(n..).unwrap_or_default();
        }
        Ok(())
    }

    fn take(&mut self, mut message: &mut [u8]) -> io::Result<()> {
        while !message.is_empty() {
            let n = until(|| self.0.read(message))?;
            if n == 0 {
                return Err(wrong("the other end has disconnected"));
            }
            message = message.get_mut(n..).unwrap_or_default();
        }
        Ok(())
    }
}

struct Udp(UdpSocket);

impl Udp {
    fn new(socket: UdpSocket, spin: bool) -> io::Result<Self> {
        socket.set_nonblocking(spin)?;
        Ok(Self(socket))
    }
}

impl Exchange for Udp {
    fn put(&mut self, message: &[u8]) -> io::Result<()> {
        until(|| self.0.send(message)).map(drop)
    }

    fn take(&mut self, message: &mut [u8]) -> io::Result<()> {
        match until(|| self.0.recv(message))? {
            n if n == message.len() => Ok(()),
            _ => Err(wrong("a datagram of another size")),
        }
    }
}

/// Writes the kind to the first byte of a message and the number to the last.
fn stamp(message: &mut [u8], kind: u8, number: u8) {
    if let Some(last) = message.last_mut() {
        *last = number;
    }
    if let Some(first) = message.first_mut() {
        *first = kind;
    }
}

fn is_number(message: &[u8], number: u8) -> bool {
    message.len() < 2 || message.last() == Some(&number)
}

fn ping(end: &mut impl Exchange, raw: &Raw) -> io::Result<Value> {
    let size = raw.size as usize;
    let (mut out, mut back) = (pattern(size), vec![0; size]);
    let mut samples: Vec<u32> = Vec::with_capacity(1 << 20);
    let began = Instant::now();
    let (warm, limit) = (
        Duration::from_millis(raw.millis / 10),
        Duration::from_millis(raw.millis + raw.millis / 10),
    );
    let mut number: u8 = 0;
    loop {
        let before = Instant::now();
        let over = before.duration_since(began) >= limit;
        stamp(&mut out, if over { LAST } else { MORE }, number);
        end.put(&out)?;
        end.take(&mut back)?;
        let took = before.elapsed();
        if !is_number(&back, number) || over && !intact(&back) {
            return Err(wrong("a message was returned with wrong content"));
        }
        if over {
            break;
        }
        number = number.wrapping_add(1);
        if before.duration_since(began) >= warm {
            samples.push(u32::try_from(took.as_nanos()).unwrap_or(u32::MAX));
        }
    }
    samples.sort_unstable();
    let at = |share: f64| {
        let place = (samples.len().saturating_sub(1)) as f64 * share;
        samples.get(place as usize).copied().unwrap_or_default()
    };
    let half = |ns: u32| f64::from(ns) / 2000.0;
    Ok(json!({
        "us": half(at(0.5)), "us_p99": half(at(0.99)), "us_least": half(at(0.0)), "messages": samples.len(),
    }))
}

fn pong(end: &mut impl Exchange, raw: &Raw) -> io::Result<()> {
    let size = raw.size as usize;
    let (mut got, mut out) = (vec![0; size], pattern(size));
    let mut number: u8 = 0;
    loop {
        end.take(&mut got)?;
        let kind = got.first().copied().unwrap_or_default();
        if size > 1 && !is_number(&got, number) || kind == LAST && !intact(&got) {
            return Err(wrong("a message arrived with wrong content"));
        }
        stamp(&mut out, kind, number);
        end.put(&out)?;
        if kind == LAST {
            return Ok(());
        }
        number = number.wrapping_add(1);
    }
}

/// Sends as much as possible in the given time.
fn pour(mut stream: TcpStream, control: &mut Control, raw: &Raw) -> io::Result<Value> {
    let size = raw.size as usize;
    let congestion = raw_sys::congestion(&stream)?;
    let message = pattern(size);
    let mut list: Vec<IoSlice<'_>> = Vec::new();
    let limit = Duration::from_millis(raw.millis);
    let began = Instant::now();
    let mut messages: u64 = 0;
    // Reading the clock costs as much as copying a small message.
    let stride = if size * (raw.list as usize) < 4096 {
        16
    } else {
        1
    };
    while began.elapsed() < limit {
        for _ in 0..stride {
            if raw.list == 1 {
                stream.write_all(&message)?;
            } else {
                list.clear();
                list.resize(raw.list as usize, IoSlice::new(&message));
                let mut left = &mut list[..];
                while !left.is_empty() {
                    let n = stream.write_vectored(left)?;
                    IoSlice::advance_slices(&mut left, n);
                }
            }
            messages += u64::from(raw.list);
        }
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let seen = control.receive()?;
    let took = began.elapsed().as_secs_f64();
    match *seen.as_slice() {
        [bytes, 0] if bytes == messages * u64::from(raw.size) => Ok(json!({
            "gb_s": bytes as f64 / took / 1e9, "m_s": messages as f64 / took / 1e6, "messages": messages,
            "congestion": congestion,
        })),
        _ => Err(wrong("the other end has not received everything")),
    }
}

fn drain(mut stream: TcpStream, control: &mut Control, raw: &Raw) -> io::Result<()> {
    let size = raw.size as usize;
    let mut got = vec![0; size.clamp(1 << 16, 1 << 20)];
    let expected = pattern(size);
    let (mut bytes, mut bad): (u64, u64) = (0, 0);
    loop {
        let n = stream.read(&mut got)?;
        if n == 0 {
            break;
        }
        // Checks all bytes of the first megabyte, and one byte of each later piece.
        let looked = if bytes < 1 << 20 { n } else { 1 };
        for (i, &byte) in got.iter().take(n).rev().take(looked).enumerate() {
            let place = (bytes + (n - 1 - i) as u64) % size as u64;
            bad += u64::from(expected.get(place as usize) != Some(&byte));
        }
        bytes += n as u64;
    }
    control.send(&[bytes, bad])
}

/// Returns the server's UDP socket, connected to the client's.
fn meet(raw: &Raw, control: &mut Control) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((raw.bind.as_str(), 0))?;
    raw_sys::room(&socket, UDP_ROOM)?;
    socket.set_read_timeout(Some(TIME_LIMIT))?;
    if raw.probe == Probe::UdpGso {
        raw_sys::coalesce(&socket)?;
    }
    control.send(&[socket.local_addr()?.port().into()])?;
    let theirs = control.receive()?;
    let port = port_of(&theirs)?;
    socket.connect((control.0.get_ref().peer_addr()?.ip(), port))?;
    control.send(&[1])?;
    Ok(socket)
}

fn meet_there(host: &str, control: &mut Control) -> io::Result<UdpSocket> {
    let local = control.0.get_ref().local_addr()?.ip();
    let socket = UdpSocket::bind((local, 0))?;
    raw_sys::room(&socket, UDP_ROOM)?;
    socket.set_read_timeout(Some(TIME_LIMIT))?;
    let theirs = control.receive()?;
    socket.connect((host, port_of(&theirs)?))?;
    control.send(&[socket.local_addr()?.port().into()])?;
    control.receive()?;
    Ok(socket)
}

fn port_of(numbers: &[u64]) -> io::Result<u16> {
    numbers
        .first()
        .and_then(|&n| u16::try_from(n).ok())
        .ok_or_else(|| wrong("the other end sent no port"))
}

/// Sends datagrams as fast as the socket accepts them.
fn scatter(socket: &UdpSocket, control: &mut Control, raw: &Raw) -> io::Result<Value> {
    let size = (raw.size as usize).min(DATAGRAM);
    let each = match raw.probe {
        Probe::UdpGso => (DATAGRAM / size).clamp(1, SEGMENTS),
        _ => 1,
    };
    if each > 1 {
        raw_sys::segment(socket, u16::try_from(size).unwrap_or(u16::MAX))?;
    }
    let mut out = Vec::new();
    for _ in 0..each {
        let mut message = pattern(size);
        stamp(&mut message, MORE, 0);
        out.extend(message);
    }
    let limit = Duration::from_millis(raw.millis);
    let began = Instant::now();
    let mut sent: u64 = 0;
    while began.elapsed() < limit {
        for _ in 0..8 {
            match socket.send(&out) {
                Ok(_) => sent += each as u64,
                // The kernel had no buffer: the datagrams of this call were not sent, and are not counted.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(e) => return Err(e),
            }
        }
    }
    control.send(&[sent])?;
    // These datagrams arrive after all others and end the receiver's loop. There are several because some may be lost.
    let end = vec![LAST; size];
    for _ in 0..20 {
        let _the_reader_may_be_gone = socket.send(&end);
        std::thread::sleep(Duration::from_millis(1));
    }
    let seen = control.receive()?;
    match *seen.as_slice() {
        [messages, ns, 0] if messages > 0 => {
            let seconds = ns as f64 / 1e9;
            Ok(json!({
                "gb_s": (messages * size as u64) as f64 / seconds / 1e9, "m_s": messages as f64 / seconds / 1e6,
                "messages": messages, "sent": sent,
            }))
        }
        [0, ..] => Err(wrong("none of the sent messages arrived")),
        _ => Err(wrong("datagrams arrived with wrong content")),
    }
}

fn collect(socket: &UdpSocket, control: &mut Control, raw: &Raw) -> io::Result<()> {
    let size = (raw.size as usize).min(DATAGRAM);
    let mut got = vec![0; 1 << 16];
    let mut expected = pattern(size);
    stamp(&mut expected, MORE, 0);
    let (mut messages, mut bad): (u64, u64) = (0, 0);
    let mut times: Option<(Instant, Instant)> = None;
    loop {
        let n = socket.recv(&mut got)?;
        let all = got.get(..n).unwrap_or_default();
        if all.first() == Some(&LAST) {
            break;
        }
        let now = Instant::now();
        times = Some((times.map_or(now, |(first, _)| first), now));
        let whole = messages < 1000;
        for datagram in all.chunks(size) {
            let right = if whole {
                datagram == expected
            } else {
                datagram.first() == expected.first() && datagram.len() == size
            };
            bad += u64::from(!right);
            messages += 1;
        }
    }
    control.receive()?;
    let ns = times.map_or(0, |(first, last)| last.duration_since(first).as_nanos());
    control.send(&[messages, u64::try_from(ns).unwrap_or(u64::MAX), bad])
}

/// Offsets in the shared memory: the flag of each direction, the flag that ends the measurement, and the payloads. Each flag is two
/// cache lines (of 64 bytes) after the one before.
const THERE: usize = 0;
const BACK: usize = 128;
const OVER: usize = 256;
const PAYLOADS: usize = 512;

/// The value that the client stores at [`OVER`] when it starts. In the last round it stores the number of that round there.
const BEGUN: u64 = u64::MAX;

fn shm_len(size: usize) -> usize {
    PAYLOADS + 2 * size.next_multiple_of(128)
}

fn shm_server(raw: &Raw) -> io::Result<()> {
    let size = raw.size as usize;
    let path = format!("/dev/shm/anywarp-bench-{}", std::process::id());
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    file.set_len(shm_len(size) as u64)?;
    let shared = Shared::map(&file, shm_len(size))?;
    ready(&path)?;
    let begun = shared.spin(OVER, BEGUN, TURNS);
    fs::remove_file(&path)?;
    if !begun {
        return Err(wrong("no client"));
    }
    let (mut got, mut out) = (vec![0; size], pattern(size));
    for number in 1.. {
        if !shared.spin(THERE, number, TURNS) {
            return Err(wrong("the other end did not respond in time"));
        }
        shared.get(PAYLOADS, &mut got);
        if !is_number(&got, number as u8) {
            return Err(wrong("a message arrived with wrong content"));
        }
        stamp(&mut out, MORE, number as u8);
        shared.put(PAYLOADS + size.next_multiple_of(128), &out);
        shared.flag(BACK).store(number, Ordering::Release);
        if shared.flag(OVER).load(Ordering::Relaxed) == number {
            return Ok(());
        }
    }
    Ok(())
}

fn shm_client(raw: &Raw, path: &str) -> io::Result<Value> {
    let size = raw.size as usize;
    let file = File::options().read(true).write(true).open(path)?;
    let shared = Shared::map(&file, shm_len(size))?;
    shared.flag(OVER).store(BEGUN, Ordering::Release);
    let (mut out, mut back) = (pattern(size), vec![0; size]);
    let limit = Duration::from_millis(raw.millis);
    let began = Instant::now();
    // Reading the clock takes a tenth of a round, so several rounds are timed together.
    const ROUNDS: u64 = 64;
    let mut samples: Vec<f64> = Vec::new();
    let mut number: u64 = 0;
    loop {
        let before = Instant::now();
        let over = before.duration_since(began) >= limit;
        let rounds = if over { 1 } else { ROUNDS };
        for _ in 0..rounds {
            number += 1;
            if over {
                shared.flag(OVER).store(number, Ordering::Relaxed);
            }
            stamp(&mut out, MORE, number as u8);
            shared.put(PAYLOADS, &out);
            shared.flag(THERE).store(number, Ordering::Release);
            if !shared.spin(BACK, number, TURNS) {
                return Err(wrong("the other end did not respond in time"));
            }
            shared.get(PAYLOADS + size.next_multiple_of(128), &mut back);
            if !is_number(&back, number as u8) {
                return Err(wrong("a message was returned with wrong content"));
            }
        }
        if over {
            break;
        }
        samples.push(before.elapsed().as_secs_f64() * 1e6 / 2.0 / ROUNDS as f64);
    }
    samples.sort_unstable_by(f64::total_cmp);
    let median = samples.get(samples.len() / 2).copied().unwrap_or_default();
    Ok(json!({ "us": median, "messages": number }))
}

fn cma_server(raw: &Raw) -> io::Result<()> {
    raw_sys::allow_access();
    let target = vec![1u8; raw.size as usize];
    ready(&format!(
        "{}:{}",
        std::process::id(),
        target.as_ptr().expose_provenance()
    ))?;
    // Ends when the parent process closes standard input.
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    drop(target);
    Ok(())
}

fn cma_client(raw: &Raw, word: &str) -> io::Result<Value> {
    let (pid, address) = word
        .split_once(':')
        .and_then(|(pid, address)| Some((pid.parse().ok()?, address.parse().ok()?)))
        .ok_or_else(|| wrong("the server sent no address"))?;
    let from = pattern(raw.size as usize);
    let limit = Duration::from_millis(raw.millis);
    let began = Instant::now();
    let mut messages: u64 = 0;
    while began.elapsed() < limit {
        raw_sys::write_into(pid, address, &from)?;
        messages += 1;
    }
    let took = began.elapsed().as_secs_f64();
    let mut back = vec![0; from.len()];
    raw_sys::read_from(pid, address, &mut back)?;
    if back != from {
        return Err(wrong("the written bytes have not arrived"));
    }
    Ok(json!({
        "gb_s": (messages * u64::from(raw.size)) as f64 / took / 1e9, "m_s": messages as f64 / took / 1e6,
        "messages": messages,
    }))
}
