//! A vocabulary as the packer writes it, and damage to it; then text.
#![no_main]

use arbitrary::Arbitrary;
use forerun::tokenizer::{Stream, Tokenizer};
use forerun_format::{
    gguf::{Header, HeaderBuilder, Kv},
    keys,
    vocab::Vocab,
};
use forerun_fuzz::{
    bounded,
    open::{TOKENIZER_TIMES, one_line},
};
use libfuzzer_sys::fuzz_target;
use std::hash::RandomState;

/// A token after those of the 256 bytes.
#[derive(Debug, Arbitrary)]
enum Token {
    /// Two tokens joined, which are ids once they are taken modulo the number of tokens so far.
    Merged(u16, u16),
    Control(String),
    Plain(String),
    Unused,
}

/// A word of a table to be changed.
#[derive(Debug, Arbitrary)]
struct Damage {
    table: u8,
    at: u16,
    flip: u32,
}

#[derive(Debug, Arbitrary)]
struct Input {
    tokens: Vec<Token>,
    damage: Vec<Damage>,
    word: Vec<u8>,
    ids: Vec<u16>,
    text: String,
}

/// The three tables of `tokens`.
fn tables(tokens: &[Token]) -> (Vec<u8>, Vec<u32>, Vec<u32>) {
    let mut texts: Vec<(Vec<u8>, u32)> = (0..=255).map(|b| (vec![b], 0)).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let token = match token {
            Token::Merged(left, right) => {
                let id = |n: &u16| usize::from(*n) % texts.len();
                merges.extend([id(left) as u32, id(right) as u32, texts.len() as u32]);
                ([&texts[id(left)].0[..], &texts[id(right)].0].concat(), 0)
            }
            Token::Control(text) => (text.clone().into_bytes(), 1),
            Token::Plain(text) => (text.clone().into_bytes(), 2),
            Token::Unused => (Vec::new(), 3),
        };
        // Doubling again and again must not fill the memory of this program.
        texts.push(if token.0.len() > 256 { (vec![b'?'], 2) } else { token });
    }
    let mut end = 0;
    let ends = texts.iter().map(|(text, kind)| {
        end += text.len() as u32;
        end | kind << 30
    });
    let ends = ends.collect();
    (texts.into_iter().flat_map(|(text, _)| text).collect(), ends, merges)
}

/// Merging as it is defined: the pair of the lowest rank, the first of equal ones, until there is none.
fn naive(vocab: &Vocab, word: &[u8]) -> Vec<u32> {
    let mut ids: Vec<u32> = word.iter().map(|&b| b.into()).collect();
    while let Some((_, merged, at)) = ids
        .windows(2)
        .enumerate()
        .filter_map(|(i, w)| vocab.merge(w[0], w[1]).map(|(rank, m)| (rank, m, i)))
        .min_by_key(|m| (m.0, m.2))
    {
        ids.splice(at..at + 2, [merged]);
    }
    ids
}

fuzz_target!(|input: Input| {
    let (mut bytes, mut ends, mut merges) = tables(&input.tokens);
    for d in &input.damage {
        let at = usize::from(d.at);
        match d.table % 3 {
            0 => bytes.get_mut(at).into_iter().for_each(|b| *b ^= d.flip as u8),
            1 => ends.get_mut(at).into_iter().for_each(|w| *w ^= d.flip),
            _ => merges.get_mut(at).into_iter().for_each(|w| *w ^= d.flip),
        }
    }
    let mut h = HeaderBuilder::new();
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    h.set(keys::VOCAB_VERSION, Kv::U32(keys::VOCAB_VERSION_NOW));
    h.set(keys::VOCAB_BYTES, Kv::U8s(bytes));
    h.set(keys::VOCAB_ENDS, Kv::U32s(ends));
    h.set(keys::VOCAB_MERGES, Kv::U32s(merges));
    let file = h.bytes();
    let header = Header::parse(&file, file.len() as u64).expect("a header");
    let tokens = match bounded("tokenizer", file.len(), TOKENIZER_TIMES, || Tokenizer::from_header(&header)) {
        Ok(tokens) => tokens,
        Err(e) => return one_line(&e.to_string()),
    };
    let vocab = Vocab::from_header(&header, RandomState::new()).expect("the same vocabulary");

    let ids = tokens.encode(&input.text).expect("ids of any text");
    assert!(ids.iter().all(|&id| (id as usize) < tokens.vocab_len()));
    if input.text.is_ascii() {
        assert_eq!(tokens.decode(&ids, false), input.text);
    }
    let noise = input.ids.iter().map(|&id| id.into());
    let ids: Vec<u32> = ids.into_iter().chain(noise).collect();
    for skip in [false, true] {
        let mut stream = Stream::new(skip);
        let mut streamed: String = ids.iter().map(|&id| stream.push(&tokens, id).to_owned()).collect();
        streamed += stream.finish();
        assert_eq!(streamed, tokens.decode(&ids, skip));
    }

    // Letters alone are one piece, unless an added token is in it.
    let word: Vec<u8> = input.word.iter().take(64).map(|b| b'a' + b % 26).collect();
    let ids = tokens.encode(std::str::from_utf8(&word).expect("letters")).expect("ids");
    let added = |id: &u32| {
        tokens.token_bytes(*id, true).is_empty() || input.tokens.iter().any(|t| matches!(t, Token::Plain(_)))
    };
    if input.damage.is_empty() && !ids.iter().any(added) {
        assert_eq!(ids, naive(&vocab, &word));
    }
});
