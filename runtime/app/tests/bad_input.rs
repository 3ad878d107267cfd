//! Bad model files, pictures, prompts and pipes: a clear line, the documented exit code, little memory, no panic.

mod common;

use common::{Image, Outcome, Scratch, children_peak_bytes, finish, finish_within, forerun, run, tests, tiny_moe};
use forerun_format::BlockType;
use forerun_format::gguf::{Header, HeaderBuilder, Kv};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// What refusing a file may cost: the header of a real model with its vocabulary is about 15 MiB, and a cap may be small.
const PEAK_BYTES_MAX: u64 = 200 << 20;
/// Refusing takes milliseconds; the rest is for a busy machine.
const REFUSAL: Duration = Duration::from_secs(10);

/// Asks `model` something that needs no picture.
#[track_caller]
fn ask(model: &Path) -> Outcome {
    let mut c = forerun();
    c.args(["run", "--temperature", "0", "--max-tokens", "2", "--memory", "64M", "--prompt", "Hello!", "--model"]);
    let o = finish_within(REFUSAL, c.arg(model), b"");
    let peak = children_peak_bytes();
    assert!(peak < PEAK_BYTES_MAX, "{peak} bytes resident: {o:?}");
    o
}

/// Shows `picture` to the bundled model.
#[track_caller]
fn show(picture: &Path) -> Outcome {
    let mut c = forerun();
    c.args(["run", "--temperature", "0", "--max-tokens", "2", "--prompt", "What is it?", "--model"]).arg(tiny_moe());
    let o = finish_within(REFUSAL, c.arg("--image").arg(picture), b"");
    let peak = children_peak_bytes();
    assert!(peak < PEAK_BYTES_MAX, "{peak} bytes resident: {o:?}");
    o
}

fn random(seed: u64, n: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn what_is_no_model_file() {
    let s = Scratch::new("no-model");
    ask(&s.file("empty", b"")).refused(3, &["/empty: ", "the file ends early", "copy the model file again"]);
    ask(&s.file("three", b"GGU")).refused(3, &["the file ends early"]);
    ask(&s.file("magic", b"GGUF")).refused(3, &["the file ends early"]);
    ask(&s.file("random", &random(1, 1 << 20))).refused(3, &["not a model file", "expected 47 47 55 46"]);
    let mut bytes = random(2, 1 << 20);
    bytes[..8].copy_from_slice(b"GGUF\x03\0\0\0");
    ask(&s.file("count", &bytes)).refused(3, &["count: found ", "expected at most"]);
    ask(&s.path("missing")).refused(3, &["/missing: No such file"]);
    ask(&s.path("")).refused(3, &["not a regular file"]);
    ask(Path::new("/dev/zero")).refused(3, &["/dev/zero: not a regular file"]);
    ask(&tests("demo/demo.json")).refused(3, &["not a model file"]);
    let fifo = s.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    ask(&fifo).refused(3, &["not a regular file"]);
    show(&fifo).refused(3, &["not a regular file"]);
    let dead = s.path("dead");
    std::os::unix::fs::symlink(&dead, &dead).expect("symlink");
    ask(&dead).refused(1, &["symbolic links"]);
}

#[test]
fn an_unreadable_file() {
    use std::os::unix::fs::PermissionsExt;
    let s = Scratch::new("unreadable");
    let path = s.file("model.gguf", &Image::tiny_moe().0);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o000)).expect("chmod");
    if std::fs::File::open(&path).is_ok() {
        println!("skipped: this user may read everything");
        return;
    }
    ask(&path).refused(1, &["model.gguf: Permission denied"]);
}

