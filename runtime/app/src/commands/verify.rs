//! `forerun verify`: one hash over all logits, whatever the cap, prediction, threads, I/O, chunk size, checksums and storage, and
//! whether a prompt is read from its beginning or from a saved state.

use super::say;
use crate::cli::{Fault, SampleArgs, VerifyArgs};
use crate::error::AppError;
use crate::model::{Model, Setup, default_cap, model_path};
use crate::reader::Reader;
use crate::session::{Fixed, Picture, Session, user_message};
use forerun_engine::plan::{KvType, Options, Residency, VisionOptions};
use forerun_engine::ports::{Completion, Read, ReadError, Storage};
use forerun_engine::{Checksums, Observer, SumOrder, Tuning};
use forerun_linux::{IoChoice, sys};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::Duration;

/// Tokens in a chunk: one by one, some, and the prompt at once unless it is long, as `forerun run` does.
const CHUNKS: [usize; 3] = [512, 16, 1];
/// Most threads that are tried.
const THREADS_MAX: usize = 8;
/// Longest time that a shuffled storage keeps a completion from the one who waits for it, microseconds.
const DELAY_US_MAX: u64 = 200;

/// What one run is made with.
#[derive(Debug, Clone, Copy)]
struct Cell {
    slots_max: Option<usize>,
    predict: bool,
    threads: usize,
    io: IoChoice,
    chunk: usize,
    checksums: Checksums,
    shuffled: bool,
    residency: Residency,
    /// Read the prompt, go back to the state before the answer, and go on from there.
    saved: bool,
}

/// Values of every setting, those of the first run first.
struct Values {
    slots_max: Vec<Option<usize>>,
    predict: Vec<bool>,
    threads: Vec<usize>,
    io: [IoChoice; 2],
    chunk: [usize; 3],
    checksums: Vec<Checksums>,
    shuffled: Vec<bool>,
    residency: Vec<Residency>,
    saved: [bool; 2],
}

impl Values {
    /// Of a model with or without experts, of prompts with or without pictures: caps from all experts to the floor, threads from 1 to the number of CPUs.
    fn new(model: &Model, args: &VerifyArgs) -> Self {
        let moe = model.config.text.moe().map(|m| (m.top_k, model.weights.banks.len() * m.experts));
        let only = |n: usize| if moe.is_some() { n } else { 1 };
        let (top_k, experts) = moe.unwrap_or_default();
        let cpus = sys::available_cpus().len();
        // The floor is what a token uses in one layer; asking for fewer gives just that.
        let slots_max = [None, Some(experts / 2), Some(3 * top_k), Some(0)];
        let checksums = match args.inject {
            Some(Fault::FlipByte) => &[Checksums::Never][..],
            _ => &[Checksums::First, Checksums::Always, Checksums::Never],
        };
        Self {
            slots_max: slots_max[..only(4)].to_vec(),
            predict: [true, false][..only(2)].to_vec(),
            threads: (1..=cpus.clamp(2, THREADS_MAX)).collect(),
            io: [IoChoice::Auto, IoChoice::Pread],
            chunk: CHUNKS,
            checksums: checksums[..only(checksums.len())].to_vec(),
            shuffled: [false, true][..only(2)].to_vec(),
            residency: [Residency::Auto, Residency::Streamed][..if args.image.is_empty() { 1 } else { 2 }].to_vec(),
            saved: [false, true],
        }
    }

    /// Runs in which any two values of two settings meet.
    fn cells(&self) -> Vec<Cell> {
        let sizes = [
            self.slots_max.len(),
            self.predict.len(),
            self.threads.len(),
            self.io.len(),
            self.chunk.len(),
            self.checksums.len(),
            self.shuffled.len(),
            self.residency.len(),
            self.saved.len(),
        ];
        let cell = |[slots, predict, threads, io, chunk, checksums, shuffled, residency, saved]: [usize; 9]| Cell {
            slots_max: self.slots_max[slots],
            predict: self.predict[predict],
            threads: self.threads[threads],
            io: self.io[io],
            chunk: self.chunk[chunk],
            checksums: self.checksums[checksums],
            shuffled: self.shuffled[shuffled],
            residency: self.residency[residency],
            saved: self.saved[saved],
        };
        pairwise(sizes).into_iter().map(cell).collect()
    }
}

