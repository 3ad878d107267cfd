//! How weights become blocks. Q8_0 and Q4_0 are rounded as ggml does; the others search for the scale (and minimum) that
//! leave the smallest squared error, each weight counting by its own square, since large weights matter most.

use crate::blocks::{Blocks, mxfp4_scale};
use crate::quant::round;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, E2M1_DOUBLED, IQ4_VALUES, QK, QK_K,
};
use half::f16;

/// A block that can be made from weights.
pub(crate) trait Quantize: Blocks {
    /// The block for `x`, which is as long as the block.
    fn quantize(x: &[f32]) -> Self;
}

/// Scales tried on each side of the plain one.
const STEPS: i32 = 9;

fn f16_bits(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

/// `x` rounded to an f16.
fn as_f16(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// The element of largest magnitude, with its sign.
fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m })
}

fn inverse(d: f32) -> f32 {
    // A scale so small that its inverse overflows stands for zeros.
    let inv = 1.0 / d;
    if inv.is_finite() { inv } else { 0.0 }
}

/// Two nibbles a byte: the first 16 low, the others high.
fn pack_nibbles(q: &[u8; QK]) -> [u8; QK / 2] {
    core::array::from_fn(|j| q[j] | q[j + 16] << 4)
}

/// The scale for which `x ≈ scale * q(x / scale)` with the least error, where `q` maps to integers. `first` is the plain
/// guess; others around it are tried.
fn best_scale(x: &[f32], first: f32, q: impl Fn(f32) -> i32) -> f32 {
    if first == 0.0 {
        return 0.0;
    }
    let (mut best, mut gain) = (first, f32::NEG_INFINITY);
    for step in -STEPS..=STEPS {
        let inv = inverse(first * (1.0 + step as f32 * 0.02));
        let (mut xq, mut qq) = (0f32, 0f32);
        for &v in x {
            let q = q(v * inv) as f32;
            let w = v * v;
            xq += w * v * q;
            qq += w * q * q;
        }
        // With the best scale xq / qq for these q, the error falls by xq² / qq.
        if qq > 0.0 && xq * xq / qq > gain {
            (best, gain) = (xq / qq, xq * xq / qq);
        }
    }
    best
}

/// `(scale, min)` with the least error of `x ≈ scale * q - min`, `q` in `0..=top`, `scale` and `min` not negative.
fn best_scale_min(x: &[f32], top: f32) -> (f32, f32) {
    let low = x.iter().fold(0f32, |m, &v| m.min(v));
    let high = x.iter().fold(0f32, |m, &v| m.max(v));
    if high == low {
        return (0.0, 0.0);
    }
    let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    let weight = |v: f32| libm::sqrtf(mean) + v.abs();
    let error = |scale: f32, min: f32| {
        let inv = inverse(scale);
        x.iter()
            .map(|&v| {
                let q = (round((v + min) * inv) as f32).clamp(0.0, top);
                weight(v) * (scale * q - min - v) * (scale * q - min - v)
            })
            .sum::<f32>()
    };
    let (mut best, mut least) = (((high - low) / top, -low), f32::INFINITY);
    for step in -STEPS..=STEPS {
        let scale = (high - low) / (top + step as f32 * 0.1);
        let inv = inverse(scale);
        // Least squares for scale and min, these q given.
        let (mut w, mut wq, mut wqq, mut wv, mut wvq) = (0f32, 0f32, 0f32, 0f32, 0f32);
        for &v in x {
            let q = (round((v - low) * inv) as f32).clamp(0.0, top);
            let weight = weight(v);
            w += weight;
            wq += weight * q;
            wqq += weight * q * q;
            wv += weight * v;
            wvq += weight * v * q;
        }
        let det = w * wqq - wq * wq;
        if det <= 0.0 {
            continue;
        }
        let mut fit = ((w * wvq - wv * wq) / det, (wq * wvq - wqq * wv) / det);
        if fit.1 < 0.0 {
            fit = (if wqq > 0.0 { wvq / wqq } else { 0.0 }, 0.0);
        }
        if fit.0 > 0.0 {
            let e = error(fit.0, fit.1);
            if e < least {
                (best, least) = (fit, e);
            }
        }
    }
    best
}

