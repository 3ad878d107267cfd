//! Cache policies: the engine's own books, simple ones to compare with, and the optimum that knows the future.

use super::trace::{Step, Trace};
use forerun_engine::cache::{ExpertCache, Place, Shape};
use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
    ops::Range,
    str::FromStr,
};

/// Uses lose this share with each token, unless a policy's name says otherwise.
const DECAY: f64 = 0.98;

/// A way to choose what stays in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    /// What the engine does.
    Forerun,
    /// The same, but this share of the slots always has the experts that the tokens before the counted ones chose most: what
    /// a profile would pin.
    Pinned(f64),
    /// Evicts what was used longest ago.
    Lru(Pool),
    /// Evicts what was used least, by a count that decays and is kept after eviction.
    Lfu(Pool, f64),
    /// Evicts what will be used last of all, or does not keep what was read: no policy can have more hits.
    Optimum(Pool),
}

/// Whom a slot belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// All layers.
    One,
    /// One layer: each has as many, or one more.
    Layer,
}

impl Policy {
    /// What is compared where nothing is asked for.
    pub const ALL: [Self; 7] = [
        Self::Lru(Pool::One),
        Self::Lru(Pool::Layer),
        Self::Lfu(Pool::One, DECAY),
        Self::Lfu(Pool::Layer, DECAY),
        Self::Forerun,
        Self::Optimum(Pool::Layer),
        Self::Optimum(Pool::One),
    ];

    /// Hits among the experts that the decoded tokens `counted` of `trace` choose, with `slots` slots.
    pub fn hits(self, trace: &Trace, slots: usize, counted: &Range<usize>) -> u64 {
        let shape = trace.shape;
        match self {
            Self::Forerun => {
                replay(trace, counted, &mut Engine::new(slots, shape, vec![false; shape.layers * shape.experts]))
            }
            Self::Pinned(share) => {
                // A token's experts always find room beside them.
                let pins = ((slots as f64 * share) as usize).min(slots - shape.top_k);
                replay(trace, counted, &mut Engine::new(slots - pins, shape, most_used(trace, counted.start, pins)))
            }
            Self::Lru(pool) => replay(trace, counted, &mut Ranked::new(shape, slots, pool, None)),
            Self::Lfu(pool, decay) => replay(trace, counted, &mut Ranked::new(shape, slots, pool, Some(decay))),
            Self::Optimum(pool) => optimum(trace, slots, pool, counted),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, decay) = text.split_once(':').map_or((text, None), |(n, d)| (n, Some(d)));
        let pool = if name.ends_with("-layer") { Pool::Layer } else { Pool::One };
        match (name, decay) {
            ("forerun", None) => Ok(Self::Forerun),
            ("pinned", Some(share)) => match share.parse() {
                Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Pinned(share)),
                _ => Err(format!("pinned share {share:?}, expected a number from 0 to 1")),
            },
            ("lru" | "lru-layer", None) => Ok(Self::Lru(pool)),
            ("lfu" | "lfu-layer", None) => Ok(Self::Lfu(pool, DECAY)),
            ("lfu" | "lfu-layer", Some(d)) => match d.parse() {
                Ok(decay) if decay > 0.0 && decay <= 1.0 => Ok(Self::Lfu(pool, decay)),
                _ => Err(format!("decay {d:?}, expected a number above 0, at most 1")),
            },
            ("optimum" | "optimum-layer", None) => Ok(Self::Optimum(pool)),
            _ => Err(format!(
                "policy {text:?}, expected forerun, pinned:SHARE, lru, lru-layer, lfu[:DECAY], lfu-layer[:DECAY], optimum or optimum-layer"
            )),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = |pool: &Pool| if *pool == Pool::Layer { "-layer" } else { "" };
        match self {
            Self::Forerun => write!(f, "forerun"),
            Self::Pinned(share) => write!(f, "pinned:{share}"),
            Self::Lru(pool) => write!(f, "lru{}", suffix(pool)),
            Self::Lfu(pool, decay) => write!(f, "lfu{}:{decay}", suffix(pool)),
            Self::Optimum(pool) => write!(f, "optimum{}", suffix(pool)),
        }
    }
}

