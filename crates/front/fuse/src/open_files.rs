//! Files that the kernel has open, by the number that it sends with each request.

use crate::abi;
use crate::sync_pattern::SyncPattern;
use pagemesh_base::poison;
use pagemesh_fs::LostWriteCursor;
use std::collections::HashMap;
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
    /// The kernel reads and writes it through its page cache.
    pub(crate) is_cached: bool,
}

impl OpenFile {
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
}

impl OpenFiles {
    fn lock_table(&self) -> MutexGuard<'_, OpenTable> {
        poison::lock(&self.0)
    }

    /// The number of a file that is opened now.
    pub(crate) fn add(&self, seen: LostWriteCursor, is_synced: bool, is_cached: bool) -> u64 {
        let open = OpenFile {
            lost_writes: seen,
            expected_syncs: AtomicU32::new(0),
            sync_pattern: SyncPattern::default(),
            is_cached,
        };
        let mut files = self.lock_table();
        files.last += 1;
        let file = files.last << 1 | if is_synced { SYNCED } else { 0 };
        files.open.insert(file, Arc::new(open));
        file
    }

    pub(crate) fn remove(&self, file: u64) -> Option<Arc<OpenFile>> {
        self.lock_table().open.remove(&file)
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
