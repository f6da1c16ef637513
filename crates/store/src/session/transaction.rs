//! Transactions: several runs of pages that change as a whole, by a group of records.
//!
//! [`transact`] follows the path of a write ([`crate::session`]), over one to three pools at once:
//!
//! 1. reserve frames and room in the journal for the whole group;
//! 2. begin the operation, find the leaves, take the lock words of all runs in ascending order, and
//!    load the old slots;
//! 3. take frames, one journal entry and one seq;
//! 4. stream the bytes into the new frames, and the records into the journal;
//! 5. issue **one fence: the commit**;
//! 6. swap all slots, publish the committed index once, after the group, and unlock.
//!
//! Invariants:
//! - nothing fails between the taking of a seq and the publication;
//! - a reader of a journal finds the committed index before or after a group. A group has one seq,
//!   so a checkpoint applies all of it or nothing;
//! - between two operations a session has no swapped and unflushed slots of more than one run.
//!
//! # Details
//!
//! - [`leaf_runs`] splits the parts at leaves. Each run of one leaf has one record. A group that
//!   cannot fit into the journal of a small pool is refused ([`Session::group_lines_max`]).
//! - A missing leaf is linked before the locks are taken. If the group would only clear it, it is
//!   skipped.
//! - [`RecordGroup::load_slots`] skips unmapped pages. After it only a slot that is found damaged
//!   fails the operation, and then its records are committed.
//! - [`RecordGroup::encode_records`] reserves the lines of all records as one entry, so no padding
//!   divides them.
//! - [`RecordGroup::publish_slots`] flushes the slots of all records for the next fence.
//!
//! Only these handle groups: the journal's reader distinguishes whole, torn and damaged groups
//! (`Journal::read_groups`, `Journal::check_torn`). [`crate::recovery`] keeps or drops the last
//! group by the data of all its records. The owner's `Pool::roll_forward` completes the group of a
//! dead session or removes its records. A checkpoint applies records one by one.

use crate::format::geometry::frame_at;
use crate::format::record::{GroupPosition, Record, add_checksum, lines, set_sums};
use crate::format::table::NODE_SLOTS;
use crate::session::commit::fence_all;
use crate::session::operation::{self, OpRequirements};
use crate::session::{LegFailure, LegSession, Session, defects};
use crate::shared::control::LockWords;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

const PAGE: u64 = PAGE_BYTES as u64;
const SLOT_BYTES: usize = 8;

/// Pages of one leaf that are written or cleared.
#[derive(Clone, Copy)]
struct LeafRun<'p> {
    page: u64,
    count: u64,
    /// None if they are cleared.
    data: Option<&'p [[u8; PAGE_BYTES]]>,
}

/// A record of a leg's group.
struct GroupRecord {
    record: Record,
    /// The byte of its first slot.
    at: usize,
    /// Its first line in the group.
    line: usize,
}

/// The records of a transaction in one pool.
#[derive(Default)]
struct RecordGroup {
    /// Per run, the byte of its first slot. None if its leaf is not linked and the run is only
    /// cleared.
    slot_offsets: Vec<Option<usize>>,
    words: Vec<u16>,
    /// Empty if no page to be cleared is mapped.
    records: Vec<GroupRecord>,
    lines: usize,
    /// Per page that is written: the index of its record, and of its change in there.
    written_changes: Vec<(usize, usize)>,
}

