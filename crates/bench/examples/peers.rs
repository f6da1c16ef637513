//! Compares the other NBD servers only: checks that they start here, and shows their figures on
//! this machine. `cargo run --release --example peers [MS] [DIR]` with the time of a cell, and a
//! directory for the raw results.

use pagemesh_bench::BenchError;
use pagemesh_bench::peers::{NbdPeer, PeerOptions, run_peers};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

fn compare() -> Result<(), BenchError> {
    let mut options = PeerOptions::default();
    let mut arguments = std::env::args().skip(1);
    if let Some(ms) = arguments.next().and_then(|ms| ms.parse().ok()) {
        options.runtime = Duration::from_millis(ms);
    }
    options.size_bytes = 256 << 20;
    let size = options.size_bytes;
    let peers = [
        NbdPeer::nbdkit_memory(size)?,
        NbdPeer::qemu_nbd(Path::new("/dev/shm"), size)?,
        NbdPeer::qemu_quorum(size)?,
    ];
    let report = run_peers(&peers, &options)?;
    print!("{}", report.text());
    if let Some(dir) = arguments.next() {
        for path in report.save(Path::new(&dir))? {
            println!("wrote {}", path.display());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match compare() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
