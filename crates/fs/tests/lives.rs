//! Random operations against a model, with a crash tried after every change of the
//! space: what is mounted then is the model before or after the operation at hand,
//! but for a write, of which pages may be there and others not yet.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use pagemesh_fs::{Allocate, Fs, Ino, Kind, Port};
use pagemesh_fs_model::{Dice, Model, Op, Reach, check_counts, read, run};
use support::memory::Memory;
use support::pool::Pooled;
use support::{made, mounted};

const SIZE: u64 = 1 << 36;
/// Inodes that may be free among those in use.
const NUMBERS: u64 = 60;
/// Mounts what a crash left after each change since `from`.
fn crash_everywhere(memory: &Memory, from: usize, op: &Op, before: &Model, after: &Model) {
    for steps in from..memory.steps() {
        let old = memory.after(steps);
        let (fs, mut port) = mounted(&old);
        let at = format!("after change {steps} of {op:?}");
        check_left((&fs, &mut port), &at, op, before, after);
        check_pages(old.mapped_pages() as u64, &fs);
        nothing_comes_back(&fs, &mut port);
    }
}

/// What a crash inside of an operation left is what was before, or is there after it, or
/// lies between where that may be.
fn check_left((fs, port): (&Fs, &mut Port), at: &str, op: &Op, before: &Model, after: &Model) {
    let found = read(fs, port);
    if let Err(what) = found.and_then(|found| before.left(op, after, &found)) {
        panic!("{at}: {what}");
    }
}

fn check(model: &Model, fs: &Fs, port: &mut Port) -> Result<(), String> {
    model.check(&read(fs, port)?)
}

/// What lay beyond the end of a file is not there when the file grows.
fn nothing_comes_back(fs: &Fs, port: &mut Port) {
    const MORE: u64 = 40_000;
    let inodes = fs.usage().inodes;
    for ino in (1..=inodes + NUMBERS).map(Ino) {
        let Ok(attr) = fs.attr(ino) else { continue };
        if attr.kind == Kind::File {
            fs.set_size(port, ino, attr.size + MORE).expect("room");
            let more = fs.read(port, ino, attr.size, MORE as u32).expect("sound");
            assert!(more.iter().all(|&byte| byte == 0), "old bytes in {attr:?}");
        }
    }
}

/// Every mapped page is counted, and nothing else but what nobody wrote yet.
fn check_pages(mapped: u64, fs: &Fs) {
    let used = fs.usage().used_bytes / 4096;
    let unwritten = used.checked_sub(mapped);
    // Pages of the inode table, and the room of attributes up to a power of two.
    assert!(
        unwritten.is_some_and(|pages| pages < 100),
        "{mapped} pages mapped, {used} in use"
    );
}

/// One file system's life; how many operations succeeded.
fn live(seed: u64, operations: usize, crashes: bool) -> usize {
    let mut dice = Dice::new(seed, Reach::Far);
    let memory = Memory::new(SIZE);
    let (mut fs, mut port) = made(&memory);
    let mut model = Model::default();
    let mut done = 0;
    for number in 0..operations {
        // Room beyond the end is counted, and not seen: in every other life only.
        let mut op = dice.op(&model);
        if let (
            0,
            Op::Allocate(_, Allocate::Reserve { keep_size } | Allocate::Zero { keep_size }, ..),
        ) = (seed % 2, &mut op)
        {
            *keep_size = false;
        }
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let before = crashes.then(|| model.clone());
        let steps = memory.steps();
        let expected = model.run(&op);
        assert_eq!(run(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        if (crashes || dice.one_in(4))
            && let Err(what) = check(&model, &fs, &mut port)
        {
            panic!("after {at}: {what}");
        }
        if seed.is_multiple_of(2) {
            check_counts(&model, &fs, &mut port);
        }
        if let Some(before) = before {
            crash_everywhere(&memory, steps, &op, &before, &model);
        }
        check_pages(memory.mapped_pages() as u64, &fs);
        if dice.one_in(10) {
            drop((fs, port));
            (fs, port) = mounted(&memory);
            if let Err(what) = check(&model, &fs, &mut port) {
                panic!("mounted after {at}: {what}");
            }
            check_pages(memory.mapped_pages() as u64, &fs);
        }
    }
    done
}

#[test]
fn operations_do_what_the_model_does() {
    let done: usize = (0..20).map(|seed| live(seed, 300, false)).sum();
    assert!(done > 20 * 200, "only {done} operations succeeded");
}

#[test]
fn a_crash_leaves_an_operation_whole_or_undone() {
    let done: usize = (1000..1020).map(|seed| live(seed, 60, true)).sum();
    assert!(done > 20 * 35, "only {done} operations succeeded");
}

/// A file system's life in a pool, whose machine loses its power at each fence; how many
/// operations succeeded, and how many images were mounted. In a pool that buffers,
/// operations begin when all before is durable.
fn live_in_pool(seed: u64, operations: usize, buffers: bool) -> (usize, usize) {
    const POOL_BYTES: usize = 96 << 20;
    /// Images of a point, at most.
    const IMAGES_MAX: u64 = 5;
    let mut dice = Dice::new(seed, Reach::Far);
    let pooled = Pooled::new(POOL_BYTES, SIZE, buffers);
    let (mut fs, mut port) = pooled.mounted();
    let mut model = Model::default();
    pooled.crash_points();
    let (mut done, mut images) = (0, 0);
    for number in 0..operations {
        let op = dice.op(&model);
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let before = model.clone();
        let expected = model.run(&op);
        assert_eq!(run(&fs, &mut port, &op), expected, "{at}");
        done += usize::from(expected.is_ok());
        let points = pooled.crash_points();
        let last = points.len() - 1;
        for (point, crash) in points.iter().enumerate() {
            for image in crash.images(IMAGES_MAX, IMAGES_MAX, seed + point as u64) {
                images += 1;
                let left = Pooled::recovered(image, buffers);
                let (fs, mut port) = left.mounted();
                let at = format!("{at}, fence {point} of {last}");
                match point == last && !(buffers && op.gradual().is_some()) {
                    // Acknowledged is there, but for bytes that were not flushed.
                    true => after_all((&fs, &mut port), &at, &model),
                    false => check_left((&fs, &mut port), &at, &op, &before, &model),
                }
                check_pages(left.mapped_pages(), &fs);
            }
        }
        if dice.one_in(10) {
            drop((fs, port));
            (fs, port) = pooled.mounted();
            pooled.crash_points();
        }
        if buffers {
            pooled.flush();
            pooled.crash_points();
        }
    }
    (done, images)
}

fn after_all((fs, port): (&Fs, &mut Port), at: &str, model: &Model) {
    if let Err(what) = check(model, fs, port) {
        panic!("{at}: what was acknowledged is not there: {what}");
    }
}

#[test]
fn the_power_fails_at_each_fence_of_an_operation_on_files() {
    lives_in_pools(false);
}

/// The same where any 512 bytes since the last flush may be lost.
#[test]
fn the_power_of_a_disk_fails_amid_an_operation_on_files() {
    lives_in_pools(true);
}

fn lives_in_pools(buffers: bool) {
    let lives = (2000..2006).map(|seed| live_in_pool(seed, 30, buffers));
    let (done, images) = lives.fold((0, 0), |all, life| (all.0 + life.0, all.1 + life.1));
    println!("{images} images mounted, {done} operations succeeded");
    assert!(done > 6 * 17, "only {done} operations succeeded");
}
