//! What to read ahead for the next layer, and how much of it. Only keeps books: [`crate::moe`] reads.
//!
//! A device that is not busy with what a layer needs can read for the next one. Of the time between their choices it has
//! `gap / read time` reads to give, and the `k`-th of them costs what does not fit in there: with `hidden = min(max(gap /
//! read time - k, 0), 1)`, a right read saves `hidden` of a read, a wrong one costs `1 - hidden`, which counts
//! [`CAUTION`] times. How often candidates of a rank are right, and how long the gap is, every layer learns for itself
//! while it runs, from candidates that nobody reads, too. Where nothing is worth reading, candidates are not even looked
//! for but on every [`TRIAL`]th step. That is how prediction switches itself off on a busy device or a model that cannot be
//! foreseen, and on again.

use alloc::{vec, vec::Vec};

/// Least share of right candidates at which a rank is read, however idle the device: a wrong one takes the slot of
/// something, heats, and costs where only the bytes of a second are limited.
const CUT: f32 = 0.7;
/// Weight of the latest step in what is learnt, once there have been as many as this says.
const LEARN: f32 = 1.0 / MANY as f32;
const MANY: u8 = 32;
/// Share assumed for a chunk at the start, as if it had been seen in one step: there are too few of them to learn first.
const ASSUMED: f32 = 0.7;
/// What a wrong read costs, against what a right one saves. More than 1, since a gap is not always lost time: a device whose
/// bytes of a second are limited makes up for it afterwards.
const CAUTION: f32 = 3.0;
/// A layer for which nothing is worth reading is judged again on every so many steps.
const TRIAL: u32 = 16;
/// Steps at the start on which every layer is judged.
const NEW: u32 = 8;
/// Candidates judged for a token, for each expert that it uses.
const RANKS_PER_PICK: usize = 2;
/// Candidates of a chunk.
const CHUNK_RANKS: usize = 64;

/// What a layer has learnt from one kind of step.
#[derive(Debug, Clone)]
struct Record {
    /// For each rank, the share of right ones among the candidates that were in no slot: those in one cost nothing and say
    /// nothing, and experts that are chosen often are both in a slot and right.
    right: Vec<f32>,
    /// Candidates judged, for each rank, as far as it matters.
    judged: Vec<u8>,
    /// Time between the choices of the layer before and of this one that the former's reads leave, microseconds, if it is
    /// known.
    gap_us: Option<f32>,
    /// Steps on which candidates were looked for, as far as it matters.
    looked: u32,
    /// Steps since.
    unlooked: u32,
}

impl Record {
    fn new(ranks: usize, right: f32) -> Self {
        Self { right: vec![right; ranks], judged: vec![0; ranks], gap_us: None, looked: 0, unlooked: 0 }
    }

    /// Whether a candidate of `rank` is worth being the read after `taken` others.
    fn worthwhile(&self, rank: usize, taken: usize, read_us: f32) -> bool {
        let hidden = match self.gap_us {
            _ if read_us <= 0.0 => 1.0,
            gap_us => (gap_us.unwrap_or(0.0) / read_us - taken as f32).clamp(0.0, 1.0),
        };
        // A better rank is right at least as often, and so often in a slot that little is learnt of it.
        let p = self.right.get(rank..).unwrap_or_default().iter().fold(0.0, |best: f32, &p| best.max(p));
        p >= CUT && p * hidden > CAUTION * (1.0 - p) * (1.0 - hidden)
    }
}

/// How many of a layer's choices were among as many candidates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recall {
    /// Experts chosen that were among the first `top_k` candidates.
    pub found: u64,
    /// Experts chosen when there were candidates.
    pub chosen: u64,
}

impl Recall {
    /// Share of the chosen that were found; `None` if there were never candidates.
    pub fn share(&self) -> Option<f64> {
        (self.chosen > 0).then(|| self.found as f64 / self.chosen as f64)
    }
}

/// Candidates of the next layer, and what all layers have learnt.
#[derive(Debug)]
pub(crate) struct Lookahead {
    top_k: usize,
    layers: usize,
    /// `(2, layers)`: of single tokens, then of chunks.
    records: Vec<Record>,
    recall: Vec<Recall>,
    /// Layer that is looked ahead to, if any, and whether for a chunk.
    target: Option<(usize, bool)>,
    /// Candidates, likeliest first.
    candidates: Vec<u16>,
    /// Candidates that were looked at, and those of them to be read.
    seen: usize,
    taken: usize,
    /// Time of one read on a busy device, microseconds; 0 if it is not known yet.
    read_us: f32,
}

