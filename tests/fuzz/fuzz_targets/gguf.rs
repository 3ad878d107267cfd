//! Bytes as a model file: header, configuration, weights, plans, tokenizer, template, prompts.
#![no_main]

use forerun_fuzz::open;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let len = bytes.len() as u64;
    for file_bytes in [len, len + (16 << 20), u64::MAX] {
        let Ok(header) = open::header(bytes, file_bytes) else { continue };
        let config = open::engine_side(&header, bytes.len()).ok().map(|(config, _)| config);
        // What the program makes of text does not depend on the file's length.
        if file_bytes != u64::MAX {
            open::app_side(&header, bytes.len(), config.as_ref());
        }
    }
});
