//! Files that direct clients read and write themselves (RFD 015): the map that they share with the
//! mount, and how the mount keeps them away from a file.
//!
//! Invariants: a thread that holds a file's lock has its direct clients blocked. A change of a
//! file's size or pages invalidates the published map before direct clients are unblocked. So
//! direct clients run concurrently with other direct clients only.

use crate::Fs;
use crate::error::Result;
use crate::file::kernel_pages::KernelPages;
use crate::file::mmap_dirty::MmapDirtyPages;
use crate::file::write::page_count;
use crate::format::inode::{
    AppendExtent, Ino, InodeKind, SMALL_PAGES, SPANS, Time, span_holding, span_order,
};
use crate::txn::core::{Core, LiveInode};
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockWriteGuard, RawRwLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Maps of all files up to which those of closed files are kept for the next open.
const FILE_MAPS_KEPT_MAX: usize = 1024;

/// A file's map, shared between the mount and its direct clients.
pub trait SharedFileMap: Send + Sync {
    /// Blocks direct clients until [`SharedFileMap::reopen`], and returns when no client is in an
    /// operation.
    fn close(&self);
    /// Takes back one [`SharedFileMap::close`]. Clients enter again after the last.
    fn reopen(&self);
    /// Invalidates the published map. Clients are blocked.
    fn outdate(&self);
    /// Publishes the file's size, and the first page of each of its spans in the space; see
    /// [`span_index`]. Clients are blocked.
    fn publish(&self, size: u64, spans: &[u64]);
    /// Takes the time of the last write by a client, if it was not taken before.
    fn take_write_time(&self) -> Option<Time>;
    /// Whether the published map is invalid.
    fn is_outdated(&self) -> bool {
        true
    }
    /// Grants clients append space, after [`SharedFileMap::publish`]. `tail` is the content of the
    /// last page below the end. Clients are blocked.
    fn grant_append_space(&self, _growth: AppendExtent, _tail: &[u8]) {}
    /// The end of the file that clients report. `None` if they cannot be asked, or have another
    /// grant.
    fn append_end(&self, _growth: AppendExtent) -> Option<u64> {
        None
    }
    /// A descriptor of the file was closed. From now on direct clients check which file a
    /// descriptor number leads to before they use the number again.
    fn record_close(&self) {}
    /// Keeps direct clients from extending the file until [`SharedFileMap::unlock_end`]; other
    /// operations go on. False: a client is about to extend it.
    fn lock_end(&self) -> bool {
        true
    }
    /// Ends [`SharedFileMap::lock_end`].
    fn unlock_end(&self) {}
}

/// The span of a file that holds a page, and the page's index in it.
#[must_use]
pub fn span_index(page: u64) -> (usize, u64) {
    match page < SMALL_PAGES {
        true => {
            let (index, first) = span_holding(page);
            (index, page - first)
        }
        false => {
            let chunk = (page / SMALL_PAGES - 1) as usize;
            (SPANS + chunk, page % SMALL_PAGES)
        }
    }
}

/// Number of pages of the span with this index.
#[must_use]
pub fn span_pages(index: usize) -> u64 {
    match index < SPANS {
        true => 1 << span_order(index),
        false => SMALL_PAGES,
    }
}

/// A file's lock. Readers and overwriters share it; changes of size or pages take it exclusively.
/// Both block direct clients.
#[derive(Default)]
pub(crate) struct FileLock {
    pub(crate) lock: Arc<RwLock<()>>,
    file_map: OnceLock<Arc<dyn SharedFileMap>>,
    /// The kernel caches pages of a mapping of the file; a direct write would not change them.
    is_mmapped: AtomicBool,
    /// Pages stored into mappings and not synced.
    pub(crate) mmap_dirty: Mutex<MmapDirtyPages>,
    /// The state of the kernel's page cache for the file.
    pub(crate) kernel_pages: Arc<KernelPages>,
}

/// A shared lock of a file without direct clients: its size and pages do not change.
pub(crate) type FileReadGuard = ArcRwLockReadGuard<RawRwLock, ()>;

/// Blocks direct clients, if the file has any.
struct DirectBlock<'d>(Option<&'d Arc<dyn SharedFileMap>>);

