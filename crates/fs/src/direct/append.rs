//! Files that direct clients extend (RFD 016): grants of append space, and how the mount publishes
//! their end.
//!
//! Invariants: only direct clients write to the append extent until the size is published, and that
//! happens while they are blocked. Nothing behind the end of the file is visible.

use crate::direct::publish;
use crate::error::{Corruption, FsError, Result};
use crate::format::append_footer::{APPEND_PAGES_MAX, footer_end};
use crate::format::inode::{AppendExtent, FILE_BYTES_MAX, Ino, Inode, NEEDS_TRIM, damaged_inode};
use crate::format::page_map::PageRun;
use crate::format::{PAGE, page_count, page_map};
use crate::live::file_lock::FileLock;
use crate::live::kernel_hooks::KernelHooks;
use crate::tree::map_update;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::ops::Range;

/// Most pages behind the end that are cleared in the transaction that publishes the size. There is
/// one at most, unless an append that failed was longer.
const CLEARED_PAGES_MAX: u64 = APPEND_PAGES_MAX as u64;

/// The end of a file, including appends of direct clients.
pub(crate) fn file_end(core: &mut Core, ino: Ino, inode: &Inode) -> Result<u64> {
    let Some(extent) = inode.append_extent else {
        return Ok(inode.size);
    };
    let live = core.live_inodes.get(&ino);
    let end = match live.and_then(|live| live.file_lock.direct_append_end(extent)) {
        Some(end) => end,
        None => find_footer_end(core, ino, inode, extent)?,
    };
    // Direct clients may report any number.
    Ok(end.clamp(inode.size, extent.limit_page * PAGE))
}

/// The end in the footers of a file with an append extent.
fn find_footer_end(core: &mut Core, ino: Ino, inode: &Inode, extent: AppendExtent) -> Result<u64> {
    let (first, run) = granted_run(core, ino, inode)?;
    let mut end = inode.size;
    let mut found = 0;
    for page in mapped_granted_pages(core, first, run, extent)?
        .into_iter()
        .rev()
    {
        if found > 0 && page + APPEND_PAGES_MAX as u64 <= found {
            break;
        }
        let bytes = core.data_page(run.page + page - first)?;
        if let Some(told) = footer_end(extent, page, &bytes) {
            // A footer in a lower page is older, and only its bytes are surely complete.
            end = told;
            found = found.max(page);
        }
    }
    Ok(end)
}

/// The first page of the append extent, in the file and in the space.
fn granted_run(core: &mut Core, ino: Ino, inode: &Inode) -> Result<(u64, PageRun)> {
    let first = inode.size / PAGE;
    let run = page_map::find(&inode.map, first, &mut |page| core.page(page))?;
    let run = run.filter(|run| !run.is_shared);
    let what = || Corruption("it grows where it has no pages of its own".into());
    Ok((first, run.ok_or_else(|| damaged_inode(ino, what()))?))
}

/// Mapped pages of the file in the append extent, in order.
fn mapped_granted_pages(
    core: &mut Core,
    first: u64,
    run: PageRun,
    extent: AppendExtent,
) -> Result<Vec<u64>> {
    let pages = (extent.limit_page - first).min(run.len);
    let found = core.mapped_runs(run.page..run.page + pages)?;
    let pages = found.into_iter().flatten();
    Ok(pages.map(|page| page - run.page + first).collect())
}

/// Writes the end of a file with an append extent into its inode. Returns whether pages behind
/// it are still to be freed.
fn publish_end(tx: &mut Tx<'_>, ino: Ino) -> Result<bool> {
    let mut inode = tx.inode(ino)?;
    let Some(extent) = inode.append_extent else {
        return Ok(false);
    };
    let end = file_end(tx.core, ino, &inode)?;
    let (first, run) = granted_run(tx.core, ino, &inode)?;
    let mapped = mapped_granted_pages(tx.core, first, run, extent)?;
    let (known, keep) = (page_count(inode.size), page_count(end));
    let fresh = mapped.iter().filter(|&&page| (known..keep).contains(&page));
    inode.pages += fresh.count() as u64;
    let within = (end % PAGE) as usize;
    if within > 0 && mapped.contains(&(end / PAGE)) {
        let place = run.page + end / PAGE - first;
        tx.write_data(place, within, &[0; PAGE_BYTES][within..], false)?;
    }
    let beyond = mapped.iter().filter(|&&page| page >= keep);
    let is_cut = beyond.clone().count() as u64 > CLEARED_PAGES_MAX;
    if is_cut {
        inode.flags |= NEEDS_TRIM;
    } else {
        beyond.for_each(|page| tx.clear(run.page + page - first));
    }
    inode.size = end;
    inode.append_extent = None;
    tx.put_inode(ino, &inode)?;
    Ok(is_cut)
}

