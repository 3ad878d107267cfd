//! Carves the one block of f32 that a run takes into the engine's buffers.

use crate::plan::{Plan, TextSizes, VisionSizes};

/// State that outlives a chunk.
pub(crate) struct State<'a> {
    /// `(attention layers, 2, kv_heads, context, head_dim)`, keys then values, as f32 or two halves a word.
    pub kv: &'a mut [f32],
    /// `(delta layers, value_heads, key_dim, value_dim)`.
    pub delta: &'a mut [f32],
    /// `(delta layers, conv_width - 1, channels)`: inputs before the convolution, oldest first.
    pub conv: &'a mut [f32],
    /// Copy of `delta`; empty if the plan has no room for a saved state.
    pub saved_delta: &'a mut [f32],
    /// Copy of `conv`; empty likewise.
    pub saved_conv: &'a mut [f32],
    /// `(visual tokens, hidden)`.
    pub features: &'a mut [f32],
    /// `(vocab)`, of the last token.
    pub logits: &'a mut [f32],
    /// Shared by text and vision, which never run together.
    pub work: &'a mut [f32],
}

impl<'a> State<'a> {
    pub fn carve(block: &'a mut [f32], plan: &Plan) -> Self {
        let s = &plan.sizes;
        let mut cut = Cutter(block);
        Self {
            kv: cut.take(s.kv),
            delta: cut.take(s.delta),
            conv: cut.take(s.conv),
            saved_delta: cut.take(s.saved_delta),
            saved_conv: cut.take(s.saved_conv),
            features: cut.take(s.features),
            logits: cut.take(s.logits),
            work: cut.take(s.work),
        }
    }
}

/// Activations of a chunk of `n` tokens. Sizes in [`TextSizes`].
pub(crate) struct TextScratch<'a> {
    /// Residual stream `(n, hidden)`.
    pub x: &'a mut [f32],
    /// Normalised input of a mixer or of router and experts `(n, hidden)`.
    pub norm: &'a mut [f32],
    /// What a mixer or the experts add to the stream `(n, hidden)`.
    pub out: &'a mut [f32],
    /// Widest projections: q, k, v of the delta rule; queries and gates; MLP gate.
    pub a: &'a mut [f32],
    /// z of the delta rule; keys; MLP up.
    pub b: &'a mut [f32],
    /// Values; the delta rule's output by head.
    pub c: &'a mut [f32],
    /// Heads' output by token.
    pub o: &'a mut [f32],
    /// alpha and beta of the delta rule `(2, n, value_heads)`.
    pub heads: &'a mut [f32],
    pub turned: &'a mut [f32],
    pub q8: &'a mut [f32],
    /// cos and sin `(n, 2, rope_dim / 2)`.
    pub rope: &'a mut [f32],
    /// Router logits `(n, experts)`, weights `(n, top_k)`, logits of a prediction `(experts)`.
    pub router: &'a mut [f32],
    /// `(n, top_k, hidden)`.
    pub expert_out: &'a mut [f32],
    pub gather: &'a mut [f32],
    pub gather_q8: &'a mut [f32],
    pub expert_a: &'a mut [f32],
    pub expert_b: &'a mut [f32],
    pub expert_q8: &'a mut [f32],
}

impl<'a> TextScratch<'a> {
    pub fn carve(work: &'a mut [f32], sizes: &TextSizes) -> Self {
        let mut cut = Cutter(work);
        Self {
            x: cut.take(sizes.x),
            norm: cut.take(sizes.norm),
            out: cut.take(sizes.out),
            a: cut.take(sizes.a),
            b: cut.take(sizes.b),
            c: cut.take(sizes.c),
            o: cut.take(sizes.o),
            heads: cut.take(sizes.heads),
            turned: cut.take(sizes.turned),
            q8: cut.take(sizes.q8),
            rope: cut.take(sizes.rope),
            router: cut.take(sizes.router),
            expert_out: cut.take(sizes.expert_out),
            gather: cut.take(sizes.gather),
            gather_q8: cut.take(sizes.gather_q8),
            expert_a: cut.take(sizes.expert_a),
            expert_b: cut.take(sizes.expert_b),
            expert_q8: cut.take(sizes.expert_q8),
        }
    }
}

/// Activations of one crop. Sizes in [`VisionSizes`].
pub(crate) struct VisionScratch<'a> {
    /// Eight buffers of `(patches, hidden)`.
    pub wide: [&'a mut [f32]; VisionSizes::WIDE],
    /// `(patches, inner)`.
    pub inner: &'a mut [f32],
    pub turned: &'a mut [f32],
    /// `(patches, 3 · patch²)`.
    pub patches: &'a mut [f32],
    pub q8: &'a mut [f32],
}

impl<'a> VisionScratch<'a> {
    pub fn carve(work: &'a mut [f32], s: &VisionSizes) -> Self {
        let mut cut = Cutter(work);
        Self {
            wide: core::array::from_fn(|_| cut.take(s.wide)),
            inner: cut.take(s.inner),
            turned: cut.take(s.turned),
            patches: cut.take(s.patches),
            q8: cut.take(s.q8),
        }
    }
}

struct Cutter<'a>(&'a mut [f32]);

impl<'a> Cutter<'a> {
    fn take(&mut self, n: usize) -> &'a mut [f32] {
        let (head, rest) = core::mem::take(&mut self.0).split_at_mut(lines(n));
        self.0 = rest;
        &mut head[..n]
    }
}

/// `n` f32 filled up to whole cache lines of 64 bytes, so that every buffer starts on one.
pub(crate) const fn lines(n: usize) -> usize {
    n.next_multiple_of(16)
}
