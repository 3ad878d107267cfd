//! What the engine needs from the machine, as small traits: storage, workers, time.
//!
//! `forerun-linux` implements them with io_uring and pinned threads; tests implement them with a faulty disk and one
//! thread. The engine never opens a file, starts a thread or reads a clock by itself.

use core::fmt;

/// One read into a slot of the expert arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Slot to fill, below [`Storage::slots`]. It belongs to the storage from `submit` until its completion is returned.
    pub slot: u32,
    /// Offset in the model file, in bytes, a multiple of 4096.
    pub offset: u64,
    /// Bytes to read, a multiple of 4096, at most [`Storage::slot_bytes`].
    pub bytes: u32,
}

/// Why a read failed, after the storage continued short reads and retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    /// The file ends before the last byte wanted.
    Eof,
    /// The operating system's error number.
    Os(i32),
    /// The device did not answer in the time that the storage gives it.
    TimedOut,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof => f.write_str("the file ends before it: copy the model file again"),
            Self::TimedOut => f.write_str("the storage does not answer: check it and its cable, then start again"),
            Self::Os(n) => write!(f, "I/O error {n} after retries: check the storage and its cable"),
        }
    }
}

/// A finished read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The slot that was read into; it is the engine's again.
    pub slot: u32,
    /// Whether all bytes arrived.
    pub result: Result<(), ReadError>,
}

/// The model file and the slots its experts are read into.
pub trait Storage {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// Bytes in each slot, a multiple of 4096.
    fn slot_bytes(&self) -> usize;

    /// Most reads that may be in flight at once.
    fn depth_max(&self) -> usize;

    /// Starts `reads`, in order, as one batch, and returns how many were accepted: fewer than given when
    /// [`Storage::depth_max`] is reached. The rest is the caller's to submit again after a completion.
    ///
    /// # Panics
    /// If a read names a slot that is in flight or out of range, or is larger than a slot or not aligned.
    fn submit(&mut self, reads: &[Read]) -> usize;

    /// Returns a finished read, in order of arrival. With `wait`, blocks until there is one. Returns `None` when none is
    /// finished, with `wait` when none is in flight or the device has not answered for longer than the storage gives it; its
    /// reads are still in flight then and may end later.
    fn complete(&mut self, wait: bool) -> Option<Completion>;

    /// The bytes of `slot`.
    ///
    /// # Panics
    /// If the slot is in flight or out of range.
    fn slot(&self, slot: u32) -> &[u8];

    /// The bytes of `slot`, to change: only fault-injecting tests and checks do.
    ///
    /// # Panics
    /// If the slot is in flight or out of range.
    fn slot_mut(&mut self, slot: u32) -> &mut [u8];

    /// Reads exactly `out.len()` bytes at `offset`, blocking. Any offset and length; used for embedding rows.
    ///
    /// # Errors
    /// If the bytes cannot be read after retries.
    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError>;
}

/// Work on piece `i` of two buffers.
pub type Piece<'f> = dyn Fn(usize, &mut [f32], &mut [f32]) + Sync + 'f;

/// Threads that share out rows of one computation.
///
/// Work is split by shape, never by timing: piece `i` is the same elements whatever the number of threads, and one
/// thread computes a whole piece, so results do not depend on who computes what.
pub trait Workers {
    /// Number of threads that take part.
    fn threads(&self) -> usize;

    /// Cuts `a` into pieces of `a_piece` elements and `b` into pieces of `b_piece` (the last may be shorter; a piece size
    /// of 0 hands out empty slices) and calls `f(i, a_i, b_i)` once for each `i` below `pieces`, on any thread. Returns
    /// when all are done.
    ///
    /// # Panics
    /// If `a` or `b` is too short to give every piece at least one element.
    fn split2(&self, pieces: usize, a: &mut [f32], a_piece: usize, b: &mut [f32], b_piece: usize, f: &Piece<'_>);

    /// [`Workers::split2`] with one output.
    fn split(&self, out: &mut [f32], piece: usize, f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let pieces = out.len().div_ceil(piece.max(1));
        self.split2(pieces, out, piece, &mut [], 0, &|i, o, _| f(i, o));
    }
}

/// Runs every piece on the calling thread, in order.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Workers for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn split2(&self, pieces: usize, a: &mut [f32], a_piece: usize, b: &mut [f32], b_piece: usize, f: &Piece<'_>) {
        let (mut a, mut b) = (a, b);
        for i in 0..pieces {
            let (piece_a, rest_a) = a.split_at_mut(a_piece.min(a.len()));
            let (piece_b, rest_b) = b.split_at_mut(b_piece.min(b.len()));
            (a, b) = (rest_a, rest_b);
            f(i, piece_a, piece_b);
        }
    }
}

/// A monotone clock.
pub trait Clock {
    /// Microseconds since some fixed moment.
    fn now_us(&self) -> u64;
}
