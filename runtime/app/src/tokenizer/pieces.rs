//! Cuts text into the pieces that merges work on, one at a time.
//!
//! The reference does it by this expression, of which each alternative is tried in turn:
//!
//! ```text
//! (?i:'s|'t|'re|'ve|'m|'ll|'d)
//! |[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+
//! |\p{N}
//! | ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*
//! |\s*[\r\n]+
//! |\s+(?!\S)|\s+
//! ```
//!
//! It is written out here, in one pass without going back, since engines that can look ahead give up, without an error, on
//! very long runs of spaces.

use super::classes::STARTS;

/// What the expression asks of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Neither of the others: punctuation, symbols, control characters, unassigned ones.
    Other = 0,
    /// `\p{L}` or `\p{M}`. The expression tells them apart only where one of either follows, which is then taken anyway.
    Word = 1,
    /// `\p{N}`.
    Number = 2,
    /// `\s`.
    Space = 3,
}

impl Class {
    pub fn of(c: char) -> Self {
        match c {
            'a'..='z' | 'A'..='Z' => Self::Word,
            '0'..='9' => Self::Number,
            ' ' | '\t'..='\r' => Self::Space,
            '\0'..='\x7f' => Self::Other,
            _ => {
                // The first one starts at 0.
                let after = STARTS.partition_point(|&start| start >> 2 <= u32::from(c));
                match STARTS[after - 1] & 3 {
                    0 => Self::Other,
                    1 => Self::Word,
                    2 => Self::Number,
                    _ => Self::Space,
                }
            }
        }
    }
}

/// The pieces of `text`; together they are all of it.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at(piece_len(rest)?);
        rest = after;
        Some(piece)
    })
}

/// Bytes of the piece that `text` begins with.
fn piece_len(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    let (len, rest) = (first.len_utf8(), &text[first.len_utf8()..]);
    if first == '\''
        && let Some(n) = contraction(rest)
    {
        return Some(len + n);
    }
    let class = Class::of(first);
    if class == Class::Number {
        return Some(len);
    }
    let letters = run(rest, Class::Word);
    if class == Class::Word || (letters > 0 && !matches!(first, '\r' | '\n')) {
        return Some(len + letters);
    }
    let symbols = if first == ' ' { rest } else { text };
    let n = run(symbols, Class::Other);
    if n > 0 {
        let newlines = symbols[n..].bytes().take_while(|b| matches!(b, b'\r' | b'\n')).count();
        return Some(text.len() - symbols.len() + n + newlines);
    }
    let spaces = &text[..run(text, Class::Space)];
    if let Some(at) = spaces.rfind(['\r', '\n']) {
        return Some(at + 1);
    }
    // The last space before a word belongs to the word, unless it is the only one.
    let last = spaces.chars().next_back().map_or(0, char::len_utf8);
    Some(if spaces.len() == text.len() || spaces.len() == last { spaces.len() } else { spaces.len() - last })
}

/// Bytes of the characters of `class` that `text` begins with.
fn run(text: &str, class: Class) -> usize {
    text.find(|c| Class::of(c) != class).unwrap_or(text.len())
}

/// Bytes of what may follow an apostrophe as in "it's", whatever its case.
fn contraction(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    match bytes.first()?.to_ascii_lowercase() {
        b's' | b't' | b'm' | b'd' => Some(1),
        b'r' | b'v' if bytes.get(1).is_some_and(|b| b.eq_ignore_ascii_case(&b'e')) => Some(2),
        b'l' if bytes.get(1).is_some_and(|b| b.eq_ignore_ascii_case(&b'l')) => Some(2),
        // The long s is one whose capital is S too.
        _ => text.starts_with('ſ').then_some('ſ'.len_utf8()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;
    use std::fmt::Write;

    /// The table that `regex` stands for, as the file `classes.rs` has it.
    fn table() -> String {
        let of = |class: &str| Regex::new(&format!(r"^{class}$")).unwrap();
        let classes = [(of(r"[\p{L}\p{M}]"), 1), (of(r"\p{N}"), 2), (of(r"\s"), 3)];
        let (mut starts, mut last) = (Vec::new(), None);
        for c in '\0'..=char::MAX {
            let text = c.to_string();
            let class = classes.iter().find(|(r, _)| r.is_match(&text)).map_or(0, |&(_, n)| n);
            if last.replace(class) != Some(class) {
                starts.push(u32::from(c) << 2 | class);
            }
        }
        let mut out = String::from(
            "//! Where runs of characters of one class begin: the character times 4, and the `Class`. Unicode 16.0.\n//!\n\
             //! Written by a test in `pieces.rs`, from the tables of the crate `regex`.\n\n#[rustfmt::skip]\n",
        );
        writeln!(out, "pub(super) static STARTS: [u32; {}] = [", starts.len()).unwrap();
        for row in starts.chunks(14) {
            let row: Vec<String> = row.iter().map(|n| format!("{n},")).collect();
            writeln!(out, "    {}", row.join(" ")).unwrap();
        }
        out + "];\n"
    }

    #[test]
    fn classes_are_those_of_the_expression() {
        let table = table();
        if include_str!("classes.rs") != table {
            let path = std::env::temp_dir().join("classes.rs");
            std::fs::write(&path, table).unwrap();
            panic!("regex has another Unicode: copy {} to runtime/app/src/tokenizer/classes.rs", path.display());
        }
        for c in ('\0'..=char::MAX).filter(|c| c.is_ascii() || c.is_whitespace()) {
            let at = STARTS.partition_point(|&start| start >> 2 <= u32::from(c)) - 1;
            assert_eq!(Class::of(c) as u32, STARTS[at] & 3, "{c:?}");
        }
    }

    #[test]
    fn pieces_are_those_of_the_expression() {
        for (text, pieces) in [
            ("it's we'LL they'rE I'M 'ſo 'l 'x '", &["it", "'s", " we", "'LL", " they", "'rE", " I", "'M"][..]),
            ("'ſo 'l 'x 'r'", &["'ſ", "o", " '", "l", " '", "x", " '", "r", "'"]),
            ("a1234 ٣x", &["a", "1", "2", "3", "4", " ", "٣", "x"]),
            ("e\u{301}\u{301}!\u{301}a \u{301}", &["e\u{301}\u{301}", "!\u{301}a", " \u{301}"]),
            ("(x) -- y!?\r\n\nz", &["(x", ")", " --", " y", "!?\r\n\n", "z"]),
            (
                "a  \n \t b   c\u{3000}\u{3000}d \u{a0}!",
                &["a", "  \n", " \t", " b", "  ", " c", "\u{3000}", "\u{3000}d"],
            ),
            ("\t!\n", &["\t", "!\n"]),
            ("  ", &["  "]),
            (" 1  2", &[" ", "1", " ", " ", "2"]),
            ("\n\nx\r", &["\n\n", "x", "\r"]),
        ] {
            let found: Vec<&str> = super::pieces(text).collect();
            assert_eq!(found[..pieces.len().min(found.len())], *pieces, "{text:?}");
            assert_eq!(found.concat(), text);
        }
    }
}
