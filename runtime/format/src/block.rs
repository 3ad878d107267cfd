//! Element types of tensors, and the memory layout of their blocks.
//!
//! Layouts follow ggml (`ggml-common.h`); each struct's size is checked when the crate is compiled. A new type is one
//! struct, a place in [`BlockType::ALL`] and [`BlockType`]'s `row`, and its kernels.

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
    /// 32 weights: f16 scale, 5-bit values −16..15.
    Q5_0 = 6,
    /// 32 weights: f16 scale, 8-bit values.
    Q8_0 = 8,
    /// 256 weights in 16 groups: 2-bit values, 4-bit scales and minima.
    Q2K = 10,
    /// 256 weights in 16 groups: 3-bit values, 6-bit scales.
    Q3K = 11,
    /// 256 weights in 8 groups: 4-bit values, 6-bit scales and minima.
    Q4K = 12,
    /// 256 weights in 8 groups: 5-bit values, 6-bit scales and minima.
    Q5K = 13,
    /// 256 weights in 16 groups: 6-bit values, 8-bit scales.
    Q6K = 14,
    /// 32 weights: f16 scale, 4-bit indices into [`IQ4_VALUES`].
    Iq4Nl = 20,
    /// 256 weights in 8 groups: 4-bit indices into [`IQ4_VALUES`], 6-bit scales.
    Iq4Xs = 23,
    /// Plain bytes: the container of packed experts, whose own types are named by metadata.
    I8 = 24,
    /// Upper half of an IEEE single.
    BF16 = 30,
    /// 32 weights: power-of-two scale, 4-bit floats (OCP microscaling).
    Mxfp4 = 39,
}

struct Row {
    name: &'static str,
    elems: usize,
    bytes: usize,
}

const fn row(name: &'static str, elems: usize, bytes: usize) -> Row {
    Row { name, elems, bytes }
}

/// Weights in a small block: Q8_0, Q5_0, Q4_0, IQ4_NL, MXFP4.
pub const QK: usize = 32;

/// Weights in a large block: the K types and IQ4_XS.
pub const QK_K: usize = 256;

/// What the 4-bit indices of IQ4_NL and IQ4_XS stand for.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the 4-bit floats (E2M1) of MXFP4 stand for.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

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

/// `q[j] = (qs[j] & 15) | bit j of qh << 4`, `q[j + 16] = (qs[j] >> 4) | bit (j + 16) of qh << 4`; `y = d * (q - 16)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ5_0 {
    /// Scale, bits of an f16.
    pub d: u16,
    /// Fifth bits, little endian.
    pub qh: [u8; 4],
    /// Lower four bits, halves as in [`BlockQ4_0`].
    pub qs: [u8; QK / 2],
}
const _: () = assert!(size_of::<BlockQ5_0>() == 22);

/// 16 groups of 16: `y = d * (scales & 15) * q - dmin * (scales >> 4)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ2K {
    /// Scale (low nibble) and minimum (high nibble) of each group.
    pub scales: [u8; 16],
    /// Byte `32 n + l` holds elements `128 n + 32 j + l` at bits `2 j`, for `j < 4`.
    pub qs: [u8; QK_K / 4],
    /// Scale of the scales, bits of an f16.
    pub d: u16,
    /// Scale of the minima, bits of an f16.
    pub dmin: u16,
}
const _: () = assert!(size_of::<BlockQ2K>() == 84);

/// 16 groups of 16: `y = d * (scale - 32) * (q - 4)`, q of three bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ3K {
    /// Third bits: bit `4 n + j` of byte `l` belongs to element `128 n + 32 j + l`.
    pub hmask: [u8; QK_K / 8],
    /// Lower two bits, as in [`BlockQ2K`].
    pub qs: [u8; QK_K / 4],
    /// Six-bit scales: low four bits of scale `k` in a nibble of byte `k mod 8`, high two in byte `8 + k mod 4`.
    pub scales: [u8; 12],
    /// Scale of the scales, bits of an f16.
    pub d: u16,
}
const _: () = assert!(size_of::<BlockQ3K>() == 110);

/// 8 groups of 32: `y = d * sc * q - dmin * m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale of the scales, bits of an f16.
    pub d: u16,
    /// Scale of the minima, bits of an f16.
    pub dmin: u16,
    /// Eight six-bit pairs of scale and minimum.
    pub scales: [u8; 12],
    /// Byte `32 c + l` holds element `64 c + l` (low nibble) and `64 c + 32 + l` (high nibble).
    pub qs: [u8; QK_K / 2],
}
const _: () = assert!(size_of::<BlockQ4K>() == 144);

/// [`BlockQ4K`] with a fifth bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ5K {
    /// Scale of the scales, bits of an f16.
    pub d: u16,
    /// Scale of the minima, bits of an f16.
    pub dmin: u16,
    /// As in [`BlockQ4K`].
    pub scales: [u8; 12],
    /// Fifth bits: bit `2 c` of byte `l` for the low nibble of chunk `c`, bit `2 c + 1` for the high one.
    pub qh: [u8; QK_K / 8],
    /// As in [`BlockQ4K`].
    pub qs: [u8; QK_K / 2],
}
const _: () = assert!(size_of::<BlockQ5K>() == 176);

