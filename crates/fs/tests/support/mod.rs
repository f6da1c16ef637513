//! Shared helpers of the tests.

#[allow(dead_code)]
pub mod direct_client;
#[allow(dead_code)]
pub mod image;
#[allow(dead_code)]
pub mod lossy;
pub mod memory;
#[allow(dead_code)]
pub mod mmap;
#[allow(dead_code)]
pub mod pool;
#[allow(dead_code)]
pub mod server;
#[allow(dead_code)]
pub mod write_cache;

use memory::{MemorySpace, wait};
use pagemesh_fs::{Fs, IoChannel, MkfsOptions, Time, mkfs};
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

pub use pagemesh_fs_model::OWNER;

/// A clock that ticks at each reading.
pub fn clock() -> Time {
    static TICKS: AtomicU64 = AtomicU64::new(1);
    let tick = TICKS.fetch_add(1, Ordering::Relaxed);
    Time {
        sec: 1_000_000 + (tick / 1000) as i64,
        nsec: (tick % 1000) as u32,
    }
}

/// An empty file system.
pub fn new_fs(memory: &MemorySpace) -> (Fs, IoChannel) {
    new_fs_with_limit(memory, 0)
}

pub fn new_fs_with_limit(memory: &MemorySpace, limit_bytes: u64) -> (Fs, IoChannel) {
    let options = MkfsOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes,
        owner: OWNER,
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, clock, options).expect("made");
    mount_and_free(memory)
}

/// Mounts, and frees everything that a crash left.
pub fn mount_and_free(memory: &MemorySpace) -> (Fs, IoChannel) {
    let (fs, port) = mount_with_leftovers(memory);
    while fs.free_deferred_piece() {}
    (fs, port)
}

#[allow(dead_code)]
pub fn mount_with_leftovers(memory: &MemorySpace) -> (Fs, IoChannel) {
    let fs = Fs::mount(memory.shared(), wait, clock).expect("mounted");
    let port = fs.open_channel().expect("a port");
    (fs, port)
}
