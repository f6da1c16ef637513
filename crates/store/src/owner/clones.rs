//! Clones: slices that begin with the pages of a snapshot of another slice, their origin.
//!
//! 1. [`Pool::create_clone`] creates the object. Its base is the epoch of the snapshot.
//! 2. [`Pool::fill_clone`] links leaves with slots for the frames that the snapshot sees. No page is copied. After the
//!    last leaf the clone is a slice like any other: sessions and direct clients need to know nothing of it.
//! 3. [`Pool::promote_clone`] copies the pages that the clone still shares. Then it depends on nothing.
//!
//! A frame born before the base belongs to the origin. A clone names it, and never frees or changes it. The changes of a
//! clone are born at its base or later, because its epoch begins there.
//!
//! Invariants:
//! - the snapshot of the origin is kept as long as the clone's entry is in use. So no frame that a clone may name is freed;
//! - a page of the origin that a clone may name does not move (`cloned_below`). A record that moved it nevertheless leaves
//!   the old frame in use;
//! - the slots of a leaf are durable before the record that links it.

use super::error::ObjectError;
use super::pool::Pool;
use super::version_store::Promotion;
use super::versions::LEAF_PAGES;
use crate::format::geometry::frame_at;
use crate::format::object::{Object, ObjectRole, ObjectState};
use crate::format::slot::Slot;
use crate::format::superblock::Features;
use crate::format::table::SlotLocation;
use crate::format::version_pages::DamagedVersions;
use crate::recovery::PoolError;
use crate::session::relocate::MOVE_PAGES_MAX;
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
pub use pagemesh_base::slice::{CloneProgress, CloneSource};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Leaves that one call of [`Pool::fill_clone`] links.
const FILL_LEAVES: usize = 32;
/// Leaves without pages that it passes.
const FILL_EMPTY_LEAVES: u64 = 1 << 12;
/// Pages that one call of [`Pool::promote_clone`] copies.
const PROMOTE_PAGES: u64 = 256;
/// Leaves that it looks at.
const PROMOTE_LEAVES: u64 = 256;
/// Nodes above a leaf, and a frame that a session needs to find that none is missing.
const NODES_ABOVE: u64 = 4;

/// A leaf that is durable and not linked yet.
struct FilledLeaf {
    leaf: u64,
    node: FrameNo,
}

impl<M: Media> Pool<M> {
    /// Creates a clone without pages. [`Pool::fill_clone`] fills it. Does nothing if the clone is there.
    ///
    /// # Errors
    /// When the slice exists, the origin has no such snapshot or is larger, or the pool lacks room.
    pub fn create_clone(
        &mut self,
        slice: SliceId,
        source: CloneSource,
        size_bytes: u64,
    ) -> Result<(), ObjectError> {
        let (origin, of_origin) = self.find(source.origin)?;
        let base = source.snapshot;
        if let Some(present) = self.by_slice.get(&slice) {
            let entry = self.objects[present];
            return match entry.role.origin() == Some(origin) && entry.base == base {
                true => Ok(()),
                false => Err(ObjectError::Exists(slice)),
            };
        }
        if !self.snapshots_of(source.origin)?.contains(&base) {
            let (slice, snapshot) = (source.origin, base);
            return Err(ObjectError::UnknownSnapshot { slice, snapshot });
        }
        if size_bytes < of_origin.size_bytes {
            let (present, wanted) = (of_origin.size_bytes, size_bytes);
            return Err(ObjectError::Shrinks { present, wanted });
        }
        if self.superblock.features.incompatible & Features::CLONES == 0 {
            self.superblock.features.incompatible |= Features::CLONES;
            self.write_next_superblock()?;
        }
        // A move that is not applied yet would leave its old frame in use.
        self.apply_all_versions()?;
        // Before the clone names a frame.
        self.set_cloned_below(origin, self.newest_clone_base(origin).max(base))?;
        let entry = Object {
            role: ObjectRole::UnfilledCloneOf(origin),
            epoch: base,
            shared_below: base,
            base,
            ..Object::FREE
        };
        let created = self.create_object(slice, size_bytes, entry);
        if created.is_err() {
            self.update_cloned_below(origin)?;
        }
        created
    }

