//! The portable variant and the oracle for all others.
//!
//! Sums run in 16 lanes that are added pairwise at the end: an order that SIMD variants can keep and that does not
//! depend on how many columns or rows are computed together.

mod attention;
mod matmul;
mod mix;
#[cfg(test)]
mod tests;

pub(crate) use attention::check_attention_rows;
pub use attention::{attention, attention_rows};
pub use forerun_format::crc32c::crc32c;
pub(crate) use matmul::check_matmul;
#[cfg(target_arch = "x86_64")]
pub(crate) use matmul::{check_quantize, quantize_block};
pub use matmul::{matmul, quantize_act};
pub use mix::{CONV_WIDTH, axpy, conv_step, delta_step, gelu_erf, gelu_tanh, l2_norm, layer_norm, rms_norm, silu_mul};

/// Lanes of a sum.
pub(crate) const LANES: usize = 16;

/// Adds lanes pairwise: 16, 8, 4, 2, 1.
#[inline(always)]
pub(crate) fn fold(mut acc: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            acc[i] += acc[i + n];
        }
        n /= 2;
    }
    acc[0]
}

/// Sum of `f(i)` products over two equally long slices, in lanes; the tail goes to the first lanes.
#[inline(always)]
pub(crate) fn dot<A: Copy>(a: &[A], b: &[f32], widen: impl Fn(A) -> f32) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut acc = [0f32; LANES];
    let (a_full, a_tail) = a.as_chunks::<LANES>();
    let (b_full, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_full.iter().zip(b_full) {
        for i in 0..LANES {
            acc[i] += widen(a[i]) * b[i];
        }
    }
    for (i, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        acc[i] += widen(*a) * b;
    }
    fold(acc)
}
