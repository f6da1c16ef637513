//! Files that direct clients extend (RFD 016): the footer in their last page, and how the mount
//! publishes their end.
//!
//! Invariants: a file with an append extent has one footer once data was appended. Only direct
//! clients write to it until its size is published, and that happens while they are blocked.
//! Nothing behind its end is visible.

use crate::Fs;
use crate::direct::shared_file_map::FileLock;
use crate::error::{FsError, Result};
use crate::file::write::{PAGE, page_count};
use crate::format::inode::{
    AppendExtent, Corruption, FILE_BYTES_MAX, Ino, Inode, NEEDS_TRIM, Page,
};
use crate::tree::page_map::{self as map, PageRun};
use crate::txn::core::{Core, Tx, damaged_inode};
use pagemesh_base::bytes::{field, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::ops::Range;

/// Bytes of the footer, at the end of the last page: nonce and end.
pub const FOOTER_BYTES: usize = 16;
const FOOTER_AT: usize = PAGE_BYTES - FOOTER_BYTES;
/// Most pages that one append changes: 64 KiB, the partial first page, and a page for the footer.
/// Longer appends go through the kernel, because the cost of the system call matters least there.
pub const APPEND_PAGES_MAX: usize = 18;
/// Most pages behind the end that are cleared in the transaction that publishes the size. There is
/// one at most, unless an append that failed was longer.
const CLEARED_PAGES_MAX: u64 = APPEND_PAGES_MAX as u64;

/// The page of the file that holds the footer for this end.
#[inline]
#[must_use]
pub fn footer_page(end: u64) -> u64 {
    (end + FOOTER_BYTES as u64 - 1) / PAGE
}

/// The end in a page's footer; `None` if the page holds no footer of this extent.
fn footer_end(growth: AppendExtent, page: u64, bytes: &Page) -> Option<u64> {
    let end = get_u64(bytes, FOOTER_AT + 8);
    let is_here = end <= FILE_BYTES_MAX && footer_page(end) == page;
    (field(bytes, FOOTER_AT) == growth.nonce.to_le_bytes() && is_here).then_some(end)
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
    pub fn plan(growth: AppendExtent, end: u64, offset: u64, len: usize) -> Option<TailWrite> {
        debug_assert!(end / PAGE * PAGE <= offset && offset <= end, "at the end");
        let first = end / PAGE;
        let end = end.max(offset.checked_add(len as u64)?);
        let last = footer_page(end);
        let count = usize::try_from(last - first).ok()? + 1;
        let fits = last < growth.limit_page && count <= APPEND_PAGES_MAX;
        fits.then_some(TailWrite {
            first_page: first,
            page_count: count,
            end,
        })
    }

    /// Fills the pages with the bytes written there. On entry they begin with the content of the
    /// last page below the old `end`.
    #[inline]
    pub fn fill(self, growth: AppendExtent, pages: &mut [u8], end: u64, offset: u64, data: &[u8]) {
        let len = self.page_count * PAGE_BYTES;
        let pages = &mut pages[..len];
        pages[(end % PAGE) as usize..].fill(0);
        let at = (offset - self.first_page * PAGE) as usize;
        pages[at..at + data.len()].copy_from_slice(data);
        put(pages, len - FOOTER_BYTES, growth.nonce.to_le_bytes());
        put(pages, len - 8, self.end.to_le_bytes());
    }
}

impl Inode {
    /// Pages of the append extent that may be mapped, beyond those that the inode counts.
    pub(crate) fn granted_pages(&self) -> u64 {
        let reach = self.append_extent.map_or(0, |growth| growth.limit_page);
        reach.saturating_sub(page_count(self.size))
    }
}

impl Core {
    /// The end of a file, including appends of direct clients.
    pub(crate) fn file_end(&mut self, ino: Ino, inode: &Inode) -> Result<u64> {
        let Some(growth) = inode.append_extent else {
            return Ok(inode.size);
        };
        let live = self.live_inodes.get(&ino);
        let end = match live.and_then(|live| live.file_lock.direct_append_end(growth)) {
            Some(end) => end,
            None => self.find_footer_end(ino, inode, growth)?,
        };
        // Direct clients may report any number.
        Ok(end.clamp(inode.size, growth.limit_page * PAGE))
    }

    /// The end in the footers of a file with an append extent.
    fn find_footer_end(&mut self, ino: Ino, inode: &Inode, growth: AppendExtent) -> Result<u64> {
        let (first, run) = self.granted_run(ino, inode)?;
        let mut end = inode.size;
        let mut found = 0;
        for page in self
            .mapped_granted_pages(first, run, growth)?
            .into_iter()
            .rev()
        {
            if found > 0 && page + APPEND_PAGES_MAX as u64 <= found {
                break;
            }
            let bytes = self.data_page(run.page + page - first)?;
            if let Some(told) = footer_end(growth, page, &bytes) {
                // A footer in a lower page is older, and only its bytes are surely complete.
                end = told;
                found = found.max(page);
            }
        }
        Ok(end)
    }

    /// The first page of the append extent, in the file and in the space.
    fn granted_run(&mut self, ino: Ino, inode: &Inode) -> Result<(u64, PageRun)> {
        let first = inode.size / PAGE;
        let run = map::find(&inode.map, first, &mut |page| self.page(page))?;
        let run = run.filter(|run| !run.is_shared);
        let what = || Corruption("it grows where it has no pages of its own".into());
        Ok((first, run.ok_or_else(|| damaged_inode(ino, what()))?))
    }

    /// Mapped pages of the file in the append extent, in order.
    fn mapped_granted_pages(
        &mut self,
        first: u64,
        run: PageRun,
        growth: AppendExtent,
    ) -> Result<Vec<u64>> {
        let pages = (growth.limit_page - first).min(run.len);
        let found = self.mapped_runs(run.page..run.page + pages)?;
        let pages = found.into_iter().flatten();
        Ok(pages.map(|page| page - run.page + first).collect())
    }
}

impl Tx<'_> {
    /// Writes the end of a file with an append extent into its inode. Returns whether pages behind
    /// it are still to be freed.
    fn publish_end(&mut self, ino: Ino) -> Result<bool> {
        let mut inode = self.inode(ino)?;
        let Some(growth) = inode.append_extent else {
            return Ok(false);
        };
        let end = self.core.file_end(ino, &inode)?;
        let (first, run) = self.core.granted_run(ino, &inode)?;
        let mapped = self.core.mapped_granted_pages(first, run, growth)?;
        let (known, keep) = (page_count(inode.size), page_count(end));
        let fresh = mapped.iter().filter(|&&page| (known..keep).contains(&page));
        inode.pages += fresh.count() as u64;
        let within = (end % PAGE) as usize;
        if within > 0 && mapped.contains(&(end / PAGE)) {
            let place = run.page + end / PAGE - first;
            self.write_data(place, within, &[0; PAGE_BYTES][within..], false)?;
        }
        let beyond = mapped.iter().filter(|&&page| page >= keep);
        let is_cut = beyond.clone().count() as u64 > CLEARED_PAGES_MAX;
        match is_cut {
            true => inode.flags |= NEEDS_TRIM,
            false => beyond.for_each(|page| self.clear(run.page + page - first)),
        }
        inode.size = end;
        inode.append_extent = None;
        self.put_inode(ino, &inode)?;
        Ok(is_cut)
    }

    /// Grants a file the rest of the span in which it ends. Returns the extent, and the bytes of
    /// the space that hold its last page.
    fn grant_span(&mut self, ino: Ino, nonce: u64) -> Result<Option<(AppendExtent, Range<u64>)>> {
        let mut inode = self.inode(ino)?;
        let first = inode.size / PAGE;
        let reach = (first + map::pages_to_next_span(first)).min(FILE_BYTES_MAX / PAGE);
        if reach <= first {
            return Ok(None);
        }
        let run = map::find_or_allocate(self, &mut inode, first)?;
        if run.is_shared {
            return Ok(None);
        }
        let growth = AppendExtent {
            nonce,
            limit_page: reach,
        };
        inode.append_extent = Some(growth);
        self.put_inode(ino, &inode)?;
        let tail = run.page * PAGE..run.page * PAGE + inode.size % PAGE;
        Ok(Some((growth, tail)))
    }
}

