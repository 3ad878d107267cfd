//! What can go wrong while the engine runs.

use crate::ports::ReadError;
use crate::weights::VisionName;
use core::fmt;

/// Why a step failed. The engine can be used again after any of them: [`Engine::run`] says what its state is then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineError {
    /// The tokens do not fit the context.
    ContextFull {
        /// Tokens there would be.
        need: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A token is not in the vocabulary.
    Token(u32),
    /// Placeholders and visual features do not match.
    Features {
        /// Placeholder tokens.
        placeholders: usize,
        /// Features computed.
        features: usize,
    },
    /// A crop does not fit the plan, or its sides do not suit the mode.
    Crop {
        /// Patches from top to bottom.
        rows: usize,
        /// Patches from left to right.
        cols: usize,
    },
    /// An expert could not be read.
    Expert {
        /// Layer.
        layer: usize,
        /// Expert in that layer.
        expert: usize,
        /// Its offset in the file.
        offset: u64,
        /// Why.
        error: ReadError,
    },
    /// An expert was read twice and differs from its checksum.
    Checksum {
        /// Layer.
        layer: usize,
        /// Expert in that layer.
        expert: usize,
        /// Its offset in the file.
        offset: u64,
        /// CRC32C of what was read.
        found: u32,
        /// CRC32C that the file's header gives.
        expected: u32,
    },
    /// A tensor of the vision tower could not be read while it was streamed.
    VisionRead {
        /// The tensor, the first of those that were read together.
        tensor: VisionName,
        /// Why.
        error: ReadError,
    },
    /// A tensor of the vision tower was streamed twice and differs from its checksum.
    VisionChecksum {
        /// The tensor.
        tensor: VisionName,
        /// CRC32C of what was read.
        found: u32,
        /// CRC32C that the file's header gives.
        expected: u32,
    },
    /// An embedding row could not be read.
    Embedding {
        /// Token.
        token: u32,
        /// Why.
        error: ReadError,
    },
    /// The observer wanted it. What was computed until then is in the state.
    Cancelled,
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ContextFull { need, context } => write!(
                f,
                "{need} tokens do not fit the context of {context}: raise --context, shorten the prompt, or use fewer pictures or --detail 16x"
            ),
            Self::Token(t) => write!(f, "token {t} is not in the vocabulary"),
            Self::Features { placeholders, features } => {
                write!(
                    f,
                    "{placeholders} visual placeholders for {features} visual tokens: does the prompt contain a placeholder as text?"
                )
            }
            Self::Crop { rows, cols } => write!(f, "a crop of {rows} x {cols} patches does not fit the plan"),
            Self::Expert { layer, expert, offset, error } => {
                write!(f, "expert {expert} of layer {layer} at offset {offset}: {error}")
            }
            Self::Checksum { layer, expert, offset, found, expected } => write!(
                f,
                "expert {expert} of layer {layer} at offset {offset}: checksum {found:08x}, expected {expected:08x}: re-copy the model \
                 file or run 'forerun-quant inspect' on it"
            ),
            Self::VisionRead { tensor, error } => write!(f, "tensor {tensor}: {error}"),
            Self::VisionChecksum { tensor, found, expected } => {
                write!(f, "tensor {tensor}: checksum {found:08x}, expected {expected:08x}: re-copy the model file")
            }
            Self::Cancelled => f.write_str("cancelled between two chunks of the prompt"),
            Self::Embedding { token, error } => write!(f, "embedding of token {token}: {error}"),
        }
    }
}

impl core::error::Error for EngineError {}
