//! The functions of `<anywarp-buffers.h>`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{c_int, c_uint, c_void};

use crate::ffi;
use crate::fork;
use crate::manager::{Buffer, How, Lifetime, Manager, Settings, Statistics, Use};
use crate::pieces::Pieces;
use crate::thread::Uncancelled;

/// `struct awbuf_attr`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Attr {
    size: usize,
    send_access: c_int,
    recv_access: c_int,
    critical_size: usize,
    pool_bytes: usize,
    cache_bytes: usize,
    piece_size: usize,
    threads: c_uint,
    flags: c_uint,
}

const NO_CACHE: c_uint = 1;
const NO_WATCH: c_uint = 2;
const STABLE: c_uint = 1;

/// `struct awbuf_buffer`
#[repr(C)]
#[derive(Debug)]
struct CBuffer {
    addr: *mut c_void,
    length: usize,
    lkey: u32,
    rkey: u32,
    how: c_int,
    opaque: *mut Buffer,
}

/// The number of members of `struct awbuf_stats`, which are all `uint64_t`.
const NUMBERS: usize = 13;

type Answer<T> = Result<T, c_int>;

/// Runs the body of a function. Returns EPERM in a child of a process that has used the library, and EIO after a panic.
fn run<T>(body: impl FnOnce() -> Answer<T>) -> Answer<T> {
    if fork::is_child() {
        return Err(libc::EPERM);
    }
    let _inside = Uncancelled::new();
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(libc::EIO))
}

