//! Files that direct clients and the mount write to: times of writes, and closes.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{AllocateMode, AttrChanges, CreateKind, Fs, Ino, IoChannel, SharedFileMap, Time};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex};
use support::direct_client::{MEMORY_BYTES as SIZE, TestDirectClient, WriteEnd};
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, mount_and_free, new_fs};

/// Size of a file before direct clients write to it.
const BYTES: u64 = 20_000;

struct DirectTestFile {
    fs: Arc<Fs>,
    channel: IoChannel,
    ino: Ino,
    direct_client: Arc<TestDirectClient>,
}

impl DirectTestFile {
    /// An open file with a file map.
    fn with_file_map(memory: &MemorySpace) -> DirectTestFile {
        let file = DirectTestFile::opened(new_fs(memory));
        let guests = file.direct_client.clone();
        let shown = file.fs.publish_file_map(file.ino, || Some(guests)).unwrap();
        assert!(shown.is_some());
        file
    }

    fn opened((fs, mut port): (Fs, IoChannel)) -> DirectTestFile {
        let made = fs.create(Ino::ROOT, b"file", CreateKind::File, 0o600, OWNER);
        let ino = made.unwrap().ino;
        fs.open(ino).unwrap();
        let data = Bytes::from(vec![1; BYTES as usize]);
        fs.write(&mut port, ino, Some(0), &data, false).unwrap();
        let guests = Arc::default();
        DirectTestFile {
            fs: Arc::new(fs),
            channel: port,
            ino,
            direct_client: guests,
        }
    }

    /// Checks that the file is freed, and that only the pages from before it are mapped.
    fn check_freed(&self, memory: &MemorySpace, before: &[u64]) {
        assert_eq!(self.fs.attr(self.ino).unwrap_err().errno(), Errno::STALE);
        let mut pages = memory.pages();
        pages.retain(|page| !before.contains(page));
        assert_eq!(pages, []);
    }

    /// A direct client writes now.
    fn direct_write(&self) -> Time {
        let now = clock();
        *self.direct_client.1.lock().unwrap() = Some(now);
        now
    }

    fn mtime(&self) -> Time {
        self.fs.attr(self.ino).unwrap().mtime
    }
}

/// Otherwise the pages that the kernel caches would stay old.
#[test]
fn direct_write_is_reported_to_the_kernel_once() {
    let acts: [fn(&mut DirectTestFile); 4] = [
        |file| {
            let changes = AttrChanges {
                mode: Some(0o640),
                mtime: Some(clock()),
                ..AttrChanges::default()
            };
            file.fs.set_attr(file.ino, changes).unwrap();
        },
        |file| file.fs.sync(&mut file.channel, file.ino).unwrap(),
        |file| file.fs.flush_all_times().unwrap(),
        |file| file.fs.release(file.ino),
    ];
    for act in acts {
        let mut file = DirectTestFile::with_file_map(&MemorySpace::new(SIZE));
        file.direct_write();
        act(&mut file);
        assert_eq!(file.fs.collect_direct_writes(), [file.ino]);
        assert_eq!(file.fs.collect_direct_writes(), []);
    }
}

#[test]
fn sync_saves_mtime_of_direct_writes() {
    let syncs: [fn(&mut DirectTestFile); 2] = [
        |file| file.fs.sync(&mut file.channel, file.ino).unwrap(),
        |file| file.fs.sync_all(&mut file.channel).unwrap(),
    ];
    for sync in syncs {
        let memory = MemorySpace::new(SIZE);
        let mut file = DirectTestFile::with_file_map(&memory);
        let written = file.direct_write();
        sync(&mut file);
        assert_eq!(file.mtime(), written);
        let (after, _) = mount_and_free(&memory.snapshot());
        assert_eq!(after.attr(file.ino).unwrap().mtime, written);
    }
}

#[test]
fn mount_write_after_direct_write_has_later_mtime() {
    let data = || Bytes::from(vec![2; 4096]);
    let acts: [&dyn Fn(&mut DirectTestFile); 5] = [
        &|file| {
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs.write(port, ino, Some(0), &data(), false).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs.write(port, ino, None, &data(), false).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs.set_size(port, ino, 9000).unwrap();
        },
        &|file| {
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs
                .allocate(port, ino, AllocateMode::Punch, 0, 9000)
                .unwrap();
        },
        &|file| {
            let parts = [(100, data())];
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs.write_atomic(port, ino, &parts, || true).unwrap();
        },
    ];
    for act in acts {
        let memory = MemorySpace::new(SIZE);
        let mut file = DirectTestFile::with_file_map(&memory);
        let written = file.direct_write();
        act(&mut file);
        let attr = file.fs.attr(file.ino).unwrap();
        assert!(attr.mtime > written && attr.ctime == attr.mtime);
        assert_eq!(file.fs.collect_direct_writes(), [file.ino]);
        file.fs.flush_all_times().unwrap();
        assert_eq!(file.mtime(), attr.mtime);
        let (after, _) = mount_and_free(&memory.snapshot());
        assert_eq!(after.attr(file.ino).unwrap().mtime, attr.mtime);
        let later = file.direct_write();
        assert_eq!(file.mtime(), later);
    }
}

