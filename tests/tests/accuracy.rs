//! What packing costs: answers about 100 held-out pictures and perplexity of 30 texts, for every type, against the
//! reference's. Everything runs as in the program: files on disk, decoder, crops, chat template, engine, greedy choice.

use forerun::{
    cli::SampleArgs,
    model::{Model, Setup},
    reader::Reader,
    session::{Look, Session, user_message},
};
use forerun_engine::{
    Input, NoObserver, Observer, Tuning,
    plan::{KvType, Options, Residency, VisionOptions},
    slicing::Detail,
};
use forerun_format::BlockType;
use forerun_linux::IoChoice;
use forerun_tests::{
    checkpoint::{Experts, Packed, all},
    golden::json,
    path,
    record::log_sum_exp,
};
use serde_json::Value;
use std::fs;
use std::thread;

/// What answers of a type must reach.
struct Target {
    block: BlockType,
    kv: KvType,
    /// Points by which the share of correct answers may differ from the reference's, either way: the project's promise.
    points_max: usize,
    /// Answers of 100 that must be the reference's own, right or wrong: two wrongs cannot cancel here. The reference
    /// answered in padded batches, so one may differ for bf16; 100 were equal when this was set. For the others, worst
    /// measured: 98 (q8_0), 91 (q4_0).
    same_min: usize,
}

const fn target(block: BlockType, kv: KvType, points_max: usize, same_min: usize) -> Target {
    Target { block, kv, points_max, same_min }
}

/// With the program's own KV cache type; bf16 also with the exact one.
const TARGETS: [Target; 4] = [
    target(BlockType::BF16, KvType::F32, 1, 99),
    target(BlockType::BF16, KvType::F16, 1, 99),
    target(BlockType::Q8_0, KvType::F16, 2, 95),
    target(BlockType::Q4_0, KvType::F16, 4, 85),
];

/// Shares by which perplexity, and the negative log-likelihood of any one line, may differ.
struct Bound {
    block: BlockType,
    kv: KvType,
    perplexity: f64,
    line: f64,
}

const fn bound(block: BlockType, kv: KvType, perplexity: f64, line: f64) -> Bound {
    Bound { block, kv, perplexity, line }
}

/// The checkpoints are bf16, so f32 and bf16 hold them exactly: what is left is the order of f32 sums, a line's at most
/// 1.1e-6 when measured. A KV cache in f16 leaves 5.7e-5, with weights in f16 too. Both keep a tenth of the promise, 0.1 %.
/// Worst measured for q8_0: 0.05 % (a line 0.9 %); for q4_0: 0.66 % (a line 8.5 %). Bounds are five times that, a line's
/// twice: less would fail by chance of rounding, and one wrong kernel costs far more.
const BOUNDS: [Bound; 6] = [
    bound(BlockType::F32, KvType::F32, 1e-4, 1e-5),
    bound(BlockType::BF16, KvType::F32, 1e-4, 1e-5),
    bound(BlockType::BF16, KvType::F16, 1e-4, 5e-4),
    bound(BlockType::F16, KvType::F16, 1e-4, 5e-4),
    bound(BlockType::Q8_0, KvType::F16, 0.0025, 0.02),
    bound(BlockType::Q4_0, KvType::F16, 0.033, 0.17),
];

fn packed(name: &str, block: BlockType) -> (Packed, Model) {
    let packed = Packed::new(name, Experts::Single, all(block));
    let model = Model::open(&packed.path()).unwrap();
    (packed, model)
}

fn setup(kv: KvType, vision: Option<VisionOptions>) -> Setup {
    let options = Options {
        context: 1024,
        chunk: 128,
        kv,
        vision,
        prefix: false,
        cap_bytes: None,
        slots_max: None,
        tokenizer_bytes: 0,
    };
    // The threads are spent on pictures, an engine each.
    Setup { options, threads: 1, io: IoChoice::Auto, tuning: Tuning::default() }
}

/// Answers to the questions of `cases`, in their order.
fn answers(model: &Model, cases: &[Value], detail: Detail, kv: KvType) -> Vec<String> {
    let look = Look { detail, max_slices: None, pixels_max: 1 << 20, file_bytes_max: 1 << 20 };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let sample = SampleArgs { max_tokens: 24, temperature: Some(0.0), top_p: None, top_k: None, seed: 0, think: false };
    let work = |first: usize| -> Vec<(usize, String)> {
        let setup = setup(kv, Some(VisionOptions { detail, picture_bytes: 0, residency: Residency::Auto }));
        let mine = (first..cases.len()).step_by(threads);
        let ask = |i: usize| {
            let mut session = Session::new(model, look, None);
            session.messages.push(user_message(1, cases[i]["question"].as_str().unwrap()));
            session.pictures.push(path("goldens").join(cases[i]["file"].as_str().unwrap()).into());
            session
        };
        let told = model.with_engine(
            &setup,
            |storage| storage,
            |engine, _| {
                let mut reader = Reader::new(engine);
                mine.map(|i| Ok((i, ask(i).answer(&mut reader, &sample, &mut NoObserver, &mut |_| Ok(()))?.text)))
                    .collect()
            },
        );
        told.unwrap()
    };
    let mut out = vec![String::new(); cases.len()];
    thread::scope(|s| {
        let work = &work;
        let running: Vec<_> = (0..threads).map(|t| s.spawn(move || work(t))).collect();
        for (i, text) in running.into_iter().flat_map(|t| t.join().unwrap()) {
            out[i] = text;
        }
    });
    out
}

