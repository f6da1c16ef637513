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

use crate::defect::{self, Defect};
use crate::format::bitmap::{Bitmap, DamagedLine};
use crate::format::frame_set::FrameSet;
use crate::format::geometry::{Geometry, OBJECT_BYTES};
use crate::format::in_flight;
use crate::format::journal::{Journal, JournalDamage};
use crate::format::object::{COPY_AT, COPY_BYTES, HEIGHT, Object, ROOT_AT};
use crate::format::record::{Change, JournalEntry, Record, RecordAddress};
use crate::format::slot::Slot;
use crate::format::superblock::{BadSuperblock, COUNT_MAX, Superblock};
use crate::format::table::{BadTable, PageTable, SlotLocation};
use crate::shared::pool_mapping::{frame_at, tolerate_unreadable_frames};
use crate::shared::slot_repair::{self, CorrectedSlot};
use pagemesh_base::checksum::{crc32c, flipped_bit, word_sum};
use pagemesh_base::ids::{FrameNo, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::slice::InFlightOp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Media, UnfencedStores};
use std::collections::{BTreeMap, BTreeSet};

/// Why a pool cannot be opened or cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No valid superblock.
    #[error(transparent)]
    Superblock(#[from] BadSuperblock),
    /// The file or device is shorter than the pool.
    #[error(
        "the pool has {wanted} bytes but its file only {found}; it was truncated, restore it from a copy"
    )]
    Truncated {
        /// Bytes of the pool.
        wanted: u64,
        /// Bytes there.
        found: u64,
    },
    /// The journal lost a record that was persistent.
    #[error("{0}; the medium lost it: replace the pool and let the volume copy it anew")]
    Journal(#[from] JournalDamage),
    /// A record that only an older build reads.
    #[error(
        "journal {0} holds a record of an older build, which this one does not read; start the older build and stop it in order once, so that it closes the pool"
    )]
    OlderFormat(u32),
    /// A part of a transaction is lost.
    #[error(
        "journal {0} lost a part of a transaction that was persistent; replace the pool and let the volume copy it anew"
    )]
    Transaction(u32),
    /// The newer superblock is lost, and the older one no longer matches the journals.
    #[error(
        "one superblock is damaged, and the other is too old: journal {0} continued after it was written; replace the pool and let the volume copy it anew"
    )]
    Superseded(u32),
    /// A record that was persistent names data that is damaged.
    #[error("the record with seq {0} is valid but its data is damaged; replace the pool")]
    Data(Seq),
    /// A page table is damaged.
    #[error("{0}; replace the pool and let the volume copy it anew")]
    Table(#[from] BadTable),
    /// A page table cannot be read.
    #[error(
        "byte {0} of the pool, in a page table, cannot be read; replace the pool and let the volume copy it anew"
    )]
    Unreadable(usize),
    /// A valid record with impossible content.
    #[error(
        "the record with seq {0} is impossible: its seq or a frame is out of range; replace the pool and let the volume copy it anew"
    )]
    Record(Seq),
    /// A frame that was in use twice.
    #[error(
        "frame {0} was freed twice: a page table is damaged; replace the pool and let the volume copy it anew"
    )]
    FreedTwice(u64),
    /// A record of an object that the pool does not have.
    #[error(
        "a record names entry {0} of the object table, which the pool does not have; replace the pool and let the volume copy it anew"
    )]
    Object(u32),
    /// The system refused.
    #[error(transparent)]
    System(#[from] MapError),
    /// An earlier failure; the persistent state is unknown since.
    #[error("the pool has failed earlier; open it again")]
    Failed,
    /// A session's journal holds an impossible record.
    #[error(
        "journal {0} holds a damaged or impossible record; stop the brick and run `pagemesh pool check` on the pool"
    )]
    Session(u32),
}

/// Reads the valid superblock of the higher generation.
///
/// # Errors
/// When there is none, or the medium is shorter than the pool.
pub fn read_superblock<M: Media>(media: &M) -> Result<Superblock, PoolError> {
    let found = media.len_bytes() as u64;
    if found < 2 * PAGE_BYTES as u64 {
        return Err(BadSuperblock::NotAPool.into());
    }
    let pages = superblock_pages(media);
    let block = Superblock::choose([&pages[0], &pages[1]])?;
    let wanted = block.geometry.pool_bytes;
    if found < wanted {
        return Err(PoolError::Truncated { wanted, found });
    }
    Ok(block)
}

