//! Matrix times columns of activations.

use super::{dot, fold};
use crate::blocks::Blocks;
use crate::quant::with_blocks;
use crate::{ActQ8, Columns, act_blocks, act_columns};
use forerun_format::BlockType;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, QK, QK_K,
};
use half::f16;

/// Columns that are multiplied with a group of rows before the next columns: they stay in the first-level cache.
const COLUMN_TILE: usize = 8;

/// `out[r, c] = Σ_j w[r, j] · x[c, j]`: `w` holds whole rows of type `block`, `out` is `(rows, columns)`.
///
/// Each element is computed by the same operations whatever the number of rows and columns.
///
/// # Panics
/// If the slices' lengths do not fit one another.
pub fn matmul(block: BlockType, w: &[u8], x: Columns<'_>, out: &mut [f32]) {
    check_matmul(block, w, x, out);
    let (columns, row_bytes) = (x.count(), row_bytes(block, x.n));
    let f32_columns = |f: &dyn Fn(&[u8], &[f32]) -> f32, out: &mut [f32]| {
        each(w, row_bytes, columns, out, |row, c| f(row, &x.f32[c * x.n..][..x.n]));
    };
    match block {
        BlockType::F32 => f32_columns(&|w, x| dot(bytemuck::cast_slice::<u8, f32>(w), x, |v| v), out),
        BlockType::BF16 => {
            f32_columns(&|w, x| dot(bytemuck::cast_slice::<u8, u16>(w), x, |v| f32::from_bits(u32::from(v) << 16)), out)
        }
        BlockType::F16 => {
            f32_columns(&|w, x| dot(bytemuck::cast_slice::<u8, u16>(w), x, |v| f16::from_bits(v).to_f32()), out)
        }
        _ => with_blocks!(block, quantized(w, row_bytes, x, out)),
    }
}

fn row_bytes(block: BlockType, n: usize) -> usize {
    n / block.block_elems() * block.block_bytes()
}

/// Checks a product's lengths: what every variant's `matmul` does first.
///
/// # Panics
/// If they do not fit one another.
pub(crate) fn check_matmul(block: BlockType, w: &[u8], x: Columns<'_>, out: &[f32]) {
    let columns = x.count();
    assert!(x.n > 0 && x.n.is_multiple_of(block.block_elems()), "columns of {} elements for {}", x.n, block.name());
    assert_eq!(x.f32.len(), columns * x.n, "whole columns of {} elements", x.n);
    let row_bytes = row_bytes(block, x.n);
    assert!(w.len().is_multiple_of(row_bytes), "whole rows of {row_bytes} bytes");
    assert_eq!(out.len(), w.len() / row_bytes * columns, "(rows, columns) results");
    assert!(
        !crate::wants_q8(block) || x.q8.len() == act_columns(columns) * act_blocks(x.n),
        "int8 activations for {}: {} blocks",
        block.name(),
        x.q8.len()
    );
}

fn quantized<B: Blocks>(w: &[u8], row_bytes: usize, x: Columns<'_>, out: &mut [f32]) {
    let blocks = act_blocks(x.n);
    each(w, row_bytes, x.count(), out, |row, c| {
        dot_blocks::<B>(bytemuck::cast_slice(row), &x.q8[c * blocks..][..blocks])
    });
}

#[inline(always)]
fn each(w: &[u8], row_bytes: usize, columns: usize, out: &mut [f32], f: impl Fn(&[u8], usize) -> f32) {
    for tile in (0..columns).step_by(COLUMN_TILE) {
        let end = (tile + COLUMN_TILE).min(columns);
        for (row, out) in w.chunks_exact(row_bytes).zip(out.chunks_exact_mut(columns)) {
            for c in tile..end {
                out[c] = f(row, c);
            }
        }
    }
}

