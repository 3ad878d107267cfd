//! Packed model files of the true shapes of MiniCPM-V 4.7, 35B-A3B and 1B, whose weights are all zero: the file is a hole,
//! so it takes no room on disk and a page of header.
//!
//! Relies on the format crate for the header. The vocabulary has the true size and is made up; the dense file has it as
//! version 1 of the layout did.

use forerun_format::BlockType::{self, BF16, F32, I8, Q4_0, Q8_0};
use forerun_format::crc32c::Crc32c;
use forerun_format::gguf::{HeaderBuilder, Kv};
use forerun_format::{keys, page_up, vocab};
use std::collections::HashMap;
use std::hash::RandomState;
use std::io::Write;
use std::path::Path;

/// Rows of the embedding.
const VOCAB: usize = 248_144;
/// Where the added tokens begin, as in the published tokenizer of this family.
const ADDED: usize = 248_044;
const ADDED_TOKENS: [&str; 12] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "</think>",
];
const TEMPLATE: &str = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
    {% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}\
    {% endif %}{% endfor %}";

/// Shapes of a text model.
#[derive(Clone, Copy)]
pub struct Shape {
    name: &'static str,
    layers: u64,
    hidden: u64,
    heads: u64,
    value_heads: u64,
    /// Experts, how many a token uses, inner width of one and of the shared one.
    experts: Option<(u64, u32, u64, u64)>,
    /// Inner width of a dense model.
    dense: u64,
    tied: bool,
}

/// 35 billion parameters, 3 of them active.
pub const MOE_35B: Shape = Shape {
    name: "sparse 35B-A3B",
    layers: 40,
    hidden: 2048,
    heads: 16,
    value_heads: 32,
    experts: Some((256, 8, 512, 512)),
    dense: 0,
    tied: false,
};

/// The dense model.
pub const DENSE_1B: Shape = Shape {
    name: "sparse 1B",
    layers: 24,
    hidden: 1024,
    heads: 8,
    value_heads: 16,
    experts: None,
    dense: 3584,
    tied: true,
};

const KV_HEADS: u64 = 2;
const HEAD: u64 = 256;
const KEY_HEADS: u64 = 16;
const DELTA_HEAD: u64 = 128;
const TOWER: (u64, u64, u64) = (1152, 4304, 27);
const POSITIONS: u64 = 70;

struct Builder {
    header: HeaderBuilder,
    crcs: Vec<u32>,
    known: HashMap<u64, u32>,
}

impl Builder {
    /// CRC32C of `n` zero bytes.
    fn crc(&mut self, n: u64) -> u32 {
        *self.known.entry(n).or_insert_with(|| {
            let mut c = Crc32c::default();
            let zeros = vec![0; 1 << 20];
            let mut left = n as usize;
            while left > 0 {
                let piece = left.min(zeros.len());
                c.update(&zeros[..piece]);
                left -= piece;
            }
            c.finish()
        })
    }

    fn tensor(&mut self, name: &str, block: BlockType, ne: &[u64]) {
        self.header.tensor(name, block, ne).expect(name);
        let bytes = block.row_bytes(ne[0]).expect(name) * ne[1..].iter().product::<u64>();
        let crc = if block == I8 { 0 } else { self.crc(bytes) };
        self.crcs.push(crc);
    }

    fn vector(&mut self, name: &str, n: u64) {
        self.tensor(name, F32, &[n]);
    }

    /// `(rows, cols)`, or the checkpoint's own type where rows are not whole blocks.
    fn matrix(&mut self, name: &str, block: BlockType, rows: u64, cols: u64) {
        let block = if cols.is_multiple_of(block.block_elems() as u64) { block } else { BF16 };
        self.tensor(name, block, &[cols, rows]);
    }

    fn linear(&mut self, name: &str, rows: u64, cols: u64) {
        self.matrix(&format!("{name}.weight"), Q8_0, rows, cols);
        self.vector(&format!("{name}.bias"), rows);
    }

