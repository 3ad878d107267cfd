//! The text model against transformers: hidden states, router choices, logits, greedy answers.

use forerun_engine::plan::KvType;
use forerun_engine::{Input, Observer, sampler::argmax};
use forerun_tests::golden::{Goldens, json, max_abs, max_diff, relative};
use forerun_tests::{Model, Setup};

/// Share of the largest logit by which any logit may differ: f32 sums of a few hundred terms in another order through
/// eight layers leave about 1e-5; 1e-3 is what the project promises.
const LOGIT_TOLERANCE: f32 = 1e-3;

/// Relative error of a layer's hidden states, for the same reason.
const HIDDEN_TOLERANCE: f32 = 1e-3;

#[derive(Default)]
struct Record {
    hidden: Vec<Vec<f32>>,
    router_in: Vec<Vec<f32>>,
    routed: Vec<Vec<(Vec<u16>, Vec<f32>)>>,
    logits: Vec<Vec<f32>>,
}

fn at<T: Default>(v: &mut Vec<T>, i: usize) -> &mut T {
    if v.len() <= i {
        v.resize_with(i + 1, T::default);
    }
    &mut v[i]
}

impl Observer for Record {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn hidden(&mut self, layer: usize, _first: usize, x: &[f32]) {
        at(&mut self.hidden, layer).extend_from_slice(x);
    }

    fn router_input(&mut self, layer: usize, _first: usize, x: &[f32]) {
        at(&mut self.router_in, layer).extend_from_slice(x);
    }

    fn routed(&mut self, layer: usize, _token: usize, experts: &[u16], weights: &[f32]) {
        at(&mut self.routed, layer).push((experts.to_vec(), weights.to_vec()));
    }

    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.logits.push(logits.to_vec());
    }
}

fn check_logits(name: &str, g: &Goldens, logits: &[Vec<f32>]) {
    let last = g.f32("logits_last");
    let vocab = last.len() / 4;
    let mut worst = 0f32;
    for (want, got) in last.chunks(vocab).zip(&logits[logits.len() - 4..]) {
        worst = worst.max(max_diff(got, want) / max_abs(want));
        assert_eq!(argmax(got), argmax(want), "{name}: argmax");
    }
    let (top, idx, sums) = (g.f32("top10_val"), g.i32("top10_idx"), g.f32("logsumexp"));
    assert_eq!(sums.len(), logits.len());
    for (t, got) in logits.iter().enumerate() {
        let size = top[t * 10].abs();
        for i in 0..10 {
            worst = worst.max((got[idx[t * 10 + i] as usize] - top[t * 10 + i]).abs() / size);
        }
        assert_eq!(argmax(got), idx[t * 10] as u32, "{name}: argmax of token {t}");
        let sum = got.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln() as f32;
        assert!((sum - sums[t]).abs() < 1e-3, "{name}: logsumexp of token {t}: {sum}, expected {}", sums[t]);
    }
    println!("{name}: logits within {worst:.1e} of the largest");
    assert!(worst < LOGIT_TOLERANCE, "{name}: logits differ by {worst} of the largest");
}

fn check(model_name: &str) {
    let model = Model::bundled(model_name);
    for case in json(&format!("{model_name}/text")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        if !forerun_tests::path(format!("goldens/{model_name}/{name}.safetensors")).exists() {
            continue;
        }
        let g = Goldens::open(&format!("{model_name}/{name}"));
        let ids: Vec<u32> = g.i32("input_ids").iter().map(|&i| i as u32).collect();
        let positions: Vec<u32> = (0..ids.len() as u32 + 64).collect();
        let p = |from: usize, n: usize| [&positions[from..][..n]; 3];
        let greedy: Vec<u64> = case["greedy_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
        let record = model.with(&Setup { chunk: 7, kv: KvType::F32, ..Setup::default() }, |e| {
            let mut record = Record::default();
            e.run(Input { ids: &ids, positions: p(0, ids.len()) }, &mut record).unwrap();
            for (i, &want) in greedy.iter().enumerate() {
                let next = argmax(e.logits());
                assert_eq!(u64::from(next), want, "{name}: token {i} of the answer");
                e.run(Input { ids: &[next], positions: p(ids.len() + i, 1) }, &mut forerun_engine::NoObserver).unwrap();
            }
            record
        });
        check_logits(name, &g, &record.logits);
        if g.has("hidden_layers") {
            let want = g.f32("hidden_layers");
            let layer = want.len() / (record.hidden.len() - 1);
            assert!(relative(&record.hidden[0], &g.f32("hidden_embed")) == 0.0, "embedding rows are exact");
            for (l, want) in want.chunks(layer).enumerate() {
                let error = relative(&record.hidden[l + 1], want);
                assert!(error < HIDDEN_TOLERANCE, "{name}: layer {l} differs by {error}");
            }
        }
        if g.has("router_in") {
            let want = g.f32("router_in");
            for (l, want) in want.chunks(want.len() / record.router_in.len()).enumerate() {
                assert!(relative(&record.router_in[l], want) < HIDDEN_TOLERANCE, "{name}: router input of layer {l}");
            }
        }
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
fn tiny_moe_matches_transformers() {
    check("tiny-moe");
}

#[test]
fn tiny_dense_matches_transformers() {
    check("tiny-dense");
}
