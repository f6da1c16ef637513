//! The service file: no user reaches it, each crash leaves a whole one or none, and an earlier release drops it.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Fs, Ino, IoChannel};
use rustix::io::Errno;
use std::sync::Arc;
use support::image::{FLAGS, FsImage, LINKS, create, errno, write};
use support::memory::{MemorySpace, wait};
use support::pool::PoolSpace;
use support::{OWNER, clock, mount_and_free, new_fs};

const SIZE: u64 = 1 << 30;
/// Field of the root, from docs/formats.md: number of the service file.
const SERVICE_FILE: usize = 224;
/// Field of an inode, from there.
const MODE: usize = 0;
/// Inodes in use of an empty file system: the table and the root.
const ROOT_INODES: u64 = 2;
/// Of an image without its service file.
const IMAGE_INODES: u64 = ROOT_INODES + 4;

fn text(len: usize) -> Bytes {
    (0..len).map(|at| at as u8 | 1).collect()
}

/// The content of the service file; `None` if there is none.
fn content(fs: &Fs, port: &mut IoChannel) -> Option<Vec<u8>> {
    let ino = fs.service_file(false).unwrap()?;
    let size = fs.attr(ino).unwrap().size;
    Some(fs.read(port, ino, 0, size as u32).unwrap())
}

fn append(fs: &Fs, port: &mut IoChannel, ino: Ino, data: &Bytes) {
    let at = fs.attr(ino).unwrap().size;
    let written = fs.write(port, ino, Some(at), data, true).unwrap();
    assert_eq!(written, at..at + data.len() as u64);
}

#[test]
fn service_file_keeps_its_content_over_mounts() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    assert_eq!(fs.service_file(false), Ok(None));
    let before = fs.usage();
    let ino = fs.service_file(true).unwrap().unwrap();
    assert_eq!(fs.service_file(true), Ok(Some(ino)));
    assert_eq!(fs.service_file(false), Ok(Some(ino)));
    append(&fs, &mut port, ino, &text(10_000));
    assert_eq!(fs.usage().inodes, before.inodes + 1);
    assert_eq!(fs.usage().used_bytes, before.used_bytes + 3 * 4096);
    // The root is stored by other changes.
    create(&fs, Ino::ROOT, b"a", CreateKind::File);
    fs.write(&mut port, ino, Some(20_000), &text(5), true)
        .unwrap();
    fs.sync(&mut port, ino).unwrap();
    let left = content(&fs, &mut port).unwrap();
    drop((fs, port));
    let (fs, mut port) = mount_and_free(&memory);
    assert_eq!(fs.damage(), None);
    assert_eq!(fs.service_file(true), Ok(Some(ino)));
    assert_eq!(content(&fs, &mut port), Some(left));
    assert_eq!(fs.usage().inodes, before.inodes + 2);
}

/// No call of users leads to the file, and none frees it.
#[test]
fn service_file_is_stale_for_users() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let fs = Arc::new(fs);
    let ino = fs.service_file(true).unwrap().unwrap();
    append(&fs, &mut port, ino, &text(100));
    let id = fs.attr(ino).unwrap().file_id();
    let check = |fs: &Arc<Fs>, port: &mut IoChannel| {
        assert_eq!(errno(fs.lookup_ino(ino)), Some(Errno::STALE));
        assert_eq!(errno(fs.open(ino)), Some(Errno::STALE));
        assert_eq!(errno(fs.attr_of(id)), Some(Errno::STALE));
        assert_eq!(errno(fs.pin(id).map(drop)), Some(Errno::STALE));
        assert_eq!(errno(fs.link(ino, Ino::ROOT, b"x")), Some(Errno::STALE));
        // As after a lookup or an open that was counted.
        fs.forget(ino, 1);
        fs.release(ino);
        while fs.free_deferred_piece() {}
        fs.list(Ino::ROOT, 0, |entry| {
            assert_ne!(entry.ino, ino);
            true
        })
        .unwrap();
        assert_eq!(content(fs, port), Some(text(100).to_vec()));
    };
    check(&fs, &mut port);
    drop((fs, port));
    let (fs, mut port) = mount_and_free(&memory);
    check(&Arc::new(fs), &mut port);
}

