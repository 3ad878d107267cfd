//! The plan's memory is locked where that is permitted, and where it is not the run goes on and says why.
//!
//! Relies on `sh` and, where the tests may lock whatever the limit, on `setpriv` to give that right away. Alone in its
//! program: the kernel counts the registered buffers of all of a user's rings together.

mod common;

use common::{finish, forerun, tiny_moe};
use std::process::Command;

/// More than the mapping of the question's run takes, and no more than systemd lets a user lock by itself.
const MAPPING_KIB: u64 = 8192;

/// Words before a command that take the right to exceed the limit from it; `None` if nothing does.
fn unprivileged() -> Option<&'static [&'static str]> {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let without: [&[&str]; 2] = [&[], &["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]];
    without.into_iter().find(|words| {
        let command = [words, &["grep", "CapEff", "/proc/self/status"][..]].concat();
        let Ok(o) = Command::new(command[0]).args(&command[1..]).output() else { return false };
        let text = String::from_utf8_lossy(&o.stdout);
        let bits = text.trim().strip_prefix("CapEff:").and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        bits.is_some_and(|bits| bits & CAP_IPC_LOCK == 0)
    })
}

/// `forerun COMMAND` under a limit of `kib` KiB of locked memory.
fn limited(kib: u64, privilege: &[&str], command: &[&str]) -> Command {
    let mut c = Command::new("sh");
    c.args(["-c", "ulimit -l \"$0\" && exec \"$@\"", &kib.to_string()]).args(privilege);
    c.arg(env!("CARGO_BIN_EXE_forerun")).args(command).arg("--model").arg(tiny_moe());
    c.env_remove("FORERUN_MODEL").env_remove("FORERUN_KERNELS").env("RUST_LOG", "info");
    c
}

#[test]
fn memory_is_locked_where_the_limit_allows_it() {
    let Some(privilege) = unprivileged() else { return println!("skipped: no limit binds this user, and no setpriv") };
    let words = "run --temperature 0 --context 64 --chunk 4 --slots 8 --prompt Hello!";
    let words: Vec<&str> = words.split(' ').collect();
    let question = [&words[..], &["--json"]].concat();
    let free = finish(forerun().args(&question).arg("--model").arg(tiny_moe())).json();

    // Refused: the run goes on, and says so once, however many engines it makes.
    let o = finish(&mut limited(64, privilege, &question));
    let refused = o.json();
    assert_eq!((&refused["memory"]["locked"], &refused["tokens"]), (&false.into(), &free["tokens"]));
    for o in [&o, &finish(&mut limited(64, privilege, &["verify", "--tokens", "2"]))] {
        assert_eq!(o.success().stderr.matches("LimitMEMLOCK=infinity").count(), 1, "{o:?}");
    }
    let o = finish(&mut limited(64, privilege, &words));
    assert!(!o.success().stderr.contains("and locked"), "{o:?}");

    // Permitted by a limit that holds the mapping, which the ring's registered buffers do not share.
    let o = finish(&mut limited(MAPPING_KIB, privilege, &question));
    if o.code != Some(0) && o.stderr.contains("ulimit") {
        return println!("partly skipped: the limit cannot be {MAPPING_KIB} KiB here: {}", o.stderr);
    }
    let locked = o.json();
    assert_eq!((&locked["memory"]["locked"], &locked["tokens"]), (&true.into(), &free["tokens"]));
    assert_eq!(locked["io"], free["io"]);
    assert!(!o.stderr.contains("LimitMEMLOCK"), "{o:?}");
    let o = finish(&mut limited(MAPPING_KIB, privilege, &words));
    assert!(o.success().stderr.contains("MiB in all and locked"), "{o:?}");
}
