//! Versions that a leg lacks, because it was away or did not exist when a snapshot was made.
//!
//! 1. [`Pool::adopt_snapshots`] lists the snapshots. From then on checkpoints keep versions for them, so their views do
//!    not change any more.
//! 2. [`Pool::list_versions`] lists their views, here and on a leg that has all of it: versions, and pages of the slice.
//! 3. [`Pool::edit_versions`] makes the views equal ([`plan_version_edits`]). It edits versions that died below the epoch of
//!    the layout.
//!
//! Each step can be repeated, and nothing remembers its progress: equal views need no edit.
//!
//! Invariants:
//! - a list that is made after the adoption has seen the end of all operations that began before it;
//! - the head of the log has passed all versions below the epoch before they are edited. So no line brings an edited
//!   version back;
//! - the entry of an added version is durable before its page is written, and a free slot before its entry is used again.
//!
//! [`plan_version_edits`]: pagemesh_base::slice::plan_version_edits

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::SliceVersions;
use super::LEAF_PAGES;
use super::blocks::{Block, EditedVersions};
use super::pages::{NODES_PER_PAGE, OWN};
use crate::format::version_pages::{BLOCK_ENTRIES, DamagedVersions, SNAPSHOTS_MAX};
use crate::session::LegSession;
use crate::session::copy_pages::copy_pages;
use crate::session::version_slots::VersionSlot;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, ObjectId, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{PageVersion, VERSION_EDITS_MAX, VersionEdit, VersionEdits};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::BTreeSet;

/// The birth of a version whose birth is not known: it is older than each snapshot.
pub(super) const OLDEST_BIRTH: Epoch = Epoch(1);

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
            // Operations that began before may still change pages in place.
            self.versions.settled.remove(&object);
        }
        self.update_shared_below(object)
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
        self.set_deaths(origin, &mut versions, &mut blocks, &request.edits)?;
        let pages = request.data.as_chunks::<PAGE_BYTES>().0;
        let new = request.edits.iter().filter(|edit| edit.from.is_none());
        // A version from before the base of a clone would belong to the origin.
        let oldest = self.oldest_birth(origin);
        let new = new.map(|edit| VersionEdit {
            birth: edit.birth.max(oldest),
            ..*edit
        });
        let new: Vec<_> = new.zip(pages).collect();
        let added = self.place_added((origin, &mut versions), (leaf, &mut blocks), &new)?;
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
                    edit.to.is_none() && edit.from == Some(present.death) && is_of(edit, &present)
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
        origin: ObjectId,
        versions: &mut EditedVersions,
        blocks: &mut [Block],
        edits: &[VersionEdit],
    ) -> Result<(), ObjectError> {
        for block in blocks {
            let mut is_edited = false;
            for (entry, present) in self.block_versions(versions.object, block) {
                let is_meant =
                    |edit: &&VersionEdit| edit.from == Some(present.death) && is_of(edit, &present);
                let death = edits.iter().find(is_meant).and_then(|edit| edit.to);
                if let Some(death) = death.filter(|it| *it != present.death) {
                    block.entries.set_version(entry, present.page.0, death);
                    is_edited = true;
                }
            }
            if is_edited {
                self.set_entries(versions, block.number, &block.entries)?;
                self.commit_if_many(origin, versions)?;
            }
        }
        Ok(())
    }

    /// Gives each added version an entry.
    fn place_added<'a>(
        &mut self,
        (origin, versions): (ObjectId, &mut EditedVersions),
        (leaf, blocks): (u64, &mut Vec<Block>),
        new: &[(VersionEdit, &'a [u8; PAGE_BYTES])],
    ) -> Result<Vec<AddedPage<'a>>, ObjectError> {
        let present: BTreeSet<PageVersion> = blocks
            .iter()
            .flat_map(|block| self.block_versions(versions.object, block))
            .map(|(_, it)| it)
            .collect();
        let mut free: Vec<(usize, usize)> = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            free.extend(block.free_entries().into_iter().map(|entry| (index, entry)));
        }
        let mut added = Vec::new();
        let mut changed = BTreeSet::new();
        for (edit, bytes) in new {
            let in_leaf = edit.page.0 % LEAF_PAGES;
            let Some(death) = edit.to else { continue };
            let version = PageVersion {
                page: PageNo(in_leaf),
                birth: edit.birth,
                death,
                sum: edit.sum,
            };
            if present.contains(&version) {
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
            self.commit_if_many(origin, versions)?;
        }
        Ok(added)
    }

    /// Commits the edits so far, if they fill a transaction. Each of them is right without the others.
    fn commit_if_many(
        &mut self,
        origin: ObjectId,
        versions: &mut EditedVersions,
    ) -> Result<(), ObjectError> {
        match versions.edits.len() >= self.step_pages_max() {
            true => self.commit_versions(origin, versions),
            false => Ok(()),
        }
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

    /// The versions of a block, with their entries. Pages count from the first one of the leaf. No snapshot of a clone is
    /// as old as its base, so a version from before is born at the base.
    pub(super) fn block_versions(
        &self,
        object: ObjectId,
        block: &Block,
    ) -> Vec<(usize, PageVersion)> {
        let oldest = self.oldest_birth(object);
        let version = |(entry, page, frame, death)| {
            let word = self.mapping.frame_word(frame);
            let version = PageVersion {
                page: PageNo(page),
                birth: word.birth().unwrap_or(oldest).max(oldest),
                death,
                sum: word.crc(),
            };
            (entry, version)
        };
        block.versions().map(version).collect()
    }

    /// The birth of pages of an object that are older than each of its snapshots.
    pub(super) fn oldest_birth(&self, object: ObjectId) -> Epoch {
        let base = self.objects.get(&object).map_or(Epoch(0), |it| it.base);
        base.max(OLDEST_BIRTH)
    }
}

/// Whether an edit is about a version of the page. Its page counts from the first one of the leaf.
fn is_of(edit: &VersionEdit, version: &PageVersion) -> bool {
    (edit.page.0 % LEAF_PAGES, edit.birth, edit.sum) == (version.page.0, version.birth, version.sum)
}

/// The leaf of the edits; none: they are not of one leaf of the slice, or their pages are others.
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
    let (pages, left) = request.data.as_chunks::<PAGE_BYTES>();
    let sums = edits
        .iter()
        .filter(|edit| edit.from.is_none())
        .map(|it| it.sum);
    let is_sound = edits.len() <= VERSION_EDITS_MAX
        && edits.iter().all(is_sound)
        && left.is_empty()
        && sums.eq(pages.iter().map(|page| crc32c(page)));
    is_sound.then_some(leaf)
}