/// Index of the value nearest to `x` in ascending `values`.
fn nearest(values: &[i8; 16], x: f32) -> u8 {
    let at = values.iter().position(|&v| f32::from(v) >= x).unwrap_or(15);
    let low = at.saturating_sub(1);
    if x - f32::from(values[low]) < f32::from(values[at]) - x { low as u8 } else { at as u8 }
}

impl Quantize for BlockQ8_0 {
    fn quantize(x: &[f32]) -> Self {
        let d = extreme(x).abs() / 127.0;
        let inv = inverse(d);
        Self { d: f16_bits(d), qs: core::array::from_fn(|j| round(x[j] * inv) as i8) }
    }
}

/// The value of largest magnitude maps to the most negative integer, whichever sign it has.
fn offset_quants(x: &[f32], half: f32) -> (u16, [u8; QK]) {
    let d = extreme(x) / -half;
    let inv = inverse(d);
    (f16_bits(d), core::array::from_fn(|j| ((x[j] * inv + half + 0.5) as u8).min(2 * half as u8 - 1)))
}

impl Quantize for BlockQ4_0 {
    fn quantize(x: &[f32]) -> Self {
        let (d, q) = offset_quants(x, 8.0);
        Self { d, qs: pack_nibbles(&q) }
    }
}

impl Quantize for BlockQ5_0 {
    fn quantize(x: &[f32]) -> Self {
        let (d, q) = offset_quants(x, 16.0);
        let high = (0..QK).fold(0u32, |h, j| h | u32::from(q[j] >> 4) << j);
        Self { d, qh: high.to_le_bytes(), qs: pack_nibbles(&q.map(|q| q & 15)) }
    }
}

impl Quantize for BlockIq4Nl {
    fn quantize(x: &[f32]) -> Self {
        let index = |v: f32| nearest(&IQ4_VALUES, v);
        let d = best_scale(x, extreme(x) / -127.0, |v| i32::from(IQ4_VALUES[usize::from(index(v))]));
        let inv = inverse(as_f16(d));
        Self { d: f16_bits(d), qs: pack_nibbles(&core::array::from_fn(|j| index(x[j] * inv))) }
    }
}

impl Quantize for BlockMxfp4 {
    fn quantize(x: &[f32]) -> Self {
        let max = extreme(x).abs();
        let code = |v: f32| {
            let magnitude = v.abs();
            let c = (0..8).min_by(|&a, &b| {
                let miss = |c: usize| (f32::from(E2M1_DOUBLED[c]) - magnitude).abs();
                miss(a).total_cmp(&miss(b))
            });
            c.unwrap_or(0) as u8 | if v < 0.0 { 8 } else { 0 }
        };
        // The largest value, 12 in doubled units, should land between 8 and 16; both neighbours are tried too.
        let exponent = if max > 0.0 { libm::ilogbf(max) - 3 + 128 } else { 0 };
        let candidates = (exponent - 1..=exponent + 1).map(|e| e.clamp(0, 254) as u8);
        let error = |e: u8| {
            let (scale, inv) = (mxfp4_scale(e), inverse(mxfp4_scale(e)));
            x.iter()
                .map(|&v| scale * f32::from(E2M1_DOUBLED[usize::from(code(v * inv))]) - v)
                .map(|e| e * e)
                .sum::<f32>()
        };
        let e = candidates.min_by(|&a, &b| error(a).total_cmp(&error(b))).unwrap_or(0);
        let inv = inverse(mxfp4_scale(e));
        Self { e, qs: pack_nibbles(&core::array::from_fn(|j| code(x[j] * inv))) }
    }
}

