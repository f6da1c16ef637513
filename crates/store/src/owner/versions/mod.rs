//! Snapshots: the versions of pages that they see.
//!
//! A snapshot of a slice is an epoch. It sees each version of a page that was born before it and not replaced before it.
//! Sessions know nothing of it, but that they do not change a page in place if the newest snapshot sees it. The owner
//! keeps versions:
//!
//! 1. [`Pool::prepare_snapshot`] lists the epoch, durably, before any record has it.
//! 2. A checkpoint finds that a record replaced a page born before the newest snapshot. It appends a line to the version
//!    log in place of freeing the frame (`log`).
//! 3. Later [`Pool::maintain`] links the frames of many lines to the object of the slice's versions (`merge`). Then the
//!    head of the log passes the lines with the next superblock.
//! 4. [`Pool::version_leaf`] finds the versions of a leaf: in the log, in the object of versions, and in the slice
//!    (`view`).
//! 5. [`Pool::drop_snapshots`] takes epochs off the list. A sweep frees the versions that no snapshot sees any more
//!    (`sweep`).
//!
//! [`Pool::adopt_snapshots`], [`Pool::list_versions`] and [`Pool::edit_versions`] give a slice the versions that it lacks
//! (`adopt`, `lists`).
//!
//! Invariants:
//! - a frame that a snapshot sees is in use: by the slice, by a line of the log, or by the object of versions;
//! - a sweep frees versions only after the durable head of the log has passed their lines. So no line names a frame with
//!   another user;
//! - the object of versions is changed by the owner's session alone.

mod adopt;
mod blocks;
mod damage;
mod lists;
mod log;
mod merge;
mod pages;
mod space;
mod sweep;
mod view;

use super::error::ObjectError;
use super::pool::Pool;
use super::version_store::SliceVersions;
use crate::defect::{self, Defect};
use crate::format::object::{CloneBounds, Object, ObjectRole, ObjectState};
use crate::format::record::{Change, Record};
use crate::format::version_log::Version;
use crate::format::version_pages::{
    HEAD_PAGE, PAGE_SNAPSHOTS, SNAPSHOTS_MAX, VersionsHead, decode_list, encode_list, list_page,
};
use crate::recovery::PoolError;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, FrameNo, ObjectId, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_pmem::Media;
use pages::PageEdits;
use uuid::Uuid;
pub use view::VersionLeaf;

/// The identity of an object of versions differs from its slice's in these bits.
const VERSIONS_ID: u128 = 0x7665_7273_696f_6e73_7665_7273_696f_6e73;
/// Leaves of the largest slice. Pages of the directory that are not written take no space.
const LEAVES_MAX: u32 = 1 << 25;
/// Slots of one leaf of a page table.
pub(super) const LEAF_PAGES: u64 = crate::format::table::NODE_SLOTS;

/// The identity of the object with the versions of a slice, and back.
fn other_id(slice: SliceId) -> SliceId {
    SliceId(Uuid::from_u128(slice.0.as_u128() ^ VERSIONS_ID))
}

/// Whether a reader of a snapshot may know a frame that a record of pages frees: a page or a version that moved, or a
/// version that was dropped.
pub(super) fn may_be_seen(entry: &Object, record: &Record) -> bool {
    let is_of_versions = matches!(entry.role, ObjectRole::VersionsOf(_));
    is_of_versions || record.kept_birth.is_some() && entry.shared_below != Epoch(0)
}

impl<M: Media> Pool<M> {
    /// The object of versions with this identity.
    pub(super) fn versions_with_id(&self, id: SliceId) -> Option<ObjectId> {
        let origin = self.by_slice.get(&other_id(id))?;
        Some(self.versions.of(*origin)?.object)
    }

