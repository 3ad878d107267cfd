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
}
