//! Model files that fit together whatever their sizes are, and may then be damaged: what blind mutation hardly reaches.
//!
//! Shapes follow docs/model-file.md. Relies on the format's own writer; never writes data, which a target makes up.

use arbitrary::Arbitrary;
use forerun_format::{
    BlockType, FormatError,
    gguf::{HeaderBuilder, Kv},
    keys, page_up,
};

/// A width or a count: mostly small, so that a file that is accepted can also be run.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub struct Size(u16);

impl Size {
    fn up_to(self, most: u64) -> u64 {
        let (large, n) = (self.0 >= 0xf800, u64::from(self.0));
        if large { 1u64 << (n % 21) } else { 1 + n % most }
    }
}

/// A file to build.
#[derive(Arbitrary, Debug)]
pub struct Spec {
    moe: bool,
    vision: bool,
    tied: bool,
    window_merger: bool,
    /// Mixers, a bit each.
    attention: u8,
    layers: u8,
    vision_layers: u8,
    hidden: Size,
    /// Makes widths multiples of 32 or 256, so that quantized types fit.
    whole_blocks: u8,
    inner: Size,
    shared: Size,
    experts: Size,
    top_k: u8,
    kv_heads: Size,
    heads_per_kv: Size,
    head_dim: u8,
    rope_half: u8,
    sections: [u8; 2],
    key_heads: Size,
    value_per_key: Size,
    key_dim: u8,
    value_dim: u8,
    vision_heads: Size,
    vision_dim: u8,
    vision_inner: Size,
    patch: u8,
    side: u8,
    scale: u16,
    types: [u8; 5],
    stop: u8,
    eps: f32,
    rope_base: f32,
    /// Seed of the weights, and what share of them is not a number one would expect.
    pub seed: u32,
    /// Values put in place of those of keys, by number.
    wrong_keys: Vec<(u8, Wrong)>,
    /// Bytes of the finished header put in place.
    pub wrong_bytes: Vec<(u32, u8)>,
}

#[derive(Arbitrary, Debug, Clone)]
enum Wrong {
    Number(u32),
    Power(u8),
    Float(f32),
    Numbers(Vec<u32>),
    Text(String),
    Flag(bool),
}

/// A header and the bytes of data it describes.
#[derive(Debug)]
pub struct Built {
    /// Header, padded to its data.
    pub header: Vec<u8>,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Nothing was put in place of what belongs there: the file must be accepted.
    pub whole: bool,
}

/// Tokens beside the 256 bytes.
const ADDED: [&str; 9] = [
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<|im_end|>",
    "<image_id>",
    "</image_id>",
];
const VOCAB: u64 = 256 + 1 + ADDED.len() as u64;

struct Writer {
    h: HeaderBuilder,
    set: Vec<String>,
}

impl Writer {
    fn set(&mut self, key: &str, value: Kv) {
        self.h.set(key, value);
        self.set.push(key.into());
    }

    fn numbers(&mut self, prefix: &str, pairs: &[(&str, u64)]) {
        for (key, n) in pairs {
            self.set(&format!("{prefix}{key}"), Kv::U32(*n as u32));
        }
    }

    /// A matrix of type `block`, or f32 where its rows are not whole blocks.
    fn matrix(&mut self, name: &str, block: BlockType, ne: &[u64]) -> Result<(), FormatError> {
        self.h.tensor(name, fit(block, ne[0]), ne).map(drop)
    }

    fn vectors(&mut self, list: &[(String, u64)]) -> Result<(), FormatError> {
        list.iter().try_for_each(|(name, n)| self.h.tensor(name, BlockType::F32, &[*n]).map(drop))
    }

    fn linear(&mut self, name: &str, block: BlockType, rows: u64, cols: u64) -> Result<(), FormatError> {
        self.matrix(&format!("{name}.weight"), block, &[cols, rows])?;
        self.vectors(&[(format!("{name}.bias"), rows)])
    }

    fn norm(&mut self, name: &str, n: u64) -> Result<(), FormatError> {
        self.vectors(&[(format!("{name}.weight"), n), (format!("{name}.bias"), n)])
    }
}

fn fit(block: BlockType, row: u64) -> BlockType {
    if row.is_multiple_of(block.block_elems() as u64) { block } else { BlockType::F32 }
}

