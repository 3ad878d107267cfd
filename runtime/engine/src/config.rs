//! Shapes of a model, read from the metadata of its file and checked against limits before anything is sized by them.

use crate::slicing::Detail;
use alloc::{format, string::String, vec::Vec};
use forerun_format::{
    BlockType, FormatError,
    gguf::{Header, Value},
    keys,
};

use forerun_kernels::scalar::CONV_WIDTH;

/// How a layer mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Gated DeltaNet.
    Delta,
    /// Gated softmax attention.
    Attention,
}

/// The text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TextConfig {
    /// Mixer of each layer.
    pub mixers: Vec<Mixer>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of embedding and head.
    pub vocab: usize,
    /// Query heads of attention layers.
    pub heads: usize,
    /// Key and value heads of attention layers.
    pub kv_heads: usize,
    /// Width of an attention head.
    pub head_dim: usize,
    /// Width of the rotated part of a head.
    pub rope_dim: usize,
    /// RoPE base frequency.
    pub rope_base: f32,
    /// Frequencies that follow T, H and W (interleaved).
    pub rope_sections: [usize; 3],
    /// Norms' epsilon.
    pub rms_eps: f32,
    /// Positions the model was trained for.
    pub context_max: usize,
    /// Key heads of delta-rule layers.
    pub delta_key_heads: usize,
    /// Value heads of delta-rule layers.
    pub delta_value_heads: usize,
    /// Width of a key head.
    pub delta_key_dim: usize,
    /// Width of a value head.
    pub delta_value_dim: usize,
    /// Width of the causal convolution.
    pub conv_width: usize,
    /// Feed-forward part.
    pub ffn: Ffn,
}

/// Feed-forward part of every layer.
#[derive(Debug, Clone, PartialEq)]
pub enum Ffn {
    /// One SwiGLU of this inner width.
    Dense {
        /// Inner width.
        inner: usize,
    },
    /// Router, routed experts and a shared expert.
    Moe(MoeConfig),
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Experts in a layer.
    pub experts: usize,
    /// Experts a token uses.
    pub top_k: usize,
    /// Inner width of a routed expert.
    pub inner: usize,
    /// Inner width of the shared expert.
    pub shared_inner: usize,
    /// Types of the gate, up and down matrices, for each layer.
    pub types: Vec<[BlockType; 3]>,
}

impl TextConfig {
    /// Channels of the convolution: q, k and v of a delta-rule layer.
    pub fn conv_channels(&self) -> usize {
        2 * self.delta_key_heads * self.delta_key_dim + self.delta_inner()
    }

    /// Width of all value heads together.
    pub fn delta_inner(&self) -> usize {
        self.delta_value_heads * self.delta_value_dim
    }

    /// Number of layers with mixer `m`.
    pub fn count(&self, m: Mixer) -> usize {
        self.mixers.iter().filter(|&&x| x == m).count()
    }

    /// The mixture of experts, if it is one.
    pub fn moe(&self) -> Option<&MoeConfig> {
        match &self.ffn {
            Ffn::Moe(m) => Some(m),
            Ffn::Dense { .. } => None,
        }
    }
}

/// The vision tower and its mergers.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    /// Width.
    pub hidden: usize,
    /// Inner width of the MLPs.
    pub inner: usize,
    /// Layers.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Side of a patch, pixels.
    pub patch: usize,
    /// Norms' epsilon.
    pub eps: f32,
    /// Side of the table of position embeddings.
    pub position_side: usize,
    /// The window merger runs after this layer; `None` if the file has none, and then 16x is not offered.
    pub insert_layer: Option<usize>,
    /// Subtracted from a channel in 0..1.
    pub mean: [f32; 3],
    /// Divides a channel after that.
    pub std: [f32; 3],
}

/// How pictures become crops and tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageConfig {
    /// A crop's area target is this squared.
    pub scale_resolution: u32,
    /// Most slices of an image.
    pub max_slices: u32,
    /// Most slices of a video frame.
    pub video_max_slices: u32,
    /// Number the images.
    pub use_image_id: bool,
    /// Mode used when none is asked for.
    pub detail: Detail,
    /// Canvas positions.
    pub canvas: bool,
}

