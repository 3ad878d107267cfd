//! Why a job has no answer, in the terms of whoever asked.

use crate::error::{AppError, exit};
use forerun_engine::EngineError;
use std::time::Duration;

/// Kinds of failure: what the asker can do about it differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong. It fails again if it is sent again.
    Invalid,
    /// The conversation does not fit the context.
    TooLong,
    /// This build does not do that.
    Unsupported,
    /// There is no such model or page.
    NotFound,
    /// Larger than what is taken.
    TooLarge,
    /// It came too slowly, or was not done in time.
    Late,
    /// Not now: the model is loading, the queue is full, or the service stops.
    Busy,
    /// Nobody waits for it any more.
    Cancelled,
    /// Storage, memory or the engine failed.
    Engine,
}

/// A failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub kind: Kind,
    /// What was found, what was expected, what to do.
    pub message: String,
    /// When to try again, if it is worth it.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure of `kind`, with no use in trying again.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), retry_after: None }
    }

    /// A wrong request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, message)
    }

    fn busy(message: &str, retry_after: Duration) -> Self {
        Self { kind: Kind::Busy, message: message.into(), retry_after: Some(retry_after) }
    }

    /// The model is not in memory yet.
    pub fn loading() -> Self {
        Self::busy("the model is being loaded: try again in a few seconds", Duration::from_secs(5))
    }

    /// The service goes down.
    pub fn stopping() -> Self {
        Self::busy("the server stops: try again when it has started", Duration::from_secs(10))
    }

    /// As many jobs wait as may.
    pub fn full(retry_after: Duration) -> Self {
        Self::busy("the queue is full: try again later", retry_after)
    }

    /// It was not done in time.
    pub fn late(patience: Duration) -> Self {
        Self::new(Kind::Late, format!("no answer within {} s", patience.as_secs()))
    }

    /// Nobody waits for it any more.
    pub fn cancelled() -> Self {
        Self::new(Kind::Cancelled, "cancelled: who asked went away")
    }
}

impl From<&AppError> for Failure {
    fn from(e: &AppError) -> Self {
        let kind = match e {
            AppError::TextTooLong { .. } => Kind::TooLong,
            AppError::Engine(EngineError::ContextFull { .. } | EngineError::Features { .. }) => Kind::TooLong,
            AppError::Engine(EngineError::Token(_) | EngineError::Crop { .. }) => Kind::Invalid,
            AppError::Engine(_) => Kind::Engine,
            AppError::Cancelled => return Self::cancelled(),
            AppError::Stopped => return Self::stopping(),
            e if e.exit_code() == exit::INPUT => Kind::Invalid,
            _ => Kind::Engine,
        };
        Self::new(kind, e.to_string())
    }
}
