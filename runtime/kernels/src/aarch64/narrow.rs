//! Decoding with NEON, for all variants: 32 bytes or eight f32 in two registers.

use crate::lanes::Narrow;
use core::arch::{aarch64::*, asm};

pub(super) struct Neon;

/// Four halves to f32. Inline assembly, since stable Rust has no halves.
#[inline(always)]
pub(super) unsafe fn f16x4(bits: uint16x4_t) -> float32x4_t {
    let x: float32x4_t;
    // SAFETY: the caller enabled NEON; the instruction reads and writes these registers only.
    unsafe {
        asm!("fcvtl {x:v}.4s, {bits:v}.4h", x = lateout(vreg) x, bits = in(vreg) bits,
            options(pure, nomem, nostack, preserves_flags));
    }
    x
}

/// `bytes >> shift`, with a constant where the caller's loop is unrolled.
#[inline(always)]
unsafe fn down(bytes: uint8x16_t, shift: usize) -> uint8x16_t {
    // SAFETY: the caller enabled NEON.
    unsafe { vshlq_u8(bytes, vdupq_n_s8(-(shift as i8))) }
}

// SAFETY: each function only uses its arguments as the trait says.
unsafe impl Narrow for Neon {
    type B = (uint8x16_t, uint8x16_t);
    type E = (float32x4_t, float32x4_t);

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self::B {
        // SAFETY: for all functions here: the caller enabled the instructions and vouches for pointers, as the trait says.
        unsafe { (vld1q_u8(p), vld1q_u8(p.add(16))) }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> Self::B {
        // SAFETY: as in load().
        unsafe {
            let both = vld1q_u8(p);
            (vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both))
        }
    }

    #[inline(always)]
    unsafe fn bits(bytes: Self::B, shift: usize, mask: u8) -> Self::B {
        // SAFETY: as in load().
        unsafe {
            let mask = vdupq_n_u8(mask);
            (vandq_u8(down(bytes.0, shift), mask), vandq_u8(down(bytes.1, shift), mask))
        }
    }

    #[inline(always)]
    unsafe fn bits_up(bytes: Self::B, shift: usize, mask: u8, up: usize) -> Self::B {
        // SAFETY: as in load().
        unsafe {
            let (low, up) = (Self::bits(bytes, shift, mask), vdupq_n_s8(up as i8));
            (vshlq_u8(low.0, up), vshlq_u8(low.1, up))
        }
    }

    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        // SAFETY: as in load().
        unsafe { (vorrq_u8(a.0, b.0), vorrq_u8(a.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn table(values: &[i8; 16], index: Self::B) -> Self::B {
        // SAFETY: as in load().
        unsafe {
            let values = vld1q_u8(values.as_ptr().cast());
            (vqtbl1q_u8(values, index.0), vqtbl1q_u8(values, index.1))
        }
    }

    #[inline(always)]
    unsafe fn flags(word: u32, value: u8) -> Self::B {
        // SAFETY: as in load().
        unsafe {
            // Byte j looks at byte j / 8 of the word, then at its bit j mod 8.
            let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
            let [a, b, c, d] = word.to_le_bytes();
            let half = |a: u8, b: u8| {
                let all = vcombine_u8(vdup_n_u8(a), vdup_n_u8(b));
                vandq_u8(vtstq_u8(all, bit), vdupq_n_u8(value))
            };
            (half(a, b), half(c, d))
        }
    }

    #[inline(always)]
    unsafe fn f16_to_f32(bits: u16) -> f32 {
        // SAFETY: as in load().
        unsafe { vgetq_lane_f32::<0>(f16x4(vdup_n_u16(bits))) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::E {
        // SAFETY: as in load().
        unsafe { (vld1q_f32(p), vld1q_f32(p.add(4))) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::E {
        // SAFETY: as in load().
        unsafe {
            let both = vld1q_u16(p);
            (f16x4(vget_low_u16(both)), f16x4(vget_high_u16(both)))
        }
    }

    #[inline(always)]
    unsafe fn unsigned(bytes: u64) -> Self::E {
        // SAFETY: as in load().
        unsafe {
            let wide = vmovl_u8(vcreate_u8(bytes));
            (vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide)))
        }
    }

    #[inline(always)]
    unsafe fn signed(bytes: u64) -> Self::E {
        // SAFETY: as in load().
        unsafe {
            let wide = vmovl_s8(vcreate_s8(bytes));
            (vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide)))
        }
    }

    #[inline(always)]
    unsafe fn mul(x: Self::E, y: f32) -> Self::E {
        // SAFETY: as in load().
        unsafe { (vmulq_n_f32(x.0, y), vmulq_n_f32(x.1, y)) }
    }

    #[inline(always)]
    unsafe fn sub(x: Self::E, y: f32) -> Self::E {
        // SAFETY: as in load().
        unsafe {
            let y = vdupq_n_f32(y);
            (vsubq_f32(x.0, y), vsubq_f32(x.1, y))
        }
    }
}
