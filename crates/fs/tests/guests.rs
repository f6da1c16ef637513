//! Files that guests write to beside the mount: when they did, and who closes them.

#![allow(clippy::unwrap_used)]
#![allow(dead_code)]

mod support;

use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Allocate, Board, Changes, Fs, Ino, Make, Port, Time};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex};
use support::guests::{Ending, Guests, MEMORY_BYTES as SIZE};
use support::memory::{Memory, wait};
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

    /// It is gone, and nothing is mapped but what was before it.
    fn check_gone(&self, memory: &Memory, before: &[u64]) {
        assert_eq!(self.fs.attr(self.ino).unwrap_err().errno(), Errno::STALE);
        let mut pages = memory.pages();
        pages.retain(|page| !before.contains(page));
        assert_eq!(pages, []);
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

/// A space in which discards are slow: once it is armed, the next one waits until something is
/// to be changed, and is done before that.
struct Slow {
    memory: Memory,
    gate: Arc<Gate>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum At {
    #[default]
    Open,
    Armed,
    Waiting,
    Passing,
}

#[derive(Default)]
struct Gate(Mutex<At>, Condvar);

impl Gate {
    fn at(&self) -> At {
        *self.0.lock().unwrap()
    }

    fn put(&self, at: At) {
        *self.0.lock().unwrap() = at;
        self.1.notify_all();
    }

    /// If it is so, makes it another, and waits for a third.
    fn pass(&self, from: At, to: At, until: At) -> bool {
        let mut at = self.0.lock().unwrap();
        let is_so = *at == from;
        if is_so {
            *at = to;
            self.1.notify_all();
            drop(self.1.wait_while(at, |at| *at != until).unwrap());
        }
        is_so
    }
}

struct Way(Box<dyn Channel>, Arc<Gate>);

impl Space for Slow {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let way = Way(self.memory.open()?, Arc::clone(&self.gate));
        Ok(Box::new(way))
    }
}

impl Channel for Way {
    fn submit(&mut self, token: Token, request: Request) {
        let has_waited = match &request {
            Request::Discard { .. } => self.1.pass(At::Armed, At::Waiting, At::Passing),
            Request::Transact { .. } => {
                self.1.pass(At::Waiting, At::Passing, At::Open);
                false
            }
            _ => false,
        };
        self.0.submit(token, request);
        if has_waited {
            self.1.put(At::Open);
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.0.reap(into);
    }

    fn wait_on(&self, into: &mut Vec<RawFd>) {
        self.0.wait_on(into);
    }
}

/// The kernel forgets a file right behind its last close, in another thread.
#[test]
fn a_file_is_not_freed_while_its_last_close_settles_it() {
    let memory = Memory::new(SIZE);
    drop(made(&memory));
    let gate = Arc::new(Gate::default());
    let slow = Slow {
        memory: memory.clone(),
        gate: Arc::clone(&gate),
    };
    let before = memory.pages();
    let fs = Fs::mount(Arc::new(slow), wait, clock).unwrap();
    let port = fs.port().unwrap();
    let file = File::opened((fs, port));
    let (guests, ino) = (Arc::clone(&file.guests), file.ino);
    assert!(file.fs.grow(ino, || Some(guests)).unwrap().is_some());
    let appended = file
        .guests
        .write(&memory.shared(), 0, &[2; 100], Ending::Well);
    assert!(appended);
    file.fs.unlink(Ino::ROOT, b"file").unwrap();
    let forgets = Arc::new(Mutex::new(None));
    let (fs, thread) = (Arc::clone(&file.fs), Arc::clone(&forgets));
    file.guests.when_closed(move || {
        gate.put(At::Armed);
        let forgetting = std::thread::spawn(move || fs.forget(ino, 1));
        while gate.at() == At::Armed && !forgetting.is_finished() {
            std::thread::yield_now();
        }
        if gate.at() == At::Armed {
            gate.put(At::Open);
        }
        *thread.lock().unwrap() = Some(forgetting);
    });
    file.fs.release(ino);
    let forgetting = forgets.lock().unwrap().take().unwrap();
    forgetting.join().unwrap();
    file.check_gone(&memory, &before);
}

/// Asks for something, and leaves once it is under way.
type Ask = fn(&mut File, &dyn Fn());

/// Its process is killed meanwhile, and the kernel closes and forgets the file.
#[test]
fn a_file_is_not_freed_while_a_guest_asks_for_it() {
    fn make(file: &File, leave: &dyn Fn()) -> Option<Arc<dyn Board>> {
        leave();
        Some(Arc::clone(&file.guests) as Arc<dyn Board>)
    }
    let asks: [Ask; 3] = [
        |file, leave| {
            let shown = file.fs.show(file.ino, || make(file, leave));
            assert!(shown.unwrap().is_some());
        },
        |file, leave| {
            let shown = file.fs.grow(file.ino, || make(file, leave));
            assert!(shown.unwrap().is_some());
        },
        |file, leave| {
            let parts = [(100, Bytes::from(vec![2; 100]))];
            let is_wanted = || {
                leave();
                true
            };
            let (port, ino) = (&mut file.port, file.ino);
            file.fs
                .write_together(port, ino, &parts, is_wanted)
                .unwrap();
        },
    ];
    for ask in asks {
        let memory = Memory::new(SIZE);
        let made = made(&memory);
        let before = memory.pages();
        let mut file = File::opened(made);
        file.fs.unlink(Ino::ROOT, b"file").unwrap();
        let (fs, ino) = (Arc::clone(&file.fs), file.ino);
        ask(&mut file, &|| {
            fs.release(ino);
            fs.forget(ino, 1);
            assert!(fs.attr(ino).is_ok(), "somebody asks for it");
        });
        file.check_gone(&memory, &before);
    }
}
