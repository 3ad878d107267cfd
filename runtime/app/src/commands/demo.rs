//! `forerun demo`: the bundled model looks at the bundled pictures, with only some of its experts in memory.

use super::{Printer, headline, plan, say, summary};
use crate::cli::{DemoArgs, SampleArgs, VisionArgs};
use crate::error::AppError;
use crate::model::Model;
use crate::reader::Reader;
use crate::session::{Session, user_message};
use forerun_engine::NoObserver;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Experts that the demo keeps in memory unless told otherwise: few enough that some must be read, as on a small board.
const SLOTS: usize = 96;

/// `demo.json`: paths are relative to its folder.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Demo {
    model: PathBuf,
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    picture: PathBuf,
    prompt: String,
    answer: String,
}

fn folder(args: &DemoArgs) -> PathBuf {
    args.dir.clone().unwrap_or_else(|| {
        let here = Path::new("tests/demo");
        if here.join("demo.json").exists() { here.into() } else { "/usr/share/forerun/demo".into() }
    })
}

/// Runs the command.
///
/// # Errors
/// If something is missing, or an answer is not the right one.
pub fn run(args: &DemoArgs) -> Result<(), AppError> {
    let dir = folder(args);
    let path = dir.join("demo.json");
    let text = std::fs::read_to_string(&path).map_err(|error| AppError::File { path: path.clone(), error })?;
    let demo: Demo = serde_json::from_str(&text).map_err(|e| AppError::Input(format!("{}: {e}", path.display())))?;
    let model = Model::open(&dir.join(&demo.model))?;
    let pictures: Vec<PathBuf> = demo.cases.iter().map(|c| dir.join(&c.picture)).collect();
    let look = super::run::look(&model, &VisionArgs::default(), &pictures)?;
    let mut setup = model.setup(&args.engine, Some(model.vision_options(&look)?));
    setup.options.slots_max = setup.options.slots_max.or(Some(SLOTS));
    let sample = SampleArgs { max_tokens: 64, temperature: Some(0.0), top_p: None, top_k: None, seed: 0, think: false };

    let mut wrong = 0;
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            say(format_args!("{}{}\n", plan::table(&facts.plan), headline(facts)))?;
            let mut reader = Reader::new(engine);
            for (case, picture) in demo.cases.iter().zip(&pictures) {
                let mut session = Session::new(&model, look, None);
                session.messages.push(user_message(1, &case.prompt));
                session.pictures.push(picture.clone().into());
                say(format_args!("\n{}: {}\n", case.picture.display(), case.prompt))?;
                let before = reader.engine().counters();
                let mut printer = Printer::new();
                let answer = session.answer(&mut reader, &sample, &mut NoObserver, &mut |p| printer.print(p))?;
                let right = answer.text == case.answer;
                wrong += usize::from(!right);
                let verdict = if right { "right".into() } else { format!("wrong, expected: {}", case.answer) };
                say(format_args!(
                    "  [{verdict}]\n  {}\n",
                    summary(&answer, &since(&before, &reader.engine().counters()))
                ))?;
            }
            Ok(())
        },
    )?;
    if wrong > 0 {
        return Err(AppError::Check(format!("{wrong} of {} answers are wrong", demo.cases.len())));
    }
    say(format_args!("\nAll {} answers are right.\n", demo.cases.len()))
}

fn since(a: &forerun_engine::Counters, b: &forerun_engine::Counters) -> forerun_engine::Counters {
    forerun_engine::Counters {
        hits: b.hits - a.hits,
        misses: b.misses - a.misses,
        predicted: b.predicted - a.predicted,
        predicted_used: b.predicted_used - a.predicted_used,
        ..*b
    }
}
