//! A mount with a commit interval: after a loss of power the file system is in a state that it had between the last
//! completed sync and now, never in a mixture.
//!
//! The pool is enumerated as in `crashes.rs`: any 512 bytes since the last flush may be lost.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod support;

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

const SIZE: u64 = 1 << 36;
const POOL_BYTES: usize = 96 << 20;
/// Most images of one fence.
const IMAGES_MAX: u64 = 4;
/// Longer than any test.
const INTERVAL: Duration = Duration::from_secs(3600);

fn mount(pooled: &PoolSpace) -> (Fs, IoChannel) {
    let (fs, port) = pooled.mount();
    fs.set_commit_interval(INTERVAL, Box::new(|| {}));
    (fs, port)
}

/// Whether a state is another one with a part of an operation.
fn is_partial(state: &FsModel, op: &Op, found: &FsModel) -> bool {
    let mut then = state.clone();
    let _ = then.run(op);
    state.crash_outcome(op, &then, found).is_ok()
}

/// A mount on a pool, and the states that a loss of power may leave.
struct CrashWindow {
    pooled: PoolSpace,
    /// The states after the operations since the last sync, and at the sync.
    states: Vec<FsModel>,
    images: usize,
    /// Most images of one fence.
    images_max: u64,
    /// Largest number of states since a sync.
    longest: usize,
}

impl CrashWindow {
    fn new() -> CrashWindow {
        CrashWindow {
            pooled: PoolSpace::new(POOL_BYTES, SIZE, true),
            states: vec![FsModel::default()],
            images: 0,
            images_max: IMAGES_MAX,
            longest: 0,
        }
    }

    /// Recovers every image of these points, and checks that `accept` takes the state that it finds.
    fn check(
        &mut self,
        points: &[CrashPoint],
        at: &str,
        accept: impl Fn(&[FsModel], &FsModel) -> bool,
    ) {
        for (number, point) in points.iter().enumerate() {
            let seed = self.images as u64;
            for image in point.images(self.images_max, self.images_max, seed) {
                self.images += 1;
                let left = PoolSpace::recover(image, true);
                let (fs, mut port) = left.mount();
                let found = read(&fs, &mut port).unwrap_or_else(|what| panic!("{at}: {what}"));
                assert!(
                    accept(&self.states, &found),
                    "{at}, fence {number}: none of the {} states since the last sync",
                    self.states.len()
                );
            }
        }
    }

    /// An operation that changed pages outside of one transaction may be there in part, on each of the states before it: the
    /// pages of files are not ordered with names.
    fn check_operation(&mut self, op: &Op, after: &FsModel, is_atomic: bool, at: &str) {
        let points = self.pooled.crash_points();
        self.check(&points, at, |states, found| {
            let is_whole = |state: &FsModel| state.check(found).is_ok();
            let is_partial = |state: &FsModel| is_partial(state, op, found);
            is_whole(after)
                || match is_atomic {
                    true => states.iter().any(is_whole),
                    false => states.iter().any(is_partial),
                }
        });
        self.states.push(after.clone());
        self.longest = self.longest.max(self.states.len());
    }

    /// Syncs, and checks a loss of power during the sync and after it.
    fn sync(&mut self, fs: &Fs, port: &mut IoChannel, last: &Op, at: &str) {
        // The last operation may be there in part on each earlier state, and on none after it.
        let earlier = self.states.len().saturating_sub(1);
        fs.sync(port, Ino::ROOT).expect("a sound pool");
        let mut points = self.pooled.crash_points();
        let after = points.pop().expect("now");
        self.check(&points, &format!("{at}, in the sync"), |states, found| {
            let is_partial = |state: &FsModel| is_partial(state, last, found);
            let is_whole = |state: &FsModel| state.check(found).is_ok();
            states.iter().any(is_whole) || states[..earlier].iter().any(is_partial)
        });
        self.states.drain(..self.states.len() - 1);
        let at = format!("{at}, synced");
        self.check(&[after], &at, |states, found| {
            states[0].check(found).is_ok()
        });
    }
}

/// Runs operations, and checks every loss of power. Returns the window, and the number of operations that succeeded.
fn run_ops(seed: u64, operations: usize) -> (CrashWindow, usize) {
    let mut rng = OpGenerator::new(seed, OpScale::Large);
    let mut window = CrashWindow::new();
    let (mut fs, mut port) = mount(&window.pooled);
    let mut model = FsModel::default();
    window.pooled.crash_points();
    let mut done = 0;
    for number in 0..operations {
        let op = rng.next_op(&model);
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let expected = model.run(&op);
        window.pooled.take_change_counts();
        assert_eq!(run_op(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        let (transactions, direct) = window.pooled.take_change_counts();
        let is_atomic = op.non_atomic_file().is_none() || direct == 0 && transactions <= 1;
        window.check_operation(&op, &model, is_atomic, &at);
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
            (fs, port) = mount(&window.pooled);
            window.pooled.crash_points();
        }
    }
    (window, done)
}

#[test]
fn power_failure_leaves_a_state_since_the_last_sync() {
    let (mut images, mut done, mut longest) = (0, 0, 0);
    for seed in 2000..2006 {
        let (window, succeeded) = run_ops(seed, 40);
        images += window.images;
        done += succeeded;
        longest = longest.max(window.longest);
    }
    println!("{images} images mounted, {done} operations succeeded, {longest} states at once");
    assert!(done > 6 * 20, "only {done} operations succeeded");
    assert!(longest > 5, "only {longest} states between two syncs");
}

/// A file that is written, synced and removed. Its bytes stay until the removal is committed.
fn check_removal_of_large_file() {
    let mut window = CrashWindow::new();
    let (fs, mut port) = mount(&window.pooled);
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
    window.pooled.crash_points();
    window.sync(&fs, &mut port, &write, "written");
    let removal = run(Op::Unlink(vec![1]), &mut model, &mut port);
    window.check_operation(&removal, &model, true, "removed");
}

/// More changes than one batch holds.
fn check_order_of_batches() {
    const FILES: u8 = 8;
    let mut window = CrashWindow::new();
    window.images_max = 24;
    let (fs, mut port) = mount(&window.pooled);
    let mut model = FsModel::default();
    window.pooled.crash_points();
    for file in 1..=FILES {
        let append = Op::Append(vec![file], 20 * 4096, file);
        for op in [Op::Create(vec![file]), append] {
            model.run(&op).unwrap();
            run_op(&fs, &mut port, &op).unwrap();
            window.check_operation(&op, &model, true, &format!("{op:?}"));
        }
    }
    let (transactions, _) = window.pooled.take_change_counts();
    assert!(transactions > 2, "only {transactions} transactions");
}

#[test]
fn batches_survive_in_their_order() {
    check_order_of_batches();
}

#[test]
fn removed_file_is_whole_until_the_removal_is_stored() {
    check_removal_of_large_file();
}

#[test]
fn deferred_commit_defects_are_caught() {
    let caught = |defect, run: &dyn Fn()| {
        defect::set(Some(defect));
        let outcome = catch_unwind(AssertUnwindSafe(run));
        defect::set(None);
        assert!(outcome.is_err(), "{defect:?} is not caught");
    };
    let histories = || (2000..2006).for_each(|seed| drop(run_ops(seed, 40)));
    caught(Defect::SyncSkipsAcknowledged, &histories);
    caught(Defect::UncommittedPagesRead, &histories);
    caught(Defect::DiscardBeforeRemoval, &check_removal_of_large_file);
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
