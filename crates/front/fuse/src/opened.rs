//! Files that the kernel has open, by the number that it gives back with each request.

use pagemesh_fs::Seen;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// In the number of a file that was opened with O_DSYNC or O_SYNC.
const SYNCED: u64 = 1;

/// As many as the kernel has open. 0 is none of them.
#[derive(Default)]
pub(crate) struct Opened(Mutex<Files>);

#[derive(Default)]
struct Files {
    last: u64,
    seen: HashMap<u64, Arc<Seen>>,
}

impl Opened {
    fn files(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a file that is opened now.
    pub(crate) fn add(&self, seen: Seen, is_synced: bool) -> u64 {
        let mut files = self.files();
        files.last += 1;
        let file = files.last << 1 | if is_synced { SYNCED } else { 0 };
        files.seen.insert(file, Arc::new(seen));
        file
    }

    pub(crate) fn remove(&self, file: u64) {
        self.files().seen.remove(&file);
    }

    /// What it was told; nothing: it is a directory.
    pub(crate) fn get(&self, file: u64) -> Option<Arc<Seen>> {
        self.files().seen.get(&file).cloned()
    }

    pub(crate) fn is_synced(file: u64) -> bool {
        file & SYNCED != 0
    }
}
