//! Blocks to bytes and scales: group `i` of 32 weights as one register, 16 scales and minima (one for each 16 weights).
//!
//! One source for all instruction sets: what a format does with its bits is said here, in [`Narrow`]'s few operations.

use super::isa::{Isa, Narrow};
use crate::blocks::{Blocks, mxfp4_scale};
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, E2M1_DOUBLED, IQ4_VALUES,
};

/// Decoding of 256 weights, which are one large block or eight small ones.
///
/// # Safety
/// For all functions: N's (or I's) instructions are enabled in the caller, `w` points to 256 weights, `i < 8`.
pub(crate) trait Decode: Blocks {
    /// Decoded bytes lie this much above their weight.
    const OFFSET: u8 = 0;
    /// Decoded bytes are signed; else they are below 64.
    const SIGNED: bool = false;
    /// Offset of 128 bytes whose low nibbles are the even groups and whose high ones the odd, 32 bytes for two groups.
    #[cfg(target_arch = "x86_64")]
    const NIBBLES: Option<usize> = None;

    /// Group `i`.
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B;

    /// Scales and minima of the eight groups; of no use where halves have their own.
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>);

    /// Scales and minima of the 16 halves.
    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: passed on.
        unsafe {
            let (scale, min) = Self::eight::<I>(w);
            (I::twice(scale), I::twice(min))
        }
    }
}

/// Eight f32 of an instruction set.
pub(crate) type Eight<I> = <<I as Isa>::N as Narrow>::E;

/// Scales of eight small blocks; no minima.
#[inline(always)]
unsafe fn small_scales<I: Isa>(d: impl Fn(usize) -> u16) -> (Eight<I>, Eight<I>) {
    // SAFETY: passed on; d holds eight values.
    unsafe {
        let four =
            |i| u64::from(d(i)) | u64::from(d(i + 1)) << 16 | u64::from(d(i + 2)) << 32 | u64::from(d(i + 3)) << 48;
        let d = [four(0), four(4)];
        (I::N::load_f16(d.as_ptr().cast()), I::N::unsigned(0))
    }
}

/// [`Decode::eight`] of types whose halves have scales of their own.
fn halves_differ() -> ! {
    unreachable!("halves have scales of their own")
}

/// Eight bytes as f32 times `d`.
#[inline(always)]
unsafe fn bytes_times<I: Isa>(bytes: u64, d: f32) -> Eight<I> {
    // SAFETY: passed on.
    unsafe { I::N::mul(I::N::unsigned(bytes), d) }
}

/// Eight signed bytes as f32 times `d`.
#[inline(always)]
unsafe fn signed_times<I: Isa>(bytes: u64, d: f32) -> Eight<I> {
    // SAFETY: passed on.
    unsafe { I::N::mul(I::N::signed(bytes), d) }
}

fn word(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]])
}

