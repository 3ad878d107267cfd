//! Softmax attention of one query: the one-pass form of `scalar::attention`, with four positions' scores at a time.

use super::isa::Isa;
use crate::{KvRows, math::exp};

const BLOCK: usize = 64;
/// Longest head, so that a query and its output fit the stack, filled up to whole vectors.
const DIM_MAX: usize = 256;

/// As `scalar::attention`.
///
/// # Panics
/// If the slices are too short, the head is longer than 256, or `positions` is 0.
///
/// # Safety
/// I's instructions are enabled.
#[inline(always)]
pub(crate) unsafe fn attention<I: Isa>(
    q: &[f32],
    k: KvRows<'_>,
    v: KvRows<'_>,
    positions: usize,
    scale: f32,
    out: &mut [f32],
) {
    assert!(positions > 0 && q.len() == out.len() && q.len() <= DIM_MAX);
    // SAFETY: passed on; loads are bounded by run().
    unsafe {
        match (k, v) {
            (KvRows::F32(k), KvRows::F32(v)) => run::<I, f32>(q, k, v, positions, scale, out, |p| I::load(p)),
            (KvRows::F16(k), KvRows::F16(v)) => run::<I, u16>(q, k, v, positions, scale, out, |p| I::load_f16(p)),
            _ => panic!("keys and values of one type"),
        }
    }
}

#[inline(always)]
unsafe fn run<I: Isa, T: Copy + Default>(
    q: &[f32],
    k: &[T],
    v: &[T],
    n: usize,
    scale: f32,
    out: &mut [f32],
    load: impl Fn(*const T) -> I::F,
) {
    let dim = q.len();
    assert!(k.len() >= n * dim && v.len() >= n * dim, "{n} positions of {dim} elements");
    let whole = dim / 16;
    let vectors = dim.div_ceil(16);
    let mut query = [0f32; DIM_MAX];
    query[..dim].copy_from_slice(q);
    let mut sums = [0f32; DIM_MAX];
    let (mut max, mut total) = (f32::NEG_INFINITY, 0f32);
    let mut scores = [0f32; BLOCK];
    // 16 elements of a row; the last vector of a head that is not whole vectors is filled up with zeros.
    let vector = |rows: &[T], position: usize, i: usize| {
        let at = position * dim + i * 16;
        if i < whole {
            return load(rows[at..at + 16].as_ptr());
        }
        let mut rest = [T::default(); 16];
        rest[..dim - i * 16].copy_from_slice(&rows[at..at + dim - i * 16]);
        load(rest.as_ptr())
    };
    for start in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - start);
        let scores = &mut scores[..len];
        let mut top = max;
        // SAFETY: query and sums hold DIM_MAX >= 16 * vectors elements; vector() checks its own bounds.
        unsafe {
            let mut i = 0;
            while i < len {
                let count = (len - i).min(4);
                let mut acc = [I::zero(); 4];
                for j in 0..vectors {
                    let q = I::load(query.as_ptr().add(j * 16));
                    for (p, acc) in acc.iter_mut().enumerate().take(count) {
                        *acc = I::fma(vector(k, start + i + p, j), q, *acc);
                    }
                }
                for p in 0..count {
                    let s = I::fold(acc[p]) * scale;
                    scores[i + p] = s;
                    top = if s > top { s } else { top };
                }
                i += count;
            }
        }
        if top > max {
            let shrink = exp(max - top);
            total *= shrink;
            sums[..dim].iter_mut().for_each(|o| *o *= shrink);
            max = top;
        }
        for s in scores.iter_mut() {
            *s = exp(*s - max);
        }
        scores.iter().for_each(|p| total += p);
        // SAFETY: as above.
        unsafe {
            for j in 0..vectors {
                let mut acc = I::load(sums.as_ptr().add(j * 16));
                for (p, &weight) in scores.iter().enumerate() {
                    acc = I::fma(I::splat(weight), vector(v, start + p, j), acc);
                }
                I::store(sums.as_mut_ptr().add(j * 16), acc);
            }
        }
    }
    let inv = 1.0 / total;
    for (o, s) in out.iter_mut().zip(&sums) {
        *o = s * inv;
    }
}
