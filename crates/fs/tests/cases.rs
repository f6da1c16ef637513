//! Cases that random operations do not reach: many entries, full volumes, orphans, damage, several
//! threads.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Fs, FsError, Ino, IoChannel, RenameMode, SeekTarget, mkfs};
use rustix::io::Errno;
use std::collections::BTreeSet;
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, mount_and_free, new_fs};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;

fn create(fs: &Fs, parent: Ino, name: &str) -> Ino {
    let attr = fs.create(parent, name.as_bytes(), CreateKind::File, 0o600, OWNER);
    let ino = attr.unwrap().ino;
    fs.forget(ino, 1);
    ino
}

fn names(fs: &Fs, ino: Ino) -> BTreeSet<Vec<u8>> {
    let mut names = BTreeSet::new();
    fs.list(ino, 0, |entry| {
        assert!(names.insert(entry.name.clone()), "listed once");
        true
    })
    .unwrap();
    names
}

#[test]
fn many_entries_come_and_go() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    let empty = memory.mapped_pages();
    for number in 0..20_000 {
        create(&fs, Ino::ROOT, &format!("entry {number}"));
    }
    assert_eq!(names(&fs, Ino::ROOT).len(), 20_002);
    let (fs, _) = mount_and_free(&memory);
    for number in (0..20_000).step_by(2) {
        fs.unlink(Ino::ROOT, format!("entry {number}").as_bytes())
            .unwrap();
    }
    assert_eq!(names(&fs, Ino::ROOT).len(), 10_002);
    for number in 0..20_000 {
        let found = fs.lookup(Ino::ROOT, format!("entry {number}").as_bytes());
        assert_eq!(found.is_ok(), number % 2 == 1);
        found.iter().for_each(|attr| fs.forget(attr.ino, 1));
    }
    for number in (1..20_000).step_by(2) {
        fs.unlink(Ino::ROOT, format!("entry {number}").as_bytes())
            .unwrap();
    }
    assert_eq!(names(&fs, Ino::ROOT).len(), 2);
    let pages_of_inodes = 20_000 / 16;
    let left = memory.mapped_pages() - empty;
    assert!(left < pages_of_inodes + 1100, "{left} pages stay mapped");
    // New entries reuse the room of removed ones.
    let steps = memory.mapped_pages();
    for number in 0..20_000 {
        create(&fs, Ino::ROOT, &format!("other {number}"));
    }
    assert!(memory.mapped_pages() < steps + 500);
}

#[test]
fn listing_goes_on_while_entries_come_and_go() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    for number in 0..2_000 {
        create(&fs, Ino::ROOT, &format!("stays {number}"));
    }
    let mut listed = BTreeSet::new();
    let mut after = 0;
    for round in 0.. {
        let before = after;
        let mut some = 0;
        fs.list(Ino::ROOT, after, |entry| {
            after = entry.cookie;
            some += 1;
            let is_new = listed.insert(entry.name.clone());
            assert!(is_new, "{:?} was listed", entry.name);
            some < 40
        })
        .unwrap();
        if after == before {
            break;
        }
        create(&fs, Ino::ROOT, &format!("comes {round}"));
        if round >= 5 {
            fs.unlink(Ino::ROOT, format!("comes {}", round - 5).as_bytes())
                .unwrap();
        }
    }
    let stayed = listed.iter().filter(|name| name.starts_with(b"stays"));
    assert_eq!(stayed.count(), 2_000);
}

#[test]
fn unlinked_open_file_lives_until_it_is_closed() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = fs
        .create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER)
        .unwrap()
        .ino;
    fs.open(ino).unwrap();
    fs.write(
        &mut port,
        ino,
        Some(0),
        &Bytes::from(vec![7; 100_000]),
        false,
    )
    .unwrap();
    fs.unlink(Ino::ROOT, b"file").unwrap();
    fs.forget(ino, 1);
    assert_eq!(fs.read(&mut port, ino, 99_999, 10).unwrap(), [7]);
    assert_eq!(fs.attr(ino).unwrap().links, 0);
    // The process is killed here; the next mount frees the file.
    let (other, _) = mount_and_free(&memory.after_steps(memory.steps()));
    assert_eq!(other.usage().inodes, 2);
    fs.release(ino);
    assert_eq!(fs.attr(ino), Err(FsError::Posix(Errno::STALE)));
    let unnamed = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap();
    assert_eq!(unnamed.ino, ino, "the number is used again");
    assert!(unnamed.generation > 1);
    fs.link(ino, Ino::ROOT, b"named").unwrap();
    fs.release(ino);
    fs.forget(ino, 2);
    assert_eq!(fs.lookup(Ino::ROOT, b"named").unwrap().links, 1);
}

