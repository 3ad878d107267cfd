//! Files that are wrong, noise, and streaming of half characters. Equality with the reference is tested on goldens.

use super::*;
use forerun_format::gguf::{HeaderBuilder, Kv};

/// The 256 byte tokens in order of the byte, then `more` with their types.
fn arrays(more: &[(&str, i32)]) -> (Vec<String>, Vec<i32>) {
    let bytes = Alphabet::new().chars.into_iter().map(|c| (c.to_string(), 1));
    bytes.chain(more.iter().map(|&(t, k)| (t.to_owned(), k))).unzip()
}

fn build(tokens: Vec<String>, types: Vec<i32>, merges: &[&str]) -> Result<Tokenizer, FormatError> {
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h.set(TOKENS, Kv::Strs(tokens));
    h.set(TYPES, Kv::I32s(types));
    h.set(MERGES, Kv::Strs(merges.iter().map(|&m| m.to_owned()).collect()));
    let bytes = h.bytes();
    Tokenizer::from_header(&Header::parse(&bytes, bytes.len() as u64)?)
}

fn with(more: &[(&str, i32)], merges: &[&str]) -> Result<Tokenizer, FormatError> {
    let (tokens, types) = arrays(more);
    build(tokens, types, merges)
}

#[track_caller]
fn refused(result: Result<Tokenizer, FormatError>, part: &str) {
    let e = result.expect_err(part).to_string();
    assert!(e.contains(part), "{e:?} does not contain {part:?}");
}

#[test]
fn a_small_vocabulary_works() {
    let t = with(&[("ab", 1), ("Ġab", 1), ("<|x|>", 3), ("[PAD259]", 5), ("<y>", 4)], &["a b", "Ġ ab"]).unwrap();
    assert_eq!(t.encode("ab ab<|x|><y>é").unwrap(), [256, 257, 258, 260, 0xC3, 0xA9]);
    assert_eq!(t.decode(&[256, 257, 258, 260, 0xC3, 0xA9], false), "ab ab<|x|><y>é");
    assert_eq!(t.decode(&[258, 260, 259, 261, 0xC3], true), "<y>\u{FFFD}");
    assert_eq!((t.vocab_len(), t.id_of("<y>"), t.id_of("[PAD259]")), (261, Some(260), None));
    assert!(t.encode("").unwrap().is_empty());
}

#[test]
fn a_wrong_file_is_refused_by_name() {
    refused(with(&[("ab", 1)], &["a bb"]), "`bb` out of vocabulary");
    refused(with(&[], &["a b"]), "`ab` out of vocabulary");
    refused(with(&[("ab", 1)], &["a b", "a b"]), "merge 1: found \"a b\" a second time");
    for merge in ["ab", "a  b", " ab", "ab ", "a b c", ""] {
        refused(with(&[("ab", 1)], &[merge]), "merge 0: found");
    }
    refused(with(&[("ab", 1), ("ab", 3)], &[]), "token 257: found \"ab\", which is token 256 too");
    refused(with(&[("", 3)], &[]), "token 256: found no text");
    refused(with(&[("x1", 2)], &[]), "type of token 256: found Int(2)");
    refused(with(&[(&"x".repeat(300), 3)], &[]), "added token 256: found number 1 with 300 bytes");
    let many: Vec<String> = (0..5000).map(|i| format!("<{i}>")).collect();
    refused(with(&many.iter().map(|t| (&t[..], 3)).collect::<Vec<_>>(), &[]), "found number 4097");
    let (mut tokens, mut types) = arrays(&[]);
    types.pop();
    refused(build(tokens.clone(), types.clone(), &[]), "255 types for 256 tokens");
    tokens.pop();
    refused(build(tokens, types, &[]), "no token for byte 0xff");
    refused(build(vec![], vec![], &[]), "and 1 to 1048576 tokens");
}

