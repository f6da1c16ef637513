//! Syncs of mapped files that need a redo log: without room, interrupted, and with power failures.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::Ino;
use rustix::io::Errno;
use support::memory::MemorySpace;
use support::mmap::{
    FAR, PAGE, SIZE, check_no_leaked_pages, create_open_file, durable_pages, file_with_mmap_dirty,
    limit_free_pages, lookup_and_read, read,
};
use support::pool::PoolSpace;
use support::{mount_and_free, mount_with_leftovers, new_fs};

#[test]
fn sync_without_space_changes_nothing_and_is_retried() {
    for room in (0..420).step_by(10) {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 10, 0..10);
        fs.set_size(&mut port, ino, 400 * PAGE).unwrap();
        for page in 100..300 {
            let data = Bytes::from(vec![2; PAGE as usize]);
            fs.buffer_mmap_write(&mut port, ino, page * PAGE, &data)
                .unwrap();
        }
        let shown = read(&fs, &mut port, ino);
        limit_free_pages(&memory, room);
        let synced = fs.sync(&mut port, ino);
        if let Err(error) = synced {
            assert_eq!(error.errno(), Errno::NOSPC);
            assert_eq!(fs.mmap_dirty_pages(), 210);
            assert!(read(&fs, &mut port, ino) == shown, "room {room}");
            assert_eq!(durable_pages(&memory), 0, "room {room}");
            // A write in the meantime comes after the sync, or does not happen.
            let data = Bytes::from(vec![7; PAGE as usize]);
            let written = fs.write(&mut port, ino, Some(0), &data, false);
            let expected = if written.is_ok() { 7 } else { 2 };
            assert_eq!(read(&fs, &mut port, ino)[0], expected, "room {room}");
            memory.set_room(None);
            fs.sync(&mut port, ino).unwrap();
            assert_eq!(read(&fs, &mut port, ino)[0], expected, "room {room}");
        }
        memory.set_room(None);
        assert_eq!(fs.mmap_dirty_pages(), 0);
        while fs.free_deferred_piece() {}
        assert!(durable_pages(&memory) >= 209, "room {room}");
        let (fs, _) = mount_and_free(&memory.snapshot());
        check_no_leaked_pages(&memory, &fs);
    }
}

/// The file is closed without a sync: flushing in pieces is better than no flush.
#[test]
fn close_without_log_space_flushes_piecewise() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 100, 0..100);
    limit_free_pages(&memory, 20);
    let synced = fs.sync(&mut port, ino);
    assert_eq!(synced.map_err(|error| error.errno()), Err(Errno::NOSPC));
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (0, 100));
    fs.release(ino);
    assert_eq!((durable_pages(&memory), fs.mmap_dirty_pages()), (100, 0));
}

/// Deleting a file frees its own log, and not the file that has the log's number by now.
#[test]
fn redo_log_is_freed_with_its_file() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    // The new file gets the log's number, which is the first free one.
    let before = create_open_file(&fs, b"before");
    let (ino, other) = (
        create_open_file(&fs, b"file"),
        create_open_file(&fs, b"other"),
    );
    let data = Bytes::from(vec![1; 100 * PAGE as usize]);
    for ino in [ino, other] {
        fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    }
    fs.buffer_mmap_write(&mut port, ino, 0, &data).unwrap();
    fs.unlink(Ino::ROOT, b"before").unwrap();
    fs.release(before);
    fs.forget(before, 1);
    fs.unlink(Ino::ROOT, b"file").unwrap();
    let steps = memory.steps();
    fs.sync(&mut port, ino).unwrap();
    let mut seen = 0;
    for step in steps..memory.steps() {
        let left = memory.after_steps(step);
        let (fs, mut port) = mount_with_leftovers(&left);
        let other = fs.lookup(Ino::ROOT, b"other").unwrap().ino;
        fs.open(other).unwrap();
        // Frees some pages, and allocates the number again.
        for round in 0..4 {
            fs.free_deferred_piece();
            let data = Bytes::from(vec![3 + round; PAGE as usize]);
            for page in 0..100 {
                fs.buffer_mmap_write(&mut port, other, page * PAGE, &data)
                    .unwrap();
            }
            fs.sync(&mut port, other).unwrap();
            assert!(
                read(&fs, &mut port, other)
                    .iter()
                    .all(|&byte| byte == 3 + round)
            );
        }
        while fs.free_deferred_piece() {}
        assert_eq!(
            (fs.usage().inodes, fs.deferred_inodes()),
            (3, 0),
            "after {step}"
        );
        seen += 1;
    }
    assert!(seen > 10, "{seen}");
}

/// The image of a crash during a long sync, with the log named.
fn image_of_interrupted_sync() -> MemorySpace {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 100, 0..100);
    let steps = memory.steps();
    fs.sync(&mut port, ino).unwrap();
    let left = (steps..memory.steps()).map(|step| memory.after_steps(step));
    let mut named = left.filter(|left| durable_pages(left) == 100);
    named.next().expect("one that is finished by the mount")
}

#[test]
fn redo_log_without_space_at_mount_is_replayed_later() {
    let left = image_of_interrupted_sync();
    // No room even for the pages that freeing changes.
    left.set_room(Some(0));
    let (fs, mut port) = mount_with_leftovers(&left);
    let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
    let read_now = fs.read(&mut port, ino, 0, FAR);
    assert_eq!(read_now.map_err(|error| error.errno()), Err(Errno::NOSPC));
    while fs.free_deferred_piece() {}
    left.set_room(None);
    assert!(read(&fs, &mut port, ino).iter().all(|&byte| byte == 2));
    while fs.free_deferred_piece() {}
    check_no_leaked_pages(&left, &fs);
}

