//! Random operations against a model, with a crash after every change of the space. The mounted
//! file system is the model before or after the operation in progress. Only the pages of a write
//! may be there in part.

use crate::support;
use pagemesh_fs::{AllocateMode, Fs, Ino, InodeKind, IoChannel};
use pagemesh_fs_model::{FsModel, Op, OpGenerator, OpScale, check_page_counts, read, run_op};
use support::memory::MemorySpace;
use support::pool::PoolSpace;
use support::{mount_and_free, new_fs};

const SIZE: u64 = 1 << 36;
/// Free inodes allowed among those in use.
const NUMBERS: u64 = 60;
/// Mounts the image after each change since `from`.
fn crash_everywhere(memory: &MemorySpace, from: usize, op: &Op, before: &FsModel, after: &FsModel) {
    for steps in from..memory.steps() {
        let old = memory.after_steps(steps);
        let (fs, mut port) = mount_and_free(&old);
        let at = format!("after change {steps} of {op:?}");
        check_after_crash((&fs, &mut port), &at, op, before, after);
        check_pages(old.mapped_pages() as u64, &fs);
        check_no_stale_bytes(&fs, &mut port);
    }
}

/// Checks the file system after a crash in an operation: it is the state before, the state after,
/// or, where the operation is not atomic, in between.
fn check_after_crash(
    (fs, port): (&Fs, &mut IoChannel),
    at: &str,
    op: &Op,
    before: &FsModel,
    after: &FsModel,
) {
    let found = read(fs, port);
    if let Err(what) = found.and_then(|found| before.crash_outcome(op, after, &found)) {
        panic!("{at}: {what}");
    }
}

fn check(model: &FsModel, fs: &Fs, port: &mut IoChannel) -> Result<(), String> {
    model.check(&read(fs, port)?)
}

/// Bytes from beyond the end of a file do not reappear when it grows.
fn check_no_stale_bytes(fs: &Fs, port: &mut IoChannel) {
    const MORE: u64 = 40_000;
    let inodes = fs.usage().inodes;
    for ino in (1..=inodes + NUMBERS).map(Ino) {
        let Ok(attr) = fs.attr(ino) else { continue };
        if attr.kind == InodeKind::File {
            fs.set_size(port, ino, attr.size + MORE).expect("room");
            let more = fs.read(port, ino, attr.size, MORE as u32).expect("sound");
            assert!(more.iter().all(|&byte| byte == 0), "old bytes in {attr:?}");
        }
    }
}

/// Every mapped page is counted; all other counted pages are unwritten.
fn check_pages(mapped: u64, fs: &Fs) {
    let used = fs.usage().used_bytes / 4096;
    let unwritten = used.checked_sub(mapped);
    // Pages of the inode table, and attributes rounded up to a power of two.
    assert!(
        unwritten.is_some_and(|pages| pages < 100),
        "{mapped} pages mapped, {used} in use"
    );
}

