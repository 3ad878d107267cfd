//! `forerun run`: one prompt, one answer.

use super::{Printer, headline, summary};
use crate::cli::RunArgs;
use crate::error::AppError;
use crate::model::{Facts, Model, model_path};
use crate::session::{Answer, Look, Session, read_picture, user_message};
use forerun_camera::picture::dimensions;
use forerun_engine::{Counters, NoObserver};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Pixels of the largest of `pictures`, from their headers.
///
/// # Errors
/// If one cannot be read.
pub fn pixels_max(pictures: &[PathBuf]) -> Result<u64, AppError> {
    let mut most = 0;
    for path in pictures {
        let bytes = read_picture(path)?;
        let (w, h) = dimensions(&bytes).map_err(|error| AppError::Picture { path: path.clone(), error })?;
        most = most.max(u64::from(w) * u64::from(h));
    }
    Ok(most)
}

/// Runs the command.
///
/// # Errors
/// If model, picture or prompt is not usable, it does not fit, or storage fails.
pub fn run(args: &RunArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    let pixels_max = pixels_max(&args.image)?;
    let detail = model.detail(&args.vision);
    let setup = model.setup(
        &args.engine,
        (!args.image.is_empty() && model.config.vision.is_some()).then_some(detail),
        pixels_max,
    );
    let look = Look { detail, max_slices: args.vision.max_slices, pixels_max };
    let mut session = Session::new(&model, look, args.system.as_deref());
    session.messages.push(user_message(args.image.len(), &args.prompt));
    session.pictures.clone_from(&args.image);
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            if args.json {
                let answer = session.answer(engine, &args.sample, &mut NoObserver, &mut |_| {})?;
                println!("{}", object(&answer, &engine.counters(), facts));
            } else {
                eprintln!("{}", headline(facts));
                let mut printer = Printer::new();
                let answer = session.answer(engine, &args.sample, &mut NoObserver, &mut |p| printer.print(p))?;
                println!();
                eprintln!("{}", summary(&answer, &engine.counters()));
            }
            Ok(())
        },
    )
}

fn object(a: &Answer, c: &Counters, facts: &Facts) -> Value {
    let t = &a.timings;
    let mut o = json!({
        "text": a.text,
        "tokens": a.tokens,
        "finish_reason": a.finish_reason,
        "prompt_tokens": a.prompt_tokens,
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
            "bytes_demand": c.bytes_demand,
            "bytes_predicted": c.bytes_predicted,
            "stall_us": c.stall_us,
        },
        "memory": {
            "planned_bytes": facts.plan.total_bytes(),
            "cap_bytes": facts.plan.cap_bytes,
            "peak_rss_bytes": forerun_linux::sys::peak_rss_bytes(),
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
