//! One anonymous mapping, taken and touched at start, handed out in disjoint pieces, then sealed.
//!
//! Relies on `mmap` for zeroed pages. Never hands out the same byte twice and never gives one back, so a decode step
//! that would need more memory fails at once instead of growing the process.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::sys::page_bytes;

/// Alignment that lets the kernel back a mapping with its usual transparent huge pages.
const HUGE_BYTES: usize = 2 << 20;

/// An anonymous private mapping, unmapped when the last owner goes.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: `Mapping` itself reads nothing through `base`; it only keeps the pages mapped and unmaps them in `drop`, which
// may happen on any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above: no method takes `&self` and touches the pages.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> io::Result<Self> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, format!("cannot map {bytes} bytes"));
        let bytes = bytes.max(1).checked_next_multiple_of(page_bytes()).ok_or_else(too_large)?;
        if bytes < HUGE_BYTES {
            return Ok(Self { base: map_pages(bytes)?, bytes });
        }
        // Map one huge page more and trim both ends: kernels before 6.7 do not align a large mapping by themselves.
        let mapped = bytes.checked_add(HUGE_BYTES).ok_or_else(too_large)?;
        let start = map_pages(mapped)?;
        let head = start.as_ptr().align_offset(HUGE_BYTES);
        let tail = HUGE_BYTES - head;
        // SAFETY: `mapped` bytes are mapped at `start` by map_pages() above, nobody else has the address yet, and
        // head + bytes + tail == mapped; head and tail are page multiples since start, HUGE_BYTES and bytes are.
        let base = unsafe {
            if head > 0 {
                libc::munmap(start.as_ptr().cast(), head);
            }
            let base = start.add(head);
            if tail > 0 {
                libc::munmap(base.add(bytes).as_ptr().cast(), tail);
            }
            base
        };
        let mapping = Self { base, bytes };
        // SAFETY: [base, base + bytes) is the mapping made above. The call changes no contents.
        if unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) } != 0 {
            log::debug!("no transparent huge pages: {}", io::Error::last_os_error());
        }
        Ok(mapping)
    }

    /// Writes to every page, so that the memory is really there before the first token.
    fn touch(&self) {
        for offset in (0..self.bytes).step_by(page_bytes()) {
            // SAFETY: offset < self.bytes, the length mapped in new(), and no slice of it exists yet (only Arena::new()
            // calls this, before the arena can be used). Volatile, or the store of a zero would be removed.
            unsafe { self.base.add(offset).write_volatile(0) };
        }
    }
}

fn map_pages(bytes: usize) -> io::Result<NonNull<u8>> {
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and bytes describe the mapping made in new(). Arena and every IoBuf hold an Arc of it, and the
        // slices of take() borrow the Arena, so nothing points into it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The arena cannot give what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaFull {
    /// Bytes asked for.
    pub wanted_bytes: usize,
    /// Bytes not handed out yet.
    pub left_bytes: usize,
    /// Whether [`Arena::seal`] was called.
    pub sealed: bool,
}

impl fmt::Display for ArenaFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.sealed {
            write!(f, "{} bytes asked of the arena after it was sealed: plan them before the start", self.wanted_bytes)
        } else {
            let Self { wanted_bytes, left_bytes, .. } = self;
            write!(f, "{wanted_bytes} bytes asked of an arena with {left_bytes} left: the memory plan is too small")
        }
    }
}

impl std::error::Error for ArenaFull {}

/// Memory taken once and handed out in disjoint, zeroed pieces.
pub struct Arena {
    map: Arc<Mapping>,
    used: AtomicUsize,
    sealed: AtomicBool,
}

