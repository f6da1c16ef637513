//! A recorded medium; its user dies at a chosen access.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::test_api::RecordedMedium;
use pagemesh_pmem::{Media, Recorder};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

/// Panic payload of a dying thread.
pub(super) struct ThreadDeath;

/// Pages with delayed stores, and their offsets.
type LatePages = Mutex<Vec<(usize, Box<[u8; PAGE_BYTES]>)>>;

/// One mapping of a pool.
pub(super) struct CrashMedium {
    pub(super) recorder: Arc<Recorder>,
    /// Accesses left, shared by all mappings; negative: the user does not die.
    accesses_left: Arc<AtomicI64>,
    late_pages: LatePages,
}

impl CrashMedium {
    pub(super) fn new(recorder: Recorder) -> CrashMedium {
        CrashMedium {
            recorder: Arc::new(recorder),
            accesses_left: Arc::new(AtomicI64::new(-1)),
            late_pages: Mutex::default(),
        }
    }

    /// A private mapping of the same file.
    pub(super) fn overlay(&self) -> CrashMedium {
        CrashMedium {
            recorder: Arc::new(self.recorder.overlay()),
            accesses_left: self.accesses_left.clone(),
            late_pages: Mutex::default(),
        }
    }

    /// Makes the user of the medium die after this many accesses.
    pub(super) fn die_after(&self, accesses: i64) {
        self.accesses_left.store(accesses, Ordering::Relaxed);
    }

    /// Cancels the planned death; returns the accesses that were left.
    pub(super) fn cancel_death(&self) -> i64 {
        self.accesses_left.swap(-1, Ordering::Relaxed)
    }
}

impl RecordedMedium for CrashMedium {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }
    fn before_change(&self) {
        let left = self.accesses_left.load(Ordering::Relaxed);
        if left >= 0 {
            self.accesses_left.store(left - 1, Ordering::Relaxed);
            if left == 0 {
                std::panic::resume_unwind(Box::new(ThreadDeath));
            }
        }
    }
    fn take_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> bool {
        let is_late = defect::is(Defect::DataAfterRecord);
        if is_late {
            for (medium, at) in targets {
                let mut late = medium.late_pages.lock().expect("no panic inside");
                late.push((*at, Box::new(*page)));
            }
        }
        is_late
    }
    fn after_fence(&self) {
        for (at, page) in self.late_pages.lock().expect("no panic inside").drain(..) {
            let (_, _unfenced) = Recorder::stream_page(&[(&*self.recorder, at)], &page);
        }
    }
}