#[test]
fn full_volume_refuses_writes_but_allows_deletes() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create(&fs, Ino::ROOT, "file");
    memory.set_room(Some(memory.mapped_pages() + 100));
    let megabyte = Bytes::from(vec![1; 1 << 20]);
    let written = fs.write(&mut port, ino, Some(0), &megabyte, false);
    assert_eq!(written, Ok(0..96 * PAGE), "whole pieces of 48 pages");
    let size = fs.attr(ino).unwrap().size;
    assert_eq!(size, 96 * PAGE);
    let rest = megabyte.slice(size as usize..);
    let full = fs.write(&mut port, ino, Some(size), &rest, false);
    assert_eq!(full.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(fs.attr(ino).unwrap().size, size);
    assert_eq!(
        fs.read(&mut port, ino, 0, 1 << 20).unwrap(),
        &megabyte[..size as usize]
    );
    let rest = Bytes::from(vec![2; 4 * PAGE as usize]);
    fs.write(&mut port, ino, None, &rest, false).unwrap();
    let made = (0..100).find_map(|number| {
        let name = format!("other {number}");
        fs.create(
            Ino::ROOT,
            name.as_bytes(),
            CreateKind::Directory,
            0o700,
            OWNER,
        )
        .err()
    });
    assert_eq!(made.unwrap().errno(), Errno::NOSPC);
    fs.unlink(Ino::ROOT, b"file").unwrap();
    assert_eq!(fs.attr(ino), Err(FsError::Posix(Errno::STALE)));
    create(&fs, Ino::ROOT, "fits");
    let (fs, _) = mount_and_free(&memory);
    assert!(names(&fs, Ino::ROOT).contains(&b"fits"[..]));
}

/// A file system with a limit of 1 MiB, and a file that does not fit 2 MiB more.
fn fs_filled_to_limit(memory: &MemorySpace) -> (Fs, IoChannel, Ino, Bytes) {
    let options = pagemesh_fs::MkfsOptions {
        uuid: uuid::Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 1 << 20,
        owner: OWNER,
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, clock, options).unwrap();
    let (fs, mut port) = mount_and_free(memory);
    let ino = create(&fs, Ino::ROOT, "file");
    let two = Bytes::from(vec![1; 2 << 20]);
    let written = fs.write(&mut port, ino, Some(0), &two, false).unwrap();
    assert!(written.end < two.len() as u64);
    let full = fs.write(&mut port, ino, None, &two, false).unwrap_err();
    assert_eq!(full.errno(), Errno::NOSPC);
    (fs, port, ino, two)
}

#[test]
fn limit_holds_and_freed_pages_are_usable_again() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino, two) = fs_filled_to_limit(&memory);
    assert!(fs.usage().used_bytes <= 1 << 20);
    fs.set_size(&mut port, ino, 0).unwrap();
    fs.write(&mut port, ino, Some(0), &two.slice(..1 << 19), false)
        .unwrap();
}

#[test]
fn odd_names_and_places_are_refused() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let long = vec![b'n'; 256];
    let refused = |name: &[u8]| {
        let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
        made.unwrap_err().errno()
    };
    assert_eq!(refused(&long), Errno::NAMETOOLONG);
    assert_eq!(refused(b""), Errno::INVAL);
    assert_eq!(refused(b"a/b"), Errno::INVAL);
    assert_eq!(refused(b".."), Errno::INVAL);
    let name = &long[..255];
    let ino = fs
        .create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER)
        .unwrap()
        .ino;
    let byte = Bytes::from_static(b"x");
    for offset in [1 << 44, (1 << 63) - 1, u64::MAX] {
        let error = fs
            .write(&mut port, ino, Some(offset), &byte, false)
            .unwrap_err();
        assert_eq!(error.errno(), Errno::FBIG);
        assert_eq!(fs.read(&mut port, ino, offset, 10).unwrap(), b"");
    }
    assert_eq!(
        fs.set_size(&mut port, ino, u64::MAX).unwrap_err().errno(),
        Errno::FBIG
    );
    let last = (1 << 44) - 1;
    let two = Bytes::from_static(b"xy");
    let written = fs.write(&mut port, ino, Some(last), &two, false);
    assert_eq!(written, Ok(last..1 << 44), "as much as there may be");
    assert_eq!(fs.attr(ino).unwrap().size, 1 << 44);
    assert_eq!(
        fs.seek(&mut port, ino, 0, SeekTarget::Data).unwrap(),
        (1 << 44) - PAGE
    );
    assert_eq!(fs.seek(&mut port, ino, 0, SeekTarget::Hole).unwrap(), 0);
    for ino in [Ino(0), Ino(99), Ino(u64::MAX)] {
        assert_eq!(fs.attr(ino).unwrap_err().errno(), Errno::STALE);
        assert_eq!(
            fs.read(&mut port, ino, 0, 1).unwrap_err().errno(),
            Errno::STALE
        );
    }
    let directory = fs
        .create(Ino::ROOT, b"d", CreateKind::Directory, 0o700, OWNER)
        .unwrap()
        .ino;
    let moved = fs.rename((Ino::ROOT, b"d"), (directory, b"d"), RenameMode::Replace);
    assert_eq!(moved.unwrap_err().errno(), Errno::INVAL);
}

