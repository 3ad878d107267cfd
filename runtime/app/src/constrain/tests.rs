//! Random schemas and random logits: whatever is chosen among the allowed tokens, serde_json reads the answer, and the
//! `jsonschema` crate finds that it follows the schema.

use super::machine::step;
use super::*;
use crate::model::Model;
use crate::request::Request;
use crate::speaker::{Next, Speaker};
use crate::words::Words;
use serde_json::{Map, Value, json};
use std::path::Path;

fn model() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/tiny-moe.gguf");
    Model::open(&path).expect("the bundled model")
}

/// Numbers that repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn often(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len())]
    }
}

const NAMES: [&str; 14] =
    ["a", "ab", "abc", "b", "title", "é", "", "a\"b", "a\\", "tab\t", "\u{1}", "a/b~c", "😀", "confidence"];

fn schema(r: &mut Random, levels: u32) -> Value {
    match r.below(if levels == 0 { 6 } else { 11 }) {
        0 => {
            let mut s = json!({"type": "string", "title": "x"});
            if r.often(40) {
                s["minLength"] = r.below(6).into();
            }
            if r.often(40) {
                s["maxLength"] = (5 + r.below(6)).into();
            }
            s
        }
        1 | 2 => {
            let integer = r.often(50);
            let mut s = json!({"type": if integer { "integer" } else { "number" }});
            let (lo, width) = (r.below(2000) as f64 - 1000.0, r.below(50) as f64 + 1.0);
            let scale = if integer { 1.0 } else { [0.01, 0.125, 1.0, 1000.0][r.below(4)] };
            if r.often(50) {
                s[if r.often(70) { "minimum" } else { "exclusiveMinimum" }] = (lo * scale).into();
            }
            if r.often(50) {
                s[if r.often(70) { "maximum" } else { "exclusiveMaximum" }] = ((lo + width) * scale).into();
            }
            s
        }
        3 => json!({"enum": [r.pick(&NAMES), r.pick(&NAMES), 1, 10, 100, null, true, 1.5, ["x", {"y": 1}]]}),
        4 => json!({"const": r.pick(&NAMES)}),
        5 => match r.below(5) {
            0 => json!({"type": ["string", "null"]}),
            1 => json!({"type": ["integer", "boolean", "null"]}),
            2 => json!({"$ref": "#/$defs/list"}),
            3 => json!({"$ref": "#/$defs/tree"}),
            _ => json!({"type": "boolean"}),
        },
        6 | 7 => {
            let mut s = json!({"type": "array", "items": schema(r, levels - 1)});
            if r.often(40) {
                s["minItems"] = r.below(4).into();
            }
            if r.often(40) {
                s["maxItems"] = (3 + r.below(3)).into();
            }
            if r.often(20) {
                s["prefixItems"] = json!([schema(r, levels - 1), schema(r, 0)]);
            }
            s
        }
        8 => {
            let list: Vec<Value> = (0..1 + r.below(3)).map(|_| schema(r, levels - 1)).collect();
            json!({ if r.often(70) { "anyOf" } else { "oneOf" }: list })
        }
        _ => {
            let mut properties = Map::new();
            for _ in 0..r.below(5) {
                properties.insert(r.pick(&NAMES).into(), schema(r, levels - 1));
            }
            let required: Vec<&String> = properties.keys().filter(|_| r.often(60)).collect();
            let mut s = json!({"type": "object", "required": required, "properties": properties});
            match r.below(4) {
                0 => s["additionalProperties"] = false.into(),
                1 => s["additionalProperties"] = true.into(),
                2 => s["additionalProperties"] = schema(r, levels - 1),
                _ => {}
            }
            s
        }
    }
}

fn with_definitions(mut schema: Value) -> Value {
    schema["$defs"] = json!({
        "list": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"head": {"type": "integer"}, "tail": {"$ref": "#/$defs/list"}}, "required": ["head", "tail"]}]},
        "tree": {"type": "object", "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["below"]},
    });
    schema
}

