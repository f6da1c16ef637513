//! Volumes: create, show, grow, delete, attach, detach, and the states of their legs.
//!
//! The store lists a slice as a pending delete before the brick creates it. The transaction that
//! publishes the slice removes it from that list. After any failure in between, the sweep finds the
//! slice.

use crate::access::Role;
use crate::events::{EventDraft, leg_drafts};
use crate::fault::Fault;
use crate::figure_history::FigureSubject;
use crate::files::{check_files, set_address_space};
use crate::idempotency::{CallStart, CreateAnswer, RunningCall};
use crate::layout_state::{LayoutChange, LayoutState, LegTransition, is_up_to_date};
use crate::lists::volume_tag;
use crate::manager::{Manager, ManagerState, PENDING_DELETES_MAX, TrackedDelete, VOLUMES_MAX};
use crate::placement::{PlacedSegment, Placement, PlacementRequest, place};
use crate::records::{Attachment, LegNote, PendingDelete, VolumeRecord};
use crate::rollback_checks::check_no_rollback;
use crate::shape::Shape;
use crate::slices::{SliceLocation, promised_slices, slice_locations};
use crate::snapshot_drops::volume_removal_writes;
use crate::store::StoreWrite;
use crate::wire::{
    ChangeLegs, CreateVolume, DeleteReply, DeleteVolumeParams, DetachReply, DetachVolume,
    GrowVolume, LegChange, ReportReplication, VolumeContent, VolumeDetail, VolumeSizeReply,
};
use pagemesh_base::durability::Durability;
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, LEGS_MAX, Layout, Leg, LegState, SEGMENTS_MAX, Segment, SliceId,
    VolumeName,
};
use serde::Serialize;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Bytes of the longest label of a client.
pub const CLIENT_BYTES_MAX: usize = 128;
/// Bytes of the longest note on a leg.
pub const NOTE_BYTES_MAX: usize = 256;

