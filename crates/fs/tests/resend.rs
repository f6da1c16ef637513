//! Changes of the name space while the volume is out of reach.

use crate::support;
use pagemesh_fs::{CreateKind, Fs, Ino, RenameMode};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;
use support::lossy::LossySpace;
use support::memory::MemorySpace;
use support::{OWNER, clock, mount_and_free, new_fs};

/// A wait that returns at once.
fn wait(_: &[RawFd], until: Option<Instant>) {
    assert!(until.is_some(), "memory answers at once");
}

fn create(fs: &Fs, name: &[u8]) -> Result<Ino, Errno> {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    made.map(|made| made.ino).map_err(|error| error.errno())
}

fn lossy() -> (MemorySpace, LossySpace, Fs) {
    let memory = MemorySpace::new(1 << 30);
    drop(new_fs(&memory));
    let space = LossySpace::new(&memory);
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    (memory, space, fs)
}

#[test]
fn change_waits_until_the_volume_is_reachable() {
    for outage in 1..8 {
        let (memory, space, fs) = lossy();
        space.fail_transactions(outage);
        let ino = create(&fs, b"first").unwrap();
        assert_eq!(space.failures_left(), 0, "it was sent until it got there");
        // The file system goes on.
        let (old, new) = ((Ino::ROOT, &b"first"[..]), (Ino::ROOT, &b"second"[..]));
        fs.rename(old, new, RenameMode::Replace).unwrap();
        drop(fs);
        let (fs, _) = mount_and_free(&memory);
        assert_eq!(fs.lookup(Ino::ROOT, b"second").unwrap().ino, ino);
    }
}

#[test]
fn pending_change_fails_when_resending_stops() {
    let (_, space, fs) = lossy();
    space.fail_transactions(u64::MAX);
    std::thread::scope(|scope| {
        let creating = scope.spawn(|| create(&fs, b"never"));
        while space.failures_left() == u64::MAX {
            std::thread::yield_now();
        }
        fs.stop_resending();
        assert_eq!(creating.join().unwrap(), Err(Errno::IO));
    });
    assert_eq!(create(&fs, b"later"), Err(Errno::ROFS));
}
