//! A pool and its users within this process: the maintenance thread, and a worker for each
//! connection.
//!
//! Invariants: the data path of a worker takes no lock of this process. Only opening, closing and
//! control calls lock the pool, and a worker that has no frames or no journal room left: it runs
//! the maintenance itself. The maintenance thread sleeps until a session rings the doorbell, so an
//! idle brick costs nothing.

use crate::file::{self, FileError};
use crate::process;
use crate::scrub::ScrubSchedule;
use crate::stalled_sessions::StalledSessions;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, ObjectId};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::resume::{self, StopReason};
use pagemesh_base::slice::{
    BrickControl, BrickStatus, LIST_ENTRIES_MAX, SliceError, SliceInfo, SliceReply, SliceRequest,
};
use pagemesh_pmem::{Durability, MappedMedia, Media};
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::pool_mapping::{PoolMapping, StoreError};
use pagemesh_store::recovery::{PoolError, RecoverySummary};
use pagemesh_store::session::Session;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Processes that one barrier kills before it gives up: each takes a second to be found.
const KILLS_MAX: usize = 8;
/// How long a session may stay in an operation that the brick waits for, before its process is
/// killed. No operation takes nearly as long, even on a loaded machine.
pub(crate) const OPERATION_LIMIT: Duration = Duration::from_secs(1);
/// How long a session of a process that a signal stopped may stay in an operation that others wait
/// for. Then the brick runs the process until the session has left the operation.
pub(crate) const RESUME_AFTER: Duration = Duration::from_millis(100);
/// The same for a process that a debugger stopped: below the ten seconds that a client waits for a
/// barrier or a lock.
pub(crate) const TRACED_LIMIT: Duration = Duration::from_secs(7);
/// How long the pool stays unlocked between two checks of such a session.
const RECHECK_PAUSE: Duration = Duration::from_millis(1);
/// How long after its process's end a connection is expected to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long a process may stay in an operation after its connection has ended: an operation takes
/// microseconds unless the process is stopped.
const EXIT_LIMIT: Duration = Duration::from_secs(1);
/// The first interval of the checks whether it has left.
const EXIT_PAUSE: Duration = Duration::from_millis(1);
/// The longest interval, for a process that cannot be killed: each check locks the pool.
const EXIT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A running pool.
pub struct Brick<M = MappedMedia> {
    pool: Mutex<Pool<M>>,
    mapping: Arc<PoolMapping<M>>,
    durability: Durability,
    /// Notified whenever a session was closed.
    session_closed: Condvar,
    stopping: AtomicBool,
    failed: AtomicBool,
    pub(crate) scrubs: Mutex<ScrubSchedule>,
    /// Slices and the sessions of this process that attached them, the oldest
    /// first. Locked before the pool.
    attached: Mutex<Vec<(SliceId, u32)>>,
    /// Locked last.
    stalled: Mutex<StalledSessions>,
    /// None for a pool that is not in a file.
    owner_lock: Option<file::OwnerLock>,
}

/// The thread that checkpoints and grants frames. Dropping it ends the brick.
pub struct MaintenanceThread {
    brick: Arc<Brick>,
    thread: Option<JoinHandle<()>>,
}

impl Brick {
    /// Opens the pool of a file: recovers it and starts its maintenance thread.
    ///
    /// # Errors
    /// When the file is no pool, damaged, or in use.
    pub fn open(
        path: &Path,
    ) -> Result<(Arc<Brick>, MaintenanceThread, RecoverySummary), FileError> {
        Brick::start(path, file::open(path)?)
    }

    /// The same for a pool made by [`file::create_sparse`].
    ///
    /// # Errors
    /// As [`Brick::open`].
    pub fn open_sparse(
        path: &Path,
    ) -> Result<(Arc<Brick>, MaintenanceThread, RecoverySummary), FileError> {
        Brick::start(path, file::open_sparse(path)?)
    }

    fn start(
        path: &Path,
        (media, claim): (MappedMedia, file::OwnerLock),
    ) -> Result<(Arc<Brick>, MaintenanceThread, RecoverySummary), FileError> {
        let media = Arc::new(media);
        let durability = media.durability();
        let overlay = match file::needs_sync(durability) {
            false => media.clone(),
            true => Arc::new(media.overlay().map_err(|cause| FileError::Map {
                path: path.into(),
                cause,
            })?),
        };
        let bad = |cause| FileError::Pool {
            path: path.into(),
            cause,
        };
        let (pool, recovered) = Pool::open(media, overlay).map_err(bad)?;
        warn_of_damage(path, pool.mapping().pool(), &recovered);
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
        let housekeeper = MaintenanceThread {
            brick: brick.clone(),
            thread: Some(thread),
        };
        Ok((brick, housekeeper, recovered))
    }

