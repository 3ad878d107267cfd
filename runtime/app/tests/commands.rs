//! The commands as a user meets them: what goes to standard output and standard error, and with which exit code.
//!
//! Answers are compared with transformers' (tests/goldens).

mod common;

use common::group::Group;
use common::{
    Outcome, Scratch, TIME_LIMIT, ask, finish, finish_within, forerun, ids, run, tests, tiny_dense, tiny_moe,
};
use forerun::model::Model;
use serde_json::Value;
use std::path::PathBuf;

fn goldens(model: &str, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(tests(format!("goldens/{model}/{kind}.json"))).expect("goldens");
    serde_json::from_str(&text).expect("goldens")
}

/// The system text and the prompt of a case that `forerun run` can ask: one turn of a user, pictures before text, no
/// tools, no video.
fn askable(case: &Value) -> Option<(Option<&str>, &str)> {
    if case["tools"].is_array() || case["is_video"] == true {
        return None;
    }
    let messages = case["messages"].as_array()?;
    let (system, user) = match &messages[..] {
        [user] => (None, user),
        [system, user] if system["role"] == "system" => (Some(system["content"].as_str()?), user),
        _ => return None,
    };
    assert_eq!(user["role"], "user");
    let prompt = match &user["content"] {
        Value::String(text) => text,
        Value::Array(parts) => {
            let (text, pictures) = parts.split_last()?;
            if pictures.iter().any(|p| p["type"] != "image") {
                return None;
            }
            text["text"].as_str()?
        }
        _ => return None,
    };
    Some((system, prompt))
}

/// Asks a golden case's question and compares the answer's tokens. Returns whether it could be asked.
fn compare(model: &PathBuf, case: &Value) -> bool {
    let Some((system, prompt)) = askable(case) else { return false };
    let mut c = forerun();
    c.args(["run", "--json", "--temperature", "0", "--max-tokens", "32", "--prompt", prompt, "--model"]).arg(model);
    if let Some(system) = system {
        c.args(["--system", system]);
    }
    if case["enable_thinking"] == true {
        c.arg("--think");
    }
    for file in case["files"].as_array().into_iter().flatten() {
        c.arg("--image").arg(tests("goldens").join(file.as_str().expect("path")));
    }
    if let Some(mode) = case["downsample_mode"].as_str() {
        c.args(["--detail", mode]);
    }
    if let Some(slices) = case["max_slice_nums"].as_u64() {
        c.args(["--max-slices", &slices.to_string()]);
    }
    let answer = finish(&mut c).json();
    let name = &case["name"];
    assert_eq!(ids(&answer["tokens"]), ids(&case["greedy_ids"]), "{name}");
    if let Some(n) = case["n_tokens"].as_u64() {
        assert_eq!(answer["prompt_tokens"], n, "{name}");
    }
    true
}

#[test]
fn answers_are_those_of_transformers() {
    for (model, path) in [("tiny-moe", tiny_moe()), ("tiny-dense", tiny_dense())] {
        for (kind, least) in [("text", 4), ("image", 17)] {
            let asked = goldens(model, kind).iter().filter(|case| compare(&path, case)).count();
            assert!(asked >= least, "{model}: only {asked} of the {kind} cases could be asked");
        }
    }
}

#[test]
fn json_says_what_was_said_and_how() {
    let o = ask("What is 3 plus 5?", "");
    assert_eq!(o["text"], "3 plus 5 is 8.");
    let tokens = ids(&o["tokens"]);
    assert_eq!(tokens.last(), Some(&1580), "the token that ended the answer");
    assert_eq!(o["completion_tokens"], tokens.len());
    assert_eq!(o["finish_reason"], "stop");
    assert!(o["prompt_tokens"].as_u64().unwrap() > 8);
    assert_eq!(o["prompt_tokens_details"]["cached_tokens"], 0, "there was none before");
    for time in ["load_ms", "vision_ms", "prefill_ms", "time_to_first_token_ms", "decode_ms", "tokens_per_second"] {
        assert!(o["timings"][time].as_f64().is_some_and(|t| t >= 0.0), "{time}: {o}");
    }
    assert!(o["timings"]["time_to_first_token_ms"].as_f64() >= o["timings"]["prefill_ms"].as_f64());
    let e = |name: &str| o["experts"][name].as_u64().unwrap_or_else(|| panic!("{name}: {o}"));
    assert_eq!(e("experts"), 8 * 32);
    // In prefill an expert is asked for once a chunk, in decode once a token.
    let decode = (tokens.len() as u64 - 1) * 8 * 4;
    let prefill_most = 8 * 32;
    assert!((decode + 8 * 4..=decode + prefill_most).contains(&(e("hits") + e("misses"))), "{o}");
    assert!(e("bytes_demand") > 0 && e("misses") > 0, "{o}");
    let planned = o["memory"]["planned_bytes"].as_u64().unwrap();
    assert!(o["memory"]["peak_rss_bytes"].as_u64().unwrap() <= planned, "{o}");
    assert!(o.get("thinking").is_none(), "{o}");
}

