//! What is packed: equal bytes from every form of a checkpoint, and values computed here from the checkpoint's own.

mod common;

use common::{Dir, EXPERT_FFN, EXPERTS, Form, HEAD, HIDDEN, KEY_HEADS, LAYERS, Model, VALUE_HEADS, VISION, VOCAB};
use forerun_format::{
    BlockType,
    crc32c::crc32c,
    gguf::Header,
    vocab::{Kind, Vocab},
};
use forerun_quant::{Error, Types};
use serde_json::json;
use std::{fs, hash::RandomState, path::Path, process::Command};

const BF16: Types = Types { experts: BlockType::BF16, resident: BlockType::BF16, vision: None };
const L: &str = "model.language_model.layers.";

fn pack_with(model: &Model, form: Form, types: Types) -> Result<Vec<u8>, Error> {
    let dir = Dir::new();
    model.save(&dir.0, form);
    let out = Dir::new();
    let to = out.join("m.gguf");
    let packed = forerun_quant::pack(&dir.0, &to, types, false, &mut |_, _| {});
    if packed.is_err() {
        assert!(out.names().is_empty(), "an error left {:?}", out.names());
    }
    packed.map(|p| {
        let bytes = fs::read(to).unwrap();
        assert_eq!(bytes.len() as u64, p.bytes);
        bytes
    })
}

fn pack(model: &Model, form: Form) -> Vec<u8> {
    pack_with(model, form, BF16).unwrap()
}

fn error(model: &Model) -> String {
    match pack_with(model, Form::PerExpert, BF16) {
        Err(e) => {
            assert_eq!(e.exit_code(), 3, "{e}");
            e.to_string()
        }
        Ok(_) => panic!("a damaged checkpoint was packed"),
    }
}

struct Packed(Vec<u8>);

impl Packed {
    fn header(&self) -> Header<'_> {
        Header::parse(&self.0, self.0.len() as u64).unwrap()
    }

    fn block(&self, name: &str) -> BlockType {
        self.header().tensor(name).unwrap_or_else(|| panic!("{name}")).block_type().unwrap()
    }

    /// Values of an unquantized tensor, decoded here.
    fn values(&self, name: &str) -> Vec<f32> {
        let header = self.header();
        let t = header.tensor(name).unwrap_or_else(|| panic!("{name}"));
        let bytes = &self.0[t.offset as usize..(t.offset + t.bytes) as usize];
        decode(t.block_type().unwrap(), bytes)
    }
}

