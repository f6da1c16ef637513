//! Volumes: create, show, grow, delete, attach, detach, and the states of
//! their legs.
//!
//! A slice is written down as doomed before it is asked for, and taken off
//! that list by the transaction that publishes it. Whatever happens between,
//! the sweep finds it.

use crate::durability::Durability;
use crate::fault::Fault;
use crate::files::{check_files, make_thin};
use crate::ledger::{Change, Ledger, LegTurn, is_whole};
use crate::manager::{Book, DOOMED_MAX, Doom, Manager, Place, VOLUMES_MAX, places, promised};
use crate::placement::{PlacedSegment, Placement, Wish, place};
use crate::records::{Attachment, Doomed, Note, VolumeRecord};
use crate::shape::Shape;
use crate::store::Write;
use crate::wire::{
    AttachVolume, Attached, ChangeLegs, Content, CopiesTold, CopyReturn, CreateVolume, Deleted,
    DetachVolume, Detached, GrowVolume, Health, LegChange, Sized, TellCopies, VolumeDetail,
    VolumeInfo,
};
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, LEGS_MAX, Layout, Leg, LegState, SEGMENTS_MAX, Segment, SliceId,
    VolumeName,
};
use uuid::Uuid;

/// Bytes of the longest label of a client.
pub const CLIENT_BYTES_MAX: usize = 128;
/// Bytes of the longest note on a leg.
pub const NOTE_BYTES_MAX: usize = 256;

impl Manager {
    /// Creates a volume: places it, makes its slices on their bricks, then
    /// publishes it. If a brick fails, nothing is left.
    ///
    /// # Errors
    /// When the wish makes no sense, has no place, or a brick fails.
    pub fn create(&self, wish: &CreateVolume) -> Result<Sized, Fault> {
        let shape = Shape::new(wish.layout, wish.columns, wish.copies)?;
        let bytes = shape.fit(wish.size_bytes)?;
        let files_bytes = match wish.content {
            Content::Blocks => None,
            Content::Files => Some(check_files(shape, bytes)?),
        };
        let plan = {
            let mut book = self.book();
            refuse_a_taken_name(&book, &wish.name)?;
            let wish_place = Wish {
                shape,
                bytes,
                durability: wish.durability,
                factor: self.settings.overprovision_factor,
            };
            let mut placement = place(&self.candidates(&book), &wish_place)?;
            if files_bytes.is_some() {
                make_thin(&mut placement, bytes)?;
            }
            let durability = placement.durability;
            let segments = self.name_slices(&placement);
            self.plan(&mut book, &wish.name, durability, segments, files_bytes)?
        };
        self.build(&plan.segments)?;
        let layout = Layout {
            volume: (self.settings.new_id)(),
            name: wish.name.clone(),
            epoch: EpochNumber(1),
            segments: plan.segments.clone(),
        };
        let record = VolumeRecord {
            ledger: Ledger::new(layout),
            shape,
            durability: plan.durability,
            attachment: None,
            notes: vec![],
            created_unix_s: self.clock.unix_s(),
            files_bytes,
            auto_promote: false,
        };
        let volume = self.publish(&plan.segments, |_| Ok(record))?;
        Ok(sized(volume, wish.size_bytes, bytes))
    }

