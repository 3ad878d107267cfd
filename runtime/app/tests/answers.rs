//! Answers that are asked for in some way: JSON that follows a schema, an end in time, an end on request, stop texts.
//!
//! With the bundled model; the `jsonschema` crate is the judge.

mod common;

use common::{Scratch, finish, forerun, tests, tiny_moe};
use forerun::constrain::{Constraint, Grammar, TokenIndex};
use forerun::error::AppError;
use forerun::model::{Model, Setup};
use forerun::reader::Reader;
use forerun::request::Request;
use forerun::session::{Answer, Look, Piece, Session, user_message};
use forerun_engine::plan::{KvType, Options};
use forerun_engine::slicing::Detail;
use forerun_engine::{NoObserver, Observer, Tuning};
use forerun_linux::IoChoice;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What Frigate asks of a review.
fn review() -> Value {
    json!({"title": "ReviewMetadata", "type": "object", "additionalProperties": false, "properties": {
        "observations": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 8},
        "scene": {"type": "string", "description": "What happens"},
        "title": {"type": "string"},
        "shortSummary": {"type": "string"},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "potential_threat_level": {"type": "integer", "minimum": 0, "maximum": 2},
        "other_concerns": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": null},
    }, "required": ["observations", "scene", "title", "shortSummary", "confidence", "potential_threat_level"]})
}

const LOOK: Look = Look { detail: Detail::X16, max_slices: None, pixels_max: 1 << 20, file_bytes_max: 1 << 20 };

fn setup(model: &Model) -> Setup {
    let vision = Some(model.vision_options(&LOOK).expect("vision"));
    let options = Options {
        context: 1024,
        chunk: 8,
        kv: KvType::F16,
        vision,
        prefix: true,
        cap_bytes: None,
        slots_max: None,
        tokenizer_bytes: 0,
    };
    Setup { options, threads: 2, io: IoChoice::Auto, tuning: Tuning::default() }
}

fn asking<'m>(model: &'m Model, prompt: &str) -> Session<'m> {
    let mut session = Session::new(model, LOOK, None);
    session.messages.push(user_message(1, prompt));
    session.pictures.push(tests("demo/scene_083.png").into());
    session
}

fn ask(model: &Model, request: &Request<'_>) -> Result<(Answer, String), AppError> {
    let session = asking(model, "What is in the picture?");
    let mut words = String::new();
    let mut emit = |piece: Piece<'_>| {
        if let Piece::Text(t) = piece {
            words.push_str(t);
        }
        Ok(())
    };
    let answer = model.with_engine(
        &setup(model),
        |s| s,
        |e, _| session.answer(&mut Reader::new(e), request, &mut NoObserver, &mut emit),
    )?;
    Ok((answer, words))
}

#[test]
fn a_review_follows_its_schema_whatever_is_left_of_tokens_and_time() {
    let model = Model::open(&tiny_moe()).expect("model");
    let schema = review();
    let judge = jsonschema::draft202012::new(&schema).expect("a schema");
    let grammar = Grammar::from_schema(&schema).expect("a schema");
    assert_eq!(grammar.warnings(), [] as [&str; 0]);
    let tokens = TokenIndex::new(&model.tokenizer);
    let constraint = Some(Constraint { grammar: &grammar, tokens: &tokens });
    let check = |(answer, words): (Answer, String)| {
        let value: Value = serde_json::from_str(&answer.text).unwrap_or_else(|e| panic!("{e}: {}", answer.text));
        judge.validate(&value).unwrap_or_else(|e| panic!("{e}: {}", answer.text));
        assert_eq!(words, answer.text, "what streams is the answer");
        answer
    };
    let mut reasons = [0; 2];
    for temperature in [0.0, 1.0] {
        for think in [false, true] {
            for max_tokens in [70, 71, 75, 90, 150, 300, 5_000] {
                let request = Request {
                    max_tokens,
                    temperature: Some(temperature),
                    seed: max_tokens as u64,
                    think,
                    constraint,
                    ..Request::default()
                };
                let answer = check(ask(&model, &request).expect("an answer"));
                assert!(answer.tokens.len() <= max_tokens);
                assert_eq!(answer.thinking.is_some(), think);
                reasons[usize::from(answer.finish_reason == "stop")] += 1;
            }
        }
    }
    assert!(reasons[0] > 0, "{reasons:?}");
    let few = Request { max_tokens: 20, constraint, ..Request::default() };
    let e = ask(&model, &few).expect_err("too few").to_string();
    assert!(e.contains("at most 20 tokens") && e.contains("ask for more"), "{e}");
    // Time that is up before anything was computed, or after the first tokens.
    for ms in [0, 20, 60] {
        let deadline = Some(Instant::now() + Duration::from_millis(ms));
        for constraint in [constraint, None] {
            let request =
                Request { max_tokens: 100_000, temperature: Some(0.0), deadline, constraint, ..Request::default() };
            match constraint {
                Some(_) => assert!(
                    ["deadline", "length", "stop"]
                        .contains(&check(ask(&model, &request).expect("an answer")).finish_reason)
                ),
                None if ms == 0 => {
                    let (answer, _) = ask(&model, &request).expect("an answer");
                    assert_eq!((answer.finish_reason, answer.text.as_str(), answer.tokens.len()), ("deadline", "", 0));
                }
                None => {}
            }
        }
    }
    let late = Request { max_tokens: 1000, constraint, deadline: Some(Instant::now()), ..Request::default() };
    assert_eq!(check(ask(&model, &late).expect("an answer")).finish_reason, "deadline");
}

