//! AVX-512 with VNNI.

use super::narrow::Avx;
use crate::Columns;
use crate::lanes::{Decode, Dots, Isa, tiles};
use core::arch::x86_64::*;

pub(super) struct Avx512Vnni;

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl Isa for Avx512Vnni {
    type F = __m512;
    type N = Avx;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: for all functions here: the caller enabled the instructions and vouches for pointers, as the trait says.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: as in zero().
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: as in zero().
        unsafe { _mm512_storeu_ps(p, x) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn fold(x: __m512) -> f32 {
        // SAFETY: as in zero().
        unsafe {
            let high = _mm512_extractf32x8_ps::<1>(x);
            super::avx2::fold8(_mm256_add_ps(_mm512_castps512_ps256(x), high))
        }
    }

    #[inline(always)]
    unsafe fn twice(x: __m256) -> __m512 {
        // SAFETY: as in zero().
        unsafe {
            let index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            _mm512_permutexvar_ps(index, _mm512_castps256_ps512(x))
        }
    }

    #[inline(always)]
    unsafe fn join(low: __m256, high: __m256) -> __m512 {
        // SAFETY: as in zero().
        unsafe { _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high) }
    }

    #[inline(always)]
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { tiles::<Self, D, C>(w, x, out) }
    }
}

// SAFETY: as above.
unsafe impl Dots for Avx512Vnni {
    type W = __m512i;

    #[inline(always)]
    unsafe fn pair<D: Decode>(a: __m256i, b: __m256i) -> __m512i {
        // SAFETY: as in zero().
        unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b) }
    }

    #[inline(always)]
    unsafe fn add_dots<D: Decode>(acc: __m512, w: __m512i, x: *const i8, scale: __m512, pair: usize) -> __m512 {
        // SAFETY: as in zero().
        unsafe { Self::fma(Self::dot::<D>(w, x), Self::spread(scale, pair), acc) }
    }
}

impl Avx512Vnni {
    /// Values `4 pair .. 4 pair + 4` of `x`, each four times: for four halves of 16 weights, four lanes each.
    #[inline(always)]
    unsafe fn spread(x: __m512, pair: usize) -> __m512 {
        // SAFETY: the caller enabled the instructions.
        unsafe {
            let index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(4 * pair as i32)), x)
        }
    }

    /// Lane `i` = sum of four products from weight `4 i` on, exact, as f32.
    #[inline(always)]
    unsafe fn dot<D: Decode>(w: __m512i, x: *const i8) -> __m512 {
        // SAFETY: the caller enabled the instructions; x points to 64 quants.
        unsafe {
            let (zero, x) = (_mm512_setzero_si512(), _mm512_loadu_si512(x.cast()));
            // VNNI multiplies unsigned by signed: signed weights are moved up by 128, and 128 Σ x is taken off again.
            let (w, off) = if D::SIGNED { (_mm512_xor_si512(w, _mm512_set1_epi8(-128)), 128) } else { (w, D::OFFSET) };
            let sum = _mm512_dpbusd_epi32(zero, w, x);
            if off == 0 {
                return _mm512_cvtepi32_ps(sum);
            }
            let above = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(off as i8), x);
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, above))
        }
    }
}
