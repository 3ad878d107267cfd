//! The model: text, vision, positions, router, expert cache and lookahead, sampler, memory plan.
//!
//! Relies on `forerun-format` for the file and `forerun-kernels` for arithmetic. Storage, workers and time come in
//! through [`ports`]. Never touches the operating system and never allocates after the plan is taken.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod ports;
