//! Matrix times columns of activations.

use super::{dot, fold};
use crate::{ActQ8, Columns, quant::round};
use forerun_format::BlockType;
use forerun_format::block::{BlockQ4_0, BlockQ8_0, QK};
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
    let columns = x.count();
    assert_eq!(x.n % block.block_elems(), 0, "columns of {} elements for {}", x.n, block.name());
    let row_bytes = x.n / block.block_elems() * block.block_bytes();
    assert_eq!(w.len() % row_bytes, 0, "whole rows of {row_bytes} bytes");
    assert_eq!(out.len(), w.len() / row_bytes * columns, "(rows, columns) results");
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
        BlockType::Q8_0 | BlockType::Q4_0 => {
            let blocks = x.n / QK;
            assert_eq!(x.q8.len(), columns * blocks, "int8 activations for {}", block.name());
            let q8 = |c: usize| &x.q8[c * blocks..][..blocks];
            if block == BlockType::Q8_0 {
                each(w, row_bytes, columns, out, |row, c| dot_q8_0(bytemuck::cast_slice(row), q8(c)));
            } else {
                each(w, row_bytes, columns, out, |row, c| dot_q4_0(bytemuck::cast_slice(row), q8(c)));
            }
        }
        BlockType::I8 => panic!("packed experts are multiplied matrix by matrix"),
    }
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

/// f32 accumulation in 16 lanes, block `i` into lane `i mod 16`.
#[inline(always)]
fn dot_blocks<B>(w: &[B], x: &[ActQ8], f: impl Fn(&B, &ActQ8) -> f32) -> f32 {
    let mut acc = [0f32; super::LANES];
    for (i, (w, x)) in w.iter().zip(x).enumerate() {
        acc[i % super::LANES] += f(w, x);
    }
    fold(acc)
}

fn dot_q8_0(w: &[BlockQ8_0], x: &[ActQ8]) -> f32 {
    dot_blocks(w, x, |w, x| {
        let sum: i32 = w.qs.iter().zip(&x.qs).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
        f16::from_bits(w.d).to_f32() * x.d * sum as f32
    })
}

fn dot_q4_0(w: &[BlockQ4_0], x: &[ActQ8]) -> f32 {
    dot_blocks(w, x, |w, x| {
        let (lo, hi) = x.qs.split_at(QK / 2);
        let mut sum = 0i32;
        for j in 0..QK / 2 {
            sum += (i32::from(w.qs[j] & 15) - 8) * i32::from(lo[j]) + (i32::from(w.qs[j] >> 4) - 8) * i32::from(hi[j]);
        }
        f16::from_bits(w.d).to_f32() * x.d * sum as f32
    })
}

/// Quantizes activations to int8 blocks of 32: scale `max |x| / 127`, rounded half away from zero.
///
/// # Panics
/// If `x` is not `32 * out.len()` long.
pub fn quantize_act(x: &[f32], out: &mut [ActQ8]) {
    let (blocks, rest) = x.as_chunks::<QK>();
    assert!(rest.is_empty() && blocks.len() == out.len(), "{} activations for {} blocks", x.len(), out.len());
    for (x, o) in blocks.iter().zip(out) {
        let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        let inv = if max == 0.0 { 0.0 } else { 127.0 / max };
        *o = ActQ8 { d: max / 127.0, qs: x.map(|v| round(v * inv) as i8) };
    }
}
