//! Replicas: adding, removing and promoting a copy of a volume.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::layout_state::{LayoutChange, LayoutChangeError, is_up_to_date};
use crate::manager::{BrickState, Manager, ManagerState};
use crate::placement::{BrickCandidate, ColumnRequest, place_leg};
use crate::records::{PendingDelete, VolumeRecord};
use crate::replica_snapshots::PromotedSnapshots;
use crate::slices::{SliceLocation, slice_locations};
use crate::store::StoreWrite;
use crate::volumes::check_not_busy;
use crate::wire::{AttachReplica, ChooseReplica, VolumeDetail};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, LEGS_MAX, Leg, LegState, Segment, SliceId, VolumeName,
};

impl Manager {
    /// Adds a copy to every column of a volume, attached or not: bricks create the slices, then one
    /// commit publishes them. The client that has attached the volume resyncs the copy, or else the
    /// next client.
    ///
    /// # Errors
    /// When the volume has the maximum of copies, no brick in another failure domain has room, or a
    /// brick fails.
    pub fn attach_replica(
        &self,
        name: &VolumeName,
        request: AttachReplica,
    ) -> Result<VolumeDetail, Fault> {
        let attached = self.attach_replica_keyed(name, request);
        attached.map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the volume. A repetition of a call with an `Idempotency-Key`
    /// gets the first answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn attach_replica_keyed(
        &self,
        name: &VolumeName,
        request: AttachReplica,
    ) -> Result<CreateAnswer<VolumeDetail>, Fault> {
        let running = match self.begin_call(&("replicas", name, &request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let plan = {
            let mut book = self.state();
            check_not_busy(&book, name)?;
            let volume = book.volume(name)?.clone();
            self.check_volume_unchanged(&volume)?;
            if volume.shape.copies >= LEGS_MAX {
                return Err(LayoutChangeError::TooManyLegs.into());
            }
            match request.asynchronous {
                true => check_async_allowed(&volume)?,
                false if request.auto_promote => return Err(auto_promote_error()),
                false => {}
            }
            let candidates = self.replica_candidates(&book, request.brick.as_ref())?;
            let (durability, factor) = (volume.durability, self.settings.overprovision_factor);
            let thin = column_requests(&book, &volume);
            let bricks = place_leg(&candidates, durability, factor, &thin)?;
            let segments = &volume.layout_state.layout.segments;
            let segments = self.replica_segments(segments, &bricks, request.asynchronous);
            self.reserve_slices(&mut book, name, durability, segments, volume.files_bytes)?
        };
        self.create_slices(&plan.segments)?;
        let copy = plan.segments.iter().map(|segment| {
            let columns = segment.columns.iter();
            columns.flat_map(|column| column.legs.clone()).collect()
        });
        let change = LayoutChange::AddLeg(copy.collect());
        let record = |book: &ManagerState| {
            let mut record = book.volume(name)?.clone();
            record.layout_state = record.layout_state.apply(&change)?;
            record.shape = record.shape.with_copies(record.shape.copies + 1)?;
            record.auto_promote |= request.auto_promote;
            let places = slice_locations(&plan.segments);
            let labels: Vec<_> = places.map(|place| book.label(place.brick)).collect();
            let event = EventDraft::replica_attached(name, &self.actor(), &labels);
            Ok((record, event))
        };
        self.publish(&plan.segments, running.as_ref(), record, |detail| detail)
    }

    /// Removes a copy of a volume and deletes its slices. Later copies move up by one, so a client
    /// that has attached the volume must be fenced.
    ///
    /// # Errors
    /// When there is no such copy, no in-sync copy would remain, or a client has attached the
    /// volume and `force` is not set.
    pub fn detach_replica(
        &self,
        name: &VolumeName,
        request: ChooseReplica,
    ) -> Result<VolumeDetail, Fault> {
        let (pending, detail) = {
            let mut book = self.state();
            let mut record = self.detachable_record(&book, name, request)?;
            let before = slice_locations(&record.layout_state.layout.segments)
                .collect::<Vec<SliceLocation>>();
            record.layout_state = record
                .layout_state
                .apply(&LayoutChange::RemoveLeg(request.copy))?;
            if !request.force {
                self.check_live_in_sync_leg(&book, &record)?;
            }
            record.shape = record.shape.with_copies(record.shape.copies - 1)?;
            record.auto_promote &= async_replica(&record).is_some();
            record.notes.retain(|note| note.leg != request.copy);
            let behind = record
                .notes
                .iter_mut()
                .filter(|note| note.leg > request.copy);
            behind.for_each(|note| note.leg -= 1);
            let left = &record.layout_state.layout.segments;
            Manager::check_snapshots_keep_copy(&book, name, request.copy, left)?;
            let left = slice_locations(left).collect::<Vec<SliceLocation>>();
            let gone = before.into_iter().filter(|place| !left.contains(place));
            let pending: Vec<PendingDelete> = gone
                .map(|place| PendingDelete {
                    brick: place.brick,
                    slice: place.slice,
                    uncertain: false,
                })
                .collect();
            let mut writes: Vec<_> = pending
                .iter()
                .map(|&pending| StoreWrite::AddPendingDelete(pending))
                .collect();
            writes.push(StoreWrite::PutVolume(&record));
            let cause = format!("copy {} was removed by force", request.copy);
            let mut drafts = self.forced_detach_drafts(book.volume(name)?, &record, &cause);
            drafts.push(EventDraft::replica_detached(
                name,
                &self.actor(),
                request.copy,
            ));
            self.commit(&mut book, &writes, drafts)?;
            Manager::add_pending_deletes(&mut book, &pending);
            let detail = self.volume_detail(&book, &record);
            self.put_volume(&mut book, record);
            (pending, detail)
        };
        self.delete_slices(&pending);
        Ok(detail)
    }

    /// Makes one copy the only in-sync copy of a volume that has lost its in-sync ones, as when
    /// their bricks are gone for good. The other copies later resync from it, by comparison.
    /// Columns where the copy is in-sync stay unchanged: there the next client uses any in-sync leg
    /// that it reaches.
    ///
    /// **Data loss:** a copy in the state `async-replica` holds all durable writes, and of the others
    /// all up to some change. Later acknowledged writes are lost.
    ///
    /// # Errors
    /// When there is no such copy, or it never held the whole volume. Without `force` also when the
    /// copy is neither in-sync nor an asynchronous replica in step, when it is one and a brick with an in-sync copy
    /// is alive, when it lacks a snapshot that is held, or when a client has attached the volume. A lacked snapshot with
    /// clones is an error in any case.
    pub fn promote_replica(
        &self,
        name: &VolumeName,
        request: ChooseReplica,
    ) -> Result<VolumeDetail, Fault> {
        let mut book = self.state();
        let mut record = self.detachable_record(&book, name, request)?;
        self.check_promotion(&book, &record, request)?;
        let is_lossy = {
            let columns = record.layout_state.layout.columns();
            let mut legs = columns.filter_map(|column| column.legs.get(request.copy));
            legs.any(|leg| leg.state != LegState::InSync)
        };
        promote_record(&mut record, request.copy)?;
        let snapshots = match is_lossy {
            true => Some(PromotedSnapshots::plan(
                &book,
                &record,
                request.copy,
                request.force,
            )?),
            false => None,
        };
        let lost = snapshots.as_ref().map(PromotedSnapshots::lost_names);
        let cause = format!("copy {} was promoted by force", request.copy);
        let mut drafts = self.forced_detach_drafts(book.volume(name)?, &record, &cause);
        let actor = self.actor();
        drafts.push(EventDraft::promoted(name, &actor, request.copy, is_lossy));
        drafts.extend(
            snapshots
                .as_ref()
                .and_then(|it| it.draft(name, &actor, request.copy)),
        );
        self.commit_promotion(&mut book, &record, drafts, snapshots)?;
        Ok(VolumeDetail {
            lost_snapshots: lost.unwrap_or_default(),
            ..self.volume_detail(&book, &record)
        })
    }

    /// The event of a client that loses a volume to a forced change of an operator.
    fn forced_detach_drafts(
        &self,
        before: &VolumeRecord,
        after: &VolumeRecord,
        cause: &str,
    ) -> Vec<EventDraft> {
        let layout = &after.layout_state.layout;
        let fenced = before.attachment.as_ref().map(|it| {
            EventDraft::fenced(
                &layout.name,
                &it.client,
                &self.actor(),
                (cause, layout.epoch),
            )
        });
        fenced.into_iter().collect()
    }

    /// Promotes the asynchronous copy for a client that reaches no in-sync copy, and returns its
    /// number, and what becomes of the snapshots. The volume must allow it (`auto_promote`), the copy must be in step on a living
    /// brick, and [`Manager::promote_replica`] must accept it without `force`: every brick with an
    /// in-sync copy is dead.
    ///
    /// Missing heartbeats alone do not suffice: they may be late or lost while clients reach the
    /// brick.
    pub(crate) fn promote_if_allowed(
        &self,
        book: &ManagerState,
        record: &mut VolumeRecord,
    ) -> Result<Option<(usize, PromotedSnapshots)>, LayoutChangeError> {
        let Some((copy, leg)) = async_replica(record).filter(|_| record.auto_promote) else {
            return Ok(None);
        };
        let request = ChooseReplica {
            copy,
            force: false,
            expected: None,
        };
        let brick = book.bricks.get(&leg.brick);
        let is_there = brick.is_some_and(|brick| self.is_alive(brick));
        let is_ready = leg.state == LegState::AsyncReplica && is_there;
        if !is_ready || self.check_promotion(book, record, request).is_err() {
            return Ok(None);
        }
        let mut promoted = record.clone();
        promote_record(&mut promoted, copy)?;
        match PromotedSnapshots::plan(book, &promoted, copy, false) {
            Ok(snapshots) => {
                *record = promoted;
                Ok(Some((copy, snapshots)))
            }
            Err(cause) => {
                let volume = &record.layout_state.layout.name;
                tracing::warn!(%volume, copy, %cause, "an asynchronous copy is not promoted");
                Ok(None)
            }
        }
    }

    /// The conditions of [`Manager::promote_replica`], as listed under its errors.
    fn check_promotion(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
        request: ChooseReplica,
    ) -> Result<(), Fault> {
        let columns = record.layout_state.layout.columns();
        let mut legs = columns
            .clone()
            .filter_map(|column| column.legs.get(request.copy));
        let mut others = columns.flat_map(|column| &column.legs);
        let is_replica = |leg: &&Leg| leg.state == LegState::AsyncReplica;
        let may_live =
            |leg: &&Leg| in_sync_brick(book, leg).is_some_and(|brick| !self.is_dead(brick));
        if legs.clone().any(|leg| is_replica(&leg))
            && let Some(in_sync) = others.find(may_live)
            && !request.force
        {
            return Err(Fault::invalid_field(
                format!(
                    "brick {} has an in-sync copy and is alive, or may be: the next client goes \
                     on with it, and copy {} may lack what was acknowledged last",
                    book.label(in_sync.brick),
                    request.copy
                ),
                "attach the volume as it is, try again once the brick is listed as dead, or use \
                 force, which gives these writes up",
            ));
        }
        let behind = legs.find(|leg| !is_up_to_date(leg.state));
        if let Some(leg) = behind.filter(|leg| !request.force && !leg.empty) {
            let (copy, state) = (request.copy, leg.state);
            return Err(Fault::invalid_field(
                format!(
                    "copy {copy} is {state} on brick {}: it lacks acknowledged writes",
                    book.label(leg.brick)
                ),
                "start the bricks of an in-sync copy, or use force, which loses these writes",
            ));
        }
        Ok(())
    }

    /// Refuses a change after which no living brick would have an in-sync copy. The layout calls a
    /// leg in-sync until a client notices that its brick is gone, so its state alone does not
    /// suffice.
    fn check_live_in_sync_leg(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
    ) -> Result<(), Fault> {
        let mut columns = record.layout_state.layout.columns();
        let is_living = |leg| in_sync_brick(book, leg).is_some_and(|brick| self.is_alive(brick));
        match columns.all(|column| column.legs.iter().any(is_living)) {
            true => Ok(()),
            false => Err(Fault::invalid_field(
                "no brick that is alive would have an in-sync copy of all of the volume",
                "start the bricks of another copy, or use force if they are only late",
            )),
        }
    }

    /// The record of a volume that no client has attached.
    fn detachable_record(
        &self,
        book: &ManagerState,
        name: &VolumeName,
        request: ChooseReplica,
    ) -> Result<VolumeRecord, Fault> {
        check_not_busy(book, name)?;
        let mut record = book.volume(name)?.clone();
        self.check_volume_unchanged(&record)?;
        let current = record.layout_state.layout.epoch;
        if let Some(expected) = request.expected.filter(|expected| *expected != current) {
            return Err(LayoutChangeError::Conflict { current, expected }.into());
        }
        if let Some(attachment) = record.attachment.take_if(|_| !request.force) {
            return Err(Fault::Attached {
                name: name.clone(),
                client: attachment.client,
            });
        }
        record.attachment = None;
        Ok(record)
    }

    fn replica_candidates(
        &self,
        book: &ManagerState,
        only: Option<&BrickRef>,
    ) -> Result<Vec<BrickCandidate>, Fault> {
        let mut candidates = self.candidates(book);
        if let Some(asked) = only {
            let brick = book.find_brick(asked)?.record.label();
            candidates.retain(|candidate| candidate.brick == brick.id);
            if candidates.is_empty() {
                return Err(Fault::BrickDead(brick));
            }
        }
        Ok(candidates)
    }

    /// The slices of one copy, with ids.
    fn replica_segments(
        &self,
        segments: &[Segment],
        bricks: &[BrickId],
        asynchronous: bool,
    ) -> Vec<Segment> {
        let mut bricks = bricks.iter();
        let column = |brick: &BrickId| Column {
            legs: vec![Leg {
                brick: *brick,
                slice: SliceId((self.settings.new_id)()),
                state: LegState::Stale,
                needs_full_resync: true,
                empty: true,
                asynchronous,
            }],
            lost_since: EpochNumber(0),
        };
        let copy = segments.iter().map(|segment| Segment {
            bytes: segment.bytes,
            columns: bricks
                .by_ref()
                .take(segment.columns.len())
                .map(column)
                .collect(),
        });
        copy.collect()
    }
}

fn promote_record(record: &mut VolumeRecord, copy: usize) -> Result<(), LayoutChangeError> {
    record.layout_state = record.layout_state.apply(&LayoutChange::Promote(copy))?;
    record.notes.clear();
    record.auto_promote &= async_replica(record).is_some();
    record.content_returns += 1;
    Ok(())
}

/// The asynchronous copy and its leg; such a volume has one column.
fn async_replica(record: &VolumeRecord) -> Option<(usize, &Leg)> {
    let mut columns = record.layout_state.layout.columns();
    let mut legs = columns.next()?.legs.iter().enumerate();
    legs.find(|(_, leg)| leg.asynchronous)
}

fn auto_promote_error() -> Fault {
    Fault::invalid_field(
        "only an asynchronous copy is promoted by the manager",
        "omit auto_promote: with a synchronous copy the next client continues without a promotion",
    )
}

/// The brick of a leg, if the leg is in-sync.
fn in_sync_brick<'b>(book: &'b ManagerState, leg: &Leg) -> Option<&'b BrickState> {
    let brick = book.bricks.get(&leg.brick)?;
    (leg.state == LegState::InSync).then_some(brick)
}