/// The two superblock pages of a medium.
pub(crate) fn superblock_pages<M: Media>(media: &M) -> [[u8; PAGE_BYTES]; 2] {
    let mut pages = [[0; PAGE_BYTES]; 2];
    media.read(0, &mut pages[0]);
    media.read(PAGE_BYTES, &mut pages[1]);
    pages
}

/// Streams a superblock to both pages, one after the other.
pub(crate) fn write_superblocks<M: Media>(
    media: &M,
    block: &mut Superblock,
) -> Result<(), MapError> {
    for _ in 0..2 {
        block.generation += 1;
        write_superblock(media, block)?;
    }
    Ok(())
}

/// Streams a superblock to its page and makes it durable.
pub(crate) fn write_superblock<M: Media>(media: &M, block: &Superblock) -> Result<(), MapError> {
    let (_, stores) = M::stream_page(&[(media, block.offset())], &block.encode());
    let _fenced = media.fence(stores);
    media.sync()
}

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
        slot_repair::correct_slots(media, &block.geometry, &bitmap, needed, &mut stores);
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

/// Flushes the last records of a journal, and their data. Their writer may have died before the
/// fence; earlier records were fenced.
fn flush_records<'e, M: Media>(
    media: &M,
    geometry: &Geometry,
    number: u32,
    records: impl Iterator<Item = &'e JournalEntry>,
) -> Vec<UnfencedStores> {
    let journal = geometry.journal_at(number);
    let mut stores = vec![media.flush(journal, geometry.journal_bytes as usize)];
    for entry in records {
        let JournalEntry::Map(record) = entry else {
            continue;
        };
        let frames = record
            .changes
            .iter()
            .filter_map(|change| change.new.frame());
        // Applying a record with a frame outside the pool returns an error later.
        let frames = frames.filter(|frame| geometry.frame_numbers().contains(&frame.0));
        stores.extend(frames.map(|frame| media.flush(frame_at(frame), PAGE_BYTES)));
    }
    stores
}

pub(crate) fn journal_of(block: &Superblock, number: u32) -> Journal {
    let place = RecordAddress::new(
        block.pool,
        block.incarnation,
        number,
        block.journal_heads[number as usize],
    );
    Journal::new(
        block.geometry.journal_at(number),
        block.geometry.journal_lines(),
        place,
    )
}

/// Operations that may be incomplete on other legs, as far back as the last operation's `open`
/// count reaches.
fn in_flight_at_end(entries: &[JournalEntry]) -> impl Iterator<Item = (ObjectId, InFlightOp)> {
    let mut oldest = None;
    let mut open = Vec::new();
    for entry in entries.iter().rev() {
        let JournalEntry::Map(record) = entry else {
            continue;
        };
        let Some(found) = in_flight_of(record) else {
            continue;
        };
        let oldest = *oldest.get_or_insert(record.op - u64::from(record.open).min(record.op));
        if record.op < oldest {
            break;
        }
        open.push((record.object, found));
    }
    open.into_iter()
}

/// The in-flight entry of a client's record. Records of the owner and records that link nodes have
/// none.
pub(crate) fn in_flight_of(record: &Record) -> Option<InFlightOp> {
    (record.level == 0 && record.op != 0).then_some(InFlightOp {
        page: record.page,
        count: record.changes.len() as u32,
        epoch: record.epoch,
        op: record.op,
    })
}

/// The state of the data that a record names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DataState {
    Intact,
    /// One bit of a page differs. The medium damaged it since, or a crash lost a part of the page
    /// and its frame held an older version. A torn page may look like that, too.
    Flipped,
    /// As `Flipped`, of one page. The second sum proves the right content in both cases: this bit
    /// must be flipped back.
    Correctable(usize),
    /// A page cannot be read, so it is unknown whether it was written.
    Unreadable,
    /// The data was not written, or not as a whole.
    Torn,
}

