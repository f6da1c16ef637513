//! A pool and those who use it within this process: the housekeeper, and a
//! worker for each connection.
//!
//! Invariants: the data path of a worker takes no lock of this process; only
//! opening, closing and control calls lock the pool, and a worker that ran out
//! of frames or lane: it does the housekeeper's round itself. The housekeeper
//! sleeps until a session rings, so an idle brick costs nothing.

use crate::file::{self, FileError};
use crate::process;
use crate::scrub::Scrubs;
use crate::still::Still;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, ObjectId};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::resume::{self, Stop};
use pagemesh_base::slice::{
    BrickControl, BrickStatus, LISTED_MAX, SliceError, SliceInfo, SliceReply, SliceRequest,
};
use pagemesh_pmem::{Durability, Mapped, Media};
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::recovery::{PoolError, Recovered};
use pagemesh_store::session::Session;
use pagemesh_store::view::{StoreError, View};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Processes that one barrier ends before it gives up: each takes a second to
/// be found.
const STUCK_MAX: usize = 8;
/// How long a session may stay inside an operation that the brick waits for: far longer
/// than any takes, even on a loaded machine. Then its process is ended.
pub(crate) const WINDOW_MAX: Duration = Duration::from_secs(1);
/// How long a session of a process that a signal stopped may stay inside an operation that others wait
/// for; then the process runs for a moment, until it is outside.
pub(crate) const RESUME_AFTER: Duration = Duration::from_millis(100);
/// The same for one that a debugger stopped: below the ten seconds that a client waits for a
/// barrier, or for a lock.
pub(crate) const TRACED_MAX: Duration = Duration::from_secs(7);
/// How long the pool is left to others between two looks at such a session.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
/// How long after its process's end a connection is expected to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long a process whose connection has ended may stay in an operation: it
/// takes microseconds unless it is stopped.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);
/// How often to look whether it has left.
const LEAVE_PAUSE: Duration = Duration::from_millis(1);
/// The same when it has stayed for long, as one that cannot be ended: each look
/// locks the pool.
const LEAVE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A running pool.
pub struct Brick<M = Mapped> {
    pool: Mutex<Pool<M>>,
    view: Arc<View<M>>,
    durability: Durability,
    /// Told whenever a session was closed.
    closed: Condvar,
    stopping: AtomicBool,
    failed: AtomicBool,
    pub(crate) scrubs: Mutex<Scrubs>,
    /// Slices and the sessions of this process that attached them, the oldest
    /// first. Locked before the pool.
    attached: Mutex<Vec<(SliceId, u32)>>,
    /// Locked last.
    still: Mutex<Still>,
    /// None for a pool that is no file.
    claim: Option<file::Claim>,
}

/// The thread that checkpoints and grants; ends the brick when dropped.
pub struct Housekeeper {
    brick: Arc<Brick>,
    thread: Option<JoinHandle<()>>,
}

impl Brick {
    /// Opens the pool of a file: recovers it and starts its housekeeper.
    ///
    /// # Errors
    /// When it is no pool, damaged, or in use.
    pub fn open(path: &Path) -> Result<(Arc<Brick>, Housekeeper, Recovered), FileError> {
        Brick::on(path, file::open(path)?)
    }

    /// The same for a pool made by [`file::create_sparse`].
    ///
    /// # Errors
    /// As [`Brick::open`].
    pub fn open_sparse(path: &Path) -> Result<(Arc<Brick>, Housekeeper, Recovered), FileError> {
        Brick::on(path, file::open_sparse(path)?)
    }

    fn on(
        path: &Path,
        (media, claim): (Mapped, file::Claim),
    ) -> Result<(Arc<Brick>, Housekeeper, Recovered), FileError> {
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
        warn_of_damage(path, pool.view().pool(), &recovered);
        let brick = Arc::new(Brick::around(pool, durability, Some(claim)));
        let thread = std::thread::Builder::new().name("housekeeper".into());
        let keeper = brick.clone();
        let thread =
            thread
                .spawn(move || keeper.keep_house())
                .map_err(|cause| FileError::System {
                    action: "start the housekeeper of",
                    path: path.into(),
                    cause,
                })?;
        let housekeeper = Housekeeper {
            brick: brick.clone(),
            thread: Some(thread),
        };
        Ok((brick, housekeeper, recovered))
    }

    fn keep_house(&self) {
        while !self.stopping.load(Ordering::Acquire) && !self.has_failed() {
            let seen = self.view.control().rung();
            let more = self.tend();
            let wait = self.scrub_if_due(Instant::now());
            if !more {
                self.view.control().await_bell(seen, wait);
            }
        }
    }
}

