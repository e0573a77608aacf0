//! Every interleaving of registration, binding and access by two threads.

use loom::thread;

use super::*;

const STAG_SEED: u32 = 0x1234_5601;

fn numbers() -> impl FnMut() -> u32 {
    let mut n = STAG_SEED;
    move || {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        n
    }
}

fn what(start: u64) -> Registration {
    Registration {
        start,
        len: 64,
        base: 0x1000,
        access: Access::LOCAL_WRITE | Access::MW_BIND,
        pd: 1,
        present: None,
    }
}

/// A table with a region at 0x1000 and a window of type 2 that the returned request binds to it.
fn table() -> (Arc<Regions>, Arc<Region>, Bind) {
    let regions = Arc::new(Regions::new());
    let mut random = numbers();
    let region = regions.register(&what(0x1000), &mut random).unwrap();
    let window = regions.alloc_window(1, true, &mut random).unwrap();
    let bind = Bind {
        window,
        rkey: window,
        mr: region.stag(),
        addr: 0x1000,
        len: 8,
        access: Access::REMOTE_WRITE,
    };
    (regions, region, bind)
}

#[test]
fn loom_a_region_is_deregistered_or_a_window_bound_to_it_but_not_both() {
    loom::model(|| {
        let (regions, region, bind) = table();
        let binder = {
            let regions = Arc::clone(&regions);
            thread::spawn(move || regions.bind(&bind, 1, 9).is_ok())
        };
        let gone = regions.deregister(&region).is_ok();
        let bound = binder.join().unwrap();
        assert!(gone != bound, "deregistered: {gone}, window bound: {bound}");
    });
}

#[test]
fn loom_a_window_lies_in_the_memory_that_its_region_has_after_rereg_mr() {
    loom::model(|| {
        let (regions, region, bind) = table();
        let binder = {
            let regions = Arc::clone(&regions);
            thread::spawn(move || regions.bind(&bind, 1, 9).is_ok())
        };
        let moved = regions.reregister(&region, &what(0x5000)).is_ok();
        assert!(binder.join().unwrap());
        let mut last = LastRegion::default();
        let need = Access::REMOTE_WRITE;
        let pinned = regions.pin(&mut last, bind.rkey, 1, 9, need, To(0x1000), 8);
        let expected = if moved { 0x5000 } else { 0x1000 };
        assert_eq!(pinned.map(|p| p.start()), Ok(expected));
    });
}

#[test]
fn loom_deregistered_memory_is_not_accessed() {
    loom::model(|| {
        let (regions, region, _) = table();
        let registered = Arc::new(AtomicBool::new(true));
        let peer = {
            let (regions, registered) = (Arc::clone(&regions), Arc::clone(&registered));
            let stag = region.stag();
            thread::spawn(move || {
                let need = Access::LOCAL_WRITE;
                let place = regions.check(stag, 1, 9, need, To(0x1000), 8);
                if let Ok(place) = &place
                    && let Some(_pinned) = place.pin()
                {
                    assert!(registered.load(Ordering::SeqCst));
                }
            })
        };
        regions.deregister(&region).unwrap();
        registered.store(false, Ordering::SeqCst);
        peer.join().unwrap();
    });
}
