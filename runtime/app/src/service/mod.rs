//! One engine for many askers: jobs wait in a bounded queue, one runs, its words go back as they come.
//!
//! Relies on one thread that calls [`Handle::run`] with the engine, and on any number that call [`Handle::submit`]. Never
//! blocks the engine on an asker: words gather in the asker's [`Inbox`], and dropping that ends the job.

mod failure;
mod hub;
mod mail;
mod queue;
mod run;
mod stats;

pub use failure::{Failure, Kind};
pub use hub::{CameraStatus, Event, Hub, Latest, Subscription};
pub use mail::{Inbox, Mail};
pub use stats::{EngineStatus, LATENCY_BOUNDS_S, Stats};

use crate::cli::SampleArgs;
use crate::session::{Fixed, Picture};
use mail::Outbox;
use queue::Queue;
use serde_json::Value;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most jobs that wait while one runs.
pub const QUEUE_MAX: usize = 16;

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A client of the API. What it asks is nobody else's business: no event tells of it.
    Client,
    /// A prompt of the watch loop: listeners of the [`Hub`] hear its words.
    Watch {
        /// The camera's name.
        camera: String,
        /// The prompt's name.
        prompt: String,
    },
}

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Format {
    /// Text.
    #[default]
    Text,
    /// Any JSON object.
    Json,
    /// JSON that follows this schema.
    Schema(Value),
}

/// Which tools an answer may call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// Those it wants.
    #[default]
    Auto,
    /// None.
    Nothing,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// Something to answer.
pub struct Job {
    /// Who asks.
    pub origin: Origin,
    /// Messages in the form of the chat template: a picture is a part `{"type": "image"}`.
    pub messages: Vec<Value>,
    /// The pictures, in the order of their parts.
    pub pictures: Vec<Picture>,
    /// Tools in the form of the OpenAI API.
    pub tools: Vec<Value>,
    /// Which of them may be called.
    pub tool_choice: ToolChoice,
    /// How words are chosen, and how many.
    pub sample: SampleArgs,
    /// What the answer must look like.
    pub format: Format,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// When the answer must end, as it is then.
    pub deadline: Option<Instant>,
    /// With what of it the next job is expected to begin.
    pub fixed: Fixed,
    /// Dropped with the job: a share of some budget.
    pub hold: Option<Box<dyn Any + Send>>,
}

impl Job {
    /// A job of `origin` with nothing in it yet.
    pub fn new(origin: Origin, sample: SampleArgs) -> Self {
        Self {
            origin,
            messages: Vec::new(),
            pictures: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::default(),
            sample,
            format: Format::default(),
            stop: Vec::new(),
            deadline: None,
            fixed: Fixed::Nothing,
            hold: None,
        }
    }
}

/// A job on its way to the engine.
struct Queued {
    id: u64,
    job: Job,
    since: Instant,
    out: Outbox,
}

/// What every thread shares.
struct Shared {
    queue: Queue<Queued>,
    hub: Hub,
    stats: Stats,
}

/// The service, from any thread. Clones are the same service.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Default for Handle {
    fn default() -> Self {
        Self::new(QUEUE_MAX)
    }
}

impl Handle {
    /// A service without an engine yet; at most `queue_max` jobs wait.
    pub fn new(queue_max: usize) -> Self {
        Self(Arc::new(Shared { queue: Queue::new(queue_max), hub: Hub::new(), stats: Stats::new() }))
    }

    /// Asks for `job` to be done. Dropping the inbox cancels it.
    ///
    /// # Errors
    /// If the model is not loaded yet, the queue is full, or the service stops: each says when to try again.
    pub fn submit(&self, job: Job) -> Result<Inbox, Failure> {
        run::check(&job)?;
        let stats = &self.0.stats;
        match stats.engine() {
            EngineStatus::Loading => return Err(Failure::loading()),
            EngineStatus::Stopping => return Err(Failure::stopping()),
            EngineStatus::Ready | EngineStatus::Failed(_) => {}
        }
        let (out, inbox) = mail::mailbox(stats.text_bytes_max());
        let queued = Queued { id: stats.next_id(), job, since: Instant::now(), out };
        match self.0.queue.push(queued, |q| q.out.cancelled()) {
            Ok(()) => Ok(inbox),
            Err(queue::Refused::Full) => {
                stats.refused();
                Err(Failure::full(self.retry_after()))
            }
            Err(queue::Refused::Closed) => Err(Failure::stopping()),
        }
    }

    /// When a place in the queue is likely to be free.
    fn retry_after(&self) -> Duration {
        let mean = self.0.stats.mean_job_s().clamp(1.0, 30.0);
        Duration::from_secs(mean.ceil() as u64)
    }

    /// Jobs that wait.
    pub fn waiting(&self) -> usize {
        self.0.queue.len()
    }

    /// Most jobs that may wait.
    pub fn queue_max(&self) -> usize {
        self.0.queue.max()
    }

    /// What happens, and the latest pictures.
    pub fn hub(&self) -> &Hub {
        &self.0.hub
    }

    /// Counts, and how the engine is.
    pub fn stats(&self) -> &Stats {
        &self.0.stats
    }

    /// Takes no more jobs, ends the running one after its current token, and lets [`Handle::run`] return.
    pub fn stop(&self) {
        self.0.stats.set_engine(EngineStatus::Stopping);
        for queued in self.0.queue.close() {
            queued.out.end(Err(Failure::stopping()));
        }
    }

    /// Whether [`Handle::stop`] was called.
    pub fn stopping(&self) -> bool {
        self.0.stats.engine() == EngineStatus::Stopping
    }
}
