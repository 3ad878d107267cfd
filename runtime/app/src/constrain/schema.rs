//! JSON Schema to a [`Grammar`]: the part of it that clients use. What cannot be enforced is listed, what would change the
//! shape of an answer and is not supported is refused, with its path.
//!
//! Schemas come from strangers: nodes, nesting, alternatives and texts are bounded. Never reads anything but the schema.

use super::grammar::{
    Alternative, Array, Cost, DEPTH_MAX, Grammar, Kind, Node, Object, PROPERTIES_MAX, Property, SHORTEST_BYTES_MAX,
};
use super::number::{Bound, NumberSpec};
use super::overlap::{PAIRS_MAX, may_overlap};
use super::words::{
    ANNOTATIONS, LOOSE, OF_ARRAYS, OF_NUMBERS, OF_OBJECTS, OF_STRINGS, REFUSED, TYPES, count, head, is_type, line,
    property_text, short, within, wrong,
};
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};

/// Schemas inside one another.
const NESTING_MAX: usize = 64;
/// Schemas in all.
const NODES_MAX: usize = 4096;
/// Alternatives of one value, of all together, and steps to find them.
const ALTERNATIVES_MAX: usize = 256;
const ALTERNATIVES_ALL_MAX: usize = 1 << 16;
const STEPS_MAX: usize = 1 << 20;
/// Values of all enumerations, and their bytes.
const LITERALS_MAX: usize = 8192;
const LITERAL_BYTES_MAX: usize = 256 << 10;

/// A schema that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("schema at {path}: found {found}, expected {expected}")]
pub struct SchemaError {
    /// JSON pointer.
    pub path: String,
    /// What is there.
    pub found: String,
    /// What could be.
    pub expected: String,
}

enum Part {
    Alternative(u32),
    Node(u32),
}

impl Grammar {
    /// The grammar of the answers that follow `schema`.
    ///
    /// # Errors
    /// If it is not a schema, uses what is not supported, is too large, or no answer can follow it.
    pub fn from_schema(schema: &Value) -> Result<Self, SchemaError> {
        let mut c = Compiler::new(schema);
        let root = c.node(schema, "#", 0)?;
        c.finish(root)
    }

    /// Any JSON object.
    pub fn any_object() -> Self {
        let schema = serde_json::json!({ "type": "object" });
        Self::from_schema(&schema).unwrap_or_else(|e| unreachable!("{e}"))
    }
}

struct Compiler<'v> {
    root: &'v Value,
    nodes: Vec<Vec<Part>>,
    alternatives: Vec<Kind>,
    refs: HashMap<String, u32>,
    any: Option<u32>,
    literals: usize,
    literal_bytes: usize,
    /// Alternatives of which one alone may hold.
    exclusive: Vec<(Vec<u32>, String)>,
    warnings: BTreeSet<String>,
}

impl<'v> Compiler<'v> {
    fn new(root: &'v Value) -> Self {
        Self {
            root,
            nodes: Vec::new(),
            alternatives: Vec::new(),
            refs: HashMap::new(),
            any: None,
            literals: 0,
            literal_bytes: 0,
            exclusive: Vec::new(),
            warnings: BTreeSet::new(),
        }
    }

    fn empty(&mut self, path: &str) -> Result<u32, SchemaError> {
        if self.nodes.len() == NODES_MAX {
            return Err(wrong(path, format!("over {NODES_MAX} schemas in all"), "fewer"));
        }
        self.nodes.push(Vec::new());
        Ok(self.nodes.len() as u32 - 1)
    }

    fn node(&mut self, schema: &'v Value, path: &str, nesting: usize) -> Result<u32, SchemaError> {
        let id = self.empty(path)?;
        self.fill(id, schema, path, nesting)?;
        Ok(id)
    }

    fn fill(&mut self, id: u32, schema: &'v Value, path: &str, nesting: usize) -> Result<(), SchemaError> {
        if nesting > NESTING_MAX {
            return Err(wrong(path, format!("schemas nested over {NESTING_MAX} deep"), "fewer levels, or $ref"));
        }
        self.nodes[id as usize] = match schema {
            Value::Bool(true) => vec![Part::Node(self.any(path)?)],
            Value::Bool(false) => Vec::new(),
            Value::Object(o) => self.object_schema(o, path, nesting)?,
            other => return Err(wrong(path, short(other), "a schema: an object, true or false")),
        };
        Ok(())
    }

