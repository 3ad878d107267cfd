//! The life of one read: continues short reads, retries what may pass, and tells the end of the file from an error.
//!
//! Pure bookkeeping shared by io_uring, the pread lanes and blocking reads, so that all three fail alike. Never does I/O.

use std::ops::Range;

use forerun_engine::ports::ReadError;

use crate::BLOCK_BYTES;

/// Times that an I/O error or a read without progress is tried again.
const RETRIES_MAX: u32 = 2;
/// Times that EINTR or EAGAIN is tried again, so that a kernel that only ever says "again" cannot hang the loop.
const AGAIN_MAX: u32 = 1000;

/// What to do after one system call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// All needed bytes are there.
    Done,
    /// Read [`Progress::range`] from [`Progress::offset`].
    Read,
    /// Give up.
    Fail(ReadError),
}

/// One read of up to `bytes` bytes, of which the first `need` must arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    start: u64,
    bytes: usize,
    need: usize,
    done: usize,
    faults: u32,
    stalls: u32,
    agains: u32,
}

impl Progress {
    /// `start` and `bytes` are multiples of a block; `need` is below `bytes` only where the file may end inside the last
    /// block wanted.
    pub fn new(start: u64, bytes: usize, need: usize) -> Self {
        Self { start, bytes, need, done: 0, faults: 0, stalls: 0, agains: 0 }
    }

    /// File offset of the next system call.
    pub fn offset(&self) -> u64 {
        // Saturating only for starts past i64::MAX, which the kernel refuses before `done` can grow.
        self.start.saturating_add(self.done as u64)
    }

    /// Part of the buffer that the next system call fills.
    pub fn range(&self) -> Range<usize> {
        self.done..self.bytes
    }

