//! One model, ready to run: prefill, decode, logits.
//!
//! Relies on a [`Plan`] whose buffers were taken before. Follows the determinism contract: logits depend on tokens,
//! positions and weights alone, never on slots, arrival order, threads or chunks.

use crate::buffers::{State, TextScratch};
use crate::cache::{ExpertCache, Shape};
use crate::config::Config;
pub use crate::error::EngineError;
use crate::exec::Exec;
use crate::lookahead::Recall;
use crate::moe::{Moe, SumOrder};
use crate::plan::{KvType, Plan, TextSizes};
use crate::ports::{Clock, Storage, Workers};
use crate::prefix::Reach;
use crate::stream::Window;
use crate::text;
use crate::weights::Weights;
use alloc::vec::Vec;
use forerun_kernels::{KernelSet, dequantize_row};

/// What the expert cache and the lookahead did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts asked for that were in a slot.
    pub hits: u64,
    /// Experts asked for that had to be read.
    pub misses: u64,
    /// Experts read ahead because the next layer's router asked for them.
    pub predicted: u64,
    /// Of these, used by the next layer, whether landed (a hit) or still under way (late).
    pub predicted_used: u64,
    /// Of those used, the ones still under way.
    pub predicted_late: u64,
    /// Of those predicted, the ones the next layer did not use.
    pub predicted_wasted: u64,
    /// Experts that would have been read ahead, but their layer chose before their turn came.
    pub predicted_cancelled: u64,
    /// Bytes read on demand.
    pub bytes_demand: u64,
    /// Bytes read ahead.
    pub bytes_predicted: u64,
    /// Bytes that arrived, for whatever reason.
    pub bytes_landed: u64,
    /// Time spent waiting for reads, microseconds.
    pub stall_us: u64,
    /// The longest wait, microseconds.
    pub stall_max_us: u64,
    /// Tokens computed.
    pub tokens: u64,
    /// Crops that went through the vision tower.
    pub crops: u64,
}

/// Hears what happens inside a step. Every method does nothing unless replaced.
pub trait Observer {
    /// Whether logits are wanted for every token, not only the last of a prompt.
    fn wants_all_logits(&self) -> bool {
        false
    }

    /// Input of layer `layer` for tokens `first..`, `(tokens, hidden)`; `layer` equal to the number of layers is the last
    /// layer's output.
    fn hidden(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }

    /// Router input of `layer` for tokens `first..`, `(tokens, hidden)`.
    fn router_input(&mut self, layer: usize, first: usize, x: &[f32]) {
        let _ = (layer, first, x);
    }

    /// Experts and weights that `layer` chose for `token`, largest weight first.
    fn routed(&mut self, layer: usize, token: usize, experts: &[u16], weights: &[f32]) {
        let _ = (layer, token, experts, weights);
    }

    /// Measurements only: may put other experts in the place of those that `layer` chose for `token`.
    fn reroute(&mut self, layer: usize, token: usize, experts: &mut [u16]) {
        let _ = (layer, token, experts);
    }

    /// Measurements only: may put other candidates in the place of those that are foreseen for `layer`, likeliest first,
    /// when `token` comes alone.
    fn foresee(&mut self, layer: usize, token: usize, candidates: &mut [u16]) {
        let _ = (layer, token, candidates);
    }

    /// Asked between the chunks of an input: whether to stop with [`EngineError::Cancelled`].
    fn cancelled(&mut self) -> bool {
        false
    }

    /// Logits after `token`.
    fn logits(&mut self, token: usize, logits: &[f32]) {
        let _ = (token, logits);
    }
}

/// Hears nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {}

/// Tokens and their positions.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// T, H and W of each token.
    pub positions: [&'a [u32]; 3],
}

/// When an expert is compared with its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checksums {
    /// When it is first read: finds a damaged file.
    First,
    /// Whenever it is read: finds a failing cable or memory, too.
    Always,
    /// Not at all.
    Never,
}

/// What may be changed between runs without changing a bit of the result (except by [`SumOrder::Arrival`]).
#[derive(Debug, Clone, Copy)]
pub struct Tuning {
    /// Read ahead what the next layer's router asks for.
    pub predict: bool,
    /// When experts are compared with their checksums.
    pub checksums: Checksums,
    /// Order in which experts are summed.
    pub sum_order: SumOrder,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { predict: true, checksums: Checksums::First, sum_order: SumOrder::Router }
    }
}

