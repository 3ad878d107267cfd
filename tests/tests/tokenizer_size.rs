//! Memory and time of a tokenizer with as many tokens as the published model's. Alone in its program, since it counts what
//! the whole process allocates.

use forerun::model::{ENCODE_BYTES_PER_BYTE, TEMPLATE_BYTES};
use forerun::template::Template;
use forerun_format::gguf::Header;
use forerun_tests::path;
use forerun_tests::vocabulary::{Random, Texts, tokenizer};
use peak_alloc::PeakAlloc;
use std::time::Instant;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// What a tokenizer may take.
const BYTES_MAX: usize = 16_000_000;

/// The result of `f`, the heap that it keeps and the most that it took, and the milliseconds.
fn measured<R>(f: impl FnOnce() -> R) -> (R, usize, usize, f64) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let start = Instant::now();
    let result = f();
    let ms = start.elapsed().as_secs_f64() * 1e3;
    (result, HEAP.current_usage().saturating_sub(before), HEAP.peak_usage().saturating_sub(before), ms)
}

/// One test, for another beside it would be counted too.
#[test]
fn memory_and_time_are_small() {
    a_large_vocabulary_is_small();
    encoding_takes_memory_in_proportion();
    a_chat_template_is_small();
}

fn a_large_vocabulary_is_small() {
    let t = Texts::large();
    println!("{} tokens, {} merges", t.tokens.len(), t.merges.len());
    let mut random = Random(3);
    let words: Vec<&str> = t.tokens.iter().filter(|text| text.is_ascii()).map(String::as_str).collect();
    let text: String = (0..50_000).map(|_| format!("{} ", random.pick(&words))).collect();
    let mut ids = Vec::new();
    for (form, header) in [("plain", t.plain()), ("packed", t.packed())] {
        let (_, _, _, parse_ms) = measured(|| Header::parse(&header, header.len() as u64).map(drop));
        let (tokens, kept, peak, ms) = measured(|| tokenizer(&header));
        println!(
            "{form}: header of {} bytes, {parse_ms:.1} ms to parse; {ms:.1} ms to open, {kept} bytes kept, at most {peak}",
            header.len()
        );
        assert!(peak <= BYTES_MAX, "{form}: {peak} bytes");
        // What the memory plan says is what is taken.
        assert!(kept.abs_diff(tokens.heap_bytes()) < 64 << 10, "{form}: {kept} bytes, {} said", tokens.heap_bytes());
        // The packed form is all of it: nothing else of the file is needed.
        assert!(form == "plain" || header.len() + peak <= BYTES_MAX, "{form}: {} and {peak} bytes", header.len());
        // Not a measurement: debug builds, busy machines. 50 ms are meant.
        assert!(ms < 5_000.0, "{form}: {ms} ms");
        let (encoded, _, peak, ms) = measured(|| tokens.encode(&text).expect("ids"));
        println!(
            "{form}: {} bytes of text in {ms:.1} ms, {:.1} bytes each",
            text.len(),
            peak as f64 / text.len() as f64
        );
        assert!(ids.is_empty() || encoded == ids, "both forms give the same tokens");
        ids = encoded;
    }
}

/// Words that are all letters, and letters that normalizing takes apart, need the most.
fn encoding_takes_memory_in_proportion() {
    let tokens = tokenizer(&Texts::checkpoint("tiny-moe").packed());
    for part in ["x", "the", "7", " ", "!", "か\u{3099}", "給", "\u{fb2c}", "\u{1d160}", "\u{9dc}", "<|im_end|>", "한"]
    {
        let text = part.repeat((256 << 10) / part.len());
        let (_, _, peak, ms) = measured(|| tokens.encode(&text).expect("ids"));
        let each = peak as f64 / text.len() as f64;
        println!("{part:?}: {ms:.1} ms, {each:.1} bytes of heap for each of text");
        assert!(each <= ENCODE_BYTES_PER_BYTE as f64, "{part:?}: {each}");
    }
}

fn a_chat_template_is_small() {
    let file = std::fs::read(path("models/tiny-moe.gguf")).expect("the bundled model");
    let header = Header::parse(&file, file.len() as u64).expect("a header");
    let (_template, kept, peak, ms) = measured(|| Template::from_header(&header).expect("a template"));
    println!("chat template: {ms:.1} ms, {kept} bytes kept, at most {peak}");
    assert!(peak as u64 <= TEMPLATE_BYTES, "{peak}");
}
