//! Appends to a page that holds the file's last bytes.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::Request;
use pagemesh_fs::{CreateKind, Fs, Ino, IoChannel};
use std::sync::Arc;
use support::lossy::LossySpace;
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, new_fs};

struct Appender {
    space: LossySpace,
    fs: Fs,
    channel: IoChannel,
    ino: Ino,
    model: Vec<u8>,
}

impl Appender {
    fn new() -> Appender {
        let memory = MemorySpace::new(1 << 30);
        drop(new_fs(&memory));
        let space = LossySpace::new(&memory);
        let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
        let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        let (channel, ino) = (fs.open_channel().unwrap(), made.unwrap().ino);
        let model = Vec::new();
        Appender {
            space,
            fs,
            channel,
            ino,
            model,
        }
    }

    fn write(&mut self, at: usize, len: usize, value: u8) {
        let data = Bytes::from(vec![value; len]);
        let offset = Some(at as u64);
        let written = self
            .fs
            .write(&mut self.channel, self.ino, offset, &data, false);
        assert_eq!(written.unwrap(), at as u64..(at + len) as u64);
        self.model.resize(self.model.len().max(at + len), 0);
        self.model[at..at + len].fill(value);
    }

    fn append(&mut self, len: usize, value: u8) {
        self.write(self.model.len(), len, value);
    }

    fn check(&mut self) {
        let len = self.model.len() as u32 + 1;
        let found = self.fs.read(&mut self.channel, self.ino, 0, len);
        assert!(found.unwrap() == self.model);
    }
}

#[test]
fn append_to_own_last_page_reads_nothing() {
    let mut file = Appender::new();
    file.append(24, 1);
    file.space
        .refuse_requests(|request| matches!(request, Request::Read { .. }), u64::MAX);
    for value in 2..90 {
        file.append(if value % 2 == 0 { 4096 } else { 24 }, value);
    }
    file.space.refuse_requests(|_| false, 0);
    file.check();
}

#[test]
fn append_with_gap_to_own_last_page_reads_nothing() {
    let mut file = Appender::new();
    file.append(24, 1);
    file.space
        .refuse_requests(|request| matches!(request, Request::Read { .. }), u64::MAX);
    for value in 2..90 {
        let gap = if value % 3 == 0 { 512 } else { 7 };
        file.write(file.model.len() + gap, 512, value);
    }
    file.space.refuse_requests(|_| false, 0);
    file.check();
}

#[test]
fn append_keeps_changes_of_last_page() {
    type Change = fn(&mut Appender);
    let changes: [Change; 4] = [
        |file| file.write(10, 50, 9),
        |file| {
            file.fs.set_size(&mut file.channel, file.ino, 60).unwrap();
            file.model.truncate(60);
        },
        |file| {
            // The bytes after the cut are zeroes when the file grows.
            for size in [20, 100] {
                let (fs, channel) = (&file.fs, &mut file.channel);
                fs.set_size(channel, file.ino, size as u64).unwrap();
                file.model.resize(size, 0);
            }
        },
        |file| {
            let data = Bytes::from_static(b"another");
            let (fs, channel) = (&file.fs, &mut file.channel);
            let made = fs.create(Ino::ROOT, b"other", CreateKind::File, 0o600, OWNER);
            fs.write(channel, made.unwrap().ino, Some(0), &data, false)
                .unwrap();
        },
    ];
    for change in changes {
        let mut file = Appender::new();
        file.append(70, 1);
        file.append(30, 2);
        change(&mut file);
        file.append(24, 3);
        file.append(24, 4);
        file.check();
    }
}

#[test]
fn more_files_than_kept_pages_grow() {
    let mut file = Appender::new();
    let fs = &file.fs;
    let inos: Vec<Ino> = (0..200)
        .map(|number: u32| {
            let name = number.to_string();
            let made = fs.create(Ino::ROOT, name.as_bytes(), CreateKind::File, 0o600, OWNER);
            made.unwrap().ino
        })
        .collect();
    for round in 0..3u8 {
        for &ino in &inos {
            let data = Bytes::from(vec![round; 30]);
            fs.write(&mut file.channel, ino, None, &data, false)
                .unwrap();
        }
    }
    let expected: Vec<u8> = (0..3).flat_map(|round| [round; 30]).collect();
    for ino in inos {
        assert!(fs.read(&mut file.channel, ino, 0, 100).unwrap() == expected);
    }
}
