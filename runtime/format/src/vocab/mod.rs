//! The vocabulary of a byte-level BPE tokenizer: the bytes and kind of each token, and the merges in a table to search.
//!
//! Read from the keys `forerun.vocab.*`, which `forerun-quant pack` writes, or built from the texts that other programs
//! write as `tokenizer.ggml.*`. Checks everything: each id is of this vocabulary, and what a merge gives is its two parts.
//! Never knows how a text is cut into the pieces that merges work on.

mod alphabet;
mod build;
mod index;
mod merges;

pub use alphabet::Alphabet;
pub use build::Builder;

use crate::gguf::{Header, HeaderBuilder, Kv, Value};
use crate::{FormatError, keys};
use alloc::{format, vec::Vec};
use core::hash::BuildHasher;
use merges::Merges;

/// Most tokens: what the engine takes. Tables for all of them are made before the first is read.
pub const TOKENS_MAX: usize = 1 << 20;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Comes about by merges.
    Normal = 0,
    /// Added, and left out of answers.
    Control = 1,
    /// Added, and part of answers.
    Plain = 2,
    /// Fills the vocabulary up to the rows of the embedding; has no bytes.
    Unused = 3,
}

impl Kind {
    /// The kind that `tokenizer.ggml.token_type` calls `n`.
    pub fn from_ggml(n: i64) -> Option<Self> {
        match n {
            1 => Some(Self::Normal),
            3 => Some(Self::Control),
            4 => Some(Self::Plain),
            5 => Some(Self::Unused),
            _ => None,
        }
    }

    fn from_bits(word: u32) -> Self {
        match word >> END_BITS {
            0 => Self::Normal,
            1 => Self::Control,
            2 => Self::Plain,
            _ => Self::Unused,
        }
    }
}

/// Bits of a word that say where a token ends; those above are its [`Kind`].
const END_BITS: u32 = 30;
const END_MASK: u32 = (1 << END_BITS) - 1;

/// Tokens by id, and merges by the two tokens that they join.
#[derive(Debug, PartialEq, Eq)]
pub struct Vocab {
    /// Bytes of all tokens, one after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end, and above [`END_BITS`] its kind, `[tokens]`.
    ends: Vec<u32>,
    merges: Merges,
}

impl Vocab {
    /// The vocabulary of a model file, in whichever form it has one. `hasher` should be a random one: then no file can
    /// choose texts that collide.
    ///
    /// # Errors
    /// If keys are missing, damaged, or at odds with each other.
    pub fn from_header(h: &Header<'_>, hasher: impl BuildHasher) -> Result<Self, FormatError> {
        match h.get(keys::VOCAB_VERSION) {
            Some(_) => Self::read(h),
            None => Self::from_texts(h, hasher),
        }
    }

    fn read(h: &Header<'_>) -> Result<Self, FormatError> {
        let version = h.u32(keys::VOCAB_VERSION)?;
        if version != keys::VOCAB_VERSION_NOW {
            let now = keys::VOCAB_VERSION_NOW;
            return Err(FormatError::invalid(keys::VOCAB_VERSION, format!("{version}"), format!("{now}")));
        }
        let wrong = |key: &str, expected| FormatError::invalid(format!("key {key}"), "another type", expected);
        let bytes = h.array(keys::VOCAB_BYTES)?.bytes().ok_or_else(|| wrong(keys::VOCAB_BYTES, "an array of u8"))?;
        let words = |key| h.array(key)?.words().ok_or_else(|| wrong(key, "an array of u32"));
        let (ends, merges) = (words(keys::VOCAB_ENDS)?, words(keys::VOCAB_MERGES)?);
        let ends = check_ends(ends.iter().map(|&w| u32::from_le_bytes(w)).collect(), bytes.len())?;
        let (triples, rest) = merges.as_chunks::<3>();
        if !rest.is_empty() {
            let expected = "three for each merge: left, right, result";
            return Err(FormatError::invalid(keys::VOCAB_MERGES, format!("{} numbers", merges.len()), expected));
        }
        let tokens = Tokens { bytes, ends: &ends };
        let merges = Merges::new(tokens, triples.iter().map(|t| t.map(u32::from_le_bytes)))?;
        Ok(Self { bytes: bytes.to_vec(), ends, merges })
    }

