//! The tokens of a vocabulary in the order of their bytes, so that those which share a beginning are checked once.
//!
//! Relies on the vocabulary having a token for each byte, which the tokenizer checked: whatever may follow can be said. Tokens
//! that are added (`<think>`, `<|im_end|>`) or longer than [`TOKEN_BYTES_MAX`] are never part of JSON.

use super::string::{self, BOUNDARY, END, REJECT};
use crate::tokenizer::Tokenizer;

/// Longest token that is used. Published vocabularies have none above.
pub(super) const TOKEN_BYTES_MAX: usize = 128;

/// Characters of a token that is no part of a text, or has too many of them.
const NO_TEXT: u8 = 127;
/// Beside the characters: it has a backslash.
const BACKSLASH: u8 = 128;

/// Some tokens, sorted by their bytes.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    pub ids: Vec<u32>,
    /// Bytes that each has in common with the one before.
    pub shared: Vec<u8>,
}

impl Sorted {
    fn new(mut ids: Vec<u32>, tokenizer: &Tokenizer) -> Self {
        let bytes = |id: u32| tokenizer.token_bytes(id, true);
        ids.sort_unstable_by(|&a, &b| bytes(a).cmp(bytes(b)));
        ids.shrink_to_fit();
        let mut shared = Vec::with_capacity(ids.len());
        for (i, &id) in ids.iter().enumerate() {
            let before = i.checked_sub(1).map_or(&[][..], |i| bytes(ids[i]));
            let common = before.iter().zip(bytes(id)).take_while(|(a, b)| a == b).count();
            shared.push(common as u8); // at most TOKEN_BYTES_MAX
        }
        Self { ids, shared }
    }

    fn heap_bytes(&self) -> usize {
        self.ids.capacity() * size_of::<u32>() + self.shared.capacity()
    }
}

/// A vocabulary's tokens, prepared for [`super::Matcher`].
#[derive(Debug)]
pub struct TokenIndex {
    /// All that may be used.
    pub(super) all: Sorted,
    /// Where tokens with this first byte begin in `all`.
    pub(super) starts: [u32; 257],
    /// Those that need a look inside of texts: they end one, escape something, or are very long.
    pub(super) special: Sorted,
    /// By id: characters begun in a text, [`NO_TEXT`] and [`BACKSLASH`].
    characters: Vec<u8>,
}

impl TokenIndex {
    /// Sorts the tokens of `tokenizer`; takes some tenths of a second for the published vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let n = tokenizer.vocab_len();
        let usable = |id: &u32| tokenizer.is_normal(*id) && tokenizer.token_bytes(*id, true).len() <= TOKEN_BYTES_MAX;
        let mut ids = Vec::with_capacity(n);
        ids.extend((0..n as u32).filter(usable));
        let all = Sorted::new(ids, tokenizer);
        let mut characters = Vec::with_capacity(n);
        characters.resize(n, NO_TEXT);
        let mut special = Vec::new();
        for &id in &all.ids {
            let bytes = tokenizer.token_bytes(id, true);
            let (count, ends) = text(bytes);
            let long = count.is_some_and(|c| c >= NO_TEXT);
            let backslash = bytes.contains(&b'\\');
            if ends || (count.is_some() && (long || backslash)) {
                special.push(id);
            }
            if let (Some(c), false) = (count, long) {
                characters[id as usize] = c | if backslash { BACKSLASH } else { 0 };
            }
        }
        let mut starts = [0; 257];
        let first = |i: u32| tokenizer.token_bytes(all.ids[i as usize], true)[0];
        let mut i = 0;
        for (b, start) in starts.iter_mut().enumerate() {
            while i < all.ids.len() as u32 && usize::from(first(i)) < b {
                i += 1;
            }
            *start = i;
        }
        Self { all, starts, special: Sorted::new(special, tokenizer), characters }
    }

    /// Sets the bits of tokens that go on with a text which has room for `room` characters.
    pub(super) fn text(&self, room: u32, mask: &mut [u64]) {
        let room = room.min(u32::from(NO_TEXT) - 1) as u8;
        self.set(mask, |c| c & !BACKSLASH <= room);
    }

    /// Sets the bits of tokens that go on with a name.
    pub(super) fn name(&self, mask: &mut [u64]) {
        self.set(mask, |c| c < NO_TEXT);
    }

    fn set(&self, mask: &mut [u64], allowed: impl Fn(u8) -> bool) {
        for (word, characters) in mask.iter_mut().zip(self.characters.chunks(64)) {
            *word |= characters.iter().enumerate().fold(0, |w, (i, &c)| w | u64::from(allowed(c)) << i);
        }
    }

    /// Most bytes of heap that it takes for a vocabulary of `tokens`, while it is made too.
    pub fn bytes_max(tokens: usize) -> usize {
        // Two lists of ids and shared bytes, of which the second has a part of the tokens, and characters.
        tokens * (2 * (size_of::<u32>() + 1) + 1)
    }

    /// Bytes of heap that it takes.
    pub fn heap_bytes(&self) -> usize {
        self.all.heap_bytes() + self.special.heap_bytes() + self.characters.capacity()
    }

    /// Fewest tokens, taking the longest one each time, whose bytes are `text`.
    pub(super) fn split(&self, tokenizer: &Tokenizer, text: &[u8], out: &mut Vec<u32>) {
        let mut rest = text;
        while let Some(&first) = rest.first() {
            let (mut lo, mut hi) =
                (self.starts[usize::from(first)] as usize, self.starts[usize::from(first) + 1] as usize);
            let bytes = |i: usize| tokenizer.token_bytes(self.all.ids[i], true);
            let mut best = None;
            for (at, &b) in rest.iter().enumerate() {
                lo += self.all.ids[lo..hi]
                    .partition_point(|&id| tokenizer.token_bytes(id, true).get(at).is_none_or(|&c| c < b));
                hi = lo
                    + self.all.ids[lo..hi]
                        .partition_point(|&id| tokenizer.token_bytes(id, true).get(at).is_some_and(|&c| c <= b));
                if lo == hi {
                    break;
                }
                if bytes(lo).len() == at + 1 {
                    best = Some((self.all.ids[lo], at + 1));
                }
            }
            // There is a token for each byte.
            let Some((id, len)) = best else { return };
            out.push(id);
            rest = &rest[len..];
        }
    }
}

/// Characters that `bytes` begin inside of a text, if they stay there, and whether they end it.
fn text(bytes: &[u8]) -> (Option<u8>, bool) {
    let (mut state, mut count) = (BOUNDARY, 0u8);
    for &b in bytes {
        if state == BOUNDARY {
            count = count.saturating_add(1);
        }
        state = string::step(state, b);
        match state {
            END => return (None, true),
            REJECT => return (None, false),
            _ => {}
        }
    }
    (Some(count), false)
}
