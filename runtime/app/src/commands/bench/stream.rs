//! `forerun bench` of a model whose experts are read from storage: tokens a second beside what the device allows.
//!
//! The device is measured just before and after each round, with reads of the same kind, so that one that is faster or hotter
//! than a minute ago does not count for or against us.

use super::routes::Routes;
use super::{median, run_tokens, tokens};
use crate::cli::BenchArgs;
use crate::commands::{headline, say};
use crate::error::AppError;
use crate::model::{Facts, Model, Setup};
use forerun_engine::ports::Storage;
use forerun_engine::{Counters, Engine, NoObserver, Observer, Recall};
use forerun_linux::sys;
use serde_json::{Value, json};
use std::time::Instant;

/// Bytes that a measurement of the device reads, about.
const DEVICE_BYTES: usize = 384 << 20;

/// One phase of one round.
#[derive(Debug, Clone, Copy)]
struct Phase {
    tokens: usize,
    seconds: f64,
    /// Bytes per second that the device delivered just before and after.
    device: f64,
    /// What was counted meanwhile.
    hits: u64,
    misses: u64,
    foreseen: u64,
    needed_bytes: f64,
    useless_bytes: f64,
    stall_s: f64,
}

impl Phase {
    fn new(tokens: usize, seconds: f64, device: f64, expert_bytes: f64, a: &Counters, b: &Counters) -> Self {
        let used = b.predicted_used - a.predicted_used;
        let read = (b.bytes_demand - a.bytes_demand + b.bytes_predicted - a.bytes_predicted) as f64;
        let needed_bytes = (b.misses - a.misses + used) as f64 * expert_bytes;
        Self {
            tokens,
            seconds,
            device,
            hits: b.hits - a.hits + (b.predicted_late - a.predicted_late) - used,
            misses: b.misses - a.misses + used,
            foreseen: used,
            needed_bytes,
            useless_bytes: (read - needed_bytes).max(0.0),
            stall_s: (b.stall_us - a.stall_us) as f64 / 1e6,
        }
    }

    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// Seconds that the device takes for what had to be read.
    fn io_s(&self) -> f64 {
        self.needed_bytes / self.device
    }

    fn compute_s(&self) -> f64 {
        self.seconds - self.stall_s
    }
}

fn share(part: u64, rest: u64) -> f64 {
    part as f64 / (part + rest).max(1) as f64
}

/// Medians over the rounds.
fn report(rounds: &[Phase]) -> Value {
    let of = |f: &dyn Fn(&Phase) -> f64| median(&rounds.iter().map(f).collect::<Vec<_>>());
    let each = |f: &dyn Fn(&Phase) -> f64| rounds.iter().map(f).collect::<Vec<_>>();
    let ms_per_token = |f: &dyn Fn(&Phase) -> f64| of(&|p| f(p) * 1e3 / p.tokens as f64);
    json!({
        "tokens": rounds[0].tokens,
        "tokens_per_s": of(&Phase::tokens_per_s),
        "rounds": each(&Phase::tokens_per_s),
        "device_bound_tokens_per_s": of(&|p| p.tokens as f64 / p.io_s()),
        "share_of_device": of(&|p| p.io_s() / p.seconds),
        "share_of_device_rounds": each(&|p| p.io_s() / p.seconds),
        "t_token_ms": ms_per_token(&|p| p.seconds),
        "t_io_ms": ms_per_token(&Phase::io_s),
        "t_compute_ms": ms_per_token(&Phase::compute_s),
        "t_stall_ms": ms_per_token(&|p| p.stall_s),
        "overlap": of(&|p| p.io_s().max(p.compute_s()) / p.seconds),
        "bytes_per_token": of(&|p| (p.needed_bytes + p.useless_bytes) / p.tokens as f64),
        "useless_bytes_per_token": of(&|p| p.useless_bytes / p.tokens as f64),
        "hit_rate": of(&|p| share(p.hits, p.misses)),
        "foreseen": of(&|p| share(p.foreseen, p.misses - p.foreseen)),
    })
}

