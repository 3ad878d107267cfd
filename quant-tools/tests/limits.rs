//! Limits of the machine: a full device, a name that is taken, memory.

mod common;

use common::{Dir, Form, Model};
use forerun_format::BlockType;
use forerun_quant::Types;
use serde_json::{Map, json};
use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
};

const Q8: Types = Types { experts: BlockType::Q8_0, resident: BlockType::Q8_0, vision: None };

/// A tmpfs of `bytes`, unmounted when dropped; `None` without the right to mount.
struct SmallDisk(Dir);

impl SmallDisk {
    fn mount(bytes: u64) -> Option<Self> {
        let dir = Dir::new();
        let mut c = Command::new("mount");
        c.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&dir.0);
        match c.output() {
            Ok(o) if o.status.success() => Some(Self(dir)),
            _ => {
                eprintln!("skipped: mounting a tmpfs needs root");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0.0).status();
    }
}

#[test]
fn a_small_device_is_refused_before_writing() {
    let Some(disk) = SmallDisk::mount(64 << 10) else { return };
    let from = Dir::new();
    Model::new(1, true).save(&from.0, Form::Fused);
    let mut calls = 0;
    let e = forerun_quant::pack(&from.0, &disk.0.join("m.gguf"), Q8, false, &mut |_, _| calls += 1).unwrap_err();
    assert_eq!((e.exit_code(), calls), (4, 0), "{e}");
    assert!(e.to_string().contains("free some space"), "{e}");
    assert!(disk.0.names().is_empty(), "{:?}", disk.0.names());
}

#[test]
fn a_device_that_fills_up_leaves_no_partial_file() {
    let Some(disk) = SmallDisk::mount(4 << 20) else { return };
    let from = Dir::new();
    Model::new(1, true).save(&from.0, Form::Fused);
    let mut filler = None;
    let e = forerun_quant::pack(&from.0, &disk.0.join("m.gguf"), Q8, false, &mut |_, _| {
        filler.get_or_insert_with(|| {
            let mut f = File::create(disk.0.join("filler")).unwrap();
            while f.write_all(&[1; 4096]).is_ok() {}
        });
    })
    .unwrap_err();
    assert_eq!(e.exit_code(), 4, "{e}");
    assert!(e.to_string().contains("free some space"), "{e}");
    assert_eq!(disk.0.names(), ["filler"]);
}

#[test]
fn an_existing_file_is_replaced_only_when_told() {
    let from = Dir::new();
    Model::new(1, false).save(&from.0, Form::Fused);
    let out = Dir::new();
    let to = out.join("m.gguf");
    fs::write(&to, "mine").unwrap();
    fs::write(out.join("m.gguf.partial"), vec![0xAA; 1 << 20]).unwrap(); // of a run that was killed
    let pack = |force| forerun_quant::pack(&from.0, &to, Q8, force, &mut |_, _| {});
    let e = pack(false).unwrap_err();
    assert_eq!(e.exit_code(), 1);
    assert!(e.to_string().contains("--force"), "{e}");
    assert_eq!(fs::read(&to).unwrap(), b"mine");
    pack(true).unwrap();
    assert_eq!(out.names(), ["m.gguf"]);
    let first = fs::read(&to).unwrap();
    fs::remove_file(&to).unwrap();
    pack(false).unwrap();
    assert!(first == fs::read(&to).unwrap(), "what the killed run left shows in the file");

    // A damaged checkpoint does not touch the file that is there.
    fs::write(from.join("config.json"), "{}").unwrap();
    assert!(forerun_quant::pack(&from.0, &to, Q8, true, &mut |_, _| {}).is_err());
    assert!(first == fs::read(&to).unwrap());
    let e = forerun_quant::pack(&from.0, &out.0, Q8, true, &mut |_, _| {}).unwrap_err();
    assert_eq!(e.exit_code(), 3); // config.json is looked at first
}

#[test]
fn arguments_and_exit_codes() {
    let from = Dir::new();
    Model::new(1, true).save(&from.0, Form::Fused);
    let to = from.join("m.gguf");
    let run = |types: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forerun-quant"));
        c.args(["pack", "--force", "--from"]).arg(&from.0).arg("--to").arg(&to);
        for t in types {
            c.args(["--type", t]);
        }
        c.output().unwrap().status.code()
    };
    let with = |experts, resident, vision| {
        forerun_quant::pack(&from.0, &to, Types { experts, resident, vision }, true, &mut |_, _| {}).unwrap();
        fs::read(&to).unwrap()
    };
    use BlockType::{BF16, F16, F32, Q4_0, Q8_0};
    for (args, want) in [
        (&[][..], with(Q8_0, Q8_0, None)),
        (&["bf16"], with(BF16, BF16, None)),
        (&["bf16", "experts=q4_0"], with(Q4_0, BF16, None)),
        (&["resident=f32", "vision=f16"], with(Q8_0, F32, Some(F16))),
        (&["vision=f16", "q4_0"], with(Q4_0, Q4_0, None)),
    ] {
        assert_eq!(run(args), Some(0));
        assert!(fs::read(&to).unwrap() == want, "{args:?}");
    }
    for bad in ["q4", "head=bf16", "=bf16", "experts=", "i8", ""] {
        assert_eq!(run(&[bad]), Some(2), "{bad:?}");
    }
    fs::write(from.join("config.json"), "{").unwrap();
    assert_eq!(run(&[]), Some(3));
}

