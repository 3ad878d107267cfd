//! The command line. Doc comments here are the help texts that `--help` prints.
#![allow(missing_docs)] // flattened groups have no text of their own

use clap::{Args, Parser, Subcommand, ValueEnum};
use forerun_engine::Checksums;
use forerun_engine::plan::{KvType, Residency};
use forerun_engine::slicing::Detail;
use forerun_linux::IoChoice;
use std::path::PathBuf;

const AFTER: &str = "\
Exit codes:
  0  done
  1  storage or operating system failed
  2  wrong command line
  3  bad input: model file, picture, prompt
  4  does not fit: memory cap, context
  5  a check failed (verify, demo)

Environment:
  FORERUN_MODEL    model file, where --model is not given
  FORERUN_KERNELS  force a kernel variant: scalar, avx2, avx512vnni, amx; neon, dotprod, i8mm on Arm
  RUST_LOG         log level: error, warn (default), info, debug";

/// Runs MiniCPM-V 4.7 on small boards: experts stay on storage and are read ahead of need.
///
/// Start with `forerun demo`, then `forerun run --model FILE --image PICTURE --prompt "What is this?"`.
#[derive(Debug, Parser)]
#[command(name = "forerun", version, after_help = AFTER)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // one exists
pub enum Command {
    /// Answer one prompt, with or without pictures
    Run(RunArgs),
    /// Talk: each line is a message, /image PATH shows a picture
    Chat(ChatArgs),
    /// Show what a model needs in memory, line by line, without running it
    Plan(PlanArgs),
    /// Show that cap, cache, prediction, threads, chunks and a saved state do not change a bit of the result
    ///
    /// Each line is one run. First what it was made with: expert slots, prediction, threads, I/O engine, tokens of the
    /// prompt in a chunk, when checksums are compared, whether the storage was as it is (plain) or brought reads late and
    /// in another order (shuffled), where the vision tower was, and whether the prompt was read from its beginning (fresh)
    /// or from a saved state. Then what came of it: experts found in a slot, read on demand and read ahead, and a hash of
    /// all logits. Any two values of two settings meet in one of the runs.
    Verify(VerifyArgs),
    /// Look at the bundled pictures with the bundled model
    Demo(DemoArgs),
    /// Measure how fast prompts and answers are
    Bench(BenchArgs),
    /// Answer one prompt and write down which experts every token chose, for 'forerun-quant replay'
    Route(RouteArgs),
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// Model file, made by 'forerun-quant pack'
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
}

/// How the engine is set up.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Most memory to use in all, such as 3G or 512M [default: 80 % of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Tokens that fit: prompt, pictures and answer [default: 4096, or what the model takes]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Tokens computed together while reading the prompt: each expert is read once for all of them
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub chunk: u16,
    /// Threads [default: one for each CPU of the fastest kind, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub threads: Option<u8>,
    /// Element type of the KV cache
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: Kv,
    /// How experts are read
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub io: Io,
    /// Where the vision tower is kept: in memory, or on storage, from where each crop streams it
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub vision_residency: Tower,
    /// Do not read ahead what the next layer will want
    #[arg(long)]
    pub no_predict: bool,
    /// When what was read is compared with its checksum
    #[arg(long, value_name = "WHEN", default_value = "first")]
    pub checksums: Check,
    /// Most expert slots, whatever fits
    #[arg(long, value_name = "N", hide = true)]
    pub slots: Option<usize>,
}

/// How pictures are seen.
#[derive(Debug, Clone, Default, Args)]
pub struct VisionArgs {
    /// Patches a visual token stands for: 16x is fast, 4x sees more [default: the model's]
    #[arg(long, value_name = "MODE", value_parser = parse_detail)]
    pub detail: Option<Detail>,
    /// Most slices a picture is cut into [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_slices: Option<u32>,
}

/// How the next word is chosen.
#[derive(Debug, Clone, Args)]
pub struct SampleArgs {
    /// Most tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub max_tokens: usize,
    /// 0 always takes the likeliest word [default: the model's]
    #[arg(long, value_name = "T", value_parser = parse_nonnegative)]
    pub temperature: Option<f32>,
    /// Choose among the words that hold this share of probability [default: the model's]
    #[arg(long, value_name = "P", value_parser = parse_share)]
    pub top_p: Option<f32>,
    /// Choose among this many words, 0 for all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Same seed, same answer
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Think before answering; the thoughts go to standard error
    #[arg(long)]
    pub think: bool,
}

/// `forerun route`
#[derive(Debug, Args)]
pub struct RouteArgs {
    /// File to write: a line for each expert chosen
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    #[command(flatten)]
    pub run: RunArgs,
}

/// `forerun run`
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Picture to show before the prompt (PNG, JPEG, WebP); may be repeated
    #[arg(short, long, value_name = "PICTURE")]
    pub image: Vec<PathBuf>,
    /// What to ask
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: String,
    /// Instruction that comes before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Print one JSON object instead of words as they come
    #[arg(long)]
    pub json: bool,
    /// Answer in JSON that follows the JSON Schema in this file
    #[arg(long, value_name = "FILE")]
    pub schema: Option<PathBuf>,
    /// Answer with a JSON object, whatever is in it
    #[arg(long, conflicts_with = "schema")]
    pub json_answer: bool,
    /// Tools that the model may call: a file with a JSON array of functions in the form of the OpenAI API
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// End the answer after so many milliseconds, loading the model not counted, with what there is
    #[arg(long, value_name = "MS")]
    pub deadline_ms: Option<u64>,
    #[command(flatten)]
    pub sample: SampleArgs,
    #[command(flatten)]
    pub vision: VisionArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forerun chat`
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Instruction that comes before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Pixels of the largest picture that may be shown
    #[arg(long, value_name = "N", default_value_t = 1 << 21)]
    pub max_pixels: u64,
    #[command(flatten)]
    pub sample: SampleArgs,
    #[command(flatten)]
    pub vision: VisionArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forerun plan`
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Plan for text alone
    #[arg(long)]
    pub text_only: bool,
    /// Pixels of the largest picture that will be shown
    #[arg(long, value_name = "N", default_value_t = 1 << 21)]
    pub max_pixels: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub vision: VisionArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forerun verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Picture to show; may be repeated
    #[arg(short, long, value_name = "PICTURE")]
    pub image: Vec<PathBuf>,
    /// What to ask
    #[arg(short, long, value_name = "TEXT", default_value = "Describe what you know about the sea in one sentence.")]
    pub prompt: String,
    /// Tokens to generate in each run
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub tokens: usize,
    /// Tokens that fit [default: 1024, or what the model takes]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Break something on purpose, to see that verify notices
    #[arg(long, value_name = "FAULT")]
    pub inject: Option<Fault>,
    #[command(flatten)]
    pub vision: VisionArgs,
}

