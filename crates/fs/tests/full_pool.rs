//! A full pool: operations that free room use the reserve.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, CreateKind, Fs, Ino, IoChannel, Time};
use rustix::io::Errno;
use support::memory::MemorySpace;
use support::pool::PoolSpace;
use support::{OWNER, mount_and_free, mount_with_leftovers, new_fs, new_fs_with_limit};

const SIZE: u64 = 1 << 36;
const POOL_BYTES: usize = 24 << 20;
const PAGE: u64 = 4096;
/// Pages of the largest reserve.
const RESERVE: u64 = 256;

fn create(fs: &Fs, name: &[u8]) -> Ino {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    made.unwrap().ino
}

/// Files of 4 KiB to 4 MiB in a pool, named by their numbers.
fn pool_with_files(pooled: &PoolSpace) -> (Fs, IoChannel, Vec<Ino>) {
    let (fs, mut port) = pooled.mount();
    let files = (0..6u32).map(|number| {
        let ino = create(&fs, number.to_string().as_bytes());
        let data = Bytes::from(vec![7; 4096 << (2 * number)]);
        for (at, part) in (0..).zip(data.chunks(1 << 20)) {
            let part = Bytes::copy_from_slice(part);
            fs.write(&mut port, ino, Some(at << 20), &part, false)
                .unwrap();
        }
        ino
    });
    let files = files.collect();
    (fs, port, files)
}

fn pages_in_use(fs: &Fs) -> u64 {
    fs.usage().used_bytes / PAGE
}

fn check_full(fs: &Fs, port: &mut IoChannel, ino: Ino) {
    let data = Bytes::from(vec![8; 16 * PAGE as usize]);
    let full = fs.write(port, ino, None, &data, false);
    assert_eq!(full.unwrap_err().errno(), Errno::NOSPC);
}

/// Fills the pool from another volume, then frees room in it: `act` frees at least `pages` pages.
fn check(pages: u64, act: impl Fn(&Fs, &mut IoChannel, &[Ino])) {
    for buffers in [false, true] {
        let pooled = PoolSpace::new(POOL_BYTES, SIZE, buffers);
        let (fs, mut port, files) = pool_with_files(&pooled);
        pooled.fill();
        check_full(&fs, &mut port, files[0]);
        let (before, mapped) = (pages_in_use(&fs), pooled.mapped_pages());
        act(&fs, &mut port, &files);
        let freed = before - pages_in_use(&fs);
        assert!(freed >= pages + RESERVE, "{freed} pages of {pages}");
        assert!(mapped - pooled.mapped_pages() >= pages);
        // The reserve is refilled as soon as there is room.
        while fs.free_deferred_piece() {}
        assert_eq!(before - pages_in_use(&fs), freed - RESERVE);
        drop((fs, port));
        let (fs, mut port) = pooled.mount();
        assert_eq!(before - pages_in_use(&fs), freed - RESERVE);
        let data = Bytes::from(vec![8; (pages - pages / 8) as usize * PAGE as usize]);
        let ino = create(&fs, b"new");
        let written = fs.write(&mut port, ino, Some(0), &data.slice(..PAGE as usize), false);
        assert_eq!(written.unwrap(), 0..PAGE, "there is room");
    }
}

#[test]
fn file_is_deleted_in_a_full_pool() {
    check(1024, |fs, _, files| {
        fs.unlink(Ino::ROOT, b"5").unwrap();
        fs.forget(files[5], 1);
        assert!(fs.attr(files[5]).is_err());
        assert_eq!(fs.deferred_inodes(), 0);
    });
}

#[test]
fn file_is_truncated_in_a_full_pool() {
    check(1000, |fs, port, files| {
        let attr = fs.set_size(port, files[5], 12_345).unwrap();
        assert_eq!((attr.size, attr.pages), (12_345, 4));
    });
}

#[test]
fn hole_is_punched_in_a_full_pool() {
    check(700, |fs, port, files| {
        let punched = fs.allocate(port, files[5], AllocateMode::Punch, 100, 3 << 20);
        punched.unwrap();
    });
}

/// Small orphans, deleted before the pool was full: freeing them is one transaction, and no earlier
/// one frees room.
#[test]
fn orphans_are_freed_in_a_full_pool() {
    for is_killed in [false, true] {
        let pooled = PoolSpace::new(POOL_BYTES, SIZE, false);
        let (fs, mut port, files) = pool_with_files(&pooled);
        fs.unlink(Ino::ROOT, b"1").unwrap();
        pooled.fill();
        check_full(&fs, &mut port, files[0]);
        drop(port);
        let fs = if is_killed {
            pooled.mount().0
        } else {
            fs.forget(files[1], 1);
            fs
        };
        assert!(fs.attr(files[1]).is_err());
        assert_eq!((fs.deferred_inodes(), fs.usage().inodes), (0, 2 + 5));
    }
}

