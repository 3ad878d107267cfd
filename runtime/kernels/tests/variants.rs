//! Every variant this CPU runs against the scalar oracle, on the same cases: each function, each block type, random,
//! denormal and extreme numbers, odd lengths. What is missing fails: see [`expected`].

mod common;

use common::{Fill, Matrix, Rng, TYPES, quantize};
use forerun_format::BlockType;
use forerun_kernels::{KernelSet, KvRows, wants_q8};
use half::f16;
use std::collections::BTreeSet;

/// f32 sums of a few hundred terms in another order: share of the sum of magnitudes. The integer parts are exact.
const SUM_TOLERANCE: f32 = 2e-6;

/// Of attention with values of at most 1: scores reach about 20 and err by 2^-24 of that; weights sum to one.
const ATTENTION_TOLERANCE: f32 = 1e-5;

/// The smallest f32. Results and products that are denormal are rounded to multiples of it.
const STEP: f32 = f32::from_bits(1);

macro_rules! functions {
    ($($name:ident),*) => {
        /// Every function of a [`KernelSet`]. A new one does not compile before it is named here, and then wants its cases.
        const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
        const _: fn(&KernelSet) = |KernelSet { name: _, $($name: _),* }| ();
    };
}
functions!(
    matmul,
    quantize_act,
    attention,
    attention_rows,
    delta_step,
    conv_step,
    rms_norm,
    layer_norm,
    l2_norm,
    silu_mul,
    gelu_tanh,
    gelu_erf,
    axpy,
    crc32c
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Numbers {
    Random,
    Denormal,
    Extreme,
}
use Numbers::{Denormal, Extreme, Random};

/// What a comparison is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    variant: &'static str,
    function: &'static str,
    /// Type of the weights, or of keys and values; empty where all is f32.
    of: &'static str,
    numbers: Numbers,
    /// A length is not whole vectors or blocks.
    odd: bool,
}

/// All that must be compared: each variant, function, type, kind of numbers, with whole and odd lengths.
fn expected() -> BTreeSet<Cell> {
    let mut cells = BTreeSet::new();
    for set in KernelSet::available() {
        for &function in FUNCTIONS {
            let types = match function {
                "matmul" => TYPES.iter().map(|block| block.name()).collect(),
                "attention" => [KvRows::F32(&[]), KvRows::F16(&[])].map(kv_name).to_vec(),
                _ => vec![""],
            };
            let numbers = if function == "crc32c" { &[Random][..] } else { &[Random, Denormal, Extreme] };
            for of in types {
                for &numbers in numbers {
                    cells.extend([false, true].map(|odd| Cell { variant: set.name, function, of, numbers, odd }));
                }
            }
        }
    }
    cells
}