/// `forerun demo`
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Folder with demo.json [default: tests/demo here, else /usr/share/forerun/demo]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `forerun bench`
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Read all experts into memory first: measures kernels, not storage
    #[arg(long)]
    pub resident: bool,
    /// Measure how long one square crop takes the vision tower, at 16x and at 4x, instead of tokens
    #[arg(long, conflicts_with_all = ["resident", "prefill", "decode"])]
    pub vision: bool,
    /// Keep what earlier rounds read: otherwise each begins with empty slots
    #[arg(long, conflicts_with_all = ["resident", "vision"])]
    pub warm: bool,
    /// Choose experts at random, this share of them (0 to 1) those of the token before [default: 0, or as the model routes]
    #[arg(long, value_name = "SHARE", value_parser = parse_part, conflicts_with_all = ["resident", "vision"])]
    pub reuse: Option<f64>,
    /// Choose experts at random, and foresee this share of them (0 to 1) [default: 0, or as the model routes]
    #[arg(long, value_name = "SHARE", value_parser = parse_part, conflicts_with_all = ["resident", "vision"])]
    pub recall: Option<f64>,
    /// Tokens of the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = parse_count)]
    pub prefill: usize,
    /// Tokens of the answer
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = parse_count)]
    pub decode: usize,
    /// Times to measure
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = parse_count)]
    pub rounds: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A deliberate fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// Flip a bit of one expert after it was read, in every run but the first, with checksums off
    FlipByte,
    /// Sum experts in the order in which they arrive instead of router order
    ArrivalOrder,
}

/// When checksums are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Check {
    /// Each tensor and expert when it is first read
    First,
    /// Experts whenever they are read, too
    Always,
    /// Nothing
    Never,
}

impl From<Check> for Checksums {
    fn from(c: Check) -> Self {
        match c {
            Check::First => Self::First,
            Check::Always => Self::Always,
            Check::Never => Self::Never,
        }
    }
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kv {
    /// 2 bytes
    F16,
    /// 4 bytes
    F32,
}

impl From<Kv> for KvType {
    fn from(k: Kv) -> Self {
        match k {
            Kv::F16 => Self::F16,
            Kv::F32 => Self::F32,
        }
    }
}

/// Where the vision tower is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Tower {
    /// In memory if that costs no expert a slot, or half of all experts have slots beside it; else on storage
    Auto,
    /// In memory
    Resident,
    /// On storage
    Streamed,
}

impl From<Tower> for Residency {
    fn from(t: Tower) -> Self {
        match t {
            Tower::Auto => Self::Auto,
            Tower::Resident => Self::Resident,
            Tower::Streamed => Self::Streamed,
        }
    }
}

/// How experts are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Io {
    /// io_uring, or pread where it is refused
    Auto,
    /// io_uring or nothing
    Uring,
    /// Threads that call pread
    Pread,
}

impl From<Io> for IoChoice {
    fn from(i: Io) -> Self {
        match i {
            Io::Auto => Self::Auto,
            Io::Uring => Self::Uring,
            Io::Pread => Self::Pread,
        }
    }
}

fn parse_count(s: &str) -> Result<usize, String> {
    s.parse()
        .ok()
        .filter(|n| (1..=1 << 20).contains(n))
        .ok_or_else(|| "expected a whole number from 1 to 1048576".into())
}

fn parse_detail(s: &str) -> Result<Detail, String> {
    Detail::parse(s).ok_or_else(|| "expected 16x or 4x".into())
}

fn parse_nonnegative(s: &str) -> Result<f32, String> {
    s.parse().ok().filter(|t: &f32| t.is_finite() && *t >= 0.0).ok_or_else(|| "expected a number of at least 0".into())
}

fn parse_share(s: &str) -> Result<f32, String> {
    s.parse().ok().filter(|p| *p > 0.0 && *p <= 1.0).ok_or_else(|| "expected a number above 0, at most 1".into())
}

fn parse_part(s: &str) -> Result<f64, String> {
    s.parse().ok().filter(|p| (0.0..=1.0).contains(p)).ok_or_else(|| "expected a number from 0 to 1".into())
}

/// Bytes from text such as `3G`, `512M`, `1.5GiB` or `4096`; units are powers of 1024.
fn parse_size(s: &str) -> Result<u64, String> {
    let wrong = || format!("{s:?}: expected a size such as 3G, 512M or 4096");
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let shift = match unit.trim().to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    let bytes = number * (1u64 << shift) as f64;
    if (1.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, want) in [("3G", 3 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("4096", 4096), ("64kb", 65536)]
        {
            assert_eq!(parse_size(text), Ok(want), "{text}");
        }
        for text in ["", "G", "-1G", "3X", "1e9", "nan", "0", "99999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
