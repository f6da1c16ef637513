//! The FUSE server: a mounted file system as the kernel sees it.
//!
//! Requests come by one of two transports ([RFD 013]): read from `/dev/fuse`, or through io_uring
//! if the kernel has it enabled. Several threads serve them; writes over `/dev/fuse` and io_uring
//! can be begun in batches.
//!
//! [RFD 013]: ../../../../docs/rfd/013-fuse-transports.md
//!
//! **Caching.** The kernel caches contents only with [`Caching::PageCache`]; otherwise every file
//! is opened for direct I/O. A write is answered when all in-sync legs have it. The kernel caches
//! names and attributes until it changes them itself, because all changes go through this mount:
//! the mounting process has attached the volume exclusively. A mount elsewhere fences this one, and
//! then every request fails.
//!
//! The kernel checks permissions (`default_permissions`) and implements locks: they hold among the
//! programs of this mount.
//!
//! `unsafe` is in two modules: `memory`, for memory that the kernel writes to, and `handle`, for
//! calls that no library makes safe. Each block states the conditions that it relies on.

#![deny(unsafe_code)]

mod abi;
mod abort;
mod attr;
mod batching;
mod busy;
mod caching;
mod classic;
mod cpu_affinity;
mod device;
mod direct_io;
mod events;
mod extra_threads;
mod handle;
mod memory;
mod names;
mod notifier;
mod null;
mod open_files;
mod option_watch;
mod reply;
mod request;
mod request_handler;
mod ring;
mod serve;
mod session;
mod snapshot_views;
mod sync_pattern;
#[cfg(feature = "test-api")]
#[doc(hidden)]
pub mod test_api;
mod thread_credentials;
mod worker_pool;

pub use attr::now;
pub use device::{MountFlags, abort_dir, remount_dir, unmount_dir};
pub use null::{NullMount, mount_null};

use device::Device;
use events::{EventThread, WriteEvents};
use notifier::{KernelNotifier, Notification, NotifierThread};
use open_files::OpenFiles;
use option_watch::OptionWatch;
use pagemesh_fs::{Fs, FsError, Ino, OpenSnapshots, UpkeepThread};
use rustix::fd::{OwnedFd, RawFd};
use rustix::io::Errno;
use serve::FsHandler;
use session::FuseSession;
use snapshot_views::{SnapshotViews, ViewHandler};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Most serving threads: about as many as a volume has channels.
pub const THREADS_MAX: usize = 64;
/// How requests come from the kernel and answers return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through io_uring if possible, otherwise classic.
    Auto,
    /// By read and write on `/dev/fuse`.
    Classic,
    /// Through io_uring, or not at all.
    IoUring,
}

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The source that `df` and `mount` show.
    pub source: String,
    /// Serving threads, 1 to [`THREADS_MAX`]; through io_uring rounded up to a multiple of the
    /// possible processors.
    pub threads: usize,
    /// Whether users other than the mounting one may use it.
    pub allow_other: bool,
    /// Options that the kernel implements.
    pub flags: MountFlags,
    /// The transport of requests.
    pub transport: Transport,
    /// Whether idle processors may be kept from sleeping while the mount is busy.
    pub may_keep_cpus_awake: bool,
    /// Whether the kernel caches pages of files.
    pub caching: Caching,
    /// Whether listings show `.snapshot`, on a mount with snapshots.
    pub shows_snapshots: bool,
    /// Whether another front of this process serves the file system, too. The file system then goes on after the end of the mount, and
    /// another mount may follow. The process runs its upkeep threads.
    pub is_shared: bool,
}

/// How the kernel reads and writes files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Through the page cache, except files that the preload library opens.
    PageCache,
    /// Each call is a request. Linux 6.18 and before do not move the position of such a file for
    /// io_uring with offset -1 (RFD 023).
    Bypassed,
}

