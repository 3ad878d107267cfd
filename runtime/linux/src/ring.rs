//! Slot reads through io_uring: one system call a batch, completions read from shared memory.
//!
//! Relies on Linux 5.6 or later with io_uring allowed; says why not otherwise. Uses only what a 5.10 kernel has. Never
//! lets go of a buffer that the kernel may still write to, and never allocates after `new`.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::patience::{PATIENCE, Wait};
use crate::progress::{Next, Progress};
use crate::storage::{Finished, Job};
use crate::{DirectFile, IoBuf};

/// Most bytes of one registered buffer; the kernel's limit.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Most registered buffers before Linux 5.13.
const REGISTERED_MAX: usize = 1024;

/// A read that the kernel knows of. Its buffer stays here, untouched, until its last completion has arrived.
struct InFlight {
    job: Job,
    progress: Progress,
}

/// The ring and the reads in it.
pub(crate) struct Ring {
    ring: IoUring,
    file: Arc<DirectFile>,
    reads: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// Slots in each registered buffer, if the kernel took them.
    registered: Option<usize>,
    patience: Duration,
}

impl Ring {
    /// Sets up a ring for `depth` reads of `slot_bytes` bytes into pieces of `memory`.
    ///
    /// # Errors
    /// If the kernel refuses io_uring or one of the operations; the text says why.
    pub fn new(file: Arc<DirectFile>, memory: &IoBuf, slot_bytes: usize, depth: usize) -> Result<Self, String> {
        let entries = depth.next_power_of_two() as u32;
        let ring = IoUring::new(entries).map_err(|error| explain(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| format!("cannot be probed: {error}"))?;
        for (name, code) in
            [("NOP", opcode::Nop::CODE), ("READ", opcode::Read::CODE), ("READ_FIXED", opcode::ReadFixed::CODE)]
        {
            if !probe.is_supported(code) {
                return Err(format!("this kernel's io_uring lacks {name}, which came with Linux 5.6"));
            }
        }
        let descriptor = file.as_file().as_raw_fd();
        ring.submitter().register_files(&[descriptor]).map_err(|error| format!("cannot register the file: {error}"))?;
        let mut new = Self {
            ring,
            file,
            reads: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            registered: None,
            patience: PATIENCE,
        };
        new.registered = new.register(memory, slot_bytes);
        new.round_trip().map_err(|error| explain(&error))?;
        Ok(new)
    }

    /// Registers the slots' memory, so that the kernel does not look up and pin its pages for each read.
    fn register(&self, memory: &IoBuf, slot_bytes: usize) -> Option<usize> {
        let slots_each = REGISTERED_BYTES_MAX / slot_bytes;
        if slots_each == 0 || memory.len().div_ceil(slots_each * slot_bytes) > REGISTERED_MAX {
            return None;
        }
        let pieces = memory.chunks(slots_each * slot_bytes);
        let pieces: Vec<_> =
            pieces.map(|p| libc::iovec { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() }).collect();
        // SAFETY: the pieces are inside `memory`, mapped while this is called. The kernel pins the pages, so they stay
        // even if the mapping should go before the ring; it writes to them only for reads pushed in push().
        match unsafe { self.ring.submitter().register_buffers(&pieces) } {
            Ok(()) => Some(slots_each),
            Err(error) => {
                log::debug!("io_uring without registered buffers (RLIMIT_MEMLOCK?): {error}");
                None
            }
        }
    }

    /// Sends one operation that does nothing around: a sandbox may allow the set-up and refuse the use.
    fn round_trip(&mut self) -> io::Result<()> {
        // SAFETY: a NOP has no buffers and no descriptors.
        unsafe { self.ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
        self.enter(1)?;
        match self.ring.completion().next() {
            Some(entry) if entry.result() < 0 => Err(io::Error::from_raw_os_error(-entry.result())),
            Some(_) => Ok(()),
            None => Err(io::Error::other("a NOP did not come back")),
        }
    }

    pub fn has_registered_buffers(&self) -> bool {
        self.registered.is_some()
    }

    pub fn in_flight(&self) -> usize {
        self.reads.len() - self.free.len()
    }

    /// Starts jobs as one batch; the caller keeps `in_flight` within the depth.
    pub fn submit(&mut self, jobs: impl Iterator<Item = Job>) {
        for job in jobs {
            let index = self.free.pop().expect("the caller counts what is in flight");
            let bytes = job.read.bytes as usize;
            let progress = Progress::new(job.read.offset, bytes, bytes);
            self.reads[index] = Some(InFlight { job, progress });
            self.push(index);
        }
        self.flush();
    }

    /// Puts what is left of read `index` in the submission queue.
    fn push(&mut self, index: usize) {
        let read = self.reads[index].as_ref().expect("the read is in flight");
        let range = read.progress.range();
        assert!(range.end <= read.job.buf.len(), "the read is larger than its slot");
        // SAFETY: range.start <= range.end <= the buffer's length, asserted above.
        let start = unsafe { read.job.buf.start().add(range.start) }.as_ptr();
        let (file, bytes, offset) = (types::Fixed(0), range.len() as u32, read.progress.offset());
        let entry: squeue::Entry = match self.registered {
            Some(slots_each) => {
                let piece = (read.job.read.slot as usize / slots_each) as u16; // at most REGISTERED_MAX, see register()
                opcode::ReadFixed::new(file, start, bytes, piece).offset(offset).build()
            }
            None => opcode::Read::new(file, start, bytes).offset(offset).build(),
        };
        // SAFETY: the range is inside the read's buffer, asserted above. The buffer stays in self.reads[index], with no
        // reference to its bytes, until the completion is taken in complete(); Drop waits for it, and a Ring that is
        // forgotten leaks the buffer, which keeps its mapping. File 0 was registered in new().
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        pushed.expect("the queue holds as many entries as reads may be in flight");
    }

    /// Hands queued entries to the kernel. What it does not take now stays queued for the next call.
    fn flush(&mut self) {
        if let Err(error) = self.enter(0) {
            log::error!("io_uring does not take reads: {error}");
        }
    }

    /// Submits what is queued and waits until `want` completions are there, or at least one is.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        loop {
            let Err(error) = self.ring.submit_and_wait(want) else { return Ok(()) };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // Short of memory for requests, or completions must be taken first.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    if want == 0 || !self.ring.completion().is_empty() {
                        return Ok(());
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                _ => return Err(error),
            }
        }
    }

    /// Blocks until a completion is there, but not for ever.
    fn poll(&self, time: Duration) {
        let mut ring = libc::pollfd { fd: self.ring.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // Rounded up, so that the last wait is not many short ones.
        let ms = i32::try_from(time.as_millis() + 1).unwrap_or(i32::MAX);
        // SAFETY: `ring` is one pollfd that outlives the call. Interruptions and errors are looked into by the caller, who
        // looks for a completion and at the time.
        unsafe { libc::poll(&raw mut ring, 1, ms) };
    }

    pub fn complete(&mut self, wait: bool) -> Option<Finished> {
        let mut waited: Option<Wait> = None;
        loop {
            // Also what the kernel was too short of memory to take before.
            if !self.ring.submission().is_empty() {
                self.flush();
            }
            let Some(entry) = self.ring.completion().next() else {
                if !wait || self.in_flight() == 0 {
                    return None;
                }
                let time = waited.get_or_insert_with(|| Wait::new(self.patience)).next()?;
                let all_taken = self.ring.submission().is_empty();
                self.poll(if all_taken { time } else { Duration::from_millis(1) });
                continue;
            };
            if let Some(finished) = self.arrived(entry.user_data() as usize, entry.result()) {
                return Some(finished);
            }
        }
    }

    /// Takes one completion: the end of a read, or of a part of it.
    fn arrived(&mut self, index: usize, result: i32) -> Option<Finished> {
        let read = self.reads[index].as_mut().expect("completions are of reads in flight");
        let result = match read.progress.advance(usize::try_from(result).map_err(|_| -result)) {
            Next::Read => {
                self.push(index);
                self.flush();
                return None;
            }
            Next::Done => Ok(()),
            Next::Fail(error) => Err(error),
        };
        let InFlight { job, .. } = self.reads[index].take()?;
        self.free.push(index);
        self.file.finished(job.read.offset, job.read.bytes as usize);
        Some(Finished { slot: job.read.slot, buf: job.buf, result })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.complete(true).is_none() {
                // The kernel may still write to them: better lost than reused.
                log::error!("io_uring does not return {} reads", self.in_flight());
                mem::forget(mem::take(&mut self.reads));
                return;
            }
        }
    }
}

