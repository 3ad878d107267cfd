//! Model files that fuzzing or review found to be accepted, or to panic, where they must be refused. Each is the bundled
//! mixture with a change that keeps the rest of the file consistent.

use forerun::{prompt::PromptBuilder, tokenizer::Tokenizer};
use forerun_engine::{
    config::Config,
    plan::{KvType, Options, Plan, PlanError, Residency, VisionOptions},
    slicing::Detail,
    weights::Weights,
};
use forerun_format::{
    BlockType, FormatError,
    gguf::{Array, Header, HeaderBuilder, Kv, Value},
    keys,
};
use forerun_tests::Model;

const OPTIONS: Options = Options {
    context: 64,
    chunk: 16,
    kv: KvType::F16,
    vision: None,
    prefix: false,
    cap_bytes: None,
    slots_max: None,
    tokenizer_bytes: 0,
};

fn list(a: Array<'_>) -> Kv {
    match a.iter().next() {
        Some(Value::Float(_)) => {
            Kv::F32s(a.iter().map(|v| if let Value::Float(x) = v { x as f32 } else { unreachable!("{v:?}") }).collect())
        }
        Some(Value::Str(_)) => {
            Kv::Strs(a.iter().map(|v| if let Value::Str(s) = v { s.into() } else { unreachable!("{v:?}") }).collect())
        }
        _ => Kv::U32s(
            a.iter()
                .map(|v| match v {
                    Value::Uint(n) => n as u32,
                    Value::Int(n) => n as u32,
                    v => unreachable!("{v:?}"),
                })
                .collect(),
        ),
    }
}

/// Header and file length of the bundled mixture written again, its tensors after `change`, with `extra` tensors in front.
fn rebuilt(extra: &[(&str, BlockType, &[u64])], change: impl Fn(&str, BlockType) -> BlockType) -> (Vec<u8>, u64) {
    let model = Model::bundled("tiny-moe");
    let old = model.header();
    let mut new = HeaderBuilder::new();
    for (key, value) in old.kv() {
        let value = match *value {
            Value::Uint(n) => Kv::U32(n as u32),
            Value::Float(x) => Kv::F32(x as f32),
            Value::Bool(b) => Kv::Bool(b),
            Value::Str(s) => Kv::Str(s.into()),
            Value::Array(a) => list(a),
            Value::Int(n) => unreachable!("{key}: {n}"),
        };
        new.set(key, value);
    }
    for (name, block, ne) in extra {
        new.tensor(name, *block, ne).unwrap();
    }
    for t in old.tensors() {
        new.tensor(t.name, change(t.name, t.block_type().unwrap()), &t.ne).unwrap();
    }
    new.set(keys::CRC_TENSORS, Kv::U32s(vec![0; new.tensor_count()]));
    let header = new.bytes();
    let file_bytes = header.len() as u64 + new.data_bytes();
    (header, file_bytes)
}

fn open(bytes: &[u8], file_bytes: u64) -> Result<(Config, Weights), FormatError> {
    let header = Header::parse(bytes, file_bytes)?;
    let config = Config::read(&header)?;
    let weights = Weights::read(&header, &config)?;
    Ok((config, weights))
}

#[test]
fn the_unchanged_file_is_accepted() {
    let (bytes, file_bytes) = rebuilt(&[], |_, block| block);
    let (config, weights) = open(&bytes, file_bytes).unwrap();
    assert!(Plan::new(&config, &weights, OPTIONS).is_ok());
}

/// No kernel multiplies plain bytes: the vision tower panicked at its first picture.
#[test]
fn a_patch_kernel_of_plain_bytes_is_refused() {
    let (bytes, file_bytes) =
        rebuilt(&[], |name, block| if name == "v.patch_embd.weight" { BlockType::I8 } else { block });
    let e = open(&bytes, file_bytes).unwrap_err().to_string();
    assert!(e.starts_with("type of tensor v.patch_embd.weight: found i8"), "{e}");
}

/// With a head of one row, which is a placeholder, sampling had no token to choose from: an answer may not contain it.
#[test]
fn a_vocabulary_that_is_not_the_heads_is_refused() {
    let model = Model::bundled("tiny-moe");
    let tokenizer = Tokenizer::from_header(&model.header()).unwrap();
    assert!(PromptBuilder::new(&model.config, &tokenizer).is_ok());
    for vocab in [1, 2047, 2049] {
        let mut config = model.config.clone();
        config.text.vocab = vocab;
        let e = PromptBuilder::new(&config, &tokenizer).unwrap_err().to_string();
        assert!(e.starts_with("the vocabulary: found 2048 tokens, expected"), "{e}");
    }
}

/// A sparse file may be longer than the address space; sums of its sizes must neither wrap nor panic.
#[test]
fn a_plan_beyond_the_address_space_is_refused() {
    let half = [1u64 << 60]; // 2^62 bytes
    let extra = [("a", BlockType::F32, &half[..]), ("b", BlockType::F32, &half), ("c", BlockType::F32, &half)];
    for n in 2..=3 {
        let (bytes, file_bytes) = rebuilt(&extra[..n], |_, block| block);
        let (config, weights) = open(&bytes, file_bytes).unwrap();
        assert_eq!(Plan::new(&config, &weights, OPTIONS).unwrap_err(), PlanError::Overflow, "{n} tensors");
    }
    let (bytes, file_bytes) = rebuilt(&[], |_, block| block);
    let (config, weights) = open(&bytes, file_bytes).unwrap();
    for cap_bytes in [None, Some(1 << 30)] {
        let vision = Some(VisionOptions { detail: Detail::X16, picture_bytes: u64::MAX, residency: Residency::Auto });
        let plan = Plan::new(&config, &weights, Options { vision, cap_bytes, ..OPTIONS });
        assert_eq!(plan.unwrap_err(), PlanError::Overflow);
    }
}
