//! Elementary functions for activations, written so that loops over them vectorise and every target gives equal bits:
//! only IEEE additions, multiplications, divisions and conversions.

/// `e^x` in f32, relative error below 2e-7 between −87 and 88; 0 below −104, infinity above 88.8.
///
/// `x = n ln 2 + r`, `|r| <= ln 2 / 2`; the polynomial is Cephes' `expf` (S. Moshier), the scaling is two exact products.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-105.0, 89.0);
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits: a cast, which must look out for NaN and
    // overflow, would keep x86 compilers from vectors.
    const ROUND: f32 = 12_582_912.0;
    let rounded = clamped * core::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.000_000_3e-1;
    let y = p * r * r + r + 1.0;
    // 2^n as a product of two normal numbers, so that the ends underflow and overflow as they should.
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let a = f32::from_bits(((half + 127) << 23) as u32);
    let b = f32::from_bits(((n.wrapping_sub(half) + 127) << 23) as u32);
    y * a * b
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + e^x)`; `x` itself above 20, as PyTorch's default threshold has it.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(libm::expf(x)) }
}

/// GELU, tanh form (`gelu_pytorch_tanh`).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_PI: f32 = 0.797_884_6;
    // 0.5 (1 + tanh u) = sigmoid(2 u)
    x * sigmoid(2.0 * SQRT_2_PI * (x + 0.044_715 * x * x * x))
}

/// GELU, exact form with erf.
pub fn gelu_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * core::f32::consts::FRAC_1_SQRT_2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against f64 libm. 2e-7 is 1.7 units in the last place: enough for softmax, whose sums err more.
    #[test]
    fn exp_is_accurate() {
        const EXP_REL: f64 = 2e-7;
        let mut worst = 0f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let want = libm::exp(f64::from(x));
            worst = worst.max(((f64::from(exp(x)) - want) / want).abs());
        }
        assert!(worst < EXP_REL, "worst relative error {worst:e}");
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(200.0), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
    }

    /// PyTorch 2: `torch.nn.functional.gelu(torch.tensor([-3., -1., .5, 2.]), approximate=...)`, `softplus`, `silu`.
    #[test]
    fn activations_match_pytorch() {
        let x = [-3.0f32, -1.0, 0.5, 2.0];
        let tanh = [-0.003_637_392, -0.158_808_01, 0.345_714, 1.954_597_7];
        let erf = [-0.004_049_7, -0.158_655_26, 0.345_731_2, 1.954_499_7];
        let soft = [0.048_587_35, 0.313_261_7, 0.974_077, 2.126_928];
        let sil = [-0.142_277_62, -0.268_941_4, 0.311_229_65, 1.761_594_2];
        for i in 0..4 {
            assert!((gelu_tanh(x[i]) - tanh[i]).abs() < 2e-7, "{} {}", gelu_tanh(x[i]), tanh[i]);
            assert!((gelu_erf(x[i]) - erf[i]).abs() < 3e-7, "{} {}", gelu_erf(x[i]), erf[i]);
            assert!((softplus(x[i]) - soft[i]).abs() < 3e-7);
            assert!((silu(x[i]) - sil[i]).abs() < 3e-7);
        }
    }
}
