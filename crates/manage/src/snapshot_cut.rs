//! Making snapshots: an epoch is reserved, the cut is carried out, and the record is committed.
//!
//! The client that has attached a volume cuts it on order. The manager itself prepares the legs of a volume that no
//! client has attached. A change of the layout or of the attachment during the cut makes it void, and the next attempt
//! takes another epoch.

mod steps;

pub use steps::SnapshotCut;

use crate::call::{RecordTag, etag_text};
use crate::events::EventDraft;
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer, RunningCall};
use crate::manager::{Manager, ManagerState};
use crate::received::check_receiver_snapshot;
use crate::records::{Attachment, VolumeRecord};
use crate::rollbacks::check_snapshot_allowed;
use crate::slices::slice_locations;
use crate::snapshot_lists::snapshot_info;
use crate::snapshots::{
    CUT_ATTEMPTS_MAX, CutOutcome, GROUP_MAX, PollState, SNAPSHOTS_MAX, SnapshotFault,
    SnapshotLayout, SnapshotName, SnapshotRecord, SnapshotState, VOLUME_SNAPSHOTS_MAX,
};
use crate::store::StoreWrite;
use crate::volumes::{check_attachment, check_not_busy, check_text};
use crate::wire::{
    AnswerCut, CreateSnapshot, CreateSnapshots, CreatedSnapshots, CutResult, SnapshotInfo,
};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, EpochNumber, SliceId, VolumeName};
use pagemesh_base::slice::SliceError;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Labels of one snapshot.
const LABELS_MAX: usize = 8;
/// Bytes of the longest label.
const LABEL_BYTES_MAX: usize = 128;
/// Bytes of a client's error that are kept.
const REASON_BYTES_MAX: usize = 512;

/// A snapshot that is being made. Unless it is committed, the bricks drop it.
pub(crate) struct Reservation<'a> {
    manager: &'a Manager,
    pub(crate) volume: VolumeName,
    pub(crate) epoch: EpochNumber,
    layout_epoch: EpochNumber,
    pub(crate) attachment: Option<Attachment>,
    /// The legs that the manager prepares itself.
    legs: Vec<(BrickId, SliceId)>,
    /// Whether a brick or a client may have seen the epoch.
    pub(crate) is_known: bool,
    /// Whether no request to prepare it is on its way any more.
    pub(crate) is_certain: bool,
    /// Whether the client may let an asynchronous replica prepare it, and does not wait for the answer.
    has_replica: bool,
    is_committed: bool,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.is_committed {
            self.manager.abandon(self);
        }
    }
}

/// The end of one attempt that did not fail.
pub(crate) enum Attempt {
    Done,
    /// The volume changed meanwhile, so that the cut is void.
    Void(String),
}

impl Manager {
    /// Makes a snapshot of a volume.
    ///
    /// # Errors
    /// When the name is taken, a limit is reached, or the volume cannot be cut; then no snapshot is left.
    pub fn create_snapshot(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
    ) -> Result<SnapshotInfo, Fault> {
        let created = self.create_snapshot_keyed(volume, request);
        created.map(|answer| answer.reply)
    }

