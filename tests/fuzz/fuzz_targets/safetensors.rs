//! Bytes as the header of a safetensors file: the first two choose the length of its data.
#![no_main]

use forerun_fuzz::{bounded, open::one_line};
use forerun_quant::safetensors::parse_header;
use libfuzzer_sys::fuzz_target;

/// Heap for each byte of the header: a tensor of 50 bytes is a row in two maps and a list, and its name in three.
const TIMES: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let Some((first, json)) = bytes.split_first_chunk::<2>() else { return };
    let data_bytes = match u16::from_le_bytes(*first) {
        u16::MAX => u64::MAX,
        n => u64::from(n),
    };
    match bounded("header", json.len(), TIMES, || parse_header(json, data_bytes)) {
        Ok(entries) => {
            let mut spans: Vec<_> = entries.values().map(|e| (e.begin, e.bytes)).collect();
            spans.sort_unstable();
            let end = spans.iter().fold(0, |at, &(begin, bytes)| {
                assert_eq!(at, begin, "a hole or an overlap");
                begin.checked_add(bytes).expect("an end that fits")
            });
            assert_eq!(end, data_bytes);
            for e in entries.values() {
                if let Some(each) = e.dtype.bytes() {
                    assert_eq!(e.shape.iter().product::<u64>() * each as u64, e.bytes);
                }
            }
        }
        Err(e) => one_line(&e.to_string()),
    }
});
