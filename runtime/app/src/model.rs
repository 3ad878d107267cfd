//! Opens a model file and runs something with an engine on it: header, plan, arena, resident weights, threads.

use crate::cli::{EngineArgs, ModelArgs, VisionArgs};
use crate::constrain::{Matcher, TokenIndex};
use crate::error::AppError;
use crate::prompt::PromptBuilder;
use crate::session::Look;
use crate::template::{Template, TemplateError};
use crate::tokenizer::Tokenizer;
use forerun_engine::{
    Checksums, Engine, Tuning,
    config::Config,
    plan::{KvType, Options, Plan, Residency, VisionOptions},
    slicing::{Detail, SliceParams, crop_patches_max},
    weights::Weights,
};
use forerun_format::{FormatError, gguf::Header, keys};
use forerun_kernels::KernelSet;
use forerun_linux::{Arena, Cores, DirectFile, FileStorage, IoChoice, Pool, SYSFS_CPUS, sys};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Once;

/// Longest header that is read: a vocabulary of a million tokens is about 40 MiB.
const HEADER_BYTES_MAX: u64 = 64 << 20;

/// Reads in flight, at most.
const DEPTH: usize = 32;

/// The slot of a dense model that streams no tower: its storage only reads embedding rows.
const NO_SLOT_BYTES: usize = 4096;

/// Bytes a pixel while a picture is decoded: up to 8 as the decoder has them and 3 as RGB.
const DECODE_BYTES_PER_PIXEL: u64 = 11;

/// Heap that a chat template takes once it is compiled; `tests/tests/tokenizer_size.rs` says how much the bundled one does.
pub const TEMPLATE_BYTES: u64 = 1 << 20;

/// Heap of a compiled schema and of compiling it, at most; `tests/tests/constrain_size.rs` tries the largest ones.
pub const GRAMMAR_BYTES: u64 = 2 << 20;

/// Heap that tokenizing takes for each byte of text: 54 were measured for letters that normalizing takes apart, 32 for
/// words, 7 for sentences (`tests/tests/tokenizer_size.rs`). The rest is for copies of the text on its way there, and for the
/// tokens that come of it.
pub const ENCODE_BYTES_PER_BYTE: u64 = 96;

/// A model file, understood but not loaded.
pub struct Model {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// Shapes.
    pub config: Config,
    /// Tensor directory.
    pub weights: Weights,
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub template: Template,
    /// Placeholder expansion and positions.
    pub prompts: PromptBuilder,
}

/// How an engine is made.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Context, chunk, cap, pictures.
    pub options: Options,
    /// Threads.
    pub threads: usize,
    /// How experts are read.
    pub io: IoChoice,
    /// Prediction, checksums, order of sums.
    pub tuning: Tuning,
}

/// What an engine was made of, to be shown.
#[derive(Debug)]
pub struct Facts {
    /// The memory plan.
    pub plan: Plan,
    /// Kernel variant.
    pub kernels: &'static str,
    /// I/O engine.
    pub io: &'static str,
    /// Why it is not io_uring, if it is not and nobody asked for that.
    pub io_why: Option<String>,
    /// Threads.
    pub threads: usize,
    /// Whether the plan's memory is locked, so that it is never swapped.
    pub locked: bool,
    /// Milliseconds from the open file to the ready engine.
    pub load_ms: f64,
}

/// The path in `args`, else in the environment.
///
/// # Errors
/// If there is neither.
pub fn model_path(args: &ModelArgs) -> Result<PathBuf, AppError> {
    args.model
        .clone()
        .or_else(|| std::env::var_os("FORERUN_MODEL").filter(|path| !path.is_empty()).map(PathBuf::from))
        .ok_or_else(|| AppError::Usage("no model: give --model FILE or set FORERUN_MODEL".into()))
}

