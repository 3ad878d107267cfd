//! Turns a Hugging Face checkpoint of MiniCPM-V into the one file that forerun runs, and looks into such files.
//!
//! The commands' work is here, so that tests and fuzzers reach it; the binary only reads arguments and reports.
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod convert;
mod error;
mod inspect;
mod metadata;
mod output;
mod pack;
mod plan;
mod replay;
pub mod safetensors;
mod synth;
mod tokenizer;

pub use error::{Error, Result};
pub use inspect::{Inspect, inspect};
pub use pack::{Packed, pack};
pub use plan::Types;
pub use replay::{Policy, Pool, Prompts, Replay, Slots, Step, Trace, replay};
pub use synth::{Shape, Synth, synth};
