//! A made-up checkpoint of tiny, odd shapes: 2 key and 6 value heads, so that the order of value heads and its inverse
//! differ. Weights depend on the seed and the tensor's name only, whichever way the experts are stored.
#![allow(dead_code)] // each test binary uses its part

use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

pub const HIDDEN: usize = 32;
pub const LAYERS: usize = 4;
pub const EXPERTS: usize = 4;
pub const EXPERT_FFN: usize = 32;
pub const KEY_HEADS: usize = 2;
pub const VALUE_HEADS: usize = 6;
pub const HEAD: usize = 8;
pub const VOCAB: usize = 40;
pub const VISION: usize = 32;
const VISION_FFN: usize = 48;

/// A folder that is removed when dropped.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forerun-quant-test-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn names(&self) -> Vec<String> {
        let mut v: Vec<_> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        v.sort();
        v
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// How a checkpoint lies on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    PerExpert,
    Fused,
    /// Fused, in three files with an index.
    Sharded,
}

/// A tensor's shape and its values, which bf16 holds exactly.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// A whole checkpoint in memory; tests change it before it is saved.
pub struct Model {
    pub config: Value,
    pub tokenizer: Value,
    pub tensors: BTreeMap<String, Tensor>,
    pub dtypes: BTreeMap<String, &'static str>,
}

impl Model {
    pub fn new(seed: u64, moe: bool) -> Self {
        let tensors = shapes(moe)
            .into_iter()
            .map(|(name, shape)| {
                let hash = name.bytes().fold(seed, |h, b| h.wrapping_mul(0x100_0000_01B3) ^ u64::from(b));
                let mut rng = Rng(hash);
                // Sixteenths from -8 to 8: exact in bf16 and f16.
                let values = (0..shape.iter().product()).map(|_| rng.below(257) as f32 / 16.0 - 8.0).collect();
                (name, (shape, values))
            })
            .collect();
        Self { config: config(moe), tokenizer: tokenizer(), tensors, dtypes: BTreeMap::new() }
    }

    pub fn values(&self, name: &str) -> &[f32] {
        &self.tensors.get(name).unwrap_or_else(|| panic!("{name}")).1
    }

    /// Writes the checkpoint as files in `dir`.
    pub fn save(&self, dir: &Path, form: Form) {
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        fs::write(dir.join("tokenizer.json"), self.tokenizer.to_string()).unwrap();
        fs::write(dir.join("tokenizer_config.json"), r#"{"eos_token": "<|im_end|>", "pad_token": null}"#).unwrap();
        fs::write(dir.join("chat_template.jinja"), "{{ messages }}").unwrap();
        fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": [7, 8]}"#).unwrap();
        let tensors = if form == Form::PerExpert { self.tensors.clone() } else { fuse(&self.tensors) };
        if form != Form::Sharded {
            let all: Vec<_> = tensors.iter().collect();
            return self.write(&dir.join("model.safetensors"), &all);
        }
        let mut map = Map::new();
        for k in 0..3 {
            let file = format!("model-0000{}-of-00003.safetensors", k + 1);
            let part: Vec<_> = tensors.iter().enumerate().filter(|(i, _)| i % 3 == k).map(|(_, t)| t).collect();
            map.extend(part.iter().map(|(name, _)| ((*name).clone(), json!(file))));
            self.write(&dir.join(file), &part);
        }
        fs::write(dir.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    }

    fn write(&self, path: &Path, tensors: &[(&String, &Tensor)]) {
        let mut header = Map::new();
        let mut data = Vec::new();
        for (name, (shape, values)) in tensors {
            let dtype = self.dtypes.get(*name).copied().unwrap_or("BF16");
            let begin = data.len();
            for x in values {
                match dtype {
                    "BF16" => data.extend_from_slice(&((x.to_bits() >> 16) as u16).to_le_bytes()),
                    "F16" => data.extend_from_slice(&half::f16::from_f32(*x).to_le_bytes()),
                    _ => data.extend_from_slice(&x.to_le_bytes()),
                }
            }
            header.insert(
                (*name).clone(),
                json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] }),
            );
        }
        write_safetensors(path, &Value::Object(header).to_string(), &data);
    }
}

pub fn write_safetensors(path: &Path, header: &str, data: &[u8]) {
    let mut f = File::create(path).unwrap();
    f.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    f.write_all(header.as_bytes()).unwrap();
    f.write_all(data).unwrap();
}

/// One tensor per expert to the fused form: gate rows then up rows for each expert.
fn fuse(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let mut out: BTreeMap<String, Tensor> =
        tensors.iter().filter(|(n, _)| !n.contains(".experts.")).map(|(n, t)| (n.clone(), t.clone())).collect();
    for layer in 0..LAYERS {
        let p = format!("model.language_model.layers.{layer}.mlp.experts.");
        if !tensors.contains_key(&format!("{p}0.up_proj.weight")) {
            continue;
        }
        let join = |parts: &[&str]| -> Vec<f32> {
            let names = (0..EXPERTS).flat_map(|e| parts.iter().map(move |n| (e, n)));
            names.flat_map(|(e, n)| tensors[&format!("{p}{e}.{n}.weight")].1.clone()).collect()
        };
        let gate_up = join(&["gate_proj", "up_proj"]);
        out.insert(format!("{p}gate_up_proj"), (vec![EXPERTS, 2 * EXPERT_FFN, HIDDEN], gate_up));
        out.insert(format!("{p}down_proj"), (vec![EXPERTS, HIDDEN, EXPERT_FFN], join(&["down_proj"])));
    }
    out
}

