//! Socket options (`rsetsockopt`, `rgetsockopt`) and their defaults.

use std::ffi::c_int;
use std::time::Duration;

use anywarp_core::bounds;
use anywarp_engine::process::Inherited;
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};

use super::wire::{scale, unscale};
use super::{Kind, Socket};
use anywarp_verbs_sys::cm::{
    RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_ROUTE, RDMA_RQSIZE, RDMA_SQSIZE, SOL_RDMA,
};

/// The smallest and the largest send or receive buffer, in bytes.
const BUFFER: std::ops::RangeInclusive<usize> = 4096..=1 << 28;
/// The smallest number of requests in a queue. Control messages use some of them.
const QUEUE_MIN: u32 = 16;
/// The largest number of requests in a queue.
const QUEUE_MAX: u32 = 16_384;
/// The most bytes of an option's value that are read.
pub(super) const LONGEST: usize = 64;
/// The directory in which an administrator can set the defaults of new sockets.
const FOLDER: &str = "/etc/rdma/rsocket";

/// Options of a socket.
#[derive(Debug, Clone)]
pub(super) struct Options {
    pub(super) send_buffer: usize,
    pub(super) recv_buffer: usize,
    pub(super) send_queue: u32,
    pub(super) recv_queue: u16,
    pub(super) inline: u32,
    /// The number of mappings (`riomap`) of the peer that this end has room for (`RDMA_IOMAPSIZE`).
    pub(super) mappings: u32,
    /// The time set by `SO_LINGER`. `None`: the option is off, and `rclose` waits for the time that `stream.rs` sets.
    pub(super) linger: Option<Duration>,
    pub(super) recv_timeout: Option<Duration>,
    pub(super) send_timeout: Option<Duration>,
    reuse: bool,
    keep_alive: bool,
    keep_idle: c_int,
    out_of_band_inline: bool,
    broadcast: bool,
    no_delay: bool,
    v6only: bool,
    tos: c_int,
}

impl Options {
    /// Returns the options of a new socket.
    pub(super) fn fresh() -> Self {
        static FRESH: Inherited<Options> = Inherited::new(|| {
            let mut options = Options {
                send_buffer: 1 << 18,
                recv_buffer: 1 << 18,
                send_queue: 384,
                recv_queue: 384,
                inline: 64,
                mappings: 0,
                linger: None,
                recv_timeout: None,
                send_timeout: None,
                reuse: false,
                keep_alive: false,
                keep_idle: 7200,
                out_of_band_inline: false,
                broadcast: false,
                no_delay: false,
                v6only: false,
                tos: 0,
            };
            options.configure(|name| {
                let text = std::fs::read_to_string(format!("{FOLDER}/{name}")).ok()?;
                text.trim().parse().ok()
            });
            options
        });
        FRESH.get().clone()
    }

    /// Returns the options of a connection that a listener with these options accepts: all except the time-outs.
    pub(super) fn inherited(&self) -> Self {
        Self {
            recv_timeout: None,
            send_timeout: None,
            ..self.clone()
        }
    }

    /// Reads the defaults that an administrator has set, from files with the names given in rsocket(7).
    fn configure(&mut self, file: impl Fn(&str) -> Option<i64>) {
        let mut set = |name, option: c_int| {
            if let Some(n) = file(name).and_then(|n| c_int::try_from(n).ok()) {
                self.set_size(option, n);
            }
        };
        set("sqsize_default", RDMA_SQSIZE);
        set("rqsize_default", RDMA_RQSIZE);
        set("inline_default", RDMA_INLINE);
        set("iomap_size", RDMA_IOMAPSIZE);
        if let Some(n) = file("mem_default") {
            self.recv_buffer = buffer(n);
        }
        if let Some(n) = file("wmem_default") {
            self.send_buffer = buffer(n);
        }
    }

    /// Sets one of the sizes of `SOL_RDMA` to the nearest valid value.
    fn set_size(&mut self, option: c_int, n: c_int) {
        let n = u32::try_from(n).unwrap_or(0);
        match option {
            RDMA_SQSIZE => self.send_queue = n.clamp(QUEUE_MIN, QUEUE_MAX),
            RDMA_RQSIZE => {
                self.recv_queue = u16::try_from(n.clamp(QUEUE_MIN, QUEUE_MAX)).unwrap_or(u16::MAX);
            }
            RDMA_INLINE => self.inline = n.min(bounds::MAX_INLINE),
            _ => self.mappings = unscale(scale(n)),
        }
    }
}

