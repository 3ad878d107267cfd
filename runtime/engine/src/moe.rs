//! The mixture of experts of one layer: route, read what is missing, look ahead, compute as it lands, sum in router order.
//!
//! Relies on [`Storage`] for bytes and [`ExpertCache`] for slots. Prediction moves data early; it never changes routing.

mod fetch;

use crate::buffers::TextScratch;
use crate::cache::{ExpertCache, Place};
use crate::config::Config;
use crate::engine::{Checksums, Counters, EngineError, Observer, Tuning};
use crate::exec::{Exec, Part, Products, q8_words};
use crate::lookahead::{Lookahead, Recall};
use crate::ports::{Clock, Read, Storage};
use crate::router::{TOP_K_MAX, choose, top_k};
use crate::text;
use crate::weights::{FfnWeights, Matrix, Weights, expert_matrices};
use alloc::{vec, vec::Vec};
use forerun_format::BlockType;
use forerun_kernels::{Columns, math, wants_q8};

/// Part of a read that is still to come when a layer chooses while it is under way, with some more for caution: what a busy
/// device is given to do ahead takes from what is needed.
const LATE: f32 = 0.75;
/// Tokens of a chunk that say what its next layer may want.
const VOTERS: usize = 16;

/// Order in which a token's experts are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SumOrder {
    /// By weight, as the router listed them: the only order that gives the same bits every time.
    Router,
    /// As they were computed. A deliberate fault: it lets `verify` show that it would notice.
    Arrival,
}

/// Experts, slots and the books of one step. Nothing here grows after it is made.
pub(crate) struct Moe<'a> {
    config: &'a Config,
    weights: &'a Weights,
    cache: ExpertCache,
    lookahead: Lookahead,
    clock: &'a dyn Clock,
    crc32c: fn(&[u8]) -> u32,
    tuning: Tuning,
    pub counters: Counters,
    /// Matrices inside an expert, for each layer.
    matrices: Vec<[Matrix; 3]>,
    experts: usize,
    top_k: usize,
    /// Most reads in flight: no more than the device needs to be busy, so that what is wanted next is not behind the rest.
    depth: usize,
    in_flight: usize,
    /// Experts that need no comparison (any more).
    verified: Vec<bool>,
    /// Experts whose checksum was wrong once.
    suspect: Vec<bool>,
    /// `(tokens, top_k)`: chosen experts, largest weight first.
    chosen: Vec<u16>,
    /// `(tokens, top_k)`: row of `expert_out` that holds each one's result; rows are in the order of computation.
    computed: Vec<u32>,
    /// Picks (`token * top_k + k`) grouped by expert; those of expert `e` are `starts[e]..starts[e + 1]`.
    picks: Vec<u32>,
    starts: Vec<u32>,
    /// Layer at hand.
    layer: usize,
    /// Experts of this layer that are in a slot and not computed yet.
    ready: Vec<u16>,
    /// Experts of this layer that are in no slot; the first `asked` of them have been asked for.
    missing: Vec<u16>,
    asked: usize,
    /// Experts of this layer that have been asked for, now or ahead, and have not landed.
    awaited: usize,
    /// When this layer chose.
    chose_us: Option<u64>,
    /// Reads that were under way then.
    late: usize,
    /// Reads that the device ended since, as far as is known: of those under way half was done, on average.
    landed: f32,
    batch: Vec<Read>,
    /// `(experts)`: what speaks for each expert of the next layer.
    votes: Vec<f32>,
}

/// Heap bytes of the books beside the cache's own, for chunks of `chunk` tokens.
pub(crate) fn heap_bytes(layers: usize, experts: usize, top_k: usize, chunk: usize) -> usize {
    layers * (experts * 2 + size_of::<[Matrix; 3]>())
        + chunk * top_k * 10
        + experts * 12
        + Lookahead::heap_bytes(layers, top_k)
}

impl<'a> Moe<'a> {
    #[allow(clippy::too_many_arguments)] // one call site
    pub fn new(
        config: &'a Config,
        weights: &'a Weights,
        depth: usize,
        cache: ExpertCache,
        clock: &'a dyn Clock,
        crc32c: fn(&[u8]) -> u32,
        tuning: Tuning,
        chunk: usize,
    ) -> Self {
        let layers = weights.banks.len();
        let (experts, top_k) = config.text.moe().map_or((0, 0), |m| (m.experts, m.top_k));
        Self {
            config,
            weights,
            cache,
            lookahead: Lookahead::new(layers, top_k),
            clock,
            crc32c,
            tuning,
            counters: Counters::default(),
            // Checked when the weights were read.
            matrices: (0..layers).filter_map(|l| expert_matrices(config, l)).map(|(m, _)| m).collect(),
            experts,
            top_k,
            depth,
            in_flight: 0,
            verified: vec![tuning.checksums == Checksums::Never; layers * experts],
            suspect: vec![false; layers * experts],
            chosen: vec![0; chunk * top_k],
            computed: vec![0; chunk * top_k],
            picks: vec![0; chunk * top_k],
            starts: vec![0; experts + 1],
            layer: 0,
            ready: Vec::with_capacity(experts),
            missing: Vec::with_capacity(experts),
            asked: 0,
            awaited: 0,
            chose_us: None,
            late: 0,
            landed: 0.0,
            batch: Vec::with_capacity(depth),
            votes: vec![0.0; experts],
        }
    }