impl Spec {
    /// Builds the file.
    ///
    /// # Errors
    /// If a size does not fit 64 bits.
    pub fn build(&self) -> Result<Built, FormatError> {
        let mut w = Writer { h: HeaderBuilder::new(), set: Vec::new() };
        let block = [1, 32, 256][usize::from(self.whole_blocks % 3)];
        let width = |s: Size, most: u64| s.up_to(most.div_ceil(block)) * block;
        let unit = block.min(32);
        let types = self.types.map(|t| BlockType::ALL[usize::from(t) % BlockType::ALL.len()]);
        let arch = if self.moe { "qwen35moe" } else { "qwen35" };
        let layers = 1 + u64::from(self.layers % 3);
        let hidden = width(self.hidden, 96).min(1 << 20);
        let small = |n: u8, most: u64| 1 + u64::from(n) % most;
        let (kv_heads, head_dim) = (self.kv_heads.up_to(3), unit * small(self.head_dim, 256 / unit));
        let heads = (kv_heads * self.heads_per_kv.up_to(3)).min(1 << 20) / kv_heads * kv_heads;
        let head_dim = if head_dim < 2 { 2 } else { head_dim };
        let rope_dim = 2 * small(self.rope_half, head_dim / 2);
        let (key_heads, key_dim) = (self.key_heads.up_to(3).min(1 << 12), unit * small(self.key_dim, 256 / unit));
        let value_dim = unit * small(self.value_dim, 256 / unit);
        // ssm.inner_size is one number: at most 2^20.
        let value_heads = key_heads * self.value_per_key.up_to(3).min(((1 << 20) / value_dim / key_heads).max(1));
        let inner = value_heads * value_dim;
        let conv = 4;
        let ffn = width(self.inner, 96).min(1 << 20);
        let shared = width(self.shared, 96).min(1 << 20);
        let experts = self.experts.up_to(8).min(4096);
        let top_k = small(self.top_k, experts.min(32));

        w.set("general.architecture", Kv::Str(arch.into()));
        w.set(keys::LAYOUT, Kv::Str(keys::LAYOUT_EXPERT_MAJOR.into()));
        w.set(keys::VERSION, Kv::U32(keys::PACKED_VERSION));
        let key = |s: &str| format!("{arch}.{s}");
        w.numbers(
            &key(""),
            &[
                ("block_count", layers),
                ("context_length", 8192),
                ("embedding_length", hidden),
                ("attention.head_count", heads),
                ("attention.head_count_kv", kv_heads),
                ("attention.key_length", head_dim),
                ("rope.dimension_count", rope_dim),
                ("ssm.conv_kernel", conv),
                ("ssm.state_size", key_dim),
                ("ssm.group_count", key_heads),
                ("ssm.time_step_rank", value_heads),
                ("ssm.inner_size", inner),
            ],
        );
        if self.moe {
            w.numbers(
                &key("expert_"),
                &[
                    ("count", experts),
                    ("used_count", top_k),
                    ("feed_forward_length", ffn),
                    ("shared_feed_forward_length", shared),
                ],
            );
        } else {
            w.numbers(&key(""), &[("feed_forward_length", ffn)]);
        }
        let half = (rope_dim / 2) as u32;
        let first = u32::from(self.sections[0]) % (half + 1);
        let second = u32::from(self.sections[1]) % (half - first + 1);
        w.set(&key("rope.dimension_sections"), Kv::U32s(vec![first, second, half - first - second, 0]));
        let eps = self.eps();
        w.set(&key("attention.layer_norm_rms_epsilon"), Kv::F32(eps));
        let base = if self.rope_base.is_finite() && self.rope_base > 1.0 { self.rope_base } else { 1e5 };
        w.set(&key("rope.freq_base"), Kv::F32(base));
        let attention: Vec<bool> = (0..layers).map(|l| self.attention >> l & 1 == 1).collect();
        // The writer has no list of booleans: every layer has attention, or all but the last have none.
        let interval = if attention[0] { 1 } else { layers };
        w.numbers(&key(""), &[("full_attention_interval", interval)]);

        let (expert_types, stride) = self.experts_of(&types, hidden, ffn);
        if self.moe {
            for (k, t) in keys::EXPERT_TYPES.iter().zip(expert_types) {
                w.set(k, Kv::U32s(vec![t as u32; layers as usize]));
            }
        }
        self.tokens(&mut w);

        let t = types[0];
        for l in 0..layers {
            let n = |s: &str| format!("blk.{l}.{s}");
            w.vectors(&[(n("attn_norm.weight"), hidden)])?;
            if (l + 1) % interval == 0 {
                let (q, kv) = (heads * head_dim, kv_heads * head_dim);
                w.matrix(&n("attn_q.weight"), t, &[hidden, 2 * q])?;
                w.matrix(&n("attn_k.weight"), t, &[hidden, kv])?;
                w.matrix(&n("attn_v.weight"), t, &[hidden, kv])?;
                w.vectors(&[(n("attn_q_norm.weight"), head_dim), (n("attn_k_norm.weight"), head_dim)])?;
                w.matrix(&n("attn_output.weight"), t, &[q, hidden])?;
            } else {
                let channels = 2 * key_heads * key_dim + inner;
                w.matrix(&n("attn_qkv.weight"), t, &[hidden, channels])?;
                w.matrix(&n("attn_gate.weight"), t, &[hidden, inner])?;
                w.matrix(&n("ssm_alpha.weight"), types[1], &[hidden, value_heads])?;
                w.matrix(&n("ssm_beta.weight"), types[1], &[hidden, value_heads])?;
                w.h.tensor(&n("ssm_conv1d.weight"), BlockType::F32, &[conv, channels])?;
                w.vectors(&[(n("ssm_dt.bias"), value_heads), (n("ssm_a"), value_heads)])?;
                w.vectors(&[(n("ssm_norm.weight"), value_dim)])?;
                w.matrix(&n("ssm_out.weight"), t, &[inner, hidden])?;
            }
            w.vectors(&[(n("post_attention_norm.weight"), hidden)])?;
            let (suffix, inner) = if self.moe { ("_shexp", shared) } else { ("", ffn) };
            if self.moe {
                w.matrix(&n("ffn_gate_inp.weight"), types[1], &[hidden, experts])?;
                w.vectors(&[(n("ffn_gate_inp_shexp.weight"), hidden)])?;
            }
            w.matrix(&n(&format!("ffn_gate{suffix}.weight")), t, &[hidden, inner])?;
            w.matrix(&n(&format!("ffn_up{suffix}.weight")), t, &[hidden, inner])?;
            w.matrix(&n(&format!("ffn_down{suffix}.weight")), t, &[inner, hidden])?;
        }
        w.vectors(&[("output_norm.weight".into(), hidden)])?;
        let head = if self.tied { "token_embd.weight" } else { "output.weight" };
        w.matrix(head, types[2], &[hidden, VOCAB])?;
        if self.vision {
            self.vision(&mut w, types[3], hidden)?;
        }
        if !self.tied {
            w.matrix("token_embd.weight", types[4], &[hidden, VOCAB])?;
        }
        if self.moe {
            for l in 0..layers {
                w.h.tensor(&format!("blk.{l}.{}", keys::EXPERTS_PACKED), BlockType::I8, &[stride, experts])?;
            }
            w.set(keys::CRC_EXPERTS, Kv::U32s(vec![0; (experts * layers) as usize]));
        }
        let count = w.h.tensor_count();
        w.set(keys::CRC_TENSORS, Kv::U32s(vec![0; count]));

        for (i, wrong) in &self.wrong_keys {
            let key = w.set[usize::from(*i) % w.set.len()].clone();
            w.h.set(
                &key,
                match wrong.clone() {
                    Wrong::Number(n) => Kv::U32(n),
                    Wrong::Power(n) => Kv::U32(1 << (n % 32)),
                    Wrong::Float(x) => Kv::F32(x),
                    Wrong::Numbers(v) => Kv::U32s(v),
                    Wrong::Text(s) => Kv::Str(s),
                    Wrong::Flag(b) => Kv::Bool(b),
                },
            );
        }
        let data_bytes = w.h.data_bytes();
        let mut header = w.h.bytes();
        for (at, byte) in &self.wrong_bytes {
            let at = *at as usize % header.len();
            header[at] = *byte;
        }
        let whole = self.wrong_keys.is_empty() && self.wrong_bytes.is_empty() && stride <= 1 << 30;
        Ok(Built { header, data_bytes, whole })
    }

