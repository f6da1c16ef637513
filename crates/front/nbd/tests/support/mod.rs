//! A server over memory, and a small client that can send any message.

#![allow(dead_code, clippy::unwrap_used)] // Not every test needs all of it.

pub mod client;
pub mod memory;

use memory::{CompletionMode, Memory};
use pagemesh_nbd::{ExportOptions, Exports, Limits, Listen, Server};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest that anything may take before a test fails.
pub const WAIT_MAX: Duration = Duration::from_secs(10);

/// Waits for an effect of another thread.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < WAIT_MAX,
            "{what}: not within {WAIT_MAX:?}"
        );
        std::thread::yield_now();
    }
}

/// A server that runs until it is dropped.
pub struct TestServer {
    pub server: Server,
    pub exports: Exports,
    pub memory: Memory,
    pub dir: TempDir,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// One export, `disk`, on a unix socket.
    pub fn new(size_bytes: u64, mode: CompletionMode) -> Self {
        Self::with_limits(size_bytes, mode, Limits::default())
    }

    pub fn with_limits(size_bytes: u64, mode: CompletionMode, limits: Limits) -> Self {
        Self::start(size_bytes, mode, limits, |dir| {
            Listen::Unix(dir.path().join("nbd.sock"))
        })
    }

    pub fn on_tcp(size_bytes: u64, mode: CompletionMode) -> Self {
        Self::start(size_bytes, mode, Limits::default(), |_| {
            Listen::Tcp("127.0.0.1:0".parse().unwrap())
        })
    }

    fn start(
        size_bytes: u64,
        mode: CompletionMode,
        limits: Limits,
        listen: impl FnOnce(&TempDir) -> Listen,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let exports = Exports::new();
        let memory = Memory::new(size_bytes, mode);
        exports
            .add("disk", Arc::new(memory.clone()), ExportOptions::default())
            .unwrap();
        let server = Server::bind_with(listen(&dir), exports.clone(), limits).unwrap();
        let serving = server.clone();
        let thread = Some(std::thread::spawn(move || serving.serve().unwrap()));
        Self {
            server,
            exports,
            memory,
            dir,
            thread,
        }
    }

    pub fn path(&self) -> PathBuf {
        match self.server.listen_address() {
            Listen::Unix(path) => path.clone(),
            Listen::Tcp(_) => panic!("listens on TCP"),
        }
    }

    /// The URI of an export, for client programs.
    pub fn uri(&self, export: &str) -> String {
        match self.server.listen_address() {
            Listen::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
            Listen::Tcp(address) => format!("nbd://{address}/{export}"),
        }
    }

    /// Waits until no connection and no channel is left.
    pub fn wait_until_idle(&self) {
        wait_until("every connection ends", || {
            self.server.counters().connections == 0
                && self.memory.counters().channels.load(Ordering::SeqCst) == 0
        });
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.server.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server panicked");
        }
    }
}
