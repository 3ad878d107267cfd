//! One module a command.

pub mod bench;
pub mod chat;
pub mod demo;
pub mod plan;
pub mod route;
pub mod run;
pub mod verify;

use crate::error::AppError;
use crate::model::Facts;
use crate::session::{Answer, Piece};
use forerun_engine::Counters;
use forerun_engine::plan::Residency;
use serde_json::json;
use std::fmt::Arguments;
use std::io::{IsTerminal, Write};

/// Writes to standard output at once.
///
/// # Errors
/// If it cannot be written, for example because its reader went away.
pub fn say(text: Arguments<'_>) -> Result<(), AppError> {
    let mut out = std::io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(AppError::Output)
}

/// Writes a line to standard error. If that fails there is nobody left to tell.
pub fn note(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Prints words to standard output and thoughts, dimmed on a terminal, to standard error.
pub struct Printer {
    dim: bool,
    thinking: bool,
}

impl Printer {
    /// A printer for one answer.
    pub fn new() -> Self {
        Self { dim: std::io::stderr().is_terminal(), thinking: false }
    }

    /// Prints a piece at once.
    ///
    /// # Errors
    /// If standard output cannot be written: there is no point in going on.
    pub fn print(&mut self, piece: Piece<'_>) -> Result<(), AppError> {
        match piece {
            Piece::Thought(t) => {
                let mut err = std::io::stderr().lock();
                let _ = if self.dim { write!(err, "\x1b[2m{t}\x1b[0m") } else { write!(err, "{t}") };
                self.thinking = true;
                Ok(())
            }
            Piece::Text(t) => {
                if std::mem::take(&mut self.thinking) {
                    note(format_args!(""));
                }
                say(format_args!("{t}"))
            }
            Piece::Call(call) => {
                let call = json!({ "name": call.name, "arguments": call.arguments });
                say(format_args!("{call}\n"))
            }
        }
    }
}

impl Default for Printer {
    fn default() -> Self {
        Self::new()
    }
}

/// One line on how it ran.
pub fn summary(a: &Answer, c: &Counters) -> String {
    let cached = if a.cached_tokens > 0 { format!(" ({} cached)", a.cached_tokens) } else { String::new() };
    let mut s = format!(
        "{} prompt tokens{cached}, first token after {:.0} ms, {} tokens at {:.1} tokens/s",
        a.prompt_tokens,
        a.timings.first_token_ms,
        a.tokens.len(),
        a.tokens_per_second()
    );
    if c.hits + c.misses > 0 {
        s += &format!(
            "; experts: {} hits, {} misses, {} predicted of which {} used",
            c.hits, c.misses, c.predicted, c.predicted_used
        );
    }
    s
}

/// One line on what it runs with.
pub fn headline(facts: &Facts) -> String {
    let p = &facts.plan;
    let mut s = format!("kernels {}, {} threads, {}", facts.kernels, facts.threads, facts.io);
    if let Some(why) = &facts.io_why {
        s += &format!(" since io_uring is not available ({why})");
    }
    if p.experts > 0 {
        s += &format!(", {} of {} experts kept in memory", p.slots, p.experts);
    }
    if p.residency() == Some(Residency::Streamed) {
        s += ", vision tower streamed";
    }
    let locked = if facts.locked { " and locked" } else { "" };
    s + &format!(", {:.1} MiB in all{locked}, ready in {:.0} ms", mib(p.total_bytes()), facts.load_ms)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