impl Lookahead {
    pub fn new(layers: usize, top_k: usize) -> Self {
        let ranks = RANKS_PER_PICK * top_k;
        let mut records = vec![Record::new(ranks, 0.0); layers];
        records.resize(2 * layers, Record::new(CHUNK_RANKS, ASSUMED));
        Self {
            top_k,
            layers,
            records,
            recall: vec![Recall::default(); layers],
            target: None,
            candidates: Vec::with_capacity(ranks.max(CHUNK_RANKS)),
            seen: 0,
            taken: 0,
            read_us: 0.0,
        }
    }

    /// Heap bytes of these books.
    pub fn heap_bytes(layers: usize, top_k: usize) -> usize {
        let ranks = RANKS_PER_PICK * top_k;
        layers * (2 * size_of::<Record>() + (ranks + CHUNK_RANKS) * 5 + size_of::<Recall>())
            + 2 * ranks.max(CHUNK_RANKS)
    }

    /// For each layer, of single tokens.
    pub fn recall(&self) -> &[Recall] {
        &self.recall
    }

    fn record(&mut self, layer: usize, chunk: bool) -> &mut Record {
        &mut self.records[usize::from(chunk) * self.layers + layer]
    }

    /// A read on the busy device took `us` microseconds.
    pub fn read_took(&mut self, us: f32) {
        self.read_us += if self.read_us > 0.0 { LEARN } else { 1.0 } * (us - self.read_us);
    }

    /// Number of candidates wanted for `layer`; 0 if nothing is worth reading.
    pub fn wants(&mut self, layer: usize, chunk: bool) -> usize {
        let read_us = self.read_us;
        let r = self.record(layer, chunk);
        if r.worthwhile(0, 0, read_us) || r.looked < NEW || r.unlooked >= TRIAL {
            return r.right.len();
        }
        r.unlooked += 1;
        0
    }

    /// Looks ahead to `layer` from now on. The candidates are the caller's to add, likeliest first, at most as many as the
    /// layer wants.
    pub fn start(&mut self, layer: usize, chunk: bool) -> &mut Vec<u16> {
        let r = self.record(layer, chunk);
        (r.looked, r.unlooked) = ((r.looked + 1).min(NEW), 0);
        (self.target, self.seen, self.taken) = (Some((layer, chunk)), 0, 0);
        self.candidates.clear();
        &mut self.candidates
    }

    /// Layer and next candidate to look at, while one is worth reading. [`Lookahead::took`] or [`Lookahead::passed`]
    /// follows.
    pub fn next(&self) -> Option<(usize, u16)> {
        let (layer, chunk) = self.target?;
        let e = *self.candidates.get(self.seen)?;
        let record = &self.records[usize::from(chunk) * self.layers + layer];
        record.worthwhile(self.seen, self.taken, self.read_us).then_some((layer, e))
    }

    /// The candidate is to be read.
    pub fn took(&mut self) {
        self.seen += 1;
        self.taken += 1;
    }

    /// The candidate is in memory, or on its way.
    pub fn passed(&mut self) {
        self.seen += 1;
    }

    /// `layer` has chosen, `since.0` microseconds after the layer before, which had `since.1` reads to wait for, if that is
    /// known; `is_chosen` tells what, `was_absent` what was in no slot or is there for the prediction. Learns from it, and
    /// returns how many candidates that were worth reading had not been read, now forgotten.
    pub fn settle(
        &mut self,
        layer: usize,
        chunk: bool,
        since: Option<(f32, f32)>,
        is_chosen: impl Fn(u16) -> bool,
        was_absent: impl Fn(u16) -> bool,
    ) -> u64 {
        let mut left = 0;
        if self.target.is_some() {
            while let Some((_, e)) = self.next() {
                if was_absent(e) {
                    self.took();
                    left += 1;
                } else {
                    self.passed();
                }
            }
        }
        let top_k = self.top_k;
        let judged = self.target.take() == Some((layer, chunk));
        let r = &mut self.records[usize::from(chunk) * self.layers + layer];
        if let Some((us, reads)) = since {
            // Below 0 as well, so that a device that delivers in bursts is not thought to be idle between them.
            let gap_us = us - reads * self.read_us;
            r.gap_us = Some(r.gap_us.map_or(gap_us, |g| g + LEARN * (gap_us - g)));
        }
        if !judged {
            return left;
        }
        let mut found = 0;
        for (rank, &e) in self.candidates.iter().enumerate().take(r.right.len()) {
            let right = is_chosen(e);
            found += u64::from(right && rank < top_k);
            if was_absent(e) {
                r.judged[rank] = (r.judged[rank] + 1).min(MANY);
                r.right[rank] +=
                    (f32::from(u8::from(right)) - r.right[rank]) / f32::from((r.judged[rank] + 1).min(MANY));
            }
        }
        if !chunk {
            self.recall[layer].found += found;
            self.recall[layer].chosen += top_k as u64;
        }
        left
    }

