//! The map of a file's pages: where they lie in the space. The first 512 lie in seven spans that the
//! inode names, of 8, 8, 16 … 256 pages; each further 512 are a chunk, named in a radix tree of map
//! pages. [`crate::tree::map_update`] changes maps.

use crate::error::{Corruption, FsError, Result};
use crate::format::Page;
use pagemesh_base::bytes::get_u64;
use pagemesh_base::units::PAGE_BYTES;
use std::sync::Arc;

/// Spans that an inode names; together they hold the first `SMALL_PAGES`.
const SPANS: usize = 7;
/// Pages of a file below its first chunk; as many as one leaf of a page table.
pub(crate) const SMALL_PAGES: u64 = 1 << CHUNK_ORDER;
/// A chunk is a span of 2^9 pages.
pub(crate) const CHUNK_ORDER: u8 = 9;
/// Entries of a map page.
const MAP_ENTRIES: u64 = (PAGE_BYTES / 8) as u64;
/// Three levels reach 2^27 chunks of 2 MiB, far beyond `FILE_BYTES_MAX`.
pub(crate) const MAP_HEIGHT_MAX: u8 = 3;
/// No space has a page of this number or above.
const PAGES_MAX: u64 = u64::MAX / PAGE_BYTES as u64 / 2;

/// A run of 2^order pages at a multiple of its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Span {
    pub(crate) page: u64,
    pub(crate) order: u8,
}

impl Span {
    pub(crate) fn end(self) -> u64 {
        self.page + (1 << self.order)
    }
}

/// The stored form of an optional span; 0: none.
pub(crate) fn span_bits(span: Option<Span>) -> u64 {
    span.map_or(0, |Span { page, order }| page | u64::from(order) << 56)
}

pub(crate) fn span_of_bits(bits: u64) -> Option<Span> {
    (bits != 0).then_some(Span {
        page: bits & !(0xff << 56),
        order: (bits >> 56) as u8,
    })
}

/// Whether the span can lie in a space of `pages` pages. Page 0 is the head.
pub(crate) fn is_span_within(Span { page, order }: Span, pages: u64) -> bool {
    page != 0
        && order <= CHUNK_ORDER
        && page.is_multiple_of(1 << order)
        && page.checked_add(1 << order).is_some_and(|end| end <= pages)
}

/// The first page of a span of a file, and whether other places may name the span too. A shared
/// span is immutable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpanRef(pub(crate) u64);

impl SpanRef {
    const SHARED: u64 = 1 << 63;

    /// A span that no other place names.
    pub(crate) fn exclusive(page: u64) -> SpanRef {
        SpanRef(page)
    }

    pub(crate) fn shared(page: u64) -> SpanRef {
        SpanRef(page | SpanRef::SHARED)
    }

    pub(crate) fn page(self) -> u64 {
        self.0 & !SpanRef::SHARED
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 & SpanRef::SHARED != 0
    }

    pub(crate) fn is_none(self) -> bool {
        self.page() == 0
    }
}

/// The map of a file's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageMap {
    pub(crate) spans: [SpanRef; SPANS],
    /// The root of the radix tree over chunks; 0: none.
    pub(crate) root: u64,
    pub(crate) height: u8,
}

/// The order of the span with this index.
pub(crate) fn span_order(index: usize) -> u8 {
    (index as u8 + 2).max(3)
}

/// The span that holds a file's page below `SMALL_PAGES`: its index, and its
/// first page in the file.
pub(crate) fn span_holding(page: u64) -> (usize, u64) {
    assert!(page < SMALL_PAGES, "page {page} lies in a chunk");
    match page.checked_ilog2() {
        Some(order) if order >= 3 => (order as usize - 2, 1 << order),
        _ => (0, 0),
    }
}

/// The span of a file that holds a page, and the page's index in it.
#[must_use]
pub fn span_index(page: u64) -> (usize, u64) {
    if page < SMALL_PAGES {
        let (index, first) = span_holding(page);
        (index, page - first)
    } else {
        let chunk = (page / SMALL_PAGES - 1) as usize;
        (SPANS + chunk, page % SMALL_PAGES)
    }
}

/// Number of pages of the span with this index.
#[must_use]
pub fn span_pages(index: usize) -> u64 {
    if index < SPANS {
        1 << span_order(index)
    } else {
        SMALL_PAGES
    }
}

/// Pages of the space in which consecutive pages of a file lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRun {
    pub(crate) page: u64,
    /// Pages to the end of the span.
    pub(crate) len: u64,
    pub(crate) is_shared: bool,
}

/// A span of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSpan {
    /// The first of the file's pages in it.
    pub(crate) first_page: u64,
    pub(crate) span: Span,
    pub(crate) is_shared: bool,
}

impl FileSpan {
    /// The page of the file behind the span.
    pub(crate) fn end(&self) -> u64 {
        self.first_page + (1 << self.span.order)
    }
}

/// Reads a page of the name space.
pub(crate) type ReadPage<'r> = &'r mut dyn FnMut(u64) -> Result<Arc<Page>>;

