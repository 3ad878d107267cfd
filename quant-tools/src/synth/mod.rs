//! Models of true shape with made-up weights, for measuring. Weights are a pure function of seed, tensor name and place,
//! so a packed and a plain file hold the same ones. Sane, not distinct: every tensor is put together from 4,096 blocks
//! of 256 numbers, which makes quantizing them a copy.

mod files;

use crate::{
    checkpoint::Checkpoint,
    convert::CHUNK_ELEMS,
    error::Result,
    pack::{Packed, write},
    plan::{Layout, Op, Source, Types},
};
use forerun_format::BlockType;
use half::bf16;
use std::{collections::BTreeMap, path::Path};

pub use files::Shape;

/// Numbers in a block: whole blocks of every element type.
const BLOCK: usize = 256;
/// Blocks to choose from; a power of two.
const BLOCKS: usize = 1 << 12;

/// A model to make up.
#[derive(Debug, Clone, Copy)]
pub struct Synth {
    /// Sizes.
    pub shape: Shape,
    /// Text layers; `None`: as many as the shape has.
    pub layers: Option<u64>,
    /// Leave the vision tower out.
    pub no_vision: bool,
    /// Write the plain layout, which other programs read and forerun does not; it has no vision tower.
    pub plain: bool,
    /// Other seeds give other weights.
    pub seed: u64,
}

/// Writes a made-up model to the file `to`, which must not exist unless `force` is set. `progress` is told the bytes
/// written so far and in total.
///
/// # Errors
/// If a size is out of range, there is not enough space, or I/O fails; then `to` is as it was.
pub fn synth(model: Synth, to: &Path, types: Types, force: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Packed> {
    let layout = if model.plain { Layout::Plain } else { Layout::Packed };
    let layers = model.layers.unwrap_or(model.shape.layers());
    let files = files::files(model.shape, layers, !model.no_vision && !model.plain);
    let checkpoint = Checkpoint::Synthetic(Synthetic::new(model.seed, files));
    write(&checkpoint, layout, to, types, force, progress)
}

/// A checkpoint that exists only as a rule.
#[derive(Debug)]
pub struct Synthetic {
    seed: u64,
    files: BTreeMap<&'static str, String>,
    /// [`BLOCKS`] blocks of numbers with mean 0 and deviation 1.
    blocks: Vec<f32>,
}

/// The blocks of one [`Spread`] in one element type.
pub(crate) type Pools = BTreeMap<(u32, [u32; 2]), Vec<u8>>;

/// How the numbers of a tensor are spread.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    mean: f32,
    deviation: f32,
}

impl Spread {
    /// Keeps activations near 1 from layer to layer, and the state of the delta rule decaying by about a tenth a token.
    fn of(source: &Source) -> Self {
        let name = source.name.as_str();
        let (mean, deviation) = if name.ends_with(".A_log") {
            (-2.0, 0.5)
        } else if name.ends_with(".dt_bias") {
            (0.0, 0.5)
        } else if name.ends_with(".bias") {
            (0.0, 0.02)
        } else if source.rows == 1 && name.contains("norm") {
            // The text model stores its norms less 1, except that of the delta rule; the tower stores them as they are.
            let name = name.replacen(LANGUAGE_MODEL, "", 1);
            let text = name.starts_with("model.layers.") || name == "model.norm.weight";
            (if text && !name.contains(".linear_attn.") { 0.0 } else { 1.0 }, 0.05)
        } else {
            (0.0, 1.0 / (source.cols as f32).sqrt())
        };
        Self { mean, deviation }
    }

    /// `x`, of mean 0 and deviation 1, spread and rounded.
    fn apply(self, x: f32) -> bf16 {
        bf16::from_f32(self.mean + self.deviation * x)
    }
}

/// In names of models with a vision tower only.
const LANGUAGE_MODEL: &str = "language_model.";