    /// Applies all records that are committed now.
    fn apply_all_versions(&mut self) -> Result<(), ObjectError> {
        let committed = self.mapping.control.seq().load(Ordering::Acquire);
        self.wait_for_ops()?;
        self.checkpoint_versions(Seq(committed))
    }

    /// Fills some leaves of a clone. The caller repeats it until nothing is left to do.
    ///
    /// # Errors
    /// When there is no such clone, the origin is damaged, or the pool lacks room.
    pub fn fill_clone(&mut self, slice: SliceId) -> Result<CloneProgress, ObjectError> {
        let object = *self
            .by_slice
            .get(&slice)
            .ok_or(ObjectError::Unknown(slice))?;
        let entry = self.objects[&object];
        let all = leaves_of(entry.size_bytes);
        let ObjectRole::UnfilledCloneOf(origin) = entry.role else {
            return Ok(CloneProgress { done: all, all });
        };
        self.ensure_free_frames(FILL_LEAVES as u64 * (1 + NODES_ABOVE))?;
        let origin = self.objects[&origin];
        let source = CloneSource {
            origin: origin.slice,
            snapshot: entry.base,
        };
        let first = self.clones.filled_below.get(&object).copied().unwrap_or(0);
        let end = all.min(first + FILL_EMPTY_LEAVES);
        let mut filled = Vec::new();
        let made = self.fill_leaves(object, source, first..end, &mut filled);
        // Without room for all, those that were made.
        let linked = self.link_filled_leaves(object, &mut filled);
        for FilledLeaf { node, .. } in filled {
            let (start, len) = (node.0, 1);
            self.frame_allocator.return_unused(FrameRun { start, len });
        }
        linked?;
        let done = made?;
        if done == all {
            let role = ObjectRole::CloneOf(entry.role.origin().unwrap_or(object));
            self.commit_entry(object, Object { role, ..entry })?;
            self.clones.filled_below.remove(&object);
        } else {
            self.clones.filled_below.insert(object, done);
        }
        Ok(CloneProgress { done, all })
    }

    /// Copies some of the pages that a clone shares with its origin. Their births become the base. The caller repeats it
    /// until nothing is left to do; then the origin and the snapshot can be deleted.
    ///
    /// # Errors
    /// When there is no such clone, clones depend on it, a page is damaged, or the pool lacks room.
    pub fn promote_clone(&mut self, slice: SliceId) -> Result<CloneProgress, ObjectError> {
        let (object, entry) = self.find(slice)?;
        let all = leaves_of(entry.size_bytes) + 1;
        let Some(origin) = entry.role.origin() else {
            return Ok(CloneProgress { done: all, all });
        };
        self.check_clones(object, |_| true)?;
        self.ensure_free_frames(PROMOTE_PAGES + MOVE_PAGES_MAX)?;
        let mut progress = self
            .clones
            .promoted
            .get(&object)
            .copied()
            .unwrap_or_default();
        let stepped = self.promote_step(object, &mut progress);
        self.clones.promoted.insert(object, progress);
        if !stepped? {
            let done = progress.next_page / LEAF_PAGES;
            return Ok(CloneProgress { done, all });
        }
        // No record that replaced a shared frame may be replayed from either superblock: then its frame would be freed.
        for _ in 0..2 {
            self.apply_all_versions()?;
            self.commit_entry(object, self.objects[&object])?;
        }
        if let Some(of_versions) = self.versions.of(object).map(|it| it.object) {
            let entry = self.objects[&of_versions];
            self.commit_entry(
                of_versions,
                Object {
                    base: Epoch(0),
                    ..entry
                },
            )?;
        }
        let entry = self.objects[&object];
        let entry = Object {
            role: ObjectRole::Slice,
            shared_below: entry.newest_snapshot(),
            base: Epoch(0),
            ..entry
        };
        self.commit_entry(object, entry)?;
        self.clones.forget(object);
        self.update_cloned_below(origin)?;
        Ok(CloneProgress { done: all, all })
    }

