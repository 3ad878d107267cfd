//! The keys of a packed file, from the checkpoint's configuration and tokenizer.

use crate::{
    config::{Config, Ffn, Generation, Multimodal, Text},
    error::{Error, Result},
    plan::{Data, Layout, Plan},
    tokenizer::Tokenizer,
};
use forerun_format::{
    gguf::{HeaderBuilder, Kv},
    keys,
};
use std::collections::BTreeSet;

/// A number that configuration already limits to far below 2^32.
fn u32_of(n: u64) -> Kv {
    Kv::U32(u32::try_from(n).unwrap_or(u32::MAX))
}

/// Sets every key, forerun's own only in the packed layout; the checksum arrays are zeros of their final length.
///
/// # Errors
/// If a token that the model needs does not exist.
pub(crate) fn write(
    h: &mut HeaderBuilder,
    config: &Config,
    tokenizer: Tokenizer,
    plan: &Plan,
    layout: Layout,
) -> Result<()> {
    let t = &config.text;
    let packed = layout == Layout::Packed;
    h.set("general.architecture", Kv::Str(t.arch().into()));
    sampling(h, &config.generation);
    if packed {
        h.set(keys::LAYOUT, Kv::Str(keys::LAYOUT_EXPERT_MAJOR.into()));
        h.set(keys::VERSION, Kv::U32(keys::PACKED_VERSION));
    }
    text(h, t);
    if let Some(m) = &config.multimodal {
        vision(h, m, t.hidden);
        markers(h, m, &tokenizer, t.vocab)?;
    }
    if packed {
        h.set(keys::MROPE_CANVAS, Kv::Bool(config.multimodal.as_ref().is_some_and(|m| m.canvas)));
        h.set(keys::TOKEN_STOP, stop(config, &tokenizer)?);
    }

    h.set("tokenizer.ggml.model", Kv::Str("gpt2".into()));
    h.set("tokenizer.ggml.pre", Kv::Str("qwen35".into()));
    for (key, id) in [("eos", tokenizer.eos.or(t.eos)), ("padding", tokenizer.pad.or(t.pad))] {
        if let Some(id) = id {
            h.set(&format!("tokenizer.ggml.{key}_token_id"), Kv::U32(token(id, key, t.vocab)?));
        }
    }
    h.set("tokenizer.ggml.add_bos_token", Kv::Bool(false));
    if packed {
        tokenizer.vocab()?.write(h);
    } else {
        h.set("tokenizer.ggml.tokens", Kv::Strs(tokenizer.tokens));
        h.set("tokenizer.ggml.token_type", Kv::I32s(tokenizer.types));
        h.set("tokenizer.ggml.merges", Kv::Strs(tokenizer.merges));
    }
    h.set(keys::CHAT_TEMPLATE, Kv::Str(tokenizer.chat_template));

    if !packed {
        return Ok(());
    }
    if let Ffn::Moe(m) = &t.ffn {
        for (k, key) in keys::EXPERT_TYPES.iter().enumerate() {
            let types = plan.items.iter().filter_map(|i| match &i.data {
                Data::Experts(e) => Some(e.types[k] as u32),
                Data::Matrix(_) | Data::ExpertPart(..) => None,
            });
            h.set(key, Kv::U32s(types.collect()));
        }
        h.set(keys::CRC_EXPERTS, Kv::U32s(vec![0; (t.layers * m.experts) as usize]));
    }
    h.set(keys::CRC_TENSORS, Kv::U32s(vec![0; plan.items.len()]));
    Ok(())
}

/// Tokens that end an answer.
fn stop(config: &Config, tokenizer: &Tokenizer) -> Result<Kv> {
    let stop: BTreeSet<u64> =
        config.generation.eos.iter().copied().chain(config.text.eos).chain(tokenizer.eos).collect();
    if stop.is_empty() {
        return Err(Error::input(
            "tokens that end an answer",
            "none",
            "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json",
        ));
    }
    let stop: Result<Vec<u32>> = stop.into_iter().map(|id| token(id, "eos_token_id", config.text.vocab)).collect();
    Ok(Kv::U32s(stop?))
}

fn sampling(h: &mut HeaderBuilder, g: &Generation) {
    h.set("general.sampling.temp", Kv::F32(g.temp));
    h.set("general.sampling.top_p", Kv::F32(g.top_p));
    h.set("general.sampling.top_k", u32_of(g.top_k));
}

