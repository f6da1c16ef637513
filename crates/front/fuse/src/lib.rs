//! The FUSE server: a mounted file system as the kernel sees it.
//!
//! Requests come by one of two transports ([RFD 013]): read from `/dev/fuse`, or
//! through io_uring where the kernel has that on. Each of several threads takes one
//! and answers it before it takes the next.
//!
//! [RFD 013]: ../../../../docs/rfd/013-fuse-transports.md
//!
//! What is kept where. Contents are cached only where [`Caching::PageCache`] is asked for:
//! else every file is opened for direct I/O. A write is answered when every in-sync copy has
//! it. Names and attributes
//! are kept by the kernel until it changes them itself, because nothing changes
//! except through this mount: whoever mounts has attached the volume exclusively.
//! A mount elsewhere fences this one, and then every request fails.
//!
//! Permissions are checked by the kernel (`default_permissions`), and locks are
//! its own: they hold among the programs of this mount.
//!
//! `unsafe` is in two modules: `create_memfd`, for what the kernel writes to behind the
//! compiler's back, and `handle`, for calls that no library makes safe. Each block says what it
//! relies on.

#![deny(unsafe_code)]

mod abi;
mod abort;
mod attr;
mod background;
mod batching;
mod busy;
mod caching;
mod classic;
mod cpu_affinity;
mod device;
mod events;
mod extra_threads;
#[cfg(test)]
mod fuzz;
mod handle;
mod memory;
mod names;
mod null;
mod open_files;
mod reply;
mod request;
mod request_handler;
mod ring;
mod serve;
mod session;
mod worker_pool;

pub use attr::now;
pub use device::{abort_dir, unmount_dir};
pub use null::{NullMount, mount_null};

use background::BackgroundThread;
use device::Device;
use events::{EventThread, WriteEvents};
use pagemesh_fs::{Fs, FsError, Ino};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use serve::FsHandler;
use session::FuseSession;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that serve, at most: about as many as a volume has channels.
pub const THREADS_MAX: usize = 64;
/// How long the times of data writes may be known in memory only.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Under load every completion wakes whoever watches idle ports, too.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// How requests come from the kernel and answers get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through io_uring where it can be, otherwise classic.
    Auto,
    /// By read and write on `/dev/fuse`.
    Classic,
    /// Through io_uring, or not at all.
    IoUring,
}

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What `df` and `mount` show as the source.
    pub source: String,
    /// Threads that serve, 1 to [`THREADS_MAX`]; through io_uring rounded up to a
    /// multiple of the processors that are possible.
    pub threads: usize,
    /// Whether other users than the one who mounts may use it.
    pub allow_other: bool,
    /// How requests come.
    pub transport: Transport,
    /// Whether idle processors may be kept from sleeping while the mount is busy.
    pub may_keep_cpus_awake: bool,
    /// Whether the kernel caches pages of files.
    pub caching: Caching,
}

/// How the kernel reads and writes files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Through the page cache, but for files that the preload library opens.
    PageCache,
    /// Each call is a request. Linux 6.18 and before do not move the position of such a file for
    /// io_uring with offset -1 (RFD 023).
    Bypassed,
}

/// Why there is no mount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or the system refused.
    #[error("cannot mount on {}: {cause}; /dev/fuse must be there, and whoever is not root needs fusermount3", dir.display())]
    Refused {
        /// Where.
        dir: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// It was asked for, and there is none.
    #[error("cannot mount with io_uring: {0}; or mount with --fuse classic")]
    NoRing(String),
    /// Threads or descriptors.
    #[error("cannot serve the mount: {0}")]
    System(#[from] io::Error),
}

/// Called when the volume fails a change for good; several times perhaps.
pub type ErrorHook = Box<dyn Fn(&FsError) + Send + Sync>;

/// Bytes that the pools still have, where somebody knows: the file system can have
/// less than its limit.
pub type FreeSpaceFn = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Takes the socket that a thread offers by an `ioctl` on a file of the mount, with the
/// argument, see [`pagemesh_base::contact`].
pub type ConnectHook = Box<dyn Fn(u32, &[u8]) -> Result<(), Errno> + Send + Sync>;

/// A mount that is there and served, until it is dropped.
pub struct FuseMount {
    session: FuseSession,
    connect_hook: Arc<OnceLock<ConnectHook>>,
    fs: Arc<Fs>,
    maintenance: MountMaintenance,
    free_thread: BackgroundThread,
}

/// Unmounts from another thread.
pub struct Unmounter {
    device: Arc<Device>,
    /// None that a mount has which does nothing.
    fs: Weak<Fs>,
}

impl Unmounter {
    /// Takes the mount from its place in this mount namespace, if it is there.
    /// [`FuseMount::serve`] returns when no other one has it.
    ///
    /// # Errors
    /// `EBUSY` while something in it is used.
    pub fn unmount(&self) -> io::Result<()> {
        self.device.unmount()
    }

    /// Whether it is there. Once it is not, another one may have its device number.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.device.is_alive()
    }

    /// Takes the mount away from whoever uses it, in any mount namespace, whatever they wait
    /// for.
    ///
    /// # Errors
    /// What the kernel says. Then only the end of the process ends the connection.
    pub fn abort(&self) -> io::Result<()> {
        if let Some(fs) = self.fs.upgrade() {
            fs.stop_resending();
        }
        self.device.abort()
    }
}

