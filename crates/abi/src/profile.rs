//! Device profiles, which report and enforce the limits and the missing features of other devices.
//!
//! `ANYWARP_DEVICE_PROFILE` selects one. A program that works with a profile uses only features of that device. The device
//! itself is not emulated: data is transferred as without a profile. The sources of all figures are in `docs/profiles.md`. If
//! a device does not document a limit, or its limit is higher than that of anywarp, that of anywarp applies. The limits of
//! multicast groups are only reported.

use std::sync::atomic::{AtomicU32, Ordering};

use anywarp_core::bounds;
use anywarp_core::error::Misuse;
use anywarp_core::verbs::wr::{Op, Payload};

use anywarp_engine::config::config;
use anywarp_engine::process::{Inherited, PerProcess};
use anywarp_verbs_sys::verbs::*;

/// The features of a device. Each member is true if the device has the feature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Features {
    /// `ibv_create_cq_ex`, completion timestamps.
    pub(crate) extended_cq: bool,
    /// `ibv_create_qp_ex` with send operation flags.
    pub(crate) extended_qp: bool,
    /// Send and RDMA Write with immediate data.
    pub(crate) immediate: bool,
    pub(crate) atomics: bool,
    pub(crate) atomic_write: bool,
    /// `IBV_WR_LOCAL_INV`.
    pub(crate) local_invalidate: bool,
    /// Thread and parent domains.
    pub(crate) domains: bool,
    pub(crate) null_region: bool,
    pub(crate) resize_cq: bool,
    pub(crate) resize_srq: bool,
    pub(crate) reregister: bool,
    /// `IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`.
    pub(crate) blocks_own_multicast: bool,
    /// Whether reliable queue pairs can be connected by `ibv_modify_qp`, not only by rdma_cm.
    pub(crate) connects_itself: bool,
}

/// The limits and features of a device.
#[derive(Clone, Copy)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    /// The node type and transport type. `None`: set by `ANYWARP_FACE`.
    pub(crate) node: Option<(ibv_node_type, ibv_transport_type)>,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) max_qp: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_sge: u32,
    /// The most scatter/gather elements of an RDMA Read.
    pub(crate) max_sge_rd: u32,
    pub(crate) max_inline: u32,
    pub(crate) max_cq: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_mr: u32,
    pub(crate) max_pd: u32,
    pub(crate) max_rd_atom: u32,
    pub(crate) max_mw: u32,
    pub(crate) max_mcast_grp: u32,
    pub(crate) max_mcast_qp_attach: u32,
    pub(crate) max_ah: u32,
    pub(crate) max_srq: u32,
    pub(crate) max_srq_wr: u32,
    pub(crate) max_srq_sge: u32,
    pub(crate) max_msg_sz: u32,
    /// Completion counters.
    pub(crate) max_counters: u32,
    pub(crate) caps: u32,
    pub(crate) atomic_cap: ibv_atomic_cap,
    pub(crate) odp: ibv_odp_caps,
    pub(crate) xrc_odp: u32,
    pub(crate) max_dm_size: u64,
    /// The supported types of queue pairs.
    pub(crate) types: &'static [ibv_qp_type],
    /// The access rights that a region may have, and the errno for other rights.
    pub(crate) rights: (u32, i32),
    /// Access rights that are accepted and ignored.
    pub(crate) empty_rights: u32,
    pub(crate) has: Features,
}

const DATAGRAMS: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
const UNACKNOWLEDGED: u32 = DATAGRAMS | IBV_ODP_SUPPORT_WRITE;
const RELIABLE: u32 =
    UNACKNOWLEDGED | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_ATOMIC_WRITE;

/// Declared here because the headers have this flag only since rdma-core 58, and `anywarp-verbs-sys` has those of version 44.
const IBV_ODP_SUPPORT_ATOMIC_WRITE: u32 = 1 << 7;

const NO_ODP: ibv_odp_caps = ibv_odp_caps {
    general_caps: 0,
    per_transport_caps: ibv_odp_transport_caps {
        rc_odp_caps: 0,
        uc_odp_caps: 0,
        ud_odp_caps: 0,
    },
};

/// Allows all access rights.
const ALL: u32 = u32::MAX;

