//! The oracle against formulas in f64 and against published values.

use super::*;
use crate::{ActQ8, Columns, KvRows, act_blocks, act_columns, dequantize_row, quantize_row};
use bytemuck::Zeroable;
use forerun_format::BlockType;
use std::vec;
use std::vec::Vec;

fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Sums of a few hundred products in f32, against f64: 1e-5 of the sum of magnitudes.
const DOT_REL: f64 = 1e-5;

#[test]
fn matmul_of_every_type_matches_f64_and_is_the_same_by_column() {
    for block in BlockType::ALL {
        for (rows, n, columns) in [(1, 32, 1), (5, 96, 3), (3, 544, 11), (2, 256, 1), (4, 1024, 9)] {
            if n % block.block_elems() != 0 {
                continue;
            }
            let row_bytes = block.row_bytes(n as u64).unwrap() as usize;
            let mut w = vec![0u8; rows * row_bytes];
            let mut wide = vec![0f32; rows * n];
            for r in 0..rows {
                quantize_row(block, &noise(r as u64 + 7, n), &mut w[r * row_bytes..][..row_bytes]);
                dequantize_row(block, &w[r * row_bytes..][..row_bytes], &mut wide[r * n..][..n]);
            }
            let x = noise(99, columns * n);
            let per = act_blocks(n);
            let mut q8 = vec![ActQ8::zeroed(); act_columns(columns) * per];
            quantize_act(&x, n, &mut q8);
            // What the kernel really multiplies with: the int8 activations, for integer types.
            let seen: Vec<f32> = if crate::wants_q8(block) {
                q8.chunks_exact(per)
                    .take(columns)
                    .flat_map(|c| (0..n).map(|j| c[j / 256].d[j % 256 / 32] * f32::from(c[j / 256].qs[j % 256])))
                    .collect()
            } else {
                x.clone()
            };
            let mut out = vec![0f32; rows * columns];
            matmul(block, &w, Columns { f32: &x, q8: &q8, n }, &mut out);
            for r in 0..rows {
                for c in 0..columns {
                    let terms = (0..n).map(|j| f64::from(wide[r * n + j]) * f64::from(seen[c * n + j]));
                    let (want, size) = terms.fold((0f64, 0f64), |(s, a), t| (s + t, a + t.abs()));
                    let got = f64::from(out[r * columns + c]);
                    assert!((got - want).abs() <= DOT_REL * size, "{} {r},{c}: {got}, expected {want}", block.name());
                    let mut single = [0f32];
                    let x = Columns { f32: &x[c * n..][..n], q8: &q8[c * per..][..per], n };
                    matmul(block, &w[r * row_bytes..][..row_bytes], x, &mut single);
                    assert_eq!(single[0].to_bits(), out[r * columns + c].to_bits(), "column {c} alone differs");
                }
            }
        }
    }
}

#[test]
fn attention_matches_a_two_pass_softmax() {
    let dim = 24;
    for n in [1, 63, 64, 65, 200] {
        let (q, k, v) = (noise(1, dim), noise(2, n * dim), noise(3, n * dim));
        let scores: Vec<f64> =
            (0..n).map(|i| (0..dim).map(|j| f64::from(q[j]) * f64::from(k[i * dim + j])).sum::<f64>() * 3.0).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| libm::exp(s - max)).sum();
        let mut out = vec![0f32; dim];
        attention(&q, KvRows::F32(&k), KvRows::F32(&v), n, 3.0, &mut out);
        for j in 0..dim {
            let want: f64 = (0..n).map(|i| libm::exp(scores[i] - max) / sum * f64::from(v[i * dim + j])).sum();
            assert!((f64::from(out[j]) - want).abs() < 2e-6, "n {n}: {} expected {want}", out[j]);
        }
        let half = |x: &[f32]| x.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect::<Vec<_>>();
        let mut out16 = vec![0f32; dim];
        attention(&q, KvRows::F16(&half(&k)), KvRows::F16(&half(&v)), n, 3.0, &mut out16);
        // Halves carry 11 bits; scores of magnitude up to 30 shift weights by up to 30 * 2^-11.
        assert!(out.iter().zip(&out16).all(|(a, b)| (a - b).abs() < 2e-2));
    }
}

