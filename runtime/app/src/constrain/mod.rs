//! Answers that follow a JSON schema: which tokens may come next, and how an answer ends in few tokens.
//!
//! A schema becomes a [`Grammar`], a vocabulary a [`TokenIndex`], and both a [`Matcher`] for each answer. Relies on the model
//! for nothing: whatever tokens are chosen among those allowed, the answer parses and follows the schema. Never changes
//! logits; once made, a matcher takes no memory for usual answers.
//!
//! **White space** between the parts of an answer: nothing, a space, or a line break and spaces for the level; one space after
//! a colon. **Numbers**: minimum and maximum are kept to; an integer is written without fraction and exponent. **Names** come
//! in any order, each once; where `additionalProperties` is not given and properties are, those are all.

mod grammar;
mod machine;
mod matcher;
mod number;
mod overlap;
mod schema;
mod string;
#[cfg(test)]
mod tests;
mod tokens;
mod words;

pub use grammar::{DEPTH_MAX, Grammar, PROPERTIES_MAX, SHORTEST_BYTES_MAX};
pub use machine::HEADS_MAX;
pub use matcher::Matcher;
pub use schema::SchemaError;
pub use tokens::TokenIndex;

/// What an answer must follow.
#[derive(Debug, Clone, Copy)]
pub struct Constraint<'c> {
    /// The compiled schema.
    pub grammar: &'c Grammar,
    /// The model's tokens.
    pub tokens: &'c TokenIndex,
}
