//! Converts rows of a checkpoint to rows of a packed file, a bounded chunk at a time: read, decode, transform, permute,
//! quantize. Refuses numbers that are not finite or do not fit the target type.

use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
    plan::{Op, Source},
    safetensors::Dtype,
    synth::Pools,
};
use forerun_format::BlockType;
use half::f16;

/// Elements converted at once, or one row where that is longer.
pub(crate) const CHUNK_ELEMS: u64 = 1 << 20;

/// Buffers that are reused from chunk to chunk.
#[derive(Default)]
pub(crate) struct Converter {
    raw: Vec<u8>,
    x: Vec<f32>,
    permuted: Vec<f32>,
    out: Vec<u8>,
    pools: Pools,
}

impl Converter {
    /// Converts all rows of `source` to `block` and hands them to `sink` in order.
    ///
    /// # Errors
    /// If reading fails, a number is not finite or does not fit, or `sink` fails.
    pub fn run(
        &mut self,
        checkpoint: &Checkpoint,
        source: &Source,
        block: BlockType,
        mut sink: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Checkpoint::Synthetic(s) = checkpoint
            && s.copies_blocks(source)
        {
            return s.run(source, block, &mut self.pools, &mut self.out, sink);
        }
        let cols = source.cols + source.pad[1];
        let row_bytes = block.row_bytes(cols)?;
        let chunk = (CHUNK_ELEMS / cols).max(1);
        let mut row = 0;
        while row < source.rows {
            let n = chunk.min(source.rows - row);
            self.read(checkpoint, source, row, n)?;
            self.transform(source, block, row)?;
            self.pad(source);
            // Rows are whole blocks, so a chunk of rows is one long row to the quantizer.
            self.out.resize((n * row_bytes) as usize, 0);
            forerun_kernels::quantize_row(block, &self.x, &mut self.out);
            sink(&self.out)?;
            row += n;
        }
        if source.pad[0] > 0 {
            self.out.resize(row_bytes as usize, 0);
            forerun_kernels::quantize_row(block, &vec![0.0; cols as usize], &mut self.out);
        }
        (0..source.pad[0]).try_for_each(|_| sink(&self.out))
    }

    /// Fills rows of `x` up with zeros.
    fn pad(&mut self, source: &Source) {
        if source.pad[1] > 0 {
            self.permuted.clear();
            for r in self.x.chunks_exact(source.cols as usize) {
                self.permuted.extend_from_slice(r);
                self.permuted.extend(std::iter::repeat_n(0.0, source.pad[1] as usize));
            }
            std::mem::swap(&mut self.x, &mut self.permuted);
        }
    }

    /// Fills `x` with rows `row..row + n` of `source`.
    fn read(&mut self, checkpoint: &Checkpoint, source: &Source, row: u64, n: u64) -> Result<()> {
        let (dtype, each) = checkpoint.element(source)?;
        let row_bytes = source.cols as usize * each;
        self.raw.resize(n as usize * row_bytes, 0);
        let mut r = 0;
        while r < n {
            let (from, run) = match source.row_heads {
                None => (row + r, n - r),
                Some(h) => (h.source(row + r), h.run(row + r).min(n - r)),
            };
            let out = &mut self.raw[r as usize * row_bytes..(r + run) as usize * row_bytes];
            checkpoint.read(source, source.first_row + from, out)?;
            r += run;
        }
        self.x.clear();
        match dtype {
            Dtype::F32 => self.x.extend(self.raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
            Dtype::F16 => self.x.extend(self.raw.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
            Dtype::Bf16 => self.x.extend(
                self.raw.as_chunks::<2>().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)),
            ),
            // Has no size, so `element` refused it.
            Dtype::Other(_) => {}
        }
        Ok(())
    }

    /// Applies the operation and the column permutation to `x`, whose first row is `row`, and checks every number.
    fn transform(&mut self, source: &Source, block: BlockType, row: u64) -> Result<()> {
        match source.op {
            Op::Copy => {}
            Op::AddOne => self.x.iter_mut().for_each(|x| *x += 1.0),
            // Through f64, so that the result does not depend on the platform's f32 exponential.
            Op::NegExp => self.x.iter_mut().for_each(|x| *x = -f64::from(*x).exp() as f32),
        }
        // Magnitudes order like their bits, and NaN and infinity come last.
        let largest = self.x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF));
        if f32::from_bits(largest).is_nan() || f32::from_bits(largest) > largest_of(block) {
            let i = self.x.iter().position(|x| x.to_bits() & 0x7FFF_FFFF == largest).unwrap_or(0);
            let (r, c) = (row + source.first_row + i as u64 / source.cols, i as u64 % source.cols);
            let x = self.x[i];
            return Err(Error::input(
                format!("tensor {}", source.name),
                format!("{x} at row {r}, column {c}"),
                if x.is_finite() {
                    format!("at most {} for type {}: choose bf16 or f32", largest_of(block), block.name())
                } else {
                    "finite numbers: the checkpoint is damaged".into()
                },
            ));
        }
        if let Some(heads) = source.col_heads {
            self.permuted.clear();
            for r in self.x.chunks_exact(source.cols as usize) {
                let mut c = 0;
                while c < source.cols {
                    let run = heads.run(c).min(source.cols - c);
                    let from = heads.source(c) as usize;
                    self.permuted.extend_from_slice(&r[from..from + run as usize]);
                    c += run;
                }
            }
            std::mem::swap(&mut self.x, &mut self.permuted);
        }
        Ok(())
    }
}

/// Largest magnitude whose conversion stays finite: block scales are f16.
fn largest_of(block: BlockType) -> f32 {
    let half = f32::from(f16::MAX);
    match block {
        BlockType::Q8_0 => half * 127.0,
        BlockType::Q4_0 => half * 8.0,
        BlockType::BF16 => f32::from(half::bf16::MAX),
        BlockType::F32 | BlockType::I8 => f32::MAX,
        // Their scales would bear a little more, but not all of them by the same factor.
        _ => half,
    }
}
