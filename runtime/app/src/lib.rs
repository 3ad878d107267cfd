//! The parts of the `forerun` program that are not its command line: tokenizer, chat template, prompts.
//!
//! Relies on `forerun-engine` and `forerun-format`. Everything here takes untrusted text and files and never panics on
//! them.
#![forbid(unsafe_code)]

pub mod prompt;
pub mod template;
pub mod tokenizer;
