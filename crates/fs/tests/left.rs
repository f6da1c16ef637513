//! What a crash left to be freed, and what is done to files meanwhile.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_fs::{Allocate, Fs, FsError, Ino, Make, Port};
use rustix::io::Errno;
use std::sync::Arc;
use support::lossy::Lossy;
use support::memory::{Memory, wait};
use support::{OWNER, clock, made, mounted_with_left};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
/// Spans of all lengths, and more than one piece.
const LONG: u64 = 60 << 20;
/// Pages of the reserve.
const RESERVE: usize = 256;
/// Pages that one piece frees.
const PIECE_PAGES_MAX: usize = 24 * 512;

fn create(fs: &Fs, name: &[u8]) -> Ino {
    let made = fs.create(Ino::ROOT, name, Make::File, 0o600, OWNER);
    made.unwrap().ino
}

fn fill(fs: &Fs, port: &mut Port, ino: Ino, bytes: u64) {
    let data = Bytes::from(vec![7; 1 << 20]);
    for offset in (0..bytes).step_by(data.len()) {
        fs.write(port, ino, Some(offset), &data, false).unwrap();
    }
}

/// An orphan of so many bytes, as a crash leaves it.
fn with_orphan(bytes: u64) -> (Memory, Ino) {
    let memory = Memory::new(SIZE);
    let (fs, mut port) = made(&memory);
    let orphan = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
    fill(&fs, &mut port, orphan, bytes);
    (memory.after_now(), orphan)
}

/// What a crash may leave of a file that is cut to nine pages, after each change.
fn cut_files() -> Vec<Memory> {
    let memory = Memory::new(SIZE);
    let (fs, mut port) = made(&memory);
    let ino = create(&fs, b"file");
    fill(&fs, &mut port, ino, 1 << 20);
    let from = memory.steps();
    fs.set_size(&mut port, ino, 9 * PAGE).unwrap();
    let after = from + 1..memory.steps();
    after.map(|steps| memory.after(steps)).collect()
}

/// Does something to a cut file before the rest of it is freed, and sees that nothing
/// comes back, and nothing stays.
fn check_cut(act: impl Fn(&Fs, &mut Port, Ino)) {
    let images = cut_files();
    assert!(images.len() > 200, "{} images", images.len());
    for (number, image) in images.iter().enumerate().step_by(13) {
        let (fs, mut port) = mounted_with_left(image);
        assert_eq!(fs.left(), 1, "image {number}");
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        act(&fs, &mut port, ino);
        check_content(&fs, &mut port, ino, number);
        while fs.free_some() {}
        check_content(&fs, &mut port, ino, number);
        let attr = fs.attr(ino).unwrap();
        let used = fs.usage().used_bytes / PAGE;
        // The rest of the table's span is in use, and was never written.
        assert!(used - (image.mapped_pages() as u64) < 8, "image {number}");
        assert!(attr.pages <= attr.size.div_ceil(PAGE), "image {number}");
        fs.unlink(Ino::ROOT, b"file").unwrap();
        fs.forget(ino, 1);
        while fs.free_some() {}
        assert_eq!(fs.attr(ino), Err(FsError::Posix(Errno::STALE)));
        assert!(
            image.mapped_pages() < 5 + RESERVE,
            "image {number}: {fs_pages:?}",
            fs_pages = image.pages()
        );
    }
}

fn check_content(fs: &Fs, port: &mut Port, ino: Ino, number: usize) {
    let bytes = fs.read(port, ino, 0, 2 << 20).unwrap();
    let (kept, more) = bytes.split_at(9 * PAGE as usize);
    assert!(kept.iter().all(|&byte| byte == 7), "image {number}");
    let is_new = |&byte: &u8| byte == 0 || byte == 8;
    assert!(more.iter().all(is_new), "image {number}: old bytes");
}

#[test]
fn mounting_changes_nothing_and_what_is_left_is_in_use() {
    let (memory, _) = with_orphan(1 << 20);
    let mapped = memory.mapped_pages();
    let (fs, _) = mounted_with_left(&memory);
    assert_eq!((memory.steps(), fs.left()), (0, 1));
    let before = fs.usage();
    assert_eq!(before.inodes, 3);
    while fs.free_some() {}
    assert_eq!((fs.left(), fs.usage().inodes), (0, 2));
    let freed = (before.used_bytes - fs.usage().used_bytes) / PAGE;
    assert_eq!(freed as usize, mapped - memory.mapped_pages());
    assert_eq!(freed, 256);
}

