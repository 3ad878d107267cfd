//! One error type for everything a model file can be wrong in: what was found, what was expected, what to do.

use alloc::string::String;
use core::fmt::{self, Write};

/// Characters of a name or value that an error shows: both come from the file and may be as long as it is.
const SHOWN_CHARS: usize = 400;

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
    /// Shorthand for [`FormatError::Invalid`] that keeps the error one line of printable text: each part is cut where it
    /// is long, and its control characters are escaped.
    pub fn invalid(what: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Invalid { what: shown(what.into()), found: shown(found.into()), expected: shown(expected.into()) }
    }
}

/// `text` from a file as an error shows it: cut after 400 characters, control characters escaped.
pub fn shown(text: String) -> String {
    let cut = text.char_indices().nth(SHOWN_CHARS).map(|(at, _)| at);
    if cut.is_none() && !text.contains(char::is_control) {
        return text;
    }
    let mut out = String::new();
    for c in text[..cut.unwrap_or(text.len())].chars() {
        if c.is_control() {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
    out.extend(cut.map(|_| '…'));
    out
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

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn an_error_is_one_line_whatever_the_file_says() {
        let hostile = "\u{1b}[2J\nné\u{85}".to_string();
        let text = FormatError::invalid(hostile.clone(), "x".repeat(1 << 20), hostile).to_string();
        assert!(text.chars().count() < 2000, "{} bytes", text.len());
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(text.starts_with("\\u{1b}[2J\\nné\\u{85}: found xxx"), "{text}");
        assert!(text.contains("xxx…, expected"), "{text}");
    }
}