fn shapes(moe: bool) -> Vec<(String, Vec<usize>)> {
    let mut v: Vec<(String, Vec<usize>)> = Vec::new();
    let mut add = |name: String, shape: &[usize]| v.push((name, shape.to_vec()));
    let h = HIDDEN;
    let l = "model.language_model.";
    add("lm_head.weight".into(), &[VOCAB, h]);
    add(format!("{l}embed_tokens.weight"), &[VOCAB, h]);
    add(format!("{l}norm.weight"), &[h]);
    for i in 0..LAYERS {
        let p = format!("{l}layers.{i}.");
        add(format!("{p}input_layernorm.weight"), &[h]);
        add(format!("{p}post_attention_layernorm.weight"), &[h]);
        if i == 3 {
            for (name, rows, cols) in [("q", 64, h), ("k", 16, h), ("v", 16, h), ("o", h, 32)] {
                add(format!("{p}self_attn.{name}_proj.weight"), &[rows, cols]);
            }
            add(format!("{p}self_attn.q_norm.weight"), &[16]);
            add(format!("{p}self_attn.k_norm.weight"), &[16]);
        } else {
            let (keys, values) = (2 * KEY_HEADS * HEAD, VALUE_HEADS * HEAD);
            let p = format!("{p}linear_attn.");
            add(format!("{p}in_proj_qkv.weight"), &[keys + values, h]);
            add(format!("{p}in_proj_z.weight"), &[values, h]);
            add(format!("{p}in_proj_a.weight"), &[VALUE_HEADS, h]);
            add(format!("{p}in_proj_b.weight"), &[VALUE_HEADS, h]);
            add(format!("{p}conv1d.weight"), &[keys + values, 1, 4]);
            add(format!("{p}A_log"), &[VALUE_HEADS]);
            add(format!("{p}dt_bias"), &[VALUE_HEADS]);
            add(format!("{p}norm.weight"), &[HEAD]);
            add(format!("{p}out_proj.weight"), &[h, values]);
        }
        let mut mlp = |part: &str, ffn: usize| {
            add(format!("{p}mlp.{part}gate_proj.weight"), &[ffn, h]);
            add(format!("{p}mlp.{part}up_proj.weight"), &[ffn, h]);
            add(format!("{p}mlp.{part}down_proj.weight"), &[h, ffn]);
        };
        if moe {
            mlp("shared_expert.", 64);
            for e in 0..EXPERTS {
                mlp(&format!("experts.{e}."), EXPERT_FFN);
            }
            add(format!("{p}mlp.gate.weight"), &[EXPERTS, h]);
            add(format!("{p}mlp.shared_expert_gate.weight"), &[1, h]);
        } else {
            mlp("", 64);
        }
    }
    let (d, f) = (VISION, VISION_FFN);
    let t = "model.vision_tower.";
    let mut both = |name: String, shape: &[usize]| {
        add(format!("{name}.weight"), shape);
        add(format!("{name}.bias"), &shape[..1]);
    };
    both(format!("{t}embeddings.patch_embedding"), &[d, 3, 2, 2]);
    for p in [format!("{t}encoder.layers.0."), format!("{t}encoder.layers.1."), format!("{t}vit_merger.")] {
        both(format!("{p}layer_norm1"), &[d]);
        for name in ["q", "k", "v", "out"] {
            both(format!("{p}self_attn.{name}_proj"), &[d, d]);
        }
        if p.contains("merger") {
            both(format!("{p}pre_norm"), &[4 * d]);
            both(format!("{p}linear_1"), &[4 * f, 4 * d]);
            both(format!("{p}linear_2"), &[d, 4 * f]);
        } else {
            both(format!("{p}layer_norm2"), &[d]);
            both(format!("{p}mlp.fc1"), &[f, d]);
            both(format!("{p}mlp.fc2"), &[d, f]);
        }
    }
    both(format!("{t}post_layernorm"), &[d]);
    both("model.merger.mlp.0.pre_norm".into(), &[4 * d]);
    both("model.merger.mlp.0.linear_1".into(), &[4 * d, 4 * d]);
    both("model.merger.mlp.0.linear_2".into(), &[h, 4 * d]);
    add(format!("{t}embeddings.position_embedding.weight"), &[16, d]);
    v
}

fn config(moe: bool) -> Value {
    let mut text = json!({
        "model_type": if moe { "qwen3_5_moe_text" } else { "qwen3_5_text" },
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "full_attention_interval": 4,
        "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "rope_parameters": { "rope_theta": 1e4, "mrope_section": [1, 1, 0] },
        "eos_token_id": 8,
    });
    if moe {
        text["num_experts"] = json!(EXPERTS);
        text["num_experts_per_tok"] = json!(2);
        text["moe_intermediate_size"] = json!(EXPERT_FFN);
        text["shared_expert_intermediate_size"] = json!(64);
    } else {
        text["intermediate_size"] = json!(64);
    }
    json!({
        "model_type": "minicpmv4_7", "text_config": text, "insert_layer_id": 0,
        "vision_config": {
            "hidden_size": VISION, "intermediate_size": VISION_FFN, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 2,
        },
    })
}

fn tokenizer() -> Value {
    let special =
        ["<|endoftext|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>"];
    let mut added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(i, t)| json!({ "id": 7 + i, "content": t, "special": true, "lstrip": false }))
        .collect();
    added.push(json!({ "id": 20, "content": "<think>", "special": false }));
    json!({
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "behavior": "Isolated", "invert": false, "pattern": { "Regex":
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+" } },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false } ] },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2, "Ċ": 3, "Ġ": 4, "Ġa": 5 },
            "merges": ["a b", ["Ġ", "a"]] },
    })
}