/// `(d, dmin, scales, q)` of eight groups with six-bit scales and minima: Q4_K and Q5_K.
fn k_quants(x: &[f32], top: f32) -> (u16, u16, [u8; 12], [u8; QK_K]) {
    let fits: [(f32, f32); 8] = core::array::from_fn(|i| best_scale_min(&x[i * 32..][..32], top));
    let d = fits.iter().fold(0f32, |m, f| m.max(f.0)) / 63.0;
    let dmin = fits.iter().fold(0f32, |m, f| m.max(f.1)) / 63.0;
    let six = |v: f32, inv: f32| (round(v * inv) as u8).min(63);
    let pairs = fits.map(|(s, m)| (six(s, inverse(d)), six(m, inverse(dmin))));
    let (d16, dmin16) = (as_f16(d), as_f16(dmin));
    let q = core::array::from_fn(|j| {
        let (sc, m) = pairs[j / 32];
        let inv = inverse(d16 * f32::from(sc));
        (round((x[j] + dmin16 * f32::from(m)) * inv) as f32).clamp(0.0, top) as u8
    });
    let mut s = [0u8; 12];
    for i in 0..4 {
        s[i] = pairs[i].0 | pairs[i + 4].0 >> 4 << 6;
        s[i + 4] = pairs[i].1 | pairs[i + 4].1 >> 4 << 6;
        s[i + 8] = pairs[i + 4].0 & 15 | pairs[i + 4].1 << 4;
    }
    (f16_bits(d), f16_bits(dmin), s, q)
}

/// Low nibbles of group `2 c`, high nibbles of group `2 c + 1`.
fn pack_k_nibbles(q: &[u8; QK_K]) -> [u8; QK_K / 2] {
    core::array::from_fn(|b| {
        let at = b / 32 * 64 + b % 32;
        q[at] & 15 | (q[at + 32] & 15) << 4
    })
}

impl Quantize for BlockQ4K {
    fn quantize(x: &[f32]) -> Self {
        let (d, dmin, scales, q) = k_quants(x, 15.0);
        Self { d, dmin, scales, qs: pack_k_nibbles(&q) }
    }
}

impl Quantize for BlockQ5K {
    fn quantize(x: &[f32]) -> Self {
        let (d, dmin, scales, q) = k_quants(x, 31.0);
        let qh = core::array::from_fn(|l| (0..8).fold(0, |h, i| h | (q[32 * i + l] >> 4) << i));
        Self { d, dmin, scales, qh, qs: pack_k_nibbles(&q) }
    }
}

/// `(d, scales, q)` of sixteen groups of 16 with signed scales of `-half..half`: Q6_K and Q3_K. `q` lies in
/// `-levels..levels`.
fn signed_quants(x: &[f32], levels: f32, half: f32) -> (u16, [i8; 16], [i8; QK_K]) {
    let q = |v: f32| (round(v) as f32).clamp(-levels, levels - 1.0);
    let fits: [f32; 16] = core::array::from_fn(|k| {
        let x = &x[k * 16..][..16];
        best_scale(x, extreme(x) / -levels, |v| q(v) as i32)
    });
    let d = extreme(&fits) / -half;
    let d16 = as_f16(d);
    let scales = fits.map(|s| (round(s * inverse(d)) as f32).clamp(-half, half - 1.0) as i8);
    let quants = core::array::from_fn(|j| q(x[j] * inverse(d16 * f32::from(scales[j / 16]))) as i8);
    (f16_bits(d), scales, quants)
}

impl Quantize for BlockQ6K {
    fn quantize(x: &[f32]) -> Self {
        let (d, scales, q) = signed_quants(x, 32.0, 128.0);
        let u = |at: usize| (q[at] + 32) as u8;
        Self {
            ql: core::array::from_fn(|b| {
                let at = b / 64 * 128 + b % 64;
                u(at) & 15 | (u(at + 64) & 15) << 4
            }),
            qh: core::array::from_fn(|b| {
                let at = b / 32 * 128 + b % 32;
                (0..4).fold(0, |h, j| h | u(at + 32 * j) >> 4 << (2 * j))
            }),
            scales,
            d,
        }
    }
}

