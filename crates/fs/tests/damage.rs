//! File systems in which one thing makes no sense: it is named, nothing is changed any
//! more, and what is sound can be read.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_fs::{Fs, FsError, Ino, Make, Port, Rename, SetXattr};
use rustix::io::Errno;
use support::memory::{Memory, wait};
use support::{OWNER, clock, made, mounted};

const SIZE: u64 = 1 << 30;
const PAGE: usize = 4096;
// Of an inode, as docs/formats.md has it.
const FLAGS: usize = 2;
const LINKS: usize = 4;
const PAGES: usize = 24;
const PARENT: usize = 88;
const XATTRS: usize = 96;
const SPANS: usize = 112;
const SPARE: usize = 176;
const SHARED: u64 = 1 << 63;
const MAP: usize = 168;

/// Directory `d` with files `one` and `two`, of 5000 bytes each, and a file `sound`.
struct Image {
    memory: Memory,
    directory: Ino,
    one: Ino,
    two: Ino,
    sound: Ino,
}

fn create(fs: &Fs, parent: Ino, name: &[u8], make: Make<'_>) -> Ino {
    let ino = fs.create(parent, name, make, 0o755, OWNER).unwrap().ino;
    fs.forget(ino, 1);
    ino
}

fn write(fs: &Fs, port: &mut Port, ino: Ino, at: u64, len: usize) {
    let bytes = Bytes::from(vec![ino.0 as u8; len]);
    fs.write(port, ino, Some(at), &bytes, false).unwrap();
}

impl Image {
    fn new(more: impl FnOnce(&Image, &Fs, &mut Port)) -> Image {
        let memory = Memory::new(SIZE);
        let (fs, mut port) = made(&memory);
        let directory = create(&fs, Ino::ROOT, b"d", Make::Directory);
        let file = |parent, name: &[u8]| create(&fs, parent, name, Make::File);
        let image = Image {
            one: file(directory, b"one"),
            two: file(directory, b"two"),
            sound: file(Ino::ROOT, b"sound"),
            memory: memory.clone(),
            directory,
        };
        for ino in [image.one, image.two, image.sound] {
            write(&fs, &mut port, ino, 0, 5_000);
        }
        more(&image, &fs, &mut port);
        image
    }

    /// Another one that holds the same.
    fn again(&self) -> Image {
        Image {
            memory: self.memory.after_now(),
            ..*self
        }
    }

    fn word(&self, (page, at): (u64, usize)) -> u64 {
        u64::from_le_bytes(self.memory.page(page)[at..at + 8].try_into().unwrap())
    }

    /// Where an inode's field lies.
    fn field(&self, ino: Ino, at: usize) -> (u64, usize) {
        let table = self.word((0, 256 + SPANS));
        let (page, index) = (ino.0 / 16, ino.0 as usize % 16);
        (table + page, index * 256 + at)
    }

    fn of(&self, ino: Ino, at: usize) -> u64 {
        self.word(self.field(ino, at))
    }

    fn put<const N: usize>(&self, (page, at): (u64, usize), bytes: [u8; N]) {
        let put = |page: &mut [u8; PAGE]| page[at..at + N].copy_from_slice(&bytes);
        self.memory.alter(page, put);
    }

    fn set(&self, ino: Ino, at: usize, word: u64) {
        self.put(self.field(ino, at), word.to_le_bytes());
    }

