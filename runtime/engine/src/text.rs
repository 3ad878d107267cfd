//! Layers of the text model: gated attention, gated delta rule, dense MLP. Reads top to bottom like the formulas.

use crate::buffers::TextScratch;
use crate::config::TextConfig;
use crate::engine::Engine;
use crate::exec::{Exec, Products};
use crate::plan::KvType;
use crate::ports::Storage;
use crate::weights::{Layer, MixerWeights, Swiglu, Vector};
use forerun_kernels::{KvRows, math};
use half::f16;

/// cos and sin of every token's rotation `(n, 2, rope_dim / 2)`. Frequency `i` follows T, H or W in turn (interleaved
/// M-RoPE), as far as each section reaches.
pub(crate) fn rope_table(c: &TextConfig, positions: [&[u32]; 3], table: &mut [f32]) {
    let half = c.rope_dim / 2;
    let sections = c.rope_sections;
    for (t, row) in table.chunks_exact_mut(2 * half).take(positions[0].len()).enumerate() {
        let (cos, sin) = row.split_at_mut(half);
        for i in 0..half {
            let stream = match i % 3 {
                1 if i < 3 * sections[1] => 1,
                2 if i < 3 * sections[2] => 2,
                _ => 0,
            };
            let frequency = 1.0 / libm::powf(c.rope_base, (2 * i) as f32 / c.rope_dim as f32);
            let angle = positions[stream][t] as f32 * frequency;
            cos[i] = libm::cosf(angle);
            sin[i] = libm::sinf(angle);
        }
    }
}

/// Rotates the first dimensions of `head`: element `j` pairs with `j + half`.
fn rotate(head: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    let (a, b) = head[..2 * half].split_at_mut(half);
    for j in 0..half {
        let (x, y) = (a[j], b[j]);
        a[j] = x * cos[j] - y * sin[j];
        b[j] = y * cos[j] + x * sin[j];
    }
}

/// `s.norm = rms_norm(s.x)` for `n` tokens.
pub(crate) fn norm<S: Storage>(e: &Engine<'_, S>, w: Vector, n: usize, s: &mut TextScratch<'_>) {
    let c = &e.config.text;
    let (h, w) = (c.hidden, w.f32(e.resident));
    let x = &*s.x;
    e.exec.each_row(&mut s.norm[..n * h], h, |t, row| (e.exec.ks.rms_norm)(row, &x[t * h..][..h], w, c.rms_eps));
}

/// `s.out` = the layer's token mixer on `s.norm`. `first` tokens are in the state already; the state after `save` of the
/// `n` is saved; `counts` number the attention and delta layers so far.
pub(crate) fn mixer<S: Storage>(
    e: &mut Engine<'_, S>,
    layer: &Layer,
    first: usize,
    n: usize,
    save: Option<usize>,
    counts: (&mut usize, &mut usize),
    s: &mut TextScratch<'_>,
) {
    match layer.mixer {
        MixerWeights::Attention { .. } => {
            attention(e, &layer.mixer, *counts.0, first, n, s);
            *counts.0 += 1;
        }
        MixerWeights::Delta { .. } => {
            delta(e, &layer.mixer, *counts.1, n, save, s);
            *counts.1 += 1;
        }
    }
}

