//! Two recorded media that share fences. At a chosen access the active client dies, or another
//! client runs before the access.

use super::oracle::WriteOracle;
use pagemesh_pmem::test_api::RecordedMedium;
use pagemesh_pmem::{CrashPoint, Recorder};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// Panic payload of a dying direct client.
pub(super) struct ClientDeath;

/// The operation of another direct client that runs in between.
type OtherClient = Box<dyn FnOnce()>;

/// Events planned for the active direct client.
#[derive(Default)]
struct AccessPlan {
    /// Accesses until the client dies.
    dies_after: Option<u64>,
    /// Accesses until the other client runs, and its operation.
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

/// Called before each access of the active client.
pub(super) fn step() {
    match FATE.with_borrow_mut(AccessPlan::step) {
        AccessAction::Continue => {}
        AccessAction::Die => std::panic::resume_unwind(Box::new(ClientDeath)),
        AccessAction::RunOther(other) => other(),
    }
}

/// Runs an operation that dies after `dies_after` accesses; `other_after` runs another client's
/// operation before one of them. Returns the outcome and the number of accesses.
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

/// Runs an operation of the pools' owners: no planned event interrupts it.
pub(super) fn without_access_plan<T>(run: impl FnOnce() -> T) -> T {
    let before = FATE.replace(AccessPlan::default());
    let result = run();
    FATE.set(before);
    result
}

/// The crash point of both media, and the oracle at that time.
pub(super) struct PairCrashPoint {
    pub(super) points: [CrashPoint; 2],
    pub(super) oracle: WriteOracle,
}

/// The two media and their common oracle.
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

/// One medium of the pair.
pub(super) struct PairedMedium {
    pub(super) pair: Arc<MediaPair>,
    pub(super) at: usize,
}

impl RecordedMedium for PairedMedium {
    fn recorder(&self) -> &Recorder {
        &self.pair.media[self.at]
    }
    fn before_change(&self) {
        step();
    }
    /// One instruction fences both media, so there is one crash point before it.
    fn before_fence(&self) {
        self.pair.record_crash_point();
    }
}
