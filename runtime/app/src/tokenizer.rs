//! Byte-level BPE of Qwen3.5, built from the keys `tokenizer.ggml.*` of a model file.
//!
//! Relies on the `tokenizers` crate for NFC, added tokens and merges; splits text and decodes by itself. Never adds
//! tokens of its own accord, and never changes after it is built.

use forerun_format::{
    FormatError,
    gguf::{Array, Header, Value},
};
use regex::Regex;
use std::collections::HashSet;
use tokenizers::{
    AddedToken, Offsets, PostProcessorWrapper, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior, TokenizerImpl,
    decoders::byte_level::ByteLevel,
    models::bpe::{BPE, Merges, Vocab},
    normalizers::unicode::NFC,
    pattern::Pattern,
};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TYPES: &str = "tokenizer.ggml.token_type";

/// The pieces that BPE sees one at a time. The published expression ends in `\s+(?!\S)|\s+`: [`Pieces::next`] does its
/// look-ahead by hand, since engines that have one give up, without an error, on very long runs of spaces.
const PIECE: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// Most added tokens a file may have (the real one has about fifty) and the longest one in bytes. They are searched for
/// all at once, in memory that grows with them.
const ADDED_MAX: usize = 4096;
const ADDED_BYTES_MAX: usize = 256;

/// Most tokens of a vocabulary: what the engine takes. Tables for all of them are made before the first is read.
const VOCAB_MAX: usize = 1 << 20;

/// Text that could not be tokenized.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the text cannot be tokenized: {0}")]
pub struct EncodeError(String);

type Inner = TokenizerImpl<BPE, NFC, Pieces, PostProcessorWrapper, ByteLevel>;

/// Text to token ids and back.
pub struct Tokenizer {
    inner: Inner,
    /// Bytes of all tokens, one after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end, and whether it is special, `[vocabulary]`.
    ends: Vec<(u32, bool)>,
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
    /// If a key is missing, the kind is not `gpt2` / `qwen35`, or the arrays do not fit each other.
    pub fn from_header(header: &Header<'_>) -> Result<Self, FormatError> {
        expect_text(header, "tokenizer.ggml.model", "gpt2")?;
        expect_text(header, "tokenizer.ggml.pre", "qwen35")?;
        let tokens = header.array(TOKENS)?;
        let types = header.array(TYPES)?;
        if tokens.is_empty() || tokens.len() != types.len() || tokens.len() > VOCAB_MAX {
            return Err(FormatError::invalid(
                format!("key {TYPES}"),
                format!("{} types for {} tokens", types.len(), tokens.len()),
                format!("one for each token, and 1 to {VOCAB_MAX} tokens"),
            ));
        }

        let mut vocab = Vocab::with_capacity(tokens.len());
        let mut added = Vec::new();
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(tokens.len());
        let alphabet = Alphabet::new();
        for (id, (token, kind)) in texts(TOKENS, tokens).zip(types.iter()).enumerate() {
            let token = token?;
            let kind = Kind::of(id, kind)?;
            match kind {
                Kind::Unused => {}
                Kind::Normal => alphabet.push_bytes(token, &mut bytes),
                Kind::Special | Kind::Plain => {
                    if added.len() == ADDED_MAX || token.len() > ADDED_BYTES_MAX {
                        return Err(FormatError::invalid(
                            format!("added token {id}"),
                            format!("number {} with {} bytes", added.len() + 1, token.len()),
                            format!("at most {ADDED_MAX}, of up to {ADDED_BYTES_MAX} bytes each"),
                        ));
                    }
                    added.push(AddedToken::from(token, kind == Kind::Special).normalized(false));
                    bytes.extend_from_slice(token.as_bytes());
                }
            }
            let end = u32::try_from(bytes.len())
                .map_err(|_| FormatError::invalid(format!("key {TOKENS}"), "over 4 GiB of text", "less"))?;
            ends.push((end, kind == Kind::Special));
            if kind == Kind::Unused {
                continue;
            }
            if token.is_empty() {
                return Err(FormatError::invalid(format!("token {id}"), "no text", "some"));
            }
            if let Some(first) = vocab.insert(token.to_owned(), id as u32) {
                return Err(FormatError::invalid(
                    format!("token {id}"),
                    format!("{token:?}, which is token {first} too"),
                    "each text once",
                ));
            }
        }
        // With all 256 in the vocabulary no text is unknown, and nothing is dropped without a word.
        if let Some(byte) =
            (0..=255).find(|&b| !vocab.contains_key(alphabet.chars[b as usize].encode_utf8(&mut [0; 4])))
        {
            return Err(FormatError::invalid(
                format!("key {TOKENS}"),
                format!("no token for byte {byte:#04x}"),
                "one for each of the 256 bytes",
            ));
        }

        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges(header.array(MERGES)?)?)
            .cache_capacity(0) // prompts are short; a cache would grow by itself after memory is sealed
            .build()
            .map_err(|e| FormatError::invalid(format!("key {MERGES}"), e.to_string(), "merges of known tokens"))?;
        let mut inner = Inner::new(bpe);
        inner.with_normalizer(Some(NFC));
        inner.with_pre_tokenizer(Some(Pieces::new()?));
        inner.add_tokens(&added);
        Ok(Self { inner, bytes, ends })
    }

    /// Token ids of `text`. Texts of added tokens become these tokens wherever they stand, as in the reference: text
    /// from a stranger can thus forge the structure of a conversation; see [`crate::prompt::check_text`].
    ///
    /// # Errors
    /// If the underlying library refuses; no text is known to cause this.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| EncodeError(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown and unused ids nothing. `skip_special` leaves out
    /// tokens such as `<|im_end|>`, but not `<think>` or `<tool_call>`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id, skip_special)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Bytes of one token; empty if the id is unknown, unused, or special and to be skipped.
    pub fn token_bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        match self.ends.get(id as usize) {
            Some(&(end, special)) if !(special && skip_special) => {
                let start = (id as usize).checked_sub(1).map_or(0, |i| self.ends[i].0);
                &self.bytes[start as usize..end as usize]
            }
            _ => &[],
        }
    }

    /// Id of the token whose text in the vocabulary is exactly `token`.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of ids, unused ones included.
    pub fn vocab_len(&self) -> usize {
        self.ends.len()
    }
}

