//! Unstable writes of NFS on a pool that becomes full: they are lost, their clients learn it, and the file system goes on.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{
    Attr, CreateKind, FileId, Fs, FsError, Ino, IoChannel, Pin, SeekTarget, WccReply,
};
use pagemesh_fs_model::{OpGenerator, OpScale, read};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use support::memory::MemorySpace;
use support::server::owner;
use support::{OWNER, mount_and_free, new_fs};

const SIZE: u64 = 1 << 36;
const PAGE: usize = 4096;
/// Pages of the reserve.
const RESERVE: usize = 256;

fn pattern(first: usize, len: usize) -> Vec<u8> {
    (first..first + len)
        .map(|at| (at % 251 + 1) as u8)
        .collect()
}

/// A file system with a write cache below it, as a server of NFS uses it.
struct CachedServer {
    memory: MemorySpace,
    fs: Arc<Fs>,
    channel: IoChannel,
    files: Vec<Ino>,
}

impl CachedServer {
    fn new() -> CachedServer {
        let memory = MemorySpace::new(SIZE).with_write_cache();
        let (fs, channel) = new_fs(&memory);
        CachedServer {
            memory,
            fs: Arc::new(fs),
            channel,
            files: Vec::new(),
        }
    }

    fn file(&mut self, name: &str) -> Pin {
        let kind = CreateKind::File;
        let made = self
            .fs
            .create(Ino::ROOT, name.as_bytes(), kind, 0o600, OWNER);
        let made = made.unwrap();
        let pin = self.fs.pin(made.file_id()).unwrap();
        self.fs.forget(made.ino, 1);
        self.files.push(made.ino);
        pin
    }

    /// Writes without a sync, for example at the end of the file: then the change is in the batch alone.
    fn try_write(&self, pin: &Pin, at: usize, data: Vec<u8>) -> WccReply<u32> {
        self.fs
            .write_at(pin, at as u64, &Bytes::from(data), false, &owner())
    }

    fn write(&self, pin: &Pin, at: usize, data: Vec<u8>) -> Attr {
        let len = data.len();
        let reply = self.try_write(pin, at, data);
        assert_eq!(reply.result.unwrap() as usize, len);
        reply.wcc.after.unwrap()
    }

    fn commit(&mut self, pin: &Pin) -> u64 {
        self.fs.commit(&mut self.channel, pin).result.unwrap()
    }

    fn attr(&self, pin: &Pin) -> Attr {
        self.fs.attr_of(pin.id()).unwrap()
    }

    fn content(&self, pin: &Pin) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let reply = self.fs.read_at(pin, all.len() as u64, 1 << 20, &owner());
            let read = reply.result.unwrap();
            all.extend(read.bytes);
            if read.is_eof {
                return all;
            }
        }
    }

    /// No request that needs room succeeds while `run` runs.
    fn while_full<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        self.memory.set_room(Some(0));
        let value = run(self);
        self.memory.set_room(None);
        value
    }

    /// Frees what is to be freed, and fills the reserve.
    fn settle(&self) {
        while self.fs.free_deferred_piece() {}
    }

    /// A file counts its mapped pages, unless it is removed.
    #[track_caller]
    fn check_page_count(&mut self, ino: Ino) {
        let Ok(attr) = self.fs.attr(ino) else { return };
        let (mut at, mut pages) = (0, 0);
        while let Ok(data) = self.seek(ino, at, SeekTarget::Data) {
            at = self.seek(ino, data, SeekTarget::Hole).unwrap();
            pages += at.div_ceil(PAGE as u64) - data / PAGE as u64;
        }
        assert_eq!(attr.pages, pages, "pages of {attr:?}");
    }

    fn seek(&mut self, ino: Ino, at: u64, what: SeekTarget) -> pagemesh_fs::Result<u64> {
        self.fs.seek(&mut self.channel, ino, at, what)
    }

    /// A mount finds the state that this one shows. No change waits.
    #[track_caller]
    fn check_remount(&mut self) {
        assert_eq!(self.fs.uncommitted_changes().pages, 0);
        self.settle();
        let now = read(&self.fs, &mut self.channel).unwrap();
        for ino in self.files.clone() {
            self.check_page_count(ino);
        }
        let (fs, mut channel) = mount_and_free(&self.memory.snapshot());
        now.check(&read(&fs, &mut channel).unwrap()).unwrap();
        assert_eq!(fs.usage().used_bytes, self.fs.usage().used_bytes);
        let mapped = self.memory.mapped_pages() * PAGE;
        assert!(mapped as u64 <= fs.usage().used_bytes);
    }
}

