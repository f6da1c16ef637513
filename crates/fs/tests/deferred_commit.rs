//! A mount with a commit interval: after a loss of power the file system is in a state that it had between the last
//! completed sync and now, never in a mixture.
//!
//! A pool is enumerated as in `crashes.rs`: any 512 bytes since the last flush may be lost. The order of requests is enumerated
//! on a space that flushes only when asked to, because a pool also flushes for its maintenance.

use crate::support;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_fs::{Fs, Ino, IoChannel};
use pagemesh_fs_model::{FsModel, OWNER, Op, OpGenerator, OpScale, read, run_op};
use pagemesh_pmem::CrashPoint;
use rustix::io::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::memory::MemorySpace;
use support::new_fs;
use support::pool::PoolSpace;
use support::write_cache::{PowerCut, WriteCacheSpace};

const SIZE: u64 = 1 << 36;
const POOL_BYTES: usize = 96 << 20;
/// Most images of one fence.
const IMAGES_MAX: u64 = 4;
/// Longer than any test.
const INTERVAL: Duration = Duration::from_secs(3600);

/// A space whose power can fail.
trait CrashSpace: Sized {
    /// A moment at which it fails.
    type Cut;
    fn mount_all(&self) -> (Fs, IoChannel);
    /// The cuts since the last call, and now.
    fn take_cuts(&self) -> Vec<Self::Cut>;
    /// States that a cut may leave.
    fn images(&self, cut: &Self::Cut, images_max: u64, seed: u64) -> impl Iterator<Item = Self>;
    /// Numbers of transactions, and of other changes of pages, since the last call.
    fn take_change_counts(&self) -> (usize, usize);
}

/// Any 512 bytes of the pool since its last flush may be lost. It also flushes for its own maintenance.
impl CrashSpace for PoolSpace {
    type Cut = CrashPoint;

    fn mount_all(&self) -> (Fs, IoChannel) {
        self.mount()
    }

    fn take_cuts(&self) -> Vec<CrashPoint> {
        self.crash_points()
    }

    fn images(&self, cut: &CrashPoint, images_max: u64, seed: u64) -> impl Iterator<Item = Self> {
        let images = cut.images(images_max, images_max, seed);
        images.map(|image| PoolSpace::recover(image, true))
    }

    fn take_change_counts(&self) -> (usize, usize) {
        PoolSpace::take_change_counts(self)
    }
}

/// Any request since the last flush may be lost, and nothing flushes unless it is asked to.
impl CrashSpace for WriteCacheSpace {
    type Cut = PowerCut;

    fn mount_all(&self) -> (Fs, IoChannel) {
        self.mount()
    }

    fn take_cuts(&self) -> Vec<PowerCut> {
        WriteCacheSpace::take_cuts(self)
    }

    fn images(&self, cut: &PowerCut, images_max: u64, seed: u64) -> impl Iterator<Item = Self> {
        WriteCacheSpace::images(self, cut, images_max as usize, seed).into_iter()
    }

    fn take_change_counts(&self) -> (usize, usize) {
        WriteCacheSpace::take_change_counts(self)
    }
}

fn new_pool() -> PoolSpace {
    PoolSpace::new(POOL_BYTES, SIZE, true)
}

fn mount(space: &impl CrashSpace) -> (Fs, IoChannel) {
    let (fs, port) = space.mount_all();
    fs.set_commit_interval(INTERVAL, Box::new(|| {}));
    (fs, port)
}

/// Whether a state is another one with a part of an operation.
fn is_partial(state: &FsModel, op: &Op, found: &FsModel) -> bool {
    let mut then = state.clone();
    let _ = then.run(op);
    state.crash_outcome(op, &then, found).is_ok()
}

/// A mounted space, and the states that a loss of power may leave.
struct CrashWindow<S> {
    space: S,
    /// The states after the operations since the last sync, and at the sync.
    states: Vec<FsModel>,
    images: usize,
    /// Most images of one fence.
    images_max: u64,
    /// Largest number of states since a sync.
    longest: usize,
}

impl<S: CrashSpace> CrashWindow<S> {
    fn new(space: S) -> CrashWindow<S> {
        CrashWindow {
            space,
            states: vec![FsModel::default()],
            images: 0,
            images_max: IMAGES_MAX,
            longest: 0,
        }
    }