#[test]
fn corrupted_pages_are_reported_as_errors() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    for number in 0..100 {
        let ino = create(&fs, Ino::ROOT, &format!("file {number}"));
        let some = Bytes::from(vec![1; 3_000_000]);
        if number % 10 == 0 {
            fs.write(&mut port, ino, Some(0), &some, false).unwrap();
        }
    }
    drop((fs, port));
    let pages: Vec<u64> = memory.pages();
    let mut refused = 0;
    for (number, page) in pages
        .into_iter()
        .enumerate()
        .filter(|(_, page)| *page < 300)
    {
        for at in 0..8 {
            let at = (at * 37 + number * 61) % 512;
            memory.flip_bits(page, at, 0xff);
            match Fs::mount(memory.snapshot().shared(), wait, clock) {
                Err(_) => refused += 1,
                Ok(fs) => {
                    refused += usize::from(fs.damage().is_some());
                    // Any result is right; no call panics or hangs.
                    let mut port = fs.open_channel().unwrap();
                    let mut inos = Vec::new();
                    let _ = fs.list(Ino::ROOT, 0, |entry| {
                        inos.push(entry.ino);
                        inos.len() < 1000
                    });
                    for ino in inos {
                        let _ = fs.read(&mut port, ino, 2_999_000, 2_000);
                    }
                }
            }
            memory.flip_bits(page, at, 0xff);
        }
    }
    assert!(
        refused > 20,
        "only {refused} mounts were refused or found damage"
    );
}

