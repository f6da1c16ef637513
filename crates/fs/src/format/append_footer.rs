//! The footer in the last page of a file that direct clients extend (RFD 016): the nonce of their
//! grant, and the end of the file. A file with an append extent has one footer once data was
//! appended.

use crate::format::inode::{AppendExtent, FILE_BYTES_MAX};
use crate::format::{PAGE, Page};
use pagemesh_base::bytes::{field, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;

/// Bytes of the footer, at the end of the last page: nonce and end.
pub const FOOTER_BYTES: usize = 16;
const FOOTER_AT: usize = PAGE_BYTES - FOOTER_BYTES;
/// Most pages that one append changes: 64 KiB, the partial first page, and a page for the footer.
/// Longer appends go through the kernel, because the cost of the system call matters least there.
pub const APPEND_PAGES_MAX: usize = 18;

/// The page of the file that holds the footer for this end.
#[inline]
#[must_use]
pub fn footer_page(end: u64) -> u64 {
    (end + FOOTER_BYTES as u64 - 1) / PAGE
}

/// The end in a page's footer; `None` if the page holds no footer of this extent.
pub(crate) fn footer_end(extent: AppendExtent, page: u64, bytes: &Page) -> Option<u64> {
    let end = get_u64(bytes, FOOTER_AT + 8);
    let is_here = end <= FILE_BYTES_MAX && footer_page(end) == page;
    (field(bytes, FOOTER_AT) == extent.nonce.to_le_bytes() && is_here).then_some(end)
}

/// Whole pages that one record writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailWrite {
    /// The first page of the file.
    pub first_page: u64,
    /// How many.
    pub page_count: usize,
    /// The end of the file after the write.
    pub end: u64,
}

impl TailWrite {
    /// Plans a write of `len` bytes into the last page of a file, or at its end. `None` if it does
    /// not fit into the append extent.
    #[inline]
    #[must_use]
    pub fn plan(extent: AppendExtent, end: u64, offset: u64, len: usize) -> Option<TailWrite> {
        debug_assert!(end / PAGE * PAGE <= offset && offset <= end, "at the end");
        let first = end / PAGE;
        let end = end.max(offset.checked_add(len as u64)?);
        let last = footer_page(end);
        let count = usize::try_from(last - first).ok()? + 1;
        let fits = last < extent.limit_page && count <= APPEND_PAGES_MAX;
        fits.then_some(TailWrite {
            first_page: first,
            page_count: count,
            end,
        })
    }

    /// Fills the pages with the bytes written there. On entry they begin with the content of the
    /// last page below the old `end`.
    #[inline]
    pub fn fill(self, extent: AppendExtent, pages: &mut [u8], end: u64, offset: u64, data: &[u8]) {
        let len = self.page_count * PAGE_BYTES;
        let pages = &mut pages[..len];
        pages[(end % PAGE) as usize..].fill(0);
        let at = (offset - self.first_page * PAGE) as usize;
        pages[at..at + data.len()].copy_from_slice(data);
        put(pages, len - FOOTER_BYTES, extent.nonce.to_le_bytes());
        put(pages, len - 8, self.end.to_le_bytes());
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: AppendExtent = AppendExtent {
        nonce: 0x0123_4567_89ab_cdef,
        limit_page: 40,
    };

    /// Appends through `TailWrite` produce the written bytes, and exactly one page has a valid
    /// footer.
    #[test]
    fn only_one_page_has_a_valid_footer() {
        let mut file = vec![0; 40 * PAGE_BYTES];
        let mut model = Vec::new();
        let mut pages = vec![0xee; APPEND_PAGES_MAX * PAGE_BYTES];
        for round in 0..400u64 {
            let len = [1, 16, 100, 4080, 4081, 4095, 4096, 4120, 20][round as usize % 9];
            let end = model.len() as u64;
            let back = [0, 0, 3, 0, 50][round as usize % 5].min(end % PAGE);
            let data: Vec<u8> = (0..len).map(|at| (round * 7 + at) as u8).collect();
            let offset = end - back;
            let Some(composed) = TailWrite::plan(EXTENT, end, offset, data.len()) else {
                break;
            };
            let first = composed.first_page as usize * PAGE_BYTES;
            let within = (end % PAGE) as usize;
            pages[..within].copy_from_slice(&file[first..first + within]);
            composed.fill(EXTENT, &mut pages, end, offset, &data);
            let all = composed.page_count * PAGE_BYTES;
            file[first..first + all].copy_from_slice(&pages[..all]);
            model.truncate(offset as usize);
            let old = end.saturating_sub(offset + len) as usize;
            let kept = file[(offset + len) as usize..][..old].to_vec();
            model.extend(data);
            model.extend(kept);
            assert_eq!(composed.end, model.len() as u64);
            assert!(file[..model.len()] == model, "round {round}");
            let told: Vec<u64> = file
                .as_chunks::<PAGE_BYTES>()
                .0
                .iter()
                .zip(0..)
                .filter_map(|(bytes, page)| footer_end(EXTENT, page, bytes))
                .collect();
            assert_eq!(told, [composed.end]);
        }
        assert!(model.len() > 30 * PAGE_BYTES);
    }
}
