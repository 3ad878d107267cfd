//! GGUF container: metadata, tensor directory, data.

mod read;
mod write;

pub use read::{Array, Header, Tensor, Value};
pub use write::{HeaderBuilder, Kv};

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(crate) const VERSION: u32 = 3;
/// llama.cpp's limit on the length of a tensor's name, including its terminating zero.
pub(crate) const NAME_MAX: usize = 64;

/// Value types of metadata, by GGUF id.
pub(crate) mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}
