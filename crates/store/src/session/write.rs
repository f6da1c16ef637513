//! Writes of pages and of parts of pages, over one to three pools at once.
//!
//! [`write_pages`] and [`write_part`] take the six steps of a write: begin, lock, load, encode,
//! stream, commit.

use super::operation::{self, OpRequirements};
use super::partial_pages::{self, PageKey};
use super::{LegFailure, LegSession, Page, Session, defects, patch};
use crate::format::geometry::frame_at;
use crate::format::record::lines;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// Writes bytes at the same offset of each leg's object, every page as a whole or not at all. The
/// legs' media are of one kind.
///
/// # Errors
/// The first leg that failed.
pub fn write<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    stamp: Stamp,
) -> Result<(), LegFailure> {
    let merging = MergeSource::EachLeg;
    write_merging(members, offset, data, merging, stamp.epoch, &|| stamp)
}

/// As [`write()`], for a client that shares pages with others and takes no locks of its own. Each
/// record gets the result of `stamp`, a stamp of `epoch`, which is called after its pages are
/// locked. So the numbers of a page's records have the order of its slots. Records are written in
/// the order of the legs, so a dead session's record on the last leg is on all of them. The legs
/// hold the same data: a page that is written in part is read from the first leg.
///
/// # Errors
/// As [`write()`].
pub fn write_numbered<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    epoch: Epoch,
    stamp: impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    write_merging(members, offset, data, MergeSource::FirstLeg, epoch, &stamp)
}

/// The source of the rest of a page that is written in part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MergeSource {
    /// Each leg's own page: a leg may lack bytes that must still be resynced.
    EachLeg,
    /// The first leg's page: all legs hold the same data.
    FirstLeg,
}

fn write_merging<M: Media>(
    members: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    merging: MergeSource,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    for (index, member) in members.iter().enumerate() {
        let checked = member
            .session
            .mapping
            .check_range(&member.handle, offset, data.len() as u64);
        checked.map_err(|cause| LegFailure { leg: index, cause })?;
    }
    let sources = match merging {
        MergeSource::FirstLeg => 1,
        MergeSource::EachLeg => members.len(),
    };
    let pages_max = members.iter().map(|member| member.session.pages_max());
    let pages_max = pages_max.min().unwrap_or_default();
    let mut at = offset;
    let mut rest = data;
    while !rest.is_empty() {
        let page = PageNo(at / PAGE_BYTES as u64);
        let within = (at % PAGE_BYTES as u64) as usize;
        let len = record_len(pages_max, merging, at, rest.len() as u64) as usize;
        let part = (within, &rest[..len]);
        if within + len <= PAGE_BYTES && len < PAGE_BYTES {
            write_part(members, page, part, sources, epoch, stamp)?;
        } else {
            write_pages(members, page, part, epoch, stamp)?;
        }
        at += len as u64;
        rest = &rest[len..];
    }
    Ok(())
}

/// The rule that cuts a write into records: the number of the `len` bytes from `offset` on that one
/// record covers, of at most `pages_max` pages of one leaf.
///
/// If all legs hold the same data, the record may begin and end with parts of pages. A leg that may
/// lack bytes keeps the stamps of partly written pages, so each of those gets a record of its own.
#[inline]
pub(super) fn record_len(pages_max: u64, merging: MergeSource, offset: u64, len: u64) -> u64 {
    const PAGE: u64 = PAGE_BYTES as u64;
    let within = offset % PAGE;
    let in_leaf = NODE_SLOTS - offset / PAGE % NODE_SLOTS;
    let run = len.min(in_leaf.min(pages_max) * PAGE - within);
    match merging {
        MergeSource::FirstLeg => run,
        MergeSource::EachLeg if within != 0 || len < PAGE => len.min(PAGE - within),
        MergeSource::EachLeg => run / PAGE * PAGE,
    }
}

