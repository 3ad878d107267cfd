//! `forerun run`: one prompt, one answer.

use super::{Printer, headline, note, say, summary};
use crate::cli::{RunArgs, VisionArgs};
use crate::error::AppError;
use crate::model::{Facts, Model, model_path};
use crate::reader::Reader;
use crate::session::{Answer, FILE_BYTES_MAX, Look, Picture, Session, read_picture, user_message};
use forerun_camera::picture::{Limits, PictureError, dimensions};
use forerun_engine::{Counters, NoObserver, Observer, Recall};
use serde_json::{Value, json};
use std::path::PathBuf;

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
    let setup = model.setup(&args.engine, vision);
    let mut session = Session::new(model, look, args.system.as_deref());
    session.messages.push(user_message(args.image.len(), &args.prompt));
    session.pictures.extend(args.image.iter().cloned().map(Picture::File));
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            let mut reader = Reader::new(engine);
            if args.json {
                let answer = session.answer(&mut reader, &args.sample, observer, &mut |_| Ok(()))?;
                let engine = reader.engine();
                say(format_args!("{}\n", object(&answer, &engine.counters(), engine.recall(), facts)))?;
            } else {
                note(format_args!("{}", headline(facts)));
                let mut printer = Printer::new();
                let answer = session.answer(&mut reader, &args.sample, observer, &mut |p| printer.print(p))?;
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
    if let Some(thinking) = &a.thinking {
        o["thinking"] = json!(thinking);
    }
    o
}
