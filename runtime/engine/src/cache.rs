//! Which experts are in which slots. One pool for all layers; the victim is the coldest expert that nobody holds, by a
//! count of uses that decays with every token and is kept after eviction ("ghost" LFU: `docs/performance.md` will hold
//! the replay figures). Never reads anything: it only keeps books.

use alloc::{vec, vec::Vec};

const NONE: u32 = u32::MAX;

/// Uses lose this share of their weight with each token.
const DECAY: f32 = 0.98;

/// Where an expert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the file only.
    Absent,
    /// On its way into this slot.
    Loading(u32),
    /// In this slot.
    Ready(u32),
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    expert: u32,
    loading: bool,
    held: bool,
    predicted: bool,
}

/// Books of the expert slots. Experts are numbered through all layers: `layer * experts + expert`.
#[derive(Debug)]
pub struct ExpertCache {
    slots: Vec<Slot>,
    slot_of: Vec<u32>,
    heat: Vec<f32>,
    /// Weight of a use now; grows instead of all counts shrinking.
    use_weight: f32,
}

impl ExpertCache {
    /// Books for `slots` slots and `experts` experts in all.
    pub fn new(slots: usize, experts: usize) -> Self {
        Self {
            slots: vec![Slot { expert: NONE, loading: false, held: false, predicted: false }; slots],
            slot_of: vec![NONE; experts],
            heat: vec![0.0; experts],
            use_weight: 1.0,
        }
    }

    /// Heap bytes of such books.
    pub fn heap_bytes(slots: usize, experts: usize) -> usize {
        slots * size_of::<Slot>() + experts * 8
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Where `expert` is.
    pub fn place(&self, expert: u32) -> Place {
        match self.slot_of[expert as usize] {
            NONE => Place::Absent,
            s if self.slots[s as usize].loading => Place::Loading(s),
            s => Place::Ready(s),
        }
    }

    /// The expert in or on its way to `slot`.
    pub fn expert_in(&self, slot: u32) -> Option<u32> {
        Some(self.slots[slot as usize].expert).filter(|&e| e != NONE)
    }

    /// Counts one use of `expert`.
    pub fn touch(&mut self, expert: u32) {
        self.heat[expert as usize] += self.use_weight;
    }

    /// Ends a token: uses so far weigh less from now on.
    pub fn end_token(&mut self) {
        self.use_weight /= DECAY;
        if self.use_weight > 1e20 {
            let scale = 1.0 / self.use_weight;
            self.heat.iter_mut().for_each(|h| *h *= scale);
            self.use_weight = 1.0;
        }
    }

    /// Takes a slot for `expert`, which must be absent: an empty one, else the coldest that is neither held nor loading.
    /// The slot is loading and held until [`ExpertCache::landed`] and [`ExpertCache::release`]. `None` if all are taken.
    pub fn claim(&mut self, expert: u32, predicted: bool) -> Option<u32> {
        debug_assert_eq!(self.place(expert), Place::Absent);
        let coldness = |s: &Slot| if s.expert == NONE { -1.0 } else { self.heat[s.expert as usize] };
        let (i, _) = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, s)| !s.held && !s.loading)
            .min_by(|(_, a), (_, b)| coldness(a).total_cmp(&coldness(b)))?;
        let old = core::mem::replace(&mut self.slots[i], Slot { expert, loading: true, held: true, predicted });
        if old.expert != NONE {
            self.slot_of[old.expert as usize] = NONE;
        }
        self.slot_of[expert as usize] = i as u32;
        Some(i as u32)
    }

    /// The read into `slot` succeeded.
    pub fn landed(&mut self, slot: u32) {
        self.slots[slot as usize].loading = false;
    }

    /// The read into `slot` failed, or what it brought is of no use: the slot is empty again.
    pub fn clear(&mut self, slot: u32) {
        let old = core::mem::replace(
            &mut self.slots[slot as usize],
            Slot { expert: NONE, loading: false, held: false, predicted: false },
        );
        if old.expert != NONE {
            self.slot_of[old.expert as usize] = NONE;
        }
    }

    /// Keeps `slot` from being taken. Returns whether a prediction had brought it, once.
    pub fn hold(&mut self, slot: u32) -> bool {
        let s = &mut self.slots[slot as usize];
        s.held = true;
        core::mem::take(&mut s.predicted)
    }

    /// Lets `slot` be taken again.
    pub fn release(&mut self, slot: u32) {
        self.slots[slot as usize].held = false;
    }

    /// Lets go of everything that predictions hold and that was not used, and returns how many there were.
    pub fn release_predictions(&mut self) -> u64 {
        let mut wasted = 0;
        for s in self.slots.iter_mut().filter(|s| s.predicted) {
            (s.predicted, s.held) = (false, false);
            wasted += 1;
        }
        wasted
    }

    /// Lets go of every slot, after a run was abandoned.
    pub fn release_all(&mut self) {
        for s in &mut self.slots {
            (s.predicted, s.held) = (false, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coldest_unheld_expert_is_evicted_and_remembered() {
        let mut c = ExpertCache::new(2, 10);
        for e in [3, 4] {
            let s = c.claim(e, false).unwrap();
            assert_eq!(c.place(e), Place::Loading(s));
            c.landed(s);
            c.touch(e);
        }
        assert_eq!(c.claim(5, false), None, "all slots are held");
        c.touch(3);
        c.release(0);
        c.release(1);
        let s = c.claim(5, false).unwrap();
        assert_eq!((s, c.place(4), c.place(3)), (1, Place::Absent, Place::Ready(0)));
        c.landed(s);
        c.release(s);
        c.touch(5);
        // 4 comes back warmer than 5, which was used as often but is compared by its own count.
        c.touch(4);
        assert_eq!(c.claim(4, false), Some(1));
    }

    #[test]
    fn decay_lets_old_heat_fade() {
        let mut c = ExpertCache::new(2, 4);
        for e in [0, 1] {
            let s = c.claim(e, false).unwrap();
            c.landed(s);
            c.release(s);
        }
        for _ in 0..5 {
            c.touch(0);
        }
        for _ in 0..3000 {
            c.end_token();
        }
        c.touch(1);
        assert_eq!(c.claim(2, false), Some(0), "five uses long ago weigh less than one now");
    }

    #[test]
    fn unused_predictions_are_counted_once() {
        let mut c = ExpertCache::new(3, 8);
        let (a, b) = (c.claim(1, true).unwrap(), c.claim(2, true).unwrap());
        c.landed(a);
        assert!(c.hold(a));
        assert!(!c.hold(a));
        assert_eq!(c.release_predictions(), 1);
        assert_eq!(c.place(2), Place::Loading(b));
        assert_eq!(c.release_predictions(), 0);
    }
}
