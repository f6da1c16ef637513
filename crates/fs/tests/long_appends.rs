//! Long writes at the end of a file, and writes of NFS that need not be durable. A crash or a loss of power leaves the file as it was
//! before such a write, or with all of it.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{Attr, CreateKind, FileId, Fs, Ino, IoChannel};
use proptest::prelude::*;
use rustix::io::Errno;
use std::sync::Arc;
use support::memory::MemorySpace;
use support::pool::PoolSpace;
use support::server::owner;
use support::write_cache::WriteCacheSpace;
use support::{OWNER, mount_and_free, new_fs, new_fs_with_limit};

const SIZE: u64 = 1 << 36;
const POOL_BYTES: usize = 96 << 20;
const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Most images of one fence.
const IMAGES_MAX: u64 = 6;

fn create(fs: &Fs, name: &[u8]) -> Attr {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    made.unwrap()
}

fn pattern(from: usize, len: usize) -> Vec<u8> {
    let bytes = from..from + len;
    bytes.map(|at| (at / 5 % 251 + 1) as u8).collect()
}

fn append(fs: &Fs, port: &mut IoChannel, ino: Ino, at: usize, len: usize) {
    let data = Bytes::from(pattern(at, len));
    let written = fs.write(port, ino, Some(at as u64), &data, false);
    assert_eq!(written.unwrap(), at as u64..(at + len) as u64);
}

fn content(fs: &Fs, port: &mut IoChannel, ino: Ino) -> Vec<u8> {
    let size = fs.attr(ino).unwrap().size as usize;
    let mut all = Vec::new();
    while all.len() < size {
        let read = fs.read(port, ino, all.len() as u64, MIB as u32).unwrap();
        assert!(!read.is_empty(), "{} of {size} bytes", all.len());
        all.extend(read);
    }
    all
}

/// The file has one of these lengths, with the pattern in it and nothing behind it, and no page is lost.
#[track_caller]
fn check_state((fs, port): (&Fs, &mut IoChannel), ino: Ino, lengths: &[usize], mapped: u64) {
    let found = content(fs, port, ino);
    assert!(lengths.contains(&found.len()), "{} bytes", found.len());
    assert!(found == pattern(0, found.len()), "other bytes");
    let used = fs.usage().used_bytes / PAGE as u64;
    assert!(mapped <= used, "{mapped} pages mapped, {used} in use");
    let end = found.len() as u64;
    fs.set_size(port, ino, end + 200_000).unwrap();
    let more = fs.read(port, ino, end, 200_000).unwrap();
    assert!(more.iter().all(|&byte| byte == 0), "old bytes appear");
}

/// Appends behind `old` bytes, and mounts the image after each change.
fn check_crashes(old: usize, len: usize) {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create(&fs, b"a").ino;
    if old > 0 {
        append(&fs, &mut port, ino, 0, old);
    }
    let from = memory.steps();
    append(&fs, &mut port, ino, old, len);
    let last = memory.steps();
    assert!(last > from + 3);
    for steps in from..=last {
        let image = memory.after_steps(steps);
        let (fs, mut port) = mount_and_free(&image);
        let lengths = match steps == last {
            true => vec![old + len],
            false => vec![old],
        };
        let mapped = image.mapped_pages() as u64;
        check_state((&fs, &mut port), ino, &lengths, mapped);
    }
}

#[test]
fn crash_leaves_no_part_of_a_long_append() {
    check_crashes(0, 60 * PAGE);
    check_crashes(5_000, 70 * PAGE + 100);
    check_crashes(600 * PAGE, 130 * PAGE + 1);
}

/// Appends in a pool, and mounts images at each fence.
fn check_power_failures(buffers: bool, old: usize, len: usize) -> usize {
    let pool = PoolSpace::new(POOL_BYTES, SIZE, buffers);
    let (fs, mut port) = pool.mount();
    let ino = create(&fs, b"a").ino;
    append(&fs, &mut port, ino, 0, old);
    if buffers {
        pool.flush();
    }
    pool.crash_points();
    append(&fs, &mut port, ino, old, len);
    let points = pool.crash_points();
    let last = points.len() - 1;
    let mut images = 0;
    for (number, point) in points.iter().enumerate() {
        for image in point.images(IMAGES_MAX, IMAGES_MAX, number as u64) {
            images += 1;
            let left = PoolSpace::recover(image, buffers);
            let (fs, mut port) = left.mount();
            let lengths = match number == last {
                // A write that returned is there.
                true => vec![old + len],
                false => vec![old, old + len],
            };
            check_state((&fs, &mut port), ino, &lengths, left.mapped_pages());
        }
    }
    images
}

#[test]
fn power_failure_at_each_fence_of_a_long_append() {
    let images = check_power_failures(false, 5_000, 150 * PAGE + 7);
    println!("{images} images mounted");
}

#[test]
fn disk_power_failure_in_a_long_append() {
    let images = check_power_failures(true, 5_000, 150 * PAGE + 7);
    println!("{images} images mounted");
}

