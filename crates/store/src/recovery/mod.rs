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

mod error;
mod repair;
mod replay;
mod scan;
mod superblocks;
#[cfg(test)]
mod tests;

use crate::defect::{self, Defect};
use crate::format::bitmap::{Bitmap, DamagedLine};
use crate::format::geometry::tolerate_unreadable_frames;
use crate::format::in_flight;
use crate::format::journal::journal_of;
use crate::format::object::Object;
use crate::format::record::JournalEntry;
use crate::format::superblock::Superblock;
pub use error::PoolError;
use pagemesh_base::ids::{Incarnation, ObjectId, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
pub(crate) use repair::{CorrectedSlot, FlippedPage};
use replay::Replay;
use scan::{DataState, flush_records, in_flight_at_end};
use std::collections::BTreeSet;
pub use superblocks::read_superblock;
pub(crate) use superblocks::{superblock_pages, write_superblock, write_superblocks};

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
            self.withheld,
        ];
        counts.iter().any(|&count| count > 0)
    }
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
/// `trial`, a private mapping.
pub(crate) fn recover<M: Media>(
    media: &M,
    ordered: bool,
    trial: Option<&M>,
) -> Result<RecoveryResult, PoolError> {
    if !ordered && !defect::is(Defect::RecoveryNotSynced) {
        // The previous process's writes in the page cache may still be lost. They must be durable
        // before a slot that names them is stored.
        media.sync()?;
    }
    let mut block = read_superblock(media)?;
    tolerate_unreadable_frames(media, &block.geometry);
    if let Some(trial) = trial {
        tolerate_unreadable_frames(trial, &block.geometry);
    }
    // A single valid superblock may be the older one. The other was being written, which is
    // harmless, or was damaged since.
    let pages = superblock_pages(media);
    let is_alone = pages.iter().any(|page| Superblock::decode(page).is_err());
    let (mut bitmap, bad) = Bitmap::load(media, &block.geometry, block.pool);
    let mut replay = Replay::new(media, &block, !bad.is_empty());
    let mut found = Vec::new();
    let mut table = in_flight::InFlightTable::load(media, block.geometry.in_flight);
    let mut overflowed = Vec::new();
    // The writer of this superblock may have died before its fence. It must be on the medium before
    // the other one is overwritten below.
    let mut stores = match defect::is(Defect::SuperblockNotFlushed) {
        true => Vec::new(),
        false => vec![media.flush(block.offset(), PAGE_BYTES)],
    };
    let mut summary = RecoverySummary::default();
    summary.corrected += table.damaged().len() as u64;
    let must_compare = !table.repair(media, &mut stores);
    let mut journals_used = block.journals_end;
    let journals_read = match is_alone {
        true => block.geometry.journals,
        false => block.journals_end,
    };
    let (mut scans, mut torn) = (Vec::new(), Vec::new());
    for number in 0..journals_read {
        let mut journal = journal_of(&block, number);
        if is_alone && journal.has_next_lap(media) {
            return Err(PoolError::Superseded(number));
        }
        let scan = match ordered {
            true => journal.recover(media)?,
            false => journal.recover_unordered(media),
        };
        if scan.has_older_format {
            return Err(PoolError::OlderFormat(number));
        }
        summary.corrected += scan.corrected.len() as u64;
        summary.dropped += scan.torn_group.len() as u64;
        let entries: Vec<JournalEntry> = scan.entries.into_iter().map(|(_, entry)| entry).collect();
        scans.push((entries, scan.end));
        torn.push(scan.torn_group);
    }
    let read = scans.iter().flat_map(|(entries, _)| entries);
    replay.record_patched_frames(read.clone().filter(|entry| entry.seq() >= block.checkpoint));
    let read = read.chain(torn.iter().flatten());
    let needed = read.filter(|entry| entry.seq() >= block.checkpoint);
    let corrected_slots =
        repair::correct_slots(media, &block.geometry, &bitmap, needed, &mut stores);
    summary.corrected += corrected_slots.len() as u64;
    for (number, torn) in (0..).zip(&torn) {
        if replay.is_partial_group_committed(torn, &scans, ordered) {
            return Err(PoolError::Transaction(number));
        }
    }
    let superseded = match ordered {
        true => replay.superseded_groups(&scans),
        false => BTreeSet::new(),
    };
    let mut flipped = Vec::new();
    for (number, (entries, end)) in (0..).zip(scans) {
        // A group with missing data was never fenced, so it can only be the last. On a file any
        // data since the checkpoint may be missing.
        let last = entries.last().map(JournalEntry::seq);
        let mut kept = Vec::with_capacity(entries.len());
        for group in entries.chunk_by(|one, next| one.seq() == next.seq()) {
            let seq = group[0].seq();
            let suspect = seq >= block.checkpoint && (!ordered || Some(seq) == last);
            let data: Vec<DataState> = match suspect {
                true => group.iter().map(|entry| replay.data_state(entry)).collect(),
                false => Vec::new(),
            };
            let whole = !data.iter().any(|&data| data.is_torn(ordered))
                || group.iter().any(|entry| replay.is_swapped(entry))
                || superseded.contains(&seq);
            if whole {
                for (entry, _) in group
                    .iter()
                    .zip(&data)
                    .filter(|(_, it)| **it != DataState::Intact)
                {
                    match replay.correctable_pages(entry) {
                        Some(pages) => flipped.extend(pages),
                        None => summary.damaged += 1,
                    }
                }
                kept.extend_from_slice(group);
            } else {
                summary.dropped += group.len() as u64;
            }
        }
        let entries = kept;
        if let (true, Some(last)) = (ordered, last) {
            let group = entries.iter().filter(|entry| entry.seq() == last);
            stores.extend(flush_records(media, &block.geometry, number, group));
        }
        let open = in_flight_at_end(&entries).filter(|_| !defect::is(Defect::InFlightLost));
        for mut entry in open {
            entry.1.page.0 += u64::from(defect::is(Defect::InFlightMisplaced));
            match table.add(media, entry.0, entry.1, None) {
                Ok((is_new, stored)) => {
                    summary.in_flight += u64::from(is_new);
                    stores.push(stored);
                }
                Err(in_flight::InFlightTableFull) => overflowed.push(entry.0),
            }
        }
        if end != block.journal_heads[number as usize] {
            journals_used = journals_used.max(number + 1);
        }
        block.journal_heads[number as usize] = end;
        found.extend(
            entries
                .into_iter()
                .filter(|entry| entry.seq() >= block.checkpoint),
        );
    }
    found.sort_unstable_by_key(JournalEntry::seq);
    summary.records = found.len() as u64;
    replay.correct_pages(&mut flipped, &found);
    summary.corrected_pages = flipped.len() as u64;
    if ordered && !defect::is(Defect::ReplayedBeforeFence) {
        // A slot may reach the medium as soon as it is stored. Its page or node must be there
        // before.
        if let Some(stores) = stores.drain(..).reduce(UnfencedStores::and) {
            let _fenced = media.fence(stores);
        }
    }
    // If a record was lost, only the slot tells which frame became free, until a later record of
    // the slot is applied. So the frames are made durable before slots are stored: a recovery after
    // a crash of this one does not need the slot.
    let trial_replay = match trial.filter(|_| !defect::is(Defect::SlotsBeforeFrames)) {
        Some(private) => {
            let mut trial_replay = Replay::new(private, &block, !bad.is_empty());
            trial_replay.apply_all(&found, ordered)?;
            // The private pages hide later corrections in the file, so the trial corrects the
            // entries too.
            trial_replay.repair_objects(&mut RecoverySummary::default());
            trial_replay.mark_compare_all(&overflowed, must_compare);
            Some(trial_replay)
        }
        None => {
            replay.apply_all(&found, ordered)?;
            None
        }
    };
    let applied = trial_replay.as_ref().unwrap_or(&replay);
    let bad_lines: Vec<DamagedLine> = bad
        .into_iter()
        .filter(|bad| !applied.is_explained_by_crash(&bitmap, bad))
        .collect();
    let expected = applied.write_frame_bits(&mut bitmap, block.used_frames);
    // On a file a lost record can make the count wrong by one.
    let is_miscounted = ordered && bad_lines.is_empty() && bitmap.used() != expected;
    let miscounted = is_miscounted.then_some((bitmap.used(), expected));
    summary.bitmap_lines = bad_lines.len() as u64;
    if is_miscounted || !bad_lines.is_empty() {
        summary.withheld = applied.rebuild_bitmap(&mut bitmap, &bad_lines);
    }
    if trial_replay.is_some() {
        if let Some(frames) = bitmap.flush(media) {
            let _fenced = media.fence(frames);
        }
        media.sync()?;
        replay.apply_all(&found, ordered)?;
    }
    let corrected_objects = replay.repair_objects(&mut summary);
    replay.mark_compare_all(&overflowed, must_compare);
    if let Some(last) = found.last() {
        block.checkpoint = Seq(last.seq().0 + 1);
    }
    block.journals_end = journals_used;
    block.objects_end = replay.objects_end;
    block.used_frames = bitmap.used();
    stores.extend(replay.stores);
    stores.extend(bitmap.flush(media));
    if let Some(stores) = stores.into_iter().reduce(UnfencedStores::and) {
        let _fenced = media.fence(stores);
    }
    media.sync()?;
    if !defect::is(Defect::IncarnationKept) {
        block.incarnation = Incarnation(block.incarnation.0 + 1);
    }
    write_superblocks(media, &mut block)?;
    Ok(RecoveryResult {
        block,
        bitmap,
        summary,
        damaged_lines: bad_lines,
        corrected_objects,
        corrected_slots,
        corrected_pages: flipped,
        count_mismatch: miscounted,
    })
}
