//! Files that other processes read and write themselves, as guests (RFD 015): what they
//! are told of a file, and how they are kept away from it.
//!
//! Invariants: whoever holds a file's lock has its guests out. What changes a file's size
//! or pages outdates what they were told, before they are let in again. So guests meet
//! nobody but guests.

use crate::Fs;
use crate::core::{Core, LiveInode};
use crate::data::page_count;
use crate::error::Result;
use crate::format::{
    AppendExtent, Ino, InodeKind, SMALL_PAGES, SPANS, Time, span_holding, span_order,
};
use crate::kernel_pages::KernelPages;
use crate::mmap_dirty::MmapDirtyPages;
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockWriteGuard, RawRwLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Boards up to which those of closed files are kept for the next who opens them.
const FILE_MAPS_KEPT_MAX: usize = 1024;

/// What the guests of a file are told.
pub trait SharedFileMap: Send + Sync {
    /// Keeps guests away until [`SharedFileMap::reopen`], and returns once none is inside.
    fn close(&self);
    /// Lets guests in, but for others who keep them away.
    fn reopen(&self);
    /// What was told last is not so any more. Guests are away.
    fn outdate(&self);
    /// Tells how long the file is, and where each of its spans begins, in pages of the
    /// space; see [`span_index`]. Guests are away.
    fn publish(&self, size: u64, spans: &[u64]);
    /// When a guest wrote last, if nobody took note of it; this does.
    fn take_write_time(&self) -> Option<Time>;
    /// Whether what was told last is not so any more.
    fn is_outdated(&self) -> bool {
        true
    }
    /// Lets guests make the file longer; told behind [`SharedFileMap::show`]. `tail` is what its
    /// last page has below the end. Guests are away.
    fn grant_append_space(&self, _growth: AppendExtent, _tail: &[u8]) {}
    /// Where guests say that the file ends, if they can be asked and were lent just this.
    fn append_end(&self, _growth: AppendExtent) -> Option<u64> {
        None
    }
    /// A descriptor of the file was closed. From now on direct clients check which file a
    /// descriptor number leads to before they use the number again.
    fn record_close(&self) {}
    /// Keeps direct clients from making the file longer until [`SharedFileMap::unlock_end`]; they go
    /// on otherwise. False: one of them is about to.
    fn lock_end(&self) -> bool {
        true
    }
    /// Ends [`SharedFileMap::lock_end`].
    fn unlock_end(&self) {}
}

/// In which span of a file its page lies, and where in it.
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

/// Pages of a span of this number.
#[must_use]
pub fn span_pages(index: usize) -> u64 {
    match index < SPANS {
        true => 1 << span_order(index),
        false => SMALL_PAGES,
    }
}

/// A file's lock: reading and overwriting, against what changes its size or pages; and
/// both against guests.
#[derive(Default)]
pub(crate) struct FileLock {
    pub(crate) lock: Arc<RwLock<()>>,
    file_map: OnceLock<Arc<dyn SharedFileMap>>,
    /// The kernel keeps pages of the file, which guests would not change.
    is_mmapped: AtomicBool,
    /// What came from mappings and was not synced.
    pub(crate) mmap_dirty: Mutex<MmapDirtyPages>,
    /// What the kernel's page cache may have of the file.
    pub(crate) kernel_pages: Arc<KernelPages>,
}

/// Held, it keeps what changes a file's size or pages away. Of a file without guests.
pub(crate) type FileReadGuard = ArcRwLockReadGuard<RawRwLock, ()>;

/// Keeps guests out, if the file has any.
struct DirectBlock<'d>(Option<&'d Arc<dyn SharedFileMap>>);

impl<'d> DirectBlock<'d> {
    /// With the lock held: a board comes with it held alone.
    fn new(data: &'d FileLock) -> DirectBlock<'d> {
        let board = data.file_map.get();
        if let Some(board) = board {
            board.close();
        }
        DirectBlock(board)
    }
}

/// Guests are kept out for good.
pub(crate) struct PermanentDirectBlock<'d>(ManuallyDrop<DirectBlock<'d>>);

impl PermanentDirectBlock<'_> {
    /// Somebody has opened the file meanwhile.
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

/// The file is shared with those who leave its size and pages as they are.
pub(crate) struct SharedFileGuard<'d> {
    _direct_block: DirectBlock<'d>,
    _lock: RwLockReadGuard<'d, ()>,
}

