//! The inside of a JSON string as a byte automaton: valid UTF-8, escapes, and surrogates only in pairs.
//!
//! A character is complete whenever the automaton comes (back) to [`BOUNDARY`]; only there may the string end.

/// Between characters.
pub(super) const BOUNDARY: u8 = 0;
/// One, two, three more continuation bytes.
const MORE1: u8 = 1;
const MORE2: u8 = 2;
const MORE3: u8 = 3;
/// After a byte whose continuation is limited: no overlong forms, no surrogates, nothing past U+10FFFF.
const AFTER_E0: u8 = 4;
const AFTER_ED: u8 = 5;
const AFTER_F0: u8 = 6;
const AFTER_F4: u8 = 7;
/// After a backslash.
pub(super) const ESCAPE: u8 = 8;
/// After `\u`, and after the digit that decides whether it can be a surrogate.
const HEX4: u8 = 9;
const HEX3_D: u8 = 10;
const HEX3: u8 = 11;
const HEX2: u8 = 12;
const HEX1: u8 = 13;
/// In a high surrogate, and then in the low one that must follow.
const HIGH2: u8 = 14;
const HIGH1: u8 = 15;
const LOW_BACKSLASH: u8 = 16;
const LOW_U: u8 = 17;
const LOW_D: u8 = 18;
const LOW_HEX3: u8 = 19;
const LOW_HEX2: u8 = 20;
const LOW_HEX1: u8 = 21;
/// The quote that ends the string.
pub(super) const END: u8 = 254;
/// Not JSON.
pub(super) const REJECT: u8 = 255;

const STATES: usize = 22;

static TABLE: [[u8; 256]; STATES] = table();

/// The state after `byte`.
#[inline]
pub(super) fn step(state: u8, byte: u8) -> u8 {
    // States are made here only.
    TABLE.get(usize::from(state)).map_or(REJECT, |row| row[usize::from(byte)])
}

const fn table() -> [[u8; 256]; STATES] {
    let mut t = [[REJECT; 256]; STATES];
    let mut state = 0;
    while state < STATES {
        let mut byte = 0;
        while byte < 256 {
            t[state][byte] = next(state as u8, byte as u8);
            byte += 1;
        }
        state += 1;
    }
    t
}

const fn next(state: u8, b: u8) -> u8 {
    let hex = b.is_ascii_hexdigit();
    let more = matches!(b, 0x80..=0xBF);
    match state {
        BOUNDARY => match b {
            b'"' => END,
            b'\\' => ESCAPE,
            0x20..=0x7F => BOUNDARY,
            0xC2..=0xDF => MORE1,
            0xE0 => AFTER_E0,
            0xED => AFTER_ED,
            0xE1..=0xEF => MORE2,
            0xF0 => AFTER_F0,
            0xF1..=0xF3 => MORE3,
            0xF4 => AFTER_F4,
            _ => REJECT,
        },
        MORE1 if more => BOUNDARY,
        MORE2 if more => MORE1,
        MORE3 if more => MORE2,
        AFTER_E0 if matches!(b, 0xA0..=0xBF) => MORE1,
        AFTER_ED if matches!(b, 0x80..=0x9F) => MORE1,
        AFTER_F0 if matches!(b, 0x90..=0xBF) => MORE2,
        AFTER_F4 if matches!(b, 0x80..=0x8F) => MORE2,
        ESCAPE => match b {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => BOUNDARY,
            b'u' => HEX4,
            _ => REJECT,
        },
        HEX4 if matches!(b, b'd' | b'D') => HEX3_D,
        HEX4 if hex => HEX3,
        HEX3_D if matches!(b, b'0'..=b'7') => HEX2,
        HEX3_D if matches!(b, b'8' | b'9' | b'a' | b'b' | b'A' | b'B') => HIGH2,
        HEX3 if hex => HEX2,
        HEX2 if hex => HEX1,
        HEX1 if hex => BOUNDARY,
        HIGH2 if hex => HIGH1,
        HIGH1 if hex => LOW_BACKSLASH,
        LOW_BACKSLASH if b == b'\\' => LOW_U,
        LOW_U if b == b'u' => LOW_D,
        LOW_D if matches!(b, b'd' | b'D') => LOW_HEX3,
        LOW_HEX3 if matches!(b, b'c'..=b'f' | b'C'..=b'F') => LOW_HEX2,
        LOW_HEX2 if hex => LOW_HEX1,
        LOW_HEX1 if hex => BOUNDARY,
        _ => REJECT,
    }
}

/// The shortest bytes that lead from `state` to [`BOUNDARY`].
pub(super) fn to_boundary(state: u8) -> &'static [u8] {
    match state {
        MORE1 => b"\x80",
        MORE2 | AFTER_ED => b"\x80\x80",
        MORE3 | AFTER_F4 => b"\x80\x80\x80",
        AFTER_E0 => b"\xA0\x80",
        AFTER_F0 => b"\x90\x80\x80",
        ESCAPE => b"n",
        HEX4 => b"0020",
        HEX3_D | HEX3 => b"020",
        HEX2 => b"20",
        HEX1 => b"0",
        HIGH2 => b"00\\uDC00",
        HIGH1 => b"0\\uDC00",
        LOW_BACKSLASH => b"\\uDC00",
        LOW_U => b"uDC00",
        LOW_D => b"DC00",
        LOW_HEX3 => b"C00",
        LOW_HEX2 => b"00",
        LOW_HEX1 => b"0",
        _ => b"",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(bytes: &[u8]) -> u8 {
        bytes.iter().fold(BOUNDARY, |s, &b| if s == REJECT || s == END { REJECT } else { step(s, b) })
    }

    /// serde_json is the reference: a text is a string if and only if it says so.
    #[test]
    fn agrees_with_serde_json() {
        let mut seed = 1u64;
        let mut random = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        let parts: [&[u8]; 24] = [
            b"a",
            b"\\",
            b"u",
            b"d",
            b"D8",
            b"DC00",
            b"\\uD83D\\uDE00",
            b"\\ud800",
            b"0",
            b"e9",
            b"\"",
            b"/",
            b"n",
            b"\n",
            "é".as_bytes(),
            "€".as_bytes(),
            "😀".as_bytes(),
            b"\xC3",
            b"\xE0\x80\x80",
            b"\xED\xA0\x80",
            b"\xF4\x90\x80\x80",
            b"\x80",
            b"\\u00",
            b"\x7f",
        ];
        let mut accepted = 0;
        for _ in 0..200_000 {
            let mut text: Vec<u8> = (0..random(6)).flat_map(|_| parts[random(parts.len())]).copied().collect();
            text.push(b'"');
            let ours = run(&text) == END;
            text.insert(0, b'"');
            let theirs = serde_json::from_slice::<String>(&text).is_ok();
            assert_eq!(ours, theirs, "{:?}", String::from_utf8_lossy(&text));
            accepted += usize::from(ours);
        }
        assert!(accepted > 10_000, "{accepted}");
    }

    #[test]
    fn every_state_reaches_a_boundary() {
        for state in 0..STATES as u8 {
            let end = to_boundary(state).iter().fold(state, |s, &b| step(s, b));
            assert_eq!(end, BOUNDARY, "state {state}");
        }
    }
}
