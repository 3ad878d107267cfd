//! `config.json`, `processor_config.json` and `generation_config.json`, checked: every number is in range, so shapes
//! computed from them cannot overflow. Names and defaults are those of transformers 5.24.

use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
};
use serde::Deserialize;

/// Largest width, count or table size accepted; products of three still fit 64 bits.
const SIZE_MAX: u64 = 1 << 20;

/// Mixture of experts.
#[derive(Debug, Clone)]
pub struct Moe {
    /// Experts in each layer.
    pub experts: u64,
    /// Experts each token uses.
    pub experts_used: u64,
    /// Rows of an expert's gate and up matrices.
    pub expert_ffn: u64,
    /// The same of the shared expert.
    pub shared_ffn: u64,
}

/// Feed-forward part of the text layers.
#[derive(Debug, Clone)]
pub enum Ffn {
    /// One MLP with this many rows.
    Dense(u64),
    /// Routed experts and one shared expert.
    Moe(Moe),
}

/// The text model. Sizes in elements.
#[derive(Debug, Clone)]
pub struct Text {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    /// Layer i has full attention if (i + 1) is a multiple of this, else a gated delta rule.
    pub(crate) full_attention_interval: u64,
    pub(crate) key_heads: u64,
    pub(crate) value_heads: u64,
    pub(crate) key_dim: u64,
    pub(crate) value_dim: u64,
    pub(crate) conv_kernel: u64,
    pub(crate) context: u64,
    pub(crate) norm_eps: f32,
    pub(crate) rope_base: f32,
    pub(crate) rope_dims: u64,
    pub(crate) rope_sections: [u64; 3],
    pub(crate) ffn: Ffn,
    /// The checkpoint says that the head is the embedding.
    pub(crate) tied: bool,
    pub(crate) eos: Option<u64>,
    pub(crate) pad: Option<u64>,
}

impl Text {
    /// GGUF's name of the architecture.
    pub(crate) fn arch(&self) -> &'static str {
        match self.ffn {
            Ffn::Dense(_) => "qwen35",
            Ffn::Moe(_) => "qwen35moe",
        }
    }

    /// Whether layer `i` has full attention.
    pub(crate) fn is_full(&self, i: u64) -> bool {
        (i + 1).is_multiple_of(self.full_attention_interval)
    }
}

/// The vision tower and merger. Sizes in elements.
#[derive(Debug, Clone)]
pub struct Vision {
    pub(crate) hidden: u64,
    pub(crate) ffn: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) patch: u64,
    pub(crate) position_side: u64,
    pub(crate) insert_layer: u64,
    pub(crate) norm_eps: f32,
}

/// How pictures are prepared.
#[derive(Debug, Clone)]
pub struct Images {
    pub(crate) scale_resolution: u64,
    pub(crate) max_slices: u64,
    pub(crate) video_max_slices: u64,
    pub(crate) use_id: bool,
    pub(crate) detail: String,
    pub(crate) mean: [f32; 3],
    pub(crate) std: [f32; 3],
}

/// Token ids that `config.json` names; what it leaves out is looked up in the tokenizer.
#[derive(Debug, Clone, Default)]
pub struct Markers {
    pub(crate) image: Option<u64>,
    pub(crate) video: Option<u64>,
    pub(crate) image_start: Option<u64>,
    pub(crate) image_end: Option<u64>,
    pub(crate) slice_start: Option<u64>,
    pub(crate) slice_end: Option<u64>,
    pub(crate) newline: Option<u64>,
}

/// What a model with eyes has beyond text.
#[derive(Debug, Clone)]
pub struct Multimodal {
    pub(crate) vision: Vision,
    pub(crate) images: Images,
    pub(crate) markers: Markers,
    /// Canvas M-RoPE positions (4.7), else one-dimensional ones (4.6).
    pub(crate) canvas: bool,
}

/// Defaults for sampling; temperature 0 is greedy.
#[derive(Debug, Clone)]
pub struct Generation {
    pub(crate) temp: f32,
    pub(crate) top_p: f32,
    pub(crate) top_k: u64,
    pub(crate) eos: Vec<u64>,
}

