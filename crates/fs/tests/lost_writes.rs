//! Reporting of lost writes.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Fs, Ino, IoChannel, LostWriteCursor};
use rustix::io::Errno;
use std::sync::Arc;
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, new_fs};

struct SyncCase {
    space: LossySpace,
    fs: Fs,
    channels: [IoChannel; 2],
    ino: Ino,
}

impl SyncCase {
    fn new() -> SyncCase {
        let memory = MemorySpace::new(1 << 30);
        drop(new_fs(&memory));
        let space = LossySpace::new(&memory);
        let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
        let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        let ino = made.unwrap().ino;
        SyncCase {
            channels: [fs.open_channel().unwrap(), fs.open_channel().unwrap()],
            space,
            fs,
            ino,
        }
    }

    /// Syncs by each channel in turn, and checks the results.
    fn check(&mut self, seen: &LostWriteCursor, expected: [Result<(), Errno>; 2]) {
        let SyncCase {
            fs,
            channels: ports,
            ino,
            ..
        } = self;
        let mut sync = |at: usize| {
            let synced = fs.sync_open_file(&mut ports[at], *ino, seen);
            synced.map_err(|error| error.errno())
        };
        assert_eq!([sync(0), sync(1)], expected);
    }
}

const REPORTED_ONCE: [Result<(), Errno>; 2] = [Err(Errno::IO), Ok(())];
const SOUND: [Result<(), Errno>; 2] = [Ok(()), Ok(())];

#[test]
fn lost_write_is_reported_once_per_open_file() {
    let mut case = SyncCase::new();
    let (one, other) = (case.fs.lost_write_cursor(), case.fs.lost_write_cursor());
    case.check(&one, SOUND);
    case.space.lose_writes();
    // Either channel reports it.
    case.check(&one, REPORTED_ONCE);
    case.check(&other, REPORTED_ONCE);
    case.check(&one, SOUND);
    case.check(&other, SOUND);
    let later = case.fs.lost_write_cursor();
    case.check(&later, SOUND);
    case.space.lose_writes();
    case.space.lose_writes();
    for seen in [&one, &other, &later] {
        case.check(seen, REPORTED_ONCE);
        case.check(seen, SOUND);
    }
}

#[test]
fn unreported_lost_write_is_reported_to_later_opens() {
    let mut case = SyncCase::new();
    case.space.lose_writes();
    let (one, other) = (case.fs.lost_write_cursor(), case.fs.lost_write_cursor());
    case.check(&one, REPORTED_ONCE);
    case.check(&other, REPORTED_ONCE);
    assert_eq!(case.fs.sync_all(&mut case.channels[0]), Ok(()));
    case.space.lose_writes();
    // An unmount reports a loss that no sync has reported.
    let all = case.fs.sync_all(&mut case.channels[1]);
    assert_eq!(all.unwrap_err().errno(), Errno::IO);
    assert_eq!(case.fs.sync_all(&mut case.channels[0]), Ok(()));
    case.check(&one, REPORTED_ONCE);
}

#[test]
fn sync_without_unflushed_changes_sends_no_flush() {
    let mut case = SyncCase::new();
    let seen = case.fs.lost_write_cursor();
    case.check(&seen, SOUND);
    assert_eq!(
        case.space.flushes(),
        1,
        "the second sync had nothing to flush"
    );
    let [channel, _] = &mut case.channels;
    let data = Bytes::from_static(b"more");
    case.fs
        .write(channel, case.ino, Some(0), &data, false)
        .unwrap();
    case.check(&seen, SOUND);
    assert_eq!(case.space.flushes(), 2);
    // A loss is reported also without a flush.
    case.space.lose_writes();
    case.check(&seen, REPORTED_ONCE);
    assert_eq!(case.space.flushes(), 2);
}

#[test]
fn data_sync_leaves_times_to_later_syncs() {
    let mut case = SyncCase::new();
    let seen = case.fs.lost_write_cursor();
    let [channel, _] = &mut case.channels;
    let data = Bytes::from_static(b"more");
    case.fs
        .write(channel, case.ino, Some(0), &data, false)
        .unwrap();
    // An overwrite: its time is pending.
    case.fs
        .write(channel, case.ino, Some(0), &data, false)
        .unwrap();
    let (steps, flushes) = (case.space.memory.steps(), case.space.flushes());
    case.fs.sync_data(channel, case.ino, &seen).unwrap();
    assert_eq!(case.space.memory.steps(), steps, "no inode changed");
    assert_eq!(case.space.flushes(), flushes + 1);
    case.fs.sync_open_file(channel, case.ino, &seen).unwrap();
    assert_eq!(
        case.space.memory.steps(),
        steps + 1,
        "the inode has its time"
    );
}
