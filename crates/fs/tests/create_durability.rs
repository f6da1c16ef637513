//! A create that finds its name, and an open, report success only when a crash cannot lose the name any more: the change that made the
//! name may still wait in a batch of another call.

use crate::support;
use pagemesh_fs::{CreateKind, CreateMode, Fs, Ino, UncommittedChanges};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use support::pool::PoolSpace;
use support::server::{NOTHING, Server, mode, owner};
use support::{OWNER, mount_and_free};

/// Longer than any test.
const INTERVAL: Duration = Duration::from_secs(3600);
/// For how long a call that must wait is watched. A shorter time hides defects, and fails no sound file system.
const WATCHED: Duration = Duration::from_millis(300);

/// A mount on a disk pool with a commit interval, and a change by the kernel that is not committed.
fn check_waits_for_kernel_change(change: impl FnOnce(&Fs), how: CreateMode) {
    let pooled = PoolSpace::new(96 << 20, 1 << 36, true);
    let (fs, _port) = pooled.mount();
    fs.set_commit_interval(INTERVAL, Box::new(|| {}));
    let root = fs.attr(Ino::ROOT).unwrap().file_id();
    change(&fs);
    assert_ne!(fs.uncommitted_changes(), UncommittedChanges::default());
    let made = fs.create_at(root, b"name", how, &NOTHING, &owner());
    assert!(!made.result.unwrap().is_new);
    assert_eq!(fs.uncommitted_changes(), UncommittedChanges::default());
    let points = pooled.crash_points();
    for image in points.last().unwrap().images(8, 8, 1) {
        let (left, _port) = PoolSpace::recover(image, true).mount();
        left.lookup(Ino::ROOT, b"name").expect("it was reported");
    }
}

fn create(fs: &Fs, name: &[u8]) -> Ino {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    made.unwrap().ino
}

#[test]
fn create_of_an_uncommitted_name_commits_it() {
    let change = |fs: &Fs| {
        create(fs, b"name");
    };
    check_waits_for_kernel_change(change, CreateMode::Unchecked);
}

#[test]
fn create_of_a_name_by_an_uncommitted_link_commits_it() {
    let change = |fs: &Fs| {
        let ino = create(fs, b"other");
        fs.sync_all(&mut fs.open_channel().unwrap()).unwrap();
        fs.link(ino, Ino::ROOT, b"name").unwrap();
    };
    check_waits_for_kernel_change(change, CreateMode::Unchecked);
}

/// An existing name that no uncommitted change concerns needs no commit.
#[test]
fn create_of_a_committed_name_waits_for_nothing() {
    let pooled = PoolSpace::new(96 << 20, 1 << 36, true);
    let (fs, mut port) = pooled.mount();
    fs.set_commit_interval(INTERVAL, Box::new(|| {}));
    // Another page of the inode table, and another directory.
    for number in 0..40 {
        create(&fs, format!("file {number}").as_bytes());
    }
    let made = fs.create(Ino::ROOT, b"directory", CreateKind::Directory, 0o755, OWNER);
    let directory = made.unwrap().ino;
    fs.sync_all(&mut port).unwrap();
    let made = fs.create(directory, b"uncommitted", CreateKind::File, 0o600, OWNER);
    made.unwrap();
    let before = fs.uncommitted_changes();
    assert_ne!(before, UncommittedChanges::default());
    let root = fs.attr(Ino::ROOT).unwrap().file_id();
    let found = fs.create_at(root, b"file 3", CreateMode::Unchecked, &NOTHING, &owner());
    assert!(!found.result.unwrap().is_new);
    assert_eq!(fs.uncommitted_changes(), before);
}

/// One call creates a name, and its transaction stalls. `second` must not end before that.
fn check_waits_for_other_call(how: CreateMode, second: impl FnOnce(&Fs) + Send) {
    let server = Server::new();
    let (fs, memory, root) = (&server.fs, &server.memory, server.root());
    std::thread::scope(|scope| {
        memory
            .while_stalled(|wait_for_request| {
                let first =
                    scope.spawn(|| fs.create_at(root, b"name", how, &mode(0o600), &owner()));
                wait_for_request();
                let (ended, is_ended) = channel();
                scope.spawn(move || {
                    second(fs);
                    // The test may be over.
                    let _ = ended.send(());
                });
                let early = is_ended.recv_timeout(WATCHED);
                assert_eq!(
                    early,
                    Err(RecvTimeoutError::Timeout),
                    "the name may be lost"
                );
                first
            })
            .join()
            .unwrap()
            .result
            .unwrap();
    });
    let (left, _port) = mount_and_free(&memory.snapshot());
    left.lookup(Ino::ROOT, b"name").unwrap();
}

#[test]
fn create_waits_for_the_same_create_in_flight() {
    for how in [CreateMode::Unchecked, CreateMode::Exclusive([7; 8])] {
        check_waits_for_other_call(how, |fs| {
            let root = fs.attr(Ino::ROOT).unwrap().file_id();
            let found = fs.create_at(root, b"name", how, &NOTHING, &owner());
            assert!(!found.result.unwrap().is_new);
        });
    }
}

#[test]
fn open_waits_for_the_create_in_flight() {
    check_waits_for_other_call(CreateMode::Guarded, |fs| {
        let found = fs.lookup(Ino::ROOT, b"name").unwrap();
        fs.open(found.ino).unwrap();
        fs.release(found.ino);
        fs.forget(found.ino, 1);
    });
}