#[test]
fn invalid_redo_log_reference_is_refused() {
    // The inode field that names the log, and the log field that names the file.
    let left = image_of_interrupted_sync();
    let image = left.snapshot();
    let pages = image.pages();
    let log_head = |image: &MemorySpace| {
        let mut pages = pages
            .iter()
            .filter(|&&page| image.page(page)[..8] == *b"pmeshlog");
        *pages.next().expect("a log")
    };
    let check = |image: &MemorySpace, what: &str| {
        let (fs, mut port) = mount_with_leftovers(image);
        assert!(fs.damage().is_some(), "{what}");
        let file = fs.lookup(Ino::ROOT, b"file");
        let read = file.and_then(|file| fs.read(&mut port, file.ino, 0, FAR));
        assert_eq!(
            read.map_err(|error| error.errno()),
            Err(Errno::UCLEAN),
            "{what}"
        );
    };
    let head = log_head(&image);
    // Magic, inode, generation, count, first page number.
    for at in [0, 8, 16, 27, 36] {
        let image = left.snapshot();
        image.flip_bits(head, at, 0x40);
        check(&image, &format!("byte {at} of the log"));
    }
    let table = pages.iter().find(|&&page| {
        let bytes = image.page(page);
        // The flags of inode 2, and the number of its log.
        bytes[2 * 256 + 2] & 16 != 0 && bytes[2 * 256 + 200] == 3
    });
    let table = *table.expect("the inode of the file");
    for (at, with) in [(200, 2), (200, 3), (201, 1)] {
        let image = left.snapshot();
        image.flip_bits(table, 2 * 256 + at, with);
        check(&image, &format!("byte {at} of the inode, {with:#x}"));
    }
    // A log that names a log: the file, or itself.
    for names in [2, 3] {
        let image = left.snapshot();
        image.corrupt(table, |bytes| {
            bytes[3 * 256 + 2] |= 16;
            bytes[3 * 256 + 200] = names;
        });
        check(&image, &format!("a log that names {names}"));
    }
}

/// A log may hold pages for any offset of its file.
#[test]
fn redo_log_of_sparse_pages_is_applied() {
    let apart = 2048 * 512;
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 10, 0..0);
    fs.set_size(&mut port, ino, 60 * apart * PAGE).unwrap();
    for page in 0..60 {
        let data = Bytes::from(vec![2; PAGE as usize]);
        fs.buffer_mmap_write(&mut port, ino, page * PAGE, &data)
            .unwrap();
    }
    let steps = memory.steps();
    fs.sync(&mut port, ino).unwrap();
    let mut copied = 0;
    for step in steps..memory.steps() {
        let left = memory.after_steps(step);
        let is_head = |&page: &u64| left.page(page)[..8] == *b"pmeshlog";
        let Some(head) = left.pages().into_iter().find(is_head) else {
            continue;
        };
        left.corrupt(head, |bytes| {
            for index in 0..60 {
                let page = (index as u64 * apart).to_le_bytes();
                bytes[32 + 8 * index..][..8].copy_from_slice(&page);
            }
        });
        let (fs, mut port) = mount_with_leftovers(&left);
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        let last = fs.read(&mut port, ino, 59 * apart * PAGE, 1).unwrap();
        copied += u32::from(last == [2]);
    }
    assert!(copied > 0);
}

/// The power of the machine, or of a buffering disk, fails at each fence of a sync.
fn check_power_failures(buffers: bool, pages: u64) {
    const POOL_BYTES: usize = 96 << 20;
    let pooled = PoolSpace::new(POOL_BYTES, SIZE, buffers);
    let (fs, mut port) = pooled.mount();
    let ino = create_open_file(&fs, b"file");
    let data = Bytes::from(vec![1; (2 * pages * PAGE) as usize]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    fs.sync(&mut port, ino).unwrap();
    for page in 0..pages {
        let data = Bytes::from(vec![2; PAGE as usize]);
        fs.buffer_mmap_write(&mut port, ino, 2 * page * PAGE, &data)
            .unwrap();
    }
    pooled.crash_points();
    fs.sync(&mut port, ino).unwrap();
    let points = pooled.crash_points();
    let last = points.len() - 1;
    let mut seen = [0, 0];
    for (point, crash) in points.iter().enumerate() {
        for image in crash.images(3, 3, point as u64) {
            let left = PoolSpace::recover(image, buffers);
            let (fs, mut port) = left.mount();
            let (_, bytes) = lookup_and_read(&fs, &mut port, b"file");
            let new = bytes.chunks(PAGE as usize).filter(|page| page[0] == 2);
            let new = new.count() as u64;
            assert!(
                new == 0 || new == pages,
                "{new} of {pages}, fence {point} of {last}"
            );
            assert!(point < last || new == pages, "synced pages are missing");
            seen[usize::from(new > 0)] += 1;
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn power_failure_at_each_fence_of_a_sync() {
    check_power_failures(false, 20);
    check_power_failures(false, 60);
}

#[test]
fn disk_power_failure_during_a_sync() {
    check_power_failures(true, 20);
    check_power_failures(true, 60);
}
