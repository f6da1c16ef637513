//! Pages that programs store into mappings of files: buffered until a sync, then written
//! atomically.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_fs::{
    ATOMIC_PAGES_MAX, AllocateMode, Fs, FsError, Ino, IoChannel, MMAP_DIRTY_PAGES_HARD_MAX,
    MMAP_DIRTY_PAGES_MAX, MMAP_DIRTY_SECONDS_MAX, SeekTarget, Time, Wait,
};
use pagemesh_fuzz::Random;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::mmap::{
    PAGE, SIZE, check_no_leaked_pages, create_open_file, durable_pages, file_with_mmap_dirty,
    limit_free_pages, lookup_and_read, read,
};
use support::{mount_and_free, mount_with_leftovers, new_fs};

/// A chunk, and a rest.
const FILE_BYTES_MAX: u64 = 600 * PAGE;

/// The file as readers see it, and as a crash leaves it.
#[derive(Clone, Default)]
struct MmapFileModel {
    visible: Vec<u8>,
    durable: Vec<u8>,
}

#[derive(Clone, Debug)]
enum MmapOp {
    /// Pages that the kernel writes back.
    MmapWrite(u64, u64, u8),
    Write(u64, usize, u8),
    SetSize(u64),
    Allocate(AllocateMode, u64, u64),
    Copy(u64, u64, u64),
    Sync,
}

impl MmapOp {
    fn random(random: &mut Random, model: &MmapFileModel, is_long: bool) -> MmapOp {
        let size = model.visible.len() as u64;
        let below = |random: &mut Random, end: u64| random.below(end.max(1) as usize) as u64;
        let fill = 1 + below(random, 255) as u8;
        let pages = size.div_ceil(PAGE);
        match below(random, 20) {
            0..9 if pages > 0 => {
                let first = below(random, pages);
                let most = if is_long { 200 } else { 12 };
                MmapOp::MmapWrite(first, 1 + below(random, most), fill)
            }
            0..12 => {
                let at = below(random, FILE_BYTES_MAX / 2);
                MmapOp::Write(at, 1 + below(random, 20_000) as usize, fill)
            }
            12 => MmapOp::SetSize(below(random, FILE_BYTES_MAX)),
            13 => {
                let how = match below(random, 3) {
                    0 => AllocateMode::Punch,
                    1 => AllocateMode::Zero { keep_size: true },
                    _ => AllocateMode::Reserve { keep_size: true },
                };
                let at = below(random, FILE_BYTES_MAX);
                MmapOp::Allocate(how, at, 1 + below(random, 40_000))
            }
            14 => MmapOp::Copy(
                below(random, size),
                below(random, FILE_BYTES_MAX / 2),
                40_000,
            ),
            _ => MmapOp::Sync,
        }
    }

    fn run(&self, fs: &Fs, port: &mut IoChannel, ino: Ino) -> Result<(), FsError> {
        match *self {
            MmapOp::MmapWrite(first, pages, with) => {
                // The kernel sends nothing beyond the end of the file.
                let size = fs.attr(ino)?.size;
                let end = ((first + pages) * PAGE).min(size);
                if first * PAGE < end {
                    let data = Bytes::from(vec![with; (end - first * PAGE) as usize]);
                    fs.buffer_mmap_write(port, ino, first * PAGE, &data)?;
                }
                Ok(())
            }
            MmapOp::Write(at, len, with) => {
                let data = Bytes::from(vec![with; len]);
                fs.write(port, ino, Some(at), &data, false).map(drop)
            }
            MmapOp::SetSize(size) => fs.set_size(port, ino, size).map(drop),
            MmapOp::Allocate(how, at, len) => fs.allocate(port, ino, how, at, len),
            MmapOp::Copy(from, to, len) => match fs.copy(port, (ino, from), (ino, to), len) {
                Err(FsError::Posix(Errno::INVAL)) => Ok(()),
                copied => copied.map(drop),
            },
            MmapOp::Sync => fs.sync(port, ino),
        }
    }
}