    fn norm(&mut self, name: &str, n: u64) {
        self.vector(&format!("{name}.weight"), n);
        self.vector(&format!("{name}.bias"), n);
    }

    fn swiglu(&mut self, name: &str, suffix: &str, inner: u64, hidden: u64) {
        self.matrix(&format!("{name}.ffn_gate{suffix}.weight"), Q4_0, inner, hidden);
        self.matrix(&format!("{name}.ffn_up{suffix}.weight"), Q4_0, inner, hidden);
        self.matrix(&format!("{name}.ffn_down{suffix}.weight"), Q4_0, hidden, inner);
    }

    fn layer(&mut self, s: &Shape, l: u64) {
        let (h, name) = (s.hidden, format!("blk.{l}"));
        let at = |part: &str| format!("{name}.{part}");
        self.vector(&at("attn_norm.weight"), h);
        if (l + 1).is_multiple_of(4) {
            self.matrix(&at("attn_q.weight"), Q4_0, 2 * s.heads * HEAD, h);
            self.matrix(&at("attn_k.weight"), Q4_0, KV_HEADS * HEAD, h);
            self.matrix(&at("attn_v.weight"), Q4_0, KV_HEADS * HEAD, h);
            self.vector(&at("attn_q_norm.weight"), HEAD);
            self.vector(&at("attn_k_norm.weight"), HEAD);
            self.matrix(&at("attn_output.weight"), Q4_0, h, s.heads * HEAD);
        } else {
            let inner = s.value_heads * DELTA_HEAD;
            let channels = 2 * KEY_HEADS * DELTA_HEAD + inner;
            self.matrix(&at("attn_qkv.weight"), Q4_0, channels, h);
            self.matrix(&at("attn_gate.weight"), Q4_0, inner, h);
            self.matrix(&at("ssm_alpha.weight"), BF16, s.value_heads, h);
            self.matrix(&at("ssm_beta.weight"), BF16, s.value_heads, h);
            self.tensor(&at("ssm_conv1d.weight"), F32, &[4, channels]);
            self.vector(&at("ssm_a"), s.value_heads);
            self.vector(&at("ssm_dt.bias"), s.value_heads);
            self.vector(&at("ssm_norm.weight"), DELTA_HEAD);
            self.matrix(&at("ssm_out.weight"), Q4_0, h, inner);
        }
        self.vector(&at("post_attention_norm.weight"), h);
        match s.experts {
            None => self.swiglu(&name, "", s.dense, h),
            Some((experts, _, _, shared)) => {
                self.matrix(&at("ffn_gate_inp.weight"), BF16, experts, h);
                self.vector(&at("ffn_gate_inp_shexp.weight"), h);
                self.swiglu(&name, "_shexp", shared, h);
            }
        }
    }

    fn vision(&mut self, hidden: u64) {
        let (d, f, layers) = TOWER;
        self.tensor("v.patch_embd.weight", BF16, &[14, 14, 3, d]);
        self.vector("v.patch_embd.bias", d);
        self.matrix("v.position_embd.weight", BF16, POSITIONS * POSITIONS, d);
        for l in 0..layers {
            let at = |part: &str| format!("v.blk.{l}.{part}");
            self.norm(&at("ln1"), d);
            for part in ["attn_q", "attn_k", "attn_v", "attn_out"] {
                self.linear(&at(part), d, d);
            }
            self.norm(&at("ln2"), d);
            self.linear(&at("ffn_up"), f, d);
            self.linear(&at("ffn_down"), d, f);
        }
        self.norm("v.vit_merger.ln1", d);
        for part in ["attn_q", "attn_k", "attn_v", "attn_out"] {
            self.linear(&format!("v.vit_merger.{part}"), d, d);
        }
        self.norm("v.vit_merger.ds_ln", 4 * d);
        self.linear("v.vit_merger.ds_ffn_up", 4 * f, 4 * d);
        self.linear("v.vit_merger.ds_ffn_down", d, 4 * f);
        self.norm("v.post_ln", d);
        self.norm("mm.input_norm", 4 * d);
        self.linear("mm.up", 4 * d, 4 * d);
        self.linear("mm.down", hidden, 4 * d);
    }

