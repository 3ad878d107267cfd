//! Blocks to bytes and scales: group `i` of 32 weights as one register, 16 scales and minima (one for each 16 weights).

use super::isa::Isa;
use crate::blocks::{Blocks, mxfp4_scale};
use core::arch::x86_64::*;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, E2M1_DOUBLED, IQ4_VALUES,
};

/// Decoding of 256 weights, which are one large block or eight small ones.
///
/// # Safety
/// For all functions: AVX2, FMA and F16C are enabled in the caller, `w` points to 256 weights, `i < 8`.
pub(super) trait Decode: Blocks {
    /// Group `i`: signed bytes, or unsigned ones some offset above their value, as [`Decode::dot`] knows.
    unsafe fn decode(w: *const Self, i: usize) -> __m256i;

    /// Scales and minima of the 16 halves.
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F);

    /// [`Isa::dot`] with this type's offset.
    unsafe fn dot<I: Isa>(w: I::W, x: *const i8) -> I::F;
}

/// The offset as a constant argument, which a trait constant cannot be.
macro_rules! offset {
    ($off:literal) => {
        #[inline(always)]
        unsafe fn dot<I: Isa>(w: I::W, x: *const i8) -> I::F {
            // SAFETY: passed on.
            unsafe { I::dot::<$off, false>(w, x) }
        }
    };
}

macro_rules! signed {
    () => {
        #[inline(always)]
        unsafe fn dot<I: Isa>(w: I::W, x: *const i8) -> I::F {
            // SAFETY: passed on.
            unsafe { I::dot::<0, true>(w, x) }
        }
    };
}

#[inline(always)]
unsafe fn f16_to_f32(bits: u16) -> f32 {
    // SAFETY: F16C is enabled.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
}

/// `(bytes >> shift) & mask` for each byte.
#[inline(always)]
unsafe fn bits(bytes: __m256i, shift: usize, mask: i8) -> __m256i {
    // SAFETY: AVX2 is enabled. Bits that a 16-bit shift moves into a byte from its neighbour are masked off.
    unsafe { _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32)), _mm256_set1_epi8(mask)) }
}

/// The same, moved up by `up` bits.
#[inline(always)]
unsafe fn bits_up(bytes: __m256i, shift: usize, mask: i8, up: i32) -> __m256i {
    // SAFETY: AVX2 is enabled; masked values stay inside their byte.
    unsafe { _mm256_sll_epi16(bits(bytes, shift, mask), _mm_cvtsi32_si128(up)) }
}

/// 16 bytes to 32 nibbles: low ones, then high ones.
#[inline(always)]
unsafe fn nibbles(qs: *const u8) -> __m256i {
    // SAFETY: AVX2 is enabled; qs points to 16 bytes.
    unsafe {
        let both = _mm_loadu_si128(qs.cast());
        let pair = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(both), _mm_srli_epi16::<4>(both));
        _mm256_and_si256(pair, _mm256_set1_epi8(15))
    }
}

#[inline(always)]
unsafe fn table(values: &[i8; 16], index: __m256i) -> __m256i {
    // SAFETY: AVX2 is enabled.
    unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast())), index) }
}

#[inline(always)]
unsafe fn load(p: *const u8) -> __m256i {
    // SAFETY: AVX2 is enabled; p points to 32 bytes.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// Scales of eight small blocks, each for both halves; no minima.
#[inline(always)]
unsafe fn small_scales<I: Isa>(d: impl Fn(usize) -> u16) -> (I::F, I::F) {
    // SAFETY: F16C is enabled.
    unsafe {
        let d: [u16; 8] = core::array::from_fn(d);
        (I::twice(_mm256_cvtph_ps(_mm_loadu_si128(d.as_ptr().cast()))), I::zero())
    }
}

/// Eight bytes as f32 times `d`.
#[inline(always)]
unsafe fn bytes_times(bytes: u64, d: f32) -> __m256 {
    // SAFETY: AVX2 is enabled.
    unsafe {
        let wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64));
        _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(d))
    }
}

/// Eight signed bytes as f32 times `d`.
#[inline(always)]
unsafe fn signed_times(bytes: u64, d: f32) -> __m256 {
    // SAFETY: AVX2 is enabled.
    unsafe {
        let wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes as i64));
        _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(d))
    }
}

fn word(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]])
}

