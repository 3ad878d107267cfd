//! The vision tower's weights as its kernels ask for them: from the resident region, or strip by strip through the vision
//! window, a few slots of the storage, while the strips that follow are on their way.
//!
//! Relies on the tower using its tensors in the order of [`VisionWeights::order`]. Never allocates after it is made.

use crate::engine::{Checksums, EngineError};
use crate::ports::{Read, ReadError, Storage};
use crate::weights::{Linear, Matrix, Norm, Vector, VisionWeights};
use alloc::{vec, vec::Vec};
use core::fmt;
use core::ops::Range;
use forerun_format::{PAGE, page_up};
use forerun_kernels::{KernelSet, crc32c_join};

/// Slots of the window: the strip in use, the one before it, and as many on their way as keep most storage busy.
pub const WINDOW_SLOTS: usize = 10;

/// A strip ends after a multiple of so many rows, or with its matrix: what threads cut a matrix by.
const ROWS: usize = 8;

/// Name of a tensor of the tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisionName {
    layer: Option<u32>,
    part: &'static str,
    kind: &'static str,
}

impl fmt::Display for VisionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(l) = self.layer {
            write!(f, "v.blk.{l}.")?;
        }
        write!(f, "{}.{}", self.part, self.kind)
    }
}

/// A tensor of the tower as it is streamed.
#[derive(Debug, Clone, Copy)]
pub struct VisionTensor {
    /// Its name.
    pub name: VisionName,
    /// Offset of its first byte in the resident region.
    pub at: usize,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Bytes of one.
    pub row_bytes: usize,
    /// CRC32C of its bytes.
    pub crc: u32,
}

impl VisionTensor {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }
}

/// Bytes of the smallest slot that every tensor of `order` goes through, a multiple of 4096; `None` if a read is too long for it.
pub(crate) fn slot_bytes_min(order: &[VisionTensor]) -> Option<usize> {
    let least = |t: &VisionTensor| {
        let some = page_up(t.row_bytes.checked_mul(ROWS)? as u64)?.checked_add(PAGE)?;
        page_up(t.bytes() as u64).map(|all| all.min(some))
    };
    let bytes = order.iter().try_fold(PAGE, |most, t| Some(most.max(least(t)?)))?;
    u32::try_from(bytes).ok().map(|b| b as usize)
}

/// A row of a tensor, by its place in the order of use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    tensor: usize,
    row: usize,
}

/// Rows that follow one another in the file, from `first` to before `end`, and the whole pages that hold them.
#[derive(Debug, Clone, Copy, Default)]
struct Strip {
    first: Row,
    end: Row,
    /// Offset in the resident region.
    at: usize,
    bytes: usize,
}

impl Strip {
    /// As many rows from `first` on as a slot takes; none of tensor `stop` or after it.
    fn cut(order: &[VisionTensor], first: Row, stop: usize, slot_bytes: usize) -> Self {
        let page = PAGE as usize;
        let start = |r: Row| order[r.tensor].at + r.row * order[r.tensor].row_bytes;
        let at = start(first) / page * page;
        let full = at + slot_bytes;
        let (mut end, mut end_at) = (first, start(first));
        while end.tensor < stop {
            let (t, from) = (&order[end.tensor], start(end));
            if end != first && from != end_at.next_multiple_of(page) {
                break;
            }
            let left = t.rows - end.row;
            let mut rows = (full - from) / t.row_bytes;
            if rows < left {
                rows = rows / ROWS * ROWS;
            }
            let rows = rows.min(left);
            if rows == 0 {
                break;
            }
            end_at = from + rows * t.row_bytes;
            if rows < left {
                end.row += rows;
                break;
            }
            end = Row { tensor: end.tensor + 1, row: 0 };
        }
        Self { first, end, at, bytes: end_at.next_multiple_of(page) - at }
    }
}

