//! Stores into mappings beside changes past the page cache. The kernel may write a page back that it read before such a
//! change: the page lacks the change, and has stores into other bytes.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, Fs, FsError, Ino, IoChannel};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use support::memory::MemorySpace;
use support::mmap::{PAGE, SIZE, create_open_file, read};
use support::new_fs;

/// Bytes of each page that a program stores.
const STORED: usize = 0;
/// Bytes of each page that the change covers.
const CHANGED: usize = 0x400;
const PAGES: u64 = 4;

/// A file whose pages the kernel has read.
struct MappedFile {
    fs: Arc<Fs>,
    channel: IoChannel,
    ino: Ino,
    /// The pages as the kernel has them.
    kernel: Vec<u8>,
}

impl MappedFile {
    fn new(prepare: impl FnOnce(&Fs, &mut IoChannel, Ino)) -> MappedFile {
        MappedFile::with_pages(prepare, |fs, ino| fs.record_kernel_read(ino).unwrap())
    }

    /// The same, and the kernel gets its pages by another request.
    fn with_pages(
        prepare: impl FnOnce(&Fs, &mut IoChannel, Ino),
        get_pages: impl FnOnce(&Fs, Ino),
    ) -> MappedFile {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut channel) = new_fs(&memory);
        let ino = create_open_file(&fs, b"file");
        prepare(&fs, &mut channel, ino);
        fs.begin_caching(ino).unwrap();
        get_pages(&fs, ino);
        let kernel = read(&fs, &mut channel, ino);
        MappedFile {
            fs: Arc::new(fs),
            channel,
            ino,
            kernel,
        }
    }

    /// A program stores into each page, and the kernel writes the pages back.
    fn store_and_write_back(&mut self, at: usize, byte: u8) {
        for page in self.kernel.chunks_mut(PAGE as usize) {
            page[at] = byte;
        }
        let pages = Bytes::from(self.kernel.clone());
        let held = self
            .fs
            .buffer_mmap_write(&mut self.channel, self.ino, 0, &pages);
        held.unwrap();
    }

    /// The kernel drops its pages, before the change is answered.
    fn drop_pages(&mut self, bytes: Range<u64>) {
        self.fs.drop_written_pages(self.ino, bytes);
        self.kernel = read(&self.fs, &mut self.channel, self.ino);
    }

    /// The bytes of a page that were stored and changed.
    fn both(&mut self, page: u64) -> (u8, u8) {
        let bytes = read(&self.fs, &mut self.channel, self.ino);
        let page = &bytes[(page * PAGE) as usize..];
        (page[STORED], page[CHANGED])
    }
}

fn fill(fs: &Fs, channel: &mut IoChannel, ino: Ino) {
    let ones = Bytes::from(vec![1; (PAGES * PAGE) as usize]);
    fs.write(channel, ino, Some(0), &ones, false).unwrap();
}

fn make_hole(fs: &Fs, channel: &mut IoChannel, ino: Ino) {
    fs.set_size(channel, ino, PAGES * PAGE).unwrap();
}

fn preallocate(fs: &Fs, channel: &mut IoChannel, ino: Ino) {
    let how = AllocateMode::Reserve { keep_size: false };
    fs.allocate(channel, ino, how, 0, PAGES * PAGE).unwrap();
}

/// Changes a part of each page, while the kernel has the pages from before.
fn check_change(file: &mut MappedFile, new: u8, change: impl Fn(&Fs, &mut IoChannel, Ino, u64)) {
    for page in 0..PAGES {
        let at = page * PAGE + CHANGED as u64;
        change(&file.fs, &mut file.channel, file.ino, at);
    }
    file.store_and_write_back(STORED, 7);
    for page in 0..PAGES {
        assert_eq!(file.both(page), (7, new), "page {page}");
    }
    // The same again, with pages that wait for a sync already.
    file.store_and_write_back(STORED, 8);
    file.fs.sync(&mut file.channel, file.ino).unwrap();
    file.store_and_write_back(STORED, 9);
    for page in 0..PAGES {
        assert_eq!(file.both(page), (9, new), "page {page}");
    }
    // Once the kernel has dropped the pages, later stores into the changed bytes count.
    file.drop_pages(0..PAGES * PAGE);
    file.store_and_write_back(CHANGED, 5);
    file.fs.sync(&mut file.channel, file.ino).unwrap();
    for page in 0..PAGES {
        assert_eq!(file.both(page), (9, 5), "page {page}");
    }
}