/// Token ids with a meaning to the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenIds {
    /// Image placeholder.
    pub image: u32,
    /// Video placeholder.
    pub video: u32,
    /// `<image>`.
    pub image_start: u32,
    /// `</image>`.
    pub image_end: u32,
    /// `<slice>`.
    pub slice_start: u32,
    /// `</slice>`.
    pub slice_end: u32,
    /// A single line feed.
    pub newline: u32,
    /// Tokens that end an answer.
    pub stop: Vec<u32>,
}

/// What the checkpoint suggests for sampling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
}

/// Everything the metadata says.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `general.name`, or the architecture.
    pub name: String,
    /// Text model.
    pub text: TextConfig,
    /// Vision tower, if the file has one.
    pub vision: Option<(VisionConfig, ImageConfig)>,
    /// Token ids.
    pub tokens: TokenIds,
    /// Sampling defaults.
    pub sampling: SamplingDefaults,
}

/// Largest value accepted for any width, count or position: far above the real model, small enough that products of
/// three of them fit 64 bits.
const SIZE_MAX: u32 = 1 << 20;

/// Head widths the kernels hold on the stack.
const HEAD_DIM_MAX: usize = 256;

fn size(h: &Header<'_>, key: &str) -> Result<usize, FormatError> {
    size_value(key, h.u32(key)?)
}

fn size_value(key: &str, n: u32) -> Result<usize, FormatError> {
    if n == 0 || n > SIZE_MAX {
        return Err(FormatError::invalid(format!("key {key}"), format!("{n}"), format!("1 to {SIZE_MAX}")));
    }
    Ok(n as usize)
}

fn check(ok: bool, what: &str, found: String, expected: &str) -> Result<(), FormatError> {
    if ok { Ok(()) } else { Err(FormatError::invalid(what, found, expected)) }
}

impl Config {
    /// Reads and checks the configuration of a packed file.
    ///
    /// # Errors
    /// If a key is missing, out of range or at odds with another.
    pub fn read(h: &Header<'_>) -> Result<Self, FormatError> {
        let layout = h.str_opt(keys::LAYOUT)?;
        let versions = keys::PACKED_VERSION_MIN..=keys::PACKED_VERSION;
        if layout != Some(keys::LAYOUT_EXPERT_MAJOR) || !versions.contains(&h.u32(keys::VERSION)?) {
            return Err(FormatError::invalid(
                keys::LAYOUT,
                layout.map_or("a plain GGUF file".into(), |l| format!("{l:?}")),
                format!(
                    "\"{}\" version {} to {}, as 'forerun-quant pack' writes",
                    keys::LAYOUT_EXPERT_MAJOR,
                    keys::PACKED_VERSION_MIN,
                    keys::PACKED_VERSION
                ),
            ));
        }
        let arch = h.str_opt("general.architecture")?.unwrap_or("none");
        check(
            arch == "qwen35moe" || arch == "qwen35",
            "general.architecture",
            format!("{arch:?}"),
            "\"qwen35moe\" or \"qwen35\"",
        )?;
        let text = TextConfig::read(h, arch)?;
        let vision = if h.get("clip.vision.block_count").is_some() {
            Some((VisionConfig::read(h)?, ImageConfig::read(h)?))
        } else {
            None
        };
        let tokens = TokenIds::read(h, text.vocab, vision.is_some())?;
        let float = |key: &str, or: f32| if h.get(key).is_some() { h.f32(key) } else { Ok(or) };
        let sampling = SamplingDefaults {
            temperature: float("general.sampling.temp", 0.0)?,
            top_k: h.u32_opt("general.sampling.top_k")?.unwrap_or(0),
            top_p: float("general.sampling.top_p", 1.0)?,
        };
        check(
            sampling.temperature >= 0.0 && sampling.top_p > 0.0 && sampling.top_p <= 1.0,
            "general.sampling",
            format!("{sampling:?}"),
            "a temperature of at least 0 and top_p in (0, 1]",
        )?;
        Ok(Self { name: h.str_opt("general.name")?.unwrap_or(arch).into(), text, vision, tokens, sampling })
    }
}