impl Arena {
    /// Maps `bytes` (rounded up to a page), asks for huge pages where the system allows it, and touches every page.
    ///
    /// # Errors
    /// If the kernel refuses the mapping.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = Mapping::new(bytes)?;
        map.touch();
        Ok(Self { map: Arc::new(map), used: AtomicUsize::new(0), sealed: AtomicBool::new(false) })
    }

    /// Locks the arena in memory, so that it is never swapped.
    ///
    /// # Errors
    /// If the kernel refuses, usually because `RLIMIT_MEMLOCK` is too small. The arena works as before.
    pub fn lock(&self) -> io::Result<()> {
        // SAFETY: base and bytes describe the mapping, which self.map keeps. The call changes no contents.
        match unsafe { libc::mlock(self.map.base.as_ptr().cast(), self.map.bytes) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.map.bytes
    }

    /// Bytes handed out, with the gaps that alignment left.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// From now on every request fails.
    pub fn seal(&self) {
        self.sealed.store(true, Ordering::Relaxed);
    }

    /// `bytes` zeroed bytes at a multiple of `align`, for as long as the arena lives.
    ///
    /// # Errors
    /// If too little is left, or the arena is sealed.
    ///
    /// # Panics
    /// If `align` is not a power of two of at most 4096.
    // `&self` to `&mut` is sound here: reserve() gives each byte out once, so no two slices overlap, and the slice
    // borrows the arena, which unmaps only when dropped.
    #[allow(clippy::mut_from_ref)]
    pub fn take(&self, bytes: usize, align: usize) -> Result<&mut [u8], ArenaFull> {
        let start = self.reserve(bytes, align)?;
        // SAFETY: reserve() checked that [start, start + bytes) is inside the mapping and returns it to nobody else;
        // the pages were zeroed by mmap; the lifetime is that of &self, which keeps the mapping.
        Ok(unsafe { slice::from_raw_parts_mut(start.as_ptr(), bytes) })
    }

    /// `n` zeroed floats on a cache line of their own.
    ///
    /// # Errors
    /// As [`Arena::take`].
    #[allow(clippy::mut_from_ref)] // as take()
    pub fn take_f32(&self, n: usize) -> Result<&mut [f32], ArenaFull> {
        // A product that overflows asks for more than any arena has.
        let bytes = n.saturating_mul(size_of::<f32>());
        self.take(bytes, 64).map(bytemuck::cast_slice_mut)
    }

    /// `bytes` zeroed bytes on a 4096-byte boundary that own themselves: storage hands them to the kernel or to another
    /// thread while it reads into them. They keep the mapping alive, whatever becomes of the arena.
    ///
    /// # Errors
    /// As [`Arena::take`].
    pub fn take_io(&self, bytes: usize) -> Result<IoBuf, ArenaFull> {
        let start = self.reserve(bytes, crate::BLOCK_BYTES)?;
        Ok(IoBuf { start, bytes, map: Arc::clone(&self.map) })
    }

    /// Moves the mark past `bytes` bytes and returns where they start. No byte is ever returned twice.
    fn reserve(&self, bytes: usize, align: usize) -> Result<NonNull<u8>, ArenaFull> {
        // The base is aligned to a page, so aligning the offset aligns the address.
        assert!(align.is_power_of_two() && align <= 4096, "alignment {align} is not a power of two of at most 4096");
        let place = |used: usize| {
            let start = used.next_multiple_of(align);
            start.checked_add(bytes).filter(|&end| end <= self.map.bytes).map(|end| (start, end))
        };
        let full = |used: usize, sealed| ArenaFull { wanted_bytes: bytes, left_bytes: self.map.bytes - used, sealed };
        if self.sealed.load(Ordering::Relaxed) {
            return Err(full(self.used_bytes(), true));
        }
        // Relaxed is enough: the exchange alone decides who owns which bytes, and their contents come from mmap.
        let used = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| place(used).map(|(_, end)| end))
            .map_err(|used| full(used, false))?;
        let (start, _) = place(used).ok_or_else(|| full(used, false))?;
        // SAFETY: start <= end <= self.map.bytes, checked in place().
        Ok(unsafe { self.map.base.add(start) })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} of {} bytes used)", self.used_bytes(), self.bytes())
    }
}

/// A piece of an arena that owns itself, like a `Box<[u8]>`: see [`Arena::take_io`].
///
/// Leaking one leaks the whole mapping. That is what makes a storage sound that is forgotten with reads in flight: the
/// kernel then writes into pages that nobody can reach any more.
pub struct IoBuf {
    start: NonNull<u8>,
    bytes: usize,
    map: Arc<Mapping>,
}