#[test]
fn a_long_orphan_goes_in_pieces_that_count() {
    let (memory, _) = with_orphan(LONG);
    let (fs, _) = mounted_with_left(&memory);
    let mut pieces = 0;
    let mut goes_on = true;
    while goes_on {
        let (mapped, used) = (memory.mapped_pages(), fs.usage().used_bytes / PAGE);
        goes_on = fs.free_some();
        let freed = mapped - memory.mapped_pages();
        assert!(freed <= PIECE_PAGES_MAX + 8, "{freed} pages at once");
        if pieces == 0 {
            assert_eq!(used - fs.usage().used_bytes / PAGE, freed as u64);
        }
        pieces += 1;
    }
    assert!(pieces >= 2, "{pieces} pieces");
    assert_eq!((fs.left(), fs.usage().inodes), (0, 2));
    // Somebody else stops in between.
    let (memory, _) = with_orphan(LONG);
    let (fs, _) = mounted_with_left(&memory);
    assert!(fs.free_some());
    drop(fs);
    let (fs, _) = mounted_with_left(&memory);
    assert_eq!(fs.left(), 1);
    while fs.free_some() {}
    assert!(memory.mapped_pages() < 5 + RESERVE);
}

#[test]
fn nobody_finds_an_orphan_that_is_left() {
    let (memory, orphan) = with_orphan(PAGE);
    let (fs, _) = mounted_with_left(&memory);
    let gone = Err(FsError::Posix(Errno::STALE));
    assert_eq!((fs.open(orphan), fs.remember(orphan)), (gone.clone(), gone));
    // Its number is given out again when it is free, and not before.
    let other = create(&fs, b"other");
    assert_ne!(other, orphan);
    while fs.free_some() {}
    assert_eq!(create(&fs, b"another"), orphan);
    fs.open(orphan).unwrap();
    fs.unlink(Ino::ROOT, b"another").unwrap();
    fs.forget(orphan, 1);
    fs.release(orphan);
    assert_eq!(fs.attr(orphan), Err(FsError::Posix(Errno::STALE)));
}

#[test]
fn what_was_cut_off_does_not_come_back_when_the_file_grows() {
    check_cut(|fs, port, ino| {
        fs.set_size(port, ino, 200 * PAGE).unwrap();
    });
    check_cut(|fs, port, ino| {
        let page = Bytes::from(vec![8; PAGE as usize]);
        fs.write(port, ino, Some(100 * PAGE), &page, false).unwrap();
    });
    check_cut(|fs, port, ino| {
        let how = Allocate::Reserve { keep_size: false };
        fs.allocate(port, ino, how, 0, 150 * PAGE).unwrap();
    });
    check_cut(|fs, port, ino| {
        // The mark of this is taken away when it is done.
        fs.allocate(port, ino, Allocate::Punch, 20 * PAGE, 2 * PAGE)
            .unwrap();
        fs.set_size(port, ino, 200 * PAGE).unwrap();
    });
}

#[test]
fn what_was_cut_off_goes_whatever_is_done_meanwhile() {
    check_cut(|_, _, _| {});
    check_cut(|fs, port, ino| {
        let same = Bytes::from(vec![7; PAGE as usize]);
        fs.write(port, ino, Some(PAGE), &same, false).unwrap();
    });
    check_cut(|fs, port, ino| {
        let other = create(fs, b"other");
        let copied = fs.copy(port, (ino, 0), (other, 0), 1 << 20).unwrap();
        assert_eq!(copied, 9 * PAGE);
        fs.unlink(Ino::ROOT, b"other").unwrap();
        fs.forget(other, 1);
    });
    check_cut(|fs, port, ino| {
        fs.set_size(port, ino, 9 * PAGE).unwrap();
    });
}

