//! A made-up model runs: whatever its element types, numbers stay finite, routing spreads, and a batch changes no bit.

use forerun_engine::{Input, Observer};
use forerun_format::BlockType;
use forerun_quant::{Shape, Synth, Types};
use forerun_tests::{Model, Setup, variants};

/// Of a tiny shape: 4 layers of 16 experts, of which a token uses 4.
const EXPERTS: usize = 16;
const TOKENS: u32 = 64;

#[derive(Default)]
struct Record {
    used: [usize; EXPERTS],
    logits: Vec<Vec<f32>>,
}

impl Observer for Record {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn routed(&mut self, _layer: usize, _token: usize, experts: &[u16], _weights: &[f32]) {
        experts.iter().for_each(|&e| self.used[usize::from(e)] += 1);
    }

    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.logits.push(logits.to_vec());
    }
}

fn check(name: &str, record: &Record) {
    assert_eq!(record.logits.len(), TOKENS as usize);
    for (t, logits) in record.logits.iter().enumerate() {
        let deviation = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        // Of products of a normed vector with rows of length 1.
        assert!((0.5..2.0).contains(&deviation), "{name}: token {t}: deviation {deviation}");
    }
    // 64 tokens x 4 layers x 4 of 16 experts: each is used 64 times on average; none may be left out or rule.
    let (least, most) = (record.used.iter().min().unwrap(), record.used.iter().max().unwrap());
    assert!(*least >= 16 && *most <= 160, "{name}: {:?}", record.used);
}

#[test]
fn tokens_run_through_every_element_type_under_every_variant() {
    let dir = std::env::temp_dir().join(format!("forerun-synthetic-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for (experts, resident) in [(BlockType::Q4K, BlockType::Q8_0), (BlockType::Iq4Xs, BlockType::Q6K)] {
        let model = Synth { shape: Shape::Tiny, layers: None, no_vision: false, plain: false, seed: 5 };
        let to = dir.join("m.gguf");
        let types = Types { experts, resident, vision: Some(BlockType::BF16) };
        forerun_quant::synth(model, &to, types, true, &mut |_, _| {}).unwrap();
        let model = Model::from_bytes(std::fs::read(&to).unwrap());
        let ids: Vec<u32> = (0..TOKENS).map(|i| (i * 389 + 5) % 1024).collect();
        let at: Vec<u32> = (0..TOKENS).collect();
        for kernels in variants() {
            let run = |chunk| {
                let mut record = Record::default();
                let setup = Setup { chunk, kernels, ..Setup::default() };
                model.with(&setup, |e| e.run(Input { ids: &ids, positions: [&at; 3] }, &mut record)).unwrap();
                record
            };
            let (whole, parts) = (run(TOKENS as usize), run(5));
            check(kernels.name, &whole);
            // The bundled models have no quantized weights; of those, too, a batch gives the bits of any other.
            assert!(whole.logits == parts.logits, "{}: logits depend on the chunk", kernels.name);
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