    /// Takes the result of a system call: bytes read, or the error number.
    pub fn advance(&mut self, result: Result<usize, i32>) -> Next {
        match result {
            Ok(0) => Next::Fail(ReadError::Eof),
            Ok(n) if self.done + n >= self.need => Next::Done,
            Ok(n) => {
                // O_DIRECT goes on only from a block boundary, so the broken block is read again. A read that stops
                // inside the same block again and again has met the end of the file.
                let whole = n - n % BLOCK_BYTES;
                self.done += whole;
                self.stalls = if whole == 0 { self.stalls + 1 } else { 0 };
                if self.stalls > RETRIES_MAX { Next::Fail(ReadError::Eof) } else { Next::Read }
            }
            // No file reaches so far; the kernel says EINVAL to it.
            Err(_) if i64::try_from(self.offset()).is_err() => Next::Fail(ReadError::Eof),
            Err(libc::EINTR | libc::EAGAIN) if self.agains < AGAIN_MAX => {
                self.agains += 1;
                Next::Read
            }
            Err(libc::EIO) if self.faults < RETRIES_MAX => {
                self.faults += 1;
                Next::Read
            }
            Err(errno) => Next::Fail(ReadError::Os(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn short_reads_continue_from_a_block_boundary() {
        let mut p = Progress::new(8192, MB, MB);
        assert_eq!((p.offset(), p.range()), (8192, 0..MB));
        assert_eq!(p.advance(Ok(4096 * 3 + 17)), Next::Read);
        assert_eq!((p.offset(), p.range()), (8192 + 4096 * 3, 4096 * 3..MB));
        assert_eq!(p.advance(Ok(MB - 4096 * 3)), Next::Done);
    }

    #[test]
    fn the_end_of_the_file_is_eof() {
        let mut p = Progress::new(0, 8192, 8192);
        assert_eq!(p.advance(Ok(0)), Next::Fail(ReadError::Eof));
        let mut p = Progress::new(0, 8192, 8192);
        assert_eq!(p.advance(Ok(4096 + 100)), Next::Read);
        assert_eq!([p.advance(Ok(100)), p.advance(Ok(100))], [Next::Read, Next::Read]);
        assert_eq!(p.advance(Ok(100)), Next::Fail(ReadError::Eof));
        let mut p = Progress::new(1 << 63, 4096, 4096);
        assert_eq!(p.advance(Err(libc::EINVAL)), Next::Fail(ReadError::Eof));
    }

    #[test]
    fn a_tail_that_holds_what_is_needed_is_enough() {
        let mut p = Progress::new(0, 8192, 4100);
        assert_eq!(p.advance(Ok(4096)), Next::Read);
        assert_eq!(p.advance(Ok(4)), Next::Done);
    }

    #[test]
    fn eio_is_tried_three_times_in_all() {
        let mut p = Progress::new(0, 4096, 4096);
        assert_eq!([p.advance(Err(libc::EIO)), p.advance(Err(libc::EIO))], [Next::Read, Next::Read]);
        assert_eq!(p.advance(Err(libc::EIO)), Next::Fail(ReadError::Os(libc::EIO)));
        let mut p = Progress::new(0, 4096, 4096);
        assert_eq!([p.advance(Err(libc::EIO)), p.advance(Ok(4096))], [Next::Read, Next::Done]);
    }

    #[test]
    fn interruptions_are_harmless_but_not_for_ever() {
        let mut p = Progress::new(0, 4096, 4096);
        for _ in 0..AGAIN_MAX {
            assert_eq!(p.advance(Err(libc::EAGAIN)), Next::Read);
        }
        assert_eq!(p.advance(Err(libc::EAGAIN)), Next::Fail(ReadError::Os(libc::EAGAIN)));
        let mut p = Progress::new(0, 4096, 4096);
        assert_eq!(p.advance(Err(libc::EINVAL)), Next::Fail(ReadError::Os(libc::EINVAL)));
    }

    /// xorshift64.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 16) as usize % n
        }
    }

    /// A kernel that answers as it likes: with all, with less, with nothing to say, with an error; 20,000 seeds.
    #[test]
    fn any_kernel_leaves_the_right_bytes_or_an_error() {
        const FILE_BYTES_MAX: usize = 24 * BLOCK_BYTES;
        let file: Vec<u8> = (0..FILE_BYTES_MAX as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        let mut ends = [0; 5];
        for seed in 0..20_000u64 {
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            let file = &file[..random.below(FILE_BYTES_MAX + 1)];
            let start = random.below(26) * BLOCK_BYTES;
            let bytes = (1 + random.below(8)) * BLOCK_BYTES;
            let need = bytes - random.below(2) * random.below(BLOCK_BYTES);
            let (short, again, broken) = (random.below(12), [0, 3, 20][random.below(3)], [0, 0, 1, 6][random.below(4)]);
            // Some only ever say "again".
            let stubborn = random.below(200) == 0;
            let mut buf = vec![0xee; bytes];
            let mut p = Progress::new(start as u64, bytes, need);
            let (mut calls, mut agains, mut faults, mut stalls) = (0, 0, 0, 0);
            let end = loop {
                calls += 1;
                let most = bytes / BLOCK_BYTES * (1 + RETRIES_MAX as usize) + (AGAIN_MAX + RETRIES_MAX) as usize + 1;
                assert!(calls <= most, "seed {seed}: {calls} calls");
                let (at, range) = (p.offset() as usize, p.range());
                assert!(at.is_multiple_of(BLOCK_BYTES) && range.start.is_multiple_of(BLOCK_BYTES), "seed {seed}");
                assert_eq!((at - start, range.end), (range.start, bytes), "seed {seed}");
                let there = file.len().saturating_sub(at).min(range.len());
                let result = if stubborn || random.below(24) < again {
                    agains += 1;
                    Err([libc::EINTR, libc::EAGAIN][random.below(2)])
                } else if random.below(24) < broken {
                    faults += 1;
                    Err(libc::EIO)
                } else if random.below(12) < short && there > 0 {
                    // Of a block that was begun, or of any.
                    let most = if random.below(2) == 0 { there.min(BLOCK_BYTES - 1) } else { there };
                    Ok(1 + random.below(most))
                } else {
                    Ok(there)
                };
                if let Ok(n) = result {
                    stalls = if n < BLOCK_BYTES { stalls + 1 } else { 0 };
                    buf[range][..n].copy_from_slice(&file[at.min(file.len())..][..n]);
                }
                match p.advance(result) {
                    Next::Read => {}
                    end => break end,
                }
            };
            let whole = file.get(start..start + need);
            ends[match end {
                Next::Done => {
                    assert!(whole == Some(&buf[..need]), "seed {seed}: wrong bytes");
                    0
                }
                Next::Fail(ReadError::Eof) if whole.is_none() => 1,
                Next::Fail(ReadError::Eof) if stalls > RETRIES_MAX => 2,
                Next::Fail(ReadError::Os(libc::EIO)) if faults > RETRIES_MAX => 3,
                Next::Fail(ReadError::Os(libc::EAGAIN | libc::EINTR)) if agains > AGAIN_MAX => 4,
                end => panic!("seed {seed}: {end:?} after {calls} calls"),
            }] += 1;
        }
        assert!(ends.iter().all(|&n| n > 0), "{ends:?}");
        assert!(ends[0] > 5_000, "{ends:?}");
    }
}