/// Everything that a checkpoint's JSON says about the model.
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) text: Text,
    pub(crate) multimodal: Option<Multimodal>,
    pub(crate) generation: Generation,
}

#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    text_config: Option<RawText>,
    vision_config: Option<RawVision>,
    insert_layer_id: Option<u64>,
    image_token_id: Option<u64>,
    video_token_id: Option<u64>,
    image_start_id: Option<u64>,
    image_end_id: Option<u64>,
    slice_start_id: Option<u64>,
    slice_end_id: Option<u64>,
    newline_id: Option<u64>,
    tie_word_embeddings: Option<bool>,
    downsample_mode: Option<String>,
}

#[derive(Deserialize)]
struct RawText {
    model_type: Option<String>,
    vocab_size: Option<u64>,
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    max_position_embeddings: Option<u64>,
    rms_norm_eps: Option<f64>,
    linear_num_key_heads: Option<u64>,
    linear_num_value_heads: Option<u64>,
    linear_key_head_dim: Option<u64>,
    linear_value_head_dim: Option<u64>,
    linear_conv_kernel_dim: Option<u64>,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<u64>,
    rope_parameters: Option<RawRope>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    num_experts: Option<u64>,
    num_experts_per_tok: Option<u64>,
    moe_intermediate_size: Option<u64>,
    shared_expert_intermediate_size: Option<u64>,
    tie_word_embeddings: Option<bool>,
    eos_token_id: Option<OneOrMany>,
    pad_token_id: Option<u64>,
}

#[derive(Deserialize, Default)]
struct RawRope {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    mrope_interleaved: Option<bool>,
    mrope_section: Option<Vec<u64>>,
}

#[derive(Deserialize)]
struct RawVision {
    hidden_size: Option<u64>,
    intermediate_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    num_attention_heads: Option<u64>,
    num_channels: Option<u64>,
    image_size: Option<u64>,
    patch_size: Option<u64>,
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    insert_layer_id: Option<u64>,
    window_kernel_size: Option<[u64; 2]>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u64),
    Many(Vec<u64>),
}

impl OneOrMany {
    fn list(this: Option<&Self>) -> Vec<u64> {
        match this {
            None => Vec::new(),
            Some(Self::One(x)) => vec![*x],
            Some(Self::Many(v)) => v.clone(),
        }
    }
}

#[derive(Deserialize, Default)]
struct RawProcessor {
    image_processor: Option<RawImages>,
    video_processor: Option<RawImages>,
}

#[derive(Deserialize, Default)]
struct RawImages {
    scale_resolution: Option<u64>,
    max_slice_nums: Option<u64>,
    slice_mode: Option<bool>,
    use_image_id: Option<bool>,
    downsample_mode: Option<String>,
    patch_size: Option<u64>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
}

#[derive(Deserialize, Default)]
struct RawGeneration {
    do_sample: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u64>,
    eos_token_id: Option<OneOrMany>,
}

/// `value` of `key`, from 1 to [`SIZE_MAX`].
fn size(key: &str, value: Option<u64>) -> Result<u64> {
    match value {
        None => Err(Error::input(format!("config.json: {key}"), "nothing", "a number")),
        Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(n),
        Some(n) => Err(Error::input(format!("config.json: {key}"), n, format!("1 to {SIZE_MAX}"))),
    }
}

/// `value` of `key`, positive and representable as f32.
fn positive(key: &str, value: f64) -> Result<f32> {
    let x = value as f32;
    if x.is_finite() && x > 0.0 {
        Ok(x)
    } else {
        Err(Error::input(format!("config.json: {key}"), value, "a positive number"))
    }
}

/// Refuses `found`, printed as JSON, unless `ok`.
fn require(key: &str, ok: bool, found: impl serde::Serialize, expected: &str) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::input(format!("config.json: {key}"), serde_json::json!(found), expected))
}

