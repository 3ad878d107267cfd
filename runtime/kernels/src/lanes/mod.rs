//! Kernels over 16 f32 lanes, written once for every instruction set.
//!
//! `decode`, `quantized`, `float` and `attention` are generic over [`Isa`]; a folder per architecture names the
//! instructions and makes its kernel sets with [`variant!`]. Integer parts are exact; f32 sums run in 16 lanes as in
//! `scalar`, fused.

mod attention;
mod crc32c;
mod decode;
mod float;
mod isa;
mod quantized;

use crate::{Columns, scalar};
use forerun_format::BlockType;

pub(crate) use attention::{attention, attention_rows};
pub(crate) use crc32c::crc32c;
pub use crc32c::crc32c_join;
pub(crate) use decode::Decode;
pub(crate) use isa::{Dots, Isa, Narrow};
pub(crate) use quantized::tiles;

/// Product of a matrix of any type: quantized with `COLUMNS` columns at a time, f32 and the like in tiles of `TILE` rows and
/// columns, as many as the registers hold. Lengths are checked here, so that the loops below need not.
#[inline(always)]
pub(crate) unsafe fn matmul<I: Isa, const COLUMNS: usize, const TILE: usize>(
    block: BlockType,
    w: &[u8],
    x: Columns<'_>,
    out: &mut [f32],
) {
    scalar::check_matmul(block, w, x, out);
    // SAFETY: the caller enabled I's instructions; check_matmul compared every length with block, columns and x.n.
    unsafe {
        match block {
            BlockType::F32 | BlockType::F16 | BlockType::BF16 => float::matmul::<I, TILE>(block, w, x, out),
            _ => quantized::matmul::<I, COLUMNS>(block, w, x, out),
        }
    }
}

/// A kernel set whose entry points enable `$features` for everything inlined into them. What is not in `Isa` is the
/// scalar function itself, which the compiler then turns into wider instructions without changing a bit.
macro_rules! variant {
    ($set:ident, $module:ident, $isa:ty, $columns:literal, $tile:literal, [$queries:literal, $keys:literal], $name:literal, $features:literal) => {
        static $set: $crate::KernelSet = $crate::KernelSet {
            name: $name,
            matmul: $module::matmul,
            quantize_act: $module::quantize_act,
            attention: $module::attention,
            attention_rows: $module::attention_rows,
            delta_step: $module::delta_step,
            conv_step: $module::conv_step,
            rms_norm: $module::rms_norm,
            layer_norm: $module::layer_norm,
            l2_norm: $module::l2_norm,
            silu_mul: $module::silu_mul,
            gelu_tanh: $module::gelu_tanh,
            gelu_erf: $module::gelu_erf,
            axpy: $module::axpy,
            crc32c: crc32c::crc32c,
        };

        mod $module {
            use super::*;
            use crate::{ActQ8, Columns, KvRows, lanes, scalar};
            use forerun_format::BlockType;

            macro_rules! entries {
                ($d:tt) => {
                    macro_rules! entry {
                        ($d($d entry:ident($d($d arg:ident: $d ty:ty),*) = $d body:expr;)*) => {
                            $d(
                                pub(super) fn $d entry($d($d arg: $d ty),*) {
                                    #[target_feature(enable = $features)]
                                    fn enabled($d($d arg: $d ty),*) {
                                        $d body
                                    }
                                    // SAFETY: available() of this architecture hands the set out only where these
                                    // features are there and the operating system saves their registers.
                                    unsafe { enabled($d($d arg),*) }
                                }
                            )*
                        };
                    }
                };
            }
            entries!($);
            entry! {
                matmul(block: BlockType, w: &[u8], x: Columns<'_>, out: &mut [f32]) =
                    // SAFETY: this function enables the instructions that the argument asks for.
                    unsafe { lanes::matmul::<$isa, $columns, $tile>(block, w, x, out) };
                attention(q: &[f32], k: KvRows<'_>, v: KvRows<'_>, n: usize, scale: f32, out: &mut [f32]) =
                    // SAFETY: as above.
                    unsafe { lanes::attention::<$isa>(q, k, v, n, scale, out) };
                attention_rows(q: &[f32], k: &[f32], v: &[f32], dim: usize, stride: usize, scale: f32, out: &mut [f32]) =
                    // SAFETY: as above.
                    unsafe { lanes::attention_rows::<$isa, $queries, $keys>(q, k, v, dim, stride, scale, out) };
                quantize_act(x: &[f32], n: usize, out: &mut [ActQ8]) =
                    // SAFETY: as above.
                    unsafe { <$isa as lanes::Isa>::quantize(x, n, out) };
                delta_step(s: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, out: &mut [f32]) =
                    scalar::delta_step(s, q, k, v, decay, beta, out);
                conv_step(state: &mut [f32], w: &[f32], x: &mut [f32]) = scalar::conv_step(state, w, x);
                rms_norm(y: &mut [f32], x: &[f32], w: &[f32], eps: f32) = scalar::rms_norm(y, x, w, eps);
                layer_norm(y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) = scalar::layer_norm(y, x, w, b, eps);
                l2_norm(x: &mut [f32], eps: f32, scale: f32) = scalar::l2_norm(x, eps, scale);
                silu_mul(a: &mut [f32], b: &[f32]) = scalar::silu_mul(a, b);
                gelu_tanh(x: &mut [f32]) = scalar::gelu_tanh(x);
                gelu_erf(x: &mut [f32]) = scalar::gelu_erf(x);
                axpy(a: f32, x: &[f32], y: &mut [f32]) = scalar::axpy(a, x, y);
            }
        }
    };
}
pub(crate) use variant;