/// Random logits, in which tokens that close something are likelier in some rounds.
fn noise(r: &mut Random, model: &Model, logits: &mut [f32], tidy: bool) {
    for (id, x) in logits.iter_mut().enumerate() {
        *x = r.below(1000) as f32 / 100.0;
        let bytes = model.tokenizer.token_bytes(id as u32, true);
        if tidy && matches!(bytes.last(), Some(b'"' | b'}' | b']' | b',' | b':')) {
            *x += 6.0;
        }
    }
}

struct Spoken {
    text: String,
    tokens: Vec<u32>,
    why: &'static str,
}

/// What is said where `logits` are asked for each token.
fn speak(model: &Model, request: &Request<'_>, mut logits: impl FnMut(usize, &mut [f32])) -> Result<Spoken, String> {
    let words = Words::new(model, request, 0);
    let mut speaker = Speaker::new(model, request, words).map_err(|e| e.to_string())?;
    let mut buffer = vec![0.0; model.config.text.vocab];
    let mut n = 0;
    let why = loop {
        logits(n, &mut buffer);
        n += 1;
        match speaker.next(&buffer, &mut |_| Ok(())).expect("a token") {
            Next::Token(_) => {}
            Next::End(why) => break why,
        }
    };
    let (said, tokens) = speaker.finish(&mut |_| Ok(())).expect("an end");
    Ok(Spoken { text: said.text, tokens, why })
}