#[test]
fn write_survives_page_from_before_it() {
    for prepare in [fill, make_hole, preallocate] {
        let mut file = MappedFile::new(prepare);
        check_change(&mut file, 3, |fs, channel, ino, at| {
            let data = Bytes::from_static(&[3; 8]);
            let written = fs.write_past_cache(channel, ino, Some(at), &data, false);
            assert_eq!(written.unwrap(), at..at + 8);
        });
    }
}

#[test]
fn hole_survives_page_from_before_it() {
    for how in [AllocateMode::Punch, AllocateMode::Zero { keep_size: true }] {
        let mut file = MappedFile::new(fill);
        check_change(&mut file, 0, |fs, channel, ino, at| {
            fs.allocate(channel, ino, how, at, 8).unwrap();
        });
    }
}

/// The kernel has pages of cached writes without a read of them.
#[test]
fn hole_survives_page_of_cached_write() {
    let mut file = MappedFile::with_pages(fill, |fs, ino| fs.record_kernel_pages(ino));
    check_change(&mut file, 0, |fs, channel, ino, at| {
        let how = AllocateMode::Punch;
        fs.allocate(channel, ino, how, at, 8).unwrap();
    });
}

#[test]
fn atomic_write_survives_page_from_before_it() {
    let mut file = MappedFile::new(fill);
    // The kernel writes its pages back before it drops them.
    for page in file.kernel.chunks_mut(PAGE as usize) {
        page[STORED] = 7;
    }
    let (fs, pages) = (Arc::downgrade(&file.fs), Bytes::from(file.kernel.clone()));
    let write_back = move |ino, _: Option<Range<u64>>| {
        let fs = fs.upgrade().unwrap();
        let mut channel = fs.borrow_channel().unwrap();
        let held = fs.buffer_mmap_write(&mut channel, ino, 0, &pages);
        held.is_ok()
    };
    let callbacks = (Box::new(write_back), Box::new(|_, _, _| {}));
    file.fs.set_kernel_callbacks(callbacks.0, callbacks.1);
    let parts = [(CHANGED as u64, Bytes::from_static(&[3; 8]))];
    let done = file
        .fs
        .write_atomic(&mut file.channel, file.ino, &parts, || true);
    done.unwrap();
    assert_eq!(file.both(0), (7, 3));
    assert_eq!(file.both(1), (7, 1));
    // It is over: later stores count.
    file.store_and_write_back(CHANGED, 5);
    assert_eq!(file.both(0), (7, 5));
}

/// The kernel drops whole pages after a copy, with the stores of programs in them.
#[test]
fn copy_to_part_of_mapped_page_is_refused() {
    let mut file = MappedFile::new(fill);
    let (fs, channel, ino) = (&file.fs, &mut file.channel, file.ino);
    let source = create_open_file(fs, b"source");
    let threes = Bytes::from(vec![3; 2 * PAGE as usize]);
    fs.write(channel, source, Some(0), &threes, false).unwrap();
    for (at, len) in [(CHANGED as u64, 8), (CHANGED as u64, PAGE), (PAGE, 8)] {
        let done = fs.copy(channel, (source, 0), (ino, at), len);
        let is_refused = matches!(done, Err(FsError::Posix(Errno::OPNOTSUPP)));
        assert!(is_refused, "{at} {len}: {done:?}");
    }
    let copied = fs.copy(channel, (source, 0), (ino, PAGE), PAGE);
    assert_eq!(copied.unwrap(), PAGE);
    // The page was read before the copy, and dropped after it.
    file.store_and_write_back(STORED, 7);
    assert_eq!(file.both(1), (3, 3));
    assert_eq!(file.both(2), (7, 1));
    file.drop_pages(0..PAGES * PAGE);
    file.store_and_write_back(STORED, 8);
    assert_eq!(file.both(1), (8, 3));
}

/// A write that was begun before the kernel reads the page is not recorded: the read waits for it.
#[test]
fn queued_write_is_refused_beside_kernel_pages() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut channel) = new_fs(&memory);
    let ino = create_open_file(&fs, b"file");
    fill(&fs, &mut channel, ino);
    let data = Bytes::from_static(&[3; 8]);
    let mut queue = fs.write_queue().unwrap();
    let mut begin = |number| {
        let begun = fs.begin_write_past_cache(&mut queue, number, ino, 8, &data, false);
        while !queue.is_empty() {
            queue.reap(|_, written| assert_eq!(written.unwrap(), 8));
        }
        begun.unwrap()
    };
    assert!(begin(1));
    fs.record_kernel_read(ino).unwrap();
    assert!(!begin(2));
}
