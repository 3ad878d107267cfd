//! Replays of made-up routing traces: the engine's policy against simple ones and against the optimum, and damaged traces.
//!
//! The traces are generated: sentences of a small vocabulary, each word with experts of its own in each layer, beside
//! experts of the topic and chance. No recording of a model is bundled.

mod common;

use common::{Dir, Rng};
use forerun_quant::{Prompts, Replay, replay};
use serde_json::Value;
use std::{fmt::Write, fs, ops::Range, process::Command};

const LAYERS: usize = 12;
const EXPERTS: usize = 64;
const TOP_K: usize = 4;
const PROMPT: usize = 24;
const DECODED: usize = 160;

/// How tokens choose their experts.
#[derive(Clone, Copy)]
enum Kind {
    /// By word and topic.
    Text,
    /// The same, of another vocabulary from the middle on.
    Shift,
    /// By chance.
    Uniform,
}

fn header(out: &mut String) {
    writeln!(out, "# route_trace v1\n# n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={TOP_K}").unwrap();
    writeln!(out, "turn,phase,step,layer,slot,expert").unwrap();
}

fn generate(kind: Kind, seed: u64) -> String {
    let mut rng = Rng(seed);
    let mut out = String::new();
    header(&mut out);
    let mut word = 0;
    for step in 0..PROMPT + DECODED {
        // Frequent words are frequent; every other word is the one that usually follows the word before.
        word = if rng.below(2) == 0 { (word * 7 + 3) % 40 } else { rng.below(40) * rng.below(40) / 40 };
        let language = usize::from(matches!(kind, Kind::Shift) && step >= PROMPT + DECODED / 2);
        for layer in 0..LAYERS {
            let fixed = |what: usize, i: usize| {
                let hash = ((language * 1000 + what) * LAYERS + layer) * TOP_K + i;
                Rng(seed ^ (hash as u64 * 0x1234_5677)).below(EXPERTS)
            };
            let mut chosen = Vec::new();
            while chosen.len() < TOP_K {
                let e = match (kind, chosen.len()) {
                    (Kind::Text | Kind::Shift, i @ 0..=1) if rng.below(10) > 0 => fixed(word, i),
                    (Kind::Text | Kind::Shift, 2..) if rng.below(10) > 0 => fixed(100 + step / 40, rng.below(4)),
                    _ => rng.below(EXPERTS),
                };
                if !chosen.contains(&e) {
                    writeln!(out, "0,{},{step},{layer},{},{e}", usize::from(step >= PROMPT), chosen.len()).unwrap();
                    chosen.push(e);
                }
            }
        }
    }
    out
}

fn options(slots: &str, tokens: Option<Range<usize>>) -> Replay {
    let policies = ["forerun", "lru", "lru-layer", "lfu", "lfu-layer", "lfu-layer:1", "optimum-layer", "optimum"];
    Replay {
        policies: policies.map(|p| p.parse().unwrap()).to_vec(),
        slots: slots.split(',').map(|s| s.parse().unwrap()).collect(),
        prompts: Prompts::Chunk,
        tokens,
        json: true,
    }
}

/// Hit rates in percent, by policy; one size.
struct Rates(Value);

impl Rates {
    fn of(trace: &str, options: &Replay) -> Self {
        let dir = Dir::new();
        let path = dir.join("trace.csv");
        fs::write(&path, trace).unwrap();
        let mut out = Vec::new();
        replay(&path, options, &mut out).unwrap();
        Self(serde_json::from_slice(&out).unwrap())
    }

    fn rate(&self, policy: &str) -> f64 {
        let results = self.0["results"].as_array().unwrap();
        let r = results.iter().find(|r| r["policy"] == policy).unwrap_or_else(|| panic!("{policy}: {}", self.0));
        100.0 * r["hit_rate"].as_f64().unwrap()
    }
}

#[test]
fn the_engine_keeps_more_of_what_text_uses_than_counting_does() {
    for seed in 1..=5 {
        let r = Rates::of(&generate(Kind::Text, seed), &options("10%", None));
        let (ours, optimum) = (r.rate("forerun"), r.rate("optimum"));
        assert!((42.0..49.0).contains(&ours), "seed {seed}: {ours:.1}, expected 44 to 47");
        for ghost in ["lfu:0.98", "lfu-layer:0.98", "lfu-layer:1"] {
            assert!(ours >= r.rate(ghost) + 4.0, "seed {seed}: {ours:.1}, {ghost} {:.1}", r.rate(ghost));
        }
        assert!(ours < optimum, "seed {seed}: {ours:.1}, optimum {optimum:.1}");
    }
}

