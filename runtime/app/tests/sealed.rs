//! Allocation is sealed once an engine is made: a crop, a prefill chunk that saves the state, going back to it, a decode step
//! with its sampling and its words take nothing from the heap, counted by the allocator itself over all threads.
//!
//! Without the test harness, whose thread allocates when a test takes long.

mod common;

use common::{tests, tiny_dense, tiny_moe};
use forerun::cli::SampleArgs;
use forerun::constrain::{Constraint, Grammar, TokenIndex};
use forerun::model::{Model, Setup};
use forerun::reader::Reader;
use forerun::request::Request;
use forerun::session::{Fixed, Look, Session, user_message};
use forerun_engine::plan::{KvType, Options, Residency, VisionOptions};
use forerun_engine::ports::Workers;
use forerun_engine::sampler::{Sampler, Sampling};
use forerun_engine::slicing::Detail;
use forerun_engine::{Checksums, CropPixels, Input, NoObserver, Tuning};
use forerun_linux::{IoChoice, Pool};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use std::hint::black_box;
use std::path::Path;

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Calls to the allocator during `f`, in any thread.
fn calls<R>(f: impl FnOnce() -> R) -> (R, usize) {
    let region = Region::new(COUNTED);
    let result = f();
    let c = region.change();
    (result, c.allocations + c.reallocations)
}

#[track_caller]
fn sealed<R>(what: &str, setup: &Setup, f: impl FnOnce() -> R) -> R {
    let (result, calls) = calls(f);
    assert_eq!(calls, 0, "calls to the allocator in {what} with {setup:?}");
    result
}

fn main() {
    the_counter_counts();
    let mut settings = 0;
    for path in [tiny_moe(), tiny_dense()] {
        let model = Model::open(&path).expect("model");
        let look = Look { detail: Detail::X4, max_slices: Some(1), pixels_max: 1 << 20, file_bytes_max: 1 << 20 };
        let vision = model.vision_options(&look).expect("vision");
        let io = [IoChoice::Auto, IoChoice::Pread];
        for (kv, io) in [KvType::F16, KvType::F32].into_iter().flat_map(|kv| io.map(|io| (kv, io))) {
            // Few slots, so that experts are read, thrown out and waited for, and enough for all.
            for (predict, threads, slots) in [(true, 3, 24), (false, 1, 4), (true, 2, 256)] {
                let residency = if threads == 2 { Residency::Resident } else { Residency::Streamed };
                let options = Options {
                    context: 256,
                    chunk: 16,
                    kv,
                    vision: Some(VisionOptions { residency, ..vision }),
                    prefix: true,
                    cap_bytes: None,
                    slots_max: Some(slots),
                    tokenizer_bytes: 0,
                };
                let tuning = Tuning { predict, checksums: Checksums::Always, ..Tuning::default() };
                steps(&model, &Setup { options, threads, io, tuning });
                settings += 1;
            }
        }
    }
    assert_eq!(settings, 24);
    words(&tiny_moe());
    println!("sealed: nothing allocated with {settings} settings and in 6 answers");
}

/// A count of zero means something only if one is counted, in this thread and in others.
fn the_counter_counts() {
    assert_eq!(calls(|| ()).1, 0);
    assert_eq!(calls(|| drop(black_box(Box::new(1)))).1, 1);
    let pool = Pool::new(2, None).expect("threads");
    let work = |i: usize, out: &mut [f32]| {
        if i == 1 {
            out.copy_from_slice(&black_box(vec![1.0; out.len()]));
        }
    };
    assert_eq!(calls(|| pool.split(&mut [0.0; 8], 4, &work)).1, 1);
    assert!(calls(|| std::thread::spawn(|| drop(black_box(vec![1; 9]))).join()).1 > 1);
}