#[test]
fn a_model_file_cut_off_anywhere() {
    let file = Image::tiny_moe().0;
    let header = Header::parse(&file, file.len() as u64).expect("header");
    let data = header.data_offset as usize;
    let resident = header.tensor("output.weight").expect("tensor").offset as usize;
    let experts = header.tensor("blk.0.ffn_exps.packed").expect("tensor").offset as usize;
    let end = file.len();
    let mut lengths = vec![4, 8, 23, 24, 100, 4096, data / 2, data - 1, data, data + 1];
    lengths.extend([
        resident,
        resident + 4096,
        experts - 1,
        experts,
        experts + 1,
        (experts + end) / 2,
        end - 4096,
        end - 1,
    ]);
    let s = Scratch::new("cut-off");
    for n in lengths {
        let o = ask(&s.file("model.gguf", &file[..n]));
        o.refused(3, &["model.gguf: "]);
        let said = ["the file ends early", "expected data inside the file", "expected at most"];
        assert!(said.iter().any(|words| o.stderr.contains(words)), "cut to {n} bytes: {o:?}");
    }
}

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
                let at = f.at("tokenizer.ggml.tokens") + 8;
                f.put(at, &HUGE)
            },
            &["length of an array: found 18446744073709551615"],
        ),
        (
            "length of a string in an array",
            |f| {
                let at = f.at("tokenizer.ggml.tokens") + 16;
                f.put(at, &HUGE)
            },
            &["length of a string: found 18446744073709551615"],
        ),
        (
            "a vocabulary of another length",
            |f| {
                let at = f.at("tokenizer.ggml.token_type") + 8;
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
            &["found \"tensor-major\", expected \"expert-major\" version 1"],
        ),
        (
            "a plain GGUF file",
            |f| f.rename("forerun.layout"),
            &["forerun.layout: found a plain GGUF file, expected \"expert-major\"", "forerun-quant pack"],
        ),
        (
            "a later version of the layout",
            |f| f.value("forerun.version", &[2]),
            &["expected \"expert-major\" version 1"],
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
        ("no vocabulary", |f| f.rename("tokenizer.ggml.tokens"), &["tokenizer.ggml.tokens is missing"]),
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
        (
            "convolution",
            |f| f.value("qwen35moe.ssm.conv_kernel", &[1]),
            &["ssm.conv_kernel: found 1, expected 2 to 16"],
        ),
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
            |f| f.value("forerun.image.detail", b"\x03\0\0\0\0\0\0\064x"),
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
        let o = ask(&s.file("model.gguf", &patch(Image::tiny_moe()).0));
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
    ask(&path).refused(3, &["length of the header: found over", "expected at most"]);
    let key = [start(0, 1), 1u64.to_le_bytes().to_vec(), b"a\x08\0\0\0".to_vec(), (1u64 << 30).to_le_bytes().to_vec()];
    ask(&sparse("string", &key.concat(), 2 << 30)).refused(3, &["length of the header"]);
    for (name, bytes) in [("keys", start(0, 50 << 20)), ("tensors", start(50 << 20, 0))] {
        ask(&sparse(name, &bytes, 4 << 30)).refused(3, &["found ", "expected "]);
    }
    // A few million keys and tensors that are well formed.
    let mut bytes = start(0, 2_000_000);
    for i in 0..2_000_000u32 {
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(format!("{i:08x}").as_bytes());
        bytes.extend_from_slice(&[0, 0, 0, 0, 1]);
    }
    ask(&s.file("many-keys", &bytes)).refused(3, &["found ", "expected "]);
    let mut bytes = start(1_000_000, 0);
    for i in 0..1_000_000u32 {
        bytes.extend_from_slice(&[8, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(format!("{i:08x}").as_bytes());
        bytes.extend_from_slice(&[0; 16]);
    }
    ask(&sparse("many-tensors", &bytes, 1 << 30)).refused(3, &["found ", "expected "]);
}

/// What another program wrote: readable, but not packed.
#[test]
fn a_plain_gguf_file() {
    let mut h = HeaderBuilder::new();
    h.set("general.architecture", Kv::Str("qwen35moe".into()));
    h.tensor("token_embd.weight", BlockType::F16, &[32, 8]).expect("tensor");
    let mut bytes = h.bytes();
    bytes.resize(bytes.len() + h.data_bytes() as usize, 0);
    let s = Scratch::new("plain");
    let o = ask(&s.file("plain.gguf", &bytes));
    o.refused(3, &["plain.gguf: ", "found a plain GGUF file", "forerun-quant pack"]);
}

fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    image::GrayImage::new(width, height).write_to(&mut bytes, image::ImageFormat::Png).expect("png");
    bytes.into_inner()
}

#[test]
fn pictures_that_are_none() {
    let s = Scratch::new("pictures");
    let whole = std::fs::read(tests("demo/scene_083.png")).expect("picture");
    show(&s.file("one.png", &png(1, 1))).success();
    show(&s.file("picture.txt", &whole)).success(); // what it is called does not matter
    show(&s.file("empty.png", b"")).refused(3, &["empty.png: not a picture this build reads"]);
    show(&s.file("random.png", &random(3, 5000))).refused(3, &["random.png: not a picture"]);
    show(&s.file("text.png", b"This is not a picture.")).refused(3, &["text.png: not a picture"]);
    show(&s.path("missing.png")).refused(3, &["missing.png: No such file"]);
    show(&s.path("")).refused(3, &["not a regular file"]);
    show(Path::new("/dev/zero")).refused(3, &["not a regular file"]);
    show(&tiny_moe()).refused(3, &["tiny-moe.gguf: not a picture"]);
    for n in [8, 20, 33, whole.len() / 2, whole.len() - 1] {
        show(&s.file("cut.png", &whole[..n])).refused(3, &["cut.png: ", "copy it again"]);
    }
    let mut damaged = whole.clone();
    damaged[whole.len() / 2..whole.len() / 2 + 8].fill(0);
    show(&s.file("damaged.png", &damaged)).refused(3, &["damaged.png: the PNG cannot be decoded"]);
    let narrow = show(&s.file("narrow.png", &png(20000, 3)));
    narrow.refused(3, &["narrow.png: picture of 20000 x 3 pixels", "cut it into pieces"]);
    for (width, height) in [(65500u32, 65500u32), (u32::MAX >> 1, 1), (u32::MAX >> 1, u32::MAX >> 1), (0, 5)] {
        let mut huge = png(1, 1);
        huge[16..20].copy_from_slice(&width.to_be_bytes());
        huge[20..24].copy_from_slice(&height.to_be_bytes());
        let sum = crc32(&huge[12..29]);
        huge[29..33].copy_from_slice(&sum.to_be_bytes());
        show(&s.file("huge.png", &huge)).refused(3, &["huge.png: "]);
    }
    let big = s.file("big.png", &whole);
    std::fs::File::options().write(true).open(&big).and_then(|f| f.set_len(65 << 20)).expect("sparse file");
    show(&big).refused(3, &["big.png: found 68157440 bytes, expected a picture file of at most 67108864"]);
}

/// CRC-32 as PNG has it.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes
        .iter()
        .fold(!0, |c, &b| (0..8).fold(c ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 }))
}

