//! AVX2 with FMA and F16C: 16 lanes as two registers of eight.

use super::narrow::Avx;
use crate::Columns;
use crate::lanes::{Decode, Dots, Isa, tiles};
use core::arch::x86_64::*;

pub(super) struct Avx2;

/// Eight lanes added pairwise: 8, 4, 2, 1.
#[inline(always)]
pub(super) unsafe fn fold8(x: __m256) -> f32 {
    // SAFETY: the caller enabled AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl Isa for Avx2 {
    type F = (__m256, __m256);
    type N = Avx;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        // SAFETY: for all functions here: the caller enabled the instructions and vouches for pointers, as the trait says.
        unsafe { (_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            let eight = |p: *const u16| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            (eight(p), eight(p.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: as in zero().
        unsafe {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: as in zero().
        unsafe { (_mm256_fnmadd_ps(a.0, b.0, c.0), _mm256_fnmadd_ps(a.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn fold(x: Self::F) -> f32 {
        // SAFETY: as in zero().
        unsafe { fold8(_mm256_add_ps(x.0, x.1)) }
    }

    #[inline(always)]
    unsafe fn twice(x: __m256) -> Self::F {
        // SAFETY: as in zero().
        unsafe {
            let (low, high) = (_mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3), _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
            (_mm256_permutevar8x32_ps(x, low), _mm256_permutevar8x32_ps(x, high))
        }
    }

    #[inline(always)]
    unsafe fn join(low: __m256, high: __m256) -> Self::F {
        (low, high)
    }

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a hint, which never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { tiles::<Self, D, C>(w, x, out) }
    }
}

// SAFETY: as above.
unsafe impl Dots for Avx2 {
    type W = (__m256i, __m256i);

    #[inline(always)]
    unsafe fn pair<D: Decode>(a: __m256i, b: __m256i) -> Self::W {
        (a, b)
    }

    #[inline(always)]
    unsafe fn add_dots<D: Decode>(acc: Self::F, w: Self::W, x: *const i8, scale: Self::F, pair: usize) -> Self::F {
        // SAFETY: as in zero().
        unsafe { Self::fma(Self::dot::<D>(w, x), Self::spread(scale, pair), acc) }
    }
}

impl Avx2 {
    /// Values `4 pair .. 4 pair + 4` of `x`, each four times: for four halves of 16 weights, four lanes each.
    #[inline(always)]
    unsafe fn spread(x: <Self as Isa>::F, pair: usize) -> <Self as Isa>::F {
        // SAFETY: the caller enabled the instructions.
        unsafe {
            let half = if pair < 2 { x.0 } else { x.1 };
            let first = _mm256_set1_epi32(4 * (pair as i32 % 2));
            let (a, b) = (_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3));
            let pick = |i| _mm256_permutevar8x32_ps(half, _mm256_add_epi32(i, first));
            (pick(a), pick(b))
        }
    }

    /// Lane `i` = sum of four products from weight `4 i` on, exact, as f32.
    #[inline(always)]
    unsafe fn dot<D: Decode>(w: <Self as Dots>::W, x: *const i8) -> <Self as Isa>::F {
        // SAFETY: the caller enabled the instructions; x points to 64 quants.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            // Pairs of products in 16 bits: at most 2 · 128 · 127 with the signs moved to x, 2 · 63 · 127 else.
            let group = |w: __m256i, x: __m256i| {
                let products = if D::SIGNED {
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                } else if D::OFFSET == 0 {
                    _mm256_maddubs_epi16(w, x)
                } else {
                    let above = _mm256_maddubs_epi16(_mm256_set1_epi8(D::OFFSET as i8), x);
                    _mm256_sub_epi16(_mm256_maddubs_epi16(w, x), above)
                };
                _mm256_cvtepi32_ps(_mm256_madd_epi16(products, ones))
            };
            let load = |p: *const i8| _mm256_loadu_si256(p.cast());
            (group(w.0, load(x)), group(w.1, load(x.add(32))))
        }
    }
}
