//! The vision tower and picture prompts against transformers.

use forerun_engine::plan::KvType;
use forerun_engine::slicing::Detail;
use forerun_engine::{CropPixels, Input, Observer, VisionObserver, sampler::argmax};
use forerun_tests::golden::{Goldens, json, max_abs, max_diff, relative};
use forerun_tests::{Model, Setup};
use std::collections::HashMap;

/// Relative error of visual features with the checkpoint's weights held in f32.
const FEATURE_TOLERANCE: f32 = 1e-3;

/// Share of the largest logit: see `golden_text.rs`.
const LOGIT_TOLERANCE: f32 = 1e-3;

#[derive(Default)]
struct Stages(HashMap<&'static str, Vec<f32>>);

impl VisionObserver for Stages {
    fn stage(&mut self, name: &'static str, x: &[f32]) {
        self.0.entry(name).or_default().extend_from_slice(x);
    }
}

#[derive(Default)]
struct Record {
    routed: Vec<Vec<(Vec<u16>, Vec<f32>)>>,
    logits: Vec<Vec<f32>>,
}

impl Observer for Record {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: usize, _token: usize, experts: &[u16], weights: &[f32]) {
        if self.routed.len() <= layer {
            self.routed.resize_with(layer + 1, Vec::new);
        }
        self.routed[layer].push((experts.to_vec(), weights.to_vec()));
    }

    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.logits.push(logits.to_vec());
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

fn check(model_name: &str) {
    let model = Model::bundled(model_name);
    for case in json(&format!("{model_name}/image")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let detail = Detail::parse(case["downsample_mode"].as_str().unwrap()).unwrap();
        let g = Goldens::open(&format!("{model_name}/{name}"));
        // The dense model saw the same pixels; they are kept once.
        let p = Goldens::open(&format!("tiny-moe/{name}"));
        let suffix = if case["is_video"].as_bool().unwrap() { "_videos" } else { "" };
        let crops = crops(&p.u8(&format!("pixel_values{suffix}")), &p.i32(&format!("target_sizes{suffix}")));
        let ids: Vec<u32> = g.i32("input_ids").iter().map(|&i| i as u32).collect();
        let n = ids.len();
        let positions: Vec<u32> = g.i32("position_ids").iter().map(|&i| i as u32).collect();
        let delta = g.i32("rope_delta")[0];
        let greedy: Vec<u64> = case["greedy_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
        let setup = Setup { chunk: 16, kv: KvType::F32, detail: Some(detail), context: 1024, ..Setup::default() };
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
                e.run(Input { ids: &[next], positions: [&at; 3] }, &mut forerun_engine::NoObserver).unwrap();
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
                assert!(error < FEATURE_TOLERANCE, "{name}: {stage} differs by {error}");
            }
        }
        let error = relative(&features, &g.f32("vis_final_merger"));
        assert!(error < FEATURE_TOLERANCE, "{name}: features differ by {error}");

        let last = g.f32("logits_last");
        let vocab = last.len() / 4;
        let mut worst = 0f32;
        for (want, got) in last.chunks(vocab).zip(&record.logits[n - 4..]) {
            worst = worst.max(max_diff(got, want) / max_abs(want));
        }
        let (top, idx) = (g.f32("top10_val"), g.i32("top10_idx"));
        for (t, got) in record.logits.iter().enumerate() {
            assert_eq!(argmax(got), idx[t * 10] as u32, "{name}: argmax of token {t}");
            for i in t * 10..t * 10 + 10 {
                worst = worst.max((got[idx[i] as usize] - top[i]).abs() / top[t * 10].abs());
            }
        }
        println!("{model_name} {name}: features within {error:.1e}, logits within {worst:.1e} of the largest");
        assert!(worst < LOGIT_TOLERANCE, "{name}: logits differ by {worst} of the largest");
        if g.has("router_idx") {
            let (idx, weights) = (g.i32("router_idx"), g.f32("router_weight"));
            let k = record.routed[0][0].0.len();
            for (i, (experts, w)) in record.routed.iter().flatten().enumerate() {
                let want: Vec<u16> = idx[i * k..][..k].iter().map(|&e| e as u16).collect();
                assert_eq!(experts, &want, "{name}: choice {i}");
                assert!(max_diff(w, &weights[i * k..][..k]) < 1e-3, "{name}: weights of choice {i}");
            }
        }
    }
}

#[test]
fn tiny_moe_sees_what_transformers_sees() {
    check("tiny-moe");
}

#[test]
fn tiny_dense_sees_what_transformers_sees() {
    check("tiny-dense");
}