impl MmapFileModel {
    fn run(&mut self, op: &MmapOp) {
        match *op {
            MmapOp::MmapWrite(first, pages, with) => {
                let (first, end) = ((first * PAGE) as usize, ((first + pages) * PAGE) as usize);
                let size = self.visible.len();
                self.visible[first.min(size)..end.min(size)].fill(with);
            }
            MmapOp::Write(at, len, with) => self.apply_to_both(|bytes| {
                let end = at as usize + len;
                bytes.resize(bytes.len().max(end), 0);
                bytes[at as usize..end].fill(with);
            }),
            MmapOp::SetSize(size) => self.apply_to_both(|bytes| bytes.resize(size as usize, 0)),
            MmapOp::Allocate(AllocateMode::Reserve { .. }, ..) => {}
            MmapOp::Allocate(_, at, len) => self.apply_to_both(|bytes| {
                let (first, end) = (at as usize, (at + len) as usize);
                let size = bytes.len();
                bytes[first.min(size)..end.min(size)].fill(0);
            }),
            MmapOp::Copy(from, to, len) => {
                if from.abs_diff(to) < len {
                    return;
                }
                let size = self.visible.len();
                let part = self.visible
                    [(from as usize).min(size)..((from + len) as usize).min(size)]
                    .to_vec();
                self.apply_to_both(|bytes| {
                    let end = to as usize + part.len();
                    if !part.is_empty() {
                        bytes.resize(bytes.len().max(end), 0);
                        bytes[to as usize..end].copy_from_slice(&part);
                    }
                });
            }
            MmapOp::Sync => self.durable.clone_from(&self.visible),
        }
    }

    fn apply_to_both(&mut self, run: impl Fn(&mut Vec<u8>)) {
        run(&mut self.visible);
        run(&mut self.durable);
    }
}

/// After a crash during an atomic operation the file is old or new; after any other one, each byte
/// is.
fn check_after_crash(at: &str, op: &MmapOp, found: &[u8], before: &[u8], after: &[u8]) {
    if found == before || found == after {
        return;
    }
    assert!(
        !matches!(op, MmapOp::Sync | MmapOp::MmapWrite(..)),
        "torn {at}"
    );
    let sizes = [before.len(), after.len()];
    let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
    assert!((least..=most).contains(&&found.len()), "its length {at}");
    let byte = |bytes: &[u8], index: usize| bytes.get(index).copied().unwrap_or(0);
    for (index, &is) in found.iter().enumerate() {
        let (old, new) = (byte(before, index), byte(after, index));
        assert!(
            is == old || is == new,
            "byte {index} {at}: {is}, not {old} or {new}"
        );
    }
}

/// Runs operations on one file, with a crash after each change of the space.
fn run_ops(seed: u64, operations: usize, is_long: bool) -> u64 {
    let mut random = Random::new(seed);
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create_open_file(&fs, b"file");
    let mut model = MmapFileModel::default();
    let mut redone = 0;
    for number in 0..operations {
        let op = MmapOp::random(&mut random, &model, is_long);
        let at = format!("seed {seed}, operation {number}, {op:?}");
        let (before, steps) = (model.clone(), memory.steps());
        op.run(&fs, &mut port, ino)
            .unwrap_or_else(|error| panic!("{at}: {error}"));
        model.run(&op);
        assert!(read(&fs, &mut port, ino) == model.visible, "{at}");
        for step in steps..=memory.steps() {
            let old = memory.after_steps(step);
            let (fs, mut port) = mount_with_leftovers(&old);
            let (_, content) = lookup_and_read(&fs, &mut port, b"file");
            let at = format!("{at}, after change {}", step - steps);
            check_after_crash(&at, &op, &content, &before.durable, &model.durable);
            // Crashes once more while the mount finishes the interrupted operation.
            redone += u64::from(old.steps() > 0);
            if old.steps() > 0 && random.below(8) == 0 {
                for again in 0..old.steps() {
                    let last = old.after_steps(again);
                    let (fs, mut port) = mount_and_free(&last);
                    assert!(
                        lookup_and_read(&fs, &mut port, b"file").1 == content,
                        "{at}, again {again}"
                    );
                    check_no_leaked_pages(&last, &fs);
                }
            }
        }
    }
    redone
}

#[test]
fn mmap_writes_survive_a_crash_only_after_sync() {
    for seed in 0..12 {
        run_ops(seed, 60, false);
    }
}

#[test]
fn long_sync_is_atomic() {
    let redone: u64 = (100..106).map(|seed| run_ops(seed, 40, true)).sum();
    assert!(redone > 100, "{redone} mounts finished a long sync");
}

