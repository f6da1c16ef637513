//! Requests that only the owner of the pool can answer: calls of the manager, and the epochs and
//! in-flight tables of slices.
//!
//! Invariants: a session that was revoked changes nothing. An error of the medium ends the brick.

use super::Brick;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{EPOCH_MAX, Epoch, ObjectId, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_base::slice::{
    BrickControl, BrickStatus, CloneProgress, CloneSource, DROPPED_SNAPSHOTS_MAX, LIST_ENTRIES_MAX,
    SEEN_RUNS_MAX, SeenPagesList, SliceError, SliceInfo, SliceReply, SliceRequest, VersionEdits,
    VersionList, VersionRange,
};
use pagemesh_pmem::Media;
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::recovery::PoolError;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

impl<M: Media> Brick<M> {
    /// A pool's error as the client's error. An error of the medium ends the brick.
    pub(super) fn report_error(&self, cause: ObjectError) -> SliceError {
        if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = cause {
            self.fail(&cause);
        }
        cause.into()
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
        if request.is_read_of_snapshot() {
            return self.read_snapshot(slice, &request);
        }
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
            SliceRequest::RaiseEpoch { epoch, lost_since } => {
                drop(pool);
                check_epoch(epoch)?;
                if let Some(number) = session {
                    self.revoke_older_sessions(slice, epoch, number)?;
                }
                let raised = self.retry_while_stuck(|pool| {
                    if is_over(pool) {
                        return Ok(false);
                    }
                    let raised = pool.raise_epoch_after_loss(slice, epoch, lost_since);
                    raised.map(|()| true)
                });
                if raised.map_err(|cause| self.report_error(cause))? {
                    Ok(SliceReply::Done)
                } else {
                    Err(StoreError::Revoked.into())
                }
            }
            SliceRequest::PrepareSnapshot { snapshot } => {
                drop(pool);
                self.prepare_snapshot_for(session, (slice, epoch), snapshot)
            }
            other => Err(SliceError::Refused(format!("{other:?} needs a session"))),
        }
    }

    /// Keeps the versions that a snapshot sees, for a connection of this epoch.
    fn prepare_snapshot_for(
        &self,
        session: Option<u32>,
        (slice, epoch): (SliceId, Epoch),
        snapshot: Epoch,
    ) -> Result<SliceReply, SliceError> {
        check_epoch(snapshot)?;
        let prepared = self.retry_while_stuck(|pool| {
            let (_, entry) = pool.find(slice)?;
            if session.is_some_and(|number| pool.is_revoked(number)) {
                return Ok(Err(StoreError::Revoked.into()));
            }
            let current = entry.epoch;
            if current > epoch || current > snapshot {
                return Ok(Err(SliceError::StaleEpoch { current }));
            }
            pool.prepare_snapshot(slice, snapshot).map(Ok)
        });
        prepared.map_err(|cause| self.report_error(cause))??;
        Ok(SliceReply::Done)
    }

    pub(super) fn attached(&self) -> MutexGuard<'_, Vec<(SliceId, u32)>> {
        lock(&self.attached)
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
        if entry.epoch > epoch {
            let current = entry.epoch;
            return Err(SliceError::StaleEpoch { current });
        }
        Ok((object, entry.size_bytes))
    }
}

fn check_epoch(epoch: Epoch) -> Result<(), SliceError> {
    match epoch.0 <= EPOCH_MAX {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "epoch {epoch} is beyond the highest, {EPOCH_MAX}"
        ))),
    }
}

/// The time of one call for a clone.
const CLONE_CALL_TIME: Duration = Duration::from_millis(200);

/// A size in whole pages. One beyond `u64` stays beyond every limit.
fn whole_pages(size_bytes: u64) -> u64 {
    size_bytes
        .checked_next_multiple_of(4096)
        .unwrap_or(u64::MAX)
}

impl<M: Media + Send + Sync> BrickControl for Brick<M> {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let created = self.pool().create(slice, whole_pages(size_bytes));
        self.reset_reported_policies();
        created.map_err(|cause| self.report_error(cause))
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.pool()
            .resize(slice, whole_pages(size_bytes))
            .map_err(|cause| self.report_error(cause))
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let deleted = self
            .retry_while_stuck(|pool| pool.delete(slice))
            .map_err(|cause| self.report_error(cause));
        self.mapping.control().ring_doorbell();
        self.reset_reported_policies();
        deleted
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        let pool = self.pool();
        let info = |object: pagemesh_store::object::Object| SliceInfo {
            slice: object.slice,
            size_bytes: object.size_bytes,
            epoch: object.epoch.0,
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

    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        check_epoch(snapshot)?;
        let prepared = self.retry_while_stuck(|pool| {
            if let Some(why) = find_unequal(pool, slice)? {
                return Ok(Err(why));
            }
            // A leg may be behind, and the brick does not know since when. So every operation stays in
            // the in-flight table until the next client's barrier names the loss.
            pool.raise_epoch_after_loss(slice, snapshot, snapshot)?;
            if let Some(why) = find_unequal(pool, slice)? {
                return Ok(Err(why));
            }
            pool.prepare_snapshot(slice, snapshot).map(Ok)
        });
        prepared.map_err(|cause| self.report_error(cause))?
    }