#[test]
fn chance_gives_every_policy_its_share() {
    for share in [10.0, 25.0] {
        let r = Rates::of(&generate(Kind::Uniform, 7), &options(&format!("{share}%"), None));
        for policy in ["forerun", "lru-layer", "lfu-layer:0.98"] {
            assert!((r.rate(policy) - share).abs() < 1.5, "{policy}: {:.1}, expected {share}", r.rate(policy));
        }
    }
}

/// The 32 tokens after every word has got other experts.
#[test]
fn another_vocabulary_does_not_strand_the_engine() {
    for seed in 1..=5 {
        let r = Rates::of(&generate(Kind::Shift, seed), &options("10%", Some(80..112)));
        let ours = r.rate("forerun");
        for simple in ["lru", "lru-layer", "lfu:0.98", "lfu-layer:0.98", "lfu-layer:1"] {
            assert!(ours >= r.rate(simple), "seed {seed}: {ours:.1}, {simple} {:.1}", r.rate(simple));
        }
    }
}

#[test]
fn nothing_beats_the_optimum() {
    for kind in [Kind::Text, Kind::Shift, Kind::Uniform] {
        for (slots, prompts, tokens) in [
            ("4", Prompts::Chunk, None),
            ("48", Prompts::Tokens, None),
            ("15%", Prompts::Skip, Some(40..41)),
            ("50%", Prompts::Chunk, Some(80..160)),
            ("100%", Prompts::Chunk, None),
        ] {
            let r = Rates::of(&generate(kind, 3), &Replay { prompts, ..options(slots, tokens) });
            let of_layers = r.rate("optimum-layer");
            let optimum = r.rate("optimum");
            assert!(optimum >= of_layers);
            for policy in ["lru-layer", "lfu-layer:0.98", "lfu-layer:1"] {
                assert!(of_layers >= r.rate(policy), "{slots} slots: {policy}");
            }
            for policy in ["forerun", "lru", "lfu:0.98"] {
                assert!(optimum >= r.rate(policy), "{slots} slots: {policy}");
            }
        }
    }
}

/// Two layers of four experts, two a token, and two tokens, with `edit` made to the lines.
fn small(edit: impl Fn(&mut Vec<String>)) -> Result<Value, forerun_quant::Error> {
    let mut lines =
        vec!["# n_layer=2 n_expert=4 n_expert_used=2".to_string(), "turn,phase,step,layer,slot,expert".into()];
    for (step, experts) in [(0, [0, 1]), (1, [1, 2])] {
        for layer in 0..2 {
            lines.extend((0..2).map(|slot| format!("0,1,{step},{layer},{slot},{}", experts[slot])));
        }
    }
    edit(&mut lines);
    let dir = Dir::new();
    let path = dir.join("trace.csv");
    fs::write(&path, lines.join("\n")).unwrap();
    let mut out = Vec::new();
    replay(&path, &options("4", None), &mut out)?;
    Ok(serde_json::from_slice(&out).unwrap())
}

#[test]
fn a_small_trace_has_the_hits_that_one_counts_by_hand() {
    // Four slots hold the first token's experts; the second asks for one of them again in each layer.
    let r = Rates(small(|_| ()).unwrap());
    for policy in ["forerun", "lru", "lru-layer", "lfu:0.98", "lfu-layer:1", "optimum", "optimum-layer"] {
        assert!((r.rate(policy) - 25.0).abs() < 1e-9, "{policy}: {}", r.rate(policy));
    }
    // Columns in another order and more of them.
    let more = |lines: &mut Vec<String>| {
        lines[1] = "expert,weight,slot,layer,step,phase,turn".into();
        for line in &mut lines[2..] {
            let mut values: Vec<_> = line.split(',').rev().collect();
            values.insert(1, "0.5");
            *line = values.join(",");
        }
    };
    assert_eq!(small(more).unwrap(), r.0);
}