/// Books that a replay drives.
trait Books {
    /// `layer` chose `chosen`, `(tokens, top_k)`, which are the experts `wanted`, in ascending order. Returns how many of
    /// these were there, and brings the others.
    fn layer(&mut self, layer: usize, chosen: &[u16], wanted: &[u16]) -> usize;

    /// `n` tokens went through all layers.
    fn end_tokens(&mut self, n: usize);
}

/// Experts in `chosen`, each once, in ascending order.
fn distinct(chosen: &[u16]) -> Vec<u16> {
    let mut v = chosen.to_vec();
    v.sort_unstable();
    v.dedup();
    v
}

/// Whether each step counts.
fn counts<'a>(steps: &'a [Step], counted: &'a Range<usize>) -> impl Iterator<Item = bool> + 'a {
    let mut decoded = 0;
    steps.iter().map(move |s| {
        let counts = s.decode && counted.contains(&decoded);
        decoded += usize::from(s.decode);
        counts
    })
}

fn replay(trace: &Trace, counted: &Range<usize>, books: &mut dyn Books) -> u64 {
    let mut hits = 0;
    for (step, counts) in trace.steps.iter().zip(counts(&trace.steps, counted)) {
        for (layer, chosen) in step.chosen.iter().enumerate() {
            let found = books.layer(layer, chosen, &distinct(chosen));
            hits += if counts { found as u64 } else { 0 };
        }
        books.end_tokens(step.tokens);
    }
    hits
}

/// The engine's books, asked in the order in which the engine asks them, without predictions.
struct Engine {
    cache: ExpertCache,
    shape: Shape,
    /// `(layers, experts)`: whether an expert has a slot of its own, which the cache does not know of.
    pinned: Vec<bool>,
}

impl Engine {
    fn new(slots: usize, shape: Shape, pinned: Vec<bool>) -> Self {
        Self { cache: ExpertCache::new(slots, shape), shape, pinned }
    }
}

/// Marks the `n` experts that the first `tokens` decoded tokens of `trace` chose most.
fn most_used(trace: &Trace, tokens: usize, n: usize) -> Vec<bool> {
    let shape = trace.shape;
    let mut uses = vec![0u64; shape.layers * shape.experts];
    for step in trace.steps.iter().filter(|s| s.decode).take(tokens) {
        for (layer, chosen) in step.chosen.iter().enumerate() {
            chosen.iter().for_each(|&e| uses[layer * shape.experts + usize::from(e)] += 1);
        }
    }
    let mut ids: Vec<usize> = (0..uses.len()).collect();
    ids.sort_by_key(|&id| (std::cmp::Reverse(uses[id]), id));
    let mut pinned = vec![false; uses.len()];
    ids[..n].iter().for_each(|&id| pinned[id] = true);
    pinned
}

impl Books for Engine {
    fn layer(&mut self, layer: usize, chosen: &[u16], wanted: &[u16]) -> usize {
        self.cache.route(layer, chosen);
        let mut missing = Vec::new();
        let mut held = VecDeque::new();
        let mut hits = 0;
        for &e in wanted {
            let id = (layer * self.shape.experts) as u32 + u32::from(e);
            if self.pinned[id as usize] {
                hits += 1;
                continue;
            }
            match self.cache.place(id) {
                Place::Ready(slot) | Place::Loading(slot) => {
                    self.cache.hold(slot);
                    held.push_back(slot);
                }
                Place::Absent => missing.push(id),
            }
        }
        hits += held.len();
        for id in missing {
            let slot = loop {
                if let Some(slot) = self.cache.claim(id, false) {
                    break slot;
                }
                // A prompt may want more than there are slots: what was computed makes room.
                self.cache.release(held.pop_front().expect("slots for all experts of a token"));
            };
            self.cache.landed(slot);
            held.push_back(slot);
        }
        held.into_iter().for_each(|slot| self.cache.release(slot));
        hits
    }

    fn end_tokens(&mut self, n: usize) {
        (0..n).for_each(|_| self.cache.end_token());
    }
}

/// Keeps what ranks highest: by time of use, or by uses.
struct Ranked {
    shape: Shape,
    /// Experts of each pool; one pool, or one for each layer.
    pools: Vec<Vec<usize>>,
    slots: Vec<usize>,
    is_in: Vec<bool>,
    /// Uses, decayed; all 0 in LRU.
    uses: Vec<f64>,
    /// When each was used last.
    used: Vec<u64>,
    decay: Option<f64>,
    now: u64,
}

