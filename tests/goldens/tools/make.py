#!/usr/bin/env python3
"""Renders conversations with tools through transformers' apply_chat_template, with the template of the bundled models and
with one that writes calls in XML as Qwen3.5 does. Writes tools.json beside this file.

    pip install transformers==5.24.0 && python3 tests/goldens/tools/make.py
"""
import json
import pathlib

from transformers import PreTrainedTokenizerFast, __version__

here = pathlib.Path(__file__).parent
checkpoint = here / "../../checkpoints/tiny-moe"
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))

TOOLS = [
    {"type": "function", "function": {"name": "set_light", "description": "Sets a light <fast> & \"safe\"", "parameters": {
        "type": "object", "required": ["room"], "properties": {
            "room": {"type": "string"}, "level": {"type": "integer"}, "ratio": {"type": "number"},
            "on": {"type": "boolean"}, "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"}, "note": {"type": ["string", "null"]}}}}},
    {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "set_light", "arguments": {
        "room": "Küche", "level": 40, "ratio": 0.5, "on": True, "tags": ["a", "b \"c\""], "more": {"x": {"y": None}},
        "note": "two\n\nlines"}}},
    {"id": "2", "type": "function", "function": {"name": "nothing", "arguments": {}}},
]
ASK = {"role": "user", "content": "Make it brighter."}
CONVERSATIONS = [
    [ASK],
    [{"role": "system", "content": " Be short. "}, ASK],
    [ASK, {"role": "assistant", "content": "I will.", "tool_calls": CALLS},
     {"role": "tool", "content": "done"}, {"role": "tool", "content": "{\"ok\": true}"}],
    [ASK, {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, {"role": "tool", "content": "done"},
     {"role": "assistant", "content": "It is brighter."}, {"role": "user", "content": "Thanks. More?"}],
]

cases = []
for name, template in [("bundled", checkpoint / "chat_template.jinja"), ("xml", here / "xml.jinja")]:
    tokenizer.chat_template = template.read_text()
    for messages in CONVERSATIONS:
        text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, enable_thinking=False, tokenize=False)
        cases.append({"template": name, "messages": messages, "text": text})
out = {"transformers": __version__, "tools": TOOLS, "cases": cases}
(here / "tools.json").write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n")
print(len(cases), "cases")
