//! A simulated device over bytes in memory, in virtual time: latency, bandwidth that the reads in flight share, completions
//! out of order, stalls, errors, flipped bits. All of it follows from one seed.
//!
//! Time passes only when something is done: the workers compute, the engine asks the device, or it waits. The engine's clock
//! reads the same time, so what it learns from it is the same on every run, too.

use crate::Aligned;
use forerun_engine::ports::{Clock, Completion, Piece, Read, ReadError, Storage, Workers};
use std::cell::Cell;

/// Error number of a failed read.
pub const EIO: i32 = 5;

/// How long the device takes for the first byte of a read.
#[derive(Debug, Clone, Copy)]
pub enum Latency {
    /// Half to one and a half times so many microseconds.
    Even(u64),
    /// So many microseconds at least, with no mean: one read in ten takes over ten times as long, one in a hundred a hundred
    /// times.
    HeavyTailed(u64),
}

/// What the device and the machine around it are like.
#[derive(Debug, Clone, Copy)]
pub struct Disk {
    /// Reads in flight, at most.
    pub depth: usize,
    /// Time to the first byte.
    pub latency: Latency,
    /// Bytes per microsecond of all reads together; 0 takes no time.
    pub bytes_per_us: u64,
    /// Longest time that one call waits.
    pub patience_us: u64,
    /// Mean time of one job of the workers; asking the device takes as long as a thousandth of it.
    pub job_ns: u64,
    /// Calls that one answer may take ([`World::begin`]).
    pub calls_max: u64,
    /// Reads that fail, in thousandths.
    pub errors: u64,
    /// Reads that bring a wrong bit, in thousandths.
    pub flips: u64,
    /// Reads after which the device does nothing for up to three times its patience, in thousandths.
    pub stalls: u64,
}

impl Default for Disk {
    /// Timeless and good, with any order of completions.
    fn default() -> Self {
        Self {
            depth: 16,
            latency: Latency::Even(0),
            bytes_per_us: 0,
            patience_us: 1 << 20,
            job_ns: 0,
            calls_max: u64::MAX,
            errors: 0,
            flips: 0,
            stalls: 0,
        }
    }
}

/// What the device did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Books {
    /// Reads asked for.
    pub reads: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Bytes of the reads that ended well.
    pub bytes_landed: u64,
    /// Reads that ended before one that began earlier.
    pub overtaken: u64,
    /// Reads and rows that failed.
    pub errors: u64,
    /// Reads that brought a wrong bit.
    pub flips: u64,
    /// Waits that brought nothing.
    pub timeouts: u64,
    /// Times that the engine came for a read and none had ended.
    pub early: u64,
}

/// Virtual time and books, shared by clock, device, workers and test.
#[derive(Debug, Default)]
pub struct World {
    now_ns: Cell<u64>,
    books: Cell<Books>,
    calls: Cell<u64>,
    healed: Cell<bool>,
}

impl World {
    /// What the device did.
    pub fn books(&self) -> Books {
        self.books.get()
    }

    /// A new answer begins: counts calls from here.
    pub fn begin(&self) {
        self.calls.set(0);
    }

    /// Nothing goes wrong any more; a stall ends when it would.
    pub fn heal(&self) {
        self.healed.set(true);
    }

    fn advance(&self, ns: u64) {
        self.now_ns.set(self.now_ns.get() + ns);
    }

    fn note(&self, f: impl FnOnce(&mut Books)) {
        let mut books = self.books.get();
        f(&mut books);
        self.books.set(books);
    }
}

impl Clock for World {
    fn now_us(&self) -> u64 {
        self.now_ns.get() / 1000
    }
}

/// xorshift64.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // Neighbouring seeds differ in few bits, and xorshift wants some of them set.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `n`, or 0.
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % n.max(1)
    }
}

/// Workers whose jobs take virtual time.
pub struct Timed<'a> {
    inner: &'a dyn Workers,
    world: &'a World,
    job_ns: u64,
    random: Cell<u64>,
}

