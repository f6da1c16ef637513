//! Versions that a leg lacks, because it was away or did not exist when a snapshot was made.
//!
//! 1. [`Pool::adopt_snapshots`] lists the snapshots. From then on checkpoints keep versions for them.
//! 2. The volume raises the slice's epoch. Versions that die at that epoch or later are right by themselves, because the
//!    pages of the slice are equal to those of other legs by then. The others do not change any more.
//! 3. [`Pool::list_versions`] lists those others, here and on a leg that has all of them.
//! 4. [`Pool::edit_versions`] makes them equal ([`plan_version_edits`]).
//!
//! Each step can be repeated, and nothing remembers its progress: equal lists need no edit.
//!
//! Invariants:
//! - the head of the log has passed all versions below the epoch before they are edited. So no line brings an edited
//!   version back;
//! - the entry of an added version is durable before its page is written, and a free slot before its entry is used again.
//!
//! [`plan_version_edits`]: pagemesh_base::slice::plan_version_edits

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::{SettledVersions, SliceVersions};
use super::LEAF_PAGES;
use super::blocks::{Block, EditedVersions};
use super::pages::{NODES_PER_PAGE, OWN};
use crate::format::version_pages::{BLOCK_ENTRIES, DamagedVersions, SNAPSHOTS_MAX};
use crate::session::LegSession;
use crate::session::copy_pages::copy_pages;
use crate::session::version_slots::VersionSlot;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    LIST_ENTRIES_MAX, PageVersion, VERSION_EDITS_MAX, VersionEdit, VersionEdits, VersionList,
    VersionRange,
};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Leaves with versions that one call lists.
const LISTED_LEAVES: u64 = 64;
/// Leaves without versions that it passes.
const LISTED_EMPTY_LEAVES: u64 = 1 << 12;
/// Steps of a merge that one call does.
const SETTLE_STEPS: usize = 16;
/// The birth of a version whose birth is not known: it is older than each snapshot.
const OLDEST_BIRTH: Epoch = Epoch(1);

/// A page to be written: its place in the object of versions, its birth and its bytes.
struct AddedPage<'a> {
    at: PageNo,
    birth: Epoch,
    bytes: &'a [u8; PAGE_BYTES],
}