    fn keys(&mut self, s: &Shape) {
        let arch = if s.experts.is_some() { "qwen35moe" } else { "qwen35" };
        let h = &mut self.header;
        h.set("general.architecture", Kv::Str(arch.into()));
        h.set("general.name", Kv::Str(s.name.into()));
        h.set(keys::LAYOUT, Kv::Str(keys::LAYOUT_EXPERT_MAJOR.into()));
        let number = |h: &mut HeaderBuilder, key: &str, n: u64| h.set(key, Kv::U32(n as u32));
        let version = if s.experts.is_some() { keys::PACKED_VERSION } else { 1 };
        number(h, keys::VERSION, version.into());
        for (key, n) in [
            ("block_count", s.layers),
            ("context_length", 262_144),
            ("embedding_length", s.hidden),
            ("feed_forward_length", s.dense),
            ("attention.head_count", s.heads),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", HEAD),
            ("rope.dimension_count", 64),
            ("ssm.conv_kernel", 4),
            ("ssm.state_size", DELTA_HEAD),
            ("ssm.group_count", KEY_HEADS),
            ("ssm.time_step_rank", s.value_heads),
            ("ssm.inner_size", s.value_heads * DELTA_HEAD),
            ("full_attention_interval", 4),
        ] {
            number(h, &format!("{arch}.{key}"), n);
        }
        h.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), Kv::F32(1e-6));
        h.set(&format!("{arch}.rope.freq_base"), Kv::F32(1e7));
        h.set(&format!("{arch}.rope.dimension_sections"), Kv::I32s(vec![11, 11, 10, 0]));
        if let Some((experts, top_k, inner, shared)) = s.experts {
            number(h, &format!("{arch}.expert_count"), experts);
            number(h, &format!("{arch}.expert_used_count"), top_k.into());
            number(h, &format!("{arch}.expert_feed_forward_length"), inner);
            number(h, &format!("{arch}.expert_shared_feed_forward_length"), shared);
            for key in keys::EXPERT_TYPES {
                h.set(key, Kv::U32s(vec![Q4_0 as u32; s.layers as usize]));
            }
        }
        for (key, n) in [
            ("clip.vision.embedding_length", TOWER.0),
            ("clip.vision.feed_forward_length", TOWER.1),
            ("clip.vision.block_count", TOWER.2),
            ("clip.vision.attention.head_count", 16),
            ("clip.vision.patch_size", 14),
            (keys::VISION_POSITION_SIDE, POSITIONS),
            (keys::VISION_INSERT_LAYER, 6),
            (keys::IMAGE_SCALE_RESOLUTION, 448),
            (keys::IMAGE_MAX_SLICES, 9),
            (keys::VIDEO_MAX_SLICES, 1),
        ] {
            number(h, key, n);
        }
        h.set("clip.vision.attention.layer_norm_epsilon", Kv::F32(1e-6));
        h.set("clip.vision.image_mean", Kv::F32s(vec![0.5; 3]));
        h.set("clip.vision.image_std", Kv::F32s(vec![0.5; 3]));
        h.set(keys::MROPE_CANVAS, Kv::Bool(true));
        h.set(keys::IMAGE_USE_ID, Kv::Bool(false));
        let id = |text: &str| (ADDED + ADDED_TOKENS.iter().position(|t| *t == text).expect("token")) as u64;
        for (key, text) in [
            (keys::TOKEN_IMAGE, "<|image_pad|>"),
            (keys::TOKEN_VIDEO, "<|video_pad|>"),
            (keys::TOKEN_IMAGE_START, "<image>"),
            (keys::TOKEN_IMAGE_END, "</image>"),
            (keys::TOKEN_SLICE_START, "<slice>"),
            (keys::TOKEN_SLICE_END, "</slice>"),
        ] {
            number(h, key, id(text));
        }
        number(h, keys::TOKEN_NEWLINE, 198);
        h.set(keys::TOKEN_STOP, Kv::U32s(vec![id("<|endoftext|>") as u32, id("<|im_end|>") as u32]));
        h.set(keys::CHAT_TEMPLATE, Kv::Str(TEMPLATE.into()));
        vocabulary(h, version);
    }
}

