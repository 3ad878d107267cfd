//! How long a read may take: a slow device is told of, a hung one ends the wait.

use std::time::{Duration, Instant};

/// A read that takes longer is told of once.
const SLOW: Duration = Duration::from_secs(2);
/// How long to wait for a device that does not answer. The kernel itself resets a disk after 30 s.
pub(crate) const PATIENCE: Duration = Duration::from_secs(45);

/// One wait.
pub(crate) struct Wait {
    start: Instant,
    patience: Duration,
    told: bool,
}

impl Wait {
    pub fn new(patience: Duration) -> Self {
        Self { start: Instant::now(), patience, told: false }
    }

    /// How long to wait until the next look; `None` when it has been long enough. Tells of a slow device.
    pub fn next(&mut self) -> Option<Duration> {
        let waited = self.start.elapsed();
        if waited >= self.patience {
            log::error!("the storage has not answered for {:.0} s: giving up", waited.as_secs_f64());
            return None;
        }
        if waited >= SLOW && !self.told {
            log::warn!("the storage has not answered for {:.0} s", waited.as_secs_f64());
            self.told = true;
        }
        let next = if self.told { self.patience } else { SLOW.min(self.patience) };
        Some(next.saturating_sub(waited).max(Duration::from_millis(1)))
    }
}
