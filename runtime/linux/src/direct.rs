//! The model file, read past the page cache.
//!
//! Relies on O_DIRECT, and checks at open that it returns the file's bytes. Where the file system refuses or fails it,
//! reads go through the page cache and are dropped from it at once. Never writes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use forerun_engine::ports::ReadError;

use crate::progress::{Next, Progress};
use crate::{Arena, BLOCK_BYTES, sys};

/// An open model file. Reads are of whole blocks at block boundaries, into block-aligned memory.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    len: u64,
    direct: bool,
}

impl DirectFile {
    /// Opens the regular file at `path` with O_DIRECT and compares its first and last block with what the page cache
    /// holds. Where O_DIRECT is refused or wrong, logs one warning and reads through the page cache instead.
    ///
    /// # Errors
    /// If it cannot be opened or read, or is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let buffered = Self::open_buffered(path)?;
        match buffered.open_direct(path) {
            Ok(direct) => Ok(direct),
            Err(why) => {
                let path = path.display();
                log::warn!(
                    "{path}: no O_DIRECT ({why}); reading through the page cache and dropping it after each read"
                );
                Ok(buffered)
            }
        }
    }

    /// Opens the regular file at `path` to read through the page cache, dropping what each read leaves there.
    ///
    /// # Errors
    /// As [`DirectFile::open`].
    pub fn open_buffered(path: &Path) -> io::Result<Self> {
        let annotate = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        // Before the open, which would wait for ever on a FIFO and may wake a device.
        let kind = path.metadata().map_err(annotate)?.file_type();
        if !kind.is_file() {
            let found = match () {
                () if kind.is_dir() => "a directory",
                () if kind.is_fifo() => "a FIFO",
                () if kind.is_socket() => "a socket",
                () => "a device",
            };
            let text = format!("{} is {found}, expected a model file", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let file = File::open(path).map_err(annotate)?;
        let len = file.metadata().map_err(annotate)?.len();
        sys::read_randomly(&file);
        Ok(Self { file, len, direct: false })
    }

    /// The same file with O_DIRECT, if that reads what `self`, buffered, reads.
    fn open_direct(&self, path: &Path) -> Result<Self, String> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let file = file.map_err(|error| format!("the file system refuses it: {error}"))?;
        match sys::direct_align(&file) {
            Some(0) => return Err("the file system does not offer it for this file".into()),
            Some(align) if !BLOCK_BYTES.is_multiple_of(align) => {
                return Err(format!("it wants an alignment of {align}, expected a divisor of {BLOCK_BYTES}"));
            }
            _ => {}
        }
        let direct = Self { file, len: self.len, direct: true };
        let memory = Arena::new(2 * BLOCK_BYTES).map_err(|error| error.to_string())?;
        let take = || memory.take(BLOCK_BYTES, BLOCK_BYTES).map_err(|error| error.to_string());
        let (expected, found) = (take()?, take()?);
        let block = BLOCK_BYTES as u64;
        for start in [0, self.len.saturating_sub(1) / block * block] {
            // Some FUSE file systems return zeroes, or another part of the file, without an error.
            let bytes = (self.len - start).min(block) as usize;
            self.read(start, expected, bytes).map_err(|error| error.to_string())?;
            direct.read(start, found, bytes).map_err(|error| error.to_string())?;
            if expected[..bytes] != found[..bytes] {
                return Err(format!("it returns wrong bytes at offset {start}"));
            }
        }
        Ok(direct)
    }

    /// A pipe in the place of a file, for tests of a device that does not answer.
    #[cfg(test)]
    pub(crate) fn of_pipe(pipe: io::PipeReader) -> Self {
        Self { file: std::os::fd::OwnedFd::from(pipe).into(), len: u64::MAX, direct: true }
    }

    /// Length when it was opened, in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a file is not a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether reads pass by the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    pub(crate) fn as_file(&self) -> &File {
        &self.file
    }

    /// Reads into `out` from `start`, until at least `need` bytes are there. `out` may reach past the end of the file.
    ///
    /// # Errors
    /// If `need` bytes cannot be read after retries.
    pub(crate) fn read(&self, start: u64, out: &mut [u8], need: usize) -> Result<(), ReadError> {
        if need == 0 {
            return Ok(());
        }
        let mut progress = Progress::new(start, out.len(), need);
        let result = loop {
            let read = self.file.read_at(&mut out[progress.range()], progress.offset());
            match progress.advance(read.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))) {
                Next::Read => {}
                Next::Done => break Ok(()),
                Next::Fail(error) => break Err(error),
            }
        };
        self.finished(start, out.len());
        result
    }

    /// To call after a read of `bytes` bytes at `start`: drops what it left in the page cache.
    pub(crate) fn finished(&self, start: u64, bytes: usize) {
        if !self.direct {
            sys::drop_cached(&self.file, start, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_system_that_returns_other_bytes_is_found_out() {
        let path =
            |name: &str| std::env::current_exe().unwrap().with_file_name(format!("{name}-{}", std::process::id()));
        let (right, wrong) = (path("right"), path("wrong"));
        let mut bytes = vec![1; 5 * BLOCK_BYTES + 9];
        fs::write(&right, &bytes).unwrap();
        let buffered = DirectFile::open_buffered(&right).unwrap();
        for place in [0, 5 * BLOCK_BYTES + 8] {
            bytes[place] = 2;
            fs::write(&wrong, &bytes).unwrap();
            bytes[place] = 1;
            // On a disk that has O_DIRECT the other file stands for what a broken file system returns.
            if DirectFile::open(&right).unwrap().is_direct() {
                let why = buffered.open_direct(&wrong).unwrap_err();
                assert!(why.contains("wrong bytes"), "{why}");
            }
        }
        fs::remove_file(right).unwrap();
        fs::remove_file(wrong).unwrap();
    }
}