impl<M: Media> Pool<M> {
    /// Lists further snapshots of a slice, of any epochs. From now on checkpoints keep versions for them; those from before
    /// are missing. Durable when it returns.
    ///
    /// # Errors
    /// When there is no such slice, an epoch is none of a snapshot, or the pool lacks room.
    pub fn adopt_snapshots(
        &mut self,
        slice: SliceId,
        adopted: &[Epoch],
    ) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        self.check_versions(object)?;
        let present = self.versions.of(object);
        let newest = present.map_or(Epoch(0), SliceVersions::newest);
        let lowest = entry.base.max(OLDEST_BIRTH);
        let bad = adopted.iter().find(|it| **it <= lowest || it.0 > EPOCH_MAX);
        if let Some(&snapshot) = bad {
            return Err(ObjectError::BadSnapshot { snapshot, newest });
        }
        let present = present.map_or(&[][..], |versions| &versions.snapshots);
        let all: BTreeSet<Epoch> = present.iter().chain(adopted).copied().collect();
        if all.len() > SNAPSHOTS_MAX {
            return Err(ObjectError::SnapshotsFull(SNAPSHOTS_MAX));
        }
        if all.len() > present.len() {
            self.ensure_version_log()?;
            self.ensure_versions_object(object, entry.slice)?;
            self.store_snapshots(object, all.into_iter().collect(), false)?;
        }
        self.update_shared_below(object)
    }

    /// The versions of a range that died below an epoch. No change below that epoch may come any more: the slice must have
    /// the epoch, or a newer one.
    ///
    /// # Errors
    /// When there is no such slice, its epoch is older, its versions are damaged, or the pool lacks room to merge them.
    pub fn list_versions(
        &mut self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, ObjectError> {
        let (object, entry) = self.find(slice)?;
        if entry.epoch < range.below {
            let (current, wanted) = (entry.epoch, range.below);
            return Err(ObjectError::StaleEpoch { current, wanted });
        }
        self.check_versions(object)?;
        self.check_lost_versions(object, &range.snapshots)?;
        let mut list = VersionList::default();
        if self.versions.of(object).is_none() {
            return Ok(list);
        }
        if !self.settle_versions(object, range.below)? {
            list.next = Some(range.from);
            return Ok(list);
        }
        let leaves = entry.size_bytes.div_ceil(LEAF_PAGES * PAGE_BYTES as u64);
        let first = range.from.0 / LEAF_PAGES;
        let (mut listed, mut passed) = (0, 0);
        for leaf in first..leaves {
            if listed == LISTED_LEAVES || passed == LISTED_EMPTY_LEAVES {
                list.next = Some(PageNo(leaf * LEAF_PAGES));
                break;
            }
            let found = self.leaf_versions(object, leaf);
            if self.is_damage(&found) {
                self.mark_damaged(object);
            }
            let of_leaf = found?;
            match of_leaf.is_empty() {
                true => passed += 1,
                false => listed += 1,
            }
            list.next = add_whole_pages(&mut list.versions, of_leaf, range);
            if list.next.is_some() {
                break;
            }
        }
        Ok(list)
    }

    /// Edits the versions of one leaf that died below an epoch, as a plan of [`Pool::list_versions`] says. Durable when it
    /// returns. An edit that was made before has no effect.
    ///
    /// # Errors
    /// When there is no such slice, the versions below the epoch are not merged (the caller lists them again), the edits are
    /// none of one leaf, or the pool lacks room. Then some of the edits may be made.
    pub fn edit_versions(
        &mut self,
        slice: SliceId,
        request: &VersionEdits,
    ) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        self.check_versions(object)?;
        let pages = entry.size_bytes / PAGE_BYTES as u64;
        let Some(leaf) = check_edits(request, pages) else {
            return Err(ObjectError::BadVersionEdits);
        };
        if !self.is_settled(object, request.below) {
            return Err(ObjectError::VersionsNotMerged(request.below));
        }
        let added = request.data.len() / PAGE_BYTES;
        self.ensure_free_frames(added as u64 + (1 + NODES_PER_PAGE) * added as u64)?;
        self.mapping.end_version_generation();
        let edited = self.edit_leaf(object, leaf, request);
        self.mapping.end_version_generation();
        if self.is_damage(&edited) {
            self.mark_damaged(object);
        }
        edited
    }

    fn edit_leaf(
        &mut self,
        origin: ObjectId,
        leaf: u64,
        request: &VersionEdits,
    ) -> Result<(), ObjectError> {
        let mut versions = self.edited_versions(origin);
        let mut blocks = self.blocks_of(&versions, leaf)?;
        self.remove_versions(&versions, &mut blocks, &request.edits)?;
        // An entry is used again only when its slot is durably free.
        self.order_changes()?;
        self.set_deaths(&mut versions, &mut blocks, &request.edits)?;
        let pages = request.data.as_chunks::<PAGE_BYTES>().0;
        let added = self.place_added(&mut versions, (leaf, &mut blocks), &request.edits, pages)?;
        self.commit_versions(origin, &mut versions)?;
        self.order_changes()?;
        self.write_added(versions.object, &added)?;
        self.order_changes()
    }

    /// Frees the versions that edits remove.
    fn remove_versions(
        &mut self,
        versions: &EditedVersions,
        blocks: &mut [Block],
        edits: &[VersionEdit],
    ) -> Result<(), ObjectError> {
        for block in blocks {
            let mut slots = vec![VersionSlot::Keep; BLOCK_ENTRIES as usize];
            for (entry, present) in self.block_versions(versions.object, block) {
                let is_removed = |edit: &VersionEdit| {
                    edit.to.is_none()
                        && (edit.birth, edit.from) == (present.birth, Some(present.death))
                        && edit.page.0 % LEAF_PAGES == present.page.0
                };
                if edits.iter().any(is_removed) {
                    slots[entry] = VersionSlot::Free;
                }
            }
            self.free_version_slots(versions, block, &slots)?;
        }
        Ok(())
    }

    /// Sets the deaths of versions that are there.
    fn set_deaths(
        &mut self,
        versions: &mut EditedVersions,
        blocks: &mut [Block],
        edits: &[VersionEdit],
    ) -> Result<(), ObjectError> {
        for block in blocks {
            let mut is_edited = false;
            for (entry, present) in self.block_versions(versions.object, block) {
                let is_of = |edit: &&VersionEdit| {
                    edit.birth == present.birth && edit.page.0 % LEAF_PAGES == present.page.0
                };
                let death = edits.iter().filter(is_of).find_map(|edit| match edit.from {
                    Some(from) => edit.to.filter(|_| from == present.death),
                    // It was added before.
                    None => edit.to.max(Some(present.death)),
                });
                if let Some(death) = death.filter(|it| *it != present.death) {
                    block.entries.set_version(entry, present.page.0, death);
                    is_edited = true;
                }
            }
            if is_edited {
                self.set_entries(versions, block.number, &block.entries)?;
            }
        }
        Ok(())
    }

    /// Gives each added version an entry.
    fn place_added<'a>(
        &mut self,
        versions: &mut EditedVersions,
        (leaf, blocks): (u64, &mut Vec<Block>),
        edits: &[VersionEdit],
        pages: &'a [[u8; PAGE_BYTES]],
    ) -> Result<Vec<AddedPage<'a>>, ObjectError> {
        let present: BTreeSet<(PageNo, Epoch)> = blocks
            .iter()
            .flat_map(|block| self.block_versions(versions.object, block))
            .map(|(_, it)| (it.page, it.birth))
            .collect();
        let mut free: Vec<(usize, usize)> = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            free.extend(block.free_entries().into_iter().map(|entry| (index, entry)));
        }
        let mut added = Vec::new();
        let mut changed = BTreeSet::new();
        let new = edits.iter().filter(|edit| edit.from.is_none()).zip(pages);
        for (edit, bytes) in new {
            let in_leaf = edit.page.0 % LEAF_PAGES;
            let Some(death) = edit.to else { continue };
            if present.contains(&(PageNo(in_leaf), edit.birth)) {
                continue;
            }
            if free.is_empty() {
                let block = self.add_block(versions, leaf)?;
                let entries = block.free_entries().into_iter();
                free.extend(entries.map(|entry| (blocks.len(), entry)));
                blocks.push(block);
            }
            let Some((index, entry)) = free.pop() else {
                return Err(DamagedVersions.into());
            };
            let block = &mut blocks[index];
            block.entries.set_version(entry, in_leaf, death);
            changed.insert(index);
            let at = PageNo(versions.head.frames_at(block.number).0 + entry as u64);
            let birth = edit.birth;
            added.push(AddedPage { at, birth, bytes });
        }
        for index in changed {
            let block = &blocks[index];
            self.set_entries(versions, block.number, &block.entries)?;
        }
        Ok(added)
    }

    /// Writes the pages of added versions, with their births.
    fn write_added(
        &mut self,
        object: ObjectId,
        added: &[AddedPage<'_>],
    ) -> Result<(), ObjectError> {
        let handle = self.versions_handle(object)?;
        for page in added {
            self.with_owner_frames(1 + NODES_PER_PAGE, |session| {
                let leg = LegSession { session, handle };
                let copied = copy_pages(leg, page.at, &[page.birth], page.bytes, OWN);
                copied.map_err(|failure| failure.cause)
            })?;
        }
        Ok(())
    }

    /// The versions of a leaf that are merged.
    fn leaf_versions(
        &mut self,
        origin: ObjectId,
        leaf: u64,
    ) -> Result<Vec<PageVersion>, ObjectError> {
        let versions = self.edited_versions(origin);
        if self.newest_block(&versions, leaf)?.is_none() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for block in self.blocks_of(&versions, leaf)? {
            let of_block = self.block_versions(versions.object, &block).into_iter();
            found.extend(of_block.map(|(_, it)| PageVersion {
                page: PageNo(leaf * LEAF_PAGES + it.page.0),
                ..it
            }));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// The versions of a block, with their entries. Pages count from the first one of the leaf. No snapshot of a clone is
    /// as old as its base, so a version from before is born at the base.
    fn block_versions(&self, object: ObjectId, block: &Block) -> Vec<(usize, PageVersion)> {
        let base = self.objects.get(&object).map_or(Epoch(0), |it| it.base);
        let oldest = base.max(OLDEST_BIRTH);
        let version = |(entry, page, frame, death)| {
            let birth = self.mapping.frame_word(frame).birth();
            let version = PageVersion {
                page: PageNo(page),
                birth: birth.unwrap_or(oldest).max(oldest),
                death,
            };
            (entry, version)
        };
        block.versions().map(version).collect()
    }

    /// Applies and merges all versions that died below an epoch. False: the caller tries again.
    fn settle_versions(&mut self, object: ObjectId, below: Epoch) -> Result<bool, ObjectError> {
        let known = self.versions.settled.get(&object).copied();
        if known.is_none_or(|it| it.below < below) {
            // Operations of earlier epochs were admitted before the slice got this one.
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
    fn is_settled(&self, object: ObjectId, below: Epoch) -> bool {
        let settled = self.versions.settled.get(&object);
        let head = self.superblock.version_log.head;
        settled.is_some_and(|it| it.below >= below && head >= it.after)
    }
}

/// The leaf of the edits; none: they are not of one leaf of the slice, or have another number of pages.
fn check_edits(request: &VersionEdits, pages: u64) -> Option<u64> {
    let edits = &request.edits;
    let leaf = edits.first()?.page.0 / LEAF_PAGES;
    let is_sound = |edit: &VersionEdit| {
        edit.page.0 / LEAF_PAGES == leaf
            && edit.page.0 < pages
            && edit.birth >= OLDEST_BIRTH
            && (edit.from.is_some() || edit.to.is_some())
            && edit
                .to
                .is_none_or(|to| edit.birth < to && to < request.below)
            && edit.from.is_none_or(|from| from < request.below)
    };
    let added = edits.iter().filter(|edit| edit.from.is_none()).count();
    let is_sound = edits.len() <= VERSION_EDITS_MAX
        && edits.iter().all(is_sound)
        && request.data.len() == added * PAGE_BYTES;
    is_sound.then_some(leaf)
}

/// Adds the versions of a leaf that a range asks for. Returns the page to continue with, if the list is full.
fn add_whole_pages(
    list: &mut Vec<PageVersion>,
    of_leaf: Vec<PageVersion>,
    range: &VersionRange,
) -> Option<PageNo> {
    let is_meant = |it: &PageVersion| {
        it.page >= range.from
            && it.death < range.below
            && range
                .snapshots
                .iter()
                .any(|&snapshot| it.is_seen_by(snapshot))
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
