//! The machine under the engine: memory, storage, threads, time, and what the kernel says about them.
//!
//! Implements the ports of `forerun-engine` with one locked mapping, io_uring (or pread threads where it is refused) and
//! a fixed pool of pinned threads. Never allocates after it is opened, and never leaves model bytes in the page cache.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod arena;
mod cores;
mod direct;
mod lanes;
mod patience;
mod pool;
mod progress;
#[allow(unsafe_code)]
mod ring;
mod storage;
#[allow(unsafe_code)]
pub mod sys;

pub use arena::{Arena, ArenaFull, IoBuf};
pub use cores::{Cores, SYSFS_CPUS};
pub use direct::DirectFile;
pub use pool::Pool;
pub use storage::{FileStorage, IoChoice};

/// Bytes of the block that offsets, lengths and slots are multiples of: the packed layout's alignment, and the largest
/// O_DIRECT alignment that a file system asks for in practice.
pub const BLOCK_BYTES: usize = 4096;
