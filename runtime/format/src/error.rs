//! One error type for everything a model file can be wrong in: what was found, what was expected, what to do.

use alloc::string::String;
use core::fmt;

/// Why a model file was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FormatError {
    /// The header goes on past the bytes given; `need` bytes from the start of the file would get further.
    Truncated {
        /// Bytes from the start of the file that the parser wants to see.
        need: u64,
    },
    /// The first four bytes are not `GGUF`.
    Magic([u8; 4]),
    /// A GGUF version other than 2 and 3.
    Version(u32),
    /// A key that the model needs is absent.
    MissingKey(String),
    /// A tensor that the model needs is absent.
    MissingTensor(String),
    /// Something is not as it must be.
    Invalid {
        /// Where: a key, a tensor, a field.
        what: String,
        /// What the file says.
        found: String,
        /// What would be accepted.
        expected: String,
    },
}

impl FormatError {
    /// Shorthand for [`FormatError::Invalid`].
    pub fn invalid(what: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), found: found.into(), expected: expected.into() }
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { need } => {
                write!(f, "the file ends early: its header needs at least {need} bytes: copy the model file again")
            }
            Self::Magic(m) => write!(
                f,
                "not a model file: it starts with {:02x} {:02x} {:02x} {:02x}, expected 47 47 55 46 (\"GGUF\"): give a \
                 file made by 'forerun-quant pack'",
                m[0], m[1], m[2], m[3]
            ),
            Self::Version(v) => {
                write!(f, "GGUF version {v}, expected 3: pack the model again with 'forerun-quant pack'")
            }
            Self::MissingKey(k) => {
                write!(
                    f,
                    "key {k} is missing, expected in every model of this kind: pack the model again with 'forerun-quant pack'"
                )
            }
            Self::MissingTensor(t) => write!(
                f,
                "tensor {t} is missing, expected in every model of this kind: pack the model again with 'forerun-quant pack'"
            ),
            Self::Invalid { what, found, expected } => {
                write!(
                    f,
                    "{what}: found {found}, expected {expected}: the file is damaged or of another kind; copy or pack it again"
                )
            }
        }
    }
}

impl core::error::Error for FormatError {}