#[test]
fn every_answer_parses_and_follows_its_schema() {
    let model = model();
    let index = TokenIndex::new(&model.tokenizer);
    let rounds = std::env::var("FORERUN_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(4_000);
    let (mut refused, mut short, mut cut, mut whole, mut longest) = (0, 0, 0, 0, 0);
    for seed in 0..rounds {
        let mut r = Random(seed);
        let levels = 1 + r.below(3) as u32;
        let schema = with_definitions(schema(&mut r, levels));
        let grammar = match Grammar::from_schema(&schema) {
            Ok(grammar) => grammar,
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        let judge = jsonschema::draft202012::new(&schema).expect("a schema");
        let temperature = if r.often(50) { 0.0 } else { 1.0 };
        let request = Request {
            max_tokens: 1 + r.below(120),
            temperature: Some(temperature),
            top_k: Some(r.below(3) * 20),
            top_p: Some(1.0),
            seed,
            constraint: Some(Constraint { grammar: &grammar, tokens: &index }),
            ..Request::default()
        };
        let tidy = r.often(60);
        let spoken = match speak(&model, &request, |_, logits| noise(&mut r, &model, logits, tidy)) {
            Ok(spoken) => spoken,
            Err(e) => {
                assert!(e.contains("the shortest that follows the schema has"), "seed {seed}: {e}");
                short += 1;
                continue;
            }
        };
        assert!(spoken.tokens.len() <= request.max_tokens, "seed {seed}: {} tokens", spoken.tokens.len());
        let answer: Value = serde_json::from_str(&spoken.text)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}: {}\n{schema}", spoken.text));
        if let Err(e) = judge.validate(&answer) {
            panic!("seed {seed}: {e}: {}\n{schema}", spoken.text);
        }
        *(if spoken.why == "length" { &mut cut } else { &mut whole }) += 1;
        longest = longest.max(spoken.text.len());
    }
    println!(
        "{rounds} schemas: {refused} refused, {short} with too few tokens, {cut} cut, {whole} whole, up to {longest} bytes"
    );
    assert!(refused < rounds / 4 && cut > rounds / 20 && whole > rounds / 4, "{refused} {short} {cut} {whole}");
}

/// The mask is what the automaton says of each token alone.
#[test]
fn a_mask_holds_each_token_that_may_come_and_no_other() {
    let model = model();
    let index = TokenIndex::new(&model.tokenizer);
    let (mut allowed, mut compared) = (0, 0);
    for seed in 0..60 {
        let mut r = Random(seed + 77);
        let schema = if seed % 4 == 0 { json!({"type": "object"}) } else { with_definitions(schema(&mut r, 3)) };
        let Ok(grammar) = Grammar::from_schema(&schema) else { continue };
        let constraint = Constraint { grammar: &grammar, tokens: &index };
        let mut m = Matcher::new(constraint, &model.tokenizer, &model.config.tokens.stop, seed % 3 == 0);
        for _ in 0..40 {
            m.compute_mask();
            let mut may = Vec::new();
            for id in 0..model.tokenizer.vocab_len() as u32 {
                let bytes = model.tokenizer.token_bytes(id, true);
                let mut frames = m.frames.clone();
                let mut heads = m.heads.clone();
                for &b in bytes {
                    let mut next = Vec::new();
                    heads.iter().for_each(|&h| step(&grammar, h, b, 0, &mut frames, &mut next));
                    heads = next;
                }
                let text = model.tokenizer.is_normal(id) && !heads.is_empty();
                let ends = model.config.tokens.stop.contains(&id) && m.heads.iter().any(|h| h.end(&grammar).0);
                assert_eq!(m.allows(id), text || ends, "seed {seed}: token {id} {:?}", String::from_utf8_lossy(bytes));
                compared += 1;
                if text {
                    may.push(id);
                }
            }
            allowed += may.len();
            if may.is_empty() {
                assert!(m.heads.iter().any(|h| h.end(&grammar).0), "seed {seed}: nothing may come");
                break;
            }
            assert!(m.take(may[r.below(may.len())], usize::MAX), "seed {seed}");
        }
    }
    assert!(compared > 500_000 && allowed > 50_000, "{compared} {allowed}");
}

/// Where the answer follows the schema on its own, the constraint changes no token, in whatever way JSON is usually written.
#[test]
fn what_follows_already_stays_as_it_is() {
    let model = model();
    let index = TokenIndex::new(&model.tokenizer);
    let answer = json!({"title": "A fox", "tags": ["red", "quick \"fox\"", "é😀\n"], "confidence": 0.85, "level": 2, "by": {"id": null, "ok": true}, "none": [], "nothing": {}});
    let schema = json!({"type": "object", "required": ["confidence", "level", "title"], "properties": {
        "level": {"type": "integer", "minimum": 0, "maximum": 2}, "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "title": {"type": "string", "maxLength": 40}, "tags": {"type": "array", "items": {"type": "string"}},
        "by": {"type": "object", "properties": {"ok": {"type": "boolean"}, "id": {"type": ["string", "null"]}}},
        "none": {"type": "array"}, "nothing": {"type": "object"}}});
    let compact = answer.to_string();
    let pretty = serde_json::to_string_pretty(&answer).unwrap();
    let wide = pretty.replace("  ", "    ");
    let python = r#"{"title": "A fox", "tags": ["red", "quick \"fox\"", "\u00e9\ud83d\ude00\n"], "confidence": 0.85, "level": 2, "by": {"id": null, "ok": true}, "none": [], "nothing": {}}"#;
    for grammar in [Grammar::from_schema(&schema).unwrap(), Grammar::any_object()] {
        for text in [compact.as_str(), &pretty, &wide, python] {
            assert_eq!(serde_json::from_str::<Value>(text).unwrap(), answer);
            let mut script = model.tokenizer.encode(text).unwrap();
            script.push(model.config.tokens.stop[0]);
            for temperature in [0.0, 0.7] {
                let free = Request { max_tokens: 500, temperature: Some(temperature), seed: 3, ..Request::default() };
                let tied = Request { constraint: Some(Constraint { grammar: &grammar, tokens: &index }), ..free };
                let say = |request: &Request<'_>| {
                    let mut r = Random(9);
                    let logits = |n: usize, logits: &mut [f32]| {
                        noise(&mut r, &model, logits, false);
                        logits[script[n.min(script.len() - 1)] as usize] = 40.0;
                    };
                    speak(&model, request, logits).unwrap()
                };
                let (free, tied) = (say(&free), say(&tied));
                assert_eq!((free.why, tied.why), ("stop", "stop"));
                assert_eq!(tied.text, text);
                // It is over where nothing may follow; the token that says so is not computed.
                assert_eq!(tied.tokens, free.tokens[..free.tokens.len() - 1]);
            }
        }
    }
}