/// A model with its buffers, slots and state.
pub struct Engine<'a, S: Storage> {
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a Weights,
    pub(crate) resident: &'a [u8],
    pub(crate) exec: Exec<'a>,
    pub(crate) state: State<'a>,
    pub(crate) moe: Option<Moe<'a>>,
    /// Where the vision tower streams through, if it does.
    pub(crate) window: Option<Window>,
    pub(crate) storage: S,
    text_sizes: TextSizes,
    row: Vec<u8>,
    pub(crate) kv_type: KvType,
    pub(crate) context: usize,
    chunk: usize,
    pub(crate) patches_max: usize,
    /// Tokens in the state, and visual features they used.
    pub(crate) reach: Reach,
    /// Those of the saved state.
    pub(crate) saved: Option<Reach>,
    /// Whether there is room for one.
    pub(crate) saves: bool,
    /// Whether a chunk failed and its reads may still be under way.
    torn: bool,
    /// Visual features in the buffer.
    pub(crate) features: usize,
    tokens: u64,
    pub(crate) crops: u64,
}

impl<'a, S: Storage> Engine<'a, S> {
    /// Puts a model together. `block` has [`Plan::block_elems`] elements, `storage` the plan's slots; `resident` holds
    /// the first [`Plan::resident_bytes`] of the resident region, on a 4 KiB boundary.
    ///
    /// # Panics
    /// If a buffer is not as the plan says.
    #[allow(clippy::too_many_arguments)] // each is a different thing, given once
    pub fn new(
        config: &'a Config,
        weights: &'a Weights,
        plan: &Plan,
        resident: &'a [u8],
        block: &'a mut [f32],
        storage: S,
        workers: &'a dyn Workers,
        kernels: &'static KernelSet,
        clock: &'a dyn Clock,
        tuning: Tuning,
    ) -> Self {
        assert_eq!(resident.len(), plan.resident_bytes, "resident region");
        assert!(block.len() >= plan.block_elems(), "block of the plan");
        assert!(
            storage.slots() >= plan.storage_slots() && storage.slot_bytes() >= plan.slot_bytes,
            "slots of the plan"
        );
        let moe = config.text.moe().map(|m| {
            let shape = Shape { layers: weights.banks.len(), experts: m.experts, top_k: m.top_k };
            let mut cache = ExpertCache::new(plan.slots, shape);
            for (layer, bank) in weights.banks.iter().enumerate() {
                // The time of a read is that of its bytes.
                cache.set_cost(layer, bank.stride as f32 / plan.slot_bytes as f32);
            }
            Moe::new(config, weights, storage.depth_max(), cache, clock, kernels.crc32c, tuning, plan.options.chunk)
        });
        let window = weights.vision.as_ref().filter(|_| plan.window_slots > 0);
        let window = window.map(|w| Window::new(plan.slots, plan.slot_bytes, &w.order, kernels, tuning.checksums));
        let (embedding, _) = weights.embedding;
        let mut e = Self {
            config,
            weights,
            resident,
            exec: Exec { ks: kernels, workers },
            state: State::carve(block, plan),
            moe,
            window,
            storage,
            text_sizes: TextSizes::new(config, plan.options.chunk),
            row: alloc::vec![0; config.text.hidden / embedding.block_elems() * embedding.block_bytes()],
            kv_type: plan.options.kv,
            context: plan.options.context,
            chunk: plan.options.chunk,
            patches_max: plan.patches_max,
            reach: Reach::default(),
            saved: None,
            saves: plan.options.prefix,
            torn: false,
            features: 0,
            tokens: 0,
            crops: 0,
        };
        e.reset();
        e
    }

    /// Reads experts ahead of any token until all are in memory, or the slots are full. One that cannot be read or differs from
    /// its checksum is left out, read again when a token chooses it, and an error then.
    ///
    /// # Errors
    /// If the storage does not answer.
    pub fn preload(&mut self) -> Result<(), EngineError> {
        self.settle()?;
        self.moe.as_mut().map_or(Ok(()), |m| m.preload(&mut self.storage))
    }

    /// Finds out how many reads in flight keep the storage busy, and does with that many from then on. It takes 72
    /// to 216 reads of experts, fewer where there are few slots; they stay.
    ///
    /// # Errors
    /// As [`Engine::preload`].
    pub fn probe(&mut self) -> Result<(), EngineError> {
        self.settle()?;
        self.moe.as_mut().map_or(Ok(()), |m| m.probe(&mut self.storage))
    }

    /// Bytes per second that the storage delivers to `reads` reads of experts that are in no slot; others for each `round`.
    /// They take the place of what is in the slots.
    ///
    /// # Errors
    /// As [`Engine::preload`].
    pub fn device_rate(&mut self, reads: usize, round: u32) -> Result<f64, EngineError> {
        self.settle()?;
        self.moe.as_mut().map_or(Ok(0.0), |m| m.device_rate(&mut self.storage, reads, round))
    }

    /// Empties all expert slots, after which everything is read again.
    pub fn forget_experts(&mut self) {
        if let Some(m) = &mut self.moe {
            m.forget(&mut self.storage);
        }
    }

