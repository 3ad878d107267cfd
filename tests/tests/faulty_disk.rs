//! The engine on a simulated device, for thousands of seeds: fast, slow and stalling ones, completions in any order, errors,
//! flipped bits. A token is right or there is an error that names what failed, never a wrong word and never a wait without
//! end; after any error the engine works again.

use forerun_engine::ports::{ReadError, Storage};
use forerun_engine::{Checksums, Counters, Engine, EngineError, Input, NoObserver, Observer, Tuning, sampler::argmax};
use forerun_format::BlockType;
use forerun_quant::{Shape, Synth, Types};
use forerun_tests::disk::{Books, Disk, EIO, Latency, World};
use forerun_tests::{Model, Setup};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

const PROMPT: [u32; 7] = [5, 300, 41, 7, 900, 12, 77];
const ANSWER: usize = 4;
const CONTEXT: usize = 16;
/// Calls of the device that an answer takes at most: some 20 for each of its experts.
const CALLS_MAX: u64 = 20_000;

/// Counts the experts that each layer asks for in a step.
#[derive(Default)]
struct Asked {
    /// Layer at hand, its experts so far, and the number of those before.
    layer: usize,
    experts: BTreeSet<u16>,
    before: u64,
}

impl Asked {
    fn total(&self) -> u64 {
        self.before + self.experts.len() as u64
    }
}

impl Observer for Asked {
    fn router_input(&mut self, layer: usize, _: usize, _: &[f32]) {
        self.before = self.total();
        self.experts.clear();
        self.layer = layer;
    }

    fn routed(&mut self, layer: usize, _: usize, experts: &[u16], _: &[f32]) {
        assert_eq!(layer, self.layer);
        self.experts.extend(experts);
    }
}

/// A greedy answer.
#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    /// Bits of the last logits.
    logits: Vec<u32>,
}

fn answer<S: Storage>(e: &mut Engine<'_, S>, observer: &mut dyn Observer) -> Result<Answer, EngineError> {
    e.reset();
    let positions: Vec<u32> = (0..CONTEXT as u32).collect();
    let at = |from: usize, n: usize| [&positions[from..][..n]; 3];
    e.run(Input { ids: &PROMPT, positions: at(0, PROMPT.len()) }, observer)?;
    let mut tokens = vec![argmax(e.logits())];
    while tokens.len() < ANSWER {
        let n = e.len();
        e.run(Input { ids: &tokens[tokens.len() - 1..], positions: at(n, 1) }, observer)?;
        tokens.push(argmax(e.logits()));
    }
    Ok(Answer { tokens, logits: e.logits().iter().map(|x| x.to_bits()).collect() })
}

/// What went wrong in all runs, and what was right.
#[derive(Debug, Default, PartialEq)]
struct Outcomes {
    right: u64,
    failed: u64,
    late: u64,
    named: u64,
    rows: u64,
    /// Of all seeds.
    books: Vec<Books>,
    counters: Vec<Counters>,
    ends_us: Vec<u64>,
}

impl Outcomes {
    /// An answer is right, or something did go wrong that its error names.
    fn judge(&mut self, seed: u64, result: &Result<Answer, EngineError>, want: &Answer, books: &Books) {
        match result {
            Ok(found) => {
                assert!(found == want, "seed {seed}: {:?}, expected {:?}", found.tokens, want.tokens);
                self.right += 1;
            }
            Err(EngineError::Checksum { found, expected, .. }) => {
                assert!(found != expected && books.flips > 0, "seed {seed}");
                self.named += 1;
            }
            Err(EngineError::Expert { error: ReadError::TimedOut, .. }) => {
                assert!(books.timeouts > 0, "seed {seed}");
                self.late += 1;
            }
            Err(EngineError::Expert { error: ReadError::Os(EIO), .. }) => {
                assert!(books.errors > 0, "seed {seed}");
                self.failed += 1;
            }
            Err(EngineError::Embedding { error: ReadError::Os(EIO), .. }) => {
                assert!(books.errors > 0, "seed {seed}");
                self.rows += 1;
            }
            Err(e) => panic!("seed {seed}: {e}"),
        }
    }
}