/// Changes all parts in each leg's object as a whole, or nothing. Parts are whole pages, at most
/// [`TRANSACTION_PAGES_MAX`] together, and do not overlap. The legs' media are of one kind.
///
/// # Errors
/// The first leg that failed. Nothing has changed then, unless the medium had damaged a slot that
/// was found after the commit.
pub fn transact<M: Media>(
    legs: &mut [LegSession<'_, M>],
    parts: &[TransactionPart],
    stamp: Stamp,
) -> Result<(), LegFailure> {
    transact_numbered(legs, parts, stamp.epoch, || stamp)
}

/// As [`transact`], for a client that shares pages with others and takes no locks of its own. The
/// function calls `stamp` for a stamp of `epoch` or a newer one after it has taken the lock words of all pages. So
/// the numbers of a page's records have the order of its slots.
///
/// # Errors
/// As [`transact`].
pub fn transact_numbered<M: Media>(
    legs: &mut [LegSession<'_, M>],
    parts: &[TransactionPart],
    epoch: Epoch,
    stamp: impl FnOnce() -> Stamp,
) -> Result<(), LegFailure> {
    let runs = leaf_runs(legs, parts)?;
    let mut groups: Vec<RecordGroup> = legs.iter().map(|_| RecordGroup::default()).collect();
    if runs.is_empty() {
        record_complete_all(legs, &groups, stamp());
        return Ok(());
    }
    let needs = requirements(legs, &runs)?;
    begin_all(legs, &runs, &mut groups, needs, epoch)?;
    lock_all(legs, &runs, &mut groups)?;
    for (index, leg) in legs.iter_mut().enumerate() {
        if let Err(cause) = groups[index].load_slots(leg.session, &runs, epoch) {
            let leg = index;
            unlock_and_end_all(legs, &groups);
            return Err(LegFailure { leg, cause });
        }
    }
    let stamp = stamp();
    let mut outcome = Ok(());
    if groups.iter().any(|group| !group.records.is_empty()) {
        // From here on only the swap of a damaged slot fails, after the commit.
        for (leg, group) in legs.iter_mut().zip(&mut groups) {
            group.encode_records(leg.session, &leg.handle, stamp);
        }
        let stores = stream_pages(legs, &mut groups, &runs);
        outcome = commit(legs, &mut groups, stores, stamp);
    }
    unlock_and_end_all(legs, &groups);
    record_complete_all(legs, &groups, stamp);
    outcome
}

/// The runs of all parts, sorted by page, after the checks against every leg.
fn leaf_runs<'p, M: Media>(
    legs: &[LegSession<'_, M>],
    parts: &'p [TransactionPart],
) -> Result<Vec<LeafRun<'p>>, LegFailure> {
    let mut runs = Vec::new();
    let mut pages = 0u64;
    for part in parts {
        let (offset, len) = (part.offset(), part.len());
        let data = match part {
            TransactionPart::Write { data, .. } => Some(&data[..]),
            TransactionPart::Clear { .. } => None,
        };
        for (index, leg) in legs.iter().enumerate() {
            let checked = leg.session.mapping.check_range(&leg.handle, offset, len);
            checked.map_err(|cause| LegFailure { leg: index, cause })?;
        }
        if !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(invalid_transaction(
                "a part does not consist of whole pages",
            ));
        }
        pages = pages.saturating_add(len / PAGE);
        if pages > TRANSACTION_PAGES_MAX {
            return Err(invalid_transaction("its parts have too many pages"));
        }
        split_at_leaves(offset / PAGE, len / PAGE, data, &mut runs);
    }
    runs.sort_unstable_by_key(|run| run.page);
    let overlap = |pair: &[LeafRun<'_>]| pair[0].page + pair[0].count > pair[1].page;
    match runs.windows(2).any(overlap) {
        true => Err(invalid_transaction("its parts overlap")),
        false => Ok(runs),
    }
}

fn invalid_transaction(why: &'static str) -> LegFailure {
    LegFailure {
        leg: 0,
        cause: StoreError::InvalidTransaction(why),
    }
}

/// Splits a part at the ends of leaves.
fn split_at_leaves<'p>(page: u64, count: u64, data: Option<&'p [u8]>, into: &mut Vec<LeafRun<'p>>) {
    let mut pages = data.map(|data| data.as_chunks().0);
    let (mut page, end) = (page, page + count);
    while page < end {
        let next = ((page / NODE_SLOTS + 1) * NODE_SLOTS).min(end);
        let count = next - page;
        let own = pages.map(|all| all.split_at(count as usize));
        into.push(LeafRun {
            page,
            count,
            data: own.map(|(own, _)| own),
        });
        (page, pages) = (next, own.map(|(_, rest)| rest));
    }
}

impl<M: Media> Session<M> {
    /// Lines of the longest group. A quarter of the journal may have to be retained, and almost as
    /// many lines as the group has may be skipped at the end of the ring.
    pub(crate) fn group_lines_max(&self) -> usize {
        self.mapping.geometry().journal_lines() as usize * 3 / 8
    }
}

