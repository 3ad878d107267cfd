//! `forerun run`: one prompt, one answer.

use super::{Printer, headline, note, say, summary};
use crate::cli::{RunArgs, VisionArgs};
use crate::constrain::{Constraint, Grammar, TokenIndex};
use crate::error::AppError;
use crate::model::{Facts, Model, model_path};
use crate::reader::Reader;
use crate::request::Request;
use crate::session::{Answer, FILE_BYTES_MAX, Look, Picture, Session, read_picture, user_message};
use crate::tools::ToolCall;
use forerun_camera::picture::{Limits, PictureError, dimensions};
use forerun_engine::{Counters, NoObserver, Observer, Recall};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest file with a schema or tools.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// A look at `pictures`: as large as the largest of them, from their headers.
///
/// # Errors
/// If one cannot be read or is absurdly large.
pub fn look(model: &Model, args: &VisionArgs, pictures: &[PathBuf]) -> Result<Look, AppError> {
    let mut look = Look { detail: model.detail(args), max_slices: args.max_slices, pixels_max: 0, file_bytes_max: 0 };
    let Limits { pixels_max } = Limits::default();
    for path in pictures {
        let wrong = |error| AppError::Picture { path: path.clone(), error };
        let bytes = read_picture(path, FILE_BYTES_MAX)?;
        let (width, height) = dimensions(&bytes).map_err(wrong)?;
        let pixels = u64::from(width) * u64::from(height);
        if pixels > pixels_max {
            return Err(wrong(PictureError::Large { width, height, pixels_max }));
        }
        look.pixels_max = look.pixels_max.max(pixels);
        look.file_bytes_max = look.file_bytes_max.max(bytes.len() as u64);
    }
    Ok(look)
}

/// The JSON in the file `path`.
fn read_json(path: &Path) -> Result<Value, AppError> {
    let at = |error| AppError::File { path: path.into(), error };
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(at)?;
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut text).map_err(at)?;
    let wrong = |found: String| AppError::Input(format!("{}: found {found}", path.display()));
    if text.len() as u64 > JSON_BYTES_MAX {
        return Err(wrong(format!("over {JSON_BYTES_MAX} bytes, expected a smaller file")));
    }
    serde_json::from_slice(&text).map_err(|e| wrong(format!("no JSON: {e}")))
}

/// The grammar that `args` ask for. Says what of a schema is not enforced.
fn grammar(args: &RunArgs) -> Result<Option<Grammar>, AppError> {
    let Some(path) = &args.schema else { return Ok(args.json_answer.then(Grammar::any_object)) };
    let wrong = |e| AppError::Input(format!("{}: {e}", path.display()));
    let grammar = Grammar::from_schema(&read_json(path)?).map_err(wrong)?;
    grammar.warnings().iter().for_each(|w| note(format_args!("{}: {w}", path.display())));
    Ok(Some(grammar))
}

/// The tools in the file `path`.
fn tools(path: Option<&Path>) -> Result<Vec<Value>, AppError> {
    match path.map(read_json).transpose()? {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) if list.iter().all(Value::is_object) => Ok(list),
        Some(_) => Err(AppError::Input("--tools: found something else, expected a JSON array of objects".into())),
    }
}

/// Runs the command.
///
/// # Errors
/// If model, picture or prompt is not usable, it does not fit, or storage fails.
pub fn run(args: &RunArgs) -> Result<(), AppError> {
    answer(&Model::open(&model_path(&args.model)?)?, args, &mut NoObserver).map(drop)
}

/// Answers the prompt of `args`, of which `observer` hears, and returns how well each layer was foreseen.
///
/// # Errors
/// As [`run`].
pub fn answer(model: &Model, args: &RunArgs, observer: &mut dyn Observer) -> Result<Vec<Recall>, AppError> {
    let look = look(model, &args.vision, &args.image)?;
    let vision = (!args.image.is_empty()).then(|| model.vision_options(&look)).transpose()?;
    let (grammar, tools) = (grammar(args)?, tools(args.tools.as_deref())?);
    let mut setup = model.setup(&args.engine, vision);
    let tokens = grammar.as_ref().map(|_| TokenIndex::new(&model.tokenizer));
    let constraint = grammar.as_ref().zip(tokens.as_ref()).map(|(grammar, tokens)| Constraint { grammar, tokens });
    if constraint.is_some() {
        setup.options.tokenizer_bytes += model.constraint_bytes();
    }
    let mut session = Session::new(model, look, args.system.as_deref());
    session.messages.push(user_message(args.image.len(), &args.prompt));
    session.pictures.extend(args.image.iter().cloned().map(Picture::File));
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            let mut reader = Reader::new(engine);
            let deadline = args.deadline_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
            let (tools, stop) = (&tools[..], &args.stop[..]);
            let request = Request { constraint, tools, stop, deadline, ..Request::from(&args.sample) };
            if args.json {
                let answer = session.answer(&mut reader, request, observer, &mut |_| Ok(()))?;
                let engine = reader.engine();
                say(format_args!("{}\n", object(&answer, &engine.counters(), engine.recall(), facts)))?;
            } else {
                note(format_args!("{}", headline(facts)));
                let mut printer = Printer::new();
                let answer = session.answer(&mut reader, request, observer, &mut |p| printer.print(p))?;
                say(format_args!("\n"))?;
                note(format_args!("{}", summary(&answer, &reader.engine().counters())));
            }
            Ok(reader.engine().recall().to_vec())
        },
    )
}

fn object(a: &Answer, c: &Counters, recall: &[Recall], facts: &Facts) -> Value {
    let t = &a.timings;
    let mut o = json!({
        "text": a.text,
        "tokens": a.tokens,
        "finish_reason": a.finish_reason,
        "prompt_tokens": a.prompt_tokens,
        "prompt_tokens_details": { "cached_tokens": a.cached_tokens },
        "completion_tokens": a.tokens.len(),
        "timings": {
            "load_ms": facts.load_ms,
            "vision_ms": t.vision_ms,
            "prefill_ms": t.prefill_ms,
            "time_to_first_token_ms": t.first_token_ms,
            "decode_ms": t.decode_ms,
            "tokens_per_second": a.tokens_per_second(),
        },
        "experts": {
            "slots": facts.plan.slots,
            "experts": facts.plan.experts,
            "hits": c.hits,
            "misses": c.misses,
            "predicted": c.predicted,
            "predicted_used": c.predicted_used,
            "predicted_late": c.predicted_late,
            "predicted_wasted": c.predicted_wasted,
            "recall_per_layer": recall.iter().map(Recall::share).collect::<Vec<_>>(),
            "bytes_demand": c.bytes_demand,
            "bytes_predicted": c.bytes_predicted,
            "stall_us": c.stall_us,
        },
        "memory": {
            "planned_bytes": facts.plan.total_bytes(),
            "cap_bytes": facts.plan.cap_bytes,
            "peak_rss_bytes": forerun_linux::sys::peak_rss_bytes(),
            "locked": facts.locked,
        },
        "kernels": facts.kernels,
        "io": facts.io,
        "threads": facts.threads,
    });
    if !a.calls.is_empty() {
        let call = |c: &ToolCall| json!({ "name": c.name, "arguments": c.arguments });
        o["tool_calls"] = a.calls.iter().map(call).collect();
    }
    if let Some(thinking) = &a.thinking {
        o["thinking"] = json!(thinking);
    }
    o
}
