//! Every variant this CPU runs against the scalar oracle, on the same cases: each function, each block type, odd lengths,
//! extreme scales, several columns. A function that is added to [`KernelSet`] without a case here does not compile.

use bytemuck::Zeroable;
use forerun_format::BlockType;
use forerun_kernels::{ActQ8, Columns, KernelSet, KvRows, act_blocks, act_columns, dequantize_row, quantize_row};
use half::f16;

/// f32 sums of a few hundred terms in another order: share of the sum of magnitudes. The integer parts are exact.
const SUM_TOLERANCE: f32 = 2e-6;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale).collect()
    }
}

fn same_bits(name: &str, what: &str, a: &[f32], b: &[f32]) {
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{name} {what}: element {i} is {a}, scalar {b}"
        );
    }
}

fn near(name: &str, what: &str, a: &[f32], b: &[f32], bound: impl Fn(usize) -> f32) {
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= bound(i), "{name} {what}: element {i} is {a}, scalar {b}, allowed {:e}", bound(i));
    }
}

fn matmul(set: &KernelSet, oracle: &KernelSet) {
    for block in BlockType::ALL {
        for scale in [1.0, 1e-6, 1e4] {
            for (rows, n, columns) in [
                (1, 32, 1),
                (5, 96, 3),
                (3, 544, 11),
                (7, 120, 5),
                (1, 256, 1),
                (4, 1024, 9),
                (9, 768, 37),
                (2, 72, 4),
                (3, 17408, 5),
            ] {
                if n % block.block_elems() != 0 || n % 32 != 0 && block.block_elems() > 1 {
                    continue;
                }
                let mut rng = Rng(n as u64 * 31 + rows as u64);
                let row_bytes = block.row_bytes(n as u64).unwrap() as usize;
                // Aligned as the arena aligns: blocks of two bytes at least.
                let mut space = vec![0u32; (rows * row_bytes).div_ceil(4)];
                let w: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut space)[..rows * row_bytes];
                let mut wide = vec![0f32; rows * n];
                for r in 0..rows {
                    quantize_row(block, &rng.vec(n, scale), &mut w[r * row_bytes..][..row_bytes]);
                    dequantize_row(block, &w[r * row_bytes..][..row_bytes], &mut wide[r * n..][..n]);
                }
                let x = rng.vec(columns * n, 3.0);
                let run = |set: &KernelSet, x: &[f32]| {
                    let columns = x.len() / n;
                    let mut q8 = vec![ActQ8::zeroed(); act_columns(columns) * act_blocks(n)];
                    if n % 32 == 0 {
                        (set.quantize_act)(x, n, &mut q8);
                    }
                    let mut out = vec![0f32; rows * columns];
                    (set.matmul)(block, w, Columns { f32: x, q8: &q8, n }, &mut out);
                    out
                };
                let (got, want) = (run(set, &x), run(oracle, &x));
                let what = format!("matmul {} ({rows}, {n}) x {columns} at scale {scale:e}", block.name());
                near(set.name, &what, &got, &want, |i| {
                    let (r, c) = (i / columns, i % columns);
                    // Minima and offsets are summed apart from the rest, so sizes add up without cancelling.
                    let terms = wide[r * n..][..n].iter().zip(&x[c * n..]).map(|(w, x)| (w * x).abs());
                    SUM_TOLERANCE * (terms.sum::<f32>() + 4.0 * scale)
                });
                for c in 0..columns {
                    let one = run(set, &x[c * n..][..n]);
                    let column: Vec<f32> = got.iter().skip(c).step_by(columns).copied().collect();
                    same_bits(set.name, &format!("{what}: column {c} alone"), &column, &one);
                }
            }
        }
    }
}

fn attention(set: &KernelSet, oracle: &KernelSet) {
    for (dim, n) in [(24, 1), (64, 63), (72, 200), (128, 65), (256, 1000), (32, 4)] {
        let mut rng = Rng(dim as u64 + n as u64);
        let (q, k, v) = (rng.vec(dim, 1.0), rng.vec(n * dim, 2.0), rng.vec(n * dim, 1.0));
        let half = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x).to_bits()).collect::<Vec<_>>();
        let (k16, v16) = (half(&k), half(&v));
        let (mut got, mut want) = (vec![0f32; dim], vec![0f32; dim]);
        for (k, v) in [(KvRows::F32(&k), KvRows::F32(&v)), (KvRows::F16(&k16), KvRows::F16(&v16))] {
            (set.attention)(&q, k, v, n, 0.5, &mut got);
            (oracle.attention)(&q, k, v, n, 0.5, &mut want);
            // Scores reach about 20 and err by 2^-24 of that; weights sum to one.
            near(set.name, &format!("attention ({n}, {dim})"), &got, &want, |_| 1e-5);
        }
    }
}

fn attention_rows(set: &KernelSet, oracle: &KernelSet) {
    for (dim, stride, rows, positions) in [(24, 24, 1, 1), (72, 144, 37, 65), (64, 64, 32, 200), (20, 23, 5, 7)] {
        let mut rng = Rng(dim as u64 + positions as u64);
        let len = (rows - 1) * stride + dim;
        let (q, k, v) = (rng.vec(len, 1.0), rng.vec(positions * dim, 2.0), rng.vec(positions * dim, 1.0));
        let run = |set: &KernelSet, q: &[f32]| {
            let mut out = vec![7f32; q.len()];
            (set.attention_rows)(q, &k, &v, dim, stride, 0.5, &mut out);
            out
        };
        let (got, want) = (run(set, &q), run(oracle, &q));
        let what = format!("attention_rows ({rows}, {positions}, {dim})");
        near(set.name, &what, &got, &want, |_| 1e-5);
        let last = &q[(rows - 1) * stride..];
        same_bits(set.name, &format!("{what}: the last row alone"), &got[(rows - 1) * stride..], &run(set, last));
    }
}