    fn object_schema(
        &mut self,
        o: &'v Map<String, Value>,
        path: &str,
        nesting: usize,
    ) -> Result<Vec<Part>, SchemaError> {
        self.check_words(o, path)?;
        let shaping = |but: &[&str]| {
            let shapes = |k: &&String| {
                let k = k.as_str();
                let all = [
                    &OF_OBJECTS[..],
                    &OF_ARRAYS,
                    &OF_STRINGS,
                    &OF_NUMBERS,
                    &["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"],
                ];
                !but.contains(&k) && all.iter().any(|list| list.contains(&k))
            };
            o.keys().find(shapes).map(String::as_str)
        };
        let alone = |word: &str| match shaping(&[word]) {
            Some(other) => {
                let remedy = format!("one of them: move {other:?} into what {word:?} names");
                Err(wrong(path, format!("{other:?} beside {word:?}"), &remedy))
            }
            None => Ok(()),
        };
        if let Some(target) = o.get("$ref") {
            alone("$ref")?;
            return Ok(vec![Part::Node(self.reference(target, path, nesting)?)]);
        }
        for word in ["anyOf", "oneOf", "allOf"] {
            let Some(list) = o.get(word) else { continue };
            alone(word)?;
            let at = format!("{path}/{word}");
            let list = list
                .as_array()
                .filter(|l| !l.is_empty())
                .ok_or_else(|| wrong(&at, short(list), "a list of schemas"))?;
            if list.len() > ALTERNATIVES_MAX {
                return Err(wrong(&at, format!("{} schemas", list.len()), &format!("at most {ALTERNATIVES_MAX}")));
            }
            if word == "allOf" && list.len() > 1 {
                return Err(wrong(&at, format!("{} schemas", list.len()), "one: merge them"));
            }
            let mut nodes = Vec::new();
            for (i, schema) in list.iter().enumerate() {
                nodes.push(self.node(schema, &format!("{at}/{i}"), nesting + 1)?);
            }
            if word == "oneOf" {
                self.exclusive.push((nodes.clone(), at));
            }
            return Ok(nodes.into_iter().map(Part::Node).collect());
        }
        let types = self.types(o, path)?;
        if o.contains_key("const") || o.contains_key("enum") {
            return self.literals_of(o, types.as_deref(), path);
        }
        let Some(types) = types else { return Ok(vec![Part::Node(self.any(path)?)]) };
        let mut parts = Vec::new();
        for t in types {
            let kind = match t {
                "null" => Kind::Literals(vec![(*b"null").into()]),
                "boolean" => Kind::Literals(vec![(*b"false").into(), (*b"true").into()]),
                "string" => self.string(o, path)?,
                "array" => self.array(o, path, nesting)?,
                "object" => self.object(o, path, nesting)?,
                number => self.number(o, number == "integer", path)?,
            };
            parts.push(self.alternative(kind));
        }
        Ok(parts)
    }

    fn check_words(&mut self, o: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
        for (word, value) in o {
            let word = word.as_str();
            if let Some((_, instead)) = REFUSED.iter().find(|(w, _)| *w == word) {
                return Err(wrong(
                    path,
                    format!("{word:?}, which is not supported"),
                    &format!("another word: {instead}"),
                ));
            }
            if LOOSE.contains(&word) {
                if *value != Value::Bool(false) {
                    self.warnings.insert(format!("{}: {word:?} is not enforced", line(path)));
                }
                continue;
            }
            let known = [
                &ANNOTATIONS[..],
                &OF_OBJECTS,
                &OF_ARRAYS,
                &OF_STRINGS,
                &OF_NUMBERS,
                &["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"],
            ];
            if !known.iter().any(|list| list.contains(&word)) {
                self.warnings.insert(format!("{}: {:?} is not known and ignored", line(path), head(word)));
            }
        }
        Ok(())
    }

    fn reference(&mut self, target: &'v Value, path: &str, nesting: usize) -> Result<u32, SchemaError> {
        let at = format!("{path}/$ref");
        let inside = "a $ref inside of the schema, such as #/$defs/NAME";
        let Some(pointer) = target.as_str().and_then(|t| t.strip_prefix('#')) else {
            return Err(wrong(&at, short(target), inside));
        };
        if let Some(&id) = self.refs.get(pointer) {
            return Ok(id);
        }
        let schema = self.root.pointer(pointer).ok_or_else(|| wrong(&at, short(target), inside))?;
        let id = self.empty(path)?;
        // Known before it is filled, so that a cycle ends here.
        self.refs.insert(pointer.to_owned(), id);
        self.fill(id, schema, &format!("#{pointer}"), nesting + 1)?;
        Ok(id)
    }