/// A vocabulary of the true size: 256 bytes, then words of two, three and four letters, each with its merge.
fn vocabulary(h: &mut HeaderBuilder, version: u32) {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut tokens: Vec<String> = (0..=255).filter(|b| printable(*b)).map(|b| char::from(b).into()).collect();
    let others = (0..=255).filter(|b| !printable(*b)).count() as u32;
    tokens.extend((0x100..0x100 + others).map(|c| char::from_u32(c).expect("a letter").to_string()));
    let mut merges = Vec::new();
    let letters: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut words = letters.clone();
    'all: loop {
        let mut longer = Vec::new();
        for word in &words {
            for letter in &letters {
                if tokens.len() == ADDED {
                    break 'all;
                }
                merges.push(format!("{word} {letter}"));
                tokens.push(format!("{word}{letter}"));
                longer.push(format!("{word}{letter}"));
            }
        }
        words = longer;
    }
    let mut types = vec![1; tokens.len()];
    tokens.extend(ADDED_TOKENS.map(String::from));
    types.resize(tokens.len(), 3);
    tokens.extend((tokens.len()..VOCAB).map(|i| format!("[PAD{i}]")));
    types.resize(VOCAB, 5);
    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    if version == 1 {
        h.set("tokenizer.ggml.tokens", Kv::Strs(tokens));
        h.set("tokenizer.ggml.token_type", Kv::I32s(types));
        h.set("tokenizer.ggml.merges", Kv::Strs(merges));
        return;
    }
    let mut vocab = vocab::Builder::new(tokens.len(), RandomState::new());
    for (text, kind) in tokens.iter().zip(types) {
        vocab.token(text, vocab::Kind::from_ggml(kind.into()).expect("a kind")).expect("a token");
    }
    for merge in &merges {
        vocab.merge(merge).expect("a merge");
    }
    vocab.finish().expect("a vocabulary").write(h);
}

/// Writes a model file of this shape. Returns its length in bytes.
pub fn write(s: &Shape, path: &Path) -> u64 {
    let mut b = Builder { header: HeaderBuilder::new(), crcs: Vec::new(), known: HashMap::new() };
    b.keys(s);
    for l in 0..s.layers {
        b.layer(s, l);
    }
    b.vector("output_norm.weight", s.hidden);
    if !s.tied {
        b.matrix("output.weight", Q4_0, VOCAB as u64, s.hidden);
    } else {
        b.matrix("token_embd.weight", Q4_0, VOCAB as u64, s.hidden);
    }
    b.vision(s.hidden);
    if !s.tied {
        b.matrix("token_embd.weight", Q4_0, VOCAB as u64, s.hidden);
    }
    if let Some((experts, _, inner, _)) = s.experts {
        let row = |n| Q4_0.row_bytes(n).expect("whole blocks");
        let stride = page_up(2 * inner * row(s.hidden) + s.hidden * row(inner)).expect("small");
        for l in 0..s.layers {
            b.tensor(&format!("blk.{l}.{}", keys::EXPERTS_PACKED), I8, &[stride, experts]);
        }
        let crc = b.crc(stride);
        b.header.set(keys::CRC_EXPERTS, Kv::U32s(vec![crc; (experts * s.layers) as usize]));
    }
    let crcs = std::mem::take(&mut b.crcs);
    b.header.set(keys::CRC_TENSORS, Kv::U32s(crcs));
    let header = b.header.bytes();
    let bytes = header.len() as u64 + b.header.data_bytes();
    let mut file = std::fs::File::create(path).expect("model file");
    file.write_all(&header).and_then(|()| file.set_len(bytes)).expect("model file");
    bytes
}
