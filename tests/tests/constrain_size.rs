//! Memory and time of answers under a constraint with as many tokens as the published model has. Alone in its program, since
//! it counts what the whole process allocates.

use forerun::constrain::{Constraint, Grammar, Matcher, TokenIndex};
use forerun::model::GRAMMAR_BYTES;
use forerun_tests::vocabulary::{Texts, tokenizer};
use peak_alloc::PeakAlloc;
use serde_json::{Value, json};
use std::time::Instant;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The result of `f`, the most heap that it took beside what there was, and milliseconds.
fn measured<R>(f: impl FnOnce() -> R) -> (R, usize, f64) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let start = Instant::now();
    let result = f();
    let ms = start.elapsed().as_secs_f64() * 1e3;
    (result, HEAP.peak_usage().saturating_sub(before), ms)
}

fn review() -> Value {
    json!({"type": "object", "properties": {
        "observations": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 8},
        "scene": {"type": "string", "minLength": 150, "maxLength": 600},
        "title": {"type": "string", "maxLength": 80},
        "shortSummary": {"type": "string", "minLength": 70, "maxLength": 100},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "potential_threat_level": {"type": "integer", "minimum": 0, "maximum": 2},
    }, "required": ["observations", "scene", "title", "shortSummary", "confidence", "potential_threat_level"]})
}

/// Schemas as large as the limits allow, or larger.
fn large() -> Vec<(&'static str, Value)> {
    let wide = |n: usize, item: &dyn Fn(usize) -> Value| (0..n).map(item).collect::<Vec<_>>();
    let object = |n: usize| {
        let properties: serde_json::Map<_, _> =
            (0..n).map(|i| (format!("a name of some length {i}"), json!({"type": "string"}))).collect();
        json!({"type": "object", "required": properties.keys().collect::<Vec<_>>(), "properties": properties})
    };
    let text = |i: usize| json!({"type": "string", "minLength": i});
    let number = |i: usize| json!({"type": "number", "minimum": i});
    let rings = (0..250).map(|i| {
        (format!("n{i}"), json!({"anyOf": wide(15, &|k| json!({"$ref": format!("#/$defs/n{}", (i + k) % 250)}))}))
    });
    let rings = json!({"$ref": "#/$defs/n0", "$defs": rings.collect::<serde_json::Map<_, _>>()});
    let names = wide(8192, &|i| json!(format!("some value of an enumeration {i}")));
    let path = (0..63).fold(json!({"type": "null"}), |s, _| json!({"properties": {"n".repeat(5000): s}}));
    vec![
        ("objects", json!({"anyOf": wide(31, &|_| object(126))})),
        ("an enumeration", json!({ "enum": names })),
        ("long texts", json!({"enum": wide(64, &|i| json!(format!("{i}{}", "x".repeat(4090))))})),
        (
            "lists of choices",
            json!({"type": "array", "prefixItems": wide(15, &|_| json!({"anyOf": wide(255, &number)}))}),
        ),
        ("tuples", json!({"anyOf": wide(16, &|_| json!({"type": "array", "prefixItems": wide(250, &text)}))})),
        ("rings", rings),
        ("long names", path),
        (
            "one of many",
            json!({"oneOf": wide(250, &|i| json!({"type": "object", "required": ["k"], "properties": {"k": {"const": i}, "v": {"enum": wide(12, &|j| json!(j))}}}))}),
        ),
    ]
}

/// One test, for another beside it would be counted too.
#[test]
fn memory_is_as_planned_and_masks_are_quick() {
    let tokenizer = tokenizer(&Texts::large().packed());
    let n = tokenizer.vocab_len();
    let (index, peak, ms) = measured(|| TokenIndex::new(&tokenizer));
    println!("{n} tokens: {ms:.0} ms to sort, {} bytes kept, at most {peak}", index.heap_bytes());
    assert!(peak <= TokenIndex::bytes_max(n), "{peak} bytes, {} said", TokenIndex::bytes_max(n));

    let (grammar, peak, ms) = measured(|| Grammar::from_schema(&review()).expect("a schema"));
    println!("review schema: {ms:.2} ms, at most {peak} bytes");
    assert!(peak <= 64 << 10, "{peak}");
    for (name, schema) in large() {
        let text = schema.to_string().len();
        let (result, peak, ms) = measured(|| Grammar::from_schema(&schema));
        let result = result.map_or_else(|e| e.found, |_| "accepted".into());
        println!("{name}: {text} bytes of schema, {ms:.0} ms, at most {peak} bytes: {result}");
        assert!(peak as u64 <= GRAMMAR_BYTES, "{name}: {peak} bytes");
        // Not a measurement: debug builds, busy machines.
        assert!(ms < 10_000.0, "{name}: {ms} ms");
    }
    let any = Grammar::any_object();
    let constraint = |grammar| Constraint { grammar, tokens: &index };
    let (_, peak, _) = measured(|| Matcher::new(constraint(&grammar), &tokenizer, &[0], false));
    let said = Matcher::heap_bytes(n);
    println!("matcher: {peak} bytes, {said} said");
    assert!(peak <= said, "{peak} bytes, {said} said");

    for (name, grammar, text) in [
        ("review, begin", &grammar, ""),
        ("review, a name", &grammar, "{\"sc"),
        ("review, a text", &grammar, "{\"observations\":[\"A person"),
        (
            "review, a short text",
            &grammar,
            "{\"title\":\"A person walks to the door and then leaves for good with a parcel, in rai",
        ),
        ("review, after a backslash", &grammar, "{\"title\":\"\\"),
        ("review, inside of a character", &grammar, "{\"title\":\"\u{00e9}"),
        ("review, a number", &grammar, "{\"confidence\":0."),
        ("any, after a brace", &any, "{"),
        ("any, a name", &any, "{\"na"),
        ("any, a value", &any, "{\"na\":"),
        ("any, a text", &any, "{\"na\":[{\"x\":\"te"),
    ] {
        let mut m = Matcher::new(constraint(grammar), &tokenizer, &[0], false);
        // A character's first byte alone.
        let bytes = if name.contains("inside") { &text.as_bytes()[..text.len() - 1] } else { text.as_bytes() };
        let mut byte = [0; 256];
        (0..n as u32).for_each(|id| {
            if let (true, &[b]) = (tokenizer.is_normal(id), tokenizer.token_bytes(id, true)) {
                byte[usize::from(b)] = id;
            }
        });
        for &b in bytes {
            assert!(m.take(byte[usize::from(b)], 10_000), "{name}");
        }
        m.compute_mask();
        let mut times: Vec<f64> = (0..20)
            .map(|_| {
                let start = Instant::now();
                m.compute_mask();
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let allowed = (0..n as u32).filter(|&id| m.allows(id)).count();
        println!("{name}: {:.0} us, {allowed} tokens allowed", times[times.len() / 2]);
        // Not a measurement: debug builds, busy machines. A tenth of this is meant.
        assert!(times[0] < 20_000.0, "{name}: {} us", times[0]);
    }
}