/// Runs random operations on one file system. Returns the number that succeeded.
fn run_ops(seed: u64, operations: usize, crashes: bool) -> usize {
    let mut dice = OpGenerator::new(seed, OpScale::Large);
    let memory = MemorySpace::new(SIZE);
    let (mut fs, mut port) = new_fs(&memory);
    let mut model = FsModel::default();
    let mut done = 0;
    for number in 0..operations {
        // Preallocation beyond the end is counted and invisible: in every second run only.
        let mut op = dice.next_op(&model);
        if let (
            0,
            Op::Allocate(
                _,
                AllocateMode::Reserve { keep_size } | AllocateMode::Zero { keep_size },
                ..,
            ),
        ) = (seed % 2, &mut op)
        {
            *keep_size = false;
        }
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let before = crashes.then(|| model.clone());
        let steps = memory.steps();
        let expected = model.run(&op);
        assert_eq!(run_op(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        if (crashes || dice.one_in(4))
            && let Err(what) = check(&model, &fs, &mut port)
        {
            panic!("after {at}: {what}");
        }
        if seed.is_multiple_of(2) {
            check_page_counts(&model, &fs, &mut port);
        }
        if let Some(before) = before {
            crash_everywhere(&memory, steps, &op, &before, &model);
        }
        check_pages(memory.mapped_pages() as u64, &fs);
        if dice.one_in(10) {
            drop((fs, port));
            (fs, port) = mount_and_free(&memory);
            if let Err(what) = check(&model, &fs, &mut port) {
                panic!("mounted after {at}: {what}");
            }
            check_pages(memory.mapped_pages() as u64, &fs);
        }
    }
    done
}

#[test]
fn operations_match_the_model() {
    let done: usize = (0..20).map(|seed| run_ops(seed, 300, false)).sum();
    assert!(done > 20 * 200, "only {done} operations succeeded");
}

#[test]
fn crashed_operation_is_complete_or_absent() {
    let done: usize = (1000..1020).map(|seed| run_ops(seed, 60, true)).sum();
    assert!(done > 20 * 35, "only {done} operations succeeded");
}

/// Runs operations in a pool; its machine loses power at each fence. Returns the numbers of
/// operations that succeeded and of images mounted. In a pool that buffers, each operation begins
/// when all before it are durable.
fn run_ops_in_pool(seed: u64, operations: usize, buffers: bool) -> (usize, usize) {
    const POOL_BYTES: usize = 96 << 20;
    /// Most images of one fence.
    const IMAGES_MAX: u64 = 5;
    let mut dice = OpGenerator::new(seed, OpScale::Large);
    let pooled = PoolSpace::new(POOL_BYTES, SIZE, buffers);
    let (mut fs, mut port) = pooled.mount();
    let mut model = FsModel::default();
    pooled.crash_points();
    let (mut done, mut images) = (0, 0);
    for number in 0..operations {
        let op = dice.next_op(&model);
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let before = model.clone();
        let expected = model.run(&op);
        assert_eq!(run_op(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        let points = pooled.crash_points();
        let last = points.len() - 1;
        for (point, crash) in points.iter().enumerate() {
            for image in crash.images(IMAGES_MAX, IMAGES_MAX, seed + point as u64) {
                images += 1;
                let left = PoolSpace::recover(image, buffers);
                let (fs, mut port) = left.mount();
                let at = format!("{at}, fence {point} of {last}");
                match point == last && !(buffers && op.non_atomic_file().is_some()) {
                    // Acknowledged changes are there, except unflushed bytes.
                    true => check_acknowledged((&fs, &mut port), &at, &model),
                    false => check_after_crash((&fs, &mut port), &at, &op, &before, &model),
                }
                check_pages(left.mapped_pages(), &fs);
            }
        }
        if dice.one_in(10) {
            drop((fs, port));
            (fs, port) = pooled.mount();
            pooled.crash_points();
        }
        if buffers {
            pooled.flush();
            pooled.crash_points();
        }
    }
    (done, images)
}

fn check_acknowledged((fs, port): (&Fs, &mut IoChannel), at: &str, model: &FsModel) {
    if let Err(what) = check(model, fs, port) {
        panic!("{at}: an acknowledged change is missing: {what}");
    }
}

#[test]
fn power_failure_at_each_fence_of_file_operations() {
    run_pool_seeds(false);
}

/// The same if any 512 bytes since the last flush may be lost.
#[test]
fn disk_power_failure_during_file_operations() {
    run_pool_seeds(true);
}

fn run_pool_seeds(buffers: bool) {
    let lives = (2000..2006).map(|seed| run_ops_in_pool(seed, 30, buffers));
    let (done, images) = lives.fold((0, 0), |all, life| (all.0 + life.0, all.1 + life.1));
    println!("{images} images mounted, {done} operations succeeded");
    assert!(done > 6 * 17, "only {done} operations succeeded");
}