fn attention<S: Storage>(
    e: &mut Engine<'_, S>,
    w: &MixerWeights,
    index: usize,
    first: usize,
    n: usize,
    s: &mut TextScratch<'_>,
) {
    let MixerWeights::Attention { q, k, v, q_norm, k_norm, out } = w else { return };
    let (c, exec, r) = (&e.config.text, e.exec, e.resident);
    let (h, dim, heads, kv_heads) = (c.hidden, c.head_dim, c.heads, c.kv_heads);
    let x = &s.norm[..n * h];
    let mut p = Products { turned: s.turned, q8: s.q8 };
    exec.together([q, k, v], r, x, &mut p, [s.a, s.b, s.c]);

    // Norm and rotation of every query (beside its gate) and every key.
    let (q_norm, k_norm) = (q_norm.f32(r), k_norm.f32(r));
    let (rope, ks) = (&*s.rope, exec.ks);
    let prepare = |head: &mut [f32], w: &[f32], t: usize| {
        // Norms write to a place of their own, so that x stays whole while its square sum is taken.
        let mut y = [0f32; 256];
        (ks.rms_norm)(&mut y[..dim], head, w, c.rms_eps);
        head.copy_from_slice(&y[..dim]);
        rotate(head, &rope[t * c.rope_dim..][..c.rope_dim]);
    };
    exec.workers.split2(
        n,
        &mut s.a[..n * heads * 2 * dim],
        heads * 2 * dim,
        &mut s.b[..n * kv_heads * dim],
        kv_heads * dim,
        &|t, q, k| {
            q.chunks_exact_mut(2 * dim).for_each(|q| prepare(&mut q[..dim], q_norm, t));
            k.chunks_exact_mut(dim).for_each(|k| prepare(k, k_norm, t));
        },
    );

    // Keys and values of head g: (context, dim) each.
    let context = e.context;
    let bank = kv_heads * context * dim;
    let store = |kv: &mut [f32], part: usize, values: &[f32]| {
        for t in 0..n {
            for g in 0..kv_heads {
                let at = part * bank + (g * context + first + t) * dim;
                let from = &values[(t * kv_heads + g) * dim..][..dim];
                match e.kv_type {
                    KvType::F32 => kv[at..][..dim].copy_from_slice(from),
                    KvType::F16 => {
                        let halves: &mut [u16] = bytemuck::cast_slice_mut(kv);
                        for (o, x) in halves[at..][..dim].iter_mut().zip(from) {
                            *o = f16::from_f32(*x).to_bits();
                        }
                    }
                }
            }
        }
    };
    store(e.state.kv, 2 * index, s.b);
    store(e.state.kv, 2 * index + 1, s.c);
    let rows = |part: usize, g: usize| {
        let at = part * bank + g * context * dim;
        match e.kv_type {
            KvType::F32 => KvRows::F32(&e.state.kv[at..][..context * dim]),
            KvType::F16 => KvRows::F16(&bytemuck::cast_slice::<f32, u16>(e.state.kv)[at..][..context * dim]),
        }
    };
    let scale = 1.0 / libm::sqrtf(dim as f32);
    let queries = &*s.a;
    let o = &mut s.o[..n * heads * dim];
    exec.each_row(o, dim, |i, o| {
        let (t, head) = (i / heads, i % heads);
        let g = head / (heads / kv_heads);
        let (q, gate) = queries[i * 2 * dim..][..2 * dim].split_at(dim);
        (ks.attention)(q, rows(2 * index, g), rows(2 * index + 1, g), first + t + 1, scale, o);
        for (o, gate) in o.iter_mut().zip(gate) {
            *o *= math::sigmoid(*gate);
        }
    });
    exec.matmul(out, out.bytes(r), &s.o[..n * heads * dim], &mut p, s.out);
}