// SAFETY: an IoBuf is the only way to its bytes (Arena::reserve() and split_to() give each byte to one owner), so moving
// it moves them, as with a Box.
unsafe impl Send for IoBuf {}
// SAFETY: through &IoBuf the bytes can only be read.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// Cuts off the first `bytes` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_to(&mut self, bytes: usize) -> Self {
        assert!(bytes <= self.bytes, "{bytes} bytes cut off a buffer of {}", self.bytes);
        let head = Self { start: self.start, bytes, map: Arc::clone(&self.map) };
        // SAFETY: bytes <= self.bytes, checked above, so the new start is inside the mapping or at its end.
        self.start = unsafe { self.start.add(bytes) };
        self.bytes -= bytes;
        head
    }

    /// Where the bytes start, for the kernel to write to while nobody looks at them.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Deref for IoBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: [start, start + bytes) is inside the mapping that self.map keeps, initialised (zeroed by mmap), and
        // this IoBuf is its only owner, so nobody writes while it is borrowed.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref(); &mut self makes the borrow exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zeroed_aligned_and_disjoint() {
        let arena = Arena::new(64 << 10).unwrap();
        let mut pieces = Vec::new();
        for (i, (bytes, align)) in [(1, 1), (7, 64), (0, 4096), (5000, 4096), (3, 2), (100, 32)].into_iter().enumerate()
        {
            let piece = arena.take(bytes, align).unwrap();
            assert_eq!((piece.len(), piece.as_ptr().addr() % align), (bytes, 0));
            assert!(piece.iter().all(|&b| b == 0));
            piece.fill(i as u8 + 1);
            pieces.push(piece);
        }
        let floats = arena.take_f32(33).unwrap();
        assert_eq!((floats.len(), floats.as_ptr().addr() % 64, floats[32]), (33, 0, 0.0));
        floats.fill(-1.0);
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|&b| b == i as u8 + 1), "piece {i} was overwritten");
        }
    }

    #[test]
    fn it_gives_exactly_what_it_has() {
        let arena = Arena::new(1).unwrap();
        let bytes = arena.bytes();
        assert_eq!(bytes % page_bytes(), 0);
        arena.take(bytes - 1, 1).unwrap();
        let full = |wanted_bytes, left_bytes| ArenaFull { wanted_bytes, left_bytes, sealed: false };
        assert_eq!(arena.take(2, 1).unwrap_err(), full(2, 1));
        assert_eq!(arena.take(1, 4096).unwrap_err(), full(1, 1));
        assert_eq!(arena.take(usize::MAX, 1).unwrap_err(), full(usize::MAX, 1));
        assert_eq!(arena.take_f32(usize::MAX / 2).unwrap_err().left_bytes, 1);
        arena.take(1, 1).unwrap();
        assert_eq!(arena.used_bytes(), bytes);
    }

    #[test]
    fn a_sealed_arena_gives_nothing() {
        let arena = Arena::new(8192).unwrap();
        arena.seal();
        let error = arena.take(0, 1).unwrap_err();
        assert!(error.sealed && error.to_string().contains("sealed"), "{error}");
        assert!(arena.take_io(1).is_err());
    }

    #[test]
    fn io_buffers_outlive_the_arena_and_split() {
        let arena = Arena::new(16 << 10).unwrap();
        let mut rest = arena.take_io(12 << 10).unwrap();
        drop(arena);
        let mut head = rest.split_to(4096);
        assert_eq!((head.len(), rest.len(), rest.as_ptr().addr() % 4096), (4096, 8192, 0));
        head.fill(1);
        rest.fill(2);
        drop(rest);
        assert!(head.iter().all(|&b| b == 1));
    }

    #[test]
    fn a_large_arena_is_resident_and_starts_on_a_huge_page() {
        let before = crate::sys::memory::rss_bytes().unwrap();
        let arena = Arena::new(64 << 20).unwrap();
        let after = crate::sys::memory::rss_bytes().unwrap();
        assert!(after >= before + (60 << 20), "resident set grew from {before} to {after} only");
        assert_eq!(arena.take(1, 1).unwrap().as_ptr().addr() % HUGE_BYTES, 0);
    }

    #[test]
    fn a_locked_arena_counts_as_locked() {
        let locked = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|l| l.strip_prefix("VmLck:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
        };
        let arena = Arena::new(1 << 20).unwrap();
        assert_eq!(locked(), 0);
        match arena.lock() {
            Ok(()) => assert_eq!(locked(), arena.bytes()),
            Err(error) => return eprintln!("not permitted here: {error}"),
        }
        drop(arena);
        assert_eq!(locked(), 0);
    }

    #[test]
    fn threads_take_disjoint_pieces() {
        let arena = Arena::new(64 * 1000).unwrap();
        std::thread::scope(|scope| {
            for id in 1..=4u8 {
                let arena = &arena;
                scope.spawn(move || {
                    let pieces: Vec<_> = (0..200).map(|_| arena.take(64, 64).unwrap()).collect();
                    for piece in pieces {
                        assert!(piece.iter().all(|&b| b == 0), "handed out twice");
                        piece.fill(id);
                    }
                });
            }
        });
    }
}
