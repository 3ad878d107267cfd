//! The code opens, plans and runs models of the published shapes. Their weights are zero, so the answer is the first token
//! of the vocabulary again and again; what is tested is that shapes, sizes and memory are right.

mod common;

use common::group::Group;
use common::sparse::{DENSE_1B, MOE_35B, write};
use common::{Scratch, finish_within, forerun, run, tests};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const CAP: u64 = 3 << 30;
/// Generous: the kernels of a debug build on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);

fn plan(model: &Path, args: &str) -> Value {
    let p = run(&format!("plan --memory 3G --json {args}"), &[&"--model", &model]).json();
    let bytes = |name: &str| p[name].as_u64().unwrap_or_else(|| panic!("{name}: {p}"));
    assert!(bytes("total_bytes") <= CAP && bytes("cap_bytes") == CAP, "{p}");
    p
}

#[track_caller]
fn answer(model: &Path, args: &[&str]) -> Value {
    let pictures = args.contains(&"--image");
    let mut c = forerun();
    c.args(["run", "--json", "--temperature", "0", "--memory", "3G", "--prompt", "hello", "--model"]).arg(model);
    c.args(args);
    let o = match Group::new(&format!("full-{}", model.file_stem().expect("a name").display()), CAP) {
        Ok(group) => {
            let o = group.finish(LIMIT, &c);
            println!("charged at most {:?} bytes under a limit of {CAP}", group.peak_bytes());
            o
        }
        Err(why) => {
            println!("without a memory cgroup ({why})");
            finish_within(LIMIT, &mut c, b"")
        }
    };
    println!("{:?}: {}", o.time, o.stdout);
    let o = o.json();
    assert!(ids_are_zero(&o["tokens"]), "{o}");
    assert_eq!(o["finish_reason"], "length");
    let memory = |name: &str| o["memory"][name].as_u64().unwrap_or_else(|| panic!("{name}: {o}"));
    assert!(memory("peak_rss_bytes") <= memory("planned_bytes"), "{o}");
    assert!(memory("planned_bytes") <= CAP, "{o}");
    // What was planned for the tokenizer, of which there is no smaller test, is taken.
    let spare = memory("planned_bytes") - memory("peak_rss_bytes");
    println!("{:.1} MiB of the plan were not used", spare as f64 / f64::from(1 << 20));
    assert!(spare < 64 << 20 || pictures, "{spare} bytes of the plan were not used: {o}");
    o
}

fn ids_are_zero(tokens: &Value) -> bool {
    let ids = common::ids(tokens);
    !ids.is_empty() && ids.iter().all(|&id| id == 0)
}

#[test]
fn the_35b_model_is_planned_within_3_gib() {
    let s = Scratch::new("35b-plan");
    let path = s.path("35b.gguf");
    assert!(write(&MOE_35B, &path) > 16 << 30);
    let p = plan(&path, "");
    println!("{}", run("plan --memory 3G", &[&"--model", &path]).stdout);
    assert_eq!(p["experts"], 40 * 256);
    // Gate, up, down: three matrices of 512 x 2048 weights, 4.5 bits each.
    assert_eq!(p["expert_slot_bytes"], 3 * 512 * 2048 / 32 * 18);
    let slots = p["expert_slots"].as_u64().expect("slots");
    assert!((400..1000).contains(&slots), "{p}");
    // KV cache: 10 layers, 2 heads of 256 for K and V, 2 bytes, 4096 tokens. State: 30 layers, 32 heads of 128 x 128.
    assert_eq!(p["lines"]["KV cache"], 10 * 2 * 2 * 256 * 2 * 4096);
    assert_eq!(p["lines"]["delta-rule state"], 30 * (32 * 128 * 128 + 3 * 8192) * 4);
    // The tower is streamed through ten slots, which leaves room for as many more experts as it would displace, but ten.
    let line = |p: &Value, name: &str| p["lines"][name].as_u64().unwrap_or_else(|| panic!("{name}: {p}"));
    assert_eq!((&p["vision_residency"], line(&p, "vision weights")), (&"streamed".into(), 0));
    assert_eq!(line(&p, "vision window") / p["expert_slot_bytes"].as_u64().expect("bytes"), 10);
    let resident = plan(&path, "--vision-residency resident");
    let displaced = line(&resident, "vision weights") / p["expert_slot_bytes"].as_u64().expect("bytes");
    let gained = slots - resident["expert_slots"].as_u64().expect("slots");
    println!("{slots} slots streamed, {gained} fewer resident");
    assert!((displaced - 12..=displaced - 8).contains(&gained), "{gained} slots for {displaced}");
    assert_eq!(p["lines"]["prefix state"], p["lines"]["delta-rule state"], "a copy");
    // Without pictures there is room for more experts, and a smaller cap has fewer.
    assert!(plan(&path, "--text-only")["expert_slots"].as_u64() > Some(slots + 10), "{p}");
    assert!(plan(&path, "--context 16384")["expert_slots"].as_u64() < Some(slots), "{p}");
    run("plan --memory 1G", &[&"--model", &path]).refused(4, &["a cap of 1024 MiB is too small", "need at least"]);
}

#[test]
fn the_1b_model_is_planned_and_runs() {
    let s = Scratch::new("1b");
    let path = s.path("1b.gguf");
    write(&DENSE_1B, &path);
    let p = plan(&path, "");
    println!("{}", run("plan --memory 3G", &[&"--model", &path]).stdout);
    assert_eq!((&p["experts"], &p["expert_slots"]), (&0.into(), &0.into()));
    let o = answer(&path, &["--max-tokens", "2"]);
    assert_eq!(o["completion_tokens"], 2);
}

/// Some 400 billion multiplications: three minutes with scalar kernels on two cores.
#[test]
#[ignore = "takes minutes"]
fn the_1b_model_sees() {
    let s = Scratch::new("1b-sees");
    let path = s.path("1b-sees.gguf");
    write(&DENSE_1B, &path);
    let picture = tests("demo/scene_083.png");
    let o = answer(&path, &["--max-tokens", "1", "--image", picture.to_str().expect("path")]);
    // One crop of 32 x 32 patches, a visual token for 16 of them, between its two marks; then "hello".
    let text = answer(&path, &["--max-tokens", "1"]);
    let tokens = |o: &Value| o["prompt_tokens"].as_u64().expect("a number");
    assert_eq!(tokens(&o) - tokens(&text), 64 + 2, "{o}");
}

#[test]
fn the_35b_model_runs_within_3_gib() {
    let s = Scratch::new("35b-run");
    let path = s.path("35b.gguf");
    write(&MOE_35B, &path);
    let o = answer(&path, &["--max-tokens", "2"]);
    let e = |name: &str| o["experts"][name].as_u64().unwrap_or_else(|| panic!("{name}: {o}"));
    // All routers say the same of all experts, so each layer uses its first eight, twice.
    assert_eq!(e("hits") + e("misses"), 2 * 40 * 8, "{o}");
    assert!(e("misses") >= 40 * 8 / 2 && e("bytes_demand") > 0, "{o}");
}