/// Appends to a file of `old` bytes, and loses the append. Then the client writes again.
fn check_lost_append(old: usize, len: usize) {
    let mut server = CachedServer::new();
    let pin = server.file("file");
    if old > 0 {
        server.write(&pin, 0, pattern(0, old));
    }
    let losses = server.commit(&pin);
    let (used, before) = (server.fs.usage().used_bytes, server.attr(&pin));
    let seen = server.write(&pin, old, pattern(old, len));
    assert_eq!(seen.size as usize, old + len);
    assert!(server.fs.uncommitted_changes().pages > 0);

    let lost = server.while_full(|server| server.commit(&pin));
    assert_eq!((lost, server.fs.lost_writes()), (losses + 1, losses + 1));
    let after = server.attr(&pin);
    assert_eq!(after.size, before.size);
    assert!(
        after.ctime > seen.ctime,
        "the change looks like the lost one"
    );
    assert!(server.content(&pin) == pattern(0, old));
    server.settle();
    assert_eq!(server.fs.usage().used_bytes, used);
    assert_eq!(server.attr(&pin).pages, before.pages);
    server.check_remount();

    // Bytes of the lost append do not come back behind a shorter one.
    server.write(&pin, old, vec![9; 10]);
    server
        .fs
        .set_size(&mut server.channel, pin.id().ino, (old + len) as u64)
        .unwrap();
    let mut expected = pattern(0, old);
    expected.extend([9; 10]);
    expected.resize(old + len, 0);
    assert!(server.content(&pin) == expected);
    server.write(&pin, old, pattern(old, len));
    assert_eq!(server.commit(&pin), lost);
    assert!(server.content(&pin) == pattern(0, old + len));
    server.check_remount();
}

#[test]
fn full_pool_takes_unstable_appends_back() {
    check_lost_append(0, 3000);
    check_lost_append(5000, 3000);
    check_lost_append(5000, 9 * PAGE);
    check_lost_append(100 * PAGE, 700);
}

/// Most of a long append lies outside of the batch.
#[test]
fn full_pool_frees_pages_of_a_lost_long_append() {
    check_lost_append(0, 200 * PAGE);
    check_lost_append(5000, 200 * PAGE + 100);
}

#[test]
fn lost_unstable_writes_fail_syncs_of_their_files() {
    let mut server = CachedServer::new();
    let (one, other) = (server.file("one"), server.file("other"));
    for is_concerned in [true, false] {
        server.settle();
        server.write(&one, 0, pattern(0, 3000));
        let losses = server.fs.lost_writes();
        let synced = server.while_full(|server| {
            let of = if is_concerned { &one } else { &other };
            server.fs.sync(&mut server.channel, of.id().ino)
        });
        let failed = synced.map_err(|error| error.errno());
        assert_eq!(
            failed,
            if is_concerned {
                Err(Errno::NOSPC)
            } else {
                Ok(())
            }
        );
        assert_eq!(server.fs.lost_writes(), losses + 1);
        server.fs.sync(&mut server.channel, one.id().ino).unwrap();
        assert_eq!(server.attr(&one).size, 0);
    }
    server.settle();
    server.write(&one, 0, pattern(0, 3000));
    let synced = server.while_full(|server| server.fs.sync_all(&mut server.channel));
    assert_eq!(synced.unwrap_err().errno(), Errno::NOSPC);
    server.check_remount();
}

