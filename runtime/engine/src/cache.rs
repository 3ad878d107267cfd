//! Which experts are in which slots. One pool for all layers; the victim is the expert that is worth least ([`Worth`]),
//! given what a miss costs and how far its layer is ahead, among those that nobody holds. Never reads anything: it only
//! keeps books, and they do not grow after they are made.

mod worth;

pub use worth::Shape;

use alloc::{vec, vec::Vec};
use worth::Worth;

const NONE: u32 = u32::MAX;

/// An expert of the layer that is furthest ahead is worth less by this share than one of the next layer.
const DISTANCE: f32 = 0.4;

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

const EMPTY: Slot = Slot { expert: NONE, loading: false, held: false, predicted: false };

/// The slot of a layer that could be given away with the least loss.
#[derive(Debug, Clone, Copy)]
enum Least {
    /// To be found again: a slot of the layer, or what its experts are worth, has changed.
    Unknown,
    /// All of the layer's slots are held or loading, or it has none.
    Nothing,
    Slot {
        slot: u32,
        worth: f32,
    },
}

/// Books of the expert slots. Experts are numbered through all layers: `layer * experts + expert`.
#[derive(Debug)]
pub struct ExpertCache {
    shape: Shape,
    slots: Vec<Slot>,
    /// Empty slots; the last is taken first.
    empty: Vec<u32>,
    /// `(layers, experts)`: an expert's slot, or `NONE`.
    slot_of: Vec<u32>,
    worth: Worth,
    /// For each layer.
    least: Vec<Least>,
    /// For each layer: what a miss costs.
    costs: Vec<f32>,
    /// Layer that chose last.
    layer: usize,
    /// Slots that predictions have claimed since they were last let go of.
    predicted: Vec<u32>,
}

impl ExpertCache {
    /// Books for `slots` slots.
    pub fn new(slots: usize, shape: Shape) -> Self {
        Self {
            shape,
            slots: vec![EMPTY; slots],
            empty: (0..slots as u32).rev().collect(),
            slot_of: vec![NONE; shape.layers * shape.experts],
            worth: Worth::new(shape),
            least: vec![Least::Unknown; shape.layers],
            costs: vec![1.0; shape.layers],
            layer: 0,
            predicted: Vec::with_capacity(slots),
        }
    }

    /// Heap bytes of such books.
    pub fn heap_bytes(slots: usize, shape: Shape) -> usize {
        slots * (size_of::<Slot>() + 8)
            + shape.layers * (shape.experts * 4 + size_of::<Least>() + 4)
            + Worth::heap_bytes(shape)
    }

