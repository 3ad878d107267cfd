//! Calls of tools in an answer: `<tool_call>` around either XML, as Qwen3.5 writes it, or one JSON object.
//!
//! Relies on the chat template to tell the model of the tools. What cannot be read as a call is left as text, never dropped.

use serde_json::{Map, Value};

/// What is around a call.
pub const OPEN: &str = "<tool_call>";
/// What ends it.
pub const CLOSE: &str = "</tool_call>";

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments by name, in the types that the tool's schema gives.
    pub arguments: Map<String, Value>,
}

/// The call in `text`, which stood between [`OPEN`] and [`CLOSE`].
pub fn parse(text: &str, tools: &[Value]) -> Option<ToolCall> {
    let text = text.trim();
    if text.starts_with('{') { parse_json(text) } else { parse_xml(text, tools) }
}

/// `{"name": ..., "arguments": {...}}`; the arguments may be a text that holds the object.
fn parse_json(text: &str) -> Option<ToolCall> {
    let call: Value = serde_json::from_str(text).ok()?;
    let name = call.get("name")?.as_str().filter(|n| !n.is_empty())?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(o)) => o.clone(),
        Some(Value::String(s)) => object(s)?,
        Some(_) => return None,
    };
    Some(ToolCall { name, arguments })
}

fn object(text: &str) -> Option<Map<String, Value>> {
    if let Ok(Value::Object(o)) = serde_json::from_str(text) { Some(o) } else { None }
}

/// `<function=NAME>`, for each argument `<parameter=KEY>`, a line break, its value, a line break, `</parameter>`, then
/// `</function>`.
fn parse_xml(text: &str, tools: &[Value]) -> Option<ToolCall> {
    let rest = text.strip_prefix("<function=")?;
    let (name, rest) = rest.split_once('>')?;
    let name = name.trim();
    if name.is_empty() {
        return None;
    }
    let schema = tools.iter().map(function).find(|f| f.get("name").and_then(Value::as_str) == Some(name));
    let properties = schema.and_then(|f| f.get("parameters")?.get("properties"));
    let mut arguments = Map::new();
    let mut rest = rest.trim_start();
    while let Some(parameter) = rest.strip_prefix("<parameter=") {
        let (key, after) = parameter.split_once('>')?;
        let (value, after) = value_of(after);
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(value, properties.and_then(|p| p.get(key))));
        rest = after.trim_start();
    }
    // Models forget the last tag now and then; anything else is no call.
    (rest.is_empty() || rest.trim_end() == "</function>").then(|| ToolCall { name: name.to_owned(), arguments })
}

/// A tool's function: it may stand alone, or in an object with a type.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

/// The value at the beginning of `text` without the line breaks around it, and what follows its end tag. The end tag is one
/// that another parameter or the end follows, for a value may speak of tags.
fn value_of(text: &str) -> (&str, &str) {
    const END: &str = "</parameter>";
    let follows = |at: usize| {
        let after = text[at + END.len()..].trim_start();
        after.is_empty() || after.starts_with("<parameter=") || after.starts_with("</function>")
    };
    let mut ends = text.match_indices(END).map(|(at, _)| at);
    let at = ends.clone().find(|&at| follows(at)).or_else(|| ends.next());
    let (value, after) = at.map_or((text, ""), |at| (&text[..at], &text[at + END.len()..]));
    let value = value.strip_prefix('\n').unwrap_or(value);
    (value.strip_suffix('\n').unwrap_or(value), after)
}

/// `text` as one of the types that `schema` names; as text if it is none of them, or if it may be text.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    let mut types = Vec::new();
    schema.into_iter().for_each(|s| types_of(s, 4, &mut types));
    let trimmed = text.trim();
    if types.contains(&"null") && matches!(trimmed, "null" | "None") {
        return Value::Null;
    }
    if types.contains(&"boolean") {
        match trimmed {
            "true" | "True" => return Value::Bool(true),
            "false" | "False" => return Value::Bool(false),
            _ => {}
        }
    }
    let parsed = serde_json::from_str(trimmed).ok().filter(|v| {
        types.iter().any(|t| match v {
            Value::Number(n) => *t == "number" || (*t == "integer" && (n.is_i64() || n.is_u64())),
            Value::Array(_) => *t == "array",
            Value::Object(_) => *t == "object",
            Value::String(_) | Value::Bool(_) | Value::Null => false,
        })
    });
    let whole = |n: f64| n.fract() == 0.0 && n.abs() < 9e15;
    match parsed {
        Some(v) => v,
        // 3.0 where an integer is asked for.
        None if types.contains(&"integer") && trimmed.parse().is_ok_and(whole) => {
            trimmed.parse().map_or_else(|_| Value::from(text), |n: f64| Value::from(n as i64))
        }
        // A text in quotes is not what the format says, but what is meant where only some are allowed.
        None => match schema.and_then(|s| s.get("enum")).and_then(Value::as_array) {
            Some(list) => list
                .iter()
                .find(|v| v.as_str() == Some(trimmed) || serde_json::from_str::<Value>(trimmed).is_ok_and(|x| x == **v))
                .cloned()
                .unwrap_or_else(|| Value::from(text)),
            None => Value::from(text),
        },
    }
}