/// The counters tell what the device did and what the routers asked for. No prediction is held after a reset.
fn check_counters(seed: u64, c: &Counters, b: &Books, asked: u64, stride: u64) {
    assert_eq!(c.predicted, c.predicted_used + c.predicted_wasted, "seed {seed}: {c:?}");
    assert_eq!(c.hits + c.misses + c.predicted_late, asked, "seed {seed}: {c:?}");
    assert_eq!(c.bytes_predicted, c.predicted * stride, "seed {seed}: {c:?}");
    // What was wrong is read once more, which nobody asked for.
    let again = b.bytes - c.bytes_demand - c.bytes_predicted;
    assert!(again <= b.flips * stride, "seed {seed}: {c:?} {b:?}");
    assert!(c.predicted_late <= c.predicted_used && c.bytes_landed <= b.bytes_landed, "seed {seed}: {c:?} {b:?}");
    assert!(c.stall_max_us <= c.stall_us, "seed {seed}: {c:?}");
}

/// A device for `seed`.
fn disk(seed: u64) -> Disk {
    let pick = |of: &[u64], step: u64| of[(seed / step % of.len() as u64) as usize];
    let us = pick(&[0, 5, 60, 800], 3);
    let healthy = seed.is_multiple_of(4);
    Disk {
        depth: 1 + (seed * 7 % 16) as usize,
        latency: if seed.is_multiple_of(3) { Latency::HeavyTailed(us / 4) } else { Latency::Even(us) },
        bytes_per_us: pick(&[0, 40, 400, 3000], 5),
        // Longer than any read takes on a device that does not stall.
        patience_us: pick(&[300_000, 1_000_000], 7),
        job_ns: pick(&[0, 300, 4000, 30_000], 2),
        calls_max: CALLS_MAX,
        errors: if healthy { 0 } else { pick(&[0, 1, 4], 11) },
        flips: if healthy { 0 } else { pick(&[0, 5, 40, 150], 13) },
        stalls: if healthy { 0 } else { pick(&[0, 0, 1, 5], 17) },
    }
}

/// Answers on the device of `seed`, while it goes wrong and after that.
fn simulate(model: &Model, seed: u64, want: &Answer, o: &mut Outcomes) {
    let slots = [4, 5, 4 + seed as usize % 40, 4 + seed as usize * 31 % 253];
    let setup = Setup {
        context: CONTEXT,
        chunk: [1, 3, 7][seed as usize % 3],
        slots: Some(slots[seed as usize / 3 % slots.len()]),
        disk: disk(seed),
        seed,
        tuning: Tuning { predict: !seed.is_multiple_of(5), checksums: Checksums::Always, ..Tuning::default() },
        ..Setup::default()
    };
    let stride = model.weights.banks[0].stride as u64;
    let mut asked = Asked::default();
    model.simulate(&setup, |e, world| {
        let mut run = |e: &mut Engine<'_, _>, world: &World| {
            world.begin();
            let result = answer(e, &mut asked);
            o.judge(seed, &result, want, &world.books());
            result.is_ok()
        };
        // A program begins with one of these; only a stall ends them.
        let begun = match seed % 6 {
            0 => e.probe(),
            1 => e.preload(),
            _ => Ok(()),
        };
        assert!(begun.is_ok() || world.books().timeouts > 0, "seed {seed}: {begun:?}");
        let begun = world.books().bytes;
        let right = run(e, world);
        assert!(right || setup.disk.errors + setup.disk.flips + setup.disk.stalls > 0, "seed {seed}: no reason");
        if seed.is_multiple_of(7) {
            e.forget_experts();
        }
        run(e, world);
        world.heal();
        // What was in flight may still be late, for two patiences at most: one of the reset and one of the run.
        if !run(e, world) && !run(e, world) {
            assert!(run(e, world), "seed {seed}: the device is good again");
        }
        e.reset();
        let books = Books { bytes: world.books().bytes - begun, ..world.books() };
        check_counters(seed, &e.counters(), &books, asked.total(), stride);
        o.books.push(world.books());
        o.counters.push(e.counters());
        o.ends_us.push(forerun_engine::ports::Clock::now_us(world));
    });
}

