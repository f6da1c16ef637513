//! A pool and its users within this process: the maintenance thread, and a worker for each
//! connection.
//!
//! Invariants: the data path of a worker takes no lock of this process. Only opening, closing and
//! control calls lock the pool, and a worker that has no frames or no journal room left: it runs
//! the maintenance itself. The maintenance thread sleeps until a session rings the doorbell, so an
//! idle brick costs nothing.

mod barrier;
mod damage_report;
mod owner_requests;
pub mod pool_devices;
mod reopen;
pub mod tier;
mod versions;

pub(crate) use barrier::{OPERATION_LIMIT, RESUME_AFTER};
pub use reopen::{DeviceErrors, DeviceFailures};

use crate::disk_file::{self, OpenOptions, StartedDisk};
use crate::file::{self, FileError};
use crate::further_devices::FoundDevice;
use crate::scrub::ScrubSchedule;
use crate::stalled_sessions::StalledSessions;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison::lock;
use pagemesh_base::slice::SliceError;
use pagemesh_pmem::{DiskFigures, DiskMedia, Durability, MappedMedia, Media, TieredMedia};
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::pool_mapping::PoolMapping;
use pagemesh_store::recovery::RecoverySummary;
use pagemesh_store::session::Session;
use pagemesh_telemetry::{MediaBytes, MeterSet};
use pool_devices::PoolDevices;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tier::{Tier, TierThread};
use uuid::Uuid;
use versions::VersionCache;

/// The longest pause of the maintenance for threads that wait for the pool.
const POOL_YIELD_MAX: Duration = Duration::from_millis(2);

/// A running pool.
pub struct Brick<M = MappedMedia> {
    pool: Mutex<Pool<M>>,
    /// Threads that wait for the pool's lock.
    pool_waiters: AtomicUsize,
    mapping: Arc<PoolMapping<M>>,
    durability: Durability,
    /// Notified whenever a session was closed.
    session_closed: Condvar,
    stopping: AtomicBool,
    failed: AtomicBool,
    failure_hook: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub(crate) scrubs: Mutex<ScrubSchedule>,
    /// Slices and the sessions of this process that attached them, the oldest
    /// first. Locked before the pool.
    attached: Mutex<Vec<(SliceId, u32)>>,
    /// Locked last.
    stalled: Mutex<StalledSessions>,
    pub(crate) pool_devices: PoolDevices,
    /// Counts the requests over `tcp`.
    meters: Arc<MeterSet>,
    tier: Tier,
    versions: VersionCache,
    /// None for a pool that is not in a file.
    owner_lock: Option<file::OwnerLock>,
}

/// The thread that checkpoints and grants frames. Dropping it ends the brick.
pub struct MaintenanceThread<M: Media = MappedMedia> {
    brick: Arc<Brick<M>>,
    thread: Option<JoinHandle<()>>,
    tier: Option<TierThread<M>>,
}

impl Brick {
    /// Opens a pool in memory: recovers it and starts its maintenance thread.
    ///
    /// # Errors
    /// When the file is no pool, damaged, in use, or of class `file-sync`.
    pub fn open(path: &Path) -> Result<OpenedBrick<MappedMedia>, FileError> {
        match OpenedPool::open(path, OpenOptions::default())? {
            OpenedPool::Mapped(opened) => Ok(opened),
            OpenedPool::Disk(_) | OpenedPool::Tiered(_) => Err(FileError::OnDisk(path.into())),
        }
    }
}

impl Brick<DiskMedia> {
    /// Opens a pool of class `file-sync`.
    ///
    /// # Errors
    /// As [`OpenedPool::open`], and when the pool has another class.
    pub fn open_disk(
        path: &Path,
        options: OpenOptions,
    ) -> Result<OpenedBrick<DiskMedia>, FileError> {
        match OpenedPool::open(path, options)? {
            OpenedPool::Disk(opened) => Ok(opened),
            other => Err(FileError::NoDisk {
                path: path.into(),
                class: other.durability(),
            }),
        }
    }
}

/// A running pool on the medium of its class: a disk for `file-sync`, a mapping for the others.
pub enum OpenedPool {
    /// A pool in memory.
    Mapped(OpenedBrick<MappedMedia>),
    /// A pool on disks.
    Disk(OpenedBrick<DiskMedia>),
    /// A pool in memory with disks behind it.
    Tiered(OpenedBrick<TieredMedia>),
}

