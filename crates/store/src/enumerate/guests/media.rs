//! Two recorded media that are fenced at once. At some access their user dies, or
//! another goes on before it.

use super::super::medium::lines_of;
use super::judge::Oracle;
use pagemesh_base::checksum::Sums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{CrashPoint, Fenced, Media, Recorder, Unfenced};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// What the guest that dies unwinds with.
pub(super) struct Death;

/// What another guest does in between.
type Other = Box<dyn FnOnce()>;

/// What will happen to the guest that is at work.
#[derive(Default)]
struct Fate {
    /// Accesses until it dies.
    dies_after: Option<u64>,
    /// Accesses until another goes on, and what that does.
    other_after: Option<(u64, Other)>,
    accesses: u64,
}

thread_local! {
    static FATE: RefCell<Fate> = RefCell::default();
}

enum Act {
    GoOn,
    Die,
    LetGo(Other),
}

impl Fate {
    fn step(&mut self) -> Act {
        let at = self.accesses;
        self.accesses += 1;
        if self.dies_after == Some(at) {
            return Act::Die;
        }
        match self.other_after.take() {
            Some((after, other)) if after == at => Act::LetGo(other),
            waiting => {
                self.other_after = waiting;
                Act::GoOn
            }
        }
    }
}

/// Before an access of the guest at work.
pub(super) fn step() {
    match FATE.with_borrow_mut(Fate::step) {
        Act::GoOn => {}
        Act::Die => std::panic::resume_unwind(Box::new(Death)),
        Act::LetGo(other) => other(),
    }
}

/// Runs an operation that dies after so many accesses, or before which `other` is done
/// after so many. Gives what came of it, and its accesses.
pub(super) fn fated<T>(
    dies_after: Option<u64>,
    other_after: Option<(u64, Other)>,
    run: impl FnOnce() -> T,
) -> (Result<T, Box<dyn std::any::Any + Send>>, u64) {
    let fate = Fate {
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
pub(super) fn spared<T>(run: impl FnOnce() -> T) -> T {
    let before = FATE.replace(Fate::default());
    let result = run();
    FATE.set(before);
    result
}

/// What a crash may leave of both media, and what must be there then.
pub(super) struct Moment {
    pub(super) points: [CrashPoint; 2],
    pub(super) oracle: Oracle,
}

/// The media.
pub(super) struct Both {
    pub(super) media: [Recorder; 2],
    pub(super) oracle: Mutex<Oracle>,
    pub(super) moments: Mutex<Vec<Moment>>,
}

impl Both {
    pub(super) fn moment(&self) -> Moment {
        Moment {
            points: [0, 1].map(|at| self.media[at].crash_point()),
            oracle: self.oracle.lock().expect("no panic inside").clone(),
        }
    }

    pub(super) fn note(&self) {
        let moment = self.moment();
        self.moments.lock().expect("no panic inside").push(moment);
    }
}

/// One of them.
pub(super) struct Half {
    pub(super) both: Arc<Both>,
    pub(super) at: usize,
}

impl Half {
    fn media(&self) -> &Recorder {
        &self.both.media[self.at]
    }
}

impl Media for Half {
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
    fn swap(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        step();
        self.media().swap(offset, old, new)
    }
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> Unfenced {
        step();
        self.media().stream_line(offset, line)
    }
    fn stream_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> (Sums, Unfenced) {
        step();
        let inner: Vec<_> = targets.iter().map(|(h, at)| (h.media(), *at)).collect();
        Recorder::stream_page(&inner, page)
    }
    fn flush(&self, offset: usize, len: usize) -> Unfenced {
        step();
        self.media().flush(offset, len)
    }
    fn fence(&self, stores: Unfenced) -> Fenced {
        step();
        self.both.note();
        self.media().fence(stores)
    }
    /// One instruction for all, so one moment before it.
    fn fence_each(halves: &[&Self], stores: Unfenced) -> Fenced {
        step();
        halves[0].both.note();
        let inner: Vec<_> = halves.iter().map(|half| half.media()).collect();
        Recorder::fence_each(&inner, stores)
    }
}