/// Returns the valid size of a buffer that is nearest to `n`.
fn buffer(n: i64) -> usize {
    usize::try_from(n)
        .unwrap_or(0)
        .clamp(*BUFFER.start(), *BUFFER.end())
}

/// The value of an option, as bytes of a C type.
pub(super) struct Value<'a>(pub(super) &'a [u8]);

impl Value<'_> {
    /// Returns the value as an `int`. `EINVAL` if it is shorter.
    fn int(&self) -> Result<c_int, c_int> {
        let bytes = self.0.first_chunk().ok_or(libc::EINVAL)?;
        Ok(c_int::from_ne_bytes(*bytes))
    }

    fn flag(&self) -> Result<bool, c_int> {
        Ok(self.int()? != 0)
    }

    /// Returns the value as a `struct timeval`; `None` if it is zero. As in the kernel, a time with negative seconds has expired.
    fn time(&self) -> Result<Option<Duration>, c_int> {
        let seconds = self.0.first_chunk().ok_or(libc::EINVAL)?;
        let rest = self.0.get(8..).and_then(|r| r.first_chunk());
        let seconds = i64::from_ne_bytes(*seconds);
        let micros = i64::from_ne_bytes(*rest.ok_or(libc::EINVAL)?);
        if !(0..1_000_000).contains(&micros) {
            return Err(libc::EDOM);
        }
        let Ok(seconds) = u64::try_from(seconds) else {
            return Ok(Some(Duration::ZERO));
        };
        let time = Duration::from_secs(seconds) + Duration::from_micros(micros.cast_unsigned());
        Ok((!time.is_zero()).then_some(time))
    }

    /// Returns the value as a `struct linger`: whether the option is on, and its seconds.
    fn linger(&self) -> Result<(bool, c_int), c_int> {
        let rest = self.0.get(4..).and_then(|r| r.first_chunk());
        let seconds = c_int::from_ne_bytes(*rest.ok_or(libc::EINVAL)?);
        Ok((self.flag()?, seconds))
    }
}

/// `rsetsockopt`. Options that have no effect on these sockets are accepted. Most of them are stored, and [`get`] returns them; some
/// of `IPPROTO_TCP`, and `RDMA_ROUTE`, are ignored. Unknown options fail with `ENOPROTOOPT`.
pub(super) fn set(
    socket: &Socket,
    level: c_int,
    name: c_int,
    value: &Value<'_>,
) -> Result<(), c_int> {
    // The lock of the stream precedes that of the options.
    let stream = match (&socket.kind, level) {
        (Kind::Stream(stream), IPPROTO_IPV6 | SOL_RDMA) => Some(stream.lock()),
        _ => None,
    };
    let mut options = socket.options();
    match (level, name) {
        (SOL_SOCKET, libc::SO_REUSEADDR) => options.reuse = value.flag()?,
        (SOL_SOCKET, libc::SO_KEEPALIVE) => options.keep_alive = value.flag()?,
        (SOL_SOCKET, libc::SO_OOBINLINE) => options.out_of_band_inline = value.flag()?,
        (SOL_SOCKET, libc::SO_BROADCAST) => options.broadcast = value.flag()?,
        // The buffer is twice as large as requested, as in the kernel's sockets and in librdmacm.
        (SOL_SOCKET, libc::SO_RCVBUF) => options.recv_buffer = buffer(i64::from(value.int()?) * 2),
        (SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer = buffer(i64::from(value.int()?) * 2),
        (SOL_SOCKET, libc::SO_RCVTIMEO) => options.recv_timeout = value.time()?,
        (SOL_SOCKET, libc::SO_SNDTIMEO) => options.send_timeout = value.time()?,
        (SOL_SOCKET, libc::SO_LINGER) => {
            let (on, seconds) = value.linger()?;
            let seconds = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
            options.linger = on.then_some(seconds);
        }
        (IPPROTO_IP, libc::IP_TOS) => options.tos = value.int()?,
        (IPPROTO_TCP, libc::TCP_NODELAY) => options.no_delay = value.flag()?,
        (IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
            options.keep_idle = Some(value.int()?).filter(|n| *n > 0).ok_or(libc::EINVAL)?;
        }
        (
            IPPROTO_TCP,
            libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL | libc::TCP_MAXSEG | libc::TCP_CONGESTION,
        ) => {}
        (IPPROTO_IPV6, libc::IPV6_V6ONLY) => {
            let on = value.flag()?;
            if let Some(stream) = stream {
                let set = stream.id().set_options(None, Some(on), None);
                set.map_err(|_| libc::EINVAL)?;
            }
            options.v6only = on;
        }
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE | RDMA_INLINE | RDMA_IOMAPSIZE) => {
            if stream.is_some_and(|s| s.is_sized()) {
                return Err(libc::EINVAL);
            }
            options.set_size(name, value.int()?);
        }
        // There is only one route to each peer, so this option has no effect.
        (SOL_RDMA, RDMA_ROUTE) => {}
        _ => return Err(libc::ENOPROTOOPT),
    }
    Ok(())
}

