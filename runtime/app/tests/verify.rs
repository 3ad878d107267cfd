//! `forerun verify`, and what damage to the model file does to a run.

mod common;

use common::{Image, Outcome, Scratch, finish, forerun, run, tests, tiny_dense, tiny_moe};
use forerun_engine::{config::Config, weights::Weights};
use forerun_format::gguf::Header;
use forerun_kernels::KernelSet;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

/// A row of the table that `verify` prints.
struct Row {
    /// What the run was made with: slots, prediction, threads, I/O, chunk, checksums, storage, vision, state.
    settings: Vec<String>,
    slots: u64,
    misses: u64,
    predicted: u64,
    hash: String,
}

fn rows(table: &str) -> Vec<Row> {
    const SETTINGS: [&str; 9] =
        ["slots", "prediction", "threads", "io", "chunk", "checksums", "storage", "vision", "state"];
    let mut lines = table.lines();
    let names: Vec<_> = lines.next().expect("a header").split_whitespace().collect();
    let (settings, results) = names.split_at(SETTINGS.len());
    assert_eq!((settings, results), (&SETTINGS[..], &["hits", "misses", "predicted", "hash"][..]));
    let rows = lines.take_while(|l| l.starts_with(|c: char| c.is_ascii_digit())).map(|line| {
        let cells: Vec<_> = line.split_whitespace().collect();
        let number = |i: usize| cells[i].parse().unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(cells.len(), names.len(), "{line}");
        let predicted = number(11);
        assert!(predicted == 0 || cells[1] == "on", "predicted without prediction: {line}");
        let settings = cells[..SETTINGS.len()].iter().map(ToString::to_string).collect();
        Row { settings, slots: number(0), misses: number(10), predicted, hash: cells[12].into() }
    });
    rows.collect()
}

/// That each setting takes as many values as `sizes` says, and any two values of two settings meet in a row.
#[track_caller]
fn check_pairs(rows: &[Row], sizes: [usize; 9], table: &str) {
    let values = |i: usize| rows.iter().map(|r| &r.settings[i]).collect::<BTreeSet<_>>();
    for (i, size) in sizes.into_iter().enumerate() {
        assert_eq!(values(i).len(), size, "{table}");
        for j in 0..i {
            let met: BTreeSet<_> = rows.iter().map(|r| (&r.settings[i], &r.settings[j])).collect();
            assert_eq!(met.len(), size * sizes[j], "{table}");
        }
    }
}

/// Numbers of threads and of I/O engines that are tried on this machine.
fn machine() -> (usize, usize) {
    let cpus = std::thread::available_parallelism().map_or(1, Into::into);
    let ring = run("run --max-tokens 1 --io uring --prompt Hello", &[&"--model", &tiny_moe()]).code == Some(0);
    (cpus.clamp(2, 8), 1 + usize::from(ring))
}

/// `verify` with the kernels called `kernels`.
fn verify(kernels: &str, model: &Path, tokens: &str, more: &[&dyn AsRef<OsStr>]) -> Outcome {
    let mut c = forerun();
    c.env("FORERUN_KERNELS", kernels).args(["verify", "--tokens", tokens, "--model"]).arg(model);
    finish(c.args(more.iter().map(|a| a.as_ref())))
}

#[test]
fn one_hash_whatever_the_setting_under_every_variant() {
    let picture = tests("demo/scene_083.png");
    let with_picture: &[&dyn AsRef<OsStr>] = &[&"--image", &picture, &"--prompt", &"Is the door open?"];
    let (threads, engines) = machine();
    let mut seen = Vec::new();
    for set in KernelSet::available() {
        for more in [&[][..], with_picture] {
            let o = verify(set.name, &tiny_moe(), "8", more);
            let rows = rows(&o.success().stdout);
            check_pairs(&rows, [4, 2, threads, engines, 3, 3, 2, 1 + usize::from(!more.is_empty()), 2], &o.stdout);
            assert!(rows.iter().all(|r| r.hash == rows[0].hash && r.hash.len() == 16), "{}: {}", set.name, o.stdout);
            let end = format!("lossless: one hash {} over {} runs\n", rows[0].hash, rows.len());
            assert!(o.stdout.ends_with(&end), "{}", o.stdout);
            // The runs are different ones: with room for all experts few are read, at the floor many.
            let misses = |slots| {
                let of: Vec<_> = rows.iter().filter(|r| r.slots == slots).map(|r| r.misses).collect();
                of.iter().sum::<u64>() / of.len() as u64
            };
            assert!(misses(4) > 2 * misses(256), "{}", o.stdout);
            assert!(rows.iter().any(|r| r.predicted > 0), "no cell predicted: {}", o.stdout);
            seen.push(rows[0].hash.clone());
        }
    }
    let [plain, pictured] = [0, 1].map(|i| seen.iter().skip(i).step_by(2).collect::<Vec<_>>());
    assert!(plain.iter().all(|hash| !pictured.contains(hash)), "another prompt has another hash");
    // The others fuse products with sums, scalar does not: one hash for all would mean that they were not forced.
    let (scalar, others) = plain.split_last().expect("a variant");
    assert!(!others.contains(scalar), "{plain:?}");
}

