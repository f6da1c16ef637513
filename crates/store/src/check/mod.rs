//! Check of an offline pool. The check compares all redundant data: structures that are stored
//! twice, and structures that follow from others. It reports each mismatch.
//!
//! [`check`] first recovers the pool, as an opening would. So it judges the pool of a dead brick in
//! the state that recovery gives it. It recovers on the medium that the caller passes: with a
//! private view (`MappedMedia::overlay`) nothing is written to the pool itself. [`RepairPlan::apply`]
//! writes the repairs that the pool can make by itself.
//!
//! Invariants: a damaged pool never makes the check panic or loop, and the check follows no slot
//! that does not check. A frame is freed only if every page table could be read. Nothing is
//! corrected unless its check bits determine its former value.
//!
//! # Damage that passes
//!
//! - A slot's CRC-8 finds every one and two flipped bits. One in 256 of other damage passes. A node
//!   has neither its object nor its place, so a node with the bytes of another node is believed.
//! - A word of the frame table has four check bits. A flipped bit is found. The check corrects the
//!   checksum in it, and cannot tell a birth: the page then counts as changed for legs that return.
//! - The last group of a journal with two and more flipped bits counts as torn, unless a slot
//!   confirms the rest of it. So does a page of it with one flipped bit, if the power failed before
//!   the slot was flushed.
//! - On a file, a page that was not written whole when the power failed, and that differs in one
//!   bit only from the earlier content of its frame, counts as damaged.

mod plan;
mod walk;

pub use plan::RepairPlan;

use crate::format::geometry::{Geometry, OBJECT_BYTES, frame_at};
use crate::format::in_flight;
use crate::format::journal::journal_of;
use crate::format::object::{HEIGHT, Object, ObjectState, ROOT_AT};
use crate::format::slot::Slot;
use crate::format::superblock::{BadSuperblock, Superblock};
use crate::format::table::reach;
use crate::recovery::{
    PoolError, RecoveryResult, read_superblock, recover, superblock_copies, superblock_pages,
};
use pagemesh_base::ids::ObjectId;
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::ops::Range;
use walk::TableWalk;

/// Findings that are listed one by one; further findings are only counted. So many already prove
/// that the whole medium is broken.
pub const FINDINGS_MAX: usize = 1000;

/// A finding of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of damage, and its effect.
    pub kind: FindingKind,
    /// The damaged location.
    pub location: FindingLocation,
    /// The possible repair.
    pub remedy: Remedy,
}

/// A location in a pool. Unknown parts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FindingLocation {
    /// The object.
    pub object: Option<ObjectId>,
    /// The slice of the object.
    pub slice: Option<SliceId>,
    /// The object's pages concerned.
    pub pages: Option<Range<u64>>,
    /// The frame concerned.
    pub frame: Option<u64>,
    /// The byte of the pool where the damaged structure lies.
    pub byte: Option<u64>,
}

/// The means to repair a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The pool itself: [`RepairPlan::apply`].
    Pool,
    /// Another leg of the volume, when the page is read.
    Leg,
    /// None: the pool must be replaced.
    Replace,
}

/// Kinds of findings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindingKind {
    /// One of the two copies.
    #[error("a superblock is damaged, or was being written when the machine stopped ({0})")]
    Superblock(BadSuperblock),
    /// A flipped bit in the journal.
    #[error("a record of journal {lane} at line {position} has a flipped bit")]
    JournalRecord {
        /// The number of the journal.
        lane: u32,
        /// Its line, counted since the pool was formatted.
        position: u64,
    },
    /// The pool cannot be opened.
    #[error("the pool cannot be recovered: {0}")]
    Recovery(String),
    /// An entry of the object table: its first line, or the copy of it.
    #[error("an entry of the object table is damaged")]
    Object,
    /// The version log: a version that a snapshot sees is lost.
    #[error(
        "a line of the log of versions for snapshots is damaged; a version that a snapshot sees is lost"
    )]
    VersionLog,
    /// A root slot in a free entry.
    #[error("an entry of the object table is free and still has a page table")]
    Root,
    /// The in-flight table.
    #[error("an entry of the in-flight table is damaged")]
    InFlight,
    /// A slot of a page table.
    #[error("a slot of level {level} of the page table is damaged: {bits:#018x}")]
    Slot {
        /// 0 maps a page, a higher level a node.
        level: u8,
        /// The bits as found.
        bits: u64,
    },
    /// A slot that checks, but names no frame of the pool.
    #[error("a slot of level {level} of the page table names a frame that the pool does not have")]
    NoSuchFrame {
        /// 0 maps a page, a higher level a node.
        level: u8,
    },
    /// A frame that two slots name.
    #[error("a slot of level {level} of the page table names a frame that another slot names")]
    Shared {
        /// 0 maps a page, a higher level a node.
        level: u8,
    },
    /// Mapped pages beyond the object's end.
    #[error("pages behind the object's end are mapped")]
    BeyondEnd,
    /// A page with bytes that do not match its checksum.
    #[error(
        "the page's bytes are not those that were written: checksum {found:#010x}, not {expected:#010x}"
    )]
    Data {
        /// The checksum of the bytes found.
        found: u32,
        /// The checksum in the frame table.
        expected: u32,
    },
    /// A word of the frame table: the checksum or the birth of a page.
    #[error("a word of the frame table is damaged: its check bits do not match ({bits:#018x})")]
    FrameWord {
        /// The bits as found.
        bits: u64,
    },
    /// A page of a record above the checkpoint differs in one bit from the record's checksum.
    #[error(
        "one bit of a page is not as it was written: the medium lost it, or a power failure lost this part of the page"
    )]
    Flipped,
    /// Frames that are in use and that the bitmap has as free: they would be granted.
    #[error("{0} frames are in use, but the bitmap has them free: writes would destroy their data")]
    UsedButFree(u64),
    /// Frames that are in use by the bitmap and that no slot names.
    #[error("{0} frames are not in use, but the bitmap has them in use: their space is lost")]
    Leaked(u64),
    /// A line of the bitmap.
    #[error(
        "line {line} of the bitmap, frames {} to {}, is damaged: its checksum does not match",
        frames.start, frames.end - 1
    )]
    Bitmap {
        /// Its number.
        line: u32,
        /// The frames of its bits. At its ends some numbers may not be frames of the pool.
        frames: Range<u64>,
    },
    /// Lines of the bitmap that check and yet are older than the last write.
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