    /// A miss in `layer` costs `cost`, above 0, where it costs 1 in others: layers whose experts take longer to read get
    /// more slots.
    pub fn set_cost(&mut self, layer: usize, cost: f32) {
        self.costs[layer] = cost;
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

    /// `layer` chose the experts `chosen`, `(tokens, top_k)`, for all tokens of this step. Comes before anything else that
    /// the layer asks.
    pub fn route(&mut self, layer: usize, chosen: &[u16]) {
        self.worth.choose(layer, chosen);
        self.least[layer] = Least::Unknown;
        self.layer = layer;
    }

    /// Ends a token.
    pub fn end_token(&mut self) {
        self.worth.end_token();
    }

    /// Takes a slot for `expert`, which must be absent: an empty one, else that of the expert worth least among those that
    /// are neither held nor loading. The slot is loading and held until [`ExpertCache::landed`] and
    /// [`ExpertCache::release`]. `None` if all are taken.
    pub fn claim(&mut self, expert: u32, predicted: bool) -> Option<u32> {
        debug_assert_eq!(self.place(expert), Place::Absent);
        let slot = self.empty.pop().or_else(|| self.victim())?;
        let old =
            core::mem::replace(&mut self.slots[slot as usize], Slot { expert, loading: true, held: true, predicted });
        if old.expert != NONE {
            self.slot_of[old.expert as usize] = NONE;
            self.changed(old.expert);
        }
        self.slot_of[expert as usize] = slot;
        // A slot that was cleared may be here already; once each, so that the list never grows.
        if predicted && !self.predicted.contains(&slot) {
            self.predicted.push(slot);
        }
        Some(slot)
    }

    /// The read into `slot` succeeded.
    pub fn landed(&mut self, slot: u32) {
        self.slots[slot as usize].loading = false;
        self.changed(self.slots[slot as usize].expert);
    }

    /// The read into `slot` failed, or what it brought is of no use: the slot is empty again.
    pub fn clear(&mut self, slot: u32) {
        let old = core::mem::replace(&mut self.slots[slot as usize], EMPTY);
        if old.expert != NONE {
            self.slot_of[old.expert as usize] = NONE;
            self.changed(old.expert);
            self.empty.push(slot);
        }
    }

    /// Keeps `slot` from being taken. Returns whether a prediction had brought it, once.
    pub fn hold(&mut self, slot: u32) -> bool {
        let s = &mut self.slots[slot as usize];
        s.held = true;
        let predicted = core::mem::take(&mut s.predicted);
        self.changed(self.slots[slot as usize].expert);
        predicted
    }

    /// Whether a prediction has brought or is bringing what is in `slot`, and its layer has not chosen yet.
    pub fn is_predicted(&self, slot: u32) -> bool {
        self.slots[slot as usize].predicted
    }

    /// Whether a read into `slot` is under way.
    pub fn is_loading(&self, slot: u32) -> bool {
        self.slots[slot as usize].loading
    }

    /// A slot into which a read is under way.
    pub fn loading(&self) -> Option<u32> {
        (0..self.slots.len() as u32).find(|&slot| self.is_loading(slot))
    }

    /// Puts the at most `n` experts of `layer` that are in no slot and worth most into `out`, best first.
    pub fn best_absent(&self, layer: usize, n: usize, out: &mut Vec<u16>) {
        out.clear();
        let id = |e: u16| (layer * self.shape.experts) as u32 + u32::from(e);
        for e in 0..self.shape.experts as u16 {
            let worth = self.worth.of(id(e));
            if worth == 0.0 || self.place(id(e)) != Place::Absent {
                continue;
            }
            let at = out.iter().position(|&o| self.worth.of(id(o)) < worth).unwrap_or(out.len());
            if at < n {
                out.truncate(n - 1);
                out.insert(at, e);
            }
        }
    }

    /// Lets `slot` be taken again.
    pub fn release(&mut self, slot: u32) {
        self.slots[slot as usize].held = false;
        self.changed(self.slots[slot as usize].expert);
    }

    /// Lets go of everything that predictions hold and that was not used, and returns how many there were.
    pub fn release_predictions(&mut self) -> u64 {
        let mut wasted = 0;
        while let Some(slot) = self.predicted.pop() {
            let s = &mut self.slots[slot as usize];
            if core::mem::take(&mut s.predicted) {
                self.release(slot);
                wasted += 1;
            }
        }
        wasted
    }

    /// Lets go of every slot, after a run was abandoned.
    pub fn release_all(&mut self) {
        for s in &mut self.slots {
            (s.predicted, s.held) = (false, false);
        }
        self.predicted.clear();
        self.least.fill(Least::Unknown);
        self.worth.forget_present();
    }

    /// The layer of `expert` is to be looked through again before one of its slots is given away.
    fn changed(&mut self, expert: u32) {
        if expert != NONE {
            self.least[expert as usize / self.shape.experts] = Least::Unknown;
        }
    }

    /// The slot that can be given away with the least loss, in one step for each layer and, for the few layers that have
    /// changed since, one for each of its experts: never a walk over all slots.
    fn victim(&mut self) -> Option<u32> {
        let layers = self.shape.layers;
        let mut best: Option<(u32, f32)> = None;
        for l in 0..layers {
            if matches!(self.least[l], Least::Unknown) {
                self.least[l] = self.least_of(l);
            }
            let Least::Slot { slot, worth } = self.least[l] else { continue };
            let ahead = (l + layers - self.layer - 1) % layers;
            let worth = worth * self.costs[l] * (1.0 - DISTANCE * ahead as f32 / layers as f32);
            if best.is_none_or(|(_, least)| worth < least) {
                best = Some((slot, worth));
            }
        }
        best.map(|(slot, _)| slot)
    }

    fn least_of(&self, layer: usize) -> Least {
        let first = layer * self.shape.experts;
        let mut least = Least::Nothing;
        for expert in first..first + self.shape.experts {
            let slot = self.slot_of[expert];
            if slot == NONE || self.slots[slot as usize].held || self.slots[slot as usize].loading {
                continue;
            }
            let w = self.worth.of(expert as u32);
            match least {
                Least::Slot { worth, .. } if worth <= w => {}
                _ => least = Least::Slot { slot, worth: w },
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { layers: 2, experts: 8, top_k: 2 };

    /// Brings `expert` in and lets go of it.
    fn bring(c: &mut ExpertCache, expert: u32) -> u32 {
        let slot = c.claim(expert, false).unwrap();
        assert_eq!(c.place(expert), Place::Loading(slot));
        c.landed(slot);
        c.release(slot);
        slot
    }

    /// Tokens that choose the same in both layers.
    fn tokens(c: &mut ExpertCache, n: usize, chosen: [u16; 2]) {
        for _ in 0..n {
            (0..2).for_each(|l| c.route(l, &chosen));
            c.end_token();
        }
    }

    #[test]
    fn the_expert_worth_least_is_evicted_and_remembered() {
        let mut c = ExpertCache::new(2, SHAPE);
        tokens(&mut c, 3, [3, 5]);
        tokens(&mut c, 1, [4, 6]);
        assert_eq!((bring(&mut c, 3), bring(&mut c, 4)), (0, 1));
        tokens(&mut c, 1, [3, 6]);
        assert_eq!(bring(&mut c, 5), 1);
        assert_eq!((c.place(4), c.place(3)), (Place::Absent, Place::Ready(0)));
        // 6 was never in a slot, yet it is known to be worth more than 5.
        assert_eq!(bring(&mut c, 6), 1);
        assert_eq!(bring(&mut c, 4), 1, "4 is worth less than 6 and not compared with itself");
    }

    #[test]
    fn slots_that_are_held_or_loading_are_not_taken() {
        let mut c = ExpertCache::new(2, SHAPE);
        let (a, b) = (c.claim(1, false).unwrap(), c.claim(2, false).unwrap());
        assert_eq!(c.claim(3, false), None, "all slots are loading");
        c.landed(a);
        assert_eq!(c.claim(3, false), None, "all slots are held");
        c.release(b);
        assert_eq!(c.claim(3, false), None, "one is held, one is loading");
        c.landed(b);
        assert_eq!(c.claim(3, false), Some(b));
        c.release(a);
        assert!(!c.hold(a));
        assert_eq!(c.claim(4, false), None, "held again");
        c.clear(b);
        c.clear(b);
        assert_eq!((c.place(3), c.expert_in(b)), (Place::Absent, None));
        assert_eq!(c.claim(4, false), Some(b));
        assert_eq!(c.claim(5, false), None, "an empty slot is given away once");
        c.release_all();
        assert_eq!(c.claim(5, false), Some(a), "the other is loading");
    }

    #[test]
    fn of_equals_the_layer_further_ahead_gives() {
        let mut c = ExpertCache::new(2, SHAPE);
        tokens(&mut c, 1, [0, 1]);
        let (a, b) = (bring(&mut c, 0), bring(&mut c, 8));
        c.route(0, &[0, 1]);
        c.route(1, &[0, 1]);
        assert_eq!(c.claim(2, false), Some(b), "layer 0 comes next");
        assert_eq!(c.expert_in(a), Some(0));
    }

    #[test]
    fn of_equals_the_one_that_is_read_faster_gives() {
        for (cost, kept) in [(1.0, 0), (2.0, 8)] {
            let mut c = ExpertCache::new(2, SHAPE);
            c.set_cost(1, cost);
            tokens(&mut c, 1, [0, 1]);
            [0, 8].iter().for_each(|&e| _ = bring(&mut c, e));
            c.route(0, &[0, 1]);
            c.route(1, &[0, 1]);
            // Layer 1 is further ahead, which is less than the difference in cost.
            c.claim(2, false).unwrap();
            assert!(matches!(c.place(kept), Place::Ready(_)), "cost {cost}");
            assert_eq!(c.place(8 - kept), Place::Absent, "cost {cost}");
        }
    }

    #[test]
    fn unused_predictions_are_counted_once() {
        let mut c = ExpertCache::new(3, SHAPE);
        let (a, b) = (c.claim(1, true).unwrap(), c.claim(2, true).unwrap());
        c.landed(a);
        assert!(c.hold(a));
        assert!(!c.hold(a));
        assert_eq!(c.release_predictions(), 1);
        assert_eq!(c.place(2), Place::Loading(b));
        assert_eq!(c.release_predictions(), 0);
    }

    #[test]
    fn books_do_not_grow() {
        let mut c = ExpertCache::new(6, SHAPE);
        let sizes = |c: &ExpertCache| (c.slots.capacity(), c.empty.capacity(), c.predicted.capacity());
        let before = sizes(&c);
        for step in 0..200_u32 {
            let chosen = [(step % 8) as u16, (step * 3 % 7 + 1) as u16 % 8];
            for l in 0..2 {
                c.route(l, &chosen);
                c.release_predictions();
                for e in [step % 16, step * 5 % 16, step * 7 % 16, (step + 1) % 16] {
                    if c.place(e) == Place::Absent
                        && let Some(slot) = c.claim(e, e % 2 == 0)
                    {
                        match e % 3 {
                            0 => c.clear(slot),
                            _ => c.landed(slot),
                        }
                        if e % 2 == 1 {
                            c.release(slot);
                        }
                    }
                }
            }
            c.end_token();
        }
        assert_eq!(sizes(&c), before);
    }
}
