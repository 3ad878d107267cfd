//! Memory as the kernel counts it: this process, the machine, and the cgroup's limit.
//!
//! Relies on `/proc` and `/sys/fs/cgroup`, and answers `None` where they are missing.

use std::fs;
use std::path::Path;

/// The number after `key:` in a file of lines such as `VmHWM:    1234 kB`, in bytes.
fn kib_line(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The most memory this process has had resident (VmHWM), in bytes.
pub fn peak_rss_bytes() -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
}

/// The memory this process has resident now (VmRSS), in bytes.
pub fn rss_bytes() -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS")
}

/// The memory that the machine can still give without swapping (MemAvailable), in bytes.
pub fn memory_available_bytes() -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// The smallest memory limit of this process's cgroup and the ones above it, v2 or v1, in bytes; `None` without one.
pub fn cgroup_limit_bytes() -> Option<u64> {
    limit_in(&fs::read_to_string("/proc/self/cgroup").ok()?, Path::new("/sys/fs/cgroup"))
}

/// The most memory, page cache included, that this process's cgroup has been charged with since it was made or its mark
/// was reset, in bytes; `None` where the kernel does not tell.
pub fn cgroup_peak_bytes() -> Option<u64> {
    let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
    values(&membership, Path::new("/sys/fs/cgroup"), ["memory.peak", "memory.max_usage_in_bytes"])
        .filter_map(|mut leaf_first| leaf_first.next())
        .min()
}

/// `membership` is the text of `/proc/self/cgroup`; `mount` holds the tree.
fn limit_in(membership: &str, mount: &Path) -> Option<u64> {
    // Version 1 writes "no limit" as the largest page multiple of an i64, version 2 as "max".
    const UNLIMITED: u64 = 1 << 62;
    values(membership, mount, ["memory.max", "memory.limit_in_bytes"]).flatten().filter(|&n| n < UNLIMITED).min()
}

/// For each hierarchy that `membership` names, a line `id:controllers:path` each, the numbers in a file of the folder of
/// `path` and of those above it, from below; `files` are its names in version 2 and 1. A container may not see the lower
/// folders.
fn values<'a>(
    membership: &'a str,
    mount: &'a Path,
    files: [&'static str; 2],
) -> impl Iterator<Item = impl Iterator<Item = u64>> + 'a {
    membership.lines().filter_map(move |line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, file) = if controllers.is_empty() {
            // Version 2, alone or beside version 1.
            let hybrid = mount.join("unified");
            (if hybrid.is_dir() { hybrid } else { mount.to_owned() }, files[0])
        } else if controllers.split(',').any(|c| c == "memory") {
            (mount.join("memory"), files[1])
        } else {
            return None;
        };
        let leaf = root.join(path.trim_start_matches('/'));
        let folders: Vec<_> = leaf.ancestors().take_while(|dir| dir.starts_with(&root)).map(Path::to_owned).collect();
        Some(folders.into_iter().filter_map(move |dir| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_in_bytes() {
        let text = "VmPeak:\t  999 kB\nVmHWM:\t  1234 kB\nVmHWMx: 1 kB\nThreads:\t3\n";
        assert_eq!(kib_line(text, "VmHWM"), Some(1234 * 1024));
        assert_eq!(kib_line(text, "Threads"), None);
        assert_eq!(kib_line(text, "Missing"), None);
    }

    #[test]
    fn this_machine_answers() {
        let (peak, rss) = (peak_rss_bytes().unwrap(), rss_bytes().unwrap());
        assert!(peak > 1 << 20 && rss > 1 << 20, "{peak} {rss}");
        assert!(memory_available_bytes().unwrap() > 1 << 20);
    }

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let root = std::env::temp_dir().join(format!("forerun-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("v2/memory.max", "max\n");
        write("v2/a/memory.max", "3000000\n");
        write("v2/a/b/memory.max", "5000000\n");
        assert_eq!(limit_in("0::/a/b\n", &root.join("v2")), Some(3_000_000));
        assert_eq!(limit_in("0::/\n", &root.join("v2")), None);
        assert_eq!(limit_in("0::/a/not/seen\n", &root.join("v2")), Some(3_000_000));

        write("v1/memory/memory.limit_in_bytes", "9223372036854771712\n");
        write("v1/memory/box/memory.limit_in_bytes", "268435456\n");
        fs::create_dir_all(root.join("v1/unified")).unwrap();
        let membership = "9:name=systemd:/\n4:cpu,memory:/box\n3:cpuset:/\n0::/\n";
        assert_eq!(limit_in(membership, &root.join("v1")), Some(268_435_456));
        assert_eq!(limit_in("4:memory:/\n", &root.join("v1")), None);
        assert_eq!(limit_in("garbage\n::\n", &root.join("v1")), None);
        fs::remove_dir_all(root).unwrap();
    }
}
