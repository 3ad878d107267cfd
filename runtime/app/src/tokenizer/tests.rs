//! Files that are wrong, noise, and streaming of half characters. Equality with the reference is tested on goldens.

use super::*;
use forerun_format::gguf::{HeaderBuilder, Kv};
use forerun_format::vocab::TOKENS_MAX;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// The 256 byte tokens in order of the byte, then `more` with their types.
fn arrays(more: &[(&str, i32)]) -> (Vec<String>, Vec<i32>) {
    let alphabet = Alphabet::new();
    let bytes = (0..=255).map(|b| (alphabet.char(b).to_string(), 1));
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
    let tokenizer = Tokenizer::from_header(&Header::parse(&bytes, bytes.len() as u64)?)?;
    assert_eq!(packed(&tokenizer.vocab, |_| {})?.vocab, tokenizer.vocab);
    Ok(tokenizer)
}

/// The tokenizer of a file with the keys that the packer writes for `vocab`, as `damage` leaves them.
fn packed(vocab: &Vocab, damage: impl Fn(&mut HeaderBuilder)) -> Result<Tokenizer, FormatError> {
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    vocab.write(&mut h);
    damage(&mut h);
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
    refused(with(&[("ab", 1)], &["a bb"]), "merge 0: found \"a bb\"");
    refused(with(&[], &["a b"]), "whose concatenation is a token");
    refused(with(&[("ab", 1)], &["a b", "a b"]), "merge 1: found tokens 97 and 98 a second time");
    refused(with(&[("a b", 1)], &[]), "token 256: found \"a b\", expected characters that bytes are mapped to");
    refused(with(&[("é!", 3), ("é!", 4)], &[]), "token 257: found \"é!\", which is token 256 too");
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

/// 256 bytes, `ab` (256), an added token (257), an unused one (258); `a b` is the only merge.
#[test]
fn a_wrong_table_is_refused_by_name() {
    let vocab = with(&[("ab", 1), ("<>", 3), ("[PAD258]", 5)], &["a b"]).unwrap().vocab;
    let plain: Vec<u32> = (1..=256).chain([258, 260 | 1 << 30, 260 | 3 << 30]).collect();
    let with_ends = |ends: &[u32]| packed(&vocab, |h| h.set("forerun.vocab.ends", Kv::U32s(ends.to_vec())));
    assert_eq!(with_ends(&plain).unwrap().encode("ab<>").unwrap(), [256, 257], "nothing is wrong with these");
    let changed = |at: usize, end: u32| {
        let mut ends = plain.clone();
        ends[at] = end;
        with_ends(&ends)
    };
    refused(changed(5, 5), "forerun.vocab.ends of token 5: found 5 to 5, expected some bytes");
    refused(changed(5, 4), "found 5 to 4");
    refused(
        changed(258, 261 | 3 << 30),
        "of token 258: found 260 to 261, expected some bytes, or none if it is unused",
    );
    refused(changed(258, 260), "of token 258: found 260 to 260");
    refused(changed(257, u32::MAX >> 2 | 1 << 30), "of token 258: found 1073741823 to 260");
    refused(with_ends(&plain[..257]), "forerun.vocab.bytes: found 260 bytes, expected 258");
    refused(with_ends(&[]), "found 0 tokens, expected 1 to 1048576");
    refused(with_ends(&vec![0; TOKENS_MAX + 1]), "found 1048577 tokens");
    refused(changed(255, 256 | 1 << 30), "added token 255: found [ff], expected UTF-8");
    refused(changed(65, 66 | 1 << 30), "no token for byte 0x41");
    let bytes = |change: fn(&mut Vec<u8>)| {
        packed(&vocab, |h| {
            let mut bytes: Vec<u8> = (0..=255).chain(*b"ab<>").collect();
            change(&mut bytes);
            h.set("forerun.vocab.bytes", Kv::U8s(bytes));
        })
    };
    assert_eq!(bytes(|_| {}).unwrap().vocab, vocab);
    refused(bytes(|b| b[65] = 66), "token 66: found byte 0x42, which is token 65 too");
    refused(bytes(|b| b[256] = b'b'), "merge 0: found tokens 97 and 98 giving 256");
    refused(bytes(|b| b.push(0)), "found 261 bytes, expected 260, as forerun.vocab.ends says");
    let merges = |merges: &[u32]| packed(&vocab, |h| h.set("forerun.vocab.merges", Kv::U32s(merges.to_vec())));
    assert_eq!(merges(&[]).unwrap().encode("ab").unwrap(), [97, 98]);
    refused(merges(&[97, 98]), "forerun.vocab.merges: found 2 numbers, expected three for each merge");
    refused(merges(&[97, 98, 256, 97, 98, 256]), "merge 1: found tokens 97 and 98 a second time");
    for wrong in [[97, 98, 259], [97, u32::MAX, 256], [259, 98, 256], [98, 97, 256], [97, 258, 97], [258, 258, 258]] {
        refused(merges(&wrong), "merge 0: found tokens");
    }
    let other = |key, value: Kv| packed(&vocab, |h| h.set(key, value.clone()));
    refused(other("forerun.vocab.version", Kv::U32(2)), "forerun.vocab.version: found 2, expected 1");
    refused(other("forerun.vocab.version", Kv::Str("1".into())), "forerun.vocab.version");
    refused(other("forerun.vocab.bytes", Kv::U32s(vec![0; 260])), "expected an array of u8");
    refused(other("forerun.vocab.ends", Kv::I32s(vec![1; 259])), "expected an array of u32");
    refused(other("forerun.vocab.merges", Kv::Str("a b".into())), "expected an array");
}

/// Bits of a table are flipped; what is still accepted tokenizes without loss.
#[test]
fn a_damaged_table_never_panics() {
    let vocab = with(&[("ab", 1), ("abab", 1), ("<>", 3), ("é", 4), ("[PAD]", 5)], &["a b", "ab ab"]).unwrap().vocab;
    let ends: Vec<u32> = (1..=256).chain([258, 262, 264 | 1 << 30, 266 | 2 << 30, 266 | 3 << 30]).collect();
    let bytes: Vec<u8> = (0..=255).chain("ababab<>é".bytes()).collect();
    let merges = [97, 98, 256, 256, 256, 257];
    let mut seed = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let mut accepted = 0;
    for round in 0..3_000 {
        let (mut ends, mut bytes, mut merges) = (ends.clone(), bytes.clone(), merges);
        for _ in 0..1 + next(2) {
            match next(3) {
                0 => ends[250 + next(11)] ^= 1 << next(32),
                1 => bytes[250 + next(16)] ^= 1 << next(8),
                _ => merges[next(6)] ^= 1 << next(10),
            }
        }
        let result = packed(&vocab, |h| {
            h.set("forerun.vocab.bytes", Kv::U8s(bytes.clone()));
            h.set("forerun.vocab.ends", Kv::U32s(ends.clone()));
            h.set("forerun.vocab.merges", Kv::U32s(merges.to_vec()));
        });
        let text = "abababab <>é~ab\u{7f}ĂÿaBA";
        match result {
            Ok(t) => {
                assert_eq!(t.decode(&t.encode(text).unwrap(), false), text, "round {round}");
                accepted += 1;
            }
            Err(e) => assert!(!e.to_string().contains(char::is_control), "round {round}: {e}"),
        }
    }
    assert!(accepted > 50, "only {accepted} were accepted: the damage tests too little");
}

#[test]
fn the_longest_added_token_is_taken() {
    let t = with(&[("<a>", 3), ("<a>b<", 4), ("<a>b<c", 4), ("éé", 3), ("<b", 3)], &[]).unwrap();
    assert_eq!(t.encode("<a>b<b").unwrap(), [257, 98], "<a>b< leaves no < for <b");
    assert_eq!(t.encode("<a>b<c<a<<a><b").unwrap(), [258, 60, 97, 60, 256, 260]);
    assert_eq!(t.encode("ééé").unwrap(), [259, 0xC3, 0xA9]);
    assert_eq!((t.id_of("<a>b<"), t.id_of("<a>b"), t.id_of("Ġ"), t.id_of(" ")), (Some(257), None, Some(32), None));
}

#[test]
fn a_vocabulary_beyond_the_engine_is_refused_before_tables_are_made() {
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h.set(TOKENS, Kv::U32s(vec![0; TOKENS_MAX + 1]));
    h.set(TYPES, Kv::U32s(vec![1; TOKENS_MAX + 1]));
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
