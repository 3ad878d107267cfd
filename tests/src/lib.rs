//! What the end-to-end tests share: the bundled models in memory, a simulated device, goldens.
//!
//! Everything is found relative to this crate, so a clone needs nothing else.
#![forbid(unsafe_code)]

use disk::{Disk, MemStorage, Timed, World};
use forerun_engine::{
    Engine, Tuning,
    config::Config,
    plan::{KvType, Options, Plan, Residency, VisionOptions},
    ports::Workers,
    slicing::Detail,
    weights::Weights,
};
use forerun_format::gguf::Header;
use forerun_kernels::KernelSet;
use std::path::{Path, PathBuf};

pub mod checkpoint;
pub mod disk;
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
        self.simulate(setup, |engine, _| f(engine))
    }

    /// [`Model::with`] with the time and the books of the device.
    pub fn simulate<R>(&self, setup: &Setup<'_>, f: impl FnOnce(&mut Engine<'_, MemStorage<'_>>, &World) -> R) -> R {
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
        let world = World::default();
        let workers = Timed::new(setup.workers, &world, &setup.disk, setup.seed);
        let storage =
            MemStorage::new(&self.file, plan.storage_slots(), plan.slot_bytes, setup.disk, setup.seed, &world);
        let mut engine = Engine::new(
            &self.config,
            &self.weights,
            &plan,
            &self.resident.bytes()[..plan.resident_bytes],
            &mut block,
            storage,
            &workers,
            setup.kernels,
            &world,
            setup.tuning,
        );
        f(&mut engine, &world)
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
    /// The device.
    pub disk: Disk,
    /// Seed of what the device does.
    pub seed: u64,
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
            disk: Disk::default(),
            seed: 1,
            workers: &forerun_engine::ports::Serial,
            kernels: KernelSet::select(None).expect("kernels"),
            tuning: Tuning::default(),
        }
    }
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
