//! The tensor directory: where each weight lies in the resident region, or in the file for embedding rows and experts.

use crate::config::{Config, Ffn, Mixer};
pub use crate::stream::{VisionName, VisionTensor};
use alloc::{format, string::String, vec::Vec};
use core::ops::Range;
use forerun_format::{
    BlockType, FormatError, PAGE,
    gguf::{Header, Tensor},
    keys, page_up,
};
use forerun_kernels::KernelSet;

/// A matrix in the resident region.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    /// Element type.
    pub block: BlockType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Offset of its first byte in the resident region.
    pub at: usize,
}

impl Matrix {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols / self.block.block_elems() * self.block.block_bytes()
    }

    /// Its bytes.
    pub fn bytes<'a>(&self, resident: &'a [u8]) -> &'a [u8] {
        &resident[self.at..][..self.rows * self.row_bytes()]
    }
}

/// A vector of f32 in the resident region.
#[derive(Debug, Clone, Copy)]
pub struct Vector {
    /// Elements.
    pub len: usize,
    /// Offset of its first byte in the resident region.
    pub at: usize,
}

impl Vector {
    /// Its elements.
    pub fn f32<'a>(&self, resident: &'a [u8]) -> &'a [f32] {
        bytemuck::cast_slice(&resident[self.at..][..self.len * 4])
    }
}

/// Weight and bias of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// `(out, in)`.
    pub w: Matrix,
    /// `(out)`.
    pub b: Vector,
}

/// Scale and shift of a layer norm.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// Scale.
    pub w: Vector,
    /// Shift.
    pub b: Vector,
}

/// Gate, up and down matrices of a SwiGLU.
#[derive(Debug, Clone, Copy)]
pub struct Swiglu {
    /// `(inner, hidden)`.
    pub gate: Matrix,
    /// `(inner, hidden)`.
    pub up: Matrix,
    /// `(hidden, inner)`.
    pub down: Matrix,
}

/// Token mixer of a layer.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, clippy::large_enum_variant)] // names are GGUF's; shapes in docs/model-file.md
pub enum MixerWeights {
    Delta {
        qkv: Matrix,
        gate: Matrix,
        alpha: Matrix,
        beta: Matrix,
        conv: Vector,
        a: Vector,
        dt: Vector,
        norm: Vector,
        out: Matrix,
    },
    Attention {
        q: Matrix,
        k: Matrix,
        v: Matrix,
        q_norm: Vector,
        k_norm: Vector,
        out: Matrix,
    },
}

/// Feed-forward part of a layer.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum FfnWeights {
    Dense(Swiglu),
    Moe { router: Matrix, shared_gate: Vector, shared: Swiglu },
}

/// One layer of the text model.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Layer {
    pub attn_norm: Vector,
    pub mixer: MixerWeights,
    pub ffn_norm: Vector,
    pub ffn: FfnWeights,
}

/// One layer of the vision tower.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct VisionLayer {
    pub ln1: Norm,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub out: Linear,
    pub ln2: Norm,
    pub fc1: Linear,
    pub fc2: Linear,
}

/// The merger of 2×2 windows inside the tower.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct WindowMerger {
    pub ln1: Norm,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub out: Linear,
    pub pre_norm: Norm,
    pub fc1: Linear,
    pub fc2: Linear,
}

/// The vision tower.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct VisionWeights {
    pub patch: Linear,
    pub positions: Matrix,
    pub layers: Vec<VisionLayer>,
    pub window_merger: Option<WindowMerger>,
    pub post_norm: Norm,
    pub merger_norm: Norm,
    pub merger_fc1: Linear,
    pub merger_fc2: Linear,
    /// All its tensors in the order of use.
    pub order: Vec<VisionTensor>,
    /// Those of them that are the window merger's.
    pub merger: Range<usize>,
}

/// The packed experts of one layer, in the file.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBank {
    /// Offset of expert 0 in the file.
    pub offset: u64,
    /// Bytes from one expert to the next, and to read for one.
    pub stride: usize,
}

