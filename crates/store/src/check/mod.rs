//! Checking a pool that nobody uses: everything that is stored twice, or
//! follows from something else, is compared, and what is wrong is named.
//!
//! [`check`] recovers the pool first, as an opening would, so that a pool of a
//! brick that died is judged by what it will be. It does that on the medium it
//! is given: hand it a private view of the pool (`Mapped::overlay`), and
//! nothing is written to the pool itself. [`Plan::apply`] writes what the pool
//! can mend by itself.
//!
//! Invariants: a damaged pool never makes it panic, loop or follow what does
//! not check; a frame is only ever freed when every page table could be read;
//! nothing is mended unless its check bits say what it was.

mod plan;
mod walk;

pub use plan::Plan;

use crate::geometry::{Geometry, OBJECT_BYTES};
use crate::in_flight;
use crate::object::{HEIGHT, Object, ROOT_AT, State};
use crate::recovery::{PoolError, Recovery, lane_of, read_superblock, recover, superblock_pages};
use crate::slot::Slot;
use crate::superblock::{BadSuperblock, Superblock};
use crate::table::reach;
use crate::view::frame_at;
use pagemesh_base::ids::ObjectId;
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::ops::Range;
use walk::Walk;

/// Findings that are listed one by one: a medium that is broken all over is
/// known to be after so many, and others are only counted.
pub const FINDINGS_MAX: usize = 1000;

/// What a check found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What, and why it matters.
    pub what: What,
    /// Where.
    pub place: Place,
    /// What can be done.
    pub remedy: Remedy,
}

/// Where something is. Unknown parts are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Of which object.
    pub object: Option<ObjectId>,
    /// And its slice.
    pub slice: Option<SliceId>,
    /// The object's pages concerned.
    pub pages: Option<Range<u64>>,
    /// The frame concerned.
    pub frame: Option<u64>,
    /// The byte of the pool where the damaged structure lies.
    pub byte: Option<u64>,
}

/// Who can repair a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The pool itself: [`Plan::apply`].
    Pool,
    /// Another copy of the volume, when the page is read.
    Leg,
    /// Nobody: the pool must be replaced.
    Replace,
}

/// Kinds of findings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum What {
    /// One of the two copies.
    #[error("a superblock is damaged, or was being written when the machine stopped ({0})")]
    Superblock(BadSuperblock),
    /// A flipped bit in the journal.
    #[error("a record of lane {lane} at line {position} has a flipped bit")]
    Record {
        /// Its lane.
        lane: u32,
        /// Its line, since the pool was made.
        position: u64,
    },
    /// The pool cannot be opened.
    #[error("the pool cannot be recovered: {0}")]
    Recovery(String),
    /// An entry of the object table: its first line, or the copy of it.
    #[error("an entry of the object table is damaged")]
    Object,
    /// A root where no object is.
    #[error("an entry of the object table is free and still has a page table")]
    Root,
    /// The in-flight table.
    #[error("an entry of the in-flight table is damaged")]
    InFlight,
    /// A slot of a page table.
    #[error("a slot of level {level} of the page table is damaged: {bits:#018x}")]
    Slot {
        /// 0 maps a page, above a node.
        level: u8,
        /// As found.
        bits: u64,
    },
    /// A slot that checks, but names no frame of the pool.
    #[error("a slot of level {level} of the page table names a frame that the pool does not have")]
    NoSuchFrame {
        /// 0 maps a page, above a node.
        level: u8,
    },
    /// A frame that two slots name.
    #[error("a slot of level {level} of the page table names a frame that another slot names")]
    Shared {
        /// 0 maps a page, above a node.
        level: u8,
    },
    /// Mapped behind the object's end.
    #[error("pages behind the object's end are mapped")]
    Beyond,
    /// A page does not have its checksum.
    #[error(
        "the page's bytes are not those that were written: checksum {found:#010x}, not {expected:#010x}"
    )]
    Data {
        /// Of the bytes found.
        found: u32,
        /// In the frame table.
        expected: u32,
    },
    /// A page above the checkpoint differs in one bit from what its record says.
    #[error(
        "one bit of a page is not as it was written: the medium lost it, or this part of the page was not there yet when the power failed"
    )]
    Flipped,
    /// In use, and would be granted.
    #[error(
        "{0} frames are in use, but the bitmap has them free: writes would destroy what they hold"
    )]
    NotUsed(u64),
    /// Used by nothing.
    #[error("{0} frames are not in use, but the bitmap has them so: their space is lost")]
    Leaked(u64),
    /// A line of the bitmap.
    #[error(
        "line {line} of the bitmap, frames {} to {}, is damaged: its checksum does not match",
        frames.start, frames.end - 1
    )]
    Bitmap {
        /// Its number.
        line: u32,
        /// The frames whose bits it has; at its ends maybe some that are none.
        frames: Range<u64>,
    },
    /// Lines of the bitmap that check and yet are not the last that were
    /// written.
    #[error(
        "the bitmap has {found} frames in use, the superblock {expected}: a line of it is older than it should be"
    )]
    Count {
        /// By the bitmap.
        found: u64,
        /// By the superblock and the records above the checkpoint.
        expected: u64,
    },
}

