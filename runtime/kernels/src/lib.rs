//! Arithmetic on quantized blocks and f32 activations.
//!
//! `scalar` is the oracle: plain Rust that says what each function computes and in which order. A variant for one CPU
//! has the same functions; [`KernelSet`] holds the chosen ones. Relies on `forerun-format` for block layouts; never
//! allocates.
#![no_std]
#![deny(unsafe_code)]

#[cfg(test)]
extern crate std;

#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code)]
mod aarch64;
mod blocks;
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
#[allow(unsafe_code)]
mod lanes;
pub mod math;
mod quant;
mod quantize;
pub mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86_64;

use forerun_format::BlockType;
use forerun_format::block::{QK, QK_K};

pub use lanes::crc32c_join;
pub use quant::{dequantize_row, quantize_row};

/// 256 activations as int8, with a scale for each 32: what integer dot products take. `x[j] = d[j / 32] * qs[j]`.
///
/// A column whose length is not a multiple of 256 ends with a block that is filled up with zeros.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ActQ8 {
    /// Scale of each group of 32.
    pub d: [f32; QK_K / QK],
    /// `d` times the sum of the quants, for each 16: what minima and offsets of weights multiply.
    pub sums: [f32; QK_K / 16],
    /// Quants, −127..127.
    pub qs: [i8; QK_K],
}
const _: () = assert!(size_of::<ActQ8>() == 352 && align_of::<ActQ8>() == 4);

/// Blocks that hold a column of `n` activations.
pub const fn act_blocks(n: usize) -> usize {
    n.div_ceil(QK_K)
}

/// Columns whose int8 twins a variant may weave into one tile.
pub const ACT_TILE: usize = 16;

/// Most columns beside whole tiles that stay columns; more are filled up to a tile.
const ACT_LOOSE_MAX: usize = 3;

/// Columns that the int8 twin of `columns` columns takes the space of.
pub const fn act_columns(columns: usize) -> usize {
    let loose = columns % ACT_TILE;
    if loose > ACT_LOOSE_MAX { columns - loose + ACT_TILE } else { columns }
}

/// Columns of activations, as f32 and, where the weights want it, as int8 blocks of the same values.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// `(columns, n)`.
    pub f32: &'a [f32],
    /// `(act_columns(columns), act_blocks(n))` as [`KernelSet::quantize_act`] of the same variant leaves them, or empty
    /// when no integer kernel will read it.
    pub q8: &'a [ActQ8],
    /// Elements in a column.
    pub n: usize,
}

impl Columns<'_> {
    /// Number of columns.
    pub fn count(&self) -> usize {
        self.f32.len() / self.n
    }
}

/// Keys or values of one head: `(positions, head_dim)`.
#[derive(Debug, Clone, Copy)]
pub enum KvRows<'a> {
    /// Full precision.
    F32(&'a [f32]),
    /// Bits of IEEE halves.
    F16(&'a [u16]),
}

/// Whether a matrix of type `block` is multiplied with int8 activations ([`Columns::q8`]).
pub fn wants_q8(block: BlockType) -> bool {
    block.block_elems() > 1
}

/// The functions of one variant. Contracts stand at the functions of the same name in [`scalar`].
#[derive(Clone, Copy)]
#[allow(missing_docs, clippy::type_complexity)] // each field is documented at its scalar twin
pub struct KernelSet {
    pub name: &'static str,
    pub matmul: fn(BlockType, &[u8], Columns<'_>, &mut [f32]),
    pub quantize_act: fn(&[f32], usize, &mut [ActQ8]),
    pub attention: fn(&[f32], KvRows<'_>, KvRows<'_>, usize, f32, &mut [f32]),
    pub attention_rows: fn(&[f32], &[f32], &[f32], usize, usize, f32, &mut [f32]),
    pub delta_step: fn(&mut [f32], &[f32], &[f32], &[f32], f32, f32, &mut [f32]),
    pub conv_step: fn(&mut [f32], &[f32], &mut [f32]),
    pub rms_norm: fn(&mut [f32], &[f32], &[f32], f32),
    pub layer_norm: fn(&mut [f32], &[f32], &[f32], &[f32], f32),
    pub l2_norm: fn(&mut [f32], f32, f32),
    pub silu_mul: fn(&mut [f32], &[f32]),
    pub gelu_tanh: fn(&mut [f32]),
    pub gelu_erf: fn(&mut [f32]),
    pub axpy: fn(f32, &[f32], &mut [f32]),
    pub crc32c: fn(&[u8]) -> u32,
}

static SCALAR: KernelSet = KernelSet {
    name: "scalar",
    matmul: scalar::matmul,
    quantize_act: scalar::quantize_act,
    attention: scalar::attention,
    attention_rows: scalar::attention_rows,
    delta_step: scalar::delta_step,
    conv_step: scalar::conv_step,
    rms_norm: scalar::rms_norm,
    layer_norm: scalar::layer_norm,
    l2_norm: scalar::l2_norm,
    silu_mul: scalar::silu_mul,
    gelu_tanh: scalar::gelu_tanh,
    gelu_erf: scalar::gelu_erf,
    axpy: scalar::axpy,
    crc32c: scalar::crc32c,
};

impl KernelSet {
    /// The variants that this CPU runs, best first; the last is `scalar`.
    pub fn available() -> impl Iterator<Item = &'static Self> {
        #[cfg(target_arch = "x86_64")]
        let special = x86_64::available();
        #[cfg(target_arch = "aarch64")]
        let special = aarch64::available();
        #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
        let special = core::iter::empty();
        special.chain([&SCALAR])
    }

    /// The best variant for this CPU, or the one called `forced`; `None` if it is not in this build or not for this CPU.
    pub fn select(forced: Option<&str>) -> Option<&'static Self> {
        match forced {
            None => Self::available().next(),
            Some(name) => Self::available().find(|set| set.name == name),
        }
    }
}

impl core::fmt::Debug for KernelSet {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("KernelSet").field(&self.name).finish()
    }
}
