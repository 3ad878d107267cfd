//! GPT-2's mapping of bytes to printable characters: bytes that are printable in Latin-1 stand for themselves, the
//! others for U+0100 and up, in order.

use alloc::{string::String, vec::Vec};

/// One more than the last character of the alphabet.
const CHARS: usize = 0x144;

/// The alphabet, both ways.
#[derive(Debug)]
pub struct Alphabet {
    chars: [char; 256],
    bytes: [Option<u8>; CHARS],
}

impl Default for Alphabet {
    fn default() -> Self {
        Self::new()
    }
}

impl Alphabet {
    /// Both tables.
    pub fn new() -> Self {
        let mut a = Self { chars: ['\0'; 256], bytes: [None; CHARS] };
        let mut others = '\u{100}'..;
        for b in 0..=255_u8 {
            let printable = matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let c = if printable { char::from(b) } else { others.next().unwrap_or('\0') };
            a.chars[usize::from(b)] = c;
            a.bytes[c as usize] = Some(b);
        }
        a
    }

    /// The character that stands for `byte`.
    pub fn char(&self, byte: u8) -> char {
        self.chars[usize::from(byte)]
    }

    /// The text that stands for `bytes`.
    pub fn text(&self, bytes: &[u8]) -> String {
        bytes.iter().map(|&b| self.char(b)).collect()
    }

    /// Appends the bytes that `text` stands for and returns whether it is of this alphabet. If not, `out` holds the bytes
    /// up to the first character that is not.
    pub fn push_bytes(&self, text: &str, out: &mut Vec<u8>) -> bool {
        text.chars().all(|c| {
            let byte = self.bytes.get(c as usize).copied().flatten();
            out.extend(byte);
            byte.is_some()
        })
    }
}
