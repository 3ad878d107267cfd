//! Once they are open, storage and workers allocate nothing: counted by the allocator itself, over all threads.

use std::alloc::System;
use std::fs;
use std::path::Path;

use forerun_engine::ports::{Read, Storage, Workers};
use forerun_linux::{Arena, DirectFile, FileStorage, IoChoice, Pool};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

// One test, so that no other one allocates meanwhile.
#[test]
fn nothing_is_allocated_after_open() {
    const SLOT: usize = 64 << 10;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_alloc");
    fs::write(&path, vec![7; 16 * SLOT]).unwrap();
    for io in [IoChoice::Auto, IoChoice::Pread] {
        let arena = Arena::new(16 * SLOT).unwrap();
        let file = DirectFile::open(&path).unwrap();
        let mut storage = FileStorage::open(file, arena.take_io(8 * SLOT).unwrap(), 8, SLOT, io, 8).unwrap();
        let reads: Vec<_> =
            (0..8).map(|slot| Read { slot, offset: u64::from(slot) * 4096, bytes: SLOT as u32 }).collect();
        let past_the_end = [Read { slot: 0, offset: 16 * SLOT as u64, bytes: 4096 }];
        let resident = arena.take(SLOT, 4096).unwrap();
        let mut row = [0; 5000];
        let mut round = |storage: &mut FileStorage| {
            assert_eq!(storage.submit(&reads), 8);
            storage.read_at(1000, &mut row).unwrap();
            while storage.complete(true).is_some() {}
            assert_eq!(storage.submit(&past_the_end), 1);
            assert!(storage.complete(true).unwrap().result.is_err());
            storage.load(4096, resident).unwrap();
        };
        round(&mut storage); // A thread's first wait sets up its thread-locals.
        let region = Region::new(COUNTED);
        (0..100).for_each(|_| round(&mut storage));
        let change = region.change();
        assert_eq!((change.allocations, change.reallocations), (0, 0), "{}: {change:?}", storage.backend());
    }
    fs::remove_file(path).unwrap();

    let pool = Pool::new(3, None).unwrap();
    let mut out = vec![0.0; 100];
    pool.split(&mut out, 1, &|i, o| o.fill(i as f32));
    let region = Region::new(COUNTED);
    (0..1000).for_each(|_| pool.split(&mut out, 7, &|i, o| o.fill(i as f32)));
    let change = region.change();
    assert_eq!((change.allocations, change.reallocations), (0, 0), "pool: {change:?}");
}
