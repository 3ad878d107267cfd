//! Vocabularies as model files have them: those of the bundled models, and one of the size that the published model has.

use crate::path;
use forerun::tokenizer::Tokenizer;
use forerun_format::gguf::{Header, HeaderBuilder, Kv, Value};
use forerun_format::vocab::{Alphabet, Vocab};
use serde_json::{Value as Json, json};
use std::collections::HashSet;
use std::fs;
use std::hash::RandomState;

/// Rows of the embedding, normal tokens, and added ones of the published tokenizer.
const TOKENS: usize = 248_144;
const NORMAL: usize = 248_044;
const ADDED: usize = 50;

/// Texts of tokens, their GGUF types, and merges, all in order.
#[derive(Debug, Clone, Default)]
pub struct Texts {
    /// Texts by id.
    pub tokens: Vec<String>,
    /// 1 normal, 3 control, 4 user-defined, 5 unused.
    pub types: Vec<i32>,
    /// `left right` by rank.
    pub merges: Vec<String>,
}

impl Texts {
    /// The vocabulary of the checkpoint `tests/checkpoints/NAME`.
    pub fn checkpoint(name: &str) -> Self {
        let json = fs::read(path(format!("checkpoints/{name}/tokenizer.json"))).expect("tokenizer.json");
        let json: Json = serde_json::from_slice(&json).expect("JSON");
        let mut t = Self::default();
        let mut set = |id: &Json, text: &str, kind| {
            let id = id.as_u64().expect("an id") as usize;
            t.tokens.resize_with(t.tokens.len().max(id + 1), String::new);
            t.types.resize(t.tokens.len(), 5);
            (t.tokens[id], t.types[id]) = (text.into(), kind);
        };
        for (text, id) in json["model"]["vocab"].as_object().expect("a vocabulary") {
            set(id, text, 1);
        }
        for a in json["added_tokens"].as_array().expect("added tokens") {
            set(&a["id"], a["content"].as_str().expect("text"), if a["special"] == true { 3 } else { 4 });
        }
        let side = |v: &Json| v.as_str().expect("text").to_owned();
        let merges = json["model"]["merges"].as_array().expect("merges");
        t.merges = merges.iter().map(|m| format!("{} {}", side(&m[0]), side(&m[1]))).collect();
        t
    }

    /// The vocabulary of the GGUF file that `FORERUN_VOCAB` names, for example a published model's; else one of the same
    /// size that is made up: words of syllables in five scripts, the first tokens joined to the later ones at random.
    pub fn large() -> Self {
        match std::env::var_os("FORERUN_VOCAB") {
            Some(path) => {
                let file = fs::read(path).expect("FORERUN_VOCAB");
                Self::of(&Header::parse(&file, file.len() as u64).expect("a GGUF file"))
            }
            None => Self::made_up(),
        }
    }

    /// The texts in `tokenizer.ggml.*`.
    fn of(h: &Header<'_>) -> Self {
        let texts = |key: &str| {
            let texts = h.array(key).expect(key).iter().map(|v| match v {
                Value::Str(s) => s.to_owned(),
                v => panic!("{key}: {v:?}"),
            });
            texts.collect()
        };
        let types = h.array("tokenizer.ggml.token_type").expect("types");
        let types = h.u32_array("tokenizer.ggml.token_type", types.len()).expect("types");
        Self {
            tokens: texts("tokenizer.ggml.tokens"),
            types: types.iter().map(|&t| t as i32).collect(),
            merges: texts("tokenizer.ggml.merges"),
        }
    }

