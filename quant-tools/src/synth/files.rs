//! The JSON files of a made-up checkpoint: the sizes of the real models, and a tokenizer with the real special tokens
//! at the real ids but next to no merges.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// MiniCPM-V 4.7 35B-A3B.
    Moe35b,
    /// MiniCPM-V 4.7 1B.
    Dense1b,
    /// A small mixture of experts that has every kind of tensor, for tests.
    Tiny,
}

impl Shape {
    /// Text layers.
    pub(crate) fn layers(self) -> u64 {
        match self {
            Self::Moe35b => 40,
            Self::Dense1b => 24,
            Self::Tiny => 4,
        }
    }

    /// Rows of the embedding.
    fn vocab(self) -> usize {
        match self {
            Self::Moe35b | Self::Dense1b => 248_144,
            Self::Tiny => 1024,
        }
    }
}

/// Added tokens in the order of their ids, the last one [`AFTER_ADDED`] ids before the end of the vocabulary, and
/// whether they are special.
const ADDED: [(&str, bool); 50] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|object_ref_start|>", true),
    ("<|object_ref_end|>", true),
    ("<|box_start|>", true),
    ("<|box_end|>", true),
    ("<|quad_start|>", true),
    ("<|quad_end|>", true),
    ("<|vision_start|>", true),
    ("<|vision_end|>", true),
    ("<|vision_pad|>", true),
    ("<|image_pad|>", true),
    ("<|video_pad|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<|fim_prefix|>", false),
    ("<|fim_middle|>", false),
    ("<|fim_suffix|>", false),
    ("<|fim_pad|>", false),
    ("<|repo_name|>", false),
    ("<|file_sep|>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
    ("<|audio_start|>", true),
    ("<|audio_end|>", true),
    ("<tts_pad>", true),
    ("<tts_text_bos>", true),
    ("<tts_text_eod>", true),
    ("<tts_text_bos_single>", true),
    ("<|audio_pad|>", true),
    ("<unk>", true),
    ("<image>", true),
    ("</image>", true),
    ("<ref>", true),
    ("</ref>", true),
    ("<box>", true),
    ("</box>", true),
    ("<quad>", true),
    ("</quad>", true),
    ("<point>", true),
    ("</point>", true),
    ("<slice>", true),
    ("</slice>", true),
    ("<image_id>", true),
    ("</image_id>", true),
    ("<timestamp>", true),
    ("</timestamp>", true),
];
/// Unused ids after the added tokens.
const AFTER_ADDED: usize = 50;

/// ChatML, as the real template writes plain conversations.
const CHAT_TEMPLATE: &str = "\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for item in message.content %}
            {%- if not loop.first %}{{ '\\n' }}{% endif %}
            {%- if item.type == 'image' %}{{ '<|image_pad|>' }}
            {%- elif item.type == 'video' %}{{ '<|video_pad|>' }}
            {%- else %}{{ item.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Side files by name.
pub(super) fn files(shape: Shape, layers: u64, vision: bool) -> BTreeMap<&'static str, String> {
    let stop = json!({ "eos_token_id": id(shape, "<|im_end|>") });
    BTreeMap::from([
        ("config.json", config(shape, layers, vision).to_string()),
        ("generation_config.json", stop.to_string()),
        ("tokenizer.json", tokenizer(shape).to_string()),
        ("tokenizer_config.json", json!({ "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>" }).to_string()),
        ("processor_config.json", processor(shape).to_string()),
        ("chat_template.jinja", CHAT_TEMPLATE.into()),
    ])
}

/// The id of an added token.
fn id(shape: Shape, text: &str) -> Option<usize> {
    let first = shape.vocab() - AFTER_ADDED - ADDED.len();
    ADDED.iter().position(|(t, _)| *t == text).map(|i| first + i)
}

fn config(shape: Shape, layers: u64, vision: bool) -> Value {
    let mut text = match shape {
        Shape::Moe35b => json!({
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
        }),
        Shape::Dense1b => json!({
            "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": true,
        }),
        Shape::Tiny => json!({
            "model_type": "qwen3_5_moe_text", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256, "tie_word_embeddings": false,
        }),
    };
    let sections = if shape == Shape::Tiny { [3, 3, 2] } else { [11, 11, 10] };
    text["vocab_size"] = json!(shape.vocab());
    text["num_hidden_layers"] = json!(layers);
    text["full_attention_interval"] = json!(4);
    text["max_position_embeddings"] = json!(262_144);
    text["rms_norm_eps"] = json!(1e-6);
    text["rope_parameters"] = json!({
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": true,
        "mrope_section": sections,
    });
    text["eos_token_id"] = json!(id(shape, "<|endoftext|>"));
    if !vision {
        return text;
    }
    let tower = match shape {
        Shape::Tiny => json!({
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 224, "patch_size": 14,
        }),
        _ => json!({
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 980, "patch_size": 14,
        }),
    };
    json!({
        "model_type": "minicpmv4_7", "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text,
        "vision_config": tower, "insert_layer_id": if shape == Shape::Tiny { 0 } else { 6 },
    })
}

fn processor(shape: Shape) -> Value {
    let resolution = if shape == Shape::Tiny { 112 } else { 448 };
    json!({ "image_processor": { "scale_resolution": resolution, "max_slice_nums": 9 } })
}

/// The character that stands for each byte, in the order of the vocabulary: the 188 bytes that print stand for
/// themselves and come first.
fn byte_characters() -> Vec<char> {
    let prints = |b: &u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..256).filter(|b| !prints(b)).count() as u32;
    (0..256).filter(prints).chain(256..256 + others).filter_map(char::from_u32).collect()
}

fn tokenizer(shape: Shape) -> Value {
    let mut vocab: Map<String, Value> =
        byte_characters().into_iter().enumerate().map(|(i, c)| (c.to_string(), json!(i))).collect();
    let mut merges = Vec::new();
    // A space before each letter, so that there are merges at all.
    for (i, letter) in ('a'..='z').enumerate() {
        vocab.insert(format!("Ġ{letter}"), json!(256 + i));
        merges.push(json!(["Ġ", letter.to_string()]));
    }
    let added: Vec<Value> = ADDED
        .iter()
        .map(|(text, special)| json!({ "id": id(shape, text), "content": text, "special": special }))
        .collect();
    json!({
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "behavior": "Isolated", "invert": false,
              "pattern": { "Regex": crate::tokenizer::REGEX } },
            { "type": "ByteLevel", "add_prefix_space": false, "use_regex": false } ] },
        "model": { "type": "BPE", "vocab": vocab, "merges": merges },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_ids_of_the_real_tokenizer() {
        for (text, want) in [("<|endoftext|>", 248_044), ("<|image_pad|>", 248_056), ("</timestamp>", 248_093)] {
            assert_eq!(id(Shape::Moe35b, text), Some(want), "{text}");
        }
        let bytes = byte_characters();
        assert_eq!((bytes.len(), bytes[0], bytes[198], bytes[220]), (256, '!', 'Ċ', 'Ġ'));
    }
}
