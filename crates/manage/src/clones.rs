//! Clones: volumes that begin with the contents of a snapshot of another volume, and share its pages.
//!
//! A clone lies on the bricks of its origin: each leg with all of the snapshot makes a slice that shares its pages. A leg
//! without the snapshot gets an empty slice, which the first client of the clone resyncs.
//!
//! Invariants: the epoch of a clone begins at that of the snapshot, so its own changes are never older. The record of a
//! clone keeps its snapshot from being deleted; until the record is there, the bricks do.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::layout_state::LayoutState;
use crate::manager::{Manager, ManagerState};
use crate::records::{CloneOrigin, VolumeRecord};
use crate::slices::slice_locations;
use crate::snapshot_drops::check_no_clone;
use crate::snapshot_lists::{live_snapshot, no_such_snapshot};
use crate::snapshots::{SnapshotFault, SnapshotName, SnapshotRecord};
use crate::volumes::{check_name_free, check_not_busy, size_reply};
use crate::wire::{CloneProgressReply, CreateClone, VolumeSizeReply};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{
    Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId, VolumeName,
};
use pagemesh_base::slice::{CloneProgress, CloneSource};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The time of one call that promotes a clone. The caller repeats it.
const PROMOTE_CALL_TIME: Duration = Duration::from_secs(2);

/// The slices of a clone, and the sources of those that share pages.
struct CloneSlices {
    segments: Vec<Segment>,
    sources: BTreeMap<SliceId, CloneSource>,
}

