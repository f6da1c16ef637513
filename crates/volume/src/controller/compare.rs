//! Comparisons of the legs of a column by checksums and births. No data travels.

use super::copy::{CopyError, LegConnection, request_births, take_births};
use super::leg_errors::lose_leg_if_gone;
use super::state::ControllerState;
use crate::limits::RESYNC_CHUNK_BYTES;
use crate::snapshot::LegSet;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::PageNo;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;

/// Whether a chunk differs between legs. An unreadable chunk counts as different; the copy then
/// finds the cause.
pub(super) async fn differs(
    state: &ControllerState,
    first: &LegConnection,
    others: &[LegConnection],
    offset: u64,
    len: u64,
) -> bool {
    !differing_ranges(state, first, others, offset, len)
        .await
        .is_empty()
}

/// The parts of a chunk that differ, in whole pages except at the end; see [`differs`].
pub(super) async fn differing_ranges(
    state: &ControllerState,
    first: &LegConnection,
    others: &[LegConnection],
    offset: u64,
    len: u64,
) -> Vec<(u64, u64)> {
    let unequal = unequal_pages(state, first, others, (offset, len)).await;
    marked_runs(&unequal, offset, len)
}

/// The parts of a chunk with other contents or another birth. All is requested at once.
pub(super) async fn ranges_of_other_content_or_birth(
    state: &ControllerState,
    first: &LegConnection,
    other: &LegConnection,
    (offset, len): (u64, u64),
) -> Result<Vec<(u64, u64)>, CopyError> {
    let births = [first, other].map(|leg| request_births(state, leg, (offset, len)));
    let others = std::slice::from_ref(other);
    let mut unequal = unequal_pages(state, first, others, (offset, len)).await;
    let born = unequal_births(state, [first, other], births).await?;
    unequal
        .iter_mut()
        .zip(born)
        .for_each(|(unequal, born)| *unequal |= born);
    Ok(marked_runs(&unequal, offset, len))
}

/// The parts of a chunk with two known births that differ, in whole pages except at the end. A page that was
/// never written has no birth.
pub(super) async fn ranges_of_other_birth(
    state: &ControllerState,
    first: &LegConnection,
    other: &LegConnection,
    (offset, len): (u64, u64),
) -> Result<Vec<(u64, u64)>, CopyError> {
    let births = [first, other].map(|leg| request_births(state, leg, (offset, len)));
    let unequal = unequal_births(state, [first, other], births).await?;
    Ok(marked_runs(&unequal, offset, len))
}

/// The pages of a chunk that differ. All legs sum at once.
async fn unequal_pages(
    state: &ControllerState,
    first: &LegConnection,
    others: &[LegConnection],
    (offset, len): (u64, u64),
) -> Vec<bool> {
    debug_assert!(len <= RESYNC_CHUNK_BYTES);
    let count = len.div_ceil(PAGE_BYTES as u64) as usize;
    let request = || SliceRequest::Checksums {
        page: PageNo(offset / PAGE_BYTES as u64),
        count: count as u32,
    };
    let legs: Vec<_> = std::iter::once(first).chain(others).collect();
    let tags: Vec<_> = legs
        .iter()
        .map(|leg| leg.control.submit(state, request()))
        .collect();
    let mut unequal = vec![false; count];
    let mut wanted: Option<Vec<_>> = None;
    for (leg, tag) in legs.into_iter().zip(tags) {
        match (leg.control.answer(state, tag).await, &wanted) {
            (Ok(SliceReply::Checksums(found)), None) if found.len() == count => {
                wanted = Some(found)
            }
            (Ok(SliceReply::Checksums(found)), Some(wanted)) if found.len() == count => {
                let pairs = wanted.iter().zip(found).zip(&mut unequal);
                pairs.for_each(|((wanted, found), unequal)| *unequal |= *wanted != found);
            }
            _ => unequal.fill(true),
        }
    }
    unequal
}

/// The pages with two known births that differ.
async fn unequal_births(
    state: &ControllerState,
    legs: [&LegConnection; 2],
    requested: [u64; 2],
) -> Result<Vec<bool>, CopyError> {
    let wanted = take_births(state, legs[0], requested[0]).await;
    let found = take_births(state, legs[1], requested[1]).await;
    let (wanted, found) = (wanted?, found?);
    if defect::is(Defect::ResyncedBirthsDiffer) {
        return Ok(vec![false; wanted.len()]);
    }
    let pairs = wanted.iter().zip(&found);
    let differ = pairs.map(|(wanted, found)| wanted != found && wanted.0 > 0 && found.0 > 0);
    Ok(differ.collect())
}

/// Runs of marked pages within a chunk, as offset and length.
fn marked_runs(marked: &[bool], offset: u64, len: u64) -> Vec<(u64, u64)> {
    let page = PAGE_BYTES as u64;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (at, _) in (offset..)
        .step_by(PAGE_BYTES)
        .zip(marked)
        .filter(|(_, marked)| **marked)
    {
        let part = page.min(offset + len - at);
        match runs.last_mut() {
            Some((start, len)) if *start + *len == at => *len += part,
            _ => runs.push((at, part)),
        }
    }
    runs
}

/// Returns the legs that cannot read a page, and whether the others differ.
pub(super) async fn compare_page(
    state: &ControllerState,
    column: usize,
    parties: &[LegConnection],
    at: u64,
) -> Result<(LegSet, bool), String> {
    let mut damaged = LegSet::NONE;
    let mut seen = None;
    let mut differing = false;
    for party in parties {
        let request = SliceRequest::Checksums {
            page: PageNo(at / PAGE_BYTES as u64),
            count: 1,
        };
        match party.control.call(state, request).await {
            Ok(sum) => differing |= *seen.get_or_insert(sum.clone()) != sum,
            Err(SliceError::Damaged { .. }) => damaged.add(party.leg),
            Err(error) => {
                lose_leg_if_gone(state, column, party.leg, &error);
                return Err(error.to_string());
            }
        }
    }
    Ok((damaged, differing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differing_ranges_are_whole_pages_except_at_end() {
        let runs = |marked: &[bool], len| marked_runs(marked, 8192, len);
        assert_eq!(runs(&[false, false], 8192), []);
        assert_eq!(
            runs(&[true, true, false, true], 13_000),
            [(8192, 8192), (20_480, 712)]
        );
        assert_eq!(runs(&[true], 100), [(8192, 100)]);
    }
}
