//! Several threads that write back mapped pages, sync, truncate, read and close the same files
//! concurrently, compared with a model of each part.
//!
//! A part has versions, made by one thread only: bytes that encode the version, or zeroes. A reader
//! finds a version that is no older than the last acknowledged one. A crash leaves none that is
//! older than the last one written or synced.

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, CreateKind, Fs, Ino, IoChannel};
use pagemesh_fuzz::Random;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use support::memory::MemorySpace;
use support::{OWNER, mount_and_free, mount_with_leftovers, new_fs};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
/// The unit that changes atomically: two per page.
const PART: u64 = PAGE / 2;
const FILES: usize = 2;
const THREADS: u64 = 4;
/// Parts of each file that are never truncated: more than one transaction holds.
const PARTS: u64 = 256;
/// Consecutive parts of one thread.
const RUN_PARTS: u64 = 8;
/// Pages behind the parts, of the thread that truncates the file.
const TAIL_PAGES_MAX: u64 = 70;
const OPERATIONS: u64 = 400;
const SEEDS: u64 = 24;
/// Every second seed syncs and closes this many times less often, so that more pages are buffered
/// than one transaction holds.
const SELDOM_FACTOR: u64 = 10;
/// Crashes checked per seed.
const CRASHES: u64 = 12;

/// The state of a part.
#[derive(Default)]
struct PartState {
    acknowledged: AtomicU64,
    /// The last version that is zeroes, begun or completed.
    zeroes: AtomicU64,
}

struct PartFile {
    ino: Ino,
    parts: Vec<PartState>,
}

/// A crash after this many changes leaves at least this version of a part.
struct DurableVersion {
    steps: usize,
    file: usize,
    part: u64,
    version: u64,
}

struct MmapScenario {
    seed: u64,
    memory: MemorySpace,
    fs: Fs,
    files: Vec<PartFile>,
    durable: Mutex<Vec<DurableVersion>>,
}

fn part_bytes(part: u64, version: u64) -> Vec<u8> {
    (part << 32 | version)
        .to_le_bytes()
        .repeat(PART as usize / 8)
}

/// The version that the bytes of a part encode; `None` for zeroes.
fn version_of(at: &str, part: u64, bytes: &[u8]) -> Option<u64> {
    let mut words = bytes.chunks(8);
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "part {part} is torn {at}");
    let word = u64::from_le_bytes(first.try_into().unwrap());
    assert!(
        word == 0 || word >> 32 == part,
        "part {part} {at}: {word:x}"
    );
    (word != 0).then_some(word & 0xffff_ffff)
}

impl PartFile {
    fn acknowledged(&self, part: u64) -> u64 {
        self.parts[part as usize].acknowledged.load(SeqCst)
    }

    /// Checks that the bytes of a part are a version from `least` on.
    fn check(&self, at: &str, part: u64, bytes: &[u8], least: u64) {
        match version_of(at, part, bytes) {
            Some(version) => {
                let most = self.acknowledged(part) + 1;
                assert!(
                    (least..=most).contains(&version),
                    "part {part} {at}: {version}, not {least} to {most}"
                );
            }
            None => {
                let zeroes = self.parts[part as usize].zeroes.load(SeqCst);
                assert!(zeroes >= least, "part {part} {at}: zeroes after {least}");
            }
        }
    }
}

/// A thread of the test.
struct ScenarioThread<'l> {
    scenario: &'l MmapScenario,
    thread_index: u64,
    channel: IoChannel,
    random: Random,
    /// The bytes behind the parts in the file that this thread truncates.
    tail: Vec<u8>,
}

