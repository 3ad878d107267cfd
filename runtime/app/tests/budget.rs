//! The cap holds: what the kernel counts never exceeds it, whatever the cap, with text and pictures, under a real memory
//! limit too.
//!
//! Relies on VmHWM as the program reports it, which counts its own code as well, and on a cgroup where there is one. The
//! program under test is a debug build, which is larger than a release build: what holds here holds there.

mod common;

use common::group::Group;
use common::{Scratch, TIME_LIMIT, finish, forerun, tests, tiny_dense, tiny_moe};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// What is asked: words of the command line.
fn questions() -> Vec<Vec<String>> {
    let split = |s: &str| s.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let mut all = vec![
        split("--prompt Hello! --context 64 --chunk 4 --max-tokens 8"),
        split("--prompt Hello! --max-tokens 64"),
        split("--prompt Hello! --max-tokens 8 --threads 8 --chunk 512"),
    ];
    // As much text as the context takes, of tokens that are letters each.
    let mut long = split("--max-tokens 1 --context 1024 --prompt");
    long.push("q z".repeat(320));
    all.push(long);
    for (picture, detail) in [
        ("goldens/pictures/camera640_4x_0.png", "4x"),
        ("goldens/photos/astronaut.png", "16x"),
        ("demo/scene_083.png", "16x"),
    ] {
        let mut q = split("--prompt What? --max-tokens 4 --image");
        q.extend([tests(picture).display().to_string(), "--detail".into(), detail.into()]);
        all.push(q.clone());
        let mut streamed = q.clone();
        streamed.extend(split("--vision-residency streamed"));
        all.push(streamed);
        if detail == "4x" {
            q.extend(["--max-slices".into(), "20".into()]);
            all.push(q);
        }
    }
    all
}

fn ask(question: &[String], model: &Path, memory: &str) -> Command {
    let mut c = forerun();
    c.args(["run", "--json", "--temperature", "0", "--memory", memory, "--model"]).arg(model).args(question);
    c
}

/// The smallest cap that `question` says it can do with, MiB.
fn floor_mib(question: &[String], model: &Path) -> u64 {
    let o = finish(&mut ask(question, model, "1M"));
    o.refused(4, &["too small"]);
    let (_, rest) = o.stderr.split_once("need at least ").expect("a floor");
    rest.split_once(" MiB").expect("MiB").0.parse().expect("a number")
}

#[test]
fn resident_memory_stays_under_the_cap() {
    for model in [tiny_moe(), tiny_dense()] {
        for question in questions() {
            let floor = floor_mib(&question, &model);
            let mut answer = None;
            for cap in [floor, floor + 1, floor + 7, 200] {
                let o = finish(&mut ask(&question, &model, &format!("{cap}M"))).json();
                let memory = |name: &str| o["memory"][name].as_u64().unwrap_or_else(|| panic!("{name}: {o}"));
                let (peak, planned) = (memory("peak_rss_bytes"), memory("planned_bytes"));
                let shown: String = question.join(" ").chars().take(100).collect();
                println!("{shown}: cap {cap} MiB, planned {planned}, peak {peak}");
                assert!(planned <= cap * MIB && memory("cap_bytes") == cap * MIB, "{shown}: {o}");
                assert!(peak <= planned, "{shown}: {peak} bytes resident, {planned} planned under {cap} MiB");
                // The plan is no wild guess either: what it takes itself is touched.
                assert!(planned - peak < 24 * MIB + planned / 4, "{shown}: {peak} of {planned} bytes were used");
                let tokens = o["tokens"].clone();
                assert_eq!(*answer.get_or_insert(tokens.clone()), tokens, "the cap changes no answer");
            }
        }
    }
}

#[test]
fn a_limit_as_large_as_the_cap_is_enough() {
    let s = Scratch::new("cgroup");
    // A copy, so that its pages are in nobody's page cache yet.
    let model = s.path("model.gguf");
    std::fs::copy(tiny_moe(), &model).expect("copy");
    for (i, question) in questions().iter().enumerate() {
        let cap = floor_mib(question, &model) + 1;
        let group = match Group::new(&format!("cap{i}"), cap * MIB) {
            Ok(group) => group,
            Err(why) => {
                println!("skipped: no memory cgroup ({why})");
                return;
            }
        };
        let o = group.finish(TIME_LIMIT, &ask(question, &model, &format!("{cap}M")));
        assert_eq!((o.signal, o.code), (None, Some(0)), "under {cap} MiB: {o:?}");
        let expected = finish(&mut ask(question, &model, "300M")).json();
        assert_eq!(o.json()["tokens"], expected["tokens"]);
        if let Some(peak) = group.peak_bytes() {
            println!("cap {cap} MiB, charged at most {:.1} MiB", peak as f64 / MIB as f64);
            assert!(peak <= cap * MIB, "{peak} bytes charged under {cap} MiB");
        }
    }
}

/// Without `--memory`, the cap comes from the limit.
#[test]
fn the_limit_sets_the_cap() {
    let group = match Group::new("default", 64 * MIB) {
        Ok(group) => group,
        Err(why) => return println!("skipped: no memory cgroup ({why})"),
    };
    let mut c = forerun();
    c.args(["run", "--json", "--temperature", "0", "--prompt", "What is 3 plus 5?", "--model"]).arg(tiny_moe());
    let o = group.finish(TIME_LIMIT, &c).json();
    assert_eq!(o["memory"]["cap_bytes"], 64 * MIB / 5 * 4);
    assert_eq!(o["text"], "3 plus 5 is 8.");
    let mut c = forerun();
    c.args(["verify", "--tokens", "4", "--model"]).arg(tiny_moe());
    group.finish(TIME_LIMIT, &c).success();
}
