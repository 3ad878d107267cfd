//! A fixed pool of threads, pinned if asked, behind the engine's `Workers`.
//!
//! Relies on `sys::Team` for the meeting of threads. Never starts a thread after `new`, and never lets the number of
//! threads change a result: pieces are cut by shape, and which thread takes one is free.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use forerun_engine::ports::Workers;

use crate::sys::{self, THREADS_MAX, Team};

/// Looks for work before a thread sleeps: some 20-100 microseconds, longer than the gap between two products of a layer,
/// shorter than a wait for storage is worth burning a core for.
const SPINS_MAX: u32 = 2000;

/// Threads that share out pieces of work: the one that calls, and `threads - 1` that wait for it.
pub struct Pool {
    team: Arc<Team>,
    members: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` threads. With `pin`, thread `i` runs on CPU `pin[i % pin.len()]` only; thread 0 is the
    /// calling one, and what it starts later inherits its CPU unless it calls [`sys::unpin_current_thread`]. A CPU that is
    /// refused is a warning.
    ///
    /// # Errors
    /// If `threads` is not in 1 ..= 128, or a thread cannot be started.
    pub fn new(threads: usize, pin: Option<&[usize]>) -> io::Result<Self> {
        if !(1..=THREADS_MAX).contains(&threads) {
            let text = format!("{threads} worker threads asked for, expected 1 to {THREADS_MAX}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let cpu_of = |i: usize| pin.filter(|cpus| !cpus.is_empty()).map(|cpus| cpus[i % cpus.len()]);
        // More threads than CPUs: who spins keeps the CPU from the one it waits for.
        let spins_max = if threads > sys::available_threads() { 0 } else { SPINS_MAX };
        let mut pool =
            Self { team: Arc::new(Team::new(threads - 1, spins_max)), members: Vec::with_capacity(threads - 1) };
        pin_or_warn(0, cpu_of(0));
        let (starting, started) = mpsc::channel::<()>();
        for i in 1..threads {
            let (team, cpu, starting) = (Arc::clone(&pool.team), cpu_of(i), starting.clone());
            let member = thread::Builder::new().name(format!("forerun-{i}")).spawn(move || {
                pin_or_warn(i, cpu);
                drop(starting);
                team.serve();
            })?;
            pool.members.push(member);
        }
        // A thread allocates while it starts. All have once nobody can send any more.
        drop(starting);
        let _ = started.recv();
        Ok(pool)
    }
}

fn pin_or_warn(thread: usize, cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    if let Err(error) = sys::pin_current_thread(cpu) {
        log::warn!("worker {thread} cannot be pinned to CPU {cpu}: {error}; it runs where the kernel puts it");
    }
}

impl Workers for Pool {
    fn threads(&self) -> usize {
        self.members.len() + 1
    }

    fn split2(
        &self,
        pieces: usize,
        a: &mut [f32],
        a_piece: usize,
        b: &mut [f32],
        b_piece: usize,
        f: &(dyn Fn(usize, &mut [f32], &mut [f32]) + Sync),
    ) {
        self.team.run(pieces, a, a_piece, b, b_piece, f);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.team.stop();
        for member in self.members.drain(..) {
            // A member only computes pieces, whose panics went to their caller.
            let _ = member.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use forerun_engine::ports::Serial;

    use super::*;

    /// Fills two arrays of a shape with numbers that depend on piece and place.
    fn fill(workers: &dyn Workers, pieces: usize, a: (usize, usize), b: (usize, usize)) -> (Vec<f32>, Vec<f32>) {
        let (mut a_out, mut b_out) = (vec![-1.0; a.0], vec![-1.0; b.0]);
        workers.split2(pieces, &mut a_out, a.1, &mut b_out, b.1, &|i, a, b| {
            for (j, x) in a.iter_mut().enumerate() {
                *x = (i * 1000 + j) as f32;
            }
            b.fill(i as f32 + a.len() as f32 / 8.0);
        });
        (a_out, b_out)
    }

    #[test]
    fn every_shape_and_thread_count_gives_what_one_thread_gives() {
        let shapes = [
            (0, (0, 0), (0, 0)),
            (1, (1, 1), (0, 0)),
            (7, (7, 1), (21, 3)),
            (5, (17, 4), (0, 0)),
            (5, (17, 4), (9, 0)),
            (64, (4096, 64), (64, 1)),
            (3, (100, 10), (3, 1)),
            (1000, (1000, 1), (2999, 3)),
        ];
        for threads in [1, 2, 3, 4, 7] {
            let pool = Pool::new(threads, None).unwrap();
            assert_eq!(pool.threads(), threads);
            for _ in 0..20 {
                for (pieces, a, b) in shapes {
                    let expected = fill(&Serial, pieces, a, b);
                    assert_eq!(fill(&pool, pieces, a, b), expected, "{threads} threads, {pieces} {a:?} {b:?}");
                }
            }
        }
    }

    #[test]
    fn each_piece_is_computed_once() {
        let pool = Pool::new(4, None).unwrap();
        let counts: Vec<_> = (0..500).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..50 {
            pool.split(&mut [0.0; 500], 1, &|i, _| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
    }

    #[test]
    fn a_hundred_thousand_tiny_splits_are_quick() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, None).unwrap();
            let mut out = [0.0f32; 8];
            let start = Instant::now();
            for _ in 0..100_000 {
                pool.split(&mut out, 2, &|_, o| o.iter_mut().for_each(|x| *x += 1.0));
            }
            assert_eq!(out, [100_000.0; 8]);
            // Generous, for a machine busy with other things: a lost wake-up would hang for ever instead.
            assert!(start.elapsed() < Duration::from_secs(60), "{threads} threads: {:?}", start.elapsed());
        }
    }

    #[test]
    fn sleeping_threads_wake() {
        let pool = Pool::new(3, None).unwrap();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(2));
            // Pieces that wait for each other finish only if two threads take part.
            let started = AtomicUsize::new(0);
            pool.split(&mut [0.0; 2], 1, &|_, _| {
                started.fetch_add(1, Ordering::SeqCst);
                while started.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_pieces() {
        for threads in [2, 4] {
            let pool = Pool::new(threads, None).unwrap();
            for bad in [0, 13, 63] {
                let done = AtomicUsize::new(0);
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.split(&mut [0.0; 64], 1, &|i, _| {
                        assert!(i != bad, "piece {i} is bad");
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                }));
                let panic = result.unwrap_err();
                assert_eq!(*panic.downcast::<String>().unwrap(), format!("piece {bad} is bad"));
                assert_eq!(done.load(Ordering::Relaxed), 63);
                assert_eq!(fill(&pool, 5, (17, 4), (5, 1)), fill(&Serial, 5, (17, 4), (5, 1)));
            }
        }
    }

    #[test]
    fn calls_inside_a_task_and_from_other_threads_are_computed_in_place() {
        let pool = Pool::new(3, None).unwrap();
        let mut out = vec![0.0; 64];
        pool.split(&mut out, 8, &|i, piece| pool.split(piece, 2, &|j, p| p.fill((i * 10 + j) as f32)));
        for (k, x) in out.iter().enumerate() {
            assert_eq!(*x, (k / 8 * 10 + k % 8 / 2) as f32);
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        assert_eq!(fill(&pool, 7, (7, 1), (21, 3)), fill(&Serial, 7, (7, 1), (21, 3)));
                    }
                });
            }
        });
    }

    #[test]
    fn arrays_that_are_too_short_are_refused() {
        for threads in [1, 3] {
            let pool = Pool::new(threads, None).unwrap();
            for (pieces, a, b) in
                [(5, (16, 4), (0, 0)), (2, (0, 1), (0, 0)), (3, (3, 1), (2, 1)), (usize::MAX, (9, 3), (0, 0))]
            {
                let refused = catch_unwind(AssertUnwindSafe(|| fill(&pool, pieces, a, b)));
                assert!(refused.is_err(), "{threads} threads, {pieces} {a:?} {b:?}");
            }
        }
    }

    #[test]
    fn a_pinned_pool_works_and_a_refused_cpu_is_no_error() {
        // On a thread of its own, since it is pinned too.
        std::thread::spawn(|| {
            let pool = Pool::new(3, Some(&[0, 5000])).unwrap();
            assert_eq!(fill(&pool, 7, (7, 1), (21, 3)), fill(&Serial, 7, (7, 1), (21, 3)));
        })
        .join()
        .unwrap();
        assert!(Pool::new(0, None).is_err());
        assert!(Pool::new(THREADS_MAX + 1, None).is_err());
    }

    #[test]
    fn pools_come_and_go() {
        for i in 0..200 {
            let pool = Pool::new(1 + i % 5, None).unwrap();
            if i % 2 == 0 {
                pool.split(&mut [0.0; 10], 1, &|_, _| {});
            }
        }
    }
}
