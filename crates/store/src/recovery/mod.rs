//! Recovery of a pool: from superblock and journal tails to a usable pool. The time is proportional
//! to the records above the checkpoint, not to the pool's content.
//!
//! Invariants:
//! - Recovery applies every valid record above the checkpoint, in seq order.
//! - Only the last group of a journal may be incomplete, and then none of its records is applied. A
//!   single record is a group of one. On `file-sync` pools any group may be incomplete, since
//!   nothing is promised before an fdatasync.
//! - Nothing is granted before the recovered state is persistent under a new incarnation in both
//!   superblocks. If one of them is damaged later, the other leads to the same journals.
//!
//! # Steps
//!
//! 1. [`superblocks::read_superblock`] chooses the valid copy of the higher generation. A newer
//!    version in either copy is refused. With only one valid copy every journal is read, and a
//!    journal that has wrapped by a lap is an error: records were freed that the older superblock
//!    needs.
//! 2. The scan reads the records of each journal that was ever used, from its head on. A bad line
//!    ends the journal if nothing valid follows its group. Otherwise the medium lost a fenced line,
//!    which is an error. Only the data of the last group is checked, because a journal has at most
//!    one unfenced group. On `file-sync` pools lines persist in any order: the data of every record
//!    above the checkpoint is checked, after a sync of the dead process's page cache.
//! 3. Operations that may be missing on another leg go to the in-flight table, as far back as the
//!    `open` of the last record says.
//! 4. The replay applies the records of all journals in seq order, then marks their frames as used.
//!    On `file-sync` pools both happen on the overlay first, and frames are durable before the file
//!    gets a slot: where a record was lost, only the old slot identifies the free frame.
//! 5. The recovered state is flushed and fenced. The headers of further devices get the next
//!    incarnation, so that a copy of a device from an earlier opening is refused. New superblocks with the next incarnation, and
//!    with every journal's head at its end, make all old records invalid. Only then can sessions
//!    open.
//!
//! # Damage
//!
//! - A record or an in-flight entry with one flipped bit is corrected, and so is a slot above the
//!   leaves that a record needs, before the replay.
//! - A bitmap line with a wrong checksum was torn if the records explain it. Otherwise it was
//!   damaged, and is rebuilt from the page tables (RFD 006).
//! - A page that differs in one bit from its record's checksum has a flipped bit, or it was never
//!   written whole: its frame may have held an older version. Where records are ordered, only the
//!   last record of a journal can be in doubt, and recovery drops it unless a slot or another
//!   record shows that it was committed. On a file recovery keeps it, so that a read of the page
//!   fails instead of returning the older page.

mod ahead;
mod device_headers;
mod error;
mod repair;
mod replay;
mod scan;
mod superblocks;
#[cfg(test)]
mod tests;

use crate::defect::{self, Defect};
use crate::format::bitmap::{Bitmap, DamagedLine};
use crate::format::geometry::{frame_at, tolerate_unreadable_frames};
use crate::format::in_flight;
use crate::format::object::Object;
use crate::format::record::JournalEntry;
use crate::format::superblock::Superblock;
use crate::format::version_log::{
    LogFrame, Version, VersionLogPlace, append_lines, lines_within_room, load_versions,
};
pub(crate) use ahead::PAGES_AHEAD;
pub use error::PoolError;
use pagemesh_base::ids::{Incarnation, ObjectId, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use repair::BitmapRepair;
pub(crate) use repair::{CorrectedSlot, FlippedPage};
use replay::Replay;
use std::collections::HashSet;
pub use superblocks::read_superblock;
pub(crate) use superblocks::{
    read_superblock_of_first, superblock_copies, superblock_pages, write_superblock,
    write_superblocks,
};
use uuid::Uuid;

/// The results of recovery, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoverySummary {
    /// Records replayed.
    pub records: u64,
    /// Records dropped because they were incomplete, and so unacknowledged.
    pub dropped: u64,
    /// Operations added to the in-flight table.
    pub in_flight: u64,
    /// Damage by the medium that was corrected: in records, in entries of the in-flight table and
    /// of the object table, and in slots above the leaves that records need.
    pub corrected: u64,
    /// Records applied although their data is damaged. A read of that data is an error until it is
    /// written again.
    pub damaged: u64,
    /// Pages that differed in one bit from their record and were corrected. The medium lost the
    /// bit, or a crash lost a part of the page and its frame held an older version of it.
    pub corrected_pages: u64,
    /// Versions for snapshots that the version log had no room for.
    pub versions_lost: u64,
    /// Damaged lines of the bitmap that were rebuilt.
    pub bitmap_lines: u64,
    /// Entries of the object table that are lost. Their slices are refused, and all others are
    /// served.
    pub objects_lost: u64,
    /// Frames of those lines that may be free and are withheld, because a page table is damaged
    /// too.
    pub withheld: u64,
}

