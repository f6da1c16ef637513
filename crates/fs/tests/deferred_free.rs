//! Pages that a crash left to be freed, and operations on their files in the meantime.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_fs::{AllocateMode, CreateKind, Fs, FsError, Ino, IoChannel};
use rustix::io::Errno;
use std::sync::Arc;
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, mount_with_leftovers, new_fs};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
/// Spans of all lengths, and more than one piece.
const LONG: u64 = 60 << 20;
/// Pages of the reserve.
const RESERVE: usize = 256;
/// Pages that one piece frees.
const PIECE_PAGES_MAX: usize = 24 * 512;

fn create(fs: &Fs, name: &[u8]) -> Ino {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    made.unwrap().ino
}

fn fill(fs: &Fs, port: &mut IoChannel, ino: Ino, bytes: u64) {
    let data = Bytes::from(vec![7; 1 << 20]);
    for offset in (0..bytes).step_by(data.len()) {
        fs.write(port, ino, Some(offset), &data, false).unwrap();
    }
}

/// An orphan of `bytes` bytes, as a crash leaves it.
fn image_with_orphan(bytes: u64) -> (MemorySpace, Ino) {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let orphan = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
    fill(&fs, &mut port, orphan, bytes);
    (memory.snapshot(), orphan)
}

/// The images after each change of a truncation of a file to nine pages.
fn images_of_truncated_file() -> Vec<MemorySpace> {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create(&fs, b"file");
    fill(&fs, &mut port, ino, 1 << 20);
    let from = memory.steps();
    fs.set_size(&mut port, ino, 9 * PAGE).unwrap();
    let after = from + 1..memory.steps();
    after.map(|steps| memory.after_steps(steps)).collect()
}

/// Runs an operation on a truncated file before its pages are freed. Checks that no old byte
/// reappears and no page is leaked.
fn check_truncated(act: impl Fn(&Fs, &mut IoChannel, Ino)) {
    let images = images_of_truncated_file();
    assert!(images.len() > 200, "{} images", images.len());
    for (number, image) in images.iter().enumerate().step_by(13) {
        let (fs, mut port) = mount_with_leftovers(image);
        assert_eq!(fs.deferred_inodes(), 1, "image {number}");
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        act(&fs, &mut port, ino);
        check_content(&fs, &mut port, ino, number);
        while fs.free_deferred_piece() {}
        check_content(&fs, &mut port, ino, number);
        let attr = fs.attr(ino).unwrap();
        let used = fs.usage().used_bytes / PAGE;
        // The rest of the table's span is in use, and was never written.
        assert!(used - (image.mapped_pages() as u64) < 8, "image {number}");
        assert!(attr.pages <= attr.size.div_ceil(PAGE), "image {number}");
        fs.unlink(Ino::ROOT, b"file").unwrap();
        fs.forget(ino, 1);
        while fs.free_deferred_piece() {}
        assert_eq!(fs.attr(ino), Err(FsError::Posix(Errno::STALE)));
        assert!(
            image.mapped_pages() < 5 + RESERVE,
            "image {number}: {fs_pages:?}",
            fs_pages = image.pages()
        );
    }
}

fn check_content(fs: &Fs, port: &mut IoChannel, ino: Ino, number: usize) {
    let bytes = fs.read(port, ino, 0, 2 << 20).unwrap();
    let (kept, more) = bytes.split_at(9 * PAGE as usize);
    assert!(kept.iter().all(|&byte| byte == 7), "image {number}");
    let is_new = |&byte: &u8| byte == 0 || byte == 8;
    assert!(more.iter().all(is_new), "image {number}: old bytes");
}

#[test]
fn mount_changes_nothing_and_leftovers_count_as_used() {
    let (memory, _) = image_with_orphan(1 << 20);
    let mapped = memory.mapped_pages();
    let (fs, _) = mount_with_leftovers(&memory);
    assert_eq!((memory.steps(), fs.deferred_inodes()), (0, 1));
    let before = fs.usage();
    assert_eq!(before.inodes, 3);
    while fs.free_deferred_piece() {}
    assert_eq!((fs.deferred_inodes(), fs.usage().inodes), (0, 2));
    let freed = (before.used_bytes - fs.usage().used_bytes) / PAGE;
    assert_eq!(freed as usize, mapped - memory.mapped_pages());
    assert_eq!(freed, 256);
}

