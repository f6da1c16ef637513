//! Changes of the map of a file's pages ([`crate::format::page_map`]).

use crate::error::Result;
use crate::format::inode::Inode;
use crate::format::page_map::{
    CHUNK_ORDER, MAP_HEIGHT_MAX, PageMap, PageRun, SMALL_PAGES, Span, SpanRef, chunks_reachable,
    entry, entry_index, find, is_span_start, span_holding, span_order,
};
use crate::txn::tx::Tx;
use pagemesh_base::bytes;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

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
    bytes::put(&mut bytes[..], index as usize * 8, place.0.to_le_bytes());
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