#[test]
fn a_dense_model_is_verified_under_every_variant() {
    let (threads, engines) = machine();
    for set in KernelSet::available() {
        let o = verify(set.name, &tiny_dense(), "4", &[]);
        let rows = rows(&o.success().stdout);
        assert!(rows.iter().all(|r| r.hash == rows[0].hash && r.slots == 0), "{}: {}", set.name, o.stdout);
        check_pairs(&rows, [1, 1, threads, engines, 3, 1, 1, 1, 2], &o.stdout);
    }
}

#[test]
fn faults_on_purpose_are_noticed() {
    for fault in ["flip-byte", "arrival-order"] {
        let o = run("verify --tokens 8 --inject", &[&fault, &"--model", &tiny_moe()]);
        let rows = rows(&o.stdout);
        o.refused(5, &["NOT lossless", &format!("of {} runs differ from the first", rows.len())]);
        assert!(rows.iter().any(|r| r.hash != rows[0].hash), "{fault}: {}", o.stdout);
        assert!(!o.stdout.contains("lossless: one hash"), "{fault}: {}", o.stdout);
        run("verify --inject", &[&fault, &"--model", &tiny_dense()]).refused(3, &["no experts"]);
    }
}

/// A prompt of this many tokens uses nearly every expert, so that one of layer 3 is read for certain.
const PROMPT: &str =
    "Describe what you know about the sea, the sun, the moon, a river, a fox and seven plums in one sentence.";

#[test]
fn a_flipped_byte_in_an_expert_is_named() {
    let file = Image::tiny_moe();
    let header = Header::parse(&file.0, file.0.len() as u64).expect("header");
    let config = Config::read(&header).expect("configuration");
    let weights = Weights::read(&header, &config).expect("tensors");
    let (layer, experts) = (3, config.text.moe().expect("experts").experts);
    let bank = weights.banks[layer];
    let scratch = Scratch::new("flipped-expert");
    let mut named = 0;
    for expert in 0..experts {
        let offset = bank.offset + (expert * bank.stride) as u64;
        let mut bytes = file.0.clone();
        bytes[offset as usize + 100 + expert] ^= 0x10;
        let path = scratch.file("model.gguf", &bytes);
        let o = run("run --max-tokens 1", &[&"--model", &path, &"--prompt", &PROMPT]);
        if o.code == Some(0) {
            continue; // no token chose it
        }
        named += 1;
        let expected = weights.expert_crc[layer * experts + expert];
        let found = forerun_format::crc32c::crc32c(&bytes[offset as usize..][..bank.stride]);
        let place = format!("expert {expert} of layer {layer} at offset {offset}");
        let sums = format!("checksum {found:08x}, expected {expected:08x}");
        o.refused(3, &[&place, &sums, "re-copy the model file"]);
        assert_eq!(o.stdout, "", "no word of an answer");
        if named == 3 {
            return;
        }
    }
    panic!("only {named} experts of layer {layer} were used");
}

#[test]
fn a_flipped_byte_in_a_tensor_is_named() {
    let file = Image::tiny_moe();
    let header = Header::parse(&file.0, file.0.len() as u64).expect("header");
    let scratch = Scratch::new("flipped-tensor");
    let picture = tests("demo/scene_083.png");
    let vision = ["v.patch_embd.weight", "v.vit_merger.ds_ffn_up.weight", "v.blk.7.ffn_down.bias", "mm.down.bias"];
    for name in ["blk.0.attn_qkv.weight", "output_norm.weight", "output.weight"].into_iter().chain(vision) {
        let t = header.tensor(name).unwrap_or_else(|| panic!("no {name}"));
        let mut bytes = file.0.clone();
        bytes[(t.offset + t.bytes - 1) as usize] ^= 1;
        let path = scratch.file("model.gguf", &bytes);
        let words = [&format!("tensor {name}: checksum "), ", expected ", "re-copy the model file"];
        for residency in ["resident", "streamed"] {
            let ask = |more: &[&dyn AsRef<OsStr>]| {
                let common: [&dyn AsRef<OsStr>; 5] = [&"--model", &path, &"--prompt", &"Hello!", &"--vision-residency"];
                run("run --max-tokens 1", &[&common[..], &[&residency], more].concat())
            };
            let o = ask(&[&"--image", &picture]);
            o.refused(3, &words);
            assert_eq!(o.stdout, "", "no word of an answer");
            // Without a picture the tower is not read.
            let o = ask(&[]);
            if vision.contains(&name) { assert!(o.success().stdout.len() > 1) } else { _ = o.refused(3, &words) }
        }
    }
}

/// The padding after a tensor is no tensor's: a flipped byte there changes nothing, and nobody complains.
#[test]
fn a_flipped_byte_in_padding_does_no_harm() {
    let file = Image::tiny_moe();
    let header = Header::parse(&file.0, file.0.len() as u64).expect("header");
    let t = header.tensor("output_norm.weight").expect("tensor");
    assert_ne!(t.bytes % 4096, 0, "padded");
    let mut bytes = file.0.clone();
    bytes[(t.offset + t.bytes) as usize] ^= 1;
    let scratch = Scratch::new("flipped-padding");
    let path = scratch.file("model.gguf", &bytes);
    let o = run("run --temperature 0", &[&"--model", &path, &"--prompt", &"What is 3 plus 5?"]);
    assert_eq!(o.success().stdout, "3 plus 5 is 8.\n");
}
