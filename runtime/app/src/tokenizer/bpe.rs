//! Merges the bytes of one piece into tokens: always the pair with the lowest rank, the first of equal ones.

use forerun_format::vocab::Vocab;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No rank, or no place.
const NONE: u32 = u32::MAX;

/// A token of the piece, at the place of its first byte.
struct Symbol {
    id: u32,
    /// Places of its neighbours.
    prev: u32,
    next: u32,
    /// Rank of the merge with the next one, and what it gives.
    rank: u32,
    merged: u32,
}

/// Room for the pieces of one text.
pub(super) struct Bpe<'a> {
    vocab: &'a Vocab,
    bytes: &'a [u32; 256],
    symbols: Vec<Symbol>,
    /// Rank and place of merges to be done, the rank in the upper half. Those that no longer exist are skipped.
    queue: BinaryHeap<Reverse<u64>>,
}

impl<'a> Bpe<'a> {
    pub fn new(vocab: &'a Vocab, bytes: &'a [u32; 256]) -> Self {
        Self { vocab, bytes, symbols: Vec::new(), queue: BinaryHeap::new() }
    }

    /// Appends the tokens of `piece`, which has less than 2^32 bytes.
    pub fn encode(&mut self, piece: &[u8], ids: &mut Vec<u32>) {
        let last = piece.len().saturating_sub(1) as u32;
        self.symbols.clear();
        self.symbols.extend((0..).zip(piece).map(|(at, &byte)| Symbol {
            id: self.bytes[usize::from(byte)],
            prev: if at == 0 { NONE } else { at - 1 },
            next: if at == last { NONE } else { at + 1 },
            rank: NONE,
            merged: NONE,
        }));
        for at in 0..last {
            self.pair(at);
        }
        while let Some(Reverse(top)) = self.queue.pop() {
            let (rank, at) = ((top >> 32) as u32, top as u32);
            if self.symbols[at as usize].rank == rank {
                self.merge(at);
            }
        }
        let mut at = 0;
        while let Some(symbol) = self.symbols.get(at as usize) {
            ids.push(symbol.id);
            at = symbol.next;
        }
    }

    /// Replaces the symbol at `at` and its next one by what they merge to.
    fn merge(&mut self, at: u32) {
        let symbol = &mut self.symbols[at as usize];
        let (prev, gone) = (symbol.prev, symbol.next);
        symbol.id = symbol.merged;
        let next = self.symbols[gone as usize].next;
        self.symbols[gone as usize].rank = NONE;
        self.symbols[at as usize].next = next;
        if let Some(next) = self.symbols.get_mut(next as usize) {
            next.prev = at;
        }
        self.pair(at);
        if prev != NONE {
            self.pair(prev);
        }
    }

    /// Looks up the merge of the symbol at `at` with its next one.
    fn pair(&mut self, at: u32) {
        let symbol = &self.symbols[at as usize];
        let next = self.symbols.get(symbol.next as usize);
        let found = next.and_then(|next| self.vocab.merge(symbol.id, next.id));
        let (rank, merged) = found.unwrap_or((NONE, NONE));
        let symbol = &mut self.symbols[at as usize];
        (symbol.rank, symbol.merged) = (rank, merged);
        if rank != NONE {
            self.queue.push(Reverse(u64::from(rank) << 32 | u64::from(at)));
        }
    }
}
