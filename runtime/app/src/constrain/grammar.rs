//! A compiled schema: nodes (values that may stand somewhere) made of alternatives (values of one kind).
//!
//! Relies on `schema` to make it. Every node knows the cheapest value that it allows, so that an answer can always be ended.

use super::number::NumberSpec;

/// Lists and objects inside one another in an answer; serde_json reads 128.
pub const DEPTH_MAX: u32 = 64;
/// Bytes of the shortest value that a schema may ask for.
pub const SHORTEST_BYTES_MAX: u32 = 16 << 10;
/// Properties that an object may name.
pub const PROPERTIES_MAX: usize = 128;

/// What it takes to write the cheapest value: levels first, then bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    pub depth: u32,
    pub bytes: u32,
}

impl Cost {
    /// There is no value.
    pub const NEVER: Self = Self { depth: u32::MAX, bytes: u32::MAX };

    /// `self`, unless it is more than an answer may take.
    fn checked(self) -> Self {
        if self.depth > DEPTH_MAX || self.bytes > SHORTEST_BYTES_MAX { Self::NEVER } else { self }
    }

    /// Whether a value can stand inside `depth` lists and objects.
    pub fn fits(self, depth: u32) -> bool {
        depth.checked_add(self.depth).is_some_and(|d| d <= DEPTH_MAX)
    }
}

/// A property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Property {
    /// As JSON writes it, with the quote that ends it and without the one that begins it.
    pub text: Box<[u8]>,
    pub node: u32,
    pub required: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    /// Sorted by text.
    pub properties: Vec<Property>,
    /// Bit `i`: property `i` must be there.
    pub required: u128,
    /// What other properties may hold.
    pub additional: Option<u32>,
    /// Whether the schema itself forbids other properties.
    pub closed: bool,
    /// Properties in the order of the schema, as indices.
    pub order: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Array {
    pub first: Vec<u32>,
    pub rest: Option<u32>,
    pub min: u32,
    pub max: u32,
}

impl Array {
    /// What item `i` may be.
    pub fn item(&self, i: u32) -> Option<u32> {
        self.first.get(i as usize).copied().or(self.rest)
    }
}

/// Values of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    /// These texts, sorted.
    Literals(Vec<Box<[u8]>>),
    Number(NumberSpec),
    /// So many characters.
    String {
        min: u32,
        max: u32,
    },
    Array(Array),
    Object(Object),
}

#[derive(Debug, Clone)]
pub(super) struct Alternative {
    pub kind: Kind,
    pub cost: Cost,
}

/// Any of these alternatives.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub alternatives: Vec<u32>,
    pub cost: Cost,
    /// The one that costs so much.
    pub cheapest: u32,
}

/// A compiled schema.
#[derive(Debug)]
pub struct Grammar {
    pub(super) nodes: Vec<Node>,
    pub(super) alternatives: Vec<Alternative>,
    pub(super) root: u32,
    pub(super) warnings: Vec<String>,
}

impl Grammar {
    /// What of the schema is not enforced, one line each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Bytes of the shortest answer.
    pub fn shortest_bytes(&self) -> usize {
        self.nodes.get(self.root as usize).map_or(0, |n| n.cost.bytes as usize)
    }

    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    pub(super) fn kind(&self, id: u32) -> &Kind {
        &self.alternatives[id as usize].kind
    }

    /// Computes the costs of all nodes.
    pub(super) fn settle(&mut self) {
        // A value that nests `d` deep is known after `d` rounds more than a flat one.
        for _ in 0..=DEPTH_MAX + 1 {
            let mut changed = false;
            for i in 0..self.alternatives.len() {
                let cost = self.cost(&self.alternatives[i].kind).checked();
                changed |= std::mem::replace(&mut self.alternatives[i].cost, cost) != cost;
            }
            for node in &mut self.nodes {
                let cost = |&a: &u32| self.alternatives[a as usize].cost;
                let best = node.alternatives.iter().min_by_key(|a| cost(a)).copied();
                let cost = best.as_ref().map_or(Cost::NEVER, cost);
                changed |= cost != node.cost;
                (node.cost, node.cheapest) = (cost, best.unwrap_or(0));
            }
            if !changed {
                return;
            }
        }
    }

