//! Replicas: a copy more of a volume, one less, and the one that goes on alone.

use crate::fault::Fault;
use crate::ledger::{Change, ChangeError, is_whole};
use crate::manager::{Book, Brick, Manager, Place, places};
use crate::placement::{Candidate, Thin, place_copy};
use crate::records::{Doomed, VolumeRecord};
use crate::store::Write;
use crate::volumes::refuse_a_busy_one;
use crate::wire::{AttachReplica, ChooseReplica, VolumeDetail};
use pagemesh_base::layout::{
    BrickId, Column, LEGS_MAX, Leg, LegState, Segment, SliceId, VolumeName,
};

impl Manager {
    /// Adds a copy to every column of a volume, attached or not: the slices are made
    /// on their bricks, then published. It is filled by the client that has the
    /// volume, or by the next one.
    ///
    /// # Errors
    /// When there are enough copies, no brick in a failure domain of its own has
    /// room, or a brick fails.
    pub fn attach_replica(
        &self,
        name: &VolumeName,
        wish: AttachReplica,
    ) -> Result<VolumeDetail, Fault> {
        let plan = {
            let mut book = self.book();
            refuse_a_busy_one(&book, name)?;
            let volume = book.volume(name)?.clone();
            if volume.shape.copies >= LEGS_MAX {
                return Err(ChangeError::TooManyCopies.into());
            }
            match wish.asynchronous {
                true => refuse_to_follow(&volume)?,
                false if wish.auto_promote => return Err(needs_no_promotion()),
                false => {}
            }
            let candidates = self.replica_candidates(&book, wish.brick)?;
            let (durability, factor) = (volume.durability, self.settings.overprovision_factor);
            let thin = thin_columns(&book, &volume);
            let bricks = place_copy(&candidates, durability, factor, &thin)?;
            let segments = &volume.ledger.layout.segments;
            let segments = self.copy_on(segments, &bricks, wish.asynchronous);
            self.plan(&mut book, name, durability, segments, volume.files_bytes)?
        };
        self.build(&plan.segments)?;
        let copy = plan.segments.iter().map(|segment| {
            let columns = segment.columns.iter();
            columns.flat_map(|column| column.legs.clone()).collect()
        });
        let change = Change::AddCopy(copy.collect());
        self.publish(&plan.segments, |book| {
            let mut record = book.volume(name)?.clone();
            record.ledger = record.ledger.apply(&change)?;
            record.shape = record.shape.with_copies(record.shape.copies + 1)?;
            record.auto_promote |= wish.auto_promote;
            Ok(record)
        })
    }

    /// Removes a copy of a volume; its slices are deleted. Copies behind it move up
    /// by one, so a client that has the volume has to be ended.
    ///
    /// # Errors
    /// When there is no such copy, none would be left that holds everything, or a
    /// client has the volume and `force` is not set.
    pub fn detach_replica(
        &self,
        name: &VolumeName,
        wish: ChooseReplica,
    ) -> Result<VolumeDetail, Fault> {
        let (doomed, detail) = {
            let mut book = self.book();
            let mut record = self.replica_record(&book, name, wish)?;
            let before = places(&record.ledger.layout.segments).collect::<Vec<Place>>();
            record.ledger = record.ledger.apply(&Change::RemoveCopy(wish.copy))?;
            if !wish.force {
                self.refuse_without_living(&book, &record)?;
            }
            record.shape = record.shape.with_copies(record.shape.copies - 1)?;
            record.auto_promote &= asynchronous(&record).is_some();
            record.notes.retain(|note| note.leg != wish.copy);
            let behind = record.notes.iter_mut().filter(|note| note.leg > wish.copy);
            behind.for_each(|note| note.leg -= 1);
            let left = places(&record.ledger.layout.segments).collect::<Vec<Place>>();
            let gone = before.into_iter().filter(|place| !left.contains(place));
            let doomed: Vec<Doomed> = gone
                .map(|place| Doomed {
                    brick: place.brick,
                    slice: place.slice,
                    uncertain: false,
                })
                .collect();
            let mut writes: Vec<_> = doomed.iter().map(|&doomed| Write::Doom(doomed)).collect();
            writes.push(Write::PutVolume(&record));
            self.store.commit(&writes)?;
            Manager::remember(&mut book, &doomed);
            let detail = self.detail(&book, &record);
            book.volumes.insert(name.clone(), record);
            (doomed, detail)
        };
        self.retire(&doomed);
        Ok(detail)
    }