fn plainly(prompt: &str, args: &str) -> Outcome {
    let o = run(&format!("run --temperature 0 {args}"), &[&"--model", &tiny_moe(), &"--prompt", &prompt]);
    o.success();
    o
}

#[test]
fn words_go_to_stdout_and_the_rest_to_stderr() {
    let o = plainly("What is 3 plus 5?", "");
    assert_eq!(o.stdout, "3 plus 5 is 8.\n");
    let lines: Vec<_> = o.stderr.lines().collect();
    let [first, last] = lines[..] else { panic!("{o:?}") };
    assert!(first.starts_with("kernels ") && first.contains("experts kept in memory"), "{o:?}");
    assert!(last.contains("prompt tokens") && last.contains("tokens/s") && last.contains("misses"), "{o:?}");
}

#[test]
fn thoughts_are_not_part_of_the_answer() {
    let o = plainly("What is 2 + 3 + 4?", "--think");
    assert_eq!(o.stdout, "The sum is 9.\n");
    assert!(o.stderr.contains("2 + 3 = 5. 5 + 4 = 9."), "{o:?}");
    let o = ask("What is 2 + 3 + 4?", "--think");
    assert_eq!((&o["text"], &o["thinking"]), (&"The sum is 9.".into(), &"2 + 3 = 5. 5 + 4 = 9.".into()));
}

#[test]
fn an_answer_ends_after_max_tokens() {
    let o = ask("What is 3 plus 5?", "--max-tokens 1");
    assert_eq!((ids(&o["tokens"]), &o["finish_reason"]), (vec![18], &"length".into()));
    assert_eq!(o["text"], "3");
}

#[test]
fn an_answer_ends_where_the_context_does() {
    let whole = ask("What is 3 plus 5?", "");
    let prompt = whole["prompt_tokens"].as_u64().unwrap();
    let o = ask("What is 3 plus 5?", &format!("--context {}", prompt + 2));
    assert_eq!(o["finish_reason"], "length");
    assert_eq!(ids(&o["tokens"]), &ids(&whole["tokens"])[..3], "two more fit, and one needs no place");
}

#[test]
fn a_seed_chooses_the_answer() {
    let hot = |seed: u32, args: &str| {
        let args = format!("run --json --max-tokens 12 --temperature 1.5 --top-p 1 --seed {seed} {args}");
        let o = run(&args, &[&"--model", &tiny_moe(), &"--prompt", &"Tell me a story."]).json();
        ids(&o["tokens"])
    };
    let first = hot(1, "");
    assert_eq!(first, hot(1, "--threads 1 --slots 8 --no-predict"), "same seed, other threads and slots");
    assert!((2..6).any(|seed| hot(seed, "") != first), "five seeds gave one answer");
    let greedy = ids(&ask("Tell me a story.", "--max-tokens 12")["tokens"]);
    assert_eq!(hot(1, "--top-k 1"), greedy, "only one word to choose from");
    let cold = run(
        "run --json --max-tokens 12 --temperature 0 --seed 9",
        &[&"--model", &tiny_moe(), &"--prompt", &"Tell me a story."],
    );
    assert_eq!(ids(&cold.json()["tokens"]), greedy);
}

#[test]
fn pread_and_io_uring_read_the_same() {
    let o = ask("What is 3 plus 5?", "--slots 8");
    let p = ask("What is 3 plus 5?", "--slots 8 --io pread");
    assert_eq!((&o["tokens"], &p["io"]), (&p["tokens"], &"pread".into()));
}

