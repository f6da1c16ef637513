//! Several runs of pages that change as a whole: a group of records.
//!
//! [`transact`] goes the way of a write ([`crate::session`]), over one to three
//! pools at once: frames and room in the lane for the whole group, leaves →
//! windows → the lock words of all runs in ascending order → old slots → frames,
//! one entry of the lane, one seq → bytes streamed into fresh frames → the
//! records → **one fence: the commit** → all slots swapped → the committed index
//! published once, behind the group → unlocked.
//!
//! Invariants:
//! - nothing fails between the taking of a seq and the publication;
//! - who looks at a lane finds the committed index before or behind a group,
//!   and a checkpoint applies all of it or nothing: it has one seq;
//! - a session that is between two operations has no slots of several places
//!   that are swapped and not flushed.

use crate::control::Range;
use crate::defect::{self, Defect};
use crate::object::Gate;
use crate::record::{Record, Standing, lines, seal, set_sums};
use crate::session::{Failure, Member, Session};
use crate::view::{Handle, NODE_SLOTS, StoreError, frame_at};
use crate::window::{self, Needs};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{Part, Stamp};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Unfenced};
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_BYTES as u64;
const SLOT_BYTES: usize = 8;

/// Pages of one leaf that are written or cleared.
#[derive(Clone, Copy)]
struct Run<'p> {
    page: u64,
    count: u64,
    /// None: they are cleared.
    data: Option<&'p [[u8; PAGE_BYTES]]>,
}

/// A record of a member's group.
struct Piece {
    record: Record,
    /// Where its first slot lies.
    at: usize,
    /// Its first line in the group.
    line: usize,
}

/// What a transaction is in one pool.
#[derive(Default)]
struct Group {
    /// Per run, where its first slot lies; none: its leaf is not linked, and
    /// nothing is to be cleared.
    places: Vec<Option<usize>>,
    round: u8,
    words: Vec<u16>,
    /// None: nothing of what is to be cleared is mapped.
    pieces: Vec<Piece>,
    lines: usize,
    /// Per page that is written: its piece, and its change in there.
    written: Vec<(usize, usize)>,
}

/// Changes all parts in each member's object as a whole, or nothing. Parts are
/// whole pages, at most [`TRANSACTION_PAGES_MAX`] together, and do not overlap.
/// The members' media are of one kind.
///
/// # Errors
/// The first member that failed; nothing has changed then, unless a slot was
/// found damaged after the commit.
pub fn transact<M: Media>(
    members: &mut [Member<'_, M>],
    parts: &[Part],
    stamp: Stamp,
) -> Result<(), Failure> {
    transact_numbered(members, parts, stamp.epoch, || stamp)
}

/// The same for who shares pages with others without locks of its own: it gets the
/// number that `stamp` takes, of this epoch, behind the lock words of all its pages. So
/// the numbers of a page's records are in the order of their slots.
///
/// # Errors
/// As [`transact`].
pub fn transact_numbered<M: Media>(
    members: &mut [Member<'_, M>],
    parts: &[Part],
    epoch: Epoch,
    stamp: impl FnOnce() -> Stamp,
) -> Result<(), Failure> {
    let runs = runs_of(members, parts)?;
    let mut groups: Vec<Group> = members.iter().map(|_| Group::default()).collect();
    if runs.is_empty() {
        note_complete(members, &groups, stamp());
        return Ok(());
    }
    let needs = needs_of(members, &runs)?;
    enter(members, &runs, &mut groups, needs, epoch)?;
    lock(members, &runs, &mut groups)?;
    for (index, member) in members.iter_mut().enumerate() {
        if let Err(cause) = groups[index].fill(member.session, &runs) {
            let member = index;
            leave(members, &groups);
            return Err(Failure { member, cause });
        }
    }
    let stamp = stamp();
    let mut outcome = Ok(());
    if groups.iter().any(|group| !group.pieces.is_empty()) {
        // Nothing fails from here on.
        for (member, group) in members.iter_mut().zip(&mut groups) {
            group.begin(member.session, &member.handle, stamp);
        }
        let stores = stream_pages(members, &mut groups, &runs);
        outcome = commit(members, &mut groups, stores, stamp);
    }
    leave(members, &groups);
    note_complete(members, &groups, stamp);
    outcome
}

/// The runs of all parts by their pages, checked against every member.
fn runs_of<'p, M: Media>(
    members: &[Member<'_, M>],
    parts: &'p [Part],
) -> Result<Vec<Run<'p>>, Failure> {
    let mut runs = Vec::new();
    let mut pages = 0u64;
    for part in parts {
        let (offset, len) = (part.offset(), part.len());
        let data = match part {
            Part::Write { data, .. } => Some(&data[..]),
            Part::Clear { .. } => None,
        };
        for (index, member) in members.iter().enumerate() {
            let checked = member.session.view.check_range(&member.handle, offset, len);
            checked.map_err(|cause| Failure {
                member: index,
                cause,
            })?;
        }
        if !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(refused("a part is not of whole pages"));
        }
        pages = pages.saturating_add(len / PAGE);
        if pages > TRANSACTION_PAGES_MAX {
            return Err(refused("its parts have too many pages"));
        }
        split(offset / PAGE, len / PAGE, data, &mut runs);
    }
    runs.sort_unstable_by_key(|run| run.page);
    let overlap = |pair: &[Run<'_>]| pair[0].page + pair[0].count > pair[1].page;
    match runs.windows(2).any(overlap) {
        true => Err(refused("its parts overlap")),
        false => Ok(runs),
    }
}

fn refused(why: &'static str) -> Failure {
    Failure {
        member: 0,
        cause: StoreError::NoTransaction(why),
    }
}

/// Splits a part where a leaf ends.
fn split<'p>(page: u64, count: u64, data: Option<&'p [u8]>, into: &mut Vec<Run<'p>>) {
    let mut pages = data.map(|data| data.as_chunks().0);
    let (mut page, end) = (page, page + count);
    while page < end {
        let next = ((page / NODE_SLOTS + 1) * NODE_SLOTS).min(end);
        let count = next - page;
        let own = pages.map(|all| all.split_at(count as usize));
        into.push(Run {
            page,
            count,
            data: own.map(|(own, _)| own),
        });
        (page, pages) = (next, own.map(|(_, rest)| rest));
    }
}

