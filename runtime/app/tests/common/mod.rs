//! What the tests of the `forerun` program share: running it with a time limit, the bundled model, places in its header.
//!
//! Relies on the built program alone; nothing here calls the library but to read the model file's header.
#![allow(dead_code)] // each test file uses some of it

pub mod group;
pub mod sparse;

use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// No run of the bundled model takes this long, on a busy machine either.
pub const TIME_LIMIT: Duration = Duration::from_secs(120);

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code, `None` after a signal.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// From start to end.
    pub time: Duration,
}

impl Outcome {
    /// Its JSON object.
    #[track_caller]
    pub fn json(&self) -> Value {
        self.success();
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// That it succeeded.
    #[track_caller]
    pub fn success(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// That it ended with `code` and one line on standard error that contains all of `words`.
    #[track_caller]
    pub fn refused(&self, code: i32, words: &[&str]) -> &Self {
        assert_eq!((self.code, self.signal), (Some(code), None), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        // Beside the error there may be the line on what it runs with, and warnings.
        let errors: Vec<_> = self.stderr.lines().filter(|l| l.starts_with("forerun: ")).collect();
        let [error] = errors[..] else { panic!("expected one line of error: {self:?}") };
        assert!(self.stderr.ends_with(&format!("{error}\n")), "text after the error: {self:?}");
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
        self
    }
}

/// The program, with nothing of the environment that changes what it does.
pub fn forerun() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_forerun"));
    for name in ["FORERUN_MODEL", "FORERUN_KERNELS", "RUST_LOG"] {
        c.env_remove(name);
    }
    c
}

/// A file below the repository's `tests/`.
pub fn tests(relative: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(relative)
}

/// The bundled mixture of experts.
pub fn tiny_moe() -> PathBuf {
    tests("models/tiny-moe.gguf")
}

/// The bundled dense model.
pub fn tiny_dense() -> PathBuf {
    tests("models/tiny-dense.gguf")
}

/// Where a test may write, deleted when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new folder for the test called `name`.
    pub fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("scratch folder");
        Self(path)
    }

    /// A path inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file inside.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        std::fs::write(self.path(name), bytes).expect("scratch file");
        self.path(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs `command` to its end, giving it `input`. Ends it and fails the test if it takes longer than `limit`.
#[track_caller]
pub fn finish_within(limit: Duration, command: &mut Command, input: &[u8]) -> Outcome {
    let start = Instant::now();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("forerun starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // A program that does not read its input is no error here.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let stdout = collect(child.stdout.take().expect("piped"));
    let stderr = collect(child.stderr.take().expect("piped"));
    let Some(status) = wait(&mut child, start + limit) else {
        let _ = child.kill();
        let _ = child.wait();
        panic!("{command:?} did not end within {limit:?}; stderr: {}", stderr.join().expect("reader"));
    };
    writer.join().expect("writer");
    Outcome {
        code: status.code(),
        signal: status.signal(),
        stdout: stdout.join().expect("reader"),
        stderr: stderr.join().expect("reader"),
        time: start.elapsed(),
    }
}

fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).expect("pipe");
        String::from_utf8(bytes).expect("forerun prints UTF-8")
    })
}

fn wait(child: &mut Child, deadline: Instant) -> Option<std::process::ExitStatus> {
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("child") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// Runs `command` to its end.
#[track_caller]
pub fn finish(command: &mut Command) -> Outcome {
    finish_within(TIME_LIMIT, command, b"")
}

/// Runs `forerun ARGS`, where `args` are separated by spaces, then `more`.
#[track_caller]
pub fn run(args: &str, more: &[&dyn AsRef<std::ffi::OsStr>]) -> Outcome {
    finish(forerun().args(args.split_whitespace()).args(more.iter().map(|a| a.as_ref())))
}

/// Runs `forerun run --json` on the bundled mixture of experts with `prompt`, greedily; `args` are separated by spaces.
#[track_caller]
pub fn ask(prompt: &str, args: &str) -> Value {
    let args = format!("run --json --temperature 0 {args}");
    run(&args, &[&"--model", &tiny_moe(), &"--prompt", &prompt]).json()
}

/// The list of token ids in `value`.
#[track_caller]
pub fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|v| v.as_u64().expect("a token id")).collect()
}