    /// Mounts every image of these cuts, and checks that `accept` takes the state that it finds.
    fn check(&mut self, cuts: &[S::Cut], at: &str, accept: impl Fn(&[FsModel], &FsModel) -> bool) {
        for (number, cut) in cuts.iter().enumerate() {
            let seed = self.images as u64;
            for left in self.space.images(cut, self.images_max, seed) {
                self.images += 1;
                let (fs, mut port) = left.mount_all();
                let found = read(&fs, &mut port).unwrap_or_else(|what| panic!("{at}: {what}"));
                assert!(
                    accept(&self.states, &found),
                    "{at}, cut {number}: none of the {} states since the last sync",
                    self.states.len()
                );
            }
        }
    }

    /// An operation that changed pages outside of one transaction may be there in part, on each of the states before it: the
    /// pages of files are not ordered with names.
    fn check_operation(&mut self, op: &Op, after: &FsModel, is_atomic: bool, at: &str) {
        let cuts = self.space.take_cuts();
        self.check(&cuts, at, |states, found| {
            let is_whole = |state: &FsModel| state.check(found).is_ok();
            let is_partial = |state: &FsModel| is_partial(state, op, found);
            is_whole(after)
                || match is_atomic {
                    true => states.iter().any(is_whole),
                    false => states.iter().any(is_partial),
                }
        });
        self.states.push(after.clone());
    }

    /// Syncs, and checks a loss of power during the sync and after it.
    fn sync(&mut self, fs: &Fs, port: &mut IoChannel, last: &Op, at: &str) {
        // The last operation may be there in part on each earlier state, and on none after it.
        let earlier = self.states.len().saturating_sub(1);
        fs.sync(port, Ino::ROOT).expect("a sound pool");
        let mut cuts = self.space.take_cuts();
        let after = cuts.pop().expect("now");
        self.check(&cuts, &format!("{at}, in the sync"), |states, found| {
            let is_partial = |state: &FsModel| is_partial(state, last, found);
            let is_whole = |state: &FsModel| state.check(found).is_ok();
            states.iter().any(is_whole) || states[..earlier].iter().any(is_partial)
        });
        self.longest = self.longest.max(self.states.len());
        self.states.drain(..self.states.len() - 1);
        let at = format!("{at}, synced");
        self.check(&[after], &at, |states, found| {
            states[0].check(found).is_ok()
        });
    }
}

