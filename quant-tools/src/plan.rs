//! What a packed file contains, in its order, and where each row comes from: names, shapes, transformations and element
//! types of `docs/model-file.md`. Every tensor of the checkpoint is checked here, before anything is written.

use crate::{
    checkpoint::Checkpoint,
    config::{Config, Ffn, Moe, Text, Vision},
    error::{Error, Result},
};
use forerun_format::{BlockType, keys, page_up};
use std::collections::BTreeSet;

/// Element types chosen by the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Routed experts.
    pub experts: BlockType,
    /// Other matrices of the text model, embedding and head.
    pub resident: BlockType,
    /// Matrices of the vision tower and merger; `None`: as `resident`.
    pub vision: Option<BlockType>,
}

/// How the experts lie in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One blob for each expert: what forerun reads.
    Packed,
    /// Three matrices for each layer: what llama.cpp reads.
    Plain,
}

/// Longest row accepted, elements: one row is converted at a time at least.
const ROW_MAX: u64 = 1 << 22;

/// What is done to each element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Copy,
    /// The checkpoint stores norm weights less 1.
    AddOne,
    /// `-exp(x)`, for A_log.
    NegExp,
}

/// Value heads from the checkpoint's grouped order (head v belongs to key head v div ratio) to tiled order (head n uses
/// key head n mod key_heads). Indices before `start` stay; from there, each head is `unit` indices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub start: u64,
    pub unit: u64,
    pub key_heads: u64,
    pub ratio: u64,
}

impl Heads {
    /// The index in the checkpoint of index `i` in the packed file.
    pub fn source(&self, i: u64) -> u64 {
        let Some(j) = i.checked_sub(self.start) else { return i };
        let n = j / self.unit;
        let v = (n % self.key_heads) * self.ratio + n / self.key_heads;
        self.start + v * self.unit + j % self.unit
    }

    /// How many indices from `i` on, at least 1, are consecutive in the checkpoint too.
    pub fn run(&self, i: u64) -> u64 {
        match i.checked_sub(self.start) {
            None => self.start - i,
            Some(j) => self.unit - j % self.unit,
        }
    }
}

/// Rows of a matrix in the checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub name: String,
    /// First row, counting rows over all leading axes.
    pub first_row: u64,
    pub rows: u64,
    pub cols: u64,
    /// Rows of zeros after these, and zeros after each row.
    pub pad: [u64; 2],
    pub op: Op,
    pub row_heads: Option<Heads>,
    pub col_heads: Option<Heads>,
}

impl Source {
    /// All of a matrix, as it is.
    pub fn copy(name: String, rows: u64, cols: u64) -> Self {
        Self { name, first_row: 0, rows, cols, pad: [0; 2], op: Op::Copy, row_heads: None, col_heads: None }
    }
}

/// The experts of one layer.
#[derive(Debug, Clone)]
pub(crate) struct ExpertLayer {
    /// Name in the checkpoint up to and with `mlp.experts.`.
    prefix: String,
    fused: bool,
    hidden: u64,
    ffn: u64,
    pub experts: u64,
    /// Types of gate, up, down.
    pub types: [BlockType; 3],
    /// Bytes of one blob.
    pub stride: u64,
}

impl ExpertLayer {
    /// Gate, up and down rows of expert `e`.
    pub fn sources(&self, e: u64) -> [Source; 3] {
        let (i, h) = (self.ffn, self.hidden);
        let make = |fused: &str, first_row, single: &str, rows, cols| {
            if self.fused {
                Source { first_row, ..Source::copy(format!("{}{fused}", self.prefix), rows, cols) }
            } else {
                Source::copy(format!("{}{e}.{single}.weight", self.prefix), rows, cols)
            }
        };
        [
            make("gate_up_proj", e * 2 * i, "gate_proj", i, h),
            make("gate_up_proj", e * 2 * i + i, "up_proj", i, h),
            make("down_proj", e * h, "down_proj", h, i),
        ]
    }
}

/// Where a tensor's data comes from.
#[derive(Debug, Clone)]
pub(crate) enum Data {
    Matrix(Source),
    Experts(ExpertLayer),
    /// The gate (0), up (1) or down (2) matrices of all experts of a layer, one after the other.
    ExpertPart(ExpertLayer, usize),
}

/// One tensor of the packed file.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub name: String,
    pub block: BlockType,
    /// Contiguous axis first.
    pub ne: Vec<u64>,
    pub data: Data,
}