/// Writes pages in one record. The first and the last may be written in part; the rest of them is
/// then merged from the first leg's page for all legs.
fn write_pages<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    (within, data): (usize, &[u8]),
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let count = (within + data.len()).div_ceil(PAGE_BYTES);
    let needs = OpRequirements {
        frames: count as u64,
        entry_lines: lines(count),
    };
    let places = begin_all(members, page, needs, epoch)?;
    let early = defects::number_before_locks(stamp);
    lock_all(members, page, count as u64)?;
    load_changes_all(members, page, count, &places)?;
    let merged = match merge_ends(members, page, places[0].0, (within, data)) {
        Ok(merged) => merged,
        Err(cause) => return abort_all(members, 0, cause),
    };
    // Locked instructions wait for streamed bytes, so all of them come first: locks, number, seqs.
    // From here on only the swap of a damaged slot fails, and its record is committed by then.
    let stamp = early.unwrap_or_else(stamp);
    encode_all(members, page, count, stamp, &places);
    let stores = stream_pages(members, &merged, (within, data));
    commit(members, page, places, stamp, stores)?;
    let session = &mut *members[0].session;
    for (bytes, index) in merged.into_iter().zip([0, count - 1]) {
        if let Some(bytes) = bytes {
            session.partial_pages.put(&session.record, index, bytes);
        }
    }
    Ok(())
}

/// Writes a part of a page, in place if possible.
pub(super) fn write_part<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    part: (usize, &[u8]),
    sources: usize,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let needs = OpRequirements {
        frames: 1,
        entry_lines: patch::entry_lines(part.1.len()),
    };
    patch::stage(members, page, part);
    let places = begin_all(members, page, needs, epoch)?;
    let early = defects::number_before_locks(stamp);
    lock_all(members, page, 1)?;
    if let Err(failure) = load_slots_all(members, page, &places) {
        members.iter_mut().for_each(unlock_and_end_op);
        return Err(failure);
    }
    let place = (page, places);
    let stamp = || early.unwrap_or_else(stamp);
    let is_alike = sources < members.len();
    if patch::build_records(members, part.1.len(), is_alike) {
        return write_patch(members, place, stamp());
    }
    write_merged(members, sources, place, part, stamp)
}

/// Begins the operation on all legs for one run of pages, with the resources in `needs`. Returns
/// the location of its first slot on each leg, and the round.
fn begin_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    needs: OpRequirements,
    epoch: Epoch,
) -> Result<[(usize, u8); 3], LegFailure> {
    let mut places = [(0, 0); 3];
    operation::begin_all(members, needs, epoch, |index, member, gate| {
        let at = member.session.slot_at(&member.handle, page)?;
        Ok(match at {
            Some(at) => {
                places[index] = (at, gate.round());
                None
            }
            None => Some(page),
        })
    })?;
    Ok(places)
}

/// Takes the locks of the range in every pool; ends the operation on all legs if that fails.
pub(super) fn lock_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    count: u64,
) -> Result<(), LegFailure> {
    for member in members.iter_mut() {
        let object = member.handle.object;
        member.session.lock_words.set(object, page, count);
    }
    if defects::skips_locks() {
        return Ok(());
    }
    let locked = operation::lock_all(members, |_, session| &session.lock_words);
    if locked.is_err() {
        members.iter_mut().for_each(|m| m.session.end_op());
    }
    locked
}

/// Loads each leg's slots of pages that are written as a whole; aborts the operation on all legs if
/// that fails. The caller holds the locks.
fn load_changes_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    count: usize,
    places: &[(usize, u8); 3],
) -> Result<(), LegFailure> {
    for index in 0..members.len() {
        if let Err(cause) = members[index]
            .session
            .load_changes(page, count, places[index])
        {
            return abort_all(members, index, cause);
        }
    }
    Ok(())
}

/// Loads each leg's slot of a page that is written in part. The caller holds the locks.
fn load_slots_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    places: &[(usize, u8); 3],
) -> Result<(), LegFailure> {
    for (member, &place) in (0..members.len()).zip(places) {
        let taken = members[member].session.load_slot(page, place);
        taken.map_err(|cause| LegFailure { leg: member, cause })?;
    }
    Ok(())
}

