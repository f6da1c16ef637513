//! Files with holes: writes to pages that they have, writes that fill holes, and the count of pages.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, CreateKind, Fs, Ino, IoChannel, SeekTarget};
use pagemesh_fuzz::Random;
use std::collections::BTreeSet;
use support::memory::MemorySpace;
use support::{OWNER, mount_and_free, new_fs};

const PAGE: usize = 4096;
/// Pages of the longest file of the random test.
const PAGES_MAX: usize = 700;

struct SparseFile {
    memory: MemorySpace,
    fs: Fs,
    channel: IoChannel,
    ino: Ino,
    content: Vec<u8>,
    /// The pages that it has.
    pages: BTreeSet<usize>,
}

impl SparseFile {
    fn new() -> SparseFile {
        let memory = MemorySpace::new(1 << 30);
        let (fs, channel) = new_fs(&memory);
        let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        SparseFile {
            memory,
            fs,
            channel,
            ino: made.unwrap().ino,
            content: Vec::new(),
            pages: BTreeSet::new(),
        }
    }

    fn set_size(&mut self, size: usize) {
        let sized = self.fs.set_size(&mut self.channel, self.ino, size as u64);
        sized.unwrap();
        self.content.resize(size, 0);
        self.pages.retain(|&page| page < size.div_ceil(PAGE));
    }

    fn write(&mut self, at: usize, len: usize, value: u8) {
        let data = Bytes::from(vec![value; len]);
        let offset = Some(at as u64);
        let written = self
            .fs
            .write(&mut self.channel, self.ino, offset, &data, false);
        assert_eq!(written.unwrap(), at as u64..(at + len) as u64);
        self.content.resize(self.content.len().max(at + len), 0);
        self.content[at..at + len].fill(value);
        self.pages.extend(at / PAGE..(at + len).div_ceil(PAGE));
    }

    fn punch(&mut self, at: usize, len: usize) {
        let (fs, channel) = (&self.fs, &mut self.channel);
        fs.allocate(
            channel,
            self.ino,
            AllocateMode::Punch,
            at as u64,
            len as u64,
        )
        .unwrap();
        let end = (at + len).min(self.content.len());
        self.content[at.min(end)..end].fill(0);
        let whole = at.div_ceil(PAGE)..(at + len) / PAGE;
        self.pages.retain(|page| !whole.contains(page));
    }

    fn check(&mut self) {
        let attr = self.fs.attr(self.ino).unwrap();
        assert_eq!(attr.size, self.content.len() as u64);
        assert_eq!(attr.pages, self.pages.len() as u64, "{:?}", self.pages);
        let mut at = 0;
        while at < self.content.len() {
            let len = (self.content.len() - at).min(1 << 20);
            let found = self
                .fs
                .read(&mut self.channel, self.ino, at as u64, len as u32);
            assert!(found.unwrap() == self.content[at..at + len], "at {at}");
            at += len;
        }
        for page in 0..self.content.len().div_ceil(PAGE) {
            let at = (page * PAGE) as u64;
            let found = self
                .fs
                .seek(&mut self.channel, self.ino, at, SeekTarget::Data);
            let has_data = found.is_ok_and(|found| found == at);
            assert_eq!(has_data, self.pages.contains(&page), "page {page}");
        }
    }

    fn remount(&mut self) {
        let (fs, channel) = mount_and_free(&self.memory);
        fs.lookup(Ino::ROOT, b"file").unwrap();
        (self.fs, self.channel) = (fs, channel);
    }
}

/// A virtual disk is such a file.
#[test]
fn overwrite_of_a_page_beside_holes_changes_only_it() {
    let mut file = SparseFile::new();
    file.set_size(64 * PAGE);
    file.write(3 * PAGE, 6 * PAGE, 1);
    // The first one finds that this phase of writes fills no holes.
    file.write(4 * PAGE, PAGE, 2);
    for (at, len) in [(5 * PAGE, PAGE), (5 * PAGE + 512, 512)] {
        let steps = file.memory.steps();
        file.write(at, len, 3);
        let changed = (file.memory.steps() - steps, file.memory.last_step_pages());
        assert_eq!(changed, (1, 1), "the page, and no transaction");
    }
    // A write of some pages and some holes counts the new pages.
    file.write(8 * PAGE, 2 * PAGE, 4);
    file.check();
}

#[test]
fn random_changes_of_sparse_files_keep_content_and_count() {
    for seed in 0..20 {
        eprintln!("seed {seed}");
        let mut random = Random::new(seed);
        let mut below = |end: usize| (random.draw() % end as u64) as usize;
        let mut file = SparseFile::new();
        file.set_size(below(PAGES_MAX) * PAGE + below(PAGE));
        for step in 0..60 {
            let at = below(PAGES_MAX) * PAGE + below(3) * 512;
            let len = match below(3) {
                0 => below(2 * PAGE) + 1,
                1 => (below(100) + 1) * PAGE,
                _ => 512,
            };
            match below(12) {
                0 => file.set_size(at),
                1 | 2 => file.punch(at, len),
                3 => file.remount(),
                _ => file.write(at, len, step + 1),
            }
        }
        file.check();
        file.remount();
        file.check();
    }
}
