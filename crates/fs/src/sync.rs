//! Making things durable, and telling of what was lost before.
//!
//! Bytes that were written over others and not flushed are lost when every copy that had
//! them is gone for a while. The volume counts that, and each open file hears of it once,
//! from its next sync: as a kernel does it (Linux, `errseq_t`). Whoever opens a file
//! afterwards does not, unless nobody has heard of it yet. Which file lost something is not
//! known.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::format::Ino;
use crate::io::IoChannel;
use crate::mmap_dirty::FlushMode;
use pagemesh_base::space::SpaceError;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// The losses that one open file has been told.
#[derive(Debug, Default)]
pub struct LostWriteCursor(AtomicU64);

impl Fs {
    /// For a file that is opened now.
    #[must_use]
    pub fn lost_write_cursor(&self) -> LostWriteCursor {
        LostWriteCursor(AtomicU64::new(
            self.reported_losses.0.load(Ordering::Acquire),
        ))
    }

    /// Makes completed changes of a file durable, as the pool's class promises, and
    /// with them its times. What was stored into mappings of it becomes part of it, all at
    /// once.
    ///
    /// # Errors
    /// What the volume says; that what was changed before may be lost, if nobody was told.
    pub fn sync(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        self.sync_open_file(channel, ino, &self.reported_losses)
    }

    /// The same for a file that was opened.
    ///
    /// # Errors
    /// What the volume says; once, that what was changed before may be lost; and `EIO` as
    /// long as somebody has the file open who may have stored what is not there to be synced.
    pub fn sync_open_file(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        seen: &LostWriteCursor,
    ) -> Result<()> {
        // The rest alone would be part of what is one change.
        self.check_lost_pages(ino)?;
        self.flush_mmap_dirty(channel, ino, FlushMode::Atomic)?;
        let noted = self.flush_times(ino);
        self.flush_and_report(channel, seen)?;
        ignore_no_space(noted)
    }

    /// Whether a sync of an opened file behind a durable write through it has nothing to do.
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

    /// The same behind a durable write through an opened file, for the sync that a kernel sends
    /// then: it need not put down the time of that write, as the write itself does not.
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

    /// Puts all noted times into their inodes, and makes everything durable.
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
        // Behind the flush: what was lost before it is counted by now.
        let losses = self.space.lost_writes();
        let before = seen.0.fetch_max(losses, Ordering::AcqRel);
        self.reported_losses.0.fetch_max(losses, Ordering::AcqRel);
        match before < losses {
            true => Err(FsError::Space(SpaceError::Unavailable(
                "every copy was gone for a while; what was written before and not synced may \
                 be lost, write it again"
                    .into(),
            ))),
            false => Ok(()),
        }
    }
}

/// Times that there is no room for stay noted: what was written is synced nevertheless.
fn ignore_no_space(noted: Result<()>) -> Result<()> {
    match noted {
        Err(error) if error.errno() == Errno::NOSPC => Ok(()),
        noted => noted,
    }
}
