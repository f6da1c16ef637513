//! Copies that share spans: their cost, their isolation, and the pages left after deletes and
//! crashes.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, CreateKind, Fs, Ino, IoChannel};
use rustix::io::Errno;
use support::memory::MemorySpace;
use support::{OWNER, mount_and_free, new_fs, new_fs_with_limit};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
const CHUNK: u64 = 512 * PAGE;
/// Two chunks behind the first one, and a page.
const LONG: u64 = 3 * CHUNK + 100;

fn create(fs: &Fs, name: &str) -> Ino {
    let attr = fs.create(Ino::ROOT, name.as_bytes(), CreateKind::File, 0o600, OWNER);
    let ino = attr.unwrap().ino;
    fs.forget(ino, 1);
    ino
}

/// The content of a file that `write_content` wrote.
fn content(len: u64, with: u8) -> Vec<u8> {
    let byte = |at: u64| (at / PAGE) as u8 ^ with;
    (0..len).map(byte).collect()
}

fn write_content(fs: &Fs, port: &mut IoChannel, ino: Ino, len: u64, with: u8) {
    let bytes = Bytes::from(content(len, with));
    fs.write(port, ino, Some(0), &bytes, false).unwrap();
}

#[track_caller]
fn check(fs: &Fs, port: &mut IoChannel, ino: Ino, expected: &[u8]) {
    let found = fs.read(port, ino, 0, 1 << 27).unwrap();
    assert_eq!(found.len(), expected.len());
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "of inode {}", ino.0);
}

fn copy(fs: &Fs, port: &mut IoChannel, from: Ino, to: Ino) {
    let size = fs.attr(from).unwrap().size;
    assert_eq!(fs.copy(port, (from, 0), (to, 0), u64::MAX / 2), Ok(size));
}

/// A file of this length, and a copy that shares all of it.
struct SharedPair {
    memory: MemorySpace,
    fs: Fs,
    channel: IoChannel,
    one: Ino,
    other: Ino,
    /// Mapped pages before either file existed.
    base_pages: usize,
}

impl SharedPair {
    fn new(len: u64) -> SharedPair {
        SharedPair::with_limit(len, 0)
    }

    fn with_limit(len: u64, limit_bytes: u64) -> SharedPair {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port) = new_fs_with_limit(&memory, limit_bytes);
        let (one, other) = (create(&fs, "one"), create(&fs, "other"));
        let empty = memory.mapped_pages();
        write_content(&fs, &mut port, one, len, 1);
        let before = memory.mapped_pages();
        copy(&fs, &mut port, one, other);
        let more = memory.mapped_pages() - before;
        assert!(more <= 2, "{more} pages more");
        SharedPair {
            memory,
            fs,
            channel: port,
            one,
            other,
            base_pages: empty,
        }
    }

    #[track_caller]
    fn check(&mut self, one: &[u8], other: &[u8]) {
        check(&self.fs, &mut self.channel, self.one, one);
        check(&self.fs, &mut self.channel, self.other, other);
    }

    /// Pages that both files take together.
    fn pages(&self) -> usize {
        self.memory.mapped_pages() - self.base_pages
    }

    fn write(&mut self, ino: Ino, at: u64, bytes: &[u8]) {
        let bytes = Bytes::copy_from_slice(bytes);
        self.fs
            .write(&mut self.channel, ino, Some(at), &bytes, false)
            .unwrap();
    }

    /// Deletes both files, and checks that no page of them is left.
    #[track_caller]
    fn delete(self) {
        delete(&self.memory, &self.fs, self.base_pages);
    }
}

#[track_caller]
fn delete(memory: &MemorySpace, fs: &Fs, empty: usize) {
    for name in ["one", "other"] {
        fs.unlink(Ino::ROOT, name.as_bytes()).unwrap();
    }
    assert_eq!(memory.mapped_pages(), empty);
    // Pages of the inode table are in use before they are written.
    let (fs, _) = mount_and_free(memory);
    let used = fs.usage().used_bytes / PAGE;
    assert!(used < empty as u64 + 50, "{used} pages in use");
}

