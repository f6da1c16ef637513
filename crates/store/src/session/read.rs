//! Reads, each page checked against its checksum.

use super::{Page, Session};
use crate::format::geometry::frame_at;
use crate::format::slot::Slot;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, Reach};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

impl<M: Media> Session<M> {
    /// Reads bytes, each page checked against its checksum.
    ///
    /// # Errors
    /// When a page is damaged, the range is beyond the end, or the client is
    /// fenced.
    pub fn read(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        self.read_within(handle, offset, into, epoch, Reach::All)
    }

    /// As [`Session::read`], if all pages are in memory.
    ///
    /// # Errors
    /// As [`Session::read`], and [`StoreError::OnFlash`] when a page is on flash.
    pub(crate) fn read_in_memory(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        self.read_within(handle, offset, into, epoch, Reach::Memory)
    }

    #[inline]
    fn read_within(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
        epoch: Epoch,
        reach: Reach,
    ) -> Result<(), StoreError> {
        self.mapping
            .check_range(handle, offset, into.len() as u64)?;
        self.with_op(handle, epoch, |session| {
            session.read_pages(handle, offset, into, reach)
        })
    }

    fn read_pages(
        &mut self,
        handle: &Handle,
        offset: u64,
        into: &mut [u8],
        reach: Reach,
    ) -> Result<(), StoreError> {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let page = PageNo(at / PAGE_BYTES as u64);
            let within = (at % PAGE_BYTES as u64) as usize;
            let count = rest.len().min(PAGE_BYTES - within);
            let (part, after) = rest.split_at_mut(count);
            let of_object = (handle.object, page);
            match self.slot_at(handle, page)? {
                None => part.fill(0),
                Some(slot_at) => {
                    let mapping = &*self.mapping;
                    let read = match <&mut Page>::try_from(&mut *part) {
                        Ok(whole) => mapping.read_slot(slot_at, of_object, whole, reach)?,
                        Err(_) => {
                            let mut whole = [0; PAGE_BYTES];
                            let read = mapping.read_slot(slot_at, of_object, &mut whole, reach)?;
                            part.copy_from_slice(&whole[within..within + count]);
                            read
                        }
                    };
                    if let Some(read) = read {
                        mapping.control.warm_frame(read.frame, self.hint);
                    }
                }
            }
            at += count as u64;
            rest = after;
        }
        Ok(())
    }

    /// Calls `visit` with the place of each page of a run that has a frame.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn places_of(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        epoch: Epoch,
        mut visit: impl FnMut(usize),
    ) -> Result<(), StoreError> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let len = pages.end.saturating_sub(pages.start).saturating_mul(PAGE);
        let offset = pages.start.saturating_mul(PAGE);
        self.mapping.check_range(handle, offset, len)?;
        let visited = self.visit_slots(handle, pages, epoch, |_, _, slot| {
            let frame = slot.and_then(|slot| slot.frame());
            frame.map(frame_at).into_iter().for_each(&mut visit);
            true
        });
        visited.map(drop)
    }

    /// Reads and checks each page of a run, and returns the CRC32C of each.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn checksums(
        &mut self,
        handle: &Handle,
        page: PageNo,
        count: u32,
        epoch: Epoch,
    ) -> Result<Vec<u32>, StoreError> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let offset = page.0.saturating_mul(PAGE);
        self.mapping
            .check_range(handle, offset, u64::from(count) * PAGE)?;
        let of_zeroes = pagemesh_base::checksum::crc32c(&[0; PAGE_BYTES]);
        let mut buffer = [0; PAGE_BYTES];
        self.with_op(handle, epoch, |session| {
            let pages = (page.0..page.0 + u64::from(count)).map(PageNo);
            let mut sums = Vec::with_capacity(count as usize);
            for page in pages {
                let sum = match session.slot_at(handle, page)? {
                    None => None,
                    Some(at) => session.mapping.read_slot(
                        at,
                        (handle.object, page),
                        &mut buffer,
                        Reach::All,
                    )?,
                };
                sums.push(sum.map_or(of_zeroes, |page| page.crc));
            }
            Ok(sums)
        })
    }

    /// Calls `visit` with runs of pages of a range and their slots. The slot is none if it is
    /// damaged. A leaf that is not linked is one run of empty slots. Stops when `visit` returns
    /// false, and returns the page after the last one visited.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn visit_slots(
        &mut self,
        handle: &Handle,
        pages: std::ops::Range<u64>,
        epoch: Epoch,
        mut visit: impl FnMut(PageNo, u64, Option<Slot>) -> bool,
    ) -> Result<u64, StoreError> {
        self.with_op(handle, epoch, |session| {
            let mut page = pages.start;
            while page < pages.end {
                let in_leaf = ((page / NODE_SLOTS + 1) * NODE_SLOTS).min(pages.end);
                match session.slot_at(handle, PageNo(page))? {
                    None => {
                        if !visit(PageNo(page), in_leaf - page, Some(Slot::EMPTY)) {
                            return Ok(page);
                        }
                        page = in_leaf;
                    }
                    Some(at) => {
                        let slot = session.mapping.slot(at, PageNo(page)).ok();
                        if !visit(PageNo(page), 1, slot) {
                            return Ok(page);
                        }
                        page += 1;
                    }
                }
            }
            Ok(page)
        })
    }
}
