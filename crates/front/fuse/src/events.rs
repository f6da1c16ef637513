//! `IN_MODIFY` for writes that the kernel did not see: direct clients write to the pools without a
//! system call, so the kernel notifies no watcher (inotify, fanotify).
//!
//! A separate thread makes the kernel notify them. It opens the inode on a clone of the mount, and
//! sets its mtime. The kernel sends SETATTR for that, and the mount answers with the unchanged
//! attributes. Then the kernel notifies the watchers of the file and of its directory
//! (`notify_change`). The call changes and writes nothing.
//!
//! Invariants:
//!
//! - No thread that serves requests makes such a call: the call waits for an answer.
//! - The answer carries the size of the file, and the kernel adopts it. So the end must not move
//!   meanwhile: programs cannot move it, as the kernel holds the inode's lock, and direct clients
//!   cannot, as the mount holds the append lock ([`Fs::lock_end`]).
//! - The mount can be unmounted at any time: the clone lasts for a few files, and the thread holds
//!   no descriptor of the mount itself. The answer does not wait for the volume.
//! - At most [`FILES_MAX`] files wait; others stay listed in the file system.

use crate::device::Device;
use crate::handle::{open_node, unshare_directories};
use pagemesh_base::poison::{self, recover};
use pagemesh_fs::{Attr, Fs, FsError, Ino};
use rustix::fs::{AtFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};
use rustix::io::Errno;
use rustix::process::{chdir, fchdir};
use rustix::thread::gettid;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// Files with watchers to notify in one round of the maintenance thread, one round per second. Each
/// takes some 0.1 ms.
const FILES_MAX: usize = 64;
/// How long an answer may wait for the file system. After that the file is queued again.
const REPLY_TIMEOUT: Duration = Duration::from_millis(20);
/// Delay between two attempts.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// How long the end of a mount waits for the thread. After that the thread goes on by itself,
/// without harm.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The id of the thread that makes the calls, as in the kernel's requests; 0: there is none.
#[derive(Debug, Default)]
pub(crate) struct EventThread(AtomicU32);

impl EventThread {
    /// Whether a request comes from that thread.
    pub(crate) fn is_event_thread(&self, thread: u32) -> bool {
        thread != 0 && thread == self.0.load(Ordering::Relaxed)
    }
}

/// Attributes for the answer to such a call.
///
/// # Errors
/// `EAGAIN` if the file system stays busy.
pub(crate) fn attr_with_timeout(fs: &Fs, ino: Ino) -> Result<Attr, FsError> {
    let until = Instant::now() + REPLY_TIMEOUT;
    loop {
        match fs.try_attr(ino) {
            Err(FsError::Posix(Errno::AGAIN)) if Instant::now() < until => {
                std::thread::sleep(POLL_INTERVAL);
            }
            told => return told,
        }
    }
}

/// Makes the kernel notify watchers.
pub(crate) struct WriteEvents(Arc<EventShared>);

struct EventShared {
    state: Mutex<EventState>,
    changed: Condvar,
}

#[derive(Default)]
struct EventState {
    files: Vec<Ino>,
    is_refused: bool,
    is_stopping: bool,
    has_ended: bool,
}

impl EventShared {
    fn lock_state(&self) -> MutexGuard<'_, EventState> {
        poison::lock(&self.state)
    }

    /// Waits for files; none: the mount ends.
    fn wait_for_files(&self) -> Option<Vec<Ino>> {
        let waits = |state: &mut EventState| state.files.is_empty() && !state.is_stopping;
        let state = self.changed.wait_while(self.lock_state(), waits);
        let mut state = recover(state);
        (!state.is_stopping).then(|| std::mem::take(&mut state.files))
    }

    fn is_stopping(&self) -> bool {
        self.lock_state().is_stopping
    }
}