    /// Makes a volume larger by a segment of the same shape, attached or not. Of
    /// files: what they may take together.
    ///
    /// # Errors
    /// As for creating, and when it is not larger than now.
    pub fn grow(&self, name: &VolumeName, wish: GrowVolume) -> Result<Sized, Fault> {
        let (plan, size) = {
            let mut book = self.book();
            let volume = book.volume(name)?;
            refuse_a_busy_one(&book, name)?;
            if volume.files_bytes.is_some() {
                return self.grow_files(&mut book, name, wish.size_bytes);
            }
            let layout = &volume.ledger.layout;
            let follows = |column: &Column| column.legs.iter().any(|leg| leg.asynchronous);
            if layout.columns().any(follows) {
                return Err(Fault::bad(
                    format!("the volume {name} has an asynchronous copy, which one column has"),
                    "detach that copy, grow the volume, and attach a synchronous one",
                ));
            }
            let (shape, now) = (volume.shape, layout.size_bytes());
            let more = growth(now, wish.size_bytes)?;
            let bytes = shape.fit(more)?;
            let size = check_whole(now, bytes)?;
            let wish = Wish {
                shape,
                bytes,
                durability: Some(volume.durability),
                factor: self.settings.overprovision_factor,
            };
            // Refused before bricks are troubled, not after.
            let segments = layout.segments.len();
            let placement = place(&self.candidates(&book), &wish)?;
            if segments + placement.segments.len() > SEGMENTS_MAX {
                return Err(crate::ledger::ChangeError::TooManySegments.into());
            }
            let durability = placement.durability;
            let segments = self.name_slices(&placement);
            let plan = self.plan(&mut book, name, durability, segments, None)?;
            (plan, size)
        };
        self.build(&plan.segments)?;
        let change = Change::Grow(plan.segments.clone());
        let volume = self.publish(&plan.segments, |book| {
            let mut record = book.volume(name)?.clone();
            record.ledger = record.ledger.apply(&change)?;
            Ok(record)
        })?;
        Ok(sized(volume, wish.size_bytes, size))
    }