impl TextConfig {
    fn read(h: &Header<'_>, arch: &str) -> Result<Self, FormatError> {
        let key = |s: &str| format!("{arch}.{s}");
        let size = |s: &str| size(h, &key(s));
        let layers = size("block_count")?;
        check(layers <= 1024, &key("block_count"), format!("{layers}"), "at most 1024")?;
        let value_heads = size("ssm.time_step_rank")?;
        let inner = size("ssm.inner_size")?;
        check(
            inner.is_multiple_of(value_heads),
            &key("ssm.inner_size"),
            format!("{inner}"),
            "a multiple of ssm.time_step_rank",
        )?;
        let sections = h.u32_array(&key("rope.dimension_sections"), 4)?;
        let ffn = if arch == "qwen35moe" {
            let experts = size("expert_count")?;
            check(experts <= 4096, &key("expert_count"), format!("{experts}"), "at most 4096")?;
            let mut types = Vec::new();
            let ids = keys::EXPERT_TYPES.map(|k| h.u32_array(k, layers));
            let [gate, up, down] = ids;
            let (gate, up, down) = (gate?, up?, down?);
            for l in 0..layers {
                let block = |id: u32| {
                    BlockType::from_id(id).filter(|&b| b != BlockType::I8).ok_or_else(|| {
                        FormatError::invalid(
                            format!("type of the experts of layer {l}"),
                            format!("{id}"),
                            "a type this build knows",
                        )
                    })
                };
                types.push([block(gate[l])?, block(up[l])?, block(down[l])?]);
            }
            Ffn::Moe(MoeConfig {
                experts,
                top_k: size("expert_used_count")?,
                inner: size("expert_feed_forward_length")?,
                shared_inner: size("expert_shared_feed_forward_length")?,
                types,
            })
        } else {
            Ffn::Dense { inner: size("feed_forward_length")? }
        };
        let c = Self {
            mixers: mixers(h, arch, layers)?,
            hidden: size("embedding_length")?,
            vocab: h.tensor("token_embd.weight").map_or(0, |t| t.ne[1]) as usize,
            heads: size("attention.head_count")?,
            kv_heads: size("attention.head_count_kv")?,
            head_dim: size("attention.key_length")?,
            rope_dim: size("rope.dimension_count")?,
            rope_base: h.f32(&key("rope.freq_base"))?,
            rope_sections: [sections[0] as usize, sections[1] as usize, sections[2] as usize],
            rms_eps: h.f32(&key("attention.layer_norm_rms_epsilon"))?,
            context_max: size("context_length")?,
            delta_key_heads: size("ssm.group_count")?,
            delta_value_heads: value_heads,
            delta_key_dim: size("ssm.state_size")?,
            delta_value_dim: inner / value_heads,
            conv_width: size("ssm.conv_kernel")?,
            ffn,
        };
        c.check(arch)?;
        Ok(c)
    }