impl RecoverySummary {
    /// Whether the medium had lost data that was persistent.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        let counts = [
            self.corrected,
            self.damaged,
            self.bitmap_lines,
            self.objects_lost,
            self.versions_lost,
            self.withheld,
        ];
        counts.iter().any(|&count| count > 0)
    }
}

/// Appends versions that the replayed records replaced to the version log. Without room for all of them, snapshots lack pages, and the
/// slices are served. Returns the number of versions that are lost.
fn append_versions<M: Media>(
    media: &M,
    log: &mut VersionLogPlace,
    pool: Uuid,
    kept: &[Version],
    stores: &mut Vec<UnfencedStores>,
) -> Result<u64, PoolError> {
    if kept.is_empty() {
        return Ok(0);
    }
    if !log.is_present() {
        return Err(PoolError::NoVersionLog);
    }
    let lost = (kept.len() as u64).saturating_sub(log.room());
    let lines = lines_within_room(log, kept).into_iter();
    let read = |frame, into: &mut [u8; PAGE_BYTES]| media.read(frame_at(frame), into);
    for LogFrame { frame, bytes } in append_lines(log, pool, lines, read) {
        let (_, streamed) = M::stream_page(&[(media, frame_at(frame))], &bytes);
        stores.push(streamed);
    }
    Ok(lost)
}

/// A recovered pool.
pub(crate) struct RecoveryResult {
    pub(crate) block: Superblock,
    pub(crate) bitmap: Bitmap,
    pub(crate) summary: RecoverySummary,
    /// Lines of the bitmap that were damaged.
    pub(crate) damaged_lines: Vec<DamagedLine>,
    /// Entries of the object table that were corrected.
    pub(crate) corrected_objects: Vec<(ObjectId, Object)>,
    /// Slots of page tables that were corrected.
    pub(crate) corrected_slots: Vec<CorrectedSlot>,
    /// Pages in which one wrong bit was corrected.
    pub(crate) corrected_pages: Vec<FlippedPage>,
    /// Frames in use by the bitmap and by the superblock, if the two differ.
    pub(crate) count_mismatch: Option<(u64, u64)>,
}

/// Replays the journal and starts a new incarnation. On a `file-sync` pool it replays first on
/// `trial`, a private mapping. It takes the `failed` devices for lost, and names them so.
pub(crate) fn recover<M: Media>(
    media: &M,
    ordered: bool,
    trial: Option<&M>,
    failed: &[Uuid],
) -> Result<RecoveryResult, PoolError> {
    let mut recovery = Recovery::begin(media, ordered, trial, failed)?;
    let journals = recovery.scan_journals()?;
    recovery.correct_slots(&journals);
    recovery.check_torn_groups(&journals)?;
    // Its journal heads are those of the checkpoint.
    let mut loaded = recovery.block.clone();
    let records = recovery.select_records(journals.whole);
    recovery.correct_pages(&records);
    recovery.fence_records();
    recovery.name_failed_devices(&mut loaded)?;
    let trial_replay = recovery.replay_on_trial(trial, &records)?;
    if let Some(trial) = &trial_replay {
        recovery.log_versions(&mut loaded, &trial.kept)?;
    }
    let bitmap_repair = recovery.repair_bitmap(trial_replay.as_ref());
    if trial_replay.is_some() {
        recovery.replay_on_file(&records)?;
    }
    let corrected_objects = recovery.repair_objects();
    recovery.start_incarnation(&records)?;
    Ok(recovery.into_result(bitmap_repair, corrected_objects))
}