#[test]
fn long_orphan_is_freed_piece_by_piece() {
    let (memory, _) = image_with_orphan(LONG);
    let (fs, _) = mount_with_leftovers(&memory);
    let mut pieces = 0;
    let mut goes_on = true;
    while goes_on {
        let (mapped, used) = (memory.mapped_pages(), fs.usage().used_bytes / PAGE);
        goes_on = fs.free_deferred_piece();
        let freed = mapped - memory.mapped_pages();
        assert!(freed <= PIECE_PAGES_MAX + 8, "{freed} pages at once");
        if pieces == 0 {
            assert_eq!(used - fs.usage().used_bytes / PAGE, freed as u64);
        }
        pieces += 1;
    }
    assert!(pieces >= 2, "{pieces} pieces");
    assert_eq!((fs.deferred_inodes(), fs.usage().inodes), (0, 2));
    // Another mount stops in between.
    let (memory, _) = image_with_orphan(LONG);
    let (fs, _) = mount_with_leftovers(&memory);
    assert!(fs.free_deferred_piece());
    drop(fs);
    let (fs, _) = mount_with_leftovers(&memory);
    assert_eq!(fs.deferred_inodes(), 1);
    while fs.free_deferred_piece() {}
    assert!(memory.mapped_pages() < 5 + RESERVE);
}

#[test]
fn deferred_orphan_cannot_be_opened() {
    let (memory, orphan) = image_with_orphan(PAGE);
    let (fs, _) = mount_with_leftovers(&memory);
    let gone = Err(FsError::Posix(Errno::STALE));
    assert_eq!(
        (fs.open(orphan), fs.lookup_ino(orphan)),
        (gone.clone(), gone)
    );
    // Its number is allocated again once it is free, and not before.
    let other = create(&fs, b"other");
    assert_ne!(other, orphan);
    while fs.free_deferred_piece() {}
    assert_eq!(create(&fs, b"another"), orphan);
    fs.open(orphan).unwrap();
    fs.unlink(Ino::ROOT, b"another").unwrap();
    fs.forget(orphan, 1);
    fs.release(orphan);
    assert_eq!(fs.attr(orphan), Err(FsError::Posix(Errno::STALE)));
}

#[test]
fn truncated_data_stays_gone_when_the_file_grows() {
    check_truncated(|fs, port, ino| {
        fs.set_size(port, ino, 200 * PAGE).unwrap();
    });
    check_truncated(|fs, port, ino| {
        let page = Bytes::from(vec![8; PAGE as usize]);
        fs.write(port, ino, Some(100 * PAGE), &page, false).unwrap();
    });
    check_truncated(|fs, port, ino| {
        let how = AllocateMode::Reserve { keep_size: false };
        fs.allocate(port, ino, how, 0, 150 * PAGE).unwrap();
    });
    check_truncated(|fs, port, ino| {
        // The flag of this truncation is cleared at its end.
        fs.allocate(port, ino, AllocateMode::Punch, 20 * PAGE, 2 * PAGE)
            .unwrap();
        fs.set_size(port, ino, 200 * PAGE).unwrap();
    });
}

#[test]
fn truncated_pages_are_freed_after_other_operations() {
    check_truncated(|_, _, _| {});
    check_truncated(|fs, port, ino| {
        let same = Bytes::from(vec![7; PAGE as usize]);
        fs.write(port, ino, Some(PAGE), &same, false).unwrap();
    });
    check_truncated(|fs, port, ino| {
        let other = create(fs, b"other");
        let copied = fs.copy(port, (ino, 0), (other, 0), 1 << 20).unwrap();
        assert_eq!(copied, 9 * PAGE);
        fs.unlink(Ino::ROOT, b"other").unwrap();
        fs.forget(other, 1);
    });
    check_truncated(|fs, port, ino| {
        fs.set_size(port, ino, 9 * PAGE).unwrap();
    });
}