    fn check(&self, arch: &str) -> Result<(), FormatError> {
        let key = |s: &str| format!("{arch}.{s}");
        if self.vocab == 0 {
            return Err(FormatError::MissingTensor("token_embd.weight".into()));
        }
        check(
            self.vocab <= SIZE_MAX as usize,
            "rows of token_embd.weight",
            format!("{}", self.vocab),
            "at most 1048576",
        )?;
        check(
            self.heads.is_multiple_of(self.kv_heads),
            &key("attention.head_count"),
            format!("{}", self.heads),
            "a multiple of attention.head_count_kv",
        )?;
        check(
            self.head_dim <= HEAD_DIM_MAX && self.delta_value_dim <= HEAD_DIM_MAX && self.delta_key_dim <= HEAD_DIM_MAX,
            "width of a head",
            format!("{}, {}, {}", self.head_dim, self.delta_key_dim, self.delta_value_dim),
            "at most 256",
        )?;
        check(
            self.rope_dim <= self.head_dim
                && self.rope_dim.is_multiple_of(2)
                && self.rope_sections.iter().sum::<usize>() == self.rope_dim / 2,
            &key("rope.dimension_sections"),
            format!("{:?} for {} dimensions", self.rope_sections, self.rope_dim),
            "sections that add up to half the rotated dimensions",
        )?;
        check(
            self.rope_base.is_finite() && self.rope_base > 1.0,
            &key("rope.freq_base"),
            format!("{}", self.rope_base),
            "above 1",
        )?;
        check(
            self.rms_eps > 0.0 && self.rms_eps < 1.0,
            &key("attention.layer_norm_rms_epsilon"),
            format!("{}", self.rms_eps),
            "above 0 and below 1",
        )?;
        check(
            self.delta_value_heads.is_multiple_of(self.delta_key_heads),
            &key("ssm.time_step_rank"),
            format!("{}", self.delta_value_heads),
            "a multiple of ssm.group_count",
        )?;
        check(self.conv_width == CONV_WIDTH, &key("ssm.conv_kernel"), format!("{}", self.conv_width), "4")?;
        if let Some(m) = self.moe() {
            check(
                m.top_k <= m.experts && m.top_k <= crate::router::TOP_K_MAX,
                &key("expert_used_count"),
                format!("{} of {}", m.top_k, m.experts),
                "at most 32 and at most expert_count",
            )?;
        }
        Ok(())
    }
}

fn mixers(h: &Header<'_>, arch: &str, layers: usize) -> Result<Vec<Mixer>, FormatError> {
    let key = format!("{arch}.attention.recurrent_layers");
    if h.get(&key).is_some() {
        let a = h.array(&key)?;
        let m: Vec<Mixer> = a
            .iter()
            .filter_map(|v| match v {
                Value::Bool(recurrent) => Some(if recurrent { Mixer::Delta } else { Mixer::Attention }),
                _ => None,
            })
            .collect();
        check(m.len() == layers, &key, format!("{} booleans", m.len()), "one boolean a layer")?;
        return Ok(m);
    }
    let interval = h.u32_opt(&format!("{arch}.full_attention_interval"))?.unwrap_or(4);
    let interval = size_value("full_attention_interval", interval)?;
    Ok((0..layers).map(|l| if (l + 1) % interval == 0 { Mixer::Attention } else { Mixer::Delta }).collect())
}