/// The finalizer of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Number `i` of the SplitMix64 sequence that starts at `key`.
fn random(key: u64, i: u64) -> u64 {
    mix(key.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

impl Synthetic {
    fn new(seed: u64, files: BTreeMap<&'static str, String>) -> Self {
        let key = mix(seed ^ 0x426C_6F63_6B73);
        let normal = |i: u64| {
            // The sum of eight 16-bit numbers is nearly normal, and exact on every machine.
            let halves = |x: u64| (0..4).map(|k| (x >> (16 * k)) as u16).map(i32::from).sum::<i32>();
            let sum = halves(random(key, 2 * i)) + halves(random(key, 2 * i + 1));
            let deviation = 65536.0 * (8f32 / 12.0).sqrt();
            (sum - 4 * 65535) as f32 / deviation
        };
        Self { seed, files, blocks: (0..(BLOCKS * BLOCK) as u64).map(normal).collect() }
    }

    /// The text of the file `name`.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.files.get(name).map(String::as_str)
    }

    /// What chooses the blocks of the tensor `name`: the same with and without a vision tower.
    fn key(&self, name: &str) -> u64 {
        let name = name.replacen(LANGUAGE_MODEL, "", 1);
        mix(name.bytes().fold(self.seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3)))
    }

    /// Fills `out` with BF16 numbers of the tensor of `source` from row `row` on.
    pub(crate) fn read(&self, source: &Source, row: u64, out: &mut [u8]) {
        let (key, spread) = (self.key(&source.name), Spread::of(source));
        let first = row * source.cols;
        for (i, out) in (first..).zip(out.as_chunks_mut::<2>().0) {
            let block = choose(key, i / BLOCK as u64);
            let x = self.blocks[block * BLOCK + (i % BLOCK as u64) as usize];
            *out = spread.apply(x).to_le_bytes();
        }
    }

    /// Whether the packed rows of `source` are whole blocks in the order of the checkpoint.
    pub(crate) fn copies_blocks(&self, source: &Source) -> bool {
        let plain = source.op == Op::Copy && source.col_heads.is_none() && source.pad == [0; 2];
        plain && source.cols.is_multiple_of(BLOCK as u64)
    }

    /// What reading and quantizing would give, out of quantized blocks; only if [`Self::copies_blocks`].
    ///
    /// # Errors
    /// Those of `sink`.
    pub(crate) fn run(
        &self,
        source: &Source,
        block: BlockType,
        pools: &mut Pools,
        out: &mut Vec<u8>,
        mut sink: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let spread = Spread::of(source);
        let bytes = block.row_bytes(BLOCK as u64)? as usize;
        let pool_key = (block as u32, [spread.mean, spread.deviation].map(f32::to_bits));
        let pool = pools.entry(pool_key).or_insert_with(|| {
            let x: Vec<f32> = self.blocks.iter().map(|x| spread.apply(*x).to_f32()).collect();
            let mut pool = vec![0; BLOCKS * bytes];
            forerun_kernels::quantize_row(block, &x, &mut pool);
            pool
        });
        let key = self.key(&source.name);
        let each = source.cols / BLOCK as u64;
        let chunk = (CHUNK_ELEMS / source.cols).max(1);
        let mut row = 0;
        while row < source.rows {
            let end = (row + chunk).min(source.rows);
            out.clear();
            for r in row..end {
                let first = (source.first_row + source.row_heads.map_or(r, |h| h.source(r))) * each;
                for b in first..first + each {
                    out.extend_from_slice(&pool[choose(key, b) * bytes..][..bytes]);
                }
            }
            sink(out)?;
            row = end;
        }
        Ok(())
    }
}