/// The limits and features of anywarp itself, without a profile.
const ANYWARP: Profile = Profile {
    name: "anywarp",
    node: None,
    vendor_id: 0x0a_7a_70,
    vendor_part_id: 1,
    max_qp: 65_536,
    max_qp_wr: bounds::MAX_WR,
    max_sge: bounds::MAX_SGE,
    max_sge_rd: bounds::MAX_SGE,
    max_inline: bounds::MAX_INLINE,
    max_cq: 65_536,
    max_cqe: bounds::MAX_CQE,
    max_mr: 1 << 23,
    max_pd: 65_536,
    max_rd_atom: bounds::MAX_RD_ATOMIC as u32,
    max_mw: 1 << 23,
    max_mcast_grp: 4096,
    max_mcast_qp_attach: 256,
    max_ah: 1 << 23,
    max_srq: 65_536,
    max_srq_wr: bounds::MAX_SRQ_WR,
    max_srq_sge: bounds::MAX_SGE,
    max_msg_sz: bounds::MAX_MESSAGE as u32,
    max_counters: 65_536,
    caps: IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_N_NOTIFY_CQ
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_XRC,
    atomic_cap: IBV_ATOMIC_GLOB,
    odp: ibv_odp_caps {
        general_caps: IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
        per_transport_caps: ibv_odp_transport_caps {
            rc_odp_caps: RELIABLE,
            uc_odp_caps: UNACKNOWLEDGED,
            ud_odp_caps: DATAGRAMS,
        },
    },
    xrc_odp: RELIABLE,
    max_dm_size: bounds::DEVICE_MEMORY_MAX as u64,
    types: &[
        IBV_QPT_RC,
        IBV_QPT_UC,
        IBV_QPT_UD,
        IBV_QPT_XRC_SEND,
        IBV_QPT_XRC_RECV,
    ],
    rights: (ALL, 0),
    empty_rights: 0,
    has: Features {
        extended_cq: true,
        extended_qp: true,
        immediate: true,
        atomics: true,
        atomic_write: true,
        local_invalidate: true,
        domains: true,
        null_region: true,
        resize_cq: true,
        resize_srq: true,
        reregister: true,
        blocks_own_multicast: true,
        connects_itself: true,
    },
};

/// The software iWARP driver of Linux.
const SIW: Profile = Profile {
    name: "siw",
    node: Some((IBV_NODE_RNIC, IBV_TRANSPORT_IWARP)),
    vendor_id: 0x62_6d_74,
    vendor_part_id: 0,
    // siw allows 102,400 queue pairs, completion queues and protection domains each. These limits are higher
    // than those of anywarp, so they are not set here.
    max_sge: 6,
    max_sge_rd: 1,
    max_inline: 80,
    max_cqe: 3_276_800,
    max_mr: 1_024_000,
    max_rd_atom: 128,
    max_mw: 0,
    max_mcast_grp: 0,
    max_mcast_qp_attach: 0,
    max_ah: 0,
    max_srq_sge: 6,
    max_counters: 0,
    caps: IBV_DEVICE_MEM_MGT_EXTENSIONS,
    atomic_cap: IBV_ATOMIC_NONE,
    odp: NO_ODP,
    xrc_odp: 0,
    max_dm_size: 0,
    types: &[IBV_QPT_RC],
    rights: (!IBV_ACCESS_ON_DEMAND, libc::EINVAL),
    empty_rights: IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED,
    has: Features {
        extended_cq: false,
        extended_qp: false,
        immediate: false,
        atomics: false,
        atomic_write: false,
        local_invalidate: false,
        domains: false,
        null_region: false,
        resize_cq: false,
        resize_srq: true,
        reregister: false,
        blocks_own_multicast: false,
        connects_itself: false,
    },
    ..ANYWARP
};

/// The software RoCE driver of Linux.
const RXE: Profile = Profile {
    name: "rxe",
    node: Some((IBV_NODE_CA, IBV_TRANSPORT_IB)),
    vendor_id: 0,
    vendor_part_id: 0,
    max_qp: 65_536,
    max_qp_wr: 16_384,
    max_sge: 32,
    max_sge_rd: 32,
    max_inline: 400,
    max_cq: 16_384,
    max_cqe: 32_767,
    max_mr: 262_144,
    max_pd: 32_764,
    max_rd_atom: 128,
    max_mw: 0,
    // rxe has 8192, which is more than anywarp has.
    max_mcast_grp: 4096,
    max_mcast_qp_attach: 56,
    max_ah: 100,
    max_srq: 960,
    max_srq_wr: 16_384,
    max_srq_sge: 27,
    max_msg_sz: 8 << 20,
    max_counters: 0,
    caps: IBV_DEVICE_BAD_PKEY_CNTR
        | IBV_DEVICE_BAD_QKEY_CNTR
        | IBV_DEVICE_AUTO_PATH_MIG
        | IBV_DEVICE_CHANGE_PHY_PORT
        | IBV_DEVICE_UD_AV_PORT_ENFORCE
        | IBV_DEVICE_PORT_ACTIVE_EVENT
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_MEM_MGT_EXTENSIONS,
    atomic_cap: IBV_ATOMIC_HCA,
    odp: NO_ODP,
    xrc_odp: 0,
    max_dm_size: 0,
    types: &[IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD],
    rights: (!IBV_ACCESS_ON_DEMAND, libc::EINVAL),
    has: Features {
        atomic_write: false,
        domains: false,
        null_region: false,
        reregister: false,
        blocks_own_multicast: false,
        ..ANYWARP.has
    },
    ..ANYWARP
};