/// A model file in memory, to be damaged: places in its header by name.
pub struct Image(pub Vec<u8>);

impl Image {
    /// The bundled mixture of experts.
    pub fn tiny_moe() -> Self {
        Self(std::fs::read(tiny_moe()).expect("bundled model"))
    }

    /// Where the bytes after the string `text`, which has its length before it, begin.
    #[track_caller]
    fn after(&self, text: &str) -> usize {
        let mut wanted = (text.len() as u64).to_le_bytes().to_vec();
        wanted.extend_from_slice(text.as_bytes());
        let at = self.0.windows(wanted.len()).position(|w| w == wanted);
        at.unwrap_or_else(|| panic!("{text} is not in the header")) + wanted.len()
    }

    /// Where the type of the value of `key` stands. An array has the type of its elements 4 bytes later, its length 8, and
    /// its elements 16.
    #[track_caller]
    pub fn at(&self, key: &str) -> usize {
        self.after(key)
    }

    /// Overwrites bytes at `at`.
    pub fn put(mut self, at: usize, bytes: &[u8]) -> Self {
        self.0[at..][..bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Changes the value of the key `key` in place; its type stays.
    #[track_caller]
    pub fn value(self, key: &str, bytes: &[u8]) -> Self {
        let at = self.at(key) + 4;
        self.put(at, bytes)
    }

    /// Changes the type of the value of `key`.
    #[track_caller]
    pub fn kind(self, key: &str, kind: u32) -> Self {
        let at = self.at(key);
        self.put(at, &kind.to_le_bytes())
    }

    /// Renames a key or tensor: its last letter becomes `_`.
    #[track_caller]
    pub fn rename(self, name: &str) -> Self {
        let at = self.after(name) - 1;
        self.put(at, b"_")
    }

    /// Where axis `axis` of the tensor called `name` stands.
    #[track_caller]
    pub fn axis(&self, name: &str, axis: usize) -> usize {
        self.after(name) + 4 + 8 * axis
    }

    /// Where the number of axes of the tensor called `name` stands.
    #[track_caller]
    pub fn dims(&self, name: &str) -> usize {
        self.after(name)
    }

    /// Where the type of the tensor called `name` stands; its offset follows.
    #[track_caller]
    pub fn type_of(&self, name: &str) -> usize {
        let at = self.after(name);
        let dims = u32::from_le_bytes(*self.0[at..].first_chunk().expect("number of axes"));
        at + 4 + 8 * dims as usize
    }

    /// Where the offset of the tensor called `name` stands.
    #[track_caller]
    pub fn offset_of(&self, name: &str) -> usize {
        self.type_of(name) + 4
    }
}

/// The most memory that any ended child of this test program had resident, bytes.
pub fn children_peak_bytes() -> u64 {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN).expect("getrusage");
    u64::try_from(usage.max_rss()).expect("kilobytes") * 1024
}

/// What refusing a file may cost: the header of a real model with its vocabulary is about 15 MiB, and a cap may be small.
pub const PEAK_BYTES_MAX: u64 = 200 << 20;
/// Refusing takes milliseconds; the rest is for a busy machine.
pub const REFUSAL: Duration = Duration::from_secs(10);

/// Asks `model` something that needs no picture. Fails the test if that takes much memory or time.
#[track_caller]
pub fn ask_hello(model: &Path) -> Outcome {
    let mut c = forerun();
    c.args(["run", "--temperature", "0", "--max-tokens", "2", "--memory", "64M", "--prompt", "Hello!", "--model"]);
    let o = finish_within(REFUSAL, c.arg(model), b"");
    let peak = children_peak_bytes();
    assert!(peak < PEAK_BYTES_MAX, "{peak} bytes resident: {o:?}");
    o
}