/// The frames, and the most lines that the group may need. The mapped pages are known only under
/// locks, and each page takes one line at most.
fn requirements<M: Media>(
    legs: &[LegSession<'_, M>],
    runs: &[LeafRun<'_>],
) -> Result<OpRequirements, LegFailure> {
    let frames = runs.iter().filter(|run| run.data.is_some());
    let lines_of = |run: &LeafRun<'_>| match run.data {
        Some(pages) => lines(pages.len()),
        None => run.count as usize,
    };
    let needs = OpRequirements {
        frames: frames.map(|run| run.count).sum(),
        entry_lines: runs.iter().map(lines_of).sum(),
    };
    for (index, leg) in legs.iter().enumerate() {
        let lines_max = leg.session.group_lines_max();
        if needs.entry_lines > lines_max {
            return Err(LegFailure {
                leg: index,
                cause: StoreError::TooLong {
                    lines: needs.entry_lines,
                    lines_max,
                },
            });
        }
    }
    Ok(needs)
}

fn begin_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    runs: &[LeafRun<'_>],
    groups: &mut [RecordGroup],
    needs: OpRequirements,
    epoch: Epoch,
) -> Result<(), LegFailure> {
    operation::begin_all(legs, needs, epoch, |index, leg| {
        let group = &mut groups[index];
        group.slot_offsets.clear();
        for run in runs {
            let page = PageNo(run.page);
            let at = leg.session.slot_at(&leg.handle, page)?;
            if at.is_none() && run.data.is_some() {
                return Ok(Some(page));
            }
            group.slot_offsets.push(at);
        }
        Ok(None)
    })
}

/// Takes the lock words of all runs; ends the operation on all legs if that fails.
fn lock_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    runs: &[LeafRun<'_>],
    groups: &mut [RecordGroup],
) -> Result<(), LegFailure> {
    let locked = defects::runs_to_lock(runs);
    for (leg, group) in legs.iter().zip(groups.iter_mut()) {
        let object = leg.handle.object;
        let range = |run: &LeafRun<'_>| LockWords::of(object, PageNo(run.page), run.count);
        group.words = LockWords::of_all(locked.iter().map(range));
    }
    let locked = operation::lock_all(legs, |index, _| &groups[index].words);
    if locked.is_err() {
        legs.iter_mut().for_each(|leg| leg.session.end_op());
    }
    locked
}

fn unlock_and_end_all<M: Media>(legs: &mut [LegSession<'_, M>], groups: &[RecordGroup]) {
    for (leg, group) in legs.iter_mut().zip(groups) {
        leg.session.mapping.control.unlock(&group.words);
        leg.session.end_op();
    }
}

/// Legs in which nothing had to change still learn which operations are complete.
fn record_complete_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    groups: &[RecordGroup],
    stamp: Stamp,
) {
    for (leg, group) in legs.iter_mut().zip(groups) {
        if group.records.is_empty() {
            leg.session.record_complete(stamp);
        }
    }
}

impl RecordGroup {
    /// Loads the slots that change; holes are born at this epoch. The caller holds the locks.
    fn load_slots<M: Media>(
        &mut self,
        session: &mut Session<M>,
        runs: &[LeafRun<'_>],
        birth: Epoch,
    ) -> Result<(), StoreError> {
        for (number, run) in runs.iter().enumerate() {
            let Some(at) = self.slot_offsets[number] else {
                continue;
            };
            if run.data.is_some() {
                let page = PageNo(run.page);
                session.load_changes(page, run.count as usize, at)?;
                let changes = (0..run.count as usize).map(|change| (self.records.len(), change));
                self.written_changes.extend(changes);
                self.add_record(session, page, at);
                continue;
            }
            let mut done = 0;
            while done < run.count {
                let at = at + done as usize * SLOT_BYTES;
                let page = PageNo(run.page + done);
                let (skipped, found) =
                    session.load_unmap_changes(at, page, run.count - done, birth)?;
                if found > 0 {
                    let page = PageNo(page.0 + skipped);
                    self.add_record(session, page, at + skipped as usize * SLOT_BYTES);
                }
                done += skipped + found;
            }
        }
        Ok(())
    }

    /// Adds a record with the changes that the session has loaded.
    fn add_record<M: Media>(&mut self, session: &Session<M>, page: PageNo, at: usize) {
        let changes = session.record.changes.clone();
        let line = self.lines;
        self.lines += lines(changes.len());
        let record = Record {
            page,
            has_second_sum: true,
            changes,
            ..Record::empty()
        };
        self.records.push(GroupRecord { record, at, line });
    }

    /// Takes frames, journal room and a seq, and encodes the records without the checksums of their
    /// data.
    fn encode_records<M: Media>(
        &mut self,
        session: &mut Session<M>,
        handle: &Handle,
        stamp: Stamp,
    ) {
        if self.records.is_empty() {
            return;
        }
        session.take_frames(self.written_changes.len() as u64);
        for (&(record, change), &frame) in self.written_changes.iter().zip(&session.frames) {
            let change = &mut self.records[record].record.changes[change];
            change.new = change.old.map(frame);
            let control = &session.mapping.control;
            control.warm_replaced(change.old.frame(), frame, session.hint);
            let entry_at = session.mapping.geometry().frame_entry_at(frame);
            session.mapping.meta.prefetch(entry_at);
        }
        session.reserve_journal(self.lines);
        session.take_seq();
        session.encoded.clear();
        let last = self.records.len() - 1;
        for (number, GroupRecord { record, line, .. }) in self.records.iter_mut().enumerate() {
            record.seq = session.record.seq;
            record.object = handle.object;
            record.epoch = stamp.epoch;
            record.op = stamp.op;
            record.open = stamp.open_ops;
            record.group_position = GroupPosition {
                lines_before: *line as u8,
                is_continued: number < last,
            };
            record.encode(&mut session.encoded);
        }
        session.flush_all_slots();
    }

    /// Streams the records, one after the other.
    fn append_records<M: Media>(&self, session: &mut Session<M>) -> UnfencedStores {
        let first = *session.journal.next_address();
        for GroupRecord { record, line, .. } in &self.records {
            let lines = *line..line + lines(record.changes.len());
            let address = first.at(first.position + *line as u64);
            add_checksum(&mut session.encoded[lines], &address);
        }
        defects::publish_group_early(session, || {
            first.position + lines(self.records[0].record.changes.len()) as u64
        });
        session.append()
    }

    /// Publishes the pages of the committed group: swaps every slot.
    fn publish_slots<M: Media>(&mut self, session: &mut Session<M>) -> Result<(), StoreError> {
        let mut result = Ok(());
        for GroupRecord { record, at, .. } in &mut self.records {
            let page = record.page;
            std::mem::swap(&mut session.record, record);
            result = session.publish_slots(*at, page).and(result);
            std::mem::swap(&mut session.record, record);
            session.flush_all_slots();
        }
        result
    }
}

/// Streams every written page into the frames of all legs.
fn stream_pages<M: Media>(
    legs: &mut [LegSession<'_, M>],
    groups: &mut [RecordGroup],
    runs: &[LeafRun<'_>],
) -> Option<UnfencedStores> {
    let mut stores = None;
    let pages = runs.iter().filter_map(|run| run.data).flatten();
    for (number, bytes) in pages.enumerate() {
        let target = |index: usize| {
            let session = &*legs[index.min(legs.len() - 1)].session;
            (&*session.mapping.data, frame_at(session.frames[number]))
        };
        let targets = [target(0), target(1), target(2)];
        let (sums, streamed) = M::stream_page(&targets[..legs.len()], bytes);
        stores = Some(streamed);
        for (leg, group) in legs.iter_mut().zip(groups.iter_mut()) {
            let (record, change) = group.written_changes[number];
            let GroupRecord { record, line, .. } = &mut group.records[record];
            record.changes[change].sums = sums;
            set_sums(&mut leg.session.encoded[*line..], change, sums);
        }
    }
    stores
}

/// Streams the records, fences, swaps and publishes.
fn commit<M: Media>(
    legs: &mut [LegSession<'_, M>],
    groups: &mut [RecordGroup],
    mut stores: Option<UnfencedStores>,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    for (leg, group) in legs.iter_mut().zip(groups.iter()) {
        if !group.records.is_empty() {
            stores = Some(group.append_records(leg.session).after(stores));
        }
    }
    fence_all(legs, stores.expect("a group has records"));
    let mut result = Ok(());
    for (index, (leg, group)) in legs.iter_mut().zip(groups).enumerate() {
        if group.records.is_empty() {
            continue;
        }
        if let Err(cause) = group.publish_slots(leg.session) {
            result = Err(LegFailure { leg: index, cause });
        }
        // The owner's own changes have no number.
        let of_client = Some(stamp).filter(|stamp| stamp.op > 0);
        leg.session.publish_record(of_client);
    }
    result
}
