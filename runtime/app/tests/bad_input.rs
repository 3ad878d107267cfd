//! Bad model files, pictures, prompts and pipes: a clear line, the documented exit code, little memory, no panic.

mod common;

use common::{
    Image, Outcome, PEAK_BYTES_MAX, REFUSAL, Scratch, ask_hello, children_peak_bytes, finish, finish_within, forerun,
    run, tests, tiny_moe,
};
use forerun_format::BlockType;
use forerun_format::gguf::{Header, HeaderBuilder, Kv};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

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
    ask_hello(&s.file("empty", b"")).refused(3, &["/empty: ", "the file ends early", "copy the model file again"]);
    ask_hello(&s.file("three", b"GGU")).refused(3, &["the file ends early"]);
    ask_hello(&s.file("magic", b"GGUF")).refused(3, &["the file ends early"]);
    ask_hello(&s.file("random", &random(1, 1 << 20))).refused(3, &["not a model file", "expected 47 47 55 46"]);
    let mut bytes = random(2, 1 << 20);
    bytes[..8].copy_from_slice(b"GGUF\x03\0\0\0");
    ask_hello(&s.file("count", &bytes)).refused(3, &["count: found ", "expected at most"]);
    ask_hello(&s.path("missing")).refused(3, &["/missing: No such file"]);
    ask_hello(&s.path("")).refused(3, &["not a regular file"]);
    ask_hello(Path::new("/dev/zero")).refused(3, &["/dev/zero: not a regular file"]);
    ask_hello(&tests("demo/demo.json")).refused(3, &["not a model file"]);
    let fifo = s.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    ask_hello(&fifo).refused(3, &["not a regular file"]);
    show(&fifo).refused(3, &["not a regular file"]);
    let dead = s.path("dead");
    std::os::unix::fs::symlink(&dead, &dead).expect("symlink");
    ask_hello(&dead).refused(1, &["symbolic links"]);
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
    ask_hello(&path).refused(1, &["model.gguf: Permission denied"]);
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
        let o = ask_hello(&s.file("model.gguf", &file[..n]));
        o.refused(3, &["model.gguf: "]);
        let said = ["the file ends early", "expected data inside the file", "expected at most"];
        assert!(said.iter().any(|words| o.stderr.contains(words)), "cut to {n} bytes: {o:?}");
    }
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
    let o = ask_hello(&s.file("plain.gguf", &bytes));
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
    ask_hello(&path).success();
    let o = run("run --prompt x", &[&"--model", &path, &"--image", &tests("demo/scene_083.png")]);
    o.refused(3, &["no vision tower"]);
}

#[test]
fn prompts_that_do_not_fit() {
    let model = tiny_moe();
    let long = "word ".repeat(600);
    let o = run("run --context 256", &[&"--model", &model, &"--prompt", &long]);
    o.refused(4, &["tokens do not fit the context of 256", "raise --context"]);
    let o = run("run --context 256", &[&"--model", &model, &"--prompt", &"a".repeat(100_000)]);
    o.refused(4, &["a prompt of 100", "bytes: expected at most 6144 for a context of 256 tokens", "raise --context"]);
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
