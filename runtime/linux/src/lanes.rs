//! Slot reads by a few threads that call pread: the engine where io_uring is refused.
//!
//! Relies on owned buffers: a slot's memory moves to the lane that reads into it and comes back with the completion.
//! Never allocates after `new`: both queues are as long as the depth.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::DirectFile;
use crate::patience::{PATIENCE, Wait};
use crate::storage::{Finished, Job};
use crate::sys;

/// Threads that read. Two fill UFS and eMMC; NVMe wants some more.
const LANES: usize = 4;
/// Stack of a lane, in bytes. It only calls pread.
const STACK_BYTES: usize = 128 << 10;

struct Queues {
    waiting: VecDeque<Job>,
    finished: VecDeque<Finished>,
    closing: bool,
}

struct Shared {
    file: Arc<DirectFile>,
    queues: Mutex<Queues>,
    work: Condvar,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // A lane cannot panic while it holds the lock; if the owner did, the queues are still whole.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane(&self) {
        // The thread that opened the storage may be pinned to a compute core.
        sys::unpin_current_thread();
        let mut queues = self.lock();
        while !queues.closing {
            let Some(mut job) = queues.waiting.pop_front() else {
                queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queues);
            let bytes = job.read.bytes as usize;
            let result = self.file.read(job.read.offset, &mut job.buf[..bytes], bytes);
            queues = self.lock();
            queues.finished.push_back(Finished { slot: job.read.slot, buf: job.buf, result });
            self.done.notify_one();
        }
    }
}

/// The threads and their queues.
pub(crate) struct Lanes {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
    patience: Duration,
}

impl Lanes {
    /// # Errors
    /// If a thread cannot be started.
    pub fn new(file: Arc<DirectFile>, depth: usize) -> io::Result<Self> {
        let queues = Queues {
            waiting: VecDeque::with_capacity(depth),
            finished: VecDeque::with_capacity(depth),
            closing: false,
        };
        let shared = Shared { file, queues: Mutex::new(queues), work: Condvar::new(), done: Condvar::new() };
        let mut lanes =
            Self { shared: Arc::new(shared), threads: Vec::with_capacity(LANES), in_flight: 0, patience: PATIENCE };
        let (starting, started) = mpsc::channel::<()>();
        for i in 0..LANES.min(depth) {
            let (shared, starting) = (Arc::clone(&lanes.shared), starting.clone());
            let builder = thread::Builder::new().name(format!("forerun-read-{i}")).stack_size(STACK_BYTES);
            lanes.threads.push(builder.spawn(move || {
                drop(starting);
                shared.lane();
            })?);
        }
        // A thread allocates while it starts. All have once nobody can send any more.
        drop(starting);
        let _ = started.recv();
        Ok(lanes)
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Queues jobs; the caller keeps `in_flight` within the depth.
    pub fn submit(&mut self, jobs: impl Iterator<Item = Job>) {
        let mut queues = self.shared.lock();
        for job in jobs {
            queues.waiting.push_back(job);
            self.in_flight += 1;
            self.shared.work.notify_one();
        }
    }

    pub fn complete(&mut self, wait: bool) -> Option<Finished> {
        let mut queues = self.shared.lock();
        let mut waited: Option<Wait> = None;
        while queues.finished.is_empty() && wait && self.in_flight > 0 {
            let time = waited.get_or_insert_with(|| Wait::new(self.patience)).next()?;
            (queues, _) = self.shared.done.wait_timeout(queues, time).unwrap_or_else(PoisonError::into_inner);
        }
        let finished = queues.finished.pop_front()?;
        self.in_flight -= 1;
        Some(finished)
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // Reads not yet begun are dropped; the ones under way end before their lane is joined.
        let mut queues = self.shared.lock();
        queues.closing = true;
        self.in_flight -= queues.waiting.len();
        queues.waiting.clear();
        drop(queues);
        self.shared.work.notify_all();
        while self.in_flight > 0 {
            if self.complete(true).is_none() {
                // They own what they read into, and end when the device answers.
                return log::error!("{} reads do not return", self.in_flight);
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_answer_ends_the_wait_and_may_answer_later() {
        let path = std::env::current_exe().unwrap().with_file_name(format!("lanes-{}", std::process::id()));
        std::fs::write(&path, [7; 8192]).unwrap();
        let mut lanes = Lanes::new(Arc::new(DirectFile::open(&path).unwrap()), 1).unwrap();
        lanes.patience = Duration::from_millis(50);
        // A job that no lane gets to see stands for one whose read hangs.
        lanes.in_flight = 1;
        assert!(lanes.complete(true).is_none());
        lanes.in_flight = 0;
        let buf = crate::Arena::new(8192).unwrap().take_io(8192).unwrap();
        let read = forerun_engine::ports::Read { slot: 0, offset: 0, bytes: 8192 };
        lanes.patience = PATIENCE;
        lanes.submit(std::iter::once(Job { read, buf }));
        let Finished { buf, result, .. } = lanes.complete(true).unwrap();
        assert_eq!((result, buf[0], lanes.in_flight), (Ok(()), 7, 0));
        std::fs::remove_file(path).unwrap();
    }
}
