//! One answer under a constraint: the mask of the tokens that may come next, and the shortest end.

use super::grammar::Grammar;
use super::machine::{Frame, Frames, HEADS_MAX, Head, Shape, close, compact, step};
use super::tokens::{Sorted, TOKEN_BYTES_MAX, TokenIndex};
use super::{Constraint, DEPTH_MAX};
use crate::tokenizer::Tokenizer;

/// Room for the bytes of an end; longer ones take more memory.
const CLOSE_BYTES: usize = 4096;

/// An answer in the making.
#[derive(Debug)]
pub struct Matcher<'c> {
    grammar: &'c Grammar,
    index: &'c TokenIndex,
    tokenizer: &'c Tokenizer,
    stop: &'c [u32],
    pub(super) heads: Vec<Head>,
    pub(super) frames: Frames,
    /// Bit `id % 64` of word `id / 64`: token `id` may come next.
    mask: Vec<u64>,
    scratch: Scratch,
}

/// Lists that are used again and again.
#[derive(Debug)]
struct Scratch {
    /// Heads after each byte of a token, one set after another.
    path: Vec<Head>,
    levels: Vec<Level>,
    /// Heads before a token that may be given back.
    before: Vec<Head>,
    frames: Frames,
    moved: Vec<(u32, u32)>,
    end: Vec<u8>,
    other: Vec<u8>,
    ids: Vec<u32>,
}

/// What there is after a byte: heads `start..end` of the path, and frames.
#[derive(Debug, Clone, Copy)]
struct Level {
    start: usize,
    end: usize,
    frames: usize,
}

const FRAMES: usize = HEADS_MAX * (DEPTH_MAX as usize + 1 + TOKEN_BYTES_MAX);
const PATH: usize = HEADS_MAX * (TOKEN_BYTES_MAX + 2);

impl<'c> Matcher<'c> {
    /// A matcher for an answer that ends with one of the tokens `stop`. `lead` allows two line breaks before it.
    pub fn new(constraint: Constraint<'c>, tokenizer: &'c Tokenizer, stop: &'c [u32], lead: bool) -> Self {
        let Constraint { grammar, tokens } = constraint;
        let mut heads = Vec::with_capacity(HEADS_MAX);
        heads.push(Head::new(grammar, lead));
        let scratch = Scratch {
            path: Vec::with_capacity(PATH),
            levels: Vec::with_capacity(TOKEN_BYTES_MAX + 2),
            before: Vec::with_capacity(HEADS_MAX),
            frames: Vec::with_capacity(FRAMES),
            moved: Vec::with_capacity(FRAMES),
            end: Vec::with_capacity(CLOSE_BYTES),
            other: Vec::with_capacity(CLOSE_BYTES),
            ids: Vec::with_capacity(CLOSE_BYTES),
        };
        let mask = vec![0; tokenizer.vocab_len().div_ceil(64)];
        Self { grammar, index: tokens, tokenizer, stop, heads, frames: Vec::with_capacity(FRAMES), mask, scratch }
    }

    /// Bytes of heap that one takes for a vocabulary of `tokens`.
    pub fn heap_bytes(tokens: usize) -> usize {
        let frames = 2 * FRAMES * size_of::<Frame>() + FRAMES * size_of::<(u32, u32)>();
        let heads = (PATH + 2 * HEADS_MAX) * size_of::<Head>();
        frames + heads + (TOKEN_BYTES_MAX + 2) * size_of::<Level>() + 6 * CLOSE_BYTES + tokens.div_ceil(64) * 8
    }

