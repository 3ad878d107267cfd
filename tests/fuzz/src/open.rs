//! Opens a model file from its header alone, as the program does, and checks what comes out of every step.

use crate::bounded;
use forerun::{
    prompt::{PromptBuilder, Visual, VisualGrid},
    template::{Conversation, Template},
    tokenizer::{Stream, Tokenizer},
};
use forerun_engine::{
    config::Config,
    plan::{KvType, Options, Plan, PlanError, Residency, VisionOptions},
    slicing::Detail,
    weights::Weights,
};
use forerun_format::{
    FormatError,
    gguf::{Header, Value},
};

/// Heap that directory, configuration and weights may take for each byte of the header: a key of 13 bytes becomes a row
/// of 56, in a vector that doubles, and again where it is sorted.
const HEADER_TIMES: usize = 32;
/// The same for the tokenizer: a token of 8 + 1 + 4 bytes is in three tables of words, one of them half full.
pub const TOKENIZER_TIMES: usize = 8;

/// Parses `bytes` as the beginning of a file of `file_bytes` and checks what the parser promises.
pub fn header(bytes: &[u8], file_bytes: u64) -> Result<Header<'_>, FormatError> {
    let parsed = bounded("header", bytes.len(), HEADER_TIMES, || Header::parse(bytes, file_bytes));
    match &parsed {
        Ok(h) => check(h, file_bytes),
        Err(FormatError::Truncated { need }) => {
            assert!(*need > bytes.len() as u64, "{need} bytes wanted, {} given", bytes.len());
        }
        Err(e) => one_line(&e.to_string()),
    }
    parsed
}

/// Asserts that an error is one line that a terminal shows as it is.
pub fn one_line(text: &str) {
    assert!(text.chars().count() < 2000 && !text.contains(char::is_control), "not one line: {text:?}");
}

fn check(h: &Header<'_>, file_bytes: u64) {
    for (key, value) in h.kv() {
        assert_eq!(h.get(key).is_some(), true, "{key}");
        if let Value::Array(a) = value {
            assert_eq!(a.iter().count(), a.len(), "{key}");
        }
    }
    let mut ends: Vec<(u64, u64)> = Vec::new();
    for t in h.tensors() {
        assert_eq!(h.tensor(t.name), Some(t));
        assert!(t.offset >= h.data_offset && t.offset.checked_add(t.bytes).is_some_and(|end| end <= file_bytes));
        ends.push((t.offset, t.offset + t.bytes));
        let _ = (t.block_type(), t.shape_text());
    }
    ends.sort_unstable();
    assert!(ends.windows(2).all(|w| w[0].1 <= w[1].0), "tensors overlap");
}

/// Configuration, weights and plans of a parsed header of `bytes` bytes.
pub fn engine_side(h: &Header<'_>, bytes: usize) -> Result<(Config, Weights), FormatError> {
    let shown = |e: FormatError| {
        one_line(&e.to_string());
        e
    };
    let config = bounded("configuration", bytes, HEADER_TIMES, || Config::read(h)).map_err(shown)?;
    let weights = bounded("weights", bytes, HEADER_TIMES, || Weights::read(h, &config)).map_err(shown)?;
    plans(&config, &weights);
    Ok((config, weights))
}

/// Plans with several settings; each keeps to its cap and says the truth about its sum.
fn plans(config: &Config, weights: &Weights) {
    for (context, chunk, kv) in [(1, 1, KvType::F32), (64, 16, KvType::F16), (usize::MAX, usize::MAX, KvType::F32)] {
        for detail in [None, Some(Detail::X16), Some(Detail::X4)] {
            for (cap_bytes, slots_max) in [(None, None), (None, Some(1)), (Some(0), None), (Some(64 << 20), None)] {
                let options = Options {
                    context: context.min(config.text.context_max),
                    chunk,
                    kv,
                    vision: detail.map(|detail| VisionOptions { detail, picture_bytes: 16 << 20, residency: Residency::Auto }),
                    prefix: slots_max.is_some(),
                    cap_bytes,
                    slots_max,
                    tokenizer_bytes: config.text.vocab as u64 * 850,
                };
                check_plan(config, Plan::new(config, weights, options), cap_bytes);
            }
        }
    }
}

fn check_plan(config: &Config, plan: Result<Plan, PlanError>, cap: Option<u64>) {
    match plan {
        Ok(p) => {
            let sum = p.lines.iter().try_fold(0u64, |s, l| s.checked_add(l.bytes)).expect("a sum that fits");
            assert_eq!(sum, p.total_bytes());
            assert!(cap.is_none_or(|cap| sum <= cap), "{sum} bytes, cap {cap:?}");
            assert!(p.block_elems() as u64 <= sum / 4);
            assert!(p.slots >= config.text.moe().map_or(0, |m| m.top_k) && p.slots <= p.experts);
        }
        Err(PlanError::CapTooSmall { cap, floor, elastic }) => assert!(floor > cap && elastic <= floor),
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

/// Tokenizer, chat template and prompts of a parsed header of `bytes` bytes.
pub fn app_side(h: &Header<'_>, bytes: usize, config: Option<&Config>) {
    let tokenizer = bounded("tokenizer", bytes, TOKENIZER_TIMES, || Tokenizer::from_header(h));
    let tokenizer = match tokenizer {
        Ok(t) => t,
        Err(e) => return one_line(&e.to_string()),
    };
    let text = "Hi <image> it's\u{301} 漢字 12\n\n  <|im_end|>";
    let ids = tokenizer.encode(text).expect("ids of any text");
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_len()));
    let whole = tokenizer.decode(&ids, true);
    let mut stream = Stream::new(true);
    let mut pieces: String = ids.iter().map(|&id| stream.push(&tokenizer, id).to_owned()).collect();
    pieces.push_str(stream.finish());
    assert_eq!(pieces, whole);
    let _ = (tokenizer.token_bytes(u32::MAX, false), tokenizer.id_of("<image>"));

    let Some(prompts) = config.and_then(|c| PromptBuilder::new(c, &tokenizer).ok()) else { return };
    let visuals = [Visual::Image(VisualGrid { rows: 1, cols: 2, crops: vec![(8, 8), (4, 8), (4, 8)] })];
    let rendered = match Template::from_header(h) {
        Ok(t) => t.render(&Conversation { messages: &messages(), ..Conversation::default() }).unwrap_or_default(),
        Err(_) => String::new(),
    };
    for visuals in [&visuals[..], &[]] {
        if let Ok(p) = prompts.build(&tokenizer, &rendered, visuals, 4) {
            assert_eq!(p.ids.len(), p.types.len());
        }
    }
    let _ = prompts.check_text(&messages(), &[]);
}

/// A conversation with everything in it that templates look at.
pub fn messages() -> Vec<serde_json::Value> {
    serde_json::from_str(
        r#"[{"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is <this>? é"}]},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [null, true]}}}]},
            {"role": "tool", "content": "{}"}, {"role": "user", "content": "Go on."}]"#,
    )
    .expect("JSON")
}
