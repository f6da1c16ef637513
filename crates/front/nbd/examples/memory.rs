//! Serves a space in memory on a unix socket, to measure the server alone:
//!
//! ```text
//! cargo run --release -p pagemesh-nbd --example memory -- /tmp/nbd.sock 1024
//! ```
//!
//! The second argument is the size in MiB. It ends when its input does.

#[path = "../tests/support/memory.rs"]
mod memory;

use memory::{CompletionMode, Memory};
use pagemesh_nbd::{ExportOptions, Exports, Listen, Server};
use std::error::Error;
use std::io::Read;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: memory SOCKET MIB")?;
    let size_mib: u64 = arguments
        .next()
        .ok_or("usage: memory SOCKET MIB")?
        .parse()?;
    let exports = Exports::new();
    let space = Arc::new(Memory::new(size_mib << 20, CompletionMode::AtOnce));
    exports.add("memory", space, ExportOptions::default())?;
    let server = Server::bind(Listen::Unix(path.into()), exports)?;
    let serving = server.clone();
    let thread = std::thread::spawn(move || serving.serve());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop();
    thread.join().map_err(|_| "the server panicked")??;
    Ok(())
}