    fn made_up() -> Self {
        let alphabet = Alphabet::new();
        let mut tokens: Vec<String> = (0..=255).map(|b| alphabet.char(b).into()).collect();
        let mut known: HashSet<String> = tokens.iter().cloned().collect();
        let mut merges = Vec::new();
        let mut join = |left: &str, right: &str, tokens: &mut Vec<String>| {
            let text = format!("{left}{right}");
            // Two merges may give the same token.
            merges.push(format!("{left} {right}"));
            if known.insert(text.clone()) {
                tokens.push(text);
            }
        };
        // Letters of more than one byte, and for some the space before them.
        let mut letters: Vec<String> = ('a'..='z').map(String::from).collect();
        for c in ('α'..='ω').chain('а'..='я').chain('か'..='ん').chain('一'..='伀') {
            let mapped = alphabet.text(c.to_string().as_bytes());
            let chars: Vec<char> = mapped.chars().collect();
            let mut left = chars[0].to_string();
            for right in &chars[1..] {
                let joined = format!("{left}{right}");
                if !tokens.contains(&joined) {
                    join(&left, &right.to_string(), &mut tokens);
                }
                left = joined;
            }
            letters.push(mapped);
        }
        for letter in &letters {
            join("Ġ", letter, &mut tokens);
        }
        let (first, mut random) = (tokens.len(), Random(7));
        let mut pairs = HashSet::new();
        while tokens.len() < NORMAL {
            // A letter or an early word, then another: without a space inside.
            let word = |random: &mut Random, tokens: &[String]| match random.below(3) {
                0 => letters[random.below(letters.len())].clone(),
                _ => tokens[first - letters.len() + random.below(tokens.len() - first + letters.len())].clone(),
            };
            let (left, right) = (word(&mut random, &tokens), word(&mut random, &tokens));
            if left.len() + right.len() <= 16 && !right.starts_with('Ġ') && pairs.insert((left.clone(), right.clone()))
            {
                join(&left, &right, &mut tokens);
            }
        }
        let mut types = vec![1; NORMAL];
        tokens.extend(["<|im_start|>", "<|im_end|>", "<think>", "</think>"].map(String::from));
        tokens.extend((4..ADDED).map(|i| format!("<|added{i}|>")));
        types.resize(NORMAL + ADDED, 3);
        types[NORMAL + 2..NORMAL + 4].fill(4);
        tokens.extend((NORMAL + ADDED..TOKENS).map(|i| format!("[PAD{i}]")));
        types.resize(TOKENS, 5);
        Self { tokens, types, merges }
    }

    /// A header with these texts as `tokenizer.ggml.*`: what other programs write, and this one's first version.
    pub fn plain(&self) -> Vec<u8> {
        let mut h = named();
        h.set("tokenizer.ggml.tokens", Kv::Strs(self.tokens.clone()));
        h.set("tokenizer.ggml.token_type", Kv::I32s(self.types.clone()));
        h.set("tokenizer.ggml.merges", Kv::Strs(self.merges.clone()));
        h.bytes()
    }

    /// A header with the same vocabulary as `forerun.vocab.*`.
    pub fn packed(&self) -> Vec<u8> {
        let plain = self.plain();
        let header = Header::parse(&plain, plain.len() as u64).expect("a header");
        let mut h = named();
        Vocab::from_header(&header, RandomState::new()).expect("a vocabulary").write(&mut h);
        h.bytes()
    }

    /// Texts of added tokens.
    pub fn added(&self) -> Vec<&str> {
        let added = self.tokens.iter().zip(&self.types).filter(|&(_, t)| matches!(t, 3 | 4));
        added.map(|(text, _)| text.as_str()).collect()
    }

    /// The same as a `tokenizer.json`.
    pub fn json(&self) -> Json {
        let of = |kinds: &'static [i32]| {
            let texts = self.tokens.iter().zip(&self.types).enumerate();
            texts.filter(|(_, (_, t))| kinds.contains(t)).map(|(id, (text, t))| (id, text, *t))
        };
        let vocab: serde_json::Map<String, Json> = of(&[1]).map(|(id, text, _)| (text.clone(), id.into())).collect();
        let added = of(&[3, 4]).map(|(id, text, t)| {
            json!({ "id": id, "content": text, "special": t == 3, "normalized": false, "single_word": false,
                    "lstrip": false, "rstrip": false })
        });
        let merges = self.merges.iter().map(|m| m.split(' ').collect::<Vec<_>>());
        let expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        json!({
            "version": "1.0",
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": { "type": "NFC" },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false }, bytes ] },
            "decoder": bytes,
            "model": { "type": "BPE", "vocab": vocab, "merges": merges.collect::<Vec<_>>() },
        })
    }
}

fn named() -> HeaderBuilder {
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h
}

/// The tokenizer of a file that begins with `header`.
pub fn tokenizer(header: &[u8]) -> Tokenizer {
    Tokenizer::from_header(&Header::parse(header, header.len() as u64).expect("a header")).expect("a tokenizer")
}

/// Numbers that look random and are the same every time.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    /// One of `items`.
    pub fn pick<'a, T: ?Sized>(&mut self, items: &[&'a T]) -> &'a T {
        items[self.below(items.len())]
    }
}
