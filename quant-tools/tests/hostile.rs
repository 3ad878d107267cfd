//! Damaged and hostile input ends in an error with exit code 3: never a panic, never a large allocation.

mod common;

use common::{Dir, Form, Model, Rng, write_safetensors};
use forerun_format::BlockType;
use forerun_quant::{
    Error, Types,
    safetensors::{HEADER_BYTES_MAX, SafeTensors, parse_header},
};
use serde_json::{Value, json};
use std::fs;

const TYPES: Types = Types { experts: BlockType::Q8_0, resident: BlockType::Q8_0, vision: None };

fn refused(json: &str, data_bytes: u64, part: &str) {
    let e = parse_header(json.as_bytes(), data_bytes).expect_err(json);
    assert_eq!(e.exit_code(), 3);
    assert!(e.to_string().contains(part), "{json}: {e}");
}

#[test]
fn bad_headers_are_refused() {
    let ok = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                 "b":{"dtype":"I64","shape":[],"data_offsets":[8,16]}}   "#;
    assert_eq!(parse_header(ok.as_bytes(), 16).unwrap().len(), 2);
    refused(ok, 17, "17 bytes");
    refused(ok, 15, "tensor b");
    let one = |entry: &str| format!("{{\"a\":{entry}}}");
    refused(&one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), 4, "8 bytes");
    refused(&one(r#"{"dtype":"BF16","shape":[4294967296,4294967296,2],"data_offsets":[0,4]}"#), 4, "fits 64 bits");
    refused(&one(r#"{"dtype":"F16","shape":[2],"data_offsets":[4,0]}"#), 4, "from 4 to 0");
    refused(&one(r#"{"dtype":"F16","shape":[2],"data_offsets":[4,8]}"#), 8, "from 4");
    refused(&one(r#"{"dtype":"F16","shape":[2],"data_offsets":[0,18446744073709551615]}"#), 4, "inside");
    refused(&one(r#"{"dtype":"F16","shape":[2],"data_offsets":[0,18446744073709551616]}"#), 4, "JSON");
    refused(&one(r#"{"dtype":"F16","shape":[-1],"data_offsets":[0,4]}"#), 4, "JSON");
    refused(&one(r#"{"dtype":"F16","shape":[2],"data_offsets":[0]}"#), 4, "JSON");
    refused(&one(r#"{"dtype":"F16","shape":[2]}"#), 4, "JSON");
    refused(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
        6,
        "tensor b",
    );
    refused(
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        8,
        "twice",
    );
    for text in ["", "[]", "null", "{", "\u{fe}", "{\"a\":1}"] {
        refused(text, 0, "JSON");
    }
    refused(&"[".repeat(100_000), 0, "JSON");
    refused(&format!("{{\"__metadata__\":{}", "[".repeat(100_000)), 0, "JSON");
}

#[test]
fn bad_files_are_refused() {
    let dir = Dir::new();
    let path = dir.join("x.safetensors");
    let open = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let e = SafeTensors::open(&path).unwrap_err();
        assert_eq!(e.exit_code(), 3);
        e.to_string()
    };
    assert!(open(b"").contains("0 bytes"));
    assert!(open(b"1234567").contains("7 bytes"));
    assert!(open(&u64::MAX.to_le_bytes()).contains("at most 0"));
    assert!(open(&[&9u64.to_le_bytes()[..], b"{}"].concat()).contains("at most 2"));
    // A header longer than the limit in a file that could hold it: sparse, so that nothing is written.
    fs::write(&path, (HEADER_BYTES_MAX + 1).to_le_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(HEADER_BYTES_MAX * 4).unwrap();
    assert!(SafeTensors::open(&path).unwrap_err().to_string().contains("at most 33554432"));
    write_safetensors(&path, "{}", b"");
    assert!(SafeTensors::open(&path).unwrap().entries().is_empty());
}

#[test]
fn random_headers_do_not_panic() {
    let valid = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}"#;
    let mut rng = Rng(7);
    let alphabet = br#"{}[]",:0123456789-.eEabFshdt_ "#;
    for _ in 0..20_000 {
        let mut bytes = valid.as_bytes().to_vec();
        for _ in 0..1 + rng.below(4) {
            let i = rng.below(bytes.len());
            match rng.below(3) {
                0 => bytes[i] = alphabet[rng.below(alphabet.len())],
                1 => bytes[i] = rng.next() as u8,
                _ => drop(bytes.remove(i)),
            }
        }
        if let Ok(entries) = parse_header(&bytes, 12) {
            assert!(entries.values().all(|e| e.begin + e.bytes <= 12));
        }
        let noise: Vec<u8> = (0..rng.below(64)).map(|_| alphabet[rng.below(alphabet.len())]).collect();
        let _ = parse_header(&noise, 12);
    }
}

fn pack(dir: &Dir) -> Result<(), Error> {
    let to = dir.join("out.gguf");
    let result = forerun_quant::pack(&dir.0, &to, TYPES, true, &mut |_, _| {});
    assert_eq!(to.exists(), result.is_ok());
    assert!(!dir.join("out.gguf.partial").exists());
    result.map(|_| fs::remove_file(to).unwrap())
}

/// Every JSON file of a checkpoint with bytes changed: an error or a valid file, no panic.
#[test]
fn mutated_checkpoints_do_not_panic() {
    let mut rng = Rng(11);
    let dir = Dir::new();
    Model::new(1, true).save(&dir.0, Form::Sharded);
    let files = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
    ];
    let mut failed = 0;
    for round in 0..600 {
        let path = dir.join(files[round % files.len()]);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        for _ in 0..1 + rng.below(3) {
            // The first kilobytes hold the JSON; weights are checked elsewhere.
            let i = rng.below(bad.len().clamp(1, 6000));
            match rng.below(4) {
                _ if i >= bad.len() => {}
                0 => bad[i] = b'0' + rng.below(10) as u8,
                1 => bad[i] = rng.next() as u8,
                2 => drop(bad.remove(i)),
                _ => bad.truncate(i),
            }
        }
        fs::write(&path, &bad).unwrap();
        if let Err(e) = pack(&dir) {
            assert_eq!(e.exit_code(), 3, "round {round}: {e}");
            failed += 1;
        }
        fs::write(&path, &good).unwrap();
    }
    assert!(failed > 300, "only {failed} of 600 damaged checkpoints were refused");
    pack(&dir).unwrap();
}

/// Sets one value of config.json and returns the error.
fn config_error(pointer: &str, value: Value) -> String {
    let mut model = Model::new(2, true);
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    model.config.pointer_mut(parent).unwrap()[key] = value;
    let dir = Dir::new();
    model.save(&dir.0, Form::Fused);
    let e = pack(&dir).expect_err(pointer);
    assert_eq!(e.exit_code(), 3, "{e}");
    e.to_string()
}

#[test]
fn unsupported_configurations_say_so() {
    for (pointer, value, part) in [
        ("/model_type", json!("llama"), "minicpmv4_7"),
        ("/text_config/model_type", json!("qwen2"), "qwen3_5_moe_text"),
        ("/text_config/hidden_size", json!(0), "1 to 1048576"),
        ("/text_config/hidden_size", json!(u64::MAX), "1 to 1048576"),
        ("/text_config/vocab_size", json!(4_000_000_000u64), "1 to 1048576"),
        ("/text_config/vocab_size", json!(20), "below vocab_size"),
        ("/text_config/hidden_size", json!(-1), "config.json"),
        ("/text_config/num_hidden_layers", json!(5), "layers.4."),
        ("/text_config/num_experts", json!(5), "found [4, 32], expected [5, 32]"),
        ("/text_config/hidden_act", json!("relu"), "hidden_act: found \"relu\", expected silu"),
        ("/text_config/linear_num_value_heads", json!(5), "multiple"),
        ("/text_config/rope_parameters/mrope_section", json!([1, 1, 1]), "sum is 2"),
        ("/text_config/rope_parameters/mrope_section", json!([u64::MAX, 1, 2]), "sum is 2"),
        ("/text_config/rope_parameters/rope_type", json!("yarn"), "default"),
        ("/text_config/layer_types", json!(["full_attention", "linear_attention", "x", "x"]), "layer_types[1]"),
        ("/text_config/eos_token_id", json!(40), "below vocab_size"),
        ("/vision_config/image_size", json!(1), "patches a side"),
        ("/insert_layer_id", json!(2), "vision layer"),
        ("/image_start_id", json!(4096), "below vocab_size"),
        ("/downsample_mode", json!("8x"), "16x or 4x"),
    ] {
        let e = config_error(pointer, value);
        assert!(e.contains(part), "{pointer}: {e}");
    }
}

#[test]
fn other_tokenizers_are_refused() {
    for (pointer, value, part) in [
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("\\s+"), "Qwen 3.5's"),
        ("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true), "options"),
        ("/pre_tokenizer", json!(null), "Split"),
        ("/normalizer/type", json!("NFKC"), "NFC"),
        ("/model/type", json!("Unigram"), "byte-level BPE"),
        ("/model/vocab/zz", json!(2), "one text"),
        ("/model/vocab/zz", json!(40), "below vocab_size"),
        ("/model/vocab/zz", json!(u64::MAX), "below vocab_size"),
        ("/model/merges", json!(["a zz"]), "merge 0"),
        ("/model/merges", json!(["ab"]), "merge 0"),
        ("/model/merges", json!(["a b", "a b"]), "merge 1"),
        ("/added_tokens/0/lstrip", json!(true), "plain text"),
        ("/added_tokens/4/content", json!("<img>"), "<image>"),
    ] {
        let mut model = Model::new(3, true);
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        match model.tokenizer.pointer_mut(parent).unwrap() {
            Value::Array(a) => a[key.parse::<usize>().unwrap()] = value,
            other => other[key] = value,
        }
        let dir = Dir::new();
        model.save(&dir.0, Form::Fused);
        let e = pack(&dir).expect_err(pointer).to_string();
        assert!(e.contains(part), "{pointer}: {e}");
    }
}

#[test]
fn an_index_cannot_leave_its_folder() {
    let dir = Dir::new();
    Model::new(4, true).save(&dir.0, Form::Sharded);
    let index = dir.join("model.safetensors.index.json");
    for (file, part) in [("../model.safetensors", "plain file name"), ("absent.safetensors", "no such file")] {
        fs::write(&index, json!({ "weight_map": { "lm_head.weight": file } }).to_string()).unwrap();
        let e = pack(&dir).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
    }
}

#[test]
fn a_truncated_shard_is_refused() {
    let dir = Dir::new();
    Model::new(5, true).save(&dir.0, Form::Fused);
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for keep in [bytes.len() - 1, bytes.len() / 2, 4000, 8, 0] {
        fs::write(&path, &bytes[..keep]).unwrap();
        assert_eq!(pack(&dir).unwrap_err().exit_code(), 3, "{keep} bytes");
    }
}
