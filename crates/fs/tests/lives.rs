//! Random operations against a model, with a crash tried after every change of the
//! space: what is mounted then is the model before or after the operation at hand,
//! but for a write, of which pages may be there and others not yet.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use pagemesh_fs::{Allocate, Fs, Ino, Kind, Port, Rename, SetXattr};
use pagemesh_fuzz::Random;
use support::memory::Memory;
use support::model::{Body, Model, Op, run};
use support::pool::Pooled;
use support::{made, mounted};

const SIZE: u64 = 1 << 36;
/// Bytes of a chunk.
const CHUNK: u64 = 2 << 20;
/// Names in one directory.
const NAMES: u64 = 60;

/// What a seed decides.
struct Dice(Random);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0.below(end as usize) as u64
    }

    fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// Mostly the path of something that is there, of the wanted kind.
    fn path(&mut self, model: &Model, wanted: impl Fn(&Body) -> bool) -> Vec<u8> {
        let found: Vec<Vec<u8>> = model.paths(&wanted);
        match found.is_empty() || self.one_in(10) {
            true => self.new_path(model),
            false => found[self.below(found.len() as u64) as usize].clone(),
        }
    }

    /// A name, mostly a new one, in a directory, mostly one that is there.
    fn new_path(&mut self, model: &Model) -> Vec<u8> {
        let above = model.paths(&|body: &Body| matches!(body, Body::Directory(_)));
        let at = self.below(above.len() as u64 + 2) as usize;
        let mut path = above.get(at).cloned().unwrap_or_default();
        path.push(self.below(NAMES) as u8);
        path
    }

    fn offset(&mut self) -> u64 {
        // Edges of spans, of pages, and of the first chunk.
        match self.below(12) {
            0..6 => self.below(40_000),
            6..10 => self.below(20) * 4096,
            10 => 2_090_000 + self.below(20_000),
            _ => 4_190_000 + self.below(10_000),
        }
    }

    fn op(&mut self, model: &Model) -> Op {
        let file = |body: &Body| matches!(body, Body::File(_));
        let directory = |body: &Body| matches!(body, Body::Directory(_));
        let any = |_: &Body| true;
        let fill = 1 + self.below(255) as u8;
        match self.below(49) {
            0..9 => Op::Create(self.new_path(model)),
            9 | 44 => {
                let len = self.below(30_000) as usize;
                Op::CreateUnnamed(self.new_path(model), len, fill)
            }
            10..14 => Op::MakeDirectory(self.new_path(model)),
            14 => Op::Symlink(self.new_path(model), 1 + self.below(300) as usize),
            15 => Op::Link(self.path(model, file), self.new_path(model)),
            16..19 => Op::Unlink(self.path(model, |body| !directory(body))),
            19 => Op::RemoveDirectory(self.path(model, directory)),
            20..24 => {
                let how = [
                    Rename::Replace,
                    Rename::Replace,
                    Rename::NoReplace,
                    Rename::Exchange,
                ];
                let how = *self.0.choose(&how);
                let from = self.path(model, any);
                let to = match self.one_in(2) {
                    true => self.new_path(model),
                    false => self.path(model, any),
                };
                Op::Rename(from, to, how)
            }
            24..30 => {
                let len = 1 + self.below(30_000) as usize;
                Op::Write(self.path(model, file), self.offset(), len, fill)
            }
            30..33 => {
                let len = 1 + self.below(9_000) as usize;
                Op::Append(self.path(model, file), len, fill)
            }
            33..36 => Op::SetSize(self.path(model, file), self.offset()),
            36..39 => {
                let keep_size = self.one_in(2);
                let how = [
                    Allocate::Reserve { keep_size },
                    Allocate::Punch,
                    Allocate::Zero { keep_size },
                ];
                let how = *self.0.choose(&how);
                let len = 1 + self.below(30_000);
                Op::Allocate(self.path(model, file), how, self.offset(), len)
            }
            39 => Op::SetMode(self.path(model, any), self.below(0o10000) as u16),
            40 | 41 => {
                let how = [SetXattr::Always, SetXattr::Create, SetXattr::Replace];
                let how = *self.0.choose(&how);
                let (key, len) = (self.below(4) as u8, self.below(9_000) as usize);
                Op::SetXattr(self.path(model, any), key, len, how)
            }
            42 => Op::RemoveXattr(self.path(model, any), self.below(4) as u8),
            _ => {
                let (source, target, len) = match self.below(4) {
                    0 => (self.offset(), self.offset(), 1 + self.below(20_000)),
                    // What may be shared.
                    1 => (0, CHUNK * self.below(3), 1 + self.below(3 * CHUNK)),
                    2 => (CHUNK * self.below(3), CHUNK * self.below(3), 1 << 24),
                    _ => (0, 0, 1 << 24),
                };
                let from = self.path(model, file);
                Op::Copy(from, source, self.path(model, file), target, len)
            }
        }
    }
}

/// The file whose pages an operation changes one after the other.
fn gradual(op: &Op) -> Option<&[u8]> {
    match op {
        Op::Write(path, ..)
        | Op::Append(path, ..)
        | Op::Allocate(path, ..)
        | Op::Copy(_, _, path, ..) => Some(path),
        _ => None,
    }
}

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
    let is_before = before.check(fs, port);
    let is_after = after.check(fs, port);
    let is_amid = gradual(op).map(|path| {
        let amid = before.amid(after, path, fs, port)?;
        amid.check(fs, port)
    });
    assert!(
        matches!(is_amid, Some(Ok(()))) || is_before.is_ok() || is_after.is_ok(),
        "{at}: not before: {is_before:?}; not after: {is_after:?}; nor between: {is_amid:?}",
    );
}

/// What lay beyond the end of a file is not there when the file grows.
fn nothing_comes_back(fs: &Fs, port: &mut Port) {
    const MORE: u64 = 40_000;
    let inodes = fs.usage().inodes;
    for ino in (1..=inodes + NAMES).map(Ino) {
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
    let mut dice = Dice(Random::new(seed));
    let memory = Memory::new(SIZE);
    let (mut fs, mut port) = made(&memory);
    let mut model = Model::new();
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
            && let Err(what) = model.check(&fs, &mut port)
        {
            panic!("after {at}: {what}");
        }
        if seed.is_multiple_of(2) {
            model.check_counts(&fs, &mut port);
        }
        if let Some(before) = before {
            crash_everywhere(&memory, steps, &op, &before, &model);
        }
        check_pages(memory.mapped_pages() as u64, &fs);
        if dice.one_in(10) {
            drop((fs, port));
            (fs, port) = mounted(&memory);
            if let Err(what) = model.check(&fs, &mut port) {
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
    let mut dice = Dice(Random::new(seed));
    let pooled = Pooled::new(POOL_BYTES, SIZE, buffers);
    let (mut fs, mut port) = pooled.mounted();
    let mut model = Model::new();
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
                match point == last && !(buffers && gradual(&op).is_some()) {
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
    if let Err(what) = model.check(fs, port) {
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