    /// Has a volume go on with one copy where no in-sync one is left, as when their
    /// bricks are gone for good. They come back as copies of it, by comparison.
    /// Columns where the copy is in-sync stay as they are: the next client goes on
    /// with whatever it reaches. One that follows has all that was acknowledged as
    /// durable, and of the rest everything up to some change.
    ///
    /// # Errors
    /// When there is no such copy, or it never held all of the volume; without
    /// `force` also when it is neither in-sync nor follows, when it follows and a
    /// brick with an in-sync copy is alive, or when a client has the volume.
    pub fn promote_replica(
        &self,
        name: &VolumeName,
        wish: ChooseReplica,
    ) -> Result<VolumeDetail, Fault> {
        let mut book = self.book();
        let mut record = self.replica_record(&book, name, wish)?;
        self.refuse_promotion(&book, &record, wish)?;
        promote(&mut record, wish.copy)?;
        self.replace(&mut book, &record)?;
        Ok(self.detail(&book, &record))
    }

    /// Has a volume go on with the copy that follows for a client that can reach no
    /// in-sync one, where that was allowed and [`Manager::promote_replica`] would do it
    /// without force: every brick with an in-sync copy is dead. That of the other must be
    /// alive. Which copy it was, if so.
    ///
    /// Heartbeats alone say too little: they may be late or lost where clients reach the
    /// brick.
    pub(crate) fn promote_if_allowed(
        &self,
        book: &Book,
        record: &mut VolumeRecord,
    ) -> Result<Option<usize>, ChangeError> {
        let Some((copy, leg)) = asynchronous(record).filter(|_| record.auto_promote) else {
            return Ok(None);
        };
        let wish = ChooseReplica {
            copy,
            force: false,
            expected: None,
        };
        let brick = book.bricks.get(&leg.brick);
        let is_there = brick.is_some_and(|brick| self.is_alive(brick));
        let is_ready = leg.state == LegState::Following && is_there;
        if !is_ready || self.refuse_promotion(book, record, wish).is_err() {
            return Ok(None);
        }
        promote(record, copy)?;
        Ok(Some(copy))
    }

    /// What [`Manager::promote_replica`] says about its errors.
    fn refuse_promotion(
        &self,
        book: &Book,
        record: &VolumeRecord,
        wish: ChooseReplica,
    ) -> Result<(), Fault> {
        let columns = record.ledger.layout.columns();
        let mut legs = columns
            .clone()
            .filter_map(|column| column.legs.get(wish.copy));
        let mut others = columns.flat_map(|column| &column.legs);
        let follows = |leg: &&Leg| leg.state == LegState::Following;
        let may_live =
            |leg: &&Leg| brick_in_sync(book, leg).is_some_and(|brick| !self.is_dead(brick));
        if legs.clone().any(|leg| follows(&leg))
            && let Some(in_sync) = others.find(may_live)
            && !wish.force
        {
            return Err(Fault::bad(
                format!(
                    "brick {} has an in-sync copy and is alive, or may be: the next client goes \
                     on with it, and copy {} may lack what was acknowledged last",
                    in_sync.brick, wish.copy
                ),
                "attach the volume as it is, try again once the brick is listed as dead, or use \
                 force, which gives these writes up",
            ));
        }
        let behind = legs.find(|leg| !is_whole(leg.state));
        if let Some(leg) = behind.filter(|leg| !wish.force && !leg.empty) {
            let (copy, state) = (wish.copy, crate::ledger::word(leg.state));
            return Err(Fault::bad(
                format!(
                    "copy {copy} is {state} on brick {}: it lacks acknowledged writes",
                    leg.brick
                ),
                "start the bricks of an in-sync copy, or use force, which gives these writes up",
            ));
        }
        Ok(())
    }

