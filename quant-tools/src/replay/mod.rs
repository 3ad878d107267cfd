//! Replays a routing trace through cache policies and prints how many experts they would have had in memory. Reads
//! nothing but the trace; the engine's policy is the engine's code.

mod policy;
mod trace;

pub use policy::{Policy, Pool};
pub use trace::{Step, Trace};

use crate::error::{Error, Result};
use serde_json::json;
use std::{io::Write, ops::Range, path::Path, str::FromStr};

/// How many slots: a number, or a share of all experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Slots {
    /// So many.
    Number(usize),
    /// So many of a hundred, rounded down.
    Percent(f64),
}

impl FromStr for Slots {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let expected = || format!("slots {text:?}, expected a number, or a percentage such as 12.5%");
        match text.strip_suffix('%') {
            Some(share) => match share.parse() {
                Ok(share) if share > 0.0 && share <= 100.0 => Ok(Self::Percent(share)),
                _ => Err(expected()),
            },
            None => text.parse().map(Self::Number).map_err(|_| expected()),
        }
    }
}

/// How prompts are replayed. Their hits never count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prompts {
    /// Each at once, layer by layer, as the engine does.
    Chunk,
    /// Token by token.
    Tokens,
    /// Not at all.
    Skip,
}

/// What to replay and print.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Policies to compare.
    pub policies: Vec<Policy>,
    /// Sizes to compare them at.
    pub slots: Vec<Slots>,
    /// What to do with prompts.
    pub prompts: Prompts,
    /// Decoded tokens that count; all others are replayed too.
    pub tokens: Option<Range<usize>>,
    /// One JSON object instead of a table.
    pub json: bool,
}

/// Replays the trace in `path` and prints to `out`.
///
/// # Errors
/// If the trace cannot be read or is damaged, or sizes or tokens do not fit it.
pub fn replay(path: &Path, options: &Replay, out: &mut dyn Write) -> Result<()> {
    let mut trace = Trace::read(path)?;
    match options.prompts {
        Prompts::Chunk => {}
        Prompts::Tokens => trace.split_prompts(),
        Prompts::Skip => trace.steps.retain(|s| s.decode),
    }
    let [_, decoded] = trace.tokens();
    let tokens = options.tokens.clone().unwrap_or(0..decoded);
    if tokens.end > decoded {
        let expected = format!("at most {decoded}, the decoded tokens of the trace");
        return Err(Error::input("end of the tokens that count", tokens.end, expected));
    }
    let slots = options.slots.iter().map(|&s| number(s, &trace)).collect::<Result<Vec<_>>>()?;
    let results = Results { trace: &trace, options, tokens, slots };
    let printed = if options.json { results.json(out) } else { results.table(out) };
    match printed {
        // A reader such as `head` that has seen enough is no failure.
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("write", Path::new("output"), &e)),
        _ => Ok(()),
    }
}

fn number(slots: Slots, trace: &Trace) -> Result<usize> {
    let (top_k, all) = (trace.shape.top_k, trace.shape.layers * trace.shape.experts);
    let n = match slots {
        Slots::Number(n) => n,
        Slots::Percent(share) => (all as f64 * share / 100.0) as usize,
    };
    if !(top_k..=all).contains(&n) {
        return Err(Error::input("slots", n, format!("{top_k} (experts a token uses) to {all} (all experts)")));
    }
    Ok(n)
}

struct Results<'a> {
    trace: &'a Trace,
    options: &'a Replay,
    tokens: Range<usize>,
    slots: Vec<usize>,
}

impl Results<'_> {
    /// Experts that the counted tokens choose.
    fn choices(&self) -> u64 {
        (self.tokens.len() * self.trace.shape.layers * self.trace.shape.top_k) as u64
    }

    fn hits(&self, policy: Policy, slots: usize) -> u64 {
        policy.hits(self.trace, slots, &self.tokens)
    }

    fn table(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let shape = self.trace.shape;
        let all = shape.layers * shape.experts;
        let [prompt, _] = self.trace.tokens();
        writeln!(
            out,
            "{} layers of {} experts, {} a token; {prompt} prompt tokens, decoded tokens {}..{} count\n",
            shape.layers, shape.experts, shape.top_k, self.tokens.start, self.tokens.end
        )?;
        let head = |out: &mut dyn Write, name: &str, cell: &dyn Fn(usize) -> String| {
            write!(out, "{name:<16}")?;
            self.slots.iter().try_for_each(|&n| write!(out, " {:>8}", cell(n)))?;
            writeln!(out)
        };
        head(out, "slots", &|n| n.to_string())?;
        head(out, "share, %", &|n| format!("{:.2}", 100.0 * n as f64 / all as f64))?;
        for &policy in &self.options.policies {
            let rate = |n| format!("{:.1}", 100.0 * self.hits(policy, n) as f64 / self.choices() as f64);
            head(out, &policy.to_string(), &rate)?;
        }
        Ok(())
    }

    fn json(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let shape = self.trace.shape;
        let [prompt, decoded] = self.trace.tokens();
        let result = |policy: Policy, slots| {
            let (hits, choices) = (self.hits(policy, slots), self.choices());
            json!({ "policy": policy.to_string(), "slots": slots, "hits": hits, "misses": choices - hits,
                "hit_rate": hits as f64 / choices as f64 })
        };
        let results: Vec<_> =
            self.options.policies.iter().flat_map(|&p| self.slots.iter().map(move |&n| result(p, n))).collect();
        let root = json!({
            "layers": shape.layers, "experts": shape.experts, "top_k": shape.top_k,
            "prompt_tokens": prompt, "decoded_tokens": decoded,
            "counted_tokens": [self.tokens.start, self.tokens.end],
            "results": results,
        });
        writeln!(out, "{root:#}")
    }
}
