//! What the kernel knows about an open file that `std` does not tell.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

/// Bytes that the page cache may keep in one piece; ranges to drop are widened to it, as the kernel keeps pieces that are
/// only partly inside.
const FOLIO_BYTES: u64 = 64 << 10;

/// Alignment that O_DIRECT wants of offsets and memory in this file, in bytes (0 where it is refused), from
/// `statx(2)`, STATX_DIOALIGN. `None` before Linux 6.1 and on file systems that do not say.
pub(crate) fn direct_align(file: &File) -> Option<usize> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open while `file` is borrowed, the path is an empty C string (AT_EMPTY_PATH: the file
    // itself), and the kernel writes one struct statx. All zeroes is a valid one, so it is initialised either way.
    let stat = unsafe {
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
        match libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_DIOALIGN, stat.as_mut_ptr()) {
            0 => stat.assume_init(),
            _ => return None,
        }
    };
    let known = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    known.then(|| stat.stx_dio_mem_align.max(stat.stx_dio_offset_align) as usize)
}

/// Asks the kernel to drop `bytes` bytes at `offset` from the page cache.
pub(crate) fn drop_cached(file: &File, offset: u64, bytes: usize) {
    let start = offset / FOLIO_BYTES * FOLIO_BYTES;
    let end = offset.saturating_add(bytes as u64).checked_next_multiple_of(FOLIO_BYTES).unwrap_or(u64::MAX);
    advise(file, start, end - start, libc::POSIX_FADV_DONTNEED);
}

/// Asks the kernel to drop all of `file` from the page cache, which is charged to whoever read it.
pub fn drop_page_cache(file: &File) {
    advise(file, 0, 0, libc::POSIX_FADV_DONTNEED);
}

/// Asks the kernel not to read ahead: what is still on its way cannot be dropped from the page cache.
pub fn read_randomly(file: &File) {
    advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
}

fn advise(file: &File, offset: u64, bytes: u64, advice: i32) {
    let (Ok(offset), Ok(bytes)) = (offset.try_into(), bytes.try_into()) else { return };
    // SAFETY: the descriptor is open while `file` is borrowed; the call touches no memory of ours.
    let error = unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, bytes, advice) };
    if error != 0 {
        log::debug!("posix_fadvise({advice}): {}", io::Error::from_raw_os_error(error));
    }
}

/// Bytes of `file` that the page cache holds. Of a file that the user does not own and may not write, the kernel says all.
///
/// # Errors
/// If it is empty or cannot be mapped.
pub fn cached_bytes(file: &File) -> io::Result<usize> {
    let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut pages = vec![0u8; bytes.div_ceil(super::page_bytes())];
    // SAFETY: a read-only mapping of its own that nobody looks into and that is unmapped here; `pages` has a byte for each
    // of its pages, as mincore() wants.
    unsafe {
        let map = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let result = libc::mincore(map, bytes, pages.as_mut_ptr());
        let error = io::Error::last_os_error();
        libc::munmap(map, bytes);
        if result != 0 {
            return Err(error);
        }
    }
    Ok(pages.iter().filter(|&&page| page & 1 != 0).count() * super::page_bytes())
}
