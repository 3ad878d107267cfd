//! The instructions that kernels are written over: 16 f32 lanes, 64 small integers.

use core::arch::x86_64::{__m256, __m256i};

/// A set of instructions. Every function needs them enabled in the caller, into which it is inlined.
///
/// # Safety
/// Pointers must be readable (or writable) for 16 elements, 64 bytes for [`Isa::dot`].
pub(super) unsafe trait Isa {
    /// 16 f32 lanes.
    type F: Copy;
    /// 64 weights.
    type W: Copy;

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
    unsafe fn twice(x: __m256) -> Self::F;
    unsafe fn join(low: __m256, high: __m256) -> Self::F;
    /// Values `4 pair .. 4 pair + 4` of `x`, each four times: for four halves of 16 weights, four lanes each.
    unsafe fn spread(x: Self::F, pair: usize) -> Self::F;
    /// Two groups of 32.
    unsafe fn pair(a: __m256i, b: __m256i) -> Self::W;
    /// Lane `i` = Σ of four products `(w - OFF) * x` from weight `4 i` on, exact, as f32. `w` is signed (and OFF 0) where
    /// `SIGNED`, else unsigned and below 128.
    unsafe fn dot<const OFF: u8, const SIGNED: bool>(w: Self::W, x: *const i8) -> Self::F;
}
