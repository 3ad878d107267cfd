//! Text as a JSON schema, and choices among the tokens that an answer under it may have: it compiles or is refused within
//! bounds, and the answer always ends, parses, and is as long as promised.
#![no_main]

use forerun::constrain::{Constraint, Grammar, Matcher, TokenIndex};
use forerun::tokenizer::Tokenizer;
use forerun_format::{
    gguf::{Header, HeaderBuilder, Kv},
    keys,
};
use forerun_fuzz::{bounded_by, open::one_line};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::sync::LazyLock;

/// Heap that a schema may take, whatever it is: nodes, alternatives and enumerations are bounded.
const SCHEMA_BYTES: usize = 4 << 20;

/// A vocabulary of the 256 bytes and some words of JSON.
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let words = ["\":", "\",", "\",\"", "{\"", "\"}", "[\"", "\"]", "true", "null", "\\n", "\\u00", "ab", " \"", "\n  ", "1.", "é"];
    let mut texts: Vec<(Vec<u8>, u32)> = (0..=255).map(|b| (vec![b], 0)).collect();
    texts.extend(words.map(|w| (w.as_bytes().to_vec(), 0)));
    texts.push((b"<end>".to_vec(), 1));
    let mut end = 0;
    let ends = texts.iter().map(|(text, kind)| {
        end += text.len() as u32;
        end | kind << 30
    });
    let ends = ends.collect();
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h.set(keys::VOCAB_VERSION, Kv::U32(keys::VOCAB_VERSION_NOW));
    h.set(keys::VOCAB_BYTES, Kv::U8s(texts.into_iter().flat_map(|(text, _)| text).collect()));
    h.set(keys::VOCAB_ENDS, Kv::U32s(ends));
    h.set(keys::VOCAB_MERGES, Kv::U32s(Vec::new()));
    let file = h.bytes();
    let header = Header::parse(&file, file.len() as u64).expect("a header");
    Tokenizer::from_header(&header).expect("a tokenizer")
});
static INDEX: LazyLock<TokenIndex> = LazyLock::new(|| TokenIndex::new(&TOKENIZER));

fuzz_target!(|input: &[u8]| {
    // A schema, a zero, and a byte for each choice.
    let mut parts = input.splitn(2, |&b| b == 0);
    let (text, choices) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let Ok(schema) = serde_json::from_slice::<Value>(text) else { return };
    let grammar = match bounded_by("schema", SCHEMA_BYTES, || Grammar::from_schema(&schema)) {
        Ok(grammar) => grammar,
        Err(e) => return one_line(&e.to_string()),
    };
    let tokenizer = &*TOKENIZER;
    let stop = [tokenizer.vocab_len() as u32 - 1];
    let mut m = Matcher::new(Constraint { grammar: &grammar, tokens: &INDEX }, tokenizer, &stop, false);
    let mut answer = Vec::new();
    let mut room = choices.len() + grammar.shortest_bytes();
    for &choice in choices {
        room -= 1;
        m.compute_mask();
        let may: Vec<u32> = (0..stop[0]).filter(|&id| m.allows(id)).collect();
        if may.is_empty() {
            assert!(m.is_complete() || m.allows(stop[0]), "nothing may come: {}", String::from_utf8_lossy(&answer));
            break;
        }
        let id = may[usize::from(choice) * may.len() / 256];
        if !m.take(id, room) {
            break;
        }
        answer.extend_from_slice(tokenizer.token_bytes(id, true));
    }
    let end = m.end().to_vec();
    assert!(end.len() <= room + 1, "{} tokens to the end, {room} left", end.len());
    answer.extend(end.iter().flat_map(|&id| tokenizer.token_bytes(id, true)));
    serde_json::from_slice::<Value>(&answer).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&answer)));
});
