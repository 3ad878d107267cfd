//! The logits of both programs for the same tokens. They quantize activations differently, so the numbers differ a
//! little, and more where two experts are almost equally likely and each program takes another. A wrong layout, scale or
//! head order makes all tokens unlike each other: hence the median is judged.

use crate::{Error, LogitsArgs, llama, median, tokens};
use forerun::model::{Model, Setup};
use forerun_engine::{
    Input, Observer, Tuning,
    plan::{KvType, Options},
    sampler::argmax,
};
use forerun_linux::IoChoice;

/// What a program answers.
struct Answer {
    /// Logits of each token of the prompt.
    logits: Vec<Vec<f32>>,
    /// Likeliest tokens after it.
    greedy: Vec<u32>,
}

#[derive(Default)]
struct AllLogits(Vec<Vec<f32>>);

impl Observer for AllLogits {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.0.push(logits.to_vec());
    }
}

fn forerun(args: &LogitsArgs) -> Result<Answer, Error> {
    let model = Model::open(&args.files.packed)?;
    let n = args.tokens + args.greedy;
    let options = Options {
        context: n,
        chunk: n,
        kv: KvType::F16,
        vision: None,
        prefix: false,
        cap_bytes: None,
        slots_max: None,
        tokenizer_bytes: 0,
    };
    let setup = Setup { options, threads: args.threads, io: IoChoice::Auto, tuning: Tuning::default() };
    let mut prompt = AllLogits::default();
    let mut greedy = Vec::new();
    model.with_engine(
        &setup,
        |storage| storage,
        |engine, _| {
            let ids = tokens(args.tokens, model.config.text.vocab);
            let at: Vec<u32> = (0..n as u32).collect();
            engine.run(Input { ids: &ids, positions: [&at[..ids.len()]; 3] }, &mut prompt)?;
            for i in ids.len()..n {
                let next = argmax(engine.logits());
                greedy.push(next);
                engine.run(Input { ids: &[next], positions: [&at[i..=i]; 3] }, &mut AllLogits::default())?;
            }
            Ok(())
        },
    )?;
    Ok(Answer { logits: prompt.0, greedy })
}

fn llama(args: &LogitsArgs) -> Result<Answer, Error> {
    let n = args.tokens + args.greedy;
    llama::with(&args.files.plain, n, args.threads, |context, vocab| {
        let ids = tokens(args.tokens, vocab);
        let logits = llama::step(context, &ids, 0, true)?;
        let mut last = logits[logits.len() - 1].clone();
        let mut greedy = Vec::new();
        for i in ids.len()..n {
            greedy.push(argmax(&last));
            last = llama::step(context, &greedy[greedy.len() - 1..], i, false)?.swap_remove(0);
        }
        Ok(Answer { logits, greedy })
    })
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Runs the command.
pub fn run(args: &LogitsArgs) -> Result<(), Error> {
    let (ours, theirs) = (forerun(args)?, llama(args)?);
    let mut cosines = Vec::new();
    for (t, (a, b)) in ours.logits.iter().zip(&theirs.logits).enumerate() {
        let (c, top) = (cosine(a, b), (argmax(a), argmax(b)));
        println!("token {t}: cosine {c:.6}, likeliest {} and {}", top.0, top.1);
        cosines.push(c);
    }
    let same = ours.greedy.iter().zip(&theirs.greedy).take_while(|(a, b)| a == b).count();
    println!("greedy: the first {same} of {} tokens are the same", args.greedy);
    println!("forerun   {:?}\nllama.cpp {:?}", ours.greedy, theirs.greedy);
    let middle = median(&cosines);
    println!("cosine: median {middle:.6}, least {:.6}", cosines.iter().copied().fold(f64::INFINITY, f64::min));
    // Not a number is a failure too.
    if cosines.len() == args.tokens && middle >= args.least {
        return Ok(());
    }
    Err(format!("median cosine {middle} of {} tokens, expected at least {}", cosines.len(), args.least).into())
}