impl Config {
    /// Reads and checks the JSON files of `checkpoint`.
    ///
    /// # Errors
    /// If a file is missing or damaged, or describes a model that forerun does not run.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self> {
        let raw: RawConfig = checkpoint.json("config.json")?;
        let generation = generation(&checkpoint.json_opt("generation_config.json")?.unwrap_or_default())?;
        let kind = raw.model_type.clone().unwrap_or_default();
        match kind.as_str() {
            "minicpmv4_7" | "minicpmv4_6" => {
                let text_raw = raw.text_config.as_ref();
                let text_raw =
                    text_raw.ok_or_else(|| Error::input("config.json: text_config", "nothing", "an object"))?;
                let text = text(text_raw, raw.tie_word_embeddings)?;
                let multimodal = Some(multimodal(&raw, checkpoint, kind == "minicpmv4_7")?);
                Ok(Self { text, multimodal, generation })
            }
            "qwen3_5_text" | "qwen3_5_moe_text" => {
                // A text-only checkpoint: its config.json is what is `text_config` above.
                let text = text(&checkpoint.json("config.json")?, None)?;
                Ok(Self { text, multimodal: None, generation })
            }
            other => Err(Error::input(
                "config.json: model_type",
                format!("{other:?}"),
                "minicpmv4_7, minicpmv4_6, qwen3_5_text or qwen3_5_moe_text",
            )),
        }
    }
}

fn text(r: &RawText, tied_outside: Option<bool>) -> Result<Text> {
    let moe = match r.model_type.as_deref() {
        Some("qwen3_5_moe_text") => true,
        Some("qwen3_5_text") | None => false,
        Some(other) => {
            return Err(Error::input(
                "config.json: text_config.model_type",
                format!("{other:?}"),
                "qwen3_5_moe_text or qwen3_5_text",
            ));
        }
    };
    require("hidden_act", r.hidden_act.as_deref().is_none_or(|a| a == "silu"), &r.hidden_act, "silu")?;
    require("attention_bias", r.attention_bias != Some(true), r.attention_bias, "false")?;
    let layers = size("num_hidden_layers", r.num_hidden_layers)?;
    require("num_hidden_layers", layers <= 1024, layers, "at most 1024")?;
    let heads = size("num_attention_heads", r.num_attention_heads)?;
    let kv_heads = size("num_key_value_heads", r.num_key_value_heads)?;
    require("num_attention_heads", heads.is_multiple_of(kv_heads), heads, "a multiple of num_key_value_heads")?;
    let hidden = size("hidden_size", r.hidden_size)?;
    let head_dim = size("head_dim", r.head_dim.or(Some(256)))?;
    let key_heads = size("linear_num_key_heads", r.linear_num_key_heads)?;
    let value_heads = size("linear_num_value_heads", r.linear_num_value_heads)?;
    require(
        "linear_num_value_heads",
        value_heads.is_multiple_of(key_heads),
        value_heads,
        "a multiple of linear_num_key_heads",
    )?;
    let rope = rope(r, head_dim)?;
    let ffn = if moe {
        let m = Moe {
            experts: size("num_experts", r.num_experts)?,
            experts_used: size("num_experts_per_tok", r.num_experts_per_tok)?,
            expert_ffn: size("moe_intermediate_size", r.moe_intermediate_size)?,
            shared_ffn: size("shared_expert_intermediate_size", r.shared_expert_intermediate_size)?,
        };
        require("num_experts", m.experts <= 4096, m.experts, "at most 4096")?;
        require("num_experts_per_tok", m.experts_used <= m.experts, m.experts_used, "at most num_experts")?;
        Ffn::Moe(m)
    } else {
        Ffn::Dense(size("intermediate_size", r.intermediate_size)?)
    };
    Ok(Text {
        vocab: size("vocab_size", r.vocab_size)?,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        full_attention_interval: interval(r, layers)?,
        key_heads,
        value_heads,
        key_dim: size("linear_key_head_dim", r.linear_key_head_dim)?,
        value_dim: size("linear_value_head_dim", r.linear_value_head_dim)?,
        conv_kernel: size("linear_conv_kernel_dim", r.linear_conv_kernel_dim.or(Some(4)))?,
        context: size("max_position_embeddings", r.max_position_embeddings)?,
        norm_eps: positive("rms_norm_eps", r.rms_norm_eps.unwrap_or(1e-6))?,
        rope_base: rope.0,
        rope_dims: rope.1,
        rope_sections: rope.2,
        ffn,
        tied: tied_outside.or(r.tie_word_embeddings).unwrap_or(false),
        eos: OneOrMany::list(r.eos_token_id.as_ref()).first().copied(),
        pad: r.pad_token_id,
    })
}

