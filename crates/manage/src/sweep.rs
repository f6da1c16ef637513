//! Creating and deleting slices on bricks, and the sweep that finishes postponed deletions.
//!
//! Invariants: the manager checks the id of a brick before any other request, so another pool at
//! the same address is never mistaken for it. A slice that is part of a volume is never deleted. No
//! function here holds the lock during a call to a brick.

use crate::events::{EventDraft, LossEffect};
use crate::fault::Fault;
use crate::manager::{BrickState, Manager, ManagerState};
use crate::records::{BrickRecord, PendingDelete};
use crate::slices::{SliceLocation, slice_locations};
use crate::store::StoreWrite;
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::{BrickId, Column, LegState, Segment, SliceId};
use pagemesh_base::slice::{BrickControl, CloneSource, SliceError};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::{Duration, Instant};

/// Interval between attempts to delete the remaining slices. A brick that returns is tried at once.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Slices that one sweep tries to delete; the next sweep continues.
const SWEEP_SLICES_MAX: usize = 1024;
/// A brick may still execute a request to create a slice for this long after its first answer that
/// the slice does not exist. Until then "no such slice" does not mean that the slice stays absent.
/// The period counts from an answer, not from the request: a stalled brick finds old requests in
/// its sockets when it resumes. It is far longer than the time-outs of connections.
pub(crate) const UNCERTAIN_PERIOD: Duration = Duration::from_secs(120);

/// The time in which a brick must fill a clone: its caller waits.
const FILL_TIME_MAX: Duration = Duration::from_secs(14);

/// Connections to bricks, opened on first use.
pub(crate) struct BrickConnections<'a> {
    manager: &'a Manager,
    connections: BTreeMap<BrickId, Box<dyn BrickControl>>,
}

impl BrickConnections<'_> {
    pub(crate) fn get(&mut self, brick: BrickId) -> Result<&dyn BrickControl, SliceError> {
        if !self.connections.contains_key(&brick) {
            let control = self
                .manager
                .bricks
                .control(&self.manager.brick_address(brick))?;
            let found = control.status()?.brick;
            if found != brick {
                let found = self.manager.brick_label(found);
                return Err(SliceError::Refused(format!(
                    "another brick answers: {found}"
                )));
            }
            self.connections.insert(brick, control);
        }
        Ok(self.connections[&brick].as_ref())
    }
}

impl BrickConnections<'_> {
    /// A connection that [`BrickConnections::get`] has opened.
    pub(crate) fn opened(&self, brick: BrickId) -> Option<&dyn BrickControl> {
        self.connections.get(&brick).map(AsRef::as_ref)
    }
}

/// The state that a failed attempt to create a slice may have left.
enum LeftoverSlice {
    /// No slice of this attempt: the brick received no request, or the slice belongs to another
    /// one.
    None,
    /// A slice may exist, and none will appear later: the brick has answered.
    Possible,
    /// A slice may exist, or may appear later: the brick did not answer.
    Uncertain,
}

impl Manager {
    pub(crate) fn brick_address(&self, brick: BrickId) -> String {
        let book = self.state();
        let known = book.bricks.get(&brick);
        known.map_or_else(String::new, |brick| brick.record.address.clone())
    }

    pub(crate) fn brick_label(&self, brick: BrickId) -> BrickLabel {
        self.state().label(brick)
    }

    /// The fault of a call that a brick refused or did not answer.
    pub(crate) fn brick_fault(&self, brick: BrickId, cause: SliceError) -> Fault {
        Fault::Brick {
            brick: self.brick_label(brick),
            address: self.brick_address(brick),
            cause,
        }
    }

