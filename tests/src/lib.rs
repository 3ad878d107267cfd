//! What the end-to-end tests share: the bundled models in memory, a storage with seeded faults, goldens.
//!
//! Everything is found relative to this crate, so a clone needs nothing else.
#![forbid(unsafe_code)]

use forerun_engine::{
    Engine, Tuning,
    config::Config,
    plan::{KvType, Options, Plan, Residency, VisionOptions},
    ports::{Clock, Completion, Read, ReadError, Storage, Workers},
    slicing::Detail,
    weights::Weights,
};
use forerun_format::gguf::Header;
use forerun_kernels::KernelSet;
use std::path::{Path, PathBuf};

pub mod checkpoint;
pub mod golden;
pub mod record;
pub mod vocabulary;

/// A file below `tests/`.
pub fn path(relative: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// Bytes on a four-byte boundary.
pub struct Aligned(Vec<f32>);

impl Aligned {
    /// `bytes` zero bytes; a multiple of four.
    pub fn zeroed(bytes: usize) -> Self {
        Self(vec![0.0; bytes / 4])
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    /// The bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// A model file in memory.
pub struct Model {
    /// The whole file.
    pub file: Vec<u8>,
    /// Its configuration.
    pub config: Config,
    /// Its directory.
    pub weights: Weights,
    resident: Aligned,
}

impl Model {
    /// Opens `tests/models/NAME.gguf`.
    pub fn bundled(name: &str) -> Self {
        Self::from_bytes(std::fs::read(path(format!("models/{name}.gguf"))).expect("bundled model"))
    }

    /// Opens a model file's bytes.
    pub fn from_bytes(file: Vec<u8>) -> Self {
        let header = Header::parse(&file, file.len() as u64).expect("header");
        let config = Config::read(&header).expect("configuration");
        let weights = Weights::read(&header, &config).expect("tensors");
        let mut resident = Aligned::zeroed(weights.resident_bytes);
        let start = weights.resident_offset as usize;
        resident.bytes_mut().copy_from_slice(&file[start..][..weights.resident_bytes]);
        let kernels = KernelSet::select(None).expect("kernels");
        weights.check_resident(kernels, resident.bytes()).expect("checksums");
        Self { file, config, weights, resident }
    }

    /// The header, parsed again.
    pub fn header(&self) -> Header<'_> {
        Header::parse(&self.file, self.file.len() as u64).expect("header")
    }

    /// Calls `f` with an engine made as `setup` says.
    pub fn with<R>(&self, setup: &Setup<'_>, f: impl FnOnce(&mut Engine<'_, MemStorage<'_>>) -> R) -> R {
        let vision = setup.detail.map(|detail| VisionOptions { detail, picture_bytes: 0, residency: setup.residency });
        let options = Options {
            context: setup.context,
            chunk: setup.chunk,
            kv: setup.kv,
            vision,
            prefix: setup.prefix,
            cap_bytes: None,
            slots_max: setup.slots,
            tokenizer_bytes: 0,
        };
        let plan = Plan::new(&self.config, &self.weights, options).expect("plan");
        let mut block = vec![0f32; plan.block_elems()];
        let storage = MemStorage::new(&self.file, plan.storage_slots(), plan.slot_bytes, setup);
        let mut engine = Engine::new(
            &self.config,
            &self.weights,
            &plan,
            &self.resident.bytes()[..plan.resident_bytes],
            &mut block,
            storage,
            setup.workers,
            setup.kernels,
            &Ticks,
            setup.tuning,
        );
        f(&mut engine)
    }
}

/// How an engine is made.
pub struct Setup<'a> {
    /// Tokens that fit.
    pub context: usize,
    /// Tokens in a chunk.
    pub chunk: usize,
    /// KV cache type.
    pub kv: KvType,
    /// Pictures in this mode.
    pub detail: Option<Detail>,
    /// Where the vision tower is.
    pub residency: Residency,
    /// Room to save a state.
    pub prefix: bool,
    /// Most expert slots.
    pub slots: Option<usize>,
    /// Reads in flight.
    pub depth: usize,
    /// Seed of the order in which reads land, and of the faults.
    pub seed: u64,
    /// What goes wrong.
    pub faults: Faults,
    /// Threads.
    pub workers: &'a dyn Workers,
    /// Kernel variant.
    pub kernels: &'static KernelSet,
    /// Tuning.
    pub tuning: Tuning,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self {
            context: 512,
            chunk: 64,
            kv: KvType::F32,
            detail: None,
            residency: Residency::Resident,
            prefix: false,
            slots: None,
            depth: 16,
            seed: 1,
            faults: Faults::default(),
            workers: &forerun_engine::ports::Serial,
            kernels: KernelSet::select(None).expect("kernels"),
            tuning: Tuning::default(),
        }
    }
}