    fn eps(&self) -> f32 {
        if self.eps > 0.0 && self.eps < 1.0 { self.eps } else { 1e-6 }
    }

    /// Types of an expert's matrices that fit, and its stride.
    fn experts_of(&self, types: &[BlockType; 5], hidden: u64, inner: u64) -> ([BlockType; 3], u64) {
        let mut fitted = [fit(types[1], hidden), fit(types[2], hidden), fit(types[3], inner)];
        let shapes = [(inner, hidden), (inner, hidden), (hidden, inner)];
        let bytes = |t: BlockType, (rows, cols): (u64, u64)| rows * t.row_bytes(cols).unwrap_or(0);
        for i in 0..2 {
            // Each matrix starts on a multiple of four bytes.
            if !bytes(fitted[i], shapes[i]).is_multiple_of(4) {
                fitted[i] = BlockType::F32;
            }
        }
        let sum = fitted.iter().zip(shapes).map(|(t, s)| bytes(*t, s)).sum();
        (fitted, page_up(sum).unwrap_or(u64::MAX))
    }

    fn tokens(&self, w: &mut Writer) {
        let mut others = 0x100u32..;
        let mut tokens: Vec<String> = (0..=255u32)
            .map(|b| {
                let shown = matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
                let c = if shown { Some(b) } else { others.next() };
                c.and_then(char::from_u32).into_iter().collect()
            })
            .collect();
        tokens.push("he".into());
        tokens.extend(ADDED.map(String::from));
        let types = (0..VOCAB).map(|i| if i < 257 { 1 } else { 3 }).collect();
        w.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
        w.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
        w.set("tokenizer.ggml.tokens", Kv::Strs(tokens));
        w.set("tokenizer.ggml.token_type", Kv::I32s(types));
        w.set("tokenizer.ggml.merges", Kv::Strs(vec!["h e".into()]));
        let template = "{% for m in messages %}{{ m.role }}{% endfor %}<|image_pad|>";
        w.set(keys::CHAT_TEMPLATE, Kv::Str(template.into()));
        w.set(keys::TOKEN_STOP, Kv::U32s(vec![263; usize::from(self.stop % 17)]));
        let ids = [
            keys::TOKEN_IMAGE,
            keys::TOKEN_VIDEO,
            keys::TOKEN_IMAGE_START,
            keys::TOKEN_IMAGE_END,
            keys::TOKEN_SLICE_START,
            keys::TOKEN_SLICE_END,
        ];
        for (key, id) in ids.into_iter().zip(257..) {
            w.set(key, Kv::U32(id));
        }
        w.set(keys::TOKEN_NEWLINE, Kv::U32(10));
    }