#[test]
fn shared_copy_takes_no_pages_until_written() {
    let mut pair = SharedPair::new(LONG);
    let whole = content(LONG, 1);
    pair.check(&whole, &whole);
    let attr = pair.fs.attr(pair.other).unwrap();
    assert_eq!(attr.pages, pair.fs.attr(pair.one).unwrap().pages);
    let shared = pair.pages();
    let used = pair.fs.usage().used_bytes / PAGE;
    pair.write(pair.other, CHUNK + 5, b"new");
    assert_eq!(pair.pages(), shared + 512, "one chunk more");
    assert_eq!(pair.fs.usage().used_bytes / PAGE, used + 512);
    let mut changed = whole.clone();
    changed[CHUNK as usize + 5..][..3].copy_from_slice(b"new");
    pair.check(&whole, &changed);
    // The first file alone names this chunk now, and changes it in place.
    pair.write(pair.one, CHUNK + 50, b"old");
    assert_eq!(pair.pages(), shared + 512);
    let mut first = whole;
    first[CHUNK as usize + 50..][..3].copy_from_slice(b"old");
    pair.check(&first, &changed);
    (pair.fs, pair.channel) = mount_and_free(&pair.memory);
    assert_eq!(pair.fs.usage().used_bytes / PAGE, used + 512);
    pair.check(&first, &changed);
    pair.delete();
}

#[test]
fn deleting_one_copy_keeps_the_other() {
    for gone in ["one", "other"] {
        let mut pair = SharedPair::new(LONG);
        let shared = pair.pages();
        pair.fs.unlink(Ino::ROOT, gone.as_bytes()).unwrap();
        let stays = match gone {
            "one" => pair.other,
            _ => pair.one,
        };
        assert!(pair.pages() + 2 >= shared, "a page of the other is freed");
        check(&pair.fs, &mut pair.channel, stays, &content(LONG, 1));
        (pair.fs, pair.channel) = mount_and_free(&pair.memory);
        check(&pair.fs, &mut pair.channel, stays, &content(LONG, 1));
        create(&pair.fs, gone);
        pair.delete();
    }
}

/// A change of one copy, with a crash at any point, leaves the other unchanged and leaks no page.
#[test]
fn changing_one_copy_leaves_the_other_unchanged() {
    type FileAction = fn(&Fs, &mut IoChannel, Ino) -> pagemesh_fs::Result<()>;
    let acts: [(&str, FileAction); 6] = [
        ("write", |fs, port, ino| {
            let bytes = Bytes::from_static(b"changed");
            fs.write(port, ino, Some(CHUNK + 9), &bytes, false)
                .map(drop)
        }),
        ("append", |fs, port, ino| {
            let bytes = Bytes::from_static(b"more");
            fs.write(port, ino, None, &bytes, false).map(drop)
        }),
        ("cut", |fs, port, ino| {
            fs.set_size(port, ino, CHUNK + 100).map(drop)
        }),
        ("cut all", |fs, port, ino| {
            fs.set_size(port, ino, 0).map(drop)
        }),
        ("punch", |fs, port, ino| {
            fs.allocate(port, ino, AllocateMode::Punch, 100, 2 * CHUNK)
        }),
        ("reserve", |fs, port, ino| {
            let how = AllocateMode::Reserve { keep_size: true };
            fs.allocate(port, ino, how, LONG, 3 * PAGE)
        }),
    ];
    for (name, act) in acts {
        let mut pair = SharedPair::new(LONG);
        let steps = pair.memory.steps();
        act(&pair.fs, &mut pair.channel, pair.other).unwrap();
        // Many of the steps copy one page each.
        let all: Vec<usize> = (steps..=pair.memory.steps()).collect();
        let some = all
            .iter()
            .enumerate()
            .filter(|(at, _)| *at < 20 || at % 97 == 0 || all.len() - at < 20);
        for (_, &step) in some {
            let old = pair.memory.after_steps(step);
            let (fs, mut port) = mount_and_free(&old);
            let used = fs.usage().used_bytes / PAGE;
            assert!(old.mapped_pages() as u64 <= used, "pages are leaked");
            check(&fs, &mut port, pair.one, &content(LONG, 1));
            delete(&old, &fs, pair.base_pages);
        }
        check(&pair.fs, &mut pair.channel, pair.one, &content(LONG, 1));
        let name_of = |pair: &SharedPair| pair.fs.attr(pair.other).unwrap().size;
        assert!(name_of(&pair) <= LONG + 4, "{name}");
        pair.delete();
    }
}

#[test]
fn long_files_are_shared_completely() {
    const SPANS: u64 = 40;
    let mut pair = SharedPair::new(SPANS * CHUNK);
    let whole = content(SPANS * CHUNK, 1);
    pair.check(&whole, &whole);
    pair.delete();
}

