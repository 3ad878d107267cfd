//! A disk that fails, flips bits and answers in any order, for a thousand seeds: a token is right or there is an error that
//! names the expert, never a wrong word and never a wait without end.

use forerun_engine::{Checksums, EngineError, Input, NoObserver, Tuning, sampler::argmax};
use forerun_tests::{Faults, Model, Setup};

const PROMPT: [u32; 7] = [5, 300, 41, 7, 900, 12, 77];
const ANSWER: usize = 4;
const SEEDS: u64 = 1000;

/// Tokens of a greedy answer.
fn answer<S: forerun_engine::ports::Storage>(e: &mut forerun_engine::Engine<'_, S>) -> Result<Vec<usize>, EngineError> {
    e.reset();
    let positions: Vec<u32> = (0..64).collect();
    let at = |from: usize, n: usize| [&positions[from..][..n]; 3];
    e.run(Input { ids: &PROMPT, positions: at(0, PROMPT.len()) }, &mut NoObserver)?;
    let mut tokens = vec![argmax(e.logits()) as usize];
    while tokens.len() < ANSWER {
        let n = e.len();
        e.run(Input { ids: &[tokens[tokens.len() - 1] as u32], positions: at(n, 1) }, &mut NoObserver)?;
        tokens.push(argmax(e.logits()) as usize);
    }
    Ok(tokens)
}

#[test]
fn a_bad_disk_never_gives_a_wrong_word() {
    let model = Model::bundled("tiny-moe");
    let want = model.with(&Setup { context: 64, ..Setup::default() }, |e| answer(e).expect("a good disk"));
    let (mut right, mut failed, mut named) = (0, 0, 0);
    for seed in 0..SEEDS {
        let setup = Setup {
            context: 64,
            chunk: 1 + seed as usize % 8,
            slots: Some(4 + seed as usize % 40),
            depth: 1 + seed as usize % 9,
            seed,
            faults: Faults { errors: seed % 3, flips: seed % 50 },
            tuning: Tuning { predict: seed % 2 == 0, checksums: Checksums::Always, ..Tuning::default() },
            ..Setup::default()
        };
        model.with(&setup, |e| {
            // An error ends an answer; the engine is as good as new after it.
            for _ in 0..3 {
                match answer(e) {
                    Ok(tokens) => {
                        assert_eq!(tokens, want, "seed {seed}");
                        right += 1;
                    }
                    Err(EngineError::Checksum { found, expected, .. }) => {
                        assert_ne!(found, expected, "seed {seed}");
                        named += 1;
                    }
                    Err(EngineError::Expert { .. }) => failed += 1,
                    Err(e) => panic!("seed {seed}: {e}"),
                }
            }
        });
    }
    assert!(right > SEEDS && failed > 0 && named > 0, "{right} right, {failed} failed reads, {named} wrong checksums");
}

/// The comparison that is made once lets a later flip through: what `Always` is for.
#[test]
fn a_flip_after_the_first_read_is_found_by_always_only() {
    let model = Model::bundled("tiny-moe");
    let logits = |checksums, flips| {
        let tuning = Tuning { predict: false, checksums, ..Tuning::default() };
        let faults = Faults { errors: 0, flips };
        let setup = Setup { context: 64, chunk: 8, slots: Some(4), seed: 3, faults, tuning, ..Setup::default() };
        model.with(&setup, |e| (0..20).map(|_| answer(e).map(|_| e.logits().to_vec())).collect::<Vec<_>>())
    };
    let want = logits(Checksums::First, 0)[0].clone().expect("a good disk");
    let wrong = |runs: &[Result<Vec<f32>, EngineError>]| runs.iter().flatten().filter(|l| **l != want).count();
    assert_eq!(wrong(&logits(Checksums::Always, 20)), 0);
    assert!(wrong(&logits(Checksums::First, 20)) > 0);
}
