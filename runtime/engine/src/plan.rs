//! The memory plan: a sum of named lines. The same numbers size the buffers, so what is printed is what is taken.

use crate::buffers::lines;
use crate::cache::{ExpertCache, Shape};
use crate::config::{Config, Mixer, VisionConfig};
use crate::exec::q8_words;
use crate::slicing::{Detail, SliceError, SliceParams, crop_patches_max};
use crate::stream::{self, WINDOW_SLOTS};
use crate::weights::Weights;
use alloc::vec::Vec;
use core::fmt;
use forerun_format::PAGE;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// IEEE half, 2 bytes.
    F16,
    /// IEEE single, 4 bytes.
    F32,
}

impl KvType {
    /// `f16` or `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}

/// What a run needs room for.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Tokens that fit: prompt, visual tokens and answer.
    pub context: usize,
    /// Tokens computed together in prefill.
    pub chunk: usize,
    /// KV cache element type.
    pub kv: KvType,
    /// Room for pictures; `None` for text alone.
    pub vision: Option<VisionOptions>,
    /// Room to save the state after a prefix, which prompts that begin with it need not compute again.
    pub prefix: bool,
    /// Most bytes the process may be charged with; `None` takes what all experts need.
    pub cap_bytes: Option<u64>,
    /// Most expert slots to take, whatever the cap allows.
    pub slots_max: Option<usize>,
    /// Heap of the tokenizer and chat template, bytes.
    pub tokenizer_bytes: u64,
}

/// Room for pictures.
#[derive(Debug, Clone, Copy)]
pub struct VisionOptions {
    /// Mode.
    pub detail: Detail,
    /// Heap bytes that reading, decoding and cutting the largest picture takes.
    pub picture_bytes: u64,
    /// Where the vision tower is kept.
    pub residency: Residency,
}

/// Where the vision tower's weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// As the plan decides: see [`RESIDENT_SHARE`].
    Auto,
    /// In memory all the time.
    Resident,
    /// In the file: each crop reads them again, a few slots ahead of the computation.
    Streamed,
}

/// Share of all experts that must have slots beside a resident tower, where streaming it would give them more.
///
/// Both sides are bytes from one device, so its rate does not count. The 35B model's tower is 517 MiB, its window 17: 296
/// slots between them, 2.9 % of its 10,240 experts. A token asks for 320 experts of 1.77 MB, and docs/performance.md has the
/// hits by slots: near 7 % of the bank those slots are 11 hits in 100, 64 MB a token, which make good what a crop reads
/// after 9 tokens; near 22 %, 3.3 hits, 19 MB, 29 tokens. From a quarter on there are 15 more hits in 100 to gain in all:
/// 0.6 for those slots on average, and fewer the more slots there are: 170 tokens, more than an answer about a crop has. That
/// a crop's reads hide behind its computation, and a miss does not, only speaks for streaming.
pub const RESIDENT_SHARE: f64 = 0.5;

/// Strips of a streamed tower beside which no expert has a slot; longer ones read no faster.
const STRIP_BYTES: usize = 1 << 20;

/// Code, libraries, stacks, allocator: what the process is charged beside the other lines. After text and a picture on 8
/// threads, 5.3 MiB of a release build and 7.5 MiB of a debug build were resident on x86-64 beside mapping and heap
/// (`runtime/app/tests/budget.rs` holds the sum); one thread less takes 0.1 MiB less. On aarch64, all of the release build is
/// 3.7 MiB, and 64 KiB pages make at most 2.5 MiB of eight stacks with their thread-locals. The rest is margin.
pub const PROGRAM_BYTES: u64 = 8 << 20;

/// Bytes mapped by one byte of page table: 4 KiB an entry of 8.
const TABLE_RATIO: u64 = 512;

