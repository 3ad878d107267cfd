//! Rebuilds the checkpoint that a bundled model was packed from, so that a clone can pack it again in any type.
//!
//! Relies on the side files in `tests/checkpoints` and on `docs/model-file.md`, whose transformations it inverts with its
//! own code; never calls the packer to do so.

use crate::path;
use forerun_format::{
    BlockType,
    gguf::{Header, Tensor},
    keys,
};
use forerun_quant::Types;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Files that lie beside the weights.
const SIDE_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
];

/// A folder below the system's temporary one, removed when dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    /// A new, empty folder.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("forerun-tests-{}-{n}", std::process::id()));
        fs::create_dir_all(&dir).expect("temporary folder");
        Self(dir)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Default for TempDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How the experts of a checkpoint are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Experts {
    /// `experts.N.{gate,up,down}_proj.weight`, what `save_pretrained` writes.
    Single,
    /// `experts.gate_up_proj` and `experts.down_proj` with all experts of a layer.
    Fused,
}

/// Bare `--type T`.
pub fn all(block: BlockType) -> Types {
    Types { experts: block, resident: block, vision: None }
}

/// A model file packed from the checkpoint of a bundled model.
pub struct Packed {
    dir: TempDir,
}

impl Packed {
    /// Rebuilds the checkpoint of `tests/models/NAME.gguf` and packs it.
    pub fn new(name: &str, experts: Experts, types: Types) -> Self {
        let checkpoint = write(name, experts);
        let packed = Self { dir: TempDir::new() };
        forerun_quant::pack(checkpoint.path(), &packed.path(), types, false, &mut |_, _| {}).expect("packing");
        packed
    }

    /// The model file.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("model.gguf")
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        fs::read(self.path()).expect("packed file")
    }
}

/// Writes the checkpoint that `tests/models/NAME.gguf` was packed from into a new folder.
///
/// Matrices come back in their own BF16, bit by bit. Vectors come back as F32: adding 1 to a norm weight and taking it
/// away again leaves what the packer will add 1 to, not always what the checkpoint had.
pub fn write(name: &str, experts: Experts) -> TempDir {
    let dir = TempDir::new();
    let side = path(format!("checkpoints/{name}"));
    for file in SIDE_FILES {
        fs::copy(side.join(file), dir.path().join(file)).expect(file);
    }
    let config: Value = serde_json::from_slice(&fs::read(side.join("config.json")).expect("config")).expect("config");
    let file = fs::read(path(format!("models/{name}.gguf"))).expect("bundled model");
    let header = Header::parse(&file, file.len() as u64).expect("header");
    let text = Text::read(&config["text_config"]);
    let mut out = BTreeMap::new();
    for tensor in header.tensors() {
        let data = &file[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize];
        if tensor.name.ends_with(keys::EXPERTS_PACKED) {
            let layer = number(tensor.name, "blk.").0;
            text.experts(&format!("{TEXT}layers.{layer}.mlp.experts."), data, tensor.ne[0] as usize, experts, &mut out);
        } else {
            let (name, restored) = text.restore(tensor, data.to_vec());
            assert!(out.insert(name, restored).is_none(), "{} restored twice", tensor.name);
        }
    }
    let views = out.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).expect(name)));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("model.safetensors");
    dir
}

/// Where the text model's tensors begin.
const TEXT: &str = "model.language_model.";

/// A tensor of a checkpoint.
struct Restored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// The sizes that restoring needs.
struct Text {
    hidden: usize,
    key_heads: usize,
    value_heads: usize,
    /// Rows of `attn_qkv` before the first value head.
    keys: usize,
    value_dim: usize,
    expert_inner: usize,
}

impl Text {
    fn read(config: &Value) -> Self {
        let size = |key: &str| config[key].as_u64().map_or(0, |n| n as usize);
        let key_heads = size("linear_num_key_heads");
        Self {
            hidden: size("hidden_size"),
            key_heads,
            value_heads: size("linear_num_value_heads"),
            keys: 2 * key_heads * size("linear_key_head_dim"),
            value_dim: size("linear_value_head_dim"),
            expert_inner: size("moe_intermediate_size"),
        }
    }