impl DataState {
    /// Whether the record was never committed, unless its slot shows that it was. Without a second
    /// sum a wrong bit has two explanations. If only the last record of a journal is in doubt, the
    /// likelier one counts: that it was not committed. On a file that would hide a flip in data
    /// that was synced since the checkpoint. So there the record counts, with a damaged page.
    fn is_torn(self, ordered: bool) -> bool {
        match self {
            // An unreadable page that was acknowledged must not be replaced by an older one.
            DataState::Intact | DataState::Correctable(_) | DataState::Unreadable => false,
            DataState::Flipped => ordered && !defect::is(Defect::NearlyWholeKept),
            DataState::Torn => true,
        }
    }
}

/// A page with one wrong bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlippedPage {
    /// The seq of the record with the right checksum.
    seq: Seq,
    pub(crate) object: ObjectId,
    pub(crate) page: PageNo,
    pub(crate) frame: FrameNo,
    /// The bit's number in the frame.
    bit: usize,
}

/// Applies records in seq order to a pool that is not in use.
struct Replay<'m, M> {
    media: &'m M,
    geometry: Geometry,
    objects_end: u32,
    /// Frames that records name, with their use at the checkpoint and at the end.
    in_use: BTreeMap<u64, (bool, bool)>,
    /// All changes of frames by records, in order; recorded if a line of the bitmap is damaged.
    changes: Option<Vec<(u64, bool)>>,
    /// Frames that records change in place, each with the last such record.
    patched_frames: BTreeMap<u64, Seq>,
    stores: Vec<UnfencedStores>,
}

impl<'m, M: Media> Replay<'m, M> {
    fn new(media: &'m M, block: &Superblock, keeps_changes: bool) -> Replay<'m, M> {
        Replay {
            media,
            geometry: block.geometry,
            objects_end: block.objects_end,
            in_use: BTreeMap::new(),
            changes: keeps_changes.then(Vec::new),
            patched_frames: BTreeMap::new(),
            stores: Vec::new(),
        }
    }

    /// Records the frames that these records change in place.
    fn record_patched_frames<'e>(&mut self, entries: impl Iterator<Item = &'e JournalEntry>) {
        for entry in entries {
            if let JournalEntry::Map(record) = entry
                && let (true, Some(frame)) = (record.is_patch(), record.changes[0].new.frame())
            {
                let last = self.patched_frames.entry(frame.0).or_insert(record.seq);
                *last = record.seq.max(*last);
            }
        }
    }

    /// Whether patches changed the frame's bytes, so that they no longer match this record. For a
    /// newly allocated frame only later patches count. The session that made such a patch had found
    /// this record's slot, so this record was committed. If the record keeps its frame, it wrote no
    /// bytes, and bytes of earlier patches may still be missing.
    fn is_patched(&self, record: &Record, change: &Change) -> bool {
        if defect::is(Defect::PatchedPageTorn) {
            return false;
        }
        let frame = change.new.frame();
        let last = frame.and_then(|frame| self.patched_frames.get(&frame.0));
        last.is_some_and(|&last| change.old.frame() == frame || last > record.seq)
    }

    fn data_state(&self, entry: &JournalEntry) -> DataState {
        let JournalEntry::Map(record) = entry else {
            return DataState::Intact;
        };
        if defect::is(Defect::SkippedCrc) {
            return DataState::Intact;
        }
        let changes = record.changes.iter();
        changes.fold(DataState::Intact, |so_far, change| {
            so_far.max(self.change_data_state(record, change))
        })
    }

