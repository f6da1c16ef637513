//! Several threads that write back what was stored into mappings, sync, cut, read and close
//! the same files at once, beside a model of each part of them.
//!
//! A part has versions, which its thread alone makes: bytes that tell which, or zeroes.
//! Whoever reads a part finds a version that is no older than what was acknowledged before,
//! and a crash leaves none that is older than what was written or synced by then.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_fs::{Allocate, Fs, Ino, Make, Port};
use pagemesh_fuzz::Random;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use support::memory::Memory;
use support::{OWNER, made, mounted, mounted_with_left};

const SIZE: u64 = 1 << 36;
const PAGE: u64 = 4096;
/// What changes as one: two in a page.
const PART: u64 = PAGE / 2;
const FILES: usize = 2;
const THREADS: u64 = 4;
/// Of each file that nobody cuts: more than go into it in one transaction.
const PARTS: u64 = 256;
/// Parts that follow each other and are of one thread.
const RUN: u64 = 8;
/// Behind them, of the thread that cuts the file.
const TAIL_PAGES_MAX: u64 = 70;
const OPERATIONS: u64 = 400;
const SEEDS: u64 = 24;
/// Every second seed syncs and closes so much less often: more is held than goes into a file
/// in one transaction.
const SELDOM: u64 = 10;
/// Crashes that are looked at, of each seed.
const CRASHES: u64 = 12;

/// What there is of a part.
#[derive(Default)]
struct Part {
    acknowledged: AtomicU64,
    /// The last version that is zeroes, begun or done.
    zeroes: AtomicU64,
}

struct File {
    ino: Ino,
    parts: Vec<Part>,
}

/// A crash behind so many changes leaves at least this version of a part.
struct Durable {
    steps: usize,
    file: usize,
    part: u64,
    version: u64,
}

struct Life {
    seed: u64,
    memory: Memory,
    fs: Fs,
    files: Vec<File>,
    durable: Mutex<Vec<Durable>>,
}

fn filled(part: u64, version: u64) -> Vec<u8> {
    (part << 32 | version)
        .to_le_bytes()
        .repeat(PART as usize / 8)
}

/// Which version the bytes of a part are; none: zeroes.
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

impl File {
    fn acknowledged(&self, part: u64) -> u64 {
        self.parts[part as usize].acknowledged.load(SeqCst)
    }

    /// What was found of a part is a version from `least` on.
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

/// One of the threads.
struct Hand<'l> {
    life: &'l Life,
    own: u64,
    port: Port,
    random: Random,
    /// What is behind the parts of the file that this one cuts.
    tail: Vec<u8>,
}

