//! `forerun verify`: one hash over all logits, whatever the cap, prediction, threads, I/O and chunk size, and whether a prompt is
//! read from its beginning or from a saved state.

use super::say;
use crate::cli::{Fault, SampleArgs, VerifyArgs};
use crate::error::AppError;
use crate::model::{Model, Setup, default_cap, model_path};
use crate::reader::Reader;
use crate::session::{Fixed, Session, user_message};
use forerun_engine::plan::{KvType, Options, Residency, VisionOptions};
use forerun_engine::ports::{Completion, Read, ReadError, Storage};
use forerun_engine::{Checksums, Observer, SumOrder, Tuning};
use forerun_linux::IoChoice;
use sha2::{Digest, Sha256};

/// One cell of the matrix.
#[derive(Debug, Clone, Copy)]
struct Cell {
    slots_max: Option<usize>,
    predict: bool,
    threads: usize,
    io: IoChoice,
    chunk: usize,
    residency: Residency,
    /// Read the prompt, go back to the state before the answer, and go on from there.
    saved: bool,
}

/// All combinations of slots (all that fit, room for some prediction, the floor), prediction and threads; the I/O engine,
/// the chunk size, the place of the vision tower and where the prompt is read from change along the way, so that each of their
/// values meets each number of
/// slots.
fn matrix(top_k: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    // The floor is what a token uses in one layer; asking for fewer gives just that.
    for slots_max in [None, Some(3 * top_k), Some(0)] {
        for predict in [true, false] {
            for threads in [1, 2] {
                let io = if threads == 1 { IoChoice::Auto } else { IoChoice::Pread };
                let chunk = if predict { 64 } else { 5 };
                let residency = if predict { Residency::Auto } else { Residency::Streamed };
                let saved = predict == (threads == 2);
                cells.push(Cell { slots_max, predict, threads, io, chunk, residency, saved });
            }
        }
    }
    cells
}

/// Hashes the bits of each token's logits. A token that is computed again, after going back, takes the place of the first.
#[derive(Default)]
struct Hasher(Vec<[u8; 32]>);

impl Hasher {
    fn hash(&self) -> String {
        Sha256::digest(self.0.concat())[..8].iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl Observer for Hasher {
    fn wants_all_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, token: usize, logits: &[f32]) {
        let mut sha = Sha256::new();
        for x in logits {
            sha.update(x.to_le_bytes());
        }
        self.0.truncate(token);
        self.0.push(sha.finalize().into());
    }
}

/// A storage that flips one bit of the first expert it delivers, each time it delivers it.
struct FlipByte<S> {
    inner: S,
    victim: Option<u64>,
    offsets: Vec<u64>,
    active: bool,
}

impl<S: Storage> Storage for FlipByte<S> {
    fn slots(&self) -> usize {
        self.inner.slots()
    }

    fn slot_bytes(&self) -> usize {
        self.inner.slot_bytes()
    }

    fn depth_max(&self) -> usize {
        self.inner.depth_max()
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        for r in reads {
            self.offsets[r.slot as usize] = r.offset;
        }
        self.inner.submit(reads)
    }

    fn complete(&mut self, wait: bool) -> Option<Completion> {
        let c = self.inner.complete(wait)?;
        let offset = self.offsets[c.slot as usize];
        if self.active && c.result.is_ok() && *self.victim.get_or_insert(offset) == offset {
            self.inner.slot_mut(c.slot)[1] ^= 1;
        }
        Some(c)
    }

    fn slot(&self, slot: u32) -> &[u8] {
        self.inner.slot(slot)
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        self.inner.slot_mut(slot)
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        self.inner.read_at(offset, out)
    }
}

/// Runs the command.
///
/// # Errors
/// If the hashes differ, or a run fails.
pub fn run(args: &VerifyArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    let look = super::run::look(&model, &args.vision, &args.image)?;
    let vision = (!args.image.is_empty()).then(|| model.vision_options(&look)).transpose()?;
    let mut session = Session::new(&model, look, None);
    session.messages.push(user_message(args.image.len(), &args.prompt));
    session.pictures.clone_from(&args.image);
    session.fixed = Fixed::Messages;
    if args.inject.is_some() && model.config.text.moe().is_none() {
        return Err(AppError::Input("this model has no experts to break: --inject needs a mixture of experts".into()));
    }
    let sample =
        SampleArgs { max_tokens: args.tokens, temperature: Some(0.0), top_p: None, top_k: None, seed: 0, think: false };

    let top_k = model.config.text.moe().map_or(0, |m| m.top_k);
    let mut hashes: Vec<String> = Vec::new();
    say(format_args!(
        "{:<9}{:<11}{:<8}{:<9}{:<7}{:<9}{:<6}{:>8}{:>8}{:>11}  hash\n",
        "slots", "prediction", "threads", "io", "chunk", "vision", "state", "hits", "misses", "predicted"
    ))?;
    for (i, cell) in matrix(top_k).into_iter().enumerate() {
        let tuning = Tuning {
            predict: cell.predict,
            checksums: if args.inject == Some(Fault::FlipByte) { Checksums::Never } else { Checksums::First },
            sum_order: if args.inject == Some(Fault::ArrivalOrder) { SumOrder::Arrival } else { SumOrder::Router },
        };
        let context = model.context(args.context, 1024);
        let options = Options {
            context,
            chunk: cell.chunk,
            kv: KvType::F16,
            vision: vision.map(|v| VisionOptions { residency: cell.residency, ..v }),
            prefix: cell.saved,
            cap_bytes: default_cap(),
            slots_max: cell.slots_max,
            tokenizer_bytes: model.tokenizer_bytes(context),
        };
        let setup = Setup { options, threads: cell.threads, io: cell.io, tuning };
        let flip = args.inject == Some(Fault::FlipByte) && i > 0;
        let mut hasher = Hasher::default();
        let plan = model.plan(&setup)?;
        let slots = plan.slots;
        let (counters, cached) = model.with_engine(
            &setup,
            |inner| FlipByte { offsets: vec![0; inner.slots()], inner, victim: None, active: flip },
            |engine, _| {
                let mut reader = Reader::new(engine);
                if cell.saved {
                    let prompt_alone = SampleArgs { max_tokens: 1, ..sample.clone() };
                    session.answer(&mut reader, &prompt_alone, &mut hasher, &mut |_| Ok(()))?;
                }
                let answer = session.answer(&mut reader, &sample, &mut hasher, &mut |_| Ok(()))?;
                Ok((reader.engine().counters(), answer.cached_tokens))
            },
        )?;
        let hash = hasher.hash();
        let io = if cell.io == IoChoice::Pread { "pread" } else { "auto" };
        say(format_args!(
            "{slots:<9}{:<11}{:<8}{io:<9}{:<7}{:<9}{:<6}{:>8}{:>8}{:>11}  {hash}\n",
            if cell.predict { "on" } else { "off" },
            cell.threads,
            cell.chunk,
            plan.residency().map_or("-", super::plan::residency),
            if cached > 0 { "saved" } else { "fresh" },
            counters.hits,
            counters.misses,
            counters.predicted
        ))?;
        hashes.push(hash);
    }
    let different = hashes.iter().filter(|h| **h != hashes[0]).count();
    if different > 0 {
        return Err(AppError::Check(format!(
            "NOT lossless: {different} of {} runs differ from the first: do not trust this machine's memory or storage; report it \
             if it happens again",
            hashes.len()
        )));
    }
    say(format_args!("lossless: one hash {} over {} runs\n", hashes[0], hashes.len()))
}
