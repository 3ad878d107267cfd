//! `forerun bench`: how fast prompt and answer are, beside what memory could deliver in the same minute.

use super::{headline, say};
use crate::cli::BenchArgs;
use crate::error::AppError;
use crate::model::{Model, kernels, model_path, workers};
use crate::session::Look;
use forerun_engine::ports::{Storage, Workers};
use forerun_engine::slicing::Detail;
use forerun_engine::{CropPixels, Engine, Input, NoObserver};
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

/// Tokens that look random and are always the same.
fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    let mut s = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 33) as u32 % vocab as u32
    };
    (0..n).map(|_| next()).collect()
}

fn round<S: Storage>(engine: &mut Engine<'_, S>, ids: &[u32], decode: usize) -> Result<(f64, f64), AppError> {
    engine.reset();
    let prefill = ids.len() - decode;
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let start = Instant::now();
    engine.run(Input { ids: &ids[..prefill], positions: [&positions[..prefill]; 3] }, &mut NoObserver)?;
    let prompt = prefill as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    for i in prefill..ids.len() {
        engine.run(Input { ids: &ids[i..=i], positions: [&positions[i..=i]; 3] }, &mut NoObserver)?;
    }
    Ok((prompt, decode as f64 / start.elapsed().as_secs_f64()))
}

/// Milliseconds that a crop of the model's own side takes at 16x and at 4x, in turn.
fn vision(model: &Model, args: &BenchArgs) -> Result<(), AppError> {
    let Some((v, i)) = &model.config.vision else {
        return Err(AppError::Input("this model has no vision tower to measure".into()));
    };
    let side = i.scale_resolution as usize / v.patch;
    let pixels = (side * v.patch).pow(2);
    // The mode with the larger crops, so that one plan serves both.
    let look = Look { detail: Detail::X4, max_slices: Some(1), pixels_max: pixels as u64, file_bytes_max: 0 };
    let mut setup = model.setup(&args.engine, Some(model.vision_options(&look)?));
    setup.options.slots_max = setup.options.slots_max.or(Some(0));
    let rgb: Vec<u8> = tokens(pixels * 3, 256).into_iter().map(|b| b as u8).collect();
    let crop = CropPixels { rows: side, cols: side, rgb: &rgb };
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            let mut ms = [Vec::new(), Vec::new()];
            // One more than asked for: the first brings weights and buffers into the caches.
            for round in 0..=args.rounds {
                for (ms, detail) in ms.iter_mut().zip([Detail::X16, Detail::X4]) {
                    engine.reset();
                    let start = Instant::now();
                    engine.see(crop, detail, &mut NoObserver)?;
                    if round > 0 {
                        ms.push(start.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
            let [x16, x4] = &ms;
            let ratio = median(x4) / median(x16);
            if args.json {
                say(format_args!(
                    "{}\n",
                    json!({
                        "crop": [side * v.patch, side * v.patch],
                        "x16_ms": median(x16),
                        "x4_ms": median(x4),
                        "x16_rounds": x16,
                        "x4_rounds": x4,
                        "ratio": ratio,
                        "kernels": facts.kernels,
                        "threads": facts.threads,
                        "peak_rss_bytes": forerun_linux::sys::peak_rss_bytes(),
                    })
                ))
            } else {
                say(format_args!(
                    "{}\na crop of {1} x {1} pixels\n16x: {2:.1} ms, rounds {x16:.1?}\n\
                     4x:  {3:.1} ms, rounds {x4:.1?}\n16x is {ratio:.2} times as fast\n",
                    headline(facts),
                    side * v.patch,
                    median(x16),
                    median(x4),
                ))
            }
        },
    )
}

/// Runs the command.
///
/// # Errors
/// If the model is not usable, it does not fit, or storage fails.
pub fn run(args: &BenchArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    if args.vision {
        return vision(&model, args);
    }
    let mut setup = model.setup(&args.engine, None);
    setup.options.context = (args.prefill + args.decode).max(1);
    if args.resident && setup.options.slots_max.is_none() {
        setup.options.slots_max = Some(usize::MAX);
    }
    let memory = memory_bytes_per_s(setup.threads, setup.options.cap_bytes)?;
    let ids = tokens(args.prefill + args.decode, model.config.text.vocab);
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