#[test]
fn reserve_size_follows_the_limit_and_counts_as_used() {
    for (limit, pages) in [
        (1 << 20, 0),
        (4 << 20, 16),
        (12 << 20, 32),
        (64 << 20, 256),
        (1 << 40, 256),
        (0, 256),
    ] {
        let memory = MemorySpace::new(SIZE);
        drop(new_fs_with_limit(&memory, limit));
        let before = memory.mapped_pages();
        let (fs, _) = mount_and_free(&memory);
        assert_eq!(memory.mapped_pages(), before, "it is there already");
        let used_pages = pages_in_use(&fs);
        // The rest of the table's span is in use, and was never written.
        assert_eq!(
            used_pages,
            memory.mapped_pages() as u64 + 7,
            "limit {limit}"
        );
        let plain = MemorySpace::new(SIZE);
        let options = pagemesh_fs::MkfsOptions {
            uuid: uuid::Uuid::from_u128(1),
            hash_key: [2, 3],
            limit_bytes: limit,
            owner: OWNER,
            mode: 0o755,
        };
        pagemesh_fs::mkfs(
            &plain.shared(),
            support::memory::wait,
            support::clock,
            options,
        )
        .unwrap();
        let (fs, _) = mount_with_leftovers(&plain);
        assert_eq!(pages_in_use(&fs) + pages, used_pages, "limit {limit}");
    }
}

#[test]
fn reserve_grows_with_the_limit() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs_with_limit(&memory, 4 << 20);
    let before = pages_in_use(&fs);
    fs.raise_limit(64 << 20).unwrap();
    while fs.free_deferred_piece() {}
    assert_eq!(pages_in_use(&fs), before + 240);
    // The span of the smaller reserve is allocated again.
    let ino = create(&fs, b"file");
    let data = Bytes::from(vec![7; 1 << 20]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    let (again, _) = mount_and_free(&memory);
    assert_eq!(pages_in_use(&again), pages_in_use(&fs));
    assert_eq!(again.damage(), None);
}

/// The reserve may be filled in part only, and a crash may come at any time.
#[test]
fn partial_reserve_counts_as_used() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    drop(fs);
    let mut seen = 0;
    for steps in (3..=memory.steps()).step_by(50) {
        let old = memory.after_steps(steps);
        let mapped = old.mapped_pages();
        old.set_room(Some(mapped + 10));
        let (fs, mut port) = mount_with_leftovers(&old);
        assert!(
            pages_in_use(&fs) <= mapped as u64 + 7,
            "after change {steps}"
        );
        for _ in 0..2 {
            assert!(!fs.free_deferred_piece(), "it ends");
            assert!(pages_in_use(&fs) <= old.mapped_pages() as u64 + 7);
            assert!(pages_in_use(&fs) >= old.mapped_pages() as u64);
        }
        seen += usize::from(old.mapped_pages() > mapped);
        // Other threads count their pages as before.
        old.set_room(None);
        let ino = create(&fs, b"file");
        let data = Bytes::from(vec![7; 1 << 20]);
        fs.write(&mut port, ino, Some(0), &data, false).unwrap();
        while fs.free_deferred_piece() {}
        let (again, _) = mount_and_free(&old);
        assert_eq!(
            pages_in_use(&again),
            pages_in_use(&fs),
            "after change {steps}"
        );
    }
    assert!(seen > 2, "{seen} were filled");
}

#[test]
fn reserve_is_not_taken_from_a_full_limit() {
    let memory = MemorySpace::new(SIZE);
    let options = pagemesh_fs::MkfsOptions {
        uuid: uuid::Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 4 << 20,
        owner: OWNER,
        mode: 0o755,
    };
    pagemesh_fs::mkfs(
        &memory.shared(),
        support::memory::wait,
        support::clock,
        options,
    )
    .unwrap();
    let (fs, mut port) = mount_with_leftovers(&memory);
    let ino = create(&fs, b"file");
    let all = Bytes::from(vec![7; 4 << 20]);
    fs.write(&mut port, ino, Some(0), &all, false).unwrap();
    let full = pages_in_use(&fs);
    while fs.free_deferred_piece() {}
    assert_eq!(pages_in_use(&fs), full);
    fs.set_size(&mut port, ino, 1 << 20).unwrap();
    let cut = pages_in_use(&fs);
    while fs.free_deferred_piece() {}
    assert_eq!(pages_in_use(&fs), cut + 16);
}

