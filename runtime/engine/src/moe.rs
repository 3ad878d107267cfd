//! The mixture of experts of one layer: route, read what is missing, look ahead, compute as it lands, sum in router order.
//!
//! Relies on [`Storage`] for bytes and [`ExpertCache`] for slots. Prediction moves data early; it never changes routing.

use crate::buffers::TextScratch;
use crate::cache::{ExpertCache, Place};
use crate::config::Config;
use crate::engine::{Checksums, Counters, EngineError, Observer, Tuning};
use crate::exec::{Exec, Part, Products, q8_words};
use crate::lookahead::{Lookahead, Recall};
use crate::ports::{Clock, Read, ReadError, Storage};
use crate::router::{TOP_K_MAX, choose, top_k};
use crate::text;
use crate::weights::{FfnWeights, Matrix, Weights, expert_matrices};
use alloc::{vec, vec::Vec};
use forerun_format::{BlockType, crc32c::crc32c};
use forerun_kernels::{Columns, math, wants_q8};

/// Reads in flight that a probe tries.
const PROBE_DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
/// Times that a probe tries each, and time after which it does not try again.
const PROBE_PASSES: usize = 3;
const PROBE_US: u64 = 300_000;
/// A deeper queue is chosen only if it brings this much more: reads in a shorter one land one after the other, so that the
/// first are computed meanwhile.
const PROBE_GAIN: f64 = 1.1;
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