impl ScenarioThread<'_> {
    fn below(&mut self, end: u64) -> u64 {
        self.random.below(end as usize) as u64
    }

    /// Some parts of this thread.
    fn own_parts(&mut self, align: u64) -> (u64, u64) {
        let run = self.thread_index + THREADS * self.below(PARTS / RUN_PARTS / THREADS);
        let first = self.below(RUN_PARTS / align) * align;
        let count = align * (1 + self.below((RUN_PARTS - first) / align));
        (run * RUN_PARTS + first, count)
    }

    fn bytes(&self, file: usize, first: u64, count: u64) -> Bytes {
        let next = |part| part_bytes(part, self.scenario.files[file].acknowledged(part) + 1);
        (first..first + count)
            .flat_map(next)
            .collect::<Vec<u8>>()
            .into()
    }

    /// Records a new version of these parts. A crash leaves it if it is durable.
    fn acknowledge(&self, file: usize, first: u64, count: u64, is_durable: bool) {
        let steps = self.scenario.memory.steps();
        for part in first..first + count {
            let acknowledged = &self.scenario.files[file].parts[part as usize].acknowledged;
            let version = acknowledged.load(SeqCst) + 1;
            acknowledged.store(version, SeqCst);
            if is_durable {
                self.scenario.durable.lock().unwrap().push(DurableVersion {
                    steps,
                    file,
                    part,
                    version,
                });
            }
        }
    }

    fn seldom(&self) -> u64 {
        if self.scenario.seed % 2 == 1 {
            SELDOM_FACTOR
        } else {
            1
        }
    }

    fn happens_now(&mut self) -> bool {
        let seldom = self.seldom();
        self.below(seldom) == 0
    }

    fn operation(&mut self) {
        let life = self.scenario;
        let file = self.below(FILES as u64) as usize;
        let (fs, ino) = (&life.fs, life.files[file].ino);
        match self.below(20) {
            0..8 => {
                let (first, count) = self.own_parts(2);
                let data = self.bytes(file, first, count);
                fs.buffer_mmap_write(&mut self.channel, ino, first * PART, &data)
                    .unwrap();
                self.acknowledge(file, first, count, false);
            }
            8..10 => {
                let (first, count) = self.own_parts(1);
                let data = self.bytes(file, first, count);
                let at = Some(first * PART);
                fs.write(&mut self.channel, ino, at, &data, false).unwrap();
                self.acknowledge(file, first, count, true);
            }
            10 => {
                let (first, count) = self.own_parts(1);
                for part in first..first + count {
                    let part = &life.files[file].parts[part as usize];
                    part.zeroes
                        .store(part.acknowledged.load(SeqCst) + 1, SeqCst);
                }
                let (at, len) = (first * PART, count * PART);
                fs.allocate(&mut self.channel, ino, AllocateMode::Punch, at, len)
                    .unwrap();
                self.acknowledge(file, first, count, true);
            }
            11 if self.happens_now() => self.sync(file),
            12 if self.happens_now() => fs.sync_all(&mut self.channel).unwrap(),
            13 if file as u64 == self.thread_index => self.resize_tail(file),
            14 if file as u64 == self.thread_index => self.write_tail_mmap(file),
            _ => self.check_random_parts(file),
        }
        if (file as u64) == self.thread_index {
            self.check_tail(file);
        }
    }

    fn sync(&mut self, file: usize) {
        let life = self.scenario;
        let is_own = |part: &u64| part / RUN_PARTS % THREADS == self.thread_index;
        let own = (0..PARTS).filter(is_own);
        let versions: Vec<(u64, u64)> = own
            .map(|part| (part, life.files[file].acknowledged(part)))
            .collect();
        life.fs
            .sync(&mut self.channel, life.files[file].ino)
            .unwrap();
        let steps = life.memory.steps();
        let durable = versions.into_iter().map(|(part, version)| DurableVersion {
            steps,
            file,
            part,
            version,
        });
        life.durable.lock().unwrap().extend(durable);
    }

    /// Reads parts of any thread.
    fn check_random_parts(&mut self, file: usize) {
        let count = 1 + self.below(24);
        let first = self.below(PARTS - count);
        let known = &self.scenario.files[file];
        let least: Vec<u64> = (first..first + count)
            .map(|part| known.acknowledged(part))
            .collect();
        let (at, len) = (first * PART, count * PART);
        let read = self
            .scenario
            .fs
            .read(&mut self.channel, known.ino, at, len as u32);
        let read = read.unwrap();
        assert_eq!(read.len() as u64, len);
        let told = format!("of file {file}, seed {}", self.scenario.seed);
        for ((part, bytes), least) in (first..).zip(read.chunks(PART as usize)).zip(least) {
            known.check(&told, part, bytes, least);
        }
    }

    fn resize_tail(&mut self, file: usize) {
        let len = self.below(TAIL_PAGES_MAX * PAGE);
        let (fs, ino) = (&self.scenario.fs, self.scenario.files[file].ino);
        fs.set_size(&mut self.channel, ino, PARTS * PART + len)
            .unwrap();
        self.tail.resize(len as usize, 0);
    }

    /// Pages that the kernel writes back, up to the end of the file.
    fn write_tail_mmap(&mut self, file: usize) {
        let pages = (self.tail.len() as u64).div_ceil(PAGE);
        if pages == 0 {
            return;
        }
        let first = self.below(pages);
        let end = ((first + 1 + self.below(60)) * PAGE).min(self.tail.len() as u64);
        let at = (first * PAGE) as usize;
        let fill = 1 + self.below(255) as u8;
        self.tail[at..end as usize].fill(fill);
        let data = Bytes::copy_from_slice(&self.tail[at..end as usize]);
        let (fs, ino) = (&self.scenario.fs, self.scenario.files[file].ino);
        fs.buffer_mmap_write(&mut self.channel, ino, PARTS * PART + at as u64, &data)
            .unwrap();
    }

    /// Only this thread has changed the tail.
    fn check_tail(&mut self, file: usize) {
        let (fs, ino) = (&self.scenario.fs, self.scenario.files[file].ino);
        let all = (2 * TAIL_PAGES_MAX * PAGE) as u32;
        let read = fs.read(&mut self.channel, ino, PARTS * PART, all).unwrap();
        assert!(
            read == self.tail,
            "seed {}, file {file}",
            self.scenario.seed
        );
    }

    /// Opens the files for a few operations; the last close of a file flushes it.
    fn run_operations(&mut self) {
        let mut left = OPERATIONS;
        while left > 0 {
            for file in &self.scenario.files {
                self.scenario.fs.open(file.ino).unwrap();
            }
            let some = (1 + self.below(20 * self.seldom())).min(left);
            (0..some).for_each(|_| self.operation());
            left -= some;
            for file in &self.scenario.files {
                self.scenario.fs.release(file.ino);
            }
        }
    }
}

