//! `forerun bench`: how fast prompt and answer are, beside what memory or storage could deliver in the same minute.

mod routes;
mod stream;
mod vision;

use super::{headline, say};
use crate::cli::BenchArgs;
use crate::error::AppError;
use crate::model::{Model, kernels, model_path, workers};
use forerun_engine::ports::{Storage, Workers};
use forerun_engine::{Engine, EngineError, Input, NoObserver, Observer};
use forerun_format::BlockType;
use forerun_kernels::Columns;
use forerun_linux::Arena;
use serde_json::json;
use std::time::Instant;

/// Bytes that the memory reference reads, at most: more than the caches of any board hold.
const REFERENCE_BYTES_MAX: u64 = 512 << 20;
/// Elements in a row of the memory reference.
const REFERENCE_ROW: usize = 4096;

/// Bytes per second that `threads` threads read from memory together: the median of nine products of an f32 matrix with
/// one column, which the kernels compute faster than memory delivers. The matrix takes no more than half of the cap, in huge
/// pages like the weights, and is gone before the engine's memory is taken.
fn memory_bytes_per_s(threads: usize, cap_bytes: Option<u64>) -> Result<f64, AppError> {
    let system = |error| AppError::System { what: "memory reference", error };
    let bytes = cap_bytes.map_or(REFERENCE_BYTES_MAX, |cap| (cap / 2).clamp(1 << 20, REFERENCE_BYTES_MAX)) as usize;
    let row_bytes = REFERENCE_ROW * 4;
    let rows = bytes / row_bytes;
    let arena = Arena::new(rows * row_bytes).map_err(system)?;
    let full = |e| system(std::io::Error::other(e));
    let matrix: &[u8] = arena.take(rows * row_bytes, 4096).map_err(full)?;
    let pool = workers(threads).map_err(system)?;
    let (ks, x) = (kernels()?, vec![1f32; REFERENCE_ROW]);
    let mut out = vec![0f32; rows];
    // A mebibyte a piece.
    let piece = (1 << 20) / row_bytes;
    let mut passes = [0f64; 9];
    for pass in &mut passes {
        let start = Instant::now();
        pool.split(&mut out, piece, &|i, out| {
            let w = &matrix[i * piece * row_bytes..][..out.len() * row_bytes];
            let x = Columns { f32: &x, q8: &[], n: REFERENCE_ROW };
            (ks.matmul)(BlockType::F32, w, x, out);
        });
        *pass = matrix.len() as f64 / start.elapsed().as_secs_f64();
    }
    Ok(median(&passes))
}

fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_unstable_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(0.0)
}

/// Tokens that look random and are always the same for one `round`.
fn tokens(n: usize, vocab: usize, round: usize) -> Vec<u32> {
    let mut s = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(2 * round as u64 + 1);
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 33) as u32 % vocab as u32
    };
    (0..n).map(|_| next()).collect()
}

/// Runs `ids` after what is in the state: together, or one by one.
fn run_tokens<S: Storage>(
    engine: &mut Engine<'_, S>,
    ids: &[u32],
    together: bool,
    observer: &mut dyn Observer,
) -> Result<(), EngineError> {
    let first = engine.len() as u32;
    let positions: Vec<u32> = (first..first + ids.len() as u32).collect();
    let step = if together { ids.len().max(1) } else { 1 };
    ids.chunks(step)
        .zip(positions.chunks(step))
        .try_for_each(|(ids, p)| engine.run(Input { ids, positions: [p; 3] }, observer))
}

fn round<S: Storage>(engine: &mut Engine<'_, S>, ids: &[u32], decode: usize) -> Result<(f64, f64), AppError> {
    engine.reset();
    let (prompt, answer) = ids.split_at(ids.len() - decode);
    let start = Instant::now();
    run_tokens(engine, prompt, true, &mut NoObserver)?;
    let prefill = prompt.len() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    run_tokens(engine, answer, false, &mut NoObserver)?;
    Ok((prefill, decode as f64 / start.elapsed().as_secs_f64()))
}

/// Runs the command.
///
/// # Errors
/// If the model is not usable, it does not fit, or storage fails.
pub fn run(args: &BenchArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    if args.vision {
        return vision::run(&model, args);
    }
    let mut setup = model.setup(&args.engine, None);
    setup.options.context = (args.prefill + args.decode).max(1);
    if args.resident && setup.options.slots_max.is_none() {
        setup.options.slots_max = Some(usize::MAX);
    }
    let plan = model.plan(&setup)?;
    if plan.slots < plan.experts && !args.resident {
        return stream::run(&model, &setup, args);
    }
    if args.recall.is_some() || args.reuse.is_some() {
        return Err(AppError::Input(
            "all experts fit in memory, so that nothing can be foreseen: lower --memory".into(),
        ));
    }
    let memory = memory_bytes_per_s(setup.threads, setup.options.cap_bytes)?;
    let ids = tokens(args.prefill + args.decode, model.config.text.vocab, 0);
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            if args.resident {
                if facts.plan.slots < facts.plan.experts {
                    return Err(AppError::Input(format!(
                        "{} of {} experts fit: --resident needs all of them: raise --memory or leave it out",
                        facts.plan.slots, facts.plan.experts
                    )));
                }
                engine.preload()?;
            }
            let (mut prefill, mut decode) = (Vec::new(), Vec::new());
            for _ in 0..args.rounds {
                let (p, d) = round(engine, &ids, args.decode)?;
                prefill.push(p);
                decode.push(d);
            }
            let bytes = model.bytes_per_token() + facts.plan.state_bytes_per_token();
            let share = median(&decode) * bytes as f64 / memory;
            let c = engine.counters();
            if args.json {
                say(format_args!(
                    "{}\n",
                    json!({
                        "prefill_tokens": args.prefill,
                        "decode_tokens": args.decode,
                        "prefill_tokens_per_s": median(&prefill),
                        "decode_tokens_per_s": median(&decode),
                        "prefill_rounds": prefill,
                        "decode_rounds": decode,
                        "bytes_per_token": bytes,
                        "memory_bytes_per_s": memory,
                        "share_of_memory": share,
                        "kernels": facts.kernels,
                        "threads": facts.threads,
                        "hits": c.hits,
                        "misses": c.misses,
                        "peak_rss_bytes": forerun_linux::sys::peak_rss_bytes(),
                    })
                ))
            } else {
                say(format_args!(
                    "{}\nprefill of {} tokens: {:.2} tokens/s, rounds {prefill:.2?}\n\
                     decode of {} tokens: {:.2} tokens/s, rounds {decode:.2?}\n\
                     a token reads {:.1} MiB of weights and state: {:.0} % of the {:.1} GB/s that memory delivers to {} threads\n",
                    headline(facts),
                    args.prefill,
                    median(&prefill),
                    args.decode,
                    median(&decode),
                    bytes as f64 / f64::from(1 << 20),
                    share * 100.0,
                    memory / 1e9,
                    facts.threads
                ))
            }
        },
    )
}
