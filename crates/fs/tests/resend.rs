//! Changes of the name space while the volume is out of reach.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use pagemesh_fs::{Fs, Ino, Make, Rename};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;
use support::lossy::Lossy;
use support::memory::Memory;
use support::{OWNER, clock, made, mounted};

/// Time that passes at once.
fn wait(_: &[RawFd], until: Option<Instant>) {
    assert!(until.is_some(), "memory answers at once");
}

fn create(fs: &Fs, name: &[u8]) -> Result<Ino, Errno> {
    let made = fs.create(Ino::ROOT, name, Make::File, 0o600, OWNER);
    made.map(|made| made.ino).map_err(|error| error.errno())
}

fn lossy() -> (Memory, Lossy, Fs) {
    let memory = Memory::new(1 << 30);
    drop(made(&memory));
    let space = Lossy::new(&memory);
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    (memory, space, fs)
}

#[test]
fn a_change_waits_until_the_volume_is_in_reach() {
    for outage in 1..8 {
        let (memory, space, fs) = lossy();
        space.fail(outage);
        let ino = create(&fs, b"first").unwrap();
        assert_eq!(space.failing(), 0, "it was sent until it got there");
        // And the file system goes on.
        let (old, new) = ((Ino::ROOT, &b"first"[..]), (Ino::ROOT, &b"second"[..]));
        fs.rename(old, new, Rename::Replace).unwrap();
        drop(fs);
        let (fs, _) = mounted(&memory);
        assert_eq!(fs.lookup(Ino::ROOT, b"second").unwrap().ino, ino);
    }
}

#[test]
fn a_change_that_nobody_needs_any_more_ends() {
    let (_, space, fs) = lossy();
    space.fail(u64::MAX);
    std::thread::scope(|scope| {
        let creating = scope.spawn(|| create(&fs, b"never"));
        while space.failing() == u64::MAX {
            std::thread::yield_now();
        }
        fs.give_up();
        assert_eq!(creating.join().unwrap(), Err(Errno::IO));
    });
    assert_eq!(create(&fs, b"later"), Err(Errno::ROFS));
}
