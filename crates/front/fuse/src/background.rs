//! Background threads of a mount, which end before it does.
//!
//! - `fuse-care` writes recorded times once a second, lets idle channels process the volume's
//!   messages, and closes channels that are idle for long.
//! - `fuse-commit` sends acknowledged changes, on a mount with a commit interval.
//! - `fuse-free` frees the remains of a crash, and space that could not be freed for lack of room.

use crate::classic;
use crate::device::Device;
use crate::events::WriteEvents;
use crate::wait;
use pagemesh_base::event_fd::EventFd;
use pagemesh_fs::Fs;
use rustix::fd::{AsRawFd, OwnedFd};
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
pub(crate) struct BackgroundThread {
    stop_event: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundThread {
    fn start(
        name: &str,
        run: impl FnOnce(&EventFd) + Send + 'static,
    ) -> io::Result<BackgroundThread> {
        let end = Arc::new(EventFd::new()?);
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

    /// Starts the thread that commits acknowledged changes, and allows such changes.
    pub(crate) fn start_commits(fs: &Arc<Fs>, interval: Duration) -> io::Result<BackgroundThread> {
        let wanted = Arc::new(EventFd::new()?);
        let hook = Arc::clone(&wanted);
        let known = Arc::downgrade(fs);
        let thread = BackgroundThread::start("fuse-commit", move |end| {
            commit_loop(&known, interval, &wanted, end);
        })?;
        fs.set_commit_interval(interval, Box::new(move || hook.signal()));
        Ok(thread)
    }

    /// Starts the thread for periodic work: times, invalidations, and idle channels.
    pub(crate) fn start_maintenance(
        fs: &Arc<Fs>,
        device: &Arc<Device>,
        events: WriteEvents,
    ) -> io::Result<BackgroundThread> {
        let fs = Arc::downgrade(fs);
        let device = Arc::clone(&device.file);
        BackgroundThread::start("fuse-care", move |end| {
            maintenance_loop(&fs, &device, &events, end);
        })
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        self.stop_event.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn free_loop(fs: &Weak<Fs>, end: &EventFd) {
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
fn commit_loop(fs: &Weak<Fs>, interval: Duration, wanted: &EventFd, end: &EventFd) {
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

fn maintenance_loop(fs: &Weak<Fs>, device: &OwnedFd, events: &WriteEvents, end: &EventFd) {
    let mut due = Instant::now() + MAINTENANCE_INTERVAL;
    loop {
        let mut awaited = vec![end.as_raw_fd()];
        let until = match fs.upgrade() {
            None => return,
            Some(fs) => {
                if Instant::now() >= due {
                    for ino in fs.collect_direct_writes() {
                        classic::invalidate_inode(device, ino.0);
                    }
                    events.queue_unseen_writes(&fs);
                    if let Err(cause) = fs.flush_all_times() {
                        tracing::debug!(%cause, "cannot write file times; trying again");
                    }
                    if let Err(cause) = fs.flush_old_mmap_dirty() {
                        tracing::warn!(%cause, "cannot write dirty pages of mappings to their files yet");
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
