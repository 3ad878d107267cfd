//! The `forerun-quant` command: arguments, progress, exit codes.
#![forbid(unsafe_code)]

use clap::{Parser, Subcommand, ValueEnum};
use forerun_format::BlockType;
use forerun_quant::{Inspect, Packed, Policy, Prompts, Replay, Shape, Slots, Synth, Types};
use std::{
    io::{IsTerminal, Write},
    ops::Range,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Pack MiniCPM-V checkpoints into the model file that forerun runs, inspect such files, and replay routing traces.
#[derive(Parser)]
#[command(name = "forerun-quant", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  reading or writing failed, or a file stands in the way
  2  wrong arguments
  3  the checkpoint, model file or trace is damaged or not supported
  4  not enough space or memory";

const PACK_HELP: &str = "\
Examples:
  forerun-quant pack --from MiniCPM-V-4.7 --to minicpm-v.gguf
  forerun-quant pack --from MiniCPM-V-4.7 --to small.gguf --type q8_0 --type experts=q4_0
  forerun-quant pack --from MiniCPM-V-4.7 --to exact.gguf --type bf16

Bits per weight: f32 32, bf16 16, f16 16, q8_0 8.5, q6_k 6.6, q5_k 5.5, q5_0 5.5, q4_k 4.5, q4_0 4.5, iq4_nl 4.5,
iq4_xs 4.25, mxfp4 4.25, q3_k 3.4, q2_k 2.6. Norms, routers and the patch embedding keep full precision. A matrix whose
rows are not whole blocks of the type keeps it too, or is q8_0 where the type's blocks hold 256 weights.

The file is written as FILE.partial and gets its name when it is complete. Memory use stays below 1 GiB whatever the
size of the checkpoint. Equal weights give equal bytes.

Exit codes: 0 done, 1 I/O, 2 arguments, 3 bad checkpoint, 4 not enough space or memory.";

const SYNTH_HELP: &str = "\
Examples:
  forerun-quant synth --shape 35b-a3b --layers 10 --type q8_0 --type experts=q4_k --to packed.gguf
  forerun-quant synth --shape 35b-a3b --layers 10 --type q8_0 --type experts=q4_k --to plain.gguf --plain

The model has the sizes and special tokens of the real one and random weights: it runs at the real model's speed and
says nothing of sense. Equal seeds give equal weights, in both layouts and with or without the vision tower. Weights are
put together from 4,096 blocks of 256 numbers for each element type, so they are not all distinct.

Exit codes: 0 done, 1 I/O, 2 arguments, 3 a size out of range, 4 not enough space or memory.";

const INSPECT_HELP: &str = "\
Every tensor and every expert is read and compared with its checksum; --no-checksums reads the header only.

Exit codes: 0 sound, 1 I/O, 2 arguments, 3 damaged or not a model file, 4 not enough memory.";

const REPLAY_HELP: &str = "\
Examples:
  forerun-quant replay --trace route.csv
  forerun-quant replay --trace route.csv --policy forerun,lfu-layer:1,optimum --slots 614,12.5% --tokens 64..128

Policies: forerun is the engine's own code. lru and lfu keep what was used last or most; uses lose a share with each
token (lfu:0.98) and are remembered after eviction. optimum knows the future: no policy has more hits. Each takes one
pool of slots for all layers; with -layer, each layer has its own.

A trace begins with a line such as '# n_layer=48 n_expert=128 n_expert_used=6'; a line of column names follows, then a
line for each expert chosen. Needed columns: turn, phase (0 prompt, 1 decode), step, layer, slot, expert.
Reads that come before they are asked for are not replayed.

Exit codes: 0 done, 1 I/O, 2 arguments, 3 bad trace, or a size out of range.";

#[derive(Subcommand)]
enum Command {
    /// Convert a Hugging Face checkpoint folder to one model file
    #[command(after_help = PACK_HELP)]
    Pack {
        /// Folder with config.json, tokenizer.json and model*.safetensors
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        /// Model file to write
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Element type of the weights: T for all, or experts=T, resident=T (text without experts), vision=T. May be
        /// given more than once; later ones win [T: f32, bf16, f16, q8_0, q6_k, q5_k, q5_0, q4_k, q4_0,
        /// iq4_nl, iq4_xs, mxfp4, q3_k, q2_k] [default: q8_0]
        #[arg(long = "type", value_name = "T", value_parser = parse_type)]
        types: Vec<TypeArg>,
        /// Replace FILE if it exists
        #[arg(long)]
        force: bool,
    },
    /// Make up a model of true shape with random weights, to measure with
    #[command(after_help = SYNTH_HELP)]
    Synth {
        /// Sizes to take
        #[arg(long)]
        shape: ShapeArg,
        /// Text layers; every fourth has full attention [default: as the shape]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
        layers: Option<u64>,
        /// Model file to write
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Element types, as for pack
        #[arg(long = "type", value_name = "T", value_parser = parse_type)]
        types: Vec<TypeArg>,
        /// Write the plain layout that llama.cpp reads, text only
        #[arg(long)]
        plain: bool,
        /// Leave the vision tower out
        #[arg(long)]
        no_vision: bool,
        /// Other seeds give other weights
        #[arg(long, value_name = "S", default_value_t = 0)]
        seed: u64,
        /// Replace FILE if it exists
        #[arg(long)]
        force: bool,
    },
    /// Print what a model file holds, and check it
    #[command(after_help = INSPECT_HELP)]
    Inspect {
        /// Model file
        file: PathBuf,
        /// List every tensor with type, shape (contiguous axis first) and offset
        #[arg(long)]
        tensors: bool,
        /// Do not read the data
        #[arg(long)]
        no_checksums: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Replay a routing trace through cache policies and print their hit rates
    #[command(after_help = REPLAY_HELP)]
    Replay {
        /// Routing trace
        #[arg(long, value_name = "FILE")]
        trace: PathBuf,
        /// Policies to compare: forerun, pinned:SHARE, lru, lru-layer, lfu[:DECAY], lfu-layer[:DECAY], optimum, optimum-layer
        /// [default: all]
        #[arg(long = "policy", value_name = "NAME", value_delimiter = ',')]
        policies: Vec<Policy>,
        /// Slots, or share of all experts
        #[arg(long, value_name = "N|PCT%", value_delimiter = ',', default_value = "6.25%,8%,10%,12.5%,15%,20%,25%")]
        slots: Vec<Slots>,
        /// How prompts are replayed, whose hits do not count
        #[arg(long, value_enum, default_value = "chunk")]
        prompts: PromptsArg,
        /// Decoded tokens that count, such as 64..128 [default: all]
        #[arg(long, value_name = "FROM..TO", value_parser = parse_range)]
        tokens: Option<Range<usize>>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PromptsArg {
    /// At once, layer by layer, as the engine does
    Chunk,
    /// Token by token
    Tokens,
    /// Not at all
    Skip,
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let range = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range
        .filter(|r: &Range<usize>| !r.is_empty())
        .ok_or_else(|| format!("range {text:?}, expected one such as 64..128"))
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ShapeArg {
    /// MiniCPM-V 4.7 35B-A3B
    #[value(name = "35b-a3b")]
    Moe35b,
    /// MiniCPM-V 4.7 1B
    #[value(name = "1b")]
    Dense1b,
    #[value(hide = true)]
    Tiny,
}

#[derive(Debug, Clone, Copy)]
enum TypeArg {
    All(BlockType),
    Experts(BlockType),
    Resident(BlockType),
    Vision(BlockType),
}

fn parse_type(text: &str) -> Result<TypeArg, String> {
    let (part, name) = text.split_once('=').map_or(("", text), |(p, n)| (p, n));
    let block = BlockType::from_name(name).ok_or_else(|| {
        format!("type {name:?}, expected one of {}", BlockType::names().collect::<Vec<_>>().join(", "))
    })?;
    match part {
        "" if !text.starts_with('=') => Ok(TypeArg::All(block)),
        "experts" => Ok(TypeArg::Experts(block)),
        "resident" => Ok(TypeArg::Resident(block)),
        "vision" => Ok(TypeArg::Vision(block)),
        _ => Err(format!("part {part:?}, expected experts, resident or vision")),
    }
}

fn types(args: &[TypeArg]) -> Types {
    let mut t = Types { experts: BlockType::Q8_0, resident: BlockType::Q8_0, vision: None };
    for a in args {
        match *a {
            TypeArg::All(b) => t = Types { experts: b, resident: b, vision: None },
            TypeArg::Experts(b) => t.experts = b,
            TypeArg::Resident(b) => t.resident = b,
            TypeArg::Vision(b) => t.vision = Some(b),
        }
    }
    t
}

/// Files below this many bytes are done before a log line could be of use.
const LOG_BYTES_MIN: u64 = 256 << 20;

/// A bar on a terminal, a log line for each tenth of a large file elsewhere.
fn progress() -> Box<dyn FnMut(u64, u64)> {
    if std::io::stderr().is_terminal() {
        let bar = indicatif::ProgressBar::new(0);
        let style = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        bar.set_style(
            indicatif::ProgressStyle::with_template(style).unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()),
        );
        return Box::new(move |done, total| {
            bar.set_length(total);
            bar.set_position(done);
            if done == total {
                bar.finish();
            }
        });
    }
    let mut tenths = 0;
    Box::new(move |done, total| {
        let now = done.saturating_mul(10) / total.max(1);
        if now > tenths && total >= LOG_BYTES_MIN {
            tenths = now;
            log::info!("{} of {} MiB", done >> 20, total >> 20);
        }
    })
}

fn report(to: &Path, done: Packed) {
    log::info!("{}: {} bytes, {} tensors, {} experts", to.display(), done.bytes, done.tensors, done.experts);
}

fn run(command: Command) -> Result<(), forerun_quant::Error> {
    match command {
        Command::Pack { from, to, types: args, force } => {
            let done = forerun_quant::pack(&from, &to, types(&args), force, &mut progress())?;
            report(&to, done);
            Ok(())
        }
        Command::Synth { shape, layers, to, types: args, plain, no_vision, seed, force } => {
            let shape = match shape {
                ShapeArg::Moe35b => Shape::Moe35b,
                ShapeArg::Dense1b => Shape::Dense1b,
                ShapeArg::Tiny => Shape::Tiny,
            };
            let model = Synth { shape, layers, no_vision, plain, seed };
            report(&to, forerun_quant::synth(model, &to, types(&args), force, &mut progress())?);
            Ok(())
        }
        Command::Inspect { file, tensors, no_checksums, json } => {
            let options = Inspect { tensors, checksums: !no_checksums, json };
            let mut out = std::io::stdout().lock();
            let mut bar = progress();
            forerun_quant::inspect(&file, options, &mut out, &mut bar)
        }
        Command::Replay { trace, policies, slots, prompts, tokens, json } => {
            let policies = if policies.is_empty() { Policy::ALL.to_vec() } else { policies };
            let prompts = match prompts {
                PromptsArg::Chunk => Prompts::Chunk,
                PromptsArg::Tokens => Prompts::Tokens,
                PromptsArg::Skip => Prompts::Skip,
            };
            let options = Replay { policies, slots, prompts, tokens, json };
            forerun_quant::replay(&trace, &options, &mut std::io::stdout().lock())
        }
    }
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info"))
        .format(|f, r| writeln!(f, "{}: {}", r.level().as_str().to_lowercase(), r.args()))
        .init();
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}