/// The block that stands at block `i` of the tensor with `key`.
fn choose(key: u64, i: u64) -> usize {
    random(key, i) as usize % BLOCKS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::Config,
        convert::Converter,
        plan::{Data, Heads, Plan},
    };

    /// Rows of `source` by the general path: read, permute, quantize.
    fn by_rows(checkpoint: &Checkpoint, source: &Source, block: BlockType) -> Vec<u8> {
        let mut raw = vec![0; source.cols as usize * 2];
        let mut out = vec![0; block.row_bytes(source.cols).unwrap() as usize];
        let mut all = Vec::new();
        for row in 0..source.rows {
            let from = source.first_row + source.row_heads.map_or(row, |h| h.source(row));
            checkpoint.read(source, from, &mut raw).unwrap();
            let x: Vec<f32> = raw.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
            forerun_kernels::quantize_row(block, &x, &mut out);
            all.extend_from_slice(&out);
        }
        all
    }

    #[test]
    fn padding_is_zeros_after_rows_and_columns() {
        let checkpoint = Checkpoint::Synthetic(Synthetic::new(3, BTreeMap::new()));
        let source = Source { pad: [2, 16], ..Source::copy("model.vision_tower.x.weight".into(), 3, 48) };
        let mut packed = Vec::new();
        let mut sink = |bytes: &[u8]| {
            packed.extend_from_slice(bytes);
            Ok(())
        };
        Converter::default().run(&checkpoint, &source, BlockType::F32, &mut sink).unwrap();
        let rows: Vec<[u8; 256]> = packed.as_chunks::<256>().0.to_vec();
        assert_eq!((packed.len(), rows.len()), (5 * 256, 5));
        let plain = by_rows(&checkpoint, &Source { pad: [0; 2], ..source }, BlockType::F32);
        for (row, plain) in rows.iter().zip(plain.as_chunks::<192>().0) {
            assert_eq!((&row[..192], &row[192..]), (&plain[..], &[0; 64][..]));
        }
        assert_eq!(rows[3..], [[0; 256]; 2]);
    }

    #[test]
    fn copied_blocks_are_what_quantizing_the_rows_gives() {
        let checkpoint = Checkpoint::Synthetic(Synthetic::new(3, BTreeMap::new()));
        let heads = Some(Heads { start: 2, unit: 2, key_heads: 2, ratio: 2 });
        for (block, row_heads) in [(BlockType::Q4K, None), (BlockType::Q8_0, heads), (BlockType::BF16, None)] {
            let source = Source {
                first_row: 5,
                row_heads,
                ..Source::copy("model.language_model.layers.0.x.weight".into(), 10, 512)
            };
            let mut copied = Vec::new();
            let mut converter = Converter::default();
            converter
                .run(&checkpoint, &source, block, |bytes| {
                    copied.extend_from_slice(bytes);
                    Ok(())
                })
                .unwrap();
            assert!(copied == by_rows(&checkpoint, &source, block), "{}", block.name());
        }
    }

    #[test]
    fn numbers_have_the_spread_that_their_tensor_needs() {
        let s = Synthetic::new(1, BTreeMap::new());
        for (name, rows, cols, mean, deviation) in [
            ("model.language_model.layers.0.mlp.gate.weight", 64, 1024, 0.0, 1.0 / 32.0),
            ("model.language_model.layers.0.input_layernorm.weight", 1, 2048, 0.0, 0.05),
            ("model.layers.0.linear_attn.norm.weight", 1, 2048, 1.0, 0.05),
            ("model.vision_tower.post_layernorm.weight", 1, 2048, 1.0, 0.05),
            ("model.layers.0.linear_attn.A_log", 1, 2048, -2.0, 0.5),
        ] {
            let name = name.to_string();
            let source = Source::copy(name, rows, cols);
            let mut raw = vec![0; (rows * cols * 2) as usize];
            s.read(&source, 0, &mut raw);
            let x: Vec<f64> = raw.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).into()).collect();
            let n = x.len() as f64;
            let found = x.iter().sum::<f64>() / n;
            let spread = (x.iter().map(|v| (v - found) * (v - found)).sum::<f64>() / n).sqrt();
            // Five times the deviation of a mean of n numbers; the deviation is half as uncertain.
            let tolerance = 5.0 * deviation / n.sqrt();
            assert!((found - mean).abs() < tolerance, "{}: mean {found}", source.name);
            assert!((spread - deviation).abs() < tolerance, "{}: deviation {spread}", source.name);
        }
    }

    /// Weights of a model.
    fn weights(shape: Shape, vision: bool) -> u64 {
        let checkpoint = Checkpoint::Synthetic(Synthetic::new(0, files::files(shape, shape.layers(), vision)));
        let config = Config::load(&checkpoint).unwrap();
        let types = Types { experts: BlockType::BF16, resident: BlockType::BF16, vision: None };
        let plan = Plan::new(&checkpoint, &config, types, Layout::Packed).unwrap();
        let count = |data: &Data| match data {
            Data::Matrix(s) => s.rows * s.cols,
            Data::Experts(layer) => (0..layer.experts).flat_map(|e| layer.sources(e)).map(|s| s.rows * s.cols).sum(),
            Data::ExpertPart(..) => unreachable!("only in the plain layout"),
        };
        plan.items.iter().map(|i| count(&i.data)).sum()
    }

    #[test]
    fn true_shapes_have_the_published_number_of_weights() {
        assert_eq!(weights(Shape::Moe35b, true), 35_212_875_824);
        // Qwen 3.5 0.8B without its vision tower: 24 layers of width 1024 and one embedding, by hand.
        let mlp = 3 * 3584 * 1024;
        let full = (4096 + 512 + 512 + 2048) * 1024 + 2 * 256;
        let linear = (6144 + 2048 + 16 + 16 + 2048) * 1024 + 6144 * 4 + 2 * 16 + 128;
        let want = 248_144 * 1024 + 1024 + 24 * (2 * 1024 + mlp) + 6 * full + 18 * linear;
        assert_eq!(weights(Shape::Dense1b, false), want);
    }
}