    /// The types that are named or meant; `None` if any will do.
    fn types(&self, o: &'v Map<String, Value>, path: &str) -> Result<Option<Vec<&'v str>>, SchemaError> {
        let at = format!("{path}/type");
        let known = |v: &'v Value| {
            let t = v.as_str().filter(|t| TYPES.contains(t));
            t.ok_or_else(|| wrong(&at, short(v), &format!("one of {}", TYPES.join(", "))))
        };
        match o.get("type") {
            Some(Value::Array(list)) if !list.is_empty() => {
                let mut types = Vec::new();
                for t in list {
                    let t = known(t)?;
                    if !types.contains(&t) {
                        types.push(t);
                    }
                }
                Ok(Some(types))
            }
            Some(v) => Ok(Some(vec![known(v)?])),
            None => {
                let meant = [
                    (&OF_OBJECTS[..], "object"),
                    (&OF_ARRAYS, "array"),
                    (&OF_STRINGS, "string"),
                    (&OF_NUMBERS, "number"),
                ];
                let meant = meant.iter().filter(|(words, _)| words.iter().any(|w| o.contains_key(*w)));
                Ok(Some(meant.map(|(_, t)| *t).collect::<Vec<_>>()).filter(|t| !t.is_empty()))
            }
        }
    }

    fn literals_of(
        &mut self,
        o: &'v Map<String, Value>,
        types: Option<&[&str]>,
        path: &str,
    ) -> Result<Vec<Part>, SchemaError> {
        let one = o.get("const").map(std::slice::from_ref);
        let list = match o.get("enum") {
            None => one.unwrap_or_default(),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(wrong(&format!("{path}/enum"), short(other), "a list of values")),
        };
        let bounds = self.bounds(o, path)?;
        let (min, max) = (count(o, "minLength", path)?.unwrap_or(0), count(o, "maxLength", path)?.unwrap_or(u32::MAX));
        let mut texts = BTreeSet::new();
        for value in list {
            if one.is_some_and(|c| c[0] != *value) || types.is_some_and(|t| !t.iter().any(|t| is_type(value, t))) {
                continue;
            }
            let fits = match value {
                Value::Number(n) => bounds.iter().flatten().all(|(b, lower)| within(n, b, *lower)),
                Value::String(s) => (u64::from(min)..=u64::from(max)).contains(&(s.chars().count() as u64)),
                _ => true,
            };
            if fits {
                let text = value.to_string();
                self.literals += 1;
                self.literal_bytes += text.len();
                texts.insert(text.into_bytes().into_boxed_slice());
            }
        }
        if self.literals > LITERALS_MAX || self.literal_bytes > LITERAL_BYTES_MAX {
            let found = format!("over {LITERALS_MAX} values or {LITERAL_BYTES_MAX} bytes in all enumerations");
            return Err(wrong(path, found, "fewer values: a string, checked afterwards"));
        }
        if texts.is_empty() {
            return Err(wrong(path, "no value that fits its type and bounds".into(), "at least one"));
        }
        Ok(vec![self.alternative(Kind::Literals(texts.into_iter().collect()))])
    }

    fn string(&self, o: &Map<String, Value>, path: &str) -> Result<Kind, SchemaError> {
        let (min, max) = (count(o, "minLength", path)?.unwrap_or(0), count(o, "maxLength", path)?.unwrap_or(u32::MAX));
        if min > max {
            return Err(wrong(path, format!("minLength {min}, maxLength {max}"), "no more than that"));
        }
        Ok(Kind::String { min, max })
    }

    /// Lower and upper bound of a number; `true` with the lower one.
    fn bounds(&self, o: &Map<String, Value>, path: &str) -> Result<[Option<(Bound, bool)>; 2], SchemaError> {
        let number = |key: &str| match o.get(key) {
            None | Some(Value::Bool(_)) if key.starts_with("exclusive") => Ok(None),
            None => Ok(None),
            Some(Value::Number(n)) => Ok(Some(n)),
            Some(v) => Err(wrong(&format!("{path}/{key}"), short(v), "a number")),
        };
        let side = |plain: &str, strict: &str, lower: bool| {
            let (a, b) = (number(plain)?, number(strict)?);
            let bound = |n: &serde_json::Number, exclusive| (Bound { text: n.to_string(), exclusive }, lower);
            // Draft 4 writes `exclusiveMinimum: true` beside `minimum`.
            let flag = o.get(strict) == Some(&Value::Bool(true));
            Ok(match (a, b) {
                (Some(a), Some(b)) => {
                    let (x, y) = (a.as_f64().unwrap_or(0.0), b.as_f64().unwrap_or(0.0));
                    Some(if (lower && y >= x) || (!lower && y <= x) { bound(b, true) } else { bound(a, false) })
                }
                (Some(a), None) => Some(bound(a, flag)),
                (None, b) => b.map(|b| bound(b, true)),
            })
        };
        Ok([side("minimum", "exclusiveMinimum", true)?, side("maximum", "exclusiveMaximum", false)?])
    }

