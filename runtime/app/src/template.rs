//! The model's chat template: a conversation to the text of a prompt, as transformers' `apply_chat_template` renders it.
//!
//! Relies on minijinja with Python's string methods. A template comes with the model file and is not trusted: work and
//! memory are bounded, it reads no file and no clock, and it sees only the conversation.

use forerun_format::{FormatError, gguf::Header, keys};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde, ValueKind},
};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// Steps that rendering may take; a step is an instruction or 64 bytes of text, so this bounds memory to about 20 MiB.
const FUEL: u64 = 300_000;
/// Longest template: four times the longest published one of this family. A chain such as `1+1+1` or `a.b.c` nests one
/// level for each link, and minijinja's compiler and destructors walk the levels by recursion without a limit.
const SOURCE_BYTES_MAX: usize = 32 << 10;
/// Address space for the stack of compiling and rendering; memory is taken only as far as it is used. That is 4 KiB for each
/// byte of a template, and for each list inside another that [`FUEL`] allows.
const STACK_BYTES: usize = 128 << 20;
/// Macro calls inside one another; each takes a few KiB of stack.
const DEPTH_MAX: usize = 64;
/// Lists and objects inside one another in JSON: what serde_json reads.
const JSON_DEPTH_MAX: usize = 128;
const NAME: &str = "chat";

/// A template that cannot be used, or refused a conversation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The model file has none.
    #[error(transparent)]
    File(#[from] FormatError),
    /// The template is wrong, or raised an exception about the conversation.
    #[error("chat template, line {line}: {message}")]
    Template {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// What is wrong, for example the text the template gave to `raise_exception`.
        message: String,
    },
    /// There is no thread to work on.
    #[error("the chat template cannot be used: thread: {0}")]
    Thread(String),
}

impl From<Error> for TemplateError {
    fn from(e: Error) -> Self {
        let message = match (e.kind(), e.detail()) {
            (ErrorKind::OutOfFuel, _) => {
                format!("found no end after {FUEL} steps, expected fewer: shorten the conversation")
            }
            (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        Self::Template { line: e.line().unwrap_or(0), message }
    }
}

/// What a template gets to see.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conversation<'a> {
    /// Messages with `role`, `content` and so on, in the form of the OpenAI API.
    pub messages: &'a [serde_json::Value],
    /// Tools the model may call; none if empty.
    pub tools: &'a [serde_json::Value],
    /// Think before answering; `None` leaves the choice to the template.
    pub enable_thinking: Option<bool>,
    /// End with the beginning of an answer.
    pub add_generation_prompt: bool,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
}

impl Template {
    /// Compiles the template in a model file.
    ///
    /// # Errors
    /// If the file has none, or it is not valid.
    pub fn from_header(header: &Header<'_>) -> Result<Self, TemplateError> {
        let source = header.str_opt(keys::CHAT_TEMPLATE)?;
        Self::new(source.ok_or_else(|| FormatError::MissingKey(keys::CHAT_TEMPLATE.into()))?)
    }

    /// Compiles `source`.
    ///
    /// # Errors
    /// If it is not valid, or absurdly long.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(FormatError::invalid(
                format!("key {}", keys::CHAT_TEMPLATE),
                format!("{} bytes", source.len()),
                format!("at most {SOURCE_BYTES_MAX}"),
            )
            .into());
        }
        let mut env = Environment::new();
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_fuel(Some(FUEL));
        env.set_recursion_limit(DEPTH_MAX);
        env.set_unknown_method_callback(|state, value, method, args| match method {
            // Pads to any width before it is charged for.
            "format" => Err(Error::from(ErrorKind::UnknownMethod)),
            _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
        });
        env.remove_filter("format");
        env.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_filter("tojson", to_json);
        with_large_stack(move || {
            env.add_template_owned(NAME, source.to_owned())?;
            Ok(Self { env })
        })
    }

    /// The prompt's text for `conversation`.
    ///
    /// # Errors
    /// If the template refuses the conversation or does not end.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        let mut vars = vec![
            ("messages", Value::from(Serde(conversation.messages))),
            ("tools", Value::from(())),
            ("add_generation_prompt", Value::from(conversation.add_generation_prompt)),
        ];
        if !conversation.tools.is_empty() {
            vars[1].1 = Value::from(Serde(conversation.tools));
        }
        if let Some(thinking) = conversation.enable_thinking {
            vars.push(("enable_thinking", Value::from(thinking)));
        }
        let template = self.env.get_template(NAME)?;
        with_large_stack(|| Ok(template.render(Value::from_pairs(vars))?))
    }
}