/// Where the file's page lies, if there is a span for it.
pub(crate) fn find(map: &PageMap, page: u64, read: ReadPage<'_>) -> Result<Option<PageRun>> {
    if page < SMALL_PAGES {
        let (index, first) = span_holding(page);
        let at = map.spans[index];
        let within = page - first;
        return Ok((!at.is_none()).then(|| PageRun {
            page: at.page() + within,
            len: (1 << span_order(index)) - within,
            is_shared: at.is_shared(),
        }));
    }
    let chunk = page / SMALL_PAGES - 1;
    if chunk >= chunks_reachable(map.height) {
        return Ok(None);
    }
    let mut at = SpanRef::exclusive(map.root);
    for level in (0..map.height).rev() {
        at = entry(
            at.page(),
            &*read(at.page())?,
            entry_index(chunk, level),
            level,
        )?;
        if at.is_none() {
            return Ok(None);
        }
    }
    let within = page % SMALL_PAGES;
    Ok(Some(PageRun {
        page: at.page() + within,
        len: SMALL_PAGES - within,
        is_shared: at.is_shared(),
    }))
}

/// Pages from this one of a file to the next that may lie in another span.
pub(crate) fn pages_to_next_span(page: u64) -> u64 {
    if page < SMALL_PAGES {
        let (index, first) = span_holding(page);
        first + (1 << span_order(index)) - page
    } else {
        SMALL_PAGES - page % SMALL_PAGES
    }
}

/// Whether a span begins at this page of a file.
pub(crate) fn is_span_start(page: u64) -> bool {
    page == 0 || pages_to_next_span(page - 1) == 1
}

/// Number of chunks in the reach of a tree of this height.
pub(crate) fn chunks_reachable(height: u8) -> u64 {
    match height {
        0 => 0,
        height => MAP_ENTRIES.pow(u32::from(height)),
    }
}

pub(crate) fn entry_index(chunk: u64, level: u8) -> u64 {
    chunk / MAP_ENTRIES.pow(u32::from(level)) % MAP_ENTRIES
}

/// An entry of a map page; at level 0 it names a chunk.
pub(crate) fn entry(page: u64, bytes: &Page, index: u64, level: u8) -> Result<SpanRef> {
    let place = SpanRef(get_u64(bytes, index as usize * 8));
    let at = place.page();
    // Mounting has checked all entries; before that, no sum with one may overflow.
    let is_sound = at < PAGES_MAX
        && (level > 0 || at.is_multiple_of(SMALL_PAGES))
        && (!place.is_shared() || (level == 0 && at != 0));
    if is_sound {
        Ok(place)
    } else {
        Err(damaged(page, format!("it names a chunk at page {at}")))
    }
}

/// The error for an inconsistent map page.
pub(crate) fn damaged(page: u64, cause: String) -> FsError {
    FsError::Damaged {
        what: format!("page {page} of the volume, a map of a file,"),
        cause: Corruption(cause),
    }
}

/// Calls `visit` with every span of pages from `from` on, in order, until it returns false. Calls
/// `visit_map` with each map page before reading it; an error ends the visit. Damaged maps may name
/// a map page twice.
pub(crate) fn visit(
    map: &PageMap,
    from: u64,
    read: ReadPage<'_>,
    visit: &mut dyn FnMut(FileSpan) -> bool,
    visit_map: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let mut first = 0;
    for (index, place) in map.spans.iter().enumerate() {
        let order = span_order(index);
        let end = first + (1 << order);
        if !place.is_none() && end > from {
            let page = place.page();
            let piece = FileSpan {
                first_page: first,
                span: Span { page, order },
                is_shared: place.is_shared(),
            };
            if !visit(piece) {
                return Ok(());
            }
        }
        first = end;
    }
    if map.height > 0 {
        let root = (map.root, map.height - 1, 0);
        visit_tree(root, from, read, visit, visit_map)?;
    }
    Ok(())
}

fn visit_tree(
    (page, level, first): (u64, u8, u64),
    from: u64,
    read: ReadPage<'_>,
    visit: &mut dyn FnMut(FileSpan) -> bool,
    visit_map: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<bool> {
    visit_map(page)?;
    let bytes = read(page)?;
    let chunks = MAP_ENTRIES.pow(u32::from(level));
    for index in 0..MAP_ENTRIES {
        let chunk = first + index * chunks;
        let end = (chunk + chunks + 1) * SMALL_PAGES;
        let place = entry(page, &bytes, index, level)?;
        if place.is_none() || end <= from {
            continue;
        }
        let at = place.page();
        let goes_on = match level {
            0 => visit(FileSpan {
                first_page: (chunk + 1) * SMALL_PAGES,
                span: Span {
                    page: at,
                    order: CHUNK_ORDER,
                },
                is_shared: place.is_shared(),
            }),
            _ => visit_tree((at, level - 1, chunk), from, read, visit, visit_map)?,
        };
        if !goes_on {
            return Ok(false);
        }
    }
    Ok(true)
}
