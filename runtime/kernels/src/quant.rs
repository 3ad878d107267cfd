//! Rows of weights to and from their blocks.

use crate::blocks::Blocks;
use crate::quantize::Quantize;
use forerun_format::BlockType;
use forerun_format::block::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4K, BlockQ5_0, BlockQ5K, BlockQ6K,
    BlockQ8_0, QK,
};
use half::{bf16, f16};

/// Rounds half away from zero.
#[inline(always)]
pub(crate) fn round(x: f32) -> i32 {
    (x + if x < 0.0 { -0.5 } else { 0.5 }) as i32
}

/// Calls `$f::<B>($args)` with the block struct of a quantized type.
macro_rules! with_blocks {
    ($block:expr, $f:ident ( $($arg:expr),* )) => {
        match $block {
            BlockType::Q8_0 => $f::<BlockQ8_0>($($arg),*),
            BlockType::Q5_0 => $f::<BlockQ5_0>($($arg),*),
            BlockType::Q4_0 => $f::<BlockQ4_0>($($arg),*),
            BlockType::Iq4Nl => $f::<BlockIq4Nl>($($arg),*),
            BlockType::Iq4Xs => $f::<BlockIq4Xs>($($arg),*),
            BlockType::Mxfp4 => $f::<BlockMxfp4>($($arg),*),
            BlockType::Q6K => $f::<BlockQ6K>($($arg),*),
            BlockType::Q5K => $f::<BlockQ5K>($($arg),*),
            BlockType::Q4K => $f::<BlockQ4K>($($arg),*),
            BlockType::Q3K => $f::<BlockQ3K>($($arg),*),
            BlockType::Q2K => $f::<BlockQ2K>($($arg),*),
            BlockType::F32 | BlockType::F16 | BlockType::BF16 => unreachable!("handled before"),
            BlockType::I8 => panic!("packed experts are handled matrix by matrix"),
        }
    };
}
pub(crate) use with_blocks;

/// Quantizes one row.
///
/// # Panics
/// If `x` is not whole blocks or `out` is not exactly its bytes.
pub fn quantize_row(block: BlockType, x: &[f32], out: &mut [u8]) {
    assert_eq!(x.len() % block.block_elems(), 0, "row of {} elements for {}", x.len(), block.name());
    assert_eq!(out.len(), x.len() / block.block_elems() * block.block_bytes(), "bytes of a {} row", block.name());
    match block {
        BlockType::F32 => {
            for (o, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                *o = x.to_le_bytes();
            }
        }
        BlockType::F16 => {
            for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                *o = f16::from_f32(*x).to_le_bytes();
            }
        }
        BlockType::BF16 => {
            for (o, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                *o = bf16::from_f32(*x).to_le_bytes();
            }
        }
        _ => with_blocks!(block, quantize_blocks(x, out)),
    }
}

fn quantize_blocks<B: Quantize>(x: &[f32], out: &mut [u8]) {
    for (x, o) in x.chunks_exact(B::GROUPS * QK).zip(out.chunks_exact_mut(size_of::<B>())) {
        o.copy_from_slice(bytemuck::bytes_of(&B::quantize(x)));
    }
}

/// Expands one row to f32.
///
/// # Panics
/// If `bytes` is not whole blocks or `out` is not exactly their elements.
pub fn dequantize_row(block: BlockType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len() % block.block_bytes(), 0, "{} bytes for {}", bytes.len(), block.name());
    assert_eq!(
        out.len(),
        bytes.len() / block.block_bytes() * block.block_elems(),
        "elements of a {} row",
        block.name()
    );
    match block {
        BlockType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        BlockType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        BlockType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => with_blocks!(block, dequantize_blocks(bytes, out)),
    }
}

fn dequantize_blocks<B: Blocks>(bytes: &[u8], out: &mut [f32]) {
    for (b, out) in bytes.chunks_exact(size_of::<B>()).zip(out.chunks_exact_mut(B::GROUPS * QK)) {
        let b: B = bytemuck::pod_read_unaligned(b);
        for (i, out) in out.as_chunks_mut::<QK>().0.iter_mut().enumerate() {
            let g = b.group(i);
            for (j, o) in out.iter_mut().enumerate() {
                *o = g.scale[j / 16] * f32::from(g.q[j]) - g.min[j / 16];
            }
        }
    }
}