#[test]
fn allocation_beyond_the_limit_changes_nothing() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs_with_limit(&memory, 4 << 20);
    let [ino, other] = [b"file", b"copy"].map(|name| create(&fs, name));
    let data = Bytes::from(vec![7; 1 << 20]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    let copied = fs.copy(&mut port, (ino, 0), (other, 0), 1 << 20);
    assert_eq!(copied, Ok(1 << 20));
    let room = fs.usage().limit_bytes - fs.usage().used_bytes;
    let steps = memory.steps();
    let mut ask = |ino, how, offset, len| {
        let asked = fs.allocate(&mut port, ino, how, offset, len);
        asked.map_err(|error| error.errno())
    };
    for keep_size in [false, true] {
        for how in [
            AllocateMode::Reserve { keep_size },
            AllocateMode::Zero { keep_size },
        ] {
            for (offset, len) in [
                (0, 1 << 43),
                (1 << 43, 1 << 40),
                (1 << 20, room + PAGE),
                // A part of it is mapped.
                (1 << 19, room + (1 << 19) + PAGE),
            ] {
                assert_eq!(
                    ask(ino, how, offset, len),
                    Err(Errno::NOSPC),
                    "{how:?} {offset}"
                );
                assert_eq!(memory.steps(), steps, "{how:?} {offset}");
            }
        }
    }
    // Shared pages give the file no room of its own; the other pages are the file's alone.
    let how = AllocateMode::Reserve { keep_size: true };
    assert_eq!(ask(other, how, 0, room + PAGE), Err(Errno::NOSPC));
    assert_eq!(memory.steps(), steps);
    fs.unlink(Ino::ROOT, b"copy").unwrap();
    fs.forget(other, 1);
    // Map pages take room, too.
    assert_eq!(ask(ino, how, 0, room + (1 << 20) - 4 * PAGE), Ok(()));
}

/// The mtime of a file: now, and after an unmount or a crash at this point.
fn mtimes(memory: &MemorySpace, fs: &Fs, ino: Ino) -> [Time; 2] {
    let after = mount_with_leftovers(&memory.snapshot()).0;
    [fs, &after].map(|fs| fs.attr(ino).unwrap().mtime)
}

/// The limit is reached, or the pools are full.
#[test]
fn failed_write_keeps_mtime_of_the_previous_write() {
    for (limit, room) in [(2 << 20, None), (0, Some(0))] {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port) = new_fs_with_limit(&memory, limit);
        let ino = create(&fs, b"file");
        let mut write = |offset, len| {
            let data = Bytes::from(vec![7; len]);
            fs.write(&mut port, ino, offset, &data, false)
        };
        while limit > 0 && write(None, 1 << 17).is_ok() {}
        write(Some(0), 4096).unwrap();
        let [before, _] = mtimes(&memory, &fs, ino);
        write(Some(0), 4096).unwrap();
        let [written, _] = mtimes(&memory, &fs, ino);
        assert!(written > before);
        memory.set_room(room);
        for _ in 0..2 {
            let full = write(None, 1 << 17).unwrap_err();
            assert_eq!(full.errno(), Errno::NOSPC);
            assert_eq!(fs.attr(ino).unwrap().mtime, written);
        }
        memory.set_room(None);
        fs.flush_all_times().unwrap();
        assert_eq!(mtimes(&memory, &fs, ino), [written; 2]);
    }
}

#[test]
fn unsaved_times_are_saved_when_space_is_free() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let data = Bytes::from(vec![7; 4096]);
    let files = [b"1", b"2", b"3"].map(|name| create(&fs, name));
    let mut write_all = || {
        for ino in files {
            fs.write(&mut port, ino, Some(0), &data, false).unwrap();
        }
    };
    write_all();
    write_all();
    let written = files.map(|ino| fs.attr(ino).unwrap().mtime);
    memory.set_room(Some(0));
    for _ in 0..2 {
        assert_eq!(fs.flush_all_times().unwrap_err().errno(), Errno::NOSPC);
    }
    // The data is synced all the same.
    fs.sync(&mut port, files[0]).unwrap();
    fs.sync_all(&mut port).unwrap();
    memory.set_room(None);
    fs.flush_all_times().unwrap();
    let found = files.map(|ino| mtimes(&memory, &fs, ino));
    assert_eq!(found, written.map(|written| [written; 2]));
}