/// Bytes of the target behind the copied range stay.
#[test]
fn partial_copy_shares_only_whole_spans() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let (one, other) = (create(&fs, "one"), create(&fs, "other"));
    write_content(&fs, &mut port, one, 100_000, 1);
    fs.set_size(&mut port, other, 300_000).unwrap();
    let tail = Bytes::from(vec![9; 50_000]);
    fs.write(&mut port, other, Some(110_000), &tail, false)
        .unwrap();
    copy(&fs, &mut port, one, other);
    let mut expected = content(100_000, 1);
    expected.resize(110_000, 0);
    expected.extend_from_slice(&tail);
    expected.resize(300_000, 0);
    check(&fs, &mut port, other, &expected);
    // The last span of one file is not the last of the other.
    fs.set_size(&mut port, other, 0).unwrap();
    fs.set_size(&mut port, other, 110_000).unwrap();
    copy(&fs, &mut port, one, other);
    let mut expected = content(100_000, 1);
    expected.resize(110_000, 0);
    check(&fs, &mut port, other, &expected);
    fs.write(&mut port, other, Some(105_000), &tail, false)
        .unwrap();
    check(&fs, &mut port, one, &content(100_000, 1));
}

#[test]
fn write_to_shared_file_without_space_changes_nothing() {
    let used = SharedPair::new(LONG).fs.usage().used_bytes;
    let mut pair = SharedPair::with_limit(LONG, used + 100 * PAGE);
    let whole = content(LONG, 1);
    let bytes = Bytes::from_static(b"new");
    let mapped = pair.memory.mapped_pages();
    for room in [mapped + 1, mapped + 300] {
        pair.memory.set_room(Some(room));
        let refused = pair
            .fs
            .write(&mut pair.channel, pair.other, Some(CHUNK), &bytes, false);
        assert_eq!(refused.unwrap_err().errno(), Errno::NOSPC);
        assert_eq!(pair.memory.mapped_pages(), mapped);
    }
    pair.memory.set_room(None);
    let refused = pair
        .fs
        .write(&mut pair.channel, pair.other, Some(CHUNK), &bytes, false);
    assert_eq!(refused.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(pair.memory.mapped_pages(), mapped);
    pair.check(&whole, &whole);
    pair.fs.raise_limit(used + 600 * PAGE).unwrap();
    pair.write(pair.other, CHUNK, b"new");
    check(&pair.fs, &mut pair.channel, pair.one, &whole);
    pair.write(pair.one, CHUNK, b"old");
    let mut changed = [whole.clone(), whole];
    changed[0][CHUNK as usize..][..3].copy_from_slice(b"old");
    changed[1][CHUNK as usize..][..3].copy_from_slice(b"new");
    pair.check(&changed[0], &changed[1]);
    pair.delete();
}

/// Both files unshare spans concurrently, copy to each other, and are deleted.
#[test]
fn concurrent_share_and_unshare() {
    const ROUNDS: u64 = 40;
    let memory = MemorySpace::new(SIZE);
    let (fs, _) = new_fs(&memory);
    let (one, other) = (create(&fs, "one"), create(&fs, "other"));
    let empty = memory.mapped_pages();
    for round in 0..ROUNDS {
        let mut port = fs.open_channel().unwrap();
        let (from, to) = match round % 2 {
            0 => (one, other),
            _ => (other, one),
        };
        fs.set_size(&mut port, to, 0).unwrap();
        write_content(&fs, &mut port, from, 2 * CHUNK, 1);
        copy(&fs, &mut port, from, to);
        std::thread::scope(|threads| {
            for (ino, with) in [(one, 2), (other, 3)] {
                let fs = &fs;
                threads.spawn(move || {
                    let mut port = fs.open_channel().unwrap();
                    for at in [CHUNK + 7, 0, CHUNK] {
                        let bytes = Bytes::from(vec![with; 9]);
                        fs.write(&mut port, ino, Some(at), &bytes, false).unwrap();
                    }
                });
            }
            for (from, to) in [(one, other), (other, one)] {
                let fs = &fs;
                threads.spawn(move || {
                    let mut port = fs.open_channel().unwrap();
                    let copied = fs.copy(&mut port, (from, 0), (to, 2 * CHUNK), CHUNK);
                    copied.unwrap();
                });
            }
        });
        for (ino, with) in [(one, 2), (other, 3)] {
            let mut expected = content(2 * CHUNK, 1);
            expected[..9].fill(with);
            expected[CHUNK as usize..][..16].fill(with);
            let found = fs.read(&mut port, ino, 0, 2 * CHUNK as u32).unwrap();
            assert!(found == expected, "round {round}, inode {}", ino.0);
        }
    }
    let (fs, _) = mount_and_free(&memory);
    delete(&memory, &fs, empty);
}