/// All weights of a model.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Offset of the resident region in the file, a multiple of 4096.
    pub resident_offset: u64,
    /// Its bytes, a multiple of 4096.
    pub resident_bytes: usize,
    /// Of these, the first that hold all but the vision tower, a multiple of 4096.
    pub text_bytes: usize,
    /// Checksums of the tensors in it, by offset.
    checks: Vec<Check>,
    /// Type of the embedding, and offset of its first row in the file.
    pub embedding: (BlockType, u64),
    /// Text layers.
    pub layers: Vec<Layer>,
    /// Final norm.
    pub output_norm: Vector,
    /// Head, `(vocab, hidden)`; the embedding itself where it is tied.
    pub output: Matrix,
    /// Vision tower.
    pub vision: Option<VisionWeights>,
    /// Experts of each layer; empty for a dense model.
    pub banks: Vec<ExpertBank>,
    /// CRC32C of each expert, layer by layer.
    pub expert_crc: Vec<u32>,
}

/// Checksum of a resident tensor.
#[derive(Debug, Clone)]
struct Check {
    name: String,
    /// Offset in the resident region.
    at: usize,
    bytes: usize,
    crc: u32,
}

struct Finder<'h, 'a> {
    header: &'h Header<'a>,
    resident_offset: u64,
    resident_end: u64,
    checks: &'h [Check],
}