/// Crops in both modes, a prompt with their features in several chunks, an answer; twice, for what is only reset.
fn steps(model: &Model, setup: &Setup) {
    let c = &model.config;
    let (v, i) = c.vision.as_ref().expect("a vision tower");
    let side = i.scale_resolution as usize / v.patch;
    let rgb: Vec<u8> = (0..(side * v.patch).pow(2) * 3).map(|i| (i * 7) as u8).collect();
    let crop = CropPixels { rows: side, cols: side, rgb: &rgb };
    let word = |i: usize| (i as u32 * 37) % 200;
    let mut ids: Vec<u32> = (0..40).map(word).collect();
    let positions: Vec<u32> = (0..256).collect();
    let at = |from: usize, n: usize| [&positions[from..][..n]; 3];
    let settings = Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: 5 };
    let mut samplers = [
        Sampler::new(settings, c.text.vocab),
        Sampler::new(Sampling { top_k: 0, ..settings }, c.text.vocab),
        Sampler::new(Sampling { temperature: 0.0, ..settings }, c.text.vocab),
    ];
    let banned = [c.tokens.image, c.tokens.video];
    let run = model.with_engine(
        setup,
        |s| s,
        |engine, _| {
            for _ in 0..2 {
                sealed("reset", setup, || engine.reset());
                let seen: usize = [Detail::X16, Detail::X4]
                    .map(|detail| sealed("a crop", setup, || engine.see(crop, detail, &mut NoObserver)))
                    .into_iter()
                    .sum::<Result<_, _>>()?;
                ids.truncate(40);
                ids.extend(std::iter::repeat_n(c.tokens.image, seen));
                ids.extend((0..9).map(word));
                let n = ids.len();
                let input = Input { ids: &ids, positions: at(0, n) };
                sealed("prefill", setup, || engine.run_saving(input, Some(37), &mut NoObserver))?;
                for i in 0..12 {
                    let sampler = &mut samplers[i % 3];
                    let next = sealed("sampling", setup, || sampler.sample(engine.logits(), &banned));
                    let input = Input { ids: &[next], positions: at(n + i, 1) };
                    sealed("a decode step", setup, || engine.run(input, &mut NoObserver))?;
                }
                sealed("going back", setup, || engine.rewind());
                let input = Input { ids: &ids[37..], positions: at(37, n - 37) };
                sealed("prefill after going back", setup, || engine.run(input, &mut NoObserver))?;
            }
            let counters = engine.counters();
            if counters.hits + counters.misses > 0 {
                let slots = setup.options.slots_max.unwrap_or_default();
                assert!(counters.misses > 0 && (slots > 4) == (counters.hits > 0), "{setup:?}: {counters:?}");
                assert!(!setup.tuning.predict || slots > 24 || counters.predicted > 0, "{setup:?}: {counters:?}");
            }
            Ok(())
        },
    );
    run.unwrap_or_else(|e| panic!("{setup:?}: {e}"));
}

/// From the first word of an answer to its last, the conversation around the engine takes nothing either.
fn words(path: &Path) {
    let model = Model::open(path).expect("model");
    let look = Look { detail: Detail::X16, max_slices: None, pixels_max: 1 << 20, file_bytes_max: 1 << 20 };
    let options = Options {
        context: 512,
        chunk: 16,
        kv: KvType::F16,
        vision: Some(model.vision_options(&look).expect("vision")),
        prefix: true,
        cap_bytes: None,
        slots_max: Some(64),
        tokenizer_bytes: 0,
    };
    let setup = Setup { options, threads: 2, io: IoChoice::Auto, tuning: Tuning::default() };
    let mut session = Session::new(&model, look, None);
    session.messages.push(user_message(1, "What is in the picture?"));
    session.fixed = Fixed::Messages;
    session.pictures.push(tests("demo/scene_083.png").into());
    let schema = serde_json::json!({"type": "object", "properties": {
        "observations": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 8},
        "more": {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "object"}, {"type": "array"}, {"type": "null"}]},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["observations", "confidence"]});
    let (schema, any) = (Grammar::from_schema(&schema).expect("a schema"), Grammar::any_object());
    let index = TokenIndex::new(&model.tokenizer);
    let tools = [serde_json::json!({"type": "function", "function": {"name": "look"}})];
    let stop = ["never said".to_owned()];
    for (think, temperature, grammar) in [
        (false, 0.0, None),
        (true, 0.0, None),
        (false, 1.0, None),
        (false, 0.0, Some(&schema)),
        (true, 1.0, Some(&schema)),
        (false, 1.0, Some(&any)),
    ] {
        let args =
            SampleArgs { max_tokens: 160, temperature: Some(temperature), top_p: None, top_k: None, seed: 1, think };
        let constraint = grammar.map(|grammar| Constraint { grammar, tokens: &index });
        let request = Request { constraint, tools: &tools, stop: &stop, ..Request::from(&args) };
        let mut region = None;
        let (mut pieces, mut calls) = (0, 0);
        let mut emit = |_: forerun::session::Piece<'_>| {
            let c = region.get_or_insert_with(|| Region::new(COUNTED)).change();
            (pieces, calls) = (pieces + 1, c.allocations + c.reallocations);
            Ok(())
        };
        let answer = model.with_engine(
            &setup,
            |s| s,
            |e, _| session.answer(&mut Reader::new(e), request, &mut NoObserver, &mut emit),
        );
        let answer = answer.expect("an answer");
        assert!(pieces > 3, "{answer:?}");
        assert_eq!(calls, 0, "calls to the allocator between the first word and the last of {answer:?}");
    }
}
