//! File systems with one inconsistency: it is reported, no change is taken, and undamaged parts can
//! be read.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Ino, RenameMode, SetXattrMode};
use rustix::io::Errno;
use support::image::{
    FLAGS, FsImage, LINKS, MAP, PAGE, PAGES, PARENT, SHARED, SIZE, SPANS, SPARE, XATTRS, create,
    errno, image_with_tree, plain_image, write,
};
use support::{OWNER, mount_and_free};

#[test]
fn doubly_owned_pages_are_reported_and_unreadable() {
    let image = plain_image();
    let page = image.field_word(image.one, SPANS);
    image.set(image.two, SPANS, page);
    let (one, two) = (image.one.0, image.two.0);
    let told = [
        &*format!("page {page} "),
        &*format!("inode {one}"),
        &*format!("inode {two}"),
    ];
    let (fs, mut port) = image.check_mount_damage(&told);
    for ino in [image.one, image.two] {
        assert_eq!(errno(fs.read(&mut port, ino, 0, 1)), Some(Errno::UCLEAN));
        assert_eq!(fs.attr(ino).unwrap().size, 5_000);
    }
    // The names in the directory can still be listed.
    let mut names = 0;
    fs.list(image.directory, 0, |_| {
        names += 1;
        true
    })
    .unwrap();
    assert_eq!(names, 4);
}

/// Two files share a span, and a third one owns it: all of them are untrusted.
#[test]
fn owned_and_shared_pages_are_reported_and_unreadable() {
    let image = FsImage::new(|image, fs, port| {
        let copy = create(fs, image.directory, b"copy", CreateKind::File);
        assert_eq!(fs.copy(port, (image.one, 0), (copy, 0), 1 << 20), Ok(5_000));
    });
    let shared = image.field_word(image.one, SPANS);
    assert_eq!(image.field_word(Ino(6), SPANS), shared);
    assert_ne!(shared & SHARED, 0);
    // A smaller span that overlaps the shared one: an own span, and a spare one.
    let spare = (shared & !SHARED) | (3 << 56);
    for (at, word) in [(SPANS, shared & !SHARED), (SPARE, spare)] {
        let image = image.copy();
        image.set(image.two, at, word);
        let (fs, mut port) = image.check_mount_damage(&[&format!("page {} ", shared & !SHARED)]);
        for ino in [image.one, image.two, Ino(6)] {
            assert_eq!(errno(fs.read(&mut port, ino, 0, 1)), Some(Errno::UCLEAN));
        }
    }
    drop(mount_and_free(&image.memory));
}

#[test]
fn sharing_by_other_inode_kinds_is_reported() {
    #[track_caller]
    fn check(ino: impl FnOnce(&FsImage) -> Ino, at: usize, word: u64, told: &str) {
        let image = plain_image();
        let ino = ino(&image);
        image.set(ino, at, image.field_word(ino, at) | word);
        image.check_mount_damage(&[&format!("inode {}", ino.0), told]);
    }
    check(|image| image.directory, SPANS, SHARED, "span 0 is shared");
    check(|image| image.one, SPANS + 8, SHARED, "span 1 is shared");
    check(|image| image.directory, SPARE, (3 << 56) | 8, "spare");
    check(|image| image.one, SPARE, (10 << 56) | 1024, "spare");
    check(|image| image.one, SPARE, (3 << 56) | 9, "spare");
    let image = plain_image();
    let at = (0, 256 + SPANS);
    image.put(at, (image.word(at) | SHARED).to_le_bytes());
    image.assert_mount_refused(&["it names no inode table"]);
}

#[test]
fn file_that_owns_metadata_pages_is_reported() {
    for page in [0, 1] {
        let image = plain_image();
        // The head with the pages behind it; the inode table.
        let table = image.word((0, 256 + SPANS));
        let at = [0, table][page];
        image.set(image.one, XATTRS, at);
        image.put(image.field(image.one, XATTRS + 8), 10u32.to_le_bytes());
        match page {
            0 => drop(image.check_mount_damage(&["attributes begin at page 0"])),
            _ => drop(image.check_mount_damage(&["the inode table", &format!("page {table} ")])),
        }
    }
}

