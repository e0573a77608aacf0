//! Memory windows.

use std::ffi::c_int;
use std::sync::Arc;

use anywarp_core::verbs::access::Access;
use anywarp_core::verbs::wr::{Op, Payload, WorkRequest};
use anywarp_core::wire::Stag;
use anywarp_engine::random::random_u32;
use anywarp_engine::reserve;

use super::convert::bind_of;
use super::handle::{CStruct, into_c, live, live_if_any, returned};
use super::object::{MrObject, MwObject, PdObject, QpObject};
use crate::ffi::{arg, errno, misuse, null};
use crate::profile::{Counted, CountedObject};
use anywarp_verbs_sys::verbs::*;

/// `ibv_alloc_mw(3)`.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    null("ibv_alloc_mw", || {
        if kind != IBV_MW_TYPE_1 && kind != IBV_MW_TYPE_2 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the program passes null or a live object.
        let domain = unsafe { live::<PdObject, _>(pd) }?;
        if reserve::is_scarce() {
            return Err(libc::ENOMEM);
        }
        let counted = CountedObject::take(Counted::Mw)?;
        let regions = &domain.device().engine.rnic.regions;
        let key = regions
            .alloc_window(domain.engine.id(), kind == IBV_MW_TYPE_2, &mut random_u32)
            .map_err(|e| misuse("ibv_alloc_mw", &e))?
            .0;
        domain.engine.enter();
        let c = ibv_mw {
            context: domain.context(),
            pd,
            rkey: key,
            handle: key >> 8,
            r#type: kind,
        };
        Ok(into_c(MwObject {
            c: CStruct::new(c),
            pd: Arc::clone(&domain.engine),
            _counted: counted,
        }))
    })
}

/// `ibv_dealloc_mw(3)`.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    errno("ibv_dealloc_mw", || {
        // SAFETY: the pointer is null or a window that is not used again (guaranteed by the program).
        let Some(window) = unsafe { returned::<MwObject, _>(mw) }? else {
            return Ok(());
        };
        let window = window.take();
        let key = Stag(window.c.get(|c| c.rkey));
        let freed = window.device().engine.rnic.regions.free_window(key);
        window.pd.leave();
        freed.map_err(|e| misuse("ibv_dealloc_mw", &e))
    })
}

/// `ibv_bind_mw(3)`: for windows of type 1. The key changes before the bind completes.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    errno("ibv_bind_mw", || {
        // SAFETY: the pointers are null, or live and valid (guaranteed by the program).
        let (qp, window, what) = unsafe {
            (
                live::<QpObject, _>(qp)?,
                live::<MwObject, _>(mw)?,
                arg(bind)?,
            )
        };
        let (kind, key) = window.c.get(|c| (c.r#type, c.rkey));
        if kind != IBV_MW_TYPE_1 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the program passes null or a live object.
        let region = unsafe { live_if_any::<MrObject, _>(what.bind_info.mr) }?;
        let may_bind = region.is_none_or(|r| r.engine.region().access().has(Access::MW_BIND));
        if !may_bind && what.bind_info.length != 0 {
            return Err(libc::EPERM);
        }
        // Each bind gives the window another key. Only the low octet changes, as in `ibv_inc_rkey`: it counts the binds.
        let next = key & !0xff | key.wrapping_add(1) & 0xff;
        // SAFETY: both are live (guaranteed by the program).
        let bind =
            unsafe { bind_of(mw, next, &what.bind_info) }.map_err(|e| misuse("ibv_bind_mw", &e))?;
        let request = WorkRequest {
            id: what.wr_id,
            op: Op::Bind(bind),
            payload: Payload::empty(),
            signaled: what.send_flags & IBV_SEND_SIGNALED != 0,
            solicited: false,
            ack_later: false,
            fence: what.send_flags & IBV_SEND_FENCE != 0,
            destination: None,
            srq: None,
        };
        qp.engine
            .post_send(std::iter::once(Ok(request)))
            .map_err(|(_, e)| misuse("ibv_bind_mw", &e))?;
        window.c.set(|c| c.rkey = next);
        Ok(())
    })
}
