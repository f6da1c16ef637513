//! Copies of pages from another leg. A copy keeps the birth of its source, so that the legs of a
//! column are equal in contents and births.
//!
//! Invariants:
//! - A record has one birth, so a copy has a record for each run of pages of one birth.
//! - A page of a clone that has a frame of its own is born at the clone's base or later: only then the clone frees the frame.
//! - A copy may replace a page of a later birth only if no complete snapshot sees the page. The manager ensures that: only a
//!   promotion makes a copy with fewer changes the source, and it gives up the snapshots that the copy lacks.

use super::commit::{RecordStamp, commit, encode_all, stream_page};
use super::operation::{OpRequirements, abort_all, begin_run, lock_run, unlock_and_end};
use super::write::load_changes_all;
use super::{LegFailure, LegSession, Page, clear, defects};
use crate::format::record::lines;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::damaged_page_error;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Replaces whole pages by copies with these births. A birth of 0 is unknown: the page is born now.
/// Without `data` all pages are holes; a hole with a birth replaces a hole, too.
///
/// # Errors
/// When the leg fails. Runs before the failing one have changed.
///
/// # Panics
/// When `data` has another number of pages than `births`.
pub(crate) fn copy_pages<M: Media>(
    leg: LegSession<'_, M>,
    page: PageNo,
    births: &[Epoch],
    data: &[u8],
    stamp: Stamp,
) -> Result<(), LegFailure> {
    let (bytes, is_hole) = (data.as_chunks::<PAGE_BYTES>().0, data.is_empty());
    assert!(is_hole || bytes.len() == births.len(), "whole pages");
    let len = (births.len() * PAGE_BYTES) as u64;
    let offset = page.0.saturating_mul(PAGE_BYTES as u64);
    let checked = leg.session.mapping.check_range(&leg.handle, offset, len);
    checked.map_err(|cause| LegFailure { leg: 0, cause })?;
    let pages_max = leg.session.pages_max();
    let base = leg.session.mapping.clone_bounds(&leg.handle).base;
    let own_birth = |birth: Epoch| match birth {
        Epoch(0) => birth,
        known => known.max(base),
    };
    let mut leg = [leg];
    let mut done = 0;
    while let Some(birth) = births.get(done).copied().map(own_birth) {
        let first = PageNo(page.0 + done as u64);
        let in_leaf = NODE_SLOTS - first.0 % NODE_SLOTS;
        let rest = births[done..].iter();
        let alike = rest.take_while(|it| own_birth(**it) == birth).count();
        let count = alike.min(in_leaf.min(pages_max) as usize);
        let stamp = RecordStamp {
            stamp,
            // A record with a birth has no room for the number of open operations.
            kept_birth: (birth.0 > 0 && stamp.open_ops == 0).then_some(birth),
        };
        match is_hole {
            false => copy_run(&mut leg, first, &bytes[done..done + count], stamp)?,
            true => copy_holes(&mut leg, first, count, stamp)?,
        }
        done += count;
    }
    Ok(())
}

/// Copies pages in one record.
fn copy_run<M: Media>(
    leg: &mut [LegSession<'_, M>; 1],
    page: PageNo,
    bytes: &[Page],
    stamp: RecordStamp,
) -> Result<(), LegFailure> {
    let count = bytes.len();
    let needs = OpRequirements {
        frames: count as u64,
        entry_lines: lines(count),
    };
    let slots = begin_run(leg, page, needs, stamp.stamp.epoch)?;
    lock_run(leg, page, count as u64)?;
    load_changes_all(leg, page, count, &slots)?;
    encode_all(leg, page, count, stamp, &slots);
    let mut stores = None;
    for (index, bytes) in bytes.iter().enumerate() {
        stores = Some(stream_page(leg, index, bytes));
    }
    commit(leg, page, slots, stamp.stamp, stores)
}

/// Makes pages holes. Without a birth, only pages that are mapped change.
fn copy_holes<M: Media>(
    leg: &mut [LegSession<'_, M>; 1],
    page: PageNo,
    count: usize,
    stamp: RecordStamp,
) -> Result<(), LegFailure> {
    let Some(birth) = stamp.kept_birth else {
        let (offset, len) = (page.0 * PAGE_BYTES as u64, (count * PAGE_BYTES) as u64);
        return clear(leg, offset, len, stamp.stamp);
    };
    let needs = OpRequirements {
        frames: 0,
        entry_lines: lines(count),
    };
    let slots = begin_run(leg, page, needs, stamp.stamp.epoch)?;
    lock_run(leg, page, count as u64)?;
    if defects::refuses_damage(&leg[0].session.mapping, slots[0], count) {
        return abort_all(leg, 0, damaged_page_error(page));
    }
    load_changes_all(leg, page, count, &slots)?;
    let [one] = leg;
    let LegSession { session, handle } = one;
    let changes = &mut session.record.changes;
    if changes.iter().all(|it| it.old.hole_birth() == Some(birth)) {
        unlock_and_end(one);
        return Ok(());
    }
    for change in changes {
        change.new = change.old.unmap(birth);
    }
    session.encode_record(handle, 0, page, stamp, true);
    session.flush_pending_slots(slots[0]);
    commit(leg, page, slots, stamp.stamp, None)
}