impl Fs {
    /// Publishes the size of a file with an append extent, and frees the pages behind it. The
    /// caller has exclusive access to the file.
    pub(crate) fn publish_size(&self, ino: Ino) -> Result<()> {
        if self
            .inspect(|core| core.inode(ino))?
            .append_extent
            .is_none()
        {
            return Ok(());
        }
        if self.change(|tx| tx.publish_end(ino))? {
            self.lock_core().defer_rest(ino);
        }
        Ok(())
    }

    /// As [`Fs::publish_size`], at the last close of a file that had direct clients; the caller has
    /// it open. Retries a failure later. Returns whether the size is published.
    pub(crate) fn publish_size_at_close(&self, ino: Ino) -> bool {
        let settled = self.file_lock(ino).and_then(|data| {
            let _alone = data.write();
            self.publish_size(ino)?;
            self.release_file_map(ino, &data);
            Ok(())
        });
        match settled {
            Err(FsError::Posix(Errno::STALE)) => false,
            settled => self.defer_on_error(ino, settled).is_ok(),
        }
    }

    /// Grants a dense file append space. Returns the extent, and the content of the last page below
    /// the end; `None` if there is no room. The caller holds the file exclusively, with its direct
    /// clients blocked.
    pub(crate) fn grant_append_space(
        &self,
        ino: Ino,
        data: &FileLock,
    ) -> Result<Option<(AppendExtent, Vec<u8>)>> {
        let nonce = self.new_nonce(ino);
        let lent = match self.change(|tx| tx.grant_span(ino, nonce)) {
            Err(error) if error.errno() == Errno::NOSPC => None,
            lent => lent?,
        };
        let Some((growth, tail)) = lent else {
            return Ok(None);
        };
        data.kernel_pages.mark_size_stale();
        // From now on the size is the one that direct clients report.
        self.notify_uncacheable(ino);
        let len = (tail.end - tail.start) as usize;
        let bytes = match len {
            0 => Vec::new(),
            len => self.inspect(|core| Ok(core.data_page(tail.start / PAGE)?[..len].to_vec()))?,
        };
        Ok(Some((growth, bytes)))
    }