    fn change_data_state(&self, record: &Record, change: &Change) -> DataState {
        let Some(frame) = change.new.frame() else {
            return DataState::Intact;
        };
        if !self.geometry.frame_numbers().contains(&frame.0) {
            return DataState::Torn;
        }
        if record.level > 0 || record.is_patch() || self.is_patched(record, change) {
            return DataState::Intact;
        }
        let mut page = [0; PAGE_BYTES];
        self.media.read(frame_at(frame), &mut page);
        let sum = crc32c(&page);
        let is_right = |page: &[u8]| word_sum(page) == change.sums.words;
        if sum == change.sums.crc {
            return match !record.has_second_sum || is_right(&page) {
                true => DataState::Intact,
                false => DataState::Torn,
            };
        }
        let is_unreadable = self.media.is_unreadable(frame_at(frame));
        if is_unreadable && !defect::is(Defect::UnreadableDropped) {
            return DataState::Unreadable;
        }
        let Some(bit) = flipped_bit(PAGE_BYTES, sum, change.sums.crc) else {
            return DataState::Torn;
        };
        if !record.has_second_sum || defect::is(Defect::NearlyWholeKept) {
            return DataState::Flipped;
        }
        page[bit / 8] ^= 1 << (bit % 8);
        match is_right(&page) {
            true => DataState::Correctable(bit),
            false => DataState::Torn,
        }
    }

    /// The pages of a record in which one known bit is wrong. None if another page is damaged in
    /// another way.
    fn correctable_pages(&self, entry: &JournalEntry) -> Option<Vec<FlippedPage>> {
        let JournalEntry::Map(record) = entry else {
            return Some(Vec::new());
        };
        let mut flipped = Vec::new();
        for (page, change) in (record.page.0..).map(PageNo).zip(&record.changes) {
            match (self.change_data_state(record, change), change.new.frame()) {
                (DataState::Correctable(bit), Some(frame)) => flipped.push(FlippedPage {
                    seq: record.seq,
                    object: record.object,
                    page,
                    frame,
                    bit,
                }),
                (DataState::Intact, _) => {}
                _ => return None,
            }
        }
        Some(flipped)
    }

    /// Corrects these pages, except those in frames with newer users. The applied records, in
    /// order, name the users.
    fn correct_pages(&mut self, flipped: &mut Vec<FlippedPage>, records: &[JournalEntry]) {
        let names = |entry: &JournalEntry, frame| match entry {
            JournalEntry::Map(record) => {
                let mut named = record.changes.iter().map(|change| change.new.frame());
                record.level == 0 && named.any(|named| named == Some(frame))
            }
            JournalEntry::Object(_) => false,
        };
        flipped.retain(|flipped| {
            let newest = records.iter().rfind(|entry| names(entry, flipped.frame));
            newest.is_some_and(|entry| entry.seq() == flipped.seq)
        });
        for FlippedPage { frame, bit, .. } in flipped {
            let at = frame_at(*frame) + *bit / 64 * 8;
            self.media.store(at, self.media.load(at) ^ 1 << (*bit % 64));
            self.stores.push(self.media.flush(at, 8));
        }
    }

    /// Last groups of journals with missing data, if other records found their slots swapped. Locks
    /// are released only after the fence, so such a group was committed and its page was damaged
    /// since. If the group were dropped, its frame would be freed without ever having been in use.
    fn superseded_groups(&self, scans: &[(Vec<JournalEntry>, u64)]) -> BTreeSet<Seq> {
        let last = scans.iter().filter_map(|(entries, _)| {
            let seq = entries.last()?.seq();
            let group: Vec<&JournalEntry> = entries.iter().filter(|it| it.seq() == seq).collect();
            Some((seq, group))
        });
        let torn = last.filter(|(_, group)| {
            group
                .iter()
                .any(|it| self.data_state(it) != DataState::Intact)
        });
        let superseded = torn.filter(|(_, group)| group.iter().any(|it| is_superseded(it, scans)));
        superseded.map(|(seq, _)| seq).collect()
    }

    /// Whether an incomplete group was committed, so that the medium has lost some of its records.
    fn is_partial_group_committed(
        &self,
        rest: &[JournalEntry],
        scans: &[(Vec<JournalEntry>, u64)],
        ordered: bool,
    ) -> bool {
        let is_its = |entry| self.is_swapped(entry) || ordered && is_superseded(entry, scans);
        rest.iter().any(is_its) && !defect::is(Defect::GroupHalfRecovered)
    }

    /// Whether a slot is the one that the record publishes. Slots are swapped only after the fence,
    /// so the record was committed, and a page that does not match its checksum was damaged since.
    /// If the record were dropped, its frame would be free and in use at once.
    fn is_swapped(&self, entry: &JournalEntry) -> bool {
        let JournalEntry::Map(record) = entry else {
            return true;
        };
        match self.locate(record) {
            Ok(SlotLocation::At(at)) => record.is_published_at(self.media, at),
            _ => false,
        }
    }

