//! The objects of a pool: slices with their sizes and epochs, changed by records of the owner.
//!
//! Invariant: an entry of the object table is used again only after a checkpoint has passed the
//! record that freed it.

use super::error::ObjectError;
use super::pool::Pool;
use crate::format::object::{HEIGHT, Object, ObjectRole, ObjectState, TierPolicy, store_entry};
use crate::format::table::reach;
use crate::recovery::PoolError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, ObjectId, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

impl<M: Media> Pool<M> {
    /// Every live object.
    pub fn list(&self) -> impl Iterator<Item = Object> + '_ {
        self.by_slice
            .values()
            .filter_map(|object| self.objects.get(object).copied())
    }

    /// Every live object with pages that may move, the versions of slices included.
    pub fn list_movable(&self) -> impl Iterator<Item = Object> + '_ {
        let entries = self.objects.values().copied();
        entries.filter(|entry| entry.state == ObjectState::Live)
    }

    /// The size of one of these objects, and a session's handle of it.
    ///
    /// # Errors
    /// When there is no such object.
    pub fn movable_handle(&self, slice: SliceId) -> Result<(u64, Handle), ObjectError> {
        let object = match self.versions_with_id(slice) {
            Some(object) => object,
            None => self.find(slice)?.0,
        };
        let entry = self.objects[&object];
        Ok((entry.size_bytes, self.mapping.handle(object, slice)?))
    }

    /// The live object of a slice.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, slice: SliceId) -> Result<(ObjectId, Object), ObjectError> {
        match self.by_slice.get(&slice) {
            Some(object) => match self.objects[object] {
                entry if matches!(entry.role, ObjectRole::UnfilledCloneOf(_)) => {
                    Err(ObjectError::UnfilledClone(slice))
                }
                entry => Ok((*object, entry)),
            },
            None => Err(self.missing_slice_error(slice)),
        }
    }

    /// The entry of an object, in the owner's memory.
    #[must_use]
    pub fn object(&self, object: ObjectId) -> Option<&Object> {
        self.objects.get(&object)
    }

    /// The error for a slice that was not found. A lost entry may be the slice's own, so the error
    /// then does not say that the slice does not exist. The caller must not take it for deleted.
    fn missing_slice_error(&self, slice: SliceId) -> ObjectError {
        let same = self.lost_objects.iter().find(|(_, named)| *named == slice);
        match same.or(self.lost_objects.first()) {
            Some(&(object, _)) => ObjectError::Lost {
                slice,
                entry: object.0,
            },
            None => ObjectError::Unknown(slice),
        }
    }

    /// A session's handle of a slice.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn handle(&self, slice: SliceId) -> Result<Handle, ObjectError> {
        Ok(self.mapping.handle(self.find(slice)?.0, slice)?)
    }

    /// Creates an empty object.
    ///
    /// # Errors
    /// When the slice exists, the size is impossible, or the table is full.
    pub fn create(&mut self, slice: SliceId, size_bytes: u64) -> Result<(), ObjectError> {
        self.create_object(slice, size_bytes, Object::FREE)
    }

    /// Creates an object for a slice of this size, like `entry` otherwise.
    pub(super) fn create_object(
        &mut self,
        slice: SliceId,
        size_bytes: u64,
        entry: Object,
    ) -> Result<(), ObjectError> {
        if self.by_slice.contains_key(&slice) || self.pending_deletes.contains_key(&slice) {
            return Err(ObjectError::Exists(slice));
        }
        if self.lost_objects.iter().any(|(_, named)| *named == slice) {
            return Err(self.missing_slice_error(slice));
        }
        check_size(size_bytes)?;
        let object = self.take_free_object()?;
        let entry = Object {
            state: ObjectState::Live,
            slice,
            size_bytes,
            ..entry
        };
        self.commit_entry(object, entry)?;
        self.by_slice.insert(slice, object);
        Ok(())
    }

    /// Takes a free entry of the object table.
    pub(super) fn take_free_object(&mut self) -> Result<ObjectId, ObjectError> {
        let object = self.free_objects.pop().or_else(|| {
            let next = ObjectId(self.superblock.objects_end);
            let fits = next.0 < self.mapping.geometry().object_count();
            self.superblock.objects_end += u32::from(fits);
            fits.then_some(next)
        });
        object.ok_or(ObjectError::TableFull)
    }

    /// Enlarges an object.
    ///
    /// # Errors
    /// When there is none, or it would shrink.
    pub fn resize(&mut self, slice: SliceId, size_bytes: u64) -> Result<(), ObjectError> {
        check_size(size_bytes)?;
        let (object, entry) = self.find(slice)?;
        if size_bytes < entry.size_bytes {
            return Err(ObjectError::Shrinks {
                present: entry.size_bytes,
                wanted: size_bytes,
            });
        }
        self.commit_entry(
            object,
            Object {
                size_bytes,
                ..entry
            },
        )?;
        Ok(())
    }

    /// Sets where the pages of an object lie.
    ///
    /// # Errors
    /// When there is none.
    pub fn set_tier(&mut self, slice: SliceId, tier: TierPolicy) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        if entry.tier != tier {
            self.commit_entry(object, Object { tier, ..entry })?;
        }
        Ok(())
    }

    /// Deletes an object. Operations in progress end first. [`Pool::maintain`] frees the frames
    /// after that.
    ///
    /// # Errors
    /// When there is none, or a session is stuck. The caller then calls it again.
    pub fn delete(&mut self, slice: SliceId) -> Result<(), ObjectError> {
        let (seq, object) = match self.pending_deletes.get(&slice) {
            Some(&begun) => begun,
            None => self.begin_delete(slice)?,
        };
        self.wait_for_ops()?;
        self.pending_deletes.remove(&slice);
        self.deleting.push((seq, object));
        self.mapping.control.ring_doorbell();
        Ok(())
    }

    fn begin_delete(&mut self, slice: SliceId) -> Result<(Seq, ObjectId), ObjectError> {
        // A clone that is not filled can be deleted, too.
        let found = self.by_slice.get(&slice).copied();
        let object = found.ok_or_else(|| self.missing_slice_error(slice))?;
        let entry = self.objects[&object];
        self.check_clones(object, |_| true)?;
        let seq = self.commit_entry(
            object,
            Object {
                state: ObjectState::Deleting,
                shared_below: Epoch(0),
                ..entry
            },
        )?;
        self.by_slice.remove(&slice);
        self.mapping.end_version_generation();
        self.pending_deletes.insert(slice, (seq, object));
        self.in_flight.retain_below(object, Epoch(0));
        let forgotten = self.in_flight.remove_object(&*self.mapping.data, object);
        self.fence(forgotten);
        Ok((seq, object))
    }

    /// Frees the entry of an object that maps no page any more.
    pub(crate) fn drop_object(&mut self, object: ObjectId) -> Result<(), ObjectError> {
        let entry = self.objects[&object];
        // A recovery that replays the freeing of its pages must know which were its own.
        let base = entry.base;
        let seq = self.commit_entry(
            object,
            Object {
                base,
                ..Object::FREE
            },
        )?;
        self.leaf_cache.clear();
        self.clones.forget(object);
        self.freed_objects.push((seq, object));
        match entry.role.origin() {
            Some(origin) => self.update_cloned_below(origin),
            None => Ok(()),
        }
    }

    /// Lets entries that were freed below `checkpoint` be used again.
    pub(crate) fn recycle_objects(&mut self, checkpoint: Seq) {
        let free = &mut self.free_objects;
        self.freed_objects.retain(|&(seq, object)| {
            let passed = seq < checkpoint;
            if passed {
                free.push(object);
            }
            !passed
        });
    }

    /// Commits an entry and makes it visible.
    pub(super) fn commit_entry(
        &mut self,
        object: ObjectId,
        entry: Object,
    ) -> Result<Seq, ObjectError> {
        if self.has_failed {
            return Err(PoolError::Failed.into());
        }
        let bytes = entry.encode();
        let seq = self.with_retry(|own| own.commit_object(object, bytes))?;
        let at = self.mapping.entry_at(object);
        let stores = store_entry(&*self.mapping.meta, at, &bytes);
        let _fenced = self.mapping.meta.fence(stores);
        self.objects.insert(object, entry);
        // On `file-sync` pools the record must be durable before the answer.
        self.mapping.data.sync().map_err(PoolError::from)?;
        Ok(seq)
    }

    /// Raises an object's epoch: a barrier. All later changes are born at this epoch or above. When it
    /// returns, the operations admitted earlier have ended, and those that may be missing on other
    /// legs are in the in-flight table.
    ///
    /// # Errors
    /// When the object is newer or a session is stuck.
    pub fn raise_epoch(&mut self, slice: SliceId, epoch: Epoch) -> Result<(), ObjectError> {
        self.raise_epoch_after_loss(slice, epoch, Epoch(0))
    }

    /// The same while a leg is behind since the epoch `lost_since`; 0: none is. Operations of
    /// earlier epochs then stay in the in-flight table, even if their sessions complete them. The
    /// leg may have acknowledged them and lost them with its power, and their pages are older than
    /// its loss.
    ///
    /// # Errors
    /// As [`Pool::raise_epoch`].
    pub fn raise_epoch_after_loss(
        &mut self,
        slice: SliceId,
        epoch: Epoch,
        lost_since: Epoch,
    ) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        if entry.epoch > epoch {
            return Err(ObjectError::StaleEpoch {
                current: entry.epoch,
                wanted: epoch,
            });
        }
        // Before the barrier: a session may complete operations as soon as it has begun.
        self.in_flight.retain_below(object, lost_since);
        if entry.epoch != epoch {
            self.commit_entry(object, Object { epoch, ..entry })?;
        }
        self.wait_for_ops()?;
        self.collect_in_flight(Some(object))?;
        // An operation that was listed may be unanswered and in memory only, and a flush does not cover it. The client may
        // spread its data to other legs and forget it.
        self.mapping.data.sync().map_err(PoolError::from)?;
        Ok(())
    }

    /// Operations on the slice that may be missing on another leg; none when they were too many to
    /// list.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn in_flight(
        &self,
        slice: SliceId,
    ) -> Result<Option<Vec<pagemesh_base::slice::InFlightOp>>, ObjectError> {
        let (object, entry) = self.find(slice)?;
        let listed = self.in_flight_of(object, entry.size_bytes);
        Ok((!entry.needs_compare).then(|| listed.collect()))
    }

    /// The in-flight operations of an object of this size. Journals may list an operation of a
    /// deleted object that had the same number. So pages beyond the size are left out.
    pub(crate) fn in_flight_of(
        &self,
        object: ObjectId,
        size_bytes: u64,
    ) -> impl Iterator<Item = pagemesh_base::slice::InFlightOp> {
        let pages = size_bytes.div_ceil(PAGE_BYTES as u64);
        let control = &self.mapping.control;
        let listed = self.in_flight.of(object, |op| control.is_complete(op));
        listed.filter_map(move |mut entry| {
            let left = pages.checked_sub(entry.page.0)?;
            entry.count = u64::from(entry.count).min(left) as u32;
            (entry.count > 0).then_some(entry)
        })
    }

    /// Removes the operations that `in_flight` listed: the legs were made equal.
    ///
    /// # Errors
    /// When there is no such slice.
    pub fn clear_in_flight(&mut self, slice: SliceId) -> Result<(), ObjectError> {
        let (object, entry) = self.find(slice)?;
        if entry.needs_compare {
            self.commit_entry(
                object,
                Object {
                    needs_compare: false,
                    ..entry
                },
            )?;
        }
        let forgotten = self.in_flight.remove_object(&*self.mapping.data, object);
        self.fence(forgotten);
        Ok(())
    }

    /// Marks an object's in-flight operations as too many to list.
    pub(crate) fn mark_compare(&mut self, object: ObjectId) -> Result<(), ObjectError> {
        match self.objects.get(&object).copied() {
            Some(entry) if entry.state == ObjectState::Live && !entry.needs_compare => {
                self.commit_entry(
                    object,
                    Object {
                        needs_compare: true,
                        ..entry
                    },
                )?;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn check_size(size_bytes: u64) -> Result<(), ObjectError> {
    let pages = size_bytes / PAGE_BYTES as u64;
    let whole = size_bytes.is_multiple_of(PAGE_BYTES as u64);
    if whole && pages > 0 && pages <= reach(HEIGHT) / 4 {
        Ok(())
    } else {
        Err(ObjectError::BadSize(size_bytes))
    }
}
