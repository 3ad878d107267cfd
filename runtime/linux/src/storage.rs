//! The engine's `Storage` on a real file: slots, batches of reads into them, and blocking reads beside them.
//!
//! Relies on one of two engines with the same behaviour, io_uring or pread threads. Never allocates after `open`, and
//! never shows a slot that is in flight.

use std::io;
use std::sync::Arc;

use forerun_engine::ports::{Completion, Read, ReadError, Storage};

use crate::lanes::Lanes;
use crate::ring::Ring;
use crate::{Arena, BLOCK_BYTES, DirectFile, IoBuf};

/// Bytes of the buffer that unaligned reads go through.
const BOUNCE_BYTES: usize = 64 << 10;
/// Bytes of one read of [`FileStorage::load`].
const LOAD_BYTES: usize = 1 << 20;
/// Most reads in flight that can be asked for.
const DEPTH_MAX: usize = 1024;

/// Which engine reads slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoChoice {
    /// io_uring, or pread threads where it is refused.
    Auto,
    /// io_uring or an error.
    Uring,
    /// pread threads.
    Pread,
}

/// A slot read on its way: the slot's memory travels with it.
pub(crate) struct Job {
    pub read: Read,
    pub buf: IoBuf,
}

/// A slot read that ended, with the slot's memory.
pub(crate) struct Finished {
    pub slot: u32,
    pub buf: IoBuf,
    pub result: Result<(), ReadError>,
}

enum Engine {
    Ring(Box<Ring>),
    Lanes(Lanes),
}

impl Engine {
    fn in_flight(&self) -> usize {
        match self {
            Self::Ring(ring) => ring.in_flight(),
            Self::Lanes(lanes) => lanes.in_flight(),
        }
    }

    fn submit(&mut self, jobs: impl Iterator<Item = Job>) {
        match self {
            Self::Ring(ring) => ring.submit(jobs),
            Self::Lanes(lanes) => lanes.submit(jobs),
        }
    }

    fn complete(&mut self, wait: bool) -> Option<Finished> {
        match self {
            Self::Ring(ring) => ring.complete(wait),
            Self::Lanes(lanes) => lanes.complete(wait),
        }
    }
}

/// The model file and the slots that its experts are read into.
pub struct FileStorage {
    // First, so that it is dropped first: it waits for the reads in flight.
    engine: Engine,
    file: Arc<DirectFile>,
    /// The memory of each slot, away while a read into it is in flight.
    slots: Vec<Option<IoBuf>>,
    slot_bytes: usize,
    depth_max: usize,
    bounce: IoBuf,
    why: Option<String>,
}

impl FileStorage {
    /// Bytes that it takes beside the slots: for the memory plan.
    pub const OVERHEAD_BYTES: usize = BOUNCE_BYTES;

    /// Cuts `memory` ([`Arena::take_io`]) into `slots` slots of `slot_bytes` bytes and starts the engine that `io` names,
    /// for up to `depth` reads in flight.
    ///
    /// # Errors
    /// If a size is 0, not a multiple of 4096 or does not fit the memory, `depth` is not in 1 ..= 1024, or the engine
    /// cannot be started.
    pub fn open(
        file: DirectFile,
        mut memory: IoBuf,
        slots: usize,
        slot_bytes: usize,
        io: IoChoice,
        depth: usize,
    ) -> io::Result<Self> {
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(BLOCK_BYTES) || u32::try_from(slot_bytes).is_err() {
            return invalid(format!("slots of {slot_bytes} bytes, expected a multiple of {BLOCK_BYTES} below 4 GiB"));
        }
        if slots == 0 || u32::try_from(slots).is_err() || slots.checked_mul(slot_bytes) != Some(memory.len()) {
            let found = memory.len();
            return invalid(format!("{slots} slots of {slot_bytes} bytes, expected exactly {found} bytes in all"));
        }
        if !(1..=DEPTH_MAX).contains(&depth) {
            return invalid(format!("a depth of {depth} reads, expected 1 to {DEPTH_MAX}"));
        }
        let file = Arc::new(file);
        let bounce = Arena::new(BOUNCE_BYTES)?.take_io(BOUNCE_BYTES).map_err(io::Error::other)?;
        let ring = match io {
            IoChoice::Pread => Err("pread was chosen".to_string()),
            IoChoice::Auto | IoChoice::Uring => Ring::new(Arc::clone(&file), &memory, slot_bytes, depth),
        };
        let (engine, why) = match (ring, io) {
            (Ok(ring), _) => (Engine::Ring(Box::new(ring)), None),
            (Err(why), IoChoice::Uring) => {
                return Err(io::Error::other(format!("io_uring is not available: {why}; choose pread")));
            }
            (Err(why), choice) => {
                if choice == IoChoice::Auto {
                    log::info!("reading with pread threads, as io_uring is not available: {why}");
                }
                (Engine::Lanes(Lanes::new(Arc::clone(&file), depth)?), Some(why))
            }
        };
        let slots = (0..slots).map(|_| Some(memory.split_to(slot_bytes))).collect();
        Ok(Self { engine, file, slots, slot_bytes, depth_max: depth, bounce, why })
    }

