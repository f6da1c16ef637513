//! A server with one export over a space in memory.

use super::memory::{MemorySpace, wait};
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Credentials, Fs, FsError, MkfsOptions, Time, mkfs};
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::{Export, ExportOptions, Exports, Nfs4Options, Server};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The owner of the root directory.
pub const OWNER: Credentials = Credentials {
    uid: 1000,
    gid: 100,
};
pub const VOLUME: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
pub const OTHER_VOLUME: Uuid = Uuid::from_u128(0x0f0e);
pub const KEY: [u8; 16] = [7; 16];
pub const ATTACHMENT: u32 = 5;
pub const FREE_BYTES: u64 = 1 << 30;

/// A clock that ticks at each reading.
pub fn clock() -> Time {
    static TICKS: AtomicU64 = AtomicU64::new(1);
    let tick = TICKS.fetch_add(1, Ordering::Relaxed);
    Time {
        sec: 1_000_000 + (tick / 1000) as i64,
        nsec: (tick % 1000) as u32,
    }
}

/// A space that loses writes and fails when a test says so.
#[derive(Clone)]
pub struct TestSpace {
    pub memory: MemorySpace,
    lost_writes: Arc<AtomicU64>,
    is_fenced: Arc<AtomicBool>,
}

impl TestSpace {
    pub fn lose_writes(&self) {
        self.lost_writes.fetch_add(1, Ordering::SeqCst);
    }

    pub fn fence(&self) {
        self.is_fenced.store(true, Ordering::SeqCst);
    }
}

impl Space for TestSpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn has_write_cache(&self) -> bool {
        self.memory.has_write_cache()
    }

    fn lost_writes(&self) -> u64 {
        self.lost_writes.load(Ordering::SeqCst)
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(TestChannel {
            inner: self.memory.open()?,
            space: self.clone(),
            done: Vec::new(),
        }))
    }
}

struct TestChannel {
    inner: Box<dyn Channel>,
    space: TestSpace,
    done: Vec<Completion>,
}

impl Channel for TestChannel {
    fn submit(&mut self, token: Token, request: Request) {
        if self.space.is_fenced.load(Ordering::SeqCst) {
            let result = Err(SpaceError::Fenced);
            self.done.push(Completion { token, result });
            return;
        }
        self.inner.submit(token, request);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
        self.inner.reap(into);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.inner.poll_fds(into);
    }
}

/// A file system in memory.
pub fn export(
    name: &str,
    volume: Uuid,
    options: ExportOptions,
    has_write_cache: bool,
) -> (Export, TestSpace) {
    let memory = match has_write_cache {
        true => MemorySpace::new(1 << 36).with_write_cache(),
        false => MemorySpace::new(1 << 36),
    };
    let made = MkfsOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 0,
        owner: OWNER,
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, clock, made).expect("made");
    export_of(name, volume, options, memory)
}

/// The file system of an image.
pub fn export_of(
    name: &str,
    volume: Uuid,
    options: ExportOptions,
    memory: MemorySpace,
) -> (Export, TestSpace) {
    let space = TestSpace {
        memory,
        lost_writes: Arc::default(),
        is_fenced: Arc::default(),
    };
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).expect("mounted");
    let export = Export {
        name: name.into(),
        fs: Arc::new(fs),
        volume,
        key: HandleKey::new(KEY),
        attachment: ATTACHMENT,
        options,
        free_space: Arc::new(|| Some(FREE_BYTES)),
    };
    (export, space)
}

/// See the module.
pub struct ServedWorld {
    pub server: Server,
    pub fs: Arc<Fs>,
    pub space: TestSpace,
    /// The seconds that have passed for leases.
    pub lease_seconds: Arc<AtomicU64>,
    /// The errors that the hook got.
    pub errors: Arc<Mutex<Vec<(String, FsError)>>>,
}

impl ServedWorld {
    pub fn new() -> ServedWorld {
        ServedWorld::with(ExportOptions::default(), Limits::default(), false)
    }

    pub fn with_options(options: ExportOptions) -> ServedWorld {
        ServedWorld::with(options, Limits::default(), false)
    }

    pub fn with_limits(limits: Limits) -> ServedWorld {
        ServedWorld::with(ExportOptions::default(), limits, false)
    }

    pub fn with(options: ExportOptions, limits: Limits, has_write_cache: bool) -> ServedWorld {
        ServedWorld::with_exports(options, limits, has_write_cache, |exports, _| exports)
    }

    /// `change` completes the exports of the server, from the memory of the file system.
    pub fn with_exports(
        options: ExportOptions,
        limits: Limits,
        has_write_cache: bool,
        change: impl FnOnce(Exports, &MemorySpace) -> Exports,
    ) -> ServedWorld {
        let served = export("data", VOLUME, options, has_write_cache);
        let memory = served.1.memory.clone();
        ServedWorld::of(vec![served], limits, |exports| change(exports, &memory))
    }

    /// Two exports, `data` and `other`, and the space of the second.
    pub fn pair(limits: Limits) -> (ServedWorld, TestSpace) {
        let options = ExportOptions::default();
        let data = export("data", VOLUME, options, false);
        let other = export("other", OTHER_VOLUME, options, false);
        let space = other.1.clone();
        let world = ServedWorld::of(vec![data, other], limits, |exports| exports);
        (world, space)
    }

    /// A server of these exports. The result has the file system of the first one.
    pub fn of(
        exports: Vec<(Export, TestSpace)>,
        limits: Limits,
        change: impl FnOnce(Exports) -> Exports,
    ) -> ServedWorld {
        let (first, space) = exports.first().expect("an export");
        let (fs, space) = (Arc::clone(&first.fs), space.clone());
        let exports = exports.into_iter().map(|(export, _)| export).collect();
        let errors = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&errors);
        let hook = move |name: &str, error: &FsError| {
            seen.lock().unwrap().push((name.into(), error.clone()));
        };
        let exports = change(Exports::new(exports).expect("exports"));
        let listen = ["127.0.0.1:0".parse().expect("an address")];
        let lease_seconds = Arc::new(AtomicU64::new(0));
        let (start, passed) = (Instant::now(), Arc::clone(&lease_seconds));
        let nfs4 = Nfs4Options {
            clock: Arc::new(move || start + Duration::from_secs(passed.load(Ordering::SeqCst))),
            ..Nfs4Options::default()
        };
        let server = Server::start_nfs4(&listen, exports, Box::new(hook), limits, &nfs4);
        ServedWorld {
            server: server.expect("started"),
            fs,
            space,
            lease_seconds,
            errors,
        }
    }

    /// Waits until a number of the server has reached a value.
    #[track_caller]
    pub fn wait_until(&self, what: &str, is_reached: impl Fn(&pagemesh_nfs::Counters) -> bool) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !is_reached(&self.server.counters()) {
            let counters = self.server.counters();
            assert!(std::time::Instant::now() < until, "{what}: {counters:?}");
            std::thread::yield_now();
        }
    }
}
