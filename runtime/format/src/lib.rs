//! The model file: GGUF version 3 container, block types, the packed expert-major layout, vocabularies.
//!
//! Works on byte slices that the caller read; never touches a file, never allocates in proportion to an unchecked
//! number. Follows <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod block;
pub mod crc32c;
mod error;
pub mod gguf;
pub mod keys;
pub mod vocab;

pub use block::BlockType;
pub use error::{FormatError, shown};

/// Alignment of every tensor and every expert in a packed file, in bytes: what O_DIRECT wants on all our storage.
pub const PAGE: u64 = 4096;

/// Rounds `bytes` up to a whole number of [`PAGE`]s; `None` on overflow.
pub fn page_up(bytes: u64) -> Option<u64> {
    bytes.checked_add(PAGE - 1).map(|b| b / PAGE * PAGE)
}

const _: () = assert!(cfg!(target_endian = "little"), "GGUF data is little endian and read in place");
const _: () = assert!(cfg!(target_pointer_width = "64"), "sizes of files and plans are checked to fit 64 bits");
