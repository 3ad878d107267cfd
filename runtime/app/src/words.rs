//! Tokens of an answer to thoughts, words and tool calls, as they come.
//!
//! What may be the beginning of a stop text or of a tool call is held back until it is clear. Never loses a word: a call that
//! cannot be read is given as text. Takes no memory for usual answers once it is made.

use crate::error::AppError;
use crate::model::Model;
use crate::request::Request;
use crate::session::{Emit, Piece};
use crate::tokenizer::Stream;
use crate::tools::{CLOSE, OPEN, ToolCall, parse};
use serde_json::Value;

/// What an answer consists of.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub text: String,
    pub thought: String,
    pub calls: Vec<ToolCall>,
}

/// Splits a stream of tokens into thoughts, words and calls.
pub(crate) struct Words<'m> {
    model: &'m Model,
    stream: Stream,
    end_of_thought: Option<u32>,
    thinking: bool,
    stop: &'m [String],
    tools: &'m [Value],
    /// Words that may be the beginning of something else.
    held: String,
    /// Where in what is held a call begins, after white space and [`OPEN`].
    calling: Option<usize>,
    stopped: bool,
    said: Said,
}

impl<'m> Words<'m> {
    /// `bytes`: usual length of an answer, at most.
    pub fn new(model: &'m Model, request: &Request<'m>, bytes: usize) -> Self {
        let end_of_thought = model.tokenizer.id_of("</think>");
        let thinking = request.think && end_of_thought.is_some();
        let (stop, tools) =
            if request.constraint.is_some() { (&[][..], &[][..]) } else { (request.stop, request.tools) };
        let holds = !stop.is_empty() || !tools.is_empty();
        let said = Said {
            text: String::with_capacity(bytes),
            thought: String::with_capacity(if thinking { bytes } else { 0 }),
            calls: Vec::new(),
        };
        let held = String::with_capacity(if holds { bytes } else { 0 });
        let stream = Stream::new(true);
        Self { model, stream, end_of_thought, thinking, stop, tools, held, calling: None, stopped: false, said }
    }

    /// The token that ends the thoughts, while there are some.
    pub fn thinking(&self) -> Option<u32> {
        self.end_of_thought.filter(|_| self.thinking)
    }

    /// Adds a token; `false` if a stop text came and the answer is over.
    pub fn push(&mut self, token: u32, emit: &mut Emit<'_>) -> Result<bool, AppError> {
        if self.thinking && Some(token) == self.end_of_thought {
            let rest = self.stream.finish();
            give(Piece::Thought(rest), &mut self.said, emit)?;
            self.thinking = false;
            return Ok(true);
        }
        let piece = self.stream.push(&self.model.tokenizer, token);
        if self.thinking {
            give(Piece::Thought(piece), &mut self.said, emit)?;
        } else if self.stop.is_empty() && self.tools.is_empty() {
            give(Piece::Text(piece), &mut self.said, emit)?;
        } else {
            self.held.push_str(piece);
            self.sift(emit)?;
        }
        Ok(!self.stopped)
    }

    /// Gives what of the held words is clear.
    fn sift(&mut self, emit: &mut Emit<'_>) -> Result<(), AppError> {
        while !self.stopped {
            if let Some(begin) = self.calling {
                let Some(len) = self.held[begin..].find(CLOSE) else { return Ok(()) };
                self.call(begin, begin + len, begin + len + CLOSE.len(), emit)?;
                continue;
            }
            let open = if self.tools.is_empty() { None } else { self.held.find(OPEN) };
            let stop = self.stop.iter().filter(|s| !s.is_empty()).filter_map(|s| self.held.find(s.as_str())).min();
            if let Some(at) = stop.filter(|&at| open.is_none_or(|open| at <= open)) {
                give(Piece::Text(&self.held[..at]), &mut self.said, emit)?;
                self.held.clear();
                self.stopped = true;
            } else if let Some(at) = open {
                // Line breaks before a call belong to it.
                let words = self.held[..at].trim_end().len();
                give(Piece::Text(&self.held[..words]), &mut self.said, emit)?;
                self.held.drain(..words);
                self.calling = Some(at - words + OPEN.len());
            } else {
                let clear = self.clear();
                give(Piece::Text(&self.held[..clear]), &mut self.said, emit)?;
                self.held.drain(..clear);
                return Ok(());
            }
        }
        Ok(())
    }

    /// Bytes of the held words that cannot be the beginning of anything else.
    fn clear(&self) -> usize {
        let tag = if self.tools.is_empty() { "" } else { OPEN };
        let held = self.held.as_bytes();
        let begins = |at: usize| {
            let rest = &held[at..];
            let begin = |text: &str| text.as_bytes().starts_with(rest);
            self.stop.iter().any(|s| begin(s)) || begin(tag)
        };
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0).max(tag.len());
        // A stop text begins between characters, as what comes before it ends.
        let at =
            (held.len().saturating_sub(longest)..held.len()).find(|&at| self.held.is_char_boundary(at) && begins(at));
        let at = at.unwrap_or(held.len());
        // Space before a tag goes with it.
        if self.tools.is_empty() { at } else { self.held[..at].trim_end().len() }
    }

    /// Takes the call in `begin..end` of the held bytes, and forgets the first `past`.
    fn call(&mut self, begin: usize, end: usize, past: usize, emit: &mut Emit<'_>) -> Result<(), AppError> {
        match parse(&self.held[begin..end], self.tools) {
            Some(call) => {
                emit(Piece::Call(&call))?;
                self.said.calls.push(call);
            }
            None => give(Piece::Text(&self.held[..past]), &mut self.said, emit)?,
        }
        self.held.drain(..past);
        self.calling = None;
        Ok(())
    }

    /// Gives what is left, and all that was said.
    pub fn finish(mut self, emit: &mut Emit<'_>) -> Result<Said, AppError> {
        let rest = self.stream.finish();
        if self.thinking {
            give(Piece::Thought(rest), &mut self.said, emit)?;
        } else if !self.stopped {
            self.held.push_str(rest);
            self.sift(emit)?;
            if let Some(begin) = self.calling {
                // Its end tag did not come; it may be whole all the same.
                let all = self.held.len();
                self.call(begin, all, all, emit)?;
            } else if !self.stopped {
                let held = std::mem::take(&mut self.held);
                give(Piece::Text(&held), &mut self.said, emit)?;
            }
        }
        let Said { text, thought, calls } = self.said;
        Ok(Said { text: text.trim_end().to_owned(), thought: thought.trim_end().to_owned(), calls })
    }
}

