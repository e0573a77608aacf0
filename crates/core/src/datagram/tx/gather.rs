//! The memory of requests: checks its keys, and copies it into datagrams.

use crate::llp::mpa::frame::for_each_part;
use crate::verbs::access::Access;
use crate::verbs::mr::{LastRegion, Memory, Placement};
use crate::verbs::rnic::Rnic;
use crate::verbs::source::{Places, Source};
use crate::verbs::wc::Status;
use crate::verbs::wr::Sge;
use crate::wire::To;

/// The reason why a request cannot be built: its status, and a text.
pub(super) struct Unbuildable(pub(super) Status, pub(super) &'static str);

/// Checks that the memory of each element of a request's list permits the access `need`.
pub(super) fn checked(
    rnic: &Rnic,
    sges: &[Sge],
    pd: u32,
    qpn: u32,
    need: Access,
) -> Result<Places, Unbuildable> {
    let some = sges.iter().filter(|s| s.len > 0);
    some.map(|sge| checked_one(rnic, sge, pd, qpn, need))
        .collect()
}

/// As [`checked`], for one element.
pub(super) fn checked_one(
    rnic: &Rnic,
    sge: &Sge,
    pd: u32,
    qpn: u32,
    need: Access,
) -> Result<Placement, Unbuildable> {
    let (at, len) = (To(sge.addr), u64::from(sge.len));
    rnic.regions
        .check(sge.lkey, pd, qpn, need, at, len)
        .map_err(|_| not_allowed())
}

pub(super) fn not_allowed() -> Unbuildable {
    Unbuildable(
        Status::LocalProtection,
        "a request with memory that its lkey does not allow",
    )
}

/// Checks the elements of a request's list, and appends their bytes.
#[inline]
pub(super) fn gather_at_once(
    rnic: &Rnic,
    last: &mut LastRegion,
    sges: &[Sge],
    pd: u32,
    qpn: u32,
    out: &mut Vec<u8>,
) -> Result<(), Unbuildable> {
    for sge in sges.iter().filter(|s| s.len > 0) {
        let (at, len) = (To(sge.addr), u64::from(sge.len));
        let pinned = rnic
            .regions
            .pin(last, sge.lkey, pd, qpn, Access::NONE, at, len)
            .map_err(|_| not_allowed())?;
        rnic.memory.gather(&pinned, 0, len, out);
    }
    Ok(())
}

/// Appends `len` bytes of `source`, beginning at byte `from`. Returns false if the memory was deregistered.
pub(super) fn gather(
    source: &Source,
    from: u64,
    len: u64,
    memory: &dyn Memory,
    out: &mut Vec<u8>,
) -> bool {
    match source {
        Source::Bytes(bytes) => {
            let start = usize::try_from(from).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
            match bytes.get(start..end) {
                Some(bytes) => {
                    out.extend_from_slice(bytes);
                    true
                }
                None => false,
            }
        }
        Source::Memory { places, .. } => for_each_part(places, from, len, |place, at, n| {
            let Some(pinned) = place.pin() else {
                return false;
            };
            memory.gather(&pinned, at, n, out);
            true
        }),
    }
}