/// Whether no number above 1 divides both.
fn coprime(a: u32, b: u32) -> bool {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// Experts, slots and the books of one step. Nothing here grows after it is made.
pub(crate) struct Moe<'a> {
    config: &'a Config,
    weights: &'a Weights,
    cache: ExpertCache,
    lookahead: Lookahead,
    clock: &'a dyn Clock,
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
    /// When the device had nothing more to read for this layer, and when this layer chose.
    idle_us: Option<u64>,
    chose_us: u64,
    /// Reads that landed since this layer chose.
    landed: u32,
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
    pub fn new(
        config: &'a Config,
        weights: &'a Weights,
        depth: usize,
        cache: ExpertCache,
        clock: &'a dyn Clock,
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
            idle_us: None,
            chose_us: 0,
            landed: 0,
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

    /// Drops whatever is under way, after an error or before a new conversation.
    pub fn abandon(&mut self, storage: &mut impl Storage) {
        self.nothing_wanted();
        self.lookahead.abandon();
        while self.in_flight > 0 {
            let Some(c) = storage.complete(true) else { break };
            self.in_flight -= 1;
            self.cache.clear(c.slot);
        }
        self.cache.release_all();
    }

    /// Empties all slots.
    pub fn forget(&mut self, storage: &mut impl Storage) {
        self.abandon(storage);
        (0..self.cache.slots() as u32).for_each(|slot| self.cache.clear(slot));
    }

    /// No layer is at hand: what lands is kept and let go of.
    fn nothing_wanted(&mut self) {
        self.starts.fill(0);
        self.ready.clear();
        self.missing.clear();
        (self.asked, self.awaited, self.idle_us) = (0, 0, None);
    }

    /// Reads those of the experts `ids` that are in no slot, at most `most`, and returns how many they were.
    fn fetch(
        &mut self,
        storage: &mut impl Storage,
        mut ids: impl Iterator<Item = u32>,
        most: usize,
    ) -> Result<usize, EngineError> {
        self.nothing_wanted();
        let mut read = 0;
        loop {
            self.batch.clear();
            while self.in_flight + self.batch.len() < self.depth && read < most {
                let Some(id) = ids.find(|&id| self.cache.place(id) == Place::Absent) else { break };
                let Some(slot) = self.cache.claim(id, false) else { break };
                self.batch.push(self.read(id, slot));
                read += 1;
            }
            self.submit(storage);
            if self.in_flight == 0 {
                return Ok(read);
            }
            self.land(storage, true)?;
        }
    }

    /// Reads experts in file order until all are in slots, or the slots are full.
    pub fn preload(&mut self, storage: &mut impl Storage) -> Result<(), EngineError> {
        let all = self.weights.banks.len() * self.experts;
        let room = all.min(self.cache.slots());
        self.fetch(storage, 0..room as u32, room).map(drop)
    }

    /// Bytes per second and reads, of at most `reads` reads of experts that are in no slot, all over the file; others for each
    /// `round`.
    fn rate(&mut self, storage: &mut impl Storage, reads: usize, round: u32) -> Result<(f64, usize), EngineError> {
        let all = (self.weights.banks.len() * self.experts) as u32;
        // A step by the golden section visits each expert once, the next one far from all before, if they share no factor.
        let golden = (f64::from(all) * 0.618) as u32;
        let step = (golden..).find(|&step| coprime(step, all)).unwrap_or(1);
        let first = round.wrapping_mul(7919);
        let ids = (0..all).map(|i| ((u64::from(first) + u64::from(i) * u64::from(step)) % u64::from(all)) as u32);
        let (bytes, start) = (self.counters.bytes_landed, self.clock.now_us());
        let read = self.fetch(storage, ids, reads)?;
        let us = (self.clock.now_us() - start).max(1);
        Ok(((self.counters.bytes_landed - bytes) as f64 * 1e6 / us as f64, read))
    }

    /// Bytes per second that the device delivers to reads of experts, from `reads` of them; 0 if all are in slots.
    pub fn device_rate(&mut self, storage: &mut impl Storage, reads: usize, round: u32) -> Result<f64, EngineError> {
        self.rate(storage, reads, round).map(|(rate, _)| rate)
    }

    /// Finds out how many reads in flight keep the device busy: the fewest that bring nearly what the best number does. The
    /// numbers take turns, since devices are fast for a moment and slow for the next. Leaves in the slots what was read.
    pub fn probe(&mut self, storage: &mut impl Storage) -> Result<(), EngineError> {
        let depth_max = self.batch.capacity().min(self.cache.slots());
        let usual = self.depth.min(depth_max);
        let mut rates = [[0f64; PROBE_PASSES]; PROBE_DEPTHS.len()];
        let start = self.clock.now_us();
        for pass in 0..PROBE_PASSES {
            for (&depth, rates) in PROBE_DEPTHS.iter().zip(&mut rates) {
                if depth > depth_max {
                    break;
                }
                self.depth = depth;
                let round = (pass * PROBE_DEPTHS.len() + depth) as u32;
                rates[pass] = self.rate(storage, (2 * depth).max(8), round)?.0;
            }
            if self.clock.now_us() - start > PROBE_US {
                break;
            }
        }
        let (mut best, mut found) = (0.0, usual);
        for (&depth, rates) in PROBE_DEPTHS.iter().zip(&mut rates) {
            // The median of those measured; the others are 0 and come last.
            rates.sort_unstable_by(|a, b| b.total_cmp(a));
            let measured = rates.iter().filter(|&&r| r > 0.0).count();
            let rate = rates[measured / 2];
            if rate > best * PROBE_GAIN {
                (best, found) = (rate, depth);
            }
        }
        // One is under way while the one that landed is looked at.
        self.depth = found.max(2).min(depth_max);
        self.counters.device_bytes_per_s = best as u64;
        if best > 0.0 {
            let bytes = self.weights.banks.iter().map(|b| b.stride).max().unwrap_or(0);
            self.lookahead.read_took((bytes as f64 * 1e6 / best) as f32);
        }
        Ok(())
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
        self.chose_us = self.clock.now_us();
        self.landed = 0;
        let gap_us = self.idle_us.map(|idle| (self.chose_us - idle) as f32);
        let starts = &self.starts;
        let is_chosen = |e| starts[usize::from(e) + 1] > starts[usize::from(e)];
        self.counters.predicted_cancelled += self.lookahead.settle(l, n > 1, gap_us, is_chosen);
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
        }
        observer.foresee(next, first, candidates);
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

    /// Tells resident experts from missing ones, and holds what this layer uses.
    fn find(&mut self, l: usize) {
        self.ready.clear();
        self.missing.clear();
        (self.asked, self.awaited) = (0, 0);
        for e in 0..self.experts {
            if self.count(e) == 0 {
                continue;
            }
            let id = self.id(l, e);
            match self.cache.place(id) {
                Place::Ready(slot) => {
                    self.counters.hits += 1;
                    self.counters.predicted_used += u64::from(self.cache.hold(slot));
                    self.ready.push(e as u16);
                }
                Place::Loading(slot) => {
                    let predicted = u64::from(self.cache.hold(slot));
                    self.counters.predicted_used += predicted;
                    self.counters.predicted_late += predicted;
                    self.awaited += 1;
                }
                Place::Absent => {
                    self.counters.misses += 1;
                    self.missing.push(e as u16);
                }
            }
        }
        self.counters.predicted_wasted += self.cache.release_predictions();
        self.idle_us = (self.awaited + self.missing.len() == 0).then_some(self.chose_us);
    }

    /// Takes what has landed and keeps the device busy. To be called now and then while something else is computed.
    pub fn pump(&mut self, storage: &mut impl Storage) -> Result<(), EngineError> {
        while self.in_flight > 0 && self.land(storage, false)? {}
        self.ask(storage);
        Ok(())
    }

    /// Asks for missing experts, and when all have landed for what the next layer may want, as far as slots and queue have
    /// room, as one batch.
    fn ask(&mut self, storage: &mut impl Storage) {
        self.batch.clear();
        let room = self.depth.saturating_sub(self.in_flight);
        while self.asked < self.missing.len() && self.batch.len() < room {
            let id = self.id(self.layer, usize::from(self.missing[self.asked]));
            let Some(slot) = self.cache.claim(id, false) else { break };
            self.batch.push(self.read(id, slot));
            self.asked += 1;
            self.awaited += 1;
        }
        let demanded = self.batch.len();
        // What is needed now has the device to itself: it would land later beside others.
        if self.awaited == 0 && self.asked == self.missing.len() {
            while self.batch.len() < room {
                let Some((layer, e)) = self.lookahead.next() else { break };
                let id = self.id(layer, usize::from(e));
                if self.cache.place(id) != Place::Absent {
                    self.lookahead.passed();
                    continue;
                }
                let Some(slot) = self.cache.claim(id, true) else { break };
                self.lookahead.took();
                self.batch.push(self.read(id, slot));
            }
        }
        let bytes = |reads: &[Read]| reads.iter().map(|r| u64::from(r.bytes)).sum::<u64>();
        let (demand, ahead) = self.batch.split_at(demanded);
        self.counters.bytes_demand += bytes(demand);
        self.counters.bytes_predicted += bytes(ahead);
        self.counters.predicted += ahead.len() as u64;
        self.submit(storage);
    }

    fn read(&self, id: u32, slot: u32) -> Read {
        let (l, e) = (id as usize / self.experts, id as usize % self.experts);
        let bank = self.weights.banks[l];
        Read { slot, offset: bank.offset + (e * bank.stride) as u64, bytes: bank.stride as u32 }
    }

    /// Hands the batch to the storage, if there is anything in it.
    fn submit(&mut self, storage: &mut impl Storage) {
        if self.batch.is_empty() {
            return;
        }
        let accepted = storage.submit(&self.batch);
        assert_eq!(accepted, self.batch.len(), "the batch was cut to the queue's room");
        self.in_flight += accepted;
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

    /// Takes a read that ended, with `wait` the next one to end; whether there was one. What the layer at hand wants is
    /// ready then.
    fn land(&mut self, storage: &mut impl Storage, wait: bool) -> Result<bool, EngineError> {
        let start = if wait { self.clock.now_us() } else { 0 };
        let Some(c) = storage.complete(wait) else {
            return if wait { Err(self.unanswered()) } else { Ok(false) };
        };
        let stalled_us = if wait { self.clock.now_us() - start } else { 0 };
        self.counters.stall_us += stalled_us;
        self.counters.stall_max_us = self.counters.stall_max_us.max(stalled_us);
        self.in_flight -= 1;
        let id = self.cache.expert_in(c.slot).expect("a slot under way has an expert");
        let (layer, e) = (id as usize / self.experts, id as usize % self.experts);
        let read = self.read(id, c.slot);
        let wanted = layer == self.layer && self.count(e) > 0;
        if let Err(error) = c.result {
            // A prediction that failed is asked for again if its layer wants it.
            self.cache.clear(c.slot);
            return if wanted {
                Err(EngineError::Expert { layer, expert: e, offset: read.offset, error })
            } else {
                Ok(true)
            };
        }
        self.counters.bytes_landed += u64::from(read.bytes);
        self.landed += 1;
        if !self.verified[id as usize] {
            let found = crc32c(&storage.slot(c.slot)[..read.bytes as usize]);
            let expected = self.weights.expert_crc[id as usize];
            if found != expected {
                if self.suspect[id as usize] {
                    self.cache.clear(c.slot);
                    return if wanted {
                        Err(EngineError::Checksum { layer, expert: e, offset: read.offset, found, expected })
                    } else {
                        Ok(true)
                    };
                }
                // Once more: the transfer may have gone wrong rather than the file.
                self.suspect[id as usize] = true;
                self.batch.clear();
                self.batch.push(read);
                self.submit(storage);
                return Ok(true);
            }
            self.verified[id as usize] = self.tuning.checksums == Checksums::First;
            self.suspect[id as usize] = false;
        }
        self.cache.landed(c.slot);
        if wanted {
            self.ready.push(e as u16);
            self.awaited -= 1;
            if self.awaited == 0 && self.asked == self.missing.len() {
                let now = self.clock.now_us();
                self.idle_us = Some(now);
                // Waited for to the end: the device was busy all the time.
                if stalled_us > 0 {
                    self.lookahead.read_took((now - self.chose_us) as f32 / self.landed as f32);
                }
            }
        } else if !self.cache.is_predicted(c.slot) {
            self.cache.release(c.slot);
        }
        Ok(true)
    }

    /// The error of a storage that does not answer, with an expert that is under way.
    fn unanswered(&self) -> EngineError {
        let slot = self.cache.loading().expect("who waits has something under way");
        let id = self.cache.expert_in(slot).expect("a slot under way has an expert");
        let (layer, expert) = (id as usize / self.experts, id as usize % self.experts);
        EngineError::Expert { layer, expert, offset: self.read(id, slot).offset, error: ReadError::TimedOut }
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
