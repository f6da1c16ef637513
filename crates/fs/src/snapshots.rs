//! The snapshots of a file system that fronts show as `.snapshot/NAME`: opened at their first use, shared by all fronts of a process,
//! and closed when they are idle.
//!
//! Invariants:
//! - At most [`OPEN_SNAPSHOTS_MAX`] snapshots stay open. A request that still uses a closed one keeps it until its end.
//! - No lock is held over I/O.

use crate::Fs;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The name of the directory with the snapshots.
pub const SNAPSHOT_DIR: &[u8] = b".snapshot";
/// Snapshots that are open at once. Each has caches, and recovery data if it was in the middle of writes.
pub const OPEN_SNAPSHOTS_MAX: usize = 8;
/// An open snapshot that was not used for this long is closed.
pub const SNAPSHOT_IDLE_MAX: Duration = Duration::from_secs(300);

/// A snapshot of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// Its name.
    pub name: String,
    /// Its identity: no other snapshot of the file system ever has it.
    pub id: u32,
}

/// The snapshots of a file system, and the way to open them.
pub trait SnapshotSource: Send + Sync {
    /// All, the newest first.
    ///
    /// # Errors
    /// `EIO` if they cannot be listed.
    fn list(&self) -> Result<Vec<SnapshotEntry>, Errno>;

    /// The identity of the snapshot that has this name now.
    ///
    /// # Errors
    /// `ENOENT` if there is none, `EIO` if that cannot be found out.
    fn find(&self, name: &str) -> Result<u32, Errno>;

    /// Opens the file system of a snapshot.
    ///
    /// # Errors
    /// `ESTALE` if the snapshot was deleted, `EIO` if it cannot be read.
    fn open(&self, id: u32) -> Result<Arc<Fs>, Errno>;
}

/// See the module.
pub struct OpenSnapshots {
    source: Box<dyn SnapshotSource>,
    open: Mutex<OpenTable>,
}

/// The open file systems, with the time of their last use.
#[derive(Default)]
struct OpenTable(HashMap<u32, (Arc<Fs>, Instant)>);

impl OpenTable {
    /// Removes the snapshots that are idle.
    fn take_idle(&mut self, now: Instant) -> Vec<Arc<Fs>> {
        let is_idle = |used: Instant| now.saturating_duration_since(used) >= SNAPSHOT_IDLE_MAX;
        let idle = self.0.extract_if(|_, (_, used)| is_idle(*used));
        idle.map(|(_, (fs, _))| fs).collect()
    }

    /// Removes the one that was used least recently, if there is no room for another.
    fn take_oldest(&mut self) -> Option<Arc<Fs>> {
        if self.0.len() < OPEN_SNAPSHOTS_MAX {
            return None;
        }
        let oldest = self.0.iter().min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(id, _)| *id)?;
        self.0.remove(&oldest).map(|(fs, _)| fs)
    }
}

impl OpenSnapshots {
    /// The snapshots of a source. None is open.
    #[must_use]
    pub fn new(source: Box<dyn SnapshotSource>) -> OpenSnapshots {
        OpenSnapshots {
            source,
            open: Mutex::default(),
        }
    }

    /// As [`SnapshotSource::list`].
    ///
    /// # Errors
    /// As [`SnapshotSource::list`].
    pub fn list(&self) -> Result<Vec<SnapshotEntry>, Errno> {
        self.source.list()
    }

    /// As [`SnapshotSource::find`].
    ///
    /// # Errors
    /// As [`SnapshotSource::find`].
    pub fn find(&self, name: &str) -> Result<u32, Errno> {
        self.source.find(name)
    }

    /// The file system of a snapshot, opened if it is not.
    ///
    /// # Errors
    /// As [`SnapshotSource::open`].
    pub fn fs(&self, id: u32) -> Result<Arc<Fs>, Errno> {
        let now = Instant::now();
        {
            let mut table = self.open.lock();
            if let Some((fs, used)) = table.0.get_mut(&id) {
                *used = now;
                return Ok(Arc::clone(fs));
            }
        }
        let opened = self.source.open(id)?;
        let mut table = self.open.lock();
        let idle = table.take_idle(now);
        let oldest = table.take_oldest();
        // Another thread may have opened it meanwhile.
        let (fs, used) = table.0.entry(id).or_insert((opened, now));
        *used = now;
        let fs = Arc::clone(fs);
        drop(table);
        drop((idle, oldest));
        Ok(fs)
    }

    /// Closes a snapshot that failed a read, if it was deleted. Returns whether it was.
    #[must_use]
    pub fn close_deleted(&self, id: u32) -> bool {
        let listed = self.source.list();
        let is_deleted = listed.is_ok_and(|all| all.iter().all(|it| it.id != id));
        if is_deleted {
            let closed = self.open.lock().0.remove(&id);
            drop(closed);
        }
        is_deleted
    }

    /// Closes all.
    pub fn close_all(&self) {
        let closed = std::mem::take(&mut *self.open.lock());
        drop(closed);
    }
}