/// Why io_uring is refused, in words that name the remedy.
fn explain(error: &io::Error) -> String {
    let switch = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match (error.raw_os_error(), switch.trim()) {
        (Some(libc::EPERM), level @ ("1" | "2")) => {
            format!("switched off by sysctl kernel.io_uring_disabled = {level}")
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            "forbidden by a sandbox (a seccomp filter, as Docker's, or an LSM)".to_string()
        }
        (Some(libc::ENOSYS), _) => "this kernel is built without io_uring, or a seccomp filter hides it".to_string(),
        (Some(libc::ENOMEM), _) => "out of locked memory for the ring: raise RLIMIT_MEMLOCK".to_string(),
        _ => format!("set-up failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Disks rarely return less than asked, so the test plays the kernel: a whole read arrives, is passed on as a part of
    /// it or as an error, and must be completed by a second one.
    #[test]
    fn short_and_failed_reads_are_completed_in_place() {
        let path = std::env::current_exe().unwrap().with_file_name(format!("short-{}", std::process::id()));
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        for (arrived, kept) in [(3 * 4096 + 100, 3 * 4096), (5, 0), (-libc::EIO, 0), (-libc::EINTR, 0)] {
            let file = Arc::new(DirectFile::open(&path).unwrap());
            let buf = crate::Arena::new(65536).unwrap().take_io(65536).unwrap();
            let mut ring = match Ring::new(file, &buf, 65536, 1) {
                Ok(ring) => ring,
                Err(why) => return eprintln!("io_uring is not tested here: {why}"),
            };
            let read = forerun_engine::ports::Read { slot: 0, offset: 8192, bytes: 65536 };
            ring.submit(std::iter::once(Job { read, buf }));
            ring.enter(1).unwrap();
            assert_eq!(ring.ring.completion().next().unwrap().result(), 65536);
            ring.reads[0].as_mut().unwrap().job.buf[kept..].fill(0xee);
            assert!(ring.arrived(0, arrived).is_none());
            let Finished { slot, buf, result } = ring.complete(true).unwrap();
            assert_eq!((slot, result, ring.in_flight()), (0, Ok(()), 0));
            assert!(buf[..] == bytes[8192..][..65536], "after {arrived}");
        }
        fs::remove_file(path).unwrap();
    }

    /// A pipe that nobody writes to stands for a device that hangs.
    #[test]
    fn a_device_that_does_not_answer_ends_the_wait_and_may_answer_later() {
        let (reader, mut writer) = io::pipe().unwrap();
        let file = Arc::new(DirectFile::of_pipe(reader));
        let buf = crate::Arena::new(8192).unwrap().take_io(8192).unwrap();
        let mut ring = match Ring::new(file, &buf, 8192, 1) {
            Ok(ring) => ring,
            Err(why) => return eprintln!("io_uring is not tested here: {why}"),
        };
        ring.patience = Duration::from_millis(50);
        ring.submit(std::iter::once(Job {
            read: forerun_engine::ports::Read { slot: 0, offset: 0, bytes: 8192 },
            buf,
        }));
        for _ in 0..2 {
            assert!(ring.complete(true).is_none());
            assert_eq!(ring.in_flight(), 1);
        }
        io::Write::write_all(&mut writer, &[7; 8192]).unwrap();
        ring.patience = PATIENCE;
        let Finished { buf, result, .. } = ring.complete(true).unwrap();
        assert_eq!((result, &buf[..3], ring.in_flight()), (Ok(()), &[7; 3][..], 0));
    }

    #[test]
    fn refusals_are_explained() {
        let explain = |errno| explain(&io::Error::from_raw_os_error(errno));
        assert!(explain(libc::EPERM).contains("io_uring_disabled") || explain(libc::EPERM).contains("seccomp"));
        assert!(explain(libc::ENOSYS).contains("without io_uring"));
        assert!(explain(libc::ENOMEM).contains("RLIMIT_MEMLOCK"));
        assert!(explain(libc::EMFILE).contains("open files"));
    }
}
