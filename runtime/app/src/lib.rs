//! The `forerun` program as a library: command line, opening a model, conversations, tokenizer, chat template, prompts.
//!
//! Relies on `forerun-engine` and `forerun-format`. Everything here takes untrusted text and files and never panics on
//! them.
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod constrain;
pub mod error;
pub mod model;
pub mod prompt;
pub mod reader;
pub mod request;
pub mod service;
pub mod session;
mod speaker;
pub mod template;
pub mod tokenizer;
pub mod tools;
mod words;
