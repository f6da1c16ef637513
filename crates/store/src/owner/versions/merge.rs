//! The merge of the version log: the frames of many lines are linked to the objects of versions.
//!
//! A batch takes all lines up to a position, leaf by leaf. Entries are durable first, and count only once their slots name
//! frames. After a crash the lines are merged again; versions that are linked already are left out: a page
//! has one version of each death.
//!
//! Invariant: the head of the log passes the lines of a batch only after all of them are linked.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::{MergeBatch, PendingVersion, SliceVersions};
use super::blocks::EditedVersions;
use crate::defect::{self, Defect};
use crate::format::object::Object;
use crate::format::version_pages::{BlockNo, HEAD_PAGE};
use crate::session::version_slots::VersionSlot;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_pmem::Media;
use std::collections::{BTreeMap, HashSet};
use std::ops::Bound;

/// Pages that one step changes, at most: those of one transaction, less those of the last leaf.
const STEP_PAGES: usize = 32;
/// Lines of one leaf in one step: those of eight blocks. So the leaf adds ten pages at most.
const LEAF_LINES: usize = 8 * 63;
/// Leaves of one step.
const STEP_LEAVES: usize = 64;

/// Frames to be linked, by block and entry.
type Links = BTreeMap<BlockNo, BTreeMap<usize, FrameNo>>;

impl<M: Media> Pool<M> {
    /// Begins a merge of all lines, whatever their number.
    pub(crate) fn merge_all_soon(&mut self) {
        if self.versions.batch.is_none() && !self.is_log_merged() {
            self.versions.batch = Some(MergeBatch {
                end: self.superblock.version_log.tail,
                next: (ObjectId(0), 0),
            });
        }
    }

    /// Whether a merge is in progress, and has room.
    pub(in crate::owner) fn is_merging(&self) -> bool {
        self.versions.batch.is_some() && !self.versions.is_out_of_room
    }

    /// Does one step of the owner's work for snapshots. True when there is more to do at once.
    pub(in crate::owner) fn maintain_versions(&mut self) -> Result<bool, ObjectError> {
        if self.versions.slices.is_empty() {
            return Ok(false);
        }
        if self.is_merge_due() {
            self.merge_all_soon();
        }
        let stepped = match self.versions.batch {
            Some(batch) => self.merge_step(batch).map(|()| true),
            None => self.sweep_step(),
        };
        // Without room in the pool or in the journal, or while a client holds a lock word: the next call tries again.
        let is_full = |cause: &ObjectError| {
            matches!(
                cause,
                ObjectError::Store(StoreError::NoSpace | StoreError::TimedOut)
            )
        };
        self.versions.is_out_of_room = stepped.as_ref().is_err_and(is_full);
        match stepped {
            // Snapshots must be dropped, or pages. Until then the lines wait.
            Err(cause) if is_full(&cause) => Ok(false),
            stepped => stepped,
        }
    }

    fn merge_step(&mut self, batch: MergeBatch) -> Result<(), ObjectError> {
        let leaves = self.next_leaves(batch);
        let Some(&(origin, _)) = leaves.first() else {
            return self.end_merge(batch);
        };
        let is_sound = |slice: &SliceVersions| !slice.is_damaged;
        if !self.versions.of(origin).is_some_and(is_sound) {
            self.abandon_lines(origin, batch.end);
            return Ok(());
        }
        let mut versions = self.edited_versions(origin);
        let mut links = Links::new();
        let mut merged = Vec::new();
        let pages_max = self.step_pages_max();
        for &(of, leaf) in leaves.iter().take_while(|(of, _)| *of == origin) {
            let lines = self.lines_of((of, leaf), batch.end);
            let placed = self.place_versions(&mut versions, leaf, &lines, &mut links);
            if self.is_damage(&placed) {
                self.mark_damaged(origin);
                return Ok(());
            }
            placed?;
            let end = lines.last().map_or(batch.end, |line| line.position + 1);
            merged.push(((of, leaf), end));
            if versions.edits.len() >= pages_max || lines.len() == LEAF_LINES {
                break;
            }
        }
        if let Err(cause) = self.commit_merge(origin, versions, &links) {
            // Some of the frames may be linked.
            self.versions.recovered_tail = self.versions.recovered_tail.max(batch.end);
            return Err(cause);
        }
        for &(key, end) in &merged {
            self.remove_merged(key, end);
        }
        // The last leaf may have more lines.
        if let (Some(batch), Some((key, _))) = (&mut self.versions.batch, merged.last()) {
            batch.next = *key;
        }
        Ok(())
    }

    /// Pages that one step changes, at most.
    pub(super) fn step_pages_max(&self) -> usize {
        STEP_PAGES.min(self.owner_session.group_lines_max() / 2)
    }

    /// Gives up lines of a slice whose list of versions is damaged. Their frames stay in use until a check of the pool.
    fn abandon_lines(&mut self, origin: ObjectId, end: u64) {
        let of_slice = self
            .versions
            .pending
            .range((origin, 0)..=(origin, u64::MAX));
        let keys: Vec<_> = of_slice.map(|(&key, _)| key).collect();
        for key in keys {
            self.remove_merged(key, end);
        }
    }