/// Creates the file and writes to it. Returns the states of its content.
fn run_life(fs: &Fs, port: &mut IoChannel, mut after_step: impl FnMut(Vec<Option<Vec<u8>>>)) {
    let ino = fs.service_file(true).unwrap().unwrap();
    after_step(vec![None, Some(vec![])]);
    let one = text(3_000);
    append(fs, port, ino, &one);
    after_step(vec![Some(vec![]), Some(one.to_vec())]);
    append(fs, port, ino, &one);
    let two = [&one[..], &one[..]].concat();
    after_step(vec![Some(one.to_vec()), Some(two.clone())]);
    fs.set_size(port, ino, 0).unwrap();
    after_step(vec![Some(two), Some(vec![])]);
}

/// The file system has this content of the service file, no leaked inode and no leaked page.
fn check_image(fs: &Fs, port: &mut IoChannel, mapped: u64, allowed: &[Option<Vec<u8>>], at: &str) {
    let found = content(fs, port);
    assert!(
        allowed.contains(&found),
        "{at}: {:?}",
        found.map(|found| found.len())
    );
    assert_eq!(fs.damage(), None, "{at}");
    let inodes = ROOT_INODES + u64::from(found.is_some());
    assert_eq!(fs.usage().inodes, inodes, "{at}");
    let used = fs.usage().used_bytes / 4096;
    let unwritten = used.checked_sub(mapped);
    // Pages of the inode table.
    assert!(
        unwritten.is_some_and(|pages| pages < 16),
        "{at}: {used} pages in use, {mapped} mapped"
    );
}

#[test]
fn crash_leaves_a_whole_service_file_or_none() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let mut from = memory.steps();
    let mut images = 0;
    run_life(&fs, &mut port, |allowed| {
        for step in from..=memory.steps() {
            let image = memory.after_steps(step);
            let (fs, mut port) = mount_and_free(&image);
            let mapped = image.mapped_pages() as u64;
            check_image(&fs, &mut port, mapped, &allowed, &format!("step {step}"));
            images += 1;
        }
        from = memory.steps();
    });
    assert!(images >= 8, "{images} images");
}

fn check_power_failures(buffers: bool) {
    let pooled = PoolSpace::new(96 << 20, SIZE, buffers);
    let (fs, mut port) = pooled.mount();
    pooled.crash_points();
    let mut images = 0;
    run_life(&fs, &mut port, |mut allowed| {
        let points = pooled.crash_points();
        let last = points.len() - 1;
        for (number, point) in points.iter().enumerate() {
            if number == last {
                // Acknowledged: it is there.
                allowed.remove(0);
            }
            for image in point.images(8, 8, number as u64) {
                let left = PoolSpace::recover(image, buffers);
                let (fs, mut port) = left.mount();
                let at = format!("fence {number} of {last}");
                check_image(&fs, &mut port, left.mapped_pages(), &allowed, &at);
                images += 1;
            }
        }
        pooled.flush();
        pooled.crash_points();
    });
    assert!(images >= 8, "{images} images");
}

#[test]
fn power_failure_leaves_a_whole_service_file_or_none() {
    check_power_failures(false);
}

#[test]
fn disk_power_failure_leaves_acknowledged_service_file() {
    check_power_failures(true);
}

/// An image with a service file of 5000 bytes.
fn image_with_service_file() -> (FsImage, Ino) {
    let mut made = None;
    let image = FsImage::new(|_, fs, port| {
        let ino = fs.service_file(true).unwrap().unwrap();
        write(fs, port, ino, 0, 5_000);
        made = Some(ino);
    });
    (image, made.unwrap())
}

/// The next server begins a new file, and the file system takes changes.
fn check_new_file(image: &FsImage, inodes: u64) {
    let (fs, mut port) = mount_and_free(&image.memory);
    assert_eq!(fs.damage(), None);
    assert_eq!(fs.service_file(false), Ok(None));
    assert_eq!(fs.usage().inodes, inodes);
    let ino = fs.service_file(true).unwrap().unwrap();
    assert_eq!(content(&fs, &mut port), Some(vec![]));
    append(&fs, &mut port, ino, &text(10));
    drop((fs, port));
    let (fs, mut port) = mount_and_free(&image.memory);
    assert_eq!(content(&fs, &mut port), Some(text(10).to_vec()));
    assert_eq!(fs.usage().inodes, inodes + 1);
}