#[test]
fn damaged_traces_are_refused_with_the_line() {
    let refused = |edit: &dyn Fn(&mut Vec<String>), part: &str| {
        let e = small(edit).expect_err(part);
        let text = e.to_string();
        assert_eq!(e.exit_code(), 3, "{text}");
        assert!(text.contains(part) && text.lines().count() == 1, "{text}, expected {part}");
    };
    let set = |at: usize, line: &'static str| move |lines: &mut Vec<String>| lines[at] = line.into();
    refused(&|l| l.clear(), "trace.csv:1: header: found the end of the file");
    refused(&set(0, "turn"), "trace.csv:1: header: found turn");
    refused(&|l| drop(l.remove(0)), "trace.csv:1: header");
    refused(&set(0, "# n_layer=0 n_expert=4 n_expert_used=2"), "trace.csv:1: n_layer: found 0");
    refused(&set(0, "# n_layer=2 n_expert=99999 n_expert_used=2"), "n_expert: found 99999");
    refused(&set(0, "# n_layer=2 n_expert=4 n_expert_used=5"), "n_expert_used: found 5, expected a number from 1 to 4");
    refused(&set(1, "turn,phase,step,layer,slot"), "trace.csv:2: columns");
    refused(&|l| l.truncate(1), "trace.csv:1: columns: found the end of the file");
    refused(&|l| l.truncate(2), "no decoded token");
    refused(&set(3, "0,1,0,0,1"), "trace.csv:4: expert: found 0,1,0,0,1, expected 6 columns");
    refused(&set(3, ""), "trace.csv:4: turn: found , expected a number");
    refused(&set(3, "0,1,0,0,1,4"), "trace.csv:4: expert: found 4, expected a number below 4");
    refused(&set(3, "0,1,0,0,1,-1"), "trace.csv:4: expert: found -1");
    refused(&set(3, "0,1,0,2,1,1"), "trace.csv:4: layer: found 2");
    refused(&set(3, "0,1,0,0,2,1"), "trace.csv:4: slot: found 2");
    refused(&set(3, "0,2,0,0,1,1"), "trace.csv:4: phase: found 2");
    refused(&set(3, "0,1,99999999999999999999,0,1,1"), "trace.csv:4: step");
    refused(&set(3, "0,1,0,0,1,0"), "trace.csv:4: expert: found 0, expected one that this token has not chosen");
    refused(&set(3, "0,1,0,0,0,1"), "trace.csv:4: slot: found 0");
    refused(&|l| drop(l.remove(3)), "trace.csv:3: turn 0 step 0 layer 0: found 1 experts, expected 2");
    refused(&|l| l[4] = "9".repeat(5000), "trace.csv:5: line: found a longer one");
    refused(&set(3, "\u{1b}[2J"), "trace.csv:4");
    // As many tokens as memory is given for, and one more, each of one line.
    let many = |l: &mut Vec<String>| {
        l[0] = "# n_layer=1024 n_expert=4096 n_expert_used=32".into();
        l.truncate(2);
        l.extend((0..1025).map(|step| format!("0,0,{step},0,0,0")));
    };
    refused(&many, "tokens: found more, expected at most 1024");
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let dir = Dir::new();
    let path = dir.join("trace.csv");
    fs::write(&path, b"# n_layer=2\n\xff\xfe\n").unwrap();
    let refused = |path: &std::path::Path| replay(path, &options("4", None), &mut Vec::new()).unwrap_err();
    let e = refused(&path);
    assert!(e.exit_code() == 3 && e.to_string().contains("trace.csv:2: line"), "{e}");
    assert_eq!(refused(&dir.join("none")).exit_code(), 1);
}

#[test]
fn sizes_that_do_not_fit_the_trace_are_refused() {
    let trace = generate(Kind::Uniform, 1);
    let dir = Dir::new();
    let path = dir.join("trace.csv");
    fs::write(&path, &trace).unwrap();
    for (slots, tokens, part) in [
        ("3", None, "slots: found 3, expected 4"),
        ("0.1%", None, "slots: found 0"),
        ("769", None, "to 768 (all experts)"),
        ("10%", Some(0..161), "found 161, expected at most 160"),
    ] {
        let e = replay(&path, &options(slots, tokens), &mut Vec::new()).unwrap_err();
        assert!(e.exit_code() == 3 && e.to_string().contains(part), "{e}");
    }
}

#[test]
fn the_command_prints_a_table_and_refuses_wrong_arguments() {
    let dir = Dir::new();
    let path = dir.join("trace.csv");
    fs::write(&path, generate(Kind::Text, 1)).unwrap();
    let run = |args: &[&str]| {
        let mut c = Command::new(env!("CARGO_BIN_EXE_forerun-quant"));
        c.arg("replay").arg("--trace").arg(&path).args(args).output().unwrap()
    };
    let done = run(&["--policy", "forerun,lfu-layer:1", "--slots", "96,12.5%"]);
    assert!(done.status.success());
    let table = String::from_utf8(done.stdout).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().skip(2).map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["slots", "96", "96"]);
    assert_eq!((rows[2][0], rows[3][0], rows.len()), ("forerun", "lfu-layer:1", 4), "{table}");
    assert_eq!(rows[2][1], rows[2][2], "{table}");
    for args in [
        ["--policy", "fifo"],
        ["--policy", "lru:0.5"],
        ["--policy", "lfu:0"],
        ["--policy", "lfu:1.5"],
        ["--slots", "x"],
        ["--slots", "0%"],
        ["--slots", "101%"],
        ["--slots", "nan%"],
        ["--tokens", "5..5"],
        ["--tokens", "5"],
    ] {
        assert_eq!(run(&args).status.code(), Some(2), "{args:?}");
    }
}
