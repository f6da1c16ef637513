//! The overlay: words of this process over the pages of the data view.
//!
//! Invariant: a page is copied from the data view at its first access and stays in memory, so a page that
//! was stored to never shows a later change of the data view.

use super::head::LoadedPages;
use super::memory::Memory;
use crate::map_error::MapError;
use pagemesh_base::units::PAGE_BYTES;

pub(super) struct Overlay {
    pages: LoadedPages,
}

impl Overlay {
    pub(super) fn new(len: usize) -> Result<Overlay, MapError> {
        Ok(Overlay {
            pages: LoadedPages::new(len)?,
        })
    }

    /// The memory, with a range of it loaded.
    #[inline]
    pub(super) fn loaded(
        &self,
        offset: usize,
        len: usize,
        load: impl Fn(usize, &mut [u8; PAGE_BYTES]),
    ) -> &Memory {
        self.pages.ensure(offset, len, load);
        &self.pages.memory
    }
}
