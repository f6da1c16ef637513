//! Damage of versions: of a page of an object of versions, and of lines of the log.
//!
//! A slice with a damaged page keeps serving. Its snapshots are refused, its later versions are given up, and nothing of them
//! is freed until all of its snapshots are dropped. Then the object of versions is retired as a whole.
//!
//! A lost line does not tell its slice. So a page that changed since a snapshot, and of which no version is known, is
//! damaged in each snapshot from before the loss; it may have been a hole.
//!
//! Invariant: the heads tell both, durably, before the head of the log passes lines that were lost or given up.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::SliceVersions;
use super::pages::PageEdits;
use crate::defect::{self, Defect};
use crate::format::object::ObjectState;
use crate::format::version_pages::{DamagedVersions, HEAD_PAGE};
#[cfg(feature = "test-api")]
use crate::format::{geometry::frame_at, version_pages::BlockNo, version_pages::list_page};
use crate::shared::error::StoreError;
use pagemesh_base::ids::{Epoch, ObjectId};
#[cfg(feature = "test-api")]
use pagemesh_base::layout::SliceId;
use pagemesh_pmem::Media;

impl<M: Media> Pool<M> {
    /// Whether the medium damaged a page of an object of versions.
    pub(super) fn is_damage<T>(&self, result: &Result<T, ObjectError>) -> bool {
        matches!(
            result,
            Err(ObjectError::Versions(_) | ObjectError::Store(StoreError::Damaged { .. }))
        )
    }

    pub(super) fn mark_damaged(&mut self, origin: ObjectId) {
        if let Some(versions) = self.versions.slices.get_mut(&origin) {
            versions.is_damaged = true;
            versions.head.is_damaged = versions.has_head();
            versions.is_damage_stored = false;
            versions.sweep = None;
        }
    }

    /// Refuses the snapshots of a slice whose list of versions is damaged.
    pub(super) fn check_versions(&self, object: ObjectId) -> Result<(), ObjectError> {
        let versions = self.versions.of(object);
        match versions.is_some_and(|versions| versions.is_damaged) {
            true => Err(DamagedVersions.into()),
            false => Ok(()),
        }
    }

    /// Notes that lines of the log are lost, of which slice is not known.
    pub(super) fn note_lost_lines(&mut self) {
        for versions in self.versions.slices.values_mut() {
            let newest = versions.newest();
            if versions.has_head() && versions.head.lost_until < newest {
                versions.head.lost_until = newest;
                versions.is_damage_stored = false;
            }
        }
    }

    /// Whether a snapshot of a slice may lack versions that were in lost lines.
    pub(super) fn may_lack_versions(&self, object: ObjectId, snapshot: Epoch) -> bool {
        let versions = self.versions.of(object);
        let is_known = !defect::is(Defect::LostLineForgotten);
        versions.is_some_and(|it| snapshot <= it.head.lost_until && is_known)
    }

    /// Refuses a list of versions that may lack some: another leg would remove them.
    pub(super) fn check_lost_versions(
        &self,
        object: ObjectId,
        snapshots: &[Epoch],
    ) -> Result<(), ObjectError> {
        let may_lack = |snapshot: &Epoch| self.may_lack_versions(object, *snapshot);
        match snapshots.iter().any(may_lack) {
            true => Err(DamagedVersions.into()),
            false => Ok(()),
        }
    }

    /// Makes durable which slices have damaged or lost versions.
    pub(super) fn store_damage(&mut self) -> Result<(), ObjectError> {
        let unstored = self.versions.slices.iter();
        let unstored: Vec<_> = unstored
            .filter(|(_, versions)| !versions.is_damage_stored)
            .map(|(origin, _)| *origin)
            .collect();
        if unstored.is_empty() || defect::is(Defect::DamageNotStored) {
            return Ok(());
        }
        for origin in unstored {
            let SliceVersions { object, head, .. } = self.versions.slices[&origin];
            if self.versions.slices[&origin].has_head() {
                let mut edits = PageEdits::default();
                edits.set(HEAD_PAGE, head.encode());
                let stored = self.commit_edits(object, edits);
                // The next opening finds a head that cannot be written damaged, too.
                if !self.is_damage(&stored) {
                    stored?;
                }
            }
            if let Some(versions) = self.versions.slices.get_mut(&origin) {
                versions.is_damage_stored = true;
            }
        }
        self.order_changes()
    }

    /// Replaces the list of snapshots of a slice whose head is lost. The entry of the slice has the newest one.
    pub(super) fn forget_snapshots(&mut self, object: ObjectId, snapshots: Vec<Epoch>) {
        if let Some(versions) = self.versions.slices.get_mut(&object) {
            versions.snapshots = snapshots;
        }
    }

    /// See [`version_pages`](crate::test_api::PoolInternals::version_pages).
    #[cfg(feature = "test-api")]
    pub(crate) fn version_page_places(&self, slice: SliceId) -> Result<Vec<usize>, ObjectError> {
        let (origin, _) = self.find(slice)?;
        let Some(SliceVersions { object, head, .. }) = self.versions.of(origin) else {
            return Ok(Vec::new());
        };
        let (directory, _) = head.directory_at(0);
        let (entries, _) = head.entries_at(BlockNo(0));
        let mut places = Vec::new();
        for page in [HEAD_PAGE, list_page(0), directory, entries] {
            let [slot] = self.version_slots(*object, page, 1)?[..] else {
                continue;
            };
            places.extend(slot.frame().map(frame_at));
        }
        Ok(places)
    }

    /// A living slice with damaged versions, and without snapshots.
    pub(super) fn find_spent_versions(&self) -> Option<ObjectId> {
        let is_live = |origin: &ObjectId| {
            let entry = self.objects.get(origin);
            entry.is_some_and(|entry| entry.state == ObjectState::Live)
        };
        let mut slices = self.versions.slices.iter();
        let spent = slices.find(|(origin, versions)| {
            versions.is_damaged && versions.snapshots.is_empty() && is_live(origin)
        });
        spent.map(|(origin, _)| *origin)
    }
}