/// Bounce buffer and ring, bytes.
const IO_BYTES: u64 = 1 << 20;

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What for.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// The plan of one run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its lines; their sum is all the process is charged with.
    pub lines: Vec<Line>,
    /// The cap it keeps to, if there is one.
    pub cap_bytes: Option<u64>,
    /// Expert slots.
    pub slots: usize,
    /// Slots behind them that the vision tower streams through: 0 unless it does.
    pub window_slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of the resident region that are loaded, from its start.
    pub resident_bytes: usize,
    /// Experts in the file.
    pub experts: usize,
    /// Sizes of the engine's buffers.
    pub(crate) sizes: Sizes,
    /// Patches of the largest crop.
    pub patches_max: usize,
    /// Options it was made for.
    pub options: Options,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq)]
pub enum PlanError {
    /// The cap does not hold the smallest set of buffers.
    CapTooSmall {
        /// The cap, bytes.
        cap: u64,
        /// The smallest cap that would do, bytes.
        floor: u64,
        /// Bytes of the lines that a smaller context, chunk or picture would shrink.
        elastic: u64,
    },
    /// The context is not from 1 to what the model was trained for.
    Context {
        /// Asked for.
        found: usize,
        /// Largest.
        max: usize,
    },
    /// 16x was asked of a model without window merger, or pictures of a model without vision.
    NoVision(Detail),
    /// The picture settings are out of range.
    Slicing(SliceError),
    /// A buffer's size does not fit the address space.
    Overflow,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |b: u64| b.div_ceil(1 << 20);
        match self {
            Self::CapTooSmall { cap, floor, elastic } => write!(
                f,
                "a cap of {} MiB is too small: this model and these settings need at least {} MiB, of which {} MiB depend on \
                 --context, --chunk and the pictures: raise --memory, lower those, or pack the model with a smaller type",
                mib(*cap),
                mib(*floor),
                mib(*elastic)
            ),
            Self::Context { found, max } => {
                write!(
                    f,
                    "a context of {found} tokens: expected 1 to {max}, what the model was trained for: change --context"
                )
            }
            Self::NoVision(d) => {
                write!(f, "this model file has no vision tower for --detail {}: pack one that has", d.name())
            }
            Self::Slicing(e) => e.fmt(f),
            Self::Overflow => {
                f.write_str("the buffers do not fit the address space: lower --context, --chunk or --max-pixels")
            }
        }
    }
}

impl core::error::Error for PlanError {}

/// Elements of every f32 buffer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    pub kv: usize,
    pub delta: usize,
    pub conv: usize,
    pub saved_delta: usize,
    pub saved_conv: usize,
    pub features: usize,
    pub logits: usize,
    pub work: usize,
}

/// Elements of the parts of `work` while text runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TextSizes {
    pub x: usize,
    pub norm: usize,
    pub out: usize,
    pub a: usize,
    pub b: usize,
    pub c: usize,
    pub o: usize,
    pub heads: usize,
    pub turned: usize,
    pub q8: usize,
    pub rope: usize,
    pub router: usize,
    pub expert_out: usize,
    pub gather: usize,
    pub gather_q8: usize,
    pub expert_a: usize,
    pub expert_b: usize,
    pub expert_q8: usize,
}