/// Calls `f` on a thread with [`STACK_BYTES`] of stack: what is nested as deep as the limits allow is walked and freed by
/// recursion, and a thread's usual 2 MiB, or the main thread's 8, would overflow.
fn with_large_stack<R: Send>(f: impl FnOnce() -> Result<R, TemplateError> + Send) -> Result<R, TemplateError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, f);
        let thread = thread.map_err(|e| TemplateError::Thread(e.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(TemplateError::Thread("it panicked".into())))
    })
}

/// `tojson` as transformers defines it: Python's `json.dumps` with `ensure_ascii=False` and no escapes for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    if value.kind() == ValueKind::Undefined {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of a value that is not there"));
    }
    let style = PythonJson {
        indent: options.get::<Option<usize>>("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        depth: 0,
        has_value: false,
    };
    options.assert_all_used()?;
    let mut out = Vec::new();
    let wrong = |e: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, e.to_string());
    value.serialize(&mut Serializer::with_formatter(&mut out, style)).map_err(|e| wrong(&e))?;
    Ok(Value::from_safe_string(String::from_utf8(out).map_err(|e| wrong(&e))?))
}

/// Spaces and numbers of Python's `json.dumps`.
struct PythonJson {
    indent: Option<usize>,
    ensure_ascii: bool,
    depth: usize,
    has_value: bool,
}

impl PythonJson {
    fn open<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        if self.depth > JSON_DEPTH_MAX {
            return Err(io::Error::other(format!("JSON nested over {JSON_DEPTH_MAX} deep")));
        }
        w.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        match (first, self.indent) {
            (true, None) => Ok(()),
            (false, None) => w.write_all(b", "),
            (true, Some(_)) => self.line(w),
            (false, Some(_)) => {
                w.write_all(b",")?;
                self.line(w)
            }
        }
    }

    fn line<W: ?Sized + Write>(&self, w: &mut W) -> io::Result<()> {
        let spaces = self.indent.unwrap_or(0).min(64) * self.depth;
        write!(w, "\n{:spaces$}", "")
    }

    fn close<W: ?Sized + Write>(&mut self, w: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value && self.indent.is_some() {
            self.line(w)?;
        }
        self.has_value = true;
        w.write_all(bracket)
    }
}