/// A ConnectX-6 Dx.
const MLX5: Profile = Profile {
    name: "mlx5",
    node: Some((IBV_NODE_CA, IBV_TRANSPORT_IB)),
    vendor_id: 0x02_c9,
    vendor_part_id: 4125,
    // Limits that are not set here are higher on the adapter than in anywarp.
    max_qp_wr: 32_768,
    max_sge: 30,
    max_sge_rd: 30,
    max_cqe: 4_194_303,
    max_rd_atom: 16,
    max_mcast_qp_attach: 240,
    max_srq_wr: 32_767,
    max_srq_sge: 31,
    max_msg_sz: 0x4000_0000,
    max_counters: 0,
    caps: IBV_DEVICE_BAD_PKEY_CNTR
        | IBV_DEVICE_BAD_QKEY_CNTR
        | IBV_DEVICE_AUTO_PATH_MIG
        | IBV_DEVICE_CHANGE_PHY_PORT
        | IBV_DEVICE_PORT_ACTIVE_EVENT
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_XRC
        | IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B,
    atomic_cap: IBV_ATOMIC_HCA,
    odp: ibv_odp_caps {
        general_caps: IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
        per_transport_caps: ibv_odp_transport_caps {
            rc_odp_caps: RELIABLE & !(IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_ATOMIC_WRITE),
            uc_odp_caps: 0,
            ud_odp_caps: IBV_ODP_SUPPORT_SEND,
        },
    },
    xrc_odp: RELIABLE
        & !(IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_ATOMIC_WRITE | IBV_ODP_SUPPORT_RECV),
    max_dm_size: 131_072,
    has: Features {
        atomic_write: false,
        resize_srq: false,
        ..ANYWARP.has
    },
    ..ANYWARP
};

/// An Elastic Fabric Adapter, without its SRD queue pairs, which anywarp does not support.
const EFA: Profile = Profile {
    name: "efa",
    node: Some((IBV_NODE_UNSPECIFIED, IBV_TRANSPORT_UNSPECIFIED)),
    vendor_id: 0x1d0f,
    vendor_part_id: 0xefa0,
    max_qp: 256,
    max_sge: 2,
    max_sge_rd: 1,
    max_inline: 32,
    max_rd_atom: 0,
    max_mw: 0,
    max_mcast_grp: 0,
    max_mcast_qp_attach: 0,
    max_srq: 0,
    max_srq_wr: 0,
    max_srq_sge: 0,
    max_msg_sz: bounds::UD_MTU,
    caps: 0,
    atomic_cap: IBV_ATOMIC_NONE,
    odp: NO_ODP,
    xrc_odp: 0,
    max_dm_size: 0,
    types: &[IBV_QPT_UD],
    rights: (
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_OPTIONAL_RANGE,
        libc::EOPNOTSUPP,
    ),
    has: Features {
        atomics: false,
        atomic_write: false,
        local_invalidate: false,
        domains: false,
        null_region: false,
        resize_cq: false,
        resize_srq: false,
        reregister: false,
        blocks_own_multicast: false,
        connects_itself: false,
        ..ANYWARP.has
    },
    ..ANYWARP
};

/// All profiles that `ANYWARP_DEVICE_PROFILE` can name.
const PROFILES: [&Profile; 5] = [&ANYWARP, &SIW, &RXE, &MLX5, &EFA];

fn by_name(name: Option<&str>) -> Option<&'static Profile> {
    let Some(name) = name.filter(|n| !n.is_empty()) else {
        return Some(&ANYWARP);
    };
    PROFILES.into_iter().find(|p| p.name == name)
}

