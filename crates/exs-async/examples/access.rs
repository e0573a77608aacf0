//! Tests that no peer can write to a buffer that the program holds: `anywarp run -- cargo run --package anywarp-exs-async --example access`.
//! Functions that replace those of libibverbs record the registrations. With `ANYWARP_FACE=iwarp` the device
//! is an iWARP device, on which a receive lets peers write.

mod executor;

use executor::block_on;
use exs_async::{Buffer, Listener, Socket};
use libc::{c_char, c_int, c_void, size_t};
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

const REMOTE_WRITE: c_int = 2;

/// A registration: the address of its object, its memory, and its rights.
#[derive(Clone, Copy)]
struct Registration {
    object: usize,
    start: usize,
    len: usize,
    access: c_int,
}

static REGISTRATIONS: Mutex<Vec<Registration>> = Mutex::new(Vec::new());

fn registrations() -> std::sync::MutexGuard<'static, Vec<Registration>> {
    REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the function of a library that this program's function of the same name replaces.
fn replaced(name: *const c_char) -> *mut c_void {
    // SAFETY: the name ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name) };
    assert!(!found.is_null(), "libibverbs is not loaded");
    found
}

/// # Safety
///
/// As for `ibv_reg_mr(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut c_void,
    addr: *mut c_void,
    len: size_t,
    access: c_int,
) -> *mut c_void {
    type Function = unsafe extern "C" fn(*mut c_void, *mut c_void, size_t, c_int) -> *mut c_void;
    // SAFETY: the function has this type; the rest is upheld by the caller.
    let object = unsafe {
        let function: Function = std::mem::transmute(replaced(c"ibv_reg_mr".as_ptr()));
        function(pd, addr, len, access)
    };
    if !object.is_null() {
        registrations().push(Registration {
            object: object.addr(),
            start: addr.addr(),
            len,
            access,
        });
    }
    object
}

/// # Safety
///
/// As for `ibv_dereg_mr(3)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(object: *mut c_void) -> c_int {
    type Function = unsafe extern "C" fn(*mut c_void) -> c_int;
    registrations().retain(|r| r.object != object.addr());
    // SAFETY: the function has this type; the rest is upheld by the caller.
    unsafe {
        let function: Function = std::mem::transmute(replaced(c"ibv_dereg_mr".as_ptr()));
        function(object)
    }
}

/// Returns whether peers may write to the memory at an address.
fn is_writable(start: usize, len: usize) -> bool {
    registrations()
        .iter()
        .any(|r| r.access & REMOTE_WRITE != 0 && r.start < start + len && start < r.start + r.len)
}

fn is_buffer_writable(buffer: &Buffer) -> bool {
    is_writable(buffer.as_ptr().addr(), buffer.len())
}

async fn test(listener: Listener, addr: std::net::SocketAddr) -> io::Result<()> {
    let accepted = thread::spawn(move || block_on(listener.accept()));
    let client = Socket::connect(addr).await?;
    let server = accepted
        .join()
        .map_err(|_| io::Error::other("the server panicked"))??;

    let open = server.open(Buffer::new(4096)?)?;
    let (start, len) = (open.bytes().as_ptr().addr(), open.bytes().len());
    assert!(is_writable(start, len), "the peer may write now");
    let (ended, buffer) = open.end().await;
    ended?;
    assert!(!is_buffer_writable(&buffer), "after open");

    // Short data is copied through other memory, and long data is not.
    for length in [100, 1 << 20] {
        for turn in 1..=3 {
            let receive = server.recv(Buffer::new(length)?);
            let mut out = Buffer::new(length)?;
            out.fill(turn);
            let (sent, _) = client.send(out, length).await;
            assert_eq!(sent?, length);
            let (received, buffer) = receive.await;
            assert_eq!(received?, length);
            assert!(buffer.iter().all(|byte| *byte == turn));
            let written = is_buffer_writable(&buffer);
            assert!(!written, "after a receive of {length} bytes");
        }
    }
    println!("no peer may write to the buffers");
    Ok(())
}

fn main() -> io::Result<()> {
    let any = "127.0.0.1:0".parse().map_err(io::Error::other)?;
    let listener = Listener::bind(any)?;
    let addr = listener.local_addr()?;
    block_on(test(listener, addr))
}
