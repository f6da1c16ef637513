//! Snapshots of slices: the versions of pages that they see.
//!
//! This file keeps the snapshots in memory, and answers reads from the live page table.

use super::error::ObjectError;
use super::pool::Pool;
use crate::format::table::NODE_SLOTS;
use crate::recovery::PoolError;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use uuid::Uuid;

type SnapshotTable = BTreeMap<(Uuid, SliceId), BTreeSet<Epoch>>;

static SNAPSHOTS: Mutex<SnapshotTable> = Mutex::new(BTreeMap::new());

fn snapshots() -> MutexGuard<'static, SnapshotTable> {
    lock(&SNAPSHOTS)
}

/// The frames of the pages of one leaf, as a snapshot sees them.
pub struct VersionLeaf(Box<[Option<FrameNo>]>);

impl VersionLeaf {
    /// The frame of the page with this index in the leaf; none: a hole.
    ///
    /// # Panics
    /// When the index is not below 512.
    #[must_use]
    pub fn frame(&self, index: usize) -> Option<FrameNo> {
        self.0[index]
    }
}

impl<M: Media> Pool<M> {
    /// Keeps versions for a snapshot at this epoch from now on; durable when it returns. Idempotent.
    ///
    /// # Errors
    /// When there is no such slice, or the pool fails.
    pub fn prepare_snapshot(&mut self, slice: SliceId, snapshot: Epoch) -> Result<(), ObjectError> {
        self.find(slice)?;
        let key = (self.mapping().pool(), slice);
        snapshots().entry(key).or_default().insert(snapshot);
        Ok(())
    }

    /// Drops snapshots; durable when it returns. Space is freed in the background. Unknown epochs are
    /// ignored.
    ///
    /// # Errors
    /// When there is no such slice, or the pool fails.
    pub fn drop_snapshots(&mut self, slice: SliceId, dropped: &[Epoch]) -> Result<(), ObjectError> {
        self.find(slice)?;
        let key = (self.mapping().pool(), slice);
        if let Some(kept) = snapshots().get_mut(&key) {
            kept.retain(|snapshot| !dropped.contains(snapshot));
        }
        Ok(())
    }

    /// The snapshots of a slice, ascending; prepared ones included.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn snapshots_of(&self, slice: SliceId) -> Result<Vec<Epoch>, ObjectError> {
        self.find(slice)?;
        let key = (self.mapping().pool(), slice);
        let kept = snapshots().get(&key).cloned().unwrap_or_default();
        Ok(kept.into_iter().collect())
    }

    /// For each page of a leaf, the frame that a snapshot sees. It does not change while the snapshot
    /// exists.
    ///
    /// # Errors
    /// When there is no such slice or snapshot, or the page table is damaged.
    pub fn version_leaf(
        &mut self,
        slice: SliceId,
        snapshot: Epoch,
        leaf: u64,
    ) -> Result<VersionLeaf, ObjectError> {
        if !self.snapshots_of(slice)?.contains(&snapshot) {
            return Err(ObjectError::Unknown(slice));
        }
        let (object, _) = self.find(slice)?;
        let mapping = self.mapping().clone();
        let table = mapping.table(mapping.media(), object);
        let first = leaf * NODE_SLOTS;
        let frames = (first..first + NODE_SLOTS).map(|page| {
            let slot = table.lookup(PageNo(page)).map_err(|_| PoolError::Failed)?;
            Ok(slot.frame())
        });
        let frames = frames.collect::<Result<Vec<_>, ObjectError>>()?;
        Ok(VersionLeaf(frames.into()))
    }
}

impl<M: Media> PoolMapping<M> {
    /// Copies a page that a snapshot sees, checked against its checksum.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn read_version(
        &self,
        frame: FrameNo,
        page: PageNo,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<(), StoreError> {
        self.copy_frame(frame, page, into).map(drop)
    }
}