    /// Every volume, by name.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        let book = self.book();
        let volumes = book.volumes.values();
        volumes
            .map(|volume| self.volume_info(&book, volume))
            .collect()
    }

    /// All about a volume.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn show(&self, name: &VolumeName) -> Result<VolumeDetail, Fault> {
        let book = self.book();
        Ok(self.detail(&book, book.volume(name)?))
    }

    /// Deletes a volume. Slices that cannot be deleted at once are remembered.
    ///
    /// # Errors
    /// When a client has it and `force` is not set, or the store fails.
    pub fn delete(&self, name: &VolumeName, force: bool) -> Result<Deleted, Fault> {
        let doomed: Vec<Doomed> = {
            let mut book = self.book();
            let volume = book.volume(name)?;
            refuse_a_busy_one(&book, name)?;
            if let Some(attachment) = volume.attachment.as_ref().filter(|_| !force) {
                return Err(Fault::Attached {
                    name: name.clone(),
                    client: attachment.client.clone(),
                });
            }
            let doom = |place: Place| Doomed {
                brick: place.brick,
                slice: place.slice,
                uncertain: false,
            };
            let doomed: Vec<Doomed> = places(&volume.ledger.layout.segments).map(doom).collect();
            let mut writes: Vec<_> = doomed.iter().map(|&doomed| Write::Doom(doomed)).collect();
            writes.push(Write::RemoveVolume(name));
            self.store.commit(&writes)?;
            Manager::remember(&mut book, &doomed);
            book.volumes.remove(name);
            book.told.remove(name);
            doomed
        };
        self.retire(&doomed);
        let book = self.book();
        let left = |doomed: &&Doomed| book.doomed.contains_key(&(doomed.brick, doomed.slice));
        Ok(Deleted {
            pending_deletions: doomed.iter().filter(left).count(),
        })
    }

    /// Gives a volume to a client; the client before is fenced by the epoch.
    ///
    /// # Errors
    /// When there is no such volume, or the store fails.
    pub fn attach(&self, name: &VolumeName, wish: &AttachVolume) -> Result<Attached, Fault> {
        check_text("the client's label", &wish.client, CLIENT_BYTES_MAX)?;
        let mut book = self.book();
        let mut record = book.volume(name)?.clone();
        let promoted = match wish.unreachable {
            true => self.promote_if_allowed(&book, &mut record)?,
            false => None,
        };
        record.ledger = record.ledger.apply(&Change::Attach)?;
        record.attachment = Some(Attachment {
            client: wish.client.clone(),
            epoch: record.ledger.layout.epoch,
            since_unix_s: self.clock.unix_s(),
        });
        self.replace(&mut book, &record)?;
        if let Some(copy) = promoted {
            tracing::warn!(volume = %name, copy, "a copy that followed is promoted");
        }
        Ok(Attached {
            bricks: book.addresses(&record.ledger.layout.segments),
            layout: record.ledger.layout,
        })
    }

    /// All about a volume, for the client that has it and tells how copies are that
    /// follow or return.
    ///
    /// # Errors
    /// When there is no such volume, another client has it, or more is told than it can
    /// have copies.
    pub fn tell_copies(&self, name: &VolumeName, told: TellCopies) -> Result<VolumeDetail, Fault> {
        let mut book = self.book();
        let record = book.volume(name)?.clone();
        refuse_a_fenced_one(name, &record, Some(told.attachment))?;
        let mut copies: Vec<usize> = told.returns.iter().map(|it| it.copy).collect();
        copies.sort_unstable();
        copies.dedup();
        let known = |copy: &usize| *copy < LEGS_MAX;
        if copies.len() != told.returns.len() || !copies.iter().all(known) {
            return Err(Fault::bad(
                "a copy is told of twice, or has a number that no copy has",
                "tell of each copy that returns once",
            ));
        }
        let now = self.clock.elapsed();
        book.told.insert(name.clone(), (now, told));
        Ok(self.detail(&book, &record))
    }

    /// Ends an attachment. The layout and its epoch stay.
    ///
    /// # Errors
    /// When there is no such volume, or the store fails.
    pub fn detach(&self, name: &VolumeName, wish: DetachVolume) -> Result<Detached, Fault> {
        let mut book = self.book();
        let mut record = book.volume(name)?.clone();
        let meant = |present: &Attachment| wish.attachment.is_none_or(|a| a == present.epoch);
        let detached = record.attachment.as_ref().is_some_and(meant);
        if detached {
            record.attachment = None;
            self.replace(&mut book, &record)?;
        }
        Ok(Detached { detached })
    }

    /// Compare-and-swap of leg states.
    ///
    /// # Errors
    /// When the attachment is over, the epoch is not the expected one, or the
    /// layout may not change so.
    pub fn change_legs(&self, name: &VolumeName, wish: &ChangeLegs) -> Result<Layout, Fault> {
        for change in &wish.changes {
            if let Some(note) = &change.note {
                check_text("a note", note, NOTE_BYTES_MAX)?;
            }
        }
        let mut book = self.book();
        let mut record = book.volume(name)?.clone();
        refuse_a_fenced_one(name, &record, wish.attachment)?;
        let turn = |change: &LegChange| LegTurn {
            segment: change.segment,
            column: change.column,
            leg: change.leg,
            to: change.to,
        };
        let change = Change::Legs {
            expected: wish.expected,
            turns: wish.changes.iter().map(turn).collect(),
        };
        record.ledger = record.ledger.apply(&change)?;
        for change in &wish.changes {
            self.note(&mut record, change);
        }
        self.replace(&mut book, &record)?;
        Ok(record.ledger.layout)
    }

    fn note(&self, record: &mut VolumeRecord, change: &LegChange) {
        let place = (change.segment, change.column, change.leg);
        let is_other = |note: &Note| (note.segment, note.column, note.leg) != place;
        if is_whole(change.to) || change.note.is_some() {
            record.notes.retain(is_other);
        }
        if let Some(text) = change.note.as_ref().filter(|_| !is_whole(change.to)) {
            record.notes.push(Note {
                segment: change.segment,
                column: change.column,
                leg: change.leg,
                text: text.clone(),
                since_unix_s: self.clock.unix_s(),
            });
        }
    }

    pub(crate) fn replace(&self, book: &mut Book, record: &VolumeRecord) -> Result<(), Fault> {
        self.store.commit(&[Write::PutVolume(record)])?;
        let name = record.ledger.layout.name.clone();
        book.volumes.insert(name, record.clone());
        Ok(())
    }

    fn name_slices(&self, placement: &Placement) -> Vec<Segment> {
        let placed = placement.segments.iter();
        placed
            .map(|placed| segment(placed, self.settings.new_id))
            .collect()
    }

    /// Writes the slices of a placement down as doomed.
    pub(crate) fn plan<'a>(
        &'a self,
        book: &mut Book,
        name: &VolumeName,
        durability: Durability,
        segments: Vec<Segment>,
        files_bytes: Option<u64>,
    ) -> Result<Plan<'a>, Fault> {
        let places: Vec<Place> = promised(&segments, files_bytes).collect();
        let doom = |place: &Place| Doomed {
            brick: place.brick,
            slice: place.slice,
            uncertain: true,
        };
        let doomed: Vec<Doomed> = places.iter().map(doom).collect();
        if book.doomed.len() + doomed.len() > DOOMED_MAX {
            return Err(Fault::TooMany {
                what: "slices to delete",
                most: DOOMED_MAX,
            });
        }
        let writes: Vec<_> = doomed.iter().map(|&doomed| Write::Doom(doomed)).collect();
        self.store.commit(&writes)?;
        Manager::remember(book, &doomed);
        book.building.insert(name.clone(), places);
        Ok(Plan {
            manager: self,
            name: name.clone(),
            durability,
            segments,
        })
    }

    pub(crate) fn remember(book: &mut Book, doomed: &[Doomed]) {
        let doom = |&record: &Doomed| ((record.brick, record.slice), Doom::new(record));
        book.doomed.extend(doomed.iter().map(doom));
    }

    /// One transaction: the volume is there, and its slices are its own. The
    /// record is made under the lock, as clients may have changed it since
    /// the slices were placed.
    pub(crate) fn publish(
        &self,
        built: &[Segment],
        record: impl FnOnce(&Book) -> Result<VolumeRecord, Fault>,
    ) -> Result<VolumeDetail, Fault> {
        let mut book = self.book();
        let record = record(&book)?;
        let mut writes: Vec<_> = places(built)
            .map(|place| Write::Pardon(place.brick, place.slice))
            .collect();
        writes.push(Write::PutVolume(&record));
        self.store.commit(&writes)?;
        for place in places(built) {
            book.doomed.remove(&(place.brick, place.slice));
        }
        let detail = self.detail(&book, &record);
        book.volumes
            .insert(record.ledger.layout.name.clone(), record);
        Ok(detail)
    }

    pub(crate) fn detail(&self, book: &Book, record: &VolumeRecord) -> VolumeDetail {
        VolumeDetail {
            info: self.volume_info(book, record),
            bricks: book.addresses(&record.ledger.layout.segments),
            layout: record.ledger.layout.clone(),
            notes: record.notes.clone(),
            told: self.told(book, record),
        }
    }

    /// What was told last by the client that has the volume, of copies that still
    /// follow or return.
    fn told(&self, book: &Book, record: &VolumeRecord) -> Option<CopiesTold> {
        let layout = &record.ledger.layout;
        let (at, told) = book.told.get(&layout.name)?;
        let is_present = record.attachment.as_ref()?.epoch == told.attachment;
        let mut legs = layout.columns().flat_map(|column| &column.legs);
        let follows = legs.any(|leg| leg.state == LegState::Following);
        let returns = |it: &&CopyReturn| {
            let mut legs = layout
                .columns()
                .filter_map(|column| column.legs.get(it.copy));
            legs.any(|leg| matches!(leg.state, LegState::Stale | LegState::Syncing))
        };
        let told = CopiesTold {
            lag: told.lag.filter(|_| follows),
            returns: told.returns.iter().filter(returns).copied().collect(),
            told_us_ago: (self.clock.elapsed().saturating_sub(*at)).as_micros() as u64,
        };
        let is_something = told.lag.is_some() || !told.returns.is_empty();
        (is_present && is_something).then_some(told)
    }

    fn volume_info(&self, book: &Book, record: &VolumeRecord) -> VolumeInfo {
        let layout = &record.ledger.layout;
        let is_dead = |place: &Place| {
            let brick = book.bricks.get(&place.brick);
            !brick.is_some_and(|brick| self.is_alive(brick))
        };
        VolumeInfo {
            name: layout.name.clone(),
            id: layout.volume,
            content: match record.files_bytes {
                None => Content::Blocks,
                Some(_) => Content::Files,
            },
            size_bytes: record.files_bytes.unwrap_or(layout.size_bytes()),
            layout: record.shape.kind,
            columns: record.shape.columns,
            copies: record.shape.copies,
            durability: record.durability,
            epoch: layout.epoch,
            health: health(layout),
            unreachable_legs: places(&layout.segments).filter(is_dead).count(),
            attached: record.attachment.clone(),
            auto_promote: record.auto_promote,
            created_unix_s: record.created_unix_s,
        }
    }
}

