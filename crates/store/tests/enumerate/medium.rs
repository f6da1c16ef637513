//! A recorded medium; its user dies at a chosen access.

use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{FenceProof, MapError, Media, Recorder, UnfencedStores};
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

    fn step(&self) {
        let left = self.accesses_left.load(Ordering::Relaxed);
        if left >= 0 {
            self.accesses_left.store(left - 1, Ordering::Relaxed);
            if left == 0 {
                std::panic::resume_unwind(Box::new(ThreadDeath));
            }
        }
    }
}

/// Splits bytes at line boundaries: each part with its offset.
pub(super) fn lines_of(offset: usize, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let (mut at, mut rest) = (offset, bytes);
    std::iter::from_fn(move || {
        let count = rest.len().min(LINE_BYTES - at % LINE_BYTES);
        let (part, after) = rest.split_at(count);
        let found = (at, part);
        (at, rest) = (at + count, after);
        (count > 0).then_some(found)
    })
}

impl Media for CrashMedium {
    fn len_bytes(&self) -> usize {
        self.recorder.len_bytes()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.recorder.read(offset, into);
    }
    fn load(&self, offset: usize) -> u64 {
        self.recorder.load(offset)
    }
    fn store(&self, offset: usize, word: u64) {
        self.step();
        self.recorder.store(offset, word);
    }
    /// Each line is one access.
    fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, part) in lines_of(offset, bytes) {
            self.step();
            self.recorder.write(at, part);
        }
    }
    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.step();
        self.recorder.compare_exchange(offset, old, new)
    }
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        self.step();
        self.recorder.stream_line(offset, line)
    }
    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        targets[0].0.step();
        if defect::is(Defect::DataAfterRecord) {
            for (medium, at) in targets {
                let mut late = medium.late_pages.lock().expect("no panic inside");
                late.push((*at, Box::new(*page)));
            }
            return (PageChecksums::of(page), targets[0].0.recorder.flush(0, 0));
        }
        let inner: Vec<_> = targets
            .iter()
            .map(|(medium, at)| (&*medium.recorder, *at))
            .collect();
        Recorder::stream_page(&inner, page)
    }
    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        self.step();
        self.recorder.flush(offset, len)
    }
    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.step();
        let fenced = self.recorder.fence(stores);
        for (at, page) in self.late_pages.lock().expect("no panic inside").drain(..) {
            let (_, _unfenced) = Recorder::stream_page(&[(&*self.recorder, at)], &page);
        }
        fenced
    }
    fn sync(&self) -> Result<(), MapError> {
        self.step();
        self.recorder.sync()
    }
}
