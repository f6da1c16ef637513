//! Background threads of a mount, which end before it does.

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

/// Delay before the thread tries again to free space that it could not free.
const FREE_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Threads that serve requests go first.
const LOWEST_PRIORITY: i32 = 19;

/// A thread that is stopped and joined when this is dropped.
pub(crate) struct BackgroundThread {
    stop_event: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundThread {
    fn start(
        name: &str,
        run: impl FnOnce(&OwnedFd) + Send + 'static,
    ) -> io::Result<BackgroundThread> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let told = Arc::clone(&end);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&told))?;
        Ok(BackgroundThread {
            stop_event: end,
            thread: Some(thread),
        })
    }

    /// Starts the thread that frees space: space that a crash left, and space of deferred frees.
    pub(crate) fn start_free_thread(fs: &Arc<Fs>) -> io::Result<BackgroundThread> {
        let fs = Arc::downgrade(fs);
        BackgroundThread::start("fuse-free", move |end| {
            // This affects the thread alone: Linux takes a thread's number for a process, too.
            if let Err(cause) = setpriority_process(Some(gettid()), LOWEST_PRIORITY) {
                tracing::debug!(%cause, "cannot lower the priority of the thread that frees space");
            }
            free_loop(&fs, end);
        })
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        // The counter of the eventfd is far from full.
        let _ = rustix::io::write(&*self.stop_event, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn free_loop(fs: &Weak<Fs>, end: &OwnedFd) {
    while let Some(fs) = fs.upgrade() {
        let goes_on = fs.free_deferred_piece();
        drop(fs);
        if !goes_on {
            wait(
                &[end.as_raw_fd()],
                Some(Instant::now() + FREE_RETRY_INTERVAL),
            );
        }
        if rustix::io::read(end, &mut [0; 8]).is_ok() {
            return;
        }
    }
}
