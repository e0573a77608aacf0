//! Extended sockets as futures: a Rust interface to `<exs.h>`, over any RDMA device.
//!
//! An operation owns its [`Buffer`] and returns it at the end, because the peer's device reads the memory of the sender. When a buffer
//! has been returned, no peer can write to it, not even one that violates the protocol. An operation with a buffer starts when the
//! function is called, not when its future is first awaited. Connecting, accepting and [`Socket::shutdown`] start when their futures
//! are first awaited. Dropping a future cancels its operation. The crate works with any executor: a thread of the crate dequeues the
//! events and wakes the tasks.
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use exs_async::{Buffer, Socket};
//!
//! let socket = Socket::connect("192.0.2.1:7000".parse().unwrap()).await?;
//! let mut hello = Buffer::new(4096)?;
//! hello[..5].copy_from_slice(b"hello");
//! let (sent, hello) = socket.send(hello, 5).await;
//! sent?;
//! let (received, answer) = socket.recv(hello).await;
//! println!("{:?}", &answer[..received?]);
//! # Ok(())
//! # }
//! ```

mod accept;
mod driver;
mod ffi;
mod shared;

use accept::Kept;
use driver::Operation;
use libc::{c_int, c_void, sockaddr, socklen_t};
pub use shared::Shared;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The longest queue of connections that are not accepted yet.
const BACKLOG: c_int = 128;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Registered memory, which peers may read.
///
/// No peer can write to the memory while the program has it: memory that a peer may write is registered for writing only during the
/// operation, and that registration ends before the buffer is returned.
///
/// Reading is different: each peer of the process that knows the key can read all of the memory as long as the buffer exists. A peer
/// that follows the protocol reads only the bytes of a send, and only until the send has ended. Another one may also read
/// what the program writes to the buffer later, and may see only a part of a change. The program is not affected by that. But do not
/// put data that a peer must not know into a buffer that was sent to it.
#[derive(Debug)]
pub struct Buffer {
    bytes: Box<[u8]>,
    handle: c_int,
}

impl Buffer {
    /// Returns a buffer of zeros. `len` is at least 1.
    ///
    /// # Errors
    ///
    /// There is no RDMA device, or it cannot register the memory.
    pub fn new(len: usize) -> io::Result<Self> {
        driver::get()?;
        let mut bytes = vec![0u8; len].into_boxed_slice();
        // SAFETY: the memory is live until `drop` deregisters the handle.
        let handle = check(unsafe { ffi::exs_mregister(bytes.as_mut_ptr().cast(), len, 0) })?;
        Ok(Self { bytes, handle })
    }

    /// Returns the handle for a receive of a socket.
    fn receive_handle(&self, fd: c_int) -> c_int {
        // On iWARP devices a receive with the handle lets peers write to the memory as long as the handle exists, and the program has
        // plain references to the memory in that time. Without the handle the library registers or copies it for this receive only.
        if exs::lets_peers_write_received(fd) {
            ffi::UNREGISTERED
        } else {
            self.handle
        }
    }

    /// Returns an empty buffer without registered memory.
    fn none() -> Self {
        Self {
            bytes: Box::default(),
            handle: -1,
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: an operation owns its buffer until it has completed, so no operation uses this one.
        unsafe { ffi::exs_mderegister(self.handle, 0) };
    }
}

/// A descriptor of the library, closed when it is dropped.
#[derive(Debug)]
struct Fd(c_int);

impl Fd {
    fn new(addr: &SocketAddr, kind: c_int) -> io::Result<Self> {
        driver::get()?;
        let family = if addr.is_ipv4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        // SAFETY: no memory is passed.
        check(unsafe { ffi::exs_socket(family, kind, 0) }).map(Self)
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        driver::close(self.0);
    }
}

/// Waits for connections.
#[derive(Debug)]
pub struct Listener {
    fd: Fd,
    kept: Arc<Kept>,
}

impl Listener {
    /// Listens at an address. With port 0 the library chooses a port, which [`Listener::local_addr`] returns.
    ///
    /// # Errors
    ///
    /// There is no RDMA device with the address, or the port is in use.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        Self::bind_kind(addr, libc::SOCK_SEQPACKET)
    }

    /// As [`Listener::bind`], for streams.
    ///
    /// # Errors
    ///
    /// As for [`Listener::bind`].
    pub fn bind_stream(addr: SocketAddr) -> io::Result<Self> {
        Self::bind_kind(addr, libc::SOCK_STREAM)
    }

    fn bind_kind(addr: SocketAddr, kind: c_int) -> io::Result<Self> {
        let fd = Fd::new(&addr, kind)?;
        let (raw, len) = raw(&addr);
        // SAFETY: the address is live until the call returns.
        unsafe {
            check(ffi::exs_bind(fd.0, (&raw const raw).cast(), len))?;
            check(ffi::exs_listen(fd.0, BACKLOG))?;
        }
        let kept = Arc::default();
        Ok(Self { fd, kept })
    }