    /// How well each layer was foreseen.
    pub fn recall(&self) -> &[Recall] {
        self.lookahead.recall()
    }

    /// Most reads in flight.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// `n` tokens went through all layers.
    pub fn end_tokens(&mut self, n: usize) {
        (0..n).for_each(|_| self.cache.end_token());
    }

    /// `s.out` = experts and shared expert of layer `l` on the router input `s.norm` of `n` tokens, of which the first has
    /// index `first`.
    #[allow(clippy::too_many_arguments)] // one call site
    pub fn layer(
        &mut self,
        exec: &Exec<'_>,
        resident: &[u8],
        storage: &mut impl Storage,
        l: usize,
        first: usize,
        n: usize,
        s: &mut TextScratch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let FfnWeights::Moe { router, shared_gate, shared } = &self.weights.layers[l].ffn else { return Ok(()) };
        self.route(exec, resident, router, n, s);
        let (_, weights) = s.router.split_at(n * self.experts);
        for t in 0..n {
            let at = t * self.top_k..(t + 1) * self.top_k;
            observer.reroute(l, first + t, &mut self.chosen[at.clone()]);
            observer.routed(l, first + t, &self.chosen[at.clone()], &weights[at]);
        }
        self.group(n);
        self.settle(l, n);
        self.cache.route(l, &self.chosen[..n * self.top_k]);
        self.find(l);
        self.pump(storage)?;
        if self.tuning.predict {
            self.look_ahead(exec, resident, l, first, n, s, observer);
            self.ask(storage);
        }

        // The shared expert runs while the reads are under way.
        text::dense(exec, resident, shared, n, s);
        let gate = Matrix { block: BlockType::F32, rows: 1, cols: shared_gate.len, at: shared_gate.at };
        let h = self.config.text.hidden;
        let mut p = Products { turned: s.turned, q8: s.q8 };
        exec.matmul(&gate, gate.bytes(resident), &s.norm[..n * h], &mut p, s.heads);
        let gates = &*s.heads;
        exec.each_row(&mut s.out[..n * h], h, |t, row| {
            let g = math::sigmoid(gates[t]);
            row.iter_mut().for_each(|x| *x *= g);
        });

        self.compute(exec, storage, l, n, s)?;
        self.sum(exec, n, s);
        Ok(())
    }

    fn route(&mut self, exec: &Exec<'_>, resident: &[u8], router: &Matrix, n: usize, s: &mut TextScratch<'_>) {
        let (e, k, h) = (self.experts, self.top_k, self.config.text.hidden);
        let (logits, rest) = s.router.split_at_mut(n * e);
        let mut p = Products { turned: s.turned, q8: s.q8 };
        exec.matmul(router, router.bytes(resident), &s.norm[..n * h], &mut p, logits);
        for (t, logits) in logits.chunks_exact_mut(e).enumerate() {
            choose(logits, &mut self.chosen[t * k..][..k], &mut rest[t * k..][..k]);
        }
    }

    /// Layer `l` has chosen: lets the lookahead learn from it.
    fn settle(&mut self, l: usize, n: usize) {
        self.layer = l;
        let now = self.clock.now_us();
        // What was under way when the layer before chose kept the device from what that layer needed.
        let reads = self.missing.len() as f32 + LATE * self.late as f32;
        let since = self.chose_us.replace(now).map(|then| ((now - then) as f32, reads));
        self.late = self.in_flight;
        self.landed = -0.5 * self.late as f32;
        let starts = &self.starts;
        let is_chosen = |e| starts[usize::from(e) + 1] > starts[usize::from(e)];
        let (cache, first) = (&self.cache, (l * self.experts) as u32);
        let was_absent = |e| match cache.place(first + u32::from(e)) {
            Place::Absent => true,
            Place::Loading(slot) | Place::Ready(slot) => cache.is_predicted(slot),
        };
        self.counters.predicted_cancelled += self.lookahead.settle(l, n > 1, since, is_chosen, was_absent);
    }