/// A recovery in progress.
struct Recovery<'m, M> {
    media: &'m M,
    /// Whether the medium keeps the order of fences; false for a file.
    ordered: bool,
    block: Superblock,
    /// Only one superblock is valid. It may be the older one: the other was being written, which is
    /// harmless, or was damaged since.
    is_alone: bool,
    /// The superblock does not name a device as failed yet.
    has_new_failure: bool,
    bitmap: Bitmap,
    /// Lines of the bitmap with a wrong checksum.
    torn_lines: Vec<DamagedLine>,
    table: in_flight::InFlightTable,
    /// An entry of the in-flight table is lost, so every object must be compared.
    must_compare: bool,
    /// Objects with in-flight operations that the table has no room for.
    overflowed: Vec<ObjectId>,
    replay: Replay<'m, M>,
    /// Stores before the replay, to be fenced.
    stores: Vec<UnfencedStores>,
    corrected_slots: Vec<CorrectedSlot>,
    flipped: Vec<FlippedPage>,
    summary: RecoverySummary,
}

impl<'m, M: Media> Recovery<'m, M> {
    /// Reads superblock, bitmap and in-flight table, and repairs the table.
    fn begin(
        media: &'m M,
        ordered: bool,
        trial: Option<&M>,
        failed: &[Uuid],
    ) -> Result<Recovery<'m, M>, PoolError> {
        if !ordered && !defect::is(Defect::RecoveryNotSynced) {
            // The previous process's writes in the page cache may still be lost. They must be
            // durable before a slot that names them is stored.
            media.sync()?;
        }
        let (mut block, has_new_failure) = superblocks::read_superblock_without(media, failed)?;
        device_headers::check(media, &block)?;
        tolerate_unreadable_frames(media, &block.geometry);
        if let Some(trial) = trial {
            tolerate_unreadable_frames(trial, &block.geometry);
            for device in block.geometry.devices.failed() {
                trial.attach_absent(device.bytes())?;
            }
        }
        let is_alone = superblock_copies(media).iter().any(Result::is_err);
        let (geometry, ends) = (&block.geometry, block.bitmap_ends);
        let (bitmap, torn_lines) = Bitmap::load(media, geometry, block.pool, ends);
        if has_new_failure {
            // The count of the superblock has frames of these devices.
            block.used_frames = bitmap.used();
        }
        let mut table = in_flight::InFlightTable::load(media, block.geometry.in_flight);
        // The writer of this superblock may have died before its fence. It must be on the medium
        // before the other one is overwritten at the end.
        let mut stores = if defect::is(Defect::SuperblockNotFlushed) {
            Vec::new()
        } else {
            vec![media.flush(block.offset(), PAGE_BYTES)]
        };
        let summary = RecoverySummary {
            corrected: table.damaged().len() as u64,
            ..RecoverySummary::default()
        };
        let must_compare = !table.repair(media, &mut stores);
        Ok(Recovery {
            media,
            ordered,
            is_alone,
            has_new_failure,
            bitmap,
            table,
            must_compare,
            overflowed: Vec::new(),
            replay: Replay::new(media, &block, !torn_lines.is_empty()),
            torn_lines,
            stores,
            corrected_slots: Vec::new(),
            flipped: Vec::new(),
            summary,
            block,
        })
    }

    /// Makes everything that the replay relies on durable.
    fn fence_records(&mut self) {
        if self.ordered && !defect::is(Defect::ReplayedBeforeFence) {
            // A slot may reach the medium as soon as it is stored. Its page or node must be there
            // before.
            if let Some(stores) = self.stores.drain(..).reduce(UnfencedStores::and) {
                let _fenced = self.media.fence(stores);
            }
        }
    }

    /// Names devices that have just failed in both superblocks. The replay stores slots with frames of them, because their
    /// records count although nobody can compare them with their data. A later recovery with such a device would find other
    /// data there, so it must not use the device. The superblock is the loaded one otherwise, so that a later recovery
    /// replays the same records.
    fn name_failed_devices(&mut self, loaded: &mut Superblock) -> Result<(), PoolError> {
        if self.has_new_failure && !defect::is(Defect::FailureNamedAfterReplay) {
            // A recovery from one superblock alone has found records in further journals.
            loaded.journals_end = self.block.journals_end;
            write_superblocks(self.media, loaded)?;
            self.block.generation = loaded.generation;
        }
        Ok(())
    }

    /// On a file: makes the versions that the records replace durable in the log, before slots are stored. If a record was
    /// lost, only the slot tells which version a later record replaces. A recovery after a crash of this one finds the
    /// versions in the log.
    fn log_versions(&mut self, loaded: &mut Superblock, kept: &[Version]) -> Result<(), PoolError> {
        let log = loaded.version_log;
        let logged = load_versions(self.media, &log, loaded.pool);
        let logged: HashSet<_> = logged.into_iter().flatten().map(|it| it.frame).collect();
        let new = kept
            .iter()
            .filter(|version| !logged.contains(&version.frame));
        let new: Vec<Version> = new.copied().collect();
        if new.is_empty() || defect::is(Defect::RecoveredVersionsLost) {
            return Ok(());
        }
        let mut stores = Vec::new();
        let log = &mut loaded.version_log;
        self.summary.versions_lost +=
            append_versions(self.media, log, loaded.pool, &new, &mut stores)?;
        if let Some(stores) = stores.into_iter().reduce(UnfencedStores::and) {
            let _fenced = self.media.fence(stores);
        }
        self.media.sync()?;
        loaded.journals_end = self.block.journals_end;
        write_superblocks(self.media, loaded)?;
        self.block.generation = loaded.generation;
        self.block.version_log = loaded.version_log;
        Ok(())
    }

    /// Replays the records: on the private mapping, if there is one, otherwise on the medium.
    /// Returns the replay on the private mapping.
    ///
    /// If a record was lost, only the slot tells which frame became free, until a later record of
    /// the slot is applied. So the frames are made durable before slots are stored: a recovery after
    /// a crash of this one does not need the slot.
    fn replay_on_trial<'t>(
        &mut self,
        trial: Option<&'t M>,
        records: &[JournalEntry],
    ) -> Result<Option<Replay<'t, M>>, PoolError> {
        let Some(private) = trial.filter(|_| !defect::is(Defect::SlotsBeforeFrames)) else {
            self.replay.apply_all(records, self.ordered)?;
            return Ok(None);
        };
        let mut replay = Replay::new(private, &self.block, !self.torn_lines.is_empty());
        replay.apply_all(records, self.ordered)?;
        // The private pages hide later corrections in the file, so the trial corrects the entries
        // too.
        replay.repair_objects(&mut RecoverySummary::default());
        replay.mark_compare_all(&self.overflowed, self.must_compare);
        Ok(Some(replay))
    }

    /// Makes the bitmap durable, then replays the records on the file.
    fn replay_on_file(&mut self, records: &[JournalEntry]) -> Result<(), PoolError> {
        if let Some(frames) = self.bitmap.flush(self.media) {
            let _fenced = self.media.fence(frames);
        }
        self.media.sync()?;
        self.replay.apply_all(records, self.ordered)
    }

    /// Makes the recovered state durable, under a new incarnation in both superblocks.
    fn start_incarnation(&mut self, records: &[JournalEntry]) -> Result<(), PoolError> {
        let block = &mut self.block;
        if let Some(last) = records.last() {
            block.checkpoint = Seq(last.seq().0 + 1);
        }
        block.objects_end = self.replay.objects_end;
        block.used_frames = self.bitmap.used();
        if !defect::is(Defect::RecoveredBitmapEndNotStored) {
            block.bitmap_ends = *self.bitmap.ends();
        }
        // On a file they are in the log.
        if self.ordered && !defect::is(Defect::RecoveredVersionsLost) {
            self.summary.versions_lost += append_versions(
                self.media,
                &mut block.version_log,
                block.pool,
                &self.replay.kept,
                &mut self.stores,
            )?;
        }
        block.version_log.is_counted |= block.version_log.is_present();
        self.stores.append(&mut self.replay.stores);
        self.stores.extend(self.bitmap.flush(self.media));
        if let Some(stores) = self.stores.drain(..).reduce(UnfencedStores::and) {
            let _fenced = self.media.fence(stores);
        }
        self.media.sync()?;
        if !defect::is(Defect::IncarnationKept) {
            block.incarnation = Incarnation(block.incarnation.0 + 1);
        }
        if !defect::is(Defect::DeviceHeadersLast) {
            device_headers::write(self.media, block)?;
        }
        write_superblocks(self.media, block)?;
        if defect::is(Defect::DeviceHeadersLast) {
            device_headers::write(self.media, block)?;
        }
        Ok(())
    }

    fn into_result(
        self,
        bitmap_repair: BitmapRepair,
        corrected_objects: Vec<(ObjectId, Object)>,
    ) -> RecoveryResult {
        RecoveryResult {
            block: self.block,
            bitmap: self.bitmap,
            summary: self.summary,
            damaged_lines: bitmap_repair.damaged_lines,
            corrected_objects,
            corrected_slots: self.corrected_slots,
            corrected_pages: self.flipped,
            count_mismatch: bitmap_repair.count_mismatch,
        }
    }
}
