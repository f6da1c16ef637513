//! File systems with pages that were corrupted, by damage or on purpose: mounted, walked, read,
//! written and emptied. No call panics, hangs or uses unbounded memory, and a change of one file
//! does not appear in another.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_fs::{
    AllocateMode, AttrChanges, CreateKind, Fs, FsError, Ino, InodeKind, IoChannel, RenameMode,
    SeekTarget, SetXattrMode, Usage,
};
use pagemesh_fuzz::{FuzzTarget, Random, measure_allocation};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use support::memory::{MemorySpace, Page, wait};
use support::{OWNER, clock, mount_and_free, new_fs};

const PAGE: u64 = 4096;
/// The sizes of the volume: a small one, and one in which most numbers are valid pages.
const SIZES: [u64; 2] = [128 << 20, 1 << 44];
/// Bytes that encode one corruption of an image.
const CHANGE: usize = 12;
const CHANGES_MAX: usize = 8;
const INODE: usize = 256;
/// Inodes of the image, and some more.
const INODES: u64 = 160;
/// Far more entries than all directories of an image have together.
const LISTED_MAX: usize = 20_000;
/// Most memory that a mount and all calls of a case may allocate: the cache and replies. The image
/// itself takes 4 MiB.
const MEMORY_MAX: u64 = 64 << 20;

/// A file system with all kinds of page content.
fn image() -> MemorySpace {
    let memory = MemorySpace::new(SIZES[0]);
    let (fs, mut port) = new_fs(&memory);
    let create = |parent, name: &str, make: CreateKind<'_>| {
        let attr = fs
            .create(parent, name.as_bytes(), make, 0o755, OWNER)
            .unwrap();
        fs.forget(attr.ino, 1);
        attr.ino
    };
    let mut write = |ino, offset, len: usize| {
        let bytes: Vec<u8> = (0..len).map(|at| (at / 100) as u8).collect();
        let bytes = Bytes::from(bytes);
        fs.write(&mut port, ino, Some(offset), &bytes, false)
            .unwrap();
    };
    let above = create(Ino::ROOT, "above", CreateKind::Directory);
    let below = create(above, "below", CreateKind::Directory);
    create(below, "deep", CreateKind::Directory);
    let small = create(Ino::ROOT, "small", CreateKind::File);
    write(small, 0, 10_000);
    fs.link(small, below, b"second").unwrap();
    fs.forget(small, 1);
    let large = create(above, "large", CreateKind::File);
    write(large, 0, 200_000);
    // A map of two levels, with chunks in two pages of the lower level.
    write(large, 3 << 20, 10_000);
    write(large, 3 << 30, 10_000);
    let holes = create(below, "holes", CreateKind::File);
    write(holes, 500_000, 100);
    write(holes, 2_500_000, 100);
    create(Ino::ROOT, "link", CreateKind::Symlink(b"above/below"));
    create(Ino::ROOT, "long", CreateKind::Symlink(&[b'l'; 500]));
    create(above, "pipe", CreateKind::Special(InodeKind::Fifo, 0));
    for (ino, len) in [(small, 100), (above, 20_000)] {
        fs.set_xattr(ino, b"user.one", &vec![1; len], SetXattrMode::Always)
            .unwrap();
        fs.set_xattr(ino, b"user.two", b"2", SetXattrMode::Always)
            .unwrap();
    }
    // A root above leaves, and free pages.
    let many = create(Ino::ROOT, "many", CreateKind::Directory);
    let name = |number: u32| format!("{number:0200}");
    for number in 0..110 {
        create(many, &name(number), CreateKind::File);
    }
    for number in (0..110).filter(|number| number % 8 != 0) {
        fs.unlink(many, name(number).as_bytes()).unwrap();
    }
    // States that a crash leaves: without a name, and flagged.
    let unnamed = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
    write(unnamed, 0, 50_000);
    let cut = create(Ino::ROOT, "cut", CreateKind::File);
    write(cut, 0, 3 << 20);
    let before = memory.steps();
    let mut port = fs.open_channel().unwrap();
    fs.set_size(&mut port, cut, 100_000).unwrap();
    memory.after_steps(before + 2)
}

