//! Access times, and the options that keep reads from changing them.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AttrChanges, CreateKind, Fs, Ino, IoChannel, ReadTimes, Time};
use support::memory::MemorySpace;
use support::{OWNER, new_fs};

const SIZE: u64 = 4 << 20;
const OLD: Time = Time { sec: 5, nsec: 0 };

/// A file, a directory and a link.
struct Inodes {
    file: Ino,
    directory: Ino,
    link: Ino,
}

impl Inodes {
    fn new(fs: &Fs, channel: &mut IoChannel) -> Inodes {
        let make = |name: &[u8], kind: CreateKind<'_>| {
            let made = fs.create(Ino::ROOT, name, kind, 0o700, OWNER);
            made.unwrap().ino
        };
        let inodes = Inodes {
            file: make(b"file", CreateKind::File),
            directory: make(b"directory", CreateKind::Directory),
            link: make(b"link", CreateKind::Symlink(b"file")),
        };
        let data = Bytes::from_static(b"content");
        fs.write(channel, inodes.file, Some(0), &data, false)
            .unwrap();
        inodes
    }

    /// Reads each of them. Returns whether the access times of file, directory and link change.
    fn read(&self, fs: &Fs, channel: &mut IoChannel) -> [bool; 3] {
        let all = [self.file, self.directory, self.link];
        let old = AttrChanges {
            atime: Some(OLD),
            ..AttrChanges::default()
        };
        for ino in all {
            fs.set_attr(ino, old).unwrap();
        }
        fs.read_without_time(channel, self.file, 0, 10).unwrap();
        assert_eq!(fs.attr(self.file).unwrap().atime, OLD);
        assert_eq!(fs.read(channel, self.file, 0, 10).unwrap(), b"content");
        fs.list(self.directory, 0, |_| true).unwrap();
        assert_eq!(fs.read_link(self.link).unwrap(), b"file");
        all.map(|ino| fs.attr(ino).unwrap().atime != OLD)
    }
}

#[test]
fn options_choose_the_reads_that_change_access_times() {
    let (fs, mut channel) = new_fs(&MemorySpace::new(SIZE));
    let inodes = Inodes::new(&fs, &mut channel);
    let mut read = || inodes.read(&fs, &mut channel);
    assert_eq!(read(), [true; 3]);
    fs.set_read_times(ReadTimes::None);
    assert_eq!(read(), [false; 3]);
    fs.set_read_times(ReadTimes::WithoutDirectories);
    assert_eq!(read(), [true, false, true]);
    fs.set_read_times(ReadTimes::Relative);
    assert_eq!(read(), [true; 3]);
}

#[test]
fn second_read_changes_no_access_time() {
    let (fs, mut channel) = new_fs(&MemorySpace::new(SIZE));
    let inodes = Inodes::new(&fs, &mut channel);
    inodes.read(&fs, &mut channel);
    let times =
        || [inodes.file, inodes.directory, inodes.link].map(|it| fs.attr(it).unwrap().atime);
    let first = times();
    fs.read(&mut channel, inodes.file, 0, 10).unwrap();
    fs.list(inodes.directory, 0, |_| true).unwrap();
    fs.read_link(inodes.link).unwrap();
    assert_eq!(times(), first);
}

/// The kernel reads pages that it has without a request.
#[test]
fn open_for_reading_counts_if_the_kernel_may_have_pages() {
    let (fs, mut channel) = new_fs(&MemorySpace::new(SIZE));
    let file = Inodes::new(&fs, &mut channel).file;
    fs.open(file).unwrap();
    fs.begin_caching(file).unwrap();
    let before = fs.attr(file).unwrap().atime;
    fs.record_cached_read_open(file);
    assert_eq!(fs.attr(file).unwrap().atime, before, "it has no page");
    fs.record_kernel_pages(file);
    fs.record_cached_read_open(file);
    assert!(fs.attr(file).unwrap().atime > before);
    fs.end_caching(file);
    fs.release(file);
}
