//! Reads of the volume by listings of directories and by reads of files.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{CreateKind, FileId, Fs, Ino};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use support::memory::{MemorySpace, wait};
use support::server::owner;
use support::{OWNER, clock, new_fs};

const SIZE: u64 = 1 << 36;
const FILES: u64 = 64;
/// Inodes in a page.
const INODES: u64 = 16;

/// The pages that were read, with the number of their reads, and the most reads that were in flight together.
#[derive(Default)]
struct ReadLog {
    pages: BTreeMap<u64, u32>,
    in_flight: usize,
    most_in_flight: usize,
}

/// A space that answers each request at the next reap, and logs reads.
#[derive(Clone)]
struct LoggedSpace {
    memory: MemorySpace,
    log: Arc<Mutex<ReadLog>>,
}

impl LoggedSpace {
    fn take(&self) -> ReadLog {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

impl Space for LoggedSpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(LoggedChannel {
            inner: self.memory.open()?,
            space: self.clone(),
        }))
    }
}

struct LoggedChannel {
    inner: Box<dyn Channel>,
    space: LoggedSpace,
}

impl Channel for LoggedChannel {
    fn submit(&mut self, token: Token, request: Request) {
        if let Request::Read { offset, len } = request {
            let mut log = self.space.log.lock().unwrap();
            for page in offset / 4096..(offset + u64::from(len)).div_ceil(4096) {
                *log.pages.entry(page).or_default() += 1;
            }
            log.in_flight += 1;
            log.most_in_flight = log.most_in_flight.max(log.in_flight);
        }
        self.inner.submit(token, request);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.space.log.lock().unwrap().in_flight = 0;
        self.inner.reap(into);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.inner.poll_fds(into);
    }
}

/// A file system with a directory of files, without pages in memory.
fn mounted() -> (LoggedSpace, Fs, FileId) {
    let memory = MemorySpace::new(SIZE);
    let (fs, port) = new_fs(&memory);
    let make = |parent, name: &[u8], kind| {
        let made = fs.create(parent, name, kind, 0o700, OWNER).unwrap();
        fs.forget(made.ino, 1);
        made.file_id()
    };
    let directory = make(Ino::ROOT, b"d", CreateKind::Directory);
    for number in 0..FILES {
        make(
            directory.ino,
            format!("{number}").as_bytes(),
            CreateKind::File,
        );
    }
    drop((fs, port));
    let space = LoggedSpace {
        memory,
        log: Arc::default(),
    };
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    fs.attr_of(directory).unwrap();
    space.take();
    (space, fs, directory)
}

#[test]
fn names_are_listed_without_reads_of_inodes() {
    let (space, fs, directory) = mounted();
    let mut names = Vec::new();
    let reply = fs.list_at(directory, 0, &owner(), |entry| {
        names.push(entry.name.clone());
        true
    });
    assert!(reply.result.unwrap());
    assert_eq!(names.len() as u64, FILES + 2);
    let log = space.take();
    let inode_pages = FILES.div_ceil(INODES);
    assert!((log.pages.len() as u64) < inode_pages, "{:?}", log.pages);
}

#[test]
fn listing_reads_each_page_of_inodes_once_and_together() {
    let (space, fs, directory) = mounted();
    let mut count = 0;
    let reply = fs.list_with_attributes(directory, 0, &owner(), |_, attr| {
        count += u64::from(attr.is_some());
        true
    });
    assert!(reply.result.unwrap());
    assert_eq!(count, FILES + 2);
    let log = space.take();
    assert!(
        log.pages.values().all(|&reads| reads == 1),
        "{:?}",
        log.pages
    );
    let inode_pages = FILES / INODES;
    assert!(
        log.most_in_flight as u64 >= inode_pages,
        "{}",
        log.most_in_flight
    );
}

#[test]
fn listing_of_names_continues_behind_each_cookie() {
    let (_, fs, directory) = mounted();
    let (mut names, mut after) = (Vec::new(), 0);
    loop {
        let mut room = 5;
        let reply = fs.list_at(directory, after, &owner(), |entry| {
            if room == 0 {
                return false;
            }
            room -= 1;
            after = entry.cookie;
            names.push(entry.name.clone());
            true
        });
        if reply.result.unwrap() {
            break;
        }
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len() as u64, FILES + 2);
}

#[test]
fn read_asks_for_all_runs_at_once() {
    let memory = MemorySpace::new(SIZE);
    let (fs, mut port) = new_fs(&memory);
    let made = fs
        .create(Ino::ROOT, b"f", CreateKind::File, 0o600, OWNER)
        .unwrap();
    let ino = made.ino;
    // Spans of another file lie between its spans.
    let other = fs
        .create(Ino::ROOT, b"g", CreateKind::File, 0o600, OWNER)
        .unwrap();
    let data: Vec<u8> = (0..40 * 4096).map(|at| (at / 9) as u8).collect();
    for at in (0..data.len()).step_by(8 * 4096) {
        let part = Bytes::copy_from_slice(&data[at..at + 8 * 4096]);
        for file in [ino, other.ino] {
            fs.write(&mut port, file, Some(at as u64), &part, false)
                .unwrap();
        }
    }
    drop((fs, port));
    let space = LoggedSpace {
        memory,
        log: Arc::default(),
    };
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    let mut port = fs.open_channel().unwrap();
    fs.attr(ino).unwrap();
    space.take();
    let read = fs.read(&mut port, ino, 100, 40 * 4096 - 300).unwrap();
    assert!(read == data[100..data.len() - 200]);
    let log = space.take();
    assert!(log.most_in_flight >= 3, "{}", log.most_in_flight);
}