#[test]
fn last_close_flushes_mmap_dirty_pages() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _, ino) = file_with_mmap_dirty(&memory, 100, (0..100).step_by(7));
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 15));
    fs.open(ino).unwrap();
    fs.release(ino);
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 15));
    fs.release(ino);
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (15, 0));
}

/// A mount survives an outage, and so do pages stored before it.
#[test]
fn mmap_dirty_pages_survive_an_outage_at_last_close() {
    let memory = MemorySpace::new(SIZE);
    drop(file_with_mmap_dirty(&memory, 100, std::iter::empty()));
    for (pages, is_known) in [(200, false), (300, true)] {
        let space = LossySpace::new(&memory);
        let fs = Fs::mount(Arc::new(space.clone()), wait, support::clock).unwrap();
        let mut port = fs.open_channel().unwrap();
        let (ino, _) = lookup_and_read(&fs, &mut port, b"file");
        fs.open(ino).unwrap();
        fs.set_size(&mut port, ino, pages * PAGE).unwrap();
        let data = Bytes::from(vec![2; (pages * PAGE) as usize]);
        fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
        if !is_known {
            fs.forget(ino, 1);
        }
        // An existing channel.
        drop(fs.borrow_channel().unwrap());
        // Changes wait; lookups do not.
        space.refuse_requests(
            |request| matches!(request, Request::Extents { .. }),
            u64::MAX,
        );
        fs.release(ino);
        assert_eq!(fs.mmap_dirty_pages(), pages);
        // A program that opens the file meanwhile finds its pages.
        fs.open(ino).unwrap();
        assert!(read(&fs, &mut port, ino) == data);
        fs.release(ino);
        fs.flush_old_mmap_dirty().unwrap();
        assert_eq!(fs.mmap_dirty_pages(), pages);
        space.refuse_requests(|_| false, 0);
        fs.flush_old_mmap_dirty().unwrap();
        assert_eq!(fs.mmap_dirty_pages(), 0);
        let (left, mut port) = mount_and_free(&memory.snapshot());
        assert!(lookup_and_read(&left, &mut port, b"file").1 == data);
        // The file is not kept open for ever.
        if is_known {
            fs.forget(ino, 1);
            fs.unlink(Ino::ROOT, b"file").unwrap();
            while fs.free_deferred_piece() {}
            assert_eq!(fs.usage().inodes, 2);
        }
    }
}

#[test]
fn deleted_file_drops_its_mmap_dirty_pages() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 100, 0..100);
    fs.unlink(Ino::ROOT, b"file").unwrap();
    assert!(read(&fs, &mut port, ino).iter().all(|&byte| byte == 2));
    let steps = memory.steps();
    fs.release(ino);
    fs.forget(ino, 1);
    // The inodes are the table and the root.
    assert_eq!((fs.mmap_dirty_pages(), fs.usage().inodes), (0, 2));
    // No page of the file is written before the close.
    for step in steps..memory.steps() {
        let left = memory.after_steps(step);
        let is_held = |&page: &u64| left.page(page) == [2; PAGE as usize];
        assert!(!left.pages().iter().any(is_held));
    }
}

#[test]
fn unmount_flushes_mmap_dirty_pages() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, _) = file_with_mmap_dirty(&memory, 300, 0..300);
    fs.sync_all(&mut port).unwrap();
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (300, 0));
}

static NOW: AtomicI64 = AtomicI64::new(1_000_000);

/// A clock that does not tick on its own.
fn clock() -> Time {
    Time {
        sec: NOW.load(Ordering::SeqCst),
        nsec: 0,
    }
}

#[test]
fn old_mmap_dirty_pages_are_flushed() {
    let memory = MemorySpace::new(SIZE);
    drop(file_with_mmap_dirty(&memory, 10, std::iter::empty()));
    let fs = Fs::mount(memory.shared(), wait as Wait, clock).unwrap();
    let mut port = fs.open_channel().unwrap();
    let (ino, _) = lookup_and_read(&fs, &mut port, b"file");
    fs.open(ino).unwrap();
    let data = Bytes::from(vec![2; PAGE as usize]);
    fs.buffer_mmap_write(&mut port, ino, PAGE, &data).unwrap();
    NOW.fetch_add(MMAP_DIRTY_SECONDS_MAX - 1, Ordering::SeqCst);
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    fs.flush_old_mmap_dirty().unwrap();
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 2));
    NOW.fetch_add(1, Ordering::SeqCst);
    fs.flush_old_mmap_dirty().unwrap();
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (2, 0));
    // Pages that were truncated do not count for the age.
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    fs.set_size(&mut port, ino, 0).unwrap();
    fs.set_size(&mut port, ino, PAGE).unwrap();
    NOW.fetch_add(MMAP_DIRTY_SECONDS_MAX, Ordering::SeqCst);
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    fs.flush_old_mmap_dirty().unwrap();
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 1));
}

