//! Threads that work beside a mount, and are over before it ends.

use crate::wait;
use pagemesh_fs::Fs;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How soon it is tried again to free what could not be freed.
const FREE_EVERY: Duration = Duration::from_secs(5);
/// Whoever waits for an answer goes first.
const LOWEST_PRIORITY: i32 = 19;

/// A thread that is told to end, and awaited, when this is dropped.
pub(crate) struct Beside {
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Beside {
    fn start(name: &str, run: impl FnOnce(&OwnedFd) + Send + 'static) -> io::Result<Beside> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let told = Arc::clone(&end);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&told))?;
        Ok(Beside {
            end,
            thread: Some(thread),
        })
    }

    /// Frees what a crash left, and what there was no room to free.
    pub(crate) fn free(fs: &Arc<Fs>) -> io::Result<Beside> {
        let fs = Arc::downgrade(fs);
        Beside::start("fuse-free", move |end| {
            // Of this thread alone: Linux takes its number for a process, too.
            if let Err(cause) = setpriority_process(Some(gettid()), LOWEST_PRIORITY) {
                tracing::debug!(%cause, "what is left is freed with the priority of others");
            }
            free(&fs, end);
        })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Its counter is far from full.
        let _ = rustix::io::write(&*self.end, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn free(fs: &Weak<Fs>, end: &OwnedFd) {
    while let Some(fs) = fs.upgrade() {
        let goes_on = fs.free_some();
        drop(fs);
        if !goes_on {
            wait(&[end.as_raw_fd()], Some(Instant::now() + FREE_EVERY));
        }
        if rustix::io::read(end, &mut [0; 8]).is_ok() {
            return;
        }
    }
}