/// Base, rotated dimensions and sections.
fn rope(r: &RawText, head_dim: u64) -> Result<(f32, u64, [u64; 3])> {
    let none = RawRope::default();
    let p = r.rope_parameters.as_ref().unwrap_or(&none);
    require("rope_type", p.rope_type.as_deref().is_none_or(|t| t == "default"), &p.rope_type, "default")?;
    require("mrope_interleaved", p.mrope_interleaved != Some(false), p.mrope_interleaved, "true")?;
    let base = p.rope_theta.or(r.rope_theta);
    let base = base.ok_or_else(|| Error::input("config.json: rope_theta", "nothing", "a number"))?;
    let factor = p.partial_rotary_factor.or(r.partial_rotary_factor).unwrap_or(0.25);
    require("partial_rotary_factor", factor > 0.0 && factor <= 1.0, factor, "above 0, at most 1")?;
    let dims = (head_dim as f64 * factor) as u64;
    require("partial_rotary_factor", dims > 0 && dims.is_multiple_of(2), factor, "one that rotates an even dimension")?;
    let sections = match p.mrope_section.as_deref() {
        None => [11, 11, 10],
        Some(&[t, h, w]) => [t, h, w],
        Some(other) => return Err(Error::input("config.json: mrope_section", format!("{other:?}"), "three numbers")),
    };
    let sum = sections.iter().try_fold(0u64, |a, &b| a.checked_add(b));
    require("mrope_section", sum == Some(dims / 2), sections, &format!("three numbers whose sum is {}", dims / 2))?;
    Ok((positive("rope_theta", base)?, dims, sections))
}

/// The interval of full-attention layers; refuses a `layer_types` that no interval describes.
fn interval(r: &RawText, layers: u64) -> Result<u64> {
    let Some(types) = &r.layer_types else {
        return size("full_attention_interval", r.full_attention_interval.or(Some(4)));
    };
    require("layer_types", types.len() as u64 == layers, types.len(), "one for each of num_hidden_layers")?;
    let first = types.iter().position(|t| t == "full_attention");
    let every = first.map_or(layers + 1, |i| i as u64 + 1);
    for (i, t) in types.iter().enumerate() {
        let want = if (i as u64 + 1).is_multiple_of(every) { "full_attention" } else { "linear_attention" };
        require(&format!("layer_types[{i}]"), t == want, t, &format!("{want} (full attention at a fixed interval)"))?;
    }
    Ok(every)
}

