//! Both programs in turn, each turn a process of its own, so that neither has memory or warm caches of the other.

use crate::{Error, SpeedArgs, Work, median};
use serde_json::Value;
use std::process::Command;

#[derive(Default)]
struct Rounds {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Runs `command` with the arguments for `work`, adds the rounds that it prints as JSON to `rounds`, and returns what
/// it says on its error stream.
fn turn(command: &mut Command, work: &Work, rounds: &mut Rounds) -> Result<String, Error> {
    for (name, n) in
        [("prefill", work.prefill), ("decode", work.decode), ("threads", work.threads), ("rounds", work.rounds)]
    {
        command.arg(format!("--{name}={n}"));
    }
    let out = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if !out.status.success() {
        return Err(format!("{}: {}\n{said}", command.get_program().display(), out.status).into());
    }
    let json: Value = serde_json::from_slice(&out.stdout)?;
    for (key, into) in [("prefill", &mut rounds.prefill), ("decode", &mut rounds.decode)] {
        // With experts in memory, and from storage.
        let list = json[format!("{key}_rounds")].as_array().or_else(|| json[key]["rounds"].as_array());
        let list = list.ok_or_else(|| format!("no rounds of {key} in {json}"))?;
        into.extend(list.iter().filter_map(Value::as_f64));
    }
    Ok(said)
}

/// Runs the command.
pub fn run(args: &SpeedArgs) -> Result<(), Error> {
    let (mut ours, mut theirs) = (Rounds::default(), Rounds::default());
    let w = &args.work;
    for n in 0..args.turns {
        let mut llama = Command::new(std::env::current_exe()?);
        let said = turn(llama.arg("llama").arg("--plain").arg(&args.files.plain), w, &mut theirs)?;
        if n == 0 {
            // Which code llama.cpp chose shows in the names of its weight buffers.
            said.lines().filter(|l| l.contains("model buffer size")).for_each(|l| println!("{l}"));
        }
        let mut bench = Command::new(&args.forerun);
        bench.args(["bench", "--json", "--model"]).arg(&args.files.packed);
        match &args.memory {
            Some(memory) => bench.arg("--memory").arg(memory),
            None => bench.arg("--resident"),
        };
        turn(&mut bench, w, &mut ours)?;
        eprintln!("turn {} of {} done", n + 1, args.turns);
    }
    println!("{} threads, {} turns of {} rounds, tokens/s", w.threads, args.turns, w.rounds);
    for (what, n, a, b) in
        [("prefill", w.prefill, &ours.prefill, &theirs.prefill), ("decode", w.decode, &ours.decode, &theirs.decode)]
    {
        println!("{what} of {n} tokens");
        println!("  forerun    median {:8.2}  rounds {a:.2?}", median(a));
        println!("  llama.cpp  median {:8.2}  rounds {b:.2?}", median(b));
        println!("  ratio      {:.3}", median(a) / median(b));
    }
    Ok(())
}