#[test]
fn threads_do_not_disturb_each_other() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let fs = &fs;
            scope.spawn(move || {
                let mut port = fs.open_channel().unwrap();
                let name = format!("directory {thread}");
                let made = fs.create(
                    Ino::ROOT,
                    name.as_bytes(),
                    CreateKind::Directory,
                    0o700,
                    OWNER,
                );
                let directory = made.unwrap().ino;
                for number in 0..200 {
                    let ino = create(fs, directory, &format!("{number}"));
                    let bytes = Bytes::from(vec![thread; 5_000]);
                    fs.write(&mut port, ino, None, &bytes, false).unwrap();
                    fs.write(&mut port, ino, Some(1_000), &bytes, false)
                        .unwrap();
                    assert_eq!(fs.read(&mut port, ino, 0, 9_999).unwrap(), [thread; 6_000]);
                    if number % 2 == 0 {
                        let old = format!("{number}");
                        let new = format!("{thread} {number}");
                        let from = (directory, old.as_bytes());
                        fs.rename(from, (Ino::ROOT, new.as_bytes()), RenameMode::Replace)
                            .unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(names(&fs, Ino::ROOT).len(), 2 + 4 + 400);
    let (fs, _) = mount_and_free(&memory);
    assert_eq!(names(&fs, Ino::ROOT).len(), 2 + 4 + 400);
    assert_eq!(fs.usage().inodes, 2 + 4 + 800);
}

#[test]
fn pages_of_deleted_files_are_reused() {
    let memory = MemorySpace::new(16 << 20);
    let (fs, mut port) = new_fs(&memory);
    let bytes = Bytes::from(vec![1; 3 << 20]);
    for round in 0..12 {
        let ino = create(&fs, Ino::ROOT, "file");
        fs.write(&mut port, ino, Some(0), &bytes, false).unwrap();
        fs.set_xattr(
            ino,
            b"user.a",
            &[1; 9_000],
            pagemesh_fs::SetXattrMode::Always,
        )
        .unwrap();
        match round % 2 {
            0 => fs.unlink(Ino::ROOT, b"file").unwrap(),
            _ => {
                fs.set_size(&mut port, ino, 0).unwrap();
                fs.unlink(Ino::ROOT, b"file").unwrap();
            }
        }
    }
}

#[test]
fn rename_replaces_an_empty_directory() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    let directory = |parent, name: &str| {
        let made = fs.create(parent, name.as_bytes(), CreateKind::Directory, 0o700, OWNER);
        made.unwrap().ino
    };
    let (old, new) = (directory(Ino::ROOT, "old"), directory(Ino::ROOT, "new"));
    let moved = directory(old, "moved");
    directory(new, "empty");
    fs.rename((old, b"moved"), (new, b"empty"), RenameMode::Replace)
        .unwrap();
    assert_eq!(fs.attr(old).unwrap().links, 2);
    assert_eq!(fs.attr(new).unwrap().links, 3);
    assert_eq!(fs.lookup(moved, b"..").unwrap().ino, new);
    fs.rename((new, b"empty"), (Ino::ROOT, b"old"), RenameMode::Replace)
        .unwrap();
    assert_eq!(fs.attr(new).unwrap().links, 2);
    assert_eq!(fs.attr(Ino::ROOT).unwrap().links, 4);
}

/// New attributes, old ones and the inode are in one transaction.
#[test]
fn attributes_of_any_size_can_be_replaced() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    let ino = create(&fs, Ino::ROOT, "file");
    let set = |name: &[u8], len: usize, with: u8| {
        let value = vec![with; len];
        fs.set_xattr(ino, name, &value, pagemesh_fs::SetXattrMode::Always)
    };
    set(b"user.a", 65_536, 1).unwrap();
    assert_eq!(set(b"user.b", 65_536, 1).unwrap_err().errno(), Errno::NOSPC);
    set(b"user.b", 31 * 4096 - 65_536 - 2 * 11, 1).unwrap();
    set(b"user.a", 65_536, 2).unwrap();
    assert_eq!(fs.xattr(ino, b"user.a").unwrap(), [2; 65_536]);
    fs.remove_xattr(ino, b"user.a").unwrap();
}

/// A file may have more than 2^32 pages, nearly all of them holes.
#[test]
fn holes_as_large_as_files_are_punched_at_once() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let ino = create(&fs, Ino::ROOT, "file");
    let bytes = Bytes::from(vec![1; 3 * PAGE as usize]);
    for at in [0, 1 << 30, (1 << 44) - 3 * PAGE] {
        fs.write(&mut port, ino, Some(at), &bytes, false).unwrap();
    }
    let punch = pagemesh_fs::AllocateMode::Punch;
    let (first, len) = (PAGE + 1, (1 << 44) - 3 * PAGE);
    fs.allocate(&mut port, ino, punch, first, len).unwrap();
    assert_eq!(fs.attr(ino).unwrap().pages, 2 + 2);
    let left = fs.read(&mut port, ino, 0, 3 * PAGE as u32).unwrap();
    assert!(left[..first as usize].iter().all(|&byte| byte == 1));
    assert!(left[first as usize..].iter().all(|&byte| byte == 0));
    assert_eq!(
        fs.seek(&mut port, ino, 2 * PAGE, SeekTarget::Data).unwrap(),
        (1 << 44) - 2 * PAGE
    );
}

#[test]
fn raising_the_limit_is_atomic() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port, ino, two) = fs_filled_to_limit(&memory);
    let before = memory.steps();
    assert!(!fs.raise_limit(1 << 20).unwrap());
    assert!(!fs.raise_limit(5).unwrap());
    assert_eq!(memory.steps(), before);
    assert!(fs.raise_limit(4 << 20).unwrap());
    assert_eq!(memory.steps(), before + 1, "one change, all of it or none");
    assert_eq!(fs.usage().limit_bytes, 4 << 20);
    fs.write(&mut port, ino, Some(0), &two, false).unwrap();
    for (steps, limit) in [(before, 1 << 20), (before + 1, 4 << 20)] {
        let (fs, _) = mount_and_free(&memory.after_steps(steps));
        assert_eq!(fs.usage().limit_bytes, limit);
    }
    let (fs, _) = mount_and_free(&memory);
    assert_eq!(fs.usage().limit_bytes, 4 << 20);
    // An operation that fails for lack of room leaves the old limit.
    memory.set_room(Some(0));
    let new = fs.create(Ino::ROOT, b"new", CreateKind::Directory, 0o700, OWNER);
    assert_eq!(new.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(fs.usage().limit_bytes, 4 << 20);
}

