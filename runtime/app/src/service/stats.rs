//! What the service counts, and how the engine is: written by the engine's thread, read by anyone.

use crate::error::AppError;
use crate::session::Answer;
use forerun_engine::Counters;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Upper bounds of the histogram of times to the first token, seconds.
pub const LATENCY_BOUNDS_S: [f64; 10] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0];

/// A job that has not moved for this long is stuck: a chunk of a prompt on the slowest board takes less.
const STUCK: Duration = Duration::from_secs(120);

/// How the engine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineStatus {
    /// The model is being loaded.
    Loading,
    /// It takes jobs.
    Ready,
    /// The last job failed for no fault of its own; it still takes jobs, and is ready again when one succeeds.
    Failed(String),
    /// It ends. There is no way back.
    Stopping,
}

/// Sums since the program started.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Jobs with an answer.
    pub answered: u64,
    /// Jobs that failed, for whatever reason.
    pub failed: u64,
    /// Jobs whose asker went away.
    pub cancelled: u64,
    /// Jobs that found the queue full.
    pub refused: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, those whose state was there.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Time of decoding, seconds.
    pub decode_s: f64,
    /// Time of all jobs, seconds.
    pub job_s: f64,
    /// Tokens by second of the last answer.
    pub last_tokens_per_second: f64,
    /// Answers whose first token took at most each of [`LATENCY_BOUNDS_S`].
    pub first_token: [u64; LATENCY_BOUNDS_S.len()],
    /// Sum of the times to the first token, seconds.
    pub first_token_s: f64,
    /// What the engine counts.
    pub counters: Counters,
    /// The last error that was no fault of a request.
    pub last_error: Option<(SystemTime, String)>,
}

/// Counts and states.
pub struct Stats {
    engine: Mutex<EngineStatus>,
    totals: Mutex<Totals>,
    ids: AtomicU64,
    /// Bytes of the longest answer.
    text_bytes_max: AtomicUsize,
    start: Instant,
    /// Milliseconds from the start to the last sign of life of the engine.
    alive_ms: AtomicU64,
    busy: AtomicBool,
}

impl Stats {
    /// Of a service that loads.
    pub(super) fn new() -> Self {
        Self {
            engine: Mutex::new(EngineStatus::Loading),
            totals: Mutex::default(),
            ids: AtomicU64::new(0),
            text_bytes_max: AtomicUsize::new(0),
            start: Instant::now(),
            alive_ms: AtomicU64::new(0),
            busy: AtomicBool::new(false),
        }
    }

    /// How the engine is.
    pub fn engine(&self) -> EngineStatus {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_engine(&self, status: EngineStatus) {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if *engine != EngineStatus::Stopping {
            *engine = status;
        }
    }

    /// Sums so far.
    pub fn totals(&self) -> Totals {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the service was made.
    pub fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether a job runs.
    pub fn busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// A sign of life: the engine computed something, or has nothing to do.
    pub(super) fn beat(&self) {
        self.alive_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Time since the last sign of life of the engine.
    pub fn silence(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.alive_ms.load(Ordering::Relaxed)))
    }

    /// What is wrong with the engine, if something is.
    pub fn engine_trouble(&self) -> Option<String> {
        match self.engine() {
            EngineStatus::Failed(why) => Some(why),
            EngineStatus::Ready if self.silence() > STUCK => {
                Some(format!("the engine has not moved for {} s", self.silence().as_secs()))
            }
            _ => None,
        }
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn text_bytes_max(&self) -> usize {
        self.text_bytes_max.load(Ordering::Relaxed)
    }

    pub(super) fn set_text_bytes_max(&self, bytes: usize) {
        self.text_bytes_max.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.lock().refused += 1;
    }

    /// Mean time of a job, seconds; 0 before the first.
    pub(super) fn mean_job_s(&self) -> f64 {
        let t = self.lock();
        t.job_s / (t.answered + t.failed).max(1) as f64
    }

    pub(super) fn begin(&self) {
        self.beat();
        self.busy.store(true, Ordering::Relaxed);
    }

    /// Books a job that took `time`.
    pub(super) fn end(
        &self,
        result: &Result<Answer, AppError>,
        engine_failed: bool,
        time: Duration,
        counters: Counters,
    ) {
        self.beat();
        self.busy.store(false, Ordering::Relaxed);
        let mut t = self.lock();
        t.counters = counters;
        t.job_s += time.as_secs_f64();
        match result {
            Ok(answer) => {
                t.answered += 1;
                t.prompt_tokens += answer.prompt_tokens as u64;
                t.cached_tokens += answer.cached_tokens as u64;
                t.completion_tokens += answer.tokens.len() as u64;
                t.decode_s += answer.timings.decode_ms / 1e3;
                t.last_tokens_per_second = answer.tokens_per_second();
                let first_s = answer.timings.first_token_ms / 1e3;
                t.first_token_s += first_s;
                for (count, bound) in t.first_token.iter_mut().zip(LATENCY_BOUNDS_S) {
                    *count += u64::from(first_s <= bound);
                }
            }
            Err(AppError::Cancelled | AppError::Stopped) => t.cancelled += 1,
            Err(e) => {
                t.failed += 1;
                if engine_failed {
                    t.last_error = Some((SystemTime::now(), e.to_string()));
                }
            }
        }
    }
}