/// Few rows, the first of them zeros, in which any two values of two settings meet; setting `i` has the values
/// `0..sizes[i]`. Greedy: each row begins with a pair that has not met yet and takes, setting by setting, the value that
/// meets most others for the first time.
fn pairwise<const N: usize>(sizes: [usize; N]) -> Vec<[usize; N]> {
    let values: Vec<(usize, usize)> = (0..N).flat_map(|i| (0..sizes[i]).map(move |v| (i, v))).collect();
    let pair = |a: (usize, usize), b: (usize, usize)| (a.min(b), a.max(b));
    let pairs = values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b)));
    let mut left: BTreeSet<_> = pairs.filter(|((i, _), (j, _))| i < j).collect();
    let (mut rows, mut row) = (Vec::new(), [0; N]);
    loop {
        for j in 0..N {
            left.retain(|&(a, b)| b != (j, row[j]) || a.1 != row[a.0]);
        }
        rows.push(row);
        let Some(&((i, v), (j, w))) = left.first() else { return rows };
        let mut set = vec![(i, v), (j, w)];
        for k in (0..N).filter(|&k| k != i && k != j) {
            let new = |v: usize| set.iter().filter(|&&other| left.contains(&pair((k, v), other))).count();
            // Of equals the one after that of the last row: what has met all takes turns.
            let turns = (1..=sizes[k]).map(|turn| (row[k] + turn) % sizes[k]);
            let best = turns.rev().max_by_key(|&v| new(v)).unwrap_or(0);
            set.push((k, best));
        }
        set.iter().for_each(|&(k, v)| row[k] = v);
    }
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

/// A storage that may do what bad ones do: bring reads late and in another order, and flip a bit.
struct Meddler<S> {
    inner: S,
    /// Flip one bit of the first expert that is delivered, each time it is.
    flip: bool,
    victim: Option<u64>,
    /// Where what was last read into each slot begins.
    offsets: Vec<u64>,
    /// State of the order, if there is to be another.
    shuffle: Option<u64>,
    /// Reads that ended and were not told of yet.
    kept: Vec<Completion>,
}

impl<S: Storage> Meddler<S> {
    fn new(inner: S, flip: bool, shuffle: Option<u64>) -> Self {
        let (slots, depth) = (inner.slots(), inner.depth_max());
        Self { inner, flip, victim: None, offsets: vec![0; slots], shuffle, kept: Vec::with_capacity(depth) }
    }

    /// The next read to tell of.
    fn next(&mut self, wait: bool) -> Option<Completion> {
        let Some(random) = &mut self.shuffle else { return self.inner.complete(wait) };
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let random = *random >> 16;
        if !wait && !random.is_multiple_of(4) {
            return None;
        }
        // As often as not after all others that are under way.
        let all = wait && random & 4 > 0;
        while let Some(c) = self.inner.complete(all || wait && self.kept.is_empty()) {
            self.kept.push(c);
        }
        if wait {
            sleep(Duration::from_micros((random >> 3) % DELAY_US_MAX));
        }
        let i = (random >> 12) as usize % self.kept.len().max(1);
        (i < self.kept.len()).then(|| self.kept.swap_remove(i))
    }
}

