//! The vision tower and picture prompts against transformers.

use forerun_engine::plan::KvType;
use forerun_engine::slicing::Detail;
use forerun_engine::{CropPixels, Input, NoObserver, VisionObserver, sampler::argmax};
use forerun_kernels::KernelSet;
use forerun_tests::golden::{Goldens, json, relative};
use forerun_tests::record::{HIDDEN_TOLERANCE, Record};
use forerun_tests::{Model, Setup, variants};
use std::collections::HashMap;

#[derive(Default)]
struct Stages(HashMap<&'static str, Vec<f32>>);

impl VisionObserver for Stages {
    fn stage(&mut self, name: &'static str, x: &[f32]) {
        self.0.entry(name).or_default().extend_from_slice(x);
    }
}

/// `(3, 14, 14 · patches)` u8 to one `(rows · 14, cols · 14, 3)` picture a crop.
fn crops(pixels: &[u8], sizes: &[i32]) -> Vec<(usize, usize, Vec<u8>)> {
    let total: usize = sizes.chunks(2).map(|s| (s[0] * s[1]) as usize).sum();
    assert_eq!(pixels.len(), 3 * 14 * 14 * total);
    let mut first = 0;
    sizes
        .chunks(2)
        .map(|s| {
            let (rows, cols) = (s[0] as usize, s[1] as usize);
            let mut rgb = vec![0; rows * cols * 14 * 14 * 3];
            for y in 0..rows * 14 {
                for x in 0..cols * 14 {
                    let patch = first + y / 14 * cols + x / 14;
                    for c in 0..3 {
                        rgb[(y * cols * 14 + x) * 3 + c] = pixels[(c * 14 + y % 14) * 14 * total + patch * 14 + x % 14];
                    }
                }
            }
            first += rows * cols;
            (rows, cols, rgb)
        })
        .collect()
}

fn check(model_name: &str, kv: KvType) {
    let model = Model::bundled(model_name);
    for kernels in variants() {
        check_variant(&model, model_name, kernels, kv);
    }
}

fn check_variant(model: &Model, model_name: &str, kernels: &'static KernelSet, kv: KvType) {
    for case in json(&format!("{model_name}/image")).as_array().unwrap() {
        let file = case["name"].as_str().unwrap();
        let detail = Detail::parse(case["downsample_mode"].as_str().unwrap()).unwrap();
        let g = Goldens::open(&format!("{model_name}/{file}"));
        // The dense model saw the same pixels; they are kept once.
        let p = Goldens::open(&format!("tiny-moe/{file}"));
        let name = format!("{model_name} {file} {}", kernels.name);
        let suffix = if case["is_video"].as_bool().unwrap() { "_videos" } else { "" };
        let crops = crops(&p.u8(&format!("pixel_values{suffix}")), &p.i32(&format!("target_sizes{suffix}")));
        let ids: Vec<u32> = g.i32("input_ids").iter().map(|&i| i as u32).collect();
        let n = ids.len();
        let positions: Vec<u32> = g.i32("position_ids").iter().map(|&i| i as u32).collect();
        let delta = g.i32("rope_delta")[0];
        let greedy: Vec<u64> = case["greedy_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
        let setup = Setup { chunk: 16, kv, kernels, detail: Some(detail), context: 1024, ..Setup::default() };
        let (stages, features, record) = model.with(&setup, |e| {
            let mut stages = Stages::default();
            for (rows, cols, rgb) in &crops {
                e.see(CropPixels { rows: *rows, cols: *cols, rgb }, detail, &mut stages).unwrap();
            }
            let features = e.visual_features().to_vec();
            let mut record = Record::default();
            let rows = [&positions[..n], &positions[n..2 * n], &positions[2 * n..]];
            e.run(Input { ids: &ids, positions: rows }, &mut record).unwrap();
            for (i, &want) in greedy.iter().enumerate() {
                let next = argmax(e.logits());
                assert_eq!(u64::from(next), want, "{name}: token {i} of the answer");
                let at = [(n as i32 + i as i32 + delta) as u32];
                e.run(Input { ids: &[next], positions: [&at; 3] }, &mut NoObserver).unwrap();
            }
            (stages, features, record)
        });
        for (stage, tensor) in [
            ("embed", "vis_embed"),
            ("layer0", "vis_layer0"),
            ("early_merger", "vis_early_merger"),
            ("post_layernorm", "vis_post_layernorm"),
        ] {
            if g.has(tensor) {
                let error = relative(&stages.0[stage], &g.f32(tensor));
                assert!(error < HIDDEN_TOLERANCE, "{name}: {stage} differs by {error}");
            }
        }
        let error = relative(&features, &g.f32("vis_final_merger"));
        assert!(error < HIDDEN_TOLERANCE, "{name}: features differ by {error}");

        println!("{name}: features within {error:.1e}");
        record.check(&name, &g, kv);
    }
}

#[test]
fn tiny_moe_sees_what_transformers_sees() {
    check("tiny-moe", KvType::F32);
}

#[test]
fn tiny_dense_sees_what_transformers_sees() {
    check("tiny-dense", KvType::F32);
}

#[test]
fn an_f16_kv_cache_keeps_the_answers() {
    check("tiny-moe", KvType::F16);
    check("tiny-dense", KvType::F16);
}