    /// Finds candidates for the layer after `l`: what its router says of this layer's router input, by token or, for a
    /// chunk, by the votes of some of its tokens. After the last layer comes the first one of the next token, of which
    /// nothing is known yet: what the cache would rather have.
    #[allow(clippy::too_many_arguments)] // one call site
    fn look_ahead(
        &mut self,
        exec: &Exec<'_>,
        resident: &[u8],
        l: usize,
        first: usize,
        n: usize,
        s: &mut TextScratch<'_>,
        observer: &mut dyn Observer,
    ) {
        let next = (l + 1) % self.weights.layers.len();
        let wanted = self.lookahead.wants(next, n > 1);
        if wanted == 0 {
            return;
        }
        if next == 0 {
            if n == 1 {
                self.cache.best_absent(0, wanted, self.lookahead.start(0, false));
            }
            return;
        }
        let FfnWeights::Moe { router, .. } = &self.weights.layers[next].ffn else { return };
        let (e, k, h) = (self.experts, self.top_k, self.config.text.hidden);
        let logits = &mut s.router[n * (e + k)..][..e];
        let mut p = Products { turned: s.turned, q8: s.q8 };
        let votes = &mut self.votes[..];
        votes.fill(0.0);
        let voters = n.min(VOTERS);
        for i in 0..voters {
            let t = i * n / voters;
            exec.matmul(router, router.bytes(resident), &s.norm[t * h..][..h], &mut p, logits);
            if n > 1 {
                let mut best = [0u16; TOP_K_MAX];
                top_k(logits, &mut best[..k]);
                best[..k].iter().for_each(|&e| votes[usize::from(e)] += 1.0);
            } else {
                votes.copy_from_slice(logits);
            }
        }
        let candidates = self.lookahead.start(next, n > 1);
        candidates.resize(wanted.min(e), 0);
        top_k(votes, candidates);
        if n > 1 {
            candidates.retain(|&e| votes[usize::from(e)] > 0.0);
        } else {
            observer.foresee(next, first, candidates);
        }
    }

    /// Sorts the picks by expert, keeping the order of tokens.
    fn group(&mut self, n: usize) {
        let chosen = &self.chosen[..n * self.top_k];
        self.starts.fill(0);
        for &e in chosen {
            self.starts[usize::from(e) + 1] += 1;
        }
        for e in 0..self.experts {
            self.starts[e + 1] += self.starts[e];
        }
        // Filling moves each start to its end, which is the next one's start; shift them back after.
        for (i, &e) in chosen.iter().enumerate() {
            let at = &mut self.starts[usize::from(e)];
            self.picks[*at as usize] = i as u32;
            *at += 1;
        }
        self.starts.copy_within(0..self.experts, 1);
        self.starts[0] = 0;
    }

    fn count(&self, e: usize) -> u32 {
        self.starts[e + 1] - self.starts[e]
    }

    fn id(&self, l: usize, e: usize) -> u32 {
        (l * self.experts + e) as u32
    }

    /// Computes this layer's experts: those in slots first, then others as they land.
    fn compute(
        &mut self,
        exec: &Exec<'_>,
        storage: &mut impl Storage,
        l: usize,
        n: usize,
        s: &mut TextScratch<'_>,
    ) -> Result<(), EngineError> {
        let wanted = n * self.top_k;
        let mut done = 0;
        while done < wanted {
            if self.ready.is_empty() {
                self.pump(storage)?;
                if self.ready.is_empty() {
                    self.land(storage, true)?;
                    // The device is to go on before anything is computed.
                    self.pump(storage)?;
                }
                continue;
            }
            // One token takes all that are here at once; a chunk has enough work in each.
            let from = if n == 1 { 0 } else { self.ready.len() - 1 };
            if n == 1 {
                self.run_token(exec, l, storage, done, s);
            } else {
                self.run_chunk(exec, l, storage, done, s);
            }
            for i in from..self.ready.len() {
                let e = usize::from(self.ready[i]);
                done += self.count(e) as usize;
                self.cache.release(self.slot(l, e));
            }
            self.ready.truncate(from);
            self.pump(storage)?;
        }
        Ok(())
    }

    /// Slot of an expert that is ready.
    fn slot(&self, l: usize, e: usize) -> u32 {
        match self.cache.place(self.id(l, e)) {
            Place::Ready(slot) => slot,
            _ => unreachable!("a ready expert is held until it was computed"),
        }
    }

