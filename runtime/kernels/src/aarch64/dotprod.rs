//! FEAT_DotProd: four products of bytes and their sum in one instruction (Cortex-A55, A76 and later).

use super::neon::Products;
use core::arch::{aarch64::*, asm};

/// `sdot`. Inline assembly, since stable Rust has no intrinsic for it.
pub(super) struct Sdot;

#[inline(always)]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller enabled dotprod; the instruction reads and writes these registers only.
    unsafe {
        asm!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

// SAFETY: the functions only use their arguments.
unsafe impl Products for Sdot {
    #[inline(always)]
    unsafe fn sixteen(w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: passed on.
        unsafe { sdot(vdupq_n_s32(0), w, x) }
    }

    #[inline(always)]
    unsafe fn thirty_two<const SMALL: bool>(w: [int8x16_t; 2], x: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: passed on.
        unsafe { sdot(Self::sixteen(w[0], x[0]), w[1], x[1]) }
    }
}
