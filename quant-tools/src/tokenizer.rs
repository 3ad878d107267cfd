//! `tokenizer.json` and `tokenizer_config.json` as GGUF metadata: byte-level BPE of Qwen 3.5 (`gpt2` model, `qwen35`
//! pre-tokenizer). Anything that GGUF could not express, or that forerun's tokenizer does not do, is refused.

use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
};
use forerun_format::{FormatError, vocab};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::hash::RandomState;

/// The only pre-tokenizer known: Qwen 3.5's, which GGUF calls `qwen35`.
pub(crate) const REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Token types of GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Vocabulary and merges as plain GGUF stores them.
#[derive(Debug)]
pub struct Tokenizer {
    /// Token text by id: byte-mapped for the vocabulary, plain for added tokens, `[PADn]` where there is none.
    pub tokens: Vec<String>,
    /// Token type by id.
    pub types: Vec<i32>,
    /// Merges in order of rank, `a b`.
    pub merges: Vec<String>,
    /// Jinja chat template.
    pub chat_template: String,
    /// Id of the end-of-answer token.
    pub eos: Option<u64>,
    /// Id of the padding token.
    pub pad: Option<u64>,
    ids: HashMap<String, u64>,
    names: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    model: Bpe,
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Bpe {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u64>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair(String, String),
}

fn refuse(what: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> Error {
    Error::input(format!("tokenizer.json: {what}"), found, expected)
}

impl Tokenizer {
    /// Reads the tokenizer of `checkpoint` and pads it to `vocab` tokens, the rows of the embedding.
    ///
    /// # Errors
    /// If a file is missing or damaged, or the tokenizer is of another kind.
    pub fn load(checkpoint: &Checkpoint, vocab: u64) -> Result<Self> {
        let raw: Raw = checkpoint.json("tokenizer.json")?;
        check_kind(&raw)?;
        let mut tokens: Vec<Option<String>> = vec![None; vocab as usize];
        let mut types = vec![UNUSED; vocab as usize];
        let mut ids = HashMap::new();
        for (text, id) in &raw.model.vocab {
            let slot = tokens.get_mut(*id as usize).ok_or_else(|| too_large(text, *id, vocab))?;
            if let Some(other) = slot.replace(text.clone()) {
                return Err(refuse(&format!("token {id}"), format!("{other:?} and {text:?}"), "one text"));
            }
            types[*id as usize] = NORMAL;
            ids.insert(text.clone(), *id);
        }
        for a in &raw.added_tokens {
            if a.single_word || a.lstrip || a.rstrip || a.content.is_empty() {
                return Err(refuse(
                    &format!("added token {:?}", a.content),
                    "single_word, lstrip, rstrip or no text",
                    "a plain text",
                ));
            }
            let slot = tokens.get_mut(a.id as usize).ok_or_else(|| too_large(&a.content, a.id, vocab))?;
            match slot.replace(a.content.clone()) {
                Some(other) if other != a.content => {
                    return Err(refuse(
                        &format!("token {}", a.id),
                        format!("{other:?} and {:?}", a.content),
                        "one text",
                    ));
                }
                _ => {}
            }
            if ids.insert(a.content.clone(), a.id).is_some_and(|old| old != a.id) {
                return Err(refuse(&format!("added token {:?}", a.content), "two ids", "one"));
            }
            types[a.id as usize] = if a.special { CONTROL } else { USER_DEFINED };
        }
        let tokens = tokens.into_iter().enumerate().map(|(i, t)| t.unwrap_or_else(|| format!("[PAD{i}]"))).collect();
        let merges = merges(&raw.model)?;

        let mut config: serde_json::Map<String, Value> =
            checkpoint.json_opt("tokenizer_config.json")?.unwrap_or_default();
        let chat_template = match checkpoint.text("chat_template.jinja")? {
            Some(t) => t,
            None => match config.remove("chat_template") {
                Some(Value::String(t)) => t,
                _ => {
                    return Err(Error::input(
                        "the checkpoint",
                        "no chat template",
                        "chat_template.jinja, or chat_template in tokenizer_config.json",
                    ));
                }
            },
        };
        let names: HashMap<String, String> =
            config.into_iter().filter_map(|(k, v)| token_text(&v).map(|t| (k, t))).collect();
        let mut t = Self { tokens, types, merges, chat_template, eos: None, pad: None, ids, names };
        t.eos = t.named("eos_token", &[])?;
        t.pad = t.named("pad_token", &[])?;
        Ok(t)
    }

    /// Id of the token that tokenizer_config.json calls `attribute`, or else of the first of `texts` that there is.
    ///
    /// # Errors
    /// If the attribute names a token that does not exist.
    pub fn named(&self, attribute: &str, texts: &[&str]) -> Result<Option<u64>> {
        if let Some(text) = self.names.get(attribute) {
            let id = self.ids.get(text).copied();
            return id.map(Some).ok_or_else(|| {
                Error::input(format!("tokenizer_config.json: {attribute}"), format!("{text:?}"), "a token")
            });
        }
        Ok(texts.iter().find_map(|t| self.ids.get(*t).copied()))
    }

    /// Tokens and merges as the packed layout has them.
    ///
    /// # Errors
    /// If a token is not text that bytes are mapped to.
    pub fn vocab(&self) -> std::result::Result<vocab::Vocab, FormatError> {
        let mut b = vocab::Builder::new(self.tokens.len(), RandomState::new());
        for (text, kind) in self.tokens.iter().zip(&self.types) {
            b.token(text, vocab::Kind::from_ggml((*kind).into()).unwrap_or(vocab::Kind::Unused))?;
        }
        self.merges.iter().try_for_each(|merge| b.merge(merge))?;
        b.finish()
    }
}

/// `"text"` or `{"content": "text"}`.
fn token_text(v: &Value) -> Option<String> {
    v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_string)
}

fn too_large(text: &str, id: u64, vocab: u64) -> Error {
    refuse(&format!("token {text:?}"), format!("id {id}"), format!("an id below vocab_size, {vocab}"))
}

fn check_kind(raw: &Raw) -> Result<()> {
    let m = &raw.model;
    let empty = |s: &Option<String>| s.as_deref().is_none_or(str::is_empty);
    if m.kind.as_deref().is_some_and(|k| k != "BPE")
        || m.dropout.is_some_and(|d| d != 0.0)
        || m.unk_token.is_some()
        || !empty(&m.continuing_subword_prefix)
        || !empty(&m.end_of_word_suffix)
        || m.byte_fallback
        || m.ignore_merges
    {
        return Err(refuse("model", "options of another tokenizer", "plain byte-level BPE as Qwen 3.5's"));
    }
    let normalizer = raw.normalizer.as_ref().and_then(|n| n.get("type")).and_then(Value::as_str);
    if normalizer != Some("NFC") {
        return Err(refuse("normalizer", format!("{normalizer:?}"), "NFC"));
    }
    let steps = raw.pre_tokenizer.as_ref().and_then(|p| p.get("pretokenizers")).and_then(Value::as_array);
    let Some([split, bytes]) = steps.map(Vec::as_slice) else {
        return Err(refuse("pre_tokenizer", "other steps", "Split by Qwen 3.5's regex, then ByteLevel"));
    };
    let regex = split.get("pattern").and_then(|p| p.get("Regex")).and_then(Value::as_str).unwrap_or_default();
    if regex != REGEX {
        return Err(refuse(
            "pre_tokenizer",
            format!("the pattern {regex:?}"),
            format!("Qwen 3.5's, {REGEX:?}: texts would be cut at other places"),
        ));
    }
    let is = |v: &Value, key: &str, want: &Value| v.get(key).is_none_or(|x| x == want);
    if !is(split, "type", &"Split".into())
        || !is(split, "behavior", &"Isolated".into())
        || !is(split, "invert", &false.into())
        || bytes.get("type") != Some(&"ByteLevel".into())
        || bytes.get("add_prefix_space") != Some(&false.into())
        || bytes.get("use_regex") != Some(&false.into())
    {
        return Err(refuse("pre_tokenizer", "other options", "isolated pieces, bytes without prefix space or regex"));
    }
    Ok(())
}

fn merges(model: &Bpe) -> Result<Vec<String>> {
    let mut out = Vec::with_capacity(model.merges.len());
    let mut seen = HashSet::with_capacity(model.merges.len());
    for (rank, m) in model.merges.iter().enumerate() {
        let bad = |found: String| refuse(&format!("merge {rank}"), found, "two tokens whose concatenation is a token");
        let (a, b) = match m {
            Merge::Text(t) => t.split_once(' ').ok_or_else(|| bad(format!("{t:?}")))?,
            Merge::Pair(a, b) => (a.as_str(), b.as_str()),
        };
        let known = |t: &str| model.vocab.contains_key(t);
        // A space would be read back as the separator; byte-mapped texts have none.
        if a.contains(' ') || b.contains(' ') || !known(a) || !known(b) || !known(&format!("{a}{b}")) {
            return Err(bad(format!("{a:?} and {b:?}")));
        }
        let text = format!("{a} {b}");
        if !seen.insert(text.clone()) {
            return Err(bad(format!("{a:?} and {b:?} again")));
        }
        out.push(text);
    }
    Ok(out)
}