#[test]
fn corrupted_inode_fields_are_reported() {
    #[track_caller]
    fn check(at: usize, word: u64, told: &str) {
        let image = plain_image();
        image.set(image.one, at, word);
        let ino = format!("inode {}", image.one.0);
        let (fs, mut port) = image.check_mount_damage(&[&ino, told]);
        let read = errno(fs.read(&mut port, image.one, 0, 1));
        assert_eq!(read, Some(Errno::UCLEAN));
    }
    check(0, 0o170_644, "its mode");
    check(FLAGS, 0x1_0080, "its flags");
    // Two tiers.
    check(FLAGS, 0x1_0060, "its flags");
    check(FLAGS, 0x1_0010, "written from inode 0");
    // The append extent ends before it begins.
    check(FLAGS, 0x1_0008, "grows up to page 0");
    // A file with the flag of a link target.
    check(FLAGS, 0x1_0004, "no link");
    check(PAGES, 9, "counts 9 pages");
    check(PAGES, u64::MAX, "pages");
    check(SPANS + 8, SIZE / PAGE as u64, "span 1");
    check(SPANS + 8, 9, "span 1");
    check(MAP, 1 << 56, "its map");
    check(MAP, (1 << 56) | (SIZE / PAGE as u64), "its map");
    check(MAP, (4 << 56) | 600, "its map");
    check(32 + 8, u64::MAX, "ns");
}

#[test]
fn unreadable_inodes_do_not_hide_the_others() {
    let image = FsImage::new(|image, fs, _| {
        for number in 0..40 {
            create(
                fs,
                image.directory,
                format!("{number}").as_bytes(),
                CreateKind::File,
            );
        }
    });
    image.memory.make_unreadable(image.field(Ino(20), 0).0);
    let (fs, _) = image.check_mount_damage(&["inodes 16 to 31 cannot be read"]);
    assert_eq!(errno(fs.attr(Ino(20))), Some(Errno::IO));
    assert_eq!(fs.attr(Ino(40)).unwrap().links, 1);
    // Mounting needs the page of the root.
    let image = plain_image();
    image.memory.make_unreadable(image.field(Ino::ROOT, 0).0);
    image.assert_mount_refused(&["no copy is left"]);
}

#[test]
fn without_a_root_there_is_no_mount() {
    for (at, bytes) in [(0, 0u64), (0, 0o100_644), (LINKS, 0), (PARENT, 2)] {
        let image = plain_image();
        image.set(Ino::ROOT, at, bytes);
        image.assert_mount_refused(&["inode 1", "the root"]);
    }
}

#[test]
fn root_with_damaged_entries_is_mounted() {
    let image = plain_image();
    let page = image.field_word(Ino::ROOT, SPANS);
    image.put((page, 0), [7]);
    let (fs, _) = image.check_mount_damage(&[&format!("page {page} of the volume"), "kind 7"]);
    let listed = fs.list(Ino::ROOT, 0, |_| true);
    assert_eq!(errno(listed), Some(Errno::UCLEAN));
    // A lookup by inode number still works, as over NFS.
    assert_eq!(fs.lookup(image.directory, b"one").unwrap().ino, image.one);
}

/// A map of two levels; each of two lower pages names a chunk.
fn image_with_map() -> FsImage {
    FsImage::new(|image, fs, port| {
        write(fs, port, image.one, 3 << 20, 1);
        write(fs, port, image.one, 3 << 30, 1);
    })
}

#[test]
fn cyclic_page_maps_are_reported() {
    let image = image_with_map();
    let (fs, _) = mount_and_free(&image.memory);
    assert_eq!(fs.damage(), None);
    let root = image.field_word(image.one, MAP) & !(0xff << 56);
    image.put((root, 8 * 5), root.to_le_bytes());
    let (fs, mut port) = image.check_mount_damage(&[&format!("page {root} ")]);
    assert_eq!(
        errno(fs.read(&mut port, image.one, 0, 1)),
        Some(Errno::UCLEAN)
    );

    let image = image_with_map();
    let lower = image.word((root, 0));
    for (number, told) in [(3, "page 3"), (1 << 40, "beyond"), (u64::MAX, "page 92233")] {
        image.put((lower, 8 * 7), u64::to_le_bytes(number));
        image.check_mount_damage(&[told]);
    }
    // A chunk that is named a second time.
    let chunk = image.word((lower, 0));
    image.put((lower, 8 * 7), chunk.to_le_bytes());
    image.check_mount_damage(&["named twice", &format!("page {chunk} ")]);
}

#[test]
fn inode_table_naming_pages_twice_ends_the_scan() {
    let image = plain_image();
    // 2^17 pages of the table; all but a few are one chunk.
    let chunk = 4096u64;
    let map = 2048u64;
    for index in 0..512 {
        image.put((map, 8 * index), chunk.to_le_bytes());
    }
    image.put((0, 256 + 16), (1u64 << 29).to_le_bytes());
    image.put((0, 256 + MAP), (map | (1 << 56)).to_le_bytes());
    image.check_mount_damage(&["named twice by the inode table"]);
    let (limit, size) = ((0, 48), (0, 256 + 16));
    image.put(limit, (1u64 << 20).to_le_bytes());
    image.put(size, (1u64 << 29).to_le_bytes());
    image.assert_mount_refused(&["its inode table has 536870912 bytes"]);
}