fn le_number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// Applies one corruption to an image. Bytes of `how`: page 1, kind 1, offset 2, value 8.
fn corrupt(memory: &MemorySpace, pages: &[u64], how: &[u8]) {
    let page = pages[usize::from(how[0]) % pages.len()];
    let at = le_number(&how[2..4]) as usize % PAGE as usize;
    let with = &how[4..12];
    let mapped = pages[le_number(with) as usize % pages.len()];
    let put = |at: usize, bytes: &[u8]| {
        memory.corrupt(page, |to| {
            let len = bytes.len().min(to.len() - at);
            to[at..at + len].copy_from_slice(&bytes[..len]);
        });
    };
    let other: Page = memory.page(mapped);
    match how[1] % 16 {
        0..4 => put(at, &with[..1 << (how[1] % 4)]),
        // An aligned number.
        4 | 5 => put(at & !7, with),
        // An aligned number of a mapped page.
        6 | 7 => put(at & !7, &mapped.to_le_bytes()),
        8 => memory.flip_bits(page, at, with[0]),
        // Of an inode: a random field, a field that names a mapped page, a copy of another inode.
        9 => put(
            at / INODE * INODE + usize::from(with[7]) % 22 * 8,
            &with[..7],
        ),
        10 => put(at / INODE * INODE + 112 + at % 8 * 8, &mapped.to_le_bytes()),
        11 => put(at / INODE * INODE, &other[at / INODE * INODE..][..INODE]),
        // The head of a directory page, and the start of its first entry.
        12 => put(at % 24, &with[..4]),
        13 => put(0, &other),
        14 => put(at, &other[at..][..16.min(other.len() - at)]),
        _ => memory.make_unreadable(page),
    }
}

/// The outcome of a call, without numbers in texts.
#[derive(Hash, PartialEq, Eq, PartialOrd, Ord)]
enum OutcomeClass {
    Ok,
    Posix(i32),
    Damaged(String),
    Other,
}

fn outcome_class<T>(result: Result<T, FsError>) -> OutcomeClass {
    let plain = |text: String| text.chars().filter(|c| !c.is_ascii_digit()).collect();
    match result {
        Ok(_) => OutcomeClass::Ok,
        Err(FsError::Posix(errno)) => OutcomeClass::Posix(errno.raw_os_error()),
        Err(FsError::Damaged { cause, .. }) => OutcomeClass::Damaged(plain(cause.0)),
        Err(_) => OutcomeClass::Other,
    }
}

/// The visible state of a file.
#[derive(Debug, PartialEq, Eq)]
struct FileSnapshot {
    size: u64,
    parts: Vec<Result<Vec<u8>, FsError>>,
    xattr: Result<Vec<u8>, FsError>,
}

struct FuzzCase {
    memory: MemorySpace,
    fs: Fs,
    channel: IoChannel,
    outcomes: BTreeSet<OutcomeClass>,
    /// Changes of the space when damage was first reported.
    stopped_at: Option<usize>,
}

impl FuzzCase {
    fn record<T>(&mut self, result: Result<T, FsError>) -> Option<T> {
        if let (None, Some(_)) = (self.stopped_at, self.fs.damage()) {
            self.stopped_at = Some(self.memory.steps());
        }
        let (value, told) = match result {
            Ok(value) => (Some(value), OutcomeClass::Ok),
            Err(error) => {
                // Damage must be reported for ever after.
                let is_damage = matches!(error, FsError::Damaged { .. });
                assert!(
                    !is_damage || self.fs.damage().is_some(),
                    "{error} was not noted"
                );
                (None, outcome_class::<()>(Err(error)))
            }
        };
        self.outcomes.insert(told);
        value
    }

    /// Every reachable directory, with its entries.
    fn walk(&mut self) -> BTreeMap<Ino, Vec<(Vec<u8>, Ino)>> {
        let mut found = BTreeMap::new();
        let mut left = vec![Ino::ROOT];
        let mut listed = 0;
        while let Some(directory) = left.pop() {
            let mut entries = Vec::new();
            let mut after = 0;
            loop {
                let before = after;
                let some = self.fs.list(directory, after, |entry| {
                    assert!(entry.cookie > after, "cookies rise");
                    after = entry.cookie;
                    entries.push((entry.name.clone(), entry.ino));
                    entries.len() % 11 > 0
                });
                if self.record(some).is_none() || after == before {
                    break;
                }
                listed += 1;
                assert!(listed < LISTED_MAX, "a listing does not end");
            }
            entries.retain(|(name, _)| name != b"." && name != b"..");
            for (name, _) in &entries {
                let looked = self.fs.lookup(directory, name);
                if let Some(attr) = self.record(looked) {
                    self.fs.forget(attr.ino, 1);
                    if attr.kind == InodeKind::Directory && !found.contains_key(&attr.ino) {
                        left.push(attr.ino);
                    }
                }
            }
            found.insert(directory, entries);
        }
        found
    }

