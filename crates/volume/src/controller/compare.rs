//! Comparisons of the legs of a column by checksums and births. No data travels.

use super::copy::{CopyError, LegConnection, births};
use super::leg_errors::lose_leg_if_gone;
use super::state::ControllerState;
use crate::limits::RESYNC_CHUNK_BYTES;
use crate::snapshot::LegSet;
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
    debug_assert!(len <= RESYNC_CHUNK_BYTES);
    let whole = vec![(offset, len)];
    let request = SliceRequest::Checksums {
        page: PageNo(offset / PAGE_BYTES as u64),
        count: len.div_ceil(PAGE_BYTES as u64) as u32,
    };
    let wanted = first.control.call(state, request.clone()).await;
    let Ok(SliceReply::Checksums(wanted)) = wanted else {
        return whole;
    };
    let mut unequal = vec![false; wanted.len()];
    for other in others {
        match other.control.call(state, request.clone()).await {
            Ok(SliceReply::Checksums(found)) if found.len() == wanted.len() => {
                let pairs = wanted.iter().zip(found).zip(&mut unequal);
                pairs.for_each(|((wanted, found), unequal)| *unequal |= *wanted != found);
            }
            _ => return whole,
        }
    }
    marked_runs(&unequal, offset, len)
}

/// The parts of a chunk with two known births that differ, in whole pages except at the end. A page that was
/// never written has no birth.
pub(super) async fn ranges_of_other_birth(
    state: &ControllerState,
    first: &LegConnection,
    other: &LegConnection,
    (offset, len): (u64, u64),
) -> Result<Vec<(u64, u64)>, CopyError> {
    let range = (offset, len.next_multiple_of(PAGE_BYTES as u64));
    let wanted = births(state, first, range).await?;
    let found = births(state, other, range).await?;
    let pairs = wanted.iter().zip(&found);
    let differ = pairs.map(|(wanted, found)| wanted != found && wanted.0 > 0 && found.0 > 0);
    Ok(marked_runs(&differ.collect::<Vec<_>>(), offset, len))
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