    /// The engine in use: for `forerun doctor` and the log.
    pub fn backend(&self) -> &'static str {
        match &self.engine {
            Engine::Ring(ring) if ring.has_registered_buffers() => "io_uring, registered buffers",
            Engine::Ring(_) => "io_uring",
            Engine::Lanes(_) => "pread",
        }
    }

    /// Why io_uring is not in use.
    pub fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// The file.
    pub fn file(&self) -> &DirectFile {
        &self.file
    }

    /// Reads exactly `out.len()` bytes at `offset`, blocking, in large pieces straight to their place where `offset` and
    /// `out` start on a multiple of 4096: for the resident weights.
    ///
    /// # Errors
    /// If the bytes cannot be read after retries.
    pub fn load(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let block = BLOCK_BYTES as u64;
        let aligned = offset.is_multiple_of(block) && (out.as_ptr().addr() as u64).is_multiple_of(block);
        let whole = if aligned { out.len() / BLOCK_BYTES * BLOCK_BYTES } else { 0 };
        let (body, tail) = out.split_at_mut(whole);
        let mut at = offset;
        for piece in body.chunks_mut(LOAD_BYTES) {
            self.file.read(at, piece, piece.len())?;
            at = at.checked_add(piece.len() as u64).ok_or(ReadError::Eof)?;
        }
        self.read_at(at, tail)
    }

    /// Takes the memory of the slot that `read` names, after checking it against the contract.
    fn job(slots: &mut [Option<IoBuf>], slot_bytes: usize, read: Read) -> Job {
        let Read { slot, offset, bytes } = read;
        assert!(bytes as usize <= slot_bytes, "a read of {bytes} bytes into a slot of {slot_bytes}");
        let whole = bytes > 0 && (bytes as usize).is_multiple_of(BLOCK_BYTES);
        assert!(whole && offset.is_multiple_of(BLOCK_BYTES as u64), "{bytes} bytes at {offset}: not whole blocks");
        let count = slots.len();
        let place = slots.get_mut(slot as usize).unwrap_or_else(|| panic!("slot {slot} of {count}"));
        let buf = place.take().unwrap_or_else(|| panic!("slot {slot} is in flight"));
        Job { read, buf }
    }
}

impl Storage for FileStorage {
    fn slots(&self) -> usize {
        self.slots.len()
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn depth_max(&self) -> usize {
        self.depth_max
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        let accepted = reads.len().min(self.depth_max - self.engine.in_flight());
        let Self { engine, slots, slot_bytes, .. } = self;
        engine.submit(reads[..accepted].iter().map(|&read| Self::job(slots, *slot_bytes, read)));
        accepted
    }

    fn complete(&mut self, wait: bool) -> Option<Completion> {
        let Finished { slot, buf, result } = self.engine.complete(wait)?;
        self.slots[slot as usize] = Some(buf);
        Some(Completion { slot, result })
    }

    fn slot(&self, slot: u32) -> &[u8] {
        self.slots[slot as usize].as_ref().unwrap_or_else(|| panic!("slot {slot} is in flight"))
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        self.slots[slot as usize].as_mut().unwrap_or_else(|| panic!("slot {slot} is in flight"))
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let block = BLOCK_BYTES as u64;
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let start = at - at % block;
            let skip = (at - start) as usize;
            let n = rest.len().min(BOUNCE_BYTES - skip);
            let bytes = (skip + n).next_multiple_of(BLOCK_BYTES);
            self.file.read(start, &mut self.bounce[..bytes], skip + n)?;
            let (piece, after) = rest.split_at_mut(n);
            piece.copy_from_slice(&self.bounce[skip..skip + n]);
            at = at.checked_add(n as u64).ok_or(ReadError::Eof)?;
            rest = after;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