fn kv_name(rows: KvRows<'_>) -> &'static str {
    match rows {
        KvRows::F32(_) => "f32",
        KvRows::F16(_) => "f16",
    }
}

/// A variant beside the oracle, and what was compared.
struct Runner {
    set: &'static KernelSet,
    oracle: &'static KernelSet,
    seen: BTreeSet<Cell>,
}

impl Runner {
    fn cell(&self, function: &'static str, of: &'static str, numbers: Numbers, odd: bool) -> Cell {
        Cell { variant: self.set.name, function, of, numbers, odd }
    }

    /// Requires results that `run` gives for both to differ by no more than `bound` of the element.
    fn near(&mut self, cell: Cell, size: &str, bound: impl Fn(usize) -> f32, run: impl Fn(&KernelSet) -> Vec<f32>) {
        let (got, want) = (run(self.set), run(self.oracle));
        assert_eq!(got.len(), want.len());
        for (i, (a, b)) in got.iter().zip(&want).enumerate() {
            let bound = bound(i);
            assert!((a - b).abs() <= bound, "{cell:?} {size}: element {i} is {a:e}, scalar {b:e}, allowed {bound:e}");
        }
        self.seen.insert(cell);
    }

    /// Requires the same bits of both; all that is not a number is one.
    fn same(&mut self, cell: Cell, size: &str, run: impl Fn(&KernelSet) -> Vec<f32>) {
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        self.same_bits(cell, size, |set| run(set).into_iter().map(bits).collect());
    }

    fn same_bits(&mut self, cell: Cell, size: &str, run: impl Fn(&KernelSet) -> Vec<u32>) {
        let (got, want) = (run(self.set), run(self.oracle));
        assert_eq!(got.len(), want.len());
        for (i, (a, b)) in got.iter().zip(&want).enumerate() {
            let [x, y] = [a, b].map(|x| f32::from_bits(*x));
            assert!(a == b, "{cell:?} {size}: element {i} is {x:e} ({a:08x}), scalar {y:e} ({b:08x})");
        }
        self.seen.insert(cell);
    }
}

/// Weights that make elements, or the scales of blocks, denormal, and weights near the largest that the type can hold.
fn edges(block: BlockType) -> (f32, f32) {
    match block {
        BlockType::F32 | BlockType::BF16 => (1e-39, 1e30),
        BlockType::F16 => (1e-5, 6e4),
        // Their scales are f16, denormal below 6e-5 and at most 65504; large blocks divide the weights by more.
        BlockType::Q8_0 | BlockType::Q5_0 | BlockType::Q4_0 | BlockType::Iq4Nl => (1e-4, 4e5),
        BlockType::Q6K | BlockType::Q5K | BlockType::Q4K | BlockType::Q3K | BlockType::Q2K | BlockType::Iq4Xs => {
            (1e-3, 4e5)
        }
        BlockType::Mxfp4 => (1e-38, 1e30),
        BlockType::I8 => unreachable!("no type of a matrix"),
    }
}

fn matmul(r: &mut Runner, block: BlockType) {
    use Fill::{Bits, Flat, Uniform};
    let (denormal, large) = edges(block);
    let cases = [
        (Random, Uniform(1.0), Uniform(3.0)),
        (Random, Bits(1e3), Uniform(3.0)),
        (Denormal, Uniform(denormal), Uniform(3.0)),
        // Int8 activations have denormal scales, but quants that are not zero.
        (Denormal, Uniform(1.0), Uniform(1e-36)),
        (Denormal, Uniform(1.0), Uniform(1e-40)),
        (Extreme, Uniform(1e-6), Uniform(3.0)),
        (Extreme, Uniform(1e4), Uniform(3.0)),
        (Extreme, Uniform(large), Uniform(1e4)),
        (Extreme, Flat(1.0), Flat(3.0)),
        (Extreme, Uniform(0.0), Uniform(3.0)),
    ];
    // A vector of f32, the activations' block, or two large blocks.
    let whole = [16, 256, 512][usize::from(wants_q8(block)) + usize::from(block.block_elems() > 32)];
    for (numbers, weights, activations) in cases {
        for (rows, n, columns) in [
            (1, 1, 1),
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
            // Long rows only with random numbers: the rounding errors of equal terms add up with their count.
            if n % block.block_elems() != 0 || n > 1024 && numbers != Random {
                continue;
            }
            let mut rng = Rng::new(n * 31 + rows);
            let m = Matrix::new(block, rows, n, weights, &mut rng);
            let x = rng.rows(columns, n, activations);
            let wide: Vec<Vec<f32>> = (0..rows).map(|r| m.wide(r)).collect();
            let largest = |x: &[f32]| x.iter().fold(0f32, |m, x| m.max(x.abs()));
            let bound = |i: usize| {
                let (w, x) = (&wide[i / columns], &x[i % columns * n..][..n]);
                let terms: f32 = w.iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
                // Minima and offsets are summed apart from the rest, so sizes add up without cancelling.
                let apart = 4.0 / 3.0 * largest(w) * largest(x);
                // A product of scales is rounded to a denormal, then multiplied with quants; a product of floats is not.
                let quants = if wants_q8(block) { 127.0 * 127.0 } else { 2.0 };
                SUM_TOLERANCE * (terms + apart) + STEP * quants * n as f32
            };
            let size = format!("({rows}, {n}) x {columns}, {weights:?} x {activations:?}");
            let cell = r.cell("matmul", block.name(), numbers, n % whole != 0);
            r.near(cell, &size, bound, |set| m.product(set, (0, rows), &x));
        }
    }
}

fn attention(r: &mut Runner, half: bool) {
    let (denormal, large) = if half { (1e-6, 6e4) } else { (1e-40, 1e30) };
    for (numbers, k_scale, v_scale) in [(Random, 2.0, 1.0), (Denormal, denormal, denormal), (Extreme, 1000.0, large)] {
        for (dim, n) in [(24, 1), (64, 63), (72, 200), (128, 65), (256, 1000), (32, 4), (7, 5), (33, 130)] {
            let mut rng = Rng::new(dim + n);
            let (mut q, mut k, v) = (rng.vec(dim, 1.0), rng.vec(n * dim, k_scale), rng.vec(n * dim, v_scale));
            if numbers == Extreme {
                // Of integers, sums in any order are exact; else large scores would err by more than their distances.
                q.iter_mut().chain(&mut k).for_each(|x| *x = x.round());
            }
            let bits = |x: &[f32]| x.iter().map(|&x| f16::from_f32(x).to_bits()).collect::<Vec<_>>();
            let (k16, v16) = (bits(&k), bits(&v));
            let [k, v] = if half { [&k16, &v16].map(|x| KvRows::F16(x)) } else { [&k, &v].map(|x| KvRows::F32(x)) };
            let cell = r.cell("attention", kv_name(k), numbers, dim % 16 != 0);
            let bound = ATTENTION_TOLERANCE * v_scale + 4.0 * STEP;
            r.near(
                cell,
                &format!("({n}, {dim})"),
                |_| bound,
                |set| {
                    let mut out = vec![0f32; dim];
                    (set.attention)(&q, k, v, n, 0.5, &mut out);
                    out
                },
            );
        }
    }
}

fn attention_rows(r: &mut Runner) {
    for (numbers, k_scale, v_scale) in [(Random, 2.0, 1.0), (Denormal, 1e-40, 1e-40), (Extreme, 1000.0, 1e30)] {
        for (dim, stride, rows, positions) in [(24, 24, 1, 1), (72, 144, 37, 65), (64, 64, 32, 200), (20, 23, 5, 7)] {
            let mut rng = Rng::new(dim + positions);
            let mut q = rng.vec((rows - 1) * stride + dim, 1.0);
            let (mut k, v) = (rng.vec(positions * dim, k_scale), rng.vec(positions * dim, v_scale));
            if numbers == Extreme {
                q.iter_mut().chain(&mut k).for_each(|x| *x = x.round());
            }
            let bound = ATTENTION_TOLERANCE * v_scale + 4.0 * STEP;
            let cell = r.cell("attention_rows", "", numbers, dim % 16 != 0);
            r.near(
                cell,
                &format!("({rows}, {positions}, {dim})"),
                |_| bound,
                |set| {
                    // What lies between the rows is not touched.
                    let mut out = vec![7f32; q.len()];
                    (set.attention_rows)(&q, &k, &v, dim, stride, 0.5, &mut out);
                    out
                },
            );
        }
    }
}

/// Scales of a function's first argument and of the others.
const SCALES: [(Numbers, f32, f32); 8] = [
    (Random, 1.0, 1.0),
    (Denormal, 1e-40, 1.0),
    (Denormal, 1e-40, 1e-40),
    // Int8 blocks have denormal scales, but quants that are not zero.
    (Denormal, 1e-36, 1.0),
    (Extreme, 1e-20, 1.0),
    (Extreme, 1e20, 1.0),
    (Extreme, 1e20, 1e20),
    (Extreme, 0.0, 1.0),
];

/// What runs the scalar function with wider instructions: the same bits.
fn vectors(r: &mut Runner) {
    for (numbers, x_scale, w_scale) in SCALES {
        for n in [1usize, 3, 16, 32, 96, 130, 256, 2048] {
            let mut rng = Rng::new(n + 5);
            let (x, w, b) = (rng.vec(n, x_scale), rng.vec(n, w_scale), rng.vec(n, w_scale));
            let (state, taps) = (rng.vec(3 * n, x_scale), rng.vec(4 * n, w_scale));
            let size = format!("{n} of {x_scale:e} and {w_scale:e}");
            let mut same = |function: &'static str, run: &dyn Fn(&KernelSet, &mut Vec<f32>)| {
                r.same(r.cell(function, "", numbers, n % 16 != 0), &size, |set| {
                    let mut y = x.clone();
                    run(set, &mut y);
                    y
                });
            };
            same("rms_norm", &|s, y| (s.rms_norm)(y, &x, &w, 1e-6));
            same("layer_norm", &|s, y| (s.layer_norm)(y, &x, &w, &b, 1e-6));
            same("l2_norm", &|s, y| (s.l2_norm)(y, 1e-6, 0.3));
            same("silu_mul", &|s, y| (s.silu_mul)(y, &w));
            same("gelu_tanh", &|s, y| (s.gelu_tanh)(y));
            same("gelu_erf", &|s, y| (s.gelu_erf)(y));
            same("axpy", &|s, y| (s.axpy)(0.7, &w, y));
            same("conv_step", &|s, y| {
                let mut state = state.clone();
                (s.conv_step)(&mut state, &taps, y);
                y.extend(state);
            });
            if n % 32 == 0 {
                let cell = r.cell("quantize_act", "", numbers, n % 256 != 0);
                r.same_bits(cell, &size, |set| bytemuck::cast_slice(&quantize(set, &x, n)).to_vec());
            }
        }
        for (dk, dv) in [(2, 2), (32, 32), (128, 128), (16, 256), (7, 33)] {
            let mut rng = Rng::new(dk * 7 + dv);
            let (s, v) = (rng.vec(dk * dv, x_scale), rng.vec(dv, w_scale));
            let (q, k) = (rng.vec(dk, 0.3), rng.vec(dk, 0.3));
            let cell = r.cell("delta_step", "", numbers, dv % 16 != 0);
            r.same(cell, &format!("({dk}, {dv}) of {x_scale:e} and {w_scale:e}"), |set| {
                let (mut s, mut out) = (s.clone(), vec![0f32; dv]);
                (set.delta_step)(&mut s, &q, &k, &v, 0.9, 0.4, &mut out);
                s.extend(out);
                s
            });
        }
    }
}