/// A placement with names. While it lives, the sweep leaves its slices alone
/// and nobody else creates, grows or deletes the volume.
pub(crate) struct Plan<'a> {
    manager: &'a Manager,
    name: VolumeName,
    durability: Durability,
    pub segments: Vec<Segment>,
}

impl Drop for Plan<'_> {
    fn drop(&mut self) {
        self.manager.book().building.remove(&self.name);
    }
}

fn segment(placed: &PlacedSegment, new_id: fn() -> Uuid) -> Segment {
    let leg = |brick: &BrickId| Leg {
        brick: *brick,
        slice: SliceId(new_id()),
        state: LegState::InSync,
        fresh: false,
        empty: false,
        asynchronous: false,
    };
    let column = |bricks: &Vec<BrickId>| Column {
        legs: bricks.iter().map(leg).collect(),
        round: 0,
    };
    Segment {
        bytes: placed.bytes,
        columns: placed.columns.iter().map(column).collect(),
    }
}

fn health(layout: &Layout) -> Health {
    let columns = layout.columns();
    let has = |state| {
        let mut legs = columns.clone().flat_map(|column| &column.legs);
        legs.any(|leg| leg.state == state)
    };
    if has(LegState::Stale) {
        Health::Degraded
    } else if has(LegState::Syncing) {
        Health::Syncing
    } else {
        Health::InSync
    }
}