    fn number(&self, o: &Map<String, Value>, integer: bool, path: &str) -> Result<Kind, SchemaError> {
        let [lo, hi] = self.bounds(o, path)?;
        let bound = |b: &Option<(Bound, bool)>| b.as_ref().map(|(b, _)| b.clone());
        let spec = NumberSpec::new(integer, bound(&lo).as_ref(), bound(&hi).as_ref());
        let expected =
            if integer { "bounds with a whole number between them" } else { "bounds with a number between them" };
        spec.map(Kind::Number).map_err(|found| wrong(path, found, expected))
    }

    fn array(&mut self, o: &'v Map<String, Value>, path: &str, nesting: usize) -> Result<Kind, SchemaError> {
        let min = count(o, "minItems", path)?.unwrap_or(0);
        let max = count(o, "maxItems", path)?.unwrap_or(u32::MAX);
        // A list in `items` is how older drafts write `prefixItems` and `items`.
        let (prefix, rest) = match (o.get("prefixItems"), o.get("items")) {
            (None, Some(Value::Array(list))) => (Some((list, "items")), o.get("additionalItems")),
            (None, rest) => (None, rest),
            (Some(Value::Array(list)), rest) => (Some((list, "prefixItems")), rest),
            (Some(other), _) => return Err(wrong(&format!("{path}/prefixItems"), short(other), "a list of schemas")),
        };
        let mut first = Vec::new();
        if let Some((list, word)) = prefix {
            for (i, schema) in list.iter().enumerate() {
                first.push(self.node(schema, &format!("{path}/{word}/{i}"), nesting + 1)?);
            }
        }
        let rest = match rest {
            None | Some(Value::Bool(true)) => Some(self.any(path)?),
            Some(Value::Bool(false)) => None,
            Some(schema) => Some(self.node(schema, &format!("{path}/items"), nesting + 1)?),
        };
        let most = if rest.is_some() { max } else { max.min(first.len() as u32) };
        if min > most {
            return Err(wrong(path, format!("at least {min} and at most {most} items"), "no more than that"));
        }
        Ok(Kind::Array(Array { first, rest, min, max: most }))
    }

    fn object(&mut self, o: &'v Map<String, Value>, path: &str, nesting: usize) -> Result<Kind, SchemaError> {
        let at = |word: &str| format!("{path}/{word}");
        let named = match o.get("properties") {
            None => None,
            Some(Value::Object(named)) => Some(named),
            Some(other) => return Err(wrong(&at("properties"), short(other), "an object of schemas")),
        };
        let additional = match o.get("additionalProperties") {
            // As other servers read it: names that are listed are meant to be all.
            None if named.is_some_and(|n| !n.is_empty()) => None,
            Some(Value::Bool(false)) => None,
            None | Some(Value::Bool(true)) => Some(self.any(path)?),
            Some(schema) => Some(self.node(schema, &at("additionalProperties"), nesting + 1)?),
        };
        let mut properties: Vec<Property> = Vec::new();
        for (name, schema) in named.into_iter().flatten() {
            let place = format!("{path}/properties/{}", head(name).replace('~', "~0").replace('/', "~1"));
            let node = self.node(schema, &place, nesting + 1)?;
            properties.push(Property { text: property_text(name), node, required: false });
        }
        let required = match o.get("required") {
            None | Some(Value::Bool(_)) => &[][..],
            Some(Value::Array(list)) => list,
            Some(other) => return Err(wrong(&at("required"), short(other), "a list of names")),
        };
        let closed = o.get("additionalProperties") == Some(&Value::Bool(false));
        let mut places: HashMap<Box<[u8]>, usize> =
            properties.iter().enumerate().map(|(i, p)| (p.text.clone(), i)).collect();
        for name in required {
            let text = name.as_str().map(property_text).ok_or_else(|| wrong(&at("required"), short(name), "a name"))?;
            if let Some(&i) = places.get(&text) {
                properties[i].required = true;
                continue;
            }
            let node = if closed { None } else { additional.or(Some(self.any(path)?)) };
            let node = node.ok_or_else(|| wrong(&at("required"), short(name), "the name of one of the properties"))?;
            places.insert(text.clone(), properties.len());
            properties.push(Property { text, node, required: true });
        }
        if properties.len() > PROPERTIES_MAX {
            let found = format!("{} properties", properties.len());
            return Err(wrong(path, found, &format!("at most {PROPERTIES_MAX} in an object: nest them")));
        }
        let mut sorted: Vec<(usize, Property)> = properties.into_iter().enumerate().collect();
        sorted.sort_by(|a, b| a.1.text.cmp(&b.1.text));
        let mut order: Vec<u8> = (0..sorted.len() as u8).collect();
        order.sort_by_key(|&i| sorted[usize::from(i)].0);
        let properties: Vec<Property> = sorted.into_iter().map(|(_, p)| p).collect();
        let required =
            properties.iter().enumerate().filter(|(_, p)| p.required).fold(0u128, |set, (i, _)| set | 1 << i);
        Ok(Kind::Object(Object { properties, required, additional, closed, order }))
    }