impl Manager {
    /// Clones a snapshot.
    ///
    /// # Errors
    /// When there is no such snapshot, the name is taken, or a brick fails; then no clone is left.
    pub fn create_clone(
        &self,
        volume: &VolumeName,
        snapshot: &SnapshotName,
        request: &CreateClone,
    ) -> Result<VolumeSizeReply, Fault> {
        let created = self.create_clone_keyed(volume, snapshot, request);
        created.map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the clone. A repetition of a call with an `Idempotency-Key` gets the first answer
    /// again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn create_clone_keyed(
        &self,
        volume: &VolumeName,
        snapshot: &SnapshotName,
        request: &CreateClone,
    ) -> Result<CreateAnswer<VolumeSizeReply>, Fault> {
        let running = match self.begin_call(&("clone", volume, snapshot, request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let (plan, origin, record, sources) = {
            let mut book = self.state();
            check_not_busy(&book, volume)?;
            let found = live_snapshot(&book, volume, snapshot)?.clone();
            let record = book.volume(volume)?.clone();
            check_name_free(&book, &request.name)?;
            let CloneSlices { segments, sources } = self.clone_slices(&book, &record, &found)?;
            let (durability, files) = (record.durability, record.files_bytes);
            let plan =
                self.reserve_slices(&mut book, &request.name, durability, segments, files)?;
            (plan, found, record, sources)
        };
        self.create_slices_from(&plan.segments, &sources)?;
        let layout = Layout {
            volume: (self.settings.new_id)(),
            name: request.name.clone(),
            epoch: origin.epoch,
            segments: plan.segments.clone(),
        };
        let bytes = layout.size_bytes();
        let copies = layout.columns().map(|column| column.legs.len()).max();
        let shape = record.shape.with_copies(copies.unwrap_or(1))?;
        let clone = VolumeRecord {
            layout_state: LayoutState::new(layout),
            shape,
            attachment: None,
            notes: vec![],
            created_unix_s: self.clock.unix_s(),
            auto_promote: false,
            received: None,
            rollback: None,
            // Schedules of the origin are not for it.
            content_returns: 0,
            labels: BTreeMap::new(),
            origin: Some(CloneOrigin {
                volume: volume.clone(),
                snapshot: snapshot.clone(),
                epoch: origin.epoch,
            }),
            ..record
        };
        let created =
            EventDraft::volume_cloned(&request.name, &self.actor(), (volume, snapshot), bytes);
        let publish = |book: &ManagerState| {
            // It may have been deleted meanwhile, and another one have its name.
            let present = live_snapshot(book, volume, snapshot)?;
            match present.epoch == origin.epoch {
                true => Ok((clone, created)),
                false => Err(no_such_snapshot(volume, snapshot)),
            }
        };
        let reply = |volume| size_reply(volume, bytes, bytes);
        self.publish(&plan.segments, running.as_ref(), publish, reply)
    }

    /// Lets bricks copy the pages that a clone shares, for a bounded time. The caller repeats the call until nothing is left
    /// to do; then the clone depends on nothing. Clients may use it meanwhile.
    ///
    /// # Errors
    /// When there is no such volume, it is no clone, it has clones itself, or a brick fails.
    pub fn promote_clone(&self, name: &VolumeName) -> Result<CloneProgressReply, Fault> {
        let (segments, origin) = {
            let book = self.state();
            check_not_busy(&book, name)?;
            let record = book.volume(name)?;
            let origin = record.origin.clone().ok_or_else(|| {
                Fault::invalid_field(
                    format!("the volume {name} is no clone"),
                    "see the origins of volumes with: pagemesh clone list",
                )
            })?;
            let of = book.snapshots.of(name).into_iter();
            for snapshot in of.flat_map(|of| of.live()) {
                check_no_clone(&book, name, snapshot)?;
            }
            (record.layout_state.layout.segments.clone(), origin)
        };
        let begin = Instant::now();
        let mut total = CloneProgress { done: 0, all: 0 };
        let mut controls = self.brick_connections();
        for place in slice_locations(&segments) {
            let mut step = || controls.get(place.brick)?.promote_clone(place.slice);
            let mut progress = step().map_err(|cause| self.brick_fault(place.brick, cause))?;
            while !progress.is_complete() && begin.elapsed() < PROMOTE_CALL_TIME {
                progress = step().map_err(|cause| self.brick_fault(place.brick, cause))?;
            }
            total.done += progress.done;
            total.all += progress.all;
        }
        if total.is_complete() {
            self.forget_origin(name, &origin)?;
        }
        Ok(CloneProgressReply {
            name: name.clone(),
            done: total.done,
            all: total.all,
        })
    }

    fn forget_origin(&self, name: &VolumeName, origin: &CloneOrigin) -> Result<(), Fault> {
        let mut book = self.state();
        let mut record = book.volume(name)?.clone();
        if record.origin.as_ref() != Some(origin) {
            return Ok(());
        }
        record.origin = None;
        let draft = EventDraft::clone_promoted(name, &self.actor(), origin);
        self.commit_volume(&mut book, &record, vec![draft])
    }

    /// The slices of a clone: one for each leg that the origin has now, over the columns of the snapshot.
    fn clone_slices(
        &self,
        book: &ManagerState,
        volume: &VolumeRecord,
        snapshot: &SnapshotRecord,
    ) -> Result<CloneSlices, Fault> {
        let name = &volume.layout_state.layout.name;
        let no_such = || no_such_snapshot(name, &snapshot.name);
        let of = book.snapshots.of(name).ok_or_else(no_such)?;
        let cut = of.layout(snapshot).ok_or_else(no_such)?;
        let mut sources = BTreeMap::new();
        let present = &volume.layout_state.layout.segments;
        let mut segments = Vec::new();
        for (segment, then) in present.iter().zip(&cut.segments) {
            let columns = segment.columns.iter().zip(&then.columns);
            let columns = columns.map(|(column, then)| {
                let legs = column.legs.iter().filter(|leg| !leg.asynchronous);
                let legs: Vec<Leg> = legs
                    .map(|leg| self.clone_leg(leg, then, snapshot, &mut sources))
                    .collect();
                match legs.iter().any(|leg| leg.state == LegState::InSync) {
                    true => Ok(Column {
                        legs,
                        lost_since: EpochNumber(0),
                    }),
                    false => Err(Fault::from(SnapshotFault::NoCopy {
                        volume: name.clone(),
                        name: snapshot.name.clone(),
                    })),
                }
            });
            segments.push(Segment {
                bytes: segment.bytes,
                columns: columns.collect::<Result<_, _>>()?,
            });
        }
        Ok(CloneSlices { segments, sources })
    }

    fn clone_leg(
        &self,
        leg: &Leg,
        cut: &Column,
        snapshot: &SnapshotRecord,
        sources: &mut BTreeMap<SliceId, CloneSource>,
    ) -> Leg {
        let slice = SliceId((self.settings.new_id)());
        let mut took_part = cut.legs.iter().filter(|it| it.state == LegState::InSync);
        let has_all =
            snapshot.copies.contains(&leg.slice) || took_part.any(|it| it.slice == leg.slice);
        if has_all {
            let source = CloneSource {
                origin: leg.slice,
                snapshot: Epoch(snapshot.epoch.0),
            };
            sources.insert(slice, source);
        }
        Leg {
            brick: leg.brick,
            slice,
            state: match has_all {
                true => LegState::InSync,
                false => LegState::Stale,
            },
            needs_full_resync: !has_all,
            empty: !has_all,
            asynchronous: false,
        }
    }
}