/// What a bad disk does, in thousandths of all reads.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// The read fails.
    pub errors: u64,
    /// One bit of what it brings is wrong.
    pub flips: u64,
}

/// The kernel variants under which whole models must give the reference's answers: all that this CPU runs, or those that
/// `FORERUN_TEST_KERNELS` names. An emulator is so slow that `board.sh` gives each variant to one of its CPUs.
///
/// # Panics
/// If one that is named does not run here.
pub fn variants() -> Vec<&'static KernelSet> {
    let Ok(names) = std::env::var("FORERUN_TEST_KERNELS") else {
        return KernelSet::available().collect();
    };
    let named =
        |name| KernelSet::select(Some(name)).unwrap_or_else(|| panic!("kernels {name:?} do not run on this CPU"));
    names.split(',').map(named).collect()
}

/// A clock that stands still.
pub struct Ticks;

impl Clock for Ticks {
    fn now_us(&self) -> u64 {
        0
    }
}

/// A storage over bytes in memory whose reads land in a seeded random order.
pub struct MemStorage<'a> {
    file: &'a [u8],
    slots: Aligned,
    slot_bytes: usize,
    depth: usize,
    flying: Vec<Read>,
    seed: u64,
    faults: Faults,
    /// Bits that were flipped so far.
    pub flipped: u64,
}

impl<'a> MemStorage<'a> {
    fn new(file: &'a [u8], slots: usize, slot_bytes: usize, setup: &Setup<'_>) -> Self {
        Self {
            file,
            slots: Aligned::zeroed(slots * slot_bytes),
            slot_bytes,
            depth: setup.depth,
            flying: Vec::new(),
            // Neighbouring seeds differ in few bits, and xorshift wants some of them set.
            seed: setup.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            faults: setup.faults,
            flipped: 0,
        }
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed >> 16
    }
}

impl Storage for MemStorage<'_> {
    fn slots(&self) -> usize {
        self.slots.bytes().len().checked_div(self.slot_bytes).unwrap_or(0)
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn depth_max(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        let n = reads.len().min(self.depth - self.flying.len());
        for r in &reads[..n] {
            assert!(self.flying.iter().all(|f| f.slot != r.slot), "slot {} is in flight", r.slot);
        }
        self.flying.extend_from_slice(&reads[..n]);
        n
    }

    fn complete(&mut self, _wait: bool) -> Option<Completion> {
        if self.flying.is_empty() {
            return None;
        }
        let i = self.random() as usize % self.flying.len();
        let r = self.flying.swap_remove(i);
        let at = r.slot as usize * self.slot_bytes;
        let Some(from) = self.file.get(r.offset as usize..).and_then(|f| f.get(..r.bytes as usize)) else {
            return Some(Completion { slot: r.slot, result: Err(ReadError::Eof) });
        };
        self.slots.bytes_mut()[at..][..from.len()].copy_from_slice(from);
        let bits = from.len() as u64 * 8;
        if self.random() % 1000 < self.faults.errors {
            return Some(Completion { slot: r.slot, result: Err(ReadError::Os(5)) });
        }
        if self.random() % 1000 < self.faults.flips {
            let bit = self.random() % bits;
            self.slots.bytes_mut()[at + bit as usize / 8] ^= 1 << (bit % 8);
            self.flipped += 1;
        }
        Some(Completion { slot: r.slot, result: Ok(()) })
    }

    fn slot(&self, slot: u32) -> &[u8] {
        assert!(self.flying.iter().all(|f| f.slot != slot), "slot {slot} is in flight");
        &self.slots.bytes()[slot as usize * self.slot_bytes..][..self.slot_bytes]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        assert!(self.flying.iter().all(|f| f.slot != slot), "slot {slot} is in flight");
        &mut self.slots.bytes_mut()[slot as usize * self.slot_bytes..][..self.slot_bytes]
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let from = self.file.get(offset as usize..).and_then(|f| f.get(..out.len())).ok_or(ReadError::Eof)?;
        out.copy_from_slice(from);
        Ok(())
    }
}