fn decode(block: BlockType, bytes: &[u8]) -> Vec<f32> {
    match block {
        BlockType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        BlockType::BF16 => {
            bytes.as_chunks::<2>().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Tiled order of 6 value heads over 2 key heads: packed head n is the checkpoint's head `ORDER[n]`. By hand: heads
/// 0, 1, 2 use key head 0 and 3, 4, 5 key head 1; tiled order alternates key heads.
const ORDER: [usize; VALUE_HEADS] = [0, 3, 1, 4, 2, 5];

/// Groups of `unit` values in [`ORDER`].
fn tiled(x: &[f32], unit: usize) -> Vec<f32> {
    ORDER.iter().flat_map(|v| &x[v * unit..(v + 1) * unit]).copied().collect()
}

#[test]
fn every_form_of_a_checkpoint_gives_the_same_bytes() {
    let model = Model::new(1, true);
    for types in [BF16, Types { experts: BlockType::Q4_0, resident: BlockType::Q8_0, vision: Some(BlockType::F16) }] {
        let one = pack_with(&model, Form::PerExpert, types).unwrap();
        assert!(one == pack_with(&model, Form::PerExpert, types).unwrap(), "two runs differ");
        assert!(one == pack_with(&model, Form::Fused, types).unwrap(), "fused experts differ");
        assert!(one == pack_with(&model, Form::Sharded, types).unwrap(), "shards differ");
    }
    assert!(pack(&model, Form::Fused) != pack(&Model::new(2, true), Form::Fused), "the weights do not matter");
}

#[test]
fn text_tensors_carry_the_documented_transformations() {
    let model = Model::new(3, true);
    let p = Packed(pack(&model, Form::Fused));
    let plus_one = |name: &str| model.values(name).iter().map(|x| x + 1.0).collect::<Vec<_>>();
    let linear = |i: usize, name: &str| model.values(&format!("{L}{i}.linear_attn.{name}"));

    assert_eq!(p.values("output_norm.weight"), plus_one("model.language_model.norm.weight"));
    assert_eq!(p.values("blk.1.attn_norm.weight"), plus_one(&format!("{L}1.input_layernorm.weight")));
    assert_eq!(
        p.values("blk.3.post_attention_norm.weight"),
        plus_one(&format!("{L}3.post_attention_layernorm.weight"))
    );
    assert_eq!(p.values("blk.3.attn_q_norm.weight"), plus_one(&format!("{L}3.self_attn.q_norm.weight")));
    assert_eq!(p.values("blk.3.attn_q.weight"), model.values(&format!("{L}3.self_attn.q_proj.weight")));
    assert_eq!(p.values("blk.2.ssm_norm.weight"), linear(2, "norm.weight"), "this norm is not shifted");

    // exp by its series in f64, which shares nothing with the library's.
    let exp = |x: f64| {
        let mut term = 1.0;
        let half_sum: f64 = (1..60)
            .map(|n| {
                term *= x.abs() / f64::from(n);
                term
            })
            .sum::<f64>()
            + 1.0;
        if x < 0.0 { 1.0 / half_sum } else { half_sum }
    };
    let want: Vec<f32> = tiled(linear(0, "A_log"), 1).iter().map(|x| -exp(f64::from(*x)) as f32).collect();
    for (x, w) in p.values("blk.0.ssm_a").iter().zip(&want) {
        assert!((x - w).abs() <= w.abs() * f32::EPSILON, "{x} {w}"); // one unit in the last place
    }

    let keys = 2 * KEY_HEADS * HEAD;
    assert_eq!(p.values("blk.0.ssm_dt.bias"), tiled(linear(0, "dt_bias"), 1));
    assert_eq!(p.values("blk.0.ssm_alpha.weight"), tiled(linear(0, "in_proj_a.weight"), HIDDEN));
    assert_eq!(p.values("blk.0.ssm_beta.weight"), tiled(linear(0, "in_proj_b.weight"), HIDDEN));
    assert_eq!(p.values("blk.0.attn_gate.weight"), tiled(linear(0, "in_proj_z.weight"), HEAD * HIDDEN));
    for (name, from, cols) in [("attn_qkv", "in_proj_qkv.weight", HIDDEN), ("ssm_conv1d", "conv1d.weight", 4)] {
        let (x, want) = (p.values(&format!("blk.1.{name}.weight")), linear(1, from));
        assert_eq!(x[..keys * cols], want[..keys * cols], "query and key channels stay");
        assert_eq!(x[keys * cols..], tiled(&want[keys * cols..], HEAD * cols));
    }
    let columns: Vec<f32> =
        linear(2, "out_proj.weight").chunks(VALUE_HEADS * HEAD).flat_map(|row| tiled(row, HEAD)).collect();
    assert_eq!(p.values("blk.2.ssm_out.weight"), columns);

    let header = p.header();
    assert_eq!(header.tensor("blk.0.ssm_conv1d.weight").unwrap().ne, [4, 80, 1, 1]);
    assert_eq!(header.tensor("blk.0.ffn_gate_inp_shexp.weight").unwrap().ne, [HIDDEN as u64, 1, 1, 1]);
    assert_eq!(header.tensor("v.patch_embd.weight").unwrap().ne, [2, 2, 3, 32]);
    assert_eq!(
        p.values("v.vit_merger.ds_ffn_up.weight"),
        model.values("model.vision_tower.vit_merger.linear_1.weight")
    );
}

#[test]
fn experts_lie_where_the_directory_says() {
    let model = Model::new(4, true);
    let p = Packed(pack(&model, Form::Fused));
    let header = p.header();
    let sums = header.u32_array("forerun.crc32c.experts", LAYERS * EXPERTS).unwrap();
    let tensor_sums = header.u32_array("forerun.crc32c.tensors", header.tensors().len()).unwrap();
    for layer in 0..LAYERS {
        let t = header.tensor(&format!("blk.{layer}.ffn_exps.packed")).unwrap();
        // 3 matrices of 32 x 32 bf16 are 6144 bytes: two pages.
        assert_eq!((t.type_id, t.ne, t.offset % 4096), (24, [8192, EXPERTS as u64, 1, 1], 0));
        for e in 0..EXPERTS {
            let at = t.offset as usize + e * 8192;
            let blob = &p.0[at..at + 8192];
            let want: Vec<f32> = ["gate_proj", "up_proj", "down_proj"]
                .iter()
                .flat_map(|n| model.values(&format!("{L}{layer}.mlp.experts.{e}.{n}.weight")))
                .copied()
                .collect();
            assert_eq!(decode(BlockType::BF16, &blob[..6144]), want, "expert {e} of layer {layer}");
            assert!(blob[6144..].iter().all(|&b| b == 0));
            assert_eq!(crc32c(blob), sums[layer * EXPERTS + e]);
        }
    }
    for (t, sum) in header.tensors().iter().zip(tensor_sums) {
        let data = &p.0[t.offset as usize..(t.offset + t.bytes) as usize];
        let want = if t.name.ends_with("ffn_exps.packed") { 0 } else { crc32c(data) };
        assert_eq!(sum, want, "{}", t.name);
    }
}

#[test]
fn tensors_stand_in_the_order_of_use() {
    let p = Packed(pack(&Model::new(5, true), Form::Fused));
    let header = p.header();
    let at = |name: &str| header.tensors().iter().position(|t| t.name == name).unwrap_or_else(|| panic!("{name}"));
    let order = [
        "blk.0.attn_norm.weight",
        "blk.0.ssm_out.weight",
        "blk.0.ffn_down_shexp.weight",
        "blk.1.attn_norm.weight",
        "blk.3.attn_output.weight",
        "output_norm.weight",
        "output.weight",
        "v.patch_embd.weight",
        "v.blk.0.ffn_down.weight",
        "v.vit_merger.ln1.weight",
        "v.blk.1.ln1.weight",
        "v.post_ln.weight",
        "mm.down.bias",
        "token_embd.weight",
        "blk.0.ffn_exps.packed",
        "blk.3.ffn_exps.packed",
    ];
    for pair in order.windows(2) {
        assert!(at(pair[0]) < at(pair[1]), "{} after {}", pair[0], pair[1]);
    }
    assert!(header.tensors().windows(2).all(|w| w[0].offset < w[1].offset));

    // A tied head: the embedding takes its place, and a head in the checkpoint is not used.
    for with_head in [true, false] {
        let mut tied = Model::new(5, false);
        tied.config["tie_word_embeddings"] = json!(true);
        if !with_head {
            tied.tensors.remove("lm_head.weight");
        }
        let p = Packed(pack(&tied, Form::Fused));
        let names: Vec<_> = p.header().tensors().iter().map(|t| t.name.to_string()).collect();
        let i = names.iter().position(|n| n == "token_embd.weight").unwrap();
        assert_eq!((names[i - 1].as_str(), names[i + 1].as_str()), ("output_norm.weight", "v.patch_embd.weight"));
        assert!(!names.contains(&"output.weight".into()));
    }
}

#[test]
fn quantized_values_are_near_and_types_follow_the_rules() {
    let mut model = Model::new(6, true);
    for name in [format!("{L}0.mlp.gate.weight"), "model.vision_tower.embeddings.patch_embedding.weight".into()] {
        model.dtypes.insert(name, "F32");
    }
    model.dtypes.insert(format!("{L}3.self_attn.k_proj.weight"), "F16");
    let types = Types { experts: BlockType::Q4_0, resident: BlockType::Q8_0, vision: None };
    let p = Packed(pack_with(&model, Form::Fused, types).unwrap());
    let check = |block: BlockType, bytes: &[u8], want: &[f32], levels: f32| {
        let mut x = vec![0.0; want.len()];
        forerun_kernels::dequantize_row(block, bytes, &mut x);
        for (x, w) in x.chunks(32).zip(want.chunks(32)) {
            let largest = w.iter().fold(0f32, |m, v| m.max(v.abs()));
            // Half a step, or a whole one at the end that q4_0's range lacks; the scale itself rounds to 11 bits.
            let step = largest / levels;
            let most = if block == BlockType::Q4_0 { step * 1.01 } else { step * 0.5 + largest / 2048.0 };
            for (x, w) in x.iter().zip(w) {
                assert!((x - w).abs() <= most, "{x} for {w}, step {step}");
            }
        }
    };
    let header = p.header();
    let t = header.tensor("blk.3.attn_k.weight").unwrap();
    let bytes = &p.0[t.offset as usize..(t.offset + t.bytes) as usize];
    check(BlockType::Q8_0, bytes, model.values(&format!("{L}3.self_attn.k_proj.weight")), 127.0);
    let t = header.tensor("blk.2.ffn_exps.packed").unwrap();
    let matrix = EXPERT_FFN * HIDDEN / 32 * 18;
    let up = t.offset as usize + t.ne[0] as usize + matrix; // of expert 1
    check(BlockType::Q4_0, &p.0[up..up + matrix], model.values(&format!("{L}2.mlp.experts.1.up_proj.weight")), 8.0);
    assert_eq!(header.u32_array("forerun.expert.down_type", LAYERS).unwrap(), [2; LAYERS]);

    assert_eq!(p.block("blk.0.ffn_gate_inp.weight"), BlockType::F32, "the checkpoint's own");
    assert_eq!(p.block("blk.1.ffn_gate_inp.weight"), BlockType::BF16, "the checkpoint's own");
    assert_eq!(p.block("v.patch_embd.weight"), BlockType::F32, "the checkpoint's own");
    assert_eq!(p.block("v.position_embd.weight"), BlockType::BF16, "the checkpoint's own");
    assert_eq!(p.block("blk.0.ssm_beta.weight"), BlockType::BF16, "the checkpoint's own");
    assert_eq!(p.block("blk.0.ssm_out.weight"), BlockType::BF16, "rows of 48 are not whole blocks");
    // The vision MLP, 48 wide, is filled up to whole blocks with zeros.
    for (name, ne) in [("ffn_up.weight", [VISION, 64]), ("ffn_up.bias", [64, 1]), ("ffn_down.weight", [64, VISION])] {
        let t = header.tensor(&format!("v.blk.0.{name}")).unwrap();
        assert_eq!(t.ne[..2], ne.map(|n| n as u64), "{name}");
    }
    assert_eq!(p.block("v.blk.0.ffn_down.weight"), BlockType::Q8_0);
    let t = header.tensor("v.blk.0.ffn_down.weight").unwrap();
    let row = &p.0[t.offset as usize..][..2 * 34];
    check(
        BlockType::Q8_0,
        &row[..34],
        &model.values("model.vision_tower.encoder.layers.0.mlp.fc2.weight")[..32],
        127.0,
    );
    assert_eq!(row[34 + 2 + 16..], [0; 16]);
    assert_eq!(p.block("v.blk.0.ffn_up.weight"), BlockType::Q8_0, "vision follows the resident type");
    assert_eq!(p.block("blk.0.ssm_conv1d.weight"), BlockType::F32);
    assert_eq!(p.block("token_embd.weight"), BlockType::Q8_0);
}

#[test]
fn source_types_give_the_same_values() {
    let model = Model::new(7, false);
    let f32s = Types { experts: BlockType::F32, resident: BlockType::F32, vision: None };
    let want = Packed(pack_with(&model, Form::Fused, f32s).unwrap());
    for dtype in ["F32", "F16"] {
        let mut other = Model::new(7, false);
        other.dtypes = other.tensors.keys().map(|k| (k.clone(), dtype)).collect();
        let p = Packed(pack_with(&other, Form::Fused, f32s).unwrap());
        for name in ["blk.0.attn_qkv.weight", "blk.0.ssm_a", "output.weight", "blk.0.ffn_down.weight", "mm.up.bias"] {
            assert_eq!(p.values(name), want.values(name), "{name} from {dtype}");
        }
    }
}

#[test]
fn keys_tell_tokens_and_tokenizer() {
    let mut model = Model::new(8, true);
    model.config["image_token_id"] = json!(30);
    let p = Packed(pack(&model, Form::Fused));
    let h = p.header();
    let id = |key: &str| h.u32(&format!("forerun.token.{key}")).unwrap();
    assert_eq!(id("image"), 30, "config.json wins");
    assert_eq!((id("video"), id("image_start"), id("image_end")), (10, 11, 12), "looked up by text");
    assert_eq!((id("slice_start"), id("slice_end"), id("newline")), (13, 14, 3));
    assert_eq!(h.u32_array("forerun.token.stop", 2).unwrap(), [7, 8]);
    assert_eq!(h.u32("tokenizer.ggml.eos_token_id"), Ok(8));
    assert_eq!(h.bool_opt("forerun.mrope.canvas"), Ok(Some(true)));
    assert_eq!(h.u32("qwen35moe.full_attention_interval"), Ok(4));
    assert_eq!(h.u32_array("qwen35moe.rope.dimension_sections", 4).unwrap(), [1, 1, 0, 0]);
    let vocab = Vocab::from_header(&h, RandomState::new()).unwrap();
    assert_eq!((vocab.len(), vocab.merge_count()), (VOCAB, 2));
    let token = |id| vocab.token(id).unwrap();
    assert_eq!([token(5), token(8)], [(&b" a"[..], Kind::Normal), (b"<|im_end|>", Kind::Control)]);
    assert_eq!(
        [token(20), token(6), token(39)],
        [(&b"<think>"[..], Kind::Plain), (b"", Kind::Unused), (b"", Kind::Unused)]
    );
    assert_eq!([vocab.merge(0, 1), vocab.merge(4, 0), vocab.merge(1, 0)], [Some((0, 2)), Some((1, 5)), None]);
    assert!(h.get("tokenizer.ggml.tokens").is_none(), "the texts are not there a second time");
    assert_eq!(h.str_opt("tokenizer.chat_template"), Ok(Some("{{ messages }}")));
}

#[test]
fn a_text_only_checkpoint_packs_without_vision() {
    let mut model = Model::new(9, true);
    model.config = model.config["text_config"].take();
    model.tensors.retain(|n, _| !n.contains("vision_tower") && !n.contains("merger"));
    model.tensors = model.tensors.into_iter().map(|(n, t)| (n.replace("model.language_model.", "model."), t)).collect();
    let p = Packed(pack(&model, Form::PerExpert));
    assert!(p.header().tensors().iter().all(|t| !t.name.starts_with("v.")));
    assert_eq!(p.header().u32("forerun.token.image").ok(), None);
}

#[test]
fn damaged_checkpoints_are_refused_by_name() {
    let broken = |change: &dyn Fn(&mut Model)| {
        let mut model = Model::new(10, true);
        change(&mut model);
        error(&model)
    };
    let qkv = &format!("{L}1.linear_attn.in_proj_qkv.weight");
    let e = broken(&|m| drop(m.tensors.remove(qkv)));
    assert!(e.contains(qkv) && e.contains("[80, 32]"), "{e}");
    let e = broken(&|m| m.tensors.get_mut(qkv).unwrap().0 = vec![32, 80]);
    assert!(e.contains(qkv) && e.contains("found [32, 80], expected [80, 32]"), "{e}");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let e = broken(&|m| m.tensors.get_mut(qkv).unwrap().1[32 * 5 + 7] = bad);
        assert!(e.contains(qkv) && e.contains("row 5, column 7") && e.contains("finite"), "{e}");
    }
    let e = broken(&|m| m.tensors.get_mut(&format!("{L}0.linear_attn.A_log")).unwrap().1[0] = 1000.0);
    assert!(e.contains("A_log") && e.contains("inf"), "{e}");
    let e = broken(&|m| m.dtypes.extend([(format!("{L}0.mlp.experts.2.up_proj.weight"), "F32")]));
    assert!(e.contains("experts.2.up_proj.weight") && e.contains("bf16"), "{e}");
}

#[test]
fn numbers_beyond_the_type_are_refused() {
    let mut model = Model::new(11, false);
    let name = format!("{L}0.mlp.up_proj.weight");
    model.tensors.get_mut(&name).unwrap().1[3] = 131072.0;
    let types = |block| Types { experts: block, resident: block, vision: None };
    let e = pack_with(&model, Form::Fused, types(BlockType::F16)).unwrap_err().to_string();
    assert!(e.contains(&name) && e.contains("131072") && e.contains("65504"), "{e}");
    pack_with(&model, Form::Fused, types(BlockType::Q8_0)).unwrap();
    model.tensors.get_mut(&name).unwrap().1[3] = 16777216.0;
    assert!(pack_with(&model, Form::Fused, types(BlockType::Q8_0)).is_err());
}

#[test]
fn inspect_names_the_damaged_expert() {
    let dir = Dir::new();
    let path = dir.join("m.gguf");
    let mut bytes = pack(&Model::new(12, true), Form::Fused);
    let (expert, tensor) = {
        let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
        let at = |name: &str| header.tensor(name).unwrap().offset as usize;
        (at("blk.3.ffn_exps.packed") + 2 * 8192 + 8000, at("v.post_ln.bias"))
    };
    let run = |path: &Path, args: &[&str]| {
        let out =
            Command::new(env!("CARGO_BIN_EXE_forerun-quant")).arg("inspect").arg(path).args(args).output().unwrap();
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    fs::write(&path, &bytes).unwrap();
    let (code, out, err) = run(&path, &["--tensors"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("16 experts, all right") && out.contains("blk.3.ffn_exps.packed"), "{out}");

    bytes[expert] ^= 1; // inside the padding, which the checksum covers
    bytes[tensor] ^= 0x80;
    fs::write(&path, &bytes).unwrap();
    let (code, out, err) = run(&path, &["--json"]);
    assert_eq!(code, Some(3));
    assert!(
        err.contains("expert 2 of layer 3: checksum ") && err.contains("tensor v.post_ln.bias: checksum "),
        "{err}"
    );
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["checksums"]["wrong"].as_array().unwrap().len(), 2);
    assert_eq!(run(&path, &["--no-checksums"]).0, Some(0));

    fs::write(&path, &bytes[..bytes.len() - 4096]).unwrap();
    assert_eq!(run(&path, &[]).0, Some(3));
    fs::write(&path, "not a model").unwrap();
    assert_eq!(run(&path, &[]).0, Some(3));
    assert_eq!(run(&dir.join("absent"), &[]).0, Some(1));
}

/// The models bundled with the repository are what packing gives today. Needs the checkpoints they came from.
#[test]
fn reference_checkpoints_pack_to_the_bundled_models() {
    let Some(root) = std::env::var_os("FORERUN_CHECKPOINTS") else {
        eprintln!("skipped: set FORERUN_CHECKPOINTS to the folder with tiny-moe, tiny-moe-fused and tiny-dense");
        return;
    };
    let out = Dir::new();
    let pack = |name: &str| {
        let to = out.join(name);
        forerun_quant::pack(&Path::new(&root).join(name), &to, BF16, false, &mut |_, _| {}).unwrap();
        fs::read(to).unwrap()
    };
    let bundled =
        |name: &str| fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(name)).unwrap();
    let moe = pack("tiny-moe");
    assert!(moe == pack("tiny-moe-fused"), "fused experts differ");
    assert!(moe == bundled("tiny-moe.gguf"), "tests/models/tiny-moe.gguf differs");
    assert!(pack("tiny-dense") == bundled("tiny-dense.gguf"), "tests/models/tiny-dense.gguf differs");
}