    pub(crate) fn brick_connections(&self) -> BrickConnections<'_> {
        BrickConnections {
            manager: self,
            connections: BTreeMap::new(),
        }
    }

    /// Creates the slices of segments; if one fails, deletes the slices created before.
    ///
    /// # Errors
    /// The error of the brick.
    pub(crate) fn create_slices(&self, segments: &[Segment]) -> Result<(), Fault> {
        self.create_slices_from(segments, &BTreeMap::new())
    }

    /// The same. Some slices are clones of these snapshots.
    ///
    /// # Errors
    /// The error of the brick.
    pub(crate) fn create_slices_from(
        &self,
        segments: &[Segment],
        sources: &BTreeMap<SliceId, CloneSource>,
    ) -> Result<(), Fault> {
        let places: Vec<SliceLocation> = slice_locations(segments).collect();
        let mut controls = self.brick_connections();
        for (at, place) in places.iter().enumerate() {
            let source = sources.get(&place.slice).copied();
            let Err((trace, cause)) = create_slice(&mut controls, place, source) else {
                continue;
            };
            let fault = self.brick_fault(place.brick, cause);
            drop(controls);
            self.roll_back_slices(&places, at, &trace);
            return Err(fault);
        }
        Ok(())
    }

    /// Deletes the slices up to the failed one, and forgets the slices that were never requested.
    fn roll_back_slices(&self, places: &[SliceLocation], failed: usize, trace: &LeftoverSlice) {
        let (asked, never) = match trace {
            LeftoverSlice::None => (failed, failed),
            LeftoverSlice::Possible => (failed + 1, failed + 1),
            LeftoverSlice::Uncertain => (failed, failed + 1),
        };
        let key = |place: &SliceLocation| (place.brick, place.slice);
        let never: Vec<_> = places[never..].iter().map(key).collect();
        self.forget_deletes(&never);
        let pending = |place: &SliceLocation| PendingDelete {
            brick: place.brick,
            slice: place.slice,
            uncertain: false,
        };
        let asked: Vec<_> = places[..asked].iter().map(pending).collect();
        self.delete_slices(&asked);
    }

    /// Tries to delete slices, and forgets the deleted ones. A dead or lost brick is left to the
    /// next sweep. After a failed commit it deletes nothing: the store may name slices as part of a
    /// volume that memory still lists as pending deletes.
    pub(crate) fn delete_slices(&self, pending: &[PendingDelete]) {
        if self.store.has_failed() {
            return;
        }
        let mut by_brick: BTreeMap<BrickId, Vec<PendingDelete>> = BTreeMap::new();
        for &slice in pending {
            by_brick.entry(slice.brick).or_default().push(slice);
        }
        let alive = |brick: &BrickId| {
            let book = self.state();
            let known = book.bricks.get(brick);
            known.is_some_and(|brick| self.is_alive(brick))
        };
        let mut gone = Vec::new();
        let mut controls = self.brick_connections();
        for (brick, slices) in by_brick {
            if !alive(&brick) {
                continue;
            }
            if let Err(cause) = self.delete_slices_on(&mut controls, brick, &slices, &mut gone) {
                let brick = self.brick_label(brick);
                tracing::warn!(%brick, %cause, "cannot delete slices now; trying again later");
            }
        }
        self.forget_deletes(&gone);
    }

    fn delete_slices_on(
        &self,
        controls: &mut BrickConnections<'_>,
        brick: BrickId,
        slices: &[PendingDelete],
        gone: &mut Vec<(BrickId, SliceId)>,
    ) -> Result<(), SliceError> {
        let control = controls.get(brick)?;
        for pending in slices {
            let slice = pending.slice;
            match control.delete(slice) {
                Ok(()) => gone.push((brick, slice)),
                Err(SliceError::NoSuchSlice(_)) if self.is_gone_for_good(pending) => {
                    gone.push((brick, slice));
                }
                Err(SliceError::NoSuchSlice(_)) => {}
                Err(cause @ SliceError::Lost(_)) => return Err(cause),
                // One failing slice must not block the others.
                Err(cause) => {
                    let brick = self.brick_label(brick);
                    tracing::warn!(%brick, %slice, %cause, "cannot delete a slice; trying again later");
                }
            }
        }
        Ok(())
    }

    /// Whether a slice that its brick does not have cannot appear later.
    fn is_gone_for_good(&self, pending: &PendingDelete) -> bool {
        if !pending.uncertain {
            return true;
        }
        let now = self.clock.elapsed();
        let mut book = self.state();
        let Some(doom) = book
            .pending_deletes
            .get_mut(&(pending.brick, pending.slice))
        else {
            return true;
        };
        let since = *doom.absent_since.get_or_insert(now);
        now.saturating_sub(since) >= UNCERTAIN_PERIOD
    }

    fn forget_deletes(&self, gone: &[(BrickId, SliceId)]) {
        if gone.is_empty() {
            return;
        }
        let mut book = self.state();
        let writes: Vec<_> = gone
            .iter()
            .map(|&(b, s)| StoreWrite::RemovePendingDelete(b, s))
            .collect();
        // A pending delete that stays in the store is repeated later, which does no harm.
        if let Err(error) = self.store.commit(&writes) {
            tracing::error!(%error, "cannot write down which slices are deleted");
            return;
        }
        for key in gone {
            book.pending_deletes.remove(key);
        }
    }

    /// One sweep: notes expired tokens, reports the bricks that died or returned, and retries the
    /// pending deletes of slices and snapshots, and copies versions of snapshots to legs that lack them.
    pub fn sweep(&self) {
        self.store_expired_tokens();
        self.forget_expired_answers();
        self.log_liveness_changes();
        self.report_liveness_changes();
        let pending = self.next_pending_deletes();
        self.delete_slices(&pending);
        self.drop_snapshots(None);
        self.copy_missing_versions();
    }

    /// The pending deletes that can be tried now. Each sweep starts after the last slice of the
    /// sweep before, so failing slices do not block the others for ever.
    fn next_pending_deletes(&self) -> Vec<PendingDelete> {
        let mut book = self.state();
        let behind = book.sweep_cursor.map_or(Bound::Unbounded, Bound::Excluded);
        let up_to = book.sweep_cursor.map(Bound::Included);
        let later = book.pending_deletes.range((behind, Bound::Unbounded));
        let earlier = up_to.map(|to| book.pending_deletes.range((Bound::Unbounded, to)));
        let next: Vec<PendingDelete> = later
            .chain(earlier.into_iter().flatten())
            .map(|(_, doom)| doom.record)
            .filter(|record| {
                let brick = book.bricks.get(&record.brick);
                brick.is_some_and(|brick| self.is_alive(brick))
                    && !book.is_being_created(record.slice)
            })
            .take(SWEEP_SLICES_MAX)
            .collect();
        book.sweep_cursor = next.last().map(|record| (record.brick, record.slice));
        next
    }

    /// Commits an event for each brick that died or returned since its last event.
    fn report_liveness_changes(&self) {
        if self.store.has_failed() {
            return;
        }
        let mut book = self.state();
        self.refresh_living(&mut book);
        let mut changed: Vec<BrickRecord> = Vec::new();
        let mut drafts = Vec::new();
        for brick in book.bricks.values() {
            let record = &brick.record;
            if record.reported_lost && self.is_alive(brick) {
                drafts.push(EventDraft::brick_returned(record));
            } else if !record.reported_lost && self.is_dead(brick) {
                let effect = self.loss_effect(&book, record.brick);
                drafts.push(EventDraft::brick_lost(
                    record,
                    self.settings.dead_after,
                    effect,
                ));
            } else {
                continue;
            }
            changed.push(BrickRecord {
                reported_lost: !record.reported_lost,
                ..record.clone()
            });
        }
        if changed.is_empty() {
            return;
        }
        let writes: Vec<_> = changed.iter().map(StoreWrite::PutBrick).collect();
        if let Err(error) = self.commit(&mut book, &writes, drafts) {
            tracing::error!(%error, "cannot write down which bricks died or returned");
            return;
        }
        for record in changed {
            if let Some(brick) = book.bricks.get_mut(&record.brick) {
                brick.record.reported_lost = record.reported_lost;
            }
        }
    }

    fn loss_effect(&self, book: &ManagerState, lost: BrickId) -> LossEffect {
        let is_living = |brick: &BrickId| {
            let brick = book.bricks.get(brick);
            brick.is_some_and(|brick| !self.is_dead(brick))
        };
        let is_usable = |column: &Column| {
            let mut legs = column.legs.iter();
            legs.any(|leg| leg.state == LegState::InSync && is_living(&leg.brick))
        };
        let mut effect = LossEffect::default();
        for volume in book.volumes.on_brick(lost) {
            let Some(record) = book.volumes.get(volume) else {
                continue;
            };
            let mut columns = record.layout_state.layout.columns();
            effect.volumes += 1;
            effect.unusable += usize::from(!columns.all(is_usable));
        }
        effect
    }

    /// The time until the next brick may count as dead, if its heartbeats stay away.
    pub(crate) fn next_loss_in(&self) -> Option<Duration> {
        let (book, now) = (self.state(), self.clock.elapsed());
        let heard = |brick: &BrickState| {
            let seen = brick.last_heartbeat;
            seen.map_or(self.started_at, |seen| seen.received_at)
        };
        let living = book.bricks.values().filter(|brick| !self.is_dead(brick));
        let dies = living.map(|brick| heard(brick) + self.settings.dead_after);
        dies.min().map(|at| at.saturating_sub(now))
    }

    fn log_liveness_changes(&self) {
        let mut book = self.state();
        for brick in book.bricks.values_mut() {
            let alive = self.is_alive(brick);
            if alive != brick.logged_alive {
                brick.logged_alive = alive;
                log_liveness(brick, alive);
            }
        }
    }
}

