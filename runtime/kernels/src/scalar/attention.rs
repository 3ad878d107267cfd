//! Softmax attention of one query over many positions, in one pass (Milakov and Gimelshein, arXiv:1805.02867).

use super::dot;
use crate::{KvRows, math::exp};
use half::f16;

/// Positions whose scores are computed before the running maximum moves. Blocks start at position 0, so that a query's
/// result depends only on its own length.
const BLOCK: usize = 64;

/// `out = softmax(scale · q·K) V` over the first `positions` rows of one head.
///
/// Shapes: `q` and `out` `(head_dim)`, `k` and `v` at least `(positions, head_dim)`.
///
/// # Panics
/// If the slices are too short or `positions` is 0.
pub fn attention(q: &[f32], k: KvRows<'_>, v: KvRows<'_>, positions: usize, scale: f32, out: &mut [f32]) {
    assert!(positions > 0 && q.len() == out.len());
    match (k, v) {
        (KvRows::F32(k), KvRows::F32(v)) => run(q, k, v, positions, scale, out, |x| x),
        (KvRows::F16(k), KvRows::F16(v)) => run(q, k, v, positions, scale, out, |x| f16::from_bits(x).to_f32()),
        _ => panic!("keys and values of one type"),
    }
}

#[inline(always)]
fn run<T: Copy>(q: &[f32], k: &[T], v: &[T], n: usize, scale: f32, out: &mut [f32], widen: impl Fn(T) -> f32 + Copy) {
    let dim = q.len();
    assert!(k.len() >= n * dim && v.len() >= n * dim, "{n} positions of {dim} elements");
    out.fill(0.0);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0f32);
    let mut scores = [0f32; BLOCK];
    for start in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - start);
        let scores = &mut scores[..len];
        let mut top = max;
        for (s, k) in scores.iter_mut().zip(k[start * dim..].chunks_exact(dim)) {
            *s = dot(k, q, widen) * scale;
            top = if *s > top { *s } else { top };
        }
        if top > max {
            let shrink = exp(max - top);
            sum *= shrink;
            out.iter_mut().for_each(|o| *o *= shrink);
            max = top;
        }
        for s in scores.iter_mut() {
            *s = exp(*s - max);
        }
        for (&p, v) in scores.iter().zip(v[start * dim..].chunks_exact(dim)) {
            sum += p;
            for (o, &v) in out.iter_mut().zip(v) {
                *o += p * widen(v);
            }
        }
    }
    let inv = 1.0 / sum;
    out.iter_mut().for_each(|o| *o *= inv);
}

/// [`attention`] of many queries over the same positions: a head of a vision tower.
///
/// `q` and `out` hold rows `stride` apart, of which the first `dim` elements count; the last row may end there. `k` and `v`
/// are `(positions, dim)`.
///
/// # Panics
/// If the lengths do not fit one another, `dim` is over 256, or there is no position.
pub fn attention_rows(q: &[f32], k: &[f32], v: &[f32], dim: usize, stride: usize, scale: f32, out: &mut [f32]) {
    check_attention_rows(q, k, v, dim, stride, out);
    for (q, out) in q.chunks(stride).zip(out.chunks_mut(stride)) {
        attention(&q[..dim], KvRows::F32(k), KvRows::F32(v), k.len() / dim, scale, &mut out[..dim]);
    }
}

/// Checks what every variant's `attention_rows` relies on.
///
/// # Panics
/// If it does not hold.
pub(crate) fn check_attention_rows(q: &[f32], k: &[f32], v: &[f32], dim: usize, stride: usize, out: &[f32]) {
    assert!((1..=256).contains(&dim) && stride >= dim, "heads of {dim} elements in rows of {stride}");
    assert!(!k.is_empty() && k.len().is_multiple_of(dim) && k.len() == v.len(), "whole keys and values of {dim}");
    assert!(q.len() == out.len() && q.len() >= dim && (q.len() - dim) % stride <= stride - dim, "whole rows");
}
