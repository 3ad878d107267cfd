//! Thin safe wrappers around system calls, and what the machine says about itself.
//!
//! Relies on `libc` and on the text files in `/proc` and `/sys/fs/cgroup`. Never keeps state beyond the first CPU mask.

mod affinity;
mod file;
pub mod memory;
mod team;

pub use affinity::{available_cpus, available_threads, pin_current_thread, unpin_current_thread};
pub use file::{cached_bytes, drop_page_cache, read_randomly};
pub(crate) use file::{direct_align, drop_cached};
pub use memory::{cgroup_limit_bytes, cgroup_peak_bytes, memory_available_bytes, peak_rss_bytes};
pub(crate) use team::{THREADS_MAX, Team};

use std::time::Instant;

use forerun_engine::ports::Clock;

/// Bytes in a page of memory: 4096, or 16384 and 65536 on some Arm kernels.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf() reads a constant and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Names of the CPU's features that choose a kernel variant, as compilers spell them; for display.
pub fn cpu_features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! look {
        ($detected:ident: $($name:tt)*) => { $(if std::arch::$detected!($name) { found.push($name); })* };
    }
    #[cfg(target_arch = "x86_64")]
    look!(is_x86_feature_detected: "avx2" "fma" "f16c" "avx512f" "avx512vnni" "avxvnni");
    #[cfg(target_arch = "aarch64")]
    {
        // Linux and compilers name the same features differently; /proc/cpuinfo's names are the ones people look up.
        look!(is_aarch64_feature_detected: "neon" "dotprod" "i8mm" "fp16");
        for name in &mut found {
            match *name {
                "neon" => *name = "asimd",
                "dotprod" => *name = "asimddp",
                _ => {}
            }
        }
    }
    found
}

/// Time since it was made, from the kernel's monotone clock.
#[derive(Debug, Clone, Copy)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// A clock that starts at 0 now.
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now_us(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_runs_at_the_right_speed() {
        let clock = MonotonicClock::new();
        let start = clock.now_us();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let elapsed_us = clock.now_us() - start;
        assert!((20_000..2_000_000).contains(&elapsed_us), "{elapsed_us} us");
    }

    #[test]
    fn features_are_those_of_cpuinfo() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let line = cpuinfo.lines().find(|l| l.starts_with("flags") || l.starts_with("Features")).unwrap_or("");
        let words: Vec<_> = line.split_whitespace().map(|w| w.replace('_', "")).collect();
        // "fp16" has two names in cpuinfo (fphp, asimdhp); the rest match.
        for name in cpu_features().into_iter().filter(|&n| n != "fp16") {
            assert!(words.iter().any(|w| w == name), "{name} is not in /proc/cpuinfo: {line}");
        }
    }
}