fn multimodal(raw: &RawConfig, checkpoint: &Checkpoint, canvas: bool) -> Result<Multimodal> {
    let v = raw.vision_config.as_ref();
    let v = v.ok_or_else(|| Error::input("config.json: vision_config", "nothing", "an object"))?;
    let act = v.hidden_act.as_deref().is_none_or(|a| a == "gelu_pytorch_tanh");
    require("vision_config.hidden_act", act, &v.hidden_act, "gelu_pytorch_tanh")?;
    require("vision_config.num_channels", v.num_channels.is_none_or(|n| n == 3), v.num_channels, "3")?;
    let window = v.window_kernel_size.is_none_or(|w| w == [2, 2]);
    require("vision_config.window_kernel_size", window, v.window_kernel_size, "[2, 2]")?;
    let layers = size("vision_config.num_hidden_layers", v.num_hidden_layers)?;
    require("vision_config.num_hidden_layers", layers <= 1024, layers, "at most 1024")?;
    let hidden = size("vision_config.hidden_size", v.hidden_size)?;
    let heads = size("vision_config.num_attention_heads", v.num_attention_heads)?;
    require("vision_config.num_attention_heads", hidden.is_multiple_of(heads), heads, "a divisor of hidden_size")?;
    let patch = size("vision_config.patch_size", v.patch_size.or(Some(14)))?;
    let image_size = size("vision_config.image_size", v.image_size)?;
    let position_side = image_size / patch;
    require("vision_config.image_size", (1..=1024).contains(&position_side), image_size, "1 to 1024 patches a side")?;
    let insert_layer = raw.insert_layer_id.or(v.insert_layer_id).unwrap_or(6);
    require("insert_layer_id", insert_layer < layers, insert_layer, "a vision layer")?;
    let vision = Vision {
        hidden,
        ffn: size("vision_config.intermediate_size", v.intermediate_size)?,
        layers,
        heads,
        patch,
        position_side,
        insert_layer,
        norm_eps: positive("vision_config.layer_norm_eps", v.layer_norm_eps.unwrap_or(1e-6))?,
    };
    let markers = Markers {
        image: raw.image_token_id,
        video: raw.video_token_id,
        image_start: raw.image_start_id,
        image_end: raw.image_end_id,
        slice_start: raw.slice_start_id,
        slice_end: raw.slice_end_id,
        newline: raw.newline_id,
    };
    let images = images(raw, checkpoint, patch)?;
    Ok(Multimodal { vision, images, markers, canvas })
}

fn images(raw: &RawConfig, checkpoint: &Checkpoint, patch: u64) -> Result<Images> {
    let both: RawProcessor = checkpoint.json_opt("processor_config.json")?.unwrap_or_default();
    let image = match both.image_processor {
        Some(i) => i,
        None => checkpoint.json_opt("preprocessor_config.json")?.unwrap_or_default(),
    };
    let video = match both.video_processor {
        Some(v) => v,
        None => checkpoint.json_opt("video_preprocessor_config.json")?.unwrap_or_default(),
    };
    require(
        "patch_size of the processor",
        image.patch_size.is_none_or(|p| p == patch),
        image.patch_size,
        "the model's",
    )?;
    let detail = image.downsample_mode.or_else(|| raw.downsample_mode.clone()).unwrap_or_else(|| "16x".into());
    require("downsample_mode", detail == "16x" || detail == "4x", &detail, "16x or 4x")?;
    // With slice_mode off, a picture is never cut, whatever max_slice_nums says.
    let slices = |key, r: Option<u64>, mode: Option<bool>, default| match mode {
        Some(false) => Ok(1),
        _ => size(key, r.or(Some(default))),
    };
    Ok(Images {
        scale_resolution: size("scale_resolution", image.scale_resolution.or(Some(448)))?,
        max_slices: slices("max_slice_nums", image.max_slice_nums, image.slice_mode, 9)?,
        video_max_slices: slices("max_slice_nums of videos", video.max_slice_nums, video.slice_mode, 1)?,
        use_id: image.use_image_id.unwrap_or(true),
        detail,
        mean: image.image_mean.unwrap_or([0.5; 3]),
        std: image.image_std.unwrap_or([0.5; 3]),
    })
}

fn generation(r: &RawGeneration) -> Result<Generation> {
    let sample = r.do_sample.unwrap_or(false);
    let temp = if sample { r.temperature.unwrap_or(1.0) } else { 0.0 };
    let top_p = if sample { r.top_p.unwrap_or(1.0) } else { 1.0 };
    if !(0.0..=100.0).contains(&temp) || !(0.0..=1.0).contains(&top_p) {
        return Err(Error::input(
            "generation_config.json",
            format!("temperature {temp}, top_p {top_p}"),
            "0 to 100 and 0 to 1",
        ));
    }
    // transformers samples from the 50 best where the file names no top_k.
    let top_k = if sample { r.top_k.unwrap_or(50).min(SIZE_MAX) } else { 0 };
    Ok(Generation { temp: temp as f32, top_p: top_p as f32, top_k, eos: OneOrMany::list(r.eos_token_id.as_ref()) })
}