/// Runs the body of a function that returns a number, which `good` makes of the result, or -1 with errno.
fn done<T>(body: impl FnOnce() -> Answer<T>, good: impl FnOnce(T) -> c_int) -> c_int {
    match run(body) {
        Ok(value) => good(value),
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Runs the body of a function that returns an object, or NULL with errno.
fn made<T>(body: impl FnOnce() -> Answer<T>) -> *mut T {
    match run(body) {
        Ok(value) => Box::into_raw(Box::new(value)),
        Err(errno) => {
            set_errno(errno);
            std::ptr::null_mut()
        }
    }
}

fn set_errno(errno: c_int) {
    // SAFETY: the C library returns the errno location of this thread.
    unsafe { *libc::__errno_location() = errno };
}

fn some<T>(value: Option<T>) -> Answer<T> {
    value.ok_or(libc::EINVAL)
}

fn lifetime(flags: c_uint) -> Answer<Lifetime> {
    match flags {
        0 => Ok(Lifetime::Use),
        STABLE => Ok(Lifetime::Stable),
        _ => Err(libc::EINVAL),
    }
}

fn settings(attr: Option<&Attr>) -> Answer<Settings> {
    let mut settings = Settings::default();
    let Some(attr) = attr else {
        return Ok(settings);
    };
    if attr.size < size_of::<Attr>() || attr.flags & !(NO_CACHE | NO_WATCH) != 0 {
        return Err(libc::EINVAL);
    }
    settings.send_access = attr.send_access.cast_unsigned();
    if attr.recv_access != 0 {
        settings.receive_access = attr.recv_access.cast_unsigned();
    }
    if attr.critical_size > 0 {
        settings.critical = Some(attr.critical_size);
    }
    let set = |to: &mut usize, value: usize| {
        if value > 0 {
            *to = value;
        }
    };
    set(&mut settings.pool_bytes, attr.pool_bytes);
    set(&mut settings.cache_bytes, attr.cache_bytes);
    set(&mut settings.piece, attr.piece_size);
    set(&mut settings.threads, attr.threads as usize);
    if attr.flags & NO_CACHE != 0 {
        settings.cache_bytes = 0;
    }
    settings.watch = attr.flags & NO_WATCH == 0;
    Ok(settings)
}

/// # Safety
///
/// `to` points to a structure of the program.
unsafe fn give(to: *mut CBuffer, buffer: Buffer) {
    let filled = CBuffer {
        addr: std::ptr::with_exposed_provenance_mut(buffer.addr() as usize),
        length: buffer.len(),
        lkey: buffer.lkey(),
        rkey: buffer.rkey(),
        how: match buffer.how() {
            How::Copied => 1,
            How::Registered => 2,
            How::Kept => 3,
        },
        opaque: Box::into_raw(Box::new(buffer)),
    };
    // SAFETY: upheld by the caller.
    unsafe { to.write(filled) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_open(pd: *mut ffi::ibv_pd, attr: *const Attr) -> *mut Manager {
    made(|| {
        if pd.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the attributes are NULL or a structure whose first member is its size; the domain belongs to the program.
        unsafe {
            if !attr.is_null() && (*attr).size < size_of::<Attr>() {
                return Err(libc::EINVAL);
            }
            Manager::open(pd, settings(attr.as_ref())?)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_close(manager: *mut Manager) -> c_int {
    let close = || {
        // SAFETY: the pointer is NULL or was returned by `awbuf_open`.
        if some(unsafe { manager.as_ref() })?.is_busy() {
            return Err(libc::EBUSY);
        }
        // SAFETY: as above, and not closed before.
        drop(unsafe { Box::from_raw(manager) });
        Ok(())
    };
    done(close, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_query(manager: *mut Manager, to: *mut u64, size: usize) -> c_int {
    let query = || {
        // SAFETY: the pointer is NULL or was returned by `awbuf_open`.
        let s: Statistics = some(unsafe { manager.as_ref() })?.statistics();
        let numbers: [u64; NUMBERS] = [
            s.critical,
            s.watching,
            s.copied,
            s.copied_bytes,
            s.registered,
            s.hits,
            s.kept,
            s.invalidated,
            s.evicted,
            s.cached,
            s.cached_bytes,
            s.pool_bytes,
            s.in_use,
        ];
        if to.is_null() {
            return Err(libc::EINVAL);
        }
        let count = (size / size_of::<u64>()).min(NUMBERS);
        // SAFETY: the program's structure has `size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(numbers.as_ptr(), to, count) };
        Ok(())
    };
    done(query, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_get_send(
    manager: *mut Manager,
    addr: *const c_void,
    length: usize,
    flags: c_uint,
    to: *mut CBuffer,
) -> c_int {
    // SAFETY: the memory belongs to the program, which fulfils the contract of `awbuf_get_send`.
    let send = |manager: &Manager, life| unsafe { manager.send(addr.cast(), length, life) };
    // SAFETY: upheld by the caller.
    unsafe { get(manager, flags, to, send) }
}

/// Fills `to` with the buffer that `make` returns.
///
/// # Safety
///
/// `manager` is NULL or was returned by `awbuf_open`. `to` is NULL or points to a structure of the program.
unsafe fn get(
    manager: *mut Manager,
    flags: c_uint,
    to: *mut CBuffer,
    make: impl FnOnce(&Manager, Lifetime) -> Result<Buffer, c_int>,
) -> c_int {
    let get = || {
        // SAFETY: the pointer is NULL or was returned by `awbuf_open` (guaranteed by the caller).
        let manager = some(unsafe { manager.as_ref() }.filter(|_| !to.is_null()))?;
        let buffer = make(manager, lifetime(flags)?)?;
        // SAFETY: the pointer is not NULL.
        unsafe { give(to, buffer) };
        Ok(())
    };
    done(get, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_get_recv(
    manager: *mut Manager,
    addr: *mut c_void,
    length: usize,
    flags: c_uint,
    to: *mut CBuffer,
) -> c_int {
    // SAFETY: the memory belongs to the program, which fulfils the contract of `awbuf_get_recv`.
    let receive = |manager: &Manager, life| unsafe { manager.receive(addr.cast(), length, life) };
    // SAFETY: upheld by the caller.
    unsafe { get(manager, flags, to, receive) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_release(buffer: *mut CBuffer, received: usize) -> c_int {
    let release = || {
        // SAFETY: the pointer is NULL or a structure that a function of this file has filled.
        let buffer = some(unsafe { buffer.as_mut() })?;
        let opaque = std::mem::replace(&mut buffer.opaque, std::ptr::null_mut());
        if opaque.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the pointer was created by `give` and has been removed from the structure.
        unsafe { Box::from_raw(opaque) }.release(received);
        Ok(())
    };
    done(release, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_invalidate(
    manager: *mut Manager,
    addr: *const c_void,
    length: usize,
) -> c_int {
    let invalidate = || {
        // SAFETY: the pointer is NULL or was returned by `awbuf_open`.
        let manager = some(unsafe { manager.as_ref() })?;
        let start = addr.addr();
        let end = start.checked_add(length).ok_or(libc::EINVAL)?;
        Ok(manager.invalidate(start..end))
    };
    done(invalidate, |ended| {
        c_int::try_from(ended).unwrap_or(c_int::MAX)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_pieces_begin(
    manager: *mut Manager,
    addr: *mut c_void,
    length: usize,
    of: c_uint,
    flags: c_uint,
) -> *mut Pieces {
    made(|| {
        let of = match of {
            1 => Use::Send,
            2 => Use::Receive,
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: as in `awbuf_get_send`.
        unsafe {
            let manager = some(manager.as_ref())?;
            Pieces::begin(manager, addr.cast(), length, of, lifetime(flags)?)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_pieces_next(pieces: *mut Pieces, to: *mut CBuffer) -> c_int {
    let next = || {
        // SAFETY: the pointer is NULL or was returned by `awbuf_pieces_begin`, and is used by one thread at a time.
        let pieces = some(unsafe { pieces.as_mut() }.filter(|_| !to.is_null()))?;
        let Some(buffer) = pieces.next() else {
            return Ok(0);
        };
        // SAFETY: the pointer is not NULL.
        unsafe { give(to, buffer?) };
        Ok(1)
    };
    done(next, |given| given)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn awbuf_pieces_end(pieces: *mut Pieces) -> c_int {
    let end = || {
        if pieces.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the pointer was returned by `awbuf_pieces_begin` and was not ended before.
        drop(unsafe { Box::from_raw(pieces) });
        Ok(())
    };
    done(end, |()| 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_those_of_the_header() {
        assert_eq!(size_of::<Attr>(), 56);
        assert_eq!(size_of::<CBuffer>(), 40);
        assert_eq!(size_of::<Statistics>(), NUMBERS * 8);
    }

    #[test]
    fn zero_attributes_have_defaults() {
        let mut attr = Attr {
            size: size_of::<Attr>(),
            send_access: 0,
            recv_access: 0,
            critical_size: 0,
            pool_bytes: 0,
            cache_bytes: 0,
            piece_size: 0,
            threads: 0,
            flags: 0,
        };
        let usual = Settings::default();
        let of = |attr: &Attr| settings(Some(attr)).map(|s| format!("{s:?}"));
        assert_eq!(of(&attr), Ok(format!("{usual:?}")));
        attr.flags = NO_CACHE;
        attr.critical_size = 5;
        let given = settings(Some(&attr)).unwrap();
        assert_eq!((given.cache_bytes, given.critical), (0, Some(5)));
        attr.flags = 8;
        assert_eq!(of(&attr), Err(libc::EINVAL));
        attr.flags = 0;
        attr.size = 8;
        assert_eq!(of(&attr), Err(libc::EINVAL));
    }
}