/// The slots that the tower streams through, and which tensors were found good.
pub(crate) struct Window {
    first_slot: u32,
    slot_bytes: usize,
    checksums: Checksums,
    crc32c: fn(&[u8]) -> u32,
    /// Tensors that need no comparison (any more).
    verified: Vec<bool>,
    /// Reads in flight: none between passes, unless the device hangs.
    in_flight: usize,
    /// Tensor that was waited for last.
    awaited: usize,
}

impl Window {
    /// The [`WINDOW_SLOTS`] slots from `first_slot` on, for the tensors of `order`.
    pub fn new(
        first_slot: usize,
        slot_bytes: usize,
        order: &[VisionTensor],
        kernels: &KernelSet,
        checksums: Checksums,
    ) -> Self {
        let verified = vec![checksums == Checksums::Never; order.len()];
        let crc32c = kernels.crc32c;
        Self { first_slot: first_slot as u32, slot_bytes, checksums, crc32c, verified, in_flight: 0, awaited: 0 }
    }

    /// Waits for whatever is under way, so that slots and queue are free. No other read may be.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn settle(&mut self, storage: &mut impl Storage, order: &[VisionTensor]) -> Result<(), EngineError> {
        while self.in_flight > 0 {
            if storage.complete(true).is_none() {
                return Err(EngineError::VisionRead { tensor: order[self.awaited].name, error: ReadError::TimedOut });
            }
            self.in_flight -= 1;
        }
        Ok(())
    }
}

/// Rows that are in a slot.
#[derive(Debug, Clone, Copy)]
struct Piece {
    slot: u32,
    start: usize,
    bytes: usize,
    rows: usize,
}

/// One pass over the tower's weights. Strip `i` goes through slot `i % WINDOW_SLOTS` of the window.
pub(crate) struct Stream<'e, S: Storage> {
    storage: &'e mut S,
    window: &'e mut Window,
    w: &'e VisionWeights,
    /// Offset of the resident region in the file.
    region: u64,
    /// Whether the pass leaves the window merger out.
    no_merger: bool,
    strips: [Strip; WINDOW_SLOTS],
    landed: [bool; WINDOW_SLOTS],
    /// Strips asked for, and the row after them.
    asked: usize,
    ahead: Row,
    /// The strip in use, and the row to be used next.
    now: usize,
    next: Row,
    /// Of the tensor in use.
    crc: u32,
}

impl<'e, S: Storage> Stream<'e, S> {
    /// A pass from the first tensor on, whose first reads it starts. No other read is in flight, from now to
    /// [`Window::settle`].
    pub fn new(
        storage: &'e mut S,
        window: &'e mut Window,
        w: &'e VisionWeights,
        region: u64,
        with_merger: bool,
    ) -> Self {
        let mut new = Self {
            storage,
            window,
            w,
            region,
            no_merger: !with_merger,
            strips: [Strip::default(); WINDOW_SLOTS],
            landed: [false; WINDOW_SLOTS],
            asked: 0,
            ahead: Row::default(),
            now: 0,
            next: Row::default(),
            crc: 0,
        };
        new.ask();
        new
    }

    /// `row`, or the first row after the window merger if it is the merger's and that is left out.
    fn skip(&self, row: Row) -> Row {
        let merger = &self.w.merger;
        if self.no_merger && row.tensor == merger.start { Row { tensor: merger.end, row: 0 } } else { row }
    }

    /// Asks for as many strips as slots and the queue take. The strip in use and the one before it stay.
    fn ask(&mut self) {
        let mut batch = [Read { slot: 0, offset: 0, bytes: 0 }; WINDOW_SLOTS];
        let mut n = 0;
        let room = self.storage.depth_max() - self.window.in_flight;
        while n < room && self.asked < self.now + WINDOW_SLOTS - 1 && self.ahead.tensor < self.w.order.len() {
            let merger = &self.w.merger;
            let stop =
                if self.no_merger && self.ahead.tensor < merger.start { merger.start } else { self.w.order.len() };
            let strip = Strip::cut(&self.w.order, self.ahead, stop, self.window.slot_bytes);
            let i = self.asked % WINDOW_SLOTS;
            (self.strips[i], self.landed[i]) = (strip, false);
            let offset = self.region + strip.at as u64;
            batch[n] = Read { slot: self.window.first_slot + i as u32, offset, bytes: strip.bytes as u32 };
            n += 1;
            self.asked += 1;
            self.ahead = self.skip(strip.end);
        }
        let accepted = self.storage.submit(&batch[..n]);
        assert_eq!(accepted, n, "the batch was cut to the queue's room");
        self.window.in_flight += n;
    }