fn delta<S: Storage>(
    e: &mut Engine<'_, S>,
    w: &MixerWeights,
    index: usize,
    n: usize,
    save: Option<usize>,
    s: &mut TextScratch<'_>,
) {
    let MixerWeights::Delta { qkv, gate, alpha, beta, conv, a, dt, norm, out } = w else { return };
    let (c, exec, r, ks) = (&e.config.text, e.exec, e.resident, e.exec.ks);
    let (h, channels, inner) = (c.hidden, c.conv_channels(), c.delta_inner());
    let (key_heads, heads, dk, dv) = (c.delta_key_heads, c.delta_value_heads, c.delta_key_dim, c.delta_value_dim);
    let x = &s.norm[..n * h];
    let mut p = Products { turned: s.turned, q8: s.q8 };
    let (decay, rate) = s.heads.split_at_mut(s.heads.len() / 2);
    exec.together([qkv, gate, alpha, beta], r, x, &mut p, [s.a, s.b, decay, rate]);
    let (a, dt) = (a.f32(r), dt.f32(r));
    for t in 0..n {
        for i in 0..heads {
            let at = t * heads + i;
            decay[at] = libm::expf(a[i] * math::softplus(decay[at] + dt[i]));
            rate[at] = math::sigmoid(rate[at]);
        }
    }

    // Token by token: the state moves on. Then unit length for q and k; q also carries 1/√dk.
    let part = index * (c.conv_width - 1) * channels..(index + 1) * (c.conv_width - 1) * channels;
    let state = &mut e.state.conv[part.clone()];
    let conv = conv.f32(r);
    let (before, after) = s.a[..n * channels].split_at_mut(save.unwrap_or(n) * channels);
    for x in before.chunks_exact_mut(channels) {
        (ks.conv_step)(state, conv, x);
    }
    if save.is_some() {
        e.state.saved_conv[part].copy_from_slice(state);
    }
    for x in after.chunks_exact_mut(channels) {
        (ks.conv_step)(state, conv, x);
    }
    let keys = key_heads * dk;
    exec.each_row(&mut s.a[..n * channels], channels, |_, x| {
        for (i, head) in x[..2 * keys].chunks_exact_mut(dk).enumerate() {
            (ks.l2_norm)(head, 1e-6, if i < key_heads { 1.0 / libm::sqrtf(dk as f32) } else { 1.0 });
        }
    });

    // One head a piece: its state, and its outputs for all tokens.
    let part = index * heads * dk * dv..(index + 1) * heads * dk * dv;
    let state = &mut e.state.delta[part.clone()];
    let (x, out_by_head) = (&*s.a, &mut s.c[..heads * n * dv]);
    let mut steps = |state: &mut [f32], from: usize, to: usize| {
        exec.workers.split2(heads, state, dk * dv, out_by_head, n * dv, &|i, state, o| {
            let key = i % key_heads; // value heads are tiled over key heads in GGUF's order
            for (t, o) in o.chunks_exact_mut(dv).enumerate().take(to).skip(from) {
                let x = &x[t * channels..][..channels];
                let (q, k, v) = (&x[key * dk..][..dk], &x[keys + key * dk..][..dk], &x[2 * keys + i * dv..][..dv]);
                (ks.delta_step)(state, q, k, v, decay[t * heads + i], rate[t * heads + i], o);
            }
        });
    };
    if let Some(k) = save {
        steps(state, 0, k);
        e.state.saved_delta[part].copy_from_slice(state);
    }
    steps(state, save.unwrap_or(0), n);

    // Norm first, gate afterwards.
    let (by_head, z, norm) = (&*s.c, &mut s.b[..n * inner], norm.f32(r));
    exec.workers.split2(n * inner / dv, &mut s.o[..n * inner], dv, z, dv, &|i, o, z| {
        let (t, head) = (i / heads, i % heads);
        (ks.rms_norm)(o, &by_head[(head * n + t) * dv..][..dv], norm, c.rms_eps);
        (ks.silu_mul)(z, o);
        o.copy_from_slice(z);
    });
    exec.matmul(out, out.bytes(r), &s.o[..n * inner], &mut p, s.out);
}

/// `s.out = down(silu(gate x) ⊙ up x)` on `s.norm`.
pub(crate) fn dense(exec: &Exec<'_>, resident: &[u8], w: &Swiglu, n: usize, s: &mut TextScratch<'_>) {
    let (h, inner) = (w.gate.cols, w.gate.rows);
    let x = &s.norm[..n * h];
    let mut p = Products { turned: s.turned, q8: s.q8 };
    exec.together([&w.gate, &w.up], resident, x, &mut p, [s.a, s.b]);
    let up = &*s.b;
    exec.each_row(&mut s.a[..n * inner], inner, |t, row| (exec.ks.silu_mul)(row, &up[t * inner..][..inner]));
    exec.matmul(&w.down, w.down.bytes(resident), &s.a[..n * inner], &mut p, s.out);
}