#[test]
fn a_file_that_is_deleted_while_it_is_left_goes_as_a_whole() {
    for image in cut_files().iter().step_by(50) {
        let (fs, _) = mounted_with_left(image);
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        fs.unlink(Ino::ROOT, b"file").unwrap();
        fs.forget(ino, 1);
        let other = create(&fs, b"other");
        assert_eq!(other, ino, "the number is free");
        while fs.free_some() {}
        assert_eq!((fs.left(), fs.usage().inodes), (0, 3));
        assert!(image.mapped_pages() < 5 + RESERVE);
    }
}

#[test]
fn what_finds_no_room_is_tried_again_later() {
    let (memory, _) = with_orphan(LONG);
    memory.set_room(Some(0));
    let (fs, mut port) = mounted_with_left(&memory);
    for _ in 0..3 {
        assert!(!fs.free_some(), "it ends");
        assert_eq!(fs.left(), 1);
    }
    // A file that is deleted and cannot be freed is left, too.
    memory.set_room(None);
    let (deleted, kept) = (create(&fs, b"deleted"), create(&fs, b"kept"));
    for ino in [deleted, kept] {
        fill(&fs, &mut port, ino, 1 << 20);
    }
    fs.unlink(Ino::ROOT, b"deleted").unwrap();
    memory.set_room(Some(0));
    fs.forget(deleted, 1);
    assert_eq!(fs.open(deleted), Err(FsError::Posix(Errno::STALE)));
    assert_eq!(fs.left(), 2);
    memory.set_room(None);
    while fs.free_some() {}
    assert_eq!((fs.left(), fs.usage().inodes), (0, 3));
    assert_eq!(
        fs.usage().used_bytes / PAGE,
        1 + 8 + 1 + 256 + RESERVE as u64
    );
}

/// Else the kernel would go on with the old length, and what is then stored into a mapping
/// behind the end be nowhere.
#[test]
fn a_file_that_was_cut_is_cut_though_the_rest_cannot_be_freed() {
    let memory = Memory::new(SIZE);
    drop(made(&memory));
    let space = Lossy::new(&memory);
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    let mut port = fs.port().unwrap();
    let ino = create(&fs, b"file");
    fill(&fs, &mut port, ino, 1 << 20);
    space.refuse(|request| matches!(request, Request::Discard { .. }), 1);
    let attr = fs.set_size(&mut port, ino, 9 * PAGE).unwrap();
    assert_eq!((attr.size, space.refusing(), fs.left()), (9 * PAGE, 0, 1));
    check_content(&fs, &mut port, ino, 0);
    while fs.free_some() {}
    check_content(&fs, &mut port, ino, 0);
    assert_eq!((fs.attr(ino).unwrap().pages, fs.left()), (9, 0));
    // What lies in a hole is gone, or the hole is not there.
    space.refuse(|request| matches!(request, Request::Discard { .. }), 1);
    let punched = fs.allocate(&mut port, ino, Allocate::Punch, 0, 5 * PAGE);
    assert_eq!(punched.unwrap_err().errno(), Errno::IO);
    while fs.free_some() {}
    check_content(&fs, &mut port, ino, 0);
    // Counting what is left reads, and comes behind what is freed.
    space.refuse(|request| matches!(request, Request::Extents { .. }), 1);
    fs.allocate(&mut port, ino, Allocate::Punch, 0, 4 * PAGE)
        .unwrap();
    assert_eq!(space.refusing(), 0);
    let bytes = fs.read(&mut port, ino, 0, 4 * PAGE as u32).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    while fs.free_some() {}
    assert_eq!((fs.attr(ino).unwrap().pages, fs.left()), (5, 0));
}

#[test]
fn a_volume_that_fails_ends_it() {
    let (memory, _) = with_orphan(LONG);
    let (fs, _) = mounted_with_left(&memory);
    // The map of the orphan, whose last page was written after it.
    let map = memory.pages().into_iter().find(|&page| {
        let bytes = memory.page(page);
        page > 0 && bytes[..8] != [7; 8] && bytes[..8] != [0; 8] && bytes[2] < 8
    });
    let map = map.unwrap();
    memory.lose(map);
    for _ in 0..3 {
        assert!(!fs.free_some(), "it ends");
    }
}
