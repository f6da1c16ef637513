//! The devices of a running brick's pool: adding, draining and removing them.
//!
//! A thread carries out requests, puts new page-table nodes in the place of those on failed devices, and moves the data of
//! draining devices. It starts with the first request, or when a pool with a draining or failed device is opened, and ends
//! with the brick.
//!
//! Invariants: the pool is locked for single steps only, never over allocation of a file, a load of pages or a pause. One
//! device changes at a time. A drain has no state of its own on the medium but the state of the device: after a restart
//! it begins again, and finds what is left.

mod first_disk;
mod lost_nodes;
mod mover;
mod rate;
mod status;

pub use first_disk::FirstDisk;
pub use status::{DeviceStatus, DrainStatus};

use crate::brick::{Brick, DeviceErrors};
pub use crate::device_error::DeviceError;
use crate::device_file::{self, DeviceFile, DeviceFileError, NamedDevice};
use lost_nodes::LostNodes;
use mover::{DrainStep, Mover};
use pagemesh_base::poison::{lock, recover};
use pagemesh_pmem::{MapError, Media, NewDevice};
use pagemesh_store::devices::{Device, DeviceState};
use pagemesh_store::pool::{ObjectError, PreparedDevice};
use pagemesh_store::recovery::PoolError;
use status::{DrainRecord, next_to_drain};
use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Bytes that a drain moves per second while clients send requests, unless the operator chooses another rate.
pub const DRAIN_BYTES_PER_S: u64 = 32 << 20;
/// How much faster it is while they send none.
const IDLE_FACTOR: u64 = 8;
/// Requests that wait for their turn, at most.
const QUEUE_MAX: usize = 8;
/// Results that the brick remembers, so that a lost heartbeat loses none.
const RESULTS_MAX: usize = 8;
/// The pause between two passes of a drain.
const PASS_PAUSE: Duration = Duration::from_millis(200);
/// The first pause between two looks whether pages of a failed device are left. It doubles while the reason is the same.
const FAILED_PAUSE: Duration = Duration::from_secs(10);
/// The longest one.
const FAILED_PAUSE_MAX: Duration = Duration::from_mins(10);
/// The pause of a drain that does not proceed.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// A change of the devices of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    /// Add a block device, or a new file.
    Add {
        /// Its absolute path.
        path: PathBuf,
        /// Its size; all of a block device if missing.
        size_bytes: Option<u64>,
    },
    /// Move all data off a device, and remove it.
    Drain(Uuid),
    /// Use a draining device again.
    CancelDrain(Uuid),
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceChangeResult {
    /// The id of the request.
    pub request: Uuid,
    /// The device, or a sentence about the refusal.
    pub outcome: Result<Uuid, String>,
}

/// The requests and drains of a pool.
pub(crate) struct PoolDevices {
    work: Mutex<DeviceWork>,
    /// Bytes that a drain moves per second while clients send requests.
    busy_bytes_per_s: AtomicU64,
    /// Notified of new work, and of the end of the brick.
    changed: Condvar,
    /// Held by a change of the devices. Locked before the pool.
    changing: Mutex<()>,
    /// Called when a pool in memory must be opened again for its first disk.
    first_disk_hook: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Default for PoolDevices {
    fn default() -> PoolDevices {
        PoolDevices {
            work: Mutex::default(),
            busy_bytes_per_s: AtomicU64::new(DRAIN_BYTES_PER_S),
            changed: Condvar::new(),
            changing: Mutex::new(()),
            first_disk_hook: OnceLock::new(),
        }
    }
}

#[derive(Default)]
struct DeviceWork {
    queue: VecDeque<(Uuid, DeviceChange)>,
    running: Option<Uuid>,
    /// A request that is carried out once the pool is open again.
    first_disk: Option<(Uuid, DeviceChange)>,
    results: VecDeque<DeviceChangeResult>,
    paths: HashMap<Uuid, PathBuf>,
    drains: HashMap<Uuid, DrainRecord>,
    /// Errors that the brick has survived, since its process started.
    errors: HashMap<Uuid, DeviceErrors>,
    /// A device that the pool does not name any more. Its file is still locked.
    leaving: Option<Device>,
    /// Why page-table nodes on failed devices are not replaced.
    nodes_problem: Option<String>,
    thread: Option<JoinHandle<()>>,
    /// Whether the thread shall not finish its pause.
    is_woken: bool,
    is_ending: bool,
}

impl PoolDevices {
    fn work(&self) -> MutexGuard<'_, DeviceWork> {
        lock(&self.work)
    }