impl<M: Media> Brick<M> {
    fn around(pool: Pool<M>, durability: Durability, claim: Option<file::Claim>) -> Brick<M> {
        Brick {
            view: pool.view().clone(),
            pool: Mutex::new(pool),
            durability,
            closed: Condvar::new(),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            scrubs: Mutex::default(),
            attached: Mutex::default(),
            still: Mutex::default(),
            claim,
        }
    }

    /// A brick without threads, around a pool that is open: whoever owns it
    /// calls [`Brick::tend`] when the bell of the control segment was rung.
    #[must_use]
    pub fn new(pool: Pool<M>, durability: Durability) -> Brick<M> {
        Brick::around(pool, durability, None)
    }

    /// One round of housekeeping: checkpoint, grants, answers to sessions that
    /// wait. True when there is more to do at once.
    pub fn tend(&self) -> bool {
        let mut mended = 0;
        let tended = self.unstuck(|pool| {
            let before = pool.mended_records();
            let tended = pool.tend();
            mended += pool.mended_records() - before;
            tended
        });
        if mended > 0 {
            tracing::warn!(
                pool = %self.view.pool(), records = mended,
                "the medium had damaged records of the journal, and they were mended; \
                 a medium that loses bits should be replaced"
            );
        }
        self.end_still();
        match tended {
            Ok(more) => more,
            // Told already; the next ring tries again.
            Err(ObjectError::Stuck { .. }) => false,
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
            tracing::error!(%cause, pool = %self.view.pool(), "the pool failed");
            self.view.control().ring();
        }
    }

    /// The error of a pool as a client sees it; one of its medium ends the brick.
    fn refused(&self, cause: ObjectError) -> SliceError {
        if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = cause {
            self.fail(&cause);
        }
        refused(cause)
    }

    pub(crate) fn still(&self) -> MutexGuard<'_, Still> {
        self.still.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pool(&self) -> MutexGuard<'_, Pool<M>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What sessions share.
    #[must_use]
    pub fn view(&self) -> &Arc<View<M>> {
        &self.view
    }

    /// The pool's identity.
    #[must_use]
    pub fn id(&self) -> BrickId {
        BrickId(self.view.pool())
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
            .map_err(|cause| self.refused(cause))
    }

    /// Ends a session whose connection has ended.
    pub fn close_session(&self, number: u32) {
        // Before its number can be another's.
        self.attached().retain(|(_, session)| *session != number);
        self.await_leave(number);
        if let Err(cause) = self.pool().close_session(number) {
            tracing::error!(%cause, number, "cannot end a session");
        }
        self.closed.notify_all();
        // Its frames can be granted again.
        self.view.control().ring();
    }

    /// Waits until a session is outside of every operation. Its connection may
    /// have ended while its process goes on, as when this brick ends: what it
    /// stores then must not meet frames that are others' by now.
    fn await_leave(&self, number: u32) {
        let (pid, started) = {
            let pool = self.pool();
            (pool.process(number), pool.started(number))
        };
        if pid == std::process::id() {
            // The thread that ends the session is the one that had it.
            return;
        }
        let began = Instant::now();
        let mut is_told = false;
        // Its threads may be gone with the program that they ran.
        let is_there = || process::is_running(pid, started) && !self.is_left_by(pid);
        while self.is_inside(number) && is_there() {
            let waited = began.elapsed();
            if waited >= RESUME_AFTER {
                self.resume(number, pid);
            }
            if !is_told && waited > LEAVE_LIMIT {
                is_told = true;
                tracing::warn!(number, pid, "ending a process that stays in an operation");
                if let Err(cause) = process::end(pid, started) {
                    tracing::error!(number, pid, %cause, "a session cannot end: its lane and frames are not used again before the process ends, or the brick is started again");
                }
            }
            std::thread::sleep(leave_pause(waited));
        }
    }

    fn is_left_by(&self, pid: u32) -> bool {
        self.claim.as_ref().is_some_and(|it| it.is_left_by(pid))
    }

    /// In a function of its own: the pool must not stay locked.
    fn is_inside(&self, number: u32) -> bool {
        self.pool().revoke(number)
    }