impl<'d> DirectBlock<'d> {
    /// The caller holds the lock: a file map is set only under the exclusive lock.
    fn new(data: &'d FileLock) -> DirectBlock<'d> {
        let board = data.file_map.get();
        if let Some(board) = board {
            board.close();
        }
        DirectBlock(board)
    }
}

/// Direct clients are blocked for good.
pub(crate) struct PermanentDirectBlock<'d>(ManuallyDrop<DirectBlock<'d>>);

impl PermanentDirectBlock<'_> {
    /// Another thread has opened the file meanwhile.
    pub(crate) fn unblock(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}

impl Drop for DirectBlock<'_> {
    fn drop(&mut self) {
        if let Some(board) = self.0 {
            board.reopen();
        }
    }
}

/// A shared lock of a file, with its direct clients blocked.
pub(crate) struct SharedFileGuard<'d> {
    _direct_block: DirectBlock<'d>,
    _lock: RwLockReadGuard<'d, ()>,
}

/// An exclusive lock of a file, with its direct clients blocked.
pub(crate) struct ExclusiveFileGuard<'d> {
    direct_block: DirectBlock<'d>,
    _lock: RwLockWriteGuard<'d, ()>,
}

impl Drop for ExclusiveFileGuard<'_> {
    fn drop(&mut self) {
        if let Some(board) = self.direct_block.0 {
            board.outdate();
        }
    }
}

impl FileLock {
    pub(crate) fn read(&self) -> SharedFileGuard<'_> {
        let lock = self.lock.read();
        SharedFileGuard {
            _direct_block: DirectBlock::new(self),
            _lock: lock,
        }
    }

    pub(crate) fn write(&self) -> ExclusiveFileGuard<'_> {
        let lock = self.lock.write();
        ExclusiveFileGuard {
            direct_block: DirectBlock::new(self),
            _lock: lock,
        }
    }

    /// The shared lock, if it is free and the file has no map and no mmap-dirty pages.
    pub(crate) fn try_read(&self) -> Option<FileReadGuard> {
        let guard = self.lock.try_read_arc()?;
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    /// The exclusive lock, on the same conditions.
    pub(crate) fn try_write(&self) -> Option<ArcRwLockWriteGuard<RawRwLock, ()>> {
        let guard = self.lock.try_write_arc()?;
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    /// A lock for the same file without its map.
    fn without_file_map(&self) -> FileLock {
        FileLock {
            kernel_pages: Arc::clone(&self.kernel_pages),
            ..FileLock::default()
        }
    }

    /// Whether direct clients may know the file's pages or attributes. The caller holds the lock,
    /// shared or exclusively.
    pub(crate) fn has_current_map(&self) -> bool {
        self.file_map
            .get()
            .is_some_and(|board| !board.is_outdated())
    }

    /// Whether the kernel maps the file, and so caches pages of it.
    pub(crate) fn is_mmapped(&self) -> bool {
        self.is_mmapped.load(Ordering::Relaxed)
    }

    /// The map that its direct clients share.
    pub(crate) fn file_map(&self) -> Option<&Arc<dyn SharedFileMap>> {
        self.file_map.get()
    }

    /// The end of the file that direct clients report.
    pub(crate) fn direct_append_end(&self, growth: AppendExtent) -> Option<u64> {
        self.file_map.get()?.append_end(growth)
    }

    /// Blocks direct clients for good: no program has the file open. A thread that still uses a
    /// descriptor which another thread closes can do nothing any more. Returns the guard that can
    /// unblock them. The caller need not hold the lock: a map that is set only later is not
    /// blocked.
    pub(crate) fn block_direct_permanently(&self) -> PermanentDirectBlock<'_> {
        PermanentDirectBlock(ManuallyDrop::new(DirectBlock::new(self)))
    }
}

impl Core {
    /// The spans of a file, up to the end of its append extent. `None` if direct clients cannot
    /// have it: it has holes or shared spans, is damaged, or a write would remove privileges.
    fn direct_spans(&mut self, ino: Ino) -> Result<Option<(u64, Vec<u64>)>> {
        let inode = self.inode(ino)?;
        let is_sound = self.check_trusted(ino).is_ok() && self.is_running();
        if inode.kind() != InodeKind::File
            || !inode.is_dense_before_append()
            || !is_sound
            || inode.needs_remove_privs()
        {
            return Ok(None);
        }
        let pieces = self.pieces(&inode, 0, usize::MAX)?;
        let pages = match inode.append_extent {
            None => page_count(inode.size),
            Some(growth) => growth.limit_page,
        };
        let needed = match pages.checked_sub(1) {
            None => 0,
            Some(last) => span_index(last).0 + 1,
        };
        if pieces.iter().any(|piece| piece.is_shared) || pieces.len() < needed {
            return Ok(None);
        }
        let numbered = pieces.iter().enumerate();
        let in_order = numbered
            .take(needed)
            .all(|(index, piece)| span_index(piece.first_page) == (index, 0));
        let spans = pieces.iter().map(|piece| piece.span.page);
        Ok(in_order.then(|| (inode.size, spans.take(needed).collect())))
    }
}

