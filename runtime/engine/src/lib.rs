//! The model: text, vision, positions, router, expert cache and lookahead, sampler, memory plan.
//!
//! Relies on `forerun-format` for the file and `forerun-kernels` for arithmetic. Storage, workers and time come in
//! through [`ports`]. Never touches the operating system and never allocates after the plan is taken.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod buffers;
pub mod cache;
pub mod config;
mod engine;
mod error;
mod exec;
mod lookahead;
mod moe;
pub mod plan;
pub mod ports;
pub mod positions;
mod prefix;
pub mod router;
pub mod sampler;
pub mod slicing;
mod stream;
mod text;
mod vision;
pub mod weights;

pub use engine::{Checksums, Counters, Engine, EngineError, Input, NoObserver, Observer, Tuning};
pub use lookahead::Recall;
pub use moe::SumOrder;
pub use vision::{CropPixels, VisionObserver};