/// What was looked at and what was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Records above the checkpoint, replayed in memory: none after a brick
    /// ended in good order.
    pub records: u64,
    /// Objects that are live or being deleted.
    pub objects: u64,
    /// Page-table nodes read.
    pub nodes: u64,
    /// Pages mapped.
    pub pages: u64,
    /// Pages read and summed.
    pub pages_summed: u64,
    /// The first [`FINDINGS_MAX`] findings.
    pub findings: Vec<Finding>,
    /// Findings beyond those.
    pub more: u64,
    /// Whether every page table could be followed to its end. If not, the
    /// bitmap is only compared where frames are known to be in use.
    pub is_whole: bool,
}

impl Report {
    /// Nothing is wrong.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }

    fn add(&mut self, what: What, place: Place, remedy: Remedy) {
        if self.findings.len() == FINDINGS_MAX {
            self.more += 1;
            return;
        }
        self.findings.push(Finding {
            what,
            place,
            remedy,
        });
    }
}

/// How to check.
pub struct Options<'p> {
    /// Whether a fence orders what reaches the medium: false for `file-sync`.
    pub is_ordered: bool,
    /// Read every mapped page and sum it.
    pub reads_data: bool,
    /// Called with frames visited, and frames in use.
    pub progress: &'p mut dyn FnMut(u64, u64),
}

/// Recovers the pool on `scratch` and checks it; see the module.
///
/// # Errors
/// When there is no pool at all: nothing to check.
pub fn check<M: Media>(
    scratch: &M,
    options: &mut Options<'_>,
) -> Result<(Report, Plan), PoolError> {
    let block = read_superblock(scratch)?;
    let mut report = Report {
        is_whole: true,
        ..Report::default()
    };
    let mut plan = Plan::new(options.is_ordered);
    look_at_superblocks(scratch, &block, &mut report);
    look_at_lanes(scratch, &block, &mut report);
    look_at_in_flight(scratch, &block.geometry, &mut report);
    let (block, bitmap) = match recover(scratch, options.is_ordered, None) {
        Ok(recovery) => {
            report.records = recovery.summary.records;
            look_at_mended(scratch, &recovery, &mut report);
            (recovery.block, Some(recovery.bitmap))
        }
        Err(cause) => {
            let what = What::Recovery(cause.to_string());
            report.add(what, Place::default(), Remedy::Replace);
            report.is_whole = false;
            plan.give_up();
            (block, None)
        }
    };
    let mut walk = Walk::new(scratch, &block, options, &mut report, &mut plan);
    for object in (0..block.objects_end).map(ObjectId) {
        look_at_object(&mut walk, &block.geometry, object);
    }
    let seen = walk.finish();
    if let Some(mut bitmap) = bitmap {
        plan.compare(&mut bitmap, &seen, &mut report);
    }
    Ok((report, plan))
}

fn at(byte: usize) -> Place {
    Place {
        byte: Some(byte as u64),
        ..Place::default()
    }
}

/// A byte of what is an object's.
fn within<M: Media>(media: &M, geometry: &Geometry, object: ObjectId, byte: usize) -> Place {
    let mut bytes = [0; OBJECT_BYTES as usize];
    media.read(geometry.object_at(object), &mut bytes);
    Place {
        object: Some(object),
        slice: Object::examine(&bytes).ok().map(|(entry, _)| entry.slice),
        ..at(byte)
    }
}

