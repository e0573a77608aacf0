//! Unpredictable numbers from the kernel.

use std::io::Read;

use crate::locks::{Mutex, Rank};
use crate::process::PerProcess;

/// Bytes that are fetched from the kernel in one system call.
const POOL_BYTES: usize = 256;

struct Pool {
    used: usize,
    bytes: [u8; POOL_BYTES],
}

/// A forked child does not inherit the pool: otherwise parent and child would return the same numbers.
static POOL: PerProcess<Mutex<Pool>> = PerProcess::new(|| {
    let empty = Pool {
        used: POOL_BYTES,
        bytes: [0; POOL_BYTES],
    };
    Mutex::new(Rank::RandomPool, empty)
});

/// 32 unpredictable bits.
pub fn random_u32() -> u32 {
    let mut pool = POOL.get().lock();
    if pool.used + 4 > POOL_BYTES {
        let mut bytes = [0_u8; POOL_BYTES];
        fill(&mut bytes);
        *pool = Pool { used: 0, bytes };
    }
    let at = pool.used;
    pool.used += 4;
    pool.bytes
        .get(at..)
        .and_then(|b| b.first_chunk::<4>())
        .map_or(0, |b| u32::from_ne_bytes(*b))
}

/// Fills `bytes` from the kernel.
///
/// # Panics
/// Panics if the kernel returns no random bytes. The device then fails, because predictable keys
/// would protect nothing.
fn fill(bytes: &mut [u8; POOL_BYTES]) {
    loop {
        // Without flags `getrandom` blocks until the kernel's pool is ready, and a signal can interrupt that.
        // Afterwards, a request of up to 256 bytes is served completely.
        match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(n) if n == bytes.len() => return,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    // A seccomp filter may refuse getrandom.
    let device = std::fs::File::open("/dev/urandom");
    let filled = device.and_then(|mut device| device.read_exact(bytes));
    #[expect(clippy::panic, reason = "the C API turns it into a failed device")]
    if let Err(e) = filled {
        panic!("no random numbers: getrandom and /dev/urandom fail ({e})");
    }
}

/// 64 unpredictable bits.
pub fn random_u64() -> u64 {
    u64::from(random_u32()) << 32 | u64::from(random_u32())
}
