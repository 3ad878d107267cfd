//! Whether two values of a schema can be the same one: what `oneOf` forbids. Says yes where it is not sure.

use super::grammar::{Grammar, Kind, Object};

/// Levels of properties that are looked into.
const LEVELS: u32 = 4;
/// Pairs that are looked at, for all of a schema's `oneOf` alike.
pub(super) const PAIRS_MAX: u32 = 1 << 20;

/// Whether a value may be one of node `a` and of node `b`. Takes from `pairs` what it looks at.
pub(super) fn may_overlap(g: &Grammar, a: u32, b: u32, pairs: &mut u32) -> bool {
    nodes(g, a, b, LEVELS, pairs)
}

fn nodes(g: &Grammar, a: u32, b: u32, levels: u32, pairs: &mut u32) -> bool {
    let (a, b) = (&g.node(a).alternatives, &g.node(b).alternatives);
    a.iter().any(|&a| b.iter().any(|&b| kinds(g, g.kind(a), g.kind(b), levels, pairs)))
}

fn kinds(g: &Grammar, a: &Kind, b: &Kind, levels: u32, pairs: &mut u32) -> bool {
    *pairs = pairs.saturating_sub(1);
    if *pairs == 0 {
        return true;
    }
    match (a, b) {
        (Kind::Literals(a), Kind::Literals(b)) => {
            *pairs = pairs.saturating_sub((a.len() * b.len()) as u32);
            a.iter().any(|a| b.iter().any(|b| same(a, b)))
        }
        (Kind::Literals(texts), other) | (other, Kind::Literals(texts)) => texts.iter().any(|t| begins(other, t)),
        (Kind::Object(a), Kind::Object(b)) => levels > 0 && objects(g, a, b, levels - 1, pairs),
        // Both empty at least, or of the same kind: nothing tells them apart.
        (Kind::Number(_), Kind::Number(_))
        | (Kind::String { .. }, Kind::String { .. })
        | (Kind::Array(_), Kind::Array(_)) => true,
        _ => false,
    }
}

/// Equal as values: numbers may be written in several ways.
fn same(a: &[u8], b: &[u8]) -> bool {
    let number = |t: &[u8]| str::from_utf8(t).ok().and_then(|t| t.parse::<f64>().ok());
    a == b
        || number(a).is_some_and(|x| Some(x) == number(b))
        || (matches!(a.first(), Some(b'[' | b'{')) && a.first() == b.first())
}

/// Whether a value of `kind` begins as `text` does.
fn begins(kind: &Kind, text: &[u8]) -> bool {
    match (kind, text.first()) {
        (Kind::String { .. }, Some(b'"')) | (Kind::Array(_), Some(b'[')) | (Kind::Object(_), Some(b'{')) => true,
        (Kind::Number(_), Some(b)) => *b == b'-' || b.is_ascii_digit(),
        _ => false,
    }
}

fn objects(g: &Grammar, a: &Object, b: &Object, levels: u32, pairs: &mut u32) -> bool {
    let mut apart = |a: &Object, b: &Object| {
        a.properties.iter().filter(|p| p.required).any(|p| match b.properties.iter().find(|q| q.text == p.text) {
            // Both must have it, or one must and the other's, if it is there, is another.
            Some(q) => !nodes(g, p.node, q.node, levels, pairs),
            None => b.closed,
        })
    };
    !apart(a, b) && !apart(b, a)
}