#[test]
fn file_deleted_while_deferred_is_freed_completely() {
    for image in images_of_truncated_file().iter().step_by(50) {
        let (fs, _) = mount_with_leftovers(image);
        let ino = fs.lookup(Ino::ROOT, b"file").unwrap().ino;
        fs.unlink(Ino::ROOT, b"file").unwrap();
        fs.forget(ino, 1);
        let other = create(&fs, b"other");
        assert_eq!(other, ino, "the number is free");
        while fs.free_deferred_piece() {}
        assert_eq!((fs.deferred_inodes(), fs.usage().inodes), (0, 3));
        assert!(image.mapped_pages() < 5 + RESERVE);
    }
}

#[test]
fn deferred_free_without_space_is_retried() {
    let (memory, _) = image_with_orphan(LONG);
    memory.set_room(Some(0));
    let (fs, mut port) = mount_with_leftovers(&memory);
    for _ in 0..3 {
        assert!(!fs.free_deferred_piece(), "it ends");
        assert_eq!(fs.deferred_inodes(), 1);
    }
    // A deleted file that cannot be freed is deferred, too.
    memory.set_room(None);
    let (deleted, kept) = (create(&fs, b"deleted"), create(&fs, b"kept"));
    for ino in [deleted, kept] {
        fill(&fs, &mut port, ino, 1 << 20);
    }
    fs.unlink(Ino::ROOT, b"deleted").unwrap();
    memory.set_room(Some(0));
    fs.forget(deleted, 1);
    assert_eq!(fs.open(deleted), Err(FsError::Posix(Errno::STALE)));
    assert_eq!(fs.deferred_inodes(), 2);
    memory.set_room(None);
    while fs.free_deferred_piece() {}
    assert_eq!((fs.deferred_inodes(), fs.usage().inodes), (0, 3));
    assert_eq!(
        fs.usage().used_bytes / PAGE,
        1 + 8 + 1 + 256 + RESERVE as u64
    );
}

/// Otherwise the kernel would keep the old length, and stores into a mapping behind the end would
/// be lost.
#[test]
fn truncate_succeeds_when_freeing_is_deferred() {
    let memory = MemorySpace::new(SIZE);
    drop(new_fs(&memory));
    let space = LossySpace::new(&memory);
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    let mut port = fs.open_channel().unwrap();
    let ino = create(&fs, b"file");
    fill(&fs, &mut port, ino, 1 << 20);
    space.refuse_requests(|request| matches!(request, Request::Discard { .. }), 1);
    let attr = fs.set_size(&mut port, ino, 9 * PAGE).unwrap();
    assert_eq!(
        (attr.size, space.refusals_left(), fs.deferred_inodes()),
        (9 * PAGE, 0, 1)
    );
    check_content(&fs, &mut port, ino, 0);
    while fs.free_deferred_piece() {}
    check_content(&fs, &mut port, ino, 0);
    assert_eq!((fs.attr(ino).unwrap().pages, fs.deferred_inodes()), (9, 0));
    // Bytes in a hole are gone, or the hole does not exist.
    space.refuse_requests(|request| matches!(request, Request::Discard { .. }), 1);
    let punched = fs.allocate(&mut port, ino, AllocateMode::Punch, 0, 5 * PAGE);
    assert_eq!(punched.unwrap_err().errno(), Errno::IO);
    while fs.free_deferred_piece() {}
    check_content(&fs, &mut port, ino, 0);
    // Counting the pages left reads the volume, after the pages are freed.
    space.refuse_requests(|request| matches!(request, Request::Extents { .. }), 1);
    fs.allocate(&mut port, ino, AllocateMode::Punch, 0, 4 * PAGE)
        .unwrap();
    assert_eq!(space.refusals_left(), 0);
    let bytes = fs.read(&mut port, ino, 0, 4 * PAGE as u32).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    while fs.free_deferred_piece() {}
    assert_eq!((fs.attr(ino).unwrap().pages, fs.deferred_inodes()), (5, 0));
}

#[test]
fn deferred_free_stops_when_the_volume_fails() {
    let (memory, _) = image_with_orphan(LONG);
    let (fs, _) = mount_with_leftovers(&memory);
    // The map of the orphan; its last page was written after it.
    let map = memory.pages().into_iter().find(|&page| {
        let bytes = memory.page(page);
        page > 0 && bytes[..8] != [7; 8] && bytes[..8] != [0; 8] && bytes[2] < 8
    });
    let map = map.unwrap();
    memory.make_unreadable(map);
    for _ in 0..3 {
        assert!(!fs.free_deferred_piece(), "it ends");
    }
}
