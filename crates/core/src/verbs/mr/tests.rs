//! Registration, access checks and windows.

use super::*;

fn numbers() -> impl FnMut() -> u32 {
    let mut n = 0x1234_5601_u32;
    move || {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        n
    }
}

fn registered(access: Access) -> (Regions, Arc<Region>) {
    let regions = Regions::new();
    let what = Registration {
        start: 0x10_000,
        len: 4096,
        base: 0x10_000,
        access,
        pd: 1,
        present: None,
    };
    let region = regions.register(&what, &mut numbers()).unwrap();
    (regions, region)
}

#[test]
fn the_last_octet_is_inside_and_the_next_is_not() {
    let (regions, r) = registered(Access::REMOTE_WRITE | Access::LOCAL_WRITE);
    let check = |to, len| {
        regions
            .check(r.stag(), 1, 0, Access::REMOTE_WRITE, To(to), len)
            .map(|p| p.len())
    };
    assert_eq!(check(0x10_000 + 4095, 1), Ok(1));
    assert_eq!(check(0x10_000 + 4095, 2), Err(AccessError::Bounds));
    assert_eq!(check(0x10_000, 4096), Ok(4096));
    assert_eq!(check(0x10_000 - 1, 1), Err(AccessError::Bounds));
    assert_eq!(check(u64::MAX, 1), Err(AccessError::Wrap));
    assert_eq!(check(u64::MAX, 0), Err(AccessError::Bounds));
}

#[test]
fn every_access_right_is_checked() {
    let (regions, r) = registered(Access::LOCAL_WRITE | Access::REMOTE_READ);
    let check = |need, pd| {
        regions
            .check(r.stag(), pd, 0, need, To(0x10_000), 8)
            .map(|p| p.len())
    };
    assert_eq!(check(Access::REMOTE_READ, 1), Ok(8));
    assert_eq!(check(Access::REMOTE_WRITE, 1), Err(AccessError::Rights));
    assert_eq!(check(Access::REMOTE_ATOMIC, 1), Err(AccessError::Rights));
    assert_eq!(
        check(Access::REMOTE_READ, 2),
        Err(AccessError::NotAssociated)
    );
    assert_eq!(
        regions
            .check(Stag(r.stag().0 ^ 1), 1, 0, Access::NONE, To(0x10_000), 8)
            .map(|p| p.len()),
        Err(AccessError::Invalid)
    );
}

/// A handle that was found before the region was registered again ends the present registration.
#[test]
fn an_old_handle_deregisters_the_present_registration() {
    let (regions, old) = registered(Access::LOCAL_WRITE);
    let moved = Registration {
        start: 0x20_000,
        len: 4096,
        base: 0x20_000,
        access: Access::LOCAL_WRITE,
        pd: 1,
        present: None,
    };
    let new = regions.reregister(&old, &moved).unwrap();
    regions.deregister(&old).unwrap();
    assert!(new.pin().is_none());
    assert!(regions.is_empty());
    // Another registration with the same key is not that of the handle.
    let mut same_key = || old.stag().0;
    let other = regions.register(&moved, &mut same_key).unwrap();
    assert_eq!(other.stag(), old.stag());
    regions.deregister(&new).unwrap();
    assert!(other.pin().is_some());
}

/// A remembered region is checked again for each access, and is not found after it was deregistered.
#[test]
fn a_remembered_region_is_checked_again() {
    let (regions, r) = registered(Access::LOCAL_WRITE);
    let mut last = LastRegion::default();
    let mut pin = |stag, pd, need, to| {
        let pinned = regions.pin(&mut last, stag, pd, 0, need, To(to), 8);
        pinned.map(|p| p.start())
    };
    let (write, none) = (Access::LOCAL_WRITE, Access::NONE);
    assert_eq!(pin(r.stag(), 1, write, 0x10_008), Ok(0x10_008));
    assert_eq!(
        pin(r.stag(), 2, write, 0x10_000),
        Err(AccessError::NotAssociated)
    );
    assert_eq!(
        pin(r.stag(), 1, Access::REMOTE_WRITE, 0x10_000),
        Err(AccessError::Rights)
    );
    assert_eq!(
        pin(r.stag(), 1, none, 0x10_000 + 4090),
        Err(AccessError::Bounds)
    );
    // The index of the region with another key.
    let other = Stag(r.stag().0 ^ 1);
    assert_eq!(pin(other, 1, none, 0x10_000), Err(AccessError::Invalid));
    assert_eq!(pin(r.stag(), 1, none, 0x10_000), Ok(0x10_000));
    let moved = Registration {
        start: 0x50_000,
        len: 4096,
        base: 0x10_000,
        access: write,
        pd: 1,
        present: None,
    };
    let new = regions.reregister(&r, &moved).unwrap();
    assert_eq!(pin(new.stag(), 1, none, 0x10_000), Ok(0x50_000));
    regions.deregister(&new).unwrap();
    assert_eq!(
        pin(new.stag(), 1, none, 0x10_000),
        Err(AccessError::Invalid)
    );
}

