//! Files that the kernel has open, by the number that it sends with each request.

use crate::abi;
use crate::sync_pattern::SyncPattern;
use pagemesh_base::poison;
use pagemesh_fs::{Fs, Ino, LostWriteCursor};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Bit in the number of a file that was opened with O_DSYNC or O_SYNC.
const SYNCED: u64 = 1;

/// An open file.
pub(crate) struct OpenFile {
    /// The lost writes that were reported to it.
    pub(crate) lost_writes: LostWriteCursor,
    /// Writes after each of which the kernel sends a sync.
    expected_syncs: AtomicU32,
    pub(crate) sync_pattern: SyncPattern,
    ino: Ino,
    /// The kernel reads and writes it through its page cache.
    pub(crate) is_cached: bool,
    /// It was recorded as writable ([`Fs::record_writable_open`]).
    is_writable: bool,
}

impl OpenFile {
    pub(crate) fn new(
        ino: Ino,
        lost_writes: LostWriteCursor,
        is_cached: bool,
        is_writable: bool,
    ) -> OpenFile {
        OpenFile {
            lost_writes,
            expected_syncs: AtomicU32::new(0),
            sync_pattern: SyncPattern::default(),
            ino,
            is_cached,
            is_writable,
        }
    }

    /// Runs before the file is released.
    fn end(&self, fs: &Fs) {
        if self.is_writable {
            fs.record_writable_close(self.ino);
        }
        if self.is_cached {
            fs.end_caching(self.ino);
        }
    }

    pub(crate) fn expects_sync(&self) -> bool {
        self.expected_syncs.load(Ordering::Relaxed) > 0
    }

    /// Whether a sync may be the one that the kernel sends after a write to a file opened with
    /// O_DSYNC or O_SYNC. A sync by another thread can be taken for it, and the other way round.
    pub(crate) fn take_expected_sync(&self) -> bool {
        let less = |syncs: u32| syncs.checked_sub(1);
        let order = Ordering::Relaxed;
        self.expected_syncs.fetch_update(order, order, less).is_ok()
    }
}

/// The open files. 0 is not a number of one.
#[derive(Default)]
pub(crate) struct OpenFiles(Mutex<OpenTable>);

#[derive(Default)]
struct OpenTable {
    last: u64,
    open: HashMap<u64, Arc<OpenFile>>,
    /// Opens of directories: they have no number.
    directories: HashMap<Ino, u64>,
}

impl OpenTable {
    fn remove_directory(&mut self, ino: Ino) {
        if let Entry::Occupied(mut opens) = self.directories.entry(ino) {
            match opens.get().checked_sub(1) {
                None | Some(0) => drop(opens.remove()),
                Some(left) => *opens.get_mut() = left,
            }
        }
    }
}

impl OpenFiles {
    fn lock_table(&self) -> MutexGuard<'_, OpenTable> {
        poison::lock(&self.0)
    }

    /// The number of a file that is opened now.
    pub(crate) fn add(&self, open: OpenFile, is_synced: bool) -> u64 {
        let mut files = self.lock_table();
        files.last += 1;
        let file = files.last << 1 | if is_synced { SYNCED } else { 0 };
        files.open.insert(file, Arc::new(open));
        file
    }

    /// Records an open of a directory.
    pub(crate) fn add_directory(&self, ino: Ino) {
        *self.lock_table().directories.entry(ino).or_default() += 1;
    }

    /// Ends the use of an open file or directory. The caller releases it afterwards.
    pub(crate) fn close(&self, fs: &Fs, ino: Ino, file: u64) {
        let closed = {
            let mut table = self.lock_table();
            let closed = table.open.remove(&file);
            if closed.is_none() {
                table.remove_directory(ino);
            }
            closed
        };
        if let Some(open) = closed {
            open.end(fs);
        }
    }

    /// Releases all that the kernel has open: it has ended without doing so.
    pub(crate) fn release_all(&self, fs: &Fs) {
        let OpenTable {
            open, directories, ..
        } = std::mem::take(&mut *self.lock_table());
        for file in open.into_values() {
            file.end(fs);
            fs.release(file.ino);
        }
        for (ino, opens) in directories {
            (0..opens).for_each(|_| fs.release(ino));
        }
    }

    /// None: it is a directory.
    pub(crate) fn get(&self, file: u64) -> Option<Arc<OpenFile>> {
        self.lock_table().open.get(&file).cloned()
    }

    pub(crate) fn is_synced(file: u64) -> bool {
        file & SYNCED != 0
    }

    /// Records a write after which the kernel sends a sync: one to a cached file that was opened
    /// with O_DSYNC or O_SYNC. (The kernel sends none after an asynchronous write with `O_DIRECT`:
    /// a later sync is taken for it.)
    pub(crate) fn expect_sync(&self, file: u64, write_flags: u32) {
        if write_flags & abi::WRITE_CACHE == 0
            && OpenFiles::is_synced(file)
            && let Some(open) = self.get(file)
            && open.is_cached
        {
            open.expected_syncs.fetch_add(1, Ordering::Relaxed);
        }
    }
}