    fn maintenance_loop(&self) {
        while !self.stopping.load(Ordering::Acquire) && !self.has_failed() {
            let seen = self.mapping.control().doorbell_count();
            let more = self.maintain();
            let wait = self.scrub_if_due(Instant::now());
            if !more {
                self.mapping.control().wait_for_doorbell(seen, wait);
            }
        }
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
            durability,
            session_closed: Condvar::new(),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            scrubs: Mutex::default(),
            attached: Mutex::default(),
            stalled: Mutex::default(),
            owner_lock: claim,
        }
    }

    /// A brick without threads, around an open pool. Its owner calls [`Brick::maintain`] when the
    /// doorbell of the control segment was rung.
    #[must_use]
    pub fn new(pool: Pool<M>, durability: Durability) -> Brick<M> {
        Brick::from_pool(pool, durability, None)
    }

    /// One round of maintenance: checkpoint, grants, answers to waiting sessions. True if more work
    /// is due at once.
    pub fn maintain(&self) -> bool {
        let mut mended = 0;
        let tended = self.retry_while_stuck(|pool| {
            let before = pool.corrected_records();
            let tended = pool.maintain();
            mended += pool.corrected_records() - before;
            tended
        });
        if mended > 0 {
            tracing::warn!(
                pool = %self.mapping.pool(), records = mended,
                "the medium had damaged records of the journal, and they were mended; \
                 a medium that loses bits should be replaced"
            );
        }
        self.end_stalled();
        match tended {
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
        }
    }

    /// A pool's error as the client's error. An error of the medium ends the brick.
    fn report_error(&self, cause: ObjectError) -> SliceError {
        if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = cause {
            self.fail(&cause);
        }
        slice_error(cause)
    }

    pub(crate) fn stalled(&self) -> MutexGuard<'_, StalledSessions> {
        self.stalled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pool(&self) -> MutexGuard<'_, Pool<M>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Waits until a session has left every operation. Its process may outlive its connection, for
    /// example when this brick ends. A late store of that process must not reach frames that the
    /// pool has granted to others.
    fn wait_until_outside(&self, number: u32) {
        let (pid, started) = {
            let pool = self.pool();
            (pool.process_id(number), pool.process_start_time(number))
        };
        if pid == std::process::id() {
            // The thread that ends the session is the one that used it.
            return;
        }
        let began = Instant::now();
        let mut is_told = false;
        // A process that executed another program has no thread left in the operation.
        let is_there = || process::is_running(pid, started) && !self.is_unmapped_by(pid);
        while self.revoke_session(number) && is_there() {
            let waited = began.elapsed();
            if waited >= RESUME_AFTER {
                self.resume(number, pid);
            }
            if !is_told && waited > EXIT_LIMIT {
                is_told = true;
                tracing::warn!(number, pid, "killing a process that stays in an operation");
                if let Err(cause) = process::kill(pid, started) {
                    tracing::error!(number, pid, %cause, "cannot kill a process that stays in an operation: the brick does not reuse its journal and frames before the process ends or the brick restarts");
                }
            }
            std::thread::sleep(recheck_pause(waited));
        }
    }

    fn is_unmapped_by(&self, pid: u32) -> bool {
        self.owner_lock
            .as_ref()
            .is_some_and(|it| it.is_unmapped_by(pid))
    }

    /// A function of its own, so that the pool does not stay locked.
    fn revoke_session(&self, number: u32) -> bool {
        self.pool().revoke(number)
    }

    /// Runs `run`, which waits for all operations to end, and retries it while a session is stuck.
    /// A client's process that stays in an operation is killed: nothing else prevents its late
    /// stores. A session that was only just found in an operation, after others came and went, is
    /// not killed.
    fn retry_while_stuck<T>(
        &self,
        mut run: impl FnMut(&mut Pool<M>) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut pool = self.pool();
        let mut tries = 0;
        let mut still = StalledSessions::default();
        loop {
            let result = run(&mut pool);
            let Err(ObjectError::SessionStuck {
                session,
                operation,
                pid,
            }) = result
            else {
                return result;
            };
            self.record_awaited(&pool);
            let waited = still.record(session, operation).since.elapsed();
            if waited >= RESUME_AFTER {
                let stopped = stopped_sessions(&pool);
                // Other threads need the pool meanwhile.
                drop(pool);
                for (session, pid) in stopped {
                    self.resume(session, pid);
                }
                pool = self.pool();
            }
            if waited < OPERATION_LIMIT || has_traced_session(&pool) && waited < TRACED_LIMIT {
                // The clean-up of dead sessions needs the pool.
                let waited = self.session_closed.wait_timeout(pool, RECHECK_PAUSE);
                pool = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            still = StalledSessions::default();
            tries += 1;
            if dead_session(&pool).is_some() && tries < KILLS_MAX {
                pool = self.wait_for_dead_cleanup(pool);
                continue;
            }
            let (session, pid) = self.blocking_session(&pool).unwrap_or((session, pid));
            tracing::warn!(session, pid, "killing a process that stays in an operation");
            if tries == KILLS_MAX {
                return result;
            }
            if let Err(cause) = process::kill(pid, pool.process_start_time(session)) {
                tracing::error!(pid, %cause, "cannot kill the process of a stuck session");
                return result;
            }
            pool = self.wait_for_close(pool, session);
        }
    }

    /// Runs a process that a signal stopped until its session has left every operation.
    pub(crate) fn resume(&self, session: u32, pid: u32) {
        if resume::stop_reason(pid) != Some(StopReason::Signal) {
            return;
        }
        let control = self.mapping.control();
        let is_outside = || control.op_in_progress(session).is_none();
        let is_out = resume::run_until_outside(pid, &is_outside);
        let name = resume::process_name(pid);
        tracing::info!(
            session,
            pid,
            name,
            is_out,
            "ran a stopped process so that it leaves its operation"
        );
    }

    /// The session in an operation that blocks the others, and its process: one that is stopped, or
    /// else the one awaited for long. None: each of them may only be slow.
    fn blocking_session(&self, pool: &Pool<M>) -> Option<(u32, u32)> {
        let inside = pool.sessions_in_op();
        let is_stopped = |number: &u32| process::is_stopped(pool.process_id(*number));
        let stopped = inside.iter().copied().find(is_stopped);
        let first = stopped.or_else(|| {
            let operation = |number| Some((number, pool.op_in_progress(number)?));
            let inside: Vec<_> = inside.into_iter().filter_map(operation).collect();
            self.stalled().longest_awaited(&inside)
        })?;
        Some((first, pool.process_id(first)))
    }

    /// Waits until the sessions of dead processes are cleaned up. Their lock words block other
    /// sessions, which would be taken for stalled ones. The clean-up needs the pool lock, so the
    /// wait releases it.
    fn wait_for_dead_cleanup<'a>(
        &self,
        mut pool: MutexGuard<'a, Pool<M>>,
    ) -> MutexGuard<'a, Pool<M>> {
        while let Some(dead) = dead_session(&pool) {
            pool = self.wait_for_close(pool, dead);
            if pool.is_open(dead) {
                break;
            }
        }
        pool
    }

    /// Waits until a dead session's connection was closed.
    fn wait_for_close<'a>(
        &self,
        pool: MutexGuard<'a, Pool<M>>,
        session: u32,
    ) -> MutexGuard<'a, Pool<M>> {
        let open = |pool: &mut Pool<M>| pool.is_open(session);
        let waited = self
            .session_closed
            .wait_timeout_while(pool, CLOSE_LIMIT, open);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Executes a request that only the owner of the pool can answer, for a connection of this
    /// epoch.
    ///
    /// # Errors
    /// When there is no such slice, or its epoch is newer.
    pub fn execute_as_owner(
        &self,
        slice: SliceId,
        epoch: Epoch,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        self.execute_as_owner_for(None, slice, epoch, request)
    }

    /// The same for a session of this process, as long as it is not revoked.
    pub(crate) fn execute_as_owner_for(
        &self,
        session: Option<u32>,
        slice: SliceId,
        epoch: Epoch,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let is_over = |pool: &Pool<M>| session.is_some_and(|number| pool.is_revoked(number));
        let mut pool = self.pool();
        if is_over(&pool) {
            return Err(StoreError::Revoked.into());
        }
        match request {
            SliceRequest::InFlight => {
                let found = pool
                    .in_flight(slice)
                    .map_err(|cause| self.report_error(cause))?;
                let few = found.filter(|list| list.len() <= LIST_ENTRIES_MAX);
                Ok(SliceReply::InFlight(few))
            }
            SliceRequest::ForgetInFlight => {
                let (_, entry) = pool.find(slice).map_err(|cause| self.report_error(cause))?;
                // The older client did not reconcile the operations recorded since.
                if epoch < entry.epoch {
                    let current = entry.epoch;
                    return Err(SliceError::StaleEpoch { current });
                }
                pool.clear_in_flight(slice)
                    .map_err(|cause| self.report_error(cause))?;
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { round, .. } if round > 15 => {
                let cause = format!("round {round} is beyond 15");
                Err(SliceError::OutOfRange(cause))
            }
            SliceRequest::RaiseEpoch { epoch, round } => {
                drop(pool);
                if let Some(number) = session {
                    self.revoke_older_sessions(slice, epoch, number)?;
                }
                let raised = self.retry_while_stuck(|pool| match is_over(pool) {
                    true => Ok(false),
                    false => pool.raise_epoch(slice, epoch, round).map(|()| true),
                });
                match raised.map_err(|cause| self.report_error(cause))? {
                    true => Ok(SliceReply::Done),
                    false => Err(StoreError::Revoked.into()),
                }
            }
            other => Err(SliceError::Refused(format!("{other:?} needs a session"))),
        }
    }

    fn attached(&self) -> MutexGuard<'_, Vec<(SliceId, u32)>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a session of this process has attached a slice.
    pub(crate) fn record_attached(&self, slice: SliceId, number: u32) {
        self.attached().push((slice, number));
    }

    /// Revokes the sessions that attached a slice before this one, if this epoch is in force
    /// already. A client that reconnects with an epoch it has used sends again the requests that
    /// its old connections lost. Requests still in those connections must not arrive later and undo
    /// changes acknowledged since. A raised epoch fences the old connections by itself.
    fn revoke_older_sessions(
        &self,
        slice: SliceId,
        epoch: Epoch,
        number: u32,
    ) -> Result<(), SliceError> {
        if defect::is(Defect::OldConnectionTaken) {
            return Ok(());
        }
        let attached = self.attached();
        let pool = self.pool();
        let (_, entry) = pool.find(slice).map_err(|cause| self.report_error(cause))?;
        if entry.epoch != epoch || pool.is_revoked(number) {
            return Ok(());
        }
        let older = attached.iter().take_while(|at| **at != (slice, number));
        for (_, older) in older.filter(|at| at.0 == slice && at.1 != number) {
            // The barrier waits for the operation that it is in.
            let _is_inside = pool.revoke(*older);
        }
        Ok(())
    }

    /// The object of a slice, for clients that map the pool, and its size.
    ///
    /// # Errors
    /// When there is no such slice, or it has a newer epoch.
    pub fn attach(&self, slice: SliceId, epoch: Epoch) -> Result<(ObjectId, u64), SliceError> {
        let (object, entry) = self
            .pool()
            .find(slice)
            .map_err(|cause| self.report_error(cause))?;
        match entry.epoch > epoch {
            true => Err(SliceError::StaleEpoch {
                current: entry.epoch,
            }),
            false => Ok((object, entry.size_bytes)),
        }
    }

    /// A session of this process. It does not sleep until the maintenance thread has served it,
    /// which may be busy with another session, but runs the maintenance itself.
    pub(crate) fn session(self: &Arc<Self>, number: u32) -> Session<M>
    where
        M: Send + Sync + 'static,
    {
        let brick = Arc::clone(self);
        let tend = Box::new(move || {
            brick.maintain();
        });
        Session::new(self.mapping.clone(), number).in_owner_process(tend)
    }
}

