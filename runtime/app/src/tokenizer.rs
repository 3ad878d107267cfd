//! Byte-level BPE of Qwen3.5: text to token ids and back.
//!
//! Relies on `forerun_format::vocab` for tokens and merges. Never adds tokens of its own accord, and never changes after
//! it is built; encoding takes heap in proportion to the text, and gives it back.

mod added;
mod bpe;
mod classes;
mod pieces;

use added::Added;
use bpe::Bpe;
use forerun_format::{
    FormatError,
    gguf::Header,
    vocab::{Alphabet, Kind, Vocab},
};
use std::hash::RandomState;
use unicode_normalization_alignments::UnicodeNormalization;

/// Most bytes of a text: normalizing makes up to three of one, and places in a piece are 32 bits.
const TEXT_BYTES_MAX: usize = 1 << 30;

/// Bytes of the longest token of published vocabularies; [`Stream`] grows for longer ones.
const TOKEN_BYTES: usize = 256;

/// Text that could not be tokenized.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a text of {0} bytes cannot be tokenized, expected at most {TEXT_BYTES_MAX}: shorten it")]
pub struct EncodeError(usize);

/// Text to token ids and back.
pub struct Tokenizer {
    vocab: Vocab,
    /// The token of each byte, from which merges start.
    bytes: [u32; 256],
    added: Added,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_len", &self.vocab_len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer of a model file.
    ///
    /// # Errors
    /// If a key is missing, the kind is not `gpt2` / `qwen35`, or the vocabulary is damaged.
    pub fn from_header(header: &Header<'_>) -> Result<Self, FormatError> {
        expect_text(header, "tokenizer.ggml.model", "gpt2")?;
        expect_text(header, "tokenizer.ggml.pre", "qwen35")?;
        let vocab = Vocab::from_header(header, RandomState::new())?;
        let added = Added::new(&vocab)?;
        // With all 256 in the vocabulary no text is unknown, and nothing is dropped without a word.
        let bytes = byte_tokens(&vocab)?;
        Ok(Self { vocab, bytes, added })
    }

    /// Token ids of `text`. Texts of added tokens become these tokens wherever they stand, as in the reference: text
    /// from a stranger can thus forge the structure of a conversation; see [`crate::prompt::check_text`].
    ///
    /// # Errors
    /// If the text has over a GiB.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError(text.len()));
        }
        let (mut ids, mut bpe) = (Vec::new(), Bpe::new(&self.vocab, &self.bytes));
        let mut rest = text;
        while let Some((at, id, len)) = self.added.find(&self.vocab, rest.as_bytes()) {
            plain(&rest[..at], &mut bpe, &mut ids);
            ids.push(id);
            rest = &rest[at + len..];
        }
        plain(rest, &mut bpe, &mut ids);
        Ok(ids)
    }

    /// Text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown and unused ids nothing. `skip_special` leaves out
    /// tokens such as `<|im_end|>`, but not `<think>` or `<tool_call>`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id, skip_special)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Bytes of one token; empty if the id is unknown, unused, or special and to be skipped.
    pub fn token_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        match self.vocab.token(id) {
            Some((bytes, kind)) if !(skip_special && kind == Kind::Control) => bytes,
            _ => &[],
        }
    }

    /// Whether `id` is a token of plain text: not an added, special or unused one.
    pub fn is_normal(&self, id: u32) -> bool {
        matches!(self.vocab.token(id), Some((_, Kind::Normal)))
    }

    /// Id of the token whose text is exactly `token`: an added one, or one whose bytes are mapped to this text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        let added = self.added.longest(&self.vocab, token.as_bytes()).filter(|&(_, len)| len == token.len());
        added.map(|(id, _)| id).or_else(|| {
            let mut bytes = Vec::new();
            let mapped = Alphabet::new().push_bytes(token, &mut bytes);
            (0..self.vocab_len() as u32).find(|&id| mapped && self.vocab.token(id) == Some((&bytes, Kind::Normal)))
        })
    }

    /// Number of ids, unused ones included.
    pub fn vocab_len(&self) -> usize {
        self.vocab.len()
    }

    /// Bytes of heap that it takes.
    pub fn heap_bytes(&self) -> usize {
        self.vocab.heap_bytes() + self.added.heap_bytes()
    }
}

/// Adds the tokens of `text`, in which there is no added token.
fn plain(text: &str, bpe: &mut Bpe<'_>, ids: &mut Vec<u32>) {
    let mut encode = |text: &str| pieces::pieces(text).for_each(|piece| bpe.encode(piece.as_bytes(), ids));
    // What stands before U+0300, whose first byte is CC, is normal as it is.
    if text.bytes().all(|b| b < 0xCC) {
        encode(text);
    } else {
        encode(&text.nfc().map(|(c, _)| c).collect::<String>());
    }
}

/// The token of each byte.
fn byte_tokens(vocab: &Vocab) -> Result<[u32; 256], FormatError> {
    let mut tokens = [None; 256];
    for id in 0..vocab.len() as u32 {
        if let Some((&[byte], Kind::Normal)) = vocab.token(id)
            && let Some(first) = tokens[usize::from(byte)].replace(id)
        {
            return Err(FormatError::invalid(
                format!("token {id}"),
                format!("byte {byte:#04x}, which is token {first} too"),
                "each byte once",
            ));
        }
    }
    if let Some(byte) = tokens.iter().position(Option::is_none) {
        return Err(FormatError::invalid(
            "the vocabulary",
            format!("no token for byte {byte:#04x}"),
            "one for each of the 256 bytes",
        ));
    }
    Ok(tokens.map(Option::unwrap_or_default))
}

/// Turns the tokens of an answer into text as they come, and shows no half characters.
#[derive(Debug)]
pub struct Stream {
    skip_special: bool,
    /// Bytes of a character that is not complete yet; at most 3 between calls.
    pending: Vec<u8>,
    text: String,
}

impl Stream {
    /// An empty stream; `skip_special` as in [`Tokenizer::decode`].
    pub fn new(skip_special: bool) -> Self {
        // What is not UTF-8 becomes three bytes for one.
        let text = String::with_capacity(3 * TOKEN_BYTES);
        Self { skip_special, pending: Vec::with_capacity(TOKEN_BYTES), text }
    }

    /// Adds one token and returns the text that became complete with it, often the token's own, sometimes nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> &str {
        self.text.clear();
        self.pending.extend_from_slice(tokenizer.token_bytes(id, self.skip_special));
        let mut keep = 0;
        for chunk in self.pending.utf8_chunks() {
            self.text.push_str(chunk.valid());
            // Only at the very end can an invalid sequence still be completed; elsewhere it is final.
            let invalid = chunk.invalid();
            if std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) && ends_with(&self.pending, invalid)
            {
                keep = invalid.len();
            } else if !invalid.is_empty() {
                self.text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - keep);
        &self.text
    }

    /// Ends the answer: U+FFFD if its last character is incomplete, else nothing. The stream is empty afterwards.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        &self.text
    }
}

/// Whether `tail`, a part of `all`, is its end.
fn ends_with(all: &[u8], tail: &[u8]) -> bool {
    all.as_ptr_range().end == tail.as_ptr_range().end
}

fn expect_text(header: &Header<'_>, key: &str, expected: &str) -> Result<(), FormatError> {
    match header.str_opt(key)? {
        Some(s) if s == expected => Ok(()),
        Some(s) => Err(FormatError::invalid(format!("key {key}"), format!("{s:?}"), format!("{expected:?}"))),
        None => Err(FormatError::MissingKey(key.into())),
    }
}

#[cfg(test)]
mod tests;
