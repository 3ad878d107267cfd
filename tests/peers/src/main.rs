//! Compares forerun with llama.cpp on a packed and a plain file of the same weights, as `forerun-quant synth` writes
//! them: speed, each round in a process of its own and the two programs in turn; and logits.
#![forbid(unsafe_code)]

mod llama;
mod logits;
mod speed;

use clap::{Args, Parser, Subcommand};
use std::{path::PathBuf, process::ExitCode};

/// Any error: this program is for developers.
type Error = Box<dyn std::error::Error>;

/// Run llama.cpp and forerun side by side on the same weights.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure prefill and decode of both programs in turn
    Speed(SpeedArgs),
    /// Compare the logits of both programs for the same tokens, then their greedy answers
    Logits(LogitsArgs),
    /// One process of llama.cpp, which `speed` starts
    #[command(hide = true)]
    Llama(LlamaArgs),
}

#[derive(Args)]
struct Files {
    /// File that forerun reads
    #[arg(long, value_name = "FILE")]
    packed: PathBuf,
    /// File that llama.cpp reads
    #[arg(long, value_name = "FILE")]
    plain: PathBuf,
}

#[derive(Args, Clone)]
struct Work {
    /// Tokens of the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    prefill: usize,
    /// Tokens of the answer
    #[arg(long, value_name = "TOKENS", default_value_t = 32)]
    decode: usize,
    /// Threads of each program
    #[arg(long, value_name = "N", default_value_t = 2)]
    threads: usize,
    /// Rounds in one process
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

#[derive(Args)]
struct SpeedArgs {
    #[command(flatten)]
    files: Files,
    /// The `forerun` program
    #[arg(long, value_name = "FILE", default_value = "target/release/forerun")]
    forerun: PathBuf,
    /// Read experts from storage: forerun keeps to this much memory. Start it in a memory cgroup of that size, so that
    /// llama.cpp keeps to it as well, and build with GGML_CPU_REPACK=OFF, or it copies all experts
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Processes of each program, in turn
    #[arg(long, value_name = "N", default_value_t = 3)]
    turns: usize,
    #[command(flatten)]
    work: Work,
}

#[derive(Args)]
struct LlamaArgs {
    /// File that llama.cpp reads
    #[arg(long, value_name = "FILE")]
    plain: PathBuf,
    #[command(flatten)]
    work: Work,
}

#[derive(Args)]
struct LogitsArgs {
    #[command(flatten)]
    files: Files,
    /// Tokens of the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    tokens: usize,
    /// Tokens of the greedy answers
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    greedy: usize,
    /// Threads of each program
    #[arg(long, value_name = "N", default_value_t = 2)]
    threads: usize,
    /// Fail if the median cosine of the logits of a token is smaller
    #[arg(long, value_name = "COSINE", default_value_t = 0.99)]
    least: f64,
}

/// Tokens that look random and are always the same: those of `forerun bench`.
fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    let mut s = 0x9E37_79B9_7F4A_7C15u64;
    let step = |_| {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 33) as u32 % vocab as u32
    };
    (0..n).map(step).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_unstable_by(f64::total_cmp);
    let half = v.len() / 2;
    match v.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => v[half],
        _ => f64::midpoint(v[half - 1], v[half]),
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Speed(a) => speed::run(&a),
        Command::Logits(a) => logits::run(&a),
        Command::Llama(a) => llama::measure(&a),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