    fn drop_snapshots(&self, slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        if dropped.len() > DROPPED_SNAPSHOTS_MAX {
            return Err(SliceError::OutOfRange(format!(
                "{} snapshots dropped at once; the most is {DROPPED_SNAPSHOTS_MAX}",
                dropped.len()
            )));
        }
        let result = self.retry_while_stuck(|pool| pool.drop_snapshots(slice, dropped));
        self.mapping.control().ring_doorbell();
        result.map_err(|cause| self.report_error(cause))
    }

    fn create_clone(
        &self,
        slice: SliceId,
        source: CloneSource,
        size_bytes: u64,
    ) -> Result<CloneProgress, SliceError> {
        let bytes = whole_pages(size_bytes);
        let created = self.retry_while_stuck(|pool| pool.create_clone(slice, source, bytes));
        created.map_err(|cause| self.report_error(cause))?;
        self.reset_reported_policies();
        self.repeat_clone_step(|pool| pool.fill_clone(slice))
    }

    fn promote_clone(&self, slice: SliceId) -> Result<CloneProgress, SliceError> {
        self.repeat_clone_step(|pool| pool.promote_clone(slice))
    }

    fn count_seen_pages(&self, slice: SliceId, from: PageNo) -> Result<SeenPagesList, SliceError> {
        let counted = self.retry_while_stuck(|pool| pool.count_seen_pages(slice, from));
        let counted = counted.map_err(|cause| self.report_error(cause))?;
        match counted.runs.len() <= SEEN_RUNS_MAX {
            true => Ok(counted),
            false => Err(SliceError::Refused(format!(
                "the pages from {} on have versions for {} runs of snapshots, and an answer has {SEEN_RUNS_MAX}; \
                 delete some snapshots first",
                from.0,
                counted.runs.len()
            ))),
        }
    }

    fn adopt_snapshots(&self, slice: SliceId, adopted: &[Epoch]) -> Result<(), SliceError> {
        let result = self.retry_while_stuck(|pool| pool.adopt_snapshots(slice, adopted));
        result.map_err(|cause| self.report_error(cause))
    }

    fn list_versions(
        &self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, SliceError> {
        let listed = self.retry_while_stuck(|pool| pool.list_versions(slice, range));
        listed.map_err(|cause| self.report_error(cause))
    }

    fn edit_versions(&self, slice: SliceId, edits: &VersionEdits) -> Result<(), SliceError> {
        let edited = self.retry_while_stuck(|pool| pool.edit_versions(slice, edits));
        self.mapping.control().ring_doorbell();
        edited.map_err(|cause| self.report_error(cause))
    }

    fn read_version(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> Result<Vec<u8>, SliceError> {
        let request = SliceRequest::ReadVersion {
            snapshot,
            offset,
            len,
        };
        match self.read_snapshot(slice, &request)? {
            SliceReply::Data(data) => Ok(data),
            _ => Err(SliceError::Refused("the read has no data".into())),
        }
    }

    fn snapshots(&self, slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        let found = self.pool().snapshots_of(slice);
        found.map_err(|cause| self.report_error(cause))
    }
}

impl<M: Media + Send + Sync> Brick<M> {
    /// Repeats a step of the work for a clone for a bounded time. Other requests get the pool between two steps.
    fn repeat_clone_step(
        &self,
        mut step: impl FnMut(&mut Pool<M>) -> Result<CloneProgress, ObjectError>,
    ) -> Result<CloneProgress, SliceError> {
        let begin = Instant::now();
        loop {
            let progress = self.retry_while_stuck(&mut step);
            let progress = progress.map_err(|cause| self.report_error(cause))?;
            if progress.is_complete() || begin.elapsed() >= CLONE_CALL_TIME {
                self.mapping.control().ring_doorbell();
                return Ok(progress);
            }
        }
    }
}

/// Why a slice may differ from its other copies, if it may: a client died, and no client has made them
/// equal since.
fn find_unequal<M: Media>(
    pool: &Pool<M>,
    slice: SliceId,
) -> Result<Option<SliceError>, ObjectError> {
    let is_equal = pool
        .in_flight(slice)?
        .is_some_and(|listed| listed.is_empty());
    Ok((!is_equal).then(|| {
        SliceError::Refused(format!(
            "slice {slice} may differ from its other copies, because a client ended during writes; \
             attach the volume, and take the snapshot while it is attached"
        ))
    }))
}