impl Finder<'_, '_> {
    fn resident(&self, name: &str, ne: &[usize]) -> Result<(BlockType, usize), FormatError> {
        let t = self.header.tensor(name).ok_or_else(|| FormatError::MissingTensor(name.into()))?;
        let mut want = [1u64; 4];
        for (w, n) in want.iter_mut().zip(ne) {
            *w = *n as u64;
        }
        if t.ne != want {
            return Err(FormatError::invalid(format!("shape of tensor {name}"), t.shape_text(), format!("{ne:?}")));
        }
        if t.offset < self.resident_offset || t.offset + t.bytes > self.resident_end {
            return Err(FormatError::invalid(
                format!("place of tensor {name}"),
                format!("offset {}", t.offset),
                "among the resident tensors, before embedding rows and experts",
            ));
        }
        Ok((t.block_type()?, (t.offset - self.resident_offset) as usize))
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, FormatError> {
        self.matrix_of(name, &[cols, rows], rows, cols)
    }

    /// The tensor of shape `ne` as a matrix.
    fn matrix_of(&self, name: &str, ne: &[usize], rows: usize, cols: usize) -> Result<Matrix, FormatError> {
        let (block, at) = self.resident(name, ne)?;
        if block == BlockType::I8 {
            return Err(FormatError::invalid(format!("type of tensor {name}"), "i8", "a type of weights"));
        }
        Ok(Matrix { block, rows, cols, at })
    }

    fn vector(&self, name: &str, ne: &[usize]) -> Result<Vector, FormatError> {
        let (block, at) = self.resident(name, ne)?;
        if block != BlockType::F32 {
            return Err(FormatError::invalid(format!("type of tensor {name}"), block.name(), "f32"));
        }
        Ok(Vector { len: ne.iter().product(), at })
    }

    fn linear(&self, name: &str, rows: usize, cols: usize) -> Result<Linear, FormatError> {
        Ok(Linear {
            w: self.matrix(&format!("{name}.weight"), rows, cols)?,
            b: self.vector(&format!("{name}.bias"), &[rows])?,
        })
    }

    fn norm(&self, name: &str, n: usize) -> Result<Norm, FormatError> {
        Ok(Norm { w: self.vector(&format!("{name}.weight"), &[n])?, b: self.vector(&format!("{name}.bias"), &[n])? })
    }

    fn swiglu(&self, name: &str, suffix: &str, inner: usize, hidden: usize) -> Result<Swiglu, FormatError> {
        Ok(Swiglu {
            gate: self.matrix(&format!("{name}.ffn_gate{suffix}.weight"), inner, hidden)?,
            up: self.matrix(&format!("{name}.ffn_up{suffix}.weight"), inner, hidden)?,
            down: self.matrix(&format!("{name}.ffn_down{suffix}.weight"), hidden, inner)?,
        })
    }

    fn layer(&self, c: &Config, l: usize) -> Result<Layer, FormatError> {
        let t = &c.text;
        let h = t.hidden;
        let name = format!("blk.{l}");
        let matrix = |s: &str, rows, cols| self.matrix(&format!("{name}.{s}.weight"), rows, cols);
        let vector = |s: &str, ne: &[usize]| self.vector(&format!("{name}.{s}"), ne);
        let mixer = match t.mixers[l] {
            Mixer::Delta => MixerWeights::Delta {
                qkv: matrix("attn_qkv", t.conv_channels(), h)?,
                gate: matrix("attn_gate", t.delta_inner(), h)?,
                alpha: matrix("ssm_alpha", t.delta_value_heads, h)?,
                beta: matrix("ssm_beta", t.delta_value_heads, h)?,
                conv: vector("ssm_conv1d.weight", &[t.conv_width, t.conv_channels()])?,
                a: vector("ssm_a", &[t.delta_value_heads])?,
                dt: vector("ssm_dt.bias", &[t.delta_value_heads])?,
                norm: vector("ssm_norm.weight", &[t.delta_value_dim])?,
                out: matrix("ssm_out", h, t.delta_inner())?,
            },
            Mixer::Attention => MixerWeights::Attention {
                q: matrix("attn_q", 2 * t.heads * t.head_dim, h)?,
                k: matrix("attn_k", t.kv_heads * t.head_dim, h)?,
                v: matrix("attn_v", t.kv_heads * t.head_dim, h)?,
                q_norm: vector("attn_q_norm.weight", &[t.head_dim])?,
                k_norm: vector("attn_k_norm.weight", &[t.head_dim])?,
                out: matrix("attn_output", h, t.heads * t.head_dim)?,
            },
        };
        let ffn = match &t.ffn {
            Ffn::Dense { inner } => FfnWeights::Dense(self.swiglu(&name, "", *inner, h)?),
            Ffn::Moe(m) => FfnWeights::Moe {
                router: matrix("ffn_gate_inp", m.experts, h)?,
                shared_gate: vector("ffn_gate_inp_shexp.weight", &[h])?,
                shared: self.swiglu(&name, "_shexp", m.shared_inner, h)?,
            },
        };
        Ok(Layer {
            attn_norm: vector("attn_norm.weight", &[h])?,
            mixer,
            ffn_norm: vector("post_attention_norm.weight", &[h])?,
            ffn,
        })
    }

    fn vision(&self, c: &Config) -> Result<Option<VisionWeights>, FormatError> {
        let Some((v, _)) = &c.vision else { return Ok(None) };
        let (d, f) = (v.hidden, v.inner);
        let mut layers = Vec::new();
        for l in 0..v.layers {
            let name = |s: &str| format!("v.blk.{l}.{s}");
            // The MLP may be filled up with zeros to whole blocks.
            let up = self.header.tensor(&name("ffn_up.weight"));
            let filled = up.is_some_and(|t| t.ne[1] == v.inner_filled() as u64);
            let width = if filled { v.inner_filled() } else { f };
            layers.push(VisionLayer {
                ln1: self.norm(&name("ln1"), d)?,
                q: self.linear(&name("attn_q"), d, d)?,
                k: self.linear(&name("attn_k"), d, d)?,
                v: self.linear(&name("attn_v"), d, d)?,
                out: self.linear(&name("attn_out"), d, d)?,
                ln2: self.norm(&name("ln2"), d)?,
                fc1: self.linear(&name("ffn_up"), width, d)?,
                fc2: self.linear(&name("ffn_down"), d, width)?,
            });
        }
        let window_merger = match v.insert_layer {
            None => None,
            Some(_) => Some(WindowMerger {
                ln1: self.norm("v.vit_merger.ln1", d)?,
                q: self.linear("v.vit_merger.attn_q", d, d)?,
                k: self.linear("v.vit_merger.attn_k", d, d)?,
                v: self.linear("v.vit_merger.attn_v", d, d)?,
                out: self.linear("v.vit_merger.attn_out", d, d)?,
                pre_norm: self.norm("v.vit_merger.ds_ln", 4 * d)?,
                fc1: self.linear("v.vit_merger.ds_ffn_up", 4 * f, 4 * d)?,
                fc2: self.linear("v.vit_merger.ds_ffn_down", d, 4 * f)?,
            }),
        };
        // The patch kernel is (out, channel, y, x): a matrix over patches in that order.
        let patch = self.matrix_of("v.patch_embd.weight", &[v.patch, v.patch, 3, d], d, v.patch_values())?;
        let mut w = VisionWeights {
            patch: Linear { w: patch, b: self.vector("v.patch_embd.bias", &[d])? },
            positions: self.matrix("v.position_embd.weight", v.position_side * v.position_side, d)?,
            layers,
            window_merger,
            post_norm: self.norm("v.post_ln", d)?,
            merger_norm: self.norm("mm.input_norm", 4 * d)?,
            merger_fc1: self.linear("mm.up", 4 * d, 4 * d)?,
            merger_fc2: self.linear("mm.down", c.text.hidden, 4 * d)?,
            order: Vec::new(),
            merger: 0..0,
        };
        (w.order, w.merger) = crate::stream::order(&w, v.insert_layer);
        for t in &mut w.order {
            let at = self.checks.binary_search_by_key(&t.at, |c| c.at);
            t.crc = at.map_or(0, |i| self.checks[i].crc);
        }
        Ok(Some(w))
    }
}

fn is_resident(t: &Tensor<'_>, tied: bool) -> bool {
    !t.name.ends_with(keys::EXPERTS_PACKED) && (tied || t.name != "token_embd.weight")
}

fn is_vision(t: &Tensor<'_>) -> bool {
    t.name.starts_with("v.") || t.name.starts_with("mm.")
}

impl Weights {
    /// Finds every tensor the model needs and checks its shape, type and place.
    ///
    /// # Errors
    /// If one is missing, of another shape or type, or lies where it should not.
    pub fn read(header: &Header<'_>, c: &Config) -> Result<Self, FormatError> {
        let tied = header.tensor("output.weight").is_none();
        let mut start = u64::MAX;
        let mut end = 0;
        let mut padded = 0u64;
        let mut text_end = 0;
        for t in header.tensors().iter().filter(|t| is_resident(t, tied)) {
            start = start.min(t.offset);
            // Inside the file, so neither sum overflows.
            let t_end = page_up(t.offset + t.bytes).unwrap_or(u64::MAX);
            end = end.max(t_end);
            if !is_vision(t) {
                text_end = text_end.max(t_end);
            }
            padded = padded.saturating_add(page_up(t.bytes).unwrap_or(u64::MAX));
        }
        if header.alignment != PAGE || start % PAGE != 0 || end - start.min(end) != padded {
            return Err(FormatError::invalid(
                "order of the data",
                format!(
                    "{padded} bytes of resident tensors between offsets {start} and {end}, alignment {}",
                    header.alignment
                ),
                "resident tensors next to one another on 4 KiB boundaries, as 'forerun-quant pack' writes them",
            ));
        }
        let crcs = header.u32_array(keys::CRC_TENSORS, header.tensors().len())?;
        let resident = header.tensors().iter().zip(crcs).filter(|(t, _)| is_resident(t, tied));
        let check = |(t, crc): (&Tensor<'_>, u32)| Check {
            name: t.name.into(),
            at: (t.offset - start) as usize,
            bytes: t.bytes as usize,
            crc,
        };
        let mut checks: Vec<_> = resident.map(check).collect();
        checks.sort_unstable_by_key(|c| c.at);
        let find = Finder { header, resident_offset: start, resident_end: end, checks: &checks };
        let (vocab, hidden) = (c.text.vocab, c.text.hidden);
        let embd =
            header.tensor("token_embd.weight").ok_or_else(|| FormatError::MissingTensor("token_embd.weight".into()))?;
        if embd.ne != [hidden as u64, vocab as u64, 1, 1] || embd.block_type()? == BlockType::I8 {
            return Err(FormatError::invalid(
                "tensor token_embd.weight",
                format!("{} of type {}", embd.shape_text(), embd.type_id),
                format!("[{hidden}, {vocab}] of a type of weights"),
            ));
        }
        let banks = match &c.text.ffn {
            Ffn::Dense { .. } => Vec::new(),
            Ffn::Moe(_) => (0..c.text.mixers.len()).map(|l| bank(header, c, l)).collect::<Result<_, _>>()?,
        };
        let expert_crc = match &c.text.ffn {
            Ffn::Dense { .. } => Vec::new(),
            Ffn::Moe(m) => header.u32_array(keys::CRC_EXPERTS, m.experts * banks.len())?,
        };
        Ok(Self {
            text_bytes: text_end.saturating_sub(start) as usize,
            resident_offset: start,
            resident_bytes: usize::try_from(end - start).map_err(|_| {
                FormatError::invalid("resident tensors", format!("{} bytes", end - start), "what fits memory")
            })?,
            embedding: (embd.block_type()?, embd.offset),
            layers: (0..c.text.mixers.len()).map(|l| find.layer(c, l)).collect::<Result<_, _>>()?,
            output_norm: find.vector("output_norm.weight", &[hidden])?,
            output: find.matrix(if tied { "token_embd.weight" } else { "output.weight" }, vocab, hidden)?,
            vision: find.vision(c)?,
            banks,
            expert_crc,
            checks,
        })
    }