impl MaintenanceThread {
    /// Ends the brick: refuses every session, and leaves a checkpoint.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.brick.stopping.store(true, Ordering::Release);
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

impl Drop for MaintenanceThread {
    fn drop(&mut self) {
        self.end();
    }
}

/// The interval of the checks of a process that has been awaited for `waited`.
fn recheck_pause(waited: Duration) -> Duration {
    let late = waited.saturating_sub(EXIT_LIMIT);
    (EXIT_PAUSE + late / 8).min(EXIT_PAUSE_MAX)
}

/// Reports the damage that recovery found. A medium that loses bits will lose more.
fn warn_of_damage(path: &Path, pool: Uuid, found: &RecoverySummary) {
    if found.corrected_pages > 0 {
        tracing::warn!(
            %pool, path = %path.display(), pages = found.corrected_pages,
            "one bit was wrong in pages that were written since the last checkpoint, and recovery \
             mended them: the power failed while they were written, or the medium loses bits"
        );
    }
    if !found.is_damaged() {
        return;
    }
    let way_out = "stop the brick and run `pagemesh pool check` on the pool; a medium that loses bits should be replaced";
    let path = path.display();
    if found.corrected > 0 || found.bitmap_lines > 0 {
        tracing::warn!(
            %pool, %path, records_entries_and_slots = found.corrected, bitmap_lines = found.bitmap_lines,
            "the medium had damaged the pool, and recovery mended it; {way_out}"
        );
    }
    if found.damaged > 0 || found.objects_lost > 0 || found.withheld > 0 {
        tracing::error!(
            %pool, %path, records_without_data = found.damaged, objects_lost = found.objects_lost,
            frames_withheld = found.withheld,
            "the medium has damaged the pool; {way_out}"
        );
    }
}

/// Sessions in an operation, with their processes, that a signal stopped.
fn stopped_sessions<M: Media>(pool: &Pool<M>) -> Vec<(u32, u32)> {
    let inside = pool.sessions_in_op().into_iter();
    let all = inside.map(|session| (session, pool.process_id(session)));
    all.filter(|&(_, pid)| resume::stop_reason(pid) == Some(StopReason::Signal))
        .collect()
}

/// Whether a debugger holds a process in an operation.
fn has_traced_session<M: Media>(pool: &Pool<M>) -> bool {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.any(|session| {
        matches!(
            resume::stop_reason(pool.process_id(session)),
            Some(StopReason::Tracer(_))
        )
    })
}

/// A session in an operation though its process has ended.
fn dead_session<M: Media>(pool: &Pool<M>) -> Option<u32> {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.find(|&number| {
        !process::is_running(pool.process_id(number), pool.process_start_time(number))
    })
}

/// A pool's error as the client's error.
fn slice_error(cause: ObjectError) -> SliceError {
    match cause {
        ObjectError::Exists(slice) => SliceError::SliceExists(slice),
        ObjectError::Unknown(slice) => SliceError::NoSuchSlice(slice),
        ObjectError::StaleEpoch { current, .. } => SliceError::StaleEpoch { current },
        ObjectError::Store(cause) => cause.into(),
        ObjectError::SessionsFull(_) => SliceError::NoSession(cause.to_string()),
        ObjectError::BadSize(_) | ObjectError::Shrinks { .. } => {
            SliceError::OutOfRange(cause.to_string())
        }
        other => SliceError::Refused(other.to_string()),
    }
}

impl<M: Media + Send + Sync> BrickControl for Brick<M> {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let size_bytes = size_bytes
            .checked_next_multiple_of(4096)
            .unwrap_or(u64::MAX);
        self.pool()
            .create(slice, size_bytes)
            .map_err(|cause| self.report_error(cause))
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let size_bytes = size_bytes
            .checked_next_multiple_of(4096)
            .unwrap_or(u64::MAX);
        self.pool()
            .resize(slice, size_bytes)
            .map_err(|cause| self.report_error(cause))
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let deleted = self
            .retry_while_stuck(|pool| pool.delete(slice))
            .map_err(|cause| self.report_error(cause));
        self.mapping.control().ring_doorbell();
        deleted
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        let pool = self.pool();
        let info = |object: pagemesh_store::object::Object| SliceInfo {
            slice: object.slice,
            size_bytes: object.size_bytes,
            epoch: object.epoch.0,
            round: object.round,
        };
        Ok(pool.list().map(info).collect())
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        let usage = self.pool().usage();
        Ok(BrickStatus {
            brick: self.id(),
            durability: self.durability.to_string(),
            capacity_bytes: usage.capacity_bytes,
            used_bytes: usage.capacity_bytes - usage.free_bytes,
            sessions: usage.sessions,
            incarnation: self.mapping.incarnation().0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_process_is_polled_ever_more_rarely() {
        let looks_within = |time: Duration| {
            let (mut waited, mut looks) = (Duration::ZERO, 0);
            while waited < time {
                waited += recheck_pause(waited);
                looks += 1;
            }
            looks
        };
        assert_eq!(looks_within(EXIT_LIMIT), 1000, "each millisecond");
        assert!(looks_within(Duration::from_secs(60)) < 1000 + 150);
        assert!(looks_within(Duration::from_secs(3600)) < 1000 + 3700);
        // A killed process is gone within milliseconds, and the brick must notice that.
        assert!(recheck_pause(EXIT_LIMIT + Duration::from_millis(50)) < Duration::from_millis(10));
    }
}