impl MmapScenario {
    fn new(seed: u64) -> MmapScenario {
        let memory = MemorySpace::new(SIZE);
        let (fs, mut port) = new_fs(&memory);
        let files = (0..FILES).map(|number| {
            let name = format!("f{number}");
            let made = fs.create(Ino::ROOT, name.as_bytes(), CreateKind::File, 0o600, OWNER);
            let ino = made.unwrap().ino;
            fs.set_size(&mut port, ino, PARTS * PART).unwrap();
            let parts = (0..PARTS).map(|_| PartState::default()).collect();
            PartFile { ino, parts }
        });
        MmapScenario {
            seed,
            files: files.collect(),
            memory,
            fs,
            durable: Mutex::default(),
        }
    }

    /// A mount after a crash has at least the durable version of each part.
    fn check_after_crash(&self, steps: usize, fs: &Fs, port: &mut IoChannel) {
        let durable = self.durable.lock().unwrap();
        let mut least = vec![[0; PARTS as usize]; FILES];
        for it in durable.iter().filter(|it| it.steps <= steps) {
            let known = &mut least[it.file][it.part as usize];
            *known = it.version.max(*known);
        }
        for (number, (file, least)) in self.files.iter().zip(&least).enumerate() {
            let told = format!("of file {number}, seed {}, after {steps}", self.seed);
            let ino = fs.lookup(Ino::ROOT, format!("f{number}").as_bytes());
            let ino = ino.unwrap().ino;
            let read = fs.read(port, ino, 0, (PARTS * PART) as u32).unwrap();
            for (part, bytes) in (0..).zip(read.chunks(PART as usize)) {
                file.check(&told, part, bytes, least[part as usize]);
            }
        }
    }
}

fn run_seed(seed: u64) {
    let life = MmapScenario::new(seed);
    let begun = life.memory.steps() as u64;
    let tails: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let hands = (0..THREADS).map(|own| {
            let life = &life;
            scope.spawn(move || {
                let mut hand = ScenarioThread {
                    scenario: life,
                    thread_index: own,
                    channel: life.fs.open_channel().unwrap(),
                    random: Random::new(seed * THREADS + own),
                    tail: vec![],
                };
                hand.run_operations();
                hand.tail
            })
        });
        let hands: Vec<_> = hands.collect();
        hands.into_iter().map(|hand| hand.join().unwrap()).collect()
    });
    assert_eq!(
        life.fs.mmap_dirty_pages(),
        0,
        "seed {seed}: all files are closed"
    );
    // A crash now leaves all data.
    let left = life.memory.snapshot();
    let (fs, mut port) = mount_and_free(&left);
    for (number, (file, tail)) in life.files.iter().zip(&tails).enumerate() {
        let all = fs.read(&mut port, file.ino, 0, u32::MAX >> 4).unwrap();
        assert!(all[(PARTS * PART) as usize..] == tail[..], "seed {seed}");
        for (part, bytes) in (0..PARTS).zip(all.chunks(PART as usize)) {
            let told = format!("of file {number}, seed {seed}, at the end");
            file.check(&told, part, bytes, file.acknowledged(part));
        }
    }
    let mut random = Random::new(seed);
    for _ in 0..CRASHES {
        let steps = begun + random.below((life.memory.steps() as u64 - begun) as usize) as u64;
        let left = life.memory.after_steps(steps as usize);
        let (fs, mut port) = mount_with_leftovers(&left);
        life.check_after_crash(steps as usize, &fs, &mut port);
    }
}

#[test]
fn concurrent_mmap_sync_truncate_read_and_close() {
    for seed in 0..SEEDS {
        run_seed(seed);
    }
}