fn words(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Decode for BlockQ8_0 {
    signed!();

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: for all decode and scales functions here: the caller's promise, as the trait says.
        unsafe { load((*w.add(i)).qs.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as in decode().
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockQ4_0 {
    offset!(8);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { nibbles((*w.add(i)).qs.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockQ5_0 {
    offset!(16);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let b = &*w.add(i);
            // Byte j looks at bit j of qh: byte j / 8 of it, then bit j mod 8.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let all = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(b.qh)), spread);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
            _mm256_or_si256(nibbles(b.qs.as_ptr()), _mm256_and_si256(set, _mm256_set1_epi8(16)))
        }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockIq4Nl {
    signed!();

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { table(&IQ4_VALUES, nibbles((*w.add(i)).qs.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockMxfp4 {
    signed!();

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { table(&E2M1_DOUBLED, nibbles((*w.add(i)).qs.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let d: [f32; 8] = core::array::from_fn(|i| mxfp4_scale((*w.add(i)).e));
            (I::twice(_mm256_loadu_ps(d.as_ptr())), I::zero())
        }
    }
}

impl Decode for BlockIq4Xs {
    signed!();

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { table(&IQ4_VALUES, nibbles((*w).qs.as_ptr().add(16 * i))) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let b = &*w;
            let s: [i8; 8] = core::array::from_fn(|i| {
                let low = b.scales_l[i / 2] >> (4 * (i & 1)) & 15;
                (low | ((b.scales_h >> (2 * i) & 3) as u8) << 4) as i8 - 32
            });
            let s = u64::from_le_bytes(s.map(|s| s as u8));
            (I::twice(signed_times(s, f16_to_f32(b.d))), I::zero())
        }
    }
}

/// Scales and minima of Q4_K and Q5_K: eight six-bit pairs, taken apart four at a time.
#[inline(always)]
unsafe fn k_scales<I: Isa>(d: u16, dmin: u16, s: &[u8; 12]) -> (I::F, I::F) {
    // SAFETY: AVX2 and F16C are enabled.
    unsafe {
        let (a, b, c) = (word(s, 0), word(s, 1), word(s, 2));
        let high = |x: u32| (x >> 6 & 0x0303_0303) << 4;
        let scales = words(a & 0x3F3F_3F3F, c & 0x0F0F_0F0F | high(a));
        let mins = words(b & 0x3F3F_3F3F, c >> 4 & 0x0F0F_0F0F | high(b));
        (I::twice(bytes_times(scales, f16_to_f32(d))), I::twice(bytes_times(mins, f16_to_f32(dmin))))
    }
}

impl Decode for BlockQ4K {
    offset!(0);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { bits(load((*w).qs.as_ptr().add(i / 2 * 32)), 4 * (i & 1), 15) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe { k_scales::<I>((*w).d, (*w).dmin, &(*w).scales) }
    }
}

impl Decode for BlockQ5K {
    offset!(0);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let low = bits(load((*w).qs.as_ptr().add(i / 2 * 32)), 4 * (i & 1), 15);
            _mm256_or_si256(low, bits_up(load((*w).qh.as_ptr()), i, 1, 4))
        }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe { k_scales::<I>((*w).d, (*w).dmin, &(*w).scales) }
    }
}

impl Decode for BlockQ6K {
    offset!(32);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let (n, j) = (i / 4, i % 4);
            let low = bits(load((*w).ql.as_ptr().add(64 * n + 32 * (j & 1))), 4 * (j / 2), 15);
            _mm256_or_si256(low, bits_up(load((*w).qh.as_ptr().add(32 * n)), 2 * j, 3, 4))
        }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d) = ((*w).scales.map(|s| s as u8), f16_to_f32((*w).d));
            let eight = |i| signed_times(words(word(&s, i), word(&s, i + 1)), d);
            (I::join(eight(0), eight(2)), I::zero())
        }
    }
}

impl Decode for BlockQ3K {
    offset!(4);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let low = bits(load((*w).qs.as_ptr().add(i / 4 * 32)), 2 * (i % 4), 3);
            _mm256_or_si256(low, bits_up(load((*w).hmask.as_ptr()), i, 1, 2))
        }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d) = (&(*w).scales, f16_to_f32((*w).d));
            let (a, b, high) = (word(s, 0), word(s, 1), word(s, 2));
            let four = |low: u32, shift: u32| low & 0x0F0F_0F0F | (high >> shift & 0x0303_0303) << 4;
            let eight = |bytes: u64| {
                // Six bits less 32: subtracted in f32, where it is exact.
                let wide = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64)));
                _mm256_mul_ps(_mm256_sub_ps(wide, _mm256_set1_ps(32.0)), _mm256_set1_ps(d))
            };
            let low = eight(words(four(a, 0), four(b, 2)));
            let high = eight(words(four(a >> 4, 4), four(b >> 4, 6)));
            (I::join(low, high), I::zero())
        }
    }
}

impl Decode for BlockQ2K {
    offset!(0);

    #[inline(always)]
    unsafe fn decode(w: *const Self, i: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { bits(load((*w).qs.as_ptr().add(i / 4 * 32)), 2 * (i % 4), 3) }
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d, dmin) = (&(*w).scales, f16_to_f32((*w).d), f16_to_f32((*w).dmin));
            let both = |i: usize| words(word(s, i), word(s, i + 1));
            let low = 0x0F0F_0F0F_0F0F_0F0F;
            let scale = I::join(bytes_times(both(0) & low, d), bytes_times(both(2) & low, d));
            let min = I::join(bytes_times(both(0) >> 4 & low, dmin), bytes_times(both(2) >> 4 & low, dmin));
            (scale, min)
        }
    }
}
