//! Which CPUs the workers get: the fast ones of a board that has two kinds.

use std::fs;
use std::path::Path;

/// Where Linux describes CPUs.
pub const SYSFS_CPUS: &str = "/sys/devices/system/cpu";

/// CPUs and whether each worker should keep to one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// The fastest kind, by number.
    pub fast: Vec<usize>,
    /// There is a slower kind, onto which the kernel might put a worker.
    pub mixed: bool,
}

impl Cores {
    /// Sorts out `available` by `cpu_capacity` under `sysfs`: 1024 for the fastest, less for others, absent where all are
    /// alike. Kinds differ by a third at least; clusters of one kind by a few per cent.
    pub fn detect(sysfs: &Path, available: &[usize]) -> Self {
        let capacity = |cpu: &usize| {
            let text = fs::read_to_string(sysfs.join(format!("cpu{cpu}/cpu_capacity"))).ok()?;
            text.trim().parse::<u32>().ok()
        };
        let capacities: Option<Vec<u32>> = available.iter().map(capacity).collect();
        let Some(capacities) = capacities else { return Self { fast: available.to_vec(), mixed: false } };
        let least = capacities.iter().max().map_or(0, |max| max / 4 * 3);
        let fast: Vec<usize> =
            available.iter().zip(&capacities).filter(|(_, c)| **c >= least).map(|(cpu, _)| *cpu).collect();
        Self { mixed: fast.len() < available.len(), fast }
    }

    /// The CPUs to pin `threads` workers to: where there is a slow kind to keep away from, or each fast CPU has a worker.
    /// Fewer workers on CPUs of one kind are better placed by the kernel, which sees what else runs.
    pub fn pins(&self, threads: usize) -> Option<&[usize]> {
        (threads == self.fast.len() || self.mixed && threads < self.fast.len()).then_some(&self.fast)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fast_cluster_is_found() {
        let dir = std::env::temp_dir().join(format!("forerun-cores-{}", std::process::id()));
        // RK3588: four Cortex-A55, then two clusters of two Cortex-A76 that differ by their silicon.
        for (cpu, capacity) in [414, 414, 414, 414, 1024, 1024, 1011, 1011].into_iter().enumerate() {
            let cpu = dir.join(format!("cpu{cpu}"));
            fs::create_dir_all(&cpu).unwrap();
            fs::write(cpu.join("cpu_capacity"), format!("{capacity}\n")).unwrap();
        }
        let all: Vec<usize> = (0..8).collect();
        let cores = Cores::detect(&dir, &all);
        assert_eq!(cores, Cores { fast: vec![4, 5, 6, 7], mixed: true });
        assert_eq!(cores.pins(4), Some(&[4, 5, 6, 7][..]));
        assert_eq!(cores.pins(2), Some(&[4, 5, 6, 7][..]));
        assert_eq!(cores.pins(8), None, "asked for more than there are: the slow ones help");
        // A container that may use the slow ones only.
        assert_eq!(Cores::detect(&dir, &[0, 2]), Cores { fast: vec![0, 2], mixed: false });
        fs::write(dir.join("cpu3/cpu_capacity"), "fast").unwrap();
        assert!(!Cores::detect(&dir, &all).mixed, "unreadable: all alike");
        fs::remove_dir_all(&dir).unwrap();
        let alike = Cores::detect(&dir, &[0, 1]);
        assert_eq!((alike.pins(2), alike.pins(1)), (Some(&[0, 1][..]), None));
    }
}
