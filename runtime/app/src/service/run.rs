//! The engine's thread: takes jobs one by one until the service stops.

use super::{EngineStatus, Failure, Format, Handle, Job, Kind, Queued, Stats, ToolChoice};
use crate::error::AppError;
use crate::model::{Model, text_bytes_max};
use crate::reader::Reader;
use crate::session::{Answer, Look, Piece, Session};
use forerun_engine::ports::Storage;
use forerun_engine::{Engine, Observer};
use std::time::{Duration, Instant};

/// How often an idle engine says that it is alive.
const IDLE: Duration = Duration::from_secs(1);

/// Tells that the engine moves.
struct Pulse<'a>(&'a Stats);

impl Observer for Pulse<'_> {
    fn hidden(&mut self, _layer: usize, _first: usize, _x: &[f32]) {
        self.0.beat();
    }
}

impl Handle {
    /// Does jobs with `engine`, looking at pictures as `look` says, until [`Handle::stop`] is called.
    pub fn run<S: Storage>(&self, model: &Model, look: Look, engine: &mut Engine<'_, S>) {
        let stats = self.stats();
        stats.set_text_bytes_max(text_bytes_max(engine.context()));
        stats.beat();
        stats.set_engine(EngineStatus::Ready);
        let mut reader = Reader::new(engine);
        while let Ok(next) = self.0.queue.pop(IDLE) {
            match next {
                Some(queued) => self.one(model, look, &mut reader, queued),
                None => stats.beat(),
            }
        }
    }

    fn one<S: Storage>(&self, model: &Model, look: Look, reader: &mut Reader<'_, '_, S>, queued: Queued) {
        let Queued { id, job, since, out } = queued;
        let stats = self.stats();
        let start = Instant::now();
        stats.begin();
        let emit = |piece: Piece<'_>| match () {
            () if self.stopping() => Err(AppError::Stopped),
            () if out.push(piece) => Ok(()),
            () => Err(AppError::Cancelled),
        };
        let result = if out.cancelled() {
            Err(AppError::Cancelled)
        } else {
            out.start();
            answer(model, look, reader, &job, &mut Pulse(stats), emit)
        };
        let failure = result.as_ref().err().map(Failure::from);
        let broken = failure.as_ref().filter(|f| f.kind == Kind::Engine);
        let took = start.elapsed();
        stats.end(&result, broken.is_some(), took, reader.engine().counters());
        match (&failure, broken) {
            (_, Some(f)) => {
                log::error!("job {id} of {:?}: {f}", job.origin);
                stats.set_engine(EngineStatus::Failed(f.message.clone()));
            }
            (None, _) => {
                stats.set_engine(EngineStatus::Ready);
                log::info!("job {id} of {:?}: waited {:.1?}, took {took:.1?}", job.origin, start.duration_since(since));
            }
            (Some(f), _) => log::info!("job {id} of {:?}: {f}", job.origin),
        }
        // What it held is free before the asker can ask again.
        drop(job);
        out.end(match failure {
            Some(f) => Err(f),
            None => result.map_err(|e| Failure::from(&e)),
        });
    }
}

fn answer<S: Storage>(
    model: &Model,
    look: Look,
    reader: &mut Reader<'_, '_, S>,
    job: &Job,
    observer: &mut dyn Observer,
    mut emit: impl FnMut(Piece<'_>) -> Result<(), AppError>,
) -> Result<Answer, AppError> {
    let mut session = Session::new(model, look, None);
    session.messages.clone_from(&job.messages);
    session.pictures.clone_from(&job.pictures);
    session.fixed = job.fixed;
    session.answer(reader, &job.sample, observer, &mut emit)
}

/// Refuses what this build cannot do.
pub(super) fn check(job: &Job) -> Result<(), Failure> {
    let tools = !job.tools.is_empty() && job.tool_choice != ToolChoice::Nothing;
    for (asked, what) in [
        (job.format != Format::Text, "answers that follow a format"),
        (tools, "tools"),
        (!job.stop.is_empty(), "stop texts"),
    ] {
        if asked {
            let message = format!("{what}: not supported by this version: leave them out of the request");
            return Err(Failure::new(Kind::Unsupported, message));
        }
    }
    Ok(())
}