impl Core {
    /// Records a write that the kernel does not know of.
    pub(crate) fn record_unseen_write(&mut self, ino: Ino) {
        self.kernel_stale_inos.insert(ino);
        self.unseen_writes.add(ino);
    }

    /// Records the time of direct clients' writes to a file, if there were any since the last call,
    /// and marks the file for a notification of the kernel.
    pub(crate) fn collect_direct_write(&mut self, ino: Ino) {
        let board = self
            .live_inodes
            .get(&ino)
            .and_then(|live| live.file_lock.file_map.get());
        if let Some(at) = board.and_then(|board| board.take_write_time()) {
            self.record_write_time(ino, at);
            self.record_unseen_write(ino);
        }
    }

    /// As [`Core::collect_direct_write`], for all files.
    pub(crate) fn collect_all_direct_writes(&mut self) {
        let mut boards = std::mem::take(&mut self.inos_with_file_map);
        boards.retain(|ino| self.live_inodes.contains_key(ino));
        boards
            .iter()
            .for_each(|&ino| self.collect_direct_write(ino));
        self.inos_with_file_map = boards;
    }
}

impl Fs {
    /// Publishes the current state of an open file to direct clients, in its map, or in the one
    /// that `make` returns if it has none. Returns the map; `None` if direct clients cannot have
    /// the file in its current state.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn publish_file_map(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        self.publish_file_map_as(ino, false, make)
    }

    /// As [`Fs::publish_file_map`], and grants append space if there is room.
    ///
    /// # Errors
    /// As [`Fs::publish_file_map`].
    pub fn publish_file_map_for_append(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        self.publish_file_map_as(ino, true, make)
    }

    fn publish_file_map_as(
        &self,
        ino: Ino,
        wants_append_space: bool,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        {
            let mut core = self.lock_core();
            let live = core.live_inodes.get_mut(&ino).filter(|live| live.opens > 0);
            let Some(live) = live else { return Ok(None) };
            // Keeps the file from being freed meanwhile: the issuer may be killed and its file
            // closed.
            live.opens += 1;
        }
        self.drop_kernel_pages(ino);
        let shown = self.publish_open_file_map(ino, wants_append_space, make);
        self.release(ino);
        shown
    }

    /// The caller has the file open.
    fn publish_open_file_map(
        &self,
        ino: Ino,
        wants_append_space: bool,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        let data = self.file_lock(ino)?;
        let _lock = data.lock.write();
        if data.is_mmapped() || data.kernel_pages.blocks_direct_clients() {
            return Ok(None);
        }
        let growth = self.inspect(|core| core.inode(ino))?.append_extent;
        if let (Some(growth), Some(board)) = (growth, data.file_map.get())
            && !board.is_outdated()
            && board.append_end(growth).is_some()
        {
            return Ok(Some(Arc::clone(board)));
        }
        let out = DirectBlock::new(&data);
        if let Some(board) = out.0 {
            board.outdate();
        }
        self.publish_size(ino)?;
        // Checked before `make` is called: a directory gets no map.
        if self.inspect(|core| core.direct_spans(ino))?.is_none() {
            return Ok(None);
        }
        if data.file_map.get().is_none()
            && let Some(board) = make()
        {
            // No other thread can: the lock is held.
            let _ = data.file_map.set(board);
            self.lock_core().inos_with_file_map.insert(ino);
        }
        let Some(board) = data.file_map.get() else {
            return Ok(None);
        };
        let lent = match wants_append_space {
            true => self.grant_append_space(ino, &data)?,
            false => None,
        };
        let Some((size, spans)) = self.inspect(|core| core.direct_spans(ino))? else {
            return Ok(None);
        };
        board.publish(size, &spans);
        if let Some((growth, tail)) = lent {
            board.grant_append_space(growth, &tail);
        }
        Ok(Some(Arc::clone(board)))
    }

    /// Disables direct access to a file that the kernel maps, for as long as the file is in use:
    /// the kernel caches pages of it.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn disable_direct_access(&self, ino: Ino) -> Result<()> {
        let data = self.file_lock(ino)?;
        let _alone = data.lock.write();
        if !data.is_mmapped.swap(true, Ordering::Relaxed) {
            data.block_direct_permanently();
        }
        self.with_reserve_fallback(|| self.publish_size(ino))
    }

    /// Whether a program maps a file, or stored into a mapping of it.
    #[must_use]
    pub fn is_mmapped(&self, ino: Ino) -> bool {
        let data = self.file_lock(ino);
        data.is_ok_and(|data| data.is_mmapped() || data.has_mmap_dirty())
    }

    /// Records that a program closed a descriptor of a file. When this returns, the direct clients
    /// of the file will check their descriptor numbers.
    pub fn record_close(&self, ino: Ino) {
        let data = self
            .lock_core()
            .live_inodes
            .get(&ino)
            .map(|live| Arc::clone(&live.file_lock));
        if let Some(board) = data.as_ref().and_then(|data| data.file_map.get()) {
            board.record_close();
        }
    }

    /// Releases the map of a file at its last close, if too many files have one: each map takes a
    /// file descriptor, and descriptors are limited. The caller holds the file exclusively, and
    /// only the caller has it open.
    pub(crate) fn release_file_map(&self, ino: Ino, data: &Arc<FileLock>) {
        if data.is_mmapped() || data.has_mmap_dirty() {
            return;
        }
        if self.lock_core().inos_with_file_map.len() <= FILE_MAPS_KEPT_MAX {
            return;
        }
        let ended = data.block_direct_permanently();
        let mut core = self.lock_core();
        core.collect_direct_write(ino);
        // A thread that waits for the lock, or had it, holds a reference. The core gives out new
        // ones.
        let is_unused = |live: &LiveInode| live.opens == 1 && Arc::strong_count(data) == 2;
        let live = core.live_inodes.get_mut(&ino);
        if let Some(live) =
            live.filter(|live| is_unused(live) && Arc::ptr_eq(&live.file_lock, data))
        {
            live.file_lock = Arc::new(data.without_file_map());
            core.inos_with_file_map.remove(&ino);
        } else {
            drop(core);
            ended.unblock();
        }
    }

    /// Records write times of direct clients. Call it periodically. Returns the files that they
    /// wrote to since the last call, for a notification of the kernel.
    ///
    /// A file with an append extent is left for later. Its attributes are not cached, and the
    /// kernel discards a size that it asked for before a notification. A seek to the end would then
    /// find the previous end (Linux, `fuse_file_llseek` and `attr_version`).
    pub fn collect_direct_writes(&self) -> Vec<Ino> {
        let mut core = self.lock_core();
        core.collect_all_direct_writes();
        let changed = std::mem::take(&mut core.kernel_stale_inos);
        let grows = |ino: &Ino| {
            core.inode(*ino)
                .is_ok_and(|inode| inode.append_extent.is_some())
        };
        let (later, now): (Vec<Ino>, Vec<Ino>) = changed.into_iter().partition(grows);
        core.kernel_stale_inos.extend(later);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicI64;

    #[derive(Default)]
    struct CloseCounter(AtomicI64);

    impl SharedFileMap for CloseCounter {
        fn close(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn reopen(&self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }

        fn outdate(&self) {}

        fn publish(&self, _size: u64, _spans: &[u64]) {}

        fn take_write_time(&self) -> Option<Time> {
            None
        }
    }

    /// A file may be opened and published to direct clients while the mount forgets it.
    #[test]
    fn file_map_reopens_match_closes() {
        for is_there_before in [false, true] {
            let data = FileLock::default();
            let counted = Arc::new(CloseCounter::default());
            let show = || drop(data.file_map.set(counted.clone()));
            if is_there_before {
                show();
            }
            let ended = data.block_direct_permanently();
            if !is_there_before {
                show();
            }
            let closed = || counted.0.load(Ordering::Relaxed);
            assert_eq!(closed(), i64::from(is_there_before));
            ended.unblock();
            assert_eq!(closed(), 0);
        }
    }
}
