//! Memory of the program that the peer writes by offset: `riomap`, `riounmap`, `riowrite`.

use std::ffi::c_int;

use anywarp_core::verbs::access::Access;
use anywarp_engine::objects::MemoryRegion;

use super::Socket;
use super::buffer::{Caller, register};
use super::wire::{Area, Mapping};
use crate::ffi::os_errno;

/// A mapping of this end.
struct Map {
    start: usize,
    len: usize,
    offset: u64,
    region: MemoryRegion,
    /// The peer has a table of the mappings of this end, which this end writes by RDMA Write. This is the index of the mapping's entry.
    /// `None`: the peer may not write to the mapping, so the table has no entry for it.
    index: Option<usize>,
    /// Whether there is nothing left to announce: the entry was written, or there is none.
    announced: bool,
}

/// The mappings of a connection.
#[derive(Default)]
pub(super) struct Maps(Vec<Map>);

impl Maps {
    /// Returns the next mapping to announce to the peer: its index in the peer's table, and the entry.
    pub(super) fn next(&self) -> Option<(usize, Mapping)> {
        let map = self.0.iter().find(|m| !m.announced)?;
        let mapping = Mapping {
            offset: map.offset,
            area: Area {
                addr: map.start as u64,
                key: map.region.region().stag().0,
                len: u32::try_from(map.len).unwrap_or(u32::MAX),
            },
        };
        Some((map.index?, mapping))
    }

    /// Marks the mapping that [`Self::next`] returned as announced.
    pub(super) fn mark_announced(&mut self) {
        if let Some(map) = self.0.iter_mut().find(|m| !m.announced) {
            map.announced = true;
        }
    }
}

impl Drop for Maps {
    fn drop(&mut self) {
        for map in &self.0 {
            let _ = map.region.deregister();
        }
    }
}

/// `riomap`: lets the peer write `[start, start + len)` if `prot` contains `PROT_WRITE`. The peer addresses the memory by
/// `offset`, or by its address if `offset` is -1. Returns the offset that the peer uses.
///
/// # Safety
/// `[start, start + len)` is memory of the program, which does not free it before [`unmap`] or the close of the socket.
pub(super) unsafe fn map(
    socket: &Socket,
    start: usize,
    len: usize,
    prot: c_int,
    offset: i64,
) -> Result<i64, c_int> {
    let remote = prot & libc::PROT_WRITE != 0;
    if prot & !libc::PROT_WRITE != 0 || len == 0 || u32::try_from(len).is_err() {
        return Err(libc::EINVAL);
    }
    let offset = match offset {
        -1 => i64::try_from(start).map_err(|_| libc::EINVAL)?,
        offset if offset < 0 => return Err(libc::EINVAL),
        offset => offset,
    };
    let mut stream = socket.stream()?;
    stream.step(socket);
    let end = stream.open_end()?;
    let index = if remote {
        let places = end.peer.map_or(0, |p| p.mappings as usize);
        let free = (0..places).find(|i| end.maps.0.iter().all(|m| m.index != Some(*i)));
        Some(free.ok_or(libc::ENOMEM)?)
    } else {
        None
    };
    let device = socket.device;
    let access = if remote {
        Access::LOCAL_WRITE | Access::REMOTE_WRITE
    } else {
        Access(0)
    };
    // SAFETY: upheld by the caller.
    let region = unsafe { register(device.context.engine, &device.pd, start, len, access) }
        .map_err(|e| os_errno(&e))?;
    end.maps.0.push(Map {
        start,
        len,
        offset: offset.cast_unsigned(),
        region,
        index,
        announced: index.is_none(),
    });
    Ok(offset)
}

/// `riounmap`: after it returns, the device does not access the memory.
pub(super) fn unmap(socket: &Socket, start: usize, len: usize) -> Result<(), c_int> {
    let mut stream = socket.stream()?;
    let maps = &mut stream.any_end().ok_or(libc::EINVAL)?.maps.0;
    let at = maps
        .iter()
        .position(|m| (m.start, m.len) == (start, len))
        .ok_or(libc::EINVAL)?;
    let map = maps.swap_remove(at);
    map.region.deregister().map_err(|e| e.errno())
}

/// `riowrite`: writes to mappings of the peer. Returns the number of bytes written, which is smaller than the length of the data
/// if no mapping contains the next byte (0 if none contains the first), or if an error or the timeout comes after the first bytes.
pub(super) fn write(
    socket: &Socket,
    from: &Caller,
    offset: i64,
    flags: c_int,
) -> Result<usize, c_int> {
    let mut offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    let limit = socket.wait_limit(flags, socket.options().send_timeout);
    let mut written = 0;
    while written < from.len() {
        let more = socket.block(limit, |arm| {
            let mut stream = match socket.stream() {
                Ok(stream) => stream,
                Err(e) => return Some(Err(e)),
            };
            if arm {
                stream.arm();
            }
            stream.step(socket);
            if !stream.may_send() {
                return Some(Err(libc::EPIPE));
            }
            let end = match stream.open_end() {
                Ok(end) => end,
                Err(e) => return Some(Err(e)),
            };
            match end.write(from, written, offset) {
                Ok(Some(0)) => None,
                Ok(n) => Some(Ok(n.unwrap_or(0))),
                Err(_) => {
                    stream.cut_off();
                    Some(Err(libc::ECONNRESET))
                }
            }
        });
        match more {
            // No mapping contains that offset.
            Ok(0) => break,
            Ok(n) => {
                written += n;
                offset += n as u64;
            }
            Err(_) if written > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(written)
}