/// The first and the last page of a range of several pages, if they are written in part. They are
/// merged with the first leg's pages, with their slots from byte `at` on. The range begins at byte
/// `within` of its first page.
fn merge_ends<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    at: usize,
    (within, data): (usize, &[u8]),
) -> Result<[Option<partial_pages::PageBytes>; 2], StoreError> {
    let LegSession { session, handle } = &mut members[0];
    let last = (within + data.len()) / PAGE_BYTES;
    let behind = (within + data.len()) % PAGE_BYTES;
    let mut merge =
        |index: usize, part| session.merge_page(handle, (page, index), at + index * 8, part);
    let first = match within {
        0 => None,
        _ => Some(merge(0, (within, &data[..PAGE_BYTES - within]))?),
    };
    let last = match behind {
        0 => None,
        _ => Some(merge(last, (0, &data[data.len() - behind..]))?),
    };
    Ok([first, last])
}

impl<M: Media> Session<M> {
    /// Page number `index` of the present record, with a part of it replaced. Its slot lies at byte
    /// `at`.
    fn merge_page(
        &mut self,
        handle: &Handle,
        (first, index): (PageNo, usize),
        at: usize,
        (within, part): (usize, &[u8]),
    ) -> Result<partial_pages::PageBytes, StoreError> {
        let page = PageNo(first.0 + index as u64);
        let (mut bytes, is_it) = self.partial_pages.take(PageKey {
            object: handle.object,
            page,
            slot: self.record.changes[index].old,
            crc: self.checksum_before(index),
        });
        if !is_it {
            self.mapping
                .read_slot(at, (handle.object, page), &mut bytes)?;
        }
        bytes[within..within + part.len()].copy_from_slice(part);
        Ok(bytes)
    }
}

/// Takes frames, journal room and a seq on every leg, and encodes the records.
fn encode_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    count: usize,
    stamp: Stamp,
    places: &[(usize, u8); 3],
) {
    for member in members.iter_mut() {
        let session = &mut *member.session;
        session.assign_frames(count);
        session.encode_record(&member.handle, 0, page, stamp, true);
    }
    flush_pending_slots_all(members, places);
}