    /// Runs something that waits for all operations to end. A client's process
    /// that stays inside of one is ended, as nothing else keeps its late
    /// stores out; not one that was just met there, behind others that came and went.
    fn unstuck<T>(
        &self,
        mut run: impl FnMut(&mut Pool<M>) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut pool = self.pool();
        let mut tries = 0;
        let mut still = Still::default();
        loop {
            let result = run(&mut pool);
            let Err(ObjectError::Stuck {
                session,
                operation,
                pid,
            }) = result
            else {
                return result;
            };
            self.note_awaited(&pool);
            let waited = still.note(session, operation).since.elapsed();
            if waited >= RESUME_AFTER {
                let stopped = stopped_inside(&pool);
                // Others need the pool meanwhile.
                drop(pool);
                for (session, pid) in stopped {
                    self.resume(session, pid);
                }
                pool = self.pool();
            }
            if waited < WINDOW_MAX || is_traced_inside(&pool) && waited < TRACED_MAX {
                // Who cleans up behind the dead needs the pool.
                let waited = self.closed.wait_timeout(pool, LOOK_PAUSE);
                pool = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            still = Still::default();
            tries += 1;
            if dead_inside(&pool).is_some() && tries < STUCK_MAX {
                pool = self.await_dead(pool);
                continue;
            }
            let (session, pid) = self.in_the_way(&pool).unwrap_or((session, pid));
            tracing::warn!(session, pid, "ending a process that stays in an operation");
            if tries == STUCK_MAX {
                return result;
            }
            if let Err(cause) = process::end(pid, pool.started(session)) {
                tracing::error!(pid, %cause, "a session is stuck");
                return result;
            }
            pool = self.await_close(pool, session);
        }
    }

    /// Lets a process that a signal stopped run until its session is outside of every operation.
    pub(crate) fn resume(&self, session: u32, pid: u32) {
        if resume::stop_of(pid) != Some(Stop::Signal) {
            return;
        }
        let control = self.view.control();
        let is_outside = || control.operation(session).is_none();
        let is_out = resume::run(pid, &is_outside);
        let name = resume::name_of(pid);
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
    fn in_the_way(&self, pool: &Pool<M>) -> Option<(u32, u32)> {
        let inside = pool.inside();
        let is_stopped = |number: &u32| process::is_stopped(pool.process(*number));
        let stopped = inside.iter().copied().find(is_stopped);
        let first = stopped.or_else(|| {
            let operation = |number| Some((number, pool.operation(number)?));
            let inside: Vec<_> = inside.into_iter().filter_map(operation).collect();
            self.still().first_of(&inside)
        })?;
        Some((first, pool.process(first)))
    }

    /// Waits until those are cleaned up behind who died inside of an operation. Their locks
    /// hold others up inside, who would be taken for the ones that stand still; and what
    /// frees the locks needs the pool.
    fn await_dead<'a>(&self, mut pool: MutexGuard<'a, Pool<M>>) -> MutexGuard<'a, Pool<M>> {
        while let Some(dead) = dead_inside(&pool) {
            pool = self.await_close(pool, dead);
            if pool.is_open(dead) {
                break;
            }
        }
        pool
    }

    /// Waits until a dead session's connection has been noticed.
    fn await_close<'a>(
        &self,
        pool: MutexGuard<'a, Pool<M>>,
        session: u32,
    ) -> MutexGuard<'a, Pool<M>> {
        let open = |pool: &mut Pool<M>| pool.is_open(session);
        let waited = self.closed.wait_timeout_while(pool, CLOSE_LIMIT, open);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Does what only the owner of the pool can do for a slice, for a connection of
    /// this epoch.
    ///
    /// # Errors
    /// When there is no such slice, or its epoch is newer.
    pub fn own(
        &self,
        slice: SliceId,
        epoch: Epoch,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        self.own_for(None, slice, epoch, request)
    }

    /// The same for a session of this process, as long as it is not revoked.
    pub(crate) fn own_for(
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
                let found = pool.in_flight(slice).map_err(|cause| self.refused(cause))?;
                let few = found.filter(|list| list.len() <= LISTED_MAX);
                Ok(SliceReply::InFlight(few))
            }
            SliceRequest::Settled => {
                let (_, entry) = pool.find(slice).map_err(|cause| self.refused(cause))?;
                // What has come to be in flight since is not what that client made equal.
                if epoch < entry.epoch {
                    let current = entry.epoch;
                    return Err(SliceError::StaleEpoch { current });
                }
                pool.settle(slice).map_err(|cause| self.refused(cause))?;
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { round, .. } if round > 15 => {
                let cause = format!("round {round} is beyond 15");
                Err(SliceError::OutOfRange(cause))
            }
            SliceRequest::RaiseEpoch { epoch, round } => {
                drop(pool);
                if let Some(number) = session {
                    self.supersede(slice, epoch, number)?;
                }
                let raised = self.unstuck(|pool| match is_over(pool) {
                    true => Ok(false),
                    false => pool.raise_epoch(slice, epoch, round).map(|()| true),
                });
                match raised.map_err(|cause| self.refused(cause))? {
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
    pub(crate) fn note_attached(&self, slice: SliceId, number: u32) {
        self.attached().push((slice, number));
    }

    /// Ends what sessions that attached a slice before this one may still do,
    /// if this epoch is in force already. A client that comes back with an epoch
    /// it has used sends again what was lost with its old connections; what they
    /// still carry must not come later and undo what was acknowledged since.
    /// An epoch that is raised keeps them out by itself.
    fn supersede(&self, slice: SliceId, epoch: Epoch, number: u32) -> Result<(), SliceError> {
        if defect::is(Defect::OldConnectionTaken) {
            return Ok(());
        }
        let attached = self.attached();
        let pool = self.pool();
        let (_, entry) = pool.find(slice).map_err(|cause| self.refused(cause))?;
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
            .map_err(|cause| self.refused(cause))?;
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
            brick.tend();
        });
        Session::new(self.view.clone(), number).beside_owner(tend)
    }
}