/// Returns the profile of this process. An unknown name is logged, and opening the device then fails.
pub(crate) fn profile() -> &'static Profile {
    chosen().unwrap_or(&ANYWARP)
}

fn chosen() -> Option<&'static Profile> {
    static PROFILE: Inherited<Option<&Profile>> = Inherited::new(|| {
        let name = config().device_profile.as_deref();
        let found = by_name(name);
        if found.is_none() {
            anywarp_engine::log::write(
                anywarp_engine::log::Level::Error,
                format_args!(
                    "ANYWARP_DEVICE_PROFILE={}: unknown profile; the profiles are {}",
                    name.unwrap_or_default(),
                    PROFILES.map(|p| p.name).join(", ")
                ),
            );
        }
        found
    });
    *PROFILE.get()
}

/// Fails with `EINVAL` if the environment names an unknown profile. Without this check, a test with a
/// misspelled profile would run without any profile and could pass.
pub(crate) fn check() -> Result<(), i32> {
    chosen().map(|_| ()).ok_or(libc::EINVAL)
}

impl Profile {
    /// Checks the type and the sizes of a new queue pair.
    pub(crate) fn admits_qp(&self, init: &ibv_qp_init_attr) -> Result<(), i32> {
        if !self.types.contains(&init.qp_type) || !init.srq.is_null() && self.max_srq == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let cap = &init.cap;
        let own_receives = init.srq.is_null();
        let fits = cap.max_send_wr <= self.max_qp_wr
            && cap.max_send_sge <= self.max_sge
            && cap.max_inline_data <= self.max_inline
            && (!own_receives
                || cap.max_recv_wr <= self.max_qp_wr && cap.max_recv_sge <= self.max_sge);
        if fits { Ok(()) } else { Err(libc::EINVAL) }
    }

    /// Checks the sizes of a new shared receive queue.
    pub(crate) fn admits_srq(&self, attr: &ibv_srq_attr) -> Result<(), i32> {
        if self.max_srq == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if attr.max_wr > self.max_srq_wr || attr.max_sge > self.max_srq_sge {
            return Err(libc::EINVAL);
        }
        Ok(())
    }

    /// Checks the access rights of a region. Returns the rights without the ignored ones.
    pub(crate) fn rights_of(&self, access: u32) -> Result<u32, i32> {
        let (known, errno) = self.rights;
        if access & !known != 0 {
            return Err(errno);
        }
        Ok(access & !self.empty_rights)
    }

    /// Checks a work request.
    #[inline]
    pub(crate) fn admits(&self, op: &Op, payload: &Payload) -> Result<(), Misuse> {
        let has = &self.has;
        let known = match op {
            Op::Send { imm, .. } => imm.is_none() || has.immediate,
            Op::Write { imm, .. } => imm.is_none() || has.immediate,
            Op::AtomicWrite { .. } => has.atomic_write,
            Op::CompareSwap { .. } | Op::FetchAdd { .. } => has.atomics,
            Op::LocalInvalidate { .. } => has.local_invalidate,
            Op::Bind(_) => self.max_mw > 0,
            Op::Read { .. } => true,
        };
        if !known {
            return Err(Misuse::InvalidArgument(
                "an operation that the profile's device does not have",
            ));
        }
        let (elements, bytes) = match payload {
            Payload::Sges(sges) => (
                sges.len(),
                sges.iter().map(|s| u64::from(s.len)).sum::<u64>(),
            ),
            Payload::Inline(data) => (0, data.len() as u64),
        };
        if matches!(op, Op::Read { .. }) && elements > self.max_sge_rd as usize {
            return Err(Misuse::InvalidArgument(
                "more elements than a Read of the profile's device has",
            ));
        }
        if bytes > u64::from(self.max_msg_sz) {
            return Err(Misuse::InvalidArgument(
                "a message longer than the profile's device sends",
            ));
        }
        Ok(())
    }

    /// Returns the bits of the operations of `ibv_qp_ex` that the device has. Bits without a meaning are set too.
    pub(crate) fn send_ops(&self) -> u64 {
        let mut missing = 0;
        if !self.has.atomics {
            missing |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        }
        if !self.has.atomic_write {
            missing |= IBV_QP_EX_WITH_ATOMIC_WRITE;
        }
        if self.max_mw == 0 {
            missing |= IBV_QP_EX_WITH_BIND_MW;
        }
        if !self.has.local_invalidate {
            missing |= IBV_QP_EX_WITH_LOCAL_INV;
        }
        !missing
    }
}