/// A process that may open one file beside standard input and output gets neither a second view of the model file, with
/// O_DIRECT, nor a ring: the answer is the same, and the reasons are told.
#[test]
fn without_o_direct_and_io_uring_it_goes_on() {
    let mut c = std::process::Command::new("sh");
    c.args(["-c", "ulimit -n 4; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_forerun"), "run", "--temperature", "0"]);
    c.arg("--model").arg(tiny_moe()).args(["--prompt", "What is 3 plus 5?"]);
    let o = finish(&mut c);
    assert_eq!(o.success().stdout, "3 plus 5 is 8.\n");
    assert!(o.stderr.contains("pread since io_uring is not available"), "{o:?}");
    assert!(o.stderr.contains("no O_DIRECT"), "{o:?}");
    let o = finish(c.args(["--io", "uring"]));
    o.refused(1, &["io_uring"]);
}

fn chat(lines: &str, args: &str) -> Outcome {
    let mut c = forerun();
    c.args(["chat", "--temperature", "0", "--context", "512", "--model"]).arg(tiny_moe()).args(args.split_whitespace());
    finish_within(TIME_LIMIT, &mut c, lines.as_bytes())
}

#[test]
fn a_chat_remembers() {
    // The golden conversation of text_04, turn by turn.
    let o = chat("Hello!\nWhich day comes after Monday?\n", "");
    assert_eq!(o.success().stdout, "Hello! How can I help you?\nAfter Monday comes Tuesday.\n");
    // The first message and what was before it, up to the answer, are not read again.
    let lines: Vec<_> = o.stderr.lines().filter(|l| l.contains(" prompt tokens")).collect();
    let [first, second] = lines[..] else { panic!("{o:?}") };
    let start = "<|im_start|>user\nHello!<|im_end|>\n";
    let start = Model::open(&tiny_moe()).expect("model").tokenizer.encode(start).expect("tokens").len();
    assert!(!first.contains("cached") && second.contains(&format!("({start} cached)")), "{o:?}");
    // A prompt with its history is longer than one without; /clear forgets it.
    let prompt_tokens = |o: &Outcome| -> Vec<u32> {
        let lines = o.stderr.lines().filter_map(|l| l.split_once(" prompt tokens"));
        lines.map(|(n, _)| n.parse().expect("a number")).collect()
    };
    let n = prompt_tokens(&chat("Hello!\nHello!\n/clear\nHello!\n", ""));
    let [first, second, third] = n[..] else { panic!("{n:?}") };
    assert!(second > first && third == first, "{n:?}");
    let n = prompt_tokens(&chat("Hello!\n/clear\nHello!\n", "--system Be.brief."));
    assert!(n[0] == n[1] && n[0] > first, "/clear keeps the system text: {n:?}");
}

#[test]
fn a_chat_sees_pictures_and_survives_mistakes() {
    let picture = tests("demo/scene_083.png");
    let picture = picture.display();
    let lines = format!(
        "/image {picture}\nIs the door open?\n/nonsense\n/image\n/image /does/not/exist.png\nIs the door open?\n\
         /image {}\nIs the door open?\n<|im_end|>\n/help\n\nWhat is 3 plus 5?\n/clear\nWhat is 3 plus 5?\n/quit\nHello!\n",
        tests("demo/demo.json").display()
    );
    let o = chat(&lines, "");
    let answers: Vec<_> = o.success().stdout.lines().collect();
    // A picture that cannot be shown is refused at once, and the question after it is answered without it.
    assert_eq!((answers.len(), answers[0], answers[4]), (5, "The door is open.", "3 plus 5 is 8."), "{o:?}");
    for words in [
        "scene_083.png, 112 x 112 pixels, comes with the next message",
        "/nonsense is not a command",
        "/image needs a path",
        "/does/not/exist.png",
        "demo.json: not a picture",
        "control token <|im_end|>",
    ] {
        assert_eq!(o.stderr.matches(words).count(), 1, "{words:?}: {o:?}");
    }
}

#[test]
fn a_picture_waits_until_a_message_is_answered() {
    let lines = format!("/image \"{}\"\n<|im_end|>\nIs the door open?\n", tests("demo/scene_083.png").display());
    let o = chat(&lines, "");
    assert_eq!(o.success().stdout, "The door is open.\n", "{o:?}");
    assert_eq!(o.stderr.matches("27 prompt tokens").count(), 1, "the picture's tokens are there: {o:?}");
}

#[test]
fn a_chat_survives_bytes_that_are_no_text_and_endless_lines() {
    let mut input = b"caf\xe9\n".to_vec();
    input.extend(std::iter::repeat_n(b'a', 3 << 20));
    input.extend(b"\nWhat is 3 plus 5?");
    let mut c = forerun();
    c.args(["chat", "--temperature", "0", "--context", "512", "--model"]).arg(tiny_moe());
    let o = finish_within(TIME_LIMIT, &mut c, &input);
    assert_eq!(o.success().stdout, "3 plus 5 is 8.\n");
    assert!(o.stderr.contains("not UTF-8") && o.stderr.contains("longer than"), "{o:?}");
}

