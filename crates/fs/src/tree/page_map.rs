//! Where a file's pages lie in the space. The first 512 lie in seven spans that
//! the inode names, of 8, 8, 16 … 256 pages; each further 512 are a chunk, named in
//! a radix tree of map pages.

use crate::alloc::spans::Span;
use crate::error::{FsError, Result};
use crate::format::inode::{
    CHUNK_ORDER, Corruption, Inode, MAP_ENTRIES, MAP_HEIGHT_MAX, Page, PageMap, SMALL_PAGES,
    SpanRef, span_holding, span_order,
};
use crate::txn::core::Tx;
use pagemesh_base::bytes::{get_u64, put as put_bytes};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::Arc;

/// No space has a page of this number or above.
const PAGES_MAX: u64 = u64::MAX / PAGE_BYTES as u64 / 2;

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
    match page < SMALL_PAGES {
        true => {
            let (index, first) = span_holding(page);
            first + (1 << span_order(index)) - page
        }
        false => SMALL_PAGES - page % SMALL_PAGES,
    }
}

/// Whether a span begins at this page of a file.
pub(crate) fn is_span_start(page: u64) -> bool {
    page == 0 || pages_to_next_span(page - 1) == 1
}

/// Number of chunks in the reach of a tree of this height.
fn chunks_reachable(height: u8) -> u64 {
    match height {
        0 => 0,
        height => MAP_ENTRIES.pow(u32::from(height)),
    }
}

fn entry_index(chunk: u64, level: u8) -> u64 {
    chunk / MAP_ENTRIES.pow(u32::from(level)) % MAP_ENTRIES
}

/// An entry of a map page; at level 0 it names a chunk.
fn entry(page: u64, bytes: &Page, index: u64, level: u8) -> Result<SpanRef> {
    let place = SpanRef(get_u64(bytes, index as usize * 8));
    let at = place.page();
    // Mounting has checked all entries; before that, no sum with one may overflow.
    let is_sound = at < PAGES_MAX
        && (level > 0 || at.is_multiple_of(SMALL_PAGES))
        && (!place.is_shared() || (level == 0 && at != 0));
    match is_sound {
        true => Ok(place),
        false => Err(damaged(page, format!("it names a chunk at page {at}"))),
    }
}

/// The error for an inconsistent map page.
pub(crate) fn damaged(page: u64, cause: String) -> FsError {
    FsError::Damaged {
        what: format!("page {page} of the volume, a map of a file,"),
        cause: Corruption(cause),
    }
}

/// Location of a file's page, in a new span if necessary.
pub(crate) fn find_or_allocate(tx: &mut Tx<'_>, inode: &mut Inode, page: u64) -> Result<PageRun> {
    if page < SMALL_PAGES {
        let (index, _) = span_holding(page);
        if inode.map.spans[index].is_none() {
            inode.map.spans[index] = SpanRef::exclusive(tx.allocate_span(span_order(index))?.page);
        }
    } else {
        let (page, index) = leaf_for_chunk(tx, &mut inode.map, page / SMALL_PAGES - 1)?;
        if tx
            .with_page(page, |bytes| entry(page, bytes, index, 0))??
            .is_none()
        {
            let chunk = tx.allocate_span(CHUNK_ORDER)?;
            set_entry(tx, page, index, SpanRef::exclusive(chunk.page))?;
        }
    }
    let run = find(&inode.map, page, &mut |page| tx.page(page))?;
    Ok(run.expect("a span was just taken"))
}

/// Makes the file's map name `place` for the span that begins at the file's page `at`.
pub(crate) fn put(tx: &mut Tx<'_>, inode: &mut Inode, at: u64, place: SpanRef) -> Result<()> {
    assert!(is_span_start(at), "a span begins at page {at}");
    if at < SMALL_PAGES {
        inode.map.spans[span_holding(at).0] = place;
        return Ok(());
    }
    let (page, index) = leaf_for_chunk(tx, &mut inode.map, at / SMALL_PAGES - 1)?;
    set_entry(tx, page, index, place)
}

/// The map page with a chunk's entry, created if necessary, and the index of the entry.
fn leaf_for_chunk(tx: &mut Tx<'_>, map: &mut PageMap, chunk: u64) -> Result<(u64, u64)> {
    while chunk >= chunks_reachable(map.height) {
        if map.height == MAP_HEIGHT_MAX {
            return Err(Errno::FBIG.into());
        }
        let old = map.root;
        map.root = new_map_page(tx)?;
        map.height += 1;
        set_entry(tx, map.root, 0, SpanRef::exclusive(old))?;
    }
    let mut page = map.root;
    for level in (1..map.height).rev() {
        let index = entry_index(chunk, level);
        let mut at = tx.with_page(page, |bytes| entry(page, bytes, index, level))??;
        if at.is_none() {
            at = SpanRef::exclusive(new_map_page(tx)?);
            set_entry(tx, page, index, at)?;
        }
        page = at.page();
    }
    Ok((page, entry_index(chunk, 0)))
}

fn new_map_page(tx: &mut Tx<'_>) -> Result<u64> {
    let page = tx.allocate_span(0)?.page;
    tx.new_page(page);
    tx.count_pages(1);
    Ok(page)
}

fn set_entry(tx: &mut Tx<'_>, page: u64, index: u64, place: SpanRef) -> Result<()> {
    let bytes = tx.page_mut(page)?;
    put_bytes(&mut bytes[..], index as usize * 8, place.0.to_le_bytes());
    Ok(())
}

/// Removes the span that begins at the file's page `at` from the map.
pub(crate) fn remove(tx: &mut Tx<'_>, inode: &mut Inode, at: u64) -> Result<()> {
    if at < SMALL_PAGES {
        let (index, first) = span_holding(at);
        assert_eq!(first, at, "a span begins there");
        inode.map.spans[index] = SpanRef::default();
        return Ok(());
    }
    let chunk = at / SMALL_PAGES - 1;
    let mut path = Vec::new();
    let mut page = inode.map.root;
    for level in (0..inode.map.height).rev() {
        let index = entry_index(chunk, level);
        path.push((page, index));
        let at = tx.with_page(page, |bytes| entry(page, bytes, index, level))??;
        page = at.page();
    }
    while let Some((page, index)) = path.pop() {
        set_entry(tx, page, index, SpanRef::default())?;
        if !tx.with_page(page, |bytes| *bytes == [0; PAGE_BYTES])? {
            return Ok(());
        }
        tx.clear(page);
        tx.free_span(Span { page, order: 0 });
        tx.count_pages(-1);
    }
    inode.map.root = 0;
    inode.map.height = 0;
    Ok(())
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
