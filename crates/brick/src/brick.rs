//! A pool and those who use it within this process: the housekeeper, and a
//! worker for each connection.
//!
//! Invariants: the data path of a worker takes no lock of this process; only
//! opening, closing and control calls lock the pool, and a worker that ran out
//! of frames or lane: it does the housekeeper's round itself. The housekeeper
//! sleeps until a session rings, so an idle brick costs nothing.

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

/// Processes that one barrier ends before it gives up: each takes a second to
/// be found.
const KILLS_MAX: usize = 8;
/// How long a session may stay inside an operation that the brick waits for: far longer
/// than any takes, even on a loaded machine. Then its process is ended.
pub(crate) const OPERATION_LIMIT: Duration = Duration::from_secs(1);
/// How long a session of a process that a signal stopped may stay inside an operation that others wait
/// for; then the process runs for a moment, until it is outside.
pub(crate) const RESUME_AFTER: Duration = Duration::from_millis(100);
/// The same for one that a debugger stopped: below the ten seconds that a client waits for a
/// barrier, or for a lock.
pub(crate) const TRACED_LIMIT: Duration = Duration::from_secs(7);
/// How long the pool is left to others between two looks at such a session.
const RECHECK_PAUSE: Duration = Duration::from_millis(1);
/// How long after its process's end a connection is expected to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long a process whose connection has ended may stay in an operation: it
/// takes microseconds unless it is stopped.
const EXIT_LIMIT: Duration = Duration::from_secs(1);
/// How often to look whether it has left.
const EXIT_PAUSE: Duration = Duration::from_millis(1);
/// The same when it has stayed for long, as one that cannot be ended: each look
/// locks the pool.
const EXIT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A running pool.
pub struct Brick<M = MappedMedia> {
    pool: Mutex<Pool<M>>,
    mapping: Arc<PoolMapping<M>>,
    durability: Durability,
    /// Told whenever a session was closed.
    session_closed: Condvar,
    stopping: AtomicBool,
    failed: AtomicBool,
    pub(crate) scrubs: Mutex<ScrubSchedule>,
    /// Slices and the sessions of this process that attached them, the oldest
    /// first. Locked before the pool.
    attached: Mutex<Vec<(SliceId, u32)>>,
    /// Locked last.
    stalled: Mutex<StalledSessions>,
    /// None for a pool that is no file.
    owner_lock: Option<file::OwnerLock>,
}

/// The thread that checkpoints and grants; ends the brick when dropped.
pub struct MaintenanceThread {
    brick: Arc<Brick>,
    thread: Option<JoinHandle<()>>,
}

impl Brick {
    /// Opens the pool of a file: recovers it and starts its housekeeper.
    ///
    /// # Errors
    /// When it is no pool, damaged, or in use.
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
        let thread = std::thread::Builder::new().name("housekeeper".into());
        let runner = brick.clone();
        let thread = thread
            .spawn(move || runner.maintenance_loop())
            .map_err(|cause| FileError::System {
                action: "start the housekeeper of",
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

    /// A brick without threads, around a pool that is open: whoever owns it
    /// calls [`Brick::maintain`] when the bell of the control segment was rung.
    #[must_use]
    pub fn new(pool: Pool<M>, durability: Durability) -> Brick<M> {
        Brick::from_pool(pool, durability, None)
    }

    /// One round of housekeeping: checkpoint, grants, answers to sessions that
    /// wait. True when there is more to do at once.
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
            // Told already; the next ring tries again.
            Err(ObjectError::SessionStuck { .. }) => false,
            Err(cause) => {
                self.fail(&cause);
                false
            }
        }
    }

