//! The automaton: bytes in, and out whether an answer can begin with them.
//!
//! A place in an answer is a set of [`Head`]s, one for each way to read what was written so far. Each has a stack of [`Frame`]s
//! below it, in an arena that heads share. Every head can be completed; so one may be dropped where there are too many.

use super::grammar::{Grammar, Kind, Object};
use super::number::Number;
use super::string::{self, BOUNDARY, END, ESCAPE, REJECT};

/// Ways to read an answer that are followed at a time.
pub const HEADS_MAX: usize = 16;

/// No frame: the value is the answer.
const ROOT: u32 = u32::MAX;

/// White space so far: none, of which kind there may be some, or a line break and spaces behind it.
const NONE: u8 = 0;
const DONE: u8 = 1;
const LINE: u8 = 2;
/// Before a value on the line of its name.
const SPACE_ONLY: u8 = 255;
/// Before an answer that follows thoughts: two line breaks.
const LEAD: u8 = 254;
const LEAD1: u8 = 253;
/// Spaces after a line break: four for each level, and no more than these.
const INDENT_MAX: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// After the bracket.
    Open,
    /// After a value.
    After,
    /// After a comma.
    Comma,
}

/// What is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Top {
    /// A value that did not begin.
    Value(u32),
    Literal {
        kind: u32,
        lo: u32,
        hi: u32,
        at: u32,
    },
    Number {
        kind: u32,
        number: Number,
    },
    String {
        kind: u32,
        state: u8,
        count: u32,
    },
    Array {
        kind: u32,
        phase: Phase,
        count: u32,
    },
    Object {
        kind: u32,
        phase: Phase,
        seen: u128,
    },
    /// A name: one of the properties `lo..hi`, or, if `free` is a state, another.
    Name {
        kind: u32,
        seen: u128,
        lo: u8,
        hi: u8,
        at: u32,
        free: u8,
    },
    /// After a name.
    Colon {
        kind: u32,
        seen: u128,
        node: u32,
    },
    /// The answer is complete.
    End,
}

/// A list or object around what is being written, as it is after that.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    top: Top,
    below: u32,
}

/// One way to read the answer so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    top: Top,
    below: u32,
    /// Frames below.
    depth: u8,
    space: u8,
}

/// Frames and heads go on lists that were given enough room.
pub(super) type Frames = Vec<Frame>;

/// What makes a mask of a head quick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Between two characters of a text that may have so many more.
    Text(u32),
    /// Between two characters of a name that is not given.
    Name,
    Other,
}

impl Head {
    pub fn new(g: &Grammar, lead: bool) -> Self {
        Self { top: Top::Value(g.root), below: ROOT, depth: 0, space: if lead { LEAD } else { DONE } }
    }

    pub fn shape(&self, g: &Grammar) -> Shape {
        match self.top {
            Top::String { kind, state: BOUNDARY, count } => match g.kind(kind) {
                Kind::String { max, .. } => Shape::Text(max.saturating_sub(count)),
                _ => Shape::Other,
            },
            Top::Name { free: BOUNDARY, .. } => Shape::Name,
            _ => Shape::Other,
        }
    }

    /// Whether the answer may end here, and whether it must.
    pub fn end(&self, g: &Grammar) -> (bool, bool) {
        match self.top {
            Top::End => (true, true),
            _ => (self.below == ROOT && self.is_whole(g), false),
        }
    }

    /// A literal or number that is one as it is.
    fn is_whole(&self, g: &Grammar) -> bool {
        match self.top {
            Top::Literal { kind, lo, at, .. } => {
                literals(g, kind).get(lo as usize).is_some_and(|t| t.len() == at as usize)
            }
            Top::Number { kind, number } => matches!(g.kind(kind), Kind::Number(spec) if spec.is_whole(number)),
            _ => false,
        }
    }

    /// The head after its value.
    fn complete(mut self, frames: &Frames) -> Self {
        self.space = NONE;
        match frames.get(self.below as usize) {
            Some(frame) => {
                (self.top, self.below) = (frame.top, frame.below);
                self.depth -= 1;
            }
            None => self.top = Top::End,
        }
        self
    }

