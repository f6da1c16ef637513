//! The pages that snapshots of a slice see, counted by the snapshots that see them.
//!
//! A version with birth *b* and death *d* is seen by the snapshots in (*b*, *d*]: a run of neighbours. A page of the slice
//! itself is seen by those after its birth, and by the slice. So the numbers of pages by run tell what each snapshot keeps
//! alone, what it shares, and what a deletion of any set frees.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::PendingVersion;
use super::LEAF_PAGES;
use super::blocks::Block;
use crate::format::frame_word::PageBirth;
use crate::format::table::SlotLocation;
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SEEN_BY_SLICE, SEEN_RUNS_MAX, SeenPages, SeenPagesList};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;

/// Leaves with pages that one call counts: some milliseconds of the owner.
const COUNTED_LEAVES: u64 = 64;
/// Leaves without pages that it passes.
const PASSED_LEAVES: u64 = 1 << 14;
/// Versions that one call counts, at most, apart from those of its last leaf.
const COUNTED_VERSIONS: u64 = 1 << 15;
/// Runs that one call counts, at most, apart from those of its last leaf.
const COUNTED_RUNS: usize = SEEN_RUNS_MAX / 8;

/// Pages by the first and last snapshot that see them.
type PagesByRun = BTreeMap<(Epoch, Epoch), u64>;

impl<M: Media> Pool<M> {
    /// Counts pages of a slice by the snapshots that see them, from a page on. Changes that clients make meanwhile may be
    /// counted or not. Pages that no snapshot sees are counted, too, with the slice as their only reader.
    ///
    /// # Errors
    /// When there is no such slice, its versions are damaged, or a session is stuck: the caller tries again.
    pub fn count_seen_pages(
        &mut self,
        slice: SliceId,
        from: PageNo,
    ) -> Result<SeenPagesList, ObjectError> {
        let (object, entry) = self.find(slice)?;
        self.check_versions(object)?;
        if from == PageNo(0) {
            // Records that are not applied replaced versions that the log does not have yet.
            let committed = self.mapping.control.seq().load(Ordering::Acquire);
            self.wait_for_ops()?;
            self.checkpoint_versions(Seq(committed))?;
            self.check_versions(object)?;
        }
        let snapshots = match self.versions.of(object) {
            Some(versions) => versions.snapshots.clone(),
            None => Vec::new(),
        };
        let leaves = entry.size_bytes.div_ceil(LEAF_PAGES * PAGE_BYTES as u64);
        let first = from.0 / LEAF_PAGES;
        let mut runs = PagesByRun::new();
        let (mut leaf, mut counted, mut versions) = (first, 0, 0);
        while leaf < leaves
            && leaf < first + PASSED_LEAVES
            && counted < COUNTED_LEAVES
            && versions < COUNTED_VERSIONS
            && runs.len() < COUNTED_RUNS
        {
            let is_linked = self.count_live_pages(object, leaf, &snapshots, &mut runs)?;
            let kept = self.count_kept_pages((object, entry.base), leaf, &snapshots, &mut runs)?;
            counted += u64::from(is_linked || kept > 0);
            versions += kept;
            leaf += 1;
        }
        let pages = runs
            .into_iter()
            .map(|((first, last), pages)| SeenPages { pages, first, last });
        Ok(SeenPagesList {
            runs: pages.collect(),
            next: (leaf < leaves).then_some(PageNo(leaf * LEAF_PAGES)),
        })
    }

    /// Counts the pages of a leaf of the slice. False: it has none.
    fn count_live_pages(
        &self,
        object: ObjectId,
        leaf: u64,
        snapshots: &[Epoch],
        runs: &mut PagesByRun,
    ) -> Result<bool, ObjectError> {
        let first = PageNo(leaf * LEAF_PAGES);
        let SlotLocation::At(at) = self.mapping.locate(object, 0, first)? else {
            return Ok(false);
        };
        for index in 0..LEAF_PAGES as usize {
            let (at, page) = (at + index * 8, PageNo(first.0 + index as u64));
            let birth = match self.mapping.birth(at, page) {
                PageBirth::NeverWritten => continue,
                PageBirth::At(birth) => birth,
                // A page of unknown birth is older than each snapshot, as for the checkpoint.
                PageBirth::Unknown => Epoch(0),
            };
            let slot = self.mapping.slot(at, page)?;
            if slot.frame().is_none() || slot.is_changing() {
                continue;
            }
            let after = snapshots.partition_point(|&snapshot| snapshot <= birth);
            let first = snapshots.get(after).copied().unwrap_or(SEEN_BY_SLICE);
            *runs.entry((first, SEEN_BY_SLICE)).or_default() += 1;
        }
        Ok(true)
    }

    /// Counts the versions of a leaf, and returns their number. In a clone, those born before its base belong to the
    /// origin.
    fn count_kept_pages(
        &mut self,
        (object, base): (ObjectId, Epoch),
        leaf: u64,
        snapshots: &[Epoch],
        runs: &mut PagesByRun,
    ) -> Result<u64, ObjectError> {
        if snapshots.is_empty() {
            return Ok(0);
        }
        let mut counted = 0;
        let mut count = |birth: Epoch, death: Epoch| {
            counted += 1;
            if birth < base {
                return;
            }
            let from = snapshots.partition_point(|&snapshot| snapshot <= birth);
            let end = snapshots.partition_point(|&snapshot| snapshot <= death);
            if from < end {
                *runs
                    .entry((snapshots[from], snapshots[end - 1]))
                    .or_default() += 1;
            }
        };
        let versions = self.edited_versions(object);
        let blocks = self.blocks_of(&versions, leaf)?;
        let pending = self.versions.pending.get(&(object, leaf));
        let mut linked = HashSet::new();
        for (_, page, frame, death) in blocks.iter().flat_map(Block::versions) {
            let birth = self.mapping.frame_word(frame).birth();
            count(birth.unwrap_or(Epoch(0)), death);
            if pending.is_some() {
                linked.insert((page, death));
            }
        }
        for PendingVersion { version, .. } in pending.into_iter().flatten() {
            // A line from before a crash may be linked already.
            if !linked.contains(&(version.page.0 % LEAF_PAGES, version.death)) {
                count(version.birth, version.death);
            }
        }
        Ok(counted)
    }
}
