//! What a block's bits mean: every quantized type as groups of 32 small integers with a scale and a minimum for each half.
//!
//! The one description that dequantization and the scalar dot product share. Layouts: `forerun-format`.

use bytemuck::Pod;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, E2M1_DOUBLED, IQ4_VALUES, QK,
};
use half::f16;

/// 32 weights: `y[j] = scale[j / 16] * q[j] - min[j / 16]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    pub q: [i8; QK],
    pub scale: [f32; 2],
    pub min: [f32; 2],
}

impl Group {
    fn new(q: [i8; QK], scale: f32) -> Self {
        Self { q, scale: [scale; 2], min: [0.0; 2] }
    }
}

/// A block of [`Blocks::GROUPS`] groups.
pub(crate) trait Blocks: Pod {
    const GROUPS: usize;
    /// The halves of a group have scales of their own.
    const HALVES: bool = false;
    /// There is a minimum.
    const MIN: bool = false;

    /// Group `i`.
    fn group(&self, i: usize) -> Group;
}

fn f32_of(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Low nibbles are the first 16, high nibbles the others.
fn nibbles(qs: &[u8], f: impl Fn(u8) -> i8) -> [i8; QK] {
    core::array::from_fn(|j| f(if j < 16 { qs[j] & 15 } else { qs[j - 16] >> 4 }))
}

impl Blocks for BlockQ8_0 {
    const GROUPS: usize = 1;
    fn group(&self, _: usize) -> Group {
        Group::new(self.qs, f32_of(self.d))
    }
}

impl Blocks for BlockQ4_0 {
    const GROUPS: usize = 1;
    fn group(&self, _: usize) -> Group {
        Group::new(nibbles(&self.qs, |q| q as i8 - 8), f32_of(self.d))
    }
}

impl Blocks for BlockQ5_0 {
    const GROUPS: usize = 1;
    fn group(&self, _: usize) -> Group {
        let high = u32::from_le_bytes(self.qh);
        let low = nibbles(&self.qs, |q| q as i8);
        let q = core::array::from_fn(|j| (low[j] | ((high >> j & 1) << 4) as i8) - 16);
        Group::new(q, f32_of(self.d))
    }
}

impl Blocks for BlockIq4Nl {
    const GROUPS: usize = 1;
    fn group(&self, _: usize) -> Group {
        Group::new(nibbles(&self.qs, |q| IQ4_VALUES[usize::from(q)]), f32_of(self.d))
    }
}

impl Blocks for BlockIq4Xs {
    const GROUPS: usize = 8;
    fn group(&self, i: usize) -> Group {
        let low = self.scales_l[i / 2] >> (4 * (i & 1)) & 15;
        let high = (self.scales_h >> (2 * i) & 3) as u8;
        let scale = f32_of(self.d) * f32::from((low | high << 4) as i8 - 32);
        Group::new(nibbles(&self.qs[16 * i..][..16], |q| IQ4_VALUES[usize::from(q)]), scale)
    }
}

impl Blocks for BlockMxfp4 {
    const GROUPS: usize = 1;
    fn group(&self, _: usize) -> Group {
        Group::new(nibbles(&self.qs, |q| E2M1_DOUBLED[usize::from(q)]), mxfp4_scale(self.e))
    }
}

/// `2^(e - 128)`: the smallest is a denormal.
pub(crate) fn mxfp4_scale(e: u8) -> f32 {
    if e < 2 { f32::from_bits(0x0020_0000 << e) } else { f32::from_bits((u32::from(e) - 1) << 23) }
}

/// The eight six-bit pairs (scale, minimum) of Q4_K and Q5_K.
pub(crate) fn scale_min(s: &[u8; 12], i: usize) -> (u8, u8) {
    if i < 4 {
        (s[i] & 63, s[i + 4] & 63)
    } else {
        (s[i + 4] & 15 | s[i - 4] >> 6 << 4, s[i + 4] >> 4 | s[i] >> 6 << 4)
    }
}

fn k_group(d: u16, dmin: u16, scales: &[u8; 12], i: usize, q: [i8; QK]) -> Group {
    let (sc, m) = scale_min(scales, i);
    Group { q, scale: [f32_of(d) * f32::from(sc); 2], min: [f32_of(dmin) * f32::from(m); 2] }
}

impl Blocks for BlockQ4K {
    const GROUPS: usize = 8;
    const MIN: bool = true;
    fn group(&self, i: usize) -> Group {
        let qs = &self.qs[i / 2 * 32..][..32];
        let q = core::array::from_fn(|j| (qs[j] >> (4 * (i & 1)) & 15) as i8);
        k_group(self.d, self.dmin, &self.scales, i, q)
    }
}

impl Blocks for BlockQ5K {
    const GROUPS: usize = 8;
    const MIN: bool = true;
    fn group(&self, i: usize) -> Group {
        let qs = &self.qs[i / 2 * 32..][..32];
        let q = core::array::from_fn(|j| (qs[j] >> (4 * (i & 1)) & 15 | (self.qh[j] >> i & 1) << 4) as i8);
        k_group(self.d, self.dmin, &self.scales, i, q)
    }
}

impl Blocks for BlockQ6K {
    const GROUPS: usize = 8;
    const HALVES: bool = true;
    fn group(&self, i: usize) -> Group {
        let (n, j) = (i / 4, i % 4);
        let (low, high) = (&self.ql[64 * n + 32 * (j & 1)..][..32], &self.qh[32 * n..][..32]);
        let q = core::array::from_fn(|l| ((low[l] >> (4 * (j / 2)) & 15) | (high[l] >> (2 * j) & 3) << 4) as i8 - 32);
        let d = f32_of(self.d);
        let scale = [2 * i, 2 * i + 1].map(|k| d * f32::from(self.scales[k]));
        Group { q, scale, min: [0.0; 2] }
    }
}

/// The sixteen six-bit scales of Q3_K, 32 taken off.
pub(crate) fn q3k_scale(s: &[u8; 12], k: usize) -> i8 {
    let low = if k < 8 { s[k] & 15 } else { s[k - 8] >> 4 };
    let high = s[8 + k % 4] >> (2 * (k / 4)) & 3;
    (low | high << 4) as i8 - 32
}

impl Blocks for BlockQ3K {
    const GROUPS: usize = 8;
    const HALVES: bool = true;
    fn group(&self, i: usize) -> Group {
        let (n, j) = (i / 4, i % 4);
        let q = core::array::from_fn(|l| {
            let high = self.hmask[l] >> (4 * n + j) & 1;
            (self.qs[32 * n + l] >> (2 * j) & 3 | high << 2) as i8 - 4
        });
        let d = f32_of(self.d);
        let scale = [2 * i, 2 * i + 1].map(|k| d * f32::from(q3k_scale(&self.scales, k)));
        Group { q, scale, min: [0.0; 2] }
    }
}

impl Blocks for BlockQ2K {
    const GROUPS: usize = 8;
    const HALVES: bool = true;
    const MIN: bool = true;
    fn group(&self, i: usize) -> Group {
        let (n, j) = (i / 4, i % 4);
        let q = core::array::from_fn(|l| (self.qs[32 * n + l] >> (2 * j) & 3) as i8);
        let (d, dmin) = (f32_of(self.d), f32_of(self.dmin));
        let of = |k: usize| self.scales[2 * i + k];
        Group { q, scale: [0, 1].map(|k| d * f32::from(of(k) & 15)), min: [0, 1].map(|k| dmin * f32::from(of(k) >> 4)) }
    }
}