fn log_liveness(brick: &BrickState, alive: bool) {
    let (name, id) = (brick.record.label(), brick.record.brick);
    let address = &brick.record.address;
    if alive {
        tracing::info!(brick = %name, %id, %address, "the brick is alive");
    } else {
        tracing::warn!(brick = %name, %id, %address, "the brick's heartbeats are missing; it counts as dead");
    }
}

fn create_slice(
    controls: &mut BrickConnections<'_>,
    place: &SliceLocation,
    source: Option<CloneSource>,
) -> Result<(), (LeftoverSlice, SliceError)> {
    let control = controls
        .get(place.brick)
        .map_err(|cause| (LeftoverSlice::None, cause))?;
    let created = match source {
        Some(source) => fill_clone(control, place, source),
        None => control.create(place.slice, place.bytes),
    };
    created.map_err(|cause| {
        let trace = match cause {
            SliceError::Lost(_) => LeftoverSlice::Uncertain,
            SliceError::SliceExists(_) => LeftoverSlice::None,
            // A brick that failed to make a slice durable may still have it.
            _ => LeftoverSlice::Possible,
        };
        (trace, cause)
    })
}

/// Creates a clone, and lets the brick fill it.
fn fill_clone(
    control: &dyn BrickControl,
    place: &SliceLocation,
    source: CloneSource,
) -> Result<(), SliceError> {
    let begin = Instant::now();
    while !control
        .create_clone(place.slice, source, place.bytes)?
        .is_complete()
    {
        if begin.elapsed() > FILL_TIME_MAX {
            return Err(SliceError::Refused(format!(
                "the clone was not filled within {} seconds; the volume has too many pages",
                FILL_TIME_MAX.as_secs()
            )));
        }
    }
    Ok(())
}
