//! AVX-512 with VNNI, and the same with AMX for tiles of columns.

use super::narrow::Avx;
use super::{amx, tile};
use crate::lanes::{Decode, Isa};
use crate::{ActQ8, Columns};
use core::arch::x86_64::*;

pub(super) struct Avx512<const AMX: bool>;
pub(super) type Avx512Vnni = Avx512<false>;

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl<const AMX: bool> Isa for Avx512<AMX> {
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
    fn prefetch(p: *const u8) {
        super::avx2::Avx2::prefetch(p);
    }

    #[inline(always)]
    unsafe fn quantize(x: &[f32], n: usize, out: &mut [ActQ8]) {
        // SAFETY: passed on.
        unsafe { tile::quantize(x, n, out) }
    }

    #[inline(always)]
    unsafe fn matrix<D: Decode, const C: usize>(w: &[D], x: Columns<'_>, out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe { if AMX { amx::matrix(w, x, out) } else { tile::matrix(w, x, out) } }
    }
}