/// Streams the merged ends of a range and the whole pages between them into the frames of all legs.
fn stream_pages<M: Media>(
    members: &mut [LegSession<'_, M>],
    [first, last]: &[Option<partial_pages::PageBytes>; 2],
    (within, data): (usize, &[u8]),
) -> Option<UnfencedStores> {
    let whole = &data[first.as_ref().map_or(0, |_| PAGE_BYTES - within)..];
    let first = first.as_deref().into_iter();
    let pages = first.chain(whole.as_chunks().0).chain(last.as_deref());
    let mut stores = None;
    for (i, bytes) in pages.enumerate() {
        stores = Some(stream_page(members, i, bytes));
    }
    stores
}

/// Streams a page into frame number `number` of each leg.
pub(super) fn stream_page<M: Media>(
    members: &mut [LegSession<'_, M>],
    number: usize,
    bytes: &Page,
) -> UnfencedStores {
    let target = |index: usize| {
        let session = &members[index.min(members.len() - 1)].session;
        (&*session.mapping.data, frame_at(session.frames[number]))
    };
    let targets = [target(0), target(1), target(2)];
    let (sums, streamed) = M::stream_page(&targets[..members.len()], bytes);
    for member in members.iter_mut() {
        member.session.set_sums(number, sums);
    }
    streamed
}

/// Commits the records that [`patch::build_records`] prepared.
fn write_patch<M: Media>(
    members: &mut [LegSession<'_, M>],
    (page, places): (PageNo, [(usize, u8); 3]),
    stamp: Stamp,
) -> Result<(), LegFailure> {
    patch::begin(members, page, stamp);
    flush_pending_slots_all(members, &places);
    commit(members, page, places, stamp, None)
}

/// Writes a page that changes in part into another frame. The rest comes from the pages of
/// `sources` legs: from each leg's own, or from the first leg's for all.
fn write_merged<M: Media>(
    members: &mut [LegSession<'_, M>],
    sources: usize,
    (page, places): (PageNo, [(usize, u8); 3]),
    part: (usize, &[u8]),
    stamp: impl FnOnce() -> Stamp,
) -> Result<(), LegFailure> {
    // Everything that can fail comes before the seqs.
    let mut merged = [const { None }; 3];
    for ((index, bytes), &(at, _)) in merged.iter_mut().enumerate().take(sources).zip(&places) {
        let LegSession { session, handle } = &mut members[index];
        match session.merge_page(handle, (page, 0), at, part) {
            Ok(page) => *bytes = Some(page),
            Err(cause) => return abort_all(members, index, cause),
        }
    }
    let stamp = stamp();
    for member in members.iter_mut() {
        member.session.assign_frames(1);
        member
            .session
            .encode_record(&member.handle, 0, page, stamp, true);
    }
    flush_pending_slots_all(members, &places);
    let all = merged.iter().flatten();
    let streamed = match sources {
        1 => all.map(|bytes| stream_page(members, 0, bytes)).last(),
        _ => {
            let each = members.iter_mut().zip(all);
            let streamed =
                each.map(|(member, bytes)| stream_page(std::slice::from_mut(member), 0, bytes));
            streamed.reduce(UnfencedStores::and)
        }
    };
    commit(members, page, places, stamp, streamed)?;
    for (LegSession { session, .. }, bytes) in members.iter_mut().zip(merged.into_iter().flatten())
    {
        session.partial_pages.put(&session.record, 0, bytes);
    }
    Ok(())
}

/// Streams the records, fences, swaps and publishes. The caller holds the locks and has taken the
/// seqs. Releases the locks and ends the operation on all legs.
pub(super) fn commit<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    places: [(usize, u8); 3],
    stamp: Stamp,
    stores: Option<UnfencedStores>,
) -> Result<(), LegFailure> {
    let records = stream_records(members, stores);
    defects::before_fence(members);
    let withheld = if defects::withholds_fence() {
        Some(records)
    } else {
        operation::fence_all(members, records);
        None
    };
    defects::after_fence(members);
    let published = publish_slots_all(members, page, &places);
    defects::after_publication(members, withheld);
    // Locked instructions wait for the stores above, so the stores of all legs come first.
    for member in members.iter_mut() {
        member.session.publish_record(Some(stamp));
        unlock_and_end_op(member);
    }
    published
}

/// Streams the records, to the legs in their order. If the session dies in between, a record on the
/// last leg is on all legs before it, too. Direct clients read the last leg.
fn stream_records<M: Media>(
    members: &mut [LegSession<'_, M>],
    mut stores: Option<UnfencedStores>,
) -> UnfencedStores {
    let count = members.len();
    for at in 0..count {
        let member = &mut members[defects::leg_in_order(at, count)];
        let streamed = member.session.stream_record();
        stores = Some(streamed.after(stores.take()));
    }
    stores.expect("a record")
}

/// Publishes the pages of the committed record on all legs.
fn publish_slots_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    page: PageNo,
    places: &[(usize, u8); 3],
) -> Result<(), LegFailure> {
    let mut result = Ok(());
    for (index, member) in members.iter_mut().enumerate() {
        if let Err(cause) = member.session.publish_slots(places[index].0, page) {
            result = Err(LegFailure { leg: index, cause });
        }
    }
    result
}

fn flush_pending_slots_all<M: Media>(members: &mut [LegSession<'_, M>], places: &[(usize, u8); 3]) {
    for (member, &(at, _)) in members.iter_mut().zip(places) {
        member.session.flush_pending_slots(at);
    }
}

pub(super) fn unlock_and_end_op<M: Media>(member: &mut LegSession<'_, M>) {
    let session = &mut *member.session;
    session.mapping.control.unlock(&session.lock_words);
    session.end_op();
}

/// Unlocks and ends the operation on all legs. Nothing has changed, as one of them failed.
fn abort_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    member: usize,
    cause: StoreError,
) -> Result<(), LegFailure> {
    members.iter_mut().for_each(unlock_and_end_op);
    Err(LegFailure { leg: member, cause })
}