    fn cost(&self, kind: &Kind) -> Cost {
        let flat = |bytes: usize| Cost { depth: 0, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) };
        match kind {
            Kind::Literals(texts) => texts
                .iter()
                .map(|t| t.len())
                .min()
                .map_or(Cost::NEVER, |len| Cost { depth: literal_depth(texts, len), ..flat(len) }),
            Kind::Number(spec) => {
                let mut text = Vec::new();
                spec.shortest(&mut text);
                flat(text.len())
            }
            Kind::String { min, .. } => flat((*min as usize).saturating_add(2)),
            Kind::Array(a) => {
                let mut cost = Cost { depth: 1, bytes: 2 };
                for i in 0..a.min.min(a.first.len() as u32) {
                    cost = self.around(cost, a.item(i), 1, 1);
                }
                let rest = a.min.saturating_sub(a.first.len() as u32);
                if rest > 0 { self.around(cost, a.rest, 1, rest) } else { cost }
            }
            Kind::Object(o) => {
                let required = o.properties.iter().filter(|p| p.required);
                required.fold(Cost { depth: 1, bytes: 2 }, |cost, p| {
                    self.around(cost, Some(p.node), p.text.len() as u32 + 3, 1)
                })
            }
        }
    }

    /// `cost` of a list or object with `times` more of `node`, each with `extra` bytes.
    fn around(&self, cost: Cost, node: Option<u32>, extra: u32, times: u32) -> Cost {
        let inner = node.map_or(Cost::NEVER, |n| self.node(n).cost);
        if cost == Cost::NEVER || inner == Cost::NEVER {
            return Cost::NEVER;
        }
        let bytes = inner.bytes.saturating_add(extra).saturating_mul(times).saturating_add(cost.bytes);
        Cost { depth: cost.depth.max(inner.depth + 1), bytes }
    }

    /// Adds the cheapest value of `node` to `out`.
    pub(super) fn write_node(&self, node: u32, out: &mut Vec<u8>) {
        if self.node(node).cost != Cost::NEVER {
            self.write(self.kind(self.node(node).cheapest), out);
        }
    }

    fn write(&self, kind: &Kind, out: &mut Vec<u8>) {
        match kind {
            Kind::Literals(texts) => {
                if let Some(text) = texts.iter().min_by_key(|t| t.len()) {
                    out.extend_from_slice(text);
                }
            }
            Kind::Number(spec) => spec.shortest(out),
            Kind::String { min, .. } => {
                out.push(b'"');
                out.resize(out.len() + *min as usize, b'.');
                out.push(b'"');
            }
            Kind::Array(a) => {
                out.push(b'[');
                self.write_items(a, 0, out);
            }
            Kind::Object(o) => {
                out.push(b'{');
                self.write_properties(o, 0, false, out);
            }
        }
    }

    /// Adds the items that are still needed after `count`, and the bracket.
    pub(super) fn write_items(&self, a: &Array, count: u32, out: &mut Vec<u8>) {
        for i in count..a.min {
            if i > 0 {
                out.push(b',');
            }
            if let Some(node) = a.item(i) {
                self.write_node(node, out);
            }
        }
        out.push(b']');
    }

    /// Adds the required properties that are not in `seen`, each after a comma if `comma`, and the bracket.
    pub(super) fn write_properties(&self, o: &Object, seen: u128, comma: bool, out: &mut Vec<u8>) {
        let mut comma = comma;
        for &i in &o.order {
            let p = &o.properties[usize::from(i)];
            if !p.required || seen & (1 << i) != 0 {
                continue;
            }
            out.extend_from_slice(if comma { b",\"" } else { b"\"" });
            out.extend_from_slice(&p.text);
            out.push(b':');
            self.write_node(p.node, out);
            comma = true;
        }
        out.push(b'}');
    }
}

/// Levels of the deepest of `texts` of `len` bytes: brackets outside of strings.
fn literal_depth(texts: &[Box<[u8]>], len: usize) -> u32 {
    let depth = |text: &[u8]| {
        let (mut depth, mut most, mut quoted, mut escaped) = (0u32, 0, false, false);
        for &b in text {
            match b {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                b'[' | b'{' if !quoted => depth += 1,
                b']' | b'}' if !quoted => depth = depth.saturating_sub(1),
                _ => {}
            }
            most = most.max(depth);
        }
        most
    };
    texts.iter().filter(|t| t.len() == len).map(|t| depth(t)).max().unwrap_or(0)
}
