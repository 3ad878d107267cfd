//! Builds a vocabulary from the texts of tokens and merges.

use super::{Alphabet, END_MASK, Kind, Tokens, Vocab, index::Index, merges::Merges};
use crate::FormatError;
use alloc::{format, vec::Vec};
use core::hash::BuildHasher;

/// Takes all tokens in order of their ids, then all merges in order of their ranks.
pub struct Builder<S> {
    alphabet: Alphabet,
    bytes: Vec<u8>,
    ends: Vec<u32>,
    index: Index<S>,
    triples: Vec<[u32; 3]>,
    scratch: Vec<u8>,
}

impl<S: BuildHasher> Builder<S> {
    /// Room for `len` tokens. `hasher` should be a random one: then nobody can choose texts that collide.
    pub fn new(len: usize, hasher: S) -> Self {
        Self {
            alphabet: Alphabet::new(),
            bytes: Vec::new(),
            ends: Vec::with_capacity(len),
            index: Index::new(len, hasher),
            triples: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Adds the next token: `text` is mapped from bytes for a normal one, and means itself for an added one.
    ///
    /// # Errors
    /// If the text is empty, known already, or of characters that no byte is mapped to; if there are more tokens than
    /// there is room for.
    pub fn token(&mut self, text: &str, kind: Kind) -> Result<(), FormatError> {
        let id = self.ends.len();
        let wrong = |found, expected: &str| Err(FormatError::invalid(format!("token {id}"), found, expected));
        let (start, shown) = (self.bytes.len(), || format!("{text:?}"));
        match kind {
            Kind::Unused => {}
            _ if text.is_empty() => return wrong("no text".into(), "some"),
            Kind::Normal if !self.alphabet.push_bytes(text, &mut self.bytes) => {
                return wrong(shown(), "characters that bytes are mapped to");
            }
            Kind::Normal => {}
            Kind::Control | Kind::Plain => self.bytes.extend_from_slice(text.as_bytes()),
        }
        if self.bytes.len() > END_MASK as usize || self.ends.len() == self.ends.capacity() {
            return wrong(shown(), "less text, of no more tokens than announced");
        }
        self.ends.push(self.bytes.len() as u32 | (kind as u32) << super::END_BITS);
        // A merge may give an added token if its text is the same mapped and unmapped.
        let own = self.bytes[start..].iter().all(|b| matches!(b, b'!'..=b'~'));
        if kind == Kind::Normal || (kind != Kind::Unused && own) {
            let tokens = Tokens { bytes: &self.bytes, ends: &self.ends };
            if let Err(first) = self.index.insert(tokens, id as u32) {
                return wrong(format!("{text:?}, which is token {first} too"), "each text once");
            }
        }
        Ok(())
    }

    /// Makes room for `len` merges.
    pub fn merges(&mut self, len: usize) {
        self.triples.reserve_exact(len);
    }

    /// Adds the next merge: two mapped texts with a space between.
    ///
    /// # Errors
    /// If it is not that, or the texts and their concatenation are not all tokens.
    pub fn merge(&mut self, text: &str) -> Result<(), FormatError> {
        let triple = text.split_once(' ').and_then(|(left, right)| self.triple(left, right));
        let triple = triple.ok_or_else(|| {
            FormatError::invalid(
                format!("merge {}", self.triples.len()),
                format!("{text:?}"),
                "two tokens with a space between, whose concatenation is a token",
            )
        })?;
        self.triples.push(triple);
        Ok(())
    }

    fn triple(&mut self, left: &str, right: &str) -> Option<[u32; 3]> {
        self.scratch.clear();
        let known = self.alphabet.push_bytes(left, &mut self.scratch);
        let cut = self.scratch.len();
        if !known || !self.alphabet.push_bytes(right, &mut self.scratch) {
            return None;
        }
        let tokens = Tokens { bytes: &self.bytes, ends: &self.ends };
        let (l, r) = self.scratch.split_at(cut);
        let (left, right) = (self.index.get(tokens, l)?, self.index.get(tokens, r)?);
        // Usually each merge gives the token after that of the merge before.
        let next = self.triples.last().map_or(0, |t| t[2].saturating_add(1));
        let guess = tokens.get(next).is_some_and(|(b, kind)| kind == Kind::Normal && b == self.scratch);
        let merged = if guess { next } else { self.index.get(tokens, &self.scratch)? };
        Some([left, right, merged])
    }

    /// The vocabulary.
    ///
    /// # Errors
    /// If a merge came twice.
    pub fn finish(self) -> Result<Vocab, FormatError> {
        let Self { mut bytes, ends, index, triples, .. } = self;
        drop(index);
        bytes.shrink_to_fit();
        let merges = Merges::new(Tokens { bytes: &bytes, ends: &ends }, triples.iter().copied())?;
        Ok(Vocab { bytes, ends, merges })
    }
}