    /// Returns the address at which the listener accepts connections.
    ///
    /// # Errors
    ///
    /// The device has failed.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        // SAFETY: an all-zero address is valid, and has room for all families.
        unsafe {
            let mut raw: libc::sockaddr_storage = std::mem::zeroed();
            let mut len = socklen_t::try_from(size_of_val(&raw)).unwrap_or(0);
            check(ffi::exs_getsockname(
                self.fd.0,
                (&raw mut raw).cast(),
                &raw mut len,
            ))?;
            address(&raw)
        }
    }

    /// Accepts a connection. If the future is dropped after a connection was established, the next call returns this connection.
    ///
    /// # Errors
    ///
    /// The peer disconnected before the connection was established.
    pub async fn accept(&self) -> io::Result<Socket> {
        let driver = driver::get()?;
        if let Some(fd) = self.kept.take() {
            return Ok(Socket { fd });
        }
        let fd = self.fd.0;
        let accept = driver.accept(fd, &self.kept, |id| {
            // SAFETY: null is passed for the address.
            unsafe { ffi::exs_accept(fd, std::ptr::null_mut(), 0, driver.queue, id) }
        });
        let fd = accept.await?;
        Ok(Socket { fd })
    }
}

/// A connection. It preserves message boundaries, unless it is a stream.
#[derive(Debug)]
pub struct Socket {
    fd: Fd,
}

impl Socket {
    /// Connects to a listener.
    ///
    /// # Errors
    ///
    /// Nothing listens at the address, or it cannot be reached.
    pub async fn connect(addr: SocketAddr) -> io::Result<Self> {
        Self::connect_kind(addr, libc::SOCK_SEQPACKET).await
    }

    /// Connects to a listener of streams.
    ///
    /// # Errors
    ///
    /// As for [`Socket::connect`].
    pub async fn connect_stream(addr: SocketAddr) -> io::Result<Self> {
        Self::connect_kind(addr, libc::SOCK_STREAM).await
    }

    async fn connect_kind(addr: SocketAddr, kind: c_int) -> io::Result<Self> {
        let fd = Fd::new(&addr, kind)?;
        let driver = driver::get()?;
        let (raw, len) = raw(&addr);
        // SAFETY: the library reads the address before the call returns.
        let call = |id, _: Option<&mut Buffer>| unsafe {
            ffi::exs_connect(fd.0, (&raw const raw).cast(), len, 0, driver.queue, id)
        };
        let operation = driver.start(fd.0, None, call);
        operation.await.0?;
        Ok(Self { fd })
    }