    /// The head at the value `node`, after which `after` goes on.
    fn inside(mut self, after: Top, node: u32, space: u8, frames: &mut Frames) -> Self {
        frames.push(Frame { top: after, below: self.below });
        self.below = frames.len() as u32 - 1;
        self.top = Top::Value(node);
        self.depth += 1;
        self.space = space;
        self
    }

    /// The head after `b` if that is white space which may stand here.
    fn spaced(mut self, b: u8) -> Option<Self> {
        let limit = (4 * (u32::from(self.depth) + 1)).min(INDENT_MAX) as u8;
        self.space = match (self.space, b) {
            (NONE | SPACE_ONLY, b' ') => DONE,
            (NONE, b'\n') => LINE,
            (LEAD, b'\n') => LEAD1,
            (LEAD1, b'\n') => DONE,
            (n @ LINE..LEAD1, b' ' | b'\t') if n < LINE + limit => n + 1,
            _ => return None,
        };
        Some(self)
    }
}

fn literals(g: &Grammar, kind: u32) -> &[Box<[u8]>] {
    if let Kind::Literals(texts) = g.kind(kind) { texts } else { &[] }
}

fn object(g: &Grammar, kind: u32) -> Option<&Object> {
    if let Kind::Object(o) = g.kind(kind) { Some(o) } else { None }
}

/// Narrows `lo..hi` of sorted texts to those that have `b` at `at`.
fn narrow<'t>(lo: usize, hi: usize, at: usize, b: u8, text: impl Fn(usize) -> &'t [u8]) -> (usize, usize) {
    let bound = |above: bool| {
        let (mut lo, mut hi) = (lo, hi);
        while lo < hi {
            let mid = lo + (hi - lo) / 2;
            let before = text(mid).get(at).is_none_or(|&c| if above { c <= b } else { c < b });
            if before { lo = mid + 1 } else { hi = mid }
        }
        lo
    };
    (bound(false), bound(true))
}

/// Adds `head` unless it is there or there are enough.
fn add(head: Head, from: usize, out: &mut Vec<Head>) {
    if out.len() - from < HEADS_MAX && !out[from..].contains(&head) {
        out.push(head);
    }
}

/// Adds to `out`, whose heads from `from` on belong together, what becomes of `head` by `b`.
pub(super) fn step(g: &Grammar, head: Head, b: u8, from: usize, frames: &mut Frames, out: &mut Vec<Head>) {
    let head = if matches!(head.top, Top::Literal { .. } | Top::Number { .. }) {
        if let Some(next) = leaf(g, head, b, frames) {
            return add(next, from, out);
        }
        // It ends if it is whole, and `b` is what follows.
        if !head.is_whole(g) {
            return;
        }
        head.complete(frames)
    } else {
        head
    };
    match head.top {
        Top::Value(node) => value(g, head, node, b, from, frames, out),
        Top::String { kind, state, count } => {
            let Kind::String { min, max } = *g.kind(kind) else { return };
            let next = string::step(state, b);
            match next {
                REJECT => {}
                END if count >= min => add(head.complete(frames), from, out),
                END => {}
                // A character may begin only if there is room for it.
                _ if state == BOUNDARY && count >= max => {}
                _ => {
                    let count = count + u32::from(next == BOUNDARY);
                    add(Head { top: Top::String { kind, state: next, count }, ..head }, from, out);
                }
            }
        }
        Top::Array { kind, phase, count } => array(g, head, (kind, phase, count), b, from, frames, out),
        Top::Object { kind, phase, seen } => {
            if let Some(next) = object_step(g, head, (kind, phase, seen), b, frames) {
                add(next, from, out);
            }
        }
        Top::Name { .. } => {
            if let Some(next) = name(g, head, b) {
                add(next, from, out);
            }
        }
        Top::Colon { kind, seen, node } if b == b':' => {
            let after = Top::Object { kind, phase: Phase::After, seen };
            add(head.inside(after, node, SPACE_ONLY, frames), from, out);
        }
        Top::Colon { .. } | Top::Literal { .. } | Top::Number { .. } | Top::End => {}
    }
}

