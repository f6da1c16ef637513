//! Files that guests make longer (RFD 016): what their last page says, and how the mount
//! takes their end over.
//!
//! Invariants: a file that grows has one footer, once something was written to it; nobody
//! but guests writes to it before it is settled, and it is settled while they are out.
//! What lies behind its end is seen by nobody.

use crate::Fs;
use crate::core::{Core, Tx, damaged_inode};
use crate::data::{PAGE, page_count};
use crate::error::{FsError, Result};
use crate::format::{AppendExtent, Corruption, FILE_BYTES_MAX, Ino, Inode, NEEDS_TRIM, Page};
use crate::map::{self, PageRun};
use crate::shared_file_map::FileLock;
use pagemesh_base::bytes::{field, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::ops::Range;

/// Bytes at the end of the last page: nonce and end.
pub const FOOTER_BYTES: usize = 16;
const FOOTER_AT: usize = PAGE_BYTES - FOOTER_BYTES;
/// Pages that one write at the end changes: 64 KiB, the part that begins them, and a page
/// for the footer. What is longer is the kernel's, where the call into it costs least.
pub const APPEND_PAGES_MAX: usize = 18;
/// Pages behind the end that are freed together with settling. There is one at most, unless
/// a write that failed was longer.
const CLEARED_PAGES_MAX: u64 = APPEND_PAGES_MAX as u64;

/// The page of the file that holds the footer of this end.
#[inline]
#[must_use]
pub fn footer_page(end: u64) -> u64 {
    (end + FOOTER_BYTES as u64 - 1) / PAGE
}

/// The end that a page of the file tells, if it holds a footer of this growth.
fn footer_end(growth: AppendExtent, page: u64, bytes: &Page) -> Option<u64> {
    let end = get_u64(bytes, FOOTER_AT + 8);
    let is_here = end <= FILE_BYTES_MAX && footer_page(end) == page;
    (field(bytes, FOOTER_AT) == growth.nonce.to_le_bytes() && is_here).then_some(end)
}

/// Whole pages that one record puts in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailWrite {
    /// The first page of the file.
    pub first_page: u64,
    /// How many.
    pub page_count: usize,
    /// Where the file ends then.
    pub end: u64,
}

impl TailWrite {
    /// Of a write of so many bytes to a place in the last page of a file, or at its end;
    /// none: there is no room for it in what was lent.
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

    /// Fills the pages with the bytes written there. They begin with what the last page has below the
    /// old `end`.
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
    /// Pages that may be mapped behind those that it counts.
    pub(crate) fn granted_pages(&self) -> u64 {
        let reach = self.append_extent.map_or(0, |growth| growth.limit_page);
        reach.saturating_sub(page_count(self.size))
    }
}

impl Core {
    /// Where a file ends, which guests may have made longer.
    pub(crate) fn file_end(&mut self, ino: Ino, inode: &Inode) -> Result<u64> {
        let Some(growth) = inode.append_extent else {
            return Ok(inode.size);
        };
        let live = self.live_inodes.get(&ino);
        let end = match live.and_then(|live| live.file_lock.direct_append_end(growth)) {
            Some(end) => end,
            None => self.find_footer_end(ino, inode, growth)?,
        };
        // What guests say may be anything.
        Ok(end.clamp(inode.size, growth.limit_page * PAGE))
    }

    /// The end that the pages of a growing file tell.
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
                // One below another was before it, and is all that is surely whole.
                end = told;
                found = found.max(page);
            }
        }
        Ok(end)
    }

    /// Where what is lent to a file begins, in the file and in the space.
    fn granted_run(&mut self, ino: Ino, inode: &Inode) -> Result<(u64, PageRun)> {
        let first = inode.size / PAGE;
        let run = map::find(&inode.map, first, &mut |page| self.page(page))?;
        let run = run.filter(|run| !run.is_shared);
        let what = || Corruption("it grows where it has no pages of its own".into());
        Ok((first, run.ok_or_else(|| damaged_inode(ino, what()))?))
    }

    /// Pages of the file that are mapped in what was lent, in order.
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
    /// Puts the end of a growing file into its inode. Returns whether more is left to be
    /// freed behind it.
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

    /// Lends a file the rest of the span in which it ends.
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
    /// Puts the end of a growing file into its inode, and frees what lies behind it. The
    /// caller holds the file alone, or nobody else can.
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

    /// The same when a file that had guests is closed by the last one, who has it open until
    /// then. What fails is tried again later. Whether it is settled.
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

    /// Lends a dense file room behind its end, and tells what its last page has below it;
    /// none: there is no room. The caller holds the file alone, with its guests out.
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
        // Whoever asks how long the file is goes by what guests say from now on.
        self.notify_uncacheable(ino);
        let len = (tail.end - tail.start) as usize;
        let bytes = match len {
            0 => Vec::new(),
            len => self.inspect(|core| Ok(core.data_page(tail.start / PAGE)?[..len].to_vec()))?,
        };
        Ok(Some((growth, bytes)))
    }

    /// A number that no growth had, and that nobody can guess.
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

    /// Tells whoever keeps attributes of a file that it must not from now on.
    pub(crate) fn notify_uncacheable(&self, ino: Ino) {
        if let Some(tell) = self.append_hook.get() {
            tell(ino);
        }
    }

    /// Has somebody told whenever guests begin to make a file longer, before they do, or when
    /// pages of it begin to be held: who keeps its attributes must not from then on
    /// ([`crate::Attr::has_volatile_size`]). Once.
    pub fn set_append_hook(&self, tell: impl Fn(Ino) + Send + Sync + 'static) {
        // A second one has nothing to tell.
        let _ = self.append_hook.set(Box::new(tell));
    }

    /// Calls `tell` before each open that did not come through the preload library, with the
    /// thread number that the kernel gives. Once.
    pub fn set_open_hook(&self, tell: impl Fn(u32) + Send + Sync + 'static) {
        // A second one has nothing to tell.
        let _ = self.open_hook.set(Box::new(tell));
    }

    /// A thread opens a file, and not through the preload library.
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

    /// A file that is written through what is composed is what was written, and its end is
    /// told by one page alone.
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