/// The worked example of the model's specification: one head, two dimensions, q scaled by 1/√2, no L2 norm.
#[test]
fn delta_rule_matches_the_worked_example() {
    let q = [[1f32, 2.], [0.5, -1.], [2., 1.]];
    let k = [[3f32, 4.], [1., -1.], [0., 2.]];
    let v = [[1f32, 0.], [0.5, 2.], [-1., 1.]];
    let (g, beta) = ([-0.1f32, -0.5, -0.2], [0.9f32, 0.5, 0.25]);
    let want = [[0.626_130_9f32, 0.], [0.020_976_6, 0.670_82], [0.241_381_9, 0.307_899]];
    let mut s = [0f32; 4];
    for t in 0..3 {
        let mut o = [0f32; 2];
        // The example's q and k are normalised as the model does, then q is scaled.
        let (mut q, mut k) = (q[t], k[t]);
        l2_norm(&mut q, 1e-6, 1.0 / libm::sqrtf(2.0));
        l2_norm(&mut k, 1e-6, 1.0);
        delta_step(&mut s, &q, &k, &v[t], libm::expf(g[t]), beta[t], &mut o);
        for j in 0..2 {
            assert!((o[j] - want[t][j]).abs() < 1e-5, "step {t}: {o:?}, expected {:?}", want[t]);
        }
    }
    let end = [0.435_234_9f32, 0.578_929_9, -0.107_153, -0.184_197_5];
    assert!(s.iter().zip(end).all(|(a, b)| (a - b).abs() < 1e-5), "{s:?}");
}

#[test]
fn convolution_sees_the_inputs_before() {
    let (channels, width, steps) = (3, 4, 6);
    let (w, x) = (noise(4, channels * width), noise(5, channels * steps));
    let mut state = vec![0f32; (width - 1) * channels];
    for t in 0..steps {
        let mut y = x[t * channels..][..channels].to_vec();
        conv_step(&mut state, &w, &mut y);
        for c in 0..channels {
            let sum: f64 = (0..width)
                .filter(|j| t + j >= width - 1)
                .map(|j| f64::from(w[c * width + j]) * f64::from(x[(t + j + 1 - width) * channels + c]))
                .sum();
            let want = sum / (1.0 + libm::exp(-sum));
            assert!((f64::from(y[c]) - want).abs() < 1e-6, "step {t} channel {c}");
        }
    }
}

#[test]
fn norms_match_f64() {
    let (x, w, b) = (noise(6, 100), noise(7, 100), noise(8, 100));
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / 100.0;
    let square = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 100.0;
    let mut rms = vec![0f32; 100];
    rms_norm(&mut rms, &x, &w, 1e-6);
    let mut layer = vec![0f32; 100];
    layer_norm(&mut layer, &x, &w, &b, 1e-6);
    for i in 0..100 {
        let want = f64::from(x[i]) * f64::from(w[i]) / (square + 1e-6).sqrt();
        assert!((f64::from(rms[i]) - want).abs() < 1e-6);
        let want = (f64::from(x[i]) - mean) / (square - mean * mean + 1e-6).sqrt() * f64::from(w[i]) + f64::from(b[i]);
        assert!((f64::from(layer[i]) - want).abs() < 2e-6);
    }
}

#[test]
fn activations_are_rounded_half_away_from_zero() {
    // The largest is 127, so the scale is 1 and the quants are the rounded values themselves.
    for (x, want) in [(0.5, 1), (-0.5, -1), (0.4999, 0), (1.5, 2), (2.5, 3), (-2.5, -3), (126.49999, 126), (-0.0, 0)] {
        let mut column = [0f32; 32];
        (column[0], column[7]) = (127.0, x);
        let mut out = [ActQ8::zeroed()];
        quantize_act(&column, 32, &mut out);
        assert_eq!((out[0].d[0], out[0].qs[0], out[0].qs[7]), (1.0, 127, want), "{x}");
    }
    for odd in [f32::NAN, f32::INFINITY] {
        let mut out = [ActQ8::zeroed()];
        quantize_act(&[odd; 32], 32, &mut out);
        assert_eq!(out[0].qs[..32], [0; 32], "{odd}");
    }
}