/// Vocabulary, embedding and experts of the 35B model, one layer, all weights zero in a sparse file: 4 GB in, 2 GB out.
#[test]
#[ignore = "writes 2 GB; run with --ignored"]
fn memory_does_not_grow_with_the_checkpoint() {
    const VOCAB: u64 = 248_144;
    let dir = Dir::new();
    let mut model = Model::new(1, true);
    let text = &mut model.config["text_config"];
    for (key, value) in [
        ("hidden_size", 2048),
        ("vocab_size", VOCAB),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 2),
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 32),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("num_experts", 256),
        ("moe_intermediate_size", 512),
        ("shared_expert_intermediate_size", 512),
    ] {
        text[key] = json!(value);
    }
    let text_only = text.take();
    fs::write(dir.join("config.json"), text_only.to_string()).unwrap();
    fs::write(dir.join("chat_template.jinja"), "x").unwrap();
    // As many tokens and merges as the real tokenizer: 500 signs and 247,000 pairs of them.
    let sign = |i: u64| char::from_u32(0x4E00 + i as u32).unwrap().to_string();
    let vocab = model.tokenizer["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| id.as_u64() < Some(7));
    (0..500).for_each(|i| drop(vocab.insert(sign(i), json!(100 + i))));
    let pairs = (0..247_000).map(|i| (sign(i / 500), sign(i % 500)));
    let merges: Vec<_> = pairs.clone().map(|(a, b)| json!([a, b])).collect();
    vocab.extend(pairs.enumerate().map(|(i, (a, b))| (a + &b, json!(600 + i))));
    model.tokenizer["model"]["merges"] = json!(merges);
    fs::write(dir.join("tokenizer.json"), model.tokenizer.to_string()).unwrap();
    drop(model);
    drop(merges);

    let p = "model.layers.0.";
    let linear = "model.layers.0.linear_attn.";
    let mut header = Map::new();
    let mut at = 0;
    for (name, shape) in [
        ("model.embed_tokens.weight".to_string(), vec![VOCAB, 2048]),
        ("lm_head.weight".to_string(), vec![VOCAB, 2048]),
        ("model.norm.weight".to_string(), vec![2048]),
        (format!("{p}input_layernorm.weight"), vec![2048]),
        (format!("{p}post_attention_layernorm.weight"), vec![2048]),
        (format!("{linear}in_proj_qkv.weight"), vec![8192, 2048]),
        (format!("{linear}in_proj_z.weight"), vec![4096, 2048]),
        (format!("{linear}in_proj_a.weight"), vec![32, 2048]),
        (format!("{linear}in_proj_b.weight"), vec![32, 2048]),
        (format!("{linear}conv1d.weight"), vec![8192, 1, 4]),
        (format!("{linear}A_log"), vec![32]),
        (format!("{linear}dt_bias"), vec![32]),
        (format!("{linear}norm.weight"), vec![128]),
        (format!("{linear}out_proj.weight"), vec![2048, 4096]),
        (format!("{p}mlp.gate.weight"), vec![256, 2048]),
        (format!("{p}mlp.shared_expert_gate.weight"), vec![1, 2048]),
        (format!("{p}mlp.shared_expert.gate_proj.weight"), vec![512, 2048]),
        (format!("{p}mlp.shared_expert.up_proj.weight"), vec![512, 2048]),
        (format!("{p}mlp.shared_expert.down_proj.weight"), vec![2048, 512]),
        (format!("{p}mlp.experts.gate_up_proj"), vec![256, 1024, 2048]),
        (format!("{p}mlp.experts.down_proj"), vec![256, 2048, 512]),
    ] {
        let end = at + 2 * shape.iter().product::<u64>();
        header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let header = serde_json::Value::Object(header).to_string();
    let weights = dir.join("model.safetensors");
    common::write_safetensors(&weights, &header, b"");
    File::options().write(true).open(&weights).unwrap().set_len(8 + header.len() as u64 + at).unwrap();

    let started = std::time::Instant::now();
    let (peak, bytes) = run_and_measure(&dir.0, &dir.join("m.gguf"));
    eprintln!("{at} bytes in, {bytes} out, peak {} MiB, {:?}", peak >> 20, started.elapsed());
    assert!(at > 3 << 30 && bytes > 1 << 30);
    assert!(peak < 1 << 30, "peak memory {peak} bytes");
}

/// Packs in a process of its own. Its peak is read while it runs: the counter only grows, so the last reading is the
/// peak but for the final milliseconds, in which only the header is written.
fn run_and_measure(from: &Path, to: &Path) -> (u64, u64) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_forerun-quant"))
        .args(["pack", "--from"])
        .arg(from)
        .arg("--to")
        .arg(to)
        .spawn()
        .unwrap();
    let mut peak = 0;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        let text = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")).and_then(|l| l.split_whitespace().next());
        peak = peak.max(line.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10);
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    assert!(status.success());
    (peak, fs::metadata(to).unwrap().len())
}
