//! Lists of the views of snapshots, for a comparison with another leg.
//!
//! A version that died below the epoch of the list is merged before it is listed, and does not change any more. All others
//! are listed with the epoch as their death: pages of the slice, and those that were replaced since.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::SettledVersions;
use super::LEAF_PAGES;
use crate::format::frame_word::PageBirth;
use crate::format::table::SlotLocation;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{LIST_ENTRIES_MAX, PageVersion, VIEWS_ONLY, VersionList, VersionRange};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Leaves with pages that one call lists. With many snapshots, a leaf has many versions.
const LISTED_LEAVES: u64 = 64;
const LISTED_LEAVES_OF_MANY: u64 = 4;
/// More snapshots are many.
const MANY_SNAPSHOTS: usize = 16;
/// Versions that one call walks, at most, apart from those of its last leaf.
const WALKED_VERSIONS: usize = 1 << 15;
/// Looks at a page that changes.
const LOOKS_MAX: usize = 1000;
/// Leaves without pages that it passes.
const LISTED_EMPTY_LEAVES: u64 = 1 << 12;
/// Steps of a merge that one call does.
const SETTLE_STEPS: usize = 16;

/// Pages of the slice that snapshots of a range see.
#[derive(Default)]
struct LivePages {
    by_leaf: BTreeMap<u64, Vec<PageVersion>>,
    count: usize,
    /// Some pages are newer than the snapshots, so records may have replaced those that these see.
    has_later: bool,
}