/// Grants a file the rest of the span in which it ends. Returns the extent, and the bytes of
/// the space that hold its last page.
fn grant_span(tx: &mut Tx<'_>, ino: Ino, nonce: u64) -> Result<Option<(AppendExtent, Range<u64>)>> {
    let mut inode = tx.inode(ino)?;
    let first = inode.size / PAGE;
    let reach = (first + page_map::pages_to_next_span(first)).min(FILE_BYTES_MAX / PAGE);
    if reach <= first {
        return Ok(None);
    }
    let run = map_update::find_or_allocate(tx, &mut inode, first)?;
    if run.is_shared {
        return Ok(None);
    }
    let extent = AppendExtent {
        nonce,
        limit_page: reach,
    };
    inode.append_extent = Some(extent);
    tx.put_inode(ino, &inode)?;
    let tail = run.page * PAGE..run.page * PAGE + inode.size % PAGE;
    Ok(Some((extent, tail)))
}

/// Publishes the size of a file with an append extent, and frees the pages behind it. The
/// caller has exclusive access to the file.
pub(crate) fn publish_size(txs: &TxManager, ino: Ino) -> Result<()> {
    if txs.inspect(|core| core.inode(ino))?.append_extent.is_none() {
        return Ok(());
    }
    if txs.change(|tx| publish_end(tx, ino))? {
        txs.lock_core().defer_rest(ino);
    }
    Ok(())
}

/// As [`crate::direct::append::publish_size`], at the last close of a file that had direct clients; the caller has
/// it open. Retries a failure later. Returns whether the size is published.
pub(crate) fn publish_size_at_close(txs: &TxManager, ino: Ino) -> bool {
    let settled = txs.file_lock(ino).and_then(|data| {
        let _alone = txs.lock_exclusive(ino, &data)?;
        publish_size(txs, ino)?;
        publish::release_file_map(txs, ino, &data);
        Ok(())
    });
    match settled {
        Err(FsError::Posix(Errno::STALE)) => false,
        settled => txs.defer_on_error(ino, settled).is_ok(),
    }
}

/// Grants a dense file append space. Returns the extent, and the content of the last page below
/// the end; `None` if there is no room. The caller holds the file exclusively, with its direct
/// clients blocked.
pub(crate) fn grant_append_space(
    txs: &TxManager,
    hooks: &KernelHooks,
    ino: Ino,
    data: &FileLock,
) -> Result<Option<(AppendExtent, Vec<u8>)>> {
    let nonce = new_nonce(txs, ino);
    let granted = match txs.change(|tx| grant_span(tx, ino, nonce)) {
        Err(error) if error.errno() == Errno::NOSPC => None,
        granted => granted?,
    };
    let Some((extent, tail)) = granted else {
        return Ok(None);
    };
    data.kernel_pages().mark_size_stale();
    // From now on the size is the one that direct clients report.
    hooks.notify_uncacheable(ino);
    let len = (tail.end - tail.start) as usize;
    let bytes = match len {
        0 => Vec::new(),
        len => txs.inspect(|core| Ok(core.data_page(tail.start / PAGE)?[..len].to_vec()))?,
    };
    Ok(Some((extent, bytes)))
}

/// A nonce that no earlier extent had, and that clients cannot guess.
fn new_nonce(txs: &TxManager, ino: Ino) -> u64 {
    let now = txs.now();
    let mut core = txs.lock_core();
    core.append_grants += 1;
    let [one, other] = core.head.hash_key;
    let mut hasher = SipHasher24::new_with_keys(one, other);
    for word in [
        ino.0,
        core.append_grants,
        now.sec.cast_unsigned(),
        now.nsec.into(),
    ] {
        hasher.write_u64(word);
    }
    hasher.finish()
}
