//! Softmax attention: of one query, the one-pass form of `scalar::attention` with four positions' scores at a time; of many,
//! with queries in the lanes.

use super::isa::Isa;
use crate::{KvRows, math::exp, scalar};

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

/// Positions that [`attention_rows`] takes between two looks at the maximum.
const KEYS: usize = 64;

/// As `scalar::attention_rows`: `Q` times 16 queries in the lanes, `J` positions or elements at a time in registers.
///
/// # Panics
/// As there.
///
/// # Safety
/// I's instructions are enabled.
#[inline(always)]
pub(crate) unsafe fn attention_rows<I: Isa, const Q: usize, const J: usize>(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dim: usize,
    stride: usize,
    scale: f32,
    out: &mut [f32],
) {
    scalar::check_attention_rows(q, k, v, dim, stride, out);
    let rows = (q.len() - dim) / stride + 1;
    for first in (0..rows).step_by(16 * Q) {
        let count = (rows - first).min(16 * Q);
        // SAFETY: check_attention_rows compared the lengths.
        unsafe {
            lanes_of_queries::<I, Q, J>(
                &q[first * stride..],
                k,
                v,
                dim,
                stride,
                count,
                scale,
                &mut out[first * stride..],
            );
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // one call site
unsafe fn lanes_of_queries<I: Isa, const Q: usize, const J: usize>(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dim: usize,
    stride: usize,
    count: usize,
    scale: f32,
    out: &mut [f32],
) {
    let positions = k.len() / dim;
    // Element by element, 16 Q queries each; lanes without a query stay 0.
    let mut query = [[[0f32; 16]; Q]; DIM_MAX];
    let mut sums = [[[0f32; 16]; Q]; DIM_MAX];
    let mut scores = [[[0f32; 16]; Q]; KEYS];
    for i in 0..count {
        for (d, x) in q[i * stride..][..dim].iter().enumerate() {
            query[d][i / 16][i % 16] = *x;
        }
    }
    let (mut max, mut total) = ([[f32::NEG_INFINITY; 16]; Q], [[0f32; 16]; Q]);
    for start in (0..positions).step_by(KEYS) {
        let len = KEYS.min(positions - start);
        let (k, v) = (&k[start * dim..][..len * dim], &v[start * dim..][..len * dim]);
        // SAFETY: positions are below len and elements below dim, as k and v are long.
        unsafe {
            let mut first = 0;
            while first + J <= len {
                products::<I, Q, J>(&query[..dim], k, first, scale, &mut scores);
                first += J;
            }
            for first in first..len {
                products::<I, Q, 1>(&query[..dim], k, first, scale, &mut scores);
            }
        }
        for i in 0..Q {
            let mut top = max[i];
            for s in &scores[..len] {
                for (t, s) in top.iter_mut().zip(&s[i]) {
                    *t = if *s > *t { *s } else { *t };
                }
            }
            let mut shrink = [0f32; 16];
            for l in 0..16 {
                shrink[l] = exp(max[i][l] - top[l]);
                total[i][l] *= shrink[l];
            }
            max[i] = top;
            for s in sums[..dim].iter_mut() {
                for (s, x) in s[i].iter_mut().zip(&shrink) {
                    *s *= x;
                }
            }
            for s in &mut scores[..len] {
                for l in 0..16 {
                    s[i][l] = exp(s[i][l] - top[l]);
                    total[i][l] += s[i][l];
                }
            }
        }
        // SAFETY: as above.
        unsafe {
            let mut first = 0;
            while first + J <= dim {
                weigh::<I, Q, J>(&scores[..len], v, dim, first, &mut sums);
                first += J;
            }
            for first in first..dim {
                weigh::<I, Q, 1>(&scores[..len], v, dim, first, &mut sums);
            }
        }
    }
    for i in 0..count {
        let inv = 1.0 / total[i / 16][i % 16];
        for (d, o) in out[i * stride..][..dim].iter_mut().enumerate() {
            *o = sums[d][i / 16][i % 16] * inv;
        }
    }
}

/// Scores of `J` positions from `first` on: `scale` times the products of all queries with their keys.
///
/// # Safety
/// I's instructions are enabled; `k` has the positions.
#[inline(always)]
unsafe fn products<I: Isa, const Q: usize, const J: usize>(
    query: &[[[f32; 16]; Q]],
    k: &[f32],
    first: usize,
    scale: f32,
    scores: &mut [[[f32; 16]; Q]; KEYS],
) {
    let dim = query.len();
    // SAFETY: passed on.
    unsafe {
        let mut keys = [k.as_ptr(); J];
        for (j, key) in keys.iter_mut().enumerate() {
            *key = key.add((first + j) * dim);
        }
        let mut acc = [[I::zero(); Q]; J];
        for (d, query) in query.iter().enumerate() {
            for j in 0..J {
                let key = I::splat(*keys[j].add(d));
                for i in 0..Q {
                    acc[j][i] = I::fma(I::load(query[i].as_ptr()), key, acc[j][i]);
                }
            }
        }
        for j in 0..J {
            for i in 0..Q {
                I::store(scores[first + j][i].as_mut_ptr(), I::mul(acc[j][i], I::splat(scale)));
            }
        }
    }
}

/// Adds the values' elements from `first` on, `J` of them, times their weights.
///
/// # Safety
/// I's instructions are enabled; `v` has as many positions as there are weights, of `dim` elements.
#[inline(always)]
unsafe fn weigh<I: Isa, const Q: usize, const J: usize>(
    weights: &[[[f32; 16]; Q]],
    v: &[f32],
    dim: usize,
    first: usize,
    sums: &mut [[[f32; 16]; Q]; DIM_MAX],
) {
    // SAFETY: passed on.
    unsafe {
        let mut acc = [[I::zero(); Q]; J];
        for j in 0..J {
            for i in 0..Q {
                acc[j][i] = I::load(sums[first + j][i].as_ptr());
            }
        }
        let mut values = v.as_ptr().add(first);
        for weights in weights {
            for j in 0..J {
                let value = I::splat(*values.add(j));
                for i in 0..Q {
                    acc[j][i] = I::fma(I::load(weights[i].as_ptr()), value, acc[j][i]);
                }
            }
            values = values.wrapping_add(dim);
        }
        for j in 0..J {
            for i in 0..Q {
                I::store(sums[first + j][i].as_mut_ptr(), acc[j][i]);
            }
        }
    }
}