fn line(name: &str, v: &Value) -> String {
    let n = |key: &str| v[key].as_f64().unwrap_or(0.0);
    let rounds: Vec<f64> = v["rounds"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    format!(
        "{name} of {} tokens: {:.2} tokens/s, rounds {rounds:.2?}; {:.1} % of the {:.2} that the device allows\n\
         \x20 a token: {:.1} ms = {:.1} ms of computing + {:.1} ms of waiting; reading takes the device {:.1} ms; overlap {:.2}\n\
         \x20 {:.1} MB read a token, {:.1} MB of them for nothing; {:.1} % of its experts in memory, {:.1} % of the others foreseen\n",
        v["tokens"],
        n("tokens_per_s"),
        n("share_of_device") * 100.0,
        n("device_bound_tokens_per_s"),
        n("t_token_ms"),
        n("t_compute_ms"),
        n("t_stall_ms"),
        n("t_io_ms"),
        n("overlap"),
        n("bytes_per_token") / 1e6,
        n("useless_bytes_per_token") / 1e6,
        n("hit_rate") * 100.0,
        n("foreseen") * 100.0,
    )
}

/// Measures the rounds.
fn measure<S: Storage>(
    model: &Model,
    args: &BenchArgs,
    engine: &mut Engine<'_, S>,
    facts: &Facts,
) -> Result<(), AppError> {
    let m = model.config.text.moe();
    let (experts, top_k) = m.map_or((1, 1), |m| (m.experts, m.top_k));
    let made_up = args.recall.is_some() || args.reuse.is_some();
    let expert_bytes = facts.plan.slot_bytes;
    let reads = (DEVICE_BYTES / expert_bytes.max(1)).clamp(16, facts.plan.slots.max(16));
    let (mut prefill, mut decode) = (Vec::<Phase>::new(), Vec::<Phase>::new());
    let mut device = 0.0;
    if args.warm {
        device = engine.device_rate(reads, 0)?;
    }
    for round in usize::from(!args.warm)..=args.rounds {
        if !args.warm {
            engine.forget_experts();
            device = engine.device_rate(reads, 2 * round as u32)?;
            engine.forget_experts();
        }
        engine.reset();
        let ids = tokens(args.prefill + args.decode, model.config.text.vocab, round);
        let (reuse, recall) = (args.reuse.unwrap_or(0.0), args.recall.unwrap_or(0.0));
        let mut routes = made_up.then(|| Routes::new(engine.recall().len(), experts, top_k, reuse, recall, round));
        let observer: &mut dyn Observer = match &mut routes {
            Some(routes) => routes,
            None => &mut NoObserver,
        };
        let (prompt, answer) = ids.split_at(args.prefill);
        for (phase, ids, together) in [(&mut prefill, prompt, true), (&mut decode, answer, false)] {
            let (before, start) = (engine.counters(), Instant::now());
            run_tokens(engine, ids, together, observer)?;
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                phase.push(Phase::new(ids.len(), seconds, device, expert_bytes as f64, &before, &engine.counters()));
            }
        }
        // Otherwise it would empty the slots, which only the last round of a warm run does not need any more.
        if round > 0 && (!args.warm || round == args.rounds) {
            let after = engine.device_rate(reads, 2 * round as u32 + 1)?;
            let same = if args.warm { 0 } else { prefill.len() - 1 };
            prefill[same..].iter_mut().chain(&mut decode[same..]).for_each(|p| p.device = f64::midpoint(device, after));
        }
    }
    let c = engine.counters();
    let recall: Vec<Option<f64>> = engine.recall().iter().map(Recall::share).collect();
    let device = median(&decode.iter().map(|p| p.device).collect::<Vec<_>>());
    let (p, d) = (report(&prefill), report(&decode));
    let ttft_ms = median(&prefill.iter().map(|p| p.seconds * 1e3).collect::<Vec<_>>());
    if args.json {
        return say(format_args!(
            "{}\n",
            json!({
                "prefill": p,
                "decode": d,
                "warm": args.warm,
                "time_to_first_token_ms": ttft_ms,
                "load_ms": facts.load_ms,
                "device_bytes_per_s": device,
                "reads_in_flight": engine.depth(),
                "recall_per_layer": recall,
                "cancelled_predictions": c.predicted_cancelled,
                "longest_wait_ms": c.stall_max_us as f64 / 1e3,
                "kernels": facts.kernels,
                "io": facts.io,
                "threads": facts.threads,
                "expert_slots": facts.plan.slots,
                "experts": facts.plan.experts,
                "peak_rss_bytes": sys::peak_rss_bytes(),
                "cgroup_peak_bytes": sys::cgroup_peak_bytes(),
            })
        ));
    }
    let gb =
        |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| format!("{:.1} MiB", b as f64 / f64::from(1 << 20)));
    say(format_args!(
        "{}\nthe device delivers {:.0} MB/s to {} reads of {:.2} MB in flight\n{}{}\
         first token after {ttft_ms:.0} ms; longest wait {:.0} ms; peak RSS {}, charged to the cgroup {}\n",
        headline(facts),
        device / 1e6,
        engine.depth(),
        expert_bytes as f64 / 1e6,
        line("prefill", &p),
        line("decode", &d),
        c.stall_max_us as f64 / 1e3,
        gb(sys::peak_rss_bytes()),
        gb(sys::cgroup_peak_bytes()),
    ))
}

/// Runs the command.
///
/// # Errors
/// If the model is not usable, it does not fit, or storage fails.
pub fn run(model: &Model, setup: &Setup, args: &BenchArgs) -> Result<(), AppError> {
    model.with_engine(setup, |s| s, |engine, facts| measure(model, args, engine, facts))
}
