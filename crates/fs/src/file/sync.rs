//! Making changes durable, and reporting lost writes.
//!
//! **Data loss:** overwrites that were not flushed are lost if every copy that had them was gone
//! for a while.
//!
//! The volume counts these losses. Each open file gets the error once, from its next sync, as Linux
//! does it (`errseq_t`). A file that is opened afterwards does not get it, unless no sync has
//! reported it yet. It is unknown which files lost writes.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::file::mmap_dirty::FlushMode;
use crate::format::inode::Ino;
use crate::io::channel::IoChannel;
use pagemesh_base::space::SpaceError;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// The losses that were reported through one open file.
#[derive(Debug, Default)]
pub struct LostWriteCursor(AtomicU64);

impl Fs {
    /// The cursor for a file that is opened now.
    #[must_use]
    pub fn lost_write_cursor(&self) -> LostWriteCursor {
        LostWriteCursor(AtomicU64::new(
            self.reported_losses.0.load(Ordering::Acquire),
        ))
    }

    /// Makes completed changes of a file durable, as the pool's class promises, with its times and
    /// its mmap-dirty pages. The mmap-dirty pages enter the file as one atomic change.
    ///
    /// # Errors
    /// Errors of the volume, among them that earlier changes may be lost, unless another sync
    /// reported it.
    pub fn sync(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        self.sync_open_file(channel, ino, &self.reported_losses)
    }

    /// As [`Fs::sync`], for an open file with its own cursor.
    ///
    /// # Errors
    /// Errors of the volume; once, that earlier changes may be lost. `EIO` after mmap-dirty pages
    /// were refused, until all programs have closed the file.
    pub fn sync_open_file(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        seen: &LostWriteCursor,
    ) -> Result<()> {
        // The rest alone would be only a part of the atomic change.
        self.check_lost_pages(ino)?;
        self.flush_mmap_dirty(channel, ino, FlushMode::Atomic)?;
        let noted = self.flush_times(ino);
        self.flush_and_report(channel, seen)?;
        ignore_no_space(noted)
    }

    /// Whether a sync of an open file, right after a durable write through it, has nothing to do.
    #[must_use]
    pub fn has_nothing_to_sync(&self, ino: Ino, seen: &LostWriteCursor) -> bool {
        let is_told = seen.0.load(Ordering::Acquire) == self.space.lost_writes();
        if !is_told || self.space.needs_flush() {
            return false;
        }
        let core = self.lock_core();
        let live = core.live_inodes.get(&ino);
        live.is_some_and(|live| live.file_lock.has_nothing_to_sync())
    }

    /// As [`Fs::sync_open_file`], for the sync that a kernel sends after a durable write. It need
    /// not store the time of that write, as the write itself does not.
    ///
    /// # Errors
    /// As [`Fs::sync_open_file`].
    pub fn sync_after_durable_write(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        seen: &LostWriteCursor,
    ) -> Result<()> {
        self.check_lost_pages(ino)?;
        self.flush_mmap_dirty(channel, ino, FlushMode::Atomic)?;
        self.flush_and_report(channel, seen)
    }

    /// Flushes mmap-dirty pages and pending times of all files, and makes everything durable.
    ///
    /// # Errors
    /// As [`Fs::sync`].
    pub fn sync_all(&self, channel: &mut IoChannel) -> Result<()> {
        self.flush_all_mmap_dirty(channel)?;
        let noted = self.flush_all_times();
        self.flush_and_report(channel, &self.reported_losses)?;
        ignore_no_space(noted)
    }

    fn flush_and_report(&self, channel: &mut IoChannel, seen: &LostWriteCursor) -> Result<()> {
        channel.flush(&*self.space)?;
        // Read after the flush: losses from before it are counted by now.
        let losses = self.space.lost_writes();
        let before = seen.0.fetch_max(losses, Ordering::AcqRel);
        self.reported_losses.0.fetch_max(losses, Ordering::AcqRel);
        match before < losses {
            true => Err(FsError::Space(SpaceError::Unavailable(
                "every copy was gone for a while; earlier writes that were not synced may be \
                 lost; write them again"
                    .into(),
            ))),
            false => Ok(()),
        }
    }
}

/// Without room, the times stay pending; the data is durable nevertheless.
fn ignore_no_space(noted: Result<()>) -> Result<()> {
    match noted {
        Err(error) if error.errno() == Errno::NOSPC => Ok(()),
        noted => noted,
    }
}