#[test]
fn what_cannot_be_followed_is_refused_with_its_path() {
    let deep = (0..100).fold(json!({"type": "string"}), |s, _| json!({"type": "array", "items": s}));
    let bomb = (0..20).fold(json!({"type": "string"}), |s, _| json!({"anyOf": [s.clone(), s]}));
    let many: Map<String, Value> = (0..200).map(|i| (format!("p{i}"), json!({"type": "null"}))).collect();
    for (schema, path, found) in [
        (json!({"type": "object", "properties": {"a": {"not": {}}}}), "#/properties/a", "\"not\""),
        (json!({"patternProperties": {}}), "#", "\"patternProperties\""),
        (json!({"type": "text"}), "#/type", "\"text\""),
        (json!({"type": "\u{7f}rray"}), "#/type", "\"\u{FFFD}rray\""),
        (json!({"properties": {"a\nb": {"not": {}}}}), "#/properties/a\u{FFFD}b", "\"not\""),
        (json!([]), "#", "a list of 0"),
        (json!({"$ref": "http://example.com/x"}), "#/$ref", "http"),
        (json!({"$ref": "#/$defs/x"}), "#/$ref", "x"),
        (json!({"$ref": "#"}), "#", "no answer"),
        (json!({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "#", "no answer"),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), "#", "no number from 3 to 2"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "#", "minLength 3"),
        (json!({"type": "array", "minItems": 1_000_000_000}), "#", "no answer"),
        (json!({"type": "array", "minItems": 3, "prefixItems": [{}], "items": false}), "#", "at least 3"),
        (json!({"enum": []}), "#", "no value"),
        (json!({"enum": ["x"], "type": "integer"}), "#", "no value"),
        (json!({"enum": vec!["x".repeat(100); 20_000]}), "#", "over 8192 values"),
        (json!({"type": "object", "additionalProperties": false, "required": ["a"]}), "#/required", "\"a\""),
        (json!({"properties": many}), "#", "200 properties"),
        (json!({"anyOf": [{}], "type": "object"}), "#", "\"type\" beside"),
        (json!({"allOf": [{}, {}]}), "#/allOf", "2 schemas"),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "#/oneOf", "alternatives 0 and 1"),
        (deep, "#/items", "nested over 64"),
        (bomb, "#", "schemas"),
    ] {
        let e = Grammar::from_schema(&schema).expect_err(&schema.to_string().chars().take(100).collect::<String>());
        assert!(e.path.starts_with(path) && e.found.contains(found), "{e}");
        assert!(!e.expected.is_empty());
    }
    let g = Grammar::from_schema(&json!({"type": "string", "format": "date", "pattern": "x", "color": 3})).unwrap();
    assert_eq!(g.warnings().len(), 3, "{:?}", g.warnings());
}

/// Values that may be read in very many ways fill the list of ways, and answers still follow.
#[test]
fn too_many_ways_are_dropped() {
    let model = model();
    let index = TokenIndex::new(&model.tokenizer);
    let ways: Vec<Value> = (0..3 * HEADS_MAX)
        .map(|i| json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": i}}, "required": ["a"]}))
        .collect();
    let schema = json!({ "anyOf": ways });
    let grammar = Grammar::from_schema(&schema).unwrap();
    let constraint = Constraint { grammar: &grammar, tokens: &index };
    let mut m = Matcher::new(constraint, &model.tokenizer, &model.config.tokens.stop, false);
    for id in model.tokenizer.encode("{\"a\":").unwrap() {
        assert!(m.take(id, 100));
    }
    assert_eq!(m.heads.len(), HEADS_MAX);
    let judge = jsonschema::draft202012::new(&schema).unwrap();
    for seed in 0..50 {
        let mut r = Random(seed);
        let request = Request {
            max_tokens: 40,
            temperature: Some(1.0),
            seed,
            constraint: Some(constraint),
            ..Request::default()
        };
        let spoken = speak(&model, &request, |_, logits| noise(&mut r, &model, logits, true)).unwrap();
        assert!(judge.is_valid(&serde_json::from_str(&spoken.text).unwrap()), "{}", spoken.text);
    }
}