#[test]
fn reserve_overlapping_other_pages_is_reported() {
    const RESERVE: (u64, usize) = (0, 56);
    let image = plain_image();
    // In the head, of no valid order, misaligned, beyond the end.
    for bits in [1u64, 8 | (12 << 56), 9 | (3 << 56), u64::MAX >> 8] {
        image.put(RESERVE, bits.to_le_bytes());
        if bits != 1 {
            image.assert_mount_refused(&["its reserve lies beyond the volume"]);
        }
    }
    // Releasing this reserve would clear the content of a file.
    let page = image.field_word(image.one, SPANS);
    image.put(RESERVE, (page | (3 << 56)).to_le_bytes());
    let one = image.one.0;
    image.check_mount_damage(&[&format!("page {page} "), &format!("inode {one}")]);
}

#[test]
fn corrupted_directory_stops_changes_when_read() {
    #[track_caller]
    fn check(page: u64, at: usize, bytes: &[u8], told: &str) {
        let image = image_with_tree();
        let place = image.node(page);
        for (more, byte) in bytes.iter().enumerate() {
            image.put((place, at + more), [*byte]);
        }
        image.check_lazy_damage(&["page", "of the volume", told], |fs| image.list_errno(fs));
    }
    let root = 0;
    check(root, 0, &[9], "kind 9");
    check(root, 2, &[0, 0], "kind 2");
    check(root, 2, &[0xff, 0xff], "kind 2");
    // Children: the root itself, a page that does not exist, one beyond the end.
    check(root, 16 + 8, &[0, 0, 0, 0], "root lies below itself");
    check(root, 16 + 8, &[200, 0, 0, 0], "no page 200");
    check(root, 16 + 8, &[0xff; 4], "no page 4294967295");
    // Keys out of order, or outside the parent's range.
    check(root, 16 + 12, &[0; 8], "out of order");
    check(1, 16, &[0; 8], "out of order");
    check(1, 16, &[0xff; 8], "out of order");
    // An entry of no type; one that is longer than its page; more bytes than entries.
    check(1, 16 + 16, &[3], "kind 3");
    check(1, 4, &[0xff, 0xff], "fuller");
    check(1, 2, &[0xff, 0], "goes beyond");
    check(1, 2, &[1, 0], "behind its entries");
    // An invalid name.
    check(1, 16 + 18, b"/", "it names");
}

#[test]
fn cyclic_directory_tree_ends_the_listing() {
    let image = image_with_tree();
    // The first leaf becomes an inner page that is its own only child.
    let leaf = image.node(1);
    let mut bytes = [0; PAGE];
    bytes[0] = 2;
    bytes[2] = 1;
    bytes[4] = 12;
    bytes[16 + 8] = 1;
    image.put((leaf, 0), bytes);
    image.check_lazy_damage(&["too deep"], |fs| image.list_errno(fs));
}

#[test]
fn used_page_on_the_free_list_is_not_allocated() {
    let image = image_with_tree();
    image.put((image.node(0), 8), 1u32.to_le_bytes());
    image.check_lazy_damage(&["called free"], |fs| {
        (0..200).find_map(|number| {
            let name = format!("more {number:0200}");
            errno(fs.create(
                image.directory,
                name.as_bytes(),
                CreateKind::File,
                0o600,
                OWNER,
            ))
        })
    });
    let image = image_with_tree();
    image.put((image.node(0), 12), 2u32.to_le_bytes());
    image.check_lazy_damage(&["says that the directory has 2 pages"], |fs| {
        (0..200).find_map(|number| {
            let name = format!("more {number:0200}");
            errno(fs.create(
                image.directory,
                name.as_bytes(),
                CreateKind::File,
                0o600,
                OWNER,
            ))
        })
    });
}

/// Directory entries and inodes that do not agree.
#[test]
fn dangling_directory_entries_are_reported() {
    // The directory has two entries, in the order of their hashes.
    let first = |image: &FsImage| (image.field_word(image.directory, SPANS), 16 + 8);
    #[track_caller]
    fn check(image: &FsImage, ino: u64, told: &str) {
        let (page, at) = (image.field_word(image.directory, SPANS), 16 + 8);
        let was = image.word((page, at));
        image.put((page, at), ino.to_le_bytes());
        let name: &[u8] = if was == image.one.0 { b"one" } else { b"two" };
        image.check_lazy_damage(&[told], |fs| errno(fs.lookup(image.directory, name)));
        let from = (image.directory, name);
        image.check_lazy_damage(&[told], |fs| errno(fs.unlink(from.0, from.1)));
        let to = (Ino::ROOT, &b"to"[..]);
        image.check_lazy_damage(&[told], |fs| {
            errno(fs.rename(from, to, RenameMode::Replace))
        });
        image.put((page, at), was.to_le_bytes());
    }
    let image = plain_image();
    assert!([image.one.0, image.two.0].contains(&image.word(first(&image))));
    check(&image, 0, "there is none");
    check(&image, 77, "there is none");
    check(&image, u64::MAX, "there is none");
    check(&image, 1, "something else");
    // A directory that is named outside its parent, such as one above.
    let kind = (first(&image).0, 16 + 16);
    image.put(kind, [4]);
    check(&image, 1, "another directory");
    check(&image, image.directory.0, "another directory");
    check(&image, image.sound.0, "something else");
}