/// The extent and the findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// Records above the checkpoint, replayed in memory. There are none after a brick shut down in
    /// order.
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
    pub unlisted_findings: u64,
    /// Whether every page table could be read to its end. If not, the check compares the bitmap
    /// only for frames that are known to be in use.
    pub is_complete: bool,
}

impl PoolReport {
    /// Nothing is wrong.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.findings.is_empty()
    }

    fn add(&mut self, what: FindingKind, place: FindingLocation, remedy: Remedy) {
        if self.findings.len() == FINDINGS_MAX {
            self.unlisted_findings += 1;
            return;
        }
        self.findings.push(Finding {
            kind: what,
            location: place,
            remedy,
        });
    }
}

/// How to check.
pub struct CheckOptions<'p> {
    /// Whether a fence orders the stores on the medium: false for `file-sync`.
    pub is_ordered: bool,
    /// Read every mapped page and sum it.
    pub reads_data: bool,
    /// Called with the number of frames visited and the number of frames in use.
    pub progress: &'p mut dyn FnMut(u64, u64),
}

/// Recovers the pool on `scratch` and checks it; see the module documentation.
///
/// # Errors
/// When there is no pool at all, so nothing to check.
pub fn check<M: Media>(
    scratch: &M,
    options: &mut CheckOptions<'_>,
) -> Result<(PoolReport, RepairPlan), PoolError> {
    let block = read_superblock(scratch)?;
    let mut report = PoolReport {
        is_complete: true,
        ..PoolReport::default()
    };
    let mut plan = RepairPlan::new(options.is_ordered);
    check_superblocks(scratch, &block, &mut report);
    check_journals(scratch, &block, &mut report);
    check_in_flight(scratch, &block.geometry, &mut report);
    let (block, bitmap) = match recover(scratch, options.is_ordered, None, &[]) {
        Ok(recovery) => {
            report.records = recovery.summary.records;
            report_corrected(scratch, &recovery, &mut report);
            (recovery.block, Some(recovery.bitmap))
        }
        Err(cause) => {
            let what = FindingKind::Recovery(cause.to_string());
            report.add(what, FindingLocation::default(), Remedy::Replace);
            report.is_complete = false;
            plan.mark_impossible();
            (block, None)
        }
    };
    let mut walk = TableWalk::new(scratch, &block, options, &mut report, &mut plan);
    for object in (0..block.objects_end).map(ObjectId) {
        check_object(&mut walk, &block.geometry, object);
    }
    let mut frame_set = walk.finish();
    let log = (&block.version_log, block.pool);
    if !frame_set.add_version_log(scratch, &block.geometry, log) {
        report.add(
            FindingKind::VersionLog,
            FindingLocation::default(),
            Remedy::Replace,
        );
        report.is_complete = false;
    }
    if let Some(mut bitmap) = bitmap {
        plan.compare_bitmap(&mut bitmap, &frame_set, &mut report);
    }
    Ok((report, plan))
}

fn location_at(byte: usize) -> FindingLocation {
    FindingLocation {
        byte: Some(byte as u64),
        ..FindingLocation::default()
    }
}

/// A byte of a structure that belongs to an object.
fn location_in_object<M: Media>(
    media: &M,
    geometry: &Geometry,
    object: ObjectId,
    byte: usize,
) -> FindingLocation {
    let mut bytes = [0; OBJECT_BYTES as usize];
    media.read(geometry.object_at(object), &mut bytes);
    FindingLocation {
        object: Some(object),
        slice: Object::decode_redundant(&bytes)
            .ok()
            .map(|(entry, _)| entry.slice),
        ..location_at(byte)
    }
}