/// `rgetsockopt`: returns the bytes of an option's value.
pub(super) fn get(socket: &Socket, level: c_int, name: c_int) -> Result<Vec<u8>, c_int> {
    let int = |n: c_int| Ok(n.to_ne_bytes().to_vec());
    let size = |n: usize| int(c_int::try_from(n).unwrap_or(c_int::MAX));
    let count = |n: u32| int(c_int::try_from(n).unwrap_or(c_int::MAX));
    let time = |t: Option<Duration>| {
        let t = t.unwrap_or_default();
        let micros = i64::from(t.subsec_micros());
        let seconds = i64::try_from(t.as_secs()).unwrap_or(i64::MAX);
        Ok([seconds.to_ne_bytes(), micros.to_ne_bytes()].concat())
    };
    if (level, name) == (SOL_SOCKET, libc::SO_ERROR) {
        return int(socket.take_error());
    }
    let options = socket.options().clone();
    let stream = matches!(socket.kind, Kind::Stream(_));
    match (level, name) {
        (SOL_SOCKET, libc::SO_TYPE) => int(if stream {
            libc::SOCK_STREAM
        } else {
            libc::SOCK_DGRAM
        }),
        (SOL_SOCKET, libc::SO_DOMAIN) => int(socket.domain),
        (SOL_SOCKET, libc::SO_PROTOCOL) => int(if stream {
            IPPROTO_TCP
        } else {
            libc::IPPROTO_UDP
        }),
        (SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            int(c_int::from(stream && socket.stream()?.is_listening()))
        }
        (SOL_SOCKET, libc::SO_REUSEADDR) => int(options.reuse.into()),
        (SOL_SOCKET, libc::SO_KEEPALIVE) => int(options.keep_alive.into()),
        (SOL_SOCKET, libc::SO_OOBINLINE) => int(options.out_of_band_inline.into()),
        (SOL_SOCKET, libc::SO_BROADCAST) => int(options.broadcast.into()),
        (SOL_SOCKET, libc::SO_RCVBUF) => size(options.recv_buffer),
        (SOL_SOCKET, libc::SO_SNDBUF) => size(options.send_buffer),
        (SOL_SOCKET, libc::SO_RCVTIMEO) => time(options.recv_timeout),
        (SOL_SOCKET, libc::SO_SNDTIMEO) => time(options.send_timeout),
        (SOL_SOCKET, libc::SO_LINGER) => {
            let on = c_int::from(options.linger.is_some());
            let seconds = options.linger.unwrap_or_default().as_secs();
            let seconds = c_int::try_from(seconds).unwrap_or(c_int::MAX);
            Ok([on.to_ne_bytes(), seconds.to_ne_bytes()].concat())
        }
        (IPPROTO_IP, libc::IP_TOS) => int(options.tos),
        (IPPROTO_TCP, libc::TCP_NODELAY) => int(options.no_delay.into()),
        (IPPROTO_TCP, libc::TCP_KEEPIDLE) => int(options.keep_idle),
        (IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => int(1),
        (IPPROTO_TCP, libc::TCP_MAXSEG) => size(super::stream::TRANSFER),
        (IPPROTO_TCP, libc::TCP_CONGESTION) => Ok(b"anywarp\0".to_vec()),
        (IPPROTO_TCP, libc::TCP_INFO) => Ok(tcp_info(socket, &options)),
        (IPPROTO_IPV6, libc::IPV6_V6ONLY) => int(options.v6only.into()),
        (SOL_RDMA, RDMA_SQSIZE) => count(options.send_queue),
        (SOL_RDMA, RDMA_RQSIZE) => count(options.recv_queue.into()),
        (SOL_RDMA, RDMA_INLINE) => count(options.inline),
        (SOL_RDMA, RDMA_IOMAPSIZE) => count(options.mappings),
        _ => Err(libc::ENOPROTOOPT),
    }
}

/// Returns a `struct tcp_info` in which only the state (connected or not) and the sizes are set.
fn tcp_info(socket: &Socket, options: &Options) -> Vec<u8> {
    const ESTABLISHED: u8 = 1;
    const CLOSE: u8 = 7;
    /// The offsets of `tcpi_snd_mss` and `tcpi_rcv_mss`.
    const MSS: [usize; 2] = [16, 20];
    /// The offset of `tcpi_snd_cwnd`.
    const WINDOW: usize = 80;
    const LEN: usize = 104;
    let open = socket.stream().is_ok_and(|s| s.is_open());
    let mut info = vec![0_u8; LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = info.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, &[if open { ESTABLISHED } else { CLOSE }]);
    let transfer = u32::try_from(super::stream::TRANSFER).unwrap_or(0);
    for at in MSS {
        put(at, &transfer.to_ne_bytes());
    }
    put(WINDOW, &options.send_queue.to_ne_bytes());
    info
}

#[cfg(test)]
mod tests {
    use super::super::stream::Stream;
    use super::*;
    use anywarp_core::lock::Mutex;

    /// A thread that accepts a connection reads the options of the listener while it holds the lock of the stream. So a call must not
    /// wait for that lock while it holds the lock of the options.
    #[test]
    fn a_call_that_waits_for_the_stream_does_not_hold_the_options() {
        let made = Socket::make(libc::AF_INET6, Options::fresh(), |channel| {
            Ok(Kind::Stream(Box::new(Mutex::new(Stream::new(channel)?))))
        });
        let socket = made.unwrap();
        for (level, name) in [
            (SOL_RDMA, RDMA_SQSIZE),
            (SOL_RDMA, RDMA_INLINE),
            (IPPROTO_IPV6, libc::IPV6_V6ONLY),
        ] {
            let stream = socket.stream().unwrap();
            std::thread::scope(|scope| {
                let call = scope.spawn(|| set(&socket, level, name, &Value(&[1, 0, 0, 0])));
                // Gives the call time to reach the lock of the stream.
                std::thread::sleep(Duration::from_millis(50));
                let is_free = socket.options.try_lock().is_some();
                drop(stream);
                assert_eq!(call.join().unwrap(), Ok(()));
                assert!(is_free, "level {level}, option {name}");
            });
        }
    }

    #[test]
    fn files_of_the_administrator_set_defaults_of_sockets() {
        let mut options = Options::fresh();
        options.configure(|name| match name {
            "mem_default" => Some(1_000_000),
            "wmem_default" => Some(-5),
            "sqsize_default" => Some(2),
            "rqsize_default" => Some(100),
            "inline_default" => Some(1 << 40),
            "iomap_size" => Some(12),
            _ => None,
        });
        let inline = Options::fresh().inline;
        assert_eq!(options.recv_buffer, 1_000_000);
        assert_eq!(options.send_buffer, 4096);
        assert_eq!((options.send_queue, options.recv_queue), (16, 100));
        assert_eq!((options.inline, options.mappings), (inline, 12));
    }

    #[test]
    fn values_that_are_too_short_are_refused() {
        assert_eq!(Value(&[1, 0, 0]).int(), Err(libc::EINVAL));
        assert_eq!(Value(&[0; 15]).time(), Err(libc::EINVAL));
        assert_eq!(Value(&[0; 16]).time(), Ok(None));
        assert_eq!(Value(&[1, 0, 0, 0, 2, 0, 0]).linger(), Err(libc::EINVAL));
        let second = [1_i64.to_ne_bytes(), 500_000_i64.to_ne_bytes()].concat();
        assert_eq!(Value(&second).time(), Ok(Some(Duration::from_millis(1500))));
        let wrong = [0_i64.to_ne_bytes(), 1_000_000_i64.to_ne_bytes()].concat();
        assert_eq!(Value(&wrong).time(), Err(libc::EDOM));
        let mut past = [0_u8; 16];
        past[..8].copy_from_slice(&(-1_i64).to_ne_bytes());
        assert_eq!(Value(&past).time(), Ok(Some(Duration::ZERO)));
    }
}