/// The kernels for this CPU, or those that `FORERUN_KERNELS` names.
///
/// # Errors
/// If it names none.
pub fn kernels() -> Result<&'static KernelSet, AppError> {
    let forced = std::env::var("FORERUN_KERNELS").ok();
    KernelSet::select(forced.as_deref()).ok_or_else(|| {
        let names: Vec<_> = KernelSet::available().map(|set| set.name).collect();
        AppError::Kernels(forced.unwrap_or_default(), names.join(", "))
    })
}

/// Bytes of the header at the start of `file`: as many as its parser asks for.
fn read_header(file: &mut std::fs::File, file_bytes: u64) -> io::Result<Result<Vec<u8>, FormatError>> {
    let mut bytes = Vec::new();
    let mut want = 1u64 << 20;
    loop {
        want = want.min(file_bytes).min(HEADER_BYTES_MAX);
        let more = want - bytes.len() as u64;
        bytes.reserve_exact(more as usize);
        file.by_ref().take(more).read_to_end(&mut bytes)?;
        match Header::parse(&bytes, file_bytes) {
            Err(FormatError::Truncated { need }) if bytes.len() as u64 == want && want < file_bytes => {
                if want == HEADER_BYTES_MAX {
                    let expected = format!("at most {HEADER_BYTES_MAX}");
                    return Ok(Err(FormatError::invalid(
                        "length of the header",
                        format!("over {want} bytes"),
                        expected,
                    )));
                }
                want = need.max(want * 2);
            }
            Err(e) => return Ok(Err(e)),
            Ok(_) => return Ok(Ok(bytes)),
        }
    }
}

impl Model {
    /// Reads the header of `path` and checks everything in it.
    ///
    /// # Errors
    /// If the file cannot be read or is not a model this build runs.
    pub fn open(path: &Path) -> Result<Self, AppError> {
        let at = |error| AppError::File { path: path.into(), error };
        let wrong = |error| AppError::Model { path: path.into(), error };
        // Before the open, which would wait for ever on a FIFO.
        if !path.metadata().map_err(at)?.is_file() {
            return Err(AppError::Input(format!(
                "{}: not a regular file: give a model file, which 'forerun-quant pack' makes of a checkpoint folder",
                path.display()
            )));
        }
        let mut file = std::fs::File::open(path).map_err(at)?;
        sys::read_randomly(&file);
        let file_bytes = file.metadata().map_err(at)?.len();
        let bytes = read_header(&mut file, file_bytes).map_err(at)?.map_err(wrong)?;
        let header = Header::parse(&bytes, file_bytes).map_err(wrong)?;
        let config = Config::read(&header).map_err(wrong)?;
        let weights = Weights::read(&header, &config).map_err(wrong)?;
        let tokenizer = Tokenizer::from_header(&header).map_err(wrong)?;
        let template = Template::from_header(&header).map_err(|e| match e {
            TemplateError::File(error) => wrong(error),
            e => wrong(FormatError::invalid(keys::CHAT_TEMPLATE, e.to_string(), "a template without mistakes")),
        })?;
        let prompts = PromptBuilder::new(&config, &tokenizer).map_err(wrong)?;
        // The header was read through the page cache, which is charged to us: give it back.
        sys::drop_page_cache(&file);
        Ok(Self { path: path.into(), file_bytes, config, weights, tokenizer, template, prompts })
    }

    /// Bytes of weights that one token's text layers and head read.
    pub fn bytes_per_token(&self) -> u64 {
        let resident = self.weights.text_bytes as u64;
        let top_k = self.config.text.moe().map_or(0, |m| m.top_k);
        resident + self.weights.banks.iter().map(|b| (b.stride * top_k) as u64).sum::<u64>()
    }

    /// The mode asked for, else the model's.
    pub fn detail(&self, args: &VisionArgs) -> Detail {
        args.detail.unwrap_or_else(|| self.config.vision.as_ref().map_or(Detail::X16, |(_, i)| i.detail))
    }