    fn from_texts(h: &Header<'_>, hasher: impl BuildHasher) -> Result<Self, FormatError> {
        let (tokens, types) = (h.array(TOKENS)?, h.array(TYPES)?);
        if tokens.is_empty() || tokens.len() != types.len() || tokens.len() > TOKENS_MAX {
            return Err(FormatError::invalid(
                format!("key {TYPES}"),
                format!("{} types for {} tokens", types.len(), tokens.len()),
                format!("one for each token, and 1 to {TOKENS_MAX} tokens"),
            ));
        }
        let text = |key: &str, i: usize, v: Value<'_>| {
            FormatError::invalid(format!("key {key}, element {i}"), format!("{v:?}"), "text")
        };
        let mut b = Builder::new(tokens.len(), hasher);
        for (i, (token, kind)) in tokens.iter().zip(types.iter()).enumerate() {
            let Value::Str(token) = token else { return Err(text(TOKENS, i, token)) };
            let known = match kind {
                Value::Int(n) => Kind::from_ggml(n),
                Value::Uint(n) => i64::try_from(n).ok().and_then(Kind::from_ggml),
                _ => None,
            };
            let known = known.ok_or_else(|| {
                FormatError::invalid(
                    format!("type of token {i}"),
                    format!("{kind:?}"),
                    "1 (normal), 3 (control), 4 (user-defined) or 5 (unused)",
                )
            })?;
            b.token(token, known)?;
        }
        let merges = h.array(MERGES)?;
        b.merges(merges.len());
        for (i, merge) in merges.iter().enumerate() {
            let Value::Str(merge) = merge else { return Err(text(MERGES, i, merge)) };
            b.merge(merge)?;
        }
        b.finish()
    }

    /// Sets the keys `forerun.vocab.*`, from which [`Vocab::from_header`] gives an equal vocabulary.
    pub fn write(&self, h: &mut HeaderBuilder) {
        h.set(keys::VOCAB_VERSION, Kv::U32(keys::VOCAB_VERSION_NOW));
        h.set(keys::VOCAB_BYTES, Kv::U8s(self.bytes.clone()));
        h.set(keys::VOCAB_ENDS, Kv::U32s(self.ends.clone()));
        h.set(keys::VOCAB_MERGES, Kv::U32s(self.merges.in_order()));
    }

    /// Number of tokens, unused ones included.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no token; never, in what was read from a file.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Number of merges.
    pub fn merge_count(&self) -> usize {
        self.merges.len()
    }

    /// Bytes and kind of token `id`, if there is one.
    pub fn token(&self, id: u32) -> Option<(&[u8], Kind)> {
        Tokens { bytes: &self.bytes, ends: &self.ends }.get(id)
    }

    /// Rank and result of merging the tokens `left` and `right`; lower ranks come first. No two merges share a rank.
    pub fn merge(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.merges.get(left, right)
    }

    /// Bytes of heap that it takes.
    pub fn heap_bytes(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<u32>() + self.merges.heap_bytes()
    }
}

/// Tokens by id, borrowed while merges are checked.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    bytes: &'a [u8],
    ends: &'a [u32],
}

impl<'a> Tokens<'a> {
    fn get(self, id: u32) -> Option<(&'a [u8], Kind)> {
        let word = *self.ends.get(id as usize)?;
        let start = (id as usize).checked_sub(1).map_or(0, |i| self.ends[i] & END_MASK);
        // Ends rise up to `bytes.len()`: `check_ends`, or the builder that pushed both.
        Some((&self.bytes[start as usize..(word & END_MASK) as usize], Kind::from_bits(word)))
    }
}

/// `ends`, if they cut `bytes` bytes into tokens.
fn check_ends(ends: Vec<u32>, bytes: usize) -> Result<Vec<u32>, FormatError> {
    let wrong = |what, found, expected: &str| Err(FormatError::invalid(what, found, expected));
    let key = keys::VOCAB_ENDS;
    if ends.is_empty() || ends.len() > TOKENS_MAX {
        return wrong(format!("key {key}"), format!("{} tokens", ends.len()), "1 to 1048576");
    }
    let mut start = 0;
    for (id, &word) in ends.iter().enumerate() {
        let end = word & END_MASK;
        let unused = Kind::from_bits(word) == Kind::Unused;
        if end < start || (end == start) != unused {
            return wrong(
                format!("{key} of token {id}"),
                format!("{start} to {end}"),
                "some bytes, or none if it is unused",
            );
        }
        start = end;
    }
    if start as usize != bytes {
        return wrong(
            format!("key {}", keys::VOCAB_BYTES),
            format!("{bytes} bytes"),
            &format!("{start}, as {key} says"),
        );
    }
    Ok(ends)
}
