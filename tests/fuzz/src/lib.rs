//! What the fuzz targets share: a bound on heap use, and the checks on a model file once its header is parsed.
//!
//! Relies on a counting allocator for the whole process, so a target must not allocate on other threads meanwhile.
#![forbid(unsafe_code)]

pub mod open;
pub mod spec;

use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Heap that a call may use whatever its input, bytes: tables that do not depend on it.
const FIXED_BYTES: usize = 256 << 10;

/// Runs `f` and asserts that the heap grew by at most `times` the `input` bytes, plus a constant, at any moment.
pub fn bounded<R>(what: &str, input: usize, times: usize, f: impl FnOnce() -> R) -> R {
    bounded_by(what, FIXED_BYTES + input * times, f)
}

/// Runs `f` and asserts that the heap grew by at most `bytes` at any moment.
pub fn bounded_by<R>(what: &str, bytes: usize, f: impl FnOnce() -> R) -> R {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let result = f();
    let grown = HEAP.peak_usage().saturating_sub(before);
    assert!(grown <= bytes, "{what}: {grown} bytes of heap, expected at most {bytes}");
    result
}