/// The head after `b`, which is part of a literal or number.
fn leaf(g: &Grammar, head: Head, b: u8, frames: &Frames) -> Option<Head> {
    match head.top {
        Top::Literal { kind, lo, hi, at } => {
            let texts = literals(g, kind);
            let (lo, hi) = narrow(lo as usize, hi as usize, at as usize, b, |i| &texts[i]);
            if lo == hi {
                return None;
            }
            let at = at + 1;
            let next = Head { top: Top::Literal { kind, lo: lo as u32, hi: hi as u32, at }, ..head };
            // What cannot go on is complete.
            Some(if hi - lo == 1 && texts[lo].len() == at as usize { next.complete(frames) } else { next })
        }
        Top::Number { kind, number } => match g.kind(kind) {
            Kind::Number(spec) => Some(Head { top: Top::Number { kind, number: spec.step(number, b)? }, ..head }),
            _ => None,
        },
        _ => None,
    }
}

fn value(g: &Grammar, head: Head, node: u32, b: u8, from: usize, frames: &Frames, out: &mut Vec<Head>) {
    if let Some(next) = head.spaced(b) {
        return add(next, from, out);
    }
    for &kind in &g.node(node).alternatives {
        if !g.alternatives[kind as usize].cost.fits(head.depth.into()) {
            continue;
        }
        let top = match (g.kind(kind), b) {
            (Kind::Object(_), b'{') => Top::Object { kind, phase: Phase::Open, seen: 0 },
            (Kind::Array(_), b'[') => Top::Array { kind, phase: Phase::Open, count: 0 },
            (Kind::String { .. }, b'"') => Top::String { kind, state: BOUNDARY, count: 0 },
            (Kind::Literals(texts), _) => {
                let begin =
                    Head { top: Top::Literal { kind, lo: 0, hi: texts.len() as u32, at: 0 }, space: NONE, ..head };
                if let Some(next) = leaf(g, begin, b, frames) {
                    add(next, from, out);
                }
                continue;
            }
            (Kind::Number(spec), _) => match spec.start(b) {
                Some(number) => Top::Number { kind, number },
                None => continue,
            },
            _ => continue,
        };
        add(Head { top, space: NONE, ..head }, from, out);
    }
}

fn array(
    g: &Grammar,
    head: Head,
    (kind, phase, count): (u32, Phase, u32),
    b: u8,
    from: usize,
    frames: &mut Frames,
    out: &mut Vec<Head>,
) {
    let Kind::Array(a) = g.kind(kind) else { return };
    if b == b']' {
        if count >= a.min {
            add(head.complete(frames), from, out);
        }
        return;
    }
    // Items stand one level deeper than the list.
    let item = a.item(count).filter(|&n| count < a.max && g.node(n).cost.fits(u32::from(head.depth) + 1));
    let after = Top::Array { kind, phase: Phase::After, count: count.saturating_add(1) };
    match (phase, b, item) {
        (Phase::After, b',', Some(node)) if head.space == NONE => {
            add(head.inside(after, node, NONE, frames), from, out)
        }
        (Phase::Open, b' ' | b'\n' | b'\t', _) => head.spaced(b).into_iter().for_each(|next| add(next, from, out)),
        // Only the bracket may stand behind space.
        (Phase::After, _, _) if count >= a.min => head.spaced(b).into_iter().for_each(|next| add(next, from, out)),
        (Phase::Open, _, Some(node)) => {
            let first = head.inside(after, node, DONE, frames);
            value(g, first, node, b, from, frames, out);
        }
        _ => {}
    }
}

/// Whether property `i` of `o` may still come, its value inside `depth` levels.
fn may_come(g: &Grammar, o: &Object, i: usize, seen: u128, depth: u32) -> bool {
    seen & (1 << i) == 0 && o.properties.get(i).is_some_and(|p| g.node(p.node).cost.fits(depth))
}

/// What a property that is not named may hold.
fn additional(g: &Grammar, o: &Object, depth: u32) -> Option<u32> {
    o.additional.filter(|&n| g.node(n).cost.fits(depth))
}