impl TextSizes {
    pub fn new(c: &Config, chunk: usize) -> Self {
        let t = &c.text;
        let (h, n) = (t.hidden, chunk);
        let (experts, k, inner, shared) =
            t.moe().map_or((0, 0, 0, 0), |m| (m.experts, m.top_k, m.inner, m.shared_inner));
        let dense = match t.ffn {
            crate::config::Ffn::Dense { inner } => inner,
            crate::config::Ffn::Moe(_) => 0,
        };
        let (q, kv) = (t.heads * t.head_dim, t.kv_heads * t.head_dim);
        let widest =
            [t.conv_channels(), 2 * q, t.delta_inner(), dense, shared, h, kv, inner].into_iter().max().unwrap_or(0);
        Self {
            x: n * h,
            norm: n * h,
            out: n * h,
            a: n * t.conv_channels().max(2 * q).max(dense).max(shared),
            b: n * t.delta_inner().max(kv).max(dense).max(shared),
            c: n * kv.max(t.delta_inner()),
            o: n * t.delta_inner().max(q),
            heads: n * 2 * t.delta_value_heads,
            // Of one token: the mixer's projections together; gate and up of all its experts.
            turned: (n * widest.max(experts)).max(t.conv_channels() + 3 * t.delta_inner()).max(2 * k * inner),
            q8: q8_words(n, widest),
            rope: n * t.rope_dim,
            router: n * (experts + k) + experts,
            expert_out: n * k * h,
            gather: n * h,
            gather_q8: q8_words(n, h),
            expert_a: n * inner,
            expert_b: n * inner,
            expert_q8: q8_words(n, inner).max(k * q8_words(1, inner)),
        }
    }

    /// In the order of the fields.
    pub fn list(&self) -> [usize; 18] {
        [
            self.x,
            self.norm,
            self.out,
            self.a,
            self.b,
            self.c,
            self.o,
            self.heads,
            self.turned,
            self.q8,
            self.rope,
            self.router,
            self.expert_out,
            self.gather,
            self.gather_q8,
            self.expert_a,
            self.expert_b,
            self.expert_q8,
        ]
    }
}

/// Elements of the parts of `work` while a crop of `patches` patches runs: 8 buffers of the tower's width, the MLP, its
/// turned twin, the patches, int8 activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VisionSizes {
    pub wide: usize,
    pub inner: usize,
    pub turned: usize,
    pub patches: usize,
    pub q8: usize,
}

impl VisionSizes {
    pub const WIDE: usize = 8;

    pub fn new(v: &VisionConfig, hidden: usize, patches: usize) -> Self {
        // The merger's output has a quarter of the columns, so a text width of up to four towers fits `inner`'s bound.
        let wide = v.inner_filled().max(v.hidden);
        let inner = patches * wide.max(hidden.div_ceil(4));
        Self {
            wide: patches * v.hidden,
            inner,
            turned: inner,
            patches: patches * v.patch_values(),
            q8: q8_words(patches, wide.max(v.patch_values())),
        }
    }

    pub fn total(&self) -> Option<usize> {
        let wide = Self::WIDE.checked_mul(lines(self.wide))?;
        [self.inner, self.turned, self.patches, self.q8].map(lines).into_iter().try_fold(wide, usize::checked_add)
    }
}

fn sum(lines: &[Line]) -> Option<u64> {
    lines.iter().try_fold(0u64, |sum, l| sum.checked_add(l.bytes))
}

impl Plan {
    /// Sums up what a run with `options` needs and gives the rest of the cap to expert slots.
    ///
    /// # Errors
    /// If the cap does not hold the floor, or an option is out of range.
    pub fn new(c: &Config, w: &Weights, options: Options) -> Result<Self, PlanError> {
        let Some(vision) = options.vision.filter(|v| v.residency == Residency::Auto) else {
            return Self::decided(c, w, options);
        };
        let with =
            |residency| Self::decided(c, w, Options { vision: Some(VisionOptions { residency, ..vision }), ..options });
        match (with(Residency::Resident), with(Residency::Streamed)) {
            (Ok(r), Ok(s)) if s.slots > r.slots && (r.slots as f64) < RESIDENT_SHARE * r.experts as f64 => Ok(s),
            (Err(PlanError::CapTooSmall { floor, .. }), Err(PlanError::CapTooSmall { cap, floor: lower, elastic }))
                if lower < floor =>
            {
                Err(PlanError::CapTooSmall { cap, floor: lower, elastic })
            }
            (Err(PlanError::CapTooSmall { .. }), Ok(s)) => Ok(s),
            (r, _) => r,
        }
    }