    /// Forgets the candidates.
    pub fn abandon(&mut self) {
        self.target = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP_K: usize = 4;

    /// A step in which the candidates 0, 1, 2... were looked at and `chosen` chosen; returns what was to be read.
    fn step(l: &mut Lookahead, gap_us: f32, chosen: &[u16]) -> usize {
        let n = l.wants(1, false);
        let mut reads = 0;
        if n > 0 {
            l.start(1, false).extend(0..n as u16);
            while l.next().is_some() {
                l.took();
                reads += 1;
            }
        }
        l.settle(1, false, Some((gap_us + 300.0, 3.0)), |e| chosen.contains(&e), |_| true);
        reads
    }

    #[test]
    fn an_idle_device_reads_all_that_is_likely_and_no_more() {
        let mut l = Lookahead::new(2, TOP_K);
        l.read_took(100.0);
        for _ in 0..200 {
            step(&mut l, 1e5, &[0, 1, 2, 9]);
        }
        assert_eq!(step(&mut l, 1e5, &[0, 1, 2, 9]), 3);
        assert_eq!(l.recall()[1].found * 4, l.recall()[1].chosen * 3);
    }

    #[test]
    fn a_busy_device_reads_what_fits_the_gap() {
        let mut l = Lookahead::new(2, TOP_K);
        l.read_took(100.0);
        for _ in 0..200 {
            step(&mut l, 250.0, &[0, 1, 2, 3]);
        }
        assert_eq!(step(&mut l, 250.0, &[0, 1, 2, 3]), 3, "2.5 reads fit, and the third is nearly sure to be right");
        for _ in 0..200 {
            step(&mut l, 5.0, &[0, 1, 2, 3]);
        }
        // A twentieth of a read is hidden, and candidates are right in less than 19 of 20 cases.
        for i in 0..200 {
            step(&mut l, 5.0, if i % 5 > 0 { &[0, 1, 2, 3] } else { &[9] });
        }
        let reads: usize = (0..64).map(|i| step(&mut l, 5.0, if i % 5 > 0 { &[0, 1, 2, 3] } else { &[9] })).sum();
        assert_eq!(reads, 0);
    }

    #[test]
    fn it_switches_itself_off_and_on() {
        let mut l = Lookahead::new(2, TOP_K);
        l.read_took(100.0);
        for _ in 0..200 {
            step(&mut l, 1e5, &[9]);
        }
        let looked = |l: &mut Lookahead, chosen: &[u16]| {
            (0..10 * (TRIAL + 1)).filter(|_| l.wants(1, false) > 0 && step(l, 1e5, chosen) == 0).count()
        };
        assert!((9..=21).contains(&looked(&mut l, &[9])), "tries now and then, and reads nothing");
        for _ in 0..50 * TRIAL {
            step(&mut l, 1e5, &[0, 1, 2, 3]);
        }
        assert_eq!(step(&mut l, 1e5, &[0, 1, 2, 3]), TOP_K);
    }

    #[test]
    fn what_was_not_read_in_time_is_forgotten() {
        let mut l = Lookahead::new(2, TOP_K);
        (0..MANY).for_each(|_| _ = step(&mut l, 1e5, &[0, 1, 2, 3]));
        l.start(1, false).extend([5, 6, 7]);
        assert_eq!(l.next(), Some((1, 5)));
        l.took();
        l.passed();
        assert_eq!(l.settle(1, false, None, |_| true, |e| e == 7), 1);
        assert_eq!(l.next(), None);
    }
}
