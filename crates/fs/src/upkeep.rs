//! Threads of a process that serves a file system: they end before it is closed.
//!
//! - `fs-care` writes recorded times once a second, lets idle channels process the volume's
//!   messages, and closes channels that are idle for long.
//! - `fs-commit` sends acknowledged changes, with a commit interval.
//! - `fs-free` frees the remains of a crash, and space that could not be freed for lack of room.

use crate::Fs;
use crate::io::channel::Wait;
use pagemesh_base::event_fd::EventFd;
use rustix::fd::AsRawFd;
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the times of data writes may be in memory only.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Under load every completion also wakes the thread that polls idle channels.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Delay before the thread tries again to free space that it could not free.
const FREE_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Threads that serve requests go first.
const LOWEST_PRIORITY: i32 = 19;

/// A thread that is stopped and joined when this is dropped.
pub struct UpkeepThread {
    stop_event: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl UpkeepThread {
    fn start(name: &str, run: impl FnOnce(&EventFd) + Send + 'static) -> io::Result<UpkeepThread> {
        let end = Arc::new(EventFd::new()?);
        let told = Arc::clone(&end);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&told))?;
        Ok(UpkeepThread {
            stop_event: end,
            thread: Some(thread),
        })
    }

    /// Starts the thread that frees space: space that a crash left, and space of deferred frees.
    ///
    /// # Errors
    /// If there is no descriptor or no thread.
    pub fn start_free_thread(fs: &Arc<Fs>, wait: Wait) -> io::Result<UpkeepThread> {
        let fs = Arc::downgrade(fs);
        UpkeepThread::start("fs-free", move |end| {
            // This affects the thread alone: Linux takes a thread's number for a process, too.
            if let Err(cause) = setpriority_process(Some(gettid()), LOWEST_PRIORITY) {
                tracing::debug!(%cause, "cannot lower the priority of the thread that frees space");
            }
            free_loop(&fs, wait, end);
        })
    }

    /// Starts the thread that commits acknowledged changes, and allows such changes.
    ///
    /// # Errors
    /// As [`UpkeepThread::start_free_thread`].
    pub fn start_commits(fs: &Arc<Fs>, wait: Wait, interval: Duration) -> io::Result<UpkeepThread> {
        let wanted = Arc::new(EventFd::new()?);
        let hook = Arc::clone(&wanted);
        let known = Arc::downgrade(fs);
        let thread = UpkeepThread::start("fs-commit", move |end| {
            commit_loop(&known, wait, interval, &wanted, end);
        })?;
        fs.set_commit_interval(interval, Box::new(move || hook.signal()));
        Ok(thread)
    }

    /// Starts the thread for periodic work: times and idle channels. It calls `each_second`, too.
    ///
    /// # Errors
    /// As [`UpkeepThread::start_free_thread`].
    pub fn start_maintenance(
        fs: &Arc<Fs>,
        wait: Wait,
        each_second: impl FnMut(&Fs) + Send + 'static,
    ) -> io::Result<UpkeepThread> {
        let fs = Arc::downgrade(fs);
        UpkeepThread::start("fs-care", move |end| {
            maintenance_loop(&fs, wait, each_second, end);
        })
    }
}

impl UpkeepThread {
    /// Starts a thread that calls `each_second`, and does nothing else.
    ///
    /// # Errors
    /// As [`UpkeepThread::start_free_thread`].
    pub fn start_each_second(
        fs: &Arc<Fs>,
        wait: Wait,
        mut each_second: impl FnMut(&Fs) + Send + 'static,
    ) -> io::Result<UpkeepThread> {
        let fs = Arc::downgrade(fs);
        UpkeepThread::start("fs-watch", move |end| {
            while let Some(fs) = fs.upgrade() {
                each_second(&fs);
                drop(fs);
                wait(
                    &[end.as_raw_fd()],
                    Some(Instant::now() + MAINTENANCE_INTERVAL),
                );
                if end.drain() > 0 {
                    return;
                }
            }
        })
    }
}

impl Drop for UpkeepThread {
    fn drop(&mut self) {
        self.stop_event.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn free_loop(fs: &Weak<Fs>, wait: Wait, end: &EventFd) {
    while let Some(fs) = fs.upgrade() {
        let goes_on = fs.free_deferred_piece();
        drop(fs);
        if !goes_on {
            wait(
                &[end.as_raw_fd()],
                Some(Instant::now() + FREE_RETRY_INTERVAL),
            );
        }
        if end.drain() > 0 {
            return;
        }
    }
}

/// A change after the call of `commit_due` is due after the next wait, or later.
fn commit_loop(fs: &Weak<Fs>, wait: Wait, interval: Duration, wanted: &EventFd, end: &EventFd) {
    while let Some(fs) = fs.upgrade() {
        wanted.drain();
        let due = fs.commit_due(Instant::now()).unwrap_or_else(|cause| {
            tracing::warn!(%cause, "acknowledged changes of files cannot be stored");
            None
        });
        drop(fs);
        let until = due.unwrap_or_else(|| Instant::now() + interval);
        wait(&[end.as_raw_fd(), wanted.as_raw_fd()], Some(until));
        if end.drain() > 0 {
            return;
        }
    }
}

fn maintenance_loop(fs: &Weak<Fs>, wait: Wait, mut each_second: impl FnMut(&Fs), end: &EventFd) {
    let mut due = Instant::now() + MAINTENANCE_INTERVAL;
    loop {
        let mut awaited = vec![end.as_raw_fd()];
        let until = match fs.upgrade() {
            None => return,
            Some(fs) => {
                if Instant::now() >= due {
                    each_second(&fs);
                    if let Err(cause) = fs.flush_all_times() {
                        tracing::debug!(%cause, "cannot write file times; trying again");
                    }
                    if let Err(cause) = fs.flush_old_mmap_dirty() {
                        tracing::warn!(%cause, "cannot write dirty pages of mappings to their files yet");
                    }
                    if let Err(cause) = fs.commit_due(Instant::now()) {
                        tracing::warn!(%cause, "unstable writes of files cannot be stored");
                    }
                    due = Instant::now() + MAINTENANCE_INTERVAL;
                }
                fs.poll_idle_channels(Instant::now(), &mut awaited)
            }
        };
        let began = Instant::now();
        wait(&awaited, Some(until.map_or(due, |until| until.min(due))));
        if end.drain() > 0 {
            return;
        }
        if let Some(rest) = POLL_INTERVAL_MIN.checked_sub(began.elapsed()) {
            wait(&[end.as_raw_fd()], Some(Instant::now() + rest));
        }
    }
}