/// Which rule chooses an element type.
#[derive(Clone, Copy)]
enum Class {
    /// The checkpoint's own.
    Own,
    Resident,
    Vision,
}

/// All tensors of the packed file in order.
#[derive(Debug)]
pub(crate) struct Plan {
    pub items: Vec<Item>,
    /// Tensors of the checkpoint that nothing reads.
    pub unused: Vec<String>,
    /// Type asked for, type given since rows are not whole blocks of it, and how many matrices that befell.
    pub misfits: Vec<(BlockType, BlockType, u64)>,
}

impl Plan {
    /// Plans the packing of `checkpoint`.
    ///
    /// # Errors
    /// If a tensor is missing, or its shape or type is not as `config` says.
    pub fn new(checkpoint: &Checkpoint, config: &Config, types: Types, layout: Layout) -> Result<Self> {
        let mut b =
            Builder { checkpoint, types, layout, items: Vec::new(), used: BTreeSet::new(), misfits: Vec::new() };
        let t = &config.text;
        let root = if config.multimodal.is_some() { "model.language_model." } else { "model." };
        for i in 0..t.layers {
            b.text_layer(t, &format!("{root}layers.{i}."), i)?;
        }
        b.vector("output_norm.weight", &format!("{root}norm.weight"), t.hidden, Op::AddOne)?;
        let embd = format!("{root}embed_tokens.weight");
        let tied = t.tied || !checkpoint.has("lm_head.weight");
        if tied {
            b.used.insert("lm_head.weight".into());
            b.matrix("token_embd.weight", &embd, t.vocab, t.hidden, Class::Resident)?;
        } else {
            b.matrix("output.weight", "lm_head.weight", t.vocab, t.hidden, Class::Resident)?;
        }
        if let Some(m) = &config.multimodal {
            b.vision(&m.vision, t.hidden)?;
        }
        if !tied {
            b.matrix("token_embd.weight", &embd, t.vocab, t.hidden, Class::Resident)?;
        }
        if let Ffn::Moe(m) = &t.ffn {
            for i in 0..t.layers {
                b.experts(m, t.hidden, format!("{root}layers.{i}.mlp.experts."), i)?;
            }
        }
        Ok(Self { unused: checkpoint.unused(&b.used), items: b.items, misfits: b.misfits })
    }
}

struct Builder<'a> {
    checkpoint: &'a Checkpoint,
    types: Types,
    layout: Layout,
    items: Vec<Item>,
    used: BTreeSet<String>,
    misfits: Vec<(BlockType, BlockType, u64)>,
}