#[test]
fn append_of_a_mebibyte_takes_two_transactions() {
    let pool = PoolSpace::new(POOL_BYTES, SIZE, false);
    let (fs, mut port) = pool.mount();
    let ino = create(&fs, b"a").ino;
    for at in 0..8 {
        pool.take_change_counts();
        append(&fs, &mut port, ino, at * MIB, MIB);
        let (transactions, writes) = pool.take_change_counts();
        // A file's first mebibyte lies in spans of 8 to 128 pages.
        assert_eq!(transactions, 2, "at {at} MiB");
        assert!(writes <= 6, "{writes} writes at {at} MiB");
    }
    let whole = content(&fs, &mut port, ino);
    assert!(whole == pattern(0, 8 * MIB));
    // The file is plain again: an overwrite changes no inode.
    pool.take_change_counts();
    append(&fs, &mut port, ino, 3 * MIB, MIB);
    assert_eq!(pool.take_change_counts().0, 0);
}

#[test]
fn long_append_without_room_keeps_what_fits() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create(&fs, b"a").ino;
    append(&fs, &mut port, ino, 0, 5_000);
    memory.set_room(Some(memory.mapped_pages() + 120));
    let data = Bytes::from(pattern(5_000, MIB));
    let written = fs.write(&mut port, ino, Some(5_000), &data, false).unwrap();
    let end = written.end as usize;
    assert!((60 * PAGE..121 * PAGE).contains(&end), "{end} bytes");
    let more = fs.write(&mut port, ino, Some(written.end), &data, false);
    assert_eq!(more.unwrap_err().errno(), Errno::NOSPC);
    memory.set_room(None);
    let mapped = memory.mapped_pages() as u64;
    check_state((&fs, &mut port), ino, &[end], mapped);
}

#[test]
fn long_append_beyond_the_limit_is_refused() {
    const LIMIT: u64 = 8 << 20;
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs_with_limit(&memory, LIMIT);
    let ino = create(&fs, b"a").ino;
    let data = Bytes::from(pattern(0, MIB));
    let mut end = 0;
    let error = loop {
        match fs.write(&mut port, ino, Some(end), &data, false) {
            Ok(written) => end = written.end,
            Err(error) => break error,
        }
    };
    assert_eq!(error.errno(), Errno::NOSPC);
    assert!((7 << 20..LIMIT).contains(&end), "{end} bytes");
    assert!(fs.usage().used_bytes <= LIMIT);
}

/// A server's file system on a space with a write cache.
struct CachedServer {
    space: WriteCacheSpace,
    fs: Arc<Fs>,
    port: IoChannel,
    id: FileId,
}

impl CachedServer {
    fn new() -> CachedServer {
        let space = WriteCacheSpace::new(SIZE);
        let (fs, port) = space.mount();
        let id = create(&fs, b"a").file_id();
        let server = CachedServer {
            space,
            fs: Arc::new(fs),
            port,
            id,
        };
        server.space.take_cuts();
        server.space.take_change_counts();
        server
    }

    fn write(&self, at: usize, len: usize, is_stable: bool) {
        let pin = self.fs.pin(self.id).unwrap();
        let data = Bytes::from(pattern(at, len));
        let reply = self
            .fs
            .write_at(&pin, at as u64, &data, is_stable, &owner());
        assert_eq!(reply.result.unwrap() as usize, len);
        assert_eq!(reply.wcc.after.unwrap().size as usize, at + len);
    }

    fn commit(&mut self) {
        let pin = self.fs.pin(self.id).unwrap();
        self.fs.commit(&mut self.port, &pin).result.unwrap();
    }

    /// Checks the states that a loss of power since the last call may leave: one of `during`, and at the end one of `now`.
    #[track_caller]
    fn check_cuts(&self, during: &[usize], now: &[usize]) {
        let cuts = self.space.take_cuts();
        let last = cuts.len() - 1;
        // The cuts of single pages are many, and alike.
        let step = (cuts.len() / 40).max(1);
        for (number, cut) in cuts.iter().enumerate() {
            if number % step != 0 && number + 4 < last {
                continue;
            }
            for left in self.space.images(cut, 8, number as u64) {
                let (fs, mut port) = left.mount();
                let lengths = if number == last { now } else { during };
                check_state((&fs, &mut port), self.id.ino, lengths, 0);
            }
        }
    }
}

#[test]
fn unstable_appends_are_stored_together_by_a_commit() {
    let mut server = CachedServer::new();
    let mut end = 0;
    let mut lengths = vec![0];
    for len in [3_000, 4_096, 10_000, 300] {
        server.write(end, len, false);
        end += len;
        lengths.push(end);
        assert_eq!(server.space.take_change_counts(), (0, 0));
    }
    let read = server.fs.pin(server.id).unwrap();
    let size = server.fs.attr_of(server.id).unwrap().size;
    assert_eq!(size as usize, end);
    drop(read);
    server.check_cuts(&[0], &[0]);
    server.commit();
    assert_eq!(server.space.take_change_counts(), (1, 0));
    server.check_cuts(&[0, end], &[end]);
}

