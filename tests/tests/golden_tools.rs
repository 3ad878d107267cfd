//! Tools in conversations against transformers' `apply_chat_template` (`goldens/tools/make.py`): prompts are equal, and the
//! calls that a template wrote down are read back as they were.

use forerun::template::{Conversation, Template};
use forerun::tools::{CLOSE, OPEN, arguments_to_objects, parse};
use forerun_tests::golden::json;
use forerun_tests::path;
use serde_json::{Value, json};

#[test]
fn conversations_with_tools_are_rendered_as_in_the_reference_and_read_back() {
    let golden = json("tools/tools");
    let tools = golden["tools"].as_array().expect("tools");
    let (mut rendered, mut calls) = (0, 0);
    for case in golden["cases"].as_array().expect("cases") {
        let source = match case["template"].as_str() {
            Some("bundled") => path("checkpoints/tiny-moe/chat_template.jinja"),
            _ => path("goldens/tools/xml.jinja"),
        };
        let template = Template::new(&std::fs::read_to_string(source).expect("a template")).expect("a template");
        // As clients of the OpenAI API send them: arguments in a text.
        let mut messages = case["messages"].as_array().expect("messages").clone();
        let mut made = Vec::new();
        for call in
            messages.iter_mut().flat_map(|m| m.get_mut("tool_calls")).flat_map(|c| c.as_array_mut().expect("calls"))
        {
            let f = &mut call["function"];
            made.push(json!({ "name": f["name"], "arguments": f["arguments"] }));
            f["arguments"] = f["arguments"].to_string().into();
        }
        arguments_to_objects(&mut messages).expect("objects");
        let conversation =
            Conversation { messages: &messages, tools, enable_thinking: Some(false), add_generation_prompt: true };
        let text = template.render(&conversation).expect("a prompt");
        assert_eq!(text, case["text"].as_str().expect("text"), "{}", case["template"]);
        rendered += 1;

        let turns = text.split("<|im_start|>").filter(|turn| turn.starts_with("assistant"));
        let read: Vec<Value> = turns
            .flat_map(|turn| turn.split(OPEN).skip(1))
            .map(|rest| {
                let call = parse(rest.split(CLOSE).next().expect("a call"), tools).expect("a call");
                json!({ "name": call.name, "arguments": call.arguments })
            })
            .collect();
        assert_eq!(read, made, "{}", case["template"]);
        calls += read.len();
    }
    assert_eq!((rendered, calls), (8, 6));
}
