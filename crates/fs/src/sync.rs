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
use crate::held::How;
use crate::io::Port;
use pagemesh_base::space::SpaceError;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// The losses that one open file has been told.
#[derive(Debug, Default)]
pub struct Seen(AtomicU64);

impl Fs {
    /// For a file that is opened now.
    #[must_use]
    pub fn seen(&self) -> Seen {
        Seen(AtomicU64::new(self.told.0.load(Ordering::Acquire)))
    }

    /// Makes completed changes of a file durable, as the pool's class promises, and
    /// with them its times. What was stored into mappings of it becomes part of it, all at
    /// once.
    ///
    /// # Errors
    /// What the volume says; that what was changed before may be lost, if nobody was told.
    pub fn sync(&self, port: &mut Port, ino: Ino) -> Result<()> {
        self.sync_opened(port, ino, &self.told)
    }

    /// The same for a file that was opened.
    ///
    /// # Errors
    /// What the volume says; once, that what was changed before may be lost; and `EIO` as
    /// long as somebody has the file open who may have stored what is not there to be synced.
    pub fn sync_opened(&self, port: &mut Port, ino: Ino, seen: &Seen) -> Result<()> {
        // The rest alone would be part of what is one change.
        self.check_refused(ino)?;
        self.put_held(port, ino, How::Whole)?;
        let noted = self.note_times(ino);
        self.flush(port, seen)?;
        but_for_room(noted)
    }

    /// Whether a sync of an opened file behind a durable write through it has nothing to do.
    #[must_use]
    pub fn is_synced(&self, ino: Ino, seen: &Seen) -> bool {
        let is_told = seen.0.load(Ordering::Acquire) == self.space.losses();
        if !is_told || self.space.flush_waits() {
            return false;
        }
        let core = self.core();
        let live = core.live.get(&ino);
        live.is_some_and(|live| live.data.holds_nothing())
    }

    /// The same behind a durable write through an opened file, for the sync that a kernel sends
    /// then: it need not put down the time of that write, as the write itself does not.
    ///
    /// # Errors
    /// As [`Fs::sync_opened`].
    pub fn sync_written(&self, port: &mut Port, ino: Ino, seen: &Seen) -> Result<()> {
        self.check_refused(ino)?;
        self.put_held(port, ino, How::Whole)?;
        self.flush(port, seen)
    }

    /// Puts all noted times into their inodes, and makes everything durable.
    ///
    /// # Errors
    /// As [`Fs::sync`].
    pub fn sync_all(&self, port: &mut Port) -> Result<()> {
        self.put_all_held(port)?;
        let noted = self.put_times();
        self.flush(port, &self.told)?;
        but_for_room(noted)
    }

    fn flush(&self, port: &mut Port, seen: &Seen) -> Result<()> {
        port.flush(&*self.space)?;
        // Behind the flush: what was lost before it is counted by now.
        let losses = self.space.losses();
        let before = seen.0.fetch_max(losses, Ordering::AcqRel);
        self.told.0.fetch_max(losses, Ordering::AcqRel);
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
fn but_for_room(noted: Result<()>) -> Result<()> {
    match noted {
        Err(error) if error.errno() == Errno::NOSPC => Ok(()),
        noted => noted,
    }
}