fn good_answer(model: &Model) -> Answer {
    model.with(&Setup { context: CONTEXT, ..Setup::default() }, |e| answer(e, &mut NoObserver).expect("a good disk"))
}

/// Of a tiny shape: 16 experts, of which a token uses 4.
fn synthetic(layers: u64) -> Model {
    // Tests run side by side.
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let to = std::env::temp_dir().join(format!("forerun-simulated-{}-{number}", std::process::id()));
    let model = Synth { shape: Shape::Tiny, layers: Some(layers), no_vision: true, plain: false, seed: 9 };
    let types = Types { experts: BlockType::Q4K, resident: BlockType::Q8_0, vision: None };
    forerun_quant::synth(model, &to, types, true, &mut |_, _| {}).expect("a model");
    let model = Model::from_bytes(std::fs::read(&to).expect("the model"));
    std::fs::remove_file(&to).expect("the model");
    model
}

fn simulate_all(model: &Model, seeds: std::ops::Range<u64>) -> Outcomes {
    let want = good_answer(model);
    let mut o = Outcomes::default();
    seeds.for_each(|seed| simulate(model, seed, &want, &mut o));
    o
}

/// Everything that can happen happened.
fn check_coverage(o: &Outcomes) {
    let sum = |f: fn(&Counters) -> u64| o.counters.iter().map(f).sum::<u64>();
    let did = |f: fn(&Books) -> u64| o.books.iter().map(f).sum::<u64>();
    let counts = [
        ("right", o.right),
        ("read errors", o.failed),
        ("row errors", o.rows),
        ("checksums", o.named),
        ("timeouts", o.late),
        ("timeouts of resets", did(|b| b.timeouts) - o.late),
        ("overtaken", did(|b| b.overtaken)),
        ("early", did(|b| b.early)),
        ("flips", did(|b| b.flips)),
        ("hits", sum(|c| c.hits)),
        ("misses", sum(|c| c.misses)),
        ("used", sum(|c| c.predicted_used)),
        ("late", sum(|c| c.predicted_late)),
        ("wasted", sum(|c| c.predicted_wasted)),
        ("cancelled", sum(|c| c.predicted_cancelled)),
        ("stalled", sum(|c| c.stall_us)),
    ];
    println!("{counts:?}");
    assert!(counts.iter().all(|(_, n)| *n > 0), "{counts:?}");
}

#[test]
fn a_bad_disk_never_gives_a_wrong_word() {
    let model = Model::bundled("tiny-moe");
    check_coverage(&simulate_all(&model, 0..1000));
}

#[test]
fn nor_with_quantized_weights() {
    check_coverage(&simulate_all(&synthetic(4), 0..2000));
}

/// After the last layer of a token comes the first of the next, which here is the same one.
#[test]
fn nor_with_a_single_layer() {
    check_coverage(&simulate_all(&synthetic(1), 0..2000));
}

/// A failing seed fails again.
#[test]
fn a_seed_is_a_whole_story() {
    let model = synthetic(4);
    for seed in 0..40 {
        assert_eq!(simulate_all(&model, seed..seed + 1), simulate_all(&model, seed..seed + 1), "seed {seed}");
    }
}

/// The comparison that is made once lets a later flip through: what `Always` is for.
#[test]
fn a_flip_after_the_first_read_is_found_by_always_only() {
    let model = Model::bundled("tiny-moe");
    let answers = |checksums, flips| {
        let tuning = Tuning { predict: false, checksums, ..Tuning::default() };
        let disk = Disk { flips, ..Disk::default() };
        let setup = Setup { context: CONTEXT, chunk: 8, slots: Some(4), seed: 3, disk, tuning, ..Setup::default() };
        model.with(&setup, |e| (0..20).map(|_| answer(e, &mut NoObserver)).collect::<Vec<_>>())
    };
    let want = answers(Checksums::First, 0).remove(0).expect("a good disk");
    let wrong = |runs: &[Result<Answer, EngineError>]| runs.iter().flatten().filter(|a| **a != want).count();
    assert_eq!(wrong(&answers(Checksums::Always, 20)), 0);
    assert!(wrong(&answers(Checksums::First, 20)) > 0);
}