impl Housekeeper {
    /// Ends the brick: refuses every session, and leaves a checkpoint.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.brick.stopping.store(true, Ordering::Release);
        self.brick.view.control().ring();
        if thread.join().is_err() {
            tracing::error!("the housekeeper panicked");
        }
        self.brick.view.abandon();
        if let Err(cause) = self.brick.pool().checkpoint() {
            tracing::warn!(%cause, "no last checkpoint; the next start replays the journal");
        }
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        self.end();
    }
}

/// How long not to look at a process that has been waited for so long.
fn leave_pause(waited: Duration) -> Duration {
    let late = waited.saturating_sub(LEAVE_LIMIT);
    (LEAVE_PAUSE + late / 8).min(LEAVE_PAUSE_MAX)
}

/// Says what recovery found damaged. A medium that loses bits loses more.
fn warn_of_damage(path: &Path, pool: Uuid, found: &Recovered) {
    if found.completed > 0 {
        tracing::warn!(
            %pool, path = %path.display(), pages = found.completed,
            "one bit was wrong in pages that were written since the last checkpoint, and recovery \
             mended them: the power failed while they were written, or the medium loses bits"
        );
    }
    if !found.is_damaged() {
        return;
    }
    let way_out = "stop the brick and run `pagemesh pool check` on the pool; a medium that loses bits should be replaced";
    let path = path.display();
    if found.mended > 0 || found.bitmap_lines > 0 {
        tracing::warn!(
            %pool, %path, records_entries_and_slots = found.mended, bitmap_lines = found.bitmap_lines,
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
fn stopped_inside<M: Media>(pool: &Pool<M>) -> Vec<(u32, u32)> {
    let inside = pool.inside().into_iter();
    let all = inside.map(|session| (session, pool.process(session)));
    all.filter(|&(_, pid)| resume::stop_of(pid) == Some(Stop::Signal))
        .collect()
}

/// Whether a debugger holds a process inside of an operation.
fn is_traced_inside<M: Media>(pool: &Pool<M>) -> bool {
    let mut inside = pool.inside().into_iter();
    inside.any(|session| {
        matches!(
            resume::stop_of(pool.process(session)),
            Some(Stop::Tracer(_))
        )
    })
}

/// A session that is inside of an operation though its process has ended.
fn dead_inside<M: Media>(pool: &Pool<M>) -> Option<u32> {
    let mut inside = pool.inside().into_iter();
    inside.find(|&number| !process::is_running(pool.process(number), pool.started(number)))
}

/// The error of a pool as a client sees it.
fn refused(cause: ObjectError) -> SliceError {
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
            .map_err(|cause| self.refused(cause))
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let size_bytes = size_bytes
            .checked_next_multiple_of(4096)
            .unwrap_or(u64::MAX);
        self.pool()
            .resize(slice, size_bytes)
            .map_err(|cause| self.refused(cause))
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let deleted = self
            .unstuck(|pool| pool.delete(slice))
            .map_err(|cause| self.refused(cause));
        self.view.control().ring();
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
            incarnation: self.view.incarnation().0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_never_leaves_is_looked_at_ever_more_rarely() {
        let looks_within = |time: Duration| {
            let (mut waited, mut looks) = (Duration::ZERO, 0);
            while waited < time {
                waited += leave_pause(waited);
                looks += 1;
            }
            looks
        };
        assert_eq!(looks_within(LEAVE_LIMIT), 1000, "each millisecond");
        assert!(looks_within(Duration::from_secs(60)) < 1000 + 150);
        assert!(looks_within(Duration::from_secs(3600)) < 1000 + 3700);
        // One that was ended is gone within milliseconds, and is seen to be.
        assert!(leave_pause(LEAVE_LIMIT + Duration::from_millis(50)) < Duration::from_millis(10));
    }
}