fn check_superblocks<M: Media>(media: &M, block: &Superblock, report: &mut PoolReport) {
    let pages = superblock_pages(media);
    let copies = superblock_copies(media);
    for (i, (page, copy)) in pages.iter().zip(copies).enumerate() {
        // A new pool has one copy only.
        if block.generation == 1 && page.iter().all(|&byte| byte == 0) {
            continue;
        }
        if let Err(cause) = copy {
            report.add(
                FindingKind::Superblock(cause),
                location_at(i * PAGE_BYTES),
                Remedy::Pool,
            );
        }
    }
}

/// Reports records with a flipped bit. Recovery corrects them, or reports those that it cannot.
fn check_journals<M: Media>(media: &M, block: &Superblock, report: &mut PoolReport) {
    for number in 0..block.journals_end {
        let corrected = journal_of(block, number).recover_unordered(media).corrected;
        for position in corrected {
            let line = position % block.geometry.journal_lines();
            let byte = block.geometry.journal_at(number) as u64 + line * 64;
            let place = FindingLocation {
                byte: Some(byte),
                ..FindingLocation::default()
            };
            let what = FindingKind::JournalRecord {
                lane: number,
                position,
            };
            report.add(what, place, Remedy::Pool);
        }
    }
}

/// Reports the table entries, slots, pages and bitmap lines that recovery corrected.
fn report_corrected<M: Media>(media: &M, recovery: &RecoveryResult, report: &mut PoolReport) {
    let geometry = &recovery.block.geometry;
    for (object, entry) in &recovery.corrected_objects {
        let place = FindingLocation {
            object: Some(*object),
            slice: (entry.state != ObjectState::Free).then_some(entry.slice),
            ..location_at(geometry.object_at(*object))
        };
        report.add(FindingKind::Object, place, Remedy::Pool);
    }
    for slot in &recovery.corrected_slots {
        let what = FindingKind::Slot {
            level: slot.level,
            bits: slot.bits,
        };
        let first = slot.page.0 / reach(slot.level) * reach(slot.level);
        let place = FindingLocation {
            pages: Some(first..first + reach(slot.level)),
            ..location_in_object(media, geometry, slot.object, slot.at)
        };
        report.add(what, place, Remedy::Pool);
    }
    for flipped in &recovery.corrected_pages {
        let byte = frame_at(flipped.frame);
        let place = FindingLocation {
            pages: Some(flipped.page.0..flipped.page.0 + 1),
            frame: Some(flipped.frame.0),
            ..location_in_object(media, geometry, flipped.object, byte)
        };
        report.add(FindingKind::Flipped, place, Remedy::Pool);
    }
    for bad in &recovery.damaged_lines {
        let what = FindingKind::Bitmap {
            line: bad.number,
            frames: bad.frames(),
        };
        let byte = recovery.bitmap.line_at(bad.number as usize);
        let place = byte.map_or_else(FindingLocation::default, location_at);
        report.add(what, place, Remedy::Pool);
    }
    if let Some((found, expected)) = recovery.count_mismatch {
        let what = FindingKind::Count { found, expected };
        report.add(what, FindingLocation::default(), Remedy::Pool);
    }
}

fn check_in_flight<M: Media>(media: &M, geometry: &Geometry, report: &mut PoolReport) {
    let table = in_flight::InFlightTable::load(media, geometry.in_flight);
    for damaged in table.damaged() {
        report.add(FindingKind::InFlight, location_at(damaged.at), Remedy::Pool);
    }
}

fn check_object<M: Media>(walk: &mut TableWalk<'_, '_, M>, geometry: &Geometry, object: ObjectId) {
    let entry_at = geometry.object_at(object);
    let mut bytes = [0; OBJECT_BYTES as usize];
    walk.media.read(entry_at, &mut bytes);
    let place = FindingLocation {
        object: Some(object),
        ..location_at(entry_at)
    };
    let root = walk.media.load(entry_at + ROOT_AT);
    // Recovery has corrected every entry that it can.
    let Ok((entry, _)) = Object::decode_redundant(&bytes) else {
        let slice = Some(Object::claimed_slice(&bytes));
        let place = FindingLocation { slice, ..place };
        walk.report.add(FindingKind::Object, place, Remedy::Replace);
        // The root has check bits of its own, so the frames in use can still be found.
        let any = Object {
            state: ObjectState::Live,
            slice: Object::claimed_slice(&bytes),
            size_bytes: reach(HEIGHT) * PAGE_BYTES as u64,
            ..Object::FREE
        };
        walk.visit_object(object, &any, entry_at + ROOT_AT);
        return;
    };
    if entry.state != ObjectState::Free {
        walk.report.objects += 1;
        walk.visit_object(object, &entry, entry_at + ROOT_AT);
    } else if root != Slot::EMPTY.encode() {
        let place = FindingLocation {
            byte: Some((entry_at + ROOT_AT) as u64),
            ..place
        };
        walk.report.add(FindingKind::Root, place, Remedy::Pool);
        walk.plan.set_word(entry_at + ROOT_AT, 0);
    }
}