fn object_step(
    g: &Grammar,
    head: Head,
    (kind, phase, seen): (u32, Phase, u128),
    b: u8,
    frames: &Frames,
) -> Option<Head> {
    let o = object(g, kind)?;
    let depth = u32::from(head.depth) + 1;
    let more = || additional(g, o, depth).is_some() || (0..o.properties.len()).any(|i| may_come(g, o, i, seen, depth));
    match (phase, b) {
        (Phase::Open | Phase::After, b'}') if seen & o.required == o.required => Some(head.complete(frames)),
        (Phase::Open | Phase::Comma, b'"') if more() => {
            let free = if additional(g, o, depth).is_some() { BOUNDARY } else { REJECT };
            let top = Top::Name { kind, seen, lo: 0, hi: o.properties.len() as u8, at: 0, free };
            Some(Head { top, space: NONE, ..head })
        }
        (Phase::After, b',') if head.space == NONE && more() => {
            Some(Head { top: Top::Object { kind, phase: Phase::Comma, seen }, space: NONE, ..head })
        }
        // Only the bracket may stand behind space.
        (Phase::After, _) if seen & o.required != o.required => None,
        _ => head.spaced(b),
    }
}

fn name(g: &Grammar, head: Head, b: u8) -> Option<Head> {
    let Top::Name { kind, seen, lo, hi, at, free } = head.top else { return None };
    let o = object(g, kind)?;
    let depth = u32::from(head.depth) + 1;
    let (lo, hi) = narrow(lo.into(), hi.into(), at as usize, b, |i| &o.properties[i].text);
    let colon = |node, seen| Some(Head { top: Top::Colon { kind, seen, node }, ..head });
    // Texts end with their only bare quote, so no other one goes on.
    if let Some(p) = o.properties.get(lo).filter(|p| lo < hi && p.text.len() == at as usize + 1) {
        return if may_come(g, o, lo, seen, depth) { colon(p.node, seen | 1 << lo) } else { None };
    }
    // Other names are written in one way only: else one could be a given name in disguise.
    let free = match (free, b) {
        (REJECT, _) | (ESCAPE, b'u' | b'/') => REJECT,
        _ => string::step(free, b),
    };
    match free {
        END => colon(additional(g, o, depth)?, seen),
        REJECT if !(lo..hi).any(|i| may_come(g, o, i, seen, depth)) => None,
        _ => {
            let top = Top::Name { kind, seen, lo: lo as u8, hi: hi as u8, at: at + 1, free };
            Some(Head { top, ..head })
        }
    }
}

/// Adds to `out` few bytes that complete the answer.
pub(super) fn close(g: &Grammar, head: Head, frames: &Frames, out: &mut Vec<u8>) {
    let mut head = head;
    while head.top != Top::End {
        head = close_top(g, head, out).complete(frames);
    }
}

/// Adds the rest of what is being written, without what is around it, and returns the head of which it is the value.
fn close_top(g: &Grammar, head: Head, out: &mut Vec<u8>) -> Head {
    match head.top {
        Top::Value(node) => g.write_node(node, out),
        Top::Literal { kind, lo, hi, at } => {
            let texts = literals(g, kind).get(lo as usize..hi as usize).unwrap_or_default();
            let rest = texts.iter().filter_map(|t| t.get(at as usize..)).min_by_key(|t| t.len());
            out.extend_from_slice(rest.unwrap_or_default());
        }
        Top::Number { kind, number } => {
            if let Kind::Number(spec) = g.kind(kind) {
                spec.close(number, out);
            }
        }
        Top::String { kind, state, count } => {
            if let Kind::String { min, .. } = *g.kind(kind) {
                out.extend_from_slice(string::to_boundary(state));
                let count = count + u32::from(state != BOUNDARY);
                out.resize(out.len() + min.saturating_sub(count) as usize, b'.');
            }
            out.push(b'"');
        }
        Top::Array { kind, count, .. } => {
            if let Kind::Array(a) = g.kind(kind) {
                g.write_items(a, count, out);
            }
        }
        Top::Object { kind, phase, seen } => {
            let Some(o) = object(g, kind) else { return head };
            // A comma must be followed by a property, needed or not.
            let seen = if phase == Phase::Comma && o.required & !seen == 0 {
                cheapest(g, head, o, (kind, seen), out)
            } else {
                seen
            };
            g.write_properties(o, seen, phase == Phase::After || o.required & !seen == 0, out);
        }
        Top::Name { kind, seen, .. } => {
            let Some(o) = object(g, kind) else { return head };
            let seen = close_name(g, head, o, seen, out);
            g.write_properties(o, seen, true, out);
        }
        Top::Colon { kind, seen, node } => {
            out.push(b':');
            g.write_node(node, out);
            if let Some(o) = object(g, kind) {
                g.write_properties(o, seen, true, out);
            }
        }
        Top::End => {}
    }
    head
}