impl VisionConfig {
    fn read(h: &Header<'_>) -> Result<Self, FormatError> {
        let triple = |key: &str| -> Result<[f32; 3], FormatError> {
            let a = h.array(key)?;
            let mut out = [0f32; 3];
            let mut n = 0;
            for (o, v) in out.iter_mut().zip(a.iter()) {
                if let Value::Float(x) = v {
                    *o = x as f32;
                    n += 1;
                }
            }
            check(a.len() == 3 && n == 3, key, format!("{} elements", a.len()), "three floats")?;
            Ok(out)
        };
        let c = Self {
            hidden: size(h, "clip.vision.embedding_length")?,
            inner: size(h, "clip.vision.feed_forward_length")?,
            layers: size(h, "clip.vision.block_count")?,
            heads: size(h, "clip.vision.attention.head_count")?,
            patch: size(h, "clip.vision.patch_size")?,
            eps: h.f32("clip.vision.attention.layer_norm_epsilon")?,
            position_side: size(h, keys::VISION_POSITION_SIDE)?,
            insert_layer: h.u32_opt(keys::VISION_INSERT_LAYER)?.map(|l| l as usize),
            mean: triple("clip.vision.image_mean")?,
            std: triple("clip.vision.image_std")?,
        };
        check(c.layers <= 1024, "clip.vision.block_count", format!("{}", c.layers), "at most 1024")?;
        check(c.patch <= 64, "clip.vision.patch_size", format!("{}", c.patch), "at most 64")?;
        check(c.position_side <= 1024, keys::VISION_POSITION_SIDE, format!("{}", c.position_side), "at most 1024")?;
        check(
            c.hidden.is_multiple_of(c.heads) && c.hidden / c.heads <= HEAD_DIM_MAX,
            "clip.vision.attention.head_count",
            format!("{} for width {}", c.heads, c.hidden),
            "a divisor of the width, heads of at most 256",
        )?;
        check(
            c.insert_layer.is_none_or(|l| l < c.layers),
            keys::VISION_INSERT_LAYER,
            format!("{:?}", c.insert_layer),
            "a layer of the tower",
        )?;
        check(
            c.eps > 0.0 && c.eps < 1.0,
            "clip.vision.attention.layer_norm_epsilon",
            format!("{}", c.eps),
            "above 0 and below 1",
        )?;
        check(c.mean.iter().all(|m| m.is_finite()), "clip.vision.image_mean", format!("{:?}", c.mean), "numbers")?;
        let positive = |s: &f32| *s > 0.0 && s.is_finite();
        check(c.std.iter().all(positive), "clip.vision.image_std", format!("{:?}", c.std), "positive numbers")?;
        Ok(c)
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Width of a layer's MLP, filled up to whole blocks of 32 as packed files may have it.
    pub fn inner_filled(&self) -> usize {
        self.inner.next_multiple_of(32)
    }

    /// Values in a patch: 3 channels of `patch × patch` pixels.
    pub fn patch_values(&self) -> usize {
        3 * self.patch * self.patch
    }
}

impl ImageConfig {
    fn read(h: &Header<'_>) -> Result<Self, FormatError> {
        let detail = h.str_opt(keys::IMAGE_DETAIL)?.unwrap_or("16x");
        let c = Self {
            scale_resolution: h.u32(keys::IMAGE_SCALE_RESOLUTION)?,
            max_slices: h.u32(keys::IMAGE_MAX_SLICES)?,
            video_max_slices: h.u32(keys::VIDEO_MAX_SLICES)?,
            use_image_id: h.bool_opt(keys::IMAGE_USE_ID)?.unwrap_or(true),
            detail: Detail::parse(detail)
                .ok_or_else(|| FormatError::invalid(keys::IMAGE_DETAIL, format!("{detail:?}"), "\"16x\" or \"4x\""))?,
            canvas: h.bool_opt(keys::MROPE_CANVAS)?.unwrap_or(false),
        };
        check(
            (28..=4096).contains(&c.scale_resolution),
            keys::IMAGE_SCALE_RESOLUTION,
            format!("{}", c.scale_resolution),
            "28 to 4096",
        )?;
        check(
            (1..=64).contains(&c.max_slices) && (1..=64).contains(&c.video_max_slices),
            keys::IMAGE_MAX_SLICES,
            format!("{} and {}", c.max_slices, c.video_max_slices),
            "1 to 64",
        )?;
        Ok(c)
    }
}

impl TokenIds {
    fn read(h: &Header<'_>, vocab: usize, vision: bool) -> Result<Self, FormatError> {
        let id = |key: &str| -> Result<u32, FormatError> {
            // A text-only file has no placeholders; u32::MAX is no token.
            let Some(id) = h.u32_opt(key)? else {
                return if vision { Err(FormatError::MissingKey(key.into())) } else { Ok(u32::MAX) };
            };
            check((id as usize) < vocab, key, format!("{id}"), "a token of the vocabulary")?;
            Ok(id)
        };
        let stop = h.array(keys::TOKEN_STOP)?;
        Ok(Self {
            image: id(keys::TOKEN_IMAGE)?,
            video: id(keys::TOKEN_VIDEO)?,
            image_start: id(keys::TOKEN_IMAGE_START)?,
            image_end: id(keys::TOKEN_IMAGE_END)?,
            slice_start: id(keys::TOKEN_SLICE_START)?,
            slice_end: id(keys::TOKEN_SLICE_END)?,
            newline: id(keys::TOKEN_NEWLINE)?,
            stop: h.u32_array(keys::TOKEN_STOP, stop.len().min(16))?,
        })
    }
}
