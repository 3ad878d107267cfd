//! FEAT_I8MM: two rows times two columns, eight products for each of the four results in one instruction (Cortex-A510,
//! A710, Neoverse N2 and later).
//!
//! A matrix and a single vector take the same path, the last row or column paired with itself, so that a result does not
//! depend on its neighbours.

use super::narrow::Neon;
use super::neon::{Lanes, Matrix};
use crate::lanes::{Decode, Isa};
use crate::{ActQ8, Columns, act_blocks};
use core::arch::{aarch64::*, asm};

/// `smmla`. Inline assembly, since stable Rust has no intrinsic for it.
pub(super) struct Smmla;

/// `acc + [w₀·x₀, w₀·x₁, w₁·x₀, w₁·x₁]`, the halves of `w` and `x` being w₀, w₁ and x₀, x₁.
#[inline(always)]
unsafe fn smmla(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller enabled i8mm; the instruction reads and writes these registers only.
    unsafe {
        asm!("smmla {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// 32 bytes of two rows (or columns), eight of one beside eight of the other.
#[inline(always)]
unsafe fn interleave(a: [int8x16_t; 2], b: [int8x16_t; 2]) -> [int8x16_t; 4] {
    // SAFETY: the caller enabled NEON.
    unsafe {
        let [a0, a1] = a.map(|a| vreinterpretq_s64_s8(a));
        let [b0, b1] = b.map(|b| vreinterpretq_s64_s8(b));
        [vzip1q_s64(a0, b0), vzip2q_s64(a0, b0), vzip1q_s64(a1, b1), vzip2q_s64(a1, b1)]
            .map(|v| vreinterpretq_s8_s64(v))
    }
}

/// `[a, a, b, b]`
#[inline(always)]
unsafe fn rows(a: f32, b: f32) -> float32x4_t {
    // SAFETY: the caller enabled NEON.
    unsafe { vcombine_f32(vdup_n_f32(a), vdup_n_f32(b)) }
}

/// `[a, b, a, b]`
#[inline(always)]
unsafe fn columns(a: f32, b: f32) -> float32x4_t {
    // SAFETY: the caller enabled NEON; the array holds two.
    unsafe {
        let both = vld1_f32([a, b].as_ptr());
        vcombine_f32(both, both)
    }
}

// SAFETY: lengths are compared in matrix(), as its contract lets it.
unsafe impl Matrix for Smmla {
    /// `C` pairs of columns share what is decoded.
    #[inline(always)]
    unsafe fn matrix<B: Decode, const C: usize>(w: &[B], x: Columns<'_>, out: &mut [f32]) {
        let (count, per_row, per_column) = (x.count(), x.n / (B::GROUPS * 32), act_blocks(x.n));
        let rows = w.len() / per_row;
        let mut c = 0;
        while c < count {
            let wide = count - c > 2 * (C - 1);
            for r in (0..rows).step_by(2) {
                let pair = [r, (r + 1).min(rows - 1)];
                // SAFETY: pair < rows, and tile() takes columns below count, of which x has per_column blocks each.
                unsafe {
                    let w = pair.map(|r| &w[r * per_row..][..per_row]);
                    if wide {
                        tile::<B, C>(w, x.q8, per_column, count, c, pair, out);
                    } else {
                        tile::<B, 1>(w, x.q8, per_column, count, c, pair, out);
                    }
                }
            }
            c += if wide { 2 * C } else { 2 };
        }
    }
}

/// Rows `pair` times the columns from `first` on. Each result is the sum of two lanes of its own.
#[inline(always)]
unsafe fn tile<B: Decode, const C: usize>(
    w: [&[B]; 2],
    x: &[ActQ8],
    per_column: usize,
    count: usize,
    first: usize,
    pair: [usize; 2],
    out: &mut [f32],
) {
    let per = 8 / B::GROUPS;
    let column: [[usize; 2]; C] = core::array::from_fn(|p| [0, 1].map(|k| (first + 2 * p + k).min(count - 1)));
    assert!(x.len() >= count * per_column && w.iter().all(|w| w.len() <= per * per_column));
    // SAFETY: superblock s < per_column has `per` blocks in each row (the last one, if shorter, in a copy filled up with
    // zeros) and an ActQ8 in each column below count, by the assertion.
    unsafe {
        let mut acc = [[vdupq_n_f32(0.0); 2]; C];
        for s in 0..per_column {
            let at = s * per;
            let x = column.map(|pair| pair.map(|c| x.as_ptr().add(c * per_column + s)));
            if at + per <= w[0].len() {
                superblock::<B, C>(w.map(|w| w.as_ptr().add(at)), x, &mut acc);
            } else {
                let rest = w.map(|w| {
                    let mut rest = [B::zeroed(); 8];
                    rest[..w.len() - at].copy_from_slice(&w[at..]);
                    rest
                });
                superblock::<B, C>([rest[0].as_ptr(), rest[1].as_ptr()], x, &mut acc);
            }
        }
        for (column, acc) in column.iter().zip(acc) {
            let mut sums = [0f32; 4];
            vst1q_f32(sums.as_mut_ptr(), vaddq_f32(acc[0], acc[1]));
            for (k, sum) in sums.iter().enumerate() {
                out[pair[k / 2] * count + column[k % 2]] = *sum;
            }
        }
    }
}

#[inline(always)]
unsafe fn superblock<B: Decode, const C: usize>(
    w: [*const B; 2],
    x: [[*const ActQ8; 2]; C],
    acc: &mut [[float32x4_t; 2]; C],
) {
    type I = Lanes<Smmla>;
    // SAFETY: the caller vouches for two times 256 weights and for the columns' blocks.
    unsafe {
        let (mut scale, mut min) = ([[0f32; 16]; 2], [[0f32; 16]; 2]);
        for k in 0..2 {
            let (s, m) = B::scales::<I>(w[k]);
            I::store(scale[k].as_mut_ptr(), s);
            I::store(min[k].as_mut_ptr(), m);
        }
        for i in 0..8 {
            let off = vdupq_n_u8(B::OFFSET);
            let [a, b] = w.map(|w| {
                let bytes = B::decode::<Neon>(w, i);
                [vreinterpretq_s8_u8(vsubq_u8(bytes.0, off)), vreinterpretq_s8_u8(vsubq_u8(bytes.1, off))]
            });
            let weights = interleave(a, b);
            for (x, acc) in x.iter().zip(acc.iter_mut()) {
                let acc = &mut acc[i % 2];
                let x = x.map(|x| &*x);
                let [a, b] = x.map(|x| {
                    let qs = x.qs.as_ptr().add(32 * i);
                    [vld1q_s8(qs), vld1q_s8(qs.add(16))]
                });
                let quants = interleave(a, b);
                let half = |sum, k: usize| smmla(smmla(sum, weights[k], quants[k]), weights[k + 1], quants[k + 1]);
                let zero = vdupq_n_s32(0);
                let d = columns(x[0].d[i], x[1].d[i]);
                let scaled = |k: usize| vmulq_f32(rows(scale[0][k], scale[1][k]), d);
                if B::HALVES {
                    *acc = vfmaq_f32(*acc, vcvtq_f32_s32(half(zero, 0)), scaled(2 * i));
                    *acc = vfmaq_f32(*acc, vcvtq_f32_s32(half(zero, 2)), scaled(2 * i + 1));
                } else {
                    *acc = vfmaq_f32(*acc, vcvtq_f32_s32(half(half(zero, 0), 2)), scaled(2 * i));
                }
                if B::MIN {
                    for k in [2 * i, 2 * i + 1] {
                        *acc = vfmsq_f32(*acc, rows(min[0][k], min[1][k]), columns(x[0].sums[k], x[1].sums[k]));
                    }
                }
            }
        }
    }
}