impl Manager {
    /// Creates a volume: places it, creates its slices on their bricks, then publishes it. If a
    /// brick fails, the manager deletes the created slices.
    ///
    /// # Errors
    /// When the request is invalid, has no placement, or a brick fails.
    pub fn create(&self, request: &CreateVolume) -> Result<VolumeSizeReply, Fault> {
        self.create_keyed(request).map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the volume. A repetition of a call with an `Idempotency-Key`
    /// gets the first answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn create_keyed(
        &self,
        request: &CreateVolume,
    ) -> Result<CreateAnswer<VolumeSizeReply>, Fault> {
        let running = match self.begin_call(&("volumes", request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let shape = Shape::new(request.layout, request.columns, request.copies)?;
        let bytes = shape.fit(request.size_bytes)?;
        let files_bytes = match request.content {
            VolumeContent::Blocks => None,
            VolumeContent::Files => Some(check_files(shape, bytes)?),
        };
        let plan = {
            let mut book = self.state();
            check_name_free(&book, &request.name)?;
            let placement_request = PlacementRequest {
                shape,
                bytes,
                durability: request.durability,
                overprovision_factor: self.settings.overprovision_factor,
            };
            let mut placement = place(&self.candidates(&book), &placement_request)?;
            if files_bytes.is_some() {
                set_address_space(&mut placement, bytes)?;
            }
            let durability = placement.durability;
            let segments = self.assign_slice_ids(&placement);
            self.reserve_slices(&mut book, &request.name, durability, segments, files_bytes)?
        };
        self.create_slices(&plan.segments)?;
        let layout = Layout {
            volume: (self.settings.new_id)(),
            name: request.name.clone(),
            epoch: EpochNumber(1),
            segments: plan.segments.clone(),
        };
        let record = VolumeRecord {
            layout_state: LayoutState::new(layout),
            shape,
            durability: plan.durability,
            attachment: None,
            notes: vec![],
            created_unix_s: self.clock.unix_s(),
            files_bytes,
            auto_promote: false,
            tier: request.tier,
            origin: None,
            received: request.received.then_some(EpochNumber(0)),
            rollback: None,
            content_returns: 0,
            labels: BTreeMap::new(),
        };
        let created = EventDraft::volume_created(&request.name, &self.actor(), bytes);
        let reply = |volume| size_reply(volume, request.size_bytes, bytes);
        let running = running.as_ref();
        self.publish(&plan.segments, running, |_| Ok((record, created)), reply)
    }

    /// Grows a volume by a segment of the same shape, attached or not. For files it raises the
    /// limit of all files together.
    ///
    /// # Errors
    /// The same as for creating; also when the new size is not larger.
    pub fn grow(&self, name: &VolumeName, request: GrowVolume) -> Result<VolumeSizeReply, Fault> {
        let (plan, size) = {
            let mut book = self.state();
            let volume = book.volume(name)?;
            check_not_busy(&book, name)?;
            self.check_volume_unchanged(volume)?;
            if volume.files_bytes.is_some() {
                return self.grow_files(&mut book, name, request.size_bytes);
            }
            let layout = &volume.layout_state.layout;
            let has_replica = |column: &Column| column.legs.iter().any(|leg| leg.asynchronous);
            if layout.columns().any(has_replica) {
                return Err(Fault::invalid_field(
                    format!("the volume {name} has an asynchronous copy, which needs one column"),
                    "detach that copy, grow the volume, and attach a synchronous one",
                ));
            }
            let (shape, now) = (volume.shape, layout.size_bytes());
            let more = bytes_to_add(now, request.size_bytes)?;
            let bytes = shape.fit(more)?;
            let size = check_total_size(now, bytes)?;
            let request = PlacementRequest {
                shape,
                bytes,
                durability: Some(volume.durability),
                overprovision_factor: self.settings.overprovision_factor,
            };
            // Refuse before the manager calls bricks.
            let segments = layout.segments.len();
            let placement = place(&self.candidates(&book), &request)?;
            if segments + placement.segments.len() > SEGMENTS_MAX {
                return Err(crate::layout_state::LayoutChangeError::TooManySegments.into());
            }
            let durability = placement.durability;
            let segments = self.assign_slice_ids(&placement);
            let plan = self.reserve_slices(&mut book, name, durability, segments, None)?;
            (plan, size)
        };
        self.create_slices(&plan.segments)?;
        let change = LayoutChange::Grow(plan.segments.clone());
        let record = |book: &ManagerState| {
            let mut record = book.volume(name)?.clone();
            record.layout_state = record.layout_state.apply(&change)?;
            Ok((record, EventDraft::volume_grown(name, &self.actor(), size)))
        };
        let reply = |volume| size_reply(volume, request.size_bytes, size);
        let grown = self.publish(&plan.segments, None, record, reply);
        grown.map(|answer| answer.reply)
    }

    /// The details of a volume.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn show(&self, name: &VolumeName) -> Result<VolumeDetail, Fault> {
        let book = self.state();
        Ok(self.volume_detail(&book, book.volume(name)?))
    }

    /// Deletes a volume. The sweep retries slices that cannot be deleted at once.
    ///
    /// # Errors
    /// When a client has attached it and `force` is not set, or the store fails.
    pub fn delete(&self, name: &VolumeName, force: bool) -> Result<DeleteReply, Fault> {
        let snapshots = false;
        self.delete_with(name, DeleteVolumeParams { force, snapshots })
    }

    /// The same, and its snapshots with it if the parameters say so.
    ///
    /// # Errors
    /// The same; also when it has snapshots that should stay, or that holds keep.
    pub fn delete_with(
        &self,
        name: &VolumeName,
        DeleteVolumeParams { force, snapshots }: DeleteVolumeParams,
    ) -> Result<DeleteReply, Fault> {
        let pending: Vec<PendingDelete> = {
            let mut book = self.state();
            let volume = book.volume(name)?;
            check_not_busy(&book, name)?;
            self.check_volume_unchanged(volume)?;
            if !force {
                check_no_rollback(volume)?;
            }
            if let Some(attachment) = volume.attachment.as_ref().filter(|_| !force) {
                return Err(Fault::Attached {
                    name: name.clone(),
                    client: attachment.client.clone(),
                });
            }
            let snapshots = Manager::snapshots_of_deleted(&book, name, snapshots)?;
            let doom = |place: SliceLocation| PendingDelete {
                brick: place.brick,
                slice: place.slice,
                uncertain: false,
            };
            let pending: Vec<PendingDelete> = slice_locations(&volume.layout_state.layout.segments)
                .map(doom)
                .collect();
            let mut writes: Vec<_> = pending
                .iter()
                .map(|&pending| StoreWrite::AddPendingDelete(pending))
                .collect();
            writes.push(StoreWrite::RemoveVolume(name));
            writes.extend(volume_removal_writes(&book, name, &snapshots));
            let client = volume.attachment.as_ref().map(|it| it.client.as_str());
            let deleted = EventDraft::volume_deleted(name, &self.actor(), client);
            self.commit(&mut book, &writes, vec![deleted])?;
            Manager::add_pending_deletes(&mut book, &pending);
            self.remove_volume(&mut book, name);
            book.snapshots.remove_volume(name);
            book.replication_reports.remove(name);
            book.holders.remove(name);
            self.figures.remove(&FigureSubject::Volume(name.clone()));
            self.nfs_exports.remove(name);
            pending
        };
        self.delete_slices(&pending);
        let book = self.state();
        let left = |it: &&PendingDelete| book.pending_deletes.contains_key(&(it.brick, it.slice));
        Ok(DeleteReply {
            pending_deletions: pending.iter().filter(left).count(),
        })
    }

    /// Takes the report of the attached client about asynchronous and resyncing copies, and returns
    /// the details of the volume.
    ///
    /// # Errors
    /// When there is no such volume, another client has attached it, the report names a copy
    /// twice or one that does not exist, or the store fails.
    pub fn report_replication(
        &self,
        name: &VolumeName,
        mut report: ReportReplication,
    ) -> Result<VolumeDetail, Fault> {
        let mut book = self.state();
        let record = book.volume(name)?.clone();
        check_attachment(name, &record, Some(report.attachment))?;
        let mut copies: Vec<usize> = report.resyncs.iter().map(|it| it.copy).collect();
        copies.sort_unstable();
        copies.dedup();
        let known = |copy: &usize| *copy < LEGS_MAX;
        if copies.len() != report.resyncs.len() || !copies.iter().all(known) {
            return Err(Fault::invalid_field(
                "a copy is reported twice, or its number is too large",
                "report each resyncing copy once",
            ));
        }
        let replicated = std::mem::take(&mut report.replica_snapshots);
        self.record_replica_snapshots(&mut book, &record, &replicated)?;
        let now = self.clock.elapsed();
        book.replication_reports.insert(name.clone(), (now, report));
        Ok(self.volume_detail(&book, &record))
    }

    /// Ends an attachment. The layout and its epoch stay.
    ///
    /// # Errors
    /// When there is no such volume, or the store fails.
    pub fn detach(&self, name: &VolumeName, request: DetachVolume) -> Result<DetachReply, Fault> {
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        let meant =
            |present: &mut Attachment| request.attachment.is_none_or(|a| a == present.epoch);
        let ended = record.attachment.take_if(meant);
        if let Some(Attachment { client, .. }) = &ended {
            // A client names its own attachment with the cluster key. Others name one to end no later
            // attachment, as the console does.
            let is_own = request.attachment.is_some() && self.call.role == Role::Cluster;
            let actor = if is_own { client.clone() } else { self.actor() };
            let detached = EventDraft::detached(name, client, &actor);
            self.commit_volume(&mut book, &record, vec![detached])?;
        }
        Ok(DetachReply {
            detached: ended.is_some(),
        })
    }

    /// Compare-and-swap of leg states.
    ///
    /// # Errors
    /// When the attachment is over, the layout has another epoch, or the change is illegal.
    pub fn change_legs(&self, name: &VolumeName, request: &ChangeLegs) -> Result<Layout, Fault> {
        for change in &request.changes {
            if let Some(note) = &change.note {
                check_text("a note", note, NOTE_BYTES_MAX)?;
            }
        }
        self.adopt_on_returning(name, request);
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        check_attachment(name, &record, request.attachment)?;
        let turn = |change: &LegChange| LegTransition {
            segment: change.segment,
            column: change.column,
            leg: change.leg,
            to: change.to,
        };
        let change = LayoutChange::Legs {
            expected: request.expected,
            transitions: request.changes.iter().map(turn).collect(),
        };
        let next = record.layout_state.apply(&change)?;
        let client = record
            .attachment
            .as_ref()
            .filter(|_| request.attachment.is_some());
        let actor = client.map_or_else(|| self.actor(), |it| it.client.clone());
        let (changes, layout) = (&request.changes, &record.layout_state.layout);
        let drafts = leg_drafts(layout, changes, &actor, |brick| book.label(brick));
        record.layout_state = next;
        for change in &request.changes {
            self.update_note(&mut record, change);
        }
        self.commit_volume(&mut book, &record, drafts)?;
        Ok(record.layout_state.layout)
    }

    fn update_note(&self, record: &mut VolumeRecord, change: &LegChange) {
        let place = (change.segment, change.column, change.leg);
        let is_other = |note: &LegNote| (note.segment, note.column, note.leg) != place;
        if is_up_to_date(change.to) || change.note.is_some() {
            record.notes.retain(is_other);
        }
        if let Some(text) = change.note.as_ref().filter(|_| !is_up_to_date(change.to)) {
            record.notes.push(LegNote {
                segment: change.segment,
                column: change.column,
                leg: change.leg,
                text: text.clone(),
                since_unix_s: self.clock.unix_s(),
            });
        }
    }

    pub(crate) fn commit_volume(
        &self,
        book: &mut ManagerState,
        record: &VolumeRecord,
        drafts: Vec<EventDraft>,
    ) -> Result<(), Fault> {
        self.commit(book, &[StoreWrite::PutVolume(record)], drafts)?;
        self.put_volume(book, record.clone());
        Ok(())
    }

    fn assign_slice_ids(&self, placement: &Placement) -> Vec<Segment> {
        let placed = placement.segments.iter();
        placed
            .map(|placed| to_segment(placed, self.settings.new_id))
            .collect()
    }

    /// Stores the slices of a placement as pending deletes.
    pub(crate) fn reserve_slices<'a>(
        &'a self,
        book: &mut ManagerState,
        name: &VolumeName,
        durability: Durability,
        segments: Vec<Segment>,
        files_bytes: Option<u64>,
    ) -> Result<SliceReservation<'a>, Fault> {
        let places: Vec<SliceLocation> = promised_slices(&segments, files_bytes).collect();
        let doom = |place: &SliceLocation| PendingDelete {
            brick: place.brick,
            slice: place.slice,
            uncertain: true,
        };
        let pending: Vec<PendingDelete> = places.iter().map(doom).collect();
        if book.pending_deletes.len() + pending.len() > PENDING_DELETES_MAX {
            return Err(Fault::TooMany {
                what: "slices to delete",
                most: PENDING_DELETES_MAX,
            });
        }
        let writes: Vec<_> = pending
            .iter()
            .map(|&pending| StoreWrite::AddPendingDelete(pending))
            .collect();
        self.store.commit(&writes)?;
        Manager::add_pending_deletes(book, &pending);
        book.creating.insert(name.clone(), places);
        Ok(SliceReservation {
            manager: self,
            name: name.clone(),
            durability,
            segments,
        })
    }

    pub(crate) fn add_pending_deletes(book: &mut ManagerState, pending: &[PendingDelete]) {
        let doom =
            |&record: &PendingDelete| ((record.brick, record.slice), TrackedDelete::new(record));
        book.pending_deletes.extend(pending.iter().map(doom));
    }

    /// Publishes a volume with its slices, its event and the answer of a running call with a key in
    /// one transaction. `record` runs under the lock, because clients may have changed the volume since
    /// the placement.
    pub(crate) fn publish<T: Serialize>(
        &self,
        built: &[Segment],
        running: Option<&RunningCall<'_>>,
        record: impl FnOnce(&ManagerState) -> Result<(VolumeRecord, EventDraft), Fault>,
        reply: impl FnOnce(VolumeDetail) -> T,
    ) -> Result<CreateAnswer<T>, Fault> {
        let mut book = self.state();
        let (record, event) = record(&book)?;
        let detail = self.volume_detail(&book, &record);
        let etag = detail.etag(volume_tag(&record));
        let reply = reply(detail);
        let kept = self.plan_answer(&book, running, &etag, &reply);
        let mut writes: Vec<_> = slice_locations(built)
            .map(|place| StoreWrite::RemovePendingDelete(place.brick, place.slice))
            .collect();
        writes.push(StoreWrite::PutVolume(&record));
        writes.extend(kept.writes());
        self.commit(&mut book, &writes, vec![event])?;
        self.apply_key_change(&mut book, &kept);
        for place in slice_locations(built) {
            book.pending_deletes.remove(&(place.brick, place.slice));
        }
        self.put_volume(&mut book, record);
        Ok(CreateAnswer { reply, etag })
    }
}

