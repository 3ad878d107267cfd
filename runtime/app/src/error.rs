//! What can go wrong, and the exit code that says so.

use forerun_camera::picture::PictureError;
use forerun_engine::{EngineError, plan::PlanError, slicing::SliceError};
use forerun_format::FormatError;
use std::path::PathBuf;

use crate::prompt::PromptError;
use crate::template::TemplateError;

/// Exit codes of `forerun`, listed in `--help` and the README.
pub mod exit {
    /// Storage or operating system.
    pub const SYSTEM: u8 = 1;
    /// Wrong command line; the one that clap uses.
    pub const USAGE: u8 = 2;
    /// Bad input: model file, picture, prompt.
    pub const INPUT: u8 = 3;
    /// It does not fit: memory cap, context.
    pub const DOES_NOT_FIT: u8 = 4;
    /// A check failed: `verify`, `demo`.
    pub const CHECK: u8 = 5;
}

/// Any failure of a command.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// A file cannot be opened or read.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The model file is not usable.
    #[error("{path}: {error}")]
    Model {
        /// The file.
        path: PathBuf,
        /// Why.
        error: FormatError,
    },
    /// A resident tensor differs from its checksum.
    #[error("{path}: tensor {tensor}: checksum {found:08x}, expected {expected:08x}: re-copy the model file")]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// CRC32C of what was read.
        found: u32,
        /// CRC32C in the file's header.
        expected: u32,
    },
    /// A picture is not usable.
    #[error("{path}: {error}")]
    Picture {
        /// The file.
        path: PathBuf,
        /// Why.
        error: PictureError,
    },
    /// A picture has a shape that cannot be sliced.
    #[error("{path}: {error}")]
    Slicing {
        /// The file.
        path: PathBuf,
        /// Why.
        error: SliceError,
    },
    /// The plan does not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The engine stopped.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompt cannot be built.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// The text is longer than what memory was planned for.
    #[error(
        "a prompt of {found} bytes: expected at most {max} for a context of {context} tokens: raise --context or shorten it"
    )]
    TextTooLong {
        /// Bytes of text.
        found: usize,
        /// Most bytes.
        max: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// The chat template refused.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Memory, threads or the ring were refused.
    #[error("{what}: {error}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// Why not.
        error: std::io::Error,
    },
    /// `FORERUN_KERNELS` names no variant that this CPU runs.
    #[error("kernels {0:?}: not in this build or not for this CPU: expected one of {1}")]
    Kernels(String, String),
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Output(std::io::Error),
    /// The command line lacks something.
    #[error("{0}")]
    Usage(String),
    /// Something given by the user is unusable in a way the command line could not see.
    #[error("{0}")]
    Input(String),
    /// Nobody waits for the answer any more.
    #[error("cancelled: who asked went away")]
    Cancelled,
    /// The program was told to stop.
    #[error("stopped before the answer was complete")]
    Stopped,
    /// A check found what it looks for.
    #[error("{0}")]
    Check(String),
}

impl AppError {
    /// The exit code that stands for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::File { error, .. } if error.kind() == std::io::ErrorKind::NotFound => exit::INPUT,
            Self::File { .. } | Self::System { .. } | Self::Output(_) => exit::SYSTEM,
            Self::Engine(EngineError::ContextFull { .. }) => exit::DOES_NOT_FIT,
            Self::Engine(
                EngineError::Expert { .. } | EngineError::VisionRead { .. } | EngineError::Embedding { .. },
            ) => exit::SYSTEM,
            Self::Plan(_) | Self::TextTooLong { .. } => exit::DOES_NOT_FIT,
            Self::Usage(_) => exit::USAGE,
            Self::Check(_) => exit::CHECK,
            _ => exit::INPUT,
        }
    }
}