impl Quantize for BlockQ3K {
    fn quantize(x: &[f32]) -> Self {
        let (d, fits, q) = signed_quants(x, 4.0, 32.0);
        let u = |at: usize| (q[at] + 4) as u8;
        let s = fits.map(|s| (s + 32) as u8);
        let mut scales = [0u8; 12];
        for k in 0..16 {
            scales[k % 8] |= (s[k] & 15) << (4 * (k / 8));
            scales[8 + k % 4] |= s[k] >> 4 << (2 * (k / 4));
        }
        Self {
            hmask: core::array::from_fn(|l| (0..8).fold(0, |h, i| h | u(32 * i + l) >> 2 << i)),
            qs: pack_pairs(|at| u(at) & 3),
            scales,
            d,
        }
    }
}

/// Two bits an element: byte `32 n + l` holds elements `128 n + 32 j + l` at bits `2 j`.
fn pack_pairs(q: impl Fn(usize) -> u8) -> [u8; QK_K / 4] {
    core::array::from_fn(|b| {
        let at = b / 32 * 128 + b % 32;
        (0..4).fold(0, |byte, j| byte | q(at + 32 * j) << (2 * j))
    })
}

impl Quantize for BlockQ2K {
    fn quantize(x: &[f32]) -> Self {
        let fits: [(f32, f32); 16] = core::array::from_fn(|k| best_scale_min(&x[k * 16..][..16], 3.0));
        let d = fits.iter().fold(0f32, |m, f| m.max(f.0)) / 15.0;
        let dmin = fits.iter().fold(0f32, |m, f| m.max(f.1)) / 15.0;
        let four = |v: f32, inv: f32| (round(v * inv) as u8).min(15);
        let pairs = fits.map(|(s, m)| (four(s, inverse(d)), four(m, inverse(dmin))));
        let (d16, dmin16) = (as_f16(d), as_f16(dmin));
        let q = |j: usize| {
            let (sc, m) = pairs[j / 16];
            let inv = inverse(d16 * f32::from(sc));
            (round((x[j] + dmin16 * f32::from(m)) * inv) as f32).clamp(0.0, 3.0) as u8
        };
        Self { scales: pairs.map(|(s, m)| s | m << 4), qs: pack_pairs(q), d: f16_bits(d), dmin: f16_bits(dmin) }
    }
}

impl Quantize for BlockIq4Xs {
    fn quantize(x: &[f32]) -> Self {
        let index = |v: f32| nearest(&IQ4_VALUES, v);
        let fits: [f32; 8] = core::array::from_fn(|i| {
            let x = &x[i * 32..][..32];
            best_scale(x, extreme(x) / -127.0, |v| i32::from(IQ4_VALUES[usize::from(index(v))]))
        });
        let d = extreme(&fits) / -32.0;
        let d16 = as_f16(d);
        let scales = fits.map(|s| (round(s * inverse(d)) as f32).clamp(-32.0, 31.0) as i8);
        let mut b = Self { d: f16_bits(d), scales_h: 0, scales_l: [0; 4], qs: [0; QK_K / 2] };
        for (i, &s) in scales.iter().enumerate() {
            let bits = (s + 32) as u8;
            b.scales_l[i / 2] |= (bits & 15) << (4 * (i & 1));
            b.scales_h |= u16::from(bits >> 4) << (2 * i);
            let inv = inverse(d16 * f32::from(s));
            let q = core::array::from_fn(|j| index(x[i * 32 + j] * inv));
            b.qs[16 * i..][..16].copy_from_slice(&pack_nibbles(&q));
        }
        b
    }
}