/// Why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel or the system refused.
    #[error("cannot mount on {}: {cause}; /dev/fuse must exist, and users other than root need fusermount3", dir.display())]
    Refused {
        /// The directory.
        dir: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// io_uring was required, and is not available.
    #[error("cannot mount with io_uring: {0}; or mount with --fuse classic")]
    NoRing(String),
    /// The system has no threads or descriptors.
    #[error("cannot serve the mount: {0}")]
    System(#[from] io::Error),
}

/// Called when the volume fails a change for good; perhaps several times.
pub type ErrorHook = Box<dyn Fn(&FsError) + Send + Sync>;

/// Bytes that are free in the pools, if known: they can be less than the file system's limit
/// allows.
pub type FreeSpaceFn = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Takes the socket that a thread offers by an `ioctl` on a file of the mount, with its argument,
/// see [`pagemesh_base::mount_connection`].
pub type ConnectHook = Box<dyn Fn(u32, &[u8]) -> Result<(), Errno> + Send + Sync>;

/// A served mount, until it is dropped.
pub struct FuseMount {
    session: FuseSession,
    connect_hook: Arc<OnceLock<ConnectHook>>,
    fs: Arc<Fs>,
    maintenance: UpkeepThread,
    /// None if the file system is shared.
    free_thread: Option<UpkeepThread>,
    /// With a commit interval.
    commit_thread: Option<UpkeepThread>,
    /// If the file system is shared.
    kernel_use: Option<KernelUse>,
}

/// The kernel's use of a file system that goes on after the mount. It ends when this is dropped, after the session.
struct KernelUse {
    fs: Arc<Fs>,
    open_files: Arc<OpenFiles>,
    notifier: Option<NotifierThread>,
}

impl Drop for KernelUse {
    fn drop(&mut self) {
        self.notifier = None;
        self.open_files.release_all(&self.fs);
        self.fs.forget_kernel();
    }
}

/// Unmounts from another thread.
pub struct Unmounter {
    device: Arc<Device>,
    /// Empty for a [`NullMount`], and if the file system is shared.
    fs: Weak<Fs>,
}

impl Unmounter {
    /// Unmounts in this mount namespace, if the mount is in its place. [`FuseMount::serve`] returns
    /// when no other namespace has it.
    ///
    /// # Errors
    /// `EBUSY` while a program uses the mount.
    pub fn unmount(&self) -> io::Result<()> {
        self.device.unmount()
    }

    /// Whether the mount is there. Afterwards another mount may have its device number.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.device.is_alive()
    }

    /// Takes the mount away from all its users, in every mount namespace, also from callers that
    /// wait.
    ///
    /// # Errors
    /// The error of the kernel. Then only the end of the process ends the connection.
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
/// If the kernel refuses, or threads cannot be started.
pub fn mount(
    fs: Arc<Fs>,
    dir: &Path,
    options: &MountOptions,
    error_hook: ErrorHook,
    free_space: FreeSpaceFn,
) -> Result<FuseMount, MountError> {
    mount_with_snapshots(fs, dir, options, error_hook, free_space, None)
}

/// The same, with `.snapshot/NAME` in each directory for each snapshot.
///
/// # Errors
/// As [`mount`].
pub fn mount_with_snapshots(
    fs: Arc<Fs>,
    dir: &Path,
    options: &MountOptions,
    error_hook: ErrorHook,
    free_space: FreeSpaceFn,
    snapshots: Option<Arc<OpenSnapshots>>,
) -> Result<FuseMount, MountError> {
    let connect = Arc::default();
    let event_thread: Arc<EventThread> = Arc::default();
    let notifier: Arc<KernelNotifier> = Arc::default();
    let served = FsHandler::new(
        Arc::clone(&fs),
        error_hook,
        free_space,
        Arc::clone(&connect),
        options,
        Arc::clone(&event_thread),
        Arc::clone(&notifier),
    );
    let open_files = Arc::clone(&served.open_files);
    let served: Arc<dyn request_handler::RequestHandler> = match snapshots {
        None => Arc::new(served),
        Some(snapshots) => Arc::new(ViewHandler {
            live: served,
            views: SnapshotViews::new(snapshots),
            shows_views: options.shows_snapshots,
        }),
    };
    // Dropped after the session.
    let mut kernel_use = options.is_shared.then(|| KernelUse {
        fs: Arc::clone(&fs),
        open_files,
        notifier: None,
    });
    let session = FuseSession::start(dir, options, &served)?;
    register_kernel_callbacks(&fs, &session.device.file);
    if let Some(kernel_use) = &mut kernel_use {
        kernel_use.notifier = Some(start_notifier(&fs, &notifier, &session.device)?);
    }
    let events = WriteEvents::start(&fs, &session.device, &event_thread)?;
    let free_thread = match options.is_shared {
        true => None,
        false => Some(UpkeepThread::start_free_thread(&fs, wait)?),
    };
    Ok(FuseMount {
        maintenance: start_maintenance(&fs, &session.device, events, options.is_shared)?,
        free_thread,
        commit_thread: None,
        session,
        connect_hook: connect,
        fs,
        kernel_use,
    })
}

/// Starts the thread that reports names which another front removes.
fn start_notifier(
    fs: &Fs,
    notifier: &Arc<KernelNotifier>,
    device: &Arc<Device>,
) -> io::Result<NotifierThread> {
    let thread = NotifierThread::start(notifier, device)?;
    let notifier = Arc::clone(notifier);
    fs.set_name_hook(Box::new(move |directory, name, removed| {
        notifier.queue(Notification::Name {
            directory,
            name: name.to_vec(),
            removed,
        });
    }));
    Ok(thread)
}

/// Starts the periodic work of the file system, and of the kernel's view of it: invalidations after direct writes, events, and
/// changed options.
fn start_maintenance(
    fs: &Arc<Fs>,
    device: &Arc<Device>,
    events: WriteEvents,
    is_shared: bool,
) -> io::Result<UpkeepThread> {
    let options = OptionWatch::start(fs, device)?;
    let device = Arc::clone(&device.file);
    let each_second = move |fs: &Fs| {
        options.refresh(fs);
        for ino in fs.collect_direct_writes() {
            classic::invalidate_inode(&device, ino.0);
        }
        events.queue_unseen_writes(fs);
    };
    match is_shared {
        true => UpkeepThread::start_each_second(fs, wait, each_second),
        false => UpkeepThread::start_maintenance(fs, wait, each_second),
    }
}

/// Registers the callbacks by which the file system reports changes of direct clients to the
/// kernel.
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
            fs: match self.kernel_use {
                Some(_) => Weak::new(),
                None => Arc::downgrade(&self.fs),
            },
        }
    }

    /// Lets calls return before their changes are committed, for at most about `interval` ([`Fs::set_commit_interval`]). Call it once, before
    /// [`FuseMount::serve`].
    ///
    /// # Errors
    /// When the process or the system has no descriptor or thread left.
    pub fn defer_commits(&mut self, interval: Duration) -> io::Result<()> {
        self.commit_thread = Some(UpkeepThread::start_commits(&self.fs, wait, interval)?);
        Ok(())
    }

    /// Lets processes connect to the mounting process through files of the mount from now on.
    pub fn set_connect_hook(&self, connect: ConnectHook) {
        // Only the first call has an effect.
        let _ = self.connect_hook.set(connect);
    }

    /// The transport of requests: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.session.transport
    }

    /// Waits until it is unmounted, then writes the file times and makes everything durable.
    ///
    /// # Errors
    /// If the device or the volume fails.
    pub fn serve(self) -> Result<(), ServeError> {
        self.serve_with_hook(|| {})
    }

    /// As [`FuseMount::serve`], and calls `gone` when the kernel no longer has the mount, before
    /// times are written.
    ///
    /// # Errors
    /// As [`FuseMount::serve`].
    pub fn serve_with_hook(self, gone: impl FnOnce()) -> Result<(), ServeError> {
        let is_shared = self.kernel_use.is_some();
        let served = self.session.serve(|| {
            if !is_shared {
                self.fs.stop_resending();
            }
        });
        if served.is_ok() {
            gone();
        }
        drop(self.free_thread);
        drop(self.maintenance);
        drop(self.kernel_use);
        drop(self.commit_thread);
        // Also after an error of the device: acknowledged changes may wait.
        let synced = self.fs.borrow_channel();
        let synced = synced.and_then(|mut channel| self.fs.sync_all(&mut channel));
        served?;
        Ok(synced?)
    }
}

/// Why serving ended other than by an unmount.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The device failed.
    #[error("the connection to the kernel failed: {0}")]
    Device(#[from] io::Error),
    /// The volume failed.
    #[error(transparent)]
    Fs(#[from] FsError),
}

/// Waits for the volume; a [`pagemesh_fs::Wait`].
pub fn wait(descriptors: &[RawFd], until: Option<Instant>) {
    if let Err(cause) = pagemesh_base::wait::until_readable(descriptors, until) {
        tracing::error!(%cause, "cannot wait for the volume");
    }
}