/// Turns the tokens of an answer into text as they come, and shows no half characters.
#[derive(Debug, Default)]
pub struct Stream {
    skip_special: bool,
    /// Bytes of a character that is not complete yet; at most 3 between calls.
    pending: Vec<u8>,
    text: String,
}

impl Stream {
    /// An empty stream; `skip_special` as in [`Tokenizer::decode`].
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, ..Self::default() }
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

fn texts<'a>(key: &'static str, array: Array<'a>) -> impl Iterator<Item = Result<&'a str, FormatError>> {
    array.iter().enumerate().map(move |(i, v)| match v {
        Value::Str(s) => Ok(s),
        v => Err(FormatError::invalid(format!("key {key}, element {i}"), format!("{v:?}"), "text")),
    })
}

fn merges(array: Array<'_>) -> Result<Merges, FormatError> {
    let mut seen = HashSet::new();
    texts(MERGES, array)
        .enumerate()
        .map(|(i, merge)| {
            let merge = merge?;
            let wrong = |what: &str| {
                FormatError::invalid(
                    format!("merge {i}"),
                    format!("{merge:?}{what}"),
                    "two tokens with a space between, once",
                )
            };
            if !seen.insert(merge) {
                return Err(wrong(" a second time"));
            }
            match merge.split_once(' ') {
                Some((a, b)) if !a.is_empty() && !b.is_empty() && !b.contains(' ') => Ok((a.to_owned(), b.to_owned())),
                _ => Err(wrong("")),
            }
        })
        .collect()
}

/// What `tokenizer.ggml.token_type` says of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    /// Added, and left out of answers.
    Special,
    /// Added, and part of answers.
    Plain,
    /// Fills the vocabulary up to the rows of the embedding.
    Unused,
}

impl Kind {
    fn of(id: usize, v: Value<'_>) -> Result<Self, FormatError> {
        match v {
            Value::Int(1) | Value::Uint(1) => Ok(Self::Normal),
            Value::Int(3) | Value::Uint(3) => Ok(Self::Special),
            Value::Int(4) | Value::Uint(4) => Ok(Self::Plain),
            Value::Int(5) | Value::Uint(5) => Ok(Self::Unused),
            v => Err(FormatError::invalid(
                format!("type of token {id}"),
                format!("{v:?}"),
                "1 (normal), 3 (control), 4 (user-defined) or 5 (unused)",
            )),
        }
    }
}

/// GPT-2's mapping of bytes to printable characters: bytes that are printable in Latin-1 stand for themselves, the
/// others for U+0100 and up, in order.
struct Alphabet {
    chars: [char; 256],
    bytes: [Option<u8>; 0x144],
}

impl Alphabet {
    fn new() -> Self {
        let mut a = Self { chars: ['\0'; 256], bytes: [None; 0x144] };
        let mut others = '\u{100}'..;
        for b in 0..=255_u8 {
            let printable = matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let c = if printable { char::from(b) } else { others.next().unwrap_or('\0') };
            a.chars[usize::from(b)] = c;
            a.bytes[c as usize] = Some(b);
        }
        a
    }

    /// Appends the bytes that `token` stands for; its own if it is not made of the alphabet, as the reference does.
    fn push_bytes(&self, token: &str, out: &mut Vec<u8>) {
        let start = out.len();
        for c in token.chars() {
            match self.bytes.get(c as usize).copied().flatten() {
                Some(b) => out.push(b),
                None => {
                    out.truncate(start);
                    out.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }
}

/// Splits text into pieces and maps their bytes to GPT-2's alphabet.
struct Pieces {
    regex: Regex,
    bytes: ByteLevel,
}

impl Pieces {
    fn new() -> Result<Self, FormatError> {
        let regex = Regex::new(PIECE)
            .map_err(|e| FormatError::invalid("the split expression of this program", e.to_string(), "a valid one"))?;
        Ok(Self { regex, bytes: ByteLevel::new(false, false, false) })
    }

    /// Bounds of the piece that follows `at`, in bytes.
    fn next(&self, text: &str, at: usize) -> Option<Offsets> {
        let m = self.regex.find_at(text, at)?;
        let mut end = m.end();
        // `\s+(?!\S)`: the last space before a word belongs to the word, unless it is the only one.
        if end < text.len() && m.as_str().chars().all(char::is_whitespace) && !m.as_str().ends_with(['\r', '\n']) {
            let last = m.as_str().chars().next_back().map_or(0, char::len_utf8);
            if end - last > m.start() {
                end -= last;
            }
        }
        Some((m.start(), end))
    }
}

impl Pattern for &Pieces {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        let mut out = Vec::new();
        let mut at = 0;
        while let Some((start, end)) = self.next(text, at) {
            if start > at {
                out.push(((at, start), false));
            }
            out.push(((start, end), true));
            at = end;
        }
        if at < text.len() || text.is_empty() {
            out.push(((at, text.len()), false));
        }
        Ok(out)
    }
}

impl PreTokenizer for Pieces {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        text.split(|_, piece| piece.split(self, SplitDelimiterBehavior::Isolated))?;
        self.bytes.pre_tokenize(text)
    }
}

#[cfg(test)]
mod tests;