#[test]
fn parent_cycles_and_low_link_counts_are_reported() {
    let image = FsImage::new(|image, fs, _| {
        let below = create(fs, image.directory, b"below", CreateKind::Directory);
        create(fs, below, b"deep", CreateKind::Directory);
        create(fs, Ino::ROOT, b"other", CreateKind::Directory);
    });
    let (fs, _) = mount_and_free(&image.memory);
    let below = fs.lookup(image.directory, b"below").unwrap().ino;
    let other = fs.lookup(Ino::ROOT, b"other").unwrap().ino;
    drop(fs);
    image.set(image.directory, PARENT, below.0);
    image.check_lazy_damage(&["never come to the root"], |fs| {
        errno(fs.rename(
            (Ino::ROOT, b"other"),
            (below, b"moved"),
            RenameMode::Replace,
        ))
    });
    image.set(image.directory, PARENT, 1);
    image.put(image.field(below, LINKS), 0u32.to_le_bytes());
    // The inode without a name is freed as an orphan; its entry is left.
    let (fs, _) = mount_and_free(&image.memory);
    assert_eq!(
        errno(fs.lookup(image.directory, b"below")),
        Some(Errno::UCLEAN)
    );
    image.put(image.field(other, LINKS), 2u32.to_le_bytes());
    image.put(image.field(Ino::ROOT, LINKS), 2u32.to_le_bytes());
    image.check_lazy_damage(&["has 2 links"], |fs| errno(fs.rmdir(Ino::ROOT, b"other")));
}

#[test]
fn write_to_an_uncounted_hole_reports_damage() {
    let image = FsImage::new(|image, fs, port| write(fs, port, image.one, 5_000, 60_000));
    // The inode counts 16 pages. Its second span of 8 is gone, and another one is there.
    let span = image.field_word(image.one, SPANS + 8);
    image.set(image.one, SPANS + 8, 0);
    image.set(image.one, SPANS + 16, span / 16 * 16 + 1024);
    let bytes = Bytes::from_static(b"x");
    image.check_lazy_damage(&["without holes"], |fs| {
        let mut port = fs.open_channel().unwrap();
        errno(fs.write(&mut port, image.one, Some(40_000), &bytes, false))
    });
}

#[test]
fn corrupted_xattrs_stop_changes() {
    let image = FsImage::new(|image, fs, _| {
        fs.set_xattr(image.one, b"user.a", &[1; 100], SetXattrMode::Always)
            .unwrap();
    });
    let page = image.field_word(image.one, XATTRS);
    for (at, bytes) in [(0, [0xff, 0, 0, 0, 0]), (0, [6, 0xff, 0xff, 0xff, 0xff])] {
        image.put((page, at), bytes);
        let told = [&*format!("page {page} "), "beyond the end"];
        image.check_lazy_damage(&told, |fs| errno(fs.xattr(image.one, b"user.a")));
        image.check_lazy_damage(&told, |fs| errno(fs.remove_xattr(image.one, b"user.a")));
    }
}

/// Orphans and flagged files of a crash are not freed while damage exists.
#[test]
fn crash_leftovers_stay_while_damage_exists() {
    let image = FsImage::new(|_, fs, port| {
        let unnamed = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
        write(fs, port, unnamed, 0, 5_000);
    });
    let page = image.field_word(image.one, SPANS);
    let was = image.field_word(image.two, SPANS);
    image.set(image.two, SPANS, page);
    let (fs, _) = image.check_mount_damage(&[]);
    let inodes = fs.usage().inodes;
    image.set(image.two, SPANS, was);
    let (fs, _) = mount_and_free(&image.memory);
    assert_eq!(fs.damage(), None);
    assert_eq!(fs.usage().inodes, inodes - 1);
}

#[test]
fn many_damages_are_counted() {
    let image = FsImage::new(|image, fs, _| {
        for number in 0..20 {
            create(
                fs,
                image.directory,
                format!("{number}").as_bytes(),
                CreateKind::File,
            );
        }
    });
    for ino in 10..20 {
        image.set(Ino(ino), 0, 0o170_000);
    }
    image.check_mount_damage(&["inode 10 ", "; and 6 more"]);
}