    /// Keeps versions of a slice for a snapshot at this epoch from now on. Durable when it returns. Does nothing if the
    /// snapshot is there.
    ///
    /// # Errors
    /// When there is no such slice, the epoch is older than the slice's or than another snapshot's, or the pool lacks room.
    pub fn prepare_snapshot(&mut self, slice: SliceId, snapshot: Epoch) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        self.check_versions(object)?;
        let present = self.versions.of(object);
        if present.is_some_and(|versions| versions.has_snapshot(snapshot)) {
            // An earlier call may have failed after it had listed the snapshot.
            return self.update_shared_below(object);
        }
        if entry.epoch > snapshot {
            let (current, wanted) = (entry.epoch, snapshot);
            return Err(ObjectError::StaleEpoch { current, wanted });
        }
        let newest = present.map_or(Epoch(0), SliceVersions::newest);
        if snapshot <= newest || snapshot.0 > EPOCH_MAX {
            return Err(ObjectError::BadSnapshot { snapshot, newest });
        }
        let count = present.map_or(0, |versions| versions.snapshots.len());
        if count >= SNAPSHOTS_MAX {
            return Err(ObjectError::SnapshotsFull(SNAPSHOTS_MAX));
        }
        self.ensure_version_log()?;
        self.ensure_versions_object(object, entry.slice)?;
        let mut snapshots = self.versions.slices[&object].snapshots.clone();
        snapshots.push(snapshot);
        self.store_snapshots(object, snapshots, false)?;
        self.update_shared_below(object)
    }

    /// Drops snapshots of a slice. Durable when it returns; [`Pool::maintain`] frees their versions later. Unknown epochs
    /// are left out.
    ///
    /// # Errors
    /// When there is no such slice, or the pool lacks room.
    pub fn drop_snapshots(&mut self, slice: SliceId, dropped: &[Epoch]) -> Result<(), ObjectError> {
        let (object, _) = self.find(slice)?;
        let Some(versions) = self.versions.of(object) else {
            return Ok(());
        };
        let (is_damaged, has_head) = (versions.is_damaged, versions.has_head());
        let mut snapshots = versions.snapshots.clone();
        snapshots.retain(|snapshot| !dropped.contains(snapshot));
        if snapshots.len() == versions.snapshots.len() {
            return self.update_shared_below(object);
        }
        self.check_clones(object, |base| dropped.contains(&base))?;
        match has_head {
            true => self.store_snapshots(object, snapshots, !is_damaged)?,
            false => self.forget_snapshots(object, snapshots),
        }
        self.mapping.end_version_generation();
        if !is_damaged {
            self.start_sweep(object);
        }
        self.update_shared_below(object)?;
        self.mapping.data.sync().map_err(PoolError::from)?;
        self.mapping.control.ring_doorbell();
        Ok(())
    }

    /// The snapshots of a slice, ascending. Prepared ones are among them.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn snapshots_of(&self, slice: SliceId) -> Result<Vec<Epoch>, ObjectError> {
        let (object, _) = self.find(slice)?;
        let versions = self.versions.of(object);
        Ok(versions.map_or(Vec::new(), |versions| versions.snapshots.clone()))
    }

    /// The entry of the slice whose pages a record changes. None: it changes nodes.
    pub(super) fn entry_of_pages(&self, record: &Record) -> Option<&Object> {
        match record.level {
            0 => self.objects.get(&record.object),
            _ => None,
        }
    }

    /// The version that a record of pages replaces, if a snapshot may see it. Recovery decides alike.
    pub(super) fn kept_version(
        &self,
        entry: &Object,
        record: &Record,
        change: &Change,
        page: PageNo,
    ) -> Option<Version> {
        let frame = change.old.frame()?;
        let newest = entry.newest_snapshot();
        if change.new.frame() == Some(frame)
            || newest == Epoch(0)
            || defect::is(Defect::SeenVersionFreed)
        {
            return None;
        }
        let birth = self.mapping.frame_word(frame).birth();
        let version = Version {
            object: record.object,
            page,
            frame,
            birth: birth.unwrap_or(Epoch(0)),
            death: record.birth(),
        };
        version.is_kept_for(newest, entry.base).then_some(version)
    }

    /// Whether the frame that a record replaces belongs to the origin of a clone, or a clone may name it.
    pub(super) fn is_frame_kept(&self, entry: &Object, record: &Record, frame: FrameNo) -> bool {
        let bounds = entry.clone_bounds();
        if bounds == CloneBounds::default() {
            return false;
        }
        let birth = self.mapping.frame_word(frame).birth();
        let keeps = bounds.keeps_frame(birth.unwrap_or(Epoch(0)), record.kept_birth.is_some());
        keeps && !defect::is(Defect::OriginFrameFreed)
    }

    /// Creates the object of a slice's versions, unless it is there.
    fn ensure_versions_object(
        &mut self,
        object: ObjectId,
        slice: SliceId,
    ) -> Result<(), ObjectError> {
        if self.versions.slices.contains_key(&object) {
            return Ok(());
        }
        // The damaged ones of the slice are being freed.
        let is_former = |(_, it): &(_, ObjectId)| {
            self.objects.get(it).map(|entry| entry.role) == Some(ObjectRole::VersionsOf(object))
        };
        if self.deleting.iter().any(is_former) {
            return Err(StoreError::TimedOut.into());
        }
        let head = VersionsHead {
            leaves: LEAVES_MAX,
            ..VersionsHead::default()
        };
        let of_versions = self.take_free_object()?;
        let entry = Object {
            state: ObjectState::Live,
            slice: other_id(slice),
            size_bytes: head.size_bytes(0),
            role: ObjectRole::VersionsOf(object),
            base: self.objects[&object].base,
            cloned_below: self.objects[&object].cloned_below,
            ..Object::FREE
        };
        self.commit_entry(of_versions, entry)?;
        let versions = SliceVersions {
            object: of_versions,
            head,
            snapshots: Vec::new(),
            sweep: None,
            retires_after: None,
            is_damaged: false,
            is_damage_stored: true,
        };
        self.versions.slices.insert(object, versions);
        Ok(())
    }

    /// Stores the list of snapshots of a slice, as a whole.
    fn store_snapshots(
        &mut self,
        object: ObjectId,
        snapshots: Vec<Epoch>,
        needs_sweep: bool,
    ) -> Result<(), ObjectError> {
        let versions = &self.versions.slices[&object];
        let of_versions = versions.object;
        let mut head = versions.head;
        head.snapshots = snapshots.len() as u32;
        head.needs_sweep |= needs_sweep;
        let unchanged = snapshots.iter().zip(&versions.snapshots);
        let unchanged = unchanged.take_while(|(new, old)| new == old).count();
        let mut edits = PageEdits::default();
        edits.set(HEAD_PAGE, head.encode());
        for (number, part) in snapshots.chunks(PAGE_SNAPSHOTS).enumerate() {
            if (number + 1) * PAGE_SNAPSHOTS > unchanged {
                edits.set(list_page(number * PAGE_SNAPSHOTS), encode_list(part));
            }
        }
        self.commit_edits(of_versions, edits)?;
        if let Some(versions) = self.versions.slices.get_mut(&object) {
            versions.head = head;
            versions.snapshots = snapshots;
        }
        Ok(())
    }

    /// Loads the lists of snapshots and the version log of a pool that was opened.
    pub(super) fn load_versions(&mut self) -> Result<(), ObjectError> {
        let role = |(object, entry): (&ObjectId, &Object)| match (entry.role, entry.state) {
            (ObjectRole::VersionsOf(origin), ObjectState::Live) => Some((origin, *object)),
            _ => None,
        };
        let found: Vec<_> = self.objects.iter().filter_map(role).collect();
        for (origin, object) in found {
            let loaded = self.load_slice_versions(object);
            if !self.is_damage(&loaded) {
                self.versions.slices.insert(origin, loaded?);
                continue;
            }
            let seen_last = self.objects.get(&origin).map(Object::newest_snapshot);
            let versions = SliceVersions {
                object,
                head: VersionsHead::default(),
                snapshots: seen_last.into_iter().filter(|it| it.0 > 0).collect(),
                sweep: None,
                retires_after: None,
                is_damaged: true,
                is_damage_stored: true,
            };
            self.versions.slices.insert(origin, versions);
        }
        self.load_version_log();
        let origins: Vec<ObjectId> = self.versions.slices.keys().copied().collect();
        for origin in origins {
            self.finish_interrupted_change(origin)?;
        }
        self.load_clones()
    }

    fn load_slice_versions(&mut self, object: ObjectId) -> Result<SliceVersions, ObjectError> {
        let head = VersionsHead::decode(&*self.read_versions_page(object, HEAD_PAGE)?);
        // A crash came between the creation of the object and that of its head.
        let head = match head {
            Ok(head) => head,
            Err(_) if self.is_unlinked(object)? => VersionsHead {
                leaves: LEAVES_MAX,
                ..VersionsHead::default()
            },
            Err(damaged) => return Err(damaged.into()),
        };
        let mut snapshots = Vec::new();
        while snapshots.len() < head.snapshots as usize {
            let page = self.read_versions_page(object, list_page(snapshots.len()))?;
            let count = (head.snapshots as usize - snapshots.len()).min(PAGE_SNAPSHOTS);
            snapshots.extend(decode_list(&page, count)?);
        }
        Ok(SliceVersions {
            object,
            head,
            snapshots,
            sweep: None,
            retires_after: None,
            is_damaged: head.is_damaged,
            is_damage_stored: true,
        })
    }

    /// Takes up a drop or a deletion that a crash interrupted.
    fn finish_interrupted_change(&mut self, origin: ObjectId) -> Result<(), ObjectError> {
        let versions = &self.versions.slices[&origin];
        // The entry of the slice alone has the newest snapshot then.
        if !versions.has_head() {
            return Ok(());
        }
        if versions.head.needs_sweep && !versions.is_damaged {
            self.start_sweep(origin);
        }
        self.update_shared_below(origin)
    }

    /// Stores the epoch of the newest snapshot in the entry of a live slice, if the entry has another one.
    pub(super) fn update_shared_below(&mut self, origin: ObjectId) -> Result<(), ObjectError> {
        let versions = self.versions.of(origin);
        let newest = versions.map_or(Epoch(0), SliceVersions::newest);
        let entry = self.objects.get(&origin).copied();
        let live = entry.filter(|entry| entry.state == ObjectState::Live);
        if let Some(entry) = live.filter(|entry| entry.shared_below != newest.max(entry.base)) {
            let shared_below = newest.max(entry.base);
            let entry = Object {
                shared_below,
                ..entry
            };
            self.commit_entry(origin, entry)?;
        }
        Ok(())
    }

    /// Retires the versions of a deleted slice, once no line of the log names the slice. False: later.
    pub(super) fn retire_versions(&mut self, object: ObjectId) -> Result<bool, ObjectError> {
        let Some(versions) = self.versions.slices.get_mut(&object) else {
            return Ok(true);
        };
        versions.snapshots.clear();
        versions.sweep = None;
        let of_versions = versions.object;
        // A line that a crash brings back must still find the object.
        let log = &self.superblock.version_log;
        if log.head < *versions.retires_after.get_or_insert(log.tail) {
            self.merge_all_soon();
            return Ok(false);
        }
        let entry = self.objects[&of_versions];
        let state = ObjectState::Deleting;
        let seq = self.commit_entry(of_versions, Object { state, ..entry })?;
        self.versions.slices.remove(&object);
        self.versions.settled.remove(&object);
        self.deleting.push((seq, of_versions));
        Ok(true)
    }
}