// ---------------------------------------------------------------------- numbers of objects

/// The kinds of objects whose number is limited.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counted {
    Qp,
    Cq,
    Mr,
    Pd,
    Ah,
    Srq,
    Mw,
    Counter,
}

impl Counted {
    fn most(self, profile: &Profile) -> u32 {
        match self {
            Self::Qp => profile.max_qp,
            Self::Cq => profile.max_cq,
            Self::Mr => profile.max_mr,
            Self::Pd => profile.max_pd,
            Self::Ah => profile.max_ah,
            Self::Srq => profile.max_srq,
            Self::Mw => profile.max_mw,
            Self::Counter => profile.max_counters,
        }
    }

    fn count(self) -> Option<&'static AtomicU32> {
        // A forked child has none of its parent's objects.
        static COUNTS: PerProcess<[AtomicU32; 8]> = PerProcess::new(Default::default);
        COUNTS.get().get(self as usize)
    }
}

/// Counts one object of a kind until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedObject(Counted);

impl CountedObject {
    /// Counts one more object. `ENOMEM`: the limit is reached. `EOPNOTSUPP`: the device has no objects of this kind.
    pub(crate) fn take(kind: Counted) -> Result<Self, i32> {
        Self::take_of(kind, kind.most(profile()))
    }

    fn take_of(kind: Counted, most: u32) -> Result<Self, i32> {
        if most == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let Some(count) = kind.count() else {
            return Err(libc::ENOMEM);
        };
        let more = |n: u32| (n < most).then_some(n + 1);
        count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map(|_| Self(kind))
            .map_err(|_| libc::ENOMEM)
    }
}

impl Drop for CountedObject {
    fn drop(&mut self) {
        if let Some(count) = self.0.count() {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_profile_is_found_by_its_name_and_others_are_not() {
        for profile in PROFILES {
            assert_eq!(by_name(Some(profile.name)).unwrap().name, profile.name);
        }
        assert_eq!(by_name(None).unwrap().name, "anywarp");
        assert_eq!(by_name(Some("")).unwrap().name, "anywarp");
        assert!(by_name(Some("SIW")).is_none());
        assert!(by_name(Some("mlx4")).is_none());
    }

    /// The limits of a profile are within those of this device.
    #[test]
    fn no_profile_promises_more_than_the_device_has() {
        let a = &ANYWARP;
        for p in PROFILES {
            let pairs = [
                (p.max_qp, a.max_qp),
                (p.max_qp_wr, a.max_qp_wr),
                (p.max_sge, a.max_sge),
                (p.max_sge_rd, a.max_sge_rd),
                (p.max_inline, a.max_inline),
                (p.max_cq, a.max_cq),
                (p.max_cqe, a.max_cqe),
                (p.max_mr, a.max_mr),
                (p.max_pd, a.max_pd),
                (p.max_rd_atom, a.max_rd_atom),
                (p.max_mw, a.max_mw),
                (p.max_mcast_grp, a.max_mcast_grp),
                (p.max_mcast_qp_attach, a.max_mcast_qp_attach),
                (p.max_ah, a.max_ah),
                (p.max_srq, a.max_srq),
                (p.max_srq_wr, a.max_srq_wr),
                (p.max_srq_sge, a.max_srq_sge),
                (p.max_msg_sz, a.max_msg_sz),
                (p.xrc_odp, a.xrc_odp),
                (p.max_counters, a.max_counters),
            ];
            for (i, (shown, kept)) in pairs.into_iter().enumerate() {
                assert!(shown <= kept, "{}: number {i}: {shown} > {kept}", p.name);
            }
            assert!(p.max_dm_size <= a.max_dm_size);
            assert!(p.types.iter().all(|t| a.types.contains(t)));
        }
    }

    #[test]
    fn the_number_of_objects_is_limited_to_that_of_the_device() {
        let held: Vec<_> = (0..3)
            .map(|_| CountedObject::take_of(Counted::Mw, 3).unwrap())
            .collect();
        assert_eq!(
            CountedObject::take_of(Counted::Mw, 3).unwrap_err(),
            libc::ENOMEM
        );
        drop(held);
        assert!(CountedObject::take_of(Counted::Mw, 1).is_ok());
        assert_eq!(
            CountedObject::take_of(Counted::Mw, 0).unwrap_err(),
            libc::EOPNOTSUPP
        );
    }
}