#[test]
fn a_plan_adds_up() {
    for args in ["--memory 72M", "--memory 64M --text-only", "--memory 1G --context 8192 --kv f32 --detail 4x", ""] {
        let plan = |more: &str| run(&format!("plan {args} {more}"), &[&"--model", &tiny_moe()]);
        let p = plan("--json").json();
        let bytes = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("{v} in {p}"));
        let sum: u64 = p["lines"].as_object().expect("lines").values().map(bytes).sum();
        assert_eq!(sum, bytes(&p["total_bytes"]), "{args}");
        assert!(sum <= bytes(&p["cap_bytes"]), "{args}: {p}");
        let enforced = p["cgroup_limit_bytes"].as_u64().is_some_and(|limit| limit <= bytes(&p["cap_bytes"]));
        assert_eq!(p["enforced"], enforced, "{p}");
        assert_eq!(bytes(&p["expert_slots"]) * bytes(&p["expert_slot_bytes"]), bytes(&p["lines"]["expert slots"]));
        assert_eq!(bytes(&p["lines"]["visual features"]) == 0, args.contains("text-only"));

        let text = plan("").success().stdout.clone();
        let line = |name: &str| -> f64 {
            let l = text.lines().find_map(|l| l.trim().strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            l.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{name}: {text}"))
        };
        let names = p["lines"].as_object().expect("lines");
        for (name, value) in names.iter().filter(|(_, v)| bytes(v) > 0) {
            // Without a cap in the arguments, what is free may differ between two runs.
            let same = (line(name) - bytes(value) as f64 / f64::from(1 << 20)).abs() < 0.006;
            assert!(same, "{name}: {text}");
        }
        assert!((line("sum") - sum as f64 / f64::from(1 << 20)).abs() < 0.006, "{text}");
    }
}

/// What `docs/memory.md` promises to scripts: these keys and lines, in this order, for every model.
#[test]
fn a_plan_for_scripts_keeps_its_names() {
    let keys = "model file_bytes cap_bytes total_bytes enforced cgroup_limit_bytes lines vision_residency context chunk kv \
                expert_slots expert_slot_bytes experts";
    let lines = "text weights,vision weights,vision window,KV cache,delta-rule state,prefix state,activations,visual features,pictures,I/O buffers,\
                 tokenizer,program,page tables,expert directory,expert slots";
    let doc = std::fs::read_to_string(tests("../docs/memory.md")).expect("docs/memory.md");
    for model in [tiny_moe(), tiny_dense()] {
        for args in ["plan --json", "plan --json --text-only --kv f32 --memory 100M"] {
            let p = run(args, &[&"--model", &model]).json();
            let names = |v: &Value| v.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&p).join(" "), keys);
            assert_eq!(names(&p["lines"]).join(","), lines);
            assert!(p["lines"].as_object().expect("lines").values().all(Value::is_u64), "{p}");
        }
    }
    for name in keys.split(' ') {
        assert!(doc.contains(&format!("| `{name}` |")), "{name} is not in docs/memory.md");
    }
    for name in lines.split(',') {
        assert!(doc.contains(&format!("| {name} |")), "{name} is not in docs/memory.md");
    }
}

/// A limit of the kernel's that is no larger than the cap enforces it; a larger one does not.
#[test]
fn a_plan_says_whether_the_kernel_enforces_the_cap() {
    let group = match Group::new("enforced", 64 << 20) {
        Ok(group) => group,
        Err(why) => return println!("skipped: no memory cgroup ({why})"),
    };
    for (memory, enforced) in [("64M", true), ("63M", false), ("80M", true)] {
        let mut c = forerun();
        c.args(["plan", "--json", "--text-only", "--context", "64", "--memory", memory, "--model"]).arg(tiny_moe());
        let p = group.finish(TIME_LIMIT, &c).json();
        assert_eq!((&p["enforced"], &p["cgroup_limit_bytes"]), (&enforced.into(), &(64 << 20).into()), "{memory}");
    }
}

