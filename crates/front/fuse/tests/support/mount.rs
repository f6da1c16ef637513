//! File systems in memory, and their mounts through the real kernel.
//!
//! A test file declares the modules `memory`, `skip` and `switch` beside this one.

#![allow(dead_code)] // Each test file uses a part of it.

use crate::memory::{self, MemorySpace};
use crate::{skip, switch};
use pagemesh_fs::{Credentials, Fs, MkfsOptions, mkfs};
use pagemesh_fuse::{Caching, MountFlags, MountOptions, Transport, Unmounter, mount, now};
use rustix::mount::UnmountFlags;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The limit of a file system, in bytes.
pub const LIMIT: u64 = 64 << 20;
/// Serving threads of each mount.
pub const THREADS: usize = 3;
/// For how long a mount that is to be unmounted may be busy.
pub const BUSY_LIMIT: Duration = Duration::from_secs(60);

/// A new file system, for all users.
pub fn new_memory_fs() -> MemorySpace {
    let memory = MemorySpace::new(1 << 40);
    let options = MkfsOptions {
        uuid: uuid::Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: LIMIT,
        owner: Credentials { uid: 0, gid: 0 },
        mode: 0o777,
    };
    mkfs(&memory.shared(), memory::wait, now, options).unwrap();
    memory
}

/// The options of a mount of its own, with pages in the kernel.
pub fn options(transport: Transport) -> MountOptions {
    MountOptions {
        source: "pagemesh:test".into(),
        threads: THREADS,
        allow_other: true,
        flags: MountFlags::default(),
        transport,
        may_keep_cpus_awake: false,
        caching: Caching::PageCache,
        shows_snapshots: false,
        is_shared: false,
    }
}

/// A mount; dropping it unmounts.
pub struct TestMount {
    pub dir: tempfile::TempDir,
    pub unmounter: Unmounter,
    serve_thread: Option<JoinHandle<()>>,
    _switch: Option<switch::UringOnGuard>,
}

impl TestMount {
    /// None, with a message, if this user cannot mount, or not with this transport.
    pub fn new(memory: &MemorySpace, transport: Transport) -> Option<TestMount> {
        let fs = Fs::mount(memory.shared(), memory::wait, now).unwrap();
        TestMount::of(Arc::new(fs), &options(transport))
    }

    /// As [`TestMount::new`], with an open file system.
    pub fn of(fs: Arc<Fs>, options: &MountOptions) -> Option<TestMount> {
        let switch = match options.transport {
            Transport::IoUring => {
                let on = switch::turn_on();
                if on.is_none() {
                    skip::skip("needs FUSE over io_uring, and root to switch it on");
                    return None;
                }
                on
            }
            _ => None,
        };
        let dir = tempfile::tempdir().unwrap();
        let on_error = Box::new(|error: &_| panic!("memory fails nothing: {error}"));
        let mounted = match mount(fs, dir.path(), options, on_error, Box::new(|| None)) {
            Ok(mounted) => mounted,
            Err(cause) => {
                skip::skip(&format!("needs to mount with /dev/fuse: {cause}"));
                return None;
            }
        };
        assert_eq!(mounted.transport(), options.transport);
        let unmounter = mounted.unmounter();
        let serving = std::thread::spawn(move || mounted.serve().unwrap());
        Some(TestMount {
            dir,
            unmounter,
            serve_thread: Some(serving),
            _switch: switch,
        })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        let began = Instant::now();
        let mut unmounted = self.unmounter.unmount();
        // A program ran on the mount. Another process that reads its entry in /proc keeps the mount in use for a moment.
        while unmounted.is_err() && !std::thread::panicking() && began.elapsed() < BUSY_LIMIT {
            std::thread::sleep(Duration::from_millis(5));
            unmounted = self.unmounter.unmount();
        }
        if unmounted.is_err() {
            // A test that panicked has files open.
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            let detached = rustix::mount::unmount(self.dir.path(), flags);
            detached.or_else(|_| self.unmounter.abort()).unwrap();
        }
        let served = self.serve_thread.take().unwrap().join();
        assert!(served.is_ok() || std::thread::panicking());
    }
}
