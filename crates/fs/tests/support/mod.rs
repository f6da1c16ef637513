//! What the tests share.

#[allow(dead_code)]
pub mod guests;
#[allow(dead_code)]
pub mod lossy;
pub mod memory;
#[allow(dead_code)]
pub mod pool;

use memory::{Memory, wait};
use pagemesh_fs::{Fs, MakeOptions, Port, Time, make};
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

pub use pagemesh_fs_model::OWNER;

/// A clock that ticks when it is looked at.
pub fn clock() -> Time {
    static TICKS: AtomicU64 = AtomicU64::new(1);
    let tick = TICKS.fetch_add(1, Ordering::Relaxed);
    Time {
        sec: 1_000_000 + (tick / 1000) as i64,
        nsec: (tick % 1000) as u32,
    }
}

/// An empty file system.
pub fn made(memory: &Memory) -> (Fs, Port) {
    made_with_limit(memory, 0)
}

pub fn made_with_limit(memory: &Memory, limit_bytes: u64) -> (Fs, Port) {
    let options = MakeOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes,
        owner: OWNER,
        mode: 0o755,
    };
    make(&memory.shared(), wait, clock, options).expect("made");
    mounted(memory)
}

/// With nothing left of what a crash left.
pub fn mounted(memory: &Memory) -> (Fs, Port) {
    let (fs, port) = mounted_with_left(memory);
    while fs.free_some() {}
    (fs, port)
}

#[allow(dead_code)]
pub fn mounted_with_left(memory: &Memory) -> (Fs, Port) {
    let fs = Fs::mount(memory.shared(), wait, clock).expect("mounted");
    let port = fs.port().expect("a port");
    (fs, port)
}