impl WriteEvents {
    pub(crate) fn start(
        fs: &Arc<Fs>,
        device: &Arc<Device>,
        thread: &Arc<EventThread>,
    ) -> io::Result<WriteEvents> {
        let shared = Arc::new(EventShared {
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let sender = EventSender {
            fs: Arc::downgrade(fs),
            device: Arc::downgrade(device),
            shared: Arc::clone(&shared),
        };
        let thread = Arc::clone(thread);
        std::thread::Builder::new()
            .name("fuse-events".into())
            .spawn(move || {
                let number = gettid().as_raw_nonzero().get();
                thread.0.store(number.cast_unsigned(), Ordering::Relaxed);
                sender.run();
                thread.0.store(0, Ordering::Relaxed);
            })?;
        Ok(WriteEvents(shared))
    }

    /// Queues the files that were written without the kernel since the last call.
    pub(crate) fn queue_unseen_writes(&self, fs: &Fs) {
        // Only this thread adds files.
        let room = match &*self.0.lock_state() {
            EventState { is_refused, .. } if *is_refused => usize::MAX,
            state => FILES_MAX - state.files.len(),
        };
        let files = fs.take_unseen_writes(room);
        let mut state = self.0.lock_state();
        if !files.is_empty() && !state.is_refused {
            state.files.extend(files);
            self.0.changed.notify_all();
        }
    }
}

impl Drop for WriteEvents {
    fn drop(&mut self) {
        let mut state = self.0.lock_state();
        state.is_stopping = true;
        self.0.changed.notify_all();
        let waits = |state: &mut EventState| !state.has_ended;
        let waited = self
            .0
            .changed
            .wait_timeout_while(state, STOP_TIMEOUT, waits);
        let (state, _) = recover(waited);
        if !state.has_ended {
            tracing::debug!("the thread that notifies watchers has not stopped in time");
        }
    }
}

struct EventSender {
    fs: Weak<Fs>,
    device: Weak<Device>,
    shared: Arc<EventShared>,
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.shared.lock_state().has_ended = true;
        self.shared.changed.notify_all();
    }
}

/// Why watchers are not notified.
enum NotifyError {
    /// Permanent: the kernel refuses, or a capability is missing.
    Refused(&'static str, Errno),
    /// Transient.
    Transient(Errno),
}

/// Classifies the error of a call that concerns no file in particular.
fn classify(call: &'static str, errno: Errno) -> NotifyError {
    match errno {
        Errno::PERM | Errno::ACCESS | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP => {
            NotifyError::Refused(call, errno)
        }
        errno => NotifyError::Transient(errno),
    }
}

impl EventSender {
    fn run(&self) {
        let mut is_alone = false;
        while let Some(files) = self.shared.wait_for_files() {
            if !is_alone {
                is_alone = true;
                if let Err(errno) = unshare_directories() {
                    self.disable("unshare", errno);
                    return;
                }
            }
            match self.notify_watchers(&files) {
                Ok(()) => {}
                Err(NotifyError::Transient(cause)) => {
                    tracing::debug!(%cause, "cannot notify watchers of direct writes; trying again later");
                    files.iter().for_each(|&ino| self.requeue(ino));
                }
                Err(NotifyError::Refused(call, cause)) => return self.disable(call, cause),
            }
        }
    }

    fn disable(&self, call: &str, cause: Errno) {
        tracing::debug!(
            call, %cause,
            "watchers (inotify) get no events for direct writes; they take CAP_DAC_READ_SEARCH \
             and CAP_SYS_ADMIN"
        );
        let mut state = self.shared.lock_state();
        state.is_refused = true;
        state.files.clear();
    }

    /// Notifies the watchers of these files.
    fn notify_watchers(&self, files: &[Ino]) -> Result<(), NotifyError> {
        let Some(_there) = self.enter_mount()? else {
            tracing::debug!(
                "the mount is not in its place; watchers get no events for direct writes"
            );
            return Ok(());
        };
        for &ino in files {
            let Some(fs) = self.fs.upgrade().filter(|_| !self.shared.is_stopping()) else {
                break;
            };
            match self.notify_watchers_of(fs, ino) {
                Ok(()) => {}
                Err(NotifyError::Transient(Errno::AGAIN)) => self.requeue(ino),
                Err(NotifyError::Transient(cause)) => {
                    tracing::debug!(ino = ino.0, %cause, "cannot notify watchers of a direct write");
                }
                refused => return refused,
            }
        }
        Ok(())
    }

    /// None: the mount is not in its place.
    fn enter_mount(&self) -> Result<Option<MountDirectory>, NotifyError> {
        let cloned = self.device.upgrade().map(|device| device.clone_mount());
        let cloned = cloned.unwrap_or(Ok(None));
        let cloned = cloned.map_err(|errno| classify("open_tree", errno))?;
        cloned.map(MountDirectory::enter).transpose()
    }

    /// Notifies the watchers of a file. It drops the file system before calls that may wait for it:
    /// otherwise the mount could not end.
    fn notify_watchers_of(&self, fs: Arc<Fs>, ino: Ino) -> Result<(), NotifyError> {
        let attr = fs
            .attr(ino)
            .map_err(|error| NotifyError::Transient(error.errno()))?;
        let _held = fs
            .lock_end(ino)
            .ok_or(NotifyError::Transient(Errno::AGAIN))?;
        drop(fs);
        let node = open_node(ino.0, attr.generation).map_err(|errno| match errno {
            // The kernel has no such inode any more, so it has no watchers.
            Errno::STALE => NotifyError::Transient(errno),
            errno => classify("open_by_handle_at", errno),
        })?;
        touch(&node)
    }

    fn requeue(&self, ino: Ino) {
        if let Some(fs) = self.fs.upgrade() {
            fs.requeue_unseen_write(ino);
        }
    }
}

/// Sets the mtime of an open inode, and leaves the atime.
fn touch(node: impl AsFd) -> Result<(), NotifyError> {
    let at = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps {
        last_access: at(UTIME_OMIT),
        last_modification: at(UTIME_NOW),
    };
    let told = utimensat(node, c"", &times, AtFlags::EMPTY_PATH);
    told.map_err(|errno| match errno {
        // Linux 5.7 and before.
        Errno::INVAL | Errno::NOSYS => NotifyError::Refused("utimensat", errno),
        errno => NotifyError::Transient(errno),
    })
}

/// The clone is the working directory of this thread, and exists as long as this does.
struct MountDirectory;

impl MountDirectory {
    fn enter(cloned: impl AsFd) -> Result<MountDirectory, NotifyError> {
        fchdir(cloned).map_err(|errno| classify("fchdir", errno))?;
        Ok(MountDirectory)
    }
}

impl Drop for MountDirectory {
    fn drop(&mut self) {
        if let Err(cause) = chdir("/") {
            tracing::warn!(%cause, "the mount may stay in use until its process ends");
        }
    }
}