#[test]
fn the_tower_takes_what_the_plan_says() {
    let plan = |args: &str| run(&format!("plan --json {args}"), &[&"--model", &tiny_moe()]).json();
    let line = |p: &Value, name: &str| p["lines"][name].as_u64().unwrap_or_else(|| panic!("{name}: {p}"));
    let tower = |p: &Value| (line(p, "vision weights"), line(p, "vision window"));
    let resident = plan("--memory 1G --vision-residency resident");
    let streamed = plan("--memory 1G --vision-residency streamed");
    let text = plan("--memory 1G --text-only");
    let (weights, _) = tower(&resident);
    let (_, window) = tower(&streamed);
    assert_eq!((tower(&resident), tower(&streamed), tower(&text)), ((weights, 0), (0, window), (0, 0)));
    assert!(window > 0 && window < weights / 4, "{window} of {weights}");
    let said = |p: &Value| p["vision_residency"].clone();
    assert_eq!((said(&resident), said(&streamed), said(&text)), ("resident".into(), "streamed".into(), Value::Null));
    // All experts fit beside it; some more would fit without; half of them fit beside it; only without is there a plan.
    let total = |p: &Value| p["total_bytes"].as_u64().expect("a sum");
    let slots = |p: &Value| p["expert_slots"].as_u64().expect("slots");
    let floor = |residency: &str| {
        let o = run(&format!("plan --memory 1M --vision-residency {residency}"), &[&"--model", &tiny_moe()]);
        let (_, rest) = o.refused(4, &["need at least"]).stderr.split_once("need at least ").expect("a floor");
        rest.split_once(" MiB").expect("MiB").0.parse::<u64>().expect("a number")
    };
    assert_eq!((said(&plan("--memory 1G")), slots(&resident)), ("resident".into(), 256));
    assert!(floor("auto") == floor("streamed") && floor("streamed") < floor("resident"));
    let mut seen = Vec::new();
    for mib in floor("auto")..=total(&resident) / (1 << 20) + 1 {
        let p = plan(&format!("--memory {mib}M"));
        if mib < floor("resident") {
            assert_eq!(said(&p), "streamed", "{p}");
        } else {
            let r = slots(&plan(&format!("--memory {mib}M --vision-residency resident")));
            assert_eq!(said(&p), if r < 128 { "streamed" } else { "resident" }, "{mib} MiB, {r} slots: {p}");
        }
        seen.push(said(&p));
    }
    assert!(seen.contains(&"streamed".into()) && seen.contains(&"resident".into()));
    // Without experts there is nothing to gain by streaming.
    let dense = |args: &str| run(&format!("plan --json {args}"), &[&"--model", &tiny_dense()]).json();
    assert_eq!(said(&dense("--memory 200M")), "resident");
    assert_eq!(said(&dense("--memory 200M --vision-residency streamed")), "streamed");
}

#[test]
fn the_demo_is_right() {
    let o = finish(forerun().arg("demo").current_dir(tests("..")));
    assert!(o.success().stdout.contains("All 4 answers are right."), "{o:?}");
    assert!(o.stdout.contains("memory plan") && o.stdout.contains("misses"), "{o:?}");
    // With an answer that is wrong it says so.
    let scratch = Scratch::new("demo");
    let text = std::fs::read_to_string(tests("demo/demo.json")).unwrap();
    let text = text.replace("../models", tests("models").to_str().unwrap()).replace("The door is open.", "It is shut.");
    let text = text.replace("\"picture\": \"", &format!("\"picture\": \"{}/", tests("demo").display()));
    scratch.file("demo.json", text.as_bytes());
    let o = run("demo --dir", &[&scratch.path("")]);
    o.refused(5, &["1 of 4 answers are wrong"]);
    assert!(o.stdout.contains("wrong, expected: It is shut."), "{o:?}");
}

/// What is told of each layer: a share in percent, and most of what the later layers choose is foreseen.
#[track_caller]
fn check_recall(stderr: &str) {
    let line = stderr.lines().find_map(|l| l.strip_prefix("foreseen of the answer's choices, % in each layer: "));
    let shares: Vec<f64> = line.unwrap_or_else(|| panic!("{stderr}")).split(' ').map(|n| n.parse().unwrap()).collect();
    assert!(shares.len() == 8 && shares.iter().all(|s| (0.0..=100.0).contains(s)), "{stderr}");
    assert!(shares[1..].iter().sum::<f64>() > 7.0 * 25.0, "{stderr}");
}