impl OpenedPool {
    /// Opens a pool: recovers it and starts its maintenance thread.
    ///
    /// # Errors
    /// When the file is no pool, damaged, or in use, or a further device is missing.
    pub fn open(path: &Path, options: OpenOptions) -> Result<OpenedPool, FileError> {
        let (media, claim) = file::open_with(path, options.allocation())?;
        let durability = media.durability();
        if file::needs_sync(durability) {
            let started = disk_file::start(path, media, &options)?;
            let views = [started.disk.data(), started.disk.overlay()].map(Arc::new);
            let recover = |failed: &[Uuid]| Brick::recover(path, views, durability, claim, failed);
            return open_on_disk(path, &started, recover).map(OpenedPool::Disk);
        }
        match disk_file::start_behind(path, &media, &options)? {
            Some(started) => open_with_disks(path, media, claim, &started).map(OpenedPool::Tiered),
            None => open_mapped(path, media, claim).map(OpenedPool::Mapped),
        }
    }

    /// The durability class of the pool's first device.
    #[must_use]
    pub fn durability(&self) -> Durability {
        match self {
            OpenedPool::Mapped((brick, ..)) => brick.durability(),
            OpenedPool::Disk((brick, ..)) => brick.durability(),
            OpenedPool::Tiered((brick, ..)) => brick.durability(),
        }
    }
}

/// Opens a pool in memory without disks.
fn open_mapped(
    path: &Path,
    media: MappedMedia,
    claim: file::OwnerLock,
) -> Result<OpenedBrick<MappedMedia>, FileError> {
    let durability = media.durability();
    let media = Arc::new(media);
    let views = [media.clone(), media];
    Brick::recover(path, views, durability, claim, &[])
}

/// Opens a pool in memory with the disks behind it, or so that it takes disks.
fn open_tiered(
    path: &Path,
    media: MappedMedia,
    claim: file::OwnerLock,
    options: &OpenOptions,
) -> Result<OpenedBrick<TieredMedia>, FileError> {
    let started = disk_file::start_behind(path, &media, options)?;
    let started = started.ok_or_else(|| FileError::InUse(path.into()))?;
    open_with_disks(path, media, claim, &started)
}

fn open_with_disks(
    path: &Path,
    media: MappedMedia,
    claim: file::OwnerLock,
    started: &StartedDisk,
) -> Result<OpenedBrick<TieredMedia>, FileError> {
    let durability = media.durability();
    let media = Arc::new(TieredMedia::new(media, started.disk.data()));
    let views = [media.clone(), media];
    let recover = |failed: &[Uuid]| Brick::recover(path, views, durability, claim, failed);
    open_on_disk(path, started, recover)
}

/// Recovers a pool with disks. A failure of a disk ends its brick.
fn open_on_disk<M: Media + Send + Sync + 'static>(
    path: &Path,
    started: &StartedDisk,
    recover: impl FnOnce(&[Uuid]) -> Result<OpenedBrick<M>, FileError>,
) -> Result<OpenedBrick<M>, FileError> {
    let StartedDisk {
        disk,
        found,
        failed,
    } = started;
    let opened = recover(failed);
    if let Some(cause) = disk.failure() {
        let path = path.into();
        return Err(FileError::DiskFailed { path, cause });
    }
    let opened = opened?;
    let brick = Arc::downgrade(&opened.0);
    disk.on_failure(move |cause| {
        if let Some(brick) = brick.upgrade() {
            brick.fail(&cause);
        }
    });
    let mut pool = opened.0.pool();
    for FoundDevice { device, path, .. } in found {
        opened.0.pool_devices.note_path(device.id, path);
        if !pool.set_device_path(device.id, path) {
            tracing::warn!(
                "the pool has no room for the path {} of a device: name it with --device at each start",
                path.display()
            );
        }
    }
    for id in failed {
        let known = pool.device_path(*id).map(Path::to_owned);
        if let Some(known) = &known {
            opened.0.pool_devices.note_path(*id, known);
        }
        tracing::error!(
            device = %id, path = ?known,
            "a device of the pool has failed: its pages are damaged; scrubs of their volumes repair them from other copies; \
             drain it, so that the pool forgets it"
        );
    }
    drop(pool);
    opened.0.continue_device_work();
    Ok(opened)
}

