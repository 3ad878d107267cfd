//! A state gone back to is the state that was saved: what follows has the bits of a fresh run, whatever the KV cache type,
//! the chunk and the place, on a bad disk too.

use forerun_engine::plan::KvType;
use forerun_engine::ports::Storage;
use forerun_engine::{Checksums, Engine, EngineError, Input, NoObserver, Observer, Tuning};
use forerun_tests::disk::Disk;
use forerun_tests::golden::Goldens;
use forerun_tests::{Model, Setup};

/// Logits of every token, as bits.
#[derive(Default)]
struct Logits(Vec<(usize, Vec<u32>)>);

impl Observer for Logits {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, token: usize, logits: &[f32]) {
        self.0.push((token, logits.iter().map(|x| x.to_bits()).collect()));
    }
}

/// Runs `ids` after what is there, saving after `save` of them.
fn run<S: Storage>(e: &mut Engine<'_, S>, ids: &[u32], save: Option<usize>) -> Logits {
    let mut logits = Logits::default();
    let at: Vec<u32> = (e.len() as u32..).take(ids.len()).collect();
    e.run_saving(Input { ids, positions: [&at; 3] }, save, &mut logits).expect("a good disk");
    logits
}

/// `n` tokens that look random.
fn tokens(n: usize, seed: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 389 + seed * 7919) % 1024).collect()
}

fn golden(model: &str, case: &str) -> Vec<u32> {
    Goldens::open(&format!("{model}/{case}")).i32("input_ids").iter().map(|&i| i as u32).collect()
}

#[test]
fn what_follows_a_saved_prefix_has_the_bits_of_a_fresh_run() {
    for name in ["tiny-moe", "tiny-dense"] {
        let model = Model::bundled(name);
        let first = golden(name, "text_02");
        let n = first.len();
        assert!(n > 20, "{n} tokens");
        for kv in [KvType::F16, KvType::F32] {
            let fresh = |ids: &[u32]| model.with(&Setup { kv, chunk: 16, ..Setup::default() }, |e| run(e, ids, None).0);
            let want = fresh(&first);
            for chunk in [1, 5, 8, 64] {
                for k in [0, 1, 4, 5, 8, 16, n - 1, n] {
                    let what = format!("{name}, {kv:?}, chunks of {chunk}, {k} of {n} tokens saved");
                    let second = [&first[..k], &tokens(13, k as u32)].concat();
                    let want_second = fresh(&second);
                    let setup = Setup { kv, chunk, prefix: true, slots: Some(24), ..Setup::default() };
                    model.with(&setup, |e| {
                        assert!(run(e, &first, Some(k)).0 == want, "{what}: saving changes the logits");
                        assert_eq!((e.len(), e.saved()), (n, Some(k)), "{what}");
                        e.rewind();
                        assert_eq!(e.len(), k, "{what}");
                        assert!(run(e, &second[k..], None).0 == want_second[k..], "{what}: another suffix");
                        // Again, after the other suffix has written where the first one was; and from a longer prefix.
                        e.rewind();
                        assert!(run(e, &first[k..], Some((n - k) / 2)).0 == want[k..], "{what}: the first suffix");
                        let m = k + (n - k) / 2;
                        e.rewind();
                        assert_eq!((e.len(), e.saved()), (m, Some(m)), "{what}");
                        assert!(run(e, &first[m..], None).0 == want[m..], "{what}: from {m}");
                        e.forget();
                        assert_eq!((e.len(), e.saved()), (0, None), "{what}");
                        assert!(run(e, &second, None).0 == want_second, "{what}: from nothing");
                    });
                }
            }
        }
    }
}

/// Without room for it, nothing is saved, and the way back is the way to nothing.
#[test]
fn without_room_nothing_is_saved() {
    let model = Model::bundled("tiny-moe");
    let ids = tokens(20, 1);
    model.with(&Setup::default(), |e| {
        let want = run(e, &ids, Some(7)).0;
        assert_eq!((e.can_save(), e.saved()), (false, None));
        e.rewind();
        assert!(e.is_empty());
        assert!(run(e, &ids, None).0 == want);
    });
}

/// What is refused leaves the state as it was.
#[test]
fn a_refusal_changes_nothing() {
    let model = Model::bundled("tiny-moe");
    let ids = tokens(20, 2);
    let want = model.with(&Setup::default(), |e| run(e, &ids, None).0);
    model.with(&Setup { prefix: true, context: 20, chunk: 4, ..Setup::default() }, |e| {
        run(e, &ids[..10], Some(6));
        let placeholder = model.config.tokens.image;
        for wrong in [&[1; 11][..], &[1, u32::MAX], &[1, placeholder]] {
            let at = vec![0; wrong.len()];
            let error = e.run_saving(Input { ids: wrong, positions: [&at; 3] }, Some(1), &mut NoObserver);
            assert!(error.is_err());
            assert_eq!((e.len(), e.saved()), (10, Some(6)), "{error:?}");
        }
        assert!(run(e, &ids[10..], None).0 == want[10..]);
        e.rewind();
        assert!(run(e, &ids[6..], None).0 == want[6..]);
    });
}

/// After a read that failed, the state is the saved one or empty, and going on from there is going on from the truth.
#[test]
fn a_bad_disk_leaves_a_state_that_is_whole() {
    let model = Model::bundled("tiny-moe");
    let prompts: Vec<_> = (0..3).map(|i| [tokens(12, 9), tokens(10, i)].concat()).collect();
    let last = |ids: &[u32]| model.with(&Setup::default(), |e| run(e, ids, None).0.pop());
    let want: Vec<_> = prompts.iter().map(|p| last(p)).collect();
    let (mut failed, mut to_saved, mut to_nothing) = (0, 0, 0);
    for seed in 0..200 {
        let setup = Setup {
            context: 64,
            chunk: 1 + seed as usize % 7,
            slots: Some(4 + seed as usize % 40),
            prefix: true,
            seed,
            disk: Disk { errors: 1 + seed % 3, flips: seed % 3, ..Disk::default() },
            tuning: Tuning { predict: seed % 2 == 0, checksums: Checksums::Always, ..Tuning::default() },
            ..Setup::default()
        };
        model.with(&setup, |e| {
            for (prompt, want) in prompts.iter().zip(&want) {
                e.rewind();
                while e.len() < prompt.len() {
                    let from = e.len();
                    let at: Vec<u32> = (from as u32..prompt.len() as u32).collect();
                    let save = (from < 12).then(|| 12 - from);
                    match e.run_saving(Input { ids: &prompt[from..], positions: [&at; 3] }, save, &mut NoObserver) {
                        Ok(()) => break,
                        Err(
                            EngineError::Expert { .. } | EngineError::Checksum { .. } | EngineError::Embedding { .. },
                        ) => {
                            assert_eq!(e.len(), e.saved().unwrap_or(0), "seed {seed}");
                            failed += 1;
                            to_saved += usize::from(e.len() == 12);
                            to_nothing += usize::from(e.is_empty());
                        }
                        Err(e) => panic!("seed {seed}: {e}"),
                    }
                }
                let logits: Vec<u32> = e.logits().iter().map(|x| x.to_bits()).collect();
                assert!(want.as_ref().is_some_and(|w| w.1 == logits), "seed {seed}");
            }
        });
    }
    println!("{failed} failures, {to_saved} to the saved state, {to_nothing} to nothing");
    assert!(to_saved > 50 && to_nothing > 50 && to_saved + to_nothing == failed);
}