/// Adds the types that `schema` names.
fn types_of<'s>(schema: &'s Value, levels: u32, types: &mut Vec<&'s str>) {
    match schema.get("type") {
        Some(Value::String(t)) => types.push(t),
        Some(Value::Array(list)) => types.extend(list.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for word in ["anyOf", "oneOf", "allOf"] {
        if let (Some(list), true) = (schema.get(word).and_then(Value::as_array), levels > 0) {
            list.iter().for_each(|s| types_of(s, levels - 1, types));
        }
    }
}

/// Makes the arguments of calls in `messages` objects, as templates want them: the OpenAI API writes them as text.
///
/// # Errors
/// If one is not a JSON object, with the message's number.
pub fn arguments_to_objects(messages: &mut [Value]) -> Result<(), String> {
    for (i, message) in messages.iter_mut().enumerate() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let call = if call.get("function").is_some() { &mut call["function"] } else { call };
            let Some(arguments) = call.get_mut("arguments") else { continue };
            *arguments = match arguments.take() {
                Value::String(s) if s.trim().is_empty() => Value::Object(Map::new()),
                Value::String(s) => Value::Object(object(&s).ok_or_else(|| {
                    let found: String = s.chars().take(80).collect();
                    format!("message {i}: found arguments {found:?} of a tool call, expected a JSON object")
                })?),
                Value::Null => Value::Object(Map::new()),
                other => other,
            };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": "light", "parameters": {"type": "object", "properties": {
            "room": {"type": "string"},
            "level": {"type": "integer"},
            "warm": {"type": ["boolean", "null"]},
            "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "mode": {"enum": ["on", "off", 3]},
        }}}})]
    }

    #[test]
    fn xml_values_have_the_types_of_the_schema() {
        let text = "\n<function=light>\n<parameter=room>\n12\n</parameter>\n<parameter=level>\n40\n</parameter>\n<parameter=warm>\n\
            True\n</parameter>\n<parameter=ratio>\nnull\n</parameter>\n<parameter=tags>\n[\"a\", \"b\"]\n</parameter>\n\
            <parameter=mode>\n3\n</parameter>\n<parameter=more>\nline 1\n\nline 3\n\n</parameter>\n</function>\n";
        let call = parse(text, &tools()).unwrap();
        assert_eq!(call.name, "light");
        let want = json!({"room": "12", "level": 40, "warm": true, "ratio": null, "tags": ["a", "b"], "mode": 3,
            "more": "line 1\n\nline 3\n"});
        assert_eq!(Value::Object(call.arguments), want);
        // What is not of its type stays as it was said.
        let text = "<function=light><parameter=level>\nhalf\n</parameter>\n</function>";
        assert_eq!(parse(text, &tools()).unwrap().arguments["level"], json!("half"));
        let text = "<function=light><parameter=level>\n3.0\n</parameter></function>";
        assert_eq!(parse(text, &tools()).unwrap().arguments["level"], json!(3));
    }

    #[test]
    fn a_value_may_speak_of_tags() {
        let text = "<function=say>\n<parameter=text>\nuse </parameter> to end\n</parameter>\n</function>";
        assert_eq!(parse(text, &[]).unwrap().arguments["text"], json!("use </parameter> to end"));
    }

    #[test]
    fn json_calls_are_read_and_others_refused() {
        let call = parse("\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n", &[]).unwrap();
        assert_eq!((call.name.as_str(), &call.arguments["a"]), ("f", &json!(1)));
        let call = parse("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1.5}\"}", &[]).unwrap();
        assert_eq!(call.arguments["a"], json!(1.5));
        assert!(parse("{\"name\": \"f\"}", &[]).unwrap().arguments.is_empty());
        for text in [
            "",
            "{}",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "<function=>",
            "<function=f",
            "f(1)",
            "<function=f>x</function>",
            "<function=f><parameter=a",
        ] {
            assert_eq!(parse(text, &[]), None, "{text}");
        }
    }

    #[test]
    fn arguments_become_objects() {
        let mut m = [
            json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}, {"name": "g", "arguments": ""}]}),
        ];
        arguments_to_objects(&mut m).unwrap();
        assert_eq!(
            m[0]["tool_calls"],
            json!([{"function": {"name": "f", "arguments": {"a": 1}}}, {"name": "g", "arguments": {}}])
        );
        m[0]["tool_calls"][0]["function"]["arguments"] = json!("[1]");
        assert!(arguments_to_objects(&mut m).unwrap_err().starts_with("message 0: found arguments \"[1]\""));
    }
}