    /// The ready experts on the one token, as three jobs: `expert_out[done..] = down(silu(gate x) ⊙ up x)`.
    fn run_token(&mut self, exec: &Exec<'_>, l: usize, storage: &impl Storage, done: usize, s: &mut TextScratch<'_>) {
        let [gate, up, down] = self.matrices[l];
        let (h, inner) = (gate.cols, gate.rows);
        let m = self.ready.len();
        let x = &s.norm[..h];
        let integer = wants_q8(gate.block) || wants_q8(up.block);
        let q8 = if integer { exec.quantize(x, h, s.gather_q8) } else { &[] };
        let x = Columns { f32: x, q8, n: h };
        // What is not filled is not used; it only has to be something.
        let mut parts = [Part { w: gate, bytes: &[], x }; 2 * TOP_K_MAX];
        for (parts, (i, &e)) in parts.as_chunks_mut::<2>().0.iter_mut().zip(self.ready.iter().enumerate()) {
            let blob = storage.slot(self.slot(l, usize::from(e)));
            *parts = [gate, up].map(|w| Part { w, bytes: w.bytes(blob), x });
            self.computed[self.picks[self.starts[usize::from(e)] as usize] as usize] = (done + i) as u32;
        }
        let both = &mut s.turned[..m * 2 * inner];
        exec.stacked(&parts[..2 * m], both);
        let words = q8_words(1, inner);
        exec.workers.split2(m, both, 2 * inner, &mut s.expert_q8[..m * words], words, &|_, both, q8| {
            let (a, b) = both.split_at_mut(inner);
            (exec.ks.silu_mul)(a, b);
            if wants_q8(down.block) {
                (exec.ks.quantize_act)(a, inner, bytemuck::cast_slice_mut(q8));
            }
        });
        for (i, &e) in self.ready.iter().enumerate() {
            let blob = storage.slot(self.slot(l, usize::from(e)));
            let q8 = if wants_q8(down.block) { &s.expert_q8[i * words..][..words] } else { &[] };
            let x = Columns { f32: &both[2 * i * inner..][..inner], q8: bytemuck::cast_slice(q8), n: inner };
            parts[i] = Part { w: down, bytes: down.bytes(blob), x };
        }
        exec.stacked(&parts[..m], &mut s.expert_out[done * h..]);
    }

    /// The last ready expert on all its tokens: `expert_out[done..] = down(silu(gate x) ⊙ up x)`.
    fn run_chunk(&mut self, exec: &Exec<'_>, l: usize, storage: &impl Storage, done: usize, s: &mut TextScratch<'_>) {
        let Some(&e) = self.ready.last() else { return };
        let e = usize::from(e);
        let blob = storage.slot(self.slot(l, e));
        let [gate, up, down] = self.matrices[l];
        let (h, inner) = (gate.cols, gate.rows);
        let picks = &self.picks[self.starts[e] as usize..self.starts[e + 1] as usize];
        let n = picks.len();
        let tokens = &*s.norm;
        exec.each_row(&mut s.gather[..n * h], h, |i, x| {
            x.copy_from_slice(&tokens[picks[i] as usize / self.top_k * h..][..h]);
        });
        let x = &s.gather[..n * h];
        let integer = wants_q8(gate.block) || wants_q8(up.block);
        let q8 = if integer { exec.quantize(x, h, s.gather_q8) } else { &[] };
        let x = Columns { f32: x, q8, n: h };
        exec.product(&gate, gate.bytes(blob), x, s.turned, s.expert_a);
        exec.product(&up, up.bytes(blob), x, s.turned, s.expert_b);
        let b = &*s.expert_b;
        exec.each_row(&mut s.expert_a[..n * inner], inner, |t, row| (exec.ks.silu_mul)(row, &b[t * inner..][..inner]));
        let mut p = Products { turned: s.turned, q8: s.expert_q8 };
        exec.matmul(&down, down.bytes(blob), &s.expert_a[..n * inner], &mut p, &mut s.expert_out[done * h..]);
        for (i, &pick) in picks.iter().enumerate() {
            self.computed[pick as usize] = (done + i) as u32;
        }
    }

    /// Adds each token's experts to `s.out` in router order.
    fn sum(&self, exec: &Exec<'_>, n: usize, s: &mut TextScratch<'_>) {
        let (h, k) = (self.config.text.hidden, self.top_k);
        let (outs, weights) = (&*s.expert_out, &s.router[n * self.experts..][..n * k]);
        let (computed, by_arrival) = (&self.computed, self.tuning.sum_order == SumOrder::Arrival);
        exec.each_row(&mut s.out[..n * h], h, |t, row| {
            let mut order: [u16; TOP_K_MAX] = core::array::from_fn(|i| i as u16);
            if by_arrival {
                order[..k].sort_unstable_by_key(|&i| computed[t * k + usize::from(i)]);
            }
            for &i in &order[..k] {
                let pick = t * k + usize::from(i);
                (exec.ks.axpy)(weights[pick], &outs[computed[pick] as usize * h..][..h], row);
            }
        });
    }
}
