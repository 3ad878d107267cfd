//! The instructions that kernels are written over: 16 f32 lanes and 64 small integers, and for decoding eight and 32.

use super::decode::Decode;
use crate::{ActQ8, Columns, scalar};

/// 32 bytes and eight f32: what blocks are decoded with.
///
/// # Safety
/// As for [`Isa`]. `load` reads 32 bytes, `nibbles` 16, `load_f32` and `load_f16` eight elements.
pub(crate) unsafe trait Narrow {
    /// 32 bytes.
    type B: Copy;
    /// Eight f32.
    type E: Copy;

    unsafe fn load(p: *const u8) -> Self::B;
    /// 16 bytes to 32 nibbles: low ones, then high ones.
    unsafe fn nibbles(p: *const u8) -> Self::B;
    /// `(bytes >> shift) & mask` for each byte; the mask clears at least the `shift` upper bits.
    unsafe fn bits(bytes: Self::B, shift: usize, mask: u8) -> Self::B;
    /// The same, moved up by `up` bits; no bit leaves its byte.
    unsafe fn bits_up(bytes: Self::B, shift: usize, mask: u8, up: usize) -> Self::B;
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    /// `values[i]` for each byte `i < 16`.
    unsafe fn table(values: &[i8; 16], index: Self::B) -> Self::B;
    /// Byte `j` is `value` where bit `j` of `word` is set, else 0.
    unsafe fn flags(word: u32, value: u8) -> Self::B;

    unsafe fn f16_to_f32(bits: u16) -> f32;
    unsafe fn load_f32(p: *const f32) -> Self::E;
    unsafe fn load_f16(p: *const u16) -> Self::E;
    /// Eight bytes as numbers from 0.
    unsafe fn unsigned(bytes: u64) -> Self::E;
    /// Eight bytes as signed numbers.
    unsafe fn signed(bytes: u64) -> Self::E;
    unsafe fn mul(x: Self::E, y: f32) -> Self::E;
    unsafe fn sub(x: Self::E, y: f32) -> Self::E;
}

/// A set of instructions. Every function needs them enabled in the caller, into which it is inlined.
///
/// # Safety
/// Pointers must be readable (or writable) for 16 elements.
pub(crate) unsafe trait Isa {
    /// 16 f32 lanes.
    type F: Copy;
    /// Registers for decoding.
    type N: Narrow;

    unsafe fn zero() -> Self::F;
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Lanes added pairwise: 16, 8, 4, 2, 1.
    unsafe fn fold(x: Self::F) -> f32;
    /// Each of eight values twice.
    unsafe fn twice(x: <Self::N as Narrow>::E) -> Self::F;
    unsafe fn join(low: <Self::N as Narrow>::E, high: <Self::N as Narrow>::E) -> Self::F;
    /// Asks for the cache line at `p`, which need not be readable.
    fn prefetch(p: *const u8);
    /// As `scalar::quantize_act`, laid out as [`Isa::matrix`] takes it.
    #[inline(always)]
    unsafe fn quantize(x: &[f32], n: usize, out: &mut [ActQ8]) {
        scalar::quantize_act(x, n, out);
    }
    /// Product of a quantized matrix that `scalar::check_matmul` accepted, in tiles of `C` columns. An element's bits do not
    /// depend on how many rows and columns there are.
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]);
}

/// Instructions for dot products of one row and one column, for [`tiles`](super::tiles).
///
/// # Safety
/// As for [`Isa`]; `x` points to 64 bytes.
pub(crate) unsafe trait Dots: Isa {
    /// 64 weights.
    type W: Copy;

    /// Two decoded groups of `D`, ready for [`Dots::add_dots`].
    unsafe fn pair<D: Decode>(a: <Self::N as Narrow>::B, b: <Self::N as Narrow>::B) -> Self::W;
    /// `acc` plus the products of 64 weights with `x`, scaled: weights `16 k .. 16 k + 16` with lane `4 pair + k` of
    /// `scale`. The integer products and their sums are exact, and which lane takes which of them depends on `D` alone.
    unsafe fn add_dots<D: Decode>(acc: Self::F, w: Self::W, x: *const i8, scale: Self::F, pair: usize) -> Self::F;
}