    /// How many experts of single tokens were foreseen, for each layer. What the router of a layer will choose is foreseen
    /// from the input of the router before; the first layer has none before it, and of it only experts that are in no slot
    /// are foreseen, from what earlier tokens chose.
    pub fn recall(&self) -> &[Recall] {
        self.moe.as_ref().map_or(&[], Moe::recall)
    }

    /// Most reads in flight.
    pub fn depth(&self) -> usize {
        self.moe.as_ref().map_or(0, Moe::depth)
    }

    /// Waits for reads of the vision tower that a hung device still has, before anything else is read.
    pub(crate) fn settle(&mut self) -> Result<(), EngineError> {
        let (Some(window), Some(w)) = (&mut self.window, &self.weights.vision) else { return Ok(()) };
        window.settle(&mut self.storage, &w.order)
    }

    /// Forgets all tokens, the saved state and visual features. Experts stay in their slots.
    pub fn reset(&mut self) {
        self.forget();
        self.features = 0;
        self.abandon();
    }

    /// Lets go of what a failed chunk had asked for.
    fn abandon(&mut self) {
        self.torn = false;
        if let Some(m) = &mut self.moe {
            m.abandon(&mut self.storage);
        }
    }

    /// Tokens in the state.
    pub fn len(&self) -> usize {
        self.reach.len
    }

    /// Whether no token is in the state.
    pub fn is_empty(&self) -> bool {
        self.reach.len == 0
    }

    /// Tokens that fit.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Counts since the engine was made.
    pub fn counters(&self) -> Counters {
        let of_experts = self.moe.as_ref().map_or_else(Counters::default, |m| m.counters);
        Counters { tokens: self.tokens, crops: self.crops, ..of_experts }
    }

    /// Logits of the last token `(vocab)`.
    pub fn logits(&self) -> &[f32] {
        self.state.logits
    }

    /// The visual features computed so far `(visual tokens, hidden)`.
    pub fn visual_features(&self) -> &[f32] {
        &self.state.features[..self.features * self.config.text.hidden]
    }

    /// Computes `input` after the tokens that are already there, chunk by chunk, and leaves the logits of its last token.
    ///
    /// # Errors
    /// If it does not fit, a token is unknown, or placeholders have no features; the state is then as it was. If an expert
    /// or row cannot be read or is damaged; the state is then the saved one, or empty if nothing is saved.
    ///
    /// # Panics
    /// If ids and positions differ in length.
    pub fn run(&mut self, input: Input<'_>, observer: &mut dyn Observer) -> Result<(), EngineError> {
        self.run_saving(input, None, observer)
    }

    /// [`Engine::run`] that saves the state after the first `save` tokens of `input` on the way, in place of what was saved
    /// before. Saves nothing if the plan has no room.
    ///
    /// # Errors
    /// Those of [`Engine::run`]. If the failed chunk was the one to save in, nothing is saved any more.
    ///
    /// # Panics
    /// If ids and positions differ in length, or `save` is over that.
    pub fn run_saving(
        &mut self,
        input: Input<'_>,
        save: Option<usize>,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let n = input.ids.len();
        assert!(input.positions.iter().all(|p| p.len() == n), "a position for each token");
        assert!(save.is_none_or(|k| k <= n), "saved within the input");
        let save = save.filter(|_| self.saves);
        let need = self.reach.len + n;
        if need > self.context {
            return Err(EngineError::ContextFull { need, context: self.context });
        }
        if let Some(&t) = input.ids.iter().find(|&&t| t as usize >= self.config.text.vocab) {
            return Err(EngineError::Token(t));
        }
        let placeholders = self.visual(input.ids);
        if placeholders > 0 && self.reach.features + placeholders > self.features {
            return Err(EngineError::Features { placeholders, features: self.features - self.reach.features });
        }
        if self.torn {
            self.abandon();
        }
        self.settle()?;
        for start in (0..n).step_by(self.chunk) {
            if start > 0 && observer.cancelled() {
                return Err(EngineError::Cancelled);
            }
            let end = (start + self.chunk).min(n);
            let last = end == n;
            // The chunk that has the last token to save; the first one if that was there before.
            let here = save.filter(|&k| (start < k || start == 0) && k <= end).map(|k| k - start);
            let part = Input { ids: &input.ids[start..end], positions: input.positions.map(|p| &p[start..end]) };
            if let Err(e) = self.chunk(part, here, last, observer) {
                // Its reads are let go of when more is computed: the device may be why it failed, and not answer now.
                self.torn = true;
                self.rewind();
                return Err(e);
            }
        }
        Ok(())
    }

