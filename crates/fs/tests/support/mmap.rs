//! A file with pages that a program stored into a mapping.

#![allow(clippy::unwrap_used)]

use super::memory::MemorySpace;
use super::{OWNER, mount_and_free, new_fs};
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Fs, Ino, IoChannel};

/// Bytes of the volume.
pub const SIZE: u64 = 1 << 36;
pub const PAGE: u64 = 4096;
/// More bytes than a file has.
pub const FAR: u32 = 1 << 27;

/// Creates a file and opens it.
pub fn create_open_file(fs: &Fs, name: &[u8]) -> Ino {
    let made = fs.create(Ino::ROOT, name, CreateKind::File, 0o600, OWNER);
    let ino = made.unwrap().ino;
    fs.open(ino).unwrap();
    ino
}

/// All bytes of a file.
pub fn read(fs: &Fs, port: &mut IoChannel, ino: Ino) -> Vec<u8> {
    fs.read(port, ino, 0, FAR).unwrap()
}

/// Looks the file up after a crash, and reads it.
pub fn lookup_and_read(fs: &Fs, port: &mut IoChannel, name: &[u8]) -> (Ino, Vec<u8>) {
    let ino = fs.lookup(Ino::ROOT, name).unwrap().ino;
    (ino, fs.read(port, ino, 0, FAR).unwrap())
}

/// The volume holds one file, the table and the root, and no other pages.
pub fn check_no_leaked_pages(memory: &MemorySpace, fs: &Fs) {
    let usage = fs.usage();
    assert_eq!(usage.inodes, 3);
    let used = usage.used_bytes / PAGE;
    // Pages of the inode table count as used before they are written.
    assert!(used - (memory.mapped_pages() as u64) < 16, "{usage:?}");
}

/// A file with pages of 1, and mmap-dirty pages of 2.
pub fn file_with_mmap_dirty(
    memory: &MemorySpace,
    pages: u64,
    held: impl Iterator<Item = u64>,
) -> (Fs, IoChannel, Ino) {
    let (fs, mut port) = new_fs(memory);
    let ino = create_open_file(&fs, b"file");
    let data = Bytes::from(vec![1; (pages * PAGE) as usize]);
    fs.write(&mut port, ino, Some(0), &data, false).unwrap();
    for page in held {
        let data = Bytes::from(vec![2; PAGE as usize]);
        fs.buffer_mmap_write(&mut port, ino, page * PAGE, &data)
            .unwrap();
    }
    (fs, port, ino)
}

/// Number of the mmap-dirty pages that a crash would leave.
pub fn durable_pages(memory: &MemorySpace) -> usize {
    let (fs, mut port) = mount_and_free(&memory.snapshot());
    let (_, bytes) = lookup_and_read(&fs, &mut port, b"file");
    let pages = bytes.chunks(PAGE as usize);
    pages.filter(|page| page[0] == 2).count()
}

/// Leaves room for `pages` pages only.
pub fn limit_free_pages(memory: &MemorySpace, pages: usize) {
    memory.set_room(Some(memory.mapped_pages() + pages));
}