/// Adds the cheapest property that is not needed, and returns what is there then.
fn cheapest(g: &Grammar, head: Head, o: &Object, (kind, seen): (u32, u128), out: &mut Vec<u8>) -> u128 {
    out.push(b'"');
    let free = if additional(g, o, u32::from(head.depth) + 1).is_some() { BOUNDARY } else { REJECT };
    let top = Top::Name { kind, seen, lo: 0, hi: o.properties.len() as u8, at: 0, free };
    close_name(g, Head { top, ..head }, o, seen, out)
}

/// Adds the rest of a name, the colon and the cheapest value for it.
fn close_name(g: &Grammar, head: Head, o: &Object, seen: u128, out: &mut Vec<u8>) -> u128 {
    let Top::Name { lo, hi, at, free, .. } = head.top else { return seen };
    let depth = u32::from(head.depth) + 1;
    let bytes = |i: &usize| o.properties[*i].text.len() as u64 + u64::from(g.node(o.properties[*i].node).cost.bytes);
    let given = (usize::from(lo)..usize::from(hi)).filter(|&i| may_come(g, o, i, seen, depth)).min_by_key(bytes);
    // One that is needed is no detour.
    let needed = (usize::from(lo)..usize::from(hi)).find(|&i| o.required & !seen & (1 << i) != 0);
    if let Some(i) = needed.or(given) {
        let p = &o.properties[i];
        out.extend_from_slice(p.text.get(at as usize..).unwrap_or_default());
        out.push(b':');
        g.write_node(p.node, out);
        return seen | 1 << i;
    }
    let mut head = head;
    for &b in string::to_boundary(free) {
        out.push(b);
        head = name(g, head, b).unwrap_or(head);
    }
    // It must not be the name of a given property: there are at most 128 of those.
    for _ in 0..=o.properties.len() {
        if name(g, head, b'"').is_some() {
            break;
        }
        out.push(b'x');
        head = name(g, head, b'x').unwrap_or(head);
    }
    out.extend_from_slice(b"\":");
    if let Some(node) = o.additional {
        g.write_node(node, out);
    }
    seen
}

/// Copies the frames below `heads` to `to`, and forgets the others.
pub(super) fn compact(heads: &mut [Head], frames: &Frames, to: &mut Frames, moved: &mut Vec<(u32, u32)>) {
    to.clear();
    moved.clear();
    for head in heads {
        head.below = copy(head.below, frames, to, moved);
    }
}

/// The place of frame `at` in `to`, with all that is below it.
fn copy(at: u32, frames: &Frames, to: &mut Frames, moved: &mut Vec<(u32, u32)>) -> u32 {
    let mut at = at;
    let (mut first, mut last) = (ROOT, ROOT);
    while let Some(frame) = frames.get(at as usize) {
        let known = moved.iter().find(|(from, _)| *from == at).map(|(_, to)| *to);
        let here = known.unwrap_or(to.len() as u32);
        if let Some(above) = to.get_mut(last as usize) {
            above.below = here;
        }
        if first == ROOT {
            first = here;
        }
        if known.is_some() {
            break;
        }
        to.push(Frame { top: frame.top, below: ROOT });
        moved.push((at, here));
        last = here;
        at = frame.below;
    }
    first
}