/// A placement with ids. While it exists, the sweep skips its slices, and no other call creates,
/// grows or deletes the volume.
pub(crate) struct SliceReservation<'a> {
    manager: &'a Manager,
    name: VolumeName,
    durability: Durability,
    pub segments: Vec<Segment>,
}

impl Drop for SliceReservation<'_> {
    fn drop(&mut self) {
        let reserved = self.manager.state().creating.remove(&self.name);
        self.manager.mark_bricks_of(reserved.iter().flatten());
    }
}

fn to_segment(placed: &PlacedSegment, new_id: fn() -> Uuid) -> Segment {
    let leg = |brick: &BrickId| Leg {
        brick: *brick,
        slice: SliceId(new_id()),
        state: LegState::InSync,
        needs_full_resync: false,
        empty: false,
        asynchronous: false,
    };
    let column = |bricks: &Vec<BrickId>| Column {
        legs: bricks.iter().map(leg).collect(),
        lost_since: EpochNumber(0),
    };
    Segment {
        bytes: placed.bytes,
        columns: placed.columns.iter().map(column).collect(),
    }
}

pub(crate) fn check_name_free(book: &ManagerState, name: &VolumeName) -> Result<(), Fault> {
    if book.volumes.contains_key(name) {
        return Err(Fault::VolumeExists(name.clone()));
    }
    check_not_busy(book, name)?;
    if book.volumes.len() + book.creating.len() >= VOLUMES_MAX {
        return Err(Fault::TooMany {
            what: "volumes",
            most: VOLUMES_MAX,
        });
    }
    Ok(())
}

