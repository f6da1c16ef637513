//! Atomic overwrites of several ranges of a file.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{ATOMIC_PAGES_MAX, AttrChanges, CreateKind, Fs, FsError, Ino, IoChannel};
use rustix::io::Errno;
use support::memory::MemorySpace;
use support::{OWNER, mount_and_free, new_fs};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
/// Pages of spans of several lengths.
const PAGES: u64 = 700;

fn file(memory: &MemorySpace) -> (Fs, IoChannel, Ino) {
    let (fs, mut port) = new_fs(memory);
    let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    let ino = made.unwrap().ino;
    let data = Bytes::from(vec![1; (PAGES * PAGE) as usize]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    (fs, port, ino)
}

fn part(offset: u64, len: u64) -> (u64, Bytes) {
    (offset, Bytes::from(vec![2; len as usize]))
}

/// The content of the file after the overwrite.
fn content(parts: &[(u64, Bytes)]) -> Vec<u8> {
    let mut bytes = vec![1; (PAGES * PAGE) as usize];
    for (offset, data) in parts {
        bytes[*offset as usize..][..data.len()].copy_from_slice(data);
    }
    bytes
}

fn check(parts: &[(u64, Bytes)]) {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file(&memory);
    let from = memory.steps();
    fs.write_atomic(&mut port, ino, parts, || true).unwrap();
    let (before, after) = (content(&[]), content(parts));
    let all = (PAGES * PAGE) as u32;
    assert!(fs.read(&mut port, ino, 0, all).unwrap() == after);
    let mut shown = [0, 0];
    for steps in from..=memory.steps() {
        let (fs, mut port) = mount_and_free(&memory.after_steps(steps));
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        let found = fs.read(&mut port, ino, 0, all).unwrap();
        assert!(found == before || found == after, "torn after {steps}");
        shown[usize::from(found == after)] += 1;
    }
    assert!(shown[0] > 0 && shown[1] > 0, "{shown:?}");
}

#[test]
fn all_parts_change_or_none() {
    check(&[part(0, PAGE), part(600 * PAGE, PAGE)]);
    check(&[part(100, 10), part(20 * PAGE - 5, 10), part(150, 4000)]);
    check(&[part(6 * PAGE, 48 * PAGE)]);
    check(&[part(PAGES * PAGE - 1, 1)]);
}

#[test]
fn invalid_atomic_write_is_refused_without_changes() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file(&memory);
    let steps = memory.steps();
    let mut check = |parts: &[(u64, Bytes)], why: Errno| {
        let refused = fs.write_atomic(&mut port, ino, parts, || true);
        assert_eq!(refused, Err(FsError::Posix(why)), "{}", parts.len());
    };
    check(&[part(PAGES * PAGE - 1, 2)], Errno::INVAL);
    check(&[part(u64::MAX, 2)], Errno::INVAL);
    check(&[part(0, 0)], Errno::INVAL);
    check(&[part(0, 10), part(9, 1)], Errno::INVAL);
    check(&[part(1, ATOMIC_PAGES_MAX * PAGE)], Errno::INVAL);
    let changes = AttrChanges {
        mode: Some(0o4700),
        ..AttrChanges::default()
    };
    fs.set_attr(ino, changes).unwrap();
    let after = memory.steps();
    check(&[part(0, 1)], Errno::OPNOTSUPP);
    let late = fs.write_atomic(&mut port, ino, &[part(0, 1)], || false);
    assert_eq!(late, Err(FsError::Posix(Errno::INTR)));
    assert_eq!(memory.steps(), after);
    assert!(after > steps);
}

#[test]
fn atomic_write_fills_holes_and_notifies_the_kernel() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino) = file(&memory);
    fs.set_size(&mut port, ino, (PAGES + 100) * PAGE).unwrap();
    let before = fs.attr(ino).unwrap().pages;
    let parts = [part((PAGES + 50) * PAGE + 7, 10), part(0, 3)];
    fs.collect_direct_writes();
    fs.write_atomic(&mut port, ino, &parts, || true).unwrap();
    assert_eq!(fs.attr(ino).unwrap().pages, before + 1);
    let found = fs.read(&mut port, ino, (PAGES + 50) * PAGE, PAGE as u32);
    let found = found.unwrap();
    assert_eq!((found[6], found[7], found[16], found[17]), (0, 2, 2, 0));
    assert_eq!(fs.collect_direct_writes(), [ino]);
    assert!(fs.collect_direct_writes().is_empty());
}