    /// The plan of a run for which it is decided where the vision tower is.
    fn decided(c: &Config, w: &Weights, options: Options) -> Result<Self, PlanError> {
        let t = &c.text;
        if options.context == 0 || options.context > t.context_max {
            return Err(PlanError::Context { found: options.context, max: t.context_max });
        }
        let chunk = options.chunk.clamp(1, options.context);
        let options = Options { chunk, ..options };
        let (patches_max, vision_work, picture_bytes) = match options.vision {
            None => (0, 0, 0),
            Some(o) => {
                let (v, i) = c.vision.as_ref().ok_or(PlanError::NoVision(o.detail))?;
                if o.detail == Detail::X16 && v.insert_layer.is_none() {
                    return Err(PlanError::NoVision(o.detail));
                }
                let params = SliceParams {
                    scale_resolution: i.scale_resolution,
                    patch_size: v.patch as u32,
                    max_slices: i.max_slices,
                };
                let patches = crop_patches_max(&params, o.detail).map_err(PlanError::Slicing)? as usize;
                let work = VisionSizes::new(v, t.hidden, patches).total().ok_or(PlanError::Overflow)?;
                (patches, work, o.picture_bytes)
            }
        };
        let kv_elems = t.count(Mixer::Attention) * 2 * t.kv_heads * t.head_dim * options.context;
        let deltas = t.count(Mixer::Delta);
        let delta = deltas * t.delta_value_heads * t.delta_key_dim * t.delta_value_dim;
        let conv = deltas * (t.conv_width - 1) * t.conv_channels();
        let sizes = Sizes {
            kv: if options.kv == KvType::F16 { kv_elems.div_ceil(2) } else { kv_elems },
            delta,
            conv,
            saved_delta: if options.prefix { delta } else { 0 },
            saved_conv: if options.prefix { conv } else { 0 },
            features: if options.vision.is_some() { options.context * t.hidden } else { 0 },
            logits: t.vocab,
            work: TextSizes::new(c, chunk).list().map(lines).iter().sum::<usize>().max(vision_work),
        };
        let tower = w.vision.as_ref().map_or(&[][..], |v| &v.order);
        let (vision_bytes, window_slots) = match options.vision.map(|v| v.residency) {
            None => (0, 0),
            Some(Residency::Streamed) => (0, WINDOW_SLOTS),
            Some(_) => (w.vision_bytes(), 0),
        };
        let slot_bytes = match (window_slots, w.slot_bytes()) {
            (0, bytes) => bytes,
            (_, bytes) => {
                let least = stream::slot_bytes_min(tower).ok_or(PlanError::Overflow)?;
                // Without experts, as small a part of a small tower as that is of a large one.
                let strip = (w.vision_bytes() / 32).next_multiple_of(PAGE as usize).min(STRIP_BYTES);
                least.max(if bytes == 0 { strip } else { bytes })
            }
        };
        // The window's books are a byte for each tensor.
        let window_bytes = window_slots * slot_bytes + if window_slots > 0 { tower.len() } else { 0 };
        let experts = t.moe().map_or(0, |m| m.experts) * w.banks.len();
        let floor_slots = t.moe().map_or(0, |m| m.top_k);
        let words = |n: usize| (n as u64) * 4;
        let mut lines = alloc::vec![
            Line { name: "text weights", bytes: w.text_bytes as u64 },
            Line { name: "vision weights", bytes: vision_bytes as u64 },
            Line { name: "vision window", bytes: window_bytes as u64 },
            Line { name: "KV cache", bytes: words(sizes.kv) },
            Line { name: "delta-rule state", bytes: words(sizes.delta) + words(sizes.conv) },
            Line { name: "prefix state", bytes: words(sizes.saved_delta) + words(sizes.saved_conv) },
            Line { name: "activations", bytes: words(sizes.work) + words(sizes.logits) },
            Line { name: "visual features", bytes: words(sizes.features) },
            Line { name: "pictures", bytes: picture_bytes },
            Line { name: "I/O buffers", bytes: IO_BYTES },
            Line { name: "tokenizer", bytes: options.tokenizer_bytes },
            Line { name: "program", bytes: PROGRAM_BYTES },
            Line { name: "page tables", bytes: 0 },
            Line { name: "expert directory", bytes: 0 },
            Line { name: "expert slots", bytes: 0 },
        ];
        // The file's length bounds its tensors, but a sparse file can be as long as it likes.
        let fixed = sum(&lines).ok_or(PlanError::Overflow)?;
        let books = crate::moe::heap_bytes(w.banks.len(), t.moe().map_or(0, |m| m.experts), floor_slots, chunk);
        let shape = t.moe().map_or(Shape { layers: 0, experts: 0, top_k: 0 }, |m| Shape {
            layers: w.banks.len(),
            experts: m.experts,
            top_k: m.top_k,
        });
        let directory = |slots: usize| (ExpertCache::heap_bytes(slots, shape) + books) as u64;
        let floor = fixed.checked_add(directory(floor_slots) + (floor_slots * slot_bytes) as u64);
        let floor = floor.filter(|&f| f < 1 << 60).ok_or(PlanError::Overflow)?;
        let floor = floor + floor.div_ceil(TABLE_RATIO);
        let mut slots = experts.min(options.slots_max.unwrap_or(usize::MAX)).max(floor_slots);
        if let Some(cap) = options.cap_bytes {
            if cap < floor {
                let elastic = words(sizes.kv) + words(sizes.work) + words(sizes.features) + picture_bytes;
                return Err(PlanError::CapTooSmall { cap, floor, elastic });
            }
            // What is left of the cap without the tables that map it.
            let spare = (cap - cap.div_ceil(TABLE_RATIO + 1)).saturating_sub(fixed).saturating_sub(directory(experts));
            let fit = spare.checked_div(slot_bytes as u64).map_or(0, |n| n as usize);
            slots = slots.min(fit.max(floor_slots));
        }
        let n = lines.len();
        lines[n - 2].bytes = directory(slots);
        lines[n - 1].bytes = (slots * slot_bytes) as u64;
        lines[n - 3].bytes = sum(&lines).ok_or(PlanError::Overflow)?.div_ceil(TABLE_RATIO);
        // Sums of some of the lines, which take the memory, fit as well.
        sum(&lines).filter(|&bytes| bytes <= isize::MAX as u64).ok_or(PlanError::Overflow)?;
        Ok(Self {
            lines,
            cap_bytes: options.cap_bytes,
            slots,
            window_slots,
            slot_bytes,
            resident_bytes: w.text_bytes + vision_bytes,
            experts,
            sizes,
            patches_max,
            options,
        })
    }

    /// Slots of the storage: the experts', then the vision window's.
    pub fn storage_slots(&self) -> usize {
        self.slots + self.window_slots
    }

    /// Where the vision tower is, if there are pictures.
    pub fn residency(&self) -> Option<Residency> {
        let streamed = if self.window_slots > 0 { Residency::Streamed } else { Residency::Resident };
        self.options.vision.map(|_| streamed)
    }

    /// Sum of all lines, bytes.
    pub fn total_bytes(&self) -> u64 {
        self.lines.iter().map(|l| l.bytes).sum()
    }

    /// Bytes of delta-rule state that a token reads; it writes them as well.
    pub fn state_bytes_per_token(&self) -> u64 {
        (self.sizes.delta + self.sizes.conv) as u64 * 4
    }

    /// f32 elements of the one block that [`crate::Engine`] takes.
    pub fn block_elems(&self) -> usize {
        let s = &self.sizes;
        [s.kv, s.delta, s.conv, s.saved_delta, s.saved_conv, s.features, s.logits, s.work].map(lines).iter().sum()
    }
}
