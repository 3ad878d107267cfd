//! Chooses the tokens of an answer from logits: sampler, constraint, and the end that there must be room for.
//!
//! Relies on its caller for the engine. Under a constraint the answer always follows it: where tokens or time run short, the
//! shortest end takes the place of what the model would say, and needs no engine. Takes no memory for usual answers once it is
//! made.

use crate::constrain::Matcher;
use crate::error::AppError;
use crate::model::Model;
use crate::request::Request;
use crate::session::Emit;
use crate::words::{Said, Words};
use forerun_engine::sampler::{Sampler, Sampling};

/// By how much the end of an answer may usually grow while it is made.
const END_TOKENS: usize = 256;

/// What came of logits.
pub(crate) enum Next {
    /// A token, to be computed for the next logits.
    Token(u32),
    /// The answer is over, for this reason.
    End(&'static str),
}

/// An answer in the making.
pub(crate) struct Speaker<'m> {
    model: &'m Model,
    sampler: Sampler,
    matcher: Option<Matcher<'m>>,
    words: Words<'m>,
    tokens: Vec<u32>,
    tokens_max: usize,
}

impl<'m> Speaker<'m> {
    /// Ready for the first token.
    ///
    /// # Errors
    /// If no answer that follows the constraint has as few tokens as asked for.
    pub fn new(model: &'m Model, request: &Request<'m>, words: Words<'m>) -> Result<Self, AppError> {
        let defaults = model.config.sampling;
        let settings = Sampling {
            temperature: request.temperature.unwrap_or(defaults.temperature),
            top_k: request.top_k.unwrap_or(defaults.top_k as usize),
            top_p: request.top_p.unwrap_or(defaults.top_p),
            seed: request.seed,
        };
        let sampler = Sampler::new(settings, model.config.text.vocab);
        let thinks = words.thinking().is_some();
        let mut matcher =
            request.constraint.map(|c| Matcher::new(c, &model.tokenizer, &model.config.tokens.stop, thinks));
        let need = matcher.as_mut().map_or(0, |m| m.end().len() + usize::from(thinks));
        if need > request.max_tokens {
            let found = request.max_tokens;
            return Err(AppError::Input(format!(
                "an answer of at most {found} tokens: the shortest that follows the schema has {need}: ask for more"
            )));
        }
        Ok(Self { model, sampler, matcher, words, tokens: Vec::new(), tokens_max: request.max_tokens })
    }

    /// Makes room for `engine` tokens that the engine has room for, and for the end.
    pub fn reserve(&mut self, engine: usize) {
        let end = self.matcher.as_mut().map_or(0, |m| m.end().len() + END_TOKENS);
        self.tokens.reserve(engine.min(self.tokens_max).saturating_add(end));
    }

    /// Chooses a token by `logits` and says it.
    ///
    /// # Errors
    /// Those of `emit`.
    pub fn next(&mut self, logits: &[f32], emit: &mut Emit<'_>) -> Result<Next, AppError> {
        // What is left after this token.
        let Some(room) = self.tokens_max.checked_sub(self.tokens.len() + 1) else { return Ok(Next::End("length")) };
        let ids = &self.model.config.tokens;
        let may = |id: u32| id != ids.image && id != ids.video;
        let next = match &mut self.matcher {
            Some(matcher) if self.words.thinking().is_none() => {
                matcher.compute_mask();
                let next = self.sampler.sample_if(logits, |id| matcher.allows(id));
                if !ids.stop.contains(&next) && !matcher.take(next, room) {
                    return Ok(Next::End("length"));
                }
                next
            }
            Some(matcher) => {
                let end = self.words.thinking().unwrap_or_default();
                let next = self.sampler.sample_if(logits, may);
                // To stop in a thought is to stop thinking.
                let next = if ids.stop.contains(&next) { end } else { next };
                // A thought may not take the room of the answer.
                if matcher.end_tokens(room) + usize::from(next != end) > room {
                    return Ok(Next::End("length"));
                }
                next
            }
            None => self.sampler.sample_if(logits, may),
        };
        self.tokens.push(next);
        if ids.stop.contains(&next) {
            return Ok(Next::End("stop"));
        }
        if !self.words.push(next, emit)? {
            return Ok(Next::End("stop"));
        }
        Ok(match &self.matcher {
            // Nothing may follow: no need to compute what the model would say.
            Some(m) if self.words.thinking().is_none() && m.is_complete() => Next::End("stop"),
            None if room == 0 => Next::End("length"),
            _ => Next::Token(next),
        })
    }

    /// Ends the answer as the constraint wants it, and gives all that was said and its tokens.
    ///
    /// # Errors
    /// Those of `emit`.
    pub fn finish(mut self, emit: &mut Emit<'_>) -> Result<(Said, Vec<u32>), AppError> {
        if let Some(matcher) = &mut self.matcher {
            if let Some(end) = self.words.thinking() {
                self.tokens.push(end);
                self.words.push(end, emit)?;
            }
            for &id in matcher.end() {
                self.tokens.push(id);
                self.words.push(id, emit)?;
            }
        }
        Ok((self.words.finish(emit)?, self.tokens))
    }
}