impl<S: Storage> Storage for Meddler<S> {
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
        let c = self.next(wait)?;
        let offset = self.offsets[c.slot as usize];
        if self.flip && c.result.is_ok() && *self.victim.get_or_insert(offset) == offset {
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
    session.pictures.extend(args.image.iter().cloned().map(Picture::File));
    session.fixed = Fixed::Messages;
    if args.inject.is_some() && model.config.text.moe().is_none() {
        return Err(AppError::Input("this model has no experts to break: --inject needs a mixture of experts".into()));
    }
    let sample =
        SampleArgs { max_tokens: args.tokens, temperature: Some(0.0), top_p: None, top_k: None, seed: 0, think: false };

    let mut hashes: Vec<String> = Vec::new();
    say(format_args!(
        "{:<9}{:<11}{:<8}{:<9}{:<7}{:<10}{:<9}{:<9}{:<6}{:>8}{:>8}{:>11}  hash\n",
        "slots",
        "prediction",
        "threads",
        "io",
        "chunk",
        "checksums",
        "storage",
        "vision",
        "state",
        "hits",
        "misses",
        "predicted"
    ))?;
    for (i, cell) in Values::new(&model, args).cells().into_iter().enumerate() {
        let tuning = Tuning {
            predict: cell.predict,
            checksums: cell.checksums,
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
        let seed = cell.shuffled.then_some(0x9E37_79B9_7F4A_7C15 ^ i as u64);
        let mut hasher = Hasher::default();
        let (counters, cached, plan, io) = model.with_engine(
            &setup,
            |inner| Meddler::new(inner, flip, seed),
            |engine, facts| {
                let mut reader = Reader::new(engine);
                if cell.saved {
                    let prompt_alone = SampleArgs { max_tokens: 1, ..sample.clone() };
                    session.answer(&mut reader, &prompt_alone, &mut hasher, &mut |_| Ok(()))?;
                }
                let answer = session.answer(&mut reader, &sample, &mut hasher, &mut |_| Ok(()))?;
                Ok((reader.engine().counters(), answer.cached_tokens, facts.plan.clone(), facts.io))
            },
        )?;
        let hash = hasher.hash();
        say(format_args!(
            "{:<9}{:<11}{:<8}{:<9}{:<7}{:<10}{:<9}{:<9}{:<6}{:>8}{:>8}{:>11}  {hash}\n",
            plan.slots,
            if cell.predict { "on" } else { "off" },
            cell.threads,
            io.split(',').next().unwrap_or(io),
            cell.chunk,
            match cell.checksums {
                Checksums::First => "first",
                Checksums::Always => "always",
                Checksums::Never => "never",
            },
            if cell.shuffled { "shuffled" } else { "plain" },
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight slots whose reads end at once, in order.
    struct InOrder(Vec<u32>);

    impl Storage for InOrder {
        fn slots(&self) -> usize {
            8
        }

        fn slot_bytes(&self) -> usize {
            4096
        }

        fn depth_max(&self) -> usize {
            8
        }

        fn submit(&mut self, reads: &[Read]) -> usize {
            self.0.extend(reads.iter().map(|r| r.slot));
            reads.len()
        }

        fn complete(&mut self, _wait: bool) -> Option<Completion> {
            (!self.0.is_empty()).then(|| Completion { slot: self.0.remove(0), result: Ok(()) })
        }

        fn slot(&self, _slot: u32) -> &[u8] {
            &[]
        }

        fn slot_mut(&mut self, _slot: u32) -> &mut [u8] {
            &mut []
        }

        fn read_at(&mut self, _offset: u64, _out: &mut [u8]) -> Result<(), ReadError> {
            Ok(())
        }
    }

    #[test]
    fn a_shuffled_storage_is_late_and_loses_nothing() {
        let (mut late, mut orders) = (0, BTreeSet::new());
        for seed in 1..100 {
            let mut m = Meddler::new(InOrder(Vec::new()), false, Some(0x9E37_79B9_7F4A_7C15u64.wrapping_mul(seed)));
            let reads: Vec<_> = (0..8).map(|slot| Read { slot, offset: 0, bytes: 4096 }).collect();
            assert_eq!(m.submit(&reads), 8);
            let early = m.complete(false);
            late += usize::from(early.is_none());
            let rest = std::iter::from_fn(|| m.complete(true));
            let order: Vec<u32> = early.into_iter().chain(rest).map(|c| c.slot).collect();
            let slots: BTreeSet<u32> = order.iter().copied().collect();
            assert!(order.len() == 8 && slots.len() == 8, "seed {seed}: {order:?}");
            orders.insert(order);
        }
        assert!(late > 20 && late < 99 && orders.len() > 50, "{late} late, {} orders", orders.len());
    }

    #[test]
    fn any_two_values_meet_in_few_rows() {
        for (sizes, most) in
            [([4, 2, 2, 2, 3, 3, 2, 2, 2], 15), ([4, 2, 8, 2, 3, 3, 2, 2, 2], 36), ([1, 1, 2, 2, 3, 1, 1, 1, 2], 8)]
        {
            let rows = pairwise(sizes);
            assert_eq!(rows[0], [0; 9]);
            assert!(rows.len() <= most, "{sizes:?}: {} rows", rows.len());
            for j in 0..9 {
                for i in 0..j {
                    let met: BTreeSet<_> = rows.iter().map(|r| (r[i], r[j])).collect();
                    assert_eq!(met.len(), sizes[i] * sizes[j], "{sizes:?}: {i} and {j}");
                }
            }
        }
    }
}