    /// Ends the brick: what is durable is not known any more, so the pool must
    /// be recovered.
    pub(crate) fn fail(&self, cause: &dyn std::fmt::Display) {
        if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!(%cause, pool = %self.mapping.pool(), "the pool failed");
            self.mapping.control().ring_doorbell();
        }
    }

    /// The error of a pool as a client sees it; one of its medium ends the brick.
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

    /// What sessions share.
    #[must_use]
    pub fn mapping(&self) -> &Arc<PoolMapping<M>> {
        &self.mapping
    }

    /// The pool's identity.
    #[must_use]
    pub fn id(&self) -> BrickId {
        BrickId(self.mapping.pool())
    }

    /// What the pool's medium promises.
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
    /// When all are in use.
    pub fn open_session(&self, pid: u32, start_time: u64) -> Result<u32, SliceError> {
        self.pool()
            .open_session(pid, start_time)
            .map_err(|cause| self.report_error(cause))
    }

    /// Ends a session whose connection has ended.
    pub fn close_session(&self, number: u32) {
        // Before its number can be another's.
        self.attached().retain(|(_, session)| *session != number);
        self.wait_until_outside(number);
        if let Err(cause) = self.pool().close_session(number) {
            tracing::error!(%cause, number, "cannot end a session");
        }
        self.session_closed.notify_all();
        // Its frames can be granted again.
        self.mapping.control().ring_doorbell();
    }

    /// Waits until a session is outside of every operation. Its connection may
    /// have ended while its process goes on, as when this brick ends: what it
    /// stores then must not meet frames that are others' by now.
    fn wait_until_outside(&self, number: u32) {
        let (pid, started) = {
            let pool = self.pool();
            (pool.process_id(number), pool.process_start_time(number))
        };
        if pid == std::process::id() {
            // The thread that ends the session is the one that had it.
            return;
        }
        let began = Instant::now();
        let mut is_told = false;
        // Its threads may be gone with the program that they ran.
        let is_there = || process::is_running(pid, started) && !self.is_unmapped_by(pid);
        while self.revoke_session(number) && is_there() {
            let waited = began.elapsed();
            if waited >= RESUME_AFTER {
                self.resume(number, pid);
            }
            if !is_told && waited > EXIT_LIMIT {
                is_told = true;
                tracing::warn!(number, pid, "ending a process that stays in an operation");
                if let Err(cause) = process::kill(pid, started) {
                    tracing::error!(number, pid, %cause, "a session cannot end: its lane and frames are not used again before the process ends, or the brick is started again");
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

    /// In a function of its own: the pool must not stay locked.
    fn revoke_session(&self, number: u32) -> bool {
        self.pool().revoke(number)
    }

    /// Runs something that waits for all operations to end. A client's process
    /// that stays inside of one is ended, as nothing else keeps its late
    /// stores out; not one that was just met there, behind others that came and went.
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
                // Others need the pool meanwhile.
                drop(pool);
                for (session, pid) in stopped {
                    self.resume(session, pid);
                }
                pool = self.pool();
            }
            if waited < OPERATION_LIMIT || has_traced_session(&pool) && waited < TRACED_LIMIT {
                // Who cleans up behind the dead needs the pool.
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
            tracing::warn!(session, pid, "ending a process that stays in an operation");
            if tries == KILLS_MAX {
                return result;
            }
            if let Err(cause) = process::kill(pid, pool.process_start_time(session)) {
                tracing::error!(pid, %cause, "a session is stuck");
                return result;
            }
            pool = self.wait_for_close(pool, session);
        }
    }

    /// Lets a process that a signal stopped run until its session is outside of every operation.
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
            "a stopped process ran until it was outside of an operation"
        );
    }

    /// Of those inside of operations, who holds up the others, and its process: one that is
    /// stopped, or else whom they have waited for long. Nobody: each may only be slow.
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

    /// Waits until those are cleaned up behind who died inside of an operation. Their locks
    /// hold others up inside, who would be taken for the ones that stand still; and what
    /// frees the locks needs the pool.
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

    /// Waits until a dead session's connection has been noticed.
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

    /// Does what only the owner of the pool can do for a slice, for a connection of
    /// this epoch.
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
                // What has come to be in flight since is not what that client made equal.
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

    /// A session of this process has attached a slice.
    pub(crate) fn record_attached(&self, slice: SliceId, number: u32) {
        self.attached().push((slice, number));
    }

    /// Ends what sessions that attached a slice before this one may still do,
    /// if this epoch is in force already. A client that comes back with an epoch
    /// it has used sends again what was lost with its old connections; what they
    /// still carry must not come later and undo what was acknowledged since.
    /// An epoch that is raised keeps them out by itself.
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
            // The barrier awaits what it is inside of.
            let _is_inside = pool.revoke(*older);
        }
        Ok(())
    }

    /// The object behind a slice, for those who map the pool, and its size.
    ///
    /// # Errors
    /// When there is none, or it has a newer epoch.
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

    /// A session of this process: it does not sleep for the housekeeper, which
    /// may be busy with another's, but does its round.
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
            tracing::error!("the housekeeper panicked");
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

/// How long not to look at a process that has been waited for so long.
fn recheck_pause(waited: Duration) -> Duration {
    let late = waited.saturating_sub(EXIT_LIMIT);
    (EXIT_PAUSE + late / 8).min(EXIT_PAUSE_MAX)
}

/// Says what recovery found damaged. A medium that loses bits loses more.
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

/// Sessions inside of operations whose processes a signal stopped.
fn stopped_sessions<M: Media>(pool: &Pool<M>) -> Vec<(u32, u32)> {
    let inside = pool.sessions_in_op().into_iter();
    let all = inside.map(|session| (session, pool.process_id(session)));
    all.filter(|&(_, pid)| resume::stop_reason(pid) == Some(StopReason::Signal))
        .collect()
}

/// Whether a debugger holds a process inside of an operation.
fn has_traced_session<M: Media>(pool: &Pool<M>) -> bool {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.any(|session| {
        matches!(
            resume::stop_reason(pool.process_id(session)),
            Some(StopReason::Tracer(_))
        )
    })
}

/// A session that is inside of an operation though its process has ended.
fn dead_session<M: Media>(pool: &Pool<M>) -> Option<u32> {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.find(|&number| {
        !process::is_running(pool.process_id(number), pool.process_start_time(number))
    })
}

/// The error of a pool as a client sees it.
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
        // One that was ended is gone within milliseconds, and is seen to be.
        assert!(recheck_pause(EXIT_LIMIT + Duration::from_millis(50)) < Duration::from_millis(10));
    }
}