/// Sums the negative log-likelihood of a text as its logits come.
struct Nll<'a> {
    ids: &'a [u32],
    sum: f64,
}

impl Observer for Nll<'_> {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, token: usize, logits: &[f32]) {
        if let Some(&next) = self.ids.get(token + 1) {
            self.sum += log_sum_exp(logits) - f64::from(logits[next as usize]);
        }
    }
}

/// For each line: scored tokens, negative log-likelihood.
fn likelihoods(model: &Model, kv: KvType) -> Vec<(usize, f64)> {
    let text = fs::read_to_string(path("goldens/text/stories.txt")).unwrap();
    let scored = model.with_engine(
        &setup(kv, None),
        |storage| storage,
        |engine, _| {
            let score = |line: &str| {
                let ids = model.tokenizer.encode(&format!("{line}<|endoftext|>")).unwrap();
                let at: Vec<u32> = (0..ids.len() as u32).collect();
                let mut nll = Nll { ids: &ids, sum: 0.0 };
                engine.reset();
                engine.run(Input { ids: &ids, positions: [&at; 3] }, &mut nll)?;
                Ok((ids.len() - 1, nll.sum))
            };
            text.lines().map(score).collect()
        },
    );
    scored.unwrap()
}

fn check_answers(name: &str) {
    let lines = fs::read_to_string(path(format!("goldens/eval/eval_{name}.jsonl"))).unwrap();
    let cases: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(cases.len(), 100, "counts are points");
    let accuracy = json(&format!("eval/accuracy_{name}"));
    let mut misses = Vec::new();
    let mut table = format!("{name}\ntype   kv   mode  correct  reference  same as reference\n");
    for t in &TARGETS {
        let (_file, model) = packed(name, t.block);
        for detail in [Detail::X16, Detail::X4] {
            let mode = detail.name();
            let given = answers(&model, &cases, detail, t.kv);
            let count = |key: &str| given.iter().zip(&cases).filter(|(a, c)| c[key] == a.as_str()).count();
            let (correct, same) = (count("answer"), count(&format!("ref_{mode}")));
            let reference = (accuracy[mode]["total"].as_f64().unwrap() * 100.0).round() as usize;
            let row = format!("{:<5} {:?}  {mode:<4}  {correct:>7}  {reference:>9}  {same:>17}", t.block.name(), t.kv);
            table += &format!("{row}\n");
            if correct.abs_diff(reference) > t.points_max || same < t.same_min {
                misses.push(format!("{row}: expected within {} points, {} the same", t.points_max, t.same_min));
            }
        }
    }
    println!("{table}");
    assert!(misses.is_empty(), "{name}:\n{}", misses.join("\n"));
}

fn check_perplexity(name: &str) {
    let golden = json(&format!("text/perplexity_{name}"));
    let lines = golden["lines"].as_array().unwrap();
    let reference = golden["perplexity"].as_f64().unwrap();
    let mut misses = Vec::new();
    let mut table = format!("{name}\ntype   kv   perplexity  reference  difference  worst line\n");
    for b in &BOUNDS {
        let (_file, model) = packed(name, b.block);
        let scored = likelihoods(&model, b.kv);
        assert_eq!(scored.len(), lines.len());
        let mut worst = 0f64;
        for (want, (tokens, sum)) in lines.iter().zip(&scored) {
            assert_eq!(want["tokens"].as_u64().unwrap() as usize, tokens + 1, "the first token is not scored");
            worst = worst.max((sum / want["nll_sum"].as_f64().unwrap() - 1.0).abs());
        }
        let tokens: usize = scored.iter().map(|s| s.0).sum();
        let perplexity = (scored.iter().map(|s| s.1).sum::<f64>() / tokens as f64).exp();
        let difference = perplexity / reference - 1.0;
        let row = format!(
            "{:<5} {:?}  {perplexity:>10.5}  {reference:>9.5}  {:>+9.4}%  {worst:>10.1e}",
            b.block.name(),
            b.kv,
            difference * 100.0
        );
        table += &format!("{row}\n");
        if !(difference.abs() < b.perplexity && worst < b.line) {
            misses.push(format!("{row}: expected within {:.2}%, {:.1e}", b.perplexity * 100.0, b.line));
        }
    }
    println!("{table}");
    assert!(misses.is_empty(), "{name}:\n{}", misses.join("\n"));
}

#[test]
fn tiny_moe_answers_as_well_as_the_reference() {
    check_answers("tiny-moe");
}

#[test]
fn tiny_dense_answers_as_well_as_the_reference() {
    check_answers("tiny-dense");
}

#[test]
fn tiny_moe_finds_text_as_likely_as_the_reference() {
    check_perplexity("tiny-moe");
}

#[test]
fn tiny_dense_finds_text_as_likely_as_the_reference() {
    check_perplexity("tiny-dense");
}
