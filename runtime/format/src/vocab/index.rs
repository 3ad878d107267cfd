//! Finds tokens by their bytes while a vocabulary is built.

use super::Tokens;
use alloc::{vec, vec::Vec};
use core::hash::BuildHasher;

const FREE: u32 = u32::MAX;

/// A hash table of token ids, at most half full.
pub(super) struct Index<S> {
    slots: Vec<u32>,
    hasher: S,
}

impl<S: BuildHasher> Index<S> {
    /// Room for `len` tokens.
    pub fn new(len: usize, hasher: S) -> Self {
        Self { slots: vec![FREE; (len * 2).next_power_of_two().max(2)], hasher }
    }

    /// The token with these bytes.
    pub fn get(&self, tokens: Tokens<'_>, bytes: &[u8]) -> Option<u32> {
        let id = self.slots[self.slot(tokens, bytes)];
        (id != FREE).then_some(id)
    }

    /// Adds token `id` of `tokens`, or returns the one that has its bytes already.
    pub fn insert(&mut self, tokens: Tokens<'_>, id: u32) -> Result<(), u32> {
        let slot = self.slot(tokens, tokens.get(id).map_or(&[], |(bytes, _)| bytes));
        match self.slots[slot] {
            FREE => {
                self.slots[slot] = id;
                Ok(())
            }
            first => Err(first),
        }
    }

    /// The slot of the token with these bytes, or the free one where it would be.
    fn slot(&self, tokens: Tokens<'_>, bytes: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hasher.hash_one(bytes) as usize & mask;
        // Half of the slots are free, so the search ends.
        while self.slots[slot] != FREE && tokens.get(self.slots[slot]).is_none_or(|(b, _)| b != bytes) {
            slot = (slot + 1) & mask;
        }
        slot
    }
}