    /// Room for pictures that are looked at as `look` says.
    ///
    /// # Errors
    /// If the model has no vision tower.
    pub fn vision_options(&self, look: &Look) -> Result<VisionOptions, AppError> {
        let params = self.slicing(look)?;
        // A setting out of range is refused by the plan.
        let patches = crop_patches_max(&params, look.detail).unwrap_or(0);
        let crops = u64::from(params.max_slices) + 1;
        let crop_bytes = u64::from(patches) * u64::from(params.patch_size).pow(2) * 3 * crops;
        let picture_bytes = look.pixels_max.saturating_mul(DECODE_BYTES_PER_PIXEL);
        let picture_bytes = picture_bytes.saturating_add(look.file_bytes_max).saturating_add(crop_bytes);
        Ok(VisionOptions { detail: look.detail, picture_bytes, residency: Residency::Auto })
    }

    /// How pictures are cut.
    ///
    /// # Errors
    /// If the model has no vision tower.
    pub fn slicing(&self, look: &Look) -> Result<SliceParams, AppError> {
        let (vision, image) = self.config.vision.as_ref().ok_or_else(|| {
            AppError::Input("this model has no vision tower: leave the pictures out, or use one that has".into())
        })?;
        Ok(SliceParams {
            scale_resolution: image.scale_resolution,
            patch_size: vision.patch as u32,
            max_slices: look.max_slices.unwrap_or(image.max_slices),
        })
    }

    /// Tokens asked for, which the plan refuses if they are too many; else `usual`, or what the model takes.
    pub fn context(&self, asked: Option<usize>, usual: usize) -> usize {
        asked.unwrap_or(usual.min(self.config.text.context_max))
    }

    /// Settings for `args`, with room for pictures if there is any.
    pub fn setup(&self, args: &EngineArgs, vision: Option<VisionOptions>) -> Setup {
        let context = self.context(args.context, 4096);
        let options = Options {
            context,
            chunk: args.chunk.into(),
            kv: KvType::from(args.kv),
            vision: vision.map(|v| VisionOptions { residency: args.vision_residency.into(), ..v }),
            prefix: false,
            cap_bytes: args.memory.or_else(default_cap),
            slots_max: args.slots,
            tokenizer_bytes: self.tokenizer_bytes(context),
        };
        let threads = args.threads.map_or_else(|| cores().fast.len().clamp(1, 8), usize::from);
        let tuning = Tuning { predict: !args.no_predict, checksums: args.checksums.into(), ..Tuning::default() };
        Setup { options, threads, io: args.io.into(), tuning }
    }

    /// Heap bytes of the tokenizer, of the chat template, and of tokenizing the longest text that a context of `context`
    /// tokens allows.
    pub fn tokenizer_bytes(&self, context: usize) -> u64 {
        let text = text_bytes_max(context) as u64 * ENCODE_BYTES_PER_BYTE;
        self.tokenizer.heap_bytes() as u64 + TEMPLATE_BYTES + text
    }

    /// Heap bytes of what answers under a constraint take, to be added to those of the tokenizer in [`Options`]: the tokens in
    /// order, and a matcher.
    pub fn constraint_bytes(&self) -> u64 {
        let tokens = self.tokenizer.vocab_len();
        (TokenIndex::bytes_max(tokens) + Matcher::heap_bytes(tokens)) as u64 + GRAMMAR_BYTES
    }

    /// The plan for `setup`.
    ///
    /// # Errors
    /// If it does not fit.
    pub fn plan(&self, setup: &Setup) -> Result<Plan, AppError> {
        Ok(Plan::new(&self.config, &self.weights, setup.options)?)
    }