    /// The same, with the entity tag of the snapshot. A repetition of a call with an `Idempotency-Key` gets the first
    /// answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn create_snapshot_keyed(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
    ) -> Result<CreateAnswer<SnapshotInfo>, Fault> {
        let running = match self.begin_call(&("snapshot", volume, request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let volumes = std::slice::from_ref(volume);
        self.create_all(volumes, request, running.as_ref(), |mut all, _| {
            all.remove(0)
        })
    }

    /// Makes snapshots of several volumes at one moment: all or none.
    ///
    /// # Errors
    /// The same as for one.
    pub fn create_snapshots_keyed(
        &self,
        request: &CreateSnapshots,
    ) -> Result<CreateAnswer<CreatedSnapshots>, Fault> {
        let running = match self.begin_call(&("snapshots", request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let volumes: BTreeSet<_> = request.volumes.iter().collect();
        if volumes.len() != request.volumes.len() || !(1..=GROUP_MAX).contains(&volumes.len()) {
            return Err(Fault::invalid_field(
                format!("a call names 1 to {GROUP_MAX} volumes, each once"),
                "make the snapshots in several calls",
            ));
        }
        let each = CreateSnapshot {
            name: request.name.clone(),
            labels: request.labels.clone(),
        };
        let reply = |snapshots, held: Option<Duration>| CreatedSnapshots {
            snapshots,
            consistent: true,
            held_us: held.map(|held| held.as_micros() as u64),
        };
        self.create_all(&request.volumes, &each, running.as_ref(), reply)
    }

    fn create_all<T: Serialize>(
        &self,
        volumes: &[VolumeName],
        request: &CreateSnapshot,
        running: Option<&RunningCall<'_>>,
        reply: impl FnOnce(Vec<SnapshotInfo>, Option<Duration>) -> T,
    ) -> Result<CreateAnswer<T>, Fault> {
        check_labels(&request.labels)?;
        let until = Instant::now() + self.settings.cut.call;
        let made = match volumes {
            [volume] => match self.cut(volume, request, until) {
                Ok(cut) => Ok((vec![cut], None)),
                Err(fault) => Err(Box::new((volume.clone(), fault))),
            },
            _ => self.cut_group(volumes, request, until),
        };
        match made {
            Ok((mut cuts, held)) => self.commit_cuts(&mut cuts, running, |all| reply(all, held)),
            Err(failed) => {
                let (volume, fault) = *failed;
                self.report_failed_cut(&volume, &request.name, &fault);
                Err(fault)
            }
        }
    }

    /// Cuts a volume. The snapshot is not committed yet.
    fn cut(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
        until: Instant,
    ) -> Result<Reservation<'_>, Fault> {
        let (mut cause, mut attempts) = (String::new(), 0);
        while attempts == 0 || attempts < CUT_ATTEMPTS_MAX && Instant::now() < until {
            attempts += 1;
            let mut cut = self.reserve(volume, request)?;
            let fetch_until = Instant::now() + self.settings.cut.fetch;
            cause = match self.attempt(&mut cut, fetch_until, until)? {
                Attempt::Done => return Ok(cut),
                Attempt::Void(cause) => cause,
            };
        }
        let fault = SnapshotFault::Unsteady {
            volume: volume.clone(),
            attempts,
            cause,
        };
        Err(fault.into())
    }

    /// Carries a cut out with the client that has attached the volume, or without one.
    fn attempt(
        &self,
        cut: &mut Reservation<'_>,
        fetch_until: Instant,
        until: Instant,
    ) -> Result<Attempt, Fault> {
        let attempt = match cut.attachment.clone() {
            Some(attachment) => match self.place_order(cut, &attachment) {
                Some(change) => Attempt::Void(change),
                None => self.await_order(cut, attachment.client, fetch_until, until)?,
            },
            None => self.prepare_legs(cut)?,
        };
        Ok(self.check_attempt(cut, attempt))
    }

    /// A change of the volume voids a cut that was done.
    fn check_attempt(&self, cut: &Reservation<'_>, attempt: Attempt) -> Attempt {
        let is_checked = !defect::is(Defect::CutOfChangedLayoutTaken);
        match (attempt, change_since(&self.state(), cut)) {
            (Attempt::Done, Some(change)) if is_checked => Attempt::Void(change),
            (attempt, _) => attempt,
        }
    }

    /// Reserves an epoch, and stores the record of the snapshot with it.
    pub(crate) fn reserve(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
    ) -> Result<Reservation<'_>, Fault> {
        let mut book = self.state();
        check_not_busy(&book, volume)?;
        let mut record = book.volume(volume)?.clone();
        check_room(&book, volume, &request.name)?;
        check_snapshot_allowed(&record, &request.name)?;
        let attachment = record.attachment.clone();
        check_receiver_snapshot(&record, &request.labels)?;
        record.layout_state = record.layout_state.reserve_epoch()?;
        let epoch = record.layout_state.reserved;
        let layout = self.snapshot_layout(&book, &record, epoch);
        let legs: Vec<_> = slice_locations(&layout.segments)
            .map(|it| (it.brick, it.slice))
            .collect();
        if attachment.is_none() {
            self.check_bricks_alive(&book, &legs)?;
        }
        let snapshot = SnapshotRecord {
            volume: layout.volume,
            name: request.name.clone(),
            epoch,
            created_unix_ms: self.clock.unix_ms(),
            state: SnapshotState::Preparing,
            layout: layout.first,
            made_by: self.actor(),
            holds: vec![],
            labels: request.labels.clone(),
            uncertain: true,
            copies: vec![],
            replica_copies: vec![],
        };
        let mut writes = vec![
            StoreWrite::PutVolume(&record),
            StoreWrite::PutSnapshot(&snapshot),
        ];
        if layout.first == epoch {
            writes.push(StoreWrite::PutSnapshotLayout(&layout));
        }
        self.commit(&mut book, &writes, vec![])?;
        let layout_epoch = record.layout_state.layout.epoch;
        let has_replica = attachment.is_some() && has_async_leg(&record);
        self.put_volume(&mut book, record);
        book.snapshots.put_layout(volume, layout);
        book.snapshots.put(volume, snapshot, self.clock.elapsed());
        Ok(Reservation {
            manager: self,
            volume: volume.clone(),
            epoch,
            layout_epoch,
            attachment,
            legs,
            is_known: false,
            is_certain: true,
            has_replica,
            is_committed: false,
        })
    }

    /// The layout of a snapshot that is made now: that of the snapshot before, if it is the same.
    fn snapshot_layout(
        &self,
        book: &ManagerState,
        record: &VolumeRecord,
        epoch: EpochNumber,
    ) -> Arc<SnapshotLayout> {
        let layout = &record.layout_state.layout;
        let size_bytes = record.files_bytes.unwrap_or(layout.size_bytes());
        let new = SnapshotLayout::new(layout, size_bytes, epoch, record.attachment.is_some());
        let last = book.snapshots.of(&layout.name);
        let last = last.and_then(|of| of.last_layout());
        match last.filter(|last| last.is_like(&new)) {
            Some(last) => Arc::clone(last),
            None => Arc::new(new),
        }
    }

    fn check_bricks_alive(
        &self,
        book: &ManagerState,
        legs: &[(BrickId, SliceId)],
    ) -> Result<(), Fault> {
        let is_alive = |brick: &BrickId| {
            let brick = book.bricks.get(brick);
            brick.is_some_and(|brick| self.is_alive(brick))
        };
        match legs.iter().find(|(brick, _)| !is_alive(brick)) {
            Some((brick, _)) => Err(Fault::BrickDead(book.label(*brick))),
            None => Ok(()),
        }
    }

    /// Orders a cut from the client that has attached the volume. Returns the change of the volume that prevents it.
    fn place_order(&self, cut: &Reservation<'_>, attachment: &Attachment) -> Option<String> {
        // Under the lock no other client attaches: an order goes to the present client, and none takes the place of
        // its poll.
        let book = self.state();
        let change = change_since(&book, cut);
        if change.is_none() {
            self.cut_orders
                .place(&cut.volume, attachment.epoch, cut.epoch);
        }
        change
    }

    /// Waits for the answer of a client to an order, and removes the order.
    fn await_order(
        &self,
        cut: &mut Reservation<'_>,
        client: String,
        fetch_until: Instant,
        until: Instant,
    ) -> Result<Attempt, Fault> {
        let volume = cut.volume.clone();
        let outcome = self.cut_orders.wait(&volume, cut.epoch, fetch_until, until);
        cut.is_known = !matches!(outcome, CutOutcome::NotFetched);
        cut.is_certain = matches!(outcome, CutOutcome::NotFetched | CutOutcome::Answered(_));
        let fault = match outcome {
            CutOutcome::Answered(CutResult::Done | CutResult::Released(_)) => {
                return Ok(Attempt::Done);
            }
            CutOutcome::Answered(CutResult::LayoutChanged(cause)) => {
                return Ok(Attempt::Void(cause));
            }
            CutOutcome::Ended => {
                return Ok(Attempt::Void(format!("the attachment of {client} ended")));
            }
            CutOutcome::Answered(CutResult::Failed(cause)) => SnapshotFault::Refused {
                volume,
                client,
                cause,
            },
            CutOutcome::NotFetched if fetch_until <= until => {
                SnapshotFault::NotFetched { volume, client }
            }
            // The time of the call ended before the time of the client.
            CutOutcome::NotFetched | CutOutcome::NotAnswered => {
                SnapshotFault::NotAnswered { volume, client }
            }
        };
        Err(fault.into())
    }

    /// Prepares a snapshot on the in-sync legs of a volume that no client has attached.
    pub(crate) fn prepare_legs(&self, cut: &mut Reservation<'_>) -> Result<Attempt, Fault> {
        let mut controls = self.brick_connections();
        for (brick, slice) in cut.legs.clone() {
            let control = controls.get(brick);
            let prepared = control.and_then(|control| {
                cut.is_known = true;
                control.prepare_snapshot(slice, Epoch(cut.epoch.0))
            });
            if let Err(cause) = prepared {
                cut.is_certain = !matches!(cause, SliceError::Lost(_)) || !cut.is_known;
                // Only an attach or a deletion of the volume explains that the slice is gone.
                if let Some(change) = change_since(&self.state(), cut) {
                    return Ok(Attempt::Void(change));
                }
                return Err(self.brick_fault(brick, cause));
            }
            if let Some(change) = change_since(&self.state(), cut) {
                return Ok(Attempt::Void(change));
            }
        }
        Ok(Attempt::Done)
    }

    /// Commits the records of cuts, with their events and the answer of a call with a key, in one transaction.
    fn commit_cuts<T: Serialize>(
        &self,
        cuts: &mut [Reservation<'_>],
        running: Option<&RunningCall<'_>>,
        reply: impl FnOnce(Vec<SnapshotInfo>) -> T,
    ) -> Result<CreateAnswer<T>, Fault> {
        let mut book = self.state();
        let mut committed = Vec::new();
        let (mut infos, mut drafts) = (Vec::new(), Vec::new());
        for cut in cuts.iter() {
            // A promotion since the last look leaves out snapshots that are not committed.
            if let Some(cause) = change_since(&book, cut) {
                let (volume, attempts) = (cut.volume.clone(), 1);
                return Err(SnapshotFault::Unsteady {
                    volume,
                    attempts,
                    cause,
                }
                .into());
            }
            // A volume with a snapshot that is being made cannot be deleted.
            let of = book.snapshots.of(&cut.volume);
            let of = of.ok_or_else(|| Fault::NoSuchVolume(cut.volume.clone()))?;
            let entry = of.get(cut.epoch).map(|entry| entry.record.clone());
            let mut record = entry.ok_or_else(|| Fault::NoSuchVolume(cut.volume.clone()))?;
            // A replica with all of it has answered.
            let is_on_its_way = cut.has_replica && record.replica_copies.is_empty();
            (record.state, record.uncertain) = (SnapshotState::Committed, is_on_its_way);
            infos.push(snapshot_info(&book, (&cut.volume, of), &record));
            drafts.push(EventDraft::snapshot_created(
                &cut.volume,
                &record.name,
                &self.actor(),
            ));
            committed.push(record);
        }
        let tag = committed.first().map_or(RecordTag::new(&0), RecordTag::new);
        let etag = etag_text(tag, &infos.first());
        let reply = reply(infos);
        let kept = self.plan_answer(&book, running, &etag, &reply);
        let mut writes: Vec<_> = committed.iter().map(StoreWrite::PutSnapshot).collect();
        writes.extend(kept.writes());
        self.commit(&mut book, &writes, drafts)?;
        self.apply_key_change(&mut book, &kept);
        for (cut, record) in cuts.iter_mut().zip(committed) {
            cut.is_committed = true;
            let now = self.clock.elapsed();
            book.snapshots.put(&cut.volume, record, now);
        }
        Ok(CreateAnswer { reply, etag })
    }

    /// Gives up a snapshot that was not committed. The sweep lets the bricks drop it.
    fn abandon(&self, cut: &Reservation<'_>) {
        let mut book = self.state();
        let of = book.snapshots.of(&cut.volume);
        let Some(entry) = of.and_then(|of| of.get(cut.epoch)) else {
            return;
        };
        let mut record = entry.record.clone();
        if !cut.is_known || defect::is(Defect::GivenUpSnapshotForgotten) {
            let removed = [(cut.volume.clone(), cut.epoch)];
            if let Err(error) = self.remove_snapshots(&mut book, &removed) {
                tracing::error!(%error, "cannot write down that a snapshot was given up");
            }
            return;
        }
        let uncertain = !cut.is_certain || cut.has_replica;
        (record.state, record.uncertain) = (SnapshotState::Deleting, uncertain);
        if let Err(error) = self.commit(&mut book, &[StoreWrite::PutSnapshot(&record)], vec![]) {
            // A restart drops it all the same.
            tracing::error!(%error, "cannot write down that a snapshot was given up");
        }
        book.snapshots
            .put(&cut.volume, record, self.clock.elapsed());
        self.brick_returned.notify_one();
    }

    fn report_failed_cut(&self, volume: &VolumeName, name: &SnapshotName, fault: &Fault) {
        let is_failed_cut = match fault {
            Fault::Snapshot(fault) => fault.is_failed_cut(),
            Fault::Brick { .. } | Fault::BrickDead(_) => true,
            _ => false,
        };
        if !is_failed_cut {
            return;
        }
        let failed = EventDraft::snapshot_failed(volume, name, &self.actor(), &fault.to_body());
        if let Err(error) = self.commit(&mut self.state(), &[], vec![failed]) {
            tracing::error!(%error, "cannot write down that a snapshot failed");
        }
    }

    /// The order for the client of an attachment, or a place to wait for one. `number` is that of a poll that was woken.
    ///
    /// # Errors
    /// When there is no such volume, or the attachment is over.
    pub(crate) fn poll_cut(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
        number: Option<u64>,
    ) -> Result<PollState, Fault> {
        let book = self.state();
        check_attachment(volume, book.volume(volume)?, Some(attachment))?;
        Ok(self.cut_orders.poll(volume, attachment, number))
    }

    /// Takes the answer of a client to an order. An answer that comes too late changes nothing.
    ///
    /// # Errors
    /// When there is no such volume, or the attachment is over.
    pub fn answer_cut(&self, volume: &VolumeName, answer: AnswerCut) -> Result<(), Fault> {
        {
            let book = self.state();
            check_attachment(volume, book.volume(volume)?, Some(answer.attachment))?;
        }
        let result = match answer.result {
            done @ (CutResult::Done | CutResult::Released(_)) => done,
            CutResult::LayoutChanged(reason) => CutResult::LayoutChanged(plain_text(&reason)),
            CutResult::Failed(reason) => CutResult::Failed(plain_text(&reason)),
        };
        let is_awaited = self.cut_orders.answer(
            volume,
            answer.attachment,
            (answer.epoch, answer.step),
            result,
        );
        if !is_awaited {
            tracing::debug!(%volume, epoch = answer.epoch.0, "no call waits for this cut");
        }
        Ok(())
    }
}

/// The change of the volume since an epoch was reserved, if there is one.
pub(crate) fn change_since(book: &ManagerState, cut: &Reservation<'_>) -> Option<String> {
    let Some(record) = book.volumes.get(&cut.volume) else {
        return Some("the volume was deleted".to_owned());
    };
    let attached = record.attachment.as_ref();
    let epoch = record.layout_state.layout.epoch;
    if attached.map(|it| it.epoch) != cut.attachment.as_ref().map(|it| it.epoch) {
        return Some(match attached {
            Some(attachment) => format!("{} has attached it", attachment.client),
            None => "its client has detached it".to_owned(),
        });
    }
    (epoch != cut.layout_epoch).then(|| format!("its layout has epoch {} now", epoch.0))
}

fn has_async_leg(record: &VolumeRecord) -> bool {
    let columns = record.layout_state.layout.columns();
    let mut legs = columns.flat_map(|column| &column.legs);
    legs.any(|leg| leg.asynchronous)
}

fn check_labels(labels: &[String]) -> Result<(), Fault> {
    if labels.len() > LABELS_MAX {
        return Err(Fault::invalid_field(
            format!("a snapshot has at most {LABELS_MAX} labels"),
            "leave some out",
        ));
    }
    let mut labels = labels.iter();
    labels.try_for_each(|label| check_text("a label", label, LABEL_BYTES_MAX))
}

/// Refuses a name that is taken, a second cut at a time, and a snapshot beyond the limits.
fn check_room(book: &ManagerState, volume: &VolumeName, name: &SnapshotName) -> Result<(), Fault> {
    if let Some(of) = book.snapshots.of(volume) {
        if of.is_preparing() {
            return Err(SnapshotFault::Running(volume.clone()).into());
        }
        if of.find(name).is_some() {
            let (volume, name) = (volume.clone(), name.clone());
            return Err(SnapshotFault::Exists { volume, name }.into());
        }
        if of.len() >= VOLUME_SNAPSHOTS_MAX {
            return Err(Fault::TooMany {
                what: "snapshots of the volume",
                most: VOLUME_SNAPSHOTS_MAX,
            });
        }
    }
    if book.snapshots.len() >= SNAPSHOTS_MAX {
        return Err(Fault::TooMany {
            what: "snapshots",
            most: SNAPSHOTS_MAX,
        });
    }
    Ok(())
}

/// The text of a client, as messages may show it.
fn plain_text(text: &str) -> String {
    let end = text.floor_char_boundary(REASON_BYTES_MAX);
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text[..end].chars().map(plain).collect()
}