#[test]
fn stags_are_random_and_unused() {
    // RFC 5040 §8.1.1 (8) [stag-random]: STags are not consecutive, and use the whole range.
    let regions = Regions::new();
    let what = Registration {
        start: 0x10_000,
        len: 4096,
        base: 0x10_000,
        access: Access::NONE,
        pd: 1,
        present: None,
    };
    let mut random = [
        0x8000_0001,
        0xffff_fe7f,
        0x0000_0133,
        // An index in use, index 0, and the largest index are skipped: the next number is used.
        0x8000_0002,
        0x0000_0012,
        0xffff_ff12,
        0x7654_3210,
    ]
    .into_iter();
    let mut stags = Vec::new();
    for _ in 0..4 {
        let region = regions.register(&what, &mut || random.next().unwrap());
        stags.push(region.unwrap().stag().0);
    }
    assert_eq!(stags, [0x8000_0001, 0xffff_fe7f, 0x0000_0133, 0x7654_3210]);
}

#[test]
fn after_deregister_a_placement_cannot_be_pinned() {
    let (regions, r) = registered(Access::LOCAL_WRITE);
    let placement = regions
        .check(r.stag(), 1, 0, Access::LOCAL_WRITE, To(0x10_000), 8)
        .unwrap();
    assert!(placement.pin().is_some());
    regions.deregister(&r).unwrap();
    assert!(placement.pin().is_none());
    assert!(regions.is_empty());
}

#[test]
fn a_window_of_type_2_serves_its_queue_pair_until_invalidated() {
    let (regions, r) = registered(Access::LOCAL_WRITE | Access::MW_BIND);
    let window = regions
        .alloc_window(1, true, &mut numbers_from(77))
        .unwrap();
    let rkey = Stag((window.0 & !0xff) | u32::from(window.key().wrapping_add(1)));
    let bind = Bind {
        window,
        rkey,
        mr: r.stag(),
        addr: 0x10_100,
        len: 16,
        access: Access::REMOTE_WRITE,
    };
    regions.bind(&bind, 1, 9).unwrap();
    let check = |qpn, to, len| {
        regions
            .check(rkey, 1, qpn, Access::REMOTE_WRITE, To(to), len)
            .map(|p| p.len())
    };
    assert_eq!(check(9, 0x10_100, 16), Ok(16));
    assert_eq!(check(9, 0x10_100, 17), Err(AccessError::Bounds));
    assert_eq!(check(8, 0x10_100, 16), Err(AccessError::NotAssociated));
    assert!(matches!(regions.deregister(&r), Err(Misuse::Busy)));
    assert_eq!(
        regions.invalidate(rkey, 1, 8),
        Err(AccessError::NotAssociated)
    );
    assert_eq!(regions.invalidate(rkey, 1, 9), Ok(()));
    assert_eq!(check(9, 0x10_100, 16), Err(AccessError::Invalid));
    assert!(regions.deregister(&r).is_ok());
}

#[test]
fn the_windows_of_a_queue_pair_are_unbound_together() {
    let (regions, r) = registered(Access::LOCAL_WRITE | Access::MW_BIND);
    let mut numbers = numbers_from(79);
    let mut bind = |type2, qpn| {
        let window = regions.alloc_window(1, type2, &mut numbers).unwrap();
        let bind = Bind {
            window,
            rkey: Stag(window.0 ^ 1),
            mr: r.stag(),
            addr: 0x10_100,
            len: 16,
            access: Access::REMOTE_WRITE,
        };
        regions.bind(&bind, 1, qpn).unwrap();
        bind
    };
    let (own, other, type1) = (bind(true, 9), bind(true, 8), bind(false, 9));
    let check = |bind: &Bind, qpn| {
        regions
            .check(bind.rkey, 1, qpn, Access::REMOTE_WRITE, To(0x10_100), 8)
            .map(|p| p.len())
    };
    let placement = regions
        .check(own.rkey, 1, 9, Access::REMOTE_WRITE, To(0x10_100), 8)
        .unwrap();
    regions.unbind_windows(1, 9);
    assert!(placement.pin().is_none());
    assert_eq!(check(&own, 9), Err(AccessError::Invalid));
    assert_eq!(check(&other, 8), Ok(8));
    assert_eq!(check(&type1, 9), Ok(8));
    // The window can be bound again.
    regions.bind(&own, 1, 9).unwrap();
    assert_eq!(check(&own, 9), Ok(8));
}

#[test]
fn only_a_window_can_be_bound() {
    let (regions, r) = registered(Access::LOCAL_WRITE | Access::MW_BIND);
    let kind = Kind::Null {
        sink: 0x1000,
        zeroes: 0x2000,
        len: 64,
    };
    let null = regions
        .register_null(1, kind, &mut numbers_from(78))
        .unwrap();
    for region in [&null, &r] {
        let bind = Bind {
            window: region.stag(),
            rkey: region.stag(),
            mr: r.stag(),
            addr: 0x10_100,
            len: 16,
            access: Access::REMOTE_WRITE,
        };
        assert_eq!(regions.bind(&bind, 1, 9), Err(AccessError::Invalid));
    }
}

fn numbers_from(seed: u32) -> impl FnMut() -> u32 {
    let mut n = seed;
    move || {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        n
    }
}

#[test]
fn remote_write_without_local_write_is_refused() {
    assert!(Access::for_region(2).is_err());
    assert!(Access::for_region(8).is_err());
    assert!(Access::for_region(4).is_ok());
    assert!(Access::for_region(0xf).is_ok());
    assert!(Access::for_region(1 << 8).is_err());
}