    /// Name, shape and data that `t` had in the checkpoint.
    fn restore(&self, t: &Tensor<'_>, mut data: Vec<u8>) -> (String, Restored) {
        let dtype = match t.block_type().expect(t.name) {
            BlockType::F32 => Dtype::F32,
            BlockType::BF16 => Dtype::BF16,
            other => panic!("{}: {} is not what the bundled models are made of", t.name, other.name()),
        };
        let name = hf_name(t.name);
        // PyTorch names the contiguous axis last; unused axes are 1, and no used one is but those put back below.
        let mut shape: Vec<usize> = t.ne.iter().rev().map(|&n| n as usize).skip_while(|&n| n == 1).collect();
        let elem = if dtype == Dtype::F32 { 4 } else { 2 };
        let row = shape[shape.len() - 1] * elem;
        // Vision tensors (`v.`, `mm.`) share none of these names.
        let part = if t.name.starts_with("blk.") { number(t.name, "blk.").1 } else { t.name };
        match part {
            "output_norm.weight"
            | "attn_norm.weight"
            | "post_attention_norm.weight"
            | "attn_q_norm.weight"
            | "attn_k_norm.weight" => floats(&mut data, |x| x - 1.0),
            // A_log is BF16 in the checkpoint: the nearest BF16 number is what it was.
            "ssm_a" => {
                self.group(&mut data, 0, elem);
                floats(&mut data, |x| half::bf16::from_f64((-f64::from(x)).ln()).to_f32());
            }
            "ssm_dt.bias" => self.group(&mut data, 0, elem),
            "ssm_alpha.weight" | "ssm_beta.weight" => self.group(&mut data, 0, row),
            "attn_gate.weight" => self.group(&mut data, 0, self.value_dim * row),
            "attn_qkv.weight" => self.group(&mut data, self.keys * row, self.value_dim * row),
            "ssm_conv1d.weight" => {
                self.group(&mut data, self.keys * row, self.value_dim * row);
                shape.insert(1, 1);
            }
            "ssm_out.weight" => data.chunks_exact_mut(row).for_each(|r| self.group(r, 0, self.value_dim * elem)),
            "ffn_gate_inp_shexp.weight" => shape.insert(0, 1),
            _ => {}
        }
        (name, Restored { dtype, shape, data })
    }

    /// Value heads of `unit` bytes each, from byte `start` on, from tiled order (head n belongs to key head n mod
    /// key_heads) back to the checkpoint's (the heads of one key head stand together).
    fn group(&self, data: &mut [u8], start: usize, unit: usize) {
        let tiled = data[start..].to_vec();
        assert_eq!(tiled.len(), self.value_heads * unit);
        let each = self.value_heads / self.key_heads;
        for (head, out) in data[start..].chunks_exact_mut(unit).enumerate() {
            let (key_head, nth) = (head / each, head % each);
            out.copy_from_slice(&tiled[(nth * self.key_heads + key_head) * unit..][..unit]);
        }
    }

    /// The experts of one layer: blobs of `stride` bytes, each gate, up, down and padding, in BF16.
    fn experts(&self, prefix: &str, data: &[u8], stride: usize, form: Experts, out: &mut BTreeMap<String, Restored>) {
        let (h, i) = (self.hidden, self.expert_inner);
        let matrix = h * i * 2;
        let dtype = Dtype::BF16;
        let blobs = data.chunks_exact(stride);
        if form == Experts::Fused {
            let n = blobs.len();
            let pick = |from: usize, to: usize| blobs.clone().flat_map(|b| &b[from..to]).copied().collect();
            let (gate_up, down) = (pick(0, 2 * matrix), pick(2 * matrix, 3 * matrix));
            out.insert(format!("{prefix}gate_up_proj"), Restored { dtype, shape: vec![n, 2 * i, h], data: gate_up });
            out.insert(format!("{prefix}down_proj"), Restored { dtype, shape: vec![n, h, i], data: down });
            return;
        }
        for (e, blob) in blobs.enumerate() {
            for (k, (name, shape)) in [("gate", [i, h]), ("up", [i, h]), ("down", [h, i])].into_iter().enumerate() {
                let data = blob[k * matrix..][..matrix].to_vec();
                out.insert(format!("{prefix}{e}.{name}_proj.weight"), Restored { dtype, shape: shape.to_vec(), data });
            }
        }
    }
}

/// Changes each F32 of `data`.
fn floats(data: &mut [u8], f: impl Fn(f32) -> f32) {
    for x in data.as_chunks_mut::<4>().0 {
        *x = f(f32::from_le_bytes(*x)).to_le_bytes();
    }
}