impl<M: Media> Pool<M> {
    /// The views of the snapshots of a range. The slice must have the epoch of the range, or a newer one.
    ///
    /// # Errors
    /// When there is no such slice or snapshot, its epoch is older, its versions are damaged, or the pool lacks room to
    /// merge them.
    pub fn list_versions(
        &mut self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, ObjectError> {
        let (object, entry) = self.find(slice)?;
        let is_look = range.below == VIEWS_ONLY;
        if !is_look && entry.epoch < range.below {
            let (current, wanted) = (entry.epoch, range.below);
            return Err(ObjectError::StaleEpoch { current, wanted });
        }
        self.check_versions(object)?;
        let known = self.versions.of(object);
        let is_unknown = |it: &&Epoch| !known.is_some_and(|known| known.has_snapshot(**it));
        if let Some(&snapshot) = range.snapshots.iter().find(is_unknown) {
            return Err(ObjectError::UnknownSnapshot { slice, snapshot });
        }
        self.check_lost_versions(object, &range.snapshots)?;
        let newest = range.snapshots.iter().max().copied().unwrap_or(Epoch(0));
        if newest >= range.below {
            let (snapshot, newest) = (newest, range.below);
            return Err(ObjectError::BadSnapshot { snapshot, newest });
        }
        if !is_look && entry.shared_below < newest {
            // An adoption ended before it told the sessions.
            self.update_shared_below(object)?;
            self.versions.settled.remove(&object);
        }
        if !is_look && !self.settle_versions(object, range.below)? {
            let next = Some(range.from);
            return Ok(VersionList {
                next,
                ..VersionList::default()
            });
        }
        let leaves = entry.size_bytes.div_ceil(LEAF_PAGES * PAGE_BYTES as u64);
        let first = range.from.0 / LEAF_PAGES;
        let count = match range.snapshots.len() > MANY_SNAPSHOTS {
            true => LISTED_LEAVES_OF_MANY,
            false => LISTED_LEAVES,
        };
        let (end, live) = self.live_pages(object, (first..leaves, count), newest)?;
        if live.has_later || is_look {
            let committed = self.mapping.control.seq().load(Ordering::Acquire);
            self.wait_for_ops()?;
            self.checkpoint_versions(Seq(committed))?;
            self.check_versions(object)?;
        }
        let mut list = self.list_leaves(object, first..end, live, range)?;
        if list.next.is_none() && end < leaves {
            list.next = Some(PageNo(end * LEAF_PAGES));
        }
        Ok(list)
    }

    /// Lists the views of the snapshots of a range in some leaves. The list has a next page if it is full before.
    fn list_leaves(
        &mut self,
        object: ObjectId,
        leaves: std::ops::Range<u64>,
        mut live: LivePages,
        range: &VersionRange,
    ) -> Result<VersionList, ObjectError> {
        let mut list = VersionList::default();
        let mut walked = 0;
        for leaf in leaves {
            if walked > WALKED_VERSIONS {
                list.next = Some(PageNo(leaf * LEAF_PAGES));
                return Ok(list);
            }
            let of_leaf = live.by_leaf.remove(&leaf).unwrap_or_default();
            let of_leaf = self.add_kept_versions(object, leaf, of_leaf, range.below)?;
            walked += of_leaf.len();
            list.next = add_whole_pages(&mut list.versions, of_leaf, range);
            if list.next.is_some() {
                return Ok(list);
            }
        }
        Ok(list)
    }

    /// The pages of some leaves that snapshots up to the newest one see, and the leaf to go on with.
    fn live_pages(
        &mut self,
        object: ObjectId,
        (leaves, count): (std::ops::Range<u64>, u64),
        newest: Epoch,
    ) -> Result<(u64, LivePages), ObjectError> {
        let mut live = LivePages::default();
        let (mut leaf, mut listed, mut passed) = (leaves.start, 0, 0);
        while leaf < leaves.end
            && listed < count
            && passed < LISTED_EMPTY_LEAVES
            && live.count < LIST_ENTRIES_MAX
        {
            let is_linked = self.add_live_leaf(object, leaf, newest, &mut live)?;
            match is_linked || self.has_kept_versions(object, leaf)? {
                true => listed += 1,
                false => passed += 1,
            }
            leaf += 1;
        }
        Ok((leaf, live))
    }

    /// Adds the pages of a leaf that are older than the newest snapshot. False: the leaf has no pages.
    fn add_live_leaf(
        &self,
        object: ObjectId,
        leaf: u64,
        newest: Epoch,
        live: &mut LivePages,
    ) -> Result<bool, ObjectError> {
        let first = PageNo(leaf * LEAF_PAGES);
        let SlotLocation::At(at) = self.mapping.locate(object, 0, first)? else {
            return Ok(false);
        };
        let mut found = Vec::new();
        for index in 0..LEAF_PAGES {
            let (at, page) = (at + index as usize * 8, PageNo(first.0 + index));
            match self.live_page(object, (at, page))? {
                Some((birth, _)) if birth >= newest => live.has_later = true,
                Some((birth, Some(sum))) => found.push(PageVersion {
                    page,
                    birth,
                    death: Epoch(u32::MAX),
                    sum,
                }),
                _ => {}
            }
        }
        live.count += found.len();
        live.by_leaf.insert(leaf, found);
        Ok(true)
    }

    /// The birth of a page of the slice, with its slot at byte `at`, and its checksum; without one, of a hole. Both are of one slot.
    fn live_page(
        &self,
        object: ObjectId,
        (at, page): (usize, PageNo),
    ) -> Result<Option<(Epoch, Option<u32>)>, ObjectError> {
        let oldest = self.oldest_birth(object);
        for _ in 0..LOOKS_MAX {
            let before = self.mapping.meta.load(at);
            let birth = self.mapping.birth(at, page);
            let slot = self.mapping.slot(at, page)?;
            let sum = slot
                .frame()
                .map(|frame| self.mapping.frame_word(frame).crc());
            let is_same = slot.encode() == before && self.mapping.meta.load(at) == before;
            if slot.is_changing() || !is_same {
                std::hint::spin_loop();
                continue;
            }
            return Ok(match birth {
                PageBirth::NeverWritten => None,
                PageBirth::At(birth) => Some((birth.max(oldest), sum)),
                PageBirth::Unknown => Some((oldest, sum)),
            });
        }
        Err(StoreError::TimedOut.into())
    }

    /// Whether a leaf may have versions.
    fn has_kept_versions(&mut self, object: ObjectId, leaf: u64) -> Result<bool, ObjectError> {
        if self.versions.pending.contains_key(&(object, leaf)) {
            return Ok(true);
        }
        let versions = self.edited_versions(object);
        let newest = self.newest_block(&versions, leaf);
        if self.is_damage(&newest) {
            self.mark_damaged(object);
        }
        Ok(newest?.is_some())
    }

    /// Adds the versions of a leaf that are kept, merged or not. Those that died at the epoch of the list or later, and pages
    /// of the slice, get that epoch as their death.
    fn add_kept_versions(
        &mut self,
        object: ObjectId,
        leaf: u64,
        mut found: Vec<PageVersion>,
        below: Epoch,
    ) -> Result<Vec<PageVersion>, ObjectError> {
        let merged = self.merged_versions(object, leaf);
        if self.is_damage(&merged) {
            self.mark_damaged(object);
        }
        found.extend(merged?);
        let oldest = self.oldest_birth(object);
        let pending = self.versions.pending.get(&(object, leaf));
        found.extend(pending.into_iter().flatten().map(|line| PageVersion {
            page: line.version.page,
            birth: line.version.birth.max(oldest),
            death: line.version.death,
            sum: self.mapping.frame_word(line.version.frame).crc(),
        }));
        for version in &mut found {
            version.death = version.death.min(below);
        }
        found.sort_unstable();
        // A page may have been replaced between the two looks at it.
        found.dedup();
        Ok(found)
    }

    fn merged_versions(
        &mut self,
        object: ObjectId,
        leaf: u64,
    ) -> Result<Vec<PageVersion>, ObjectError> {
        let versions = self.edited_versions(object);
        let mut found = Vec::new();
        for block in self.blocks_of(&versions, leaf)? {
            let of_block = self.block_versions(versions.object, &block).into_iter();
            found.extend(of_block.map(|(_, it)| PageVersion {
                page: PageNo(leaf * LEAF_PAGES + it.page.0),
                ..it
            }));
        }
        Ok(found)
    }

    /// Applies and merges all versions that died below an epoch. False: the caller tries again.
    fn settle_versions(&mut self, object: ObjectId, below: Epoch) -> Result<bool, ObjectError> {
        let known = self.versions.settled.get(&object).copied();
        if known.is_none_or(|it| it.below < below) {
            // Operations of earlier epochs began before the slice got this one, and take their seqs at the end.
            self.wait_for_ops()?;
            let committed = self.mapping.control.seq().load(Ordering::Acquire);
            self.wait_for_ops()?;
            self.checkpoint_versions(Seq(committed))?;
            let after = self.superblock.version_log.tail;
            let settled = SettledVersions { below, after };
            self.versions.settled.insert(object, settled);
        }
        for _ in 0..SETTLE_STEPS {
            if self.is_settled(object, below) {
                return Ok(true);
            }
            self.merge_all_soon();
            self.maintain_versions()?;
            if self.versions.is_out_of_room {
                return Err(StoreError::NoSpace.into());
            }
            self.check_versions(object)?;
        }
        Ok(self.is_settled(object, below))
    }

    /// Whether the durable head of the log has passed all versions that died below an epoch.
    pub(super) fn is_settled(&self, object: ObjectId, below: Epoch) -> bool {
        let settled = self.versions.settled.get(&object);
        let head = self.superblock.version_log.head;
        settled.is_some_and(|it| it.below >= below && head >= it.after)
    }
}

/// Adds the versions of a leaf that a range asks for. Returns the page to continue with, if the list is full.
fn add_whole_pages(
    list: &mut Vec<PageVersion>,
    of_leaf: Vec<PageVersion>,
    range: &VersionRange,
) -> Option<PageNo> {
    let is_meant = |it: &PageVersion| {
        let mut snapshots = range.snapshots.iter();
        it.page >= range.from && snapshots.any(|&snapshot| it.is_seen_by(snapshot))
    };
    for version in of_leaf.into_iter().filter(is_meant) {
        if list.len() >= LIST_ENTRIES_MAX {
            let page = version.page;
            let is_begun = list.first().is_some_and(|first| first.page < page);
            // A page has no more versions than there are snapshots in a request, unless it is damaged.
            if is_begun {
                list.retain(|it| it.page < page);
                return Some(page);
            }
        }
        list.push(version);
    }
    None
}
