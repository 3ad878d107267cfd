//! What tests of every variant share: all types of weights, random numbers and matrices of them, products.
//!
//! Activations are quantized and multiplied here and nowhere else in these tests.

use bytemuck::Zeroable;
use forerun_format::BlockType;
use forerun_kernels::{ActQ8, Columns, KernelSet, act_blocks, act_columns, dequantize_row, quantize_row, wants_q8};

macro_rules! types {
    ($($name:ident),*) => {
        /// Every type that weights may have. A new one does not compile before it is named here.
        pub const TYPES: &[BlockType] = &[$(BlockType::$name),*];
        const _: fn(BlockType) = |block| match block {
            $(BlockType::$name)|* => (),
            BlockType::I8 => (), // a container of packed experts, no type of a matrix
        };
    };
}
types!(F32, BF16, F16, Q8_0, Q6K, Q5K, Q5_0, Q4K, Q4_0, Iq4Nl, Iq4Xs, Mxfp4, Q3K, Q2K);

/// What numbers are made of.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code)] // each test uses its own
pub enum Fill {
    /// Between minus and plus this.
    Uniform(f32),
    /// All plus this, or all minus this in every other row or column: quants and their sums are as large as they get.
    Flat(f32),
    /// Any bits that stand for weights of at most this, as a file of another program may hold. Weights only.
    Bits(f32),
}

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: usize) -> Self {
        Self(seed as u64 * 2 + 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 40
    }

    /// `n` numbers between `-scale` and `scale`.
    pub fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| (self.bits() as f32 / (1u64 << 23) as f32 - 1.0) * scale).collect()
    }

    /// `(count, n)` numbers.
    pub fn rows(&mut self, count: usize, n: usize, fill: Fill) -> Vec<f32> {
        match fill {
            Fill::Uniform(scale) => self.vec(count * n, scale),
            Fill::Flat(scale) => {
                (0..count * n).map(|i| if (i / n).is_multiple_of(2) { scale } else { -scale }).collect()
            }
            Fill::Bits(_) => panic!("bits of no type"),
        }
    }

    /// One block whose weights are finite and at most `max`.
    fn block(&mut self, block: BlockType, max: f32, out: &mut [u8]) {
        let mut wide = vec![0f32; block.block_elems()];
        loop {
            out.fill_with(|| self.bits() as u8);
            dequantize_row(block, out, &mut wide);
            if wide.iter().all(|w| w.abs() <= max) {
                return;
            }
        }
    }
}

/// Weights: whole rows of one type, aligned as the arena aligns them.
pub struct Matrix {
    pub block: BlockType,
    pub n: usize,
    row_bytes: usize,
    space: Vec<u32>,
}

impl Matrix {
    pub fn new(block: BlockType, rows: usize, n: usize, fill: Fill, rng: &mut Rng) -> Self {
        let row_bytes = block.row_bytes(n as u64).unwrap() as usize;
        let mut space = vec![0u32; (rows * row_bytes).div_ceil(4)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut space)[..rows * row_bytes];
        if let Fill::Bits(max) = fill {
            bytes.chunks_exact_mut(block.block_bytes()).for_each(|b| rng.block(block, max, b));
        } else {
            for (x, row) in rng.rows(rows, n, fill).chunks_exact(n).zip(bytes.chunks_exact_mut(row_bytes)) {
                quantize_row(block, x, row);
            }
        }
        Self { block, n, row_bytes, space }
    }

    /// Rows `first .. first + count`.
    pub fn rows(&self, first: usize, count: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.space)[first * self.row_bytes..][..count * self.row_bytes]
    }

    /// What row `r` stands for.
    #[allow(dead_code)] // each test uses its own
    pub fn wide(&self, r: usize) -> Vec<f32> {
        let mut wide = vec![0f32; self.n];
        dequantize_row(self.block, self.rows(r, 1), &mut wide);
        wide
    }

    /// Product of rows `first .. first + count` with columns `x` of `n` elements: `(count, columns)`.
    pub fn product(&self, set: &KernelSet, (first, count): (usize, usize), x: &[f32]) -> Vec<f32> {
        let q8 = if wants_q8(self.block) { quantize(set, x, self.n) } else { Vec::new() };
        let mut out = vec![0f32; count * (x.len() / self.n)];
        (set.matmul)(self.block, self.rows(first, count), Columns { f32: x, q8: &q8, n: self.n }, &mut out);
        out
    }
}

/// Columns of `n` elements as int8 blocks, laid out as the variant's product wants them.
pub fn quantize(set: &KernelSet, x: &[f32], n: usize) -> Vec<ActQ8> {
    let mut out = vec![ActQ8::zeroed(); act_columns(x.len() / n) * act_blocks(n)];
    (set.quantize_act)(x, n, &mut out);
    out
}