/// The number after `prefix` in `name`, and what follows the full stop behind it.
fn number<'a>(name: &'a str, prefix: &str) -> (usize, &'a str) {
    let (n, rest) = name.strip_prefix(prefix).and_then(|r| r.split_once('.')).expect(name);
    (n.parse().expect(name), rest)
}

/// The checkpoint's name of tensor `name`.
fn hf_name(name: &str) -> String {
    const VISION: &str = "model.vision_tower.";
    let whole = match name {
        "token_embd.weight" => "model.language_model.embed_tokens.weight",
        "output_norm.weight" => "model.language_model.norm.weight",
        "output.weight" => "lm_head.weight",
        "v.position_embd.weight" => "model.vision_tower.embeddings.position_embedding.weight",
        _ => "",
    };
    if !whole.is_empty() {
        return whole.into();
    }
    if name.starts_with("blk.") {
        let (layer, rest) = number(name, "blk.");
        return format!("{TEXT}layers.{layer}.{}", text_part(rest));
    }
    let (stem, kind) = name.rsplit_once('.').expect(name);
    let place = if stem.starts_with("v.blk.") {
        let (layer, rest) = number(stem, "v.blk.");
        format!("{VISION}encoder.layers.{layer}.{}", vision_part(rest))
    } else if let Some(rest) = stem.strip_prefix("v.vit_merger.") {
        format!("{VISION}vit_merger.{}", vision_part(rest))
    } else {
        match stem {
            "v.patch_embd" => format!("{VISION}embeddings.patch_embedding"),
            "v.post_ln" => format!("{VISION}post_layernorm"),
            "mm.input_norm" => "model.merger.mlp.0.pre_norm".into(),
            "mm.up" => "model.merger.mlp.0.linear_1".into(),
            "mm.down" => "model.merger.mlp.0.linear_2".into(),
            _ => panic!("{name}: no name in the checkpoint"),
        }
    };
    format!("{place}.{kind}")
}

fn text_part(name: &str) -> &'static str {
    match name {
        "attn_norm.weight" => "input_layernorm.weight",
        "post_attention_norm.weight" => "post_attention_layernorm.weight",
        "attn_q.weight" => "self_attn.q_proj.weight",
        "attn_k.weight" => "self_attn.k_proj.weight",
        "attn_v.weight" => "self_attn.v_proj.weight",
        "attn_output.weight" => "self_attn.o_proj.weight",
        "attn_q_norm.weight" => "self_attn.q_norm.weight",
        "attn_k_norm.weight" => "self_attn.k_norm.weight",
        "attn_qkv.weight" => "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight" => "linear_attn.in_proj_z.weight",
        "ssm_alpha.weight" => "linear_attn.in_proj_a.weight",
        "ssm_beta.weight" => "linear_attn.in_proj_b.weight",
        "ssm_conv1d.weight" => "linear_attn.conv1d.weight",
        "ssm_dt.bias" => "linear_attn.dt_bias",
        "ssm_a" => "linear_attn.A_log",
        "ssm_norm.weight" => "linear_attn.norm.weight",
        "ssm_out.weight" => "linear_attn.out_proj.weight",
        "ffn_gate_inp.weight" => "mlp.gate.weight",
        "ffn_gate_inp_shexp.weight" => "mlp.shared_expert_gate.weight",
        "ffn_gate_shexp.weight" => "mlp.shared_expert.gate_proj.weight",
        "ffn_up_shexp.weight" => "mlp.shared_expert.up_proj.weight",
        "ffn_down_shexp.weight" => "mlp.shared_expert.down_proj.weight",
        "ffn_gate.weight" => "mlp.gate_proj.weight",
        "ffn_up.weight" => "mlp.up_proj.weight",
        "ffn_down.weight" => "mlp.down_proj.weight",
        _ => panic!("{name}: no name in the checkpoint"),
    }
}

fn vision_part(name: &str) -> &'static str {
    match name {
        "ln1" => "layer_norm1",
        "ln2" => "layer_norm2",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.out_proj",
        "ffn_up" => "mlp.fc1",
        "ffn_down" => "mlp.fc2",
        "ds_ln" => "pre_norm",
        "ds_ffn_up" => "linear_1",
        "ds_ffn_down" => "linear_2",
        _ => panic!("{name}: no name in the checkpoint"),
    }
}