pub(crate) fn check_not_busy(book: &ManagerState, name: &VolumeName) -> Result<(), Fault> {
    if book.creating.contains_key(name) {
        return Err(Fault::VolumeBusy(name.clone()));
    }
    Ok(())
}

pub(crate) fn check_attachment(
    name: &VolumeName,
    record: &VolumeRecord,
    asked: Option<EpochNumber>,
) -> Result<(), Fault> {
    let present = record.attachment.as_ref();
    match asked {
        Some(asked) if present.is_none_or(|present| present.epoch != asked) => Err(Fault::Fenced {
            name: name.clone(),
            asked: asked.0,
            client: present.map(|present| present.client.clone()),
        }),
        _ => Ok(()),
    }
}

pub(crate) fn bytes_to_add(now: u64, wanted: u64) -> Result<u64, Fault> {
    match wanted.checked_sub(now) {
        None | Some(0) => Err(Fault::invalid_field(
            format!("the volume has {now} bytes already; {wanted} bytes would not be more"),
            "name a larger size; volumes do not shrink",
        )),
        Some(more) => Ok(more),
    }
}

/// The size after growing, which must be valid, too.
fn check_total_size(now: u64, more: u64) -> Result<u64, Fault> {
    let most = crate::shape::VOLUME_BYTES_MAX;
    let size = now.checked_add(more).filter(|&size| size <= most);
    let too_large = crate::shape::ShapeError::TooLarge {
        asked: now.saturating_add(more),
        what: "a volume",
        most,
    };
    size.ok_or_else(|| too_large.into())
}

pub(crate) fn check_text(what: &str, text: &str, most: usize) -> Result<(), Fault> {
    if text.is_empty() || text.len() > most || text.chars().any(char::is_control) {
        return Err(Fault::invalid_field(
            format!("{what} must have 1 to {most} bytes and no control characters"),
            "shorten it, or leave such characters out",
        ));
    }
    Ok(())
}

pub(crate) fn size_reply(volume: VolumeDetail, asked: u64, got: u64) -> VolumeSizeReply {
    let rounded = got != asked;
    let note = format!("rounded up from {asked} to {got} bytes, to whole stripes");
    VolumeSizeReply {
        volume,
        asked_bytes: asked,
        rounded,
        note: rounded.then_some(note),
    }
}
