//! Names of metadata keys and tensors that the packer writes and the engine reads.
//!
//! Keys that other programs know keep their usual names (`qwen35moe.*`, `clip.vision.*`, `tokenizer.*`); ours begin
//! with `forerun.`. `docs/model-file.md` explains each.

/// Value of [`LAYOUT`] for packed files.
pub const LAYOUT_EXPERT_MAJOR: &str = "expert-major";
/// `string`: how experts lie in the file.
pub const LAYOUT: &str = "forerun.layout";
/// `u32`: version of the packed layout, [`PACKED_VERSION`].
pub const VERSION: &str = "forerun.version";
/// The packed layout that this code writes; it reads [`PACKED_VERSION_MIN`] and up.
pub const PACKED_VERSION: u32 = 2;
/// The oldest packed layout that this code reads. Version 1 has the tokenizer as `tokenizer.ggml.*` alone.
pub const PACKED_VERSION_MIN: u32 = 1;
/// `[u32; tensors]`: CRC32C of each tensor's data without padding, in directory order; 0 for packed experts.
pub const CRC_TENSORS: &str = "forerun.crc32c.tensors";
/// `[u32; layers * experts]`: CRC32C of each expert's blob including its padding, layer by layer.
pub const CRC_EXPERTS: &str = "forerun.crc32c.experts";
/// `[u32; layers]`: GGUF type id of the gate, up and down matrices of each layer's experts.
pub const EXPERT_TYPES: [&str; 3] = ["forerun.expert.gate_type", "forerun.expert.up_type", "forerun.expert.down_type"];
/// Token ids (`u32`) that positions and placeholder expansion need.
pub const TOKEN_IMAGE: &str = "forerun.token.image";
/// Video placeholder.
pub const TOKEN_VIDEO: &str = "forerun.token.video";
/// `<image>`.
pub const TOKEN_IMAGE_START: &str = "forerun.token.image_start";
/// `</image>`.
pub const TOKEN_IMAGE_END: &str = "forerun.token.image_end";
/// `<slice>`.
pub const TOKEN_SLICE_START: &str = "forerun.token.slice_start";
/// `</slice>`.
pub const TOKEN_SLICE_END: &str = "forerun.token.slice_end";
/// `"\n"`.
pub const TOKEN_NEWLINE: &str = "forerun.token.newline";
/// `[u32]`: tokens that end an answer.
pub const TOKEN_STOP: &str = "forerun.token.stop";
/// `u32`: area target of a crop is this squared, in pixels.
pub const IMAGE_SCALE_RESOLUTION: &str = "forerun.image.scale_resolution";
/// `u32`: most slices an image may be cut into.
pub const IMAGE_MAX_SLICES: &str = "forerun.image.max_slice_nums";
/// `u32`: most slices a video frame may be cut into.
pub const VIDEO_MAX_SLICES: &str = "forerun.video.max_slice_nums";
/// `bool`: number the images with `<image_id>N</image_id>`.
pub const IMAGE_USE_ID: &str = "forerun.image.use_image_id";
/// `string`: `16x` or `4x`, the mode used when none is asked for.
pub const IMAGE_DETAIL: &str = "forerun.image.detail";
/// `bool`: canvas M-RoPE positions (4.7); absent or false means one-dimensional positions.
pub const MROPE_CANVAS: &str = "forerun.mrope.canvas";
/// `u32`: side of the square table of vision position embeddings.
pub const VISION_POSITION_SIDE: &str = "forerun.vision.position_side";
/// `u32`: the window merger runs after this vision layer.
pub const VISION_INSERT_LAYER: &str = "forerun.vision.insert_layer_id";
/// `u32`: version of the other keys of the vocabulary, [`VOCAB_VERSION_NOW`].
pub const VOCAB_VERSION: &str = "forerun.vocab.version";
/// The form of the vocabulary that this code writes and reads.
pub const VOCAB_VERSION_NOW: u32 = 1;
/// `[u8]`: bytes of all tokens, one after another.
pub const VOCAB_BYTES: &str = "forerun.vocab.bytes";
/// `[u32; tokens]`: where each token's bytes end; in the upper two bits its kind.
pub const VOCAB_ENDS: &str = "forerun.vocab.ends";
/// `[u32; 3 * merges]`: left token, right token and result of each merge, in order of rank.
pub const VOCAB_MERGES: &str = "forerun.vocab.merges";
/// `string`: jinja chat template.
pub const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Suffix of the tensor `blk.N.` that holds a layer's experts: `[experts][stride]` bytes, each expert gate, up, down.
pub const EXPERTS_PACKED: &str = "ffn_exps.packed";