    /// What is sound can be read, and nothing is changed.
    #[track_caller]
    fn check(&self, fs: &Fs, port: &mut Port, told: &[&str]) {
        let error = fs.damage().expect("damage is known");
        let text = error.to_string();
        for part in told {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        let read = fs.read(port, self.sound, 0, 9_000).unwrap();
        assert_eq!(read, vec![self.sound.0 as u8; 5_000]);
        let steps = self.memory.steps();
        let bytes = Bytes::from_static(b"x");
        let refused = [
            fs.write(port, self.sound, Some(0), &bytes, false).err(),
            fs.write(port, self.sound, None, &bytes, false).err(),
            fs.create(Ino::ROOT, b"new", Make::File, 0o600, OWNER).err(),
            fs.unlink(Ino::ROOT, b"sound").err(),
            fs.set_size(port, self.sound, 1).err(),
            fs.set_xattr(self.sound, b"user.a", b"", SetXattr::Always)
                .err(),
        ];
        for error in refused {
            assert_eq!(error.expect("refused").errno(), Errno::ROFS);
        }
        // What had been noted before is lost.
        let _ = fs.put_times();
        assert_eq!(self.memory.steps(), steps, "something was changed");
    }

    /// Damage that mounting finds.
    #[track_caller]
    fn check_mounted(&self, told: &[&str]) -> (Fs, Port) {
        let steps = self.memory.steps();
        let (fs, mut port) = mounted(&self.memory);
        assert_eq!(self.memory.steps(), steps, "mounting changed something");
        self.check(&fs, &mut port, told);
        (fs, port)
    }

    #[track_caller]
    fn refused(&self, told: &[&str]) {
        let error = Fs::mount(self.memory.shared(), wait, clock).err();
        let text = error.expect("refused").to_string();
        for part in told {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }
}

fn plain() -> Image {
    Image::new(|_, _, _| {})
}

fn errno<T>(result: Result<T, FsError>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

#[test]
fn pages_that_two_inodes_own_are_told_and_not_read() {
    let image = plain();
    let page = image.of(image.one, SPANS);
    image.set(image.two, SPANS, page);
    let (one, two) = (image.one.0, image.two.0);
    let told = [
        &*format!("page {page} "),
        &*format!("inode {one}"),
        &*format!("inode {two}"),
    ];
    let (fs, mut port) = image.check_mounted(&told);
    for ino in [image.one, image.two] {
        assert_eq!(errno(fs.read(&mut port, ino, 0, 1)), Some(Errno::UCLEAN));
        assert_eq!(fs.attr(ino).unwrap().size, 5_000);
    }
    // Its names can still be listed.
    let mut names = 0;
    fs.list(image.directory, 0, |_| {
        names += 1;
        true
    })
    .unwrap();
    assert_eq!(names, 4);
}

/// Two files share a span, and a third one owns it: nobody of them is believed.
#[test]
fn pages_that_one_owns_and_others_share_are_told_and_not_read() {
    let image = Image::new(|image, fs, port| {
        let copy = create(fs, image.directory, b"copy", Make::File);
        assert_eq!(fs.copy(port, (image.one, 0), (copy, 0), 1 << 20), Ok(5_000));
    });
    let shared = image.of(image.one, SPANS);
    assert_eq!(image.of(Ino(6), SPANS), shared);
    assert_ne!(shared & SHARED, 0);
    // A smaller span that is shared, too, an own one, and one that is spare.
    let spare = (shared & !SHARED) | (3 << 56);
    for (at, word) in [(SPANS, shared & !SHARED), (SPARE, spare)] {
        let image = image.again();
        image.set(image.two, at, word);
        let (fs, mut port) = image.check_mounted(&[&format!("page {} ", shared & !SHARED)]);
        for ino in [image.one, image.two, Ino(6)] {
            assert_eq!(errno(fs.read(&mut port, ino, 0, 1)), Some(Errno::UCLEAN));
        }
    }
    drop(mounted(&image.memory));
}

#[test]
fn who_may_not_share_is_told() {
    #[track_caller]
    fn check(ino: impl FnOnce(&Image) -> Ino, at: usize, word: u64, told: &str) {
        let image = plain();
        let ino = ino(&image);
        image.set(ino, at, image.of(ino, at) | word);
        image.check_mounted(&[&format!("inode {}", ino.0), told]);
    }
    check(|image| image.directory, SPANS, SHARED, "span 0 is shared");
    check(|image| image.one, SPANS + 8, SHARED, "span 1 is shared");
    check(|image| image.directory, SPARE, (3 << 56) | 8, "spare");
    check(|image| image.one, SPARE, (10 << 56) | 1024, "spare");
    check(|image| image.one, SPARE, (3 << 56) | 9, "spare");
    let image = plain();
    let at = (0, 256 + SPANS);
    image.put(at, (image.word(at) | SHARED).to_le_bytes());
    image.refused(&["it names no inode table"]);
}

#[test]
fn a_file_does_not_own_pages_of_the_name_space() {
    for page in [0, 1] {
        let image = plain();
        // The head, with what lies behind it; the inode table.
        let table = image.word((0, 256 + SPANS));
        let at = [0, table][page];
        image.set(image.one, XATTRS, at);
        image.put(image.field(image.one, XATTRS + 8), 10u32.to_le_bytes());
        match page {
            0 => drop(image.check_mounted(&["attributes begin at page 0"])),
            _ => drop(image.check_mounted(&["the inode table", &format!("page {table} ")])),
        }
    }
}

#[test]
fn an_inode_of_nonsense_is_told() {
    #[track_caller]
    fn check(at: usize, word: u64, told: &str) {
        let image = plain();
        image.set(image.one, at, word);
        let ino = format!("inode {}", image.one.0);
        let (fs, mut port) = image.check_mounted(&[&ino, told]);
        let read = errno(fs.read(&mut port, image.one, 0, 1));
        assert_eq!(read, Some(Errno::UCLEAN));
    }
    check(0, 0o170_644, "its mode");
    check(FLAGS, 0x1_0020, "its flags");
    check(FLAGS, 0x1_0010, "written from inode 0");
    // What was lent ends before it begins.
    check(FLAGS, 0x1_0008, "grows up to page 0");
    // A file with the target of a link.
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
fn inodes_that_cannot_be_read_do_not_hide_the_others() {
    let image = Image::new(|image, fs, _| {
        for number in 0..40 {
            create(
                fs,
                image.directory,
                format!("{number}").as_bytes(),
                Make::File,
            );
        }
    });
    image.memory.lose(image.field(Ino(20), 0).0);
    let (fs, _) = image.check_mounted(&["inodes 16 to 31 cannot be read"]);
    assert_eq!(errno(fs.attr(Ino(20))), Some(Errno::IO));
    assert_eq!(fs.attr(Ino(40)).unwrap().links, 1);
    // The page of the root is needed.
    let image = plain();
    image.memory.lose(image.field(Ino::ROOT, 0).0);
    image.refused(&["no copy is left"]);
}

#[test]
fn without_a_root_there_is_no_mount() {
    for (at, bytes) in [(0, 0u64), (0, 0o100_644), (LINKS, 0), (PARENT, 2)] {
        let image = plain();
        image.set(Ino::ROOT, at, bytes);
        image.refused(&["inode 1", "the root"]);
    }
}

#[test]
fn a_root_whose_entries_are_damaged_is_mounted() {
    let image = plain();
    let page = image.of(Ino::ROOT, SPANS);
    image.put((page, 0), [7]);
    let (fs, _) = image.check_mounted(&[&format!("page {page} of the volume"), "kind 7"]);
    let listed = fs.list(Ino::ROOT, 0, |_| true);
    assert_eq!(errno(listed), Some(Errno::UCLEAN));
    // Whoever knows a number gets further, as over NFS.
    assert_eq!(fs.lookup(image.directory, b"one").unwrap().ino, image.one);
}

/// A map of two levels, with a chunk in each of two pages of the lower.
fn mapped() -> Image {
    Image::new(|image, fs, port| {
        write(fs, port, image.one, 3 << 20, 1);
        write(fs, port, image.one, 3 << 30, 1);
    })
}

#[test]
fn maps_that_lead_back_to_themselves_are_told() {
    let image = mapped();
    let (fs, _) = mounted(&image.memory);
    assert_eq!(fs.damage(), None);
    let root = image.of(image.one, MAP) & !(0xff << 56);
    image.put((root, 8 * 5), root.to_le_bytes());
    let (fs, mut port) = image.check_mounted(&[&format!("page {root} ")]);
    assert_eq!(
        errno(fs.read(&mut port, image.one, 0, 1)),
        Some(Errno::UCLEAN)
    );

    let image = mapped();
    let lower = image.word((root, 0));
    for (number, told) in [(3, "page 3"), (1 << 40, "beyond"), (u64::MAX, "page 92233")] {
        image.put((lower, 8 * 7), u64::to_le_bytes(number));
        image.check_mounted(&[told]);
    }
    // A chunk that is there, once more.
    let chunk = image.word((lower, 0));
    image.put((lower, 8 * 7), chunk.to_le_bytes());
    image.check_mounted(&["named twice", &format!("page {chunk} ")]);
}

#[test]
fn a_table_that_names_its_pages_twice_is_not_read_for_ever() {
    let image = plain();
    // 2^17 pages of the table, of which all but a few are one chunk.
    let chunk = 4096u64;
    let map = 2048u64;
    for index in 0..512 {
        image.put((map, 8 * index), chunk.to_le_bytes());
    }
    image.put((0, 256 + 16), (1u64 << 29).to_le_bytes());
    image.put((0, 256 + MAP), (map | (1 << 56)).to_le_bytes());
    image.check_mounted(&["named twice by the inode table"]);
    let (limit, size) = ((0, 48), (0, 256 + 16));
    image.put(limit, (1u64 << 20).to_le_bytes());
    image.put(size, (1u64 << 29).to_le_bytes());
    image.refused(&["its inode table has 536870912 bytes"]);
}

#[test]
fn a_reserve_that_is_not_its_own_is_told() {
    const RESERVE: (u64, usize) = (0, 56);
    let image = plain();
    // Of no space, of no span, beyond the end.
    for bits in [1u64, 8 | (12 << 56), 9 | (3 << 56), u64::MAX >> 8] {
        image.put(RESERVE, bits.to_le_bytes());
        if bits != 1 {
            image.refused(&["its reserve lies beyond the volume"]);
        }
    }
    // Given up, it would take the content of a file along.
    let page = image.of(image.one, SPANS);
    image.put(RESERVE, (page | (3 << 56)).to_le_bytes());
    let one = image.one.0;
    image.check_mounted(&[&format!("page {page} "), &format!("inode {one}")]);
}

/// The directory is a root above leaves.
fn tree() -> Image {
    Image::new(|image, fs, _| {
        for number in 0..60 {
            let name = format!("{number:0200}");
            create(fs, image.directory, name.as_bytes(), Make::File);
        }
    })
}

impl Image {
    /// Where the directory's page lies, which is among its first eight.
    fn node(&self, page: u64) -> u64 {
        self.of(self.directory, SPANS) + page
    }

    /// Damage that nobody knows of before somebody looks into the directory.
    #[track_caller]
    fn check_later(&self, told: &[&str], look: impl Fn(&Fs) -> Option<Errno>) {
        let (fs, mut port) = mounted(&self.memory);
        assert_eq!(fs.damage(), None);
        assert_eq!(look(&fs), Some(Errno::UCLEAN));
        self.check(&fs, &mut port, told);
    }

    fn listed(&self, fs: &Fs) -> Option<Errno> {
        errno(fs.list(self.directory, 0, |_| true))
    }
}

#[test]
fn directories_that_make_no_sense_end_changes_when_they_are_met() {
    #[track_caller]
    fn check(page: u64, at: usize, bytes: &[u8], told: &str) {
        let image = tree();
        let place = image.node(page);
        for (more, byte) in bytes.iter().enumerate() {
            image.put((place, at + more), [*byte]);
        }
        image.check_later(&["page", "of the volume", told], |fs| image.listed(fs));
    }
    let root = 0;
    check(root, 0, &[9], "kind 9");
    check(root, 2, &[0, 0], "kind 2");
    check(root, 2, &[0xff, 0xff], "kind 2");
    // Children: the root, itself by way of a page that is none, one beyond the end.
    check(root, 16 + 8, &[0, 0, 0, 0], "root lies below itself");
    check(root, 16 + 8, &[200, 0, 0, 0], "no page 200");
    check(root, 16 + 8, &[0xff; 4], "no page 4294967295");
    // Keys that fall, or leave what the parent said.
    check(root, 16 + 12, &[0; 8], "out of order");
    check(1, 16, &[0; 8], "out of order");
    check(1, 16, &[0xff; 8], "out of order");
    // An entry of no kind; one that is longer than its page; more bytes than entries.
    check(1, 16 + 16, &[3], "kind 3");
    check(1, 4, &[0xff, 0xff], "fuller");
    check(1, 2, &[0xff, 0], "goes beyond");
    check(1, 2, &[1, 0], "behind its entries");
    // A name that is none.
    check(1, 16 + 18, b"/", "it names");
}

#[test]
fn a_tree_that_leads_back_to_itself_ends() {
    let image = tree();
    // The first leaf becomes an inner page whose only child it is itself.
    let leaf = image.node(1);
    let mut bytes = [0; PAGE];
    bytes[0] = 2;
    bytes[2] = 1;
    bytes[4] = 12;
    bytes[16 + 8] = 1;
    image.put((leaf, 0), bytes);
    image.check_later(&["too deep"], |fs| image.listed(fs));
}

#[test]
fn a_page_that_is_called_free_and_is_in_use_is_not_given_out() {
    let image = tree();
    image.put((image.node(0), 8), 1u32.to_le_bytes());
    image.check_later(&["called free"], |fs| {
        (0..200).find_map(|number| {
            let name = format!("more {number:0200}");
            errno(fs.create(image.directory, name.as_bytes(), Make::File, 0o600, OWNER))
        })
    });
    let image = tree();
    image.put((image.node(0), 12), 2u32.to_le_bytes());
    image.check_later(&["says that the directory has 2 pages"], |fs| {
        (0..200).find_map(|number| {
            let name = format!("more {number:0200}");
            errno(fs.create(image.directory, name.as_bytes(), Make::File, 0o600, OWNER))
        })
    });
}

/// Entries and inodes that do not know of each other.
#[test]
fn names_of_what_is_not_there_are_told() {
    // The directory has two entries, in the order of their hashes.
    let first = |image: &Image| (image.of(image.directory, SPANS), 16 + 8);
    #[track_caller]
    fn check(image: &Image, ino: u64, told: &str) {
        let (page, at) = (image.of(image.directory, SPANS), 16 + 8);
        let was = image.word((page, at));
        image.put((page, at), ino.to_le_bytes());
        let name: &[u8] = if was == image.one.0 { b"one" } else { b"two" };
        image.check_later(&[told], |fs| errno(fs.lookup(image.directory, name)));
        let from = (image.directory, name);
        image.check_later(&[told], |fs| errno(fs.unlink(from.0, from.1)));
        let to = (Ino::ROOT, &b"to"[..]);
        image.check_later(&[told], |fs| errno(fs.rename(from, to, Rename::Replace)));
        image.put((page, at), was.to_le_bytes());
    }
    let image = plain();
    assert!([image.one.0, image.two.0].contains(&image.word(first(&image))));
    check(&image, 0, "there is none");
    check(&image, 77, "there is none");
    check(&image, u64::MAX, "there is none");
    check(&image, 1, "something else");
    // A directory named where it does not lie, such as one above.
    let kind = (first(&image).0, 16 + 16);
    image.put(kind, [4]);
    check(&image, 1, "another directory");
    check(&image, image.directory.0, "another directory");
    check(&image, image.sound.0, "something else");
}

#[test]
fn parents_in_a_circle_and_links_too_few_are_told() {
    let image = Image::new(|image, fs, _| {
        let below = create(fs, image.directory, b"below", Make::Directory);
        create(fs, below, b"deep", Make::Directory);
        create(fs, Ino::ROOT, b"other", Make::Directory);
    });
    let (fs, _) = mounted(&image.memory);
    let below = fs.lookup(image.directory, b"below").unwrap().ino;
    let other = fs.lookup(Ino::ROOT, b"other").unwrap().ino;
    drop(fs);
    image.set(image.directory, PARENT, below.0);
    image.check_later(&["never come to the root"], |fs| {
        errno(fs.rename((Ino::ROOT, b"other"), (below, b"moved"), Rename::Replace))
    });
    image.set(image.directory, PARENT, 1);
    image.put(image.field(below, LINKS), 0u32.to_le_bytes());
    // What has no name is an orphan, and goes; its entry is left.
    let (fs, _) = mounted(&image.memory);
    assert_eq!(
        errno(fs.lookup(image.directory, b"below")),
        Some(Errno::UCLEAN)
    );
    image.put(image.field(other, LINKS), 2u32.to_le_bytes());
    image.put(image.field(Ino::ROOT, LINKS), 2u32.to_le_bytes());
    image.check_later(&["has 2 links"], |fs| errno(fs.rmdir(Ino::ROOT, b"other")));
}

#[test]
fn a_write_to_a_hole_that_is_not_told_of_is_not_lost() {
    let image = Image::new(|image, fs, port| write(fs, port, image.one, 5_000, 60_000));
    // 16 pages counted, the second span of 8 is gone, another one is there.
    let span = image.of(image.one, SPANS + 8);
    image.set(image.one, SPANS + 8, 0);
    image.set(image.one, SPANS + 16, span / 16 * 16 + 1024);
    let bytes = Bytes::from_static(b"x");
    image.check_later(&["without holes"], |fs| {
        let mut port = fs.port().unwrap();
        errno(fs.write(&mut port, image.one, Some(40_000), &bytes, false))
    });
}

#[test]
fn attributes_that_make_no_sense_end_changes() {
    let image = Image::new(|image, fs, _| {
        fs.set_xattr(image.one, b"user.a", &[1; 100], SetXattr::Always)
            .unwrap();
    });
    let page = image.of(image.one, XATTRS);
    for (at, bytes) in [(0, [0xff, 0, 0, 0, 0]), (0, [6, 0xff, 0xff, 0xff, 0xff])] {
        image.put((page, at), bytes);
        let told = [&*format!("page {page} "), "beyond the end"];
        image.check_later(&told, |fs| errno(fs.xattr(image.one, b"user.a")));
        image.check_later(&told, |fs| errno(fs.remove_xattr(image.one, b"user.a")));
    }
}

/// Orphans and marks of a crash wait until somebody has seen to the damage.
#[test]
fn what_a_crash_left_stays_where_something_is_damaged() {
    let image = Image::new(|_, fs, port| {
        let unnamed = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
        write(fs, port, unnamed, 0, 5_000);
    });
    let page = image.of(image.one, SPANS);
    let was = image.of(image.two, SPANS);
    image.set(image.two, SPANS, page);
    let (fs, _) = image.check_mounted(&[]);
    let inodes = fs.usage().inodes;
    image.set(image.two, SPANS, was);
    let (fs, _) = mounted(&image.memory);
    assert_eq!(fs.damage(), None);
    assert_eq!(fs.usage().inodes, inodes - 1);
}

#[test]
fn many_damages_are_counted() {
    let image = Image::new(|image, fs, _| {
        for number in 0..20 {
            create(
                fs,
                image.directory,
                format!("{number}").as_bytes(),
                Make::File,
            );
        }
    });
    for ino in 10..20 {
        image.set(Ino(ino), 0, 0o170_000);
    }
    image.check_mounted(&["inode 10 ", "; and 6 more"]);
}