/// Mounts a file system on a directory.
///
/// # Errors
/// When the kernel refuses, or threads cannot be started.
pub fn mount(
    fs: Arc<Fs>,
    dir: &Path,
    options: &MountOptions,
    error_hook: ErrorHook,
    free_space: FreeSpaceFn,
) -> Result<FuseMount, MountError> {
    let connect = Arc::default();
    let event_thread: Arc<EventThread> = Arc::default();
    let served = FsHandler::new(
        Arc::clone(&fs),
        error_hook,
        free_space,
        Arc::clone(&connect),
        options.caching,
        Arc::clone(&event_thread),
    );
    let served: Arc<dyn request_handler::RequestHandler> = Arc::new(served);
    let session = FuseSession::start(dir, options, &served)?;
    register_kernel_callbacks(&fs, &session.device.file);
    let events = WriteEvents::start(&fs, &session.device, &event_thread)?;
    Ok(FuseMount {
        maintenance: MountMaintenance::start(&fs, &session.device, events)?,
        free_thread: BackgroundThread::start_free_thread(&fs)?,
        session,
        connect_hook: connect,
        fs,
    })
}

/// Has the file system tell the kernel what direct clients change.
fn register_kernel_callbacks(fs: &Fs, device: &Arc<OwnedFd>) {
    let device = Arc::downgrade(device);
    let known = device.clone();
    fs.set_append_hook(move |ino| {
        if let Some(device) = known.upgrade() {
            classic::invalidate_attributes(&device, ino.0);
        }
    });
    let known = device.clone();
    let drop_pages = move |ino: Ino, bytes: Option<Range<u64>>| {
        let Some(device) = known.upgrade() else {
            return false;
        };
        match bytes {
            Some(bytes) => classic::invalidate_bytes(&device, ino.0, bytes),
            None => classic::invalidate_inode(&device, ino.0),
        }
    };
    let tell_size = move |ino: Ino, size, last| {
        if let Some(device) = device.upgrade() {
            classic::notify_size(&device, ino.0, size, last);
        }
    };
    fs.set_kernel_callbacks(Box::new(drop_pages), Box::new(tell_size));
}

impl FuseMount {
    /// Unmounts from another thread.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        Unmounter {
            device: Arc::clone(&self.session.device),
            fs: Arc::downgrade(&self.fs),
        }
    }

    /// Has processes reach the mounting process by files of the mount from now on.
    pub fn set_connect_hook(&self, connect: ConnectHook) {
        // The first one counts.
        let _ = self.connect_hook.set(connect);
    }

    /// How requests come: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.session.transport
    }

    /// Waits until it is unmounted, and then puts times where they belong and makes
    /// everything durable.
    ///
    /// # Errors
    /// When the device or the volume fails.
    pub fn serve(self) -> Result<(), ServeError> {
        self.serve_with_hook(|| {})
    }

    /// The same, and calls `gone` when the kernel has the mount no more, before anything is
    /// put where it belongs.
    ///
    /// # Errors
    /// As there.
    pub fn serve_with_hook(self, gone: impl FnOnce()) -> Result<(), ServeError> {
        self.session.serve(|| self.fs.stop_resending())?;
        gone();
        drop(self.free_thread);
        drop(self.maintenance);
        let mut channel = self.fs.borrow_channel()?;
        Ok(self.fs.sync_all(&mut channel)?)
    }
}

/// Why serving ended otherwise than by an unmount.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The device failed.
    #[error("the connection to the kernel failed: {0}")]
    Device(#[from] io::Error),
    /// The volume failed.
    #[error(transparent)]
    Fs(#[from] FsError),
}

/// A thread that does what is due while nobody asks for anything.
struct MountMaintenance {
    stop_event: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl MountMaintenance {
    fn start(
        fs: &Arc<Fs>,
        device: &Arc<Device>,
        events: WriteEvents,
    ) -> io::Result<MountMaintenance> {
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (fs, told) = (Arc::downgrade(fs), Arc::clone(&end));
        let device = Arc::clone(&device.file);
        let thread = std::thread::Builder::new()
            .name("fuse-care".into())
            .spawn(move || maintenance_loop(&fs, &device, &events, &told))?;
        Ok(MountMaintenance {
            stop_event: end,
            thread: Some(thread),
        })
    }
}

impl Drop for MountMaintenance {
    fn drop(&mut self) {
        // Its counter is far from full.
        let _ = rustix::io::write(&*self.stop_event, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn maintenance_loop(fs: &Weak<Fs>, device: &OwnedFd, events: &WriteEvents, end: &OwnedFd) {
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
                        tracing::debug!(%cause, "times of files were not put down");
                    }
                    if let Err(cause) = fs.flush_old_mmap_dirty() {
                        tracing::warn!(%cause, "what was stored into mappings is not in its file yet");
                    }
                    due = Instant::now() + MAINTENANCE_INTERVAL;
                }
                fs.poll_idle_channels(Instant::now(), &mut awaited)
            }
        };
        let began = Instant::now();
        wait(&awaited, Some(until.map_or(due, |until| until.min(due))));
        if rustix::io::read(end, &mut [0; 8]).is_ok() {
            return;
        }
        if let Some(rest) = POLL_INTERVAL_MIN.checked_sub(began.elapsed()) {
            wait(&[end.as_raw_fd()], Some(Instant::now() + rest));
        }
    }
}

/// Waits for the volume; a [`pagemesh_fs::Wait`].
pub fn wait(descriptors: &[RawFd], until: Option<Instant>) {
    if let Err(cause) = pagemesh_base::wait::until_readable(descriptors, until) {
        tracing::error!(%cause, "cannot wait for the volume");
    }
}
