//! One error type for the tools, with the exit code that each kind of failure has.

use forerun_format::{FormatError, shown};
use std::{io, path::Path};

/// Why a command failed. The text says what was found, what was expected, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading or writing failed, or a file stands in the way.
    #[error("{0}")]
    Io(String),
    /// The checkpoint or model file is damaged or not supported.
    #[error("{0}")]
    Input(String),
    /// The device has not enough room.
    #[error("{0}")]
    Space(String),
}

impl Error {
    /// The process's exit code for this failure; 2 (wrong usage) belongs to the argument parser.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io(_) => 1,
            Self::Input(_) => 3,
            Self::Space(_) => 4,
        }
    }

    /// Bad input: `what` is `found`, but `expected`. One line of printable text, whatever the file says.
    pub fn input(
        what: impl std::fmt::Display,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Self {
        let [what, found, expected] = [what.to_string(), found.to_string(), expected.to_string()].map(shown);
        Self::Input(format!("{what}: found {found}, expected {expected}"))
    }

    /// An I/O error while `doing` something to `path`. A full device gets its own kind.
    pub fn io(doing: &str, path: &Path, e: &io::Error) -> Self {
        let text = format!("cannot {doing} {}: {e}", path.display());
        match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Space(format!("{text}: free some space or write to another device"))
            }
            io::ErrorKind::OutOfMemory => Self::Space(text),
            io::ErrorKind::UnexpectedEof => Self::Input(format!("{text}: the file is shorter than its header says")),
            _ => Self::Io(text),
        }
    }
}

impl From<FormatError> for Error {
    fn from(e: FormatError) -> Self {
        Self::Input(e.to_string())
    }
}

/// Result of the tools.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_cannot_write_to_the_terminal() {
        let text = Error::input("tensor \u{1b}]0;x\u{7}\n", "y".repeat(1 << 20), "z").to_string();
        assert!(
            text.starts_with("tensor \\u{1b}]0;x\\u{7}\\n: found yyy") && text.ends_with("…, expected z"),
            "{text}"
        );
        assert!(text.len() < 1000);
    }
}