    /// Sends the first `len` bytes of a buffer, which the peer reads from the buffer. The future returns the number of bytes
    /// that the peer read, and the buffer.
    pub fn send(
        &self,
        buffer: Buffer,
        len: usize,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<> {
        let fd = self.fd.0;
        // SAFETY: the driver keeps the buffer until the event, even if the future is dropped.
        self.transfer(buffer, move |queue, id, b| unsafe {
            let from: *const c_void = b.bytes.as_ptr().cast();
            // The library refuses a length that is larger than the buffer.
            ffi::exs_send(fd, from, len, 0, queue, id, b.handle)
        })
    }

    /// Receives a message into a buffer. A message that is longer than the buffer is truncated. The future returns the length
    /// of the message, which is 0 at the end of the data, and the buffer.
    pub fn recv(
        &self,
        buffer: Buffer,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<> {
        let fd = self.fd.0;
        // SAFETY: as in `send`.
        self.transfer(buffer, move |queue, id, b| unsafe {
            let to: *mut c_void = b.bytes.as_mut_ptr().cast();
            ffi::exs_recv(fd, to, b.bytes.len(), 0, queue, id, b.receive_handle(fd))
        })
    }

    /// As [`Socket::send`], to an offset in the memory that the peer has passed to [`Socket::open`].
    pub fn send_at(
        &self,
        buffer: Buffer,
        len: usize,
        offset: u64,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<> {
        let fd = self.fd.0;
        // SAFETY: as in `send`.
        self.transfer(buffer, move |queue, id, b| unsafe {
            let from: *const c_void = b.bytes.as_ptr().cast();
            ffi::exs_send_offset(fd, from, len, 0, queue, id, b.handle, offset)
        })
    }

    /// As [`Socket::recv`], from an offset in the memory that the peer has passed to [`Socket::share`].
    pub fn recv_at(
        &self,
        buffer: Buffer,
        offset: u64,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<> {
        let fd = self.fd.0;
        // SAFETY: as in `send`.
        self.transfer(buffer, move |queue, id, b| unsafe {
            let to: *mut c_void = b.bytes.as_mut_ptr().cast();
            ffi::exs_recv_offset(
                fd,
                to,
                b.bytes.len(),
                0,
                queue,
                id,
                b.receive_handle(fd),
                offset,
            )
        })
    }

    /// As [`Socket::recv`], for a stream: the future ends when the whole buffer is filled, or at the end of the data.
    pub fn recv_all(
        &self,
        buffer: Buffer,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<> {
        let fd = self.fd.0;
        // SAFETY: as in `send`.
        self.transfer(buffer, move |queue, id, b| unsafe {
            let to: *mut c_void = b.bytes.as_mut_ptr().cast();
            ffi::exs_recv(
                fd,
                to,
                b.bytes.len(),
                ffi::WAITALL,
                queue,
                id,
                b.receive_handle(fd),
            )
        })
    }

    /// Lets each receive of the peer read the buffer as it is at that moment (a persistent send). The program is not involved in the
    /// reads.
    ///
    /// # Errors
    ///
    /// The connection or its sending direction has ended.
    pub fn share(&self, buffer: Buffer) -> io::Result<Shared> {
        let fd = self.fd.0;
        Shared::start(fd, buffer, |queue, id, b| {
            let from: *const c_void = b.bytes.as_ptr().cast();
            // SAFETY: the driver keeps the buffer until the event.
            unsafe {
                ffi::exs_send(
                    fd,
                    from,
                    b.bytes.len(),
                    ffi::PERSISTENT,
                    queue,
                    id,
                    b.handle,
                )
            }
        })
    }

    /// Lets sends of the peer write to the buffer (a persistent receive). The program is not involved in the writes, and gets no event
    /// for them.
    ///
    /// # Errors
    ///
    /// The connection has ended, or the buffer is empty.
    pub fn open(&self, buffer: Buffer) -> io::Result<Shared> {
        let fd = self.fd.0;
        Shared::start(fd, buffer, |queue, id, b| {
            let to: *mut c_void = b.bytes.as_mut_ptr().cast();
            // The peer may write to the memory of a handle also after the event, as long as the handle exists.
            // SAFETY: the driver keeps the buffer until the event.
            unsafe {
                ffi::exs_recv(
                    fd,
                    to,
                    b.bytes.len(),
                    ffi::PERSISTENT,
                    queue,
                    id,
                    ffi::UNREGISTERED,
                )
            }
        })
    }

    /// Ends the sending direction. Receives of the peer then return 0 bytes.
    ///
    /// # Errors
    ///
    /// The connection has ended, or the direction was already ended.
    pub async fn shutdown(&self) -> io::Result<()> {
        let driver = driver::get()?;
        let fd = self.fd.0;
        // SAFETY: no memory is passed.
        let call = |id, _: Option<&mut Buffer>| unsafe {
            ffi::exs_shutdown(fd, ffi::SHUT_WR, driver.queue, id)
        };
        driver.start(fd, None, call).await.0.map(|_| ())
    }

    fn transfer<F>(
        &self,
        buffer: Buffer,
        call: F,
    ) -> impl Future<Output = (io::Result<usize>, Buffer)> + use<F>
    where
        F: FnOnce(c_int, isize, &mut Buffer) -> c_int,
    {
        let started: Result<Operation, (io::Error, Buffer)> = match driver::get() {
            Ok(driver) => Ok(driver.start(self.fd.0, Some(buffer), |id, buffer| {
                buffer.map_or(-1, |b| call(driver.queue, id, b))
            })),
            Err(error) => Err((error, buffer)),
        };
        async move {
            let operation = match started {
                Ok(operation) => operation,
                Err((error, buffer)) => return (Err(error), buffer),
            };
            let (event, buffer) = operation.await;
            let length = event.map(|event| {
                let [_, length, ..] = event.body;
                usize::try_from(length).unwrap_or(usize::MAX)
            });
            // The driver returns the buffer of each operation, so this value is not used.
            (length, buffer.unwrap_or_else(Buffer::none))
        }
    }
}

/// Converts an address to the C structure.
fn raw(addr: &SocketAddr) -> (libc::sockaddr_storage, socklen_t) {
    // SAFETY: an all-zero address is valid, and both families fit.
    unsafe {
        let mut raw: libc::sockaddr_storage = std::mem::zeroed();
        let len = match addr {
            SocketAddr::V4(addr) => {
                let to: *mut libc::sockaddr_in = (&raw mut raw).cast();
                (*to).sin_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0);
                (*to).sin_port = addr.port().to_be();
                (*to).sin_addr.s_addr = u32::from_ne_bytes(addr.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(addr) => {
                let to: *mut libc::sockaddr_in6 = (&raw mut raw).cast();
                (*to).sin6_family = libc::sa_family_t::try_from(libc::AF_INET6).unwrap_or(0);
                (*to).sin6_port = addr.port().to_be();
                (*to).sin6_addr.s6_addr = addr.ip().octets();
                (*to).sin6_scope_id = addr.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        (raw, socklen_t::try_from(len).unwrap_or(0))
    }
}

/// Converts an address from the C structure.
fn address(raw: &libc::sockaddr_storage) -> io::Result<SocketAddr> {
    let from: *const sockaddr = (&raw const *raw).cast();
    // SAFETY: the family determines the structure, and the storage has room for either.
    unsafe {
        match c_int::from(raw.ss_family) {
            libc::AF_INET => {
                let v4 = *from.cast::<libc::sockaddr_in>();
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let v6 = *from.cast::<libc::sockaddr_in6>();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Ok(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_there_and_come_back() {
        for text in ["127.0.0.1:7", "[::1]:65535", "[fe80::1%3]:80"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(address(&raw(&addr).0).unwrap(), addr);
        }
    }
}