    /// Any value at all.
    fn any(&mut self, path: &str) -> Result<u32, SchemaError> {
        if let Some(id) = self.any {
            return Ok(id);
        }
        let id = self.empty(path)?;
        self.any = Some(id);
        let words: [&[u8]; 3] = [b"false", b"null", b"true"];
        let number = NumberSpec::new(false, None, None).map_err(|found| wrong(path, found, "numbers"))?;
        let object =
            Object { properties: Vec::new(), required: 0, additional: Some(id), closed: false, order: Vec::new() };
        let kinds = [
            Kind::Literals(words.iter().map(|&w| w.into()).collect()),
            Kind::Number(number),
            Kind::String { min: 0, max: u32::MAX },
            Kind::Array(Array { first: Vec::new(), rest: Some(id), min: 0, max: u32::MAX }),
            Kind::Object(object),
        ];
        let parts = kinds.into_iter().map(|k| self.alternative(k)).collect();
        self.nodes[id as usize] = parts;
        Ok(id)
    }

    fn alternative(&mut self, kind: Kind) -> Part {
        // The same strings and numbers again need no branches of their own.
        let same = if matches!(kind, Kind::String { .. } | Kind::Number(_)) {
            self.alternatives.iter().position(|k| *k == kind)
        } else {
            None
        };
        Part::Alternative(same.unwrap_or_else(|| {
            self.alternatives.push(kind);
            self.alternatives.len() - 1
        }) as u32)
    }

    /// Resolves nodes of nodes, computes costs and checks what must hold of all.
    fn finish(self, root: u32) -> Result<Grammar, SchemaError> {
        let mut nodes = Vec::new();
        let (mut steps, mut all) = (0, 0);
        let mut visited = vec![u32::MAX; self.nodes.len()];
        for id in 0..self.nodes.len() as u32 {
            let mut found = Vec::new();
            let mut open = vec![id];
            while let Some(n) = open.pop() {
                if std::mem::replace(&mut visited[n as usize], id) == id {
                    continue;
                }
                // Reversed, so that the first is taken first.
                for part in self.nodes[n as usize].iter().rev() {
                    steps += 1;
                    match part {
                        Part::Alternative(a) if !found.contains(a) => found.push(*a),
                        Part::Alternative(_) => {}
                        Part::Node(n) => open.push(*n),
                    }
                }
                if found.len() > ALTERNATIVES_MAX || all + found.len() > ALTERNATIVES_ALL_MAX || steps > STEPS_MAX {
                    let expected = format!("at most {ALTERNATIVES_MAX}: fewer levels of anyOf");
                    return Err(wrong("#", "a value with too many alternatives".into(), &expected));
                }
            }
            all += found.len();
            found.sort_unstable();
            found.shrink_to_fit();
            nodes.push(Node { alternatives: found, cost: Cost::NEVER, cheapest: 0 });
        }
        let alternatives = self.alternatives.into_iter().map(|kind| Alternative { kind, cost: Cost::NEVER }).collect();
        let mut grammar = Grammar { nodes, alternatives, root, warnings: self.warnings.into_iter().collect() };
        grammar.settle();
        if grammar.node(root).cost == Cost::NEVER {
            let found = format!(
                "no answer that follows it within {DEPTH_MAX} levels, its shortest form within {SHORTEST_BYTES_MAX} bytes"
            );
            return Err(wrong("#", found, "a schema that ends: make a property optional, or ask for less"));
        }
        let mut pairs = PAIRS_MAX;
        for (list, path) in &self.exclusive {
            for (i, &a) in list.iter().enumerate() {
                for (j, &b) in list.iter().enumerate().skip(i + 1) {
                    if may_overlap(&grammar, a, b, &mut pairs) {
                        let found = format!("alternatives {i} and {j}, which may both hold");
                        return Err(wrong(path, found, "only one to hold, or anyOf"));
                    }
                }
            }
        }
        Ok(grammar)
    }
}