impl Ranked {
    fn new(shape: Shape, slots: usize, pool: Pool, decay: Option<f64>) -> Self {
        let experts = shape.layers * shape.experts;
        let slots = shares(shape, slots, pool);
        Self {
            shape,
            pools: vec![Vec::new(); slots.len()],
            slots,
            is_in: vec![false; experts],
            uses: vec![0.0; experts],
            used: vec![0; experts],
            decay,
            now: 0,
        }
    }
}

/// Slots of each pool.
fn shares(shape: Shape, slots: usize, pool: Pool) -> Vec<usize> {
    match pool {
        Pool::One => vec![slots],
        Pool::Layer => {
            (0..shape.layers).map(|l| slots / shape.layers + usize::from(l < slots % shape.layers)).collect()
        }
    }
}

impl Books for Ranked {
    fn layer(&mut self, layer: usize, _: &[u16], wanted: &[u16]) -> usize {
        let id = |e: &u16| layer * self.shape.experts + usize::from(*e);
        let p = layer % self.pools.len();
        self.now += 1;
        for e in wanted.iter().map(id) {
            self.used[e] = self.now;
            self.uses[e] += if self.decay.is_some() { 1.0 } else { 0.0 };
        }
        let mut hits = 0;
        for e in wanted.iter().map(id) {
            if self.is_in[e] {
                hits += 1;
                continue;
            }
            let pool = &mut self.pools[p];
            if pool.len() < self.slots[p] {
                pool.push(e);
                self.is_in[e] = true;
                continue;
            }
            // What this layer uses now stays.
            let victim = (0..pool.len()).filter(|&i| self.used[pool[i]] != self.now).min_by(|&a, &b| {
                let (a, b) = (pool[a], pool[b]);
                self.uses[a].total_cmp(&self.uses[b]).then(self.used[a].cmp(&self.used[b])).then(a.cmp(&b))
            });
            if let Some(i) = victim {
                self.is_in[pool[i]] = false;
                self.is_in[e] = true;
                pool[i] = e;
            }
        }
        hits
    }

    fn end_tokens(&mut self, n: usize) {
        if let Some(decay) = self.decay.filter(|&d| d < 1.0) {
            let factor = decay.powi(n as i32);
            self.uses.iter_mut().for_each(|u| *u *= factor);
        }
    }
}

/// Belady's optimum, for hits that count: what is in memory or passes through it stays if it is used sooner than the rest.
/// A use that does not count is no reason to stay, since it brings the expert anyway.
fn optimum(trace: &Trace, slots: usize, pool: Pool, counted: &Range<usize>) -> u64 {
    let shape = trace.shape;
    let slots = shares(shape, slots, pool);
    let visits: Vec<(usize, bool, Vec<usize>)> = trace
        .steps
        .iter()
        .zip(counts(&trace.steps, counted))
        .flat_map(|(step, counts)| {
            step.chosen.iter().enumerate().map(move |(layer, chosen)| {
                let ids = distinct(chosen).into_iter().map(|e| layer * shape.experts + usize::from(e));
                (layer, counts, ids.collect())
            })
        })
        .collect();
    // When each expert of each visit is used next.
    let mut next = vec![usize::MAX; shape.layers * shape.experts];
    let mut nexts: Vec<Vec<usize>> = visits
        .iter()
        .enumerate()
        .rev()
        .map(|(now, (_, counts, ids))| {
            ids.iter().map(|&id| std::mem::replace(&mut next[id], if *counts { now } else { usize::MAX })).collect()
        })
        .collect();
    nexts.reverse();

    let mut hits = 0;
    let mut pools = vec![BTreeSet::new(); slots.len()];
    let mut due: Vec<Option<usize>> = vec![None; next.len()];
    for ((layer, counts, ids), nexts) in visits.iter().zip(nexts) {
        let p = layer % pools.len();
        for (&id, next) in ids.iter().zip(nexts) {
            if let Some(old) = due[id].replace(next) {
                hits += u64::from(*counts);
                pools[p].remove(&(old, id));
            }
            pools[p].insert((next, id));
        }
        while pools[p].len() > slots[p] {
            let (_, id) = pools[p].pop_last().expect("more than there are slots");
            due[id] = None;
        }
    }
    hits
}