    /// Waits for the strip in use.
    fn wait(&mut self) -> Result<(), EngineError> {
        let order = &self.w.order;
        let name = |strip: &Strip| order[strip.first.tensor].name;
        let now = self.now % WINDOW_SLOTS;
        self.window.awaited = self.strips[now].first.tensor;
        while !self.landed[now] {
            let Some(c) = self.storage.complete(true) else {
                return Err(EngineError::VisionRead { tensor: name(&self.strips[now]), error: ReadError::TimedOut });
            };
            self.window.in_flight -= 1;
            let i = (c.slot - self.window.first_slot) as usize;
            c.result.map_err(|error| EngineError::VisionRead { tensor: name(&self.strips[i]), error })?;
            self.landed[i] = true;
        }
        Ok(())
    }

    /// The next rows of the tensor at `at`, which is the one to be used next. They stay until the strip after the next is
    /// taken from.
    fn take(&mut self, at: usize) -> Result<Piece, EngineError> {
        let t = self.w.order[self.next.tensor];
        assert_eq!(t.at, at, "{} comes next", t.name);
        if self.next >= self.strips[self.now % WINDOW_SLOTS].end {
            self.now += 1;
        }
        self.ask();
        self.wait()?;
        let i = self.now % WINDOW_SLOTS;
        let strip = &self.strips[i];
        let end = if strip.end.tensor > self.next.tensor { t.rows } else { strip.end.row };
        let rows = end - self.next.row;
        let start = t.at + self.next.row * t.row_bytes - strip.at;
        let piece = Piece { slot: self.window.first_slot + i as u32, start, bytes: rows * t.row_bytes, rows };
        self.check(&t, piece, end == t.rows)?;
        self.next = if end == t.rows {
            self.skip(Row { tensor: self.next.tensor + 1, row: 0 })
        } else {
            Row { row: end, ..self.next }
        };
        Ok(piece)
    }

    /// Adds `piece` to the checksum of the tensor in use and, after the last one, compares it.
    fn check(&mut self, t: &VisionTensor, piece: Piece, last: bool) -> Result<(), EngineError> {
        if self.window.verified[self.next.tensor] {
            return Ok(());
        }
        let before = if self.next.row == 0 { 0 } else { self.crc };
        self.crc = crc32c_join(before, (self.window.crc32c)(self.bytes(piece)), piece.bytes);
        if last {
            if self.crc != t.crc {
                return Err(EngineError::VisionChecksum { tensor: t.name, found: self.crc, expected: t.crc });
            }
            self.window.verified[self.next.tensor] = self.window.checksums == Checksums::First;
        }
        Ok(())
    }

    fn bytes(&self, p: Piece) -> &[u8] {
        &self.storage.slot(p.slot)[p.start..][..p.bytes]
    }
}

