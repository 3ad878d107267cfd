//! Rows of weights to and from their blocks. Quantization follows ggml's reference functions, so that a packed file
//! holds the numbers that llama.cpp's tools would write.

use forerun_format::BlockType;
use forerun_format::block::{BlockQ4_0, BlockQ8_0, QK};
use half::{bf16, f16};

/// Rounds half away from zero.
#[inline(always)]
pub(crate) fn round(x: f32) -> i32 {
    (x + if x < 0.0 { -0.5 } else { 0.5 }) as i32
}

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
        BlockType::Q8_0 => {
            for (o, x) in out.chunks_exact_mut(size_of::<BlockQ8_0>()).zip(x.as_chunks::<QK>().0) {
                o.copy_from_slice(bytemuck::bytes_of(&quantize_q8_0(x)));
            }
        }
        BlockType::Q4_0 => {
            for (o, x) in out.chunks_exact_mut(size_of::<BlockQ4_0>()).zip(x.as_chunks::<QK>().0) {
                o.copy_from_slice(bytemuck::bytes_of(&quantize_q4_0(x)));
            }
        }
        BlockType::I8 => panic!("packed experts are quantized matrix by matrix"),
    }
}

fn quantize_q8_0(x: &[f32; QK]) -> BlockQ8_0 {
    let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let d = max / 127.0;
    let inv = if d == 0.0 { 0.0 } else { 1.0 / d };
    BlockQ8_0 { d: f16::from_f32(d).to_bits(), qs: x.map(|v| round(v * inv) as i8) }
}

fn quantize_q4_0(x: &[f32; QK]) -> BlockQ4_0 {
    // The value of largest magnitude maps to −8, whichever sign it has.
    let max = x.iter().fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    let d = max / -8.0;
    let inv = if d == 0.0 { 0.0 } else { 1.0 / d };
    let q = |v: f32| ((v * inv + 8.5) as u8).min(15);
    let mut qs = [0; QK / 2];
    for j in 0..QK / 2 {
        qs[j] = q(x[j]) | q(x[j + QK / 2]) << 4;
    }
    BlockQ4_0 { d: f16::from_f32(d).to_bits(), qs }
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
        BlockType::Q8_0 => {
            for (o, b) in out.as_chunks_mut::<QK>().0.iter_mut().zip(bytes.chunks_exact(size_of::<BlockQ8_0>())) {
                let b: BlockQ8_0 = bytemuck::pod_read_unaligned(b);
                let d = f16::from_bits(b.d).to_f32();
                for (o, q) in o.iter_mut().zip(b.qs) {
                    *o = d * f32::from(q);
                }
            }
        }
        BlockType::Q4_0 => {
            for (o, b) in out.as_chunks_mut::<QK>().0.iter_mut().zip(bytes.chunks_exact(size_of::<BlockQ4_0>())) {
                let b: BlockQ4_0 = bytemuck::pod_read_unaligned(b);
                let d = f16::from_bits(b.d).to_f32();
                for j in 0..QK / 2 {
                    o[j] = d * f32::from((b.qs[j] & 15) as i8 - 8);
                    o[j + QK / 2] = d * f32::from((b.qs[j] >> 4) as i8 - 8);
                }
            }
        }
        BlockType::I8 => panic!("packed experts are read matrix by matrix"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    /// llama.cpp's compiled C on the same bytes: `b[i] = (37 i + 11) mod 256` with the scale set to 1.0.
    #[test]
    fn blocks_decode_as_llama_cpp_does() {
        let bytes = |n: usize| -> Vec<u8> {
            let mut b: Vec<u8> = (0..n).map(|i| (37 * i + 11) as u8).collect();
            b[..2].copy_from_slice(&0x3C00u16.to_le_bytes());
            b
        };
        let mut y = [0f32; QK];
        dequantize_row(BlockType::Q4_0, &bytes(18), &mut y);
        assert_eq!([y[0], y[1], y[15], y[16], y[17], y[31], y.iter().sum()], [-3., 2., -8., -3., -1., 0., -21.]);
        dequantize_row(BlockType::Q8_0, &bytes(34), &mut y);
        assert_eq!(
            [y[0], y[1], y[15], y[16], y[17], y[31], y.iter().sum()],
            [85., 122., -128., -91., -54., -48., -176.]
        );
    }

    /// A block that is exactly representable comes back exactly; others within half a step of the scale's own rounding.
    #[test]
    fn quantization_error_is_bounded() {
        let exact: Vec<f32> = (0..QK).map(|i| (i as f32 - 16.0) / 2.0).collect();
        let mut bytes = vec![0; 18];
        let mut back = [0f32; QK];
        quantize_row(BlockType::Q4_0, &exact, &mut bytes);
        dequantize_row(BlockType::Q4_0, &bytes, &mut back);
        assert_eq!(back[0], -8.0);
        for (block, step) in [(BlockType::Q8_0, 1.0 / 127.0), (BlockType::Q4_0, 1.0 / 8.0)] {
            let x: Vec<f32> = (0..QK).map(|i| libm::sinf(i as f32 * 1.7 + 0.3)).collect();
            let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let mut bytes = vec![0; block.block_bytes()];
            quantize_row(block, &x, &mut bytes);
            dequantize_row(block, &bytes, &mut back);
            for (a, b) in x.iter().zip(back) {
                // Half a step, or a whole one where Q4_0 clips its positive end; f16 rounds the scale by 2^-11.
                let bound = max * step * if block == BlockType::Q4_0 { 1.0 } else { 0.5 } + max * 4.9e-4 + 1e-6;
                assert!((a - b).abs() <= bound, "{}: {a} became {b}", block.name());
            }
        }
        for block in [BlockType::Q8_0, BlockType::Q4_0] {
            let mut bytes = vec![1; block.block_bytes()];
            quantize_row(block, &[0.0; QK], &mut bytes);
            dequantize_row(block, &bytes, &mut back);
            assert_eq!(back, [0.0; QK]);
        }
    }
}
