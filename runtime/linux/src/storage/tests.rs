//! Every test runs on io_uring and on pread threads, past the page cache and through it, against `std::fs`.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::*;
use crate::sys;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// xorshift64*: the same numbers on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A file of noise, removed when dropped.
struct Noise {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Noise {
    /// Beside the test binary, which is on a disk and not in memory.
    fn new(name: &str, len: usize) -> Self {
        let exe = std::env::current_exe().unwrap();
        Self::in_dir(exe.parent().unwrap(), name, len)
    }

    fn in_dir(dir: &Path, name: &str, len: usize) -> Self {
        let path = dir.join(format!("noise-{name}-{}", std::process::id()));
        let mut random = Random(0x9e37_79b9 + len as u64);
        let bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(len).collect();
        fs::write(&path, &bytes).unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes);
        Self { path, bytes }
    }
}

impl Drop for Noise {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn storage(file: DirectFile, io: IoChoice, slots: usize, slot_bytes: usize, depth: usize) -> io::Result<FileStorage> {
    let memory = Arena::new(slots * slot_bytes)?.take_io(slots * slot_bytes).unwrap();
    FileStorage::open(file, memory, slots, slot_bytes, io, depth)
}

/// Runs `test` on each engine and each way to the file, with `slots` slots of `slot_bytes` bytes.
fn on_each(path: &Path, slots: usize, slot_bytes: usize, depth: usize, test: impl Fn(FileStorage, &str)) {
    for io in [IoChoice::Uring, IoChoice::Pread] {
        for open in [DirectFile::open, DirectFile::open_buffered] {
            match storage(open(path).unwrap(), io, slots, slot_bytes, depth) {
                Ok(storage) => {
                    let way = if storage.file().is_direct() { "O_DIRECT" } else { "buffered" };
                    let label = format!("{}, {way}", storage.backend());
                    test(storage, &label);
                }
                Err(error) if io == IoChoice::Uring => eprintln!("io_uring is not tested here: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn read(slot: u32, offset: u64, bytes: u32) -> Read {
    Read { slot, offset, bytes }
}

fn wait_all(storage: &mut FileStorage) -> Vec<Completion> {
    let mut all: Vec<_> = std::iter::from_fn(|| storage.complete(true)).collect();
    all.sort_by_key(|c| c.slot);
    all
}

#[test]
fn ten_thousand_random_reads_bring_the_bytes_of_the_file() {
    const SLOTS: usize = 24;
    const SLOT_BLOCKS: u64 = 16;
    let noise = Noise::new("random", (8 << 20) + 1234);
    on_each(&noise.path, SLOTS, SLOT_BLOCKS as usize * BLOCK_BYTES, 8, |mut storage, label| {
        let mut random = Random(7);
        let mut flying = [None::<Read>; SLOTS];
        let (mut done, mut refused) = (0, 0);
        while done < 10_000 {
            let mut batch = Vec::new();
            for _ in 0..random.below(6) {
                let slot = random.below(SLOTS as u64) as u32;
                let blocks = 1 + random.below(SLOT_BLOCKS);
                let offset = random.below((8 << 20) / BLOCK - blocks + 1) * BLOCK;
                if flying[slot as usize].is_none() && batch.iter().all(|r: &Read| r.slot != slot) {
                    storage.slot_mut(slot).fill(0xee);
                    batch.push(read(slot, offset, (blocks * BLOCK) as u32));
                }
            }
            let accepted = storage.submit(&batch);
            refused += batch.len() - accepted;
            for r in &batch[..accepted] {
                flying[r.slot as usize] = Some(*r);
            }
            let some_fly = flying.iter().any(Option::is_some);
            let wait = random.below(3) == 0;
            let Some(Completion { slot, result }) = storage.complete(wait) else {
                assert!(!wait || !some_fly, "{label}: nothing completed, with reads in flight");
                continue;
            };
            let r = flying[slot as usize].take().expect("a completion of a read that was made");
            assert_eq!(result, Ok(()), "{label} {r:?}");
            let (start, bytes) = (r.offset as usize, r.bytes as usize);
            let found = storage.slot(slot);
            assert!(found[..bytes] == noise.bytes[start..start + bytes], "{label}: wrong bytes of {r:?}");
            assert!(found[bytes..].iter().all(|&b| b == 0xee), "{label}: written past {r:?}");
            done += 1;
        }
        assert!(refused > 0, "{label}: the test never filled the queue");
        let left = flying.iter().flatten().count();
        assert_eq!(wait_all(&mut storage).len(), left, "{label}");
    });
}

#[test]
fn a_full_queue_pushes_back() {
    let noise = Noise::new("full", 1 << 20);
    on_each(&noise.path, 10, 8192, 4, |mut storage, label| {
        assert_eq!((storage.slots(), storage.slot_bytes(), storage.depth_max()), (10, 8192, 4));
        assert_eq!(storage.complete(true), None, "{label}");
        let reads: Vec<_> = (0..10).map(|i| read(i, u64::from(i) * 8192, 8192)).collect();
        assert_eq!(storage.submit(&reads), 4, "{label}");
        assert_eq!(storage.submit(&reads[4..]), 0, "{label}");
        // Those that were not accepted are still the caller's.
        assert!(storage.slot(4).iter().all(|&b| b == 0));
        assert!(storage.complete(true).is_some());
        assert_eq!(storage.submit(&reads[4..]), 1, "{label}");
        let mut next = 5;
        let mut done = 1;
        while storage.complete(true).is_some() {
            done += 1;
            next += storage.submit(&reads[next..]);
        }
        assert_eq!((next, done), (10, 10), "{label}");
        for i in 0..10 {
            assert!(storage.slot(i as u32) == &noise.bytes[i * 8192..][..8192], "{label}: slot {i}");
        }
    });
}

#[test]
fn the_end_of_the_file_is_an_error_and_frees_the_slot() {
    let noise = Noise::new("eof", 5 * BLOCK_BYTES + 100);
    on_each(&noise.path, 4, 4 * BLOCK_BYTES, 4, |mut storage, label| {
        let block = BLOCK as u32;
        let reads = [
            read(0, 4 * BLOCK, 2 * block),
            read(1, 6 * BLOCK, block),
            read(2, 1 << 63, block),
            read(3, BLOCK, 4 * block),
        ];
        assert_eq!(storage.submit(&reads), 4);
        let results: Vec<_> = wait_all(&mut storage).into_iter().map(|c| c.result).collect();
        let eof = Err(ReadError::Eof);
        assert_eq!(results, [eof, eof, eof, Ok(())], "{label}");
        assert!(storage.slot(3) == &noise.bytes[BLOCK_BYTES..][..4 * BLOCK_BYTES]);
        assert_eq!(storage.submit(&[read(0, 4 * BLOCK, block)]), 1);
        assert_eq!(storage.complete(true), Some(Completion { slot: 0, result: Ok(()) }), "{label}");
    });
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    for io in [IoChoice::Auto, IoChoice::Pread] {
        let noise = Noise::new("shrink", 1 << 20);
        let mut storage = storage(DirectFile::open(&noise.path).unwrap(), io, 1, 1 << 20, 1).unwrap();
        fs::OpenOptions::new().write(true).open(&noise.path).unwrap().set_len(300_000).unwrap();
        assert_eq!(storage.submit(&[read(0, 0, 1 << 20)]), 1);
        assert_eq!(storage.complete(true), Some(Completion { slot: 0, result: Err(ReadError::Eof) }));
        assert_eq!(storage.read_at(299_999, &mut [0; 2]), Err(ReadError::Eof));
        assert_eq!(storage.read_at(299_998, &mut [0; 2]), Ok(()));
    }
}

#[test]
fn any_offset_and_length_can_be_read_beside_slot_reads() {
    let len = 3 * BOUNCE_BYTES + 777;
    let noise = Noise::new("unaligned", len);
    on_each(&noise.path, 4, 64 << 10, 4, |mut storage, label| {
        let mut random = Random(11);
        let mut cases = vec![(0, 0), (0, len), (len, 0), (len - 1, 1), (1, len - 1), (len - 778, 778), (4095, 2)];
        cases.extend((0..300).map(|_| {
            let at = random.below(len as u64) as usize;
            (at, random.below((len - at) as u64 + 1) as usize)
        }));
        let mut landed = 0;
        for (at, n) in cases {
            let slot = random.below(4) as u32;
            if random.below(2) == 0 {
                landed += usize::from(storage.complete(true).is_some());
            }
            if storage.slots[slot as usize].is_some() {
                storage.submit(&[read(slot, 4096, 65536)]);
            }
            let mut out = vec![0; n];
            storage.read_at(at as u64, &mut out).unwrap();
            assert!(out == noise.bytes[at..at + n], "{label}: {n} bytes at {at}");
        }
        assert!(landed > 50, "{label}: {landed}");
        for c in wait_all(&mut storage) {
            assert!(storage.slot(c.slot) == &noise.bytes[4096..][..65536], "{label}");
        }
        for (at, n) in [(len as u64 - 1, 2), (len as u64, 1), (u64::MAX - 3, 3), (u64::MAX - 3, 100), (1 << 63, 1)] {
            assert_eq!(storage.read_at(at, &mut vec![0; n]), Err(ReadError::Eof), "{label}: {n} at {at}");
        }
    });
}

#[test]
fn weights_are_loaded_in_place() {
    let len = (5 << 20) + 4096 + 321;
    let noise = Noise::new("load", len);
    on_each(&noise.path, 1, 4096, 1, |mut storage, label| {
        let mut memory = Arena::new(len + 4096).unwrap().take_io(len + 4096).unwrap();
        for (offset, skip, n) in
            [(0, 0, len), (8192, 0, 4 << 20), (100, 0, len - 100), (4096, 1, len - 4096), (0, 0, 9)]
        {
            memory.fill(0);
            storage.load(offset, &mut memory[skip..skip + n]).unwrap();
            assert!(memory[skip..skip + n] == noise.bytes[offset as usize..][..n], "{label}: {offset} {skip} {n}");
            assert!(memory[skip + n..].iter().all(|&b| b == 0), "{label}: {offset} {skip} {n}");
        }
        assert_eq!(storage.load(4096, &mut memory[..len]), Err(ReadError::Eof), "{label}");
        assert_eq!(storage.load(u64::MAX - 4095, &mut memory[..8192]), Err(ReadError::Eof), "{label}");
    });
}

#[test]
fn a_storage_may_go_while_reads_are_in_flight() {
    let noise = Noise::new("drop", 16 << 20);
    for round in 0..50 {
        on_each(&noise.path, 16, 1 << 20, 16, |mut storage, _| {
            let reads: Vec<_> = (0..16).map(|i| read(i, u64::from(i) << 20, 1 << 20)).collect();
            assert_eq!(storage.submit(&reads), 16);
            if round % 10 == 9 {
                // Leaked with its memory: nothing that follows may be overwritten.
                std::mem::forget(storage);
            } else {
                drop(storage);
            }
            let fresh = Arena::new(16 << 20).unwrap();
            std::thread::yield_now();
            assert!(
                fresh.take(16 << 20, 1).unwrap().iter().all(|&b| b == 0),
                "a read landed in memory of another owner"
            );
        });
    }
}

#[test]
fn breaches_of_the_contract_panic_and_leave_the_storage_whole() {
    let noise = Noise::new("contract", 1 << 20);
    on_each(&noise.path, 3, 8192, 3, |mut storage, label| {
        for (bad, text) in [
            (read(3, 0, 4096), "slot 3 of 3"),
            (read(0, 0, 12288), "into a slot of 8192"),
            (read(0, 1, 4096), "not whole blocks"),
            (read(0, 0, 4095), "not whole blocks"),
            (read(0, 0, 0), "not whole blocks"),
            (read(1, 0, 4096), "slot 1 is in flight"),
        ] {
            let panic = catch_unwind(AssertUnwindSafe(|| storage.submit(&[read(1, 4096, 8192), bad]))).unwrap_err();
            let found = panic.downcast::<String>().unwrap();
            assert!(found.contains(text), "{label}: {found}");
            assert!(catch_unwind(AssertUnwindSafe(|| storage.slot(1)[0])).is_err(), "{label}: slot 1 is in flight");
            assert!(catch_unwind(AssertUnwindSafe(|| storage.slot_mut(1)[0])).is_err(), "{label}");
            assert!(catch_unwind(AssertUnwindSafe(|| storage.slot(3)[0])).is_err(), "{label}");
            assert_eq!(wait_all(&mut storage), [Completion { slot: 1, result: Ok(()) }], "{label}");
            assert!(storage.slot(1) == &noise.bytes[4096..][..8192], "{label}");
        }
    });
}

#[test]
fn impossible_sizes_are_refused() {
    let noise = Noise::new("sizes", 8192);
    for (slots, slot_bytes, depth) in
        [(0, 4096, 1), (2, 4096, 1), (1, 0, 1), (1, 1000, 1), (1, 4096, 0), (1, 4096, 1025), (usize::MAX, 4096, 1)]
    {
        let memory = Arena::new(4096).unwrap().take_io(4096).unwrap();
        let file = DirectFile::open(&noise.path).unwrap();
        let error = FileStorage::open(file, memory, slots, slot_bytes, IoChoice::Pread, depth).err().unwrap();
        assert!(error.to_string().contains("expected"), "{error}");
    }
}

#[test]
fn an_io_error_is_reported_with_its_number() {
    // The first page of a process is never mapped; reading it there is EIO.
    on_each(Path::new("/proc/self/mem"), 2, 4096, 2, |mut storage, label| {
        assert!(!storage.file().is_direct());
        assert_eq!(storage.submit(&[read(1, 0, 4096)]), 1);
        let eio = Err(ReadError::Os(libc::EIO));
        assert_eq!(storage.complete(true), Some(Completion { slot: 1, result: eio }), "{label}");
        assert_eq!(storage.read_at(5, &mut [0; 3]), eio, "{label}");
    });
}

#[test]
fn only_regular_files_are_opened() {
    let dir = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let fifo = dir.join(format!("fifo-{}", std::process::id()));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (path, text) in [
        (dir.as_path(), "a directory"),
        (&fifo, "a FIFO"),
        (Path::new("/dev/null"), "a device"),
        (Path::new("/none"), "/none"),
    ] {
        let error = DirectFile::open(path).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    fs::remove_file(fifo).unwrap();
    let empty = Noise::new("empty", 0);
    assert_eq!(DirectFile::open(&empty.path).unwrap().len(), 0);
    let tiny = Noise::new("tiny", 10);
    let mut storage = storage(DirectFile::open(&tiny.path).unwrap(), IoChoice::Auto, 1, 4096, 1).unwrap();
    let mut out = [0; 10];
    storage.read_at(0, &mut out).unwrap();
    assert_eq!(&out[..], &tiny.bytes);
}

#[test]
fn files_in_memory_are_read_too() {
    // tmpfs refuses O_DIRECT before Linux 6.6.
    let Ok(true) = fs::metadata("/dev/shm").map(|m| m.is_dir()) else { return };
    let noise = Noise::in_dir(Path::new("/dev/shm"), "shm", 300_001);
    on_each(&noise.path, 2, 65536, 2, |mut storage, label| {
        storage.submit(&[read(0, 65536, 65536), read(1, 4096, 8192)]);
        assert_eq!(wait_all(&mut storage).len(), 2, "{label}");
        assert!(storage.slot(0) == &noise.bytes[65536..][..65536], "{label}");
        let mut out = vec![0; 300_001];
        storage.read_at(0, &mut out).unwrap();
        assert!(out == noise.bytes, "{label}");
    });
}

#[test]
fn reads_leave_nothing_in_the_page_cache() {
    let noise = Noise::new("cache", 32 << 20);
    let plain = fs::File::open(&noise.path).unwrap();
    assert_eq!(sys::cached_bytes(&plain).unwrap(), 32 << 20, "the file was just read through the cache");
    on_each(&noise.path, 8, 1 << 20, 8, |mut storage, label| {
        sys::drop_cached(&plain, 0, 32 << 20);
        let before = sys::cached_bytes(&plain).unwrap();
        let mut reads: Vec<_> = (0..32).map(|i| read(i % 8, u64::from(i) << 20, 1 << 20)).collect();
        while !reads.is_empty() {
            let accepted = storage.submit(&reads[..reads.len().min(8)]);
            reads.drain(..accepted);
            assert!(wait_all(&mut storage).iter().all(|c| c.result.is_ok()), "{label}");
        }
        storage.read_at(12345, &mut vec![0; 200_000]).unwrap();
        let after = sys::cached_bytes(&plain).unwrap();
        assert!(after <= before, "{label}: the page cache grew from {before} to {after} bytes");
    });
}