/// Nobody else has the file.
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

    /// The lock, if nobody is in the way, there are no guests, and nothing of it is held.
    pub(crate) fn try_read(&self) -> Option<FileReadGuard> {
        let guard = self.lock.try_read_arc()?;
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    /// The lock alone, on the same conditions.
    pub(crate) fn try_write(&self) -> Option<ArcRwLockWriteGuard<RawRwLock, ()>> {
        let guard = self.lock.try_write_arc()?;
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    /// For the same file, whose board goes.
    fn without_file_map(&self) -> FileLock {
        FileLock {
            kernel_pages: Arc::clone(&self.kernel_pages),
            ..FileLock::default()
        }
    }

    /// Whether direct clients may know where the file's pages are, or what it is like. The
    /// caller holds the lock in some way.
    pub(crate) fn has_current_map(&self) -> bool {
        self.file_map
            .get()
            .is_some_and(|board| !board.is_outdated())
    }

    /// Whether the kernel keeps pages of it.
    pub(crate) fn is_mmapped(&self) -> bool {
        self.is_mmapped.load(Ordering::Relaxed)
    }

    /// What its direct clients are told.
    pub(crate) fn file_map(&self) -> Option<&Arc<dyn SharedFileMap>> {
        self.file_map.get()
    }

    /// Where guests say that the file ends.
    pub(crate) fn direct_append_end(&self, growth: AppendExtent) -> Option<u64> {
        self.file_map.get()?.append_end(growth)
    }

    /// Keeps guests out for good: nobody has the file open, and whoever still has
    /// something of it, such as a thread whose descriptor another one closes, may do
    /// nothing any more. Gives what takes it back. The lock need not be held: a file whose
    /// board comes only then is open to its guests.
    pub(crate) fn block_direct_permanently(&self) -> PermanentDirectBlock<'_> {
        PermanentDirectBlock(ManuallyDrop::new(DirectBlock::new(self)))
    }
}

impl Core {
    /// Where the spans of a file begin, up to the one that is lent, if guests can do with
    /// that: it has no holes, and shares nothing, and a write to it changes nothing else.
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
    /// A file was written to, and the kernel does not know it.
    pub(crate) fn record_unseen_write(&mut self, ino: Ino) {
        self.kernel_stale_inos.insert(ino);
        self.unseen_writes.add(ino);
    }

    /// Notes when guests wrote to a file, if they did since, and that the kernel is to be
    /// told of it.
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

    /// The same of all files.
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
    /// Tells guests what an open file is like now, by its board, or by the one that
    /// `make` makes if it has none. Returns the board; none: guests cannot have the file
    /// as it is.
    ///
    /// # Errors
    /// `ESTALE`, and what the volume says.
    pub fn publish_file_map(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        self.publish_file_map_as(ino, false, make)
    }

    /// The same for guests that want to make it longer, and may if there is room.
    ///
    /// # Errors
    /// As [`Fs::show`].
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
            // Else it could be closed and freed meanwhile: who asks may be killed.
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
        // Looked at first: a directory gets no board.
        if self.inspect(|core| core.direct_spans(ino))?.is_none() {
            return Ok(None);
        }
        if data.file_map.get().is_none()
            && let Some(board) = make()
        {
            // Nobody else can: the lock is held.
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

    /// A file will be mapped by the kernel, which keeps pages of it: it has no guests any more
    /// as long as somebody uses it.
    ///
    /// # Errors
    /// `ESTALE`, and what the volume says.
    pub fn disable_direct_access(&self, ino: Ino) -> Result<()> {
        let data = self.file_lock(ino)?;
        let _alone = data.lock.write();
        if !data.is_mmapped.swap(true, Ordering::Relaxed) {
            data.block_direct_permanently();
        }
        self.with_reserve_fallback(|| self.publish_size(ino))
    }

    /// Whether a program has said that it maps a file, or stored into a mapping of it.
    #[must_use]
    pub fn is_mmapped(&self, ino: Ino) -> bool {
        let data = self.file_lock(ino);
        data.is_ok_and(|data| data.is_mmapped() || data.has_mmap_dirty())
    }

    /// A program closed a descriptor of a file: before this returns, the direct clients of the
    /// file are told to check their descriptor numbers.
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

    /// Lets go of the board of a file that only the caller has open, who closes it, if closed
    /// files have many: each takes a descriptor, and there may be no more than some. The caller
    /// holds the file alone.
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
        // Whoever waits for the lock, or had it, has a reference; new ones come from the core.
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

    /// Notes when guests wrote. To be called once in a while. Returns the files that they
    /// wrote to since, and that the kernel may be told of. Not while they make one longer: its
    /// attributes are not kept then, and the kernel takes no answer for the size that was asked
    /// for before it was told; who seeks the end would find that of the last time (Linux,
    /// `fuse_file_llseek` and `attr_version`).
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

    /// Who opens a file has it shown to guests while it was just being forgotten.
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