/// Calls that need the state of a file on the volume get the state before the lost writes.
#[test]
fn read_after_a_lost_append_returns_the_old_content() {
    let mut server = CachedServer::new();
    let pin = server.file("file");
    server.write(&pin, 0, pattern(0, 3000));
    server.commit(&pin);
    server.write(&pin, 3000, pattern(3000, 3000));
    let ino = pin.id().ino;
    let end = server.while_full(|server| server.seek(ino, 0, SeekTarget::Hole));
    assert_eq!(end.unwrap(), 3000);
    assert!(server.content(&pin) == pattern(0, 3000));
    assert_eq!(server.fs.lost_writes(), 1);
    server.check_remount();
}

/// Deferred changes of a mount were promised to survive in order.
#[test]
fn lost_deferred_change_beside_unstable_ones_stops_all() {
    let mut server = CachedServer::new();
    let pin = server.file("file");
    server
        .fs
        .set_commit_interval(Duration::from_secs(3600), Box::new(|| {}));
    server.write(&pin, 0, pattern(0, 3000));
    let other = server.fs.create_opened(Ino::ROOT, b"other", 0o600, OWNER);
    other.unwrap();
    server.while_full(|server| {
        let committed = server.fs.commit(&mut server.channel, &pin);
        committed.result.expect_err("a create is lost");
    });
    let late = server.try_write(&pin, 0, vec![1; 10]);
    assert!(matches!(late.result, Err(FsError::Stopped(_))));
}

/// The batch of unstable writes also holds a change that a caller waits for.
#[test]
fn waiting_change_fails_with_lost_unstable_writes() {
    let mut server = CachedServer::new();
    let pin = server.file("file");
    server.write(&pin, 0, pattern(0, 3000));
    let made = server.while_full(|server| {
        server
            .fs
            .create(Ino::ROOT, b"new", CreateKind::File, 0o600, OWNER)
    });
    assert_eq!(made.unwrap_err().errno(), Errno::NOSPC);
    assert_eq!((server.attr(&pin).size, server.fs.lost_writes()), (0, 1));
    server.check_remount();
    server.file("new");
}

/// The times of an overwrite are in the batch of a later append. The file has no user when the batch fails.
#[test]
fn times_before_a_lost_append_stay() {
    let mut server = CachedServer::new();
    let pin = server.file("file");
    server.write(&pin, 0, pattern(0, 3000));
    server.commit(&pin);
    let overwritten = server.write(&pin, 0, vec![7; 100]);
    server.content(&pin);
    let read = server.attr(&pin).atime;
    server.write(&pin, 3000, pattern(3000, 3000));
    let id: FileId = pin.id();
    drop(pin);
    server.while_full(|server| server.fs.sync_all(&mut server.channel).unwrap_err());
    let now = server.fs.attr_of(id).unwrap();
    assert!(now.mtime > overwritten.mtime);
    assert_eq!(now.atime, read);
    server.fs.flush_all_times().unwrap();
    let (fs, _) = mount_and_free(&server.memory.snapshot());
    assert_eq!(fs.attr_of(id).unwrap().mtime, now.mtime);
}

/// The last user of a removed file frees it while its last writes are not stored.
#[test]
fn removed_file_with_lost_appends_is_freed_once() {
    for (old, len) in [(0, 9000), (5 * PAGE, 3000), (30 * PAGE, 20 * PAGE)] {
        let mut server = CachedServer::new();
        let other = server.file("other");
        let pin = server.file("file");
        server.write(&pin, 0, pattern(0, old.max(1)));
        server.commit(&pin);
        server.fs.unlink(Ino::ROOT, b"file").unwrap();
        server.write(&pin, old.max(1), pattern(old.max(1), len));
        // Room to free the file, but not for its last writes.
        let room = server.memory.mapped_pages() - RESERVE;
        server.memory.set_room(Some(room));
        drop(pin);
        assert_eq!(server.fs.lost_writes(), 1);
        server.memory.set_room(None);
        server.write(&other, 0, pattern(0, 40 * PAGE));
        server.commit(&other);
        server.settle();
        assert_eq!(
            (server.fs.usage().inodes, server.fs.deferred_inodes()),
            (2 + 1, 0)
        );
        assert!(server.content(&other) == pattern(0, 40 * PAGE));
        server.check_remount();
    }
}