/// Frames, and lines as many as there may be: which pages are mapped is known
/// under locks only, and a page takes a line at most.
fn needs_of<M: Media>(members: &[Member<'_, M>], runs: &[Run<'_>]) -> Result<Needs, Failure> {
    let frames = runs.iter().filter(|run| run.data.is_some());
    let lines_of = |run: &Run<'_>| match run.data {
        Some(pages) => lines(pages.len()),
        None => run.count as usize,
    };
    let needs = Needs {
        frames: frames.map(|run| run.count).sum(),
        entry_lines: runs.iter().map(lines_of).sum(),
    };
    for (index, member) in members.iter().enumerate() {
        let lines_max = member.session.group_lines_max();
        if needs.entry_lines > lines_max {
            return Err(Failure {
                member: index,
                cause: StoreError::TooLong {
                    lines: needs.entry_lines,
                    lines_max,
                },
            });
        }
    }
    Ok(needs)
}

fn enter<M: Media>(
    members: &mut [Member<'_, M>],
    runs: &[Run<'_>],
    groups: &mut [Group],
    needs: Needs,
    epoch: Epoch,
) -> Result<(), Failure> {
    window::enter(members, needs, epoch, |index, member, gate: Gate| {
        let group = &mut groups[index];
        group.round = gate.round();
        group.places.clear();
        for run in runs {
            let page = PageNo(run.page);
            let at = member.session.slot_at(&member.handle, page)?;
            if at.is_none() && run.data.is_some() {
                return Ok(Some(page));
            }
            group.places.push(at);
        }
        Ok(None)
    })
}

/// Takes the lock words of all runs; leaves the windows if that fails.
fn lock<M: Media>(
    members: &mut [Member<'_, M>],
    runs: &[Run<'_>],
    groups: &mut [Group],
) -> Result<(), Failure> {
    let locked = match defect::is(Defect::GroupNotLocked) {
        true => &runs[..1],
        false => runs,
    };
    for (member, group) in members.iter().zip(groups.iter_mut()) {
        let object = member.handle.object;
        let range = |run: &Run<'_>| Range::of(object, PageNo(run.page), run.count);
        group.words = Range::of_all(locked.iter().map(range));
    }
    let locked = window::lock(members, |index, _| &groups[index].words);
    if locked.is_err() {
        members.iter_mut().for_each(|member| member.session.leave());
    }
    locked
}

fn leave<M: Media>(members: &mut [Member<'_, M>], groups: &[Group]) {
    for (member, group) in members.iter_mut().zip(groups) {
        member.session.view.control.unlock(&group.words);
        member.session.leave();
    }
}

/// Members in which nothing had to change still hear what is complete.
fn note_complete<M: Media>(members: &mut [Member<'_, M>], groups: &[Group], stamp: Stamp) {
    for (member, group) in members.iter_mut().zip(groups) {
        if group.pieces.is_empty() {
            member.session.note_complete(stamp);
        }
    }
}

impl Group {
    /// Loads the slots that change. Under locks.
    fn fill<M: Media>(
        &mut self,
        session: &mut Session<M>,
        runs: &[Run<'_>],
    ) -> Result<(), StoreError> {
        for (number, run) in runs.iter().enumerate() {
            let Some(at) = self.places[number] else {
                continue;
            };
            if run.data.is_some() {
                let page = PageNo(run.page);
                session.fill_changes(page, run.count as usize, (at, self.round))?;
                let changes = (0..run.count as usize).map(|change| (self.pieces.len(), change));
                self.written.extend(changes);
                self.add(session, page, at);
                continue;
            }
            let mut done = 0;
            while done < run.count {
                let at = at + done as usize * SLOT_BYTES;
                let page = PageNo(run.page + done);
                let (skipped, found) =
                    session.fill_unmap(at, page, run.count - done, self.round)?;
                if found > 0 {
                    let page = PageNo(page.0 + skipped);
                    self.add(session, page, at + skipped as usize * SLOT_BYTES);
                }
                done += skipped + found;
            }
        }
        Ok(())
    }

    /// Takes over the changes that the session has found.
    fn add<M: Media>(&mut self, session: &Session<M>, page: PageNo, at: usize) {
        let changes = session.record.changes.clone();
        let line = self.lines;
        self.lines += lines(changes.len());
        let record = Record {
            page,
            is_summed: true,
            changes,
            ..Record::empty()
        };
        self.pieces.push(Piece { record, at, line });
    }

    /// Takes frames, makes sure of the lane, takes a seq and encodes the
    /// records as far as they are known.
    fn begin<M: Media>(&mut self, session: &mut Session<M>, handle: &Handle, stamp: Stamp) {
        if self.pieces.is_empty() {
            return;
        }
        session.take_frames(self.written.len() as u64);
        for (&(piece, change), &frame) in self.written.iter().zip(&session.frames) {
            let change = &mut self.pieces[piece].record.changes[change];
            change.new = change.old.map(frame, self.round);
            let entry_at = session.view.geometry.frame_entry_at(frame);
            session.view.meta.prefetch(entry_at);
        }
        session.reserve(self.lines);
        session.take_seq();
        session.encoded.clear();
        let last = self.pieces.len() - 1;
        for (number, Piece { record, line, .. }) in self.pieces.iter_mut().enumerate() {
            record.seq = session.record.seq;
            record.object = handle.object;
            record.epoch = stamp.epoch;
            record.op = stamp.op;
            record.open = stamp.open;
            record.standing = Standing {
                lines_before: *line as u8,
                goes_on: number < last,
            };
            record.encode(&mut session.encoded);
        }
        session.settle_now();
    }

    /// Streams the records, behind each other.
    fn append<M: Media>(&self, session: &mut Session<M>) -> Unfenced {
        let place = *session.lane.place();
        for Piece { record, line, .. } in &self.pieces {
            let lines = *line..line + lines(record.changes.len());
            let place = place.at(place.position + *line as u64);
            seal(&mut session.encoded[lines], &place);
        }
        if defect::is(Defect::GroupPublishedEarly) {
            let first = lines(self.pieces[0].record.changes.len()) as u64;
            let cells = session.view.control.cells(session.number);
            let committed = cells.committed();
            committed.store(place.position + first, Ordering::Release);
        }
        session.append()
    }

    /// Shows the pages of the committed group: swaps every slot.
    fn show<M: Media>(&mut self, session: &mut Session<M>) -> Result<(), StoreError> {
        let mut result = Ok(());
        for Piece { record, at, .. } in &mut self.pieces {
            let page = record.page;
            std::mem::swap(&mut session.record, record);
            result = session.show(*at, page).and(result);
            std::mem::swap(&mut session.record, record);
            session.settle_now();
        }
        result
    }
}

/// Streams every page that is written into the frames of all members.
fn stream_pages<M: Media>(
    members: &mut [Member<'_, M>],
    groups: &mut [Group],
    runs: &[Run<'_>],
) -> Option<Unfenced> {
    let mut stores = None;
    let pages = runs.iter().filter_map(|run| run.data).flatten();
    for (number, bytes) in pages.enumerate() {
        let target = |index: usize| {
            let session = &*members[index.min(members.len() - 1)].session;
            (&*session.view.data, frame_at(session.frames[number]))
        };
        let targets = [target(0), target(1), target(2)];
        let (sums, streamed) = M::stream_page(&targets[..members.len()], bytes);
        stores = Some(streamed);
        for (member, group) in members.iter_mut().zip(groups.iter_mut()) {
            let (piece, change) = group.written[number];
            let Piece { record, line, .. } = &mut group.pieces[piece];
            record.changes[change].sums = sums;
            set_sums(&mut member.session.encoded[*line..], change, sums);
        }
    }
    stores
}

/// Streams the records, fences, swaps and publishes.
fn commit<M: Media>(
    members: &mut [Member<'_, M>],
    groups: &mut [Group],
    mut stores: Option<Unfenced>,
    stamp: Stamp,
) -> Result<(), Failure> {
    for (member, group) in members.iter_mut().zip(groups.iter()) {
        if !group.pieces.is_empty() {
            stores = Some(group.append(member.session).after(stores));
        }
    }
    window::fence(members, stores.expect("a group has records"));
    let mut result = Ok(());
    for (index, (member, group)) in members.iter_mut().zip(groups).enumerate() {
        if group.pieces.is_empty() {
            continue;
        }
        if let Err(cause) = group.show(member.session) {
            result = Err(Failure {
                member: index,
                cause,
            });
        }
        member.session.publish(Some(stamp));
    }
    result
}