fn refuse_a_taken_name(book: &Book, name: &VolumeName) -> Result<(), Fault> {
    if book.volumes.contains_key(name) {
        return Err(Fault::VolumeExists(name.clone()));
    }
    refuse_a_busy_one(book, name)?;
    if book.volumes.len() + book.building.len() >= VOLUMES_MAX {
        return Err(Fault::TooMany {
            what: "volumes",
            most: VOLUMES_MAX,
        });
    }
    Ok(())
}

pub(crate) fn refuse_a_busy_one(book: &Book, name: &VolumeName) -> Result<(), Fault> {
    if book.building.contains_key(name) {
        return Err(Fault::VolumeBusy(name.clone()));
    }
    Ok(())
}

fn refuse_a_fenced_one(
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

pub(crate) fn growth(now: u64, wanted: u64) -> Result<u64, Fault> {
    match wanted.checked_sub(now) {
        None | Some(0) => Err(Fault::bad(
            format!("the volume has {now} bytes already; {wanted} bytes would not be more"),
            "name a larger size; volumes do not shrink",
        )),
        Some(more) => Ok(more),
    }
}

/// The size of the whole, which must be a valid one, too.
fn check_whole(now: u64, more: u64) -> Result<u64, Fault> {
    let most = crate::shape::VOLUME_BYTES_MAX;
    let size = now.checked_add(more).filter(|&size| size <= most);
    let too_large = crate::shape::ShapeError::TooLarge {
        asked: now.saturating_add(more),
        what: "a volume",
        most,
    };
    size.ok_or_else(|| too_large.into())
}

fn check_text(what: &str, text: &str, most: usize) -> Result<(), Fault> {
    if text.is_empty() || text.len() > most || text.chars().any(char::is_control) {
        return Err(Fault::bad(
            format!("{what} must have 1 to {most} bytes and no control characters"),
            "shorten it, or leave such characters out",
        ));
    }
    Ok(())
}

pub(crate) fn sized(volume: VolumeDetail, asked: u64, got: u64) -> Sized {
    let rounded = got != asked;
    let note = format!("rounded up from {asked} to {got} bytes, to whole stripes");
    Sized {
        volume,
        asked_bytes: asked,
        rounded,
        note: rounded.then_some(note),
    }
}