impl<'a> Timed<'a> {
    pub(crate) fn new(inner: &'a dyn Workers, world: &'a World, disk: &Disk, seed: u64) -> Self {
        Self { inner, world, job_ns: disk.job_ns, random: Cell::new(seed) }
    }
}

impl Workers for Timed<'_> {
    fn threads(&self) -> usize {
        self.inner.threads()
    }

    fn split2(&self, pieces: usize, a: &mut [f32], a_piece: usize, b: &mut [f32], b_piece: usize, f: &Piece<'_>) {
        self.inner.split2(pieces, a, a_piece, b, b_piece, f);
        self.random.set(self.random.get() + 1);
        self.world.advance(Random::new(self.random.get()).below(2 * self.job_ns + 1));
    }
}

/// A read on its way.
#[derive(Debug, Clone, Copy)]
struct Flight {
    read: Read,
    /// Number of the read, by which they were asked for.
    number: u64,
    /// When its first byte comes.
    starts_ns: u64,
    /// Bytes that have not come.
    left: f64,
}

/// The device.
pub struct MemStorage<'a> {
    file: &'a [u8],
    slots: Aligned,
    slot_bytes: usize,
    disk: Disk,
    seed: u64,
    random: Random,
    world: &'a World,
    /// Reads that have not ended, and those that nobody came for yet.
    flying: Vec<Flight>,
    ended: Vec<Flight>,
    /// Time up to which the device was simulated.
    at_ns: u64,
    /// Until then it does nothing.
    frozen_ns: u64,
}

impl<'a> MemStorage<'a> {
    pub(crate) fn new(
        file: &'a [u8],
        slots: usize,
        slot_bytes: usize,
        disk: Disk,
        seed: u64,
        world: &'a World,
    ) -> Self {
        Self {
            file,
            slots: Aligned::zeroed(slots * slot_bytes),
            slot_bytes,
            disk,
            seed,
            random: Random::new(seed),
            world,
            flying: Vec::new(),
            ended: Vec::new(),
            at_ns: 0,
            frozen_ns: 0,
        }
    }

    /// Whether a read of a kind of which there are `n` in a thousand is one.
    fn fails(&mut self, n: u64) -> bool {
        self.random.below(1000) < n && !self.world.healed.get()
    }

    fn latency_ns(&mut self) -> u64 {
        match self.disk.latency {
            Latency::Even(us) => us * (500 + self.random.below(1001)),
            Latency::HeavyTailed(us) => us * 1_000_000 / (1 + self.random.below(1000)),
        }
    }

    fn call(&mut self) {
        let calls = self.world.calls.get() + 1;
        self.world.calls.set(calls);
        assert!(calls <= self.disk.calls_max, "seed {}: {calls} calls and no end", self.seed);
        self.world.advance(self.random.below(self.disk.job_ns / 500 + 1));
    }

    /// Goes on to the next thing that happens, at most to `until_ns`.
    fn step(&mut self, until_ns: u64) {
        if self.at_ns < self.frozen_ns {
            self.at_ns = self.frozen_ns.min(until_ns);
            return;
        }
        let at = self.at_ns;
        let moving = self.flying.iter().filter(|f| f.starts_ns <= at).count().max(1);
        let rate = self.disk.bytes_per_us as f64 / 1000.0 / moving as f64;
        let next = |f: &Flight| if f.starts_ns > at { f.starts_ns } else { at + (f.left / rate).ceil() as u64 };
        let next = self.flying.iter().map(next).min().unwrap_or(until_ns).clamp(at, until_ns);
        let moved = (next - at) as f64 * rate;
        self.flying.iter_mut().filter(|f| f.starts_ns <= at).for_each(|f| f.left -= moved);
        self.at_ns = next;
        let ended = |f: &mut Flight| f.starts_ns <= next && f.left <= 0.0;
        self.ended.extend(self.flying.extract_if(.., ended));
    }

    /// Simulates up to now.
    fn catch_up(&mut self) {
        let now = self.world.now_ns.get();
        while self.at_ns < now {
            self.step(now);
        }
        self.step(now);
    }