/// A write begins at the end of unstable writes. Before it joins their batch, that batch is full and fails.
#[test]
fn write_behind_lost_writes_is_planned_again() {
    let mut server = CachedServer::new();
    let (pin, filler) = (server.file("file"), server.file("filler"));
    server.write(&pin, 0, pattern(0, 46 * PAGE));
    server.commit(&pin);
    server.write(&pin, 46 * PAGE, pattern(46 * PAGE, PAGE));
    server.write(&filler, 0, pattern(0, 22 * PAGE));
    assert!(server.fs.uncommitted_changes().pages > 23);
    // Room for the second batch, but not for the first one.
    let room = server.memory.mapped_pages() - RESERVE + 10;
    server.memory.set_room(Some(room));
    let data = vec![5; 46 * PAGE + 100];
    let written = server.write(&pin, PAGE, data);
    assert_eq!(written.size as usize, 47 * PAGE + 100);
    server.memory.set_room(None);
    assert_eq!(server.fs.lost_writes(), 1);
    server.commit(&pin);
    let mut expected = pattern(0, PAGE);
    expected.extend(vec![5; 46 * PAGE + 100]);
    assert!(server.content(&pin) == expected);
    assert_eq!(server.attr(&pin).pages, 48);
    assert_eq!(server.attr(&filler).size, 0);
    server.check_remount();
}

/// As above, for the first transaction of a long append.
#[test]
fn long_append_behind_lost_writes_is_planned_again() {
    let mut server = CachedServer::new();
    // The hook does nothing, so that batches become full.
    server
        .fs
        .set_commit_interval(Duration::from_secs(3600), Box::new(|| {}));
    let (pin, filler) = (server.file("file"), server.file("filler"));
    // So many that a further span changes a page of the map.
    let old = 1001 * PAGE;
    for at in (0..old).step_by(100 * PAGE) {
        let len = (old - at).min(100 * PAGE);
        server.write(&pin, at, pattern(at, len));
    }
    server.commit(&pin);
    server.write(&pin, old, pattern(old, PAGE));
    let mut at = 0;
    while server.fs.uncommitted_changes().pages < 64 {
        server.write(&filler, at, pattern(at, PAGE));
        at += PAGE;
        assert!(at <= 64 * PAGE);
    }
    let room = server.memory.mapped_pages() - RESERVE + 10;
    server.memory.set_room(Some(room));
    let end = old + PAGE;
    let reply = server.try_write(&pin, end, pattern(end, 200 * PAGE));
    assert_eq!(reply.result.unwrap_err().errno(), Errno::NOSPC);
    server.memory.set_room(None);
    assert_eq!(server.fs.lost_writes(), 1);
    let attr = server.attr(&pin);
    assert_eq!((attr.size as usize, attr.pages), (old, 1001));
    server.check_remount();
}

/// Files with unstable writes, and the contents that each may have after a loss.
struct History {
    server: CachedServer,
    rng: OpGenerator,
    files: Vec<(Pin, Vec<Vec<u8>>)>,
    losses: u64,
}

impl History {
    fn new(seed: u64) -> History {
        let mut server = CachedServer::new();
        let files = [0, 1, 2].map(|number| {
            let pin = server.file(&number.to_string());
            (pin, vec![Vec::new()])
        });
        History {
            files: files.into(),
            server,
            rng: OpGenerator::new(seed, OpScale::Large),
            losses: 0,
        }
    }