/// It stores the root without the name, and its next mount frees the file.
#[test]
fn root_stored_by_earlier_release_drops_service_file() {
    let (image, _) = image_with_service_file();
    image.set(Ino::ROOT, SERVICE_FILE, 0);
    image.set(Ino::ROOT, SERVICE_FILE + 8, 0);
    check_new_file(&image, IMAGE_INODES);
}

/// Its mount frees the file, and leaves the name. The number may get another use.
#[test]
fn name_of_freed_service_file_is_ignored() {
    let (image, ino) = image_with_service_file();
    // As the free of an orphan stores it.
    image.put(image.field(ino, MODE), [0; 84]);
    image.put(image.field(ino, 88), [0; 168]);
    check_new_file(&image.copy(), IMAGE_INODES);

    // The next inode gets the number: a named file, or one without a name that a crash left.
    let reuse = |is_named: bool| {
        let image = image.copy();
        image.set(Ino::ROOT, SERVICE_FILE, 0);
        let (fs, _) = mount_and_free(&image.memory);
        let made = match is_named {
            true => create(&fs, Ino::ROOT, b"other", CreateKind::File),
            false => fs.create_unnamed(Ino::ROOT, 0o600, OWNER).unwrap().ino,
        };
        assert_eq!(made, ino);
        image.set(Ino::ROOT, SERVICE_FILE, ino.0);
        image
    };
    check_new_file(&reuse(true), IMAGE_INODES + 1);
    check_new_file(&reuse(false), IMAGE_INODES);
}

/// A name that leads to an inode of another kind does not count, and the inode stays.
#[test]
fn name_of_linked_inode_or_directory_is_ignored() {
    let (image, ino) = image_with_service_file();
    let check = |of: Ino| {
        let image = image.copy();
        image.set(Ino::ROOT, SERVICE_FILE, of.0);
        for at in [8, 12] {
            let (page, byte) = image.field(Ino::ROOT, SERVICE_FILE + at);
            let id = {
                let (fs, _) = mount_and_free(&image.memory.snapshot());
                fs.attr(of).unwrap().file_id()
            };
            let word = if at == 8 { id.generation } else { id.birth };
            image.put((page, byte), word.to_le_bytes());
        }
        let before = image.field_word(of, FLAGS);
        check_new_file(&image, IMAGE_INODES);
        assert_eq!(image.field_word(of, FLAGS), before);
    };
    check(image.sound);
    check(image.directory);
    // The file itself, with a link: no directory has it, so it stays.
    let linked = image.copy();
    let flags_and_links = linked.field_word(ino, FLAGS) | 1 << (8 * (LINKS - FLAGS));
    linked.set(ino, FLAGS, flags_and_links);
    check_new_file(&linked, IMAGE_INODES + 1);
}

#[test]
fn snapshot_has_the_service_file_of_its_moment() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let empty = memory.snapshot();
    let ino = fs.service_file(true).unwrap().unwrap();
    append(&fs, &mut port, ino, &text(5_000));
    let image = memory.snapshot();
    append(&fs, &mut port, ino, &text(5_000));
    let view = Fs::mount_snapshot(image.shared(), wait, clock).unwrap();
    let mut port = view.open_channel().unwrap();
    assert_eq!(view.damage(), None);
    assert_eq!(content(&view, &mut port), Some(text(5_000).to_vec()));
    assert_eq!(errno(view.lookup_ino(ino)), Some(Errno::STALE));
    let mut names = 0;
    view.list(Ino::ROOT, 0, |_| {
        names += 1;
        true
    })
    .unwrap();
    assert_eq!(names, 2, "entries . and ..");
    let view = Fs::mount_snapshot(empty.shared(), wait, clock).unwrap();
    assert_eq!(view.service_file(false), Ok(None));
    assert_eq!(errno(view.service_file(true)), Some(Errno::ROFS));
}