#[test]
fn file_with_most_mmap_dirty_pages_is_flushed_first() {
    let memory = MemorySpace::new(SIZE).with_size(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let files = [
        create_open_file(&fs, b"file"),
        create_open_file(&fs, b"other"),
    ];
    let all = 2 * MMAP_DIRTY_PAGES_MAX;
    for ino in files {
        fs.set_size(&mut port, ino, all * PAGE).unwrap();
    }
    let data = Bytes::from(vec![2; 256 * PAGE as usize]);
    let mut hold = |ino, at: u64| {
        fs.buffer_mmap_write(&mut port, ino, at * PAGE, &data)
            .unwrap();
        fs.mmap_dirty_pages()
    };
    assert_eq!(hold(files[1], 0), 256);
    for at in (0..MMAP_DIRTY_PAGES_MAX - 1024).step_by(256) {
        hold(files[0], at);
    }
    assert_eq!(fs.mmap_dirty_pages(), MMAP_DIRTY_PAGES_MAX - 768);
    for at in (MMAP_DIRTY_PAGES_MAX - 1024..MMAP_DIRTY_PAGES_MAX - 512).step_by(256) {
        hold(files[0], at);
    }
    // The file with the most buffered pages is flushed, and the other keeps its pages.
    assert_eq!(hold(files[0], MMAP_DIRTY_PAGES_MAX), 512);
    let (fs, mut port) = mount_and_free(&memory.snapshot());
    let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
    let mut first = |page: u64| fs.read(&mut port, ino, page * PAGE, 1).unwrap()[0];
    let found = (
        first(0),
        first(MMAP_DIRTY_PAGES_MAX - 513),
        first(MMAP_DIRTY_PAGES_MAX),
    );
    assert_eq!(found, (2, 2, 0));
}

/// Pages without room stay buffered up to a bound, and do not block files that have room.
#[test]
fn unflushable_mmap_pages_are_bounded_per_file_system() {
    let memory = MemorySpace::new(SIZE).with_size(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let (sparse, dense) = (
        create_open_file(&fs, b"sparse"),
        create_open_file(&fs, b"dense"),
    );
    let data = Bytes::from(vec![2; 256 * PAGE as usize]);
    fs.set_size(&mut port, sparse, 2 * MMAP_DIRTY_PAGES_HARD_MAX * PAGE)
        .unwrap();
    fs.write(&mut port, dense, Some(0), &data, false).unwrap();
    let mut hold = |ino, at: u64| fs.buffer_mmap_write(&mut port, ino, at * PAGE, &data);
    for at in (0..MMAP_DIRTY_PAGES_MAX - 512).step_by(256) {
        hold(sparse, at).unwrap();
    }
    limit_free_pages(&memory, 0);
    let mut refused = None;
    for at in (MMAP_DIRTY_PAGES_MAX - 512..).step_by(256) {
        hold(dense, 0).unwrap();
        refused = hold(sparse, at).err();
        if refused.is_some() || fs.mmap_dirty_pages() > MMAP_DIRTY_PAGES_HARD_MAX {
            break;
        }
    }
    assert_eq!(refused.map(|error| error.errno()), Some(Errno::NOSPC));
    assert!(fs.mmap_dirty_pages() > MMAP_DIRTY_PAGES_HARD_MAX - 1024);
    for _ in 0..4 {
        hold(dense, 0).unwrap();
    }
    assert!(fs.mmap_dirty_pages() <= MMAP_DIRTY_PAGES_HARD_MAX + 256);
    memory.set_room(None);
    fs.sync(&mut port, dense).unwrap();
    fs.set_size(&mut port, sparse, 256 * PAGE).unwrap();
    fs.release(sparse);
    assert!(read(&fs, &mut port, sparse).iter().all(|&byte| byte == 2));
    assert_eq!(fs.damage(), None);
}

/// The kernel considers a page clean once it was sent, even after an error, and does not send it
/// again.
#[test]
fn sync_reports_lost_mmap_writes_until_close() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 10, 0..1);
    let data = Bytes::from(vec![2; PAGE as usize]);
    // Less than a page: the rest of the page must be read.
    let is_of_file = |&page: &u64| memory.page(page) == [1; PAGE as usize];
    let places = memory.pages().into_iter().filter(is_of_file);
    places.for_each(|place| memory.make_unreadable(place));
    let refused = fs.buffer_mmap_write(&mut port, ino, 100, &data.slice(..100));
    assert!(refused.is_err());
    for _ in 0..2 {
        let synced = fs.sync(&mut port, ino);
        assert_eq!(synced.map_err(|error| error.errno()), Err(Errno::IO));
        assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 1));
    }
    fs.release(ino);
    assert_eq!(durable_pages(&memory), 1);
    fs.open(ino).unwrap();
    fs.buffer_mmap_write(&mut port, ino, PAGE, &data).unwrap();
    fs.sync(&mut port, ino).unwrap();
    assert_eq!(durable_pages(&memory), 2);
}