    fn chunk(
        &mut self,
        input: Input<'_>,
        save: Option<usize>,
        last: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let n = input.ids.len();
        let h = self.config.text.hidden;
        let saved = save
            .map(|k| Reach { len: self.reach.len + k, features: self.reach.features + self.visual(&input.ids[..k]) });
        if saved.is_some() {
            // Until all layers have copied theirs.
            self.saved = None;
        }
        // Taken out so that the buffers inside can be borrowed beside the rest of the state; put back below.
        let work = core::mem::take(&mut self.state.work);
        let mut s = TextScratch::carve(&mut *work, &self.text_sizes);
        let result = self.embed(input.ids, &mut s.x[..n * h]).and_then(|()| {
            text::rope_table(&self.config.text, input.positions, s.rope);
            self.layers(n, save, &mut s, observer)?;
            self.logits_of(n, last, &mut s, observer);
            Ok(())
        });
        self.state.work = work;
        result?;
        self.reach.len += n;
        self.tokens += n as u64;
        self.saved = saved.or(self.saved);
        Ok(())
    }

    /// Placeholders among `ids`.
    fn visual(&self, ids: &[u32]) -> usize {
        let t = &self.config.tokens;
        ids.iter().filter(|&&id| id == t.image || id == t.video).count()
    }

    /// All layers for `n` tokens; the state after the first `save` of them is saved.
    fn layers(
        &mut self,
        n: usize,
        save: Option<usize>,
        s: &mut TextScratch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let h = self.config.text.hidden;
        let (mut attention, mut delta) = (0, 0);
        for (l, layer) in self.weights.layers.iter().enumerate() {
            observer.hidden(l, self.reach.len, &s.x[..n * h]);
            text::norm(self, layer.attn_norm, n, s);
            text::mixer(self, layer, self.reach.len, n, save, (&mut attention, &mut delta), s);
            if let Some(m) = &mut self.moe {
                m.pump(&mut self.storage)?;
            }
            self.exec.each_row(&mut s.x[..n * h], h, |t, row| (self.exec.ks.axpy)(1.0, &s.out[t * h..][..h], row));
            text::norm(self, layer.ffn_norm, n, s);
            observer.router_input(l, self.reach.len, &s.norm[..n * h]);
            match (&layer.ffn, &mut self.moe) {
                (crate::weights::FfnWeights::Dense(w), _) => text::dense(&self.exec, self.resident, w, n, s),
                (crate::weights::FfnWeights::Moe { .. }, Some(moe)) => {
                    moe.layer(&self.exec, self.resident, &mut self.storage, l, self.reach.len, n, s, observer)?;
                }
                // `new` makes a mixture for every configuration that has one.
                (crate::weights::FfnWeights::Moe { .. }, None) => unreachable!("experts without a mixture"),
            }
            self.exec.each_row(&mut s.x[..n * h], h, |t, row| (self.exec.ks.axpy)(1.0, &s.out[t * h..][..h], row));
        }
        observer.hidden(self.weights.layers.len(), self.reach.len, &s.x[..n * h]);
        if let Some(m) = &mut self.moe {
            m.end_tokens(n);
        }
        Ok(())
    }

    fn logits_of(&mut self, n: usize, last: bool, s: &mut TextScratch<'_>, observer: &mut dyn Observer) {
        let all = observer.wants_all_logits();
        let first = match (all, last) {
            (true, _) => 0,
            (false, true) => n - 1,
            (false, false) => return,
        };
        text::norm(self, self.weights.output_norm, n, s);
        let h = self.config.text.hidden;
        let head = &self.weights.output;
        for t in first..n {
            let mut p = crate::exec::Products { turned: s.turned, q8: s.q8 };
            self.exec.matmul(head, head.bytes(self.resident), &s.norm[t * h..][..h], &mut p, self.state.logits);
            observer.logits(self.reach.len + t, self.state.logits);
        }
    }

    /// Rows of the embedding, or visual features where a placeholder stands.
    fn embed(&mut self, ids: &[u32], x: &mut [f32]) -> Result<(), EngineError> {
        let h = self.config.text.hidden;
        let (block, offset) = self.weights.embedding;
        let tokens = &self.config.tokens;
        for (&id, x) in ids.iter().zip(x.chunks_exact_mut(h)) {
            if id == tokens.image || id == tokens.video {
                x.copy_from_slice(&self.state.features[self.reach.features * h..][..h]);
                self.reach.features += 1;
                continue;
            }
            let at = offset + u64::from(id) * self.row.len() as u64;
            let inside = at.checked_sub(self.weights.resident_offset).map(|a| a as usize);
            match inside.and_then(|a| self.resident.get(a..a + self.row.len())) {
                Some(row) => dequantize_row(block, row, x),
                None => {
                    let read = self.storage.read_at(at, &mut self.row);
                    read.map_err(|error| EngineError::Embedding { token: id, error })?;
                    dequantize_row(block, &self.row, x);
                }
            }
        }
        Ok(())
    }
}