impl Hand<'_> {
    fn below(&mut self, end: u64) -> u64 {
        self.random.below(end as usize) as u64
    }

    /// Some parts that are its own.
    fn own_parts(&mut self, align: u64) -> (u64, u64) {
        let run = self.own + THREADS * self.below(PARTS / RUN / THREADS);
        let first = self.below(RUN / align) * align;
        let count = align * (1 + self.below((RUN - first) / align));
        (run * RUN + first, count)
    }

    fn bytes(&self, file: usize, first: u64, count: u64) -> Bytes {
        let next = |part| filled(part, self.life.files[file].acknowledged(part) + 1);
        (first..first + count)
            .flat_map(next)
            .collect::<Vec<u8>>()
            .into()
    }

    /// Another version of these parts is there. A crash leaves it if it is not only held.
    fn acknowledge(&self, file: usize, first: u64, count: u64, is_durable: bool) {
        let steps = self.life.memory.steps();
        for part in first..first + count {
            let acknowledged = &self.life.files[file].parts[part as usize].acknowledged;
            let version = acknowledged.load(SeqCst) + 1;
            acknowledged.store(version, SeqCst);
            if is_durable {
                self.life.durable.lock().unwrap().push(Durable {
                    steps,
                    file,
                    part,
                    version,
                });
            }
        }
    }

    fn seldom(&self) -> u64 {
        if self.life.seed % 2 == 1 { SELDOM } else { 1 }
    }

    fn is_time(&mut self) -> bool {
        let seldom = self.seldom();
        self.below(seldom) == 0
    }

    fn operation(&mut self) {
        let life = self.life;
        let file = self.below(FILES as u64) as usize;
        let (fs, ino) = (&life.fs, life.files[file].ino);
        match self.below(20) {
            0..8 => {
                let (first, count) = self.own_parts(2);
                let data = self.bytes(file, first, count);
                fs.hold(&mut self.port, ino, first * PART, &data).unwrap();
                self.acknowledge(file, first, count, false);
            }
            8..10 => {
                let (first, count) = self.own_parts(1);
                let data = self.bytes(file, first, count);
                let at = Some(first * PART);
                fs.write(&mut self.port, ino, at, &data, false).unwrap();
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
                fs.allocate(&mut self.port, ino, Allocate::Punch, at, len)
                    .unwrap();
                self.acknowledge(file, first, count, true);
            }
            11 if self.is_time() => self.sync(file),
            12 if self.is_time() => fs.sync_all(&mut self.port).unwrap(),
            13 if file as u64 == self.own => self.cut(file),
            14 if file as u64 == self.own => self.hold_tail(file),
            _ => self.look(file),
        }
        if (file as u64) == self.own {
            self.look_at_tail(file);
        }
    }

    fn sync(&mut self, file: usize) {
        let life = self.life;
        let is_own = |part: &u64| part / RUN % THREADS == self.own;
        let own = (0..PARTS).filter(is_own);
        let versions: Vec<(u64, u64)> = own
            .map(|part| (part, life.files[file].acknowledged(part)))
            .collect();
        life.fs.sync(&mut self.port, life.files[file].ino).unwrap();
        let steps = life.memory.steps();
        let durable = versions.into_iter().map(|(part, version)| Durable {
            steps,
            file,
            part,
            version,
        });
        life.durable.lock().unwrap().extend(durable);
    }

    /// Reads what may be anybody's.
    fn look(&mut self, file: usize) {
        let count = 1 + self.below(24);
        let first = self.below(PARTS - count);
        let known = &self.life.files[file];
        let least: Vec<u64> = (first..first + count)
            .map(|part| known.acknowledged(part))
            .collect();
        let (at, len) = (first * PART, count * PART);
        let read = self.life.fs.read(&mut self.port, known.ino, at, len as u32);
        let read = read.unwrap();
        assert_eq!(read.len() as u64, len);
        let told = format!("of file {file}, seed {}", self.life.seed);
        for ((part, bytes), least) in (first..).zip(read.chunks(PART as usize)).zip(least) {
            known.check(&told, part, bytes, least);
        }
    }

    fn cut(&mut self, file: usize) {
        let len = self.below(TAIL_PAGES_MAX * PAGE);
        let (fs, ino) = (&self.life.fs, self.life.files[file].ino);
        fs.set_size(&mut self.port, ino, PARTS * PART + len)
            .unwrap();
        self.tail.resize(len as usize, 0);
    }

    /// Pages as the kernel sends them, which ends where the file does.
    fn hold_tail(&mut self, file: usize) {
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
        let (fs, ino) = (&self.life.fs, self.life.files[file].ino);
        fs.hold(&mut self.port, ino, PARTS * PART + at as u64, &data)
            .unwrap();
    }

    /// Only this one has changed it.
    fn look_at_tail(&mut self, file: usize) {
        let (fs, ino) = (&self.life.fs, self.life.files[file].ino);
        let all = (2 * TAIL_PAGES_MAX * PAGE) as u32;
        let read = fs.read(&mut self.port, ino, PARTS * PART, all).unwrap();
        assert!(read == self.tail, "seed {}, file {file}", self.life.seed);
    }

    /// Opens the files for a few operations; who closes one last has what is held put there.
    fn work(&mut self) {
        let mut left = OPERATIONS;
        while left > 0 {
            for file in &self.life.files {
                self.life.fs.open(file.ino).unwrap();
            }
            let some = (1 + self.below(20 * self.seldom())).min(left);
            (0..some).for_each(|_| self.operation());
            left -= some;
            for file in &self.life.files {
                self.life.fs.release(file.ino);
            }
        }
    }
}

impl Life {
    fn new(seed: u64) -> Life {
        let memory = Memory::new(SIZE);
        let (fs, mut port) = made(&memory);
        let files = (0..FILES).map(|number| {
            let name = format!("f{number}");
            let made = fs.create(Ino::ROOT, name.as_bytes(), Make::File, 0o600, OWNER);
            let ino = made.unwrap().ino;
            fs.set_size(&mut port, ino, PARTS * PART).unwrap();
            let parts = (0..PARTS).map(|_| Part::default()).collect();
            File { ino, parts }
        });
        Life {
            seed,
            files: files.collect(),
            memory,
            fs,
            durable: Mutex::default(),
        }
    }

    /// A mount of what a crash left has of each part what was durable by then.
    fn check_left(&self, steps: usize, fs: &Fs, port: &mut Port) {
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

fn live(seed: u64) {
    let life = Life::new(seed);
    let begun = life.memory.steps() as u64;
    let tails: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let hands = (0..THREADS).map(|own| {
            let life = &life;
            scope.spawn(move || {
                let mut hand = Hand {
                    life,
                    own,
                    port: life.fs.port().unwrap(),
                    random: Random::new(seed * THREADS + own),
                    tail: vec![],
                };
                hand.work();
                hand.tail
            })
        });
        let hands: Vec<_> = hands.collect();
        hands.into_iter().map(|hand| hand.join().unwrap()).collect()
    });
    assert_eq!(life.fs.held_pages(), 0, "seed {seed}: nobody has them open");
    // A crash now leaves everything.
    let left = life.memory.after_now();
    let (fs, mut port) = mounted(&left);
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
        let left = life.memory.after(steps as usize);
        let (fs, mut port) = mounted_with_left(&left);
        life.check_left(steps as usize, &fs, &mut port);
    }
}

#[test]
fn threads_hold_sync_cut_read_and_close_at_once() {
    for seed in 0..SEEDS {
        live(seed);
    }
}
