//! A server with one export over a space in memory.

#[allow(dead_code)]
pub mod byte_model;
#[allow(dead_code)]
pub mod file_calls;
#[allow(dead_code)]
pub mod nfs3_files;
#[allow(dead_code)]
pub mod nfs41_files;

use crate::memory::{MemorySpace, wait};
use pagemesh_base::space::Space;
use pagemesh_fs::{Credentials, Fs, MkfsOptions, Time, mkfs};
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::{Export, ExportOptions, Exports, Server, Squash};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

/// The owner of the root directory.
pub const OWNER: Credentials = Credentials {
    uid: 1000,
    gid: 100,
};

/// A clock that ticks at each reading.
pub fn clock() -> Time {
    static TICKS: AtomicU64 = AtomicU64::new(1);
    let tick = TICKS.fetch_add(1, Ordering::Relaxed);
    Time {
        sec: 1_000_000 + (tick / 1000) as i64,
        nsec: (tick % 1000) as u32,
    }
}

/// Makes a file system that [`OWNER`] owns.
pub fn make_file_system(memory: &MemorySpace) {
    let made = MkfsOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 0,
        owner: OWNER,
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, clock, made).expect("made");
}

/// See the module.
pub struct TestServer {
    server: Server,
    fs: Arc<Fs>,
}

impl TestServer {
    #[allow(dead_code)]
    pub fn start(squash: Squash) -> TestServer {
        let options = ExportOptions {
            squash,
            ..ExportOptions::default()
        };
        TestServer::with(MemorySpace::new(1 << 36), options)
    }

    #[allow(dead_code)]
    pub fn with_write_cache() -> TestServer {
        let memory = MemorySpace::new(1 << 36).with_write_cache();
        TestServer::with(memory, ExportOptions::default())
    }

    #[allow(dead_code)]
    pub fn read_only() -> TestServer {
        let options = ExportOptions {
            is_read_only: true,
            ..ExportOptions::default()
        };
        TestServer::with(MemorySpace::new(1 << 36), options)
    }

    fn with(memory: MemorySpace, options: ExportOptions) -> TestServer {
        make_file_system(&memory);
        TestServer::over(memory, options, 5)
    }

    /// A server over a space with a file system. A restart has another attachment.
    pub fn over(memory: MemorySpace, options: ExportOptions, attachment: u32) -> TestServer {
        TestServer::over_space(Arc::new(memory), options, attachment)
    }

    /// As [`TestServer::over`], for any space.
    pub fn over_space(
        space: Arc<dyn Space>,
        options: ExportOptions,
        attachment: u32,
    ) -> TestServer {
        let fs = Arc::new(Fs::mount(space, wait, clock).expect("mounted"));
        let export = Export {
            name: "data".into(),
            fs: Arc::clone(&fs),
            volume: Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
            key: HandleKey::new([7; 16]),
            attachment,
            options,
            free_space: Arc::new(|| Some(1 << 30)),
        };
        let exports = Exports::new(vec![export]).expect("exports");
        let listen = ["127.0.0.1:0".parse().expect("an address")];
        let server = Server::start_with(&listen, exports, Box::new(|_, _| {}), Limits::default());
        let server = TestServer {
            server: server.expect("started"),
            fs,
        };
        server.free_pages();
        server
    }

    /// Writes that the server has lost in its life.
    #[allow(dead_code)]
    pub fn lost_writes(&self) -> u64 {
        self.fs.lost_writes()
    }

    /// Frees pages that a crash left or a full pool, and fills the reserve, as a thread of a mount does. With a reserve the server
    /// answers unstable WRITEs before it stores them.
    pub fn free_pages(&self) {
        while self.fs.free_deferred_piece() {}
    }

    pub fn address(&self) -> SocketAddr {
        self.server.local_addrs()[0]
    }
}