/// Adds a piece to what was said, and tells of it.
fn give(piece: Piece<'_>, said: &mut Said, emit: &mut Emit<'_>) -> Result<(), AppError> {
    let (target, text) = match piece {
        Piece::Thought(t) => (&mut said.thought, t),
        Piece::Text(t) => (&mut said.text, t),
        Piece::Call(_) => return Ok(()),
    };
    // White space between the thoughts and the answer belongs to neither.
    let text = if target.is_empty() { text.trim_start() } else { text };
    if text.is_empty() {
        return Ok(());
    }
    target.push_str(text);
    emit(if matches!(piece, Piece::Thought(_)) { Piece::Thought(text) } else { Piece::Text(text) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    fn model() -> Model {
        Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/tiny-moe.gguf")).expect("a model")
    }

    /// What is said of `ids`, and the pieces on the way.
    fn hear(model: &Model, request: &Request<'_>, ids: &[u32]) -> (Said, Vec<String>) {
        let mut pieces = Vec::new();
        let mut emit = |piece: Piece<'_>| {
            pieces.push(match piece {
                Piece::Thought(t) => format!("({t})"),
                Piece::Text(t) => t.to_owned(),
                Piece::Call(c) => format!("[{}]", c.name),
            });
            Ok(())
        };
        let mut words = Words::new(model, request, 64);
        for &id in ids {
            if !words.push(id, &mut emit).unwrap() {
                break;
            }
        }
        (words.finish(&mut emit).unwrap(), pieces)
    }

    /// The bytes of `text` as tokens, one each.
    fn bytes(model: &Model, text: &str) -> Vec<u32> {
        let byte =
            |b: u8| (0..2048).find(|&id| model.tokenizer.is_normal(id) && model.tokenizer.token_bytes(id, true) == [b]);
        text.bytes().map(|b| byte(b).expect("a token")).collect()
    }

    #[test]
    fn calls_are_taken_out_whole_and_no_part_of_a_tag_is_shown() {
        let model = model();
        let tools = [
            json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}),
        ];
        let request = Request { tools: &tools, ..Request::default() };
        let text = "I <b>look</b> é\n\n<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>\n\
            <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
        for ids in [model.tokenizer.encode(text).unwrap(), bytes(&model, text)] {
            let (said, pieces) = hear(&model, &request, &ids);
            assert_eq!(said.text, "I <b>look</b> é");
            assert_eq!(said.calls.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["f", "g"]);
            assert_eq!(said.calls[0].arguments["n"], json!(7));
            let shown = pieces.concat();
            assert_eq!(shown.replace(char::is_whitespace, ""), "I<b>look</b>é[f][g]");
            assert!(pieces.len() > 5, "words come one by one: {pieces:?}");
        }
        // Without its end, and what is no call at all.
        let (said, _) = hear(&model, &request, &bytes(&model, "<tool_call><function=f></function>"));
        assert_eq!((said.text.as_str(), said.calls.len()), ("", 1));
        for text in ["a <tool_call> b", "a <tool_call>b</tool_call> c", "a < b <tool", "a <tool_call"] {
            let (said, pieces) = hear(&model, &request, &bytes(&model, text));
            assert_eq!((said.text.as_str(), said.calls.len()), (text, 0));
            assert_eq!(pieces.concat(), text);
        }
        // Nobody asked for tools.
        let (said, _) = hear(&model, &Request::default(), &model.tokenizer.encode(text).unwrap());
        assert_eq!(said.text, text);
    }

    #[test]
    fn an_answer_ends_before_a_stop_text() {
        let model = model();
        for (stop, text, want) in [
            (vec!["END"], "one END two", "one "),
            (vec!["ne", "one"], "one", ""),
            (vec!["\n\n", "é!"], "a\nb é\n\nc", "a\nb é"),
            (vec!["xyz"], "ends with xy", "ends with xy"),
            (vec!["aab"], "aaab", "a"),
            (vec![""], "all", "all"),
        ] {
            let stop: Vec<String> = stop.into_iter().map(String::from).collect();
            let request = Request { stop: &stop, ..Request::default() };
            for ids in [model.tokenizer.encode(text).unwrap(), bytes(&model, text)] {
                let (said, pieces) = hear(&model, &request, &ids);
                assert_eq!(said.text, want.trim_end(), "{stop:?} {text:?}");
                assert_eq!(pieces.concat(), want, "{stop:?} {text:?}");
            }
        }
    }
}