/// The rest runs the scalar function with wider instructions: the same bits.
fn same(set: &KernelSet, oracle: &KernelSet) {
    // Named one by one, so that a new function cannot be forgotten.
    let KernelSet {
        name,
        matmul: _,
        attention: _,
        attention_rows: _,
        quantize_act,
        delta_step,
        conv_step,
        rms_norm,
        layer_norm,
        l2_norm,
        silu_mul,
        gelu_tanh,
        gelu_erf,
        axpy,
    } = *set;
    for n in [1usize, 3, 16, 32, 96, 130, 2048] {
        for scale in [1.0, 1e-20, 1e20, 1e-40] {
            let mut rng = Rng(n as u64 + 5);
            let (x, w, b) = (rng.vec(n, scale), rng.vec(n, 1.0), rng.vec(n, 1.0));
            let what = |f: &str| format!("{f} of {n} at {scale:e}");
            let two = |f: &dyn Fn(&KernelSet, &mut Vec<f32>)| {
                let (mut a, mut b) = (x.clone(), x.clone());
                f(set, &mut a);
                f(oracle, &mut b);
                (a, b)
            };
            let check = |f: &str, (a, b): (Vec<f32>, Vec<f32>)| same_bits(name, &what(f), &a, &b);
            check("rms_norm", two(&|s, y| (s.rms_norm)(y, &x, &w, 1e-6)));
            check("layer_norm", two(&|s, y| (s.layer_norm)(y, &x, &w, &b, 1e-6)));
            check("l2_norm", two(&|s, y| (s.l2_norm)(y, 1e-6, 0.3)));
            check("silu_mul", two(&|s, y| (s.silu_mul)(y, &w)));
            check("gelu_tanh", two(&|s, y| (s.gelu_tanh)(y)));
            check("gelu_erf", two(&|s, y| (s.gelu_erf)(y)));
            check("axpy", two(&|s, y| (s.axpy)(0.7, &w, y)));
            let state = rng.vec(3 * n, 1.0);
            let taps = rng.vec(4 * n, 1.0);
            check(
                "conv_step",
                two(&|s, y| {
                    let mut state = state.clone();
                    (s.conv_step)(&mut state, &taps, y);
                    y.extend(state);
                }),
            );
            if n.is_multiple_of(32) {
                let blocks = |s: &KernelSet| {
                    let mut out = vec![ActQ8::zeroed(); act_blocks(n)];
                    (s.quantize_act)(&x, n, &mut out);
                    out
                };
                for (a, b) in blocks(set).iter().zip(&blocks(oracle)) {
                    assert_eq!(bytemuck::bytes_of(a), bytemuck::bytes_of(b), "{name} {}", what("quantize_act"));
                }
            }
        }
    }
    for (dk, dv) in [(2, 2), (32, 32), (128, 128), (16, 256), (7, 33)] {
        let mut rng = Rng(dk as u64 * 7 + dv as u64);
        let (s, q, k, v) = (rng.vec(dk * dv, 1.0), rng.vec(dk, 0.3), rng.vec(dk, 0.3), rng.vec(dv, 1.0));
        let step = |set: &KernelSet| {
            let (mut s, mut out) = (s.clone(), vec![0f32; dv]);
            (set.delta_step)(&mut s, &q, &k, &v, 0.9, 0.4, &mut out);
            s.extend(out);
            s
        };
        same_bits(name, &format!("delta_step ({dk}, {dv})"), &step(set), &step(oracle));
    }
    let _ = (quantize_act, delta_step, conv_step, rms_norm, layer_norm, l2_norm, silu_mul, gelu_tanh, gelu_erf, axpy);
}

#[test]
fn every_variant_agrees_with_the_oracle() {
    let oracle = KernelSet::select(Some("scalar")).unwrap();
    let mut variants = 0;
    for set in KernelSet::available() {
        println!("{}", set.name);
        matmul(set, oracle);
        attention(set, oracle);
        attention_rows(set, oracle);
        same(set, oracle);
        variants += 1;
    }
    assert!(variants >= 1);
}

/// Whoever knows the CPU says in `FORERUN_EXPECT_KERNELS` what it must be found to run, best first: `dotprod,neon,scalar`.
#[test]
fn the_expected_variants_are_available() {
    let found: Vec<&str> = KernelSet::available().map(|set| set.name).collect();
    if let Ok(expected) = std::env::var("FORERUN_EXPECT_KERNELS") {
        assert_eq!(found.join(","), expected, "variants of this CPU");
    }
    // What the build's own target promises is there whatever the CPU.
    if cfg!(all(target_arch = "aarch64", target_feature = "neon")) {
        assert!(found.contains(&"neon"));
    }
}

#[test]
fn a_variant_the_cpu_lacks_is_refused() {
    assert!(KernelSet::select(Some("nonsense")).is_none());
    let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    assert!(KernelSet::select(Some(foreign)).is_none());
}