/// 16 groups of 16: `y = d * scale * (q - 32)`, q of six bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// Lower four bits: byte `64 n + 32 h + l` holds elements `128 n + 32 h + l` and, in the high nibble, 64 further on.
    pub ql: [u8; QK_K / 2],
    /// Upper two bits: byte `32 n + l` holds those of elements `128 n + 32 j + l` at bits `2 j`.
    pub qh: [u8; QK_K / 4],
    /// Scale of each group.
    pub scales: [i8; 16],
    /// Scale of the scales, bits of an f16.
    pub d: u16,
}
const _: () = assert!(size_of::<BlockQ6K>() == 210);

/// `y[j] = d * IQ4_VALUES[q]`, halves as in [`BlockQ4_0`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockIq4Nl {
    /// Scale, bits of an f16.
    pub d: u16,
    /// Indices.
    pub qs: [u8; QK / 2],
}
const _: () = assert!(size_of::<BlockIq4Nl>() == 18);

/// 8 groups of 32: `y = d * (scale - 32) * IQ4_VALUES[q]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockIq4Xs {
    /// Scale of the scales, bits of an f16.
    pub d: u16,
    /// Upper two bits of the scales, group 0 lowest.
    pub scales_h: u16,
    /// Lower four bits of the scales, two a byte.
    pub scales_l: [u8; 4],
    /// Sixteen bytes a group, halves as in [`BlockQ4_0`].
    pub qs: [u8; QK_K / 2],
}
const _: () = assert!(size_of::<BlockIq4Xs>() == 136);

/// `y[j] = 2^(e - 128) * E2M1_DOUBLED[q]`, halves as in [`BlockQ4_0`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct BlockMxfp4 {
    /// Exponent (E8M0).
    pub e: u8,
    /// Codes.
    pub qs: [u8; QK / 2],
}
const _: () = assert!(size_of::<BlockMxfp4>() == 17);

impl BlockType {
    /// The types that can hold weights.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::BF16,
        Self::F16,
        Self::Q8_0,
        Self::Q6K,
        Self::Q5K,
        Self::Q5_0,
        Self::Q4K,
        Self::Q4_0,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::Q3K,
        Self::Q2K,
    ];

    /// The type with GGUF id `id`, if this build has kernels for it.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::I8]).find(|&b| b as u32 == id)
    }

    /// The type called `name` (as [`BlockType::name`] prints it), if it can hold weights.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|b| b.name() == name)
    }

    /// Names of the types that can hold weights.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(Self::name)
    }

    const fn row(self) -> Row {
        match self {
            Self::F32 => row("f32", 1, 4),
            Self::F16 => row("f16", 1, 2),
            Self::BF16 => row("bf16", 1, 2),
            Self::I8 => row("i8", 1, 1),
            Self::Q8_0 => row("q8_0", QK, size_of::<BlockQ8_0>()),
            Self::Q5_0 => row("q5_0", QK, size_of::<BlockQ5_0>()),
            Self::Q4_0 => row("q4_0", QK, size_of::<BlockQ4_0>()),
            Self::Iq4Nl => row("iq4_nl", QK, size_of::<BlockIq4Nl>()),
            Self::Mxfp4 => row("mxfp4", QK, size_of::<BlockMxfp4>()),
            Self::Q6K => row("q6_k", QK_K, size_of::<BlockQ6K>()),
            Self::Q5K => row("q5_k", QK_K, size_of::<BlockQ5K>()),
            Self::Q4K => row("q4_k", QK_K, size_of::<BlockQ4K>()),
            Self::Q3K => row("q3_k", QK_K, size_of::<BlockQ3K>()),
            Self::Q2K => row("q2_k", QK_K, size_of::<BlockQ2K>()),
            Self::Iq4Xs => row("iq4_xs", QK_K, size_of::<BlockIq4Xs>()),
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements in one block; rows are whole numbers of blocks.
    pub const fn block_elems(self) -> usize {
        self.row().elems
    }

    /// Bytes in one block.
    pub const fn block_bytes(self) -> usize {
        self.row().bytes
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

    /// Ids, names and sizes as ggml has them.
    #[test]
    fn ids_and_sizes_are_ggmls() {
        let want = [
            (0, "f32", 1, 4),
            (1, "f16", 1, 2),
            (2, "q4_0", 32, 18),
            (6, "q5_0", 32, 22),
            (8, "q8_0", 32, 34),
            (10, "q2_k", 256, 84),
            (11, "q3_k", 256, 110),
            (12, "q4_k", 256, 144),
            (13, "q5_k", 256, 176),
            (14, "q6_k", 256, 210),
            (20, "iq4_nl", 32, 18),
            (23, "iq4_xs", 256, 136),
            (30, "bf16", 1, 2),
            (39, "mxfp4", 32, 17),
        ];
        assert_eq!(want.len(), BlockType::ALL.len());
        for (id, name, elems, bytes) in want {
            let b = BlockType::from_id(id).unwrap();
            assert_eq!((b as u32, b.name(), b.block_elems(), b.block_bytes()), (id, name, elems, bytes));
            assert_eq!(BlockType::from_name(name), Some(b));
        }
    }

    #[test]
    fn a_row_is_whole_blocks() {
        assert_eq!(BlockType::Q4_0.row_bytes(2048), Ok(1152));
        assert!(BlockType::Q4_0.row_bytes(4304).is_err());
        assert!(BlockType::F32.row_bytes(u64::MAX).is_err());
    }
}
