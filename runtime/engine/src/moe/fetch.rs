//! Moves experts from storage to slots: what is needed now first, then what may be needed next; probes the device.

use super::Moe;
use crate::cache::Place;
use crate::engine::{Checksums, EngineError};
use crate::ports::{Read, ReadError, Storage};

/// Reads in flight that a probe tries.
const PROBE_DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
/// Times that a probe tries each, and time after which it does not try again.
const PROBE_PASSES: usize = 3;
const PROBE_US: u64 = 300_000;
/// A deeper queue is chosen only if it brings this much more: reads in a shorter one land one after the other, so that the
/// first are computed meanwhile.
const PROBE_GAIN: f64 = 1.1;

/// Most reads in flight, unless a token may miss more in a layer.
const DEPTH_MAX: usize = 16;
/// Reads from which on their time says what the device can.
const FULL: f32 = 4.0;

/// Whether no number above 1 divides both.
fn coprime(a: u32, b: u32) -> bool {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

impl Moe<'_> {
    /// Drops whatever is under way, after an error or before a new conversation. Whether nothing is any more: a hung device
    /// keeps its reads.
    pub fn abandon(&mut self, storage: &mut impl Storage) -> bool {
        self.nothing_wanted();
        self.lookahead.abandon();
        self.counters.predicted_wasted += self.cache.release_predictions();
        while self.in_flight > 0 {
            let Some(c) = storage.complete(true) else { break };
            self.in_flight -= 1;
            self.cache.clear(c.slot);
        }
        self.cache.release_all();
        self.in_flight == 0
    }

    /// Empties all slots but those of reads that a hung device still has.
    pub fn forget(&mut self, storage: &mut impl Storage) {
        self.abandon(storage);
        (0..self.cache.slots() as u32).for_each(|slot| {
            if !self.cache.is_loading(slot) {
                self.cache.clear(slot);
            }
        });
    }

    /// What was read into `slot` is of no use. A prediction was in vain then.
    fn clear(&mut self, slot: u32) {
        self.counters.predicted_wasted += u64::from(self.cache.is_predicted(slot));
        self.cache.clear(slot);
    }

    /// No layer is at hand: what lands is kept and let go of.
    fn nothing_wanted(&mut self) {
        self.starts.fill(0);
        self.ready.clear();
        self.missing.clear();
        (self.asked, self.awaited, self.chose_us) = (0, 0, None);
    }

    /// Reads those of the experts `ids` that are in no slot, at most `most`. One that cannot be read stays in no slot, and is an
    /// error when a layer wants it.
    fn fetch(
        &mut self,
        storage: &mut impl Storage,
        mut ids: impl Iterator<Item = u32>,
        most: usize,
    ) -> Result<(), EngineError> {
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
                return Ok(());
            }
            self.land(storage, true)?;
        }
    }

    /// Reads experts in file order until all are in slots, or the slots are full.
    pub fn preload(&mut self, storage: &mut impl Storage) -> Result<(), EngineError> {
        let all = self.weights.banks.len() * self.experts;
        let room = all.min(self.cache.slots());
        self.fetch(storage, 0..room as u32, room)
    }

    /// Bytes per second that the device delivers to at most `reads` reads of experts that are in no slot, all over the file;
    /// others for each `round`. 0 if all are in slots.
    pub fn device_rate(&mut self, storage: &mut impl Storage, reads: usize, round: u32) -> Result<f64, EngineError> {
        let all = (self.weights.banks.len() * self.experts) as u32;
        // A step by the golden section visits each expert once, the next one far from all before, if they share no factor.
        let golden = (f64::from(all) * 0.618) as u32;
        let step = (golden..).find(|&step| coprime(step, all)).unwrap_or(1);
        let first = round.wrapping_mul(7919);
        let ids = (0..all).map(|i| ((u64::from(first) + u64::from(i) * u64::from(step)) % u64::from(all)) as u32);
        let (bytes, start) = (self.counters.bytes_landed, self.clock.now_us());
        self.fetch(storage, ids, reads)?;
        let us = (self.clock.now_us() - start).max(1);
        Ok((self.counters.bytes_landed - bytes) as f64 * 1e6 / us as f64)
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
                rates[pass] = self.device_rate(storage, (2 * depth).max(8), round)?;
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
        // Some more, so that the device stays busy while those that have landed are looked at; and all that a token may miss in
        // a layer, so that they are one submission.
        self.depth = (2 * found).clamp(self.top_k, DEPTH_MAX.max(self.top_k)).min(depth_max);
        if best > 0.0 {
            let bytes = self.weights.banks.iter().map(|b| b.stride).max().unwrap_or(0);
            self.lookahead.read_took((bytes as f64 * 1e6 / best) as f32);
        }
        Ok(())
    }

    /// Tells resident experts from missing ones, and holds what this layer uses.
    pub(super) fn find(&mut self, l: usize) {
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
                    if self.cache.hold(slot) {
                        self.counters.predicted_used += 1;
                        self.counters.predicted_late += 1;
                    } else {
                        // Asked for in an earlier step that did not get it.
                        self.counters.misses += 1;
                    }
                    self.awaited += 1;
                }
                Place::Absent => {
                    self.counters.misses += 1;
                    self.missing.push(e as u16);
                }
            }
        }
        self.counters.predicted_wasted += self.cache.release_predictions();
    }

    /// Takes what has landed and keeps the device busy. To be called now and then while something else is computed.
    pub fn pump(&mut self, storage: &mut impl Storage) -> Result<(), EngineError> {
        while self.in_flight > 0 && self.land(storage, false)? {}
        self.ask(storage);
        Ok(())
    }

    /// Asks for missing experts, and when all have landed for what the next layer may want, as far as slots and queue have
    /// room, as one batch.
    pub(super) fn ask(&mut self, storage: &mut impl Storage) {
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
        // What is needed now has the device to itself: it would land later beside others. Only the last one shares it, since
        // a single read does not keep every device busy.
        if self.awaited <= 1 && self.asked == self.missing.len() {
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

    /// Takes a read that ended, with `wait` the next one to end; whether there was one. What the layer at hand wants is
    /// ready then.
    pub(super) fn land(&mut self, storage: &mut impl Storage, wait: bool) -> Result<bool, EngineError> {
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
        // In a model of one layer, the next one's predictions are of the layer at hand.
        let wanted = layer == self.layer && self.count(e) > 0 && !self.cache.is_predicted(c.slot);
        if let Err(error) = c.result {
            // A prediction that failed is asked for again if its layer wants it.
            self.clear(c.slot);
            return if wanted {
                Err(EngineError::Expert { layer, expert: e, offset: read.offset, error })
            } else {
                Ok(true)
            };
        }
        self.counters.bytes_landed += u64::from(read.bytes);
        self.landed += 1.0;
        if !self.verified[id as usize] {
            let found = (self.crc32c)(&storage.slot(c.slot)[..read.bytes as usize]);
            let expected = self.weights.expert_crc[id as usize];
            if found != expected {
                if self.suspect[id as usize] {
                    self.clear(c.slot);
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
            // Waited for to the end: the device was busy all the time, with enough reads at once to show what it can.
            if let (Some(chose_us), 1..) = (self.chose_us, stalled_us)
                && self.awaited == 0
                && self.asked == self.missing.len()
                && self.landed >= FULL
            {
                self.lookahead.read_took((self.clock.now_us() - chose_us) as f32 / self.landed);
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
}