/// Where the tower's weights come from. They are asked for in the order of [`VisionWeights::order`].
#[allow(clippy::large_enum_variant)] // one exists
pub(crate) enum Feed<'e, S: Storage> {
    /// From the resident region.
    Resident(&'e [u8]),
    /// From the file.
    Streamed(Stream<'e, S>),
}

impl<S: Storage> Feed<'_, S> {
    /// The next rows of `w`, and how many they are: all, or what a strip holds.
    pub fn rows(&mut self, w: &Matrix) -> Result<(&[u8], usize), EngineError> {
        match self {
            Self::Resident(resident) => Ok((w.bytes(resident), w.rows)),
            Self::Streamed(s) => s.take(w.at).map(|p| (s.bytes(p), p.rows)),
        }
    }

    /// The elements of `v`.
    pub fn vector(&mut self, v: &Vector) -> Result<&[f32], EngineError> {
        match self {
            Self::Resident(resident) => Ok(v.f32(resident)),
            Self::Streamed(s) => s.take(v.at).map(|p| bytemuck::cast_slice(s.bytes(p))),
        }
    }

    /// Scale and shift of `norm`.
    pub fn norm(&mut self, norm: &Norm) -> Result<(&[f32], &[f32]), EngineError> {
        match self {
            Self::Resident(resident) => Ok((norm.w.f32(resident), norm.b.f32(resident))),
            Self::Streamed(s) => {
                let (w, b) = (s.take(norm.w.at)?, s.take(norm.b.at)?);
                Ok((bytemuck::cast_slice(s.bytes(w)), bytemuck::cast_slice(s.bytes(b))))
            }
        }
    }
}

/// The tower's tensors in the order of use, and which of them are the window merger's. `insert_layer` comes before it.
pub(crate) fn order(w: &VisionWeights, insert_layer: Option<usize>) -> (Vec<VisionTensor>, Range<usize>) {
    let mut o = Order { tensors: Vec::new(), layer: None };
    o.linear("v.patch_embd", &w.patch);
    o.matrix("v.position_embd", &w.positions);
    let mut merger = None;
    for (l, layer) in w.layers.iter().enumerate() {
        o.layer = Some(l as u32);
        o.norm("ln1", &layer.ln1);
        o.linear("attn_q", &layer.q);
        o.linear("attn_k", &layer.k);
        o.linear("attn_v", &layer.v);
        o.linear("attn_out", &layer.out);
        o.norm("ln2", &layer.ln2);
        o.linear("ffn_up", &layer.fc1);
        o.linear("ffn_down", &layer.fc2);
        o.layer = None;
        if let Some(m) = &w.window_merger
            && insert_layer == Some(l)
        {
            let start = o.tensors.len();
            o.norm("v.vit_merger.ln1", &m.ln1);
            o.linear("v.vit_merger.attn_q", &m.q);
            o.linear("v.vit_merger.attn_k", &m.k);
            o.linear("v.vit_merger.attn_v", &m.v);
            o.linear("v.vit_merger.attn_out", &m.out);
            o.norm("v.vit_merger.ds_ln", &m.pre_norm);
            o.linear("v.vit_merger.ds_ffn_up", &m.fc1);
            o.linear("v.vit_merger.ds_ffn_down", &m.fc2);
            merger = Some(start..o.tensors.len());
        }
    }
    o.norm("v.post_ln", &w.post_norm);
    o.norm("mm.input_norm", &w.merger_norm);
    o.linear("mm.up", &w.merger_fc1);
    o.linear("mm.down", &w.merger_fc2);
    let none = o.tensors.len()..o.tensors.len();
    (o.tensors, merger.unwrap_or(none))
}

/// Puts tensors in order.
struct Order {
    tensors: Vec<VisionTensor>,
    layer: Option<u32>,
}

impl Order {
    fn push(&mut self, part: &'static str, kind: &'static str, at: usize, rows: usize, row_bytes: usize) {
        let name = VisionName { layer: self.layer, part, kind };
        self.tensors.push(VisionTensor { name, at, rows, row_bytes, crc: 0 });
    }

    fn matrix(&mut self, part: &'static str, m: &Matrix) {
        self.push(part, "weight", m.at, m.rows, m.row_bytes());
    }

    fn linear(&mut self, part: &'static str, l: &Linear) {
        self.matrix(part, &l.w);
        self.push(part, "bias", l.b.at, 1, l.b.len * 4);
    }

    fn norm(&mut self, part: &'static str, n: &Norm) {
        self.push(part, "weight", n.w.at, 1, n.w.len * 4);
        self.push(part, "bias", n.b.at, 1, n.b.len * 4);
    }
}
