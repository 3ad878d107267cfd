//! A real memory limit around a run: the kernel ends what exceeds it.

use super::{Outcome, finish_within};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A memory cgroup of version 1 or 2, removed when dropped.
pub struct Group {
    dir: PathBuf,
    peak: &'static str,
}

impl Group {
    /// A group limited to `bytes`; why not, if that is not possible here.
    pub fn new(name: &str, bytes: u64) -> Result<Self, String> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (root, limit, peak) = if v1.is_dir() {
            (v1, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max", "memory.peak")
        };
        let dir = root.join(format!("forerun-test-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let group = Self { dir, peak };
        let path = group.dir.join(limit);
        std::fs::write(&path, bytes.to_string()).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(group)
    }

    /// Runs `command` inside, to its end, for at most `limit`.
    pub fn finish(&self, limit: Duration, command: &Command) -> Outcome {
        let mut c = Command::new("sh");
        c.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        for name in ["FORERUN_MODEL", "FORERUN_KERNELS", "RUST_LOG"] {
            c.env_remove(name);
        }
        finish_within(limit, c.arg(command.get_program()).args(command.get_args()), b"")
    }

    /// The most it was charged with, bytes; `None` where the kernel does not say.
    pub fn peak_bytes(&self) -> Option<u64> {
        std::fs::read_to_string(self.dir.join(self.peak)).ok()?.trim().parse().ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel lets go of an ended process's group a moment later.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
