//! Access rights of memory regions, memory windows and queue pairs.

use std::ops::{BitAnd, BitOr};

use crate::error::Misuse;

/// Access rights; the bits are those of `enum ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(pub u32);

impl Access {
    /// No rights beyond local reading, which every region allows.
    pub const NONE: Self = Self(0);
    /// Received data may be placed.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer may write.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// The peer may read.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// The peer may execute atomic operations.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Memory windows may be bound to the region.
    pub const MW_BIND: Self = Self(1 << 4);
    /// Offsets start at zero instead of the virtual address.
    pub const ZERO_BASED: Self = Self(1 << 5);
    /// On-demand paging: the memory may be unmapped and mapped while it is registered. Each access checks whether it
    /// is present.
    pub const ON_DEMAND: Self = Self(1 << 6);
    /// Huge pages: no effect here.
    pub const HUGETLB: Self = Self(1 << 7);
    /// Relaxed ordering: no effect here.
    pub const RELAXED_ORDERING: Self = Self(1 << 20);

    /// The bits that are accepted: bits 0 to 7, and bits 20 to 29. The latter are the optional access flags,
    /// which a device may ignore.
    const KNOWN: u32 = 0xff | 0x3ff0_0000;

    /// Whether all rights of `other` are contained.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The rights that a registration requests (`ibv_reg_mr(3)`).
    pub fn for_region(bits: u32) -> Result<Self, Misuse> {
        if bits & !Self::KNOWN != 0 {
            return Err(Misuse::InvalidArgument("unknown access flag"));
        }
        let access = Self(bits);
        // ibv_reg_mr(3): remote write and atomics need local write.
        if (access.has(Self::REMOTE_WRITE) || access.has(Self::REMOTE_ATOMIC))
            && !access.has(Self::LOCAL_WRITE)
        {
            return Err(Misuse::InvalidArgument(
                "remote write or atomic access without local write",
            ));
        }
        Ok(access)
    }
}

impl BitOr for Access {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Access {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}