impl Builder<'_> {
    /// Checks a tensor of the checkpoint and returns its own element type.
    fn take(&mut self, name: &str, shape: &[u64]) -> Result<BlockType> {
        let dtype = self.checkpoint.expect(name, shape)?;
        let own = dtype.block().ok_or_else(|| Error::input(format!("tensor {name}"), &dtype, "BF16, F16 or F32"))?;
        self.used.insert(name.into());
        if let Some(&cols) = shape.last()
            && cols > ROW_MAX
        {
            return Err(Error::input(
                format!("tensor {name}"),
                format!("rows of {cols}"),
                format!("at most {ROW_MAX}"),
            ));
        }
        Ok(own)
    }

    fn push(&mut self, name: &str, block: BlockType, ne: Vec<u64>, source: Source) {
        self.items.push(Item { name: name.into(), block, ne, data: Data::Matrix(source) });
    }

    fn vector(&mut self, name: &str, from: &str, n: u64, op: Op) -> Result<()> {
        self.vector_shaped(name, from, &[n], op, None)
    }

    /// One-dimensional tensors are F32.
    fn vector_shaped(&mut self, name: &str, from: &str, shape: &[u64], op: Op, col_heads: Option<Heads>) -> Result<()> {
        self.take(from, shape)?;
        let cols = shape.iter().product();
        let source = Source { op, col_heads, ..Source::copy(from.into(), 1, cols) };
        self.push(name, BlockType::F32, vec![cols], source);
        Ok(())
    }

    fn matrix(&mut self, name: &str, from: &str, rows: u64, cols: u64, class: Class) -> Result<()> {
        self.matrix_permuted(name, from, [rows, cols], class, None, None)
    }

    fn matrix_permuted(
        &mut self,
        name: &str,
        from: &str,
        [rows, cols]: [u64; 2],
        class: Class,
        row_heads: Option<Heads>,
        col_heads: Option<Heads>,
    ) -> Result<()> {
        self.copied(name, Source { row_heads, col_heads, ..Source::copy(from.into(), rows, cols) }, class)
    }

    fn copied(&mut self, name: &str, source: Source, class: Class) -> Result<()> {
        let own = self.take(&source.name, &[source.rows, source.cols])?;
        let want = match class {
            Class::Own => own,
            Class::Resident => self.types.resident,
            Class::Vision => self.types.vision.unwrap_or(self.types.resident),
        };
        let [rows, cols] = [source.rows + source.pad[0], source.cols + source.pad[1]];
        let block = self.fit(want, own, cols, 1);
        self.push(name, block, vec![cols, rows], source);
        Ok(())
    }

    fn text_layer(&mut self, t: &Text, from: &str, i: u64) -> Result<()> {
        let h = t.hidden;
        let to = format!("blk.{i}.");
        self.vector(&format!("{to}attn_norm.weight"), &format!("{from}input_layernorm.weight"), h, Op::AddOne)?;
        if t.is_full(i) {
            self.full_attention(t, &to, &format!("{from}self_attn."))?;
        } else {
            self.delta_rule(t, &to, &format!("{from}linear_attn."))?;
        }
        let post = format!("{from}post_attention_layernorm.weight");
        self.vector(&format!("{to}post_attention_norm.weight"), &post, h, Op::AddOne)?;
        let (part, suffix, ffn) = match &t.ffn {
            Ffn::Dense(n) => ("mlp.", "", *n),
            Ffn::Moe(m) => {
                let router = format!("{from}mlp.gate.weight");
                self.matrix(&format!("{to}ffn_gate_inp.weight"), &router, m.experts, h, Class::Own)?;
                let gate = format!("{from}mlp.shared_expert_gate.weight");
                self.vector_shaped(&format!("{to}ffn_gate_inp_shexp.weight"), &gate, &[1, h], Op::Copy, None)?;
                ("mlp.shared_expert.", "_shexp", m.shared_ffn)
            }
        };
        for (name, rows, cols) in [("gate", ffn, h), ("up", ffn, h), ("down", h, ffn)] {
            let to = format!("{to}ffn_{name}{suffix}.weight");
            self.matrix(&to, &format!("{from}{part}{name}_proj.weight"), rows, cols, Class::Resident)?;
        }
        Ok(())
    }

    fn full_attention(&mut self, t: &Text, to: &str, from: &str) -> Result<()> {
        let (q, kv, d, h) = (t.heads * t.head_dim, t.kv_heads * t.head_dim, t.head_dim, t.hidden);
        // q_proj holds query and gate of each head in turn, as it stays.
        self.matrix(&format!("{to}attn_q.weight"), &format!("{from}q_proj.weight"), 2 * q, h, Class::Resident)?;
        self.vector(&format!("{to}attn_q_norm.weight"), &format!("{from}q_norm.weight"), d, Op::AddOne)?;
        self.matrix(&format!("{to}attn_k.weight"), &format!("{from}k_proj.weight"), kv, h, Class::Resident)?;
        self.vector(&format!("{to}attn_k_norm.weight"), &format!("{from}k_norm.weight"), d, Op::AddOne)?;
        self.matrix(&format!("{to}attn_v.weight"), &format!("{from}v_proj.weight"), kv, h, Class::Resident)?;
        self.matrix(&format!("{to}attn_output.weight"), &format!("{from}o_proj.weight"), h, q, Class::Resident)
    }

    fn delta_rule(&mut self, t: &Text, to: &str, from: &str) -> Result<()> {
        let (h, n) = (t.hidden, t.value_heads);
        let keys = 2 * t.key_heads * t.key_dim;
        let values = n * t.value_dim;
        let heads =
            |start, unit| Some(Heads { start, unit, key_heads: t.key_heads, ratio: t.value_heads / t.key_heads });
        let (qkv, z) = (format!("{from}in_proj_qkv.weight"), format!("{from}in_proj_z.weight"));
        let r = Class::Resident;
        let d = t.value_dim;
        self.matrix_permuted(&format!("{to}attn_qkv.weight"), &qkv, [keys + values, h], r, heads(keys, d), None)?;
        self.matrix_permuted(&format!("{to}attn_gate.weight"), &z, [values, h], r, heads(0, d), None)?;
        for (name, part) in [("ssm_alpha", "in_proj_a"), ("ssm_beta", "in_proj_b")] {
            let part = format!("{from}{part}.weight");
            self.matrix_permuted(&format!("{to}{name}.weight"), &part, [n, h], Class::Own, heads(0, 1), None)?;
        }
        let conv = format!("{from}conv1d.weight");
        self.take(&conv, &[keys + values, 1, t.conv_kernel])?;
        let source = Source { row_heads: heads(keys, d), ..Source::copy(conv, keys + values, t.conv_kernel) };
        let ne = vec![t.conv_kernel, keys + values];
        self.push(&format!("{to}ssm_conv1d.weight"), BlockType::F32, ne, source);
        let dt = format!("{from}dt_bias");
        self.vector_shaped(&format!("{to}ssm_dt.bias"), &dt, &[n], Op::Copy, heads(0, 1))?;
        self.vector_shaped(&format!("{to}ssm_a"), &format!("{from}A_log"), &[n], Op::NegExp, heads(0, 1))?;
        self.vector(&format!("{to}ssm_norm.weight"), &format!("{from}norm.weight"), d, Op::Copy)?;
        let out = format!("{from}out_proj.weight");
        self.matrix_permuted(&format!("{to}ssm_out.weight"), &out, [h, values], r, None, heads(0, d))
    }

    fn vision(&mut self, v: &Vision, text_hidden: u64) -> Result<()> {
        let (d, p) = (v.hidden, v.patch);
        let from = "model.vision_tower.";
        let patch = format!("{from}embeddings.patch_embedding.weight");
        let own = self.take(&patch, &[d, 3, p, p])?;
        let cols = 3 * p * p;
        let source = Source::copy(patch, d, cols);
        self.push("v.patch_embd.weight", own, vec![p, p, 3, d], source);
        self.vector("v.patch_embd.bias", &format!("{from}embeddings.patch_embedding.bias"), d, Op::Copy)?;
        let position = format!("{from}embeddings.position_embedding.weight");
        self.matrix("v.position_embd.weight", &position, v.position_side * v.position_side, d, Class::Own)?;
        for i in 0..v.layers {
            let (to, from) = (format!("v.blk.{i}."), format!("{from}encoder.layers.{i}."));
            self.norm(&format!("{to}ln1"), &format!("{from}layer_norm1"), d)?;
            self.vision_attention(&to, &from, d)?;
            self.norm(&format!("{to}ln2"), &format!("{from}layer_norm2"), d)?;
            self.vision_mlp(&to, &format!("{from}mlp."), v.ffn, d)?;
            if i == v.insert_layer {
                let (to, from) = ("v.vit_merger.", "model.vision_tower.vit_merger.");
                self.norm(&format!("{to}ln1"), &format!("{from}layer_norm1"), d)?;
                self.vision_attention(to, from, d)?;
                self.norm(&format!("{to}ds_ln"), &format!("{from}pre_norm"), 4 * d)?;
                self.linear(&format!("{to}ds_ffn_up"), &format!("{from}linear_1"), 4 * v.ffn, 4 * d)?;
                self.linear(&format!("{to}ds_ffn_down"), &format!("{from}linear_2"), d, 4 * v.ffn)?;
            }
        }
        self.norm("v.post_ln", &format!("{from}post_layernorm"), d)?;
        let from = "model.merger.mlp.0.";
        self.norm("mm.input_norm", &format!("{from}pre_norm"), 4 * d)?;
        self.linear("mm.up", &format!("{from}linear_1"), 4 * d, 4 * d)?;
        self.linear("mm.down", &format!("{from}linear_2"), text_hidden, 4 * d)
    }

    fn norm(&mut self, to: &str, from: &str, n: u64) -> Result<()> {
        self.vector(&format!("{to}.weight"), &format!("{from}.weight"), n, Op::Copy)?;
        self.vector(&format!("{to}.bias"), &format!("{from}.bias"), n, Op::Copy)
    }

    fn linear(&mut self, to: &str, from: &str, rows: u64, cols: u64) -> Result<()> {
        self.matrix(&format!("{to}.weight"), &format!("{from}.weight"), rows, cols, Class::Vision)?;
        self.vector(&format!("{to}.bias"), &format!("{from}.bias"), rows, Op::Copy)
    }

    /// The MLP of a layer. Its width, 4304, is no multiple of 32: in a packed file of quantized matrices zeros fill it up, which
    /// change no result, so that the second matrix can be quantized.
    fn vision_mlp(&mut self, to: &str, from: &str, ffn: u64, d: u64) -> Result<()> {
        let block = self.types.vision.unwrap_or(self.types.resident);
        let pad = match self.layout {
            Layout::Packed if block.block_elems() > 1 => ffn.next_multiple_of(32) - ffn,
            _ => 0,
        };
        let source = |name: &str, rows, cols, pad| Source { pad, ..Source::copy(format!("{from}{name}"), rows, cols) };
        self.copied(&format!("{to}ffn_up.weight"), source("fc1.weight", ffn, d, [pad, 0]), Class::Vision)?;
        self.take(&format!("{from}fc1.bias"), &[ffn])?;
        let bias = source("fc1.bias", 1, ffn, [0, pad]);
        self.push(&format!("{to}ffn_up.bias"), BlockType::F32, vec![ffn + pad], bias);
        self.copied(&format!("{to}ffn_down.weight"), source("fc2.weight", d, ffn, [0, pad]), Class::Vision)?;
        self.vector(&format!("{to}ffn_down.bias"), &format!("{from}fc2.bias"), d, Op::Copy)
    }

    fn vision_attention(&mut self, to: &str, from: &str, d: u64) -> Result<()> {
        for (name, part) in [("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_out", "out_proj")]
        {
            self.linear(&format!("{to}{name}"), &format!("{from}self_attn.{part}"), d, d)?;
        }
        Ok(())
    }

    fn experts(&mut self, m: &Moe, hidden: u64, prefix: String, layer: u64) -> Result<()> {
        let fused = self.checkpoint.has(&format!("{prefix}gate_up_proj"));
        let (e, i, h) = (m.experts, m.expert_ffn, hidden);
        let cols = [h, h, i];
        let rows = [i, i, h];
        let own = if fused {
            let gate_up = self.take(&format!("{prefix}gate_up_proj"), &[e, 2 * i, h])?;
            [gate_up, gate_up, self.take(&format!("{prefix}down_proj"), &[e, h, i])?]
        } else {
            let mut own = [BlockType::F32; 3];
            for x in 0..e {
                for (k, name) in ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate() {
                    let name = format!("{prefix}{x}.{name}.weight");
                    let found = self.take(&name, &[rows[k], cols[k]])?;
                    if x == 0 {
                        own[k] = found;
                    } else if own[k] != found {
                        return Err(Error::input(
                            format!("tensor {name}"),
                            format!("type {}", found.name()),
                            format!("{} as expert 0 of the layer", own[k].name()),
                        ));
                    }
                }
            }
            own
        };
        let types: [BlockType; 3] = std::array::from_fn(|k| self.fit(self.types.experts, own[k], cols[k], e));
        let mut bytes = Some(0u64);
        for k in 0..3 {
            let matrix = types[k].row_bytes(cols[k])?.checked_mul(rows[k]);
            bytes = bytes.zip(matrix).and_then(|(a, b)| a.checked_add(b));
        }
        let stride = bytes.and_then(page_up).ok_or_else(|| {
            Error::input(format!("experts of layer {layer}"), "a size beyond 64 bits", "a smaller one")
        })?;
        let source = ExpertLayer { prefix, fused, hidden, ffn: i, experts: e, types, stride };
        match self.layout {
            Layout::Packed => {
                let name = format!("blk.{layer}.{}", keys::EXPERTS_PACKED);
                let data = Data::Experts(source);
                self.items.push(Item { name, block: BlockType::I8, ne: vec![stride, e], data });
            }
            Layout::Plain => {
                for (k, part) in ["gate", "up", "down"].into_iter().enumerate() {
                    let name = format!("blk.{layer}.ffn_{part}_exps.weight");
                    let data = Data::ExpertPart(source.clone(), k);
                    self.items.push(Item { name, block: types[k], ne: vec![cols[k], rows[k], e], data });
                }
            }
        }
        Ok(())
    }

    /// `want`, or `own` where rows of `cols` elements are not whole blocks of it, for `count` matrices.
    fn fit(&mut self, want: BlockType, own: BlockType, cols: u64, count: u64) -> BlockType {
        let fits = |b: BlockType| cols.is_multiple_of(b.block_elems() as u64);
        if fits(want) {
            return want;
        }
        // Rows too short for blocks of 256 often hold blocks of 32.
        let block = if want.block_elems() > 32 && fits(BlockType::Q8_0) { BlockType::Q8_0 } else { own };
        match self.misfits.iter_mut().find(|(w, b, _)| (*w, *b) == (want, block)) {
            Some((_, _, n)) => *n += count,
            None => self.misfits.push((want, block, count)),
        }
        block
    }
}