    /// Records where a device lies.
    pub(crate) fn note_path(&self, device: Uuid, path: &Path) {
        self.work().paths.insert(device, path.to_owned());
    }

    /// Where a device lies.
    pub(crate) fn path_of(&self, device: Uuid) -> Option<PathBuf> {
        self.work().paths.get(&device).cloned()
    }

    /// Records the errors of devices before the pool was opened again.
    pub(crate) fn set_errors(&self, errors: HashMap<Uuid, DeviceErrors>) {
        self.work().errors = errors;
    }

    /// Takes over the results of an earlier brick of the process.
    pub(crate) fn set_results(&self, results: Vec<DeviceChangeResult>) {
        self.work().results = results.into();
    }

    /// Ends the thread, and waits for it.
    pub(crate) fn end(&self) {
        let mut work = self.work();
        work.is_ending = true;
        let thread = work.thread.take();
        drop(work);
        self.changed.notify_all();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the pool's devices panicked");
        }
    }

    /// Ends a pause of the thread.
    fn wake(&self) {
        self.work().is_woken = true;
        self.changed.notify_all();
    }

    /// Waits until `due`, or for a request, or the end of the brick. True if it was woken before.
    fn wait(&self, due: Option<Instant>) -> bool {
        let work = self.work();
        let is_idle =
            |work: &mut DeviceWork| work.queue.is_empty() && !work.is_woken && !work.is_ending;
        let limit = due.map(|due| due.saturating_duration_since(Instant::now()));
        let mut work = match limit {
            Some(limit) => recover(self.changed.wait_timeout_while(work, limit, is_idle)).0,
            None => recover(self.changed.wait_while(work, is_idle)),
        };
        std::mem::take(&mut work.is_woken)
    }
}

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// Adds a block device or a new file to the pool. Blocks while the file is allocated and the tables are written.
    ///
    /// **Data loss:** everything on the block device is lost.
    ///
    /// # Errors
    /// When the file cannot be used, or the pool has no place for it.
    pub fn add_device(&self, path: &Path, size_bytes: Option<u64>) -> Result<Uuid, DeviceError> {
        let _changing = lock(&self.pool_devices.changing);
        self.check_path(path)?;
        let device = DeviceFile::open(path, size_bytes)?;
        let id = Uuid::new_v4();
        let planned = self.pool().plan_device(id, device.bytes);
        let planned = planned.map_err(ObjectError::from)?;
        device.prepare(self.durability())?;
        let prepared = device.write_tables(self.mapping(), planned)?;
        let device = device.persist()?;
        self.join(path, device, (planned, &prepared))?;
        self.pool_devices.note_path(id, path);
        tracing::info!(path = %path.display(), device = %id, "a device has joined the pool");
        // There is room for lost nodes now.
        self.pool_devices.wake();
        Ok(id)
    }

    /// Refuses a path before anything is allocated or written there.
    fn check_path(&self, path: &Path) -> Result<(), DeviceError> {
        if self.needs_reopening_for_disks() {
            return Err(attach_refused(path, MapError::NoFurtherDevices));
        }
        self.check_new_path(path)
    }

    fn check_new_path(&self, path: &Path) -> Result<(), DeviceError> {
        if self.has_member(|member| device_file::is_same_file(member, path)) {
            return Err(DeviceFileError::IsMember(path.into()).into());
        }
        if self.has_member(|member| device_file::is_partition_of(path, member)) {
            return Err(DeviceFileError::OnMember(path.into()).into());
        }
        match self.pool().has_room_for_path(path) {
            true => Ok(()),
            false => Err(DeviceError::LongPath(path.into())),
        }
    }

    /// Extends the medium and then the pool by a device. Its tables are written.
    fn join(
        &self,
        path: &Path,
        mut device: NamedDevice<'_>,
        (planned, prepared): (Device, &PreparedDevice),
    ) -> Result<(), DeviceError> {
        let media = self.mapping().media().clone();
        let new = NewDevice {
            file: device.file().map_err(DeviceFileError::from)?,
            bytes: planned.bytes(),
            head_len: planned.head_len(),
            frame_table: planned.frame_table_bytes(),
        };
        let attached = media.attach_device(new);
        attached.map_err(|cause| attach_refused(path, cause))?;
        // A superblock may name the device from now on, also after an error.
        device.keep();
        let mut pool = self.pool();
        pool.set_device_path(planned.id, path);
        let added = pool.add_prepared_device(prepared);
        drop(pool);
        let Err(cause) = added else {
            return Ok(());
        };
        match cause {
            PoolError::DeviceChanged | PoolError::Device(_) | PoolError::Truncated { .. } => {
                if let Err(cause) = media.detach_device(planned.bytes().start) {
                    tracing::warn!(%cause, path = %path.display(), "a device that did not join stays open");
                }
                device.discard();
            }
            _ => tracing::warn!(
                path = %path.display(),
                "the pool may name this device already, so it stays where it is; `pagemesh pool device list` shows whether \
                 the pool has it, once the brick runs again"
            ),
        }
        Err(self.device_error(cause.into()))
    }

    fn has_member(&self, is_it: impl Fn(&Path) -> bool) -> bool {
        let work = self.pool_devices.work();
        work.paths.values().any(|member| is_it(member))
    }

    /// An error of the pool. One of the medium ends the brick.
    fn device_error(&self, cause: ObjectError) -> DeviceError {
        if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = &cause {
            self.fail(&cause);
        }
        cause.into()
    }

    /// Starts to move all data off a device. The thread of the devices then removes it from the pool.
    ///
    /// # Errors
    /// When the pool has no such device, it is the first one, or the others lack room.
    pub fn drain_device(self: &Arc<Self>, id: Uuid) -> Result<(), DeviceError> {
        let _changing = lock(&self.pool_devices.changing);
        if id == self.id().0 {
            return Err(DeviceError::FirstDevice);
        }
        let started = self.retry_while_stuck(|pool| pool.start_drain(id));
        started.map_err(|cause| self.device_error(cause))?;
        tracing::info!(device = %id, "the drain of a device has started");
        let now = Instant::now();
        let mut work = self.pool_devices.work();
        let record = work.drains.entry(id);
        let record = record.or_insert_with(|| DrainRecord::new(now));
        record.reset_pause();
        drop(work);
        self.ensure_device_thread();
        self.pool_devices.wake();
        Ok(())
    }

    /// Lets the pool use a draining device again. Data that has moved stays where it is.
    ///
    /// # Errors
    /// When the pool has no such device.
    pub fn cancel_drain(&self, id: Uuid) -> Result<(), DeviceError> {
        let _changing = lock(&self.pool_devices.changing);
        if id == self.id().0 {
            return Err(DeviceError::FirstDevice);
        }
        let cancelled = self.retry_while_stuck(|pool| pool.cancel_drain(id));
        cancelled.map_err(|cause| self.device_error(cause))?;
        self.pool_devices.work().drains.remove(&id);
        tracing::info!(device = %id, "the drain of a device was cancelled");
        Ok(())
    }

    /// Limits drains to this many bytes per second while clients send requests, and to eight times as many otherwise.
    pub fn limit_drains(&self, bytes_per_s: u64) {
        let limit = &self.pool_devices.busy_bytes_per_s;
        limit.store(bytes_per_s.max(1), Ordering::Relaxed);
        self.pool_devices.wake();
    }

    /// The bytes that a drain moves per second now.
    fn drain_rate(&self, is_busy: bool) -> u64 {
        let busy = self.pool_devices.busy_bytes_per_s.load(Ordering::Relaxed);
        match is_busy {
            true => busy,
            false => busy.saturating_mul(IDLE_FACTOR),
        }
    }

    /// Has the thread of the devices carry out a request, once. Its result is in [`Brick::device_results`] later.
    pub fn request_device_change(self: &Arc<Self>, request: Uuid, change: DeviceChange) {
        let mut work = self.pool_devices.work();
        let is_known = work.running == Some(request)
            || work.queue.iter().any(|(id, _)| *id == request)
            || work.results.iter().any(|it| it.request == request);
        // The manager repeats a request that finds no room.
        if is_known || work.queue.len() >= QUEUE_MAX || work.is_ending {
            return;
        }
        work.queue.push_back((request, change));
        drop(work);
        self.ensure_device_thread();
        self.pool_devices.changed.notify_all();
    }

    /// The results of the last requests, and whether one is not carried out yet.
    #[must_use]
    pub fn device_results(&self) -> (Vec<DeviceChangeResult>, bool) {
        let work = self.pool_devices.work();
        let is_busy = work.running.is_some() || !work.queue.is_empty();
        (work.results.iter().cloned().collect(), is_busy)
    }

    /// Records a result that was known before a request reached the brick.
    pub fn refuse_device_change(&self, request: Uuid, cause: String) {
        let mut work = self.pool_devices.work();
        if work.results.iter().all(|it| it.request != request) {
            work.add_result(request, Err(cause));
        }
    }

    /// Continues the drains that the pool was opened with, and replaces nodes on failed devices.
    pub(crate) fn continue_device_work(self: &Arc<Self>) {
        let devices = self.mapping().geometry().devices;
        if devices.iter().any(|it| it.state != DeviceState::Active) {
            self.ensure_device_thread();
        }
    }

    fn ensure_device_thread(self: &Arc<Self>) {
        let mut work = self.pool_devices.work();
        if work.thread.is_some() || work.is_ending {
            return;
        }
        let brick = Arc::clone(self);
        let thread = std::thread::Builder::new().name("devices".into());
        match thread.spawn(move || brick.device_loop()) {
            Ok(thread) => work.thread = Some(thread),
            Err(cause) => {
                tracing::error!(%cause, "cannot start the thread of the pool's devices");
                let refusal = format!("the brick cannot start a thread: {cause}");
                while let Some((request, _)) = work.queue.pop_front() {
                    work.add_result(request, Err(refusal.clone()));
                }
            }
        }
    }

    fn device_loop(self: Arc<Self>) {
        let mut mover = None;
        let mut lost_nodes = LostNodes::default();
        let now = Instant::now();
        let (mut nodes_due, mut drains_due) = (Some(now), Some(now));
        loop {
            let due = [nodes_due, drains_due].into_iter().flatten().min();
            let is_woken = self.pool_devices.wait(due);
            if self.pool_devices.work().is_ending || self.has_failed() {
                break;
            }
            let request = self.next_request();
            if is_woken || request.is_some() {
                // A drain may have begun or ended, and a device may have joined.
                (nodes_due, drains_due) = (Some(Instant::now()), Some(Instant::now()));
            }
            if let Some((request, change)) = request {
                let outcome = match self.hand_on(request, &change) {
                    Ok(true) => break,
                    Ok(false) => self.carry_out(change),
                    Err(cause) => Err(cause),
                };
                let mut work = self.pool_devices.work();
                work.running = None;
                work.add_result(request, outcome.map_err(|cause| cause.to_string()));
                continue;
            }
            let now = Instant::now();
            let is_due = |due: Option<Instant>| due.is_some_and(|due| due <= now);
            let after = |pause: Option<Duration>| pause.map(|pause| Instant::now() + pause);
            if is_due(nodes_due) {
                nodes_due = after(self.replace_lost_nodes(&mut lost_nodes));
            }
            if is_due(drains_due) {
                drains_due = after(self.drain_step(&mut mover));
            }
        }
    }

    fn next_request(&self) -> Option<(Uuid, DeviceChange)> {
        let mut work = self.pool_devices.work();
        let next = work.queue.pop_front();
        work.running = next.as_ref().map(|(request, _)| *request);
        next
    }

    fn carry_out(self: &Arc<Self>, change: DeviceChange) -> Result<Uuid, DeviceError> {
        match change {
            DeviceChange::Add { path, size_bytes } => self.add_device(&path, size_bytes),
            DeviceChange::Drain(device) => self.drain_device(device).map(|()| device),
            DeviceChange::CancelDrain(device) => self.cancel_drain(device).map(|()| device),
        }
    }

    /// Does a step of the drains. Returns the pause before the next; none without a drain.
    fn drain_step(self: &Arc<Self>, mover: &mut Option<Mover<M>>) -> Option<Duration> {
        let devices = self.mapping().geometry().devices;
        // A pass is over the pages of one device. It goes on to its end, unless the drain was cancelled.
        let is_leaving = |id| {
            let mut leaving = devices.iter().filter(|it| it.state != DeviceState::Active);
            leaving.find(|it| it.id == id)
        };
        let current = mover.as_ref().and_then(|it| is_leaving(it.device()));
        let device = match current {
            Some(device) => device,
            None => {
                *mover = None;
                let states = devices.iter().map(|it| (it.id, it.state));
                let drains = &self.pool_devices.work().drains;
                match next_to_drain(states, drains, Instant::now())? {
                    (id, Duration::ZERO) => is_leaving(id)?,
                    (_, wait) => return Some(wait),
                }
            }
        };
        let step = match mover {
            Some(mover) => Ok(mover),
            None => Mover::new(self, device.id).map(|new| mover.insert(new)),
        };
        let step = step.and_then(|mover| mover.step(device));
        let now = Instant::now();
        let mut work = self.pool_devices.work();
        let record = work
            .drains
            .entry(device.id)
            .or_insert_with(|| DrainRecord::new(now));
        match step {
            Ok(DrainStep::Moved { bytes, pause }) => {
                record.rate.add(bytes, now);
                if bytes > 0 {
                    record.problem = None;
                }
                Some(pause)
            }
            Ok(DrainStep::Blocked(problem)) => {
                // A new pass finds pages that were repaired meanwhile.
                *mover = None;
                Some(record.block(device.id, device.state, problem))
            }
            Ok(DrainStep::Empty) => {
                drop(work);
                *mover = None;
                Some(self.finish_drain(device))
            }
            Err(cause) => {
                let pause = record.block(device.id, device.state, cause.to_string());
                drop(work);
                *mover = None;
                self.device_error(cause);
                Some(pause)
            }
        }
    }

    /// Removes a device without data from the pool, and unlocks its file. Returns the pause before the next step.
    fn finish_drain(&self, device: &Device) -> Duration {
        let _changing = lock(&self.pool_devices.changing);
        self.pool_devices.work().leaving = Some(*device);
        let pause = self.remove_drained(device);
        self.pool_devices.work().leaving = None;
        pause
    }

    /// Records why a device stays. Returns the pause before the next look.
    fn block_drain(&self, device: &Device, problem: &str) -> Duration {
        let mut work = self.pool_devices.work();
        let record = work.drains.get_mut(&device.id);
        record.map_or(FAILED_PAUSE, |record| {
            record.block(device.id, device.state, problem.into())
        })
    }

    fn remove_drained(&self, device: &Device) -> Duration {
        let removed = self.retry_while_stuck(|pool| pool.remove_device(device.id));
        match removed {
            Ok(true) => {}
            // Records after the last pass have named frames of it, or the drain was cancelled.
            Ok(false) if device.state == DeviceState::Failed => {
                let problem = self.pool_devices.work().nodes_problem.clone();
                return self.block_drain(device, problem.as_deref().unwrap_or(DAMAGED_TABLES));
            }
            Ok(false) | Err(ObjectError::NotDraining(_)) => return PASS_PAUSE,
            Err(cause) => {
                tracing::warn!(%cause, device = %device.id, "cannot remove a drained device");
                self.device_error(cause);
                return RETRY_PAUSE;
            }
        }
        if let Err(cause) = self.mapping().media().detach_device(device.bytes().start) {
            tracing::warn!(%cause, device = %device.id, "a device that has left its pool stays open");
        }
        let path = self.pool_devices.work().paths.get(&device.id).cloned();
        let Some(path) = path else {
            return Duration::ZERO;
        };
        tracing::info!(path = %path.display(), device = %device.id, "a device was drained and has left the pool");
        if let Err(cause) = device_file::clear_header(&path, self.id().0, device.id) {
            tracing::warn!(%cause, "the header of a device that has left its pool stays");
        }
        let mut work = self.pool_devices.work();
        work.drains.remove(&device.id);
        work.paths.remove(&device.id);
        Duration::ZERO
    }
}

/// The reason why a failed device without a known page stays.
const DAMAGED_TABLES: &str = "page tables of volumes cannot be read, so pages may lie on it: find these volumes with a scrub, \
     attach copies of them to other bricks and detach the ones here, or delete them";

fn attach_refused(path: &Path, cause: MapError) -> DeviceError {
    DeviceError::Attach {
        path: path.into(),
        cause,
    }
}

impl DeviceWork {
    fn add_result(&mut self, request: Uuid, outcome: Result<Uuid, String>) {
        if let Err(cause) = &outcome {
            tracing::warn!(%cause, "a change of the pool's devices was refused");
        }
        while self.results.len() >= RESULTS_MAX {
            self.results.pop_front();
        }
        self.results
            .push_back(DeviceChangeResult { request, outcome });
    }
}
