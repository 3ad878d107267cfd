//! The words of JSON Schema, which of them are followed, and small helpers to read them.

use super::number::Bound;
use super::schema::SchemaError;
use serde_json::{Map, Value};

/// Characters and items that can be counted.
const COUNT_MAX: u32 = 1 << 30;

/// Words that say nothing about the shape.
pub(super) const ANNOTATIONS: [&str; 17] = [
    "title",
    "description",
    "default",
    "examples",
    "example",
    "$schema",
    "$id",
    "id",
    "$comment",
    "$anchor",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$defs",
    "definitions",
    "name",
    "strict",
];
/// Words that are known, and not enforced.
pub(super) const LOOSE: [&str; 8] = [
    "format",
    "pattern",
    "multipleOf",
    "uniqueItems",
    "minProperties",
    "maxProperties",
    "contentEncoding",
    "contentMediaType",
];
/// Words that change the shape and are not supported, and what to do instead.
pub(super) const REFUSED: [(&str, &str); 17] = [
    ("not", "say what is allowed instead"),
    ("if", "anyOf"),
    ("then", "anyOf"),
    ("else", "anyOf"),
    ("patternProperties", "properties or additionalProperties"),
    ("propertyNames", "properties"),
    ("dependentSchemas", "anyOf"),
    ("dependentRequired", "anyOf"),
    ("dependencies", "anyOf"),
    ("contains", "items or prefixItems"),
    ("minContains", "items or prefixItems"),
    ("maxContains", "items or prefixItems"),
    ("unevaluatedProperties", "additionalProperties"),
    ("unevaluatedItems", "items"),
    ("$dynamicRef", "$ref"),
    ("$recursiveRef", "$ref"),
    ("disallow", "say what is allowed instead"),
];
/// Words about values of a kind, which is meant where no type is given.
pub(super) const OF_OBJECTS: [&str; 3] = ["properties", "required", "additionalProperties"];
pub(super) const OF_ARRAYS: [&str; 5] = ["items", "prefixItems", "additionalItems", "minItems", "maxItems"];
pub(super) const OF_STRINGS: [&str; 2] = ["minLength", "maxLength"];
pub(super) const OF_NUMBERS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
pub(super) const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "integer", "string"];

pub(super) fn wrong(path: &str, found: String, expected: &str) -> SchemaError {
    SchemaError { path: line(path), found, expected: expected.to_owned() }
}

/// What a schema says, in a message: it may be long, with line breaks in it.
pub(super) fn line(path: &str) -> String {
    head(path).replace(char::is_control, "\u{FFFD}")
}

/// At most the first 200 characters.
pub(super) fn head(text: &str) -> &str {
    text.char_indices().nth(200).map_or(text, |(at, _)| &text[..at])
}

/// A value in an error.
pub(super) fn short(v: &Value) -> String {
    match v {
        Value::Object(_) => "an object".into(),
        Value::Array(a) => format!("a list of {}", a.len()),
        other => line(&other.to_string()),
    }
}

/// The text of a property without its first quote.
pub(super) fn property_text(name: &str) -> Box<[u8]> {
    Value::from(name).to_string().as_bytes()[1..].into()
}

pub(super) fn count(o: &Map<String, Value>, key: &str, path: &str) -> Result<Option<u32>, SchemaError> {
    let Some(v) = o.get(key) else { return Ok(None) };
    let n = v.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0);
    let n = n.ok_or_else(|| wrong(&format!("{path}/{key}"), short(v), "a whole number of at least 0"))?;
    Ok(Some(if n >= f64::from(COUNT_MAX) { u32::MAX } else { n as u32 }))
}

pub(super) fn is_type(value: &Value, t: &str) -> bool {
    match value {
        Value::Null => t == "null",
        Value::Bool(_) => t == "boolean",
        Value::String(_) => t == "string",
        Value::Array(_) => t == "array",
        Value::Object(_) => t == "object",
        Value::Number(n) => t == "number" || (t == "integer" && n.as_f64().is_some_and(|n| n.fract() == 0.0)),
    }
}

pub(super) fn within(n: &serde_json::Number, bound: &Bound, lower: bool) -> bool {
    let (Some(n), Ok(b)) = (n.as_f64(), bound.text.parse::<f64>()) else { return false };
    let (a, b) = if lower { (b, n) } else { (n, b) };
    if bound.exclusive { a < b } else { a <= b }
}
