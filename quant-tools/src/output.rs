//! A file that appears under its name only when it is complete: written as `NAME.partial` beside it, synced, renamed.
//! An error removes the partial file; a killed run leaves it, and the next run starts it anew.

use crate::error::{Error, Result};
use rustix::fs::{FlockOperation, flock, statvfs};
use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

/// A file being written.
#[derive(Debug)]
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    /// Next byte to append at.
    at: u64,
    complete: bool,
}

impl Partial {
    /// Starts writing a file that will have `bytes` bytes and replace or become `target`.
    ///
    /// # Errors
    /// If `target` exists and `force` is not set, another process writes it, or the device has less free space.
    pub fn create(target: &Path, force: bool, bytes: u64) -> Result<Self> {
        match fs::metadata(target) {
            Ok(m) if !m.is_file() => {
                return Err(Error::Io(format!("{} is not a regular file: choose another name", target.display())));
            }
            Ok(_) if !force => {
                return Err(Error::Io(format!("{} exists: choose another name or give --force", target.display())));
            }
            _ => {}
        }
        let mut name = target.file_name().map(OsString::from).unwrap_or_default();
        name.push(".partial");
        let path = target.with_file_name(name);
        let io = |doing: &str, e: std::io::Error| Error::io(doing, &path, &e);
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(|e| io("create", e))?;
        let busy = || Error::Io(format!("another process is writing {}: wait for it or stop it", path.display()));
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| busy())?;
        // Between opening and locking, the other process may have finished and renamed this very file.
        let opened = file.metadata().map_err(|e| io("read", e))?;
        if !fs::metadata(&path).is_ok_and(|m| (m.dev(), m.ino()) == (opened.dev(), opened.ino())) {
            return Err(busy());
        }
        let partial = Self { file, path: path.clone(), target: target.to_path_buf(), at: 0, complete: false };
        partial.file.set_len(0).map_err(|e| io("empty", e))?;
        let vfs = statvfs(&path).map_err(|e| io("ask the free space for", e.into()))?;
        let free = vfs.f_bavail.saturating_mul(vfs.f_frsize);
        if free < bytes {
            return Err(Error::Space(format!(
                "{}: {} MiB free on the device, expected at least {}: free some space or write to another device",
                target.display(),
                free >> 20,
                (bytes >> 20) + 1
            )));
        }
        partial.file.set_len(bytes).map_err(|e| io("lengthen", e))?;
        Ok(partial)
    }

    /// Goes on at `offset`; bytes skipped are zero.
    pub fn seek(&mut self, offset: u64) {
        self.at = offset;
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// If writing fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.at).map_err(|e| Error::io("write", &self.path, &e))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// If syncing or renaming fails; the partial file is then removed.
    pub fn commit(mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, &e))?;
        fs::rename(&self.path, &self.target).map_err(|e| Error::io("rename", &self.path, &e))?;
        self.complete = true;
        let dir = match self.target.parent() {
            Some(p) if p != Path::new("") => p,
            _ => Path::new("."),
        };
        File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::io("sync", dir, &e))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.complete
            && let Err(e) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}
