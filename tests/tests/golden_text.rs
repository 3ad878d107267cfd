//! The text model against transformers: hidden states, router choices, logits, greedy answers.

use forerun_engine::plan::KvType;
use forerun_engine::{Input, NoObserver, sampler::argmax};
use forerun_kernels::KernelSet;
use forerun_tests::golden::{Goldens, json, relative};
use forerun_tests::record::{HIDDEN_TOLERANCE, Record};
use forerun_tests::{Model, Setup, variants};

fn check(model_name: &str, kv: KvType) {
    let model = Model::bundled(model_name);
    for kernels in variants() {
        check_variant(&model, model_name, kernels, kv);
    }
}

fn check_variant(model: &Model, model_name: &str, kernels: &'static KernelSet, kv: KvType) {
    for case in json(&format!("{model_name}/text")).as_array().unwrap() {
        let file = case["name"].as_str().unwrap();
        if !forerun_tests::path(format!("goldens/{model_name}/{file}.safetensors")).exists() {
            continue;
        }
        let g = Goldens::open(&format!("{model_name}/{file}"));
        let name = format!("{model_name} {file} {}", kernels.name);
        let ids: Vec<u32> = g.i32("input_ids").iter().map(|&i| i as u32).collect();
        let positions: Vec<u32> = (0..ids.len() as u32 + 64).collect();
        let p = |from: usize, n: usize| [&positions[from..][..n]; 3];
        let greedy: Vec<u64> = case["greedy_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
        let record = model.with(&Setup { chunk: 7, kv, kernels, ..Setup::default() }, |e| {
            let mut record = Record::default();
            e.run(Input { ids: &ids, positions: p(0, ids.len()) }, &mut record).unwrap();
            for (i, &want) in greedy.iter().enumerate() {
                let next = argmax(e.logits());
                assert_eq!(u64::from(next), want, "{name}: token {i} of the answer");
                e.run(Input { ids: &[next], positions: p(ids.len() + i, 1) }, &mut NoObserver).unwrap();
            }
            record
        });
        record.check(&name, &g, kv);
        if kv == KvType::F16 {
            continue;
        }
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
    }
}

#[test]
fn tiny_moe_matches_transformers() {
    check("tiny-moe", KvType::F32);
}

#[test]
fn tiny_dense_matches_transformers() {
    check("tiny-dense", KvType::F32);
}

#[test]
fn an_f16_kv_cache_keeps_the_answers() {
    check("tiny-moe", KvType::F16);
    check("tiny-dense", KvType::F16);
}