/// Refuses volumes with several columns: an asynchronous copy keeps the order of changes within one
/// column only.
fn check_async_allowed(volume: &VolumeRecord) -> Result<(), Fault> {
    let mut columns = volume.layout_state.layout.columns();
    let (Some(only), None) = (columns.next(), columns.next()) else {
        return Err(Fault::invalid_field(
            "an asynchronous copy is one of a volume with one column that has not grown",
            "attach a synchronous copy",
        ));
    };
    match only.legs.iter().any(|leg| leg.asynchronous) {
        true => Err(Fault::invalid_field(
            "the volume has an asynchronous copy already",
            "detach that one first, or attach a synchronous copy",
        )),
        false => Ok(()),
    }
}

/// The columns of a volume, in order.
fn column_requests(book: &ManagerState, volume: &VolumeRecord) -> Vec<ColumnRequest> {
    let segments = volume.layout_state.layout.segments.iter();
    let columns = segments.flat_map(|segment| {
        let bytes = segment.slice_bytes();
        segment.columns.iter().map(move |column| (bytes, column))
    });
    let domain = |leg: &Leg| {
        book.bricks
            .get(&leg.brick)
            .map(|it| it.record.domain.clone())
    };
    columns
        .map(|(bytes, column)| ColumnRequest {
            bytes: bytes.min(volume.files_bytes.unwrap_or(u64::MAX)),
            domains: column.legs.iter().filter_map(domain).collect(),
        })
        .collect()
}