/// Becomes true after so many routed tokens.
struct Soon<'a>(usize, &'a AtomicBool);

impl Observer for Soon<'_> {
    fn routed(&mut self, _: usize, _: usize, _: &[u16], _: &[f32]) {
        self.0 = self.0.saturating_sub(1);
        if self.0 == 0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_cancelled_answer_ends_between_chunks_or_tokens_and_leaves_a_sound_state() {
    let model = Model::open(&tiny_moe()).expect("model");
    let plain = Request { max_tokens: 24, temperature: Some(0.0), ..Request::default() };
    let (want, _) = ask(&model, &plain).expect("an answer");
    let session = asking(&model, "What is in the picture?");
    let mut parts = Vec::new();
    let result = model.with_engine(
        &setup(&model),
        |s| s,
        |e, _| {
            let mut reader = Reader::new(e);
            // 8 layers: after the first chunk of eight tokens, in the second, and while it answers.
            for routed in [1, 100, 8 * 30] {
                let flag = AtomicBool::new(false);
                let request = Request { cancel: Some(&flag), ..plain };
                let result = session.answer(&mut reader, request, &mut Soon(routed, &flag), &mut |_| Ok(()));
                assert!(matches!(result, Err(AppError::Cancelled)), "{result:?}");
                parts.push(reader.engine().len());
                let again = session.answer(&mut reader, plain, &mut NoObserver, &mut |_| Ok(()))?;
                assert_eq!((again.tokens, again.text), (want.tokens.clone(), want.text.clone()));
                reader.keep_pictures(0);
            }
            Ok(())
        },
    );
    result.expect("answers");
    assert!(parts[0] == 8 && parts[1] == 16 && parts[2] > 20, "{parts:?}");
}

#[test]
fn an_answer_ends_before_a_stop_text() {
    let model = Model::open(&tiny_moe()).expect("model");
    let plain = Request { max_tokens: 40, temperature: Some(0.0), ..Request::default() };
    let (all, _) = ask(&model, &plain).expect("an answer");
    let middle = all.text.split(' ').nth(2).expect("three words");
    let stop = ["never said".to_owned(), middle.to_owned()];
    let (part, words) = ask(&model, &Request { stop: &stop, ..plain }).expect("an answer");
    let (want, _) = all.text.split_once(middle).expect("it");
    assert_eq!((part.text.as_str(), part.finish_reason, words.as_str()), (want.trim_end(), "stop", want));
    assert!(all.tokens.starts_with(&part.tokens) && part.tokens.len() < all.tokens.len());
}

#[test]
fn the_command_line_asks_for_json() {
    let dir = Scratch::new("answers");
    let file = |name: &str, text: &str| dir.file(name, text.as_bytes());
    let base = |more: &[&str]| {
        let mut c = forerun();
        c.args(["run", "--prompt", "Hello", "--max-tokens", "90", "--model"]).arg(tiny_moe()).args(more);
        c
    };
    let schema = file("schema.json", &review().to_string());
    let o = finish(base(&["--schema"]).arg(&schema));
    let value: Value = serde_json::from_str(&o.success().stdout).expect("JSON alone on standard output");
    assert!(jsonschema::draft202012::new(&review()).expect("a schema").is_valid(&value), "{value}");
    let o = finish(&mut base(&["--json-answer", "--temperature", "1", "--seed", "4"]));
    assert!(serde_json::from_str::<Value>(&o.success().stdout).expect("JSON").is_object());
    let o = finish(base(&["--json", "--schema"]).arg(&schema)).json();
    assert!(serde_json::from_str::<Value>(o["text"].as_str().expect("text")).is_ok());

    let loose = file("loose.json", r#"{"type": "string", "pattern": "a+"}"#);
    let o = finish(base(&["--schema"]).arg(&loose));
    assert!(o.success().stderr.contains("loose.json: #: \"pattern\" is not enforced"), "{o:?}");
    let bad = file("bad.json", r#"{"type": "object", "properties": {"a": {"not": {}}}}"#);
    finish(base(&["--schema"]).arg(&bad)).refused(3, &["bad.json", "#/properties/a", "\"not\""]);
    finish(base(&["--schema"]).arg(file("no.json", "{"))).refused(3, &["no.json", "no JSON"]);
    finish(base(&["--schema"]).arg(dir.path("missing"))).refused(3, &["missing"]);
    finish(base(&["--tools"]).arg(file("tools.json", "{}"))).refused(3, &["--tools", "array"]);
    let tools = file("tools2.json", r#"[{"type": "function", "function": {"name": "look"}}]"#);
    let (with, without) =
        (finish(base(&["--json", "--tools"]).arg(&tools)).json(), finish(&mut base(&["--json"])).json());
    assert!(with["prompt_tokens"].as_u64() > without["prompt_tokens"].as_u64(), "the prompt tells of the tools");
    let o = finish(&mut base(&["--json", "--deadline-ms", "0"])).json();
    assert_eq!((&o["finish_reason"], &o["text"]), (&json!("deadline"), &json!("")));
}