fn text(h: &mut HeaderBuilder, t: &Text) {
    let arch = t.arch();
    let mut set = |key: &str, value: Kv| h.set(&format!("{arch}.{key}"), value);
    set("block_count", u32_of(t.layers));
    set("context_length", u32_of(t.context));
    set("embedding_length", u32_of(t.hidden));
    match &t.ffn {
        Ffn::Dense(n) => set("feed_forward_length", u32_of(*n)),
        Ffn::Moe(m) => {
            set("expert_count", u32_of(m.experts));
            set("expert_used_count", u32_of(m.experts_used));
            set("expert_feed_forward_length", u32_of(m.expert_ffn));
            set("expert_shared_feed_forward_length", u32_of(m.shared_ffn));
        }
    }
    set("attention.head_count", u32_of(t.heads));
    set("attention.head_count_kv", u32_of(t.kv_heads));
    set("attention.key_length", u32_of(t.head_dim));
    set("attention.value_length", u32_of(t.head_dim));
    set("attention.layer_norm_rms_epsilon", Kv::F32(t.norm_eps));
    set("rope.freq_base", Kv::F32(t.rope_base));
    set("rope.dimension_count", u32_of(t.rope_dims));
    let [a, b, c] = t.rope_sections.map(|n| n as i32);
    set("rope.dimension_sections", Kv::I32s(vec![a, b, c, 0]));
    set("ssm.conv_kernel", u32_of(t.conv_kernel));
    set("ssm.state_size", u32_of(t.key_dim));
    set("ssm.group_count", u32_of(t.key_heads));
    set("ssm.time_step_rank", u32_of(t.value_heads));
    set("ssm.inner_size", u32_of(t.value_heads * t.value_dim));
    set("full_attention_interval", u32_of(t.full_attention_interval));
}

fn vision(h: &mut HeaderBuilder, m: &Multimodal, text_hidden: u64) {
    let (v, i) = (&m.vision, &m.images);
    h.set("clip.has_vision_encoder", Kv::Bool(true));
    h.set("clip.projector_type", Kv::Str(if m.canvas { "minicpmv4_7" } else { "minicpmv4_6" }.into()));
    h.set("clip.use_gelu", Kv::Bool(true));
    let mut set = |key: &str, value: Kv| h.set(&format!("clip.vision.{key}"), value);
    set("image_size", u32_of(i.scale_resolution));
    set("patch_size", u32_of(v.patch));
    set("embedding_length", u32_of(v.hidden));
    set("feed_forward_length", u32_of(v.ffn));
    set("block_count", u32_of(v.layers));
    set("attention.head_count", u32_of(v.heads));
    set("attention.layer_norm_epsilon", Kv::F32(v.norm_eps));
    set("projection_dim", u32_of(text_hidden));
    set("image_mean", Kv::F32s(i.mean.to_vec()));
    set("image_std", Kv::F32s(i.std.to_vec()));
    set("projector.scale_factor", Kv::U32(if i.detail == "4x" { 2 } else { 4 }));
    set("wa_layer_indexes", Kv::I32s(vec![v.insert_layer as i32]));
    h.set(keys::VISION_POSITION_SIDE, u32_of(v.position_side));
    h.set(keys::VISION_INSERT_LAYER, u32_of(v.insert_layer));
    h.set(keys::IMAGE_SCALE_RESOLUTION, u32_of(i.scale_resolution));
    h.set(keys::IMAGE_MAX_SLICES, u32_of(i.max_slices));
    h.set(keys::VIDEO_MAX_SLICES, u32_of(i.video_max_slices));
    h.set(keys::IMAGE_USE_ID, Kv::Bool(i.use_id));
    h.set(keys::IMAGE_DETAIL, Kv::Str(i.detail.clone()));
}

fn markers(h: &mut HeaderBuilder, m: &Multimodal, tokenizer: &Tokenizer, vocab: u64) -> Result<()> {
    let ids = &m.markers;
    // "Ċ" is the byte-mapped line feed.
    for (key, id, attribute, text) in [
        (keys::TOKEN_IMAGE, ids.image, "image_token", "<|image_pad|>"),
        (keys::TOKEN_VIDEO, ids.video, "video_token", "<|video_pad|>"),
        (keys::TOKEN_IMAGE_START, ids.image_start, "image_start_token", "<image>"),
        (keys::TOKEN_IMAGE_END, ids.image_end, "image_end_token", "</image>"),
        (keys::TOKEN_SLICE_START, ids.slice_start, "slice_start_token", "<slice>"),
        (keys::TOKEN_SLICE_END, ids.slice_end, "slice_end_token", "</slice>"),
        (keys::TOKEN_NEWLINE, ids.newline, "newline_token", "Ċ"),
    ] {
        let id = match id {
            Some(id) => Some(id),
            None => tokenizer.named(attribute, &[text])?,
        };
        let id = id.ok_or_else(|| Error::input(format!("token {text}"), "none in the tokenizer", "one"))?;
        h.set(key, Kv::U32(token(id, attribute, vocab)?));
    }
    Ok(())
}

/// `id`, if it is a row of the vocabulary.
fn token(id: u64, what: &str, vocab: u64) -> Result<u32> {
    match u32::try_from(id) {
        Ok(n) if id < vocab => Ok(n),
        _ => Err(Error::input(format!("token id of {what}"), id, format!("below vocab_size, {vocab}"))),
    }
}