impl Formatter for PythonJson {
    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    /// Rust and Python agree on the digits and on when to use an exponent, not on how to write it: `1e16`, `1e+16`.
    fn write_f64<W: ?Sized + Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:?}");
        match text.split_once('e') {
            None => w.write_all(text.as_bytes()),
            Some((digits, exponent)) => {
                let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
                write!(w, "{digits}e{sign}{exponent:0>2}")
            }
        }
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, w: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return w.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            match c {
                ' '..='~' => w.write_all(&[c as u8])?,
                _ => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|u| write!(w, "\\u{u:04x}"))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, message: serde_json::Value) -> Result<String, TemplateError> {
        Template::new(source)?.render(&Conversation { messages: &[message], ..Conversation::default() })
    }

    /// Expected text is what `json.dumps(x, ensure_ascii=False)` of Python 3 prints.
    #[test]
    fn json_is_written_as_python_does() {
        let x = json!({"b": [1, -2.0, 1e16, 1.5e-7, 1e15, 0.0001, 1e300], "a": {}, "c": [], "d": null, "e": true,
            "f": "<'é\"\\\n\u{1f}\u{7f}😀>"});
        assert_eq!(
            render("{{ messages[0]|tojson }}", x).unwrap(),
            "{\"b\": [1, -2.0, 1e+16, 1.5e-07, 1000000000000000.0, 0.0001, 1e+300], \"a\": {}, \"c\": [], \"d\": null, \
             \"e\": true, \"f\": \"<'é\\\"\\\\\\n\\u001f\u{7f}😀>\"}"
        );
        assert_eq!(
            render("{{ messages[0]|tojson(ensure_ascii=true) }}", json!("é\u{7f}😀")).unwrap(),
            r#""\u00e9\u007f\ud83d\ude00""#
        );
        assert_eq!(
            render("{{ messages[0]|tojson(indent=2) }}", json!({"a": [1, [], {}], "b": {"c": [2]}})).unwrap(),
            "{\n  \"a\": [\n    1,\n    [],\n    {}\n  ],\n  \"b\": {\n    \"c\": [\n      2\n    ]\n  }\n}"
        );
    }

    #[test]
    fn values_are_shown_as_python_does() {
        let source = "{{ messages[0].a }} {{ messages[0].b }} {{ messages[0].c }}{{ messages[0].missing }}|\
            {{ messages[0].a|string }}{% for k, v in messages[0]|items %} {{ k }}{% endfor %}";
        assert_eq!(render(source, json!({"c": 1.0, "b": null, "a": true})).unwrap(), "True None 1.0|True c b a");
    }

    #[test]
    fn blocks_take_their_line_with_them() {
        assert_eq!(render("a\n  {% if true %}\nb\n  {% endif %}\nc\n", json!({})).unwrap(), "a\nb\nc");
    }

    #[test]
    fn an_error_names_the_line() {
        let e = render("\n\n{{ raise_exception('no ' + messages[0].role) }}", json!({"role": "cat"})).unwrap_err();
        assert_eq!(e.to_string(), "chat template, line 3: no cat");
        let e = Template::new("ok\n{% for %}").unwrap_err();
        assert!(e.to_string().starts_with("chat template, line 2: syntax error"), "{e}");
        let e = render("{{ x|tojson }}", json!({})).unwrap_err();
        assert!(e.to_string().contains("line 1"), "{e}");
    }

    #[test]
    fn a_hostile_template_ends() {
        for source in [
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
            "{{ 'x' * 1000000000000 }}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(60) %}{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% macro f(n) %}{{ f([n, n]|tojson(indent=1000000000)) }}{% endmacro %}{{ f('x') }}",
            "{% set ns = namespace(s=[1]) %}{% for a in range(200) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s|tojson(indent=99999999) }}",
            "{% set ns = namespace(s=[1]) %}{% for a in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s|tojson }}",
            "{% set ns = namespace(s=[1]) %}{% for a in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}{{ f() }}",
            "{% set ns = namespace(s=[1]) %}{% for a in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ f() }}",
            "{{ '{:>1000000000}'.format(1) }}",
            "{{ '%1000000000d'|format(1) }}",
            "{{ 'x'|indent(1000000000, true) }}",
            "{{ [1]|batch(1000000000, 0)|list }}",
            "{{ 'x'|center(1000000000) }}",
            "{{ [1] * 1000000000000 }}",
            "{{ range(1000000000)|list }}",
            "{{ 2 ** 99999999 }}",
        ] {
            assert!(matches!(render(source, json!({})), Err(TemplateError::Template { .. })), "{source}");
        }
        let nested = "{% set ns = namespace(s=[1]) %}{% for a in range(30000) %}{% set ns.s = [ns.s] %}{% endfor %}";
        assert_eq!(render(nested, json!({})), Ok(String::new()));
    }

    /// Each repeats its second part as often as the longest template takes, and so nests that deep. Not `~` and `**`:
    /// minijinja tries to fold such chains anew for every link, which takes seconds.
    #[test]
    fn a_deep_template_does_not_overflow_the_stack() {
        for (before, link, after) in [
            ("{{ 1", "+1", " }}"),
            ("{{ ", "-", "1 }}"),
            ("{{ ", "not ", "1 }}"),
            ("{{ a", ".b", " }}"),
            ("{{ a", "[0]", " }}"),
            ("{{ a", "()", " }}"),
            ("{{ a", "|e", " }}"),
            ("{{ a", " is a", " }}"),
            ("{{ 1", "<1", " }}"),
            ("{{ 1", " or 1", " }}"),
            ("{{ 1", " if 1 else 1", " }}"),
            ("{{ ", "(", ""),
            ("{{ ", "[", ""),
            ("{{ ", "{1:", ""),
            ("{% if 1 %}", "{% elif 1 %}", "{% endif %}"),
            ("", "{% if 1 %}", ""),
            ("{% set a", ".b", " = 1 %}"),
            ("{% filter e", "|e", " %}{% endfilter %}"),
            ("{% for ", "(", ""),
        ] {
            let links = (SOURCE_BYTES_MAX - before.len() - after.len()) / link.len();
            let source = format!("{before}{}{after}", link.repeat(links));
            // Whether it is accepted is minijinja's affair.
            if let Ok(t) = Template::new(&source) {
                let _ = t.render(&Conversation::default());
            }
        }
        let e = Template::new(&" ".repeat(SOURCE_BYTES_MAX + 1)).unwrap_err().to_string();
        assert!(e.starts_with("key tokenizer.chat_template: found 32769 bytes, expected at most 32768"), "{e}");
    }
}
