//! What is asked of one answer: how long, how random, what it must follow, and when it must end.
//!
//! Relies on `session` to keep to it. Holds references only, so that one request can be used many times.

use crate::cli::SampleArgs;
use crate::constrain::Constraint;
use forerun_engine::Observer;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What is asked of one answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Request<'r> {
    /// Most tokens of the answer, thoughts included.
    pub max_tokens: usize,
    /// 0 always takes the likeliest word; `None`: the model's.
    pub temperature: Option<f32>,
    /// Choose among the words that hold this share of probability; `None`: the model's.
    pub top_p: Option<f32>,
    /// Choose among this many words, 0 for all; `None`: the model's.
    pub top_k: Option<usize>,
    /// Same seed, same answer.
    pub seed: u64,
    /// Think before answering.
    pub think: bool,
    /// What the answer must follow. It always does: where tokens or time run short, it ends early in a way that follows.
    pub constraint: Option<Constraint<'r>>,
    /// Tools that the model may call, in the form of the OpenAI API. Under a constraint the model knows of them, and the
    /// answer follows the constraint: it calls none.
    pub tools: &'r [Value],
    /// The answer ends before the first of these texts. Not looked at under a constraint, nor in thoughts.
    pub stop: &'r [String],
    /// The answer ends at this time, with what there is.
    pub deadline: Option<Instant>,
    /// The answer ends soon after this becomes true.
    pub cancel: Option<&'r AtomicBool>,
}

/// Why an answer must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Cancelled,
    Deadline,
}

impl Request<'_> {
    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|c| c.load(Ordering::Relaxed))
    }

    /// Why the answer must end now, if it must. `step` is how long another token takes.
    pub(crate) fn must_end(&self, step: Duration) -> Option<Ending> {
        if self.is_cancelled() {
            return Some(Ending::Cancelled);
        }
        let late = |deadline: Instant| Instant::now().checked_add(step).is_none_or(|then| then > deadline);
        self.deadline.is_some_and(late).then_some(Ending::Deadline)
    }
}

impl<'r> From<&Request<'r>> for Request<'r> {
    fn from(request: &Request<'r>) -> Self {
        *request
    }
}

impl From<&SampleArgs> for Request<'_> {
    fn from(a: &SampleArgs) -> Self {
        Self {
            max_tokens: a.max_tokens,
            temperature: a.temperature,
            top_p: a.top_p,
            top_k: a.top_k,
            seed: a.seed,
            think: a.think,
            ..Self::default()
        }
    }
}

/// Passes on what an observer hears, and stops a prompt whose answer is not wanted any more.
pub(crate) struct Watch<'w, 'r> {
    pub observer: &'w mut dyn Observer,
    pub request: &'w Request<'r>,
}

impl Observer for Watch<'_, '_> {
    fn cancelled(&mut self) -> bool {
        self.request.must_end(Duration::ZERO).is_some() || self.observer.cancelled()
    }

    fn wants_all_logits(&self) -> bool {
        self.observer.wants_all_logits()
    }

    fn hidden(&mut self, layer: usize, first: usize, x: &[f32]) {
        self.observer.hidden(layer, first, x);
    }

    fn router_input(&mut self, layer: usize, first: usize, x: &[f32]) {
        self.observer.router_input(layer, first, x);
    }

    fn routed(&mut self, layer: usize, token: usize, experts: &[u16], weights: &[f32]) {
        self.observer.routed(layer, token, experts, weights);
    }

    fn reroute(&mut self, layer: usize, token: usize, experts: &mut [u16]) {
        self.observer.reroute(layer, token, experts);
    }

    fn foresee(&mut self, layer: usize, token: usize, candidates: &mut [u16]) {
        self.observer.foresee(layer, token, candidates);
    }

    fn logits(&mut self, token: usize, logits: &[f32]) {
        self.observer.logits(token, logits);
    }
}