#[test]
fn truncate_waits_for_writes_in_flight() {
    let (fs, mut port) = new_fs(&MemorySpace::new(SIZE));
    let ino = create(&fs, Ino::ROOT, "file");
    let page = |with: u8| Bytes::from(vec![with; 4096]);
    fs.write(&mut port, ino, Some(0), &page(1), false).unwrap();
    let mut pipe = fs.write_queue().unwrap();
    let mut begun = 0;
    let mut begin = |pipe: &mut _| {
        begun += 1;
        fs.begin_write(pipe, begun, ino, 0, &page(2), false)
            .unwrap()
    };
    assert!(begin(&mut pipe), "nobody is in the way yet");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fs.set_size(&mut fs.open_channel().unwrap(), ino, 100)
                .unwrap()
        });
        while begin(&mut pipe) {
            std::thread::yield_now();
        }
        // The truncating thread waits, and no other operation begins.
        assert_eq!(fs.attr(ino).unwrap().size, 4096);
        drop(pipe);
    });
    assert_eq!(fs.attr(ino).unwrap().size, 100);
}

/// Freeing the pages that a crash left takes room temporarily.
#[test]
fn full_volume_with_an_orphan_is_mounted() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let kept = create(&fs, Ino::ROOT, "kept");
    let bytes = Bytes::from(vec![7; 9 * PAGE as usize]);
    fs.write(&mut port, kept, Some(0), &bytes, false).unwrap();
    let orphan = fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino;
    fs.write(&mut port, orphan, Some(0), &bytes, false).unwrap();
    // The process is killed here.
    let left = memory.after_steps(memory.steps());
    left.set_room(Some(0));
    let (fs, mut port) = mount_and_free(&left);
    assert_eq!(fs.read(&mut port, kept, 0, 1 << 20).unwrap(), &bytes[..]);
    assert_eq!(fs.usage().inodes, 4, "the orphan is left");
    drop((fs, port));
    left.set_room(None);
    let (fs, _) = mount_and_free(&left);
    assert_eq!(fs.usage().inodes, 3);
}

#[test]
fn file_created_opened_lives_without_name_until_release() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let inodes = fs.usage().inodes;
    let made = fs.create_opened(Ino::ROOT, b"file", 0o600, OWNER).unwrap();
    fs.write(
        &mut port,
        made.ino,
        Some(0),
        &Bytes::from_static(b"there"),
        false,
    )
    .unwrap();
    fs.unlink(Ino::ROOT, b"file").unwrap();
    fs.forget(made.ino, 1);
    assert_eq!(fs.read(&mut port, made.ino, 0, 9).unwrap(), b"there");
    fs.release(made.ino);
    assert_eq!(fs.usage().inodes, inodes);
    assert_eq!(fs.attr(made.ino), Err(FsError::Posix(Errno::STALE)));
}

/// Each write takes another path: extending a file without holes, leaving a hole, filling it, and
/// ending beyond the file.
#[test]
fn writes_around_holes_read_back_as_written() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
    let ino = made.unwrap().ino;
    let mut model = Vec::new();
    let writes = [
        (None, 300),
        (None, 5_000),
        (Some(5_200), 400),
        (Some(6 * PAGE), 10),
        (Some(2 * PAGE + 7), 9_000),
        (None, 60 * 4096),
        (Some(0), 3),
    ];
    for (number, (offset, len)) in (1u8..).zip(writes) {
        let bytes = vec![number; len];
        let at = offset.unwrap_or(model.len() as u64);
        let end = at + len as u64;
        let written = fs.write(&mut port, ino, offset, &bytes.clone().into(), false);
        assert_eq!(written, Ok(at..end));
        model.resize(model.len().max(end as usize), 0);
        model[at as usize..end as usize].copy_from_slice(&bytes);
        assert_eq!(fs.read(&mut port, ino, 0, 1 << 20).unwrap(), model);
    }
    let (fs, mut port) = mount_and_free(&memory);
    assert_eq!(fs.read(&mut port, ino, 0, 1 << 20).unwrap(), model);
}