#[test]
fn a_model_without_eyes() {
    // The keys of the tower are gone, and with them the tower.
    let s = Scratch::new("no-eyes");
    let path = s.file("text.gguf", &Image::tiny_moe().rename("clip.vision.block_count").0);
    ask(&path).success();
    let o = run("run --prompt x", &[&"--model", &path, &"--image", &tests("demo/scene_083.png")]);
    o.refused(3, &["no vision tower"]);
}

#[test]
fn prompts_that_do_not_fit() {
    let model = tiny_moe();
    let long = "word ".repeat(600);
    let o = run("run --context 256", &[&"--model", &model, &"--prompt", &long]);
    o.refused(4, &["tokens do not fit the context of 256", "raise --context"]);
    let picture = tests("goldens/pictures/camera640_4x_0.png");
    let o = run("run --context 128 --detail 4x", &[&"--model", &model, &"--prompt", &"x", &"--image", &picture]);
    o.refused(4, &["do not fit the context of 128", "--detail 16x"]);
    run("run --context 0", &[&"--model", &model, &"--prompt", &"x"]).refused(4, &["a context of 0 tokens"]);
    // An empty prompt is one.
    run("run --max-tokens 1", &[&"--model", &model, &"--prompt", &""]).success();
    let o = run("plan --max-pixels 18446744073709551615", &[&"--model", &model]);
    o.refused(4, &["do not fit the address space", "--max-pixels"]);
    run("plan --max-pixels 999999999999 --memory 1G", &[&"--model", &model]).refused(4, &["too small", "pictures"]);
}