    /// The slices that were cloned from a slice, each with the epoch of the snapshot. Those that are being deleted are among
    /// them.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn clones_of(&self, slice: SliceId) -> Result<Vec<(SliceId, Epoch)>, ObjectError> {
        let (origin, _) = self.find(slice)?;
        let clones = self.entries_of_clones(origin);
        Ok(clones.map(|entry| (entry.slice, entry.base)).collect())
    }

    /// Refuses a change of a slice if clones depend on its snapshots.
    pub(super) fn check_clones(
        &self,
        origin: ObjectId,
        is_affected: impl Fn(Epoch) -> bool,
    ) -> Result<(), ObjectError> {
        let mut clones = self.entries_of_clones(origin);
        match clones.find(|entry| is_affected(entry.base)) {
            Some(entry) => Err(ObjectError::HasClone {
                clone: entry.slice,
                snapshot: entry.base,
            }),
            None => Ok(()),
        }
    }

    fn entries_of_clones(&self, origin: ObjectId) -> impl Iterator<Item = &Object> {
        self.objects.values().filter(move |entry| {
            entry.state != ObjectState::Free && entry.role.origin() == Some(origin)
        })
    }

    fn newest_clone_base(&self, origin: ObjectId) -> Epoch {
        let bases = self.entries_of_clones(origin).map(|entry| entry.base);
        bases.max().unwrap_or(Epoch(0))
    }

    /// Lets pages of an origin move that no clone may name any more.
    pub(super) fn update_cloned_below(&mut self, origin: ObjectId) -> Result<(), ObjectError> {
        self.set_cloned_below(origin, self.newest_clone_base(origin))
    }

    fn set_cloned_below(&mut self, origin: ObjectId, below: Epoch) -> Result<(), ObjectError> {
        let of_versions = self.versions.of(origin).map(|it| it.object);
        for object in of_versions.into_iter().chain([origin]) {
            let entry = self.objects.get(&object).copied();
            let is_other = |it: &Object| it.state == ObjectState::Live && it.cloned_below != below;
            if let Some(entry) = entry.filter(is_other) {
                let cloned_below = below;
                self.commit_entry(
                    object,
                    Object {
                        cloned_below,
                        ..entry
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Takes up changes of clones that a crash interrupted.
    pub(super) fn load_clones(&mut self) -> Result<(), ObjectError> {
        let with_clones = self.objects.iter();
        let with_clones = with_clones.filter(|(_, entry)| entry.cloned_below != Epoch(0));
        // A crash may have come between the two entries of an origin.
        let origin_of = |(object, entry): (&ObjectId, &Object)| match entry.role {
            ObjectRole::VersionsOf(origin) => origin,
            _ => *object,
        };
        let origins: BTreeSet<ObjectId> = with_clones.map(origin_of).collect();
        origins
            .into_iter()
            .try_for_each(|origin| self.update_cloned_below(origin))
    }

    /// Makes leaves of a range, up to a limit. Returns the leaf to continue with.
    fn fill_leaves(
        &mut self,
        object: ObjectId,
        source: CloneSource,
        leaves: std::ops::Range<u64>,
        filled: &mut Vec<FilledLeaf>,
    ) -> Result<u64, ObjectError> {
        let mut read = 0;
        for leaf in leaves.clone() {
            if read == FILL_LEAVES {
                return Ok(leaf);
            }
            let first = PageNo(leaf * LEAF_PAGES);
            if let SlotLocation::At(_) = self.mapping.locate(object, 0, first)? {
                continue;
            }
            if !self.has_leaf(source.origin, first)? {
                continue;
            }
            // It may need a checkpoint.
            read += 1;
            let seen = self.version_leaf(source.origin, source.snapshot, leaf)?;
            if seen.has_lost() {
                return Err(DamagedVersions.into());
            }
            let slot = |index| {
                seen.frame(index)
                    .map_or(Slot::EMPTY, |it| Slot::EMPTY.map(it))
            };
            let slots: Vec<u64> = (0..LEAF_PAGES as usize)
                .map(|index| slot(index).encode())
                .collect();
            if slots.iter().any(|&bits| bits != Slot::EMPTY.encode()) {
                let node = self.make_leaf(&slots)?;
                filled.push(FilledLeaf { leaf, node });
            }
        }
        Ok(leaves.end)
    }

    /// Whether a slice has a leaf with this page. A leaf is never unlinked, so a snapshot sees no page without one.
    fn has_leaf(&self, slice: SliceId, page: PageNo) -> Result<bool, ObjectError> {
        let (object, _) = self.find(slice)?;
        let found = self.mapping.locate(object, 0, page)?;
        Ok(matches!(found, SlotLocation::At(_)))
    }

    /// Writes the slots of a leaf into a new frame.
    fn make_leaf(&mut self, slots: &[u64]) -> Result<FrameNo, ObjectError> {
        let run = self.frame_allocator.allocate(1);
        let node = FrameNo(run.ok_or(StoreError::NoSpace)?.start);
        let mapping = &self.mapping;
        let mut page = [0; PAGE_BYTES];
        for (bytes, slot) in page.as_chunks_mut::<8>().0.iter_mut().zip(slots) {
            *bytes = slot.to_le_bytes();
        }
        let (_, stores) = M::stream_page(&[(&*mapping.data, frame_at(node))], &page);
        let _fenced = mapping.data.fence(stores);
        if mapping.has_overlay() {
            for (index, &slot) in slots.iter().enumerate() {
                mapping.meta.store(frame_at(node) + index * 8, slot);
            }
        }
        Ok(node)
    }

    /// Links leaves, and takes each from the list before its record is written.
    fn link_filled_leaves(
        &mut self,
        object: ObjectId,
        filled: &mut Vec<FilledLeaf>,
    ) -> Result<(), ObjectError> {
        if filled.is_empty() {
            return Ok(());
        }
        if self.mapping.has_overlay() {
            self.mapping.data.sync().map_err(PoolError::from)?;
        }
        let handle = self.mapping.handle(object, self.objects[&object].slice)?;
        while let Some(FilledLeaf { leaf, node }) = filled.pop() {
            let page = PageNo(leaf * LEAF_PAGES);
            let above = self.with_owner_frames(NODES_ABOVE, |own| {
                own.link_nodes(&handle, 1, page, Epoch(u32::MAX))
            });
            let linked = above
                .and_then(|()| self.with_retry(|own| own.link_filled_leaf(&handle, page, node)));
            if let Err(cause) = linked {
                filled.push(FilledLeaf { leaf, node });
                return Err(cause);
            }
        }
        self.leaf_cache.clear();
        Ok(())
    }

    /// Does a step of a promotion. True when the clone shares no frame any more.
    fn promote_step(
        &mut self,
        object: ObjectId,
        progress: &mut Promotion,
    ) -> Result<bool, ObjectError> {
        let pages = self.objects[&object].size_bytes / PAGE_BYTES as u64;
        if progress.next_page < pages {
            progress.next_page = self.own_pages(object, progress.next_page, pages)?;
            return Ok(false);
        }
        let Some(of_versions) = self.versions.of(object).map(|it| it.object) else {
            return Ok(true);
        };
        let Some(logged_below) = progress.logged_below else {
            self.apply_all_versions()?;
            progress.logged_below = Some(self.superblock.version_log.tail);
            return Ok(false);
        };
        if self.superblock.version_log.head < logged_below {
            self.merge_all_soon();
            self.maintain_versions()?;
            return match self.versions.is_out_of_room {
                true => Err(StoreError::NoSpace.into()),
                false => Ok(false),
            };
        }
        let pages = self.objects[&of_versions].size_bytes / PAGE_BYTES as u64;
        progress.next_version = self.own_pages(of_versions, progress.next_version, pages)?;
        Ok(progress.next_version >= pages)
    }

    /// Copies shared pages of a range to frames of the object's own, up to a limit. Returns the page to continue with.
    fn own_pages(&mut self, object: ObjectId, from: u64, end: u64) -> Result<u64, ObjectError> {
        let entry = self.objects[&object];
        let handle = self.mapping.handle(object, entry.slice)?;
        let base = entry.base;
        let limit = end.min(from + PROMOTE_LEAVES * LEAF_PAGES);
        self.with_owner_frames(PROMOTE_PAGES + MOVE_PAGES_MAX, |own| {
            let (mut next, mut moved) = (from, 0);
            while next < limit && moved < PROMOTE_PAGES {
                let step = match own.own_shared_pages(&handle, next..limit, base) {
                    // The grants may be fewer than wanted.
                    Err(StoreError::NoSpace) if moved > 0 => break,
                    step => step?,
                };
                if step.damaged > 0 {
                    return Err(crate::shared::error::damaged_page_error(PageNo(next)));
                }
                moved += step.moved;
                next = step.next.0;
            }
            Ok(next)
        })
    }
}

fn leaves_of(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(LEAF_PAGES * PAGE_BYTES as u64)
}