    /// The next leaves with lines of the batch.
    fn next_leaves(&self, batch: MergeBatch) -> Vec<(ObjectId, u64)> {
        let from = (Bound::Included(batch.next), Bound::Unbounded);
        let pending = self.versions.pending.range(from);
        let of_batch = pending.filter(|(_, lines)| lines.iter().any(|it| it.position < batch.end));
        of_batch.map(|(&key, _)| key).take(STEP_LEAVES).collect()
    }

    /// The first lines of a leaf, in the order of their positions.
    fn lines_of(&self, key: (ObjectId, u64), end: u64) -> Vec<PendingVersion> {
        let lines = self.versions.pending.get(&key);
        let lines = lines.into_iter().flatten().copied();
        lines
            .filter(|line| line.position < end)
            .take(LEAF_LINES)
            .collect()
    }

    fn remove_merged(&mut self, key: (ObjectId, u64), end: u64) {
        if let Some(lines) = self.versions.pending.get_mut(&key) {
            let before = lines.len();
            lines.retain(|line| line.position >= end);
            self.versions.pending_lines -= (before - lines.len()) as u64;
            if lines.is_empty() {
                self.versions.pending.remove(&key);
            }
        }
    }

    /// Gives each version of a leaf an entry of a block.
    fn place_versions(
        &mut self,
        versions: &mut EditedVersions,
        leaf: u64,
        lines: &[PendingVersion],
        links: &mut Links,
    ) -> Result<(), ObjectError> {
        let mut lines = lines.to_vec();
        if lines
            .iter()
            .any(|line| line.position < self.versions.recovered_tail)
        {
            let blocks = self.blocks_of(versions, leaf)?;
            let linked = blocks.iter().flat_map(|block| block.versions());
            // Not by its frame: the page may have moved since.
            let linked: HashSet<_> = linked.map(|(_, page, _, death)| (page, death)).collect();
            lines.retain(|PendingVersion { version, .. }| {
                !linked.contains(&(version.page.0 % super::LEAF_PAGES, version.death))
            });
        }
        let mut lines = lines.into_iter().peekable();
        let mut block = match self.newest_block(versions, leaf)? {
            Some(number) => Some(self.read_block(versions, number)?),
            None => None,
        };
        while lines.peek().is_some() {
            let mut to = match block.take() {
                Some(block) => block,
                None => self.add_block(versions, leaf)?,
            };
            let free = to.free_entries();
            for (entry, line) in free.into_iter().zip(&mut lines) {
                let in_leaf = line.version.page.0 % super::LEAF_PAGES;
                to.entries.set_version(entry, in_leaf, line.version.death);
                let of_block = links.entry(to.number).or_default();
                of_block.insert(entry, line.version.frame);
            }
            self.set_entries(versions, to.number, &to.entries)?;
        }
        Ok(())
    }

    /// Commits the entries, then links the frames.
    fn commit_merge(
        &mut self,
        origin: ObjectId,
        mut versions: EditedVersions,
        links: &Links,
    ) -> Result<(), ObjectError> {
        self.commit_versions(origin, &mut versions)?;
        self.order_changes()?;
        for (&block, of_block) in links {
            let entries = of_block.keys().copied();
            let (Some(first), Some(last)) = (entries.clone().min(), entries.max()) else {
                continue;
            };
            let slot = |entry| {
                of_block
                    .get(&entry)
                    .map_or(VersionSlot::Keep, |&it| VersionSlot::Link(it))
            };
            let slots: Vec<_> = (first..=last).map(slot).collect();
            let page = PageNo(versions.head.frames_at(block).0 + first as u64);
            self.change_version_slots(versions.object, page, &slots)?;
        }
        Ok(())
    }

    /// Commits the edits and the head of an object of versions. Enlarges it before, if it has more blocks.
    pub(super) fn commit_versions(
        &mut self,
        origin: ObjectId,
        versions: &mut EditedVersions,
    ) -> Result<(), ObjectError> {
        let EditedVersions { object, head, .. } = *versions;
        let present = self.versions.slices.get(&origin).map(|slice| slice.head);
        if present != Some(head) {
            versions.edits.set(HEAD_PAGE, head.encode());
        }
        let entry = self.objects[&object];
        let size_bytes = head.size_bytes(head.next_block);
        if size_bytes > entry.size_bytes {
            self.commit_entry(
                object,
                Object {
                    size_bytes,
                    ..entry
                },
            )?;
        }
        let edits = std::mem::take(&mut versions.edits);
        if edits.len() > 0 {
            self.commit_edits(object, edits)?;
        }
        if let Some(slice) = self.versions.slices.get_mut(&origin) {
            slice.head = head;
        }
        Ok(())
    }

    fn end_merge(&mut self, batch: MergeBatch) -> Result<(), ObjectError> {
        self.store_damage()?;
        self.versions.batch = None;
        self.versions.merged_head = batch.end;
        // Sweeps and deletions wait for it, and later checkpoints need the room.
        Ok(self.pass_log_head()?)
    }

    /// Lines below this position are linked.
    pub(in crate::owner) fn merged_log_head(&self) -> u64 {
        match (defect::is(Defect::VersionLogHeadEarly), self.versions.batch) {
            (true, Some(batch)) => batch.end,
            _ => self.versions.merged_head,
        }
    }
}