    /// A nonce that no earlier extent had, and that clients cannot guess.
    fn new_nonce(&self, ino: Ino) -> u64 {
        let now = self.now();
        let mut core = self.lock_core();
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

    /// Calls the append hook: attributes of the file must not be cached from now on.
    pub(crate) fn notify_uncacheable(&self, ino: Ino) {
        if let Some(tell) = self.append_hook.get() {
            tell(ino);
        }
    }

    /// Sets the hook for the moments from which a file's attributes must not be cached
    /// ([`crate::Attr::has_volatile_size`]). It is called before direct clients get append space,
    /// and when the file gets its first mmap-dirty page. Only the first call has an effect.
    pub fn set_append_hook(&self, tell: impl Fn(Ino) + Send + Sync + 'static) {
        // The first hook stays.
        let _ = self.append_hook.set(Box::new(tell));
    }

    /// Sets a hook that is called before each open that did not come through the preload library,
    /// with the thread number that the kernel reports. Only the first call has an effect.
    pub fn set_open_hook(&self, tell: impl Fn(u32) + Send + Sync + 'static) {
        // The first hook stays.
        let _ = self.open_hook.set(Box::new(tell));
    }

    /// Reports an open by a thread that did not come through the preload library.
    pub fn call_open_hook(&self, thread: u32) {
        if let Some(tell) = self.open_hook.get() {
            tell(thread);
        }
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