/// All short lengths, those about where streams begin, an expert and more, each from an even and an odd address.
fn checksums(r: &mut Runner) {
    let mut rng = Rng::new(9);
    let bytes: Vec<u8> = rng.vec(5 << 20, 256.0).iter().map(|&x| x as i32 as u8).collect();
    for n in (0..=300).chain(8192 - 30..8192 + 30).chain([49_151, 1 << 20, 1_769_472, (5 << 20) - 8]) {
        for start in 0..8 {
            let cell = r.cell("crc32c", "", Random, n % 8 != 0);
            r.same_bits(cell, &format!("{n} bytes from {start}"), |set| vec![(set.crc32c)(&bytes[start..][..n])]);
        }
    }
    // RFC 3720, appendix B.4.
    let up: Vec<u8> = (0..32).collect();
    for (bytes, sum) in [(&[0; 32][..], 0x8A91_36AA), (&[0xFF; 32], 0x62A8_AB43), (&up, 0x46DD_794E)] {
        assert_eq!((r.set.crc32c)(bytes), sum, "{}: {bytes:02x?}", r.set.name);
    }
}

#[test]
fn every_variant_agrees_with_the_oracle() {
    let named = |types: &[BlockType]| types.iter().map(|block| block.name()).collect::<BTreeSet<_>>();
    assert_eq!(named(TYPES), named(&BlockType::ALL), "types that weights may have");
    let oracle = KernelSet::select(Some("scalar")).unwrap();
    let mut seen = BTreeSet::new();
    for set in KernelSet::available() {
        let mut r = Runner { set, oracle, seen: BTreeSet::new() };
        TYPES.iter().for_each(|&block| matmul(&mut r, block));
        [false, true].into_iter().for_each(|half| attention(&mut r, half));
        attention_rows(&mut r);
        vectors(&mut r);
        checksums(&mut r);
        println!("{}: {} cells", set.name, r.seen.len());
        seen.append(&mut r.seen);
    }
    let missing: Vec<Cell> = expected().difference(&seen).copied().collect();
    assert!(missing.is_empty(), "not compared: {missing:#?}");
    assert_eq!(seen, expected(), "the table lacks what was compared");
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