fn look_at_superblocks<M: Media>(media: &M, block: &Superblock, report: &mut Report) {
    let pages = superblock_pages(media);
    for (i, page) in pages.iter().enumerate() {
        // A new pool has one copy only.
        if block.generation == 1 && page.iter().all(|&byte| byte == 0) {
            continue;
        }
        if let Err(cause) = Superblock::decode(page) {
            report.add(What::Superblock(cause), at(i * PAGE_BYTES), Remedy::Pool);
        }
    }
}

/// Records that have a flipped bit. Recovery mends them, or says what it
/// cannot.
fn look_at_lanes<M: Media>(media: &M, block: &Superblock, report: &mut Report) {
    for number in 0..block.lanes_end {
        let mended = lane_of(block, number).recover_unordered(media).mended;
        for position in mended {
            let line = position % block.geometry.lane_lines();
            let byte = block.geometry.lane_at(number) as u64 + line * 64;
            let place = Place {
                byte: Some(byte),
                ..Place::default()
            };
            let what = What::Record {
                lane: number,
                position,
            };
            report.add(what, place, Remedy::Pool);
        }
    }
}

/// What recovery mended in the tables, and pages that it mended.
fn look_at_mended<M: Media>(media: &M, recovery: &Recovery, report: &mut Report) {
    let geometry = &recovery.block.geometry;
    for (object, entry) in &recovery.mended_objects {
        let place = Place {
            object: Some(*object),
            slice: (entry.state != State::Free).then_some(entry.slice),
            ..at(geometry.object_at(*object))
        };
        report.add(What::Object, place, Remedy::Pool);
    }
    for slot in &recovery.mended_slots {
        let what = What::Slot {
            level: slot.level,
            bits: slot.bits,
        };
        let first = slot.page.0 / reach(slot.level) * reach(slot.level);
        let place = Place {
            pages: Some(first..first + reach(slot.level)),
            ..within(media, geometry, slot.object, slot.at)
        };
        report.add(what, place, Remedy::Pool);
    }
    for flipped in &recovery.completed {
        let byte = frame_at(flipped.frame);
        let place = Place {
            pages: Some(flipped.page.0..flipped.page.0 + 1),
            frame: Some(flipped.frame.0),
            ..within(media, geometry, flipped.object, byte)
        };
        report.add(What::Flipped, place, Remedy::Pool);
    }
    for bad in &recovery.bad_lines {
        let what = What::Bitmap {
            line: bad.number,
            frames: bad.frames(),
        };
        let byte = recovery.bitmap.line_at(bad.number as usize);
        report.add(what, at(byte), Remedy::Pool);
    }
    if let Some((found, expected)) = recovery.miscounted {
        let what = What::Count { found, expected };
        report.add(what, Place::default(), Remedy::Pool);
    }
}

fn look_at_in_flight<M: Media>(media: &M, geometry: &Geometry, report: &mut Report) {
    let table = in_flight::Table::load(media, geometry.in_flight);
    for damaged in table.damaged() {
        report.add(What::InFlight, at(damaged.at), Remedy::Pool);
    }
}

fn look_at_object<M: Media>(walk: &mut Walk<'_, '_, M>, geometry: &Geometry, object: ObjectId) {
    let entry_at = geometry.object_at(object);
    let mut bytes = [0; OBJECT_BYTES as usize];
    walk.media.read(entry_at, &mut bytes);
    let place = Place {
        object: Some(object),
        ..at(entry_at)
    };
    let root = walk.media.load(entry_at + ROOT_AT);
    // What could be mended, recovery has mended.
    let Ok((entry, _)) = Object::examine(&bytes) else {
        let slice = Some(Object::named(&bytes));
        let place = Place { slice, ..place };
        walk.report.add(What::Object, place, Remedy::Replace);
        // The root has check bits of its own: what is in use can be told.
        let any = Object {
            state: State::Live,
            slice: Object::named(&bytes),
            size_bytes: reach(HEIGHT) * PAGE_BYTES as u64,
            ..Object::FREE
        };
        walk.object(object, &any, entry_at + ROOT_AT);
        return;
    };
    if entry.state != State::Free {
        walk.report.objects += 1;
        walk.object(object, &entry, entry_at + ROOT_AT);
    } else if root != Slot::EMPTY.encode() {
        let place = Place {
            byte: Some((entry_at + ROOT_AT) as u64),
            ..place
        };
        walk.report.add(What::Root, place, Remedy::Pool);
        walk.plan.set(entry_at + ROOT_AT, 0);
    }
}
