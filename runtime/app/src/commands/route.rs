//! `forerun route`: one prompt answered, and the experts that every token chose written down. `forerun-quant replay` reads
//! the file. Tells how many of them were foreseen, layer by layer.

use super::note;
use crate::cli::RouteArgs;
use crate::error::AppError;
use crate::model::{Model, model_path};
use forerun_engine::{Observer, Recall};
use std::fs::File;
use std::io::{self, BufWriter, Write};

/// Writes down routes. The first error is kept, and nothing is written after it.
struct Recorder {
    out: BufWriter<File>,
    error: Option<io::Error>,
    /// Tokens of the prompt, once it has been read.
    prompt: Option<usize>,
    lines: u64,
}

impl Recorder {
    fn write(&mut self, f: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        if self.error.is_none() {
            self.error = f(&mut self.out).err();
        }
    }
}

impl Observer for Recorder {
    fn routed(&mut self, layer: usize, token: usize, experts: &[u16], weights: &[f32]) {
        let (phase, step) = self.prompt.map_or((0, token), |n| (1, token.saturating_sub(n)));
        self.lines += experts.len() as u64;
        self.write(|out| {
            experts.iter().zip(weights).enumerate().try_for_each(|(slot, (expert, weight))| {
                writeln!(out, "0,{phase},{step},{layer},{slot},{expert},{weight}")
            })
        });
    }

    fn logits(&mut self, token: usize, _: &[f32]) {
        // The first are those of the prompt's last token.
        self.prompt.get_or_insert(token + 1);
    }
}

/// Runs the command.
///
/// # Errors
/// Those of `forerun run`; if the model has no experts, or the trace cannot be written.
pub fn run(args: &RouteArgs) -> Result<(), AppError> {
    let path = model_path(&args.run.model)?;
    let model = Model::open(&path)?;
    let Some(m) = model.config.text.moe() else {
        return Err(AppError::Input(format!("{}: this model has no experts to choose", path.display())));
    };
    let wrong = |error| AppError::File { path: args.trace.clone(), error };
    let mut recorder = Recorder {
        out: BufWriter::new(File::create(&args.trace).map_err(wrong)?),
        error: None,
        prompt: None,
        lines: 0,
    };
    let (layers, experts, top_k) = (model.weights.layers.len(), m.experts, m.top_k);
    recorder.write(|out| {
        writeln!(out, "# route_trace v1")?;
        writeln!(out, "# n_layer={layers} n_expert={experts} n_expert_used={top_k}")?;
        writeln!(out, "turn,phase,step,layer,slot,expert,weight")
    });
    let recall = super::run::answer(&model, &args.run, &mut recorder)?;
    let flushed = recorder.out.flush();
    recorder.error.map_or(flushed, Err).map_err(wrong)?;
    note(format_args!("{}: {} choices", args.trace.display(), recorder.lines));
    let percent = |r: &Recall| r.share().map_or("-".into(), |share| format!("{:.1}", share * 100.0));
    let percents: Vec<String> = recall.iter().map(percent).collect();
    note(format_args!("foreseen of the answer's choices, % in each layer: {}", percents.join(" ")));
    Ok(())
}
