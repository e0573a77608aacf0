//! Static rates: `ibv_rate_to_mbps(3)` and related functions.

use crate::entry;
use anywarp_verbs_sys::verbs::{
    IBV_RATE_2_5_GBPS, IBV_RATE_5_GBPS, IBV_RATE_10_GBPS, IBV_RATE_14_GBPS, IBV_RATE_20_GBPS,
    IBV_RATE_25_GBPS, IBV_RATE_28_GBPS, IBV_RATE_30_GBPS, IBV_RATE_40_GBPS, IBV_RATE_50_GBPS,
    IBV_RATE_56_GBPS, IBV_RATE_60_GBPS, IBV_RATE_80_GBPS, IBV_RATE_100_GBPS, IBV_RATE_112_GBPS,
    IBV_RATE_120_GBPS, IBV_RATE_168_GBPS, IBV_RATE_200_GBPS, IBV_RATE_300_GBPS, IBV_RATE_400_GBPS,
    IBV_RATE_600_GBPS, IBV_RATE_800_GBPS, IBV_RATE_1200_GBPS, IBV_RATE_MAX, ibv_rate,
};
use std::ffi::c_int;

/// Each rate, its multiple of 2.5 Gbit/s if it has one, and its Mbit/s.
///
/// The numbers do not follow from the names: lanes of the FDR generation and later do not run at a round number of Gbit/s.
/// libibverbs gives some of these rates a whole multiple nevertheless (28.125 Gbit/s: 11).
const RATES: [(ibv_rate, Option<c_int>, c_int); 23] = [
    (IBV_RATE_2_5_GBPS, Some(1), 2_500),
    (IBV_RATE_5_GBPS, Some(2), 5_000),
    (IBV_RATE_10_GBPS, Some(4), 10_000),
    (IBV_RATE_14_GBPS, None, 14_062),
    (IBV_RATE_20_GBPS, Some(8), 20_000),
    (IBV_RATE_25_GBPS, None, 25_781),
    (IBV_RATE_28_GBPS, Some(11), 28_125),
    (IBV_RATE_30_GBPS, Some(12), 30_000),
    (IBV_RATE_40_GBPS, Some(16), 40_000),
    (IBV_RATE_50_GBPS, Some(20), 53_125),
    (IBV_RATE_56_GBPS, None, 56_250),
    (IBV_RATE_60_GBPS, Some(24), 60_000),
    (IBV_RATE_80_GBPS, Some(32), 80_000),
    (IBV_RATE_100_GBPS, None, 103_125),
    (IBV_RATE_112_GBPS, None, 112_500),
    (IBV_RATE_120_GBPS, Some(48), 120_000),
    (IBV_RATE_168_GBPS, None, 168_750),
    (IBV_RATE_200_GBPS, None, 206_250),
    (IBV_RATE_300_GBPS, None, 309_375),
    (IBV_RATE_400_GBPS, Some(160), 425_000),
    (IBV_RATE_600_GBPS, Some(240), 637_500),
    (IBV_RATE_800_GBPS, Some(320), 850_000),
    (IBV_RATE_1200_GBPS, Some(480), 1_275_000),
];

entry! {
    /// `ibv_rate_to_mult(3)`: returns the rate as a multiple of 2.5 Gbit/s, or -1.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_rate_to_mult(rate: ibv_rate) -> c_int, value(-1), {
        RATES.iter().find(|r| r.0 == rate).and_then(|r| r.1).unwrap_or(-1)
    }
}

entry! {
    /// `mult_to_ibv_rate(3)`: returns the rate that is `mult` times 2.5 Gbit/s, or `IBV_RATE_MAX`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn mult_to_ibv_rate(mult: c_int) -> ibv_rate, value(IBV_RATE_MAX), {
        RATES.iter().find(|r| r.1 == Some(mult)).map_or(IBV_RATE_MAX, |r| r.0)
    }
}

entry! {
    /// `ibv_rate_to_mbps(3)`: returns the rate in Mbit/s, or -1.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int, value(-1), {
        RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
    }
}

entry! {
    /// `mbps_to_ibv_rate(3)`: returns the rate of exactly `mbps` Mbit/s, or `IBV_RATE_MAX`.
    ///
    /// # Safety
    /// Any number may be passed.
    unsafe fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate, value(IBV_RATE_MAX), {
        RATES.iter().find(|r| r.2 == mbps).map_or(IBV_RATE_MAX, |r| r.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution::{self, IBVERBS};
    use std::ffi::CStr;

    type Convert = unsafe extern "C" fn(c_int) -> c_int;

    fn same(name: &CStr, ours: impl Fn(c_int) -> c_int, arguments: impl Iterator<Item = c_int>) {
        let Some(address) = distribution::symbol(IBVERBS, name) else {
            return;
        };
        // SAFETY: all four functions take and return a number of 32 bits.
        let theirs: Convert = unsafe { std::mem::transmute(address) };
        for n in arguments {
            // SAFETY: any number may be passed.
            assert_eq!(ours(n), unsafe { theirs(n) }, "{name:?}({n})");
        }
    }

    /// Every rate converts as in the distribution's library, in both directions.
    #[test]
    fn rates_are_those_of_the_distribution() {
        // SAFETY: any number may be passed.
        let to_mult = |n: c_int| unsafe { ibv_rate_to_mult(n.cast_unsigned()) };
        // SAFETY: as above.
        let to_mbps = |n: c_int| unsafe { ibv_rate_to_mbps(n.cast_unsigned()) };
        // SAFETY: as above.
        let from_mult = |n| unsafe { mult_to_ibv_rate(n) }.cast_signed();
        // SAFETY: as above.
        let from_mbps = |n| unsafe { mbps_to_ibv_rate(n) }.cast_signed();
        same(c"ibv_rate_to_mult", to_mult, -2..40);
        same(c"ibv_rate_to_mbps", to_mbps, -2..40);
        same(c"mult_to_ibv_rate", from_mult, -2..600);
        let mbps = RATES.iter().flat_map(|r| [r.2 - 1, r.2, r.2 + 1]);
        same(c"mbps_to_ibv_rate", from_mbps, mbps);
    }
}
