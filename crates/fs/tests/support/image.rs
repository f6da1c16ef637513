//! An image of a file system whose structures a test corrupts.

#![allow(clippy::unwrap_used)]

use super::memory::{MemorySpace, wait};
use super::{OWNER, clock, mount_and_free, new_fs};
use bytes::Bytes;
use pagemesh_fs::{CreateKind, Fs, FsError, Ino, IoChannel, SetXattrMode};
use rustix::io::Errno;

pub const SIZE: u64 = 1 << 30;
pub const PAGE: usize = 4096;
// Fields of an inode, from docs/formats.md.
pub const FLAGS: usize = 2;
pub const LINKS: usize = 4;
pub const PAGES: usize = 24;
pub const PARENT: usize = 88;
pub const XATTRS: usize = 96;
pub const SPANS: usize = 112;
pub const SPARE: usize = 176;
pub const SHARED: u64 = 1 << 63;
pub const MAP: usize = 168;

/// Directory `d` with files `one` and `two`, of 5000 bytes each, and a file `sound`.
pub struct FsImage {
    pub memory: MemorySpace,
    pub directory: Ino,
    pub one: Ino,
    pub two: Ino,
    pub sound: Ino,
}

pub fn create(fs: &Fs, parent: Ino, name: &[u8], make: CreateKind<'_>) -> Ino {
    let ino = fs.create(parent, name, make, 0o755, OWNER).unwrap().ino;
    fs.forget(ino, 1);
    ino
}

pub fn write(fs: &Fs, port: &mut IoChannel, ino: Ino, at: u64, len: usize) {
    let bytes = Bytes::from(vec![ino.0 as u8; len]);
    fs.write(port, ino, Some(at), &bytes, false).unwrap();
}

impl FsImage {
    pub fn new(more: impl FnOnce(&FsImage, &Fs, &mut IoChannel)) -> FsImage {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port) = new_fs(&memory);
        let directory = create(&fs, Ino::ROOT, b"d", CreateKind::Directory);
        let file = |parent, name: &[u8]| create(&fs, parent, name, CreateKind::File);
        let image = FsImage {
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

    /// A copy with the same content.
    pub fn copy(&self) -> FsImage {
        FsImage {
            memory: self.memory.snapshot(),
            ..*self
        }
    }

    pub fn word(&self, (page, at): (u64, usize)) -> u64 {
        u64::from_le_bytes(self.memory.page(page)[at..at + 8].try_into().unwrap())
    }

    /// The location of an inode's field.
    pub fn field(&self, ino: Ino, at: usize) -> (u64, usize) {
        let table = self.word((0, 256 + SPANS));
        let (page, index) = (ino.0 / 16, ino.0 as usize % 16);
        (table + page, index * 256 + at)
    }

    pub fn field_word(&self, ino: Ino, at: usize) -> u64 {
        self.word(self.field(ino, at))
    }

    pub fn put<const N: usize>(&self, (page, at): (u64, usize), bytes: [u8; N]) {
        let put = |page: &mut [u8; PAGE]| page[at..at + N].copy_from_slice(&bytes);
        self.memory.corrupt(page, put);
    }

    pub fn set(&self, ino: Ino, at: usize, word: u64) {
        self.put(self.field(ino, at), word.to_le_bytes());
    }

    /// Checks that undamaged parts can be read, and that nothing can be changed.
    #[track_caller]
    pub fn check_damage(&self, fs: &Fs, port: &mut IoChannel, told: &[&str]) {
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
            fs.create(Ino::ROOT, b"new", CreateKind::File, 0o600, OWNER)
                .err(),
            fs.unlink(Ino::ROOT, b"sound").err(),
            fs.set_size(port, self.sound, 1).err(),
            fs.set_xattr(self.sound, b"user.a", b"", SetXattrMode::Always)
                .err(),
        ];
        for error in refused {
            assert_eq!(error.expect("refused").errno(), Errno::ROFS);
        }
        // Pending times are lost.
        let _ = fs.flush_all_times();
        assert_eq!(self.memory.steps(), steps, "something was changed");
    }

    /// Damage that the mount finds.
    #[track_caller]
    pub fn check_mount_damage(&self, told: &[&str]) -> (Fs, IoChannel) {
        let steps = self.memory.steps();
        let (fs, mut port) = mount_and_free(&self.memory);
        assert_eq!(self.memory.steps(), steps, "mounting changed something");
        self.check_damage(&fs, &mut port, told);
        (fs, port)
    }

    #[track_caller]
    pub fn assert_mount_refused(&self, told: &[&str]) {
        let error = Fs::mount(self.memory.shared(), wait, clock).err();
        let text = error.expect("refused").to_string();
        for part in told {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
    }
}

pub fn plain_image() -> FsImage {
    FsImage::new(|_, _, _| {})
}

pub fn errno<T>(result: Result<T, FsError>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

/// The directory is a root above leaves.
pub fn image_with_tree() -> FsImage {
    FsImage::new(|image, fs, _| {
        for number in 0..60 {
            let name = format!("{number:0200}");
            create(fs, image.directory, name.as_bytes(), CreateKind::File);
        }
    })
}

impl FsImage {
    /// The location of one of the directory's first eight pages.
    pub fn node(&self, page: u64) -> u64 {
        self.field_word(self.directory, SPANS) + page
    }

    /// Damage that is found only when the directory is read.
    #[track_caller]
    pub fn check_lazy_damage(&self, told: &[&str], look: impl Fn(&Fs) -> Option<Errno>) {
        let (fs, mut port) = mount_and_free(&self.memory);
        assert_eq!(fs.damage(), None);
        assert_eq!(look(&fs), Some(Errno::UCLEAN));
        self.check_damage(&fs, &mut port, told);
    }

    pub fn list_errno(&self, fs: &Fs) -> Option<Errno> {
        errno(fs.list(self.directory, 0, |_| true))
    }
}
