//! Headers that lie: the bundled model with one thing changed, and small files that say they are large.

mod common;

use common::{Image, Scratch, ask_hello};

/// A change to the header of the bundled model, and words of the answer to it.
type Patch = (&'static str, fn(Image) -> Image, &'static [&'static str]);

#[test]
fn hostile_headers() {
    const HUGE: [u8; 8] = u64::MAX.to_le_bytes();
    const QKV: &str = "blk.0.attn_qkv.weight";
    let patches: &[Patch] = &[
        ("version 1", |f| f.put(4, &[1]), &["GGUF version 1, expected 3"]),
        ("version of the other byte order", |f| f.put(4, &[0, 0, 0, 3]), &["GGUF version 50331648, expected 3"]),
        ("tensor count", |f| f.put(8, &HUGE), &["tensor count: found 18446744073709551615, expected at most"]),
        ("key count", |f| f.put(16, &HUGE), &["metadata count: found 18446744073709551615, expected at most"]),
        (
            "one key too many",
            |f| {
                let n = f.0[16] + 1;
                f.put(16, &[n])
            },
            &[],
        ),
        ("one tensor too few", |f| f.put(8, &287u64.to_le_bytes()), &[]),
        ("length of a key", |f| f.put(24, &HUGE), &["length of a string: found 18446744073709551615"]),
        ("type of a value", |f| f.kind("forerun.version", 99), &["type of a value", "found 99"]),
        ("array of arrays", |f| f.value("forerun.token.stop", &[9]), &["array", "found 9"]),
        (
            "length of an array",
            |f| {
                let at = f.at("forerun.vocab.ends") + 8;
                f.put(at, &HUGE)
            },
            &["length of an array: found 18446744073709551615"],
        ),
        (
            "length of a string in an array",
            |f| {
                let at = f.at("forerun.token.stop");
                f.put(at + 4, &[8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).put(at + 16, &HUGE)
            },
            &["length of a string: found 18446744073709551615"],
        ),
        (
            "a vocabulary of another length",
            |f| {
                let at = f.at("forerun.vocab.ends") + 8;
                f.put(at, &2047u64.to_le_bytes())
            },
            &[],
        ),
        ("not UTF-8", |f| f.value("general.architecture", &[10, 0, 0, 0, 0, 0, 0, 0, 0xff]), &["expected UTF-8"]),
        (
            "another architecture",
            |f| f.value("general.architecture", b"\x09\0\0\0\0\0\0\0llama2222"),
            &["found \"llama2222\", expected \"qwen35moe\""],
        ),
        (
            "another layout",
            |f| f.value("forerun.layout", b"\x0c\0\0\0\0\0\0\0tensor-major"),
            &["found \"tensor-major\", expected \"expert-major\" version 1 to 2"],
        ),
        (
            "a plain GGUF file",
            |f| f.rename("forerun.layout"),
            &["forerun.layout: found a plain GGUF file, expected \"expert-major\"", "forerun-quant pack"],
        ),
        (
            "a later version of the layout",
            |f| f.value("forerun.version", &[3]),
            &["expected \"expert-major\" version 1 to 2"],
        ),
        (
            "a key is missing",
            |f| f.rename("qwen35moe.embedding_length"),
            &["key qwen35moe.embedding_length is missing"],
        ),
        (
            "a key of another type",
            |f| f.kind("qwen35moe.embedding_length", 6),
            &["key qwen35moe.embedding_length: found Float", "expected a whole number"],
        ),
        ("no stop tokens", |f| f.rename("forerun.token.stop"), &["forerun.token.stop is missing"]),
        ("no vocabulary", |f| f.rename("forerun.vocab.version"), &["tokenizer.ggml.tokens is missing"]),
        ("no tokens", |f| f.rename("forerun.vocab.ends"), &["forerun.vocab.ends is missing"]),
        (
            "a later vocabulary",
            |f| f.value("forerun.vocab.version", &[2]),
            &["forerun.vocab.version: found 2, expected 1"],
        ),
        (
            "a token that ends before it begins",
            |f| {
                let at = f.at("forerun.vocab.ends") + 16 + 4 * 300;
                f.put(at, &[0; 4])
            },
            &["forerun.vocab.ends of token 300: found", "to 0, expected some bytes"],
        ),
        (
            "bytes of tokens",
            |f| {
                let at = f.at("forerun.vocab.bytes") + 16 + 300;
                f.put(at, &[0xff; 8])
            },
            &["merge ", "expected tokens below 2048, the third the other two joined"],
        ),
        (
            "a merge beyond the vocabulary",
            |f| {
                let at = f.at("forerun.vocab.merges") + 16 + 12 * 7;
                f.put(at, &u32::MAX.to_le_bytes())
            },
            &["merge 7: found tokens 4294967295 and"],
        ),
        ("no template", |f| f.rename("tokenizer.chat_template"), &["tokenizer.chat_template is missing"]),
        (
            "a template with a mistake",
            |f| {
                let at = f.at("tokenizer.chat_template") + 12;
                f.put(at, b"{%- xxxxx")
            },
            &["tokenizer.chat_template: found chat template, line 1"],
        ),
        ("no checksums", |f| f.rename("forerun.crc32c.experts"), &["forerun.crc32c.experts is missing"]),
        (
            "a stop token beyond the vocabulary",
            |f| {
                let at = f.at("forerun.token.stop") + 16;
                f.put(at, &u32::MAX.to_le_bytes())
            },
            &["4294967295"],
        ),
        (
            "an image token beyond the vocabulary",
            |f| f.value("forerun.token.image", &u32::MAX.to_le_bytes()),
            &["forerun.token.image: found 4294967295, expected a token of the vocabulary"],
        ),
        ("alignment of 0", |f| f.value("general.alignment", &[0; 4]), &["general.alignment: found Uint(0)"]),
        ("a smaller alignment", |f| f.value("general.alignment", &[32, 0]), &[]),
        (
            "layers",
            |f| f.value("qwen35moe.block_count", &u32::MAX.to_le_bytes()),
            &["qwen35moe.block_count: found 4294967295"],
        ),
        ("one layer more", |f| f.value("qwen35moe.block_count", &[9]), &[]),
        ("no layer", |f| f.value("qwen35moe.block_count", &[0]), &["qwen35moe.block_count: found 0, expected 1 to"]),
        ("width", |f| f.value("qwen35moe.embedding_length", &[0, 1]), &["found [128", "expected [256"]),
        ("no width", |f| f.value("qwen35moe.embedding_length", &[0]), &["qwen35moe.embedding_length: found 0"]),
        (
            "experts",
            |f| f.value("qwen35moe.expert_count", &[255, 255, 255, 0]),
            &["qwen35moe.expert_count: found 16777215"],
        ),
        ("experts used", |f| f.value("qwen35moe.expert_used_count", &[33]), &["expert_used_count: found 33 of 32"]),
        ("no expert used", |f| f.value("qwen35moe.expert_used_count", &[0]), &["expert_used_count: found 0"]),
        (
            "heads",
            |f| f.value("qwen35moe.attention.head_count", &[3]),
            &["attention.head_count: found 3, expected a multiple"],
        ),
        (
            "width of a head",
            |f| f.value("qwen35moe.attention.key_length", &[0, 2]),
            &["width of a head: found 512", "at most 256"],
        ),
        ("rotated dimensions", |f| f.value("qwen35moe.rope.dimension_count", &[15]), &["rope.dimension_sections"]),
        (
            "base of the rotation",
            |f| f.value("qwen35moe.rope.freq_base", &f32::NAN.to_le_bytes()),
            &["rope.freq_base: found NaN, expected above 1"],
        ),
        (
            "epsilon",
            |f| f.value("qwen35moe.attention.layer_norm_rms_epsilon", &f32::NAN.to_le_bytes()),
            &["epsilon: found NaN"],
        ),
        ("convolution", |f| f.value("qwen35moe.ssm.conv_kernel", &[1]), &["ssm.conv_kernel: found 1, expected 4"]),
        (
            "context",
            |f| f.value("qwen35moe.context_length", &u32::MAX.to_le_bytes()),
            &["context_length: found 4294967295"],
        ),
        (
            "temperature",
            |f| f.value("general.sampling.temp", &f32::NAN.to_le_bytes()),
            &["general.sampling: found", "expected a temperature of at least 0"],
        ),
        ("patch", |f| f.value("clip.vision.patch_size", &[0]), &["patch_size: found 0"]),
        (
            "heads of the tower",
            |f| f.value("clip.vision.attention.head_count", &[5]),
            &["clip.vision.attention.head_count: found 5 for width 96"],
        ),
        (
            "standard deviation",
            |f| {
                let at = f.at("clip.vision.image_std") + 16;
                f.put(at, &[0; 4])
            },
            &["image_std", "expected positive numbers"],
        ),
        (
            "mode",
            |f| f.value("forerun.image.detail", b"\x03\0\0\0\0\0\0\x0064x"),
            &["forerun.image.detail: found \"64x\", expected \"16x\" or \"4x\""],
        ),
        (
            "expert type",
            |f| {
                let at = f.at("forerun.expert.up_type") + 16;
                f.put(at, &[99])
            },
            &["type of the experts of layer 0: found 99"],
        ),
        (
            "another expert type",
            |f| {
                let at = f.at("forerun.expert.up_type") + 16;
                f.put(at, &[0])
            },
            &["blk.0.ffn_exps.packed: found [24576, 32]"],
        ),
        ("a tensor is missing", |f| f.rename(QKV), &["tensor blk.0.attn_qkv.weight is missing"]),
        ("experts are missing", |f| f.rename("blk.5.ffn_exps.packed"), &[]),
        (
            "an axis of 0",
            |f| {
                let at = f.axis(QKV, 1);
                f.put(at, &[0; 8])
            },
            &["shape of tensor blk.0.attn_qkv.weight", "no empty axis"],
        ),
        (
            "a huge axis",
            |f| {
                let at = f.axis(QKV, 1);
                f.put(at, &HUGE)
            },
            &["shape of tensor blk.0.attn_qkv.weight", "a size that fits 64 bits"],
        ),
        (
            "a large axis",
            |f| {
                let at = f.axis(QKV, 1);
                f.put(at, &(1u64 << 40).to_le_bytes())
            },
            &["tensor blk.0.attn_qkv.weight: found", "expected data inside the file"],
        ),
        (
            "a shorter axis",
            |f| {
                let at = f.axis(QKV, 1);
                f.put(at, &[255, 0])
            },
            &["tensor blk.0.attn_qkv.weight: found [128, 255]"],
        ),
        (
            "axes swapped",
            |f| {
                let (at, ne) = (f.axis(QKV, 0), f.0[f.axis(QKV, 0)..][..16].to_vec());
                f.put(at, &[&ne[8..], &ne[..8]].concat())
            },
            &["shape of tensor blk.0.attn_qkv.weight: found [256, 128], expected [128, 256]"],
        ),
        (
            "number of axes",
            |f| {
                let at = f.dims(QKV);
                f.put(at, &[5])
            },
            &["dimensions of tensor blk.0.attn_qkv.weight: found 5, expected at most 4"],
        ),
        (
            "an unknown type",
            |f| {
                let at = f.type_of(QKV);
                f.put(at, &[99])
            },
            &[],
        ),
        (
            "a smaller type",
            |f| {
                let at = f.type_of(QKV);
                f.put(at, &[2])
            },
            &[],
        ),
        (
            "a vector of half the type",
            |f| {
                let at = f.type_of("blk.0.attn_norm.weight");
                f.put(at, &[1])
            },
            &["type of tensor blk.0.attn_norm.weight: found f16, expected f32"],
        ),
        (
            "an odd offset",
            |f| {
                let at = f.offset_of(QKV);
                f.put(at, &[1])
            },
            &["offset of tensor blk.0.attn_qkv.weight", "expected a multiple of 4096"],
        ),
        (
            "an offset beyond the end",
            |f| {
                let at = f.offset_of(QKV);
                f.put(at, &(1u64 << 40).to_le_bytes())
            },
            &["tensor blk.0.attn_qkv.weight: found", "expected data inside the file"],
        ),
        (
            "an offset that overflows",
            |f| {
                let at = f.offset_of(QKV);
                f.put(at, &(u64::MAX - 4095).to_le_bytes())
            },
            &["tensor blk.0.attn_qkv.weight: found", "expected data inside the file"],
        ),
        (
            "an offset that is another's",
            |f| {
                let (at, other) = (f.offset_of("blk.1.attn_qkv.weight"), f.offset_of(QKV));
                let bytes = f.0[other..][..8].to_vec();
                f.put(at, &bytes)
            },
            &["blk.1.attn_qkv.weight", "overlaps tensor blk.0.attn_qkv.weight"],
        ),
        (
            "a name twice",
            |f| {
                let at = f.dims("blk.1.attn_qkv.weight") - 21 + 4;
                f.put(at, b"0")
            },
            &["tensor blk.0.attn_qkv.weight: found it twice"],
        ),
    ];
    let s = Scratch::new("hostile");
    for (name, patch, words) in patches {
        println!("{name}");
        let o = ask_hello(&s.file("model.gguf", &patch(Image::tiny_moe()).0));
        o.refused(3, &["model.gguf: ", "expected "]).refused(3, words);
        assert!(o.stderr.len() < 1000, "a line to read, not {} bytes", o.stderr.len());
    }
}

/// Files that are small on disk and say that they are large.
#[test]
fn headers_that_want_memory() {
    let s = Scratch::new("large-headers");
    let sparse = |name: &str, start: &[u8], len: u64| {
        let path = s.file(name, start);
        std::fs::File::options().write(true).open(&path).and_then(|f| f.set_len(len)).expect("sparse file");
        path
    };
    let start =
        |tensors: u64, keys: u64| [b"GGUF\x03\0\0\0".as_slice(), &tensors.to_le_bytes(), &keys.to_le_bytes()].concat();
    // A key of 1 GiB of zeros; a string of 1 GiB; as many empty keys and tensors as the file could hold.
    let path = sparse("key", &[start(0, 1), (1u64 << 30).to_le_bytes().to_vec()].concat(), 2 << 30);
    ask_hello(&path).refused(3, &["length of the header: found over", "expected at most"]);
    let key = [start(0, 1), 1u64.to_le_bytes().to_vec(), b"a\x08\0\0\0".to_vec(), (1u64 << 30).to_le_bytes().to_vec()];
    ask_hello(&sparse("string", &key.concat(), 2 << 30)).refused(3, &["length of the header"]);
    for (name, bytes) in [("keys", start(0, 50 << 20)), ("tensors", start(50 << 20, 0))] {
        ask_hello(&sparse(name, &bytes, 4 << 30)).refused(3, &["found ", "expected "]);
    }
    // A few million keys and tensors that are well formed.
    let mut bytes = start(0, 2_000_000);
    for i in 0..2_000_000u32 {
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(format!("{i:08x}").as_bytes());
        bytes.extend_from_slice(&[0, 0, 0, 0, 1]);
    }
    ask_hello(&s.file("many-keys", &bytes)).refused(3, &["found ", "expected "]);
    let mut bytes = start(1_000_000, 0);
    for i in 0..1_000_000u32 {
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(format!("{i:08x}").as_bytes());
        bytes.extend_from_slice(&[0; 16]);
    }
    ask_hello(&sparse("many-tensors", &bytes, 1 << 30)).refused(3, &["found ", "expected "]);
}