/// A brick, its maintenance thread, and the findings of its recovery.
pub type OpenedBrick<M> = (Arc<Brick<M>>, MaintenanceThread<M>, RecoverySummary);

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// Recovers a pool from its data view and its overlay, and starts the maintenance thread.
    fn recover(
        path: &Path,
        [media, overlay]: [Arc<M>; 2],
        durability: Durability,
        claim: file::OwnerLock,
        failed: &[Uuid],
    ) -> Result<OpenedBrick<M>, FileError> {
        let bad = |cause| FileError::Pool {
            path: path.into(),
            cause,
        };
        let (pool, recovered) = Pool::open_without(media, overlay, failed).map_err(bad)?;
        damage_report::warn_of_damage(path, pool.mapping().pool(), &recovered);
        let brick = Arc::new(Brick::from_pool(pool, durability, Some(claim)));
        let thread = std::thread::Builder::new().name("maintenance".into());
        let runner = brick.clone();
        let thread = thread
            .spawn(move || runner.maintenance_loop())
            .map_err(|cause| FileError::System {
                action: "start the maintenance thread of",
                path: path.into(),
                cause,
            })?;
        // The manager and its users know nothing of the brick's directory.
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
        brick.pool_devices.note_path(brick.id().0, &whole);
        let tier = TierThread::start(&brick).map_err(|cause| FileError::System {
            action: "start the tier's thread of",
            path: path.into(),
            cause,
        });
        let mut maintenance_thread = MaintenanceThread {
            brick: brick.clone(),
            thread: Some(thread),
            tier: None,
        };
        maintenance_thread.tier = tier?;
        Ok((brick, maintenance_thread, recovered))
    }

    fn maintenance_loop(&self) {
        self.mapping.control().serve_doorbell(
            || self.is_ending(),
            || {
                let more = self.maintain();
                self.yield_pool();
                let wait = self.scrub_if_due(Instant::now());
                if more { Some(Duration::ZERO) } else { wait }
            },
        );
    }
}

impl<M: Media> Brick<M> {
    fn from_pool(
        pool: Pool<M>,
        durability: Durability,
        claim: Option<file::OwnerLock>,
    ) -> Brick<M> {
        Brick {
            mapping: pool.mapping().clone(),
            pool: Mutex::new(pool),
            pool_waiters: AtomicUsize::new(0),
            durability,
            session_closed: Condvar::new(),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            failure_hook: OnceLock::new(),
            scrubs: Mutex::default(),
            attached: Mutex::default(),
            stalled: Mutex::default(),
            pool_devices: PoolDevices::default(),
            meters: Arc::default(),
            tier: Tier::default(),
            versions: VersionCache::default(),
            owner_lock: claim,
        }
    }

    /// A brick without threads, around an open pool. Its owner calls [`Brick::maintain`] when the
    /// doorbell of the control segment was rung.
    #[must_use]
    pub fn new(pool: Pool<M>, durability: Durability) -> Brick<M> {
        Brick::from_pool(pool, durability, None)
    }

    /// The meters of the connections over `tcp`.
    #[must_use]
    pub fn meters(&self) -> &Arc<MeterSet> {
        &self.meters
    }

    /// The bytes written to the medium since the pool was opened, by this process and by clients that map the pool.
    #[must_use]
    pub fn media_bytes(&self) -> MediaBytes {
        self.pool().media_bytes()
    }

    /// One round of maintenance: checkpoint, grants, answers to waiting sessions. True if more work
    /// is due at once.
    pub fn maintain(&self) -> bool {
        let mut corrected = 0;
        let maintained = self.retry_while_stuck(|pool| {
            let before = pool.corrected_records();
            let maintained = pool.maintain();
            corrected += pool.corrected_records() - before;
            maintained
        });
        if corrected > 0 {
            tracing::warn!(
                pool = %self.mapping.pool(), records = corrected,
                "the medium had damaged records of the journal, and they were mended; \
                 a medium that loses bits should be replaced"
            );
        }
        self.end_stalled();
        self.wake_tier();
        match maintained {
            Ok(more) => more,
            // Reported already; the next doorbell retries.
            Err(ObjectError::SessionStuck { .. }) => false,
            Err(cause) => {
                self.fail(&cause);
                false
            }
        }
    }