    fn apply_all(&mut self, entries: &[JournalEntry], ordered: bool) -> Result<(), PoolError> {
        let moved = frame_moves(entries);
        for group in entries.chunk_by(|one, next| one.seq() == next.seq()) {
            let seq = group[0].seq();
            if seq.0 >= COUNT_MAX {
                return Err(PoolError::Record(seq));
            }
            // On a file, another session's record that links a leaf may be lost. Then the group was
            // never promised, and none of it may be applied.
            if !ordered && group.len() > 1 && !self.are_leaves_linked(group)? {
                continue;
            }
            for entry in group {
                self.apply(entry, ordered)?;
                if let JournalEntry::Map(record) = entry
                    && record.is_patch()
                {
                    self.apply_patch(record, &moved);
                }
            }
        }
        Ok(())
    }

    /// Copies the bytes of a patch into the page, unless the frame left the page after the patch. A
    /// replay from the older superblock has patches of frames with other users by now. An
    /// unreadable page stays unreadable.
    fn apply_patch(&mut self, record: &Record, moved: &BTreeMap<u64, Seq>) {
        let Some(frame) = record.changes[0].new.frame() else {
            return;
        };
        let is_moved = moved.get(&frame.0).is_some_and(|&last| last > record.seq);
        if is_moved && !defect::is(Defect::PatchOnMovedFrame) {
            return;
        }
        let at = frame_at(frame) + record.patch.within;
        let mut found = vec![0; record.patch.len];
        self.media.read(at, &mut found);
        if self.media.is_unreadable(at) {
            return;
        }
        self.media.write(at, &record.patch.bytes);
        self.stores.push(self.media.flush(at, found.len()));
    }

