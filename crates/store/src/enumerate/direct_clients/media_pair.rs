//! Two recorded media that are fenced at once. At some access their user dies, or
//! another goes on before it.

use super::super::medium::lines_of;
use super::oracle::WriteOracle;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{CrashPoint, FenceProof, Media, Recorder, UnfencedStores};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// What the guest that dies unwinds with.
pub(super) struct ClientDeath;

/// What another guest does in between.
type OtherClient = Box<dyn FnOnce()>;

/// What will happen to the guest that is at work.
#[derive(Default)]
struct AccessPlan {
    /// Accesses until it dies.
    dies_after: Option<u64>,
    /// Accesses until another goes on, and what that does.
    other_after: Option<(u64, OtherClient)>,
    accesses: u64,
}

thread_local! {
    static FATE: RefCell<AccessPlan> = RefCell::default();
}

enum AccessAction {
    Continue,
    Die,
    RunOther(OtherClient),
}

impl AccessPlan {
    fn step(&mut self) -> AccessAction {
        let at = self.accesses;
        self.accesses += 1;
        if self.dies_after == Some(at) {
            return AccessAction::Die;
        }
        match self.other_after.take() {
            Some((after, other)) if after == at => AccessAction::RunOther(other),
            waiting => {
                self.other_after = waiting;
                AccessAction::Continue
            }
        }
    }
}

/// Before an access of the guest at work.
pub(super) fn step() {
    match FATE.with_borrow_mut(AccessPlan::step) {
        AccessAction::Continue => {}
        AccessAction::Die => std::panic::resume_unwind(Box::new(ClientDeath)),
        AccessAction::RunOther(other) => other(),
    }
}

/// Runs an operation that dies after so many accesses, or before which `other` is done
/// after so many. Gives what came of it, and its accesses.
pub(super) fn with_access_plan<T>(
    dies_after: Option<u64>,
    other_after: Option<(u64, OtherClient)>,
    run: impl FnOnce() -> T,
) -> (Result<T, Box<dyn std::any::Any + Send>>, u64) {
    let fate = AccessPlan {
        dies_after,
        other_after,
        accesses: 0,
    };
    let before = FATE.replace(fate);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    let own = FATE.replace(before);
    (outcome, own.accesses)
}

/// Runs something of the pools' owners, whom nothing happens to.
pub(super) fn without_access_plan<T>(run: impl FnOnce() -> T) -> T {
    let before = FATE.replace(AccessPlan::default());
    let result = run();
    FATE.set(before);
    result
}

/// What a crash may leave of both media, and what must be there then.
pub(super) struct PairCrashPoint {
    pub(super) points: [CrashPoint; 2],
    pub(super) oracle: WriteOracle,
}

/// The media.
pub(super) struct MediaPair {
    pub(super) media: [Recorder; 2],
    pub(super) oracle: Mutex<WriteOracle>,
    pub(super) crash_points: Mutex<Vec<PairCrashPoint>>,
}

impl MediaPair {
    pub(super) fn crash_point(&self) -> PairCrashPoint {
        PairCrashPoint {
            points: [0, 1].map(|at| self.media[at].crash_point()),
            oracle: self.oracle.lock().expect("no panic inside").clone(),
        }
    }

    pub(super) fn record_crash_point(&self) {
        let moment = self.crash_point();
        self.crash_points
            .lock()
            .expect("no panic inside")
            .push(moment);
    }
}

/// One of them.
pub(super) struct PairedMedium {
    pub(super) pair: Arc<MediaPair>,
    pub(super) at: usize,
}

impl PairedMedium {
    fn media(&self) -> &Recorder {
        &self.pair.media[self.at]
    }
}

impl Media for PairedMedium {
    fn len_bytes(&self) -> usize {
        self.media().len_bytes()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.media().read(offset, into);
    }
    fn load(&self, offset: usize) -> u64 {
        self.media().load(offset)
    }
    fn store(&self, offset: usize, word: u64) {
        step();
        self.media().store(offset, word);
    }
    /// A line at a time.
    fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, part) in lines_of(offset, bytes) {
            step();
            self.media().write(at, part);
        }
    }
    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        step();
        self.media().compare_exchange(offset, old, new)
    }
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        step();
        self.media().stream_line(offset, line)
    }
    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        step();
        let inner: Vec<_> = targets.iter().map(|(h, at)| (h.media(), *at)).collect();
        Recorder::stream_page(&inner, page)
    }
    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        step();
        self.media().flush(offset, len)
    }
    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        step();
        self.pair.record_crash_point();
        self.media().fence(stores)
    }
    /// One instruction for all, so one moment before it.
    fn fence_each(halves: &[&Self], stores: UnfencedStores) -> FenceProof {
        step();
        halves[0].pair.record_crash_point();
        let inner: Vec<_> = halves.iter().map(|half| half.media()).collect();
        Recorder::fence_each(&inner, stores)
    }
}