/// Runs operations, and checks every loss of power. Returns the window, and the number of operations that succeeded.
fn run_ops<S: CrashSpace>(space: S, seed: u64, operations: usize) -> (CrashWindow<S>, usize) {
    let mut rng = OpGenerator::new(seed, OpScale::Large);
    let mut window = CrashWindow::new(space);
    let (mut fs, mut port) = mount(&window.space);
    let mut model = FsModel::default();
    window.space.take_cuts();
    let mut done = 0;
    for number in 0..operations {
        let op = rng.next_op(&model);
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let expected = model.run(&op);
        window.space.take_change_counts();
        assert_eq!(run_op(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        let (transactions, direct) = window.space.take_change_counts();
        // A write may begin in one batch and end in the next one.
        let is_in_one_batch = direct == 0
            && (transactions == 0 || transactions == 1 && fs.uncommitted_changes().pages == 0);
        let is_atomic = op.non_atomic_file().is_none() || is_in_one_batch;
        if transactions + direct > 0 {
            window.check_operation(&op, &model, is_atomic, &at);
        } else {
            // The space did not change: its images were checked, and more states are accepted now.
            window.states.push(model.clone());
        }
        if rng.one_in(6) {
            // Programs see the same state before and after a commit.
            let found = read(&fs, &mut port).expect("sound");
            model
                .check(&found)
                .unwrap_or_else(|what| panic!("{at}: {what}"));
        }
        if !is_atomic || rng.one_in(12) {
            window.sync(&fs, &mut port, &op, &at);
        }
        if rng.one_in(15) {
            window.sync(&fs, &mut port, &op, &at);
            drop((fs, port));
            (fs, port) = mount(&window.space);
            window.space.take_cuts();
        }
    }
    (window, done)
}

/// Runs histories of some seeds, and reports the work.
fn run_histories<S: CrashSpace>(seeds: std::ops::Range<u64>, space: impl Fn() -> S) {
    let (mut images, mut done, mut longest) = (0, 0, 0);
    let histories = (seeds.end - seeds.start) as usize;
    for seed in seeds {
        let (window, succeeded) = run_ops(space(), seed, 40);
        images += window.images;
        done += succeeded;
        longest = longest.max(window.longest);
    }
    println!("{images} images mounted, {done} operations succeeded, {longest} states at once");
    assert!(done > histories * 20, "only {done} operations succeeded");
    assert!(longest > 5, "only {longest} states between two syncs");
}

#[test]
fn power_failure_leaves_a_state_since_the_last_sync() {
    run_histories(2000..2003, new_pool);
}

#[test]
fn lost_requests_leave_a_state_since_the_last_sync() {
    run_histories(3000..3012, || WriteCacheSpace::new(SIZE));
}

/// A file that is written, synced and removed. Its bytes stay until the removal is committed.
fn check_removal_of_large_file(space: impl CrashSpace) {
    let mut window = CrashWindow::new(space);
    let (fs, mut port) = mount(&window.space);
    let mut model = FsModel::default();
    let run = |op: Op, model: &mut FsModel, port: &mut IoChannel| {
        model.run(&op).unwrap();
        run_op(&fs, port, &op).unwrap();
        op
    };
    run(Op::Create(vec![1]), &mut model, &mut port);
    window.states.push(model.clone());
    let write = run(Op::Write(vec![1], 0, 300_000, 7), &mut model, &mut port);
    window.states.push(model.clone());
    window.space.take_cuts();
    window.sync(&fs, &mut port, &write, "written");
    let removal = run(Op::Unlink(vec![1]), &mut model, &mut port);
    window.check_operation(&removal, &model, true, "removed");
}

/// More changes than one batch holds.
fn check_order_of_batches(space: impl CrashSpace) -> usize {
    const FILES: u8 = 10;
    let mut window = CrashWindow::new(space);
    window.images_max = 24;
    let (fs, mut port) = mount(&window.space);
    let mut model = FsModel::default();
    window.space.take_cuts();
    for file in 1..=FILES {
        let op = Op::CreateUnnamed(vec![file], 20 * 4096, file);
        model.run(&op).unwrap();
        run_op(&fs, &mut port, &op).unwrap();
        window.check_operation(&op, &model, true, &format!("{op:?}"));
    }
    let (transactions, _) = window.space.take_change_counts();
    assert!(transactions > 2, "only {transactions} transactions");
    window.images
}

#[test]
fn batches_survive_in_their_order() {
    check_order_of_batches(new_pool());
    let images = check_order_of_batches(WriteCacheSpace::new(SIZE));
    println!("{images} images mounted");
}

#[test]
fn removed_file_is_whole_until_the_removal_is_stored() {
    check_removal_of_large_file(new_pool());
}

/// Whether a workload fails with a defect.
fn is_caught(defect: Defect, run: impl FnOnce()) -> bool {
    defect::set(Some(defect));
    let outcome = catch_unwind(AssertUnwindSafe(run));
    defect::set(None);
    outcome.is_err()
}

#[test]
fn deferred_commit_defects_are_caught() {
    /// Histories that must catch a defect, so that a change of the code may hide it from some.
    const CATCHES_MIN: usize = 3;
    for defect in [
        Defect::SyncSkipsAcknowledged,
        Defect::UncommittedPagesRead,
        Defect::DiscardBeforeRemoval,
        Defect::DeferredBatchNotFlushed,
    ] {
        let history = |seed: &u64| {
            is_caught(defect, || {
                run_ops(WriteCacheSpace::new(SIZE), *seed, 40);
            })
        };
        // The same histories as without a defect.
        let caught: Vec<u64> = (3000..3012).filter(history).take(CATCHES_MIN).collect();
        println!("{defect:?} is caught by {caught:?}");
        assert_eq!(caught.len(), CATCHES_MIN, "{defect:?} is caught too rarely");
    }
    assert!(is_caught(Defect::DiscardBeforeRemoval, || {
        check_removal_of_large_file(new_pool());
    }));
}

#[test]
fn defects_of_the_order_of_batches_are_caught() {
    for defect in [Defect::DeferredBatchNotFlushed, Defect::FullBatchNotFlushed] {
        let is_caught = is_caught(defect, || {
            check_order_of_batches(WriteCacheSpace::new(SIZE));
        });
        assert!(is_caught, "{defect:?} is not caught");
    }
}

/// A file system in memory, with a count of calls of the hook.
fn in_memory() -> (MemorySpace, Fs, IoChannel, Arc<AtomicUsize>) {
    let memory = MemorySpace::new(SIZE).with_write_cache();
    let (fs, port) = new_fs(&memory);
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let hook = move || {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    fs.set_commit_interval(INTERVAL, Box::new(hook));
    (memory, fs, port, asked)
}

fn create(fs: &Fs, name: &str) -> pagemesh_fs::Result<Ino> {
    let made = fs.create_opened(Ino::ROOT, name.as_bytes(), 0o644, OWNER)?;
    Ok(made.ino)
}

#[test]
fn changes_are_sent_at_the_interval() {
    let (memory, fs, mut port, asked) = in_memory();
    let steps = memory.steps();
    let file = create(&fs, "file").unwrap();
    let data = Bytes::from(vec![5; 10_000]);
    fs.write(&mut port, file, None, &data, false).unwrap();
    assert_eq!(memory.steps(), steps, "nothing is sent");
    let waiting = fs.uncommitted_changes();
    assert!(waiting.pages >= 4, "{waiting:?}");
    let due = fs
        .commit_due(Instant::now())
        .unwrap()
        .expect("changes wait");
    assert_eq!(Some(due), waiting.since.map(|since| since + INTERVAL));
    assert_eq!(fs.commit_due(due).unwrap(), None);
    assert_eq!(
        memory.steps(),
        steps + 1,
        "both changes are one transaction"
    );
    assert_eq!(fs.uncommitted_changes().pages, 0);
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    assert_eq!(fs.read(&mut port, file, 0, 10_000).unwrap(), data);
}

#[test]
fn half_full_batch_calls_the_hook() {
    let (memory, fs, mut port, asked) = in_memory();
    let steps = memory.steps();
    let data = Bytes::from(vec![5; 20 * 4096]);
    for name in ["one", "two"] {
        let file = create(&fs, name).unwrap();
        fs.write(&mut port, file, None, &data, false).unwrap();
    }
    assert!(asked.load(Ordering::Relaxed) > 0);
    assert_eq!(memory.steps(), steps);
    fs.commit_due(Instant::now()).unwrap();
    assert_eq!(memory.steps(), steps + 1);
}

#[test]
fn durable_write_commits_changes_before_it() {
    let (memory, fs, mut port, _) = in_memory();
    let file = create(&fs, "file").unwrap();
    let data = Bytes::from(vec![5; 4096]);
    fs.write(&mut port, file, None, &data, true).unwrap();
    create(&fs, "other").unwrap();
    assert!(fs.uncommitted_changes().pages > 0);
    fs.write(&mut port, file, Some(0), &data, true).unwrap();
    assert_eq!(fs.uncommitted_changes().pages, 0);
    create(&fs, "third").unwrap();
    let cursor = fs.lost_write_cursor();
    assert!(!fs.has_nothing_to_sync(file, &cursor));
    fs.sync_data(&mut port, file, &cursor).unwrap();
    assert_eq!(fs.uncommitted_changes().pages, 0);
    drop((fs, memory));
}

#[test]
fn full_pool_takes_acknowledged_changes_by_the_reserve() {
    let (memory, fs, mut port, _) = in_memory();
    let data = Bytes::from(vec![5; 20 * 4096]);
    let file = create(&fs, "file").unwrap();
    fs.write(&mut port, file, None, &data, false).unwrap();
    memory.set_room(Some(memory.mapped_pages()));
    fs.sync(&mut port, file).unwrap();
    // Without a reserve each call waits again, and gets its error.
    assert_eq!(fs.uncommitted_changes().pages, 0);
    memory.set_room(Some(memory.mapped_pages()));
    let refused = fs.write(&mut port, file, None, &data, false);
    assert_eq!(refused.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(fs.read(&mut port, file, 0, 80 << 10).unwrap(), data);
}

#[test]
fn lost_acknowledged_changes_fail_each_sync() {
    let (memory, fs, mut port, _) = in_memory();
    let data = Bytes::from(vec![5; 20 * 4096]);
    let file = create(&fs, "file").unwrap();
    fs.write(&mut port, file, None, &data, false).unwrap();
    // Another volume of the pool takes more than the reserve.
    memory.set_room(Some(0));
    for _ in 0..2 {
        fs.sync(&mut port, file).expect_err("the changes are lost");
    }
    memory.set_room(None);
    fs.sync(&mut port, file).expect_err("they are still lost");
    assert_eq!(create(&fs, "other").unwrap_err().errno(), Errno::ROFS);
    assert!(!fs.has_nothing_to_sync(file, &fs.lost_write_cursor()));
}

#[test]
fn space_without_write_cache_stores_each_change() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _port) = new_fs(&memory);
    fs.set_commit_interval(INTERVAL, Box::new(|| {}));
    let steps = memory.steps();
    create(&fs, "file").unwrap();
    assert_eq!(memory.steps(), steps + 1);
}
