//! Serves a file system in memory, to try clients:
//!
//! ```text
//! cargo run --release -p pagemesh-nfs --example memory -- 127.0.0.1:20049
//! nfs-ls 'nfs://127.0.0.1/memory/?nfsport=20049&mountport=20049'
//! ```
//!
//! A second argument is an exports file for `/memory`. If an rpcbind runs, the server registers there.
//!
//! It ends when its input does. A line `restart` in the input ends the server without an unmount of the
//! clients, and starts it again over the same memory, as after a crash of the process.

#![allow(clippy::unwrap_used)] // The space is that of the tests.

#[path = "../../../fs/tests/support/memory.rs"]
#[allow(dead_code)]
mod memory;

use memory::{MemorySpace, wait};
use pagemesh_fs::{Credentials, Fs, MkfsOptions, Time, mkfs};
use pagemesh_nfs::exports_file::ExportsFile;
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::rpcbind::{RPCBIND_ADDRESS, RpcbindRegistration};
use pagemesh_nfs::{Export, ExportOptions, Exports, Server, Squash};
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use uuid::Uuid;

/// Bytes of the space. Memory is taken as files grow.
const SIZE_BYTES: u64 = 1 << 34;

fn now() -> Time {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    Time {
        sec: now.tv_sec,
        nsec: u32::try_from(now.tv_nsec).unwrap_or(0),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args()
        .nth(1)
        .ok_or("usage: memory ADDRESS:PORT [EXPORTS-FILE]")?;
    let memory = MemorySpace::new(SIZE_BYTES).with_size(SIZE_BYTES);
    let made = MkfsOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 0,
        owner: Credentials { uid: 0, gid: 0 },
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, now, made)?;
    let mut server = start(&memory, address.parse()?, 1)?;
    let registration = RpcbindRegistration::register(RPCBIND_ADDRESS, server.local_addrs());
    match &registration {
        Ok(registration) => println!("registered, {} refused", registration.refused()),
        Err(error) => println!("not registered: {error}"),
    }
    let mut attachment = 1;
    for line in std::io::stdin().lines() {
        if line? == "restart" {
            attachment += 1;
            println!("{:?}", server.stop());
            server = start(&memory, address.parse()?, attachment)?;
        }
    }
    println!("{:?}", server.counters());
    println!("{:?}", server.stop());
    Ok(())
}

/// Mounts the file system, and serves it.
fn start(
    memory: &MemorySpace,
    address: SocketAddr,
    attachment: u32,
) -> Result<Server, Box<dyn Error>> {
    let export = Export {
        name: "memory".into(),
        fs: Arc::new(Fs::mount(memory.shared(), wait, now)?),
        volume: Uuid::from_u128(1),
        key: HandleKey::new([1; 16]),
        attachment,
        options: ExportOptions {
            squash: Squash::None,
            ..ExportOptions::default()
        },
        free_space: Arc::new(|| Some(SIZE_BYTES)),
    };
    let on_error = |name: &str, error: &pagemesh_fs::FsError| eprintln!("{name}: {error}");
    let exports = Exports::new(vec![export])?;
    if let Some(path) = std::env::args().nth(2) {
        exports.apply(&ExportsFile::read(path.as_ref())?)?;
    }
    Ok(Server::start(&[address], exports, Box::new(on_error))?)
}
