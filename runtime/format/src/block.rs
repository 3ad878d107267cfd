//! Element types of tensors, and the memory layout of their blocks.
//!
//! Layouts follow ggml (`ggml-common.h`); each struct's size is checked when the crate is compiled. A new type is one
//! row in [`TABLE`], one struct, and its kernels.

use crate::FormatError;
use alloc::format;

/// Element type of a tensor. The discriminant is GGUF's type id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum BlockType {
    /// IEEE single.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// 32 weights: f16 scale, 4-bit values −8..7.
    Q4_0 = 2,
    /// 32 weights: f16 scale, 8-bit values.
    Q8_0 = 8,
    /// Plain bytes: the container of packed experts, whose own types are named by metadata.
    I8 = 24,
    /// Upper half of an IEEE single.
    BF16 = 30,
}

struct Row {
    block: BlockType,
    name: &'static str,
    elems: u32,
    bytes: u32,
}

const fn row(block: BlockType, name: &'static str, elems: u32, bytes: u32) -> Row {
    Row { block, name, elems, bytes }
}

static TABLE: [Row; 6] = [
    row(BlockType::F32, "f32", 1, 4),
    row(BlockType::F16, "f16", 1, 2),
    row(BlockType::BF16, "bf16", 1, 2),
    row(BlockType::Q8_0, "q8_0", 32, size_of::<BlockQ8_0>() as u32),
    row(BlockType::Q4_0, "q4_0", 32, size_of::<BlockQ4_0>() as u32),
    row(BlockType::I8, "i8", 1, 1),
];

/// Weights in one [`BlockQ8_0`] or [`BlockQ4_0`].
pub const QK: usize = 32;

/// `y[j] = d * qs[j]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale, bits of an f16.
    pub d: u16,
    /// Quants.
    pub qs: [i8; QK],
}
const _: () = assert!(size_of::<BlockQ8_0>() == 34 && align_of::<BlockQ8_0>() == 2);

/// `y[j] = d * ((qs[j] & 15) - 8)`, `y[j + 16] = d * ((qs[j] >> 4) - 8)` for `j < 16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale, bits of an f16.
    pub d: u16,
    /// Two quants a byte: low nibbles are the first half of the block, high nibbles the second.
    pub qs: [u8; QK / 2],
}
const _: () = assert!(size_of::<BlockQ4_0>() == 18 && align_of::<BlockQ4_0>() == 2);

impl BlockType {
    /// The type with GGUF id `id`, if this build has kernels for it.
    pub fn from_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|r| r.block as u32 == id).map(|r| r.block)
    }

    /// The type called `name` (as [`BlockType::name`] prints it), if it can hold weights.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|r| r.name == name && r.block != Self::I8).map(|r| r.block)
    }

    /// Names of the types that can hold weights.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().filter(|r| r.block != Self::I8).map(|r| r.name)
    }

    fn row(self) -> &'static Row {
        // The table has a row for each variant: checked by the test `every_type_has_a_row`.
        TABLE.iter().find(|r| r.block == self).unwrap_or(&TABLE[0])
    }

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements in one block; rows are whole numbers of blocks.
    pub fn block_elems(self) -> usize {
        self.row().elems as usize
    }

    /// Bytes in one block.
    pub fn block_bytes(self) -> usize {
        self.row().bytes as usize
    }

    /// Bytes of a row of `elems` elements.
    ///
    /// # Errors
    /// If `elems` is not a whole number of blocks, or the product overflows.
    pub fn row_bytes(self, elems: u64) -> Result<u64, FormatError> {
        let per_block = self.block_elems() as u64;
        if !elems.is_multiple_of(per_block) {
            return Err(FormatError::invalid(
                format!("a row of type {}", self.name()),
                format!("{elems} elements"),
                format!("a multiple of {per_block}"),
            ));
        }
        (elems / per_block)
            .checked_mul(self.block_bytes() as u64)
            .ok_or_else(|| FormatError::invalid("row size", format!("{elems} elements"), "a size that fits 64 bits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_row() {
        for t in [BlockType::F32, BlockType::F16, BlockType::BF16, BlockType::Q8_0, BlockType::Q4_0, BlockType::I8] {
            assert_eq!(t.row().block, t);
            assert_eq!(BlockType::from_id(t as u32), Some(t));
        }
    }

    #[test]
    fn a_row_is_whole_blocks() {
        assert_eq!(BlockType::Q4_0.row_bytes(2048), Ok(1152));
        assert!(BlockType::Q4_0.row_bytes(4304).is_err());
        assert!(BlockType::F32.row_bytes(u64::MAX).is_err());
    }
}
