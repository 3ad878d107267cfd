//! llama.cpp's side: loads a plain file as llama.cpp does by default (mapped, weights repacked where its CPU code wants
//! that) and runs tokens.

use crate::{Error, LlamaArgs, tokens};
use llama_cpp_2::{
    context::{LlamaContext, params::LlamaContextParams},
    llama_backend::LlamaBackend,
    llama_batch::LlamaBatch,
    model::{LlamaModel, params::LlamaModelParams},
    token::LlamaToken,
};
use serde_json::json;
use std::{num::NonZeroU32, path::Path, time::Instant};

/// Loads `plain` and calls `f` with a context for `tokens` tokens and the size of the vocabulary.
pub fn with<R>(
    plain: &Path,
    tokens: usize,
    threads: usize,
    f: impl FnOnce(&mut LlamaContext<'_>, usize) -> Result<R, Error>,
) -> Result<R, Error> {
    let backend = LlamaBackend::init()?;
    let model = LlamaModel::load_from_file(&backend, plain, &LlamaModelParams::default())?;
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(tokens as u32))
        .with_n_batch(tokens as u32)
        .with_n_threads(threads as i32)
        .with_n_threads_batch(threads as i32);
    let mut context = model.new_context(&backend, params)?;
    let vocab = model.n_vocab() as usize;
    f(&mut context, vocab)
}

/// Runs `ids` as tokens `first..`, and returns the logits of all of them or of the last one.
pub fn step(context: &mut LlamaContext<'_>, ids: &[u32], first: usize, all: bool) -> Result<Vec<Vec<f32>>, Error> {
    let mut batch = LlamaBatch::new(ids.len(), 1);
    for (i, id) in ids.iter().enumerate() {
        batch.add(LlamaToken(*id as i32), (first + i) as i32, &[0], all || i + 1 == ids.len())?;
    }
    context.decode(&mut batch)?;
    let from = if all { 0 } else { ids.len() - 1 };
    Ok((from..ids.len()).map(|i| context.get_logits_ith(i as i32).to_vec()).collect())
}

/// Measures as `forerun bench` does and prints the same fields.
pub fn measure(args: &LlamaArgs) -> Result<(), Error> {
    let w = &args.work;
    let n = w.prefill + w.decode;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    with(&args.plain, n, w.threads, |context, vocab| {
        let ids = tokens(n, vocab);
        for _ in 0..w.rounds {
            context.clear_kv_cache();
            let start = Instant::now();
            step(context, &ids[..w.prefill], 0, false)?;
            prefill.push(w.prefill as f64 / start.elapsed().as_secs_f64());
            let start = Instant::now();
            for i in w.prefill..n {
                step(context, &ids[i..=i], i, false)?;
            }
            decode.push(w.decode as f64 / start.elapsed().as_secs_f64());
        }
        Ok(())
    })?;
    println!("{}", json!({ "prefill_rounds": prefill, "decode_rounds": decode }));
    Ok(())
}