#[test]
fn sparse_pages_are_written_atomically() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create_open_file(&fs, b"file");
    // Each page has its entry in a map page of its own.
    let apart = 2048 * 512 * PAGE;
    let pages = ATOMIC_PAGES_MAX / 2;
    fs.set_size(&mut port, ino, pages * apart).unwrap();
    let part = |at| (at * apart + 5, Bytes::from(vec![3; PAGE as usize]));
    let parts: Vec<_> = (0..pages - 1).map(part).collect();
    fs.write_atomic(&mut port, ino, &parts, || true).unwrap();
    for at in 0..pages {
        let data = Bytes::from(vec![4; PAGE as usize]);
        fs.buffer_mmap_write(&mut port, ino, at * apart + PAGE, &data)
            .unwrap();
    }
    fs.sync(&mut port, ino).unwrap();
    let (fs, mut port) = mount_and_free(&memory.snapshot());
    let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
    for at in 0..pages - 1 {
        let bytes = fs
            .read(&mut port, ino, at * apart, 3 * PAGE as u32)
            .unwrap();
        assert_eq!((bytes[4], bytes[5], bytes[4095]), (0, 3, 3), "{at}");
        assert_eq!((bytes[4096], bytes[8191], bytes[8192]), (4, 4, 0), "{at}");
    }
}

/// File attributes count buffered pages, as they will be after the flush.
#[test]
fn mmap_dirty_pages_count_in_file_attributes() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let told = Arc::new(AtomicI64::new(0));
    let counted = Arc::clone(&told);
    fs.set_append_hook(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let ino = create_open_file(&fs, b"file");
    let data = Bytes::from(vec![1; 3 * PAGE as usize]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    fs.set_size(&mut port, ino, 5 * PAGE).unwrap();
    let pages = |fs: &Fs| {
        let attr = fs.attr(ino).unwrap();
        (
            attr.pages,
            attr.has_volatile_size,
            told.load(Ordering::SeqCst),
        )
    };
    assert_eq!(pages(&fs), (3, false, 0));
    for _ in 0..2 {
        fs.buffer_mmap_write(&mut port, ino, 3 * PAGE, &data.slice(..PAGE as usize))
            .unwrap();
        assert_eq!(pages(&fs), (4, true, 1));
    }
    // Pages beyond the end do not count.
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    assert_eq!(pages(&fs), (5, true, 1));
    fs.sync(&mut port, ino).unwrap();
    assert_eq!(pages(&fs), (4, false, 1));
}

/// The kernel does not write mapped pages back before a seek for data.
#[test]
fn mmapped_file_reports_no_holes() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create_open_file(&fs, b"file");
    fs.set_size(&mut port, ino, 10 * PAGE).unwrap();
    let mut seek = |what| fs.seek(&mut port, ino, PAGE, what);
    let hole = seek(SeekTarget::Data).map_err(|error| error.errno());
    assert_eq!(hole, Err(Errno::NXIO));
    fs.disable_direct_access(ino).unwrap();
    assert_eq!(seek(SeekTarget::Data), Ok(PAGE));
    assert_eq!(seek(SeekTarget::Hole), Ok(10 * PAGE));
}
