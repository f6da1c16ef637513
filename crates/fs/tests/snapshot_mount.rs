//! Mounts of snapshots: images of one moment that must not change.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{Fs, FsError, Ino};
use rustix::io::Errno;
use support::memory::{MemorySpace, wait};
use support::mmap::{SIZE, file_with_mmap_dirty, read};
use support::{clock, mount_with_leftovers};

/// All bytes of an image.
fn content(image: &MemorySpace) -> Vec<(u64, Vec<u8>)> {
    let pages = image.pages().into_iter();
    pages
        .map(|page| (page, image.page(page).to_vec()))
        .collect()
}

/// The files of an image at each step of a sync by a redo log are those of an ordinary mount, and the image stays.
#[test]
fn snapshot_mount_replays_redo_logs_in_memory() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 100, 0..100);
    let begin = memory.steps();
    fs.sync(&mut port, ino).unwrap();
    let mut replayed = 0;
    for step in begin..=memory.steps() {
        let image = memory.after_steps(step);
        let before = content(&image);
        let snapshot = Fs::mount_snapshot(image.shared(), wait, clock).unwrap();
        let mut port = snapshot.open_channel().unwrap();
        let ino = snapshot.lookup(Ino::ROOT, b"file").unwrap().ino;
        let found = read(&snapshot, &mut port, ino);
        while snapshot.free_deferred_piece() {}
        snapshot.poll_idle_channels(std::time::Instant::now(), &mut vec![]);
        drop(port);
        let mut port = snapshot.open_channel().unwrap();
        snapshot.sync_all(&mut port).unwrap();
        assert!(content(&image) == before, "step {step} wrote to the image");
        assert!(snapshot.damage().is_none());

        let copy = image.snapshot();
        let steps = copy.steps();
        let (fs, mut port) = mount_with_leftovers(&copy);
        replayed += u64::from(copy.steps() > steps);
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        assert!(read(&fs, &mut port, ino) == found, "step {step}");
    }
    assert!(replayed > 3, "{replayed} images with a redo log");
}

#[test]
fn snapshot_mount_takes_no_changes() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file_with_mmap_dirty(&memory, 100, 0..100);
    fs.sync(&mut port, ino).unwrap();
    let image = memory.snapshot();
    let before = content(&image);
    let fs = Fs::mount_snapshot(image.shared(), wait, clock).unwrap();
    let mut port = fs.open_channel().unwrap();
    let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
    let data = Bytes::from(vec![7; 4096]);
    let refused = |done: Result<(), FsError>| {
        assert_eq!(done.map_err(|error| error.errno()), Err(Errno::ROFS));
    };
    refused(fs.write(&mut port, ino, Some(0), &data, false).map(drop));
    refused(fs.set_size(&mut port, ino, 1).map(drop));
    refused(fs.unlink(Ino::ROOT, b"file").map(drop));
    refused(fs.raise_limit(1 << 40).map(drop));
    assert!(content(&image) == before);
}