    /// Whether every leaf that a group changes is linked.
    fn are_leaves_linked(&self, group: &[JournalEntry]) -> Result<bool, PoolError> {
        if defect::is(Defect::GroupWithoutLeaf) {
            return Ok(true);
        }
        for entry in group {
            if let JournalEntry::Map(record) = entry
                && let SlotLocation::Unlinked(_) = self.locate(record)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The location of a record's first slot.
    fn locate(&self, record: &Record) -> Result<SlotLocation, PoolError> {
        if record.object.0 >= self.geometry.object_count() {
            return Err(PoolError::Object(record.object.0));
        }
        let root_at = self.geometry.object_at(record.object) + ROOT_AT;
        let table = PageTable::new(self.media, root_at, HEIGHT, self.geometry.frame_numbers());
        Ok(table.locate(record.level, record.page)?)
    }

    fn apply(&mut self, entry: &JournalEntry, ordered: bool) -> Result<(), PoolError> {
        match entry {
            JournalEntry::Map(record) => self.apply_map(record, ordered),
            JournalEntry::Object(record) => {
                if record.object.0 >= self.geometry.object_count() {
                    return Err(PoolError::Object(record.object.0));
                }
                self.objects_end = self.objects_end.max(record.object.0 + 1);
                let at = self.geometry.object_at(record.object);
                self.stores.push(store_entry(self.media, at, &record.entry));
                Ok(())
            }
        }
    }

    fn apply_map(&mut self, record: &Record, ordered: bool) -> Result<(), PoolError> {
        let numbers = self.geometry.frame_numbers();
        let is_ours = |slot: Slot| slot.frame().is_none_or(|frame| numbers.contains(&frame.0));
        let mut slots = record.changes.iter().flat_map(|c| [c.old, c.new]);
        if !slots.all(is_ours) {
            return Err(PoolError::Record(record.seq));
        }
        let SlotLocation::At(at) = self.locate(record)? else {
            // The object was deleted afterwards, and this node with it. Or, on a file, the record
            // that links the node was lost, and this record was never promised either.
            for change in &record.changes {
                self.record_freed_frame(change.old, ordered, ordered);
                self.record_freed_frame(change.new, false, ordered);
            }
            return Ok(());
        };
        for (i, change) in record.changes.iter().enumerate() {
            let found = Slot::decode(self.media.load(at + i * 8));
            if found.is_err() && self.media.is_unreadable(at) {
                return Err(PoolError::Unreadable(at));
            }
            if let Some(frame) = found
                .ok()
                .filter(|&slot| !is_ours(slot))
                .and_then(Slot::frame)
            {
                let (level, page) = (record.level, record.page);
                return Err(BadTable::NoSuchFrame { level, page, frame }.into());
            }
            self.apply_change(
                record.level,
                at + i * 8,
                change.old,
                change.new,
                change.sums.crc,
                ordered,
            );
        }
        self.stores
            .push(self.media.flush(at, record.changes.len() * 8));
        Ok(())
    }

    fn apply_change(
        &mut self,
        level: u8,
        at: usize,
        old: Slot,
        new: Slot,
        data_crc: u32,
        ordered: bool,
    ) {
        // On a file, a record between the two may be lost. Then the frame that the slot really maps
        // is free now, and the frame that this record replaced was never in use.
        let found = Slot::decode(self.media.load(at));
        let follows = ordered || found == Ok(old);
        self.record_freed_frame(old, follows, ordered);
        if let (false, Ok(found)) = (follows, found) {
            self.record_freed_frame(found, true, ordered);
        }
        self.record_frame_use(new, false, true);
        if let (1.., false, Some(node)) = (level, ordered, new.frame())
            && new.frame() != old.frame()
            && !defect::is(Defect::LostNodeKept)
        {
            // The zeroes of the new node may be lost although its record is not. Later records map
            // its pages again.
            let zeroes = [0; PAGE_BYTES];
            let (_, stores) = M::stream_page(&[(self.media, frame_at(node))], &zeroes);
            self.stores.push(stores);
        }
        if let (0, Some(frame)) = (level, new.frame()) {
            let entry = self.geometry.frame_entry_at(frame);
            self.media.store(entry, u64::from(data_crc));
            self.stores.push(self.media.flush(entry, 8));
        }
        self.media.store(at, new.encode());
    }

    /// As [`Replay::record_frame_use`] for a frame that is free now. An unreadable frame stays in
    /// use, because it would be granted. With `looks` the frame is probed; a file is not, because
    /// that would read the disk.
    fn record_freed_frame(&mut self, slot: Slot, was: bool, looks: bool) {
        let is_unreadable = |frame| match looks {
            true => !self.media.can_read(frame_at(frame)),
            false => self.media.is_unreadable(frame_at(frame)),
        };
        let is = slot.frame().is_some_and(is_unreadable);
        self.record_frame_use(slot, was, is);
    }

    /// A record names the slot's frame. `was` counts only for the first record of a frame.
    fn record_frame_use(&mut self, slot: Slot, was: bool, is: bool) {
        if let Some(frame) = slot.frame() {
            self.in_use.entry(frame.0).or_insert((was, is)).1 = is;
            if let Some(changes) = &mut self.changes {
                changes.push((frame.0, is));
            }
        }
    }

    /// Rewrites damaged entries of the object table that can still be decoded. Records above the
    /// checkpoint have been applied, so an entry that a crash left is whole by now.
    fn repair_objects(&mut self, summary: &mut RecoverySummary) -> Vec<(ObjectId, Object)> {
        let mut corrected = Vec::new();
        for object in (0..self.objects_end).map(ObjectId) {
            let at = self.geometry.object_at(object);
            let mut entry = [0; OBJECT_BYTES as usize];
            self.media.read(at, &mut entry);
            match Object::decode_redundant(&entry) {
                Ok((_, true)) => {}
                Ok((found, false)) => {
                    self.stores
                        .push(store_entry(self.media, at, &found.encode()));
                    corrected.push((object, found));
                }
                Err(_) => summary.objects_lost += 1,
            }
        }
        summary.corrected += corrected.len() as u64;
        corrected
    }

    /// Marks objects with unknown in-flight operations.
    fn mark_compare_all(&mut self, objects: &[ObjectId], is_all: bool) {
        let all = 0..if is_all { self.objects_end } else { 0 };
        let listed = objects.iter().map(|object| object.0);
        for object in listed.chain(all).collect::<BTreeSet<_>>() {
            self.mark_compare(ObjectId(object));
        }
    }

    fn mark_compare(&mut self, object: ObjectId) {
        let at = self.geometry.object_at(object);
        let mut entry = [0; OBJECT_BYTES as usize];
        self.media.read(at, &mut entry);
        if let Ok((mut found, _)) = Object::decode_redundant(&entry) {
            found.needs_compare = true;
            self.stores
                .push(store_entry(self.media, at, &found.encode()));
        }
    }

    /// Whether a crash explains a damaged line of the bitmap.
    fn is_explained_by_crash(&self, bitmap: &Bitmap, bad: &DamagedLine) -> bool {
        let frames = bad.frames();
        let named = self.in_use.range(frames.clone());
        let before = named.map(|(&frame, &(was, _))| (frame, was));
        let changes = self.changes.iter().flatten().copied();
        let changes: Vec<_> = changes
            .filter(|(frame, _)| frames.contains(frame))
            .collect();
        bitmap.is_torn(bad, before, &changes)
    }

    /// Writes the bits of the frames that records name. Returns the number of frames in use, if
    /// `used` were in use at the checkpoint.
    fn write_frame_bits(&self, bitmap: &mut Bitmap, used: u64) -> u64 {
        let mut used = used;
        for (&frame, &(was, is)) in &self.in_use {
            bitmap.write(frame, is);
            used = match (was, is) {
                (false, true) => used.saturating_add(1),
                (true, false) => used.saturating_sub(1),
                _ => used,
            };
        }
        used
    }

    /// Rebuilds lines of the bitmap from the page tables: the damaged ones, or all if none is known
    /// to be damaged. Returns the number of frames that may be free and are withheld, because a
    /// page table cannot be read.
    fn rebuild_bitmap(&self, bitmap: &mut Bitmap, bad: &[DamagedLine]) -> u64 {
        let (frame_set, is_whole) =
            FrameSet::from_tables(self.media, &self.geometry, self.objects_end);
        if bad.is_empty() {
            let all = bitmap.lines();
            bitmap.rebuild_lines(all, |word, found| match is_whole {
                true => frame_set.words()[word],
                false => frame_set.words()[word] | found,
            });
            return 0;
        }
        let bad = || bad.iter().map(|bad| bad.number);
        bitmap.rebuild_lines(bad(), |word, _| frame_set.words()[word]);
        if is_whole {
            return 0;
        }
        let known = bitmap.used();
        bitmap.rebuild_lines(bad(), |_, _| u64::MAX);
        bitmap.used() - known
    }
}

/// Frames that records take into use or free, each with the last such record. Empty if no record
/// changes a page in place.
fn frame_moves(entries: &[JournalEntry]) -> BTreeMap<u64, Seq> {
    let records = || {
        entries.iter().filter_map(|entry| match entry {
            JournalEntry::Map(record) => Some(record),
            JournalEntry::Object(_) => None,
        })
    };
    if !records().any(Record::is_patch) {
        return BTreeMap::new();
    }
    let mut moves = BTreeMap::new();
    for record in records() {
        for change in &record.changes {
            let (old, new) = (change.old.frame(), change.new.frame());
            let both = [old, new].into_iter().flatten().filter(|_| old != new);
            moves.extend(both.map(|frame| (frame.0, record.seq)));
        }
    }
    moves
}

/// Whether some record replaced a slot that this one had published.
fn is_superseded(entry: &JournalEntry, scans: &[(Vec<JournalEntry>, u64)]) -> bool {
    let mut all = scans.iter().flat_map(|(entries, _)| entries);
    all.any(|other| supersedes(other, entry))
}

/// Whether a record replaced a slot that another had published.
fn supersedes(later: &JournalEntry, earlier: &JournalEntry) -> bool {
    let (JournalEntry::Map(later), JournalEntry::Map(earlier)) = (later, earlier) else {
        return false;
    };
    let slots = |record: &Record| {
        let page = record.page.0;
        page..page.saturating_add(record.changes.len() as u64)
    };
    let (new, old) = (slots(earlier), slots(later));
    let is_data = later.level == 0 && earlier.level == 0;
    if !is_data || later.object != earlier.object || later.seq <= earlier.seq {
        return false;
    }
    let mut shared = new.start.max(old.start)..new.end.min(old.end);
    shared.any(|slot| {
        let before = &earlier.changes[(slot - new.start) as usize];
        let after = &later.changes[(slot - old.start) as usize];
        before.new == after.old
    })
}

/// Stores the first line of an entry and its copy, the gate last, and flushes both. The root slot
/// stays.
pub(crate) fn store_entry<M: Media>(
    media: &M,
    at: usize,
    entry: &[u8; OBJECT_BYTES as usize],
) -> UnfencedStores {
    let words = &entry.as_chunks::<8>().0[..ROOT_AT / 8];
    for (i, word) in words.iter().enumerate().take(COPY_BYTES / 8) {
        media.store(at + COPY_AT + i * 8, u64::from_le_bytes(*word));
    }
    for (i, word) in words.iter().enumerate().skip(2) {
        media.store(at + i * 8, u64::from_le_bytes(*word));
    }
    media.store(at, u64::from_le_bytes(words[0]));
    media.store(at + 8, u64::from_le_bytes(words[1]));
    media.flush(at, OBJECT_BYTES as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::NO_SUMS;
    use crate::owner::pool::{Pool, format};
    use pagemesh_pmem::Recorder;
    use std::sync::Arc;
    use uuid::Uuid;

    /// Whether the pool has a superblock after any loss during a recovery, if a process died
    /// earlier while it wrote one.
    fn has_a_superblock() -> bool {
        let fresh = Recorder::new(2 << 20);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let image = fresh.crash_point().all_persisted();
        let media = Arc::new(Recorder::from_image(image));
        let mut next = read_superblock(&*media).expect("sound");
        next.generation += 1;
        // The writer dies before the fence; the machine continues.
        let page = next.encode();
        let (_, _unfenced) = Recorder::stream_page(&[(&*media, next.offset())], &page);
        media.take_crash_points();
        Pool::open(media.clone(), media.clone()).expect("sound");
        media.take_crash_points().iter().all(|point| {
            (0..200).all(|seed| {
                let image = point.sample(seed);
                read_superblock(&Recorder::from_image(image)).is_ok()
            })
        })
    }

    /// A replay from the older superblock has records of frames with other users by now.
    #[test]
    fn page_is_corrected_only_by_last_record_of_its_frame() {
        let fresh = Recorder::new(2 << 20);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let block = read_superblock(&fresh).expect("sound");
        let frames = block.geometry.frame_numbers();
        let frame = FrameNo(frames.end - 1);
        let at = frame_at(frame);
        let names = |seq: u64| {
            let change = Change {
                old: Slot::EMPTY,
                new: Slot::EMPTY.map(frame, 0),
                sums: NO_SUMS,
            };
            JournalEntry::Map(Record {
                seq: Seq(seq),
                changes: vec![change],
                ..Record::empty()
            })
        };
        let flipped = |seq: u64| FlippedPage {
            seq: Seq(seq),
            object: ObjectId(0),
            page: PageNo(0),
            frame,
            bit: 77,
        };
        let mut replay = Replay::new(&fresh, &block, false);
        let before = fresh.load(at + 8);
        let mut all = vec![flipped(3)];
        replay.correct_pages(&mut all, &[names(3), names(5)]);
        assert!(all.is_empty() && fresh.load(at + 8) == before);
        all.extend([flipped(3), flipped(5)]);
        replay.correct_pages(&mut all, &[names(3), names(5)]);
        assert_eq!(all.len(), 1);
        assert_eq!(fresh.load(at + 8), before ^ 1 << 13);
        let _fenced = fresh.fence(
            replay
                .stores
                .drain(..)
                .reduce(UnfencedStores::and)
                .expect("one"),
        );
    }

    #[test]
    fn recovery_keeps_its_initial_superblock() {
        assert!(has_a_superblock());
        defect::set(Some(Defect::SuperblockNotFlushed));
        assert!(!has_a_superblock());
        defect::set(None);
    }
}
