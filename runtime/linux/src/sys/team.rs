//! Threads that meet at one job, claim its pieces, and leave: the unsafe core of the worker pool.
//!
//! Relies on one state word (open, stop, caller waits, generation, members inside) and a futex on it. Never allocates,
//! and never lets a caller go while a thread may still touch what the caller lent.
//!
//! A job is *open* from its publication until its caller has found no piece left. A member enters an open job by raising
//! the count of members inside in the same exchange that checks that it is open; the caller closes it, then waits for the
//! count to fall to 0. A member that wakes too late finds it closed and costs nobody anything.

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forerun_engine::ports::{Serial, Workers};

const OPEN: u32 = 1 << 31;
const STOP: u32 = 1 << 30;
const CALLER_WAITS: u32 = 1 << 29;
const GENERATION_ONE: u32 = 1 << 8;
const GENERATION: u32 = (CALLER_WAITS - 1) & !INSIDE;
const INSIDE: u32 = GENERATION_ONE - 1;

/// Most threads of one team: the count of members inside is 8 bits wide.
pub(crate) const THREADS_MAX: usize = 128;

/// What is computed: piece index, its part of `a`, its part of `b`.
type Task<'a> = dyn Fn(usize, &mut [f32], &mut [f32]) + Sync + 'a;

/// A borrowed array that is handed out in pieces of `piece` floats.
#[derive(Clone, Copy)]
struct Cut {
    start: *mut f32,
    len: usize,
    piece: usize,
}

impl Cut {
    fn new(whole: &mut [f32], piece: usize, pieces: usize) -> Self {
        // Every piece has an element, so the last one, pieces - 1, starts inside; divided, as a product could overflow.
        let fits = piece == 0 || pieces <= whole.len().div_ceil(piece);
        assert!(fits, "{} floats cannot give {pieces} pieces of {piece}", whole.len());
        Self { start: whole.as_mut_ptr(), len: whole.len(), piece }
    }

