//! NEON: 16 lanes as four registers. Integer products come from [`Products`] or [`Matrix`], whose implementations differ
//! by CPU.

use super::narrow::{Neon, f16x4};
use crate::Columns;
use crate::lanes::{Decode, Dots, Isa, tiles};
use core::arch::aarch64::*;
use core::marker::PhantomData;

/// Sums of products of signed bytes, exact.
///
/// # Safety
/// The instructions that the implementation names are enabled in the caller. Bytes of `x` are above −128.
pub(super) unsafe trait Products {
    /// Each lane: four of 16 products.
    unsafe fn sixteen(w: int8x16_t, x: int8x16_t) -> int32x4_t;
    /// Each lane: eight of 32 products. Where `SMALL`, bytes of `w` are between −64 and 63.
    unsafe fn thirty_two<const SMALL: bool>(w: [int8x16_t; 2], x: [int8x16_t; 2]) -> int32x4_t;
}

/// Multiplication in 16 bits: what every Armv8 core has.
pub(super) struct Widening;

// SAFETY: the functions only use their arguments.
unsafe impl Products for Widening {
    #[inline(always)]
    unsafe fn sixteen(w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the caller enabled NEON. Two products of at most 128 · 127 fit 16 bits.
        unsafe { vpaddlq_s16(vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x)) }
    }

    #[inline(always)]
    unsafe fn thirty_two<const SMALL: bool>(w: [int8x16_t; 2], x: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller enabled NEON. Two products of at most 128 · 127 fit 16 bits, as do four of 64 · 127.
        unsafe {
            let first = vmlal_high_s8(vmull_s8(vget_low_s8(w[0]), vget_low_s8(x[0])), w[0], x[0]);
            if SMALL {
                let both = vmlal_s8(first, vget_low_s8(w[1]), vget_low_s8(x[1]));
                return vpaddlq_s16(vmlal_high_s8(both, w[1], x[1]));
            }
            let second = vmlal_high_s8(vmull_s8(vget_low_s8(w[1]), vget_low_s8(x[1])), w[1], x[1]);
            vpadalq_s16(vpaddlq_s16(first), second)
        }
    }
}

/// Products of whole matrices.
///
/// # Safety
/// As for [`Isa::matrix`].
pub(super) unsafe trait Matrix {
    /// [`Isa::matrix`].
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]);
}

// SAFETY: passed on.
unsafe impl<P: Products> Matrix for P {
    #[inline(always)]
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { tiles::<Lanes<P>, D, C>(w, x, out) }
    }
}

/// The instruction set with `M`'s products.
pub(super) struct Lanes<M>(PhantomData<M>);

/// Four lanes added pairwise: 4, 2, 1.
#[inline(always)]
pub(super) unsafe fn fold4(x: float32x4_t) -> f32 {
    // SAFETY: the caller enabled NEON.
    unsafe {
        let two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        vget_lane_f32::<0>(vpadd_f32(two, two))
    }
}

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl<M: Matrix> Isa for Lanes<M> {
    type F = [float32x4_t; 4];
    type N = Neon;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        // SAFETY: for all functions here: the caller enabled the instructions and vouches for pointers, as the trait says.
        unsafe { [vdupq_n_f32(0.0); 4] }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: as in zero().
        unsafe { [vdupq_n_f32(x); 4] }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: as in zero().
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            let (a, b) = (vld1q_u16(p), vld1q_u16(p.add(8)));
            [f16x4(vget_low_u16(a)), f16x4(vget_high_u16(a)), f16x4(vget_low_u16(b)), f16x4(vget_high_u16(b))]
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            let (a, b) = (vld1q_u16(p), vld1q_u16(p.add(8)));
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(a))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(a)),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(b))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(b)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: as in zero().
        unsafe {
            vst1q_f32(p, x[0]);
            vst1q_f32(p.add(4), x[1]);
            vst1q_f32(p.add(8), x[2]);
            vst1q_f32(p.add(12), x[3]);
        }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1]), vmulq_f32(a[2], b[2]), vmulq_f32(a[3], b[3])] }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            [
                vfmaq_f32(c[0], a[0], b[0]),
                vfmaq_f32(c[1], a[1], b[1]),
                vfmaq_f32(c[2], a[2], b[2]),
                vfmaq_f32(c[3], a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            [
                vfmsq_f32(c[0], a[0], b[0]),
                vfmsq_f32(c[1], a[1], b[1]),
                vfmsq_f32(c[2], a[2], b[2]),
                vfmsq_f32(c[3], a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn fold(x: Self::F) -> f32 {
        // SAFETY: as in zero().
        unsafe { fold4(vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]))) }
    }

    #[inline(always)]
    unsafe fn twice((a, b): (float32x4_t, float32x4_t)) -> Self::F {
        // SAFETY: as in zero().
        unsafe { [vzip1q_f32(a, a), vzip2q_f32(a, a), vzip1q_f32(b, b), vzip2q_f32(b, b)] }
    }

    #[inline(always)]
    unsafe fn join(low: (float32x4_t, float32x4_t), high: (float32x4_t, float32x4_t)) -> Self::F {
        [low.0, low.1, high.0, high.1]
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a hint, which never faults and changes nothing.
        unsafe { core::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly)) }
    }

    #[inline(always)]
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { M::matrix::<D, C>(w, x, out) }
    }
}

// SAFETY: as above.
unsafe impl<P: Products> Dots for Lanes<P> {
    type W = [int8x16_t; 4];

    #[inline(always)]
    unsafe fn pair<D: Decode>(a: (uint8x16_t, uint8x16_t), b: (uint8x16_t, uint8x16_t)) -> Self::W {
        // SAFETY: as in zero().
        unsafe { [a.0, a.1, b.0, b.1].map(|w| vreinterpretq_s8_u8(vsubq_u8(w, vdupq_n_u8(D::OFFSET)))) }
    }

    #[inline(always)]
    unsafe fn add_dots<D: Decode>(mut acc: Self::F, w: Self::W, x: *const i8, scale: Self::F, pair: usize) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            let x = [vld1q_s8(x), vld1q_s8(x.add(16)), vld1q_s8(x.add(32)), vld1q_s8(x.add(48))];
            let scale = scale[pair];
            if D::HALVES {
                let dots = |k: usize| vcvtq_f32_s32(P::sixteen(w[k], x[k]));
                acc[0] = vfmaq_laneq_f32::<0>(acc[0], dots(0), scale);
                acc[1] = vfmaq_laneq_f32::<1>(acc[1], dots(1), scale);
                acc[2] = vfmaq_laneq_f32::<2>(acc[2], dots(2), scale);
                acc[3] = vfmaq_laneq_f32::<3>(acc[3], dots(3), scale);
                return acc;
            }
            // Both halves of a group have one scale: eight products to a lane.
            let dots = |k: usize| {
                let (w, x) = ([w[k], w[k + 1]], [x[k], x[k + 1]]);
                vcvtq_f32_s32(if D::SIGNED { P::thirty_two::<false>(w, x) } else { P::thirty_two::<true>(w, x) })
            };
            let to = 2 * (pair % 2);
            acc[to] = vfmaq_laneq_f32::<0>(acc[to], dots(0), scale);
            acc[to + 1] = vfmaq_laneq_f32::<2>(acc[to + 1], dots(2), scale);
            acc
        }
    }
}