/// f32 accumulation in 16 lanes, group `i` of the row into lane `i mod 16`.
#[inline(always)]
fn dot_blocks<B: Blocks>(w: &[B], x: &[ActQ8]) -> f32 {
    let mut acc = [0f32; super::LANES];
    for (b, w) in w.iter().enumerate() {
        for i in 0..B::GROUPS {
            let at = b * B::GROUPS + i;
            let (x, k) = (&x[at / 8], at % 8);
            let g = w.group(i);
            let mut dots = [0i32; 2];
            for (j, (&q, &x)) in g.q.iter().zip(&x.qs[k * QK..]).enumerate() {
                dots[j / 16] += i32::from(q) * i32::from(x);
            }
            let mut y = if B::HALVES {
                x.d[k] * (g.scale[0] * dots[0] as f32 + g.scale[1] * dots[1] as f32)
            } else {
                x.d[k] * (g.scale[0] * (dots[0] + dots[1]) as f32)
            };
            if B::MIN {
                y -= g.min[0] * x.sums[2 * k] + g.min[1] * x.sums[2 * k + 1];
            }
            acc[at % super::LANES] += y;
        }
    }
    fold(acc)
}

/// Quantizes columns of `n` activations each: scale `max |x| / 127` for each 32, rounded half away from zero.
///
/// Column `c` begins at block `c * act_blocks(n)`; a variant may weave the columns of a tile, and whatever lies between
/// the columns and `act_columns` of them is its own.
///
/// # Panics
/// If `n` is not a multiple of 32, or `x` and `out` do not fit.
#[inline(always)]
pub fn quantize_act(x: &[f32], n: usize, out: &mut [ActQ8]) {
    check_quantize(x, n, out);
    let blocks = act_blocks(n);
    for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(blocks)) {
        for (x, o) in x.chunks(QK_K).zip(out) {
            quantize_block(x, o);
        }
    }
}

/// Checks what every variant's `quantize_act` relies on.
///
/// # Panics
/// If it does not hold.
pub(crate) fn check_quantize(x: &[f32], n: usize, out: &[ActQ8]) {
    assert!(n > 0 && n.is_multiple_of(QK) && x.len().is_multiple_of(n), "{} activations in columns of {n}", x.len());
    assert_eq!(out.len(), act_columns(x.len() / n) * act_blocks(n), "blocks for {} activations", x.len());
}

/// Rounds half away from zero, at most 127 either way; NaN is 0. Without a cast, for the reason given in `math::exp`.
#[inline(always)]
fn round(x: f32) -> i8 {
    const ROUND: f32 = 8_388_608.0;
    let up = x.abs() + 0.5;
    let nearest = up + ROUND;
    // The integer below: the nearest one, or the one before it.
    let below = nearest.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_sub(u32::from(nearest - ROUND > up)) as i8;
    if x < 0.0 { below.wrapping_neg() } else { below }
}

/// Quantizes up to 256 activations, a multiple of 32.
#[inline(always)]
pub(crate) fn quantize_block(x: &[f32], o: &mut ActQ8) {
    *o = bytemuck::Zeroable::zeroed();
    for (k, x) in x.as_chunks::<QK>().0.iter().enumerate() {
        // In lanes, which the compiler keeps in one register; the largest is the same in any order.
        let mut lanes = [0f32; super::LANES];
        for x in x.as_chunks::<{ super::LANES }>().0 {
            for (m, x) in lanes.iter_mut().zip(x) {
                let x = x.abs();
                *m = if x > *m { x } else { *m };
            }
        }
        let max = lanes.iter().fold(0f32, |m, x| m.max(*x));
        let inv = 127.0 / max;
        let inv = if inv.is_finite() { inv } else { 0.0 };
        o.d[k] = max / 127.0;
        for (q, x) in o.qs[k * QK..].iter_mut().zip(x) {
            *q = round(x * inv);
        }
        for half in [2 * k, 2 * k + 1] {
            let sum: i32 = o.qs[half * 16..][..16].iter().map(|&q| i32::from(q)).sum();
            o.sums[half] = o.d[k] * sum as f32;
        }
    }
}