    /// The ledger calls a leg in-sync although its brick is gone, until a client has
    /// met that.
    fn refuse_without_living(&self, book: &Book, record: &VolumeRecord) -> Result<(), Fault> {
        let mut columns = record.ledger.layout.columns();
        let is_living = |leg| brick_in_sync(book, leg).is_some_and(|brick| self.is_alive(brick));
        match columns.all(|column| column.legs.iter().any(is_living)) {
            true => Ok(()),
            false => Err(Fault::bad(
                "no brick that is alive would have an in-sync copy of all of the volume",
                "start the bricks of another copy, or use force if they are only late",
            )),
        }
    }

    /// A volume that nobody has any more.
    fn replica_record(
        &self,
        book: &Book,
        name: &VolumeName,
        wish: ChooseReplica,
    ) -> Result<VolumeRecord, Fault> {
        refuse_a_busy_one(book, name)?;
        let mut record = book.volume(name)?.clone();
        let current = record.ledger.layout.epoch;
        if let Some(expected) = wish.expected.filter(|expected| *expected != current) {
            return Err(ChangeError::Conflict { current, expected }.into());
        }
        if let Some(attachment) = record.attachment.take_if(|_| !wish.force) {
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
        book: &Book,
        only: Option<BrickId>,
    ) -> Result<Vec<Candidate>, Fault> {
        let mut candidates = self.candidates(book);
        if let Some(brick) = only {
            if !book.bricks.contains_key(&brick) {
                return Err(Fault::NoSuchBrick(brick));
            }
            candidates.retain(|candidate| candidate.brick == brick);
            if candidates.is_empty() {
                return Err(Fault::BrickDead(brick));
            }
        }
        Ok(candidates)
    }

    /// The slices of one copy, with names.
    fn copy_on(
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
                fresh: true,
                empty: true,
                asynchronous,
            }],
            round: 0,
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

fn promote(record: &mut VolumeRecord, copy: usize) -> Result<(), ChangeError> {
    record.ledger = record.ledger.apply(&Change::Promote(copy))?;
    record.notes.clear();
    record.auto_promote &= asynchronous(record).is_some();
    Ok(())
}

/// The asynchronous copy and its leg: such a volume has one column.
fn asynchronous(record: &VolumeRecord) -> Option<(usize, &Leg)> {
    let mut columns = record.ledger.layout.columns();
    let mut legs = columns.next()?.legs.iter().enumerate();
    legs.find(|(_, leg)| leg.asynchronous)
}

fn needs_no_promotion() -> Fault {
    Fault::bad(
        "only an asynchronous copy is promoted by the manager",
        "leave auto_promote out: with a synchronous copy the next client goes on by itself",
    )
}

/// The brick of a leg, if that is in-sync.
fn brick_in_sync<'b>(book: &'b Book, leg: &Leg) -> Option<&'b Brick> {
    let brick = book.bricks.get(&leg.brick)?;
    (leg.state == LegState::InSync).then_some(brick)
}

/// Only changes of one column have an order that one leg can keep.
fn refuse_to_follow(volume: &VolumeRecord) -> Result<(), Fault> {
    let mut columns = volume.ledger.layout.columns();
    let (Some(only), None) = (columns.next(), columns.next()) else {
        return Err(Fault::bad(
            "an asynchronous copy is one of a volume with one column that has not grown",
            "attach a synchronous copy",
        ));
    };
    match only.legs.iter().any(|leg| leg.asynchronous) {
        true => Err(Fault::bad(
            "the volume has an asynchronous copy already",
            "detach that one first, or attach a synchronous copy",
        )),
        false => Ok(()),
    }
}

/// The columns of a volume, in order.
fn thin_columns(book: &Book, volume: &VolumeRecord) -> Vec<Thin> {
    let segments = volume.ledger.layout.segments.iter();
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
        .map(|(bytes, column)| Thin {
            bytes: bytes.min(volume.files_bytes.unwrap_or(u64::MAX)),
            domains: column.legs.iter().filter_map(domain).collect(),
        })
        .collect()
}