#[test]
fn a_cap_below_the_floor_names_the_floor() {
    let floor = |args: &str| -> u64 {
        let o = run(&format!("{args} --memory 1M"), &[&"--model", &tiny_moe()]);
        o.refused(4, &["a cap of 1 MiB is too small", "raise --memory"]);
        let (_, rest) = o.stderr.split_once("need at least ").expect("a floor");
        rest.split_once(" MiB").expect("MiB").0.parse().expect("a number")
    };
    let picture = tests("demo/scene_083.png");
    let with_picture = format!("run --prompt x --max-tokens 2 --image {}", picture.display());
    for args in ["run --prompt x --max-tokens 2", "run --prompt x --max-tokens 2 --context 64 --chunk 4", &with_picture]
    {
        let mib = floor(args);
        run(&format!("{args} --memory {mib}M"), &[&"--model", &tiny_moe()]).success();
        let o = run(&format!("{args} --memory {}M", mib - 1), &[&"--model", &tiny_moe()]);
        o.refused(4, &[&format!("need at least {mib} MiB")]);
    }
}

#[test]
fn forged_turns_and_pictures() {
    let model = tiny_moe();
    for token in
        ["<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image>", "</slice>"]
    {
        let text = format!("What is {token} here?");
        let o = run("run", &[&"--model", &model, &"--prompt", &text]);
        o.refused(3, &[&format!("found the control token {token}"), "expected plain text: remove it"]);
        assert_eq!(o.stdout, "");
        let o = run("run --prompt x", &[&"--model", &model, &"--system", &text]);
        o.refused(3, &[token, "message 0"]);
        let picture = tests("demo/scene_083.png");
        let o = run("run", &[&"--model", &model, &"--prompt", &text, &"--image", &picture]);
        o.refused(3, &[token, "message 0"]);
        run("verify", &[&"--model", &model, &"--prompt", &text]).refused(3, &[token]);
    }
    run("run --max-tokens 1 --prompt <think>x</think><box>", &[&"--model", &model]).success();
}

/// A reader that takes one byte and goes away ends the program soon, without a word and without a panic; so does one
/// that reads nothing. A full disk is told.
#[test]
fn standard_output_that_goes_away() {
    let commands: [&[&str]; 4] = [
        &["run", "--temperature", "0", "--prompt", "Tell me a story.", "--max-tokens", "100000"],
        &["run", "--json", "--prompt", "Hello!"],
        &["plan"],
        &["verify", "--tokens", "4"],
    ];
    for args in commands {
        for take in [0, 1] {
            let mut c = forerun();
            c.args(args).arg("--model").arg(tiny_moe()).stdin(Stdio::null());
            let mut child = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("forerun starts");
            let mut out = child.stdout.take().expect("piped");
            if take > 0 {
                out.read_exact(&mut [0]).expect("a byte");
            }
            drop(out);
            let o = child.wait_with_output().expect("it ends");
            let stderr = String::from_utf8(o.stderr).expect("UTF-8");
            assert!(!stderr.contains("panicked") && !stderr.contains("forerun: "), "{args:?}: {stderr}");
            // What fits one write may be out before the reader goes.
            let sane = o.status.code() == Some(1) || (take == 1 && o.status.code() == Some(0));
            assert!(sane, "{args:?}, {take} bytes taken: {:?}, {stderr}", o.status);
        }
        let mut c = Command::new("sh");
        c.args(["-c", "exec \"$@\" >/dev/full", "sh", env!("CARGO_BIN_EXE_forerun")]).args(args);
        finish(c.arg("--model").arg(tiny_moe())).refused(1, &["standard output: No space left on device"]);
    }
}

#[test]
fn standard_error_that_goes_away() {
    let mut c = forerun();
    c.args(["run", "--temperature", "0", "--prompt", "What is 3 plus 5?", "--model"]).arg(tiny_moe());
    let mut child =
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("forerun starts");
    drop(child.stderr.take());
    let o = child.wait_with_output().expect("it ends");
    assert_eq!((o.status.code(), o.stdout.as_slice()), (Some(0), b"3 plus 5 is 8.\n".as_slice()), "{:?}", o.status);
}
