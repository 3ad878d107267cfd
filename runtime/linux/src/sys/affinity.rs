//! Which CPUs a thread may run on.
//!
//! Relies on `sched_setaffinity`. New threads inherit the mask of the thread that starts them, so the mask from before
//! the first pinning is kept for those that must not.

use std::io;
use std::mem::{self, MaybeUninit};
use std::sync::OnceLock;

/// The mask from before this process pinned anything.
static FIRST: OnceLock<Option<libc::cpu_set_t>> = OnceLock::new();

fn current() -> Option<libc::cpu_set_t> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the pointer is to a cpu_set_t of the size given, to which the kernel writes at most that size; pid 0 is
    // the calling thread. All zeroes is a valid set, so it is initialised whatever the kernel wrote.
    unsafe {
        let result = libc::sched_getaffinity(0, mem::size_of::<libc::cpu_set_t>(), set.as_mut_ptr());
        (result == 0).then(|| set.assume_init())
    }
}

fn apply(set: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: the pointer is to an initialised cpu_set_t of the size given; pid 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, mem::size_of::<libc::cpu_set_t>(), set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn first() -> Option<libc::cpu_set_t> {
    *FIRST.get_or_init(current)
}

/// CPUs that this process may use.
pub fn available_cpus() -> Vec<usize> {
    let Some(set) = first() else { return Vec::new() };
    // SAFETY: CPU_ISSET only reads the initialised set, and the range ends at its size.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Number of CPUs that this process may use, at least 1.
pub fn available_threads() -> usize {
    available_cpus().len().max(1)
}

/// Lets the calling thread run on `cpu` only.
///
/// # Errors
/// If there is no such CPU or this process may not use it.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    first();
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: all zeroes is the empty set; cpu < CPU_SETSIZE, checked above, so CPU_SET writes inside it.
    let set = unsafe {
        let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed().assume_init();
        libc::CPU_SET(cpu, &mut set);
        set
    };
    apply(&set)
}

/// Gives the calling thread the CPUs that the process started with. Threads started by a pinned one want this.
pub fn unpin_current_thread() {
    if let Some(Err(error)) = first().as_ref().map(apply) {
        log::debug!("cannot widen the CPU mask: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus() -> i32 {
        // SAFETY: CPU_COUNT only reads the initialised set.
        unsafe { libc::CPU_COUNT(&current().unwrap()) }
    }

    #[test]
    fn pinning_narrows_and_unpinning_widens() {
        std::thread::spawn(|| {
            let all = cpus();
            assert_eq!(available_threads(), all as usize);
            pin_current_thread(available_cpus()[0]).unwrap();
            assert_eq!(cpus(), 1);
            assert_eq!(available_threads(), all as usize);
            std::thread::spawn(unpin_current_thread).join().unwrap();
            assert_eq!(cpus(), 1);
            unpin_current_thread();
            assert_eq!(cpus(), all);
            assert!(pin_current_thread(1_000_000).is_err());
            assert!(pin_current_thread(1023).is_err());
        })
        .join()
        .unwrap();
    }
}
