//! A tower that is streamed through a few slots gives the bits of one that is in memory, whatever the order in which its
//! reads land; on a bad disk it gives them or an error that names the tensor.

use forerun_engine::plan::Residency;
use forerun_engine::ports::Storage;
use forerun_engine::slicing::Detail;
use forerun_engine::{Checksums, CropPixels, Engine, EngineError, Input, NoObserver, Tuning};
use forerun_tests::disk::Disk;
use forerun_tests::{Model, Setup, variants};

/// Patches of a crop, high and wide.
const CROPS: [(usize, usize); 3] = [(8, 8), (4, 8), (4, 4)];

/// Features of one crop, whose pixels `seed` decides.
fn see<S: Storage>(e: &mut Engine<'_, S>, model: &Model, i: usize, detail: Detail) -> Result<Vec<f32>, EngineError> {
    let (rows, cols) = CROPS[i];
    let side = model.config.vision.as_ref().expect("a tower").0.patch;
    let rgb: Vec<u8> = (0..rows * cols * side * side * 3).map(|p| (p * 31 + p / 97 * (i + 3)) as u8).collect();
    e.reset();
    e.see(CropPixels { rows, cols, rgb: &rgb }, detail, &mut NoObserver)?;
    Ok(e.visual_features().to_vec())
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn streamed_is_resident_to_the_bit() {
    for name in ["tiny-moe", "tiny-dense"] {
        let model = Model::bundled(name);
        for detail in [Detail::X16, Detail::X4] {
            for kernels in variants() {
                let all = |setup: &Setup<'_>| {
                    model.with(setup, |e| {
                        (0..CROPS.len())
                            .map(|i| {
                                let seen = bits(&see(e, &model, i, detail).expect("a good disk"));
                                // Reads ahead of the last layer may be under way after a token.
                                let at = [e.len() as u32];
                                e.run(Input { ids: &[7], positions: [&at; 3] }, &mut NoObserver).expect("a token");
                                (seen, bits(e.logits()))
                            })
                            .collect::<Vec<_>>()
                    })
                };
                let setup = |residency, depth, seed| Setup {
                    detail: Some(detail),
                    residency,
                    disk: Disk { depth, ..Disk::default() },
                    seed,
                    slots: Some(24),
                    kernels,
                    ..Setup::default()
                };
                let want = all(&setup(Residency::Resident, 16, 1));
                for (depth, seed) in [(1, 1), (3, 2), (16, 3), (16, 4)] {
                    let found = all(&setup(Residency::Streamed, depth, seed));
                    assert!(found == want, "{name} {} {} depth {depth}", detail.name(), kernels.name);
                }
            }
        }
    }
}

#[test]
fn a_bad_disk_gives_the_same_bits_or_names_the_tensor() {
    let model = Model::bundled("tiny-moe");
    let detail = Detail::X16;
    let setup = |residency, seed, disk: Disk, checksums| Setup {
        detail: Some(detail),
        residency,
        seed,
        slots: Some(8),
        disk: Disk { depth: 1 + seed as usize % 12, ..disk },
        tuning: Tuning { checksums, ..Tuning::default() },
        ..Setup::default()
    };
    let good = setup(Residency::Resident, 1, Disk::default(), Checksums::First);
    let want = model.with(&good, |e| bits(&see(e, &model, 2, detail).expect("a good disk")));
    let (mut right, mut failed, mut damaged, mut flipped) = (0, 0, 0, 0);
    for seed in 0..60 {
        let disk = Disk { errors: seed % 3 * 2, flips: seed % 7, ..Disk::default() };
        model.with(&setup(Residency::Streamed, seed, disk, Checksums::Always), |e| {
            // The engine is as good as new after an error.
            for _ in 0..4 {
                match see(e, &model, 2, detail) {
                    Ok(found) => {
                        assert!(bits(&found) == want, "seed {seed}");
                        right += 1;
                    }
                    Err(e @ EngineError::VisionRead { .. }) => {
                        let text = e.to_string();
                        assert!(text.starts_with("tensor v.") || text.starts_with("tensor mm."), "{text}");
                        assert!(text.contains("I/O error 5"), "{text}");
                        failed += 1;
                    }
                    Err(e @ EngineError::VisionChecksum { found, expected, .. }) => {
                        assert_ne!(found, expected, "seed {seed}: {e}");
                        damaged += 1;
                    }
                    Err(e) => panic!("seed {seed}: {e}"),
                }
            }
        });
        // Unless they are not compared.
        let never = setup(Residency::Streamed, seed, Disk { errors: 0, ..disk }, Checksums::Never);
        flipped += usize::from(model.with(&never, |e| bits(&see(e, &model, 2, detail).expect("no error")) != want));
    }
    println!("{right} right, {failed} failed reads, {damaged} wrong checksums, {flipped} wrong and not compared");
    assert!(right > 60 && failed > 0 && damaged > 0 && flipped > 0);
}
