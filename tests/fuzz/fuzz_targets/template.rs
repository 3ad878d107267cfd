//! Text as a chat template, rendered for one conversation.
#![no_main]

use forerun::template::{Conversation, Template};
use forerun_fuzz::{bounded_by, open::messages};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static MESSAGES: LazyLock<Vec<serde_json::Value>> = LazyLock::new(messages);

/// The heap that the limits on steps allow: see `FUEL` in `template.rs`.
const RENDER_BYTES: usize = 64 << 20;

fuzz_target!(|source: &str| {
    let conversation = Conversation {
        messages: &MESSAGES,
        tools: &MESSAGES[..1],
        enable_thinking: Some(true),
        add_generation_prompt: true,
    };
    bounded_by("template", RENDER_BYTES, || {
        if let Ok(template) = Template::new(source) {
            let _ = template.render(&conversation);
        }
    });
});
