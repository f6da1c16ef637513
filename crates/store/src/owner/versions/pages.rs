//! Reads and changes of the pages of an object of versions, by the owner's session.

use super::super::error::ObjectError;
use super::super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::recovery::PoolError;
use crate::session::transaction::transact;
use crate::session::version_slots::VersionSlot;
use crate::session::{LegSession, Session};
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, Reach};
use pagemesh_base::ids::{EPOCH_MAX, Epoch, ObjectId, PageNo};
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

pub(super) type Page = [u8; PAGE_BYTES];

/// Nodes that a change of one page may link.
pub(super) const NODES_PER_PAGE: u64 = 4;
/// Changes of the owner's session: they have no client, and so no order among clients. Their pages are younger than each base,
/// because they belong to no origin.
pub(super) const OWN: Stamp = Stamp {
    epoch: Epoch(EPOCH_MAX),
    op: 0,
    open_ops: 0,
};

/// Pages with new contents, to be changed as a whole.
#[derive(Default)]
pub(super) struct PageEdits {
    pages: BTreeMap<PageNo, Box<Page>>,
}

impl PageEdits {
    pub(super) fn set(&mut self, page: PageNo, bytes: Page) {
        self.pages.insert(page, Box::new(bytes));
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }
}

impl<M: Media> Pool<M> {
    pub(super) fn versions_handle(&self, object: ObjectId) -> Result<Handle, ObjectError> {
        let entry = self.objects.get(&object);
        let slice = entry.ok_or(StoreError::NoSuchObject)?.slice;
        Ok(self.mapping.handle(object, slice)?)
    }

    /// A page of an object of versions. A page that was never written has zeroes.
    pub(super) fn read_versions_page(
        &mut self,
        object: ObjectId,
        page: PageNo,
    ) -> Result<Box<Page>, ObjectError> {
        let mut bytes = Box::new([0; PAGE_BYTES]);
        if let SlotLocation::At(at) = self.mapping.locate(object, 0, page)? {
            let of_object = (object, page);
            self.mapping
                .read_slot(at, of_object, &mut bytes, Reach::All)?;
        }
        Ok(bytes)
    }

    /// Whether the object has no page.
    pub(super) fn is_unlinked(&self, object: ObjectId) -> Result<bool, ObjectError> {
        let location = self.mapping.locate(object, 0, PageNo(0))?;
        Ok(match location {
            SlotLocation::Unlinked(_) => true,
            SlotLocation::At(at) => self.mapping.meta.load(at) == Slot::EMPTY.encode(),
        })
    }

    /// A page with the edits so far.
    pub(super) fn page_with_edits(
        &mut self,
        object: ObjectId,
        page: PageNo,
        edits: &PageEdits,
    ) -> Result<Box<Page>, ObjectError> {
        match edits.pages.get(&page) {
            Some(edited) => Ok(edited.clone()),
            None => self.read_versions_page(object, page),
        }
    }

    /// Changes all edited pages as a whole.
    pub(super) fn commit_edits(
        &mut self,
        object: ObjectId,
        edits: PageEdits,
    ) -> Result<(), ObjectError> {
        let parts: Vec<TransactionPart> = edits
            .pages
            .iter()
            .map(|(page, bytes)| TransactionPart::Write {
                offset: page.0 * PAGE_BYTES as u64,
                data: bytes.to_vec().into(),
            })
            .collect();
        let handle = self.versions_handle(object)?;
        let frames = parts.len() as u64 * (1 + NODES_PER_PAGE);
        self.with_owner_frames(frames, |session| {
            let changed = transact(&mut [LegSession { session, handle }], &parts, OWN);
            changed.map_err(|failure| failure.cause)
        })
    }

    /// The slots of consecutive pages of one leaf. Pages without a leaf are empty.
    pub(super) fn version_slots(
        &self,
        object: ObjectId,
        first: PageNo,
        count: u64,
    ) -> Result<Vec<Slot>, ObjectError> {
        let location = self.mapping.locate(object, 0, first)?;
        let slots = (0..count).map(|index| match location {
            SlotLocation::Unlinked(_) => Ok(Slot::EMPTY),
            SlotLocation::At(at) => {
                let page = PageNo(first.0 + index);
                Ok(self.mapping.slot(at + index as usize * 8, page)?)
            }
        });
        slots.collect()
    }

    /// Changes the slots of consecutive pages of one leaf.
    pub(super) fn change_version_slots(
        &mut self,
        object: ObjectId,
        first: PageNo,
        slots: &[VersionSlot],
    ) -> Result<(), ObjectError> {
        let handle = self.versions_handle(object)?;
        self.with_owner_frames(NODES_PER_PAGE, |own| {
            own.change_version_slots(&handle, first, slots)
        })
    }

    /// Makes all changes so far durable before those that follow. On memory each change is.
    pub(super) fn order_changes(&self) -> Result<(), ObjectError> {
        if self.mapping.has_overlay() && !defect::is(Defect::VersionsUnordered) {
            self.mapping.data.sync().map_err(PoolError::from)?;
        }
        Ok(())
    }

    /// Runs an operation of the owner's session that takes up to so many frames. Without room it gets those that there are.
    pub(in crate::owner) fn with_owner_frames<T>(
        &mut self,
        wanted: u64,
        run: impl FnMut(&mut Session<M>) -> Result<T, StoreError>,
    ) -> Result<T, ObjectError> {
        let state = self.sessions.session(OWNER_SESSION);
        let (mapping, frames) = (&self.mapping, &mut self.frame_allocator);
        state.grant(mapping, OWNER_SESSION, frames, wanted);
        let result = self.with_retry(run);
        let (mapping, frames) = (&self.mapping, &mut self.frame_allocator);
        let state = self.sessions.session(OWNER_SESSION);
        state.recall(mapping, OWNER_SESSION, frames);
        // The session finds the recall before its next operation.
        let recalls = mapping.control.session_cells(OWNER_SESSION).recalls();
        recalls.fetch_add(2, Ordering::SeqCst);
        result
    }
}
