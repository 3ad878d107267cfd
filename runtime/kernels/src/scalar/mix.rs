//! Norms, gated delta rule, causal convolution, activations.

use super::{LANES, dot, fold};
use crate::math;

/// Width of the causal convolution: the only one that models of this family have.
pub const CONV_WIDTH: usize = 4;

/// Longest head of the delta rule, so that its temporaries live on the stack.
pub const DELTA_DIM_MAX: usize = 256;

/// `y += a · x`.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (full, tail) = x.as_chunks::<LANES>();
    for x in full {
        for i in 0..LANES {
            acc[i] += x[i];
        }
    }
    for (i, x) in tail.iter().enumerate() {
        acc[i] += x;
    }
    fold(acc)
}

/// `y = x · w / sqrt(mean(x²) + eps)`; the 1 of zero-centred norms is already in `w`.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn rms_norm(y: &mut [f32], x: &[f32], w: &[f32], eps: f32) {
    assert!(y.len() == x.len() && w.len() == x.len());
    let inv = 1.0 / libm::sqrtf(dot(x, x, |v| v) / x.len() as f32 + eps);
    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
        *y = x * inv * w;
    }
}

/// `y = (x − mean) / sqrt(var + eps) · w + b`.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn layer_norm(y: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
    assert!(y.len() == x.len() && w.len() == x.len() && b.len() == x.len());
    let mean = sum(x) / x.len() as f32;
    for (y, x) in y.iter_mut().zip(x) {
        *y = x - mean;
    }
    let inv = 1.0 / libm::sqrtf(dot(y, y, |v| v) / x.len() as f32 + eps);
    for ((y, w), b) in y.iter_mut().zip(w).zip(b) {
        *y = *y * inv * w + b;
    }
}

/// `x ← x · scale / sqrt(Σ x² + eps)`.
#[inline(always)]
pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) {
    let inv = scale / libm::sqrtf(dot(x, x, |v| v) + eps);
    x.iter_mut().for_each(|x| *x *= inv);
}

/// `a ← silu(a) · b`: the gate of a SwiGLU.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn silu_mul(a: &mut [f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter_mut().zip(b) {
        *a = math::silu(*a) * b;
    }
}

/// GELU, tanh form, in place.
#[inline(always)]
pub fn gelu_tanh(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = math::gelu_tanh(*x));
}

/// GELU, erf form, in place.
#[inline(always)]
pub fn gelu_erf(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = math::gelu_erf(*x));
}

/// One step of a depthwise causal convolution of width 4, then SiLU, for all channels.
///
/// `state` `(3, channels)` holds the inputs before this one, oldest first, and is moved on; `w` is `(channels, 4)`; `x`
/// `(channels)` is the input and becomes the output.
///
/// # Panics
/// If the lengths do not fit one another.
#[inline(always)]
pub fn conv_step(state: &mut [f32], w: &[f32], x: &mut [f32]) {
    let channels = x.len();
    let (w, rest) = w.as_chunks::<CONV_WIDTH>();
    assert!(w.len() == channels && rest.is_empty() && state.len() == (CONV_WIDTH - 1) * channels);
    let (a, others) = state.split_at_mut(channels);
    let (b, c) = others.split_at_mut(channels);
    // One flat loop over equally long slices, which the compiler turns into vectors.
    let (a, b, c) = (&mut a[..channels], &mut b[..channels], &mut c[..channels]);
    for i in 0..channels {
        let (x, w) = (&mut x[i], &w[i]);
        let sum = w[0] * a[i] + w[1] * b[i] + w[2] * c[i] + w[3] * *x;
        (a[i], b[i], c[i]) = (b[i], c[i], *x);
        *x = math::silu(sum);
    }
}

/// One token of the gated delta rule for one head (Yang et al., arXiv:2412.06464):
/// `S ← decay·S; δ = beta (v − Sᵀk); S ← S + k δᵀ; out = Sᵀ q`.
///
/// Shapes: `s` `(k_dim, v_dim)`, `q` and `k` `(k_dim)`, `v` and `out` `(v_dim)`, `v_dim <= 256`.
///
/// # Panics
/// If the lengths do not fit one another.
#[inline(always)]
pub fn delta_step(s: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, out: &mut [f32]) {
    let v_dim = v.len();
    assert!(v_dim <= DELTA_DIM_MAX && out.len() == v_dim && k.len() == q.len() && s.len() == k.len() * v_dim);
    let mut delta = [0f32; DELTA_DIM_MAX];
    let delta = &mut delta[..v_dim];
    // The decayed state is not stored before it is updated: it is larger than the first-level cache.
    for (s, &k) in s.chunks_exact(v_dim).zip(k) {
        for (s, r) in s.iter().zip(delta.iter_mut()) {
            *r += s * decay * k;
        }
    }
    for (d, v) in delta.iter_mut().zip(v) {
        *d = beta * (v - *d);
    }
    out.fill(0.0);
    for ((s, &k), &q) in s.chunks_exact_mut(v_dim).zip(k).zip(q) {
        for ((s, d), o) in s.iter_mut().zip(delta.iter()).zip(out.iter_mut()) {
            *s = *s * decay + k * d;
            *o += *s * q;
        }
    }
}