    fn snapshot(&mut self, ino: Ino) -> Option<FileSnapshot> {
        let attr = self.fs.attr(ino);
        let attr = self.record(attr)?;
        for what in [SeekTarget::Data, SeekTarget::Hole] {
            let sought = self.fs.seek(&mut self.channel, ino, 5_000, what);
            self.record(sought);
        }
        let target = self.fs.read_link(ino);
        self.record(target);
        let at = [
            0,
            30_000,
            2_090_000,
            3 << 20,
            3 << 30,
            attr.size.saturating_sub(9_000),
        ];
        let parts = at.map(|at| self.fs.read(&mut self.channel, ino, at, 9_000));
        for part in &parts {
            self.record(part.clone());
        }
        let xattr = self.fs.xattr(ino, b"user.one");
        self.record(xattr.clone());
        let names = self.fs.xattr_names(ino);
        self.record(names);
        Some(FileSnapshot {
            size: attr.size,
            parts: parts.into(),
            xattr,
        })
    }

    fn write(&mut self, ino: Ino, offset: Option<u64>, len: usize) {
        let bytes = Bytes::from(vec![0xaa; len]);
        let written = self.fs.write(&mut self.channel, ino, offset, &bytes, false);
        self.record(written);
    }

    fn create(&mut self, parent: Ino, name: &[u8], make: CreateKind<'_>) -> Option<Ino> {
        let attr = self.fs.create(parent, name, make, 0o700, OWNER);
        let ino = self.record(attr)?.ino;
        self.fs.forget(ino, 1);
        Some(ino)
    }

    /// Creates files, and writes to them and to an existing one. Makes no other change.
    fn add(&mut self, tree: &BTreeMap<Ino, Vec<(Vec<u8>, Ino)>>) {
        let seen: BTreeMap<Ino, Option<FileSnapshot>> = (1..INODES)
            .map(|ino| (Ino(ino), self.snapshot(Ino(ino))))
            .collect();
        let mut touched = BTreeSet::new();
        for &directory in tree.keys() {
            touched.insert(directory);
            for number in 0..3 {
                let name = format!("{number} {}", "n".repeat(190));
                if let Some(ino) = self.create(directory, name.as_bytes(), CreateKind::File) {
                    touched.insert(ino);
                    self.write(ino, Some(3_000), 100_000);
                    self.write(ino, Some(5 << 20), 5_000);
                    self.write(ino, Some(4_000), 9_000);
                    let set = self
                        .fs
                        .set_xattr(ino, b"user.a", &[3; 9_000], SetXattrMode::Always);
                    self.record(set);
                }
            }
        }
        let files = |ino: &Ino| {
            self.fs
                .attr(*ino)
                .is_ok_and(|attr| attr.kind == InodeKind::File)
        };
        let old: Vec<Ino> = seen.keys().copied().filter(files).collect();
        if let Some(&ino) = old.iter().find(|ino| !touched.contains(ino)) {
            touched.insert(ino);
            self.write(ino, Some(2_000), 20_000);
            self.write(ino, None, 5_000);
            let mode = Some(0o4711);
            let set = self.fs.set_attr(
                ino,
                AttrChanges {
                    mode,
                    ..AttrChanges::default()
                },
            );
            self.record(set);
        }
        for (ino, before) in seen {
            let after = self.snapshot(ino);
            let is_known = self.fs.damage().is_some() || touched.contains(&ino);
            assert!(
                is_known || after == before,
                "{ino:?} changed: {before:?}, {after:?}"
            );
        }
    }

    /// Renames, truncates and removes everything that can be.
    fn remove(&mut self, tree: &BTreeMap<Ino, Vec<(Vec<u8>, Ino)>>) {
        for (number, ino) in (1..INODES).map(Ino).enumerate() {
            let how = [
                AllocateMode::Punch,
                AllocateMode::Reserve { keep_size: true },
                AllocateMode::Zero { keep_size: false },
            ];
            let how = how[number % 3];
            let done = self.fs.allocate(&mut self.channel, ino, how, 5_000, 60_000);
            self.record(done);
            let done = self.fs.allocate(
                &mut self.channel,
                ino,
                AllocateMode::Punch,
                1 << 20,
                1 << 40,
            );
            self.record(done);
            if self
                .fs
                .attr(ino)
                .is_ok_and(|attr| attr.kind == InodeKind::File)
            {
                let cut = self
                    .fs
                    .set_size(&mut self.channel, ino, 5_000 * (number as u64 % 2));
                self.record(cut);
            }
        }
        let all = tree.iter().flat_map(|(directory, entries)| {
            entries
                .iter()
                .map(|(name, _)| (*directory, name.as_slice()))
        });
        let all: Vec<(Ino, &[u8])> = all.collect();
        for (index, &from) in all.iter().enumerate().step_by(3) {
            let to = all[(index * 7 + 3) % all.len()];
            let how = [
                RenameMode::Replace,
                RenameMode::Exchange,
                RenameMode::NoReplace,
            ][index / 3 % 3];
            let moved = self.fs.rename(from, to, how);
            self.record(moved);
        }
        for _ in 0..4 {
            for &(directory, name) in all.iter().rev() {
                let gone = match self.fs.unlink(directory, name) {
                    Err(FsError::Posix(Errno::ISDIR)) => self.fs.rmdir(directory, name),
                    gone => gone,
                };
                self.record(gone);
            }
        }
        let times = self.fs.flush_all_times();
        self.record(times);
    }
}