    fn is_in_flight(&self, slot: u32) -> bool {
        self.flying.iter().chain(&self.ended).any(|f| f.read.slot == slot)
    }

    fn range(&self, slot: u32) -> std::ops::Range<usize> {
        assert!(!self.is_in_flight(slot), "seed {}: slot {slot} is in flight", self.seed);
        slot as usize * self.slot_bytes..(slot as usize + 1) * self.slot_bytes
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
        self.disk.depth
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        self.call();
        self.catch_up();
        let n = reads.len().min(self.disk.depth - self.flying.len() - self.ended.len());
        for &read in &reads[..n] {
            assert!(!self.is_in_flight(read.slot), "seed {}: slot {} is in flight", self.seed, read.slot);
            let mut number = 0;
            self.world.note(|b| {
                (number, b.reads) = (b.reads, b.reads + 1);
                b.bytes += u64::from(read.bytes);
            });
            let starts_ns = self.at_ns + self.latency_ns();
            let left = if self.disk.bytes_per_us > 0 { f64::from(read.bytes) } else { 0.0 };
            self.flying.push(Flight { read, number, starts_ns, left });
            if self.fails(self.disk.stalls) {
                let stall_ns = self.random.below(3000 * self.disk.patience_us);
                self.frozen_ns = self.frozen_ns.max(self.at_ns + stall_ns);
            }
        }
        n
    }

    fn complete(&mut self, wait: bool) -> Option<Completion> {
        self.call();
        self.catch_up();
        if wait && self.ended.is_empty() && !self.flying.is_empty() {
            let until = self.at_ns + 1000 * self.disk.patience_us;
            while self.ended.is_empty() && self.at_ns < until {
                self.step(until);
            }
            self.world.now_ns.set(self.at_ns);
            self.world.note(|b| b.timeouts += u64::from(self.ended.is_empty()));
        }
        if self.ended.is_empty() {
            self.world.note(|b| b.early += u64::from(!wait && !self.flying.is_empty()));
            return None;
        }
        let i = self.random.below(self.ended.len() as u64) as usize;
        let Flight { read, number, .. } = self.ended.swap_remove(i);
        let overtakes = self.flying.iter().chain(&self.ended).any(|f| f.number < number);
        self.world.note(|b| b.overtaken += u64::from(overtakes));
        let Read { slot, offset, bytes } = read;
        let at = slot as usize * self.slot_bytes;
        let Some(from) = self.file.get(offset as usize..).and_then(|f| f.get(..bytes as usize)) else {
            return Some(Completion { slot, result: Err(ReadError::Eof) });
        };
        if self.fails(self.disk.errors) {
            // A part may have come.
            let came = self.random.below(u64::from(bytes)) as usize;
            self.slots.bytes_mut()[at..][..came].copy_from_slice(&from[..came]);
            self.world.note(|b| b.errors += 1);
            return Some(Completion { slot, result: Err(ReadError::Os(EIO)) });
        }
        self.slots.bytes_mut()[at..][..from.len()].copy_from_slice(from);
        self.world.note(|b| b.bytes_landed += u64::from(bytes));
        if self.fails(self.disk.flips) {
            let bit = self.random.below(u64::from(bytes) * 8) as usize;
            self.slots.bytes_mut()[at + bit / 8] ^= 1 << (bit % 8);
            self.world.note(|b| b.flips += 1);
        }
        Some(Completion { slot, result: Ok(()) })
    }

    fn slot(&self, slot: u32) -> &[u8] {
        &self.slots.bytes()[self.range(slot)]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        let range = self.range(slot);
        &mut self.slots.bytes_mut()[range]
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        self.call();
        let from = self.file.get(offset as usize..).and_then(|f| f.get(..out.len())).ok_or(ReadError::Eof)?;
        let took_ns = self.latency_ns();
        self.world.advance(took_ns);
        if self.fails(self.disk.errors) {
            self.world.note(|b| b.errors += 1);
            return Err(ReadError::Os(EIO));
        }
        out.copy_from_slice(from);
        Ok(())
    }
}