#[test]
fn unstable_append_is_read_before_its_batch_is_sent() {
    let server = CachedServer::new();
    server.write(0, 5_000, true);
    server.write(5_000, 9_000, false);
    server.space.take_change_counts();
    let pin = server.fs.pin(server.id).unwrap();
    for (at, len) in [
        (0, 20_000),
        (100, 4_200),
        (4_999, 2),
        (5_000, 9_000),
        (13_999, 1),
    ] {
        let read = server.fs.read_at(&pin, at, len, &owner()).result.unwrap();
        let end = (at as usize + len as usize).min(14_000);
        assert!(
            read.bytes == pattern(at as usize, end - at as usize),
            "at {at}"
        );
        assert_eq!(read.is_eof, end == 14_000);
    }
    assert_eq!(server.space.take_change_counts(), (0, 0));
}

#[test]
fn overwrite_of_unstable_bytes_comes_after_them() {
    let mut server = CachedServer::new();
    server.write(0, 9_000, false);
    let pin = server.fs.pin(server.id).unwrap();
    let data = Bytes::from_static(b"new");
    let reply = server.fs.write_at(&pin, 100, &data, false, &owner());
    assert_eq!(reply.result.unwrap(), 3);
    let mut expected = pattern(0, 9_000);
    expected[100..103].copy_from_slice(b"new");
    let read = server.fs.read_at(&pin, 0, 9_000, &owner()).result.unwrap();
    assert!(read.bytes == expected);
    server.commit();
    let read = server.fs.read_at(&pin, 0, 9_000, &owner()).result.unwrap();
    assert!(read.bytes == expected);
}

#[test]
fn stable_append_makes_unstable_ones_before_it_durable() {
    let server = CachedServer::new();
    server.write(0, 5_000, false);
    server.write(5_000, 5_000, true);
    server.check_cuts(&[0, 5_000, 10_000], &[10_000]);
}

#[test]
fn unstable_long_appends_never_show_other_bytes() {
    let mut server = CachedServer::new();
    server.write(0, MIB, false);
    server.check_cuts(&[0], &[0]);
    server.write(MIB, MIB, false);
    server.check_cuts(&[0, MIB], &[0, MIB]);
    server.commit();
    server.check_cuts(&[0, MIB, 2 * MIB], &[2 * MIB]);
}

#[test]
fn unstable_changes_are_stored_after_some_seconds() {
    use std::time::{Duration, Instant};
    let server = CachedServer::new();
    server.write(0, 5_000, false);
    let now = Instant::now();
    let due = server.fs.commit_due(now).unwrap().expect("a change waits");
    assert!(due > now && due < now + Duration::from_secs(10));
    assert_eq!(server.space.take_change_counts(), (0, 0));
    assert_eq!(server.fs.commit_due(due).unwrap(), None);
    assert_eq!(server.space.take_change_counts(), (1, 0));
    server.check_cuts(&[0, 5_000], &[5_000]);
}

#[test]
fn unstable_appends_send_half_full_batches() {
    let server = CachedServer::new();
    for at in 0..40 {
        server.write(at * PAGE, PAGE, false);
    }
    let (transactions, _) = server.space.take_change_counts();
    assert_eq!(transactions, 1);
    assert!(server.fs.uncommitted_changes().pages < 32);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Writes of any place and length, which may be long appends, give the content of a file in memory.
    #[test]
    fn writes_match_a_file_in_memory(
        writes in proptest::collection::vec((0usize..3 * MIB, 1usize..2 * MIB + MIB / 2, 0u8..4), 1..10)
    ) {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port) = new_fs(&memory);
        let ino = create(&fs, b"a").ino;
        let mut model: Vec<u8> = Vec::new();
        for (number, (place, len, kind)) in writes.into_iter().enumerate() {
            let at = match kind {
                // At the end, or a little below it.
                0 | 1 => model.len(),
                2 => model.len().saturating_sub(place % 40_000),
                _ => place,
            };
            let data: Vec<u8> = (0..len).map(|byte| (byte / 3 + number) as u8).collect();
            let written = fs.write(&mut port, ino, Some(at as u64), &data.clone().into(), false);
            prop_assert_eq!(written.unwrap().end as usize, at + len);
            model.resize(model.len().max(at + len), 0);
            model[at..at + len].copy_from_slice(&data);
        }
        prop_assert!(content(&fs, &mut port, ino) == model);
        drop((fs, port));
        let (fs, mut port) = mount_and_free(&memory);
        prop_assert!(content(&fs, &mut port, ino) == model);
        let (mapped, used) = (memory.mapped_pages() as u64, fs.usage().used_bytes / PAGE as u64);
        prop_assert!(mapped <= used);
    }
}