fn run_case(memory: &MemorySpace) -> (BTreeSet<OutcomeClass>, Option<Usage>) {
    let fs = match Fs::mount(memory.shared(), wait, clock) {
        Ok(fs) => fs,
        Err(error) => {
            let is_told = matches!(error, FsError::Damaged { .. } | FsError::Space(_));
            assert!(is_told, "mounting: {error}");
            return (BTreeSet::from([outcome_class::<()>(Err(error))]), None);
        }
    };
    let port = fs.open_channel().unwrap();
    if fs.damage().is_some() {
        assert_eq!(memory.steps(), 0, "nothing is changed in what is damaged");
    }
    while fs.free_deferred_piece() {}
    let stopped_at = fs.damage().map(|_| memory.steps());
    let mut case = FuzzCase {
        memory: memory.clone(),
        fs,
        channel: port,
        outcomes: BTreeSet::new(),
        stopped_at,
    };
    let tree = case.walk();
    case.add(&tree);
    let tree = case.walk();
    case.remove(&tree);
    case.walk();
    if let Some(steps) = case.stopped_at {
        assert_eq!(memory.steps(), steps, "a change after damage was known");
    }
    let usage = case.fs.usage();
    (case.outcomes, Some(usage))
}

fn check(image: &MemorySpace, pages: &[u64], input: &[u8]) -> (bool, BTreeSet<OutcomeClass>) {
    let size = SIZES[usize::from(input.first().copied().unwrap_or(0)) % SIZES.len()];
    let memory = image.with_size(size);
    let changes = input.get(1..).unwrap_or(&[]).chunks_exact(CHANGE);
    for how in changes.take(CHANGES_MAX) {
        corrupt(&memory, pages, how);
    }
    let ((outcomes, usage), bytes) = measure_allocation(|| run_case(&memory));
    assert!(bytes < MEMORY_MAX, "{bytes} bytes in memory");
    // The corrupted image can be checked again after all operations.
    let again = Fs::mount(memory.shared(), wait, clock);
    (usage.is_some() && again.is_ok(), outcomes)
}

#[test]
fn fuzz_files() {
    let image = image();
    let pages: Vec<u64> = image.pages();
    let meta: Vec<usize> = (0..pages.len())
        .filter(|&index| is_meta(&image.page(pages[index])))
        .collect();
    let mut random = Random::new(1);
    let mut seeds = vec![vec![0], vec![1]];
    // Every kind of corruption of a name-space page.
    for how in 0..16u8 {
        for &page in meta.iter().filter(|&&page| page < 256) {
            let mut seed = vec![how % 2, page as u8, how];
            seed.extend((0..CHANGE - 2).map(|_| random.draw() as u8));
            seeds.push(seed);
        }
    }
    FuzzTarget::new("files", env!("CARGO_MANIFEST_DIR"))
        .seeds(seeds)
        .cases(1500)
        .bytes_max(1 + CHANGE * CHANGES_MAX)
        .run(|input| check(&image, &pages, input));
}

/// Pages of files hold the pattern that the image wrote to them.
fn is_meta(page: &Page) -> bool {
    page.windows(2).any(|two| two[1].wrapping_sub(two[0]) > 1)
}

#[test]
fn intact_image_passes_all_operations() {
    let image = image();
    for size in SIZES {
        let memory = image.with_size(size);
        let (fs, _) = mount_and_free(&memory);
        assert_eq!(fs.damage(), None);
        drop(fs);
        let memory = image.with_size(size);
        let (outcomes, usage) = run_case(&memory);
        let damage = outcomes
            .iter()
            .any(|told| matches!(told, OutcomeClass::Damaged(_) | OutcomeClass::Other));
        assert!(!damage, "a sound image is called damaged");
        // The root and entries that could not be moved away, of nearly a hundred.
        let inodes = usage.unwrap().inodes;
        assert!(inodes < 8, "{inodes} inodes are left");
        assert_eq!(mount_and_free(&memory).0.damage(), None);
    }
}