    /// Limits the room, from none to some more than is in use with the reserve.
    fn limit_room(&mut self) {
        let mapped = self.server.memory.mapped_pages();
        let room = match self.rng.below(4) {
            0 => 0,
            1 => mapped,
            2 => mapped + self.rng.below(60) as usize,
            _ => mapped - RESERVE.min(mapped) + self.rng.below(60) as usize,
        };
        self.server.memory.set_room(Some(room));
    }

    /// Writes to a file. The write may be lost with earlier ones, or succeed after their loss.
    fn write(&mut self, number: usize) {
        let states = &self.files[number].1;
        let size = states.last().unwrap().len();
        let len = match self.rng.below(8) {
            0 => 150 * PAGE + self.rng.below(9000) as usize,
            1 => self.rng.below(60 * PAGE as u64) as usize,
            _ => 1 + self.rng.below(9000) as usize,
        };
        let at = match self.rng.below(4) {
            0 => self.rng.below(size as u64 + 1) as usize,
            _ => size,
        };
        let data = pattern(self.rng.below(250) as usize, len);
        let reply = self
            .server
            .try_write(&self.files[number].0, at, data.clone());
        let (pin, states) = &mut self.files[number];
        match reply.result {
            Ok(count) => {
                let data = &data[..count as usize];
                let write = |state: &Vec<u8>| {
                    let mut state = state.clone();
                    state.resize(state.len().max(at + data.len()), 0);
                    state[at..at + data.len()].copy_from_slice(data);
                    state
                };
                match self.server.fs.lost_writes() == self.losses {
                    true => states.push(write(states.last().unwrap())),
                    false => states.extend(states.clone().iter().map(write)),
                }
            }
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC);
                // Pages before the one that failed may be overwritten.
                let found = self.server.content(pin);
                let is_old_or_new = |(place, byte): (usize, &u8)| {
                    let old = |state: &Vec<u8>| state.get(place) == Some(byte);
                    let new = place.checked_sub(at).and_then(|place| data.get(place));
                    new == Some(byte) || states.iter().any(old)
                };
                assert!(found.iter().enumerate().all(is_old_or_new));
                states.push(found);
            }
        }
    }

    /// Compares each file with its states.
    fn check(&mut self, at: &str) {
        let losses = self.server.fs.lost_writes();
        let is_lost = losses != self.losses;
        self.losses = losses;
        let is_stored = self.server.fs.uncommitted_changes().pages == 0;
        for (number, (pin, states)) in self.files.iter_mut().enumerate() {
            let found = self.server.content(pin);
            let is_known = match is_lost {
                true => states.contains(&found),
                false => states.last() == Some(&found),
            };
            assert!(is_known, "{at}: file {number}, {} bytes", found.len());
            if is_lost || is_stored {
                *states = vec![found];
            }
        }
        if is_stored && self.rng.one_in(6) {
            self.server.memory.set_room(None);
            self.server.check_remount();
        }
    }

    fn run(&mut self, seed: u64) {
        for step in 0..60 {
            let at = format!("seed {seed}, step {step}");
            match self.rng.one_in(3) {
                true => self.limit_room(),
                false => {
                    self.server.memory.set_room(None);
                    self.server.settle();
                }
            }
            let number = self.rng.below(3) as usize;
            match self.rng.below(6) {
                0 => {
                    let pin = &self.files[number].0;
                    let committed = self.server.fs.commit(&mut self.server.channel, pin);
                    committed.result.unwrap();
                }
                1 => _ = self.server.fs.sync_all(&mut self.server.channel),
                _ => self.write(number),
            }
            self.check(&at);
        }
    }
}

#[test]
fn random_losses_leave_stored_contents() {
    let losses = (0..12).map(|seed| {
        let mut history = History::new(seed);
        history.run(seed);
        history.losses
    });
    let losses: u64 = losses.sum();
    println!("{losses} losses");
    assert!(losses > 12, "only {losses} losses");
}
