//! Files that guests write to beside the mount: when they did.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_fs::{Allocate, Changes, Fs, Ino, Make, Port, Time};
use std::sync::Arc;
use support::guests::{Guests, MEMORY_BYTES as SIZE};
use support::memory::Memory;
use support::{OWNER, clock, made, mounted};

/// What a file has before guests write to it.
const BYTES: u64 = 20_000;

struct File {
    fs: Arc<Fs>,
    port: Port,
    ino: Ino,
    guests: Arc<Guests>,
}

impl File {
    /// One that is open, with a board.
    fn shown(memory: &Memory) -> File {
        let file = File::opened(made(memory));
        let guests = file.guests.clone();
        let shown = file.fs.show(file.ino, || Some(guests)).unwrap();
        assert!(shown.is_some());
        file
    }

    fn opened((fs, mut port): (Fs, Port)) -> File {
        let made = fs.create(Ino::ROOT, b"file", Make::File, 0o600, OWNER);
        let ino = made.unwrap().ino;
        fs.open(ino).unwrap();
        let data = Bytes::from(vec![1; BYTES as usize]);
        fs.write(&mut port, ino, Some(0), &data, false).unwrap();
        let guests = Arc::default();
        File {
            fs: Arc::new(fs),
            port,
            ino,
            guests,
        }
    }

    /// A guest writes now.
    fn written(&self) -> Time {
        let now = clock();
        *self.guests.1.lock().unwrap() = Some(now);
        now
    }

    fn modified(&self) -> Time {
        self.fs.attr(self.ino).unwrap().mtime
    }
}

/// Else its pages that the kernel keeps would stay as they were.
#[test]
fn the_kernel_is_told_of_what_guests_wrote_whoever_takes_note() {
    let acts: [fn(&mut File); 4] = [
        |file| {
            let changes = Changes {
                mode: Some(0o640),
                mtime: Some(clock()),
                ..Changes::default()
            };
            file.fs.set_attr(file.ino, changes).unwrap();
        },
        |file| file.fs.sync(&mut file.port, file.ino).unwrap(),
        |file| file.fs.put_times().unwrap(),
        |file| file.fs.release(file.ino),
    ];
    for act in acts {
        let mut file = File::shown(&Memory::new(SIZE));
        file.written();
        act(&mut file);
        assert_eq!(file.fs.note_guests(), [file.ino]);
        assert_eq!(file.fs.note_guests(), []);
    }
}

#[test]
fn a_sync_puts_down_when_guests_wrote() {
    let syncs: [fn(&mut File); 2] = [
        |file| file.fs.sync(&mut file.port, file.ino).unwrap(),
        |file| file.fs.sync_all(&mut file.port).unwrap(),
    ];
    for sync in syncs {
        let memory = Memory::new(SIZE);
        let mut file = File::shown(&memory);
        let written = file.written();
        sync(&mut file);
        assert_eq!(file.modified(), written);
        let (after, _) = mounted(&memory.after_now());
        assert_eq!(after.attr(file.ino).unwrap().mtime, written);
    }
}

#[test]
fn what_is_written_after_guests_has_its_own_time() {
    let data = || Bytes::from(vec![2; 4096]);
    let acts: [&dyn Fn(&mut File); 5] = [
        &|file| {
            let (port, ino) = (&mut file.port, file.ino);
            file.fs.write(port, ino, Some(0), &data(), false).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.port, file.ino);
            file.fs.write(port, ino, None, &data(), false).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.port, file.ino);
            file.fs.set_size(port, ino, 9000).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.port, file.ino);
            file.fs
                .allocate(port, ino, Allocate::Punch, 0, 9000)
                .unwrap();
        },
        &|file| {
            let parts = [(100, data())];
            let (port, ino) = (&mut file.port, file.ino);
            file.fs.write_together(port, ino, &parts, || true).unwrap();
        },
    ];
    for act in acts {
        let memory = Memory::new(SIZE);
        let mut file = File::shown(&memory);
        let written = file.written();
        act(&mut file);
        let attr = file.fs.attr(file.ino).unwrap();
        assert!(attr.mtime > written && attr.ctime == attr.mtime);
        assert_eq!(file.fs.note_guests(), [file.ino]);
        file.fs.put_times().unwrap();
        assert_eq!(file.modified(), attr.mtime);
        let (after, _) = mounted(&memory.after_now());
        assert_eq!(after.attr(file.ino).unwrap().mtime, attr.mtime);
        let later = file.written();
        assert_eq!(file.modified(), later);
    }
}