    /// Takes the plan's memory, loads the resident weights, starts threads and calls `f` with the engine. `wrap` may put
    /// something around the storage.
    ///
    /// # Errors
    /// If the plan does not fit, the file is damaged, or the system refuses something; and those of `f`.
    pub fn with_engine<S: forerun_engine::ports::Storage, R>(
        &self,
        setup: &Setup,
        wrap: impl FnOnce(FileStorage) -> S,
        f: impl FnOnce(&mut Engine<'_, S>, &Facts) -> Result<R, AppError>,
    ) -> Result<R, AppError> {
        let start = std::time::Instant::now();
        let system = |what| move |error| AppError::System { what, error };
        let full = |e: forerun_linux::ArenaFull| AppError::System { what: "arena", error: io::Error::other(e) };
        let plan = self.plan(setup)?;
        let kernels = kernels()?;
        let (slots, slot_bytes) = match plan.storage_slots() {
            0 => (1, NO_SLOT_BYTES),
            slots => (slots, plan.slot_bytes),
        };
        let resident_bytes = plan.resident_bytes;
        let block_elems = plan.block_elems();
        // Each piece starts on a 4 KiB boundary.
        let bytes = resident_bytes + (block_elems * 4).next_multiple_of(4096) + slots * slot_bytes + 4096;
        let arena = Arena::new(bytes).map_err(system("memory for the plan"))?;
        let resident = arena.take(resident_bytes, 4096).map_err(full)?;
        let memory = arena.take_io(slots * slot_bytes).map_err(full)?;
        let block = arena.take_f32(block_elems).map_err(full)?;
        arena.seal();
        let locked = lock(&arena);

        let file = DirectFile::open(&self.path).map_err(|error| AppError::File { path: self.path.clone(), error })?;
        let mut storage =
            FileStorage::open(file, memory, slots, slot_bytes, setup.io, DEPTH).map_err(system("expert reader"))?;
        storage.load(self.weights.resident_offset, resident).map_err(|e| AppError::File {
            path: self.path.clone(),
            error: io::Error::other(format!("resident weights: {e}")),
        })?;
        if setup.tuning.checksums != Checksums::Never {
            self.weights.check_resident(kernels, resident).map_err(|(tensor, found, expected)| AppError::Checksum {
                path: self.path.clone(),
                tensor,
                found,
                expected,
            })?;
        }
        let pool = workers(setup.threads).map_err(system("worker threads"))?;
        let clock = sys::MonotonicClock::new();
        let facts = Facts {
            plan,
            kernels: kernels.name,
            io: storage.backend(),
            io_why: storage.why().filter(|_| setup.io == IoChoice::Auto).map(str::to_owned),
            threads: setup.threads,
            locked,
            load_ms: start.elapsed().as_secs_f64() * 1e3,
        };
        let mut engine = Engine::new(
            &self.config,
            &self.weights,
            &facts.plan,
            resident,
            block,
            wrap(storage),
            &pool,
            kernels,
            &clock,
            setup.tuning,
        );
        if facts.plan.slots < facts.plan.experts {
            engine.probe()?;
        }
        f(&mut engine, &facts)
    }
}

/// Locks the arena if that is permitted. If not, says why, once. The kernel counts locked memory apart from the ring's
/// registered buffers, so a limit that holds the arena holds both.
fn lock(arena: &Arena) -> bool {
    static TOLD: Once = Once::new();
    let Err(error) = arena.lock() else { return true };
    TOLD.call_once(|| {
        log::info!(
            "memory is not locked and may be swapped: {error}: raise RLIMIT_MEMLOCK to {} KiB or more \
             ('ulimit -l', systemd: LimitMEMLOCK=infinity)",
            arena.bytes().div_ceil(1024)
        );
    });
    false
}

/// Most bytes of the text of a conversation, so that tokenizing it takes no more than was planned. Languages differ, but
/// few texts have over 5 bytes a token.
pub fn text_bytes_max(context: usize) -> usize {
    context.saturating_mul(8).saturating_add(4096)
}

/// CPUs of this machine.
fn cores() -> Cores {
    Cores::detect(Path::new(SYSFS_CPUS), &sys::available_cpus())
}

/// `threads` workers, on the fast CPUs if there are others.
///
/// # Errors
/// Those of [`Pool::new`].
pub fn workers(threads: usize) -> io::Result<Pool> {
    Pool::new(threads, cores().pins(threads))
}

/// Four fifths of what is free, and of what a memory cgroup allows.
pub fn default_cap() -> Option<u64> {
    let free = sys::memory_available_bytes();
    let limit = sys::cgroup_limit_bytes();
    free.into_iter().chain(limit).min().map(|b| b / 5 * 4)
}