    /// Ends the brick: the durable state is unknown, so the pool must be recovered.
    pub(crate) fn fail(&self, cause: &dyn std::fmt::Display) {
        if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!(%cause, pool = %self.mapping.pool(), "the pool failed");
            self.mapping.control().ring_doorbell();
            if let Some(hook) = self.failure_hook.get() {
                hook();
            }
        }
    }

    pub(crate) fn tier(&self) -> &Tier {
        &self.tier
    }

    /// Whether the brick ends, or has failed.
    pub(crate) fn is_ending(&self) -> bool {
        self.stopping.load(Ordering::Acquire) || self.has_failed()
    }

    pub(crate) fn stalled(&self) -> MutexGuard<'_, StalledSessions> {
        lock(&self.stalled)
    }

    pub(crate) fn pool(&self) -> MutexGuard<'_, Pool<M>> {
        self.pool_waiters.fetch_add(1, Ordering::Relaxed);
        let pool = lock(&self.pool);
        self.pool_waiters.fetch_sub(1, Ordering::Relaxed);
        pool
    }

    /// Lets threads that wait for the pool take it before the next round of maintenance. The lock is not fair: a thread
    /// that takes it again at once keeps the others out for as long as it has work.
    fn yield_pool(&self) {
        let until = Instant::now() + POOL_YIELD_MAX;
        while self.pool_waiters.load(Ordering::Relaxed) > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
    }

    /// The figures of the disk below the pool. None for a pool in memory.
    #[must_use]
    pub fn disk_figures(&self) -> Option<DiskFigures> {
        self.mapping.media().disk_figures()
    }

    /// Calls `hook` when the pool fails, or now if it has failed. Threads of the brick may be stuck then.
    pub fn on_failure(&self, hook: impl Fn() + Send + Sync + 'static) {
        if self.failure_hook.set(Box::new(hook)).is_ok()
            && self.has_failed()
            && let Some(hook) = self.failure_hook.get()
        {
            hook();
        }
    }

    /// The mapping of the pool that sessions share.
    #[must_use]
    pub fn mapping(&self) -> &Arc<PoolMapping<M>> {
        &self.mapping
    }

    /// The pool's identity.
    #[must_use]
    pub fn id(&self) -> BrickId {
        BrickId(self.mapping.pool())
    }

    /// The durability class of the pool's medium.
    #[must_use]
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Another handle of the lock that keeps other bricks away.
    fn share_owner_lock(&self, path: &Path) -> Result<file::OwnerLock, FileError> {
        match &self.owner_lock {
            Some(claim) => claim.share(path),
            None => Err(FileError::InUse(path.into())),
        }
    }

    /// Whether the pool failed and the brick should end.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Whether clients may map the pool themselves.
    #[must_use]
    pub fn can_be_mapped(&self) -> bool {
        !file::needs_sync(self.durability)
    }

    /// Opens a session for a thread of this process or for another process.
    ///
    /// # Errors
    /// When all sessions are in use.
    pub fn open_session(&self, pid: u32, start_time: u64) -> Result<u32, SliceError> {
        self.pool()
            .open_session(pid, start_time)
            .map_err(|cause| self.report_error(cause))
    }

    /// Ends a session after its connection has ended.
    pub fn close_session(&self, number: u32) {
        // Before another session can get the number.
        self.attached().retain(|(_, session)| *session != number);
        self.wait_until_outside(number);
        if let Err(cause) = self.pool().close_session(number) {
            tracing::error!(%cause, number, "cannot end a session");
        }
        self.session_closed.notify_all();
        // The session's frames can be granted again.
        self.mapping.control().ring_doorbell();
    }

    /// A session of this process. It does not sleep until the maintenance thread has served it,
    /// which may be busy with another session, but runs the maintenance itself.
    pub(crate) fn session(self: &Arc<Self>, number: u32) -> Session<M>
    where
        M: Send + Sync + 'static,
    {
        let brick = Arc::clone(self);
        let tend = Box::new(move || brick.maintain_for(number));
        Session::new(self.mapping.clone(), number).in_owner_process(tend)
    }
}

impl<M: Media> MaintenanceThread<M> {
    /// Ends the brick: refuses every session, and leaves a checkpoint.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.brick.pool_devices.end();
        self.brick.stopping.store(true, Ordering::Release);
        self.tier = None;
        self.brick.mapping.control().ring_doorbell();
        if thread.join().is_err() {
            tracing::error!("the maintenance thread panicked");
        }
        self.brick.mapping.mark_owner_gone();
        if let Err(cause) = self.brick.pool().checkpoint() {
            tracing::warn!(%cause, "no last checkpoint; the next start replays the journal");
        }
    }
}

impl<M: Media> Drop for MaintenanceThread<M> {
    fn drop(&mut self) {
        self.end();
    }
}