    /// Whether the answer is complete and nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.heads.iter().all(|h| h.end(self.grammar).1)
    }

    /// Computes which tokens may come next.
    pub fn compute_mask(&mut self) {
        self.mask.fill(0);
        if self.heads.iter().any(|h| h.end(self.grammar).0) {
            for &id in self.stop {
                if let Some(word) = self.mask.get_mut(id as usize / 64) {
                    *word |= 1 << (id % 64);
                }
            }
        }
        for i in 0..self.heads.len() {
            let head = self.heads[i];
            match head.shape(self.grammar) {
                Shape::Text(room) => {
                    self.index.text(room, &mut self.mask);
                    self.walk(head, &self.index.special, 0, self.index.special.ids.len());
                }
                Shape::Name => {
                    self.index.name(&mut self.mask);
                    self.walk(head, &self.index.special, 0, self.index.special.ids.len());
                }
                Shape::Other => {
                    for b in 0..=255 {
                        self.scratch.path.clear();
                        step(self.grammar, head, b, 0, &mut self.frames, &mut self.scratch.path);
                        let any = !self.scratch.path.is_empty();
                        let (from, to) = (self.index.starts[usize::from(b)], self.index.starts[usize::from(b) + 1]);
                        if any {
                            self.walk(head, &self.index.all, from as usize, to as usize);
                        }
                    }
                }
            }
        }
    }

    /// Whether token `id` may come next, as [`Matcher::compute_mask`] found.
    pub fn allows(&self, id: u32) -> bool {
        self.mask.get(id as usize / 64).is_some_and(|word| word >> (id % 64) & 1 != 0)
    }

    /// Sets the bits of the tokens `from..to` of `list` that `head` allows.
    fn walk(&mut self, head: Head, list: &Sorted, from: usize, to: usize) {
        let Self { grammar, tokenizer, frames, mask, scratch, .. } = self;
        let kept = frames.len();
        scratch.begin(&[head], kept);
        let mut i = from;
        while i < to {
            let id = list.ids[i];
            let bytes = tokenizer.token_bytes(id, true);
            // Levels are those of the bytes that this token shares with the last one that was looked at.
            let shared = if i == from { 0 } else { usize::from(list.shared[i]) };
            scratch.back(shared, frames);
            let alive = bytes.get(shared..).unwrap_or_default().iter().all(|&b| scratch.step(grammar, b, frames));
            i += 1;
            if alive {
                mask[id as usize / 64] |= 1 << (id % 64);
            } else {
                // All that share the byte that failed fail.
                let whole = scratch.levels.len() - 1;
                i += list.shared[i..to].iter().take_while(|&&n| usize::from(n) > whole).count();
            }
        }
        frames.truncate(kept);
    }

    /// Takes token `id`, unless the answer cannot be ended in `room` more tokens then: it is not taken, and the result is
    /// `false`, as it is for a token that may not come.
    pub fn take(&mut self, id: u32, room: usize) -> bool {
        let bytes = self.tokenizer.token_bytes(id, true);
        let (grammar, kept) = (self.grammar, self.frames.len());
        self.scratch.begin(&self.heads, kept);
        let alive = !bytes.is_empty() && bytes.iter().all(|&b| self.scratch.step(grammar, b, &mut self.frames));
        if !alive {
            self.frames.truncate(kept);
            return false;
        }
        let from = self.scratch.levels.last().map_or(0, |l| l.start);
        std::mem::swap(&mut self.heads, &mut self.scratch.before);
        self.heads.clear();
        self.heads.extend_from_slice(&self.scratch.path[from..]);
        if self.end_tokens(room) > room {
            std::mem::swap(&mut self.heads, &mut self.scratch.before);
            self.frames.truncate(kept);
            return false;
        }
        compact(&mut self.heads, &self.frames, &mut self.scratch.frames, &mut self.scratch.moved);
        std::mem::swap(&mut self.frames, &mut self.scratch.frames);
        true
    }

    /// How many tokens end the answer; if they are surely no more than `enough`, an upper bound.
    pub fn end_tokens(&mut self, enough: usize) -> usize {
        self.scratch.shortest(self.grammar, &self.heads, &self.frames);
        if self.scratch.end.len() <= enough { self.scratch.end.len() } else { self.end().len() }
    }

    /// Few tokens that complete the answer; none if it is complete.
    pub fn end(&mut self) -> &[u32] {
        self.scratch.shortest(self.grammar, &self.heads, &self.frames);
        let Scratch { end, ids, .. } = &mut self.scratch;
        ids.clear();
        self.index.split(self.tokenizer, end, ids);
        ids
    }
}

impl Scratch {
    fn begin(&mut self, heads: &[Head], frames: usize) {
        self.path.clear();
        self.levels.clear();
        self.path.extend_from_slice(heads);
        self.levels.push(Level { start: 0, end: heads.len(), frames });
    }

    /// Goes back to where `bytes` bytes were taken.
    fn back(&mut self, bytes: usize, frames: &mut Frames) {
        self.levels.truncate(bytes + 1);
        if let Some(level) = self.levels.last() {
            self.path.truncate(level.end);
            frames.truncate(level.frames);
        }
    }

    /// Takes `b`, if it may come.
    fn step(&mut self, grammar: &Grammar, b: u8, frames: &mut Frames) -> bool {
        let Some(&Level { start, end, .. }) = self.levels.last() else { return false };
        for i in start..end {
            step(grammar, self.path[i], b, end, frames, &mut self.path);
        }
        let level = Level { start: end, end: self.path.len(), frames: frames.len() };
        if level.end > end {
            self.levels.push(level);
        }
        level.end > end
    }

    /// Leaves in `end` the shortest end of the answers that `heads` stand for.
    fn shortest(&mut self, grammar: &Grammar, heads: &[Head], frames: &Frames) {
        self.end.clear();
        for (i, &head) in heads.iter().enumerate() {
            self.other.clear();
            if !head.end(grammar).0 {
                close(grammar, head, frames, &mut self.other);
            }
            if i == 0 || self.other.len() < self.end.len() {
                std::mem::swap(&mut self.end, &mut self.other);
            }
        }
    }
}