    /// Compares every tensor in `resident`, the region or its first bytes, with its checksum.
    ///
    /// # Errors
    /// The name of the first that differs, its checksum, and the one the file's header gives.
    pub fn check_resident(&self, kernels: &KernelSet, resident: &[u8]) -> Result<(), (String, u32, u32)> {
        for c in &self.checks {
            let Some(bytes) = resident.get(c.at..c.at + c.bytes) else { continue };
            let found = (kernels.crc32c)(bytes);
            if found != c.crc {
                return Err((c.name.clone(), found, c.crc));
            }
        }
        Ok(())
    }

    /// Bytes of the resident region behind all that text needs: the vision tower and its mergers.
    pub fn vision_bytes(&self) -> usize {
        self.resident_bytes - self.text_bytes
    }

    /// Largest expert stride, 0 for a dense model.
    pub fn slot_bytes(&self) -> usize {
        self.banks.iter().map(|b| b.stride).max().unwrap_or(0)
    }
}

/// The gate, up and down matrices inside an expert of layer `l`, and their total bytes; `None` if their types do not fit
/// their shapes, or the model is dense.
pub fn expert_matrices(c: &Config, l: usize) -> Option<([Matrix; 3], usize)> {
    let m = c.text.moe()?;
    let (h, i) = (c.text.hidden, m.inner);
    let mut at = 0usize;
    let mut out = [Matrix { block: BlockType::F32, rows: 0, cols: 0, at: 0 }; 3];
    for (o, (block, (rows, cols))) in out.iter_mut().zip(m.types[l].into_iter().zip([(i, h), (i, h), (h, i)])) {
        // Kernels read f32 and block scales in place, so a matrix starts on a multiple of four bytes.
        if !cols.is_multiple_of(block.block_elems()) || !at.is_multiple_of(4) {
            return None;
        }
        *o = Matrix { block, rows, cols, at };
        at = at.checked_add(rows.checked_mul(o.row_bytes())?)?;
    }
    Some((out, at))
}

fn bank(header: &Header<'_>, c: &Config, l: usize) -> Result<ExpertBank, FormatError> {
    let name = format!("blk.{l}.{}", keys::EXPERTS_PACKED);
    let t = header.tensor(&name).ok_or_else(|| FormatError::MissingTensor(name.clone()))?;
    let experts = c.text.moe().map_or(0, |m| m.experts) as u64;
    let want = expert_matrices(c, l).and_then(|(_, bytes)| page_up(bytes as u64));
    if t.block_type()? != BlockType::I8
        || want.is_none_or(|stride| t.ne != [stride, experts, 1, 1])
        || t.ne[0] > 1 << 30
    {
        return Err(FormatError::invalid(
            format!("tensor {name}"),
            format!("{} of type {}", t.shape_text(), t.type_id),
            match want {
                Some(stride) => format!("[{stride}, {experts}] of type i8"),
                None => "expert types whose rows are whole blocks".into(),
            },
        ));
    }
    Ok(ExpertBank { offset: t.offset, stride: t.ne[0] as usize })
}