    fn vision(&self, w: &mut Writer, t: BlockType, text: u64) -> Result<(), FormatError> {
        let heads = self.vision_heads.up_to(3).min(1 << 12);
        let d = heads * (1 + u64::from(self.vision_dim));
        let f = self.vision_inner.up_to(96);
        let layers = 1 + u64::from(self.vision_layers % 3);
        let patch = 1 + u64::from(self.patch % 64);
        let side = 1 + u64::from(self.side);
        w.numbers(
            "clip.vision.",
            &[
                ("embedding_length", d),
                ("feed_forward_length", f),
                ("block_count", layers),
                ("attention.head_count", heads),
                ("patch_size", patch),
            ],
        );
        let eps = self.eps();
        w.set("clip.vision.attention.layer_norm_epsilon", Kv::F32(eps));
        w.set("clip.vision.image_mean", Kv::F32s(vec![0.5; 3]));
        w.set("clip.vision.image_std", Kv::F32s(vec![0.5; 3]));
        let scale = u64::from(self.scale % 512).max(28);
        w.numbers("", &[(keys::VISION_POSITION_SIDE, side), (keys::IMAGE_SCALE_RESOLUTION, scale)]);
        w.numbers("", &[(keys::IMAGE_MAX_SLICES, 9), (keys::VIDEO_MAX_SLICES, 1)]);
        w.set(keys::MROPE_CANVAS, Kv::Bool(true));

        w.h.tensor("v.patch_embd.weight", fit(t, patch), &[patch, patch, 3, d])?;
        w.vectors(&[("v.patch_embd.bias".into(), d)])?;
        w.matrix("v.position_embd.weight", t, &[d, side * side])?;
        for l in 0..layers {
            let n = |s: &str| format!("v.blk.{l}.{s}");
            w.norm(&n("ln1"), d)?;
            for s in ["attn_q", "attn_k", "attn_v", "attn_out"] {
                w.linear(&n(s), t, d, d)?;
            }
            w.norm(&n("ln2"), d)?;
            w.linear(&n("ffn_up"), t, f, d)?;
            w.linear(&n("ffn_down"), t, d, f)?;
        }
        if self.window_merger {
            w.numbers("", &[(keys::VISION_INSERT_LAYER, u64::from(self.seed) % layers)]);
            w.norm("v.vit_merger.ln1", d)?;
            for s in ["attn_q", "attn_k", "attn_v", "attn_out"] {
                w.linear(&format!("v.vit_merger.{s}"), t, d, d)?;
            }
            w.norm("v.vit_merger.ds_ln", 4 * d)?;
            w.linear("v.vit_merger.ds_ffn_up", t, 4 * f, 4 * d)?;
            w.linear("v.vit_merger.ds_ffn_down", t, d, 4 * f)?;
        }
        w.norm("v.post_ln", d)?;
        w.norm("mm.input_norm", 4 * d)?;
        w.linear("mm.up", t, 4 * d, 4 * d)?;
        w.linear("mm.down", t, text, 4 * d)
    }
}
