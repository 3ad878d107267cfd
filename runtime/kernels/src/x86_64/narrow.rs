//! Decoding with AVX2 and F16C, for both variants: 32 bytes or eight f32 in a register.

use crate::lanes::Narrow;
use core::arch::x86_64::*;

pub(super) struct Avx;

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl Narrow for Avx {
    type B = __m256i;
    type E = __m256;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        // SAFETY: for all functions here: the caller enabled the instructions and vouches for pointers, as the trait says.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> __m256i {
        // SAFETY: as in load().
        unsafe {
            let both = _mm_loadu_si128(p.cast());
            let pair = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(both), _mm_srli_epi16::<4>(both));
            _mm256_and_si256(pair, _mm256_set1_epi8(15))
        }
    }

    #[inline(always)]
    unsafe fn bits(bytes: __m256i, shift: usize, mask: u8) -> __m256i {
        // SAFETY: as in load(). Bits that a 16-bit shift moves into a byte from its neighbour are masked off.
        unsafe {
            let down = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(down, _mm256_set1_epi8(mask as i8))
        }
    }

    #[inline(always)]
    unsafe fn bits_up(bytes: __m256i, shift: usize, mask: u8, up: usize) -> __m256i {
        // SAFETY: as in load().
        unsafe { _mm256_sll_epi16(Self::bits(bytes, shift, mask), _mm_cvtsi32_si128(up as i32)) }
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as in load().
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn table(values: &[i8; 16], index: __m256i) -> __m256i {
        // SAFETY: as in load().
        unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast())), index) }
    }

    #[inline(always)]
    unsafe fn flags(word: u32, value: u8) -> __m256i {
        // SAFETY: as in load().
        unsafe {
            // Byte j looks at byte j / 8 of the word, then at its bit j mod 8.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let all = _mm256_shuffle_epi8(_mm256_set1_epi32(word as i32), spread);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
            _mm256_and_si256(set, _mm256_set1_epi8(value as i8))
        }
    }

    #[inline(always)]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        // SAFETY: as in load().
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn unsigned(bytes: u64) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64))) }
    }

    #[inline(always)]
    unsafe fn signed(bytes: u64) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes as i64))) }
    }

    #[inline(always)]
    unsafe fn mul(x: __m256, y: f32) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_mul_ps(x, _mm256_set1_ps(y)) }
    }

    #[inline(always)]
    unsafe fn sub(x: __m256, y: f32) -> __m256 {
        // SAFETY: as in load().
        unsafe { _mm256_sub_ps(x, _mm256_set1_ps(y)) }
    }
}