    /// # Safety
    /// The array is still borrowed by the caller of `Team::run`, `i` is below the number of pieces given to `new`, and
    /// no two live slices have the same `i`.
    unsafe fn get<'a>(self, i: usize) -> &'a mut [f32] {
        let from = if self.piece == 0 { 0 } else { i * self.piece };
        let len = self.piece.min(self.len - from);
        // SAFETY: from <= len by the assertion in new(), as i < pieces; len is cut to the end. Ranges of different i do
        // not overlap, being [i * piece, (i + 1) * piece), or are empty.
        unsafe { slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

/// One call of `run`, with its borrows erased.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    pieces: usize,
    a: Cut,
    b: Cut,
}

/// A cache line of its own, so that claiming a piece does not disturb those who watch the state.
#[repr(align(128))]
struct Line<T>(T);

/// The meeting place. One thread at a time calls [`Team::run`]; any number are in [`Team::serve`].
pub(crate) struct Team {
    state: Line<AtomicU32>,
    next: Line<AtomicUsize>,
    job: UnsafeCell<Option<Job>>,
    busy: AtomicBool,
    sleepers: AtomicU32,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    members: usize,
    spins_max: u32,
}

// SAFETY: `job` is written only in run(), by the one thread that holds `busy`, while the state is closed with nobody
// inside, and read only by members inside an open job. What its pointers lead to may be used on any thread: the task is
// Sync, and f32 slices may be sent. The other fields are Sync by themselves.
unsafe impl Sync for Team {}
// SAFETY: as above; the pointers in `job` are only used between publication and the end of run().
unsafe impl Send for Team {}

impl Team {
    /// `members`: threads that will serve, the caller not counted. `spins_max`: how often a thread looks for work before it
    /// sleeps.
    pub fn new(members: usize, spins_max: u32) -> Self {
        assert!(members < THREADS_MAX, "{members} members would overflow their count");
        Self {
            state: Line(AtomicU32::new(0)),
            next: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            busy: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            panic: Mutex::new(None),
            members,
            spins_max,
        }
    }

    /// As [`Workers::split2`]; a panic in a task is resumed here when all pieces are done. A call from inside a task, or from a second thread, is computed where it is called.
    pub fn run(&self, pieces: usize, a: &mut [f32], a_piece: usize, b: &mut [f32], b_piece: usize, task: &Task<'_>) {
        let (cut_a, cut_b) = (Cut::new(a, a_piece, pieces), Cut::new(b, b_piece, pieces));
        if pieces < 2 || self.members == 0 || self.busy.swap(true, Ordering::Acquire) {
            return Serial.split2(pieces, a, a_piece, b, b_piece, task);
        }
        // SAFETY: the transmute only forgets a lifetime. Nobody uses the pointer after this function: it returns, or
        // resumes a panic, only after close() has seen the job closed with nobody inside.
        let task = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
        let job = Job { task, pieces, a: cut_a, b: cut_b };
        // SAFETY: we hold `busy`, so nobody else writes; the state is closed with nobody inside (the last run() waited
        // for that in close()), so nobody reads.
        unsafe { *self.job.get() = Some(job) };
        self.next.0.store(0, Ordering::Relaxed);
        let generation = self.state.0.load(Ordering::Relaxed).wrapping_add(GENERATION_ONE) & GENERATION;
        // SeqCst here and in rest(): either we see the sleeper, or it sees this state and does not sleep.
        self.state.0.store(OPEN | generation, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            futex_wake(&self.state.0, pieces - 1);
        }
        self.work(&job);
        self.close();
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Takes part in every job until [`Team::stop`].
    pub fn serve(&self) {
        let mut last = 0;
        loop {
            let state = self.rest(last);
            if state & STOP != 0 {
                return;
            }
            if self.state.0.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            last = state & GENERATION;
            // SAFETY: the exchange found the job open and counted us inside, so run() has published it (its store of
            // OPEN is what we acquired) and does not write it again before we leave.
            let job = unsafe { *self.job.get() };
            self.work(&job.expect("an open job is published"));
            let before = self.state.0.fetch_sub(1, Ordering::AcqRel);
            if before & CALLER_WAITS != 0 && before & INSIDE == 1 {
                futex_wake(&self.state.0, usize::MAX);
            }
        }
    }

    /// Sends every thread out of [`Team::serve`].
    pub fn stop(&self) {
        self.state.0.fetch_or(STOP, Ordering::SeqCst);
        futex_wake(&self.state.0, usize::MAX);
    }

    /// Computes pieces until none is left.
    fn work(&self, job: &Job) {
        loop {
            let i = self.next.0.fetch_add(1, Ordering::Relaxed);
            if i >= job.pieces {
                return;
            }
            // SAFETY: we are inside the job (counted in the state, or its caller), so run() has not returned and its
            // borrows live; i < pieces, checked above, and the counter gives each i to one thread.
            let (task, a, b) = unsafe { (&*job.task, job.a.get(i), job.b.get(i)) };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(i, a, b))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
        }
    }

    /// Closes the job and waits until nobody is inside.
    fn close(&self) {
        let mut state = self.state.0.fetch_and(!OPEN, Ordering::AcqRel) & !OPEN;
        let mut spins = 0;
        while state & INSIDE != 0 {
            if spins < self.spins_max {
                spins += 1;
                hint::spin_loop();
            } else {
                let waiting = self.state.0.fetch_or(CALLER_WAITS, Ordering::AcqRel) | CALLER_WAITS;
                if waiting & INSIDE != 0 {
                    futex_wait(&self.state.0, waiting);
                }
            }
            state = self.state.0.load(Ordering::Acquire);
        }
    }

    /// Waits for an open job of another generation than `last`, or for the stop, and returns that state.
    fn rest(&self, last: u32) -> u32 {
        let ready = |state: u32| state & STOP != 0 || (state & OPEN != 0 && state & GENERATION != last);
        for _ in 0..self.spins_max {
            let state = self.state.0.load(Ordering::Relaxed);
            if ready(state) {
                return state;
            }
            hint::spin_loop();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            let state = self.state.0.load(Ordering::SeqCst);
            if ready(state) {
                break state;
            }
            futex_wait(&self.state.0, state);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        state
    }
}

/// Sleeps while `word` is `value`, or for no reason at all.
fn futex_wait(word: &AtomicU32, value: u32) {
    let flags = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is an aligned u32 that lives while borrowed; the kernel only compares it. A null timeout is "none".
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), flags, value, std::ptr::null::<libc::timespec>()) };
}

/// Wakes up to `n` threads that sleep on `word`.
fn futex_wake(word: &AtomicU32, n: usize) {
    let flags = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    let n = n.min(i32::MAX as usize) as i32;
    // SAFETY: the word is an aligned u32 that lives while borrowed; the kernel uses only its address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), flags, n) };
}
