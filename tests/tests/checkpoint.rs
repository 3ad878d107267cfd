//! Packing a real, trained checkpoint gives the bundled model again, however the checkpoint stores its experts.

use forerun_format::BlockType;
use forerun_tests::checkpoint::{Experts, Packed, all};
use forerun_tests::{Model, path};

/// The bundled models are compared with transformers by the golden tests, so a file equal to one is right.
fn packs_to_the_bundled_file(name: &str) {
    let bundled = Model::bundled(name);
    let packed = Model::from_bytes(Packed::new(name, Experts::Single, all(BlockType::BF16)).bytes());
    // Tensor by tensor first: that says which transformation is wrong.
    let (want, got) = (bundled.header(), packed.header());
    assert_eq!(want.tensors().len(), got.tensors().len());
    for (w, g) in want.tensors().iter().zip(got.tensors()) {
        assert_eq!((w.name, &w.ne[..], w.bytes), (g.name, &g.ne[..], g.bytes));
        let data = |file: &[u8]| file[w.offset as usize..(w.offset + w.bytes) as usize].to_vec();
        assert!(data(&bundled.file) == data(&packed.file), "{}: data differs", w.name);
    }
    assert!(bundled.file == packed.file, "{name}: keys or padding differ");
}

#[test]
fn the_mixture_packs_to_the_bundled_file() {
    packs_to_the_bundled_file("tiny-moe");
}

#[test]
fn the_dense_model_packs_to_the_bundled_file() {
    packs_to_the_bundled_file("tiny-dense");
}

#[test]
fn fused_and_single_experts_pack_to_the_same_file() {
    for block in [BlockType::BF16, BlockType::F16, BlockType::Q8_0, BlockType::Q4_0] {
        let [single, fused] = [Experts::Single, Experts::Fused].map(|e| Packed::new("tiny-moe", e, all(block)).bytes());
        assert!(single == fused, "{}: the files differ", block.name());
        let bundled = std::fs::read(path("models/tiny-moe.gguf")).unwrap();
        assert_eq!(single == bundled, block == BlockType::BF16, "{}", block.name());
    }
}

/// Rows of this model have 128 elements at most where they are not 256: too few for blocks of 256, enough for q8_0.
#[test]
fn rows_too_short_for_a_type_are_q8_0() {
    let packed = Model::from_bytes(Packed::new("tiny-moe", Experts::Single, all(BlockType::Q4K)).bytes());
    let header = packed.header();
    let type_of = |name: &str| header.tensor(name).and_then(|t| t.block_type().ok());
    assert_eq!(type_of("blk.0.attn_qkv.weight"), Some(BlockType::Q8_0), "rows of 128");
    assert_eq!(type_of("v.blk.0.ffn_down.weight"), Some(BlockType::Q4K), "rows of 256");
    assert_eq!(packed.config.text.moe().map(|m| m.types[0]), Some([BlockType::Q8_0; 3]), "rows of 128 and 32");
}