#[test]
fn a_vocabulary_beyond_the_engine_is_refused_before_tables_are_made() {
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h.set(TOKENS, Kv::U32s(vec![0; VOCAB_MAX + 1]));
    h.set(TYPES, Kv::U32s(vec![1; VOCAB_MAX + 1]));
    let bytes = h.bytes();
    refused(Tokenizer::from_header(&Header::parse(&bytes, bytes.len() as u64).unwrap()), "1 to 1048576 tokens");
}

#[test]
fn another_kind_of_tokenizer_is_refused() {
    for (key, value, part) in [
        ("tokenizer.ggml.pre", Kv::Str("qwen2".into()), "found \"qwen2\", expected \"qwen35\""),
        ("tokenizer.ggml.model", Kv::Str("llama".into()), "found \"llama\", expected \"gpt2\""),
        (TOKENS, Kv::U32(1), "expected an array"),
        (TOKENS, Kv::I32s(vec![1; 256]), "expected text"),
        (TYPES, Kv::F32s(vec![1.0; 256]), "type of token 0"),
        (MERGES, Kv::Bool(true), "expected an array"),
    ] {
        let (tokens, types) = arrays(&[]);
        let mut h = HeaderBuilder::new();
        h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
        h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
        h.set(TOKENS, Kv::Strs(tokens));
        h.set(TYPES, Kv::I32s(types));
        h.set(MERGES, Kv::Strs(vec![]));
        h.set(key, value);
        let bytes = h.bytes();
        refused(Tokenizer::from_header(&Header::parse(&bytes, bytes.len() as u64).unwrap()), part);
    }
    let bytes = HeaderBuilder::new().bytes();
    refused(
        Tokenizer::from_header(&Header::parse(&bytes, bytes.len() as u64).unwrap()),
        "tokenizer.ggml.model is missing",
    );
}

#[test]
fn a_stream_shows_whole_characters() {
    let t = with(&[], &[]).unwrap();
    let mut s = Stream::new(true);
    let mut push = |id: u32| s.push(&t, id).to_owned();
    assert_eq!(
        ["😀".as_bytes(), b"a"].concat().iter().map(|&b| push(b.into())).collect::<Vec<_>>(),
        ["", "", "", "😀", "a"]
    );
    assert_eq!([push(0xE2), push(0x82), push(u32::from(b'x'))], ["", "", "\u{FFFD}x"], "a character that is cut off");
    assert_eq!([push(0xFF), push(0xC3)], ["\u{FFFD}", ""]);
    assert_eq!((s.finish().to_owned(), s.finish()), ("\u{FFFD}".to_owned(), ""));
}

/// A stream's text, put together, is what decoding all tokens at once gives; noise builds a tokenizer or an error.
#[test]
fn noise_never_panics() {
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let parts = ["a", "b", "Ġ", "Ċ", "Ã", "©", "ab", "<|", "|>", " ", "é", "\u{0}", "aĠ", "ba"];
    let mut built = 0;
    for round in 0..1_000 {
        let mut word = |n| (0..1 + next(n)).map(|_| parts[next(parts.len() as u64) as usize]).collect::<String>();
        let more: Vec<String> = (0..8).map(|_| word(3)).collect();
        let merges: Vec<String> = (0..3).map(|_| format!("{} {}", word(1), word(1))).collect();
        let text = word(40);
        let kinds = if round % 10 == 0 { 8 } else { 3 };
        let more: Vec<(&str, i32)> = more.iter().map(|t| (&t[..], 3 + next(kinds) as i32)).collect();
        let merges: Vec<&str> = merges.iter().map(|m| &m[..]).take(next(2) as usize).collect();
        let Ok(t) = with(&more, &merges) else { continue };
        built += 1;
        let ids = t.encode(&text).unwrap();
        assert_eq!(t.decode(&ids, false), text, "round {round}");
        let ids: Vec<u32> = (0..20).map(|_| next(300) as u32).collect();
        let mut s = Stream::new(false);
        let streamed: String = ids.iter().map(|&id| s.push(&t, id).to_owned()).collect();
        assert_eq!(streamed + s.finish(), t.decode(&ids, false), "round {round}: {ids:?}");
    }
    assert!(built > 50, "only {built} tokenizers were built: the noise tests too little");
}