fn words(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Decode for BlockQ8_0 {
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: for all decode and scales functions here: the caller's promise, as the trait says.
        unsafe { N::load((*w.add(i)).qs.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as in decode().
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockQ4_0 {
    const OFFSET: u8 = 8;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::nibbles((*w.add(i)).qs.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockQ5_0 {
    const OFFSET: u8 = 16;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe {
            let b = &*w.add(i);
            N::or(N::nibbles(b.qs.as_ptr()), N::flags(u32::from_le_bytes(b.qh), 16))
        }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockIq4Nl {
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::table(&IQ4_VALUES, N::nibbles((*w.add(i)).qs.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe { small_scales::<I>(|i| (*w.add(i)).d) }
    }
}

impl Decode for BlockMxfp4 {
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::table(&E2M1_DOUBLED, N::nibbles((*w.add(i)).qs.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe {
            let d: [f32; 8] = core::array::from_fn(|i| mxfp4_scale((*w.add(i)).e));
            (I::N::load_f32(d.as_ptr()), I::N::unsigned(0))
        }
    }
}

impl Decode for BlockIq4Xs {
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::table(&IQ4_VALUES, N::nibbles((*w).qs.as_ptr().add(16 * i))) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe {
            let b = &*w;
            let s: [i8; 8] = core::array::from_fn(|i| {
                let low = b.scales_l[i / 2] >> (4 * (i & 1)) & 15;
                (low | ((b.scales_h >> (2 * i) & 3) as u8) << 4) as i8 - 32
            });
            let s = u64::from_le_bytes(s.map(|s| s as u8));
            (signed_times::<I>(s, I::N::f16_to_f32(b.d)), I::N::unsigned(0))
        }
    }
}

/// Scales and minima of Q4_K and Q5_K: eight six-bit pairs, taken apart four at a time.
#[inline(always)]
unsafe fn k_scales<I: Isa>(d: u16, dmin: u16, s: &[u8; 12]) -> (Eight<I>, Eight<I>) {
    // SAFETY: passed on.
    unsafe {
        let (a, b, c) = (word(s, 0), word(s, 1), word(s, 2));
        let high = |x: u32| (x >> 6 & 0x0303_0303) << 4;
        let scales = words(a & 0x3F3F_3F3F, c & 0x0F0F_0F0F | high(a));
        let mins = words(b & 0x3F3F_3F3F, c >> 4 & 0x0F0F_0F0F | high(b));
        (bytes_times::<I>(scales, I::N::f16_to_f32(d)), bytes_times::<I>(mins, I::N::f16_to_f32(dmin)))
    }
}

impl Decode for BlockQ4K {
    #[cfg(target_arch = "x86_64")]
    const NIBBLES: Option<usize> = Some(core::mem::offset_of!(BlockQ4K, qs));

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::bits(N::load((*w).qs.as_ptr().add(i / 2 * 32)), 4 * (i & 1), 15) }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe { k_scales::<I>((*w).d, (*w).dmin, &(*w).scales) }
    }
}

impl Decode for BlockQ5K {
    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe {
            let low = N::bits(N::load((*w).qs.as_ptr().add(i / 2 * 32)), 4 * (i & 1), 15);
            N::or(low, N::bits_up(N::load((*w).qh.as_ptr()), i, 1, 4))
        }
    }

    #[inline(always)]
    unsafe fn eight<I: Isa>(w: *const Self) -> (Eight<I>, Eight<I>) {
        // SAFETY: as above.
        unsafe { k_scales::<I>((*w).d, (*w).dmin, &(*w).scales) }
    }
}

impl Decode for BlockQ6K {
    const OFFSET: u8 = 32;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe {
            let (n, j) = (i / 4, i % 4);
            let low = N::bits(N::load((*w).ql.as_ptr().add(64 * n + 32 * (j & 1))), 4 * (j / 2), 15);
            N::or(low, N::bits_up(N::load((*w).qh.as_ptr().add(32 * n)), 2 * j, 3, 4))
        }
    }

    unsafe fn eight<I: Isa>(_: *const Self) -> (Eight<I>, Eight<I>) {
        halves_differ()
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d) = ((*w).scales.map(|s| s as u8), I::N::f16_to_f32((*w).d));
            let eight = |i| signed_times::<I>(words(word(&s, i), word(&s, i + 1)), d);
            (I::join(eight(0), eight(2)), I::zero())
        }
    }
}

impl Decode for BlockQ3K {
    const OFFSET: u8 = 4;

    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe {
            let low = N::bits(N::load((*w).qs.as_ptr().add(i / 4 * 32)), 2 * (i % 4), 3);
            N::or(low, N::bits_up(N::load((*w).hmask.as_ptr()), i, 1, 2))
        }
    }

    unsafe fn eight<I: Isa>(_: *const Self) -> (Eight<I>, Eight<I>) {
        halves_differ()
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d) = (&(*w).scales, I::N::f16_to_f32((*w).d));
            let (a, b, high) = (word(s, 0), word(s, 1), word(s, 2));
            let four = |low: u32, shift: u32| low & 0x0F0F_0F0F | (high >> shift & 0x0303_0303) << 4;
            let eight = |bytes: u64| {
                // Six bits less 32: subtracted in f32, where it is exact.
                I::N::mul(I::N::sub(I::N::unsigned(bytes), 32.0), d)
            };
            let low = eight(words(four(a, 0), four(b, 2)));
            let high = eight(words(four(a >> 4, 4), four(b >> 4, 6)));
            (I::join(low, high), I::zero())
        }
    }
}

impl Decode for BlockQ2K {
    #[inline(always)]
    unsafe fn decode<N: Narrow>(w: *const Self, i: usize) -> N::B {
        // SAFETY: as above.
        unsafe { N::bits(N::load((*w).qs.as_ptr().add(i / 4 * 32)), 2 * (i % 4), 3) }
    }

    unsafe fn eight<I: Isa>(_: *const Self) -> (Eight<I>, Eight<I>) {
        halves_differ()
    }

    #[inline(always)]
    unsafe fn scales<I: Isa>(w: *const Self) -> (I::F, I::F) {
        // SAFETY: as above.
        unsafe {
            let (s, d, dmin) = (&(*w).scales, I::N::f16_to_f32((*w).d), I::N::f16_to_f32((*w).dmin));
            let both = |i: usize| words(word(s, i), word(s, i + 1));
            let low = 0x0F0F_0F0F_0F0F_0F0F;
            let scale = I::join(bytes_times::<I>(both(0) & low, d), bytes_times::<I>(both(2) & low, d));
            let min = I::join(bytes_times::<I>(both(0) >> 4 & low, dmin), bytes_times::<I>(both(2) >> 4 & low, dmin));
            (scale, min)
        }
    }
}