/// A space with slow discards. Once armed, the next discard waits until another change is
/// submitted, and runs before it.
struct SlowDiscardSpace {
    memory: MemorySpace,
    gate: Arc<DiscardGate>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum GateState {
    #[default]
    Open,
    Armed,
    Waiting,
    Passing,
}

#[derive(Default)]
struct DiscardGate(Mutex<GateState>, Condvar);

impl DiscardGate {
    fn state(&self) -> GateState {
        *self.0.lock().unwrap()
    }

    fn set_state(&self, at: GateState) {
        *self.0.lock().unwrap() = at;
        self.1.notify_all();
    }

    /// If the state is `from`, sets it to `to`, and waits for `until`.
    fn exchange_and_wait(&self, from: GateState, to: GateState, until: GateState) -> bool {
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

struct SlowDiscardChannel(Box<dyn Channel>, Arc<DiscardGate>);

impl Space for SlowDiscardSpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let way = SlowDiscardChannel(self.memory.open()?, Arc::clone(&self.gate));
        Ok(Box::new(way))
    }
}

impl Channel for SlowDiscardChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let has_waited = match &request {
            Request::Discard { .. } => {
                self.1
                    .exchange_and_wait(GateState::Armed, GateState::Waiting, GateState::Passing)
            }
            Request::Transact { .. } => {
                self.1
                    .exchange_and_wait(GateState::Waiting, GateState::Passing, GateState::Open);
                false
            }
            _ => false,
        };
        self.0.submit(token, request);
        if has_waited {
            self.1.set_state(GateState::Open);
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.0.reap(into);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.0.poll_fds(into);
    }
}

/// The kernel forgets a file right after its last close, in another thread.
#[test]
fn file_is_not_freed_while_last_close_publishes_size() {
    let memory = MemorySpace::new(SIZE);
    drop(new_fs(&memory));
    let gate = Arc::new(DiscardGate::default());
    let slow = SlowDiscardSpace {
        memory: memory.clone(),
        gate: Arc::clone(&gate),
    };
    let before = memory.pages();
    let fs = Fs::mount(Arc::new(slow), wait, clock).unwrap();
    let port = fs.open_channel().unwrap();
    let file = DirectTestFile::opened((fs, port));
    let (guests, ino) = (Arc::clone(&file.direct_client), file.ino);
    assert!(
        file.fs
            .publish_file_map_for_append(ino, || Some(guests))
            .unwrap()
            .is_some()
    );
    let appended = file
        .direct_client
        .write(&memory.shared(), 0, &[2; 100], WriteEnd::Completed);
    assert!(appended);
    file.fs.unlink(Ino::ROOT, b"file").unwrap();
    let forgets = Arc::new(Mutex::new(None));
    let (fs, thread) = (Arc::clone(&file.fs), Arc::clone(&forgets));
    file.direct_client.on_next_close(move || {
        gate.set_state(GateState::Armed);
        let forgetting = std::thread::spawn(move || fs.forget(ino, 1));
        while gate.state() == GateState::Armed && !forgetting.is_finished() {
            std::thread::yield_now();
        }
        if gate.state() == GateState::Armed {
            gate.set_state(GateState::Open);
        }
        *thread.lock().unwrap() = Some(forgetting);
    });
    file.fs.release(ino);
    let forgetting = forgets.lock().unwrap().take().unwrap();
    forgetting.join().unwrap();
    file.check_freed(&memory, &before);
}

/// Makes a request, and calls back while it is in progress.
type ClientCall = fn(&mut DirectTestFile, &dyn Fn());

/// The client's process is killed meanwhile, and the kernel closes and forgets the file.
#[test]
fn file_is_not_freed_during_a_direct_client_request() {
    fn make(file: &DirectTestFile, leave: &dyn Fn()) -> Option<Arc<dyn SharedFileMap>> {
        leave();
        Some(Arc::clone(&file.direct_client) as Arc<dyn SharedFileMap>)
    }
    let asks: [ClientCall; 3] = [
        |file, leave| {
            let shown = file.fs.publish_file_map(file.ino, || make(file, leave));
            assert!(shown.unwrap().is_some());
        },
        |file, leave| {
            let shown = file
                .fs
                .publish_file_map_for_append(file.ino, || make(file, leave));
            assert!(shown.unwrap().is_some());
        },
        |file, leave| {
            let parts = [(100, Bytes::from(vec![2; 100]))];
            let is_wanted = || {
                leave();
                true
            };
            let (port, ino) = (&mut file.channel, file.ino);
            file.fs.write_atomic(port, ino, &parts, is_wanted).unwrap();
        },
    ];
    for ask in asks {
        let memory = MemorySpace::new(SIZE);
        let made = new_fs(&memory);
        let before = memory.pages();
        let mut file = DirectTestFile::opened(made);
        file.fs.unlink(Ino::ROOT, b"file").unwrap();
        let (fs, ino) = (Arc::clone(&file.fs), file.ino);
        ask(&mut file, &|| {
            fs.release(ino);
            fs.forget(ino, 1);
            assert!(fs.attr(ino).is_ok(), "a request uses it");
        });
        file.check_freed(&memory, &before);
    }
}
