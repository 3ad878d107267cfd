//! Made-up models: the same weights in both layouts, the same bytes in every run.

mod common;

use common::Dir;
use forerun_format::{BlockType, gguf::Header};
use forerun_quant::{Inspect, Shape, Synth, Types};
use std::fs;

const TYPES: Types = Types { experts: BlockType::Q4K, resident: BlockType::Q8_0, vision: None };
const TINY: Synth = Synth { shape: Shape::Tiny, layers: None, no_vision: false, plain: false, seed: 7 };

fn make(model: Synth) -> Vec<u8> {
    let dir = Dir::new();
    let to = dir.join("m.gguf");
    let done = forerun_quant::synth(model, &to, TYPES, false, &mut |_, _| {}).unwrap();
    let bytes = fs::read(to).unwrap();
    assert_eq!(bytes.len() as u64, done.bytes);
    bytes
}

fn header(file: &[u8]) -> Header<'_> {
    Header::parse(file, file.len() as u64).unwrap()
}

/// The tensor's type and data.
fn tensor<'a>(file: &'a [u8], name: &str) -> (BlockType, &'a [u8]) {
    let header = header(file);
    let t = header.tensor(name).unwrap_or_else(|| panic!("{name}"));
    (t.block_type().unwrap(), &file[t.offset as usize..][..t.bytes as usize])
}

fn values(block: BlockType, bytes: &[u8]) -> Vec<f32> {
    let mut x = vec![0.0; bytes.len() / block.block_bytes() * block.block_elems()];
    forerun_kernels::dequantize_row(block, bytes, &mut x);
    x
}

#[test]
fn equal_seeds_give_equal_bytes_and_others_others() {
    let one = make(TINY);
    assert!(one == make(TINY), "two runs differ");
    assert!(tensor(&one, "output.weight") != tensor(&make(Synth { seed: 8, ..TINY }), "output.weight"));
}

#[test]
fn both_layouts_hold_the_same_weights() {
    let packed = make(TINY);
    let plain = make(Synth { plain: true, ..TINY });
    let (p, q) = (header(&packed), header(&plain));
    assert!(p.get("forerun.layout").is_some());
    assert!(!q.kv().iter().any(|(k, _)| k.starts_with("forerun.") || k.starts_with("clip.")));
    let mut shared = 0;
    for t in q.tensors().iter().filter(|t| !t.name.contains("_exps.")) {
        assert!(tensor(&packed, t.name) == tensor(&plain, t.name), "{}", t.name);
        shared += 1;
    }
    assert_eq!(
        shared,
        p.tensors().iter().filter(|t| !t.name.starts_with(['v', 'm']) && !t.name.contains("exps")).count()
    );

    // Sizes of the shape: 16 experts, gate and up of 256 rows of 256, down of 256 rows of 256.
    let matrix = 256 * 256 / 256 * BlockType::Q4K.block_bytes();
    for (layer, expert) in [(0, 0), (1, 15), (3, 7)] {
        let name = format!("blk.{layer}.ffn_exps.packed");
        let stride = p.tensor(&name).unwrap().ne[0] as usize;
        let (_, blobs) = tensor(&packed, &name);
        let mut seen = Vec::new();
        for (k, part) in ["gate", "up", "down"].into_iter().enumerate() {
            let (block, all) = tensor(&plain, &format!("blk.{layer}.ffn_{part}_exps.weight"));
            assert_eq!((block, all.len()), (BlockType::Q4K, 16 * matrix));
            let (a, b) = (&blobs[expert * stride + k * matrix..][..matrix], &all[expert * matrix..][..matrix]);
            let x = values(block, a);
            assert_eq!(x, values(block, b), "{part} of expert {expert} of layer {layer}");
            // A sixteenth, what keeps the product of 256 numbers in size, within the noise of 65,536 numbers.
            let deviation = (x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32).sqrt();
            assert!((deviation * 16.0 - 1.0).abs() < 0.02, "{deviation}");
            assert!(!seen.contains(&x), "{part} of expert {expert} is another matrix again");
            seen.push(x);
        }
    }
}

#[test]
fn checksums_are_right() {
    let dir = Dir::new();
    for plain in [false, true] {
        let to = dir.join(&format!("{plain}.gguf"));
        forerun_quant::synth(Synth { plain, ..TINY }, &to, TYPES, false, &mut |_, _| {}).unwrap();
        let mut out = Vec::new();
        let options = Inspect { tensors: false, checksums: true, json: false };
        forerun_quant::inspect(&to, options, &mut out, &mut |_, _| {}).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.contains("64 experts, all right"), !plain, "{text}");
    }
}