#[test]
fn recall_is_told_layer_by_layer() {
    let recall = |args: &str| ask("Tell me a story.", args)["experts"]["recall_per_layer"].clone();
    let shares: Vec<f64> = serde_json::from_value(recall("--slots 40 --max-tokens 24")).expect("numbers");
    assert!(shares.len() == 8 && shares.iter().all(|s| (0.0..=1.0).contains(s)), "{shares:?}");
    // Four guesses among 32 experts are right in an eighth of all cases if they are blind.
    assert!(shares[1..].iter().all(|&s| s > 0.25), "{shares:?}");
    assert_eq!(recall("--no-predict --max-tokens 4"), serde_json::json!(vec![(); 8]), "nothing was foreseen");
}

#[test]
fn routes_are_written_down() {
    let scratch = Scratch::new("route");
    let trace = scratch.path("routes.csv");
    let args = "route --prompt hello --max-tokens 4 --temperature 0 --trace";
    let o = run(args, &[&trace, &"--model", &tiny_moe()]);
    o.success();
    let text = std::fs::read_to_string(&trace).unwrap();
    assert!(
        text.contains("# n_layer=8 n_expert=32 n_expert_used=4\nturn,phase,step,layer,slot,expert,weight\n"),
        "{text}"
    );
    let rows: Vec<Vec<f64>> =
        text.lines().skip(3).map(|l| l.split(',').map(|v| v.parse().unwrap()).collect()).collect();
    // Every token has four different experts in each of eight layers, the heaviest first; weights sum to one.
    assert!(rows.len() > 32 && rows.len().is_multiple_of(32), "{} rows", rows.len());
    for choice in rows.chunks(4) {
        let experts: std::collections::BTreeSet<u64> = choice.iter().map(|r| r[5] as u64).collect();
        assert!(experts.len() == 4 && experts.iter().all(|&e| e < 32), "{choice:?}");
        assert!(choice.windows(2).all(|w| w[0][6] >= w[1][6]), "{choice:?}");
        assert!((choice.iter().map(|r| r[6]).sum::<f64>() - 1.0).abs() < 1e-5, "{choice:?}");
    }
    check_recall(&o.stderr);
    // Three tokens of the answer were computed, after the whole prompt.
    let steps = |phase: f64| rows.iter().filter(|r| r[1] == phase).map(|r| r[2] as u64).max();
    assert_eq!(steps(1.0), Some(2));
    assert!(rows.windows(2).all(|w| w[0][1] <= w[1][1]), "prompt first");

    run(args, &[&trace, &"--model", &tiny_dense()]).refused(3, &["has no experts to choose"]);
    run(args, &[&"/nowhere/routes.csv", &"--model", &tiny_moe()]).refused(3, &["/nowhere/routes.csv"]);
}

#[test]
fn help_lists_the_exit_codes() {
    let o = run("--help", &[]);
    for code in
        ["0  done", "1  storage", "2  wrong command line", "3  bad input", "4  does not fit", "5  a check failed"]
    {
        assert!(o.success().stdout.contains(code), "{code}: {o:?}");
    }
    for command in ["run", "chat", "plan", "verify", "demo"] {
        assert!(run(&format!("{command} --help"), &[]).success().stdout.contains("Usage: forerun"), "{command}");
    }
    for args in ["", "nonsense", "run", "run --prompt x --temperature -1", "run --prompt x --chunk 0"] {
        assert_eq!(run(args, &[]).code, Some(2), "{args}");
    }
}

#[test]
fn kernels_can_be_forced() {
    let with = |name: &str| {
        let mut c = forerun();
        c.env("FORERUN_KERNELS", name).args(["run", "--json", "--temperature", "0", "--prompt", "What is 3 plus 5?"]);
        finish(c.arg("--model").arg(tiny_moe()))
    };
    let o = with("scalar").json();
    assert_eq!((&o["kernels"], &o["text"]), (&"scalar".into(), &"3 plus 5 is 8.".into()));
    with("nonsense").refused(3, &["\"nonsense\"", "expected one of ", "scalar"]);
}

#[test]
fn the_model_may_come_from_the_environment() {
    let o = finish(forerun().args(["plan"]).env("FORERUN_MODEL", tiny_dense()));
    assert!(o.success().stdout.contains("memory plan"), "{o:?}");
    run("plan", &[]).refused(2, &["--model FILE", "FORERUN_MODEL"]);
    finish(forerun().args(["plan"]).env("FORERUN_MODEL", "")).refused(2, &["--model FILE"]);
    run("plan --context 8193", &[&"--model", &tiny_moe()])
        .refused(4, &["a context of 8193 tokens: expected 1 to 8192"]);
}
